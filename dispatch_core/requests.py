"""Check a request once, and turn it into the columns of the enqueue call.

All that can be wrong with a request's form is found here, before any SQL. What only the database can tell, such as
whether an absolute deadline has passed, is left to `relay.enqueue`.
"""

from __future__ import annotations

import math
import time
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from dispatch_core import codec
from dispatch_core.errors import InvalidDeadlineError, InvalidInputError
from dispatch_core.ids import new_id
from dispatch_core.models import DispatchRequest

__all__ = ["DEFAULT_TTL_SECONDS", "MAX_BODY_BYTES", "MAX_TTL_SECONDS", "EnqueueRow", "duration", "prepare"]

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


_DEFAULT_TTL: Final = timedelta(seconds=DEFAULT_TTL_SECONDS)


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
    if not isinstance(request, DispatchRequest):
        raise InvalidInputError(f"a request must be a DispatchRequest, not {type(request).__name__}")
    attempts = request.max_attempts
    if attempts.__class__ is not int or not 1 <= attempts < 2**31:
        raise InvalidInputError(f"max_attempts must be a whole number from 1 up, not {attempts!r}")
    ttl: timedelta | None = None
    if request.expires_at is not None:
        if request.ttl is not None:
            raise InvalidDeadlineError("give ttl or expires_at, not both")
        _check_expires_at(request.expires_at, max_ttl_seconds)
    elif request.ttl is None:
        ttl = _DEFAULT_TTL if default_ttl_seconds == DEFAULT_TTL_SECONDS else timedelta(seconds=default_ttl_seconds)
    else:
        ttl = duration("ttl", request.ttl, max_ttl_seconds)
        if not ttl:
            raise InvalidDeadlineError("ttl must be positive")
    delay = None if request.delay is None else duration("delay", request.delay, max_ttl_seconds)
    if delay is not None and ttl is not None and delay >= ttl:
        raise InvalidDeadlineError(
            f"a delay of {delay.total_seconds():g} s reaches the deadline, after {ttl.total_seconds():g} s: "
            "the job could never run"
        )
    key = request.idempotency_key
    return EnqueueRow(
        new_id(),
        codec.check_name("relay_id", request.relay_id),
        codec.check_name("operation", request.operation),
        codec.encode_headers(request.headers),
        codec.encode_body(request.body, request.json, max_bytes=max_body_bytes),
        attempts,
        ttl,
        request.expires_at,
        delay,
        None if key is None else codec.check_name("idempotency_key", key),
    )


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
