"""What is written of chunks in hand: one function for each sort of end, on whatever connection there is.

For the completer, which writes by the pool, and for the last write of a relay that stops.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispatch_core.database import Connection, has_codecs, mapped_errors
from dispatch_core.durable_caller import CallersConnection
from dispatch_core.durable_models import ChunkSettled, ChunkStatus, JobLease, RowError
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import LeaseLostError
from dispatch_core.models import WriteOutcome
from dispatch_core.settings import DurableJobsSettings
from relay_sdk.chunk_row_errors import batches
from relay_sdk.chunk_slots import ChunkSlot, Done, Failed

__all__ = ["complete_many", "complete_with_row_errors", "fail", "release", "tell_row_errors", "verbs"]


def verbs(conn: Connection, settings: DurableJobsSettings, *, joins: bool = False) -> DurableRepository:
    """Return the room's verbs on a connection of the relay's.

    Those of a pool of the caller's may have codecs of his, and one that a handler was lent may have the handler's.
    """
    return DurableRepository(CallersConnection(conn, joins=joins) if has_codecs(conn) else conn, settings)


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
    return await verbs(conn, settings).complete_many([slot.lease for slot in slots], outcomes)


async def complete_with_row_errors(
    conn: Connection, lease: JobLease, end: Done, settings: DurableJobsSettings
) -> ChunkSettled:
    """Store its row errors and complete the chunk, in one transaction. Idempotent: yes, by the lease."""
    repository = verbs(conn, settings)
    try:
        with mapped_errors():
            async with conn.transaction():
                await tell_row_errors(repository, lease, end.row_errors, settings)
                return await repository.complete(lease, end.outcome)
    except LeaseLostError:
        # Or it was completed by a first try whose reply was lost.
        return await _was_it_completed(conn, lease, settings)


async def _was_it_completed(conn: Connection, lease: JobLease, settings: DurableJobsSettings) -> ChunkSettled:
    """Tell of a chunk whose lease is over whether its holder has completed it: `repeated`, else `stale`.

    Nothing can be applied by it: a lost lease stays lost.
    """
    ((answer),) = await verbs(conn, settings).complete_many([lease], [None])
    return answer


async def fail(conn: Connection, slot: ChunkSlot, settings: DurableJobsSettings) -> tuple[ChunkStatus | None, bool]:
    """Say that its attempt has failed, and what rows were bad, in one transaction; return what it is now, and `last`.

    None: the lease is lost; `done`: the handler had completed it, and that commit was not answered.
    """
    status, last = await _fail(conn, slot, settings)
    if status is None and slot.completing:
        answer = await _was_it_completed(conn, slot.lease, settings)
        if answer.outcome is not WriteOutcome.STALE:
            return ChunkStatus.DONE, answer.last
    return status, last


async def _fail(conn: Connection, slot: ChunkSlot, settings: DurableJobsSettings) -> tuple[ChunkStatus | None, bool]:
    end = slot.end
    assert isinstance(end, Failed)
    repository = verbs(conn, settings)
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
    """Give chunks back, their attempts not counted; return what they are now.

    Stale and `done`: the handler had completed it, and that commit was not seen.
    """
    answers = await verbs(conn, settings).release([slot.lease for slot in slots])
    for n, slot in enumerate(slots):
        if answers[n][0] is WriteOutcome.STALE and (slot.completing or slot.settled_last is not None):
            answer = await _was_it_completed(conn, slot.lease, settings)
            if answer.outcome is not WriteOutcome.STALE:
                answers[n] = (WriteOutcome.STALE, ChunkStatus.DONE)
    return answers
