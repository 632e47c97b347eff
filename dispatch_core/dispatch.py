"""The dispatch room at its lowest floor: one method, one call of one SQL function in schema `relay`.

Every method runs as a single statement on the connection it was given. Outside a transaction that statement is a
transaction of its own, so what a method reports is committed when it returns; inside one it joins it and commits or
rolls back with it. Tenants are bound inside the function and put back by it: nothing stays on the connection.

What may be wrong with arguments is found before any SQL; what PostgreSQL refuses comes as one of ours (`errors`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID

from dispatch_core import codec
from dispatch_core import dispatch_rows as read
from dispatch_core.database import Connection, mapped_errors
from dispatch_core.dispatch_bounded import (
    Bounded,
    checked_bound,
    enqueue_bounded,
    enqueue_keyed_bounded,
    raise_if_refused,
)
from dispatch_core.errors import (
    IdempotencyConflictError,
    InvalidBodyError,
    InvalidDeadlineError,
    InvalidInputError,
    InvalidResultError,
    MalformedHeadersError,
    TenancyUnboundError,
)
from dispatch_core.ids import new_id
from dispatch_core.models import (
    ClaimedJobs,
    Completion,
    DispatchJob,
    DispatchRequest,
    DispatchResult,
    DispatchStatus,
    EndedJob,
    Headers,
    PutBack,
    Settled,
    WriteOutcome,
)
from dispatch_core.requests import (
    MAX_BODY_BYTES,
    MAX_TTL_SECONDS,
    EnqueueRow,
    Preparer,
    columns,
    duration,
    prepare,
    uuid_array,
)

__all__ = ["CLAIMED_BODIES_BYTES", "EnqueueRow", "RelayDispatchRepository", "prepare"]

CLAIMED_BODIES_BYTES: Final = 4 * 1024 * 1024
"""What the bodies of a tenant in one claim may come to; those behind have to be fetched."""

_MAX_KEEP_SECONDS: Final = 10_000 * 86400.0

_ENQUEUE: Final = "select relay.enqueue($1, $2::text::uuid[], $3, $4, $5, $6, $7, $8, $9, $10, $11)"
_ENQUEUE_KEYED: Final = (
    "select job_id, duplicate from relay.enqueue_keyed($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
)
_CLAIM: Final = """
select headers, attempt, max_attempts, seq, date_part('epoch', created_at), date_part('epoch', expires_at), outcome,
       tenant_id, job_id, operation, body, body_bytes, fence, date_part('epoch', remaining)
