"""A pause or a cancellation at each moment of a chunk: nothing is lost, and nothing runs in a job that is over (C24).

Handlers stop at events; statements are held on the wire or at the seams of the runner. Nothing here waits for a clock
but for leases of those that were stopped in the middle of something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID

import anyio
import asyncpg
import pytest

from dispatch_core.dev.wire import Gate, Wire
from dispatch_core.durable_models import ChunkStatus, JobStatus
from dispatch_core.durable_repository import DurableRepository
from relay_sdk import ChunkContext, Relay, StopReason
from tests.support import durable
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.chunks import KIND, SELDOM, Work, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.protocol import TENANT, Connection, connected
from tests.support.relays import running

pytestmark = [pytest.mark.case("C24"), pytest.mark.invariant("I3")]

TARGET = "create table public.target (job_id uuid, seq bigint, part text); grant all on public.target to public"


class _Stage:
    """One relay with one slot, whose first chunk comes to a halt at one moment."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.started: list[int] = []
        self._reached = anyio.Event()
        self._go = anyio.Event()
        self._gate: Gate | None = None

    async def _at(self, moment: str) -> None:
        if moment == self.moment and not self._reached.is_set():
            self._reached.set()
            await self._go.wait()

    def _handlers(self, relay: Relay) -> None:
        @relay.chunk_handler(KIND)
        async def handler(ctx: ChunkContext) -> str:
            self.started.append(ctx.seq)
            await self._at("begun")
            ctx.stopping.check()
            if ctx.checkpoint is None:
                async with ctx.transaction() as conn:
                    await self._write(conn, ctx, "first")
                    await ctx.save_checkpoint(1)
                    await self._at("checkpoint told")
                await self._at("checkpoint saved")
            ctx.stopping.check()
            if self.moment not in ("completing", "finishing"):
                async with ctx.transaction() as conn:
                    await self._write(conn, ctx, "second")
                    await ctx.complete("done")
                    await self._at("completion told")
                await self._at("done")
            return "done"

    @staticmethod
    async def _write(conn: Any, ctx: ChunkContext, part: str) -> None:
        await conn.execute("insert into public.target values ($1, $2, $3)", ctx.job_id, ctx.seq, part)

    @asynccontextmanager
    async def play(self, database: TestDatabase) -> AsyncIterator[Relay]:
        """Run the relay; enter when it has come to the moment."""
        async with Wire.to(database.worker_dsn) as wire:
            held = {"completing": "relay.durable_complete_many", "finishing": "relay.durable_finish"}.get(self.moment)
            self._gate = None if held is None else wire.hold(held, "call")
            relay = chunk_relay(
                wire.dsn(database.worker_dsn),
                listen_dsn=database.worker_dsn,
                chunk_concurrency=1,
                poll_seconds=60,
                chunk_stop_seconds=20,
                # Long, so that nothing held back is sent again; short where the chunk of an open transaction is left to
                # the reaper.
                durable={
                    "lease_seconds": 3 if self.moment.endswith("told") else 60,
                    # A sweep would end the job whose end is held back.
                    "sweep_seconds": 600 if self.moment == "finishing" else 0.2,
                    "finish_sweep_seconds": 600,
                },
            )
            self._handlers(relay)
            async with running(relay):
                try:
                    with anyio.fail_after(10):
                        await (self._reached if self._gate is None else self._gate.reached).wait()
                    yield relay
                finally:
                    self._release()

    def _release(self) -> None:
        self._go.set()
        if self._gate is not None:
            self._gate.release()

    async def is_told(self, relay: Relay) -> None:
        """Wait until the handler can know that it is to stop, where it still looks."""
        if self.moment not in ("completing", "done", "completion told"):
            slots = relay._chunk_session._slots  # type: ignore[union-attr]
            await eventually(lambda: [slot.stop for slot in slots or ()] == [StopReason.PAUSED])

    async def goes_on_to_its_end(self, relay: Relay, work: Work, job_id: UUID) -> None:
        """Let go; wait until the relay has nothing in hand, and no chunk runs."""
        self._release()

        async def over() -> bool:
            chunks = await work.repository.chunks(work.tenant, job_id)
            return relay.health().chunks_in_hand == 0 and all(c.status != "running" for c in chunks)

        await eventually(over)


