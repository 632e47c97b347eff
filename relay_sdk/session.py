"""One run of one relay: makes the pieces, keeps them together, and takes them down in order.

    start   subscribe, and listen (LISTEN is confirmed before the first claim); then a first claim for every tenant
    stop    1 no more claims; one under way is finished, and what it brings is given back, as is all that has not begun
            2 handlers get the grace period; so do completions on their way to the database
            3 handlers that still run are cancelled; what may run again is free for others at once, the rest fails
            4 one bounded try to give back by hand whatever the pieces could not write

A piece that dies takes the run down with its cause, by way of 3 and 4. A second stop only shortens 2.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Literal
from uuid import UUID

import anyio

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import DatabaseUnavailableError, RelayDispatchError
from dispatch_core.models import ClaimedJobs, DispatchJob, DispatchStatus, EndedJob
from relay_sdk.claimer import Claimer
from relay_sdk.completer import Completer
from relay_sdk.connections import Connections
from relay_sdk.deadlines import Deadlines
from relay_sdk.ends import Ends
from relay_sdk.executor import Executor
from relay_sdk.giveback import give_back
from relay_sdk.heartbeat import Heartbeat
from relay_sdk.metrics import Health, RelayMetrics
from relay_sdk.registry import Registry
from relay_sdk.reissued import Reissued
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import ENDED, RUNNING, Cause, Slots
from relay_sdk.sweeper import Sweeper

__all__ = ["Session"]

logger = logging.getLogger(__name__)

# Together with what closing connections may take, below the three seconds that a stop may last beyond its grace.
_CANCEL_SECONDS: Final = 0.6
_WRITE_SECONDS: Final = 0.6
_GIVE_BACK_SECONDS: Final = 0.6

_FETCHES: Final = 4
"""Large bodies fetched at once, so that they leave connections to the others."""


class Session:
    """One run of a relay's handlers for dispatch jobs."""

    rooms: Final = ("dispatch",)

    def __init__(
        self,
        relay_id: str,
        tenants: tuple[str, ...],
        registry: Registry,
        settings: RelaySettings,
        metrics: RelayMetrics,
        instance_id: str,
    ) -> None:
        self._relay_id = relay_id
        self._tenants = tenants
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self.instance_id = instance_id
        self.patience_seconds: Final = settings.patience_seconds
        self.state: Literal["starting", "ok", "stopping", "stopped"] = "starting"
        self._has_left = False
        self.abandoned = 0
        """Handlers that still ran when the run was over."""
        self._stop_at: float | None = None
        self._stop_changed = anyio.Event()
        self.stop_was_asked = anyio.Event()
        self._error: BaseException | None = None
        self._connections: Connections | None = None
        self._slots: Slots | None = None

    # --- from outside ---

    def stop(self, grace_seconds: float | None = None) -> None:
        """Stop, and give handlers `grace_seconds` (default: the settings') from now. Never makes it longer."""
        grace = self._settings.grace_seconds if grace_seconds is None else grace_seconds
        at = time.monotonic() + grace
        if self._stop_at is None or at < self._stop_at:
            if self._stop_at is None:
                logger.info("relay %s stops; handlers get %g s", self._relay_id, grace)
            self._stop_at = at
            self._stop_changed.set()
            self.stop_was_asked.set()
            if self._connections is not None:
                self._connections.stops(self, at)

    def stop_with(self, error: BaseException) -> None:
        """Stop at once, because of an error that `run` raises in the end."""
        self._error = self._error or error
        self.stop(0.0)

    def health(self) -> Health:
        """Return how it is now."""
        if self._connections is None or self._slots is None:
            return Health("starting", self.instance_id, "connecting", "unknown", 0, 0, self._settings.concurrency, None)
        listener = self._connections.listener_state
        error = self._claimer.last_error or self._heartbeat.last_error
        degraded = self.state == "ok" and (listener != "listening" or error is not None)
        return Health(
            "degraded" if degraded else self.state,
            self.instance_id,
            listener,
            "unavailable" if isinstance(error, DatabaseUnavailableError) else "ok",
            len(self._slots),
            sum(slot.state is RUNNING for slot in self._slots),
            max(self._slots.free, 0),
            None if error is None else str(error),
        )

    # --- the run ---

    async def subscribe(self, connections: Connections) -> None:
        """Make the pieces, and have the relay's rings come to them once `connections` listens."""
        self._make_pieces(connections)
        await connections.require_worker(self._tenants, self._relay_id, self.instance_id)
        for tenant in self._tenants:
            await connections.subscribe(tenant, self._relay_id, self._on_ring(tenant))
        if connections.listener is not None:
            connections.listener.on_catch_up(self._claimer.ring_all)

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
                for piece in (self._deadlines, self._heartbeat, self._sweeper):
                    pieces.start_soon(piece.run)
                pieces.start_soon(self._run_claimer)
                if self._stop_at is None:
                    self.state = "ok"
                    logger.info("relay %s works as %s", self._relay_id, self.instance_id)
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

    def _make_pieces(self, connections: Connections) -> None:
        settings, metrics, database = self._settings, self._metrics, connections.database
        self._connections = connections
        self._registry.limit_threads(settings.threads)
        self._slots = slots = Slots(settings.concurrency, lambda: self._claimer.slot_was_freed())
        self._reissued = Reissued(slots, lambda: database.opened)
        ends = Ends(settings, metrics)
        self._fetching = anyio.Semaphore(_FETCHES)
        self._deadlines = Deadlines(slots, lambda slot, cause: self._executor.cancel(slot, cause))
        self._completer = Completer(
            self._relay_id,
            self.instance_id,
            settings=settings,
            database=database,
            doorbell=connections.doorbell,
            ends=ends,
            ring_inside=connections.ring_inside,
            settled=lambda slots: self._executor.settled_all(slots),
            put_back=self._on_put_back,
            metrics=metrics,
        )
        self._executor = Executor(
            self._registry,
            slots=slots,
            ends=ends,
            deadlines=self._deadlines,
            fetch_body=self._fetch_body,
            ended=self._completer.put,
            stop_with=self.stop_with,
            metrics=metrics,
        )
        self._sweeper = Sweeper(
            self._relay_id, settings=settings, database=database, swept=self._on_swept, metrics=metrics
        )
        self._claimer = Claimer(
            self._relay_id,
            self._tenants,
            self.instance_id,
            settings=settings,
            database=database,
            slots=slots,
            sweeper=self._sweeper,
            deliver=self._deliver,
            metrics=metrics,
        )
        self._claimer_ended = anyio.Event()
        self._heartbeat = Heartbeat(
            self._relay_id,
            self.instance_id,
            settings=settings,
            database=database,
            slots=slots,
            cancel=self._executor.cancel,
            metrics=metrics,
        )

    # --- between the pieces ---

    def _on_ring(self, tenant: str) -> Callable[[str], None]:
        def ring(payload: str) -> None:
            self._metrics.notifications += 1
            if not payload:
                self._claimer.ring(tenant)
                return
            try:
                withdrawn = [UUID(hex=text) for text in payload.split(",")]
            except ValueError:
                # Anybody may notify on any channel: garbage is a ring like any other (C08).
                self._claimer.ring(tenant)
            else:
                self._heartbeat.ask(withdrawn)

        return ring

    def _deliver(self, claimed: ClaimedJobs, sent_at: float) -> None:
        assert self._connections is not None
        for job in claimed.expired:
            self._metrics.jobs_expired += 1
            self._connections.doorbell.ring_results(job.tenant_id, job.job_id)
        self._executor.accept(self._reissued.without(claimed, sent_at), sent_at)

    async def _fetch_body(self, job: DispatchJob) -> bool:
        assert self._connections is not None
        async with self._fetching, self._connections.database.connection() as conn:
            with anyio.fail_after(self._settings.patience_seconds):
                return await RelayDispatchRepository(conn).fetch_body(job, claimed_by=self.instance_id)

    def _on_put_back(self, tenant: str, seconds: float) -> None:
        # Below the cursor, in any case.
        self._claimer.ring_at(tenant, seconds)

    def _on_swept(self, job: EndedJob) -> None:
        assert self._connections is not None
        doorbell = self._connections.doorbell
        if job.status is DispatchStatus.PENDING:
            doorbell.ring_relay(job.tenant_id, job.relay_id)
            if job.tenant_id in self._tenants:
                self._claimer.ring_at(job.tenant_id, 0.0)
        else:
            doorbell.ring_results(job.tenant_id, job.job_id)
        # It may have been one of ours.
        self._heartbeat.ask([job.job_id])

    # --- the stop ---

    async def _run_claimer(self) -> None:
        try:
            await self._claimer.run()
        finally:
            self._claimer_ended.set()

    async def _stop_when_drained(self) -> None:
        slots, claimer = self._slots, self._claimer
        assert slots is not None

        def is_drained() -> bool:
            # What is to be tried again soon is a part of the backlog.
            soon = claimer.next_due_seconds <= self._settings.retry_cap_seconds
            return len(slots) == 0 and claimer.has_nothing_to_do and not soon

        while not is_drained():
            with anyio.move_on_after(0.05):
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
        if len(slots) == 0:
            return
        self._executor.cancel_all()
        with anyio.move_on_after(_CANCEL_SECONDS):
            await self._executor.until_idle()
        with anyio.move_on_after(_WRITE_SECONDS):
            await slots.until(lambda: all(slot.end is None for slot in slots))

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
            # A handler that refuses to end says nothing about them, nor does an end that was refused for its tenant's
            # rights: what is given back is rung for on them.
            unanswered = any(slot.end is not None and not self._completer.holds(slot) for slot in self._slots or ())
            self._connections.leave(cut=self.state == "stopping" and unanswered)

    def _unwritten(self) -> int:
        """How many jobs in hand have an end that is not written, or none."""
        return sum(1 for slot in self._slots or () if slot.end or slot.state is not ENDED)

    async def _give_back(self) -> None:
        """Write by hand what is still in hand: one try, bounded in time."""
        slots, connections = self._slots, self._connections
        if slots is None or connections is None:
            return
        self._executor.stop()
        self._executor.cancel_all()
        if self.state != "stopping":
            # A piece died, and the handlers have not been told before.
            with anyio.move_on_after(_CANCEL_SECONDS):
                await self._executor.until_idle()
        left = [slot for slot in slots if slot.cause is not Cause.LOST and (slot.end or slot.state is not ENDED)]
        if left or self._claimer.lost:
            with anyio.move_on_after(_GIVE_BACK_SECONDS) as timeout:
                try:
                    await give_back(
                        left,
                        self._claimer,
                        relay_id=self._relay_id,
                        instance_id=self.instance_id,
                        connections=connections,
                        settled=self._executor.settled,
                        metrics=self._metrics,
                    )
                except RelayDispatchError as error:
                    logger.warning("relay %s could not give back what it had: %s", self._relay_id, error)
            if timeout.cancelled_caught:
                connections.cut()
        self.abandoned = self._executor.running + sum(slot.thread_runs for slot in slots)
        if self.abandoned:
            logger.error("relay %s leaves %d handlers behind that do not end", self._relay_id, self.abandoned)
        if lost := self._unwritten():
            logger.error("relay %s leaves %d jobs to their leases", self._relay_id, lost)
        logger.info("relay %s has stopped", self._relay_id)
