"""One run of one relay: makes the pieces, keeps them together, and takes them down in order.

start   subscribe, and listen (LISTEN is confirmed before the first claim); then a first claim for every tenant
stop    as every run (`course`); of jobs whose handlers are cancelled, those that may run again are free for others at
        once, and the rest fail
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

import anyio

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import DatabaseUnavailableError
from dispatch_core.models import ClaimedJobs, DispatchJob, DispatchStatus, EndedJob
from relay_sdk.claimer import Claimer
from relay_sdk.completer import Completer
from relay_sdk.connections import Connections
from relay_sdk.course import Course, Piece
from relay_sdk.deadlines import Deadlines
from relay_sdk.ends import Ends
from relay_sdk.executor import Executor
from relay_sdk.giveback import give_back
from relay_sdk.heartbeat import Heartbeat
from relay_sdk.metrics import Health, RelayMetrics
from relay_sdk.registry import Registry
from relay_sdk.reissued import Reissued
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import ENDED, RUNNING, Cause, Slot, Slots
from relay_sdk.sweeper import Sweeper

__all__ = ["Session"]

_FETCHES: Final = 4
"""Large bodies fetched at once, so that they leave connections to the others."""


class Session(Course[Slot]):
    """One run of a relay's handlers for dispatch jobs."""

    rooms: Final = ("dispatch",)
    works_on = "jobs"

    _completer: Completer
    _claimer: Claimer
    _executor: Executor

    def __init__(
        self,
        relay_id: str,
        tenants: tuple[str, ...],
        registry: Registry,
        settings: RelaySettings,
        metrics: RelayMetrics,
        instance_id: str,
    ) -> None:
        super().__init__(relay_id, tenants, settings, metrics, instance_id)
        self._registry = registry
        self.patience_seconds: Final = settings.patience_seconds

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

    # --- what is special about its course ---

    def _names(self) -> str:
        return self.works_on

    def _pieces(self) -> Sequence[Piece]:
        return self._deadlines, self._heartbeat, self._sweeper

    def _is_drained(self) -> bool:
        # What is to be tried again soon is a part of the backlog.
        soon = self._claimer.next_due_seconds <= self._settings.retry_cap_seconds
        return not self._slots and self._claimer.has_nothing_to_do and not soon

    async def _ends_are_written(self) -> None:
        slots = self._slots
        assert slots is not None
        await slots.until(lambda: all(slot.end is None for slot in slots))

    def _is_unanswered(self) -> bool:
        # A handler that refuses to end says nothing about it, nor does an end that was refused for its tenant's rights:
        # what is given back is rung for on these connections.
        return any(slot.end is not None and not self._completer.holds(slot) for slot in self._slots or ())

    async def _left(self) -> list[Slot]:
        return [slot for slot in self._slots or () if slot.cause is not Cause.LOST and _is_unwritten(slot)]

    async def _write_by_hand(self, left: list[Slot]) -> None:
        assert self._connections is not None
        await give_back(
            left,
            self._claimer,
            relay_id=self._relay_id,
            instance_id=self.instance_id,
            connections=self._connections,
            settled=self._executor.settled,
            metrics=self._metrics,
        )

    def _unwritten(self) -> int:
        return sum(_is_unwritten(slot) for slot in self._slots or ())

    def _threads_left(self) -> int:
        return sum(slot.thread_runs for slot in self._slots or ())


def _is_unwritten(slot: Slot) -> bool:
    """Whether it has an end that is not written, or none."""
    return slot.end is not None or slot.state is not ENDED
