"""The last write of a relay that stops: whatever its pieces could not write in time, by one connection, once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import TenancyError
from dispatch_core.models import Completion, DispatchJob, DispatchStatus, MalformedJob, PutBack, Settled
from relay_sdk.claimer import Claimer
from relay_sdk.connections import Connections, last_connection
from relay_sdk.lost_claims import LostClaim
from relay_sdk.metrics import RelayMetrics
from relay_sdk.slots import RUNNING, Slot

__all__ = ["give_back"]


async def give_back(
    left: Sequence[Slot],
    claimer: Claimer,
    *,
    relay_id: str,
    instance_id: str,
    connections: Connections,
    settled: Callable[[Slot], None],
    metrics: RelayMetrics,
) -> None:
    """Write the ends in `left`, release what has none, and release what claims have taken whose reply was lost.

    Raises: RelayDispatchError; then some may have been written and others not.
    """
    doorbell = connections.doorbell

    def note(slots: Sequence[Slot], answers: Sequence[Settled]) -> None:
        for slot, answer in zip(slots, answers, strict=True):
            if answer.status is DispatchStatus.PENDING:
                metrics.jobs_released += 1
                doorbell.ring_relay(slot.job.tenant_id, relay_id)
            elif answer.status is not None:
                metrics.jobs_succeeded += answer.status is DispatchStatus.SUCCEEDED
                metrics.jobs_failed += answer.status is DispatchStatus.FAILED
                metrics.jobs_expired += answer.status is DispatchStatus.EXPIRED
                doorbell.ring_results(slot.job.tenant_id, slot.job.job_id)
            settled(slot)

    denied: list[TenancyError] = []

    async def write(slots: Sequence[Slot], statement: Callable[[Sequence[Slot]], Awaitable[Sequence[Settled]]]) -> None:
        """Write them together; or each tenant's by themselves, where one of the tenants is denied."""
        if not slots:
            return
        try:
            note(slots, await statement(slots))
        except TenancyError as error:
            tenants = {slot.job.tenant_id for slot in slots}
            if len(tenants) == 1:
                denied.append(error)
                return
            for tenant in sorted(tenants):
                await write([slot for slot in slots if slot.job.tenant_id == tenant], statement)

    async with last_connection(connections) as conn:
        repository = RelayDispatchRepository(conn)

        async def release(slots: Sequence[Slot]) -> Sequence[Settled]:
            claims = [(slot.job.tenant_id, slot.job.job_id, slot.job.fence, slot.state is RUNNING) for slot in slots]
            return await repository.release(relay_id, claims, claimed_by=instance_id)

        async def retry(slots: Sequence[Slot]) -> Sequence[Settled]:
            put_backs = [slot.end for slot in slots if isinstance(slot.end, PutBack)]
            return await repository.retry(relay_id, put_backs, claimed_by=instance_id)

        async def complete(slots: Sequence[Slot]) -> Sequence[Settled]:
            completions = [slot.end for slot in slots if isinstance(slot.end, Completion)]
            return await repository.complete_many(relay_id, completions, claimed_by=instance_id)

        # What another relay may run comes first.
        await write([slot for slot in left if slot.end is None], release)
        await write([slot for slot in left if isinstance(slot.end, PutBack)], retry)
        await write([slot for slot in left if isinstance(slot.end, Completion)], complete)

        async def release_lost(lost: LostClaim) -> None:
            """Release what a claim has taken whose reply was lost, the tenants one by one where one is denied."""
            try:
                claimed = await claimer.lost.ask(lost, conn)
                jobs: list[DispatchJob | MalformedJob] = [*claimed.jobs, *claimed.malformed]
                unstarted = [(job.tenant_id, job.job_id, job.fence, False) for job in jobs]
                if unstarted:
                    await repository.release(relay_id, unstarted, claimed_by=instance_id)
            except TenancyError as error:
                if len(lost.tenants) == 1:
                    denied.append(error)
                    return
                for part in lost.by_tenant():
                    await release_lost(part)
                return
            for job in jobs:
                metrics.jobs_released += 1
                doorbell.ring_relay(job.tenant_id, relay_id)

        for lost in claimer.lost:
            await release_lost(lost)
    if denied:
        raise denied[0]
