"""How a relay with chunk handlers stops: told, grace, released, and never longer than that."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anyio
import pytest

from dispatch_core.durable_models import ChunkStatus, JobStatus
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import ConnectionLostError
from relay_sdk import ChunkContext, StopReason, course
from tests.support.chunks import KIND, SELDOM, Work, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually
from tests.support.proxy import TcpProxy
from tests.support.relays import Jobs, running

pytestmark = pytest.mark.invariant("I9")

GIVE_BACK_SECONDS = course._GIVE_BACK_SECONDS


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last write of a relay take any time: what it writes is one thing, and how long it may take another."""
    monkeypatch.setattr(course, "_GIVE_BACK_SECONDS", HANGS)


async def test_handlers_are_told_of_a_drain_at_once_and_may_end_at_a_safe_point(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(2)
    relay = chunk_relay(database)
    seen: list[Any] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        await ctx.save_checkpoint(ctx.seq)
        seen.append(await ctx.stopping.wait())
        if ctx.seq == 1:
            ctx.stopping.check()
        return "done in spite of it"

    began = 0.0
    async with running(relay, grace_seconds=30.0):
        await eventually(lambda: relay.metrics.checkpoints == 2)
        began = time.monotonic()
    assert time.monotonic() - began < 15
    assert seen == [StopReason.DRAIN, StopReason.DRAIN]
    released, done = await work.chunk(job_id, 1), await work.chunk(job_id, 2)
    assert (released.status, released.attempts, released.checkpoint) == (ChunkStatus.PENDING, 0, 1)
    assert (done.status, done.outcome) == (ChunkStatus.DONE, "done in spite of it")
    assert relay.metrics.handlers_cancelled == 0


@pytest.mark.case("C30")
async def test_tasks_of_a_handler_that_all_end_at_a_safe_point_are_one_that_does(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1, idempotent=False)
    relay = chunk_relay(database, durable=SELDOM)
    began = asyncio.Event()

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        async def until_told() -> None:
            await ctx.stopping.wait()
            ctx.stopping.check()

        async with anyio.create_task_group() as group:
            group.start_soon(until_told)
            group.start_soon(until_told)
            began.set()

    async with running(relay):
        await began.wait()
        health = relay.health()
        assert (health.chunks_in_hand, health.chunks_running, health.chunks_free) == (1, 1, 15)
        relay.stop()
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.attempts, chunk.last_error) == (ChunkStatus.PENDING, 0, None)


