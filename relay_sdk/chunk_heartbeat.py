"""Renew the leases of the chunks in hand, all in one statement, and learn from it which are lost and which are to stop.

On a connection of its own, outside the pool: whatever handlers hold, leases go on. Chunks whose end is on its way are
renewed too, over an outage they are as dear as the others.

    applied   goes on; and where the job is paused, its handler is told
    busy      somebody has the row locked, mostly the handler's own transaction: asked again
    stale     cancelled, lost: the handler is told, and nothing more is written

A lease that is over by this machine's clock is not asked for. So when a handler has kept the event loop from running,
the late wake-up renews nothing, and the database would refuse it too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final
from uuid import UUID

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.database import Connection, Database, Lent, close_connection
from dispatch_core.durable_models import Heartbeaten, JobStatus
from dispatch_core.errors import ConfigurationError, ConnectionLostError, DatabaseError, TenancyError
from dispatch_core.models import WriteOutcome
from dispatch_core.settings import DurableJobsSettings
from relay_sdk.chunk_slots import ChunkSlot, ChunkSlots, StopReason
from relay_sdk.chunk_writes import verbs
from relay_sdk.metrics import RelayMetrics
from relay_sdk.slots import ENDED

__all__ = ["ChunkHeartbeat"]

logger = logging.getLogger(__name__)

_BATCH: Final = 1000
_BUSY_SECONDS: Final = 0.1


class ChunkHeartbeat:
    """Keep the leases of a relay's chunks."""

    def __init__(
        self,
        relay_id: str,
        *,
        settings: DurableJobsSettings,
        patience: float,
        database: Database,
        dsn: str | None,
        slots: ChunkSlots,
        tell: Callable[[ChunkSlot, StopReason], None],
        lost: Callable[[ChunkSlot], None],
        moved: Callable[[ChunkSlot], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take a DSN where the database is a pool of the caller's; and what is called for a chunk that is to stop, for
        one that is lost, and for one that is further.
        """
        self._relay_id = relay_id
        self._settings = settings
        self._lease = settings.lease_seconds
        self._interval = settings.heartbeat_interval_seconds
        # Looked at four times an interval: a renewal is late by a quarter of it at most.
        self._tick = max(self._interval / 4, 0.02)
        self._patience = min(patience, self._interval)
        self._line = _OwnConnection(database, dsn)
        self._slots = slots
        self._tell = tell
        self._lost = lost
        self._moved = moved
        self._metrics = metrics
        self._asked: set[UUID] = set()
        self._wakeup = anyio.Event()
        self.last_error: Exception | None = None
        """Why the last heartbeat failed; None after one that did not."""

    def ask(self, job_ids: Iterable[UUID]) -> None:
        """Find out at once how it is with the chunks of these jobs; those not in hand do not matter."""
        self._asked.update(job_ids)
        self._wakeup.set()

    def expect(self) -> None:
        """Open the connection if it is not: there are chunks in hand."""
        if not self._line.is_open:
            self._wakeup.set()

    async def run(self) -> None:
        """Renew until cancelled."""
        try:
            await self._run()
        finally:
            await self._line.close()

    async def _run(self) -> None:
        backoff = Backoff(0.1, min(2.0, self._interval))
        wait, busy_wait = self._tick, _BUSY_SECONDS
        while True:
            with anyio.move_on_after(wait):
                await self._wakeup.wait()
            self._wakeup = anyio.Event()
            wait = self._tick
            asked, self._asked = self._asked, set()
            due = self._due(asked)
            failed: Exception | None = None
            is_busy = False
            if not due:
                if len(self._slots) and not self._line.is_open:
                    failed = await self._open()
            else:
                for start in range(0, len(due), _BATCH):
                    try:
                        busy = await self._renew_apart(due[start : start + _BATCH])
                    except TenancyError as error:
                        failed = error  # one tenant's; the leases of the others are renewed all the same
                        continue
                    except DatabaseError as error:
                        failed = error
                        break
                    is_busy = is_busy or bool(busy)
                    self._asked |= busy
            if failed is not None:
                if self.last_error is None:
                    logger.warning("leases of chunks of relay %s cannot be renewed: %s", self._relay_id, failed)
                self._asked |= asked
                wait = min(wait, backoff.next())
                self.last_error = failed
            elif due or not len(self._slots):
                backoff.reset()
                self.last_error = None
            if is_busy:
                # Soon, and then ever later: it may be a long transaction of the handler's on a connection of its own.
                wait = min(wait, busy_wait)
                busy_wait = min(2 * busy_wait, self._tick)
            else:
                busy_wait = _BUSY_SECONDS

    def _due(self, asked: set[UUID]) -> list[ChunkSlot]:
        """Return the chunks to ask for: where one is due, all that were not renewed for half an interval."""
        now = time.monotonic()
        live = []
        is_due = False
        for slot in list(self._slots):
            if slot.settled_last is not None or (slot.stop is not None and slot.stop.is_final):
                continue
            if slot.state is ENDED:
                if slot.end is None:
                    continue
            elif now >= slot.lost_at:
                if slot.may_be_lost:
                    self._lost(slot)
                continue
            is_asked = bool(asked) and slot.lease.job_id in asked
            is_due = is_due or is_asked or slot.renewed_at + self._interval <= now
            if is_asked or slot.renewed_at + self._interval / 2 <= now:
                live.append(slot)
        return live if is_due else []

    async def _renew_apart(self, slots: list[ChunkSlot]) -> set[UUID]:
        """Renew them together; or each tenant's by themselves, where one of the tenants is denied."""
        try:
            return await self._renew(slots)
        except TenancyError as error:
            denied = error
        by_tenant: dict[str, list[ChunkSlot]] = {}
        for slot in slots:
            by_tenant.setdefault(slot.lease.tenant_id, []).append(slot)
        if len(by_tenant) > 1:
            for part in by_tenant.values():
                try:
                    self._asked |= await self._renew(part)
                except TenancyError as error:
                    denied = error
        raise denied

    async def _renew(self, slots: list[ChunkSlot]) -> set[UUID]:
        """Renew these leases; return the jobs of those whose row was locked."""
        # Some may have been settled while the batch before this one was under way.
        slots = [slot for slot in slots if slot in self._slots]
        if not slots:
            return set()
        rows = [slot.rows_done for slot in slots]
        told = [slot.rows_told for slot in slots]
        sent_at = time.monotonic()
        answers = await self._ask(slots, None if rows == told else rows)
        self._metrics.chunk_heartbeats += 1
        busy: set[UUID] = set()
        for slot, count, before, answer in zip(slots, rows, told, answers, strict=True):
            if answer.outcome is WriteOutcome.APPLIED:
                self._metrics.chunk_leases_renewed += 1
                slot.renewed(sent_at, self._lease)
                if count != before:
                    slot.rows_told = count
                    self._moved(slot)
                if answer.job_status is JobStatus.PAUSED:
                    self._tell(slot, StopReason.PAUSED)
            elif answer.outcome is WriteOutcome.BUSY:
                if answer.job_status is JobStatus.PAUSED:
                    self._tell(slot, StopReason.PAUSED)
                if slot.context is None or slot.context.open_transaction is None:
                    busy.add(slot.lease.job_id)
            elif slot.may_be_lost:
                # Of one that has ended its own write tells; it may just have been applied.
                if answer.job_status is JobStatus.CANCELLED:
                    self._tell(slot, StopReason.CANCELLED)
                else:
                    self._lost(slot)
        return busy

    async def _ask(self, slots: Sequence[ChunkSlot], rows: list[int] | None) -> list[Heartbeaten]:
        with anyio.move_on_after(self._patience):
            conn = await self._line.get()
            try:
                return await verbs(conn, self._settings).heartbeat(
                    [slot.lease for slot in slots], lease_seconds=self._lease, rows_done=rows
                )
            except (TenancyError, DatabaseError) as error:
                if not isinstance(error, TenancyError):
                    await self._line.drop()
                raise
        await self._line.drop()
        raise ConnectionLostError("PostgreSQL did not answer a heartbeat in time")

    async def _open(self) -> Exception | None:
        with anyio.move_on_after(self._patience):
            try:
                await self._line.get()
                return None
            except DatabaseError as error:
                return error
        return ConnectionLostError("PostgreSQL could not be reached in time")


class _OwnConnection:
    """A connection that nobody else uses, opened when first asked for; of the caller's pool where there is no DSN."""

    def __init__(self, database: Database, dsn: str | None) -> None:
        self._database = database
        self._dsn = dsn
        self._conn: Connection | None = None
        self._lent: Lent | None = None

    @property
    def is_open(self) -> bool:
        return self._conn is not None and not self._conn.is_closed()

    async def get(self) -> Connection:
        """Return it. Raises: DatabaseError."""
        if self._conn is not None and not self._conn.is_closed():
            return self._conn
        await self.drop()
        try:
            self._conn = await self._database.connect_dedicated("heartbeat", dsn=self._dsn)
        except ConfigurationError:
            lent = self._database.connection()
            self._conn, self._lent = await lent.__aenter__(), lent
        return self._conn

    async def drop(self) -> None:
        """End it without a good-bye: it has not answered."""
        conn, lent, self._conn, self._lent = self._conn, self._lent, None, None
        if lent is not None:
            error: Any = ConnectionLostError("the heartbeat's connection is given up")
            await lent.__aexit__(type(error), error, None)
        elif conn is not None:
            conn.terminate()

    async def close(self) -> None:
        """Close it."""
        conn, lent, self._conn, self._lent = self._conn, self._lent, None, None
        if lent is not None:
            await lent.__aexit__(None, None, None)
        elif conn is not None:
            await close_connection(conn, 0.2)
