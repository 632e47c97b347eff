"""Make values of the rows that the functions of durable jobs return: records of the driver's, or maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from dispatch_core import codec
from dispatch_core.durable_models import (
    ChunkStatus,
    ClaimedChunk,
    ClaimedChunks,
    DurableChunk,
    DurableJob,
    JobEvent,
    JobEventType,
    JobLease,
    JobStatus,
    RowError,
)

__all__ = ["chunk_of", "claimed_of", "event_of", "job_of", "json_of", "row_error_of", "status_or_none"]

_TYPES: Final = {event.value: event for event in JobEventType}
_SHARED: Final = ("tenant_id", "job_id", "kind", "idempotent", "max_attempts", "lease_expires_at")
_UNREADABLE: Final = (ValueError, RecursionError)
"""JSON that is too deep, or a number of more digits than Python reads: written by another program."""
_COUNTS: Final = [(status, f"chunks_{status}") for status in ChunkStatus]


def json_of(text: str | None) -> Any:
    """Return the JSON value of a column, None where there is none; one that cannot be read as its text."""
    if text is None:
        return None
    try:
        return codec.decode_payload(text)
    except _UNREADABLE:
        return text


def status_or_none(value: str | None) -> JobStatus | None:
    """Return a job's status; None where a reader is shown none: being submitted, being removed, no such job."""
    return None if value is None or value in ("submitting", "removing") else JobStatus(value)


def claimed_of(rows: Sequence[Any], token: UUID, holder: str, deadline: Callable[[], float]) -> ClaimedChunks:
    """Return what a claim took; `deadline` is the local one of all its leases."""
    until = deadline()
    claimed = ClaimedChunks([], {})
    first: Any = None
    params: Any = None
    unread: str | None = None
    for row in rows:
        if row["params"] is not None:
            # What the chunks of a job share may come with the first of them alone, and is read once.
            first = tuple(map(row.__getitem__, _SHARED))
            try:
                params, unread = codec.decode_payload(row["params"]), None
            except _UNREADABLE as error:
                params, unread = None, f"the job's params cannot be read: {codec.sanitize(error, 500)}"
        elif row["outcome"] == "waiting":
            claimed.waiting[row["tenant_id"]] = row["wait"]
            continue
        tenant, job_id, kind, idempotent, max_attempts, expires_at = first
        payload = checkpoint = None
        malformed = unread
        try:
            payload = codec.decode_payload(row["payload"])
            if row["checkpoint"] is not None:
                checkpoint = codec.decode_payload(row["checkpoint"])
        except _UNREADABLE as error:
            malformed = f"its payload or checkpoint cannot be read: {codec.sanitize(error, 500)}"
        claimed.chunks.append(
            ClaimedChunk(
                JobLease(tenant, job_id, row["seq"], token, row["lease_version"], holder, expires_at, until),
                kind,
                params,
                idempotent,
                max_attempts,
                payload,
                checkpoint,
                row["attempts"],
                row["rows_total"],
                row["rows_done"],
                row["rows_failed"],
                malformed,
            )
        )
    return claimed


def job_of(row: Mapping[str, Any], tenant: str | None) -> DurableJob:
    """Return a job."""
    return DurableJob(
        tenant,
        row["job_id"],
        row["kind"],
        json_of(row["params"]),
        row["idempotent"],
        row["max_attempts"],
        row["priority"],
        JobStatus(row["status"]),
        row["rows_total"],
        row["rows_done"],
        row["rows_failed"],
        row["chunks_total"],
        {status: row[column] for status, column in _COUNTS},
        row["counted_at"],
        row["last_error"],
        row["created_by"],
        row["created_at"],
        row["started_at"],
        row["ended_at"],
        row["updated_at"],
    )


def chunk_of(row: Mapping[str, Any], tenant: str | None) -> DurableChunk:
    """Return a chunk."""
    return DurableChunk(
        tenant,
        row["job_id"],
        row["seq"],
        json_of(row["payload"]),
        ChunkStatus(row["status"]),
        row["attempts"],
        row["lease_version"],
        row["lease_expires_at"],
        row["claimed_by"],
        row["claimed_at"],
        row["available_at"],
        json_of(row["checkpoint"]),
        json_of(row["outcome"]),
        row["rows_total"],
        row["rows_done"],
        row["rows_failed"],
        row["last_error"],
        row["created_at"],
        row["updated_at"],
        row["ended_at"],
    )


def row_error_of(row: Mapping[str, Any]) -> RowError:
    """Return a bad row."""
    return RowError(
        row["row_no"],
        row["code"],
        row["message"],
        json_of(row["data"]),
        row["seq"],
        row["lease_version"],
        row["created_at"],
    )


def event_of(row: Mapping[str, Any]) -> JobEvent:
    """Return an event."""
    return JobEvent(
        row["at"],
        _TYPES.get(row["type"], row["type"]),
        row["seq"],
        row["actor"],
        row["channel"],
        row["holder"],
        json_of(row["detail"]),
        row["xid"],
        row["n"],
    )
