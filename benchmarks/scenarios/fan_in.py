"""Many calls at once: 2,000 `call`s kept in flight in one gateway process, the relay in another process.

`ours`: `TenantClient.call` by 2,000 tasks, each calling again as soon as it has its answer; the relay has 2,000 slots
and echoes the body. The rate is answered calls a second, p50 and p99 are of single calls, p99 / p50 says how evenly
they are served. The first call of each task is outside the clock: connections, LISTEN and prepared statements are made
by it.

`drain` is what the rate is held against: the same jobs, preloaded, drained by one relay process in the same run. It has
nobody to answer to, so a fan-in that reaches it has its enqueues and replies for nothing. `bare` is the least code that
does the same by hand: batched INSERT of arrays with NOTIFY, batched claim and complete, NOTIFY with job ids, batched
SELECT of results (bare/reply.py).

What it does not say: on a machine with few cores the gateway, the relay and the server take turns, and a drain has one
process less; with cores to spare, the ratio is another one. One tenant: with many, fewer calls share a statement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from benchmarks.bare.reply import bare_batch_worker, bare_caller
from benchmarks.child import child
from benchmarks.loops import as_relay_run
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check, percentile
from benchmarks.sandbox import BODY, HEADERS, OPERATION, RELAY, TENANT, TTL, Sandbox
from benchmarks.scenarios.drain import CONCURRENCY
from dispatch_core import DispatchRequest
from dispatch_core.codec import decode_json
from gateway_sdk import GatewayClient
from relay_sdk import DispatchJob, Relay, Reply

__all__ = ["SCENARIO", "echo_relay", "load"]

_OURS = Contender("ours", "ours", f"TenantClient.call; Relay with concurrency={CONCURRENCY} in another process")
_DRAIN = Contender("drain", "baseline", f"the same jobs preloaded, Relay with concurrency={CONCURRENCY}, nobody waits")
_BARE = Contender("bare", "reference", "INSERT of arrays + NOTIFY, claim, complete, NOTIFY of ids, SELECT; in batches")

Call = Callable[[bytes], Awaitable[bytes]]


async def echo_relay(ready: Callable[[], None], stop: asyncio.Event, *, dsn: str) -> list[int]:
    """Serve by a `Relay` with many slots that echoes; return the numbers in the bodies, as handlers started."""
    relay = Relay(RELAY, tenants=[TENANT], dsn=dsn, concurrency=CONCURRENCY)
    numbers: list[int] = []

    @relay.handler(OPERATION)
    async def handle(job: DispatchJob) -> Reply:
        numbers.append(int(job.body))
        return Reply(job.body)

    async with asyncio.TaskGroup() as group:
        group.create_task(relay.run())
        async with asyncio.timeout(30):
            while not (relay.metrics.claims_empty and relay.health().listener == "listening"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with as_relay_run():
            ready()
            await stop.wait()
        relay.stop()
    return numbers


async def load(sandbox: Sandbox, tenants: Sequence[str], jobs: int, *, batch: int = 1000) -> None:
    """Store `jobs` for each tenant, without a wake-up."""
    headers = decode_json(HEADERS.encode())
    async with GatewayClient(sandbox.gateway_dsn) as client:
        for tenant in tenants:
            for first in range(0, jobs, batch):
                await client.tenant(tenant).enqueue_many(
                    [
                        DispatchRequest(RELAY, OPERATION, headers=headers, body=BODY, ttl=TTL)
                        for _ in range(min(batch, jobs - first))
                    ],
                    notify=False,
                )


@asynccontextmanager
async def _ours(sandbox: Sandbox) -> AsyncIterator[Call]:
    headers = decode_json(HEADERS.encode())
    async with GatewayClient(sandbox.gateway_dsn) as client:
        tenant = client.tenant(TENANT)

        async def call(body: bytes) -> bytes:
            result = await tenant.call(RELAY, OPERATION, headers, body, timeout=60, ttl=TTL)
            return result.response_body or b""

        yield call


async def _fan_in(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    ours, flights = contender is _OURS, case.parameters["in_flight"]
    worker, dsn = (echo_relay, sandbox.worker_dsn) if ours else (bare_batch_worker, sandbox.bare_dsn)
    numbers = iter(range(case.jobs + flights))
    times: list[float] = []
    right: list[bool] = []
    async with child(worker, dsn=dsn) as process, (_ours if ours else bare_caller)(sandbox) as call:

        async def one(number: int) -> None:
            body = str(number).encode()
            started = time.perf_counter()
            answer = await call(body)
            times.append((time.perf_counter() - started) * 1000)
            right.append(answer == body)

        async def caller() -> None:
            for number in numbers:
                await one(number)

        await asyncio.gather(*(one(next(numbers)) for _ in range(flights)))
        times.clear()
        started = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(flights)))
        elapsed = time.perf_counter() - started
    seen: list[int] = process.result
    found = await sandbox.counts("ours" if ours else "bare")
    check(0, queued=found["queued"])
    checks = check(
        case.jobs + flights,
        answered=sum(right),
        started=len(seen),
        distinct=len(set(seen)),
        succeeded=found["succeeded"],
        results=found["results"],
    )
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    return Sample({"rate": case.jobs / elapsed, "p99/p50": p99 / p50, "p50": p50, "p99": p99}, checks)


async def _drain(sandbox: Sandbox, case: Case) -> Sample:
    await load(sandbox, [TENANT], case.jobs)
    relay = Relay(RELAY, tenants=[TENANT], dsn=sandbox.worker_dsn, concurrency=CONCURRENCY)
    handled = []

    @relay.handler(OPERATION)
    async def handle(job: DispatchJob) -> Reply:
        handled.append(job.job_id)
        return Reply(job.body)

    with as_relay_run():
        await relay.run(drain=True)
    found = await sandbox.counts("ours")
    checks = check(
        case.jobs,
        handled=len(handled),
        distinct=len(set(handled)),
        succeeded=found["succeeded"],
        results=found["results"],
    )
    return Sample({"rate": case.jobs / await sandbox.completion_span("ours")}, checks)


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    return await (_drain(sandbox, case) if contender is _DRAIN else _fan_in(sandbox, case, contender))


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({"in_flight": 2000}, 4_000 if quick else 40_000)]


SCENARIO: Final = Scenario(
    name="fan-in",
    title="2,000 calls in flight in one gateway process",
    figures=(
        Figure("rate", "calls/s", higher_is_better=True, target=0.8),
        Figure("p99/p50", "×", higher_is_better=False, target=3.0, judged="value"),
        Figure("p50", "ms", higher_is_better=False),
        Figure("p99", "ms", higher_is_better=False),
    ),
    contenders=(_OURS, _DRAIN, _BARE),
    cases=_cases,
    run=_run,
)
