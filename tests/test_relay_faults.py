"""Kills, cut connections, lost replies, an outage: no job is lost, run more often than allowed, or ended twice."""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial
from typing import Any

import anyio
import asyncpg
import pytest

from dispatch_core.dev.postgres import DevServer
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import ConnectionLostError, DatabaseError, RelayDispatchError, TenancyDeniedError
from dispatch_core.listener import Listener
from dispatch_core.models import DispatchStatus
from dispatch_core.settings import CoreSettings
from relay_sdk import DispatchJob, Relay, RelaySettings, Reply, Retry
from relay_sdk.claimer import Claimer
from tests.support.activity import backends
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.pooler import FakePooler
from tests.support.proxy import TcpProxy
from tests.support.relay_process import relay_process
from tests.support.relays import QUICK, Jobs, new_relay, running

SUCCEEDED, FAILED, CLAIMED = DispatchStatus.SUCCEEDED, DispatchStatus.FAILED, DispatchStatus.CLAIMED
FAR: dict[str, Any] = {"lease_seconds": 60.0, "sweep_seconds": 600.0}


async def _all(jobs: Jobs, ids: list[Any], status: DispatchStatus) -> bool:
    return all([await jobs.status(job_id) is status for job_id in ids])


# --- a process that dies ---------------------------------------------------------------------------------------------


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@pytest.mark.case("C18")
async def test_a_killed_relays_jobs_end_failed_or_are_done_by_another(database: TestDatabase, gateway: Any) -> None:
    """I1, I2: it held 50 claims; the 25 without an attempt left end S2R-LEASE-LOST, the others are done elsewhere."""
    jobs = Jobs(gateway)
    once = await jobs.enqueue_many(25, "Sleep", body=b"60")
    again = await jobs.enqueue_many(25, "Sleep", body=b"60", max_attempts=3)
    async with relay_process(database.worker_dsn) as victim:
        await eventually(lambda: len(victim.started()) == 50)
        victim.signal(signal.SIGKILL)
        await victim.exit(5)
    runs: list[Any] = []
    another = new_relay(database)

    @another.handler("Sleep")
    async def handler(job: DispatchJob) -> Reply:
        runs.append(job.job_id)
        return Reply(b"by another")

    async with running(another):
        results = await jobs.ends(once)
        assert {(result.status, result.error_code, result.attempt) for result in results} == {
            (FAILED, "S2R-LEASE-LOST", 1)
        }
        results = await jobs.ends(again)
    assert {(result.status, result.response_body, result.attempt) for result in results} == {
        (SUCCEEDED, b"by another", 2)
    }
    assert sorted(runs) == sorted(again)
    assert another.metrics.swept >= 25


@pytest.mark.case("C21")
async def test_a_job_that_kills_its_worker_is_not_retried_for_ever(database: TestDatabase, gateway: Any) -> None:
    """C21: attempts are counted in the claim. Three lives, and the innocent of the same process finish."""
    jobs = Jobs(gateway)
    pill = await jobs.enqueue("Die", max_attempts=3)
    innocent = await jobs.enqueue_many(9, "Sleep", body=b"0.05", max_attempts=10)
    lives = 0
    deadline = time.monotonic() + 60
    while not (await jobs.get(pill)).is_terminal:
        assert time.monotonic() < deadline
        async with relay_process(database.worker_dsn, ready=False, lease_seconds=1.0) as relay:
            process = relay.process
            ending = asyncio.create_task(process.wait())  # so that its exit code is noticed
            # Either it dies of the pill again, or its sweep finds that the pill has had its three attempts.
            await eventually(partial(_dead_or_done, process, jobs, pill), timeout=20)
            lives += process.returncode is not None
            ending.cancel()
    result = await jobs.get(pill)
    assert (result.status, result.error_code, result.attempt) == (FAILED, "S2R-LEASE-LOST", 3)
    assert lives == 3
    async with relay_process(database.worker_dsn, lease_seconds=1.0):
        assert {result.status for result in await jobs.ends(innocent, timeout=20)} == {SUCCEEDED}


