"""Tidy up behind relays that died and gateways that went away: lost leases, jobs past their deadline, delayed ones that
are due. Any process may do it; the database gives each turn to one. Nothing that anybody is told depends on it.

Whether a turn is to be had, a claim learns on its way, so of many idle relays with one login none asks for that alone:

    the claim of a poll says that a sweep is due                        sweep
    claims that come as often as sweeps have not said anything for      sweep: the database knows whether one is due
    longer than a poll can take (no free slot, no claim that succeeds)
    claims come more seldom than sweeps                                 sweep by the clock
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import Final

import anyio

from dispatch_core.database import Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import DatabaseError, TenancyError
from dispatch_core.models import EndedJob
from relay_sdk.metrics import RelayMetrics
from relay_sdk.settings import RelaySettings

__all__ = ["Sweeper"]

logger = logging.getLogger(__name__)

_FRESH: Final = 0.6
"""That part of an interval for which the answer of one claim is enough."""


class Sweeper:
    """Run the sweeps of one relay whenever they are due."""

    def __init__(
        self,
        relay_id: str,
        *,
        settings: RelaySettings,
        database: Database,
        swept: Callable[[EndedJob], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take `swept(job)`, called for each job that a sweep ended or put back."""
        self._relay_id = relay_id
        self._settings = settings
        self._database = database
        self._swept = swept
        self._metrics = metrics

        self._told_at = -math.inf
        self._asked_at = -math.inf
        self._is_asking = False
        self._due = anyio.Event()

    def asks(self, now: float) -> bool:
        """Whether the claim that is sent now for a poll asks if a sweep is due. `now` is monotonic.

        The answer may cost the server a search. So where the last claim that asked has got none, this one does not ask:
        otherwise a search that takes longer than claims may would let no claim succeed.
        """
        if now - max(self._told_at, self._asked_at) < _FRESH * self._settings.sweep_seconds:
            return False
        self._asked_at = now
        self._is_asking = not self._is_asking
        return self._is_asking

    def told(self, is_due: bool) -> None:
        """Note what a claim that asked was answered."""
        self._is_asking = False
        self._told_at = time.monotonic()
        if is_due:
            self._due.set()

    async def run(self) -> None:
        """Sweep for ever."""
        settings = self._settings
        seconds = settings.sweep_seconds
        # Polls are up to a quarter later than their interval says, and take a while.
        shares = (1.5, 2.0) if settings.poll_seconds <= seconds else (0.5, 1.0)
        self._told_at = max(self._told_at, time.monotonic())
        while True:
            patience = seconds * random.uniform(*shares)
            while not self._due.is_set() and (left := self._told_at + patience - time.monotonic()) > 0:
                with anyio.move_on_after(left):
                    await self._due.wait()
            await self._sweep(seconds)
            self._told_at = time.monotonic()
            self._due = anyio.Event()

    async def _sweep(self, seconds: float) -> None:
        try:
            async with self._database.connection() as conn:
                with anyio.fail_after(self._settings.patience_seconds):
                    jobs = await RelayDispatchRepository(conn).run_sweeps(
                        self._relay_id,
                        lease_seconds=self._settings.lease_seconds,
                        every_seconds=(seconds, seconds, min(seconds, 2.0), 60.0),
                    )
        except (DatabaseError, TenancyError) as error:
            logger.debug("relay %s could not sweep: %s", self._relay_id, error)
            return
        self._metrics.sweeps += 1
        self._metrics.swept += len(jobs)
        for job in jobs:
            self._swept(job)
