"""How soon an idle relay starts: one job every 50 ms, from the start of the enqueue call to the start of the handler.

The relay is another process. Ours: `GatewayClient.enqueue` and `Relay`; a lone enqueue rings in its own statement where
commits are cheap, else after it, from a connection of its own. The bare side: INSERT and NOTIFY in one transaction,
LISTEN, one claim.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from benchmarks.bare import statements
from benchmarks.child import child
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check, percentile
from benchmarks.sandbox import HEADERS, OPERATION, RELAY, TENANT, TTL, Sandbox
from benchmarks.workers import bare_worker, relay_worker
from dispatch_core.codec import decode_json
from dispatch_core.ids import new_id
from gateway_sdk import GatewayClient

__all__ = ["SCENARIO"]

_EVERY_SECONDS: Final = 0.05
# Not measured: connections are made and statements prepared by them, on both sides.
_WARM: Final = 8

_OURS = Contender("ours", "ours", "GatewayClient.enqueue, Relay in another process, both with their defaults")
_BARE = Contender("bare", "baseline", "INSERT and NOTIFY in one transaction, LISTEN and claim in another process")

Send = Callable[[int], Awaitable[object]]


@asynccontextmanager
async def _ours(sandbox: Sandbox) -> AsyncIterator[Send]:
    headers = decode_json(HEADERS.encode())
    async with GatewayClient(sandbox.gateway_dsn) as client:
        tenant = client.tenant(TENANT)
        yield lambda number: tenant.enqueue(RELAY, OPERATION, headers, str(number), ttl=TTL)


@asynccontextmanager
async def _bare(sandbox: Sandbox) -> AsyncIterator[Send]:
    async with sandbox.connections(sandbox.bare_dsn, 1) as [connection]:
        yield lambda number: connection.fetch(
            statements.INSERT_NOTIFY, TENANT, new_id(), RELAY, OPERATION, HEADERS, str(number).encode(), TTL
        )


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    ours = contender is _OURS
    worker, dsn = (relay_worker, sandbox.worker_dsn) if ours else (bare_worker, sandbox.bare_dsn)
    sent: list[int] = []
    async with child(worker, dsn=dsn) as process, (_ours if ours else _bare)(sandbox) as send:
        for number in range(case.jobs + _WARM):
            sent.append(time.monotonic_ns())
            await send(number)
            await asyncio.sleep(max(0.0, _EVERY_SECONDS - (time.monotonic_ns() - sent[-1]) / 1e9))
        await asyncio.sleep(0.2)
    starts: list[list[int]] = process.result
    started = {number: at for number, at in starts}  # noqa: C416 - lists, as JSON has them
    found = await sandbox.counts("ours" if ours else "bare")
    checks = check(
        len(sent),
        sent=len(sent),
        started=len(starts),
        distinct=len(started),
        succeeded=found["succeeded"],
        results=found["results"],
    )
    times = [(started[number] - sent[number]) / 1e6 for number in range(_WARM, len(sent))]
    figures = {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99)}
    return Sample(figures, checks, {"p90_ms": percentile(times, 0.9)})


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({}, 12 if quick else 200)]


SCENARIO = Scenario(
    name="wake",
    title="an idle relay: start of enqueue to start of handler",
    figures=(
        Figure("p50", "ms", higher_is_better=False, target=1.3),
        Figure("p99", "ms", higher_is_better=False, target=2.0),
    ),
    contenders=(_OURS, _BARE),
    cases=_cases,
    run=_run,
)
