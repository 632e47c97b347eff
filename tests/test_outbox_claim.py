"""Claims and what becomes of them, at the floor of SQL: who gets what, once; what is stale; what a crash costs."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from uuid import UUID, uuid4

import anyio
import asyncpg
import pytest

from dispatch_core.outbox_models import ClaimedEvent
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.outbox import KIND, make_due, make_stale, states, take, take_all, tell, tidy, write
from tests.support.protocol import OUTBOX, TENANT, Connection, connected


async def _row(admin: Connection, event_id: UUID) -> asyncpg.Record:
    row = await admin.fetchrow(f"select * from {OUTBOX} where event_id = $1", event_id)
    assert row is not None
    return row


# --- each event once ----------------------------------------------------------------------------


@pytest.mark.case("C12")
async def test_claims_made_at_once_partition_the_events_and_take_no_more_than_their_limit(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    await write(gateway, *range(1000))
    taken: list[UUID] = []

    async def claim_all(number: int) -> None:
        async with connected(database.gateway_dsn) as conn:
            while events := await take(conn, 30, by=f"drainer {number}"):
                assert len(events) <= 30
                taken.extend(event.event_id for event in events)

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(claim_all, number)
    assert len(taken) == len(set(taken)) == 1000
    assert set((await states(admin)).values()) == {"claimed"}


@pytest.mark.case("C46")
async def test_an_event_that_commits_late_with_a_lower_place_is_not_skipped(
    database: TestDatabase, gateway: Connection
) -> None:
    async with connected(database.gateway_dsn) as slow, connected(database.gateway_dsn) as lost:
        for conn in (slow, lost):
            await conn.execute("begin")
            await conn.fetchval("select relay.outbox_enqueue($1, '1', p_tenant => $2)", KIND, TENANT)
        await write(gateway, 2)
        first = await take(gateway)
        assert [event.payload_text for event in first] == ["2"]
        await tell(gateway, first)
        await lost.execute("rollback")
        await slow.execute("commit")
        assert [event.payload_text for event in await take(gateway)] == ["1"]


async def test_groups_take_turns_whatever_the_backlog_of_one(gateway: Connection) -> None:
    """No tenant and no kind starves another."""
    await write(gateway, *range(300), tenant="big", kind="a")
    await write(gateway, *range(300), tenant="big", kind="b")
    await write(gateway, 1, tenant="small", kind="a")
    work = await tidy(gateway)
    assert work.due == [("big", "a"), ("big", "b"), ("small", "a")]
    for _ in range(3):
        claimed = await take_all(gateway, work.due, 90)
        counts = Counter((event.tenant_id, event.kind) for event in claimed.events)
        assert len(claimed.events) == 90
        assert counts[("big", "a")] >= 30
        assert counts[("big", "b")] >= 30
        assert claimed.more == {("big", "a"), ("big", "b")} or claimed.more == {("big", "a")}
    # The one small event was in the very first claim; with one place only, the group whose turn it is has it.
    claimed = await take_all(gateway, [("big", "b"), ("small", "a"), ("big", "a")], 1)
    assert [(event.tenant_id, event.kind) for event in claimed.events] == [("big", "b")]
    assert claimed.more == {("big", "b"), ("small", "a"), ("big", "a")}


async def test_a_claim_is_bounded_by_bytes_but_for_its_first_event(gateway: Connection) -> None:
    await write(gateway, *("x" * 50_000 for _ in range(5)))
    one = await take_all(gateway, [(TENANT, KIND)], max_bytes=10)
    two = await take_all(gateway, [(TENANT, KIND)], max_bytes=120_000)
    assert (len(one.events), len(two.events)) == (1, 2)
    assert one.more == two.more == {(TENANT, KIND)}


@pytest.mark.kind("poison at the head of the line")
async def test_what_is_short_as_jsonb_and_long_as_text_is_counted_as_text(gateway: Connection) -> None:
    """Else one claim would bring more than a value may have, and fail for ever, with all that is claimed beside it."""
    for _ in range(6):
        await gateway.fetchval(
            "select relay.outbox_enqueue($1, to_jsonb(array_fill(1e131000, array[4])), p_tenant => $2)", KIND, TENANT
        )
    sizes = [
        len(event.payload_text) for event in (await take_all(gateway, [(TENANT, KIND)], max_bytes=2_000_000)).events
    ]
    assert sizes == [524_012] * 3
    for call in (
        "outbox_enqueue($1, v, p_tenant => $2)",
        "outbox_enqueue_many($2, jsonb_build_array(jsonb_build_object('kind', $1::text, 'payload', v)))",
    ):
        with pytest.raises(asyncpg.PostgresError, match="at most 134217728") as refused:
            await gateway.fetchval(
                f"select relay.{call} from (select to_jsonb(array_fill(1e131000, array[1030]))) as t (v)", KIND, TENANT
            )
        assert refused.value.sqlstate == "S2020"


async def test_a_delayed_event_is_due_when_it_is_due(gateway: Connection, admin: Connection) -> None:
    await write(gateway, "later", delay=60)
    work = await tidy(gateway)
    assert work.due == []
    assert work.later is not None
    assert 30 < work.later.total_seconds() < 60
    assert await take(gateway) == []
    await make_due(admin)
    assert (await tidy(gateway)).due == [(TENANT, KIND)]
    assert len(await take(gateway)) == 1


async def test_a_cursor_leaves_out_what_lies_below_it(gateway: Connection) -> None:
    await write(gateway, 1)
    await write(gateway, 2)
    claimed = await take_all(gateway, [(TENANT, KIND)], 1)
    await tell(gateway, claimed.events, "release")
    assert [e.payload_text for e in await take(gateway, after=[claimed.last[TENANT, KIND]])] == ["2"]
    assert [e.payload_text for e in await take(gateway)] == ["1"]


# --- the fence ----------------------------------------------------------------------------------


@pytest.mark.invariant("I3")
@pytest.mark.case("C18")
async def test_only_the_current_claim_can_be_settled_and_only_once(admin: Connection, gateway: Connection) -> None:
    await write(gateway, 1)
    (first,) = await take(gateway)
    assert await tell(gateway, [first], by="another") == [("stale", "claimed")]
    for outcome in ("delivered", "failed", "park", "release"):
        foreign = _claimed(first.event_id, "globex", first.fence)
        unknown = _claimed(uuid4(), TENANT, first.fence)
        wrong = _claimed(first.event_id, TENANT, first.fence + 1)
        assert await tell(gateway, [foreign, unknown, wrong], outcome) == [
            ("stale", "gone"), ("stale", "gone"), ("stale", "claimed"),
        ]  # fmt: skip
    assert await tell(gateway, [first], "release") == [("applied", "ready")]
    assert await tell(gateway, [first]) == [("stale", "ready")]
    (second,) = await take(gateway)
    assert second.fence > first.fence
    assert await tell(gateway, [first]) == [("stale", "claimed")]
    assert await tell(gateway, [second, second]) == [("applied", "gone"), ("stale", "gone")]
    assert await tell(gateway, [second]) == [("stale", "gone")]


def _claimed(event_id: UUID, tenant: str, fence: int) -> ClaimedEvent:
    return ClaimedEvent(event_id, tenant, KIND, None, "1", datetime.now(UTC), 0, fence)


@pytest.mark.invariant("I3")
@pytest.mark.case("C15")
async def test_a_claim_that_is_too_old_is_taken_back_counts_as_a_failure_and_its_late_settling_changes_nothing(
    admin: Connection, gateway: Connection
) -> None:
    await write(gateway, 1, 2)
    late = await take(gateway, by="dead")
    assert (await tidy(gateway)).reclaimed == 0
    await make_stale(admin)
    assert (await tidy(gateway)).reclaimed == 2
    assert (await tidy(gateway)).reclaimed == 0
    row = await _row(admin, late[0].event_id)
    assert (row["state"], row["attempts"]) == ("ready", 1)
    assert row["last_error"].startswith("S2R-OUTBOX-STALE")
    before = await admin.fetch(f"select * from {OUTBOX} order by event_id")
    for outcome in ("delivered", "failed", "park", "release"):
        assert await tell(gateway, late, outcome, by="dead") == [("stale", "ready")] * 2
    assert await admin.fetch(f"select * from {OUTBOX} order by event_id") == before


@pytest.mark.case("C21")
@pytest.mark.kind("poison at the head of the line")
async def test_an_event_that_kills_its_drainer_ends_parked_and_takes_nobody_with_it(
    admin: Connection, gateway: Connection
) -> None:
    """Claims of ten; whoever has the killer dies before it settles anything."""
    await write(gateway, *range(9), "killer")
    delivered: list[str] = []
    for _ in range(60):
        await tidy(gateway, stale=300, max_attempts=3)
        events = await take(gateway, 10)
        if any(event.payload_text == '"killer"' for event in events):
            await make_stale(admin)
            continue
        if not events:
            break
        assert {item[0] for item in await tell(gateway, events)} == {"applied"}
        delivered += [event.payload_text for event in events]
    assert sorted(delivered) == [str(n) for n in range(9)]
    assert await states(admin) == {"killer": "parked"}
    (row,) = await admin.fetch(f"select attempts, last_error from {OUTBOX}")
    assert row["attempts"] == 3
    assert row["last_error"].startswith("S2R-OUTBOX-STALE")


@pytest.mark.case("C21")
async def test_a_suspect_event_is_claimed_alone_until_its_claim_is_answered_for(
    admin: Connection, gateway: Connection
) -> None:
    await write(gateway, 1, 2)
    await take(gateway, by="dead")
    await make_stale(admin)
    await tidy(gateway)
    await write(gateway, 3, kind="other")
    first = await take_all(gateway, [(TENANT, KIND), (TENANT, "other")])
    assert [event.payload_text for event in first.events] == ["1"]
    assert first.more == {(TENANT, KIND), (TENANT, "other")}
    second = await take_all(gateway, [(TENANT, "other"), (TENANT, KIND)])
    assert [event.payload_text for event in second.events] == ["3"], "not beside another"
    assert second.more == {(TENANT, KIND)}
    await tell(gateway, first.events, "release")
    again = await take(gateway)
    assert [event.payload_text for event in again] == ["1"], "a release tells nothing of it"
    await tell(gateway, again, "failed", delay=0)
    assert [event.payload_text for event in await take(gateway)] == ["2"], "the other one, alone"
    assert [event.payload_text for event in await take(gateway)] == ["1"]
    assert await admin.fetchval(f"select count(*) from {OUTBOX} where suspect") == 1


@pytest.mark.invariant("I3")
@pytest.mark.kind("lock order")
async def test_a_settling_that_had_to_wait_for_its_row_is_applied(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, 1)
    for number in range(20):
        (event,) = await take(gateway)
        async with connected(database.admin_dsn) as holder, anyio.create_task_group() as group:
            await holder.execute("begin")
            # Another version of the row, as anything that touches it would leave it.
            await holder.execute(f"update {OUTBOX} set last_error = $1", f"touched {number}")

            async def settle(event: ClaimedEvent = event) -> None:
                assert await tell(gateway, [event], "failed", error="no", delay=0) == [("applied", "ready")]

            group.start_soon(settle)
            await wait_until_blocked(admin, pid_of(gateway))
            await holder.execute("commit")
    (row,) = await admin.fetch(f"select attempts, last_error from {OUTBOX}")
    assert tuple(row) == (20, "no")


@pytest.mark.case("C22")
async def test_times_are_of_the_moment_also_in_an_old_transaction(gateway: Connection, admin: Connection) -> None:
    async with gateway.transaction():
        await gateway.execute("select pg_sleep(0.15)")
        await gateway.fetchval("select relay.outbox_enqueue($1, '1', p_tenant => $2)", KIND, TENANT)
        await gateway.fetch("select * from relay.outbox_claim($1, $2, null, 1, 'me')", [TENANT], [KIND])
        row = await gateway.fetchrow("select * from relay.outbox_list($1)", TENANT)
        assert row is not None
        started = await gateway.fetchval("select now()")
        assert (row["created_at"] - started).total_seconds() > 0.14
        assert row["claimed_at"] >= row["created_at"]


# --- failures -----------------------------------------------------------------------------------


async def test_a_failure_is_counted_and_kept_and_the_last_one_parks(admin: Connection, gateway: Connection) -> None:
    (event_id,) = await write(gateway, 1)
    for attempt in range(1, 4):
        (event,) = await take(gateway)
        assert event.attempts == attempt - 1
        said = await tell(gateway, [event], "failed", error=f"error {attempt}", delay=0, max_attempts=3)
        assert said == [("applied", "parked" if attempt == 3 else "ready")]
        row = await _row(admin, event_id)
        assert (row["attempts"], row["last_error"]) == (attempt, f"error {attempt}")
    assert row["parked_at"] is not None
    assert await take(gateway) == []


@pytest.mark.case("C34")
async def test_an_error_that_postgresql_cannot_store_is_stored_as_far_as_it_can(
    admin: Connection, gateway: Connection
) -> None:
    await write(gateway, 1)
    await tell(gateway, await take(gateway), "park", error="nul \0 surrogate \ud800 " + "long " * 1000)
    text = await admin.fetchval(f"select last_error from {OUTBOX}")
    assert text.startswith("nul \ufffd surrogate \ufffd long")
    assert len(text.encode()) <= 2000


@pytest.mark.kind("poison at the head of the line")
async def test_poison_at_the_head_never_blocks_the_rest(admin: Connection, gateway: Connection) -> None:
    """Ten that always fail, with an hour's pause, before a thousand good ones, in claims of ten."""
    poison = set(await write(gateway, *(f"poison {n}" for n in range(10))))
    await write(gateway, *range(1000))
    delivered = rounds = 0
    while events := await take(gateway, 100):
        rounds += 1
        good = [event for event in events if event.event_id not in poison]
        bad = [event for event in events if event.event_id in poison]
        await tell(gateway, good)
        if bad:
            await tell(gateway, bad, "failed", error="bad", delay=3600)
        delivered += len(good)
    assert (delivered, rounds) == (1000, 11)
    assert await admin.fetchval(f"select array_agg(distinct attempts) from {OUTBOX}") == [1]


