"""Turns of tenants and kinds: whoever has an event is served, whatever the others have (D57)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dispatch_core.outbox_groups import Groups
from dispatch_core.outbox_models import ClaimedEvents, DueWork, Group
from tests.support.databases import TestDatabase
from tests.support.outbox import Recorder, make_stale, outbox, take, write
from tests.support.protocol import Connection


def _tenants(sink: Recorder) -> Counter[str]:
    return Counter(event.tenant_id for event in sink.events)


@pytest.mark.parametrize(("batch", "tenants", "drains"), [(1, 2, 20), (10, 12, 12), (3, 20, 40)])
async def test_a_batch_smaller_than_the_number_of_tenants_serves_each_of_them_alike(
    database: TestDatabase, gateway: Connection, batch: int, tenants: int, drains: int
) -> None:
    names = [f"t{n:02}" for n in range(tenants)]
    for name in names:
        await write(gateway, *range(30), tenant=name)
    sink = Recorder()
    async with outbox(database, sink) as drainer:
        for _ in range(drains):
            assert (await drainer.drain(batch)).claimed == batch
    served = [_tenants(sink)[name] for name in names]
    assert min(served) >= batch * drains / tenants / 2, served


async def test_big_payloads_of_one_tenant_leave_room_for_the_others(
    database: TestDatabase, gateway: Connection
) -> None:
    """With the settings that nobody changes: what one tenant has fills many claims by its bytes alone."""
    for tenant, count in (("a", 60), ("b", 1)):
        for _ in range(0, count, 20):
            await write(gateway, *["x" * 400_000] * min(count, 20), tenant=tenant)
    sink = Recorder()
    async with outbox(database, sink) as drainer:
        await drainer.drain()
        assert _tenants(sink) == {"a": 19, "b": 1}


async def test_a_payload_above_its_share_is_delivered_when_its_tenant_leads(
    database: TestDatabase, gateway: Connection
) -> None:
    for tenant in "abc":
        await write(gateway, *["x" * 700_000] * 4, tenant=tenant)
    sink = Recorder()
    async with outbox(database, sink, max_batch_bytes=1_000_000) as drainer:
        for _ in range(3):
            assert (await drainer.drain()).claimed == 1
    assert _tenants(sink) == {"a": 1, "b": 1, "c": 1}


async def test_suspect_events_of_one_tenant_take_every_other_claim_at_most(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    await write(gateway, *range(30), tenant="a")
    await take(gateway, 30, tenant="a", by="dead")
    await make_stale(admin)
    await write(gateway, *range(3), tenant="b")
    sink = Recorder()
    async with outbox(database, sink) as drainer:
        for _ in range(2):
            await drainer.drain()
    assert _tenants(sink) == {"a": 1, "b": 3}


async def test_a_suspect_event_is_delivered_beside_a_backlog_of_another_tenant(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    await write(gateway, "suspect", tenant="b")
    await take(gateway, 1, tenant="b", by="dead")
    await make_stale(admin)
    await write(gateway, *range(1000), tenant="a")
    sink = Recorder()
    async with outbox(database, sink) as drainer:
        for _ in range(2):
            await drainer.drain()
    assert _tenants(sink) == {"a": 100, "b": 1}


def _found(groups: Groups, names: list[Group]) -> None:
    groups.found(DueWork(names, None, 0, 0, 0, {}, None), False, 0.0, 0.0)


@pytest.mark.parametrize("count", [2, 16, 17, 32, 33, 50])
def test_of_any_number_of_groups_each_leads_as_often(count: int) -> None:
    names = [(f"t{n:02}", "k") for n in range(count)]
    groups = Groups()
    _found(groups, names)
    led: Counter[Any] = Counter()
    for n in range(12 * count):
        pick = groups.pick(1, float(n))
        assert len(set(pick.groups)) == min(count, 16)
        led[pick.groups[0]] += 1
        groups.claimed(pick, ClaimedEvents([], [], set(names), {}), 0.0, float(n))
    assert set(led) == set(names)
    assert max(led.values()) - min(led.values()) <= 4, led


def test_a_group_that_comes_and_goes_does_not_come_before_those_that_stay() -> None:
    """As the next event of a key does: its group is known anew with each batch that is settled."""
    comes, stays = ("a", "k"), ("b", "k")
    groups = Groups()
    _found(groups, [comes, stays])
    led: Counter[Any] = Counter()
    for n in range(10):
        pick = groups.pick(1, float(n))
        led[pick.groups[0]] += 1
        groups.claimed(pick, ClaimedEvents([], [], {stays}, {}), 0.0, float(n))
        groups.opened([comes])
    assert led[stays] >= 5, led
