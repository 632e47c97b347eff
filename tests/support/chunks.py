"""Relays with chunk handlers under test, and a gateway's view of the durable jobs that they work on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from dispatch_core.durable_models import ChunkStatus, DurableChunk, DurableJob, JobStatus, RowError
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.ids import new_id
from dispatch_core.settings import DurableJobsSettings
from relay_sdk import Relay, RelaySettings
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually
from tests.support.relays import QUICK, RELAY, TENANT

KIND = "import"

QUICK_CHUNKS: dict[str, Any] = {
    "lease_seconds": 3.0,
    "sweep_seconds": 0.3,
    "finish_sweep_seconds": 0.5,
    "retry_base_seconds": 0.05,
    "retry_cap_seconds": 0.2,
}

SELDOM: dict[str, Any] = {"sweep_seconds": 600.0, "finish_sweep_seconds": 600.0}
"""So that no sweep does what is to be seen done otherwise."""


def chunk_relay(
    database: TestDatabase | str,
    *,
    tenants: list[str] | None = None,
    durable: dict[str, Any] | None = None,
    pool: Any = None,
    **settings: Any,
) -> Relay:
    """Make a relay with quick settings; `settings` and `durable` come before them."""
    dsn = database if isinstance(database, str) else database.worker_dsn
    listen_dsn = settings.pop("listen_dsn", None)
    return Relay(
        RELAY,
        tenants=tenants or [TENANT],
        dsn=None if pool is not None else dsn,
        listen_dsn=listen_dsn,
        pool=pool,
        settings=RelaySettings(**{**QUICK, "chunk_stop_seconds": 0.3, **settings}),
        durable=DurableJobsSettings(**{**QUICK_CHUNKS, **(durable or {})}),
    )


class Work:
    """Durable jobs of one tenant."""

    def __init__(self, gateway: Any, tenant: str = TENANT) -> None:
        self.repository = repository = DurableRepository(gateway)
        self.tenant = tenant
        # A test and the handlers in it look at the same time, on one connection.
        fetch, turn = repository._fetch, asyncio.Lock()

        async def in_turn(sql: str, *args: object) -> list[Any]:
            async with turn:
                return await fetch(sql, *args)

        repository._fetch = in_turn

    async def submit(
        self, chunks: int | Sequence[Any] = 1, *, kind: str = KIND, params: Any = None, **options: Any
    ) -> UUID:
        """Submit a job of so many chunks, or with these payloads, and ring."""
        job_id = new_id()
        payloads = list(range(1, chunks + 1)) if isinstance(chunks, int) else list(chunks)
        await self.repository.insert_job(self.tenant, job_id, kind, params, submitting=True, **options)
        await self.repository.insert_chunks(self.tenant, job_id, payloads, from_seq=1, notify=False)
        await self.repository.seal(self.tenant, job_id)
        return job_id

    async def job(self, job_id: UUID) -> DurableJob:
        ((job),) = await self.repository.jobs(self.tenant, [job_id], fresh=True)
        return job

    async def chunk(self, job_id: UUID, seq: int = 1) -> DurableChunk:
        ((chunk),) = await self.repository.chunks(self.tenant, job_id, seqs=[seq])
        return chunk

    async def row_errors(self, job_id: UUID) -> list[RowError]:
        return await self.repository.row_errors(self.tenant, job_id, limit=100_000)

    async def control(self, job_id: UUID, action: str) -> Any:
        return await self.repository.control(self.tenant, job_id, action, actor="alice")

    async def end(self, job_id: UUID, timeout: float = HANGS) -> DurableJob:
        """Wait until the job has ended, or waits for a person, and return it."""

        async def ended() -> DurableJob | None:
            job = await self.job(job_id)
            return job if job.status.is_terminal or job.status is JobStatus.NEEDS_REVIEW else None

        job = await eventually(ended, timeout=timeout, message=f"job {job_id} has not ended:")
        assert job is not None
        return job

    async def until_chunk(
        self, job_id: UUID, status: ChunkStatus, seq: int = 1, timeout: float = HANGS
    ) -> DurableChunk:
        """Wait until a chunk stands there, and return it."""

        async def stands() -> DurableChunk | None:
            chunk = await self.chunk(job_id, seq)
            return chunk if chunk.status is status else None

        chunk = await eventually(stands, timeout=timeout, message=f"chunk {seq} is not {status}:")
        assert chunk is not None
        return chunk
