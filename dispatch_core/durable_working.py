"""The verbs of those who run chunks: to claim, and to say what came of it. See `DurableRepository`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from dispatch_core import codec
from dispatch_core import durable_input as check
from dispatch_core.durable_calls import Calls, tenant_or_none
from dispatch_core.durable_models import (
    ChunkOutcome,
    ChunkSettled,
    ChunkStatus,
    ClaimedChunks,
    Heartbeaten,
    JobLease,
    RowError,
)
from dispatch_core.durable_rows import claimed_of, status_or_none
from dispatch_core.errors import InvalidInputError, LeaseLostError
from dispatch_core.models import WriteOutcome

__all__ = ["WorkingVerbs"]

# What the chunks of a job share comes with the first of them, as its params do: five hundred times the same id and the
# same moment take longer to read than to claim.
_CLAIM: Final = (
    "select outcome, case when params is not null or outcome = 'waiting' then tenant_id end as tenant_id,"
    " case when params is not null then job_id end as job_id, seq, case when params is not null then kind end as kind,"
    " params, case when params is not null then idempotent end as idempotent,"
    " case when params is not null then max_attempts end as max_attempts, payload, checkpoint, attempts,"
    " lease_version, rows_total, rows_done, rows_failed,"
    " case when params is not null then lease_expires_at end as lease_expires_at,"
    " extract(epoch from wait)::float8 as wait"
    " from relay.durable_claim($1::text[], $2::text[], $3::bigint[], $4::bigint, $5::text, $6::uuid,"
    " $7::interval, $8::bigint, $9::text::jsonb)"
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
# An array of one stands for as many of the same ($3 has them all).
_HEARTBEAT: Final = """
select outcome, job_status, places from relay.durable_heartbeat(
  case pg_catalog.cardinality($1::text[]) when 1
    then pg_catalog.array_fill(($1::text[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $1::text[] end,
  case pg_catalog.cardinality($2::uuid[]) when 1
    then pg_catalog.array_fill(($2::uuid[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $2::uuid[] end,
  $3::bigint[],
  case pg_catalog.cardinality($4::uuid[]) when 1
    then pg_catalog.array_fill(($4::uuid[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $4::uuid[] end,
  case pg_catalog.cardinality($5::bigint[]) when 1
    then pg_catalog.array_fill(($5::bigint[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $5::bigint[] end,
  $6::interval, $7::bigint[])"""
_CHECKPOINT: Final = (
    "select relay.durable_checkpoint($1::text, $2::uuid, $3::bigint, $4::uuid, $5::bigint, $6::text::jsonb,"
    " $7::bigint, $8::bigint, $9::interval)::text as value"
)
_COMPLETE: Final = (
    "select outcome, last from relay.durable_complete($1::text, $2::uuid, $3::bigint, $4::uuid, $5::bigint,"
    " $6::text::jsonb, $7::bigint, $8::bigint)"
)
_COMPLETE_MANY: Final = """
select outcome, last, places from relay.durable_complete_many(
  case pg_catalog.cardinality($1::text[]) when 1
    then pg_catalog.array_fill(($1::text[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $1::text[] end,
  case pg_catalog.cardinality($2::uuid[]) when 1
    then pg_catalog.array_fill(($2::uuid[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $2::uuid[] end,
  $3::bigint[],
  case pg_catalog.cardinality($4::uuid[]) when 1
    then pg_catalog.array_fill(($4::uuid[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $4::uuid[] end,
  case pg_catalog.cardinality($5::bigint[]) when 1
    then pg_catalog.array_fill(($5::bigint[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $5::bigint[] end,
  case pg_catalog.cardinality($6::text[]) when 1
    then pg_catalog.array_fill(($6::text[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $6::text[] end,
  case pg_catalog.cardinality($7::bigint[]) when 1
    then pg_catalog.array_fill(($7::bigint[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $7::bigint[] end,
  case pg_catalog.cardinality($8::bigint[]) when 1
    then pg_catalog.array_fill(($8::bigint[])[1], array[pg_catalog.cardinality($3::bigint[])]) else $8::bigint[] end)"""
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


class WorkingVerbs(Calls):
    """For workers alone."""

    __slots__ = ()

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
        after: Mapping[UUID, int] | None = None,
    ) -> ClaimedChunks:
        """Claim the next chunks of all jobs of these kinds: by priority, age, number. `limits`: one for each kind.

        `token` is new for every claim; `start`: at which of the tenants to begin; `after`: of these jobs only chunks
        with higher numbers.
        """
        lease, deadline = self._lease(lease_seconds)
        rows = await self._fetch(
            _CLAIM,
            [tenant_or_none(tenant) for tenant in tenants],
            check.names("kinds", kinds),
            None if limits is None else [check.count("an item of limits", most) for most in limits],
            check.number("limit", limit, 1),
            check.name("holder", holder),
            check.identity("token", token),
            lease,
            check.count("start", start),
            json.dumps({str(job_id): seq for job_id, seq in after.items()}) if after else None,
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
            tenant_or_none(tenant),
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
            tenant_or_none(tenant),
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
        names = [tenant_or_none(tenant) for tenant in tenants]
        rows = await self._fetch(_CLAIM_AGAIN, names, check.identity("token", token))
        return claimed_of(rows, token, check.name("holder", holder), lambda: local_deadline)

    async def candidates(
        self, tenant: str | None, kinds: Sequence[str], *, limit: int, job_id: UUID | None = None
    ) -> list[tuple[UUID, int, int]]:
        """Return job id, number and lease_version of chunks that could be claimed now, in the order of a claim."""
        rows = await self._fetch(
            _CANDIDATES,
            tenant_or_none(tenant),
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
        rows = await self._fetch(_HEARTBEAT, *_fences(leases), lease, done)
        found = [Heartbeaten(WriteOutcome.STALE, None)] * len(leases)
        for row in rows:
            answer = Heartbeaten(WriteOutcome(row["outcome"]), status_or_none(row["job_status"]))
            for place in _places(row, leases):
                found[place - 1] = answer
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
        rows = await self._fetch(
            _COMPLETE_MANY, *_fences(leases), _alike(texts), _alike(_any(done)), _alike(_any(failed))
        )
        found = [ChunkSettled(WriteOutcome.STALE, False)] * len(leases)
        for row in rows:
            answer = ChunkSettled(WriteOutcome(row["outcome"]), row["last"])
            for place in _places(row, leases):
                found[place - 1] = answer
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
        return await self.row_errors_add_texts(lease, check.row_errors_json(errors, self._settings.max_payload_bytes))

    async def row_errors_add_texts(self, lease: JobLease, texts: Sequence[bytes]) -> int:
        """Tell row errors that were checked and encoded by `durable_input.row_errors_json`; see `row_errors_add`."""
        text = (b"[" + b",".join(texts) + b"]").decode()
        ((row),) = await self._under(lease, _ROW_ERRORS_ADD, *_fence(lease), text)
        return int(row["value"])

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
            "null"
            if outcome.value is None
            else check.json_text("outcome", outcome.value, self._settings.max_checkpoint_bytes),
            check.count_or_none("rows_done", outcome.rows_done),
            check.count_or_none("rows_failed", outcome.rows_failed),
        )

    def _lease(self, lease_seconds: float | None) -> tuple[timedelta, Callable[[], float]]:
        span = check.span("lease_seconds", self._settings.lease_seconds if lease_seconds is None else lease_seconds)
        until = time.monotonic() + span.total_seconds()
        return span, lambda: until


def _fence(lease: JobLease) -> tuple[str, UUID, int, UUID, int]:
    lease = check.lease_of(lease)
    return lease.tenant_id, lease.job_id, lease.seq, lease.token, lease.version


def _arrays(leases: Sequence[JobLease]) -> list[list[Any]]:
    return [list(column) for column in zip(*map(_fence, leases), strict=True)]


def _fences(leases: Sequence[JobLease]) -> list[list[Any] | None]:
    """Return columns of leases, but for their numbers an array of one where all are alike."""
    tenants, job_ids, seqs, tokens, versions = _arrays(leases)
    return [_alike(tenants), _alike(job_ids), seqs, _alike(tokens), _alike(versions)]


def _alike(values: list[Any] | None) -> list[Any] | None:
    """Return an array of one for many of the same, which the statement fills up: the driver looks at every element."""
    return values[:1] if values and values.count(values[0]) == len(values) else values


def _places(row: Any, leases: Sequence[JobLease]) -> Sequence[int]:
    """Return of which places, counted from 1, the row tells; of all where it names none."""
    places: Sequence[int] | None = row["places"]
    return range(1, len(leases) + 1) if places is None else places


def _any(values: list[int | None]) -> list[int | None] | None:
    """Return counts, or None where none of them is known."""
    return values if any(value is not None for value in values) else None
