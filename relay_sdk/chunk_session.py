"""One run of a relay's chunk handlers: makes the pieces, keeps them together, and takes them down in order.

It stops as every run (`course`), with two differences: handlers are told at once (`ctx.stopping`, drain) and may end at
a safe point; and chunks whose handlers are cancelled are released with their checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

import anyio

from dispatch_core.durable_models import ClaimedChunk, Swept
from dispatch_core.errors import ConfigurationError, DatabaseUnavailableError
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
from relay_sdk.chunk_slots import ChunkSlot, Released
from relay_sdk.chunk_sweeper import ChunkSweeper
from relay_sdk.chunk_watch import ChunkWatch
from relay_sdk.chunk_writes import verbs
from relay_sdk.connections import Connections
from relay_sdk.course import Course, Piece
from relay_sdk.metrics import Health, RelayMetrics
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import RUNNING, Held

__all__ = ["ChunkSession"]

_CUT_SECONDS: Final = 0.2
"""For handlers that were held up by the transaction that was cut."""

_RUNNERS: Final = 2
"""Connections of the pool that handlers' transactions leave to claims and completions."""

_BORROWED: Final = 2
"""The smallest pool of the caller's: one of it is kept for heartbeats, where there is no DSN."""


class ChunkSession(Course[ChunkSlot]):
    """One run of a relay's chunk handlers."""

    rooms: Final = ("durable",)
    works_on = "chunks"

    _completer: ChunkCompleter
    _claimer: ChunkClaimer
    _executor: ChunkExecutor

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
        super().__init__(relay_id, tenants, settings, metrics, instance_id)
        self._registry = registry
        self._durable = durable
        self.patience_seconds: Final = max(durable.lease_seconds / 3, 2.0)
        self._rung: set[UUID] = set()
        """Jobs whose status has changed since the claim that is under way was sent."""
        self._missed_rings = False

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

    # --- what is special about its course ---

    def _names(self) -> str:
        return "chunks of " + ", ".join(self._registry.kinds)

    def _pieces(self) -> Sequence[Piece]:
        return self._watch, self._heartbeat, self._sweeper, self._progress

    def _is_drained(self) -> bool:
        # What is to be tried again soon is a part of the backlog.
        soon = self._claimer.next_due_seconds <= self._durable.retry_cap_seconds
        return not self._slots and self._claimer.has_nothing_to_do and self._completer.is_idle and not soon

    async def _ends_are_written(self) -> None:
        slots = self._slots
        assert slots is not None
        await slots.until(lambda: all(slot.end is None for slot in slots))
        await self._completer.drain()

    def _is_unanswered(self) -> bool:
        return any(slot.end is not None for slot in self._slots or ()) or not self._completer.is_idle

    async def _left(self) -> list[ChunkSlot]:
        slots = self._slots or ()
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
        return [slot for slot in slots if slot.end is not None]

    async def _write_by_hand(self, left: list[ChunkSlot]) -> None:
        assert self._connections is not None
        await give_back_chunks(
            left,
            self._claimer,
            connections=self._connections,
            settings=self._durable,
            settled=self._executor.settled,
            metrics=self._metrics,
        )

    def _unwritten(self) -> int:
        return sum(slot.end is not None for slot in self._slots or ())
