"""What a shared database still reveals, as SECURITY.md says: each is shown to be so, and to be no more than that.

Whoever closes one of these has to say so there: the last test compares the file's list with the tests.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from tests.support.attacks import try_sql
from tests.support.databases import TestDatabase
from tests.support.gateway import open_client
from tests.support.protocol import ME, Connection, connected, enqueue, logins
from tests.support.relays import RELAY, TENANT, new_relay, running
from tests.support.tenants import World, build

pytestmark = pytest.mark.invariant("I4")

SECURITY = Path(__file__).resolve().parents[2] / "SECURITY.md"


@pytest.fixture
async def world(admin: Connection, gateway: Connection, worker: Connection) -> World:
    return await build(admin, gateway, worker)


async def test_pg_stat_activity_shows_who_is_there_and_not_what_he_does(
    database: TestDatabase, gateway: Connection
) -> None:
    """Login, database, process, application name; the transaction id of one that writes. No statement, no time."""
    relay = new_relay(database)
    relay.handler("Do")(_do)
    async with logins(database) as made, running(relay), open_client(database.gateway_dsn):
        attacker = await made.open("worker", "a", "one")
        await gateway.execute("begin")
        await enqueue(gateway, tenant="b")
        rows = await attacker.fetch(
            "select a.* from pg_stat_activity a where a.usename <> current_user and a.datname = current_database()"
        )
        assert len(rows) >= 4
        seen = {"datid", "datname", "pid", "usesysid", "usename", "application_name", "backend_xid", "backend_xmin"}
        for row in rows:
            assert row["query"] == "<insufficient privilege>"
            assert {name for name, value in row.items() if value not in (None, "")} <= seen | {"query", "leader_pid"}
            assert re.fullmatch(r"(relay-dispatch( listener [0-9a-f]{8})?( \w+)*)?", row["application_name"]), (
                "no names"
            )
            for name in (TENANT, RELAY):
                assert name not in row["application_name"]
        assert any(row["backend_xid"] for row in rows)


async def _do(job: object) -> None: ...


async def test_pg_listening_channels_shows_only_ones_own(database: TestDatabase, gateway: Connection) -> None:
    await gateway.execute("listen whatever")
    async with logins(database) as made:
        attacker = await made.open("gateway", "a")
        await attacker.execute("listen mine")
        assert [row[0] for row in await attacker.fetch("select pg_listening_channels()")] == ["mine"]
        assert await try_sql(attacker, "select * from pg_stat_get_activity(null) where query like '%whatever%'") is None


async def test_pg_locks_shows_what_every_process_has_locked_by_numbers(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    """Tables, transactions, and the numbers of turns: not for which tenant, relay or job."""
    await gateway.execute("begin")
    await enqueue(gateway, tenant="b", relay="one")
    await worker.execute("begin")
    await worker.fetch("select * from relay.claim('one', '{b}', 64, $1, $2, '1 s')", ME, uuid4())
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        rows = await attacker.fetch(
            "select locktype, relation::regclass::text as name, objid from pg_locks where pid <> pg_backend_pid()"
        )
        assert "relay.s2r_relay_dispatch_request" in {row["name"] for row in rows}
        assert [row["objid"] for row in rows if row["locktype"] == "advisory"] != []
        # And who waits for whom.
        assert (
            await attacker.fetchval("select pg_blocking_pids($1)", await gateway.fetchval("select pg_backend_pid()"))
            == []
        )


async def test_statistics_and_sizes_count_the_rows_of_all_tenants_together(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    await admin.execute("analyze relay.s2r_relay_dispatch_request")
    count = await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_request")
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        name = "'relay.s2r_relay_dispatch_request'::regclass"
        assert await attacker.fetchval(f"select reltuples from pg_class where oid = {name}") == count
        assert await attacker.fetchval(f"select n_live_tup from pg_stat_user_tables where relid = {name}") >= count
        assert await attacker.fetchval(
            f"select pg_total_relation_size({name}) > 0 and pg_database_size(current_database()) > 0"
        )
        # The values that the statistics keep are for owners.
        assert await attacker.fetchval("select count(*) from pg_stats where schemaname = 'relay'") == 0
        assert await try_sql(attacker, "select * from pg_statistic limit 1") == "42501"


async def test_an_operators_explain_estimates_from_the_rows_of_all_tenants(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """So he learns that a tenant that he can name has many jobs, and about how many. He reads none of them."""
    await enqueue(gateway, 300, tenant="b", relay="one")
    await enqueue(gateway, 3, tenant="a", relay="one")
    await admin.execute("analyze relay.s2r_relay_dispatch_request")
    async with logins(database) as made:
        operator, worker = await made.open("operator", "a"), await made.open("worker", "a", "one")
        await operator.execute("set app.tenant_id = 'a'")
        sql = "explain select from relay.s2r_relay_dispatch where tenant_id = '{}'"
        estimates = {}
        for tenant in ("a", "b", "nobody"):
            (first, *_) = await operator.fetch(sql.format(tenant))
            estimates[tenant] = int(re.findall(r"rows=(\d+)", first[0])[0])
        assert estimates["b"] > 100 > estimates["a"]
        assert await operator.fetch("select from relay.s2r_relay_dispatch where tenant_id = 'b'") == []
        # Nobody else may ask for a plan of it; and the plan of a call says nothing of what is inside.
        assert await try_sql(worker, sql.format("b")) == "42501"
        plan = await operator.fetch("explain (analyze, costs, summary off) select * from relay.durable_jobs('a', '{}')")
        assert not [line for line in plan if "durable_job " in line[0] or "Index" in line[0]]


async def test_roles_and_memberships_can_be_read_by_everybody(database: TestDatabase) -> None:
    """So a login that is named after a tenant tells who is a customer. Who is bound to what is told to nobody else."""
    async with logins(database) as made:
        attacker, other = await made.open("worker", "a", "one"), await made.create()
        await made.bind(other, "gateway", "b")
        assert await attacker.fetchval("select count(*) from pg_roles where rolname = $1", other) == 1
        member = "select pg_has_role($1, 'relay_gateway', 'member')"
        assert await attacker.fetchval(member, other)
        assert await try_sql(attacker, "select * from relay.role_binding") == "42501"
        assert [tuple(row) for row in await attacker.fetch("select * from relay.my_bindings()")] == [
            ("worker", "a", "one")
        ]


async def test_settings_of_roles_and_databases_can_be_read_by_everybody(database: TestDatabase) -> None:
    """So a tenant that is bound by `alter role … set app.tenant_id` is told to all who may connect."""
    async with logins(database) as made:
        attacker, other = await made.open("worker", "a", "one"), await made.create()
        async with connected(database.admin_dsn) as admin:
            await admin.execute(f"""alter role "{other}" set app.tenant_id = 'acme'""")
        show = "select rolconfig from pg_roles where rolname = $1"
        assert await attacker.fetchval(show, other) == ["app.tenant_id=acme"]


_CATALOGS = """
    select c.oid::regclass::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname in ('pg_catalog', 'information_schema') and c.relkind in ('r', 'v')
      and has_table_privilege(c.oid, 'select')
      -- The manual's: time zones, settings and the like.
      and c.relname not in ('pg_timezone_names', 'pg_timezone_abbrevs', 'pg_proc', 'pg_rewrite', 'pg_depend',
                            'pg_backend_memory_contexts')
    order by 1