async def test_an_event_first_tried_too_long_ago_is_parked_and_comes_back_as_that(
    admin: Connection, gateway: Connection
) -> None:
    ids = await write(gateway, 1, 2)
    await tell(gateway, await take(gateway), "failed", delay=0)
    await admin.execute(f"update {OUTBOX} set first_claimed_at = now() - interval '4 days' where event_id = $1", ids[0])
    claimed = await take_all(gateway, [(TENANT, KIND)])
    assert [event.event_id for event in claimed.events] == [ids[1]]
    assert claimed.expired == [(TENANT, ids[0])]
    row = await _row(admin, ids[0])
    assert (row["state"], row["attempts"]) == ("parked", 1)
    assert row["last_error"].startswith("S2R-OUTBOX-LATE")


async def test_a_claim_whose_reply_was_lost_is_given_back_uncounted(admin: Connection, gateway: Connection) -> None:
    await write(gateway, 1, 2, 3)
    await take(gateway, 2, by="lost")
    await take(gateway, 1, by="known")
    assert await OutboxRepository(gateway).unclaim([TENANT], "lost") == 2
    assert await OutboxRepository(gateway).unclaim([TENANT], "lost") == 0
    assert Counter((await states(admin)).values()) == {"ready": 2, "claimed": 1}
    assert await admin.fetchval(f"select max(attempts) from {OUTBOX}") == 0


