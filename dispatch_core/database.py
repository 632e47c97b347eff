"""PostgreSQL as everything above sees it: statements on connections that are lent, and errors that are ours.

This is the one way to asyncpg. What is behind it has a module each, which nobody above imports:

    driver_errors   what the driver raises, as one of ours
    dsn_faults      the same for a DSN that is wrong, or leads nowhere
    connection      one connection: its statements' names, its session, its socket, its end
    connecting      how one is opened: in turn with everybody else, at the first host that takes writes
    pool            how they are kept, shared and retired
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Literal, Self, cast

import asyncpg

from dispatch_core.connecting import connect, open_for_pool
from dispatch_core.connection import (
    Connection,
    OwnNames,
    as_opened,
    close_connection,
    cut,
    has_codecs,
    in_transaction,
    is_open,
    no_reset,
    takes_no_writes,
)
from dispatch_core.driver_errors import DRIVER_ERRORS, mapped_errors, translate
from dispatch_core.dsn_faults import dsn_faults
from dispatch_core.errors import ConfigurationError, DatabaseUnavailableError
from dispatch_core.pacing import SILENT_SECONDS, pace_of
from dispatch_core.pool import Kept, Pool

__all__ = [
    "DRIVER_ERRORS",
    "Connection",
    "Database",
    "Lent",
    "as_opened",
    "close_connection",
    "connect",
    "has_codecs",
    "in_transaction",
    "mapped_errors",
    "takes_no_writes",
    "translate",
]


class Database:
    """PostgreSQL as an SDK sees it: pooled connections for statements, dedicated ones for what must last.

    An async context manager. With `wrap` it borrows the caller's pool and leaves it open.
    """

    def __init__(
        self,
        dsn: str,
        *,
        min_size: int = 1,
        max_size: int = 10,
        statement_cache_size: int = 100,
        connect_timeout: float = 10.0,
        command_timeout: float = 30.0,
        application_name: str = "relay-dispatch",
    ) -> None:
        """Timeouts are seconds. Nothing is opened before ``async with``."""
        if min_size > max_size:
            raise ConfigurationError(f"the pool's min_size ({min_size}) is above its max_size ({max_size})")
        self._dsn = dsn
        """Empty where the pool is the caller's."""
        self._statement_cache_size = statement_cache_size
        self._connect_timeout = connect_timeout
        self._command_timeout = command_timeout
        self._application_name = application_name
        self._pool = Pool(
            min_size=min_size, max_size=max_size, connect_timeout=connect_timeout, command_timeout=command_timeout
        )

    @classmethod
    def wrap(cls, pool: Any, *, connect_timeout: float = 10.0, command_timeout: float = 30.0) -> Database:
        """Use a pool of asyncpg that the caller opened and will close; its own settings and reset hold.

        `connect_timeout`: seconds to wait for a connection of it. `command_timeout`: for `execute` alone; the pool may
        have none, so whoever uses `connection` sets a bound of its own.
        """
        database = cls("", connect_timeout=connect_timeout, command_timeout=command_timeout)
        database._pool = Pool(connect_timeout=connect_timeout, command_timeout=command_timeout, borrowed=pool)
        return database

    async def __aenter__(self) -> Self:
        """Open the pool with its first connections.

        Raises: as `connect`.
        """
        if self._pool.is_borrowed:
            return self
        if self._pool.is_open:
            raise ConfigurationError("this Database is open already")
        pace = pace_of(self._dsn)
        with mapped_errors(connecting=True), dsn_faults(self._dsn):
            driver_pool = asyncpg.create_pool(
                self._dsn,
                # The first are opened by `Pool`. With a floor the driver would have a task of its own, which tries for
                # ever to reach it beside all who wait for a connection, and logs a traceback each time.
                min_size=0,
                max_size=self._pool.max_size,
                statement_cache_size=self._statement_cache_size,
                timeout=self._connect_timeout,
                command_timeout=self._command_timeout,
                server_settings={"application_name": self._application_name},
                connect=cast("Any", open_for_pool),
                connection_class=OwnNames,
                init=self._pool.on_opened,
                reset=no_reset,
            )
            await self._pool.open(driver_pool, pace)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pool if it is ours, by force where a connection does not come back in time."""
        await self._pool.close()

    def terminate(self) -> None:
        """Cut all connections of our own pool at once, for an owner that must leave although the network is dead;
        also while it is being closed.

        Statements under way fail with ConnectionLostError, later ones with DatabaseUnavailableError. Idempotent: yes.
        """
        self._pool.terminate()

    @property
    def is_borrowed(self) -> bool:
        """Whether the pool is the caller's, and so its codecs, search path and settings."""
        return self._pool.is_borrowed

    @property
    def is_away(self) -> bool:
        """Whether there is no connection, and the last try to open one has failed."""
        return self._pool.is_away

    @property
    def opened(self) -> int:
        """How many connections were opened: each may lead to another server than those before, after a failover. Of a
        pool of the caller's, where that is not seen, how many were lent."""
        return self._pool.opened

    @property
    def command_timeout(self) -> float:
        """Seconds for one statement."""
        return self._command_timeout

    @property
    def max_size(self) -> int:
        """How many connections the pool may have."""
        return self._pool.max_size

    def connection(self, within: float | None = None) -> Lent:
        """Lend a pooled connection for the length of an `async with`, with the errors of the block mapped. Not for user
        code: an `OSError` is taken for the network's.

        A connection that may be broken does not go back: it is cut, and the pool's other old ones with it, because what
        broke one (a failover, a dead route) has most likely broken them too; unless all that is known is that it did
        not answer within less than a second.

        `within`: seconds in which the caller must have got and used it; three quarters of them are waited at most, if
        that is less than the connect timeout.

        Raises: DatabaseUnavailableError where none is free or can be opened in time.
        """
        return Lent(self._pool, within)

    async def execute(self, sql: str, *args: object) -> list[Any]:
        """Run one statement on a pooled connection, within the command timeout also on a pool that has none.

        Transaction: its own. Raises: as `connection`; ConnectionLostError where there was no answer in time.
        """
        async with self.connection() as conn:
            # The driver's own timer, which it sets anyway, and not one more around it.
            rows: list[Any] = await conn.fetch(sql, *args, timeout=self._command_timeout)
            return rows

    async def connect_dedicated(self, name: str | None = None, *, dsn: str | None = None) -> Connection:
        """Open a connection outside the pool, for the caller to close with `close_connection`.

        `name` is added to the application name; `dsn` replaces the pool's.

        Raises: as `connect`; ConfigurationError for a wrapped pool without `dsn`.
        """
        target = dsn or self._dsn
        if not target:
            raise ConfigurationError("a dedicated connection needs a DSN: none can be read from a pool that was given")
        return await connect(
            target,
            connect_timeout=self._connect_timeout,
            command_timeout=self._command_timeout,
            statement_cache_size=self._statement_cache_size,
            application_name=f"{self._application_name} {name}" if name else self._application_name,
        )


