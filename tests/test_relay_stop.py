"""How a relay stops (I9, C30): by signal, call, cancellation, or a fault of its own; with the database there or not."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from functools import partial
from typing import Any
from uuid import UUID

import anyio
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import DatabaseUnavailableError, TenancyDeniedError
from dispatch_core.models import DispatchStatus
from relay_sdk import DispatchJob, Reply, course
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually
from tests.support.patience import still
from tests.support.proxy import TcpProxy
from tests.support.relay_process import relay_process
from tests.support.relays import Jobs, new_relay, running

SUCCEEDED, FAILED, PENDING = DispatchStatus.SUCCEEDED, DispatchStatus.FAILED, DispatchStatus.PENDING

pytestmark = [pytest.mark.invariant("I9"), pytest.mark.case("C30")]

FAR: dict[str, Any] = {"lease_seconds": 60.0, "sweep_seconds": 600.0}
"""Leases that outlast the test: what is free again was given back."""


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
async def test_sigterm_lets_handlers_finish_within_the_grace(
    database: TestDatabase, gateway: Any, uvloop: bool
) -> None:
    jobs = Jobs(gateway)
    async with relay_process(database.worker_dsn, uvloop=uvloop, grace_seconds=10.0, **FAR) as relay:
        ids = await jobs.enqueue_many(5, "Sleep", body=b"1")
        await eventually(lambda: len(relay.started()) == 5)
        relay.signal(signal.SIGTERM)
        late = await jobs.enqueue("Quick")
        await jobs.ring()
        assert await relay.exit() == 0
    assert {(await jobs.get(job_id)).status for job_id in ids} == {SUCCEEDED}
    assert (await jobs.get(late)).status is PENDING, "it was claimed after the signal"


async def test_after_the_grace_what_may_run_again_is_free_at_once_and_the_rest_has_failed(
    database: TestDatabase, gateway: Any
) -> None:
    """Started with attempts left, started without, and not started: each goes its own way, long before the lease."""
    jobs = Jobs(gateway)
    async with relay_process(database.worker_dsn, grace_seconds=0.5, **FAR) as relay:
        again = await jobs.enqueue_many(3, "Sleep", body=b"600", max_attempts=2)
        once = await jobs.enqueue_many(2, "Sleep", body=b"600")
        await eventually(lambda: len(relay.started()) == 5, 30)
        first = await jobs.enqueue("One", body=b"600", max_attempts=2)
        await eventually(lambda: len(relay.started()) == 6, 30)
        waiting = await jobs.enqueue("One", body=b"0")
        await eventually(lambda: _claimed(jobs, waiting), 30)
        began = still(relay.process.pid)
        relay.signal(signal.SIGTERM)
        assert await relay.exit() == 0
        assert relay.ended_at - began < 0.5 + 3
    results = [await jobs.get(job_id) for job_id in (*again, first)]
    assert {(result.status, result.attempt) for result in results} == {(PENDING, 1)}
    results = [await jobs.get(job_id) for job_id in once]
    assert {(result.status, result.error_code) for result in results} == {(FAILED, "S2R-RELAY-STOPPED")}
    assert (await jobs.get(waiting)).attempt == 0, "its attempt was not given back"


async def test_a_second_sigterm_ends_the_grace_and_still_gives_back(database: TestDatabase, gateway: Any) -> None:
    """At the first one nothing is given back but what had not begun."""
    jobs = Jobs(gateway)
    async with relay_process(database.worker_dsn, grace_seconds=600.0, **FAR) as relay:
        # One at work and one that waits for its turn; a third would be sent away, and be seen in hand by luck alone.
        again = await jobs.enqueue_many(2, "One", body=b"600", max_attempts=2)
        once = await jobs.enqueue("Sleep", body=b"600")
        await eventually(lambda: len(relay.started()) == 2, 30)
        for job_id in again:
            await eventually(partial(_claimed, jobs, job_id), 30)
        relay.signal(signal.SIGTERM)
        await eventually(lambda: "handlers of jobs get 600 s" in relay.log, 30)
        for job_id in again:
            if job_id.hex not in [UUID(text).hex for text in relay.started()]:
                await eventually(partial(_is, jobs, job_id, PENDING), 30)
        assert await _claimed(jobs, once)
        began = still(relay.process.pid)
        relay.signal(signal.SIGTERM)
        assert await relay.exit() == 0
        assert relay.ended_at - began < 3
    assert {(await jobs.get(job_id)).status for job_id in again} == {PENDING}
    assert (await jobs.get(once)).error_code == "S2R-RELAY-STOPPED"


@pytest.mark.parametrize("operation", ["Thread", "Stubborn"])
async def test_a_handler_that_cannot_be_cancelled_does_not_keep_the_process(
    database: TestDatabase, gateway: Any, operation: str
) -> None:
    jobs = Jobs(gateway)
    async with relay_process(database.worker_dsn, grace_seconds=0.2, **FAR) as relay:
        once = await jobs.enqueue(operation, body=b"600")
        again = await jobs.enqueue(operation, body=b"600", max_attempts=2)
        await jobs.ring()
        await eventually(lambda: len(relay.started()) == 2, 30)
        relay.signal(signal.SIGTERM)
        assert await relay.exit() == 0
    assert (await jobs.get(once)).error_code == "S2R-RELAY-STOPPED"
    assert (await jobs.get(again)).status is PENDING
    assert "handlers behind that do not end" in relay.log


async def test_sigterm_while_it_starts_up_ends_it(database: TestDatabase) -> None:
    async with TcpProxy.before(database.worker_dsn) as proxy:
        proxy.mode = "black_hole"
        async with relay_process(proxy.dsn(database.worker_dsn), ready=False) as relay:
            await eventually(lambda: proxy.accepted, timeout=30)
            began = still(relay.process.pid)
            relay.signal(signal.SIGTERM)
            assert await relay.exit() == 0
            assert relay.ended_at - began < 3


@pytest.mark.parametrize("mode", ["reset", "black_hole"])
async def test_sigterm_while_the_database_is_away_still_ends_in_time(
    database: TestDatabase, gateway: Any, mode: Any
) -> None:
    jobs = Jobs(gateway)
    async with (
        TcpProxy.before(database.worker_dsn) as proxy,
        relay_process(proxy.dsn(database.worker_dsn), grace_seconds=1.0, **FAR) as relay,
    ):
        await jobs.enqueue_many(3, "Sleep", body=b"30", max_attempts=2)
        await jobs.enqueue("Sleep", body=b"0.3")
        await eventually(lambda: len(relay.started()) == 4, 30)
        proxy.mode = mode
        await eventually(lambda: any(line.startswith("ended") for line in relay.lines), 30)
        began = still(relay.process.pid)
        relay.signal(signal.SIGTERM)
        assert await relay.exit() == 0
        assert relay.ended_at - began < 1.0 + 3.0
    assert "jobs to their leases" in relay.log


@pytest.mark.case("C29")
@pytest.mark.parametrize("max_attempts", [1, 2])
async def test_system_exit_of_a_handler_ends_the_relay_after_its_jobs_are_given_back(
    database: TestDatabase, gateway: Any, max_attempts: int
) -> None:
    jobs = Jobs(gateway)
    async with relay_process(database.worker_dsn, **FAR) as relay:
        other = await jobs.enqueue("Sleep", body=b"30", max_attempts=2)
        await eventually(lambda: relay.started())
        exits = await jobs.enqueue("Exit", max_attempts=max_attempts)
        await jobs.ring()
        assert await relay.exit() == 3
    assert (await jobs.get(other)).status is PENDING
    result = await jobs.get(exits)
    assert result.status is (FAILED if max_attempts == 1 else PENDING)
    assert result.error_code == ("S2R-RELAY-STOPPED" if max_attempts == 1 else None)


# --- in a process of somebody else's ---------------------------------------------------------------------------------


async def test_no_signal_handler_is_installed_unless_asked_for(database: TestDatabase) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    relay = new_relay(database)
    relay.fallback(_nothing)
    async with running(relay):
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("how", ["asyncio", "anyio"])
async def test_a_cancelled_run_gives_its_jobs_back_and_is_cancelled(
    database: TestDatabase, gateway: Any, how: str
) -> None:
    relay = new_relay(database, **FAR)
    started: list[Any] = []

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        started.append(job.job_id)
        await asyncio.sleep(30)

    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(3, max_attempts=2)
    once = await jobs.enqueue()
    if how == "asyncio":
        task = asyncio.create_task(relay.run())
        await eventually(lambda: len(started) == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        async with anyio.create_task_group() as group:
            group.start_soon(relay.run)
            await eventually(lambda: len(started) == 4)
            group.cancel_scope.cancel()
    assert {(await jobs.get(job_id)).status for job_id in ids} == {PENDING}
    assert (await jobs.get(once)).error_code == "S2R-RELAY-STOPPED"
    assert relay.health().status == "stopped"


async def test_a_relay_can_run_again_as_another_instance(database: TestDatabase, gateway: Any) -> None:
    relay = new_relay(database)
    relay.fallback(_nothing)
    jobs = Jobs(gateway)
    seen: list[Any] = []
    for _ in range(2):
        async with running(relay):
            seen.append(relay.instance_id)
            assert (await jobs.end(await jobs.enqueue())).status is SUCCEEDED
    assert seen[0] != seen[1]
    assert relay.metrics.jobs_succeeded == 2


async def test_a_stop_that_comes_before_the_run_is_not_lost(database: TestDatabase, gateway: Any) -> None:
    """A task that is to run a relay may not have had its turn when a signal comes."""
    jobs, relay = Jobs(gateway), new_relay(database)

    @relay.handler("Do")
    async def do(job: DispatchJob) -> None: ...

    job_id = await jobs.enqueue(ttl=600)
    run = asyncio.create_task(relay.run())
    relay.stop()
    with anyio.fail_after(HANGS):
        await run
    assert (await jobs.status(job_id), relay.health().status) == (PENDING, "stopped")
    # It was for that run alone; and one that comes after a run that has ended well is for none.
    relay.stop()
    async with running(relay):
        assert (await jobs.end(job_id)).status is SUCCEEDED


async def test_a_stop_between_a_run_that_failed_and_the_next_is_not_lost(
    database: TestDatabase, unused_tcp_port: int
) -> None:
    """Whoever runs a relay again after each fault would do so for ever."""
    relay = new_relay(f"postgresql://nobody@127.0.0.1:{unused_tcp_port}/nowhere")

    @relay.handler("Do")
    async def do(job: DispatchJob) -> None: ...

    with pytest.raises(DatabaseUnavailableError):
        await relay.run()
    relay.stop()
    with anyio.fail_after(HANGS):
        await relay.run()
    with pytest.raises(DatabaseUnavailableError):
        await relay.run()


@pytest.mark.parametrize("kind", ["async def", "def", "group"])
async def test_keyboard_interrupt_of_a_handler_is_raised_by_run(
    database: TestDatabase, gateway: Any, kind: str
) -> None:
    relay = new_relay(database, **FAR)

    def fails(job: DispatchJob) -> None:
        if kind == "group":
            raise BaseExceptionGroup("children", [ValueError("a"), KeyboardInterrupt()])
        raise KeyboardInterrupt

    async def fails_too(job: DispatchJob) -> None:
        fails(job)

    relay.fallback(fails if kind == "def" else fails_too)
    jobs = Jobs(gateway)
    job_id = await jobs.enqueue(max_attempts=2)
    raised: list[BaseException] = []

    async def run() -> None:
        try:
            await relay.run()
        except BaseException as error:  # noqa: BLE001  asyncio itself would leave the event loop with it
            raised.append(error)

    task = asyncio.create_task(run())
    await task
    assert len(raised) == 1
    assert isinstance(raised[0], BaseExceptionGroup if kind == "group" else KeyboardInterrupt)
    assert (await jobs.get(job_id)).status is PENDING


@pytest.mark.case("C29")
async def test_an_answer_in_spite_of_the_cancellation_counts(database: TestDatabase, gateway: Any) -> None:
    """C29: finished work is not thrown away because the relay stops."""
    relay = new_relay(database, **FAR)
    started = asyncio.Event()

    @relay.fallback
    async def handler(job: DispatchJob) -> Reply:
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return Reply(b"just in time")
        return Reply()

    jobs = Jobs(gateway)
    job_id = await jobs.enqueue()
    async with running(relay, grace_seconds=0.0):
        await started.wait()
    result = await jobs.get(job_id)
    assert (result.status, result.response_body) == (SUCCEEDED, b"just in time")


async def test_a_claim_under_way_when_the_stop_comes_is_given_back(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = RelayDispatchRepository.claim
    claimed, go_on = asyncio.Event(), asyncio.Event()
    ran: list[Any] = []

    async def slow(self: Any, *args: Any, **options: Any) -> Any:
        answer = await claim(self, *args, **options)
        if answer.jobs:
            claimed.set()
            await go_on.wait()
        return answer

    monkeypatch.setattr(RelayDispatchRepository, "claim", slow)
    relay = new_relay(database, **FAR)

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        ran.append(job.job_id)

    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(3)
    async with running(relay):
        await claimed.wait()
        relay.stop()
        go_on.set()
    assert [((await jobs.get(i)).status, (await jobs.get(i)).attempt) for i in ids] == [(PENDING, 0)] * 3
    assert ran == []


async def test_what_waits_for_its_large_body_when_the_stop_comes_is_given_back_at_once(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching: list[Any] = []

    async def hangs(self: Any, job: Any, **options: Any) -> bool:
        fetching.append(job.job_id)
        await asyncio.sleep(60)
        return False

    monkeypatch.setattr(RelayDispatchRepository, "fetch_body", hangs)
    relay = new_relay(database, claim_body_limit_bytes=10, **FAR)
    started, go_on = asyncio.Event(), asyncio.Event()

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        started.set()
        await go_on.wait()

    jobs = Jobs(gateway)
    large = await jobs.enqueue_many(6, body=b"x" * 11)  # more than are fetched at once
    small = await jobs.enqueue()
    async with running(relay, grace_seconds=60.0):
        await started.wait()
        await eventually(lambda: len(fetching) >= 4)
        relay.stop()
        for job_id in large:
            await eventually(partial(_is, jobs, job_id, PENDING), timeout=3)
            assert (await jobs.get(job_id)).attempt == 0, "its attempt was not given back"
        assert await _claimed(jobs, small)
        go_on.set()
    assert (await jobs.get(small)).status is SUCCEEDED


async def test_a_claim_that_hangs_when_the_grace_is_over_is_asked_for_and_given_back(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = RelayDispatchRepository.claim
    claimed = asyncio.Event()

    async def hangs(self: Any, *args: Any, **options: Any) -> Any:
        answer = await claim(self, *args, **options)
        if answer.jobs:
            claimed.set()
            await asyncio.sleep(30)
        return answer

    monkeypatch.setattr(RelayDispatchRepository, "claim", hangs)
    relay = new_relay(database, **FAR)
    relay.fallback(_nothing)
    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(3)
    async with running(relay, grace_seconds=0.1):
        await claimed.wait()
    assert [((await jobs.get(i)).status, (await jobs.get(i)).attempt) for i in ids] == [(PENDING, 0)] * 3


async def test_a_handler_that_refuses_to_end_does_not_keep_others_from_being_woken(
    database: TestDatabase, gateway: Any
) -> None:
    """Nothing is wrong with the connections, so what is given back of it is rung for: nobody has to poll for it."""
    far: dict[str, Any] = {**FAR, "poll_seconds": 60.0}
    first, second = new_relay(database, **far), new_relay(database, **far)
    started, goes_on = asyncio.Event(), asyncio.Event()

    @first.fallback
    async def stubborn(job: DispatchJob) -> None:
        started.set()
        while not goes_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await goes_on.wait()

    second.fallback(_nothing)
    jobs = Jobs(gateway)
    async with running(first, grace_seconds=0.0) as run:
        job_id = await jobs.enqueue(max_attempts=2)
        await jobs.ring()
        await started.wait()
        async with running(second):
            # Its first claim, and all that a poll or catching up could be the reason of, lie before the stop.
            await eventually(lambda: second.metrics.claims > 0 and second.health().listener == "listening")
            first.stop(grace_seconds=0.0)
            await run
            result = await jobs.end(job_id, timeout=5)
            goes_on.set()
    assert (result.status, result.attempt) == (SUCCEEDED, 2)
    assert second.metrics.wakeups_by_notify == 1


async def test_a_tenant_that_is_denied_does_not_keep_the_jobs_of_another_from_being_given_back(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = RelayDispatchRepository.release

    async def denies_one(self: Any, relay_id: str, claims: Any, **options: Any) -> Any:
        if any(tenant == "acme" for tenant, *_ in claims):
            raise TenancyDeniedError
        return await release(self, relay_id, claims, **options)

    monkeypatch.setattr(RelayDispatchRepository, "release", denies_one)
    relay = new_relay(database, tenants=["acme", "zeta"], **FAR)
    started: list[Any] = []
    goes_on = asyncio.Event()

    @relay.fallback
    async def stubborn(job: DispatchJob) -> None:
        started.append(job.job_id)
        while not goes_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await goes_on.wait()

    everybody = [Jobs(gateway), Jobs(gateway, "zeta")]
    denied, given_back = [await jobs.enqueue(max_attempts=2) for jobs in everybody]
    async with running(relay, grace_seconds=0.0):
        await eventually(lambda: len(started) == 2)
    goes_on.set()
    assert await everybody[0].status(denied) is DispatchStatus.CLAIMED
    assert await everybody[1].status(given_back) is PENDING
    assert "could not give back its jobs" in caplog.text
    assert "leaves 1 jobs to their leases" in caplog.text


async def test_what_is_given_back_is_rung_for_where_an_end_of_another_tenant_was_refused(
    database: TestDatabase, gateway: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That an end is not written says nothing of the connections: to cut them would lose the other tenant's wake-up."""
    complete_many = RelayDispatchRepository.complete_many
    refused = asyncio.Event()

    async def denies_one(self: Any, relay_id: str, completions: Any, **options: Any) -> Any:
        if any(completion.tenant_id == "acme" for completion in completions):
            refused.set()
            raise TenancyDeniedError
        return await complete_many(self, relay_id, completions, **options)

    monkeypatch.setattr(RelayDispatchRepository, "complete_many", denies_one)
    relay = new_relay(database, tenants=["acme", "zeta"], **FAR)
    started: list[Any] = []
    goes_on = asyncio.Event()

    @relay.fallback
    async def stubborn(job: DispatchJob) -> None:
        started.append(job.job_id)
        while job.tenant_id == "zeta" and not goes_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await goes_on.wait()

    await Jobs(gateway).enqueue()
    zeta = Jobs(gateway, "zeta")
    given_back = await zeta.enqueue(max_attempts=2)
    heard: list[str] = []
    async with running(relay, grace_seconds=0.0):
        await eventually(lambda: len(started) == 2)
        await refused.wait()
        await worker.add_listener(
            await worker.fetchval("select relay.channel('wake', 'zeta', 'erp')"), lambda *args: heard.append(args[3])
        )
    goes_on.set()
    assert await zeta.status(given_back) is PENDING
    await eventually(lambda: heard == [""])


