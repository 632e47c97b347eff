"""The tests' own tools do what the tests rely on."""

from __future__ import annotations

import anyio
import asyncpg
import pytest

from tests.support.activity import backends, pid_of, terminate, wait_until_blocked, wait_until_statement_runs
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually, never
from tests.support.proxy import TcpProxy


async def test_eventually_waits_for_truth_and_reports_the_last_falsehood() -> None:
    answers = iter([0, None, "there"])
    assert await eventually(lambda: next(answers)) == "there"

    def almost() -> bool:
        raise AssertionError("almost")

    with pytest.raises(AssertionError, match=r"the moon did not come true within 0\.05 s; last: .*'almost'"):
        await eventually(almost, 0.05, message="the moon")


async def test_never_fails_at_the_first_truth() -> None:
    await never(lambda: False, during=0.05)
    with pytest.raises(AssertionError, match="it came true: 1"):
        await never(lambda: 1, during=5)


async def test_a_blocked_backend_is_seen_with_its_blocker(bare_database: TestDatabase) -> None:
    one = await asyncpg.connect(bare_database.admin_dsn)
    two = await asyncpg.connect(bare_database.admin_dsn, server_settings={"application_name": "second"})
    observer = await asyncpg.connect(bare_database.admin_dsn)
    await one.execute("select pg_advisory_lock(1)")
    async with anyio.create_task_group() as group:
        group.start_soon(two.execute, "select pg_advisory_lock(1)")
        assert await wait_until_blocked(observer, pid_of(two), by=pid_of(one)) == [pid_of(one)]
        assert await wait_until_statement_runs(observer, "pg_advisory_lock") == pid_of(two)
        assert [row["pid"] for row in await backends(observer, "second")] == [pid_of(two)]
        await terminate(observer, pid_of(one))
    for connection in (one, two, observer):
        connection.terminate()


async def test_the_proxy_forwards_and_knows_each_connections_backend(bare_database: TestDatabase) -> None:
    async with TcpProxy.before(bare_database.admin_dsn) as proxy:
        connection = await asyncpg.connect(proxy.dsn(bare_database.admin_dsn))
        assert await connection.fetchval("select length($1::text)", "x" * 1_000_000) == 1_000_000
        (through,) = proxy.connections
        port = await connection.fetchval("select client_port from pg_stat_activity where pid = pg_backend_pid()")
        assert port == through.server_side_port
        assert through.bytes_up > 1_000_000
        await connection.close()
        await eventually(lambda: not proxy.connections)


async def test_a_black_hole_keeps_sockets_open_and_lets_go_on_later(bare_database: TestDatabase) -> None:
    async with TcpProxy.before(bare_database.admin_dsn) as proxy:
        held = await asyncpg.connect(proxy.dsn(bare_database.admin_dsn))
        free = await asyncpg.connect(proxy.dsn(bare_database.admin_dsn))
        proxy.connections[0].mode = "black_hole"
        with pytest.raises(TimeoutError):
            await held.fetchval("select 1", timeout=0.1)
        assert not held.is_closed()
        assert await free.fetchval("select 2") == 2
        proxy.mode = "black_hole"
        with pytest.raises(TimeoutError):
            await asyncpg.connect(proxy.dsn(bare_database.admin_dsn), timeout=0.1)
        proxy.connections[0].mode = None
        proxy.mode = "pass"
        assert await free.fetchval("select 3") == 3
        for connection in (held, free):
            connection.terminate()


async def test_a_reset_cuts_open_connections_and_new_ones(bare_database: TestDatabase) -> None:
    async with TcpProxy.before(bare_database.admin_dsn) as proxy:
        connection = await asyncpg.connect(proxy.dsn(bare_database.admin_dsn))
        proxy.mode = "reset"
        with pytest.raises((ConnectionError, asyncpg.PostgresConnectionError)):
            await connection.fetchval("select 1")
        with pytest.raises((ConnectionError, asyncpg.PostgresConnectionError)):
            await asyncpg.connect(proxy.dsn(bare_database.admin_dsn))
        proxy.mode = "pass"
        connection = await asyncpg.connect(proxy.dsn(bare_database.admin_dsn))
        proxy.reset_all()
        with pytest.raises((ConnectionError, asyncpg.PostgresConnectionError)):
            await connection.fetchval("select 1")


async def test_a_connection_is_cut_in_the_middle_of_an_answer(bare_database: TestDatabase) -> None:
    async with TcpProxy.before(bare_database.admin_dsn) as proxy:
        connection = await asyncpg.connect(proxy.dsn(bare_database.admin_dsn))
        proxy.cut_after(200_000)
        assert len(await connection.fetchval("select repeat('x', 100000)")) == 100_000
        with pytest.raises((ConnectionError, asyncpg.PostgresConnectionError)):
            await connection.fetchval("select repeat('x', 100000)")
        # New ones are served as before.
        other = await asyncpg.connect(proxy.dsn(bare_database.admin_dsn))
        assert len(await other.fetchval("select repeat('x', 1000000)")) == 1_000_000
        other.terminate()


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "simple"])
async def test_a_connection_is_cut_between_a_statement_that_is_done_and_its_answer(
    bare_database: TestDatabase, prepared: bool
) -> None:
    async with TcpProxy.before(bare_database.admin_dsn, reads_along=True) as proxy:
        one, other = [await asyncpg.connect(proxy.dsn(bare_database.admin_dsn)) for _ in range(2)]
        await one.execute("create table t (n int)")
        cut = proxy.cut_answer("insert into t")
        await one.execute("select 1")
        with pytest.raises((ConnectionError, asyncpg.PostgresConnectionError)):
            await one.execute("insert into t select n from generate_series(1, $1) n", 3) if prepared else (
                await one.execute("insert into t select n from generate_series(1, 3) n")
            )
        assert cut.is_set()
        assert await other.fetchval("select count(*) from t") == 3
        await other.execute("insert into t values (4)")
        other.terminate()


async def test_throttle_lets_so_many_bytes_a_second_through(bare_database: TestDatabase) -> None:
    async with TcpProxy.before(bare_database.admin_dsn) as proxy:
        connection = await asyncpg.connect(proxy.dsn(bare_database.admin_dsn))
        proxy.bytes_per_second, proxy.mode = 1_000_000.0, "throttle"
        before = anyio.current_time()
        await connection.fetchval("select repeat('x', 100000)")
        assert anyio.current_time() - before >= 0.1
        connection.terminate()


async def test_delay_makes_a_round_trip_late(bare_database: TestDatabase) -> None:
    async with TcpProxy.before(bare_database.admin_dsn, delay_seconds=0.05) as proxy:
        connection = await asyncpg.connect(proxy.dsn(bare_database.admin_dsn))
        proxy.mode = "delay"
        before = anyio.current_time()
        await connection.execute("select 1")
        assert anyio.current_time() - before >= 0.1
        connection.terminate()
