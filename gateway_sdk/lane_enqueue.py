"""Store the jobs that concurrent calls of one tenant enqueue, and ring their relays.

Each sender waits for as long as he likes, and each may have a bound of his own on what is pending; they share the
statement and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.batcher import Batcher
from dispatch_core.database import Database
from dispatch_core.dispatch import EnqueueRow, RelayDispatchRepository
from dispatch_core.dispatch_bounded import Bound
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import BacklogFullError, DatabaseBusyError, DatabaseUnavailableError, RelayDispatchError
from dispatch_core.ring_inside import RingInside
from gateway_sdk.backlogs import Backlogs
from gateway_sdk.health import GatewayCounters
from gateway_sdk.lane import BUSY_TRIES, is_fault_of_one_row, new_backoff
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.wakes import Wakes

__all__ = ["EnqueueItem", "Enqueueing"]

_TELL_EVERY_SECONDS: Final = 0.01
"""Senders who give up within so short a time are told together, by one timer."""

_ATTEMPT_SECONDS: Final = 5.0
"""Where its senders have so long, a statement is not cut off before."""


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


class Enqueueing:
    """What the batches of enqueues do, of all tenants."""

    def __init__(
        self,
        database: Database,
        doorbell: Doorbell,
        settings: GatewaySettings,
        counters: GatewayCounters,
        ring_inside: RingInside,
        backlogs: Backlogs,
    ) -> None:
        self._database = database
        self._settings = settings
        self._counters = counters
        self._ring_inside = ring_inside
        self._backlogs = backlogs
        self._wakes = Wakes(doorbell)
        self._under_way = 0
        """How many statements, of the whole process."""

    def close(self) -> None:
        """Ring what waits for that, and from now on at once."""
        self._wakes.close()

    def lane(self, tenant: str) -> Batcher[EnqueueItem, bool]:
        async def flush(items: list[EnqueueItem]) -> Sequence[bool | Exception]:
            # Of the whole process: a ring inside makes every other one wait, whatever tenant it is of.
            is_alone = lane.in_flight == 1 and not lane.pending and not self._under_way
            self._under_way += 1
            try:
                return await self._send(tenant, items, is_alone)
            finally:
                self._under_way -= 1

        lane = Batcher(
            flush,
            max_items=self._settings.enqueue_batch_items,
            max_bytes=self._settings.enqueue_batch_bytes,
            concurrency=self._settings.enqueue_concurrency,
            splits=is_fault_of_one_row,
        )
        return lane

    async def _send(self, tenant: str, items: list[EnqueueItem], is_alone: bool) -> Sequence[bool | Exception]:
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
                    backoff = backoff or new_backoff()
                    if isinstance(error, DatabaseBusyError) and backoff.attempt + 1 >= BUSY_TRIES:
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
        rings = is_alone and items[0].notify and self._ring_inside.allows()
        until = time.monotonic() + seconds
        answers: Sequence[bool | BacklogFullError]
        async with self._database.connection(seconds) as conn:
            sent_at = time.monotonic()
            repository = RelayDispatchRepository(conn, tenant)
            rows = [item.row for item in items]
            timeout = max(0.001, until - sent_at)
            is_bounded = self._backlogs.is_used or any(item.max_pending for item in items)
            if is_bounded:
                answers = await self._store_bounded(repository, tenant, items, rows, rings, timeout)
            else:
                answers = await repository.enqueue_rows(rows, notify=rings, timeout=timeout)
        took = time.monotonic() - sent_at
        if is_alone:
            self._ring_inside.took(took, rings)
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
        with self._backlogs.sending(tenant, relay_ids, bounds) as sending:
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