async def test_a_handler_that_outlasts_the_grace_is_cancelled_and_another_relay_goes_on_at_once(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    old, new = (chunk_relay(database, poll_seconds=600, durable={"lease_seconds": 60, **SELDOM}) for _ in range(2))
    seen: list[Any] = []

    @old.chunk_handler(KIND)
    async def endless(ctx: ChunkContext) -> None:
        ctx.advance(3)
        await ctx.save_checkpoint({"row": 3})
        ctx.advance(100)
        await asyncio.sleep(60)

    @new.chunk_handler(KIND)
    async def goes_on(ctx: ChunkContext) -> None:
        seen.append((ctx.attempt, ctx.checkpoint))
        ctx.advance(1)

    async with running(old):
        await eventually(lambda: old.metrics.checkpoints == 1)
        async with running(new):
            old.stop(grace_seconds=0.1)
            job = await work.end(job_id)
    assert seen == [(1, {"row": 3})]
    assert job.rows_done == 4
    assert (old.metrics.chunks_released, old.metrics.handlers_cancelled) == (1, 1)


async def test_a_chunk_that_may_not_run_twice_and_had_to_be_cancelled_is_left_to_a_person(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1, idempotent=False)
    relay = chunk_relay(database, durable={"lease_seconds": 0.6, **SELDOM})

    @relay.chunk_handler(KIND)
    async def endless(ctx: ChunkContext) -> None:
        await ctx.save_checkpoint({"row": 3})
        await asyncio.sleep(60)

    async with running(relay, grace_seconds=0.0):
        await eventually(lambda: relay.metrics.checkpoints == 1)
    assert (await work.chunk(job_id)).status is ChunkStatus.RUNNING
    sweeping = chunk_relay(database, durable={"lease_seconds": 0.6})

    @sweeping.chunk_handler("another")
    async def nothing(ctx: ChunkContext) -> None:
        pass

    async with running(sweeping):
        chunk = await work.until_chunk(job_id, ChunkStatus.NEEDS_REVIEW)
        assert (chunk.checkpoint, chunk.attempts) == ({"row": 3}, 1)
        assert (await work.end(job_id)).status is JobStatus.NEEDS_REVIEW


async def test_a_claim_that_is_under_way_at_the_stop_is_given_back(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(3)
    relay = chunk_relay(database, poll_seconds=600)
    claim, claimed, go = DurableRepository.claim, asyncio.Event(), asyncio.Event()
    started: list[int] = []

    async def slow(self: DurableRepository, *args: Any, **options: Any) -> Any:
        answer = await claim(self, *args, **options)
        claimed.set()
        await go.wait()
        return answer

    monkeypatch.setattr(DurableRepository, "claim", slow)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        started.append(ctx.seq)

    async with running(relay):
        await asyncio.wait_for(claimed.wait(), HANGS)
        relay.stop()
        go.set()
    assert started == []
    assert [(await work.chunk(job_id, seq)).status for seq in (1, 2, 3)] == [ChunkStatus.PENDING] * 3
    assert relay.metrics.chunks_released == 3


@pytest.mark.case("C30")
@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("mode", ["black_hole", "reset"])
async def test_a_stop_is_over_within_the_grace_and_three_seconds_though_the_database_is_away(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch, mode: Any, idempotent: bool
) -> None:
    monkeypatch.setattr(course, "_GIVE_BACK_SECONDS", GIVE_BACK_SECONDS)
    work = Work(gateway)
    job_id = await work.submit(4, idempotent=idempotent)
    async with TcpProxy.before(database.worker_dsn) as proxy:
        relay = chunk_relay(proxy.dsn(database.worker_dsn), durable={"lease_seconds": 30})
        inside: list[int] = []
        go = asyncio.Event()

        @relay.chunk_handler(KIND)
        async def handler(ctx: ChunkContext) -> None:
            inside.append(ctx.seq)
            if ctx.seq == 1:
                await asyncio.sleep(60)
            if ctx.seq == 2:
                async with ctx.transaction() as conn:
                    await conn.execute("select pg_sleep(60)")
            if ctx.seq == 3:
                await go.wait()
                await ctx.save_checkpoint(3)
            if ctx.seq == 4:
                await go.wait()

        task = asyncio.create_task(relay.run())
        await eventually(lambda: len(inside) == 4)
        proxy.mode = mode
        go.set()
        await asyncio.sleep(0.1)
        began = time.monotonic()
        relay.stop(grace_seconds=0.5)
        await asyncio.wait_for(task, HANGS)
        assert time.monotonic() - began < 0.5 + 3.0
    assert relay.health().status == "stopped"
    assert (await work.job(job_id)).chunks[ChunkStatus.RUNNING] == 4


@pytest.mark.case("C29")
async def test_a_handler_that_refuses_to_end_is_left_behind_and_its_chunk_released(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)
    free, inside = asyncio.Event(), asyncio.Event()

    @relay.chunk_handler(KIND)
    async def stubborn(ctx: ChunkContext) -> None:
        await ctx.save_checkpoint(1)
        async with ctx.transaction():
            # It has the chunk locked, too.
            await ctx.save_checkpoint(2)
            inside.set()
            while not free.is_set():
                try:
                    await free.wait()
                except asyncio.CancelledError:
                    pass

    async with running(relay, grace_seconds=0.0):
        await asyncio.wait_for(inside.wait(), HANGS)
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.attempts, chunk.checkpoint) == (ChunkStatus.PENDING, 0, 1)
    free.set()


async def test_cancelling_the_relays_task_releases_its_chunks(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)
    started = asyncio.Event()

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        started.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(relay.run())
    await asyncio.wait_for(started.wait(), HANGS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.attempts) == (ChunkStatus.PENDING, 0)


@pytest.mark.parametrize("piece", ["heartbeat", "sweeper", "watch", "progress", "completer"])
async def test_a_piece_that_dies_takes_the_relay_down_with_its_cause_and_the_chunk_is_released(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)
    started = asyncio.Event()

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        started.set()
        await asyncio.sleep(60)

    async def dies(self: Any, *args: Any, **options: Any) -> Any:
        if "task_status" in options:
            options["task_status"].started()
        await started.wait()
        raise RuntimeError(f"{piece} is broken")

    monkeypatch.setattr(f"relay_sdk.chunk_{piece}.Chunk{piece.capitalize()}.run", dies)
    with pytest.raises(RuntimeError, match=f"{piece} is broken"):
        await asyncio.wait_for(relay.run(), HANGS)
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.attempts) == (ChunkStatus.PENDING, 0)


