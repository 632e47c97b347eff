"""Write how jobs ended, in batches, until the database has told what became of each.

While one batch is on its way the next gathers (`Batcher`), with no future and no task per job. What is written is
fenced, so it can be written again: after a lost connection, or through an outage of any length, each batch is sent
until it is answered. A completion that was applied although its reply was lost is then answered `repeated`.

    applied, repeated   it is as the handler said              slot freed, gateways rung
    stale               withdrawn, expired, taken by another   slot freed, nothing more is written
    refused             the row cannot be stored               once more as `failed`, S2R-RESULT-INVALID
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import anyio
from anyio.abc import TaskStatus

from dispatch_core.batcher import Batcher
from dispatch_core.database import Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import DatabaseBusyError, DatabaseUnavailableError, RelayDispatchError
from dispatch_core.models import Completion, DispatchStatus, PutBack, Settled, WriteOutcome
from relay_sdk.ends import Ends, Refused, Released
from relay_sdk.metrics import RelayMetrics
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import Slot

__all__ = ["Completer"]

logger = logging.getLogger(__name__)

_COMPLETERS: Final = 2
"""Batches under way at once: one is applied while the next one is read."""


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
        ends: Ends,
        settled: Callable[[Slot], None],
        put_back: Callable[[str, float], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take `settled(slot)`, and `put_back(tenant, seconds)` for a job that is to run again."""
        self._relay_id = relay_id
        self._instance_id = instance_id
        self._database = database
        self._doorbell = doorbell
        self._ends = ends
        self._settled = settled
        self._put_back = put_back
        self._metrics = metrics
        self._patience = settings.patience_seconds
        self._closed = False
        new = partial(
            Batcher[Slot, Settled],
            max_items=settings.complete_batch,
            idempotent=True,
            retries=None,
            backoff_base=0.05,
            backoff_cap=min(2.0, settings.lease_seconds / 10),
            splits=_may_be_one_rows_fault,
        )
        self._completions = new(self._complete, concurrency=_COMPLETERS)
        self._put_backs = new(self._retry)

    def put(self, slot: Slot) -> None:
        """Write `slot.end`; `settled` is called when the database has answered."""
        if self._closed:
            return  # it stays in hand, and is given back with the others
        end = slot.end
        if isinstance(end, Completion):
            body = end.response_body
            self._completions.put_nowait(slot, 300 if body is None else 300 + len(body), self._completed)
        else:
            self._put_backs.put_nowait(slot, 300, self._was_put_back)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled."""
        try:
            async with anyio.create_task_group() as group:
                await group.start(self._completions.run)
                await group.start(self._put_backs.run)
                task_status.started()
        finally:
            self._closed = True

    def close(self) -> None:
        """Take no more; `run` returns when all is answered. Idempotent: yes."""
        self._closed = True
        self._completions.close()
        self._put_backs.close()

    # --- the two statements ---

    async def _complete(self, slots: list[Slot]) -> Sequence[Settled]:
        rows: list[Any] = [slot.end for slot in slots]
        async with self._database.connection() as conn:
            with anyio.fail_after(self._patience):
                return await RelayDispatchRepository(conn).complete_many(
                    self._relay_id,
                    rows,
                    claimed_by=self._instance_id,
                )

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

    def _completed(self, slot: Slot, answer: Settled | Exception) -> None:
        if isinstance(answer, Exception):
            self._refused(slot, answer)
            return
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
            self._doorbell.ring_results(job.tenant_id, job.job_id)
        self._settled(slot)

    def _was_put_back(self, slot: Slot, answer: Settled | Exception) -> None:
        if isinstance(answer, Exception):
            self._refused(slot, answer)
            return
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
        self._settled(slot)

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
        end = slot.end
        if isinstance(end, Refused):
            logger.error("job %s cannot be ended, and is left to its lease: %s", slot.job.job_id, error)
            self._metrics.jobs_lost += 1
            self._settled(slot)
            return
        logger.error("job %s failed: its end cannot be stored: %s", slot.job.job_id, error)
        slot.end = self._ends.refused(slot, error)
        self.put(slot)


def _may_be_one_rows_fault(error: RelayDispatchError) -> bool:
    """Whatever does not pass by waiting may be for one row's sake, also what PostgreSQL can only call XX000."""
    return not isinstance(error, (DatabaseUnavailableError, DatabaseBusyError))
