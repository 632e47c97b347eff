"""Lend pooled connections: kept between their uses, bounded in number, and never lent again where they may be broken.

A connection is in one of these states:

    being opened -> lent      it is its turn to be tried (`pacing`), and the driver's pool has opened it
    lent         -> kept      its block ended well; or it goes straight to whoever waits longest
    kept         -> lent      without a turn of the event loop
    lent         -> gone      broken, old or of a retired generation: the driver's pool closes it, or makes it whole
    kept         -> gone      retired, found closed, or idle for long: it is cut

**Kept here.** In the driver's pool acquire and release cost as much as a statement: a task, a shield, three timers. A
caller's pool is left as it is, since others draw on it too: each use is an acquire and a release.

**Places.** Each connection that is being opened, lent or kept has one; there are as many as the pool may have
connections. Whoever finds none waits in turn, for a connection that comes back or for a place that becomes free.

**Generations.** What broke one connection (a failover, a dead route) has most likely broken all that are as old. So
when one is lost, all of its generation are cut: those that are kept at once, those that are lent when they come back.

Nothing waits without a bound: a black-holed socket raises no error by itself, and neither `close` nor the driver's
`release` would ever return on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, cast

import anyio

from dispatch_core.connecting import again, prove, refuses_login
from dispatch_core.connection import PUT_AWAY_SECONDS, Connection, cut, is_open, watch_socket
from dispatch_core.driver_errors import DRIVER_ERRORS, READ_ONLY, mapped_errors
from dispatch_core.errors import DatabaseUnavailableError, RelayDispatchError
from dispatch_core.openings import Openings
from dispatch_core.pacing import Pace
from dispatch_core.task_groups import TaskGroup

__all__ = ["Kept", "Pool"]

_KEPT_SECONDS: Final = 60.0
"""After so long a connection goes through the driver's pool once, which replaces those that have served many
statements."""

_IDLE_SECONDS: Final = 300.0
"""Above the smallest size, after so long without a use a connection is closed, as the driver's pool does it."""

_WAITED_SHARE: Final = 0.75
"""Of a caller's time, how much may be spent on the wait for a connection."""

_FULL: Final = "53300"
"""too_many_connections: the server lives, and so do the connections that we have"""


class Kept:
    """A connection of the driver's pool that is lent, or kept for the next one who asks."""

    __slots__ = ("conn", "driver_pool", "generation", "since", "used_at")

    def __init__(self, driver_pool: Any, conn: Connection, generation: int) -> None:
        self.driver_pool = driver_pool
        self.conn = conn
        self.generation = generation
        self.since = self.used_at = time.monotonic()


