"""Call back later, thousands of times a second and nearly always in vain."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final

__all__ = ["Alarm", "Alarms", "Timeout"]

_FEW: Final = 256
"""So many cancelled ones are left where they are."""

_LENGTHS: Final = 16
"""So many lengths of timeouts have rows of their own."""


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


class Timeout:
    """A base for what has a timeout of its own: so that it is an object less."""

    __slots__ = ("_at", "_set_in")

    def __init__(self) -> None:
        self._at = math.inf
        # The row that it stands in, or the alarm that stands for it.
        self._set_in: dict[Timeout, None] | Alarm | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is a timeout, and it has not come."""
        return self._set_in is not None

    def cancel(self) -> None:
        """Have no timeout any more. Idempotent: yes."""
        where, self._set_in = self._set_in, None
        if where.__class__ is dict:
            where.pop(self, None)  # gone already where it is due in this turn of the loop
        elif where is not None:
            where.cancel()  # type: ignore[union-attr]

    def ring(self) -> None:
        """Time out, if it was not cancelled by now."""
        if self._set_in is not None:
            self._set_in = None
            self.timed_out()

    def timed_out(self) -> None:
        """Do what is to be done then."""
        raise NotImplementedError


class Alarms:
    """All alarms of one owner behind one timer of the event loop, whose own are a good part of what a wait costs.

    Timeouts of the same length stand in a row in the order in which they were set, which is that of their times, and
    nothing is left of one that was cancelled. Lengths are few, because mostly all callers have the same. What comes at
    any other time lies in a heap.
    """

    __slots__ = ("_cancelled", "_heap", "_loop", "_numbers", "_rows", "_timer", "_timer_at")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rows: dict[float, dict[Timeout, None]] = {}
        self._heap: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._cancelled = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def __len__(self) -> int:
        return len(self._heap) + sum(map(len, self._rows.values()))

    def call_later(self, seconds: float, callback: Callable[[Any], None], argument: object) -> Alarm:
        """Call `callback(argument)` after `seconds`, from the event loop; for lengths that hardly come twice."""
        at = time.monotonic() + seconds
        alarm = Alarm(self, callback, argument)
        heapq.heappush(self._heap, (at, next(self._numbers), alarm))
        if at < self._timer_at:
            self._set(at, seconds)
        return alarm

    def time_out(self, seconds: float, timeout: Timeout) -> None:
        """Call `timeout.timed_out()` after `seconds`, from the event loop; it has none yet."""
        row = self._rows.get(seconds)
        if row is None:
            if len(self._rows) >= _LENGTHS:
                self._rows = {length: each for length, each in self._rows.items() if each}
                if len(self._rows) >= _LENGTHS:
                    timeout._set_in = self.call_later(seconds, Timeout.ring, timeout)
                    return
            row = self._rows[seconds] = {}
        timeout._at = at = time.monotonic() + seconds
        timeout._set_in = row
        row[timeout] = None
        if at < self._timer_at:
            self._set(at, seconds)

    def cancelled(self) -> None:
        """Note that one of the alarms in the heap is void."""
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
        self._timer, self._timer_at = None, math.inf
        now = time.monotonic()
        due: list[tuple[float, Callable[[], None]]] = []
        following = math.inf
        while self._heap and (self._heap[0][2].is_void or self._heap[0][0] <= now):
            at, _, alarm = heapq.heappop(self._heap)
            if alarm.is_void:
                self._cancelled = max(0, self._cancelled - 1)
            else:
                due.append((at, alarm.ring))
        if self._heap:
            following = self._heap[0][0]
        for row in self._rows.values():
            over = []
            for timeout in row:
                if timeout._at > now:
                    following = min(following, timeout._at)
                    break
                over.append(timeout)
            for timeout in over:
                del row[timeout]
                due.append((timeout._at, timeout.ring))
        due.sort(key=itemgetter(0))
        for _, ring in due:
            # One that raises harms no other; one that cancels another is in time.
            self._loop.call_soon(ring)
        if following < math.inf:
            self._set(following, following - now)
