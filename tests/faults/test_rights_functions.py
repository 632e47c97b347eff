"""Every function of schema relay, for a tenant or relay that the login is not bound to: nothing read, changed, learnt.

The functions are those of the catalog: one without an attack makes the first test here fail.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.support import attacks
from tests.support.attacks import ATTACKS, STANCES, Call, Stance, answer
from tests.support.databases import TestDatabase
from tests.support.protocol import QUEUE, TENANT_TABLES, Connection, Logins, logins, snapshot
from tests.support.tenants import World, audit, build
from tests.support.verbs import MAY_CALL, OF_NOTHING, WITHOUT_RELAY, verbs

pytestmark = pytest.mark.invariant("I4")

KINDS = ("worker", "gateway", "operator")
_RELAY = {"worker": "one", "gateway": None, "operator": None}


@pytest.fixture
async def world(admin: Connection, gateway: Connection, worker: Connection) -> World:
    return await build(admin, gateway, worker)


async def _attacker(made: Logins, kind: str, stance: Stance, admin: Connection) -> Connection:
    connection = await made.open(kind, "a", _RELAY[kind])
    if stance is attacks.planted_public:
        await admin.execute(f'grant create on schema public to "{made.names[-1]}"')
    await stance(connection)
    return connection


async def test_the_audit_sees_a_lock_and_the_search_finds_a_mark(admin: Connection, world: World) -> None:
    """What the other tests here rest on."""
    before = await audit(admin)
    assert len(before) == 14
    assert [name for name, rows in before.items() if not rows] == []
    for kind in KINDS:
        for table in TENANT_TABLES:
            rows = [tuple(row.values()) for row in await admin.fetch(f"select * from {table} where tenant_id = 'b'")]
            assert world.leaks(rows, kind), (kind, table)
            assert world.leaks(repr(rows[0][1]), kind), (kind, table)
    await admin.execute(f"select from {QUEUE} where tenant_id = 'b' limit 1 for key share")
    assert await audit(admin) != before


_FUNCTIONS = """
    select p.proname as name, p.oid::regprocedure::text as signature,
           'relay.' || p.proname || '(' || coalesce((
             select string_agg('null::' || format_type(t.oid, null), ', ' order by t.i)
             from unnest(p.proargtypes::oid[]) with ordinality as t (oid, i)), '') || ')' as call,
           has_function_privilege(p.oid, 'execute') as allowed
    from pg_proc p where p.pronamespace = 'relay'::regnamespace order by 2
