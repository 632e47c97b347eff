"""Check a request once, and turn it into the columns of the enqueue call.

All that can be wrong with a request's form is found here, before any SQL. What only the database can tell, such as
whether an absolute deadline has passed, is left to `relay.enqueue`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from dispatch_core import codec
from dispatch_core.errors import InvalidDeadlineError, InvalidInputError
from dispatch_core.ids import new_id
from dispatch_core.models import DispatchRequest

__all__ = [
    "DEFAULT_TTL_SECONDS",
    "MAX_BODY_BYTES",
    "MAX_TTL_SECONDS",
    "EnqueueRow",
    "Preparer",
    "columns",
    "duration",
    "one_or_all",
    "prepare",
    "uuid_array",
]

DEFAULT_TTL_SECONDS: Final = 300.0
MAX_TTL_SECONDS: Final = 7 * 86400.0
MAX_BODY_BYTES: Final = 8 * 1024 * 1024


class EnqueueRow:
    """One checked request, as the columns of the enqueue call. Made by `prepare`; nothing in it can be refused for
    its form any more."""

    __slots__ = (
        "body",
        "delay",
        "expires_at",
        "headers",
        "idempotency_key",
        "job_id",
        "max_attempts",
        "operation",
        "relay_id",
        "ttl",
    )

    def __init__(
        self,
        job_id: UUID,
        relay_id: str,
        operation: str,
        headers: str,
        body: bytes,
        max_attempts: int,
        ttl: timedelta | None,
        expires_at: datetime | None,
        delay: timedelta | None,
        idempotency_key: str | None,
    ) -> None:
        self.job_id = job_id
        self.relay_id = relay_id
        self.operation = operation
        self.headers = headers
        self.body = body
        self.max_attempts = max_attempts
        self.ttl = ttl
        self.expires_at = expires_at
        self.delay = delay
        self.idempotency_key = idempotency_key

    @property
    def size(self) -> int:
        """Return about how many bytes the row has on the wire."""
        return len(self.body) + len(self.headers) + 200


def columns(rows: Sequence[EnqueueRow]) -> tuple[object, ...]:
    """Return rows as the arrays of `relay.enqueue`, the ids as the text of one: a value that all have is sent once, or
    not at all where it is the function's default. (Bodies are not compared: they hardly ever are the same.)"""
    if len(rows) == 1:
        row = rows[0]
        return (
            f"{{{row.job_id.hex}}}",
            [row.relay_id],
            [row.operation],
            None if row.headers == "{}" else [row.headers],
            [row.body],
            None if row.max_attempts == 1 else [row.max_attempts],
            None if row.ttl is None else [row.ttl],
            None if row.expires_at is None else [row.expires_at],
            None if row.delay is None else [row.delay],
        )
    return (
        uuid_array([row.job_id for row in rows]),
        one_or_all([row.relay_id for row in rows]),
        one_or_all([row.operation for row in rows]),
        one_or_all([row.headers for row in rows], "{}"),
        [row.body for row in rows],
        one_or_all([row.max_attempts for row in rows], 1),
        one_or_all([row.ttl for row in rows], None),
        one_or_all([row.expires_at for row in rows], None),
        one_or_all([row.delay for row in rows], None),
    )


def uuid_array(ids: Iterable[UUID]) -> str:
    """Return ids as the text of an array, for a parameter that is cast to `text` first.

    Of each element of a list the driver asks whether it is an array itself, which takes ten times as long.

    Raises: InvalidInputError.
    """
    try:
        # A comma every 16 bytes: many times faster than the ids' own texts, joined.
        return f"{{{b''.join([job_id.bytes for job_id in ids]).hex(',', 16)}}}"
    except (AttributeError, TypeError):
        raise InvalidInputError("a job id must be a UUID") from None


_NO_DEFAULT: Final = object()


def one_or_all(values: list[Any], default: object = _NO_DEFAULT) -> list[Any] | None:
    """Return a column as it is sent: one value where all are the same, None where that is the default."""
    first = values[0]
    # The last one first: where values differ, it mostly does.
    if values[-1] != first or values.count(first) != len(values):
        return values
    return None if first == default else [first]


