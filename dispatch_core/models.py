"""The values that cross the seams: what a gateway asks, what a relay gets, how a job ended.

Plain data with the semantics of the five states; nothing here touches the database.

    pending -> claimed -> succeeded | failed          pending | claimed -> expired
    claimed -> pending   (released, retried, or its lease was lost while attempts remain)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import UUID

from dispatch_core import codec, errors
from dispatch_core.codec import UNSET, Headers, Unset

__all__ = [
    "ClaimedJobs",
    "Completion",
    "DispatchJob",
    "DispatchRequest",
    "DispatchResult",
    "DispatchStatus",
    "EndedJob",
    "Headers",
    "MalformedJob",
    "PutBack",
    "Settled",
    "WriteOutcome",
]


class DispatchStatus(StrEnum):
    """Where a job stands. `succeeded`, `failed` and `expired` are terminal and never change."""

    PENDING = "pending"
    CLAIMED = "claimed"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self is not DispatchStatus.PENDING and self is not DispatchStatus.CLAIMED


class WriteOutcome(StrEnum):
    """What became of one write under a claim.

    `applied`: it was the current claim. `repeated`: this very completion was applied before, and its reply was lost.
    `stale`: it is not the current claim (any more); nothing changed, and the holder must stop. `busy`: the row was
    locked this moment (heartbeat only); ask again.
    """

    APPLIED = "applied"
    REPEATED = "repeated"
    STALE = "stale"
    BUSY = "busy"


@dataclass(slots=True)
class DispatchRequest:
    """One job to enqueue.

    `ttl` and `delay` are seconds; give `ttl` or an aware `expires_at`, not both; with neither the client's default
    holds. `body` is bytes or str; `json` is encoded instead of it. `max_attempts` is how often a handler may start.
    """

    relay_id: str
    operation: str
    _: KW_ONLY
    headers: Headers | None = None
    body: bytes | bytearray | memoryview | str | None = None
    json: Any | Unset = UNSET
    ttl: float | timedelta | None = None
    expires_at: datetime | None = None
    delay: float | timedelta | None = None
    max_attempts: int = 1
    idempotency_key: str | None = None


class _Row:
    """A claimed job's row, of which most is read only when somebody looks.

    What no handler may ever look at would cost as much as the rest of a claim. So these attributes are not there at
    first, and Python then asks `__getattr__`.
    """

    __slots__ = ("_row",)

    _row: Sequence[Any]
    """It begins with headers (JSON), attempt, max_attempts, seq, created_at, expires_at (both seconds since 1970)."""

    if not TYPE_CHECKING:  # or every attribute would be allowed

        def __getattr__(self, name: str) -> Any:
            read = _READ.get(name)
            if read is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            value = read(self._row, self)
            setattr(self, name, value)
            return value


_READ: Final[dict[str, Callable[[Sequence[Any], Any], Any]]] = {
    "request_headers": lambda row, job: codec.decode_headers(row[0], job.job_id),
    "attempt": lambda row, _: row[1],
    "max_attempts": lambda row, _: row[2],
    "seq": lambda row, _: row[3],
    # Exact to the microsecond until the year 2242.
    "created_at": lambda row, _: datetime.fromtimestamp(row[4], UTC),
    "expires_at": lambda row, _: datetime.fromtimestamp(row[5], UTC),
}


@dataclass(slots=True, eq=False)
class DispatchJob(_Row):
    """One claimed job, as a handler sees it.

    `expires_at` is the deadline by the database's clock. `local_deadline` is the same moment on this process's
    monotonic clock, never later than the true one: use `remaining()`.
    """

    job_id: UUID
    tenant_id: str
    relay_id: str
    operation: str
    request_headers: dict[str, str | list[str]]
    # b"" until fetched, for a body over the claim's limit (`body_pending`); a handler always sees the whole.
    body: bytes
    attempt: int
    max_attempts: int
    fence: int
    created_at: datetime
    expires_at: datetime
    local_deadline: float
    seq: int
    body_pending: bool = False

    @property
    def headers(self) -> dict[str, str | list[str]]:
        return self.request_headers

    @property
    def deadline(self) -> datetime:
        """The moment at which the job ends `expired`, by the database's clock."""
        return self.expires_at

    @property
    def last_attempt(self) -> bool:
        return self.attempt >= self.max_attempts

    def remaining(self) -> float:
        """Return the seconds to the deadline, 0.0 when it has passed; a skewed wall clock does not matter."""
        return max(0.0, self.local_deadline - time.monotonic())

    def json(self) -> Any:
        """Decode the body as JSON. Raises `InvalidBodyError` when it is none."""
        return codec.decode_json(self.body)

    @classmethod
    def of_row(
        cls,
        row: Sequence[Any],
        job_id: UUID,
        tenant_id: str,
        relay_id: str,
        operation: str,
        body: bytes,
        fence: int,
        local_deadline: float,
        body_pending: bool,
    ) -> Self:
        """Make a job whose other values are read out of `row` when they are asked for (see `_Row`).

        The headers in it must have been read once without an error.
        """
        job = cls.__new__(cls)
        job._row = row  # type: ignore[misc]  # of the base class, which mypy does not count
        job.job_id = job_id
        job.tenant_id = tenant_id
        job.relay_id = relay_id
        job.operation = operation
        job.body = body
        job.fence = fence
        job.local_deadline = local_deadline
        job.body_pending = body_pending
        return job

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies, and those sent to other processes, have all values in place of the driver's row.
        return type(self), tuple(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, slots=True)
