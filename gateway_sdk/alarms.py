"""Call back later, thousands of times a second and nearly always in vain."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Alarm", "Alarms"]

_FEW: Final = 256
"""So many cancelled ones are left where they are."""


class Alarm:
    """A call that is to come."""

    __slots__ = ("_alarms", "_argument", "_callback")

    def __init__(self, alarms: Alarms, callback: Callable[[Any], None], argument: object) -> None:
        self._alarms = alarms
        self._callback: Callable[[Any], None] | None = callback
        self._argument: object = argument

    @property
    def is_void(self) -> bool:
        """Whether it was cancelled, or has called."""
        return self._callback is None

    def cancel(self) -> None:
        """Do not call. Idempotent: yes."""
        if self._callback is not None:
            self._callback = self._argument = None
            self._alarms.cancelled()

    def ring(self) -> None:
        """Call, if it was not cancelled by now."""
        callback, argument, self._callback, self._argument = self._callback, self._argument, None, None
        if callback is not None:
            callback(argument)


class Alarms:
    """All alarms of one owner behind one timer of the event loop, whose own are a good part of what a wait costs."""

    __slots__ = ("_cancelled", "_heap", "_loop", "_numbers", "_timer", "_timer_at")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._cancelled = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def call_later(self, seconds: float, callback: Callable[[Any], None], argument: object) -> Alarm:
        """Call `callback(argument)` after `seconds`, from the event loop."""
        alarm = Alarm(self, callback, argument)
        at = time.monotonic() + seconds
        heapq.heappush(self._heap, (at, next(self._numbers), alarm))
        if self._timer is None or at < self._timer_at:
            self._set(at, seconds)
        return alarm

    def cancelled(self) -> None:
        """Note that one of the alarms is void."""
        self._cancelled += 1
        if self._cancelled > _FEW and self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].is_void]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def _set(self, at: float, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # A loop may count in whole milliseconds, and would come too early again and again.
        self._timer = self._loop.call_later(max(seconds, 0.001), self._fire)
        self._timer_at = at

    def _fire(self) -> None:
        self._timer = None
        now = time.monotonic()
        while self._heap and (self._heap[0][2].is_void or self._heap[0][0] <= now):
            _, _, alarm = heapq.heappop(self._heap)
            if alarm.is_void:
                self._cancelled = max(0, self._cancelled - 1)
            else:
                # One that raises harms no other; one that cancels another is in time.
                self._loop.call_soon(alarm.ring)
        if self._heap:
            self._set(self._heap[0][0], self._heap[0][0] - now)
