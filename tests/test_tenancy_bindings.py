"""Bindings: each verb is open to a login for the tenants and relays of its rows, and for nobody else's."""

from __future__ import annotations

from uuid import uuid4

import pytest

from tests.support.databases import TestDatabase
from tests.support.protocol import (
    RELAY,
    TENANT,
    Connection,
    claimed_job,
    logins,
    snapshot,
)
from tests.support.verbs import GATEWAY_VERBS, MAY_CALL, OF_NOTHING, WITHOUT_RELAY, WORKER_VERBS, sqlstate, verbs

pytestmark = pytest.mark.invariant("I4")


async def test_each_verb_is_refused_for_every_tenant_and_relay_that_the_login_is_not_bound_to(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    own = await claimed_job(gateway, worker, tenant="a", relay="one")
    others = [
        ("a", "two", await claimed_job(gateway, worker, tenant="a", relay="two")),
        ("b", "one", await claimed_job(gateway, worker, tenant="b", relay="one")),
    ]
    async with logins(database) as made:
        bound_worker = await made.open("worker", "a", "one")
        bound_gateway = await made.open("gateway", "a")
        bound_operator = await made.open("operator", "a")
        before = await snapshot(admin)
        for tenant, relay, job in others:
            calls_of = verbs(tenant, relay, job.job_id)
            for name in MAY_CALL["worker"]:
                if tenant == "a" and name in WITHOUT_RELAY:
                    continue
                assert await sqlstate(bound_worker, calls_of[name], roll_back=False) == "S2003", (name, tenant, relay)
        calls_of = verbs("b", "one", others[1][2].job_id)
        for connection, names in (
            (bound_gateway, MAY_CALL["gateway"]),
            (bound_operator, MAY_CALL["operator"]),
        ):
            for name in names:
                assert await sqlstate(connection, calls_of[name], roll_back=False) == "S2003", name
        assert await snapshot(admin) == before
        calls_of = verbs("a", "one", own.job_id)
        for connection, names in (
            (bound_worker, MAY_CALL["worker"]),
            (bound_gateway, MAY_CALL["gateway"]),
            (bound_operator, MAY_CALL["operator"]),
        ):
            for name in names:
                assert await sqlstate(connection, calls_of[name]) == OF_NOTHING.get(name), name


async def test_a_login_without_any_binding_is_denied_by_every_verb_it_may_call(
    database: TestDatabase, admin: Connection
) -> None:
    calls_of = verbs(TENANT, RELAY, uuid4())
    async with logins(database) as made:
        for group, names in (
            ("gateway", MAY_CALL["gateway"]),
            ("worker", MAY_CALL["worker"]),
            ("operator", MAY_CALL["operator"]),
        ):
            login = await made.create()
            await admin.execute(f'grant relay_{group} to "{login}"')
            connection = await made.connect(login)
            for name in names:
                assert await sqlstate(connection, calls_of[name]) == "S2003", name


async def test_a_binding_of_one_kind_opens_no_verb_of_another_kind(database: TestDatabase, admin: Connection) -> None:
    """The group role and the row must both say so."""
    calls_of = verbs(TENANT, RELAY, uuid4())
    async with logins(database) as made:
        login = await made.create()
        await made.bind(login, "worker", TENANT)
        connection = await made.connect(login)
        for name in GATEWAY_VERBS:
            assert await sqlstate(connection, calls_of[name]) == "42501", name
        await admin.execute(f'grant relay_gateway, relay_operator to "{login}"')
        for name in GATEWAY_VERBS:
            assert await sqlstate(connection, calls_of[name]) == "S2003", name
        login = await made.create()
        await made.bind(login, "gateway", TENANT)
        await admin.execute(f'grant relay_worker to "{login}"')
        connection = await made.connect(login)
        for name in WORKER_VERBS:
            assert await sqlstate(connection, calls_of[name]) == "S2003", name


async def test_a_binding_ends_with_its_row_and_with_its_role_and_not_with_its_roles_name(
    database: TestDatabase, admin: Connection
) -> None:
    call = verbs(TENANT, RELAY, uuid4())["list_jobs"]
    async with logins(database) as made:
        login = await made.create()
        await made.bind(login, "gateway", TENANT)
        connection = await made.connect(login)
        assert await sqlstate(connection, call) is None
        await admin.execute(f'alter role "{login}" rename to "{login}_renamed"')
        assert await sqlstate(connection, call) is None, "session_user follows the rename, the binding is by oid"
        await admin.execute(f'alter role "{login}_renamed" rename to "{login}"')
        assert await admin.fetchval("select relay.revoke_binding($1, 'gateway', $2, null)", login, TENANT) == 1
        assert await sqlstate(connection, call) == "S2003"
        assert await admin.fetchval("select relay.revoke_binding($1, 'gateway', $2, null)", login, TENANT) == 0
        await made.bind(login, "gateway", TENANT)
        connection.terminate()
        await admin.execute(
            f'drop owned by "{login}"; drop role "{login}"; create role "{login}" login password \'relay\''
        )
        await admin.execute(f'grant relay_gateway to "{login}"')
        namesake = await made.connect(login)
        assert await sqlstate(namesake, call) == "S2003", "a namesake made later inherits nothing"


@pytest.mark.parametrize("name", ['Mixed "Case" login', "ünï'cödé", "select", "a.b; drop"])
async def test_a_login_with_a_tricky_name_has_its_own_binding(
    database: TestDatabase, admin: Connection, name: str
) -> None:
    async with logins(database) as made:
        quoted = await admin.fetchval("select quote_ident($1)", name)
        await admin.execute(f"create role {quoted} login password 'relay'; grant relay_gateway to {quoted}")
        try:
            await admin.fetchval("select relay.grant_binding($1, 'gateway', $2, null)", name, TENANT)
            connection = await made.connect(name)
            assert await sqlstate(connection, verbs(TENANT, RELAY, uuid4())["list_jobs"]) is None
            assert await sqlstate(connection, verbs("other", RELAY, uuid4())["list_jobs"]) == "S2003"
            connection.terminate()
        finally:
            await admin.execute(f"drop owned by {quoted}; drop role {quoted}")


async def test_the_bindings_that_a_login_can_read_are_its_own(database: TestDatabase, gateway: Connection) -> None:
    async with logins(database) as made:
        login = await made.create()
        await made.bind(login, "worker", "a", "one")
        await made.bind(login, "gateway", "b")
        connection = await made.connect(login)
        rows = await connection.fetch("select * from relay.my_bindings()")
        assert [tuple(r) for r in rows] == [("gateway", "b", None), ("worker", "a", "one")]
        assert [tuple(r) for r in await gateway.fetch("select * from relay.my_bindings()")] == [("gateway", None, None)]
