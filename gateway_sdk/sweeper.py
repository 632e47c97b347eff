"""Tidy behind those who did not: jobs past their deadline, lost leases, results past their time.

Nothing that anybody is told depends on it. Any process may run it; the database gives each turn to one.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import anyio

from dispatch_core.database import Connection, Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import RelayDispatchError
from dispatch_core.models import EndedJob
from gateway_sdk.bounded import bounded
from gateway_sdk.settings import GatewaySettings

__all__ = ["Sweeper"]

logger = logging.getLogger(__name__)

Sweep: TypeAlias = Callable[[], Awaitable[object]]


class Sweeper:
    """One statement an interval, and those of other rooms. Run `run` in the owner's task group."""

    __slots__ = ("_database", "_doorbell", "_failing", "_settings", "_sweeps")

    def __init__(
        self, database: Database, doorbell: Doorbell, settings: GatewaySettings, also: Sequence[Sweep] = ()
    ) -> None:
        """`also`: what else is to be done an interval."""
        self._database = database
        self._doorbell = doorbell
        self._settings = settings
        self._sweeps: Sequence[Sweep] = (self.sweep, *also)
        self._failing: set[Sweep] = set()

    async def run(self) -> None:
        """Sweep until cancelled; never raises for what the database does."""
        interval = self._settings.sweep_interval_seconds
        while True:
            await anyio.sleep(interval * random.uniform(0.8, 1.2))
            for sweep in self._sweeps:
                try:
                    await sweep()
                except RelayDispatchError as error:
                    level = logging.DEBUG if sweep in self._failing else logging.WARNING
                    logger.log(level, "the sweep failed: %s", error)
                    self._failing.add(sweep)
                else:
                    self._failing.discard(sweep)

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
