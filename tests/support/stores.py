"""For tests of the store of durable jobs: a gateway's and a worker's, and proof that a loser has written nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatch_core import (
    ClaimedChunk,
    DurableJobsSettings,
    DurableJobStore,
    JobLease,
    LeaseLostError,
)
from dispatch_core.database import Database
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK, EVENT, JOB, ROW_ERROR
from tests.support.protocol import TENANT, Connection

HOLDER = "relay:1"


@dataclass
class Stores:
    """Of one tenant: `gateway` submits and decides, `worker` runs."""

    gateway: DurableJobStore
    worker: DurableJobStore
    gateways: Database
    workers: Database

    async def job(self, chunks: int = 1, **options: Any) -> UUID:
        """Store a job of so many chunks."""
        job_id = await self.gateway.insert_job(durable.KIND, **options)
        await self.gateway.insert_chunks(job_id, [{"n": n} for n in range(1, chunks + 1)], from_seq=1)
        return job_id

    async def claim(self, job_id: UUID, **options: Any) -> ClaimedChunk:
        """Claim the next chunk, which there is."""
        claimed = await self.worker.claim_next_chunk_skip_locked(job_id, **options)
        assert claimed is not None
        return claimed

    async def lease(self, chunks: int = 1, **options: Any) -> JobLease:
        """Store a job and claim its first chunk."""
        return (await self.claim(await self.job(chunks, **options))).lease


@asynccontextmanager
async def open_stores(database: TestDatabase, *, tenant: str = TENANT, **settings: Any) -> AsyncIterator[Stores]:
    """Open a pool for each login."""
    chosen = DurableJobsSettings(**settings)
    async with (
        Database(database.gateway_dsn, max_size=4) as gateways,
        Database(database.worker_dsn, max_size=4) as workers,
    ):
        yield Stores(
            DurableJobStore(gateways, tenant, settings=chosen),
            DurableJobStore(workers, tenant, settings=chosen, holder=HOLDER),
            gateways,
            workers,
        )


async def everything(admin: Connection) -> list[tuple[str, str]]:
    """Read all that the room has stored, to the last column and row version."""
    found: list[tuple[str, str]] = []
    for table in (JOB, CHUNK, ROW_ERROR, EVENT):
        rows = await admin.fetch(f"select t.ctid::text || t.xmin::text || t::text as row from {table} t order by 1")
        found.extend((table, row["row"]) for row in rows)
    return found


@asynccontextmanager
async def nothing_written(admin: Connection) -> AsyncIterator[None]:
    """Prove that the block leaves every row of the room as it was, and adds none."""
    before = await everything(admin)
    yield
    assert await everything(admin) == before


def wrong_leases(lease: JobLease, other: JobLease) -> dict[str, JobLease]:
    """Return leases that are not the one: by token, version, chunk and job. (`other` is a good one of another job.)"""
    return {
        "another token": dataclasses.replace(lease, token=uuid4()),
        "an older version": dataclasses.replace(lease, version=lease.version - 1),
        "a newer version": dataclasses.replace(lease, version=lease.version + 1),
        "another chunk": dataclasses.replace(lease, seq=lease.seq + 1),
        "no such chunk": dataclasses.replace(lease, seq=99),
        "another job": dataclasses.replace(lease, job_id=other.job_id),
        "no such job": dataclasses.replace(lease, job_id=uuid4()),
    }


async def refused(call: Callable[[], Awaitable[Any]], lease: JobLease) -> None:
    """Prove that a call raises LeaseLostError, which names the chunk."""
    with pytest.raises(LeaseLostError) as lost:
        await call()
    assert (lost.value.job_id, lost.value.seq, lost.value.retryable) == (lease.job_id, lease.seq, False)
