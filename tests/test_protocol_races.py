"""Races, each repeated until a fault would have shown; no clock is trusted and no order of arrival assumed."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from uuid import UUID

import anyio
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import Completion, DispatchJob, DispatchResult, PutBack
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.protocol import (
    ME,
    QUEUE,
    RELAY,
    REQUEST,
    RESULT,
    TENANT,
    Connection,
    claim,
    connected,
    enqueue,
    stored,
)


async def _deadlocks(admin: Connection) -> int:
    await admin.execute("select pg_stat_clear_snapshot()")
    return await admin.fetchval("select deadlocks from pg_stat_database where datname = current_database()")


@pytest.mark.invariant("I3")
async def test_a_completion_that_waits_behind_a_heartbeat_of_the_same_job_is_applied(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """The lock is held while the completion is sent, and the row has another version when it is let go."""
    rounds, batch = 1000, 4
    rng = random.Random(1)
    outcomes: Counter[str] = Counter()
    async with connected(database.worker_dsn) as beating:
        beats = RelayDispatchRepository(beating, TENANT)
        work = RelayDispatchRepository(worker, TENANT)

        async def complete(jobs: list[DispatchJob]) -> None:
            completions = [Completion(job.job_id, job.fence) for job in rng.sample(jobs, len(jobs))]
            for settled in await work.complete_many(RELAY, completions, claimed_by=ME):
                outcomes[settled.outcome.value] += 1

        for number in range(rounds):
            if number % 100 == 0:
                await enqueue(gateway, 100 * batch)
                claimed = await claim(worker, 100 * batch, lease=600)
            jobs, claimed = claimed[:batch], claimed[batch:]
            async with anyio.create_task_group() as group, beating.transaction():
                beaten = rng.sample(jobs, rng.randrange(1, batch + 1))
                told = await beats.heartbeat(RELAY, [(None, job.job_id, job.fence) for job in beaten], claimed_by=ME)
                assert told == ["applied"] * len(beaten)
                group.start_soon(complete, jobs)
                if number % 10 == 0:
                    await wait_until_blocked(admin, pid_of(worker), by=pid_of(beating))
                else:
                    for _ in range(rng.randrange(4)):
                        await anyio.lowlevel.checkpoint()
    assert outcomes == {"applied": rounds * batch}
    assert (await stored(admin))[RESULT] == rounds * batch
    assert await _deadlocks(admin) == 0


@pytest.mark.invariant("I3")
async def test_heartbeats_and_completions_at_full_speed_side_by_side_refuse_no_valid_completion(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """No barrier at all: two connections go over the same batches, in opposite orders, as fast as they can."""
    total, batch = 6000, 50
    beaten: Counter[str] = Counter()
    current: list[DispatchJob] = []
    done = False

    async def beat(connection: Connection) -> None:
        repository = RelayDispatchRepository(connection, TENANT)
        while not done:
            jobs = [(None, job.job_id, job.fence) for job in reversed(current)]
            beaten.update(
                outcome.value for outcome in await repository.heartbeat(RELAY, jobs, claimed_by=ME, lease_seconds=600)
            )
            await anyio.lowlevel.checkpoint()

    work = RelayDispatchRepository(worker, TENANT)
    async with AsyncExitStack() as stack, anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(beat, await stack.enter_async_context(connected(database.worker_dsn)))
        for _ in range(total // batch):
            await enqueue(gateway, batch)
            current = await claim(worker, batch, lease=600)
            for half in (current[: batch // 2], current[batch // 2 :]):
                completions = [Completion(job.job_id, job.fence) for job in half]
                settled = await work.complete_many(RELAY, completions, claimed_by=ME)
                assert {item.outcome.value for item in settled} == {"applied"}
        done = True
    assert beaten["applied"] > 0
    assert beaten["stale"] > 0, "the two never met"
    assert await _deadlocks(admin) == 0


@pytest.mark.invariant("I6")
async def test_no_poll_ever_says_expired_of_a_job_that_ends_succeeded(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Completions that start just before or after the deadline and commit well after it, and polls all the while."""
    rng = random.Random(2)
    batches = 30
    jobs: list[list[DispatchJob]] = []
    polled_expired: set[UUID] = set()
    polls = 0
    done = False
    deadlines: dict[UUID, datetime] = {}

    async def poll(connection: Connection) -> None:
        nonlocal polls
        repository = RelayDispatchRepository(connection, TENANT)
        while not done:
            near = [job.job_id for batch in jobs for job in rng.sample(batch, len(batch))]
            # What was said before this poll was sent: two that are under way at once answer each as of its start.
            said_before = set(polled_expired)
            answers = await repository.poll_many(rng.sample(near, min(len(near), 40)))
            polls += 1
            for job_id, result in answers.items():
                assert isinstance(result, DispatchResult)
                if result.status == "expired":
                    polled_expired.add(job_id)
                else:
                    # A row that stays locked for a quarter of a second, on a machine that stands, is not decided.
                    undecided = result.status == "claimed" and result.remaining <= 0
                    assert undecided or job_id not in said_before, f"expired before, now {result.status}"

    async def complete_across_the_deadline(connection: Connection, batch: list[DispatchJob]) -> None:
        repository = RelayDispatchRepository(connection, TENANT)
        # Some of them with time enough on a slow machine too.
        lead = rng.uniform(-0.004, 0.02) if rng.random() < 0.7 else rng.uniform(0.05, 0.25)
        deadline = deadlines[batch[0].job_id]
        sleep = "select pg_sleep(greatest(0, extract(epoch from $1 - clock_timestamp()) - $2))"
        await connection.execute(sleep, deadline, lead)
        async with connection.transaction():
            completions = [Completion(job.job_id, job.fence) for job in batch]
            await repository.complete_many(RELAY, completions, claimed_by=ME)
            await connection.execute(
                "select pg_sleep(greatest(0, extract(epoch from $1 - clock_timestamp())) + 0.01)", deadline
            )

    async with AsyncExitStack() as stack:
        pollers = [await stack.enter_async_context(connected(database.gateway_dsn)) for _ in range(2)]
        completers = [await stack.enter_async_context(connected(database.worker_dsn)) for _ in range(6)]
        for _ in range(batches):
            await enqueue(gateway, 4)
            jobs.append(await claim(worker, 4, lease=60))
        # However long that took, the first deadline is near from here.
        now = await RelayDispatchRepository(gateway, TENANT).now()
        for number, batch in enumerate(jobs):
            deadlines |= {job.job_id: now + timedelta(seconds=0.4 + 0.06 * number) for job in batch}
        for table in (REQUEST, QUEUE):
            await admin.execute(
                f"update {table} t set expires_at = u.at from unnest($1::uuid[], $2::timestamptz[]) u (id, at)"
                " where t.job_id = u.id",
                list(deadlines),
                list(deadlines.values()),
            )
        async with anyio.create_task_group() as group:
            for connection in pollers:
                group.start_soon(poll, connection)

            async def complete_every_sixth(index: int) -> None:
                for batch in jobs[index :: len(completers)]:
                    await complete_across_the_deadline(completers[index], batch)

            async with anyio.create_task_group() as completing:
                for index in range(len(completers)):
                    completing.start_soon(complete_every_sixth, index)
            done = True
    ends: dict[str, int] = dict(await admin.fetch(f"select status, count(*) from {RESULT} group by 1"))
    assert ends["succeeded"] > 10, ends
    assert ends["expired"] > 10, ends
    succeeded = {r[0] for r in await admin.fetch(f"select job_id from {RESULT} where status = 'succeeded'")}
    assert not succeeded & polled_expired
    assert polled_expired, "no poll came at the right moment"
    assert polls > batches


