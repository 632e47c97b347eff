"""What is written of chunks in hand: one function for each sort of end, on whatever connection there is.

For the completer, which writes by the pool, and for the last write of a relay that stops.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch_core.database import Connection, mapped_errors
from dispatch_core.durable_models import ChunkSettled, ChunkStatus, JobLease, RowError
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import LeaseLostError
from dispatch_core.models import WriteOutcome
from dispatch_core.settings import DurableJobsSettings
from relay_sdk.chunk_row_errors import batches
from relay_sdk.chunk_slots import ChunkSlot, Done, Failed

__all__ = ["complete_many", "complete_with_row_errors", "fail", "release", "tell_row_errors"]


async def tell_row_errors(
    repository: DurableRepository, lease: JobLease, errors: list[RowError], settings: DurableJobsSettings
) -> None:
    """Store row errors in the transaction that is open, or each batch by itself. Raises: LeaseLostError."""
    for batch in batches(errors, settings.row_error_batch):
        await repository.row_errors_add(lease, batch)


async def complete_many(
    conn: Connection, slots: Sequence[ChunkSlot], settings: DurableJobsSettings
) -> list[ChunkSettled]:
    """Complete chunks that have no row errors."""
    outcomes = [slot.end.outcome if isinstance(slot.end, Done) else None for slot in slots]
    return await DurableRepository(conn, settings).complete_many([slot.lease for slot in slots], outcomes)


async def complete_with_row_errors(conn: Connection, slot: ChunkSlot, settings: DurableJobsSettings) -> ChunkSettled:
    """Store its row errors and complete the chunk, in one transaction. Idempotent: yes, by the lease."""
    end = slot.end
    assert isinstance(end, Done)
    repository = DurableRepository(conn, settings)
    try:
        with mapped_errors():
            async with conn.transaction():
                await tell_row_errors(repository, slot.lease, end.row_errors, settings)
                return await repository.complete(slot.lease, end.outcome)
    except LeaseLostError:
        # Or it was completed by a first try whose reply was lost. Nothing can be applied now: a lost lease stays lost.
        ((answer),) = await repository.complete_many([slot.lease], [end.outcome])
        return answer


async def fail(conn: Connection, slot: ChunkSlot, settings: DurableJobsSettings) -> tuple[ChunkStatus | None, bool]:
    """Say that its attempt has failed, and what rows were bad, in one transaction."""
    end = slot.end
    assert isinstance(end, Failed)
    repository = DurableRepository(conn, settings)
    if not end.row_errors:
        return await repository.fail(slot.lease, end.message, retryable=end.retryable, delay_seconds=end.delay)
    try:
        with mapped_errors():
            async with conn.transaction():
                await tell_row_errors(repository, slot.lease, end.row_errors, settings)
                return await repository.fail(slot.lease, end.message, retryable=end.retryable, delay_seconds=end.delay)
    except LeaseLostError:
        return None, False


async def release(
    conn: Connection, slots: Sequence[ChunkSlot], settings: DurableJobsSettings
) -> list[tuple[WriteOutcome, ChunkStatus | None]]:
    """Give chunks back, their attempts not counted."""
    return await DurableRepository(conn, settings).release([slot.lease for slot in slots])
