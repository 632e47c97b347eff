"""With the database down, slow, or cut off: nothing is lost, nothing is invented, and nobody waits too long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from uuid import UUID

import anyio
import asyncpg
import pytest
from pydantic import SecretStr

from dispatch_core.errors import ConnectionLostError, DatabaseUnavailableError, RelayDispatchError, WaitTimeoutError
from gateway_sdk import DispatchRequest, DispatchResult, DispatchStatus, TenantClient
from gateway_sdk.sweeper import Sweeper
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually
from tests.support.gateway import Connection, PlayedRelay, open_client
from tests.support.patience import still, within
from tests.support.proxy import TcpProxy

NEVER = 600.0


@pytest.fixture
def relay(worker: Connection) -> PlayedRelay:
    return PlayedRelay(worker, "acme", "erp")


async def stored(acme: TenantClient, ttl: float = 60) -> UUID:
    """Store a job, also where the machine is busier than the client's bounds allow for."""
    while True:
        try:
            return await acme.enqueue("erp", "Op", ttl=ttl)
        except DatabaseUnavailableError:
            await anyio.sleep(0.1)


@pytest.mark.invariant("I1")
async def test_an_enqueue_whose_connection_breaks_is_made_again_and_stored_once(
    database: TestDatabase, admin: Connection
) -> None:
    """The connection is cut again and again while 400 enqueues are under way: all succeed, each once."""
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn), enqueue_batch_items=20, pool_max_size=4) as client,
    ):
        acme = client.tenant("acme")
        ids: list[UUID] = []
        async with anyio.create_task_group() as group:

            async def enqueue() -> None:
                ids.append(await acme.enqueue("erp", "Op", body=bytes(2000)))

            for _ in range(400):
                group.start_soon(enqueue)
            for _ in range(6):
                await anyio.sleep(0.02)
                proxy.reset_all()
        assert len(set(ids)) == 400
        stored = await admin.fetch("select job_id from relay.s2r_relay_dispatch_queue")
        assert sorted(row["job_id"] for row in stored) == sorted(ids)
        many = await acme.enqueue_many([DispatchRequest("erp", "Op")] * 10)
        assert len(await acme.poll_many(many)) == 10


@pytest.mark.invariant("I1")
async def test_a_reply_that_is_lost_after_the_commit_does_not_store_the_job_twice(
    database: TestDatabase, admin: Connection
) -> None:
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn), write_timeout_seconds=20, pool_max_size=2) as client,
    ):
        acme = client.tenant("acme")
        await acme.enqueue("erp", "Op")  # connects before anything is slow
        for key in (None, "k"):
            before = await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue")
            ids: list[UUID] = []
            async with anyio.create_task_group() as group:

                async def enqueue(key: str | None = key, ids: list[UUID] = ids) -> None:
                    ids.append(await acme.enqueue("erp", "Op", idempotency_key=key))

                # The answer is held back on its way; the commit is seen; then the connection is cut.
                proxy.mode = "delay"
                proxy.delay_seconds = 0.3
                group.start_soon(enqueue)
                await eventually(
                    lambda before=before: admin.fetchval(  # type: ignore[misc]
                        "select count(*) > $1 from relay.s2r_relay_dispatch_queue", before
                    )
                )
                proxy.reset_all()
                proxy.mode = "pass"
            assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue") == before + 1
            assert await acme.poll_status(ids[0]) is not None


