"""The durable room: jobs of many chunks, each run under a fenced lease, and decided about by people.

    DurableJobStore(database, "acme")
        insert_job, insert_chunks                       a job, in the caller's transaction if he likes
        claim_next_chunk, claim_chunk                   a lease
        heartbeat, checkpoint, record_row_errors        under it
        complete_chunk, fail_chunk, release_chunk       its end
        reap_expired, refresh_counters                  what others left
        set_job_status, set_chunk_statuses, update_job  by hand, compare-and-set
        get_job, get_chunks, events, row_errors, query

A method that takes `conn=` does its work in the open transaction of that connection, whatever codecs, search path or
pooler it has: it commits or rolls back with all else there. Without it, each method is a transaction of its own.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from dispatch_core.durable_claims import ClaimMethods
from dispatch_core.durable_jobs import JobMethods
from dispatch_core.durable_leases import LeaseMethods
from dispatch_core.durable_models import (
    ChunkOutcome,
    ChunkSettled,
    ChunkSpec,
    ChunkStatus,
    ClaimedChunk,
    ClaimedChunks,
    Controlled,
    DurableChunk,
    DurableJob,
    EventPage,
    JobEvent,
    JobEventType,
    JobLease,
    JobProgress,
    JobStatus,
    QueryPage,
    ReapedChunk,
    Resolved,
    RowError,
)
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.durable_side import record_from_the_side
from dispatch_core.settings import DurableJobsSettings

__all__ = [
    "ChunkOutcome",
    "ChunkSettled",
    "ChunkSpec",
    "ChunkStatus",
    "ClaimedChunk",
    "ClaimedChunks",
    "Controlled",
    "DurableChunk",
    "DurableJob",
    "DurableJobStore",
    "DurableJobsSettings",
    "DurableRepository",
    "EventPage",
    "JobEvent",
    "JobEventType",
    "JobLease",
    "JobProgress",
    "JobStatus",
    "QueryPage",
    "ReapedChunk",
    "Resolved",
    "RowError",
]


class DurableJobStore(JobMethods, ClaimMethods, LeaseMethods):
    """Durable jobs of one tenant, on a pool or on a connection.

    Everything is done with the rights of the login that is connected: jobs are inserted by a gateway, claimed by a
    worker. Who submitted a job, and who acts, is data.
    """

    async def record_event(
        self,
        job_id: UUID,
        chunk: DurableChunk | JobLease | int | None,
        event: JobEventType | str,
        actor: str | None = None,
        channel: str | None = None,
        holder: str | None = None,
        detail: Any = None,
    ) -> bool:
        """Add to a job's timeline, or a chunk's, on a connection of the pool; never raises: what fails is logged.

        It waits for no row: not for the job's, though the caller's own transaction has it locked; and for a table that
        is locked, or for a connection, `event_lock_timeout_seconds` at most. False: it was not written.
        """
        seq = chunk.seq if isinstance(chunk, DurableChunk | JobLease) else chunk
        return await record_from_the_side(
            self._database,
            self._settings,
            self._log,
            lambda verbs, seconds: verbs.record_event(
                self._tenant,
                job_id,
                seq,
                event,
                actor=actor,
                channel=channel,
                holder=holder,
                detail=detail,
                lock_timeout_seconds=seconds,
            ),
        )
