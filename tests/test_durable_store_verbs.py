"""The verbs that both SDKs stand on: answers in the order of what was asked, tenants, decisions, sweeps, schemas."""

from __future__ import annotations

import dataclasses
import time
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest

from dispatch_core import (
    ChunkOutcome,
    ChunkStatus,
    ClaimedChunk,
    ConnectionLostError,
    Controlled,
    DurableJobsSettings,
    DurableJobStore,
    DurableRepository,
    JobClosedError,
    JobStatus,
    Resolved,
    SchemaMismatchError,
    TenancyDeniedError,
    TenancyMismatchError,
    TenancyUnboundError,
    UnknownJobError,
    WriteOutcome,
    migrate,
)
from dispatch_core.database import Database
from dispatch_core.durable_models import Heartbeaten
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.protocol import TENANT, Connection, connected, logins
from tests.support.stores import HOLDER, nothing_written

OTHER = "globex"


@dataclasses.dataclass
class Verbs:
    """The verbs as a gateway's, a worker's and an operator's login."""

    gateway: DurableRepository
    worker: DurableRepository
    operator: DurableRepository

    async def job(self, chunks: int = 1, *, tenant: str = TENANT, idempotent: bool = True) -> UUID:
        job_id = uuid4()
        await self.gateway.insert_job(tenant, job_id, durable.KIND, idempotent=idempotent)
        await self.gateway.insert_chunks(tenant, job_id, list(range(chunks)), from_seq=1)
        return job_id

    async def claim(self, limit: int, *tenants: str) -> list[ClaimedChunk]:
        tenants = tenants or (TENANT,)
        claimed = await self.worker.claim(tenants, [durable.KIND], limit=limit, holder=HOLDER, token=uuid4())
        return claimed.chunks


@pytest.fixture
def verbs(gateway: Connection, worker: Connection, operator: Connection) -> Verbs:
    return Verbs(DurableRepository(gateway), DurableRepository(worker), DurableRepository(operator))


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.invariant("I3")
async def test_answers_come_in_the_order_of_what_was_asked_whatever_tenant_and_job(
    verbs: Verbs, admin: Connection
) -> None:
    for tenant in (TENANT, OTHER):
        await verbs.job(3, tenant=tenant)
    leases = [chunk.lease for chunk in await verbs.claim(6, TENANT, OTHER)]
    assert {(lease.tenant_id, lease.seq) for lease in leases} == {(t, n) for t in (TENANT, OTHER) for n in (1, 2, 3)}
    mixed = [leases[5], leases[0], leases[3], leases[1]]
    stale = [mixed[0], dataclasses.replace(mixed[1], token=uuid4()), mixed[2], dataclasses.replace(mixed[3], seq=9)]
    running, lost = (
        Heartbeaten(WriteOutcome.APPLIED, JobStatus.RUNNING),
        Heartbeaten(WriteOutcome.STALE, JobStatus.RUNNING),
    )
    assert await verbs.worker.heartbeat(stale, rows_done=[7, 8, None, 9]) == [running, lost, running, lost]
    assert await verbs.worker.release([stale[1], mixed[0]]) == [
        (WriteOutcome.STALE, None), (WriteOutcome.APPLIED, ChunkStatus.PENDING),
    ]  # fmt: skip
    outcomes = [None, ChunkOutcome("one"), ChunkOutcome("two", 5, 1), ChunkOutcome("three")]
    settled = await verbs.worker.complete_many(stale, outcomes)
    assert [item.outcome for item in settled] == ["stale", "stale", "applied", "stale"]
    (chunk,) = await verbs.gateway.chunks(mixed[2].tenant_id, mixed[2].job_id, seqs=[mixed[2].seq])
    assert (chunk.status, chunk.outcome, chunk.rows_done, chunk.rows_failed) == (ChunkStatus.DONE, "two", 5, 1)
    async with nothing_written(admin):
        again = await verbs.worker.complete_many([mixed[2], stale[3]], [None, None])
    assert [item.outcome for item in again] == ["repeated", "stale"]


async def test_a_heartbeat_of_a_locked_chunk_is_busy_and_of_a_paused_job_told(
    verbs: Verbs, database: TestDatabase
) -> None:
    job_id = await verbs.job(2)
    one, two = (chunk.lease for chunk in await verbs.claim(2))
    assert (await verbs.operator.control(TENANT, job_id, "pause")).outcome == "applied"
    async with connected(database.admin_dsn) as other, other.transaction():
        await other.execute("select 1 from relay.durable_chunk where seq = 1 for update")
        assert await verbs.worker.heartbeat([one, two]) == [
            Heartbeaten(WriteOutcome.BUSY, JobStatus.PAUSED), Heartbeaten(WriteOutcome.APPLIED, JobStatus.PAUSED),
        ]  # fmt: skip


