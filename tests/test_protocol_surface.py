"""The functions of schema relay: who owns them, as whom they run, and who may call them."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from tests.support.protocol import Connection
from tests.support.verbs import MAY_CALL

pytestmark = pytest.mark.invariant("I4")

# Run as the caller: two ask for the age of his own session, which nobody else may see, and two call those.
AS_THE_CALLER = {"reclaim", "run_sweeps", "session_age", "durable_run_sweeps"}
# Called inside of verbs alone, which have pinned their search_path and run as relay_api already.
INSIDE_OF_VERBS = {
    "bind_tenant",
    "set_tenant",
    "unbind_tenant",
    "confirm_commit",
    "ready_jobs",
    "renew_jobs",
    "return_jobs",
    "end_jobs",
    "drop_jobs",
    "request_digest",
    "claim_turn",
    "pending_upto",
    "pace",
    "retry_after",
    "notify",
    "outbox_drop",
    "outbox_back",
    "outbox_hold",
    "outbox_open",
    "outbox_promote",
    "outbox_ring",
    "outbox_new_id",
    "outbox_choose",
    "outbox_last",
    "outbox_restart",
    "outbox_matching",
    "durable_move",
    "durable_renew",
    "durable_done",
    "durable_tell",
    "durable_count",
    "durable_turn_to",
    "durable_has_open",
    "durable_conclude",
    "durable_ring",
    "durable_snapshot",
    "durable_promote",
    "durable_recount",
    "durable_start",
    "durable_hold",
    "durable_is_last",
    "durable_complete_one",
    "durable_complete_all",
    "durable_may",
    "durable_sweep_chunks",
    "durable_check_extra",
    "durable_check_event",
    "check_size",
    "check_json",
    "check_parts",
    "durable_write_extra",
    "durable_matches",
    "durable_meets",
    "durable_drop",
}
# What a policy calls is called by whoever reads the table.
BY_EVERYBODY = {"bound_tenant", "row_tenant"}
COMMON = {
    "now", "session_age", "my_bindings", "sweep_turn", "sweep_again", "run_sweeps", "tenants_due",
    "durable_sweep_turn", "durable_run_sweeps", "durable_tenants_due",
}  # fmt: skip
BY_ALL_BUT_WORKERS = {"outbox_tenants", "durable_all_tenants", "durable_turns"}
BY_WORKERS = {"durable_tenants"}


async def _functions(admin: Connection) -> list[asyncpg.Record]:
    return await admin.fetch(
        """select p.proname as name, p.prosecdef as definer, p.proowner::regrole::text as owner,
                  p.proconfig as settings, p.prosqlbody is not null as standard_body,
                  exists (select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
                          where a.grantee = 0) as by_everybody,
                  array(select g from unnest(array['gateway', 'worker', 'operator']) g
                        where has_function_privilege('relay_' || g, p.oid, 'execute')) as kinds
           from pg_proc p where p.pronamespace = 'relay'::regnamespace order by 1"""
    )


async def test_every_function_runs_as_its_owner_but_for_those_named_here(admin: Connection) -> None:
    invoker = {r["name"] for r in await _functions(admin) if not r["definer"]}
    assert invoker == AS_THE_CALLER | INSIDE_OF_VERBS | {"row_tenant"}


async def test_every_function_that_a_login_may_call_has_its_search_path_pinned(admin: Connection) -> None:
    for r in await _functions(admin):
        if r["name"] in INSIDE_OF_VERBS:
            assert r["kinds"] == [], f"{r['name']} has no search_path of its own, so no login may call it"
        elif not r["standard_body"]:  # names in a body of the standard's kind are resolved when it is made
            assert "search_path=pg_catalog, pg_temp" in (r["settings"] or []), r["name"]


async def test_no_function_names_a_relation_without_its_schema(admin: Connection) -> None:
    """The second belt beneath a pinned search_path, and the only one inside of verbs."""
    tables = [
        r[0]
        for r in await admin.fetch(
            "select relname from pg_class where relnamespace = 'relay'::regnamespace and relkind in ('r', 'v')"
        )
    ]
    bodies = await admin.fetch("select proname, prosrc from pg_proc where pronamespace = 'relay'::regnamespace")
    for table in tables:
        bare = await admin.fetch(
            r"""select p.proname from pg_proc p where p.pronamespace = 'relay'::regnamespace
                and p.prosrc ~* ('\m(from|join|into|update|using)\s+' || $1 || '\M')""",
            table,
        )
        assert bare == [], table
    assert len(bodies) > 35


async def test_functions_are_owned_by_a_role_that_owns_no_table_and_tables_by_one_that_runs_no_verb(
    admin: Connection,
) -> None:
    owners = {r["name"]: r["owner"] for r in await _functions(admin)}
    assert {name for name, owner in owners.items() if owner == "relay_owner"} == BY_EVERYBODY
    assert {name for name, owner in owners.items() if owner == "relay_sweep"} == {
        "tenants_due", "outbox_tenants", "durable_tenants", "durable_tenants_due", "durable_all_tenants"
    }  # fmt: skip
    assert set(owners.values()) == {"relay_owner", "relay_sweep", "relay_api"}
    relations = await admin.fetch(
        """select relname, relowner::regrole::text as owner from pg_class
           where relnamespace = 'relay'::regnamespace and relkind in ('r', 'v', 'S', 'm')"""
    )
    assert {r["owner"] for r in relations} == {"relay_owner"}
    for role in ("relay_api", "relay_sweep"):
        assert await admin.fetchval("select count(*) from pg_class where relowner = $1::text::regrole", role) == 0


async def test_the_roles_behind_the_functions_are_plain_and_nobody_can_log_in_as_one(admin: Connection) -> None:
    rows = await admin.fetch(
        """select rolname, rolsuper, rolbypassrls, rolcanlogin, rolcreaterole, rolcreatedb, rolreplication from pg_roles
           where rolname like 'relay\\_%' and rolname not like '%\\_login'"""
    )
    assert {r["rolname"] for r in rows} == {
        "relay_owner",
        "relay_api",
        "relay_sweep",
        "relay_gateway",
        "relay_worker",
        "relay_operator",
    }
    for r in rows:
        assert not any(list(r.values())[1:]), r


async def test_everybody_may_execute_only_what_the_policies_call(admin: Connection) -> None:
    assert {r["name"] for r in await _functions(admin) if r["by_everybody"]} == BY_EVERYBODY


async def test_each_kind_of_login_may_execute_its_verbs_and_nothing_else(admin: Connection) -> None:
    functions = await _functions(admin)
    for kind, verbs in MAY_CALL.items():
        allowed = {r["name"] for r in functions if kind in r["kinds"]}
        assert allowed == {
            *verbs, *COMMON, *BY_EVERYBODY, *(BY_ALL_BUT_WORKERS if kind != "worker" else BY_WORKERS)
        }, kind  # fmt: skip


async def test_no_login_has_a_right_on_any_table_but_operators_on_the_view(admin: Connection) -> None:
    rights = await admin.fetch(
        """select c.relname, a.grantee::regrole::text as grantee, a.privilege_type
           from pg_class c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
           where c.relnamespace = 'relay'::regnamespace and c.relkind in ('r', 'v', 'S')
             and a.grantee not in ('relay_owner'::regrole, 'relay_api'::regrole, 'relay_sweep'::regrole)"""
    )
    assert {tuple(r) for r in rights} == {
        ("s2r_relay_dispatch", "relay_operator", "SELECT"),
        # What is installed, which every SDK asks at its start.
        *(("schema_history", f"relay_{kind}", "SELECT") for kind in MAY_CALL),
    }
    columns = await admin.fetch(
        """select a.attrelid::regclass::text, a.attname, x.grantee::regrole::text, x.privilege_type
           from pg_attribute a, aclexplode(a.attacl) x where a.attacl is not null
             and a.attrelid in (select oid from pg_class where relnamespace = 'relay'::regnamespace)"""
    )
    assert [tuple(r) for r in columns] == [
        ("relay.s2r_relay_dispatch_result", "completed_at", "relay_api", "UPDATE")  # to lock a row; never written
    ]


async def test_request_result_and_key_are_append_only_for_the_functions_too(admin: Connection) -> None:
    for table in ("request", "result", "key"):
        await admin.execute("set role relay_api")
        try:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await admin.execute(f"update relay.s2r_relay_dispatch_{table} set tenant_id = tenant_id")
        finally:
            await admin.execute("reset role")


async def test_nobody_may_create_anything_in_the_schema(admin: Connection) -> None:
    for role in ("relay_api", "relay_sweep", "relay_gateway", "relay_worker", "relay_operator", "public"):
        assert not await admin.fetchval("select has_schema_privilege($1, 'relay', 'create')", role), role


def test_every_function_says_what_it_guarantees() -> None:
    """A DBA reads the files: each function has its comment above it."""
    for path in (Path(__file__).resolve().parent.parent / "migrations" / "functions").glob("*.sql"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if line.startswith("create or replace function"):
                assert lines[number - 1].startswith("--"), f"{path.name}: {line}"
