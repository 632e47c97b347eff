"""A cancellation ends client, drainer and relay at each of their waits, with either event loop.

The plainer pieces, on asyncio alone, are in tests/test_cancel_open.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio
import pytest

from dispatch_core.outbox import OutboxSettings
from gateway_sdk import GatewayClient, OutboxDrainer
from relay_sdk import DispatchJob, Reply, run_relays
from tests.support.cancelling import Moment
from tests.support.cut_everywhere import cut_everywhere
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import settings_for
from tests.support.relays import new_relay

Scenario: TypeAlias = Callable[[TestDatabase], Awaitable[None]]


async def client(database: TestDatabase) -> None:
    async with GatewayClient(settings=settings_for(database.gateway_dsn)):
        pass


async def waiting(database: TestDatabase) -> None:
    async with GatewayClient(settings=settings_for(database.gateway_dsn)) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("nobody", "Work", ttl=60)
        with anyio.move_on_after(0.02):
            await acme.wait(job_id)


async def draining(database: TestDatabase) -> None:
    drainer = OutboxDrainer(settings=OutboxSettings(drain_interval_sec=0.2), tenants=["acme"])

    @drainer.sink("told")
    async def sink(event: object) -> None: ...

    async with GatewayClient(settings=settings_for(database.gateway_dsn), outbox=drainer):
        pass


async def drainer_alone(database: TestDatabase) -> None:
    settings = OutboxSettings(drain_interval_sec=0.2)
    drainer = OutboxDrainer(database.gateway_dsn, settings=settings, tenants=["acme"])

    @drainer.sink("told")
    async def sink(event: object) -> None: ...

    async with drainer:
        pass


async def relay(database: TestDatabase) -> None:
    relay = new_relay(database)

    @relay.handler("Work")
    async def work(job: DispatchJob) -> Reply:
        return Reply()

    async def stop() -> None:
        await eventually(lambda: relay.health().status == "ok")
        relay.stop()

    async with anyio.create_task_group() as group:
        group.start_soon(stop)
        await run_relays([relay])
        group.cancel_scope.cancel()


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("moment", ["during", "at its end", "after it"])
@pytest.mark.parametrize(
    "scenario",
    [
        client,
        waiting,
        draining,
        drainer_alone,
        relay,
    ],
)
async def test_cut_at_any_moment_it_ends_as_cancelled_and_leaves_nothing(
    database: TestDatabase, scenario: Scenario, moment: Moment, uvloop: bool
) -> None:
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if uvloop:
        factory = pytest.importorskip("uvloop").new_event_loop
    assert await cut_everywhere(lambda: scenario(database), database, moment, loop_factory=factory) > 15
