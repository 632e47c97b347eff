"""`ctx.transaction()`: what a handler writes, and what it says of its chunk, committed together or not at all.

    begin     a connection of the pool; so many at once that the runner always has some left
    inside    the handler's own rows; checkpoint, row errors, completion join it
    end       the fence: under the chunk's lock, is the lease still ours? held to the commit
    commit    the chunk's state in memory follows
    rollback  and so it does here: what was said of rows inside is forgotten

A lost lease fails the whole of it with `LeaseLostError`. Where the reply to the COMMIT is lost, nobody knows what
became of it: the error reaches the handler, its attempt writes nothing more, and the chunk is not completed again
(`chunk_ends`). So a handler that tries again by itself doubles no row.

What a handler sets in the session is taken back at the end, and where it has set codecs the connection is closed: the
next who gets it is the runner, or another handler.
"""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import anyio

from dispatch_core.database import Connection, as_opened, in_transaction, mapped_errors, translate
from dispatch_core.durable_models import ChunkOutcome
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import (
    ConfigurationError,
    ConnectionLostError,
    DatabaseUnavailableError,
    RelayDispatchError,
    TransactionRequiredError,
)
from relay_sdk.chunk_writes import tell_row_errors, verbs

if TYPE_CHECKING:
    from relay_sdk.chunk_context import ChunkContext

__all__ = ["ChunkTransaction"]

_ROLLBACK_SECONDS: Final = 2.0


