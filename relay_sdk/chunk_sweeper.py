"""Tidy up behind relays that died: chunks whose lease is over, and jobs that nobody has ended.

Any process may do it; the database gives each turn to one. Nothing that anybody is told depends on it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import anyio

from dispatch_core.database import Database
from dispatch_core.durable_models import Swept
from dispatch_core.errors import DatabaseError, TenancyError
from dispatch_core.settings import DurableJobsSettings
from relay_sdk.chunk_writes import verbs
from relay_sdk.metrics import RelayMetrics

__all__ = ["ChunkSweeper"]

logger = logging.getLogger(__name__)


class ChunkSweeper:
    """Sweep for a relay, about as often as the settings say."""

    def __init__(
        self,
        relay_id: str,
        instance_id: str,
        *,
        settings: DurableJobsSettings,
        patience: float,
        database: Database,
        swept: Callable[[Sequence[Swept]], None],
        metrics: RelayMetrics,
    ) -> None:
        """Take `swept(rows)`, called with what a sweep has done."""
        self._relay_id = relay_id
        self._instance_id = instance_id
        self._settings = settings
        self._patience = patience
        self._database = database
        self._swept = swept
        self._metrics = metrics

    async def run(self) -> None:
        """Sweep for ever."""
        seconds = self._settings.sweep_seconds
        while True:
            # The first one soon after the start: whoever starts may come after one that died.
            await anyio.sleep(seconds * random.uniform(0.5, 1.0))
            await self._sweep()

    async def _sweep(self) -> None:
        try:
            async with self._database.connection() as conn:
                with anyio.fail_after(self._patience):
                    rows = await verbs(conn, self._settings).run_sweeps(self._instance_id)
        except (DatabaseError, TenancyError) as error:
            logger.debug("relay %s could not sweep for chunks: %s", self._relay_id, error)
            return
        self._metrics.chunk_sweeps += 1
        self._metrics.chunks_reaped += sum(row.sweep == "lease" for row in rows)
        if rows:
            self._swept(rows)
