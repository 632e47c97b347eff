"""A DSN that names several hosts: whoever takes writes is found, however the others are away."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import anyio
import pytest

from dispatch_core import hosts as module
from dispatch_core.database import Database, close_connection, connect
from dispatch_core.dev.cluster import free_port
from dispatch_core.errors import DatabaseError, DatabaseUnavailableError
from dispatch_core.hosts import hosts_of
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS
from tests.support.proxy import TcpProxy


@pytest.fixture(autouse=True)
def _nobody_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_last", {})


def dsn_of(dsn: str, *ports: int, query: str = "") -> str:
    parts = urlsplit(dsn)
    login = parts.netloc.rpartition("@")[0]
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return urlunsplit(parts._replace(netloc=f"{login}@{hosts}", query=query))


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("postgresql://u:p@a:1,b/db?x=1", [("a", 1), ("b", 5432)]),
        ("postgresql://u@a,b,c:3/db?port=7", [("a", 7), ("b", 7), ("c", 3)]),
        ("postgresql://u@[::1]:5,[::2]/db", [("::1", 5), ("::2", 5432)]),
        ("postgresql://u@%2Frun%2Fa,b:9/db", [("/run/a", 5432), ("b", 9)]),
        ("postgresql:///db?host=a,b&port=1,2", [("a", 1), ("b", 2)]),
        ("postgresql://u:p@a:1/db", []),
        ("postgresql:///db", []),
        # Not understood: left to the driver, which tells what is wrong.
        ("postgresql://u:p@a:1,b:x/db", []),
        ("postgresql://u:p@a,b/db?port=1,2,3", []),
        ("postgresql://u:p@[a,b/db", []),
    ],
)
def test_the_hosts_of_a_dsn_are_read_as_the_driver_reads_them(dsn: str, expected: list[Any]) -> None:
    assert list(hosts_of(dsn)) == expected


async def test_a_host_that_is_silent_keeps_nobody_from_the_next(database: TestDatabase) -> None:
    """And is asked once: whoever took us last is asked first, by all connections of the process."""
    port = urlsplit(database.gateway_dsn).port
    assert port is not None
    async with TcpProxy.before(database.gateway_dsn) as silent:
        silent.mode = "black_hole"
        dsn = dsn_of(database.gateway_dsn, silent.port, port)
        conn = await connect(dsn, connect_timeout=5)
        assert await conn.fetchval("select 1") == 1
        await close_connection(conn)
        assert silent.accepted == 1
        async with Database(dsn, min_size=3, connect_timeout=5) as pool:
            assert [tuple(row) for row in await pool.execute("select 1")] == [(1,)]
        assert silent.accepted == 1


async def test_a_call_with_little_time_still_reaches_the_second_host(database: TestDatabase) -> None:
    """The pool's connections are opened within what a statement may wait: a silent host must not take it all."""
    port = urlsplit(database.gateway_dsn).port
    assert port is not None
    async with TcpProxy.before(database.gateway_dsn) as first:
        dsn = dsn_of(database.gateway_dsn, first.port, port)
        first.mode = "black_hole"
        async with Database(dsn, min_size=0, connect_timeout=10) as pool, pool.connection(within=3.0) as conn:
            assert await conn.fetchval("select 1") == 1


async def test_hosts_that_refuse_are_passed_over_and_named_when_none_is_left(database: TestDatabase) -> None:
    port = urlsplit(database.gateway_dsn).port
    assert port is not None
    nobody, nobody_either = free_port(), free_port()
    conn = await connect(dsn_of(database.gateway_dsn, nobody, port))
    await close_connection(conn)
    with pytest.raises(DatabaseUnavailableError) as caught:
        await connect(dsn_of(database.gateway_dsn, nobody, nobody_either))
    assert caught.value.retryable
    for each in (nobody, nobody_either):
        assert f"127.0.0.1:{each} (Connection refused)" in str(caught.value)


async def test_hosts_that_are_all_silent_are_given_up_in_time(database: TestDatabase) -> None:
    async with TcpProxy.before(database.gateway_dsn) as silent:
        silent.mode = "black_hole"
        with pytest.raises(DatabaseUnavailableError, match="did not answer in time"), anyio.fail_after(HANGS):
            await connect(dsn_of(database.gateway_dsn, silent.port, silent.port), connect_timeout=0.5)
        with anyio.move_on_after(0.1) as scope:
            await connect(dsn_of(database.gateway_dsn, silent.port, silent.port), connect_timeout=30)
        assert scope.cancelled_caught


async def test_a_password_that_is_refused_is_told_at_once(database: TestDatabase) -> None:
    """Another host would hardly like it better, and whoever set it should see it."""
    port = urlsplit(database.gateway_dsn).port
    assert port is not None
    dsn = dsn_of(database.dsn("relay_gateway_login", "wrong"), port, free_port())
    with pytest.raises(DatabaseError, match="password authentication failed") as caught:
        await connect(dsn)
    assert not isinstance(caught.value, DatabaseUnavailableError)


async def test_without_a_target_of_several_hosts_the_one_that_takes_writes_is_chosen(
    database: TestDatabase, admin: Any
) -> None:
    """The driver itself takes any. Said in the DSN, it is what is said."""
    port = urlsplit(database.gateway_dsn).port
    assert port is not None
    await admin.execute(f'alter database "{database.name}" set default_transaction_read_only = on')
    with pytest.raises(DatabaseUnavailableError, match="read only"):
        await connect(dsn_of(database.gateway_dsn, port, port))
    conn = await connect(dsn_of(database.gateway_dsn, port, port, query="target_session_attrs=any"))
    await close_connection(conn)
