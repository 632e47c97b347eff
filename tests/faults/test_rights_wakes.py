"""What LISTEN, NOTIFY and advisory locks, which know no rights, are worth to a hostile login: wake-ups, and a delay."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from uuid import UUID, uuid4

import anyio
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from relay_sdk import DispatchJob, Reply
from tests.support import durable, outbox
from tests.support.chunks import chunk_relay
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.protocol import Connection, claim, claimed_job, connected, enqueue, logins, settle
from tests.support.relays import RELAY, TENANT, Jobs, running

pytestmark = pytest.mark.invariant("I4")


class _Ear:
    """Listens on channels of a connection, and keeps what it hears."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.heard: list[tuple[str, str]] = []

    async def listen(self, *channels: str) -> None:
        for channel in channels:
            await self._connection.add_listener(channel, self._hear)

    def _hear(self, connection: object, pid: int, channel: str, payload: object) -> None:
        self.heard.append((channel, str(payload)))

    async def sync(self) -> list[tuple[str, str]]:
        await self._connection.fetchval("select 1")
        heard, self.heard = self.heard, []
        return heard


def _guesses(tenant: str, relay: str) -> Iterator[str]:
    """The form of a name is known, all that it is made of too, but for the secret."""
    for kind in ("wake", "cancel", "result", "outbox", "outbox_all", "durable", "durable_watch", "claim"):
        for of in (relay, ""):
            text = f"{kind}:{len(tenant)}:{tenant}:{of}".encode()
            for secret in (b"", b"\x00" * 32, b"s2r_", str(UUID(int=0)).encode(), uuid4().bytes + uuid4().bytes):
                yield f"s2r_{hashlib.sha256(secret + text).hexdigest()[:40]}"
        yield from (f"s2r_{kind}_{tenant}", f"s2r_{kind}_{tenant}_{relay}", f"{kind}:{tenant}:{relay}", kind, tenant)
    yield from ("*", "s2r_", "s2r_*", "s2r_%", "s2r_" + "0" * 40, "relay", relay)


