"""The migration runner on a real server: once, all or nothing, one at a time, and nothing where nothing is to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from dispatch_core.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    MigrationDriftError,
    MigrationError,
    SchemaMismatchError,
)
from dispatch_core.migrate import MigrationReport, StepEvent, as_sql, migrate, plan, verify
from dispatch_core.migrate.connection import connect, migration_lock
from dispatch_core.migrate.files import load
from dispatch_core.migrate.sql import LOCK_KEY
from dispatch_core.migrate.sqltext import split_statements
from tests.support.activity import terminate, wait_until_blocked, wait_until_statement_runs
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually
from tests.support.migrations import FUNCTION, FUNCTIONS, INDEX, ONE, TABLES, TWO, history, relations, write_migrations
from tests.support.proxy import TcpProxy

Connection: TypeAlias = "asyncpg.Connection[Any]"

ALL = ["0001_one", "0002_two", "0003_index", "functions"]
EVERYTHING = {"one", "one_pkey", "two", "two_pkey", "one_two_idx"}


@pytest.fixture
async def observer(bare_database: TestDatabase) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(bare_database.admin_dsn)
    yield connection
    connection.terminate()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_migrations(tmp_path / "migrations", TABLES, FUNCTIONS)


# --- once -----------------------------------------------------------------------------------------------------------


async def test_an_empty_database_gets_every_step_in_order_and_keeps_their_digests(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    report = await migrate(bare_database.admin_dsn, directory=directory)
    assert report == MigrationReport(applied=ALL, bootstrapped=True)
    assert await history(observer) == ALL
    assert await relations(observer) == EVERYTHING
    assert await observer.fetchval("select relay.answer()") == 42
    rows = await observer.fetch("select * from relay.schema_history where sha256 !~ '^[0-9a-f]{64}$'")
    assert rows == []
    assert await observer.fetchval("select applied_by from relay.schema_history limit 1") == "postgres"


async def test_the_migrations_of_this_version_apply_once_and_verify(
    bare_database: TestDatabase, observer: Connection
) -> None:
    first = await migrate(bare_database.admin_dsn)
    assert first.applied
    assert first.bootstrapped
    assert await migrate(bare_database.admin_dsn) == MigrationReport()
    assert await verify(bare_database.admin_dsn) == []


async def test_only_what_is_missing_is_applied_and_the_plan_says_so_before(
    bare_database: TestDatabase, directory: Path
) -> None:
    write_migrations(directory, {"0001_one": ONE}, FUNCTIONS)
    assert [step.name for step in await plan(bare_database.admin_dsn, directory=directory)] == ["0001_one", "functions"]
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, TABLES, FUNCTIONS)
    planned = [step.name for step in await plan(bare_database.admin_dsn, directory=directory)]
    assert planned == ["0002_two", "0003_index"]
    assert (await migrate(bare_database.admin_dsn, directory=directory)).applied == planned


async def test_functions_are_applied_again_when_any_text_changed(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    await migrate(bare_database.admin_dsn, directory=directory)
    before = await observer.fetchrow("select * from relay.schema_history where step = 'functions'")
    write_migrations(directory, TABLES, {"10_answer": FUNCTION.replace("42", "43")})
    assert (await migrate(bare_database.admin_dsn, directory=directory)).applied == ["functions"]
    after = await observer.fetchrow("select * from relay.schema_history where step = 'functions'")
    assert await observer.fetchval("select relay.answer()") == 43
    assert before is not None
    assert after is not None
    assert before["sha256"] != after["sha256"]
    assert before["applied_at"] < after["applied_at"]


@pytest.mark.parametrize("real", [False, True], ids=["fixture", "this version"])
async def test_twelve_runs_at_once_on_an_empty_database_all_succeed_and_apply_each_step_once(
    bare_database: TestDatabase, observer: Connection, directory: Path, real: bool
) -> None:
    reports: list[MigrationReport] = []
    where = None if real else directory
    expected = [step.name for step in load(where).steps]

    async def run() -> None:
        reports.append(await migrate(bare_database.admin_dsn, directory=where))

    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(run)
    assert len(reports) == 12
    assert sorted(name for report in reports for name in report.applied) == sorted(expected)
    assert [report.bootstrapped for report in reports].count(True) == 1
    assert await history(observer) == sorted(expected)


async def test_a_run_that_waits_for_another_does_not_deadlock_with_its_concurrent_index(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    """A blocking advisory lock would hold a snapshot, which CREATE INDEX CONCURRENTLY waits for."""
    write_migrations(directory, {"0001_one": ONE, "0002_two": TWO}, {})
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, TABLES, {})
    reports: list[MigrationReport] = []
    waiting: list[StepEvent] = []

    async def run() -> None:
        reports.append(await migrate(bare_database.admin_dsn, directory=directory, on_step=waiting.append))

    async with anyio.create_task_group() as group:
        # The index waits for this transaction, and so for as long as we like, with other runs waiting behind it.
        transaction = observer.transaction()
        await transaction.start()
        await observer.execute("insert into relay.one values (1)")
        group.start_soon(run)
        watcher = await asyncpg.connect(bare_database.admin_dsn)
        await wait_until_statement_runs(watcher, "create index concurrently")
        group.start_soon(run)
        group.start_soon(run)
        await eventually(lambda: [event.phase for event in waiting].count("waiting") == 2)
        await transaction.commit()
    await watcher.close()
    assert sorted(report.applied for report in reports) == [[], [], ["0003_index"]]


# --- refused --------------------------------------------------------------------------------------------------------


async def test_a_step_that_was_changed_after_it_was_applied_is_refused_by_name(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    await migrate(bare_database.admin_dsn, directory=directory)
    changed = {**TABLES, "0001_one": ONE + "\n-- a remark\n", "0004_four": "select 1;"}
    write_migrations(directory, changed, {"10_answer": FUNCTION.replace("42", "43")})
    with pytest.raises(MigrationDriftError, match=r"changed after they were applied: 0001_one\.sql"):
        await migrate(bare_database.admin_dsn, directory=directory)
    assert await history(observer) == ALL
    assert await observer.fetchval("select relay.answer()") == 42


async def test_a_schema_newer_than_this_version_is_named_and_left_alone(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    newer = {**TABLES, "0004_future": "-- role: relay_owner\ncreate table relay.future ();"}
    write_migrations(directory, newer, FUNCTIONS, protocol=3)
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, TABLES, {"10_answer": FUNCTION.replace("42", "41")}, protocol=2)
    with pytest.raises(SchemaMismatchError) as caught:
        await migrate(bare_database.admin_dsn, directory=directory)
    for part in ("protocol 3", "protocol 2", "0004_future", "the database is newer"):
        assert part in str(caught.value)
    with pytest.raises(SchemaMismatchError, match="newer"):
        await plan(bare_database.admin_dsn, directory=directory)
    assert await observer.fetchval("select relay.answer()") == 42


async def test_a_step_numbered_below_an_applied_one_is_refused(bare_database: TestDatabase, directory: Path) -> None:
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, {**TABLES, "0002_two": TWO, "0001_one": ONE, "0004_four": "select 1;"}, FUNCTIONS)
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, {"0001_one": ONE, "0002_two": TWO, "0003_index": INDEX, "0004_four": "select 1;"})
    write_migrations(directory, {**TABLES, "0004_four": "select 1;", "0000_late": "select 1;"}, FUNCTIONS)
    with pytest.raises(MigrationError, match=r"numbered below a step that was applied before: 0000_late\.sql"):
        await migrate(bare_database.admin_dsn, directory=directory)


async def test_a_schema_of_that_name_that_is_not_ours_is_left_alone(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    await observer.execute("create schema relay; create table relay.race (id int)")
    with pytest.raises(MigrationError, match="it is not ours, and is left alone"):
        await migrate(bare_database.admin_dsn, directory=directory)
    assert await relations(observer) == {"race"}


async def test_a_database_that_is_not_utf8_is_refused(
    server: Any, bare_database: TestDatabase, directory: Path
) -> None:
    name = f"{bare_database.name}_ascii"
    admin = await asyncpg.connect(bare_database.admin_dsn)
    await admin.execute(f"create database {name} template template0 encoding sql_ascii locale_provider libc locale 'C'")
    try:
        with pytest.raises(MigrationError, match="has the encoding SQL_ASCII; UTF8 is needed"):
            await migrate(server.admin_dsn_of(name), directory=directory)
    finally:
        await admin.execute(f"drop database {name} with (force)")
        await admin.close()


async def test_a_function_that_everybody_may_execute_is_refused(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    write_migrations(directory, TABLES, {"10_answer": FUNCTION.replace("revoke all", "-- revoke all")})
    with pytest.raises(MigrationError, match=r"every login may execute relay\.answer\(\)"):
        await migrate(bare_database.admin_dsn, directory=directory)
    assert await observer.fetchval("select to_regproc('relay.answer')") is None


# --- all or nothing -------------------------------------------------------------------------------------------------


async def test_a_step_that_fails_leaves_nothing_and_is_named_with_its_line(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    broken = "-- role: relay_owner\ncreate table relay.half ();\n\ninsert into relay.nowhere values (1);\n"
    write_migrations(directory, {"0001_one": ONE, "0002_broken": broken, "0003_two": TWO})
    with pytest.raises(MigrationError, match=r'0002_broken\.sql, line 4: relation "relay.nowhere" does not exist'):
        await migrate(bare_database.admin_dsn, directory=directory)
    assert await history(observer) == ["0001_one"]
    assert await relations(observer) == {"one", "one_pkey"}


async def test_one_broken_functions_file_leaves_all_functions_as_they_were(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(
        directory, TABLES, {"10_answer": FUNCTION.replace("42", "43"), "20_broken": "-- role: relay_api\nselect 1/0;"}
    )
    with pytest.raises(MigrationError, match=r"20_broken\.sql"):
        await migrate(bare_database.admin_dsn, directory=directory)
    assert await observer.fetchval("select relay.answer()") == 42
    assert not await observer.fetchval("select has_schema_privilege('relay_api', 'relay', 'create')")


async def test_a_session_that_is_terminated_in_a_step_leaves_nothing_of_it(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    slow = "-- role: relay_owner\ncreate table relay.slow ();\nselect pg_sleep(60);\n"
    write_migrations(directory, {"0001_one": ONE, "0002_slow": slow})
    async with anyio.create_task_group() as group:

        async def kill() -> None:
            await terminate(observer, await wait_until_statement_runs(observer, "pg_sleep(60)"))

        group.start_soon(kill)
        with pytest.raises(DatabaseUnavailableError) as caught:
            await migrate(bare_database.admin_dsn, directory=directory)
    assert caught.value.retryable
    assert await history(observer) == ["0001_one"]
    assert await relations(observer) == {"one", "one_pkey"}
    write_migrations(directory, {"0001_one": ONE, "0002_slow": slow.replace("60", "0")})
    assert (await migrate(bare_database.admin_dsn, directory=directory)).applied == ["0002_slow"]


async def test_runs_that_are_killed_at_any_moment_never_leave_half_a_step(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    names = [f"{number:04d}_t" for number in range(1, 13)]
    text = "-- role: relay_owner\ncreate table relay.a{0} (); select pg_sleep(0.01); create table relay.b{0} ();"
    write_migrations(directory, {name: text.replace("{0}", name[:4]) for name in names}, FUNCTIONS)
    killed = 0
    its = "from pg_stat_activity where datname = current_database() and application_name = 'relay-dispatch migrate'"
    for attempt in range(100):
        over = anyio.Event()
        async with anyio.create_task_group() as group:

            async def kill(delay: float, over: anyio.Event = over) -> None:
                # From when it is there, however long it takes to connect.
                async def there() -> bool:
                    return over.is_set() or await observer.fetchval(f"select exists (select {its})")

                await eventually(there, interval=0.001)
                with anyio.move_on_after(delay):
                    await over.wait()
                await observer.execute(f"select pg_terminate_backend(pid) {its}")

            if killed < 30:  # then in peace: a slow machine would never come to the end
                group.start_soon(kill, (attempt % 25) * 0.004)
            try:
                await migrate(bare_database.admin_dsn, directory=directory)
            except DatabaseUnavailableError:
                killed += 1
            over.set()
        if await observer.fetchval("select to_regclass('relay.schema_history')") is None:
            assert await observer.fetchval("select to_regnamespace('relay')") is None
            continue
        applied = await history(observer)
        tables = {f"{kind}{name[:4]}" for name in applied if name != "functions" for kind in "ab"}
        assert await relations(observer) == tables
        assert (await observer.fetchval("select to_regproc('relay.answer')") is not None) == ("functions" in applied)
        if applied == [*names, "functions"]:
            break
    assert killed > 5
    assert await history(observer) == [*names, "functions"]


async def test_a_session_that_is_ended_between_two_statements_gives_up_the_lock_without_a_word(
    bare_database: TestDatabase, observer: Connection
) -> None:
    """Its socket stays open: the driver then has an error of its own for the next statement, the unlocking."""
    async with TcpProxy.before(bare_database.admin_dsn) as proxy, connect(proxy.dsn(bare_database.admin_dsn)) as conn:
        proxy.holds_ends, (line,) = True, proxy.connections
        async with migration_lock(conn, 1, pytest.fail):
            before = line.bytes_down
            await terminate(observer, conn.get_server_pid())
            await eventually(lambda: line.bytes_down > before)
            for _ in range(3):  # the client's turns at the event loop
                await anyio.lowlevel.checkpoint()
        async with connect(bare_database.admin_dsn) as other, migration_lock(other, 1, pytest.fail):
            pass


async def test_a_run_that_is_cancelled_leaves_nothing_and_frees_the_lock(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    write_migrations(directory, {"0001_one": ONE + "select pg_sleep(60);"})
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: migrate(bare_database.admin_dsn, directory=directory))
        await wait_until_statement_runs(observer, "pg_sleep(60)")
        group.cancel_scope.cancel()
    write_migrations(directory, {"0001_one": ONE})
    assert (await migrate(bare_database.admin_dsn, directory=directory)).applied == ["0001_one"]


# --- locks ----------------------------------------------------------------------------------------------------------


async def test_nothing_to_do_means_no_ddl_and_no_lock_above_access_share(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    """EXCLUSIVE is the strongest mode that lets ACCESS SHARE, and nothing else, pass."""
    await migrate(bare_database.admin_dsn, directory=directory)
    transaction = observer.transaction()
    await transaction.start()
    await observer.execute("""
        lock table relay.schema_history, relay.one, relay.two, pg_catalog.pg_class, pg_catalog.pg_namespace,
          pg_catalog.pg_proc, pg_catalog.pg_authid, pg_catalog.pg_auth_members, pg_catalog.pg_database,
          pg_catalog.pg_attribute, pg_catalog.pg_index, pg_catalog.pg_depend in exclusive mode
    """)
    await observer.execute("select pg_advisory_lock($1)", LOCK_KEY)
    before = await observer.fetchval("select pg_snapshot_xmax(pg_current_snapshot())")
    with anyio.fail_after(5):
        assert await migrate(bare_database.admin_dsn, directory=directory) == MigrationReport()
    watcher = await asyncpg.connect(bare_database.admin_dsn)
    assert await watcher.fetchval("select pg_snapshot_xmax(pg_current_snapshot())") == before
    await watcher.close()
    await transaction.rollback()


async def test_a_lock_that_is_not_had_is_let_go_and_asked_for_again_while_readers_go_on(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    write_migrations(directory, {"0001_one": ONE})
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, {"0001_one": ONE, "0002_two": TWO})
    events: list[StepEvent] = []
    reports: list[MigrationReport] = []

    async def run() -> None:
        reports.append(
            await migrate(
                bare_database.admin_dsn, directory=directory, on_step=events.append, lock_timeout_seconds=0.05
            )
        )

    reader = await asyncpg.connect(bare_database.admin_dsn)
    async with anyio.create_task_group() as group:
        transaction = observer.transaction()
        await transaction.start()
        await observer.execute("select * from relay.one")  # an old reader, which the step has to wait for
        group.start_soon(run)
        await eventually(lambda: [event.phase for event in events].count("retry") >= 2)
        # A queued ACCESS EXCLUSIVE lock would hold this up for as long as the old reader lives.
        with anyio.fail_after(HANGS):
            await reader.fetch("select * from relay.one")
        await transaction.commit()
    await reader.close()
    assert reports == [MigrationReport(applied=["0002_two"])]


async def test_a_catalog_row_that_another_session_changes_is_waited_for_and_the_step_made_again(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    """DDL on one catalog row does not queue like rows do: the second session gets XX000, tuple concurrently updated."""
    write_migrations(directory, {"0001_one": ONE})
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, {"0001_one": ONE}, FUNCTIONS)
    events: list[StepEvent] = []
    reports: list[MigrationReport] = []

    async def run() -> None:
        report = await migrate(
            bare_database.admin_dsn, directory=directory, on_step=events.append, lock_timeout_seconds=30
        )
        reports.append(report)

    watcher = await asyncpg.connect(bare_database.admin_dsn)
    async with anyio.create_task_group() as group:
        transaction = observer.transaction()
        await transaction.start()
        await observer.execute("grant usage on schema relay to pg_monitor")
        group.start_soon(run)
        pid = await wait_until_statement_runs(watcher, "grant create on schema relay")
        await wait_until_blocked(watcher, pid, by=observer.get_server_pid())
        await transaction.commit()
    await watcher.close()
    assert reports == [MigrationReport(applied=["functions"])]
    assert [event.detail for event in events if event.phase == "retry"] == [
        "step functions: tuple concurrently updated (XX000)"
    ]


async def test_a_lock_that_is_never_had_ends_in_a_retryable_error(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    write_migrations(directory, {"0001_one": ONE})
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, {"0001_one": ONE, "0002_two": TWO})
    async with observer.transaction():
        await observer.execute("select * from relay.one")
        with pytest.raises(DatabaseBusyError, match="lock timeout") as caught:
            await migrate(
                bare_database.admin_dsn, directory=directory, lock_timeout_seconds=0.05, give_up_after_seconds=0.3
            )
    assert caught.value.retryable
    assert await relations(observer) == {"one", "one_pkey"}


async def test_a_run_that_never_gets_its_turn_names_who_has_it(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    await observer.execute("select pg_advisory_lock($1)", LOCK_KEY)
    with pytest.raises(DatabaseBusyError, match=rf"\(pid {observer.get_server_pid()}\) has been migrating"):
        await migrate(bare_database.admin_dsn, directory=directory, give_up_after_seconds=0.3)


async def test_a_session_that_lost_the_migration_lock_applies_nothing(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    """Behind a transaction pooler the lock stays with another backend than the one that runs the step."""
    write_migrations(directory, {"0001_one": ONE + "select pg_advisory_unlock_all();", "0002_two": TWO})
    with pytest.raises(MigrationError, match="not of a pooler"):
        await migrate(bare_database.admin_dsn, directory=directory)
    assert await history(observer) == ["0001_one"]


# --- outside a transaction ------------------------------------------------------------------------------------------


async def test_an_invalid_index_that_a_killed_run_left_is_dropped_and_built_again(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    write_migrations(directory, {"0001_one": ONE, "0002_two": TWO})
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, TABLES)
    writer = await asyncpg.connect(bare_database.admin_dsn)
    transaction = writer.transaction()
    await transaction.start()
    await writer.execute("insert into relay.one values (1)")
    async with anyio.create_task_group() as group:

        async def kill() -> None:
            await terminate(observer, await wait_until_statement_runs(observer, "create index concurrently"))

        group.start_soon(kill)
        with pytest.raises(DatabaseUnavailableError):
            await migrate(bare_database.admin_dsn, directory=directory)
    await transaction.commit()
    await writer.close()
    valid = "select indisvalid from pg_index where indexrelid = 'relay.one_two_idx'::regclass"
    assert await observer.fetchval(valid) is False
    assert await history(observer) == ["0001_one", "0002_two"]

    assert (await migrate(bare_database.admin_dsn, directory=directory)).applied == ["0003_index"]
    assert await observer.fetchval(valid) is True
    owner = await observer.fetchval("select relowner::regrole::text from pg_class where relname = 'one_two_idx'")
    assert owner == "relay_owner"


async def test_a_valid_index_whose_history_row_was_lost_is_kept(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    await migrate(bare_database.admin_dsn, directory=directory)
    oid = await observer.fetchval("select 'relay.one_two_idx'::regclass::oid")
    await observer.execute("delete from relay.schema_history where step = '0003_index'")
    assert (await migrate(bare_database.admin_dsn, directory=directory)).applied == ["0003_index"]
    assert await observer.fetchval("select 'relay.one_two_idx'::regclass::oid") == oid


async def test_an_index_that_cannot_be_built_leaves_neither_itself_nor_a_history_row(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    write_migrations(directory, {"0001_one": ONE, "0002_two": TWO})
    await migrate(bare_database.admin_dsn, directory=directory)
    await observer.execute("insert into relay.one values (1, 'same'), (2, 'same')")
    write_migrations(directory, {**TABLES, "0003_index": INDEX.replace("create index", "create unique index")})
    with pytest.raises(MigrationError, match=r"0003_index\.sql: could not create unique index"):
        await migrate(bare_database.admin_dsn, directory=directory)
    assert await relations(observer) == EVERYTHING - {"one_two_idx"}
    assert await history(observer) == ["0001_one", "0002_two"]


async def test_an_index_on_another_table_under_the_same_name_is_no_leftover_of_ours(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    write_migrations(directory, {"0001_one": ONE, "0002_two": TWO})
    await migrate(bare_database.admin_dsn, directory=directory)
    await observer.execute("create index one_two_idx on relay.two (id)")
    write_migrations(directory, TABLES)
    with pytest.raises(MigrationError, match=r"relay\.one_two_idx is there already, on relay\.two"):
        await migrate(bare_database.admin_dsn, directory=directory)


# --- other people's settings ----------------------------------------------------------------------------------------


async def test_settings_of_the_login_and_the_database_cannot_change_what_a_step_does(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    name = bare_database.name
    await observer.execute(f"""
        create schema evil;
        create function evil.pg_sleep(double precision) returns void language plpgsql
          as $$ begin raise exception 'hijacked'; end $$;
        create function evil.current_database() returns name language plpgsql
          as $$ begin raise exception 'hijacked'; end $$;
        alter database {name} set search_path = evil, pg_catalog;
        alter database {name} set statement_timeout = '300ms';
        alter database {name} set default_transaction_read_only = on;
        alter database {name} set default_transaction_isolation = serializable;
        alter database {name} set check_function_bodies = off;
        alter database {name} set standard_conforming_strings = off;
        alter database {name} set row_security = off;
        alter database {name} set lock_timeout = '1ms';
        alter database {name} set idle_in_transaction_session_timeout = '1ms';
        alter database {name} set role = 'pg_monitor';
    """)
    if observer.get_server_version().major >= 17:
        await observer.execute(f"alter database {name} set transaction_timeout = '300ms'")
    text = ONE + "select pg_sleep(0.5);\ncreate table relay.check (path text default '\\');\n"
    body = FUNCTION.replace("select 42", "select nowhere()")
    write_migrations(directory, {"0001_one": text, "0002_two": TWO}, {"10_answer": body})
    with pytest.raises(MigrationError, match=r"function nowhere\(\) does not exist"):
        await migrate(bare_database.admin_dsn, directory=directory)
    assert await history(observer) == ["0001_one", "0002_two"]


# --- row security ---------------------------------------------------------------------------------------------------


async def test_a_backfill_under_forced_raising_policies_runs_between_no_force_and_force_in_one_transaction(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    table = """-- role: relay_owner
create table relay.job (tenant_id text not null, amount bigint);
create function relay.bound() returns text language plpgsql stable as
$$ begin raise exception 'no tenant is bound' using errcode = 'S2001'; end $$;
revoke all on function relay.bound() from public;
insert into relay.job values ('a', 1), ('b', 2);
alter table relay.job enable row level security;
alter table relay.job force row level security;
create policy tenant on relay.job using (tenant_id = (select relay.bound()));
"""
    write_migrations(directory, {"0001_job": table})
    await migrate(bare_database.admin_dsn, directory=directory)
    naive = (
        "-- role: relay_owner\nalter table relay.job add column doubled bigint;\nupdate relay.job set doubled = 2;\n"
    )
    write_migrations(directory, {"0001_job": table, "0002_backfill": naive})
    with pytest.raises(MigrationError, match=r"0002_backfill\.sql: no tenant is bound \(S2001\)"):
        await migrate(bare_database.admin_dsn, directory=directory)
    right = """-- role: relay_owner
