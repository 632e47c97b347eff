"""Edges of the outbox: events that are written one by one, as most writers do; and what a claim goes by."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from dispatch_core.outbox import Outbox
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.outbox import KIND, states, take, take_all, write
from tests.support.protocol import ME, OUTBOX, TENANT, Connection


async def _write_one(gateway: Connection, payload: Any, key: str | None = "k") -> None:
    async with gateway.transaction():
        await Outbox.enqueue(gateway, KIND, payload, key=key, tenant=TENANT)


async def test_an_event_behind_another_of_its_key_is_stored_as_waiting(admin: Connection, gateway: Connection) -> None:
    for payload, key in (("1", "k"), ("2", "k"), ("other key", "l"), ("no key", None)):
        await _write_one(gateway, payload, key)
    assert await states(admin) == {"1": "ready", "2": "waiting", "other key": "ready", "no key": "ready"}


async def test_its_place_is_above_the_last_of_its_key_though_the_clock_was_set_back(
    admin: Connection, gateway: Connection
) -> None:
    await _write_one(gateway, "1")
    await admin.execute(f"update {OUTBOX} set seq = seq + 3600000000")
    for payload in ("2", "3"):
        await _write_one(gateway, payload)
    places = await admin.fetch(f"select payload #>> '{{}}' as payload from {OUTBOX} order by seq")
    assert [row["payload"] for row in places] == ["1", "2", "3"]


async def test_a_claim_takes_what_has_been_due_for_longest_whenever_it_was_written(
    admin: Connection, gateway: Connection
) -> None:
    ids = await write(gateway, 0, 1, 2)
    for number, minutes in ((0, 1), (1, 3), (2, 2)):
        moved = f"update {OUTBOX} set available_at = now() - $1::interval where event_id = $2"
        await admin.execute(moved, timedelta(minutes=minutes), ids[number])
    assert [(await take(gateway, 1))[0].event_id for _ in ids] == [ids[1], ids[2], ids[0]]
    assert await take(gateway) == []


async def test_a_claim_takes_events_of_its_kinds_alone(admin: Connection, gateway: Connection) -> None:
    for kind in ("a", "b", "c"):
        await write(gateway, kind, kind=kind)
    assert [event.payload_text for event in await take(gateway, kind="b")] == ['"b"']
    claimed = await take_all(gateway, [(TENANT, "c"), (TENANT, "b")])
    assert [(event.kind, event.payload_text) for event in claimed.events] == [("c", '"c"')]
    assert await states(admin) == {"a": "ready", "b": "claimed", "c": "claimed"}


async def test_how_long_ago_an_event_was_first_tried_counts_from_its_first_claim_and_no_later_one(
    admin: Connection, gateway: Connection
) -> None:
    (event_id,) = await write(gateway)
    for _ in range(2):
        assert len(await take(gateway)) == 1
        assert await OutboxRepository(gateway).unclaim([TENANT], ME) == 1
        await admin.execute(f"update {OUTBOX} set first_claimed_at = first_claimed_at - interval '2 days'")
    claimed = await take_all(gateway, [(TENANT, KIND)])
    assert (claimed.events, claimed.expired) == ([], [(TENANT, event_id)]), "four days ago, where three are allowed"
