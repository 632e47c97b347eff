"""`status` and `verify` see what no longer is as the migrations made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import anyio
import asyncpg
import pytest

from dispatch_core.errors import DatabaseUnavailableError
from dispatch_core.migrate import MigrationReport, migrate, status, verify
from dispatch_core.migrate.roles import ROLES
from tests.support.databases import TestDatabase
from tests.support.migrations import FUNCTION, FUNCTIONS, ONE, TABLES, write_migrations

Connection: TypeAlias = "asyncpg.Connection[Any]"

QUEUE = "relay.s2r_relay_dispatch_queue"


async def test_a_migrated_database_has_no_problem_for_any_login_that_may_look(database: TestDatabase) -> None:
    assert await verify(database.admin_dsn) == []
    assert await verify(database.operator_dsn) == []


async def test_an_empty_database_says_so(bare_database: TestDatabase) -> None:
    assert "schema relay is not in this database" in await verify(bare_database.admin_dsn)
    found = await status(bare_database.admin_dsn)
    assert (found.state, found.usable) == ("missing", False)
    assert {step.state for step in found.steps} == {"pending"}


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (f"alter table {QUEUE} disable row level security", f"{QUEUE}: row security is not enabled"),
        (f"alter table {QUEUE} no force row level security", f"{QUEUE}: row security is not forced"),
        (f"alter table {QUEUE} owner to postgres", f"{QUEUE} belongs to postgres, not to relay_owner"),
        ("create table relay.mine (id int)", "relay.mine belongs to postgres, not to relay_owner"),
        (f"grant select on {QUEUE} to public", f"PUBLIC has SELECT on {QUEUE}"),
        ("grant insert on relay.role_binding to relay_worker", "relay_worker has INSERT on relay.role_binding"),
        ("grant select on relay.installation to relay_operator", "relay_operator has SELECT on relay.installation"),
        ("grant create on schema relay to relay_api", "relay_api may create in schema relay"),
        ("grant create on schema relay to public", "PUBLIC may create in schema relay"),
        ("alter function relay.now() owner to postgres", "relay.now() belongs to postgres, which is no owner of ours"),
        ("alter function relay.now() reset search_path", "relay.now() is SECURITY DEFINER without its own search_path"),
        (
            "alter function relay.now() set search_path = public, pg_catalog",
            "relay.now() is SECURITY DEFINER without its own search_path",
        ),
        ("grant execute on function relay.now() to public", "PUBLIC may execute relay.now()"),
        (
            "update pg_index set indisvalid = false where indexrelid::regclass::text = 'relay.sweep_pkey'",
            "index relay.sweep_pkey is not valid",
        ),
        (
            f"alter table {QUEUE} add constraint c check (attempt < 1000) not valid",
            f"constraint c of {QUEUE} is not validated",
        ),
        ("alter schema relay owner to postgres", "schema relay belongs to postgres, not to relay_owner"),
        (
            "update relay.schema_history set sha256 = 'x' where step = '0001_tenancy'",
            "step 0001_tenancy is not the text",
        ),
        ("update relay.schema_history set sha256 = 'x' where step = 'functions'", "step functions is not the text"),
        ("delete from relay.schema_history where step = '0002_dispatch'", "step 0002_dispatch was not applied"),
    ],
)
async def test_damage_is_found(database: TestDatabase, admin: Connection, damage: str, problem: str) -> None:
    await admin.execute(damage)
    problems = await verify(database.admin_dsn)
    assert [found for found in problems if found.startswith(problem)], problems


async def test_the_binding_of_a_login_that_is_gone_is_found_and_goes_with_the_next_grant(
    database: TestDatabase, admin: Connection
) -> None:
    """A dump has its number, and on the server where that is restored the number may be another login's."""
    name = f"gone_{database.name[-8:]}"
    await admin.execute(f"create role {name} login")
    await admin.execute("select relay.grant_binding($1, 'worker', 'acme', null)", name)
    number = await admin.fetchval("select $1::text::regrole::oid::bigint", name)
    assert await verify(database.admin_dsn) == []
    await admin.execute(f"drop role {name}")
    assert await admin.fetchval("select role_oid::text from relay.role_binding where tenant_id = 'acme'") == str(number)
    (problem,) = await verify(database.admin_dsn)
    assert problem.startswith(f"a binding as worker is of role {number}, which is gone")
    assert await verify(database.operator_dsn) == [], "who may not read bindings is told of the rest"
    await admin.execute("select relay.grant_binding('relay_worker_login', 'worker', 'other', null)")
    assert await admin.fetchval("select count(*) from relay.role_binding where tenant_id = 'acme'") == 0
    assert await verify(database.admin_dsn) == []


