"""For tests of the protocol itself, at the floor of SQL and repository: logins of a test's own, and jobs by hand."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import Completion, DispatchJob, DispatchRequest, PutBack, Settled
from tests.support.databases import TestDatabase

Connection: TypeAlias = "asyncpg.Connection[Any]"

TENANT = "acme"
RELAY = "erp"
ME = "erp:instance-1"

QUEUE = "relay.s2r_relay_dispatch_queue"
REQUEST = "relay.s2r_relay_dispatch_request"
RESULT = "relay.s2r_relay_dispatch_result"
KEY = "relay.s2r_relay_dispatch_key"
OUTBOX = "relay.outbox"
DURABLE_TABLES = tuple(f"relay.durable_{name}" for name in ("job", "chunk", "row_error", "event"))
TENANT_TABLES = (REQUEST, QUEUE, RESULT, KEY, OUTBOX, *DURABLE_TABLES)


@asynccontextmanager
async def connected(dsn: str, **options: Any) -> AsyncIterator[Connection]:
    """Open a connection that ends with the block, whatever is under way on it."""
    connection: Connection = await asyncpg.connect(dsn, **options)
    try:
        yield connection
    finally:
        connection.terminate()


class Logins:
    """Logins of one test, each bound as the test says; gone afterwards."""

    def __init__(self, database: TestDatabase, admin: Connection, stack: AsyncExitStack) -> None:
        self._database = database
        self._admin = admin
        self._stack = stack
        self.names: list[str] = []

    async def create(self, *, attributes: str = "", name: str | None = None) -> str:
        """Create a login that is bound to nothing."""
        name = name or f"s2r_{secrets.token_hex(6)}"
        await self._admin.execute(f"""create role "{name}" login password 'relay' {attributes}""")
        self.names.append(name)
        return name

    async def bind(self, name: str, kind: str, tenant: str | None, relay: str | None = None) -> None:
        """Do what `relay-dispatch db grant` does."""
        await self._admin.execute(f'grant relay_{kind} to "{name}"')
        await self._admin.fetchval("select relay.grant_binding($1, $2, $3, $4)", name, kind, tenant, relay)

    async def connect(self, name: str) -> Connection:
        """Open a connection as one of them."""
        return await self._stack.enter_async_context(connected(self._database.dsn(name)))

    async def open(
        self, kind: str, tenant: str | None, relay: str | None = None, *, attributes: str = ""
    ) -> Connection:
        """Create a login, bind it, and open a connection as it."""
        name = await self.create(attributes=attributes)
        await self.bind(name, kind, tenant, relay)
        return await self.connect(name)


@asynccontextmanager
async def logins(database: TestDatabase) -> AsyncIterator[Logins]:
    """Make logins for this block."""
    async with connected(database.admin_dsn) as admin, AsyncExitStack() as stack:
        made = Logins(database, admin, stack)
        try:
            yield made
        finally:
            await stack.aclose()
            for name in made.names:
                await admin.execute(f'drop owned by "{name}"; drop role "{name}"')


async def enqueue(
    gateway: Connection, count: int = 1, *, tenant: str | None = TENANT, relay: str = RELAY, **request: Any
) -> list[UUID]:
    """Enqueue `count` jobs alike, in one statement."""
    request.setdefault("ttl", 600)
    return await RelayDispatchRepository(gateway, tenant).enqueue_many(
        [DispatchRequest(relay, "Get", **request) for _ in range(count)]
    )


async def claim(
    worker: Connection,
    limit: int = 1,
    *,
    tenant: str | None = TENANT,
    relay: str = RELAY,
    by: str = ME,
    lease: float = 30,
    **options: Any,
) -> list[DispatchJob]:
    """Claim, and return the jobs."""
    repository = RelayDispatchRepository(worker, tenant)
    claimed = await repository.claim(relay, claimed_by=by, limit=limit, lease_seconds=lease, **options)
    return claimed.jobs


async def claimed_job(gateway: Connection, worker: Connection, *, by: str = ME, **request: Any) -> DispatchJob:
    """Enqueue one job and claim it."""
    (job_id,) = await enqueue(gateway, **request)
    (job,) = await claim(worker, by=by, tenant=request.get("tenant", TENANT), relay=request.get("relay", RELAY))
    assert job.job_id == job_id
    return job


async def settle(
    worker: Connection,
    job: DispatchJob,
    *,
    by: str = ME,
    fence: int | None = None,
    relay: str | None = None,
    tenant: str | None = None,
    **result: Any,
) -> Settled:
    """Complete one job, under another fence, relay or tenant where given."""
    completion = Completion(job.job_id, job.fence if fence is None else fence, tenant or job.tenant_id, **result)
    (settled,) = await RelayDispatchRepository(worker).complete_many(relay or job.relay_id, [completion], claimed_by=by)
    return settled


async def heartbeat(worker: Connection, jobs: Sequence[DispatchJob], *, by: str = ME, lease: float = 30) -> list[str]:
    """Renew leases; return the outcomes as text."""
    outcomes = await RelayDispatchRepository(worker).heartbeat(
        jobs[0].relay_id, [(job.tenant_id, job.job_id, job.fence) for job in jobs], claimed_by=by, lease_seconds=lease
    )
    return [outcome.value for outcome in outcomes]


async def retry(worker: Connection, job: DispatchJob, *, by: str = ME, **options: Any) -> Settled:
    """Put one job back by `retry`."""
    item = PutBack(job.job_id, job.fence, job.tenant_id, **options)
    (settled,) = await RelayDispatchRepository(worker).retry(job.relay_id, [item], claimed_by=by)
    return settled


async def release(worker: Connection, job: DispatchJob, *, started: bool, by: str = ME) -> Settled:
    """Put one job back by `release`."""
    claims = [(job.tenant_id, job.job_id, job.fence, started)]
    (settled,) = await RelayDispatchRepository(worker).release(job.relay_id, claims, claimed_by=by)
    return settled


def said(settled: Settled) -> tuple[str, str | None]:
    """Return outcome and status as plain text."""
    return settled.outcome.value, None if settled.status is None else settled.status.value


async def status_of(gateway: Connection, job_id: UUID, *, tenant: str = TENANT) -> str | None:
    """Poll; return the status as text, None for an unknown job."""
    result = await RelayDispatchRepository(gateway, tenant).poll_status(job_id)
    return None if result is None else result.status.value


async def row(admin: Connection, table: str, job_id: UUID) -> asyncpg.Record | None:
    """Return the job's row of a table, past row security."""
    return await admin.fetchrow(f"select * from {table} where job_id = $1", job_id)


