"""Sessions of all rooms are ended at random moments, seen and unseen: nothing is lost, nothing is done twice (D168).

A gateway, a relay for jobs and chunks, a drainer and a caller with a transaction of his own work in an event loop of
their own, each behind a proxy, while an operator ends one of their sessions after the other: half of those that idle so
that their clients read why, and do not see the socket close. Callers may be told of it, by errors of ours that say that
one may try again; and no log shows a traceback.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar
from uuid import UUID, uuid4

import anyio
import anyio.to_thread
import pytest

from dispatch_core.database import DRIVER_ERRORS
from dispatch_core.errors import DatabaseError, RelayDispatchError
from dispatch_core.outbox import Outbox, OutboxEvent, OutboxSettings
from gateway_sdk import DispatchStatus, GatewayClient, OutboxDrainer
from relay_sdk import ChunkContext, DispatchJob, Relay, Reply
from tests.support.chunks import KIND, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.ended import no_traceback
from tests.support.eventually import HANGS, eventually
from tests.support.gateway import settings_for
from tests.support.protocol import Connection, connected
from tests.support.proxy import TcpProxy
from tests.support.relays import RELAY, TENANT, running

ENDS = 200
"""How many sessions are ended."""

_CALLERS = 6
_CHUNKS = 3

# A statement whose session is ended unseen while it is under way is waited for so long.
_PATIENCE: dict[str, Any] = {
    "command_timeout_seconds": 1.0,
    "probe_seconds": 0.5,
    "probe_timeout_seconds": 0.5,
    "poll_interval_seconds": 0.5,
    "poll_timeout_seconds": 3.0,
    "write_timeout_seconds": 5.0,
}

_SESSIONS = """
select pid, client_port, state from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
"""

Answer = TypeVar("Answer")


class Work:
    """All that is done, and what came of it."""

    def __init__(self, dsns: Sequence[str], admin_dsn: str) -> None:
        """Take those of the gateway, the relay, the drainer and the caller."""
        self.dsns = dsns
        self.admin_dsn = admin_dsn
        self.ran: Counter[str] = Counter()
        self.called: set[str] = set()
        self.jobs: list[UUID] = []
        self.stored: set[str] = set()
        self.delivered: set[str] = set()
        self.told: Counter[str] = Counter()
        self.is_over = False

    async def run(self) -> None:
        """Work until it is over, and until all that was begun has ended."""
        gateway_dsn, worker_dsn, drainer_dsn, caller_dsn = self.dsns
        client = GatewayClient(settings=settings_for(gateway_dsn, pool_max_size=4, **_PATIENCE))
        with anyio.fail_after(3 * HANGS):
            async with (
                connected(self.admin_dsn) as admin,
                running(self._relay(worker_dsn)),
                self._drainer(drainer_dsn),
                client,
            ):
                async with anyio.create_task_group() as group:
                    for _ in range(_CALLERS):
                        group.start_soon(self._call, client)
                    group.start_soon(self._submit, client)
                    group.start_soon(self._sell, caller_dsn, admin)
                await eventually(lambda: self._is_done(admin))

    def _relay(self, dsn: str) -> Relay:
        relay = chunk_relay(dsn, lease_seconds=6.0, durable={"lease_seconds": 6.0})

        @relay.handler("Do")
        async def do(job: DispatchJob) -> Reply:
            self.ran[bytes(job.body or b"").decode()] += 1
            return Reply(body=job.body)

        @relay.chunk_handler(KIND)
        async def chunk(ctx: ChunkContext) -> None:
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.done values ($1)", ctx.payload)
                await ctx.complete(conn=conn)

        return relay

    def _drainer(self, dsn: str) -> OutboxDrainer:
        settings = OutboxSettings(drain_interval_sec=0.5, sink_timeout_seconds=1.0, stale_claim_seconds=6.0)
        drainer = OutboxDrainer(dsn, settings=settings, tenants=[TENANT])

        @drainer.sink("order")
        async def sink(event: OutboxEvent) -> None:
            self.delivered.add(event.payload)

        return drainer

    async def _is_done(self, admin: Connection) -> bool:
        assert self.delivered == self.stored
        statuses = await admin.fetch("select status from relay.durable_job")
        assert Counter(row["status"] for row in statuses) == {"completed": len(self.jobs)}
        assert await admin.fetchval("select count(*) from public.done") == _CHUNKS * len(self.jobs)
        return True

    async def _again(self, verb: Callable[[], Awaitable[Answer]]) -> Answer:
        """Try until it succeeds; whoever fails is told that he may try again."""
        while True:
            try:
                return await verb()
            except RelayDispatchError as error:
                if not error.retryable:
                    raise
                self.told[error.code] += 1
                await anyio.sleep(0.02)

    async def _call(self, client: GatewayClient) -> None:
        acme = client.tenant(TENANT)
        while not self.is_over:
            name = str(uuid4())

            async def call(name: str = name) -> Any:
                return await acme.call(RELAY, "Do", body=name, timeout=HANGS, idempotency_key=name)

            result = await self._again(call)
            assert (result.status, result.response_body) == (DispatchStatus.SUCCEEDED, name.encode()), result
            assert self.ran[name] == 1
            self.called.add(name)

    async def _submit(self, client: GatewayClient) -> None:
        durable = client.tenant(TENANT).durable
        while not self.is_over:
            job_id = uuid4()

            async def submit(job_id: UUID = job_id) -> Any:
                chunks = [f"{job_id}:{n}" for n in range(_CHUNKS)]
                return await durable.submit(KIND, chunks, job_id=job_id, max_attempts=100)

            await self._again(submit)
            self.jobs.append(job_id)
            await anyio.sleep(0.2)

    async def _sell(self, dsn: str, admin: Connection) -> None:
        """Write an order and its event in a transaction of the caller's, whose end nobody may hear of."""
        while not self.is_over:
            try:
                async with connected(dsn) as conn:
                    while not self.is_over:
                        await self._sell_one(conn, admin)
            except (*DRIVER_ERRORS, DatabaseError):
                pass  # those of the driver are the caller's own statements'

    async def _sell_one(self, conn: Connection, admin: Connection) -> None:
        name = str(uuid4())
        try:
            with anyio.fail_after(1):
                async with conn.transaction():
                    await conn.execute("insert into public.orders values ($1)", name)
                    try:
                        await Outbox.enqueue(conn, "order", name, tenant=TENANT)
                    except DatabaseError as error:
                        self.told[error.code] += error.retryable
                        raise
                    except Exception as error:
                        raise AssertionError("no error of ours") from error
        finally:
            with anyio.CancelScope(shield=True):
                if await admin.fetchval("select true from public.orders where n = $1", name):
                    self.stored.add(name)
        await anyio.sleep(0.01)


