"""Durable jobs: what waits for a person, what nobody takes back, and whether anybody works and sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from dispatch_core.cli.checks.finding import Finding, age, one_row
from dispatch_core.database import Connection
from dispatch_core.durable_health import DurableHealth
from dispatch_core.errors import TenancyDeniedError

__all__ = ["jobs"]

MANY_TENANTS: Final = 1000
"""So many are looked at."""
GRACE_SECONDS: Final = 60.0
"""A sweep is made every few seconds, and a lease is taken back by the next: what is older than this is forgotten."""
IDLE_SECONDS: Final = 60.0

SWEEPS: Final = {"lease": "leases that have run out", "finish": "jobs that nobody has ended"}
"""Those that relays make; 'remove' is a gateway's, and late removals hurt nobody."""


async def jobs(conn: Connection) -> list[Finding]:
    health = DurableHealth(conn)
    try:
        tenants = await health.tenants()
        rows = await health.health(tenants[:MANY_TENANTS])
        turns = await health.turns()
    except TenancyDeniedError:
        return [_found("not looked at: this login is a worker's, which sees no job, or bound to no tenant")]
    now: datetime = (await one_row(conn, "select relay.now() as now"))["now"]
    values: dict[str, object] = {
        "tenants": len(rows),
        "review_jobs": _sum(rows, "review"),
        "review_chunks": _sum(rows, "review_chunks"),
        "review_seconds": _longest(rows, "review_for"),
        "lost_chunks": _sum(rows, "lost"),
        "lost_seconds": _longest(rows, "lost_for"),
        "idle_jobs": _sum(rows, "idle"),
        "idle_seconds": _longest(rows, "idle_for"),
        "paused_jobs": _sum(rows, "paused"),
        "sweeps_overdue_seconds": {name: (now - due).total_seconds() for name, due in sorted(turns.items())},
    }
    stuck = [*_lost(rows, values), *_idle(rows, values)]
    # Where nothing is stuck nobody has to sweep.
    findings = [*_review(rows, values), *stuck, *(_sweeps(turns, now, values) if stuck else ())]
    if findings:
        return findings
    paused = f"; paused: {values['paused_jobs']}" if values["paused_jobs"] else ""
    some = "" if len(tenants) <= MANY_TENANTS else f" (of the first {MANY_TENANTS:,} of {len(tenants):,} tenants)"
    return [_found(f"none waits for a person, no lease is left lying{paused}{some}", values)]


def _found(text: str, values: dict[str, object] | None = None) -> Finding:
    return Finding("durable jobs", "pass", text, values=values or {})


def _warn(found: str, mend: str, values: dict[str, object]) -> Finding:
    return Finding("durable jobs", "warn", found, mend, values)


def _review(rows: Sequence[Any], values: dict[str, object]) -> list[Finding]:
    count, chunks = _sum(rows, "review"), _sum(rows, "review_chunks")
    if not count:
        return []
    what = f"{count:,} {'job waits' if count == 1 else 'jobs wait'} for a person"
    found = (
        f"{what} ({_kinds(rows, 'review_kinds')}), the first for {_age(rows, 'review_for')}: {chunks:,} of their chunks"
    )
    return [
        _warn(found, "relay-dispatch durable list --status needs_review; then durable show, durable resolve", values)
    ]


def _lost(rows: Sequence[Any], values: dict[str, object]) -> list[Finding]:
    count, seconds = _sum(rows, "lost"), _longest(rows, "lost_for")
    if seconds is None or seconds <= GRACE_SECONDS:
        return []
    what = "chunk has" if count == 1 else "chunks have"
    found = f"{count:,} {what} lost their lease, the first {age(seconds)} ago, and nobody has taken them back"
    return [_warn(found, "start a relay with a chunk handler, of whatever kind: each takes back for all", values)]


def _idle(rows: Sequence[Any], values: dict[str, object]) -> list[Finding]:
    count, seconds = _sum(rows, "idle"), _longest(rows, "idle_for")
    if seconds is None or seconds <= IDLE_SECONDS:
        return []
    what = "job has" if count == 1 else "jobs have"
    found = (
        f"{count:,} {what} chunks to claim, and none under way, one for {age(seconds)} ({_kinds(rows, 'idle_kinds')})"
    )
    mend = "start a relay with a chunk handler for that kind, whose login is bound to the tenant"
    return [_warn(found, mend, values)]


def _sweeps(turns: dict[str, datetime], now: datetime, values: dict[str, object]) -> list[Finding]:
    late = [what for name, what in SWEEPS.items() if name not in turns or now - turns[name] > _GRACE]
    if not late:
        return []
    found = f"nobody looks for {' and '.join(late)}: the turns of these sweeps are not taken"
    return [_warn(found, "start a relay with a chunk handler: it sweeps every DURABLE_SWEEP_SECONDS", values)]


_GRACE: Final = timedelta(seconds=GRACE_SECONDS)


def _kinds(rows: Sequence[Any], name: str) -> str:
    kinds = sorted({kind for row in rows for kind in row[name] or ()})
    shown = ", ".join(kind if kind.isprintable() else ascii(kind) for kind in kinds[:4])
    return shown + (f" and {len(kinds) - 4} more kinds" if len(kinds) > 4 else "")


def _sum(rows: Sequence[Any], name: str) -> int:
    return sum(row[name] for row in rows)


def _longest(rows: Sequence[Any], name: str) -> float | None:
    times: list[timedelta] = [row[name] for row in rows if row[name] is not None]
    return max(times).total_seconds() if times else None


def _age(rows: Sequence[Any], name: str) -> str:
    return age(_longest(rows, name) or 0.0)
