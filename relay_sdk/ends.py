"""Make the value that a job's end is: the row that is to be written, or None where nothing is.

Pure functions of what happened. Everything that the database could refuse is found here, because the write of a job's
end must never fail for its content: a result that cannot be stored ends its job `failed`, S2R-RESULT-INVALID, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias

from dispatch_core import codec
from dispatch_core.backoff import full_jitter
from dispatch_core.codec import UNSET
from dispatch_core.errors import InvalidInputError
from dispatch_core.models import Completion, DispatchJob, MalformedJob, PutBack
from relay_sdk.metrics import RelayMetrics
from relay_sdk.outcomes import Reject, Reply, Retry, Snooze
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import RUNNING, Cause, Slot

__all__ = ["End", "Ends", "Expired", "Refused", "Released", "describe", "leaves_of", "may_be_printed"]

logger = logging.getLogger(__name__)

End: TypeAlias = Completion | PutBack | None
"""What is to be written of a job; None: nothing, because it is not ours any more."""


class Expired(Completion):
    """The job's deadline has passed. These three are told by their class: a handler may choose any error code."""

    __slots__ = ()


class Refused(Completion):
    """The database refused the end that the job had."""

    __slots__ = ()


class Released(PutBack):
    """The job is put back for a reason of the relay's."""

    __slots__ = ()


_MAX_MESSAGE_BYTES: Final = 2000
_DESCRIBED_LEAVES: Final = 3
_MAX_MEMBERS: Final = 10_000
_MAX_PRINTED_DEPTH: Final = 30

# As Python itself has them: a class of a handler's may have others, which run code of its own.
_members_of: Final[Callable[[BaseException], tuple[BaseException, ...]]] = vars(BaseExceptionGroup)[
    "exceptions"
].__get__
_name_of: Final[Callable[[type], str]] = vars(type)["__name__"].__get__

_STOPPED: Final = "the relay stopped while the handler ran, and no attempt is left"


