"""What a stolen login is worth: what SECURITY.md says, by raw SQL and through the SDKs; and how it is taken back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import anyio
import pytest

from dispatch_core.cli.checks import examine
from dispatch_core.durable import DurableJobStore
from dispatch_core.errors import RelayDispatchError, TenancyDeniedError
from dispatch_core.models import DispatchRequest
from dispatch_core.outbox import Outbox
from relay_sdk import DispatchJob, Reply
from tests.support.attacks import answer, try_sql
from tests.support.databases import TestDatabase
from tests.support.gateway import PlayedRelay, open_client
from tests.support.protocol import Connection, connected, logins
from tests.support.relays import new_relay, running
from tests.support.tenants import World, audit, build

pytestmark = pytest.mark.invariant("I4")


@pytest.fixture
async def world(admin: Connection, gateway: Connection, worker: Connection) -> World:
    return await build(admin, gateway, worker)


async def test_a_stolen_worker_login_is_worth_the_jobs_of_its_relay(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    ids = world.jobs["a", "one"]
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        before = await audit(admin, but=("a", "one", made.names[-1]))
        # It gets what is to be done, whole, and may say how that ended.
        rows = await thief.fetch("select * from relay.claim('one', '{a}', 100, 'thief', $1, '30 s')", uuid4())
        claimed = {row["job_id"]: row for row in rows if row["outcome"] == "claimed"}
        assert set(claimed) == {ids["ready"], ids["keyed"]}
        assert {bytes(row["body"]) for row in claimed.values()} == {b"mark-a-one"}
        said = await thief.fetch(
            "select * from relay.complete('one', 'thief', '{a}', '{1}', array[$1::uuid], array[$2::bigint], null, null,"
            " null, array['forged'::bytea], null, null)",
            ids["ready"],
            claimed[ids["ready"]]["fence"],
        )
        assert [row["outcome"] for row in said] == ["applied"]
        # It takes back at once what others had lost, and lets end what is late, a sweep earlier than a relay would.
        rows = await thief.fetch("select * from relay.reclaim_lost('a', 'one', 100)")
        assert [row["job_id"] for row in rows] == [ids["lost"]]
        assert await thief.fetch("select * from relay.expire_late('a', 'one', 100)") == [], "its claim did so"
        # It rings its relay, and the gateways of its tenant.
        await thief.execute(
            "select relay.ring('{wake,cancel,result}', '{a,a,a}', '{one,one,null}', $1)", [None, *[uuid4().hex] * 2]
        )
        # What another process has claimed it cannot end: it knows neither who that is, nor fence nor id.
        for fence in (1, 2):
            text = "relay.complete('one', $1, '{a}', '{1}', $2, $3, null, null, null, null, null, null)"
            _, answered = await answer(thief, (text, ["thief", [ids["claimed"]], [fence]]), keep=True)
            assert "'stale'" in answered
        # And it learns of no result, of no key, of no list, of no other relay and of no event.
        for call in (
            "relay.poll('a', '{}')", "relay.list_jobs('a')", "relay.backlog('a')", "relay.mark_expired('a', '{}')",
            "relay.outbox_list('a')", "relay.outbox_status('a')", "relay.purge('a', '0 s', 1)",
            "relay.outbox_tenants()",
        ):  # fmt: skip
            assert await try_sql(thief, f"select * from {call}") == "42501", call
        for relay in ("two", "none"):
            sql = f"select * from relay.claim('{relay}', '{{a}}', 1, 'thief', gen_random_uuid(), '1 s')"
            assert await try_sql(thief, sql) == "S2003"
        for kind in ("result", "outbox", "durable_watch"):
            assert await try_sql(thief, f"select relay.channel('{kind}', 'a')") == "S2003", kind
        assert await audit(admin, but=("a", "one", made.names[-1])) == before


async def test_its_sessions_can_end_one_another_and_nobody_elses(database: TestDatabase) -> None:
    """A login that many processes share is one for PostgreSQL: it shows their statements to each, too."""
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        twin = await made.connect(made.names[-1])
        other = await made.open("worker", "a", "one")
        pid, others = await twin.fetchval("select pg_backend_pid()"), await other.fetchval("select pg_backend_pid()")
        show = "select query from pg_stat_activity where pid = $1"
        assert "pg_backend_pid" in await thief.fetchval(show, pid)
        assert await thief.fetchval(show, others) == "<insufficient privilege>"
        assert await try_sql(thief, f"select pg_terminate_backend({others})") == "42501"
        assert await try_sql(thief, "alter role current_user password 'x'") is None
        assert await try_sql(thief, f"alter role \"{made.names[-1]}\" password 'x'") == "42501"
        assert await thief.fetchval("select pg_terminate_backend($1, 5000)", pid)
        assert await other.fetchval("select 1") == 1


async def test_revoking_a_binding_holds_from_the_next_call_on_and_a_channel_until_the_secret_is_another(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        heard: list[str] = []
        channel = await thief.fetchval("select relay.channel('wake', 'a', 'one')")
        await thief.add_listener(channel, lambda *said: heard.append(str(said[3])))
        await admin.execute("select relay.revoke_binding($1, 'worker', 'a', 'one')", made.names[-1])
        ring = "select relay.ring('{cancel}', '{a}', '{one}', $1)"
        job_id = uuid4().hex
        assert await try_sql(thief, f"select relay.ring('{{cancel}}', '{{a}}', '{{one}}', '{{{job_id}}}')") == "S2003"
        await gateway.execute(ring, [job_id])
        await thief.fetchval("select 1")
        assert heard == [job_id], "LISTEN has no rights: what was told stays told"
        await admin.execute(
            "update relay.installation set secret = uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())"
        )
        assert await gateway.fetchval("select relay.channel('wake', 'a', 'one')") != channel
        await gateway.execute(ring, [job_id])
        await thief.fetchval("select 1")
        assert heard == [job_id]


_RESULTS: list[tuple[str, int | None, str | None, bytes | None, str | None, str | None]] = [
    ("succeeded", 200, '"text"', b"x", None, None),
    ("succeeded", -1, "[1, 2]", b"", None, None),
    ("succeeded", 2**62, '{"a": {"b": 1}}', None, None, None),
    ("succeeded", None, '{"a": [1]}', b"\x00" * 100, None, None),
    ("succeeded", 0, "null", b"x", None, None),
    ("succeeded", 200, '{"": "", "x\\r\\ny": "z\\u0001"}', b"x", "E", "m"),
    ("succeeded", 200, '{"' + "k" * 100_000 + '": "v"}', b"x" * 8 * 1024 * 1024, None, None),
    ("failed", None, None, None, None, None),
    ("failed", None, "{}", b"x", "S2R-EXPIRED", "\x01\x1b[2J"),
    ("failed", 1, None, None, "S2R-TENANCY-DENIED", "m" * 8192),
    ("failed", 1, "7", None, "e" * 200, "'; drop table x; --"),
]


async def test_what_a_hostile_worker_writes_hurts_the_waits_for_its_own_jobs_alone(
    database: TestDatabase, worker: Connection
) -> None:
    async with logins(database) as made, open_client(database.gateway_dsn) as client:
        thief = await made.open("worker", "a", "one")
        a, b = client.tenant("a"), client.tenant("b")
        ids = await a.enqueue_many([DispatchRequest("one", "Get", ttl=60) for _ in _RESULTS])
        ended: dict[int, Any] = {}

        async def wait(place: int) -> None:
            try:
                ended[place] = await a.wait(ids[place], timeout=30)
            except RelayDispatchError as error:
                ended[place] = error

        async with anyio.create_task_group() as group:
            for place in range(len(ids)):
                group.start_soon(wait, place)
            rows = await thief.fetch("select * from relay.claim('one', '{a}', 99, 'thief', $1, '30 s')", uuid4())
            assert {row["job_id"] for row in rows} == set(ids)
            for job_id, (status, number, headers, body, code, message) in zip(ids, _RESULTS, strict=True):
                await thief.fetch(
                    "select * from relay.complete('one', 'thief', '{a}', '{1}', array[$1::uuid], '{1}',"
                    " array[$2::text], array[$3::bigint], array[$4::text], array[$5::bytea], array[$6::text],"
                    " array[$7::text], true)",
                    job_id, status, number, headers, body, code, message,
                )  # fmt: skip
        malformed = {place for place, error in ended.items() if isinstance(error, RelayDispatchError)}
        assert {ended[place].code for place in malformed} == {"S2R-HEADERS-INVALID"}
        assert malformed == {0, 1, 2, 3, 4, 10}
        # The others had their results, such as they are; and another tenant's wait is none the worse.
        assert {ended[place].status for place in set(ended) - malformed} == {"succeeded", "failed"}
        played = PlayedRelay(worker, "b", "one")
        job_id = await b.enqueue("one", "Get", body=b"mine", ttl=60)
        await played.work()
        assert (await b.wait(job_id, timeout=20)).response_body == b"mine"
        assert client.health().problem is None


# --- through the SDKs -----------------------------------------------------------------------------


@pytest.mark.parametrize(("relay_id", "tenants"), [("two", ["a"]), ("one", ["b"]), ("one", ["a", "b"])])
async def test_a_relay_for_more_than_its_login_is_bound_to_does_not_start(
    database: TestDatabase, admin: Connection, world: World, relay_id: str, tenants: list[str]
) -> None:
    async with logins(database) as made:
        name = await made.create()
        await made.bind(name, "worker", "a", "one")
        before = await audit(admin)
        relay = new_relay(database.dsn(name), relay_id=relay_id, tenants=tenants)
        relay.handler("Do")(_do)
        with pytest.raises(TenancyDeniedError):
            async with running(relay):
                pass
        assert await audit(admin) == before


async def _do(job: DispatchJob) -> Reply:
    raise AssertionError("nobody may get here")


async def test_a_gateway_client_is_denied_another_tenant_by_every_method(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    job_id, running_id = world.jobs["b", "one"]["ok"], world.durable["b"]["running"]
    async with logins(database) as made:
        name = await made.create()
        await made.bind(name, "gateway", "a")
        async with open_client(database.dsn(name)) as client:
            b = client.tenant("b")
            before = await audit(admin)
            durable_jobs = b.durable
            calls: dict[str, Callable[[], Any]] = {
                "enqueue": lambda: b.enqueue("one", "Get", idempotency_key="key-mark-b-one"),
                "enqueue_many": lambda: b.enqueue_many([DispatchRequest("one", "Get")]),
                "call": lambda: b.call("one", "Get", timeout=5),
                "poll_status": lambda: b.poll_status(job_id),
                "poll_many": lambda: b.poll_many([job_id]),
                "wait": lambda: b.wait(job_id, timeout=5),
                "as_completed": lambda: _all(b.as_completed([job_id])),
                "mark_expired": lambda: b.mark_expired(job_id),
                "durable.submit": lambda: durable_jobs.submit("import", [1], idempotent=True),
                **{
                    f"durable.{name}": partial(getattr(durable_jobs, name), running_id, actor="me")
                    for name in ("pause", "resume", "cancel", "retry_failed")
                },
                "durable.resolve": lambda: durable_jobs.resolve(running_id, 1, "done", actor="me"),
                "durable.status": lambda: durable_jobs.status(running_id),
                "durable.chunk": lambda: durable_jobs.chunk(running_id, 1),
                "durable.chunk_page": lambda: durable_jobs.chunk_page(running_id),
                "durable.chunks": lambda: _all(durable_jobs.chunks(running_id)),
                "durable.row_error_page": lambda: durable_jobs.row_error_page(running_id),
                "durable.row_errors": lambda: _all(durable_jobs.row_errors(running_id)),
                "durable.event_page": lambda: durable_jobs.event_page(running_id),
                "durable.events": lambda: _all(durable_jobs.events(running_id)),
                "durable.list": lambda: durable_jobs.list(),
                "durable.wait": lambda: durable_jobs.wait(running_id, timeout=5),
                "durable.watch": lambda: _all(durable_jobs.watch(running_id)),
            }
            methods = {name for name in vars(type(b)) if callable(getattr(b, name)) and name[0] != "_"}
            methods |= {f"durable.{name}" for name in vars(type(durable_jobs)) if name[0] != "_"}
            assert set(calls) == methods - {"durable", "durable.tenant_id", "tenant_id"}
            said = {}
            for method, call in calls.items():
                with pytest.raises(RelayDispatchError) as caught:
                    await call()
                said[method] = caught.value
            assert {method: error.code for method, error in said.items()} == dict.fromkeys(calls, "S2R-TENANCY-DENIED")
            assert [text for text in map(str, said.values()) if "mark" in text] == []
            assert await client.tenant("a").poll_status(job_id) is None
            assert await audit(admin) == before


async def test_a_store_and_an_outbox_are_denied_another_tenant(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    async with logins(database) as made:
        connection = await made.open("gateway", "a")
        before = await audit(admin)
        with pytest.raises(TenancyDeniedError):
            await DurableJobStore(connection, "b").get_job(world.durable["b"]["running"])
        assert await DurableJobStore(connection, "a").get_job(world.durable["b"]["running"]) is None
        with pytest.raises(TenancyDeniedError):
            async with connection.transaction():
                await Outbox.enqueue(connection, "kind", 1, tenant="b")
        with pytest.raises(TenancyDeniedError):
            async with Outbox(database.dsn(made.names[-1]), default_sink=_sink, tenants=["b"]) as drainer:
                await drainer.drain()
        assert await audit(admin) == before


async def _all(items: Any) -> list[object]:
    return [item async for item in items]


async def _sink(event: object) -> None:
    raise AssertionError("nobody may get here")


# --- logins that may do too much ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ("superuser", "superuser"),
        ("bypassrls", "BYPASSRLS"),
        ("in role relay_owner", "member of relay_owner"),
        ("in role relay_api", "member of relay_api"),
        ("in role relay_sweep", "member of relay_sweep"),
        ("in role pg_write_all_data", "member of pg_write_all_data"),
    ],
)
async def test_a_login_that_may_do_too_much_is_warned_of_by_each_sdk_and_fails_the_doctor(
    database: TestDatabase, caplog: pytest.LogCaptureFixture, attributes: str, why: str
) -> None:
    warning = "row security does not bind this login"
    async with logins(database) as made:
        name = await made.create(attributes=attributes)
        for kind, relay_id in (("gateway", None), ("worker", "one")):
            await made.bind(name, kind, "a", relay_id)
        dsn = database.dsn(name)

        def warned() -> bool:
            texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            caplog.clear()
            return any(warning in text and why in text for text in texts)

        caplog.set_level(logging.WARNING)
        async with open_client(dsn):
            pass
        assert warned(), "the gateway client"
        relay = new_relay(dsn, relay_id="one", tenants=["a"])
        relay.handler("Do")(_do)
        async with running(relay):
            pass
        assert warned(), "the relay"
        async with Outbox(dsn, default_sink=_sink, tenants=["a"]) as drainer:
            await drainer.drain()
        assert warned(), "the outbox"
        verdicts = {finding.check: (finding.verdict, finding.found) for finding in await examine(dsn)}
        assert verdicts["row security"][0] == "fail"
        assert why in verdicts["row security"][1]
        # Even so a call is for the tenants that it is bound to: the predicate and the binding hold by themselves.
        async with connected(dsn) as connection:
            assert await try_sql(connection, "select * from relay.list_jobs('b')") == "S2003"
