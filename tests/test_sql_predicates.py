"""The SQL of the migrations, parsed: every statement on a tenant table names the bound tenant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import predicates
from tests.support.predicates import Statement, statements_of

pytestmark = pytest.mark.invariant("I4")

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"

# What has no tenant predicate, and why that is right.
EXCEPTIONS = {
    # The one function that looks across tenants: it lists those with due work, ids only, to logins bound to them.
    ("40_sweep_listing.sql", "tenants_due"),
    # And the one of the outbox room: tenant ids only.
    ("60_outbox_listing.sql", "outbox_tenants"),
    # And the three of the durable room, the same.
    ("80_durable_listing.sql", "durable_all_tenants"),
    ("80_durable_listing.sql", "durable_tenants"),
    ("80_durable_listing.sql", "durable_tenants_due"),
    # Who may act for which tenant: the question itself, asked before a tenant is bound. No login has a right on the
    # table, which is the only one besides the tenant tables with a column of that name.
    ("0001_tenancy.sql", "bound_tenant"),
    ("10_tenancy.sql", "bind_tenant"),
    ("10_tenancy.sql", "login_is"),
    ("10_tenancy.sql", "grant_binding"),
    ("10_tenancy.sql", "revoke_binding"),
    ("10_tenancy.sql", "my_bindings"),
    # Whose turn it is, for all tenants of a login at once: whether the login may serve the relay that the turn names.
    ("34_dispatch_end.sql", "sweep_turn"),
}
# Statements that are put together at run time: binding a tenant on Citus, and taking rights back from every function.
DYNAMIC = {("10_tenancy.sql", "set_tenant"), ("90_grants.sql", "do"), ("93_durable_grants.sql", "do")}


@pytest.fixture(scope="module")
def statements() -> list[Statement]:
    return predicates.read(MIGRATIONS)


@pytest.fixture(scope="module")
def tables(statements: list[Statement]) -> set[str]:
    return predicates.tenant_tables(statements)


def test_everything_is_read(statements: list[Statement], tables: set[str]) -> None:
    names = {"request", "queue", "result", "key"}
    assert tables >= {f"durable_{name}" for name in ("job", "chunk", "row_error", "event")}
    assert tables >= {"role_binding", "outbox", "s2r_relay_dispatch", *(f"s2r_relay_dispatch_{name}" for name in names)}
    assert len({statement.function for statement in statements}) > 30
    assert len([s for s in statements if "s2r_relay_dispatch" in repr(s.node)]) > 50


def test_every_statement_on_a_tenant_table_compares_its_tenant_with_the_bound_one(
    statements: list[Statement], tables: set[str]
) -> None:
    found = [
        problem
        for statement in statements
        if (statement.file, statement.function) not in EXCEPTIONS
        for problem in predicates.unbound(statement, tables)
    ]
    assert found == []


def test_every_exception_is_still_needed(statements: list[Statement], tables: set[str]) -> None:
    needed = {(statement.file, statement.function) for statement in statements if predicates.unbound(statement, tables)}
    assert needed == EXCEPTIONS


def test_no_update_computes_with_a_volatile_function_or_with_a_column_and_an_interval(
    statements: list[Statement],
) -> None:
    assert [problem for statement in statements for problem in predicates.volatile_writes(statement)] == []


def test_there_is_no_trigger_sequence_rule_identity_or_narrow_column(
    statements: list[Statement], tables: set[str]
) -> None:
    assert [problem for statement in statements for problem in predicates.forbidden_objects(statement, tables)] == []


def test_every_multi_row_insert_in_a_function_has_returning(statements: list[Statement]) -> None:
    assert [problem for statement in statements for problem in predicates.silent_inserts(statement)] == []


def test_no_statement_hides_in_a_string(statements: list[Statement]) -> None:
    hidden = {(statement.file, statement.function) for statement in statements if predicates.dynamic(statement)}
    assert hidden == DYNAMIC


# --- the rules themselves -----------------------------------------------------------------------

_Q = "relay.s2r_relay_dispatch_queue"
_BAD = {
    "no where": f"select * from {_Q} q",
    "another column": f"select * from {_Q} q where q.job_id = v_tenant",
    "one side of an or": f"select * from {_Q} q where q.tenant_id = v_tenant or true",
    "not equal": f"select * from {_Q} q where q.tenant_id >= v_tenant",
    "itself": f"select * from {_Q} q where q.tenant_id = q.tenant_id",
    "a constant": f"select * from {_Q} q where q.tenant_id = 'acme'",
    "a foreign setting": f"select * from {_Q} q where q.tenant_id = current_setting('app.tenant_id')",
    "only one of two": f"select * from {_Q} q join {_Q} r on r.job_id = q.job_id where q.tenant_id = v_tenant",
    "bound by nobody": f"select * from {_Q} q join {_Q} r on r.tenant_id = q.tenant_id",
    "in a sub-select": f"select (select 1 from {_Q} q)",
    "in a lateral": f"select 1 from unnest(v_ids) i cross join lateral (select 1 from {_Q} q where q.job_id = i) l",
    "in a cte": f"with c as (delete from {_Q} q returning 1) select * from c",
    "in a union": f"select 1 union all select 1 from {_Q} q",
    "update": f"update {_Q} q set fence = 1 where q.ctid = any (v_rows)",
    "delete": f"delete from {_Q} q using unnest(v_rows) r (id) where q.ctid = r.id",
    "insert without it": f"insert into {_Q} (job_id) select 1",
    "insert of another": f"insert into {_Q} (job_id, tenant_id) select 1, u.tenant from unnest(v_x) u (tenant)",
    "insert of a constant": f"insert into {_Q} (tenant_id) values ('acme')",
}
_GOOD = [
    f"select * from {_Q} q where q.tenant_id = v_tenant and q.fence = 1",
    f"select * from {_Q} q where q.tenant_id = (select relay.bound_tenant())",
    f"select * from {_Q} q join {_Q} r on r.tenant_id = q.tenant_id where p_tenant = q.tenant_id",
    f"insert into {_Q} (job_id, tenant_id) select 1, v_tenant",
]


@pytest.mark.parametrize("sql", _BAD.values(), ids=_BAD.keys())
def test_the_rule_catches_a_statement_without_the_tenant(sql: str, tables: set[str]) -> None:
    for text in (sql, _in_a_function(sql)):
        found = [
            problem for statement in statements_of("x.sql", text) for problem in predicates.unbound(statement, tables)
        ]
        assert found, text


@pytest.mark.parametrize("sql", _GOOD)
def test_the_rule_lets_a_statement_with_the_tenant_pass(sql: str, tables: set[str]) -> None:
    for text in (sql, _in_a_function(sql)):
        assert not _unbound(text, tables), text


def _unbound(text: str, tables: set[str]) -> list[str]:
    return [problem for statement in statements_of("x.sql", text) for problem in predicates.unbound(statement, tables)]


def _in_a_function(sql: str) -> str:
    return f"create function f() returns setof record language plpgsql as $f$ begin return query {sql}; end $f$"


@pytest.mark.parametrize(
    "sql",
    [
        f"update {_Q} q set claimed_at = clock_timestamp() where q.tenant_id = v_tenant",
        f"update {_Q} q set fence = 1 where q.tenant_id = v_tenant and random() < 1",
        f"update {_Q} q set claim_id = coalesce(null, gen_random_uuid())",
        f"update {_Q} q set lease_expires_at = q.lease_expires_at + p_lease",
        f"with c as (update {_Q} q set claimed_at = clock_timestamp() returning 1) select 1",
    ],
)
def test_the_rule_catches_a_volatile_update(sql: str) -> None:
    assert [
        p for statement in statements_of("x.sql", _in_a_function(sql)) for p in predicates.volatile_writes(statement)
    ]


@pytest.mark.parametrize(
    "sql",
    [
        "create table relay.t (tenant_id text, n serial)",
        "create table relay.t (tenant_id text, n bigint generated always as identity)",
        "create table relay.s2r_relay_dispatch_queue (tenant_id text, n int)",
        "create sequence relay.s",
        "create trigger t after insert on relay.t execute function f()",
        "alter table relay.t add column n bigint generated by default as identity",
    ],
)
def test_the_rule_catches_a_forbidden_object(sql: str, tables: set[str]) -> None:
    assert [p for statement in statements_of("x.sql", sql) for p in predicates.forbidden_objects(statement, tables)]


def test_the_rule_catches_hidden_and_silent_statements() -> None:
    hidden = "create function f() returns void language plpgsql as $f$ begin execute 'delete from t'; end $f$"
    assert any(predicates.dynamic(statement) for statement in statements_of("x.sql", hidden))
    silent = _in_a_function(f"with c as (insert into {_Q} (tenant_id) select v_tenant) select 1")
    assert [p for statement in statements_of("x.sql", silent) for p in predicates.silent_inserts(statement)]
