"""What a login plants in a schema that everybody searches is run by nobody: no SDK, and no command of a DBA.

Since PostgreSQL 15 a plain login may create nothing in `public`; in a database that is older than its server it may. A
function there is taken before one of pg_catalog where its arguments fit better. So the trap is a better fitting twin of
every function and operator that there is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dispatch_core.cli.checks import examine
from dispatch_core.migrate import grant, revoke, status, verify
from dispatch_core.outbox import Outbox
from relay_sdk import ChunkContext, DispatchJob, Reply
from tests.support.chunks import chunk_relay
from tests.support.cli import run_cli
from tests.support.databases import TestDatabase
from tests.support.gateway import open_client
from tests.support.outbox import Recorder
from tests.support.protocol import Connection, logins
from tests.support.relays import RELAY, TENANT, running

pytestmark = pytest.mark.invariant("I4")

_TRAP = "S2TRP"
# Of text (a driver sends most values so) to what a column of a catalog or an untyped literal may be, and of numbers.
_TRAPS = f"""
do $do$
declare
  f record;
  n bigint := 0;
begin
  for f in
    select distinct p.proname as name,
           string_agg(case when t.typname in ('text', 'name') then v.name when t.typname = 'int8' then v.number
                           else format_type(t.oid, null) end, ', ' order by a.i) as arguments
    from pg_catalog.pg_proc p
    cross join (values ('varchar', 'int4'), ('varchar', 'int2'), ('name', 'int8'), ('text', 'int4'), ('bpchar', 'int8'))
      as v (name, number)
    cross join unnest(p.proargtypes::oid[]) with ordinality as a (oid, i)
    join pg_catalog.pg_type t on t.oid = a.oid
    where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f' and p.pronargs between 1 and 4
      and not p.proretset and p.provariadic = 0
    group by p.oid, p.proname, v.name, v.number, p.pronargs
    having bool_and(t.typtype = 'b' and t.typname !~ '^_') and bool_or(t.typname in ('text', 'name', 'int8'))
  loop
    begin
      execute format($f$create function public.%I(%s) returns text language plpgsql as
                        $b$ begin raise exception 'trap %I' using errcode = '{_TRAP}'; end $b$ $f$,
                     f.name, f.arguments, f.name);
      n := n + 1;
    exception when others then null;
    end;
  end loop;
  for f in
    select distinct o.oprname as name, l.name as l, r.name as r
    from pg_catalog.pg_operator o
    cross join (values ('varchar'), ('name'), ('text')) as l (name)
    cross join (values ('varchar'), ('name'), ('text')) as r (name)
    where o.oprleft = 'text'::regtype and o.oprright = 'text'::regtype and l.name || r.name <> 'texttext'
  loop
    begin
      execute format($f$create function public.trap_operator(%s, %s) returns boolean language plpgsql as
                        $b$ begin raise exception 'trap' using errcode = '{_TRAP}'; end $b$ $f$, f.l, f.r);
    exception when duplicate_function then null;
    end;
    execute format('create operator public.%s (leftarg = %s, rightarg = %s, function = public.trap_operator)',
                   f.name, f.l, f.r);
    n := n + 1;
  end loop;
  if n < 1500 then
    raise exception '% traps are too few', n;
  end if;
end $do$
"""
_LOOKALIKES = """
    create table public.role_binding (role_oid oid, kind text, tenant_id text, relay_id text);
    create table public.installation (secret bytea);
    create table public.pg_roles (rolname name);
    create type public.regrole as (name text);
    create domain public.uuid as pg_catalog.text;
    create domain public.jsonb as pg_catalog.text
"""


async def test_no_sdk_and_no_command_runs_what_was_planted_in_public(
    database: TestDatabase, admin: Connection, tmp_path: Path
) -> None:
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        await admin.execute(f'grant create on schema public to "{made.names[-1]}"')
        await attacker.execute(_TRAPS)
        await attacker.execute(_LOOKALIKES)
        assert await admin.fetchval("show search_path") == '"$user", public', "as it is everywhere"
        with pytest.raises(Exception, match="trap"):
            await admin.fetchval("select upper('x'::varchar)")

        relay = chunk_relay(database)

        @relay.handler("Do")
        async def do(job: DispatchJob) -> Reply:
            return Reply(body=job.body)

        @relay.chunk_handler("import")
        async def chunk(context: ChunkContext) -> None:
            await context.save_checkpoint({"at": 1})
            async with context.transaction():
                pass

        recorder = Recorder()
        async with running(relay), open_client(database.gateway_dsn, sweep_interval_seconds=0.2) as client:
            tenant = client.tenant(TENANT)
            assert (await tenant.call(RELAY, "Do", body=b"x", timeout=20)).response_body == b"x"
            keyed = await tenant.enqueue(RELAY, "Do", idempotency_key="k")
            assert await tenant.enqueue(RELAY, "Do", idempotency_key="k") == keyed
            assert (await tenant.wait(keyed, timeout=20)).status == "succeeded"
            assert await tenant.mark_expired(keyed) == 0
            job_id = await tenant.durable.submit("import", [1, 2])
            assert (await tenant.durable.wait(job_id, timeout=20)).status == "completed"
            assert len([event async for event in tenant.durable.events(job_id)]) > 3
            async with Outbox(database.gateway_dsn, default_sink=recorder, tenants=[TENANT]) as drainer:
                async with admin.transaction():
                    await admin.execute("select relay.grant_binding(session_user, 'gateway', $1, null)", TENANT)
                    await Outbox.enqueue(admin, "kind", 7, tenant=TENANT)
                await drainer.drain()
            assert recorder.payloads == [7]
            assert client.health().problem is None
            assert relay.health().last_error is None
        for dsn in (database.admin_dsn, database.operator_dsn):
            findings = await examine(dsn)
            assert [finding for finding in findings if _TRAP in finding.found or "trap" in finding.found] == []
        assert (await status(database.admin_dsn)).usable
        assert await verify(database.admin_dsn) == []
        await grant(database.admin_dsn, made.names[-1], role="worker", tenant="c", relay="one")
        assert await revoke(database.admin_dsn, made.names[-1], role="worker", tenant="c", relay="one") == 1
        for command in (["jobs", "list", TENANT], ["durable", "list", "--tenant", TENANT]):
            ended = await run_cli(*command, "--dsn", database.operator_dsn)
            assert (ended.code, "trap" in ended.out + ended.err) == (0, False), ended
        await admin.execute(f'drop owned by "{made.names[-1]}" cascade')
