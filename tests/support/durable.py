"""For tests of durable jobs at the floor of SQL: jobs, chunks and leases by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from tests.support.protocol import TENANT, Connection

JOB = "relay.durable_job"
CHUNK = "relay.durable_chunk"
ROW_ERROR = "relay.durable_row_error"
EVENT = "relay.durable_event"
KIND = "import"
HOLDER = "relay:1"


@dataclass(frozen=True)
class Lease:
    """What a claim gave: it names one chunk, and whose it is."""

    job_id: UUID
    seq: int
    token: UUID
    version: int
    row: Any = None

    @property
    def fence(self) -> tuple[UUID, int, UUID, int]:
        return self.job_id, self.seq, self.token, self.version

    @property
    def stale(self) -> Lease:
        """The same chunk, by somebody who never had it."""
        return Lease(self.job_id, self.seq, uuid4(), self.version)


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


async def submit(
    gateway: Connection,
    chunks: int = 1,
    *,
    tenant: str = TENANT,
    kind: str = KIND,
    idempotent: bool = True,
    max_attempts: int = 3,
    priority: int = 0,
    rows: int = 0,
    job_id: UUID | None = None,
) -> UUID:
    """Submit a job of so many chunks, and commit."""
    job_id = job_id or uuid4()
    async with gateway.transaction():
        await gateway.fetchval(
            "select relay.durable_insert_job($1, $2, $3, '{}', $4, $5, $6, 'alice')",
            tenant,
            job_id,
            kind,
            idempotent,
            max_attempts,
            priority,
        )
        if chunks:
            given = json.dumps([{"payload": n, "rows": rows} for n in range(1, chunks + 1)])
            await gateway.fetchval("select relay.durable_insert_chunks($1, $2, $3, 1)", tenant, job_id, given)
    return job_id


async def claim(
    worker: Connection,
    limit: int = 1,
    *,
    tenants: Sequence[str] = (TENANT,),
    kinds: Sequence[str] = (KIND,),
    limits: Sequence[int] | None = None,
    by: str = HOLDER,
    lease: float = 30,
    token: UUID | None = None,
    start: int = 0,
    after: Mapping[UUID, int] | None = None,
) -> list[Lease]:
    """Claim over all jobs."""
    token = token or uuid4()
    rows = await worker.fetch(
        "select * from relay.durable_claim($1, $2, $3, $4, $5, $6, $7, $8, $9)",
        list(tenants), list(kinds), limits, limit, by, token, seconds(lease), start,
        None if after is None else json.dumps({str(job_id): seq for job_id, seq in after.items()}),
    )  # fmt: skip
    return _leases(rows, token)


async def claim_next(
    worker: Connection,
    job_id: UUID,
    limit: int = 1,
    *,
    tenant: str = TENANT,
    by: str = HOLDER,
    lease: float = 30,
) -> list[Lease]:
    """Claim of one job."""
    token = uuid4()
    rows = await worker.fetch(
        "select * from relay.durable_claim_next($1, $2, $3, $4, $5, $6)",
        tenant, job_id, limit, by, token, seconds(lease),
    )  # fmt: skip
    return _leases(rows, token)


async def claim_chunk(
    worker: Connection,
    job_id: UUID,
    seq: int,
    version: int,
    *,
    tenant: str = TENANT,
    by: str = HOLDER,
    lease: float = 30,
) -> Lease | None:
    """Claim one chunk as it was read."""
    token = uuid4()
    rows = await worker.fetch(
        "select * from relay.durable_claim_chunk($1, $2, $3, $4, $5, $6, $7)",
        tenant, job_id, seq, version, by, token, seconds(lease),
    )  # fmt: skip
    leases = _leases(rows, token)
    return leases[0] if leases else None


def _leases(rows: Sequence[Any], token: UUID) -> list[Lease]:
    return [Lease(r["job_id"], r["seq"], token, r["lease_version"], r) for r in rows if r["outcome"] == "claimed"]


def _arrays(leases: Sequence[Lease], tenant: str) -> list[Any]:
    return [
        [tenant] * len(leases),
        [lease.job_id for lease in leases],
        [lease.seq for lease in leases],
        [lease.token for lease in leases],
        [lease.version for lease in leases],
    ]


async def heartbeat(
    worker: Connection, *leases: Lease, tenant: str = TENANT, lease: float = 30, rows_done: Sequence[int] | None = None
) -> list[str]:
    """Return what is said of each."""
    rows = await worker.fetch(
        "select places, outcome from relay.durable_heartbeat($1, $2, $3, $4, $5, $6, $7)",
        *_arrays(leases, tenant),
        seconds(lease),
        rows_done,
    )
    return _placed(rows, len(leases))


async def checkpoint(
    worker: Connection,
    lease: Lease,
    value: Any,
    *,
    tenant: str = TENANT,
    rows_done: int | None = None,
    renew: float | None = None,
) -> None:
    """Save how far it is."""
    await worker.execute(
        "select relay.durable_checkpoint($1, $2, $3, $4, $5, $6, $7, null, $8)",
        tenant, *lease.fence, json.dumps(value), rows_done, None if renew is None else seconds(renew),
    )  # fmt: skip


async def complete(
    worker: Connection,
    lease: Lease,
    outcome: Any = None,
    *,
    tenant: str = TENANT,
    rows_done: int | None = None,
    rows_failed: int | None = None,
) -> tuple[str, bool]:
    """Complete one; return outcome and whether it may have been the last."""
    row = await worker.fetchrow(
        "select * from relay.durable_complete($1, $2, $3, $4, $5, $6, $7, $8)",
        tenant, *lease.fence, json.dumps(outcome), rows_done, rows_failed,
    )  # fmt: skip
    assert row is not None
    return row["outcome"], row["last"]


async def complete_many(worker: Connection, *leases: Lease, tenant: str = TENANT) -> list[str]:
    """Complete many; return what is said of each."""
    rows = await worker.fetch(
        "select places, outcome from relay.durable_complete_many($1, $2, $3, $4, $5, $6)",
        *_arrays(leases, tenant),
        ["{}"] * len(leases),
    )
    return _placed(rows, len(leases))


def _placed(rows: Sequence[Any], count: int) -> list[str]:
    """Put outcomes that come with their places (None: all) in the order of what was asked."""
    said: dict[int, str] = {}
    for row in rows:
        for place in row["places"] or range(1, count + 1):
            assert place not in said, f"two outcomes for one place: {rows}"
            said[place] = row["outcome"]
    return [said[place] for place in range(1, count + 1)]


async def fail(
    worker: Connection,
    lease: Lease,
    message: str = "boom",
    *,
    tenant: str = TENANT,
    retryable: bool = True,
    delay: float | None = None,
) -> str | None:
    """Say that it failed; return what became of it."""
    return await worker.fetchval(
        "select status from relay.durable_fail($1, $2, $3, $4, $5, $6, $7, $8)",
        tenant, *lease.fence, message, retryable, None if delay is None else seconds(delay),
    )  # fmt: skip


async def release(worker: Connection, *leases: Lease, tenant: str = TENANT, to: str = "pending") -> list[str]:
    """Give chunks back."""
    rows = await worker.fetch(
        "select n, outcome from relay.durable_release($1, $2, $3, $4, $5, $6) order by n",
        *_arrays(leases, tenant),
        to,
    )
    return [row["outcome"] for row in rows]


async def tell_errors(
    worker: Connection, lease: Lease, errors: Sequence[dict[str, Any]], *, tenant: str = TENANT
) -> int:
    """Tell bad rows."""
    count: int = await worker.fetchval(
        "select relay.durable_row_errors_add($1, $2, $3, $4, $5, $6)", tenant, *lease.fence, json.dumps(errors)
    )
    return count


async def reap(anybody: Connection, limit: int = 100, *, tenant: str = TENANT) -> list[asyncpg.Record]:
    """Take back what has run out."""
    return await anybody.fetch("select * from relay.durable_reap($1, 'reaper', $2)", tenant, limit)


async def finish(anybody: Connection, *job_ids: UUID, tenant: str = TENANT) -> list[tuple[str, bool]]:
    """End what is at its end."""
    rows = await anybody.fetch("select * from relay.durable_finish($1, $2)", tenant, list(job_ids))
    return [(row["status"], row["ended"]) for row in rows]


async def control(
    gateway: Connection, job_id: UUID, action: str, *, tenant: str = TENANT, actor: str = "bob"
) -> asyncpg.Record:
    """Pause, resume, cancel or retry_failed."""
    row = await gateway.fetchrow(
        "select * from relay.durable_control($1, $2, $3, $4, 'test')", tenant, job_id, action, actor
    )
    assert row is not None
    return row


async def resolve(
    gateway: Connection, job_id: UUID, seq: int, decision: str, *, tenant: str = TENANT
) -> asyncpg.Record:
    """Decide about a chunk that waits for a person."""
    row = await gateway.fetchrow(
        "select * from relay.durable_resolve($1, $2, $3, $4, 'bob', 'test', 'looked at it')",
        tenant, job_id, seq, decision,
    )  # fmt: skip
    assert row is not None
    return row


async def job(anybody: Connection, job_id: UUID, *, tenant: str = TENANT, fresh: bool = True) -> asyncpg.Record | None:
    """Read one job."""
    return await anybody.fetchrow("select * from relay.durable_jobs($1, $2, $3)", tenant, [job_id], fresh)


async def status(anybody: Connection, job_id: UUID, *, tenant: str = TENANT) -> str | None:
    """Read its status."""
    found = await job(anybody, job_id, tenant=tenant, fresh=False)
    return None if found is None else found["status"]


async def chunks(anybody: Connection, job_id: UUID, *, tenant: str = TENANT) -> list[asyncpg.Record]:
    """Read its chunks."""
    return await anybody.fetch("select * from relay.durable_chunks($1, $2)", tenant, job_id)


async def states(anybody: Connection, job_id: UUID, *, tenant: str = TENANT) -> list[str]:
    """Read the statuses of its chunks, in order."""
    return [row["status"] for row in await chunks(anybody, job_id, tenant=tenant)]


async def events(
    anybody: Connection, job_id: UUID, after: str | None = None, limit: int = 10_000, *, tenant: str = TENANT
) -> tuple[list[asyncpg.Record], str]:
    """Read events, and where to go on."""
    rows = await anybody.fetch("select * from relay.durable_events($1, $2, $3, $4)", tenant, job_id, after, limit)
    return rows[:-1], rows[-1]["next_cursor"]


async def told(anybody: Connection, job_id: UUID, *, tenant: str = TENANT) -> list[str]:
    """Read the types of all its events."""
    return [row["type"] for row in (await events(anybody, job_id, tenant=tenant))[0]]


async def run_out(admin: Connection, ago: float = 1) -> None:
    """Let every lease have run out so long ago."""
    await admin.execute(
        f"update {CHUNK} set lease_expires_at = now() - $1::interval where status = 'running'", seconds(ago)
    )


async def counters_are_exact(admin: Connection, job_id: UUID) -> bool:
    """Compare the job's counters with its chunks."""
    exact: bool = await admin.fetchval(
        f"""
        select (j.chunks_total, j.chunks_pending, j.chunks_running, j.chunks_retry, j.chunks_done, j.chunks_failed,
                j.chunks_needs_review, j.chunks_cancelled, j.rows_total, j.rows_done, j.rows_failed)
             = (select count(*), count(*) filter (where c.status = 'pending'),
                        count(*) filter (where c.status = 'running'), count(*) filter (where c.status = 'retry'),
                        count(*) filter (where c.status = 'done'), count(*) filter (where c.status = 'failed'),
                        count(*) filter (where c.status = 'needs_review'),
                        count(*) filter (where c.status = 'cancelled'), coalesce(sum(c.rows_total), 0)::bigint,
                        coalesce(sum(c.rows_done), 0)::bigint, coalesce(sum(c.rows_failed), 0)::bigint
                from {CHUNK} c where c.job_id = j.job_id)
        from {JOB} j where j.job_id = $1
        """,
        job_id,
    )
    return exact
