"""Limits of a verb: over all of its tenants, of what it waits for, of the settings that it changes for itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias
from uuid import UUID

import anyio
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import DispatchJob
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.protocol import (
    QUEUE,
    RELAY,
    RESULT,
    TENANT,
    Connection,
    claimed_job,
    connected,
    end_lease,
    enqueue,
    heartbeat,
    make_due,
    pass_deadline,
    release,
    retry,
    said,
    settle,
    status_of,
)

Verb: TypeAlias = Callable[[Connection, Connection, DispatchJob], Awaitable[object]]
Prepare: TypeAlias = Callable[[Connection, Connection, Connection], Awaitable[list[UUID]]]


async def test_a_reclaim_over_several_tenants_takes_no_more_than_its_limit_in_all(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    tenants = ("a", "a", "b", "b")
    await end_lease(admin, *[(await claimed_job(gateway, worker, tenant=tenant)).job_id for tenant in tenants])
    taken = []
    for _ in range(3):
        ended = await RelayDispatchRepository(worker).reclaim(RELAY, lease_seconds=0.001, limit=3, tenants=["a", "b"])
        taken.append([item.tenant_id for item in ended])
    assert taken == [["a", "a", "b"], ["b"], []]


async def _withdraw(gateway: Connection, worker: Connection, job: DispatchJob) -> object:
    return await RelayDispatchRepository(gateway, TENANT).mark_expired(job.job_id)


async def _complete(gateway: Connection, worker: Connection, job: DispatchJob) -> object:
    return said(await settle(worker, job))


async def _retry(gateway: Connection, worker: Connection, job: DispatchJob) -> object:
    return said(await retry(worker, job))


async def _release(gateway: Connection, worker: Connection, job: DispatchJob) -> object:
    return said(await release(worker, job, started=True))


VERBS: dict[str, tuple[Verb, object, str]] = {
    "withdraw": (_withdraw, 1, "expired"),
    "complete": (_complete, ("applied", "succeeded"), "succeeded"),
    "retry": (_retry, ("applied", "pending"), "pending"),
    "release": (_release, ("applied", "pending"), "pending"),
}


@pytest.mark.invariant("I3")
@pytest.mark.parametrize("name", VERBS)
async def test_a_verb_that_had_to_wait_for_its_row_does_what_it_was_asked_to(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, name: str
) -> None:
    """The row has another version by then than the one that was found."""
    verb, answer, status = VERBS[name]
    job = await claimed_job(gateway, worker, max_attempts=2)
    answers = []

    async def ask() -> None:
        answers.append(await verb(gateway, worker, job))

    async with connected(database.worker_dsn) as beating, anyio.create_task_group() as group, beating.transaction():
        assert await heartbeat(beating, [job]) == ["applied"]
        group.start_soon(ask)
        await wait_until_blocked(admin, pid_of(gateway if verb is _withdraw else worker), by=pid_of(beating))
    assert answers == [answer]
    assert await status_of(gateway, job.job_id) == status


async def _late(admin: Connection, gateway: Connection, worker: Connection) -> list[UUID]:
    ids = await enqueue(gateway, 2)
    await pass_deadline(admin, *ids)
    return ids


async def _late_and_claimed(admin: Connection, gateway: Connection, worker: Connection) -> list[UUID]:
    ids = [(await claimed_job(gateway, worker)).job_id for _ in range(2)]
    await pass_deadline(admin, *ids)
    return ids


async def _lost(admin: Connection, gateway: Connection, worker: Connection) -> list[UUID]:
    ids = [(await claimed_job(gateway, worker)).job_id for _ in range(2)]
    await end_lease(admin, *ids)
    return ids


async def _due(admin: Connection, gateway: Connection, worker: Connection) -> list[UUID]:
    ids = await enqueue(gateway, 2, delay=100)
    await make_due(admin, *ids)
    return ids


async def _ended(admin: Connection, gateway: Connection, worker: Connection) -> list[UUID]:
    ids = []
    for _ in range(2):
        job = await claimed_job(gateway, worker)
        await settle(worker, job)
        ids.append(job.job_id)
    await admin.execute(f"update {RESULT} set completed_at = completed_at - interval '1 day'")
    return ids


_EXPIRE = f"select count(*) from relay.expire_late('{TENANT}', null, 10)"
STEPS: dict[str, tuple[Prepare, str, str, str]] = {
    "expire what waits": (_late, _EXPIRE, QUEUE, "true"),
    "expire what is claimed": (_late_and_claimed, _EXPIRE, QUEUE, "true"),
    "take lost claims back": (_lost, f"select count(*) from relay.reclaim_lost('{TENANT}', null, 10)", QUEUE, "true"),
    "promote": (_due, f"select relay.promote_due('{TENANT}', '{RELAY}', 10)", QUEUE, "state = 'delayed'"),
    "purge": (_ended, f"select relay.purge('{TENANT}', '1 hour', 10)", RESULT, "true"),
}


@pytest.mark.parametrize("name", STEPS)
async def test_a_row_that_somebody_is_just_deciding_is_stepped_over(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, name: str
) -> None:
    prepare, call, table, left = STEPS[name]
    locked, _ = await prepare(admin, gateway, worker)
    caller = worker if name == "promote" else gateway
    # Who waits is not to wait for ever.
    await caller.execute("set statement_timeout = '20s'")
    async with connected(database.admin_dsn) as decider, decider.transaction():
        await decider.execute(f"select from {table} where job_id = $1 for update", locked)
        await caller.fetchval(call)
        assert await admin.fetchval(f"select array_agg(job_id) from {table} where {left}") == [locked]


async def test_a_poll_waits_for_who_decides_a_late_job_and_leaves_the_callers_lock_timeout_as_it_was(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Who never decides is not waited for: then the job is shown as it is stored."""
    job = await claimed_job(gateway, worker)
    await pass_deadline(admin, job.job_id)
    async with gateway.transaction():
        await gateway.execute("set local lock_timeout = '7s'")
        async with connected(database.admin_dsn) as decider, decider.transaction():
            await decider.execute(f"select from {QUEUE} where job_id = $1 for update", job.job_id)
            assert await status_of(gateway, job.job_id) == "claimed"
            assert await gateway.fetchval("show lock_timeout") == "7s"
        assert await status_of(gateway, job.job_id) == "expired"
        assert await gateway.fetchval("show lock_timeout") == "7s"
