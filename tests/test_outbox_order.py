"""Order among events of one key: one at a time, and none before one that was committed before it was written (C46)."""

from __future__ import annotations

import random
from collections import defaultdict

import anyio
import anyio.lowlevel
import pytest

from dispatch_core.outbox_groups import Groups
from dispatch_core.outbox_models import ClaimedEvent, DueWork, Verdict
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.outbox import KIND, make_due, make_stale, states, take, take_all, tell, tidy, write
from tests.support.protocol import ME, OUTBOX, TENANT, Connection, connected

pytestmark = pytest.mark.case("C46")

_WRITE = "select relay.outbox_enqueue($1, to_jsonb($2::text), p_key => $3, p_tenant => $4)"


async def _write(conn: Connection, payload: str, key: str = "k") -> None:
    await conn.fetchval(_WRITE, KIND, payload, key, TENANT)


async def test_a_keyed_event_waits_for_the_one_before_it_and_others_do_not(
    gateway: Connection, admin: Connection
) -> None:
    await write(gateway, "1", "2", "3", key="k")
    await write(gateway, "other key", key="l")
    await write(gateway, "no key")
    assert await states(admin) == {
        "1": "ready", "2": "waiting", "3": "waiting", "other key": "ready", "no key": "ready",
    }  # fmt: skip
    events = await take(gateway)
    assert [event.payload_text for event in events] == ['"1"', '"other key"', '"no key"']
    assert await take(gateway) == []
    await tell(gateway, events[:1], "failed", error="no", delay=60)
    assert await take(gateway) == [], "a pause of the first is a pause of its followers"
    await make_due(admin)
    for expected in ("1", "2", "3"):
        (event,) = await take(gateway)
        assert event.payload_text == f'"{expected}"'
        assert await tell(gateway, [event]) == [("applied", "gone")]


async def test_a_parked_event_does_not_hold_its_followers(gateway: Connection) -> None:
    await write(gateway, "1", "2", "3", key="k")
    await tell(gateway, await take(gateway), "park", error="no")
    (second,) = await take(gateway)
    assert second.payload_text == '"2"'
    await tell(gateway, [second], "failed", error="no", max_attempts=1)
    (third,) = await take(gateway)
    assert third.payload_text == '"3"'


async def test_a_follower_of_another_kind_waits_too_and_its_group_is_told(gateway: Connection) -> None:
    await write(gateway, "1", key="k", kind="a")
    await write(gateway, "2", key="k", kind="b")
    (first,) = await take(gateway, kind="a")
    assert (await tidy(gateway)).due == []
    _, opened = await OutboxRepository(gateway).settle([(first, Verdict("delivered"))], claimed_by=ME, max_attempts=25)
    assert opened == {(TENANT, "b")}
    assert [event.payload_text for event in await take(gateway, kind="b")] == ['"2"']


async def test_an_event_is_after_all_that_its_writer_could_see_whatever_the_clock_says(
    gateway: Connection, admin: Connection
) -> None:
    await write(gateway, "1", key="k")
    await admin.execute(f"update {OUTBOX} set seq = seq + 3600000000")  # a clock that was set back, or a long batch
    await write(gateway, "2", key="k")
    await write(gateway, "3", "4", key="k")
    assert await admin.fetchval(f"select array_agg(payload #>> '{{}}' order by seq) from {OUTBOX}") == [
        "1", "2", "3", "4",
    ]  # fmt: skip