"""


@pytest.mark.parametrize("kind", ["worker", "gateway", "operator", "stranger"])
async def test_no_catalog_shows_a_value_of_another_tenants_row_call_or_channel(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, kind: str
) -> None:
    """Every relation of PostgreSQL's own that the login may read, while others store, claim, listen and wait."""
    secret = "zebra-of-b"
    (job_id, *_) = await enqueue(gateway, 300, tenant=secret, relay=secret, headers={"a": secret}, body=secret.encode())
    for table in ("request", "queue"):
        await admin.execute(f"analyze relay.s2r_relay_dispatch_{table}")
    name = await gateway.fetchval("select relay.channel('result', $1)", secret)
    await gateway.execute(f"listen {name}; begin")
    await gateway.fetch("select * from relay.poll($1, $2)", secret, [job_id])
    await gateway.fetch("select relay.ring('{result}', $1, null, $2)", [secret], [job_id.hex])
    await worker.execute("begin")
    await worker.fetch("select * from relay.claim($1, $2, 100, $3, $4, '1 min')", secret, [secret], secret, uuid4())
    async with logins(database) as made:
        if kind == "stranger":
            attacker = await made.connect(await made.create())
        else:
            attacker = await made.open(kind, "a", "one" if kind == "worker" else None)
        relations = [row[0] for row in await attacker.fetch(_CATALOGS)]
        assert len(relations) > 100
        found = {}
        for relation in relations:
            try:
                rows = await attacker.fetch(f"select t::text from {relation} t")
            except (
                asyncpg.InsufficientPrivilegeError,
                asyncpg.FeatureNotSupportedError,
                asyncpg.ObjectNotInPrerequisiteStateError,
            ):
                continue
            text = "\n".join(row[0] or "" for row in rows)
            if leaks := [
                mark for mark in (secret, secret.encode().hex(), str(job_id), job_id.hex, name) if mark in text
            ]:
                found[relation] = leaks
        assert found == {}


