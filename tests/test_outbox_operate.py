"""What people do with events: look, retry, park, purge; each within its tenant, each counted honestly."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from dispatch_core.errors import InvalidInputError, TenancyDeniedError, TenancyUnboundError
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.outbox import KIND, make_stale, states, take, tell, tidy, write
from tests.support.protocol import OUTBOX, TENANT, Connection, connected, logins


async def test_retry_has_parked_events_begin_anew_and_ends_pauses_and_rings(
    database: TestDatabase, admin: Connection, gateway: Connection, operator: Connection
) -> None:
    ids = await write(gateway, "parked", "pausing", "due", "claimed")
    await write(gateway, "first", "waiting", key="k", kind="other")
    events = await take(gateway)
    await tell(gateway, events[:1], "failed", error="no", max_attempts=1)
    await tell(gateway, events[1:2], "failed", error="no", delay=60)
    await tell(gateway, events[2:3], "release")
    heard: list[str] = []
    async with connected(database.gateway_dsn) as listener:
        await listener.add_listener(
            await OutboxRepository(listener).channel(TENANT), lambda _, __, channel, ___: heard.append(channel)
        )
        verbs = OutboxRepository(operator)
        assert await verbs.retry(TENANT, [*ids, ids[0], uuid4()]) == {ids[0], ids[1]}
        await eventually(lambda: heard)
        assert await verbs.retry(TENANT, ids) == set()
        assert await verbs.retry("globex", ids) == set()
        assert await verbs.retry(TENANT, []) == set()
    row = await verbs.show(TENANT, ids[0])
    assert row is not None
    assert (row["state"], row["attempts"], row["last_error"], row["first_claimed_at"]) == ("ready", 0, "no", None)
    again = await take(gateway)
    assert [event.payload_text for event in again] == ['"due"', '"parked"', '"pausing"']
    assert [event.attempts for event in again] == [0, 0, 1]


@pytest.mark.case("C24")
async def test_park_gives_up_any_event_also_one_on_its_way_whose_drainer_is_then_too_late(
    admin: Connection, gateway: Connection, operator: Connection
) -> None:
    (claimed, ready) = await write(gateway, "claimed", "ready")
    (_, waiting, _) = await write(gateway, "leader", "waiting", "last", key="k")
    (event,) = await take(gateway, 1)
    verbs = OutboxRepository(operator)
    assert await verbs.park(TENANT, [ready, claimed, waiting, uuid4()], "a person says so") == {ready, claimed, waiting}
    assert await verbs.park(TENANT, [claimed], "again") == set()
    assert await verbs.park("globex", [claimed], "foreign") == set()
    assert await tell(gateway, [event]) == [("stale", "parked")]
    assert await states(admin) == {
        "claimed": "parked", "ready": "parked", "waiting": "parked", "leader": "ready", "last": "waiting",
    }  # fmt: skip
    row = await verbs.show(TENANT, claimed)
    assert row is not None
    assert (row["attempts"], row["last_error"]) == (0, "a person says so")
    (leader,) = await take(gateway)
    assert await verbs.park(TENANT, [leader.event_id], "no") == {leader.event_id}
    assert (await states(admin))["last"] == "ready"
    with pytest.raises(InvalidInputError):
        await verbs.park(TENANT, [ready], "")


async def test_purge_removes_parked_events_alone_the_oldest_first(
    admin: Connection, gateway: Connection, operator: Connection
) -> None:
    await write(gateway, "old", "older", "new", "kept")
    events = await take(gateway, 3)
    await tell(gateway, events, "park", error="no")
    for payload, age in (("old", 20), ("older", 30)):
        await admin.execute(
            f"update {OUTBOX} set parked_at = now() - $1::interval where payload = to_jsonb($2::text)",
            timedelta(days=age),
            payload,
        )
    verbs = OutboxRepository(operator)
    assert await verbs.purge(TENANT, timedelta(days=10), limit=1) == 1
    assert set(await states(admin)) == {"old", "new", "kept"}
    assert await verbs.purge("globex", timedelta(0)) == 0
    assert await verbs.purge(TENANT, timedelta(days=10), kind="another") == 0
    assert await verbs.purge(TENANT, timedelta(days=10)) == 1
    assert await verbs.purge(TENANT, timedelta(0)) == 1
    assert await states(admin) == {"kept": "ready"}
    with pytest.raises(InvalidInputError):
        await verbs.purge(TENANT, timedelta(days=-1))


async def test_status_list_and_show_tell_what_there_is(gateway: Connection, operator: Connection) -> None:
    ids = await write(gateway, "a", "b", "c")
    await write(gateway, "later", delay=60)
    keyed = await write(gateway, "x", "y", key="k", kind="other")
    events = await take(gateway, 2)
    await tell(gateway, events[:1], "park", error="no")
    verbs = OutboxRepository(operator)
    assert await verbs.tenants() == [TENANT]
    first, second = await verbs.status(TENANT)
    assert list(first.values())[:6] == [KIND, 1, 1, 0, 1, 1]
    assert first["oldest"] > timedelta(0)
    assert list(second.values())[:6] == ["other", 1, 0, 1, 0, 0]
    assert await verbs.status("globex") == []

    everything = await verbs.list_events(TENANT)
    assert [row["event_id"] for row in everything] == [
        row["event_id"] for row in sorted(everything, key=lambda row: row["event_id"], reverse=True)
    ]
    assert len(everything) == 6
    page = await verbs.list_events(TENANT, limit=2)
    assert [*page, *await verbs.list_events(TENANT, limit=10, before=page[-1]["event_id"])] == everything
    assert [row["event_id"] for row in await verbs.list_events(TENANT, state="parked")] == ids[:1]
    assert await verbs.list_events(TENANT, state="parked", kind="other") == []
    assert await verbs.list_events(TENANT, state="parked", before=ids[0]) == []
    assert [row["event_id"] for row in await verbs.list_events(TENANT, state="waiting", kind="other")] == keyed[1:]
    with pytest.raises(InvalidInputError):
        await verbs.list_events(TENANT, state="lost")
    row = await verbs.show(TENANT, ids[0])
    assert row is not None
    assert (row["payload"], row["state"], row["last_error"], row["attempts"]) == ('"a"', "parked", "no", 1)
    assert await verbs.show("globex", ids[0]) is None


@pytest.mark.invariant("I4")
async def test_operators_decide_and_do_not_drain_or_write_and_workers_do_nothing_here(
    database: TestDatabase, gateway: Connection, operator: Connection, worker: Connection
) -> None:
    (event_id,) = await write(gateway)
    for conn in (operator, worker):
        for attempt in (take(conn), tidy(conn), write(conn), tell(conn, await take(gateway, 1))):
            with pytest.raises(TenancyDeniedError):
                await attempt
    verbs = OutboxRepository(worker)
    for refused in (verbs.retry(TENANT, [event_id]), verbs.status(TENANT), verbs.tenants(), verbs.channel(TENANT)):
        with pytest.raises(TenancyDeniedError):
            await refused
    async with logins(database) as made:
        theirs = OutboxRepository(await made.open("operator", "globex"))
        assert await theirs.tenants() == ["globex"]
        for foreign in (theirs.status(TENANT), theirs.show(TENANT, event_id), theirs.channel(TENANT)):
            with pytest.raises(TenancyDeniedError):
                await foreign
        with pytest.raises(TenancyDeniedError):
            await theirs.channel(None)
        assert await theirs.channel("globex") != await OutboxRepository(gateway).channel(TENANT)
        with pytest.raises(TenancyUnboundError):
            await theirs.status("")


@pytest.mark.invariant("I4")
async def test_a_drainer_of_some_tenants_finds_takes_and_tidies_theirs_alone(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    for tenant in ("a", "b", "c"):
        await write(gateway, tenant, tenant=tenant)
        await take(gateway, tenant=tenant)
        await write(gateway, f"{tenant} due", tenant=tenant)
    await make_stale(admin)
    async with logins(database) as made:
        name = await made.create()
        for tenant in ("a", "b"):
            await made.bind(name, "gateway", tenant)
        conn = await made.connect(name)
        work = await tidy(conn)
        assert (work.reclaimed, work.due) == (2, [("a", KIND), ("b", KIND)])
        with pytest.raises(TenancyDeniedError):
            await tidy(conn, tenants=["a", "c"])
        with pytest.raises(TenancyDeniedError):
            await take(conn, tenant="c")
        assert await states(admin, "c") == {"c": "claimed", "c due": "ready"}
        some = await tidy(gateway, tenants=["c"], kinds=[KIND, "none"])
        assert (some.reclaimed, some.due) == (1, [("c", KIND)])
        paged = await OutboxRepository(gateway).due(limit=1)
        assert (paged.due, paged.start) == ([("a", KIND)], "a")
        paged = await OutboxRepository(gateway).due(limit=2, start=paged.start)
        assert (paged.due, paged.start) == ([("b", KIND), ("c", KIND)], "c")


async def test_parked_events_begin_anew_by_what_they_have_in_common_some_at_a_time_the_oldest_first(
    database: TestDatabase, admin: Connection, gateway: Connection, operator: Connection
) -> None:
    await write(gateway, "old", "older", "new", "kept")
    await write(gateway, "keyed", key="k", kind="other")
    events = [*await take(gateway, 3), *await take(gateway, kind="other")]
    await tell(gateway, events, "park", error="no")
    for payload, age in (("old", 20), ("older", 30)):
        await admin.execute(
            f"update {OUTBOX} set parked_at = now() - $1::interval where payload = to_jsonb($2::text)",
            timedelta(days=age),
            payload,
        )
    verbs = OutboxRepository(operator)
    heard: list[str] = []
    async with connected(database.gateway_dsn) as listener, connected(database.admin_dsn) as other:
        await listener.add_listener(
            await OutboxRepository(listener).channel(TENANT), lambda _, __, channel, ___: heard.append(channel)
        )
        assert await verbs.retry_parked(TENANT, timedelta(days=10), limit=1) == 1
        await eventually(lambda: heard)
        assert (await states(admin))["older"] == "ready"
        assert await verbs.retry_parked("globex", timedelta(0)) == 0
        assert await verbs.retry_parked(TENANT, timedelta(0), kind="another") == 0
        assert await verbs.retry_parked(TENANT, timedelta(0), key="k", kind="other") == 1
        # What somebody else is deciding about is his.
        async with other.transaction():
            await other.execute(f"select from {OUTBOX} where payload = to_jsonb('old'::text) for update")
            assert await verbs.retry_parked(TENANT, timedelta(0)) == 1
    assert await states(admin) == {
        "old": "parked", "older": "ready", "new": "ready", "kept": "ready", "keyed": "ready"
    }  # fmt: skip
    with pytest.raises(InvalidInputError):
        await verbs.retry_parked(TENANT, timedelta(days=-1))


async def test_list_and_count_choose_the_same_events_and_show_as_much_of_payloads_as_is_asked_for(
    admin: Connection, gateway: Connection, operator: Connection
) -> None:
    (short, long, huge) = await write(gateway, "a", "b" * 100, "c" * 70_000)
    keyed = await write(gateway, "x", "y", "z", key="k", kind="other")
    (event,) = await take(gateway, kind="other")
    await tell(gateway, [event], "park", error="no")
    await admin.execute(
        f"update {OUTBOX} set created_at = created_at - interval '2 days' where event_id = any ($1)", [short, keyed[0]]
    )
    verbs = OutboxRepository(operator)
    rows = {row["event_id"]: row for row in await verbs.list_events(TENANT, payload_chars=20)}
    assert rows[short]["payload"] == '"a"'
    assert rows[long]["payload"] == '"' + "b" * 19
    assert (rows[huge]["payload"], rows[huge]["payload_bytes"] > 70_000) == (None, True)
    assert {row["payload"] for row in await verbs.list_events(TENANT)} == {None}
    choices: list[tuple[dict[str, Any], list[Any]]] = [
        ({"key": "k"}, keyed[::-1]),
        ({"key": "k", "state": "waiting"}, keyed[:1:-1]),
        ({"key": "k", "state": "parked"}, keyed[:1]),
        ({"key": "none"}, []),
        ({"kind": KIND, "state": "ready"}, [huge, long, short]),
        ({"kind": KIND, "before": huge}, [long, short]),
        # Of a parked event it counts when it was parked.
        ({"older_than": timedelta(days=1)}, [short]),
        ({"older_than": timedelta(days=1), "key": "k"}, []),
        ({"older_than": timedelta(0), "key": "k", "state": "parked"}, keyed[:1]),
    ]
    for choice, expected in choices:
        listed = [row["event_id"] for row in await verbs.list_events(TENANT, **choice)]
        assert (listed, await verbs.count(TENANT, **choice)) == (expected, len(expected)), choice
    assert await verbs.count(TENANT, limit=2) == 2
    assert await verbs.count("globex") == 0
    with pytest.raises(InvalidInputError):
        await verbs.count(TENANT, state="lost")


async def test_status_tells_ages_attempts_and_claims_that_nobody_answers_for(
    admin: Connection, gateway: Connection, operator: Connection
) -> None:
    await write(gateway, "failing", "stuck", "given up")
    events = await take(gateway)
    await tell(gateway, events[:1], "failed", error="no", delay=60)
    await tell(gateway, events[2:], "park", error="no")
    verbs = OutboxRepository(operator)
    (row,) = await verbs.status(TENANT)
    assert (row["later"], row["claimed"], row["stale"], row["parked"], row["attempts"]) == (1, 1, 0, 1, 1)
    await make_stale(admin)
    await admin.execute(f"update {OUTBOX} set created_at = created_at - interval '1 day' where state = 'ready'")
    (row,) = await verbs.status(TENANT)
    assert (row["stale"], row["oldest"], row["age"] >= timedelta(days=1)) == (1, None, True)
    assert row["claimed_for"] > timedelta(seconds=300)
    assert timedelta(0) < row["parked_for"] < timedelta(hours=1)
    (row,) = await verbs.status(TENANT, stale_seconds=3000)
    assert row["stale"] == 0


async def test_health_tells_what_is_amiss_for_each_tenant(
    admin: Connection, gateway: Connection, operator: Connection
) -> None:
    verbs = OutboxRepository(operator)
    await write(gateway, "claimed", "given up", "due", kind="a")
    await write(gateway, "later", delay=60, kind="b")
    events = await take(gateway, 2, kind="a")
    await tell(gateway, events[1:], "park", error="no")
    acme, globex = await verbs.health([TENANT, "globex"])
    assert (acme["tenant_id"], acme["parked"], acme["parked_kinds"], acme["claimed"]) == (TENANT, 1, ["a"], 1)
    assert (acme["stale"], acme["due_kinds"]) == (0, ["a"])
    assert timedelta(0) < acme["due_for"] < timedelta(minutes=1)
    assert {name: value for name, value in globex.items() if value} == {"tenant_id": "globex"}
    await make_stale(admin)
    (acme,) = await verbs.health([TENANT])
    assert (acme["stale"], acme["claimed_for"] > timedelta(seconds=300)) == (1, True)
