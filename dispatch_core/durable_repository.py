"""The verbs of the durable room for both SDKs: one method, one call of one SQL function in schema `relay`.

Every method is one statement, in a transaction of its own, or in the one that the connection is in. JSON goes in and
out as text, so that numbers keep their digits. What may be wrong with arguments is found before any SQL; what
PostgreSQL refuses comes as one of ours (`errors`). A tenant of None is the one that is bound on the connection.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias
from uuid import UUID

from dispatch_core import codec
from dispatch_core import durable_input as check
from dispatch_core.database import Connection, Database, mapped_errors
from dispatch_core.durable_caller import CallersConnection
from dispatch_core.durable_models import (
    CHUNK_DECISIONS,
    JOB_ACTIONS,
    ChunkOutcome,
    ChunkSettled,
    ChunkSpec,
    ChunkStatus,
    ClaimedChunks,
    Controlled,
    DurableChunk,
    DurableJob,
    EventPage,
    Heartbeaten,
    JobLease,
    JobStatus,
    QueryPage,
    ReapedChunk,
    Resolved,
    RowError,
    Swept,
)
from dispatch_core.durable_rows import chunk_of, claimed_of, event_of, job_of, row_error_of, status_or_none
from dispatch_core.errors import (
    InvalidInputError,
    JobClosedError,
    LeaseLostError,
    TenancyUnboundError,
    UnknownJobError,
)
from dispatch_core.models import WriteOutcome
from dispatch_core.settings import DurableJobsSettings

__all__ = ["DurableRepository"]

_INSERT_JOB: Final = (
    "select relay.durable_insert_job($1::text, $2::uuid, $3::text, $4::text::jsonb, $5::boolean, $6::bigint,"
    " $7::bigint, $8::text, $9::boolean) as value"
)
_INSERT_CHUNKS: Final = (
    "select relay.durable_insert_chunks($1::text, $2::uuid, $3::text::jsonb, $4::bigint, $5::boolean) as value"
)
_SEAL: Final = "select relay.durable_seal($1::text, $2::uuid, $3::bigint, $4::boolean) as value"
_ABANDON: Final = "select relay.durable_abandon($1::text, $2::uuid) as value"

_JOBS: Final = "select * from relay.durable_jobs($1::text, $2::uuid[], $3::boolean)"
_CHUNKS: Final = (
    "select * from relay.durable_chunks($1::text, $2::uuid, $3::bigint[], $4::bigint, $5::bigint, $6::text)"
)
_ROW_ERRORS: Final = (
    "select * from relay.durable_row_errors($1::text, $2::uuid, $3::bigint, $4::bigint, $5::bigint, $6::text,"
    " $7::bigint)"
)
_EVENTS: Final = "select * from relay.durable_events($1::text, $2::uuid, $3::text, $4::bigint)"
_QUERY: Final = (
    "select * from relay.durable_query($1::text, $2::text, $3::text::jsonb, $4::uuid, $5::text::jsonb, $6::bigint)"
)

_CLAIM: Final = (
    "select * from relay.durable_claim($1::text[], $2::text[], $3::bigint[], $4::bigint, $5::text, $6::uuid,"
    " $7::interval, $8::bigint)"
)
_CLAIM_NEXT: Final = (
    "select * from relay.durable_claim_next($1::text, $2::uuid, $3::bigint, $4::text, $5::uuid, $6::interval)"
)
_CLAIM_CHUNK: Final = (
    "select * from relay.durable_claim_chunk($1::text, $2::uuid, $3::bigint, $4::bigint, $5::text, $6::uuid,"
    " $7::interval)"
)
_CLAIM_AGAIN: Final = "select * from relay.durable_claim_again($1::text[], $2::uuid)"
_CANDIDATES: Final = "select * from relay.durable_candidates($1::text, $2::text[], $3::bigint, $4::uuid)"
_TENANTS: Final = "select tenant_id from relay.durable_tenants($1::text[]) order by 1"
_HEARTBEAT: Final = (
    "select n, outcome, job_status from relay.durable_heartbeat($1::text[], $2::uuid[], $3::bigint[], $4::uuid[],"
    " $5::bigint[], $6::interval, $7::bigint[])"
)
_CHECKPOINT: Final = (
    "select relay.durable_checkpoint($1::text, $2::uuid, $3::bigint, $4::uuid, $5::bigint, $6::text::jsonb,"
    " $7::bigint, $8::bigint, $9::interval)::text as value"
)
_COMPLETE: Final = (
    "select outcome, last from relay.durable_complete($1::text, $2::uuid, $3::bigint, $4::uuid, $5::bigint,"
    " $6::text::jsonb, $7::bigint, $8::bigint)"
)
_COMPLETE_MANY: Final = (
    "select n, outcome, last from relay.durable_complete_many($1::text[], $2::uuid[], $3::bigint[], $4::uuid[],"
    " $5::bigint[], $6::text[], $7::bigint[], $8::bigint[])"
)
_FAIL: Final = (
    "select status, last from relay.durable_fail($1::text, $2::uuid, $3::bigint, $4::uuid, $5::bigint, $6::text,"
    " $7::boolean, $8::interval)"
)
_RELEASE: Final = (
    "select n, outcome, status from relay.durable_release($1::text[], $2::uuid[], $3::bigint[], $4::uuid[],"
    " $5::bigint[], $6::text, $7::boolean)"
)
_ROW_ERRORS_ADD: Final = (
    "select relay.durable_row_errors_add($1::text, $2::uuid, $3::bigint, $4::uuid, $5::bigint, $6::text::jsonb)"
    " as value"
)

_FINISH: Final = "select job_id, status, ended from relay.durable_finish($1::text, $2::uuid[])"
_REFRESH: Final = "select status from relay.durable_refresh_counters($1::text, $2::uuid)"
_REAP: Final = "select * from relay.durable_reap($1::text, $2::text, $3::bigint)"
_RUN_SWEEPS: Final = (
    "select sweep, tenant_id, job_id, seq, status from relay.durable_run_sweeps($1::text, $2::bigint, $3::interval,"
    " $4::interval, $5::interval, $6::interval[])"
)
_CONTROL: Final = "select * from relay.durable_control($1::text, $2::uuid, $3::text, $4::text, $5::text, $6::text)"
_RESOLVE: Final = (
    "select outcome, chunk_status, status from relay.durable_resolve($1::text, $2::uuid, $3::bigint, $4::text,"
    " $5::text, $6::text, $7::text)"
)
_SET_JOB_STATUS: Final = (
    "select relay.durable_set_job_status($1::text, $2::uuid, $3::text[], $4::text, $5::text::jsonb, $6::text::jsonb)"
    " as value"
)
_UPDATE_JOB: Final = "select relay.durable_update_job($1::text, $2::uuid, $3::text::jsonb) as value"
_SET_CHUNK_STATUSES: Final = (
    "select relay.durable_set_chunk_statuses($1::text, $2::uuid, $3::text[], $4::text, $5::text::jsonb, $6::bigint[])"
    " as value"
)
_RECORD_EVENT: Final = (
    "select relay.durable_record_event($1::text, $2::uuid, $3::bigint, $4::text, $5::text, $6::text, $7::text,"
    " $8::text::jsonb) as value"
)
_CHANNEL: Final = "select relay.channel($1::text, $2::text) as value"

JOB_COLUMNS: Final = {"priority": "number", "max_attempts": "positive", "last_error": "text", "params": "json"}
"""What may be written of a job from outside."""
CHUNK_COLUMNS: Final = {"last_error": "text", "attempts": "reset"}

_Fetch: TypeAlias = Callable[..., Awaitable[list[Any]]]


class DurableRepository:
    """The verbs on a connection, or on connections of a `Database`, one for each call.

    A connection must be as the driver made it. One of somebody else's, with codecs of his, is given as a
    `CallersConnection`.
    """

    __slots__ = ("_fetch", "_settings")

    def __init__(
        self, connection: Connection | CallersConnection | Database, settings: DurableJobsSettings | None = None
    ) -> None:
        """Take a connection. `settings`: the sizes that are allowed, leases, sweeps."""
        if isinstance(connection, Database):
            self._fetch: _Fetch = connection.execute
        elif isinstance(connection, CallersConnection):
            self._fetch = connection.fetch
        else:
            self._fetch = _fetcher(connection)
        self._settings = settings or DurableJobsSettings()

    # --- submitting (gateways) ------------------------------------------------------------------------------------

    async def insert_job(
        self,
        tenant: str | None,
        job_id: UUID,
        kind: str,
        params: Any = None,
        *,
        idempotent: bool = True,
        max_attempts: int = 3,
        priority: int = 0,
        created_by: str | None = None,
        submitting: bool = False,
    ) -> bool:
        """Store a job; False: it is there already. `params` None is ``{}``.

        Transaction: joins. Idempotent: by the job's id. `submitting`: nobody sees it before `seal`; else it is queued
        on commit. Raises: IdempotencyConflictError where a job of another kind has the id.
        """
        return bool(
            await self._value(
                _INSERT_JOB,
                _tenant(tenant),
                check.identity("job_id", job_id),
                check.name("kind", kind),
                check.json_text("params", {} if params is None else params, self._settings.max_payload_bytes),
                check.flag("idempotent", idempotent),
                check.number("max_attempts", max_attempts, 1),
                check.number("priority", priority),
                check.text_or_none("created_by", created_by),
                check.flag("submitting", submitting),
            )
        )

    async def insert_chunks(
        self,
        tenant: str | None,
        job_id: UUID,
        chunks: Sequence[ChunkSpec | Any],
        *,
        from_seq: int | None = None,
        notify: bool = True,
    ) -> int:
        """Store chunks, numbered from `from_seq` on (None: behind the last); return how many are new.

        Idempotent: where `from_seq` is said. Raises: UnknownJobError; JobClosedError where the job takes none any more.
        """
        texts = check.chunks_json(chunks, self._settings.max_payload_bytes)
        return await self.insert_chunk_texts(tenant, job_id, texts, from_seq=from_seq, notify=notify)

    async def insert_chunk_texts(
        self, tenant: str | None, job_id: UUID, texts: Sequence[bytes], *, from_seq: int | None, notify: bool
    ) -> int:
        """Store chunks that were checked and encoded by `durable_input.chunks_json`; see `insert_chunks`."""
        job_id = check.identity("job_id", job_id)
        args = (
            _tenant(tenant),
            job_id,
            (b"[" + b",".join(texts) + b"]").decode(),
            None if from_seq is None else check.number("from_seq", from_seq, 1),
            check.flag("notify", notify),
        )
        return int(await self._value_of(job_id, _INSERT_CHUNKS, *args))

    async def seal(
        self, tenant: str | None, job_id: UUID, *, chunks: int | None = None, notify: bool = True
    ) -> JobStatus:
        """Show a job that was being submitted, with all its chunks; return its status. `chunks`: how many it must have.

        Idempotent: yes. Raises: UnknownJobError (it was abandoned, too); JobClosedError where it has not so many.
        """
        job_id = check.identity("job_id", job_id)
        args = (_tenant(tenant), job_id, check.count_or_none("chunks", chunks), check.flag("notify", notify))
        return JobStatus(await self._value_of(job_id, _SEAL, *args))

    async def abandon(self, tenant: str | None, job_id: UUID) -> bool:
        """Give a submission up; False: there is none, or it is sealed already."""
        return bool(await self._value(_ABANDON, _tenant(tenant), check.identity("job_id", job_id)))

    # --- reading --------------------------------------------------------------------------------------------------

    async def jobs(self, tenant: str | None, job_ids: Sequence[UUID], *, fresh: bool = False) -> list[DurableJob]:
        """Return those of the jobs that there are, in the order asked for. `fresh`: their counters are counted now."""
        name, ids = _tenant(tenant), [check.identity("an item of job_ids", job_id) for job_id in job_ids]
        return [job_of(row, name) for row in await self._fetch(_JOBS, name, ids, check.flag("fresh", fresh))]

    async def chunks(
        self,
        tenant: str | None,
        job_id: UUID,
        *,
        seqs: Sequence[int] | None = None,
        after: int = 0,
        limit: int = 1000,
        status: ChunkStatus | str | None = None,
    ) -> list[DurableChunk]:
        """Return chunks of a job in their order: those of `seqs`, or a page of all behind `after`, in one status."""
        name = _tenant(tenant)
        rows = await self._fetch(
            _CHUNKS,
            name,
            check.identity("job_id", job_id),
            None if seqs is None else [check.number("an item of seqs", seq) for seq in seqs],
            check.number("after", after),
            check.number("limit", limit, 1),
            None if status is None else check.one_of("status", status, ChunkStatus).value,
        )
        return [chunk_of(row, name) for row in rows]

    async def row_errors(
        self,
        tenant: str | None,
        job_id: UUID,
        *,
        limit: int = 1000,
        after: RowError | None = None,
        seq: int | None = None,
    ) -> list[RowError]:
        """Return a page of a job's bad rows, by chunk, row and code. `after`: the last one of the page before."""
        if after is not None and not isinstance(after, RowError):
            raise InvalidInputError(f"after must be a RowError, not {type(after).__name__}")
        rows = await self._fetch(
            _ROW_ERRORS,
            _tenant(tenant),
            check.identity("job_id", job_id),
            check.number("limit", limit, 1),
            0 if after is None else check.count("seq of after", after.seq),
            -check.MAX_BIGINT - 1 if after is None else check.number("row of after", after.row),
            "" if after is None else check.text_or_none("code of after", after.code),
            check.count_or_none("seq", seq),
        )
        return [row_error_of(row) for row in rows]

    async def events(
        self, tenant: str | None, job_id: UUID, *, after: str | None = None, limit: int = 1000
    ) -> EventPage:
        """Return the events that come after a cursor (None: from the beginning), and the cursor to go on from.

        None is ever skipped, whenever its transaction commits. Raises: InvalidInputError for what is no cursor.
        """
        rows = await self._fetch(
            _EVENTS,
            _tenant(tenant),
            check.identity("job_id", job_id),
            check.text_or_none("after", after, 1024 * 1024),
            check.number("limit", limit, 1),
        )
        return EventPage([event_of(row) for row in rows[:-1]], rows[-1]["next_cursor"])

    async def query(
        self,
        tenant: str | None,
        table: str,
        filter_json: str,
        *,
        job_id: UUID | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> QueryPage:
        """Return rows of `table` that meet a filter, as `durable_query.filter_json` makes it."""
        rows = await self._fetch(
            _QUERY,
            _tenant(tenant),
            check.text_or_none("table", table),
            filter_json,
            None if job_id is None else check.identity("job_id", job_id),
            after,
            check.number("limit", limit, 1),
        )
        return QueryPage(
            [codec.decode_payload(row["item"]) for row in rows], rows[-1]["after"] if len(rows) == limit else None
        )

    # --- workers --------------------------------------------------------------------------------------------------

    async def claim(
        self,
        tenants: Sequence[str | None],
        kinds: Sequence[str],
        *,
        limit: int,
        holder: str,
        token: UUID,
        lease_seconds: float | None = None,
        limits: Sequence[int] | None = None,
        start: int = 0,
    ) -> ClaimedChunks:
        """Claim the next chunks of all jobs of these kinds: by priority, age, number. `limits`: one for each kind.

        `token` is new for every claim; `start`: at which of the tenants to begin.
        """
        lease, deadline = self._lease(lease_seconds)
        rows = await self._fetch(
            _CLAIM,
            [_tenant(tenant) for tenant in tenants],
            check.names("kinds", kinds),
            None if limits is None else [check.count("an item of limits", most) for most in limits],
            check.number("limit", limit, 1),
            check.name("holder", holder),
            check.identity("token", token),
            lease,
            check.count("start", start),
        )
        return claimed_of(rows, token, holder, deadline)

    async def claim_next(
        self,
        tenant: str | None,
        job_id: UUID,
        *,
        holder: str,
        token: UUID,
        limit: int = 1,
        lease_seconds: float | None = None,
    ) -> ClaimedChunks:
        """Claim the chunks of a job with the lowest numbers that nobody has locked."""
        lease, deadline = self._lease(lease_seconds)
        rows = await self._fetch(
            _CLAIM_NEXT,
            _tenant(tenant),
            check.identity("job_id", job_id),
            check.number("limit", limit, 1),
            check.name("holder", holder),
            check.identity("token", token),
            lease,
        )
        return claimed_of(rows, token, holder, deadline)

    async def claim_chunk(
        self,
        tenant: str | None,
        job_id: UUID,
        seq: int,
        version: int,
        *,
        holder: str,
        token: UUID,
        lease_seconds: float | None = None,
    ) -> ClaimedChunks:
        """Claim one chunk, if its lease_version is still the one that was read; one or none is returned."""
        lease, deadline = self._lease(lease_seconds)
        rows = await self._fetch(
            _CLAIM_CHUNK,
            _tenant(tenant),
            check.identity("job_id", job_id),
            check.number("seq", seq),
            check.number("version", version),
            check.name("holder", holder),
            check.identity("token", token),
            lease,
        )
        return claimed_of(rows, token, holder, deadline)

    async def claim_again(
        self, tenants: Sequence[str | None], token: UUID, *, holder: str, local_deadline: float
    ) -> ClaimedChunks:
        """Return what a claim took whose reply was lost; ask until the lease would have ended.

        `local_deadline` (`time.monotonic`) is that of the claim: from before it was sent.
        """
        names = [_tenant(tenant) for tenant in tenants]
        rows = await self._fetch(_CLAIM_AGAIN, names, check.identity("token", token))
        return claimed_of(rows, token, check.name("holder", holder), lambda: local_deadline)

    async def candidates(
        self, tenant: str | None, kinds: Sequence[str], *, limit: int, job_id: UUID | None = None
    ) -> list[tuple[UUID, int, int]]:
        """Return job id, number and lease_version of chunks that could be claimed now, in the order of a claim."""
        rows = await self._fetch(
            _CANDIDATES,
            _tenant(tenant),
            check.names("kinds", kinds) if job_id is None else [],
            check.number("limit", limit, 1),
            None if job_id is None else check.identity("job_id", job_id),
        )
        return [(row["job_id"], row["seq"], row["lease_version"]) for row in rows]

    async def tenants(self, kinds: Sequence[str] | None = None) -> list[str]:
        """Return the tenants of this login that have something of these kinds to run."""
        rows = await self._fetch(_TENANTS, None if kinds is None else check.names("kinds", kinds))
        return [row["tenant_id"] for row in rows]

    async def heartbeat(
        self,
        leases: Sequence[JobLease],
        *,
        lease_seconds: float | None = None,
        rows_done: Sequence[int | None] | None = None,
    ) -> list[Heartbeaten]:
        """Have leases go on for `lease_seconds` from now; return what came of each, in order.

        Stale: it is lost. Busy: somebody has the row locked, perhaps the holder's own transaction; ask again.
        """
        if not leases:
            return []
        lease, _ = self._lease(lease_seconds)
        done = None if rows_done is None else [check.count_or_none("an item of rows_done", n) for n in rows_done]
        rows = await self._fetch(_HEARTBEAT, *_arrays(leases), lease, done)
        found = [Heartbeaten(WriteOutcome.STALE, None)] * len(leases)
        for row in rows:
            found[row["n"] - 1] = Heartbeaten(WriteOutcome(row["outcome"]), status_or_none(row["job_status"]))
        return found

    async def checkpoint(
        self,
        lease: JobLease,
        value: Any,
        *,
        rows_done: int | None = None,
        rows_failed: int | None = None,
        renew_seconds: float | None = None,
    ) -> None:
        """Store how far the chunk is; counts of None stay; with `renew_seconds` its lease goes on.

        Transaction: joins; the fence is held to its end. Raises: LeaseLostError.
        """
        fence = _fence(lease)
        await self._under(
            lease,
            _CHECKPOINT,
            *fence,
            check.json_text("checkpoint", value, self._settings.max_checkpoint_bytes),
            check.count_or_none("rows_done", rows_done),
            check.count_or_none("rows_failed", rows_failed),
            None if renew_seconds is None else check.span("renew_seconds", renew_seconds),
        )

    async def complete(self, lease: JobLease, outcome: ChunkOutcome | None = None) -> ChunkSettled:
        """Say that the chunk is done. `last`: `finish` is to be called when this has been committed.

        Transaction: joins; the fence is held to its end. Idempotent: 'repeated'. Raises: LeaseLostError.
        """
        fence = _fence(lease)
        ((row),) = await self._under(lease, _COMPLETE, *fence, *self._outcome(outcome))
        return ChunkSettled(WriteOutcome(row["outcome"]), row["last"])

    async def complete_many(
        self, leases: Sequence[JobLease], outcomes: Sequence[ChunkOutcome | None]
    ) -> list[ChunkSettled]:
        """Say of many chunks that they are done, in one transaction; each has its own answer, `stale` where lost."""
        if len(leases) != len(outcomes):
            raise InvalidInputError(f"{len(leases)} leases and {len(outcomes)} outcomes: there must be one for each")
        if not leases:
            return []
        columns = [self._outcome(outcome) for outcome in outcomes]
        texts = [text for text, _, _ in columns]
        done, failed = [rows for _, rows, _ in columns], [rows for _, _, rows in columns]
        rows = await self._fetch(_COMPLETE_MANY, *_arrays(leases), texts, _any(done), _any(failed))
        found = [ChunkSettled(WriteOutcome.STALE, False)] * len(leases)
        for row in rows:
            found[row["n"] - 1] = ChunkSettled(WriteOutcome(row["outcome"]), row["last"])
        return found

    async def fail(
        self, lease: JobLease, message: str, *, retryable: bool, delay_seconds: float | None = None
    ) -> tuple[ChunkStatus | None, bool]:
        """Say that an attempt has failed; return what the chunk is now (None: the lease is lost) and `last`.

        It is a retry, `delay_seconds` from now on, where `retryable` and attempts remain.
        """
        ((row),) = await self._fetch(
            _FAIL,
            *_fence(lease),
            codec.sanitize(message, check.MAX_TEXT_BYTES),
            check.flag("retryable", retryable),
            None if delay_seconds is None else check.span("delay_seconds", delay_seconds, zero=True),
        )
        return (None if row["status"] is None else ChunkStatus(row["status"])), row["last"]

    async def release(
        self, leases: Sequence[JobLease], to: ChunkStatus | str = ChunkStatus.PENDING, *, notify: bool = False
    ) -> list[tuple[WriteOutcome, ChunkStatus | None]]:
        """Give chunks back, their attempts not counted, to `pending` or `retry`; in a cancelled job to `cancelled`."""
        status = check.one_of("to", to, ChunkStatus, but=[s for s in ChunkStatus if s not in ("pending", "retry")])
        if not leases:
            return []
        rows = await self._fetch(_RELEASE, *_arrays(leases), status.value, check.flag("notify", notify))
        found: list[tuple[WriteOutcome, ChunkStatus | None]] = [(WriteOutcome.STALE, None)] * len(leases)
        for row in rows:
            became = row["status"]
            found[row["n"] - 1] = (WriteOutcome(row["outcome"]), None if became is None else ChunkStatus(became))
        return found

    async def row_errors_add(self, lease: JobLease, errors: Sequence[RowError]) -> int:
        """Tell rows that could not be used; return how many. The same row and code again replaces what was said.

        Transaction: joins; the fence is held to its end. Raises: LeaseLostError.
        """
        fence = _fence(lease)
        text = check.row_errors_json(errors, self._settings.max_payload_bytes)
        ((row),) = await self._under(lease, _ROW_ERRORS_ADD, *fence, text)
        return int(row["value"])

    # --- everybody ------------------------------------------------------------------------------------------------

    async def finish(self, tenant: str | None, job_ids: Sequence[UUID]) -> list[tuple[UUID, JobStatus, bool]]:
        """End jobs of which nothing can run any more; return of each its status, and whether this call ended it.

        Transaction: its own. Never in one that holds a chunk. Idempotent: yes.
        """
        ids = [check.identity("an item of job_ids", job_id) for job_id in job_ids]
        rows = await self._fetch(_FINISH, _tenant(tenant), ids)
        return [(row["job_id"], JobStatus(row["status"]), row["ended"]) for row in rows]

    async def refresh_counters(self, tenant: str | None, job_id: UUID) -> JobStatus | None:
        """Count a job's chunks into its counters; return its status, None where there is no such job."""
        rows = await self._fetch(_REFRESH, _tenant(tenant), check.identity("job_id", job_id))
        return JobStatus(rows[0]["status"]) if rows else None

    async def reap(self, tenant: str | None, reaper: str, *, limit: int) -> list[ReapedChunk]:
        """Take back at most `limit` chunks whose lease has run out; then `finish` is to be called for the jobs."""
        rows = await self._fetch(_REAP, _tenant(tenant), check.name("reaper", reaper), check.number("limit", limit, 1))
        return [
            ReapedChunk(
                row["tenant_id"],
                row["job_id"],
                row["seq"],
                ChunkStatus(row["status"]),
                row["attempts"],
                row["lease_version"],
                row["holder"],
            )
            for row in rows
        ]

    async def run_sweeps(
        self, reaper: str, *, lease: bool = True, finish: bool = True, remove: bool = False
    ) -> list[Swept]:
        """Do what of these sweeps is due for this login, by turns with all others of it, over all its tenants.

        `remove` is for gateways and operators. Afterwards `finish` is to be called for jobs of 'lease'.
        """
        s = self._settings
        every = [
            check.span("sweep_seconds", every) if wanted else None
            for every, wanted in (
                (s.sweep_seconds, lease),
                (s.finish_sweep_seconds, finish),
                (s.remove_sweep_seconds, remove),
            )
        ]
        rows = await self._fetch(
            _RUN_SWEEPS,
            check.name("reaper", reaper),
            s.sweep_batch,
            check.span("lease_seconds", s.lease_seconds),
            check.span("retention_seconds", s.retention_seconds),
            check.span("abandoned_seconds", s.abandoned_seconds),
            every,
        )
        return [Swept(row["sweep"], row["tenant_id"], row["job_id"], row["seq"], row["status"]) for row in rows]

    async def control(
        self,
        tenant: str | None,
        job_id: UUID,
        action: str,
        *,
        actor: str | None = None,
        channel: str | None = None,
        note: str | None = None,
    ) -> Controlled:
        """Pause, resume, cancel or retry_failed; tell what was really done. For gateways and operators."""
        if action not in JOB_ACTIONS:
            raise InvalidInputError(f"action must be one of {', '.join(JOB_ACTIONS)}")
        ((row),) = await self._fetch(
            _CONTROL,
            _tenant(tenant),
            check.identity("job_id", job_id),
            action,
            *_who(actor, channel, note),
        )
        was, status = status_or_none(row["was"]), status_or_none(row["status"])
        return Controlled(row["outcome"], was, status if was else None, row["chunks"], row["running"])

    async def resolve(
        self,
        tenant: str | None,
        job_id: UUID,
        seq: int,
        decision: str,
        *,
        actor: str | None,
        channel: str | None = None,
        note: str | None = None,
    ) -> Resolved:
        """Decide about a chunk that waits for a person: retry, done, failed. For gateways and operators."""
        if decision not in CHUNK_DECISIONS:
            raise InvalidInputError(f"decision must be one of {', '.join(CHUNK_DECISIONS)}")
        ((row),) = await self._fetch(
            _RESOLVE,
            _tenant(tenant),
            check.identity("job_id", job_id),
            check.number("seq", seq),
            decision,
            *_who(actor, channel, note),
        )
        chunk = row["chunk_status"]
        return Resolved(row["outcome"], None if chunk is None else ChunkStatus(chunk), status_or_none(row["status"]))

    async def set_job_status(
        self,
        tenant: str | None,
        job_id: UUID,
        from_: JobStatus | str | Sequence[JobStatus | str],
        to: JobStatus | str,
        extra: Mapping[str, Any] | None = None,
        *,
        event: Mapping[str, Any] | None = None,
    ) -> bool:
        """Move a job from one of several statuses to one, with more columns and an event; False: nothing was written.

        `event` has type, and perhaps seq, actor, channel, holder, detail.
        """
        return bool(
            await self._value(
                _SET_JOB_STATUS,
                _tenant(tenant),
                check.identity("job_id", job_id),
                [status.value for status in check.some_of("from_", from_, JobStatus)],
                check.one_of("to", to, JobStatus).value,
                check.extra_json("extra", extra, JOB_COLUMNS, self._settings.max_payload_bytes),
                None if event is None else check.event_json(event, self._settings.max_payload_bytes),
            )
        )

    async def update_job(self, tenant: str | None, job_id: UUID, extra: Mapping[str, Any]) -> bool:
        """Write columns of a job whatever its status; False: no such job."""
        text = check.extra_json("extra", extra, JOB_COLUMNS, self._settings.max_payload_bytes)
        return bool(await self._value(_UPDATE_JOB, _tenant(tenant), check.identity("job_id", job_id), text))

    async def set_chunk_statuses(
        self,
        tenant: str | None,
        job_id: UUID,
        from_: ChunkStatus | str | Sequence[ChunkStatus | str],
        to: ChunkStatus | str,
        extra: Mapping[str, Any] | None = None,
        *,
        seqs: Sequence[int] | None = None,
    ) -> int:
        """Move chunks from some statuses to one, each into nobody's hands; return how many. `running` is a claim's."""
        return int(
            await self._value(
                _SET_CHUNK_STATUSES,
                _tenant(tenant),
                check.identity("job_id", job_id),
                [status.value for status in check.some_of("from_", from_, ChunkStatus)],
                check.one_of("to", to, ChunkStatus, but=[ChunkStatus.RUNNING]).value,
                check.extra_json("extra", extra, CHUNK_COLUMNS, self._settings.max_payload_bytes),
                None if seqs is None else [check.number("an item of seqs", seq) for seq in seqs],
            )
        )

    async def record_event(
        self,
        tenant: str | None,
        job_id: UUID,
        seq: int | None,
        type_: str,
        *,
        actor: str | None = None,
        channel: str | None = None,
        holder: str | None = None,
        detail: Any = None,
    ) -> bool:
        """Add an event to the timeline of a job, or of a chunk of it; False: no such job. Locks nothing."""
        return bool(
            await self._value(
                _RECORD_EVENT,
                _tenant(tenant),
                check.identity("job_id", job_id),
                None if seq is None else check.number("seq", seq),
                check.event_type("type_", type_),
                *_who(actor, channel, holder, third="holder"),
                None if detail is None else check.json_text("detail", detail, self._settings.max_payload_bytes),
            )
        )

    async def channel(self, kind: str, tenant: str | None) -> str:
        """Return the channel that rings for a tenant: `durable` for workers, `durable_watch` for those who watch."""
        return str(await self._value(_CHANNEL, kind, _tenant(tenant)))

    # --- how ------------------------------------------------------------------------------------------------------

    async def _value(self, sql: str, *args: object) -> Any:
        ((row),) = await self._fetch(sql, *args)
        return row["value"]

    async def _value_of(self, job_id: UUID, sql: str, *args: object) -> Any:
        try:
            return await self._value(sql, *args)
        except UnknownJobError as error:
            raise UnknownJobError(job_id=job_id) from error
        except JobClosedError as error:
            raise JobClosedError(str(error), job_id=job_id) from error

    async def _under(self, lease: JobLease, sql: str, *args: object) -> list[Any]:
        try:
            return await self._fetch(sql, *args)
        except LeaseLostError as error:
            raise LeaseLostError(job_id=lease.job_id, seq=lease.seq) from error

    def _outcome(self, outcome: ChunkOutcome | None) -> tuple[str, int | None, int | None]:
        if outcome is None:
            return "null", None, None
        if not isinstance(outcome, ChunkOutcome):
            raise InvalidInputError(f"outcome must be a ChunkOutcome, not {type(outcome).__name__}")
        return (
            check.json_text("outcome", outcome.value, self._settings.max_checkpoint_bytes),
            check.count_or_none("rows_done", outcome.rows_done),
            check.count_or_none("rows_failed", outcome.rows_failed),
        )

    def _lease(self, lease_seconds: float | None) -> tuple[timedelta, Callable[[], float]]:
        span = check.span("lease_seconds", self._settings.lease_seconds if lease_seconds is None else lease_seconds)
        until = time.monotonic() + span.total_seconds()
        return span, lambda: until


def _fetcher(conn: Connection) -> _Fetch:
    async def fetch(sql: str, *args: object) -> list[Any]:
        with mapped_errors():
            rows: list[Any] = await conn.fetch(sql, *args)
            return rows

    return fetch


def _tenant(tenant: str | None) -> str | None:
    if tenant is None:
        return None
    if tenant == "":
        raise TenancyUnboundError("'' is no tenant")
    return codec.check_name("tenant", tenant)


def _fence(lease: JobLease) -> tuple[str, UUID, int, UUID, int]:
    lease = check.lease_of(lease)
    return lease.tenant_id, lease.job_id, lease.seq, lease.token, lease.version


def _arrays(leases: Sequence[JobLease]) -> list[list[Any]]:
    return [list(column) for column in zip(*map(_fence, leases), strict=True)]


def _any(values: list[int | None]) -> list[int | None] | None:
    """Return counts, or None where none of them is known."""
    return values if any(value is not None for value in values) else None


def _who(actor: str | None, channel: str | None, note: str | None, *, third: str = "note") -> list[str | None]:
    return [
        check.text_or_none("actor", actor),
        check.text_or_none("channel", channel),
        check.text_or_none(third, note),
    ]
