"""Check that every accepted request ended exactly once, from three sides that do not know of each other.

* the gateway: which jobs were accepted, and how it was told that each ended;
* the database, read as an operator: which jobs are stored, and how each ended;
* the relays: how many jobs each process says it has ended, and which runs of handlers began and ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from dispatch_core.database import close_connection, connect, mapped_errors
from gateway_sdk.demo.relays import RelayReport
from gateway_sdk.demo.traffic import Ending

__all__ = ["Check", "StoredJob", "audit", "read_stored"]

_BIND: Final = "select pg_catalog.set_config('app.tenant_id', $1, true)"
_STORED: Final = """
select job_id, status, attempt, max_attempts, claimed_by, completed_at is not null as stored
from relay.s2r_relay_dispatch
"""


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job as an operator sees it. `stored`: its end is stored; a row still in the queue may only read as ended."""

    status: str
    attempt: int
    max_attempts: int
    claimed_by: str | None
    stored: bool


@dataclass(frozen=True, slots=True)
class Check:
    """One statement about the run, and whether it is true."""

    name: str
    ok: bool
    text: str


async def read_stored(operator_dsn: str, tenants: Iterable[str]) -> dict[UUID, StoredJob]:
    """Read every job of the tenants through the view that operators have."""
    jobs: dict[UUID, StoredJob] = {}
    conn = await connect(operator_dsn, application_name="relay-dispatch demo operator")
    try:
        for tenant in tenants:
            with mapped_errors():
                async with conn.transaction(readonly=True):
                    await conn.execute(_BIND, tenant)
                    for job_id, *columns in await conn.fetch(_STORED):
                        jobs[job_id] = StoredJob(*columns)
    finally:
        await close_connection(conn)
    return jobs


def audit(endings: Sequence[Ending], stored: dict[UUID, StoredJob], relays: Sequence[RelayReport]) -> list[Check]:
    """Compare the three sides."""
    told: dict[UUID, Ending] = {ending.job_id: ending for ending in endings if ending.job_id is not None}
    return [
        _accepted(endings, told),
        _ended_once(told, stored),
        _same_answers(told, stored),
        *_relays_agree(stored, relays),
        _attempts(stored, relays),
        *_as_expected(endings),
    ]


def _accepted(endings: Sequence[Ending], told: dict[UUID, Ending]) -> Check:
    refused = [ending for ending in endings if ending.refused is not None]
    text = f"{_count(len(endings) - len(refused), 'request')} accepted as {_count(len(told), 'job')}"
    if refused:
        text += f", {len(refused)} refused (line {refused[0].line.line}: {refused[0].refused})"
    return Check("accepted", not refused, text)


def _ended_once(told: dict[UUID, Ending], stored: dict[UUID, StoredJob]) -> Check:
    ended = sum(stored[job_id].stored for job_id in told if job_id in stored)
    wrong = []
    if missing := len(told.keys() - stored.keys()):
        wrong.append(f"{missing} missing")
    if left := sum(not job.stored for job in stored.values()):
        wrong.append(f"{left} left in the queue")
    if foreign := len(stored.keys() - told.keys()):
        wrong.append(f"{foreign} that nobody sent")
    text = f"{ended} of {_count(len(told), 'job')} ended, each with one stored result"
    return Check(
        "ended exactly once", not wrong and ended == len(told), ", ".join([text, *(wrong or ["none is left"])])
    )


def _same_answers(told: dict[UUID, Ending], stored: dict[UUID, StoredJob]) -> Check:
    lost = [ending for ending in told.values() if ending.lost is not None]
    differ = [
        ending
        for job_id, ending in told.items()
        if ending.status is not None and job_id in stored and ending.status != stored[job_id].status
    ]
    text = f"the gateway was told {len(told) - len(lost)} results"
    if lost:
        text += f", {len(lost)} it was not (line {lost[0].line.line}: {lost[0].lost})"
    text += f", {len(differ)} of them other than stored" if differ else ", each as stored"
    return Check("answers", not lost and not differ, text)


def _relays_agree(stored: dict[UUID, StoredJob], relays: Sequence[RelayReport]) -> list[Check]:
    checks = []
    by_relay = Counter((job.claimed_by, job.status) for job in stored.values() if job.stored)
    for relay in relays:
        pairs = [
            (relay.count(f"jobs_{status}"), sum(by_relay[instance, status] for instance in relay.instances))
            for status in ("succeeded", "failed")
        ]
        ok = all(said == found for said, found in pairs)
        text = f"{relay.name} ended {pairs[0][0]} as succeeded and {pairs[1][0]} as failed"
        text += ", and so it is stored" if ok else f"; stored are {pairs[0][1]} and {pairs[1][1]}"
        checks.append(Check("relay", ok, text))
    return checks


def _attempts(stored: dict[UUID, StoredJob], relays: Sequence[RelayReport]) -> Check:
    over = sum(job.attempt > job.max_attempts for job in stored.values())
    attempts = sum(job.attempt for job in stored.values())
    # Fewer handlers than attempts: an operation that nobody serves is an attempt and starts none.
    started = sum(relay.count("handlers_started") for relay in relays)
    text = f"{_count(attempts, 'attempt')} for {_count(len(stored), 'job')}, {_count(started, 'handler')} started"
    text += f"; {over or 'no job'} went beyond its max_attempts"
    return Check("attempts", not over and started <= attempts, text)


def _as_expected(endings: Sequence[Ending]) -> list[Check]:
    expected = [ending for ending in endings if ending.line.expect is not None]
    if not expected:
        return []
    wrong = [e for e in expected if e.status is None or e.difference is not None]
    text = f"{len(expected) - len(wrong)} of {len(expected)} ended as their line expects"
    if wrong:
        first = wrong[0]
        text += f" (line {first.line.line}: {first.difference or first.refused or first.lost})"
    return [Check("as expected", not wrong, text)]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