alter table relay.job add column doubled bigint;
alter table relay.job no force row level security;
update relay.job set doubled = 2 * amount;
alter table relay.job force row level security;
"""
    write_migrations(directory, {"0001_job": table, "0002_backfill": right})
    await migrate(bare_database.admin_dsn, directory=directory)
    assert await observer.fetchval("select array_agg(doubled order by 1) from relay.job") == [2, 4]
    assert await observer.fetchval("select relforcerowsecurity from pg_class where relname = 'job'")


# --- with traffic ---------------------------------------------------------------------------------------------------


async def test_callers_of_the_old_functions_go_on_while_the_schema_is_migrated(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    caller = """-- role: relay_api
create or replace function relay.put(p_id bigint) returns bigint language plpgsql security definer
set search_path = pg_catalog, pg_temp as $$ begin
  insert into relay.one (id) values (p_id) on conflict do nothing;
  return (select count(*) from relay.one where id = p_id);
end $$;
revoke all on function relay.put(bigint) from public;
"""
    one = ONE + "grant select, insert on relay.one to relay_api;\n"
    write_migrations(directory, {"0001_one": one}, {"10_put": caller})
    await migrate(bare_database.admin_dsn, directory=directory)
    calls = 0

    async def traffic(number: int) -> None:
        nonlocal calls
        connection = await asyncpg.connect(bare_database.admin_dsn)
        try:
            while True:
                async with connection.transaction():
                    assert await connection.fetchval("select relay.put($1)", calls * 4 + number) == 1
                calls += 1
        finally:
            connection.terminate()

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(traffic, number)
        for round_ in range(2, 8):
            before = calls
            await eventually(lambda before=before: calls > before + 20)  # type: ignore[misc]
            tables = {"0001_one": one}
            for number in range(2, round_ + 1):
                tables[f"{number:04d}_{'index' if number % 2 else 'column'}"] = (
                    f"-- role: relay_owner\n-- no-transaction\ncreate index concurrently i{number} on relay.one (id);"
                    if number % 2
                    else f"-- role: relay_owner\nalter table relay.one add column c{number} text not null default '';"
                )
            write_migrations(directory, tables, {"10_put": caller + f"-- text {round_}\n"})
            report = await migrate(bare_database.admin_dsn, directory=directory, lock_timeout_seconds=0.2)
            assert len(report.applied) == 2
        before = calls
        await eventually(lambda: calls > before + 20)
        group.cancel_scope.cancel()


# --- the script -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("real", [False, True], ids=["fixture", "this version"])
async def test_the_script_for_a_dba_does_what_a_run_does(
    bare_database: TestDatabase, observer: Connection, directory: Path, real: bool
) -> None:
    where = None if real else directory
    text = "\n".join(line for line in as_sql(directory=where).splitlines() if not line.startswith("\\"))
    for statement in split_statements(text):
        await observer.execute(statement)
    assert await migrate(bare_database.admin_dsn, directory=where) == MigrationReport()
    if real:
        assert await verify(bare_database.admin_dsn) == []
    else:
        assert await relations(observer) == EVERYTHING


async def test_rooms_are_installed_one_after_the_other(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    def table(room: str) -> str:
        return f"-- role: relay_owner\n-- room: {room}\ncreate table relay.{room} ();"

    functions = {**FUNCTIONS, "20_outbox": FUNCTION.replace("answer", "drain") + "-- x", "30_dispatch": "select 1;"}
    functions["20_outbox"] = "-- room: outbox\n" + functions["20_outbox"]
    functions["30_dispatch"] = "-- room: dispatch\nselect 1;"
    tables = {"0001_one": ONE, "0002_dispatch": table("dispatch"), "0003_outbox": table("outbox")}
    write_migrations(directory, tables, functions)
    first = await migrate(bare_database.admin_dsn, only=["outbox"], directory=directory)
    assert first.applied == ["0001_one", "0003_outbox", "functions", "functions:outbox"]
    assert await migrate(bare_database.admin_dsn, only=["outbox"], directory=directory) == MigrationReport()
    second = await migrate(bare_database.admin_dsn, directory=directory)
    assert second.applied == ["0002_dispatch", "functions", "functions:dispatch", "functions:outbox"]
    assert await migrate(bare_database.admin_dsn, only=["outbox"], directory=directory) == MigrationReport()
