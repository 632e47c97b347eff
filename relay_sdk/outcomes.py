"""What a handler says of its job. Each of these can be returned, or raised from any depth of the handler.

    Reply   the job succeeded, and this is the answer          Reject  it failed, for a reason of the handler's own
    Retry   run it again later; this attempt counts            Snooze  run it again later; this attempt does not count

They hold what the handler gave and check durations only; whether a result can be stored is found by the executor, which
ends the job `failed`, S2R-RESULT-INVALID, where it cannot.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, Final

from dispatch_core.codec import UNSET, Headers, Unset
from dispatch_core.errors import InvalidDeadlineError

__all__ = ["Outcome", "Reject", "Reply", "Retry", "Snooze"]

MAX_DELAY_SECONDS: Final = 7 * 86400.0


class Outcome(Exception):  # noqa: N818  (not an error: an answer that may be raised)
    """What the four have in common."""


class Reply(Outcome):
    """End the job `succeeded` with this answer.

    `body` is bytes or str; for JSON see `Reply.json`. `status` is the handler's own number, an HTTP status as a rule.
    """

    def __init__(
        self,
        body: bytes | bytearray | memoryview | str | None = None,
        *,
        status: int | None = 200,
        headers: Headers | None = None,
        value: Any | Unset = UNSET,
    ) -> None:
        # Nothing goes to Exception: its `args` would be a second copy of what the attributes hold.
        self.body = body
        self.value = value
        self.status = status
        self.headers = headers

    @classmethod
    def json(cls, value: Any, *, status: int | None = 200, headers: Headers | None = None) -> Reply:
        """Make a reply whose body is `value` as JSON; it is encoded when the handler is done with it."""
        return cls(status=status, headers=headers, value=value)

    def __str__(self) -> str:
        return f"Reply(status={self.status})"


class Reject(Outcome):
    """End the job `failed`, for good: a foreseen no, such as bad input or an unknown customer.

    `code` is the handler's own, at most 200 bytes; anything that PostgreSQL cannot store in the texts is replaced.
    """

    def __init__(self, code: str, message: str | None = None, *, status: int | None = None) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.status = status


class Retry(Outcome):
    """Run the job again, after `after` (seconds or timedelta; None: the relay's backoff).

    This attempt counts. With none left, or where it would start past the deadline, the job ends `failed`,
    S2R-RETRY-EXHAUSTED, with `message`.
    """

    def __init__(self, after: float | timedelta | None = None, *, message: str | None = None) -> None:
        super().__init__(after, message)
        self.after_seconds = None if after is None else _seconds(after)
        self.message = message


class Snooze(Outcome):
    """Run the job again after `after` (seconds or timedelta), as if this attempt had not been.

    Where it would start past the deadline, the job ends `failed`, S2R-RETRY-EXHAUSTED, with `message`.
    """

    def __init__(self, after: float | timedelta, *, message: str | None = None) -> None:
        super().__init__(after, message)
        self.after_seconds = _seconds(after)
        self.message = message


def _seconds(after: object) -> float:
    if isinstance(after, timedelta):
        seconds = after.total_seconds()
    elif isinstance(after, (int, float)) and not isinstance(after, bool):
        seconds = float(after)
    else:
        raise InvalidDeadlineError(f"after= must be seconds or a timedelta, not {type(after).__name__}")
    if not math.isfinite(seconds) or not 0 <= seconds <= MAX_DELAY_SECONDS:
        raise InvalidDeadlineError(f"after= must be from 0 to {MAX_DELAY_SECONDS:g} s, not {seconds:g} s")
    return seconds
