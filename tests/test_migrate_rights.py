"""Roles and rights: what a login that migrates can do by itself, and the words it gives to a DBA where it cannot.

On every PostgreSQL major that this machine has, each on a server of its own: roles belong to a whole server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import asyncpg
import pytest

from dispatch_core.dev.logins import MIGRATOR_LOGIN
from dispatch_core.dev.postgres import DevServer, start_local_server
from dispatch_core.errors import InvalidInputError, MigrationRightsError
from dispatch_core.migrate import MigrationReport, as_sql, grant, migrate, verify
from dispatch_core.migrate.roles import ROLES
from dispatch_core.migrate.sqltext import split_statements
from tests.support.databases import TestDatabase, new_database
from tests.support.migrations import FUNCTIONS, TABLES, write_migrations

Connection: TypeAlias = "asyncpg.Connection[Any]"

OTHER_MAJORS = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
ODD_LOGIN = 'odd "Login"'


@pytest.fixture(
    scope="module",
    params=[None, *(path.parent for path in OTHER_MAJORS)],
    ids=lambda path: "default" if path is None else path.parent.name,
)
def own_server(request: pytest.FixtureRequest, binaries: Path | None) -> Iterator[DevServer]:
    chosen: Path | None = request.param or binaries
    with start_local_server(
        binaries=chosen, ephemeral=True, settings={"fsync": "off", "full_page_writes": "off"}
    ) as server:
        yield server


@pytest.fixture
async def admin(own_server: DevServer) -> AsyncIterator[Connection]:
    """A superuser outside the test's databases; at the end no role of ours is left on the server."""
    connection = await asyncpg.connect(own_server.admin_dsn)
    yield connection
    for role in (*ROLES, ODD_LOGIN, "second_migrator"):
        await connection.execute("drop role if exists " + await quoted(connection, role))
    await connection.close()


@pytest.fixture
async def empty(own_server: DevServer, admin: Connection) -> AsyncIterator[TestDatabase]:
    async with new_database(own_server) as database:
        yield database


@pytest.fixture
async def other(own_server: DevServer, admin: Connection) -> AsyncIterator[TestDatabase]:
    async with new_database(own_server) as database:
        yield database


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_migrations(tmp_path / "migrations", TABLES, FUNCTIONS)


async def quoted(connection: Connection, name: str) -> str:
    return str(await connection.fetchval("select quote_ident($1)", name))


async def create_login(admin: Connection, name: str, attributes: str = "") -> None:
    await admin.execute(f"create role {await quoted(admin, name)} login password 'relay' {attributes}")


async def run_as_dba(database: TestDatabase, statements: tuple[str, ...]) -> None:
    connection = await asyncpg.connect(database.admin_dsn)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def test_a_login_with_createrole_that_is_no_superuser_migrates_alone(
    empty: TestDatabase, admin: Connection, directory: Path
) -> None:
    report = await migrate(empty.migrator_dsn, directory=directory)
    assert report.bootstrapped
    assert await migrate(empty.migrator_dsn, directory=directory) == MigrationReport()
    assert await verify(empty.migrator_dsn, directory=directory) == []
    attributes = await admin.fetch(
        "select rolname from pg_roles where rolname = any($1) and not"
        " (rolsuper or rolbypassrls or rolcanlogin or rolcreaterole or rolcreatedb or rolreplication)",
        list(ROLES),
    )
    assert {row["rolname"] for row in attributes} == set(ROLES)
    inside = await asyncpg.connect(empty.admin_dsn)
    owners = await inside.fetch("""
        select relname, relowner::regrole::text as owner from pg_class where relnamespace = 'relay'::regnamespace
        union all
        select proname, proowner::regrole::text from pg_proc where pronamespace = 'relay'::regnamespace
    """)
    assert {(row["relname"] == "answer", row["owner"]) for row in owners} == {
        (False, "relay_owner"),
        (True, "relay_api"),
    }
    assert not await inside.fetchval("select has_schema_privilege('relay_api', 'relay', 'create')")
    applied_by = await inside.fetchval("select distinct applied_by from relay.schema_history")
    await inside.close()
    assert applied_by == MIGRATOR_LOGIN