async def test_where_chunks_bring_the_relay_down_its_jobs_are_given_back_too(
    database: TestDatabase, gateway: Any
) -> None:
    work, jobs = Work(gateway), Jobs(gateway)
    relay = chunk_relay(database)
    dispatched = await jobs.enqueue("Do", max_attempts=2)
    running_job = asyncio.Event()

    @relay.handler("Do")
    async def handle_job(job: Any) -> None:
        running_job.set()
        await asyncio.sleep(60)

    @relay.chunk_handler(KIND)
    async def handle_chunk(ctx: ChunkContext) -> None:
        await running_job.wait()
        raise KeyboardInterrupt

    relay.settings = relay.settings.model_copy(update={"grace_seconds": 0.1})
    await work.submit(1)
    with pytest.raises(KeyboardInterrupt):
        await relay.run()
    assert (await jobs.get(dispatched)).status == "pending"


# --- lost replies ---


async def test_chunks_of_a_claim_whose_reply_was_lost_are_found_again(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(3)
    relay = chunk_relay(database, poll_seconds=600, durable={"lease_seconds": 60, **SELDOM})
    claim, lost = DurableRepository.claim, 1

    async def loses(self: DurableRepository, *args: Any, **options: Any) -> Any:
        nonlocal lost
        answer = await claim(self, *args, **options)
        if lost and answer.chunks:
            lost -= 1
            raise ConnectionLostError("the reply was lost")
        return answer

    monkeypatch.setattr(DurableRepository, "claim", loses)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        pass

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert relay.metrics.chunk_claims_recovered == 1
    assert (await work.chunk(job_id)).attempts == 1


async def test_a_claim_that_never_came_to_the_server_holds_up_no_other_for_a_lease(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(3)
    relay = chunk_relay(database, durable={"lease_seconds": 600, **SELDOM})
    claim, lost = DurableRepository.claim, 1

    async def loses(self: DurableRepository, *args: Any, **options: Any) -> Any:
        nonlocal lost
        if lost:
            lost -= 1
            raise ConnectionLostError("the connection broke")
        return await claim(self, *args, **options)

    monkeypatch.setattr(DurableRepository, "claim", loses)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        pass

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert lost == 0


async def test_what_a_lost_claim_took_is_released_when_the_relay_stops(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(3, idempotent=False)
    relay = chunk_relay(database, poll_seconds=600, durable={"lease_seconds": 60, **SELDOM})
    claim, again = DurableRepository.claim, DurableRepository.claim_again
    lost, stopping = asyncio.Event(), False

    async def loses(self: DurableRepository, *args: Any, **options: Any) -> Any:
        answer = await claim(self, *args, **options)
        if answer.chunks:
            lost.set()
            raise ConnectionLostError("the reply was lost")
        return answer

    async def not_yet(self: DurableRepository, *args: Any, **options: Any) -> Any:
        if lost.is_set() and not stopping:
            raise ConnectionLostError("and so was this one")
        return await again(self, *args, **options)

    monkeypatch.setattr(DurableRepository, "claim", loses)
    monkeypatch.setattr(DurableRepository, "claim_again", not_yet)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        pass

    async with running(relay, grace_seconds=0.0):
        await asyncio.wait_for(lost.wait(), HANGS)
        stopping = True
    assert [(await work.chunk(job_id, seq)).status for seq in (1, 2, 3)] == [ChunkStatus.PENDING] * 3


async def test_a_completion_whose_reply_was_lost_is_repeated_and_counts_once(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(2)
    relay = chunk_relay(database, durable={"lease_seconds": 60, **SELDOM})
    complete_many, complete = DurableRepository.complete_many, DurableRepository.complete
    lost = 0

    async def loses(self: DurableRepository, *args: Any) -> Any:
        nonlocal lost
        answer = await complete_many(self, *args)
        if lost == 0:
            lost += 1
            raise ConnectionLostError("the reply was lost")
        return answer

    async def commits_and_loses(self: DurableRepository, *args: Any) -> Any:
        nonlocal lost
        answer = await complete(self, *args)
        if lost == 1:
            # As where the reply to the COMMIT is lost: it was committed.
            await self._fetch("commit")
            lost += 1
            raise ConnectionLostError("the reply was lost")
        return answer

    monkeypatch.setattr(DurableRepository, "complete_many", loses)
    monkeypatch.setattr(DurableRepository, "complete", commits_and_loses)

    @relay.chunk_handler(KIND, concurrency=1)
    async def handler(ctx: ChunkContext) -> int:
        if ctx.seq == 2:
            ctx.row_error(1, "bad")
        return ctx.seq

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED_WITH_ERRORS
        await eventually(lambda: relay.metrics.chunks_done == 2)
    assert lost == 2
    assert relay.metrics.chunk_completions_repeated == 2
    assert [(await work.chunk(job_id, seq)).outcome for seq in (1, 2)] == [1, 2]
