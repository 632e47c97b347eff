"""Tidy behind those who did not: jobs past their deadline, lost leases, results past their time.

Nothing that anybody is told depends on it. Any process may run it; the database gives each turn to one.
"""

from __future__ import annotations

import logging
import random

import anyio

from dispatch_core.database import Connection, Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import RelayDispatchError
from dispatch_core.models import EndedJob
from gateway_sdk.lanes import bounded
from gateway_sdk.settings import GatewaySettings

__all__ = ["Sweeper"]

logger = logging.getLogger(__name__)


class Sweeper:
    """One statement an interval. Run `run` in the owner's task group."""

    __slots__ = ("_database", "_doorbell", "_failing", "_settings")

    def __init__(self, database: Database, doorbell: Doorbell, settings: GatewaySettings) -> None:
        self._database = database
        self._doorbell = doorbell
        self._settings = settings
        self._failing = False

    async def run(self) -> None:
        """Sweep until cancelled; never raises for what the database does."""
        interval = self._settings.sweep_interval_seconds
        while True:
            await anyio.sleep(interval * random.uniform(0.8, 1.2))
            try:
                await self.sweep()
            except RelayDispatchError as error:
                logger.log(logging.DEBUG if self._failing else logging.WARNING, "the sweep failed: %s", error)
                self._failing = True
            else:
                self._failing = False

    async def sweep(self) -> int:
        """Do what is due, ring for what came of it, and return how many jobs were ended or put back."""
        interval = self._settings.sweep_interval_seconds

        async def run(conn: Connection) -> list[EndedJob]:
            return await RelayDispatchRepository(conn).run_sweeps(
                lease_seconds=self._settings.lease_seconds,
                keep_seconds=self._settings.result_keep_seconds,
                every_seconds=(interval, interval, interval, max(60.0, interval)),
            )

        jobs = await bounded(self._database, self._settings.core.command_timeout_seconds, run)
        for job in jobs:
            if job.status.is_terminal:
                self._doorbell.ring_results(job.tenant_id, job.job_id)
            else:
                self._doorbell.ring_relay(job.tenant_id, job.relay_id)
        return len(jobs)