"""


async def test_every_function_that_a_login_may_call_has_an_attack(database: TestDatabase) -> None:
    known = {*verbs("b", "one", uuid4()), *ATTACKS}
    async with logins(database) as made:
        name = await made.create()
        for kind in KINDS:
            await made.bind(name, kind, "a")
        rows = await (await made.connect(name)).fetch(_FUNCTIONS)
        assert {row["name"] for row in rows if row["allowed"]} == known


async def test_every_setting_that_a_function_reads_or_sets_is_among_the_forged(admin: Connection) -> None:
    rows = await admin.fetch(
        r"""select lower(split_part(c, '=', 1)) from pg_proc p, unnest(p.proconfig) c
            where p.pronamespace = 'relay'::regnamespace
            union
            select lower(m[1]) from pg_proc p,
                   regexp_matches(p.prosrc, '(?:current_setting|set_config)\(\s*''([^'']+)', 'g') m
            where p.pronamespace = 'relay'::regnamespace"""
    )
    forged = inspect.getsource(attacks.forged_settings) + inspect.getsource(attacks.forged_tenant)
    assert len(rows) > 12
    assert [row[0] for row in rows if f"set {row[0]} =" not in forged] == []


@pytest.mark.parametrize("kind", [*KINDS, "stranger"])
async def test_every_other_function_is_refused_before_it_looks_at_anything(
    database: TestDatabase, admin: Connection, world: World, kind: str
) -> None:
    async with logins(database) as made:
        if kind == "stranger":
            connection = await made.connect(await made.create())
        else:
            connection = await made.open(kind, "a", _RELAY[kind])
        before = await audit(admin)
        rows = await (admin if kind == "stranger" else connection).fetch(_FUNCTIONS)
        refused = [row for row in rows if kind == "stranger" or not row["allowed"]]
        assert len(refused) > 50
        for row in refused:
            assert await attacks.try_sql(connection, f"select {row['call']}") == "42501", row["signature"]
        assert await audit(admin) == before


def _targets(kind: str, world: World) -> Iterator[tuple[str, str, UUID]]:
    for tenant, relay in (("b", "one"), ("b", "two"), *([("a", "two")] if kind == "worker" else [])):
        for state in ("claimed", "ready", "ok"):
            yield tenant, relay, world.jobs[tenant, relay][state]
    for job_id in (world.durable["b"]["running"], world.events["b"]["claimed"]):
        yield "b", "one", job_id


@pytest.mark.parametrize("stance", STANCES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_for_another_tenant_or_relay_is_refused_and_says_nothing_of_it(
    database: TestDatabase, admin: Connection, world: World, kind: str, stance: Stance
) -> None:
    async with logins(database) as made:
        connection = await _attacker(made, kind, stance, admin)
        before = await audit(admin)
        for tenant, relay, job_id in _targets(kind, world):
            for name, call in verbs(tenant, relay, job_id).items():
                if name not in MAY_CALL[kind] or (tenant == "a" and name in WITHOUT_RELAY):
                    continue
                state, said = await answer(connection, call, keep=True)
                if stance is attacks.another_role and name == "reclaim" and state is None:
                    assert said == "[]", "under another role the age of the session is unknown, so it does nothing"
                    continue
                expected = "S2002" if stance is attacks.forged_tenant and tenant == "a" else "S2003"
                assert state == expected, (name, tenant, relay, said)
                assert world.leaks(said.replace(str(job_id), ""), kind) == [], name
        assert await audit(admin) == before
        await admin.execute(f'drop owned by "{made.names[-1]}" cascade')


@pytest.mark.parametrize("kind", KINDS)
async def test_without_a_tenant_nothing_is_done_for_any(
    database: TestDatabase, admin: Connection, world: World, kind: str
) -> None:
    """Also where the login is bound to every tenant: null, '' and a forged one are nobody's."""
    async with logins(database) as made:
        one, every = await made.open(kind, "a", _RELAY[kind]), await made.open(kind, None)
        before = await audit(admin)
        job_id = world.jobs["a", "one"]["claimed"]
        for connection in (one, every):
            for tenant in (None, ""):
                for name in MAY_CALL[kind]:
                    state, said = await answer(connection, verbs(tenant, "one", job_id)[name], keep=True)
                    assert state == "S2001", (name, tenant, said)
        await one.execute("set app.tenant_id = 'b'")
        for name in MAY_CALL[kind]:
            state, said = await answer(one, verbs(None, "one", job_id)[name], keep=True)
            assert state == "S2003", (name, said)
        assert await audit(admin) == before


