"""Write how chunks ended, until the database has told what became of each; and end jobs behind their last chunk.

    Done       many in one statement; with row errors, each in a transaction of its own
    Failed     a statement each
    Released   many in one statement
    last       `durable_finish`, in a statement of its own after the completion: two last chunks at one moment do not
               see each other, but whichever commits later calls after both

Everything here is fenced, so it can be sent again: after a lost connection, or through an outage of any length. A
completion that was applied although its reply was lost is then answered `repeated`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from uuid import UUID

import anyio
from anyio.abc import TaskStatus

from dispatch_core.backoff import Backoff
from dispatch_core.batcher import Batcher
from dispatch_core.database import Database
from dispatch_core.doorbell import Doorbell
from dispatch_core.durable_models import ChunkSettled, ChunkStatus
from dispatch_core.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    RelayDispatchError,
    SchemaMismatchError,
    TenancyError,
)
from dispatch_core.models import WriteOutcome
from dispatch_core.settings import DurableJobsSettings
from relay_sdk import chunk_writes
from relay_sdk.chunk_ends import ChunkEnds
from relay_sdk.chunk_slots import ChunkSlot, Done, Failed, Released, Settled
from relay_sdk.chunk_writes import verbs
from relay_sdk.metrics import RelayMetrics

__all__ = ["ChunkCompleter"]

logger = logging.getLogger(__name__)

_COMPLETERS: Final = 2
"""Batches under way at once: one is applied while the next one is read."""

_SINGLES: Final = 4
"""Ends that have a statement, or a transaction, of their own."""


class ChunkCompleter:
    """Take ended chunks, write them, and tell when they are settled."""

    def __init__(
        self,
        relay_id: str,
        *,
        settings: DurableJobsSettings,
        batch: int,
        patience: float,
        database: Database,
        doorbell: Doorbell,
        ends: ChunkEnds,
        settled: Callable[[Sequence[ChunkSlot]], None],
        put_back: Callable[[str, float], None],
        moved: Callable[[str, UUID], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take `settled(slots)`; `put_back(tenant, seconds)` for a chunk that is to run again; `moved(tenant, job)`."""
        self._relay_id = relay_id
        self._settings = settings
        self._patience = patience
        self._database = database
        self._doorbell = doorbell
        self._ends = ends
        self._settled = settled
        self._put_back = put_back
        self._moved = moved
        self._metrics = metrics
        self._closed = False
        self._held: set[ChunkSlot] = set()
        self._hold_backoff = Backoff(0.1, 2.0)
        self._retried = anyio.Event()
        new = partial(
            Batcher[Any, Any],
            idempotent=True,
            retries=None,
            backoff_base=0.05,
            backoff_cap=min(2.0, settings.lease_seconds / 10),
            splits=_may_be_one_chunks_fault,
        )
        self._completions = new(self._complete, max_items=batch, concurrency=_COMPLETERS, answered=self._were_completed)
        self._with_row_errors = new(
            self._complete_with_row_errors, max_items=1, concurrency=_SINGLES, answered=self._were_completed
        )
        self._failures = new(self._fail, max_items=1, concurrency=_SINGLES, answered=self._have_failed)
        self._releases = new(self._release, max_items=batch, answered=self._were_released)
        self._finishes = new(self._finish, max_items=100, answered=self._were_finished)
        self._finishing: set[tuple[str, UUID]] = set()

    def put(self, slot: ChunkSlot) -> None:
        """Write `slot.end`; `settled` is called when the database has answered."""
        end = slot.end
        if isinstance(end, Done):
            batcher = self._with_row_errors if end.row_errors else self._completions
        elif isinstance(end, Settled):
            self._was_done(slot, end.last)
            self._settled((slot,))
            return
        elif isinstance(end, Failed):
            batcher = self._failures
        else:
            assert isinstance(end, Released)
            batcher = self._releases
        try:
            if not self._closed:
                batcher.put(slot, 0)
        except DatabaseUnavailableError:
            pass  # closed: it stays in hand, and is given back with the others

    def finish(self, tenant: str, job_id: UUID) -> None:
        """End the job if nothing of it can run any more."""
        key = (tenant, job_id)
        if not self._closed and key not in self._finishing:
            # Asked for twice before it is sent, it is sent once; asked for while it is under way, once more.
            self._finishing.add(key)
            with contextlib.suppress(DatabaseUnavailableError):  # closed: a sweep ends the job
                self._finishes.put(key, 0)

    @property
    def is_idle(self) -> bool:
        """Whether no job is still to be ended."""
        return not self._finishes.pending and not self._finishes.in_flight

    async def drain(self) -> None:
        """Wait until every job is ended that was to be."""
        await self._finishes.drain()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled."""
        try:
            async with anyio.create_task_group() as group:
                for batcher in (
                    self._completions,
                    self._with_row_errors,
                    self._failures,
                    self._releases,
                    self._finishes,
                ):
                    await group.start(batcher.run)
                group.start_soon(self._put_held)
                task_status.started()
        finally:
            self._closed = True

    # --- the statements ---

    async def _complete(self, slots: list[ChunkSlot]) -> Sequence[ChunkSettled]:
        async with self._database.connection() as conn:
            with anyio.fail_after(self._patience):
                return await chunk_writes.complete_many(conn, slots, self._settings)

    async def _complete_with_row_errors(self, slots: list[ChunkSlot]) -> Sequence[ChunkSettled]:
        async with self._database.connection() as conn:
            with anyio.fail_after(2 * self._patience):
                end = slots[0].end
                assert isinstance(end, Done)
                return [await chunk_writes.complete_with_row_errors(conn, slots[0].lease, end, self._settings)]

    async def _fail(self, slots: list[ChunkSlot]) -> Sequence[tuple[ChunkStatus | None, bool]]:
        async with self._database.connection() as conn:
            with anyio.fail_after(2 * self._patience):
                return [await chunk_writes.fail(conn, slots[0], self._settings)]

    async def _release(self, slots: list[ChunkSlot]) -> Sequence[tuple[WriteOutcome, ChunkStatus | None]]:
        async with self._database.connection() as conn:
            with anyio.fail_after(self._patience):
                return await chunk_writes.release(conn, slots, self._settings)

    async def _finish(self, jobs: list[tuple[str, UUID]]) -> Sequence[int | Exception]:
        self._finishing.difference_update(jobs)
        by_tenant: dict[str, list[UUID]] = {}
        for tenant, job_id in jobs:
            by_tenant.setdefault(tenant, []).append(job_id)
        for tenant, job_ids in by_tenant.items():
            async with self._database.connection() as conn:
                with anyio.fail_after(self._patience):
                    for _, _, ended in await verbs(conn, self._settings).finish(tenant, job_ids):
                        self._metrics.durable_jobs_ended += ended
        return [0] * len(jobs)

    # --- what became of them ---

    def _were_completed(self, slots: Sequence[ChunkSlot], answers: Sequence[ChunkSettled | Exception]) -> None:
        if not self._held and self._were_all_applied(slots, answers):
            return
        settled = []
        for slot, answer in zip(slots, answers, strict=True):
            if isinstance(answer, Exception):
                self._refused(slot, answer)
                continue
            if answer.outcome is WriteOutcome.STALE:
                self._lost(slot)
            else:
                if answer.outcome is WriteOutcome.REPEATED:
                    self._metrics.chunk_completions_repeated += 1
                self._was_done(slot, answer.last)
            settled.append(slot)
        self._release_held(settled)
        self._settled(settled)

    def _were_all_applied(self, slots: Sequence[ChunkSlot], answers: Sequence[ChunkSettled | Exception]) -> bool:
        """Take the answers of a batch that are the same one, as they are as a rule, without a call for each."""
        answer = answers[0]
        if isinstance(answer, Exception) or answer.outcome is not WriteOutcome.APPLIED:
            return False
        if answers.count(answer) < len(answers):
            return False
        self._metrics.chunks_done += len(slots)
        for tenant, job_id in {(slot.lease.tenant_id, slot.lease.job_id) for slot in slots}:
            self._moved(tenant, job_id)
            if answer.last:
                self.finish(tenant, job_id)
        self._settled(slots)
        return True

    def _have_failed(
        self, slots: Sequence[ChunkSlot], answers: Sequence[tuple[ChunkStatus | None, bool] | Exception]
    ) -> None:
        for slot, answer in zip(slots, answers, strict=True):
            if isinstance(answer, Exception):
                self._refused(slot, answer)
                continue
            status, last = answer
            lease, end = slot.lease, slot.end
            if status is None:
                self._lost(slot)
            elif status is ChunkStatus.DONE:
                self._was_done(slot, last)
            elif status is ChunkStatus.RETRY:
                self._metrics.chunks_retried += 1
                delay = end.delay if isinstance(end, Failed) else 0.0
                self._put_back(lease.tenant_id, delay)
                if delay == 0:
                    self._doorbell.ring_chunks(lease.tenant_id)
            else:
                self._metrics.chunks_failed += 1
                if last:
                    self.finish(lease.tenant_id, lease.job_id)
            self._moved(lease.tenant_id, lease.job_id)
            self._release_held((slot,))
            self._settled((slot,))

    def _were_released(
        self, slots: Sequence[ChunkSlot], answers: Sequence[tuple[WriteOutcome, ChunkStatus | None] | Exception]
    ) -> None:
        for slot, answer in zip(slots, answers, strict=True):
            if isinstance(answer, Exception):
                self._refused(slot, answer)
                continue
            lease = slot.lease
            if answer[0] is not WriteOutcome.STALE:
                self._metrics.chunks_released += 1
                if answer[1] is not ChunkStatus.CANCELLED:
                    self._put_back(lease.tenant_id, 0.0)
                    self._doorbell.ring_chunks(lease.tenant_id)
                self._moved(lease.tenant_id, lease.job_id)
            elif answer[1] is ChunkStatus.DONE:
                # By the handler itself. Whether it was the last is asked for: that others wait was seen before.
                self._was_done(slot, True)
            else:
                self._lost(slot)
            self._release_held((slot,))
            self._settled((slot,))

    def _were_finished(self, jobs: Sequence[tuple[str, UUID]], answers: Sequence[int | Exception]) -> None:
        for (tenant, job_id), answer in zip(jobs, answers, strict=True):
            if isinstance(answer, Exception) and not isinstance(answer, DatabaseUnavailableError):
                logger.warning("job %s is left to a sweep to be ended: %s", job_id, answer)
            else:
                self._moved(tenant, job_id)

    def _was_done(self, slot: ChunkSlot, last: bool) -> None:
        self._metrics.chunks_done += 1
        lease = slot.lease
        self._moved(lease.tenant_id, lease.job_id)
        if last:
            self.finish(lease.tenant_id, lease.job_id)

    def _lost(self, slot: ChunkSlot) -> None:
        self._metrics.chunks_lost += 1
        lease = slot.lease
        logger.warning(
            "the end of chunk %d of job %s was refused, %.1f s after its lease was renewed: cancelled, or taken back",
            lease.seq,
            lease.job_id,
            time.monotonic() - slot.renewed_at,
        )

    # --- what goes wrong ---

    def _refused(self, slot: ChunkSlot, error: Exception) -> None:
        if isinstance(error, DatabaseUnavailableError):
            return  # only once `run` was cancelled: it stays in hand, and is given back with the others
        if _is_nobodys_fault(error):
            self._hold(slot, error)
            return
        end = slot.end
        if isinstance(end, Done) or (isinstance(end, Failed) and end.row_errors):
            slot.end = self._ends.refused(slot, error)
            self.put(slot)
            return
        logger.error("chunk %d of job %s is left to its lease: %s", slot.lease.seq, slot.lease.job_id, error)
        self._metrics.chunks_lost += 1
        self._settled((slot,))

    def _hold(self, slot: ChunkSlot, error: Exception) -> None:
        """Write it again after a pause, while its lease lasts: work is not thrown away because a right was taken."""
        if time.monotonic() >= slot.lost_at:
            self._held.discard(slot)
            self._lost(slot)
            self._settled((slot,))
            return
        if not self._held:
            logger.error("ends of chunks of relay %s are refused, and are tried again: %s", self._relay_id, error)
        self._held.add(slot)
        self._retried.set()

    async def _put_held(self) -> None:
        while True:
            await self._retried.wait()
            self._retried = anyio.Event()
            await anyio.sleep(self._hold_backoff.next())
            for slot in list(self._held):
                self.put(slot)

    def _release_held(self, slots: Sequence[ChunkSlot]) -> None:
        if self._held:
            self._held.difference_update(slots)
            self._hold_backoff.reset()


def _is_nobodys_fault(error: Exception) -> bool:
    """Tell whether not a chunk is refused but whoever writes it: no binding, no grant (class 42), another schema."""
    if isinstance(error, DatabaseError):
        return (error.sqlstate or "").startswith("42")
    return isinstance(error, (TenancyError, SchemaMismatchError))


def _may_be_one_chunks_fault(error: RelayDispatchError) -> bool:
    """Find by halving a tenant that is denied, or a value that the database refuses."""
    if isinstance(error, SchemaMismatchError):
        return False
    return not isinstance(error, (DatabaseUnavailableError, DatabaseBusyError))