from relay.claim($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"""
_CLAIM_AGAIN: Final = """
select headers, attempt, max_attempts, seq, date_part('epoch', created_at), date_part('epoch', expires_at), outcome,
       tenant_id, job_id, operation, body, body_bytes, fence, date_part('epoch', remaining)
from relay.claim_again($1, $2, $3, $4, $5, $6)"""
_FETCH_BODY: Final = "select body from relay.fetch_body($1, $2, $3, $4, $5)"
_HEARTBEAT: Final = "select n, outcome from relay.heartbeat($1, $2, $3, $4, $5, $6)"
# A column of one value stands for as many as there are jobs. Nearly always all have one outcome: then that is one row,
# and without their numbers.
_COMPLETE: Final = """
select outcome, status, case when count(*) < $13 then array_agg(n) end
from relay.complete(
  $1, $2, $3, $4, $5::text::uuid[], $6::text::bigint[], $7,
  case cardinality($8::text::bigint[])
    when 1 then array_fill(($8::text::bigint[])[1], array[$13::bigint::int]) else $8::text::bigint[] end,
  case cardinality($9::text[]) when 1 then array_fill(($9::text[])[1], array[$13::bigint::int]) else $9 end,
  case cardinality($10::bytea[]) when 1 then array_fill(($10::bytea[])[1], array[$13::bigint::int]) else $10 end,
  $11, $12, $14)
group by outcome, status"""
_RETRY: Final = "select n, outcome, status from relay.retry($1, $2, $3, $4, $5, $6, $7, $8, $9)"
_RELEASE: Final = "select n, outcome, status from relay.release($1, $2, $3, $4, $5, $6)"
_RECLAIM: Final = "select tenant_id, relay_id, job_id, status from relay.reclaim($1, $2, $3, $4)"
_POLL: Final = (
    "select n, status, attempt, response_status, response_headers, response_body, error_code, error_message,"
    " created_at, claimed_at, completed_at, expires_at, date_part('epoch', remaining), fits"
    " from relay.poll($1, $2::text::uuid[], $3)"
)
# The tenant comes back too: without one given it is the caller's, which only the server knows here.
_MARK_EXPIRED: Final = (
    "select n, outcome, relay_id, was_claimed, coalesce($1, current_setting('app.tenant_id', true))"
    " from relay.mark_expired($1, $2)"
)
_LIST: Final = "select * from relay.list_jobs($1, $2, $3, $4, $5)"
_SWEEP: Final = "select sweep, tenant_id, relay_id, job_id, status from relay.run_sweeps($1, $2, $3, $4, $5)"
_PURGE: Final = "select relay.purge($1, $2, $3)"
_CHANNEL: Final = "select relay.channel($1, $2, $3)"
_NOW: Final = "select relay.now()"
# As a table it is called once, before the column is computed, and raises where no tenant is bound.
_NOW_BOUND: Final = "select relay.now() from relay.bound_tenant()"
_BOUND: Final = "select relay.bound_tenant()"


class RelayDispatchRepository:
    """The dispatch verbs on one connection.

    `tenant` None: the tenant that the caller has bound on the connection as `app.tenant_id`; with none there, every
    method raises `TenancyUnboundError`. The connection is the caller's; it must not be used by two tasks at once.
    """

    __slots__ = ("_conn", "_tenant")

    def __init__(self, conn: Connection, tenant: str | None = None) -> None:
        if tenant == "":
            raise TenancyUnboundError("'' is no tenant")
        self._conn = conn
        self._tenant = None if tenant is None else codec.check_name("tenant", tenant)

    @property
    def tenant(self) -> str | None:
        return self._tenant

    # --- gateway verbs --------------------------------------------------------------------------------------------

    async def enqueue(
        self,
        relay_id: str,
        operation: str,
        headers: Headers | None = None,
        body: bytes | str | None = None,
        *,
        json: Any = codec.UNSET,
        ttl: float | timedelta | None = None,
        expires_at: datetime | None = None,
        delay: float | timedelta | None = None,
        max_attempts: int = 1,
        idempotency_key: str | None = None,
        max_pending: int = 0,
        notify: bool = False,
    ) -> UUID:
        """Store one job and return its id; with a key that is in use for the same request, the id of that job.

        Transaction: joins the caller's, or is one of its own. Idempotent: by `idempotency_key`, where given.
        `max_pending`: how many jobs of the relay may be pending, this one included; 0 is no bound. `notify` rings the
        relay in the same transaction. Raises: as `prepare`, IdempotencyConflictError, and BacklogFullError, after which
        a transaction goes on.
        """
        request = DispatchRequest(
            relay_id=relay_id,
            operation=operation,
            headers=headers,
            body=body,
            json=json,
            ttl=ttl,
            expires_at=expires_at,
            delay=delay,
            max_attempts=max_attempts,
            idempotency_key=idempotency_key,
        )
        row = prepare(request)
        if row.idempotency_key is not None:
            return (await self.enqueue_keyed_row(row, max_pending=max_pending, notify=notify))[0]
        await self.enqueue_all([row], max_pending=max_pending, notify=notify)
        return row.job_id

    async def enqueue_many(
        self, requests: Iterable[DispatchRequest], *, max_pending: int = 0, notify: bool = False
    ) -> list[UUID]:
        """Store all the jobs or none, in one statement; the ids come in the order of the requests.

        Transaction: joins the caller's, or is one of its own. Requests with an idempotency key are refused here: each
        may have to wait for another transaction, and would hold up the rest. `max_pending` and Raises: as `enqueue`.
        """
        rows = Preparer().rows(requests)
        if any(row.idempotency_key is not None for row in rows):
            raise InvalidInputError("enqueue_many takes no idempotency keys: use enqueue")
        await self.enqueue_all(rows, max_pending=max_pending, notify=notify)
        return [row.job_id for row in rows]

    async def enqueue_all(self, rows: Sequence[EnqueueRow], *, max_pending: int = 0, notify: bool = False) -> None:
        """Store prepared rows, all or none, under one bound for each relay. Raises: BacklogFullError."""
        if not checked_bound(max_pending):
            await self.enqueue_rows(rows, notify=notify)
            return
        told = await self.enqueue_bounded_rows(rows, [max_pending] * len(rows), notify=notify)
        raise_if_refused(told, Counter(row.relay_id for row in rows), max_pending)

    async def enqueue_bounded_rows(
        self,
        rows: Sequence[EnqueueRow],
        bounds: Sequence[int],
        *,
        whole: bool = True,
        notify: bool = False,
        timeout: float | None = None,
    ) -> Bounded:
        """Store prepared rows that their bounds allow, each its own; `whole`: all or none.

        `bounds` are numbers of pending jobs, 0 is none. Idempotent and `timeout`: as `enqueue_rows`; a row that is
        there already is never refused.
        """
        if not rows:
            await self._require_tenant()
            return Bounded([], {})
        return await enqueue_bounded(
            self._conn, self._tenant, rows, bounds, whole=whole, notify=notify, timeout=timeout
        )

    async def enqueue_rows(
        self, rows: Sequence[EnqueueRow], *, notify: bool = False, timeout: float | None = None
    ) -> list[bool]:
        """Store prepared rows; per row, whether it was new.

        `timeout`: seconds for the statement, in place of the connection's own. Idempotent: by job id, so that a call
        whose reply was lost can be made again with the same rows.
        """
        if not rows:
            await self._require_tenant()
            return []
        with mapped_errors():
            known = await self._conn.fetchval(_ENQUEUE, self._tenant, *columns(rows), notify, timeout=timeout)
        if not known:
            return [True] * len(rows)
        there = set(known)
        return [row.job_id not in there for row in rows]

    async def enqueue_keyed_row(
        self, row: EnqueueRow, *, lock_timeout_seconds: float = 5.0, max_pending: int = 0, notify: bool = False
    ) -> tuple[UUID, bool]:
        """Store one prepared row under its idempotency key; return the job's id and whether it was there before.

        Waits at most `lock_timeout_seconds` for another transaction that is storing the same key, then raises
        DatabaseBusyError. Idempotent: by tenant and key; with one that is in use nothing is refused for `max_pending`.
        Raises: IdempotencyConflictError, BacklogFullError.
        """
        try:
            if checked_bound(max_pending):
                return await enqueue_keyed_bounded(
                    self._conn,
                    self._tenant,
                    row,
                    max_pending,
                    lock_timeout_seconds=lock_timeout_seconds,
                    notify=notify,
                )
            with mapped_errors(job_id=row.job_id):
                record = await self._conn.fetchrow(
                    _ENQUEUE_KEYED,
                    self._tenant,
                    row.job_id,
                    row.relay_id,
                    row.operation,
                    row.headers,
                    row.body,
                    row.max_attempts,
                    row.ttl,
                    row.expires_at,
                    row.delay,
                    row.idempotency_key,
                    timedelta(seconds=lock_timeout_seconds),
                    notify,
                )
        except IdempotencyConflictError as error:
            error.tenant_id, error.key = self._tenant, row.idempotency_key
            raise
        assert record is not None
        return record[0], record[1]

    async def poll_status(self, job_id: UUID) -> DispatchResult | None:
        """Return where the job stands; None for an unknown id, and for another tenant's just so.

        Changes nothing. Raises: MalformedHeadersError where the stored response headers are no map of headers.
        """
        result = (await self.poll_many([job_id])).get(job_id)
        if isinstance(result, MalformedHeadersError):
            raise result
        return result

    async def poll_many(self, job_ids: Iterable[UUID]) -> dict[UUID, DispatchResult | MalformedHeadersError]:
        """Return where each known job stands; ids unknown to the tenant are missing from the answer.

        A job whose stored response headers are malformed has the error as its answer and hurts no other. Large results
        take several statements: see `poll_page`.
        """
        answers, left = await self.poll_page(job_ids)
        while left:
            more, left = await self.poll_page(left)
            answers.update(more)
        return answers

    async def poll_page(
        self, job_ids: Iterable[UUID], *, batch_limit_bytes: int = 4 * 1024 * 1024, timeout: float | None = None
    ) -> tuple[dict[UUID, DispatchResult | MalformedHeadersError], list[UUID]]:
        """Return, by one statement, where jobs stand, and the ids to ask for again.

        Results come until their bodies and headers fill `batch_limit_bytes`; the first one always comes, and ids that
        are left over are of jobs that have ended. `timeout`: seconds, in place of the connection's own. As `poll_many`
        otherwise.
        """
        ids = list(dict.fromkeys(job_ids))
        if not ids:
            await self._require_tenant()
            return {}, []
        found, places = await self.poll_places(ids, batch_limit_bytes=batch_limit_bytes, timeout=timeout)
        answers = {job_id: result for job_id, result in zip(ids, found, strict=True) if result is not None}
        return answers, [ids[place] for place in places]

    async def poll_places(
        self, ids: Sequence[UUID], *, batch_limit_bytes: int = 4 * 1024 * 1024, timeout: float | None = None
    ) -> tuple[list[DispatchResult | MalformedHeadersError | None], list[int]]:
        """Do as `poll_page` for at least one id, each of which may come more than once.

        Returns an answer for each place in `ids`, None for unknown ones, and the places to ask for again.
        """
        with mapped_errors(job_id=ids[0] if len(ids) == 1 else None):
            records = await self._conn.fetch(_POLL, self._tenant, uuid_array(ids), batch_limit_bytes, timeout=timeout)
        return read.results(records, ids)

    async def mark_expired(self, job_id: UUID) -> int:
        """Withdraw a job: 1 if it was pending or claimed and is now `expired`, else 0.

        Does not look at the clock. Idempotent: yes, the second call returns 0.
        """
        return len(await self.mark_expired_many([job_id]))

    async def mark_expired_many(
        self, job_ids: Sequence[UUID], *, timeout: float | None = None
    ) -> list[tuple[EndedJob, bool]]:
        """Withdraw jobs; return those that this call ended, and whether a relay was at work on each.

        `timeout`: seconds, in place of the connection's own.
        """
        with mapped_errors():
            records = await self._conn.fetch(_MARK_EXPIRED, self._tenant, job_ids, timeout=timeout)
        return [
            (EndedJob(record[4], record[2], job_ids[record[0] - 1], DispatchStatus.EXPIRED), record[3])
            for record in records
            if record[1] == "applied"
        ]

    async def list_jobs(
        self,
        *,
        relay_id: str | None = None,
        status: DispatchStatus | str | None = None,
        limit: int = 50,
        before: UUID | None = None,
    ) -> list[dict[str, Any]]:
        """Return the newest jobs first, without bodies; `before` is the last id of the page before. For people."""
        with mapped_errors():
            records = await self._conn.fetch(
                _LIST, self._tenant, relay_id, None if status is None else str(status), limit, before
            )
        return [dict(record) for record in records]

    async def purge(self, keep_seconds: float, *, limit: int = 1000) -> int:
        """Remove at most `limit` jobs that ended more than `keep_seconds` ago; return how many."""
        with mapped_errors():
            count = await self._conn.fetchval(
                _PURGE, self._tenant, duration("keep_seconds", keep_seconds, _MAX_KEEP_SECONDS), limit
            )
        return int(count)

    # --- relay verbs ----------------------------------------------------------------------------------------------

    async def claim(
        self,
        relay_id: str,
        *,
        claimed_by: str,
        limit: int = 1,
        claim_id: UUID | None = None,
        lease_seconds: float = 30.0,
        tenants: Sequence[str | None] | None = None,
        after: Sequence[int] | None = None,
        start: int = 0,
        body_limit_bytes: int = 65536,
        sweep_seconds: float | None = None,
        timeout: float | None = None,
    ) -> ClaimedJobs:
        """Claim at most `limit` jobs of the relay, the lowest `seq` first; waits for no row, and many for a turn.

        `claimed_by` is the id of this relay instance, new at every start. `tenants` (default: the repository's own)
        take turns from `start`; `after` is a cursor for each, and without it the claim starts at zero. Bodies over
        `body_limit_bytes` come as `body_pending`: see `fetch_body`. `sweep_seconds`, between sweeps of this relay: with
        it the answer's `sweep_is_due` says whether `run_sweeps` has something to do. `timeout`: seconds for the
        statement, in place of the connection's own. Not idempotent: after a lost reply ask `claim_again` with the same
        `claim_id`.
        """
        _check_holder(relay_id, claimed_by)
        names = [self._tenant] if tenants is None else list(tenants)
        sent_at = time.monotonic()
        with mapped_errors():
            records = await self._conn.fetch(
                _CLAIM,
                relay_id,
                names,
                limit,
                claimed_by,
                claim_id or new_id(),
                _lease(lease_seconds),
                after,
                start,
                body_limit_bytes,
                CLAIMED_BODIES_BYTES,
                None if sweep_seconds is None else duration("sweep_seconds", sweep_seconds, MAX_TTL_SECONDS),
                timeout=timeout,
            )
        return read.claimed(records, relay_id, sent_at)

    async def claim_again(
        self,
        relay_id: str,
        *,
        claimed_by: str,
        claim_id: UUID,
        tenants: Sequence[str | None] | None = None,
        body_limit_bytes: int = 65536,
    ) -> ClaimedJobs:
        """Return the jobs that `claim_id` has taken and that are still its own. Idempotent: yes; changes nothing."""
        _check_holder(relay_id, claimed_by)
        names = [self._tenant] if tenants is None else list(tenants)
        sent_at = time.monotonic()
        with mapped_errors():
            records = await self._conn.fetch(
                _CLAIM_AGAIN, relay_id, names, claimed_by, claim_id, body_limit_bytes, CLAIMED_BODIES_BYTES
            )
        return read.claimed(records, relay_id, sent_at)

    async def fetch_body(self, job: DispatchJob, *, claimed_by: str) -> bool:
        """Fill in the body of a `body_pending` job; False when the claim is not the caller's any more."""
        with mapped_errors(job_id=job.job_id):
            record = await self._conn.fetchrow(
                _FETCH_BODY, job.relay_id, job.tenant_id, job.job_id, job.fence, claimed_by
            )
        if record is None:
            return False
        job.body, job.body_pending = record[0], False
        return True

    async def heartbeat(
        self,
        relay_id: str,
        claims: Sequence[tuple[str | None, UUID, int]],
        *,
        claimed_by: str,
        lease_seconds: float = 30.0,
    ) -> list[WriteOutcome]:
        """Renew the lease of each (tenant, job id, fence); the outcomes come in the same order.

        `stale`: the claim is lost, stop the handler. `busy`: somebody has the row locked this moment.
        """
        _check_holder(relay_id, claimed_by)
        if not claims:
            await self._require_tenant()
            return []
        with mapped_errors():
            records = await self._conn.fetch(
                _HEARTBEAT,
                relay_id,
                claimed_by,
                [self._tenant if claim[0] is None else claim[0] for claim in claims],
                [claim[1] for claim in claims],
                [claim[2] for claim in claims],
                _lease(lease_seconds),
            )
        outcomes = [WriteOutcome.STALE] * len(claims)
        for record in records:
            outcomes[record[0] - 1] = read.OUTCOMES[record[1]]
        return outcomes

    async def complete(
        self,
        job_id: UUID,
        relay_id: str,
        fence: int,
        claimed_by: str,
        status: Literal["succeeded", "failed"] | DispatchStatus = "succeeded",
        response_status: int | None = None,
        response_headers: Headers | None = None,
        response_body: bytes | str | None = None,
        error_code: str | None = None,
        error_message: str | None = None,
    ) -> int:
        """End a claimed job: 1 if this call did it, else 0.

        0 means: unknown, another tenant's or relay's, not claimed, not this claim, completed before, or past its
        deadline. Idempotent: by (job id, fence, claimed_by). Raises: InvalidHeadersError, InvalidResultError,
        InvalidInputError, before any SQL.
        """
        body: bytes | None = None
        if response_body is not None:
            try:
                body = codec.encode_body(response_body, max_bytes=MAX_BODY_BYTES)
            except InvalidBodyError as error:
                raise InvalidResultError(str(error).replace("max_body_bytes", "max_result_bytes")) from None
        completion = Completion(
            job_id,
            fence,
            self._tenant,
            str(status),
            response_status,
            response_headers,
            body,
            error_code,
            error_message,
        )
        settled = await self.complete_many(relay_id, [completion], claimed_by=claimed_by)
        return 1 if settled[0].outcome is WriteOutcome.APPLIED else 0

    async def complete_many(
        self,
        relay_id: str,
        completions: Sequence[Completion],
        *,
        claimed_by: str,
        notify: bool = False,
        timeout: float | None = None,
    ) -> list[Settled]:
        """End claimed jobs in one statement; what became of each comes in the same order.

        `notify` rings the tenants' gateways in the same transaction for the jobs that it ends: see `ring_inside` for
        when not to. `timeout`: seconds for the statement, in place of the connection's own.
        Idempotent: a completion that an earlier call applied reads `repeated`. One past its deadline reads `stale` with
        status `expired`. Raises: InvalidHeadersError, InvalidResultError, before any SQL.
        """
        _check_holder(relay_id, claimed_by)
        if not completions:
            await self._require_tenant()
            return []
        columns, places = read.completion_columns(completions, self._tenant)
        with mapped_errors(job_id=completions[0].job_id if len(completions) == 1 else None):
            records = await self._conn.fetch(
                _COMPLETE, relay_id, claimed_by, *columns, len(completions), notify, timeout=timeout
            )
        return read.settled_together(records, len(completions), places)

    async def retry(self, relay_id: str, items: Sequence[PutBack], *, claimed_by: str) -> list[Settled]:
        """Put claimed jobs back, to run again after their delay; or end them where that cannot be.

        Status `pending`: it will run again. `failed`: no attempt was left, or the delay reaches past the deadline.
        `expired`: the deadline has passed. Idempotent: no; after a lost reply the second call may read `stale`.
        """
        _check_holder(relay_id, claimed_by)
        if not items:
            await self._require_tenant()
            return []
        with mapped_errors():
            records = await self._conn.fetch(
                _RETRY,
                relay_id,
                claimed_by,
                [self._tenant if item.tenant_id is None else item.tenant_id for item in items],
                [item.job_id for item in items],
                [item.fence for item in items],
                [duration("delay", item.delay, MAX_TTL_SECONDS) for item in items],
                [item.give_back for item in items],
                [codec.sanitize(item.error_code, 200) for item in items],
                [
                    None if item.error_message is None else codec.sanitize(item.error_message, read.MAX_ERROR_BYTES)
                    for item in items
                ],
            )
        return read.settled(records, len(items))

    async def release(
        self, relay_id: str, claims: Sequence[tuple[str | None, UUID, int, bool]], *, claimed_by: str
    ) -> list[Settled]:
        """Give claimed jobs up, each (tenant, job id, fence, started): for a relay that stops.

        Not started: the attempt is given back and the job is pending at once. Started: pending at once while attempts
        remain, else `failed`, `S2R-RELAY-STOPPED`. Idempotent: no, as `retry`.
        """
        _check_holder(relay_id, claimed_by)
        if not claims:
            await self._require_tenant()
            return []
        with mapped_errors():
            records = await self._conn.fetch(
                _RELEASE,
                relay_id,
                claimed_by,
                [self._tenant if claim[0] is None else claim[0] for claim in claims],
                [claim[1] for claim in claims],
                [claim[2] for claim in claims],
                [claim[3] for claim in claims],
            )
        return read.settled(records, len(claims))

    async def reclaim(
        self,
        relay_id: str | None = None,
        *,
        lease_seconds: float = 30.0,
        limit: int = 500,
        tenants: Sequence[str | None] | None = None,
    ) -> list[EndedJob]:
        """Take back claims whose lease has run out: pending again while attempts remain, else `failed`,
        `S2R-LEASE-LOST`.

        Takes nothing before this connection is `lease_seconds` old: after a restart the holders get one lease to come
        back. `relay_id` None: of all relays, for a login that is bound to all.
        """
        if relay_id is not None:
            codec.check_name("relay_id", relay_id)
        names = [self._tenant] if tenants is None else list(tenants)
        with mapped_errors():
            records = await self._conn.fetch(_RECLAIM, relay_id, names, limit, _lease(lease_seconds))
        return [EndedJob(record[0], record[1], record[2], read.STATUSES[record[3]]) for record in records]

    # --- both -----------------------------------------------------------------------------------------------------

    async def run_sweeps(
        self,
        relay_id: str | None = None,
        *,
        lease_seconds: float = 30.0,
        keep_seconds: float | None = None,
        limit: int = 500,
        every_seconds: tuple[float, float, float, float] = (5.0, 5.0, 2.0, 60.0),
    ) -> list[EndedJob]:
        """Do whatever sweeps are due for this login, over all its tenants; return the jobs that ended or went back.

        `every_seconds`: the intervals of expire, lease, promote and purge. `keep_seconds` None: nothing is purged.
        """
        with mapped_errors():
            records = await self._conn.fetch(
                _SWEEP,
                relay_id,
                limit,
                _lease(lease_seconds),
                None if keep_seconds is None else duration("keep_seconds", keep_seconds, _MAX_KEEP_SECONDS),
                [duration("every_seconds", seconds, MAX_TTL_SECONDS) for seconds in every_seconds],
            )
        return [
            EndedJob(record[1], record[2], record[3], read.STATUSES[record[4]])
            for record in records
            if record[3] is not None
        ]

    async def channel(self, kind: Literal["wake", "result"], relay_id: str | None = None) -> str:
        """Return the channel to LISTEN on. Raises: TenancyDeniedError for a login that may not."""
        if relay_id is not None:
            codec.check_name("relay_id", relay_id)
        with mapped_errors():
            name = await self._conn.fetchval(_CHANNEL, kind, self._tenant, relay_id)
        return str(name)

    async def now(self) -> datetime:
        """Return the database's clock at this moment, aware. Raises: TenancyUnboundError, as every method does."""
        with mapped_errors():
            value = await self._conn.fetchval(_NOW_BOUND if self._tenant is None else _NOW)
        assert isinstance(value, datetime)
        return value

    async def _require_tenant(self) -> None:
        """Raise where no tenant is bound, also for a call that has nothing to do."""
        if self._tenant is None:
            with mapped_errors():
                await self._conn.fetchval(_BOUND)


def _check_holder(relay_id: object, claimed_by: object) -> None:
    codec.check_name("relay_id", relay_id)
    codec.check_name("claimed_by", claimed_by)


def _lease(seconds: float) -> timedelta:
    lease = duration("lease_seconds", seconds, MAX_TTL_SECONDS)
    if not lease:
        raise InvalidDeadlineError("lease_seconds must be positive")
    return lease
