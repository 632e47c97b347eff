"""Leases: when a claim is taken back, by whom, and what its holder is told (C15, C18, C22)."""

from __future__ import annotations

import re
from datetime import timedelta
from uuid import UUID

import anyio
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import EndedJob
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.protocol import (
    ME,
    QUEUE,
    RELAY,
    RESULT,
    TENANT,
    Connection,
    claim,
    claimed_job,
    connected,
    end_lease,
    enqueue,
    heartbeat,
    logins,
    pass_deadline,
    release,
    retry,
    row,
    said,
    settle,
    snapshot,
    status_of,
)

OTHER = "erp:instance-2"


async def _reclaim(worker: Connection, *, lease: float = 0.001, **options: object) -> list[tuple[UUID, str]]:
    ended: list[EndedJob] = await RelayDispatchRepository(worker, TENANT).reclaim(
        RELAY,
        lease_seconds=lease,
        **options,  # type: ignore[arg-type]
    )
    return [(item.job_id, item.status.value) for item in ended]


async def test_a_lost_lease_makes_the_job_pending_while_attempts_remain_and_else_failed(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    again = await claimed_job(gateway, worker, max_attempts=2)
    last = await claimed_job(gateway, worker)
    late = await claimed_job(gateway, worker, max_attempts=2)
    kept = await claimed_job(gateway, worker, max_attempts=2)
    await end_lease(admin, again.job_id, last.job_id, late.job_id)
    await pass_deadline(admin, late.job_id)
    assert dict(await _reclaim(worker)) == {again.job_id: "pending", last.job_id: "failed", late.job_id: "expired"}
    result = await RelayDispatchRepository(gateway, TENANT).poll_status(last.job_id)
    assert result is not None
    assert result.error_code == "S2R-LEASE-LOST"
    assert await status_of(gateway, kept.job_id) == "claimed"
    assert await heartbeat(worker, [again, last, late, kept]) == ["stale", "stale", "stale", "applied"]
    assert await _reclaim(worker) == [], "and once only"


async def test_a_session_younger_than_a_lease_reclaims_nothing(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """A restart cuts every session, and the holders of claims get one lease to come back."""
    job = await claimed_job(gateway, worker)
    await end_lease(admin, job.job_id)
    assert await _reclaim(worker, lease=3600) == []
    swept = await RelayDispatchRepository(worker).run_sweeps(RELAY, lease_seconds=3600)
    assert swept == []
    assert await heartbeat(worker, [job]) == ["applied"], "the holder came back in time"


async def test_the_age_of_a_session_is_its_own_and_unknown_under_another_role(worker: Connection) -> None:
    assert await worker.fetchval("select relay.session_age() < interval '1 minute'")
    await worker.execute("set role relay_worker")
    assert await worker.fetchval("select relay.session_age()") is None, "and so nothing is reclaimed then"


async def test_reclaim_stays_within_its_relay_its_tenants_and_its_limit(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    mine = [await claimed_job(gateway, worker) for _ in range(3)]
    crm = await claimed_job(gateway, worker, relay="crm")
    other = await claimed_job(gateway, worker, tenant="other")
    await end_lease(admin, *(job.job_id for job in [*mine, crm, other]))
    assert len(await _reclaim(worker, limit=2)) == 2
    assert len(await _reclaim(worker, limit=2)) == 1
    assert await status_of(gateway, crm.job_id) == "claimed"
    everything = await RelayDispatchRepository(worker).reclaim(None, lease_seconds=0.001, tenants=[TENANT, "other"])
    assert {(item.tenant_id, item.relay_id, item.job_id) for item in everything} == {
        (TENANT, "crm", crm.job_id),
        ("other", RELAY, other.job_id),
    }


async def test_a_login_bound_to_one_relay_must_name_it_to_reclaim_or_expire(database: TestDatabase) -> None:
    async with logins(database) as made:
        worker = await made.open("worker", TENANT, RELAY)
        for verb in ("reclaim_lost", "expire_late"):
            with pytest.raises(Exception, match="must name one") as refused:
                await worker.fetch(f"select * from relay.{verb}($1, null, 10)", TENANT)
            assert getattr(refused.value, "sqlstate", None) == "S2003"
            assert await worker.fetch(f"select * from relay.{verb}($1, $2, 10)", TENANT, RELAY) == []


# --- the seam between the reaper's look and its write (C15) -----------------------------------


@pytest.mark.case("C15")
@pytest.mark.invariant("I3")
@pytest.mark.parametrize("meanwhile", ["complete", "release and claim again", "withdraw", "renew", "retry later"])
async def test_whoever_is_just_deciding_a_job_is_not_overtaken_by_the_reaper(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, meanwhile: str
) -> None:
    """The other's transaction is open while the reaper looks: it takes nothing, then or afterwards."""
    job = await claimed_job(gateway, worker, max_attempts=3)
    await end_lease(admin, job.job_id)
    async with connected(database.worker_dsn) as reaper:
        decider = gateway if meanwhile == "withdraw" else worker
        async with decider.transaction():
            if meanwhile == "complete":
                assert said(await settle(worker, job)) == ("applied", "succeeded")
            elif meanwhile == "release and claim again":
                assert said(await release(worker, job, started=False)) == ("applied", "pending")
                assert len(await claim(worker, by=OTHER)) == 1
            elif meanwhile == "withdraw":
                assert await RelayDispatchRepository(gateway, TENANT).mark_expired(job.job_id) == 1
            elif meanwhile == "renew":
                assert await heartbeat(worker, [job]) == ["applied"]
            else:
                assert said(await retry(worker, job, delay=60)) == ("applied", "pending")
            assert await _reclaim(reaper) == []
        before = await snapshot(admin)
        assert await _reclaim(reaper) == []
        assert await snapshot(admin) == before
    ends = {"complete": "succeeded", "withdraw": "expired", "retry later": "pending"}
    assert await status_of(gateway, job.job_id) == ends.get(meanwhile, "claimed")


@pytest.mark.case("C15")
@pytest.mark.parametrize("loser", ["complete", "retry", "release", "withdraw", "heartbeat"])
@pytest.mark.parametrize("max_attempts", [1, 2])
async def test_whoever_comes_while_the_reaper_decides_waits_and_learns_that_it_lost(
    database: TestDatabase,
    admin: Connection,
    gateway: Connection,
    worker: Connection,
    loser: str,
    max_attempts: int,
) -> None:
    job = await claimed_job(gateway, worker, max_attempts=max_attempts)
    await end_lease(admin, job.job_id)
    told: list[object] = []

    async def lose() -> None:
        if loser == "complete":
            told.append(said(await settle(worker, job))[0])
        elif loser == "retry":
            told.append(said(await retry(worker, job))[0])
        elif loser == "release":
            told.append(said(await release(worker, job, started=True))[0])
        elif loser == "withdraw":
            told.append(await RelayDispatchRepository(gateway, TENANT).mark_expired(job.job_id))
        else:
            told.extend(await heartbeat(worker, [job]))

    async with connected(database.worker_dsn) as reaper, anyio.create_task_group() as group, reaper.transaction():
        assert len(await _reclaim(reaper)) == 1
        group.start_soon(lose)
        if loser == "heartbeat":
            await eventually(lambda: told == ["busy"], message="a heartbeat that does not wait")
        else:
            pid = pid_of(gateway if loser == "withdraw" else worker)
            await wait_until_blocked(admin, pid, by=pid_of(reaper))
    if loser == "heartbeat":
        assert await heartbeat(worker, [job]) == ["stale"]
    elif loser == "withdraw":
        # A job that the reaper has made pending again is there to be withdrawn; one that has ended is not.
        assert told == [1 if max_attempts == 2 else 0]
    else:
        assert told == ["stale"]
    terminal = await admin.fetchval(f"select count(*) from {RESULT} where job_id = $1", job.job_id)
    queued = await admin.fetchval(f"select count(*) from {QUEUE} where job_id = $1", job.job_id)
    assert terminal + queued == 1


@pytest.mark.case("C15")
async def test_two_reapers_at_once_end_each_job_once(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await enqueue(gateway, 10)
    jobs = await claim(worker, 10)
    await end_lease(admin, *(job.job_id for job in jobs))
    async with connected(database.worker_dsn) as second, worker.transaction():
        first = await _reclaim(worker, limit=6)
        rest = await _reclaim(second)
    assert len(first) == 6
    assert len(rest) == 4
    assert {job_id for job_id, _ in [*first, *rest]} == {job.job_id for job in jobs}


@pytest.mark.case("C25")
async def test_a_job_that_cannot_be_put_back_does_not_keep_the_others_from_it(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """One past its deadline, one without attempts, one with: each goes its way in the same batch."""
    jobs = [await claimed_job(gateway, worker, max_attempts=1 + number % 2) for number in range(6)]
    await end_lease(admin, *(job.job_id for job in jobs))
    await pass_deadline(admin, jobs[0].job_id, jobs[1].job_id)
    ended = dict(await _reclaim(worker))
    assert [ended[job.job_id] for job in jobs] == ["expired", "expired", "failed", "pending", "failed", "pending"]


# --- identity (C18) ---------------------------------------------------------------------------


@pytest.mark.case("C18")
@pytest.mark.invariant("I3")
async def test_the_abandoned_attempt_of_an_instance_cannot_touch_the_new_one_of_the_same_instance(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker, max_attempts=3)
    await end_lease(admin, job.job_id)
    await _reclaim(worker)
    (again,) = await claim(worker)
    assert (again.job_id, again.fence > job.fence) == (job.job_id, True)
    before = await snapshot(admin)
    assert await heartbeat(worker, [job]) == ["stale"]
    assert said(await retry(worker, job)) == ("stale", None)
    assert said(await release(worker, job, started=False)) == ("stale", None)
    assert said(await settle(worker, job)) == ("stale", None)
    assert said(await settle(worker, job, status="failed")) == ("stale", None)
    assert not await RelayDispatchRepository(worker, TENANT).fetch_body(job, claimed_by=ME)
    assert await snapshot(admin) == before
    assert said(await settle(worker, again)) == ("applied", "succeeded")


@pytest.mark.case("C18")
async def test_an_orphan_is_found_from_its_own_row_alone(admin: Connection, gateway: Connection) -> None:
    """No table of workers exists whose pruning could hide one."""
    tables = await admin.fetch(
        "select relname from pg_class where relnamespace = 'relay'::regnamespace and relkind = 'r'"
    )
    assert not [name for (name,) in tables if re.search("worker|instance|member", name)]


# --- clocks (C22) -----------------------------------------------------------------------------


async def _age_transaction(connection: Connection) -> None:
    """Wait until now() of the open transaction is well behind the clock."""
    await eventually(lambda: connection.fetchval("select clock_timestamp() - now() > interval '150 ms'"))


@pytest.mark.case("C22")
async def test_leases_and_deadlines_count_from_the_write_and_not_from_the_start_of_the_transaction(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    async with gateway.transaction():
        await _age_transaction(gateway)
        (job_id,) = await enqueue(gateway, ttl=100, delay=0.001)
        began = await gateway.fetchval("select now()")
    queued = await row(admin, QUEUE, job_id)
    assert queued is not None
    assert queued["expires_at"] - began > timedelta(seconds=100.15)
    assert queued["available_at"] - began > timedelta(seconds=0.15)
    assert queued["created_at"] - began > timedelta(seconds=0.15)
    async with worker.transaction():
        await _age_transaction(worker)
        (job,) = await claim(worker, lease=0.05)
        began = await worker.fetchval("select now()")
        await _age_transaction(worker)
        assert await heartbeat(worker, [job], lease=100) == ["applied"]
    leased = await row(admin, QUEUE, job_id)
    assert leased is not None
    assert leased["claimed_at"] - began > timedelta(seconds=0.15)
    assert leased["lease_expires_at"] - began > timedelta(seconds=100.15)


@pytest.mark.case("C22")
@pytest.mark.parametrize("verb", ["complete", "retry"])
async def test_the_deadline_is_compared_with_the_clock_after_the_wait_for_the_row(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, verb: str
) -> None:
    job = await claimed_job(gateway, worker, max_attempts=2, ttl=0.4)
    told: list[tuple[str, str | None]] = []

    async def write() -> None:
        told.append(said(await (settle(worker, job) if verb == "complete" else retry(worker, job))))

    async with connected(database.admin_dsn) as locker, anyio.create_task_group() as group, locker.transaction():
        await locker.execute(f"select from {QUEUE} where job_id = $1 for no key update", job.job_id)
        group.start_soon(write)
        await wait_until_blocked(admin, pid_of(worker), by=pid_of(locker))
        await eventually(lambda: admin.fetchval("select clock_timestamp() > $1", job.expires_at))
    assert told == [("stale" if verb == "complete" else "applied", "expired")]
    assert await status_of(gateway, job.job_id) == "expired"


@pytest.mark.invariant("I3")
async def test_a_completion_in_time_that_waited_for_its_row_is_applied(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """The row has a new version by then: another transaction has renewed its lease."""
    job = await claimed_job(gateway, worker)
    told: list[tuple[str, str | None]] = []

    async def write() -> None:
        told.append(said(await settle(worker, job)))

    async with connected(database.worker_dsn) as beating, anyio.create_task_group() as group, beating.transaction():
        assert await heartbeat(beating, [job]) == ["applied"]
        group.start_soon(write)
        await wait_until_blocked(admin, pid_of(worker), by=pid_of(beating))
    assert told == [("applied", "succeeded")]


async def test_a_heartbeat_does_not_wait_for_a_completion_but_says_busy(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    async with connected(database.worker_dsn) as beating:
        async with worker.transaction():
            await settle(worker, job)
            assert await heartbeat(beating, [job]) == ["busy"]
        assert await heartbeat(beating, [job]) == ["stale"]
