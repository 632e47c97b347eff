"""The dispatch sink: one job an event however often it is delivered, and what can never succeed is parked."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import anyio
import pytest

from dispatch_core.dev.wire import Wire
from dispatch_core.errors import (
    ClientClosedError,
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidInputError,
    SchemaMismatchError,
    TenancyDeniedError,
)
from dispatch_core.ids import new_id
from dispatch_core.migrate import grant, migrate
from dispatch_core.outbox import DrainReport, Outbox, OutboxEvent, OutboxPark, OutboxSettings
from gateway_sdk import DispatchSink, GatewayClient, OutboxDrainer, OutboxRoute
from gateway_sdk.outbox_sinks import _told
from tests.support.activity import backends
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import PlayedRelay, open_client, settings_for
from tests.support.outbox import KIND, Recorder, make_due, make_stale, outbox, write
from tests.support.protocol import KEY, OUTBOX, REQUEST, TENANT, Connection, connected
from tests.support.proxy import TcpProxy
from tests.test_gateway_statements import statements

HOUR = 3600.0
ROUTES = {KIND: OutboxRoute("erp", "PostOrder", ttl=60, max_attempts=3, headers={"x-source": "outbox"})}


def event(payload: Any = 7, *, event_id: UUID | None = None, kind: str = KIND, tenant: str = TENANT) -> OutboxEvent:
    """Make an event by hand."""
    return OutboxEvent(event_id or new_id(), tenant, kind, None, payload, datetime.now(UTC), 0)


async def jobs(admin: Connection) -> list[Any]:
    """Return the jobs there are."""
    return await admin.fetch(f"select * from {REQUEST} order by job_id")


# --- one job an event ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["same", "another"])
async def test_an_event_becomes_a_job_of_its_tenant_in_the_same_database_or_another(
    database: TestDatabase, admin: Connection, gateway: Connection, bare_database: TestDatabase, where: str
) -> None:
    business = database
    if where == "another":
        business = bare_database
        await migrate(business.admin_dsn, only=["outbox"])
        await grant(business.admin_dsn, "relay_gateway_login", role="gateway", tenant=None)
    async with connected(business.gateway_dsn) as conn, open_client(database.gateway_dsn) as client:
        ids = [(await write(conn, {"of": tenant}, tenant=tenant))[0] for tenant in ("acme", "globex")]
        async with outbox(business, DispatchSink(client, ROUTES)) as drainer:
            assert await drainer.drain() == DrainReport(claimed=2, delivered=2)
    made = {row["tenant_id"]: row for row in await jobs(admin)}
    assert {tenant: row["job_id"] for tenant, row in made.items()} == {
        "acme": DispatchSink.job_id(ids[0], KIND),
        "globex": DispatchSink.job_id(ids[1], KIND),
    }
    row = made["globex"]
    assert (row["relay_id"], row["operation"], row["max_attempts"]) == ("erp", "PostOrder", 3)
    assert row["request_headers"] == '{"x-source": "outbox"}'
    assert row["request_body"] == b'{"of": "globex"}'
    assert (row["expires_at"] - row["created_at"]).total_seconds() == 60
    assert await admin.fetchval(f"select count(*) from {KEY}") == 0


async def test_an_event_that_is_delivered_again_is_the_same_job_whatever_became_of_that(
    database: TestDatabase, admin: Connection, worker: Connection
) -> None:
    relay = PlayedRelay(worker, TENANT, "erp")
    it = event()
    async with open_client(database.gateway_dsn) as client:
        sink = DispatchSink(client, ROUTES)
        assert await sink.deliver_many([it, event("other"), it]) == [None, None, None]
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(sink, it)
        assert len(await relay.work()) == 2
        await sink(it)  # it has ended
        assert await relay.work() == []
        # With another route since, and from another gateway.
        async with open_client(database.gateway_dsn) as other:
            await DispatchSink(other, {KIND: OutboxRoute("crm", "Changed")})(it)
        assert len(await jobs(admin)) == 2
        assert (await client.tenant(TENANT).poll_status(DispatchSink.job_id(it.event_id, KIND))).status == "succeeded"  # type: ignore[union-attr]


async def test_an_event_whose_drainer_died_after_the_delivery_is_one_job(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, *range(20))
    async with open_client(database.gateway_dsn) as client:
        sink = DispatchSink(client, ROUTES)
        async with outbox(database, sink) as dying:
            batch = await dying.claim()
            assert await sink.deliver_many(batch.events) == [None] * 20
        await make_stale(admin)
        async with outbox(database, sink) as drainer:
            total = 0
            while total < 20:
                await make_due(admin)
                total += (await drainer.drain()).delivered
    assert len(await jobs(admin)) == 20
    assert await admin.fetchval(f"select count(*) from {OUTBOX}") == 0


async def test_the_events_of_a_batch_share_a_statement_for_each_tenant(
    database: TestDatabase, gateway: Connection
) -> None:
    for tenant in ("acme", "globex"):
        await write(gateway, *range(50), tenant=tenant)
    async with open_client(database.gateway_dsn) as client, outbox(database, DispatchSink(client, ROUTES)) as drainer:
        with statements() as sent:
            assert (await drainer.drain(200)).delivered == 100
            await eventually(lambda: "ring" in sent)
        assert sorted(verb for verb in sent if verb != "ring") == [
            "enqueue", "enqueue", "outbox_claim", "outbox_due", "outbox_settle",
        ]  # fmt: skip
        assert client.health().enqueued == 100


def test_the_id_of_a_job_is_made_of_its_events_and_is_another() -> None:
    event_id = UUID("0190d6c1-7e00-7123-8000-00000000abcd")
    assert DispatchSink.job_id(event_id, KIND) == UUID("0190d6c1-7e00-7f7f-8378-e6a95d5457c1")
    assert DispatchSink.job_id(event_id, KIND) != DispatchSink.job_id(UUID(int=event_id.int + 1), KIND)
    ids = [new_id() for _ in range(1000)]
    made = [DispatchSink.job_id(each, KIND) for each in ids]
    assert len({*ids, *made}) == 2000
    assert {each.version for each in made} == {7}
    assert {each.variant for each in made} == {ids[0].variant}
    assert [each.int >> 80 for each in made] == [each.int >> 80 for each in ids]  # by time, as the events
    assert DispatchSink.job_id(UUID("ffffffff-ffff-4fff-bfff-ffffffffffff"), KIND).version == 4


async def test_an_id_that_is_given_to_events_of_two_kinds_is_two_jobs(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """As where a writer gives its events the id of the order: the second is no repetition of the first."""
    order = new_id()
    call = "select relay.outbox_enqueue($1, '{}', p_tenant => $2, p_event_id => $3)"
    async with open_client(database.gateway_dsn) as client:
        sink = DispatchSink(client, {KIND: OutboxRoute("erp", "Post"), "order-cancelled": OutboxRoute("erp", "Cancel")})
        async with outbox(database, sink) as drainer:
            for kind in (KIND, "order-cancelled"):
                await gateway.execute(call, kind, TENANT, order)
                assert await drainer.drain() == DrainReport(claimed=1, delivered=1)
    assert {row["operation"]: row["job_id"] for row in await jobs(admin)} == {
        "Post": DispatchSink.job_id(order, KIND),
        "Cancel": DispatchSink.job_id(order, "order-cancelled"),
    }


async def test_a_job_that_has_the_id_of_an_event_does_not_swallow_it(database: TestDatabase, admin: Connection) -> None:
    async with open_client(database.gateway_dsn) as client:
        # As where a job's result is told by an event that is given the id of the job.
        job_id = await client.tenant(TENANT).enqueue("erp", "Other")
        await DispatchSink(client, ROUTES)(event(event_id=job_id))
    assert len(await jobs(admin)) == 2


# --- what cannot be delivered -------------------------------------------------------------------


async def test_an_event_without_a_route_or_too_large_for_a_body_is_parked_with_that_reason(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "good", "x" * 200)
    await write(gateway, "lost", kind="unrouted")
    async with (
        open_client(database.gateway_dsn, max_body_bytes=100) as client,
        outbox(database, DispatchSink(client, ROUTES)) as drainer,
    ):
        assert await drainer.drain() == DrainReport(claimed=3, delivered=1, parked=2)
    rows = await admin.fetch(f"select kind, attempts, last_error from {OUTBOX} where state = 'parked' order by kind")
    assert [tuple(row) for row in rows] == [
        (
            KIND,
            1,
            "S2R-BODY-INVALID: the payload has 202 bytes, and a job's body at most 100 (RELAY_DISPATCH_MAX_BODY_BYTES)",
        ),
        ("unrouted", 1, "no route for events of kind unrouted"),
    ]
    assert len(await jobs(admin)) == 1


def test_an_error_that_blames_the_row_parks_and_any_other_is_tried_again() -> None:
    parked = _told(InvalidInputError("wrong"))
    assert isinstance(parked, OutboxPark)
    assert str(parked) == "S2R-INPUT-INVALID: wrong"
    for error in (TenancyDeniedError("no"), DatabaseUnavailableError("away"), SchemaMismatchError("old"), OSError()):
        assert _told(error) is error


async def test_a_tenant_that_is_not_granted_yet_fails_and_is_not_parked(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    login = f"{database.name}_sink"
    await admin.execute(f"create role {login} login password 'relay'")
    try:
        await grant(database.admin_dsn, login, role="gateway", tenant="globex")
        await write(gateway, "one")
        async with (
            open_client(database.dsn(login)) as client,
            outbox(database, DispatchSink(client, ROUTES)) as drainer,
        ):
            assert await drainer.drain() == DrainReport(claimed=1, failed=1)
            await grant(database.admin_dsn, login, role="gateway", tenant=TENANT)
            await make_due(admin)
            assert await drainer.drain() == DrainReport(claimed=1, delivered=1)
    finally:
        for tenant in (TENANT, "globex"):
            await admin.execute("select relay.revoke_binding($1, 'gateway', $2, null)", login, tenant)
        await admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = $1", login)
        await admin.execute(f"drop owned by {login}; drop role {login}")


async def test_a_dispatch_database_that_is_away_counts_attempts_and_the_event_is_a_job_when_it_is_back(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "one")
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn), write_timeout_seconds=0.5) as client,
        outbox(database, DispatchSink(client, ROUTES)) as drainer,
    ):
        proxy.mode = "reset"
        assert await drainer.drain() == DrainReport(claimed=1, failed=1)
        row = await admin.fetchrow(f"select attempts, last_error from {OUTBOX}")
        assert row is not None
        assert row["attempts"] == 1
        assert row["last_error"].startswith("DatabaseUnavailableError: not enqueued in time")
        proxy.mode = "pass"

        async def delivered() -> int:
            await make_due(admin)
            return (await drainer.drain()).delivered

        assert await eventually(delivered) == 1
    assert len(await jobs(admin)) == 1


@pytest.mark.parametrize(
    "route",
    [
        OutboxRoute("", "Op"),
        OutboxRoute("erp", "Op\0"),
        OutboxRoute("erp", "Op", ttl=-1),
        OutboxRoute("erp", "Op", ttl=8 * 86400),
        OutboxRoute("erp", "Op", max_attempts=0),
        OutboxRoute("erp", "Op", headers={"a": 1}),  # type: ignore[dict-item]
    ],
)
def test_a_route_that_no_job_could_take_is_refused_at_once(route: OutboxRoute) -> None:
    with pytest.raises(InvalidInputError):
        DispatchSink(GatewayClient(settings=settings_for("postgresql://u@h/d")), {KIND: route})


def test_settings_by_which_a_job_could_be_forgotten_before_its_event_are_refused() -> None:
    client = GatewayClient(settings=settings_for("postgresql://u@h/d", result_keep_seconds=3 * 86400))
    with pytest.raises(ConfigurationError, match="GATEWAY_RESULT_KEEP_SECONDS"):
        OutboxDrainer("postgresql://u@h/d", default_sink=DispatchSink(client, ROUTES))
    with pytest.raises(ConfigurationError, match="GATEWAY_RESULT_KEEP_SECONDS"):
        Outbox("postgresql://u@h/d", sinks={KIND: DispatchSink(client, ROUTES)})
    with pytest.raises(ConfigurationError, match="GATEWAY_RESULT_KEEP_SECONDS"):
        Outbox("postgresql://u@h/d", default_sink=DispatchSink(client, ROUTES))
    shorter = OutboxSettings(retry_horizon_seconds=86400)
    OutboxDrainer("postgresql://u@h/d", settings=shorter, default_sink=DispatchSink(client, ROUTES))


def test_settings_by_which_an_outage_is_waited_out_longer_than_a_sink_may_take_are_refused() -> None:
    """Cut off by the drain, nothing is known of what was written, and the reason would be its timeout."""
    client = GatewayClient(settings=settings_for("postgresql://u@h/d", write_timeout_seconds=31))
    with pytest.raises(ConfigurationError, match=r"GATEWAY_WRITE_TIMEOUT_SECONDS.*OUTBOX_SINK_TIMEOUT_SECONDS"):
        OutboxDrainer("postgresql://u@h/d", default_sink=DispatchSink(client, ROUTES))
    slower = OutboxSettings(sink_timeout_seconds=31)
    OutboxDrainer("postgresql://u@h/d", settings=slower, default_sink=DispatchSink(client, ROUTES))


async def test_through_a_client_that_is_not_open_an_event_fails(database: TestDatabase) -> None:
    client = GatewayClient(settings=settings_for(database.gateway_dsn))
    sink = DispatchSink(client, ROUTES)
    with pytest.raises(ClientClosedError):
        await sink(event())
    async with client:
        await sink(event())
        assert await sink.deliver_many([]) == []
    with pytest.raises(ClientClosedError):
        await sink(event())


# --- with a client ------------------------------------------------------------------------------


def _client(database: TestDatabase, drainer: OutboxDrainer | None = None, **settings: Any) -> GatewayClient:
    return GatewayClient(settings=settings_for(database.gateway_dsn, **settings), outbox=drainer)


async def test_a_client_drains_by_the_settings_alone_on_its_own_connections(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_DRAIN_INTERVAL_SEC", str(HOUR))
    monkeypatch.setenv("OUTBOX_ROUTES", '{"order-placed": {"relay": "erp", "operation": "Post", "ttl_seconds": 60}}')
    async with _client(database) as client:
        assert client.outbox is not None
        assert client.outbox.is_on
        async with gateway.transaction():
            event_id = await Outbox.enqueue(gateway, KIND, {"order": 7}, tenant=TENANT)
        relay = PlayedRelay(worker, TENANT, "erp")
        (job,) = await eventually(relay.work)
        assert (job.operation, job.json()) == ("Post", {"order": 7})
        assert (await client.tenant(TENANT).wait(DispatchSink.job_id(event_id, KIND), timeout=10)).is_terminal
        assert await is_alone(admin)
    assert client.outbox.total.delivered == 1


async def is_alone(admin: Connection) -> bool:
    """Tell whether nobody but the gateway's client and the tests' own connections are there: one of it listens."""
    names = [row["application_name"] for row in await backends(admin)]
    return len([name for name in names if "listener" in name]) == 1 and not any("outbox" in name for name in names)


async def test_off_it_is_no_task_no_connection_no_listen_and_no_statement(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "one")
    seen: list[tuple[int, list[str], list[str]]] = []
    for is_given in (False, True):
        # Both of the drainer's ways to the database are the wire that is read along.
        async with Wire.to(database.gateway_dsn) as wire:
            dsn, said = wire.dsn(database.gateway_dsn), list[str]()

            def passing(text: str, said: list[str] = said) -> None:
                said.append(re.sub(r"s2r_self_\w+|'[0-9a-f]{16}'", "…", text))

            wire.passing = passing  # type: ignore[method-assign]
            drainer = OutboxDrainer(dsn, listen_dsn=dsn, default_sink=Recorder()) if is_given else None
            async with GatewayClient(settings=settings_for(dsn), outbox=drainer) as client:
                assert client.outbox is drainer
                await client.tenant(TENANT).enqueue("erp", "Op", notify=False)
                await eventually(lambda: client.health().state == "listening")
                await eventually(lambda: any("unlisten" in text for text in said))  # noqa: B023
                tasks = len(asyncio.all_tasks())
                names = sorted(row["application_name"].split(" listener")[0] for row in await backends(admin))
        assert any("relay.enqueue" in text for text in said)
        assert not any("outbox" in text for text in said)
        seen.append((tasks, names, sorted(said)))
    assert seen[0] == seen[1]
    assert await admin.fetchval(f"select state from {OUTBOX}") == "ready"


async def test_an_interval_without_routes_or_a_drainer_is_nothing(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_DRAIN_INTERVAL_SEC", "5")
    assert _client(database).outbox is None


async def test_a_drainer_that_is_given_to_a_client_lives_and_ends_with_it(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    sink = Recorder()
    drainer = OutboxDrainer(settings=OutboxSettings(drain_interval_sec=HOUR), default_sink=sink)
    client = _client(database, drainer)
    for number, payload in enumerate(("first", "second")):
        async with client:
            async with gateway.transaction():
                await Outbox.enqueue(gateway, KIND, payload, tenant=TENANT)
            await eventually(lambda: drainer.total.delivered == number + 1)  # noqa: B023
            assert await is_alone(admin)
            assert await drainer.drain_all() == DrainReport()
    assert sink.payloads == ["first", "second"]
    with pytest.raises(ConfigurationError, match="DSN"):
        await drainer.drain_once()


async def test_a_drainer_that_dies_takes_its_client_down_with_the_cause(
    database: TestDatabase, gateway: Connection
) -> None:
    drainer = OutboxDrainer(settings=OutboxSettings(drain_interval_sec=HOUR), default_sink=Recorder())
    client = _client(database, drainer)
    told: list[BaseException | None] = []

    async def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    async def owner() -> None:
        async with client:
            job_id = await client.tenant(TENANT).enqueue("erp", "Op")
            assert drainer._outbox is not None
            drainer._outbox.claim = fail  # type: ignore[method-assign]
            async with gateway.transaction():
                await Outbox.enqueue(gateway, KIND, 1, tenant=TENANT)
            try:
                await client.tenant(TENANT).wait(job_id)
            except ClientClosedError as error:
                told.append(error.__cause__)
                raise

    with pytest.raises((RuntimeError, ClientClosedError)) as caught:
        await owner()
    assert "a bug" in repr(caught.value) or "a bug" in repr(caught.value.__cause__)


async def test_a_client_whose_outbox_is_not_installed_does_not_open(
    bare_database: TestDatabase, database: TestDatabase
) -> None:
    await migrate(bare_database.admin_dsn, only=["dispatch"])
    on = OutboxSettings(drain_interval_sec=HOUR)
    drainer = OutboxDrainer(bare_database.admin_dsn, settings=on, default_sink=Recorder())
    tasks = len(asyncio.all_tasks())
    with pytest.raises(SchemaMismatchError, match="the room outbox"):
        async with _client(database, drainer):
            pass
    await eventually(lambda: len(asyncio.all_tasks()) == tasks)


async def test_when_a_client_closes_the_batch_at_hand_is_a_job_or_free_again(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    drainer = OutboxDrainer(settings=OutboxSettings(drain_interval_sec=HOUR))
    client = _client(database, drainer)
    dispatch = DispatchSink(client, ROUTES)
    begun = anyio.Event()

    async def sink(it: OutboxEvent) -> None:
        await dispatch(it)
        if it.payload == 1:
            begun.set()
            await anyio.sleep_forever()

    drainer.add_sink(KIND, sink)
    await write(gateway, *range(3))
    async with client:
        await begun.wait()
        await eventually(lambda: client.health().enqueued == 3)
    rows = await admin.fetch(f"select payload::text, state, attempts from {OUTBOX}")
    assert [tuple(row) for row in rows] == [("1", "ready", 0)]
    assert len(await jobs(admin)) == 3
