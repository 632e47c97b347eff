"""What the handler of a chunk is given: the chunk, how to say how far it is, and how to learn that it is to stop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from uuid import UUID

import anyio

from dispatch_core import durable_input as check
from dispatch_core.backoff import Backoff
from dispatch_core.database import Database
from dispatch_core.durable_caller import CallersConnection, JoinableConnection
from dispatch_core.durable_models import ChunkOutcome, ChunkSettled, JobLease, RowError
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    LeaseLostError,
    RelayDispatchError,
)
from dispatch_core.models import WriteOutcome
from dispatch_core.settings import DurableJobsSettings
from relay_sdk.chunk_row_errors import RowErrors
from relay_sdk.chunk_slots import ChunkSlot, Done
from relay_sdk.chunk_stopping import Stopping
from relay_sdk.chunk_transaction import ChunkTransaction
from relay_sdk.chunk_writes import complete_with_row_errors, tell_row_errors, verbs
from relay_sdk.metrics import RelayMetrics

__all__ = ["ChunkContext", "Desk"]

_Answer = TypeVar("_Answer")

_DONE: Final = ChunkOutcome(None, 0, 0)
"""What most handlers have to say, where nobody counts rows."""


@dataclass(slots=True)
class Desk:
    """What the contexts of a relay's chunks share."""

    database: Database
    settings: DurableJobsSettings
    patience: float
    """Seconds that a statement may go unanswered."""
    row_errors_limit: int
    permits: anyio.Semaphore
    """For transactions of handlers: as many as leave connections to the runner."""
    lost: Callable[[ChunkSlot], None]
    moved: Callable[[ChunkSlot], None]
    metrics: RelayMetrics


