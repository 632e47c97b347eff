"""Decisions about a job of more chunks than one statement may change: whole, in bounded steps, gone on with (C24)."""

from __future__ import annotations

from uuid import UUID

import pytest

from dispatch_core.durable_models import Controlled, JobStatus
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.gateway import open_client
from tests.support.protocol import TENANT, Connection

pytestmark = pytest.mark.case("C24")

MANY = 10_005
EXACTLY = 10_000
"""A statement changes 10,000 at most."""


async def submit(gateway: Connection, admin: Connection, chunks: int = MANY) -> UUID:
    job_id = await durable.submit(gateway, 1)
    await admin.execute(
        """insert into relay.durable_chunk (tenant_id, job_id, seq, payload, status, created_at, updated_at)
           select $1, $2, n, '1', 'pending', now(), now() from generate_series(2, $3::bigint) n""",
        TENANT,
        job_id,
        chunks,
    )
    await gateway.fetch("select relay.durable_refresh_counters($1, $2)", TENANT, job_id)
    return job_id


@pytest.mark.parametrize("chunks", [MANY, EXACTLY])
async def test_a_job_of_very_many_chunks_is_cancelled_whole_in_bounded_steps(
    database: TestDatabase, gateway: Connection, worker: Connection, admin: Connection, chunks: int
) -> None:
    job_id = await submit(gateway, admin, chunks)
    leases = await durable.claim(worker, 2)
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        done = await jobs.cancel(job_id, note="wrong file")
        assert done == Controlled("applied", JobStatus.RUNNING, JobStatus.CANCELLED, chunks, 0)
        assert await jobs.cancel(job_id) == Controlled("already", JobStatus.CANCELLED, JobStatus.CANCELLED, 0, 0)
        assert (await durable.told(gateway, job_id)).count("cancelled") == 1
    changed = await admin.fetch("select count(*) from relay.durable_chunk where status = 'cancelled' group by xmin")
    assert sorted(row["count"] for row in changed) == ([MANY - 10_000, 10_000] if chunks == MANY else [10_000])
    assert await durable.counters_are_exact(admin, job_id)
    assert await durable.heartbeat(worker, *leases) == ["stale", "stale"]


async def test_nothing_runs_of_a_cancelled_job_to_whose_last_chunks_nobody_has_come_and_to_cancel_again_goes_on(
    database: TestDatabase, gateway: Connection, worker: Connection, admin: Connection
) -> None:
    job_id = await submit(gateway, admin)
    # Whoever cancels dies after the first step.
    first = await durable.control(gateway, job_id, "cancel")
    assert (first["outcome"], first["status"]) == ("applied", "cancelled")
    assert (first["chunks"], first["upto"]) == (10_000, 10_000)
    assert await durable.claim(worker, 10) == []
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job = await jobs.status(job_id, fresh=False)
        assert job is not None
        assert (job.chunks["cancelled"], job.chunks["pending"]) == (10_000, MANY - 10_000)  # type: ignore[index]
        again = await jobs.cancel(job_id)
        assert again == Controlled("already", JobStatus.CANCELLED, JobStatus.CANCELLED, MANY - 10_000, 0)
    assert await durable.counters_are_exact(admin, job_id)
    assert (await durable.told(gateway, job_id)).count("cancelled") == 1


async def test_very_many_failed_chunks_are_all_to_be_run_again(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    job_id = await submit(gateway, admin)
    await admin.execute("update relay.durable_chunk set status = 'failed', ended_at = now()")
    await durable.finish(gateway, job_id)
    async with open_client(database.gateway_dsn) as client:
        done = await client.tenant(TENANT).durable.retry_failed(job_id)
    assert done == Controlled("applied", JobStatus.FAILED, JobStatus.RUNNING, MANY, 0)
    assert await admin.fetchval("select count(*) from relay.durable_chunk where status = 'retry'") == MANY
    assert await durable.counters_are_exact(admin, job_id)