async def test_every_mix_of_verbs_over_the_same_jobs_in_any_order_never_deadlocks(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Multi-row verbs lock in job id order; whatever order their arguments have."""
    rng = random.Random(3)
    ids = await enqueue(gateway, 60, max_attempts=10**6)
    await enqueue(gateway, 60, tenant="other", max_attempts=10**6)
    fences: dict[UUID, int] = {}
    claims: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()

    async def work(connection: Connection, rounds: int) -> None:
        repository = RelayDispatchRepository(connection)
        for _ in range(rounds):
            claimed = await repository.claim(
                RELAY, claimed_by=ME, limit=40, tenants=[TENANT, "other"], start=rng.randrange(2), lease_seconds=60
            )
            for job in claimed.jobs:
                fences[job.job_id] = job.fence
                claims[job.tenant_id] += 1
            known = rng.sample([(job.tenant_id, job.job_id) for job in claimed.jobs], len(claimed.jobs))
            known += [(TENANT, job_id) for job_id in rng.sample(ids, 20)]
            rng.shuffle(known)
            match rng.randrange(4):
                case 0:
                    told = await repository.heartbeat(
                        RELAY, [(tenant, job, fences.get(job, 0)) for tenant, job in known], claimed_by=ME
                    )
                    outcomes.update(outcome.value for outcome in told)
                case 1:
                    settled = await repository.complete_many(
                        RELAY, [Completion(job, fences.get(job, 0), tenant) for tenant, job in known[:3]], claimed_by=ME
                    )
                    outcomes.update(item.outcome.value for item in settled)
            items = [PutBack(job, fences.get(job, 0), tenant, give_back=True) for tenant, job in known]
            settled = await repository.retry(RELAY, items, claimed_by=ME)
            outcomes.update(item.outcome.value for item in settled)

    async def watch(connection: Connection, clock: Connection, rounds: int) -> None:
        repository = RelayDispatchRepository(connection, TENANT)
        for number in range(rounds):
            some = rng.sample(ids, 30)
            await repository.poll_many(some)
            if number % 5 == 0:
                # Past the deadline, so that polls lock too; and in time again, so that claims go on.
                await clock.execute(
                    f"""with picked as (select tenant_id, job_id from {QUEUE} where job_id = any ($1)
                                      order by job_id for update skip locked)
                        update {QUEUE} q set expires_at = clock_timestamp() + $2::text::interval
                        from picked s where q.tenant_id = s.tenant_id and q.job_id = s.job_id""",
                    some[:10],
                    rng.choice(["-1 s", "600 s"]),
                )
            await repository.mark_expired_many(some[:1])

    async with AsyncExitStack() as stack, anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(work, await stack.enter_async_context(connected(database.worker_dsn)), 60)
        for _ in range(2):
            watching = await stack.enter_async_context(connected(database.gateway_dsn))
            clock = await stack.enter_async_context(connected(database.admin_dsn))
            group.start_soon(watch, watching, clock, 40)
    assert await _deadlocks(admin) == 0
    assert outcomes["applied"] > 100
    assert outcomes["stale"] > 100
    assert set(claims) == {TENANT, "other"}


@pytest.mark.invariant("I2")
async def test_concurrent_claims_never_take_the_same_row_and_leave_none(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    rng = random.Random(4)
    ids = await enqueue(gateway, 3000)
    taken: list[UUID] = []

    async def drain(connection: Connection, instance: str) -> None:
        while True:
            limit = rng.randrange(1, 60)
            jobs = await claim(connection, limit, by=instance)
            assert len(jobs) <= limit
            assert [job.seq for job in jobs] == sorted(job.seq for job in jobs)
            taken.extend(job.job_id for job in jobs)
            if not jobs:
                return

    async with AsyncExitStack() as stack, anyio.create_task_group() as group:
        for number in range(5):
            connection = await stack.enter_async_context(connected(database.worker_dsn))
            group.start_soon(drain, connection, f"erp:instance-{number}")
    assert len(taken) == len(ids)
    assert set(taken) == set(ids)
    assert await admin.fetchval(f"select count(*) from {QUEUE} where state = 'claimed' and attempt = 1") == 3000


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
async def test_every_job_ends_once_whatever_its_relays_do_to_it(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Relays that lose leases, stop, retry and complete at random, with reapers at work; at most 3 starts a job."""
    rng = random.Random(6)
    ids = set(await enqueue(gateway, 250, max_attempts=3))
    starts: Counter[UUID] = Counter()
    given_back: Counter[UUID] = Counter()
    applied: Counter[UUID] = Counter()

    async def relay(connection: Connection, instance: str) -> None:
        repository = RelayDispatchRepository(connection, TENANT)
        idle = 0
        while idle < 3:
            jobs = await claim(connection, rng.randrange(1, 12), by=instance, lease=rng.choice([0.001, 0.02, 30]))
            idle = 0 if jobs else idle + 1
            for job in jobs:
                starts[job.job_id] += 1
                action = rng.random()
                if action < 0.4:
                    done = Completion(job.job_id, job.fence, status=rng.choice(["succeeded", "failed"]))
                    (settled,) = await repository.complete_many(RELAY, [done], claimed_by=instance)
                    applied[job.job_id] += settled.outcome == "applied"
                elif action < 0.6:
                    await repository.retry(RELAY, [PutBack(job.job_id, job.fence)], claimed_by=instance)
                elif action < 0.75:
                    started = rng.random() < 0.5
                    (settled,) = await repository.release(
                        RELAY, [(None, job.job_id, job.fence, started)], claimed_by=instance
                    )
                    given_back[job.job_id] += settled.outcome == "applied" and not started
                # Else it is abandoned, as by a killed process.
            await repository.reclaim(RELAY, lease_seconds=0.001)

    async with AsyncExitStack() as stack, anyio.create_task_group() as group:
        for number in range(4):
            connection = await stack.enter_async_context(connected(database.worker_dsn))
            group.start_soon(relay, connection, f"erp:instance-{number}")
    await admin.execute(f"update {QUEUE} set lease_expires_at = clock_timestamp() where state = 'claimed'")
    repository = RelayDispatchRepository(worker, TENANT)
    while (await stored(admin))[QUEUE]:
        await repository.reclaim(RELAY, lease_seconds=0.001)
        for job in await claim(worker, 100, lease=30):
            starts[job.job_id] += 1
            (settled,) = await repository.complete_many(RELAY, [Completion(job.job_id, job.fence)], claimed_by=ME)
            applied[job.job_id] += settled.outcome == "applied"
    results = {r["job_id"]: r for r in await admin.fetch(f"select job_id, status, attempt, error_code from {RESULT}")}
    assert set(results) == ids
    for job_id, result in results.items():
        assert starts[job_id] - given_back[job_id] == result["attempt"] <= 3
        assert applied[job_id] <= 1
        assert (applied[job_id] == 1) == (result["error_code"] is None), "it ended by a completion or by its attempts"
    assert sum(applied.values()) > 50
    assert len(ids) - sum(applied.values()) > 10
    assert await _deadlocks(admin) == 0
