"""The store of durable jobs in the caller's transaction: all of it with the rest, or none; on any connection."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

import asyncpg
import pytest

from dispatch_core import (
    ChunkOutcome,
    ChunkStatus,
    DurableJobStore,
    DurableRepository,
    InvalidInputError,
    JobLease,
    JobStatus,
    LeaseLostError,
    RowError,
    TransactionRequiredError,
    WriteOutcome,
)
from dispatch_core.database import Database
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.high_counters import nth
from tests.support.pooler import FakePooler
from tests.support.protocol import TENANT, Connection, connected
from tests.support.stores import Stores, nothing_written, open_stores

pytestmark = pytest.mark.invariant("I3")

MARK = {"text": "ü \\ \\\\ \" ' \t\n\r\x01\u2028\x85 $1 ::text \\. \\N", "big": 2**70, "none": None, "list": [1.5, {}]}


@pytest.fixture
async def stores(database: TestDatabase, admin: Connection) -> AsyncIterator[Stores]:
    await admin.execute("create table public.kept (row_no bigint primary key); grant insert, select on kept to public")
    async with open_stores(database, insert_batch=2) as stores:
        yield stores


async def kept(admin: Connection) -> list[int]:
    """Read the caller's own rows."""
    return [row["row_no"] for row in await admin.fetch("select row_no from public.kept order by 1")]


# --- together or not at all -------------------------------------------------------------------------------------------


async def test_a_job_its_chunks_and_the_callers_row_are_there_together(
    stores: Stores, admin: Connection, gateway: Connection
) -> None:
    async with gateway.transaction():
        await gateway.execute("insert into public.kept values (1)")
        job_id = await stores.gateway.insert_job(durable.KIND, MARK, conn=gateway)
        assert await stores.gateway.insert_chunks(job_id, [1, 2, 3, 4, 5], conn=gateway) == 5
        assert await stores.gateway.get_job(job_id) is None  # its id is known, and nobody sees it
    assert await kept(admin) == [1]
    assert [chunk.payload for chunk in await stores.gateway.get_chunks(job_id)] == [1, 2, 3, 4, 5]
    job = await stores.gateway.get_job(job_id)
    assert job is not None
    assert job.params == MARK


async def test_of_a_transaction_that_is_rolled_back_nothing_is_left(
    stores: Stores, admin: Connection, gateway: Connection
) -> None:
    async with nothing_written(admin):
        transaction = gateway.transaction()
        await transaction.start()
        await gateway.execute("insert into public.kept values (1)")
        job_id = await stores.gateway.insert_job(durable.KIND, conn=gateway)
        await stores.gateway.insert_chunks(job_id, [1, 2, 3], conn=gateway)
        await transaction.rollback()
    assert await kept(admin) == []


async def test_rows_and_the_chunks_end_are_there_exactly_once(
    stores: Stores, admin: Connection, worker: Connection
) -> None:
    lease = await stores.lease(1)
    for rolls_back in (True, False):
        transaction = worker.transaction()
        await transaction.start()
        await worker.execute("insert into public.kept select generate_series(1, 3)")
        await stores.worker.checkpoint(lease, {"row": 3}, rows_done=3, conn=worker)
        assert await stores.worker.record_row_errors(lease, [RowError(4, "bad"), RowError(5, "bad")], conn=worker) == 2
        assert await stores.worker.heartbeat(lease, 300, conn=worker)
        settled = await stores.worker.complete_chunk(lease, ChunkOutcome(MARK, 3, 2), conn=worker)
        assert (settled.outcome, settled.last) == (WriteOutcome.APPLIED, True)
        await (transaction.rollback() if rolls_back else transaction.commit())
        chunk = await stores.gateway.get_chunk(lease.job_id, 1)
        errors = await stores.gateway.row_errors(lease.job_id)
        assert chunk is not None
        if rolls_back:
            assert await kept(admin) == []
            assert errors == []
            assert (chunk.status, chunk.checkpoint, chunk.rows_done) == (ChunkStatus.RUNNING, None, 0)
    assert await kept(admin) == [1, 2, 3]
    assert chunk is not None
    assert [error.row for error in errors] == [4, 5]
    assert (chunk.status, chunk.outcome, chunk.rows_done, chunk.rows_failed) == (ChunkStatus.DONE, MARK, 3, 2)
    # The job could not be ended in there.
    assert await stores.worker.finish(lease.job_id) is JobStatus.COMPLETED_WITH_ERRORS