class Ends:
    """Turn what happened to a job into its end."""

    def __init__(self, settings: RelaySettings, metrics: RelayMetrics) -> None:
        self._max_result_bytes = settings.max_result_bytes
        self._retry_base = settings.retry_base_seconds
        self._retry_cap = settings.retry_cap_seconds
        self._metrics = metrics
        self._unknown: set[str] = set()

    # --- what a handler said ---

    def returned(self, slot: Slot, outcome: Any) -> End:
        """Return the end for what the handler returned, or raised of the four outcomes."""
        job: Any = slot.job
        if slot.cause is Cause.LOST:
            return None
        if isinstance(outcome, Reply):
            return self._reply(slot, job, outcome)
        if outcome is None:
            return Completion(job.job_id, job.fence, job.tenant_id)
        if isinstance(outcome, Reject):
            try:
                status = _status(outcome.status)
            except InvalidInputError as error:
                return self.not_a_result(slot, str(error))
            code = codec.sanitize(outcome.code, 200) or "S2R-REJECTED"
            message = None if outcome.message is None else codec.sanitize(outcome.message, _MAX_MESSAGE_BYTES)
            return Completion(job.job_id, job.fence, job.tenant_id, "failed", status, None, None, code, message)
        if isinstance(outcome, (Retry, Snooze)):
            delay = outcome.after_seconds
            if delay is None:
                delay = full_jitter(job.attempt, self._retry_base, self._retry_cap)
            message = None if outcome.message is None else codec.sanitize(outcome.message, _MAX_MESSAGE_BYTES)
            return PutBack(
                job.job_id, job.fence, job.tenant_id, delay, isinstance(outcome, Snooze), error_message=message
            )
        kind = type(outcome).__name__
        return self.not_a_result(slot, f"a handler returns Reply, Reject, Retry, Snooze or None, not {kind}")

    def _reply(self, slot: Slot, job: DispatchJob, reply: Reply) -> End:
        if type(reply) is Reply and reply.headers is None and reply.value is UNSET:
            # What nearly all are, without a call.
            plain: Any = b"" if reply.body is None else reply.body
            number: Any = reply.status
            if (
                type(plain) is bytes
                and len(plain) <= self._max_result_bytes
                and type(number) is int
                and 0 <= number < 1000
            ):
                slot.reply_bytes = len(plain)
                return Completion(job.job_id, job.fence, job.tenant_id, "succeeded", number, None, plain)
        try:
            headers = None if reply.headers is None else codec.encode_headers(reply.headers)
            body = codec.encode_body(reply.body, reply.value, max_bytes=self._max_result_bytes)
            # The words of the codec are a request's; here it is the response's limit.
            status = _status(reply.status)
        except InvalidInputError as error:
            return self.not_a_result(slot, str(error).replace("max_body_bytes", "max_result_bytes"))
        except Exception as error:  # noqa: BLE001  encoding runs the handler's own classes
            return self.not_a_result(slot, codec.sanitize(error, _MAX_MESSAGE_BYTES))
        slot.reply_bytes = len(body)
        if headers is not None:
            slot.reply_bytes += len(headers) if headers.isascii() else len(headers.encode())
        return Completion(job.job_id, job.fence, job.tenant_id, "succeeded", status, None, body, None, None, headers)

    def not_a_result(self, slot: Slot, why: str) -> End:
        """Return the end of a job whose handler is done and whose result cannot be stored: it is not run again."""
        job = slot.job
        if slot.cause is Cause.LOST:
            return None
        logger.error("job %s failed: its result cannot be stored: %s", job.job_id, why)
        return _failed(job, "S2R-RESULT-INVALID", why)

    def raised(self, slot: Slot, error: BaseException) -> End:
        """Return the end for a handler that raised, or was cancelled."""
        job = slot.job
        assert not isinstance(job, MalformedJob)
        cause = slot.cause
        if cause is Cause.LOST:
            return None
        if cause is Cause.SHUTDOWN:
            return self.released(slot)
        if cause is Cause.DEADLINE:
            return self.expired(job)
        if cause is Cause.TIMEOUT:
            self._metrics.handler_timeouts += 1
            seconds = slot.handler.timeout if slot.handler else 0.0
            return self._error(job, "S2R-HANDLER-TIMEOUT", f"the handler took more than {seconds:g} s", None)
        if isinstance(error, asyncio.CancelledError):
            return self._error(job, "S2R-HANDLER-CANCELLED", "the handler raised CancelledError", None)
        return self._error(job, "S2R-HANDLER-ERROR", describe(error), error)

    def not_understood(self, slot: Slot) -> End:
        """Return the end for an error of a handler that itself failed when it was looked at."""
        job = slot.job
        assert not isinstance(job, MalformedJob)
        if slot.cause is not None and slot.cause is not Cause.TIMEOUT:
            return self.cancelled_before_start(slot)
        return self._error(job, "S2R-HANDLER-ERROR", "the handler raised an error that cannot be looked at", None)

    def _error(self, job: DispatchJob, code: str, message: str, error: BaseException | None) -> End:
        self._metrics.handler_errors += 1
        again = not job.last_attempt
        log = partial(
            logger.log,
            logging.WARNING if again else logging.ERROR,
            "job %s (%s, attempt %d of %d) %s: %s",
            job.job_id,
            job.operation,
            job.attempt,
            job.max_attempts,
            "is tried again" if again else "failed",
            message,
        )
        try:
            log(exc_info=error if error is not None and may_be_printed(error) else None)
        except Exception:  # noqa: BLE001  a traceback's text is made by the error's own classes
            log()
        if not again:
            return _failed(job, code, message)
        delay = full_jitter(job.attempt, self._retry_base, self._retry_cap)
        return PutBack(job.job_id, job.fence, job.tenant_id, delay, False, code, message)

    # --- what happened without a handler ---

    def cancelled_before_start(self, slot: Slot) -> End:
        """Return the end of a job whose handler was kept from starting."""
        if slot.cause is Cause.LOST:
            return None
        if slot.cause is Cause.SHUTDOWN:
            return self.released(slot)
        job = slot.job
        assert not isinstance(job, MalformedJob)
        return self.expired(job)

    def released(self, slot: Slot) -> End:
        """Give a job back because the relay stops; the attempt too, where its handler has not started."""
        job = slot.job
        started = slot.state is RUNNING
        return Released(job.job_id, job.fence, job.tenant_id, 0.0, not started, "S2R-RELAY-STOPPED", _STOPPED)

    def sent_away(self, slot: Slot, delay: float) -> End:
        """Give a job back for a while because its operation has no room; the attempt too."""
        job = slot.job
        return Released(
            job.job_id, job.fence, job.tenant_id, delay, True, "S2R-RELAY-BUSY", "no room before the deadline"
        )

    def expired(self, job: DispatchJob) -> Completion:
        """Return a completion that the database answers with `expired`, because it comes after the deadline."""
        return _failed(job, "S2R-EXPIRED", "the deadline passed before a result", Expired)

    def unknown_operation(self, job: DispatchJob) -> Completion:
        """Return the end of a job that no handler is for; logged once an operation, as far as a relay can remember."""
        if job.operation not in self._unknown and len(self._unknown) < 1000:
            self._unknown.add(job.operation)
            logger.error("jobs for operation %r fail: this relay has no handler for it", job.operation)
        return _failed(job, "S2R-UNKNOWN-OPERATION", f"this relay has no handler for operation {job.operation!r}")

    def malformed(self, job: MalformedJob) -> Completion:
        """Return the end of a job whose stored headers nobody can read."""
        return _failed(job, "S2R-HEADERS-INVALID", str(job.error))

    def refused(self, slot: Slot, error: Exception) -> Completion:
        """Return the end of a job whose end the database refused to store."""
        slot.reply_bytes = 0
        return _failed(slot.job, "S2R-RESULT-INVALID", f"the result could not be stored: {describe(error)}", Refused)


