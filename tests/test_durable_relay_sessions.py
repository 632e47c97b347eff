"""What a handler does to the session that it is lent, and to transactions of which nobody knows the end (D113)."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import anyio
import asyncpg
import pytest

from dispatch_core import database as database_module
from dispatch_core.durable_models import ChunkStatus, JobStatus
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import ConnectionLostError, LeaseLostError
from dispatch_core.settings import CoreSettings
from relay_sdk import ChunkContext, chunk_writes
from tests.support.chunks import KIND, SELDOM, Work, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.relays import running


@pytest.fixture
async def rows(admin: Any) -> Any:
    """A table of the handlers' own, in which nothing keeps a row from being there twice."""
    await admin.execute("create table public.imported (n int); grant all on public.imported to public")

    async def read() -> list[int]:
        return [row["n"] for row in await admin.fetch("select n from public.imported order by n")]

    return read


async def _dirty(conn: Any) -> None:
    await conn.set_type_codec("uuid", schema="pg_catalog", encoder=str, decoder=str)
    await conn.set_type_codec("int8", schema="pg_catalog", encoder=str, decoder=str)
    await conn.set_type_codec("text", schema="pg_catalog", encoder=lambda v: v.upper(), decoder=lambda v: v.upper())


async def test_codecs_that_a_handler_sets_hurt_neither_its_own_checkpoint_nor_the_relay(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    relay = chunk_relay(database)
    relay.core = CoreSettings.load(dsn=database.worker_dsn, pool_max_size=1)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        async with ctx.transaction() as conn:
            await _dirty(conn)
            ctx.row_error(1, "bad", "a message", {"n": 1})
            await ctx.save_checkpoint({"a": "b"})
            await conn.execute("insert into public.imported values ($1)", ctx.seq)
        async with ctx.transaction() as conn:
            # Another's codecs are not there any more.
            assert await conn.fetchval("select 7::int8") == 7
        return "done"

    async with running(relay):
        for _ in range(2):
            job_id = await work.submit(3)
            assert (await work.end(job_id)).status is JobStatus.COMPLETED_WITH_ERRORS
            chunk = await work.chunk(job_id, 2)
            assert (chunk.checkpoint, chunk.outcome) == ({"a": "b"}, "done")
    assert await rows() == [1, 1, 2, 2, 3, 3]
    assert relay.metrics.chunk_claim_errors == 0


async def test_what_a_handler_sets_in_its_session_is_gone_with_its_transaction(
    database: TestDatabase, gateway: Any, admin: Any
) -> None:
    work = Work(gateway)
    relay = chunk_relay(database)
    relay.core = CoreSettings.load(dsn=database.worker_dsn, pool_max_size=1)
    pids = set()
    seen: list[Any] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        for end in (None, KeyError):
            try:
                async with ctx.transaction() as conn:
                    pids.add(conn.get_server_pid())
                    seen.append(
                        await conn.fetchrow(
                            "select current_setting('statement_timeout'), current_setting('synchronous_commit'),"
                            " current_setting('search_path'), to_regclass('pg_temp.staging') is null,"
                            " (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid())"
                        )
                    )
                    await conn.execute(
                        "set statement_timeout = '7s'; set synchronous_commit = off; set search_path = nowhere;"
                        " create temp table staging (n int); select pg_advisory_lock(7)"
                    )
                    if end is not None:
                        raise end
            except KeyError:
                # A rollback takes back what was set, and not the lock.
                pass

    async with running(relay):
        job_id = await work.submit(2)
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert len(pids) == 1, "the connection is used again"
    assert len(set(map(tuple, seen))) == 1
    assert tuple(seen[0])[2:] == ('"$user", public', True, 0)


@pytest.mark.parametrize("committed", [True, False])
async def test_after_a_commit_of_which_nobody_knows_a_handler_writes_nothing_more(
    database: TestDatabase, gateway: Any, rows: Any, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={"lease_seconds": 60, **SELDOM})
    commit = asyncpg.transaction.Transaction.commit
    lost = 0

    async def loses(self: Any) -> None:
        nonlocal lost
        lost += 1
        if committed or lost > 1:
            await commit(self)
        if lost == 1:
            raise ConnectionLostError("the reply was lost")

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        for n in range(ctx.checkpoint or 0, 3):
            # One that tries again by itself, as for a deadlock: rows would be there twice.
            for _ in range(3):
                try:
                    async with ctx.transaction() as conn:
                        await conn.execute("insert into public.imported values ($1)", n)
                        ctx.advance()
                        await ctx.save_checkpoint(n + 1)
                        monkeypatch.setattr(asyncpg.transaction.Transaction, "commit", loses)
                    break
                except ConnectionLostError:
                    pass

    async with running(relay):
        job = await work.end(job_id)
    assert await rows() == [0, 1, 2]
    assert (job.status, job.rows_done, (await work.chunk(job_id)).attempts) == (JobStatus.COMPLETED, 3, 2)


async def test_rows_told_again_after_a_rollback_are_counted_again_and_their_bytes_are_not(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        for attempt in range(50):
            try:
                async with ctx.transaction() as conn:
                    ctx.row_error(5, "bad", data="x" * 65_000)
                    ctx.advance(3)
                    await conn.execute("insert into public.imported values (1)")
                    if attempt < 49:
                        raise KeyError
                    await ctx.save_checkpoint(1)
            except KeyError:
                assert (ctx.rows_done, ctx.rows_failed) == (0, 0)

    async with running(relay):
        job = await work.end(job_id)
    assert (job.rows_done, job.rows_failed, (await work.chunk(job_id)).last_error) == (3, 1, None)
    assert await rows() == [1]


async def test_a_transaction_that_the_handler_ends_by_hand_is_an_error_and_stores_no_checkpoint(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(3, max_attempts=1)
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        async with ctx.transaction() as conn:
            if ctx.seq == 3:
                await ctx.complete()
            await conn.execute("rollback")
            if ctx.seq == 2:
                await ctx.save_checkpoint(1)

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.FAILED
    for seq in (1, 2, 3):
        chunk = await work.chunk(job_id, seq)
        assert "was ended inside it" in str(chunk.last_error)
        assert chunk.checkpoint is None


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("row_errors", [0, 2])
async def test_a_completion_by_itself_is_sent_until_it_is_answered_and_counts_once(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch, row_errors: int, committed: bool
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={"lease_seconds": 60, **SELDOM})
    left = 1

    def losing(call: Any) -> Any:
        async def loses(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0 or committed:
                answer = await call(*args)
            if left < 0:
                return answer
            raise ConnectionLostError("the reply was lost")

        return loses

    if row_errors:
        by_the_context = "relay_sdk.chunk_context.complete_with_row_errors"
        monkeypatch.setattr(by_the_context, losing(chunk_writes.complete_with_row_errors))
    else:
        monkeypatch.setattr(DurableRepository, "complete_many", losing(DurableRepository.complete_many))
    heard: list[Any] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        for row in range(row_errors):
            ctx.row_error(row, "bad")
        await ctx.complete("mine")
        heard.append((await work.chunk(job_id)).status)

    async with running(relay):
        job = await work.end(job_id)
        await eventually(lambda: relay.metrics.chunks_done == 1)
    chunk = await work.chunk(job_id)
    assert (heard, chunk.outcome, chunk.attempts) == ([ChunkStatus.DONE], "mine", 1)
    assert (job.rows_failed, len(await work.row_errors(job_id))) == (row_errors, row_errors)
    assert (relay.metrics.chunks_lost, relay.metrics.handler_errors) == (0, 0)


async def test_a_completion_by_itself_that_is_interrupted_is_said_again_and_the_chunk_not_run_twice(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1, idempotent=False)
    relay = chunk_relay(database, durable={"lease_seconds": 60, **SELDOM})
    complete, under_way = DurableRepository.complete_many, anyio.Event()

    async def slow(*args: Any) -> Any:
        if not under_way.is_set():
            under_way.set()
            await anyio.sleep(60)
        return await complete(*args)

    monkeypatch.setattr(DurableRepository, "complete_many", slow)
    starts: list[int] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        starts.append(ctx.attempt)
        await ctx.complete("mine")

    async with running(relay, grace_seconds=0.1):
        await under_way.wait()
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.outcome, starts) == (ChunkStatus.DONE, "mine", [1])


@pytest.mark.parametrize("committed", [True, False])
async def test_one_that_may_not_run_twice_does_not_where_its_completion_was_not_committed(
    database: TestDatabase, gateway: Any, committed: bool
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1, idempotent=False)
    relay = chunk_relay(database, durable={"lease_seconds": 60, **SELDOM})
    own = await asyncpg.connect(database.worker_dsn)
    starts: list[int] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        starts.append(ctx.attempt)
        transaction = own.transaction()
        await transaction.start()
        await ctx.complete("mine", conn=own)
        await (transaction.commit() if committed else transaction.rollback())

    async with running(relay):
        job = await work.end(job_id)
        await eventually(lambda: relay.metrics.chunks_done + relay.metrics.chunks_failed == 1)
    await own.close()
    assert (job.status, starts) == (JobStatus.COMPLETED if committed else JobStatus.FAILED, [1])
    assert relay.metrics.chunks_lost == 0


@pytest.mark.parametrize("raises", [True, False])
async def test_a_handler_that_ends_after_a_completion_whose_commit_nobody_answered_is_counted_as_done_where_it_is(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={"lease_seconds": 60, **SELDOM})
    commit = asyncpg.transaction.Transaction.commit

    async def loses(self: Any) -> None:
        monkeypatch.setattr(asyncpg.transaction.Transaction, "commit", commit)
        await commit(self)
        raise ConnectionLostError("the reply was lost")

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        try:
            async with ctx.transaction():
                await ctx.complete("mine")
                monkeypatch.setattr(asyncpg.transaction.Transaction, "commit", loses)
        except ConnectionLostError:
            with pytest.raises(LeaseLostError, match="nobody knows"):
                await ctx.save_checkpoint("later")
            if raises:
                raise

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
        await eventually(lambda: relay.metrics.chunks_done == 1)
    assert relay.metrics.chunks_lost == 0
    assert (await work.chunk(job_id)).outcome == "mine"


async def test_a_transaction_may_outlast_the_lease_while_it_saves_checkpoints(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={"lease_seconds": 3.0, "heartbeat_seconds": 1.0})

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        async with ctx.transaction() as conn:
            for n in range(9):
                await conn.execute("insert into public.imported values ($1)", n)
                await ctx.save_checkpoint(n)
                await anyio.sleep(0.4)
            assert not ctx.stopping

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert await rows() == list(range(9))
    assert ((await work.chunk(job_id)).attempts, relay.metrics.chunks_lost) == (1, 0)


async def test_checkpoints_of_a_transaction_that_is_rolled_back_have_renewed_nothing(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={"lease_seconds": 60.0, **SELDOM})
    seen: list[float] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        seen.append(ctx.slot.lost_at)
        try:
            async with ctx.transaction():
                for n in range(2):
                    await ctx.save_checkpoint(n)
                seen.append(ctx.slot.lost_at)
                raise KeyError
        except KeyError:
            pass
        seen.append(ctx.slot.lost_at)

    async with running(relay):
        await work.end(job_id)
    assert seen[0] == seen[2] < seen[1]


async def _with_codecs(conn: Any) -> None:
    await conn.set_type_codec("uuid", schema="pg_catalog", encoder=str, decoder=str)
    await conn.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
    await conn.set_type_codec("float8", schema="pg_catalog", encoder=str, decoder=Decimal)


async def test_codecs_of_a_pool_of_the_callers_are_nothing_to_the_relay(
    database: TestDatabase, gateway: Any, rows: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(3)
    async with asyncpg.create_pool(database.worker_dsn, min_size=0, max_size=4, init=_with_codecs) as pool:
        relay = chunk_relay(database, pool=pool, durable={"heartbeat_seconds": 0.3})

        @relay.chunk_handler(KIND)
        async def handler(ctx: ChunkContext) -> str:
            await ctx.save_checkpoint("plain")
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.imported values ($1)", ctx.seq)
                ctx.row_error(1, "bad")
                await ctx.save_checkpoint({"a": "b"})
            heartbeats = relay.metrics.chunk_leases_renewed
            await eventually(lambda: relay.metrics.chunk_leases_renewed > heartbeats)
            if ctx.seq == 1:
                await ctx.complete("done")
            if ctx.seq == 2 and ctx.attempt == 1:
                raise KeyError
            return "done"

        async with running(relay):
            assert (await work.end(job_id)).status is JobStatus.COMPLETED_WITH_ERRORS
            await eventually(lambda: relay.metrics.chunk_sweeps > 0)
    for seq in (1, 2, 3):
        chunk = await work.chunk(job_id, seq)
        assert (chunk.checkpoint, chunk.outcome) == ({"a": "b"}, "done")
    assert await rows() == [1, 2, 2, 3]


async def test_a_handler_that_is_cancelled_while_its_session_is_put_in_order_costs_the_pool_no_connection(
    database: TestDatabase, gateway: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)
    relay.core = CoreSettings.load(dsn=database.worker_dsn, pool_max_size=1)
    in_order, slow = database_module.as_opened, 2
    scopes: list[anyio.CancelScope] = []

    async def as_opened(conn: Any) -> bool:
        nonlocal slow
        if slow:
            slow -= 1
            scopes[-1].cancel()
            await anyio.sleep(60)
        return await in_order(conn)

    monkeypatch.setattr("relay_sdk.chunk_transaction.as_opened", as_opened)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        for n in range(3):
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                async with ctx.transaction() as conn:
                    await conn.execute("insert into public.imported values ($1)", n)
                    await ctx.save_checkpoint(n)

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert await rows() == [0, 1, 2]
    assert (await work.chunk(job_id)).checkpoint == 2


async def test_row_errors_that_a_transaction_has_stored_are_not_kept_in_memory_until_its_end(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, chunk_row_errors=10)
    kept: list[int] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        ctx.row_error(0, "before")
        for is_last in (False, True):
            try:
                async with ctx.transaction():
                    for part in range(5):
                        for row in range(8):
                            ctx.row_error(1 + 8 * part + row, "bad")
                        await ctx.save_checkpoint(part)
                        kept.append(len(ctx.row_errors.items))
                    if not is_last:
                        raise KeyError
            except KeyError:
                kept.append(len(ctx.row_errors.items))

    async with running(relay):
        job = await work.end(job_id)
    assert (job.rows_failed, len(await work.row_errors(job_id))) == (41, 41)
    assert set(kept) == {1}