LOST: dict[str, Callable[[DurableJobStore, JobLease, Connection], Awaitable[Any]]] = {
    "checkpoint": lambda store, lease, conn: store.checkpoint(lease, 1, conn=conn),
    "complete_chunk": lambda store, lease, conn: store.complete_chunk(lease, conn=conn),
    "record_row_errors": lambda store, lease, conn: store.record_row_errors(lease, [RowError(1, "x")], conn=conn),
}


@pytest.mark.parametrize("verb", LOST)
async def test_a_transaction_whose_lease_is_lost_cannot_commit_what_it_wrote(
    stores: Stores, admin: Connection, worker: Connection, verb: str
) -> None:
    lease = await stores.lease(1)
    await durable.run_out(admin)
    await stores.worker.reap_expired()
    async with nothing_written(admin):
        await worker.execute("begin; insert into public.kept values (1)")
        with pytest.raises(LeaseLostError) as lost:
            await LOST[verb](stores.worker, lease, worker)
        assert (lost.value.job_id, lost.value.seq) == (lease.job_id, 1)
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await worker.execute("insert into public.kept values (2)")
        assert await worker.execute("commit") == "ROLLBACK"
    assert await kept(admin) == []


async def test_the_fence_is_held_to_the_commit_though_the_lease_runs_out_before(
    stores: Stores, admin: Connection, worker: Connection
) -> None:
    """A reaper steps over it, and so the holder's late commit is no second holder's loss."""
    lease = await stores.lease(1, idempotent=False)
    async with worker.transaction():
        await worker.execute("insert into public.kept values (1)")
        await stores.worker.checkpoint(lease, 1, lease_ttl_seconds=0.001, conn=worker)
        await worker.fetchval("select pg_sleep(0.01)")
        assert await stores.worker.reap_expired() == []
        assert await stores.worker.claim_next_chunk_skip_locked(lease.job_id) is None
    (reaped,) = await stores.worker.reap_expired()
    assert reaped.status is ChunkStatus.NEEDS_REVIEW
    chunk = await stores.gateway.get_chunk(lease.job_id, 1)
    assert chunk is not None
    assert chunk.checkpoint == 1
    assert await kept(admin) == [1]


async def test_a_claim_in_the_callers_transaction_is_one_when_that_commits(stores: Stores, worker: Connection) -> None:
    chunk = await stores.gateway.get_chunk(await stores.job(1), 1)
    assert chunk is not None
    transaction = worker.transaction()
    await transaction.start()
    lost = await stores.worker.claim_chunk(chunk, conn=worker)
    assert lost is not None
    await transaction.rollback()
    assert not await stores.worker.heartbeat(lost)
    async with worker.transaction():
        lease = await stores.worker.claim_chunk(chunk, conn=worker)
        assert lease is not None
        assert await stores.worker.claim_next_chunk_skip_locked(chunk.job_id) is None
    assert await stores.worker.heartbeat(lease)


@pytest.mark.case("C22")
async def test_a_lease_begins_when_it_is_granted_in_a_transaction_that_waited(
    stores: Stores, worker: Connection
) -> None:
    chunk = await stores.gateway.get_chunk(await stores.job(1), 1)
    assert chunk is not None
    async with worker.transaction():
        began = await worker.fetchval("select now()")
        await worker.fetchval("select pg_sleep(0.05)")
        lease = await stores.worker.claim_chunk(chunk, lease_ttl_seconds=10, conn=worker)
        assert lease is not None
        assert lease.expires_at >= began + timedelta(seconds=10.05)
        await worker.fetchval("select pg_sleep(0.05)")
        assert await stores.worker.heartbeat(lease, 10, conn=worker)
        renewed = await worker.fetchval(
            "select lease_expires_at from relay.durable_claim_again($1, $2)", [TENANT], lease.token
        )
        assert renewed >= began + timedelta(seconds=10.1)


