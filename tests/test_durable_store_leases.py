"""The store of durable jobs: leases, what may be said under one, and that whoever has none says nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import anyio
import pytest

from dispatch_core import (
    ChunkOutcome,
    ChunkStatus,
    DatabaseBusyError,
    DurableJobStore,
    JobLease,
    JobStatus,
    LeaseLostError,
    RowError,
    TenancyMismatchError,
    WriteOutcome,
)
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.high_counters import nth
from tests.support.protocol import TENANT, Connection, connected
from tests.support.stores import HOLDER, Stores, nothing_written, open_stores, refused, wrong_leases

pytestmark = [pytest.mark.invariant("I3"), pytest.mark.case("C18")]


@pytest.fixture
async def stores(database: TestDatabase) -> AsyncIterator[Stores]:
    async with open_stores(database, lease_seconds=30) as stores:
        yield stores


# --- claiming ---------------------------------------------------------------------------------------------------------


async def test_a_claim_gives_a_lease_by_both_clocks(stores: Stores) -> None:
    job_id = await stores.job(2)
    before = await stores.worker.now()
    claimed = await stores.claim(job_id, lease_ttl_seconds=20)
    lease = claimed.lease
    assert (lease.tenant_id, lease.job_id, lease.seq, lease.version, lease.holder) == (
        TENANT,
        job_id,
        1,
        nth(1),
        HOLDER,
    )
    assert before + timedelta(seconds=20) < lease.expires_at < await stores.worker.now() + timedelta(seconds=20)
    # Never later than the true one.
    assert lease.local_deadline < time.monotonic() + 20
    assert not lease.is_over_locally
    assert dataclasses.replace(lease, local_deadline=time.monotonic()).is_over_locally
    assert (claimed.payload, claimed.params, claimed.attempt, claimed.checkpoint) == ({"n": 1}, {}, 1, None)
    chunk = await stores.gateway.get_chunk(job_id, 1)
    assert chunk is not None
    assert (chunk.status, chunk.claimed_by, chunk.lease_version) == (ChunkStatus.RUNNING, HOLDER, lease.version)


async def test_a_chunk_is_claimed_once_by_the_version_that_was_read(stores: Stores, admin: Connection) -> None:
    job_id = await stores.job(1)
    chunk = await stores.gateway.get_chunk(job_id, 1)
    assert chunk is not None
    lease = await stores.worker.claim_chunk(chunk, holder="me")
    assert lease is not None
    assert (lease.seq, lease.version, lease.holder) == (1, nth(1), "me")
    async with nothing_written(admin):
        assert await stores.worker.claim_chunk(chunk) is None
    # Free again, but not as it was.
    assert await stores.worker.release_chunk(lease)
    async with nothing_written(admin):
        assert await stores.worker.claim_chunk(chunk) is None
    again = await stores.gateway.get_chunk(job_id, 1)
    assert again is not None
    assert await stores.worker.claim_chunk(again) is not None


async def test_of_many_who_claim_a_chunk_as_read_one_gets_it(stores: Stores) -> None:
    chunk = await stores.gateway.get_chunk(await stores.job(1), 1)
    assert chunk is not None
    got: list[JobLease | None] = []

    async def claim() -> None:
        assert chunk is not None
        got.append(await stores.worker.claim_chunk(chunk))

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(claim)
    assert sum(lease is not None for lease in got) == 1


@pytest.mark.parametrize("status", ["paused", "cancelled", "failed", "completed", "needs_review"])
async def test_nothing_is_claimed_of_a_job_that_does_not_run(stores: Stores, admin: Connection, status: str) -> None:
    job_id = await stores.job(1)
    chunk = await stores.gateway.get_chunk(job_id, 1)
    assert chunk is not None
    assert await stores.gateway.set_job_status(job_id, "queued", status)
    async with nothing_written(admin):
        assert await stores.worker.claim_chunk(chunk) is None
        assert await stores.worker.claim_next_chunk_skip_locked(job_id) is None
        assert await stores.worker.claim_next_chunk(job_id) is None
        assert (await stores.worker.claim_chunks([durable.KIND])).chunks == []


@pytest.mark.parametrize("skip_locked", [True, False])
async def test_the_next_chunk_is_the_lowest_that_nobody_has(database: TestDatabase, *, skip_locked: bool) -> None:
    async with open_stores(database, skip_locked_claims=skip_locked) as stores:
        assert stores.worker.uses_skip_locked_claims() is skip_locked
        job_id = await stores.job(4)
        got: list[int] = []

        async def claim() -> None:
            claimed = await stores.worker.claim_next_chunk(job_id)
            if claimed is not None:
                got.append(claimed.lease.seq)

        await claim()
        assert got == [1]
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(claim)
        assert sorted(got) == [1, 2, 3, 4]
        assert await stores.worker.claim_next_chunk(job_id) is None
        assert await stores.worker.claim_next_chunk(uuid4()) is None


async def test_a_locked_chunk_is_stepped_over(stores: Stores, database: TestDatabase) -> None:
    job_id = await stores.job(2)
    async with connected(database.admin_dsn) as other, other.transaction():
        await other.execute("select 1 from relay.durable_chunk where seq = 1 for update")
        assert (await stores.claim(job_id)).lease.seq == 2
        assert await stores.worker.claim_next_chunk_skip_locked(job_id) is None
    assert (await stores.claim(job_id)).lease.seq == 1


async def test_chunks_among_all_jobs_come_by_priority_then_age_then_number(stores: Stores) -> None:
    old, young, urgent = await stores.job(2), await stores.job(1), await stores.job(1, priority=5)
    foreign = await stores.gateway.insert_job("export", priority=9)
    await stores.gateway.insert_chunks(foreign, [1])
    claimed = await stores.worker.claim_chunks([durable.KIND, "other"], limit=10)
    assert [(chunk.lease.job_id, chunk.lease.seq) for chunk in claimed.chunks] == [
        (urgent, 1), (old, 1), (old, 2), (young, 1),
    ]  # fmt: skip
    assert claimed.waiting == {}


async def test_how_long_until_the_next_retry_is_told_with_a_claim(stores: Stores) -> None:
    lease = await stores.lease()
    assert await stores.worker.fail_chunk(lease, "busy", delay_seconds=100) is ChunkStatus.RETRY
    claimed = await stores.worker.claim_chunks([durable.KIND])
    assert claimed.chunks == []
    assert 90 < claimed.waiting[TENANT] <= 100


# --- what a holder says -----------------------------------------------------------------------------------------------

SAYS: dict[str, Callable[[DurableJobStore, JobLease], Awaitable[Any]]] = {
    "heartbeat": lambda store, lease: store.heartbeat(lease),
    "checkpoint": lambda store, lease: store.checkpoint(lease, {"row": 1}, rows_done=1),
    "checkpoint that renews": lambda store, lease: store.checkpoint(lease, None, lease_ttl_seconds=60),
    "complete_chunk": lambda store, lease: store.complete_chunk(lease, ChunkOutcome("ok", 1, 0)),
    "fail_chunk": lambda store, lease: store.fail_chunk(lease, "boom"),
    "fail_chunk for good": lambda store, lease: store.fail_chunk(lease, "boom", False),
    "release_chunk": lambda store, lease: store.release_chunk(lease),
    "release_chunk to retry": lambda store, lease: store.release_chunk(lease, "retry"),
    "record_row_errors": lambda store, lease: store.record_row_errors(lease, [RowError(1, "bad")]),
}
LOSES: dict[str, Any] = {"heartbeat": False, "fail_chunk": None, "release_chunk": False}


async def loses(verb: str, store: DurableJobStore, lease: JobLease) -> None:
    """Prove that the verb tells who is no holder that he is none."""
    name = verb.split(maxsplit=1)[0]
    if name in LOSES:
        assert await SAYS[verb](store, lease) is LOSES[name]
    else:
        await refused(lambda: SAYS[verb](store, lease), lease)


@pytest.mark.parametrize("verb", SAYS)
async def test_a_wrong_lease_is_told_so_and_writes_nothing(stores: Stores, admin: Connection, verb: str) -> None:
    lease, other = await stores.lease(2), await stores.lease(2)
    async with nothing_written(admin):
        for wrong in wrong_leases(lease, other).values():
            await loses(verb, stores.worker, wrong)
    await SAYS[verb](stores.worker, lease)  # the right one is still good


@pytest.mark.case("C17")
@pytest.mark.parametrize("verb", SAYS)
async def test_a_lease_that_has_run_out_is_lost_though_nobody_has_taken_it(
    stores: Stores, admin: Connection, verb: str
) -> None:
    lease = await stores.lease(2)
    await durable.run_out(admin, 0.001)
    async with nothing_written(admin):
        await loses(verb, stores.worker, lease)


@pytest.mark.case("C15")
@pytest.mark.parametrize("verb", SAYS)
async def test_a_lease_of_a_chunk_that_was_taken_back_is_lost(stores: Stores, admin: Connection, verb: str) -> None:
    lease = await stores.lease(2)
    await durable.run_out(admin)
    (reaped,) = await stores.worker.reap_expired("reaper")
    assert (reaped.seq, reaped.status, reaped.holder, reaped.attempts) == (1, ChunkStatus.RETRY, HOLDER, 1)
    async with nothing_written(admin):
        await loses(verb, stores.worker, lease)
    # By the same holder's name again: another lease.
    again = await stores.claim(lease.job_id)
    async with nothing_written(admin):
        await loses(verb, stores.worker, lease)
    await SAYS[verb](stores.worker, again.lease)


@pytest.mark.case("C24")
@pytest.mark.parametrize("verb", [verb for verb in SAYS if not verb.startswith("release_chunk")])
async def test_a_lease_of_a_cancelled_job_is_lost(stores: Stores, admin: Connection, verb: str) -> None:
    lease = await stores.lease(2)
    assert await stores.gateway.set_job_status(lease.job_id, "running", "cancelled")
    async with nothing_written(admin):
        await loses(verb, stores.worker, lease)


async def test_a_lease_of_another_tenant_is_refused_before_any_sql(stores: Stores, admin: Connection) -> None:
    lease = dataclasses.replace(await stores.lease(2), tenant_id="globex")
    async with nothing_written(admin):
        for verb in SAYS:
            with pytest.raises(TenancyMismatchError):
                await SAYS[verb](stores.worker, lease)


# --- each verb, when it wins ------------------------------------------------------------------------------------------


async def test_a_heartbeat_has_the_lease_go_on_from_now(stores: Stores) -> None:
    lease = await stores.lease()
    assert await stores.worker.heartbeat(lease, 500)
    chunk = await stores.gateway.get_chunk(lease.job_id, 1)
    assert chunk is not None
    assert chunk.lease_expires_at is not None
    left = chunk.lease_expires_at - await stores.worker.now()
    assert timedelta(seconds=490) < left < timedelta(seconds=500)


async def test_a_heartbeat_of_a_paused_job_goes_on(stores: Stores) -> None:
    lease = await stores.lease(2)
    assert await stores.gateway.set_job_status(lease.job_id, "running", "paused")
    assert await stores.worker.heartbeat(lease)


async def test_a_heartbeat_waits_while_the_row_is_locked_and_then_says_that_it_does_not_know(
    database: TestDatabase,
) -> None:
    async with open_stores(database, lease_seconds=30) as stores, connected(database.admin_dsn) as other:
        lease = await stores.lease()
        async with other.transaction():
            await other.execute("select 1 from relay.durable_chunk for update")
            with pytest.raises(DatabaseBusyError) as busy:
                await stores.worker.heartbeat(lease, 0.3)
            assert busy.value.job_id == lease.job_id
            assert busy.value.retryable
        assert await stores.worker.heartbeat(lease)


async def test_a_checkpoint_is_what_the_next_holder_begins_with(stores: Stores) -> None:
    lease = await stores.lease()
    await stores.worker.checkpoint(lease, {"row": 2**70}, rows_done=5, rows_failed=1, lease_ttl_seconds=300)
    await stores.worker.checkpoint(lease, [7])
    assert await stores.worker.release_chunk(lease)
    again = await stores.claim(lease.job_id)
    assert (again.checkpoint, again.rows_done, again.rows_failed, again.attempt) == ([7], 5, 1, 1)
    assert again.lease.version == lease.version + 2


async def test_the_last_completion_ends_the_job_at_once(stores: Stores, admin: Connection) -> None:
    job_id = await stores.job(2)
    one, two = await stores.claim(job_id), await stores.claim(job_id)
    settled = await stores.worker.complete_chunk(one.lease, ChunkOutcome({"kept": 3}, rows_done=3))
    # Nothing waits; but the other one runs, so the job goes on.
    assert (settled.outcome, settled.last) == (WriteOutcome.APPLIED, True)
    job = await stores.gateway.get_job(job_id)
    assert job is not None
    assert job.status is JobStatus.RUNNING
    await stores.worker.complete_chunk(two.lease, ChunkOutcome(rows_done=4, rows_failed=1))
    job = await stores.gateway.get_job(job_id)
    assert job is not None
    assert (job.status, job.rows_done, job.rows_failed) == (JobStatus.COMPLETED_WITH_ERRORS, 7, 1)
    assert job.progress.fraction == 1.0
    assert await durable.counters_are_exact(admin, job_id)


async def test_a_completion_that_is_said_again_is_known(stores: Stores, admin: Connection) -> None:
    lease = await stores.lease(2)
    await stores.worker.complete_chunk(lease, ChunkOutcome(1))
    async with nothing_written(admin):
        assert (await stores.worker.complete_chunk(lease, ChunkOutcome(2))).outcome is WriteOutcome.REPEATED
        with pytest.raises(LeaseLostError):
            await stores.worker.checkpoint(lease, 1)


@pytest.mark.case("C21")
async def test_a_failure_is_a_retry_only_if_it_may_be_and_attempts_remain(stores: Stores) -> None:
    job_id = await stores.job(2, max_attempts=2)
    message = "boom\0" + "x" * 9000
    seen = [await stores.worker.fail_chunk((await stores.claim(job_id)).lease, message, True) for _ in range(2)]
    seen.append(await stores.worker.fail_chunk((await stores.claim(job_id)).lease, "no use", False))
    assert seen == ["retry", "failed", "failed"]
    job = await stores.gateway.get_job(job_id)
    assert job is not None
    assert job.status is JobStatus.FAILED
    chunk = await stores.gateway.get_chunk(job_id, 1)
    assert chunk is not None
    assert chunk.last_error is not None
    assert chunk.last_error.startswith("boom\N{REPLACEMENT CHARACTER}xxx")
    assert len(chunk.last_error.encode()) <= 2000


@pytest.mark.parametrize("to", ["pending", "retry", ChunkStatus.PENDING])
async def test_a_released_chunk_is_free_and_its_attempt_not_counted(stores: Stores, to: str) -> None:
    lease = await stores.lease(max_attempts=1)
    assert await stores.worker.release_chunk(lease, to)
    chunk = await stores.gateway.get_chunk(lease.job_id, 1)
    assert chunk is not None
    assert (chunk.status, chunk.attempts, chunk.claimed_by) == (to, 0, None)


@pytest.mark.case("C24")
async def test_a_chunk_released_in_a_cancelled_job_is_cancelled_and_never_free(stores: Stores) -> None:
    lease = await stores.lease()
    assert await stores.gateway.set_job_status(lease.job_id, "running", "cancelled")
    assert await stores.worker.release_chunk(lease, "retry")
    chunk = await stores.gateway.get_chunk(lease.job_id, 1)
    assert chunk is not None
    assert (chunk.status, chunk.attempts) == (ChunkStatus.CANCELLED, 0)


async def test_row_errors_said_again_replace_what_was_said(stores: Stores, admin: Connection) -> None:
    lease = await stores.lease()
    assert (
        await stores.worker.record_row_errors(lease, [RowError(7, "date", "no date", {"a": 1}), RowError(7, "x")]) == 2
    )
    assert await stores.worker.record_row_errors(lease, [RowError(7, "date", "still none"), RowError(2**40, "")]) == 2
    assert await stores.worker.record_row_errors(lease, []) == 0
    found = await stores.gateway.row_errors(lease.job_id)
    assert [(error.row, error.code, error.message, error.data) for error in found] == [
        (7, "date", "still none", None), (7, "x", "", None), (2**40, "", "", None),
    ]  # fmt: skip
    assert {(error.seq, error.lease_version) for error in found} == {(1, lease.version)}


# --- what others left -------------------------------------------------------------------------------------------------


async def test_reaping_takes_all_that_ran_out_in_batches_and_nothing_else(
    stores: Stores, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch_core.durable_leases._REAP_BATCH", 2)
    once = await stores.job(3, idempotent=False)
    often = await stores.job(3)
    for job_id in (once, once, once, often, often):
        await stores.claim(job_id)
    await durable.run_out(admin)
    live = await stores.claim(often)
    reaped = await stores.worker.reap_expired()
    assert {(chunk.job_id, chunk.seq, chunk.status) for chunk in reaped} == {
        *((once, seq, ChunkStatus.NEEDS_REVIEW) for seq in (1, 2, 3)),
        *((often, seq, ChunkStatus.RETRY) for seq in (1, 2)),
    }
    assert live.lease.seq == 3
    assert await stores.worker.heartbeat(live.lease)
    job = await stores.gateway.get_job(once)
    assert job is not None
    assert job.status is JobStatus.NEEDS_REVIEW
    async with nothing_written(admin):
        assert await stores.gateway.reap_expired("another") == []


async def test_many_reapers_at_once_take_each_chunk_back_once(stores: Stores, admin: Connection) -> None:
    await stores.job(40)
    await stores.worker.claim_chunks([durable.KIND], limit=40)
    await durable.run_out(admin)
    taken: list[int] = []

    async def reap() -> None:
        taken.extend(chunk.seq for chunk in await stores.worker.reap_expired())

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(reap)
    assert sorted(taken) == list(range(1, 41))
