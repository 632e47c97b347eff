"""How a gateway is woken: by push wherever it can be, by polls where it cannot, and never for long without either."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import UUID, uuid4

import anyio
import asyncpg
import pytest
from pydantic import SecretStr

from dispatch_core.dispatch import RelayDispatchRepository
from gateway_sdk import DispatchResult, DispatchStatus, GatewayClient
from gateway_sdk.tenant import TenantClient
from tests.support.activity import backends, terminate
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually, never
from tests.support.gateway import Connection, PlayedRelay, open_client
from tests.support.pooler import FakePooler
from tests.support.proxy import TcpProxy

NEVER = 600.0


@pytest.fixture
def relay(worker: Connection) -> PlayedRelay:
    return PlayedRelay(worker, "acme", "erp")


async def round_trip(acme: TenantClient, relay: PlayedRelay) -> DispatchResult:
    """Have a job done that is waited for, and return its result."""
    job_id = await acme.enqueue("erp", "Op")
    results: list[DispatchResult] = []
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            results.append(await acme.wait(job_id, timeout=30))

        group.start_soon(wait)
        jobs = await eventually(relay.claim)
        # From here on only a push or a later poll can bring the result.
        await listened_to(acme)
        await relay.complete(jobs)
    return results[0]


async def listened_to(acme: TenantClient) -> None:
    """Wait until what the tenant waits for has been polled, and polled again after LISTEN, where that is to be."""
    await eventually(lambda: not is_opening(acme))
    # What was told of LISTEN a moment ago has had its turn of the loop when a round trip is over.
    await acme._runtime.database.execute("select 1")
    await eventually(lambda: are_polled(acme))


def is_opening(acme: TenantClient) -> bool:
    runtime, tenant = acme._runtime, acme.tenant_id
    if runtime.listener is None or runtime.listener.state != "listening":
        return False
    channel = runtime.channels._channels.get(tenant)
    return channel is not None and not channel.is_denied and not runtime.channels.is_listening(tenant)


def are_polled(acme: TenantClient) -> bool:
    room = acme._runtime.waiter._rooms.get(acme.tenant_id)
    return room is not None and all(job.timer is not None and not job.polling for job in room.jobs.values())


async def listeners(observer: Connection) -> list[asyncpg.Record]:
    return [row for row in await backends(observer) if "listener" in row["application_name"]]


async def test_results_come_by_push_and_at_once(database: TestDatabase, relay: PlayedRelay) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        for _ in range(3):
            assert (await round_trip(acme, relay)).status is DispatchStatus.SUCCEEDED
        assert client.health().wakes_by_push == 3
        assert client.health().is_well


async def test_a_lost_ring_costs_a_poll_interval_and_nothing_else(database: TestDatabase, relay: PlayedRelay) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=0.5) as client:
        acme = client.tenant("acme")
        await round_trip(acme, relay)
        job_id = await acme.enqueue("erp", "Op")
        await relay.complete(await relay.claim(), ring=False)
        with anyio.fail_after(HANGS):
            assert (await acme.wait(job_id)).status is DispatchStatus.SUCCEEDED
        unrung = await acme.enqueue("erp", "Op")
        async with anyio.create_task_group() as group:
            group.start_soon(acme.wait, unrung)
            polled = client.health().polled
            await eventually(lambda: client.health().polled > polled)
            await relay.complete(await relay.claim(), ring=False)
            statements = client.health().poll_statements
        # The next poll, or the one after it where that was under way already.
        assert client.health().poll_statements <= statements + 2
        assert client.health().wakes_by_poll >= 2


async def test_polls_beneath_the_push_are_one_statement_an_interval(database: TestDatabase, relay: PlayedRelay) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=0.3) as client:
        acme = client.tenant("acme")
        await round_trip(acme, relay)
        ids = [await acme.enqueue("erp", "Op") for _ in range(200)]
        async with anyio.create_task_group() as group:
            for job_id in ids:
                group.start_soon(acme.wait, job_id)
            await eventually(lambda: client.health().waiting == 200)
            await listened_to(acme)
            before, started = client.health(), time.monotonic()
            await eventually(lambda: client.health().poll_statements >= before.poll_statements + 5)
            # An interval is up to a fifth shorter, and the first one was under way.
            assert time.monotonic() - started >= 4 * 0.24 - 0.05
            assert client.health().polled - before.polled == 200 * (
                client.health().poll_statements - before.poll_statements
            )
            while await relay.work(200):
                pass


@pytest.mark.case("C01")
async def test_a_half_open_listener_is_noticed_and_replaced_and_polls_go_on_meanwhile(
    database: TestDatabase, relay: PlayedRelay, admin: Connection
) -> None:
    """Only the listening connection is behind the proxy, and goes silent without a FIN."""
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(
            database.gateway_dsn,
            listen_dsn=SecretStr(proxy.dsn(database.gateway_dsn)),
            probe_seconds=0.5,
            probe_timeout_seconds=0.5,
            reconnect_cap_seconds=0.2,
            poll_interval_seconds=2.0,
        ) as client,
    ):
        acme = client.tenant("acme")
        await round_trip(acme, relay)
        assert client.health().state == "listening"
        proxy.connections[0].mode = "black_hole"
        for _ in range(3):
            assert (await round_trip(acme, relay)).status is DispatchStatus.SUCCEEDED
        await eventually(lambda: proxy.accepted >= 2 and client.health().state == "listening")
        pushed = client.health().wakes_by_push

        async def is_pushed() -> bool:
            # Now and then a poll is there before it.
            await round_trip(acme, relay)
            return client.health().wakes_by_push > pushed

        await eventually(is_pushed)

        proxy.mode = "black_hole"
        await eventually(lambda: client.health().state == "degraded")
        assert client.health().problem
        assert (await round_trip(acme, relay)).status is DispatchStatus.SUCCEEDED
        proxy.mode = "pass"
        await eventually(lambda: client.health().state == "listening")
        await eventually(lambda: count_is(admin, 1))


async def count_is(admin: Connection, wanted: int) -> bool:
    return len(await listeners(admin)) == wanted


@pytest.mark.case("C02")
async def test_the_listener_comes_back_after_its_backend_was_killed_again_and_again(
    database: TestDatabase, relay: PlayedRelay, admin: Connection
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER, reconnect_cap_seconds=0.2) as client:
        acme = client.tenant("acme")
        listener = acme._runtime.listener
        assert listener is not None
        killed = 0
        for kills in (0, 1, 2):
            for _ in range(kills):
                await eventually(lambda: listener.connects > killed)  # noqa: B023  (evaluated here)
                (backend,) = await eventually(lambda: listeners(admin))
                await terminate(admin, backend["pid"])
                killed += 1
            await eventually(lambda: listener.connects > killed and listener.state == "listening")  # noqa: B023
            pushed = client.health().wakes_by_push
            assert (await round_trip(acme, relay)).status is DispatchStatus.SUCCEEDED
            assert client.health().wakes_by_push == pushed + 1
        assert len(await listeners(admin)) == 1


@pytest.mark.case("C02")
async def test_a_result_that_came_while_nobody_listened_is_read_by_the_catch_up(
    database: TestDatabase, relay: PlayedRelay, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(
            database.gateway_dsn,
            listen_dsn=SecretStr(proxy.dsn(database.gateway_dsn)),
            poll_interval_seconds=NEVER,
            reconnect_cap_seconds=0.1,
        ) as client,
    ):
        acme = client.tenant("acme")
        await round_trip(acme, relay)
        # No polls beneath, so that only the catch-up can find it.
        monkeypatch.setattr("gateway_sdk.waiter._YOUNG_SECONDS", NEVER)
        job_id = await acme.enqueue("erp", "Op")
        async with anyio.create_task_group() as group:
            results: list[DispatchResult] = []

            async def wait() -> None:
                results.append(await acme.wait(job_id, timeout=30))

            polled = client.health().polled
            group.start_soon(wait)
            await eventually(lambda: client.health().polled > polled)
            proxy.mode = "reset"
            await eventually(lambda: client.health().state == "degraded")
            await relay.complete(await relay.claim())
            await never(lambda: results, 0.3)
            proxy.mode = "pass"
            await eventually(lambda: results)
    assert results[0].status is DispatchStatus.SUCCEEDED


@pytest.mark.case("C05")
async def test_behind_a_transaction_pooler_the_gateway_says_so_once_and_polls(
    database: TestDatabase, worker: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        FakePooler.before(database.gateway_dsn, mode="swap") as pooler,
        open_client(
            pooler.dsn(database.gateway_dsn),
            statement_cache_size=0,
            probe_timeout_seconds=0.5,
            poll_interval_seconds=1.0,
        ) as client,
    ):
        assert client.health().state == "polling_only"
        for tenant in ("acme", "globex", "acme"):
            result = await round_trip(client.tenant(tenant), PlayedRelay(worker, tenant, "erp"))
            assert result.status is DispatchStatus.SUCCEEDED
        foreign = await client.tenant("globex").enqueue("erp", "Op")
        assert await client.tenant("acme").poll_status(foreign) is None
        assert client.health().wakes_by_push == 0
    assert len([record for record in caplog.records if "transaction pooler" in record.message]) == 1


@pytest.mark.case("C05")
async def test_behind_a_pooler_a_direct_listen_dsn_brings_the_push_back(
    database: TestDatabase, relay: PlayedRelay
) -> None:
    async with (
        FakePooler.before(database.gateway_dsn, mode="swap") as pooler,
        open_client(
            pooler.dsn(database.gateway_dsn),
            listen_dsn=SecretStr(database.gateway_dsn),
            statement_cache_size=0,
            poll_interval_seconds=NEVER,
        ) as client,
    ):
        assert client.health().state == "listening"
        for _ in range(3):
            await round_trip(client.tenant("acme"), relay)
        assert client.health().wakes_by_push == 3


async def test_with_a_pool_and_no_dsn_it_polls_and_says_so_once(
    database: TestDatabase, relay: PlayedRelay, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncpg.create_pool(database.gateway_dsn, min_size=1, max_size=2) as pool:
        async with open_client(None, pool=pool, poll_interval_seconds=1.0) as client:
            assert client.health().state == "polling_only"
            for _ in range(2):
                assert (await round_trip(client.tenant("acme"), relay)).status is DispatchStatus.SUCCEEDED
        assert await pool.fetchval("select 1") == 1
    assert len([record for record in caplog.records if "only polled" in record.message]) == 1


async def test_with_a_pool_and_a_listen_dsn_results_are_pushed(database: TestDatabase, relay: PlayedRelay) -> None:
    async with (
        asyncpg.create_pool(database.gateway_dsn, min_size=1, max_size=2) as pool,
        open_client(None, pool=pool, listen_dsn=SecretStr(database.gateway_dsn), poll_interval_seconds=NEVER) as client,
    ):
        await round_trip(client.tenant("acme"), relay)
        assert client.health().wakes_by_push == 1


async def test_a_client_with_a_pool_rings_relays_too(database: TestDatabase, worker: Connection) -> None:
    relay = PlayedRelay(worker, "acme", "erp")
    heard: list[str] = []
    await worker.add_listener(
        await relay.repository.channel("wake", "erp"), lambda _c, _p, _ch, payload: heard.append(str(payload))
    )
    async with (
        asyncpg.create_pool(database.gateway_dsn, min_size=1, max_size=1) as pool,
        GatewayClient(pool=pool) as client,
    ):
        await client.tenant("acme").enqueue("erp", "Op")
        await eventually(lambda: heard == [""])
        # Nothing of ours stays in a session of the caller's.
        assert await pool.fetchval("select current_setting('synchronous_commit')") == "on"
        assert await pool.fetchval("select coalesce(current_setting('app.tenant_id', true), '')") == ""


@pytest.mark.case("C08")
@pytest.mark.parametrize(
    "payload",
    ["", ",", "garbage", "'; drop table x", "0" * 32, "00000000-0000-0000-0000-000000000000", "\u00e9" * 3000],
)
async def test_a_forged_payload_does_no_harm(
    database: TestDatabase, relay: PlayedRelay, gateway: Connection, payload: str
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        await round_trip(acme, relay)
        channel = await gateway.fetchval("select relay.channel('result', 'acme')")
        job_id = await acme.enqueue("erp", "Op")
        async with anyio.create_task_group() as group:
            results: list[DispatchResult] = []

            async def wait() -> None:
                results.append(await acme.wait(job_id, timeout=30))

            group.start_soon(wait)
            heard = client.health().notifications
            # And an id of ours, which is not over.
            await gateway.execute("select pg_notify($1, $2), pg_notify($1, $3)", channel, payload, job_id.hex)
            await eventually(lambda: client.health().notifications == heard + 2)
            assert results == []
            await relay.complete(await relay.claim())
    assert results[0].status is DispatchStatus.SUCCEEDED


@pytest.mark.case("C08")
async def test_three_thousand_results_are_pushed_in_payloads_of_bounded_size(
    database: TestDatabase, relay: PlayedRelay
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        await round_trip(acme, relay)
        from gateway_sdk import DispatchRequest

        ids = await acme.enqueue_many([DispatchRequest("erp", "Op")] * 3000)
        jobs = await relay.claim(3000)
        seen: set[UUID] = set()
        async with anyio.create_task_group() as group:

            async def collect() -> None:
                async for result in acme.as_completed(ids, timeout=60):
                    seen.add(result.job_id)

            polled = client.health().polled
            group.start_soon(collect)
            await eventually(lambda: client.health().polled >= polled + 3000)
            await relay.complete(jobs, response_body=bytes(100))
        assert seen == set(ids)
        assert client.health().wakes_by_push >= 3000


@pytest.mark.case("C08")
async def test_polls_of_large_results_come_in_answers_of_bounded_size(
    database: TestDatabase, relay: PlayedRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first poll on, and on a link on which the whole takes longer than a poll may, and a page does not."""
    sizes: list[int] = []
    poll_places = RelayDispatchRepository.poll_places

    async def weighed(self: RelayDispatchRepository, job_ids: list[UUID], **options: Any) -> Any:
        answers, left = await poll_places(self, job_ids, **options)
        sizes.append(sum(len(each.response_body or b"") for each in answers if isinstance(each, DispatchResult)))
        return answers, left

    async with open_client(database.gateway_dsn) as client:
        ids = [await done(client.tenant("acme"), relay) for _ in range(24)]
    async with (
        TcpProxy.before(database.gateway_dsn, delay_seconds=0.01) as proxy,
        open_client(proxy.dsn(database.gateway_dsn), poll_interval_seconds=NEVER, poll_timeout_seconds=3.0) as client,
    ):
        acme = client.tenant("acme")
        monkeypatch.setattr(RelayDispatchRepository, "poll_places", weighed)
        proxy.mode = "delay"
        with anyio.fail_after(20):
            assert {result.job_id async for result in acme.as_completed(ids)} == set(ids)
        proxy.mode = "pass"
        assert 5 <= client.health().poll_statements == len(sizes) <= 10
        sizes.clear()
        many = await acme.poll_many(ids)
        assert set(many) == set(ids)
        statuses: list[DispatchResult | None] = await asyncio.gather(*(acme.poll_status(job_id) for job_id in ids))
        assert [result.job_id for result in statuses if result is not None] == ids
        # The limit, and what was begun below it.
        assert max(sizes) <= 4 * 1024 * 1024 + 1_000_000
        # Of jobs that have not ended, one statement takes all.
        live = [await acme.enqueue("erp", "Op") for _ in range(100)]
        async with anyio.create_task_group() as group:
            for job_id in live:
                group.start_soon(acme.wait, job_id)
            await eventually(lambda: client.health().waiting == 100)
            await listened_to(acme)
            before = client.health().poll_statements
            waiter = acme._runtime.waiter
            room = waiter._rooms["acme"]
            next(iter(room.jobs.values())).due = 0
            waiter._tick(room)
            await eventually(lambda: client.health().poll_statements > before)
            await eventually(lambda: are_polled(acme))
            assert client.health().poll_statements == before + 1
            group.cancel_scope.cancel()


