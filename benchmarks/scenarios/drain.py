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
from benchmarks.loops import as_relay_run
from benchmarks.model import Case, CaseResult, Contender, Figure, Sample, Scenario, Verdict, check
from benchmarks.sandbox import OPERATION, RELAY, TENANT, Sandbox
from relay_sdk import DispatchJob, Relay, Reply

__all__ = ["BATCH", "CONCURRENCY", "RATE", "SCENARIO", "drain_by_loop", "drain_by_relay", "run_drain", "side_of"]

BATCH: Final = 500
# Handlers that do nothing want as many slots as two claims and two completions in flight can fill.
CONCURRENCY: Final = 2000

RATE: Final = Figure("rate", "jobs/s", higher_is_better=True, target=0.85)

# Where a bare loop reaches the one, a relay reaches the other.
_LOOP_REACHES: Final = 32_000
_RELAY_REACHES: Final = 25_000

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


async def drain_by_relay(dsn: str) -> list[UUID]:
    """Drain by a `Relay` whose handler does nothing; return the ids that were handled."""
    relay = Relay(RELAY, tenants=[TENANT], dsn=dsn, concurrency=CONCURRENCY)
    handled: list[UUID] = []
    reply = Reply()

    @relay.handler(OPERATION)
    async def handle(job: DispatchJob) -> Reply:
        handled.append(job.job_id)
        return reply

    await relay.run(drain=True)
    return handled


async def drain_by_loop(sandbox: Sandbox, contender: Contender) -> list[UUID]:
    """Drain by the loop that the contender is named after; return the ids that were claimed."""
    count = int(re.sub(r"\D", "", contender.name))
    if contender.name.startswith("sql"):
        async with sandbox.connections(sandbox.bare_dsn, count) as connections:
            return await drain_by_statements(connections, BATCH)
    async with sandbox.connections(sandbox.worker_dsn, count) as connections:
        return await drain_by_functions(connections, BATCH)


async def run_drain(sandbox: Sandbox, case: Case, contender: Contender) -> dict[str, int]:
    """Drain the sandbox; return the counts that were compared.

    Raises: CheckFailedError.
    """
    ours = contender.role == "ours"
    with as_relay_run():
        handled = await (drain_by_relay(sandbox.worker_dsn) if ours else drain_by_loop(sandbox, contender))
    found = await sandbox.counts(side_of(contender))
    check(0, queued=found["queued"])
    return check(
        case.jobs,
        handled=len(handled),
        distinct=len(set(handled)),
        succeeded=found["succeeded"],
        results=found["results"],
    )


def side_of(contender: Contender) -> str:
    """Return whose tables a contender works on."""
    return "bare" if contender.name.startswith("sql") else "ours"


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    checks = await run_drain(sandbox, case, contender)
    return Sample({"rate": case.jobs / await sandbox.completion_span(side_of(contender))}, checks)


def _across(results: Sequence[CaseResult]) -> list[Verdict]:
    # The one target in jobs a second, so for machines only on which the loop shows that they can.
    [result] = results
    baseline = result.baseline(RATE)
    loop = baseline.median(RATE) if baseline else None
    ours = result.ours.median(RATE)
    if loop is None or ours is None or loop < _LOOP_REACHES:
        return []
    return [
        Verdict("drain", "", f"rate where a loop reaches {_LOOP_REACHES:,}", ours, "jobs/s", "", True, _RELAY_REACHES)
    ]


def _cases(quick: bool) -> Sequence[Case]:
    jobs = 10_000 if quick else 100_000
    return [Case({}, jobs, jobs)]


SCENARIO = Scenario(
    name="drain",
    title="a backlog drained by one process, handlers that do nothing",
    figures=(RATE,),
    contenders=(_OURS, *_LOOPS, _SQL),
    cases=_cases,
    run=_run,
    across=_across,
    across_targets="≥ 25,000 jobs/s where a loop reaches 32,000",
)