class ChunkContext:
    """One chunk in a handler's hands.

    Its writes raise `LeaseLostError` once the lease is lost or the job is cancelled; whoever catches it can only tidy
    up. No two tasks may use them at once.
    """

    __slots__ = ("_checkpoint", "_row_errors", "_stopping", "desk", "last_row", "open_transaction", "slot")

    def __init__(self, slot: ChunkSlot, desk: Desk) -> None:
        self.slot: Final = slot
        self.desk: Final = desk
        # Made when somebody asks: most chunks are over before.
        self._stopping: Stopping | None = None
        self._row_errors: RowErrors | None = None
        self.open_transaction: ChunkTransaction | None = None
        self._checkpoint = slot.chunk.checkpoint
        self.last_row: int | None = None

    def __repr__(self) -> str:
        return f"<ChunkContext chunk {self.seq} of job {self.job_id} ({self.kind}), attempt {self.attempt}>"

    @property
    def stopping(self) -> Stopping:
        """Set on drain, pause, cancellation and a lost lease, with the reason; see `Stopping`."""
        if self._stopping is None:
            self._stopping = Stopping(self.slot, self.desk.lost)
        return self._stopping

    @property
    def row_errors(self) -> RowErrors:
        """Row errors that are not stored yet."""
        if self._row_errors is None:
            self._row_errors = RowErrors(self.desk.row_errors_limit, self.desk.settings.max_payload_bytes)
        return self._row_errors

    def take_row_errors(self) -> list[RowError]:
        """Return row errors that are not stored yet, and keep none."""
        return [] if self._row_errors is None else self._row_errors.take()

    # --- the chunk ---

    @property
    def tenant_id(self) -> str:
        return self.slot.lease.tenant_id

    @property
    def job_id(self) -> UUID:
        return self.slot.lease.job_id

    @property
    def seq(self) -> int:
        """The chunk's number in its job, from 1 on."""
        return self.slot.lease.seq

    @property
    def kind(self) -> str:
        return self.slot.chunk.kind

    @property
    def params(self) -> Any:
        """What the job was submitted with, for all of its chunks."""
        return self.slot.chunk.params

    @property
    def payload(self) -> Any:
        """What this chunk was submitted with."""
        return self.slot.chunk.payload

    @property
    def checkpoint(self) -> Any:
        """The last checkpoint that was saved, by this attempt or one before; None where there is none."""
        return self._checkpoint

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1 on."""
        return self.slot.chunk.attempt

    @property
    def max_attempts(self) -> int:
        return self.slot.chunk.max_attempts

    @property
    def idempotent(self) -> bool:
        """Whether the chunk may be run again by itself when its holder was lost."""
        return self.slot.chunk.idempotent

    @property
    def lease(self) -> JobLease:
        """The lease, as it was claimed, for `DurableJobStore`; the runner renews it."""
        return self.slot.lease

    @property
    def lease_remaining(self) -> float:
        """Seconds that the lease lasts for certain, if nothing renews it."""
        return max(self.slot.lost_at - time.monotonic(), 0.0)

    @property
    def rows_total(self) -> int:
        """How many rows of the input it stands for; 0 where nobody said."""
        return self.slot.chunk.rows_total

    @property
    def rows_done(self) -> int:
        """Rows that went well, those of attempts before up to the checkpoint included."""
        return self.slot.rows_done

    @property
    def rows_failed(self) -> int:
        """Rows with an error, counted likewise."""
        return self.slot.rows_failed

    # --- how far it is ---

    def advance(self, rows: int = 1) -> None:
        """Count rows that went well. Told with the next heartbeat, checkpoint or completion."""
        slot = self.slot
        slot.rows_done = check.count("rows_done", slot.rows_done + check.number("rows", rows))
        slot.advanced = True

    def row_error(self, row: int, code: str, message: str = "", data: Any = None) -> None:
        """Say that a row of the input could not be used. Stored with the next checkpoint or the completion.

        Said again of the same row and code, by a later attempt too, it replaces what was said. A row is counted once
        for errors that are told of it one after the other.

        Raises: InvalidInputError for what cannot be stored, or where too many wait.
        """
        self.row_errors.add(row, code, message, data)
        if row != self.last_row:
            self.last_row = row
            self.slot.rows_failed += 1
        self.desk.metrics.row_errors += 1

    async def save_checkpoint(self, value: Any, conn: JoinableConnection | None = None) -> None:
        """Store how far the chunk is (any JSON value), with its counts and row errors; renews the lease.

        Transaction: the one of `ctx.transaction()`, if that is open; or the one that is open on `conn`, a connection of
        the caller's to the same database; else one of its own, tried again until it is answered or the lease is over.
        Idempotent: yes. Raises: LeaseLostError; InvalidPayloadError; DatabaseError where it joins a transaction.
        """
        self.check()
        inside = self.open_transaction
        if conn is not None and (inside is None or not inside.is_on(conn)):
            repository = DurableRepository(CallersConnection(conn), self.desk.settings)
            await self._tell_row_errors(repository)
            await self.under(self._save(repository, value, renew=True))
            self.was_saved(value)
            return
        if inside is not None:
            await inside.checkpoint(value)
            return

        async def save(conn: Any) -> None:
            await self.under(self._save(verbs(conn, self.desk.settings), value, renew=True))

        if self._row_errors is not None and self._row_errors.items:
            await self._in_own_transaction(lambda transaction: transaction.checkpoint(value))
        else:
            sent_at = await self._until_answered(save)
            self.slot.renewed(sent_at, self.desk.settings.lease_seconds)
            self.was_saved(value)
            self.desk.moved(self.slot)

    async def complete(self, outcome: Any = None, conn: JoinableConnection | None = None) -> None:
        """Say that the chunk is done: a JSON value or a `ChunkOutcome`. What the handler returns counts no more.

        Transaction: as `save_checkpoint`; the rows that it has written are there exactly once, with the completion.
        Raises: LeaseLostError; InvalidPayloadError; DatabaseError where it joins a transaction.
        """
        self.check()
        end = self.outcome_of(outcome)
        inside = self.open_transaction
        if conn is not None and (inside is None or not inside.is_on(conn)):
            repository = DurableRepository(CallersConnection(conn), self.desk.settings)
            await self._tell_row_errors(repository)
            await self.under(repository.complete(self.lease, end))
            self.slot.completing = True
        elif inside is not None:
            await inside.complete(end)
        else:
            await self._complete_by_itself(end)

    def transaction(self) -> ChunkTransaction:
        """Open a transaction: ``async with ctx.transaction() as conn``.

        What is written on `conn` is committed together with the checkpoint or the completion that is told inside,
        and only while the lease is this handler's: else all of it fails with `LeaseLostError`. `conn` is asyncpg's, of
        the relay's pool; what is set in its session is taken back. Where an error leaves open whether the COMMIT took
        effect, the attempt may write nothing more: let it through.
        """
        return ChunkTransaction(self)

    # --- for the runner and the transaction ---

    def check(self) -> None:
        """Raise LeaseLostError where nothing may be written for the chunk any more."""
        slot = self.slot
        if slot.settled_last is not None or not slot.is_running:
            raise LeaseLostError(
                f"chunk {self.seq} of job {self.job_id} has ended: nothing more is written for it",
                job_id=self.job_id,
                seq=self.seq,
            )
        reason = self.stopping.reason
        if reason is not None and reason.is_final:
            raise LeaseLostError(job_id=self.job_id, seq=self.seq)
        if slot.unsure:
            raise LeaseLostError(
                f"nobody knows what became of the last transaction of chunk {self.seq} of job {self.job_id}: this"
                " attempt writes nothing more, and the next one goes on at the checkpoint that is stored",
                job_id=self.job_id,
                seq=self.seq,
            )

    async def under(self, statement: Awaitable[_Answer]) -> _Answer:
        """Return what the statement returns; where it says that the lease is lost, the runner hears of it as well."""
        try:
            return await statement
        except LeaseLostError:
            if not self.slot.completing:
                self.desk.lost(self.slot)
            raise

    def outcome_of(self, value: Any) -> ChunkOutcome:
        """Return how the chunk ends where the handler said so much: counts that it did not say are those it told.

        A handler that counts no rows and says nothing has done all of them.
        """
        slot = self.slot
        if value is None and not (slot.advanced or slot.rows_failed or slot.chunk.rows_total):
            return _DONE
        done = failed = None
        if isinstance(value, ChunkOutcome):
            value, done, failed = value.value, value.rows_done, value.rows_failed
        if failed is None:
            failed = slot.rows_failed
        if done is None:
            done = slot.rows_done if slot.advanced else max(slot.chunk.rows_total - failed, 0)
        return ChunkOutcome(value, done, failed)

    def was_saved(self, value: Any) -> None:
        """Note a checkpoint that is stored."""
        self._checkpoint = value
        self.slot.rows_told = self.slot.rows_done
        self.desk.metrics.checkpoints += 1

    def _save(self, repository: DurableRepository, value: Any, *, renew: bool) -> Awaitable[None]:
        return repository.checkpoint(
            self.lease,
            value,
            rows_done=self.slot.rows_done,
            rows_failed=self.slot.rows_failed,
            renew_seconds=self.desk.settings.lease_seconds if renew else None,
        )

    async def _tell_row_errors(self, repository: DurableRepository) -> None:
        """Store those that wait in the caller's transaction, and forget them: what becomes of it is the caller's."""
        if errors := self.take_row_errors():
            await self.under(tell_row_errors(repository, self.lease, errors, self.desk.settings))

    async def _complete_by_itself(self, outcome: ChunkOutcome) -> None:
        slot, desk = self.slot, self.desk
        end = Done(outcome, [] if self._row_errors is None else list(self._row_errors.items))
        answers: list[ChunkSettled] = []

        async def say(conn: Any) -> None:
            # From here on a refused heartbeat may mean that it is done; and if this does not come to its answer, the
            # runner says it again.
            slot.said = end
            if end.row_errors:
                answers.append(await complete_with_row_errors(conn, self.lease, end, desk.settings))
            else:
                answers.extend(await verbs(conn, desk.settings).complete_many([self.lease], [outcome]))

        try:
            await self._until_answered(say)
        except LeaseLostError:
            raise
        except RelayDispatchError:
            slot.said = None  # it was refused
            raise
        slot.said = None
        if answers[0].outcome is WriteOutcome.STALE:
            desk.lost(slot)
            raise LeaseLostError(job_id=self.job_id, seq=self.seq)
        self.take_row_errors()
        slot.settled_last = answers[0].last
        desk.moved(slot)

    async def _in_own_transaction(self, say: Callable[[ChunkTransaction], Awaitable[None]]) -> None:
        backoff = Backoff(0.05, 1.0)
        while True:
            try:
                async with ChunkTransaction(self, may_repeat=True):
                    assert self.open_transaction is not None
                    await say(self.open_transaction)
                return
            except (DatabaseUnavailableError, DatabaseBusyError):
                await self._pause(backoff)

    async def _until_answered(self, say: Callable[[Any], Awaitable[None]]) -> float:
        """Return when the one that was answered was sent."""
        backoff = Backoff(0.05, 1.0)
        while True:
            self.check()
            if self.lease_remaining <= 0:  # of one that may be completed, `check` does not look at the clock
                raise LeaseLostError(job_id=self.job_id, seq=self.seq)
            try:
                # Never longer than the lease: whoever waits here hears at once that it is over.
                async with self.desk.database.connection(self.lease_remaining + 0.001) as conn:
                    sent_at = time.monotonic()
                    with anyio.fail_after(min(self.desk.patience, self.lease_remaining + 0.001)):
                        await say(conn)
                return sent_at
            except (DatabaseUnavailableError, DatabaseBusyError):
                await self._pause(backoff)

    async def _pause(self, backoff: Backoff) -> None:
        await anyio.sleep(min(backoff.next(), self.lease_remaining + 0.001))
        self.check()
