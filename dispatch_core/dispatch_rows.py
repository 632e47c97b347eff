"""Write what the functions of the dispatch room take, and read what they return: values to arrays, records to values.

This is the relay's hot path: few objects per row, and none that could be shared. Arrays are dear: the driver asks of
each element whether it is an array itself, which costs more than to encode it. So a column that says nothing is null
as a whole, and ids and numbers go as the text of an array, which the server reads in a tenth of that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from dispatch_core import codec
from dispatch_core.errors import InvalidInputError, InvalidResultError, MalformedHeadersError
from dispatch_core.models import (
    ClaimedJobs,
    Completion,
    DispatchJob,
    DispatchResult,
    DispatchStatus,
    EndedJob,
    MalformedJob,
    Settled,
    WriteOutcome,
)

__all__ = ["OUTCOMES", "STATUSES", "SUCCEEDED", "claimed", "completion_columns", "is_bigint", "results", "settled"]

MAX_ERROR_BYTES: Final = 4000

_COMPARED_BYTES: Final = 1000
"""Whether larger values are all the same is not worth knowing: they would have to be read."""

OUTCOMES: Final = {outcome.value: outcome for outcome in WriteOutcome}
STATUSES: Final = {status.value: status for status in DispatchStatus}
# Settled values are few and immutable, so that a batch of completions makes no object per row.
_SETTLED: Final = {
    (outcome.value, status): Settled(outcome, STATUSES[status] if status else None)
    for outcome in WriteOutcome
    for status in (None, *STATUSES)
}


SUCCEEDED: Final = _SETTLED["applied", "succeeded"]
"""The answer that nearly all have: it may be told by its identity."""


def is_bigint(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


# --- complete ---------------------------------------------------------------------------------------------------------


def completion_columns(
    completions: Sequence[Completion], tenant: str | None
) -> tuple[tuple[object, ...], list[int] | None]:
    """Return the arguments of `relay.complete` from p_tenants to p_error_messages; and, where the rows had to be
    grouped by tenant, the place from which each row sent has come.

    `tenant` is whose those are that name none. Raises: InvalidInputError, InvalidResultError, InvalidHeadersError.
    """
    items = completions
    places: list[int] | None = None
    names: list[str | None] = [item.tenant_id for item in items]
    if names.count(names[0]) == len(names):
        names, counts = [tenant if names[0] is None else names[0]], [len(items)]
    else:
        groups: dict[str | None, list[int]] = {}
        for place, name in enumerate(names):
            groups.setdefault(tenant if name is None else name, []).append(place)
        names, counts = list(groups), [len(group) for group in groups.values()]
        if len(groups) > 1:
            places = [place for group in groups.values() for place in group]
            items = [completions[place] for place in places]
    statuses = [item.status for item in items]
    succeeded = statuses.count("succeeded")
    if succeeded + statuses.count("failed") < len(items):
        wrong = next(status for status in statuses if status not in ("succeeded", "failed"))
        raise InvalidInputError(f"a job completes as succeeded or failed, not {wrong!r}")
    columns = (
        names,
        counts,
        _ids(items),
        _numbers([item.fence for item in items]),
        None if succeeded == len(items) else statuses,
        _response_statuses([item.response_status for item in items]),
        _or_one(
            [
                item.headers_json
                if item.headers_json is not None or item.response_headers is None
                else codec.encode_headers(item.response_headers)
                for item in items
            ]
        ),
        _or_one([item.response_body for item in items]),
        _or_null([None if item.error_code is None else codec.sanitize(item.error_code, 200) for item in items]),
        _or_null(
            [
                None if item.error_message is None else codec.sanitize(item.error_message, MAX_ERROR_BYTES)
                for item in items
            ]
        ),
    )
    return columns, places


def _or_one(column: list[Any]) -> list[Any] | None:
    """Return one value where it is everybody's (see `_COMPLETE`)."""
    first = column[0]
    if (first is None or len(first) <= _COMPARED_BYTES) and column.count(first) == len(column):
        return None if first is None else [first]
    return column


def _or_null(column: list[Any]) -> list[Any] | None:
    return None if column.count(None) == len(column) else column


def _ids(items: Sequence[Completion]) -> str:
    try:
        # A comma every 16 bytes: many times faster than the ids' own texts, joined.
        return f"{{{b''.join([item.job_id.bytes for item in items]).hex(',', 16)}}}"
    except (AttributeError, TypeError):
        raise InvalidInputError("a job id must be a UUID") from None


def _numbers(numbers: list[int]) -> str:
    try:
        if min(numbers) >= -(2**63) and max(numbers) < 2**63:
            first = numbers[0]
            if numbers.count(first) == len(numbers):
                return f"{{{(f'{first:d},' * len(numbers))[:-1]}}}"
            return f"{{{','.join([f'{number:d}' for number in numbers])}}}"
    except (TypeError, ValueError):
        pass
    raise InvalidInputError("a fence must be a whole number that fits 64 bits")


def _response_statuses(numbers: list[int | None]) -> str | None:
    first = numbers[0]
    if first is not None and not is_bigint(first):
        raise InvalidResultError("response_status must be a whole number that fits 64 bits")
    if numbers.count(first) == len(numbers) and len(set(map(type, numbers))) == 1:
        return None if first is None else f"{{{first:d}}}"
    if not all(number is None or is_bigint(number) for number in numbers):
        raise InvalidResultError("response_status must be a whole number that fits 64 bits")
    return f"{{{','.join(['null' if number is None else f'{number:d}' for number in numbers])}}}"


