"""100,000 events drained by one process into the dispatch queue of the same database.

Ours: three drains at once of one `Outbox`, batches of 500, and a `DispatchSink` on a `GatewayClient`: one job for each
event, whose id is made of the event's, so that a second delivery finds it. The baselines do by hand, on 1, 2 and 4
connections: claim a batch, insert a job for each event by one statement out of arrays, delete the batch; the best of
them counts. Nobody is rung there; ours rings the relay.

Events a second, as in outbox-drain.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bare.outbox import KIND, drain_to_jobs
from benchmarks.model import Case, Contender, Sample, Scenario, check
from benchmarks.sandbox import OPERATION, RELAY, TTL, Sandbox
from benchmarks.scenarios.outbox_drain import (
    BATCH,
    DRAINS,
    RATE,
    drain_bare,
    drain_ours,
    fill_events,
    left_over,
)
from gateway_sdk import DispatchSink, GatewayClient, OutboxRoute

__all__ = ["SCENARIO"]

_OURS = Contender("ours", "ours", f"{DRAINS} drains at once of one Outbox, batches of {BATCH}, DispatchSink")
_BARE = tuple(
    Contender(
        f"bare-{count}",
        "baseline",
        f"claim, insert jobs, delete: by hand in a loop on {count} connection(s), batches of {BATCH}",
        in_quick=count == 2,
    )
    for count in (1, 2, 4)
)


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    ours = contender is _OURS
    table = "relay.outbox" if ours else "bare.outbox"
    await fill_events(sandbox, table, case.jobs)
    if ours:
        async with GatewayClient(sandbox.gateway_dsn) as client:
            sink = DispatchSink(client, {KIND: OutboxRoute(RELAY, OPERATION, ttl=TTL)})
            course = await drain_ours(sandbox.gateway_dsn, {KIND: sink})
    else:
        course = await drain_bare(sandbox, contender, drain_to_jobs)
    check(0, left=await left_over(sandbox, table))
    found = await sandbox.counts("ours" if ours else "bare")
    checks = check(case.jobs, settled=course.done, requests=found["requests"], queued=found["queued"])
    return Sample({"rate": case.jobs / course.seconds}, checks)


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({}, 5_000 if quick else 100_000)]


SCENARIO = Scenario(
    name="outbox-dispatch",
    title="events drained by one process into the dispatch queue",
    figures=(RATE,),
    contenders=(_OURS, *_BARE),
    cases=_cases,
    run=_run,
)