async def test_a_claim_whose_reply_was_lost_is_found_by_its_token(verbs: Verbs) -> None:
    await verbs.job(3)
    token, deadline = uuid4(), time.monotonic() + 60
    assert (await verbs.worker.claim_again([TENANT], token, holder=HOLDER, local_deadline=deadline)).chunks == []
    claimed = await verbs.worker.claim([TENANT], [durable.KIND], limit=2, holder=HOLDER, token=token)
    found = await verbs.worker.claim_again([TENANT, OTHER], token, holder=HOLDER, local_deadline=deadline)
    assert [chunk.payload for chunk in found.chunks] == [chunk.payload for chunk in claimed.chunks] == [0, 1]
    assert [dataclasses.replace(chunk.lease, local_deadline=0) for chunk in found.chunks] == [
        dataclasses.replace(chunk.lease, local_deadline=0) for chunk in claimed.chunks
    ]
    assert {chunk.lease.local_deadline for chunk in found.chunks} == {deadline}


async def test_params_are_with_every_chunk_of_a_claim_though_they_come_once_a_job(verbs: Verbs) -> None:
    for n in (1, 2):
        await verbs.gateway.insert_job(TENANT, job_id := uuid4(), durable.KIND, {"n": n})
        await verbs.gateway.insert_chunks(TENANT, job_id, [1, 2])
    assert [chunk.params for chunk in await verbs.claim(9)] == [{"n": 1}, {"n": 1}, {"n": 2}, {"n": 2}]


# --- submissions ------------------------------------------------------------------------------------------------------


async def test_a_submission_is_seen_when_it_is_sealed_and_not_before(verbs: Verbs) -> None:
    job_id = uuid4()
    assert await verbs.gateway.insert_job(TENANT, job_id, durable.KIND, submitting=True)
    assert await verbs.gateway.insert_chunks(TENANT, job_id, [1, 2], from_seq=1) == 2
    assert await verbs.gateway.jobs(TENANT, [job_id]) == []
    assert (await verbs.gateway.events(TENANT, job_id)).events == []
    assert await verbs.claim(5) == []
    with pytest.raises(JobClosedError, match="2 chunks, not 3") as wrong:
        await verbs.gateway.seal(TENANT, job_id, chunks=3)
    assert wrong.value.job_id == job_id
    assert await verbs.gateway.seal(TENANT, job_id, chunks=2) is JobStatus.QUEUED
    assert len(await verbs.claim(5)) == 2
    assert await verbs.gateway.seal(TENANT, job_id, chunks=2) is JobStatus.RUNNING
    assert not await verbs.gateway.abandon(TENANT, job_id)


async def test_a_submission_that_is_given_up_is_never_seen(verbs: Verbs) -> None:
    job_id = uuid4()
    await verbs.gateway.insert_job(TENANT, job_id, durable.KIND, submitting=True)
    assert await verbs.gateway.abandon(TENANT, job_id)
    assert not await verbs.gateway.abandon(TENANT, job_id)
    for call in (verbs.gateway.seal(TENANT, job_id), verbs.gateway.insert_chunks(TENANT, job_id, [1])):
        with pytest.raises(UnknownJobError) as unknown:
            await call
        assert unknown.value.job_id == job_id


# --- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.case("C24")
async def test_control_says_what_it_really_did(verbs: Verbs, admin: Connection) -> None:
    job_id = await verbs.job(3)
    (held,) = await verbs.claim(1)
    running, paused, cancelled = JobStatus.RUNNING, JobStatus.PAUSED, JobStatus.CANCELLED
    assert await verbs.operator.control(TENANT, job_id, "pause", actor="ann") == Controlled(
        "applied", running, paused, 0, 1
    )
    async with nothing_written(admin):
        again = await verbs.gateway.control(TENANT, job_id, "pause")
    assert again == Controlled("already", paused, paused, 0, 1)
    assert await verbs.gateway.control(TENANT, job_id, "cancel") == Controlled("applied", paused, cancelled, 3, 0)
    async with nothing_written(admin):
        assert (await verbs.gateway.control(TENANT, job_id, "resume")).outcome == "too_late"
        assert (await verbs.gateway.control(TENANT, job_id, "retry_failed")).outcome == "refused"
        assert await verbs.gateway.control(TENANT, uuid4(), "cancel") == Controlled("unknown", None, None, 0, 0)
        assert (await verbs.worker.heartbeat([held.lease]))[0].outcome is WriteOutcome.STALE
    told = [(event.type, event.actor) for event in (await verbs.gateway.events(TENANT, job_id)).events][-2:]
    assert told == [("paused", "ann"), ("cancelled", None)]


