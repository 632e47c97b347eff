"""Many jobs at once: one `enqueue_many` call beside bare INSERTs of arrays of 1,000 on one connection."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from benchmarks.bare import statements
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check
from benchmarks.sandbox import BODY, HEADERS, OPERATION, RELAY, TENANT, TTL, Sandbox
from dispatch_core import DispatchRequest
from dispatch_core.codec import decode_json
from dispatch_core.ids import new_id
from gateway_sdk import GatewayClient

__all__ = ["SCENARIO"]

# What the bare side inserts at once.
_BATCH: Final = 1000

_OURS = Contender("ours", "ours", "one call of GatewayClient.enqueue_many, making the DispatchRequest objects included")
_BARE = Contender(
    "bare", "baseline", f"an INSERT for each {_BATCH} out of arrays, request and queue, making ids included"
)


async def _ours(sandbox: Sandbox, jobs: int) -> tuple[float, list[UUID]]:
    headers = decode_json(HEADERS.encode())
    async with GatewayClient(sandbox.gateway_dsn) as client:
        tenant = client.tenant(TENANT)
        await tenant.poll_status(new_id())
        started = time.perf_counter()
        ids = await tenant.enqueue_many(
            [DispatchRequest(RELAY, OPERATION, headers=headers, body=BODY, ttl=TTL) for _ in range(jobs)]
        )
        return time.perf_counter() - started, list(ids)


async def _bare(sandbox: Sandbox, jobs: int) -> tuple[float, list[UUID]]:
    ids: list[UUID] = []
    async with sandbox.connections(sandbox.bare_dsn, 1) as [connection]:
        await connection.fetch("select 1")
        started = time.perf_counter()
        for first in range(0, jobs, _BATCH):
            count = min(_BATCH, jobs - first)
            made = [new_id() for _ in range(count)]
            await connection.fetch(
                statements.INSERT_MANY, TENANT, made, RELAY, OPERATION, [HEADERS] * count, [BODY] * count, TTL
            )
            ids += made
        return time.perf_counter() - started, ids


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    side = "ours" if contender is _OURS else "bare"
    elapsed, ids = await (_ours if contender is _OURS else _bare)(sandbox, case.jobs)
    found = await sandbox.counts(side)
    checks = check(case.jobs, distinct=len(set(ids)), requests=found["requests"], queued=found["queued"])
    return Sample({"rate": case.jobs / elapsed}, checks)


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({}, 10_000 if quick else 100_000)]


SCENARIO = Scenario(
    name="bulk",
    title="many jobs at once",
    figures=(Figure("rate", "jobs/s", higher_is_better=True, target=0.85),),
    contenders=(_OURS, _BARE),
    cases=_cases,
    run=_run,
)
