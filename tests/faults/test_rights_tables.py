"""Tables, views, roles and the server itself, as raw SQL: what PostgreSQL would allow, and what it must not.

The relations are those of the catalog, so a new one is attacked without anybody thinking of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.attacks import try_sql
from tests.support.databases import TestDatabase
from tests.support.protocol import Connection, logins
from tests.support.tenants import World, audit, build

pytestmark = pytest.mark.invariant("I4")

_READS = (
    "select * from {t}",
    "select from {t}",
    "select t.{c}, t::text from {t} t",
    "select count(*) from {t}",
    "select {c} from {t} where {c} is null",
    "explain (analyze) select * from {t}",
    "explain select * from {t}",
    "copy (table {t}) to stdout",
    "create temp view v as table {t}; table v",
    "create temp table c as table {t}",
    "create temp table c (like {t})",
    "do $$ begin perform * from {t}; end $$",
    "declare c cursor with hold for table {t}",
    "deallocate all; prepare p as table {t}; execute p",
    "select query_to_xml('table {t}', true, false, '')",
    "lock table {t} in access share mode",
)
_WRITES = (
    "copy {t} from stdin",
    "insert into {t} default values",
    "update {t} set {c} = {c}",
    "delete from {t}",
    "truncate {t}",
    "merge into {t} using (select 1) s on true when matched then delete",
    "select * from {t} for update",
    "select * from {t} for key share",
    "lock table {t} in row exclusive mode",
    "lock table {t} in access exclusive mode",
    "create index on {t} ({c})",
    "create trigger x before insert on {t} execute function suppress_redundant_updates_trigger()",
    "create policy x on {t} using (true)",
    "create rule x as on insert to {t} do instead nothing",
    "create statistics x on {c}, {d} from {t}",
    "create temp table c (like {t} including all) inherits ({t})",
    "create temp table c (x text references {t})",
    "alter table {t} disable row level security",
    "alter table {t} no force row level security",
    "alter table {t} add column x int",
    "alter table {t} owner to current_user",
    "alter table {t} rename to x",
    "alter table {t} set schema public",
    "comment on table {t} is 'x'",
    "comment on view {t} is 'x'",
    "drop table {t} cascade",
    "drop view {t} cascade",
)
# What each kind may read, and of which no row is a tenant's, or only with the tenant bound.
_READABLE = {"relay.schema_history": {"worker", "gateway", "operator"}, "relay.s2r_relay_dispatch": {"operator"}}
_REFUSED = {
    "42501",  # insufficient privilege
    "42809", "0A000", "55000", "428C9", "42P17",  # not with such a relation, which may be looked at first
    "42P01", "42P16",
}  # fmt: skip


async def _rights(admin: Connection) -> list[tuple[Any, ...]]:
    """Who may do what, and who owns what: everything that GRANT, REVOKE, DROP OWNED and ALTER could change."""
    rows = await admin.fetch("""
        select 'relation', oid::regclass::text, relowner::regrole::text, relacl::text, relrowsecurity::text,
               relforcerowsecurity::text from pg_class where relnamespace = 'relay'::regnamespace
        union all select 'column', attrelid::regclass::text, attname::text, attacl::text, null, null from pg_attribute
          where attrelid in (select oid from pg_class where relnamespace = 'relay'::regnamespace)
        union all select 'function', oid::regprocedure::text, proowner::regrole::text, proacl::text, proconfig::text,
               md5(prosrc) from pg_proc where pronamespace = 'relay'::regnamespace
        union all select 'schema', nspname::text, nspowner::regrole::text, nspacl::text, null, null from pg_namespace
          where nspname in ('relay', 'public')
        union all select 'policy', polname::text, polrelid::regclass::text, polroles::text, polqual::text, null
          from pg_policy
        union all select 'member', roleid::regrole::text, member::regrole::text, admin_option::text, null, null
          from pg_auth_members where roleid::regrole::text like 'relay\\_%'
        union all select 'role', rolname::text, rolsuper::text, rolbypassrls::text, rolcanlogin::text,
               rolcreaterole::text from pg_roles where rolname like 'relay\\_%'
        union all select 'default', defaclrole::regrole::text, defaclobjtype::text, null, null, null from pg_default_acl
          where defaclrole::regrole::text in ('relay_owner', 'relay_api', 'relay_sweep')
        union all select 'trigger', tgname::text, null, null, null, null from pg_trigger where not tgisinternal
        order by 1, 2, 3, 4, 5, 6""")
    return [tuple(row) for row in rows]


@pytest.fixture
async def world(admin: Connection, gateway: Connection, worker: Connection) -> World:
    return await build(admin, gateway, worker)


@pytest.mark.parametrize("kind", ["worker", "gateway", "operator"])
async def test_no_statement_reaches_a_relation_of_the_schema(
    database: TestDatabase, admin: Connection, world: World, kind: str
) -> None:
    relations = await admin.fetch(
        """select c.oid::regclass::text as name,
                  array_agg(quote_ident(a.attname) order by a.attnum)::text[] as columns
           from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
           where c.relnamespace = 'relay'::regnamespace and c.relkind not in ('i', 'I') group by c.oid
           union all
           select c.oid::regclass::text, '{chunk_id,chunk_seq}'
           from pg_class t join pg_class c on c.oid = t.reltoastrelid
           where t.relnamespace = 'relay'::regnamespace"""
    )
    assert len(relations) > 20
    async with logins(database) as made:
        attacker = await made.open(kind, "a", "one" if kind == "worker" else None)
        before, rights = await audit(admin), await _rights(admin)
        for tenant in ("", "a", "b"):
            await attacker.execute(f"set app.tenant_id = '{tenant}'")
            for relation in relations:
                name, (c, d, *_) = relation["name"], relation["columns"]
                reads: tuple[str, ...] = () if kind in _READABLE.get(name, ()) else _READS
                for statement in (*reads, *_WRITES) if tenant == "a" else reads[:2]:
                    text = statement.format(t=name, c=c, d=d)
                    assert await try_sql(attacker, text) in _REFUSED, text
        assert await _rights(admin) == rights
        assert await audit(admin) == before


@pytest.mark.parametrize("kind", ["worker", "gateway", "operator"])
async def test_a_member_of_a_group_cannot_take_from_it_give_it_away_or_become_another(
    database: TestDatabase, admin: Connection, world: World, kind: str
) -> None:
    """DROP OWNED BY asks for membership alone; it revokes what its caller could revoke, which is nothing."""
    group = f"relay_{kind}"
    async with logins(database) as made:
        attacker = await made.open(kind, "a", "one" if kind == "worker" else None)
        other = await made.create()
        rights = await _rights(admin)
        roles = [row[0] for row in await admin.fetch("select rolname::text from pg_roles") if row[0] not in made.names]
        for role in ("reset role", f"set role {group}"):
            await attacker.execute(role)
            for name in roles:
                if name != group:
                    assert await try_sql(attacker, f'set role "{name}"') == "42501", name
                assert await try_sql(attacker, f'set session authorization "{name}"') == "42501", name
            for statement in (
                f"drop owned by {group}",
                f"drop owned by {group} cascade",
                "drop owned by relay_owner",
                f"reassign owned by {group} to current_user",
                "reassign owned by relay_owner to current_user",
                f"revoke all on all functions in schema relay from {group}",
                f"revoke all on all tables in schema relay from {group}",
                f"revoke usage on schema relay from {group}",
                f'grant {group} to "{other}"',
                f'grant relay_owner to "{other}"',
                f'grant usage on schema relay to "{other}"',
                f'grant execute on all functions in schema relay to "{other}"',
                f"revoke {group} from relay_gateway_login",
                f'alter role "{other}" in role {group}',
                "alter role relay_worker_login password 'x'",
                "alter role current_user bypassrls",
                "alter role current_user superuser",
                "alter role relay_worker_login set app.tenant_id = 'b'",
                "alter default privileges in schema relay grant all on tables to public",
                "alter default privileges for role relay_owner grant all on tables to public",
                "create schema relay2",
                "create schema if not exists relay authorization current_user",
                "alter schema relay rename to r",
                "alter schema relay owner to current_user",
                "create function relay.x() returns int language sql return 1",
                "create operator relay.= (leftarg = text, rightarg = text, function = texteq)",
                "create type relay.x as (y int)",
                "create or replace function relay.now() returns timestamptz language sql return null",
                "alter function relay.now() set search_path = public",
                "alter function relay.now() security invoker",
                "drop function relay.now() cascade",
                "create cast (text as uuid) without function as implicit",
            ):
                await try_sql(attacker, statement)
                assert await _rights(admin) == rights, statement
        # And the others of the group work on.
        assert await admin.fetchval(
            "select has_function_privilege($1, 'relay.ring(text[],text[],text[],text[])', 'execute')", group
        )


async def test_the_server_is_closed_to_a_plain_login(database: TestDatabase, gateway: Connection) -> None:
    pid = await gateway.fetchval("select pg_backend_pid()")
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        for statement in (
            f"select pg_terminate_backend({pid})",
            f"select pg_cancel_backend({pid})",
            "select pg_read_file('postgresql.conf')",
            "select pg_ls_dir('.')",
            "select pg_reload_conf()",
            "select pg_stat_reset()",
            "select pg_switch_wal()",
            "select lo_import('/etc/hostname')",
            "select set_config('session_replication_role', 'replica', false)",
            "set log_statement = 'all'",
            "set log_min_messages = debug5",
            "set session_preload_libraries = 'x'",
            "set debug_discard_caches = 1",
            "set jit_dump_bitcode = on",
            "load '/tmp/x'",
            "copy (select 1) to '/tmp/x'",
            "copy (select 1) to program 'id'",
            "create extension dblink",
            "create language plpython3u",
            "create event trigger x on ddl_command_start execute function pg_catalog.now()",
            "create publication x for all tables",
            "create subscription x connection '' publication x",
            "alter system set fsync = off",
            "alter database template1 allow_connections false",
            "select pg_create_logical_replication_slot('x', 'test_decoding')",
            "select pg_get_wal_summarizer_state() from pg_authid",
            "select rolpassword from pg_authid",
            "select * from pg_statistic",
            "select * from pg_hba_file_rules",
        ):
            assert await try_sql(attacker, statement) is not None, statement
        assert await gateway.fetchval("select 1") == 1
        for view in ("pg_stats", "pg_stats_ext"):
            assert await attacker.fetchval(f"select count(*) from {view} where schemaname = 'relay'") == 0


async def test_a_large_object_is_its_makers_alone(database: TestDatabase) -> None:
    async with logins(database) as made:
        one, other = await made.open("gateway", "b"), await made.open("worker", "a", "one")
        number = await one.fetchval("select lo_from_bytea(0, 'mark-b-one')")
        for call in (f"lo_get({number})", f"lo_put({number}, 0, 'x')", f"lo_unlink({number})"):
            assert await try_sql(other, f"select {call}") == "42501", call
        assert await try_sql(other, "select data from pg_largeobject") == "42501"
        await one.execute(f"select lo_unlink({number})")


async def test_the_view_of_operators_shows_no_foreign_row_to_a_leaky_function(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    """In a WHERE, in an ORDER BY, through an operator or a cast of one's own, however cheap it claims to be."""
    async with logins(database) as made:
        operator = await made.open("operator", "a")
        before = await audit(admin)
        heard: list[str] = []
        operator.add_log_listener(lambda _connection, message: heard.append(repr(message.as_dict())))
        await operator.execute("""
            create function pg_temp.leak(anyelement) returns boolean language plpgsql cost 0.0000001
              as $$ begin raise notice '%', $1; return true; end $$;
            create function pg_temp.same(text, text) returns boolean language plpgsql cost 0.0000001
              as $$ begin raise notice '% %', $1, $2; return true; end $$;
            create operator pg_temp.=== (leftarg = text, rightarg = text, function = pg_temp.same, restrict = eqsel);
            set enable_indexscan = off; set enable_bitmapscan = off; set app.tenant_id = 'a'
        """)
        view = "relay.s2r_relay_dispatch"
        for statement in (
            f"select from {view} v where pg_temp.leak(v.operation)",
            f"select from {view} v where pg_temp.leak(v.request_body) and v.tenant_id = 'b'",
            f"select from {view} v where pg_temp.leak(v.tenant_id) or v.relay_id = 'two'",
            f"select from {view} v where v.operation operator(pg_temp.===) 'x'",
            f"select from {view} v order by pg_temp.leak(v.error_message)",
            f"select from {view} v join {view} w on pg_temp.leak(v.operation || w.operation) limit 500",
            f"select from {view} v where exists (select from {view} w where pg_temp.leak(w.response_body))",
            f"select from {view} v where v.job_id::text::bytea::text like '%' and pg_temp.leak(v.request_headers)",
            f"select sum((1 / (position('mark-b' in v.operation) = 0)::int)) from {view} v",
        ):
            assert await try_sql(operator, statement) is None, statement
        assert len(heard) > 50
        assert world.leaks(heard, "operator") == []
        rows = await operator.fetch(f"select * from {view}")
        assert {row["tenant_id"] for row in rows} == {"a"}
        for tenant, state in (("", "S2001"), ("b", "S2003")):
            await operator.execute(f"set app.tenant_id = '{tenant}'")
            assert await try_sql(operator, f"select from {view} v where pg_temp.leak(v.operation)") == state
        # Nor through a plan that was made for another role, or while another tenant was bound.
        await operator.execute(f"set app.tenant_id = 'a'; prepare p as select distinct tenant_id from {view}")
        for role in ("reset role", "set role relay_operator") * 4:
            await operator.execute(role)
            assert [row[0] for row in await operator.fetch("execute p")] == ["a"]
        await operator.execute("set app.tenant_id = 'b'")
        assert await try_sql(operator, "execute p") == "S2003"
        for statement in (f"select from {view} for update", f"update {view} set fence = 0", f"delete from {view}"):
            assert await try_sql(operator, statement) in ("42501", "55000"), statement
        assert await audit(admin) == before
