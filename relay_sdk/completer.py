"""Write how jobs ended, in batches, until the database has told what became of each.

While one batch is on its way the next gathers (`Batcher`), with no future and no task per job. What is written is
fenced, so it can be written again: after a lost connection, or through an outage of any length, each batch is sent
until it is answered. A completion that was applied although its reply was lost is then answered `repeated`.

    applied, repeated   it is as the handler said              slot freed, gateways rung
    stale               withdrawn, expired, taken by another   slot freed, nothing more is written
    refused             the row cannot be stored               once more as `failed`, S2R-RESULT-INVALID
    not allowed         no right to it just now, or no schema  the same again, until the database has an answer
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final
from uuid import UUID

import anyio
from anyio.abc import TaskStatus

from dispatch_core.backoff import Backoff
from dispatch_core.batcher import Batcher
from dispatch_core.database import Database
from dispatch_core.dispatch import CLAIMED_BODIES_BYTES, RelayDispatchRepository
from dispatch_core.dispatch_rows import SUCCEEDED
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    RelayDispatchError,
    SchemaMismatchError,
    TenancyError,
)
from dispatch_core.models import Completion, DispatchStatus, PutBack, Settled, WriteOutcome
from dispatch_core.ring_inside import RingInside
from relay_sdk.ends import Ends, Refused, Released
from relay_sdk.metrics import RelayMetrics
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import Slot

__all__ = ["Completer"]

logger = logging.getLogger(__name__)

_ROW_BYTES: Final = 300
"""What a row of a batch has on the wire, but for headers, body and message."""

_BATCH_BYTES: Final = 2 * CLAIMED_BODIES_BYTES
"""So that replies as large as what a claim brings fit in one batch: the last would have a batch of its own, and then a
claim of its own."""

_COMPLETERS: Final = 3
"""Batches under way at once: one is applied while the next one is read; and of large replies each waits long for the
disk."""


class Completer:
    """Take ended jobs, write them, and tell when they are settled."""

    def __init__(
        self,
        relay_id: str,
        instance_id: str,
        *,
        settings: RelaySettings,
        database: Database,
        doorbell: Doorbell,
        ring_inside: RingInside,
        ends: Ends,
        settled: Callable[[Sequence[Slot]], None],
        put_back: Callable[[str, float], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take `settled(slots)`, and `put_back(tenant, seconds)` for a job that is to run again."""
        self._relay_id = relay_id
        self._instance_id = instance_id
        self._database = database
        self._doorbell = doorbell
        self._ring_inside = ring_inside
        self._ends = ends
        self._settled = settled
        self._put_back = put_back
        self._metrics = metrics
        self._patience = settings.patience_seconds
        self._closed = False
        # Ends that were refused for no fault of theirs, in hand until answered; and those that wait for their turn.
        self._held: set[Slot] = set()
        self._waiting: list[Slot] = []
        self._hold_backoff = Backoff(0.1, min(2.0, settings.lease_seconds / 10))
        new = partial(
            Batcher[Slot, Settled],
            max_items=settings.complete_batch,
            max_bytes=_BATCH_BYTES,
            idempotent=True,
            retries=None,
            backoff_base=0.05,
            backoff_cap=min(2.0, settings.lease_seconds / 10),
            splits=_may_be_one_rows_fault,
        )
        self._completions = new(
            partial(self._tenants_apart, self._complete), concurrency=_COMPLETERS, answered=self._were_completed
        )
        self._put_backs = new(partial(self._tenants_apart, self._retry), answered=self._were_put_back)

    def put(self, slot: Slot) -> None:
        """Write `slot.end`; `settled` is called when the database has answered."""
        if self._closed:
            return  # it stays in hand, and is given back with the others
        end: Any = slot.end
        size = _ROW_BYTES + slot.reply_bytes
        if end.error_message is not None:
            size += len(end.error_message)
        if isinstance(end, Completion):
            self._completions.put(slot, size)
        else:
            self._put_backs.put(slot, size)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled."""
        try:
            async with anyio.create_task_group() as group:
                await group.start(self._completions.run)
                await group.start(self._put_backs.run)
                task_status.started()
        finally:
            self._closed = True

    # --- the two statements ---

    async def _tenants_apart(
        self, write: Callable[[list[Slot]], Awaitable[Sequence[Settled]]], slots: list[Slot]
    ) -> Sequence[Settled | Exception]:
        """Write them together; or each tenant's by themselves, where one of the tenants is denied."""
        try:
            return await write(slots)
        except TenancyError as error:
            by_tenant: dict[str, list[Slot]] = {}
            for slot in slots:
                by_tenant.setdefault(slot.job.tenant_id, []).append(slot)
            if len(by_tenant) == 1:
                return [error] * len(slots)
        answers: dict[Slot, Settled | Exception] = {}
        for part in by_tenant.values():
            answers.update(zip(part, await self._tenants_apart(write, part), strict=True))
        return [answers[slot] for slot in slots]

    async def _complete(self, slots: list[Slot]) -> Sequence[Settled]:
        rows: list[Any] = [slot.end for slot in slots]
        batcher = self._completions
        # One that is alone may ring in its own statement, where that is cheap: there is nobody else to ring for.
        alone = len(slots) == 1 and batcher.in_flight == 1 and not batcher.pending and self._doorbell.is_idle
        rings = alone and self._ring_inside.allows()
        async with self._database.connection() as conn:
            sent_at = time.monotonic()
            answers = await RelayDispatchRepository(conn).complete_many(
                self._relay_id, rows, claimed_by=self._instance_id, notify=rings, timeout=self._patience
            )
        if alone:
            self._ring_inside.took(time.monotonic() - sent_at, rings)
            slots[0].rang = rings
        return answers

    async def _retry(self, slots: list[Slot]) -> Sequence[Settled]:
        rows: list[Any] = [slot.end for slot in slots]
        async with self._database.connection() as conn:
            with anyio.fail_after(self._patience):
                return await RelayDispatchRepository(conn).retry(
                    self._relay_id,
                    rows,
                    claimed_by=self._instance_id,
                )

    # --- what became of them ---

    def _were_completed(self, slots: Sequence[Slot], answers: Sequence[Settled | Exception]) -> None:
        """Take the answers of a batch. Nearly all are the same one, and cost no call each."""
        done = slots
        # Counted by identity as a rule.
        if answers.count(SUCCEEDED) < len(answers):
            done = [slot for slot, answer in zip(slots, answers, strict=True) if answer is SUCCEEDED]
            for slot, answer in zip(slots, answers, strict=True):
                if answer is not SUCCEEDED:
                    self._completed(slot, answer)
        if not done:
            return
        self._metrics.jobs_succeeded += len(done)
        if self._held:
            for slot in done:
                self._release(slot)
        ended: dict[str, list[UUID]] = {}
        for slot in done:
            if not slot.rang:
                job = slot.job
                if job.tenant_id in ended:
                    ended[job.tenant_id].append(job.job_id)
                else:
                    ended[job.tenant_id] = [job.job_id]
        for tenant, job_ids in ended.items():
            self._doorbell.ring_many_results(tenant, job_ids)
        self._settled(done)

    def _were_put_back(self, slots: Sequence[Slot], answers: Sequence[Settled | Exception]) -> None:
        for slot, answer in zip(slots, answers, strict=True):
            self._was_put_back(slot, answer)

    def _completed(self, slot: Slot, answer: Settled | Exception) -> None:
        if isinstance(answer, Exception):
            self._refused(slot, answer)
            return
        if self._held:
            self._release(slot)
        job = slot.job
        metrics = self._metrics
        outcome = answer.outcome
        if outcome is WriteOutcome.STALE:
            if answer.status is DispatchStatus.EXPIRED:
                metrics.jobs_expired += 1
                self._doorbell.ring_results(job.tenant_id, job.job_id)
            else:
                self._lost(slot)
        else:
            if answer.status is DispatchStatus.SUCCEEDED:
                metrics.jobs_succeeded += 1
            else:
                metrics.jobs_failed += 1
            if outcome is WriteOutcome.REPEATED:
                metrics.completions_repeated += 1
            if outcome is WriteOutcome.REPEATED or not slot.rang:
                self._doorbell.ring_results(job.tenant_id, job.job_id)
        self._settled((slot,))

    def _was_put_back(self, slot: Slot, answer: Settled | Exception) -> None:
        if isinstance(answer, Exception):
            self._refused(slot, answer)
            return
        if self._held:
            self._release(slot)
        job, end = slot.job, slot.end
        assert isinstance(end, PutBack)
        status = answer.status
        if status is DispatchStatus.PENDING:
            if isinstance(end, Released):
                self._metrics.jobs_released += 1
            else:
                self._metrics.jobs_retried += 1
            self._put_back(job.tenant_id, end.delay)
            self._doorbell.ring_relay(job.tenant_id, self._relay_id)
        elif status is None:
            # Lost; or it was put back by a first try whose reply was lost, and then somebody may have to be woken.
            self._doorbell.ring_relay(job.tenant_id, self._relay_id)
            self._doorbell.ring_results(job.tenant_id, job.job_id)
            self._lost(slot)
        else:
            if status is DispatchStatus.EXPIRED:
                self._metrics.jobs_expired += 1
            else:
                self._metrics.jobs_failed += 1
            self._doorbell.ring_results(job.tenant_id, job.job_id)
        self._settled((slot,))

    def _lost(self, slot: Slot) -> None:
        self._metrics.jobs_lost += 1
        job = slot.job
        logger.warning(
            "the end of job %s (fence %d) was refused, %.1f s after its lease was renewed: withdrawn, or taken back",
            job.job_id,
            job.fence,
            time.monotonic() - slot.renewed_at,
        )

    def _refused(self, slot: Slot, error: Exception) -> None:
        if isinstance(error, DatabaseUnavailableError):
            return  # only once `run` was cancelled: it stays in hand, and is given back with the others
        if _is_nobodys_fault(error):
            self._hold(slot, error)
            return
        end = slot.end
        if isinstance(end, Refused):
            logger.error("job %s cannot be ended, and is left to its lease: %s", slot.job.job_id, error)
            self._metrics.jobs_lost += 1
            self._settled((slot,))
            return
        logger.error("job %s failed: its end cannot be stored: %s", slot.job.job_id, error)
        slot.end = self._ends.refused(slot, error)
        self.put(slot)

    def _hold(self, slot: Slot, error: Exception) -> None:
        """Write it again after a pause: finished work is not thrown away because rights or a schema change."""
        if not self._held:
            logger.error("ends of jobs of relay %s are refused, and are tried again: %s", self._relay_id, error)
        self._held.add(slot)
        if not self._waiting:
            asyncio.get_running_loop().call_later(self._hold_backoff.next(), self._put_waiting)
        self._waiting.append(slot)

    def holds(self, slot: Slot) -> bool:
        """Whether its end was refused, and is written again when rights or the schema have changed."""
        return slot in self._held

    def _put_waiting(self) -> None:
        slots, self._waiting = self._waiting, []
        for slot in slots:
            self.put(slot)

    def _release(self, slot: Slot) -> None:
        if slot in self._held:
            self._held.discard(slot)
            self._hold_backoff.reset()
            if not self._held:
                logger.info("ends of jobs of relay %s are written again", self._relay_id)


def _is_nobodys_fault(error: Exception) -> bool:
    """Tell whether not a row is refused but whoever writes it: no binding, no grant (class 42), another schema."""
    if isinstance(error, DatabaseError):
        return (error.sqlstate or "").startswith("42")
    return isinstance(error, (TenancyError, SchemaMismatchError))


def _may_be_one_rows_fault(error: RelayDispatchError) -> bool:
    """Whatever does not pass by waiting may be for one row's sake, also what PostgreSQL can only call XX000."""
    return not isinstance(error, (DatabaseUnavailableError, DatabaseBusyError)) and not _is_nobodys_fault(error)
