"""A login that is bound to one tenant and relay tries to reach further, by every way that SQL offers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import (
    RelayDispatchError,
)
from dispatch_core.models import Completion, PutBack
from tests.support.databases import TestDatabase
from tests.support.protocol import (
    ME,
    Connection,
    claimed_job,
    heartbeat,
    logins,
    said,
    settle,
    snapshot,
    status_of,
)
from tests.support.verbs import COMMON_VERBS, GATEWAY_VERBS, MAY_CALL, WITHOUT_RELAY, WORKER_VERBS, sqlstate, verbs

pytestmark = pytest.mark.invariant("I4")


def test_the_list_of_verbs_here_is_complete() -> None:
    assert set(verbs("t", "r", uuid4())) == {*GATEWAY_VERBS, *WORKER_VERBS, *COMMON_VERBS}


async def test_every_function_with_a_tenant_that_a_login_may_call_is_among_these(admin: Connection) -> None:
    callable_with_tenant = {
        r[0]
        for r in await admin.fetch(
            """select distinct p.proname from pg_proc p,
                      unnest(array['relay_gateway', 'relay_worker', 'relay_operator']) as g (role)
               where p.pronamespace = 'relay'::regnamespace and has_function_privilege(g.role, p.oid, 'execute')
                 and ('p_tenant' = any (p.proargnames) or 'p_tenants' = any (p.proargnames))"""
        )
    }
    assert callable_with_tenant == {*GATEWAY_VERBS, *WORKER_VERBS, *COMMON_VERBS}


async def _attack_guc(connection: Connection) -> None:
    await connection.execute("set app.tenant_id = 'b'")


async def _attack_set_role(connection: Connection) -> None:
    await connection.execute("set role relay_worker")


async def _attack_row_security(connection: Connection) -> None:
    await connection.execute("set row_security = off")


async def _attack_citus_path(connection: Connection) -> None:
    await connection.execute("set citus.propagate_set_commands = 'local'")


async def _attack_temp_objects(connection: Connection) -> None:
    """Objects of one's own in front of everything that a function without a pinned path would name."""
    await connection.execute(
        """
        create temp table role_binding (role_oid oid, kind text, tenant_id text, relay_id text);
        insert into role_binding select oid, 'worker', null, null from pg_roles;
        create temp table s2r_relay_dispatch_queue (tenant_id text, job_id uuid);
        create function pg_temp.current_setting(text, boolean) returns text language sql as $$ select 'b' $$;
        create function pg_temp.to_regrole(text) returns regrole language sql as
          $$ select 'relay_worker_login'::regrole $$;
        create function pg_temp.quote_ident(name) returns text language sql as $$ select 'relay_worker_login' $$;
        create function pg_temp.clock_timestamp() returns timestamptz language sql as
          $$ select 'epoch'::timestamptz $$;
        create function pg_temp.eq(text, text) returns boolean language sql as $$ select true $$;
        create operator pg_temp.= (leftarg = text, rightarg = text, function = pg_temp.eq);
        set search_path = pg_temp, relay, pg_catalog;
        """
    )


async def _attack_planner(connection: Connection) -> None:
    for setting in ("enable_indexscan", "enable_nestloop", "enable_tidscan", "enable_material"):
        await connection.execute(f"set {setting} = off")
    await connection.execute(
        "set plan_cache_mode = force_custom_plan; set timezone = 'Asia/Kolkata'; set datestyle = 'SQL'"
    )


