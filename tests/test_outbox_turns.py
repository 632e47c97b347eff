"""Turns of tenants and kinds: whoever has an event is served, whatever the others have (D57)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dispatch_core.outbox import Outbox, OutboxSettings
from dispatch_core.outbox_groups import Groups, Round
from dispatch_core.outbox_models import ClaimedEvents, DueWork, Group
from dispatch_core.outbox_repository import OutboxRepository
from gateway_sdk import OutboxDrainer
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.high_counters import nth
from tests.support.outbox import KIND, Recorder, make_stale, outbox, take, tell, tidy, write
from tests.support.protocol import OUTBOX, TENANT, Connection, connected


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


# --- kinds of other drainers --------------------------------------------------------------------


async def test_a_turn_that_comes_to_a_kind_without_a_sink_is_left_for_others(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    await write(gateway, "1", kind="mine", key="k")
    await write(gateway, "2", kind="theirs", key="k")
    async with Outbox(database.gateway_dsn, sinks={"mine": Recorder()}) as drainer:
        assert (await drainer.drain()).delivered == 1
        assert not drainer.knows_more
        assert (await drainer.drain()).claimed == 0
    assert await admin.fetchval(f"select (state, attempts, fence)::text from {OUTBOX}") == f"(ready,0,{nth(0)})"


@pytest.mark.parametrize("outcome", ["delivered", "park"])
@pytest.mark.parametrize("then", ["a", "b"])
async def test_a_turn_that_comes_to_a_kind_rings_where_none_of_that_kind_is_settled(
    database: TestDatabase, gateway: Connection, outcome: str, then: str
) -> None:
    await write(gateway, "1", kind="a", key="k")
    await write(gateway, "2", kind=then, key="k")
    events = await take(gateway, kind="a")
    async with _listening(database) as heard:
        await tell(gateway, events, outcome, error="no")
    assert len(heard) == (2 if then == "b" else 0)


@pytest.mark.parametrize("kinds", [["a"], ["a", "b"], None])
async def test_a_lost_turn_that_is_found_rings_where_its_kind_is_not_the_finders(
    database: TestDatabase, gateway: Connection, admin: Connection, kinds: list[str] | None
) -> None:
    await write(gateway, "1", kind="a", key="k")
    await write(gateway, "2", kind="b", key="k")
    await admin.execute(f"delete from {OUTBOX} where kind = 'a'")
    async with _listening(database) as heard:
        assert (await tidy(gateway, kinds=kinds)).promoted == 1
    assert len(heard) == (2 if kinds == ["a"] else 0)


@asynccontextmanager
async def _listening(database: TestDatabase) -> AsyncIterator[list[str]]:
    """Listen for events of the tenant, and of all, in the block."""
    heard: list[str] = []
    async with connected(database.gateway_dsn) as listener:
        for tenant in (TENANT, None):
            name = await OutboxRepository(listener).channel(tenant)
            await listener.add_listener(name, lambda _, __, channel, ___: heard.append(channel))
        yield heard
        await listener.fetchval("select 1")


# --- searches -----------------------------------------------------------------------------------


async def test_an_event_behind_a_thousand_tenants_with_delayed_ones_is_drained(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    """One search reaches no further than a thousand groups: a drain that finds nothing due there goes on."""
    await gateway.execute(
        """
        select relay.outbox_enqueue(
          'k', '1', p_tenant => to_char(i, 'FM0000'), p_notify => false,
          p_delay => case i when 1000 then interval '1 minute' else '1 hour' end)
        from generate_series(1, 1001) i
        """
    )
    await write(gateway, "due", tenant="zz")
    sink = Recorder()
    async with outbox(database, sink) as drainer:
        assert (await drainer.drain()).delivered == 1
    async with outbox(database, sink) as drainer:
        assert (await drainer.drain()).claimed == 0
        assert 50 < (drainer.next_due_in() or 0) <= 60, "of all tenants"


async def test_of_one_tenant_all_kinds_are_found_together(gateway: Connection) -> None:
    for kind in "abc":
        await write(gateway, 1, kind=kind)
    verbs = OutboxRepository(gateway)
    for kinds in (None, ["a", "b", "c"]):
        work = await verbs.due(limit=2, kinds=kinds)
        assert [kind for _, kind in work.due] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("behind", "ends", "parts"),
    [
        (None, [None], 1),
        (None, ["c", "f", "b"], 3),
        (None, ["c", "c"], 2),
        ("c", ["f", "b", "d"], 3),
        ("c", ["f", "c"], 2),
        ("c", ["b", "a"], 2),
        ("c", ["c"], 1),
        ("c", ["b", "e"], 2),
    ],
)
def test_a_search_in_parts_is_over_when_it_has_come_round(
    behind: str | None, ends: list[str | None], parts: int
) -> None:
    search = Round(behind)
    assert [search.is_over(end) for end in ends] == [False] * (parts - 1) + [True]


# --- lost turns ---------------------------------------------------------------------------------


def test_after_a_search_that_has_not_looked_everywhere_for_lost_turns_the_pause_ends_when_one_may() -> None:
    groups = Groups()

    def search(now: float, looked: bool, **look: str) -> None:
        groups.found(DueWork([], None, 0, 0, 0, look, None), looked, 0.0, now)

    search(0.0, looked=True)
    assert groups.later_in(0.25) is None
    search(0.5, looked=False)
    assert groups.later_in(0.5) == 0.5
    search(1.0, looked=True, a="k2")
    assert groups.later_in(1.0) == 1.0
    search(2.0, looked=True, a="")
    assert groups.later_in(2.0) is None


async def test_a_turn_that_is_lost_just_after_a_search_is_found_without_the_poll(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    """A wake-up finds nothing then, and the search that it is has not looked for lost turns: another follows."""
    sink = Recorder()
    drainer = OutboxDrainer(database.gateway_dsn, settings=OutboxSettings(drain_interval_sec=3600.0), default_sink=sink)
    async with drainer, connected(database.gateway_dsn) as writer:
        await write(gateway, "1", key="k")
        await writer.execute("begin")
        await Outbox.enqueue(writer, KIND, "2", tenant=TENANT, key="k")
        async with gateway.transaction():
            await Outbox.enqueue(gateway, KIND, "wakes", tenant=TENANT)
        await eventually(lambda: "1" in sink.payloads)

        async def are_settled() -> bool:
            # The committed ones are settled: the turn is lost when the other comes.
            return not await admin.fetchval(f"select exists (select from {OUTBOX})")

        await eventually(are_settled)
        await writer.execute("commit")
        await eventually(lambda: "2" in sink.payloads)


async def test_claims_that_are_taken_back_together_are_a_microsecond_apart(
    gateway: Connection, admin: Connection
) -> None:
    """As those of one statement are: else the rest of them lay at the cursor that the first ones have set."""
    await write(gateway, 1, 2, 3)
    await take(gateway, by="dead")
    await make_stale(admin)
    assert (await tidy(gateway)).reclaimed == 3
    assert await admin.fetchval(f"select count(distinct available_at) from {OUTBOX} where available_at <= now()") == 3
