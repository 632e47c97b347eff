"""Write what became of claimed events: through an outage, and past a tenant that the login may serve no more."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.errors import ConnectionLostError, DatabaseError, TenancyError
from dispatch_core.outbox_models import ClaimedEvent, DrainReport, Group, SettledEvent, Verdict
from dispatch_core.outbox_repository import OutboxRepository

__all__ = ["Settling", "report"]

_UNWRITTEN: Final = SettledEvent("stale", "claimed")

logger = logging.getLogger("relay_dispatch.outbox")


class Settling:
    """The settling of one batch."""

    def __init__(self, verbs: OutboxRepository, *, claimed_by: str, max_attempts: int, until: float) -> None:
        """Try until `until`, of `anyio.current_time`: for as long as the claims can still be ours."""
        self._verbs = verbs
        self._claimed_by = claimed_by
        self._max_attempts = max_attempts
        self._until = until
        self.promoted: set[Group] = set()
        """Where another event of a key that has ended can be claimed now."""

    async def settle(self, verdicts: Sequence[tuple[ClaimedEvent, Verdict]]) -> list[SettledEvent]:
        """Write the verdicts; return what came of each.

        Raises: DatabaseError for another reason than an outage; TenancyError where there is no other tenant.
        """
        try:
            return await self._write(verdicts)
        except TenancyError:
            places: dict[str, list[int]] = {}
            for place, (event, _) in enumerate(verdicts):
                places.setdefault(event.tenant_id, []).append(place)
            if len(places) == 1:
                raise
        # One of them was denied, and nothing written. The others' events were delivered; left unwritten, they would be
        # delivered again.
        settled = [_UNWRITTEN] * len(verdicts)
        for tenant, its in places.items():
            try:
                part = await self._write([verdicts[place] for place in its])
            except TenancyError as error:
                logger.error("what became of %d events of tenant %s could not be written: %s", len(its), tenant, error)
                continue
            for place, item in zip(its, part, strict=True):
                settled[place] = item
        return settled

    async def _write(self, verdicts: Sequence[tuple[ClaimedEvent, Verdict]]) -> list[SettledEvent]:
        backoff = Backoff(0.1, 5.0)
        uncertain = False
        while True:
            try:
                settled, promoted = await self._verbs.settle(
                    verdicts, claimed_by=self._claimed_by, max_attempts=self._max_attempts
                )
                break
            except DatabaseError as error:
                if not error.retryable:
                    raise
                uncertain = uncertain or isinstance(error, ConnectionLostError)
                if anyio.current_time() >= self._until:
                    logger.error("what became of %d events could not be written: %s", len(verdicts), error)
                    return [_UNWRITTEN] * len(verdicts)
            await anyio.sleep(backoff.next())
        self.promoted |= promoted
        if uncertain:
            # A try before this one may have been made, its reply lost: then each event stands where it was put.
            settled = [_meant(verdict, item) for (_, verdict), item in zip(verdicts, settled, strict=True)]
        return settled


def _meant(verdict: Verdict, settled: SettledEvent) -> SettledEvent:
    put = {"delivered": ("gone",), "failed": ("ready", "parked"), "park": ("parked",), "release": ("ready",)}
    if settled.outcome == "stale" and settled.state in put[verdict.outcome]:
        return SettledEvent("applied", settled.state)
    return settled


def report(
    verdicts: Sequence[tuple[ClaimedEvent, Verdict]], settled: Sequence[SettledEvent], expired: int, reclaimed: int
) -> DrainReport:
    """Count what came of a batch, and log what is parked after its last attempt."""
    counts = {"delivered": 0, "failed": 0, "parked": 0, "released": 0, "stale": 0}
    for (event, verdict), item in zip(verdicts, settled, strict=True):
        if item.outcome == "stale":
            counts["stale"] += 1
        elif item.state == "parked":
            counts["parked"] += 1
            if verdict.outcome == "failed":
                logger.warning(
                    "event %s of kind %s is parked after its last attempt: %s",
                    event.event_id,
                    event.kind,
                    verdict.error,
                )
        else:
            counts[{"delivered": "delivered", "failed": "failed"}.get(verdict.outcome, "released")] += 1
    return DrainReport(claimed=len(settled), expired=expired, reclaimed=reclaimed, **counts)
