"""What else goes on in the server: who listens, what is open, how it is set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dispatch_core.cli.checks.finding import Finding, Verdict, age, all_rows, hidden, one_row
from dispatch_core.database import Connection

__all__ = ["listeners", "settings", "transactions"]

MANY_LISTENERS: Final = 100
OLD_TRANSACTION_SECONDS: Final = 60.0

# A listener's last statement is seldom LISTEN itself, but ours are known by name. That and the database are hidden from
# nobody; the statement and the kind of backend are.
_LISTENERS: Final = """
select count(*) filter (where a.application_name like '% listener %' or a.query ilike 'listen%') as listeners,
       count(*) filter (where a.query = '<insufficient privilege>') as hidden,
       pg_catalog.pg_notification_queue_usage() as queue
from pg_catalog.pg_stat_activity as a
where a.datname = current_database() and a.pid <> pg_backend_pid()
"""


async def listeners(conn: Connection) -> list[Finding]:
    row = await one_row(conn, _LISTENERS)
    values = {"listeners": row["listeners"], "hidden_sessions": row["hidden"], "queue_usage": row["queue"]}
    text = f"{row['listeners']} in this database{hidden(row['hidden'])}"
    if row["queue"] > 0.1:
        found = f"the notification queue is {row['queue']:.0%} full: a session listens and stays in one transaction"
        mend = "end that session; when the queue is full, every commit with a NOTIFY fails"
        return [Finding("listeners", "warn", found, mend, values)]
    if row["listeners"] > MANY_LISTENERS:
        mend = "fewer, larger processes: before PostgreSQL 19 every ring wakes every listener"
        return [Finding("listeners", "warn", text, mend, values)]
    return [Finding("listeners", "pass", text, None, values)]


_OLDEST: Final = """
select a.pid, a.application_name, a.state, extract(epoch from clock_timestamp() - a.xact_start)::float8 as seconds
from pg_catalog.pg_stat_activity as a
where a.xact_start is not null and a.backend_type <> 'autovacuum worker' and a.pid <> pg_backend_pid()
order by a.xact_start
limit 1
"""
# The last two hold back the clean-up just so, and are visible to everybody.
_HORIZON: Final = """
select (select count(*) from pg_catalog.pg_stat_activity as a
        where a.datid is not null and a.query = '<insufficient privilege>') as hidden,
       (pg_snapshot_xmax(pg_current_snapshot())::text::numeric
        - pg_snapshot_xmin(pg_current_snapshot())::text::numeric)::bigint as behind,
       (select extract(epoch from clock_timestamp() - min(x.prepared))::float8 from pg_catalog.pg_prepared_xacts as x)
         as prepared_seconds,
       (select max(greatest(age(s.xmin), age(s.catalog_xmin)))::bigint from pg_catalog.pg_replication_slots as s)
         as slot_age
"""


async def transactions(conn: Connection) -> list[Finding]:
    horizon = await one_row(conn, _HORIZON)
    rows = await all_rows(conn, _OLDEST)
    seconds = float(rows[0]["seconds"]) if rows else 0.0
    values = {"oldest_seconds": round(seconds, 3), "transactions_behind": horizon["behind"], **dict(horizon)}
    findings = []
    if seconds > OLD_TRANSACTION_SECONDS:
        who = f"pid {rows[0]['pid']} ({rows[0]['application_name'] or 'no name'}, {rows[0]['state']})"
        found = f"the oldest is {age(seconds)} old, of {who}: dead queue rows cannot be cleaned up meanwhile"
        mend = f"select pg_terminate_backend({rows[0]['pid']}); set idle_in_transaction_session_timeout"
        findings.append(Finding("transactions", "warn", found, mend, values))
    if (horizon["prepared_seconds"] or 0) > OLD_TRANSACTION_SECONDS:
        found = f"a prepared transaction has been open for {age(horizon['prepared_seconds'])}"
        findings.append(Finding("transactions", "warn", found, "commit or roll it back: pg_prepared_xacts", values))
    if (horizon["slot_age"] or 0) > 1_000_000:
        found = f"a replication slot keeps the rows of the last {horizon['slot_age']:,} transactions"
        findings.append(Finding("transactions", "warn", found, "see pg_replication_slots", values))
    if findings:
        return findings
    oldest = f"the oldest is {age(seconds)} old" if rows else "none is open"
    return [Finding("transactions", "pass", f"{oldest}{hidden(horizon['hidden'])}", None, values)]


_SETTINGS: Final = """
select s.name, s.setting from pg_catalog.pg_settings as s where s.name = any ($1::text[])
union all
select 'used_connections', count(*)::text from pg_catalog.pg_stat_activity as a where a.datid is not null
"""

_HARMFUL: Final[tuple[tuple[str, Callable[[str], bool], Verdict, str], ...]] = (
    ("fsync", lambda v: v == "off", "warn", "a crash of the machine may destroy the database"),
    ("full_page_writes", lambda v: v == "off", "warn", "a crash of the machine may destroy the database"),
    ("synchronous_commit", lambda v: v == "off", "warn", "a crash loses jobs whose enqueue has been answered"),
    ("autovacuum", lambda v: v == "off", "warn", "the queue grows with rows that are dead"),
    ("track_counts", lambda v: v == "off", "warn", "autovacuum does nothing without it"),
    ("default_transaction_read_only", lambda v: v == "on", "fail", "nothing can be written"),
    ("default_transaction_isolation", lambda v: v != "read committed", "warn", "claims fail with 40001 under load"),
    ("row_security", lambda v: v == "off", "fail", "every statement on a tenant table is refused"),
    ("server_encoding", lambda v: v != "UTF8", "fail", "names and headers are Unicode: the database must be UTF8"),
    ("statement_timeout", lambda v: 0 < int(v) < 5000, "warn", "batches may be cut off"),
    ("transaction_timeout", lambda v: 0 < int(v) < 5000, "warn", "batches may be cut off"),
    ("idle_session_timeout", lambda v: 0 < int(v) < 60000, "warn", "idle connections are cut again and again"),
    ("log_statement", lambda v: v == "all", "warn", "the server's log holds every body and header"),
)


async def settings(conn: Connection) -> list[Finding]:
    names = [name for name, *_ in _HARMFUL] + ["max_connections", "superuser_reserved_connections"]
    values = {row["name"]: row["setting"] for row in await all_rows(conn, _SETTINGS, names)}
    findings = [
        Finding("settings", verdict, f"{name} = {values[name]}: {harm}", f"change {name}", {name: values[name]})
        for name, hurts, verdict, harm in _HARMFUL
        if name in values and hurts(values[name])
    ]
    used, most = int(values["used_connections"]), int(values["max_connections"])
    most -= int(values.get("superuser_reserved_connections", 0))
    if used > most * 0.8:
        mend = "raise max_connections, or put a pooler before the pools and a direct DSN beside it for listening"
        findings.append(Finding("settings", "warn", f"{used} of {most} connections are in use", mend, values))
    if findings:
        return findings
    return [Finding("settings", "pass", f"none that hurts; {used} of {most} connections are in use", None, values)]
