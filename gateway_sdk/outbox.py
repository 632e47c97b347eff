"""Drain an outbox for as long as a process lives: woken by the transactions that write, and by a poll beneath.

    drainer = OutboxDrainer(dsn)

    @drainer.sink("order.placed")
    async def tell(event: OutboxEvent) -> None: ...

    async with drainer: ...                          # in the background
    await drainer.run()                              # or: until cancelled
    GatewayClient(dsn, outbox=drainer)               # or: as long as the client is open

It is off, all of it, unless `OUTBOX_DRAIN_INTERVAL_SEC` is above 0: then there is no task, connection or statement.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

import anyio
from anyio.abc import TaskStatus

from dispatch_core.backoff import Backoff
from dispatch_core.database import Database
from dispatch_core.errors import ConfigurationError, DatabaseError
from dispatch_core.listener import Listener
from dispatch_core.outbox import DrainReport, Outbox, OutboxEvent, OutboxSettings, Sink
from dispatch_core.outbox_delivery import check_sink
from dispatch_core.settings import CoreSettings
from gateway_sdk.outbox_loop import DrainLoop, added
from gateway_sdk.outbox_wakes import OutboxWakes
from gateway_sdk.tasks import Tasks

__all__ = ["OutboxDrainer"]

_NAME: Final = "outbox"
_BACKOFF_BASE: Final = 0.25
_OFF: Final = "the outbox drainer is off: set OUTBOX_DRAIN_INTERVAL_SEC above 0"
_POOL_SIZE: Final = 4

# Below the three seconds that a stop may last beyond its timeout.
_CUT_SECONDS: Final = 2.0
_SINK_CLOSE_SECONDS: Final = 0.5
"""Statements at a time: one claims, the others settle. No connection is held while a sink runs."""

SinkT = TypeVar("SinkT", bound=Callable[[OutboxEvent], Awaitable[object]])

logger = logging.getLogger("relay_dispatch.outbox")


class OutboxDrainer:
    """Claims events, gives each to the sink of its kind, and settles them. Any number may run at once, anywhere.

    Give a DSN, or a `Database` that is open; with nothing, the settings are read: OUTBOX_DSN, or else the gateway's.
    Events of kinds without a sink are left for other drainers, unless there is a `default_sink`.

    A lost database is waited out. What nobody foresees ends the block that the drainer runs beside, with the cause.
    """

    def __init__(
        self,
        database: Database | str | None = None,
        *,
        settings: OutboxSettings | None = None,
        tenants: Sequence[str] | None = None,
        listen_dsn: str | None = None,
        default_sink: Sink | None = None,
    ) -> None:
        """Drain events of `tenants`; None: all that the login may drain. `listen_dsn`: as OUTBOX_LISTEN_DSN."""
        self.settings = settings or OutboxSettings()
        self.default_sink: Sink | None = None
        self.sinks: dict[str, Sink] = {}
        self.total = DrainReport()
        """What all its drains have done so far."""
        self._given = database
        self._tenants = None if tenants is None else list(tenants)
        self._listen_dsn = listen_dsn
        self._core: CoreSettings | None = None
        self._host: tuple[Database, Listener | None] | None = None
        self._outbox: Outbox | None = None
        self._stack: AsyncExitStack | None = None
        self._warned = False
        self._running: anyio.CancelScope | None = None
        self._stop_by: float | None = None
        self._cut_timer: asyncio.TimerHandle | None = None
        self._own_database: Database | None = None
        self._own_listener: Listener | None = None
        self._ended = anyio.Event()
        if default_sink is not None:
            self.set_default_sink(default_sink)

    # --- sinks ----------------------------------------------------------------------------------------------------

    def sink(self, kind: str) -> Callable[[SinkT], SinkT]:
        """Return a decorator that makes an async function the sink of a kind. Raises: as `add_sink`."""

        def register(sink: SinkT) -> SinkT:
            self.add_sink(kind, sink)
            return sink

        return register

    def add_sink(self, kind: str, sink: Sink) -> None:
        """Have events of a kind delivered to `sink`, from the next claim on.

        Raises: ConfigurationError where the kind has a sink already, or the sink is not async or refuses the settings.
        """
        if kind in self.sinks:
            raise ConfigurationError(f"events of kind {kind} have a sink already")
        check_sink(sink, self.settings)
        self.sinks[kind] = sink

    def set_default_sink(self, sink: Sink) -> None:
        """Have events of every other kind delivered to `sink`, from the next claim on.

        Raises: ConfigurationError where it is not async or refuses the settings.
        """
        check_sink(sink, self.settings)
        self.default_sink = sink
        if self._outbox is not None:
            self._outbox.default_sink = sink

    # --- draining -------------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether OUTBOX_DRAIN_INTERVAL_SEC is above 0."""
        return self.settings.drain_interval_sec > 0

    async def drain_once(self) -> DrainReport:
        """Drain one batch, whether or not the drainer runs. Raises: as `Outbox.drain`."""
        async with self._borrowed() as outbox:
            report = await outbox.drain(self.settings.batch_size)
            self._count(report)
            return report

    async def drain_all(self) -> DrainReport:
        """Drain until nothing is due, whether or not the drainer runs. Raises: as `Outbox.drain`."""
        async with self._borrowed() as outbox:
            batch = self.settings.batch_size
            return await DrainLoop(outbox, batch=batch, interval=0, on_report=self._count).run_dry()

    def warn_of_being_off(self) -> None:
        """Say, once, that nothing will be drained although there are sinks. For GatewayClient."""
        if not self._warned and (self.sinks or self.default_sink is not None or self.settings.routes):
            self._warned = True
            logger.warning(_OFF)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Drain until cancelled, or until `stop`; `started` when the first try to claim has ended, well or not.

        When it ends, batches at hand are settled as far as they got, the rest is released, within
        `stop_timeout_seconds`, and nothing of it is left.

        Raises: ConfigurationError where the drainer is off, has no sink, or runs already; SchemaMismatchError,
        TenancyDeniedError.
        """
        if not self.is_on:
            raise ConfigurationError(_OFF)
        if self._running is not None:
            raise ConfigurationError("this outbox drainer runs already")
        if not self.sinks and self.default_sink is None:
            raise ConfigurationError("an outbox drainer without a sink has nobody to deliver to")
        self._running, self._ended = anyio.CancelScope(), anyio.Event()
        first_try_is_over = _Once(task_status.started)
        try:
            with self._running:
                async with AsyncExitStack() as stack:
                    self._outbox = await self._open_patiently(stack, first_try_is_over)
                    await self._drain(self._outbox, stack, first_try_is_over)
        finally:
            if self._cut_timer is not None:
                self._cut_timer.cancel()
            self._outbox = self._running = self._stop_by = self._cut_timer = None
            self._own_database = self._own_listener = None
            self._ended.set()

    async def stop(self) -> None:
        """End `run`, and wait until it has ended. Idempotent: yes."""
        if self._running is not None:
            self._running.cancel()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()

    def cut(self) -> None:
        """Cut the drainer's own connections, if any, for an owner that must leave although the network is dead."""
        if self._own_database is not None:
            self._own_database.terminate()
        if self._own_listener is not None:
            self._own_listener.terminate()

    def _stops(self) -> None:
        """Begin to count the time that a stop may take."""
        if self._stop_by is None and self._running is not None:
            seconds = self.settings.stop_timeout_seconds
            self._stop_by = anyio.current_time() + seconds
            self._cut_timer = asyncio.get_running_loop().call_later(seconds + _CUT_SECONDS, self.cut)

    async def __aenter__(self) -> Self:
        """Run in the background; where the drainer is off, do nothing at all. Raises: as `run`."""
        if self._stack is not None:
            raise ConfigurationError("this outbox drainer is open already")
        async with AsyncExitStack() as stack:
            if self.is_on:
                tasks = await stack.enter_async_context(Tasks())
                await tasks.start(self.run)
            else:
                self.warn_of_being_off()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Stop, and raise what has ended the drainer, if something did."""
        assert self._stack is not None
        stack, self._stack = self._stack, None
        return await stack.__aexit__(kind, error, traceback)

    def _count(self, report: DrainReport) -> None:
        self.total = added(self.total, report)

    # --- pieces ---------------------------------------------------------------------------------------------------

    def move_in(self, database: Database, listener: Listener | None, core: CoreSettings) -> None:
        """Use a client's connections, where this drainer was given none of its own. For GatewayClient."""
        self._core = core
        if self._given is None and not self.settings.dsn:
            self._host = database, listener

    def move_out(self) -> None:
        """Use them no more. Idempotent: yes."""
        self._core = self._host = None

    def _load_core(self) -> CoreSettings:
        if self._core is None:
            self._core = CoreSettings.load()
        return self._core

    async def _open_patiently(self, stack: AsyncExitStack, first_try_is_over: Callable[[], None]) -> Outbox:
        """Open the outbox, waiting for a database that is away."""
        backoff = Backoff(_BACKOFF_BASE, self._load_core().reconnect_cap_seconds)
        while True:
            try:
                return await stack.enter_async_context(self._opened())
            except DatabaseError as error:
                if not error.retryable:
                    raise
                level = logging.DEBUG if backoff.attempt else logging.WARNING
                logger.log(level, "the outbox cannot be opened for now: %s", error)
                first_try_is_over()
            await anyio.sleep(backoff.next())

    async def _drain(self, outbox: Outbox, stack: AsyncExitStack, first_try_is_over: Callable[[], None]) -> None:
        core = self._load_core()
        loop = DrainLoop(
            outbox,
            batch=self.settings.batch_size,
            interval=self.settings.drain_interval_sec,
            backoff_cap=core.reconnect_cap_seconds,
            on_report=self._count,
            on_stop=self._stops,
        )
        tasks = await stack.enter_async_context(Tasks())
        try:
            listener = await self._listen(tasks, core)
            if listener is not None:
                listener.on_catch_up(loop.database_is_back)
                tasks.start_soon(OutboxWakes(listener, outbox.verbs, self._tenants, loop.wake).run)
            await loop.run(first_try_is_over)
        finally:
            self._stops()

    @asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[Outbox]:
        """Lend the running drainer's outbox, or one for the length of the block."""
        if self._outbox is not None:
            yield self._outbox
            return
        async with self._opened() as outbox:
            yield outbox

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Outbox]:
        async with AsyncExitStack() as stack:
            if isinstance(self._given, Database):
                database = self._given
            elif self._host is not None:
                database = self._host[0]
            else:
                database = await stack.enter_async_context(self._database())
                self._own_database = database
            outbox = Outbox(database, default_sink=self.default_sink, tenants=self._tenants, settings=self.settings)
            # The very same, so that a sink that is added later counts.
            outbox.sinks = self.sinks
            stack.push_async_callback(self._close_sinks)
            yield await stack.enter_async_context(outbox)

    async def _close_sinks(self) -> None:
        """Have sinks that keep something open close it: they open it again when they are called again."""
        by = self._stop_by or anyio.current_time() + self.settings.stop_timeout_seconds
        closers = {id(sink): getattr(sink, "aclose", None) for sink in [*self.sinks.values(), self.default_sink]}
        for close in closers.values():
            if close is not None:
                try:
                    until = max(by, anyio.current_time() + _SINK_CLOSE_SECONDS)
                    with anyio.CancelScope(shield=True, deadline=until):
                        await close()
                except Exception:
                    logger.exception("a sink could not be closed")

    def _database(self) -> Database:
        core = self._load_core()
        return Database(
            self._dsn() or core.require_dsn(),
            min_size=1,
            max_size=_POOL_SIZE,
            statement_cache_size=core.statement_cache_size,
            connect_timeout=core.connect_timeout_seconds,
            command_timeout=core.command_timeout_seconds,
            application_name=f"{core.application_name} {_NAME}",
        )

    def _dsn(self) -> str | None:
        if isinstance(self._given, str):
            return self._given
        return self.settings.dsn.get_secret_value() if self.settings.dsn else None

    async def _listen(self, tasks: Tasks, core: CoreSettings) -> Listener | None:
        """Return the host's listener, or one of our own that has begun."""
        own = self._listen_dsn or (self.settings.listen_dsn and self.settings.listen_dsn.get_secret_value())
        if not own and self._host is not None and self._host[1] is not None:
            return self._host[1]
        dsn = own or self._dsn()
        if not dsn and not isinstance(self._given, Database) and (core.dsn or core.listen_dsn):
            dsn = core.require_listen_dsn()
        if not dsn:
            logger.warning(
                "the outbox hears of no event, it polls: no DSN was given for a listening connection "
                "(listen_dsn=, or OUTBOX_LISTEN_DSN)"
            )
            return None
        listener = Listener(
            dsn,
            name=_NAME,
            application_name=core.application_name,
            connect_timeout=core.connect_timeout_seconds,
            probe_seconds=core.probe_seconds,
            probe_timeout_seconds=core.probe_timeout_seconds,
            backoff_cap=core.reconnect_cap_seconds,
            dsn_setting="OUTBOX_LISTEN_DSN",
        )
        self._own_listener = listener
        await tasks.start(listener.run)
        return listener


class _Once:
    """Calls a function the first time that it is called itself."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
