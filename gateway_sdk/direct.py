"""The statements that are not shared: an enqueue under an idempotency key, many jobs at once, many polls at once."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar
from uuid import UUID

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.database import Connection, Database
from dispatch_core.dispatch import EnqueueRow, RelayDispatchRepository
from dispatch_core.errors import DatabaseBusyError, DatabaseUnavailableError, MalformedHeadersError
from dispatch_core.models import DispatchResult
from gateway_sdk.lanes import bounded
from gateway_sdk.settings import GatewaySettings

__all__ = ["DirectStatements"]

Answer = TypeVar("Answer")

_LOCK_TIMEOUT: Final = "55P03"
_BUSY_TRIES: Final = 5
_CHUNK_ROWS: Final = 5000


class DirectStatements:
    """Each is tried again after a fault that may pass, until `give_up_at`, a monotonic time; all are idempotent."""

    def __init__(self, database: Database, settings: GatewaySettings) -> None:
        self._database = database
        self._settings = settings
        # An enqueue with a key may wait for somebody's transaction: so there are never so many of them that others get
        # no connection.
        self._keyed = anyio.Semaphore(max(1, database.max_size // 2))

    async def enqueue_keyed(self, tenant: str, row: EnqueueRow, give_up_at: float) -> tuple[UUID, bool]:
        """Store a row under its key; return the job's id and whether it was there before.

        Raises: IdempotencyConflictError; DatabaseBusyError where the key is held by another transaction for too long.
        """

        async def store(conn: Connection) -> tuple[UUID, bool]:
            seconds = max(0.001, min(self._settings.lock_timeout_seconds, give_up_at - time.monotonic()))
            return await RelayDispatchRepository(conn, tenant).enqueue_keyed_row(row, lock_timeout_seconds=seconds)

        async def attempt(seconds: float) -> tuple[UUID, bool]:
            with anyio.move_on_after(seconds) as queueing:
                async with self._keyed:
                    queueing.deadline = math.inf
                    return await bounded(self._database, max(0.001, give_up_at - time.monotonic()), store)
            raise DatabaseBusyError(
                "too many enqueues wait for idempotency keys; nothing was sent", sqlstate=_LOCK_TIMEOUT
            )

        return await self._repeat(attempt, give_up_at, row.job_id)

    async def enqueue_many(self, tenant: str, rows: Sequence[EnqueueRow], give_up_at: float) -> int:
        """Store all rows or none; return how many statements that took."""
        chunks = self.chunks(rows)

        async def store(conn: Connection) -> None:
            repository = RelayDispatchRepository(conn, tenant)
            if len(chunks) == 1:
                await repository.enqueue_rows(chunks[0])
                return
            async with conn.transaction():
                for chunk in chunks:
                    await repository.enqueue_rows(chunk)

        await self._repeat(lambda seconds: bounded(self._database, seconds, store), give_up_at)
        return len(chunks)

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
            page, again = await self._repeat(
                lambda seconds, read=read: bounded(self._database, seconds, read),  # type: ignore[misc]
                give_up_at,
            )
            results.update(page)
            left[: len(chunk)] = again
        return results

    def chunks(self, rows: Sequence[EnqueueRow]) -> list[Sequence[EnqueueRow]]:
        """Cut rows into statements of bounded size; one transaction then holds them together."""
        limit = self._settings.enqueue_batch_bytes
        chunks: list[Sequence[EnqueueRow]] = []
        start = size = 0
        for n, row in enumerate(rows):
            if n > start and (size + row.size > limit or n - start >= _CHUNK_ROWS):
                chunks.append(rows[start:n])
                start, size = n, 0
            size += row.size
        chunks.append(rows[start:])
        return chunks

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