async def test_the_schema_can_be_read_by_everybody(database: TestDatabase) -> None:
    """Names of tables and columns, the text of functions, what was migrated when: it is all in the distribution."""
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        assert "bind_tenant" in await attacker.fetchval("select prosrc from pg_proc where proname = 'list_jobs'")
        assert await attacker.fetchval("select count(*) from relay.schema_history") > 3
        assert (
            await attacker.fetchval("select count(*) from pg_attribute where attrelid::regclass::text like 'relay.%'")
            > 50
        )


async def test_transaction_ids_the_log_and_the_notification_queue_show_how_busy_the_server_is(
    database: TestDatabase, gateway: Connection
) -> None:
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        show = (
            "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint, pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
        )
        before = await attacker.fetchrow(show)
        await enqueue(gateway, tenant="b")
        after = await attacker.fetchrow(show)
        assert before is not None
        assert after is not None
        assert after[0] > before[0]
        assert after[1] > before[1]
        assert await attacker.fetchval("select pg_notification_queue_usage()") >= 0
        assert (
            await attacker.fetchval("select xact_commit from pg_stat_database where datname = current_database()") >= 0
        )


async def test_when_somebody_last_swept_durable_jobs_is_told_to_every_gateway_and_operator(
    database: TestDatabase, gateway: Connection
) -> None:
    """A name of a sweep and a time; not who, and not for whom."""
    await gateway.execute("select relay.durable_sweep_turn('lease', '1 hour')")
    async with logins(database) as made:
        attacker = await made.open("gateway", "a")
        assert [row[0] for row in await attacker.fetch("select * from relay.durable_turns()")] == ["lease"]


async def test_that_a_tenant_has_something_overdue_is_told_to_workers_of_each_of_its_relays(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    """Not what, and not of which relay; of another tenant, nothing."""
    await admin.execute("delete from relay.s2r_relay_dispatch_queue where tenant_id = 'a' and relay_id = 'one'")
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        assert [row[0] for row in await attacker.fetch("select * from relay.tenants_due('lease', 'one', null)")] == [
            "a"
        ]
        assert await attacker.fetch("select * from relay.reclaim_lost('a', 'one', 10)") == []


async def test_large_objects_and_their_owners_can_be_listed_by_everybody(database: TestDatabase) -> None:
    """And made, as temporary tables can, until the disk is full: PostgreSQL grants no login less."""
    async with logins(database) as made:
        attacker, other = await made.open("worker", "a", "one"), await made.open("gateway", "b")
        number = await other.fetchval("select lo_create(0)")
        owner = "select lomowner::regrole::text from pg_largeobject_metadata where oid = $1"
        assert await attacker.fetchval(owner, number) == made.names[1]
        await attacker.execute("create temp table mine (x text)")
        await other.execute(f"select lo_unlink({number})")


async def test_an_open_transaction_keeps_dead_rows_of_everybody(database: TestDatabase, gateway: Connection) -> None:
    """Whoever may connect may hold one; pg_stat_activity shows its age as backend_xmin, and doctor tells of it."""
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        await attacker.execute("begin isolation level repeatable read; select 1 from relay.my_bindings()")
        pid = await attacker.fetchval("select pg_backend_pid()")
        await enqueue(gateway, tenant="b")
        show = "select backend_xmin from pg_stat_activity where pid = $1"
        assert await gateway.fetchval(show, pid) is not None


async def test_whoever_may_connect_may_notify_and_lock_what_he_likes(database: TestDatabase) -> None:
    """The notification queue and the table of locks are the server's, and can be filled by any login."""
    async with logins(database) as made:
        stranger = await made.connect(await made.create())
        await stranger.execute("listen x; notify x, 'y'")
        assert await stranger.fetchval("select count(pg_advisory_lock(n)) from generate_series(1, 100) n") == 100
        assert await stranger.fetchval("select count(*) from pg_locks where locktype = 'advisory'") >= 100


def test_security_md_names_each_of_these_tests_and_no_other() -> None:
    here = {
        name for name, _ in inspect.getmembers(sys.modules[__name__], inspect.isfunction) if name.startswith("test_")
    }
    text = SECURITY.read_text()
    named = set(re.findall(r"test_rights_revealed\.py::(\w+)", text))
    assert named == here - {"test_security_md_names_each_of_these_tests_and_no_other"}
    for file, test in set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)):
        assert f"def {test}(" in (SECURITY.parent / file).read_text(), (file, test)
