"""The store of durable jobs: jobs and chunks as they are inserted, read, and moved by hand, and who loses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import anyio
import pytest

from dispatch_core import (
    ChunkSpec,
    ChunkStatus,
    DatabaseError,
    DurableJobsSettings,
    DurableJobStore,
    IdempotencyConflictError,
    InvalidPayloadError,
    JobClosedError,
    JobStatus,
    UnknownJobError,
)
from tests.support import durable
from tests.support.activity import pid_of, wait_until_blocked, wait_until_statement_runs
from tests.support.databases import TestDatabase
from tests.support.high_counters import nth
from tests.support.protocol import TENANT, Connection, connected
from tests.support.stores import Stores, nothing_written, open_stores

pytestmark = pytest.mark.invariant("I3")


@pytest.fixture
async def stores(database: TestDatabase) -> AsyncIterator[Stores]:
    async with open_stores(database, insert_batch=3) as stores:
        yield stores


# --- the clock and the settings ---------------------------------------------------------------------------------------


async def test_now_is_the_database_clock_and_aware(stores: Stores, admin: Connection) -> None:
    before = await admin.fetchval("select clock_timestamp()")
    now = await stores.worker.now()
    assert before < now < await admin.fetchval("select clock_timestamp()")
    assert now.utcoffset() == timedelta(0)


@pytest.mark.case("C22")
async def test_now_goes_on_in_a_transaction_that_waited(database: TestDatabase, admin: Connection) -> None:
    async with connected(database.worker_dsn) as conn, conn.transaction():
        store = DurableJobStore(conn, TENANT)
        began = await conn.fetchval("select now()")
        first = await store.now()
        await conn.fetchval("select pg_sleep(0.02)")
        second = await store.now()
        assert began < first
        assert second - first >= timedelta(milliseconds=20)
        assert await conn.fetchval("select now()") == began


async def test_settings_are_those_that_were_given(stores: Stores) -> None:
    assert isinstance(stores.gateway.settings, DurableJobsSettings)
    assert stores.gateway.settings.insert_batch == 3
    assert stores.worker.holder == "relay:1"


# --- inserting --------------------------------------------------------------------------------------------------------


async def test_a_job_is_read_as_it_was_inserted(stores: Stores) -> None:
    params = {"file": "ü.csv", "big": 2**70, "nothing": None, "deep": [[{"a": 1.5}]]}
    job_id = await stores.gateway.insert_job(
        "import", params, idempotent=False, max_attempts=7, priority=-3, created_by="bób"
    )
    job = await stores.gateway.get_job(job_id)
    assert job is not None
    assert (job.tenant_id, job.job_id, job.kind, job.params) == (TENANT, job_id, "import", params)
    assert (job.idempotent, job.max_attempts, job.priority, job.created_by) == (False, 7, -3, "bób")
    assert job.status is JobStatus.QUEUED
    assert (job.started_at, job.ended_at, job.last_error, job.progress.fraction) == (None, None, None, None)
    assert datetime.now(UTC) - job.created_at < timedelta(minutes=5)


async def test_chunks_are_numbered_in_their_order_over_all_batches(stores: Stores, admin: Connection) -> None:
    job_id = await stores.gateway.insert_job("import")
    payloads = [{"n": n} for n in range(8)]
    assert await stores.gateway.insert_chunks(job_id, payloads, from_seq=1) == 8
    assert await stores.gateway.insert_chunks(job_id, [ChunkSpec(None, rows=5), "text"]) == 2
    chunks = await stores.gateway.get_chunks(job_id)
    assert [chunk.seq for chunk in chunks] == list(range(1, 11))
    assert [chunk.payload for chunk in chunks] == [*payloads, None, "text"]
    assert [chunk.rows_total for chunk in chunks] == [0] * 8 + [5, 0]
    assert {chunk.status for chunk in chunks} == {ChunkStatus.PENDING}
    assert await durable.counters_are_exact(admin, job_id)


async def test_chunks_that_are_inserted_again_are_there_once(stores: Stores, admin: Connection) -> None:
    job_id = await stores.job(5)
    assert await stores.gateway.insert_chunks(job_id, range(7), from_seq=1) == 2
    assert await stores.gateway.insert_chunks(job_id, range(7), from_seq=1) == 0
    assert [chunk.payload for chunk in await stores.gateway.get_chunks(job_id)][4:] == [{"n": 5}, 5, 6]
    assert await durable.counters_are_exact(admin, job_id)


async def test_a_job_that_is_inserted_again_is_there_once_and_another_kind_has_no_right_to_its_id(
    stores: Stores, admin: Connection
) -> None:
    job_id = await stores.gateway.insert_job("import", {"a": 1})
    async with nothing_written(admin):
        assert await stores.gateway.insert_job("import", {"a": 2}, job_id=job_id) == job_id
        with pytest.raises(IdempotencyConflictError):
            await stores.gateway.insert_job("export", job_id=job_id)


async def test_of_chunks_of_which_one_cannot_be_stored_none_is(stores: Stores, admin: Connection) -> None:
    job_id = await stores.gateway.insert_job("import")
    async with nothing_written(admin):
        with pytest.raises(InvalidPayloadError, match=r"^the payload of chunks\[6\] "):
            await stores.gateway.insert_chunks(job_id, [1, 2, 3, 4, 5, 6, {"bad": float("nan")}])


async def test_of_batches_of_which_one_is_refused_none_is_stored(stores: Stores, admin: Connection) -> None:
    """By the third batch all their rows are more than can be counted: the first two go with it."""
    job_id = await stores.gateway.insert_job("import")
    chunks = [ChunkSpec(n, rows=2**60) for n in range(9)]
    async with nothing_written(admin):
        with pytest.raises(DatabaseError, match="out of range"):
            await stores.gateway.insert_chunks(job_id, chunks, from_seq=1)


async def test_a_job_that_is_unknown_or_has_ended_takes_no_chunks(stores: Stores, admin: Connection) -> None:
    ended = await stores.job(1)
    assert await stores.gateway.set_job_status(ended, "queued", "cancelled")
    async with nothing_written(admin):
        with pytest.raises(UnknownJobError) as unknown:
            await stores.gateway.insert_chunks(uuid4(), [1])
        assert unknown.value.job_id is not None
        with pytest.raises(JobClosedError, match="cancelled") as closed:
            await stores.gateway.insert_chunks(ended, [1])
        assert closed.value.job_id == ended
        with pytest.raises(JobClosedError):
            await stores.gateway.insert_chunks(ended, range(10))  # several statements


# --- reading ----------------------------------------------------------------------------------------------------------


async def test_what_is_unknown_is_none(stores: Stores) -> None:
    job_id = await stores.job(1)
    assert await stores.gateway.get_job(uuid4()) is None
    assert await stores.gateway.get_chunk(job_id, 2) is None
    assert await stores.gateway.get_chunk(uuid4(), 1) is None
    assert await stores.gateway.get_chunks(uuid4()) == []
    assert await stores.gateway.refresh_counters(uuid4()) == []
    assert await stores.gateway.finish(uuid4()) is None


@pytest.mark.invariant("I4")
async def test_another_tenant_sees_and_changes_nothing(
    stores: Stores, database: TestDatabase, admin: Connection
) -> None:
    claimed = await stores.claim(await stores.job(2))
    job_id = claimed.lease.job_id
    await durable.run_out(admin)
    async with open_stores(database, tenant="globex") as other, nothing_written(admin):
        assert await other.gateway.get_job(job_id) is None
        assert await other.gateway.get_chunks(job_id) == []
        assert (await other.gateway.query("chunk")).items == []
        assert (await other.gateway.events(job_id)).events == []
        assert not await other.gateway.set_job_status(job_id, list(JobStatus), "paused")
        assert not await other.gateway.update_job(job_id, {"priority": 1})
        assert await other.gateway.set_chunk_statuses(job_id, list(ChunkStatus), "failed") == 0
        assert await other.worker.claim_next_chunk_skip_locked(job_id) is None
        assert (await other.worker.claim_chunks([durable.KIND])).chunks == []
        assert not await other.gateway.record_event(job_id, None, "mine")
        assert await other.worker.reap_expired() == []


async def test_all_chunks_come_in_order_however_many_pages_they_are(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch_core.durable_jobs._CHUNK_PAGE", 4)
    for count in (3, 4, 5, 8):
        job_id = await stores.job(count)
        assert [chunk.seq for chunk in await stores.gateway.get_chunks(job_id)] == list(range(1, count + 1))
    await stores.gateway.set_chunk_statuses(job_id, "pending", "failed", seqs=[2, 7])
    assert [chunk.seq for chunk in await stores.gateway.get_chunks(job_id, status="failed")] == [2, 7]


# --- moving jobs by hand ----------------------------------------------------------------------------------------------


async def test_a_status_moves_from_one_of_several_with_columns_in_the_same_update(stores: Stores) -> None:
    job_id = await stores.job(1)
    extra = {"priority": 9, "last_error": "held", "max_attempts": 5, "params": [1]}
    assert await stores.gateway.set_job_status(job_id, [JobStatus.RUNNING, "queued"], JobStatus.PAUSED, extra)
    job = await stores.gateway.get_job(job_id)
    assert job is not None
    assert (job.status, job.priority, job.last_error, job.max_attempts, job.params) == (
        JobStatus.PAUSED, 9, "held", 5, [1],
    )  # fmt: skip


async def test_who_loses_a_status_has_written_neither_columns_nor_event(stores: Stores, admin: Connection) -> None:
    job_id = await stores.job(1)
    extra = {"priority": 9}
    async with nothing_written(admin):
        assert not await stores.gateway.set_job_status(job_id, ["running", "paused"], "cancelled", extra)
        assert not await stores.gateway.set_job_status_with_event(job_id, "paused", "running", "resumed", extra)
        assert not await stores.gateway.set_job_status_with_event(uuid4(), "queued", "paused", "paused")
        # A status that cannot follow this one, though it is the one that was expected.
        assert not await stores.gateway.set_job_status_with_event(job_id, "queued", "queued", "resumed")


async def test_status_and_event_are_there_together(stores: Stores) -> None:
    job_id = await stores.job(1)
    page = await stores.gateway.events(job_id)
    assert await stores.gateway.set_job_status_with_event(
        job_id, "queued", "paused", "paused", actor="ann", channel="web", holder="h", detail={"why": "lunch"}
    )
    (event,) = (await stores.gateway.events(job_id, page.next)).events
    assert (event.type, event.actor, event.channel, event.holder, event.detail, event.seq) == (
        "paused", "ann", "web", "h", {"why": "lunch"}, None,
    )  # fmt: skip


async def test_of_many_who_move_a_job_at_once_one_wins_and_one_event_is_told(stores: Stores) -> None:
    job_id = await stores.job(1)
    won: list[int] = []

    async def move(n: int) -> None:
        if await stores.gateway.set_job_status_with_event(
            job_id, ["queued", "running"], "paused", "paused", {"priority": n}, actor=str(n)
        ):
            won.append(n)

    async with anyio.create_task_group() as tasks:
        for n in range(1, 9):
            tasks.start_soon(move, n)
    job = await stores.gateway.get_job(job_id)
    assert job is not None
    assert won == [job.priority]
    told = [event for event in (await stores.gateway.events(job_id)).events if event.type == "paused"]
    assert [event.actor for event in told] == [str(won[0])]


async def test_columns_are_written_whatever_the_status(stores: Stores, admin: Connection) -> None:
    job_id = await stores.job(1)
    assert await stores.gateway.set_job_status(job_id, "queued", "cancelled")
    assert await stores.gateway.update_job(job_id, {"last_error": "late", "priority": -1})
    assert await stores.gateway.update_job(job_id, {"last_error": None})
    job = await stores.gateway.get_job(job_id)
    assert job is not None
    assert (job.status, job.last_error, job.priority) == (JobStatus.CANCELLED, None, -1)
    async with nothing_written(admin):
        assert not await stores.gateway.update_job(uuid4(), {"priority": 1})


async def test_a_changed_priority_changes_who_is_next(stores: Stores) -> None:
    first, second = await stores.job(1), await stores.job(1)
    await stores.gateway.update_job(second, {"priority": 1})
    claimed = await stores.worker.claim_chunks([durable.KIND], limit=2)
    assert [chunk.lease.job_id for chunk in claimed.chunks] == [second, first]


# --- moving chunks by hand --------------------------------------------------------------------------------------------


async def test_a_running_chunk_that_is_moved_is_lost_to_its_holder(stores: Stores, admin: Connection) -> None:
    lease = await stores.lease(3)
    moved = await stores.gateway.set_chunk_statuses(
        lease.job_id, ["running", "pending"], "needs_review", {"last_error": "looked odd"}, seqs=[1, 2]
    )
    assert moved == 2
    one, two, three = await stores.gateway.get_chunks(lease.job_id)
    assert (one.status, one.lease_version, one.lease_expires_at, one.last_error) == (
        ChunkStatus.NEEDS_REVIEW, lease.version + 1, None, "looked odd",
    )  # fmt: skip
    assert (two.status, two.lease_version, three.status) == (ChunkStatus.NEEDS_REVIEW, nth(1), ChunkStatus.PENDING)
    async with nothing_written(admin):
        assert not await stores.worker.heartbeat(lease)
        assert await stores.worker.fail_chunk(lease, "late") is None
        assert not await stores.worker.release_chunk(lease)


async def test_attempts_of_moved_chunks_begin_anew_where_asked_for(stores: Stores) -> None:
    lease = await stores.lease(1)
    assert await stores.worker.fail_chunk(lease, "boom", False) is ChunkStatus.FAILED
    assert await stores.gateway.set_chunk_statuses(lease.job_id, "failed", "retry", {"attempts": "reset"}) == 1
    chunk = await stores.gateway.get_chunk(lease.job_id, 1)
    assert chunk is not None
    assert (chunk.attempts, chunk.last_error) == (0, "boom")


async def test_chunks_that_are_not_as_expected_are_not_moved(stores: Stores, admin: Connection) -> None:
    job_id = await stores.job(3)
    async with nothing_written(admin):
        assert await stores.gateway.set_chunk_statuses(job_id, ["failed", "done"], "retry") == 0
        assert await stores.gateway.set_chunk_statuses(job_id, "pending", "retry", seqs=[]) == 0
        assert await stores.gateway.set_chunk_statuses(job_id, "pending", "retry", seqs=[9]) == 0
        assert await stores.gateway.set_chunk_statuses(uuid4(), "pending", "retry") == 0


# --- counters and ends ------------------------------------------------------------------------------------------------


async def test_counters_that_somebody_has_tampered_with_are_put_right(stores: Stores, admin: Connection) -> None:
    job_id = await stores.job(4)
    await stores.worker.complete_chunk((await stores.claim(job_id)).lease)
    await admin.execute("update relay.durable_job set chunks_done = 77, rows_failed = -5, chunks_pending = 0")
    chunks = await stores.gateway.refresh_counters(job_id)
    assert [chunk.status for chunk in chunks] == ["done", "pending", "pending", "pending"]
    assert await durable.counters_are_exact(admin, job_id)
    job = await stores.gateway.get_job(job_id)
    assert job is not None
    assert job.progress.fraction == 0.25


async def test_a_fresh_read_counts_now_and_changes_nothing(stores: Stores, admin: Connection) -> None:
    job_id = await stores.job(4)
    await stores.worker.complete_chunk((await stores.claim(job_id)).lease)
    async with nothing_written(admin):
        stored, fresh = await stores.gateway.get_job(job_id), await stores.gateway.get_job(job_id, fresh=True)
    assert stored is not None
    assert fresh is not None
    assert (stored.chunks[ChunkStatus.DONE], fresh.chunks[ChunkStatus.DONE]) == (0, 1)
    assert fresh.counted_at > stored.counted_at


async def test_a_job_of_which_something_may_run_is_not_ended(stores: Stores, admin: Connection) -> None:
    job_id = await stores.job(2)
    async with nothing_written(admin):
        assert await stores.gateway.finish(job_id) is JobStatus.QUEUED


@pytest.mark.case("C24")
async def test_a_status_waits_for_the_one_who_has_the_job_locked(
    stores: Stores, database: TestDatabase, admin: Connection
) -> None:
    job_id = await stores.job(1)
    answers: list[bool] = []
    async with connected(database.gateway_dsn) as conn:
        transaction = conn.transaction()
        await transaction.start()
        await conn.fetchval("select relay.durable_set_job_status($1, $2, '{queued}', 'paused')", TENANT, job_id)

        async def cancel() -> None:
            answers.append(await stores.gateway.set_job_status(job_id, "queued", "cancelled"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            waiting = await wait_until_statement_runs(admin, "durable_set_job_status")
            await wait_until_blocked(admin, waiting, by=pid_of(conn))
            await transaction.commit()
    assert answers == [False]
