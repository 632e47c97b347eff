"""Draining into sinks: outcomes by event, nothing held meanwhile (I7), crashes, outages, cancellation (C21, C29)."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import anyio
import pytest

from dispatch_core.database import Database
from dispatch_core.errors import ConfigurationError, ConnectionLostError, DatabaseUnavailableError, SchemaMismatchError
from dispatch_core.migrate import grant, migrate
from dispatch_core.outbox import (
    DrainReport,
    Outbox,
    OutboxEvent,
    OutboxMessage,
    OutboxPark,
    OutboxRetry,
    OutboxSettings,
)
from dispatch_core.outbox_delivery import Delivery
from tests.support.activity import open_transactions
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.outbox import KIND, Recorder, make_due, make_stale, outbox, states, take, write
from tests.support.protocol import OUTBOX, TENANT, Connection, connected
from tests.support.proxy import TcpProxy


async def _drain_all(drainer: Outbox, batch: int = 100) -> Counter[str]:
    """Drain until nothing is claimed."""
    total: Counter[str] = Counter()
    while (report := await drainer.drain(batch)).claimed:
        for name in ("claimed", "delivered", "failed", "parked", "released", "stale"):
            total[name] += getattr(report, name)
    return total


# --- outcomes -----------------------------------------------------------------------------------


async def test_each_event_has_its_own_outcome_and_the_report_counts_them(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    async def hang(_: OutboxEvent) -> None:
        await anyio.sleep_forever()

    async def finish_late(_: OutboxEvent) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass  # what it answers in spite of its cancellation counts

    answers = {
        "fails": ValueError("no \0 such thing"), "parks": OutboxPark("no route"), "hangs": hang, "late": finish_late,
        "cancels": asyncio.CancelledError(), "groups": ExceptionGroup("many", [ValueError("x")]),
        "unprintable": UnprintableError(), "generator": GeneratorExit(),
    }  # fmt: skip
    await write(gateway, *answers, "good", "better")
    sink = Recorder(answers)
    async with outbox(database, sink, sink_timeout_seconds=0.05) as drainer:
        report = await drainer.drain()
        assert report == DrainReport(claimed=10, delivered=3, failed=6, parked=1)
        # Each has a pause of up to a second, which may be none.
        due = await admin.fetchval(f"select max(available_at) - clock_timestamp() from {OUTBOX} where state = 'ready'")
        assert due <= timedelta(seconds=1)
    rows = await admin.fetch(f"select payload #>> '{{}}' as payload, state, attempts, last_error from {OUTBOX}")
    assert {row["attempts"] for row in rows} == {1}
    errors = {row["payload"]: row["last_error"] for row in rows}
    assert errors["fails"] == "ValueError: no \ufffd such thing"
    assert errors["parks"] == "no route"
    assert errors["hangs"].startswith("S2R-SINK-TIMEOUT")
    assert errors["cancels"].startswith("S2R-SINK-CANCELLED")
    assert errors["groups"].startswith("ExceptionGroup: many")
    assert errors["unprintable"].startswith("UnprintableError: <UnprintableError: its text is not available")
    assert {row["payload"] for row in rows if row["state"] == "parked"} == {"parks"}


@pytest.mark.invariant("O4")
async def test_whatever_a_sink_raises_hurts_its_own_event_alone(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """A drainer that died of it would die of it again, with nothing counted, and all other events would wait."""

    class Lazy(OutboxRetry):
        def __init__(self) -> None:
            Exception.__init__(self, "no delay at all")

    class Hostile(OutboxRetry):
        delay = property(lambda _: 1 / 0, lambda *_: None)

    def changed(delay: Any) -> OutboxRetry:
        error = OutboxRetry("busy", 1)
        error.delay = delay
        return error

    def retry(delay: Any) -> Any:
        async def sink(_: OutboxEvent) -> None:
            raise OutboxRetry("busy", delay)

        return sink

    answers = {
        "none": retry(None), "text": retry("30"), "nan": retry(float("nan")), "set to none": changed(None),
        "set to nan": changed(float("nan")), "lazy": Lazy(), "hostile": Hostile("busy", 1),
        "infinite": retry(float("inf")), "negative": retry(-1), "huge": retry(10**400),
        "timedelta": retry(timedelta(hours=1)), "set to timedelta": changed(timedelta(hours=1)),
    }  # fmt: skip
    await write(gateway, *answers, "good")
    async with outbox(database, Recorder(answers)) as drainer:
        assert await drainer.drain() == DrainReport(claimed=13, delivered=1, failed=12)
    rows = await admin.fetch(
        "select payload #>> '{}' as payload, attempts, last_error,"
        f" round(extract(epoch from available_at - now()) / 3600) as h from {OUTBOX}"
    )
    assert {row["attempts"] for row in rows} == {1}
    told = {row["payload"]: row["last_error"] for row in rows}
    assert told["none"] == "TypeError: a delay is seconds or a timedelta, not NoneType"
    assert told["nan"] == "ValueError: a delay of NaN seconds"
    assert told["set to none"].startswith("OutboxRetry: it cannot be read: TypeError: a delay is seconds or")
    assert told["lazy"].startswith("Lazy: it cannot be read: AttributeError")
    assert told["hostile"].startswith("Hostile: it cannot be read: ZeroDivisionError")
    assert {told[name] for name in ("infinite", "negative", "huge", "timedelta")} == {"busy"}
    hours = {row["payload"]: row["h"] for row in rows}
    assert (hours["timedelta"], hours["set to timedelta"], hours["negative"]) == (1, 1, 0)
    assert 23 <= hours["infinite"] <= 27
    assert 23 <= hours["huge"] <= 27


@pytest.mark.parametrize(
    "answers", [None, 7, {1: 2}.items(), [True], ["no"]], ids=["none", "int", "items", "true", "str"]
)
async def test_an_answer_for_many_events_that_is_none_is_a_failure_of_each(
    database: TestDatabase, admin: Connection, gateway: Connection, answers: Any
) -> None:
    await write(gateway, "one")

    class Odd(Recorder):
        async def deliver_many(self, _: Any) -> Any:
            return answers

    async with outbox(database, Odd()) as drainer:
        assert await drainer.drain() == DrainReport(claimed=1, failed=1)


@pytest.mark.invariant("O4")
@pytest.mark.parametrize("batch", [1100, 100])
@pytest.mark.kind("poison at the head of the line")
async def test_ten_poison_events_at_the_head_and_all_good_ones_are_delivered_in_the_first_cycle(
    database: TestDatabase, admin: Connection, gateway: Connection, batch: int
) -> None:
    await write(gateway, *(f"poison {n}" for n in range(10)))
    await write(gateway, *range(1000))
    sink = Recorder({f"poison {n}": ValueError("bad") for n in range(10)})
    # A long pause, so that a second try would show.
    async with outbox(database, sink, backoff_base_seconds=3600, backoff_cap_seconds=86400) as drainer:
        total = await _drain_all(drainer, batch) if batch == 100 else Counter(vars_of(await drainer.drain(batch)))
    assert total["delivered"] == 1000
    assert sorted(p for p in sink.payloads if isinstance(p, int)) == list(range(1000))
    assert await admin.fetchval(f"select array_agg(distinct attempts) from {OUTBOX}") == [1]


def vars_of(report: DrainReport) -> dict[str, int]:
    """Return what a report counts."""
    return {name: getattr(report, name) for name in DrainReport.__slots__}


@pytest.mark.invariant("O4")
async def test_the_last_attempt_parks_and_pauses_grow(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "bad")
    sink = Recorder({"bad": ValueError("bad")})
    async with outbox(database, sink, max_attempts=3, backoff_base_seconds=100, backoff_cap_seconds=150) as drainer:
        ceilings = []
        for _ in range(3):
            report = await drainer.drain()
            pause = await admin.fetchval(f"select extract(epoch from available_at - clock_timestamp()) from {OUTBOX}")
            ceilings.append(float(pause))
            await make_due(admin)
        assert report == DrainReport(claimed=1, parked=1)
    assert ceilings[0] <= 100
    assert ceilings[1] <= 150
    assert [event.attempts for event in sink.events] == [0, 1, 2]


async def test_kinds_without_a_sink_are_left_for_others(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "mine", kind="a")
    await write(gateway, "theirs", kind="b")
    sink = Recorder()
    async with Outbox(database.gateway_dsn, sinks={"a": sink}) as drainer:
        assert (await _drain_all(drainer))["delivered"] == 1
    assert await states(admin) == {"theirs": "ready"}
    async with Outbox(database.gateway_dsn) as drainer:
        with pytest.raises(ConfigurationError):
            await drainer.drain()


async def test_a_payload_that_python_cannot_read_hurts_its_own_event_alone(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    call = "select relay.outbox_enqueue($1, $2::text::jsonb, p_tenant => $3)"
    for text in ("9" * 5000, "[" * 3000 + "]" * 3000):
        await gateway.execute(call, KIND, text, TENANT)
    await write(gateway, "good")
    async with outbox(database, Recorder()) as drainer:
        report = await drainer.drain()
    assert (report.delivered, report.failed) == (1, 2)


async def test_a_drain_that_finds_nothing_above_its_cursor_looks_below_it_at_once(
    database: TestDatabase, gateway: Connection
) -> None:
    await write(gateway, 1, 2)
    async with outbox(database, Recorder()) as drainer:
        assert (await drainer.drain(1)).delivered == 1
        (cursor,) = drainer._groups._cursors.values()
        cursor._seq, cursor._zero_at, cursor._again, cursor.zero_allowed_at = 2**52, anyio.current_time(), False, 0
        assert (await drainer.drain(1)).delivered == 1


# --- many ---------------------------------------------------------------------------------------


async def test_eight_drainers_at_once_partition_ten_thousand_events(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    for tenant in ("a", "b"):
        async with gateway.transaction():
            await Outbox.enqueue_many(
                gateway, [OutboxMessage(f"kind {n % 3}", n) for n in range(5000)], tenant=tenant, notify=False
            )
    seen: Counter[tuple[str, int]] = Counter()

    async def sink(event: OutboxEvent) -> None:
        seen[event.tenant_id, event.payload] += 1

    async def drain() -> None:
        async with outbox(database, sink) as drainer:
            await _drain_all(drainer, 500)

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(drain)
    assert seen == Counter({(tenant, n): 1 for tenant in ("a", "b") for n in range(5000)})
    assert await admin.fetchval(f"select count(*) from {OUTBOX}") == 0


async def test_sinks_run_beside_one_another_up_to_the_limit(database: TestDatabase, gateway: Connection) -> None:
    await write(gateway, *range(12))
    running = most = 0
    together = anyio.Event()

    async def sink(_: OutboxEvent) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            together.set()
        await together.wait()
        running -= 1

    async with outbox(database, sink, concurrency=4) as drainer:
        assert (await drainer.drain()).delivered == 12
    assert most == 4


@pytest.mark.invariant("I7")
@pytest.mark.kind("transactions held over the network")
async def test_while_a_sink_runs_no_connection_lock_or_transaction_is_held(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "one")
    looked: list[Any] = []
    async with Database(database.gateway_dsn, min_size=1, max_size=1) as pool:

        async def sink(_: OutboxEvent) -> None:
            # The only connection there is can be had, and nobody has a transaction open or a lock on the row.
            async with pool.connection(within=1) as conn:
                looked.append(await conn.fetchval("select 1"))
            looked.append(await open_transactions(admin))
            looked.append(len(await admin.fetch(f"select 1 from {OUTBOX} for update nowait")))

        async with outbox(pool, sink) as drainer:
            assert (await drainer.drain()).delivered == 1
    assert looked == [1, [], 1]


# --- death, outage, cancellation ----------------------------------------------------------------


@pytest.mark.case("C21")
@pytest.mark.invariant("I3")
async def test_what_a_dead_drainer_had_is_taken_back_and_what_it_says_later_changes_nothing(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "one", "two")
    entered, go_on = anyio.Event(), anyio.Event()

    async def slow(_: OutboxEvent) -> None:
        entered.set()
        await go_on.wait()

    reports: list[DrainReport] = []

    async def late() -> None:
        async with outbox(database, slow) as drainer:
            reports.append(await drainer.drain())

    sink = Recorder()
    async with anyio.create_task_group() as group:
        group.start_soon(late)
        await entered.wait()
        await make_stale(admin)
        async with outbox(database, sink) as drainer:
            report = await drainer.drain()
            assert report.reclaimed == 2
            await _drain_all(drainer)
        await write(gateway, "three")
        before = await admin.fetch(f"select * from {OUTBOX}")
        go_on.set()
    assert sorted(sink.payloads) == ["one", "two"]
    assert [event.attempts for event in sink.events] == [1, 1]
    assert reports == [DrainReport(claimed=2, stale=2)]
    assert await admin.fetch(f"select * from {OUTBOX}") == before


async def test_what_cannot_be_begun_in_time_is_released_uncounted(gateway: Connection) -> None:
    """The time is over while the first of them is on its way; that one ends as it ends."""
    await write(gateway, "first", "second", "third")
    seen: list[Any] = []

    async def sink(event: OutboxEvent) -> None:
        seen.append(event.payload)
        delivery._begin_until = anyio.current_time()

    delivery = Delivery(
        await take(gateway), lambda _: sink, concurrency=1, timeout=60, begin_until=anyio.current_time() + 60,
        backoff_base=1, backoff_cap=1,
    )  # fmt: skip
    await delivery.run()
    assert seen == ["first"]
    assert [verdict.outcome for _, verdict in delivery.verdicts] == ["delivered", "release", "release"]


@pytest.mark.case("C29")
@pytest.mark.parametrize("native", [False, True], ids=["scope", "task"])
async def test_a_cancelled_drain_settles_what_is_done_and_releases_the_rest_at_once(
    database: TestDatabase, admin: Connection, gateway: Connection, native: bool
) -> None:
    await write(gateway, "done", "hangs", "never begun")
    hanging = anyio.Event()
    ended: list[str] = []

    async def hang(_: OutboxEvent) -> None:
        hanging.set()
        try:
            await anyio.sleep_forever()
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    sink = Recorder({"hangs": hang})
    async with outbox(database, sink, concurrency=1) as drainer:
        if native:
            task = asyncio.get_running_loop().create_task(drainer.drain())
            await hanging.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(drainer.drain)
                await hanging.wait()
                group.cancel_scope.cancel()
    assert ended == ["CancelledError"]
    assert sink.payloads == ["done", "hangs"]
    assert await states(admin) == {"hangs": "ready", "never begun": "ready"}
    assert await admin.fetchval(f"select array_agg(distinct (attempts, suspect)::text) from {OUTBOX}") == ["(0,f)"]


@pytest.mark.case("C29")
async def test_an_interrupt_in_a_sink_ends_the_process_after_the_batch_is_settled_and_counts_nothing(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "done", "ends", "never begun")
    sink = Recorder({"ends": KeyboardInterrupt()})
    async with outbox(database, sink, concurrency=1) as drainer:
        with pytest.raises(KeyboardInterrupt):
            await drainer.drain()
    assert await states(admin) == {"ends": "ready", "never begun": "ready"}
    assert await admin.fetchval(f"select max(attempts) from {OUTBOX}") == 0


@pytest.mark.case("C29")
@pytest.mark.invariant("O4")
@pytest.mark.kind("poison at the head of the line")
async def test_an_event_whose_sink_exits_ends_processes_until_it_is_parked_and_counts_for_no_other(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "done", "exits", "never begun")
    sink = Recorder({"exits": SystemExit(3)})
    query = f"select payload #>> '{{}}' as payload, state, attempts, last_error from {OUTBOX} order by event_id"
    async with outbox(database, sink, concurrency=1, max_attempts=2) as drainer:
        with pytest.raises(SystemExit) as ended:
            await drainer.drain()
    assert ended.value.code == 3
    told = "S2R-SINK-EXIT: its sink raised SystemExit: 3"
    rows = [tuple(row) for row in await admin.fetch(query)]
    assert rows == [("exits", "ready", 1, told), ("never begun", "ready", 0, None)]
    await make_due(admin)
    async with outbox(database, sink, concurrency=1, max_attempts=2) as drainer:
        with pytest.raises(SystemExit):
            await drainer.drain()
    async with outbox(database, sink, concurrency=1, max_attempts=2) as drainer:
        await drainer.drain()
    assert [tuple(row) for row in await admin.fetch(query)] == [("exits", "parked", 2, told)]


@pytest.mark.case("C29")
async def test_a_sink_of_many_events_that_exits_has_failed_for_those_it_was_given(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """Which of them it was nobody can tell."""

    class Exits(Recorder):
        async def deliver_many(self, _: Any) -> Any:
            raise SystemExit("so be it")

    await write(gateway, "one", "two")
    async with outbox(database, Exits()) as drainer:
        with pytest.raises(SystemExit):
            await drainer.drain()
    rows = await admin.fetch(f"select attempts, last_error from {OUTBOX}")
    assert [tuple(row) for row in rows] == [(1, "S2R-SINK-EXIT: its sink raised SystemExit: so be it")] * 2


async def test_a_settling_is_repeated_through_an_outage(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "one", "two")
    async with TcpProxy.before(database.gateway_dsn) as proxy:

        async def cut(event: OutboxEvent) -> None:
            proxy.mode = "reset"
            if event.payload == "two":
                raise ValueError("no")

        async def mend() -> None:
            await eventually(lambda: tries >= 2)
            proxy.mode = "pass"

        drainer = outbox(_slow(proxy.dsn(database.gateway_dsn)), cut)
        tries = 0
        settle = drainer.verbs.settle

        async def counted(*args: Any, **options: Any) -> Any:
            nonlocal tries
            tries += 1
            return await settle(*args, **options)

        drainer._verbs = _Verbs(drainer.verbs, settle=counted)  # type: ignore[assignment]
        async with drainer._database, drainer, anyio.create_task_group() as group:
            group.start_soon(mend)
            report = await drainer.drain()
    assert report == DrainReport(claimed=2, delivered=1, failed=1)
    assert await states(admin) == {"two": "ready"}


async def test_a_settling_whose_reply_was_lost_is_not_counted_as_somebody_elses(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "one", "two", "three")
    sink = Recorder({"two": ValueError("no"), "three": OutboxPark("no")})
    async with outbox(database, sink) as drainer:
        settle, lost = drainer.verbs.settle, False

        async def reply_lost(*args: Any, **options: Any) -> Any:
            nonlocal lost
            answer = await settle(*args, **options)
            if not lost:
                lost = True
                raise ConnectionLostError("the reply was lost")
            return answer

        drainer._verbs = _Verbs(drainer.verbs, settle=reply_lost)  # type: ignore[assignment]
        assert await drainer.drain() == DrainReport(claimed=3, delivered=1, failed=1, parked=1)
    assert await states(admin) == {"two": "ready", "three": "parked"}


async def test_a_claim_whose_reply_was_lost_is_given_back_by_the_next_drain(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "one")
    sink = Recorder()
    async with outbox(database, sink) as drainer:
        verbs = drainer.verbs

        async def reply_lost(*args: Any, **options: Any) -> Any:
            await verbs.claim(*args, **options)
            drainer._verbs = verbs
            raise ConnectionLostError("the reply was lost")

        drainer._verbs = _Verbs(verbs, claim=reply_lost)  # type: ignore[assignment]
        with pytest.raises(ConnectionLostError):
            await drainer.drain()
        assert await states(admin) == {"one": "claimed"}
        assert (await drainer.drain()).delivered == 1
    assert [event.attempts for event in sink.events] == [0]


async def test_without_the_database_a_drain_says_so_and_without_the_room_it_says_which(
    bare_database: TestDatabase, admin: Connection
) -> None:
    with pytest.raises(DatabaseUnavailableError):
        async with Outbox("postgresql://u:p@127.0.0.1:9/x", default_sink=Recorder()):
            pass
    await migrate(bare_database.admin_dsn, only=["dispatch"])
    with pytest.raises(SchemaMismatchError, match=r"the room outbox .* is not in this database \(there is: dispatch\)"):
        async with Outbox(bare_database.admin_dsn, default_sink=Recorder()):
            pass


@pytest.mark.parametrize(
    "settings", [{"sink_timeout_seconds": 100}, {"retry_horizon_seconds": 7 * 86400}, {"stop_timeout_seconds": 0}]
)
def test_settings_that_would_deliver_past_a_claim_or_a_key_or_give_nothing_back_are_refused(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(ConfigurationError):
        OutboxSettings(**settings)


async def test_a_business_database_with_the_outbox_alone_will_do(bare_database: TestDatabase) -> None:
    await migrate(bare_database.admin_dsn, only=["outbox"])
    await grant(bare_database.admin_dsn, "relay_gateway_login", role="gateway", tenant=TENANT)
    sink = Recorder()
    async with connected(bare_database.gateway_dsn) as conn, outbox(bare_database, sink) as drainer:
        await conn.execute("create temp table orders (id int)")
        async with conn.transaction():
            await conn.execute("insert into orders values (7)")
            await Outbox.enqueue(conn, KIND, {"order": 7}, tenant=TENANT)
        assert (await drainer.drain()).delivered == 1
        assert await take(conn) == []
    assert sink.payloads == [{"order": 7}]


def _slow(dsn: str) -> Database:
    return Database(dsn, min_size=1, max_size=2, connect_timeout=2.0, command_timeout=2.0)


class _Verbs:
    """A drainer's verbs, some of them replaced."""

    def __init__(self, verbs: Any, **replaced: Any) -> None:
        self._verbs = verbs
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._verbs, name)


