"""An event is written in somebody else's transaction, on somebody else's connection, and shares its fate (I8)."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from dispatch_core.errors import (
    InvalidDeadlineError,
    InvalidInputError,
    InvalidNameError,
    InvalidPayloadError,
    SchemaMismatchError,
    TenancyDeniedError,
    TenancyMismatchError,
    TenancyUnboundError,
    TransactionRequiredError,
)
from dispatch_core.outbox import Outbox, OutboxMessage
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.outbox import KIND, Recorder, outbox, take, write
from tests.support.protocol import OUTBOX, TENANT, Connection, connected

_COUNT = f"select count(*) from {OUTBOX}"
_SETTINGS = "select array_agg(name || '=' || setting order by name) from pg_settings"


async def test_where_the_outbox_is_missing_the_error_names_the_room_to_install(bare_database: TestDatabase) -> None:
    async with connected(bare_database.admin_dsn) as conn:
        for then in ("create schema relay", "select"):
            with pytest.raises(SchemaMismatchError, match=r"relay-dispatch db migrate --only outbox$"):
                async with conn.transaction():
                    await Outbox.enqueue(conn, KIND, 1, tenant=TENANT)
            with pytest.raises(SchemaMismatchError, match=r"relay-dispatch db migrate --only outbox$"):
                async with conn.transaction():
                    await Outbox.enqueue_many(conn, [OutboxMessage(KIND, 1)], tenant=TENANT)
            await conn.execute(then)  # a schema of that name alone is not the room either


# --- the transaction's fate ---------------------------------------------------------------------


@pytest.mark.invariant("I8")
async def test_an_event_is_there_at_the_commit_and_not_before_and_so_is_its_wake_up(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    heard: list[str] = []
    async with connected(database.gateway_dsn) as listener:
        names = [await OutboxRepository(listener).channel(tenant) for tenant in (TENANT, None)]
        for name in names:
            await listener.add_listener(name, lambda _, __, channel, ___: heard.append(channel))

        transaction = gateway.transaction()
        await transaction.start()
        await Outbox.enqueue(gateway, KIND, 1, tenant=TENANT)
        await transaction.rollback()
        async with gateway.transaction():
            savepoint = gateway.transaction()
            await savepoint.start()
            await Outbox.enqueue(gateway, KIND, 2, tenant=TENANT)
            await savepoint.rollback()
            await Outbox.enqueue(gateway, KIND, 3, tenant=TENANT, notify=False)
        await listener.fetchval("select 1")
        assert heard == []
        assert await admin.fetchval(f"select array_agg(payload) from {OUTBOX}") == ["3"]

        async with gateway.transaction():
            await Outbox.enqueue(gateway, KIND, 4, tenant=TENANT)
            await Outbox.enqueue(gateway, KIND, 5, tenant=TENANT)
            assert await admin.fetchval(_COUNT) == 1
        await eventually(lambda: len(heard) == 2)
        assert sorted(heard) == sorted(names)
    assert await admin.fetchval(_COUNT) == 3


@pytest.mark.invariant("I8")
async def test_commit_then_drain_brings_it_to_its_sink_with_all_that_was_written(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    payload = {"order": 7, "total": "4.20", "lines": [None, True, -1.5, 2**70], "ö": "☃"}
    async with gateway.transaction():
        event_id = await Outbox.enqueue(gateway, KIND, payload, tenant=TENANT, key="customer-1")
    sink = Recorder()
    async with outbox(database, sink) as drainer:
        report = await drainer.drain()
    assert (report.claimed, report.delivered) == (1, 1)
    (event,) = sink.events
    assert (event.event_id, event.tenant_id, event.kind, event.key, event.payload, event.attempts) == (
        event_id, TENANT, KIND, "customer-1", payload, 0,
    )  # fmt: skip
    assert await admin.fetchval(_COUNT) == 0


@pytest.mark.invariant("I8")
async def test_outside_a_transaction_nothing_is_sent(gateway: Connection, admin: Connection) -> None:
    sent: list[str] = []
    gateway.add_query_logger(lambda record: sent.append(record.query))
    with pytest.raises(TransactionRequiredError) as raised:
        await Outbox.enqueue(gateway, KIND, 1, tenant=TENANT)
    assert raised.value.code == "S2R-TRANSACTION-REQUIRED"
    with pytest.raises(TransactionRequiredError):
        await Outbox.enqueue_many(gateway, [], tenant=TENANT)
    await gateway.execute("begin")  # by hand counts too
    await Outbox.enqueue(gateway, KIND, 1, tenant=TENANT)
    await gateway.execute("commit")
    await eventually(lambda: len(sent) == 3)
    assert [text.split("(")[0] for text in sent] == ["begin", "select relay.outbox_enqueue", "commit"]


async def test_a_transaction_that_is_read_only_is_none_to_write_in(gateway: Connection) -> None:
    with pytest.raises(TransactionRequiredError, match="read only"):
        async with gateway.transaction(readonly=True):
            await Outbox.enqueue(gateway, KIND, 1, tenant=TENANT)


# --- somebody else's connection -----------------------------------------------------------------


@pytest.mark.case("C40")
@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read", "serializable"])
@pytest.mark.kind("somebody else's connection and codecs")
async def test_whatever_connection_it_is_given_the_event_is_stored_and_the_connection_is_as_it_was(
    database: TestDatabase, admin: Connection, isolation: Any
) -> None:
    async with connected(database.gateway_dsn, statement_cache_size=0) as conn:
        for name in ("json", "jsonb"):
            await conn.set_type_codec(name, schema="pg_catalog", encoder=lambda _: "broken", decoder=lambda _: "broken")
        await conn.set_type_codec(
            "uuid", schema="pg_catalog", encoder=lambda _: "broken", decoder=lambda _: "broken", format="text"
        )
        await conn.execute(
            """
            create function pg_temp.decode(text, text) returns bytea language sql as $$ select ''::bytea $$;
            create function pg_temp.convert_from(bytea, name) returns text language sql as $$ select 'planted' $$;
            create domain pg_temp.jsonb as text; create domain pg_temp.uuid as text;
            create domain pg_temp.interval as text;
            set search_path = pg_temp, pg_catalog;
            set standard_conforming_strings = off; set escape_string_warning = off; set bytea_output = 'escape';
            set datestyle = 'SQL, DMY'; set intervalstyle = 'iso_8601'; set timezone = 'Asia/Kolkata';
            set plan_cache_mode = force_custom_plan; set enable_indexscan = off; set app.mine = 'kept';
            """
        )
        await conn.execute("do 'begin end'")  # PL/pgSQL has settings of its own, from its first use on
        before = await conn.fetchval(_SETTINGS)
        text = "quote ' backslash \\ dollar $$ \\' snow ☃ \U0001f600"
        async with conn.transaction(isolation=isolation):
            await Outbox.enqueue(conn, text, {text: text}, tenant=TENANT, key=text, delay=0.5)
            savepoint = conn.transaction()
            await savepoint.start()
            await Outbox.enqueue_many(conn, [OutboxMessage(text, [text]), OutboxMessage(text, 1, text)], tenant=TENANT)
            await savepoint.commit()
            assert await conn.fetchval("select coalesce(current_setting('app.tenant_id', true), '')") == ""
        after = await conn.fetchval(_SETTINGS)
        assert [s for s in after if s not in before] in ([], ["app.tenant_id="])
    rows = await admin.fetch(
        f"select kind, payload, key, available_at - created_at as delay from {OUTBOX} order by seq"
    )
    assert {row["kind"] for row in rows} == {text}
    assert [json.loads(row["payload"]) for row in rows] == [{text: text}, [text], 1]
    assert [row["key"] for row in rows] == [text, None, text]
    assert rows[0]["delay"].total_seconds() == 0.5


@pytest.mark.kind("somebody else's connection and codecs")
async def test_a_pools_connection_and_a_tenant_bound_on_it_will_do(database: TestDatabase, admin: Connection) -> None:
    async with (
        asyncpg.create_pool(database.gateway_dsn, min_size=1, max_size=1) as pool,
        pool.acquire() as conn,
        conn.transaction(),
    ):
        await conn.execute("set local app.tenant_id = 'acme'")
        await Outbox.enqueue(conn, KIND, 1)
        await Outbox.enqueue(conn, KIND, 1, tenant="acme")
        assert await conn.fetchval("select current_setting('app.tenant_id')") == "acme"
    assert await admin.fetchval(f"select array_agg(distinct tenant_id) from {OUTBOX}") == ["acme"]


@pytest.mark.case("C39")
@pytest.mark.invariant("I4")
async def test_without_a_tenant_with_another_than_the_bound_one_or_a_foreign_one_nothing_is_written(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    async def attempt(conn: Connection, tenant: str | None, bound: str | None = None) -> None:
        async with conn.transaction():
            if bound is not None:
                await conn.execute(f"set local app.tenant_id = '{bound}'")
            await Outbox.enqueue(conn, KIND, 1, tenant=tenant)

    with pytest.raises(TenancyUnboundError):
        await attempt(gateway, None)
    with pytest.raises(TenancyUnboundError):
        await attempt(gateway, None, "")
    with pytest.raises(TenancyUnboundError):
        await attempt(gateway, "")
    with pytest.raises(TenancyMismatchError):
        await attempt(gateway, "acme", "globex")
    with pytest.raises(TenancyDeniedError):
        await attempt(worker, "acme")
    assert await admin.fetchval(_COUNT) == 0


# --- values -------------------------------------------------------------------------------------


@pytest.mark.case("C34")
@pytest.mark.parametrize(
    "payload",
    ["\0", {"\0": 1}, ["a\0b"], "\\\0", "\ud800", {"a": "\udc00"}, float("nan"), [float("-inf")], {1: 2}, b"bytes",
     object(), [2**64, "\0"], 10**5000, "x" * 1_048_575],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
async def test_what_postgresql_cannot_store_is_refused_before_any_sql(gateway: Connection, payload: Any) -> None:
    async with gateway.transaction():
        with pytest.raises(InvalidPayloadError):
            await Outbox.enqueue(gateway, KIND, payload, tenant=TENANT)
        with pytest.raises(InvalidPayloadError):
            await Outbox.enqueue_many(gateway, [OutboxMessage(KIND, 1), OutboxMessage(KIND, payload)], tenant=TENANT)
        assert await gateway.fetchval("select 1") == 1, "the transaction is whole"


@pytest.mark.case("C34")
@pytest.mark.parametrize(
    "payload",
    [
        None,
        "",
        0,
        -0.0,
        1e18,
        1.5e-300,
        2**63,
        -(2**200),
        "\\u0000",
        "\\\\u0000",
        '"',
        [],
        {},
        {"": {}},
        "x" * 1_000_000,
        [[[]]],
    ],
    ids=lambda value: type(value).__name__,
)
async def test_any_other_json_value_comes_back_as_it_went(gateway: Connection, payload: Any) -> None:
    await write(gateway, payload)
    (event,) = await take(gateway)
    assert event.payload == payload


async def test_names_delays_and_messages_are_checked_before_any_sql(gateway: Connection) -> None:
    async with gateway.transaction():
        for kind, key in (("", None), ("\0", None), ("x" * 201, None), (KIND, ""), (KIND, "\ud800"), (KIND, "ü" * 101)):
            with pytest.raises(InvalidNameError):
                await Outbox.enqueue(gateway, kind, 1, tenant=TENANT, key=key)
        for delay in (-1, float("nan"), float("inf"), 1e12, "1"):
            with pytest.raises(InvalidDeadlineError):
                await Outbox.enqueue(gateway, KIND, 1, tenant=TENANT, delay=delay)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError):
            await Outbox.enqueue_many(gateway, [(KIND, 1)], tenant=TENANT)  # type: ignore[list-item]
        assert await gateway.fetchval("select 1") == 1


@pytest.mark.case("C08")
async def test_many_events_of_any_size_keep_their_order_and_their_ids(admin: Connection, gateway: Connection) -> None:
    messages = [OutboxMessage(KIND, [n, "x" * 500_000], key=f"k{n % 3}") for n in range(20)]
    async with gateway.transaction():
        ids = await Outbox.enqueue_many(gateway, messages, tenant=TENANT)
    rows = await admin.fetch(
        f"select event_id, (payload ->> 0)::int as n, state, available_at from {OUTBOX} order by seq"
    )
    assert [row["n"] for row in rows] == list(range(20))
    assert [row["event_id"] for row in rows] == ids
    assert [row["state"] for row in rows] == ["ready"] * 3 + ["waiting"] * 17
    assert len({row["available_at"] for row in rows}) == 20, "a cursor of a claim looks at none that is as old"


# --- the one SQL call ---------------------------------------------------------------------------


async def test_the_sql_call_needs_a_kind_and_a_payload_and_makes_a_uuidv7(
    admin: Connection, gateway: Connection
) -> None:
    now = "select extract(epoch from clock_timestamp())::float8"
    before = await gateway.fetchval(now)
    event_id = await gateway.fetchval(
        """select relay.outbox_enqueue('order-placed', '{"order": 7}', p_tenant => 'acme')"""
    )
    after = await gateway.fetchval(now)
    assert isinstance(event_id, UUID)
    assert (event_id.version, event_id.variant) == (7, "specified in RFC 4122")
    row = await admin.fetchrow(f"select *, extract(epoch from created_at) as at from {OUTBOX}")
    assert row is not None
    assert row["event_id"] == event_id
    assert before <= row["at"] <= after
    assert int(before * 1000) <= event_id.int >> 80 <= after * 1000
    ids = await gateway.fetchval(
        """select relay.outbox_enqueue_many('acme', '[{"kind": "k", "payload": null}, {"kind": "k",
           "payload": 1.10, "key": "a", "delay_ms": 0.5, "id": "00000000-0000-7000-8000-000000000001"}]')"""
    )
    assert ids[1] == UUID("00000000-0000-7000-8000-000000000001")
    assert await gateway.fetchval("select relay.outbox_enqueue_many('acme', '[]')") == []
    assert await admin.fetchval(f"select payload::text from {OUTBOX} where key = 'a'") == "1.10"