async def test_without_a_transaction_nothing_is_sent(stores: Stores, admin: Connection, worker: Connection) -> None:
    lease = await stores.lease(1)
    async with nothing_written(admin):
        for call in LOST.values():
            with pytest.raises(TransactionRequiredError):
                await call(stores.worker, lease, worker)
        with pytest.raises(TransactionRequiredError):
            await stores.gateway.insert_job(durable.KIND, conn=worker)
        with pytest.raises(InvalidInputError, match=r"^conn must be"):
            await stores.gateway.insert_job(durable.KIND, conn=cast("Any", "postgresql://"))


async def test_a_transaction_that_is_read_only_is_told_so(stores: Stores, gateway: Connection) -> None:
    async with gateway.transaction(readonly=True):
        with pytest.raises(TransactionRequiredError, match="read only"):
            await stores.gateway.insert_job(durable.KIND, conn=gateway)


# --- whatever the connection is ---------------------------------------------------------------------------------------


async def set_odd_codecs(conn: Connection) -> None:
    """Have every type that could matter come and go as something else."""
    for kind in ("json", "jsonb"):
        await conn.set_type_codec(
            kind,
            schema="pg_catalog",
            encoder=lambda value: json.dumps(["odd", value]),
            decoder=lambda text: ("odd", text),
        )
    for kind in ("uuid", "text", "timestamptz", "bool", "interval", "float8"):
        await conn.set_type_codec(
            kind, schema="pg_catalog", encoder=lambda value: f"odd {value}", decoder=lambda text: f"odd {text}"
        )
    await conn.set_type_codec(
        "int8", schema="pg_catalog", encoder=lambda value: str(value + 1), decoder=lambda text: int(text) + 1
    )


async def set_odd_session(conn: Connection) -> None:
    """Have every setting that could matter be another."""
    await conn.execute(
        """
        set datestyle = 'German, DMY'; set timezone = 'Asia/Kolkata'; set intervalstyle = 'iso_8601';
        set standard_conforming_strings = off; set escape_string_warning = off; set bytea_output = 'escape';
        set extra_float_digits = 0; set client_min_messages = 'error';
        set default_transaction_isolation = 'repeatable read'
        """
    )


HOSTILE = """
create schema hostile; grant usage on schema hostile to public; set search_path = hostile;
create domain hostile.text as int4; create domain hostile.jsonb as int4; create domain hostile.uuid as int4;
create function row_to_json(record) returns pg_catalog.json language plpgsql as $$ begin return '{}'; end $$;
create function decode(pg_catalog.text, pg_catalog.text) returns pg_catalog.bytea language sql
  as $$ select null::pg_catalog.bytea $$;
create function convert_from(pg_catalog.bytea, name) returns pg_catalog.text language sql
  as $$ select null::pg_catalog.text $$;
reset search_path
"""
"""Functions and types that look like the server's own."""


async def set_hostile_path(conn: Connection) -> None:
    """Have what is in the schema `hostile` come first."""
    await conn.execute("set search_path = hostile, pg_catalog")


