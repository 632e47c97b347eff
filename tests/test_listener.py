"""The listener: it hears, it knows when it does not, and it comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import anyio
import asyncpg
import pytest

from dispatch_core.dev.postgres import DevServer
from dispatch_core.errors import (
    ConfigurationError,
    ConnectionLostError,
    DatabaseError,
    DatabaseUnavailableError,
    InvalidInputError,
)
from dispatch_core.listener import Listener, ListenerState
from tests.support.activity import backends, terminate
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually, never
from tests.support.pooler import FakePooler
from tests.support.proxy import TcpProxy

Admin: TypeAlias = "asyncpg.Connection[Any]"

# Short enough for a test; what is measured against them are bounds, never averages.
QUICK: dict[str, Any] = {
    "connect_timeout": 1.0,
    "probe_seconds": 0.3,
    "probe_timeout_seconds": 0.3,
    "backoff_base": 0.02,
    "backoff_cap": 0.2,
}


class Heard:
    """Everything that a listener told."""

    def __init__(self, listener: Listener) -> None:
        self.payloads: list[str] = []
        self.states: list[ListenerState] = []
        self.catch_ups = 0
        listener.on_state_change(self.states.append)
        listener.on_catch_up(self._catch_up)

    def _catch_up(self) -> None:
        self.catch_ups += 1

    def __call__(self, payload: str) -> None:
        self.payloads.append(payload)

    async def until_last_is(self, *payloads: str) -> None:
        await eventually(lambda: self.payloads[-len(payloads) :] == [*payloads], message=f"hearing {payloads}")


@asynccontextmanager
async def running(listener: Listener) -> AsyncIterator[Heard]:
    heard = Heard(listener)
    async with anyio.create_task_group() as group:
        await group.start(listener.run)
        yield heard
        group.cancel_scope.cancel()


async def until(listener: Listener, state: ListenerState, timeout: float = 10) -> None:
    await eventually(lambda: listener.state == state, timeout, message=f"the listener's state {state}")


async def of_listener(admin: Admin, listener: Listener) -> list[int]:
    return [row["pid"] for row in await backends(admin, listener.application_name)]


async def test_what_is_sent_on_a_channel_reaches_its_call_backs_and_no_others(
    database: TestDatabase, admin: Admin
) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener) as heard:
        others: list[str] = []
        assert await listener.subscribe("s2r_a", heard)
        assert await listener.subscribe("s2r_a", others.append)
        assert await listener.subscribe("s2r_b", lambda payload: others.append("b:" + payload))
        await admin.execute("select pg_notify('s2r_a', 'one'), pg_notify('s2r_b', 'two'), pg_notify('s2r_c', 'three')")
        await eventually(lambda: len(others) == 2)
        assert heard.payloads == ["one"]
        assert others == ["one", "b:two"]
        assert listener.notifications == 2


async def test_the_channel_names_of_the_schema_are_usable(database: TestDatabase, worker: Admin, admin: Admin) -> None:
    """C09: names come from one function, whatever the tenant and relay are called."""
    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener) as heard:
        relays = ["x" * 64, "€" * 22, "Mixed Case", "quote'\"", "dot.%", "y" * 63 + "1", "y" * 63 + "2"]
        names = [
            await worker.fetchval("select relay.channel('wake', $1, $2)", tenant, relay)
            for tenant in ("acme", "other")
            for relay in relays
        ]
        assert len(set(names)) == 14
        for name in names:
            assert await listener.subscribe(name, lambda payload, name=name: heard(name))  # type: ignore[misc]
        for name in names:
            await admin.execute("select pg_notify($1, '')", name)
        await eventually(lambda: heard.payloads == names)


async def test_listening_is_confirmed_when_subscribing_returns(database: TestDatabase, admin: Admin) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener) as heard:
        for n in range(50):
            assert await listener.subscribe(f"s2r_{n}", heard)
            assert listener.is_listening_to(f"s2r_{n}")
            await admin.execute(f"notify s2r_{n}, '{n}'")
        await eventually(lambda: heard.payloads == [str(n) for n in range(50)])


async def test_channels_that_are_subscribed_together_share_a_round_trip(database: TestDatabase, admin: Admin) -> None:
    async with TcpProxy.before(database.worker_dsn, delay_seconds=0.05) as proxy:
        listener = Listener(proxy.dsn(database.worker_dsn), **(QUICK | {"probe_timeout_seconds": 3.0}))
        async with running(listener) as heard:
            proxy.mode = "delay"
            start = time.monotonic()
            async with anyio.create_task_group() as group:
                for n in range(200):
                    group.start_soon(listener.subscribe, f"s2r_{n}", heard)
            assert time.monotonic() - start < 2
            assert len(await admin.fetch("select 1 from pg_stat_activity where query like 'listen%s2r_199%'")) <= 1
            assert all(listener.is_listening_to(f"s2r_{n}") for n in range(200))


async def test_after_unsubscribing_nothing_more_is_heard_and_the_channel_is_left(
    database: TestDatabase, admin: Admin
) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener) as heard:
        other: list[str] = []
        await listener.subscribe("s2r_a", heard)
        await listener.subscribe("s2r_a", other.append)
        listener.unsubscribe("s2r_a", heard)
        listener.unsubscribe("s2r_a", heard)
        listener.unsubscribe("s2r_never", heard)
        await admin.execute("notify s2r_a, 'one'")
        await eventually(lambda: other == ["one"])
        assert heard.payloads == []
        listener.unsubscribe("s2r_a", other.append)  # equal, so it is found
        await eventually(lambda: not listener.is_listening_to("s2r_a"))
        rows = await listener.execute("select pg_listening_channels()")
        assert rows == []


async def test_a_session_without_subscriptions_listens_to_nothing_and_is_proven_all_the_same(
    database: TestDatabase, admin: Admin
) -> None:
    """Every ring of anybody wakes every session that listens, whatever it listens to."""
    listener = Listener(database.worker_dsn, **QUICK)

    async def channels() -> list[str]:
        return [row[0] for row in await listener.execute("select pg_listening_channels()")]

    async with running(listener) as heard:
        assert listener.state == "listening"
        assert await channels() == []
        assert await listener.subscribe("s2r_a", heard)
        assert await channels() == ["s2r_a"]
        await admin.execute("notify s2r_a, 'one'")
        await eventually(lambda: heard.payloads == ["one"])
        listener.unsubscribe("s2r_a", heard)
        await eventually(lambda: not listener.is_listening_to("s2r_a"))
        assert await channels() == []
        await terminate(admin, listener.backend_pid or 0)
        await eventually(lambda: listener.connects == 2)
        assert await channels() == []


@pytest.mark.case("C29")
async def test_a_cancelled_subscribe_leaves_no_subscription(database: TestDatabase, admin: Admin) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener) as heard:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await listener.subscribe("s2r_a", heard)
        assert scope.cancelled_caught
        assert await listener.subscribe("s2r_b", heard)
        await admin.execute("notify s2r_a, 'a'; notify s2r_b, 'b'")
        await heard.until_last_is("b")
        assert heard.payloads == ["b"]


def test_it_can_be_made_where_no_event_loop_runs(server: DevServer) -> None:
    listener = Listener(server.worker_dsn("nowhere"), **QUICK)

    async def use() -> None:
        async with running(listener):
            await until(listener, "degraded")

    anyio.run(use)


async def test_subscribing_again_at_once_after_unsubscribing_hears(database: TestDatabase, admin: Admin) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener) as heard:
        for n in range(20):
            assert await listener.subscribe("s2r_a", heard)
            await admin.execute(f"notify s2r_a, '{n}'")
            await heard.until_last_is(str(n))
            listener.unsubscribe("s2r_a", heard)
            if n % 2:
                await anyio.wait_all_tasks_blocked()


async def test_a_channel_that_was_subscribed_before_it_runs_is_heard(database: TestDatabase, admin: Admin) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    payloads: list[str] = []
    assert not await listener.subscribe("s2r_a", payloads.append)
    async with running(listener) as heard:
        assert heard.catch_ups == 1
        assert listener.is_listening_to("s2r_a")
        await admin.execute("notify s2r_a, 'one'")
        await eventually(lambda: payloads == ["one"])


async def test_a_call_back_that_raises_is_logged_and_harms_no_other(
    database: TestDatabase, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(payload: str) -> None:
        raise ZeroDivisionError

    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener) as heard:
        await listener.subscribe("s2r_a", broken)
        await listener.subscribe("s2r_a", heard)
        await admin.execute("notify s2r_a, 'garbage'")
        await eventually(lambda: heard.payloads == ["garbage"])
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


@pytest.mark.case("C09")
@pytest.mark.parametrize("channel", ["", "x" * 64, "é" * 32, "a\0b"])
async def test_a_name_that_postgresql_would_cut_is_refused(channel: str) -> None:
    with pytest.raises(InvalidInputError, match="63 bytes"):
        await Listener("postgresql://nowhere").subscribe(channel, print)


async def test_odd_channel_names_are_quoted(database: TestDatabase, admin: Admin) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener) as heard:
        for name in ('a"; notify b; --', "UPPER", "a b", "é", "%s"):
            assert await listener.subscribe(name, heard)
            await admin.execute("select pg_notify($1, $1)", name)
            await heard.until_last_is(name)


async def test_above_the_limit_of_channels_the_rest_is_polled_and_moves_up(
    database: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(database.worker_dsn, max_channels=2, **QUICK)
    async with running(listener) as heard:
        assert [await listener.subscribe(f"s2r_{n}", heard) for n in range(4)] == [True, True, False, False]
        assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
        listener.unsubscribe("s2r_0", heard)
        await eventually(lambda: listener.is_listening_to("s2r_2"))
        assert not listener.is_listening_to("s2r_0")


# --- statements on the same connection ---


async def test_statements_take_their_turn_with_its_own(database: TestDatabase) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener) as heard, anyio.create_task_group() as group:

        async def ask(n: int) -> None:
            assert (await listener.execute("select $1::int, pg_backend_pid()", n))[0][0] == n

        for n in range(30):
            group.start_soon(ask, n)
            group.start_soon(listener.subscribe, f"s2r_{n}", heard)
        await anyio.sleep(2.5 * QUICK["probe_seconds"])  # probes among them
        assert listener.connects == 1


async def test_each_proof_tells_how_long_its_round_trip_took(database: TestDatabase) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    took: list[float] = []
    listener.on_round_trip(took.append)
    async with running(listener):
        await eventually(lambda: len(took) >= 2)
    assert all(0 < seconds < QUICK["probe_timeout_seconds"] for seconds in took)


async def test_a_statement_that_postgresql_refuses_costs_no_connection(database: TestDatabase) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener):
        with pytest.raises(DatabaseError, match="zero"):
            await listener.execute("select 1/0")
        assert (await listener.execute("select 1"))[0][0] == 1
        assert listener.connects == 1


async def test_without_a_connection_a_statement_fails_at_once(unused_tcp_port: int) -> None:
    listener = Listener(f"postgresql://ann@127.0.0.1:{unused_tcp_port}/app", **QUICK)
    with pytest.raises(DatabaseUnavailableError):
        await listener.execute("select 1")
    async with running(listener):
        await until(listener, "degraded")
        with pytest.raises(DatabaseUnavailableError):
            await listener.execute("select 1")
    await until(listener, "stopped")


@pytest.mark.case("C29")
async def test_a_cancelled_statement_costs_nobody_else_anything(database: TestDatabase, admin: Admin) -> None:
    listener = Listener(database.worker_dsn, **(QUICK | {"probe_timeout_seconds": 2.0}))
    async with running(listener) as heard:
        with anyio.move_on_after(0.1) as scope:
            await listener.execute("select pg_sleep(30)")
        assert scope.cancelled_caught
        assert await listener.subscribe("s2r_a", heard)
        await admin.execute("notify s2r_a, 'one'")
        await eventually(lambda: heard.payloads == ["one"])
        assert listener.connects == 1


# --- losing the connection ---


@pytest.mark.case("C02")
async def test_after_each_kill_it_hears_again_with_one_backend(
    database: TestDatabase, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dispatch_core.listener")
    listener = Listener(database.worker_dsn, **QUICK)
    async with running(listener) as heard:
        await listener.subscribe("s2r_a", heard)
        killed: list[int | None] = [None]
        for round_ in range(4):
            assert await of_listener(admin, listener) == [listener.backend_pid]
            for _ in range(1 + round_ % 2):  # in every other round twice in a row: the next one as soon as it is there
                (pid,) = await eventually(lambda: of_listener(admin, listener))
                killed.append(pid)
                await terminate(admin, pid)
            await eventually(lambda: listener.backend_pid not in killed and listener.is_listening_to("s2r_a"))
            await admin.execute(f"notify s2r_a, '{round_}'")
            await heard.until_last_is(str(round_))
            assert len(await of_listener(admin, listener)) == 1
        assert heard.catch_ups == listener.connects
    assert heard.states[:4] == ["listening", "degraded", "listening", "degraded"]
    assert {record.levelname for record in caplog.records} == {"WARNING", "INFO"}


@pytest.mark.case("C02")
async def test_after_a_long_stop_of_the_server_it_hears_again(durable_database: TestDatabase) -> None:
    server = durable_database.server
    listener = Listener(durable_database.worker_dsn, **QUICK)
    async with running(listener) as heard:
        await listener.subscribe("s2r_a", heard)
        for mode in ("fast", "immediate"):
            await anyio.to_thread.run_sync(server.stop, mode)
            await until(listener, "degraded")
            # Long enough for the backoff to have reached its cap; unsubscribing and subscribing go on meanwhile.
            await never(lambda: listener.state == "listening", during=1.0)
            assert not await listener.subscribe("s2r_b", heard)
            listener.unsubscribe("s2r_b", heard)
            assert not await listener.subscribe(f"s2r_{mode}", heard)
            await anyio.to_thread.run_sync(server.start)
            await until(listener, "listening", timeout=5)
            observer = await asyncpg.connect(durable_database.admin_dsn)
            await observer.execute(f"notify s2r_{mode}, '{mode}'; notify s2r_a, 'a'; notify s2r_b, 'b'")
            await heard.until_last_is(mode, "a")
            assert len(await of_listener(observer, listener)) == 1
            await observer.close()


@pytest.mark.case("C01")
async def test_a_line_that_goes_dead_is_noticed_in_time_and_replaced(database: TestDatabase, admin: Admin) -> None:
    async with TcpProxy.before(database.worker_dsn) as proxy:
        listener = Listener(proxy.dsn(database.worker_dsn), **QUICK)
        async with running(listener) as heard:
            await listener.subscribe("s2r_a", heard)
            for round_ in range(2):
                catch_ups = heard.catch_ups
                start = time.monotonic()
                proxy.connections[-1].mode = "black_hole"
                await admin.execute("notify s2r_a, 'lost'")
                await until(listener, "degraded")
                bound = QUICK["probe_seconds"] + QUICK["probe_timeout_seconds"]
                assert time.monotonic() - start < bound + 0.5
                await until(listener, "listening")
                assert heard.catch_ups == catch_ups + 1
                assert "lost" not in heard.payloads
                await admin.execute(f"notify s2r_a, '{round_}'")
                await heard.until_last_is(str(round_))
                # The old session had no way to learn of its end: the new one has ended it.
                await eventually(lambda: _has_one(admin, listener))


async def _has_one(admin: Admin, listener: Listener) -> bool:
    return len(await of_listener(admin, listener)) == 1


@pytest.mark.case("C01")
async def test_a_dead_line_fails_the_statement_on_it_and_the_listener_comes_back(database: TestDatabase) -> None:
    async with TcpProxy.before(database.worker_dsn) as proxy:
        listener = Listener(proxy.dsn(database.worker_dsn), **QUICK)
        async with running(listener):
            proxy.connections[0].mode = "black_hole"
            with anyio.fail_after(3), pytest.raises(ConnectionLostError):
                await listener.execute("select 1")
            await until(listener, "listening")
            assert (await listener.execute("select 1"))[0][0] == 1


@pytest.mark.case("C01")
async def test_subscribing_on_a_dead_line_does_not_wait_for_ever_and_is_kept(
    database: TestDatabase, admin: Admin
) -> None:
    async with TcpProxy.before(database.worker_dsn) as proxy:
        listener = Listener(proxy.dsn(database.worker_dsn), **QUICK)
        async with running(listener) as heard:
            proxy.connections[0].mode = "black_hole"
            with anyio.fail_after(3):
                assert not await listener.subscribe("s2r_a", heard)
            await eventually(lambda: listener.is_listening_to("s2r_a"))
            await admin.execute("notify s2r_a, 'one'")
            await eventually(lambda: heard.payloads == ["one"])


async def test_a_server_that_cannot_be_reached_is_tried_until_it_can(database: TestDatabase, admin: Admin) -> None:
    async with TcpProxy.before(database.worker_dsn) as proxy:
        proxy.mode = "reset"
        listener = Listener(proxy.dsn(database.worker_dsn), **QUICK)
        async with running(listener) as heard:
            assert listener.state == "degraded"
            assert isinstance(listener.last_error, DatabaseUnavailableError)
            proxy.mode = "black_hole"
            await never(lambda: listener.state == "listening", during=0.5)
            proxy.mode = "pass"
            await until(listener, "listening")
            assert listener.last_error is None
            assert heard.states == ["degraded", "listening"]


async def test_a_login_that_is_refused_is_tried_again_and_said(
    database: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(database.dsn("relay_worker_login", "s3cret"), **QUICK)
    async with running(listener):
        assert listener.state == "degraded"
        await never(lambda: listener.state != "degraded", during=0.3)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "password authentication failed" in warnings[0]
    assert "s3cret" not in caplog.text


async def test_a_dsn_that_is_none_is_the_owners_to_know() -> None:
    with pytest.raises(ConfigurationError):
        await Listener("mysql://x").run()


async def test_stopping_leaves_no_backend_and_takes_no_time_even_on_a_dead_line(
    database: TestDatabase, admin: Admin
) -> None:
    async with TcpProxy.before(database.worker_dsn) as proxy:
        listener = Listener(proxy.dsn(database.worker_dsn), **QUICK)
        async with running(listener):
            pass
        assert listener.state == "stopped"
        await eventually(lambda: _has_none(admin, listener))
        listener = Listener(proxy.dsn(database.worker_dsn), **QUICK)
        start = time.monotonic()
        async with running(listener):
            proxy.mode = "black_hole"
        assert time.monotonic() - start < 4


async def _has_none(admin: Admin, listener: Listener) -> bool:
    return not await of_listener(admin, listener)


# --- the order of reading and listening ---


@pytest.mark.case("C03")
async def test_whatever_is_committed_around_a_reconnect_is_rung_or_found_by_the_catch_up(
    database: TestDatabase, admin: Admin
) -> None:
    """A table that is read at each catch-up and each notification never misses a row, polling never."""
    await admin.execute("create table inbox (n bigint generated always as identity)")
    listener = Listener(database.worker_dsn, **QUICK)
    wanted = anyio.Event()
    seen = 0

    def look(payload: str = "") -> None:
        wanted.set()

    async def reader() -> None:
        nonlocal wanted, seen
        while True:
            await wanted.wait()
            wanted = anyio.Event()
            seen = await admin.fetchval("select count(*) from inbox")

    async def until_seen(count: int) -> None:
        await eventually(lambda: seen == count, message="the row's arrival without polling")

    writer = await asyncpg.connect(database.admin_dsn)
    listener.on_catch_up(look)
    async with running(listener), anyio.create_task_group() as group:
        await listener.subscribe("s2r_inbox", look)
        group.start_soon(reader)
        for n in range(1, 301):
            await writer.execute("insert into inbox default values; notify s2r_inbox")
            if n % 30 == 0:
                await writer.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1",
                    listener.application_name,
                )
            if n % 10 == 0:
                await until_seen(n)
        group.cancel_scope.cancel()
    await writer.close()
    assert listener.connects > 5


@pytest.mark.case("C03")
async def test_the_catch_up_comes_after_every_channel_is_confirmed(database: TestDatabase, admin: Admin) -> None:
    listener = Listener(database.worker_dsn, **QUICK)
    confirmed: list[bool] = []
    names = [f"s2r_{n}" for n in range(20)]
    listener.on_catch_up(lambda: confirmed.append(all(map(listener.is_listening_to, names))))
    for name in names:
        await listener.subscribe(name, lambda payload: None)
    async with running(listener):
        await terminate(admin, listener.backend_pid or 0)
        await eventually(lambda: len(confirmed) == 2)
    assert confirmed == [True, True]


async def test_subscriptions_that_change_during_a_reconnect_are_in_step_afterwards(
    database: TestDatabase, admin: Admin
) -> None:
    async with TcpProxy.before(database.worker_dsn, delay_seconds=0.02) as proxy:
        listener = Listener(proxy.dsn(database.worker_dsn), **(QUICK | {"probe_timeout_seconds": 2.0}))
        proxy.mode = "delay"
        async with running(listener) as heard:
            await listener.subscribe("s2r_kept", heard)
            for n in range(3):
                await terminate(admin, listener.backend_pid or 0)
                changes = 0
                while listener.state != "listening" or changes < 10:
                    await listener.subscribe(f"s2r_{changes % 3}", heard)
                    await anyio.sleep(0.005)
                    listener.unsubscribe(f"s2r_{changes % 3}", heard)
                    changes += 1
                assert await listener.subscribe(f"s2r_new_{n}", heard)
            wanted = {"s2r_kept", "s2r_new_0", "s2r_new_1", "s2r_new_2"}

            async def in_step() -> bool:
                rows = await listener.execute("select pg_listening_channels()")
                return {row[0] for row in rows} == wanted

            await eventually(in_step)


# --- poolers ---


@pytest.mark.case("C05")
@pytest.mark.parametrize("mode", ["swap", "sticky"])
async def test_behind_a_transaction_pooler_it_falls_to_polling_with_one_clear_line(
    database: TestDatabase, caplog: pytest.LogCaptureFixture, mode: Any
) -> None:
    async with FakePooler.before(database.worker_dsn, mode=mode) as pooler:
        listener = Listener(pooler.dsn(database.worker_dsn), polling_only_retry_seconds=0.2, **QUICK)
        async with running(listener) as heard:
            assert listener.state == "polling_only"
            assert not await listener.subscribe("s2r_a", heard)
            with pytest.raises(DatabaseUnavailableError):
                await listener.execute("select 1")
            transactions = pooler.transactions
            await eventually(lambda: pooler.transactions > transactions + 5)  # it tries again, and again says nothing
            assert heard.states == ["polling_only"]
            assert heard.catch_ups == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "RELAY_DISPATCH_LISTEN_DSN" in warnings[0]


@pytest.mark.case("C05")
async def test_behind_a_session_pooler_it_listens(database: TestDatabase, admin: Admin) -> None:
    async with FakePooler.before(database.worker_dsn, mode="session") as pooler:
        listener = Listener(pooler.dsn(database.worker_dsn), **QUICK)
        async with running(listener) as heard:
            assert listener.state == "listening"
            assert await listener.subscribe("s2r_a", heard)
            await admin.execute("notify s2r_a, 'one'")
            await eventually(lambda: heard.payloads == ["one"])
            await never(lambda: listener.state != "listening", during=3 * QUICK["probe_seconds"])


@pytest.mark.case("C05")
async def test_a_session_that_is_swapped_later_is_found_by_the_next_probe(database: TestDatabase) -> None:
    async with FakePooler.before(database.worker_dsn, mode="session") as pooler:
        listener = Listener(pooler.dsn(database.worker_dsn), **QUICK)
        async with running(listener):
            assert await listener.subscribe("s2r_a", print)
            await listener.execute("unlisten *")  # as a pooler's reset would
            await until(listener, "polling_only", timeout=QUICK["probe_seconds"] + 2)


async def test_a_pooler_that_is_taken_away_is_noticed_at_the_next_try(database: TestDatabase, admin: Admin) -> None:
    async with FakePooler.before(database.worker_dsn) as pooler, TcpProxy.before(database.worker_dsn) as proxy:
        direct = proxy.upstream_port
        proxy.upstream_port = pooler.port
        listener = Listener(proxy.dsn(database.worker_dsn), polling_only_retry_seconds=0.1, **QUICK)
        async with running(listener) as heard:
            await until(listener, "polling_only")
            await listener.subscribe("s2r_a", heard)
            proxy.upstream_port = direct
            await until(listener, "listening")
            assert heard.catch_ups == 1
            await admin.execute("notify s2r_a, 'one'")
            await eventually(lambda: heard.payloads == ["one"])