class Pool:
    """The connections of one pool of the driver's: our own, from `open` to `close`; or a caller's, always."""

    def __init__(
        self,
        *,
        connect_timeout: float,
        command_timeout: float,
        min_size: int = 0,
        max_size: int = 0,
        borrowed: Any = None,
    ) -> None:
        """Timeouts are seconds. `borrowed`: a pool of the caller's, which has a size of its own."""
        self._min_size = min_size
        self._max_size = max_size
        self._connect_timeout = connect_timeout
        self.command_timeout: Final = command_timeout
        self.is_borrowed: Final = borrowed is not None
        self.is_open = self.is_borrowed
        self._driver_pool: Any = borrowed
        """Of our own: the one that is open, or was last."""
        # How the connections of a caller's pool are opened is its owner's. That nobody is free there says nothing of
        # the server. Our own gets in `open` the one that all have who use its DSN.
        self._pace = Pace(silence_counts=not self.is_borrowed)
        self._idle: list[Kept] = []
        self._waiters: deque[asyncio.Future[Kept | None]] = deque()
        self._places = 0
        """How many connections are lent, kept, or being opened."""
        self._opening = 0
        """How many of them are being opened."""
        self._openings = Openings[Connection | None]()
        self._generation = 0
        """How often connections have been retired; those of before are not used again."""
        self.opened = 0
        """How many connections were opened: each may lead to another server than those before, after a failover. Of a
        pool of the caller's, where that is not seen, how many were lent."""
        self._silent_until = 0.0
        """The database has let us wait for the whole of the time that putting a connection away may take."""

    # --- from its opening to its end ---

    @property
    def is_away(self) -> bool:
        """Whether there is no connection, and the last try to open one has failed."""
        return self._pace.failures > 0 and self._places <= self._opening

    @property
    def max_size(self) -> int:
        """How many connections there may be."""
        return int(self._driver_pool.get_max_size()) if self.is_borrowed else self._max_size

    async def open(self, driver_pool: Any, pace: Pace) -> None:
        """Open a pool of the driver's that nobody has opened yet, with the first connections.

        Raises: what the driver does.
        """
        self._pace = pace
        first: list[Kept] = []

        async def open_one() -> None:
            conn = await self._acquire(driver_pool, self._connect_timeout)
            first.append(Kept(driver_pool, conn, self._generation))

        try:
            with anyio.fail_after(self._connect_timeout + 0.5):
                await driver_pool
                if self._min_size:
                    await open_one()  # by itself: what is wrong is wrong for all, and raised as it is
                async with TaskGroup() as group:
                    for _ in range(self._min_size - 1):
                        group.start_soon(open_one)
        except BaseExceptionGroup as faults:
            driver_pool.terminate()
            raise faults.exceptions[0] from None
        except BaseException:
            driver_pool.terminate()
            raise
        self._driver_pool, self._idle, self._places = driver_pool, first, len(first)
        self.is_open = True

    async def on_opened(self, conn: Connection) -> None:
        """Note that the driver's pool has opened a connection, before it is lent."""
        self.opened += 1
        await watch_socket(conn)

    async def close(self) -> None:
        """Close it, by force where a connection does not come back in time. Idempotent: yes."""
        if self.is_borrowed or not self.is_open:
            return
        driver_pool, self.is_open = self._driver_pool, False
        self._openings.cancel()
        if time.monotonic() < self._silent_until:
            driver_pool.terminate()  # it has just been waited for in vain: a good-bye would be too
            return
        try:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + PUT_AWAY_SECONDS), mapped_errors():
                await self._openings.ended()
                while self._idle:
                    self._places -= 1
                    await driver_pool.release(self._idle.pop().conn)
                await driver_pool.close()
        except RelayDispatchError:
            pass  # what cannot be closed in good order is cut below; there is nobody to tell
        finally:
            driver_pool.terminate()

    def terminate(self) -> None:
        """Cut all connections of our own pool at once, also while it is being closed. Idempotent: yes."""
        self._openings.cancel()
        if not self.is_borrowed and self._driver_pool is not None:
            self._driver_pool.terminate()

    # --- lending ---

    def take(self) -> Kept | None:
        """Return a connection that is kept and usable, without waiting for anything."""
        while self._idle:
            kept = self._idle.pop()
            if is_open(kept.conn):
                return kept
            self._drop(kept)  # mostly the driver has taken it back by itself
        return None

    async def get(self, within: float | None) -> Kept:
        """Open a connection or wait for one, for a caller who must have got and used it within so many seconds.

        Raises: DatabaseUnavailableError.
        """
        if not self.is_open:
            raise DatabaseUnavailableError("this Database is not open")
        driver_pool = self._driver_pool
        # The rest is for the statement: cut off at once, it would take the connection with it that others wait for.
        seconds = self._connect_timeout if within is None else min(within * _WAITED_SHARE, self._connect_timeout)
        until = time.monotonic() + seconds
        # Not acquire's own timeout, which takes a task for each call.
        with mapped_errors(connecting=True), anyio.move_on_after(seconds):
            while True:
                if not self.is_borrowed and (self._places >= self._max_size or self._is_full()):
                    # Not for long where there may be room for one more by then.
                    patience = math.inf if self._places >= self._max_size else self._pace.pause_seconds()
                    with anyio.move_on_after(patience) as no_place:
                        kept = await self._wait_for_place()
                        if kept is not None:
                            return kept
                    if no_place.cancelled_caught:
                        self._places += 1
                else:
                    self._places += 1
                self._opening += 1
                # From before: what retires connections meanwhile means this one too.
                generation = self._generation
                left: list[asyncio.Task[Connection | None]] = []
                try:
                    conn = await self._acquire(driver_pool, until - time.monotonic(), left)
                    self._opening -= 1
                    self.opened += self.is_borrowed
                    return Kept(driver_pool, conn, generation)
                except BaseException:
                    if left:  # the place is the connection's that is still being opened
                        left[0].add_done_callback(partial(self._came_late, driver_pool, generation))
                        raise
                    self._opening -= 1
                    self._give_up_place()
                    if self.is_borrowed or not self._is_full():
                        raise
                kept = self.take()
                if kept is not None:
                    return kept
        raise DatabaseUnavailableError(f"no connection was free, or could be opened, in time{self._why_not()}")

    def _is_full(self) -> bool:
        """Whether the server takes no more from us, and we have some that will come back."""
        return self._places > self._opening and getattr(self._pace.last_error, "sqlstate", None) == _FULL

    async def _acquire(
        self, driver_pool: Any, within: float, left: list[asyncio.Task[Connection | None]] | None = None
    ) -> Connection:
        """Take a connection of the driver's pool, which mostly opens one: when it is our turn to try (D156).

        With `left` it is opened also where the caller is cancelled: then the task that opens it is added there.
        """

        async def attempt(proves: bool) -> Connection:
            conn = cast("Connection", await driver_pool.acquire())
            if proves and not self.is_borrowed:
                await prove(conn, self._pace, self._connect_timeout)
            return conn

        async def carry(trying: Coroutine[Any, Any, Connection | None]) -> Connection | None:
            return await (trying if left is None else self._openings.carry(trying, left.append))

        return await self._pace.run(
            attempt,
            until=time.monotonic() + within,
            again=again,
            refuses=refuses_login,
            # In a pool of the caller's it is his connection, and his wait.
            carry=None if self.is_borrowed else carry,
        )

    def _came_late(self, driver_pool: Any, generation: int, task: asyncio.Task[Connection | None]) -> None:
        """Keep a connection whose caller has not waited until it was open, for the next one who asks."""
        self._opening -= 1
        conn = None if task.cancelled() or task.exception() is not None else task.result()
        if conn is None:
            self._give_up_place()
            return
        kept = Kept(driver_pool, conn, generation)
        if not self.keep(kept):
            self._drop(kept)

    def _why_not(self) -> str:
        why = self._pace.last_error
        return f"; nothing was sent (the last try: {again(why)})" if why is not None else "; nothing was sent"

    async def _wait_for_place(self) -> Kept | None:
        """Wait for a connection that somebody gives back, or (None) for leave to open one."""
        waiter: asyncio.Future[Kept | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.done() and not waiter.cancelled():
                # Cancelled in the moment in which it was served: the next one is.
                kept = waiter.result()
                if kept is None:
                    self._give_up_place()
                elif not self.keep(kept):
                    self._drop(kept)
            raise

    # --- taking back ---

    def keep(self, kept: Kept) -> bool:
        """Keep a connection that is whole for the next one who asks; False where the driver's pool should see it."""
        conn, now = kept.conn, time.monotonic()
        if (
            self.is_borrowed
            or not self.is_open
            or kept.generation != self._generation
            or now - kept.since > _KEPT_SECONDS
            or not is_open(conn)
            or conn.is_in_transaction()
        ):
            return False
        kept.used_at = now
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(kept)
                return True
        self._idle.append(kept)
        # The one that was used longest ago, as the driver's pool would do it.
        if now - self._idle[0].used_at > _IDLE_SECONDS and self._places > self._min_size:
            self._drop(self._idle.pop(0))
        return True

    async def put_away(self, kept: Kept) -> None:
        """Give a connection back to the driver's pool, which closes it or makes it whole."""
        began = time.monotonic()
        try:
            # Shielded, or a cancelled block would leave its statement running. The timeout bounds the wait for
            # asyncpg's cancel request; after it, asyncpg cuts the connection.
            # A rollback that fails is no error of the block's: the driver has cut the connection then.
            with anyio.CancelScope(shield=True), contextlib.suppress(*DRIVER_ERRORS):
                try:
                    if not kept.conn.is_closed() and kept.conn.is_in_transaction():
                        # A cancellation has cut its rollback short. The driver makes up for that, but logs an error.
                        with anyio.fail_after(PUT_AWAY_SECONDS):
                            await kept.conn.execute("ROLLBACK")
                except DRIVER_ERRORS:
                    cut(kept.conn)
                except BaseException:
                    # A cancellation of asyncio's own, which no shield of anyio's holds off. Cut, it is released too.
                    cut(kept.conn)
                    raise
                # In any case: what is not released the driver's pool counts as lent for ever.
                await kept.driver_pool.release(kept.conn, timeout=PUT_AWAY_SECONDS)
        finally:
            if time.monotonic() - began >= PUT_AWAY_SECONDS:
                self._silent_until = time.monotonic() + PUT_AWAY_SECONDS
            self._give_up_place()

    async def retire(self, broken: Kept, lost: DatabaseUnavailableError) -> None:
        """Cut a connection that may be broken, and see to it that none of its generation is used again."""
        self._pace.suspect(must_write=lost.sqlstate == READ_ONLY)
        cut(broken.conn)
        if broken.generation != self._generation:
            return  # retired already; those that were opened since have nothing to do with it
        self._generation += 1
        while self._idle:
            self._drop(self._idle.pop())
        if self.is_open:
            await self._driver_pool.expire_connections()

    def _drop(self, kept: Kept) -> None:
        """Cut a connection that is nobody's, and let its place go to the next one who waits."""
        cut(kept.conn)
        self._give_up_place()

    def _give_up_place(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._places -= 1
