"""What a login may try, so that it is the same for every kind of login and every function.

ATTACKS   functions that name no tenant, ready to be called; those that do are in `tests.support.verbs`
STANCES   what an attacker does to its session first
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

import asyncpg

from tests.support.protocol import Connection

Call: TypeAlias = "tuple[str, list[Any]]"
Stance: TypeAlias = "Callable[[Connection], Awaitable[None]]"

# By name: a call as far-reaching as its arguments allow.
ATTACKS: Final[Mapping[str, Call]] = {
    "now": ("relay.now()", []),
    "session_age": ("relay.session_age()", []),
    "my_bindings": ("relay.my_bindings()", []),
    "bound_tenant": ("relay.bound_tenant()", []),
    "row_tenant": ("relay.row_tenant()", []),
    "sweep_turn": ("relay.sweep_turn('expire:two', '1 us')", []),
    "sweep_again": ("relay.sweep_again('expire:two')", []),
    "run_sweeps": ("relay.run_sweeps(null, 100, '0 s', '0 s', '{1 us,1 us,1 us,1 us}')", []),
    "tenants_due": ("relay.tenants_due('expire', null, '0 s')", []),
    "outbox_tenants": ("relay.outbox_tenants('{gateway,worker,operator}')", []),
    "durable_tenants": ("relay.durable_tenants()", []),
    "durable_all_tenants": ("relay.durable_all_tenants()", []),
    "durable_tenants_due": ("relay.durable_tenants_due('lease', '0 s', '0 s')", []),
    "durable_turns": ("relay.durable_turns()", []),
    "durable_sweep_turn": ("relay.durable_sweep_turn('lease', '1 us')", []),
    "durable_run_sweeps": (
        "relay.durable_run_sweeps('me', 100, '0 s', '0 s', '0 s', '{1 us,1 us,1 us}')",
        [],
    ),
}  # fmt: skip


async def plain(connection: Connection) -> None:
    """Nothing."""


async def forged_tenant(connection: Connection) -> None:
    """The tenant, as a verb would bind it."""
    await connection.execute("set app.tenant_id = 'b'")


async def forged_settings(connection: Connection) -> None:
    """Every setting that a function of ours reads or sets, to what suits it least."""
    await connection.execute("""
        set citus.propagate_set_commands = 'local'; set lock_timeout = 1; set trace_notify = on;
        set search_path = pg_temp, relay, public; set timezone = 'Asia/Kolkata'; set datestyle = 'SQL, DMY';
        set enable_indexscan = off; set enable_bitmapscan = off; set enable_seqscan = off; set enable_sort = off;
        set enable_incremental_sort = off; set enable_nestloop = off; set enable_hashjoin = off;
        set enable_mergejoin = off;
        set enable_tidscan = off; set jit = on; set plan_cache_mode = force_custom_plan; set row_security = on;
        set standard_conforming_strings = off; set backslash_quote = on; set transform_null_equals = on;
        set default_transaction_isolation = serializable; set bytea_output = escape; set intervalstyle = 'sql_standard';
        set quote_all_identifiers = on; set default_text_search_config = 'simple'; set xmloption = document
    """)


async def row_security_off(connection: Connection) -> None:
    """What asks PostgreSQL for an error rather than fewer rows."""
    await connection.execute("set row_security = off")


async def another_role(connection: Connection) -> None:
    """Its group's, which is all that it may become."""
    group = await connection.fetchval(
        "select rolname::text from pg_roles where rolname like 'relay\\_%' and rolname <> session_user"
        " and pg_has_role(session_user, oid, 'member') order by 1 limit 1"
    )
    await connection.execute(f"set role {group}")


_TRAPS: Final = """
    create {temp} table {schema}.role_binding (role_oid oid, kind text, tenant_id text, relay_id text);
    insert into {schema}.role_binding
      select oid, k, null, null from pg_roles, unnest('{{gateway,worker,operator}}'::text[]) k;
    create {temp} table {schema}.s2r_relay_dispatch_queue (tenant_id text, job_id uuid);
    create {temp} table {schema}.installation (secret bytea);
    create {temp} view {schema}.pg_roles as select * from pg_catalog.pg_roles;
    create type {schema}.regrole as (name text);
    create type {schema}.own as (value text);
    create function {schema}.own_text({schema}.own) returns text language sql return 'b';
    create cast ({schema}.own as text) with function {schema}.own_text({schema}.own) as implicit;
    create domain {schema}.tid as pg_catalog.text;
    create function {schema}.current_setting(text, boolean) returns text language sql as $$ select 'b' $$;
    create function {schema}.set_config(text, text, boolean) returns text language sql as $$ select 'b' $$;
    create function {schema}.to_regrole(text) returns pg_catalog.regrole language sql
      as $$ select 10::pg_catalog.regrole $$;
    create function {schema}.quote_ident(name) returns text language sql as $$ select 'postgres' $$;
    create function {schema}.clock_timestamp() returns timestamptz language sql as $$ select 'epoch'::timestamptz $$;
    create function {schema}.pg_notify(text, text) returns void language sql as $$ select $$;
    create function {schema}.cardinality(text[]) returns bigint language sql as $$ select 1::bigint $$;
    create function {schema}.eq(text, text) returns boolean language sql as $$ select true $$;
    create operator {schema}.= (leftarg = text, rightarg = text, function = {schema}.eq);
    create function {schema}.eq(uuid, uuid) returns boolean language sql as $$ select true $$;
    create operator {schema}.= (leftarg = uuid, rightarg = uuid, function = {schema}.eq);
    set search_path = {schema}, relay, pg_catalog
"""


async def planted_temp(connection: Connection) -> None:
    """Look-alikes in its own temporary schema, in front of everything."""
    await connection.execute(_TRAPS.format(temp="temp", schema="pg_temp"))


async def planted_public(connection: Connection) -> None:
    """The same where everybody looks; for a login that may create there."""
    await connection.execute(_TRAPS.format(temp="", schema="public"))


STANCES: Final[tuple[Stance, ...]] = (
    plain,
    forged_tenant,
    forged_settings,
    row_security_off,
    another_role,
    planted_temp,
    planted_public,
)


async def answer(connection: Connection, call: Call, *, keep: bool = False) -> tuple[str | None, str]:
    """Call a function in a transaction; return the SQLSTATE (None: it went well), and all that was said."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        rows = await connection.fetch(f"select * from {call[0]}", *call[1])
    except asyncpg.PostgresError as error:
        await transaction.rollback()
        return error.sqlstate, repr(error.as_dict())
    await (transaction.commit() if keep else transaction.rollback())
    return None, repr([tuple(row.values()) for row in rows])


async def try_sql(connection: Connection, sql: str) -> str | None:
    """Execute a text in a transaction of its own, kept where it goes well; return the SQLSTATE."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute(sql)
    except asyncpg.PostgresError as error:
        await transaction.rollback()
        return error.sqlstate
    try:
        await transaction.commit()
    except asyncpg.PostgresError as error:  # what a held cursor does
        return error.sqlstate
    return None
