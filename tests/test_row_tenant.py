"""Row security looks a tenant up in two ways: with the binding for whoever comes, without it inside of the verbs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.support.databases import TestDatabase

Connection: TypeAlias = "asyncpg.Connection[Any]"

READER = "relay_row_reader_login"
QUEUE = "select count(*) from relay.s2r_relay_dispatch_queue"


@pytest.fixture
async def reader(admin: Connection, database: TestDatabase) -> AsyncIterator[Connection]:
    """A plain login that may read the queue table itself, and is bound to the tenant acme alone."""
    await admin.execute(
        f"""
        do $$ begin
          create role {READER} login password 'relay';
        exception when duplicate_object or unique_violation then null; end $$;
        grant usage on schema relay to {READER};
        grant select on relay.s2r_relay_dispatch_queue to {READER};
        select relay.grant_binding('{READER}', 'operator', 'acme', null);
        """
    )
    connection: Connection = await asyncpg.connect(database.dsn(READER))
    yield connection
    await connection.close()
    await admin.execute(f"drop owned by {READER}")


async def test_each_verb_that_reads_tenant_tables_binds_first(admin: Connection) -> None:
    """What row security leaves out for relay_api, every function that a login may call has done itself."""
    rows = await admin.fetch(
        """
        select p.oid::regprocedure::text as name, p.prosrc like '%relay.bind_tenant(%' as binds,
               exists (select from aclexplode(p.proacl) a where a.grantee <> p.proowner) as is_open
        from pg_proc p
        where p.pronamespace = 'relay'::regnamespace and p.proowner = 'relay_api'::regrole
          and (p.prosrc like '%s2r_relay_%' or p.prosrc like '%relay.outbox %'
               or p.prosrc ~ 'relay[.]durable_(job|chunk|row_error|event) ')
        """
    )
    assert rows
    assert [row["name"] for row in rows if row["is_open"] and not row["binds"]] == []


async def test_a_reader_of_the_table_sees_its_bound_tenant(reader: Connection) -> None:
    await reader.execute("set app.tenant_id = 'acme'")
    assert await reader.fetchval(QUEUE) == 0


@pytest.mark.parametrize(("tenant", "state"), [("", "S2001"), ("globex", "S2003")])
async def test_a_reader_without_a_tenant_of_its_own_gets_an_error(reader: Connection, tenant: str, state: str) -> None:
    await reader.execute(f"set app.tenant_id = '{tenant}'")
    with pytest.raises(asyncpg.PostgresError) as raised:
        await reader.fetchval(QUEUE)
    assert raised.value.sqlstate == state


async def test_a_reader_who_calls_himself_by_another_name_gets_the_error_too(reader: Connection) -> None:
    """A search_path with a look-alike of a function or an operator changes nothing: the names are resolved already."""
    await reader.execute(
        """
        create function pg_temp.always(name, text) returns boolean language sql return true;
        create operator pg_temp.= (function = pg_temp.always, leftarg = name, rightarg = text);
        set search_path = pg_temp, pg_catalog;
        set app.tenant_id = 'globex';
        """
    )
    with pytest.raises(asyncpg.PostgresError) as raised:
        await reader.fetchval(QUEUE)
    assert raised.value.sqlstate == "S2003"


async def test_a_verb_that_forgot_to_bind_raises(admin: Connection, worker: Connection) -> None:
    await admin.execute(
        """
        create function relay.forgetful() returns bigint language sql security definer
          set search_path = pg_catalog, pg_temp
          as 'select count(*) from relay.s2r_relay_dispatch_queue';
        alter function relay.forgetful() owner to relay_api;
        """
    )
    with pytest.raises(asyncpg.PostgresError) as raised:
        await worker.fetchval("select relay.forgetful()")
    assert raised.value.sqlstate == "S2001"
