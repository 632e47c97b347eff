"""Every room through the real PgBouncer, its other pool modes, and what is done to it while it is in use."""

from __future__ import annotations

import signal
import time
from typing import Any

import anyio
import asyncpg
import pytest
from pydantic import SecretStr

from dispatch_core.database import Database
from dispatch_core.durable_models import ChunkSpec, JobStatus
from dispatch_core.errors import DatabaseError, DatabaseUnavailableError
from dispatch_core.outbox import Outbox, OutboxEvent, OutboxSettings
from dispatch_core.settings import CoreSettings, DurableJobsSettings
from gateway_sdk import GatewayClient, OutboxDrainer, TenantClient
from relay_sdk import ChunkContext, DispatchJob, Relay, RelaySettings, Reply
from tests.support.chunks import KIND, QUICK_CHUNKS
from tests.support.cli import run_cli
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import settings_for
from tests.support.load import answers_by_notify
from tests.support.pgbouncer import PgBouncer, pgbouncer, program
from tests.support.relays import QUICK, running

pytestmark = [pytest.mark.case("C05"), pytest.mark.timeout(120)]

LONG = 600.0
CHUNKS, ROWS = 6, 20


@pytest.fixture(autouse=True)
def _there_is_one() -> None:
    program()


class Rooms:
    """A gateway with a drainer, and a relay with both kinds of handlers, through PgBouncer."""

    def __init__(self, database: TestDatabase, bouncer: PgBouncer, *, direct: bool, poll: float) -> None:
        self.database = database
        gateway, worker = bouncer.dsn(database.gateway_dsn), bouncer.dsn(database.worker_dsn)
        self.delivered: list[OutboxEvent] = []
        core = CoreSettings(
            dsn=SecretStr(worker),
            listen_dsn=SecretStr(database.worker_dsn) if direct else None,
            statement_cache_size=0,
            probe_timeout_seconds=1.0,
        )
        self.relay = Relay(
            "erp",
            tenants=["acme"],
            core=core,
            settings=RelaySettings(**{**QUICK, "poll_seconds": poll, "lease_seconds": 20.0}),
            durable=DurableJobsSettings(**{**QUICK_CHUNKS, "lease_seconds": 20.0}),
        )
        self.relay.handler("Work")(self.work)
        self.relay.chunk_handler(KIND, concurrency=4)(self.load)
        listen = {"listen_dsn": SecretStr(database.gateway_dsn)} if direct else {}
        settings = settings_for(
            gateway, statement_cache_size=0, poll_interval_seconds=poll, probe_timeout_seconds=1.0, **listen
        )
        self.drainer = OutboxDrainer(settings=OutboxSettings(drain_interval_sec=poll), default_sink=self.sink)
        self.client = GatewayClient(settings=settings, outbox=self.drainer)

    async def work(self, job: DispatchJob) -> Reply:
        return Reply(job.body)

    async def load(self, ctx: ChunkContext) -> None:
        for at in range(int(ctx.checkpoint or 0), ROWS, 5):
            async with ctx.transaction() as conn:
                rows = [ctx.payload["first"] + at + n for n in range(5)]
                await conn.execute("insert into public.loaded select unnest($1::bigint[])", rows)
                await ctx.save_checkpoint(at + 5)

    async def sink(self, event: OutboxEvent) -> None:
        self.delivered.append(event)

    async def work_in_each(self, acme: TenantClient, bouncer: PgBouncer, turn: int) -> None:
        """A call, an import with a transaction per five rows, and a business transaction with an event."""
        first = turn * CHUNKS * ROWS
        async with anyio.create_task_group() as group:
            group.start_soon(self.call, acme)
            group.start_soon(self.load_all, acme, first)
            group.start_soon(self.tell, bouncer, turn)

    async def call(self, acme: TenantClient) -> None:
        for number in range(20):
            result = await acme.call("erp", "Work", body=str(number), timeout=30, max_attempts=3)
            assert result.response_body == str(number).encode()

    async def load_all(self, acme: TenantClient, first: int) -> None:
        chunks = [ChunkSpec({"first": first + n * ROWS}, rows=ROWS) for n in range(CHUNKS)]
        job_id = await acme.durable.submit(KIND, chunks, max_attempts=10)
        assert (await acme.durable.wait(job_id, timeout=60)).status is JobStatus.COMPLETED

    async def tell(self, bouncer: PgBouncer, turn: int) -> None:
        conn = await asyncpg.connect(bouncer.dsn(self.database.gateway_dsn), statement_cache_size=0)
        async with conn.transaction():
            await Outbox.enqueue(conn, "told", {"turn": turn}, tenant="acme")
        await conn.close()
        await eventually(
            lambda: any(event.payload == {"turn": turn} for event in self.delivered), 30, message="delivered:"
        )