class ChunkTransaction:
    """An async context manager; it gives the connection, with a transaction open."""

    def __init__(self, context: ChunkContext, *, may_repeat: bool = False) -> None:
        """`may_repeat`: whoever asks for it does all of it again where nobody knows what became of it."""
        self._context = context
        self._may_repeat = may_repeat
        self._forget()

    def _forget(self) -> None:
        self._conn: Connection | None = None
        self._saved: tuple[Any] | None = None
        self._lease_before: tuple[float, float] | None = None
        self._last: bool | None = None
        self._is_clean = False

    async def __aenter__(self) -> Connection:
        """Begin.

        Raises: LeaseLostError, DatabaseUnavailableError; ConfigurationError inside another one of this chunk.
        """
        context = self._context
        desk = context.desk
        context.check()
        if context.open_transaction is not None:
            raise ConfigurationError("this chunk has a transaction open already: write in that one")
        await desk.permits.acquire()
        self._forget()
        try:
            self._lent = desk.database.connection()
            conn = await self._lent.__aenter__()
            try:
                self._transaction = conn.transaction()
                with mapped_errors():
                    await self._transaction.start()
            except BaseException as error:
                # The driver remembers a BEGIN that was cut short as a transaction, and logs an error where it is to
                # make the connection whole.
                with contextlib.suppress(Exception):
                    conn.terminate()
                await self._put_back(error)
                raise
        except BaseException:
            desk.permits.release()
            raise
        self._conn = conn
        slot = context.slot
        self._before = (context.row_errors.mark(), slot.rows_done, slot.rows_failed, context.last_row)
        context.open_transaction = self
        return conn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failure: BaseException | None = error
        try:
            if error is not None:
                await self._roll_back()
            else:
                try:
                    await self._take_fence()
                except BaseException as raised:
                    failure = raised
                    await self._roll_back()
                    raise
                try:
                    await self._commit()
                except BaseException as raised:
                    failure = raised
                    raise
        finally:
            self._context.open_transaction = None
            if failure is not None:
                self._undo()
            try:
                await self._put_back(failure)
            finally:
                self._context.desk.permits.release()

    def cut(self) -> None:
        """End its connection, and so roll it back: its handler refuses to end, and the chunk is to be another's."""
        if self._conn is not None:
            with contextlib.suppress(Exception):  # the driver may have taken it back
                self._conn.terminate()

    def is_on(self, conn: object) -> bool:
        """Whether this is the transaction that `conn` has open."""
        return conn is self._conn

    # --- what is said in it ---

    @property
    def _repository(self) -> DurableRepository:
        """The verbs on its connection, with which the handler may have done what it liked."""
        conn, desk = self._conn, self._context.desk
        assert conn is not None
        if not in_transaction(conn):
            raise TransactionRequiredError("the transaction of ctx.transaction() was ended inside it")
        return verbs(conn, desk.settings, joins=True)

    async def checkpoint(self, value: Any) -> None:
        """Store row errors and the checkpoint in it."""
        context, desk, slot = self._context, self._context.desk, self._context.slot
        await self.tell_row_errors()
        sent_at = time.monotonic()
        await context.under(
            self._repository.checkpoint(
                slot.lease,
                value,
                rows_done=slot.rows_done,
                rows_failed=slot.rows_failed,
                renew_seconds=desk.settings.lease_seconds,
            )
        )
        self._saved = (value,)
        if self._lease_before is None:
            self._lease_before = (slot.renewed_at, slot.lost_at)
        # Nobody takes the chunk back while its row is locked, and heartbeats do not get at it: so this goes on as long
        # as the database has it, for as long as the transaction is open.
        slot.renewed(sent_at, desk.settings.lease_seconds)

    async def complete(self, outcome: ChunkOutcome) -> None:
        """Store row errors and the completion in it."""
        context = self._context
        await self.tell_row_errors()
        settled = await context.under(self._repository.complete(context.slot.lease, outcome))
        self._last = settled.last
        context.slot.completing = True

    async def tell_row_errors(self) -> None:
        """Store the row errors that wait, in it."""
        context = self._context
        errors = context.row_errors
        if errors.unsent:
            await context.under(
                tell_row_errors(self._repository, context.slot.lease, errors.unsent, context.desk.settings)
            )
            errors.were_sent(self._before[0])

    # --- its end ---

    async def _take_fence(self) -> None:
        context = self._context
        assert self._conn is not None
        if self._last is not None:
            # The chunk is done in here, so its lease is no more; but a statement of the handler may have failed and
            # been caught, and then COMMIT would roll all of it back without a word.
            if not in_transaction(self._conn):
                raise TransactionRequiredError("the transaction of ctx.transaction() was ended inside it")
            with mapped_errors():
                await self._conn.execute("select 1")
            return
        context.check()
        if context.row_errors.unsent:
            await self.tell_row_errors()
        else:
            # No row error at all: this only asks for the fence, and takes it.
            await context.under(self._repository.row_errors_add(context.slot.lease, []))

    async def _commit(self) -> None:
        context, slot, desk = self._context, self._context.slot, self._context.desk
        try:
            with mapped_errors(), anyio.fail_after(desk.patience):
                await self._transaction.commit()
        except BaseException as error:
            if isinstance(error, RelayDispatchError) and not isinstance(error, ConnectionLostError):
                slot.completing = False  # it was refused, say by a deferred constraint; or was never sent
            elif not self._may_repeat:
                slot.unsure = True
            raise
        self._is_clean = True
        context.row_errors.committed()
        if self._saved is not None:
            context.was_saved(self._saved[0])
        if self._last is not None:
            slot.completing = False
            slot.settled_last = self._last
        desk.moved(slot)

    async def _roll_back(self) -> None:
        assert self._conn is not None
        if self._last is not None:
            self._context.slot.completing = False  # nothing of it can have been committed
        # Whatever comes of this, the connection is put away by what the driver thinks of it.
        with contextlib.suppress(Exception), anyio.move_on_after(_ROLLBACK_SECONDS, shield=True):
            if not self._conn.is_closed():
                await self._transaction.rollback()
                self._is_clean = True

    def _undo(self) -> None:
        mark, rows_done, rows_failed, last_row = self._before
        self._context.row_errors.rolled_back(mark)
        self._context.last_row = last_row
        slot = self._context.slot
        slot.rows_done, slot.rows_failed = rows_done, rows_failed
        if self._lease_before is not None:
            slot.renewed_at, slot.lost_at = self._lease_before

    async def _put_back(self, error: BaseException | None) -> None:
        """Give the connection back; what broke it is told to the pool, and an error of the handler's is not."""
        told: BaseException | None = _Interrupted()  # then the driver's pool looks at it
        try:
            if self._is_clean:
                told = await self._leave_nothing()
            elif error is not None and isinstance(ours := translate(error) or error, DatabaseUnavailableError):
                told = ours
        finally:
            await self._lent.__aexit__(None if told is None else type(told), told, None)

    async def _leave_nothing(self) -> BaseException | None:
        """Take back what the handler has set in the session, or end it. A pool of the caller's does so by itself."""
        assert self._conn is not None
        if self._context.desk.database.is_borrowed:
            return None
        is_whole = False
        try:
            # What was committed is; whether this can be done is nobody's affair.
            with contextlib.suppress(RelayDispatchError), anyio.move_on_after(_ROLLBACK_SECONDS):
                is_whole = await as_opened(self._conn)
        finally:
            if not is_whole:
                self.cut()
        return None if is_whole else _Interrupted()


class _Interrupted(Exception):  # noqa: N818  (not an error: it says that a block ended early)
    pass
