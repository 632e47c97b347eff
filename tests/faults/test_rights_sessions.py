"""What a login may do to its own session while its calls run: it changes when they end, and never what they may do.

Timeouts in the middle of a verb, cursors and prepared statements that outlive a binding, blocks that swallow errors,
COPY, settings that only a superuser may have, and a queue of notifications that somebody has filled.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import UUID, uuid4

import asyncpg
import pytest

from dispatch_core.dev.postgres import DevServer, start_local_server
from dispatch_core.outbox import Outbox
from tests.conftest import FAST
from tests.support import durable
from tests.support.attacks import answer, try_sql
from tests.support.databases import TestDatabase, drop_database, make_template, new_database
from tests.support.protocol import Connection, connected, enqueue, logins
from tests.support.tenants import World, audit, build
from tests.support.verbs import MAY_CALL, verbs

pytestmark = pytest.mark.invariant("I4")

_RELAY = {"worker": "one", "gateway": None, "operator": None}


@pytest.fixture
async def world(admin: Connection, gateway: Connection, worker: Connection) -> World:
    return await build(admin, gateway, worker)


# --- timeouts -------------------------------------------------------------------------------------

# Nothing that a verb writes is half there: a request has a queue row or a result, and one of them; and so on.
_HALVES = """
    select 'request without queue row or result' from relay.s2r_relay_dispatch_request r
    left join relay.s2r_relay_dispatch_queue q using (tenant_id, job_id)
    left join relay.s2r_relay_dispatch_result d using (tenant_id, job_id)
    where (q.state is null) = (d.status is null)
    union all
    select 'key without a request' from relay.s2r_relay_dispatch_key k
    left join relay.s2r_relay_dispatch_request r using (tenant_id, job_id) where r.operation is null
    union all
    select 'chunk without a job' from relay.durable_chunk c
    left join relay.durable_job j using (tenant_id, job_id) where j.kind is null
    union all
    select 'job that has ended with chunks that have not' from relay.durable_job j
    where j.status in ('completed', 'completed_with_errors', 'failed') and exists (
      select from relay.durable_chunk c
      where (c.tenant_id, c.job_id) = (j.tenant_id, j.job_id) and c.status in ('pending', 'retry', 'running'))
    union all
    select 'job that was cancelled and does not say so' from relay.durable_job j
    left join relay.durable_event e on (e.tenant_id, e.job_id, e.type) = (j.tenant_id, j.job_id, 'cancelled')
    where j.status = 'cancelled' and e.type is null
"""


@pytest.mark.parametrize("kind", ["worker", "gateway", "operator"])
async def test_a_verb_that_is_cut_off_at_any_moment_leaves_nothing_half_done_and_nothing_bound(
    database: TestDatabase, admin: Connection, world: World, kind: str
) -> None:
    """By a timeout of its own session, as short as there is, and then longer; committed where it came through."""
    async with logins(database) as made:
        thief = await made.open(kind, "a", _RELAY[kind])
        before = await audit(admin, but=("a", None, made.names[-1]))
        seen = set()
        ids = [world.jobs["a", "one"]["claimed"], world.durable["a"]["running"], world.durable["a"]["queued"], uuid4()]
        for setting in ("statement_timeout = 1", "lock_timeout = 1", "statement_timeout = 2"):
            await thief.execute(f"set {setting}")
            for name in MAY_CALL[kind]:
                for job_id in ids:
                    state, _ = await answer(thief, verbs("a", "one", job_id)[name], keep=True)
                    seen.add(state)
            await thief.execute("reset statement_timeout; reset lock_timeout")
            assert await admin.fetch(_HALVES) == []
            assert await thief.fetchval("select coalesce(current_setting('app.tenant_id', true), '')") == ""
        assert seen <= {None, "57014", "55P03", "S2020", "S2030", "S2041", "S2042", "23505", "S2010"}
        assert await audit(admin, but=("a", None, made.names[-1])) == before


async def test_an_error_that_a_block_swallows_leaves_nothing_bound_for_what_comes_after_it(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    """As with a savepoint: DO, a function of the attacker's own, and a loop over tenants that he guesses."""
    job_id = world.jobs["b", "one"]["ready"]
    async with logins(database) as made:
        for kind, call in (
            ("gateway", f"relay.mark_expired(%s, '{{{job_id}}}')"),
            ("worker", "relay.reclaim_lost(%s, 'one', 9)"),
        ):
            thief = await made.open(kind, "a", _RELAY[kind])
            before = await audit(admin)
            await thief.execute(f"""
                do $$
                declare
                  v_said text := '';
                begin
                  for v_i in 1..3 loop
                    begin
                      perform * from {call % "'b'"};
                      raise exception 'done for another';
                    exception when sqlstate 'S2003' then
                      v_said := v_said || coalesce(current_setting('app.tenant_id', true), '');
                    end;
                    begin
                      perform * from {call % "null"};
                      raise exception 'done for another';
                    exception when sqlstate 'S2001' then
                      v_said := v_said || coalesce(current_setting('app.tenant_id', true), '');
                    end;
                  end loop;
                  if v_said <> '' then raise exception 'bound: %', v_said; end if;
                end $$""")
            await thief.execute(f"""
                create function pg_temp.mine() returns text language plpgsql security definer as $$
                begin
                  perform * from {call % "'b'"};
                  return 'done';
                exception when others then
                  return sqlstate;
                end $$""")
            assert await thief.fetchval("select pg_temp.mine()") == "S2003"
            assert await audit(admin) == before