async def test_resolve_moves_only_what_waits_for_a_person(verbs: Verbs, admin: Connection) -> None:
    job_id = await verbs.job(2, idempotent=False)
    await verbs.claim(2)
    await durable.run_out(admin)
    assert [chunk.status for chunk in await verbs.operator.reap(TENANT, "ann", limit=10)] == ["needs_review"] * 2
    ((_, status, ended),) = await verbs.operator.finish(TENANT, [job_id])
    assert (status, ended) == (JobStatus.NEEDS_REVIEW, True)
    review, done = JobStatus.NEEDS_REVIEW, ChunkStatus.DONE
    assert await verbs.gateway.resolve(TENANT, job_id, 1, "done", actor="ann", note="x") == Resolved(
        "applied", done, review
    )
    async with nothing_written(admin):
        assert await verbs.gateway.resolve(TENANT, job_id, 1, "retry", actor="bob") == Resolved(
            "too_late", done, review
        )
        assert await verbs.gateway.resolve(TENANT, job_id, 9, "retry", actor="bob") == Resolved("unknown", None, review)
        assert await verbs.gateway.resolve(TENANT, uuid4(), 1, "retry", actor="bob") == Resolved("unknown", None, None)
    last = await verbs.operator.resolve(TENANT, job_id, 2, "failed", actor="ann")
    assert last == Resolved("applied", ChunkStatus.FAILED, JobStatus.COMPLETED_WITH_ERRORS)
    told = [(event.type, event.seq, event.actor) for event in (await verbs.gateway.events(TENANT, job_id)).events]
    assert ("resolved", 1, "ann") in told
    assert ("resolved", 2, "ann") in told


# --- sweeps -----------------------------------------------------------------------------------------------------------


async def test_sweeps_take_back_end_and_remove_what_is_due(database: TestDatabase, admin: Connection) -> None:
    settings = DurableJobsSettings(
        lease_seconds=0.01, sweep_seconds=0.001, retention_seconds=0.01, abandoned_seconds=0.01
    )
    settings = settings.model_copy(update={"finish_sweep_seconds": 0.001, "remove_sweep_seconds": 0.001})
    async with connected(database.gateway_dsn) as one, connected(database.worker_dsn) as two:
        verbs = Verbs(DurableRepository(one, settings), DurableRepository(two, settings), DurableRepository(one))
        job_id = await verbs.job(1)
        await verbs.claim(1)
        # Not before this session is a lease old.
        (swept,) = await eventually(lambda: verbs.worker.run_sweeps("reaper"))
        assert (swept.sweep, swept.tenant_id, swept.job_id, swept.seq, swept.status) == (
            "lease", TENANT, job_id, 1, "retry",
        )  # fmt: skip
        await admin.execute("update relay.durable_chunk set status = 'done', ended_at = now()")
        (swept,) = await verbs.worker.run_sweeps("reaper", lease=False)
        assert (swept.sweep, swept.job_id, swept.seq, swept.status) == ("finish", job_id, None, "completed")
        assert await verbs.worker.run_sweeps("reaper") == []
        (swept,) = await eventually(lambda: verbs.gateway.run_sweeps("reaper", lease=False, finish=False, remove=True))
        assert (swept.sweep, swept.tenant_id, swept.job_id, swept.seq) == ("remove", TENANT, None, None)
        assert int(swept.status) > 0
        assert await verbs.gateway.jobs(TENANT, [job_id]) == []


# --- tenants and schemas ----------------------------------------------------------------------------------------------


@pytest.mark.invariant("I4")
async def test_a_login_of_one_tenant_is_denied_another(database: TestDatabase, verbs: Verbs, admin: Connection) -> None:
    job_id = await verbs.job(1)
    async with logins(database) as made, nothing_written(admin):
        conn = await made.open("gateway", OTHER)
        store = DurableJobStore(conn, TENANT)
        for call in (
            store.insert_job(durable.KIND),
            store.get_job(job_id),
            store.query("job"),
            store.set_job_status(job_id, "queued", "paused"),
            store.reap_expired(),
        ):
            with pytest.raises(TenancyDeniedError):
                await call
        # And a gateway's login claims nothing.
        with pytest.raises(TenancyDeniedError):
            await DurableJobStore(conn, OTHER).claim_chunks([durable.KIND])


@pytest.mark.invariant("I4")
async def test_without_a_tenant_the_one_that_is_bound_is_meant(gateway: Connection, worker: Connection) -> None:
    submits, runs = DurableJobStore(gateway), DurableJobStore(worker)
    with pytest.raises(TenancyUnboundError):
        await submits.insert_job(durable.KIND)
    async with gateway.transaction():
        await gateway.execute("set local app.tenant_id = 'globex'")
        job_id = await submits.insert_job(durable.KIND, conn=gateway)
        await submits.insert_chunks(job_id, [1], conn=gateway)
        with pytest.raises(TenancyMismatchError):
            async with gateway.transaction():
                await DurableJobStore(gateway, TENANT).get_job(job_id)
    async with worker.transaction():
        await worker.execute("set local app.tenant_id = 'globex'")
        claimed = await runs.claim_next_chunk(job_id)
        assert claimed is not None
        assert claimed.lease.tenant_id == OTHER
    # A lease says by itself whose it is.
    assert await runs.heartbeat(claimed.lease)
    assert await DurableJobStore(gateway, TENANT).get_job(job_id) is None


