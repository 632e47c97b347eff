"""The verbs of a gateway, for one tenant.

What can be wrong with arguments is found before any SQL. Concurrent calls share statements (`lanes`). Job ids are made
here before the first try, so that an enqueue whose reply was lost is made again with the same rows and stored once, and
every error that leaves open what became of a job carries its id.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import anyio

from dispatch_core import codec
from dispatch_core.codec import UNSET, Headers
from dispatch_core.database import Connection, in_transaction, mapped_errors
from dispatch_core.dispatch import EnqueueRow, RelayDispatchRepository
from dispatch_core.dispatch_bounded import Bound, checked_bound
from dispatch_core.errors import (
    DatabaseError,
    DatabaseUnavailableError,
    InvalidDeadlineError,
    InvalidInputError,
    MalformedHeadersError,
    TenancyUnboundError,
)
from dispatch_core.models import DispatchRequest, DispatchResult
from gateway_sdk.direct import Load
from gateway_sdk.durable import DurableJobs
from gateway_sdk.lane_enqueue import EnqueueItem
from gateway_sdk.lane_expire import Withdrawal
from gateway_sdk.lane_poll import Look
from gateway_sdk.runtime import Runtime
from gateway_sdk.waits import Outcome, Polled, Wait

__all__ = ["TenantClient"]


class TenantClient:
    """What one tenant can do; made by `GatewayClient.tenant`, cheap, and good as long as that client is open."""

    __slots__ = ("_max_pending", "_runtime", "_tenant")

    def __init__(self, runtime: Runtime, tenant: str, max_pending: int | None = None) -> None:
        if not tenant:
            raise TenancyUnboundError("a tenant must be named")
        self._runtime = runtime
        self._tenant = codec.check_name("tenant", tenant)
        self._max_pending = runtime.settings.max_pending if max_pending is None else checked_bound(max_pending)

    @property
    def tenant_id(self) -> str:
        return self._tenant

    @property
    def durable(self) -> DurableJobs:
        """The verbs for durable jobs; nothing is asked of the database before the first."""
        return self._runtime.durable.for_tenant(self._tenant)

    # --- giving work ----------------------------------------------------------------------------------------------

    async def enqueue(
        self,
        relay_id: str,
        operation: str,
        headers: Headers | None = None,
        body: bytes | bytearray | memoryview | str | None = None,
        *,
        json: Any = UNSET,
        ttl: float | timedelta | None = None,
        expires_at: datetime | None = None,
        delay: float | timedelta | None = None,
        max_attempts: int = 1,
        idempotency_key: str | None = None,
        max_pending: int | None = None,
        notify: bool = True,
        conn: Connection | None = None,
    ) -> UUID:
        """Store a job for a relay, wake the relay, and return the job's id.

        `ttl` and `delay` are seconds; `ttl` or an aware `expires_at`, not both. `max_attempts` is how often a handler
        may start. `max_pending`: refuse the job where so many of this tenant's wait for the relay; None is what the
        client or its settings say, 0 no bound. `notify=False`: the relay finds the job when it polls next.

        Transaction: its own, shared with concurrent calls; or joins that of `conn`, and the relay is then woken by its
        commit. Idempotent: by `idempotency_key`, where given: the same request gets the same id.

        Raises: InvalidInputError and its kind before any SQL; IdempotencyConflictError; BacklogFullError, after which
        nothing is stored and a transaction of `conn` goes on; DatabaseUnavailableError and DatabaseBusyError, both
        retryable and with the job's id.
        """
        bound = self._bound(max_pending)
        row = self._runtime.preparer.row(
            DispatchRequest(
                relay_id,
                operation,
                headers=headers,
                body=body,
                json=json,
                ttl=ttl,
                expires_at=expires_at,
                delay=delay,
                max_attempts=max_attempts,
                idempotency_key=idempotency_key,
            )
        )
        if conn is not None:
            return await self._enqueue_in(conn, row, notify, bound)
        give_up_at = self._give_up_at()
        if row.idempotency_key is not None:
            return await self._enqueue_keyed(row, notify, give_up_at, bound)
        if bound:
            self._runtime.lanes.backlogs.check(self._tenant, relay_id, bound)
        with self._runtime.under_way(row.job_id):
            item = EnqueueItem(row, notify, give_up_at, bound)
            item.sink = stored = self._runtime.lanes.enqueue[self._tenant].submit(item, row.size)
            await stored
        return row.job_id

    async def enqueue_many(
        self,
        requests: Iterable[DispatchRequest],
        *,
        max_pending: int | None = None,
        notify: bool = True,
        conn: Connection | None = None,
    ) -> list[UUID]:
        """Store all the jobs or none; the ids come in the order of the requests.

        `max_pending`: as in `enqueue`, for each relay: where there is no room for all of its jobs, none is stored.

        Takes no idempotency keys: each may have to wait for another transaction, and would hold up the rest. Many go in
        several statements of one transaction, the first ones while the last ones are still being checked: what is wrong
        with a request may be found when others were sent, and then nothing is stored.

        Transaction: its own; or joins that of `conn`. Raises: as `enqueue`.
        """
        # A generator is read first: no transaction is open while foreign code runs.
        # And a list is copied: the caller's own may change while the first ones are sent.
        given = list(requests)
        if not given:
            return []
        bound = self._bound(max_pending)
        load = Load(self._runtime.preparer, given, self._runtime.settings.enqueue_batch_bytes, bound)
        if conn is not None:
            while not load.is_whole:
                await load.prepare_chunk()
            repository = RelayDispatchRepository(conn, self._tenant)
            # Several statements are one transaction also where the caller has begun none.
            # And where a later one may be refused, the earlier ones are taken back, and the caller's goes on.
            own = len(load.chunks) > 1 and (bound > 0 or not in_transaction(conn))
            with mapped_errors():
                async with conn.transaction() if own else contextlib.nullcontext():
                    for number in range(len(load.chunks)):
                        await load.store(repository, number, notify=notify)
            return [row.job_id for row in load.rows]
        for relay_id, jobs in load.jobs.items():
            self._runtime.lanes.backlogs.check(self._tenant, relay_id, bound, jobs)
        with self._runtime.under_way():
            statements = await self._runtime.direct.enqueue_many(self._tenant, load, self._give_up_at())
        rows = load.rows
        self._runtime.counters.enqueued += len(rows)
        self._runtime.counters.enqueue_statements += statements
        if notify:
            for relay_id in {row.relay_id for row in rows}:
                self._runtime.doorbell.ring_relay(self._tenant, relay_id)
        return [row.job_id for row in rows]

    async def call(
        self,
        relay_id: str,
        operation: str,
        headers: Headers | None = None,
        body: bytes | bytearray | memoryview | str | None = None,
        *,
        json: Any = UNSET,
        timeout: float | timedelta | None = None,
        ttl: float | timedelta | None = None,
        expires_at: datetime | None = None,
        delay: float | timedelta | None = None,
        max_attempts: int = 1,
        idempotency_key: str | None = None,
        max_pending: int | None = None,
    ) -> DispatchResult:
        """Enqueue a job and wait for its result, at most `timeout` seconds.

        `timeout` is the job's ttl too, unless that or `expires_at` is given; where they reach further, the job goes on
        after the timeout. A result that is `failed` or `expired` is returned, not raised.

        Raises: as `enqueue` and `wait`; every error after the enqueue carries the job's id.
        """
        started_at = time.monotonic()
        seconds = _timeout(timeout)
        bound = self._bound(max_pending)
        if ttl is None and expires_at is None and seconds is not None:
            ttl = seconds
        row = self._runtime.preparer.row(
            DispatchRequest(
                relay_id,
                operation,
                headers=headers,
                body=body,
                json=json,
                ttl=ttl,
                expires_at=expires_at,
                delay=delay,
                max_attempts=max_attempts,
                idempotency_key=idempotency_key,
            )
        )
        # No later than anybody would care for the job.
        lifetime = None if row.ttl is None else row.ttl.total_seconds()
        give_up_at = started_at + min(
            self._runtime.settings.write_timeout_seconds,
            math.inf if seconds is None else seconds,
            math.inf if lifetime is None else lifetime,
        )
        if row.idempotency_key is not None:
            job_id = await self._enqueue_keyed(row, True, give_up_at, bound)
            return await self.wait(
                job_id, None if seconds is None else max(0.0, started_at + seconds - time.monotonic())
            )

        if bound:
            self._runtime.lanes.backlogs.check(self._tenant, relay_id, bound)
        # The wait is registered first and the enqueue reports to it: one future for both, and no result can be missed.
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        wait = self._runtime.waiter.add(
            self._tenant,
            row.job_id,
            future,
            timeout=seconds,
            storing=True,
            deadline=None if lifetime is None else started_at + lifetime,
            ends_first=seconds is not None and lifetime is not None and seconds <= lifetime,
        )
        try:
            item = EnqueueItem(row, True, give_up_at, bound)
            item.sink = wait
            self._runtime.lanes.enqueue[self._tenant].put_nowait(item, row.size, wait)
            # What is sent is nobody's once it is stored: thousands of calls wait here at once.
            del item, row
            return _value(await future)
        finally:
            wait.close()

    # --- asking for results ---------------------------------------------------------------------------------------

    async def wait(self, job_id: UUID, timeout: float | timedelta | None = None) -> DispatchResult:
        """Return the job's result as soon as it exists: within `timeout` seconds, or by the job's deadline.

        A job that reaches its deadline meanwhile is marked expired, and that result returned. A job whose enqueue is
        not committed yet is unknown. With a timeout of 0 the database is asked once.

        Raises: WaitTimeoutError (the job goes on), UnknownJobError, MalformedHeadersError, DatabaseUnavailableError
        (retryable) where the database could not be asked how the job ended; all with the job's id.
        """
        seconds = _timeout(timeout)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        wait = self._runtime.waiter.add(self._tenant, _job_id(job_id), future, timeout=seconds)
        try:
            return _value(await future)
        finally:
            wait.close()

    async def as_completed(
        self, job_ids: Iterable[UUID], timeout: float | timedelta | None = None
    ) -> AsyncIterator[DispatchResult]:
        """Yield the results of jobs in the order in which they end; each job ends by its own deadline at the latest.

        `timeout` seconds are for all of them together.

        Raises: as `wait`, for the first job of which there is no result.
        """
        ids = list(dict.fromkeys(_job_id(job_id) for job_id in job_ids))
        seconds = _timeout(timeout)
        until = None if seconds is None else time.monotonic() + seconds
        ended: deque[Outcome] = deque()
        bell = anyio.Event()

        def deliver(outcome: Outcome) -> None:
            ended.append(outcome)
            bell.set()

        waits: list[Wait] = []
        try:
            for job_id in ids:
                left = None if until is None else max(0.0, until - time.monotonic())
                waits.append(self._runtime.waiter.add(self._tenant, job_id, deliver, timeout=left))
            for _ in ids:
                while not ended:
                    await bell.wait()
                    bell = anyio.Event()
                yield _value(ended.popleft())
        finally:
            for wait in waits:
                wait.close()

    async def poll_status(self, job_id: UUID) -> DispatchResult | None:
        """Return where a job stands; None for an id that is unknown or another tenant's. Changes nothing.

        Raises: MalformedHeadersError, DatabaseUnavailableError.
        """
        wanted = _job_id(job_id)
        with self._runtime.under_way(wanted):
            polled: Polled = None
            while polled is None:
                look = Look(wanted)
                self._runtime.lanes.poll[self._tenant].put(look, 0)
                polled = await look.answer
        return polled[0] if isinstance(polled, tuple) else polled

    async def poll_many(self, job_ids: Iterable[UUID]) -> dict[UUID, DispatchResult | MalformedHeadersError]:
        """Return where each known job stands; unknown ids are missing. Changes nothing.

        A job whose stored response headers are malformed has the error as its answer.
        """
        ids = list(dict.fromkeys(_job_id(job_id) for job_id in job_ids))
        with self._runtime.under_way():
            return await self._runtime.direct.poll_many(self._tenant, ids)

    # --- withdrawing ----------------------------------------------------------------------------------------------

    async def mark_expired(self, job_id: UUID) -> int:
        """Withdraw a job: 1 if it was pending or claimed and is now `expired`, else 0.

        Does not look at the clock. A handler that is at work on it is told at once. Idempotent: yes; the second call
        returns 0, and so may one that follows an error.
        """
        item = Withdrawal(_job_id(job_id), self._give_up_at())
        with self._runtime.under_way(item.job_id):
            with anyio.move_on_after(self._runtime.settings.write_timeout_seconds):
                return await self._runtime.lanes.expire[self._tenant].submit(item)
            raise DatabaseUnavailableError("not withdrawn in time; whether the job was is unknown")

    # --- pieces ---------------------------------------------------------------------------------------------------

    def _bound(self, max_pending: int | None) -> Bound:
        return self._max_pending if max_pending is None else checked_bound(max_pending)

    def _give_up_at(self) -> float:
        return time.monotonic() + self._runtime.settings.write_timeout_seconds

    async def _enqueue_in(self, conn: Connection, row: EnqueueRow, notify: bool, bound: Bound) -> UUID:
        repository = RelayDispatchRepository(conn, self._tenant)
        try:
            if row.idempotency_key is not None:
                timeout = self._runtime.settings.lock_timeout_seconds
                found = await repository.enqueue_keyed_row(
                    row, lock_timeout_seconds=timeout, max_pending=bound, notify=notify
                )
                return found[0]
            await repository.enqueue_all([row], max_pending=bound, notify=notify)
        except DatabaseError as error:
            error.job_id = row.job_id
            raise
        return row.job_id

    async def _enqueue_keyed(self, row: EnqueueRow, notify: bool, give_up_at: float, bound: Bound) -> UUID:
        with self._runtime.under_way(row.job_id):
            job_id, duplicate = await self._runtime.direct.enqueue_keyed(self._tenant, row, give_up_at, bound)
        self._runtime.counters.enqueued += not duplicate
        # A duplicate with our id is this very call: its first reply was lost.
        if notify and (not duplicate or job_id == row.job_id):
            self._runtime.doorbell.ring_relay(self._tenant, row.relay_id)
        return job_id


def _value(outcome: Outcome) -> DispatchResult:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _job_id(value: object) -> UUID:
    if isinstance(value, UUID):
        return value
    if isinstance(value, str):
        try:
            return UUID(value)
        except ValueError:
            pass
    raise InvalidInputError(f"a job id must be a UUID, not {codec.sanitize(repr(value), 100)}")


def _timeout(value: float | timedelta | None) -> float | None:
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    # Not a comparison with 0 first: it is false for NaN.
    if seconds.__class__ not in (int, float) or not seconds >= 0:
        raise InvalidDeadlineError(f"timeout must be seconds, not negative; not {value!r}")
    return None if seconds == math.inf else float(seconds)
