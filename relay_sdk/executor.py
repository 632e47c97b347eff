"""Run handlers, and turn the end of each into a value: the row that is to be written of its job.

The executor never touches the database (a body too large for its claim is fetched by a function that it is given).

A job has a task of its own, so that nothing of it (context variables, what is keyed by `current_task()`) is there for
the next job, which may be another tenant's. The executor owns these tasks itself: a start in an anyio task group costs
13 to 18 µs, this one 2, and with an eager start (Python 3.12) 1, when a job as a whole may cost 30. It also lets a
relay stop although a handler refuses to be cancelled, which no task group can leave behind.

A handler is cancelled once, as asyncio does it, so that its own clean-up can wait for things. Causes are told apart:

    SHUTDOWN   the attempt is used; pending again at once while attempts are left, else `failed`
    DEADLINE   the job ends `expired`
    LOST       withdrawn, or taken by another relay: nothing is written
    TIMEOUT    as an error of the handler, S2R-HANDLER-TIMEOUT
    (none)     it raised CancelledError itself: as an error of the handler, S2R-HANDLER-CANCELLED

A handler that ends with an answer in spite of its cancellation is taken at its word.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import copy_context
from itertools import islice
from typing import Any, Final

import anyio
import anyio.to_thread

from dispatch_core.errors import RelayDispatchError
from dispatch_core.models import ClaimedJobs, DispatchJob
from relay_sdk.deadlines import Deadlines
from relay_sdk.ends import Ends, Expired, leaves_of
from relay_sdk.metrics import RelayMetrics
from relay_sdk.outcomes import Outcome
from relay_sdk.registry import Gate, Handler, Registry
from relay_sdk.slots import ENDED, RUNNING, WAITING, Cause, Slot, Slots
from relay_sdk.tasks import task_makers

__all__ = ["Executor"]

logger = logging.getLogger(__name__)

_SLICE_SECONDS: Final = 0.002
"""How long jobs are started in one go before others in the event loop have their turn."""


_LOOK_EVERY: Final = 32
"""Jobs between two looks at the clock; so many at most are started at once."""


class Executor:
    """Start handlers, cancel them, and hand over how they ended."""

    def __init__(
        self,
        registry: Registry,
        *,
        slots: Slots,
        ends: Ends,
        deadlines: Deadlines,
        fetch_body: Callable[[DispatchJob], Awaitable[bool]],
        ended: Callable[[Slot], None],
        stop_with: Callable[[BaseException], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take `ended(slot)`, which writes `slot.end`; and `stop_with(error)`, for a handler's SystemExit."""
        self._registry = registry
        self._slots = slots
        self._ends = ends
        self._deadlines = deadlines
        self._fetch_body = fetch_body
        self._ended = ended
        self._stop_with = stop_with
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._new_task_at_once, self._new_task = task_makers(self._loop, "relay job")
        # Each job begins with a copy of this, not of what the job has left behind that made room for it.
        self._context = copy_context()
        # Never waited for: how many threads there may be is said by the gates and the slots.
        self._threads = anyio.CapacityLimiter(float("inf"))
        # A slot may be given back while its task lives on, if its handler refuses to end.
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    # --- taking jobs ---

    def accept(self, claimed: ClaimedJobs, sent_at: float) -> None:
        """Take a slot for each job and start it, or let it wait for its operation's turn.

        Many are started in the next turns of the event loop: so the next claim is on its way meanwhile.
        """
        now = time.monotonic()
        for malformed in claimed.malformed:
            slot = Slot(malformed, sent_at, now)
            self._slots.take(slot)
            self._metrics.jobs_malformed += 1
            self._end(slot, self._ends.malformed(malformed))
        # All of them first: a heartbeat or a stop that comes between two starts must know of them.
        jobs = [Slot(job, sent_at, _surely_past(job.local_deadline, now, sent_at)) for job in claimed.jobs]
        self._slots.take_all(jobs)
        if len(jobs) <= _LOOK_EVERY:
            for slot in jobs:
                self._start(slot)
        else:
            self._loop.call_soon(self._start_next, iter(jobs))

    def _start_next(self, jobs: Iterator[Slot]) -> None:
        slice_ends = time.monotonic() + _SLICE_SECONDS
        try:
            while some := list(islice(jobs, _LOOK_EVERY)):
                for slot in some:
                    self._start(slot)
                if time.monotonic() > slice_ends:
                    self._loop.call_soon(self._start_next, jobs)
                    return
        except BaseException as error:  # noqa: BLE001  a fault of ours: `run` raises it
            self._stop_with(error)

    def _start(self, slot: Slot) -> None:
        if slot.state is not WAITING:
            return  # cancelled while the ones before it were started
        job: Any = slot.job  # a DispatchJob: malformed ones have ended before
        handler = self._registry.find(job.operation)
        if handler is None:
            self._end(slot, self._ends.unknown_operation(job))
            return
        slot.handler = handler
        if self._stopping:
            self._end(slot, self._ends.released(slot))
            return
        gate = handler.gate
        if gate is not None:
            if gate.running >= gate.limit:
                self._queue(slot, job, handler, gate)
                return
            gate.running += 1
        task = self._new_task_at_once(self._run(slot), context=self._context.copy())
        if not task.done():
            slot.task = task
            self._tasks.add(task)

    # --- the gate of an operation ---

    def _queue(self, slot: Slot, job: DispatchJob, handler: Handler, gate: Gate) -> None:
        """Let a job wait here for its operation's turn; send it away where enough do, so that others get the slots."""
        if len(gate.waiting) >= max(1, min(gate.limit, self._slots.capacity // 2)):
            # Its place is another tenant's, where that has more of them.
            sent_away = gate.waiting.take_from_longer(job.tenant_id)
            self._send_away(sent_away or slot, handler, gate)
            if sent_away is None:
                return
        gate.waiting.put(job.tenant_id, slot)
        if slot.deadline < self._deadlines.horizon:
            self._deadlines.arm(slot)

    def _send_away(self, slot: Slot, handler: Handler, gate: Gate) -> None:
        assert isinstance(slot.job, DispatchJob)
        now = time.monotonic()
        # They come back one by one, at the pace at which this operation gets through them, a minute ahead at most.
        pace = handler.seconds / gate.limit
        when = max(gate.next_start, now + 1.0) + pace
        if when > now + 60.0:
            when = now + random.uniform(30.0, 60.0)
        else:
            gate.next_start = when
        # Half of what remains: one that would come back after its deadline would end now.
        self._end(slot, self._ends.sent_away(slot, min(when - now, slot.job.remaining() / 2)))

    def _leave_gate(self, handler: Handler) -> None:
        gate = handler.gate
        if gate is None:
            return
        gate.running -= 1
        while gate.waiting and gate.running < gate.limit:
            slot = gate.waiting.take()
            if slot.state is WAITING and slot.cause is None:
                gate.running += 1
                # Not at once, from within another's end: the stack would grow with the queue.
                slot.task = self._new_task(self._run(slot), context=self._context.copy())
                self._tasks.add(slot.task)

    # --- one job ---

    async def _run(self, slot: Slot) -> None:
        slot.entered = True
        handler: Any = slot.handler
        job: Any = slot.job
        end: Any
        try:
            if slot.cause is not None:
                end = self._ends.cancelled_before_start(slot)
            elif job.body_pending and not await self._fetch(job):
                end = None
            elif (now := time.monotonic()) >= job.local_deadline:
                end = self._ends.expired(job)
            elif self._stopping:
                end = self._ends.released(slot)
            else:
                slot.state = RUNNING
                slot.started_at = now
                limit = slot.limit
                if now + handler.timeout < limit:
                    slot.limit = limit = now + handler.timeout
                if limit < self._deadlines.horizon:
                    self._deadlines.arm(slot)
                self._metrics.handlers_started += 1
                if handler.is_async:
                    end = self._ends.returned(slot, await handler.function(job))
                else:
                    end = await self._run_in_thread(slot, handler, job)
        except BaseException as error:  # noqa: BLE001  a handler may raise anything, and the relay must not die of it
            end = self._raised(slot, error)
        try:
            if slot.task is not None:  # else it was started eagerly, and is done by now
                self._tasks.discard(slot.task)
                slot.task = None
            gate = handler.gate
            if gate is not None:
                if slot.started_at:
                    handler.seconds += (time.monotonic() - slot.started_at - handler.seconds) / 8
                if not slot.thread_runs:
                    self._leave_gate(handler)
            self._end(slot, end)
        except BaseException as error:  # noqa: BLE001  a fault of ours: `run` raises it, and nobody looks at this task
            self._stop_with(error)

    def _raised(self, slot: Slot, error: BaseException) -> Any:
        try:
            return self._judge(slot, error)
        except BaseException:  # noqa: BLE001  its class is the handler's, and may do anything when it is looked at
            return self._ends.not_understood(slot)

    def _judge(self, slot: Slot, error: BaseException) -> Any:
        if issubclass(type(error), BaseExceptionGroup):
            # A child of a handler's own task group speaks for it as well.
            leaves = list(leaves_of(error))
            leaves_the_process = any(issubclass(type(leaf), (SystemExit, KeyboardInterrupt)) for leaf in leaves)
            answer = leaves[0] if len(leaves) == 1 else error
        else:
            leaves_the_process = issubclass(type(error), (SystemExit, KeyboardInterrupt))
            answer = error
        if leaves_the_process:
            self._stop_with(error)
            return self._ends.released(slot)
        if isinstance(answer, Outcome):
            return self._ends.returned(slot, answer)
        return self._ends.raised(slot, error)

    async def _fetch(self, job: DispatchJob) -> bool:
        """Get a body that was too large for the claim; False where the claim is lost."""
        while True:
            try:
                return await self._fetch_body(job)
            except RelayDispatchError as error:
                if job.remaining() == 0:
                    return True  # the deadline is looked at next
                logger.debug("the body of job %s could not be fetched, and is asked for again: %s", job.job_id, error)
            await asyncio.sleep(random.uniform(0.2, 1.0))

    async def _run_in_thread(self, slot: Slot, handler: Handler, job: DispatchJob) -> Any:
        loop = self._loop
        # Whoever takes this decides: the thread, that it begins; or the task that was cancelled, that it never will.
        token = [True]
        slot.thread_runs = True

        def call() -> tuple[Any, BaseException | None]:
            try:
                token.pop()
            except IndexError:
                return None, None
            try:
                return handler.function(job), None
            except BaseException as error:  # noqa: BLE001  handed over to the task, as it is
                return None, error
            finally:
                try:
                    loop.call_soon_threadsafe(self._thread_ended, slot)
                except RuntimeError:
                    pass  # the relay gave up waiting for this thread, and its event loop is closed

        try:
            returned, error = await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)
        except BaseException:
            if token:
                token.clear()
                slot.thread_runs = False
            raise
        if error is not None:
            return self._raised(slot, error)
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            return self._ends.not_a_result(slot, "a `def` handler returned an awaitable: make it `async def`")
        return self._ends.returned(slot, returned)

    def _thread_ended(self, slot: Slot) -> None:
        slot.thread_runs = False
        if slot.task is None and slot.state is ENDED:
            # Its task was cancelled before: what it says now is too late, but only now the slot can be another's.
            assert slot.handler is not None
            self._leave_gate(slot.handler)
            if slot.end is None:
                self._slots.give(slot)

    # --- ends ---

    def _end(self, slot: Slot, end: Any) -> None:
        slot.state = ENDED
        slot.end = end
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        if end is None:
            self._metrics.jobs_lost += 1
            self.settled(slot)
            return
        wait = slot.deadline - time.monotonic() if type(end) is Expired else 0.0
        if wait > 0:
            # This clock is ahead by as much as the claim's reply took; the end is for the database's clock to see.
            self._loop.call_later(wait, self._ended, slot)
        else:
            self._ended(slot)

    def settled(self, slot: Slot) -> None:
        """Free the slot of a job about which nothing more is to be written, now or when its thread has ended."""
        slot.end = None
        if not slot.thread_runs:
            self._slots.give(slot)

    def settled_all(self, slots: Sequence[Slot]) -> None:
        """Do as `settled` for each."""
        free = []
        for slot in slots:
            slot.end = None
            if not slot.thread_runs:
                free.append(slot)
        self._slots.give_all(free)

    # --- cancelling ---

    def cancel(self, slot: Slot, cause: Cause) -> None:
        """Cancel a handler, or keep it from starting. Nothing happens to a job whose handler is over.

        Idempotent: yes; the first cause stands, but for LOST: then nothing is written, whatever came before.
        """
        if slot.state is ENDED:
            return
        if slot.cause is not None:
            if cause is Cause.LOST:
                slot.cause = cause
            return
        slot.cause = cause
        if slot.task is None:
            # It waits at a gate, or for its turn in `accept`. Its place at the gate is another's at once: a job that
            # finds all of them taken is sent away, for up to a minute.
            if slot.handler is not None and slot.handler.gate is not None:
                assert isinstance(slot.job, DispatchJob)
                slot.handler.gate.waiting.remove(slot.job.tenant_id, slot)
            self._end(slot, self._ends.cancelled_before_start(slot))
            return
        self._metrics.handlers_cancelled += slot.state is RUNNING
        if slot.entered:
            slot.task.cancel()

    def stop(self) -> None:
        """Start no more handlers: give back what waits. Idempotent: yes."""
        self._stopping = True
        for gate in self._registry.gates:
            gate.waiting.clear()
        # Those of the gates, those that wait for a large body, and those whose turn in `accept` has not come.
        for slot in list(self._slots):
            if slot.state is WAITING:
                self.cancel(slot, Cause.SHUTDOWN)

    def cancel_all(self) -> None:
        """Cancel all handlers because the relay stops."""
        for slot in list(self._slots):
            self.cancel(slot, Cause.SHUTDOWN)

    @property
    def running(self) -> int:
        """How many handlers run, or are about to."""
        return len(self._tasks)

    async def until_idle(self) -> None:
        """Wait until no task of a job is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)


def _surely_past(local_deadline: float, now: float, sent_at: float) -> float:
    """Return when a deadline has passed on the database's clock for certain.

    `local_deadline` counts from before the claim was sent. The database read its clock later, by as much as the reply
    took at most; and its clock may be slewed against this one, by 0.05 % at most.
    """
    left = local_deadline - now
    slewed = 0.0 if left <= 0.0 else 1.0 if left > 2000.0 else left * 0.0005
    return local_deadline + (now - sent_at) + 0.005 + slewed