@pytest.mark.parametrize(
    ("call", "state"),
    [
        ("outbox_enqueue(null, '1', p_tenant => 'acme')", "S2020"),
        ("outbox_enqueue('k', null, p_tenant => 'acme')", "S2020"),
        ("outbox_enqueue('', '1', p_tenant => 'acme')", "23514"),
        ("outbox_enqueue('k', '1', p_key => '', p_tenant => 'acme')", "23514"),
        ("outbox_enqueue('k', '1', p_delay => '-1 s', p_tenant => 'acme')", "S2021"),
        ("outbox_enqueue('k', '1', p_delay => '30 years', p_tenant => 'acme')", "S2021"),
        ("outbox_enqueue('k', '1')", "S2001"),
        ("outbox_enqueue_many('acme', '1')", "S2020"),
        ("outbox_enqueue_many('acme', null)", "S2020"),
        ("""outbox_enqueue_many('acme', '[{"kind": "k"}]')""", "S2020"),
        ("""outbox_enqueue_many('acme', '[{"payload": 1}]')""", "S2020"),
        ("""outbox_enqueue_many('acme', '[{"kind": "k", "payload": 1, "delay_ms": -1}]')""", "S2021"),
        ("""outbox_enqueue_many('acme', '[{"kind": "k", "payload": 1, "id": "x"}]')""", "22P02"),
        ("""outbox_enqueue_many('acme', '[{"kind": "k", "payload": 1}, {"kind": "", "payload": 1}]')""", "23514"),
    ],
)
async def test_the_sql_call_refuses_what_is_wrong_and_stores_nothing(
    admin: Connection, gateway: Connection, call: str, state: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as raised:
        await gateway.fetchval(f"select relay.{call}")
    assert raised.value.sqlstate == state
    assert await admin.fetchval(_COUNT) == 0


@pytest.mark.case("C43")
async def test_an_id_that_is_there_already_is_refused_within_its_tenant_only(
    admin: Connection, gateway: Connection
) -> None:
    (event_id,) = await write(gateway)
    call = "select relay.outbox_enqueue('k', '1', p_tenant => $1, p_event_id => $2)"
    with pytest.raises(asyncpg.UniqueViolationError):
        await gateway.fetchval(call, TENANT, event_id)
    assert await gateway.fetchval(call, "globex", event_id) == event_id
    assert await admin.fetchval(_COUNT) == 2