async def whole_life(stores: Stores, submits: Connection, works: Connection) -> None:
    """Do everything that can be done in a transaction of somebody else's."""
    await submits.execute("begin")
    job_id = await stores.gateway.insert_job(durable.KIND, MARK, created_by="bób", priority=-5, conn=submits)
    assert await stores.gateway.insert_chunks(job_id, [MARK, 2, None], from_seq=1, conn=submits) == 3
    await submits.execute("commit")
    chunk = await stores.gateway.get_chunk(job_id, 1)
    assert chunk is not None
    assert chunk.payload == MARK
    await works.execute("begin")
    lease = await stores.worker.claim_chunk(chunk, lease_ttl_seconds=90, conn=works)
    assert lease is not None
    assert (lease.tenant_id, lease.job_id, lease.seq, lease.version) == (TENANT, job_id, 1, nth(1))
    assert await stores.worker.heartbeat(lease, conn=works)
    await stores.worker.checkpoint(lease, MARK, rows_done=2, conn=works)
    assert await stores.worker.record_row_errors(lease, [RowError(-(2**62), "cödé", "m\0", MARK)], conn=works) == 1
    assert await stores.worker.heartbeat(lease, conn=works)
    assert not (await stores.worker.complete_chunk(lease, ChunkOutcome(MARK), conn=works)).last
    await works.execute("commit")
    after = await stores.gateway.get_chunk(job_id, 1)
    assert after is not None
    assert (after.status, after.outcome, after.checkpoint, after.rows_done) == (ChunkStatus.DONE, MARK, MARK, 2)
    assert after.updated_at - lease.expires_at < timedelta(seconds=-60)
    (error,) = await stores.gateway.row_errors(job_id)
    assert (error.row, error.code, error.message, error.data) == (-(2**62), "cödé", "m\N{REPLACEMENT CHARACTER}", MARK)
    # And the loser's side of it.
    await works.execute("begin")
    with pytest.raises(LeaseLostError):
        await stores.worker.checkpoint(lease, 1, conn=works)
    await works.execute("rollback")


ODD = {"codecs": set_odd_codecs, "session": set_odd_session, "search path": set_hostile_path}


@pytest.mark.parametrize("odd", [*ODD, "no statement cache", "all of it"])
async def test_nothing_of_the_connection_is_relied_on(
    stores: Stores, database: TestDatabase, admin: Connection, odd: str
) -> None:
    await admin.execute(HOSTILE)
    options: dict[str, Any] = {"statement_cache_size": 0} if odd in ("no statement cache", "all of it") else {}
    async with connected(database.gateway_dsn, **options) as one, connected(database.worker_dsn, **options) as two:
        for conn in (one, two):
            for name, make in ODD.items():
                if odd in (name, "all of it"):
                    await make(conn)
        await whole_life(stores, one, two)


async def test_nothing_of_the_connection_is_changed(stores: Stores, gateway: Connection, worker: Connection) -> None:
    # Those of plpgsql are there when that was loaded.
    watched = """select string_agg(name || '=' || setting, ' ' order by name) from pg_settings
                 where context = 'user' and name not like 'plpgsql.%'"""
    before = [await conn.fetchval(watched) for conn in (gateway, worker)]
    statements = [await conn.fetchval("select count(*) from pg_prepared_statements") for conn in (gateway, worker)]
    await whole_life(stores, gateway, worker)
    assert [await conn.fetchval(watched) for conn in (gateway, worker)] == before
    after = [await conn.fetchval("select count(*) from pg_prepared_statements") for conn in (gateway, worker)]
    assert after == statements
    assert await worker.fetchval("select current_setting('relay.tenant', true)") in (None, "")


@pytest.mark.case("C05")
async def test_behind_a_transaction_pooler_it_is_all_the_same(stores: Stores, database: TestDatabase) -> None:
    async with (
        FakePooler.before(database.gateway_dsn, mode="swap") as gateways,
        FakePooler.before(database.worker_dsn, mode="swap") as workers,
    ):
        one = await asyncpg.connect(gateways.dsn(database.gateway_dsn), statement_cache_size=0)
        two = await asyncpg.connect(workers.dsn(database.worker_dsn), statement_cache_size=0)
        try:
            await whole_life(stores, one, two)
        finally:
            one.terminate()
            two.terminate()


@asynccontextmanager
async def borrowed(dsn: str) -> AsyncIterator[Database]:
    """Open somebody's pool, whose connections are odd from the start."""

    async def init(conn: Connection) -> None:
        await set_odd_session(conn)
        await set_odd_codecs(conn)

    async with asyncpg.create_pool(dsn, min_size=1, max_size=3, init=init) as pool, Database.wrap(pool) as database:
        yield database


