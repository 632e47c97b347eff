"""Durable jobs by hand: chunks claimed, completed, renewed and taken back on a twin of our table of chunks.

The least that keeps what a chunk is promised: attempt, lease with token and version, outcome, and a lease that has run
out writes nothing. No job is looked at, none is ended, nothing is told in a timeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias
from uuid import UUID

from benchmarks.sandbox import BODY, TENANT, Connection, Sandbox
from dispatch_core.ids import new_id

__all__ = [
    "CLAIM",
    "COMPLETE",
    "HEARTBEAT",
    "KIND",
    "LEASE",
    "REAP",
    "REAP_AND_TELL",
    "TABLES",
    "drain_by_functions",
    "drain_by_hand",
    "fill_chunks",
    "fill_running",
]

KIND: Final = "import"
LEASE: Final = timedelta(hours=1)
TABLES: Final = {"ours": "relay.durable_chunk", "bare": "bare.durable_chunk"}

_Round: TypeAlias = Callable[[Connection, UUID, str, int], Awaitable[list[int]]]

# $1 tenant, $2 job id, $3 token, $4 lease, $5 claimed_by, $6 how many
CLAIM: Final = """
update bare.durable_chunk
set status = 'running', attempts = attempts + 1, lease_version = lease_version + 1, lease_token = $3,
    lease_expires_at = now() + $4, claimed_by = $5, claimed_at = now(), updated_at = now()
where ctid = any (array(
  select ctid from bare.durable_chunk
  where tenant_id = $1 and job_id = $2 and status in ('pending', 'retry') and available_at is null
  order by seq limit $6 for update skip locked))
returning seq, payload::text, checkpoint::text, attempts, lease_version
"""
# $1 tenant, $2 job id, $3 token, $4 numbers, $5 versions, $6 outcome of all
# LATERAL … LIMIT 1 and then ctids: the join that stays an index probe whatever the statistics say. A plain join with
# the arrays scans the table from some thousands of chunks on.
COMPLETE: Final = """
update bare.durable_chunk
set status = 'done', outcome = $6::text::jsonb, lease_expires_at = null, updated_at = now(), ended_at = now()
where ctid = any (array(
  select l.ctid from unnest($4::bigint[], $5::bigint[]) as u (seq, version)
  cross join lateral (
    select c.ctid from bare.durable_chunk c
    where c.tenant_id = $1 and c.job_id = $2 and c.seq = u.seq and c.lease_token = $3 and c.lease_version = u.version
      and c.lease_expires_at > now() limit 1 for update) l))
"""
# $1 tenant, $2 job ids, $3 numbers, $4 tokens, $5 versions, $6 lease
HEARTBEAT: Final = """
update bare.durable_chunk
set lease_expires_at = now() + $6, updated_at = now()
where ctid = any (array(
  select l.ctid from unnest($2::uuid[], $3::bigint[], $4::uuid[], $5::bigint[]) as u (job_id, seq, token, version)
  cross join lateral (
    select c.ctid from bare.durable_chunk c
    where c.tenant_id = $1 and c.job_id = u.job_id and c.seq = u.seq and c.lease_token = u.token
      and c.lease_version = u.version and c.lease_expires_at > now() limit 1 for update) l))
returning seq
"""
# $1 tenant, $2 how many
REAP: Final = """
update bare.durable_chunk
set status = 'retry', lease_version = lease_version + 1, lease_token = null, lease_expires_at = null,
    last_error = 'lease lost', updated_at = now()
where ctid = any (array(
  select ctid from bare.durable_chunk where tenant_id = $1 and status = 'running' and lease_expires_at <= now()
  order by job_id, seq limit $2 for update skip locked))
returning job_id, seq, attempts, lease_version, claimed_by
"""
# The same, and a line in the timeline for each.
REAP_AND_TELL: Final = f"""
with reaped as ({REAP}),
told as (
  insert into bare.durable_event (tenant_id, job_id, xid, n, at, seq, type, holder, detail)
  select $1, job_id, pg_current_xact_id(), row_number() over (order by job_id, seq), now(), seq, 'chunk_reaped',
         claimed_by, jsonb_build_object('attempt', attempts, 'lease_version', lease_version)
  from reaped)
