"""One run of a relay's chunk handlers: makes the pieces, keeps them together, and takes them down in order.

The stop goes as that of `session`, with one difference: handlers are told at once, and may end at a safe point.

    1 no more claims; what one under way brings is given back; every handler is told (`ctx.stopping`, drain)
    2 handlers get the grace period; so do ends on their way to the database
    3 handlers that still run are cancelled, and their chunks are released with their checkpoint
    4 one bounded try to write by hand whatever the pieces could not
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal
from uuid import UUID

import anyio

from dispatch_core.durable_models import ClaimedChunk, Swept
from dispatch_core.errors import ConfigurationError, DatabaseUnavailableError, RelayDispatchError
from dispatch_core.ids import new_id
from dispatch_core.settings import DurableJobsSettings
from relay_sdk.chunk_claimer import ChunkClaimer
from relay_sdk.chunk_completer import ChunkCompleter
from relay_sdk.chunk_context import Desk
from relay_sdk.chunk_ends import ChunkEnds
from relay_sdk.chunk_executor import ChunkExecutor
from relay_sdk.chunk_giveback import give_back_chunks
from relay_sdk.chunk_heartbeat import ChunkHeartbeat
from relay_sdk.chunk_progress import ChunkProgress
from relay_sdk.chunk_registry import ChunkRegistry
from relay_sdk.chunk_slots import ChunkSlot, ChunkSlots, Released
from relay_sdk.chunk_sweeper import ChunkSweeper
from relay_sdk.chunk_watch import ChunkWatch
from relay_sdk.chunk_writes import verbs
from relay_sdk.connections import Connections
from relay_sdk.metrics import Health, RelayMetrics
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import RUNNING, Held

__all__ = ["ChunkSession"]

logger = logging.getLogger(__name__)

# As in `session`: together below the three seconds that a stop may last beyond its grace.
_CANCEL_SECONDS: Final = 0.6
_WRITE_SECONDS: Final = 0.6
_CUT_SECONDS: Final = 0.2
_GIVE_BACK_SECONDS: Final = 0.6

_RUNNERS: Final = 2
"""Connections of the pool that handlers' transactions leave to claims and completions."""

_BORROWED: Final = 2
"""The smallest pool of the caller's: one of it is kept for heartbeats, where there is no DSN."""


