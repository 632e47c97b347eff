"""Claim batch after batch while there is something, and deliver them beside each other.

    claim ── events ──> a task delivers and settles them; claim again, if more is known of
      │
      └──── nothing ──> wait: for a wake-up, the end of a delivery, the next event's time, or the interval
      │
      └──── no database ──> wait: a backoff with jitter, cut short only by a listening connection that stands again

A batch is for one sink, and of each sink two are under way at most: so while one is settled the next is delivered, and
a sink that hangs holds up nobody's events but its own.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.errors import ConfigurationError, RelayDispatchError, SchemaMismatchError, TenancyError
from dispatch_core.outbox import DrainReport, Outbox, Sink
from dispatch_core.outbox_models import Batch
from gateway_sdk.tasks import Tasks

__all__ = ["DrainLoop", "added"]

_BATCHES_PER_SINK: Final = 2

_BACKOFF_BASE: Final = 0.25

_SEARCH_SECONDS: Final = 1.0
"""The longest pause while more is known of than can be begun."""

_WAKE_SEARCHES_SECONDS: Final = 0.1
"""A wake-up is worth a search of its own so often, while more is known of than can be begun."""

logger = logging.getLogger("relay_dispatch.outbox")


def added(one: DrainReport, other: DrainReport) -> DrainReport:
    """Return the sum of two reports."""
    names = [field.name for field in dataclasses.fields(DrainReport)]
    return DrainReport(**{name: getattr(one, name) + getattr(other, name) for name in names})


class DrainLoop:
    """Drains an `Outbox` for ever, or until nothing is due. All times are seconds."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        batch: int,
        interval: float,
        backoff_cap: float = 10.0,
        on_report: Callable[[DrainReport], None] = lambda _: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._outbox = outbox
        self._batch = batch
        self._interval = interval
        self._backoff = Backoff(_BACKOFF_BASE, backoff_cap)
        self._in_hand: Counter[int] = Counter()
        """Batches under way, by the identity of their sink."""
        self._stirred = anyio.Event()
        self._is_back = anyio.Event()
        self._woken = False
        self._searched_at = 0.0
        self._has_claimed = False
        self._is_failing = False
        self._error: RelayDispatchError | None = None
        self._on_report = on_report
        self._on_stop = on_stop
        self.total = DrainReport()
        """What all drains together did."""

    def wake(self) -> None:
        """Look for events now. From a call-back, at any time."""
        self._woken = True
        self._stirred.set()

    def database_is_back(self) -> None:
        """End a backoff, and look for events now."""
        self._is_back.set()
        self.wake()

    async def run(self, first_try_is_over: Callable[[], None]) -> None:
        """Drain until cancelled; then the batches at hand are settled as far as they got, the rest is released.

        Raises: what no pause can mend: ConfigurationError; SchemaMismatchError and TenancyError where no claim was ever
        made; what is no RelayDispatchError.
        """
        async with Tasks() as tasks:
            try:
                while True:
                    await self._turn(tasks, first_try_is_over)
            finally:
                self._on_stop()

    async def _turn(self, tasks: Tasks, first_try_is_over: Callable[[], None]) -> None:
        """Make one claim, and the pause after it."""
        self._stirred, self._woken = anyio.Event(), False
        # From before the claim: one that fails as the listening connection comes to stand is tried again at once.
        self._is_back = anyio.Event()
        try:
            goes_on = await self._claim(tasks)
        except RelayDispatchError as error:
            if self._is_final(error):
                raise
            first_try_is_over()
            await self._wait_out(error)
            return
        first_try_is_over()
        self._mended()
        if not goes_on:
            with anyio.move_on_after(self._pause()):
                await self._stirred.wait()
            self._search_if_woken()

    async def run_dry(self) -> DrainReport:
        """Drain until nothing is due and no sink runs; return what was done. Raises: as `Outbox.drain`."""
        async with Tasks() as tasks:
            while True:
                self._stirred = anyio.Event()
                if await self._claim(tasks):
                    continue
                if self._in_hand.total() or self._stirred.is_set():
                    await self._stirred.wait()
                elif self._outbox.knows_more:
                    # Nothing above the cursors, and a claim from the beginning, which would tell, is not allowed yet.
                    with anyio.move_on_after(_SEARCH_SECONDS):
                        await self._stirred.wait()
                else:
                    break
        if self._error is not None:
            raise self._error
        return self.total

    # --- one batch ------------------------------------------------------------------------------------------------

    async def _claim(self, tasks: Tasks) -> bool:
        """Claim a batch and begin to deliver it; tell whether there is reason to claim again at once."""
        batch = await self._outbox.claim(self._batch, lane_of=self._lane_of)
        self._has_claimed = True
        if not batch.events:
            self._count(DrainReport(expired=batch.expired, reclaimed=batch.reclaimed))
            return False
        lane = id(self._sink_of(batch.events[0].kind))
        self._in_hand[lane] += 1
        tasks.start_soon(partial(self._deliver, batch, lane))
        return self._outbox.knows_more

    async def _deliver(self, batch: Batch, lane: int) -> None:
        try:
            self._count(await self._outbox.deliver(batch))
        except RelayDispatchError as error:
            logger.error("what became of %d events could not be written: %s", len(batch.events), error)
            self._error = self._error or error
        finally:
            self._in_hand[lane] -= 1
            self._stirred.set()

    def _count(self, report: DrainReport) -> None:
        self.total = added(self.total, report)
        self._on_report(report)

    def _sink_of(self, kind: str) -> Sink | None:
        return self._outbox.sinks.get(kind, self._outbox.default_sink)

    def _lane_of(self, kind: str) -> object | None:
        sink = self._sink_of(kind)
        return None if sink is None or self._in_hand[id(sink)] >= _BATCHES_PER_SINK else sink

    # --- pauses ---------------------------------------------------------------------------------------------------

    def _pause(self) -> float:
        pause = self._interval * random.uniform(0.8, 1.0)
        due = self._outbox.next_due_in()
        if due is not None:
            # A little later, so that one search finds all that are due together, and drainers do not come in step.
            pause = min(pause, due + random.uniform(0.005, 0.05))
        return min(pause, _SEARCH_SECONDS) if self._outbox.knows_more else pause

    def _search_if_woken(self) -> None:
        now = anyio.current_time()
        if self._woken and self._outbox.knows_more and now >= self._searched_at + _WAKE_SEARCHES_SECONDS:
            # What is known of belongs to sinks that are busy; what has rung may be for another.
            self._searched_at = now
            self._outbox.search_again()

    def _is_final(self, error: RelayDispatchError) -> bool:
        if isinstance(error, ConfigurationError):
            return True
        # Later it is somebody's migration or grant that is under way.
        return isinstance(error, SchemaMismatchError | TenancyError) and not self._has_claimed

    async def _wait_out(self, error: RelayDispatchError) -> None:
        logger.log(
            logging.DEBUG if self._is_failing else logging.WARNING, "the outbox cannot be drained for now: %s", error
        )
        self._is_failing = True
        with anyio.move_on_after(self._backoff.next()):
            await self._is_back.wait()

    def _mended(self) -> None:
        if self._is_failing:
            logger.info("the outbox is drained again")
            self._is_failing = False
        self._backoff.reset()
