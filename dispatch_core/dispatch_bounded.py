"""Enqueue with a bound on what waits: the calls, and their answers as rows and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from dispatch_core.database import Connection, mapped_errors
from dispatch_core.errors import BacklogFullError, InvalidInputError
from dispatch_core.requests import EnqueueRow, columns, one_or_all

__all__ = ["Bound", "Bounded", "checked_bound", "enqueue_bounded", "enqueue_keyed_bounded", "raise_if_refused"]

Bound: TypeAlias = int
"""How many jobs of a relay may be pending, that one included; 0 is no bound."""

_NO_BOUND: Final = 2**62
_ENQUEUE: Final = (
    "select outcome, job_id, relay_id, pending, date_part('epoch', retry_after), date_part('epoch', took)"
    " from relay.enqueue_bounded($1, $2::text::uuid[], $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
)
_ENQUEUE_KEYED: Final = (
    "select job_id, duplicate, pending, date_part('epoch', retry_after)"
    " from relay.enqueue_keyed_bounded($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)"
)


class Bounded(NamedTuple):
    """What came of an enqueue with bounds: per row, whether it was new, or why it was refused; and per relay how many
    jobs were pending before, counted up to the highest bound; and how long counting took, for all of them."""

    answers: list[bool | BacklogFullError]
    counted: dict[str, int]
    seconds: float = 0.0


def checked_bound(value: object) -> Bound:
    """Return a `max_pending` as it was given. Raises: InvalidInputError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _NO_BOUND:
        raise InvalidInputError(f"max_pending must be a whole number from 0 up (0 = no bound), not {value!r}")
    return value


async def enqueue_bounded(
    conn: Connection,
    tenant: str | None,
    rows: Sequence[EnqueueRow],
    bounds: Sequence[Bound],
    *,
    whole: bool,
    notify: bool,
    timeout: float | None,
) -> Bounded:
    """Store the rows that are not refused; none of them where `whole` and one is. See `relay.enqueue_bounded`."""
    limits = one_or_all([bound or None for bound in bounds])
    with mapped_errors():
        records: list[Any] = await conn.fetch(_ENQUEUE, tenant, *columns(rows), limits, whole, notify, timeout=timeout)
    counted: dict[str, int] = {}
    seconds = 0.0
    places: dict[UUID, int] = {}
    answers: list[bool | BacklogFullError] = [True] * len(rows)
    for outcome, job_id, relay_id, pending, retry_after, took in records:
        if outcome == "counted":
            counted[relay_id] = pending
            seconds += took
            continue
        places = places or {row.job_id: place for place, row in enumerate(rows)}
        place = places[job_id]
        answers[place] = outcome == "full" and BacklogFullError(
            tenant_id=tenant,
            relay_id=relay_id,
            pending=pending,
            max_pending=bounds[place],
            retry_after_seconds=retry_after,
        )
    return Bounded(answers, counted, seconds)


def raise_if_refused(bounded: Bounded, jobs: Mapping[str, int], max_pending: Bound) -> None:
    """Raise what has refused rows that were to be stored all together; `jobs` is how many there are for each relay.

    Raises: BacklogFullError.
    """
    for answer in bounded.answers:
        if isinstance(answer, BacklogFullError) and answer.relay_id is not None:
            raise BacklogFullError(
                tenant_id=answer.tenant_id,
                relay_id=answer.relay_id,
                pending=bounded.counted[answer.relay_id],
                max_pending=max_pending,
                jobs=jobs[answer.relay_id],
                retry_after_seconds=answer.retry_after_seconds,
            )


async def enqueue_keyed_bounded(
    conn: Connection,
    tenant: str | None,
    row: EnqueueRow,
    bound: Bound,
    *,
    lock_timeout_seconds: float,
    notify: bool,
) -> tuple[UUID, bool]:
    """Store a row under its key, or find the job of that key. Raises: BacklogFullError."""
    with mapped_errors(job_id=row.job_id):
        record = await conn.fetchrow(
            _ENQUEUE_KEYED,
            tenant,
            row.job_id,
            row.relay_id,
            row.operation,
            row.headers,
            row.body,
            row.max_attempts,
            row.ttl,
            row.expires_at,
            row.delay,
            row.idempotency_key,
            bound,
            timedelta(seconds=lock_timeout_seconds),
            notify,
        )
    assert record is not None
    job_id, duplicate, pending, retry_after = record
    if job_id is None:
        raise BacklogFullError(
            tenant_id=tenant,
            relay_id=row.relay_id,
            pending=pending,
            max_pending=bound,
            retry_after_seconds=retry_after,
        )
    return job_id, duplicate
