"""Idempotency keys: one job a key, whoever comes first, within one tenant (C25, C38, C43)."""

from __future__ import annotations

from uuid import UUID

import anyio
import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository, prepare
from dispatch_core.errors import DatabaseBusyError, IdempotencyConflictError
from dispatch_core.models import DispatchRequest
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.protocol import (
    KEY,
    QUEUE,
    RELAY,
    REQUEST,
    RESULT,
    TENANT,
    Connection,
    claim,
    connected,
    end_lease,
    release,
    retry,
    said,
    settle,
    snapshot,
    status_of,
    stored,
)


async def test_the_same_request_under_one_key_is_one_job_and_another_request_is_refused(
    admin: Connection, gateway: Connection
) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    first = await repository.enqueue(RELAY, "Get", {"a": "1", "b": "2"}, b"body", idempotency_key="k", ttl=100)
    before = await snapshot(admin)
    # The order of headers and the time limits are no part of what is asked.
    assert await repository.enqueue(RELAY, "Get", {"b": "2", "a": "1"}, b"body", idempotency_key="k", ttl=9) == first
    differing: list[tuple[str, str, dict[str, str], bytes, int]] = [
        ("crm", "Get", {"a": "1", "b": "2"}, b"body", 1),
        (RELAY, "Put", {"a": "1", "b": "2"}, b"body", 1),
        (RELAY, "Get", {"a": "1", "b": "3"}, b"body", 1),
        (RELAY, "Get", {"a": "1"}, b"body", 1),
        (RELAY, "Get", {"a": "1", "b": "2"}, b"bodY", 1),
        (RELAY, "Get", {"a": "1", "b": "2"}, b"body", 2),
    ]
    for relay, operation, headers, body, attempts in differing:
        with pytest.raises(IdempotencyConflictError) as conflict:
            await repository.enqueue(relay, operation, headers, body, max_attempts=attempts, idempotency_key="k")
        assert (conflict.value.tenant_id, conflict.value.key) == (TENANT, "k")
    assert await snapshot(admin) == before


async def test_the_key_stands_for_its_job_also_after_that_has_ended(gateway: Connection, worker: Connection) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    job_id = await repository.enqueue(RELAY, "Get", idempotency_key="k")
    (job,) = await claim(worker)
    await settle(worker, job)
    assert await repository.enqueue(RELAY, "Get", idempotency_key="k") == job_id
    assert await status_of(gateway, job_id) == "succeeded"
    assert await claim(worker) == []


async def test_a_keyed_enqueue_that_is_made_again_after_a_lost_reply_finds_its_own_job(gateway: Connection) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    prepared = prepare(DispatchRequest(RELAY, "Get", idempotency_key="k"))
    assert await repository.enqueue_keyed_row(prepared) == (prepared.job_id, False)
    assert await repository.enqueue_keyed_row(prepared) == (prepared.job_id, True)


@pytest.mark.invariant("I8")
async def test_a_rolled_back_enqueue_leaves_neither_job_nor_key(admin: Connection, gateway: Connection) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    for key in (None, "k"):
        transaction = gateway.transaction()
        await transaction.start()
        job_id = await repository.enqueue(RELAY, "Get", idempotency_key=key, notify=True)
        assert (await repository.poll_status(job_id)) is not None
        await transaction.rollback()
        assert (await repository.poll_status(job_id)) is None
    assert set((await stored(admin)).values()) == {0}
    await repository.enqueue(RELAY, "Put", idempotency_key="k")  # the key is free for another request


@pytest.mark.invariant("I8")
async def test_the_wake_up_of_an_enqueue_comes_with_its_commit_and_not_with_a_rollback(
    gateway: Connection, worker: Connection
) -> None:
    woken = anyio.Event()
    rung: list[str] = []

    def on_ring(connection: object, pid: int, channel: str, payload: object) -> None:
        rung.append(str(payload))
        woken.set()

    channel = await RelayDispatchRepository(worker, TENANT).channel("wake", RELAY)
    await worker.add_listener(channel, on_ring)
    repository = RelayDispatchRepository(gateway, TENANT)
    transaction = gateway.transaction()
    await transaction.start()
    await repository.enqueue(RELAY, "Get", notify=True)
    await transaction.rollback()
    async with gateway.transaction():
        await repository.enqueue_many([DispatchRequest(RELAY, "Get") for _ in range(50)], notify=True)
        await repository.enqueue(RELAY, "Get", notify=True)
        await worker.fetchval("select 1")
        assert rung == [], "not before the commit"
    with anyio.fail_after(5):
        await woken.wait()
    await worker.fetchval("select 1")
    assert rung == [""], "one for the transaction, and none for the one that was rolled back"