async def end_sessions(admin: Connection, proxies: list[TcpProxy], chance: random.Random) -> None:
    for _ in range(ENDS):
        await anyio.sleep(chance.uniform(0.0, 0.03))
        lines = {line.server_side_port: line for proxy in proxies for line in proxy.connections}
        sessions = [row for row in await admin.fetch(_SESSIONS) if row["client_port"] in lines]
        if sessions:
            session = chance.choice(sessions)
            lines[session["client_port"]].holds_end = session["state"] != "active" and chance.random() < 0.5
            await admin.execute("select pg_terminate_backend($1)", session["pid"])


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
async def test_whatever_session_is_ended_at_whatever_moment_nothing_is_lost_or_done_twice(
    database: TestDatabase,
    admin: Connection,
    seed: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    uvloop: bool,
) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_COMMAND_TIMEOUT_SECONDS", "1")  # the drainer's
    factory = pytest.importorskip("uvloop").new_event_loop if uvloop else asyncio.new_event_loop
    await admin.execute(
        "create table public.done (n text unique); grant all on public.done to public;"
        "create table public.orders (n text unique); grant all on public.orders to public"
    )
    dsns = [database.gateway_dsn, database.worker_dsn, database.gateway_dsn, database.gateway_dsn]
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(TcpProxy.before(dsn)) for dsn in dsns]
        work = Work([proxy.dsn(dsn) for proxy, dsn in zip(proxies, dsns, strict=True)], database.admin_dsn)

        def run() -> None:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(work.run())

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, run)
            try:
                await eventually(lambda: len(work.called) > _CALLERS)
                await end_sessions(admin, proxies, random.Random(seed))
            finally:
                work.is_over = True
    print(f"{len(work.called)} calls, {len(work.jobs)} jobs, {len(work.stored)} orders; told: {dict(work.told)}")
    no_traceback(caplog, but=["relay_sdk.chunk_ends"])  # that shows what a handler has raised