@pytest.mark.case("C25")
async def test_no_way_back_to_ready_collides_with_anything(admin: Connection, gateway: Connection) -> None:
    """Twins under one key, and one of them fails, is released, lost and parked while the other is there."""
    await write(gateway, "first", key="k")
    for back in ("failed", "release", "park"):
        (event,) = await take(gateway)
        await write(gateway, "twin", key="k")
        assert (await tell(gateway, [event], back, delay=0))[0][0] == "applied"
        await take(gateway)
        await make_stale(admin)
        assert (await tidy(gateway)).reclaimed == 1
    assert set((await states(admin)).values()) <= {"ready", "waiting", "parked"}


@pytest.mark.parametrize(
    "call",
    [
        "outbox_claim('{}', '{}', null, 1, 'me')",
        "outbox_claim('{a}', '{}', null, 1, 'me')",
        "outbox_claim('{a}', '{k}', '{}', 1, 'me')",
        "outbox_claim('{a}', '{k}', null, 0, 'me')",
        "outbox_claim('{a}', '{k}', null, 1, '')",
        "outbox_claim('{a}', '{k}', null, 1, 'me', 1, '0')",
        "outbox_claim('{a}', '{k}', null, null, 'me')",
        "outbox_due(null, null, 0, null, '1 s', 1, 0, null, null)",
        "outbox_due(null, null, 1, null, '0', 1, 0, null, null)",
        "outbox_due(null, null, 1, null, '1 s', 1, 0, '{a}', null)",
        "outbox_settle('me', '{a}', '{1}', array[gen_random_uuid()], '{1}', '{gone}', null, null, 1)",
        "outbox_settle('me', '{a}', '{1}', array[gen_random_uuid()], '{1}', '{null}', null, null, 1)",
        "outbox_settle('me', '{a}', '{2}', array[gen_random_uuid()], '{1}', '{delivered}', null, null, 1)",
        "outbox_settle('me', '{a}', '{1}', array[gen_random_uuid()], '{}', '{delivered}', null, null, 1)",
        "outbox_settle('m','{a,a}','{1,1}',array_fill(gen_random_uuid(),'{2}'),'{1,1}','{park,park}',null,null,1)",
        "outbox_settle('', '{a}', '{1}', array[gen_random_uuid()], '{1}', '{delivered}', null, null, 1)",
    ],
)
async def test_bad_arguments_are_told_apart_from_nothing_to_do(gateway: Connection, call: str) -> None:
    with pytest.raises(asyncpg.PostgresError) as raised:
        await gateway.fetch(f"select * from relay.{call}")
    assert raised.value.sqlstate == "S2020"