async def stored(admin: Connection) -> dict[str, int]:
    """Return how many rows each table of dispatch holds, past row security."""
    return {table: await admin.fetchval(f"select count(*) from {table}") for table in (REQUEST, QUEUE, RESULT, KEY)}


async def pass_deadline(admin: Connection, *job_ids: UUID) -> None:
    """Make it past the deadline of these jobs, now."""
    for table in (QUEUE, REQUEST):
        await admin.execute(
            f"update {table} set expires_at = clock_timestamp() - interval '1 ms' where job_id = any ($1)",
            list(job_ids),
        )


async def end_lease(admin: Connection, *job_ids: UUID) -> None:
    """Let the leases of these jobs have run out, now."""
    await admin.execute(
        f"update {QUEUE} set lease_expires_at = clock_timestamp() - interval '1 ms' where job_id = any ($1)",
        list(job_ids),
    )


async def make_due(admin: Connection, *job_ids: UUID) -> None:
    """Let the delay of these jobs be over, now."""
    await admin.execute(
        f"update {QUEUE} set available_at = clock_timestamp() - interval '1 ms' where job_id = any ($1)", list(job_ids)
    )


async def snapshot(admin: Connection) -> dict[str, list[str]]:
    """Return everything that is stored, as text: for "nothing changed"."""
    return {
        table: [r[0] for r in await admin.fetch(f"select t::text from {table} t order by 1")] for table in TENANT_TABLES
    }