@pytest.mark.case("C25")
@pytest.mark.parametrize("way_back", ["retry", "release", "reclaim"])
async def test_a_job_whose_key_is_asked_for_again_goes_back_to_pending_like_any_other(
    admin: Connection, gateway: Connection, worker: Connection, way_back: str
) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    job_id = await repository.enqueue(RELAY, "Get", idempotency_key="k", max_attempts=2)
    (job,) = await claim(worker)
    assert await repository.enqueue(RELAY, "Get", idempotency_key="k", max_attempts=2) == job_id
    if way_back == "retry":
        assert said(await retry(worker, job)) == ("applied", "pending")
    elif way_back == "release":
        assert said(await release(worker, job, started=True)) == ("applied", "pending")
    else:
        await end_lease(admin, job_id)
        (ended,) = await RelayDispatchRepository(worker, TENANT).reclaim(RELAY, lease_seconds=0.001)
        assert ended.status == "pending"
    assert await repository.enqueue(RELAY, "Get", idempotency_key="k", max_attempts=2) == job_id
    (again,) = await claim(worker, 10)
    assert said(await settle(worker, again)) == ("applied", "succeeded")
    assert await stored(admin) == {REQUEST: 1, QUEUE: 0, RESULT: 1, KEY: 1}


# --- waiting for the other one ------------------------------------------------------------------


@pytest.mark.parametrize("ends_in", ["commit", "rollback"])
async def test_a_key_that_another_transaction_is_just_storing_is_waited_for(
    database: TestDatabase, admin: Connection, gateway: Connection, ends_in: str
) -> None:
    prepared = prepare(DispatchRequest(RELAY, "Get", idempotency_key="k"))
    told: list[tuple[UUID, bool]] = []

    async def enqueue_too() -> None:
        told.append(await RelayDispatchRepository(gateway, TENANT).enqueue_keyed_row(prepared))

    async with connected(database.gateway_dsn) as other, anyio.create_task_group() as group:
        transaction = other.transaction()
        await transaction.start()
        first = await RelayDispatchRepository(other, TENANT).enqueue(RELAY, "Get", idempotency_key="k")
        group.start_soon(enqueue_too)
        await wait_until_blocked(admin, pid_of(gateway), by=pid_of(other))
        await (transaction.commit() if ends_in == "commit" else transaction.rollback())
    assert told == [(first, True) if ends_in == "commit" else (prepared.job_id, False)]
    assert (await stored(admin))[QUEUE] == 1


@pytest.mark.parametrize("seconds", [0.0, 0.0001, 0.05, -1.0])
async def test_a_key_is_not_waited_for_longer_than_was_said_and_the_callers_own_timeout_stays(
    database: TestDatabase, admin: Connection, gateway: Connection, seconds: float
) -> None:
    """A timeout of 0 means none at all to PostgreSQL: to us it means not to wait."""
    await gateway.execute("set lock_timeout = '77s'")
    async with connected(database.gateway_dsn) as other, other.transaction():
        await RelayDispatchRepository(other, TENANT).enqueue(RELAY, "Get", idempotency_key="k")
        prepared = prepare(DispatchRequest(RELAY, "Get", idempotency_key="k"))
        with anyio.fail_after(5), pytest.raises(DatabaseBusyError) as busy:
            await RelayDispatchRepository(gateway, TENANT).enqueue_keyed_row(prepared, lock_timeout_seconds=seconds)
        assert (busy.value.sqlstate, busy.value.retryable) == ("55P03", True)
    assert await gateway.fetchval("show lock_timeout") == "77s"
    assert await RelayDispatchRepository(gateway, TENANT).enqueue_keyed_row(prepared)
    assert await gateway.fetchval("show lock_timeout") == "77s"


