"""Races of enqueue: one key, or the same job ids, from many connections at once."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AsyncExitStack
from uuid import UUID

import anyio
import pytest

from dispatch_core.dispatch import EnqueueRow, RelayDispatchRepository, prepare
from dispatch_core.models import DispatchRequest
from tests.support.databases import TestDatabase
from tests.support.protocol import (
    KEY,
    ME,
    QUEUE,
    RELAY,
    REQUEST,
    RESULT,
    TENANT,
    Connection,
    claim,
    connected,
    stored,
)


async def _deadlocks(admin: Connection) -> int:
    await admin.execute("select pg_stat_clear_snapshot()")
    return await admin.fetchval("select deadlocks from pg_stat_database where datname = current_database()")


async def _enqueue_at_once(connection: Connection, key: str, kept: list[UUID]) -> None:
    kept.append(await RelayDispatchRepository(connection, TENANT).enqueue(RELAY, "Get", idempotency_key=key))


async def _enqueue_late(
    connection: Connection, key: str, pause: int, kept: list[UUID] | None, dropped: list[UUID]
) -> None:
    """Enqueue in a transaction that stays open for some round trips, and commit, or roll back where `kept` is None."""
    transaction = connection.transaction()
    await transaction.start()
    job_id = await RelayDispatchRepository(connection, TENANT).enqueue(RELAY, "Get", idempotency_key=key)
    for _ in range(pause):
        await connection.fetchval("select 1")
    if kept is None:
        await transaction.rollback()
        dropped.append(job_id)
    else:
        await transaction.commit()
        kept.append(job_id)


async def test_fifty_concurrent_enqueues_with_one_key_make_one_job(database: TestDatabase, admin: Connection) -> None:
    """Half of them in open transactions that commit late or roll back."""
    rng = random.Random(7)
    rounds, callers = 12, 50
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connected(database.gateway_dsn)) for _ in range(callers)]
        for number in range(rounds):
            key = f"key {number}"
            kept: list[UUID] = []
            dropped: list[UUID] = []
            async with anyio.create_task_group() as group:
                for index in rng.sample(range(callers), callers):
                    if index % 2:
                        group.start_soon(_enqueue_at_once, connections[index], key, kept)
                    else:
                        ends_in = kept if index % 4 == 0 else None
                        group.start_soon(_enqueue_late, connections[index], key, rng.randrange(20), ends_in, dropped)
            (stored_id,) = {
                r[0] for r in await admin.fetch(f"select job_id from {KEY} where idempotency_key = $1", key)
            }
            assert set(kept) == {stored_id}, number
            assert len(kept) + len(dropped) == callers
    assert await stored(admin) == {REQUEST: rounds, QUEUE: rounds, RESULT: 0, KEY: rounds}


@pytest.mark.invariant("I1")
async def test_an_enqueue_that_is_tried_again_while_it_runs_or_after_its_end_is_never_a_second_job(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """As after a lost reply: the same rows on other connections, in other orders, around claim and completion."""
    rng = random.Random(8)
    rounds, batch = 25, 40
    inserted: Counter[UUID] = Counter()
    completed: Counter[UUID] = Counter()
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(connected(database.gateway_dsn)) for _ in range(3)]

        async def enqueue_rows(connection: Connection, rows: list[EnqueueRow]) -> None:
            shuffled = rng.sample(rows, len(rows))
            told = await RelayDispatchRepository(connection, TENANT).enqueue_rows(shuffled)
            for prepared, new in zip(shuffled, told, strict=True):
                inserted[prepared.job_id] += new

        async def work() -> None:
            for _ in range(4):
                for job in await claim(worker, batch):
                    completed[job.job_id] += await RelayDispatchRepository(worker, TENANT).complete(
                        job.job_id, RELAY, job.fence, ME
                    )

        everything: list[EnqueueRow] = []
        for _ in range(rounds):
            rows = [prepare(DispatchRequest(RELAY, "Get")) for _ in range(rng.choice((batch // 2, batch)))]
            everything += rows
            async with anyio.create_task_group() as group:
                for connection in gateways:
                    group.start_soon(enqueue_rows, connection, rows)
                group.start_soon(work)
        await work()
        await enqueue_rows(gateways[0], everything)
        while jobs := await claim(worker, 100):
            for job in jobs:
                completed[job.job_id] += await RelayDispatchRepository(worker, TENANT).complete(
                    job.job_id, RELAY, job.fence, ME
                )
    assert set(inserted.values()) == {1}
    assert set(completed.values()) == {1}
    total = len(everything)
    assert len(completed) == total
    assert await stored(admin) == {REQUEST: total, QUEUE: 0, RESULT: total, KEY: 0}
    assert await _deadlocks(admin) == 0