async def test_two_writers_that_do_not_see_each_other_make_two_ready_events_and_a_claim_takes_the_first(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    async with connected(database.gateway_dsn) as other:
        await other.execute("begin")
        await _write(other, "early, commits late")
        await _write(gateway, "late, commits early")
        await other.execute("commit")
    assert set((await states(admin)).values()) == {"ready"}
    (first,) = await take(gateway)
    assert first.payload_text == '"early, commits late"'
    assert await states(admin) == {"early, commits late": "claimed", "late, commits early": "waiting"}
    await tell(gateway, [first])
    (second,) = await take(gateway)
    assert second.payload_text == '"late, commits early"'


async def _claimed_before_the_first(database: TestDatabase, gateway: Connection) -> ClaimedEvent:
    """Have "second" claimed, and "first", which is before it, committed then."""
    async with connected(database.gateway_dsn) as other:
        await other.execute("begin")
        await _write(other, "first")
        await _write(gateway, "second")
        (second,) = await take(gateway, by="d/1")
        assert second.payload_text == '"second"'
        await other.execute("commit")
    return second


@pytest.mark.invariant("O3")
@pytest.mark.parametrize("outcome", ["delivered", "failed", "release", "park", "stale", "unclaimed"])
async def test_one_that_comes_before_one_on_its_way_waits_until_that_has_ended(
    database: TestDatabase, gateway: Connection, admin: Connection, outcome: str
) -> None:
    second = await _claimed_before_the_first(database, gateway)
    claimed = await take_all(gateway, [(TENANT, KIND)])
    assert (claimed.events, claimed.more) == ([], set())
    assert await states(admin) == {"first": "waiting", "second": "claimed"}
    if outcome == "stale":
        await make_stale(admin)
        assert (await OutboxRepository(gateway).due(look=0)).reclaimed == 1
    elif outcome == "unclaimed":
        assert await OutboxRepository(gateway).unclaim([TENANT], "d/1") == 1
    else:
        assert (await tell(gateway, [second], outcome, error="no", by="d/1"))[0][0] == "applied"
    (first,) = await take(gateway)
    assert first.payload_text == '"first"'
    await tell(gateway, [first])
    assert len(await take(gateway)) == (1 if outcome in ("failed", "release", "stale", "unclaimed") else 0)


@pytest.mark.invariant("O3")
async def test_a_parked_leader_that_a_person_has_retried_waits_for_its_follower_on_its_way(
    gateway: Connection, admin: Connection
) -> None:
    await write(gateway, "1", "2", "3", key="k")
    (first,) = await take(gateway)
    await tell(gateway, [first], "park", error="no")
    (second,) = await take(gateway, by="d/2")
    assert await OutboxRepository(gateway).retry(TENANT, [first.event_id]) == {first.event_id}
    assert await take(gateway) == []
    assert await states(admin) == {"1": "waiting", "2": "claimed", "3": "waiting"}
    await tell(gateway, [second], by="d/2")
    for expected in ("1", "3"):
        (event,) = await take(gateway)
        assert event.payload_text == f'"{expected}"'
        await tell(gateway, [event])


@pytest.mark.invariant("O3")
async def test_one_that_comes_behind_two_of_which_the_second_is_on_its_way_waits_too(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    """The first waits for the second already: to leave the third ready would have every claim look at it again."""
    async with connected(database.gateway_dsn) as third:
        await third.execute("begin")
        await _write(third, "third")
        second = await _claimed_before_the_first(database, gateway)
        await admin.execute(f"update {OUTBOX} set seq = seq - 1000000000")
        assert await take(gateway) == []
        await third.execute("commit")
    claimed = await take_all(gateway, [(TENANT, KIND)])
    assert (claimed.events, claimed.more) == ([], set())
    assert await states(admin) == {"first": "waiting", "second": "claimed", "third": "waiting"}
    await tell(gateway, [second], by="d/1")
    assert [event.payload_text for event in await take(gateway)] == ['"first"']


@pytest.mark.invariant("O3")
@pytest.mark.kind("lock order")
@pytest.mark.parametrize("begins", ["second", "first"])
async def test_of_two_claims_at_once_one_alone_takes_an_event_of_a_key(
    database: TestDatabase, gateway: Connection, admin: Connection, begins: str
) -> None:
    """One claim is not committed when the other looks: what it takes is to be seen by its locks alone."""
    async with connected(database.gateway_dsn) as one, connected(database.gateway_dsn) as late:
        await late.execute("begin")
        await _write(late, "first")
        await _write(gateway, "second")
        if begins == "first":
            await late.execute("commit")
        await one.execute("begin")
        (event,) = await take(one, 1, by="d/1")
        assert event.payload_text == f'"{begins}"'
        if begins == "second":
            await late.execute("commit")
        claimed = await take_all(gateway, [(TENANT, KIND)])
        assert claimed.events == []
        await one.execute("commit")
    assert await take(gateway) == []
    assert sorted((await states(admin)).values()) == ["claimed", "waiting"]
    await tell(gateway, [event], by="d/1")
    assert len(await take(gateway)) == 1


async def test_a_turn_that_was_lost_to_a_writer_who_committed_beside_the_settling_is_found(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    """The follower is written while the first is there, and committed when it is gone already."""
    await write(gateway, "1", key="k")
    (first,) = await take(gateway)
    async with connected(database.gateway_dsn) as writer:
        await writer.execute("begin")
        await _write(writer, "2")
        await tell(gateway, [first])
        await writer.execute("commit")
    assert await states(admin) == {"2": "waiting"}
    await write(gateway, "3", key="k")
    assert await take(gateway) == []
    work = await tidy(gateway)
    assert work.promoted == 1
    assert work.due == [(TENANT, KIND)]
    assert [event.payload_text for event in await take(gateway)] == ['"2"']


async def test_the_search_for_lost_turns_goes_on_from_key_to_key(gateway: Connection, admin: Connection) -> None:
    for number in range(7):
        await write(gateway, f"first {number}", f"second {number}", key=f"k{number}")
    await admin.execute(f"delete from {OUTBOX} where state = 'ready'")
    verbs = OutboxRepository(gateway)
    behind: dict[str, str] = {}
    promoted = []
    for _ in range(3):
        work = await verbs.due(look=3, look_behind=behind)
        promoted.append(work.promoted)
        behind = work.look
    assert promoted == [3, 3, 1]
    assert behind == {TENANT: ""}
    work = await verbs.due(look=100)
    assert (work.promoted, work.look) == (0, {})


async def test_the_search_for_lost_turns_gives_each_tenant_its_share(gateway: Connection, admin: Connection) -> None:
    for tenant, count in (("a", 9), ("b", 2)):
        for number in range(count):
            await write(gateway, f"first {number}", f"second {number}", key=f"k{number}", tenant=tenant)
    await admin.execute(f"delete from {OUTBOX} where state = 'ready'")
    work = await OutboxRepository(gateway).due(look=6)
    assert work.look == {"a": "k2"}
    assert sorted((await states(admin, "b")).values()) == ["ready", "ready"]
    groups = Groups()
    groups.found(work, looked=True, seconds=0, now=0)
    groups.found(DueWork([], None, 0, 0, 0, {"b": "k9"}, "a"), looked=True, seconds=0, now=0)
    assert groups.look_behind == {"a": "k2", "b": "k9"}
    groups.found(DueWork([], None, 0, 0, 0, {"a": ""}, None), looked=True, seconds=0, now=0)
    assert groups.look_behind == {"b": "k9"}


@pytest.mark.kind("lock order")
async def test_a_claim_leaves_a_follower_alone_whose_leader_is_being_settled_at_this_moment(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    """Turned into waiting beside that, it would have nobody who makes it ready."""
    async with connected(database.gateway_dsn) as writer, connected(database.gateway_dsn) as settler:
        await writer.execute("begin")
        await _write(writer, "1")
        await _write(gateway, "2")
        await writer.execute("commit")
        (first,) = await take(gateway)
        await admin.execute(f"update {OUTBOX} set state = 'ready' where payload = '\"2\"'")
        await settler.execute("begin")
        await tell(settler, [first])
        claimed = await take_all(gateway, [(TENANT, KIND)])
        assert (claimed.events, claimed.more) == ([], {(TENANT, KIND)})
        await settler.execute("commit")
    assert await states(admin) == {"2": "ready"}
    assert [event.payload_text for event in await take(gateway)] == ['"2"']


@pytest.mark.kind("lock order")
async def test_whoever_ends_a_leader_waits_for_a_claim_that_makes_a_follower_wait_and_then_sees_it(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    async with connected(database.gateway_dsn) as claimer, connected(database.gateway_dsn) as settler:
        await write(gateway, "1", "2", key="k")
        (first,) = await take(gateway)
        await admin.execute(f"update {OUTBOX} set state = 'ready' where state = 'waiting'")
        await claimer.execute("begin")
        assert await take(claimer) == []  # the follower waits from here on, and its leader is locked
        async with anyio.create_task_group() as group:

            async def settle() -> None:
                assert await tell(settler, [first]) == [("applied", "gone")]

            group.start_soon(settle)
            await wait_until_blocked(admin, pid_of(settler), by=pid_of(claimer))
            await claimer.execute("commit")
    assert await states(admin) == {"2": "ready"}


@pytest.mark.invariant("O3")
@pytest.mark.invariant("I3")
async def test_under_load_each_key_is_delivered_in_order_one_at_a_time_and_nothing_is_left(
    database: TestDatabase, admin: Connection
) -> None:
    """Writers, drainers that fail, release, park and die, and the search for lost turns, all at once."""
    rng = random.Random(7)
    keys = [f"k{n}" for n in range(6)]
    written: dict[str, int] = defaultdict(int)
    began: dict[str, list[int]] = defaultdict(list)
    ended: dict[str, set[int]] = defaultdict(set)
    on_its_way: dict[str, int] = {}
    writing = True

    async def writer(conn: Connection) -> None:
        for _ in range(60):
            # One writer a key at a time, so that each sees what was committed before it; keys differ by connection.
            key = rng.choice(mine[conn])
            numbers = [written[key] + n for n in range(rng.choice((1, 1, 3)))]
            written[key] += len(numbers)
            async with conn.transaction():
                for number in numbers:
                    await _write(conn, f"{key} {number}", key)
                    await anyio.lowlevel.checkpoint()

    async def drainer(conn: Connection, name: str) -> None:
        claim = 0
        while writing or await admin_count():
            claim += 1
            by = f"{name}/{claim}"
            await tidy(conn)
            events = await take(conn, rng.choice((1, 4, 16)), by=by)
            for event in events:
                key, number = event.payload_text.strip('"').split()
                assert key not in on_its_way, "two of a key at once"
                on_its_way[key] = int(number)
                began[key].append(int(number))
            await anyio.lowlevel.checkpoint()
            for event in events:
                key, number = event.payload_text.strip('"').split()
                outcome = rng.choices(("delivered", "failed", "release", "park"), (8, 2, 1, 1))[0]
                del on_its_way[key]
                if outcome in ("delivered", "park"):
                    ended[key].add(int(number))
                assert (await tell(conn, [event], outcome, delay=0, by=by))[0][0] == "applied"

    lock = anyio.Lock()

    async def admin_count() -> int:
        async with lock:
            count: int = await admin.fetchval(f"select count(*) from {OUTBOX} where state <> 'parked'")
        return count

    async with (
        connected(database.gateway_dsn) as w1,
        connected(database.gateway_dsn) as w2,
        connected(database.gateway_dsn) as d1,
        connected(database.gateway_dsn) as d2,
        connected(database.gateway_dsn) as d3,
        anyio.create_task_group() as drainers,
    ):
        mine = {w1: keys[:3], w2: keys[3:]}
        for number, conn in enumerate((d1, d2, d3)):
            drainers.start_soon(drainer, conn, f"d{number}")
        async with anyio.create_task_group() as writers:
            writers.start_soon(writer, w1)
            writers.start_soon(writer, w2)
        writing = False
    for key in keys:
        assert ended[key] == set(range(written[key]))
        assert began[key] == sorted(began[key]), key
    assert await admin.fetchval(f"select count(*) from {OUTBOX} where state <> 'parked'") == 0


async def test_a_leader_that_is_taken_back_keeps_its_turn(gateway: Connection, admin: Connection) -> None:
    await write(gateway, "1", "2", key="k")
    await take(gateway, by="dead")
    await make_stale(admin)
    await tidy(gateway)
    assert [event.payload_text for event in await take(gateway)] == ['"1"']


async def test_a_leader_that_dies_for_the_last_time_hands_on_its_turn(gateway: Connection, admin: Connection) -> None:
    await write(gateway, "1", "2", key="k")
    await take(gateway, by="dead")
    await make_stale(admin)
    work = await tidy(gateway, max_attempts=1)
    assert (work.reclaimed, work.parked) == (0, 1)
    assert [event.payload_text for event in await take(gateway)] == ['"2"']


async def test_one_that_was_first_tried_too_long_ago_hands_on_its_turn(gateway: Connection, admin: Connection) -> None:
    await write(gateway, "1", "2", key="k")
    await tell(gateway, await take(gateway), "failed", delay=0)
    await admin.execute(f"update {OUTBOX} set first_claimed_at = now() - interval '4 days' where state = 'ready'")
    claimed = await take_all(gateway, [(TENANT, KIND)])
    assert len(claimed.expired) == 1
    assert [event.payload_text for event in await take(gateway)] == ['"2"']
