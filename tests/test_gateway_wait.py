"""Waiting: it ends at the result, the timeout or the deadline, whichever is first, and says which."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import (
    DatabaseUnavailableError,
    MalformedHeadersError,
    UnknownJobError,
    WaitTimeoutError,
)
from dispatch_core.models import Completion, DispatchJob
from gateway_sdk import DispatchRequest, DispatchResult, DispatchStatus
from gateway_sdk.channels import ResultChannels
from gateway_sdk.tenant import TenantClient
from tests.support.activity import pid_of
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually
from tests.support.gateway import Connection, PlayedRelay, open_client
from tests.support.proxy import TcpProxy

# Long enough that a test which depended on it would fail.
NEVER = 600.0


@pytest.fixture
def relay(worker: Connection) -> PlayedRelay:
    return PlayedRelay(worker, "acme", "erp")


async def claim_one(relay: PlayedRelay) -> DispatchJob:
    """Claim the next job as soon as there is one."""
    (job,) = await eventually(lambda: relay.claim(1))
    return job


# --- the result ---------------------------------------------------------------------------------------------------


async def test_a_wait_returns_the_result_when_it_is_pushed(database: TestDatabase, relay: PlayedRelay) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op", body=b"question")
        async with anyio.create_task_group() as group:
            results: list[DispatchResult] = []

            async def wait() -> None:
                results.append(await acme.wait(job_id, timeout=20))

            group.start_soon(wait)
            await eventually(lambda: client.health().channels == 1 and client.health().polled >= 2)
            job = await claim_one(relay)
            await relay.complete([job], response_status=201, response_headers={"a": ["b"]}, response_body=b"answer")
        (result,) = results
        health = client.health()
    assert (result.job_id, result.status, result.is_terminal) == (job_id, DispatchStatus.SUCCEEDED, True)
    assert (result.response_status, result.response_headers, result.response_body) == (201, {"a": ["b"]}, b"answer")
    assert result.attempt == 1
    assert result.created_at <= result.claimed_at <= result.completed_at <= result.expires_at  # type: ignore[operator]
    assert (health.wakes_by_push, health.wakes_by_poll, health.waiting) == (1, 0, 0)


async def test_a_failed_job_is_a_result_and_no_exception(database: TestDatabase, relay: PlayedRelay) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op")
        await relay.complete(
            [await claim_one(relay)], status="failed", error_code="NO_SUCH_INVOICE", error_message="none", ring=False
        )
        result = await acme.wait(job_id, timeout=20)
    assert (result.status, result.error_code, result.error_message) == (
        DispatchStatus.FAILED,
        "NO_SUCH_INVOICE",
        "none",
    )


@pytest.mark.case("C03")
async def test_a_result_that_was_there_before_the_wait_is_returned_at_once(
    database: TestDatabase, relay: PlayedRelay
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op")
        await relay.complete([await claim_one(relay)])
        with anyio.fail_after(HANGS):
            assert (await acme.wait(job_id)).status is DispatchStatus.SUCCEEDED


@pytest.mark.case("C03")
async def test_a_result_between_the_first_poll_and_the_listen_is_not_missed(
    database: TestDatabase, relay: PlayedRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The LISTEN of the tenant is held up until the job, found live by the first poll, has ended and rung unheard."""
    subscribe = ResultChannels._open
    go = anyio.Event()

    async def late(self: ResultChannels, tenant: str, channel: object) -> None:
        await go.wait()
        await subscribe(self, tenant, channel)  # type: ignore[arg-type]

    monkeypatch.setattr(ResultChannels, "_open", late)
    # Deaf, a young job would be polled soon: so with the polls beneath it out of the way.
    monkeypatch.setattr("gateway_sdk.waiter._YOUNG_SECONDS", NEVER)
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op")
        async with anyio.create_task_group() as group:
            results: list[DispatchResult] = []

            async def wait() -> None:
                results.append(await acme.wait(job_id, timeout=30))

            group.start_soon(wait)
            await eventually(lambda: client.health().polled == 1)
            await relay.complete([await claim_one(relay)])
            assert results == []
            go.set()
            with anyio.fail_after(HANGS):
                await eventually(lambda: results)
    assert results[0].status is DispatchStatus.SUCCEEDED


