"""Run the handlers of chunks, tell them to stop, cancel them, and turn the end of each into a value.

The executor never touches the database. As in `executor`, a chunk has a task of its own, which this owns: so a relay
can leave behind a handler that refuses to be cancelled.

    DRAIN       told when the relay stops, cancelled when the grace period is over
    PAUSED      told, cancelled after the stop time; one that may not run twice is only told
    CANCELLED   told, cancelled after the stop time; nothing that it does counts any more
    LEASE_LOST  likewise
    (timeout)   cancelled; a failed attempt
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Any, Final

from dispatch_core.durable_models import ClaimedChunk
from relay_sdk.chunk_context import ChunkContext, Desk
from relay_sdk.chunk_ends import ChunkEnds
from relay_sdk.chunk_registry import ChunkRegistry
from relay_sdk.chunk_slots import ChunkEnd, ChunkSlot, ChunkSlots, StopReason
from relay_sdk.chunk_stopping import ChunkStopped
from relay_sdk.ends import leaves_of
from relay_sdk.metrics import RelayMetrics
from relay_sdk.outcomes import Outcome
from relay_sdk.slots import ENDED, RUNNING, WAITING
from relay_sdk.tasks import task_makers

__all__ = ["ChunkExecutor"]

logger = logging.getLogger(__name__)

_SLICE_SECONDS: Final = 0.002
"""How long handlers are started in one go before others in the event loop have their turn."""

_WEIGHTS: Final = {reason: n for n, reason in enumerate(StopReason)}


class ChunkExecutor:
    """Start handlers, stop them, and hand over how they ended."""

    def __init__(
        self,
        registry: ChunkRegistry,
        *,
        slots: ChunkSlots,
        ends: ChunkEnds,
        desk: Desk,
        stop_seconds: float,
        watch: Callable[[ChunkSlot], None],
        ended: Callable[[ChunkSlot], None],
        stop_with: Callable[[BaseException], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take `watch(slot)`, called when one of its times has come nearer; `ended(slot)`, which writes `slot.end`; and
        `stop_with(error)`, for a handler's SystemExit."""
        self._registry = registry
        self._slots = slots
        self._ends = ends
        self._desk = desk
        self._stop_seconds = stop_seconds
        self._watch = watch
        self._ended = ended
        self._stop_with = stop_with
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._new_task, _ = task_makers(self._loop, "relay chunk")
        self._context = copy_context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    # --- taking chunks ---

    def accept(self, chunks: Sequence[ClaimedChunk], lease_seconds: float) -> None:
        """Take a slot for each chunk and start it; where the relay stops, give it back."""
        taken: list[ChunkSlot] = []
        for chunk in chunks:
            handler = self._registry.find(chunk.kind)
            assert handler is not None, "claims name the kinds that have one"
            handler.in_hand += 1
            taken.append(ChunkSlot(chunk, handler, chunk.lease.local_deadline - lease_seconds, lease_seconds))
        # All of them first: a heartbeat or a stop that comes between two starts must know of them.
        self._slots.take_all(taken)
        self._metrics.chunks_claimed += len(taken)
        self._start_next(iter(taken))

    def _start_next(self, slots: Iterator[ChunkSlot]) -> None:
        try:
            slice_ends = time.monotonic() + _SLICE_SECONDS
            for slot in slots:
                self._start(slot)
                if time.monotonic() > slice_ends:
                    self._loop.call_soon(self._start_next, slots)
                    return
        except BaseException as error:  # noqa: BLE001  a fault of ours: `run` raises it
            self._stop_with(error)

    def _start(self, slot: ChunkSlot) -> None:
        if slot.state is not WAITING:
            return  # told to stop while the ones before it were started
        if self._stopping or slot.stop is not None:
            self._end(slot, self._ends.not_started(slot))
            return
        if slot.chunk.malformed is not None:
            self._end(slot, self._ends.malformed(slot, slot.chunk.malformed))
            return
        task = self._new_task(self._run(slot), context=self._context.copy())
        if not task.done():
            slot.task = task
            self._tasks.add(task)

    # --- one chunk ---

    async def _run(self, slot: ChunkSlot) -> None:
        slot.entered = True
        handler = slot.handler
        end: ChunkEnd
        try:
            slot.started_at = time.monotonic()
            if slot.started_at >= slot.lost_at:
                self.lost(slot)  # this process stood still between the claim and now
            if slot.stop is not None:
                end = self._ends.not_started(slot)
            else:
                slot.timeout_at = slot.started_at + handler.timeout
                slot.state = RUNNING
                slot.context = context = ChunkContext(slot, self._desk)
                self._watch(slot)
                self._metrics.handlers_started += 1
                end = self._ends.returned(slot, await handler.function(context))
        except BaseException as error:  # noqa: BLE001  a handler may raise anything, and the relay must not die of it
            end = self._raised(slot, error)
        try:
            if slot.task is not None:  # else it was started eagerly, and is done by now
                self._tasks.discard(slot.task)
                slot.task = None
            self._end(slot, end)
        except BaseException as error:  # noqa: BLE001  a fault of ours: `run` raises it, and nobody looks at this task
            self._stop_with(error)

    def _raised(self, slot: ChunkSlot, error: BaseException) -> ChunkEnd:
        try:
            return self._judge(slot, error)
        except BaseException:  # noqa: BLE001  its class is the handler's, and may do anything when it is looked at
            return self._ends.not_understood(slot)

    def _judge(self, slot: ChunkSlot, error: BaseException) -> ChunkEnd:
        answer: Any = error
        leaves_the_process = issubclass(type(error), (SystemExit, KeyboardInterrupt))
        if issubclass(type(error), BaseExceptionGroup):
            # A child of a handler's own task group speaks for it as well.
            leaves = list(leaves_of(error))
            leaves_the_process = any(issubclass(type(leaf), (SystemExit, KeyboardInterrupt)) for leaf in leaves)
            # Of several that were told to stop each may say so.
            is_one = len(leaves) == 1 or all(issubclass(type(leaf), ChunkStopped) for leaf in leaves)
            answer = leaves[0] if leaves and is_one else error
        if leaves_the_process:
            self._stop_with(error)
            slot.was_cancelled = True
            return self._ends.raised(slot, asyncio.CancelledError())
        if isinstance(answer, Outcome) and not slot.timed_out:
            return self._ends.returned(slot, answer)
        return self._ends.raised(slot, error)

    def _end(self, slot: ChunkSlot, end: ChunkEnd) -> None:
        slot.state = ENDED
        slot.end = end
        if end is None:
            self._metrics.chunks_lost += 1
            self.settled((slot,))
        else:
            self._ended(slot)

    def settled(self, slots: Sequence[ChunkSlot]) -> None:
        """Free the slots of chunks about which nothing more is to be written."""
        for slot in slots:
            slot.end = None
            if slot in self._slots:
                slot.handler.in_hand -= 1
        self._slots.give_all(slots)

    # --- stopping handlers ---

    def tell(self, slot: ChunkSlot, reason: StopReason) -> None:
        """Tell a handler to stop, or keep it from starting. Nothing happens to a chunk whose handler is over.

        Idempotent: yes; a graver reason replaces one that is not.
        """
        if slot.state is ENDED:
            return
        if slot.stop is not None and _WEIGHTS[slot.stop] >= _WEIGHTS[reason]:
            return
        slot.stop = reason
        if not slot.entered:
            if slot.task is None:
                self._end(slot, self._ends.not_started(slot))
            return  # else its task has not begun, and finds out when it does
        if slot.context is not None:
            slot.context.stopping.set()
        # A drain has the grace period, which the session keeps.
        if reason is not StopReason.DRAIN and (reason is not StopReason.PAUSED or slot.chunk.idempotent):
            slot.cancel_at = min(slot.cancel_at, time.monotonic() + self._stop_seconds)
            self._watch(slot)

    def lost(self, slot: ChunkSlot) -> None:
        """Note that the lease of a chunk is lost."""
        if slot.stop is None or not slot.stop.is_final:
            if slot.state is not ENDED:
                logger.warning(
                    "the lease of chunk %d of job %s is lost: its handler is stopped", slot.lease.seq, slot.lease.job_id
                )
            self.tell(slot, StopReason.LEASE_LOST)

    def time_out(self, slot: ChunkSlot) -> None:
        """Cancel a handler because it took too long."""
        slot.timeout_at = math.inf
        if slot.state is RUNNING and not slot.was_cancelled:
            slot.timed_out = True
            self.cancel(slot)

    def cancel(self, slot: ChunkSlot) -> None:
        """Cancel a handler, once, as asyncio does it: so its own clean-up can wait for things."""
        slot.cancel_at = math.inf
        if slot.state is ENDED or slot.was_cancelled or slot.task is None or not slot.entered:
            return  # one that has not begun finds out when it does
        slot.was_cancelled = True
        self._metrics.handlers_cancelled += 1
        slot.task.cancel()

    def stop(self) -> None:
        """Start no more handlers, and tell those that run. Idempotent: yes."""
        self._stopping = True
        for slot in list(self._slots):
            self.tell(slot, StopReason.DRAIN)

    def cancel_all(self) -> None:
        """Cancel all handlers because the relay stops."""
        for slot in list(self._slots):
            self.tell(slot, StopReason.DRAIN)
            self.cancel(slot)

    @property
    def running(self) -> int:
        """How many handlers run, or are about to."""
        return len(self._tasks)

    async def until_idle(self) -> None:
        """Wait until no task of a chunk is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)
