"""Tenancy, each layer alone (C40, C41): the predicate without row security, row security without the predicate.

The two tenants hold the same job ids, relays, keys, claims and fences, so that nothing but the tenant tells them apart.
"""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository, prepare
from dispatch_core.errors import TenancyDeniedError, TenancyUnboundError
from dispatch_core.models import Completion, DispatchRequest, DispatchResult, PutBack
from dispatch_core.tenancy import DISPATCH_TENANT_SCOPE_SQL
from tests.support.databases import TestDatabase
from tests.support.high_counters import nth
from tests.support.protocol import (
    KEY,
    ME,
    QUEUE,
    RELAY,
    REQUEST,
    TENANT_TABLES,
    Connection,
    enqueue,
    logins,
)

_CLAIMED_OF_A = "tenant_id = 'a' and state = 'claimed'"

pytestmark = [pytest.mark.invariant("I4"), pytest.mark.case("C40"), pytest.mark.case("C41")]


async def _rows_of(admin: Connection, tenant: str) -> dict[str, list[str]]:
    return {
        table: [
            r[0] for r in await admin.fetch(f"select t::text from {table} t where tenant_id = $1 order by 1", tenant)
        ]
        for table in TENANT_TABLES
    }


async def _twins(gateway: Connection, worker: Connection, count: int) -> list[UUID]:
    """Store the same jobs for tenants a and b, and claim b's under the fences that a's will get."""
    rows = [prepare(DispatchRequest(RELAY, "Get", headers={"of": "?"}, max_attempts=3)) for _ in range(count)]
    for tenant in ("a", "b"):
        for prepared in rows:
            prepared.body = f"body of {tenant}".encode()
            prepared.headers = f'{{"of": "{tenant}"}}'
        await RelayDispatchRepository(gateway, tenant).enqueue_rows(rows)
        keyed = prepare(DispatchRequest("keyed", "Get", body=f"body of {tenant}", idempotency_key="the key"))
        await RelayDispatchRepository(gateway, tenant).enqueue_keyed_row(keyed)
    claimed = await RelayDispatchRepository(worker, "b").claim(RELAY, claimed_by=ME, limit=count)
    assert {job.fence for job in claimed.jobs} == {nth(1)}
    return [prepared.job_id for prepared in rows]


async def _predicate_alone(admin: Connection) -> None:
    for table in TENANT_TABLES:
        await admin.execute(
            f"alter table {table} no force row level security; alter table {table} disable row level security"
        )


async def _row_security_alone(admin: Connection) -> None:
    """Cut the tenant out of every WHERE of every function."""
    cut = 0
    for (definition,) in await admin.fetch(
        """select pg_get_functiondef(p.oid) from pg_proc p join pg_language l on l.oid = p.prolang
           where p.pronamespace = 'relay'::regnamespace and l.lanname = 'plpgsql' and p.proname not like '%bind%'
             and p.proname not in ('tenants_due', 'bound_tenant')"""
    ):
        without, first = re.subn(r"\b\w\.tenant_id = [vp]_tenant\s+and\s+", "", definition)
        without, second = re.subn(r"\s+and\s+\w\.tenant_id = [vp]_tenant\b", "", without)
        without, third = re.subn(r"\b\w\.tenant_id = v_tenant\b", "true", without)
        cut += first + second + third
        if first + second + third:
            await admin.execute(without)
    assert cut > 25, "the functions are written in another way now: look at the patterns"


async def _as_shipped(admin: Connection) -> None:
    pass