@pytest.mark.case("C03")
async def test_a_call_whose_tenant_is_first_listened_to_while_it_is_stored_misses_nothing(
    database: TestDatabase, relay: PlayedRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay is done, and has rung unheard, before the enqueue's reply is there; the LISTEN comes in between."""
    subscribe = ResultChannels._open
    listen, reply = anyio.Event(), anyio.Event()
    enqueue_rows = RelayDispatchRepository.enqueue_rows

    async def late_listen(self: ResultChannels, tenant: str, channel: object) -> None:
        await listen.wait()
        await subscribe(self, tenant, channel)  # type: ignore[arg-type]

    async def late_reply(self: RelayDispatchRepository, rows: list[object], **options: Any) -> list[bool]:
        stored = await enqueue_rows(self, rows, **options)  # type: ignore[arg-type]
        await reply.wait()
        return stored

    monkeypatch.setattr(ResultChannels, "_open", late_listen)
    monkeypatch.setattr(RelayDispatchRepository, "enqueue_rows", late_reply)
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        async with anyio.create_task_group() as group:
            results: list[DispatchResult] = []

            async def call() -> None:
                results.append(await acme.call("erp", "Op", timeout=30))

            group.start_soon(call)
            await relay.complete([await claim_one(relay)])
            listen.set()
            listener = client._runtime.listener  # type: ignore[union-attr]
            await eventually(lambda: listener is not None and len(listener._active) == 1)
            reply.set()
            with anyio.fail_after(HANGS):
                await eventually(lambda: results)
    assert results[0].status is DispatchStatus.SUCCEEDED


async def test_many_waits_for_one_job_share_its_polls_and_all_get_the_result(
    database: TestDatabase, relay: PlayedRelay
) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op")
        async with anyio.create_task_group() as group:
            results: list[DispatchResult] = []

            async def wait() -> None:
                results.append(await acme.wait(job_id, timeout=20))

            for _ in range(100):
                group.start_soon(wait)
            await eventually(lambda: client.health().polled > 0)
            await relay.complete([await claim_one(relay)])
        assert client.health().polled < 20
        assert client.health().waiting == 0
    assert len(results) == 100


async def test_two_thousand_calls_share_their_statements(database: TestDatabase, relay: PlayedRelay) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        # The first call of a tenant brings its channel; the relay then works in two bursts.
        warm = await acme.enqueue("erp", "Op")
        await relay.work()
        await acme.wait(warm)
        await eventually(lambda: client.health().channels == 1)
        before = client.health()
        results: list[DispatchResult] = []
        async with anyio.create_task_group() as group:

            async def call(n: int) -> None:
                results.append(await acme.call("erp", "Op", body=str(n), timeout=60))

            for n in range(2000):
                group.start_soon(call, n)
            await eventually(lambda: client.health().enqueued - before.enqueued == 2000, 30)
            assert client.health().waiting == 2000
            done = 0
            while done < 2000:
                done += len(await relay.work(1000))
        after = client.health()
        assert len(results) == 2000
        assert {result.response_body for result in results} == {str(n).encode() for n in range(2000)}
        assert after.enqueue_statements - before.enqueue_statements <= 20
        assert after.poll_statements - before.poll_statements <= 40
        assert after.wakes_by_push - before.wakes_by_push >= 1900
        assert after.waiting == 0


# --- unknown jobs -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("I4")
async def test_an_unknown_job_and_another_tenants_are_the_same_error(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        foreign = await client.tenant("globex").enqueue("erp", "Op")
        acme = client.tenant("acme")
        for job_id in (uuid4(), foreign):
            with pytest.raises(UnknownJobError) as caught, anyio.fail_after(HANGS):
                await acme.wait(job_id)
            assert caught.value.job_id == job_id
            assert str(caught.value) == f"no job {job_id} for this tenant"
            with pytest.raises(UnknownJobError):
                async for _ in acme.as_completed([job_id]):
                    pass
            assert await acme.poll_status(job_id) is None
            assert await acme.mark_expired(job_id) == 0
        assert await acme.poll_many([foreign]) == {}
        assert (await client.tenant("globex").poll_status(foreign)).status is DispatchStatus.PENDING  # type: ignore[union-attr]


async def test_malformed_headers_of_a_result_are_an_error_for_that_job_alone(
    database: TestDatabase, relay: PlayedRelay, admin: Connection
) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        good, bad = await acme.enqueue("erp", "Op"), await acme.enqueue("erp", "Op")
        await relay.complete(await relay.claim())
        await admin.execute(
            "update relay.s2r_relay_dispatch_result set response_headers = '[1]' where job_id = $1", bad
        )
        with pytest.raises(MalformedHeadersError) as caught:
            await acme.poll_status(bad)
        assert caught.value.job_id == bad
        with pytest.raises(MalformedHeadersError), anyio.fail_after(HANGS):
            await acme.wait(bad)
        both = await acme.poll_many([good, bad])
        assert isinstance(both[bad], MalformedHeadersError)
        assert isinstance(both[good], DispatchResult)
        together = await asyncio.gather(*(acme.poll_status(x) for x in (good, bad, good)), return_exceptions=True)
        assert [type(item) for item in together] == [DispatchResult, MalformedHeadersError, DispatchResult]


# --- the timeout --------------------------------------------------------------------------------------------------


@pytest.mark.invariant("I6")
async def test_a_timeout_ends_the_wait_and_not_the_job(database: TestDatabase, relay: PlayedRelay) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op")
        started = time.monotonic()
        with pytest.raises(WaitTimeoutError) as caught, anyio.fail_after(HANGS):
            await acme.wait(job_id, timeout=0.3)
        assert time.monotonic() - started >= 0.28
        assert (caught.value.job_id, caught.value.retryable) == (job_id, True)
        assert isinstance(caught.value, TimeoutError)
        assert client.health().waiting == 0
        await relay.work()
        assert (await acme.wait(job_id)).status is DispatchStatus.SUCCEEDED
        unfinished = await acme.enqueue("erp", "Op")
        with pytest.raises(WaitTimeoutError):
            await acme.wait(unfinished, timeout=0)
        with pytest.raises(WaitTimeoutError):
            await acme.wait(unfinished, timeout=timedelta(milliseconds=50))


async def test_a_timeout_of_zero_is_one_look(database: TestDatabase, relay: PlayedRelay) -> None:
    """Whoever else waits for the job, and whether or not its results are pushed; and on a dead line it is an error."""
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn), poll_interval_seconds=NEVER) as client,
    ):
        acme = client.tenant("acme")
        ended = await acme.enqueue("erp", "Op")
        await relay.work()
        late = await acme.enqueue("erp", "Op", ttl=0.01)
        await eventually(lambda: is_late(acme, late))
        live = await acme.enqueue("erp", "Op")
        async with anyio.create_task_group() as group:
            group.start_soon(acme.wait, live)
            await eventually(lambda: acme._runtime.channels.is_listening("acme"))
            assert (await acme.wait(ended, timeout=0)).status is DispatchStatus.SUCCEEDED
            assert [result.job_id async for result in acme.as_completed([ended], timeout=0)] == [ended]
            assert (await acme.wait(late, timeout=0)).completed_at is not None
            with pytest.raises(UnknownJobError):
                await acme.wait(uuid4(), timeout=0)
            with pytest.raises(WaitTimeoutError):
                await acme.wait(live, timeout=0)
            # It has ended, and nobody has rung for that.
            await relay.complete(await relay.claim(), ring=False)
            assert (await acme.wait(live, timeout=0)).status is DispatchStatus.SUCCEEDED
        proxy.mode = "black_hole"
        with pytest.raises(DatabaseUnavailableError), anyio.fail_after(HANGS):
            await acme.wait(ended, timeout=0)
        proxy.mode = "pass"