class Lent:
    """A pooled connection for the length of an `async with`; see `Database.connection`."""

    # A class and not a generator: this stands around every statement.
    __slots__ = ("_kept", "_pool", "_since", "_within")

    def __init__(self, pool: Pool, within: float | None) -> None:
        self._pool = pool
        self._within = within
        self._kept: Kept | None = None
        self._since = 0.0

    async def __aenter__(self) -> Connection:
        if self._within is not None and self._within <= 0:
            # Not lent for a statement that has no time left: when that fails, the whole pool is taken for broken.
            raise DatabaseUnavailableError("no time was left to ask for a connection; nothing was sent")
        kept = self._pool.take()
        if kept is None:
            kept = await self._pool.get(self._within)
        self._kept = kept
        self._since = time.monotonic()
        return kept.conn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        kept, pool = self._kept, self._pool
        assert kept is not None
        if error is None:
            if not pool.keep(kept):
                await pool.put_away(kept)
            return False
        ours = translate(error)
        lost = ours or error
        if isinstance(lost, DatabaseUnavailableError):
            # Who had but little time left, as after a long wait for a connection, says nothing of the others: cut for
            # him, they would all be opened anew, while those who wait for them come to be in haste too.
            is_silent = lost.sqlstate is None and is_open(kept.conn)
            if is_silent and time.monotonic() - self._since < min(SILENT_SECONDS, pool.command_timeout) * 0.9:
                cut(kept.conn)
            else:
                await pool.retire(kept, lost)
        await pool.put_away(kept)
        if ours is not None:
            raise ours from error
        return False
