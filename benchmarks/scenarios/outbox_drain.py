"""100,000 events drained by one process to a sink that does nothing.

Ours: three drains at once of one `Outbox`, batches of 500, `async def sink(event)`. The baselines claim and delete by
hand on a twin of our table, on 1, 2 and 4 connections, with the same batch, and call nothing; the best of them counts.
`lean-2` is such a loop on the least table that an application would make: no states, kinds, keys, attempts, fences.

Events a second, from the first claim to the last settling; connections are open by then. The events lie there before
the clock starts, stored by one statement, vacuumed, never analyzed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, TypeAlias
from uuid import UUID

from benchmarks.bare.outbox import KIND, Step, drain_by_hand, drain_lean
from benchmarks.loops import as_relay_run
from benchmarks.model import Case, Contender, Figure, Point, Sample, Scenario, check
from benchmarks.sandbox import BODY, TENANT, Connection, Sandbox
from dispatch_core.outbox import Outbox, OutboxEvent, OutboxSettings, Sink

__all__ = ["BATCH", "DRAINS", "PAYLOAD", "RATE", "SCENARIO", "Course", "drain_ours", "fill_events", "left_over"]

BATCH: Final = 500
DRAINS: Final = 3

PAYLOAD: Final[dict[str, Any]] = json.loads(BODY)
RATE: Final = Figure("rate", "events/s", higher_is_better=True, target=0.7)

_OURS = Contender("ours", "ours", f"{DRAINS} drains at once of one Outbox, batches of {BATCH}, async def sink")
_BARE = tuple(
    Contender(
        f"bare-{count}",
        "baseline",
        f"claim and delete by hand in a loop on {count} connection(s), batches of {BATCH}",
        in_quick=count == 2,
    )
    for count in (1, 2, 4)
)
_LEAN = Contender("lean-2", "reference", "the same by 2 connections on the least table that would do")

_COLUMNS: Final = "tenant_id, event_id, kind, payload, payload_bytes, seq, state, created_at, available_at"
# A microsecond apart, as outbox_enqueue_many stores them; ids in the order of time, as clients make them.
_FILL: Final = """
insert into {table} ({columns})
select $1, lpad(to_hex(n), 32, '0')::uuid, $2, $3::text::jsonb, octet_length($3), n, 'ready', now(),
       now() - interval '1 hour' + n * interval '1 us'
from generate_series(1, $4::bigint) n
"""
_FILL_LEAN: Final = """
insert into bare.lean_outbox (tenant_id, kind, payload)
select $1, $2, $3::text::jsonb from generate_series(1, $4::bigint)
"""

Drain: TypeAlias = Callable[[Sequence[Connection], int, Step], Awaitable[None]]


class Course:
    """When how many events were done: each batch is a point."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._done = 0
        self._points: list[tuple[int, float]] = [(0, 0.0)]

    def step(self, count: int) -> None:
        """Note that a batch is settled."""
        self._done += count
        self._points.append((self._done, time.perf_counter() - self._started))

    @property
    def done(self) -> int:
        return self._done

    @property
    def seconds(self) -> float:
        """From the start to the last batch."""
        return self._points[-1][1]

    def seconds_at(self, done: int) -> float:
        """Return when so many were done first."""
        return next(seconds for count, seconds in self._points if count >= done)

    def curve(self, step: int) -> list[Point]:
        """Return the rate in each `step` of events."""
        ends = range(step, self._done + 1, step)
        return [(end, step / max(self.seconds_at(end) - self.seconds_at(end - step), 1e-6)) for end in ends]


async def fill_events(sandbox: Sandbox, table: str, count: int) -> None:
    """Store `count` events that are due, and vacuum their table."""
    async with sandbox.connections(sandbox.admin_dsn, 1) as [admin]:
        sql = _FILL_LEAN if table == "bare.lean_outbox" else _FILL.format(table=table, columns=_COLUMNS)
        await admin.execute(sql, TENANT, KIND, BODY.decode(), count)
        await admin.execute(f"vacuum {table}")


async def left_over(sandbox: Sandbox, table: str) -> int:
    """Return how many events there are still."""
    [(count,)] = await sandbox.fetch(f"select count(*) from {table}")
    return int(count)


async def drain_ours(dsn: str, sinks: dict[str, Sink]) -> Course:
    """Drain all there is by `DRAINS` drains at once; return the course of it."""
    settings = OutboxSettings(batch_size=BATCH)
    async with Outbox(dsn, sinks=sinks, settings=settings) as outbox:
        # Outside the clock: connections are made, statements prepared. Nothing is due in that kind.
        verbs = outbox.verbs
        await asyncio.gather(
            *(verbs.claim([(TENANT, "none")], claimed_by=f"warm-{number}", limit=1) for number in range(DRAINS))
        )
        course = Course()

        async def drain() -> None:
            while (report := await outbox.drain(BATCH)).claimed:
                course.step(report.delivered)

        with as_relay_run():
            await asyncio.gather(*(drain() for _ in range(DRAINS)))
    return course


async def drain_bare(sandbox: Sandbox, contender: Contender, drain: Drain) -> Course:
    """Drain by a loop on as many connections as the contender's name says."""
    count = int(contender.name[-1])
    opening: AbstractAsyncContextManager[list[Connection]] = sandbox.connections(sandbox.bare_dsn, count)
    async with opening as connections:
        course = Course()
        with as_relay_run():
            await drain(connections, BATCH, course.step)
    return course


async def run_drain(
    sandbox: Sandbox,
    case: Case,
    contender: Contender,
    beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> tuple[Course, dict[str, int]]:
    """Fill, and drain to nowhere with `beside` around it; return the course, and what was counted.

    Raises: CheckFailedError.
    """
    if contender.role == "ours":
        table = "relay.outbox"
        await fill_events(sandbox, table, case.jobs)
        delivered: list[UUID] = []

        async def sink(event: OutboxEvent) -> None:
            delivered.append(event.event_id)

        async with beside():
            course = await drain_ours(sandbox.gateway_dsn, {KIND: sink})
        counts = {"sunk": len(delivered), "distinct": len(set(delivered))}
    else:
        lean = contender.name.startswith("lean")
        table = "bare.lean_outbox" if lean else "bare.outbox"
        await fill_events(sandbox, table, case.jobs)
        async with beside():
            course = await drain_bare(sandbox, contender, drain_lean if lean else drain_by_hand)
        counts = {}
    check(0, left=await left_over(sandbox, table))
    return course, check(case.jobs, settled=course.done, **counts)


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    course, checks = await run_drain(sandbox, case, contender)
    return Sample({"rate": case.jobs / course.seconds}, checks)


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({}, 10_000 if quick else 100_000)]


SCENARIO = Scenario(
    name="outbox-drain",
    title="events drained by one process to a sink that does nothing",
    figures=(RATE,),
    contenders=(_OURS, *_BARE, _LEAN),
    cases=_cases,
    run=_run,
)
