"""The statements that are not shared: an enqueue under an idempotency key, many jobs at once, many polls at once."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar
from uuid import UUID

import anyio
import anyio.lowlevel

from dispatch_core.backoff import Backoff
from dispatch_core.database import Connection, Database
from dispatch_core.dispatch import EnqueueRow, RelayDispatchRepository
from dispatch_core.dispatch_bounded import Bound, raise_if_refused
from dispatch_core.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    InvalidInputError,
    MalformedHeadersError,
    RelayDispatchError,
)
from dispatch_core.models import DispatchRequest, DispatchResult
from dispatch_core.requests import Preparer
from dispatch_core.task_groups import TaskGroup
from gateway_sdk.backlogs import Backlogs
from gateway_sdk.bounded import bounded
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.under_way import UnderWay

__all__ = ["DirectStatements", "Load"]

Answer = TypeVar("Answer")

_LOCK_TIMEOUT: Final = "55P03"
_BUSY_TRIES: Final = 5
_CHUNK_ROWS: Final = 1000
_SLICE_ROWS: Final = 100


class Load:
    """Requests of one `enqueue_many`, prepared chunk by chunk; chunks stay, so that all can be sent again."""

    def __init__(
        self, preparer: Preparer, requests: Sequence[DispatchRequest], limit_bytes: int, max_pending: Bound = 0
    ) -> None:
        """Prepare the first chunk. A chunk is one statement, bounded by rows and by bytes. Raises: as `prepare`; and
        InvalidInputError where one relay's jobs are more than `max_pending`, so that they could never be stored."""
        self.jobs = Counter(getattr(request, "relay_id", "") for request in requests) if max_pending else Counter[str]()
        """How many there are for each relay, where there is a bound."""
        self.max_pending = max_pending
        for relay_id, count in self.jobs.items():
            if count > max_pending:
                raise InvalidInputError(
                    f"{count} jobs for relay {relay_id} in one call, and max_pending is {max_pending}: for so many"
                    " there can never be room"
                )
        self._preparer = preparer
        self._requests = requests
        self._limit = limit_bytes
        self._next = 0
        self._open: list[EnqueueRow] = []
        self._open_bytes = 0
        self.chunks: list[list[EnqueueRow]] = []
        while self._take_slice():
            pass

    @property
    def is_whole(self) -> bool:
        """Every request is in a chunk."""
        return self._next == len(self._requests)

    @property
    def rows(self) -> list[EnqueueRow]:
        return [row for chunk in self.chunks for row in chunk]

    async def store(self, repository: RelayDispatchRepository, number: int, *, notify: bool = False) -> None:
        """Store one chunk, after those before it and in one transaction with them. Raises: BacklogFullError.

        There has to be room for all jobs of a relay when its first ones come: nothing is stored in vain.
        """
        chunk = self.chunks[number]
        relay_ids = [row.relay_id for row in chunk] if self.max_pending else []
        asked = {row.relay_id for before in self.chunks[:number] for row in before} if relay_ids else set()
        here = Counter(relay_ids)
        bounds = [
            0 if relay_id in asked else self.max_pending - (self.jobs[relay_id] - here[relay_id])
            for relay_id in relay_ids
        ]
        if not any(bounds):
            await repository.enqueue_rows(chunk, notify=notify)
            return
        told = await repository.enqueue_bounded_rows(chunk, bounds, notify=notify)
        raise_if_refused(told, self.jobs, self.max_pending)

    async def prepare_chunk(self) -> None:
        """Prepare one more chunk, with pauses in which others run and bytes leave. Raises: as `prepare`."""
        await anyio.lowlevel.checkpoint()
        while self._take_slice():
            await anyio.lowlevel.checkpoint()

    def _take_slice(self) -> bool:
        """Prepare some rows more; False when that has closed a chunk."""
        upto = min(self._next + _SLICE_ROWS, len(self._requests))
        before = len(self.chunks)
        for row in self._preparer.rows(self._requests[self._next : upto]):
            if row.idempotency_key is not None:
                raise InvalidInputError("enqueue_many takes no idempotency keys: use enqueue")
            size = row.size
            if self._open and (self._open_bytes + size > self._limit or len(self._open) == _CHUNK_ROWS):
                self._close_chunk()
            self._open.append(row)
            self._open_bytes += size
        self._next = upto
        if upto == len(self._requests) or len(self._open) == _CHUNK_ROWS:
            self._close_chunk()
        return len(self.chunks) == before

    def _close_chunk(self) -> None:
        self.chunks.append(self._open)
        self._open, self._open_bytes = [], 0


