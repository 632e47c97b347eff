"""Wait for the results of jobs: pushed where it can be, polled beneath always, and never longer than promised.

A job that somebody waits for goes through this:

    waiting     a push (its id on the tenant's channel), a tick, or a catch-up -> it is polled
    polled      ended -> its waits end with the result
                live  -> waiting; its deadline is known by now, on our own monotonic clock
    deadline    -> polled once more, and then
                live       it was not the deadline yet: waiting
                expired    it is marked so (nobody else may have), polled, and its waits end with that
                no answer  within `deadline_grace_seconds`: its waits end with a retryable error

`expired` is only ever what the database has said. A wait's own timeout ends that wait alone.

**Order (C03).** A job is registered here before it is polled, and polled again whenever its channel begins to be
listened to: a result is either there when it is read, or rings.

Polls of all jobs of a tenant share a statement: pushes that come together, the jobs that are due at a tick, all that
wait after a reconnect. Where nothing is pushed, a job is polled often while it is young and ever less as it gets older.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import itertools
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias
from uuid import UUID

import anyio

from dispatch_core.database import Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import (
    DatabaseUnavailableError,
    RelayDispatchError,
    TenancyError,
    UnknownJobError,
    WaitTimeoutError,
)
from dispatch_core.listener import Listener, ListenerState
from dispatch_core.models import DispatchResult, DispatchStatus
from gateway_sdk.health import GatewayCounters
from gateway_sdk.lanes import Lanes, Polled, StartSoon
from gateway_sdk.settings import GatewaySettings

__all__ = ["Outcome", "ResultWaiter", "Wait"]

logger = logging.getLogger(__name__)

Outcome: TypeAlias = DispatchResult | Exception
"""How a wait ends. An error is a value here, because it may never be asked for."""

_YOUNG_SECONDS: Final = 0.05
"""The shortest time between two polls of a job whose result is not pushed."""

_SILENCE_SECONDS: Final = 1.0
"""A poll that has had no answer for so long, when a wait is to end, means that the database is away."""


class Wait:
    """One caller's wait for one job. Close it, whatever has come of it."""

    __slots__ = ("_deliver", "_job", "_timer", "_waiter")

    def __init__(self, waiter: ResultWaiter, job: _Job, deliver: Callable[[Outcome], None]) -> None:
        self._waiter = waiter
        self._job = job
        self._deliver: Callable[[Outcome], None] | None = deliver
        self._timer: asyncio.TimerHandle | None = None

    def stored(self) -> None:
        """Say that the job which was to be enqueued is committed."""
        self._waiter._stored(self._job)

    def end(self, outcome: Outcome) -> None:
        """Deliver `outcome`, unless another one was first."""
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver(outcome)

    def close(self) -> None:
        """Stop to wait. Idempotent: yes."""
        self._deliver = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiter._leave(self._job, self)


class _Job:
    """What is known of one job that somebody waits for."""

    __slots__ = (
        "again",
        "asked_at",
        "at_deadline",
        "due",
        "error",
        "expired",
        "job_id",
        "key",
        "marked",
        "polling",
        "pushed",
        "room",
        "since",
        "storing",
        "timer",
        "waits",
    )

    def __init__(self, room: _Room, job_id: UUID, key: str) -> None:
        self.room = room
        self.job_id = job_id
        self.key = key
        self.waits: list[Wait] = []
        self.since = time.monotonic()
        self.due = 0.0
        # A poll is on its way since `asked_at`; `again`: what it will read may be too old already.
        self.polling = False
        self.again = False
        self.asked_at = 0.0
        self.pushed = False
        # Not committed yet, by the caller who waits here: an unknown id is no error.
        self.storing = False
        self.error: RelayDispatchError | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.at_deadline = False
        # What a poll has called expired, and whether we have tried to store that.
        self.expired: DispatchResult | None = None
        self.marked = False


class _Room:
    """The jobs of one tenant, by the hexadecimal form of their ids, which is what a push carries."""

    __slots__ = ("callback", "channel", "deaf", "empty_since", "jobs", "subscribing", "tenant", "tick_at")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.jobs: dict[str, _Job] = {}
        self.channel: str | None = None
        self.callback: Callable[[str], None] | None = None
        self.subscribing = False
        # This login may not listen for the tenant's results.
        self.deaf = False
        self.tick_at = float("inf")
        self.empty_since: float | None = None