async def test_a_member_of_every_group_without_a_binding_can_do_nothing(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    async with logins(database) as made:
        name = await made.create()
        await admin.execute(f'grant relay_gateway, relay_worker, relay_operator to "{name}"')
        connection = await made.connect(name)
        before = await audit(admin)
        for tenant in ("a", "b", "nobody"):
            for verb, call in verbs(tenant, "one", world.jobs["a", "one"]["claimed"]).items():
                state, said = await answer(connection, call, keep=True)
                assert state == "S2003", (verb, said)
        harmless = {"now", "session_age"}
        for verb, call in ATTACKS.items():
            state, said = await answer(connection, call, keep=True)
            if verb not in harmless:
                assert said in ("[]", "[(None,)]", "[('',)]") or (state or "").startswith("S2"), (verb, said)
        assert await audit(admin) == before


_ARRAYS = (
    "claim", "claim_again", "heartbeat", "complete", "retry", "release", "reclaim", "ring", "outbox_due",
    "outbox_claim", "outbox_unclaim", "outbox_settle", "durable_claim", "durable_claim_again", "durable_heartbeat",
    "durable_complete_many", "durable_release",
)  # fmt: skip


async def test_every_verb_that_takes_several_tenants_is_among_those_that_are_given_a_mixture(admin: Connection) -> None:
    rows = await admin.fetch(
        """select distinct proname from pg_proc
           where pronamespace = 'relay'::regnamespace and 'p_tenants' = any (proargnames)"""
    )
    assert {row[0] for row in rows} == set(_ARRAYS)


@pytest.mark.parametrize("kind", ["worker", "gateway"])
@pytest.mark.parametrize("tenants", [["a", "b"], ["b", "a"], ["a", None], ["a", ""]], ids=str)
async def test_an_array_with_one_tenant_too_many_does_nothing_for_any(
    database: TestDatabase, admin: Connection, world: World, kind: str, tenants: list[str | None]
) -> None:
    async with logins(database) as made:
        connection = await made.open(kind, "a", _RELAY[kind])
        before, stored = await audit(admin, but=("a", None, made.names[-1])), await snapshot(admin)
        for name in _ARRAYS:
            if name not in MAY_CALL[kind]:
                continue
            text, arguments = _twofold(verbs("a", "one", world.jobs["a", "one"]["claimed"])[name], tenants)
            state, said = await answer(connection, (text, arguments), keep=True)
            assert state == ("S2003" if "b" in tenants else "S2001"), (name, said)
            assert world.leaks(said, kind) == [], name
        # Its own rows were locked or written before the refusal, and are as they were.
        assert await audit(admin, but=("a", None, made.names[-1])) == before
        assert await snapshot(admin) == stored


_SINGLE = ("'{1}'", "'{succeeded}'", "'{null}'", "'{f}'", "'{e}'", "'{m}'", "'{wake}'", "'{delivered}'", "'{kind}'")


def _twofold(call: Call, tenants: list[str | None]) -> Call:
    """The call with these tenants, and each other array of one, given or written out, twice as long."""
    text, arguments = call
    for one in _SINGLE:
        item = one[2:-2]
        text = text.replace(one, f"'{{{item},{item}}}'")
    doubled: list[Any] = [tenants if a == ["a"] else a * 2 if isinstance(a, list) else a for a in arguments]
    return text, doubled


@pytest.mark.parametrize("kind", KINDS)
async def test_what_names_no_tenant_does_and_tells_nothing_of_others(
    database: TestDatabase, admin: Connection, world: World, kind: str
) -> None:
    """Sweeps with everything overdue, listings, clocks; with the tenant bound, not bound, and forged."""
    async with logins(database) as made:
        connection = await made.open(kind, "a", _RELAY[kind])
        rows = await connection.fetch(_FUNCTIONS)
        allowed = {row["name"] for row in rows if row["allowed"]} & set(ATTACKS)
        own = ("a", _RELAY[kind], made.names[-1])
        before = await audit(admin, but=own)
        for tenant in ("", "a", "b"):
            await connection.execute(f"set app.tenant_id = '{tenant}'")
            for name in sorted(allowed):
                state, said = await answer(connection, ATTACKS[name], keep=True)
                assert state is None or state.startswith("S2"), (name, said)
                if name in ("bound_tenant", "row_tenant"):
                    assert (state, "a" in said) == {"": ("S2001", True), "a": (None, True), "b": ("S2003", True)}[
                        tenant
                    ]
                else:
                    assert "'b'" not in said, (name, said)
                assert world.leaks(said, kind) == [], (name, said)
        for sweep in ("run_sweeps", "durable_run_sweeps"):
            text, _ = ATTACKS[sweep]
            await connection.execute("reset app.tenant_id")
            state, said = await answer(connection, (text.replace("(null,", "('one',"), []), keep=True)
            assert state is None, said
            assert world.leaks(said, kind) == [], (sweep, said)
        assert await audit(admin, but=own) == before


@pytest.mark.parametrize("kind", KINDS)
async def test_another_ones_id_is_answered_as_one_that_nobody_has(
    database: TestDatabase, admin: Connection, world: World, kind: str
) -> None:
    """By every verb, under the login's own tenant: the same rows, SQLSTATE and text, and nothing of others changed."""
    known = world.ids(tenant="b") | (world.ids(tenant="a", relay="two") if kind == "worker" else set())
    async with logins(database) as made:
        connection = await made.open(kind, "a", _RELAY[kind])
        before = await audit(admin, but=("a", _RELAY[kind], made.names[-1]))
        for name in MAY_CALL[kind]:
            if not _names_an_id(name):
                continue
            answers = {}
            for job_id in (uuid4(), *sorted(known)):
                call = verbs("a", "one", job_id)[name]
                state, said = await answer(connection, call)
                assert state in (None, OF_NOTHING.get(name)), (name, said)
                answers[job_id] = (state, said.replace(str(job_id), "ID"))
            assert len(set(answers.values())) == 1, (name, answers)
        assert await audit(admin, but=("a", _RELAY[kind], made.names[-1])) == before


def _names_an_id(name: str) -> bool:
    job_id = UUID(int=1)
    arguments = verbs("a", "one", job_id)[name][1]
    return any(argument == job_id or argument == [job_id] for argument in arguments)


async def test_a_foreign_id_is_free_for_a_job_event_and_durable_job_of_ones_own(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    """No unique key is met by two tenants: not by their ids, and not by their idempotency keys."""
    async with logins(database) as made:
        gateway = await made.open("gateway", "a")
        before = await audit(admin, but=("a", None, made.names[-1]))
        job, event = world.jobs["b", "one"]["claimed"], world.events["b"]["claimed"]
        durable = world.durable["b"]["running"]
        text = "relay.enqueue('a', $1, '{one}', '{Get}', null, null, null, '{1 min}', null, null)"
        assert await answer(gateway, (text, [[job]]), keep=True) == (None, "[([],)]"), "none was there already"
        text = "relay.enqueue_keyed('a', $1, 'one', 'Get', '{}', '', 1, '1 min', null, null, 'key-mark-b-one')"
        new = uuid4()
        state, said = await answer(gateway, (text, [new]), keep=True)
        assert (state, said) == (None, f"[(UUID('{new}'), False)]")
        text = "relay.outbox_enqueue('kind', '1', p_tenant => 'a', p_event_id => $1)"
        assert (await answer(gateway, (text, [event]), keep=True))[0] is None
        text = "relay.durable_insert_job('a', $1, 'kind', '{}', true, 3, 0, 'me')"
        assert await answer(gateway, (text, [durable]), keep=True) == (None, "[(True,)]")
        assert await audit(admin, but=("a", None, made.names[-1])) == before


async def test_a_cached_plan_keeps_to_the_login_across_roles_and_bindings(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    """PREPARE, DO, cursors and a function of one's own are no other way in."""
    async with logins(database) as made:
        connection = await made.open("gateway", "a")
        name = made.names[-1]
        before = await audit(admin)
        await connection.execute("prepare mine (text) as select * from relay.list_jobs($1)")
        for _ in range(7):  # after five executions a plan may become generic
            assert len(await connection.fetch("execute mine('a')")) == 18
        await connection.execute("set role relay_gateway")
        assert len(await connection.fetch("execute mine('a')")) == 18, "session_user is who he was"
        assert await attacks.try_sql(connection, "execute mine('b')") == "S2003"
        await connection.execute("reset role")
        assert await attacks.try_sql(connection, "do $$ begin perform relay.list_jobs('b'); end $$") == "S2003"
        sql = "declare c cursor with hold for select * from relay.list_jobs('b')"
        assert await attacks.try_sql(connection, sql) == "S2003"
        await connection.execute("""
            create function pg_temp.theirs(t text) returns bigint language sql security definer
            as $$ select count(*) from relay.list_jobs(t) $$""")
        assert await attacks.try_sql(connection, "select pg_temp.theirs('b')") == "S2003"
        assert await attacks.try_sql(connection, "copy (select * from relay.list_jobs('b')) to stdout") == "S2003"
        # A binding that is taken away is gone for what is prepared already, too.
        await admin.execute("select relay.revoke_binding($1, 'gateway', 'a', null)", name)
        before.pop("relay.role_binding")
        assert await attacks.try_sql(connection, "execute mine('a')") == "S2003"
        after = await audit(admin)
        after.pop("relay.role_binding")
        assert after == before


async def test_no_argument_is_of_a_type_that_a_caller_can_define(admin: Connection) -> None:
    """A row, a domain or an "any" would let code of the caller's run inside, as the owner of the function."""
    rows = await admin.fetch(
        """select distinct p.oid::regprocedure::text, t.oid::regtype::text
           from pg_proc p, unnest(p.proargtypes::oid[]) a (oid)
           join pg_type t on t.oid = a.oid left join pg_type e on e.oid = t.typelem
           where p.pronamespace = 'relay'::regnamespace
             and (t.typtype <> 'b' or t.typnamespace <> 'pg_catalog'::regnamespace
                  or coalesce(e.typtype, 'b') <> 'b')"""
    )
    assert rows == []
