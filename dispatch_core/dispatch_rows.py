"""Read what the functions of the dispatch room return: records in, values out.

This is the relay's hot path: few objects per row, and none that could be shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from dispatch_core import codec
from dispatch_core.errors import MalformedHeadersError
from dispatch_core.models import (
    ClaimedJobs,
    DispatchJob,
    DispatchResult,
    DispatchStatus,
    EndedJob,
    MalformedJob,
    Settled,
    WriteOutcome,
)

__all__ = ["OUTCOMES", "STATUSES", "claimed", "is_bigint", "results", "settled"]

OUTCOMES: Final = {outcome.value: outcome for outcome in WriteOutcome}
STATUSES: Final = {status.value: status for status in DispatchStatus}
# Settled values are few and immutable, so that a batch of completions makes no object per row.
_SETTLED: Final = {
    (outcome.value, status): Settled(outcome, STATUSES[status] if status else None)
    for outcome in WriteOutcome
    for status in (None, *STATUSES)
}


def is_bigint(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def settled(records: Sequence[Any], count: int) -> list[Settled]:
    answers: list[Settled] = [_SETTLED["stale", None]] * count
    for n, outcome, status in records:
        answers[n - 1] = _SETTLED[outcome, status]
    return answers


def claimed(records: Sequence[Any], relay_id: str, sent_at: float) -> ClaimedJobs:
    found = ClaimedJobs()
    jobs = found.jobs
    for record in records:
        (
            outcome,
            tenant,
            job_id,
            operation,
            headers,
            body,
            body_bytes,
            attempt,
            max_attempts,
            fence,
            seq,
            created_at,
            expires_at,
            remaining,
        ) = record
        if outcome == "delayed":
            found.next_due[tenant] = remaining.total_seconds()
            continue
        found.looked_at += 1
        found.counts[tenant] = found.counts.get(tenant, 0) + 1
        # Claimed jobs come ascending, so the last one is the highest of them.
        found.cursors[tenant] = seq
        if outcome == "expired":
            found.expired.append(EndedJob(tenant, relay_id, job_id, DispatchStatus.EXPIRED))
            continue
        try:
            decoded = {} if headers == "{}" else codec.decode_headers(headers, job_id)
        except MalformedHeadersError as error:
            found.malformed.append(MalformedJob(job_id, tenant, attempt, fence, error))
            continue
        jobs.append(
            DispatchJob(
                job_id,
                tenant,
                relay_id,
                operation,
                decoded,
                b"" if body is None else body,
                attempt,
                max_attempts,
                fence,
                created_at,
                expires_at,
                # From before the call was sent: never later than the true deadline.
                sent_at + remaining.total_seconds(),
                seq,
                body is None and body_bytes > 0,
            )
        )
    return found


def results(
    records: Sequence[Any], ids: Sequence[UUID]
) -> tuple[dict[UUID, DispatchResult | MalformedHeadersError], list[UUID]]:
    """Read the rows of `relay.poll`: the answers, and the ids whose result did not fit any more.

    A job with malformed headers has the error as its answer.
    """
    answers: dict[UUID, DispatchResult | MalformedHeadersError] = {}
    left: list[UUID] = []
    for record in records:
        job_id = ids[record[0] - 1]
        if not record[14]:
            left.append(job_id)
            continue
        headers: dict[str, str | list[str]] | None = None
        if record[5] is not None:
            try:
                headers = codec.decode_headers(record[5], job_id)
            except MalformedHeadersError as error:
                answers[job_id] = error
                continue
        answers[job_id] = DispatchResult(
            job_id,
            STATUSES[record[2]],
            record[4],
            headers,
            record[6],
            record[7],
            record[8],
            record[3],
            record[9],
            record[10],
            record[11],
            record[12],
            record[13].total_seconds(),
        )
    return answers, left