class DirectStatements(UnderWay):
    """Each is tried again after a fault that may pass, until `give_up_at`, a monotonic time; all are idempotent.

    All raise ClientClosedError where the client has closed before they had their answer.
    """

    def __init__(self, database: Database, settings: GatewaySettings, backlogs: Backlogs) -> None:
        super().__init__()
        self._database = database
        self._settings = settings
        self._backlogs = backlogs
        # An enqueue with a key may wait for somebody's transaction: so there are never so many of them that others get
        # no connection.
        self._keyed = anyio.Semaphore(max(1, database.max_size // 2))

    async def enqueue_keyed(
        self, tenant: str, row: EnqueueRow, give_up_at: float, max_pending: Bound = 0
    ) -> tuple[UUID, bool]:
        """Store a row under its key; return the job's id and whether it was there before.

        Raises: IdempotencyConflictError; BacklogFullError; DatabaseBusyError where the key is held by another
        transaction for too long.
        """

        async def store(conn: Connection) -> tuple[UUID, bool]:
            seconds = max(0.001, min(self._settings.lock_timeout_seconds, give_up_at - time.monotonic()))
            return await RelayDispatchRepository(conn, tenant).enqueue_keyed_row(
                row, lock_timeout_seconds=seconds, max_pending=max_pending
            )

        async def attempt(seconds: float) -> tuple[UUID, bool]:
            # Whoever gets through has half of his time left: with less, all who queue would be cut off one by one.
            with anyio.move_on_after(seconds / 2) as queueing:
                async with self._keyed:
                    queueing.deadline = math.inf
                    return await bounded(self._database, max(0.001, give_up_at - time.monotonic()), store)
            raise DatabaseBusyError(
                "too many enqueues wait for idempotency keys; nothing was sent", sqlstate=_LOCK_TIMEOUT
            )

        with self.under_way(row.job_id), self._backlogs.sending(tenant, [row.relay_id], [max_pending]):
            return await self._repeat(attempt, give_up_at, row.job_id)

    async def enqueue_many(self, tenant: str, load: Load, give_up_at: float) -> int:
        """Store all rows or none; return how many statements that took.

        While the server works on one chunk, the next one is prepared.
        """

        async def store(conn: Connection) -> None:
            repository = RelayDispatchRepository(conn, tenant)
            if load.is_whole and len(load.chunks) == 1:
                await load.store(repository, 0)
                return
            async with conn.transaction():
                number = 0
                while number < len(load.chunks):
                    await self._send_and_prepare(repository, load, number)
                    number += 1

        relay_ids = list(load.jobs.elements())
        bounds = [load.max_pending] * len(relay_ids)
        with self.under_way(), self._backlogs.sending(tenant, relay_ids, bounds):
            await self._repeat(lambda seconds: bounded(self._database, seconds, store), give_up_at)
        return len(load.chunks)

    async def _send_and_prepare(self, repository: RelayDispatchRepository, load: Load, number: int) -> None:
        error: RelayDispatchError | None = None

        async def send() -> None:
            nonlocal error
            try:
                await load.store(repository, number)
            except RelayDispatchError as raised:  # as itself, and not in a group
                error = raised

        invalid: Exception | None = None
        async with TaskGroup() as group:
            group.start_soon(send)
            if number + 1 == len(load.chunks) and not load.is_whole:
                try:
                    await load.prepare_chunk()
                except Exception as raised:  # noqa: BLE001  (also what a map of the caller's raises: as itself)
                    invalid = raised
        if error is not None or invalid is not None:
            raise error or invalid  # type: ignore[misc]

    async def poll_many(
        self, tenant: str, job_ids: Iterable[UUID]
    ) -> dict[UUID, DispatchResult | MalformedHeadersError]:
        """Return where each known job stands. Each page of the answer has `poll_timeout_seconds`, repetitions included:
        so it is large results that may take long, and never a dead connection."""
        left = list(job_ids)
        results: dict[UUID, DispatchResult | MalformedHeadersError] = {}
        while left:
            chunk = left[: self._settings.poll_batch_items]

            async def read(
                conn: Connection, chunk: list[UUID] = chunk
            ) -> tuple[dict[UUID, DispatchResult | MalformedHeadersError], list[UUID]]:
                return await RelayDispatchRepository(conn, tenant).poll_page(chunk)

            give_up_at = time.monotonic() + self._settings.poll_timeout_seconds
            with self.under_way():
                page, again = await self._repeat(
                    lambda seconds, read=read: bounded(self._database, seconds, read),  # type: ignore[misc]
                    give_up_at,
                )
            results.update(page)
            left[: len(chunk)] = again
        return results

    async def _repeat(
        self, attempt: Callable[[float], Awaitable[Answer]], give_up_at: float, job_id: UUID | None = None
    ) -> Answer:
        """Call `attempt(seconds left)` until it succeeds, time is up, or it has waited for a lock in vain."""
        backoff = Backoff(0.05, 1.0)
        while True:
            try:
                return await attempt(max(0.001, give_up_at - time.monotonic()))
            except (DatabaseUnavailableError, DatabaseBusyError) as error:
                error.job_id = job_id
                pause = backoff.next()
                is_busy = isinstance(error, DatabaseBusyError)
                if is_busy and (error.sqlstate == _LOCK_TIMEOUT or backoff.attempt >= _BUSY_TRIES):
                    raise
                if time.monotonic() + pause >= give_up_at:
                    raise
            await anyio.sleep(pause)
