"""Relays under test: run one for the length of a block, enqueue for it, and see how its jobs end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import DispatchRequest, DispatchResult, DispatchStatus
from relay_sdk import Relay, RelaySettings, run_relays
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually

TENANT = "acme"
RELAY = "erp"

QUICK: dict[str, Any] = {
    # Short enough to be waited for, long enough for a busy machine.
    "lease_seconds": 3.0,
    "poll_seconds": 0.5,
    "sweep_seconds": 0.3,
    "grace_seconds": 5.0,
    "retry_base_seconds": 0.05,
    "retry_cap_seconds": 0.2,
}


def new_relay(
    database: TestDatabase | str, *, tenants: list[str] | None = None, relay_id: str = RELAY, **settings: Any
) -> Relay:
    """Make a relay with quick settings; `settings` come before them."""
    dsn = database if isinstance(database, str) else database.worker_dsn
    listen_dsn = settings.pop("listen_dsn", None)
    return Relay(
        relay_id,
        tenants=tenants or [TENANT],
        dsn=dsn,
        listen_dsn=listen_dsn,
        settings=RelaySettings(**{**QUICK, **settings}),
    )


@asynccontextmanager
async def running(*relays: Relay, grace_seconds: float | None = None) -> AsyncIterator[asyncio.Task[None]]:
    """Run relays until the block ends; whatever they raise is raised at its end."""
    task = asyncio.create_task(run_relays(relays))
    try:
        await eventually(
            lambda: task.done() or all(relay.health().status in ("ok", "degraded") for relay in relays), timeout=15
        )
        if task.done():
            await task
        yield task
    finally:
        for relay in relays:
            relay.stop(grace_seconds=grace_seconds)
        await task


class Jobs:
    """A gateway's view of the jobs of one tenant, by the repository."""

    def __init__(self, connection: Any, tenant: str = TENANT, relay_id: str = RELAY) -> None:
        self.repository = RelayDispatchRepository(connection, tenant)
        self.connection = connection
        self.tenant = tenant
        self.relay_id = relay_id

    async def enqueue(self, operation: str = "Do", **options: Any) -> UUID:
        return await self.repository.enqueue(self.relay_id, operation, **options)

    async def enqueue_many(self, count: int, operation: str = "Do", **options: Any) -> list[UUID]:
        requests = [DispatchRequest(self.relay_id, operation, **options) for _ in range(count)]
        return await self.repository.enqueue_many(requests)

    async def ring(self) -> None:
        """Wake the relay, as a gateway does after its commit."""
        await self.connection.fetchval(
            "select relay.ring(array['wake'], array[$1], array[$2], array[null::text])", self.tenant, self.relay_id
        )

    async def status(self, job_id: UUID) -> DispatchStatus:
        return (await self.get(job_id)).status

    async def get(self, job_id: UUID) -> DispatchResult:
        result = await self.repository.poll_status(job_id)
        assert result is not None
        return result

    async def end(self, job_id: UUID, timeout: float = HANGS) -> DispatchResult:
        """Wait until the job has ended, and return how."""

        async def ended() -> DispatchResult | None:
            result = await self.get(job_id)
            return result if result.is_terminal and result.completed_at is not None else None

        result = await eventually(ended, timeout=timeout, message=f"job {job_id} has not ended:")
        assert result is not None
        return result

    async def ends(self, job_ids: list[UUID], timeout: float = HANGS) -> list[DispatchResult]:
        return [await self.end(job_id, timeout) for job_id in job_ids]
