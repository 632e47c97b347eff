"""Resident memory of a relay that drains 300,000 jobs, and of a gateway with 1,000 calls in flight all the time.

The process is a child of its own, looked at from outside every 50 ms. `peak` is the most it ever had; `late / early`
compares the median of the last quarter with that of the second one: what leaks goes on growing. Handlers and callers
keep nothing, so it is the database that is asked whether each job ran once.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import asyncpg

from benchmarks.bare.loops import drain_by_functions
from benchmarks.child import Child, Orders, child
from benchmarks.model import Case, Contender, Figure, Plot, Point, Sample, Scenario, check
from benchmarks.sandbox import BODY, HEADERS, OPERATION, RELAY, TENANT, Sandbox
from benchmarks.scenarios.drain import BATCH, CONCURRENCY
from dispatch_core.codec import decode_json
from dispatch_core.ids import new_id
from gateway_sdk import GatewayClient
from relay_sdk import DispatchJob, Relay, Reply

__all__ = ["SCENARIO"]

_EVERY_SECONDS: Final = 0.05
_CALLS_AT_ONCE: Final = 1_000

_OURS = Contender(
    "ours", "ours", f"a Relay with concurrency={CONCURRENCY}; a GatewayClient with {_CALLS_AT_ONCE:,} calls in flight"
)
_LOOP = Contender(
    "loop-2", "baseline", "a process with claim and complete functions in a loop on 2 connections, keeping all ids"
)

Ready = Callable[[], None]


async def relay_process(ready: Ready, _stop: asyncio.Event, orders: Orders, *, dsn: str) -> None:
    """Drain at the first order; answer how many handlers ran."""
    ready()
    async for _ in orders:
        relay = Relay(RELAY, tenants=[TENANT], dsn=dsn, concurrency=CONCURRENCY)
        handled, reply = 0, Reply()

        @relay.handler(OPERATION)
        async def handle(_job: DispatchJob, reply: Reply = reply) -> Reply:
            nonlocal handled
            handled += 1
            return reply

        await relay.run(drain=True)
        orders.answer(handled)


async def loop_process(ready: Ready, _stop: asyncio.Event, orders: Orders, *, dsn: str) -> None:
    """Drain by a bare loop at the first order; answer how many were claimed."""
    connections = [await asyncpg.connect(dsn) for _ in range(2)]
    ready()
    async for _ in orders:
        orders.answer(len(await drain_by_functions(connections, BATCH)))
    for connection in connections:
        await connection.close(timeout=10)


async def gateway_process(ready: Ready, _stop: asyncio.Event, orders: Orders, *, dsn: str) -> None:
    """Make as many calls as the order says, a thousand at once; answer how many came back as they were sent."""
    headers = decode_json(HEADERS.encode())
    async with GatewayClient(dsn) as client:
        tenant = client.tenant(TENANT)
        await tenant.poll_status(new_id())
        ready()
        async for calls in orders:
            left, answered = calls, 0

            async def caller() -> None:
                nonlocal left, answered
                while left > 0:
                    left -= 1
                    result = await tenant.call(RELAY, OPERATION, headers, BODY, timeout=60)
                    answered += result.response_body == BODY

            await asyncio.gather(*(caller() for _ in range(_CALLS_AT_ONCE)))
            orders.answer(answered)


async def echo_process(ready: Ready, stop: asyncio.Event, *, dsn: str) -> None:
    """Serve by a relay that echoes, until it is stopped."""
    relay = Relay(RELAY, tenants=[TENANT], dsn=dsn, concurrency=CONCURRENCY)

    @relay.handler(OPERATION)
    async def handle(job: DispatchJob) -> Reply:
        return Reply(job.body)

    async with asyncio.TaskGroup() as group:
        group.create_task(relay.run())
        ready()
        await stop.wait()
        relay.stop()


async def _watched(process: Child, order: Any) -> tuple[Any, list[Point]]:
    """Give the order; return its answer, and seconds and megabytes of all that time."""
    curve: list[Point] = []
    started = time.monotonic()

    async def watch() -> None:
        while True:
            curve.append((time.monotonic() - started, _resident_megabytes(process.pid)))
            await asyncio.sleep(_EVERY_SECONDS)

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        answer = await process.ask(order, timeout_seconds=300)
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    return answer, curve


def _resident_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024
    # No /proc, as on macOS.
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)])) / 1024


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    if "calls" in case.parameters:
        async with (
            child(echo_process, dsn=sandbox.worker_dsn),
            child(gateway_process, dsn=sandbox.gateway_dsn) as process,
        ):
            done, curve = await _watched(process, case.jobs)
    else:
        task = relay_process if contender is _OURS else loop_process
        async with child(task, dsn=sandbox.worker_dsn) as process:
            done, curve = await _watched(process, "drain")
    found = await sandbox.counts("ours")
    check(0, queued=found["queued"])
    checks = check(case.jobs, done=done, succeeded=found["succeeded"], results=found["results"])
    sizes = [size for _, size in curve]
    quarter = max(1, len(sizes) // 4)
    early, late = statistics.median(sizes[quarter : 2 * quarter] or sizes), statistics.median(sizes[-quarter:])
    return Sample({"peak": max(sizes), "late / early": late / early}, checks, {"start_MB": sizes[0]}, curve)


def _cases(quick: bool) -> Sequence[Case]:
    drained, calls = (20_000, 4_000) if quick else (300_000, 60_000)
    return [Case({"drain": drained}, drained, drained), Case({"calls": calls}, calls)]


def _who(case: Case, contender: Contender) -> bool:
    return contender is _OURS or "drain" in case.parameters


SCENARIO = Scenario(
    name="memory",
    title="resident memory of a relay during a drain, of a gateway during calls",
    figures=(
        Figure("peak", "MB", higher_is_better=False, target=120, judged="value"),
        Figure("late / early", "×", higher_is_better=False, target=1.10, judged="value"),
    ),
    contenders=(_OURS, _LOOP),
    cases=_cases,
    run=_run,
    plot=Plot(x="seconds", y="MB"),
    takes_part=_who,
    most_rounds=2,
)
