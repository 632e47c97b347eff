"""Cancel handlers at their deadline or timeout, without a timer for each job.

Most jobs end long before either. So a timer is set only for what is due before the next look at all jobs in hand, which
comes every second; whoever starts a handler compares its limit with `horizon`, and calls `arm` where it is nearer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import anyio

from relay_sdk.slots import ENDED, Cause, Slot, Slots

__all__ = ["Deadlines"]

_LOOK_SECONDS: Final = 1.0


class Deadlines:
    """Watch the limits of the jobs in hand."""

    def __init__(self, slots: Slots, cancel: Callable[[Slot, Cause], None]) -> None:
        """Take `cancel(slot, cause)`, which is called once a limit has passed."""
        self._slots = slots
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self.horizon = time.monotonic() + 2 * _LOOK_SECONDS
        """Limits before this need a timer."""

    async def run(self) -> None:
        """Look at all jobs in hand every second, for ever."""
        while True:
            self.horizon = time.monotonic() + 2 * _LOOK_SECONDS
            for slot in self._slots:
                if slot.limit < self.horizon and slot.timer is None and slot.state is not ENDED and slot.cause is None:
                    self.arm(slot)
            await anyio.sleep(_LOOK_SECONDS)

    def arm(self, slot: Slot) -> None:
        """Set the timer of one job."""
        if slot.timer is not None:
            slot.timer.cancel()
        slot.timer = self._loop.call_later(max(slot.limit - time.monotonic(), 0.0), self._fire, slot)

    def _fire(self, slot: Slot) -> None:
        slot.timer = None
        now = time.monotonic()
        # The loop's clock may be coarser than ours.
        if now + 0.002 < slot.limit:
            self.arm(slot)
            return
        self._cancel(slot, Cause.DEADLINE if slot.limit >= slot.deadline else Cause.TIMEOUT)