@pytest.mark.invariant("I6")
async def test_nobody_waits_longer_than_promised_on_a_black_hole(database: TestDatabase) -> None:
    """Every connection is silent, and no error comes from the network: the bounds are all ours."""
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn), write_timeout_seconds=1.5, connect_timeout_seconds=1.0) as client,
    ):
        acme = client.tenant("acme")
        # All is well, and warm; and nobody minds how long that takes.
        with pytest.raises(WaitTimeoutError):
            await acme.wait(await stored(acme), timeout=0.2)
        alive = await stored(acme)
        late = await stored(acme, ttl=5)
        outcomes: dict[str, tuple[float, BaseException | DispatchResult]] = {}

        took: dict[str, float] = {}

        async def measure(name: str, call: object) -> None:
            started, began = still(), time.monotonic()
            try:
                outcome: BaseException | DispatchResult = await call  # type: ignore[misc]
            except RelayDispatchError as error:
                outcome = error
            outcomes[name] = (still() - started, outcome)
            took[name] = time.monotonic() - began

        async with anyio.create_task_group() as group:
            group.start_soon(measure, "deadline", acme.wait(late))
            await eventually(lambda: client.health().waiting == 1)
            # Its deadline is known now, and nothing but that is under way.
            waiter = acme._runtime.waiter
            (job,) = waiter._rooms["acme"].jobs.values()
            await eventually(lambda: job.timer is not None and not job.polling)
            proxy.mode = "black_hole"
            group.start_soon(measure, "timeout", acme.wait(alive, timeout=2))
            group.start_soon(measure, "call", acme.call("erp", "Op", timeout=1))
            group.start_soon(measure, "keyed call", acme.call("erp", "Op", timeout=1, idempotency_key="k"))
            group.start_soon(measure, "enqueue", acme.enqueue("erp", "Op"))
            group.start_soon(measure, "poll", acme.poll_status(alive))
            group.start_soon(measure, "mark", acme.mark_expired(alive))
        bounds = {
            "deadline": 5 + client.settings.deadline_grace_seconds,
            "timeout": 2.0,
            "call": 1.0,
            "keyed call": 1.0,
            "enqueue": 1.5,
            "poll": 5,
            "mark": 1.5,
        }
        for name, (seconds, outcome) in outcomes.items():
            assert isinstance(outcome, DatabaseUnavailableError), (name, outcome)
            assert outcome.retryable
            assert outcome.job_id is not None, name
            # Putting a dead connection away may take two seconds more, where no timeout of the caller's is at stake.
            slack = 0.3 if name in ("deadline", "timeout", "call") else 2.5
            assert seconds <= bounds[name] + slack, (name, seconds)
        assert took["timeout"] >= 1.9
        proxy.mode = "pass"
        with anyio.fail_after(10):
            await eventually(lambda: client.health().state == "listening")
            assert (await acme.wait(late)).status is DispatchStatus.EXPIRED


@pytest.mark.invariant("I6")
async def test_withdrawals_that_come_one_after_the_other_on_a_black_hole_each_end_in_time(
    database: TestDatabase,
) -> None:
    """The first takes the tenant's one worker: those behind it do not wait for it and then for themselves."""
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn), write_timeout_seconds=1.0) as client,
    ):
        acme = client.tenant("acme")
        job_id = await stored(acme)
        proxy.mode = "black_hole"
        lasted: list[float] = []

        async def withdraw() -> None:
            started = still()
            with pytest.raises(DatabaseUnavailableError) as caught:
                await acme.mark_expired(job_id)
            assert caught.value.job_id == job_id
            lasted.append(still() - started)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(withdraw)
                await anyio.sleep(0.3)
        assert len(lasted) == 4
        assert max(lasted) < 1.3
        proxy.mode = "pass"
        assert await acme.poll_status(job_id) is not None


@pytest.mark.invariant("I6")
async def test_with_the_database_down_a_wait_raises_at_its_timeout_and_at_the_deadline(
    database: TestDatabase, relay: PlayedRelay
) -> None:
    """Connections are refused at once; a wait does not give up at that, for the database may come back."""
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn)) as client,
    ):
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op", ttl=60)
        began = time.monotonic()
        deadline = await acme.enqueue("erp", "Op", ttl=4)
        back = await acme.enqueue("erp", "Op", ttl=60)
        ends: dict[str, tuple[float, float, BaseException | DispatchResult]] = {}

        async def wait(name: str, job_id: UUID, timeout: float | None) -> None:
            started = still()
            try:
                outcome: BaseException | DispatchResult = await acme.wait(job_id, timeout)
            except DatabaseUnavailableError as error:
                outcome = error
            ends[name] = (still() - started, time.monotonic() - began, outcome)

        async with anyio.create_task_group() as group:
            # Long enough for the database to be gone before, on any machine.
            group.start_soon(wait, "timeout", job_id, 3.0)
            group.start_soon(wait, "deadline", deadline, None)
            group.start_soon(wait, "back", back, 30)
            await eventually(lambda: client.health().polled >= 3)
            proxy.mode = "reset"
            await eventually(lambda: len(ends) >= 2)
            assert set(ends) == {"timeout", "deadline"}
            jobs = await relay.claim()
            await relay.complete([job for job in jobs if job.job_id == back])
            proxy.mode = "pass"
        for name, job, at in (("timeout", job_id, 3.0), ("deadline", deadline, 4.0)):
            waited, by_the_clock, outcome = ends[name]
            assert isinstance(outcome, DatabaseUnavailableError)
            assert (outcome.job_id, outcome.retryable) == (job, True)
            assert by_the_clock >= at - 0.3, name
            assert waited <= at + 0.4, name
        result = ends["back"][2]
        assert isinstance(result, DispatchResult)
        assert result.status is DispatchStatus.SUCCEEDED


