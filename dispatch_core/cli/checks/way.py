"""The way to the database: how long it takes, and whether something stands in it."""

from __future__ import annotations

import secrets
import statistics
import time
from typing import Final

import anyio

from dispatch_core.cli.checks.finding import Finding, all_rows, connection, ms, one_row
from dispatch_core.database import Connection, mapped_errors
from dispatch_core.errors import RelayDispatchError

__all__ = ["clock", "listen", "pooler", "reach", "statements", "version"]

OLDEST_SERVER: Final = 150000
NEWEST_TESTED: Final = 18
LARGE_SKEW_SECONDS: Final = 2.0
SLOW_LISTEN_SECONDS: Final = 0.5
LISTEN_TIMEOUT_SECONDS: Final = 3.0
ROUND_TRIPS: Final = 5

_WHERE: Final = """
select current_database() as database, session_user as login, inet_server_addr() is null as local,
       (select s.ssl from pg_catalog.pg_stat_ssl as s where s.pid = pg_backend_pid()) as ssl
"""


async def reach(conn: Connection, seconds: float) -> list[Finding]:
    row = await one_row(conn, _WHERE)
    times = []
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        with mapped_errors():
            await conn.execute("select 1")
        times.append(time.perf_counter() - started)
    trip = statistics.median(times)
    text = f"{row['login']} in {row['database']}: connected in {ms(seconds)}, a round trip takes {ms(trip)}"
    values = {
        "login": row["login"],
        "database": row["database"],
        "connect_ms": round(seconds * 1000, 2),
        "round_trip_ms": round(trip * 1000, 2),
        "ssl": bool(row["ssl"]),
    }
    return [Finding("reach", "pass", text, values=values)]


async def version(conn: Connection) -> list[Finding]:
    row = await one_row(
        conn,
        "select current_setting('server_version_num')::int as number, current_setting('server_version') as text,"
        " pg_is_in_recovery() as standby",
    )
    number, values = row["number"], {"server_version": row["text"], "standby": row["standby"]}
    text = f"PostgreSQL {row['text']}"
    if row["standby"]:
        mend = "name the primary, e.g. with target_session_attrs=read-write"
        return [Finding("version", "fail", f"{text}, a standby: nothing can be written here", mend, values)]
    if number < OLDEST_SERVER:
        return [Finding("version", "fail", f"{text} is too old", "upgrade to PostgreSQL 15 or newer", values)]
    if number // 10000 > NEWEST_TESTED:
        return [Finding("version", "warn", f"{text} is newer than what this version was tested with", None, values)]
    return [Finding("version", "pass", text, values=values)]


async def pooler(conn: Connection, *, separate: bool) -> list[Finding]:
    # The process id that the server tells at log-in is a pooler's own invention where there is one.
    told = conn.get_server_pid()
    pids = {(await one_row(conn, "select pg_backend_pid() as pid"))["pid"] for _ in range(3)}
    if pids == {told}:
        return [Finding("pooler", "pass", "none: the connection is PostgreSQL's own", values={"pooler": False})]
    values = {"pooler": True, "backends_seen": len(pids)}
    if separate:
        return [Finding("pooler", "pass", "one stands before PostgreSQL, and listening goes past it", None, values)]
    mend = "set RELAY_DISPATCH_LISTEN_DSN to PostgreSQL itself, or wake-ups come by polling only"
    return [Finding("pooler", "warn", "one stands before PostgreSQL, and listening goes through it", mend, values)]


async def statements(dsn: str, timeout: float) -> list[Finding]:
    async with connection(dsn, timeout, statement_cache_size=100) as conn:
        try:
            for n in range(6):
                await all_rows(conn, "select $1::int + 1 as n", n)
        except RelayDispatchError as error:
            mend = "set RELAY_DISPATCH_STATEMENT_CACHE_SIZE=0, or let the pooler keep prepared statements"
            return [Finding("statements", "fail", f"prepared statements do not last: {error}", mend)]
    return [Finding("statements", "pass", "prepared statements last from transaction to transaction")]


async def listen(dsn: str, timeout: float) -> list[Finding]:
    channel, times = f"s2r_doctor_{secrets.token_hex(6)}", []
    heard = anyio.Event()

    def hear(*_: object) -> None:
        heard.set()

    mend = "give PostgreSQL itself in RELAY_DISPATCH_LISTEN_DSN; until then wake-ups come by polling only"
    async with connection(dsn, timeout) as conn:
        with mapped_errors():
            await conn.add_listener(channel, hear)
            for _ in range(ROUND_TRIPS):
                heard, started = anyio.Event(), time.perf_counter()
                await conn.execute("select pg_catalog.pg_notify($1, '')", channel)
                with anyio.move_on_after(LISTEN_TIMEOUT_SECONDS):
                    await heard.wait()
                if not heard.is_set():
                    found = f"LISTEN hears nothing within {LISTEN_TIMEOUT_SECONDS:g} s"
                    return [Finding("listen", "fail", found, mend)]
                times.append(time.perf_counter() - started)
            await conn.remove_listener(channel, hear)
    trip = statistics.median(times)
    values = {"round_trip_ms": round(trip * 1000, 2), "worst_ms": round(max(times) * 1000, 2)}
    text = f"a NOTIFY comes back in {ms(trip)} (at worst {ms(max(times))})"
    if trip > SLOW_LISTEN_SECONDS:
        mend = "look for a slow disk or a slow link: the commit of a NOTIFY waits for its WAL to be flushed"
        return [Finding("listen", "warn", text, mend, values)]
    return [Finding("listen", "pass", text, None, values)]


async def clock(conn: Connection) -> list[Finding]:
    best: tuple[float, float] | None = None
    for _ in range(ROUND_TRIPS):
        before = time.time()
        with mapped_errors():
            theirs = await conn.fetchval("select extract(epoch from clock_timestamp())::float8")
        after = time.time()
        # The shortest round trip bounds the error best.
        if best is None or after - before < best[1]:
            best = (float(theirs) - (before + after) / 2, after - before)
    assert best is not None
    skew, trip = best
    values = {"skew_ms": round(skew * 1000, 2), "uncertainty_ms": round(trip * 500, 2)}
    text = f"the database's is {ms(abs(skew))} {'ahead' if skew > 0 else 'behind'} (±{ms(trip / 2)})"
    if abs(skew) > LARGE_SKEW_SECONDS:
        mend = "set this machine's clock by NTP; ttl= is safe all the same, expires_at= is off by as much"
        return [Finding("clock", "warn", text, mend, values)]
    return [Finding("clock", "pass", text, None, values)]
