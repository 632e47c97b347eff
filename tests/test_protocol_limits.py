"""Limits of a verb: over all of its tenants, of what it waits for, of the settings that it changes for itself."""

from __future__ import annotations

import anyio
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.protocol import (
    QUEUE,
    RELAY,
    TENANT,
    Connection,
    claimed_job,
    connected,
    end_lease,
    heartbeat,
    pass_deadline,
    status_of,
)


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


@pytest.mark.invariant("I3")
async def test_a_withdrawal_that_had_to_wait_for_its_row_ends_the_job(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """The row has another version by then than the one that was found."""
    job = await claimed_job(gateway, worker)
    ended: list[int] = []

    async def withdraw() -> None:
        ended.append(await RelayDispatchRepository(gateway, TENANT).mark_expired(job.job_id))

    async with anyio.create_task_group() as group, worker.transaction():
        assert await heartbeat(worker, [job]) == ["applied"]
        group.start_soon(withdraw)
        await wait_until_blocked(admin, pid_of(gateway), by=pid_of(worker))
    assert ended == [1]
    assert await status_of(gateway, job.job_id) == "expired"


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