async def test_every_verb_is_a_retryable_error_while_the_database_is_down(database: TestDatabase) -> None:
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn), write_timeout_seconds=0.5, poll_timeout_seconds=0.5) as client,
    ):
        acme = client.tenant("acme")
        job_id = await stored(acme)
        proxy.mode = "reset"
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "enqueue": lambda: acme.enqueue("erp", "Op"),
            "keyed": lambda: acme.enqueue("erp", "Op", idempotency_key="k"),
            "call": lambda: acme.call("erp", "Op", timeout=5),
            "wait": lambda: acme.wait(job_id, timeout=0.5),
            "poll_status": lambda: acme.poll_status(job_id),
            "mark_expired": lambda: acme.mark_expired(job_id),
        }
        for name, call in calls.items():
            started = still()
            with pytest.raises(DatabaseUnavailableError) as caught:
                await call()
            assert caught.value.job_id is not None, name
            assert caught.value.retryable
            assert still() - started < 2, name
        with pytest.raises(DatabaseUnavailableError):
            await acme.enqueue_many([DispatchRequest("erp", "Op")])
        with pytest.raises(DatabaseUnavailableError):
            await acme.poll_many([job_id])
        proxy.mode = "pass"
        # At the next try, for which calls that have so little time do not wait.
        await eventually(lambda: client.health().state == "listening")
        assert await acme.poll_status(job_id) is not None


async def test_a_connection_of_the_callers_that_breaks_is_a_retryable_error_with_the_id(
    database: TestDatabase,
) -> None:
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(database.gateway_dsn) as client,
    ):
        conn = await asyncpg.connect(proxy.dsn(database.gateway_dsn))
        transaction = conn.transaction()
        await transaction.start()
        proxy.mode = "reset"
        with pytest.raises(DatabaseUnavailableError) as caught:
            await client.tenant("acme").enqueue("erp", "Op", conn=conn)
        assert caught.value.job_id is not None
        assert isinstance(caught.value, ConnectionLostError) or "closed" in str(caught.value)
        conn.terminate()


@pytest.mark.slow
@pytest.mark.case("C02")
@pytest.mark.invariant("I1")
async def test_a_server_that_stops_and_starts_loses_no_job_and_pushes_again(durable_database: TestDatabase) -> None:
    """200 enqueues a second while PostgreSQL is down, until 200 were refused: each is stored once or refused."""
    server = durable_database.server
    async with open_client(
        durable_database.gateway_dsn,
        write_timeout_seconds=1.0,
        connect_timeout_seconds=1.0,
        reconnect_cap_seconds=0.5,
        poll_interval_seconds=NEVER,
    ) as client:
        acme = client.tenant("acme")
        accepted: list[UUID] = []
        refused: list[UUID] = []
        stop = anyio.Event()
        async with anyio.create_task_group() as group:

            async def enqueue() -> None:
                try:
                    accepted.append(await acme.enqueue("erp", "Op"))
                except DatabaseUnavailableError as error:
                    refused.append(error.job_id or UUID(int=0))

            async def offer() -> None:
                while not stop.is_set():
                    group.start_soon(enqueue)
                    await anyio.sleep(0.005)

            group.start_soon(offer)
            await eventually(lambda: len(accepted) > 50)
            await anyio.to_thread.run_sync(server.stop)
            await eventually(lambda: client.health().state == "degraded")
            await eventually(lambda: len(refused) > 200)
            await anyio.to_thread.run_sync(server.start)
            count = len(accepted)
            await eventually(lambda: len(accepted) > count + 50, 20)
            stop.set()
        assert refused
        assert UUID(int=0) not in refused
        await eventually(lambda: client.health().state == "listening")
        admin = await asyncpg.connect(durable_database.admin_dsn)
        stored = {row["job_id"] for row in await admin.fetch("select job_id from relay.s2r_relay_dispatch_queue")}
        await admin.close()
        assert len(set(accepted)) == len(accepted)
        assert set(accepted) <= stored <= set(accepted) | set(refused)

        worker = await asyncpg.connect(durable_database.worker_dsn)
        relay = PlayedRelay(worker, "acme", "erp")
        while await relay.work(500):
            pass
        assert {result.job_id async for result in acme.as_completed(accepted, timeout=30)} == set(accepted)
        pushed = client.health().wakes_by_push

        async def is_pushed() -> bool:
            """On a busy machine a poll may be quicker than the push, and the channel not listened on at once."""
            async with anyio.create_task_group() as group:
                results: list[DispatchResult] = []

                async def call() -> None:
                    results.append(await acme.call("erp", "Op", timeout=30))

                group.start_soon(call)
                await eventually(relay.work)
            assert results[0].status is DispatchStatus.SUCCEEDED
            return client.health().wakes_by_push == pushed + 1

        await eventually(is_pushed)
        worker.terminate()


