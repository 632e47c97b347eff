"""Wait for news of durable jobs: pushed where they can be, polled beneath always, one read for all of a tenant.

A job that somebody waits for is due when its id was pushed, when a tick has come, and when its tenant's channel begins
to be listened to. One task per tenant reads what is due: the jobs' rows in one statement, and in another one those
whose progress is watched, with their counters of this moment, which reads all their chunks. So a row is read at once,
and counters only every now and then. Where that takes too long, what is watched is the row with the counters it has.

**Order (C03).** A watcher is registered here before its job is read, and is given nothing that was asked for before.
What is pushed during a read is read again.

A watcher holds the newest news and nothing else: who is slow skips what came in between.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Final
from uuid import UUID

import anyio

from dispatch_core.durable_models import DurableJob, JobStatus
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import DatabaseUnavailableError, RelayDispatchError, UnknownJobError, WaitTimeoutError
from dispatch_core.listener import Listener, ListenerState
from gateway_sdk.channels import ResultChannels
from gateway_sdk.durable_calls import Calls
from gateway_sdk.tasks import StartSoon
from gateway_sdk.under_way import Closed
from gateway_sdk.waits import for_job

__all__ = ["JobWatches", "Watcher"]

_YOUNG_SECONDS: Final = 0.05
"""The shortest time between two polls of a job that is not pushed."""

_POLLS_A_SECOND: Final = 200
"""How many statements a second such polls may make, beyond which they come at longer intervals."""

_PROGRESS_SECONDS: Final = 2.0
"""Between two looks at progress that nobody has pushed."""

_COUNT_SECONDS: Final = 0.1
"""Between two counts of the chunks of a job, at least."""

_COUNT_SHARE: Final = 9.0
"""Times what a count has taken, until the next one: so they take a tenth of the time."""

_COUNTED_AT_ONCE: Final = 20
"""Jobs whose chunks are counted in one statement."""

_SILENCE_SECONDS: Final = 1.0
"""A read that has had no answer for so long, when a wait is to end, means that the database is away."""


class Watcher:
    """One who waits for news of one job. Close it, whatever has come of it."""

    __slots__ = ("_bell", "_error", "_job", "_newest", "counts", "is_answered", "is_patient", "since", "status")

    def __init__(self, job: _Job, counts: bool, is_patient: bool) -> None:
        self._job = job
        self._bell = anyio.Event()
        self._newest: DurableJob | None = None
        self._error: Exception | None = None
        self.counts = counts
        """It wants to know how far the job is."""
        self.is_patient = is_patient
        """It waits for its first news through an outage."""
        self.is_answered = False
        self.status: JobStatus | None = None
        """That of the newest news."""
        self.since = job.room.reads

    async def next(self) -> DurableJob:
        """Return the newest of what was read since the call before, when there is something.

        Raises: UnknownJobError, ClientClosedError; DatabaseUnavailableError where there was nothing yet and it is not
        patient.
        """
        while self._newest is None and self._error is None:
            await self._bell.wait()
            self._bell = anyio.Event()
        return self.take()

    def take(self) -> DurableJob:
        """Return what `next` has to return now. Raises: as it does; WaitTimeoutError where there is nothing."""
        if self._error is not None:
            raise self._error
        if self._newest is None:
            raise self.timed_out()
        newest, self._newest = self._newest, None
        return newest

    def timed_out(self) -> RelayDispatchError:
        """Make the error of a wait whose time is over: that the job goes on, if the database has said so."""
        job = self._job
        if job.error is not None:
            error = for_job(job.error, job.job_id)
            assert isinstance(error, RelayDispatchError)
            return error
        if not self.is_answered or (job.asked_at is not None and time.monotonic() - job.asked_at >= _SILENCE_SECONDS):
            return DatabaseUnavailableError(
                f"PostgreSQL did not say in time where durable job {job.job_id} stands", job_id=job.job_id
            )
        return WaitTimeoutError(f"durable job {job.job_id} had not ended within the timeout", job_id=job.job_id)

    def deliver(self, news: DurableJob) -> None:
        """Take news, unless it ended before."""
        self.is_answered = True
        self.status = news.status
        if self._error is None:
            self._newest = news
            self._bell.set()

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if self._error is None:
            self._error = error
            self._bell.set()

    def close(self) -> None:
        """Wait no more. Idempotent: yes."""
        self._job.left(self)


class _Job:
    """What is known of one job that somebody waits for. Times are of the monotonic clock."""

    __slots__ = (
        "asked_at", "count_at", "count_due", "due", "error", "interval", "is_uncounted", "is_wanted", "job_id", "key",
        "room", "since", "watchers",
    )  # fmt: skip

    def __init__(self, room: _Room, job_id: UUID) -> None:
        self.room = room
        self.job_id = job_id
        self.key = job_id.hex
        self.watchers: list[Watcher] = []
        self.since = time.monotonic()
        self.is_wanted = True
        """Its row is to be read now."""
        self.due = self.since
        """When to read its row if nothing else happens."""
        self.interval = 0.0
        """What was between the last read and that, about."""
        self.count_due = self.since
        """When to count its chunks, if somebody wants that."""
        self.count_at = self.since
        """Not before."""
        self.is_uncounted = False
        """There was no answer in time when they were to be counted: perhaps they are millions."""
        self.asked_at: float | None = None
        """Since when a read is on its way, if one is."""
        self.error: RelayDispatchError | None = None
        """Why the last read had no answer."""

    @property
    def next_at(self) -> float:
        """When something is to be read of it."""
        if self.is_wanted:
            return 0.0
        return min(self.due, self.next_count_at) if self.counts else self.due

    @property
    def next_count_at(self) -> float:
        """When its chunks are to be counted, if somebody wants that."""
        return max(self.count_due, self.count_at)

    @property
    def counts(self) -> bool:
        """Somebody wants to know how far it is."""
        return any(watcher.counts for watcher in self.watchers)

    def is_news_to(self, watcher: Watcher, news: DurableJob) -> bool:
        """Tell whether a watcher of progress is to be given the row, since that is all there is."""
        return self.is_uncounted and (not watcher.is_answered or watcher.status is not news.status)

    def left(self, watcher: Watcher) -> None:
        """Forget a watcher, and the job with the last one."""
        if watcher in self.watchers:
            self.watchers.remove(watcher)
            if not self.watchers and self.room.jobs.get(self.key) is self:
                del self.room.jobs[self.key]
                self.room.empty_since = time.monotonic()


class _Room:
    """The jobs of one tenant, by the hexadecimal form of their ids, which is what a push carries."""

    __slots__ = ("bell", "empty_since", "jobs", "reads", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.jobs: dict[str, _Job] = {}
        self.bell = anyio.Event()
        self.empty_since = time.monotonic()
        self.reads = 0
        """How many reads were begun."""


class JobWatches:
    """All who wait for durable jobs in a client."""

    def __init__(
        self, calls: Calls, channels: ResultChannels, listener: Listener | None, start_soon: StartSoon
    ) -> None:
        self._calls = calls
        self._channels = channels
        self._start_soon = start_soon
        self._rooms: dict[str, _Room] = {}
        self._closed: Closed | None = None
        if listener is not None:
            listener.on_catch_up(self._all_due)
            listener.on_state_change(self._on_state_change)

    def add(self, tenant: str, job_id: UUID, *, counts: bool = False, is_patient: bool = False) -> Watcher:
        """Begin to wait for news of the job; the first is where it stands. Raises: ClientClosedError."""
        if self._closed is not None:
            raise self._closed(job_id)
        room = self._rooms.get(tenant)
        if room is None:
            room = self._rooms[tenant] = _Room(tenant)
            self._start_soon(partial(self._serve, room))
        job = room.jobs.get(job_id.hex)
        if job is None:
            job = room.jobs[job_id.hex] = _Job(room, job_id)
        watcher = Watcher(job, counts, is_patient)
        job.watchers.append(watcher)
        self._due(job)
        return watcher

    @property
    def waiting(self) -> int:
        """How many jobs are waited for."""
        return sum(len(room.jobs) for room in self._rooms.values())

    def close(self, reason: Closed) -> None:
        """End every wait, these and later ones, with what `reason` makes for its job."""
        self._closed = reason
        for room in self._rooms.values():
            for job in room.jobs.values():
                for watcher in job.watchers:
                    watcher.fail(reason(job.job_id))

    # --- what makes a job due ---

    def _due(self, job: _Job) -> None:
        now = time.monotonic()
        if job.counts:
            job.count_due = now
        # Its row tells at once whether it has ended, where its chunks may not be counted yet.
        if job.count_at > now or not all(watcher.counts for watcher in job.watchers):
            job.is_wanted = True
        job.room.bell.set()

    def _on_push(self, room: _Room, payload: str) -> None:
        for key in payload.split(","):
            job = room.jobs.get(key)
            if job is not None:
                self._due(job)

    def _room_due(self, room: _Room) -> None:
        for job in room.jobs.values():
            self._due(job)

    def _all_due(self) -> None:
        for room in self._rooms.values():
            self._room_due(room)

    def _on_state_change(self, state: ListenerState) -> None:
        if state in ("degraded", "polling_only"):
            for room in self._rooms.values():
                for job in room.jobs.values():
                    self._plan(job)
                room.bell.set()

    # --- the reads of a tenant ---

    async def _serve(self, room: _Room) -> None:
        """Read what is due until nobody has waited for a while."""
        idle = self._calls.settings.tenant_idle_seconds
        while True:
            now = time.monotonic()
            jobs = list(room.jobs.values())
            if jobs:
                self._channels.join(room.tenant, partial(self._on_push, room), partial(self._room_due, room))
                until = min(job.next_at for job in jobs)
            else:
                until = room.empty_since + idle
            if now < until:
                with anyio.move_on_after(until - now):
                    await room.bell.wait()
                room.bell = anyio.Event()
            elif jobs:
                await self._read_due(room, jobs, now)
            else:
                # Not where this fails: the client's failure then ends the waits of every room that there is.
                del self._rooms[room.tenant]
                self._channels.leave(room.tenant)
                return

    async def _read_due(self, room: _Room, jobs: Sequence[_Job], now: float) -> None:
        rows = [job for job in jobs if job.is_wanted]
        if any(job.due <= now for job in jobs):
            # A tick is one statement: for all, where nothing else is expected; for those that would be next, where all
            # are polled and of different ages.
            is_listening = self._channels.is_listening(room.tenant)
            rows = [job for job in jobs if job.is_wanted or is_listening or job.due <= now + job.interval / 4]
        counted = [job for job in jobs if job.counts]
        counts = []
        if any(job.next_count_at <= now for job in counted):
            soon = now + _PROGRESS_SECONDS / 4
            counts = [job for job in counted if job.count_at <= now and job.count_due <= soon]
        for job in rows:
            job.is_wanted = False
            self._plan(job)
        for job in counts:
            self._plan_count(job)
        size = self._calls.settings.poll_batch_items
        for start in range(0, len(rows), size):
            await self._read(room, rows[start : start + size], counted=False)
        for start in range(0, len(counts), _COUNTED_AT_ONCE):
            await self._read(room, counts[start : start + _COUNTED_AT_ONCE], counted=True)

    async def _read(self, room: _Room, jobs: Sequence[_Job], *, counted: bool) -> None:
        jobs = [job for job in jobs if job.watchers]
        if not jobs:
            return
        ids = [job.job_id for job in jobs]

        async def run(repository: DurableRepository) -> list[DurableJob]:
            return await repository.jobs(room.tenant, ids, fresh=counted)

        room.reads += 1
        number, began = room.reads, time.monotonic()
        for job in jobs:
            job.asked_at = began
        try:
            found = {job.job_id: job for job in await self._calls.poll(run)}
        except RelayDispatchError as error:
            for job in jobs:
                if counted and error.retryable:
                    self._uncounted(job, time.monotonic() - began)
                else:
                    self._failed(job, error, number)
            return
        finally:
            for job in jobs:
                job.asked_at = None
        now = time.monotonic()
        for job in jobs:
            job.error = None
            if counted:
                job.is_uncounted = False
                job.count_at = now + max(_COUNT_SECONDS, (now - began) * _COUNT_SHARE)
            news = found.get(job.job_id)
            for watcher in [watcher for watcher in job.watchers if watcher.since < number]:
                if news is None:
                    watcher.fail(UnknownJobError(f"no durable job {job.job_id} for this tenant", job_id=job.job_id))
                elif counted or not watcher.counts or news.status.is_terminal or job.is_news_to(watcher, news):
                    # To who watches progress, counters of an earlier count would be a step back.
                    watcher.deliver(news)

    def _uncounted(self, job: _Job, took: float) -> None:
        # Its row tells whether the database is away, and where the job stands.
        job.is_uncounted = job.is_wanted = True
        job.count_at = time.monotonic() + max(_COUNT_SECONDS, took * _COUNT_SHARE)

    def _failed(self, job: _Job, error: RelayDispatchError, number: int) -> None:
        job.error = error
        for watcher in [watcher for watcher in job.watchers if watcher.since < number]:
            if not error.retryable or not (watcher.is_answered or watcher.is_patient):
                watcher.fail(for_job(error, job.job_id))

    # --- polling beneath ---

    def _plan(self, job: _Job) -> None:
        """Say when the job's row is read next if nothing else happens."""
        interval = self._calls.settings.poll_interval_seconds
        now = time.monotonic()
        if not self._channels.is_listening(job.room.tenant):
            # Half its age, so that a short job is found soon, and a long one is not asked for a hundred times.
            shortest = max(_YOUNG_SECONDS, self._channels.unheard(len(self._rooms)) / _POLLS_A_SECOND)
            interval = min(interval, max(shortest, (now - job.since) / 2))
        job.interval = interval
        job.due = now + interval * random.uniform(0.8, 1.0)

    def _plan_count(self, job: _Job) -> None:
        interval = min(self._calls.settings.poll_interval_seconds, _PROGRESS_SECONDS)
        job.count_due = time.monotonic() + interval * random.uniform(0.8, 1.0)
