"""Fixtures: one PostgreSQL server a session, one migrated template, one clone of it a test.

server            the session's server; fast, not durable; not for stopping
template          name of the migrated database with all grants; made when the first test asks for it
database          a clone of it for this test -> TestDatabase (name, admin_dsn, gateway_dsn, worker_dsn, …)
bare_database     the same, empty and unmigrated
is_long, seed     of tests that play at random: whether to play long, and from where
admin, gateway, worker, operator     an open asyncpg connection to `database` as that login
durable_server    a second server with durable settings, for tests that stop, crash or restart it
durable_database  a migrated database there

`make test` runs several processes (pytest-xdist), and each has servers of its own: nothing is shared but the machine.
Any test may run beside any other, so each has a database, and where it stops a server that server, to itself.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from dispatch_core.dev.account import server_account
from dispatch_core.dev.cluster import major_version
from dispatch_core.dev.logins import run_blocking
from dispatch_core.dev.postgres import DevServer, start_local_server, start_server
from tests.support.databases import TestDatabase, drop_database, make_template, new_database
from tests.support.high_counters import begin_high, raise_ids

# What a test that does not pull the plug can do without. In memory, since ext4 makes files slowly after many deletions
# (a clone, some 300 files, then takes 250 ms instead of 20).
#
# No autovacuum (D140): its workers come by the clock, and one in any database of the server holds back, for as long as
# its transaction lasts, what everybody else may prune there. A test that needs a vacuum or statistics asks for them. It
# is not off, of which `doctor` warns: its launcher looks around for the first time when the server is long gone.
FAST = {"fsync": "off", "full_page_writes": "off", "max_wal_size": "256MB", "autovacuum_naptime": "24d"}


Connection: TypeAlias = "asyncpg.Connection[Any]"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--postgres-binaries", type=Path, help="run the tests on the server binaries in this bin directory"
    )
    parser.addoption(
        "--long", action="store_true", help="do not cut short what plays many rounds at random, and take new seeds"
    )
    parser.addoption(
        "--high-counters", action="store_true", help="let all counters and ids of the databases begin near 2^31 (C38)"
    )
    parser.addoption("--seed", type=int, help="the seed of what plays at random, where a failed run has printed one")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--high-counters"):
        begin_high()
    chosen: Path | None = config.getoption("--postgres-binaries")
    if chosen is not None and not (chosen / "postgres").is_file():
        # Said once, and at once: else each of thousands of tests would say so.
        raise pytest.UsageError(f"There are no PostgreSQL server binaries in {chosen}.")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the server's version beside that of Python, where it was chosen."""
    chosen: Path | None = config.getoption("--postgres-binaries")
    if chosen is None:
        return None
    return f"PostgreSQL {major_version(chosen.absolute(), server_account())}: {chosen}"


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Make reports fit for the way between processes, which is UTF-8: logged tracebacks hold what handlers raised."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_encodable, value))
    return value


@pytest.fixture
def is_long(pytestconfig: pytest.Config) -> bool:
    """Whether --long was given."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture
def seed(pytestconfig: pytest.Config, is_long: bool) -> int:
    """What a test that plays at random begins with: always the same in the suite, else new; a failed test shows it."""
    given: int | None = pytestconfig.getoption("--seed")
    if given is None:
        given = random.SystemRandom().getrandbits(32) if is_long else 1
    print(f"seed {given}: again with --seed {given}")
    return given


@pytest.fixture(scope="session")
def has_high_counters(pytestconfig: pytest.Config) -> bool:
    """Whether --high-counters was given."""
    return bool(pytestconfig.getoption("--high-counters"))


@pytest.fixture(scope="session")
def binaries(pytestconfig: pytest.Config) -> Path | None:
    """What --postgres-binaries named."""
    path: Path | None = pytestconfig.getoption("--postgres-binaries")
    return path


@pytest.fixture(scope="session")
def server(binaries: Path | None, has_high_counters: bool) -> Iterator[DevServer]:
    with start_server(settings=FAST, binaries=binaries, ephemeral=True, in_memory=True) as server:
        if has_high_counters:
            raise_ids(server)
        yield server


@pytest.fixture(scope="session")
def template(server: DevServer, has_high_counters: bool) -> Iterator[str]:
    name = run_blocking(make_template(server, has_high_counters=has_high_counters))
    yield name
    if not server.is_ours:  # ours is thrown away as a whole
        run_blocking(drop_database(server, name))


@pytest.fixture
async def database(server: DevServer, template: str) -> AsyncIterator[TestDatabase]:
    async with new_database(server, template) as database:
        yield database


@pytest.fixture
async def bare_database(server: DevServer) -> AsyncIterator[TestDatabase]:
    async with new_database(server) as database:
        yield database


@pytest.fixture
async def admin(database: TestDatabase) -> AsyncIterator[Connection]:
    async with _connected(database.admin_dsn) as connection:
        yield connection


@pytest.fixture
async def gateway(database: TestDatabase) -> AsyncIterator[Connection]:
    async with _connected(database.gateway_dsn) as connection:
        yield connection


@pytest.fixture
async def worker(database: TestDatabase) -> AsyncIterator[Connection]:
    async with _connected(database.worker_dsn) as connection:
        yield connection


@pytest.fixture
async def operator(database: TestDatabase) -> AsyncIterator[Connection]:
    async with _connected(database.operator_dsn) as connection:
        yield connection


@pytest.fixture(scope="session")
def _durable_server(binaries: Path | None, has_high_counters: bool) -> Iterator[DevServer]:
    with start_local_server(binaries=binaries, ephemeral=True) as server:
        if has_high_counters:
            raise_ids(server)
        yield server


@pytest.fixture
def durable_server(_durable_server: DevServer) -> Iterator[DevServer]:
    """A server to stop and start at will; whatever a test left of it, the next one finds it running."""
    _durable_server.start()
    yield _durable_server
    _durable_server.start()


@pytest.fixture(scope="session")
def _durable_template(_durable_server: DevServer, has_high_counters: bool) -> str:
    _durable_server.start()
    return run_blocking(make_template(_durable_server, has_high_counters=has_high_counters))


@pytest.fixture
async def durable_database(durable_server: DevServer, _durable_template: str) -> AsyncIterator[TestDatabase]:
    async with new_database(durable_server, _durable_template) as database:
        try:
            yield database
        finally:
            durable_server.start()


class _connected:  # noqa: N801 - used as a function
    """An asyncpg connection that ends with its block, also when the test has broken it."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    async def __aenter__(self) -> Connection:
        self._connection: Connection = await asyncpg.connect(self._dsn)
        return self._connection

    async def __aexit__(self, *error: object) -> None:
        # Not close(): a test may leave a statement under way or a transaction open, and its end is near anyway.
        self._connection.terminate()
