"""Many jobs at once: `enqueue_many` beside bare INSERTs of arrays, in batches of the same size, one connection each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import UUID

from benchmarks.bare import statements
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check
from benchmarks.sandbox import BODY, HEADERS, OPERATION, RELAY, TENANT, TTL, Sandbox
from dispatch_core import DispatchRequest
from dispatch_core.codec import decode_json
from dispatch_core.ids import new_id
from gateway_sdk import GatewayClient

__all__ = ["SCENARIO"]

_OURS = Contender("ours", "ours", "GatewayClient.enqueue_many, from DispatchRequest objects to committed rows")
_BARE = Contender(
    "bare", "baseline", "one INSERT a batch out of arrays, request and queue, from lists to committed rows"
)


async def _ours(sandbox: Sandbox, jobs: int, batch: int) -> tuple[float, list[UUID]]:
    headers = decode_json(HEADERS.encode())
    ids: list[UUID] = []
    async with GatewayClient(sandbox.gateway_dsn) as client:
        tenant = client.tenant(TENANT)
        await tenant.poll_status(new_id())
        started = time.perf_counter()
        for first in range(0, jobs, batch):
            count = min(batch, jobs - first)
            ids += await tenant.enqueue_many(
                [DispatchRequest(RELAY, OPERATION, headers=headers, body=BODY, ttl=TTL) for _ in range(count)]
            )
        return time.perf_counter() - started, ids


async def _bare(sandbox: Sandbox, jobs: int, batch: int) -> tuple[float, list[UUID]]:
    ids: list[UUID] = []
    async with sandbox.connections(sandbox.bare_dsn, 1) as [connection]:
        await connection.fetch("select 1")
        started = time.perf_counter()
        for first in range(0, jobs, batch):
            count = min(batch, jobs - first)
            made = [new_id() for _ in range(count)]
            await connection.fetch(
                statements.INSERT_MANY, TENANT, made, RELAY, OPERATION, [HEADERS] * count, [BODY] * count, TTL
            )
            ids += made
        return time.perf_counter() - started, ids


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    side = "ours" if contender is _OURS else "bare"
    elapsed, ids = await (_ours if contender is _OURS else _bare)(sandbox, case.jobs, case.parameters["batch"])
    found = await sandbox.counts(side)
    checks = check(case.jobs, distinct=len(set(ids)), requests=found["requests"], queued=found["queued"])
    return Sample({"rate": case.jobs / elapsed}, checks)


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({"batch": 1000}, 10_000 if quick else 100_000)]


SCENARIO = Scenario(
    name="bulk",
    title="many jobs at once",
    figures=(Figure("rate", "jobs/s", higher_is_better=True, target=0.85),),
    contenders=(_OURS, _BARE),
    cases=_cases,
    run=_run,
)
