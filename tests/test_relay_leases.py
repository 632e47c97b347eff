"""Leases, deadlines and withdrawals: which handler is cancelled when, what is written then, and what is not."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import DispatchStatus, WriteOutcome
from relay_sdk import DispatchJob, Reply
from tests.support.activity import backends
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.relays import Jobs, new_relay, running

SUCCEEDED, FAILED, EXPIRED = DispatchStatus.SUCCEEDED, DispatchStatus.FAILED, DispatchStatus.EXPIRED


class Long:
    """A handler that runs until it is told to go on, and tells what befell it."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.cancelled: list[Any] = []
        self.go_on = asyncio.Event()

    async def __call__(self, job: DispatchJob) -> Reply:
        self.started.append(job.job_id)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.append(job.job_id)
            raise
        return Reply(b"done")


# --- leases ----------------------------------------------------------------------------------------------------------


async def test_a_job_that_outlives_its_lease_is_renewed_and_nobody_takes_it(
    database: TestDatabase, gateway: Any
) -> None:
    relays = [new_relay(database, lease_seconds=2.0, heartbeat_seconds=0.3, sweep_seconds=0.1) for _ in range(2)]
    handlers = [Long(), Long()]
    for relay, handler in zip(relays, handlers, strict=True):
        relay.fallback(handler)
    jobs = Jobs(gateway)
    async with running(*relays):
        ids = await jobs.enqueue_many(4)
        await eventually(lambda: sum(len(handler.started) for handler in handlers) == 4)
        await eventually(lambda: sum(relay.metrics.leases_renewed for relay in relays) >= 4 * 9)
        for handler in handlers:
            handler.go_on.set()
        results = await jobs.ends(ids)
    assert {(result.status, result.attempt) for result in results} == {(SUCCEEDED, 1)}
    assert sum(relay.metrics.jobs_lost for relay in relays) == 0


async def test_short_jobs_cost_no_heartbeat(database: TestDatabase, gateway: Any) -> None:
    relay = new_relay(database, lease_seconds=30.0)

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        await asyncio.sleep(0.01)

    jobs = Jobs(gateway)
    async with running(relay):
        await jobs.ends(await jobs.enqueue_many(300))
    assert relay.metrics.heartbeats == 0


@pytest.mark.invariant("I3")
@pytest.mark.case("C18")
async def test_a_lost_lease_cancels_the_handler_and_nothing_more_is_written(
    database: TestDatabase, gateway: Any, worker: Any, admin: Any
) -> None:
    """I3, C18: whoever has the job now is not disturbed, by whatever the first holder still does."""
    relay = new_relay(database, lease_seconds=4.0, sweep_seconds=600.0, poll_seconds=600.0)
    handler = Long()
    relay.fallback(handler)
    jobs = Jobs(gateway)
    job_id = await jobs.enqueue(max_attempts=2)
    async with running(relay):
        await eventually(lambda: handler.started)
        await admin.execute("set app.tenant_id = 'acme'")
        # Its time is over before the next heartbeat, and somebody takes it back.
        await admin.execute(
            "update relay.s2r_relay_dispatch_queue set lease_expires_at = clock_timestamp() - interval '1 s'"
        )
        repository = RelayDispatchRepository(worker, "acme")
        await worker.fetchval("select count(*) from relay.reclaim_lost('acme', 'erp', 10)")
        second = (await repository.claim("erp", claimed_by="another")).jobs[0]
        assert second.job_id == job_id
        await eventually(lambda: handler.cancelled == [job_id])
        await eventually(lambda: relay.health().in_hand == 0)
        assert (await jobs.get(job_id)).status is DispatchStatus.CLAIMED
        assert await repository.complete(job_id, "erp", second.fence, "another", response_body=b"second") == 1
    assert (await jobs.get(job_id)).response_body == b"second"
    assert relay.metrics.jobs_lost == 1


