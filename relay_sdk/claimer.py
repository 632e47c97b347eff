"""Claim jobs: only for free slots, as few statements as the work needs, and none without a reason.

Reasons gather while a claim is under way or no slot is free, so a burst of rings is one claim. Whom a claim is for is
decided in `turns`. A full claim is followed by another at once; while one is under way, there may be beside it

* one more for tenants with a backlog, where many slots are free, so that the server never waits for this process;
* one for tenants that were rung beside such a backlog, so that they need not wait for the large answers of the others.

    rung tenants and free slots -> claim -> jobs to the executor, tenants that may have more are rung again
    a reply that was lost       -> ask for that claim by its id (`lost_claims`)
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.database import Connection, Database
from dispatch_core.dispatch import CLAIMED_BODIES_BYTES, RelayDispatchRepository
from dispatch_core.errors import DatabaseBusyError, DatabaseError, DatabaseUnavailableError, TenancyError
from dispatch_core.ids import new_id
from dispatch_core.models import ClaimedJobs, DispatchJob
from relay_sdk.lost_claims import LostClaim, LostClaims
from relay_sdk.metrics import RelayMetrics
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import Slots
from relay_sdk.sweeper import Sweeper
from relay_sdk.turns import Reason, Turn, Turns

__all__ = ["Claimer"]

logger = logging.getLogger(__name__)

_POLL_JITTER: Final = 0.25

_MANY: Final = 4
"""That part of a batch must be free for a second claim of a backlog: it is in no hurry, and small ones cost as much."""

_BESIDE: Final = 2
"""Claims under way beside the first."""


class Claimer:
    """Keep the relay's free slots filled. The ring methods are plain functions and never wait."""

    def __init__(
        self,
        relay_id: str,
        tenants: Sequence[str],
        instance_id: str,
        *,
        settings: RelaySettings,
        database: Database,
        slots: Slots,
        sweeper: Sweeper,
        deliver: Callable[[ClaimedJobs, float], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take `deliver(jobs, sent_at)`, which takes a slot for each job and starts it."""
        self._relay_id = relay_id
        self._instance_id = instance_id
        self._settings = settings
        self._database = database
        self._slots = slots
        self._sweeper = sweeper
        self._deliver = deliver
        self._metrics = metrics
        self._turns = Turns(tenants)
        self.lost: Final[LostClaims[ClaimedJobs]] = LostClaims(self._claim_again)
        """Claims whose reply was lost and that have not been asked for with success."""
        self._poll_at = 0.0
        self._has_polled = False
        self._may_ask = False
        self._backoff = Backoff(0.1, 2.0)
        self._not_before = 0.0
        self._told: set[str] = set()
        self._idle = True
        self._stopping = False
        self._wakeup = anyio.Event()
        self._wakeup_beside = anyio.Event()
        # The claims under way, and the slots that they may fill.
        self._under_way: set[anyio.CancelScope] = set()
        self._reserved = 0
        self._many = max(1, min(settings.claim_batch, slots.capacity) // _MANY)
        # How many jobs bring their bodies along in one claim, if these are as large as those of the last one.
        self._fit = settings.claim_batch
        self.last_error: Exception | None = None
        """Why the last claim failed; None after one that did not."""

    # --- reasons to claim ---

    def ring(self, tenant: str) -> None:
        """Note that there may be work for `tenant`."""
        self._turns.ring(tenant, "notify")
        self._wake()

    def ring_all(self, reason: Reason = "poll") -> None:
        """Note that there may be work for every tenant, and claim without waiting for any backoff."""
        self._turns.ring_all(reason)
        self._not_before = 0.0
        self._wake()

    def ring_at(self, tenant: str, seconds: float) -> None:
        """Note that a job of `tenant` becomes due in so many seconds. It may lie below the cursor."""
        if self._turns.ring_at(tenant, time.monotonic() + seconds):
            self._wakeup.set()

    def slot_was_freed(self) -> None:
        """Claim for it, if there is a reason to."""
        if not self._turns.is_quiet:
            self._wake()

    @property
    def next_due_seconds(self) -> float:
        """How long until the next delayed job that is known of; infinite where there is none."""
        return self._turns.next_due - time.monotonic()

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether everything was looked at and there is no reason to claim now."""
        return self._has_polled and self._turns.is_quiet and not self.lost and not self._under_way

    # --- the loops ---

    def stop(self) -> None:
        """Make no more claims; those that are under way are finished and delivered. Idempotent: yes."""
        self._stopping = True
        self._wakeup.set()
        self._wakeup_beside.set()

    def abandon(self) -> None:
        """Cut off the claims that are under way; `run` then returns, if it was stopped."""
        for scope in self._under_way:
            scope.cancel()

    async def run(self) -> None:
        """Claim until `stop`."""
        try:
            async with anyio.create_task_group() as group:
                for _ in range(_BESIDE):
                    group.start_soon(self._run_beside)
                await self._run_first()
        except BaseExceptionGroup as faults:
            # One fault is the rule, and the owner's task group wraps it again.
            if len(faults.exceptions) == 1:
                raise faults.exceptions[0] from None
            raise

    async def _run_first(self) -> None:
        while not self._stopping:
            now = time.monotonic()
            if now >= self._poll_at:
                self._poll(now)
            self._turns.ring_what_is_due(now)
            if now >= self._not_before and self.lost.next_to_ask(now) is not None:
                await self._ask_again(now)
                continue
            turn = self._next_turn(now)
            if turn is not None:
                await self._claim(turn, now)
                continue
            self._idle = self._idle or (self._turns.is_quiet and not self._under_way)
            with anyio.move_on_after(self._seconds_to_wait(now)):
                await self._wakeup.wait()
            self._wakeup = anyio.Event()

    async def _run_beside(self) -> None:
        """Make the claims beside the first, which there are with a backlog only."""
        while not self._stopping:
            now = time.monotonic()
            turn = self._next_turn(now) if self._under_way else None
            if turn is not None:
                await self._claim(turn, now)
                self._wakeup.set()
                continue
            await self._wakeup_beside.wait()
            if self._wakeup_beside.is_set():
                self._wakeup_beside = anyio.Event()

    def _wake(self) -> None:
        self._wakeup.set()
        if self._under_way and self._turns.has_backlog:
            self._wakeup_beside.set()

    def _poll(self, now: float) -> None:
        self._poll_at = now + self._settings.poll_seconds * random.uniform(1 - _POLL_JITTER, 1 + _POLL_JITTER)
        self._metrics.polls += 1
        self._has_polled = True
        self._may_ask = True
        # They are tried again, but what is in the log of each is not repeated until it was allowed.
        self._turns.allow_all()
        self._turns.ring_all("poll")

    def _next_turn(self, now: float) -> Turn | None:
        """Return whom a claim is to be made for now; None where there is no reason or no slot for one."""
        room = min(self._slots.free - self._reserved, self._fit)
        if now < self._not_before or room < 1:
            return None
        if not self._under_way:
            return self._turns.take(room, now)
        if self.lost.hold_up_others or self.last_error is not None:
            return None
        return self._turns.take_beside(room, min(self._many, self._fit), now)

    def _seconds_to_wait(self, now: float) -> float:
        if now < self._not_before:
            return self._not_before - now
        return max(min(self._poll_at, self._turns.next_due, self.lost.ask_at) - now, 0.0)

    # --- one claim ---

    async def _claim(self, turn: Turn, now: float) -> None:
        claim_id = new_id()
        claimed: ClaimedJobs | None = None
        may_have_taken = False
        scope = anyio.CancelScope()
        self._under_way.add(scope)
        self._reserved += turn.limit
        if self._turns.has_backlog:
            self._wakeup_beside.set()
        error: DatabaseError | TenancyError | None = None
        try:
            with scope:
                async with self._database.connection() as conn:
                    # Once a poll, so that no claim of a job that was just enqueued looks for sweeps too.
                    asks = self._may_ask and self._sweeper.asks(now)
                    self._may_ask = False
                    may_have_taken = True
                    claimed = await RelayDispatchRepository(conn).claim(
                        self._relay_id,
                        claimed_by=self._instance_id,
                        limit=turn.limit,
                        claim_id=claim_id,
                        lease_seconds=self._settings.lease_seconds,
                        tenants=turn.tenants,
                        after=turn.positions if any(turn.positions) else None,
                        body_limit_bytes=self._settings.claim_body_limit_bytes,
                        sweep_seconds=self._settings.sweep_seconds if asks else None,
                        timeout=self._settings.patience_seconds,
                    )
                    if asks:
                        self._sweeper.told(claimed.sweep_is_due)
        except (DatabaseError, TenancyError) as refused:
            error = refused
            # Otherwise it was refused, and so rolled back.
            may_have_taken = may_have_taken and isinstance(error, DatabaseUnavailableError)
        finally:
            self._under_way.remove(scope)
            self._reserved -= turn.limit
            # Also when this task is cancelled in the middle of it.
            if claimed is None:
                if may_have_taken:
                    self.lost.add(claim_id, turn.tenants, now)
                self._failed(turn, error)
        if claimed is not None:
            self._succeeded()
            if self._told:
                self._allowed(turn.tenants)
            self._note(turn, claimed, now)
            # The leases have begun when the wait for a turn was over.
            self._deliver(claimed, now + claimed.waited_seconds)

    def _note(self, turn: Turn, claimed: ClaimedJobs, sent_at: float) -> None:
        metrics = self._metrics
        metrics.claims += 1
        metrics.jobs_claimed += len(claimed.jobs)
        metrics.claims_from_zero += not any(turn.positions)
        if claimed.jobs:
            self._fit = min(self._settings.claim_batch, _how_many_fit(claimed.jobs))
        if claimed.looked_at == 0:
            metrics.claims_empty += 1
        elif self._idle:
            self._idle = False
            if turn.reason == "notify":
                metrics.wakeups_by_notify += 1
            elif turn.reason == "timer":
                metrics.wakeups_by_timer += 1
            else:
                metrics.wakeups_by_poll += 1
        self._turns.answered(turn, claimed, sent_at, time.monotonic())
        for tenant, wait in claimed.next_due.items():
            self.ring_at(tenant, wait)

    # --- what goes wrong ---

    def _succeeded(self) -> None:
        if self.last_error is not None:
            if not isinstance(self.last_error, TenancyError):  # of these each tenant's is told by itself
                logger.info("relay %s claims again", self._relay_id)
            self.last_error = None
        self._backoff.reset()

    def _failed(self, turn: Turn, error: DatabaseError | TenancyError | None) -> None:
        if error is None:
            self._turns.failed(turn)  # it was cut off
            return
        self._metrics.claim_errors += 1
        if isinstance(error, TenancyError):
            tenant = self._turns.denied(turn)
            if tenant is not None and tenant not in self._told:
                self._told.add(tenant)
                logger.error("relay %s may not claim for tenant %s: %s", self._relay_id, tenant, error)
        else:
            self._turns.failed(turn)
            if self.last_error is None and not isinstance(error, DatabaseBusyError):
                logger.warning("relay %s cannot claim, and tries again: %s", self._relay_id, error)
            self._not_before = time.monotonic() + self._backoff.next()
        self.last_error = error

    def _allowed(self, tenants: Sequence[str]) -> None:
        for tenant in self._told.intersection(tenants):
            self._told.discard(tenant)
            logger.info("relay %s may claim for tenant %s again", self._relay_id, tenant)

    async def _claim_again(self, conn: Connection, lost: LostClaim) -> ClaimedJobs:
        return await RelayDispatchRepository(conn).claim_again(
            self._relay_id,
            claimed_by=self._instance_id,
            claim_id=lost.claim_id,
            tenants=lost.tenants,
            body_limit_bytes=self._settings.claim_body_limit_bytes,
        )

    async def _ask_again(self, now: float) -> None:
        lost, lease = self.lost.next_to_ask(now), self._settings.lease_seconds
        assert lost is not None
        try:
            async with self._database.connection() as conn:
                with anyio.fail_after(self._settings.patience_seconds):
                    claimed = await self.lost.ask(lost, conn)
        except TenancyError as error:
            self.last_error = error
            self.lost.denied(lost, now, lease)
            return
        except DatabaseError as error:
            self.last_error = error
            self._not_before = time.monotonic() + self._backoff.next()
            if isinstance(error, DatabaseUnavailableError):
                self.lost.not_answered(lost, now)
            else:
                self.lost.not_found(lost, now, lease)
            return
        self._succeeded()
        if claimed.jobs or claimed.malformed:
            self.lost.found(lost)
            self._metrics.claims_recovered += 1
            self._metrics.jobs_claimed += len(claimed.jobs)
            self._deliver(claimed, lost.sent_at)
        else:
            self.lost.not_found(lost, now, lease)


def _how_many_fit(jobs: Sequence[DispatchJob]) -> int:
    """Return how many such jobs a claim may have for their bodies to come with it: others are fetched one by one.

    Those whose bodies never come with a claim do not count.
    """
    brought = [len(job.body) for job in jobs if not job.body_pending]
    total = sum(brought)
    return max(CLAIMED_BODIES_BYTES * len(brought) // total, 1) if total else CLAIMED_BODIES_BYTES