@pytest.fixture
async def table(admin: asyncpg.Connection[Any]) -> None:
    await admin.execute("create table public.loaded (n bigint); grant select, insert on public.loaded to public")


async def loaded(admin: asyncpg.Connection[Any], rounds: int) -> None:
    rows = [row[0] for row in await admin.fetch("select n from public.loaded order by n")]
    assert rows == list(range(rounds * CHUNKS * ROWS)), "each row once"


@pytest.mark.usefixtures("table")
async def test_every_room_works_through_it_by_notify_with_a_direct_address_to_listen(
    database: TestDatabase, admin: asyncpg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with pgbouncer(database.server, database.gateway_dsn, database.worker_dsn, pool_size=4) as bouncer:
        rooms = Rooms(database, bouncer, direct=True, poll=LONG)
        async with running(rooms.relay), rooms.client as client:
            await rooms.work_in_each(client.tenant("acme"), bouncer, 0)
            await answers_by_notify(client, rooms.relay)
            ended = await run_cli(
                "doctor", "--dsn", bouncer.dsn(database.gateway_dsn), "--listen-dsn", database.gateway_dsn, "-o", "json"
            )
            print(ended.out)
            assert "listening goes past it" in ended.out
        assert "pooler" not in caplog.text
        assert " ERROR " not in bouncer.log
    await loaded(admin, 1)


@pytest.mark.usefixtures("table")
async def test_every_room_polls_without_one_and_says_so_once_each(
    database: TestDatabase, admin: asyncpg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with pgbouncer(database.server, database.gateway_dsn, database.worker_dsn, pool_size=4) as bouncer:
        rooms = Rooms(database, bouncer, direct=False, poll=0.3)
        async with running(rooms.relay), rooms.client as client:
            await eventually(lambda: client.health().state == "polling_only", 20)
            for turn in range(2):
                await rooms.work_in_each(client.tenant("acme"), bouncer, turn)
            ended = await run_cli("doctor", "--dsn", bouncer.dsn(database.gateway_dsn), "-o", "json")
            assert "listening goes through it" in ended.out
    # Gateway and relay; the drainer listens on its gateway's connection.
    assert caplog.text.count("a transaction pooler stands before") == 2
    await loaded(admin, 2)


@pytest.mark.usefixtures("table")
async def test_a_session_pooler_is_listened_through(
    database: TestDatabase, admin: asyncpg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each client has a server session to itself, so it may listen in it; there must be as many as connections."""
    logins = (database.gateway_dsn, database.worker_dsn)
    async with pgbouncer(database.server, *logins, pool_size=40, pool_mode="session") as bouncer:
        rooms = Rooms(database, bouncer, direct=False, poll=LONG)
        async with running(rooms.relay), rooms.client as client:
            await rooms.work_in_each(client.tenant("acme"), bouncer, 0)
            await answers_by_notify(client, rooms.relay)
    assert "pooler" not in caplog.text
    await loaded(admin, 1)


async def test_a_pooler_by_statement_is_named_where_it_refuses_a_transaction(database: TestDatabase) -> None:
    """It is no lost connection that might be tried again for ever, though it looks like one."""
    async with (
        pgbouncer(database.server, database.gateway_dsn, pool_mode="statement") as bouncer,
        Database(bouncer.dsn(database.gateway_dsn), statement_cache_size=0) as pool,
    ):
        assert await pool.execute("select 1")
        with pytest.raises(DatabaseError, match="pool_mode must be transaction or session") as caught:
            async with pool.connection() as conn, conn.transaction():
                await conn.execute("select 1")
        assert not caught.value.retryable


@pytest.mark.usefixtures("table")
async def test_pauses_reloads_and_sessions_that_are_recycled_are_not_noticed(
    database: TestDatabase, admin: asyncpg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """PAUSE and RESUME, RELOAD, and server_lifetime, which ends each server session after a second."""
    logins = (database.gateway_dsn, database.worker_dsn)
    async with pgbouncer(database.server, *logins, pool_size=4, server_lifetime=1, server_reset_query="") as bouncer:
        rooms = Rooms(database, bouncer, direct=True, poll=LONG)
        async with running(rooms.relay), rooms.client as client:
            acme = client.tenant("acme")

            async def disturb() -> None:
                while True:
                    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                        bouncer.signal(number)
                        await anyio.sleep(0.2)

            async with anyio.create_task_group() as group:
                group.start_soon(disturb)
                until, turn = time.monotonic() + 6, 0
                while time.monotonic() < until:
                    await rooms.work_in_each(acme, bouncer, turn)
                    turn += 1
                group.cancel_scope.cancel()
            bouncer.signal(signal.SIGUSR2)
            assert rooms.relay.metrics.claim_errors == 0
    print(f"{turn} rounds")
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    await loaded(admin, turn)


async def test_a_wait_for_a_server_session_that_it_ends_may_be_tried_again(database: TestDatabase) -> None:
    """query_wait_timeout, and max_client_conn: nothing was sent to PostgreSQL, and the pool is well again after it."""
    settings: dict[str, Any] = {"query_wait_timeout": 1, "max_client_conn": 4}
    async with pgbouncer(database.server, database.gateway_dsn, pool_size=1, **settings) as bouncer:
        dsn = bouncer.dsn(database.gateway_dsn)
        async with Database(dsn, min_size=1, max_size=1, statement_cache_size=0) as pool:
            holder = await asyncpg.connect(dsn, statement_cache_size=0)
            await holder.execute("begin")
            with pytest.raises(DatabaseUnavailableError, match="query_wait_timeout"):
                await pool.execute("select 1")
            await holder.execute("rollback")
            assert await pool.execute("select 1")
            others = [await asyncpg.connect(dsn, statement_cache_size=0) for _ in range(2)]
            async with Database(dsn, min_size=0, max_size=1, statement_cache_size=0) as second:
                with pytest.raises(DatabaseUnavailableError, match="max_client_conn"):
                    await second.execute("select 1")
                for other in others:
                    await other.close()
                assert await second.execute("select 1")
            await holder.close()


@pytest.mark.slow
async def test_a_server_that_is_away_behind_it_makes_no_hot_loop_of_connections_to_it(
    durable_database: TestDatabase,
) -> None:
    """It takes connections all the same, and refuses only the first statement of each."""
    database = durable_database
    logins = (database.gateway_dsn, database.worker_dsn)
    async with pgbouncer(database.server, *logins, pool_size=4, query_wait_timeout=2) as bouncer:
        rooms = Rooms(database, bouncer, direct=True, poll=LONG)
        async with running(rooms.relay), rooms.client as client:
            acme = client.tenant("acme")

            async def ask_for_ever() -> None:
                while True:
                    with anyio.move_on_after(3):
                        try:
                            await acme.enqueue("nobody", "Work", ttl=1)
                        except DatabaseUnavailableError:
                            pass
                    await anyio.sleep(0.05)

            async with anyio.create_task_group() as group:
                for _ in range(32):
                    group.start_soon(ask_for_ever)
                await anyio.sleep(1)
                await anyio.to_thread.run_sync(database.server.stop, "fast")
                await anyio.sleep(3)
                before, began = bouncer.log.count("login attempt"), time.monotonic()
                await anyio.sleep(6)
                tries, seconds = bouncer.log.count("login attempt") - before, time.monotonic() - began
                print(f"{tries} connections of gateway and relay in {seconds:.1f} s")
                await anyio.to_thread.run_sync(database.server.start)
                group.cancel_scope.cancel()
            await answers_by_notify(client, rooms.relay, within=30)
        assert tries <= 2 * 4 * seconds, "two processes"
