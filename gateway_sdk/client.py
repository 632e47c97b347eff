"""The gateway's client: puts the pieces together, owns their tasks, and goes down with them.

database   pooled connections for statements
listener   one connection of this process for notifications
doorbell   rings for what was committed
lanes      statements that concurrent calls share
waiter     waits, by job id
durable    durable jobs: submissions, decisions, waits and watches
sweeper    tidies
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import anyio

from dispatch_core.database import Connection, Database
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import ClientClosedError, ConfigurationError
from dispatch_core.listener import Listener
from dispatch_core.migrate import check_schema
from dispatch_core.requests import Preparer
from dispatch_core.settings import DurableJobsSettings
from dispatch_core.task_groups import TaskGroup
from dispatch_core.tenancy import warn_if_bypassing
from gateway_sdk.bounded import bounded
from gateway_sdk.channels import ResultChannels
from gateway_sdk.direct import DirectStatements
from gateway_sdk.durable import DurableRoom
from gateway_sdk.health import GatewayCounters, GatewayHealth
from gateway_sdk.lanes import Lanes
from gateway_sdk.outbox import OutboxDrainer
from gateway_sdk.outbox_sinks import outbox_of
from gateway_sdk.runtime import Runtime
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.sweeper import Sweeper
from gateway_sdk.tasks import Tasks
from gateway_sdk.tenant import TenantClient
from gateway_sdk.waiter import ResultWaiter

__all__ = ["GatewayClient"]

logger = logging.getLogger(__name__)

# Below the three seconds that closing may last beyond its grace.
_CUT_SECONDS: Final = 2.0

# Of a start that has failed or is given up. Before that its listener may have taken two to put its connection away.
_UNDO_SECONDS: Final = 0.5


class GatewayClient:
    """Everything a gateway does, in one object for the whole process; an async context manager.

    Give `dsn`, or `settings`, or `pool`: an asyncpg pool of the caller's, which stays open. With a pool, results are
    pushed only if there is a DSN for the listening connection too (`listen_dsn`, or the settings'); else they are
    polled. With nothing, the environment is read: RELAY_DISPATCH_DSN.

    `outbox`: a drainer that is to live with the client, where OUTBOX_DRAIN_INTERVAL_SEC is above 0. Without one it is
    made of the settings, with OUTBOX_ROUTES for its sink.

    `durable`: how durable jobs are submitted and kept; else it is read from the environment when they are first used.

    Any task may use it while it is open. It must be closed by the task that opened it. If one of its background tasks
    fails, which nothing foreseen makes it do, the block is cancelled, calls under way end with ClientClosedError, and
    the cause is raised at the end of the block.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        listen_dsn: str | None = None,
        settings: GatewaySettings | None = None,
        pool: Any = None,
        outbox: OutboxDrainer | None = None,
        durable: DurableJobsSettings | None = None,
    ) -> None:
        if dsn is not None and pool is not None:
            raise ConfigurationError("give dsn= or pool=, not both; for notifications beside a pool, listen_dsn=")
        self._settings = (settings or GatewaySettings.load()).with_dsn(dsn, listen_dsn)
        self._durable = durable
        self._pool = pool
        self._stack: AsyncExitStack | None = None
        self._runtime: Runtime | None = None
        self._close_by: float | None = None
        if pool is None:
            self._settings.core.require_dsn()
        self._outbox = outbox_of(self, outbox)

    @property
    def settings(self) -> GatewaySettings:
        return self._settings

    @property
    def outbox(self) -> OutboxDrainer | None:
        """The outbox drainer that lives with the client; None where none was given and the settings ask for none."""
        return self._outbox

    @property
    def runtime(self) -> Runtime:
        """The pieces of the open client, for other parts of this package. Raises: ClientClosedError."""
        if self._runtime is None:
            raise ClientClosedError("the client is not open: use `async with`")
        return self._runtime

    def tenant(self, tenant_id: str, *, max_pending: int | None = None) -> TenantClient:
        """Return the verbs for one tenant: cheap, kept nowhere.

        `max_pending`: how many of its jobs may wait for a relay before an enqueue is refused; None is as the settings
        say, 0 any number.

        Raises: TenancyUnboundError for no tenant or ''; InvalidNameError; ClientClosedError before the client is open.
        """
        return TenantClient(self.runtime, tenant_id, max_pending)

    def health(self) -> GatewayHealth:
        """Return what the client has counted and whether results are pushed. Costs nothing; asks nobody.

        Raises: ClientClosedError before the client is open.
        """
        runtime = self.runtime
        listener = runtime.listener
        counters = runtime.counters
        problem = None if listener is None or listener.last_error is None else str(listener.last_error)
        return GatewayHealth(
            state="polling_only" if listener is None else listener.state,
            problem=problem,
            channels=len(runtime.channels),
            waiting=runtime.waiter.waiting,
            tenants=runtime.waiter.tenants,
            enqueued=counters.enqueued,
            enqueue_statements=counters.enqueue_statements,
            refused=counters.refused,
            polled=counters.polled,
            poll_statements=counters.poll_statements,
            wakes_by_push=counters.wakes_by_push,
            wakes_by_poll=counters.wakes_by_poll,
            notifications=0 if listener is None else listener.notifications,
            rings_sent=runtime.doorbell.sent,
            rings_lost=runtime.doorbell.lost,
        )

    # --- open and close -------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Connect, check the schema and the rights, and start to listen.

        Raises: DatabaseUnavailableError, SchemaMismatchError, TenancyDeniedError, ConfigurationError.
        """
        if self._stack is not None:
            raise ConfigurationError("this client is open already")
        timer: asyncio.TimerHandle | None = None
        try:
            async with AsyncExitStack() as stack:
                database = await stack.enter_async_context(self._database())
                try:
                    await self._start(stack, database)
                except BaseException:
                    timer = asyncio.get_running_loop().call_later(_UNDO_SECONDS, database.terminate)
                    raise
                self._stack = stack.pop_all()
        finally:
            if timer is not None:
                timer.cancel()
        return self

    async def _start(self, stack: AsyncExitStack, database: Database) -> None:
        await bounded(database, self._settings.core.command_timeout_seconds, _check)
        tasks = await stack.enter_async_context(Tasks())
        runtime = self._assemble(database, tasks)
        stack.push_async_exit(partial(self._wind_down, runtime))
        tasks.on_failure = partial(_failed, runtime)
        if runtime.listener is not None:
            await tasks.start(runtime.listener.run)
        tasks.start_soon(runtime.doorbell.run)
        tasks.start_soon(runtime.waiter.run)
        if self._settings.sweep_interval_seconds > 0:
            sweeper = Sweeper(database, runtime.doorbell, self._settings, also=[runtime.durable.sweep])
            tasks.start_soon(sweeper.run)
        self._runtime = runtime
        if self._outbox is not None:
            self._outbox.move_in(database, runtime.listener, self._settings.core)
            stack.callback(self._outbox.move_out)
            if self._outbox.is_on:
                # The last to begin and the first to end: its sinks may need all the rest.
                stack.push_async_callback(self._outbox.stop)
                await tasks.start(self._outbox.run)
            else:
                self._outbox.warn_of_being_off()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Answer calls under way, send the rings that wait, within `close_timeout_seconds`, and end every task.

        An outbox drainer has its `stop_timeout_seconds` for that, from the same moment on. It returns within the longer
        of the two and three seconds, also when the database is down.
        """
        assert self._stack is not None
        assert self._runtime is not None
        stack, self._stack = self._stack, None
        now, grace = anyio.current_time(), self._settings.close_timeout_seconds
        self._close_by = now + grace
        if self._outbox is not None and self._outbox.is_on:
            grace = max(grace, self._outbox.settings.stop_timeout_seconds)
        # Each step has a bound of its own, and behind a black hole it is their sum that the owner waits for.
        timer = asyncio.get_running_loop().call_later(grace + _CUT_SECONDS, self._cut, self._runtime)
        try:
            return await stack.__aexit__(kind, error, traceback)
        finally:
            timer.cancel()

    def _cut(self, runtime: Runtime) -> None:
        """Cut off from the database whatever still waits for it."""
        runtime.database.terminate()
        if runtime.listener is not None:
            runtime.listener.terminate()
        if self._outbox is not None:
            self._outbox.cut()

    def _database(self) -> Database:
        core = self._settings.core
        if self._pool is not None:
            return Database.wrap(
                self._pool,
                connect_timeout=core.connect_timeout_seconds,
                command_timeout=core.command_timeout_seconds,
            )
        return Database(
            core.require_dsn(),
            min_size=core.pool_min_size,
            max_size=core.pool_max_size,
            statement_cache_size=core.statement_cache_size,
            connect_timeout=core.connect_timeout_seconds,
            command_timeout=core.command_timeout_seconds,
            application_name=core.application_name,
        )

    def _listener(self) -> Listener | None:
        core = self._settings.core
        if core.dsn is None and core.listen_dsn is None:
            logger.warning(
                "results are not pushed, only polled: a pool was given and no DSN for a listening connection "
                "(listen_dsn=, or RELAY_DISPATCH_LISTEN_DSN)"
            )
            return None
        return Listener(
            core.require_listen_dsn(),
            name="gateway",
            application_name=core.application_name,
            connect_timeout=core.connect_timeout_seconds,
            probe_seconds=core.probe_seconds,
            probe_timeout_seconds=core.probe_timeout_seconds,
            backoff_cap=core.reconnect_cap_seconds,
            max_channels=max(1, self._settings.max_channels),
        )

    def _assemble(self, database: Database, tasks: Tasks) -> Runtime:
        settings, counters, listener = self._settings, GatewayCounters(), self._listener()
        doorbell = Doorbell(*([listener] if listener is not None else []), database)
        lanes = Lanes(database, doorbell, settings, counters, tasks.start_soon)
        if listener is not None:
            listener.on_round_trip(lanes.ring_inside.round_trip)
        direct = DirectStatements(database, settings, lanes.backlogs)
        channels = ResultChannels(database, listener, settings, tasks.start_soon)
        waiter = ResultWaiter(lanes, channels, listener, settings, counters)
        preparer = Preparer(
            default_ttl_seconds=settings.default_ttl_seconds,
            max_ttl_seconds=settings.max_ttl_seconds,
            max_body_bytes=settings.core.max_body_bytes,
        )
        durable = DurableRoom(database, listener, settings, self._durable, tasks.start_soon)
        return Runtime(
            settings, preparer, database, listener, doorbell, lanes, direct, channels, waiter, counters, durable
        )

    async def _wind_down(
        self,
        runtime: Runtime,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        runtime.is_closed = True
        runtime.lanes.stop()
        runtime.waiter.close(runtime.closed_error)
        runtime.durable.close(runtime.closed_error)
        runtime.direct.close(runtime.closed_error)
        if runtime.cause is not None:
            return
        # Shielded: also where the block was cancelled, what was promised is sent, within a bound.
        by = self._close_by or anyio.current_time() + self._settings.close_timeout_seconds
        with anyio.CancelScope(shield=True, deadline=by):
            async with TaskGroup() as group:
                group.start_soon(runtime.lanes.drain)
                group.start_soon(runtime.durable.drain)
                group.start_soon(runtime.direct.drain)
        with anyio.CancelScope(shield=True):
            await runtime.doorbell.finish()


async def _check(conn: Connection) -> None:
    await check_schema(conn, rooms=["dispatch"])
    await warn_if_bypassing(conn, logger)


def _failed(runtime: Runtime, error: BaseException) -> None:
    """End the calls under way, at once and with the cause, before the tasks behind them are cancelled."""
    if runtime.cause is None:
        runtime.cause = error
        runtime.is_closed = True
        runtime.lanes.stop()
        runtime.waiter.close(runtime.closed_error)
        runtime.durable.fail(runtime.closed_error)
        runtime.direct.close(runtime.closed_error)
        runtime.direct.cut()