async def test_a_table_of_tenants_without_a_policy_is_found(database: TestDatabase, admin: Connection) -> None:
    await admin.execute("""
        set role relay_owner;
        create table relay.naked (tenant_id text not null);
        alter table relay.naked enable row level security;
        alter table relay.naked force row level security;
    """)
    assert "relay.naked: row security is without a policy" in await verify(database.admin_dsn)


async def test_the_checks_of_roles_see_only_ours(database: TestDatabase, admin: Connection) -> None:
    transaction = admin.transaction()
    await transaction.start()
    try:
        await admin.execute("alter role relay_api bypassrls; alter role relay_worker login")
        await admin.execute("grant relay_owner to relay_api")
        from dispatch_core.migrate.verify import CHECKS

        found = [row[0] for check in CHECKS for row in await admin.fetch(check)]
        assert "role relay_api has BYPASSRLS" in found
        assert "role relay_worker can log in" in found
        assert "role relay_api is a member of relay_owner" in found
        assert not any("pg_" in line for line in found)
    finally:
        await transaction.rollback()


async def test_status_tells_current_pending_older_newer_drifted_and_incompatible(
    bare_database: TestDatabase, tmp_path: Path
) -> None:
    dsn = bare_database.admin_dsn
    directory = write_migrations(tmp_path / "m", TABLES, FUNCTIONS, protocol=3, compatible_from=2)
    await migrate(dsn, directory=directory)

    async def state() -> tuple[str, bool]:
        found = await status(dsn, directory=directory)
        assert found.missing_roles == ()
        assert {step.step for step in found.steps} >= {"0001_one", "functions"}
        return found.state, found.usable

    assert await state() == ("current", True)
    write_migrations(directory, TABLES, {"10_answer": FUNCTION + "-- x"}, protocol=3, compatible_from=2)
    assert await state() == ("pending", True)
    write_migrations(directory, {**TABLES, "0004_four": ONE}, FUNCTIONS, protocol=4, compatible_from=2)
    assert await state() == ("older", False)
    write_migrations(directory, {"0001_one": ONE}, FUNCTIONS, protocol=2, compatible_from=2)
    assert await state() == ("newer", True)
    write_migrations(directory, {"0001_one": ONE}, FUNCTIONS, protocol=1)
    assert await state() == ("incompatible", False)
    write_migrations(directory, {**TABLES, "0001_one": ONE + "-- x"}, FUNCTIONS, protocol=3, compatible_from=2)
    assert await state() == ("drifted", False)


async def test_an_unreachable_server_is_a_retryable_error_without_the_password() -> None:
    with pytest.raises(DatabaseUnavailableError) as caught:
        await status("postgresql://somebody:hunter2@127.0.0.1:9/x")
    assert caught.value.retryable
    assert "hunter2" not in str(caught.value)


async def test_group_roles_are_named_where_they_are_missing(bare_database: TestDatabase) -> None:
    found = await status(bare_database.admin_dsn)
    assert set(found.missing_roles) <= set(ROLES)


async def test_a_dump_by_a_login_with_bypassrls_restores_to_the_same_schema_and_one_without_is_refused(
    database: TestDatabase, bare_database: TestDatabase, admin: Connection, tmp_path: Path
) -> None:
    """As migrations/README.md says: forced policies stop pg_dump for every login that they bind."""
    if database.server.cluster is None:
        pytest.skip("pg_dump is looked for beside the server's own binaries")
    binaries = database.server.cluster.binaries
    login, file = f"dump_{database.name}", tmp_path / "dump.sql"
    dump = [str(binaries / "pg_dump"), "--file", str(file), database.dsn(login)]
    await admin.execute(f"create role {login} login password 'relay' nobypassrls in role pg_read_all_data")
    try:
        refused = await anyio.run_process(dump, check=False)
        assert b"row-level security policy" in refused.stderr
        await admin.execute(f"alter role {login} bypassrls")
        await anyio.run_process(dump)
    finally:
        await admin.execute(f"drop role {login}")
    restore = [str(binaries / "psql"), "--quiet", "--set", "ON_ERROR_STOP=1", "--file", str(file)]
    await anyio.run_process([*restore, bare_database.admin_dsn])
    assert await verify(bare_database.admin_dsn) == []
    assert await migrate(bare_database.admin_dsn) == MigrationReport()
