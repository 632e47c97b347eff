"""Heartbeats, lost leases, pauses and cancellations of chunks in hand (D111, D112)."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import asyncpg
import pytest

from dispatch_core.durable_models import ChunkStatus, JobStatus
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import ConfigurationError, ConnectionLostError, DatabaseBusyError, LeaseLostError
from dispatch_core.settings import CoreSettings
from relay_sdk import ChunkContext, StopReason
from tests.support.chunks import KIND, SELDOM, Work, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.durable import run_out
from tests.support.eventually import eventually
from tests.support.proxy import TcpProxy
from tests.support.relays import TENANT, running

# For leases that are to run out, though not before their handlers have begun.
BRIEF: dict[str, Any] = {"lease_seconds": 1.5, "heartbeat_seconds": 0.5}
# Renewed often, and lost on no machine.
LIVELY: dict[str, Any] = {"lease_seconds": 60.0, "heartbeat_seconds": 0.2}


async def test_a_handler_may_take_longer_than_its_lease(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit(3)
    relay = chunk_relay(database, durable={"lease_seconds": 2.0, "heartbeat_seconds": 0.5})

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        ctx.advance(7)
        await asyncio.sleep(2.5)
        assert not ctx.stopping

    async with running(relay):
        await eventually(lambda: relay.metrics.chunk_leases_renewed >= 3)
        # All of them in one statement.
        assert relay.metrics.chunk_leases_renewed == 3 * relay.metrics.chunk_heartbeats
        # Told by a heartbeat, long before the completion.
        assert (await work.job(job_id)).rows_done == 21
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert (await work.chunk(job_id)).attempts == 1


async def test_leases_go_on_while_handlers_hold_all_connections_that_they_may(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(4)
    relay = chunk_relay(database, durable=LIVELY)
    relay.core = CoreSettings.load(dsn=database.worker_dsn, pool_max_size=4)
    inside, most = 0, 0

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        nonlocal inside, most
        async with ctx.transaction() as conn:
            inside += 1
            most = max(most, inside)
            await conn.execute("select 1")
            renewed = relay.metrics.chunk_heartbeats
            await eventually(lambda: relay.metrics.chunk_heartbeats > renewed + 1)
            await ctx.complete()
            inside -= 1

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert most == 2, "two of the four connections are the runner's"
    assert (await work.chunk(job_id, 4)).attempts == 1
    assert relay.metrics.chunks_lost == 0


async def test_two_relays_of_a_process_leave_two_connections_of_their_pool_together(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    jobs = [await work.submit(3, kind=kind) for kind in ("one", "two")]
    core = CoreSettings.load(dsn=database.worker_dsn, pool_max_size=4)
    relays = [chunk_relay(database), chunk_relay(database)]
    inside, most = 0, 0

    async def handler(ctx: ChunkContext) -> None:
        nonlocal inside, most
        async with ctx.transaction():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.05)
            await ctx.complete()
            inside -= 1

    for relay, kind in zip(relays, ("one", "two"), strict=True):
        relay.core = core
        relay.chunk_handler(kind)(handler)
    async with running(*relays):
        for job_id in jobs:
            assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert most == 2


async def test_heartbeats_have_one_connection_of_their_own_that_ends_with_the_relay(
    database: TestDatabase, gateway: Any, admin: Any
) -> None:
    work = Work(gateway)
    relay = chunk_relay(database, durable={"lease_seconds": 60.0})
    go = asyncio.Event()

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        await go.wait()

    async def lines() -> int:
        return int(
            await admin.fetchval(
                "select count(*) from pg_stat_activity where datname = current_database() and application_name like $1",
                "%heartbeat",
            )
        )

    async with running(relay):
        assert await lines() == 0, "opened with the first chunk, and not before"
        job_id = await work.submit(1)
        await work.until_chunk(job_id, ChunkStatus.RUNNING)
        for count in (1, 2):
            relay._chunk_session._heartbeat.ask([job_id])  # type: ignore[union-attr]
            await eventually(lambda: relay.metrics.chunk_heartbeats >= count)  # noqa: B023
        assert await lines() == 1
        go.set()
        await work.end(job_id)

    async def none() -> bool:
        return await lines() == 0

    await eventually(none)


async def test_with_a_pool_of_the_callers_one_of_its_connections_is_kept_for_heartbeats(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(2)
    async with asyncpg.create_pool(database.worker_dsn, min_size=0, max_size=4) as pool:
        relay = chunk_relay(database, durable=LIVELY, pool=pool)

        @relay.chunk_handler(KIND)
        async def handler(ctx: ChunkContext) -> None:
            async with ctx.transaction() as conn:
                await conn.execute("select 1")
                await eventually(lambda: relay.metrics.chunk_heartbeats)
                await ctx.complete()

        async with running(relay):
            assert (await work.end(job_id)).status is JobStatus.COMPLETED
        assert relay.metrics.chunk_heartbeats >= 1
        assert relay.metrics.chunks_lost == 0


async def test_a_pool_of_one_connection_is_refused_with_chunk_handlers(database: TestDatabase) -> None:
    async with asyncpg.create_pool(database.worker_dsn, min_size=0, max_size=1) as pool:
        relay = chunk_relay(database, pool=pool)

        @relay.chunk_handler(KIND)
        async def handler(ctx: ChunkContext) -> None:
            pass

        with pytest.raises(ConfigurationError, match="needs 2 connections at least"):
            await relay.run()


@pytest.mark.invariant("J3")
@pytest.mark.case("C17")
@pytest.mark.invariant("I3")
async def test_a_handler_that_blocks_the_event_loop_is_fenced_out_and_told(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    blocked = chunk_relay(database, durable={**BRIEF, **SELDOM})
    told: list[Any] = []

    @blocked.chunk_handler(KIND)
    async def block(ctx: ChunkContext) -> str:
        time.sleep(2 * 1.5)  # noqa: ASYNC251  what must not be done
        try:
            await ctx.save_checkpoint({"row": 1})
        except LeaseLostError as error:
            told.append(error.job_id)
        told.append(ctx.stopping.reason)
        with pytest.raises(LeaseLostError):
            async with ctx.transaction():
                told.append("a transaction was opened")
        return "a completion that comes too late"

    async with running(blocked):
        await eventually(lambda: len(told) == 2, timeout=15)
        await eventually(lambda: blocked.metrics.chunks_lost == 1)
        chunk = await work.chunk(job_id)
        # Nobody has taken it back: it was not renewed, and what it said was refused by the clock alone.
        assert (chunk.status, chunk.checkpoint, chunk.outcome) == (ChunkStatus.RUNNING, None, None)
        assert chunk.lease_expires_at is not None
        assert chunk.lease_expires_at < await gateway.fetchval("select clock_timestamp()")
        assert blocked.metrics.chunks_done == 0
    assert told == [job_id, StopReason.LEASE_LOST]

    free = chunk_relay(database)

    @free.chunk_handler(KIND)
    async def run(ctx: ChunkContext) -> int:
        return ctx.attempt

    async with running(free):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert (await work.chunk(job_id)).outcome == 2


@pytest.mark.case("C17")
async def test_a_handler_that_blocks_and_returns_without_a_word_completes_nothing(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={**BRIEF, **SELDOM})

    @relay.chunk_handler(KIND)
    async def block(ctx: ChunkContext) -> str:
        time.sleep(1.5 + 0.5)  # noqa: ASYNC251
        return "too late"

    async with running(relay):
        await eventually(lambda: relay.metrics.chunks_lost == 1)
        assert (await work.chunk(job_id)).status is ChunkStatus.RUNNING
        assert relay.metrics.chunks_done == 0


async def test_a_lease_is_lost_by_the_clock_when_the_database_cannot_be_reached(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    seen: list[Any] = []
    async with TcpProxy.before(database.worker_dsn) as proxy:
        relay = chunk_relay(proxy.dsn(database.worker_dsn), durable={**BRIEF, **SELDOM}, chunk_stop_seconds=0.2)

        @relay.chunk_handler(KIND)
        async def handler(ctx: ChunkContext) -> None:
            try:
                seen.append("started")
                seen.append(await ctx.stopping.wait())
                with pytest.raises(LeaseLostError):
                    await ctx.save_checkpoint(1)
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        async with running(relay, grace_seconds=0.0):
            await eventually(lambda: seen == ["started"])
            began = time.monotonic()
            proxy.mode = "black_hole"
            await eventually(lambda: seen[-1] == "cancelled")
            assert time.monotonic() - began >= 0.2
            proxy.mode = "pass"
    assert seen == ["started", StopReason.LEASE_LOST, "cancelled"]
    assert (await work.chunk(job_id)).attempts == 1


@pytest.mark.case("C18")
async def test_an_attempt_that_was_taken_back_touches_nothing_of_the_next_one_of_the_same_instance(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={**LIVELY, **SELDOM}, poll_seconds=600)
    told: list[Any] = []
    second, go = asyncio.Event(), asyncio.Event()

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        if ctx.attempt == 2:
            await ctx.save_checkpoint("the second's")
            second.set()
            await go.wait()
            return "the second's"
        told.append(await ctx.stopping.wait())
        await second.wait()
        for write in (ctx.save_checkpoint("the first's"), ctx.complete("the first's")):
            with pytest.raises(LeaseLostError):
                await write
        return "the first's"

    async with running(relay):
        await work.until_chunk(job_id, ChunkStatus.RUNNING)
        assert await work.repository.set_chunk_statuses(TENANT, job_id, "running", "retry") == 1
        await eventually(lambda: relay.metrics.chunks_lost == 1)
        assert told == [StopReason.LEASE_LOST]
        assert (await work.chunk(job_id)).checkpoint == "the second's"
        go.set()
        await work.end(job_id)
    chunk = await work.chunk(job_id)
    assert (chunk.outcome, chunk.checkpoint, chunk.attempts) == ("the second's", "the second's", 2)


# --- pause and cancel ---


async def test_a_pause_releases_the_chunk_with_its_checkpoint_and_without_its_attempt(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(2)
    # A heartbeat would find out too, but later than this test waits: it is the ring of the pause that tells.
    relay = chunk_relay(database, chunk_concurrency=1, poll_seconds=600, durable={"lease_seconds": 60})
    seen: list[Any] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        seen.append((ctx.seq, ctx.attempt, ctx.checkpoint))
        if ctx.seq == 1 and ctx.checkpoint is None:
            await ctx.save_checkpoint({"row": 10})
            seen.append(await ctx.stopping.wait())
            ctx.stopping.check()
        return "done"

    async with running(relay):
        await eventually(lambda: relay.metrics.checkpoints == 1)
        assert (await work.control(job_id, "pause")).outcome == "applied"
        chunk = await work.until_chunk(job_id, ChunkStatus.PENDING)
        assert (chunk.attempts, chunk.checkpoint) == (0, {"row": 10})
        # Nothing is claimed of a paused job, the other chunk neither.
        relay._chunk_session._claimer.ring_all()  # type: ignore[union-attr]
        claims = relay.metrics.chunk_claims
        await eventually(lambda: relay.metrics.chunk_claims > claims)
        assert relay.metrics.chunks_claimed == 1
        await work.control(job_id, "resume")
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert seen == [(1, 1, None), StopReason.PAUSED, (1, 1, {"row": 10}), (2, 1, None)]
    assert relay.metrics.chunks_released == 1


async def test_a_handler_that_does_not_heed_a_pause_is_cancelled_and_its_chunk_released(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, chunk_stop_seconds=0.1)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        await ctx.save_checkpoint(1)
        await asyncio.sleep(60)

    async with running(relay):
        await eventually(lambda: relay.metrics.checkpoints == 1)
        await work.control(job_id, "pause")
        chunk = await work.until_chunk(job_id, ChunkStatus.PENDING)
    assert (chunk.attempts, chunk.checkpoint) == (0, 1)
    assert relay.metrics.handlers_cancelled == 1


async def test_a_chunk_that_may_not_run_twice_is_told_of_a_pause_and_never_cancelled(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1, idempotent=False)
    relay = chunk_relay(database, chunk_stop_seconds=0.05)
    go = asyncio.Event()

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        await ctx.stopping.wait()
        await go.wait()
        return "to its end"

    async with running(relay):
        await work.until_chunk(job_id, ChunkStatus.RUNNING)
        await work.control(job_id, "pause")
        slots = relay._chunk_session._slots  # type: ignore[union-attr]
        await eventually(lambda: [slot.stop for slot in slots or ()] == [StopReason.PAUSED])
        await asyncio.sleep(0.2)
        go.set()
        chunk = await work.until_chunk(job_id, ChunkStatus.DONE)
    assert (chunk.outcome, relay.metrics.handlers_cancelled) == ("to its end", 0)


@pytest.mark.case("C24")
async def test_a_cancellation_tells_and_cancels_the_handler_and_nothing_of_it_counts(
    database: TestDatabase, gateway: Any, admin: Any
) -> None:
    work = Work(gateway)
    await admin.execute("create table public.row (n int); grant all on public.row to public")
    job_id = await work.submit(3)
    relay = chunk_relay(database, chunk_concurrency=1, durable={"lease_seconds": 60}, chunk_stop_seconds=0.1)
    seen: list[Any] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        try:
            seen.append((ctx.seq, await ctx.stopping.wait()))
            with pytest.raises(LeaseLostError):
                async with ctx.transaction() as conn:
                    await conn.execute("insert into public.row values (1)")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async with running(relay):
        await work.until_chunk(job_id, ChunkStatus.RUNNING)
        assert (await work.control(job_id, "cancel")).outcome == "applied"
        await eventually(lambda: seen and seen[-1] == "cancelled")
        await eventually(lambda: relay.health().chunks_in_hand == 0)
    assert seen == [(1, StopReason.CANCELLED), "cancelled"]
    job = await work.job(job_id)
    assert (job.status, job.chunks[ChunkStatus.CANCELLED]) == (JobStatus.CANCELLED, 3)
    assert await admin.fetchval("select count(*) from public.row") == 0
    assert relay.metrics.chunks_claimed == 1


@pytest.mark.case("C24")
async def test_a_transaction_that_is_open_when_its_job_is_cancelled_cannot_commit(
    database: TestDatabase, gateway: Any, admin: Any
) -> None:
    work = Work(gateway)
    await admin.execute("create table public.row (n int); grant all on public.row to public")
    job_id = await work.submit(1)
    relay = chunk_relay(database, chunk_stop_seconds=30)
    written, go, failed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        try:
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.row values (1)")
                written.set()
                await go.wait()
        except LeaseLostError:
            failed.set()
            raise

    async with running(relay):
        await asyncio.wait_for(written.wait(), 10)
        await work.control(job_id, "cancel")
        go.set()
        await asyncio.wait_for(failed.wait(), 10)
    assert await admin.fetchval("select count(*) from public.row") == 0
    assert (await work.chunk(job_id)).status is ChunkStatus.CANCELLED


async def test_a_heartbeat_finds_out_where_the_ring_was_lost(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    paused, cancelled = await work.submit(1), await work.submit(1)
    relay = chunk_relay(database, durable=LIVELY)
    monkeypatch.setattr("relay_sdk.chunk_session.ChunkSession._on_ring", lambda self, tenant: lambda payload: None)
    seen: dict[Any, StopReason] = {}

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        seen[ctx.job_id] = await ctx.stopping.wait()
        ctx.stopping.check()

    async with running(relay):
        await work.until_chunk(paused, ChunkStatus.RUNNING)
        await work.until_chunk(cancelled, ChunkStatus.RUNNING)
        await work.control(paused, "pause")
        await work.control(cancelled, "cancel")
        await eventually(lambda: len(seen) == 2)
    assert seen == {paused: StopReason.PAUSED, cancelled: StopReason.CANCELLED}


async def test_a_heartbeat_that_fails_is_tried_again_on_a_new_connection(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable=LIVELY)
    heartbeat, failures = DurableRepository.heartbeat, 2

    async def failing(self: DurableRepository, *args: Any, **options: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise DatabaseBusyError("try again")
        return await heartbeat(self, *args, **options)

    monkeypatch.setattr(DurableRepository, "heartbeat", failing)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        await eventually(lambda: relay.metrics.chunk_leases_renewed)

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert failures == 0
    assert relay.metrics.chunks_lost == 0


async def test_rows_that_a_heartbeat_told_are_counted_once_when_they_are_done_again(
    database: TestDatabase, gateway: Any, admin: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    # Not lively: a relay takes chunks back when it has been there for a lease itself.
    relay = chunk_relay(database, durable={"heartbeat_seconds": 0.4})
    died = asyncio.Event()

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        if ctx.attempt == 1:
            ctx.advance(3)
            await ctx.save_checkpoint({"row": 3})
            ctx.advance(4)
            heartbeats = relay.metrics.chunk_heartbeats
            await eventually(lambda: relay.metrics.chunk_heartbeats > heartbeats + 1)
            assert (await work.chunk(job_id)).rows_done == 7
            # As where the process was killed: somebody takes it back, by the clock.
            await run_out(admin)
            died.set()
            await asyncio.sleep(60)
        assert ctx.rows_done == 3
        ctx.advance(7)

    async with running(relay):
        job = await work.end(job_id)
    assert died.is_set()
    assert job.rows_done == 10


@pytest.mark.case("C17")
async def test_a_chunk_whose_lease_was_over_before_its_handler_could_start_is_not_started(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(2)
    relay = chunk_relay(database, durable={**BRIEF, "sweep_seconds": 0.2})
    claim, stalls = DurableRepository.claim, 1
    started: list[int] = []

    async def stalled(*args: Any, **options: Any) -> Any:
        nonlocal stalls
        claimed = await claim(*args, **options)
        if claimed.chunks and stalls:
            stalls -= 1
            time.sleep(1.7)  # noqa: ASYNC251  the process is stopped, say
        return claimed

    monkeypatch.setattr(DurableRepository, "claim", stalled)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        started.append(ctx.attempt)

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert started == [2, 2]
    assert relay.metrics.chunks_lost == 2


async def test_a_relay_with_nothing_in_hand_is_not_degraded_because_of_its_last_heartbeat(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={"heartbeat_seconds": 0.1, **SELDOM})
    go = asyncio.Event()

    async def fails(*args: Any, **options: Any) -> Any:
        raise ConnectionLostError("no reply")

    monkeypatch.setattr(DurableRepository, "heartbeat", fails)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        await go.wait()

    async with running(relay):
        await eventually(lambda: relay.health().status == "degraded")
        go.set()
        await work.end(job_id)
        await eventually(lambda: relay.health().status == "ok")


async def test_a_chunk_that_somebody_has_locked_for_long_is_asked_for_ever_less_often(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={"lease_seconds": 60.0, "heartbeat_seconds": 20.0, **SELDOM})
    own = await asyncpg.connect(database.worker_dsn)
    beats: list[int] = []
    seconds: list[float] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        async with own.transaction():
            await ctx.save_checkpoint(1, conn=own)
            relay._chunk_session._heartbeat.ask([job_id])  # type: ignore[union-attr]
            asked = time.monotonic()
            await eventually(lambda: relay.metrics.chunk_heartbeats >= 4)
            beats.append(relay.metrics.chunk_heartbeats)
            seconds.append(time.monotonic() - asked)

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    await own.close()
    # At once, and after 0.1, 0.3, 0.7, 1.5 s.
    assert beats[0] <= 2 + math.log2(1 + seconds[0] / 0.1), (beats, seconds)
    assert seconds[0] > 0.6