async def test_a_store_on_a_borrowed_pool_relies_on_nothing_of_its_connections(database: TestDatabase) -> None:
    async with borrowed(database.gateway_dsn) as gateways, borrowed(database.worker_dsn) as workers:
        gateway, worker = DurableJobStore(gateways, TENANT), DurableJobStore(workers, TENANT)
        assert (await gateway.now()).utcoffset() == timedelta(0)
        job_id = await gateway.insert_job(durable.KIND, MARK)
        await gateway.insert_chunks(job_id, [MARK] * 3)
        claimed = await worker.claim_chunks([durable.KIND], limit=2)
        assert [chunk.payload for chunk in claimed.chunks] == [MARK, MARK]
        one, two = (chunk.lease for chunk in claimed.chunks)
        assert await worker.fail_chunk(one, "boom", delay_seconds=50) is ChunkStatus.RETRY
        assert await worker.release_chunk(two)
        assert 40 < (await worker.claim_chunks(["other"])).waiting[TENANT] <= 50
        assert await gateway.set_chunk_statuses(job_id, "pending", "failed", {"last_error": "ü"}, seqs=[3]) == 1
        assert await gateway.record_event(job_id, 3, "mine", "ann", detail=MARK)
        assert (await gateway.events(job_id)).events[-1].detail == MARK
        (found,) = (await gateway.query("chunk", {"status": "failed", "job_id": job_id})).items
        assert (found["seq"], found["last_error"], found["payload"]) == (3, "ü", MARK)
        job = await gateway.get_job(job_id, fresh=True)
        assert job is not None
        assert (job.params, job.chunks[ChunkStatus.FAILED]) == (MARK, 1)


async def test_the_verbs_of_many_on_a_borrowed_pool_rely_on_nothing_of_its_connections(database: TestDatabase) -> None:
    async with borrowed(database.gateway_dsn) as gateways, borrowed(database.worker_dsn) as workers:
        gateway, worker = DurableRepository(gateways), DurableRepository(workers)
        await gateway.insert_job(TENANT, job_id := uuid4(), durable.KIND, MARK)
        await gateway.insert_chunks(TENANT, job_id, [1, 2, 3])
        token = uuid4()
        claimed = await worker.claim([TENANT], [durable.KIND], limit=2, limits=[2], holder="me", token=token)
        leases = [chunk.lease for chunk in claimed.chunks]
        for done in (None, [None, None], [1, None]):
            assert [beat.outcome for beat in await worker.heartbeat(leases, rows_done=done)] == ["applied"] * 2
        again = await worker.claim_again([TENANT], token, holder="me", local_deadline=0)
        assert [chunk.rows_done for chunk in again.chunks] == [1, 0]
        assert await worker.candidates(TENANT, [durable.KIND], limit=9) == [(job_id, 3, nth(0))]
        outcomes = [ChunkOutcome(MARK, rows_failed=2), None]
        assert [settled.outcome for settled in await worker.complete_many(leases, outcomes)] == ["applied"] * 2
        assert await worker.run_sweeps("me", lease=False, finish=False) == []
        assert await worker.run_sweeps("me") == []
        assert await worker.tenants([durable.KIND]) == [TENANT]
        assert await worker.finish(TENANT, [job_id]) == [(job_id, JobStatus.RUNNING, False)]
        chunks = await gateway.chunks(TENANT, job_id, seqs=[3, 1])
        assert [(chunk.seq, chunk.outcome, chunk.rows_failed) for chunk in chunks] == [(1, MARK, 2), (3, None, 0)]
        assert (await gateway.control(TENANT, job_id, "pause", note="ü")).outcome == "applied"


async def test_a_store_on_a_connection_joins_its_transaction(database: TestDatabase, admin: Connection) -> None:
    async with connected(database.gateway_dsn) as conn:
        await set_odd_codecs(conn)
        store = DurableJobStore(conn, TENANT)
        job_id = await store.insert_job(durable.KIND)
        async with nothing_written(admin):
            transaction = conn.transaction()
            await transaction.start()
            assert await store.insert_chunks(job_id, range(2500)) == 2500
            assert len(await store.get_chunks(job_id)) == 2500
            await transaction.rollback()
        assert await store.get_chunks(job_id) == []
        assert await store.insert_chunks(job_id, range(2500)) == 2500
        assert len(await store.get_chunks(job_id)) == 2500