select job_id, seq, attempts, lease_version, claimed_by from reaped
"""

_CLAIM_OURS: Final = "select * from relay.durable_claim($1, $2, null, $3, $4, $5, $6)"
_COMPLETE_OURS: Final = "select outcome, last from relay.durable_complete_many($1, $2, $3, $4, $5, $6)"
_FINISH_OURS: Final = "select status from relay.durable_finish($1, $2)"

_SUBMIT: Final = "select relay.durable_insert_job($1, $2, $3, '{}', true, 3, 0, null, true)"
_SEAL: Final = "select relay.durable_seal($1, $2, $3)"
_FILL: Final = """
insert into {table} (tenant_id, job_id, seq, payload, status, created_at, updated_at)
select $1, $2, n, $3::text::jsonb, 'pending', now(), now() from generate_series(1, $4::bigint) n
"""
_FILL_RUNNING: Final = """
insert into {table} (tenant_id, job_id, seq, payload, status, attempts, lease_version, lease_token, lease_expires_at,
                     claimed_by, claimed_at, created_at, updated_at)
select $1, $2, n, $3::text::jsonb, 'running', 1, 1, $5, now() + $6, 'gone', now(), now(), now()
from generate_series(1, $4::bigint) n
"""


async def fill_chunks(sandbox: Sandbox, side: str, count: int) -> UUID:
    """Store a job of so many chunks, ours or the bare twin's, and vacuum; return its id."""
    return await _fill(sandbox, side, count, _FILL)


async def fill_running(sandbox: Sandbox, side: str, count: int, *, token: UUID, lease: timedelta) -> UUID:
    """Store a job whose chunks are all running under `token`, until `lease` from now, and vacuum; return its id."""
    return await _fill(sandbox, side, count, _FILL_RUNNING, token, lease)


async def _fill(sandbox: Sandbox, side: str, count: int, sql: str, *arguments: object) -> UUID:
    job_id = new_id()
    table = TABLES[side]
    async with (
        sandbox.connections(sandbox.gateway_dsn, 1) as [gateway],
        sandbox.connections(sandbox.admin_dsn, 1) as [admin],
    ):
        if side == "ours":
            await gateway.fetchval(_SUBMIT, TENANT, job_id, KIND)
        # By the owner and in one statement; through the gateway's functions it would take longer than the sample.
        await admin.execute(sql.format(table=table), TENANT, job_id, BODY.decode(), count, *arguments)
        if side == "ours":
            await gateway.fetchval(_SEAL, TENANT, job_id, count)
        await admin.execute(f"vacuum {table}")
    return job_id


async def drain_by_hand(connections: Sequence[Connection], job_id: UUID, batch: int, name: str) -> list[int]:
    """Claim and complete in a loop on each of the connections, until nothing is left; return the numbers."""
    return await _drain(_by_hand, connections, job_id, batch, name)


async def drain_by_functions(connections: Sequence[Connection], job_id: UUID, batch: int, name: str) -> list[int]:
    """Do the same by calls of our functions, and end the job by whoever was the last."""
    return await _drain(_by_functions, connections, job_id, batch, name)


async def _drain(
    one_round: _Round, connections: Sequence[Connection], job_id: UUID, batch: int, name: str
) -> list[int]:
    async def loop(number: int, connection: Connection) -> list[int]:
        every: list[int] = []
        while done := await one_round(connection, job_id, f"{name}-{number}", batch):
            every += done
        return every

    found: list[Any] = await asyncio.gather(*(loop(number, each) for number, each in enumerate(connections)))
    return [seq for seqs in found for seq in seqs]


async def _by_hand(connection: Connection, job_id: UUID, name: str, batch: int) -> list[int]:
    token = new_id()
    rows = await connection.fetch(CLAIM, TENANT, job_id, token, LEASE, name, batch)
    if not rows:
        return []
    seqs = [row["seq"] for row in rows]
    done = await connection.execute(
        COMPLETE, TENANT, job_id, token, seqs, [row["lease_version"] for row in rows], "null"
    )
    if done != f"UPDATE {len(rows)}":
        raise AssertionError(f"{len(rows)} chunks were claimed, but: {done}")
    return seqs


async def _by_functions(connection: Connection, job_id: UUID, name: str, batch: int) -> list[int]:
    token = new_id()
    rows = await connection.fetch(_CLAIM_OURS, [TENANT], [KIND], batch, name, token, LEASE)
    if not rows:
        return []
    count = len(rows)
    seqs = [row["seq"] for row in rows]
    answers = await connection.fetch(
        _COMPLETE_OURS,
        [TENANT] * count,
        [job_id] * count,
        seqs,
        [token] * count,
        [row["lease_version"] for row in rows],
        ["null"] * count,
    )
    if any(answer["outcome"] != "applied" for answer in answers):
        raise AssertionError("a completion was refused")
    if any(answer["last"] for answer in answers):
        await connection.fetch(_FINISH_OURS, TENANT, [job_id])
    return seqs