# --- what outlives a binding ----------------------------------------------------------------------


async def test_a_statement_that_was_prepared_under_a_binding_is_refused_when_that_is_gone(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await enqueue(gateway, 3, tenant="a", relay="one")
    async with logins(database) as made:
        operator = await made.open("operator", "a")
        listing = await operator.prepare("select job_id from relay.list_jobs('a')")
        view = await operator.prepare("select job_id from relay.s2r_relay_dispatch")
        await operator.execute("set app.tenant_id = 'a'; set plan_cache_mode = force_generic_plan")
        for _ in range(7):  # also after the fifth time, when a plan would be kept
            assert len(await listing.fetch()) == len(await view.fetch()) == 3
        await operator.execute("set app.tenant_id = 'b'")
        with pytest.raises(asyncpg.PostgresError, match="no binding"):
            await view.fetch()
        await operator.execute("set app.tenant_id = 'a'")
        await admin.execute("select relay.revoke_binding($1, 'operator', 'a', null)", made.names[-1])
        for statement in (listing, view):
            with pytest.raises(asyncpg.PostgresError) as caught:
                await statement.fetch()
            assert caught.value.sqlstate == "S2003"
        assert await try_sql(operator, "copy (select * from relay.list_jobs('a')) to stdout") == "S2003"


async def test_a_cursor_goes_on_showing_the_tenant_that_it_was_opened_for_and_no_other(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """Its rows are those of the moment it was opened: also after the binding is gone, until its transaction ends."""
    own = set(await enqueue(gateway, 30, tenant="a", relay="one"))
    await enqueue(gateway, 30, tenant="b", relay="one")
    async with logins(database) as made:
        name = await made.create()
        for tenant in ("a", "b"):
            await made.bind(name, "operator", tenant)
        operator = await made.connect(name)
        for select in ("select job_id from relay.s2r_relay_dispatch", "select job_id from relay.list_jobs(null)"):
            await operator.execute("begin; set local app.tenant_id = 'a'")
            await operator.execute(f"declare c no scroll cursor for {select}")
            found = {row[0] for row in await operator.fetch("fetch 3 from c")}
            await operator.execute("set local app.tenant_id = 'b'")
            found |= {row[0] for row in await operator.fetch("fetch 3 from c")}
            await admin.execute("select relay.revoke_binding($1, 'operator', 'a', null)", name)
            found |= {row[0] for row in await operator.fetch("fetch all from c")}
            assert found <= own
            await operator.execute("rollback")
            await made.bind(name, "operator", "a")
        # One that is opened and not yet read asks when it is read.
        await operator.execute("begin; declare c cursor for select job_id from relay.list_jobs('a')")
        await admin.execute("select relay.revoke_binding($1, 'operator', 'a', null)", name)
        with pytest.raises(asyncpg.PostgresError) as caught:
            await operator.fetch("fetch 3 from c")
        assert caught.value.sqlstate == "S2003"
        await operator.execute("rollback")


# --- what a session may be ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["worker", "gateway", "operator", "stranger"])
async def test_a_login_cannot_become_another_or_a_session_that_rules_do_not_hold_for(
    database: TestDatabase, admin: Connection, gateway: Connection, kind: str
) -> None:
    await enqueue(gateway, 1, tenant="b", relay="one")
    async with logins(database) as made:
        thief = (
            await made.connect(await made.create()) if kind == "stranger" else await made.open(kind, "a", _RELAY[kind])
        )
        victim = await made.create()
        await made.bind(victim, "gateway", "b")
        for role in (
            victim,
            "postgres",
            "relay_api",
            "relay_owner",
            "relay_sweep",
            "pg_read_all_data",
            "pg_signal_backend",
        ):
            for sql in (f'set role "{role}"', f'set session authorization "{role}"', f'grant "{role}" to current_user'):
                assert await try_sql(thief, sql) in ("42501", "0LP01"), sql
        wrong = {}
        for sql, states in {
            "set session_replication_role = replica": {"42501"},
            "set log_statement = 'all'": {"42501"},
            "set deadlock_timeout = 1": {"42501"},
            "set zero_damaged_pages = on": {"42501"},
            "set allow_system_table_mods = on": {"42501"},
            "load '/tmp/mine.so'": {"42501"},
            "create function mine() returns int language c as '/tmp/mine.so', 'mine'": {"42501"},
            "create event trigger mine on ddl_command_start execute function mine()": {"42501"},
            "create extension dblink": {"42501", "0A000", "58P01"},
            "copy (select 1) to program 'true'": {"42501"},
            "copy (select 1) to '/tmp/mine'": {"42501"},
            "select pg_read_file('/etc/passwd')": {"42501"},
            "select lo_import('/etc/passwd')": {"42501"},
            "select pg_create_logical_replication_slot('mine', 'pgoutput')": {"42501", "55000"},
            "select pg_stat_reset()": {"42501"},
            "alter database current set app.tenant_id = 'b'": {"42501", "3D000"},
            "alter role all set app.tenant_id = 'b'": {"42501"},
            "alter default privileges for role relay_owner grant all on tables to public": {"42501"},
            "security label for mine on table relay.s2r_relay_dispatch_queue is 'x'": {"22023", "42501"},
            "create publication mine for table relay.s2r_relay_dispatch_queue": {"42501"},
            "create statistics mine on tenant_id, job_id from relay.s2r_relay_dispatch_queue": {"42501"},
            "create rule mine as on insert to relay.s2r_relay_dispatch_queue do nothing": {"42501"},
            "create temp view mine as select * from relay.s2r_relay_dispatch_queue; select * from mine": {"42501"},
            "create temp table mine (like relay.s2r_relay_dispatch_queue including all)": {"42501"},
            "create temp table mine () inherits (relay.s2r_relay_dispatch_queue)": {"42501"},
        }.items():  # fmt: skip
            if (state := await try_sql(thief, sql)) not in states:
                wrong[sql] = state
        assert wrong == {}
        # What it may have is worth nothing to a function that runs as another.
        for setting in (
            "check_function_bodies = off",
            "default_transaction_read_only = on",
            "synchronous_commit = off",
        ):
            await thief.execute(f"set {setting}")
        assert await try_sql(thief, "select * from relay.list_jobs('b')") in ("42501", "S2003")


async def test_a_login_with_rights_of_its_own_to_files_or_roles_still_has_no_tenant_but_its_own(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """Predefined roles that read no data: what they open is theirs to see, and none of it is a tenant's row."""
    (job_id,) = await enqueue(gateway, 1, tenant="b", relay="one", body=b"secret-of-b")
    await durable.submit(gateway, 1, tenant="b")
    async with logins(database) as made:
        name = await made.create(attributes="in role pg_monitor, pg_signal_backend, pg_checkpoint")
        await made.bind(name, "worker", "a", "one")
        thief = await made.connect(name)
        before = await audit(admin)
        for call in MAY_CALL["worker"]:
            state, said = await answer(thief, verbs("b", "one", job_id)[call], keep=True)
            assert state == "S2003", (call, said)
        # pg_monitor reads statistics of others and their statements: values travel beside a statement, and not in it.
        await gateway.fetch("select * from relay.poll($1, $2)", "b", [job_id])
        shown = await thief.fetch("select query from pg_stat_activity where datname = current_database()")
        assert [row[0] for row in shown if str(job_id) in row[0] or "secret" in row[0]] == []
        assert any("relay.poll" in row[0] for row in shown)
        assert await audit(admin) == before


async def test_rows_that_are_copied_in_and_out_are_those_of_calls(database: TestDatabase, gateway: Connection) -> None:
    ids = await enqueue(gateway, 3, tenant="a", relay="one")
    await enqueue(gateway, 3, tenant="b", relay="one")
    async with logins(database) as made:
        operator = await made.open("operator", "a")
        out = io.BytesIO()
        await operator.copy_from_query("select job_id from relay.list_jobs('a')", output=out)
        assert {UUID(line) for line in out.getvalue().decode().split()} == set(ids)
        for table in ("s2r_relay_dispatch_queue", "role_binding", "installation", "durable_chunk", "outbox"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await operator.copy_from_table(table, schema_name="relay", output=io.BytesIO())
            assert await try_sql(operator, f"copy relay.{table} from stdin") == "42501"


# --- the queue of notifications -------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_server(binaries: Path | None) -> Iterator[DevServer]:
    """One whose queue of notifications is the smallest there may be: 512 kB, where others have 8 GB."""
    settings = {**FAST, "max_notify_queue_pages": "64"}
    with start_local_server(settings=settings, binaries=binaries, ephemeral=True, in_memory=True) as server:
        yield server


@pytest.fixture
async def small(
    binaries: Path | None, server: DevServer, request: pytest.FixtureRequest
) -> AsyncIterator[TestDatabase]:
    async with connected(server.admin_dsn) as admin:
        if await admin.fetchval("select current_setting('server_version_num')::int < 170000"):
            pytest.skip("before PostgreSQL 17 the queue of notifications has 8 GB, which is too much to fill")
    other: DevServer = request.getfixturevalue("small_server")
    template = await make_template(other)
    try:
        async with new_database(other, template) as database:
            yield database
    finally:
        await drop_database(other, template)


async def test_a_queue_of_notifications_that_a_stranger_has_filled_keeps_nothing_from_being_stored(
    small: TestDatabase,
) -> None:
    """PostgreSQL then refuses each commit that notifies, so nothing of ours does; it rings again when there is room."""
    async with (
        logins(small) as made,
        connected(small.gateway_dsn) as gateway,
        connected(small.worker_dsn) as worker,
    ):
        stranger, flood = await made.connect(await made.create()), await made.connect(made.names[0])
        await stranger.execute("listen x")
        await stranger.execute("begin; select 1")
        state = None
        while state is None:
            state = await try_sql(
                flood, "select count(pg_notify('x', repeat('y', 7000) || n)) from generate_series(1, 8) n"
            )
        assert state == "54000"
        heard: list[str] = []
        for kind, tenant, relay in (("wake", "a", "one"), ("result", "a", None), ("outbox", "a", None)):
            name = await (worker if kind == "wake" else gateway).fetchval(
                "select relay.channel($1, $2, $3)", kind, tenant, relay
            )
            await gateway.add_listener(name, lambda *said: heard.append(str(said[2])))

        async def everything_that_rings() -> None:
            job_id = uuid4()
            await gateway.execute(
                "select relay.enqueue('a', array[$1::uuid], '{one}', '{Get}', null, null, null, '{1 min}', null, null,"
                " true)",
                job_id,
            )
            await gateway.execute("select relay.outbox_enqueue('kind', '1', p_tenant => 'a')")
            async with gateway.transaction():
                await Outbox.enqueue(gateway, "kind", 1, tenant="a")
            durable_id = await durable.submit(gateway, 2, tenant="a")
            rows = await worker.fetch("select * from relay.claim('one', '{a}', 10, 'me', gen_random_uuid(), '1 min')")
            fences = {row["job_id"]: row["fence"] for row in rows}
            await worker.fetch(
                "select relay.complete('one', 'me', '{a}', '{1}', array[$1::uuid], array[$2::bigint], null, null, null,"
                " null, null, null, true)",
                job_id, fences[job_id],
            )  # fmt: skip
            (lease,) = await durable.claim_next(worker, durable_id, tenant="a")
            await worker.fetch(
                "select relay.durable_release('{a}', $1, $2, $3, $4, p_notify => true)",
                [lease.job_id], [lease.seq], [lease.token], [lease.version],
            )  # fmt: skip
            assert (await durable.control(gateway, durable_id, "cancel", tenant="a"))["outcome"] == "applied"
            assert await gateway.fetchval("select relay.ring('{wake}', '{a}', '{one}', '{null}')") == 1
            await gateway.fetchval("select 1")

        await everything_that_rings()
        assert heard == []
        assert await try_sql(gateway, "select pg_notify('x', repeat('y', 7900))") == "54000", "it is full all the same"
        await stranger.execute("rollback")
        await everything_that_rings()
        assert len(set(heard)) == 3, "the wake, the result and the event are rung again"
