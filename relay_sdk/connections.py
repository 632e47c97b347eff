"""What the relays of one process share: the pool, the listening connection and the doorbell."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

import anyio
from anyio.abc import TaskStatus

from dispatch_core.database import Connection, Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import ConfigurationError
from dispatch_core.ids import new_id
from dispatch_core.listener import Listener
from dispatch_core.migrate import check_schema
from dispatch_core.ring_inside import RingInside
from dispatch_core.settings import CoreSettings
from dispatch_core.tenancy import warn_if_bypassing

__all__ = ["Connections", "last_connection"]

logger = logging.getLogger(__name__)

# With what a session does by hand after that, below the three seconds that a stop may last beyond its grace.
_CUT_SECONDS: Final = 1.8


class Connections:
    """An async context manager, which opens the pool and checks the schema and the login; `run` does the rest.

    Connections to PostgreSQL are the pool's, and one for LISTEN and NOTIFY.
    """

    def __init__(
        self, core: CoreSettings, *, pool: Any = None, command_timeout_seconds: float, rooms: Sequence[str], users: int
    ) -> None:
        """Take the caller's `pool` (left open), or else the DSN in `core`; and the rooms that `users` work in."""
        self._core = core
        self._rooms = list(rooms)
        # Said for each statement here too: a pool of the caller's may have no limit.
        self._patience = min(core.command_timeout_seconds, command_timeout_seconds)
        if pool is not None:
            self.database = Database.wrap(pool, connect_timeout=core.connect_timeout_seconds)
        else:
            self.database = Database(
                core.require_dsn(),
                min_size=core.pool_min_size,
                max_size=core.pool_max_size,
                statement_cache_size=core.statement_cache_size,
                connect_timeout=core.connect_timeout_seconds,
                command_timeout=self._patience,
                application_name=core.application_name,
            )
        self.ring_inside = RingInside()
        self.listener: Listener | None = None
        if pool is None or core.dsn is not None or core.listen_dsn is not None:
            self.listener = Listener(
                core.require_listen_dsn(),
                name="relay",
                application_name=core.application_name,
                connect_timeout=core.connect_timeout_seconds,
                probe_seconds=core.probe_seconds,
                probe_timeout_seconds=core.probe_timeout_seconds,
                backoff_cap=core.reconnect_cap_seconds,
            )
            self.listener.on_round_trip(self.ring_inside.round_trip)
        self.heartbeat_dsn = None if pool is None or core.dsn is None else core.require_dsn()
        """For a connection of its own beside a pool of the caller's, whose DSN is not known."""
        self.borrows_heartbeat = pool is not None and self.heartbeat_dsn is None
        """Whether the heartbeat of chunks has to use a connection of that pool."""
        transports = (self.database,) if self.listener is None else (self.listener, self.database)
        self.doorbell = Doorbell(*transports)
        self._stack = AsyncExitStack()
        self._users = 0
        self._all_users = users
        self._stops: dict[object, float] = {}
        self._cut_timer: asyncio.TimerHandle | None = None
        self._permits: anyio.Semaphore | None = None

    @property
    def listener_state(self) -> str:
        """The listener's state; without one, `polling_only`."""
        return "polling_only" if self.listener is None else self.listener.state

    async def __aenter__(self) -> Self:
        """Open the pool and check what is behind it.

        Raises: DatabaseError, SchemaMismatchError, TenancyDeniedError.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.database)
            async with self.database.connection() as conn:
                with anyio.fail_after(self._patience):
                    await check_schema(conn, rooms=self._rooms)
                    await warn_if_bypassing(conn, logger)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._stack.__aexit__(kind, error, traceback)
        finally:
            if self._cut_timer is not None:
                self._cut_timer.cancel()

    async def require_worker(self, tenants: Sequence[str], relay_id: str, instance_id: str) -> None:
        """See to it that this login may claim, also where it is a gateway's by mistake, which may know the channel.

        It asks for a claim that never was: only a worker of these tenants and this relay is told that there is none.

        Raises: TenancyDeniedError.
        """
        async with self.database.connection() as conn:
            with anyio.fail_after(self._patience):
                await RelayDispatchRepository(conn).claim_again(
                    relay_id, claimed_by=instance_id, claim_id=new_id(), tenants=tenants
                )

    async def subscribe(self, tenant: str, relay_id: str, callback: Callable[[str], None]) -> None:
        """Have `callback(payload)` called for each ring of this relay of this tenant, once `run` listens.

        Raises: TenancyDeniedError for a login that is not bound to them.
        """
        async with self.database.connection() as conn:
            with anyio.fail_after(self._patience):
                channel = await RelayDispatchRepository(conn, tenant).channel("wake", relay_id)
        if self.listener is not None:
            await self.listener.subscribe(channel, callback)

    def permits(self, most: int) -> anyio.Semaphore:
        """Return what lets so many transactions of handlers, but one at least, have a connection of the pool at once.

        It is one for all relays: those of one process share the pool.
        """
        if self._permits is None:
            self._permits = anyio.Semaphore(max(most, 1))
        return self._permits

    def enter(self) -> None:
        """Count a relay that works with these."""
        self._users += 1

    def stops(self, user: object, at: float) -> None:
        """Note until when (monotonic) a relay that works with these gives its handlers to end; it may say so again.

        A little after the last of them, whatever still waits for the database is cut off from it: of what a stop
        does in turn (a claim is cancelled, rings are sent, connections are closed) each has a bound of its own, and
        behind a black hole it is their sum that its owner waits for.
        """
        self._stops[user] = at
        if self._cut_timer is not None:
            self._cut_timer.cancel()
        if len(self._stops) == self._all_users:
            wait = max(self._stops.values()) + _CUT_SECONDS - time.monotonic()
            self._cut_timer = asyncio.get_running_loop().call_later(max(wait, 0.0), self._cut_all)

    def _cut_all(self) -> None:
        self.database.terminate()
        if self.listener is not None:
            self.listener.terminate()

    def leave(self, *, cut: bool) -> None:
        """Count a relay out. `cut`: the database does not answer it; when it is the last, all connections are cut.

        Otherwise each statement under way would be waited for, in the end, for as long as a dead network is believed.
        """
        self._users -= 1
        if cut:
            self.cut()

    def cut(self) -> None:
        """End all connections without a good-bye, unless another relay works with them. Idempotent: yes."""
        if self._users <= 0:
            self._cut_all()

    async def finish(self) -> None:
        """Send the rings that wait, within a second, before `run` is cancelled."""
        await self.doorbell.finish()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen and ring until cancelled; `started` once LISTEN is confirmed or its first try has failed."""
        async with anyio.create_task_group() as group:
            await group.start(self.doorbell.run)
            if self.listener is None:
                logger.info("no DSN to listen on: polling only")
            else:
                await group.start(self.listener.run)
            task_status.started()


@asynccontextmanager
async def last_connection(connections: Connections) -> AsyncIterator[Connection]:
    """Open a new connection: those of the pool may just have been found dead."""
    try:
        conn = await connections.database.connect_dedicated("last")
    except ConfigurationError:
        async with connections.database.connection() as conn:
            yield conn
        return
    try:
        yield conn
    finally:
        # Each statement was a transaction of its own, so there is nothing to say good-bye for.
        conn.terminate()
