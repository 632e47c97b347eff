"""The values of durable jobs: what is submitted, what a holder is given, what a reader sees, what a decision did.

    job     queued -> running -> completed | completed_with_errors | failed | cancelled | needs_review
            queued | running <-> paused
    chunk   pending -> running -> done | failed | needs_review | cancelled       running -> retry -> running
            running -> pending   (released: the attempt is not counted)

Plain data; nothing here touches the database. Times are the database's clock, but where a name says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Literal
from uuid import UUID

from dispatch_core.models import WriteOutcome

__all__ = [
    "CHUNK_DECISIONS",
    "JOB_ACTIONS",
    "ChunkOutcome",
    "ChunkSettled",
    "ChunkSpec",
    "ChunkStatus",
    "ClaimedChunk",
    "ClaimedChunks",
    "Controlled",
    "DurableChunk",
    "DurableJob",
    "EventPage",
    "Heartbeaten",
    "JobEvent",
    "JobEventType",
    "JobLease",
    "JobProgress",
    "JobStatus",
    "QueryPage",
    "ReapedChunk",
    "Resolved",
    "RowError",
    "Swept",
]

JOB_ACTIONS: Final = ("pause", "resume", "cancel", "retry_failed")
CHUNK_DECISIONS: Final = ("retry", "done", "failed")


class JobStatus(StrEnum):
    """Where a job stands. `completed` and `cancelled` never change; the other two ends only by a retry."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    NEEDS_REVIEW = "needs_review"
    COMPLETED = "completed"
    COMPLETED_WITH_ERRORS = "completed_with_errors"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing of it will run unless a person decides so. A job that needs review has not ended."""
        return self in _ENDS


_ENDS: Final = frozenset({JobStatus.COMPLETED, JobStatus.COMPLETED_WITH_ERRORS, JobStatus.FAILED, JobStatus.CANCELLED})


class ChunkStatus(StrEnum):
    """Where a chunk stands. Only a claim makes it `running`."""

    PENDING = "pending"
    RUNNING = "running"
    RETRY = "retry"
    DONE = "done"
    FAILED = "failed"
    NEEDS_REVIEW = "needs_review"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether it will not run unless a person decides so."""
        return self in (ChunkStatus.DONE, ChunkStatus.FAILED, ChunkStatus.CANCELLED)


class JobEventType(StrEnum):
    """What the timeline tells by itself. An event that was recorded from the side may have another type."""

    SUBMITTED = "submitted"
    STARTED = "started"
    CHUNK_CLAIMED = "chunk_claimed"
    """Of the chunks that one claim took of a job: `seq` is the first, ``detail["seqs"]`` are all, if several."""
    CHUNK_RETRIED = "chunk_retried"
    CHUNK_FAILED = "chunk_failed"
    CHUNK_REAPED = "chunk_reaped"
    CHUNK_NEEDS_REVIEW = "chunk_needs_review"
    PAUSED = "paused"
    RESUMED = "resumed"
    CANCELLED = "cancelled"
    RETRIED = "retried"
    RESOLVED = "resolved"
    COMPLETED = "completed"
    """With or without errors: ``detail["status"]`` tells."""
    FAILED = "failed"
    NEEDS_REVIEW = "needs_review"


# --- submitting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """One chunk to be stored: any JSON value, and how many rows of the input it stands for, where that is known."""

    payload: Any
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class RowError:
    """One row of the input that could not be used. Said again of the same row and code, it replaces what was said.

    `seq` (the chunk's), `lease_version` (of who said it) and `created_at` are there when it was read.
    """

    row: int
    code: str
    message: str = ""
    data: Any = None
    seq: int | None = None
    lease_version: int | None = None
    created_at: datetime | None = None


# --- holding a chunk ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobLease:
    """The right to run one chunk, for a while. Every write under it names all of it but the times.

    `expires_at` is what the claim said; a heartbeat moves it in the database and not here. `local_deadline` is by
    `time.monotonic`, from before the claim was sent, so never later than the true one: past it the lease is lost
    even if the database cannot be asked.
    """

    tenant_id: str
    job_id: UUID
    seq: int
    token: UUID
    version: int
    holder: str
    expires_at: datetime
    local_deadline: float

    @property
    def is_over_locally(self) -> bool:
        """Whether the lease as it was claimed has run out, by this machine's clock alone."""
        return time.monotonic() >= self.local_deadline


@dataclass(frozen=True, slots=True)
class ClaimedChunk:
    """A chunk in a holder's hands. `attempt` counts this one; `checkpoint` is where the last holder left off."""

    lease: JobLease
    kind: str
    params: Any
    idempotent: bool
    max_attempts: int
    payload: Any
    checkpoint: Any
    attempt: int
    rows_total: int
    rows_done: int
    rows_failed: int
    malformed: str | None = None
    """Why what it was submitted with cannot be read, which is None then: written by another program, it is JSON for
    PostgreSQL and not for us. Fail it."""


@dataclass(frozen=True, slots=True)
class ClaimedChunks:
    """What a claim returned."""

    chunks: list[ClaimedChunk]
    waiting: dict[str, float]
    """Tenant -> seconds until its next retry is due."""


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """How a chunk ended well: any JSON value, and its counts; None leaves a count as it was last told."""

    value: Any = None
    rows_done: int | None = None
    rows_failed: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkSettled:
    """What became of a completion. `last`: nothing else of the job waits; call `finish` after the commit."""

    outcome: WriteOutcome
    last: bool