async def test_whoever_listens_on_guessed_channels_hears_nothing(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        ear = _Ear(attacker)
        await ear.listen(
            *set(_guesses("b", "one")), await RelayDispatchRepository(attacker, "a").channel("wake", "one")
        )
        job = await claimed_job(gateway, worker, tenant="b", relay="one")
        await settle(worker, job)
        ids = uuid4().hex
        await gateway.execute(
            "select relay.ring('{wake,cancel,result,durable,durable_watch}', '{b,b,b,b,b}', $1, $2)",
            ["one"] * 5,
            [None, ids, ids, ids, ids],
        )
        await outbox.write(gateway, tenant="b")
        await gateway.execute("select relay.outbox_enqueue('k', '1', p_tenant => 'b')")
        await durable.submit(gateway, tenant="b")
        assert await ear.sync() == []
        await gateway.execute("select relay.ring('{wake}', '{a}', '{one}', '{null}')")
        assert len(await ear.sync()) == 1, "it is its own that it hears"


# Of every shape: what is no id, almost one, many, and what a careless reader would run, unpack or believe.
_ID = uuid4()
_SHAPES = (
    "", "x", "null", "{}", "[]", "-1", "true", ",", ",,,", "é漢\U0001f600", "a" * 7999, "," * 7999,
    "'; drop table x; --", "%s%n", "../../etc/passwd", "\\x00", "\x01\x02\x1b[2J",
    _ID.hex[:-1], _ID.hex + "0", _ID.hex.upper(), str(_ID), "{" + str(_ID) + "}", f"urn:uuid:{_ID}",
    _ID.hex + ",", "," + _ID.hex, " " + _ID.hex, _ID.hex + "\n", "0" * 32, "f" * 32,
    ",".join(uuid4().hex for _ in range(240)),
)  # fmt: skip


async def test_false_notifications_of_every_shape_stop_no_handler_and_lose_no_job(
    database: TestDatabase, gateway: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """On every channel of the tenant, told to the attacker by a superuser, with ids of running jobs too."""
    caplog.set_level(logging.WARNING)
    relay = chunk_relay(database, lease_seconds=30.0, poll_seconds=60.0, sweep_seconds=600.0)
    started, go = asyncio.Event(), asyncio.Event()
    cancelled: list[str] = []

    async def until_told(what: str) -> None:
        started.set()
        try:
            await go.wait()
        except asyncio.CancelledError:
            cancelled.append(what)
            raise

    @relay.handler("Do")
    async def do(job: DispatchJob) -> Reply:
        await until_told("job")
        return Reply(body=job.body)

    @relay.chunk_handler("import")
    async def chunk(context: object) -> None:
        await until_told("chunk")

    async with running(relay), open_client(database.gateway_dsn, poll_interval_seconds=60.0) as client:
        tenant = client.tenant(TENANT)
        job_id = await tenant.enqueue(RELAY, "Do", body=b"mine", ttl=60)
        durable_id = await durable.submit(gateway, 1, tenant=TENANT)
        await eventually(lambda: relay.health().running == 1 and relay.health().chunks_running == 1)
        claims = relay.metrics.claims + relay.metrics.chunk_claims
        async with anyio.create_task_group() as group:
            results = []

            async def wait() -> None:
                results.append(await tenant.wait(job_id, timeout=30))

            group.start_soon(wait)
            async with connected(database.admin_dsn) as attacker:
                names = [
                    row[0]
                    for row in await attacker.fetch(
                        """select relay.channel_name(k, $1, r) from (values ('wake', $2), ('result', null),
                             ('durable', null), ('durable_watch', null), ('outbox', null)) v (k, r)""",
                        TENANT,
                        RELAY,
                    )
                ]
                rung = 0
                for payload in (*_SHAPES, job_id.hex, durable_id.hex, f"{job_id.hex},{durable_id.hex}"):
                    for name in names:
                        await attacker.execute("select pg_notify($1, $2)", name, payload)
                        rung += 1
            heard = relay.metrics.notifications + relay.metrics.chunk_notifications
            await eventually(lambda: relay.metrics.notifications + relay.metrics.chunk_notifications >= heard)
            assert cancelled == []
            assert relay.health().status == "ok"
            go.set()
        assert [(result.status, result.response_body) for result in results] == [("succeeded", b"mine")]

        async def completed() -> bool:
            return await durable.status(gateway, durable_id) == "completed"

        await eventually(completed)
        # A false alarm costs a claim, and those that come while one is under way cost one together.
        assert relay.metrics.claims + relay.metrics.chunk_claims - claims <= rung + 10
    assert cancelled == []
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_ring_that_says_a_job_was_withdrawn_is_believed_by_nobody(
    database: TestDatabase, gateway: Connection
) -> None:
    """A worker of the same relay may send it; the claim is asked for, found good, and its handler goes on."""
    relay = chunk_relay(database, lease_seconds=30.0, sweep_seconds=600.0)
    started, go = asyncio.Event(), asyncio.Event()

    @relay.handler("Do")
    async def do(job: DispatchJob) -> Reply:
        started.set()
        await go.wait()
        return Reply(body=b"done")

    async with running(relay), logins(database) as made:
        attacker = await made.open("worker", TENANT, RELAY)
        jobs = Jobs(gateway)
        job_id = await jobs.enqueue(ttl=60)
        await jobs.ring()
        await started.wait()
        for _ in range(3):
            before = relay.metrics.heartbeats
            await attacker.execute(
                "select relay.ring('{cancel}', array[$1::text], array[$2::text], array[$3::text])",
                TENANT,
                RELAY,
                job_id.hex,
            )
            await eventually(lambda before=before: relay.metrics.heartbeats > before)  # type: ignore[misc]
        assert relay.metrics.handlers_cancelled == 0
        go.set()
        assert (await jobs.end(job_id)).response_body == b"done"


async def test_who_holds_the_advisory_locks_that_he_has_seen_makes_large_claims_late_and_nothing_else(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await enqueue(gateway, 300, tenant="b", relay="one")
    async with logins(database) as made:
        attacker = await made.open("worker", "a", "one")
        # What pg_locks shows everybody, while others hold them.
        seen = set()
        for _ in range(40):
            async with connected(database.worker_dsn) as victim:
                await victim.execute("begin")
                await claim(victim, 64, tenant="b", relay="one")
                rows = await attacker.fetch("select classid, objid from pg_locks where locktype = 'advisory'")
                seen |= {(row["classid"], row["objid"]) for row in rows}
            if len(seen) == 4:
                break
        assert seen
        for high, low in seen:
            number = (high << 32 | low) - (1 << 64 if high >> 31 else 0)
            await attacker.fetchval("select pg_try_advisory_lock($1)", number)
        await worker.execute("set statement_timeout = '30 s'")
        found: list[UUID] = []
        for _ in range(3):
            sql = "select * from relay.claim('one', '{b}', 100, 'me', $1, '30 s')"
            rows = await worker.fetch(sql, uuid4())
            waited = [row["remaining"].total_seconds() for row in rows if row["outcome"] == "waited"]
            assert all(0 <= seconds <= 0.8 for seconds in waited)
            found += [row["job_id"] for row in rows if row["outcome"] == "claimed"]
        assert len(set(found)) == len(found) == 300, "each of them, and each once"
        await enqueue(gateway, 10, tenant="b", relay="one")
        rows = await worker.fetch("select * from relay.claim('one', '{b}', 63, 'me', $1, '30 s')", uuid4())
        assert [row["outcome"] for row in rows] == ["claimed"] * 10, (
            "a small claim takes no turn, so it waits for nobody"
        )
