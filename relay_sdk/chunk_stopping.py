"""How the handler of a chunk learns that it is to come to an end, and why."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

from relay_sdk.chunk_slots import ChunkSlot, StopReason
from relay_sdk.outcomes import Outcome

__all__ = ["ChunkStopped", "Stopping"]


class ChunkStopped(Outcome):
    """The handler ends because it was told to: its chunk is released with its checkpoint, the attempt not counted."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Stopping:
    """An event: it is set when the relay drains, the job is paused or cancelled, or the lease is lost.

    True where it is set, so ``while not ctx.stopping:`` reads as it should. It also looks at the clock: a handler that
    has kept the event loop from running learns here that its lease is over.
    """

    __slots__ = ("_event", "_lost", "_slot")

    def __init__(self, slot: ChunkSlot, lost: Callable[[ChunkSlot], None]) -> None:
        self._slot = slot
        self._lost = lost
        self._event: anyio.Event | None = None

    @property
    def reason(self) -> StopReason | None:
        """Why; None where it is not set. Drain and pause may become cancelled or a lost lease, never the reverse."""
        slot = self._slot
        if (slot.stop is None or not slot.stop.is_final) and slot.may_be_lost and time.monotonic() >= slot.lost_at:
            self._lost(slot)
        return slot.stop

    def is_set(self) -> bool:
        """Whether it is set."""
        return self.reason is not None

    def __bool__(self) -> bool:
        return self.reason is not None

    async def wait(self) -> StopReason:
        """Wait until it is set, and return why."""
        while (reason := self.reason) is None:
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()
        return reason

    def check(self) -> None:
        """Do nothing, or raise ChunkStopped, which ends the handler and releases its chunk. Call it at safe points."""
        if (reason := self.reason) is not None:
            raise ChunkStopped(reason)

    def set(self) -> None:
        """Wake those who wait; for the runner."""
        if self._event is not None:
            self._event.set()