@dataclass(frozen=True, slots=True)
class Heartbeaten:
    """What became of a heartbeat, and where the job stands: who holds a chunk of one that is paused gives it back."""

    outcome: WriteOutcome
    job_status: JobStatus | None


@dataclass(frozen=True, slots=True)
class ReapedChunk:
    """A chunk that was taken back from `holder`, whose attempt that was; `status` is what it is now."""

    tenant_id: str
    job_id: UUID
    seq: int
    status: ChunkStatus
    attempts: int
    lease_version: int
    holder: str


@dataclass(frozen=True, slots=True)
class Swept:
    """One thing that a sweep has done. 'remove' has neither job nor seq, and as `status` how many rows are gone."""

    sweep: Literal["lease", "finish", "remove"]
    tenant_id: str
    job_id: UUID | None
    seq: int | None
    status: str


# --- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job is, by its counters."""

    status: JobStatus
    chunks: Mapping[ChunkStatus, int]
    chunks_total: int
    rows_total: int
    rows_done: int
    rows_failed: int
    started_at: datetime | None
    ended_at: datetime | None
    last_error: str | None

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended."""
        return self.status.is_terminal

    @property
    def fraction(self) -> float | None:
        """How much of it was worked off, 0 to 1: by rows where their number is known, else by chunks; None: no chunks.

        What failed was worked off too; what was cancelled was not.
        """
        if self.status is JobStatus.COMPLETED:
            return 1.0
        if self.rows_total > 0:
            return min((self.rows_done + self.rows_failed) / self.rows_total, 1.0)
        if self.chunks_total > 0:
            return (self.chunks[ChunkStatus.DONE] + self.chunks[ChunkStatus.FAILED]) / self.chunks_total
        return None


@dataclass(frozen=True, slots=True)
class DurableJob:
    """A job as it was read. Its counters are those of `counted_at`; those of one that has ended are exact."""

    tenant_id: str | None
    """None: of the tenant that was bound."""
    job_id: UUID
    kind: str
    params: Any
    idempotent: bool
    max_attempts: int
    priority: int
    status: JobStatus
    rows_total: int
    rows_done: int
    rows_failed: int
    chunks_total: int
    chunks: Mapping[ChunkStatus, int]
    counted_at: datetime
    last_error: str | None
    created_by: str | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    updated_at: datetime

    @property
    def is_terminal(self) -> bool:
        """Whether it has ended."""
        return self.status.is_terminal

    @property
    def progress(self) -> JobProgress:
        """How far it is."""
        return JobProgress(
            self.status,
            self.chunks,
            self.chunks_total,
            self.rows_total,
            self.rows_done,
            self.rows_failed,
            self.started_at,
            self.ended_at,
            self.last_error,
        )


@dataclass(frozen=True, slots=True)
class DurableChunk:
    """A chunk as it was read; `lease_version` is what a claim by compare-and-set goes by."""

    tenant_id: str | None
    job_id: UUID
    seq: int
    payload: Any = field(repr=False)
    status: ChunkStatus
    attempts: int
    lease_version: int
    lease_expires_at: datetime | None
    claimed_by: str | None
    claimed_at: datetime | None
    available_at: datetime | None
    checkpoint: Any = field(repr=False)
    outcome: Any = field(repr=False)
    rows_total: int
    rows_done: int
    rows_failed: int
    last_error: str | None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One line of a timeline. `seq` is None for one of the job itself; `actor`, `channel`, `holder` are data."""

    at: datetime
    type: str
    """A `JobEventType`, or what somebody has recorded from the side. Compares equal to the enum's member."""
    seq: int | None = None
    actor: str | None = None
    channel: str | None = None
    holder: str | None = None
    detail: Any = None
    xid: str = ""
    n: int = 0
    """The event's identity in its job: the transaction that wrote it, and the place within that."""


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events in their order; `next` is where to go on, also after none."""

    events: list[JobEvent]
    next: str


@dataclass(frozen=True, slots=True)
class QueryPage:
    """Rows of a query; pass `after` for those that come next; None: there are none."""

    items: list[dict[str, Any]]
    after: str | None


# --- deciding -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Controlled:
    """What a control action really did.

    `applied`; `already`: it was so, or there was nothing to retry; `too_late`: the job has ended; `refused`: not from
    where the job stands; `unknown`: no such job. `chunks`: how many were changed; `running`: how many are under way.
    """

    outcome: Literal["applied", "already", "too_late", "refused", "unknown"]
    was: JobStatus | None
    status: JobStatus | None
    chunks: int
    running: int

    def and_then(self, more: Controlled) -> Controlled:
        """Return what this and the statement that went on with it have done together."""
        return Controlled(self.outcome, self.was, more.status, self.chunks + more.chunks, more.running)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a decision about a chunk really did: `too_late` where it waits for nobody; where chunk and job stand now."""

    outcome: Literal["applied", "too_late", "refused", "unknown"]
    chunk_status: ChunkStatus | None
    status: JobStatus | None
