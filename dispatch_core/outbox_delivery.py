"""Give claimed events to their sinks, some at a time, and turn how each ended into a verdict.

Nothing here touches the database: no connection, lock or transaction is held while a sink runs.

    returned                        delivered
    raised OutboxPark               park
    raised anything else            failed, with its text
    took too long                   failed, S2R-SINK-TIMEOUT
    raised CancelledError itself    failed, S2R-SINK-CANCELLED
    not begun in time, or cut off because the drain was cancelled or a sink raised SystemExit or KeyboardInterrupt
                                    release: nothing is counted
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import anyio
from anyio.abc import TaskGroup

from dispatch_core import codec
from dispatch_core.backoff import full_jitter
from dispatch_core.outbox_models import ClaimedEvent, OutboxEvent, OutboxPark, Sink, Verdict

__all__ = ["Delivery"]

_MAX_REASON_BYTES: Final = 2000

_RELEASED: Final = Verdict("release")
_DELIVERED: Final = Verdict("delivered")

logger = logging.getLogger("relay_dispatch.outbox")


class Delivery:
    """One batch on its way. `verdicts` may be asked for at any moment: what has no end yet is to be released."""

    def __init__(
        self,
        events: Sequence[ClaimedEvent],
        sink_of: Callable[[str], Sink],
        *,
        concurrency: int,
        timeout: float,
        begin_until: float,
        backoff_base: float,
        backoff_cap: float,
    ) -> None:
        """Take times in seconds; `begin_until` is of `anyio.current_time`: no sink is called after it."""
        self.events = events
        self._sink_of = sink_of
        self._concurrency = concurrency
        self._timeout = timeout
        self._begin_until = begin_until
        self._backoff_base = backoff_base
        self._backoff_cap = backoff_cap
        self._verdicts: list[Verdict] = [_RELEASED] * len(events)
        self._next = iter(range(len(events)))
        self._workers = 1
        self._starting = False
        self._clock = time.monotonic
        # Which worker has been delivering since when; and whose sink was cancelled because it took too long.
        self._since: dict[asyncio.Task[object], float] = {}
        self._late: set[asyncio.Task[object]] = set()
        self.fatal: BaseException | None = None
        """SystemExit or KeyboardInterrupt, raised by a sink: for the caller to raise once the batch is settled."""

    @property
    def verdicts(self) -> list[tuple[ClaimedEvent, Verdict]]:
        """What is to be said of each event."""
        return list(zip(self.events, self._verdicts, strict=True))

    async def run(self) -> None:
        """Deliver what can be begun in time; return when no sink runs any more."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        # One timer for all: one each, most of them cancelled unused, costs as much as all the rest of a delivery.
        self._timer = loop.call_later(self._timeout, self._watch, loop)
        try:
            async with anyio.create_task_group() as group:
                await self._work(group)
        finally:
            self._timer.cancel()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the sinks that have taken too long, and come again when the next one will have."""
        now = loop.time()
        following = now + self._timeout
        for task, since in self._since.items():
            if task in self._late:
                continue
            if since + self._timeout <= now:
                self._late.add(task)
                task.cancel()
            else:
                following = min(following, since + self._timeout)
        self._timer = loop.call_at(following, self._watch, loop)

    async def _join(self, group: TaskGroup) -> None:
        self._starting = False
        await self._work(group)

    async def _work(self, group: TaskGroup) -> None:
        task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        last = len(self.events) - 1
        # One iterator for all workers: each event is taken by one of them.
        for place in self._next:
            now = self._clock()
            if self.fatal is not None or now >= self._begin_until:
                return
            if not self._starting and self._workers < self._concurrency and place < last:
                # Started now, it runs as soon as the sink below waits for something; most batches of quick sinks need
                # no second worker, and a task costs more than such a delivery.
                self._starting = True
                self._workers += 1
                group.start_soon(self._join, group)
            self._since[task] = now
            try:
                verdict = await self._deliver(self.events[place], task, cancelled_before)
            except (SystemExit, KeyboardInterrupt) as error:
                # Let out of a task, it would end the event loop at once, and with it the settling of the others.
                self.fatal = error
                group.cancel_scope.cancel()
                return
            finally:
                del self._since[task]
            self._verdicts[place] = verdict

    @property
    def _too_late(self) -> str:
        return f"S2R-SINK-TIMEOUT: its sink did not answer within {self._timeout:g} s"

    async def _deliver(self, claimed: ClaimedEvent, task: asyncio.Task[object], cancelled_before: int) -> Verdict:
        late = False
        try:
            event = OutboxEvent(
                claimed.event_id,
                claimed.tenant_id,
                claimed.kind,
                claimed.key,
                codec.decode_payload(claimed.payload),
                claimed.created_at,
                claimed.attempts,
            )
            try:
                await self._sink_of(claimed.kind)(event)
            finally:
                late = task in self._late
                if late:
                    # It was cancelled by `_watch`, and no longer is; whatever it made of that counts, as it ended.
                    self._late.discard(task)
                    task.uncancel()
            return _DELIVERED
        except OutboxPark as park:
            reason = codec.sanitize(park, _MAX_REASON_BYTES)
            logger.warning("event %s of kind %s is parked by its sink: %s", claimed.event_id, claimed.kind, reason)
            return Verdict("park", reason or "parked by its sink, without a reason")
        except (SystemExit, KeyboardInterrupt):
            raise
        except anyio.get_cancelled_exc_class():
            if task.cancelling() > cancelled_before or anyio.current_effective_deadline() == -math.inf:
                raise  # the drain itself is cancelled
            reason = self._too_late if late else "S2R-SINK-CANCELLED: its sink raised CancelledError by itself"
        except BaseException as error:  # noqa: BLE001  whatever a sink raises, it hurts its own event alone
            text = f"{type(error).__name__}: {codec.sanitize(error)}"
            reason = self._too_late if late else codec.sanitize(text, _MAX_REASON_BYTES)
        # The attempt that has just failed is not among the event's.
        pause = full_jitter(claimed.attempts + 1, self._backoff_base, self._backoff_cap)
        logger.info("event %s of kind %s was not delivered: %s", claimed.event_id, claimed.kind, reason)
        return Verdict("failed", reason, timedelta(seconds=pause))
