"""Tries to connect are spaced by one place, however many wait for a connection; without a server, and with one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from dispatch_core import pacing
from dispatch_core.database import Database, connect
from dispatch_core.errors import ConnectionLostError, DatabaseError, DatabaseUnavailableError
from dispatch_core.pacing import Pace, pace_of
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.proxy import TcpProxy


class Server:
    """What is tried: says no, or is silent, or opens; and counts."""

    def __init__(self, *, cap: float = 0.05) -> None:
        self.pace = Pace(0.001, cap)
        self.patience = 60.0
        self.says: Exception | None = DatabaseUnavailableError("away")
        self.silent: anyio.Event | None = None
        self.proofs: list[bool] = []
        self.at_once = 0
        self.most_at_once = 0

    async def attempt(self, proves: bool) -> str:
        self.proofs.append(proves)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await anyio.lowlevel.checkpoint()
            if self.silent is not None:
                await self.silent.wait()
            if self.says is not None:
                raise self.says
            return "open"
        finally:
            self.at_once -= 1

    async def ask(self) -> str:
        return await self.pace.run(
            self.attempt,
            until=time.monotonic() + self.patience,
            again=lambda error: type(error)(str(error)),
            refuses=lambda error: "login" in str(error),
        )


async def asked_by(count: int, ask: Callable[[], object]) -> Counter[str]:
    answers: Counter[str] = Counter()

    async def one() -> None:
        try:
            answers[str(await ask())] += 1  # type: ignore[misc]
        except DatabaseError as error:
            answers[str(error)] += 1

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(one)
    return answers


async def test_while_all_is_well_everybody_connects_beside_each_other_and_nothing_is_proven() -> None:
    server = Server()
    server.says = None
    assert await asked_by(10, server.ask) == {"open": 10}
    assert server.most_at_once == 10
    assert server.proofs == [False] * 10


async def test_of_many_who_wait_in_an_outage_one_tries_and_all_hear_how_it_ended() -> None:
    server = Server()
    with pytest.raises(DatabaseUnavailableError):
        await server.ask()
    server.proofs.clear()
    server.most_at_once = 0
    assert await asked_by(64, server.ask) == {"away": 64}
    # The first of them had its turn before the others came, who then heard of the next one.
    assert server.most_at_once == 1
    assert len(server.proofs) <= 2


async def test_tries_beside_each_other_that_fail_together_are_one_failure() -> None:
    server = Server()
    await asked_by(10, server.ask)
    assert server.pace.failures == 1
    assert server.pace.tries == 10


async def test_the_first_try_that_succeeds_lets_everybody_go_on_at_once() -> None:
    server = Server(cap=60)
    with pytest.raises(DatabaseUnavailableError):
        await server.ask()
    server.says = None
    server.silent = anyio.Event()
    server.proofs.clear()
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(server.ask)
        group.start_soon(server.pace.until_open)
        await eventually(lambda: len(server.proofs) == 1)
        server.silent.set()
    assert server.proofs == [True] + [False] * 19
    assert not server.pace.is_held


async def test_nobody_hears_of_a_failure_that_is_older_than_the_question() -> None:
    server = Server()
    for _ in range(5):
        with pytest.raises(DatabaseUnavailableError):
            await server.ask()
    server.says = None
    assert await server.ask() == "open"


async def test_who_would_wait_for_the_next_try_with_half_of_his_time_is_told_at_once() -> None:
    server = Server()
    with pytest.raises(DatabaseUnavailableError):
        await server.ask()
    server.pace._not_before = time.monotonic() + 60
    server.patience = 90
    with anyio.fail_after(10), pytest.raises(DatabaseUnavailableError):
        await server.ask()
    assert server.pace.tries == 1


async def test_a_try_that_is_given_up_leaves_its_turn_to_the_next_after_a_moment() -> None:
    server = Server()
    with pytest.raises(DatabaseUnavailableError):
        await server.ask()
    server.silent = anyio.Event()
    with anyio.move_on_after(0.01):
        await server.ask()
    assert server.pace.failures == 1
    assert server.pace.pause_seconds() > 0.2
    server.silent, server.says = None, None
    assert await server.ask() == "open"


async def test_a_caller_in_haste_says_nothing_of_a_server_that_was_well() -> None:
    server = Server()
    server.silent = anyio.Event()
    with anyio.move_on_after(0.01):
        await server.ask()
    assert not server.pace.is_held


async def test_a_try_that_is_silent_counts_as_failed_while_it_goes_on_and_never_did_if_it_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nobody knew of an outage before a connect's timeout is over: a try outlives its caller."""
    monkeypatch.setattr(pacing, "SILENT_SECONDS", 0.01)
    server = Server()
    for says in (None, DatabaseUnavailableError("away")):
        server.says, server.silent = says, anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(asked_by, 1, server.ask)
            await eventually(lambda: server.pace.is_held)
            assert server.pace.failures == 1
            server.silent.set()
        assert server.pace.failures == (0 if says is None else 1)
    assert str(server.pace.last_error) == "away"


