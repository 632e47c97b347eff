"""The runner's process dies: SIGKILL, in the middle of a step and in the middle of a concurrent index."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import anyio.abc
import asyncpg
import pytest

from dispatch_core.migrate import migrate
from tests.support.activity import wait_until_statement_runs
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.migrations import ONE, TABLES, TWO, history, relations, write_migrations

Connection: TypeAlias = "asyncpg.Connection[Any]"

RUN = "import anyio, pathlib, sys; from dispatch_core.migrate import migrate; "
RUN += "anyio.run(lambda: migrate(sys.argv[1], directory=pathlib.Path(sys.argv[2])))"


@pytest.fixture
async def observer(bare_database: TestDatabase) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(bare_database.admin_dsn)
    yield connection
    connection.terminate()


@asynccontextmanager
async def runner(database: TestDatabase, directory: Path) -> AsyncIterator[anyio.abc.Process]:
    command = [sys.executable, "-c", RUN, database.admin_dsn, str(directory)]
    async with await anyio.open_process(command, cwd=Path(__file__).parents[1]) as process:
        yield process


async def wait_for_the_end(observer: Connection, pid: int) -> None:
    """Wait until the backend sees that its client is gone; client_connection_check_interval makes it look."""

    async def gone() -> bool:
        return not await observer.fetchval("select exists (select from pg_stat_activity where pid = $1)", pid)

    await eventually(gone, timeout=15, message="the end of the killed runner's backend")


async def test_a_runner_killed_in_a_step_leaves_nothing_and_frees_the_lock_by_itself(
    bare_database: TestDatabase, observer: Connection, tmp_path: Path
) -> None:
    slow = ONE.replace("one", "slow") + "select pg_sleep(300);\n"
    directory = write_migrations(tmp_path / "m", {"0001_one": ONE, "0002_slow": slow})
    async with runner(bare_database, directory) as process:
        pid = await wait_until_statement_runs(observer, "pg_sleep(300)", timeout=30)
        process.kill()
        await process.wait()
        # The statement has five minutes to go; the server must not let the lock of a dead runner live so long.
        await wait_for_the_end(observer, pid)
    assert await history(observer) == ["0001_one"]
    assert await relations(observer) == {"one", "one_pkey"}
    write_migrations(directory, {"0001_one": ONE, "0002_slow": slow.replace("300", "0")})
    assert (await migrate(bare_database.admin_dsn, directory=directory)).applied == ["0002_slow"]


async def test_a_runner_killed_while_it_builds_an_index_is_followed_by_one_that_builds_it_anew(
    bare_database: TestDatabase, observer: Connection, tmp_path: Path
) -> None:
    directory = write_migrations(tmp_path / "m", {"0001_one": ONE, "0002_two": TWO})
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, TABLES)
    writer = await asyncpg.connect(bare_database.admin_dsn)
    transaction = writer.transaction()
    await transaction.start()
    await writer.execute("insert into relay.one values (1)")  # the index waits for the end of this
    async with runner(bare_database, directory) as process:
        pid = await wait_until_statement_runs(observer, "create index concurrently", timeout=30)
        process.kill()
        await process.wait()
        await wait_for_the_end(observer, pid)
    await transaction.commit()
    await writer.close()
    valid = "select indisvalid from pg_index where indexrelid = to_regclass('relay.one_two_idx')"
    assert await observer.fetchval(valid) is False
    assert (await migrate(bare_database.admin_dsn, directory=directory)).applied == ["0003_index"]
    assert await observer.fetchval(valid) is True