async def test_a_pool_that_is_busy_is_waited_for_and_no_longer_than_promised(database: TestDatabase) -> None:
    async with (
        asyncpg.create_pool(database.gateway_dsn, min_size=1, max_size=1) as pool,
        open_client(None, pool=pool, write_timeout_seconds=0.5) as client,
    ):
        acme = client.tenant("acme")
        async with pool.acquire():
            started = still()
            with pytest.raises(DatabaseUnavailableError) as caught:
                await acme.enqueue("erp", "Op")
            assert still() - started < 1
            assert caught.value.job_id is not None
        await stored(acme)


async def test_no_statement_on_a_dead_connection_of_a_callers_pool_is_without_a_bound(database: TestDatabase) -> None:
    """The pool has no command timeout, and its one connection is silent: what uses it ends, and the pool is whole."""
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        asyncpg.create_pool(proxy.dsn(database.gateway_dsn), min_size=1, max_size=1) as pool,
    ):
        settings = {"listen_dsn": SecretStr(database.gateway_dsn), "write_timeout_seconds": 5.0}
        settings |= {"command_timeout_seconds": 1.0, "poll_timeout_seconds": 1.0}
        proxy.connections[0].mode = "black_hole"
        with anyio.fail_after(HANGS), within(5), pytest.raises(DatabaseUnavailableError):
            async with open_client(None, pool=pool, **settings):
                pass
        async with open_client(None, pool=pool, **settings) as client:
            acme = client.tenant("acme")
            runtime = client._runtime
            assert runtime is not None
            sweeper = Sweeper(runtime.database, runtime.doorbell, client.settings)
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "sweep": sweeper.sweep,
                "ring without a listener": lambda: runtime.database.execute("select 1"),
                # The name of the channel is asked for, and the job, one after the other.
                "wait": lambda: acme.wait(job_id, timeout=3),
            }
            for name, call in calls.items():
                job_id = await acme.enqueue("erp", "Op")
                (connection,) = [each for each in proxy.connections if each.mode == "pass"]
                connection.mode = "black_hole"
                with anyio.fail_after(HANGS), within(5):
                    with pytest.raises(RelayDispatchError) as caught:
                        await call()
                    assert caught.value.retryable, name
                    await acme.enqueue("erp", "Op")
            await eventually(lambda: client.health().channels == 1 and runtime.channels.is_listening("acme"))


@pytest.mark.case("C40")
async def test_a_pool_of_one_never_carries_a_tenant_over(database: TestDatabase, admin: Connection) -> None:
    """Two tenants in turns, with errors and cancellations at random points, on one connection that nobody resets."""
    async with open_client(database.gateway_dsn, pool_max_size=1, pool_min_size=1) as client:
        names = ("acme", "globex")
        stored: dict[str, set[UUID]] = {name: set() for name in names}

        async def use(n: int) -> None:
            name = names[n % 2]
            tenant = client.tenant(name)
            with anyio.move_on_after(0.001 * (n % 7) if n % 3 == 0 else 10):
                if n % 5 == 0:
                    with pytest.raises(RelayDispatchError):
                        await tenant.wait(UUID(int=n), timeout=5)
                job_id = await tenant.enqueue("erp", "Op", idempotency_key=f"k{n}" if n % 4 == 0 else None)
                stored[name].add(job_id)
                assert await tenant.poll_status(job_id) is not None
                assert await client.tenant(names[(n + 1) % 2]).poll_status(job_id) is None

        async with anyio.create_task_group() as group:
            for n in range(200):
                group.start_soon(use, n)
        pool = client._runtime.database  # type: ignore[union-attr]
        assert (await pool.execute("select coalesce(current_setting('app.tenant_id', true), '')"))[0][0] == ""
    rows = await admin.fetch("select tenant_id, job_id from relay.s2r_relay_dispatch_request")
    for name in names:
        assert stored[name] <= {row["job_id"] for row in rows if row["tenant_id"] == name}
    assert not {row["job_id"] for row in rows if row["tenant_id"] == "acme"} & stored["globex"]


async def test_concurrent_polls_share_statements(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        ids = await acme.enqueue_many([DispatchRequest("erp", "Op")] * 500)
        before = client.health().poll_statements
        results = await asyncio.gather(*(acme.poll_status(job_id) for job_id in ids))
        assert [result.job_id for result in results if result] == ids
        assert client.health().poll_statements - before <= 5
