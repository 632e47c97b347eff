"""The dispatch sink: an event becomes one job, however often and in whatever company it is delivered (C25)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from dispatch_core.errors import ConnectionLostError
from dispatch_core.outbox import DrainReport, Outbox, OutboxEvent, OutboxPark
from gateway_sdk import DispatchSink, GatewayClient, OutboxRoute
from gateway_sdk.lane_enqueue import Enqueueing
from tests.support.databases import TestDatabase
from tests.support.gateway import settings_for
from tests.support.outbox import KIND, make_stale, outbox, take, write
from tests.support.protocol import TENANT, Connection

ROUTES = {KIND: OutboxRoute("erp", "Post", ttl=60, max_attempts=3, headers={"a": "b"})}
REQUEST = "relay.s2r_relay_dispatch_request"


def _event(number: int, tenant: str = TENANT, payload: Any = None) -> OutboxEvent:
    return OutboxEvent(UUID(int=number), tenant, KIND, None, payload or {"n": number}, datetime.now(UTC))


async def _jobs(admin: Connection) -> set[tuple[str, UUID]]:
    rows = await admin.fetch(f"select tenant_id, job_id from {REQUEST}")
    queued = await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue")
    assert queued == len(rows)
    return {(row["tenant_id"], UUID(str(row["job_id"]))) for row in rows}


def _ids(events: Sequence[OutboxEvent]) -> set[tuple[str, UUID]]:
    return {(event.tenant_id, DispatchSink.job_id(event.event_id, event.kind)) for event in events}


@pytest.mark.case("C25")
async def test_delivered_twice_an_event_makes_one_job_also_where_part_of_a_batch_is_new(
    database: TestDatabase, admin: Connection
) -> None:
    events = [_event(n) for n in range(1, 30)]
    async with GatewayClient(settings=settings_for(database.gateway_dsn)) as client:
        sink = DispatchSink(client, ROUTES)
        for given in (events[:1], events[:10], events[5:], events[3:4], events):
            assert await sink.deliver_many(given) == [None] * len(given)
        assert await sink.deliver_many([]) == []
        await sink(events[0])
    assert await _jobs(admin) == _ids(events)
    rows = await admin.fetch(f"select distinct relay_id, operation, request_headers, max_attempts from {REQUEST}")
    assert [tuple(row) for row in rows] == [("erp", "Post", '{"a": "b"}', 3)]


@pytest.mark.case("C25")
async def test_a_drain_that_died_before_its_settling_leaves_jobs_that_the_next_one_finds(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """One of them has ended meanwhile: its job is not made a second time."""
    ids = await write(gateway, 1, 2, 3)
    async with GatewayClient(settings=settings_for(database.gateway_dsn)) as client:
        sink = DispatchSink(client, ROUTES)
        await sink.deliver_many(await take(gateway, by="dead"))
        assert await client.tenant(TENANT).mark_expired(DispatchSink.job_id(ids[0], KIND)) == 1
        await make_stale(admin)
        async with outbox(database, sink) as drainer:
            reports = [await drainer.drain() for _ in range(3)]
    assert [(report.claimed, report.delivered) for report in reports] == [(1, 1)] * 3, "what was stale comes alone"
    assert await admin.fetchval(f"select count(*) from {REQUEST}") == 3
    assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue") == 2
    assert await admin.fetchval("select count(*) from relay.outbox") == 0


async def test_a_batch_of_one_tenant_is_one_statement(database: TestDatabase, gateway: Connection) -> None:
    await write(gateway, *range(50))
    async with GatewayClient(settings=settings_for(database.gateway_dsn)) as client:
        async with outbox(database, DispatchSink(client, ROUTES)) as drainer:
            assert await drainer.drain(50) == DrainReport(claimed=50, delivered=50)
        assert (client.health().enqueued, client.health().enqueue_statements) == (50, 1)


async def test_tenants_kinds_and_sizes_do_not_matter_to_a_batch(database: TestDatabase, admin: Connection) -> None:
    events = [_event(n, f"tenant-{n % 3}") for n in range(1, 31)]
    events += [_event(40, payload="x" * 300), _event(41, payload="y" * 300), _event(42, payload="z" * 5000)]
    events.append(OutboxEvent(UUID(int=50), TENANT, "another", None, 1, datetime.now(UTC)))
    settings = settings_for(database.gateway_dsn, enqueue_batch_bytes=1000)
    settings = settings.model_copy(update={"core": settings.core.model_copy(update={"max_body_bytes": 2000})})
    async with GatewayClient(settings=settings) as client:
        answers = await DispatchSink(client, ROUTES).deliver_many(events)
    assert answers[:32] == [None] * 32
    assert [type(answer) for answer in answers[32:]] == [OutboxPark, OutboxPark]
    assert await _jobs(admin) == _ids(events[:32])


async def test_what_fails_as_one_statement_is_tried_as_single_calls_are(
    database: TestDatabase, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply was lost, say: what is stored is stored once."""
    store = Enqueueing.store_together

    async def lose_the_reply(self: Enqueueing, *args: Any) -> None:
        await store(self, *args)
        raise ConnectionLostError("lost")

    monkeypatch.setattr(Enqueueing, "store_together", lose_the_reply)
    events = [_event(n) for n in range(1, 6)]
    async with GatewayClient(settings=settings_for(database.gateway_dsn)) as client:
        assert await DispatchSink(client, ROUTES).deliver_many(events) == [None] * 5
    assert await _jobs(admin) == _ids(events)


async def test_a_tenant_that_the_client_may_not_serve_fails_alone(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """As tenancy errors may be mended by a grant, its events are not given up."""
    async with gateway.transaction():
        await Outbox.enqueue(gateway, KIND, 1, tenant=TENANT)
    events = [_event(1), _event(2, "globex"), _event(3)]
    await admin.execute("update relay.role_binding set tenant_id = $1 where kind = 'gateway'", TENANT)
    async with GatewayClient(settings=settings_for(database.gateway_dsn)) as client:
        one, two, three = await DispatchSink(client, ROUTES).deliver_many(events)
    assert (one, three) == (None, None)
    assert type(two).__name__ == "TenancyDeniedError"
    assert await _jobs(admin) == _ids([events[0], events[2]])


def test_a_jobs_id_is_made_of_the_events_and_is_no_other_events() -> None:
    given = UUID("01a22912-facc-72a6-9c41-0881c35f8886")
    made = DispatchSink.job_id(given, KIND)
    assert made == DispatchSink.job_id(UUID(str(given)), KIND) == UUID(str(made))
    assert isinstance(made, UUID)
    assert (made.version, made.variant) == (given.version, given.variant)
    assert made.bytes[:6] == given.bytes[:6], "it stands where the event stood in time"
    assert len({DispatchSink.job_id(UUID(int=given.int ^ bit), KIND) for bit in (0, 1, 1 << 40, 1 << 63)}) == 4
    assert DispatchSink.job_id(made, KIND) not in (given, made)
