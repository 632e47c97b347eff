"""Claim chunks: only for free slots, as few statements as the work needs, and none without a reason.

Reasons gather while a claim is under way or no slot is free, so a burst of rings is one claim. One that came full is
followed by another at once.

    wanted and free slots     -> claim -> chunks to the executor
    a reply that was lost     -> ask for that claim by its token (`lost_claims`)
    skip_locked_claims off    -> look for candidates, then claim one after the other by compare-and-set
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.cursor import pause_after
from dispatch_core.database import Connection, Database
from dispatch_core.durable_models import ClaimedChunk, ClaimedChunks
from dispatch_core.errors import DatabaseBusyError, DatabaseError, DatabaseUnavailableError, TenancyError
from dispatch_core.ids import new_id
from dispatch_core.settings import DurableJobsSettings
from relay_sdk.chunk_registry import ChunkRegistry
from relay_sdk.chunk_slots import ChunkSlots
from relay_sdk.chunk_wants import Ask, Wants
from relay_sdk.chunk_writes import verbs
from relay_sdk.lost_claims import LostClaim, LostClaims
from relay_sdk.metrics import RelayMetrics

__all__ = ["ChunkClaimer"]

logger = logging.getLogger(__name__)

_POLL_JITTER: Final = 0.25

_BEHIND_SECONDS: Final = 1.0
"""For so long claims may look behind what was claimed only, while they come full. What comes back lies before it."""

_PAUSE: Final = 19.0
"""Times the duration of a claim from the beginning until the next one: these take a twentieth of the time at most."""

_MISSED_SECONDS: Final = 0.1
"""Until a tenant is looked at again where a chunk was seen and could not be had."""


class ChunkClaimer:
    """Keep the slots for chunks filled. The ring methods are plain functions and never wait."""

    def __init__(
        self,
        relay_id: str,
        tenants: Sequence[str],
        instance_id: str,
        *,
        registry: ChunkRegistry,
        settings: DurableJobsSettings,
        poll_seconds: float,
        batch: int,
        patience: float,
        database: Database,
        slots: ChunkSlots,
        deliver: Callable[[Sequence[ClaimedChunk]], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take `deliver(chunks)`, which takes a slot for each chunk and starts it."""
        self._relay_id = relay_id
        self._instance_id = instance_id
        self._handlers = registry.handlers
        self._settings = settings
        self._lease = settings.lease_seconds
        self._poll_seconds = poll_seconds
        self._batch = batch
        self._patience = patience
        self._database = database
        self._slots = slots
        self._deliver = deliver
        self._metrics = metrics
        self._wants = Wants(tenants, [handler.kind for handler in self._handlers])
        self.lost: Final[LostClaims[ClaimedChunks]] = LostClaims(self._claim_again)
        """Claims whose reply was lost and that have not been asked for with success."""
        self._start = 0
        # Where an old transaction keeps dead index entries alive, each claim from a job's beginning wades through them.
        self._after: dict[UUID, int] = {}
        self._from_beginning_at = 0.0
        self._poll_at = 0.0
        self._has_polled = False
        self._backoff = Backoff(0.1, 2.0)
        self._not_before = 0.0
        self._under_way: anyio.CancelScope | None = None
        self._stopping = False
        self._told: set[str] = set()
        self._wakeup = anyio.Event()
        self.last_error: Exception | None = None
        """Why the last claim failed; None after one that did not."""

    # --- reasons to claim ---

    def ring(self, tenant: str) -> None:
        """Note that there may be chunks of `tenant`."""
        self._wants.ring(tenant)
        self._wakeup.set()

    def ring_all(self) -> None:
        """Note that there may be chunks of every tenant, and claim without waiting for any backoff."""
        self._wants.ring_all()
        self._not_before = 0.0
        self._wakeup.set()

    def ring_at(self, tenant: str, seconds: float) -> None:
        """Note that a chunk of `tenant` becomes due in so many seconds."""
        self._wants.ring_at(tenant, time.monotonic() + seconds)
        self._wakeup.set()

    def slot_was_freed(self) -> None:
        """Claim for it, if there is a reason to."""
        if not self._wants.is_quiet:
            self._wakeup.set()

    @property
    def next_due_seconds(self) -> float:
        """How long until the next retry that is known of; infinite where there is none."""
        return self._wants.next_due - time.monotonic()

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether everything was looked at and there is no reason to claim now."""
        return self._has_polled and self._wants.is_quiet and not self.lost and self._under_way is None

    @property
    def is_claiming(self) -> bool:
        """Whether the database may have given this relay chunks of which it does not know yet."""
        return self._under_way is not None or bool(self.lost)

    # --- the loop ---

    def stop(self) -> None:
        """Make no more claims; one that is under way is finished and delivered. Idempotent: yes."""
        self._stopping = True
        self._wakeup.set()

    def abandon(self) -> None:
        """Cut off the claim that is under way; `run` then returns, if it was stopped."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def run(self) -> None:
        """Claim until `stop`."""
        while not self._stopping:
            now = time.monotonic()
            if now >= self._poll_at:
                self._poll(now)
            self._wants.ring_what_is_due(now)
            if now >= self._not_before:
                if self.lost.next_to_ask(now) is not None:
                    await self._ask_again(now)
                    continue
                if (ask := self._next_ask()) is not None:
                    await self._claim(ask, now)
                    continue
            with anyio.move_on_after(self._seconds_to_wait(now)):
                await self._wakeup.wait()
            self._wakeup = anyio.Event()

    def _poll(self, now: float) -> None:
        self._poll_at = now + self._poll_seconds * random.uniform(1 - _POLL_JITTER, 1 + _POLL_JITTER)
        self._metrics.chunk_polls += 1
        self._has_polled = True
        self._wants.ring_all()

    def _next_ask(self) -> Ask | None:
        free = min(self._slots.free, self._batch)
        # Not for as long as a lost claim is asked for, which is a lease: most never came to the server. What one brings
        # after its first answer, because it was still under way there, is taken beside what is in hand then.
        if free < 1 or self.lost.are_open:
            return None
        return self._wants.take({handler.kind: handler.room(free) for handler in self._handlers}, free)

    def _seconds_to_wait(self, now: float) -> float:
        if now < self._not_before:
            return self._not_before - now
        return max(min(self._poll_at, self._wants.next_due, self.lost.ask_at) - now, 0.0)

    # --- one claim ---

    async def _claim(self, ask: Ask, now: float) -> None:
        token = new_id()
        after = self._after if now < self._from_beginning_at else {}
        claimed: ClaimedChunks | None = None
        may_have_taken = False
        error: DatabaseError | TenancyError | None = None
        self._start += 1
        self._under_way = scope = anyio.CancelScope()
        try:
            with scope:
                async with self._database.connection() as conn:
                    # The wait for a connection is no part of the lease.
                    now = time.monotonic()
                    may_have_taken = True
                    with anyio.fail_after(self._patience):
                        if self._settings.skip_locked_claims:
                            claimed = await verbs(conn, self._settings).claim(
                                ask.tenants,
                                ask.kinds,
                                limit=ask.limit,
                                limits=ask.limits,
                                holder=self._instance_id,
                                token=token,
                                lease_seconds=self._lease,
                                start=self._start % len(ask.tenants),
                                after=after,
                            )
                        else:
                            claimed = await self._claim_one_by_one(conn, ask, token)
        except (DatabaseError, TenancyError) as refused:
            error = refused
            # Otherwise it was refused, and so rolled back; but for chunks that were claimed one by one before that.
            may_have_taken = may_have_taken and (
                isinstance(error, DatabaseUnavailableError) or not self._settings.skip_locked_claims
            )
        finally:
            self._under_way = None
            # Also when this task is cancelled in the middle of it.
            if claimed is None:
                if may_have_taken:
                    self.lost.add(token, ask.tenants, now)
                self._failed(ask, error)
        if claimed is not None:
            self._succeeded()
            self._told.difference_update(ask.tenants)
            self._note(ask, claimed)
            self._note_numbers(ask, claimed.chunks, after, now)
            self._deliver(claimed.chunks)

    async def _claim_one_by_one(self, conn: Connection, ask: Ask, token: UUID) -> ClaimedChunks:
        """Claim without SKIP LOCKED: what was seen is claimed if it still is as it was seen."""
        repository = verbs(conn, self._settings)
        claimed = ClaimedChunks([], {})
        first = self._start % len(ask.tenants)
        for tenant in (*ask.tenants[first:], *ask.tenants[:first]):
            for kind, most in zip(ask.kinds, ask.limits, strict=True):
                left = min(most - sum(chunk.kind == kind for chunk in claimed.chunks), ask.limit - len(claimed.chunks))
                if left < 1:
                    continue
                # Others look at the same ones: a few more are looked at, so that not all of them are somebody's.
                for job_id, seq, version in await repository.candidates(tenant, [kind], limit=2 * left):
                    if left < 1:
                        break
                    before = left
                    got = await repository.claim_chunk(
                        tenant,
                        job_id,
                        seq,
                        version,
                        holder=self._instance_id,
                        token=token,
                        lease_seconds=self._lease,
                    )
                    claimed.chunks.extend(got.chunks)
                    left -= len(got.chunks)
                    if left == before:
                        # Somebody was first, or decides about the job; there may be others behind it.
                        self._wants.ring_at(tenant, time.monotonic() + _MISSED_SECONDS)
        return claimed

    def _note(self, ask: Ask, claimed: ClaimedChunks) -> None:
        self._metrics.chunk_claims += 1
        self._metrics.chunk_claims_empty += not claimed.chunks
        counts = Counter(chunk.kind for chunk in claimed.chunks)
        self._wants.answered(ask, counts, len(claimed.chunks))
        for tenant, seconds in claimed.waiting.items():
            self.ring_at(tenant, seconds)

    def _note_numbers(self, ask: Ask, chunks: Sequence[ClaimedChunk], after: dict[UUID, int], sent_at: float) -> None:
        """Note behind what the next claims are to look: behind a claim that came full."""
        if len(chunks) < ask.limit:
            self._after = {}
            if after:
                self._wants.put_back(ask)  # before what it looked behind there may be something still
            return
        if not after:
            now = time.monotonic()
            self._after = {}
            self._from_beginning_at = now + max(_BEHIND_SECONDS, pause_after(now - sent_at, _PAUSE))
        for chunk in chunks:
            lease = chunk.lease
            self._after[lease.job_id] = max(lease.seq, self._after.get(lease.job_id, 0))

    # --- what goes wrong ---

    def _succeeded(self) -> None:
        if self.last_error is not None:
            if not isinstance(self.last_error, TenancyError):  # of these each tenant's is told by itself
                logger.info("relay %s claims chunks again", self._relay_id)
            self.last_error = None
        self._backoff.reset()

    def _failed(self, ask: Ask, error: DatabaseError | TenancyError | None) -> None:
        if error is None:
            self._wants.put_back(ask)
            return  # it was cut off
        self._metrics.chunk_claim_errors += 1
        if isinstance(error, TenancyError):
            # The others are not held up by it.
            tenant = self._wants.denied(ask)
            if tenant is not None and tenant not in self._told:
                self._told.add(tenant)
                logger.error("relay %s may not claim chunks for tenant %s: %s", self._relay_id, tenant, error)
            self.last_error = error
            return
        self._wants.put_back(ask)
        if self.last_error is None and not isinstance(error, DatabaseBusyError):
            logger.warning("relay %s cannot claim chunks, and tries again: %s", self._relay_id, error)
        self._not_before = time.monotonic() + self._backoff.next()
        self.last_error = error

    async def _claim_again(self, conn: Connection, lost: LostClaim) -> ClaimedChunks:
        return await verbs(conn, self._settings).claim_again(
            lost.tenants, lost.claim_id, holder=self._instance_id, local_deadline=lost.sent_at + self._lease
        )

    async def _ask_again(self, now: float) -> None:
        lost = self.lost.next_to_ask(now)
        assert lost is not None
        try:
            async with self._database.connection() as conn:
                with anyio.fail_after(self._patience):
                    claimed = await self.lost.ask(lost, conn)
        except TenancyError as error:
            self.last_error = error
            self.lost.denied(lost, now, self._lease)
            return
        except DatabaseError as error:
            self.last_error = error
            self._not_before = time.monotonic() + self._backoff.next()
            if isinstance(error, DatabaseUnavailableError):
                self.lost.not_answered(lost, now)
            else:
                self.lost.not_found(lost, now, self._lease)
            return
        self._succeeded()
        in_hand = {(slot.lease.job_id, slot.lease.seq, slot.lease.version) for slot in self._slots}
        found = [
            chunk
            for chunk in claimed.chunks
            if (chunk.lease.job_id, chunk.lease.seq, chunk.lease.version) not in in_hand
        ]
        if found and self._settings.skip_locked_claims:
            self.lost.found(lost)
        else:
            # One by one, the last one may be under way still. What has come is there, so others need not wait for it.
            lost.is_denied = lost.is_denied or bool(found)
            self.lost.not_found(lost, now, self._lease)
        if found:
            self._metrics.chunk_claims_recovered += 1
            self._deliver(found)