async def _dead_or_done(process: asyncio.subprocess.Process, jobs: Jobs, job_id: Any) -> bool:
    return process.returncode is not None or (await jobs.get(job_id)).is_terminal


# --- replies that are lost -------------------------------------------------------------------------------------------


@pytest.mark.invariant("I2")
async def test_a_claim_whose_reply_was_lost_is_asked_for_and_its_jobs_run_once(
    database: TestDatabase, gateway: Any
) -> None:
    """I2: they had one attempt each, which that claim has used."""
    ran: list[Any] = []
    async with TcpProxy.before(database.worker_dsn, delay_seconds=0.4) as proxy:
        relay = new_relay(proxy.dsn(database.worker_dsn), listen_dsn=database.worker_dsn, poll_seconds=0.2, **FAR)

        @relay.fallback
        async def handler(job: DispatchJob) -> None:
            ran.append(job.job_id)

        jobs = Jobs(gateway)
        async with running(relay):
            await eventually(lambda: relay.metrics.claims)
            proxy.mode = "delay"
            ids = await jobs.enqueue_many(7)
            await eventually(lambda: _all(jobs, ids, CLAIMED), interval=0.002)
            # The claim is committed, and its reply is on its way through the proxy.
            proxy.mode = "pass"
            proxy.reset_all()
            results = await jobs.ends(ids)
        assert {(result.status, result.attempt) for result in results} == {(SUCCEEDED, 1)}
        assert sorted(ran) == sorted(ids)
        assert relay.metrics.claims_recovered == 1


