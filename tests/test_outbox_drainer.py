"""The drainer: woken by commits, polling beneath, two batches a sink at a time, gone when told to (I3, I4, I7, I8)."""

from __future__ import annotations

from typing import Any

import anyio

from dispatch_core.outbox import Outbox, OutboxEvent, OutboxSettings
from gateway_sdk import DispatchSink, GatewayClient, OutboxDrainer, OutboxRoute
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import PlayedRelay, settings_for
from tests.support.outbox import KIND, states
from tests.support.protocol import TENANT, Connection

HOUR = 3600.0


def drainer_of(database: TestDatabase, interval: float = HOUR, **options: Any) -> OutboxDrainer:
    """Make a drainer that polls hardly ever, so that what it finds it was woken for."""
    settings = OutboxSettings(drain_interval_sec=interval, **options.pop("settings", {}))
    return OutboxDrainer(options.pop("dsn", database.gateway_dsn), settings=settings, **options)


async def test_an_event_is_delivered_when_it_is_committed_without_waiting_for_the_poll(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    drainer = drainer_of(database)
    came = anyio.Event()

    @drainer.sink(KIND)
    async def sink(event: OutboxEvent) -> None:
        came.set()

    async with drainer:
        async with gateway.transaction():
            await Outbox.enqueue(gateway, KIND, 7, tenant=TENANT)
        with anyio.fail_after(10):
            await came.wait()

        async def gone() -> bool:
            return await states(admin) == {}

        await eventually(gone)


async def test_a_committed_event_becomes_a_dispatch_job_through_the_clients_drainer(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    drainer = OutboxDrainer(settings=OutboxSettings(drain_interval_sec=HOUR))
    client = GatewayClient(settings=settings_for(database.gateway_dsn), outbox=drainer)
    drainer.set_default_sink(DispatchSink(client, {KIND: OutboxRoute("erp", "Post", ttl=60)}))
    async with client:
        assert client.outbox is drainer
        async with gateway.transaction():
            event_id = await Outbox.enqueue(gateway, KIND, {"order": 7}, tenant=TENANT)
        relay = PlayedRelay(worker, TENANT, "erp")

        async def jobs() -> Any:
            return await relay.work()

        (job,) = await eventually(jobs)
        assert (job.job_id, job.operation, job.json()) == (DispatchSink.job_id(event_id), "Post", {"order": 7})
        result = await client.tenant(TENANT).wait(DispatchSink.job_id(event_id), timeout=10)
        assert result.is_terminal