async def done(acme: TenantClient, relay: PlayedRelay) -> UUID:
    job_id = await acme.enqueue("erp", "Op")
    await relay.complete(await relay.claim(), response_body=bytes(1_000_000), ring=False)
    return job_id


@pytest.mark.case("C09")
@pytest.mark.parametrize(
    "name",
    ["r" * 64, "\u6c34" * 22, "Mixed Case", "quo\"te'd.%s $1 \\", "r" * 63 + "a", "r" * 63 + "b", "x" * 200],
)
async def test_any_name_that_is_accepted_is_woken_and_answered(
    database: TestDatabase, worker: Connection, name: str
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        # As the tenant and as the relay.
        relay = PlayedRelay(worker, name, name)
        heard: list[str] = []
        await worker.add_listener(
            await relay.repository.channel("wake", name), lambda _c, _p, _ch, payload: heard.append(str(payload))
        )
        acme = client.tenant(name)
        job_id = await acme.enqueue(name, name)
        await eventually(lambda: heard == [""])
        async with anyio.create_task_group() as group:
            group.start_soon(acme.wait, job_id)
            await eventually(lambda: client.health().waiting == 1)
            await listened_to(acme)
            await relay.complete(await relay.claim())
        assert client.health().wakes_by_push == 1


@pytest.mark.invariant("I4")
@pytest.mark.case("C09")
async def test_a_tenant_is_not_woken_by_anothers_results(database: TestDatabase, worker: Connection) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme, globex = client.tenant("acme"), client.tenant("globex")
        relays = {name: PlayedRelay(worker, name, "erp") for name in ("acme", "globex")}
        await round_trip(acme, relays["acme"])
        job_id = await acme.enqueue("erp", "Op")
        async with anyio.create_task_group() as group:
            results: list[DispatchResult] = []

            async def wait() -> None:
                results.append(await acme.wait(job_id, timeout=30))

            group.start_soon(wait)
            await eventually(lambda: client.health().waiting == 1)
            await round_trip(globex, relays["globex"])
            polled = client.health().polled
            # Rung for acme's id, but on globex's channel: nobody there knows it.
            await relays["globex"].ring_results([job_id, uuid4()])
            await round_trip(globex, relays["globex"])
            assert client.health().polled <= polled + 2
            assert results == []
            await relays["acme"].complete(await relays["acme"].claim())
    assert results[0].status is DispatchStatus.SUCCEEDED


@pytest.mark.invariant("I4")
async def test_a_login_that_may_not_listen_is_told_and_polls(
    database: TestDatabase, worker: Connection, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await admin.execute("revoke execute on function relay.channel(text, text, text) from relay_gateway")
    async with open_client(database.gateway_dsn, poll_interval_seconds=1.0) as client:
        result = await round_trip(client.tenant("acme"), PlayedRelay(worker, "acme", "erp"))
        assert result.status is DispatchStatus.SUCCEEDED
        assert client.health().channels == 0
    assert len([record for record in caplog.records if "not pushed" in record.message]) == 1
