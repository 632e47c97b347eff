"""Listeners of chunk relays and drainers that go deaf: half open, killed, between two steps, behind a pooler.

What tests of the listener, of gateways and of relays with job handlers show elsewhere (C01, C02, C03, C05).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dispatch_core.listener import Listener
from dispatch_core.outbox import OutboxEvent
from dispatch_core.settings import CoreSettings, DurableJobsSettings
from relay_sdk import ChunkContext, Relay, RelaySettings
from tests.support.activity import backends
from tests.support.chunks import KIND as CHUNKS
from tests.support.chunks import SELDOM, Work
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.outbox import KIND
from tests.support.pooler import FakePooler
from tests.support.protocol import Connection
from tests.support.proxy import TcpProxy
from tests.support.relays import QUICK, running
from tests.test_outbox_drainer import drainer_of, enqueue

HOUR = 3600.0


async def _nothing(_: ChunkContext) -> None: ...


async def _deliver(_: OutboxEvent) -> None: ...


def deaf_relay(core: CoreSettings, *, poll_seconds: float) -> Relay:
    """Make a relay with chunk handlers that finds nothing but by a wake-up or a poll."""
    relay = Relay(
        "erp",
        tenants=["acme"],
        core=core,
        settings=RelaySettings(**{**QUICK, "poll_seconds": poll_seconds}),
        durable=DurableJobsSettings(lease_seconds=60.0, **SELDOM),
    )
    relay.chunk_handler(CHUNKS)(_nothing)
    return relay


# --- C01 --------------------------------------------------------------------------------------------------------------


@pytest.mark.case("C01")
async def test_a_half_open_listener_of_a_chunk_relay_is_replaced_and_polling_goes_on(
    database: TestDatabase, gateway: Any
) -> None:
    async with TcpProxy.before(database.worker_dsn) as proxy:
        core = CoreSettings.load(
            dsn=database.worker_dsn,
            listen_dsn=proxy.dsn(database.worker_dsn),
            probe_seconds=0.3,
            probe_timeout_seconds=0.5,
        )
        relay, work = deaf_relay(core, poll_seconds=0.5), Work(gateway)
        async with running(relay):
            await work.end(await work.submit(2))
            assert relay.health().status == "ok"
            proxy.mode = "black_hole"
            for _ in range(3):
                await work.end(await work.submit(1), timeout=30)
            await eventually(lambda: relay.health().status == "degraded", timeout=30)
            proxy.mode = "pass"
            await eventually(lambda: relay.health().status == "ok", timeout=30)
            assert proxy.accepted >= 2


@pytest.mark.case("C01")
async def test_a_half_open_listener_of_a_drainer_is_replaced_and_polling_goes_on(
    database: TestDatabase, gateway: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_PROBE_SECONDS", "0.3")
    monkeypatch.setenv("RELAY_DISPATCH_PROBE_TIMEOUT_SECONDS", "0.5")
    async with TcpProxy.before(database.gateway_dsn) as proxy:
        listen_dsn = proxy.dsn(database.gateway_dsn)
        polling = drainer_of(database, _deliver, listen_dsn=listen_dsn, drain_interval_sec=0.5)
        async with polling:
            await enqueue(gateway, "heard")
            await eventually(lambda: polling.total.delivered == 1)
            accepted = proxy.accepted
            proxy.connections[0].mode = "black_hole"
            for number in range(3):
                await enqueue(gateway, number)
                await eventually(lambda: polling.total.delivered == 2 + number)  # noqa: B023
            await eventually(lambda: proxy.accepted > accepted)
        listening = drainer_of(database, _deliver, listen_dsn=listen_dsn)
        async with listening:
            await enqueue(gateway, "heard")
            await eventually(lambda: listening.total.delivered == 1)
            proxy.connections[-1].mode = "black_hole"
            # Not heard; found by the look that follows the new LISTEN, an hour before the next poll.
            await enqueue(gateway, "while nobody listens")
            await eventually(lambda: listening.total.delivered == 2)
            await enqueue(gateway, "heard again")
            await eventually(lambda: listening.total.delivered == 3)


# --- C02 --------------------------------------------------------------------------------------------------------------


async def _kill(admin: Connection, login: str) -> None:
    await admin.fetch(
        "select pg_terminate_backend(pid) from pg_stat_activity where usename = $1 and datname = current_database()",
        login,
    )


async def _listeners(admin: Connection) -> int:
    return len([row for row in await backends(admin) if " listener " in row["application_name"]])


@pytest.mark.case("C02")
async def test_a_chunk_relay_whose_sessions_are_killed_again_and_again_is_woken_as_before_by_one_listener(
    database: TestDatabase, gateway: Any, admin: Connection
) -> None:
    relay, work = deaf_relay(CoreSettings.load(dsn=database.worker_dsn), poll_seconds=HOUR), Work(gateway)
    async with running(relay):
        for kills in (1, 2):
            for _ in range(kills):  # the second time as soon as it is there again
                await eventually(lambda: _listeners(admin), timeout=30)
                await _kill(admin, "relay_worker_login")
            await work.end(await work.submit(1), timeout=30)  # rung for, or found by the catch-up
            await eventually(lambda: relay.health().status == "ok")
            woken = relay.metrics.chunk_notifications
            await work.end(await work.submit(1), timeout=30)
            assert relay.metrics.chunk_notifications > woken
            assert await _listeners(admin) == 1


@pytest.mark.case("C02")
async def test_a_drainer_whose_sessions_are_killed_again_and_again_is_woken_as_before_by_one_listener(
    database: TestDatabase, admin: Connection
) -> None:
    drainer = drainer_of(database, _deliver)
    # As the superuser, whose session lives on.
    ring = "select relay.outbox_enqueue($1, '1', p_tenant => 'acme')"
    await admin.fetchval("select relay.grant_binding(current_user, 'gateway', null, null)")
    async with drainer:
        delivered = 0
        for kills in (1, 2, 1):
            for _ in range(kills):
                await eventually(lambda: _listeners(admin))
                await _kill(admin, "relay_gateway_login")
            for _ in range(2):
                await admin.fetchval(ring, KIND)
                delivered += 1
                await eventually(lambda: drainer.total.delivered == delivered, timeout=30)  # noqa: B023
            await eventually(lambda: _listeners(admin))
            assert await _listeners(admin) == 1


# --- C03 --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def around_the_listen(monkeypatch: pytest.MonkeyPatch, happens: Any) -> AsyncIterator[list[int]]:
    """Do something before LISTEN is confirmed, and something between that and the first look."""
    sync, times = Listener._sync, [0]

    async def slow(self: Any, conn: Any) -> None:
        await happens()
        await sync(self, conn)
        await happens()
        times[0] += 2

    with monkeypatch.context() as patch:
        patch.setattr(Listener, "_sync", slow)
        yield times


@pytest.mark.case("C03")
async def test_chunks_committed_between_connecting_and_listening_are_found_at_once(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(gateway)
    ids: list[Any] = []

    async def submit() -> None:
        ids.append(await work.submit(1))

    relay = deaf_relay(CoreSettings.load(dsn=database.worker_dsn), poll_seconds=HOUR)
    async with around_the_listen(monkeypatch, submit) as times, running(relay):
        await eventually(lambda: times[0] == 2)
        for job_id in ids:
            await work.end(job_id, timeout=30)
    assert len(ids) == 2


@pytest.mark.case("C03")
async def test_events_committed_between_connecting_and_listening_are_found_at_once(
    database: TestDatabase, gateway: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def happens() -> None:
        await enqueue(gateway, "in between")

    drainer = drainer_of(database, _deliver)
    async with around_the_listen(monkeypatch, happens) as times, drainer:
        await eventually(lambda: times[0] and drainer.total.delivered == times[0])


# --- C05 --------------------------------------------------------------------------------------------------------------


@pytest.mark.case("C05")
@pytest.mark.parametrize("mode", ["swap", "sticky"])
async def test_behind_a_transaction_pooler_a_chunk_relay_polls_and_its_transactions_hold_together(
    database: TestDatabase, gateway: Any, admin: Connection, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await admin.execute("create table public.target (n bigint); grant insert on public.target to public")
    async with FakePooler.before(database.worker_dsn, mode=mode, sessions=6) as pooler:
        core = CoreSettings.load(dsn=pooler.dsn(database.worker_dsn), statement_cache_size=0, probe_timeout_seconds=0.3)
        relay = Relay(
            "erp",
            tenants=["acme", "zeta"],
            core=core,
            settings=RelaySettings(**QUICK),
            durable=DurableJobsSettings(lease_seconds=60.0, retry_base_seconds=0.01, **SELDOM),
        )

        @relay.chunk_handler(CHUNKS)
        async def handler(ctx: ChunkContext) -> str:
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.target values ($1)", ctx.seq)
                await ctx.save_checkpoint(ctx.tenant_id)
                if ctx.attempt == 1:
                    raise ValueError("rolled back, with its row and its checkpoint")
            return ctx.tenant_id

        everybody = [Work(gateway), Work(gateway, "zeta")]
        async with running(relay):
            await eventually(lambda: relay.health().listener == "polling_only", timeout=30)
            ids = {work.tenant: await work.submit(8) for work in everybody}
            for work in everybody:
                await work.end(ids[work.tenant], timeout=20)
        for work in everybody:
            chunk = await work.chunk(ids[work.tenant], 3)
            assert (chunk.outcome, chunk.checkpoint, chunk.attempts) == (work.tenant, work.tenant, 2)
    assert await admin.fetchval("select count(*) from public.target") == 16
    assert caplog.text.count("a transaction pooler stands before") == 1


@pytest.mark.case("C05")
async def test_behind_a_pooler_a_direct_listen_dsn_has_a_chunk_relay_woken(
    database: TestDatabase, gateway: Any
) -> None:
    async with FakePooler.before(database.worker_dsn, mode="swap") as pooler:
        core = CoreSettings.load(
            dsn=pooler.dsn(database.worker_dsn), listen_dsn=database.worker_dsn, statement_cache_size=0
        )
        relay, work = deaf_relay(core, poll_seconds=HOUR), Work(gateway)
        async with running(relay):
            await eventually(lambda: relay.metrics.chunk_claims_empty)
            await work.end(await work.submit(3))
            assert relay.health().listener == "listening"