@pytest.mark.parametrize(
    "attack",
    [
        _attack_guc,
        _attack_set_role,
        _attack_row_security,
        _attack_citus_path,
        _attack_temp_objects,
        _attack_planner,
    ],
    ids=lambda f: f.__name__[8:],
)
async def test_no_setting_role_or_planted_object_opens_another_tenant_or_relay(
    database: TestDatabase,
    admin: Connection,
    gateway: Connection,
    worker: Connection,
    attack: Callable[[Connection], Awaitable[None]],
) -> None:
    own = await claimed_job(gateway, worker, tenant="a", relay="one")
    foreign = await claimed_job(gateway, worker, tenant="b", relay="one")
    other_relay = await claimed_job(gateway, worker, tenant="a", relay="two")
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        await attack(attacker)
        before = await snapshot(admin)
        expected = {"S2003"} if attack is not _attack_guc else {"S2003", "S2002"}
        for tenant, relay, job in (("b", "one", foreign), ("a", "two", other_relay), (None, "one", foreign)):
            calls_of = verbs(tenant, relay, job.job_id)
            for name in MAY_CALL["worker"]:
                if attack is _attack_set_role and name == "reclaim":
                    continue  # under another role the age of the session is unknown: it does nothing at all
                if (tenant, relay) == ("a", "two") and name in WITHOUT_RELAY:
                    continue
                state = await sqlstate(attacker, calls_of[name], roll_back=False)
                wanted = expected if tenant or attack is _attack_guc else {"S2001"}
                assert state in wanted, (name, tenant, relay, state)
        assert await snapshot(admin) == before
        if attack is _attack_guc:
            await attacker.execute("reset app.tenant_id")
        if attack is _attack_row_security:
            return  # PostgreSQL answers its own calls with an error: whoever asks for that harms nobody else
        assert await heartbeat(attacker, [own]) == ["applied"]
        assert said(await settle(attacker, own)) == ("applied", "succeeded")


async def test_with_row_security_switched_off_a_verb_fails_instead_of_reading_past_it(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker, tenant="a", relay="one")
    async with logins(database) as made:
        connection = await made.open("worker", "a", "one")
        await connection.execute("set row_security = off")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.fetch("select * from relay.claim_again('one', '{a}', $1, $2)", ME, uuid4())
    assert await status_of(gateway, job.job_id, tenant="a") == "claimed"


