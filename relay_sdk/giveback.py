"""The last write of a relay that stops: whatever its pieces could not write in time, by one connection, once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import Completion, DispatchJob, DispatchStatus, MalformedJob, PutBack, Settled
from relay_sdk.claimer import Claimer
from relay_sdk.connections import Connections
from relay_sdk.executor import Executor
from relay_sdk.metrics import RelayMetrics
from relay_sdk.slots import RUNNING, Slot

__all__ = ["give_back"]

logger = logging.getLogger(__name__)


async def give_back(
    left: Sequence[Slot],
    claimer: Claimer,
    *,
    relay_id: str,
    instance_id: str,
    connections: Connections,
    executor: Executor,
    metrics: RelayMetrics,
) -> None:
    """Write the ends in `left`, release what has none, and release what claims have taken whose reply was lost.

    Raises: DatabaseError, TenancyError; then some may have been written and others not.
    """
    doorbell = connections.doorbell

    def ring(tenant: str, slot: Slot, answer: Settled) -> None:
        if answer.status is DispatchStatus.PENDING:
            metrics.jobs_released += 1
            doorbell.ring_relay(tenant, relay_id)
        elif answer.status is not None:
            metrics.jobs_succeeded += answer.status is DispatchStatus.SUCCEEDED
            metrics.jobs_failed += answer.status is DispatchStatus.FAILED
            metrics.jobs_expired += answer.status is DispatchStatus.EXPIRED
            doorbell.ring_results(tenant, slot.job.job_id)
        executor.settled(slot)

    completions = [(slot, slot.end) for slot in left if isinstance(slot.end, Completion)]
    put_backs = [(slot, slot.end) for slot in left if isinstance(slot.end, PutBack)]
    endless = [slot for slot in left if slot.end is None]
    async with connections.database.connection() as conn:
        repository = RelayDispatchRepository(conn)
        # Those with attempts left or unstarted first: another relay can have them at once.
        releases = [(slot.job.tenant_id, slot.job.job_id, slot.job.fence, slot.state is RUNNING) for slot in endless]
        for slot, answer in zip(
            endless, await repository.release(relay_id, releases, claimed_by=instance_id), strict=True
        ):
            ring(slot.job.tenant_id, slot, answer)
        answers = await repository.retry(relay_id, [end for _, end in put_backs], claimed_by=instance_id)
        for (slot, _), answer in zip(put_backs, answers, strict=True):
            ring(slot.job.tenant_id, slot, answer)
        answers = await repository.complete_many(relay_id, [end for _, end in completions], claimed_by=instance_id)
        for (slot, _), answer in zip(completions, answers, strict=True):
            ring(slot.job.tenant_id, slot, answer)
    for lost in list(claimer.unanswered):
        claimed = await claimer.recover(lost)
        jobs: list[DispatchJob | MalformedJob] = [*claimed.jobs, *claimed.malformed]
        claims = [(job.tenant_id, job.job_id, job.fence, False) for job in jobs]
        async with connections.database.connection() as conn:
            await RelayDispatchRepository(conn).release(relay_id, claims, claimed_by=instance_id)
        for job in jobs:
            metrics.jobs_released += 1
            doorbell.ring_relay(job.tenant_id, relay_id)
