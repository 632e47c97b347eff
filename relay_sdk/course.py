"""The course of one run, whatever it works on: its pieces work until it is told to stop, and are taken down in order.

    1 no more claims; one under way is finished, and what it brings is given back, as is all that has not begun
    2 handlers get the grace period; so do ends on their way to the database
    3 handlers that still run are cancelled
    4 one bounded try to write by hand whatever the pieces could not

A piece that dies takes the run down with its cause, by way of 3 and 4. A second stop only shortens 2.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar

import anyio
from anyio.abc import TaskStatus

from dispatch_core.errors import RelayDispatchError
from relay_sdk.connections import Connections
from relay_sdk.metrics import RelayMetrics
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import Held

__all__ = ["Course", "Piece"]

logger = logging.getLogger(__name__)

# Together with what closing connections may take, below the three seconds that a stop may last beyond its grace.
_CANCEL_SECONDS: Final = 0.6
_WRITE_SECONDS: Final = 0.6
_GIVE_BACK_SECONDS: Final = 0.6

_LOOK_SECONDS: Final = 0.05
"""From one look whether the backlog is empty to the next."""


class Piece(Protocol):
    """A part of a run that works by itself until it is cancelled."""

    async def run(self) -> None: ...


class _Completes(Protocol):
    async def run(self, *, task_status: TaskStatus[None]) -> None: ...


class _Claims(Piece, Protocol):
    @property
    def lost(self) -> Any: ...
    @property
    def next_due_seconds(self) -> float: ...
    @property
    def has_nothing_to_do(self) -> bool: ...
    def stop(self) -> None: ...
    def abandon(self) -> None: ...


class _Executes(Protocol):
    @property
    def running(self) -> int: ...
    def stop(self) -> None: ...
    def cancel_all(self) -> None: ...
    async def until_idle(self) -> None: ...


class _Slot(Protocol):
    end: Any


SlotT = TypeVar("SlotT", bound=_Slot)


class Course(ABC, Generic[SlotT]):
    """One run; a room's session says what its pieces are, and what is special about the end of its work."""

    works_on: ClassVar[str]
    """What it has in hand, as logs call it."""

    _completer: _Completes
    _claimer: _Claims
    _executor: _Executes

    def __init__(
        self,
        relay_id: str,
        tenants: tuple[str, ...],
        settings: RelaySettings,
        metrics: RelayMetrics,
        instance_id: str,
    ) -> None:
        self._relay_id = relay_id
        self._tenants = tenants
        self._settings = settings
        self._metrics = metrics
        self.instance_id = instance_id
        self.state: Literal["starting", "ok", "stopping", "stopped"] = "starting"
        self.abandoned = 0
        """Handlers that still ran when the run was over."""
        self.stop_was_asked = anyio.Event()
        self._stop_at: float | None = None
        self._stop_changed = anyio.Event()
        self._has_left = False
        self._error: BaseException | None = None
        self._connections: Connections | None = None
        self._slots: Held[SlotT] | None = None
        self._claimer_ended = anyio.Event()

    # --- from outside ---

    def stop(self, grace_seconds: float | None = None) -> None:
        """Stop, and give handlers `grace_seconds` (default: the settings') from now. Never makes it longer."""
        grace = self._settings.grace_seconds if grace_seconds is None else grace_seconds
        at = time.monotonic() + grace
        if self._stop_at is None or at < self._stop_at:
            if self._stop_at is None:
                logger.info("relay %s stops; handlers of %s get %g s", self._relay_id, self.works_on, grace)
            self._stop_at = at
            self._stop_changed.set()
            self.stop_was_asked.set()
            if self._connections is not None:
                self._connections.stops(self, at)

    def stop_with(self, error: BaseException) -> None:
        """Stop at once, because of an error that `run` raises in the end."""
        self._error = self._error or error
        self.stop(0.0)

    async def run(self, *, drain: bool = False) -> None:
        """Work until stopped, or until the backlog is empty where `drain` is asked for.

        Raises: the fault of a piece that died; SystemExit or KeyboardInterrupt of a handler.
        """
        assert self._connections is not None
        self._connections.enter()
        if self._stop_at is not None:
            self._connections.stops(self, self._stop_at)
        try:
            async with anyio.create_task_group() as pieces:
                await pieces.start(self._completer.run)
                for piece in self._pieces():
                    pieces.start_soon(piece.run)
                pieces.start_soon(self._run_claimer)
                if self._stop_at is None:
                    self.state = "ok"
                    logger.info("relay %s works as %s for %s", self._relay_id, self.instance_id, self._names())
                if drain:
                    pieces.start_soon(self._stop_when_drained)
                await self.stop_was_asked.wait()
                self.state = "stopping"
                await self._finish()
                self._leave()
                pieces.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # One fault is the rule, and its own type is what an owner can match on.
            raise group.exceptions[0] if len(group.exceptions) == 1 else group from None
        finally:
            self._leave()
            with anyio.CancelScope(shield=True):
                await self._give_back()
            self.state = "stopped"
        if self._error is not None:
            raise self._error

    # --- what a room's session says ---

    @abstractmethod
    def _names(self) -> str:
        """Return what it takes work for, as logs call it."""

    @abstractmethod
    def _pieces(self) -> Sequence[Piece]:
        """Return the pieces beside completer and claimer, the executor being none."""

    @abstractmethod
    def _is_drained(self) -> bool:
        """Return whether there is nothing in hand or on the way, and nothing that will be due soon."""

    @abstractmethod
    async def _ends_are_written(self) -> None:
        """Wait until what has ended is known to the database."""

    @abstractmethod
    def _is_unanswered(self) -> bool:
        """Return whether the database owes an answer about an end."""

    @abstractmethod
    async def _left(self) -> list[SlotT]:
        """Return the slots to write by hand, now that the pieces are gone."""

    @abstractmethod
    async def _write_by_hand(self, left: list[SlotT]) -> None:
        """Try once to write these, and to give back what lost claims have brought. Raises: RelayDispatchError."""

    @abstractmethod
    def _unwritten(self) -> int:
        """Return how many are left to their leases."""

    def _threads_left(self) -> int:
        """Return how many handlers still run in threads of their own."""
        return 0

    # --- the stop ---

    async def _run_claimer(self) -> None:
        try:
            await self._claimer.run()
        finally:
            self._claimer_ended.set()

    async def _stop_when_drained(self) -> None:
        while not self._is_drained():
            with anyio.move_on_after(_LOOK_SECONDS):
                await self.stop_was_asked.wait()
                return
        self.stop()

    async def _finish(self) -> None:
        slots = self._slots
        assert slots is not None
        self._claimer.stop()
        self._executor.stop()
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(self._cut_short, waiting.cancel_scope)
            await self._claimer_ended.wait()
            await slots.until(lambda: len(slots) == 0)
            waiting.cancel_scope.cancel()
        self._claimer.abandon()
        if len(slots):
            self._executor.cancel_all()
            with anyio.move_on_after(_CANCEL_SECONDS):
                await self._executor.until_idle()
        with anyio.move_on_after(_WRITE_SECONDS):
            await self._ends_are_written()

    async def _cut_short(self, scope: anyio.CancelScope) -> None:
        """Cancel `scope` when the grace period is over, which may become shorter meanwhile."""
        while True:
            assert self._stop_at is not None
            self._stop_changed = anyio.Event()
            with anyio.move_on_after(self._stop_at - time.monotonic()) as timeout:
                await self._stop_changed.wait()
            if timeout.cancelled_caught:
                scope.cancel()
                return

    def _leave(self) -> None:
        """Let go of the connections; cut them where the database has not answered the write of an end."""
        if not self._has_left:
            assert self._connections is not None
            self._has_left = True
            self._connections.leave(cut=self.state == "stopping" and self._is_unanswered())

    async def _give_back(self) -> None:
        """Write by hand what is still in hand: one try, bounded in time."""
        connections = self._connections
        if self._slots is None or connections is None:
            return
        self._executor.stop()
        self._executor.cancel_all()
        if self.state != "stopping":
            # A piece died, and the handlers have not been told before.
            with anyio.move_on_after(_CANCEL_SECONDS):
                await self._executor.until_idle()
        left = await self._left()
        if left or self._claimer.lost:
            with anyio.move_on_after(_GIVE_BACK_SECONDS) as timeout:
                try:
                    await self._write_by_hand(left)
                except RelayDispatchError as error:
                    logger.warning("relay %s could not give back its %s: %s", self._relay_id, self.works_on, error)
            if timeout.cancelled_caught:
                connections.cut()
        self.abandoned = self._executor.running + self._threads_left()
        if self.abandoned:
            logger.error("relay %s leaves %d handlers behind that do not end", self._relay_id, self.abandoned)
        if unwritten := self._unwritten():
            logger.error("relay %s leaves %d %s to their leases", self._relay_id, unwritten, self.works_on)
        logger.info("relay %s has stopped its %s", self._relay_id, self.works_on)
