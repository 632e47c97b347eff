"""What others hold does not hold the outbox, and what it holds does not hold them: locks, connections, the network."""

from __future__ import annotations

import anyio
import asyncpg
import pytest

from dispatch_core.errors import DatabaseError
from dispatch_core.outbox import Outbox, OutboxEvent, OutboxMessage
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.outbox import KIND, Recorder, outbox, states, take, tell, write
from tests.support.pooler import FakePooler, PoolerMode
from tests.support.protocol import OUTBOX, TENANT, Connection, connected

_COUNT = f"select count(*) from {OUTBOX}"


# --- lock order ---------------------------------------------------------------------------------


@pytest.mark.kind("lock order")
async def test_an_enqueue_waits_for_nobody_whatever_is_done_to_the_events_of_its_key_meanwhile(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """A claim, a settling and a person are in the middle of the events of the key, and each commits later."""
    ids = [i for n in range(4) for i in await write(gateway, n, kind=f"kind {n}", key=f"k{n}")]
    claimed = await take(gateway, kind="kind 1")
    async with (
        connected(database.gateway_dsn) as claimer,
        connected(database.gateway_dsn) as settler,
        connected(database.operator_dsn) as person,
        connected(database.gateway_dsn) as writer,
    ):
        for conn in (claimer, settler, person, writer):
            await conn.execute("begin")
        assert len(await take(claimer, kind="kind 0")) == 1
        await tell(settler, claimed)
        await OutboxRepository(person).park(TENANT, [ids[2]], "no")
        await writer.fetchval("select relay.outbox_enqueue('kind 3', '4', p_key => 'k3', p_tenant => $1)", TENANT)
        async with gateway.transaction():
            await gateway.execute("set local lock_timeout = '1ms'")
            for n in range(4):
                await Outbox.enqueue(gateway, KIND, n, tenant=TENANT, key=f"k{n}")
            await Outbox.enqueue_many(gateway, [OutboxMessage(KIND, n, f"k{n}") for n in range(4)], tenant=TENANT)
        for conn in (claimer, settler, person, writer):
            await conn.execute("commit")
    assert await admin.fetchval(f"{_COUNT} where kind = $1", KIND) == 8


@pytest.mark.kind("lock order")
async def test_a_sink_that_waits_for_the_writer_of_the_next_event_of_its_key_is_no_deadlock(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """The writer has the order's row, the sink wants it, and the writer wants to write under the sink's key."""
    await admin.execute("create table public.orders (n int); insert into public.orders values (1)")
    await admin.execute("grant all on public.orders to public")
    await write(gateway, "first", key="k")
    delivered: list[str] = []
    async with (
        connected(database.gateway_dsn) as business,
        connected(database.gateway_dsn) as writer,
        outbox(database, None) as drainer,
    ):

        async def sink(event: OutboxEvent) -> None:
            await business.execute("update public.orders set n = n + 1")
            delivered.append(event.payload)

        drainer.default_sink = sink
        await writer.execute("begin; update public.orders set n = n + 1")
        async with anyio.create_task_group() as group:
            group.start_soon(drainer.drain)
            await wait_until_blocked(admin, pid_of(business), by=pid_of(writer))
            await Outbox.enqueue(writer, KIND, "second", tenant=TENANT, key="k")
            assert delivered == []
            await writer.execute("commit")
        assert delivered == ["first"]
        while (await drainer.drain()).claimed:
            pass
    assert delivered == ["first", "second"]


# --- somebody else's connection -----------------------------------------------------------------


@pytest.mark.case("C05")
@pytest.mark.kind("somebody else's connection and codecs")
@pytest.mark.parametrize("mode", ["swap", "sticky"])
async def test_behind_a_transaction_pooler_an_event_is_written_in_the_transaction_and_leaves_no_setting(
    database: TestDatabase, admin: Connection, mode: PoolerMode
) -> None:
    async with FakePooler.before(database.gateway_dsn, mode=mode) as pooler:
        conn = await asyncpg.connect(pooler.dsn(database.gateway_dsn), statement_cache_size=0)
        for number in range(4):
            transaction = conn.transaction()
            await transaction.start()
            await Outbox.enqueue(conn, KIND, number, tenant=("acme", "globex")[number % 2], key="k")
            assert not await conn.fetchval("select current_setting('app.tenant_id', true)")
            await (transaction.rollback() if number == 2 else transaction.commit())
            assert not await conn.fetchval("select current_setting('app.tenant_id', true)")
        conn.terminate()
    assert await states(admin, "acme") == {"0": "ready"}
    assert await states(admin, "globex") == {"1": "ready", "3": "waiting"}


@pytest.mark.kind("somebody else's connection and codecs")
async def test_in_a_transaction_that_has_failed_already_nothing_is_written_and_it_is_said(
    gateway: Connection, admin: Connection
) -> None:
    await gateway.execute("begin")
    with pytest.raises(asyncpg.PostgresError):
        await gateway.execute("select 1 / 0")
    for attempt in (
        Outbox.enqueue(gateway, KIND, 1, tenant=TENANT),
        Outbox.enqueue_many(gateway, [OutboxMessage(KIND, 1)], tenant=TENANT),
    ):
        with pytest.raises(DatabaseError, match="aborted"):
            await attempt
    await gateway.execute("rollback")
    assert await admin.fetchval(_COUNT) == 0


# --- whose wake-up ------------------------------------------------------------------------------


@pytest.mark.invariant("I4")
@pytest.mark.invariant("I8")
async def test_an_event_wakes_its_tenant_and_who_drains_all_and_nobody_else_and_not_before_its_commit(
    database: TestDatabase, gateway: Connection
) -> None:
    heard: list[str] = []
    async with connected(database.gateway_dsn) as listener:
        names = {t: await OutboxRepository(listener).channel(t) for t in (TENANT, "globex", None)}
        names |= {"results": await listener.fetchval("select relay.channel('result', $1)", TENANT)}
        assert len(set(names.values())) == 4
        for name in names.values():
            await listener.add_listener(name, lambda _, __, channel, payload: heard.append(channel + payload))
        async with gateway.transaction():
            await Outbox.enqueue(gateway, KIND, 1, tenant=TENANT)
            await listener.fetchval("select 1")
            assert heard == []
        await eventually(lambda: len(heard) >= 2)
        # Rung later, and so heard later: whatever else was rung before is here.
        async with gateway.transaction():
            await Outbox.enqueue(gateway, KIND, 1, tenant="globex")
        await eventually(lambda: len(heard) >= 4)
    assert sorted(heard) == sorted([names[TENANT], names[None], names["globex"], names[None]])


# --- transactions that stay open ----------------------------------------------------------------


@pytest.mark.case("C46")
@pytest.mark.kind("transactions held over the network")
async def test_a_writer_who_leaves_his_transaction_open_holds_up_nobody_and_loses_nothing(
    database: TestDatabase, gateway: Connection
) -> None:
    """Written first, committed last: others of its key and kind are delivered meanwhile, and it is not skipped."""
    sink = Recorder()
    async with connected(database.gateway_dsn) as slow, outbox(database, sink) as drainer:
        transaction = slow.transaction()
        await transaction.start()
        await Outbox.enqueue(slow, KIND, "slow", tenant=TENANT, key="k")
        await write(gateway, "same key", key="k")
        await write(gateway, "no key")
        while (await drainer.drain()).claimed:
            pass
        assert sorted(sink.payloads) == ["no key", "same key"]
        await transaction.commit()
        while (await drainer.drain()).claimed:
            pass
    assert sink.payloads[2:] == ["slow"]
