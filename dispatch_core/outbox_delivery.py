"""Give claimed events to their sinks, some at a time, and turn how each ended into a verdict.

Nothing here touches the database: no connection, lock or transaction is held while a sink runs.

    returned                        delivered
    raised OutboxPark               park
    raised OutboxRetry              failed, with its text; not again before its delay
    raised anything else            failed, with its text
    took too long                   failed, S2R-SINK-TIMEOUT
    raised CancelledError itself    failed, S2R-SINK-CANCELLED
    raised SystemExit               failed, S2R-SINK-EXIT, and the process ends once the batch is settled
    not begun in time, or cut off because the drain was cancelled or a sink raised SystemExit
                                    release: nothing is counted
    raised KeyboardInterrupt        release: that is a person's, and not the event's doing

A sink that takes events together (`BatchSink`) is called once for all of its own in a batch; each of its answers counts
as if it had been returned or raised for that event alone.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from dispatch_core import codec
from dispatch_core.backoff import full_jitter
from dispatch_core.errors import ConfigurationError
from dispatch_core.outbox_models import ClaimedEvent, OutboxEvent, OutboxPark, OutboxRetry, Sink, Verdict, delay_seconds
from dispatch_core.settings import OutboxSettings

__all__ = ["Delivery", "check_sink"]

_MAX_REASON_BYTES: Final = 2000
_MAX_DELAY_SECONDS: Final = 86400.0

_RELEASED: Final = Verdict("release")
_DELIVERED: Final = Verdict("delivered")

logger = logging.getLogger("relay_dispatch.outbox")


def check_sink(sink: object, settings: OutboxSettings) -> None:
    """Refuse what no event can be delivered to, and settings that the sink refuses. Raises: ConfigurationError."""
    if not callable(sink):
        raise ConfigurationError(f"a sink must be an async callable, not {type(sink).__name__}")
    # Found out at the first event, it would have done its work by then, and would do it at each attempt.
    if not _is_async(sink) or (hasattr(sink, "deliver_many") and not _is_async(sink.deliver_many)):
        raise ConfigurationError(
            f"a sink must be an async function, or an object whose __call__ is one, and {sink!r} is not: async def it"
        )
    check = getattr(sink, "check_settings", None)
    if check is not None:
        check(settings)


def _is_async(function: Any) -> bool:
    """Tell whether a callable is an async function, also below partial() and decorators that name what they wrap."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


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
        self._concurrency = concurrency
        self._timeout = timeout
        self._begin_until = begin_until
        self._backoff_base = backoff_base
        self._backoff_cap = backoff_cap
        self._verdicts: list[Verdict] = [_RELEASED] * len(events)
        # Found once, and not for each event.
        self._sinks = _sinks(events, sink_of)
        self._portions = _portions(events, self._sinks)
        self._next = iter(self._portions)
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
        last = self._portions[-1]
        events, verdicts, sinks, since, late = self.events, self._verdicts, self._sinks, self._since, self._late
        # One iterator for all workers: each event is taken by one of them.
        for portion in self._next:
            now = self._clock()
            if self.fatal is not None or now >= self._begin_until:
                return
            if not self._starting and self._workers < self._concurrency and portion is not last:
                # Started now, it runs as soon as the sink below waits for something; most batches of quick sinks need
                # no second worker, and a task costs more than such a delivery.
                self._starting = True
                self._workers += 1
                group.start_soon(self._join, group)
            since[task] = now
            try:
                if isinstance(portion, int):
                    event = events[portion]
                    try:
                        await sinks[event.kind](event)
                    except BaseException as error:  # noqa: BLE001  whatever a sink raises, it hurts its own event alone
                        answer = self._answer(error, self._was_late(task), task, cancelled_before)
                        verdicts[portion] = self._verdict(event, answer)
                    else:
                        if late:
                            self._was_late(task)
                        verdicts[portion] = _DELIVERED
                else:
                    await self._deliver_together(portion, task, cancelled_before)
            except (SystemExit, KeyboardInterrupt) as error:
                # Let out of a task, it would end the event loop at once, and with it the settling of the others.
                self.fatal = error
                if isinstance(error, SystemExit):
                    # Counted: else an event whose sink exits would end every process that ever claims it, for ever.
                    for place in [portion] if isinstance(portion, int) else portion:
                        verdicts[place] = self._verdict(events[place], error)
                group.cancel_scope.cancel()
                return
            finally:
                del since[task]

    async def _deliver_together(self, places: Sequence[int], task: asyncio.Task[object], cancelled_before: int) -> None:
        events = [self.events[place] for place in places]
        sink: Any = self._sinks[events[0].kind]
        late = False
        answers: Sequence[BaseException | None]
        try:
            try:
                answers = list(await sink.deliver_many(events))
            finally:
                late = self._was_late(task)
            if len(answers) != len(events):
                raise ValueError(f"its sink has answered for {len(answers)} of {len(events)} events")
        except BaseException as error:  # noqa: BLE001  as above
            answers = [self._answer(error, late, task, cancelled_before)] * len(events)
        for place, event, answer in zip(places, events, answers, strict=True):
            self._verdicts[place] = _DELIVERED if answer is None else self._verdict(event, answer)

    def _was_late(self, task: asyncio.Task[object]) -> bool:
        """Tell whether the task was cancelled by `_watch`; it no longer is then, and how its sink ended counts."""
        if task not in self._late:
            return False
        self._late.discard(task)
        task.uncancel()
        return True

    def _answer(
        self, error: BaseException, late: bool, task: asyncio.Task[object], cancelled_before: int
    ) -> BaseException:
        """Return what a sink's error comes to; raise it where it is not the sink's alone."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error
        if isinstance(error, asyncio.CancelledError):
            if task.cancelling() > cancelled_before or anyio.current_effective_deadline() == -math.inf:
                raise error  # the drain itself is cancelled
            if not late:
                return _Failure("S2R-SINK-CANCELLED: its sink raised CancelledError by itself")
        if late and not isinstance(error, OutboxPark):
            return _Failure(f"S2R-SINK-TIMEOUT: its sink did not answer within {self._timeout:g} s")
        return error

    def _verdict(self, claimed: ClaimedEvent, error: BaseException) -> Verdict:
        # The attempt that has just failed is not among the event's.
        pause = full_jitter(claimed.attempts + 1, self._backoff_base, self._backoff_cap)
        try:
            return self._judged(claimed, error, pause)
        except Exception as fault:
            # An error is an object of the sink's own, and may be anything. Raised here, it would end the drainer, and
            # the next one, with nothing counted.
            logger.warning(
                "event %s of kind %s: what its sink raised cannot be read",
                claimed.event_id,
                claimed.kind,
                exc_info=True,
            )
            reason = codec.sanitize(
                f"{type(error).__name__}: it cannot be read: {type(fault).__name__}: {codec.sanitize(fault)}",
                _MAX_REASON_BYTES,
            )
            return Verdict("failed", reason, timedelta(seconds=pause))

    def _judged(self, claimed: ClaimedEvent, error: BaseException, pause: float) -> Verdict:
        if isinstance(error, OutboxPark):
            reason = codec.sanitize(error, _MAX_REASON_BYTES)
            logger.warning("event %s of kind %s is parked by its sink: %s", claimed.event_id, claimed.kind, reason)
            return Verdict("park", reason or "parked by its sink, without a reason")
        if isinstance(error, _Failure):
            reason = str(error)
        elif isinstance(error, SystemExit):
            reason = codec.sanitize(
                f"S2R-SINK-EXIT: its sink raised SystemExit: {codec.sanitize(error)}", _MAX_REASON_BYTES
            )
        elif isinstance(error, OutboxRetry):
            reason = codec.sanitize(error, _MAX_REASON_BYTES)
            # Read anew: a subclass, or whoever caught it, may have put anything there.
            pause = max(pause, min(delay_seconds(error.delay), _MAX_DELAY_SECONDS) * random.uniform(1.0, 1.1))
        else:
            reason = codec.sanitize(f"{type(error).__name__}: {codec.sanitize(error)}", _MAX_REASON_BYTES)
        logger.info("event %s of kind %s was not delivered: %s", claimed.event_id, claimed.kind, reason)
        return Verdict("failed", reason, timedelta(seconds=pause))


class _Failure(Exception):  # noqa: N818  (never raised: a reason)
    """Why a delivery has failed, in words of our own."""


def _raiser(error: LookupError) -> Sink:
    async def sink(_: OutboxEvent) -> None:
        raise error

    return sink


def _sinks(events: Sequence[ClaimedEvent], sink_of: Callable[[str], Sink]) -> dict[str, Sink]:
    """Return the sink of each kind; where there is none, one that says so of each event."""
    sinks: dict[str, Sink] = {}
    for kind in {event.kind for event in events}:
        try:
            sinks[kind] = sink_of(kind)
        except LookupError as error:
            sinks[kind] = _raiser(error)
    return sinks


def _portions(events: Sequence[ClaimedEvent], sinks: Mapping[str, Sink]) -> Sequence[int | list[int]]:
    """Return what is delivered by one call each: the place of an event, or of all those of a sink that takes many.

    Where there are several tenants or kinds they take turns, so that none waits behind another's sinks.
    """
    turns: dict[tuple[str, str], list[int]] = {}
    for place, event in enumerate(events):
        turns.setdefault((event.tenant_id, event.kind), []).append(place)
    together: dict[int, list[int]] = {}
    alone: list[list[int]] = []
    for (_, kind), places in turns.items():
        sink = sinks[kind]
        if hasattr(sink, "deliver_many"):
            together.setdefault(id(sink), []).extend(places)
        else:
            alone.append(places)
    if not together and len(alone) == 1:
        return alone[0]
    rounds = zip_longest(*alone)
    return [*together.values(), *(place for turn in rounds for place in turn if place is not None)]
