"""Relays as processes: chunks that kill them, and two of them that end a job at the same instant."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import anyio
import pytest

from dispatch_core.durable_models import ChunkStatus, JobStatus
from tests.support import durable
from tests.support.chunks import Work
from tests.support.databases import TestDatabase
from tests.support.durable import EVENT
from tests.support.durable_process import TARGET, Nursery, nursery
from tests.support.eventually import eventually
from tests.support.protocol import Connection


async def _supervise(relays: Nursery, deaths: list[int], **order: Any) -> None:
    """Keep one relay alive beside those that are there, as a supervisor does."""
    pid = await relays.fork(**order)
    while True:
        if relays.has_died(pid):
            deaths.append(pid)
            relays.alive.remove(pid)
            pid = await relays.fork(**order)
        await anyio.sleep(0.02)


@pytest.mark.case("C21")
@pytest.mark.invariant("J4")
async def test_a_chunk_that_kills_its_process_ends_after_its_attempts_and_the_innocent_ones_are_done(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """A supervisor starts the relay again; one job may run a chunk again, three times in all, the other may not."""
    await admin.execute(TARGET)
    work = Work(gateway)
    payloads = ["innocent"] * 4 + ["pill"] + ["innocent"] * 5
    often = await work.submit(payloads, kind="die", max_attempts=3)
    once = await work.submit(payloads, kind="die", max_attempts=3, idempotent=False)
    deaths: list[int] = []
    async with nursery(database.worker_dsn) as relays:
        # One that has nothing to do but to take back what the others leave.
        await relays.fork(relay={"chunk_concurrency": 1}, kinds=["copy"])
        async with anyio.create_task_group() as group:
            # Alone with its process, each: those that are in one process with a pill lose their attempts with it.
            group.start_soon(lambda: _supervise(relays, deaths, relay={"chunk_concurrency": 1}))
            ends = [await work.end(job_id, 60) for job_id in (often, once)]
            group.cancel_scope.cancel()
    assert [job.status for job in ends] == [JobStatus.COMPLETED_WITH_ERRORS, JobStatus.NEEDS_REVIEW]
    failed, waiting = await work.chunk(often, 5), await work.chunk(once, 5)
    assert (failed.status, failed.attempts) == (ChunkStatus.FAILED, 3)
    assert (waiting.status, waiting.attempts) == (ChunkStatus.NEEDS_REVIEW, 1)
    for chunk in (failed, waiting):
        assert str(chunk.last_error).startswith("S2R-LEASE-LOST")
    assert len(deaths) == 4
    for job_id in (often, once):
        others = [await work.chunk(job_id, seq) for seq in range(1, 11) if seq != 5]
        assert {(chunk.status, chunk.attempts) for chunk in others} == {(ChunkStatus.DONE, 1)}
        rows = await admin.fetch("select row_no from public.target where job_id = $1 order by 1", job_id)
        assert [row[0] for row in rows] == [1, 2, 3, 4, 6, 7, 8, 9, 10]
        assert await durable.counters_are_exact(admin, job_id)
    told = Counter(row[0] for row in await admin.fetch(f"select type from {EVENT} where seq = 5"))
    assert told == {"chunk_claimed": 4, "chunk_reaped": 4, "chunk_failed": 1, "chunk_needs_review": 1}


@pytest.mark.case("C21")
async def test_a_job_of_which_a_chunk_kills_ten_at_a_time_ends_and_no_chunk_has_more_attempts_than_it_may(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """Nine crash with it each time; they get as far as their own attempts reach."""
    await admin.execute(TARGET)
    work = Work(gateway)
    job_id = await work.submit(["innocent"] * 4 + ["pill"] + ["innocent"] * 5, kind="die", max_attempts=3)
    deaths: list[int] = []
    async with nursery(database.worker_dsn) as relays:
        await relays.fork(relay={"chunk_concurrency": 1}, kinds=["copy"])
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: _supervise(relays, deaths, relay={"chunk_concurrency": 10}))
            job = await work.end(job_id, 60)
            group.cancel_scope.cancel()
    chunks = await work.repository.chunks(work.tenant, job_id)
    print(Counter((chunk.payload, chunk.status.value, chunk.attempts) for chunk in chunks))
    assert len(deaths) == 3
    assert chunks[4].status is ChunkStatus.FAILED
    assert all(chunk.attempts <= 3 for chunk in chunks)
    done = [chunk.seq for chunk in chunks if chunk.status is ChunkStatus.DONE]
    assert job.status is (JobStatus.COMPLETED_WITH_ERRORS if done else JobStatus.FAILED)
    rows = await admin.fetch("select row_no from public.target order by 1")
    assert [row[0] for row in rows] == done
    assert await durable.counters_are_exact(admin, job_id)


@pytest.mark.case("C15")
async def test_two_processes_that_complete_the_last_two_chunks_at_the_same_instant_end_the_job_once_and_at_once(
    database: TestDatabase, admin: Connection, gateway: Connection, is_long: bool
) -> None:
    """20 rounds, 300 with --long. No sweep ends a job here."""
    work = Work(gateway)
    order: Any = {"relay": {"chunk_concurrency": 1}, "durable": {"lease_seconds": 30, "finish_sweep_seconds": 3600}}
    waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
    async with nursery(database.worker_dsn) as relays:
        for _ in range(2):
            await relays.fork(**order)
        for n in range(300 if is_long else 20):
            await admin.execute("select pg_advisory_lock($1)", n)
            payloads = [{"gate": n, "inside": inside} for inside in ((n % 2 == 0), (n % 3 == 0))]
            job_id = await work.submit(payloads, kind="pair")

            async def both() -> bool:
                return bool(await admin.fetchval(waiting) == 2)

            await eventually(both, interval=0.003)
            await admin.execute("select pg_advisory_unlock($1)", n)
            job = await eventually(partial(_ended, work, job_id), interval=0.003)
            assert job.status is JobStatus.COMPLETED
            holders = {(await work.chunk(job_id, seq)).claimed_by for seq in (1, 2)}
            assert len(holders) == 2
            assert (await durable.told(gateway, job_id)).count("completed") == 1


async def _ended(work: Work, job_id: Any) -> Any:
    job = await work.job(job_id)
    return job if job.status.is_terminal else None
