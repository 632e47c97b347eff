"""Two tenants by turns on one connection, at random, with one of the two layers gone (C39, C40); and logins (C41, C43).

A property of every room at once: whatever is done for one tenant, in whatever order and with whatever ends of the
transaction around it, tells nothing of the other, and changes nothing of it.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.support.databases import TestDatabase
from tests.support.protocol import RELAY, TENANT_TABLES, Connection, connected, logins
from tests.support.tenants import World, build
from tests.support.verbs import MAY_CALL, verbs
from tests.test_tenancy_layers import _as_shipped, _predicate_alone, _row_security_alone

pytestmark = pytest.mark.invariant("I4")

LAYERS = {"as-shipped": _as_shipped, "predicate-alone": _predicate_alone, "row-security-alone": _row_security_alone}


_ALL_ROWS = " union all ".join(
    f"select '{table}' || t.ctid || ' ' || t.xmin || ' ' || t::text as row from {table} t where tenant_id = $1"
    for table in TENANT_TABLES
)


async def _rows_of(admin: Connection, tenant: str) -> list[str]:
    """All that is a tenant's, version by version."""
    return sorted(row[0] for row in await admin.fetch(_ALL_ROWS, tenant))


def _id_for(world: World, verb: str, tenant: str) -> UUID:
    """An id of what the verb is about."""
    if verb.startswith("durable_"):
        return world.durable[tenant]["running"]
    return world.events[tenant]["claimed"] if verb.startswith("outbox_") else world.jobs[tenant, "one"]["claimed"]


def _said(rows: list[asyncpg.Record]) -> str:
    """What an answer says, also where it is bytes."""
    text = repr([tuple(row) for row in rows])
    return text + "".join(bytes(v).decode("latin-1") for row in rows for v in row if isinstance(v, bytes))


@pytest.mark.case("C40")
@pytest.mark.case("C43")
@pytest.mark.parametrize("layer", LAYERS)
async def test_whatever_two_tenants_do_by_turns_on_one_connection_neither_reads_or_changes_anything_of_the_other(
    database: TestDatabase, admin: Connection, seed: int, is_long: bool, layer: str
) -> None:
    """Plain logins; every verb with ids of both tenants; statements, commits, rollbacks, savepoints, errors, resets."""
    chance = random.Random(f"{seed} {layer}")
    async with connected(database.gateway_dsn) as gateway, connected(database.worker_dsn) as worker:
        world = await build(admin, gateway, worker)
        await LAYERS[layer](admin)
        ids = {tenant: sorted(world.ids(tenant=tenant)) for tenant in ("a", "b")}
        called = 0
        for _ in range(400 if is_long else 25):
            connection, kind = chance.choice([(gateway, "gateway"), (worker, "worker")])
            one, other = chance.sample(["a", "b"], 2)
            before = await _rows_of(admin, other)
            how = chance.choice(["statement", "commit", "rollback", "savepoint", "bound"])
            async with _around(connection, how, one):
                for _ in range(chance.randint(1, 3)):
                    job_id = chance.choice(ids[one] + ids[other])
                    relay = chance.choice([None, "one", "two", RELAY])
                    name = chance.choice(MAY_CALL[kind])
                    call, arguments = verbs(None if how == "bound" else one, relay, job_id)[name]
                    if how == "bound" and any(isinstance(given, list) and None in given for given in arguments):
                        call, arguments = verbs(one, relay, job_id)[name]
                    savepoint = connection.transaction()
                    await savepoint.start()
                    try:
                        said = _said(await connection.fetch(f"select * from {call}", *arguments))
                    except asyncpg.PostgresError as error:
                        said = repr(error) + repr(getattr(error, "detail", ""))
                        await savepoint.rollback()
                    else:
                        await savepoint.commit()
                    called += 1
                    assert f"mark-{other}-" not in said, (name, said)
                    foreign = [one_id for one_id in ids[other] if one_id not in arguments and str(one_id) in said]
                    assert foreign in ([], [job_id]), (name, foreign)
            assert await _rows_of(admin, other) == before, (how, one)
            assert await connection.fetchval("select coalesce(current_setting('app.tenant_id', true), '')") == ""
        assert called > 25


@contextlib.asynccontextmanager
async def _around(connection: Connection, how: str, tenant: str) -> AsyncIterator[None]:
    """What a caller may have around his calls."""
    if how == "statement":
        yield
        return
    transaction = connection.transaction()
    await transaction.start()
    if how == "bound":
        await connection.execute("select set_config('app.tenant_id', $1, true)", tenant)
    if how == "savepoint":
        inner = connection.transaction()
        await inner.start()
        yield
        with contextlib.suppress(asyncpg.PostgresError):
            await connection.execute("select 1 / 0")
        await inner.rollback()
        await transaction.commit()
        return
    yield
    await (transaction.rollback() if how == "rollback" else transaction.commit())


@pytest.mark.case("C40")
async def test_a_session_that_binds_a_tenant_and_is_not_reset_shows_the_next_user_nothing_but_an_error(
    database: TestDatabase, admin: Connection
) -> None:
    """A pool whose reset does nothing, and somebody's SET without LOCAL: the next one is told that it is another's."""
    async with connected(database.gateway_dsn) as gateway, connected(database.worker_dsn) as worker:
        await build(admin, gateway, worker)
        before = [await _rows_of(admin, tenant) for tenant in ("a", "b")]
        for connection, kind in ((gateway, "gateway"), (worker, "worker")):
            await connection.execute("set app.tenant_id = 'a'")
            for name in MAY_CALL[kind]:
                call, arguments = verbs("b", "one", uuid4())[name]
                with pytest.raises(asyncpg.PostgresError) as refused:
                    await connection.fetch(f"select * from {call}", *arguments)
                assert refused.value.sqlstate == "S2002", name
        assert [await _rows_of(admin, tenant) for tenant in ("a", "b")] == before