@pytest.mark.parametrize("layer", [_as_shipped, _predicate_alone, _row_security_alone], ids=lambda f: f.__name__[1:])
async def test_nothing_that_is_done_for_one_tenant_reads_or_changes_another_ones_twin(
    admin: Connection, gateway: Connection, worker: Connection, layer: Any
) -> None:
    ids = await _twins(gateway, worker, 12)
    await layer(admin)
    a, work = RelayDispatchRepository(gateway, "a"), RelayDispatchRepository(worker, "a")
    before = await _rows_of(admin, "b")

    polled = await a.poll_many(ids)
    assert {result.status for result in polled.values() if isinstance(result, DispatchResult)} == {"pending"}
    assert len(await a.list_jobs()) == 13
    assert [tuple(r) for r in await gateway.fetch("select relay_id, ready, claimed from relay.backlog('a')")] == [
        (RELAY, 12, 0),
        ("keyed", 1, 0),
    ]
    assert await _outcome(work.heartbeat(RELAY, [(None, ids[0], nth(1))], claimed_by=ME)) == ["stale"]
    assert await _outcome(work.complete(ids[0], RELAY, nth(1), ME)) == 0
    claim_id = uuid4()
    claimed = (await work.claim(RELAY, claimed_by=ME, limit=100, claim_id=claim_id)).jobs
    assert sorted(job.job_id for job in claimed) == sorted(ids)
    assert {(job.tenant_id, job.body, str(job.headers)) for job in claimed} == {("a", b"body of a", "{'of': 'a'}")}
    again = (await work.claim_again(RELAY, claimed_by=ME, claim_id=claim_id)).jobs
    assert {job.body for job in again} == {b"body of a"}
    assert await work.fetch_body(claimed[0], claimed_by=ME)
    assert claimed[0].body == b"body of a"
    assert await _rows_of(admin, "b") == before

    assert await _outcome(work.heartbeat(RELAY, [(None, job.job_id, nth(1)) for job in claimed], claimed_by=ME)) == [
        "applied"
    ] * len(claimed)
    completions = [Completion(job.job_id, nth(1), response_body=b"result of a") for job in claimed[:3]]
    assert {item.outcome for item in await work.complete_many(RELAY, completions, claimed_by=ME)} == {"applied"}
    put_backs = [PutBack(claimed[3].job_id, nth(1)), PutBack(claimed[4].job_id, nth(1), delay=60)]
    assert {item.outcome for item in await work.retry(RELAY, put_backs, claimed_by=ME)} == {"applied"}
    await work.release(RELAY, [(None, claimed[5].job_id, nth(1), True)], claimed_by=ME)
    await admin.execute(
        f"update {QUEUE} set lease_expires_at = now() - interval '1 s' where tenant_id = 'a' and state = 'claimed'"
    )
    assert len(await work.reclaim(RELAY, lease_seconds=0.001, limit=4)) == 4
    assert await a.mark_expired(claimed[6].job_id) == 1
    await admin.execute(f"update {QUEUE} set available_at = now() where tenant_id = 'a' and state = 'delayed'")
    await worker.execute("select relay.promote_due('a', $1, 10)", RELAY)
    assert await _rows_of(admin, "b") == before

    await admin.execute(
        f"update {QUEUE} set expires_at = now() - interval '1 s' where tenant_id = 'a' and state = 'claimed'"
    )
    assert len(await gateway.fetch("select * from relay.expire_late('a', null, 100)")) == 2
    await admin.execute(
        f"update {QUEUE} set expires_at = now() - interval '1 s' where tenant_id = 'a' and relay_id = $1", RELAY
    )
    late = await work.claim(RELAY, claimed_by=ME, limit=100)
    assert {(job.tenant_id, len(late.jobs)) for job in late.expired} == {("a", 0)}
    keyed = prepare(DispatchRequest("keyed", "Get", body="body of a", idempotency_key="the key"))
    assert (await a.enqueue_keyed_row(keyed))[1], "a's own key"
    for repository in (a,):
        await repository.mark_expired_many([item["job_id"] for item in await repository.list_jobs(status="pending")])
    assert await a.purge(0) == 13
    assert set(map(len, (await _rows_of(admin, "a")).values())) == {0}
    assert await _rows_of(admin, "b") == before


async def _outcome(call: Any) -> Any:
    return await call


# --- logins that row security does not bind -----------------------------------------------------


