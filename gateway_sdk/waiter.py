"""Wait for the results of jobs: pushed where it can be, polled beneath always, and never longer than promised.

A job that somebody waits for goes through this:

    waiting     a push (its id on the tenant's channel), a tick, or a catch-up -> it is polled
    polled      ended -> its waits end with the result; or that was too large for this answer -> it is polled again
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

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Final
from uuid import UUID

from dispatch_core.errors import DatabaseUnavailableError, RelayDispatchError, UnknownJobError, WaitTimeoutError
from dispatch_core.listener import Listener, ListenerState
from dispatch_core.models import DispatchResult, DispatchStatus
from gateway_sdk.alarms import Alarms
from gateway_sdk.channels import ResultChannels
from gateway_sdk.due import Due
from gateway_sdk.health import GatewayCounters
from gateway_sdk.lane_expire import Withdrawal
from gateway_sdk.lanes import Lanes
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.waits import Deliver, Job, Outcome, Polled, Room, Wait, for_job

__all__ = ["ResultWaiter"]

_YOUNG_SECONDS: Final = 0.05
"""The shortest time between two polls of a job whose result is not pushed."""

_POLLS_A_SECOND: Final = 200
"""How many statements a second such polls may make, beyond which they come at longer intervals."""

_SILENCE_SECONDS: Final = 1.0
"""A poll that has had no answer for so long, when a wait is to end, means that the database is away."""


class ResultWaiter:
    """All waits of a client. Run `run` in the owner's task group."""

    def __init__(
        self,
        lanes: Lanes,
        channels: ResultChannels,
        listener: Listener | None,
        settings: GatewaySettings,
        counters: GatewayCounters,
    ) -> None:
        self._lanes = lanes
        self._channels = channels
        self._settings = settings
        self._counters = counters
        self._alarms = Alarms()
        self._rooms: dict[str, Room] = {}
        self._ticks = Due[Room]()
        self._closed: Callable[[UUID], Exception] | None = None
        if listener is not None:
            listener.on_catch_up(self._poll_all)
            listener.on_state_change(self._on_state_change)

    # --- for the verbs ---

    def add(
        self,
        tenant: str,
        job_id: UUID,
        deliver: Deliver,
        *,
        timeout: float | None = None,
        storing: bool = False,
        deadline: float | None = None,
        ends_first: bool = False,
    ) -> Wait:
        """Call `deliver(outcome)` once, or resolve that future: when the job has ended, `timeout` seconds have passed,
        or the deadline is reached.

        With a `timeout` of 0 it waits for the answer to one poll, but no longer than `_SILENCE_SECONDS`.

        `storing`: the caller is about to enqueue the job, and says so by `Wait.stored`; `deadline` is then a monotonic
        time that is not after the job's deadline. `ends_first`: the timeout is not after it either.

        Raises: ClientClosedError.
        """
        if self._closed is not None:
            raise self._closed(job_id)
        room = self._rooms.get(tenant)
        if room is None:
            room = self._rooms[tenant] = Room(tenant, self)
            self._join(room)
        key = job_id.hex
        job = room.jobs.get(key)
        is_new = job is None
        if job is None:
            job = room.jobs[key] = Job(room, job_id, key, storing)
            room.empty_since = None
        wait = Wait(job, deliver)
        job.waits.append(wait)
        wait.is_look = timeout == 0 and not storing
        if timeout is not None:
            self._alarms.time_out(_SILENCE_SECONDS if wait.is_look else timeout, wait)
        if is_new:
            if ends_first:
                job.deadline = deadline
            elif deadline is not None:
                self._arm(job, deadline)
            if not storing:
                self._poll(job)
            self._plan(job)
            return wait
        if job.deadline is not None:
            self._arm(job, job.deadline)  # another one waits now, and perhaps for longer
        if wait.is_look or (not job.polling and not self._channels.is_listening(tenant)):
            self._poll(job)  # else it will be told, by the poll under way or by a push
        return wait

    @property
    def waiting(self) -> int:
        """How many jobs are waited for."""
        return sum(len(room.jobs) for room in self._rooms.values())

    @property
    def tenants(self) -> int:
        """How many tenants something is kept for."""
        return len(self._rooms)

    def close(self, reason: Callable[[UUID], Exception]) -> None:
        """End every wait, these and later ones, with what `reason` makes for its job."""
        self._closed = reason
        for room in self._rooms.values():
            for job in list(room.jobs.values()):
                self._finish(job, partial(reason, job.job_id))

    # --- the life of a job ---

    def on_stored(self, job: Job) -> None:
        """Note that the job is committed."""
        job.storing = False
        if not job.waits:
            return
        # Where it has been listened to since before the commit, a result will ring: no poll is needed, but to learn of
        # a deadline that only the database knows (`expires_at`, by its clock).
        is_told = (job.timer or job.deadline) is not None and self._channels.is_listening(job.room.tenant)
        if job.again or job.at_deadline or not is_told:
            job.again = False
            self._poll(job)

    def on_left(self, wait: Wait) -> None:
        """Forget a wait, and its job with the last one."""
        job = wait.job
        if wait in job.waits:
            job.waits.remove(wait)
            if not job.waits:
                self._forget(job)

    def _forget(self, job: Job) -> None:
        self._set_timer(job, None)
        if job.room.jobs.get(job.key) is job:
            del job.room.jobs[job.key]

    def _finish(self, job: Job, outcome: DispatchResult | Callable[[], Exception]) -> None:
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

    def _poll(self, job: Job) -> None:
        """Ask where the job stands."""
        if job.polling or job.storing:
            job.again = True
            return
        try:
            self._lanes.poll[job.room.tenant].put(job, 0)
        except RelayDispatchError:
            return  # closing: `close` ends the waits
        job.polling = True
        job.asked_at = time.monotonic()

    def on_polled(self, job: Job, answer: Polled | Exception) -> None:
        """Take the answer to a poll of the job."""
        job.polling = False
        if not job.waits:
            return
        if isinstance(answer, DispatchResult):
            self._ended(job, answer)
            return
        if isinstance(answer, Exception):
            self._poll_failed(job, answer)
            return
        job.error = None
        if answer is None:
            # It has ended, so its deadline is no matter any more, and what it waits for are the results before it.
            job.at_deadline = False
            job.deadline = None
            self._set_timer(job, None)
            self._poll(job)
            return
        result, deadline = answer
        if result is None:
            self._finish(job, partial(UnknownJobError, job_id=job.job_id))
        else:
            if job.at_deadline and deadline <= time.monotonic():
                # Somebody keeps its row locked, and a poll that waited for it knows no more: it is asked again until
                # the grace is over, for which the timer runs.
                for wait in [wait for wait in job.waits if wait.is_look]:
                    self.on_timed_out(wait)
                if job.waits:
                    self._poll(job)
                return
            job.at_deadline = False
            self._arm(job, deadline)
            self._plan(job)
            if job.again:
                job.again = False
                self._poll(job)
            else:
                for wait in [wait for wait in job.waits if wait.is_look]:
                    self.on_timed_out(wait)

    def _ended(self, job: Job, result: DispatchResult) -> None:
        job.error = None
        if result.status is DispatchStatus.EXPIRED and result.completed_at is None and not job.marked:
            job.expired = result
            self._mark(job)
        else:
            self._finish(job, result)

    def _poll_failed(self, job: Job, error: Exception) -> None:
        job.again = False
        if job.expired is not None:
            self._finish(job, job.expired)
        elif not isinstance(error, RelayDispatchError) or not error.retryable or job.at_deadline:
            self._finish(job, partial(for_job, error, job.job_id))
        else:
            job.error = error
            if job.timer is None:
                # No deadline is known, so those who gave no timeout would wait without any bound.
                for wait in [wait for wait in job.waits if not wait.is_set]:
                    self.on_left(wait)
                    wait.end(for_job(error, job.job_id))
            if job.waits:
                self._plan(job)

    def on_timed_out(self, wait: Wait) -> None:
        """End a wait whose time is over."""
        job = wait.job
        wait.cancel()
        if job.expired is not None:
            outcome: Outcome = job.expired
        elif job.error is not None:
            outcome = for_job(job.error, job.job_id)
        elif job.storing or job.is_silent(0.0 if wait.is_look else _SILENCE_SECONDS) or self._lanes.are_cut_off:
            outcome = _no_answer(job)
        else:
            outcome = WaitTimeoutError(job_id=job.job_id)
        self.on_left(wait)
        wait.end(outcome)

    # --- the deadline ---

    def _set_timer(self, job: Job, seconds: float | None, callback: Callable[[Job], None] | None = None) -> None:
        if job.timer is not None:
            job.timer.cancel()
        job.timer = None if seconds is None or callback is None else self._alarms.call_later(seconds, callback, job)

    def _arm(self, job: Job, deadline: float) -> None:
        """Set the timer for a deadline that is not before `deadline`; each poll gives a closer one."""
        job.deadline = None
        self._set_timer(job, max(0.001, deadline - time.monotonic()), self._reached)

    def _reached(self, job: Job) -> None:
        if job.storing or job.is_silent(_SILENCE_SECONDS) or self._lanes.are_cut_off:
            self._give_up(job)
            return
        job.at_deadline = True
        self._set_timer(job, self._settings.deadline_grace_seconds, self._give_up)
        self._poll(job)

    def _give_up(self, job: Job) -> None:
        self._finish(job, job.expired or partial(_no_answer, job))

    def _mark(self, job: Job) -> None:
        self._set_timer(job, self._settings.deadline_grace_seconds, self._give_up)
        try:
            # The waits end with the grace, but the statement may go on.
            item = Withdrawal(job.job_id, time.monotonic() + self._settings.write_timeout_seconds)
            self._lanes.expire[job.room.tenant].put_nowait(item, 0, partial(self._marked, job))
        except RelayDispatchError:
            pass  # closing: `close` ends the waits

    def _marked(self, job: Job, _item: Withdrawal, answer: int | Exception) -> None:
        if not job.waits:
            return
        job.marked = True
        if isinstance(answer, Exception) and job.expired is not None:
            self._finish(job, job.expired)
        else:
            self._poll(job)

    # --- push ---

    def _join(self, room: Room) -> None:
        self._channels.join(room.tenant, partial(self._on_results, room), partial(self._poll_room, room))

    def _on_results(self, room: Room, payload: str) -> None:
        jobs = room.jobs
        for key in payload.split(","):
            job = jobs.get(key)
            if job is not None:
                job.pushed = True
                self._poll(job)

    def _poll_all(self) -> None:
        for room in self._rooms.values():
            self._poll_room(room)

    def _poll_room(self, room: Room) -> None:
        for job in room.jobs.values():
            self._poll(job)

    def _on_state_change(self, state: ListenerState) -> None:
        if state in ("degraded", "polling_only"):
            for room in self._rooms.values():
                for job in room.jobs.values():
                    self._plan(job)

    # --- polling beneath ---

    def _plan(self, job: Job) -> None:
        """Say when the job is polled next if nothing else happens."""
        interval = self._settings.poll_interval_seconds
        if not self._channels.is_listening(job.room.tenant):
            # Half its age, so that a short job is found soon, and a long one is not asked for a hundred times; but each
            # tenant is a statement, so the more of them there are, the less often.
            shortest = max(_YOUNG_SECONDS, self._channels.unheard(len(self._rooms)) / _POLLS_A_SECOND)
            interval = min(interval, max(shortest, (time.monotonic() - job.since) / 2))
        job.due = time.monotonic() + interval * random.uniform(0.8, 1.0)
        self._ticks.plan(job.room, job.due)

    async def run(self) -> None:
        """Poll what is due, and drop what is kept for tenants that nobody waits for any more, until cancelled."""
        idle = self._settings.tenant_idle_seconds
        drop_lanes_at = time.monotonic() + idle
        while True:
            for room in self._ticks.take():
                self._tick(room)
            now = time.monotonic()
            if now >= drop_lanes_at:
                drop_lanes_at = now + idle
                self._lanes.drop_idle()
            await self._ticks.wait(drop_lanes_at)

    def _tick(self, room: Room) -> None:
        now = time.monotonic()
        if not room.jobs:
            if room.empty_since is None:
                room.empty_since = now
            drop_at = room.empty_since + self._settings.tenant_idle_seconds
            if now < drop_at:
                self._ticks.plan(room, drop_at)
            else:
                del self._rooms[room.tenant]
                self._channels.leave(room.tenant)
            return
        self._join(room)
        # Where results are pushed, all jobs of a tenant are asked for together, when one is due: one statement an
        # interval. None may be, for this may be the tick of a job that was polled meanwhile.
        soon = now + _YOUNG_SECONDS
        everything = self._channels.is_listening(room.tenant) and any(job.due <= soon for job in room.jobs.values())
        for job in room.jobs.values():
            if everything or job.due <= soon:
                if not job.storing:
                    self._poll(job)
                self._plan(job)
            else:
                self._ticks.plan(room, job.due)


def _no_answer(job: Job) -> DatabaseUnavailableError:
    if job.storing:
        text = f"PostgreSQL did not say in time that job {job.job_id} is stored; whether it is, is unknown"
    else:
        text = f"PostgreSQL did not say in time how job {job.job_id} ended"
    return DatabaseUnavailableError(text, job_id=job.job_id)
