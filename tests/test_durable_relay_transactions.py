"""`ctx.transaction()`: a handler's rows, its checkpoint and its completion, together or not at all (D113)."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import asyncpg
import pytest

from dispatch_core.dev.wire import Wire
from dispatch_core.durable_models import ChunkStatus, JobStatus
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import ConfigurationError, ConnectionLostError, LeaseLostError
from relay_sdk import ChunkContext
from tests.support.chunks import KIND, SELDOM, Work, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.relays import TENANT, running


@pytest.fixture
async def rows(admin: Any) -> Any:
    """A table of the handlers' own."""
    await admin.execute("create table public.imported (n int unique); grant all on public.imported to public")

    async def read() -> list[int]:
        return [row["n"] for row in await admin.fetch("select n from public.imported order by n")]

    return read


async def test_rows_and_completion_are_committed_together(database: TestDatabase, gateway: Any, rows: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit(2)
    relay = chunk_relay(database)
    seen: list[Any] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        async with ctx.transaction() as conn:
            await conn.execute("insert into public.imported values ($1)", ctx.seq)
            ctx.advance(1)
            ctx.row_error(2, "bad")
            if ctx.seq == 1:
                await ctx.complete({"n": 1}, conn=conn)
            else:
                await ctx.complete({"n": 2})
            # Nobody sees any of it yet.
            seen.append((await work.chunk(job_id, ctx.seq)).status)
            seen.append(await work.row_errors(job_id))
        seen.append((await work.chunk(job_id, ctx.seq)).status)
        with pytest.raises(LeaseLostError, match="has ended"):
            await ctx.save_checkpoint(1)
        return "this counts no more"

    async with running(relay):
        job = await work.end(job_id)
        await eventually(lambda: relay.metrics.chunks_done == 2)
    assert await rows() == [1, 2]
    assert [(await work.chunk(job_id, seq)).outcome for seq in (1, 2)] == [{"n": 1}, {"n": 2}]
    assert seen.count(ChunkStatus.RUNNING) == seen.count(ChunkStatus.DONE) == 2
    assert (job.status, job.rows_done, job.rows_failed) == (JobStatus.COMPLETED_WITH_ERRORS, 2, 2)


async def test_rows_and_checkpoint_are_committed_together_and_the_next_attempt_goes_on_there(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        for n in range(ctx.checkpoint or 0, 6):
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.imported values ($1)", n)
                ctx.advance()
                await ctx.save_checkpoint(n + 1)
                if ctx.attempt == 1 and n == 3:
                    raise ValueError("in the middle of a transaction")
        assert ctx.checkpoint == 6

    async with running(relay):
        job = await work.end(job_id)
    assert await rows() == [0, 1, 2, 3, 4, 5]
    assert (job.status, job.rows_done) == (JobStatus.COMPLETED, 6)
    assert (await work.chunk(job_id)).attempts == 2


@pytest.mark.invariant("I3")
async def test_a_lost_lease_rolls_the_whole_transaction_back(database: TestDatabase, gateway: Any, rows: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable=SELDOM, poll_seconds=600)
    raised: list[LeaseLostError] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        if ctx.attempt == 2:
            return
        try:
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.imported values (1)")
                # Somebody takes it away, and the runner has not heard of it.
                assert await work.repository.set_chunk_statuses(TENANT, job_id, "running", "retry") == 1
        except LeaseLostError as error:
            raised.append(error)
            raise

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert [(error.job_id, error.seq) for error in raised] == [(job_id, 1)]
    assert await rows() == []


async def test_a_lost_lease_that_the_handler_swallows_inside_commits_nothing(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable=SELDOM, poll_seconds=600)
    outcome: list[str] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        if ctx.attempt == 2:
            return
        try:
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.imported values (1)")
                await work.repository.set_chunk_statuses(TENANT, job_id, "running", "retry")
                try:
                    await ctx.save_checkpoint(1)
                except LeaseLostError:
                    outcome.append("swallowed")
            outcome.append("it seems to be committed")
        except LeaseLostError:
            outcome.append("raised at the end")

    async with running(relay):
        await work.end(job_id)
    assert outcome == ["swallowed", "raised at the end"]
    assert await rows() == []


async def test_a_statement_that_failed_and_was_caught_is_no_silent_rollback(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit([{"complete": False}, {"complete": True}], max_attempts=1)
    relay = chunk_relay(database, chunk_concurrency=1)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        async with ctx.transaction() as conn:
            await conn.execute("insert into public.imported values (1)")
            if ctx.payload["complete"]:
                await ctx.complete("done")
            with pytest.raises(asyncpg.UniqueViolationError):
                await conn.execute("insert into public.imported values (1)")
        return "nothing of it was committed"

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.FAILED
    for seq in (1, 2):
        assert "current transaction is aborted" in str((await work.chunk(job_id, seq)).last_error)
    assert await rows() == []


async def test_the_handlers_own_errors_reach_it_as_they_are_and_the_connection_is_used_again(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)
    pids: list[int] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        try:
            async with ctx.transaction() as conn:
                pids.append(conn.get_server_pid())
                ctx.row_error(1, "told in a transaction that is rolled back")
                await conn.execute("insert into public.imported values (1), (1)")
        except asyncpg.UniqueViolationError:
            pids.append(0)
        try:
            async with ctx.transaction() as conn:
                raise OSError("the handler's own")
        except OSError as error:
            assert str(error) == "the handler's own"  # noqa: PT017
        async with ctx.transaction() as conn:
            pids.append(conn.get_server_pid())
            async with conn.transaction():  # a savepoint
                await conn.execute("insert into public.imported values (2)")
            with pytest.raises(ConfigurationError, match="a transaction open already"):
                async with ctx.transaction():
                    pass
            await ctx.complete()

    async with running(relay):
        job = await work.end(job_id)
    assert pids == [pids[0], 0, pids[0]]
    assert await rows() == [2]
    assert (job.rows_failed, await work.row_errors(job_id)) == (0, [])


async def test_in_the_callers_own_transaction_checkpoint_and_completion_come_with_its_commit(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={"heartbeat_seconds": 0.3})
    own = await asyncpg.connect(database.worker_dsn)
    seen: list[Any] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        async with own.transaction():
            await own.execute("insert into public.imported values (1)")
            await ctx.save_checkpoint({"row": 1}, conn=own)
        seen.append((await work.chunk(job_id)).checkpoint)
        try:
            async with own.transaction():
                await own.execute("insert into public.imported values (2)")
                await ctx.save_checkpoint({"row": 2}, conn=own)
                raise ValueError
        except ValueError:
            seen.append((await work.chunk(job_id)).checkpoint)
        async with own.transaction():
            await own.execute("insert into public.imported values (3)")
            await ctx.complete("mine", conn=own)
        # What the runner hears of now (the lease is no more) is no loss.
        heartbeats = relay.metrics.chunk_heartbeats
        await eventually(lambda: relay.metrics.chunk_heartbeats > heartbeats)
        assert not ctx.stopping

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
        await eventually(lambda: relay.metrics.chunks_done == 1)
    await own.close()
    assert seen == [{"row": 1}, {"row": 1}]
    assert await rows() == [1, 3]
    assert (await work.chunk(job_id)).outcome == "mine"
    assert (relay.metrics.chunks_lost, relay.metrics.chunks_released) == (0, 0)


async def test_a_completion_in_a_transaction_that_the_caller_rolled_back_is_none(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)
    own = await asyncpg.connect(database.worker_dsn)
    calls = 0

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        nonlocal calls
        calls += 1
        transaction = own.transaction()
        await transaction.start()
        await own.execute("insert into public.imported values (1)")
        await ctx.complete("mine", conn=own)
        await (transaction.rollback() if calls == 1 else transaction.commit())
        return "counts no more"

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    await own.close()
    assert calls == 2
    assert await rows() == [1]
    chunk = await work.chunk(job_id)
    assert (chunk.outcome, chunk.attempts) == ("mine", 1)


@pytest.mark.parametrize("committed", [True, False])
async def test_where_the_reply_to_the_commit_is_lost_there_is_neither_a_gap_nor_a_second_time(
    database: TestDatabase, gateway: Any, rows: Any, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={"lease_seconds": 60, **SELDOM})
    commit = asyncpg.transaction.Transaction.commit
    lost = 0

    async def loses(self: Any) -> None:
        nonlocal lost
        if lost:
            await commit(self)
            return
        lost += 1
        if committed:
            await commit(self)
        raise ConnectionLostError("the reply was lost")

    calls = 0

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        nonlocal calls
        calls += 1
        async with ctx.transaction() as conn:
            await conn.execute("insert into public.imported values (1)")
            await ctx.complete("once")
            monkeypatch.setattr(asyncpg.transaction.Transaction, "commit", loses)

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert await rows() == [1]
    assert calls == (1 if committed else 2)
    assert (await work.chunk(job_id)).outcome == "once"


async def test_a_checkpoint_is_sent_until_it_is_answered(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)
    checkpoint, failures = DurableRepository.checkpoint, 2

    async def fails(self: Any, *args: Any, **options: Any) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise ConnectionLostError("no reply")
        await checkpoint(self, *args, **options)

    monkeypatch.setattr(DurableRepository, "checkpoint", fails)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        await ctx.save_checkpoint("plain")
        ctx.row_error(1, "bad")
        nonlocal failures
        failures = 1
        await ctx.save_checkpoint("with row errors")

    async with running(relay):
        await work.end(job_id)
    assert (await work.chunk(job_id)).checkpoint == "with row errors"
    assert len(await work.row_errors(job_id)) == 1


async def test_a_checkpoint_that_is_too_large_is_the_handlers_error_and_changes_nothing(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        await ctx.save_checkpoint(1)
        with pytest.raises(ValueError, match="checkpoint"):
            await ctx.save_checkpoint("x" * 300_000)
        assert ctx.checkpoint == 1
        return "refused"

    async with running(relay):
        await work.end(job_id)
    chunk = await work.chunk(job_id)
    assert (chunk.checkpoint, chunk.outcome) == (1, "refused")


async def test_a_begin_that_is_cancelled_leaves_no_error_in_the_log_and_the_next_one_works(
    database: TestDatabase, gateway: Any, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    async with Wire.to(database.worker_dsn) as wire:
        relay = chunk_relay(wire.dsn(database.worker_dsn), listen_dsn=database.worker_dsn)

        @relay.chunk_handler(KIND)
        async def handler(ctx: ChunkContext) -> None:
            begin = wire.hold("BEGIN", "call")

            async def cancel(scope: anyio.CancelScope) -> None:
                await begin.reached.wait()
                scope.cancel()
                begin.release()

            async with anyio.create_task_group() as tasks:
                with anyio.CancelScope() as scope:
                    tasks.start_soon(cancel, scope)
                    async with ctx.transaction():
                        raise AssertionError("it has begun")
            assert scope.cancelled_caught
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.imported values (1)")
                await ctx.save_checkpoint(1)

        async with running(relay):
            job = await work.end(job_id)
    assert (job.status, await rows()) == (JobStatus.COMPLETED, [1])
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.invariant("I7")
async def test_no_connection_is_held_while_a_handler_runs(database: TestDatabase, gateway: Any, admin: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit(8)
    relay = chunk_relay(database)
    go, inside = asyncio.Event(), 0

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        nonlocal inside
        await ctx.save_checkpoint(1)
        async with ctx.transaction():
            pass
        inside += 1
        await go.wait()

    async with running(relay):
        await eventually(lambda: inside == 8)
        busy = await admin.fetch(
            "select state from pg_stat_activity where datname = current_database() and usename = $1"
            " and (state like 'idle in%' or wait_event_type = 'Lock')",
            "relay_worker_login",
        )
        assert busy == []
        go.set()
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