# --- sinks that take events together ------------------------------------------------------------


class Together(Recorder):
    """A sink that takes events together, and answers for each what `answers` says."""

    def __init__(self, answers: dict[Any, Any] | None = None) -> None:
        super().__init__(answers)
        self.calls: list[int] = []

    async def deliver_many(self, events: Any) -> list[Exception | None]:
        self.calls.append(len(events))
        self.events.extend(events)
        return [self.answers.get(event.payload) for event in events]


async def test_a_sink_that_takes_events_together_is_called_once_and_answers_for_each(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await write(gateway, "good", "fails", "parks", "later")
    sink = Together({"fails": ValueError("no"), "parks": OutboxPark("never"), "later": OutboxRetry("busy", 3600)})
    async with outbox(database, sink) as drainer:
        assert await drainer.drain() == DrainReport(claimed=4, delivered=1, failed=2, parked=1)
    assert sink.calls == [4]
    rows = await admin.fetch(
        f"select payload #>> '{{}}' as payload, state, last_error, available_at > now() + interval '59 min' as late"
        f" from {OUTBOX}"
    )
    assert {row["payload"]: (row["state"], row["last_error"], row["late"]) for row in rows} == {
        "fails": ("ready", "ValueError: no", False),
        "parks": ("parked", "never", False),
        "later": ("ready", "busy", True),
    }


@pytest.mark.parametrize("fault", ["raises", "miscounts", "hangs"])
async def test_where_a_call_for_many_events_fails_each_of_them_has_failed_once(
    database: TestDatabase, admin: Connection, gateway: Connection, fault: str
) -> None:
    await write(gateway, "one", "two")

    class Faulty(Together):
        async def deliver_many(self, events: Any) -> list[Exception | None]:
            if fault == "raises":
                raise ValueError("all of them")
            if fault == "hangs":
                await anyio.sleep_forever()
            return [None]

    async with outbox(database, Faulty(), sink_timeout_seconds=0.05) as drainer:
        assert await drainer.drain() == DrainReport(claimed=2, failed=2)
    errors = await admin.fetchval(f"select array_agg(distinct last_error) from {OUTBOX}")
    told = {
        "raises": "ValueError: all",
        "miscounts": "ValueError: its sink has answered for 1 of 2",
        "hangs": "S2R-SINK",
    }
    assert len(errors) == 1
    assert errors[0].startswith(told[fault])
    assert await admin.fetchval(f"select array_agg(distinct attempts) from {OUTBOX}") == [1]


async def test_of_several_tenants_none_waits_behind_the_sinks_of_another(
    database: TestDatabase, gateway: Connection
) -> None:
    await write(gateway, *range(20), tenant="many")
    await write(gateway, "alone", tenant="one")
    hanging, came = anyio.Event(), anyio.Event()

    async def sink(event: OutboxEvent) -> None:
        if event.tenant_id == "one":
            came.set()
            return
        hanging.set()
        await anyio.sleep_forever()

    async with outbox(database, sink, concurrency=2) as drainer, anyio.create_task_group() as group:
        group.start_soon(drainer.drain)
        with anyio.fail_after(10):
            await came.wait()
            await hanging.wait()
        group.cancel_scope.cancel()
