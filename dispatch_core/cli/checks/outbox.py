"""The outbox: what was given up, what nobody answers for, and whether anybody drains."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from dispatch_core.cli.checks.finding import Finding, age, one_row
from dispatch_core.database import Connection
from dispatch_core.errors import TenancyDeniedError
from dispatch_core.outbox_repository import OutboxRepository
from dispatch_core.settings import OutboxSettings

__all__ = ["events"]

MANY_TENANTS: Final = 1000
"""So many are looked at."""
COUNTED: Final = 10_000
"""relay.outbox_health counts no further, for each tenant."""
OLD_BACKLOG_SECONDS: Final = 60.0

_MAY_LOOK: Final = (
    "select count(*) > 0 as may from pg_catalog.pg_proc as p where p.pronamespace = 'relay'::regnamespace"
    " and p.proname = 'outbox_health' and pg_catalog.has_function_privilege(p.oid, 'execute')"
)
# Drainers are known by the names of their sessions, which are hidden from nobody.
_DRAINERS: Final = """
select count(*) as drainers from pg_catalog.pg_stat_activity as a
where a.datname = current_database() and a.pid <> pg_backend_pid() and a.application_name ilike '%outbox%'
"""


async def events(conn: Connection, rooms: Sequence[str]) -> list[Finding]:
    if "outbox" not in rooms:
        return [_found("the room is not installed here; events need: relay-dispatch db migrate --only outbox")]
    not_seen = "not looked at: events are seen by gateways and operators, and this login is neither"
    if not (await one_row(conn, _MAY_LOOK))["may"]:
        return [_found(not_seen)]
    verbs, stale_seconds = OutboxRepository(conn), OutboxSettings.load().stale_claim_seconds
    try:
        tenants = await verbs.tenants()
        rows = await verbs.health(tenants[:MANY_TENANTS], stale_seconds=stale_seconds)
    except TenancyDeniedError:
        return [_found(not_seen)]
    drainers = (await one_row(conn, _DRAINERS))["drainers"]
    values: dict[str, object] = {
        "tenants": len(rows),
        "parked": sum(row["parked"] for row in rows),
        "parked_seconds": _longest(rows, "parked_for"),
        "stale_claims": sum(row["stale"] for row in rows),
        "due_seconds": _longest(rows, "due_for"),
        "drainers_seen": drainers,
    }
    findings = [*_parked(rows, values), *_stale(rows, values, stale_seconds), *_backlog(rows, values, drainers)]
    if findings:
        return findings
    due = _longest(rows, "due_for")
    backlog = "nothing is due" if due is None else f"the oldest event that is due has been so for {age(due)}"
    some = "" if len(tenants) <= MANY_TENANTS else f" (of the first {MANY_TENANTS:,} of {len(tenants):,} tenants)"
    return [_found(f"nothing parked, no stale claim; {backlog}{some}", values)]


def _found(text: str, values: dict[str, object] | None = None) -> Finding:
    return Finding("outbox", "pass", text, values=values or {})


def _parked(rows: Sequence[Any], values: dict[str, object]) -> list[Finding]:
    count = sum(row["parked"] for row in rows)
    if not count:
        return []
    more = "more than " if any(row["parked"] >= COUNTED for row in rows) else ""
    what = "event is" if count == 1 and not more else "events are"
    found = f"{more}{count:,} {what} parked ({_kinds(rows, 'parked_kinds')}), the oldest for {_age(rows, 'parked_for')}"
    mend = "relay-dispatch outbox list --state parked; then outbox retry, or outbox purge"
    return [Finding("outbox", "warn", found, mend, values)]


def _stale(rows: Sequence[Any], values: dict[str, object], stale_seconds: float) -> list[Finding]:
    count = sum(row["stale"] for row in rows)
    if not count:
        return []
    what = "claim is" if count == 1 else "claims are"
    found = (
        f"{count:,} {what} older than {stale_seconds:g} s, the oldest {_age(rows, 'claimed_for')}: the drainer of it is"
        " gone, and no other has taken it back"
    )
    mend = "start a drainer, which takes them back: OUTBOX_DRAIN_INTERVAL_SEC, or relay-dispatch outbox drain"
    return [Finding("outbox", "warn", found, mend, values)]


def _backlog(rows: Sequence[Any], values: dict[str, object], drainers: int) -> list[Finding]:
    due = _longest(rows, "due_for")
    if due is None or due <= OLD_BACKLOG_SECONDS:
        return []
    found = f"events have been due for {age(due)} ({_kinds(rows, 'due_kinds')})"
    if not drainers and not any(row["claimed"] for row in rows):
        found += ", and nobody seems to drain: no event is claimed, and no session here is a drainer's"
        mend = "set OUTBOX_DRAIN_INTERVAL_SEC where the gateway runs, or run relay-dispatch outbox drain --watch"
        return [Finding("outbox", "warn", found, mend, values)]
    found += ", although somebody drains"
    mend = "is there a sink for these kinds? else more drainers, or a higher OUTBOX_CONCURRENCY"
    return [Finding("outbox", "warn", found, mend, values)]


def _kinds(rows: Sequence[Any], name: str) -> str:
    kinds = sorted({kind for row in rows for kind in row[name] or ()})
    shown = ", ".join(kind if kind.isprintable() else ascii(kind) for kind in kinds[:4])
    return shown + (f" and {len(kinds) - 4} more kinds" if len(kinds) > 4 else "")


def _longest(rows: Sequence[Any], name: str) -> float | None:
    times: list[timedelta] = [row[name] for row in rows if row[name] is not None]
    return max(times).total_seconds() if times else None


def _age(rows: Sequence[Any], name: str) -> str:
    return age(_longest(rows, name) or 0.0)
