"""The verbs of those who do the work: to claim jobs, and to say what came of them. See `RelayDispatchRepository`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Literal
from uuid import UUID

from dispatch_core import codec
from dispatch_core import dispatch_rows as read
from dispatch_core.database import mapped_errors
from dispatch_core.dispatch_calls import Calls, lease
from dispatch_core.errors import InvalidBodyError, InvalidResultError
from dispatch_core.ids import new_id
from dispatch_core.models import (
    ClaimedJobs,
    Completion,
    DispatchJob,
    DispatchStatus,
    EndedJob,
    Headers,
    PutBack,
    Settled,
    WriteOutcome,
)
from dispatch_core.requests import MAX_BODY_BYTES, MAX_TTL_SECONDS, duration

__all__ = ["CLAIMED_BODIES_BYTES", "WorkingVerbs"]

CLAIMED_BODIES_BYTES: Final = 4 * 1024 * 1024
"""What the bodies of a tenant in one claim may come to; those behind have to be fetched."""

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


class WorkingVerbs(Calls):
    """To claim, renew, complete and put back."""

    __slots__ = ()

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
                lease(lease_seconds),
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
                lease(lease_seconds),
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
            records = await self._conn.fetch(_RECLAIM, relay_id, names, limit, lease(lease_seconds))
        return [EndedJob(record[0], record[1], record[2], read.STATUSES[record[3]]) for record in records]


def _check_holder(relay_id: object, claimed_by: object) -> None:
    codec.check_name("relay_id", relay_id)
    codec.check_name("claimed_by", claimed_by)