@pytest.mark.case("C17")
@pytest.mark.parametrize("how", ["blocks", "computes"])
async def test_a_handler_that_starves_the_event_loop_has_its_late_completion_refused(
    database: TestDatabase, gateway: Any, worker: Any, admin: Any, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """C17, as decided: the second run is allowed, the first one's completion is refused, and its relay is told.

    The late wake-up renews no lease, neither the one that was lost nor the one that another has now, and there is no
    false success.
    """
    relay = new_relay(database, lease_seconds=0.5, sweep_seconds=600.0, poll_seconds=600.0)
    taken_over = threading.Event()
    second: list[DispatchJob] = []
    leases: list[Any] = []

    async def lease_of_the_job(observer: Any) -> Any:
        await observer.execute("set app.tenant_id = 'acme'")
        return await observer.fetchval(
            "select lease_expires_at from relay.s2r_relay_dispatch_queue where state = 'claimed'"
        )

    def take_over() -> None:
        async def another_relay() -> None:
            connection = await asyncpg.connect(database.worker_dsn)
            repository = RelayDispatchRepository(connection, "acme")
            await eventually(lambda: repository.reclaim("erp", lease_seconds=0.5), interval=0.05)
            second.extend((await repository.claim("erp", claimed_by="another", lease_seconds=60.0)).jobs)
            await connection.close()
            observer = await asyncpg.connect(database.admin_dsn)
            leases.append(await lease_of_the_job(observer))
            await observer.close()

        try:
            asyncio.run(another_relay())
        finally:
            taken_over.set()

    @relay.fallback
    async def handler(job: DispatchJob) -> Reply:
        threading.Thread(target=take_over).start()
        # The whole event loop stands still, more than four leases long as a rule.
        if how == "blocks":
            taken_over.wait(20)
        else:
            while not taken_over.is_set():
                sum(range(1000))
        return Reply(b"first")

    jobs = Jobs(gateway)
    job_id = await jobs.enqueue(max_attempts=2)
    async with running(relay):
        await eventually(lambda: relay.metrics.jobs_lost == 1)
        await eventually(lambda: relay.health().in_hand == 0)
        assert leases == [await lease_of_the_job(admin)]
        assert leases[0] is not None
        assert relay.metrics.leases_renewed == 0
        assert (await jobs.get(job_id)).status is DispatchStatus.CLAIMED
        repository = RelayDispatchRepository(worker, "acme")
        assert await repository.complete(job_id, "erp", second[0].fence, "another", response_body=b"second") == 1
    result = await jobs.get(job_id)
    assert (result.status, result.response_body, result.attempt) == (SUCCEEDED, b"second", 2)
    assert relay.metrics.jobs_succeeded == 0
    assert "was refused" in caplog.text


@pytest.mark.case("C15")
async def test_a_sweep_never_overwrites_a_job_that_has_just_finished(database: TestDatabase, gateway: Any) -> None:
    """C15: leases shorter than the handlers' luck, sweeps all the time; each job ends once and says one thing."""
    relays = [
        new_relay(database, lease_seconds=0.3, heartbeat_seconds=0.15, sweep_seconds=0.02, concurrency=20)
        for _ in range(2)
    ]
    completions: list[Any] = []
    for relay in relays:

        @relay.fallback
        async def handler(job: DispatchJob) -> Reply:
            await asyncio.sleep(0.01)
            if job.job_id.int % 10 == 0 and job.attempt == 1:
                time.sleep(0.35)  # noqa: ASYNC251  starves the loop on purpose, so that leases run out
            completions.append(job.job_id)
            return Reply(str(job.attempt))

    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(120, max_attempts=50, ttl=60)
    async with running(*relays):
        results = await jobs.ends(ids, timeout=50)
    assert {result.status for result in results} == {SUCCEEDED}
    # Whose completion was applied is what the attempt in the row says, and the body says it too.
    assert all(result.response_body == str(result.attempt).encode() for result in results)
    assert sum(relay.metrics.jobs_succeeded for relay in relays) == len(ids)


# --- deadlines -------------------------------------------------------------------------------------------------------


async def test_a_handler_is_cancelled_at_the_deadline_and_its_job_is_expired(
    database: TestDatabase, gateway: Any
) -> None:
    relay = new_relay(database, sweep_seconds=600.0)
    handler = Long()
    relay.fallback(handler)
    jobs = Jobs(gateway)
    job_id = await jobs.enqueue(ttl=1.5, max_attempts=5)
    async with running(relay):
        result = await jobs.end(job_id)
    assert (result.status, result.error_code, result.attempt) == (EXPIRED, "S2R-EXPIRED", 1)
    assert result.completed_at is not None
    assert result.completed_at >= result.expires_at
    assert handler.cancelled == [job_id]
    assert (relay.metrics.jobs_expired, relay.metrics.jobs_failed) == (1, 0)


async def test_a_job_past_its_deadline_is_never_given_to_a_handler(database: TestDatabase, gateway: Any) -> None:
    """Neither one that was late when it was claimed, nor one that got late while it waited for its turn."""
    relay = new_relay(database, sweep_seconds=600.0)
    handler = Long()
    relay.handler("Do", concurrency=1)(handler)
    jobs = Jobs(gateway)
    late = await jobs.enqueue(ttl=0.05)
    await eventually(lambda: _is_over(jobs, late))
    first = await jobs.enqueue()
    waiting = await jobs.enqueue(ttl=1.0)
    async with running(relay):
        assert (await jobs.end(late)).status is EXPIRED
        assert (await jobs.end(waiting)).status is EXPIRED
        handler.go_on.set()
        assert (await jobs.end(first)).status is SUCCEEDED
    assert handler.started == [first]
    assert relay.metrics.jobs_expired == 2


async def _is_over(jobs: Jobs, job_id: Any) -> bool:
    return (await jobs.get(job_id)).status is EXPIRED


async def test_a_result_that_comes_after_the_deadline_is_refused(database: TestDatabase, gateway: Any) -> None:
    relay = new_relay(database, sweep_seconds=600.0)

    @relay.fallback
    async def handler(job: DispatchJob) -> Reply:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return Reply(b"too late")
        return Reply()

    jobs = Jobs(gateway)
    job_id = await jobs.enqueue(ttl=0.5)
    async with running(relay):
        result = await jobs.end(job_id)
    assert (result.status, result.response_body) == (EXPIRED, None)


@pytest.mark.case("C22")
async def test_a_lease_is_counted_from_the_claim_and_not_from_its_transactions_start(
    database: TestDatabase, worker: Any, gateway: Any
) -> None:
    """C22: a heartbeat in a transaction that began long ago grants a whole lease from now."""
    jobs = Jobs(gateway)
    await jobs.enqueue()
    repository = RelayDispatchRepository(worker, "acme")
    async with worker.transaction():
        await worker.fetchval("select pg_sleep(0.5)")
        job = (await repository.claim("erp", claimed_by="i", lease_seconds=0.4)).jobs[0]
        await worker.fetchval("select pg_sleep(0.3)")
        outcomes = await repository.heartbeat(
            "erp", [("acme", job.job_id, job.fence)], claimed_by="i", lease_seconds=0.4
        )
    assert outcomes == [WriteOutcome.APPLIED]
    assert await repository.reclaim("erp", lease_seconds=0.2) == []
    assert await repository.complete(job.job_id, "erp", job.fence, "i") == 1


# --- withdrawn by the gateway ----------------------------------------------------------------------------------------


async def _ring_cancel(connection: Any, job_id: Any) -> None:
    await connection.fetchval(
        "select relay.ring(array['cancel'], array['acme'], array['erp'], array[$1::text])", job_id.hex
    )


@pytest.mark.case("C24")
@pytest.mark.parametrize("ring", [True, False], ids=["with a ring", "without"])
async def test_a_withdrawn_job_has_its_handler_cancelled(database: TestDatabase, gateway: Any, ring: bool) -> None:
    """C24: at once by a ring; without one by the next heartbeat."""
    relay = new_relay(database, lease_seconds=30.0 if ring else 1.5, poll_seconds=600.0)
    handler = Long()
    relay.fallback(handler)
    jobs = Jobs(gateway)
    job_id = await jobs.enqueue()
    async with running(relay):
        await eventually(lambda: handler.started)
        assert await jobs.repository.mark_expired(job_id) == 1
        if ring:
            await _ring_cancel(gateway, job_id)
        await eventually(lambda: handler.cancelled == [job_id], timeout=2)
        await eventually(lambda: relay.health().in_hand == 0)
    assert (await jobs.get(job_id)).status is EXPIRED
    assert relay.metrics.jobs_lost == 1


@pytest.mark.case("C24")
async def test_a_withdrawal_is_heard_at_every_point_of_a_jobs_life(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C24: pending, claimed and not started, between handler end and completion, after; it says what it really did."""
    relay = new_relay(database, concurrency=10)
    handler = Long()
    relay.handler("Do", concurrency=1)(handler)
    jobs = Jobs(gateway)

    pending = await jobs.enqueue(delay=100)
    assert await jobs.repository.mark_expired(pending) == 1

    complete_many = RelayDispatchRepository.complete_many
    at_the_door, open_door = asyncio.Event(), asyncio.Event()

    async def slow_completion(self: Any, *args: Any, **options: Any) -> Any:
        at_the_door.set()
        await open_door.wait()
        return await complete_many(self, *args, **options)

    monkeypatch.setattr(RelayDispatchRepository, "complete_many", slow_completion)
    ids = await jobs.enqueue_many(2)
    async with running(relay):
        await eventually(lambda: handler.started and relay.health().in_hand == 2)
        assert await jobs.repository.mark_expired(ids[1]) == 1  # claimed, waits for its turn
        await _ring_cancel(gateway, ids[1])
        await eventually(lambda: relay.health().in_hand == 1)
        handler.go_on.set()
        await at_the_door.wait()
        assert await jobs.repository.mark_expired(ids[0]) == 1  # its handler is done, its completion on the way
        open_door.set()
        await eventually(lambda: relay.health().in_hand == 0)
        after = await jobs.enqueue()
        assert (await jobs.end(after)).status is SUCCEEDED
        assert await jobs.repository.mark_expired(after) == 0
    assert handler.started == [ids[0], after]
    assert [(await jobs.get(job_id)).status for job_id in (pending, *ids, after)] == [EXPIRED] * 3 + [SUCCEEDED]


# --- nothing is held while a handler runs ----------------------------------------------------------------------------


@pytest.mark.case("C14")
@pytest.mark.invariant("I7")
async def test_no_connection_or_transaction_is_held_while_handlers_run(
    database: TestDatabase, gateway: Any, admin: Any
) -> None:
    """I7: many more handlers than connections, and every session of the relay is idle outside any transaction."""
    relay = new_relay(database, lease_seconds=30.0, poll_seconds=600.0, sweep_seconds=600.0)
    handler = Long()
    relay.fallback(handler)
    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(50)
    async with running(relay):
        await eventually(lambda: len(handler.started) == 50)

        async def all_idle() -> bool:
            ours = [row for row in await backends(admin) if row["usename"] == "relay_worker_login"]
            assert 1 < len(ours) <= 11
            return {(row["state"], row["xact_start"]) for row in ours} == {("idle", None)}

        await eventually(all_idle)
        handler.go_on.set()
        await jobs.ends(ids)


async def test_a_result_is_rung_for(database: TestDatabase, gateway: Any) -> None:
    """Also one that a sweep or a claim has brought about."""
    relay = new_relay(database)

    @relay.fallback
    async def handler(job: DispatchJob) -> None: ...

    jobs = Jobs(gateway)
    listening = await asyncpg.connect(database.gateway_dsn)
    heard: set[str] = set()
    channel = await RelayDispatchRepository(listening, "acme").channel("result")
    await listening.add_listener(channel, lambda *args: heard.update(args[3].split(",")))
    late = await jobs.enqueue(ttl=0.05)
    await eventually(lambda: _is_over(jobs, late))
    other_late = await RelayDispatchRepository(gateway, "acme").enqueue("erp", "Do", ttl=0.1, delay=0.01)
    ids = [late, other_late, await jobs.enqueue(), await jobs.enqueue("Unknown")]
    async with running(relay):
        await eventually(lambda: heard == {job_id.hex for job_id in ids})
    await listening.close()