class MalformedJob:
    """A claimed job whose stored headers are malformed; the relay ends it `failed`, `S2R-HEADERS-INVALID`."""

    job_id: UUID
    tenant_id: str
    attempt: int
    fence: int
    error: errors.MalformedHeadersError


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that a sweep, a claim or a reclaim ended or put back: whoever made the call rings for it."""

    tenant_id: str
    relay_id: str
    job_id: UUID
    status: DispatchStatus


@dataclass(slots=True)
class ClaimedJobs:
    """What one claim returned.

    `looked_at` counts the rows it took or ended: below the limit, there was no more above the cursors. `next_due` is
    the number of seconds until the earliest delayed job of each tenant that has one. `sweep_is_due`: where the claim
    asked for it, `run_sweeps` has something to do. `waited_seconds`: how long it waited for its turn before it looked.
    """

    jobs: list[DispatchJob] = field(default_factory=list)
    malformed: list[MalformedJob] = field(default_factory=list)
    expired: list[EndedJob] = field(default_factory=list)
    next_due: dict[str, float] = field(default_factory=dict)
    looked_at: int = 0
    # Per tenant: rows looked at and the highest seq among them, for the caller's cursor.
    counts: dict[str, int] = field(default_factory=dict)
    cursors: dict[str, int] = field(default_factory=dict)
    sweep_is_due: bool = False
    waited_seconds: float = 0.0


@dataclass(slots=True)
class Completion:
    """One completion of a batch. Headers, body and texts must be storable: see `codec`.

    `headers_json`: what `codec.encode_headers` has made of the headers, where that is done already; it goes first.
    """

    job_id: UUID
    fence: int
    tenant_id: str | None = None
    status: str = "succeeded"
    response_status: int | None = None
    response_headers: Headers | None = None
    response_body: bytes | None = None
    error_code: str | None = None
    error_message: str | None = None
    headers_json: str | None = None


@dataclass(slots=True)
class PutBack:
    """One job of a batch to be run again after `delay` seconds; `give_back` = this attempt does not count."""

    job_id: UUID
    fence: int
    tenant_id: str | None = None
    delay: float = 0.0
    give_back: bool = False
    error_code: str = "S2R-RETRY-EXHAUSTED"
    error_message: str | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of one row of a batch; `status` is where the job stands then, None where the caller may not know."""

    outcome: WriteOutcome
    status: DispatchStatus | None = None


@dataclass(frozen=True, slots=True)
class DispatchResult:
    """Where a job stands, and how it ended.

    `completed_at` is when the end was stored; a job past its deadline that nobody has ended yet reads `expired`
    without one. `remaining` is the seconds to the deadline when it was read.
    """

    job_id: UUID
    status: DispatchStatus
    response_status: int | None
    response_headers: dict[str, str | list[str]] | None
    response_body: bytes | None
    error_code: str | None
    error_message: str | None
    attempt: int
    created_at: datetime
    claimed_at: datetime | None
    completed_at: datetime | None
    expires_at: datetime
    remaining: float = 0.0

    @property
    def is_terminal(self) -> bool:
        return self.status.is_terminal

    def json(self) -> Any:
        """Decode the response body as JSON; None where there is no body. Raises `InvalidBodyError`."""
        return None if self.response_body is None else codec.decode_json(self.response_body)
