"""The outbox by hand: an INSERT beside the order, and a loop that claims a batch and deletes it.

On a twin of our table (the same columns and indexes), and, as `lean`, on the least that an application would make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias
from uuid import UUID

from benchmarks.sandbox import OPERATION, RELAY, TENANT, TTL, Connection

__all__ = [
    "CHANNEL",
    "INSERT_EVENT",
    "INSERT_LEAN",
    "INSERT_ORDER",
    "KIND",
    "NOTIFY",
    "Step",
    "drain_by_hand",
    "drain_lean",
    "drain_to_jobs",
]

KIND: Final = "invoice-wanted"
CHANNEL: Final = "bare_outbox"
NOTIFY: Final = f"notify {CHANNEL}"

# $1 order id, $2 tenant, $3 lines
INSERT_ORDER: Final = (
    "insert into bare.orders (order_id, tenant_id, lines, created_at) values ($1, $2, $3::text::jsonb, now())"
)
# $1 tenant, $2 event id, $3 kind, $4 payload
INSERT_EVENT: Final = """
insert into bare.outbox (tenant_id, event_id, kind, payload, payload_bytes, seq, state, created_at, available_at)
values ($1, $2, $3, $4::text::jsonb, octet_length($4), (extract(epoch from clock_timestamp()) * 1000000)::bigint,
        'ready', now(), now())
"""
# $1 tenant, $2 kind, $3 payload
INSERT_LEAN: Final = "insert into bare.lean_outbox (tenant_id, kind, payload) values ($1, $2, $3::text::jsonb)"

# $1 tenant, $2 kind, $3 claimed_by, $4 how many
_CLAIM: Final = """
with taken as (
  update bare.outbox
  set state = 'claimed', fence = fence + 1, claimed_by = $3, claimed_at = now(),
      first_claimed_at = coalesce(first_claimed_at, now())
  where ctid = any (array(
    select ctid from bare.outbox where tenant_id = $1 and kind = $2 and state = 'ready' and available_at <= now()
    order by available_at, seq, event_id limit $4 for update skip locked))
  returning event_id, kind, key, payload, fence, attempts, created_at)
select event_id, kind, key, payload::text, fence, attempts, created_at from taken
"""
# $1 tenant, $2 event ids, $3 fences, $4 claimed_by
_DELETE: Final = """
delete from bare.outbox o using unnest($2::uuid[], $3::bigint[]) as u (event_id, fence)
where o.tenant_id = $1 and o.event_id = u.event_id and o.fence = u.fence and o.claimed_by = $4
"""
_CLAIM_LEAN: Final = """
update bare.lean_outbox set claimed_at = now()
where ctid = any (array(
  select ctid from bare.lean_outbox where claimed_at is null order by id limit $1 for update skip locked))
returning id, tenant_id, kind, payload::text, created_at
"""
_DELETE_LEAN: Final = "delete from bare.lean_outbox where id = any ($1::bigint[])"

# $1 tenant, $2 job ids, $3 relay, $4 operation, $5 bodies, $6 ttl
_INSERT_JOBS: Final = """
with input as materialized (
  select u.job_id, u.body, u.n from unnest($2::uuid[], $5::bytea[]) with ordinality as u (job_id, body, n)),
stored as (
  insert into bare.request (tenant_id, job_id, relay_id, operation, request_headers, request_body, max_attempts,
                            created_at, expires_at)
  select $1, job_id, $3, $4, '{}', body, 1, now(), now() + $6 from input)
insert into bare.queue (tenant_id, job_id, relay_id, seq, state, max_attempts, created_at, expires_at)
select $1, job_id, $3, (extract(epoch from now()) * 1000000)::bigint + n, 'ready', 1, now(), now() + $6 from input
"""

Step: TypeAlias = Callable[[int], None]
"""Told after each batch, how many events that was."""
_Deliver: TypeAlias = Callable[[Connection, Sequence[Any]], Awaitable[object]]


async def drain_by_hand(connections: Sequence[Connection], batch: int, step: Step) -> None:
    """Claim and delete in a loop on each of the connections, until nothing is left."""
    await _drain(connections, batch, step, None)


async def drain_to_jobs(connections: Sequence[Connection], batch: int, step: Step) -> None:
    """Claim, insert a job for each event in one statement, and delete."""
    await _drain(connections, batch, step, _insert_jobs)


async def drain_lean(connections: Sequence[Connection], batch: int, step: Step) -> None:
    """Do the same as `drain_by_hand`, on the table that has next to nothing."""

    async def loop(connection: Connection) -> None:
        while rows := await connection.fetch(_CLAIM_LEAN, batch):
            done = await connection.execute(_DELETE_LEAN, [row["id"] for row in rows])
            _require(done, len(rows))
            step(len(rows))

    await asyncio.gather(*map(loop, connections))


async def _drain(connections: Sequence[Connection], batch: int, step: Step, deliver: _Deliver | None) -> None:
    async def loop(number: int, connection: Connection) -> None:
        name = f"loop-{number}"
        while rows := await connection.fetch(_CLAIM, TENANT, KIND, name, batch):
            if deliver is not None:
                await deliver(connection, rows)
            ids: list[UUID] = [row["event_id"] for row in rows]
            done = await connection.execute(_DELETE, TENANT, ids, [row["fence"] for row in rows], name)
            _require(done, len(rows))
            step(len(rows))

    await asyncio.gather(*(loop(number, each) for number, each in enumerate(connections)))


async def _insert_jobs(connection: Connection, rows: Sequence[Any]) -> None:
    ids: list[UUID] = [row["event_id"] for row in rows]
    bodies = [row["payload"].encode() for row in rows]
    await connection.execute(_INSERT_JOBS, TENANT, ids, RELAY, OPERATION, bodies, TTL)


def _require(done: str, expected: int) -> None:
    if done != f"DELETE {expected}":
        raise AssertionError(f"{expected} events were claimed, but: {done}")