MOMENTS = ("begun", "checkpoint told", "checkpoint saved", "completion told", "completing", "done")


@pytest.mark.invariant("J6")
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_paused_job_goes_on_after_its_resumption_and_each_chunk_is_there_once(
    database: TestDatabase, admin: Connection, gateway: Connection, moment: str
) -> None:
    await admin.execute(TARGET)
    work = Work(gateway)
    stage = _Stage(moment)
    job_id = await work.submit(3)
    async with stage.play(database) as relay:
        assert (await work.control(job_id, "pause")).outcome == "applied"
        assert stage.started == [1]
        await stage.is_told(relay)
        await stage.goes_on_to_its_end(relay, work, job_id)
        assert stage.started == [1], "nothing begins in a paused job"
        first = await work.chunk(job_id, 1)
        assert first.status in (ChunkStatus.PENDING, ChunkStatus.DONE)
        assert (first.status is ChunkStatus.DONE) == (moment in ("completion told", "completing", "done"))
        assert (await work.job(job_id)).status is JobStatus.PAUSED
        assert (await work.control(job_id, "resume")).outcome == "applied"
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    chunks = await work.repository.chunks(work.tenant, job_id)
    assert [(c.status, c.attempts) for c in chunks] == [(ChunkStatus.DONE, 1)] * 3
    await _each_part_once(admin, 3, parts=1 if moment == "completing" else 2)
    assert await durable.counters_are_exact(admin, job_id)
    assert (await durable.told(gateway, job_id)).count("completed") == 1


@pytest.mark.invariant("J6")
@pytest.mark.parametrize("moment", MOMENTS)
async def test_nothing_runs_in_a_cancelled_job_and_what_it_had_written_is_there_with_its_chunk_or_not_at_all(
    database: TestDatabase, admin: Connection, gateway: Connection, moment: str
) -> None:
    await admin.execute(TARGET)
    work = Work(gateway)
    stage = _Stage(moment)
    job_id = await work.submit(3)
    async with stage.play(database) as relay:
        assert (await work.control(job_id, "cancel")).outcome == "applied"
        await stage.goes_on_to_its_end(relay, work, job_id)
        assert stage.started == [1]
    first, *others = await work.repository.chunks(work.tenant, job_id)
    assert [chunk.status for chunk in others] == [ChunkStatus.CANCELLED] * 2
    # Said before the cancellation, and committed after it, under the lock on the chunk: that stands.
    done = moment in ("completion told", "done")
    assert first.status is (ChunkStatus.DONE if done else ChunkStatus.CANCELLED)
    parts = [row["part"] for row in await admin.fetch("select part from public.target order by 1")]
    assert parts == (["first"] if first.checkpoint is not None else []) + (["second"] if done else [])
    job = await work.job(job_id)
    assert job.status is JobStatus.CANCELLED
    counted = Counter(chunk.status for chunk in (first, *others))
    assert {status: n for status, n in job.chunks.items() if n} == counted
    for action in ("resume", "pause", "retry_failed"):
        assert (await work.control(job_id, action)).outcome in ("too_late", "refused")
    told = await durable.told(gateway, job_id)
    assert told.count("cancelled") == 1
    assert not {"completed", "failed", "chunk_retried"} & set(told)


