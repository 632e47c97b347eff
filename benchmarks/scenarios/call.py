"""Request and reply, one after another: from the start of the call to the result at the caller.

The relay is another process and echoes the body. Ours: `TenantClient.call` and `Relay`. The bare side: INSERT and
NOTIFY; claim; result and NOTIFY; one SELECT of the result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from benchmarks.bare import statements
from benchmarks.child import child
from benchmarks.model import Case, CheckFailedError, Contender, Figure, Sample, Scenario, check, percentile
from benchmarks.sandbox import HEADERS, OPERATION, RELAY, TENANT, TTL, Sandbox
from benchmarks.workers import bare_worker, relay_worker
from dispatch_core.codec import decode_json
from dispatch_core.ids import new_id
from gateway_sdk import GatewayClient

__all__ = ["SCENARIO"]

_WARM: Final = 8

_OURS = Contender("ours", "ours", "TenantClient.call, Relay in another process, both with their defaults")
_BARE = Contender("bare", "baseline", "INSERT + NOTIFY, claim, result + NOTIFY, SELECT; the worker in another process")

Call = Callable[[bytes], Awaitable[bytes]]


@asynccontextmanager
async def _ours(sandbox: Sandbox) -> AsyncIterator[Call]:
    headers = decode_json(HEADERS.encode())
    async with GatewayClient(sandbox.gateway_dsn) as client:
        tenant = client.tenant(TENANT)

        async def call(body: bytes) -> bytes:
            result = await tenant.call(RELAY, OPERATION, headers, body, timeout=30)
            return result.response_body or b""

        yield call


@asynccontextmanager
async def _bare(sandbox: Sandbox) -> AsyncIterator[Call]:
    async with sandbox.connections(sandbox.bare_dsn, 2) as [listening, working]:
        waiting: dict[str, asyncio.Event] = {}

        def told(*arguments: Any) -> None:
            if event := waiting.get(arguments[3]):
                event.set()

        await listening.add_listener(statements.RESULT_CHANNEL, told)

        async def call(body: bytes) -> bytes:
            job_id = new_id()
            event = waiting[str(job_id)] = asyncio.Event()
            await working.fetch(statements.INSERT_NOTIFY, TENANT, job_id, RELAY, OPERATION, HEADERS, body, TTL)
            await asyncio.wait_for(event.wait(), 30)
            del waiting[str(job_id)]
            [row] = await working.fetch(statements.RESULT, TENANT, job_id)
            return bytes(row["response_body"])

        yield call
        await listening.remove_listener(statements.RESULT_CHANNEL, told)


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    ours = contender is _OURS
    worker, dsn = (relay_worker, sandbox.worker_dsn) if ours else (bare_worker, sandbox.bare_dsn)
    times: list[float] = []
    async with child(worker, dsn=dsn) as process, (_ours if ours else _bare)(sandbox) as call:
        for number in range(case.jobs + _WARM):
            body = str(number).encode()
            started = time.perf_counter()
            answer = await call(body)
            times.append((time.perf_counter() - started) * 1000)
            if answer != body:
                raise CheckFailedError(f"call {number} was answered {answer!r}")
    starts: list[list[int]] = process.result
    found = await sandbox.counts("ours" if ours else "bare")
    checks = check(
        len(times),
        answered=len(times),
        started=len(starts),
        distinct=len({number for number, _ in starts}),
        succeeded=found["succeeded"],
        results=found["results"],
    )
    times = times[_WARM:]
    figures = {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99)}
    return Sample(figures, checks, {"p90_ms": percentile(times, 0.9)})


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({}, 60 if quick else 1_000)]


SCENARIO = Scenario(
    name="call",
    title="request and reply, one after another",
    figures=(
        Figure("p50", "ms", higher_is_better=False, target=1.4),
        Figure("p99", "ms", higher_is_better=False),
    ),
    contenders=(_OURS, _BARE),
    cases=_cases,
    run=_run,
)