@pytest.mark.case("C39")
async def test_after_a_tenants_transaction_every_verb_of_every_room_without_a_tenant_raises(
    database: TestDatabase, admin: Connection
) -> None:
    """The setting then reads '' and not null; and '' that is bound is no tenant either. Nothing is read or written."""
    async with connected(database.gateway_dsn) as gateway, connected(database.worker_dsn) as worker:
        await build(admin, gateway, worker)
        assert await gateway.fetchval("select current_setting('app.tenant_id', true)") == ""
        before = [await _rows_of(admin, tenant) for tenant in ("a", "b")]
        for connection, kind in ((gateway, "gateway"), (worker, "worker")):
            for bound in (None, ""):
                transaction = connection.transaction()
                await transaction.start()
                if bound is not None:
                    await connection.execute("set local app.tenant_id = ''")
                for name in MAY_CALL[kind]:
                    for tenant in (None, ""):
                        call, arguments = verbs(tenant, "one", uuid4())[name]
                        savepoint = connection.transaction()
                        await savepoint.start()
                        with pytest.raises(asyncpg.PostgresError) as refused:
                            await connection.fetch(f"select * from {call}", *arguments)
                        await savepoint.rollback()
                        assert refused.value.sqlstate == "S2001", (name, tenant)
                await transaction.commit()
        assert [await _rows_of(admin, tenant) for tenant in ("a", "b")] == before


# --- C41: four roles --------------------------------------------------------------------------------------------------


@pytest.mark.case("C41")
@pytest.mark.parametrize("role", ["superuser", "owner", "bypassrls", "plain"])
async def test_a_login_of_any_power_is_kept_to_its_tenant_by_every_verb(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, role: str
) -> None:
    """Bound to one tenant, as gateway and as worker: the verbs ask for the binding, and not for what it may besides."""
    world = await build(admin, gateway, worker)
    async with logins(database) as made:
        for kind in ("gateway", "worker"):
            login = await made.create(attributes={"superuser": "superuser", "bypassrls": "bypassrls"}.get(role, ""))
            await made.bind(login, kind, "a")
            if role == "owner":
                await admin.execute(f'grant relay_owner, relay_api to "{login}"')
            connection = await made.connect(login)
            before = await _rows_of(admin, "b")
            for name in MAY_CALL[kind]:
                job_id = _id_for(world, name, "b")
                call, arguments = verbs("b", "one", job_id)[name]
                with pytest.raises(asyncpg.PostgresError) as refused:
                    await connection.fetch(f"select * from {call}", *arguments)
                assert refused.value.sqlstate == "S2003", name
                said, _ = await _try(connection, *verbs("a", "one", job_id)[name])
                assert "mark-b-" not in said, name
            assert await _rows_of(admin, "b") == before


async def _try(connection: Connection, call: str, arguments: list[Any]) -> tuple[str, str]:
    """Make a call, and take back what it did; return what it said, as bytes are read, and in any order."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        rows = await connection.fetch(f"select * from {call}", *arguments)
        return _said(rows), repr(sorted(map(str, (tuple(row) for row in rows))))
    except asyncpg.PostgresError as error:
        said = repr((error.sqlstate, str(error), getattr(error, "detail", None)))
        return said, said
    finally:
        await transaction.rollback()


@pytest.mark.case("C41")
async def test_owners_read_no_row_without_a_tenant_and_migrations_and_sweeps_work_all_the_same(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """FORCE binds whoever owns the tables or the functions, in every room; what goes over tenants has its own way."""
    await build(admin, gateway, worker)
    async with logins(database) as made:
        login = await made.create()
        await admin.execute(f'grant relay_owner, relay_api to "{login}"')
        owner = await made.connect(login)
        for role in ("relay_owner", "relay_api"):
            await owner.execute(f"set role {role}")
            for table in TENANT_TABLES:
                for statement in (f"select * from {table}", f"delete from {table}"):
                    with pytest.raises(asyncpg.PostgresError) as refused:
                        await owner.fetch(statement)
                    assert refused.value.sqlstate in ("S2001", "42501"), (role, table)
        await owner.execute("set role relay_owner")
        # A migration of theirs: the shape of a table may be changed, and its rows stay as they are.
        await owner.execute(
            "alter table relay.outbox add column more bigint; alter table relay.outbox drop column more"
        )
    assert len(await worker.fetch("select * from relay.reclaim_lost('a', null, 10)")) == 2


# --- C43 --------------------------------------------------------------------------------------------------------------


@pytest.mark.case("C43")
async def test_an_id_of_another_tenant_cannot_be_told_from_one_that_is_not_there_by_any_verb_of_any_room(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Neither by what is answered nor by an error's text: each verb says the same of both."""
    world = await build(admin, gateway, worker)
    async with logins(database) as made:
        for kind in ("gateway", "worker"):
            connection = await made.open(kind, "a")
            for name in MAY_CALL[kind]:
                if name in ("enqueue", "enqueue_keyed", "outbox_enqueue", "outbox_enqueue_many", "durable_insert_job"):
                    continue  # they take an id of the caller's own
                answers = []
                for job_id in (_id_for(world, name, "b"), uuid4()):
                    _, said = await _try(connection, *verbs("a", "one", job_id)[name])
                    answers.append(_without_what_is_of_the_moment(said.replace(str(job_id), "the id")))
                assert answers[0] == answers[1], name


def _without_what_is_of_the_moment(said: str) -> str:
    said = re.sub(r"datetime\.\w+\([^)]*\)|timedelta\([^)]*\)|\d+:\d+:\d+:'?", "now", said)
    return re.sub(r"UUID\('[0-9a-f-]+'\)", "some id", said)