def settled(records: Sequence[Any], count: int) -> list[Settled]:
    """Read a row for each that has an outcome."""
    answers: list[Settled] = [_SETTLED["stale", None]] * count
    for n, outcome, status in records:
        answers[n - 1] = _SETTLED[outcome, status]
    return answers


def settled_together(records: Sequence[Any], count: int, places: Sequence[int] | None) -> list[Settled]:
    """Read a row for each outcome that there is, with the numbers of those that have it; without them, all have it."""
    if len(records) == 1 and records[0][2] is None:
        return [_SETTLED[records[0][0], records[0][1]]] * count
    answers: list[Settled] = [_SETTLED["stale", None]] * count
    for outcome, status, numbers in records:
        answer = _SETTLED[outcome, status]
        for n in numbers:
            answers[n - 1 if places is None else places[n - 1]] = answer
    return answers


# --- claim ------------------------------------------------------------------------------------------------------------

# The columns of a claim, in the order in which they are asked for: first those that are read when somebody asks a job
# for them (see `DispatchJob`). Moments and durations come as numbers: what the driver makes of three of them took
# longer than everything else about a row.
(
    _HEADERS,
    _ATTEMPT,
    _MAX_ATTEMPTS,
    _SEQ,
    _CREATED_AT,
    _EXPIRES_AT,
    _OUTCOME,
    _TENANT,
    _JOB_ID,
    _OPERATION,
    _BODY,
    _BODY_BYTES,
    _FENCE,
    _REMAINING,
) = range(14)


def claimed(records: Sequence[Any], relay_id: str, sent_at: float) -> ClaimedJobs:
    """Read the rows of `CLAIMED_COLUMNS`."""
    found = ClaimedJobs()
    jobs = found.jobs
    add, make = jobs.append, DispatchJob.of_row
    tenant = ""
    # Headers that are right, as text: mostly each job has those of the one before it.
    right: str | None = None
    # Rows come tenant by tenant; one tenant may come twice.
    count = highest = 0
    for record in records:
        outcome = record[_OUTCOME]
        if outcome == "delayed":
            found.next_due[record[_TENANT]] = record[_REMAINING]
            continue
        if outcome == "sweep":
            found.sweep_is_due = True
            continue
        if outcome == "waited":
            # Comes first. The server has counted the time left from after it.
            found.waited_seconds = record[_REMAINING]
            sent_at += found.waited_seconds
            continue
        if record[_TENANT] != tenant:
            _note(found, tenant, count, highest)
            tenant, count, highest = record[_TENANT], 0, 0
        count += 1
        # Claimed jobs come ascending, but those that have expired come before them.
        if record[_SEQ] > highest:
            highest = record[_SEQ]
        job_id = record[_JOB_ID]
        if outcome == "expired":
            found.expired.append(EndedJob(tenant, relay_id, job_id, DispatchStatus.EXPIRED))
            continue
        headers = record[_HEADERS]
        if headers != right or right is None:
            try:
                codec.decode_headers(headers, job_id)
            except MalformedHeadersError as error:
                found.malformed.append(MalformedJob(job_id, tenant, record[_ATTEMPT], record[_FENCE], error))
                continue
            right = headers
        body = record[_BODY]
        # The deadline is counted from before the call was sent, and its wait: never later than the true one.
        deadline = sent_at + record[_REMAINING]
        if body is None:
            pending = record[_BODY_BYTES] > 0
            add(make(record, job_id, tenant, relay_id, record[_OPERATION], b"", record[_FENCE], deadline, pending))
        else:
            add(make(record, job_id, tenant, relay_id, record[_OPERATION], body, record[_FENCE], deadline, False))
    _note(found, tenant, count, highest)
    return found


def _note(found: ClaimedJobs, tenant: str, count: int, highest: int) -> None:
    if count:
        found.looked_at += count
        found.counts[tenant] = found.counts.get(tenant, 0) + count
        found.cursors[tenant] = highest


# --- poll -------------------------------------------------------------------------------------------------------------


def results(
    records: Sequence[Any], ids: Sequence[UUID]
) -> tuple[list[DispatchResult | MalformedHeadersError | None], list[int]]:
    """Read the rows of `relay.poll`: an answer for each of `ids`, None for unknown ones; and the places of those whose
    result did not fit any more.

    A job with malformed headers has the error as its answer.
    """
    answers: list[DispatchResult | MalformedHeadersError | None] = [None] * len(ids)
    left: list[int] = []
    decode = codec.decode_headers
    for (
        n,
        status,
        attempt,
        response_status,
        response_headers,
        response_body,
        error_code,
        error_message,
        created_at,
        claimed_at,
        completed_at,
        expires_at,
        remaining,
        fits,
    ) in records:
        place = n - 1
        if not fits:
            left.append(place)
            continue
        job_id = ids[place]
        headers: dict[str, str | list[str]] | None = None
        if response_headers is not None:
            try:
                headers = decode(response_headers, job_id)
            except MalformedHeadersError as error:
                answers[place] = error
                continue
        answers[place] = DispatchResult(
            job_id,
            STATUSES[status],
            response_status,
            headers,
            response_body,
            error_code,
            error_message,
            attempt,
            created_at,
            claimed_at,
            completed_at,
            expires_at,
            remaining,
        )
    return answers, left
