"""The store's methods of jobs and chunks: inserted, read, and moved by hand. See `DurableJobStore`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from dispatch_core import durable_input as check
from dispatch_core.durable_caller import JoinableConnection
from dispatch_core.durable_models import (
    ChunkSpec,
    ChunkStatus,
    DurableChunk,
    DurableJob,
    EventPage,
    JobEventType,
    JobStatus,
    QueryPage,
    RowError,
)
from dispatch_core.durable_query import Filter
from dispatch_core.durable_store import StoreBase, in_batches
from dispatch_core.errors import InvalidInputError
from dispatch_core.ids import new_id

__all__ = ["JobMethods"]

_PAGE: Final = 1000
_CHUNK_PAGE: Final = 100
"""Payloads may have a megabyte each, and a page is one statement."""


class JobMethods(StoreBase):
    """For gateways most of all; to read, for all."""

    async def now(self) -> datetime:
        """Return the database's clock (`clock_timestamp()`), aware: it goes on in a transaction that waits (C22)."""
        return await self._repository.now()

    async def insert_job(
        self,
        kind: str,
        params: Any = None,
        *,
        job_id: UUID | None = None,
        idempotent: bool = True,
        max_attempts: int = 3,
        priority: int = 0,
        created_by: str | None = None,
        conn: JoinableConnection | None = None,
    ) -> UUID:
        """Store a queued job and return its id, which is known before the commit. `params`: any JSON value.

        `idempotent` False: a chunk whose holder was lost waits for a person. `max_attempts` counts claims of a chunk.
        Idempotent: by `job_id`. Raises: IdempotencyConflictError where a job of another kind has that id.
        """
        job_id = new_id() if job_id is None else check.identity("job_id", job_id)
        await self._verbs(conn).insert_job(
            self._tenant,
            job_id,
            kind,
            params,
            idempotent=idempotent,
            max_attempts=max_attempts,
            priority=priority,
            created_by=created_by,
        )
        return job_id

    async def insert_chunks(
        self,
        job_id: UUID,
        chunks: Iterable[ChunkSpec | Any],
        *,
        from_seq: int | None = None,
        conn: JoinableConnection | None = None,
    ) -> int:
        """Store chunks, each a `ChunkSpec` or a payload, all or none; return how many are new.

        They are numbered from `from_seq` on (None: behind the last). Idempotent: where `from_seq` is said.
        Raises: UnknownJobError; JobClosedError where the job takes none now; InvalidPayloadError: nothing was sent.
        """
        check.identity("job_id", job_id)
        if isinstance(chunks, str | bytes | Mapping) or not isinstance(chunks, Iterable):
            raise InvalidInputError(f"chunks must be a list of payloads, not {type(chunks).__name__}")
        # All are checked before any is sent.
        texts = check.chunks_json(chunks, self._settings.max_payload_bytes)
        if from_seq is not None:
            check.number("from_seq", from_seq, 1, check.MAX_BIGINT - len(texts))
        batches = list(in_batches(texts, self._settings.insert_batch, self._settings.insert_batch_bytes))
        stored = 0
        async with self._together(conn, len(batches)) as verbs:
            seq = from_seq
            for batch in batches or [[]]:
                stored += await verbs.insert_chunk_texts(self._tenant, job_id, batch, from_seq=seq, notify=True)
                seq = None if seq is None else seq + len(batch)
        return stored

    async def get_job(self, job_id: UUID, *, fresh: bool = False) -> DurableJob | None:
        """Return a job, None where there is none. `fresh`: with its counters of now, and not of `counted_at`."""
        found = await self._repository.jobs(self._tenant, [check.identity("job_id", job_id)], fresh=fresh)
        return found[0] if found else None

    async def get_chunk(self, job_id: UUID, seq: int) -> DurableChunk | None:
        """Return a chunk, None where there is none."""
        found = await self._repository.chunks(self._tenant, job_id, seqs=[check.number("seq", seq)])
        return found[0] if found else None

    async def get_chunks(self, job_id: UUID, *, status: ChunkStatus | str | None = None) -> list[DurableChunk]:
        """Return all chunks of a job, in one status where given, in the order of their numbers; read in pages."""
        found: list[DurableChunk] = []
        while True:
            after = found[-1].seq if found else 0
            page = await self._repository.chunks(self._tenant, job_id, after=after, limit=_CHUNK_PAGE, status=status)
            found.extend(page)
            if len(page) < _CHUNK_PAGE:
                return found

    async def query(
        self,
        table: str,
        filter: Filter | None = None,  # noqa: A002  (that is what it is)
        *,
        job_id: UUID | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> QueryPage:
        """Return rows of job, chunk, row_error or event that meet a filter: jobs the newest first, else by their keys.

        `filter`: a map of column -> value (a list: one of these; None: is null), or triples (column, operator, value).
        Raises: InvalidInputError for a table, column, operator or kind of value that is not of the list.
        """
        return await self._repository.query(self._tenant, table, filter, job_id=job_id, after=after, limit=limit)

    async def events(self, job_id: UUID, after: str | None = None, *, limit: int = _PAGE) -> EventPage:
        """Return the events after a cursor; none is ever skipped, whenever its transaction commits (C46)."""
        return await self._repository.events(self._tenant, job_id, after=after, limit=limit)

    async def row_errors(
        self, job_id: UUID, *, after: RowError | None = None, seq: int | None = None, limit: int = _PAGE
    ) -> list[RowError]:
        """Return a page of bad rows by chunk, row and code, behind `after`, the last of the page before."""
        return await self._repository.row_errors(self._tenant, job_id, after=after, seq=seq, limit=limit)

    async def set_job_status(
        self,
        job_id: UUID,
        from_: JobStatus | str | Sequence[JobStatus | str],
        to: JobStatus | str,
        extra: Mapping[str, Any] | None = None,
    ) -> bool:
        """Move a job from one of several statuses to `to`; False: another was first, and nothing was written.

        `extra`: priority, max_attempts, last_error, params, in the same update. It moves no chunk.
        """
        return await self._repository.set_job_status(self._tenant, job_id, from_, to, extra)

    async def set_job_status_with_event(
        self,
        job_id: UUID,
        from_: JobStatus | str | Sequence[JobStatus | str],
        to: JobStatus | str,
        event: JobEventType | str,
        extra: Mapping[str, Any] | None = None,
        *,
        actor: str | None = None,
        channel: str | None = None,
        holder: str | None = None,
        detail: Any = None,
    ) -> bool:
        """Move a job and tell it in one transaction; where the move is lost, the event is not written either."""
        told = {"type": event, "actor": actor, "channel": channel, "holder": holder, "detail": detail}
        return await self._repository.set_job_status(self._tenant, job_id, from_, to, extra, event=told)

    async def update_job(self, job_id: UUID, extra: Mapping[str, Any]) -> bool:
        """Write priority, max_attempts, last_error or params, whatever the status; False: no such job.

        Raises: InvalidInputError for any other column, those of status, lease and identity above all.
        """
        return await self._repository.update_job(self._tenant, job_id, extra)

    async def set_chunk_statuses(
        self,
        job_id: UUID,
        from_: ChunkStatus | str | Sequence[ChunkStatus | str],
        to: ChunkStatus | str,
        extra: Mapping[str, Any] | None = None,
        *,
        seqs: Sequence[int] | None = None,
    ) -> int:
        """Move chunks that are in one of several statuses to `to`; return how many. Who held one has lost it.

        `extra`: last_error, and ``attempts="reset"``. It tells no event and ends no job. Only a claim makes `running`.
        """
        return await self._repository.set_chunk_statuses(self._tenant, job_id, from_, to, extra, seqs=seqs)

    async def refresh_counters(self, job_id: UUID) -> list[DurableChunk]:
        """Count a job's chunks into its counters, whatever those were; return the chunks."""
        if await self._repository.refresh_counters(self._tenant, job_id) is None:
            return []
        return await self.get_chunks(job_id)

    async def finish(self, job_id: UUID) -> JobStatus | None:
        """End a job of which nothing can run any more; return its status, None where there is no such job.

        For who completed a last chunk with `conn=`, after his commit. Idempotent: yes.
        """
        found = await self._repository.finish(self._tenant, [check.identity("job_id", job_id)])
        return found[0][1] if found else None
