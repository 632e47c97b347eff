"""Know what is due next, among things that are looked at every now and then."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Hashable
from typing import Generic, TypeVar

import anyio

__all__ = ["Due"]

T = TypeVar("T", bound=Hashable)


class Due(Generic[T]):
    """Things with a monotonic time each; one can be moved to an earlier time, and is gone once it was taken."""

    __slots__ = ("_alarm", "_heap", "_numbers", "_times")

    def __init__(self) -> None:
        # An entry of the heap whose time is not that of its thing any more is void.
        self._heap: list[tuple[float, int, T]] = []
        self._times: dict[T, float] = {}
        self._numbers = itertools.count()
        self._alarm = anyio.Event()

    def plan(self, thing: T, at: float) -> None:
        """See to it that `thing` is due by `at`."""
        if at >= self._times.get(thing, math.inf):
            return
        if not self._heap or at < self._heap[0][0]:
            self._alarm.set()
        self._times[thing] = at
        heapq.heappush(self._heap, (at, next(self._numbers), thing))

    def take(self) -> list[T]:
        """Return what is due, and forget it."""
        now = time.monotonic()
        taken: list[T] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, thing = heapq.heappop(self._heap)
            if self._times.get(thing) == at:
                del self._times[thing]
                taken.append(thing)
        return taken

    async def wait(self, until: float) -> None:
        """Wait until something is due, at most until the monotonic time `until`."""
        while True:
            at = min(until, self._heap[0][0]) if self._heap else until
            seconds = at - time.monotonic()
            if seconds <= 0:
                return
            with anyio.move_on_after(seconds):
                await self._alarm.wait()
            self._alarm = anyio.Event()
