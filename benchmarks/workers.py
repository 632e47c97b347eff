"""Relays that run in another process: ours, and the least that does the same with NOTIFY.

Both serve one relay of one tenant, echo the body, and can note when each handler started. Times are of the monotonic
clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import asyncpg

from benchmarks.bare import statements
from benchmarks.sandbox import OPERATION, RELAY, TENANT, TTL
from dispatch_core.ids import new_id
from relay_sdk import DispatchJob, Relay, Reply

__all__ = ["bare_worker", "relay_worker"]

Ready = Callable[[], None]


async def relay_worker(ready: Ready, stop: asyncio.Event, *, dsn: str) -> list[list[int]]:
    """Serve by a `Relay` with its defaults; return [number in the body, nanoseconds] of each handler's start."""
    relay = Relay(RELAY, tenants=[TENANT], dsn=dsn)
    starts: list[list[int]] = []

    @relay.handler(OPERATION)
    async def handle(job: DispatchJob) -> Reply:
        starts.append([int(job.body), time.monotonic_ns()])
        return Reply(job.body)

    async with asyncio.TaskGroup() as group:
        group.create_task(relay.run())
        async with asyncio.timeout(30):
            # Until the first claim has found nothing: from then on only a wake-up makes it look.
            while not (relay.metrics.claims_empty and relay.health().listener == "listening"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        ready()
        await stop.wait()
        relay.stop()
    return starts


async def bare_worker(ready: Ready, stop: asyncio.Event, *, dsn: str) -> list[list[int]]:
    """Serve by LISTEN on one connection, and one claim and one completion (which notifies) on another."""
    listening: Any = await asyncpg.connect(dsn)
    working: Any = await asyncpg.connect(dsn)
    rung = asyncio.Event()
    starts: list[list[int]] = []
    await listening.add_listener(statements.JOB_CHANNEL, lambda *_: rung.set())

    async def serve() -> None:
        while True:
            rung.clear()
            while jobs := await working.fetch(statements.CLAIM, TENANT, RELAY, "bare", new_id(), TTL, 100):
                starts.extend([int(job["request_body"]), time.monotonic_ns()] for job in jobs)
                await working.fetch(
                    statements.COMPLETE_NOTIFY,
                    TENANT,
                    [job["job_id"] for job in jobs],
                    [job["fence"] for job in jobs],
                    "bare",
                    [job["request_body"] for job in jobs],
                    RELAY,
                )
                if len(jobs) < 100:
                    break
            await rung.wait()

    task = asyncio.get_running_loop().create_task(serve())
    ready()
    await stop.wait()
    task.cancel()
    await asyncio.wait([task])
    for connection in (listening, working):
        await connection.close(timeout=10)
    return starts