async def test_what_rings_has_a_channel_for_each_tenant_and_kind(verbs: Verbs) -> None:
    names = {
        await verbs.worker.channel("durable", TENANT),
        await verbs.gateway.channel("durable_watch", TENANT),
        await verbs.gateway.channel("durable_watch", OTHER),
    }
    assert len(names) == 3


async def test_a_database_without_the_room_says_how_to_get_it(bare_database: TestDatabase) -> None:
    await migrate(bare_database.admin_dsn, only=["dispatch"])
    async with Database(bare_database.admin_dsn) as database, connected(bare_database.admin_dsn) as conn:
        with pytest.raises(SchemaMismatchError, match="db migrate --only durable"):
            await DurableJobStore(database, TENANT).get_job(uuid4())
        async with conn.transaction():
            with pytest.raises(SchemaMismatchError, match="db migrate --only durable"):
                await DurableJobStore(database, TENANT).insert_job("x", conn=conn)


async def test_without_skip_locked_a_job_that_is_being_decided_about_keeps_nobody(
    database: TestDatabase, verbs: Verbs
) -> None:
    job_id = await verbs.job(3)
    settings = DurableJobsSettings(skip_locked_claims=False)
    async with Database(database.worker_dsn) as workers, connected(database.admin_dsn) as other:
        store = DurableJobStore(workers, TENANT, settings=settings)
        async with other.transaction():
            await other.execute("select 1 from relay.durable_job for update")
            with anyio.fail_after(5):
                assert await store.claim_next_chunk(job_id) is None
        claimed = await store.claim_next_chunk(job_id)
        assert claimed is not None
        assert claimed.lease.seq == 1


# --- replies that are lost --------------------------------------------------------------------------------------------


class Forgetful(Database):
    """Loses the reply of the next statement that has these words in it."""

    words = ""
    asked = 0

    async def execute(self, sql: str, *args: object) -> list[Any]:
        rows = await super().execute(sql, *args)
        if "claim_again" in sql:
            self.asked += 1
        if self.words and self.words in sql:
            self.words = ""
            raise ConnectionLostError("the connection broke")
        return rows


@pytest.mark.parametrize("way", ["claim_chunk", "claim_next_chunk_skip_locked", "claim_chunks"])
async def test_the_reply_of_a_claim_that_was_lost_is_asked_for(database: TestDatabase, verbs: Verbs, way: str) -> None:
    """Without that, a chunk that may not run twice would wait for a person."""
    job_id = await verbs.job(2, idempotent=False)
    async with Forgetful(database.worker_dsn) as workers:
        store = DurableJobStore(workers, TENANT)
        (chunk,) = await verbs.gateway.chunks(TENANT, job_id, seqs=[1])
        assert chunk is not None
        workers.words = "relay.durable_claim"
        if way == "claim_chunk":
            lease = await store.claim_chunk(chunk)
        elif way == "claim_chunks":
            lease = (await store.claim_chunks([durable.KIND])).chunks[0].lease
        else:
            claimed = await store.claim_next_chunk_skip_locked(job_id)
            assert claimed is not None
            lease = claimed.lease
        assert workers.asked == 1
        assert lease is not None
        assert lease.seq == 1
        assert await store.heartbeat(lease)


async def test_a_claim_that_never_came_is_asked_for_some_times_and_then_not_known(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch_core.durable_claims._ASK_AGAIN_SECONDS", (0.0, 0.001))
    async with Forgetful(database.worker_dsn) as workers:
        store = DurableJobStore(workers, TENANT)
        workers.words = "relay.durable_claim"
        with pytest.raises(ConnectionLostError):
            await store.claim_chunks([durable.KIND])
        assert workers.asked == 2


async def test_a_completion_stands_though_its_job_could_not_be_ended(
    database: TestDatabase, verbs: Verbs, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = await verbs.job(1)
    async with Forgetful(database.worker_dsn) as workers:
        store = DurableJobStore(workers, TENANT)
        claimed = await store.claim_next_chunk(job_id)
        assert claimed is not None
        workers.words = "relay.durable_finish"
        settled = await store.complete_chunk(claimed.lease)
    assert (settled.outcome, settled.last) == (WriteOutcome.APPLIED, True)
    assert "a sweep will" in caplog.text
