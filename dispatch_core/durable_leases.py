"""The store's methods for who has a lease, and for what others left of theirs. See `DurableJobStore`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import anyio

from dispatch_core import durable_input as check
from dispatch_core.durable_caller import JoinableConnection
from dispatch_core.durable_models import ChunkOutcome, ChunkSettled, ChunkStatus, JobLease, ReapedChunk, RowError
from dispatch_core.durable_store import StoreBase, in_batches
from dispatch_core.errors import DatabaseBusyError, InvalidInputError
from dispatch_core.models import WriteOutcome

__all__ = ["LeaseMethods"]

_REAP_BATCH: Final = 500
_ROW_ERROR_BATCH: Final = 10_000
"""In one statement of one transaction, about 2 MB of text; what a handler gathers before it writes is a setting."""

_BUSY_PAUSE_SECONDS: Final = 0.05
_BUSY_LEASES: Final = 1 / 3


class LeaseMethods(StoreBase):
    """For workers; to reap, for all."""

    async def heartbeat(
        self, lease: JobLease, lease_ttl_seconds: float | None = None, *, conn: JoinableConnection | None = None
    ) -> bool:
        """Have a lease go on for so long from now; False: it is lost, nothing was written.

        While somebody else has the chunk's row locked it waits, a third of the lease at most.
        Raises: DatabaseBusyError after that: whether the lease is lost is not known.
        """
        self._check(lease)
        ttl = self._settings.lease_seconds if lease_ttl_seconds is None else lease_ttl_seconds
        patience = check.span("lease_ttl_seconds", ttl).total_seconds() * _BUSY_LEASES
        until = anyio.current_time() + patience
        while True:
            (beat,) = await self._verbs(conn).heartbeat([lease], lease_seconds=ttl)
            if beat.outcome is not WriteOutcome.BUSY:
                return beat.outcome is WriteOutcome.APPLIED
            if anyio.current_time() >= until:
                raise DatabaseBusyError(f"the row of chunk {lease.seq} is locked", job_id=lease.job_id)
            await anyio.sleep(_BUSY_PAUSE_SECONDS)

    async def checkpoint(
        self,
        lease: JobLease,
        value: Any,
        *,
        rows_done: int | None = None,
        rows_failed: int | None = None,
        lease_ttl_seconds: float | None = None,
        conn: JoinableConnection | None = None,
    ) -> None:
        """Store how far a chunk is, any JSON value; counts of None stay; with `lease_ttl_seconds` the lease goes on.

        With `conn=` the fence is held to the commit: what else is written there is there exactly once with it.
        Raises: LeaseLostError; nothing was written, and the caller's transaction cannot commit.
        """
        self._check(lease)
        if lease_ttl_seconds is not None:
            check.span("lease_ttl_seconds", lease_ttl_seconds)
        await self._verbs(conn).checkpoint(
            lease, value, rows_done=rows_done, rows_failed=rows_failed, renew_seconds=lease_ttl_seconds
        )

    async def complete_chunk(
        self, lease: JobLease, outcome: ChunkOutcome | None = None, *, conn: JoinableConnection | None = None
    ) -> ChunkSettled:
        """Say that a chunk is done. Where it was the last one its job ends, at once.

        With `conn=` the fence is held to the commit, as with `checkpoint`; the job cannot end there: where the answer's
        `last` is true, call `finish` after the commit (a sweep does it, too, a little later).
        Idempotent: yes, by the lease. Raises: LeaseLostError; nothing was written, the transaction cannot commit.
        """
        self._check(lease)
        settled = await self._verbs(conn).complete(lease, outcome)
        await self._finish_if(settled.last, lease, conn)
        return settled

    async def fail_chunk(
        self, lease: JobLease, message: str, retryable: bool = True, *, delay_seconds: float | None = None
    ) -> ChunkStatus | None:
        """Say that an attempt has failed: a retry where `retryable` and attempts remain, else failed; None: lease lost.

        `delay_seconds`: when the retry may start. `message` is cut at 2000 bytes.
        """
        self._check(lease)
        status, last = await self._repository.fail(lease, message, retryable=retryable, delay_seconds=delay_seconds)
        await self._finish_if(last, lease, None)
        return status

    async def release_chunk(self, lease: JobLease, to: ChunkStatus | str = ChunkStatus.PENDING) -> bool:
        """Give a chunk back, its attempt not counted, its checkpoint kept: `pending` or `retry`; False: lease lost.

        In a job that was cancelled meanwhile it is `cancelled`.
        """
        self._check(lease)
        ((outcome, _),) = await self._repository.release([lease], to, notify=True)
        return outcome is WriteOutcome.APPLIED

    async def record_row_errors(
        self, lease: JobLease, errors: Iterable[RowError], *, conn: JoinableConnection | None = None
    ) -> int:
        """Tell rows that could not be used, all or none; return how many. A row and code told again is replaced.

        With `conn=` the fence is held to the commit. Raises: LeaseLostError, as `checkpoint`.
        """
        self._check(lease)
        if isinstance(errors, str | bytes | Mapping) or not isinstance(errors, Iterable):
            raise InvalidInputError(f"errors must be a list of RowError, not {type(errors).__name__}")
        texts = check.row_errors_json(errors, self._settings.max_payload_bytes)
        batches = list(in_batches(texts, _ROW_ERROR_BATCH, self._settings.insert_batch_bytes))
        told = 0
        async with self._together(conn, len(batches)) as verbs:
            for batch in batches or [[]]:
                told += await verbs.row_errors_add_texts(lease, batch)
        return told

    async def reap_expired(self, reaper: str | None = None) -> list[ReapedChunk]:
        """Take back all chunks of the tenant whose lease has run out, in bounded batches; return them as they are now.

        A chunk of a job that may not run twice waits for a person; else it is a retry, or failed where its attempts are
        used up; cancelled where its job has ended. Jobs that are at their end by that end.
        """
        reaper = self._holder if reaper is None else reaper
        reaped: list[ReapedChunk] = []
        while True:
            batch = await self._repository.reap(self._tenant, reaper, limit=_REAP_BATCH)
            reaped.extend(batch)
            if batch and self._may_finish:
                jobs = {chunk.job_id for chunk in batch if chunk.status is not ChunkStatus.RETRY}
                if jobs:
                    await self._repository.finish(self._tenant, list(jobs))
            if len(batch) < _REAP_BATCH:
                return reaped