async def test_a_login_has_no_right_but_its_functions(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await claimed_job(gateway, worker, tenant="a", relay="one")
    nobody = "'00000000-0000-0000-0000-000000000001'::uuid"
    internal = [
        "relay.bind_tenant('b')",
        "relay.set_tenant('b')",
        "relay.unbind_tenant('b')",
        "relay.login_is('{worker}', 'b')",
        "relay.channel_name('wake', 'b', 'one')",
        "relay.grant_binding(session_user, 'worker', null, null)",
        "relay.revoke_binding(session_user, 'worker', 'a', 'one')",
        "relay.end_jobs('b', now(), true, '', '{}', '{}')",
        "relay.return_jobs('b', now(), '{}', '{}', '{}', '{}', '{}', '{}')",
        "relay.renew_jobs('b', '{}', now())",
        "relay.ready_jobs('b', '{}')",
        "relay.drop_jobs('b', '{}', '{}', '{}')",
        "relay.request_digest('', '', '{}', '', 1)",
        "relay.claim_turn('b', 'one')",
        "relay.notify('s2r', '')",
        "relay.confirm_commit()",
        "relay.outbox_drop('b', '{}')",
        "relay.outbox_back('b', now(), '{}', '{}', '{}', '{}', '{}', 1, false)",
        "relay.outbox_hold('b', '{}')",
        "relay.outbox_open('b', '{}')",
        "relay.outbox_promote('b', '{}')",
        "relay.outbox_ring('b')",
        "relay.outbox_new_id(now())",
        "relay.outbox_choose('b', now(), '{}', now(), 1, true)",
        "relay.outbox_restart('b', now(), '{}')",
        "relay.outbox_last('b', 'k')",
        "relay.outbox_matching('b', null, null, null, null, null, 1)",
        "relay.durable_move('b', now(), '{}', 'done', 'keep', null, null)",
        "relay.durable_renew('b', '{}', null, now())",
        "relay.durable_done('b', now(), '{}', '{}', '{}', '{}', '{}', '{}', null, null, '{}', '{}')",
        f"relay.durable_tell('b', {nobody}, 't', '{{}}', null, null, null, null)",
        f"relay.durable_count('b', {nobody}) as r (tenant_id text)",
        f"relay.durable_turn_to('b', {nobody}, 'failed') as r (tenant_id text)",
        f"relay.durable_has_open('b', {nobody})",
        f"relay.durable_conclude('b', {nobody}, null, null) as r (tenant_id text)",
        "relay.durable_ring('b', '{}', true)",
        "relay.durable_snapshot()",
        "relay.durable_promote('b', 1)",
        f"relay.durable_recount('b', {nobody})",
        f"relay.durable_start('b', {nobody}, 'me')",
        f"relay.durable_hold('b', {nobody}, 1, {nobody}, 1)",
        f"relay.durable_is_last('b', {nobody})",
        f"relay.durable_complete_one('b', {nobody}, 1, {nobody}, 1, 'null', null, null)",
        "relay.durable_complete_all('b', '{}', '{}', '{}', '{}', '{}', null, null)",
        "relay.durable_may('queued', 'running')",
        f"relay.durable_sweep_chunks('b', {nobody}, '{{}}', 'failed', 'keep', null, null)",
        "relay.durable_check_extra('{}')",
        f"relay.durable_write_extra('b', {nobody}, '{{}}')",
        "relay.durable_matches('1', 'number', '=', '1')",
        "relay.durable_meets('{}', '[]', '{}')",
        "relay.durable_drop('b', '{}', '{}', '{}', '{}')",
    ]
    tables = [
        r[0]
        for r in await admin.fetch(
            """select oid::regclass::text from pg_class
               where relnamespace = 'relay'::regnamespace and relkind in ('r', 'v') and relname <> 'schema_history'"""
        )
    ]
    async with logins(database) as made:
        for group, tenant, relay in (("worker", "a", "one"), ("gateway", "a", None)):
            connection = await made.open(group, tenant, relay)
            await connection.execute("set app.tenant_id = 'a'")
            for call in internal:
                assert await sqlstate(connection, (call, [])) == "42501", call
            for table in tables:
                for statement in (f"select * from {table}", f"delete from {table}", f"copy {table} to stdout"):
                    with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.ObjectNotInPrerequisiteStateError)):
                        await connection.execute(statement)
            for role in ("relay_api", "relay_owner", "relay_sweep", "postgres"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(f"set role {role}")
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(f"set session authorization {role}")
            for statement in (
                "create function relay.now() returns int language sql as 'select 1'",
                "create table relay.t ()",
                "alter function relay.now() owner to session_user",
                "drop function relay.now()",
                "create function relay.claim() returns int language sql as 'select 1'",
            ):
                with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedObjectError)):
                    await connection.execute(statement)
    assert len(internal) == 51


async def test_every_internal_function_is_among_those_that_were_tried(admin: Connection) -> None:
    callable_by_logins = set(verbs("t", "r", uuid4())) | {
        "now", "session_age", "my_bindings", "sweep_turn", "sweep_again", "run_sweeps", "tenants_due", "bound_tenant",
        "row_tenant", "outbox_tenants", "durable_tenants", "durable_tenants_due", "durable_sweep_turn",
        "durable_run_sweeps", "durable_turns", "durable_all_tenants",
    }  # fmt: skip
    internal = {
        "bind_tenant", "set_tenant", "unbind_tenant", "login_is", "channel_name", "grant_binding", "revoke_binding",
        "end_jobs", "return_jobs", "renew_jobs", "ready_jobs", "drop_jobs", "request_digest",
        "claim_turn", "notify", "confirm_commit", "check_size", "check_json", "check_parts",
        "pace", "retry_after", "pending_upto",
        "outbox_drop", "outbox_back", "outbox_hold", "outbox_open", "outbox_promote", "outbox_ring", "outbox_new_id",
        "outbox_choose", "outbox_restart", "outbox_last", "outbox_matching",
        "durable_move", "durable_renew", "durable_done", "durable_tell", "durable_count", "durable_turn_to",
        "durable_has_open", "durable_conclude", "durable_ring", "durable_snapshot", "durable_promote", "durable_start",
        "durable_hold", "durable_may", "durable_sweep_chunks",
        "durable_check_extra", "durable_check_event", "durable_write_extra", "durable_matches", "durable_meets",
        "durable_drop",
        "durable_recount", "durable_is_last", "durable_complete_one", "durable_complete_all",
    }  # fmt: skip
    rows = await admin.fetch("select distinct proname from pg_proc where pronamespace = 'relay'::regnamespace")
    assert {r[0] for r in rows} == callable_by_logins | internal


