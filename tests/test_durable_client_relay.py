"""A gateway's client and a relay together: what the one does, the other sees, by pushes alone."""

from __future__ import annotations

import anyio
import pytest

from dispatch_core.durable_models import ChunkSpec, ChunkStatus, JobProgress, JobStatus
from gateway_sdk import durable_watch
from relay_sdk import ChunkContext
from tests.support.chunks import KIND, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.protocol import TENANT
from tests.support.relays import running

NEVER = 3600.0


async def test_progress_pause_and_end_are_pushed_from_relay_to_gateway_and_back(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_watch, "_PROGRESS_SECONDS", NEVER)
    relay = chunk_relay(database)
    gate, began = anyio.Semaphore(0), 0

    @relay.chunk_handler(KIND, concurrency=2)
    async def handler(ctx: ChunkContext) -> None:
        nonlocal began
        began += 1
        while True:
            ctx.stopping.check()
            with anyio.move_on_after(0.01):
                await gate.acquire()
                ctx.advance(10)
                return

    seen: list[JobProgress] = []
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client, running(relay):
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit(KIND, [ChunkSpec(n, rows=10) for n in range(6)])

        async def watch() -> None:
            async for progress in jobs.watch(job_id):
                seen.append(progress)  # noqa: PERF401  (it is looked at meanwhile)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                await eventually(lambda: began == 2)
                gate.release()
                await eventually(lambda: seen and seen[-1].rows_done == 10)
                done = await jobs.pause(job_id)
                assert (done.outcome, done.was) == ("applied", "running")
                await eventually(lambda: (seen[-1].status, seen[-1].chunks[ChunkStatus.RUNNING]) == ("paused", 0))
                await jobs.resume(job_id)
                for _ in range(5):
                    gate.release()
        assert (seen[-1].status, seen[-1].rows_done) == (JobStatus.COMPLETED, 60)
        assert (await jobs.wait(job_id, timeout=0)).chunks[ChunkStatus.DONE] == 6
