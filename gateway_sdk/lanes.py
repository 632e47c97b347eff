"""The statements that concurrent calls of one tenant share: enqueue, poll, withdraw.

A lane is one `Batcher` of one tenant and kind. It is made when it is first used and dropped when it has been idle, so
that a gateway of ten thousand tenants keeps the few that are busy.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar
from uuid import UUID

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.batcher import Batcher, is_row_fault
from dispatch_core.database import Connection, Database
from dispatch_core.dispatch import EnqueueRow, RelayDispatchRepository
from dispatch_core.dispatch_bounded import Bound
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import (
    BacklogFullError,
    ClientClosedError,
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseUnavailableError,
    RelayDispatchError,
    TenancyError,
)
from dispatch_core.ring_inside import RingInside
from gateway_sdk.backlogs import Backlogs
from gateway_sdk.health import GatewayCounters
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.waits import Polled, for_job
from gateway_sdk.wakes import Wakes

__all__ = ["Asker", "EnqueueItem", "Lanes", "Look", "TenantLanes", "Withdrawal", "bounded"]

In = TypeVar("In")
Out = TypeVar("Out")
Answer = TypeVar("Answer")

_BUSY_TRIES: Final = 5
_POLL_REPEATS: Final = 2
_BACKOFF_BASE: Final = 0.05
_BACKOFF_CAP: Final = 1.0

_TELL_EVERY_SECONDS: Final = 0.01
_ATTEMPT_SECONDS: Final = 5.0

StartSoon: TypeAlias = Callable[[Callable[[], Awaitable[Any]]], None]


class EnqueueItem:
    """A row to be stored, whether to ring its relay, the monotonic time at which its sender gives up, and its bound.

    `sink` is what the lane was given or gave for it: a future, or a call-back that may be called twice.
    """

    __slots__ = ("give_up_at", "max_pending", "notify", "row", "sink")

    def __init__(self, row: EnqueueRow, notify: bool, give_up_at: float, max_pending: Bound = 0) -> None:
        self.row = row
        self.notify = notify
        self.give_up_at = give_up_at
        self.max_pending = max_pending
        self.sink: asyncio.Future[bool] | Callable[[EnqueueItem, bool | Exception], None] | None = None

    def tell(self, error: Exception) -> None:
        """Answer the sender before the batch has its answer."""
        sink = self.sink
        if not isinstance(sink, asyncio.Future):
            if sink is not None:
                sink(self, error)
        elif not sink.done():
            sink.set_exception(error)
            sink.exception()  # seen, whether or not anybody still awaits it


class Withdrawal(NamedTuple):
    """A job to be withdrawn, and the monotonic time after which nobody waits for that."""

    job_id: UUID
    give_up_at: float


class Asker(Protocol):
    """Who asks where a job stands: a job that is waited for, or a look."""

    job_id: UUID

    @property
    def is_over(self) -> bool: ...

    def polled(self, answer: Polled | Exception) -> None: ...


class Look:
    """One question where a job stands, of one caller."""

    __slots__ = ("answer", "job_id")

    def __init__(self, job_id: UUID) -> None:
        self.job_id = job_id
        self.answer: asyncio.Future[Polled] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Nobody waits for the answer any more."""
        return self.answer.done()

    def polled(self, answer: Polled | Exception) -> None:
        """Give the answer, if somebody still waits for it."""
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(for_job(answer, self.job_id))
            self.answer.exception()  # seen, whether or not anybody still awaits it
        else:
            self.answer.set_result(answer)


class TenantLanes(Generic[In, Out]):
    """One lane per busy tenant, of one kind."""

    __slots__ = ("_closed", "_lanes", "_make", "_seen", "_start_soon")

    def __init__(self, start_soon: StartSoon, make: Callable[[str], Batcher[In, Out]]) -> None:
        self._start_soon = start_soon
        self._make = make
        self._lanes: dict[str, Batcher[In, Out]] = {}
        # How many batches each lane had sent when it was last looked at.
        self._seen: dict[str, int] = {}
        self._closed = False

    def __getitem__(self, tenant: str) -> Batcher[In, Out]:
        if self._closed:
            raise ClientClosedError
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = self._make(tenant)
            self._start_soon(lane.run)
        return lane

    def __len__(self) -> int:
        return len(self._lanes)

    def drop_idle(self) -> None:
        """Drop the lanes that have sent nothing since the call before this one."""
        for tenant, lane in list(self._lanes.items()):
            if lane.pending or lane.in_flight or self._seen.get(tenant) != lane.flushes:
                self._seen[tenant] = lane.flushes
                continue
            lane.close()
            del self._lanes[tenant], self._seen[tenant]

    def stop(self) -> None:
        """Take no more."""
        self._closed = True

    async def drain(self) -> None:
        """Wait until what was given has its answers."""
        for lane in list(self._lanes.values()):
            await lane.drain()