class Preparer:
    """Checks requests against limits and turns them into rows, each with a new job id.

    Neighbours have much in common, so what was checked last is not checked again; only where it is the very same object
    and cannot have changed.
    """

    __slots__ = ("_default_ttl", "_max_body_bytes", "_max_ttl_seconds", "_ttl", "_ttl_given")

    def __init__(
        self,
        *,
        default_ttl_seconds: float = DEFAULT_TTL_SECONDS,
        max_ttl_seconds: float = MAX_TTL_SECONDS,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._default_ttl = timedelta(seconds=default_ttl_seconds)
        self._max_ttl_seconds = max_ttl_seconds
        self._max_body_bytes = max_body_bytes
        # Kept alive by this reference, so nothing else can have its identity.
        self._ttl_given: object = None
        self._ttl = self._default_ttl

    def row(self, request: DispatchRequest) -> EnqueueRow:
        """Prepare one. Raises: as `prepare`."""
        return self._row(_checked(request), codec.encode_headers(request.headers))

    def rows(self, requests: Iterable[DispatchRequest]) -> list[EnqueueRow]:
        """Prepare many at once. Raises: as `prepare`."""
        if not isinstance(requests, (list, tuple)):
            # A generator may give the same map again with something else in it.
            return [self.row(request) for request in requests]
        rows: list[EnqueueRow] = []
        given: object = None
        encoded = "{}"
        for request in requests:
            headers = _checked(request).headers
            if headers is not given:
                encoded = codec.encode_headers(headers)
                # Never None: that is a request without headers, and not one that is like the last one.
                given = headers if headers.__class__ is dict else _NO_DEFAULT
            rows.append(self._row(request, encoded))
        return rows

    def _row(self, request: DispatchRequest, headers: str) -> EnqueueRow:
        attempts = request.max_attempts
        if attempts.__class__ is not int or not 1 <= attempts < 2**31:
            raise InvalidInputError(f"max_attempts must be a whole number from 1 up, not {attempts!r}")
        ttl: timedelta | None = None
        if request.expires_at is not None:
            if request.ttl is not None:
                raise InvalidDeadlineError("give ttl or expires_at, not both")
            _check_expires_at(request.expires_at, self._max_ttl_seconds)
        elif request.ttl is None:
            ttl = self._default_ttl
        elif request.ttl is self._ttl_given:
            ttl = self._ttl
        else:
            ttl = duration("ttl", request.ttl, self._max_ttl_seconds)
            if not ttl:
                raise InvalidDeadlineError("ttl must be positive")
            self._ttl_given, self._ttl = request.ttl, ttl
        delay = None
        if request.delay is not None:
            delay = duration("delay", request.delay, self._max_ttl_seconds)
            if ttl is not None and delay >= ttl:
                raise InvalidDeadlineError(
                    f"a delay of {delay.total_seconds():g} s reaches the deadline, after {ttl.total_seconds():g} s: "
                    "the job could never run"
                )
        key = request.idempotency_key
        return EnqueueRow(
            new_id(),
            codec.check_name("relay_id", request.relay_id),
            codec.check_name("operation", request.operation),
            headers,
            codec.encode_body(request.body, request.json, max_bytes=self._max_body_bytes),
            attempts,
            ttl,
            request.expires_at,
            delay,
            None if key is None else codec.check_name("idempotency_key", key),
        )


def _checked(request: DispatchRequest) -> DispatchRequest:
    if not isinstance(request, DispatchRequest):
        raise InvalidInputError(f"a request must be a DispatchRequest, not {type(request).__name__}")
    return request


def prepare(
    request: DispatchRequest,
    *,
    default_ttl_seconds: float = DEFAULT_TTL_SECONDS,
    max_ttl_seconds: float = MAX_TTL_SECONDS,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> EnqueueRow:
    """Check a request and turn it into a row, with a new job id.

    Raises: InvalidNameError, InvalidHeadersError, InvalidBodyError, InvalidDeadlineError, InvalidInputError; all before
    any SQL.
    """
    preparer = Preparer(
        default_ttl_seconds=default_ttl_seconds, max_ttl_seconds=max_ttl_seconds, max_body_bytes=max_body_bytes
    )
    return preparer.row(request)


def duration(name: str, value: object, limit_seconds: float) -> timedelta:
    """Return seconds or a timedelta as what PostgreSQL stores; zero is allowed. Raises: InvalidDeadlineError."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise InvalidDeadlineError(f"{name} must be seconds or a timedelta, not {type(value).__name__}")
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidDeadlineError(f"{name} must be finite and not negative, not {seconds} s")
    if seconds > limit_seconds:
        raise InvalidDeadlineError(f"{name} is {seconds:g} s; at most {limit_seconds:g} s are allowed")
    # Rounded up: PostgreSQL counts microseconds, and a positive duration must not become zero.
    return timedelta(microseconds=math.ceil(seconds * 1_000_000))


def _check_expires_at(value: object, max_ttl_seconds: float) -> None:
    if not isinstance(value, datetime) or value.tzinfo is None or value.utcoffset() is None:
        raise InvalidDeadlineError("expires_at must be an aware datetime")
    ahead = value.timestamp() - time.time()
    # This clock may differ from the database's, which decides whether the time has passed; so only the far end here,
    # with an hour's grace.
    if ahead > max_ttl_seconds + 3600:
        raise InvalidDeadlineError(f"expires_at is {ahead:.0f} s ahead; at most {max_ttl_seconds:g} s are allowed")