async def is_late(acme: TenantClient, job_id: UUID) -> bool:
    result = await acme.poll_status(job_id)
    return result is not None and result.status is DispatchStatus.EXPIRED


@pytest.mark.invariant("I6")
async def test_a_call_ends_at_its_timeout_and_a_longer_ttl_lets_the_job_go_on(
    database: TestDatabase, relay: PlayedRelay
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        started = time.monotonic()
        with pytest.raises(WaitTimeoutError) as caught, anyio.fail_after(HANGS):
            await acme.call("erp", "Op", timeout=0.3, ttl=300)
        assert time.monotonic() - started >= 0.28
        job_id = caught.value.job_id
        assert job_id is not None
        assert (await acme.poll_status(job_id)).status is DispatchStatus.PENDING  # type: ignore[union-attr]
        await relay.work()
        assert (await acme.wait(job_id)).status is DispatchStatus.SUCCEEDED


async def test_the_timeout_of_a_call_is_its_jobs_ttl(database: TestDatabase, relay: PlayedRelay) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        with pytest.raises(WaitTimeoutError) as caught:
            await acme.call("erp", "Op", timeout=0.5)
        assert caught.value.job_id is not None
        result = await acme.wait(caught.value.job_id, timeout=5)
    assert result.status is DispatchStatus.EXPIRED
    assert result.expires_at - result.created_at == timedelta(seconds=0.5)


async def test_a_call_that_is_cancelled_leaves_no_wait_behind(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op")
        with anyio.move_on_after(0.1):
            await acme.call("erp", "Op", timeout=60)
        with anyio.move_on_after(0.1):
            await acme.wait(job_id)
        with anyio.move_on_after(0.1):
            async for _ in acme.as_completed([job_id]):
                pass
        await eventually(lambda: client.health().waiting == 0)


# --- the deadline -------------------------------------------------------------------------------------------------


@pytest.mark.invariant("I6")
@pytest.mark.parametrize("timeout", [None, 60])
async def test_a_wait_that_reaches_the_deadline_stores_and_returns_expired(
    database: TestDatabase, admin: Connection, timeout: float | None
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        started = time.monotonic()
        job_id = await acme.enqueue("erp", "Op", ttl=0.5)
        with anyio.fail_after(HANGS):
            result = await acme.wait(job_id, timeout=timeout)
        assert time.monotonic() - started >= 0.4
    assert (result.status, result.error_code) == (DispatchStatus.EXPIRED, "S2R-EXPIRED")
    # Stored by the wait itself: there is no sweep here and no relay.
    assert result.completed_at is not None
    assert result.completed_at >= result.expires_at
    assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue") == 0


async def test_a_call_reaches_its_jobs_deadline_where_that_is_before_the_timeout(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        started = time.monotonic()
        with anyio.fail_after(HANGS):
            result = await client.tenant("acme").call("erp", "Op", timeout=60, ttl=1.0)
        assert time.monotonic() - started >= 1.0
    assert result.status is DispatchStatus.EXPIRED
    assert result.completed_at is not None


@pytest.mark.case("C24")
async def test_a_handler_at_work_is_told_when_a_wait_reaches_the_deadline(
    database: TestDatabase, relay: PlayedRelay, worker: Connection
) -> None:
    heard: list[str] = []
    channel = await relay.repository.channel("wake", "erp")
    await worker.add_listener(channel, lambda _c, _p, _ch, payload: heard.append(str(payload)))
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op", ttl=1.0)
        (job,) = await relay.claim()
        assert (await acme.wait(job_id)).status is DispatchStatus.EXPIRED
        await eventually(lambda: job_id.hex in heard)
        assert await relay.complete([job]) == ["stale"]
        assert (await acme.poll_status(job_id)).status is DispatchStatus.EXPIRED  # type: ignore[union-attr]


@pytest.mark.invariant("I6")
async def test_a_completion_in_flight_across_the_deadline_decides_for_polls_and_waits_alike(
    database: TestDatabase, relay: PlayedRelay, worker: Connection, admin: Connection
) -> None:
    """No poll ever says `expired` of a job that ends `succeeded`: those that come late wait for the completion."""
    async with open_client(database.gateway_dsn, poll_timeout_seconds=20, deadline_grace_seconds=20) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op", ttl=1.2)
        (job,) = await relay.claim()
        transaction = worker.transaction()
        await transaction.start()
        completion = Completion(job.job_id, job.fence, response_body=b"in time")
        (settled,) = await relay.repository.complete_many("erp", [completion], claimed_by=relay.instance)
        assert settled.status is DispatchStatus.SUCCEEDED
        polled: list[DispatchStatus] = []
        waited: list[DispatchStatus] = []
        async with anyio.create_task_group() as group:

            async def poll() -> None:
                while DispatchStatus.SUCCEEDED not in polled:
                    result = await acme.poll_status(job_id)
                    assert result is not None
                    polled.append(result.status)

            async def wait() -> None:
                waited.append((await acme.wait(job_id)).status)

            group.start_soon(poll)
            group.start_soon(wait)
            # Until the deadline polls say "claimed"; the first one after it waits behind the completion.
            blocked = "select count(*) from pg_stat_activity where $1 = any (pg_blocking_pids(pid))"
            await eventually(lambda: admin.fetchval(blocked, pid_of(worker)))
            assert await admin.fetchval("select expires_at <= clock_timestamp() from relay.s2r_relay_dispatch_queue")
            assert waited == []
            assert set(polled) == {DispatchStatus.CLAIMED}
            await transaction.commit()
    assert waited == [DispatchStatus.SUCCEEDED]
    assert set(polled) == {DispatchStatus.CLAIMED, DispatchStatus.SUCCEEDED}


@pytest.mark.slow
async def test_no_poll_ever_says_expired_of_a_job_that_ends_succeeded(
    database: TestDatabase, relay: PlayedRelay
) -> None:
    """Two hundred completions that race with their deadline, polled all the while."""
    async with open_client(database.gateway_dsn, poll_interval_seconds=0.05) as client:
        acme = client.tenant("acme")
        said_expired: set[UUID] = set()
        ended: dict[UUID, DispatchResult] = {}
        for _ in range(4):
            ids = await acme.enqueue_many([DispatchRequest("erp", "Op", ttl=0.4 + n * 0.002) for n in range(50)])
            # On a very slow machine, the first of them may be over by now.
            jobs = sorted(await relay.claim(50), key=lambda job: job.remaining())
            async with anyio.create_task_group() as group:

                async def poll(ids: list[UUID] = ids) -> None:
                    while not all(job_id in ended for job_id in ids):
                        for job_id, result in (await acme.poll_many(ids)).items():
                            assert isinstance(result, DispatchResult)
                            if result.status is DispatchStatus.EXPIRED:
                                said_expired.add(job_id)

                async def wait(job_id: UUID) -> None:
                    ended[job_id] = await acme.wait(job_id)

                group.start_soon(poll)
                for job_id in ids:
                    group.start_soon(wait, job_id)
                await anyio.sleep(max(0.0, jobs[0].remaining()) if jobs else 0)
                for job in jobs:
                    await relay.complete([job])
        statuses = {status: sum(result.status is status for result in ended.values()) for status in DispatchStatus}
        for job_id, result in ended.items():
            assert (job_id in said_expired) <= (result.status is DispatchStatus.EXPIRED)
            final = await acme.poll_status(job_id)
            assert final is not None
            assert final.status is result.status
    assert statuses[DispatchStatus.SUCCEEDED] + statuses[DispatchStatus.EXPIRED] == 200


async def test_a_skewed_wall_clock_of_the_client_matters_to_no_wait(
    database: TestDatabase, relay: PlayedRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6 under clock skew: a day ahead, then a day behind."""
    real = time.time
    for skew in (86400.0, -86400.0):
        monkeypatch.setattr(time, "time", lambda skew=skew: real() + skew)
        async with open_client(database.gateway_dsn) as client:
            acme = client.tenant("acme")
            started = time.monotonic()
            with anyio.fail_after(HANGS):
                assert (await acme.wait(await acme.enqueue("erp", "Op", ttl=0.3))).status is DispatchStatus.EXPIRED
            assert time.monotonic() - started >= 0.25
            job_id = await acme.enqueue("erp", "Op", ttl=60)
            await relay.work()
            assert (await acme.wait(job_id)).status is DispatchStatus.SUCCEEDED


# --- withdrawing --------------------------------------------------------------------------------------------------


@pytest.mark.case("C24")
async def test_mark_expired_says_what_it_did(database: TestDatabase, relay: PlayedRelay, worker: Connection) -> None:
    heard: list[str] = []
    await worker.add_listener(
        await relay.repository.channel("wake", "erp"), lambda _c, _p, _ch, payload: heard.append(str(payload))
    )
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        pending = await acme.enqueue("erp", "Op", notify=False)
        assert (await acme.mark_expired(pending), await acme.mark_expired(pending)) == (1, 0)
        assert await relay.claim() == []

        claimed = await acme.enqueue("erp", "Op", notify=False)
        (job,) = await relay.claim()
        assert await acme.mark_expired(claimed) == 1
        # Only the one that was at work is told of, by its id.
        await eventually(lambda: heard == [claimed.hex])
        assert await relay.complete([job]) == ["stale"]

        done = await acme.enqueue("erp", "Op", notify=False)
        await relay.work()
        assert await acme.mark_expired(done) == 0
        assert (await acme.wait(done)).status is DispatchStatus.SUCCEEDED

        late = await acme.enqueue("erp", "Op", ttl=0.05, notify=False)
        await eventually(lambda: reads_expired(acme, late))
        # Already called expired by a poll, and stored by this.
        assert (await acme.mark_expired(late), await acme.mark_expired(late)) == (1, 0)

        twice = await acme.enqueue("erp", "Op", notify=False)
        assert sorted(await asyncio.gather(acme.mark_expired(twice), acme.mark_expired(twice))) == [0, 1]


async def reads_expired(acme: object, job_id: UUID) -> bool:
    result = await acme.poll_status(job_id)  # type: ignore[attr-defined]
    return result is not None and result.status is DispatchStatus.EXPIRED


async def test_those_who_wait_learn_of_a_withdrawal_in_another_process(database: TestDatabase) -> None:
    async with (
        open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as one,
        open_client(database.gateway_dsn) as other,
    ):
        job_id = await one.tenant("acme").enqueue("erp", "Op")
        async with anyio.create_task_group() as group:
            results: list[DispatchResult] = []

            async def wait() -> None:
                results.append(await one.tenant("acme").wait(job_id, timeout=20))

            group.start_soon(wait)
            await eventually(lambda: one.health().polled >= 2)
            assert await other.tenant("acme").mark_expired(job_id) == 1
    (result,) = results
    assert (result.status, result.error_message) == (DispatchStatus.EXPIRED, "withdrawn before its deadline")


# --- as_completed -------------------------------------------------------------------------------------------------


async def test_as_completed_yields_results_in_the_order_in_which_jobs_end(
    database: TestDatabase, relay: PlayedRelay
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        ids = [await acme.enqueue("erp", "Op") for _ in range(4)]
        last = await acme.enqueue("erp", "Late", ttl=1)
        jobs = {job.job_id: job for job in await relay.claim(4)}
        results: AsyncIterator[DispatchResult] = acme.as_completed([*ids, last, ids[0]], timeout=20)
        seen = []
        for job_id in (ids[2], ids[0], ids[3], ids[1]):
            await relay.complete([jobs[job_id]])
            seen.append((await anext(results)).job_id)
        assert seen == [ids[2], ids[0], ids[3], ids[1]]
        expired = await anext(results)
        assert (expired.job_id, expired.status) == (last, DispatchStatus.EXPIRED)
        with pytest.raises(StopAsyncIteration):
            await anext(results)
        assert [result async for result in acme.as_completed([])] == []
        assert {result.job_id async for result in acme.as_completed(ids)} == set(ids)


async def test_as_completed_ends_at_its_timeout_and_keeps_no_wait(database: TestDatabase, relay: PlayedRelay) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        done, left = await acme.enqueue("erp", "Op"), await acme.enqueue("erp", "Op")
        await relay.complete(await relay.claim(1))
        results = acme.as_completed([done, left], timeout=0.4)
        assert (await anext(results)).job_id == done
        with pytest.raises(WaitTimeoutError) as caught:
            await anext(results)
        assert caught.value.job_id == left
        assert client.health().waiting == 0


# --- memory -------------------------------------------------------------------------------------------------------


async def test_nothing_is_kept_of_waits_and_tenants_that_are_over(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn, tenant_idle_seconds=0.1) as client:
        for n in range(30):
            acme = client.tenant(f"tenant {n}")
            job_id = await acme.enqueue("erp", "Op")
            with pytest.raises(WaitTimeoutError):
                await acme.wait(job_id, timeout=0.01)
        assert client.health().waiting == 0
        listener = client._runtime.listener  # type: ignore[union-attr]
        assert listener is not None
        await eventually(
            lambda: (client.health().tenants, client.health().channels, len(listener._active)) == (0, 0, 0)
        )
        with pytest.raises(WaitTimeoutError):
            await acme.wait(job_id, timeout=0.05)


async def test_above_the_limit_of_channels_the_rest_is_polled(
    database: TestDatabase, worker: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_client(database.gateway_dsn, max_channels=3) as client:
        ids = {name: await client.tenant(name).enqueue("erp", "Op") for name in "abcdef"}
        async with anyio.create_task_group() as group:
            results: list[DispatchResult] = []

            async def wait(name: str) -> None:
                results.append(await client.tenant(name).wait(ids[name], timeout=20))

            for name in ids:
                group.start_soon(wait, name)
            await eventually(lambda: client.health().channels == 3)
            for name in ids:
                assert len(await PlayedRelay(worker, name, "erp").work()) == 1
        assert len(results) == 6
    assert [record.message for record in caplog.records if "more than 3 tenants" in record.message] != []


async def test_a_wait_without_a_bound_of_its_own_does_not_outlive_an_unreachable_database(
    database: TestDatabase,
) -> None:
    async with open_client(database.gateway_dsn, connect_timeout_seconds=0.5) as client:
        client._runtime.database.terminate()  # type: ignore[union-attr]
        job_id = uuid4()
        with pytest.raises(DatabaseUnavailableError) as caught, anyio.fail_after(HANGS):
            await client.tenant("acme").wait(job_id)
        assert (caught.value.job_id, caught.value.retryable) == (job_id, True)
