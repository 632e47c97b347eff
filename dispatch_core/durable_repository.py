"""The verbs of the durable room for both SDKs: one method, one call of one SQL function in schema `relay`.

Every method is one statement, in a transaction of its own, or in the one that the connection is in. JSON goes in and
out as text, so that numbers keep their digits. What may be wrong with arguments is found before any SQL; what
PostgreSQL refuses comes as one of ours (`errors`). A tenant of None is the one that is bound on the connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from dispatch_core import durable_input as check
from dispatch_core.durable_calls import tenant_or_none
from dispatch_core.durable_models import (
    CHUNK_DECISIONS,
    JOB_ACTIONS,
    ChunkSpec,
    ChunkStatus,
    Controlled,
    JobStatus,
    ReapedChunk,
    Resolved,
    Swept,
)
from dispatch_core.durable_reading import ReadingVerbs
from dispatch_core.durable_rows import status_or_none
from dispatch_core.durable_working import WorkingVerbs
from dispatch_core.errors import (
    InvalidInputError,
    JobClosedError,
    UnknownJobError,
)

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

_FINISH: Final = "select job_id, status, ended from relay.durable_finish($1::text, $2::uuid[])"
_REFRESH: Final = "select status from relay.durable_refresh_counters($1::text, $2::uuid)"
_REAP: Final = "select * from relay.durable_reap($1::text, $2::text, $3::bigint)"
_RUN_SWEEPS: Final = (
    "select sweep, tenant_id, job_id, seq, status from relay.durable_run_sweeps($1::text, $2::bigint, $3::interval,"
    " $4::interval, $5::interval, $6::interval[])"
)
_CONTROL: Final = (
    "select * from relay.durable_control($1::text, $2::uuid, $3::text, $4::text, $5::text, $6::text, $7::bigint)"
)
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
_RECORD_EVENT_WITHIN: Final = (
    _RECORD_EVENT + " from (select pg_catalog.set_config('lock_timeout', $9::text, true) as set offset 0) as s"
)
_SET_LOCK_TIMEOUT: Final = "select pg_catalog.set_config('lock_timeout', $1::text, true) as value"
_LOCK_TIMEOUT: Final = "select pg_catalog.current_setting('lock_timeout') as value"
_NOW: Final = "select pg_catalog.clock_timestamp() as at"
_CHANNEL: Final = "select relay.channel($1::text, $2::text) as value"

MILLISECOND: Final = timedelta(milliseconds=1)

JOB_COLUMNS: Final = {"priority": "number", "max_attempts": "positive", "last_error": "text", "params": "json"}
"""What may be written of a job from outside."""
CHUNK_COLUMNS: Final = {"last_error": "text", "attempts": "reset"}


class DurableRepository(ReadingVerbs, WorkingVerbs):
    """The verbs on a connection, or on connections of a `Database`, one for each call.

    A connection must be as the driver made it. One of somebody else's, with codecs of his, is given as a
    `CallersConnection`, and those of a pool that a `Database` has borrowed are taken for such.
    """

    __slots__ = ()

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
                tenant_or_none(tenant),
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
            tenant_or_none(tenant),
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
        args = (tenant_or_none(tenant), job_id, check.count_or_none("chunks", chunks), check.flag("notify", notify))
        return JobStatus(await self._value_of(job_id, _SEAL, *args))

    async def abandon(self, tenant: str | None, job_id: UUID) -> bool:
        """Give a submission up; False: there is none, or it is sealed already."""
        return bool(await self._value(_ABANDON, tenant_or_none(tenant), check.identity("job_id", job_id)))

    # --- everybody ------------------------------------------------------------------------------------------------

    async def finish(self, tenant: str | None, job_ids: Sequence[UUID]) -> list[tuple[UUID, JobStatus, bool]]:
        """End jobs of which nothing can run any more; return of each its status, and whether this call ended it.

        Transaction: its own. Never in one that holds a chunk. Idempotent: yes.
        """
        ids = [check.identity("an item of job_ids", job_id) for job_id in job_ids]
        rows = await self._fetch(_FINISH, tenant_or_none(tenant), ids)
        return [(row["job_id"], JobStatus(row["status"]), row["ended"]) for row in rows]

    async def refresh_counters(self, tenant: str | None, job_id: UUID) -> JobStatus | None:
        """Count a job's chunks into its counters; return its status, None where there is no such job."""
        rows = await self._fetch(_REFRESH, tenant_or_none(tenant), check.identity("job_id", job_id))
        return JobStatus(rows[0]["status"]) if rows else None

    async def reap(self, tenant: str | None, reaper: str, *, limit: int) -> list[ReapedChunk]:
        """Take back at most `limit` chunks whose lease has run out; then `finish` is to be called for the jobs."""
        rows = await self._fetch(
            _REAP, tenant_or_none(tenant), check.name("reaper", reaper), check.number("limit", limit, 1)
        )
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
        """Pause, resume, cancel or retry_failed; tell what was really done. For gateways and operators.

        Of a job of very many chunks it is several statements: see `control_some`.
        """
        done, upto = await self.control_some(tenant, job_id, action, actor=actor, channel=channel, note=note)
        while upto is not None:
            more, upto = await self.control_some(
                tenant, job_id, action, actor=actor, channel=channel, note=note, after=upto
            )
            done = done.and_then(more)
        return done

    async def control_some(
        self,
        tenant: str | None,
        job_id: UUID,
        action: str,
        *,
        actor: str | None = None,
        channel: str | None = None,
        note: str | None = None,
        after: int = 0,
    ) -> tuple[Controlled, int | None]:
        """Do it, to 10,000 chunks at most; where there may be more, return also what `after` goes on behind them."""
        if action not in JOB_ACTIONS:
            raise InvalidInputError(f"action must be one of {', '.join(JOB_ACTIONS)}")
        ((row),) = await self._fetch(
            _CONTROL,
            tenant_or_none(tenant),
            check.identity("job_id", job_id),
            action,
            *_who(actor, channel, note),
            check.count("after", after),
        )
        was, status = status_or_none(row["was"]), status_or_none(row["status"])
        return Controlled(row["outcome"], was, status if was else None, row["chunks"], row["running"]), row["upto"]

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
            tenant_or_none(tenant),
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
                tenant_or_none(tenant),
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
        return bool(await self._value(_UPDATE_JOB, tenant_or_none(tenant), check.identity("job_id", job_id), text))

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
                tenant_or_none(tenant),
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
        lock_timeout_seconds: float | None = None,
    ) -> bool:
        """Add an event to the timeline of a job, or of a chunk of it; False: no such job. It waits for no row's lock.

        `lock_timeout_seconds`: for a table that somebody has locked; it holds to the end of the transaction.
        """
        args = (
            tenant_or_none(tenant),
            check.identity("job_id", job_id),
            None if seq is None else check.number("seq", seq),
            check.event_type("event", type_),
            *_who(actor, channel, holder, third="holder"),
            None if detail is None else check.json_text("detail", detail, check.MAX_DETAIL_BYTES),
        )
        if lock_timeout_seconds is None:
            return bool(await self._value(_RECORD_EVENT, *args))
        timeout = check.span("lock_timeout_seconds", lock_timeout_seconds)
        return bool(await self._value(_RECORD_EVENT_WITHIN, *args, f"{max(timeout // MILLISECOND, 1)}ms"))

    async def lock_timeout(self) -> str:
        """Return the lock timeout of the connection."""
        return str(await self._value(_LOCK_TIMEOUT))

    async def set_lock_timeout(self, value: str) -> None:
        """Set the lock timeout for the rest of the transaction."""
        await self._value(_SET_LOCK_TIMEOUT, value)

    async def now(self) -> datetime:
        """Return the database's clock, which goes on in a transaction that waits."""
        ((row),) = await self._fetch(_NOW)
        now: datetime = row["at"]
        return now

    async def channel(self, kind: str, tenant: str | None) -> str:
        """Return the channel that rings for a tenant: `durable` for workers, `durable_watch` for those who watch."""
        return str(await self._value(_CHANNEL, kind, tenant_or_none(tenant)))

    async def _value_of(self, job_id: UUID, sql: str, *args: object) -> Any:
        try:
            return await self._value(sql, *args)
        except UnknownJobError as error:
            raise UnknownJobError(job_id=job_id) from error
        except JobClosedError as error:
            raise JobClosedError(str(error), job_id=job_id) from error


def _who(actor: str | None, channel: str | None, note: str | None, *, third: str = "note") -> list[str | None]:
    return [
        check.text_or_none("actor", actor),
        check.text_or_none("channel", channel),
        check.text_or_none(third, note),
    ]