class ChunkSession:
    """One run."""

    rooms: Final = ("durable",)

    def __init__(
        self,
        relay_id: str,
        tenants: tuple[str, ...],
        registry: ChunkRegistry,
        durable: DurableJobsSettings,
        settings: RelaySettings,
        metrics: RelayMetrics,
        instance_id: str,
    ) -> None:
        self._relay_id = relay_id
        self._tenants = tenants
        self._registry = registry
        self._settings = settings
        self._durable = durable
        self._metrics = metrics
        self.instance_id = instance_id
        self.patience_seconds: Final = max(durable.lease_seconds / 3, 2.0)
        self.state: Literal["starting", "ok", "stopping", "stopped"] = "starting"
        self.abandoned = 0
        """Handlers that still ran when the run was over."""
        self._has_left = False
        self._stop_at: float | None = None
        self._stop_changed = anyio.Event()
        self.stop_was_asked = anyio.Event()
        self._error: BaseException | None = None
        self._connections: Connections | None = None
        self._slots: ChunkSlots | None = None
        self._rung: set[UUID] = set()
        """Jobs whose status has changed since the claim that is under way was sent."""
        self._missed_rings = False

    # --- from outside ---

    def stop(self, grace_seconds: float | None = None) -> None:
        """Stop, and give handlers `grace_seconds` (default: the settings') from now. Never makes it longer."""
        grace = self._settings.grace_seconds if grace_seconds is None else grace_seconds
        at = time.monotonic() + grace
        if self._stop_at is None or at < self._stop_at:
            if self._stop_at is None:
                logger.info("relay %s stops; handlers of chunks get %g s", self._relay_id, grace)
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
            return Health("starting", self.instance_id, "connecting", "unknown", 0, 0, 0, None)
        listener = self._connections.listener_state
        error = self._claimer.last_error or self._heartbeat.last_error
        degraded = self.state == "ok" and (listener != "listening" or error is not None)
        return Health(
            "degraded" if degraded else self.state,
            self.instance_id,
            listener,
            "unavailable" if isinstance(error, DatabaseUnavailableError) else "ok",
            0,
            0,
            0,
            None if error is None else str(error),
            len(self._slots),
            sum(slot.state is RUNNING for slot in self._slots),
            max(self._slots.free, 0),
        )

    # --- the run ---

    async def subscribe(self, connections: Connections) -> None:
        """Make the pieces, and have the tenants' rings come to them once `connections` listens."""
        if connections.borrows_heartbeat and connections.database.max_size < _BORROWED:
            raise ConfigurationError(
                f"a pool that is given to a relay with chunk handlers needs {_BORROWED} connections at least, one for"
                " heartbeats; or set RELAY_DISPATCH_DSN, for a connection of their own"
            )
        self._make_pieces(connections)
        async with connections.database.connection() as conn:
            repository = verbs(conn, self._durable)
            with anyio.fail_after(self.patience_seconds):
                # A claim that never was: only a worker of these tenants is told that there is none.
                await repository.claim_again(
                    self._tenants, new_id(), holder=self.instance_id, local_deadline=time.monotonic()
                )
                channels = [await repository.channel("durable", tenant) for tenant in self._tenants]
        if connections.listener is not None:
            for tenant, channel in zip(self._tenants, channels, strict=True):
                await connections.listener.subscribe(channel, self._on_ring(tenant))
            connections.listener.on_catch_up(self._on_catch_up)

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
                for piece in (self._watch, self._heartbeat, self._sweeper, self._progress):
                    pieces.start_soon(piece.run)
                pieces.start_soon(self._run_claimer)
                if self._stop_at is None:
                    self.state = "ok"
                    kinds = ", ".join(self._registry.kinds)
                    logger.info("relay %s works as %s for chunks of %s", self._relay_id, self.instance_id, kinds)
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
        settings, durable, metrics, database = self._settings, self._durable, self._metrics, connections.database
        patience = self.patience_seconds
        self._connections = connections
        self._slots = slots = Held[ChunkSlot](settings.chunk_concurrency, lambda: self._claimer.slot_was_freed())
        self._progress = ChunkProgress(connections.doorbell)
        ends = ChunkEnds(durable, metrics)
        self._watch = ChunkWatch(
            slots,
            lost=lambda slot: self._executor.lost(slot),
            time_out=lambda slot: self._executor.time_out(slot),
            cancel=lambda slot: self._executor.cancel(slot),
        )
        self._completer = ChunkCompleter(
            self._relay_id,
            settings=durable,
            batch=settings.chunk_complete_batch,
            patience=patience,
            database=database,
            doorbell=connections.doorbell,
            ends=ends,
            settled=lambda slots: self._executor.settled(slots),
            put_back=lambda tenant, seconds: self._claimer.ring_at(tenant, seconds),
            moved=self._progress.moved,
            metrics=metrics,
        )
        desk = Desk(
            database=database,
            settings=durable,
            patience=patience,
            row_errors_limit=settings.chunk_row_errors,
            permits=connections.permits(database.max_size - _RUNNERS - connections.borrows_heartbeat),
            lost=lambda slot: self._executor.lost(slot),
            moved=self._slot_moved,
            metrics=metrics,
        )
        self._executor = ChunkExecutor(
            self._registry,
            slots=slots,
            ends=ends,
            desk=desk,
            stop_seconds=settings.chunk_stop_seconds,
            watch=self._watch.look_at,
            ended=self._completer.put,
            stop_with=self.stop_with,
            metrics=metrics,
        )
        self._heartbeat = ChunkHeartbeat(
            self._relay_id,
            settings=durable,
            patience=patience,
            database=database,
            dsn=connections.heartbeat_dsn,
            slots=slots,
            tell=self._executor.tell,
            lost=self._executor.lost,
            moved=self._slot_moved,
            metrics=metrics,
        )
        self._sweeper = ChunkSweeper(
            self._relay_id,
            self.instance_id,
            settings=durable,
            patience=patience,
            database=database,
            swept=self._on_swept,
            metrics=metrics,
        )
        self._claimer = ChunkClaimer(
            self._relay_id,
            self._tenants,
            self.instance_id,
            registry=self._registry,
            settings=durable,
            poll_seconds=settings.poll_seconds,
            batch=settings.chunk_claim_batch,
            patience=patience,
            database=database,
            slots=slots,
            deliver=self._deliver,
            metrics=metrics,
        )
        self._claimer_ended = anyio.Event()

    # --- between the pieces ---

    def _on_ring(self, tenant: str) -> Callable[[str], None]:
        def ring(payload: str) -> None:
            self._metrics.chunk_notifications += 1
            if payload:
                try:
                    changed = [UUID(hex=text) for text in payload.split(",")]
                except ValueError:
                    pass  # anybody may notify on any channel: garbage is a ring like any other (C08)
                else:
                    # Paused or cancelled; or resumed, and then a ring without ids comes with it.
                    self._heartbeat.ask(changed)
                    if self._claimer.is_claiming:
                        self._rung.update(changed)
                    return
            self._claimer.ring(tenant)

        return ring

    def _on_catch_up(self) -> None:
        assert self._slots is not None
        self._claimer.ring_all()
        # What was paused or cancelled meanwhile has rung for nobody.
        self._heartbeat.ask({slot.lease.job_id for slot in self._slots})
        self._missed_rings = self._claimer.is_claiming

    def _deliver(self, chunks: Sequence[ClaimedChunk]) -> None:
        if chunks:
            self._executor.accept(chunks, self._durable.lease_seconds)
            self._heartbeat.expect()
            jobs = {(chunk.lease.tenant_id, chunk.lease.job_id) for chunk in chunks}
            for tenant, job_id in jobs:
                self._progress.moved(tenant, job_id)
            # Decided about between their claim and its reply: that ring found none of their chunks in hand.
            changed = {job_id for _, job_id in jobs if self._missed_rings or job_id in self._rung}
            if changed:
                self._heartbeat.ask(changed)
        if not self._claimer.is_claiming:
            self._rung.clear()
            self._missed_rings = False

    def _slot_moved(self, slot: ChunkSlot) -> None:
        self._progress.moved(slot.lease.tenant_id, slot.lease.job_id)

    def _on_swept(self, rows: Sequence[Swept]) -> None:
        assert self._connections is not None
        for row in rows:
            if row.sweep != "lease" or row.job_id is None:
                continue
            self._progress.moved(row.tenant_id, row.job_id)
            if row.status == "retry":
                self._connections.doorbell.ring_chunks(row.tenant_id)
                self._claimer.ring(row.tenant_id)
            else:
                self._completer.finish(row.tenant_id, row.job_id)
            # It may have been one of ours.
            self._heartbeat.ask([row.job_id])

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
            soon = claimer.next_due_seconds <= self._durable.retry_cap_seconds
            return len(slots) == 0 and claimer.has_nothing_to_do and self._completer.is_idle and not soon

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
        if len(slots):
            self._executor.cancel_all()
            with anyio.move_on_after(_CANCEL_SECONDS):
                await self._executor.until_idle()
        with anyio.move_on_after(_WRITE_SECONDS):
            await slots.until(lambda: all(slot.end is None for slot in slots))
            await self._completer.drain()

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
            unanswered = any(slot.end is not None for slot in self._slots or ()) or not self._completer.is_idle
            self._connections.leave(cut=self.state == "stopping" and unanswered)

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
        has_cut = False
        for slot in slots:
            # A handler that refuses to end is left behind; what it may write from now on is refused.
            if slot.state is RUNNING:
                if slot.may_be_lost and slot.chunk.idempotent:
                    slot.end = Released()
                if slot.context is not None and slot.context.open_transaction is not None:
                    slot.context.open_transaction.cut()
                    has_cut = True
        if has_cut:
            # Most of them were held up by just that, and say now how they end.
            with anyio.move_on_after(_CUT_SECONDS):
                await self._executor.until_idle()
        left = [slot for slot in slots if slot.end is not None]
        if left or self._claimer.lost:
            with anyio.move_on_after(_GIVE_BACK_SECONDS) as timeout:
                try:
                    await give_back_chunks(
                        left,
                        self._claimer,
                        connections=connections,
                        settings=self._durable,
                        settled=self._executor.settled,
                        metrics=self._metrics,
                    )
                except RelayDispatchError as error:
                    logger.warning("relay %s could not give back its chunks: %s", self._relay_id, error)
            if timeout.cancelled_caught:
                connections.cut()
        self.abandoned = self._executor.running
        if self.abandoned:
            logger.error("relay %s leaves %d handlers behind that do not end", self._relay_id, self.abandoned)
        if lost := sum(slot.end is not None for slot in slots):
            logger.error("relay %s leaves %d chunks to their leases", self._relay_id, lost)
        logger.info("relay %s has stopped its chunks", self._relay_id)