@pytest.mark.parametrize("action", ["pause", "cancel"])
async def test_a_decision_between_a_claim_and_the_start_of_its_handler_reaches_that_handler_at_once(
    database: TestDatabase, admin: Connection, gateway: Connection, action: str
) -> None:
    """The claim is committed, and its reply still on the way, when the relay hears of the decision."""
    work = Work(gateway)
    job_id = await work.submit(1)
    # No heartbeat comes by itself within this test.
    relay = chunk_relay(database, poll_seconds=600, chunk_stop_seconds=600, durable={"lease_seconds": 600, **SELDOM})
    stopped: list[StopReason] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        stopped.append(await ctx.stopping.wait())
        ctx.stopping.check()

    claim = DurableRepository.claim
    claimed, go = anyio.Event(), anyio.Event()

    async def slow(self: DurableRepository, *args: Any, **options: Any) -> Any:
        answer = await claim(self, *args, **options)
        if answer.chunks:
            claimed.set()
            await go.wait()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DurableRepository, "claim", slow)
        async with running(relay):
            await claimed.wait()
            heard = relay.metrics.chunk_notifications
            assert (await work.control(job_id, action)).outcome == "applied"
            await eventually(lambda: relay.metrics.chunk_notifications > heard)
            go.set()
            await eventually(lambda: stopped, 5)
            await eventually(lambda: relay.health().chunks_in_hand == 0)
    assert stopped == [StopReason.PAUSED if action == "pause" else StopReason.CANCELLED]
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.attempts) == (
        (ChunkStatus.PENDING, 0) if action == "pause" else (ChunkStatus.CANCELLED, 1)
    )


@pytest.mark.parametrize("action", ["pause", "cancel"])
async def test_a_decision_between_the_last_completion_and_the_end_of_the_job_ends_it_once(
    database: TestDatabase, admin: Connection, gateway: Connection, action: str
) -> None:
    await admin.execute(TARGET)
    work = Work(gateway)
    stage = _Stage("finishing")
    job_id = await work.submit(1)
    async with stage.play(database) as relay:
        assert (await work.chunk(job_id)).status is ChunkStatus.DONE
        assert (await work.job(job_id)).status is JobStatus.RUNNING
        said = await work.control(job_id, action)
        await stage.goes_on_to_its_end(relay, work, job_id)
    end = JobStatus.COMPLETED if action == "pause" else JobStatus.CANCELLED
    assert (said.outcome, said.status, (await work.job(job_id)).status) == ("applied", end, end)
    told = await durable.told(gateway, job_id)
    assert sum(told.count(status) for status in ("completed", "cancelled")) == 1
    assert await durable.counters_are_exact(admin, job_id)


@pytest.mark.parametrize("action", ["pause", "cancel"])
async def test_no_handler_begins_for_a_job_that_was_decided_about_before_it_was_claimed(
    database: TestDatabase, gateway: Connection, action: str
) -> None:
    work = Work(gateway)
    job_id, other = await work.submit(2), await work.submit(1)
    await work.control(job_id, action)
    relay = chunk_relay(database)
    started: list[UUID] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        started.append(ctx.job_id)

    async with running(relay):
        await work.end(other)
        assert started == [other]
        if action == "pause":
            await work.control(job_id, "resume")
            assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert Counter(started) == ({other: 1, job_id: 2} if action == "pause" else {other: 1})


async def _each_part_once(admin: Connection, chunks: int, *, parts: int) -> None:
    rows = await admin.fetch("select seq, part from public.target order by 1, 2")
    assert [(row["seq"], row["part"]) for row in rows] == [
        (seq, part) for seq in range(1, chunks + 1) for part in ("first", "second")[:parts]
    ]


# --- at the floor of SQL ----------------------------------------------------------------------------


