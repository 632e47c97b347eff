"""The drainer: woken by commits, polling beneath, each sink by itself, gone when it is told to (I3, I4, I7, I8)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial, wraps
from typing import Any

import anyio
import asyncpg
import pytest

from dispatch_core.database import Database
from dispatch_core.errors import ConfigurationError, SchemaMismatchError, TenancyDeniedError
from dispatch_core.migrate import grant, migrate
from dispatch_core.outbox import DrainReport, Outbox, OutboxEvent, OutboxPark, OutboxSettings
from dispatch_core.outbox_repository import OutboxRepository
from gateway_sdk import GatewayClient, OutboxDrainer
from tests.support.activity import backends, open_transactions
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.outbox import KIND, Recorder, make_stale, states, write
from tests.support.pooler import FakePooler
from tests.support.protocol import OUTBOX, TENANT, Connection, connected
from tests.support.proxy import TcpProxy

HOUR = 3600.0
"""Between polls: what is found within a test was found by a wake-up."""


def drainer_of(dsn: str | Database | TestDatabase, sink: Any = None, **options: Any) -> OutboxDrainer:
    """Make a drainer that polls hardly ever."""
    tenants, listen_dsn = options.pop("tenants", None), options.pop("listen_dsn", None)
    return OutboxDrainer(
        dsn.gateway_dsn if isinstance(dsn, TestDatabase) else dsn,
        settings=OutboxSettings(**{"drain_interval_sec": HOUR, **options}),
        tenants=tenants,
        listen_dsn=listen_dsn,
        default_sink=sink,
    )


async def enqueue(gateway: Connection, payload: Any, *, kind: str = KIND, tenant: str = TENANT) -> None:
    """Write an event that rings, and commit."""
    async with gateway.transaction():
        await Outbox.enqueue(gateway, kind, payload, tenant=tenant)


async def is_empty(admin: Connection) -> bool:
    """Tell whether no event is left."""
    return not await admin.fetchval(f"select exists (select from {OUTBOX})")


class Blocking(Recorder):
    """A sink in which every delivery waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = anyio.Event()

    async def __call__(self, event: OutboxEvent) -> None:
        self.events.append(event)
        await self.let_go.wait()


# --- woken --------------------------------------------------------------------------------------