@pytest.mark.parametrize("attributes", ["superuser", "bypassrls", "nosuperuser"])
async def test_a_login_needs_its_binding_whatever_it_may_do_besides(
    database: TestDatabase, gateway: Connection, attributes: str
) -> None:
    await enqueue(gateway, tenant="a")
    await enqueue(gateway, tenant="b")
    async with logins(database) as made:
        login = await made.create(attributes=attributes)
        # Whoever may call the functions at all …
        for group in ("gateway", "worker", "operator"):
            await made._admin.execute(f'grant relay_{group} to "{login}"')
        connection = await made.connect(login)
        repository = RelayDispatchRepository(connection, "a")
        for call in (repository.list_jobs, lambda: repository.claim(RELAY, claimed_by=ME), lambda: repository.purge(0)):
            with pytest.raises(TenancyDeniedError):
                await call()
        # … is let in by its row alone, and only there.
        await made.bind(login, "gateway", "a")
        assert len(await repository.list_jobs()) == 1
        with pytest.raises(TenancyDeniedError):
            await RelayDispatchRepository(connection, "b").list_jobs()
        with pytest.raises(TenancyDeniedError):
            await repository.claim(RELAY, claimed_by=ME)
        with pytest.raises(TenancyUnboundError):
            await RelayDispatchRepository(connection).list_jobs()


@pytest.mark.parametrize("attributes", ["superuser", "bypassrls"])
async def test_the_explicit_predicate_alone_keeps_a_login_that_bypasses_row_security_to_its_tenant(
    database: TestDatabase, admin: Connection, gateway: Connection, attributes: str
) -> None:
    await enqueue(gateway, 2, tenant="a")
    await enqueue(gateway, 3, tenant="b")
    async with logins(database) as made:
        login = await made.create(attributes=attributes)
        await made.bind(login, "operator", "a")
        await admin.execute(f'grant select on {QUEUE} to "{login}"')
        connection = await made.connect(login)
        scoped = f"select distinct tenant_id from {QUEUE} where {DISPATCH_TENANT_SCOPE_SQL}"
        assert await connection.fetchval(f"select count(*) from {QUEUE}") == 5, "row security does not bind it"
        await _raises(connection, "S2001", scoped)
        for bound, expected in (("a", ["a"]), ("b", "S2003"), ("", "S2001")):
            async with connection.transaction():
                await connection.execute("select set_config('app.tenant_id', $1, true)", bound)
                if isinstance(expected, str):
                    await _raises(connection, expected, scoped)
                else:
                    assert [r[0] for r in await connection.fetch(scoped)] == expected


# --- row security, met directly -----------------------------------------------------------------