@pytest.mark.invariant("I1")
async def test_a_claim_whose_reply_was_lost_in_an_outage_of_more_than_a_lease_is_asked_for_all_the_same(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: nobody takes its jobs back before a lease has passed after the outage, and they had one attempt."""
    settings: dict[str, Any] = {**FAR, "poll_seconds": 0.2, "lease_seconds": 0.5}
    late: list[float] = []
    ask_again = Claimer._ask_again

    async def spy(self: Claimer, now: float) -> None:
        waited = now - next(iter(self.lost)).sent_at
        await ask_again(self, now)
        late.extend([waited] if waited > settings["lease_seconds"] else [])

    monkeypatch.setattr(Claimer, "_ask_again", spy)
    async with TcpProxy.before(database.worker_dsn, delay_seconds=0.4) as proxy:
        relay = new_relay(proxy.dsn(database.worker_dsn), listen_dsn=database.worker_dsn, **settings)
        relay.fallback(_nothing)
        jobs = Jobs(gateway)
        async with running(relay):
            await eventually(lambda: relay.metrics.claims)
            proxy.mode = "delay"
            ids = await jobs.enqueue_many(7)
            await eventually(lambda: _all(jobs, ids, CLAIMED), interval=0.002)
            proxy.mode = "reset"
            proxy.reset_all()
            await eventually(lambda: late, message="asked for when the lease was over:")
            proxy.mode = "pass"
            results = await jobs.ends(ids)
        assert {(result.status, result.attempt) for result in results} == {(SUCCEEDED, 1)}
        assert relay.metrics.claims_recovered == 1


async def test_a_lost_claim_brings_the_jobs_of_the_other_tenants_where_one_is_denied(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, claim_again = RelayDispatchRepository.claim, RelayDispatchRepository.claim_again
    lose, deny = False, True
    asked: list[list[Any]] = []

    async def loses_the_reply(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal lose
        claimed = await claim(self, *args, **options)
        if lose:
            lose = False
            raise ConnectionLostError
        return claimed

    async def denies_one(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(list(options["tenants"]))
        if deny and "acme" in options["tenants"] and len(asked) > 1:  # the first is that of the start
            raise TenancyDeniedError
        return await claim_again(self, *args, **options)

    monkeypatch.setattr(RelayDispatchRepository, "claim", loses_the_reply)
    monkeypatch.setattr(RelayDispatchRepository, "claim_again", denies_one)
    relay = new_relay(database, tenants=["acme", "beta", "zeta"], **{**FAR, "poll_seconds": 600.0})
    relay.fallback(_nothing)
    everybody = [Jobs(gateway, tenant) for tenant in ("acme", "beta", "zeta")]
    async with running(relay):
        await eventually(lambda: relay.metrics.claims_empty)
        ids = [await jobs.enqueue() for jobs in everybody]
        lose = True
        assert relay._session is not None
        relay._session._claimer.ring_all()
        for jobs, job_id in list(zip(everybody, ids, strict=True))[1:]:
            assert (await jobs.end(job_id)).status is SUCCEEDED
        assert await everybody[0].status(ids[0]) is CLAIMED
        # The one that is denied is asked for again and again; on a slow machine before the last of the others.
        assert asked[1] == ["acme", "beta", "zeta"]
        assert [tenants for tenants in asked[2:] if tenants != ["acme"]] == [["beta"], ["zeta"]]
        assert ["acme"] in asked
        deny = False
        assert (await everybody[0].end(ids[0])).attempt == 1
    assert relay.metrics.claims_recovered == 3


async def test_a_completion_whose_reply_was_lost_is_sent_again_and_reads_repeated(
    database: TestDatabase, gateway: Any
) -> None:
    async with TcpProxy.before(database.worker_dsn, delay_seconds=0.4) as proxy:
        relay = new_relay(proxy.dsn(database.worker_dsn), listen_dsn=database.worker_dsn, poll_seconds=600.0, **FAR)
        started, go_on = asyncio.Event(), asyncio.Event()

        @relay.fallback
        async def handler(job: DispatchJob) -> Reply:
            started.set()
            await go_on.wait()
            return Reply(b"once")

        relay.handler("Warm")(_nothing)
        jobs = Jobs(gateway)
        async with running(relay):
            await _warmed(jobs)
            job_id = await jobs.enqueue()
            await jobs.ring()
            await started.wait()
            proxy.mode = "delay"
            go_on.set()
            await eventually(lambda: _all(jobs, [job_id], SUCCEEDED), interval=0.002)
            proxy.mode = "pass"
            proxy.reset_all()
            await eventually(lambda: relay.health().in_hand == 0)
        assert (await jobs.get(job_id)).response_body == b"once"
        assert (relay.metrics.completions_repeated, relay.metrics.jobs_succeeded, relay.metrics.jobs_lost) == (1, 2, 0)


async def test_a_retry_whose_reply_was_lost_harms_nothing(database: TestDatabase, gateway: Any) -> None:
    """The second try may read `stale`; the job runs again all the same, as often as it may."""
    async with TcpProxy.before(database.worker_dsn, delay_seconds=0.2) as proxy:
        relay = new_relay(proxy.dsn(database.worker_dsn), listen_dsn=database.worker_dsn, poll_seconds=600.0, **FAR)
        attempts: list[int] = []
        go_on = asyncio.Event()

        @relay.fallback
        async def handler(job: DispatchJob) -> Any:
            attempts.append(job.attempt)
            if job.attempt > 1:
                return Reply()
            await go_on.wait()
            return Retry(after=0)

        jobs = Jobs(gateway)
        async with running(relay):
            job_id = await jobs.enqueue(max_attempts=2)
            await jobs.ring()
            await eventually(lambda: attempts)
            proxy.mode = "delay"
            go_on.set()
            await eventually(lambda: _all(jobs, [job_id], DispatchStatus.PENDING), interval=0.002)
            proxy.mode = "pass"
            proxy.reset_all()
            assert (await jobs.end(job_id)).status is SUCCEEDED
        assert attempts == [1, 2]


async def _nothing(job: DispatchJob) -> None: ...


async def _warmed(jobs: Jobs) -> None:
    """Have a job done, so that connections are there and statements are known before the link is slow."""
    job_id = await jobs.enqueue("Warm")
    await jobs.ring()
    await jobs.end(job_id)


# --- the database goes away ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.invariant("I1")
async def test_jobs_whose_handler_ended_before_or_in_an_outage_are_never_lost_to_their_lease(
    durable_server: DevServer, durable_database: TestDatabase
) -> None:
    """An outage of more than a lease, under load, two relays: every accepted job ends once, none S2R-LEASE-LOST."""
    database = durable_database
    relays = [new_relay(database, lease_seconds=3.0, sweep_seconds=0.2, concurrency=50) for _ in range(2)]
    ended_in_outage: set[Any] = set()
    stopped = asyncio.Event()
    runs: dict[Any, int] = {}
    for relay in relays:

        @relay.fallback
        async def handler(job: DispatchJob) -> Reply:
            runs[job.job_id] = runs.get(job.job_id, 0) + 1
            await asyncio.sleep(0.2 if job.job_id.int % 4 else 1.5)
            if stopped.is_set():
                ended_in_outage.add(job.job_id)
            return Reply()

    accepted: list[Any] = []
    feeding = True

    async def feed() -> None:
        connection: Any = None
        while feeding:
            try:
                if connection is None or connection.is_closed():
                    connection = await asyncpg.connect(database.gateway_dsn)
                accepted.extend(await Jobs(connection).enqueue_many(20, ttl=120))
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, RelayDispatchError):
                pass
            await asyncio.sleep(0.1)
        await connection.close()

    async with running(*relays):
        feeder = asyncio.create_task(feed())
        await eventually(lambda: len(accepted) > 300)
        await anyio.to_thread.run_sync(durable_server.stop, "immediate")
        stopped.set()
        await eventually(lambda: all(relay.health().status == "degraded" for relay in relays))
        outage = time.monotonic()
        await eventually(lambda: time.monotonic() - outage > 4.5)
        await anyio.to_thread.run_sync(durable_server.start)
        stopped.clear()
        before = len(accepted)
        await eventually(lambda: len(accepted) > before + 100, timeout=20)
        feeding = False
        await feeder
        await eventually(lambda: all(relay.health().status == "ok" for relay in relays), timeout=20)
        connection = await asyncpg.connect(database.gateway_dsn)
        jobs = Jobs(connection)
        results = await jobs.ends(accepted, timeout=40)
        # Wake-ups are by notify again.
        woken = [relay.metrics.wakeups_by_notify for relay in relays]

        async def is_woken() -> bool:
            # Now and then a poll finds the job before its ring has come.
            job_id = await jobs.enqueue()
            await jobs.ring()
            await jobs.end(job_id)
            return [relay.metrics.wakeups_by_notify for relay in relays] != woken

        await eventually(is_woken)
        await connection.close()
    assert ended_in_outage
    lost = [result.job_id for result in results if result.status is not SUCCEEDED]
    assert lost == [], [(result.status, result.error_code) for result in results if result.status is not SUCCEEDED]
    assert max(runs.values()) == 1


@pytest.mark.case("C02")
async def test_killed_sessions_are_replaced_and_wake_ups_come_back(
    database: TestDatabase, gateway: Any, admin: Any
) -> None:
    """C02: twice in a row all sessions of the relay are ended; afterwards it is woken as before, by one listener."""
    relay = new_relay(database, poll_seconds=600.0, lease_seconds=30.0)

    @relay.fallback
    async def handler(job: DispatchJob) -> None: ...

    jobs = Jobs(gateway)
    async with running(relay):
        for _ in range(2):
            await admin.fetch(
                "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'relay_worker_login'"
                " and datname = current_database()"
            )
            job_id = await jobs.enqueue()  # found by the catch-up
            await jobs.ring()  # which may have been before
            await eventually(lambda: relay.health().listener == "listening")
            await jobs.end(job_id)
            await eventually(lambda: relay.health().status == "ok")
            job_id = await jobs.enqueue()
            await jobs.ring()
            await jobs.end(job_id)
        listeners = [row for row in await backends(admin) if " listener " in row["application_name"]]
        assert len(listeners) == 1


@pytest.mark.case("C01")
async def test_a_half_open_listener_is_noticed_and_polling_goes_on(database: TestDatabase, gateway: Any) -> None:
    """C01: only the listening connection is dead, without a FIN."""
    async with TcpProxy.before(database.worker_dsn) as proxy:
        core = CoreSettings.load(
            dsn=database.worker_dsn,
            listen_dsn=proxy.dsn(database.worker_dsn),
            probe_seconds=0.3,
            probe_timeout_seconds=0.5,
        )
        relay = Relay("erp", tenants=["acme"], core=core, settings=RelaySettings(**QUICK))

        @relay.fallback
        async def handler(job: DispatchJob) -> None: ...

        jobs = Jobs(gateway)
        async with running(relay):
            assert relay.health().status == "ok"
            proxy.mode = "black_hole"
            for _ in range(3):
                job_id = await jobs.enqueue()
                await jobs.ring()
                await jobs.end(job_id)
            await eventually(lambda: relay.health().listener == "degraded")
            assert relay.health().status == "degraded"
            proxy.mode = "pass"
            await eventually(lambda: relay.health().status == "ok")


@pytest.mark.case("C03")
async def test_a_job_committed_between_connecting_and_listening_is_found_at_once(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C03: the first claim comes after LISTEN is confirmed, so nothing falls between the two."""
    jobs = Jobs(gateway)
    ids: list[Any] = []
    sync = Listener._sync

    async def slow_sync(self: Any, conn: Any) -> None:
        ids.append(await jobs.enqueue())
        await jobs.ring()  # nobody hears it
        await sync(self, conn)
        ids.append(await jobs.enqueue())
        await jobs.ring()

    monkeypatch.setattr(Listener, "_sync", slow_sync)
    relay = new_relay(database, poll_seconds=600.0)

    @relay.fallback
    async def handler(job: DispatchJob) -> None: ...

    async with running(relay):
        await jobs.ends(ids)
    assert len(ids) == 2


@pytest.mark.case("C05")
@pytest.mark.parametrize("mode", ["swap", "sticky"])
async def test_behind_a_transaction_pooler_a_relay_polls_and_works(
    database: TestDatabase, gateway: Any, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """C05: it finds out that nothing is heard, says so once, and every verb works with backends that change."""
    async with FakePooler.before(database.worker_dsn, mode=mode) as pooler:
        core = CoreSettings.load(dsn=pooler.dsn(database.worker_dsn), statement_cache_size=0, probe_timeout_seconds=0.3)
        relay = Relay("erp", tenants=["acme", "zeta"], core=core, settings=RelaySettings(**QUICK))

        @relay.fallback
        async def handler(job: DispatchJob) -> Any:
            return Reply(job.tenant_id) if job.attempt > 1 else Retry(after=0.01)

        everybody = [Jobs(gateway), Jobs(gateway, "zeta")]
        async with running(relay):
            await eventually(lambda: relay.health().listener == "polling_only")
            assert relay.health().status == "degraded"
            for jobs in everybody:
                ids = await jobs.enqueue_many(20, max_attempts=2)
                assert {result.response_body for result in await jobs.ends(ids)} == {jobs.tenant.encode()}
    assert caplog.text.count("a transaction pooler stands before") == 1


async def test_a_row_that_the_database_refuses_fails_alone(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its neighbours in the batch are stored; it ends `failed`, and its finished work is not run again."""
    complete_many = RelayDispatchRepository.complete_many

    async def refuses(self: Any, relay_id: str, completions: Any, **options: Any) -> Any:
        if any(completion.response_body == b"poison" for completion in completions):
            raise DatabaseError("cannot be stored", sqlstate="XX000")
        return await complete_many(self, relay_id, completions, **options)

    monkeypatch.setattr(RelayDispatchRepository, "complete_many", refuses)
    relay = new_relay(database)
    runs: list[bytes] = []

    @relay.fallback
    async def handler(job: DispatchJob) -> Reply:
        runs.append(job.body)
        return Reply(job.body)

    jobs = Jobs(gateway)
    ids = [await jobs.enqueue(body=b"poison" if n == 7 else b"good", max_attempts=3) for n in range(20)]
    async with running(relay):
        results = await jobs.ends(ids)
    assert [result.status for result in results] == [FAILED if n == 7 else SUCCEEDED for n in range(20)]
    assert results[7].error_code == "S2R-RESULT-INVALID"
    assert len(runs) == 20