async def test_the_migrations_of_this_version_apply_by_a_login_that_is_no_superuser(empty: TestDatabase) -> None:
    assert (await migrate(empty.migrator_dsn)).applied
    assert await verify(empty.migrator_dsn) == []
    await grant(empty.migrator_dsn, "relay_worker_login", role="worker", tenant="acme", relay="erp")


async def test_a_login_without_rights_is_told_every_statement_and_succeeds_once_a_dba_ran_them(
    empty: TestDatabase, admin: Connection, directory: Path
) -> None:
    await create_login(admin, ODD_LOGIN)
    dsn = empty.dsn(ODD_LOGIN)
    with pytest.raises(MigrationRightsError) as caught:
        await migrate(dsn, directory=directory)
    statements = caught.value.statements
    assert [s.split()[:3] for s in statements[: len(ROLES)]] == [["create", "role", role] for role in ROLES]
    assert statements[-1] == "create schema relay authorization relay_owner;"
    assert all(s in str(caught.value) for s in statements)
    assert all('"odd ""Login"""' in s for s in statements if s.startswith("grant"))
    assert await admin.fetchval("select count(*) from pg_roles where rolname = any($1)", list(ROLES)) == 0

    await run_as_dba(empty, statements)
    assert (await migrate(dsn, directory=directory)).bootstrapped
    assert await verify(dsn, directory=directory) == []


async def test_a_login_that_may_create_roles_but_no_schema_is_told_that_one_statement(
    own_server: DevServer, empty: TestDatabase, admin: Connection, directory: Path
) -> None:
    await admin.execute(f"revoke create on database {empty.name} from {MIGRATOR_LOGIN}")
    with pytest.raises(MigrationRightsError) as caught:
        await migrate(empty.migrator_dsn, directory=directory)
    assert caught.value.statements == ("create schema relay authorization relay_owner;",)
    await run_as_dba(empty, caught.value.statements)
    await migrate(empty.migrator_dsn, directory=directory)
    assert await verify(empty.migrator_dsn, directory=directory) == []


async def test_roles_that_another_login_made_for_another_database_are_used_or_asked_for(
    empty: TestDatabase, other: TestDatabase, admin: Connection, directory: Path
) -> None:
    await migrate(empty.migrator_dsn, directory=directory)
    await create_login(admin, "second_migrator", "createrole")
    await admin.execute(f"grant create on database {other.name} to second_migrator")
    dsn = other.dsn("second_migrator")
    if admin.get_server_version().major >= 16:
        # Since 16 CREATEROLE reaches only the roles that the login itself has made.
        with pytest.raises(MigrationRightsError) as caught:
            await migrate(dsn, directory=directory)
        assert caught.value.statements == tuple(
            f"grant {role} to second_migrator with inherit false, set true;"
            for role in ("relay_owner", "relay_api", "relay_sweep")
        )
        await run_as_dba(other, caught.value.statements)
    await migrate(dsn, directory=directory)
    assert await verify(dsn, directory=directory) == []
    with pytest.raises(MigrationRightsError, match="must be a member of relay_owner to migrate"):
        await create_and_migrate(other, admin, directory)


async def create_and_migrate(database: TestDatabase, admin: Connection, directory: Path) -> None:
    await create_login(admin, ODD_LOGIN, "createrole")
    await migrate(database.dsn(ODD_LOGIN), directory=directory)


@pytest.mark.parametrize("attribute", ["superuser", "bypassrls"])
async def test_an_owner_role_that_row_security_would_not_bind_is_refused(
    empty: TestDatabase, admin: Connection, directory: Path, attribute: str
) -> None:
    await admin.execute(f"create role relay_api {attribute}")
    with pytest.raises(MigrationRightsError) as caught:
        await migrate(empty.admin_dsn, directory=directory)
    assert caught.value.statements == ("alter role relay_api nosuperuser nobypassrls;",)
    await run_as_dba(empty, caught.value.statements)
    await migrate(empty.admin_dsn, directory=directory)