@pytest.mark.case("C39")
async def test_a_plain_login_with_raw_rights_meets_its_own_tenants_rows_and_an_error_without_one(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await _twins(gateway, worker, 3)
    async with logins(database) as made:
        login = await made.create()
        await made.bind(login, "gateway", "a")
        await admin.execute(f'grant select, insert, update, delete on {", ".join(TENANT_TABLES)} to "{login}"')
        plain = await made.connect(login)
        for table in TENANT_TABLES:
            await _raises(plain, "S2001", f"select * from {table}")
            await _raises(plain, "S2001", f"delete from {table}")
            await _raises(plain, "S2001", f"insert into {table} select * from {table}")
        before = await _rows_of(admin, "b")
        async with plain.transaction():
            await plain.execute("set local app.tenant_id = 'b'")
            for table in TENANT_TABLES:
                await _raises(plain, "S2003", f"select * from {table}")
        async with plain.transaction():
            await plain.execute("set local app.tenant_id = 'a'")
            for table in (REQUEST, QUEUE, KEY):
                assert {r[0] for r in await plain.fetch(f"select distinct tenant_id from {table}")} == {"a"}
                assert await plain.fetch(f"select from {table} where tenant_id = 'b'") == []
                assert await plain.execute(f"update {table} set created_at = now() where tenant_id = 'b'") == "UPDATE 0"
                assert await plain.execute(f"delete from {table} where tenant_id = 'b'") == "DELETE 0"
                await _raises(plain, "42501", f"update {table} set tenant_id = 'b'")
            await _raises(
                plain,
                "42501",
                f"insert into {KEY} values ('b', 'new', '', gen_random_uuid(), now())",
            )
            # The unique key of a foreign row is met by nobody but its tenant.
            await plain.execute(f"insert into {KEY} values ('a', 'free', '', gen_random_uuid(), now())")
        # A setting that was once made in a session reads as '' afterwards, which is no tenant either.
        for table in TENANT_TABLES:
            await _raises(plain, "S2001", f"select * from {table}")
        await plain.execute("set app.tenant_id = ''")
        await _raises(plain, "S2001", f"select * from {QUEUE}")
        assert await _rows_of(admin, "b") == before


async def test_force_binds_the_owner_of_the_tables_and_the_owner_of_the_functions_too(
    admin: Connection, gateway: Connection
) -> None:
    await enqueue(gateway, tenant="a")
    for role in ("relay_owner", "relay_api"):
        await admin.execute(f"set role {role}")
        await _raises(admin, "S2001", f"select * from {QUEUE}")
        await admin.execute("reset role")
    await admin.execute("set role relay_sweep")
    assert await admin.fetchval(f"select count(*) from {QUEUE}") == 1, "the one role that looks across tenants"
    await _raises(admin, "42501", f"update {QUEUE} set fence = 0")
    await _raises(admin, "42501", f"select * from {REQUEST}")
    await admin.execute("reset role")


async def test_row_security_is_enabled_and_forced_on_every_table_with_a_tenant(admin: Connection) -> None:
    rows = await admin.fetch(
        """select c.oid::regclass::text as name, c.relrowsecurity, c.relforcerowsecurity,
                  (select count(*) from pg_policy p where p.polrelid = c.oid) as policies
           from pg_class c
           where c.relnamespace = 'relay'::regnamespace and c.relkind in ('r', 'p')
             and exists (select from pg_attribute a where a.attrelid = c.oid and a.attname = 'tenant_id')"""
    )
    names = {r["name"] for r in rows}
    assert names >= set(TENANT_TABLES)
    for r in rows:
        if r["name"] == "relay.role_binding":
            continue  # who may act for whom: for relay_api and relay_sweep alone, no login has a right on it
        assert (r["relrowsecurity"], r["relforcerowsecurity"]) == (True, True), r["name"]
        assert r["policies"] >= 1, r["name"]


async def test_the_view_shows_the_bound_tenant_and_raises_without_one(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    await _twins(gateway, worker, 2)
    view = "select tenant_id, status from relay.s2r_relay_dispatch order by 1, 2"
    async with logins(database) as made:
        operator = await made.open("operator", "a")
        await _raises(operator, "S2001", view)
        async with operator.transaction():
            await operator.execute("set local app.tenant_id = 'b'")
            await _raises(operator, "S2003", view)
        async with operator.transaction():
            await operator.execute("set local app.tenant_id = 'a'")
            assert {tuple(r) for r in await operator.fetch(view)} == {("a", "pending")}
            assert await operator.fetch("select from relay.s2r_relay_dispatch where tenant_id = 'b'") == []
        for outsider in (gateway, worker):
            await _raises(outsider, "42501", view)


async def test_the_view_shows_the_whole_job_in_each_state(
    admin: Connection, gateway: Connection, worker: Connection, operator: Connection
) -> None:
    ids = await enqueue(gateway, 4, tenant="a", max_attempts=3, body=b"b")
    work = RelayDispatchRepository(worker, "a")
    jobs = (await work.claim(RELAY, claimed_by=ME, limit=3)).jobs
    await work.complete(jobs[0].job_id, RELAY, nth(1), ME, response_status=200)
    await work.retry(RELAY, [PutBack(jobs[1].job_id, nth(1), delay=60)], claimed_by=ME)
    (late,) = await enqueue(gateway, tenant="a")
    await admin.execute(f"update {QUEUE} set expires_at = now() - interval '1 s' where job_id = $1", late)
    async with operator.transaction():
        await operator.execute("set local app.tenant_id = 'a'")
        rows = await operator.fetch("select * from relay.s2r_relay_dispatch order by job_id")
    assert [(r["job_id"], r["status"], r["attempt"]) for r in rows] == [
        (ids[0], "succeeded", 1),
        (ids[1], "pending", 1),
        (ids[2], "claimed", 1),
        (ids[3], "pending", 0),
        (late, "expired", 0),
    ]
    assert {bytes(r["request_body"]) for r in rows[:4]} == {b"b"}
    assert rows[2]["claimed_by"] == ME


async def _raises(connection: Connection, sqlstate: str, query: str) -> None:
    transaction = connection.transaction()
    await transaction.start()
    try:
        with pytest.raises(asyncpg.PostgresError) as refused:
            await connection.fetch(query)
        assert refused.value.sqlstate == sqlstate, (query, refused.value)
    finally:
        await transaction.rollback()
