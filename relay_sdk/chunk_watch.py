"""Watch the clocks of the chunks in hand: leases that are over, timeouts, and handlers that were told to stop.

By this machine's monotonic clock alone, and in a task that waits for nothing else: so a lease is known to be lost also
while the database cannot be asked. One pass over the chunks tells when the next of their times comes; whoever brings
one nearer meanwhile says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import anyio

from relay_sdk.chunk_slots import ChunkSlot, ChunkSlots
from relay_sdk.slots import ENDED

__all__ = ["ChunkWatch"]

_SHORTEST_SECONDS: Final = 0.005
"""Between two passes."""


class ChunkWatch:
    """Tell when a time of a chunk has come."""

    def __init__(
        self,
        slots: ChunkSlots,
        *,
        lost: Callable[[ChunkSlot], None],
        time_out: Callable[[ChunkSlot], None],
        cancel: Callable[[ChunkSlot], None],
    ) -> None:
        """Take what is called for a lease that is over, a timeout, and a stop that was not heeded."""
        self._slots = slots
        self._lost = lost
        self._time_out = time_out
        self._cancel = cancel
        self._wakeup = anyio.Event()
        self._next = math.inf

    def look_at(self, slot: ChunkSlot) -> None:
        """Note that one of its times may have come nearer."""
        if min(slot.lost_at, slot.timeout_at, slot.cancel_at) < self._next:
            self._wakeup.set()

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            now = time.monotonic()
            self._next = math.inf
            for slot in list(self._slots):
                if slot.state is not ENDED:
                    self._next = min(self._next, self._look(slot, now))
            wait = max(self._next - time.monotonic(), _SHORTEST_SECONDS)
            with anyio.move_on_after(wait):
                await self._wakeup.wait()
            self._wakeup = anyio.Event()

    def _look(self, slot: ChunkSlot, now: float) -> float:
        """Do what is due, and return when the next is; the lease first: after it nothing else counts."""
        is_lost = slot.stop is not None and slot.stop.is_final
        if not is_lost and now >= slot.lost_at and (slot.may_be_lost or not slot.entered):
            self._lost(slot)
            is_lost = True
        if now >= slot.timeout_at:
            self._time_out(slot)
        if now >= slot.cancel_at:
            self._cancel(slot)
        lost_at = math.inf if is_lost or now >= slot.lost_at else slot.lost_at
        return min(lost_at, slot.timeout_at, slot.cancel_at)
