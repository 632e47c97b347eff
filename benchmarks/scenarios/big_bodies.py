"""The drain with bodies and results of 64 kB, bytes that do not compress: a relay that echoes beside bare loops.

A claim brings bodies of up to 65,536 bytes along, 4 MiB of them at most; a relay fetches the others when their handlers
start. The loops claim no more at once than comes with its bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

from benchmarks.bare.loops import echo_by_functions
from benchmarks.loops import as_relay_run
from benchmarks.model import Case, Contender, Sample, Scenario, check
from benchmarks.sandbox import OPERATION, RELAY, TENANT, Sandbox
from benchmarks.scenarios.drain import RATE
from relay_sdk import DispatchJob, Relay, Reply

__all__ = ["SCENARIO"]

_BYTES: Final = 65_536
# As many as fill the 4 MiB of a claim.
_BATCH: Final = 64

_OURS = Contender("ours", "ours", "Relay with its defaults, the handler echoes the body")
_LOOPS = tuple(
    Contender(
        f"loop-{count}",
        "baseline",
        f"claim and complete functions called in a loop on {count} connection(s), batches of {_BATCH}, bodies echoed",
        in_quick=count == 2,
    )
    for count in (1, 2, 4)
)


async def _relay(sandbox: Sandbox) -> list[UUID]:
    relay = Relay(RELAY, tenants=[TENANT], dsn=sandbox.worker_dsn)
    handled: list[UUID] = []

    @relay.handler(OPERATION)
    async def handle(job: DispatchJob) -> Reply:
        handled.append(job.job_id)
        return Reply(job.body)

    await relay.run(drain=True)
    return handled


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    with as_relay_run():
        if contender is _OURS:
            handled = await _relay(sandbox)
        else:
            async with sandbox.connections(sandbox.worker_dsn, int(contender.name[-1])) as connections:
                handled = await echo_by_functions(connections, _BATCH)
    found = await sandbox.counts("ours")
    check(0, queued=found["queued"])
    [row] = await sandbox.fetch(
        "select count(*) from relay.s2r_relay_dispatch_result d join relay.s2r_relay_dispatch_request r"
        " using (tenant_id, job_id) where d.response_body = r.request_body"
    )
    checks = check(
        case.jobs,
        handled=len(handled),
        distinct=len(set(handled)),
        succeeded=found["succeeded"],
        results=found["results"],
        echoed=row[0],
    )
    return Sample({"rate": case.jobs / await sandbox.completion_span("ours")}, checks)


def _cases(quick: bool) -> Sequence[Case]:
    jobs = 500 if quick else 4_000
    return [Case({"kB": 64}, jobs, jobs, body_bytes=_BYTES)]


SCENARIO = Scenario(
    name="big-bodies",
    title="a backlog drained, 64 kB bodies and results",
    figures=(replace(RATE, target=0.80),),
    contenders=(_OURS, *_LOOPS),
    cases=_cases,
    run=_run,
)
