"""Claim jobs: only for free slots, one claim at a time but for a backlog, and none without a reason.

A tenant is *rung* when there is a reason to claim for it: a notification, a poll, a delayed job that is due, a claim
that came back full. Reasons gather while a claim is under way or no slot is free, so a burst of rings is one claim. A
full claim leaves its tenants rung, and is followed by another at once; while that one is under way a second may be, for
tenants whose last claim came back full and for many free slots, so that the server never waits for this process.

    rung tenants and free slots -> claim -> jobs to the executor, tenants that may have more are rung again
    a reply that was lost       -> ask for that claim by its id, until one lease has passed and there is an answer
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias
from uuid import UUID

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.database import Connection, Database
from dispatch_core.dispatch import CLAIMED_BODIES_BYTES, RelayDispatchRepository
from dispatch_core.errors import DatabaseBusyError, DatabaseError, DatabaseUnavailableError, TenancyError
from dispatch_core.ids import new_id
from dispatch_core.models import ClaimedJobs, DispatchJob
from relay_sdk.cursor import ClaimCursor
from relay_sdk.metrics import RelayMetrics
from relay_sdk.settings import RelaySettings
from relay_sdk.slots import Slots
from relay_sdk.sweeper import Sweeper

__all__ = ["Claimer", "Reason"]

logger = logging.getLogger(__name__)

Reason: TypeAlias = Literal["notify", "poll", "timer", "more"]

_REASONS: Final[tuple[Reason, ...]] = ("more", "notify", "timer", "poll")
"""Which one a claim has that has several."""

_SHARE: Final = 16
"""Jobs for each tenant in a claim, where many have a backlog; and tenants that share even a small claim."""

_POLL_JITTER: Final = 0.25

_MANY: Final = 4
"""That part of a batch must be free for a claim beside another: it is in no hurry, and small ones cost as much."""


class _Unanswered:
    """A claim whose reply was lost: it may have taken jobs, or may still be about to."""

    __slots__ = ("ask_at", "backoff", "claim_id", "sent_at", "tenants")

    def __init__(self, claim_id: UUID, tenants: Sequence[str], sent_at: float) -> None:
        self.claim_id = claim_id
        self.tenants = list(tenants)
        self.sent_at = sent_at
        self.ask_at = 0.0
        self.backoff = Backoff(1.0, 4.0)


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
        self._cursors = {tenant: ClaimCursor() for tenant in tenants}
        self._rung: dict[str, Reason] = {}
        # When a tenant is to be rung because a job is due, or because a claim from zero is owed and then allowed.
        self._due: dict[str, float] = {}
        self._next_due = math.inf
        self._poll_at = 0.0
        self._unanswered: list[_Unanswered] = []
        self._backoff = Backoff(0.1, 2.0)
        self._not_before = 0.0
        self._denied: set[str] = set()
        self._told: set[str] = set()
        self._one_by_one = False
        self._wakeup = anyio.Event()
        self._idle = True
        self._stopping = False
        # The claims under way, and the slots that they may fill.
        self._under_way: dict[anyio.CancelScope, list[str]] = {}
        self._reserved = 0
        self._many = max(1, min(settings.claim_batch, slots.capacity) // _MANY)
        # How many jobs bring their bodies along in one claim, if these are as large as those of the last one.
        self._fit = settings.claim_batch
        # Tenants with a backlog: they stay rung while a claim for them is under way. And when the last claim was sent
        # whose answer said so: a short answer to an earlier one is older news.
        self._full: dict[str, float] = {}
        self._second_wakeup = anyio.Event()
        self.last_error: Exception | None = None
        """Why the last claim failed; None after one that did not."""
        self._has_polled = False

    # --- reasons to claim ---

    def ring(self, tenant: str) -> None:
        """Note that there may be work for `tenant`."""
        self._rung[tenant] = "notify"
        self._wakeup.set()

    def ring_all(self, reason: Reason = "poll") -> None:
        """Note that there may be work for every tenant, and claim without waiting for any backoff."""
        for tenant in self._cursors:
            # Also where it is rung: "more" may be there because a claim is under way, whose answer takes it away.
            if self._rung.get(tenant, "more") == "more":
                self._rung[tenant] = reason
        self._not_before = 0.0
        self._wakeup.set()

    def ring_at(self, tenant: str, seconds: float) -> None:
        """Note that a job of `tenant` becomes due in so many seconds. It may lie below the cursor."""
        when = time.monotonic() + seconds
        if when < self._due.get(tenant, math.inf):
            self._due[tenant] = when
            if when < self._next_due:
                self._next_due = when
                self._wakeup.set()

    def slot_was_freed(self) -> None:
        """Claim for it, if there is a reason to."""
        if self._rung:
            self._wakeup.set()
            if self._full and self._under_way:
                self._second_wakeup.set()

    @property
    def next_due_seconds(self) -> float:
        """How long until the next delayed job that is known of; infinite where there is none."""
        return self._next_due - time.monotonic()

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether everything was looked at and there is no reason to claim now."""
        return self._has_polled and not self._rung and not self._unanswered and not self._under_way

    # --- the loop ---

    def stop(self) -> None:
        """Make no more claims; those that are under way are finished and delivered. Idempotent: yes."""
        self._stopping = True
        self._wakeup.set()
        self._second_wakeup.set()

    def abandon(self) -> None:
        """Cut off the claims that are under way; `run` then returns, if it was stopped."""
        for scope in self._under_way:
            scope.cancel()

    async def run(self) -> None:
        """Claim until `stop`."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._run_second)
                await self._run_first()
        except BaseExceptionGroup as faults:
            # One fault is the rule, and the owner's task group wraps it again.
            if len(faults.exceptions) == 1:
                raise faults.exceptions[0] from None
            raise

    async def _run_first(self) -> None:
        while not self._stopping:
            now = time.monotonic()
            self._ring_what_is_due(now)
            if now >= self._not_before:
                if any(lost.ask_at <= now for lost in self._unanswered):
                    await self._ask_again(now)
                    continue
                beside = bool(self._under_way)
                if self._may_claim_beside(now) if beside else self._rung and self._has_room():
                    await self._claim(now, beside=beside)
                    continue
            self._idle = self._idle or not (self._rung or self._under_way)
            with anyio.move_on_after(self._seconds_to_wait(now)):
                await self._wakeup.wait()
            self._wakeup = anyio.Event()

    async def _run_second(self) -> None:
        """Claim while there is a backlog and the other loop's claim is under way."""
        while not self._stopping:
            now = time.monotonic()
            if self._under_way and self._may_claim_beside(now):
                await self._claim(now, beside=True)
                self._wakeup.set()
                continue
            await self._second_wakeup.wait()
            self._second_wakeup = anyio.Event()

    def _may_claim_beside(self, now: float) -> bool:
        troubled = self._unanswered or self._one_by_one or self.last_error is not None or now < self._not_before
        return not troubled and not self._full.keys().isdisjoint(self._rung) and self._has_room()

    def _has_room(self) -> bool:
        return self._slots.free - self._reserved >= (min(self._many, self._fit) if self._under_way else 1)

    def _ring_what_is_due(self, now: float) -> None:
        if now >= self._poll_at:
            self._poll_at = now + self._settings.poll_seconds * random.uniform(1 - _POLL_JITTER, 1 + _POLL_JITTER)
            self._metrics.polls += 1
            self._has_polled = True
            # They are tried again, but what is in the log of each is not repeated until it was allowed.
            self._denied.clear()
            for tenant in self._cursors:
                self._rung.setdefault(tenant, "poll")
        if now >= self._next_due:
            for tenant in [tenant for tenant, when in self._due.items() if when <= now]:
                del self._due[tenant]
                self._cursors[tenant].owed = True
                self._rung.setdefault(tenant, "timer")
            self._next_due = min(self._due.values(), default=math.inf)

    def _seconds_to_wait(self, now: float) -> float:
        if now < self._not_before:
            return self._not_before - now
        asks = (lost.ask_at for lost in self._unanswered)
        return max(min(self._poll_at, self._next_due, *asks) - now, 0.0)

    # --- one claim ---

    async def _claim(self, now: float, *, beside: bool = False) -> None:
        limit = min(self._slots.free - self._reserved, self._fit)
        reason, tenants = self._take_rung(limit)
        if not tenants:
            return
        positions = [self._cursors[tenant].position(now) for tenant in tenants]
        claim_id = new_id()
        claimed: ClaimedJobs | None = None
        may_have_taken = False
        scope = anyio.CancelScope()
        self._under_way[scope] = tenants
        self._reserved += limit
        if not beside and self._may_claim_beside(now):
            self._second_wakeup.set()
        try:
            with scope:
                async with self._database.connection() as conn:
                    asks = self._sweeper.wants_to_know(now)
                    may_have_taken = True
                    claimed = await RelayDispatchRepository(conn).claim(
                        self._relay_id,
                        claimed_by=self._instance_id,
                        limit=limit,
                        claim_id=claim_id,
                        lease_seconds=self._settings.lease_seconds,
                        tenants=tenants,
                        after=positions if any(positions) else None,
                        body_limit_bytes=self._settings.claim_body_limit_bytes,
                        asks_for_sweep=asks,
                        timeout=self._settings.patience_seconds,
                    )
                    if asks:
                        self._sweeper.told(claimed.sweep_is_due)
        except DatabaseUnavailableError as error:
            self._failed(error, tenants)
        except DatabaseError as error:
            may_have_taken = False  # refused, and so rolled back
            self._failed(error, tenants)
        except TenancyError as error:
            may_have_taken = False
            self._denied_for(tenants, error)
        finally:
            del self._under_way[scope]
            self._reserved -= limit
            # Also when this task is cancelled in the middle of it.
            if claimed is None:
                for tenant, position in zip(tenants, positions, strict=True):
                    self._cursors[tenant].unanswered(position)
                if may_have_taken:
                    self._unanswered.append(_Unanswered(claim_id, tenants, now))
        if claimed is not None:
            self._succeeded()
            if self._told:
                self._allowed(tenants)
            self._note(claimed, tenants, positions, limit, now, reason)
            self._deliver(claimed, now)

    def _take_rung(self, limit: int) -> tuple[Reason, list[str]]:
        for tenant in self._denied:
            self._rung.pop(tenant, None)
        # Beside another claim, those with a backlog; and whoever was rung that the other claim does not ask for. With a
        # backlog in hand there is always one under way, and a lone job must not wait for its end.
        asked = {tenant for tenants in self._under_way.values() for tenant in tenants}
        tenants = [tenant for tenant in self._rung if tenant in self._full or tenant not in asked]
        if self._one_by_one:
            del tenants[1:]
        elif "more" in self._rung.values():
            # Each tenant costs a turn inside the claim. With a backlog in hand some tenants fill it, so they take turns
            # from claim to claim; without, one statement for all is the cheapest way to find work.
            del tenants[max(limit // _SHARE, _SHARE) :]
        reasons = {self._rung.pop(tenant) for tenant in tenants}
        if self._full and len(tenants) <= limit:
            # Behind the others, for the next claim, which need not wait for this one's answer. Not where the claim may
            # leave tenants out: those come first then.
            self._rung.update((tenant, "more") for tenant in tenants if tenant in self._full)
        self._one_by_one = self._one_by_one and bool(self._rung)
        reason: Reason = next((each for each in _REASONS if each in reasons), "poll")
        return reason, tenants

    def _note(
        self,
        claimed: ClaimedJobs,
        tenants: list[str],
        positions: list[int],
        limit: int,
        sent_at: float,
        reason: Reason,
    ) -> None:
        metrics = self._metrics
        metrics.claims += 1
        metrics.jobs_claimed += len(claimed.jobs)
        metrics.claims_from_zero += not any(positions)
        if claimed.jobs:
            self._fit = min(self._settings.claim_batch, _how_many_fit(claimed.jobs))
        now = time.monotonic()
        found = claimed.looked_at > 0
        if not found:
            metrics.claims_empty += 1
        elif self._idle:
            self._idle = False
            if reason == "notify":
                metrics.wakeups_by_notify += 1
            elif reason == "timer":
                metrics.wakeups_by_timer += 1
            else:
                metrics.wakeups_by_poll += 1
        seconds = (now - sent_at) / len(tenants)
        more, unseen = _what_is_left(claimed, tenants, limit)
        for tenant, position in zip(tenants, positions, strict=True):
            cursor = self._cursors[tenant]
            if tenant in unseen:
                cursor.unanswered(position)  # what it owes from zero it still does
                continue
            full = tenant in more
            cursor.answered(position, claimed.cursors.get(tenant), full, seconds, now)
            if full:
                self._full[tenant] = max(sent_at, self._full.get(tenant, 0.0))
                continue
            if self._full.get(tenant, math.inf) <= sent_at:
                del self._full[tenant]
                if self._rung.get(tenant) == "more":
                    del self._rung[tenant]
            if cursor.owed:
                self._ring_from_zero(tenant, cursor, now)
        for tenant in (*unseen, *more):
            self._rung.setdefault(tenant, "more")
        for tenant, wait in claimed.next_due.items():
            self.ring_at(tenant, wait)

    def _ring_from_zero(self, tenant: str, cursor: ClaimCursor, now: float) -> None:
        if now >= cursor.zero_allowed_at:
            self._rung.setdefault(tenant, "more")
        elif cursor.zero_allowed_at < self._due.get(tenant, math.inf):
            self._due[tenant] = cursor.zero_allowed_at
            self._next_due = min(self._next_due, cursor.zero_allowed_at)

    # --- what goes wrong ---

    def _succeeded(self) -> None:
        if self.last_error is not None:
            if not isinstance(self.last_error, TenancyError):  # of these each tenant's is told by itself
                logger.info("relay %s claims again", self._relay_id)
            self.last_error = None
        self._backoff.reset()

    def _failed(self, error: DatabaseError, tenants: list[str]) -> None:
        self._metrics.claim_errors += 1
        if self.last_error is None and not isinstance(error, DatabaseBusyError):
            logger.warning("relay %s cannot claim, and tries again: %s", self._relay_id, error)
        self.last_error = error
        self._full.clear()
        for tenant in tenants:
            self._rung.setdefault(tenant, "poll")
        self._not_before = time.monotonic() + self._backoff.next()

    def _denied_for(self, tenants: list[str], error: TenancyError) -> None:
        # One tenant that was taken from this login must not stop the others: find it by claiming for one at a time.
        self._metrics.claim_errors += 1
        self.last_error = error
        self._full.clear()
        if len(tenants) > 1:
            self._one_by_one = True
            for tenant in tenants:
                self._rung.setdefault(tenant, "poll")
            return
        self._denied.update(tenants)
        if tenants[0] not in self._told:
            self._told.add(tenants[0])
            logger.error("relay %s may not claim for tenant %s: %s", self._relay_id, tenants[0], error)

    def _allowed(self, tenants: list[str]) -> None:
        for tenant in self._told.intersection(tenants):
            self._told.discard(tenant)
            logger.info("relay %s may claim for tenant %s again", self._relay_id, tenant)

    async def _ask_again(self, now: float) -> None:
        lost = next(entry for entry in self._unanswered if entry.ask_at <= now)
        try:
            async with self._database.connection() as conn:
                with anyio.fail_after(self._settings.patience_seconds):
                    claimed = await self.ask_for(lost, conn)
        except (DatabaseError, TenancyError) as error:
            self.last_error = error
            self._not_before = time.monotonic() + self._backoff.next()
            claimed = None
            answered = not isinstance(error, DatabaseUnavailableError)
        else:
            answered = True
            self._succeeded()
        if claimed is not None and (claimed.jobs or claimed.malformed):
            self._unanswered.remove(lost)
            self._metrics.claims_recovered += 1
            self._metrics.jobs_claimed += len(claimed.jobs)
            self._deliver(claimed, lost.sent_at)
        elif answered and now - lost.sent_at > self._settings.lease_seconds:
            # By now its lease is over: what it may have taken is taken back, by whoever sweeps. While the database is
            # away nobody does, and after an outage of any length the holders have one lease to come back.
            self._unanswered.remove(lost)
        else:
            lost.ask_at = now + lost.backoff.next()

    async def ask_for(self, lost: _Unanswered, conn: Connection) -> ClaimedJobs:
        """Return what a claim has taken whose reply was lost."""
        return await RelayDispatchRepository(conn).claim_again(
            self._relay_id,
            claimed_by=self._instance_id,
            claim_id=lost.claim_id,
            tenants=lost.tenants,
            body_limit_bytes=self._settings.claim_body_limit_bytes,
        )

    @property
    def unanswered(self) -> list[_Unanswered]:
        """Claims whose reply was lost and that have not been asked for with success."""
        return self._unanswered


def _how_many_fit(jobs: Sequence[DispatchJob]) -> int:
    """Return how many such jobs a claim may have for their bodies to come with it: others are fetched one by one.

    Those whose bodies never come with a claim do not count.
    """
    brought = [len(job.body) for job in jobs if not job.body_pending]
    total = sum(brought)
    return max(CLAIMED_BODIES_BYTES * len(brought) // total, 1) if total else CLAIMED_BODIES_BYTES


def _what_is_left(claimed: ClaimedJobs, tenants: list[str], limit: int) -> tuple[list[str], list[str]]:
    """Return the tenants that may have more, those that got least first; and those the claim did not come to.

    It goes round once, with an equal share for each, and gives what is left over to those that used up theirs.
    """
    if claimed.looked_at < limit:
        return [], []
    counts = claimed.counts
    share = max(1, limit // len(tenants))
    unseen: list[str] = []
    if limit < len(tenants):
        last = max(n for n, tenant in enumerate(tenants) if tenant in counts)
        tenants, unseen = tenants[: last + 1], tenants[last + 1 :]
    more = [tenant for tenant in tenants if counts.get(tenant, 0) >= share]
    more.sort(key=lambda tenant: counts[tenant])
    return more, unseen