async def test_a_try_that_is_silent_after_a_refused_login_is_no_refusal_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller has given it up; those after him are not told that the login was refused."""
    monkeypatch.setattr(pacing, "SILENT_SECONDS", 0.01)
    server = Server()
    server.says = DatabaseUnavailableError("no such login")
    with pytest.raises(DatabaseUnavailableError, match="login"):
        await server.ask()
    server.silent = anyio.Event()
    with anyio.move_on_after(60) as given_up:
        async with anyio.create_task_group() as group:
            group.start_soon(server.ask)
            await eventually(lambda: server.pace.failures == 2)
            given_up.cancel()
    assert isinstance(server.pace.last_error, TimeoutError)
    server.pace._not_before = time.monotonic() + 60
    server.patience = 90
    with anyio.fail_after(10), pytest.raises(TimeoutError):
        await server.ask()
    server.pace._not_before = time.monotonic() + 0.01
    server.silent, server.says, server.patience = None, None, 60
    assert await server.ask() == "open"  # who was refused a login would have been told so at once


async def test_of_tries_that_are_carried_by_tasks_of_their_own_one_begins_and_the_rest_wait_for_it() -> None:
    server = Server(cap=60)
    with pytest.raises(DatabaseUnavailableError):
        await server.ask()
    server.says = None
    server.silent = anyio.Event()
    server.proofs.clear()

    async def carry(trying: Coroutine[Any, Any, str | None]) -> str | None:
        return await asyncio.create_task(trying)

    async def ask() -> str:
        return await server.pace.run(
            server.attempt, until=time.monotonic() + 60, again=lambda error: error, refuses=lambda _: False, carry=carry
        )

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(ask)
        await eventually(lambda: bool(server.proofs))
        await anyio.wait_all_tasks_blocked()
        assert server.proofs == [True]
        server.silent.set()
    assert server.proofs == [True] + [False] * 4


async def test_a_refused_login_is_told_at_once_and_seldom_tried() -> None:
    server = Server()
    server.says = DatabaseError("login refused")
    for _ in range(2):
        with pytest.raises(DatabaseError):
            await server.ask()
    # Now there is a pause; how long, chance decides.
    server.pace._not_before = time.monotonic() + 60
    tries = server.pace.tries
    assert await asked_by(100, server.ask) == {"login refused": 100}
    assert server.pace.tries == tries


async def test_after_a_lost_connection_the_next_is_proven_before_others_follow(database: TestDatabase) -> None:
    async with Database(database.gateway_dsn, max_size=4) as pool, anyio.create_task_group() as group:
        pace = pace_of(database.gateway_dsn)
        with pytest.raises(DatabaseUnavailableError):
            await pool.execute("select pg_terminate_backend(pg_backend_pid())")
        assert pace.is_held
        for _ in range(4):
            group.start_soon(pool.execute, "select pg_sleep(0.05)")
        await eventually(lambda: not pace.is_held)
    assert pace.failures == 0


async def test_a_pool_that_cannot_grow_lends_what_it_has(database: TestDatabase, admin: asyncpg.Connection) -> None:
    """53300: the server takes no more of this login, and those that it has taken work on."""
    login = await admin.fetchval("select rolname from pg_roles where rolname like 'relay%gateway%' and rolcanlogin")
    async with Database(database.gateway_dsn, min_size=2, max_size=10) as pool:
        await admin.execute(f'alter role "{login}" connection limit 2')
        try:
            answers = await asked_by(64, lambda: pool.execute("select 1"))
        finally:
            await admin.execute(f'alter role "{login}" connection limit -1')
        assert set(answers) == {str(await pool.execute("select 1"))}
        assert pool.opened == 2


async def test_listener_and_pool_and_single_connections_of_one_dsn_are_paced_together(database: TestDatabase) -> None:
    async with TcpProxy.before(database.gateway_dsn) as way:
        dsn = way.dsn(database.gateway_dsn)
        async with Database(dsn, max_size=2) as pool:
            pace = pace_of(dsn)
            way.mode = "reset"
            with pytest.raises(DatabaseUnavailableError):
                await pool.execute("select 1")
            with pytest.raises(DatabaseUnavailableError):
                await connect(dsn)
            assert pace.failures == 1
            way.mode = "pass"
            await pool.execute("select 1")
            assert not pace.is_held


async def test_a_connection_goes_on_being_opened_where_its_caller_has_no_more_time(database: TestDatabase) -> None:
    async with (
        TcpProxy.before(database.gateway_dsn) as way,
        Database(f"{way.dsn(database.gateway_dsn)}?sslmode=disable", min_size=0, max_size=1) as pool,
    ):
        way.mode = "black_hole"
        with pytest.raises(DatabaseUnavailableError, match="in time"):
            async with pool.connection(0.05):
                raise AssertionError
        way.mode = "pass"
        await pool.execute("select 1")
        assert way.accepted == 1
        assert (pool.opened, pool._pool._places, pool._pool._opening) == (1, 1, 0)


@pytest.mark.parametrize("cut", [False, True])
async def test_a_pool_that_is_closed_leaves_nothing_of_what_is_still_being_opened(
    database: TestDatabase, cut: bool
) -> None:
    async with TcpProxy.before(database.gateway_dsn) as way:
        before = asyncio.all_tasks()
        async with Database(f"{way.dsn(database.gateway_dsn)}?sslmode=disable", min_size=0, max_size=2) as pool:
            way.mode = "black_hole"
            for _ in range(2):
                with pytest.raises(DatabaseUnavailableError):
                    async with pool.connection(0.05):
                        raise AssertionError
            pace = pace_of(f"{way.dsn(database.gateway_dsn)}?sslmode=disable")
            assert pool._pool._opening == 2
            if cut:
                pool.terminate()
                await eventually(lambda: pool._pool._opening == 0)
                assert pool._pool._places == 0
        assert not pace._trying
        assert {task for task in asyncio.all_tasks() - before if "proxy" not in repr(task)} == set()


async def test_who_had_little_time_for_a_statement_costs_his_connection_and_no_other(database: TestDatabase) -> None:
    async with Database(database.gateway_dsn, min_size=2, max_size=2) as pool:
        async with pool.connection() as one, pool.connection() as other:
            pids = {one.get_server_pid(), other.get_server_pid()}
        with pytest.raises(ConnectionLostError, match="in time"):
            async with pool.connection() as conn:
                await conn.execute("select pg_sleep(60)", timeout=0.05)
        assert not pace_of(database.gateway_dsn).is_held
        ((pid,),) = await pool.execute("select pg_backend_pid()")
        assert pid in pids
        assert pool.opened == 2
