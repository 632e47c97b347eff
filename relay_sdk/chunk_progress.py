"""Tell those who watch jobs that these have moved: at once when it was quiet before, then twice a second at most."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import anyio

from dispatch_core.doorbell import Doorbell

__all__ = ["ChunkProgress"]

_PAUSE_SECONDS: Final = 0.5


class ChunkProgress:
    """Gather the jobs that have moved, and ring for them."""

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._moved: dict[str, dict[UUID, None]] = {}
        self._wakeup = anyio.Event()

    def moved(self, tenant: str, job_id: UUID) -> None:
        """Note that a job is further than it was."""
        jobs = self._moved.get(tenant)
        if jobs is None:
            jobs = self._moved[tenant] = {}
            self._wakeup.set()
        jobs[job_id] = None

    async def run(self) -> None:
        """Ring until cancelled, and then for what is left."""
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup = anyio.Event()
                self._ring()
                await anyio.sleep(_PAUSE_SECONDS)
        finally:
            self._ring()

    def _ring(self) -> None:
        moved, self._moved = self._moved, {}
        for tenant, jobs in moved.items():
            self._doorbell.ring_watchers(tenant, list(jobs))