async def test_what_a_lost_claim_has_taken_is_given_back_where_one_of_its_tenants_is_denied(
    database: TestDatabase, gateway: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, claim_again = RelayDispatchRepository.claim, RelayDispatchRepository.claim_again
    claims_hang = False
    asked: list[list[Any]] = []

    async def hangs(self: Any, *args: Any, **options: Any) -> Any:
        claimed = await claim(self, *args, **options)
        if claims_hang:
            await asyncio.Event().wait()
        return claimed

    async def denies_one(self: Any, *args: Any, **options: Any) -> Any:
        if claims_hang:
            asked.append(list(options["tenants"]))
            if "acme" in options["tenants"]:
                raise TenancyDeniedError
        return await claim_again(self, *args, **options)

    monkeypatch.setattr(RelayDispatchRepository, "claim", hangs)
    monkeypatch.setattr(RelayDispatchRepository, "claim_again", denies_one)
    relay = new_relay(database, tenants=["acme", "zeta"], **FAR)
    relay.fallback(_nothing)
    everybody = [Jobs(gateway), Jobs(gateway, "zeta")]
    heard: list[str] = []
    async with running(relay, grace_seconds=0.0):
        await eventually(lambda: relay.metrics.claims_empty)
        claims_hang = True
        ids = [await jobs.enqueue() for jobs in everybody]
        assert relay._session is not None
        relay._session._claimer.ring_all()

        async def both_are_claimed() -> bool:
            statuses = [await jobs.status(job_id) for jobs, job_id in zip(everybody, ids, strict=True)]
            return set(statuses) == {DispatchStatus.CLAIMED}

        await eventually(both_are_claimed)
        await worker.add_listener(
            await worker.fetchval("select relay.channel('wake', 'zeta', 'erp')"), lambda *args: heard.append(args[3])
        )
    assert asked == [["acme", "zeta"], ["acme"], ["zeta"]]
    assert await everybody[1].status(ids[1]) is PENDING
    assert await everybody[0].status(ids[0]) is DispatchStatus.CLAIMED
    await eventually(lambda: heard == [""])


async def test_a_piece_that_dies_takes_the_relay_down_with_its_cause(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What it gives back is one thing, and how long that may take another.
    monkeypatch.setattr(course, "_GIVE_BACK_SECONDS", HANGS)
    relay = new_relay(database, **FAR)
    started: list[Any] = []

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        started.append(job.job_id)
        await asyncio.sleep(30)

    jobs = Jobs(gateway)
    again, once = await jobs.enqueue(max_attempts=2), await jobs.enqueue()
    task = asyncio.create_task(relay.run())
    await eventually(lambda: len(started) == 2)
    session: Any = relay._session
    monkeypatch.setattr(session._heartbeat, "_renew", lambda slots: 1 // 0)
    session._heartbeat.ask([again])
    with pytest.raises(ZeroDivisionError):
        await task
    assert relay.health().status == "stopped"
    assert (await jobs.get(again)).status is PENDING
    assert (await jobs.get(once)).error_code == "S2R-RELAY-STOPPED"


async def _claimed(jobs: Jobs, job_id: Any) -> bool:
    return await jobs.status(job_id) is DispatchStatus.CLAIMED


async def _is(jobs: Jobs, job_id: Any, status: DispatchStatus) -> bool:
    return await jobs.status(job_id) is status


async def _nothing(job: DispatchJob) -> None: ...
