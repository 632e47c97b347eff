"""The tenant of a call and the tenant of its caller: one transaction, several verbs, any ending (C39, C40)."""

from __future__ import annotations

from uuid import uuid4

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import (
    TenancyDeniedError,
    TenancyMismatchError,
    TenancyUnboundError,
)
from tests.support.databases import TestDatabase
from tests.support.protocol import (
    ME,
    QUEUE,
    RELAY,
    REQUEST,
    Connection,
    claim,
    claimed_job,
    enqueue,
    logins,
    row,
    said,
    settle,
    snapshot,
    status_of,
)
from tests.support.verbs import MAY_CALL, OF_NOTHING, sqlstate, verbs

pytestmark = pytest.mark.invariant("I4")


@pytest.mark.case("C40")
async def test_two_verbs_for_two_tenants_and_then_an_unbound_one_in_one_transaction_is_unbound(
    gateway: Connection, worker: Connection
) -> None:
    for _ in range(20):
        async with gateway.transaction():
            await enqueue(gateway, tenant="a")
            await enqueue(gateway, tenant="b")
            savepoint = gateway.transaction()
            await savepoint.start()
            with pytest.raises(TenancyUnboundError):
                await RelayDispatchRepository(gateway).enqueue(RELAY, "Get")
            await savepoint.rollback()
            assert await gateway.fetchval("select coalesce(current_setting('app.tenant_id', true), '')") == ""
        async with worker.transaction():
            for tenant in ("a", "b"):
                (job,) = await claim(worker, tenant=tenant)
                await settle(worker, job)
            savepoint = worker.transaction()
            await savepoint.start()
            with pytest.raises(TenancyUnboundError):
                await RelayDispatchRepository(worker).claim(RELAY, claimed_by=ME)
            await savepoint.rollback()