async def test_a_schema_that_a_dba_made_for_somebody_else_is_asked_for(empty: TestDatabase, directory: Path) -> None:
    await run_as_dba(empty, ("create schema relay",))
    with pytest.raises(MigrationRightsError) as caught:
        await migrate(empty.migrator_dsn, directory=directory)
    assert caught.value.statements == ("alter schema relay owner to relay_owner;",)
    await run_as_dba(empty, caught.value.statements)
    await migrate(empty.migrator_dsn, directory=directory)


async def test_databases_that_are_migrated_at_once_create_the_roles_together(
    own_server: DevServer, admin: Connection, directory: Path
) -> None:
    """Advisory locks belong to one database, roles to all: 42710, 23505 and XX000 are what that looks like."""
    for round_ in range(6):
        superuser = round_ % 2 == 0
        async with (
            new_database(own_server) as one,
            new_database(own_server) as two,
            new_database(own_server) as three,
            anyio.create_task_group() as group,
        ):
            reports: list[MigrationReport] = []

            async def run(database: TestDatabase, superuser: bool, reports: list[MigrationReport]) -> None:
                dsn = database.admin_dsn if superuser else database.migrator_dsn
                reports.append(await migrate(dsn, directory=directory))

            for database in (one, two, three) * 3:
                group.start_soon(run, database, superuser, reports)
        assert [report.bootstrapped for report in reports].count(True) == 3
        for role in ROLES:
            await admin.execute(f"drop role {role}")


async def test_a_grant_that_the_login_may_not_give_is_told_as_a_statement_and_stores_nothing(
    empty: TestDatabase, other: TestDatabase, admin: Connection, directory: Path
) -> None:
    await migrate(empty.migrator_dsn)
    await create_login(admin, "second_migrator", "createrole")
    await run_as_dba(empty, ("grant relay_owner, relay_api, relay_sweep to second_migrator",))
    await create_login(admin, ODD_LOGIN)
    dsn = empty.dsn("second_migrator")
    if admin.get_server_version().major < 16:
        # CREATEROLE reached every role then, so the right has to be taken away by other means.
        await admin.execute("alter role second_migrator nocreaterole")
    with pytest.raises(MigrationRightsError) as caught:
        await grant(dsn, ODD_LOGIN, role="worker", tenant="acme", relay=None)
    assert caught.value.statements == ('grant relay_worker to "odd ""Login""";',)
    inside = await asyncpg.connect(empty.admin_dsn)
    assert await inside.fetchval("select count(*) from relay.role_binding") == 0
    await run_as_dba(empty, caught.value.statements)
    await grant(dsn, ODD_LOGIN, role="worker", tenant="acme", relay=None)
    assert await inside.fetchval("select count(*) from relay.role_binding") == 1
    await inside.close()


async def test_a_login_that_inherits_nothing_is_made_to_inherit_or_is_refused(
    empty: TestDatabase, admin: Connection
) -> None:
    await migrate(empty.migrator_dsn)
    await create_login(admin, ODD_LOGIN, "noinherit")
    if admin.get_server_version().major >= 16:
        await grant(empty.migrator_dsn, ODD_LOGIN, role="gateway", tenant="acme")
        assert await admin.fetchval("select pg_has_role($1, 'relay_gateway', 'usage')", ODD_LOGIN)
    else:
        with pytest.raises(InvalidInputError, match="NOINHERIT"):
            await grant(empty.migrator_dsn, ODD_LOGIN, role="gateway", tenant="acme")


async def test_the_script_for_a_dba_runs_on_a_server_without_our_roles(empty: TestDatabase) -> None:
    connection = await asyncpg.connect(empty.admin_dsn)
    text = "\n".join(line for line in as_sql().splitlines() if not line.startswith("\\"))
    for statement in split_statements(text):
        await connection.execute(statement)
    await connection.close()
    assert await migrate(empty.admin_dsn) == MigrationReport()
    assert await verify(empty.admin_dsn) == []