@pytest.mark.kind("lock order")
async def test_a_cancellation_waits_a_second_in_all_though_each_handler_lets_its_chunk_go_before_that(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """Transactions of handlers, one chunk after the other, each of which begins before the one before it ends."""
    chunks = 12
    job_id = await durable.submit(gateway, chunks)
    async with AsyncExitStack() as stack:
        handlers = [await stack.enter_async_context(connected(database.worker_dsn)) for _ in range(2)]
        leases = await durable.claim(handlers[0], chunks, lease=600)
        held = handlers[0].transaction()
        await held.start()
        await durable.checkpoint(handlers[0], leases[0], 1)
        async with anyio.create_task_group() as group:
            answers: list[Any] = []

            async def cancel() -> None:
                answers.append(await durable.control(gateway, job_id, "cancel"))

            group.start_soon(cancel)
            await wait_until_blocked(admin, pid_of(gateway), by=pid_of(handlers[0]))
            for n, lease in enumerate(leases[1:], 1):
                with anyio.move_on_after(0.3):
                    await eventually(lambda: answers)
                if answers:
                    break
                following = handlers[n % 2].transaction()
                await following.start()
                try:
                    await durable.checkpoint(handlers[n % 2], lease, 1)
                except asyncpg.PostgresError as error:
                    if error.sqlstate != "S2041":
                        raise
                    # The second was over just before.
                    await following.rollback()
                    await eventually(lambda: answers)
                    break
                await held.commit()
                held = following
            assert answers, "it has waited for each of them"
        await held.commit()
    (answer,) = answers
    # Or two, where it was over while one handler had its chunk locked already, and the one before it still.
    assert answer["running"] in (1, 2)
    assert (answer["outcome"], answer["chunks"]) == ("applied", chunks - answer["running"])
    await durable.run_out(admin)
    await durable.reap(gateway)
    await durable.finish(gateway, job_id)
    assert await durable.states(gateway, job_id) == ["cancelled"] * chunks
    assert await durable.counters_are_exact(admin, job_id)


async def test_what_was_completed_in_a_transaction_that_outlasts_the_cancellation_is_in_the_jobs_counters(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Nobody ends or counts the job afterwards: when it completed, another chunk still waited."""
    job_id = await durable.submit(gateway, 2, rows=5)
    (lease,) = await durable.claim(worker)
    async with worker.transaction():
        assert await durable.complete(worker, lease, rows_done=5) == ("applied", False)
        assert (await durable.control(gateway, job_id, "cancel"))["running"] == 1
    shown = await durable.job(gateway, job_id, fresh=False)
    assert shown is not None
    assert (shown["status"], shown["rows_done"]) == ("cancelled", 5)
    assert (shown["chunks_done"], shown["chunks_cancelled"], shown["chunks_running"]) == (1, 1, 0)
    await durable.finish(worker, job_id)
    assert await durable.counters_are_exact(admin, job_id)


async def test_chunks_that_are_added_again_wait_for_no_handler_and_so_hold_up_nobody_who_decides(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 2)
    (lease,) = await durable.claim(worker)
    async with worker.transaction():
        await durable.checkpoint(worker, lease, {"at": 1})
        again = '[{"payload": 1}, {"payload": 2}, {"payload": 3}]'
        with anyio.fail_after(5):
            add = "select relay.durable_insert_chunks($1, $2, $3, 1)"
            assert await gateway.fetchval(add, TENANT, job_id, again) == 1
    assert await durable.states(gateway, job_id) == ["running", "pending", "pending"]


@pytest.mark.case("C15")
async def test_a_lost_chunk_of_a_job_that_was_put_before_a_person_by_hand_is_not_cancelled(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Such a job has not ended."""
    job_id = await durable.submit(gateway, 1)
    await durable.claim(worker)
    by_hand = "select relay.durable_set_job_status($1, $2, $3::text[], $4)"
    assert await gateway.fetchval(by_hand, TENANT, job_id, ["running"], "needs_review")
    await durable.run_out(admin)
    assert [row["status"] for row in await durable.reap(gateway)] == ["retry"]
    assert await gateway.fetchval(by_hand, TENANT, job_id, ["needs_review"], "running")
    (lease,) = await durable.claim(worker)
    await durable.complete(worker, lease)
    assert await durable.finish(worker, job_id) == [("completed", True)]
