"""Single awaited `enqueue` calls by concurrent tasks of one gateway process.

Ours: `GatewayClient`, which shares statements between calls and rings (nobody listens here). `function` is what its
target is held against, the same calls without sharing and without wake-up: our SQL function once a call, by hand, on a
pool. `bare` is one INSERT into request and queue a call, without function and row security: what they cost is not in
the target, so ours is shown against it too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import asyncpg

from benchmarks.bare import statements
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check, percentile
from benchmarks.sandbox import BODY, HEADERS, OPERATION, RELAY, TENANT, TTL, Sandbox
from dispatch_core.codec import decode_json
from dispatch_core.ids import new_id
from gateway_sdk import GatewayClient

__all__ = ["SCENARIO"]

# Ours has as many by default.
_POOL: Final = 10
_TARGETS: Final = {1: 0.90, 16: 2.0, 256: 5.0}

_OURS = Contender("ours", "ours", "GatewayClient.enqueue with its defaults")
_FUNCTION = Contender(
    "function", "baseline", f"our SQL function called once a call by hand, on a pool of {_POOL}, no wake-up"
)
_BARE = Contender("bare", "reference", f"one INSERT (request and queue) a call, on a pool of {_POOL}, no wake-up")

# As lean as the function allows: what is left out has its default.
_ENQUEUE: Final = """
select relay.enqueue($1, array[$2::uuid], array[$3::text], array[$4::text], array[$5::text], array[$6::bytea], null,
                     array[$7::interval], null, null)
"""

Enqueue = Callable[[], Awaitable[UUID]]


@asynccontextmanager
async def _ours(sandbox: Sandbox) -> AsyncIterator[Enqueue]:
    headers = decode_json(HEADERS.encode())
    async with GatewayClient(sandbox.gateway_dsn) as client:
        tenant = client.tenant(TENANT)

        async def enqueue() -> UUID:
            return await tenant.enqueue(RELAY, OPERATION, headers, BODY, ttl=TTL)

        yield enqueue


@asynccontextmanager
async def _pool(dsn: str) -> AsyncIterator[Any]:
    # Without its reset query: one round trip is all that a call needs.
    async with asyncpg.create_pool(dsn, min_size=_POOL, max_size=_POOL, reset=_no_reset) as pool:
        yield pool


async def _no_reset(connection: Any) -> None:
    pass


@asynccontextmanager
async def _bare(sandbox: Sandbox) -> AsyncIterator[Enqueue]:
    async with _pool(sandbox.bare_dsn) as pool:

        async def enqueue() -> UUID:
            job_id = new_id()
            async with pool.acquire() as connection:
                await connection.fetch(statements.INSERT, TENANT, job_id, RELAY, OPERATION, HEADERS, BODY, TTL)
            return job_id

        yield enqueue


@asynccontextmanager
async def _function(sandbox: Sandbox) -> AsyncIterator[Enqueue]:
    async with _pool(sandbox.gateway_dsn) as pool:

        async def enqueue() -> UUID:
            job_id = new_id()
            async with pool.acquire() as connection:
                await connection.fetch(_ENQUEUE, TENANT, job_id, RELAY, OPERATION, HEADERS, BODY, TTL)
            return job_id

        yield enqueue


_OPEN = {"ours": _ours, "bare": _bare, "function": _function}


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    tasks = case.parameters["tasks"]
    ids: list[UUID] = []
    times: list[float] = []
    left = case.jobs

    async with _OPEN[contender.name](sandbox) as enqueue:

        async def caller() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                started = time.perf_counter()
                ids.append(await enqueue())
                times.append(time.perf_counter() - started)

        # Outside the clock: connections are made, statements prepared.
        warm = await asyncio.gather(*(enqueue() for _ in range(6 * _POOL)))
        started = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(tasks)))
        elapsed = time.perf_counter() - started

    found = await sandbox.counts("bare" if contender is _BARE else "ours")
    checks = check(
        case.jobs,
        returned=len(ids),
        distinct=len(set(ids)),
        requests=found["requests"] - len(warm),
        queued=found["queued"] - len(warm),
    )
    figures = {
        "rate": case.jobs / elapsed,
        "p50": percentile(times, 0.5) * 1000,
        "p99": percentile(times, 0.99) * 1000,
    }
    return Sample(figures, checks)


def _cases(quick: bool) -> Sequence[Case]:
    if quick:
        return [Case({"tasks": 1}, 200), Case({"tasks": 256}, 5_000)]
    return [Case({"tasks": 1}, 4_000), Case({"tasks": 16}, 20_000), Case({"tasks": 256}, 50_000)]


SCENARIO = Scenario(
    name="enqueue",
    title="single awaited enqueue calls",
    figures=(
        Figure("rate", "jobs/s", higher_is_better=True, target=lambda case: _TARGETS[case.parameters["tasks"]]),
        Figure("p50", "ms", higher_is_better=False),
        Figure("p99", "ms", higher_is_better=False),
    ),
    contenders=(_OURS, _FUNCTION, _BARE),
    cases=_cases,
    run=_run,
)
