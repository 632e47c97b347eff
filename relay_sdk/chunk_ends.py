"""Make the value that the end of a chunk's handler is: what is to be written, or None where nothing is.

Pure functions of what happened. What the database could refuse is found here: a result that cannot be stored fails its
chunk once, S2R-RESULT-INVALID, and it is not run again.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from dispatch_core import codec
from dispatch_core import durable_input as check
from dispatch_core.backoff import full_jitter
from dispatch_core.durable_models import ChunkOutcome
from dispatch_core.errors import InvalidInputError, LeaseLostError
from dispatch_core.settings import DurableJobsSettings
from relay_sdk.chunk_slots import ChunkEnd, ChunkSlot, Done, Failed, Released, Settled
from relay_sdk.chunk_stopping import ChunkStopped
from relay_sdk.ends import describe, may_be_printed
from relay_sdk.metrics import RelayMetrics
from relay_sdk.outcomes import Outcome, Reject, Retry

__all__ = ["ChunkEnds"]

logger = logging.getLogger(__name__)


class ChunkEnds:
    """Turn what happened to a chunk into its end."""

    def __init__(self, settings: DurableJobsSettings, metrics: RelayMetrics) -> None:
        self._settings = settings
        self._metrics = metrics

    def returned(self, slot: ChunkSlot, value: Any) -> ChunkEnd:
        """Return the end for what the handler returned, or raised of the outcomes."""
        if slot.settled_last is not None:
            return Settled(slot.settled_last)
        if slot.said is not None:
            return slot.said
        if slot.completing:
            return self._completed_unseen(slot)
        if slot.stop is not None and slot.stop.is_final:
            return None
        context = slot.context
        assert context is not None
        if isinstance(value, Outcome):
            return self._outcome(slot, value)
        if slot.unsure:
            text = "nobody knows what became of a transaction of its, and the handler went on"
            return self._error(slot, "S2R-HANDLER-ERROR", text, None)
        try:
            if value is None:
                outcome = context.outcome_of(None)
            else:
                outcome = context.outcome_of(value)
                check.json_text("outcome", outcome.value, self._settings.max_checkpoint_bytes)
                self._check_counts(outcome)
        except InvalidInputError as error:
            return self._not_a_result(slot, str(error))
        except Exception as error:  # noqa: BLE001  encoding runs the handler's own classes
            return self._not_a_result(slot, codec.sanitize(error, 2000))
        return Done(outcome, context.take_row_errors())

    @staticmethod
    def _completed_unseen(slot: ChunkSlot) -> ChunkEnd:
        """Return the end of a chunk that was completed in a transaction whose commit was not seen.

        If that is committed, this is refused. If it is not, nothing of it is there twice when the chunk is another's;
        but of one that may not run twice the handler has done more than what is in that transaction.
        """
        if slot.chunk.idempotent:
            return Released()
        text = "S2R-HANDLER-ERROR: the transaction in which the handler completed the chunk was not committed"
        return Failed(text, False, 0.0, [])

    def _outcome(self, slot: ChunkSlot, outcome: Outcome) -> ChunkEnd:
        assert slot.context is not None
        if isinstance(outcome, ChunkStopped):
            if slot.stop is not None:
                return Released()
            return self._error(slot, "S2R-HANDLER-ERROR", "the handler stopped, and nobody had told it to", None)
        if isinstance(outcome, Reject):
            message = codec.sanitize(outcome.code, 200) or "S2R-REJECTED"
            if outcome.message is not None:
                message = f"{message}: {codec.sanitize(outcome.message, 1700)}"
            return Failed(message, False, 0.0, slot.context.take_row_errors())
        if isinstance(outcome, Retry):
            message = "S2R-RETRY" if outcome.message is None else f"S2R-RETRY: {codec.sanitize(outcome.message, 1900)}"
            return self._again(slot, message, outcome.after_seconds)
        kind = type(outcome).__name__
        return self._not_a_result(
            slot,
            f"the handler of a chunk returns a JSON value or a ChunkOutcome, or raises Retry or Reject, not {kind}",
        )

    @staticmethod
    def _check_counts(outcome: ChunkOutcome) -> None:
        check.count("rows_done", outcome.rows_done)
        check.count("rows_failed", outcome.rows_failed)

    def _not_a_result(self, slot: ChunkSlot, why: str) -> ChunkEnd:
        assert slot.context is not None
        logger.error("%s failed: what its handler returned cannot be stored: %s", _name(slot), why)
        return Failed(f"S2R-RESULT-INVALID: {why}", False, 0.0, slot.context.take_row_errors())

    def refused(self, slot: ChunkSlot, error: Exception) -> ChunkEnd:
        """Return the end of a chunk whose end the database refused to store."""
        logger.error("%s failed: its end cannot be stored: %s", _name(slot), error)
        return Failed(f"S2R-RESULT-INVALID: {describe(error)}", False, 0.0, [])

    def raised(self, slot: ChunkSlot, error: BaseException) -> ChunkEnd:
        """Return the end for a handler that raised, or was cancelled."""
        if slot.settled_last is not None:
            if not isinstance(error, (asyncio.CancelledError, LeaseLostError)):
                logger.warning("%s is done, and then its handler raised: %s", _name(slot), describe(error))
            return Settled(slot.settled_last)
        if slot.said is not None:
            return slot.said
        if slot.stop is not None and slot.stop.is_final and not slot.completing:
            return None
        if slot.timed_out:
            self._metrics.handler_timeouts += 1
            text = f"the handler took more than {slot.handler.timeout:g} s"
            return self._error(slot, "S2R-HANDLER-TIMEOUT", text, None)
        if slot.was_cancelled:
            return self.interrupted(slot)
        if isinstance(error, asyncio.CancelledError):
            return self._error(slot, "S2R-HANDLER-CANCELLED", "the handler raised CancelledError", None)
        return self._error(slot, "S2R-HANDLER-ERROR", describe(error), error)

    def not_understood(self, slot: ChunkSlot) -> ChunkEnd:
        """Return the end for an error of a handler that itself failed when it was looked at."""
        if slot.settled_last is not None:
            return Settled(slot.settled_last)
        if slot.said is not None:
            return slot.said
        if slot.stop is not None and slot.stop.is_final:
            return None
        return self._error(slot, "S2R-HANDLER-ERROR", "the handler raised an error that cannot be looked at", None)

    def interrupted(self, slot: ChunkSlot) -> ChunkEnd:
        """Return the end of a chunk whose handler this relay has cancelled."""
        if slot.completing:
            return self._completed_unseen(slot)
        if slot.chunk.idempotent:
            return Released()
        logger.error(
            "%s may not run twice, and its handler was cancelled: it is left to its lease, and then to a person",
            _name(slot),
        )
        return None

    def malformed(self, slot: ChunkSlot, why: str) -> ChunkEnd:
        """Return the end of a chunk that cannot be read, and would not be in any other relay."""
        self._metrics.handler_errors += 1
        logger.error("%s failed: %s", _name(slot), why)
        return Failed(f"S2R-PAYLOAD-INVALID: {why}", False, 0.0, [])

    def not_started(self, slot: ChunkSlot) -> ChunkEnd:
        """Return the end of a chunk whose handler has not begun."""
        return None if slot.stop is not None and slot.stop.is_final else Released()

    def _error(self, slot: ChunkSlot, code: str, message: str, error: BaseException | None) -> ChunkEnd:
        self._metrics.handler_errors += 1
        chunk = slot.chunk
        # One that may not run twice is not tried again because of an error that nobody has foreseen.
        again = chunk.idempotent and chunk.attempt < chunk.max_attempts
        log = partial(
            logger.log,
            logging.WARNING if again else logging.ERROR,
            "%s (%s, attempt %d of %d) %s: %s",
            _name(slot),
            chunk.kind,
            chunk.attempt,
            chunk.max_attempts,
            "is tried again" if again else "failed",
            message,
        )
        try:
            log(exc_info=error if error is not None and may_be_printed(error) else None)
        except Exception:  # noqa: BLE001  a traceback's text is made by the error's own classes
            log()
        text = f"{code}: {message}"
        return self._again(slot, text, None) if chunk.idempotent else self._for_good(slot, text)

    def _again(self, slot: ChunkSlot, message: str, after: float | None) -> ChunkEnd:
        chunk = slot.chunk
        if chunk.attempt >= chunk.max_attempts:
            return self._for_good(slot, message)
        delay = after
        if delay is None:
            delay = full_jitter(chunk.attempt, self._settings.retry_base_seconds, self._settings.retry_cap_seconds)
        # Rows that were found bad come again.
        return Failed(message, True, delay, [])

    @staticmethod
    def _for_good(slot: ChunkSlot, message: str) -> ChunkEnd:
        return Failed(message, False, 0.0, slot.context.take_row_errors() if slot.context is not None else [])


def _name(slot: ChunkSlot) -> str:
    return f"chunk {slot.lease.seq} of job {slot.lease.job_id}"
