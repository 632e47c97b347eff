"""For tests of the gateway: a client, and a relay that is played by hand."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
from pydantic import SecretStr

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import Completion, DispatchJob
from dispatch_core.settings import CoreSettings
from gateway_sdk import GatewayClient, GatewaySettings

Connection: TypeAlias = "asyncpg.Connection[Any]"

_CORE = set(CoreSettings.model_fields)


def settings_for(dsn: str | None, **changes: Any) -> GatewaySettings:
    """Return settings for a test: no sweeps unless asked for, and nothing of the environment's DSNs."""
    core = {name: changes.pop(name) for name in list(changes) if name in _CORE}
    core["dsn"] = None if dsn is None else SecretStr(dsn)
    changes.setdefault("sweep_interval_seconds", 0)
    return GatewaySettings(core=CoreSettings(**core), **changes)


@asynccontextmanager
async def open_client(
    dsn: str | None, *, pool: Any = None, durable: Any = None, **changes: Any
) -> AsyncIterator[GatewayClient]:
    """Open a client with settings of the test's; fields of both settings classes are taken by their names."""
    async with GatewayClient(settings=settings_for(dsn, **changes), pool=pool, durable=durable) as client:
        yield client


class PlayedRelay:
    """A relay instance of one tenant that does what the test says, over one worker connection."""

    def __init__(self, conn: Connection, tenant: str, relay: str) -> None:
        self.conn = conn
        self.tenant = tenant
        self.relay = relay
        self.instance = f"played:{random.randrange(10**9)}"
        self.repository = RelayDispatchRepository(conn, tenant)

    async def claim(self, limit: int = 100, lease_seconds: float = 30) -> list[DispatchJob]:
        claimed = await self.repository.claim(
            self.relay, claimed_by=self.instance, limit=limit, lease_seconds=lease_seconds
        )
        return claimed.jobs

    async def complete(self, jobs: Sequence[DispatchJob], *, ring: bool = True, **result: Any) -> list[str]:
        """Complete jobs, with their own bodies unless the test says else; return the outcomes."""
        completions = [Completion(job.job_id, job.fence, **{"response_body": job.body, **result}) for job in jobs]
        settled = await self.repository.complete_many(self.relay, completions, claimed_by=self.instance)
        if ring:
            await self.ring_results(job.job_id for job in jobs)
        return [str(item.outcome) for item in settled]

    async def ring_results(self, job_ids: Iterable[UUID]) -> None:
        ids = [job_id.hex for job_id in job_ids]
        payloads = [",".join(ids[start : start + 200]) for start in range(0, len(ids), 200)]
        count = len(payloads)
        await self.conn.execute(
            "select relay.ring($1, $2, $3, $4)", ["result"] * count, [self.tenant] * count, [None] * count, payloads
        )

    async def work(self, limit: int = 100) -> list[DispatchJob]:
        """Claim and complete what is there."""
        jobs = await self.claim(limit)
        if jobs:
            await self.complete(jobs)
        return jobs
