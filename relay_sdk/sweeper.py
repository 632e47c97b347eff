"""Tidy up behind relays that died and gateways that went away: lost leases, jobs past their deadline, delayed ones that
are due. Any process may do it; the database gives each turn to one. Nothing that anybody is told depends on it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import anyio

from dispatch_core.database import Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import DatabaseError, TenancyError
from dispatch_core.models import EndedJob
from relay_sdk.metrics import RelayMetrics
from relay_sdk.settings import RelaySettings

__all__ = ["Sweeper"]

logger = logging.getLogger(__name__)


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

    async def run(self) -> None:
        """Sweep for ever."""
        seconds = self._settings.sweep_seconds
        while True:
            await anyio.sleep(seconds * random.uniform(0.5, 1.0))
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
                continue
            self._metrics.sweeps += 1
            self._metrics.swept += len(jobs)
            for job in jobs:
                self._swept(job)