@pytest.mark.invariant("I8")
async def test_a_commit_wakes_it_and_a_rollback_is_neither_seen_nor_heard(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    sink = Recorder()
    drainer = drainer_of(database)
    drainer.sink(KIND)(sink)
    rung: list[object] = []
    channel = await OutboxRepository(gateway).channel(TENANT)
    await admin.add_listener(channel, lambda *_: rung.append(None))
    async with drainer:
        transaction = gateway.transaction()
        await transaction.start()
        await Outbox.enqueue(gateway, KIND, "rolled back", tenant=TENANT)
        await transaction.rollback()
        await enqueue(gateway, "committed")
        await eventually(lambda: is_empty(admin))
    assert sink.payloads == ["committed"]
    assert len(rung) == 1
    assert drainer.total == DrainReport(claimed=1, delivered=1)


async def test_what_was_written_while_it_was_away_or_rings_nobody_is_found_by_the_first_search_and_the_poll(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "before")
    sink = Recorder()
    async with drainer_of(database, sink, drain_interval_sec=0.05):
        await eventually(lambda: is_empty(admin))
        await write(gateway, "silent")  # notify=False
        await eventually(lambda: is_empty(admin))
    assert sink.payloads == ["before", "silent"]


async def test_a_failed_event_is_counted_with_its_error_and_tried_again_when_its_pause_is_over_without_a_poll(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    seen: list[tuple[int, str | None]] = []

    async def sink(event: OutboxEvent) -> None:
        seen.append((event.attempts, await admin.fetchval(f"select last_error from {OUTBOX}")))
        if event.attempts < 2:
            raise ValueError("not today")

    async with drainer_of(database, sink, backoff_base_seconds=0.05, backoff_cap_seconds=0.1) as drainer:
        await enqueue(gateway, "moody")
        await eventually(lambda: drainer.total.delivered)
    assert seen == [(0, None), (1, "ValueError: not today"), (2, "ValueError: not today")]
    assert drainer.total == DrainReport(claimed=3, delivered=1, failed=2)


@pytest.mark.invariant("I4")
async def test_one_bound_to_a_tenant_gets_and_is_woken_for_that_tenants_events_alone(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    login = f"{database.name}_one"
    await admin.execute(f"create role {login} login password 'relay'")
    try:
        await grant(database.admin_dsn, login, role="gateway", tenant=TENANT)
        sink = Recorder()
        async with drainer_of(database.dsn(login), sink) as drainer:
            await enqueue(gateway, "foreign", tenant="globex")
            await enqueue(gateway, "own")
            await eventually(lambda: drainer.total.delivered)
        assert sink.payloads == ["own"]
        assert await states(admin, "globex") == {"foreign": "ready"}
        with pytest.raises(TenancyDeniedError):
            async with drainer_of(database.dsn(login), sink, tenants=["globex"]):
                await anyio.sleep_forever()
    finally:
        await admin.execute("select relay.revoke_binding($1, 'gateway', $2, null)", login, TENANT)
        await admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = $1", login)
        await admin.execute(f"drop owned by {login}; drop role {login}")


@pytest.mark.invariant("I4")
async def test_one_that_is_told_its_tenants_listens_for_these(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    sink = Recorder()
    async with drainer_of(database, sink, tenants=["a", "b"]) as drainer:
        for tenant in ("a", "other", "b"):
            await enqueue(gateway, tenant, tenant=tenant)
        await eventually(lambda: drainer.total.delivered == 2)
    assert sorted(sink.payloads) == ["a", "b"]


@pytest.mark.case("C05")
async def test_behind_a_transaction_pooler_it_says_so_once_and_polls(
    database: TestDatabase,
    admin: Connection,
    gateway: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_STATEMENT_CACHE_SIZE", "0")
    monkeypatch.setenv("RELAY_DISPATCH_PROBE_TIMEOUT_SECONDS", "0.3")
    sink = Recorder()
    async with (
        FakePooler.before(database.gateway_dsn, mode="swap") as pooler,
        drainer_of(pooler.dsn(database.gateway_dsn), sink, drain_interval_sec=0.05),
    ):
        await write(gateway, "one")
        await eventually(lambda: is_empty(admin))
        await write(gateway, "two")
        await eventually(lambda: is_empty(admin))
    assert sink.payloads == ["one", "two"]
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "a transaction pooler stands before PostgreSQL" in said[0]
    assert "OUTBOX_LISTEN_DSN" in said[0]


async def test_through_a_pooler_with_a_direct_address_to_listen_on_it_is_woken(
    database: TestDatabase, gateway: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_STATEMENT_CACHE_SIZE", "0")
    async with FakePooler.before(database.gateway_dsn, mode="swap") as pooler:
        dsn = pooler.dsn(database.gateway_dsn)
        async with drainer_of(dsn, Recorder(), listen_dsn=database.gateway_dsn) as drainer:
            await enqueue(gateway, "one")
            await eventually(lambda: drainer.total.delivered)


async def test_with_a_database_of_the_callers_and_no_address_to_listen_on_it_polls_and_leaves_that_open(
    database: TestDatabase, admin: Connection, gateway: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Recorder()
    async with Database(database.gateway_dsn, max_size=2) as pool:
        async with drainer_of(pool, sink, drain_interval_sec=0.05):
            await write(gateway, "one")
            await eventually(lambda: is_empty(admin))
        assert "OUTBOX_LISTEN_DSN" in caplog.text
        assert await pool.execute("select 1")


# --- several at a time --------------------------------------------------------------------------


@pytest.mark.invariant("I7")
async def test_while_sinks_run_no_transaction_is_open_no_lock_is_held_and_every_connection_is_free(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    sink = Blocking()
    async with drainer_of(database, sink, concurrency=3) as drainer:
        await write(gateway, *range(3))
        await enqueue(gateway, 3)
        await eventually(lambda: len(sink.events) >= 3)
        assert await open_transactions(admin) == []
        held = "select count(*) from pg_locks where database is not null and pid <> pg_backend_pid()"
        assert await admin.fetchval(held) == 0
        assert drainer._outbox is not None
        pool = drainer._outbox._database._pool
        assert pool._places == len(pool._idle)
        sink.let_go.set()
        await eventually(lambda: is_empty(admin))


async def test_a_sink_that_hangs_holds_up_no_other_sink_and_takes_two_batches_at_most(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    hanging, good = Blocking(), Recorder()
    drainer = drainer_of(database, batch_size=2, concurrency=1)
    drainer.add_sink("hangs", hanging)
    drainer.add_sink("good", good)
    await write(gateway, *range(10), kind="hangs")
    async with drainer:
        await eventually(lambda: len(hanging.events) == 2)
        for number in range(5):
            await enqueue(gateway, number, kind="good")
        await eventually(lambda: len(good.events) == 5)
        assert len(hanging.events) == 2
        assert await admin.fetchval(f"select count(*) from {OUTBOX} where kind = 'hangs' and state = 'claimed'") == 4
        hanging.let_go.set()
        await eventually(lambda: is_empty(admin))
    assert sorted(hanging.payloads) == list(range(10))


async def test_eight_drainers_deliver_each_event_once_between_them(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    sinks = [Recorder() for _ in range(8)]
    async with anyio.create_task_group() as group:
        for sink in sinks:
            await group.start(drainer_of(database, sink, batch_size=50).run)
        for first in range(0, 2000, 500):
            async with gateway.transaction():
                await Outbox.enqueue(gateway, KIND, -first, tenant=TENANT)
            await write(gateway, *range(first + 1, first + 500))
        await enqueue(gateway, "last")
        await eventually(lambda: is_empty(admin), 30)
        group.cancel_scope.cancel()
    delivered = Counter(str(payload) for sink in sinks for payload in sink.payloads)
    assert len(delivered) == 2001
    assert set(delivered.values()) == {1}


@pytest.mark.invariant("I3")
async def test_one_that_comes_back_late_changes_nothing(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    late, quick = Blocking(), Recorder()
    async with drainer_of(database, late) as first:
        await enqueue(gateway, "one")
        await eventually(lambda: late.events)
        await make_stale(admin)
        async with drainer_of(database, quick, backoff_base_seconds=0.01) as second:
            await eventually(lambda: second.total.delivered)
        late.let_go.set()
        await eventually(lambda: first.total.claimed)
    assert first.total == DrainReport(claimed=1, stale=1)
    assert [event.attempts for event in quick.events] == [1]


# --- without the database -----------------------------------------------------------------------


async def test_an_outage_is_waited_out_without_a_spin_and_ends_with_the_first_connection(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    sink = Recorder()
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        drainer_of(proxy.dsn(database.gateway_dsn), sink) as drainer,
    ):
        await enqueue(gateway, "before")
        await eventually(lambda: drainer.total.delivered)
        claims, outbox = 0, drainer._outbox
        assert outbox is not None
        claim = outbox.claim

        async def counted(*args: Any, **options: Any) -> Any:
            nonlocal claims
            claims += 1
            return await claim(*args, **options)

        outbox.claim = counted  # type: ignore[method-assign]
        before = proxy.accepted
        proxy.mode = "reset"
        await write(gateway, "meanwhile")
        await eventually(lambda: proxy.accepted >= before + 6, 30)
        # By the listening connection and by claims: each pause is up to twice the one before, so 64 tries of either
        # are hours; a spin makes thousands a second.
        assert claims < 64
        assert proxy.accepted < before + 128
        proxy.mode = "pass"
        await eventually(lambda: drainer.total.delivered == 2, 30)
    assert sink.payloads == ["before", "meanwhile"]


async def test_a_database_that_is_away_at_the_start_is_waited_for(
    database: TestDatabase, gateway: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await write(gateway, "one")
    async with TcpProxy.before(database.gateway_dsn) as proxy:
        proxy.mode = "reset"
        async with drainer_of(proxy.dsn(database.gateway_dsn), Recorder()) as drainer:
            await eventually(lambda: proxy.accepted >= 2)
            assert drainer.total == DrainReport()
            proxy.mode = "pass"
            await eventually(lambda: drainer.total.delivered, 30)
    assert caplog.text.count("the outbox cannot be opened for now") == 1


async def test_what_no_pause_can_mend_is_raised_at_the_start(
    bare_database: TestDatabase, database: TestDatabase
) -> None:
    await migrate(bare_database.admin_dsn, only=["dispatch"])
    with pytest.raises(SchemaMismatchError, match="the room outbox"):
        async with drainer_of(bare_database.admin_dsn, Recorder()):
            await anyio.sleep_forever()
    with pytest.raises(ConfigurationError, match="without a sink"):
        await drainer_of(database).run()
    with pytest.raises(ConfigurationError, match="DSN"):
        await drainer_of("not a dsn", Recorder()).run()


async def test_it_ends_within_its_bound_where_the_line_is_dead(
    database: TestDatabase, admin: Connection, gateway: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dispatch_core.pool.PUT_AWAY_SECONDS", 0.1)
    sink = Blocking()
    async with TcpProxy.before(database.gateway_dsn) as proxy:
        with anyio.fail_after(30):
            async with drainer_of(proxy.dsn(database.gateway_dsn), sink, stop_timeout_seconds=0.1):
                await enqueue(gateway, "one")
                await eventually(lambda: sink.events)
                proxy.mode = "black_hole"
        proxy.mode = "reset"
    await make_stale(admin)
    sink.let_go.set()
    async with drainer_of(database, sink, backoff_base_seconds=0.01):
        await eventually(lambda: is_empty(admin))


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("way", ["block", "stop", "cancel"])
async def test_when_it_stops_what_is_at_hand_is_free_again_uncounted_and_nothing_of_it_is_left(
    database: TestDatabase, admin: Connection, gateway: Connection, way: str
) -> None:
    tasks = len(asyncio.all_tasks())
    sink = Blocking()
    drainer = drainer_of(database, sink, concurrency=1)
    await write(gateway, "hangs", "never begun")
    if way == "block":
        async with drainer:
            await eventually(lambda: sink.events)
    else:
        async with anyio.create_task_group() as group:
            await group.start(drainer.run)
            await eventually(lambda: sink.events)
            if way == "stop":
                await drainer.stop()
                await drainer.stop()
            else:
                group.cancel_scope.cancel()
    assert await admin.fetchval(f"select array_agg(distinct (state, attempts)::text) from {OUTBOX}") == ["(ready,0)"]
    await eventually(lambda: len(asyncio.all_tasks()) == tasks)  # the driver's own may be cancelling a statement

    async def gone() -> bool:
        return not [row for row in await backends(admin) if "outbox" in row["application_name"]]

    await eventually(gone)
    async with drainer:  # and it can begin again
        sink.let_go.set()
        await eventually(lambda: is_empty(admin))


@pytest.mark.parametrize("part", ["claim", "deliver"])
async def test_a_fault_that_nobody_foresees_ends_its_owner_with_the_cause(
    database: TestDatabase, admin: Connection, gateway: Connection, part: str
) -> None:
    tasks = len(asyncio.all_tasks())
    drainer = drainer_of(database, Recorder())

    async def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    async def owner() -> None:
        async with drainer:
            setattr(drainer._outbox, part, fail)
            await enqueue(gateway, "one")
            await anyio.sleep_forever()

    with pytest.raises(RuntimeError, match="a bug"):
        await owner()
    await eventually(lambda: len(asyncio.all_tasks()) == tasks)  # the driver's own may be cancelling a statement


async def test_what_is_refused_while_it_runs_is_waited_out_and_said_once(
    database: TestDatabase, admin: Connection, gateway: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with drainer_of(database, Recorder(), drain_interval_sec=0.02) as drainer:
        await admin.execute("revoke execute on function relay.outbox_claim from relay_gateway")
        await enqueue(gateway, "one")
        await eventually(lambda: "cannot be drained for now" in caplog.text)
        await admin.execute("grant execute on function relay.outbox_claim to relay_gateway")
        await eventually(lambda: drainer.total.delivered, 30)
    assert caplog.text.count("cannot be drained for now") == 1


# --- by hand ------------------------------------------------------------------------------------


async def test_it_is_off_by_default_and_drains_by_hand_all_the_same(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    sink = Recorder({"bad": OutboxPark("no")})
    drainer = OutboxDrainer(database.gateway_dsn, default_sink=sink)
    assert not drainer.is_on
    tasks = len(asyncio.all_tasks())
    async with drainer:
        assert len(asyncio.all_tasks()) == tasks
        assert len(await backends(admin)) == 1  # the test's own
        await write(gateway, *range(250), "bad")
        assert (await drainer.drain_once()).claimed == 100
        report = await drainer.drain_all()
        assert (report.claimed, report.delivered, report.parked) == (151, 150, 1)
        assert await drainer.drain_all() == DrainReport()
    with pytest.raises(ConfigurationError, match="OUTBOX_DRAIN_INTERVAL_SEC"):
        await drainer.run()


async def test_a_drainer_that_is_given_and_off_says_so_once_and_does_nothing(
    database: TestDatabase, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with GatewayClient(database.gateway_dsn):
        tasks = len(asyncio.all_tasks())
    assert "drainer is off" not in caplog.text
    drainer = OutboxDrainer(database.gateway_dsn, default_sink=Recorder())
    for _ in range(2):
        async with GatewayClient(database.gateway_dsn, outbox=drainer):
            assert len(asyncio.all_tasks()) == tasks
            # A name by which every session of a drainer is known.
            assert not [b for b in await backends(admin) if "outbox" in b["application_name"]]
        async with drainer:
            pass
    told = [(r.levelname, r.getMessage()) for r in caplog.records if "drainer is off" in r.getMessage()]
    assert told == [("WARNING", "the outbox drainer is off: set OUTBOX_DRAIN_INTERVAL_SEC above 0")]


async def test_by_hand_an_outage_is_an_error(database: TestDatabase) -> None:
    drainer = OutboxDrainer("postgresql://u:p@127.0.0.1:9/x", default_sink=Recorder())
    for drain in (drainer.drain_once, drainer.drain_all):
        with pytest.raises(Exception, match="could not be reached"):
            await drain()


async def test_of_a_running_one_a_batch_can_be_asked_for_by_hand(database: TestDatabase, gateway: Connection) -> None:
    sink = Recorder()
    async with drainer_of(database, sink) as drainer:
        # Its own first look may come before either of them.
        await write(gateway, "one")
        assert (await drainer.drain_all()).delivered <= 1
        await write(gateway, "two")
        assert (await drainer.drain_once()).delivered <= 1
        await eventually(lambda: sink.payloads == ["one", "two"])
        with pytest.raises(ConfigurationError, match="runs already"):
            await drainer.run()
        with pytest.raises(ConfigurationError, match="open already"):
            await drainer.__aenter__()


def test_a_kind_has_one_sink_and_a_sink_can_be_called() -> None:
    drainer = OutboxDrainer("postgresql://u@h/d")
    drainer.add_sink(KIND, Recorder())
    with pytest.raises(ConfigurationError, match=f"kind {KIND} have a sink already"):
        drainer.sink(KIND)(Recorder())
    with pytest.raises(ConfigurationError, match="async callable, not str"):
        drainer.add_sink("other", "not a sink")  # type: ignore[arg-type]


def _plain(_: OutboxEvent) -> None: ...


class _PlainCall:
    __call__ = staticmethod(_plain)


class _PlainMany(Recorder):
    deliver_many = staticmethod(_plain)


@pytest.mark.parametrize("sink", [_plain, partial(_plain), _PlainCall(), Recorder, _PlainMany(), lambda _: None])
def test_a_sink_that_is_not_async_is_refused_before_it_is_given_anything(sink: Any) -> None:
    """Else it would do its work at each of 25 attempts, all of which would have failed."""
    drainer = OutboxDrainer("postgresql://u@h/d")
    with pytest.raises(ConfigurationError, match="must be an async function"):
        drainer.sink(KIND)(sink)
    with pytest.raises(ConfigurationError, match="must be an async function"):
        drainer.set_default_sink(sink)
    with pytest.raises(ConfigurationError, match="must be an async function"):
        Outbox("postgresql://u@h/d", sinks={KIND: sink})
    assert (drainer.sinks, drainer.default_sink) == ({}, None)


def test_an_async_sink_may_be_a_method_partial_or_wrapped() -> None:
    async def sink(_: OutboxEvent, **options: Any) -> None: ...

    @wraps(sink)
    def wrapped(event: OutboxEvent) -> Any:
        return sink(event)

    for each in (sink, partial(sink, option=1), wrapped, partial(wrapped), Recorder(), Recorder().__call__):
        OutboxDrainer("postgresql://u@h/d").add_sink(KIND, each)
        Outbox("postgresql://u@h/d", default_sink=each)


async def test_a_sink_that_is_added_while_it_runs_counts_from_the_next_claim_on(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    drainer = drainer_of(database)
    drainer.add_sink("other", Recorder())
    async with drainer:
        drainer.add_sink(KIND, Recorder())
        await enqueue(gateway, "one")
        await eventually(lambda: is_empty(admin))
        drainer.set_default_sink(Recorder())
        await enqueue(gateway, "one", kind="unheard-of")
        await eventually(lambda: is_empty(admin))


async def test_the_database_is_that_of_the_settings_or_else_the_gateways(
    database: TestDatabase, gateway: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(gateway, "one", "two")
    for name, other in (("RELAY_DISPATCH_DSN", "OUTBOX_DSN"), ("OUTBOX_DSN", "RELAY_DISPATCH_DSN")):
        monkeypatch.setenv(name, database.gateway_dsn)
        if name == "OUTBOX_DSN":
            monkeypatch.setenv(other, "postgresql://u:p@127.0.0.1:9/x")
        monkeypatch.setenv("OUTBOX_BATCH_SIZE", "1")
        assert (await OutboxDrainer(default_sink=Recorder()).drain_once()).delivered == 1
    async with connected(database.admin_dsn) as conn:
        assert isinstance(conn, asyncpg.Connection)
        assert await is_empty(conn)
