"""Run relays: one or several in a process, with what they share, with signals if asked for, as a program."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn, Protocol

import anyio
from anyio.abc import TaskGroup

from dispatch_core.errors import ConfigurationError, DatabaseUnavailableError, RelayDispatchError, SchemaMismatchError
from dispatch_core.settings import CoreSettings
from relay_sdk.connections import Connections
from relay_sdk.settings import RelaySettings

__all__ = ["Runnable", "Working", "main", "run_relays"]

logger = logging.getLogger(__name__)

_EXIT_FAILED: Final = 1
_EXIT_SCHEMA: Final = 4
_EXIT_UNREACHABLE: Final = 5


class Working(Protocol):
    """What is needed of a run of a relay: of its handlers for jobs (`Session`), or for chunks (`ChunkSession`)."""

    state: Any
    stop_was_asked: anyio.Event
    abandoned: int

    @property
    def patience_seconds(self) -> float: ...

    @property
    def rooms(self) -> Sequence[str]: ...

    def stop(self, grace_seconds: float | None = None) -> None: ...

    async def subscribe(self, connections: Connections) -> None: ...

    async def run(self, *, drain: bool = False) -> None: ...


class Runnable(Protocol):
    """What is needed of a `Relay`."""

    settings: RelaySettings
    core: CoreSettings
    pool: Any

    def begin(self) -> Sequence[Working]:
        """Make a run of it: one session for each room that it works in."""
        ...

    def ended(self, *, failed: bool) -> None:
        """Note that its run is over."""
        ...


async def run_relays(relays: Sequence[Runnable], *, drain: bool = False, install_signal_handlers: bool = False) -> None:
    """Run several relays in one process until all have stopped; those of one database share pool and listener.

    When one fails, the others are stopped, with grace, and its error is raised. Otherwise as `Relay.run`.
    """
    await _Run(relays, drain).until_done(install_signal_handlers=install_signal_handlers)


class _Run:
    def __init__(self, relays: Sequence[Runnable], drain: bool) -> None:
        self._relays = relays
        self._drain = drain
        self._sessions: list[Working] = []
        self._errors: list[BaseException] = []
        self.done = anyio.Event()

    def stop(self, grace_seconds: float | None = None) -> None:
        for session in self._sessions:
            session.stop(grace_seconds)

    async def until_done(self, *, install_signal_handlers: bool) -> None:
        async with anyio.create_task_group() as group:
            # The work has a task of its own that no cancellation of the caller reaches: it is stopped in order instead.
            group.start_soon(self.work)
            with _signals(self.stop) if install_signal_handlers else contextlib.nullcontext():
                try:
                    await self.done.wait()
                except BaseException:
                    self.stop(0.0)
                    with anyio.CancelScope(shield=True):
                        await self.done.wait()
                    raise
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise BaseExceptionGroup("several relays failed", self._errors)

    async def work(self) -> None:
        groups: dict[object, list[tuple[Runnable, Working]]] = {}
        begun: list[Runnable] = []
        with anyio.CancelScope(shield=True):
            try:
                for relay in self._relays:
                    sessions = relay.begin()
                    begun.append(relay)
                    self._sessions.extend(sessions)
                    pool = None if relay.pool is None else id(relay.pool)
                    group_of = groups.setdefault((pool, relay.core), [])
                    group_of.extend((relay, session) for session in sessions)
                async with anyio.create_task_group() as group:
                    for members in groups.values():
                        group.start_soon(self._work_together, members)
            except BaseException as error:  # noqa: BLE001  raised by `run_relays`, in the caller's task
                self._failed(error)
            finally:
                for relay in begun:
                    relay.ended(failed=bool(self._errors))
                self.done.set()

    async def _work_together(self, members: Sequence[tuple[Runnable, Working]]) -> None:
        """Run relays that share their connections."""
        relay = members[0][0]
        sessions = [session for _, session in members]
        patience = min(session.patience_seconds for session in sessions)
        rooms = sorted({room for session in sessions for room in session.rooms})
        try:
            connections = Connections(
                relay.core, pool=relay.pool, command_timeout_seconds=patience, rooms=rooms, users=len(sessions)
            )
            async with contextlib.AsyncExitStack() as stack, anyio.create_task_group() as group:
                if not await self._started(connections, sessions, stack, group):
                    # It may have begun to listen in the moment in which the stop came, and would do so for ever.
                    group.cancel_scope.cancel()
                    return
                async with anyio.create_task_group() as running:
                    for session in sessions:
                        running.start_soon(self._run_one, session)
                await connections.finish()
                group.cancel_scope.cancel()
        except BaseException as error:  # noqa: BLE001  raised by `run_relays`, in the caller's task
            if all(session.state == "starting" and session.stop_was_asked.is_set() for session in sessions):
                logger.info("stopped before it had started: %s", error)
            else:
                self._failed(error)

    async def _started(
        self,
        connections: Connections,
        sessions: Sequence[Working],
        stack: contextlib.AsyncExitStack,
        group: TaskGroup,
    ) -> bool:
        """Open the connections and listen; False when told to stop before that was done."""
        with anyio.CancelScope() as starting:
            async with anyio.create_task_group() as watching:

                async def watch() -> None:
                    for session in sessions:
                        await session.stop_was_asked.wait()
                    starting.cancel()

                watching.start_soon(watch)
                await stack.enter_async_context(connections)
                for session in sessions:
                    await session.subscribe(connections)
                await group.start(connections.run)
                watching.cancel_scope.cancel()
            return True
        return False

    async def _run_one(self, session: Working) -> None:
        try:
            await session.run(drain=self._drain)
        except BaseException as error:  # noqa: BLE001  raised by `run_relays`, in the caller's task
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        self._errors.append(error)
        self.stop()

    @property
    def abandoned(self) -> int:
        """How many handlers did not end."""
        return sum(session.abandoned for session in self._sessions)


# --- signals ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _signals(stop: Callable[[float | None], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `stop`: the first one with the grace of the settings, any further one with none."""
    loop = asyncio.get_running_loop()
    seen = 0

    def on_signal(name: str) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            logger.warning("%s again: handlers get no more time", name)
        stop(None if seen == 1 else 0.0)

    before: dict[signal.Signals, Any] = {}
    added: list[signal.Signals] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, on_signal, number.name)
            added.append(number)
        except NotImplementedError:  # Windows
            before[number] = signal.signal(
                number, lambda signum, _: loop.call_soon_threadsafe(on_signal, signal.Signals(signum).name)
            )
    try:
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)
        for number, handler in before.items():
            signal.signal(number, handler)


# --- as a program ----------------------------------------------------------------------------------------------------


def main(relays: Sequence[Runnable], *, drain: bool = False) -> None:
    """Run relays as a program of their own: see `Relay.main`."""
    if asyncio._get_running_loop() is not None:
        raise ConfigurationError("main() makes an event loop of its own, and one runs already: use `await relay.run()`")
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run = _Run(relays, drain)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            try:
                runner.run(run.until_done(install_signal_handlers=True))
            finally:
                # Closing the loop, and then the interpreter, would wait for these, and so for ever.
                if run.abandoned:
                    _leave_at_once(sys.exc_info()[1])
    except RelayDispatchError as error:
        logger.error("%s: %s", error.code, error)
        sys.exit(_exit_code(error))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, SchemaMismatchError):
        return _EXIT_SCHEMA
    if isinstance(error, DatabaseUnavailableError):
        return _EXIT_UNREACHABLE
    return _EXIT_FAILED


def _leave_at_once(error: BaseException | None) -> NoReturn:
    if error is not None and not isinstance(error, SystemExit):
        logger.error("stopped by an error", exc_info=error)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(_exit_code(error))