class Lanes:
    """The lanes of a client, and what their batches do."""

    def __init__(
        self,
        database: Database,
        doorbell: Doorbell,
        settings: GatewaySettings,
        counters: GatewayCounters,
        start_soon: StartSoon,
    ) -> None:
        self._database = database
        self._doorbell = doorbell
        self._settings = settings
        self._counters = counters
        # Polls never take all connections: what they ask for can wait, and an enqueue cannot.
        # (Fast: without a turn of the event loop where one is free.)
        self._polls = anyio.Semaphore(max(1, database.max_size // 2), fast_acquire=True)
        self.ring_inside = RingInside()
        self.backlogs = Backlogs(counters)
        self._enqueues = 0
        self._wakes = Wakes(doorbell)
        self.enqueue = TenantLanes[EnqueueItem, bool](start_soon, self._make_enqueue)
        self.poll = TenantLanes[Asker, Polled](start_soon, self._make_poll)
        self.expire = TenantLanes[Withdrawal, int](start_soon, self._make_expire)

    @property
    def are_cut_off(self) -> bool:
        """Whether the database is known to be away: what they have to ask waits for the next try to connect."""
        return self._database.is_away

    def drop_idle(self) -> None:
        for lanes in (self.enqueue, self.poll, self.expire):
            lanes.drop_idle()
        self.backlogs.drop_idle()

    def stop(self) -> None:
        """Take no more."""
        self._wakes.close()
        for lanes in (self.enqueue, self.poll, self.expire):
            lanes.stop()

    async def drain(self) -> None:
        """Wait until what was given has its answers."""
        for lanes in (self.enqueue, self.poll, self.expire):
            await lanes.drain()

    # --- enqueue ---

    def _make_enqueue(self, tenant: str) -> Batcher[EnqueueItem, bool]:
        async def flush(items: list[EnqueueItem]) -> Sequence[bool | Exception]:
            # Of the whole process: a ring inside makes every other one wait, whatever tenant it is of.
            is_alone = lane.in_flight == 1 and not lane.pending and not self._enqueues
            self._enqueues += 1
            try:
                return await self._send_enqueue(tenant, items, is_alone)
            finally:
                self._enqueues -= 1

        lane = Batcher(
            flush,
            max_items=self._settings.enqueue_batch_items,
            max_bytes=self._settings.enqueue_batch_bytes,
            concurrency=self._settings.enqueue_concurrency,
            splits=_is_fault_of_one_row,
        )
        return lane

    async def _send_enqueue(self, tenant: str, items: list[EnqueueItem], is_alone: bool) -> Sequence[bool | Exception]:
        """Store the rows, the same ones again after a fault that may pass, each until its sender has given up.

        `is_alone`: this one row is all that its tenant enqueues at this moment.
        """
        backoff: Backoff | None = None
        answers: dict[UUID, bool | Exception] = {}
        patience = _Patience(items)
        try:
            while left := patience.left():
                try:
                    inserted = await self._store(tenant, left, patience.attempt_seconds(), is_alone)
                except (DatabaseUnavailableError, DatabaseBusyError) as error:
                    patience.last_error = error
                    backoff = backoff or Backoff(_BACKOFF_BASE, _BACKOFF_CAP)
                    if isinstance(error, DatabaseBusyError) and backoff.attempt + 1 >= _BUSY_TRIES:
                        answers.update((item.row.job_id, error) for item in left)
                        break
                    await anyio.sleep(min(backoff.next(), patience.seconds()))
                    continue
                if len(left) == len(items):
                    return inserted
                answers.update((item.row.job_id, new) for item, new in zip(left, inserted, strict=True))
                break
        finally:
            patience.close()
        # Those without an answer by now have been told that they waited in vain.
        # (False is an answer: the row was there, from a try whose reply was lost.)
        return [answers[item.row.job_id] if item.row.job_id in answers else patience.gave_up() for item in items]

    async def _store(
        self, tenant: str, items: list[EnqueueItem], seconds: float, is_alone: bool
    ) -> Sequence[bool | BacklogFullError]:
        rings = is_alone and items[0].notify and self.ring_inside.allows()
        until = time.monotonic() + seconds
        answers: Sequence[bool | BacklogFullError]
        async with self._database.connection(seconds) as conn:
            sent_at = time.monotonic()
            repository = RelayDispatchRepository(conn, tenant)
            rows = [item.row for item in items]
            timeout = max(0.001, until - sent_at)
            is_bounded = self.backlogs.is_used or any(item.max_pending for item in items)
            if is_bounded:
                answers = await self._store_bounded(repository, tenant, items, rows, rings, timeout)
            else:
                answers = await repository.enqueue_rows(rows, notify=rings, timeout=timeout)
        took = time.monotonic() - sent_at
        if is_alone:
            self.ring_inside.took(took, rings)
        self._counters.enqueue_statements += 1
        stored = items
        if is_bounded:
            stored = [
                item for item, answer in zip(items, answers, strict=True) if not isinstance(answer, BacklogFullError)
            ]
        self._counters.enqueued += len(stored)
        # A row that was there already comes from a try whose reply was lost, and which may not have rung.
        if not (rings and answers[0]):
            # A caller waits for its result; an enqueue only for being stored.
            calls = {item.row.relay_id for item in stored if item.notify and not isinstance(item.sink, asyncio.Future)}
            for relay_id in {item.row.relay_id for item in stored if item.notify}:
                self._wakes.ring(tenant, relay_id, took, at_once=relay_id in calls)
        return answers

    async def _store_bounded(
        self,
        repository: RelayDispatchRepository,
        tenant: str,
        items: list[EnqueueItem],
        rows: list[EnqueueRow],
        rings: bool,
        timeout: float,
    ) -> Sequence[bool | BacklogFullError]:
        """Store what the bounds allow. The senders share the statement and nothing else: each is refused for itself."""
        relay_ids, bounds = [row.relay_id for row in rows], [item.max_pending for item in items]
        with self.backlogs.sending(tenant, relay_ids, bounds) as sending:
            if not sending.must_count:
                return await repository.enqueue_rows(rows, notify=rings, timeout=timeout)
            return sending.told(
                await repository.enqueue_bounded_rows(
                    rows, sending.bounds(), whole=False, notify=rings, timeout=timeout
                )
            )

    async def store_together(self, tenant: str, rows: Sequence[EnqueueRow], seconds: float) -> None:
        """Store rows that have come together by one statement of their own, and ring. Nothing is tried again."""
        until = time.monotonic() + seconds
        async with self._database.connection(seconds) as conn:
            sent_at = time.monotonic()
            await RelayDispatchRepository(conn, tenant).enqueue_rows(rows, timeout=max(0.001, until - sent_at))
        took = time.monotonic() - sent_at
        self._counters.enqueued += len(rows)
        self._counters.enqueue_statements += 1
        for relay_id in {row.relay_id for row in rows}:
            self._wakes.ring(tenant, relay_id, took, at_once=False)

    # --- poll ---

    def _make_poll(self, tenant: str) -> Batcher[Asker, Polled]:
        async def flush(askers: list[Asker]) -> Sequence[Polled | Exception]:
            # A result may be large: it comes once, however many look at it, and not for those who have gone.
            job_ids = list(dict.fromkeys([asker.job_id for asker in askers if not asker.is_over]))
            if len(job_ids) == len(askers):
                return await self._send_poll(tenant, job_ids)
            answers = await self._send_poll(tenant, job_ids) if job_ids else []
            by_id = dict(zip(job_ids, answers, strict=True))
            return [by_id.get(asker.job_id) for asker in askers]

        return Batcher(
            flush,
            max_items=self._settings.poll_batch_items,
            concurrency=2,
            splits=_is_fault_of_one_row,
            answered=_answer_askers,
        )

    async def _send_poll(self, tenant: str, job_ids: list[UUID]) -> Sequence[Polled | Exception]:
        backoff: Backoff | None = None
        until = time.monotonic() + self._settings.poll_timeout_seconds
        while True:
            try:
                async with self._polls, self._database.connection(until - time.monotonic()) as conn:
                    sent_at = time.monotonic()
                    found, left = await RelayDispatchRepository(conn, tenant).poll_places(
                        job_ids, timeout=max(0.001, until - sent_at)
                    )
                break
            except (DatabaseUnavailableError, DatabaseBusyError):
                # After a restart every pooled connection is dead, and the second try finds a new one.
                backoff = backoff or Backoff(_BACKOFF_BASE, _BACKOFF_CAP)
                pause = backoff.next()
                if backoff.attempt > _POLL_REPEATS or time.monotonic() + pause >= until:
                    raise
            await anyio.sleep(pause)
        if len(job_ids) == 1:
            self.ring_inside.round_trip(time.monotonic() - sent_at)
        self._counters.polled += len(job_ids) - len(left)
        self._counters.poll_statements += 1
        answers: list[Polled | Exception] = [
            # The clock was read after the call was sent, so this is never after the true deadline.
            result
            if isinstance(result, Exception) or (result is not None and result.status.is_terminal)
            else (result, math.inf if result is None else sent_at + result.remaining)
            for result in found
        ]
        # Not asked for here: each page is answered when it is there, and has a statement and a timeout of its own.
        for place in left:
            answers[place] = None
        return answers

    # --- withdraw ---

    def _make_expire(self, tenant: str) -> Batcher[Withdrawal, int]:
        async def flush(items: list[Withdrawal]) -> Sequence[int | Exception]:
            return await self._send_expire(tenant, items)

        # Not repeated after a lost connection: the second answer, 0, might be wrong.
        return Batcher(flush, max_items=1000, retries=_BUSY_TRIES, splits=_is_fault_of_one_row)

    async def _send_expire(self, tenant: str, items: list[Withdrawal]) -> Sequence[int | Exception]:
        job_ids = [item.job_id for item in items]
        # No longer than the most patient waits: what gathers behind it must have its turn in time.
        until = max(item.give_up_at for item in items)
        async with self._database.connection(until - time.monotonic()) as conn:
            ended = await RelayDispatchRepository(conn, tenant).mark_expired_many(
                job_ids, timeout=max(0.001, until - time.monotonic())
            )
        withdrawn = set()
        for job, was_claimed in ended:
            withdrawn.add(job.job_id)
            self._doorbell.ring_results(tenant, job.job_id)
            if was_claimed:
                self._doorbell.ring_cancel(tenant, job.relay_id, job.job_id)
        answers: list[int | Exception] = []
        for job_id in job_ids:
            answers.append(1 if job_id in withdrawn else 0)
            # Asked for twice in one batch, it was withdrawn once.
            withdrawn.discard(job_id)
        return answers


async def bounded(database: Database, seconds: float, run: Callable[[Connection], Awaitable[Answer]]) -> Answer:
    """Run `run(conn)` on a pooled connection, within `seconds` for both getting and using it.

    Raises: DatabaseUnavailableError where none was free in time; ConnectionLostError where there was no answer in time,
    and then the connection is not used again.
    """
    until = anyio.current_time() + seconds
    async with database.connection(seconds) as conn:
        with anyio.move_on_at(until):
            return await run(conn)
        raise ConnectionLostError("PostgreSQL did not answer in time")


def _answer_askers(askers: Sequence[Asker], answers: Sequence[Polled | Exception]) -> None:
    fault: Exception | None = None
    for asker, answer in zip(askers, answers, strict=True):
        try:
            asker.polled(answer)
        except Exception as error:  # noqa: BLE001  raised below, once the others have their answers
            fault = fault or error
    if fault is not None:
        raise fault


def _is_fault_of_one_row(error: RelayDispatchError) -> bool:
    """As `is_row_fault`, but a lane has one tenant, so what is wrong with the tenant is wrong for all."""
    return is_row_fault(error) and not isinstance(error, TenancyError)


class _Patience:
    """The patience of the senders in one batch: each is answered when its own is over, whatever goes on for the others.

    A statement has the time of the *most* patient. With that of the least, a batch that has gathered behind an outage
    would have a few milliseconds for each try, which on a slow link are never enough: it would be cut, connected anew
    and cut again for as long as anybody enqueues.
    """

    __slots__ = ("_timer", "_waiting", "last_error")

    def __init__(self, items: list[EnqueueItem]) -> None:
        self._waiting = items
        self.last_error: RelayDispatchError | None = None
        self._timer: asyncio.TimerHandle | None = None
        # One alone is bounded by its statement's own timeout and by the loop around it.
        if len(items) > 1:
            self._arm(time.monotonic())

    def left(self) -> list[EnqueueItem]:
        """Return those that have not given up, having told the others."""
        now = time.monotonic()
        if any(item.give_up_at <= now for item in self._waiting):
            for item in self._waiting:
                if item.give_up_at <= now:
                    item.tell(self.gave_up())
            self._waiting = [item for item in self._waiting if item.give_up_at > now]
        return self._waiting

    def seconds(self) -> float:
        """Return how long the most patient still waits."""
        return max(0.0, max((item.give_up_at for item in self._waiting), default=0.0) - time.monotonic())

    def attempt_seconds(self) -> float:
        """Return how long one statement may take: so that another one can follow, where there is time for two."""
        seconds = self.seconds()
        return min(seconds, max(seconds / 2, _ATTEMPT_SECONDS))

    def gave_up(self) -> DatabaseUnavailableError:
        error = DatabaseUnavailableError("not enqueued in time; whether the job was stored is unknown")
        error.__cause__ = self.last_error
        return error

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, now: float) -> None:
        wait = min(item.give_up_at for item in self._waiting) - now
        self._timer = asyncio.get_running_loop().call_later(max(wait, _TELL_EVERY_SECONDS), self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self.left():
            self._arm(time.monotonic())