def _failed(
    job: DispatchJob | MalformedJob, code: str, message: str, kind: type[Completion] = Completion
) -> Completion:
    text = codec.sanitize(message, _MAX_MESSAGE_BYTES)
    return kind(job.job_id, job.fence, job.tenant_id, "failed", error_code=code, error_message=text)


def _status(status: object) -> int | None:
    if status is None:
        return None
    if isinstance(status, int) and not isinstance(status, bool) and -(2**63) <= status < 2**63:
        return int(status)
    raise InvalidInputError("the status of a reply must be a whole number that fits 64 bits")


def describe(error: BaseException) -> str:
    """Return the text that is stored of an error: its class and message, and of a group those of its first leaves.

    Never raises, whatever the error's ``str()`` does.
    """
    texts = [_describe_one(error)]
    if isinstance(error, BaseExceptionGroup):
        leaves = islice(leaves_of(error), _DESCRIBED_LEAVES)
        texts.append("; ".join(_describe_one(leaf) for leaf in leaves))
    return codec.sanitize(": ".join(texts), _MAX_MESSAGE_BYTES)


def _describe_one(error: BaseException) -> str:
    text = codec.sanitize(error, _MAX_MESSAGE_BYTES)
    # Not `type(error).__name__`, which a metaclass may answer.
    name = _name_of(type(error))
    return f"{name}: {text}" if text else name


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group, at any depth, that are no groups themselves, in order; or else the error itself.

    Nothing is called that a handler's class may override, and the stack does not grow with the depth. Ends early where
    a group has very many members.
    """
    waiting = [error]
    for _ in range(_MAX_MEMBERS):
        if not waiting:
            return
        member = waiting.pop()
        if issubclass(type(member), BaseExceptionGroup):
            waiting.extend(reversed(_members_of(member)))
        else:
            yield member


def may_be_printed(error: BaseException) -> bool:
    """Whether a log may print the traceback: that of a group in a group in a group… exhausts the stack."""
    depth = 0
    level = [error]
    while level and depth < _MAX_PRINTED_DEPTH:
        level = [
            member
            for group in level[:_MAX_MEMBERS]
            if issubclass(type(group), BaseExceptionGroup)
            for member in _members_of(group)
        ]
        depth += 1
    return not level
