"""The verbs of those who want work done: to store jobs, to look at them, to take them back.

See `RelayDispatchRepository`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from dispatch_core import codec
from dispatch_core import dispatch_rows as read
from dispatch_core.database import mapped_errors
from dispatch_core.dispatch_bounded import (
    Bounded,
    checked_bound,
    enqueue_bounded,
    enqueue_keyed_bounded,
    raise_if_refused,
)
from dispatch_core.dispatch_calls import Calls, keep
from dispatch_core.errors import IdempotencyConflictError, InvalidInputError, MalformedHeadersError
from dispatch_core.models import DispatchRequest, DispatchResult, DispatchStatus, EndedJob, Headers
from dispatch_core.requests import EnqueueRow, Preparer, columns, prepare, uuid_array

__all__ = ["AskingVerbs"]

_ENQUEUE: Final = "select relay.enqueue($1, $2::text::uuid[], $3, $4, $5, $6, $7, $8, $9, $10, $11)"
_ENQUEUE_KEYED: Final = (
    "select job_id, duplicate from relay.enqueue_keyed($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
)
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
_PURGE: Final = "select relay.purge($1, $2, $3)"


class AskingVerbs(Calls):
    """To enqueue, poll, withdraw and list."""

    __slots__ = ()

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
            count = await self._conn.fetchval(_PURGE, self._tenant, keep(keep_seconds), limit)
        return int(count)