@pytest.mark.case("C43")
async def test_a_foreign_job_id_cannot_be_told_from_an_unknown_one(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    foreign = await claimed_job(gateway, worker, tenant="b", relay="one")
    ended = await claimed_job(gateway, worker, tenant="b", relay="one")
    await settle(worker, ended)
    other_relay = await claimed_job(gateway, worker, tenant="a", relay="two")

    async def answer(call: Callable[[UUID], Awaitable[Any]], job_id: UUID) -> str:
        try:
            return repr(await call(job_id)).replace(str(job_id), "ID")
        except RelayDispatchError as error:
            return f"{error.code} {error}".replace(str(job_id), "ID")

    async with logins(database) as made:
        gate = RelayDispatchRepository(await made.open("gateway", "a"), "a")
        work = RelayDispatchRepository(await made.open("worker", "a", "one"), "a")
        calls: dict[str, Callable[[UUID], Awaitable[Any]]] = {
            "poll": lambda job: gate.poll_status(job),
            "poll many": lambda job: gate.poll_many([job]),
            "list": lambda job: gate.list_jobs(before=job, relay_id="one"),
            "expire": lambda job: gate.mark_expired(job),
            "complete": lambda job: work.complete(job, "one", 1, ME),
            "complete many": lambda job: work.complete_many("one", [Completion(job, 1)], claimed_by=ME),
            "heartbeat": lambda job: work.heartbeat("one", [(None, job, 1)], claimed_by=ME),
            "retry": lambda job: work.retry("one", [PutBack(job, 1)], claimed_by=ME),
            "release": lambda job: work.release("one", [(None, job, 1, True)], claimed_by=ME),
            "claim again": lambda job: work.claim_again("one", claimed_by=ME, claim_id=job),
            "complete for b": lambda job: work.complete_many("one", [Completion(job, 1, "b")], claimed_by=ME),
            "poll for b": lambda job: RelayDispatchRepository(gate._conn, "b").poll_status(job),
            "poll for nobody": lambda job: RelayDispatchRepository(gate._conn, "nobody").poll_status(job),
        }
        for name, call in calls.items():
            unknown = await answer(call, uuid4())
            for job in (foreign, ended):
                assert await answer(call, job.job_id) == unknown, name
        for name in ("complete", "complete many", "heartbeat", "retry", "release"):
            assert await answer(calls[name], other_relay.job_id) == await answer(calls[name], uuid4()), name
        # The name that the caller gave is in the text, and nothing of the tenant: it is the same for one that does
        # not exist.
        nobodys = await answer(calls["poll for nobody"], uuid4())
        assert await answer(calls["poll for b"], foreign.job_id) == nobodys.replace("tenant nobody", "tenant b")
    # A foreign job's id is free for a job of one's own: no unique key gives it away.
    enqueue_call, arguments = verbs("a", "one", foreign.job_id)["enqueue"]
    arguments[1] = [foreign.job_id]
    (stored,) = await gateway.fetch(f"select * from {enqueue_call}", *arguments)
    assert stored[0] == [], "none was there already"
