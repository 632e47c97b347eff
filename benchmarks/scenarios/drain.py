"""A backlog drained by one process whose handlers do nothing.

Ours: a `Relay` in this process, with its claimer, executor and completer. The baselines are bare loops of calls of our
own claim and complete functions on 1, 2 and 4 connections, batches of 500, in the same kind of event loop; the best of
them counts. `sql-2` is such a loop by hand-written statements on the bare tables.

Jobs per second from the first claim to the last completion, by the database's clock: starting and stopping a relay is
no part of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from benchmarks.bare.loops import drain_by_functions, drain_by_statements
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check
from benchmarks.sandbox import OPERATION, RELAY, TENANT, Sandbox
from relay_sdk import DispatchJob, Relay, Reply

__all__ = ["BATCH", "CONCURRENCY", "SCENARIO"]

BATCH: Final = 500
# Handlers that do nothing want as many slots as two claims and two completions in flight can fill.
CONCURRENCY: Final = 2000

_OURS = Contender("ours", "ours", f"Relay with concurrency={CONCURRENCY}, else its defaults; async def handler")
_LOOPS = tuple(
    Contender(
        f"loop-{count}",
        "baseline",
        f"claim and complete functions called in a loop on {count} connection(s)",
        in_quick=count == 2,
    )
    for count in (1, 2, 4)
)
_SQL = Contender("sql-2", "reference", "hand-written claim and complete statements in a loop on 2 connections")


async def _relay(sandbox: Sandbox) -> list[UUID]:
    relay = Relay(RELAY, tenants=[TENANT], dsn=sandbox.worker_dsn, concurrency=CONCURRENCY)
    handled: list[UUID] = []
    reply = Reply()

    @relay.handler(OPERATION)
    async def handle(job: DispatchJob) -> Reply:
        handled.append(job.job_id)
        return reply

    await relay.run(drain=True)
    return handled


async def _loop(sandbox: Sandbox, contender: Contender) -> list[UUID]:
    count = int(re.sub(r"\D", "", contender.name))
    if contender is _SQL:
        async with sandbox.connections(sandbox.bare_dsn, count) as connections:
            return await drain_by_statements(connections, BATCH)
    async with sandbox.connections(sandbox.worker_dsn, count) as connections:
        return await drain_by_functions(connections, BATCH)


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    handled = await (_relay(sandbox) if contender is _OURS else _loop(sandbox, contender))
    side = "bare" if contender is _SQL else "ours"
    found = await sandbox.counts(side)
    check(0, queued=found["queued"])
    checks = check(
        case.jobs,
        handled=len(handled),
        distinct=len(set(handled)),
        succeeded=found["succeeded"],
        results=found["results"],
    )
    return Sample({"rate": case.jobs / await sandbox.completion_span(side)}, checks)


def _cases(quick: bool) -> Sequence[Case]:
    jobs = 10_000 if quick else 100_000
    return [Case({}, jobs, jobs)]


SCENARIO = Scenario(
    name="drain",
    title="a backlog drained by one process, handlers that do nothing",
    figures=(Figure("rate", "jobs/s", higher_is_better=True, target=0.85),),
    contenders=(_OURS, *_LOOPS, _SQL),
    cases=_cases,
    run=_run,
)
