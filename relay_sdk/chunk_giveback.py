"""The last write of a relay that stops: whatever it could not write of its chunks in time, by one connection, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from dispatch_core.database import Connection
from dispatch_core.durable_models import ChunkStatus
from dispatch_core.errors import TenancyError
from dispatch_core.models import WriteOutcome
from dispatch_core.settings import DurableJobsSettings
from relay_sdk import chunk_writes
from relay_sdk.chunk_claimer import ChunkClaimer
from relay_sdk.chunk_slots import ChunkSlot, Done, Failed, Released
from relay_sdk.chunk_writes import verbs
from relay_sdk.connections import Connections, last_connection
from relay_sdk.metrics import RelayMetrics

__all__ = ["give_back_chunks"]


async def give_back_chunks(
    left: Sequence[ChunkSlot],
    claimer: ChunkClaimer,
    *,
    connections: Connections,
    settings: DurableJobsSettings,
    settled: Callable[[Sequence[ChunkSlot]], None],
    metrics: RelayMetrics,
) -> None:
    """Write the ends in `left`, and release what claims have taken whose reply was lost.

    Raises: RelayDispatchError; then some may have been written and others not.
    """
    denied: list[TenancyError] = []
    finished: dict[str, list[UUID]] = {}

    def ended(slot: ChunkSlot) -> None:
        finished.setdefault(slot.lease.tenant_id, []).append(slot.lease.job_id)

    async def by_tenant(slots: Sequence[ChunkSlot]) -> None:
        """Write them tenant by tenant: one that is denied holds up no other."""
        for tenant in sorted({slot.lease.tenant_id for slot in slots}):
            mine = [slot for slot in slots if slot.lease.tenant_id == tenant]
            try:
                await release(tenant, [slot for slot in mine if isinstance(slot.end, Released)])
                await complete([slot for slot in mine if isinstance(slot.end, Done)])
                for slot in mine:
                    if isinstance(slot.end, Failed):
                        await fail(slot)
            except TenancyError as error:
                denied.append(error)

    async with last_connection(connections) as conn:

        async def release(tenant: str, slots: Sequence[ChunkSlot]) -> None:
            if not slots:
                return
            for slot, (outcome, status) in zip(slots, await chunk_writes.release(conn, slots, settings), strict=True):
                if outcome is not WriteOutcome.STALE:
                    metrics.chunks_released += 1
                    if status is not ChunkStatus.CANCELLED:
                        connections.doorbell.ring_chunks(tenant)
                elif status is ChunkStatus.DONE:
                    metrics.chunks_done += 1
                    ended(slot)
                else:
                    metrics.chunks_lost += 1
            settled(slots)

        async def complete(slots: Sequence[ChunkSlot]) -> None:
            plain = [slot for slot in slots if isinstance(slot.end, Done) and not slot.end.row_errors]
            answers = list(
                zip(plain, await chunk_writes.complete_many(conn, plain, settings) if plain else [], strict=True)
            )
            for slot in set(slots).difference(plain):
                assert isinstance(slot.end, Done)
                answers.append(
                    (slot, await chunk_writes.complete_with_row_errors(conn, slot.lease, slot.end, settings))
                )
            for slot, answer in answers:
                if answer.outcome is WriteOutcome.STALE:
                    metrics.chunks_lost += 1
                else:
                    metrics.chunks_done += 1
                    if answer.last:
                        ended(slot)
                settled((slot,))

        async def fail(slot: ChunkSlot) -> None:
            status, last = await chunk_writes.fail(conn, slot, settings)
            metrics.chunks_retried += status is ChunkStatus.RETRY
            metrics.chunks_failed += status is ChunkStatus.FAILED
            metrics.chunks_done += status is ChunkStatus.DONE
            metrics.chunks_lost += status is None
            if status is ChunkStatus.RETRY:
                connections.doorbell.ring_chunks(slot.lease.tenant_id)
            if last:
                ended(slot)
            settled((slot,))

        await by_tenant(left)
        await _release_lost(conn, claimer, connections, settings, metrics, denied)
        for tenant, job_ids in finished.items():
            for _, _, has_ended in await verbs(conn, settings).finish(tenant, job_ids):
                metrics.durable_jobs_ended += has_ended
    if denied:
        raise denied[0]


async def _release_lost(
    conn: Connection,
    claimer: ChunkClaimer,
    connections: Connections,
    settings: DurableJobsSettings,
    metrics: RelayMetrics,
    denied: list[TenancyError],
) -> None:
    """Release what claims have taken whose reply was lost, tenant by tenant."""
    for lost in claimer.lost:
        for part in lost.by_tenant():
            try:
                claimed = await claimer.lost.ask(part, conn)
                if claimed.chunks:
                    await verbs(conn, settings).release([chunk.lease for chunk in claimed.chunks])
            except TenancyError as error:
                denied.append(error)
                continue
            for chunk in claimed.chunks:
                metrics.chunks_released += 1
                connections.doorbell.ring_chunks(chunk.lease.tenant_id)
