"""Letting logins in, and telling whether this version may use the schema."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from dispatch_core.errors import InvalidInputError, InvalidNameError, SchemaMismatchError, TenancyDeniedError
from dispatch_core.migrate import check_schema, grant, migrate, revoke
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.migrations import FUNCTION, FUNCTIONS, ONE, TABLES, write_migrations

Connection: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture
async def login(admin: Connection, database: TestDatabase) -> AsyncIterator[str]:
    name = f"login_{database.name}"
    await admin.execute(f"create role {name} login password 'relay'")
    yield name
    await admin.execute(f"drop owned by {name}; drop role {name}")


@pytest.fixture
async def observer(bare_database: TestDatabase) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(bare_database.admin_dsn)
    yield connection
    connection.terminate()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_migrations(tmp_path / "migrations", TABLES, FUNCTIONS)


async def bindings(dsn: str) -> list[tuple[str, str | None, str | None]]:
    connection = await asyncpg.connect(dsn)
    try:
        return [tuple(row) for row in await connection.fetch("select * from relay.my_bindings()")]
    finally:
        await connection.close()


async def count_bindings(admin: Connection, login: str) -> int:
    return int(await admin.fetchval("select count(*) from relay.role_binding where role_oid = $1::regrole", login))


# --- grant and revoke -----------------------------------------------------------------------------------------------


async def test_a_login_may_do_nothing_before_it_is_granted_and_that_very_thing_afterwards(
    database: TestDatabase, login: str
) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await bindings(database.dsn(login))
    await grant(database.admin_dsn, login, role="worker", tenant="acme", relay="erp")
    await grant(database.admin_dsn, login, role="worker", tenant="acme", relay="erp")
    assert await bindings(database.dsn(login)) == [("worker", "acme", "erp")]
    await grant(database.admin_dsn, login, role="gateway", tenant=None)
    assert await bindings(database.dsn(login)) == [("gateway", None, None), ("worker", "acme", "erp")]


async def test_revoke_takes_back_exactly_what_was_granted_and_says_whether_it_was_there(
    database: TestDatabase, login: str
) -> None:
    for tenant in ("a", "b", None):
        await grant(database.admin_dsn, login, role="gateway", tenant=tenant)
    assert await revoke(database.admin_dsn, login, role="gateway", tenant="a", relay="erp") == 0
    assert await revoke(database.admin_dsn, login, role="gateway", tenant="a") == 1
    assert await revoke(database.admin_dsn, login, role="gateway", tenant="a") == 0
    assert await revoke(database.admin_dsn, login, role="gateway", tenant=None) == 1
    assert await bindings(database.dsn(login)) == [("gateway", "b", None)]


async def test_a_login_that_is_bound_in_two_databases_keeps_the_one_when_the_other_is_revoked(
    database: TestDatabase, bare_database: TestDatabase, login: str
) -> None:
    """Membership in a group role belongs to the whole server, a binding to one database."""
    await migrate(bare_database.admin_dsn)
    for where in (database, bare_database):
        await grant(where.admin_dsn, login, role="operator", tenant="acme")
    await revoke(database.admin_dsn, login, role="operator", tenant="acme")
    assert await bindings(database.dsn(login)) == []
    assert await bindings(bare_database.dsn(login)) == [("operator", "acme", None)]
    await revoke(bare_database.admin_dsn, login, role="operator", tenant="acme")


@pytest.mark.parametrize(
    ("name", "role", "tenant", "relay", "error"),
    [
        ("no_such_login", "worker", "acme", "erp", InvalidInputError),
        ("relay_worker", "worker", "acme", "erp", InvalidInputError),
        ("pg_monitor", "worker", "acme", "erp", InvalidInputError),
        ("relay_worker_login", "admin", "acme", "erp", InvalidInputError),
        ("relay_worker_login", "worker", "", "erp", InvalidNameError),
        ("relay_worker_login", "worker", "acme", "", InvalidNameError),
        ("relay_worker_login", "worker", "a\0b", "erp", InvalidNameError),
        ("relay_worker_login", "worker", "x" * 201, "erp", InvalidNameError),
    ],
)
async def test_a_grant_that_makes_no_sense_is_refused_and_stores_nothing(
    database: TestDatabase, admin: Connection, name: str, role: str, tenant: str, relay: str, error: type[Exception]
) -> None:
    before = await admin.fetchval("select count(*) from relay.role_binding")
    with pytest.raises(error):
        await grant(database.admin_dsn, name, role=role, tenant=tenant, relay=relay)
    assert await admin.fetchval("select count(*) from relay.role_binding") == before


async def test_revoke_names_a_login_that_does_not_exist(database: TestDatabase) -> None:
    with pytest.raises(InvalidInputError, match="there is no login nobody"):
        await revoke(database.admin_dsn, "nobody", role="worker", tenant="acme")


async def test_grant_needs_a_migrated_database(bare_database: TestDatabase) -> None:
    with pytest.raises(SchemaMismatchError, match="run: relay-dispatch db migrate"):
        await grant(bare_database.admin_dsn, "relay_worker_login", role="worker", tenant="acme")


# --- check_schema ---------------------------------------------------------------------------------------------------


async def test_the_plain_logins_may_check_the_schema_of_this_version(
    gateway: Connection, worker: Connection, operator: Connection
) -> None:
    for connection in (gateway, worker, operator):
        await check_schema(connection)


async def test_a_missing_schema_is_named(observer: Connection) -> None:
    with pytest.raises(SchemaMismatchError, match="schema relay is not in this database"):
        await check_schema(observer)


async def test_a_login_outside_the_groups_is_told_what_it_lacks(database: TestDatabase, login: str) -> None:
    connection = await asyncpg.connect(database.dsn(login))
    with pytest.raises(TenancyDeniedError, match="db grant"):
        await check_schema(connection)
    await connection.close()


async def test_an_older_schema_is_refused_and_both_are_named(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    write_migrations(directory, {"0001_one": ONE}, FUNCTIONS)
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, TABLES, FUNCTIONS, protocol=2)
    with pytest.raises(SchemaMismatchError) as caught:
        await check_schema(observer, directory=directory)
    for part in ("protocol 1", "protocol 2", "0002_two, 0003_index", "older", "relay-dispatch db migrate"):
        assert part in str(caught.value)
    write_migrations(directory, {"0001_one": ONE}, {"10_answer": FUNCTION.replace("42", "43")}, protocol=2)
    with pytest.raises(SchemaMismatchError, match="older"):
        await check_schema(observer, directory=directory)


async def test_a_schema_whose_functions_were_never_applied_is_refused(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    write_migrations(directory, TABLES)
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, TABLES, FUNCTIONS)
    with pytest.raises(SchemaMismatchError, match="incomplete"):
        await check_schema(observer, directory=directory)


async def test_a_newer_schema_is_accepted_until_it_says_otherwise(
    bare_database: TestDatabase, observer: Connection, directory: Path, tmp_path: Path
) -> None:
    """An SDK of the version before goes on working on the schema of the next."""
    old = write_migrations(tmp_path / "old", TABLES, FUNCTIONS, protocol=2)
    newer = {**TABLES, "0004_future": "-- role: relay_owner\ncreate table relay.future ();"}
    functions = {"10_answer": FUNCTION.replace("42", "43")}
    write_migrations(directory, newer, functions, protocol=3, compatible_from=2)
    await migrate(bare_database.admin_dsn, directory=directory)
    await check_schema(observer, directory=old)
    write_migrations(directory, newer, functions, protocol=4, compatible_from=3)
    await migrate(bare_database.admin_dsn, directory=directory)
    with pytest.raises(SchemaMismatchError) as caught:
        await check_schema(observer, directory=old)
    for part in ("protocol 4", "needs SDKs of protocol 3 or newer", "protocol 2", "upgrade"):
        assert part in str(caught.value)


async def test_a_table_step_of_another_text_is_refused(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, {**TABLES, "0001_one": ONE + "-- other"}, FUNCTIONS)
    with pytest.raises(SchemaMismatchError, match="step 0001_one is not the one of this version"):
        await check_schema(observer, directory=directory)


async def test_functions_of_the_same_protocol_in_other_words_are_accepted_with_a_warning(
    bare_database: TestDatabase, observer: Connection, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await migrate(bare_database.admin_dsn, directory=directory)
    write_migrations(directory, TABLES, {"10_answer": FUNCTION + "-- mended\n"})
    with caplog.at_level(logging.WARNING, logger="relay_dispatch.migrate"):
        await check_schema(observer, directory=directory)
    assert "the functions in schema relay differ" in caplog.text


async def test_the_check_is_one_select(bare_database: TestDatabase, observer: Connection, directory: Path) -> None:
    await migrate(bare_database.admin_dsn, directory=directory)
    statements: list[str] = []
    observer.add_query_logger(lambda record: statements.append(record.query))
    await check_schema(observer, directory=directory)
    await eventually(lambda: statements)  # the driver tells loggers in the loop's next turn
    assert len(statements) == 1


async def test_a_room_alone_is_all_that_its_users_need(
    bare_database: TestDatabase, observer: Connection, directory: Path
) -> None:
    tables = {
        "0001_one": ONE,
        "0002_dispatch": "-- role: relay_owner\n-- room: dispatch\ncreate table relay.d ();",
        "0003_outbox": "-- role: relay_owner\n-- room: outbox\ncreate table relay.o ();",
    }
    write_migrations(directory, tables, FUNCTIONS)
    await migrate(bare_database.admin_dsn, only=["outbox"], directory=directory)
    await check_schema(observer, rooms=["outbox"], directory=directory)
    lacking = r"the room dispatch of schema relay is not in this database \(there is: outbox\); .* --only dispatch"
    for rooms in (None, ["dispatch"], ["dispatch", "outbox"]):
        with pytest.raises(SchemaMismatchError, match=lacking):
            await check_schema(observer, rooms=rooms, directory=directory)
