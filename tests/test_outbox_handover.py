"""From the outbox to dispatch: one job for each event, whatever fails between the two (I3, I4, I7, I8, C25, C46)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID

import anyio
import pytest

from dispatch_core.database import Database
from dispatch_core.outbox import DrainReport, Outbox, OutboxEvent, OutboxMessage, OutboxSettings, Sink
from gateway_sdk import DispatchSink, GatewayClient, OutboxDrainer, OutboxRoute
from gateway_sdk.webhooks import WebhookSink
from tests.support.activity import open_transactions
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import settings_for
from tests.support.outbox import KIND, make_stale, states, write
from tests.support.protocol import OUTBOX, TENANT, Connection, connected
from tests.support.proxy import TcpProxy

ROUTE = OutboxRoute("erp", "Post", ttl=3600)
HOUR = 3600.0


def drainer_of(database: TestDatabase | str | Database, **settings: Any) -> OutboxDrainer:
    """Make a drainer that polls hardly ever."""
    given = database.gateway_dsn if isinstance(database, TestDatabase) else database
    listen_dsn = settings.pop("listen_dsn", None)
    return OutboxDrainer(given, settings=OutboxSettings(drain_interval_sec=HOUR, **settings), listen_dsn=listen_dsn)


async def jobs_of(admin: Connection, tenant: str = TENANT) -> list[tuple[UUID, str]]:
    """Return id and relay of each job."""
    query = "select job_id, relay_id from relay.s2r_relay_dispatch_request where tenant_id = $1"
    return [(row["job_id"], row["relay_id"]) for row in await admin.fetch(query, tenant)]


# --- commit, rollback, failure ------------------------------------------------------------------


@pytest.mark.invariant("I8")
async def test_what_is_committed_is_a_job_after_one_drain_and_what_is_rolled_back_never(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    async with GatewayClient(settings=settings_for(database.gateway_dsn)) as client:
        drainer = drainer_of(database)
        drainer.add_sink(KIND, DispatchSink(client, {KIND: ROUTE}))
        transaction = gateway.transaction()
        await transaction.start()
        await Outbox.enqueue(gateway, KIND, "rolled back", tenant=TENANT)
        assert await drainer.drain_all() == DrainReport()
        await transaction.rollback()
        async with gateway.transaction():
            event_id = await Outbox.enqueue(gateway, KIND, {"order": 7}, tenant=TENANT)
            assert await drainer.drain_all() == DrainReport()
        assert await drainer.drain_all() == DrainReport(claimed=1, delivered=1)
        assert await jobs_of(admin) == [(DispatchSink.job_id(event_id, KIND), "erp")]
        assert await states(admin) == {}


@pytest.mark.case("C25")
async def test_an_event_that_is_delivered_again_finds_its_job_also_when_its_route_has_changed_meanwhile(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """What it collides with when it is put back is its own job: no error, and no second job."""
    (event_id,) = await write(gateway, 1)
    async with GatewayClient(settings=settings_for(database.gateway_dsn)) as client:
        for route in (ROUTE, ROUTE, OutboxRoute("erp-new", "PostAll", ttl=60, max_attempts=3)):
            async with Outbox(database.gateway_dsn, default_sink=DispatchSink(client, {KIND: route})) as outbox:
                (event,) = (await outbox.claim()).events
                await DispatchSink(client, {KIND: route})(event)
            # It is never settled: whoever had it is dead.
            assert await states(admin) == {"1": "claimed"}
            await make_stale(admin)
        drainer = drainer_of(database)
        drainer.add_sink(KIND, DispatchSink(client, {KIND: OutboxRoute("erp-new", "PostAll", ttl=60)}))
        assert await drainer.drain_all() == DrainReport(claimed=1, delivered=1, reclaimed=1)
    assert await jobs_of(admin) == [(DispatchSink.job_id(event_id, KIND), "erp")]
    assert await states(admin) == {}


# --- poison -------------------------------------------------------------------------------------


@pytest.mark.kind("poison at the head of the line")
async def test_what_can_never_be_a_job_is_parked_at_once_and_all_the_others_are_jobs_after_one_cycle(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """At the head: five of a kind without a route, and five, of the kind of the good ones, that are too large."""
    await write(gateway, *range(5), kind="no-route")
    await write(gateway, *("x" * 2000 for _ in range(5)))
    await write(gateway, *range(1000))
    async with GatewayClient(settings=settings_for(database.gateway_dsn, max_body_bytes=1000)) as client:
        drainer = drainer_of(database)
        drainer.set_default_sink(DispatchSink(client, {KIND: ROUTE}))
        assert await drainer.drain_all() == DrainReport(claimed=1010, delivered=1000, parked=10)
    assert len(await jobs_of(admin)) == 1000
    rows = await admin.fetch(f"select kind, state, attempts, last_error from {OUTBOX}")
    assert {(row["state"], row["attempts"]) for row in rows} == {("parked", 1)}
    reasons = Counter((row["kind"], row["last_error"].split(":")[0]) for row in rows)
    assert reasons == {("no-route", "no route for events of kind no-route"): 5, (KIND, "S2R-BODY-INVALID"): 5}


@pytest.mark.case("C46")
async def test_eight_drainers_at_once_and_writers_that_commit_late_make_one_job_of_each_event(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """Each writer begins in one order and commits in another; one in three rolls back."""
    committed: list[UUID] = []

    async def writer(number: int) -> None:
        async with connected(database.gateway_dsn) as first, connected(database.gateway_dsn) as second:
            for turn in range(15):
                transactions = [(conn, conn.transaction()) for conn in (first, second)]
                written: list[list[UUID]] = []
                for conn, transaction in transactions:
                    await transaction.start()
                    messages = [OutboxMessage(KIND, n, f"k{n}" if n % 3 else None) for n in range(8)]
                    written.append(await Outbox.enqueue_many(conn, messages, tenant=f"t{number % 2}"))
                for place in (1, 0):
                    if (turn + place + number) % 3:
                        await transactions[place][1].commit()
                        committed.extend(written[place])
                    else:
                        await transactions[place][1].rollback()

    async with GatewayClient(settings=settings_for(database.gateway_dsn)) as client:
        drainers = [drainer_of(database, batch_size=20) for _ in range(8)]
        for drainer in drainers:
            drainer.add_sink(KIND, DispatchSink(client, {KIND: ROUTE}))
        async with anyio.create_task_group() as running:
            for drainer in drainers:
                await running.start(drainer.run)
            async with anyio.create_task_group() as writers:
                for number in range(4):
                    writers.start_soon(writer, number)

            async def all_delivered() -> bool:
                return not await admin.fetchval(f"select exists (select from {OUTBOX})")

            await eventually(all_delivered, 30)
            for drainer in drainers:
                await drainer.stop()
    jobs = [job for tenant in ("t0", "t1") for job, _ in await jobs_of(admin, tenant)]
    assert Counter(jobs) == Counter(DispatchSink.job_id(event_id, KIND) for event_id in committed)


# --- the network, and whose it is ---------------------------------------------------------------


@asynccontextmanager
async def _silent_dispatch(database: TestDatabase, hangs: anyio.Event) -> AsyncIterator[Sink]:
    """A dispatch database that has stopped to answer."""
    async with TcpProxy.before(database.gateway_dsn) as proxy, AsyncExitStack() as stack:
        settings = settings_for(proxy.dsn(database.gateway_dsn))
        dispatch = DispatchSink(await stack.enter_async_context(GatewayClient(settings=settings)), {KIND: ROUTE})

        async def sink(event: OutboxEvent) -> None:
            proxy.mode = "black_hole"
            hangs.set()
            await dispatch(event)

        try:
            yield sink
        finally:
            proxy.mode = "pass"


@asynccontextmanager
async def _silent_webhook(database: TestDatabase, hangs: anyio.Event) -> AsyncIterator[Sink]:
    """An endpoint that takes the request and says nothing."""
    pytest.importorskip("httpx2")

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        hangs.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        sink = WebhookSink(f"http://127.0.0.1:{port}/", secret="whsec_" + "c2VjcmV0" * 4)
        yield sink
        await sink.aclose()


@pytest.mark.invariant("I7")
@pytest.mark.kind("transactions held over the network")
@pytest.mark.parametrize("silent", [_silent_dispatch, _silent_webhook], ids=["dispatch", "webhook"])
async def test_while_a_sink_waits_for_the_network_nothing_is_held_and_others_go_on(
    database: TestDatabase, admin: Connection, gateway: Connection, silent: Any
) -> None:
    await write(gateway, "hangs")
    await write(gateway, "same key", kind="other", key="k")
    hangs, came = anyio.Event(), anyio.Event()
    async with (
        silent(database, hangs) as sink,
        # One connection for all that the drainer does.
        Database(database.gateway_dsn, min_size=1, max_size=1) as pool,
        anyio.create_task_group() as running,
    ):
        drainer = drainer_of(pool)
        drainer.add_sink(KIND, sink)

        @drainer.sink("other")
        async def other(_: OutboxEvent) -> None:
            came.set()

        running.start_soon(drainer.run)
        with anyio.fail_after(10):
            await hangs.wait()
            await came.wait()

        async def at_rest() -> bool:
            return await states(admin) == {"hangs": "claimed"} and not await open_transactions(admin)

        await eventually(at_rest)
        async with admin.transaction():
            assert len(await admin.fetch(f"select 1 from {OUTBOX} for update nowait")) == 1
        async with pool.connection(within=1) as conn:
            assert await conn.fetchval("select 1") == 1
        await drainer.stop()
    assert await states(admin) == {"hangs": "ready"}
    assert await admin.fetchval(f"select attempts from {OUTBOX}") == 0
