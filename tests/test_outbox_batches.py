"""What a whole batch has in common: a row of a claim, one value for all, one call of a sink; and what that may cost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from dispatch_core import codec
from dispatch_core.dev.logins import GATEWAY_LOGIN
from dispatch_core.outbox import Outbox, OutboxEvent, OutboxMessage
from dispatch_core.outbox_groups import Groups
from dispatch_core.outbox_models import ClaimedEvent, ClaimedEvents, DueWork, SettledEvent, Verdict
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.databases import TestDatabase
from tests.support.high_counters import nth
from tests.support.outbox import KIND, make_due, outbox, take, take_all, tell, write
from tests.support.plans import explained
from tests.support.protocol import ME, OUTBOX, TENANT, Connection


class ManySink:
    """A sink of many, which delivers them."""

    async def __call__(self, event: OutboxEvent) -> None:
        raise AssertionError("given one by one")

    async def deliver_many(self, events: Sequence[OutboxEvent]) -> Sequence[Exception | None]:
        return [None] * len(events)


# --- one value for all --------------------------------------------------------------------------


async def test_a_claim_tells_of_each_event_its_own_whatever_others_have(admin: Connection, gateway: Connection) -> None:
    """Keys of some, fences and attempts that differ, a payload each, in the order of the claim."""
    await write(gateway, "failed once")
    await tell(gateway, await take(gateway), "failed", error="e", delay=0)
    async with gateway.transaction():
        messages = [OutboxMessage(KIND, n, None if n % 2 else f"k{n}") for n in range(6)]
        ids = await Outbox.enqueue_many(gateway, messages, tenant=TENANT, notify=False)
    await make_due(admin)
    claimed = await take_all(gateway, [(TENANT, KIND)])
    told = [(e.payload, e.key, e.fence, e.attempts) for e in claimed.events]
    assert told == [("failed once", None, nth(3), 1), *((n, None if n % 2 else f"k{n}", nth(1), 0) for n in range(6))]
    assert [event.event_id for event in claimed.events[1:]] == ids
    stored = {row["event_id"]: row for row in await admin.fetch(f"select * from {OUTBOX}")}
    assert all(event.created_at == stored[event.event_id]["created_at"] for event in claimed.events)
    assert claimed.last == {(TENANT, KIND): max(row["available_at"] for row in stored.values())}


@pytest.mark.parametrize(
    ("outcome", "state"), [("delivered", "gone"), ("failed", "ready"), ("park", "parked"), ("release", "ready")]
)
async def test_one_outcome_for_all_of_several_tenants_leaves_alone_what_is_stale(
    admin: Connection, gateway: Connection, outcome: Any, state: str
) -> None:
    for tenant in ("globex", TENANT, "initech"):
        await write(gateway, "one", "two", "three", tenant=tenant)
    groups = [(tenant, KIND) for tenant in ("initech", TENANT, "globex")]
    events = (await take_all(gateway, groups)).events
    stale = next(event for event in events if event.tenant_id == TENANT and event.payload == "two")
    await tell(gateway, [stale], "release")
    expected = [("stale", "ready") if event is stale else ("applied", state) for event in events]
    assert await tell(gateway, events, outcome) == expected
    [untouched] = await admin.fetch(f"select state, attempts from {OUTBOX} where event_id = $1", stale.event_id)
    assert tuple(untouched) == ("ready", 0)


@pytest.mark.parametrize("outcome", ["delivered", "failed", "park", "release"])
async def test_an_outcome_that_all_have_is_as_good_as_one_each(
    admin: Connection, gateway: Connection, outcome: Any
) -> None:
    """By the function itself: what one value says for all, and what a value each says."""
    for each in (False, True):
        await write(gateway, 1, 2)
        events = await take(gateway)
        rows = await gateway.fetch(
            "select outcome, state, ns from relay.outbox_settle($1, $2, $3, $4, $5, $6, null, null, 25)",
            ME, [TENANT], [2], [event.event_id for event in events], [nth(1)] * (2 if each else 1),
            [outcome] * 2 if each else [outcome],
        )  # fmt: skip
        [(applied, _, ns)] = rows
        assert applied == "applied"
        assert ns is None or sorted(ns) == [1, 2]
        assert await admin.fetchval(f"select count(*) from {OUTBOX} where state = 'claimed'") == 0
        await admin.execute(f"delete from {OUTBOX}")


async def test_an_event_that_is_there_twice_is_delivered_once(admin: Connection, gateway: Connection) -> None:
    await write(gateway, "one", "two")
    one, two = await take(gateway)
    assert await tell(gateway, [one, one, two]) == [("applied", "gone"), ("stale", "gone"), ("applied", "gone")]
    assert await admin.fetchval(f"select count(*) from {OUTBOX}") == 0


# --- payloads ------------------------------------------------------------------------------------


def test_a_payload_is_decoded_when_it_is_looked_at_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def decode(text: str) -> Any:
        decoded.append(text)
        return codec.decode_payload(text)

    monkeypatch.setattr("dispatch_core.outbox_models.decode_payload", decode)
    event = ClaimedEvent(UUID(int=1), TENANT, KIND, None, '{"a": null}', None, 0, 1)  # type: ignore[arg-type]
    assert event.payload_text == '{"a": null}'
    assert decoded == []
    assert event.payload == {"a": None}
    assert event.payload is event.payload
    assert len(decoded) == 1


def test_an_event_made_by_hand_has_its_payload_as_text_too() -> None:
    """As who tests a sink makes one."""
    event = OutboxEvent(UUID(int=1), TENANT, KIND, None, {"a": 10**30}, None)  # type: ignore[arg-type]
    assert (event.payload, event.attempts) == ({"a": 10**30}, 0)
    assert codec.decode_payload(event.payload_text) == {"a": 10**30}
    assert "payload" not in repr(event)


# --- what a batch costs -------------------------------------------------------------------------


@pytest.mark.parametrize("tenants", [1, 3])
async def test_a_drained_batch_is_two_statements_and_a_row_for_each_group(
    database: TestDatabase, gateway: Connection, tenants: int
) -> None:
    """However many events it has; the search for groups is made once a second beside that."""
    names = [f"tenant-{n}" for n in range(tenants)]
    for name in names:
        await write(gateway, *range(60), tenant=name)
    async with outbox(database, ManySink(), tenants=names) as drainer:
        asked: list[tuple[str, int]] = []
        fetch = drainer.verbs._fetch

        async def counting(sql: str, *args: object) -> list[Any]:
            rows = await fetch(sql, *args)
            asked.append((sql, len(rows)))
            return rows

        drainer.verbs._fetch = counting
        for _ in range(2):
            assert (await drainer.drain(30 * tenants)).delivered == 30 * tenants
    verbs = [next(verb for verb in ("due", "claim", "settle") if f"outbox_{verb}" in sql) for sql, _ in asked]
    assert verbs == ["due", "claim", "settle", "claim", "settle"]
    # A claim may say `more` of each group beside.
    assert all(rows <= 2 * tenants for verb, (_, rows) in zip(verbs, asked, strict=True) if verb == "claim")
    assert all(rows == tenants for verb, (_, rows) in zip(verbs, asked, strict=True) if verb == "settle")


async def test_a_claim_touches_the_pages_of_its_own_events_and_few_others(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """Buffers touched per event, of a claim and of its settling: what each row and index entry cost, and no more."""
    await admin.execute(f"alter table {OUTBOX} set (autovacuum_enabled = off)")
    await write(gateway, *range(1000))
    async with explained(database, GATEWAY_LOGIN) as (conn, plans):
        verbs = OutboxRepository(conn)
        touched: dict[str, float] = {}
        for _ in range(3):
            plans.take()
            events = (await verbs.claim([(TENANT, KIND)], claimed_by=ME, limit=200)).events
            touched["claim"] = sum(plan.blocks for plan in plans.take() if "relay.outbox o" in plan.text) / 200
            settled, _ = await verbs.settle(
                [(event, Verdict("delivered")) for event in events], claimed_by=ME, max_attempts=25
            )
            touched["settle"] = sum(plan.blocks for plan in plans.take() if "relay.outbox o" in plan.text) / 200
            assert settled == [SettledEvent("applied", "gone")] * 200
    # A claim: the entry and the row, to lock; the row's new version and its entry in each of two indexes. A settling:
    # the probe of the key, the row, to lock and to delete.
    assert touched["claim"] < 11, touched
    assert touched["settle"] < 9.5, touched


async def test_a_delay_of_a_batch_stays_with_its_event(admin: Connection, gateway: Connection) -> None:
    await write(gateway, "now", "later")
    now, later = await take(gateway)
    told = [(now, Verdict("failed", "e", timedelta(0))), (later, Verdict("failed", "e", timedelta(hours=1)))]
    await OutboxRepository(gateway).settle(told, claimed_by=ME, max_attempts=25)
    assert [event.payload for event in await take(gateway)] == ["now"]


@pytest.mark.invariant("I10")
def test_of_a_backlog_a_claim_looks_again_at_no_more_than_a_tenth_of_a_second_of_claiming() -> None:
    """What an old transaction keeps dead there every claim reads: of half a second it was more than a claim takes."""
    group = (TENANT, KIND)
    groups = Groups()
    groups.found(DueWork([group], None, 0, 0, 0, {}, None), False, 0.0, 0.0)
    behind: list[int] = []
    for n in range(1, 100):
        now = n * 0.01
        [position] = (pick := groups.pick(100, now)).positions
        if position:
            behind.append(n - position)
        last = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=n)
        groups.claimed(pick, ClaimedEvents([], [], {group}, {group: last}), 0.01, now)
    assert max(behind[10:]) <= 12
    assert len(behind) > 80, "most of them are not from the beginning"
