"""The durable room: jobs of many chunks, each run under a fenced lease, and decided about by people.

    DurableJobStore(database, "acme")
        insert_job, insert_chunks                       a job, in the caller's transaction if he likes
        claim_next_chunk, claim_chunk                   a lease
        heartbeat, checkpoint, record_row_errors        under it
        complete_chunk, fail_chunk, release_chunk       its end
        reap_expired, refresh_counters                  what others left
        set_job_status, set_chunk_statuses, update_job  by hand, compare-and-set
        get_job, get_chunks, events, row_errors, query

A method that takes `conn=` does its work in the open transaction of that connection, whatever codecs, search path or
pooler it has: it commits or rolls back with all else there. Without it, each method is a transaction of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import anyio

from dispatch_core import durable_input as check
from dispatch_core.database import Connection, Database, mapped_errors
from dispatch_core.durable_caller import CallersConnection, JoinableConnection
from dispatch_core.durable_models import (
    ChunkOutcome,
    ChunkSettled,
    ChunkSpec,
    ChunkStatus,
    ClaimedChunk,
    ClaimedChunks,
    Controlled,
    DurableChunk,
    DurableJob,
    EventPage,
    JobEvent,
    JobEventType,
    JobLease,
    JobProgress,
    JobStatus,
    QueryPage,
    ReapedChunk,
    Resolved,
    RowError,
)
from dispatch_core.durable_query import Filter
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.durable_side import record_from_the_side
from dispatch_core.errors import (
    DatabaseBusyError,
    InvalidInputError,
    RelayDispatchError,
    TenancyMismatchError,
)
from dispatch_core.ids import new_id, new_instance_id
from dispatch_core.models import WriteOutcome
from dispatch_core.settings import DurableJobsSettings

__all__ = [
    "ChunkOutcome",
    "ChunkSettled",
    "ChunkSpec",
    "ChunkStatus",
    "ClaimedChunk",
    "ClaimedChunks",
    "Controlled",
    "DurableChunk",
    "DurableJob",
    "DurableJobStore",
    "DurableJobsSettings",
    "DurableRepository",
    "EventPage",
    "JobEvent",
    "JobEventType",
    "JobLease",
    "JobProgress",
    "JobStatus",
    "QueryPage",
    "ReapedChunk",
    "Resolved",
    "RowError",
]

_PAGE: Final = 1000
_REAP_BATCH: Final = 500
_CANDIDATES: Final = 10
_ROW_ERROR_BATCH: Final = 10_000
"""In one statement of one transaction, about 2 MB of text; what a handler gathers before it writes is a setting."""

_BUSY_PAUSE_SECONDS: Final = 0.05
_BUSY_LEASES: Final = 1 / 3

_log = logging.getLogger(__name__)


class DurableJobStore:
    """Durable jobs of one tenant, on a pool or on a connection.

    Everything is done with the rights of the login that is connected: jobs are inserted by a gateway, claimed by a
    worker. Who submitted a job, and who acts, is data.
    """

    def __init__(
        self,
        database: Database | Connection,
        tenant: str | None = None,
        *,
        settings: DurableJobsSettings | None = None,
        holder: str | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """Take a `Database`, or a connection of asyncpg, on which nothing is relied; in its transaction, if it has one.

        `tenant` None: the one that is bound on the connection. `holder`: who claims, for people; default: a name of
        this store's own.
        """
        self._database = database
        self._tenant = None if tenant is None else check.name("tenant", tenant)
        self._settings = settings or DurableJobsSettings()
        self._holder = new_instance_id("durable") if holder is None else check.name("holder", holder)
        self._log = logger or _log
        own = database if isinstance(database, Database) else CallersConnection(_joinable(database), joins=False)
        self._repository = DurableRepository(own, self._settings)

    @property
    def settings(self) -> DurableJobsSettings:
        """What holds for leases, attempts and sizes."""
        return self._settings

    @property
    def holder(self) -> str:
        """Who claims, where a claim does not say it."""
        return self._holder

    async def now(self) -> datetime:
        """Return the database's clock (`clock_timestamp()`), aware: it goes on in a transaction that waits (C22)."""
        return await self._repository.now()

    # --- jobs -----------------------------------------------------------------------------------------------------

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
        batches = list(_batches(texts, self._settings.insert_batch, self._settings.insert_batch_bytes))
        stored = 0
        async with self._together(conn, len(batches)) as verbs:
            seq = from_seq
            for batch in batches or [[]]:
                stored += await verbs.insert_chunk_texts(self._tenant, job_id, batch, from_seq=seq, notify=True)
                seq = None if seq is None else seq + len(batch)
        return stored

    async def get_job(self, job_id: UUID, *, fresh: bool = False) -> DurableJob | None:
        """Return a job, None where there is none. `fresh`: with its counters of now, and not of `counted_at`."""
        found = await self._repository.jobs(self._tenant, [job_id], fresh=fresh)
        return found[0] if found else None

    async def get_chunk(self, job_id: UUID, seq: int) -> DurableChunk | None:
        """Return a chunk, None where there is none."""
        found = await self._repository.chunks(self._tenant, job_id, seqs=[seq])
        return found[0] if found else None

    async def get_chunks(self, job_id: UUID, *, status: ChunkStatus | str | None = None) -> list[DurableChunk]:
        """Return all chunks of a job, in one status where given, in the order of their numbers; read in pages."""
        found: list[DurableChunk] = []
        while True:
            after = found[-1].seq if found else 0
            page = await self._repository.chunks(self._tenant, job_id, after=after, limit=_PAGE, status=status)
            found.extend(page)
            if len(page) < _PAGE:
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
        found = await self._repository.finish(self._tenant, [job_id])
        return found[0][1] if found else None

    # --- claiming -------------------------------------------------------------------------------------------------

    def uses_skip_locked_claims(self) -> bool:
        """Whether the next chunk is claimed in one statement that steps over locked ones: as the setting says.

        Every supported PostgreSQL can; switched off, a claim looks for chunks and takes one by compare-and-set.
        """
        return self._settings.skip_locked_claims

    async def claim_chunk(
        self,
        chunk: DurableChunk,
        *,
        lease_ttl_seconds: float | None = None,
        holder: str | None = None,
        conn: JoinableConnection | None = None,
    ) -> JobLease | None:
        """Claim a chunk if it is still as it was read; None: somebody was first, or its job does not run.

        In the caller's transaction the lease is nobody else's to see before the commit, and gone after a rollback.
        """
        if not isinstance(chunk, DurableChunk):
            raise InvalidInputError(f"chunk must be a DurableChunk, not {type(chunk).__name__}")
        claimed = await self._verbs(conn).claim_chunk(
            self._tenant_of(chunk.tenant_id),
            chunk.job_id,
            chunk.seq,
            chunk.lease_version,
            holder=self._holder if holder is None else holder,
            token=new_id(),
            lease_seconds=lease_ttl_seconds,
        )
        return claimed.chunks[0].lease if claimed.chunks else None

    async def claim_next_chunk_skip_locked(
        self, job_id: UUID, *, lease_ttl_seconds: float | None = None, holder: str | None = None
    ) -> ClaimedChunk | None:
        """Claim the chunk of a job with the lowest number that nobody has locked, in one call; None: there is none."""
        claimed = await self._repository.claim_next(
            self._tenant,
            job_id,
            holder=self._holder if holder is None else holder,
            token=new_id(),
            lease_seconds=lease_ttl_seconds,
        )
        return claimed.chunks[0] if claimed.chunks else None

    async def claim_next_chunk(
        self, job_id: UUID, *, lease_ttl_seconds: float | None = None, holder: str | None = None
    ) -> ClaimedChunk | None:
        """Claim a job's next chunk in the way that the setting says (`uses_skip_locked_claims`)."""
        if self.uses_skip_locked_claims():
            return await self.claim_next_chunk_skip_locked(job_id, lease_ttl_seconds=lease_ttl_seconds, holder=holder)
        before: list[tuple[UUID, int, int]] = []
        # Others may have had all of them; but where nothing has changed the job itself is locked, or does not run.
        while (
            found := await self._repository.candidates(self._tenant, [], limit=_CANDIDATES, job_id=job_id)
        ) != before:
            for _, seq, version in found:
                claimed = await self._repository.claim_chunk(
                    self._tenant,
                    job_id,
                    seq,
                    version,
                    holder=self._holder if holder is None else holder,
                    token=new_id(),
                    lease_seconds=lease_ttl_seconds,
                )
                if claimed.chunks:
                    return claimed.chunks[0]
            before = found
        return None

    async def claim_chunks(
        self,
        kinds: Sequence[str],
        *,
        limit: int = 1,
        lease_ttl_seconds: float | None = None,
        holder: str | None = None,
    ) -> ClaimedChunks:
        """Claim the next chunks among all jobs of these kinds: by priority, then age, then number; in one call."""
        return await self._repository.claim(
            [self._tenant],
            kinds,
            limit=limit,
            holder=self._holder if holder is None else holder,
            token=new_id(),
            lease_seconds=lease_ttl_seconds,
        )

    # --- under a lease --------------------------------------------------------------------------------------------

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
        batches = list(_batches(texts, _ROW_ERROR_BATCH, self._settings.insert_batch_bytes))
        told = 0
        async with self._together(conn, len(batches)) as verbs:
            for batch in batches or [[]]:
                told += await verbs.row_errors_add_texts(lease, batch)
        return told

    # --- what others left, and what is told -------------------------------------------------------------------------

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

    async def record_event(
        self,
        job_id: UUID,
        chunk: DurableChunk | JobLease | int | None,
        event: JobEventType | str,
        actor: str | None = None,
        channel: str | None = None,
        holder: str | None = None,
        detail: Any = None,
    ) -> bool:
        """Add to a job's timeline, or a chunk's, on a connection of the pool; never raises: what fails is logged.

        It waits for no row: not for the job's, though the caller's own transaction has it locked; and for a table that
        is locked, or for a connection, `event_lock_timeout_seconds` at most. False: it was not written.
        """
        seq = chunk.seq if isinstance(chunk, DurableChunk | JobLease) else chunk
        return await record_from_the_side(
            self._database,
            self._settings,
            self._log,
            lambda verbs, seconds: verbs.record_event(
                self._tenant,
                job_id,
                seq,
                event,
                actor=actor,
                channel=channel,
                holder=holder,
                detail=detail,
                lock_timeout_seconds=seconds,
            ),
        )

    # --- how ------------------------------------------------------------------------------------------------------

    def _verbs(self, conn: JoinableConnection | None) -> DurableRepository:
        if conn is None:
            return self._repository
        return DurableRepository(CallersConnection(_joinable(conn)), self._settings)

    @contextlib.asynccontextmanager
    async def _together(self, conn: JoinableConnection | None, statements: int) -> AsyncIterator[DurableRepository]:
        """Have several statements be in one transaction."""
        if conn is not None or statements < 2:
            yield self._verbs(conn)
        elif isinstance(self._database, Database):
            async with self._database.connection() as own, own.transaction():
                verbs = CallersConnection(own, joins=False) if self._database.is_borrowed else own
                yield DurableRepository(verbs, self._settings)
        elif self._database.is_in_transaction():
            yield self._repository
        else:
            with mapped_errors():
                async with self._database.transaction():
                    yield self._repository

    @property
    def _may_finish(self) -> bool:
        """Whether a statement of the store's is a transaction of its own: no job is ended in one that has a chunk."""
        return isinstance(self._database, Database) or not self._database.is_in_transaction()

    async def _finish_if(self, last: bool, lease: JobLease, conn: JoinableConnection | None) -> None:
        if not last or conn is not None or not self._may_finish:
            return
        try:
            await self._repository.finish(lease.tenant_id, [lease.job_id])
        except RelayDispatchError as error:
            # The chunk's end is stored, and that is what was asked for.
            self._log.warning("job %s could not be ended now, a sweep will: %s", lease.job_id, error)

    def _check(self, lease: JobLease) -> None:
        self._tenant_of(check.lease_of(lease).tenant_id)

    def _tenant_of(self, tenant: str | None) -> str | None:
        if tenant is not None and self._tenant is not None and tenant != self._tenant:
            raise TenancyMismatchError(f"a chunk of another tenant than this store's, which is {self._tenant}")
        return self._tenant if tenant is None else tenant


def _joinable(conn: Any) -> JoinableConnection:
    if not (hasattr(conn, "is_in_transaction") and hasattr(conn, "copy_from_query")):
        raise InvalidInputError(f"conn must be a connection of asyncpg, not {type(conn).__name__}")
    found: JoinableConnection = conn
    return found


def _batches(texts: Sequence[bytes], most: int, most_bytes: int) -> Iterable[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        if batch and (len(batch) >= most or size + len(text) > most_bytes):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch
