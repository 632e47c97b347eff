"""Giving work: what is stored, what is refused before any SQL, what calls share, what a caller's transaction does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import (
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    IdempotencyConflictError,
    InvalidBodyError,
    InvalidDeadlineError,
    InvalidHeadersError,
    InvalidInputError,
    InvalidNameError,
    RelayDispatchError,
    TenancyDeniedError,
    TenancyMismatchError,
    TenancyUnboundError,
)
from gateway_sdk import DispatchRequest, DispatchStatus
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually
from tests.support.gateway import Connection, PlayedRelay, open_client

LONG = "x" * 201
NUL = "a\0b"
LONE = "a\ud800"


async def listen_as_relay(conn: Connection, tenant: str, relay: str) -> list[str]:
    """Collect the payloads that ring the relay."""
    heard: list[str] = []
    channel = await RelayDispatchRepository(conn, tenant).channel("wake", relay)
    await conn.add_listener(channel, lambda _c, _p, _ch, payload: heard.append(str(payload)))
    return heard


async def count_jobs(admin: Connection) -> int:
    counts = [
        await admin.fetchval(f"select count(*) from relay.s2r_relay_dispatch_{table}")
        for table in ("request", "queue", "result", "key")
    ]
    return int(sum(counts))


# --- what is stored -----------------------------------------------------------------------------------------------


async def test_an_enqueued_job_reaches_its_relay_as_it_was_given(database: TestDatabase, worker: Connection) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue(
            "erp-emea", "GetInvoice", {"a": "1", "b": ["2", "3"]}, json={"no": 7}, ttl=30, max_attempts=3
        )
        (job,) = await PlayedRelay(worker, "acme", "erp-emea").claim()
    assert isinstance(job_id, UUID)
    assert (job.job_id, job.tenant_id, job.operation, job.attempt, job.max_attempts) == (
        job_id,
        "acme",
        "GetInvoice",
        1,
        3,
    )
    assert job.headers == {"a": "1", "b": ["2", "3"]}
    assert job.json() == {"no": 7}
    assert timedelta(seconds=29) < job.expires_at - job.created_at <= timedelta(seconds=30)


@pytest.mark.parametrize("body", [b"bytes", bytearray(b"array"), memoryview(b"view"), "text \u00e9", None, b""])
async def test_every_kind_of_body_arrives_as_bytes(database: TestDatabase, worker: Connection, body: Any) -> None:
    async with open_client(database.gateway_dsn) as client:
        await client.tenant("acme").enqueue("erp", "Op", body=body)
    (job,) = await PlayedRelay(worker, "acme", "erp").claim()
    assert job.body == (b"" if body is None else body.encode() if isinstance(body, str) else bytes(body))


async def test_expires_at_and_delay_are_kept(database: TestDatabase, worker: Connection) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op", expires_at=until, delay=600)
        result = await acme.poll_status(job_id)
    assert result is not None
    assert (result.status, result.expires_at) == (DispatchStatus.PENDING, until)
    assert await PlayedRelay(worker, "acme", "erp").claim() == []


@pytest.mark.case("C22")
async def test_a_deadline_counts_from_the_write_and_not_from_the_start_of_the_transaction(
    database: TestDatabase, gateway: Connection
) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        async with gateway.transaction():
            await gateway.execute("select pg_sleep(0.5)")
            job_id = await acme.enqueue("erp", "Op", ttl=30, conn=gateway)
            started = await gateway.fetchval("select now()")
        result = await acme.poll_status(job_id)
    assert result is not None
    assert result.expires_at >= started + timedelta(seconds=30.5)


# --- sharing ------------------------------------------------------------------------------------------------------


async def test_concurrent_enqueues_of_a_tenant_share_statements_and_rings(
    database: TestDatabase, admin: Connection, worker: Connection
) -> None:
    heard = await listen_as_relay(worker, "acme", "erp")
    proof = await listen_as_relay(worker, "acme", "other")
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        ids = await asyncio.gather(*(acme.enqueue("erp", "Op", body=str(n)) for n in range(1000)))
        health = client.health()
        # Rings go one after the other, so behind this one there are none but that of a pause between rings.
        await eventually(lambda: heard)
        await acme.enqueue("other", "Op")
        await eventually(lambda: proof)
    assert len(set(ids)) == 1000
    assert health.enqueued == 1000
    assert health.enqueue_statements <= 10
    assert len(heard) <= health.enqueue_statements
    assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue") == 1001


async def test_a_bad_row_hurts_only_its_own_caller(database: TestDatabase) -> None:
    past = datetime(2001, 1, 1, tzinfo=UTC)
    async with open_client(database.gateway_dsn, enqueue_concurrency=1) as client:
        acme = client.tenant("acme")
        outcomes = await asyncio.gather(
            *(acme.enqueue("erp", "Op", expires_at=past if n == 13 else None) for n in range(50)),
            return_exceptions=True,
        )
        stored = await acme.poll_many([item for item in outcomes if isinstance(item, UUID)])
    assert [n for n, item in enumerate(outcomes) if not isinstance(item, UUID)] == [13]
    assert isinstance(outcomes[13], InvalidDeadlineError)
    assert len(stored) == 49


async def test_calls_that_fail_together_each_get_an_error_of_their_own(
    database: TestDatabase, admin: Connection
) -> None:
    await admin.execute(
        "create function public.refuse() returns trigger language plpgsql as"
        " $$begin raise exception 'broken' using errcode = 'XX000'; end$$"
    )
    await admin.execute(
        "create trigger refuse before insert on relay.s2r_relay_dispatch_request"
        " for each statement execute function public.refuse()"
    )
    async with open_client(database.gateway_dsn, enqueue_concurrency=1) as client:
        acme = client.tenant("acme")
        errors = await asyncio.gather(
            *(acme.call("erp", "Op", timeout=5) for _ in range(4)),
            *(acme.enqueue("erp", "Op") for _ in range(4)),
            return_exceptions=True,
        )
        statements = client._runtime.lanes.enqueue["acme"].flushes  # type: ignore[union-attr]
    assert statements == 1
    assert all(isinstance(error, DatabaseError) and error.sqlstate == "XX000" for error in errors)
    assert len({id(error) for error in errors}) == 8
    assert len({error.job_id for error in errors if isinstance(error, DatabaseError)} - {None}) == 8


async def test_a_cancelled_enqueue_takes_no_other_along(database: TestDatabase, admin: Connection) -> None:
    async with open_client(database.gateway_dsn, pool_max_size=1) as client:
        acme = client.tenant("acme")
        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()

            async def to_be_cancelled() -> None:
                with scope:
                    await acme.enqueue("erp", "Op")

            group.start_soon(to_be_cancelled)
            for _ in range(20):
                group.start_soon(acme.enqueue, "erp", "Op")
            await anyio.lowlevel.checkpoint()
            scope.cancel()
        stored = await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue")
    assert stored in (20, 21)


async def test_a_tenant_whose_statement_waits_for_a_lock_holds_up_no_other(
    database: TestDatabase, admin: Connection
) -> None:
    async with open_client(database.gateway_dsn) as client:
        slow = client.tenant("slow")
        job_id = await slow.enqueue("erp", "Op")
        lock = admin.transaction()
        await lock.start()
        await admin.execute("select from relay.s2r_relay_dispatch_queue where job_id = $1 for update", job_id)
        withdrawn: list[int] = []
        async with anyio.create_task_group() as group:

            async def withdraw() -> None:
                withdrawn.append(await slow.mark_expired(job_id))

            group.start_soon(withdraw)
            await eventually(
                lambda: admin.fetchval(
                    "select exists (select from pg_stat_activity where pg_backend_pid() = any (pg_blocking_pids(pid)))"
                )
            )
            await client.tenant("quick").enqueue("erp", "Op")
            await slow.enqueue("erp", "Op")
            assert (await slow.poll_status(job_id)) is not None
            assert withdrawn == []
            await lock.rollback()
    assert withdrawn == [1]


async def test_lanes_of_idle_tenants_are_dropped(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn, tenant_idle_seconds=0.05) as client:
        await asyncio.gather(*(client.tenant(f"t{n}").enqueue("erp", "Op") for n in range(300)))
        lanes = client._runtime.lanes  # type: ignore[union-attr]
        await eventually(lambda: len(lanes.enqueue) == 0)
        # And come back when they are needed.
        await client.tenant("t1").enqueue("erp", "Op")


async def test_enqueue_many_stores_all_in_order_or_none(
    database: TestDatabase, admin: Connection, worker: Connection
) -> None:
    heard = await listen_as_relay(worker, "acme", "erp")
    async with open_client(database.gateway_dsn, enqueue_batch_bytes=100_000) as client:
        acme = client.tenant("acme")
        # 300 bodies of 10 kB are about thirty statements in one transaction.
        ids = await acme.enqueue_many(DispatchRequest("erp", "Op", body=bytes(10_000)) for _ in range(300))
        assert len(await acme.poll_many(ids)) == 300
        await eventually(lambda: heard == [""])
        before = await count_jobs(admin)
        late = [DispatchRequest("erp", "Op", body=bytes(10_000)) for _ in range(300)]
        late[290].expires_at = datetime(2001, 1, 1, tzinfo=UTC)
        with pytest.raises(InvalidDeadlineError):
            await acme.enqueue_many(late)
        with pytest.raises(InvalidInputError):
            await acme.enqueue_many([DispatchRequest("erp", "Op", idempotency_key="k")])
        assert await acme.enqueue_many([]) == []
        assert await count_jobs(admin) == before
    jobs = await PlayedRelay(worker, "acme", "erp").claim(300)
    assert [job.job_id for job in jobs] == ids


@pytest.mark.case("C08")
async def test_large_bodies_names_and_bursts_are_no_matter_of_the_payload(
    database: TestDatabase, worker: Connection, gateway: Connection
) -> None:
    heard = await listen_as_relay(worker, "acme", "erp")
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        big = await acme.enqueue("erp", "\u6c34" * 66, body=bytes(1024 * 1024))
        async with gateway.transaction():
            ids = [big, *await acme.enqueue_many([DispatchRequest("erp", "Op")] * 3000, conn=gateway)]
        await eventually(lambda: len(heard) >= 2)
        assert len(heard) <= 4
        assert set(heard) == {""}
        relay = PlayedRelay(worker, "acme", "erp")
        async with anyio.create_task_group() as group:

            async def work() -> None:
                while await relay.work(1000):
                    pass

            group.start_soon(work)
            with anyio.fail_after(30):
                results = [result async for result in acme.as_completed(ids)]
    assert {result.status for result in results} == {DispatchStatus.SUCCEEDED}
    assert len(results) == 3001


# --- bad input ----------------------------------------------------------------------------------------------------

BAD: list[tuple[str, type[RelayDispatchError], dict[str, Any]]] = [
    ("relay empty", InvalidNameError, {"relay_id": ""}),
    ("relay too long", InvalidNameError, {"relay_id": LONG}),
    ("relay with NUL", InvalidNameError, {"relay_id": NUL}),
    ("relay with a lone surrogate", InvalidNameError, {"relay_id": LONE}),
    ("relay not str", InvalidNameError, {"relay_id": 7}),
    ("operation empty", InvalidNameError, {"operation": ""}),
    ("operation too long in bytes", InvalidNameError, {"operation": "\u00e9" * 101}),
    ("operation with NUL", InvalidNameError, {"operation": NUL}),
    ("operation with a lone surrogate", InvalidNameError, {"operation": LONE}),
    ("key empty", InvalidNameError, {"idempotency_key": ""}),
    ("key too long", InvalidNameError, {"idempotency_key": LONG}),
    ("key with NUL", InvalidNameError, {"idempotency_key": NUL}),
    ("key with a lone surrogate", InvalidNameError, {"idempotency_key": LONE}),
    ("headers no map", InvalidHeadersError, {"headers": [("a", "b")]}),
    ("headers a str", InvalidHeadersError, {"headers": "a: b"}),
    ("header key no str", InvalidHeadersError, {"headers": {1: "b"}}),
    ("header value no str", InvalidHeadersError, {"headers": {"a": 1}}),
    ("header value bytes", InvalidHeadersError, {"headers": {"a": b"b"}}),
    ("header list of other things", InvalidHeadersError, {"headers": {"a": ["b", None]}}),
    ("header with NUL", InvalidHeadersError, {"headers": {"a": NUL}}),
    ("header key with NUL", InvalidHeadersError, {"headers": {NUL: "a"}}),
    ("header with a lone surrogate", InvalidHeadersError, {"headers": {"a": [LONE]}}),
    ("body too large", InvalidBodyError, {"body": bytes(1025)}),
    ("body too large as text", InvalidBodyError, {"body": "\u00e9" * 513}),
    ("json too large", InvalidBodyError, {"json": "x" * 1024}),
    ("body of a wrong type", InvalidBodyError, {"body": {"a": 1}}),
    ("body with a lone surrogate", InvalidBodyError, {"body": LONE}),
    ("body and json", InvalidBodyError, {"body": b"", "json": 1}),
    ("NaN", InvalidBodyError, {"json": {"a": [math.nan]}}),
    ("infinity", InvalidBodyError, {"json": math.inf}),
    ("json of a wrong type", InvalidBodyError, {"json": {"a": object()}}),
    ("ttl zero", InvalidDeadlineError, {"ttl": 0}),
    ("ttl negative", InvalidDeadlineError, {"ttl": -1}),
    ("ttl infinite", InvalidDeadlineError, {"ttl": math.inf}),
    ("ttl NaN", InvalidDeadlineError, {"ttl": math.nan}),
    ("ttl above the limit", InvalidDeadlineError, {"ttl": 7 * 86400 + 1}),
    ("ttl a bool", InvalidDeadlineError, {"ttl": True}),
    ("ttl a str", InvalidDeadlineError, {"ttl": "30"}),
    ("ttl negative timedelta", InvalidDeadlineError, {"ttl": timedelta(seconds=-1)}),
    ("expires_at naive", InvalidDeadlineError, {"expires_at": datetime(2100, 1, 1)}),  # noqa: DTZ001
    ("expires_at no datetime", InvalidDeadlineError, {"expires_at": "2100-01-01"}),
    ("expires_at too far", InvalidDeadlineError, {"expires_at": datetime(2100, 1, 1, tzinfo=UTC)}),
    ("ttl and expires_at", InvalidDeadlineError, {"ttl": 30, "expires_at": datetime.now(UTC) + timedelta(hours=1)}),
    ("delay negative", InvalidDeadlineError, {"delay": -0.1}),
    ("delay infinite", InvalidDeadlineError, {"delay": math.inf}),
    ("max_attempts zero", InvalidInputError, {"max_attempts": 0}),
    ("max_attempts negative", InvalidInputError, {"max_attempts": -1}),
    ("max_attempts a float", InvalidInputError, {"max_attempts": 1.5}),
    ("max_attempts a bool", InvalidInputError, {"max_attempts": True}),
]


async def test_bad_input_is_a_typed_error_before_any_sql_and_stores_nothing(
    database: TestDatabase, admin: Connection
) -> None:
    pool = await asyncpg.create_pool(database.gateway_dsn, min_size=1, max_size=1)
    async with open_client(None, pool=pool, max_body_bytes=1024, write_timeout_seconds=0.2) as client:
        acme = client.tenant("acme")
        # From here on every statement fails, so whatever is a typed error of input was found without one.
        await pool.close()
        with pytest.raises(DatabaseUnavailableError):
            await acme.enqueue("erp", "Op")
        for name, error, bad in BAD:
            arguments = {"relay_id": "erp", "operation": "Op", **bad}
            calls: list[Callable[[dict[str, Any]], Any]] = [
                lambda given: acme.enqueue(**given),
                lambda given: acme.enqueue_many([DispatchRequest(**given)]),
                lambda given: acme.call(**given),
            ]
            for call in calls:
                with pytest.raises(error) as caught:
                    await call(arguments)
                assert not caught.value.retryable, name
        no_names: list[Any] = ["x" * 201, NUL, LONE, 7]
        for tenant in no_names:
            with pytest.raises(InvalidNameError):
                client.tenant(tenant)
        nothing: list[Any] = ["", None]
        for tenant in nothing:
            with pytest.raises(TenancyUnboundError):
                client.tenant(tenant)
        bad_timeouts: list[Any] = [-1, math.nan, "5", True]
        for timeout in bad_timeouts:
            with pytest.raises(InvalidDeadlineError):
                await acme.wait(UUID(int=1), timeout=timeout)
            with pytest.raises(InvalidDeadlineError):
                await acme.call("erp", "Op", timeout=timeout)
        with pytest.raises(InvalidDeadlineError):
            await acme.call("erp", "Op", timeout=0)
        bad_ids: list[Any] = ["no uuid", 7, None, b"0" * 16]
        verbs: list[Callable[[Any], Any]] = [acme.wait, acme.poll_status, acme.mark_expired]
        for bad_id in bad_ids:
            for verb in verbs:
                with pytest.raises(InvalidInputError):
                    await verb(bad_id)
            with pytest.raises(InvalidInputError):
                await acme.poll_many([bad_id])
    assert await count_jobs(admin) == 0


# --- the caller's transaction -------------------------------------------------------------------------------------


@pytest.mark.invariant("I8")
async def test_a_rolled_back_enqueue_is_invisible_and_so_is_its_wake_up(
    database: TestDatabase, gateway: Connection, worker: Connection, admin: Connection
) -> None:
    heard = await listen_as_relay(worker, "acme", "erp")
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        transaction = gateway.transaction()
        await transaction.start()
        lost = await acme.enqueue("erp", "Op", conn=gateway)
        keyed = await acme.enqueue("erp", "Op", idempotency_key="k", conn=gateway)
        many = await acme.enqueue_many([DispatchRequest("erp", "Op")] * 3, conn=gateway)
        await transaction.rollback()
        assert await acme.poll_many([lost, keyed, *many]) == {}
        assert await count_jobs(admin) == 0
        # The next ring is the first one that is heard.
        async with gateway.transaction():
            kept = await acme.enqueue("erp", "Op", conn=gateway)
            assert await acme.poll_status(kept) is None
            assert heard == []
        await eventually(lambda: heard == [""])
        (job,) = await PlayedRelay(worker, "acme", "erp").claim()
        assert job.job_id == kept


async def test_notify_false_rings_nobody(database: TestDatabase, gateway: Connection, worker: Connection) -> None:
    heard = await listen_as_relay(worker, "acme", "erp")
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        async with gateway.transaction():
            await acme.enqueue("erp", "Op", conn=gateway, notify=False)
        await acme.enqueue("erp", "Op", notify=False)
        await acme.enqueue("erp", "Op", notify=False, idempotency_key="k")
        await acme.enqueue_many([DispatchRequest("erp", "Op")], notify=False)
        # A ring for another relay of ours proves that earlier ones would have been heard.
        proof = await listen_as_relay(worker, "acme", "other")
        await acme.enqueue("other", "Op")
        await eventually(lambda: proof)
    assert heard == []
    assert len(await PlayedRelay(worker, "acme", "erp").claim()) == 4


@pytest.mark.case("C40")
async def test_a_callers_transaction_keeps_the_tenant_it_has_bound_itself(
    database: TestDatabase, gateway: Connection
) -> None:
    async with open_client(database.gateway_dsn) as client:
        async with gateway.transaction():
            await gateway.execute("set local app.tenant_id = 'acme'")
            await client.tenant("acme").enqueue("erp", "Op", conn=gateway)
            assert await gateway.fetchval("select current_setting('app.tenant_id')") == "acme"
        transaction = gateway.transaction()
        await transaction.start()
        await gateway.execute("set local app.tenant_id = 'acme'")
        with pytest.raises(TenancyMismatchError):
            await client.tenant("globex").enqueue("erp", "Op", conn=gateway)
        await transaction.rollback()
        async with gateway.transaction():
            await client.tenant("acme").enqueue("erp", "Op", conn=gateway)
            await client.tenant("globex").enqueue("erp", "Op", conn=gateway)
            assert await gateway.fetchval("select coalesce(current_setting('app.tenant_id', true), '')") == ""


async def test_a_login_without_a_binding_is_denied_on_every_verb(database: TestDatabase, worker: Connection) -> None:
    from dispatch_core.dev.logins import GATEWAY_LOGIN
    from dispatch_core.migrate import grant, revoke

    await revoke(database.admin_dsn, GATEWAY_LOGIN, role="gateway", tenant=None, relay=None)
    await grant(database.admin_dsn, GATEWAY_LOGIN, role="gateway", tenant="acme", relay=None)
    async with open_client(database.gateway_dsn) as client:
        job_id = await client.tenant("acme").enqueue("erp", "Op")
        globex = client.tenant("globex")
        verbs: list[Callable[[], Any]] = [
            lambda: globex.enqueue("erp", "Op"),
            lambda: globex.enqueue("erp", "Op", idempotency_key="k"),
            lambda: globex.enqueue_many([DispatchRequest("erp", "Op")]),
            lambda: globex.call("erp", "Op", timeout=5),
            lambda: globex.poll_status(job_id),
            lambda: globex.poll_many([job_id]),
            lambda: globex.wait(job_id, timeout=5),
            lambda: globex.mark_expired(job_id),
        ]
        for verb in verbs:
            with pytest.raises(TenancyDeniedError), anyio.fail_after(HANGS):
                await verb()
        assert await client.tenant("acme").poll_status(job_id) is not None


# --- idempotency --------------------------------------------------------------------------------------------------


async def test_the_same_key_and_request_get_the_same_job(database: TestDatabase, admin: Connection) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        first = await acme.enqueue("erp", "Op", {"a": "1", "b": "2"}, b"x", idempotency_key="k", ttl=30)
        # The order of headers and the time limits are no part of a request.
        assert await acme.enqueue("erp", "Op", {"b": "2", "a": "1"}, b"x", idempotency_key="k", ttl=60) == first
        for change in ({"body": b"y"}, {"operation": "Other"}, {"relay_id": "other"}, {"headers": {"a": "1"}}):
            arguments = {"relay_id": "erp", "operation": "Op", "headers": {"a": "1", "b": "2"}, "body": b"x", **change}
            with pytest.raises(IdempotencyConflictError) as caught:
                await acme.enqueue(**arguments, idempotency_key="k")  # type: ignore[arg-type]
            assert (caught.value.tenant_id, caught.value.key) == ("acme", "k")
    assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_request") == 1


async def test_fifty_enqueues_with_one_key_make_one_job_whatever_becomes_of_open_transactions(
    database: TestDatabase, admin: Connection
) -> None:
    """Half of them in transactions that commit late or roll back; repeated, with every order of the first one's end."""
    async with open_client(database.gateway_dsn, pool_max_size=10) as client:
        acme = client.tenant("acme")
        for round_ in range(6):
            key = f"key {round_}"
            committed: list[UUID] = []
            async with anyio.create_task_group() as group:

                async def alone(key: str = key, committed: list[UUID] = committed) -> None:
                    committed.append(await acme.enqueue("erp", "Op", body=b"same", idempotency_key=key))

                async def inside(n: int, key: str = key, committed: list[UUID] = committed) -> None:
                    conn = await asyncpg.connect(database.gateway_dsn)
                    try:
                        transaction = conn.transaction()
                        await transaction.start()
                        job_id = await acme.enqueue("erp", "Op", body=b"same", idempotency_key=key, conn=conn)
                        await conn.execute("select pg_sleep($1)", 0.02 * (n % 3))
                        if n % 2:
                            await transaction.commit()
                            committed.append(job_id)
                        else:
                            await transaction.rollback()
                    finally:
                        await conn.close()

                for n in range(25):
                    group.start_soon(inside, n)
                    group.start_soon(alone)
            assert len(set(committed)) == 1, round_
            assert len(committed) == 25 + 12
            assert await acme.poll_status(committed[0]) is not None
        assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue") == 6


async def test_a_key_that_stays_locked_holds_up_nobody_else(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    async with open_client(
        database.gateway_dsn, pool_max_size=4, lock_timeout_seconds=60, write_timeout_seconds=60
    ) as client:
        acme = client.tenant("acme")
        transaction = gateway.transaction()
        await transaction.start()
        held = await acme.enqueue("erp", "Op", idempotency_key="k", conn=gateway)
        found: list[UUID] = []
        async with anyio.create_task_group() as group:

            async def wait_for_key() -> None:
                found.append(await acme.enqueue("erp", "Op", idempotency_key="k"))

            for _ in range(2):
                group.start_soon(wait_for_key)
            blocked = "select count(*) from pg_stat_activity where $1 = any (pg_blocking_pids(pid))"
            await eventually(lambda: admin.fetchval(blocked, pid_of(gateway)))
            await acme.enqueue("erp", "Op")
            assert found == []
            await transaction.commit()
        assert found == [held, held]


async def test_a_key_that_stays_locked_is_a_retryable_error(database: TestDatabase, gateway: Connection) -> None:
    async with open_client(database.gateway_dsn, pool_max_size=4, lock_timeout_seconds=0.3) as client:
        acme = client.tenant("acme")
        transaction = gateway.transaction()
        await transaction.start()
        held = await acme.enqueue("erp", "Op", idempotency_key="k", conn=gateway)
        async with anyio.create_task_group() as group:
            errors: list[DatabaseBusyError] = []

            async def wait_for_key() -> None:
                with pytest.raises(DatabaseBusyError) as caught:
                    await acme.enqueue("erp", "Op", idempotency_key="k")
                errors.append(caught.value)

            for _ in range(2):
                group.start_soon(wait_for_key)
        assert len(errors) == 2
        assert all(error.retryable and error.job_id not in (None, held) for error in errors)
        await transaction.commit()
        assert await acme.enqueue("erp", "Op", idempotency_key="k") == held


@pytest.mark.case("C43")
async def test_the_same_key_of_two_tenants_is_two_jobs(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = await client.tenant("acme").enqueue("erp", "Op", body=b"a", idempotency_key="1")
        globex = await client.tenant("globex").enqueue("erp", "Op", body=b"b", idempotency_key="1")
        assert acme != globex
        assert await client.tenant("acme").enqueue("erp", "Op", body=b"a", idempotency_key="1") == acme
        assert await client.tenant("globex").poll_status(acme) is None


async def test_of_a_callers_time_half_is_left_when_its_turn_to_use_a_key_has_not_come(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less, all who queue would be cut off one by one (D165)."""
    waits: list[float] = []
    move_on_after = anyio.move_on_after

    def noted(seconds: float, **options: Any) -> anyio.CancelScope:
        waits.append(seconds)
        return move_on_after(seconds, **options)

    async with (
        open_client(database.gateway_dsn, pool_max_size=2, write_timeout_seconds=0.4) as client,
        client.runtime.direct._keyed,
    ):
        monkeypatch.setattr(anyio, "move_on_after", noted)
        with pytest.raises(DatabaseBusyError, match="nothing was sent"):
            await client.tenant("acme").enqueue("erp", "Op", idempotency_key="k")
    assert any(0 < seconds <= 0.2 for seconds in waits)


async def test_a_keyed_enqueue_that_waits_behind_a_rollback_makes_the_job_itself(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    async with open_client(database.gateway_dsn, pool_max_size=2) as client:
        acme = client.tenant("acme")
        transaction = gateway.transaction()
        await transaction.start()
        lost = await acme.enqueue("erp", "Op", idempotency_key="k", conn=gateway)
        made: list[UUID] = []
        async with anyio.create_task_group() as group:

            async def enqueue() -> None:
                made.append(await acme.enqueue("erp", "Op", idempotency_key="k"))

            group.start_soon(enqueue)
            waiting = "select pid from pg_stat_activity where $1 = any (pg_blocking_pids(pid))"
            pid = await eventually(lambda: admin.fetchval(waiting, pid_of(gateway)))
            await wait_until_blocked(admin, pid, by=pid_of(gateway))
            await transaction.rollback()
        assert made != [lost]
        assert await acme.poll_status(made[0]) is not None