async def test_under_repeatable_read_a_key_stored_meanwhile_is_a_retryable_error(
    database: TestDatabase, gateway: Connection
) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    async with connected(database.gateway_dsn) as other:
        transaction = gateway.transaction(isolation="repeatable_read")
        await transaction.start()
        await gateway.fetchval("select count(*) from pg_class")
        await RelayDispatchRepository(other, TENANT).enqueue(RELAY, "Get", idempotency_key="k")
        with pytest.raises(DatabaseBusyError) as busy:
            await repository.enqueue(RELAY, "Get", idempotency_key="k")
        assert busy.value.sqlstate == "40001"
        await transaction.rollback()


# --- between tenants (C43) ----------------------------------------------------------------------


@pytest.mark.case("C43")
@pytest.mark.invariant("I4")
async def test_two_tenants_with_the_same_key_have_a_job_each_and_no_word_of_one_another(
    gateway: Connection, worker: Connection
) -> None:
    a, b = RelayDispatchRepository(gateway, "a"), RelayDispatchRepository(gateway, "b")
    of_a = await a.enqueue(RELAY, "Get", body=b"secret of a", idempotency_key="1")
    of_b = await b.enqueue(RELAY, "Get", body=b"of b", idempotency_key="1")
    assert of_a != of_b
    assert await b.enqueue(RELAY, "Get", body=b"of b", idempotency_key="1") == of_b
    with pytest.raises(IdempotencyConflictError) as conflict:
        await b.enqueue(RELAY, "Get", body=b"guess", idempotency_key="1")
    assert "secret" not in str(conflict.value)
    assert str(of_a) not in str(conflict.value)
    (job,) = await claim(worker, tenant="b")
    assert job.body == b"of b"


@pytest.mark.case("C43")
async def test_unique_keys_begin_with_the_tenant_so_that_nothing_foreign_can_be_probed(admin: Connection) -> None:
    rows = await admin.fetch(
        """select i.indexrelid::regclass::text as name, a.attname from pg_index i
           join pg_class c on c.oid = i.indrelid
           join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
           where c.relname like 's2r_relay_dispatch%' and c.relkind = 'r'"""
    )
    assert len(rows) >= 9
    assert {r["attname"] for r in rows} == {"tenant_id"}, rows
    foreign = await admin.fetchval(
        "select count(*) from pg_constraint where contype = 'f' and connamespace = 'relay'::regnamespace"
    )
    assert foreign == 0


# --- nothing is burnt (C38) ---------------------------------------------------------------------


@pytest.mark.case("C38")
async def test_no_column_of_a_tenant_table_is_narrower_than_bigint_and_nothing_counts_in_a_sequence(
    admin: Connection,
) -> None:
    narrow = await admin.fetch(
        """select c.relname, a.attname, a.atttypid::regtype::text as type, a.attidentity, a.atthasdef
           from pg_attribute a join pg_class c on c.oid = a.attrelid
           where c.relnamespace = 'relay'::regnamespace and c.relkind = 'r' and a.attnum > 0
             and (a.attidentity <> '' or a.atttypid in ('int2'::regtype, 'int4'::regtype, 'float4'::regtype))"""
    )
    assert [tuple(r) for r in narrow if r["relname"] != "schema_history"] == []
    sequences = await admin.fetchval(
        "select count(*) from pg_class where relnamespace = 'relay'::regnamespace and relkind = 'S'"
    )
    assert sequences == 0
    triggers = await admin.fetchval(
        """select count(*) from pg_trigger t join pg_class c on c.oid = t.tgrelid
           where c.relnamespace = 'relay'::regnamespace"""
    )
    assert triggers == 0


@pytest.mark.case("C38")
async def test_a_thousand_duplicate_enqueues_leave_one_row(admin: Connection, gateway: Connection) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    ids = {await repository.enqueue(RELAY, "Get", idempotency_key="k") for _ in range(1000)}
    assert len(ids) == 1
    assert await stored(admin) == {REQUEST: 1, QUEUE: 1, RESULT: 0, KEY: 1}


async def test_a_key_without_text_is_refused_and_nothing_is_stored(admin: Connection, gateway: Connection) -> None:
    call = "relay.enqueue_keyed($1, gen_random_uuid(), $2, 'Get', '{}', '', 1, '9 s', null, null, $3)"
    for key in ("", None, "k" * 201):
        with pytest.raises(asyncpg.IntegrityConstraintViolationError):
            await gateway.fetch(f"select * from {call}", TENANT, RELAY, key)
    assert set((await stored(admin)).values()) == {0}
