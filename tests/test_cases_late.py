"""Who reads while others commit late, or never: nothing is missed, repeated, invented, or seen in halves (C46)."""

from __future__ import annotations

import itertools
import json
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from dispatch_core.models import DispatchRequest
from dispatch_core.outbox import Outbox, OutboxMessage
from gateway_sdk import GatewayClient
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.gateway import open_client
from tests.support.outbox import KIND, take, tell
from tests.support.protocol import RELAY, TENANT, Connection, claim, connected, settle

WRITERS = 6


@pytest.mark.case("C46")
@pytest.mark.invariant("I8")
async def test_of_transactions_that_commit_or_roll_back_in_any_order_a_drain_and_a_timeline_miss_and_repeat_nothing(
    database: TestDatabase, gateway: Connection, worker: Connection, seed: int, is_long: bool
) -> None:
    """Six transactions are open at a time, each with events of the outbox, of a timeline, and jobs; all are read on."""
    chance = random.Random(seed)
    job_id = await durable.submit(gateway)
    committed: list[str] = []
    drained: list[str] = []
    claimed: list[str] = []
    told: list[str] = []
    cursor: str | None = None

    async def read(client: GatewayClient) -> None:
        nonlocal cursor
        events = await take(gateway, 1000)
        drained.extend(str(event.payload) for event in events)
        if events:
            await tell(gateway, events)
        jobs = await claim(worker, 1000)
        claimed.extend(job.body.decode() for job in jobs)
        for job in jobs:
            await settle(worker, job)
        page = await client.tenant(TENANT).durable.event_page(job_id, cursor, limit=1000)
        cursor = page.next
        told.extend(str(event.detail) for event in page.events if event.type == "wrote")

    async with AsyncExitStack() as stack, open_client(database.gateway_dsn) as client:
        free = [await stack.enter_async_context(connected(database.gateway_dsn)) for _ in range(WRITERS)]
        busy: list[tuple[Connection, Any, list[str]]] = []
        for number in range(300 if is_long else 60):
            if free and (len(busy) < 2 or chance.random() < 0.5):
                conn = free.pop()
                transaction = conn.transaction()
                await transaction.start()
                words = [f"{number} {part}" for part in range(chance.randint(1, 4))]
                await Outbox.enqueue_many(conn, [OutboxMessage(KIND, word) for word in words], tenant=TENANT)
                requests = [DispatchRequest(RELAY, "Get", body=word) for word in words]
                await client.tenant(TENANT).enqueue_many(requests, conn=conn)
                for word in words:
                    detail = json.dumps(word)
                    await conn.fetchval(
                        "select relay.durable_record_event($1, $2, null, 'wrote', null, null, null, $3)",
                        *(TENANT, job_id, detail),
                    )
                busy.append((conn, transaction, words))
            else:
                conn, transaction, words = busy.pop(chance.randrange(len(busy)))
                if chance.random() < 0.3:
                    await transaction.rollback()
                else:
                    await transaction.commit()
                    committed.extend(words)
                free.append(conn)
            if chance.random() < 0.6:
                before = len(told)
                await read(client)
                # Whole: of each transaction that is seen, all.
                seen = {word.split()[0] for word in told[before:]}
                assert seen.isdisjoint(word.split()[0] for word in told[:before])
        for _, transaction, words in busy:
            await transaction.commit()
            committed.extend(words)
        await read(client)
    assert len(committed) > 40
    for what, found in (("drained", drained), ("claimed", claimed), ("told", told)):
        assert sorted(found) == sorted(committed), what
    # And within one transaction in its order.
    for first, second in itertools.pairwise(told):
        if first.split()[0] == second.split()[0]:
            assert int(first.split()[1]) < int(second.split()[1])