class ResultWaiter:
    """All waits of a client. Run `run` in the owner's task group."""

    def __init__(
        self,
        database: Database,
        lanes: Lanes,
        listener: Listener | None,
        settings: GatewaySettings,
        counters: GatewayCounters,
        start_soon: StartSoon,
    ) -> None:
        self._database = database
        self._lanes = lanes
        self._listener = listener
        self._settings = settings
        self._counters = counters
        self._start_soon = start_soon
        self._loop = asyncio.get_running_loop()
        self._rooms: dict[str, _Room] = {}
        self._channels = 0
        self._warned_of_channels = False
        # Rooms by their next tick. An entry whose time is not its room's `tick_at` any more is void.
        self._ticks: list[tuple[float, int, _Room]] = []
        self._numbers = itertools.count()
        self._alarm = anyio.Event()
        self._closed: Callable[[UUID], Exception] | None = None
        if listener is not None:
            listener.on_catch_up(self._poll_all)
            listener.on_state_change(self._on_state_change)

    # --- for the verbs ---

    def add(
        self,
        tenant: str,
        job_id: UUID,
        deliver: Callable[[Outcome], None],
        *,
        timeout: float | None = None,
        storing: bool = False,
        deadline: float | None = None,
    ) -> Wait:
        """Call `deliver(outcome)` once, when the job has ended, `timeout` seconds have passed, or the deadline.

        `storing`: the caller is about to enqueue the job, and says so by `Wait.stored`; `deadline` is then a monotonic
        time that is not after the job's deadline.

        Raises: ClientClosedError.
        """
        if self._closed is not None:
            raise self._closed(job_id)
        room = self._rooms.get(tenant)
        if room is None:
            room = self._rooms[tenant] = _Room(tenant)
        if room.channel is None:
            self._subscribe_soon(room)
        key = job_id.hex
        job = room.jobs.get(key)
        is_new = job is None
        if job is None:
            job = room.jobs[key] = _Job(room, job_id, key)
            job.storing = storing
            room.empty_since = None
        wait = Wait(self, job, deliver)
        job.waits.append(wait)
        if timeout is not None and timeout != float("inf"):
            wait._timer = self._loop.call_later(timeout, self._timed_out, wait)
        if is_new:
            if deadline is not None:
                self._arm(job, deadline)
            if not storing:
                self._poll(job)
            self._plan(job)
            self._plan_tick(room, job.due)
        elif job.polling or self._is_listening(room):
            pass  # it will be told, by the poll under way or by a push
        else:
            self._poll(job)
        return wait

    @property
    def waiting(self) -> int:
        """How many jobs are waited for."""
        return sum(len(room.jobs) for room in self._rooms.values())

    @property
    def channels(self) -> int:
        """How many tenants' results are pushed, or will be once there is a connection."""
        return self._channels

    @property
    def rooms(self) -> int:
        """How many tenants something is kept for."""
        return len(self._rooms)

    def close(self, reason: Callable[[UUID], Exception]) -> None:
        """End every wait, these and later ones, with what `reason` makes for its job."""
        self._closed = reason
        for room in self._rooms.values():
            for job in list(room.jobs.values()):
                self._finish(job, partial(reason, job.job_id))

    # --- the life of a job ---

    def _stored(self, job: _Job) -> None:
        job.storing = False
        # Where it has been listened to since before the commit, a result will ring: no poll is needed.
        if job.again or job.at_deadline or not self._is_listening(job.room):
            job.again = False
            self._poll(job)

    def _leave(self, job: _Job, wait: Wait) -> None:
        if wait in job.waits:
            job.waits.remove(wait)
            if not job.waits:
                self._forget(job)

    def _forget(self, job: _Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        if job.room.jobs.get(job.key) is job:
            del job.room.jobs[job.key]

    def _finish(self, job: _Job, outcome: DispatchResult | Callable[[], Exception]) -> None:
        waits, job.waits = job.waits, []
        self._forget(job)
        if isinstance(outcome, DispatchResult):
            if job.pushed:
                self._counters.wakes_by_push += 1
            else:
                self._counters.wakes_by_poll += 1
        for wait in waits:
            # An error of its own for each: one that is raised in many tasks collects all their tracebacks.
            wait.end(outcome if isinstance(outcome, DispatchResult) else outcome())

    def _fail(self, job: _Job, error: Exception) -> None:
        self._finish(job, partial(_for_job, error, job.job_id))

    def _poll(self, job: _Job) -> None:
        if job.polling or job.storing:
            job.again = True
            return
        try:
            lane = self._lanes.poll[job.room.tenant]
            lane.put_nowait(job.job_id, self._lanes.poll_size, partial(self._polled, job))
        except RelayDispatchError:
            return  # closing: `close` ends the waits
        job.polling = True
        job.asked_at = time.monotonic()

    def _polled(self, job: _Job, _job_id: UUID, answer: Polled | Exception) -> None:
        job.polling = False
        if not job.waits:
            return
        if isinstance(answer, Exception):
            self._poll_failed(job, answer)
            return
        job.error = None
        result, deadline = answer
        if result is None:
            self._finish(job, partial(UnknownJobError, job_id=job.job_id))
        elif not result.is_terminal:
            job.at_deadline = False
            self._arm(job, deadline)
            self._plan(job)
            self._plan_tick(job.room, job.due)
            if job.again:
                job.again = False
                self._poll(job)
        elif result.status is DispatchStatus.EXPIRED and result.completed_at is None and not job.marked:
            job.expired = result
            self._mark(job)
        else:
            self._finish(job, result)

    def _poll_failed(self, job: _Job, error: Exception) -> None:
        job.again = False
        if job.expired is not None:
            self._finish(job, job.expired)
        elif not isinstance(error, RelayDispatchError) or not error.retryable or job.at_deadline:
            self._fail(job, error)
        else:
            job.error = error
            if job.timer is None:
                # No deadline is known, so those who gave no timeout would wait without any bound.
                for wait in [wait for wait in job.waits if wait._timer is None]:
                    job.waits.remove(wait)
                    wait.end(_for_job(error, job.job_id))
                if not job.waits:
                    self._forget(job)
                    return
            self._plan(job)
            self._plan_tick(job.room, job.due)

    def _timed_out(self, wait: Wait) -> None:
        job = wait._job
        wait._timer = None
        if wait in job.waits:
            job.waits.remove(wait)
        if job.expired is not None:
            outcome: Outcome = job.expired
        elif job.error is not None:
            outcome = _for_job(job.error, job.job_id)
        elif job.storing or (job.polling and time.monotonic() - job.asked_at >= _SILENCE_SECONDS):
            outcome = _no_answer(job)
        else:
            outcome = WaitTimeoutError(job_id=job.job_id)
        if not job.waits:
            self._forget(job)
        wait.end(outcome)

    # --- the deadline ---

    def _arm(self, job: _Job, deadline: float) -> None:
        """Set the timer for a deadline that is not before `deadline`; each poll gives a closer one."""
        if job.timer is not None:
            job.timer.cancel()
        job.timer = self._loop.call_later(max(0.001, deadline - time.monotonic()), self._reached, job)

    def _reached(self, job: _Job) -> None:
        if job.storing or (job.polling and time.monotonic() - job.asked_at >= _SILENCE_SECONDS):
            self._give_up(job)
            return
        job.at_deadline = True
        job.timer = self._loop.call_later(self._settings.deadline_grace_seconds, self._give_up, job)
        self._poll(job)

    def _give_up(self, job: _Job) -> None:
        job.timer = None
        if job.expired is not None:
            self._finish(job, job.expired)
        else:
            self._finish(job, partial(_no_answer, job))

    def _mark(self, job: _Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
        job.timer = self._loop.call_later(self._settings.deadline_grace_seconds, self._give_up, job)
        try:
            self._lanes.expire[job.room.tenant].put_nowait(job.job_id, 0, partial(self._marked, job))
        except RelayDispatchError:
            pass  # closing: `close` ends the waits

    def _marked(self, job: _Job, _job_id: UUID, answer: int | Exception) -> None:
        if not job.waits:
            return
        job.marked = True
        if isinstance(answer, Exception):
            assert job.expired is not None
            self._finish(job, job.expired)
        else:
            self._poll(job)

    # --- push ---

    def _is_listening(self, room: _Room) -> bool:
        return self._listener is not None and room.channel is not None and self._listener.is_listening_to(room.channel)

    def _subscribe_soon(self, room: _Room) -> None:
        if self._listener is None or room.subscribing or room.deaf:
            return
        if self._channels >= self._settings.max_channels:
            if not self._warned_of_channels:
                self._warned_of_channels = True
                logger.warning(
                    "results of more than %d tenants are waited for: those of the others are polled",
                    self._settings.max_channels,
                )
            return
        room.subscribing = True
        self._channels += 1
        self._start_soon(partial(self._subscribe, room))

    async def _subscribe(self, room: _Room) -> None:
        assert self._listener is not None
        try:
            async with self._database.connection() as conn:
                channel = await RelayDispatchRepository(conn, room.tenant).channel("result")
        except RelayDispatchError as error:
            self._channels -= 1
            # The next tick tries again, unless it was a refusal.
            room.subscribing = False
            if isinstance(error, TenancyError):
                room.deaf = True
                logger.warning("the results of tenant %r are not pushed, only polled: %s", room.tenant, error)
            return
        room.subscribing = False
        if self._rooms.get(room.tenant) is not room:
            self._channels -= 1
            return
        room.channel = channel
        room.callback = partial(self._on_results, room)
        if await self._listener.subscribe(channel, room.callback):
            # What ended between the first poll and the LISTEN did not ring here.
            self._poll_room(room)

    def _on_results(self, room: _Room, payload: str) -> None:
        jobs = room.jobs
        for key in payload.split(","):
            job = jobs.get(key)
            if job is not None:
                job.pushed = True
                self._poll(job)

    def _poll_all(self) -> None:
        for room in self._rooms.values():
            self._poll_room(room)

    def _poll_room(self, room: _Room) -> None:
        for job in room.jobs.values():
            self._poll(job)

    def _on_state_change(self, state: ListenerState) -> None:
        if state in ("degraded", "polling_only"):
            for room in self._rooms.values():
                self._plan_all(room)

    # --- polling beneath ---

    def _plan(self, job: _Job) -> None:
        """Say when the job is polled next if nothing else happens."""
        interval = self._settings.poll_interval_seconds
        if not self._is_listening(job.room):
            # Half its age, so that a short job is found soon, and a long one is not asked for a hundred times.
            interval = min(interval, max(_YOUNG_SECONDS, (time.monotonic() - job.since) / 2))
        job.due = time.monotonic() + interval * random.uniform(0.8, 1.0)

    def _plan_all(self, room: _Room) -> None:
        for job in room.jobs.values():
            self._plan(job)
        if room.jobs:
            self._plan_tick(room, min(job.due for job in room.jobs.values()))

    def _plan_tick(self, room: _Room, at: float) -> None:
        """See to it that the room is looked at by then."""
        if at >= room.tick_at:
            return
        if not self._ticks or at < self._ticks[0][0]:
            self._alarm.set()
        room.tick_at = at
        heapq.heappush(self._ticks, (at, next(self._numbers), room))

    async def run(self) -> None:
        """Poll what is due, and drop what is kept for tenants that nobody waits for any more, until cancelled."""
        idle = self._settings.tenant_idle_seconds
        drop_lanes_at = time.monotonic() + idle
        while True:
            now = time.monotonic()
            while self._ticks and self._ticks[0][0] <= now:
                at, _, room = heapq.heappop(self._ticks)
                if at == room.tick_at:
                    self._tick(room, now)
            if now >= drop_lanes_at:
                drop_lanes_at = now + idle
                self._lanes.drop_idle()
            until = min(drop_lanes_at, self._ticks[0][0] if self._ticks else drop_lanes_at)
            with anyio.move_on_after(max(0.0, until - time.monotonic())):
                await self._alarm.wait()
            self._alarm = anyio.Event()

    def _tick(self, room: _Room, now: float) -> None:
        room.tick_at = float("inf")
        if not room.jobs:
            if room.empty_since is None:
                room.empty_since = now
            drop_at = room.empty_since + self._settings.tenant_idle_seconds
            if now >= drop_at:
                self._drop(room)
            else:
                self._plan_tick(room, drop_at)
            return
        if room.channel is None:
            self._subscribe_soon(room)
        # Where results are pushed, all jobs of a tenant are asked for together: one statement an interval.
        everything = self._is_listening(room)
        for job in room.jobs.values():
            if everything or job.due <= now + _YOUNG_SECONDS:
                if not job.storing:
                    self._poll(job)
                self._plan(job)
        self._plan_tick(room, min(job.due for job in room.jobs.values()))

    def _drop(self, room: _Room) -> None:
        if self._rooms.get(room.tenant) is room:
            del self._rooms[room.tenant]
        if room.channel is not None and room.callback is not None and self._listener is not None:
            self._listener.unsubscribe(room.channel, room.callback)
            self._channels -= 1


def _for_job(error: Exception, job_id: UUID) -> Exception:
    own = copy.copy(error)
    own.__cause__ = error.__cause__
    if hasattr(own, "job_id"):
        own.job_id = job_id
    return own


def _no_answer(job: _Job) -> DatabaseUnavailableError:
    if job.storing:
        text = f"PostgreSQL did not say in time that job {job.job_id} is stored; whether it is, is unknown"
    else:
        text = f"PostgreSQL did not say in time how job {job.job_id} ended"
    return DatabaseUnavailableError(text, job_id=job.job_id)
