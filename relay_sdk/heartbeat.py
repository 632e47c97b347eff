"""Renew the leases of jobs that take long, and learn from it which ones are lost.

Only jobs whose last renewal (or claim) is a third of the lease ago are asked for, many in one statement, so a job that
is quickly done costs none. Jobs whose end is on its way are renewed too: over an outage they are as dear as the others.

    applied   renewed            busy    somebody has the row locked this moment: ask again soon
    stale     the claim is lost (withdrawn, expired, taken back): its handler is cancelled and nothing more is written

A handler that keeps the event loop from running keeps this from running too. Its lease may then be lost, another relay
may run the job, and what this one writes afterwards is refused: a lease once taken back is never renewed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final
from uuid import UUID

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.database import Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import DatabaseError, TenancyError
from dispatch_core.models import WriteOutcome
from relay_sdk.metrics import RelayMetrics
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import ENDED, Cause, Slot, Slots

__all__ = ["Heartbeat"]

logger = logging.getLogger(__name__)

_BATCH: Final = 500
_BUSY_SECONDS: Final = 0.1


class Heartbeat:
    """Keep the leases of a relay's jobs."""

    def __init__(
        self,
        relay_id: str,
        instance_id: str,
        *,
        settings: RelaySettings,
        database: Database,
        slots: Slots,
        cancel: Callable[[Slot, Cause], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take `cancel(slot, cause)`, which is called for each job that is lost."""
        self._relay_id = relay_id
        self._instance_id = instance_id
        self._lease_seconds = settings.lease_seconds
        self._interval = settings.heartbeat_interval_seconds
        # Looked at four times an interval: a renewal is late by a quarter of it at most.
        self._tick = max(self._interval / 4, 0.02)
        self._patience = settings.patience_seconds
        self._database = database
        self._slots = slots
        self._cancel = cancel
        self._metrics = metrics
        self._asked: set[UUID] = set()
        self._wakeup = anyio.Event()
        self.last_error: Exception | None = None
        """Why the last heartbeat failed; None after one that did not."""

    def ask(self, job_ids: Iterable[UUID]) -> None:
        """Find out at once whether these are still ours; those not in hand do not matter."""
        self._asked.update(job_ids)
        self._wakeup.set()

    async def run(self) -> None:
        """Renew for ever."""
        backoff = Backoff(0.1, min(2.0, self._interval))
        wait = self._tick
        while True:
            with anyio.move_on_after(wait):
                await self._wakeup.wait()
            self._wakeup = anyio.Event()
            wait = self._tick
            now = time.monotonic()
            asked, self._asked = self._asked, set()
            due = [
                slot
                for slot in self._slots
                if (slot.renewed_at + self._interval <= now or (asked and slot.job.job_id in asked))
                # Settled already, and only its thread still runs.
                and (slot.state is not ENDED or slot.end is not None)
            ]
            failed: Exception | None = None
            for start in range(0, len(due), _BATCH):
                try:
                    busy = await self._renew_apart(due[start : start + _BATCH])
                except TenancyError as error:
                    failed = error  # one tenant's; the leases of the others are renewed all the same
                    continue
                except DatabaseError as error:
                    failed = error
                    break
                if busy:
                    self._asked |= busy
                    wait = min(wait, _BUSY_SECONDS)
            if failed is not None:
                if self.last_error is None:
                    logger.warning("leases of relay %s cannot be renewed, tried again: %s", self._relay_id, failed)
                self._asked |= asked
                wait = min(wait, backoff.next())
            elif due:
                backoff.reset()
            if due:
                self.last_error = failed

    async def _renew_apart(self, slots: list[Slot]) -> set[UUID]:
        """Renew them together; or each tenant's by themselves, where one of the tenants is denied."""
        try:
            return await self._renew(slots)
        except TenancyError as error:
            denied = error
        by_tenant: dict[str, list[Slot]] = {}
        for slot in slots:
            by_tenant.setdefault(slot.job.tenant_id, []).append(slot)
        if len(by_tenant) > 1:
            for part in by_tenant.values():
                try:
                    self._asked |= await self._renew(part)
                except TenancyError as error:
                    denied = error
        raise denied

    async def _renew(self, slots: list[Slot]) -> set[UUID]:
        """Renew these leases; return those whose row was locked."""
        # Some may have been settled while the batch before this one was under way.
        slots = [slot for slot in slots if slot in self._slots]
        if not slots:
            return set()
        sent_at = time.monotonic()
        async with self._database.connection() as conn:
            with anyio.fail_after(self._patience):
                outcomes = await RelayDispatchRepository(conn).heartbeat(
                    self._relay_id,
                    [(slot.job.tenant_id, slot.job.job_id, slot.job.fence) for slot in slots],
                    claimed_by=self._instance_id,
                    lease_seconds=self._lease_seconds,
                )
        self._metrics.heartbeats += 1
        busy: set[UUID] = set()
        for slot, outcome in zip(slots, outcomes, strict=True):
            if outcome is WriteOutcome.APPLIED:
                slot.renewed_at = sent_at
                self._metrics.leases_renewed += 1
            elif outcome is WriteOutcome.BUSY:
                busy.add(slot.job.job_id)
            elif slot.state is not ENDED and slot.cause is not Cause.LOST:
                # Of one that has ended its own write tells; it may just have been applied.
                logger.warning("job %s is not this relay's any more: its handler is cancelled", slot.job.job_id)
                self._cancel(slot, Cause.LOST)
        return busy