@pytest.mark.case("C40")
async def test_a_tenant_other_than_the_one_that_the_caller_has_bound_is_a_mismatch(
    admin: Connection, gateway: Connection, worker: Connection, operator: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    before = await snapshot(admin)
    calls_of = verbs("b", RELAY, job.job_id)
    for connection, names in (
        (gateway, MAY_CALL["gateway"]),
        (worker, MAY_CALL["worker"]),
        (operator, MAY_CALL["operator"]),
    ):
        for scope in ("local", "session"):
            for name in names:
                transaction = connection.transaction()
                await transaction.start()
                await connection.execute(f"set {scope} app.tenant_id = 'a'")
                with pytest.raises(asyncpg.PostgresError) as mismatch:
                    await connection.fetch(f"select * from {calls_of[name][0]}", *calls_of[name][1])
                assert mismatch.value.sqlstate == "S2002", name
                await transaction.rollback()
    async with gateway.transaction():
        await gateway.execute("set local app.tenant_id = 'a'")
        with pytest.raises(TenancyMismatchError):
            await RelayDispatchRepository(gateway, "b").list_jobs()
    assert await snapshot(admin) == before


@pytest.mark.case("C40")
@pytest.mark.parametrize("bound", [None, "", "a"])
async def test_after_every_verb_the_callers_binding_is_as_it_was_also_after_an_error_in_a_savepoint(
    gateway: Connection, worker: Connection, operator: Connection, bound: str | None
) -> None:
    async def binding(connection: Connection) -> str:
        return await connection.fetchval("select coalesce(current_setting('app.tenant_id', true), '')")

    for connection, names in (
        (gateway, MAY_CALL["gateway"]),
        (worker, MAY_CALL["worker"]),
        (operator, MAY_CALL["operator"]),
    ):
        async with connection.transaction():
            if bound is not None:
                await connection.execute("select set_config('app.tenant_id', $1, true)", bound)
            for name in names:
                if name in OF_NOTHING:
                    continue  # they raise here; tests/test_durable_tenancy.py has something for them
                call, arguments = verbs("a", RELAY, uuid4())[name]
                await connection.fetch(f"select * from {call}", *arguments)
                assert await binding(connection) == (bound or ""), name
                savepoint = connection.transaction()
                await savepoint.start()
                with pytest.raises(asyncpg.PostgresError):
                    await connection.fetch(f"select 1 / count(*) filter (where false) from {call}", *arguments)
                await savepoint.rollback()
                assert await binding(connection) == (bound or ""), name
        assert await binding(connection) == ""


@pytest.mark.case("C40")
async def test_a_binding_never_outlives_its_transaction_whatever_ends_it(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Interleaved tenants on one connection, with rollbacks and errors at random; then nothing is bound."""
    for number in range(30):
        tenant = "ab"[number % 2]
        transaction = gateway.transaction()
        await transaction.start()
        (job_id,) = await enqueue(gateway, tenant=tenant)
        if number % 3 == 0:
            with pytest.raises(asyncpg.PostgresError):
                await gateway.execute("select 1 / 0")
        if number % 3 == 2:
            await transaction.commit()
            assert await status_of(gateway, job_id, tenant=tenant) == "pending"
            assert await status_of(gateway, job_id, tenant="ba"[number % 2]) is None
        else:
            await transaction.rollback()
            assert await status_of(gateway, job_id, tenant=tenant) is None
        with pytest.raises(TenancyUnboundError):
            await RelayDispatchRepository(gateway).list_jobs()


async def test_a_cancelled_statement_leaves_nothing_bound(gateway: Connection) -> None:
    transaction = gateway.transaction()
    await transaction.start()
    await gateway.execute("set local statement_timeout = '50ms'")
    with pytest.raises(asyncpg.QueryCanceledError):
        await gateway.fetch(
            "select l.*, pg_sleep(10) from relay.list_jobs('a') l right join generate_series(1, 9) on true"
        )
    await transaction.rollback()
    assert await gateway.fetchval("select coalesce(current_setting('app.tenant_id', true), '')") == ""


@pytest.mark.case("C39")
@pytest.mark.parametrize(
    "tenant", ["O'Reilly", "MiXed", "not-a-uuid", "%s", "$1", "a;b", "\\", '"', "ä", " ", "b' or 'a'='a"]
)
async def test_a_tenant_of_any_spelling_is_bound_as_it_is(
    admin: Connection, gateway: Connection, worker: Connection, tenant: str
) -> None:
    await enqueue(gateway, tenant="a")
    (job_id,) = await enqueue(gateway, tenant=tenant)
    assert [item["job_id"] for item in await RelayDispatchRepository(gateway, tenant).list_jobs()] == [job_id]
    (job,) = await claim(worker, 10, tenant=tenant)
    assert said(await settle(worker, job)) == ("applied", "succeeded")
    assert await row(admin, QUEUE, job_id) is None


@pytest.mark.case("C39")
async def test_an_empty_tenant_is_unbound_in_every_verb_and_cannot_be_stored_or_granted(
    admin: Connection, gateway: Connection, worker: Connection, operator: Connection
) -> None:
    calls_of = verbs("", RELAY, uuid4())
    for connection, names in (
        (gateway, MAY_CALL["gateway"]),
        (worker, MAY_CALL["worker"]),
        (operator, MAY_CALL["operator"]),
    ):
        for name in names:
            assert await sqlstate(connection, calls_of[name]) == "S2001", name
    with pytest.raises(asyncpg.CheckViolationError):
        await admin.fetchval("select relay.grant_binding('relay_worker_login', 'worker', '', null)")
    with pytest.raises(asyncpg.CheckViolationError):
        await admin.fetchval("select relay.grant_binding('relay_worker_login', 'worker', 'a', '')")
    with pytest.raises(asyncpg.CheckViolationError):
        await admin.execute(
            f"insert into {REQUEST} values ('', gen_random_uuid(), 'r', 'o', '{{}}', '', 1, now(), now())"
        )


async def test_a_denied_tenant_is_a_typed_error_that_names_the_login_and_not_the_tenant(database: TestDatabase) -> None:
    async with logins(database) as made:
        connection = await made.open("gateway", "a")
        with pytest.raises(TenancyDeniedError) as denied:
            await RelayDispatchRepository(connection, "b").list_jobs()
        assert made.names[0] in str(denied.value)
        assert denied.value.code == "S2R-TENANCY-DENIED"
