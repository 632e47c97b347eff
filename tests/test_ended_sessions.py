"""A session is ended, and its client has read why and not seen the socket close (D166, D168): each room's verbs, once.

The driver then has an error of its own for the next statement, which it does not send. Here it is one of ours that says
so, or the work goes on; nothing is half done, the pool's place is free again, and no log shows a traceback.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias
from uuid import uuid4

import anyio
import asyncpg
import pytest

from dispatch_core import DurableJobStore
from dispatch_core.database import Database
from dispatch_core.dev.logins import WORKER_LOGIN
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.durable_models import JobStatus
from dispatch_core.errors import ConnectionLostError, DatabaseUnavailableError
from dispatch_core.listener import Listener
from dispatch_core.outbox import Outbox, OutboxEvent, OutboxSettings
from dispatch_core.pacing import pace_of
from gateway_sdk import DispatchRequest, DispatchStatus, OutboxDrainer, TenantClient
from relay_sdk import ChunkContext, DispatchJob
from tests.support.chunks import KIND, SELDOM, Work, chunk_relay
from tests.support.cli import run_cli
from tests.support.databases import TestDatabase
from tests.support.ended import end_unseen, no_traceback, read_it
from tests.support.eventually import HANGS, eventually
from tests.support.gateway import PlayedRelay, open_client
from tests.support.outbox import write
from tests.support.protocol import OUTBOX, TENANT, Connection, connected
from tests.support.proxy import TcpProxy
from tests.support.relays import RELAY, Jobs, running

Verb: TypeAlias = Callable[[Any], Awaitable[object]]

BIG = 900_000
"""Bytes of a body, so that nine of them are several statements."""


def callers_verbs(acme: TenantClient, database: Database) -> dict[str, Verb]:
    """All that is done on a connection of the caller's."""
    requests = [DispatchRequest(RELAY, "Do")] * 3
    big = [DispatchRequest(RELAY, "Do", body=bytes(BIG))] * 9
    return {
        "repository": lambda conn: RelayDispatchRepository(conn, TENANT).poll_status(uuid4()),
        "enqueue": lambda conn: acme.enqueue(RELAY, "Do", conn=conn),
        "enqueue with a key": lambda conn: acme.enqueue(RELAY, "Do", idempotency_key="k", conn=conn),
        "enqueue with a bound": lambda conn: acme.enqueue(RELAY, "Do", max_pending=9, conn=conn),
        "enqueue_many": lambda conn: acme.enqueue_many(requests, conn=conn),
        "enqueue_many in parts": lambda conn: acme.enqueue_many(big, conn=conn),
        "event": lambda conn: Outbox.enqueue(conn, "order", {}, tenant=TENANT),
        "submit": lambda conn: acme.durable.submit(KIND, [{}], conn=conn),
        "store with conn": lambda conn: DurableJobStore(database, TENANT).insert_job(KIND, conn=conn),
        "store on it": lambda conn: DurableJobStore(conn, TENANT).insert_job(KIND),
        "store on it, together": lambda conn: DurableJobStore(conn, TENANT).insert_chunks(uuid4(), [{}], from_seq=1),
    }


@pytest.mark.parametrize("how", ["ended unseen", "closed", "cut", "given back"])
async def test_a_caller_whose_own_session_is_over_is_told_by_an_error_of_ours_that_nothing_was_sent(
    database: TestDatabase, admin: Connection, how: str
) -> None:
    dsn = database.gateway_dsn
    async with TcpProxy.before(dsn) as proxy, open_client(dsn) as client:
        for name, verb in callers_verbs(client.tenant(TENANT), client.runtime.database).items():
            async with asyncpg.create_pool(proxy.dsn(dsn), min_size=0, max_size=1) as pool:
                conn: Any = await pool.acquire()
                ended = proxy.ends_session(1) if how == "ended unseen" else None
                await conn.execute("begin")
                await read_it()
                assert ended is None or ended.is_set()
                if how == "closed":
                    await conn._con.close()
                elif how == "cut":
                    conn._con._abort()  # as `terminate` does, of a connection that is no pool's
                elif how == "given back":
                    await conn.execute("rollback")
                    await pool.release(conn)
                with pytest.raises(DatabaseUnavailableError) as caught:
                    await verb(conn)
                assert caught.value.retryable, name
                assert not isinstance(caught.value, ConnectionLostError), name
                pool.terminate()
    assert not await admin.fetchval("select exists (select from relay.s2r_relay_dispatch_queue)")
    assert not await admin.fetchval(f"select exists (select from {OUTBOX})")
    assert not await admin.fetchval("select exists (select from relay.durable_job)")


def _is_back(listener: Listener, caught_up: list[bool], before: int) -> bool:
    return len(caught_up) > before and listener.state == "listening"


async def test_a_listener_whose_session_is_over_finds_out_by_its_next_word_and_listens_anew(
    database: TestDatabase, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    caught_up: list[bool] = []
    async with TcpProxy.before(database.gateway_dsn) as proxy, anyio.create_task_group() as group:
        listener = Listener(
            proxy.dsn(database.gateway_dsn), probe_seconds=0.3, probe_timeout_seconds=5.0, backoff_base=0.01
        )
        listener.on_catch_up(lambda: caught_up.append(True))
        await group.start(listener.run)
        assert await listener.subscribe("s2r_one", heard.append)
        for word in ("probe", "ring", "subscribe", "unsubscribe"):
            before = len(caught_up)
            assert await end_unseen(admin, proxy) == 1
            await admin.execute(f"notify s2r_one, 'lost at the {word}'")
            if word == "ring":
                with pytest.raises(DatabaseUnavailableError):
                    await listener.execute("select 1")
                assert listener.state != "listening"
            elif word == "subscribe":
                assert not await listener.subscribe("s2r_two", heard.append)
            elif word == "unsubscribe":
                listener.unsubscribe("s2r_two", heard.append)
            # What was rung meanwhile is found by the catch-up's read.
            await eventually(partial(_is_back, listener, caught_up, before))
            await admin.execute(f"notify s2r_one, 'heard after the {word}'")
            await eventually(lambda: bool(heard))
            assert heard == [f"heard after the {word}"]
            heard.clear()
        group.cancel_scope.cancel()
    no_traceback(caplog)


async def test_a_gateway_whose_sessions_are_over_does_all_of_its_verbs_at_the_first_try(
    database: TestDatabase, admin: Connection, worker: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    played = PlayedRelay(worker, TENANT, RELAY)
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn), pool_max_size=2, probe_seconds=0.5) as client,
    ):
        acme = client.tenant(TENANT)
        done = await acme.enqueue(RELAY, "Do")
        await played.work()
        durable = await acme.durable.submit(KIND, [{}])
        big = [DispatchRequest(RELAY, "Do", body=bytes(BIG))] * 9
        verbs: dict[str, Callable[[], Awaitable[object]]] = {
            "enqueue": lambda: acme.enqueue("other", "Do"),
            "enqueue with a key": lambda: acme.enqueue("other", "Do", idempotency_key="k"),
            "enqueue_many": lambda: acme.enqueue_many([DispatchRequest("other", "Do")] * 3),
            "enqueue_many in parts": lambda: acme.enqueue_many(big),
            "poll_status": lambda: acme.poll_status(done),
            "poll_many": lambda: acme.poll_many([done]),
            "wait": lambda: acme.wait(done),
            "mark_expired": lambda: acme.mark_expired(done),
            "submit": lambda: acme.durable.submit(KIND, [{}]),
            "pause": lambda: acme.durable.pause(durable),
            "cancel": lambda: acme.durable.cancel(durable),
            "list": acme.durable.list,
        }
        for name, verb in verbs.items():
            # In turn the listener's session too: then there is one connection less that does not know.
            with anyio.fail_after(HANGS):
                while not await end_unseen(admin, proxy, but="listener" if len(name) % 2 else "nobody's"):
                    # One call that met an ended session retires what another has opened since.
                    await acme.poll_status(done)
            await verb()
    no_traceback(caplog)


async def test_a_withdrawal_that_may_have_been_made_is_not_made_again(
    database: TestDatabase, worker: Connection
) -> None:
    """It would say 0 of a job that it has ended itself."""
    async with (
        TcpProxy.before(database.gateway_dsn, reads_along=True) as proxy,
        open_client(proxy.dsn(database.gateway_dsn), pool_max_size=1) as client,
    ):
        acme = client.tenant(TENANT)
        job_id = await acme.enqueue(RELAY, "Do")
        cut = proxy.cut_answer("relay.mark_expired")
        with pytest.raises(ConnectionLostError):
            await acme.mark_expired(job_id)
        assert cut.is_set()
        assert (await acme.wait(job_id)).status is DispatchStatus.EXPIRED


@pytest.mark.parametrize("when", ["begin", "own statement", "completion", "fence", "error", "cut"])
@pytest.mark.invariant("J2")
async def test_a_handlers_transaction_whose_session_is_over_leaves_nothing_and_its_chunk_is_tried_again(
    database: TestDatabase, admin: Connection, gateway: Any, when: str
) -> None:
    work = Work(gateway)
    await admin.execute("create table public.imported (n int); grant all on public.imported to public")
    raised: list[BaseException] = []
    async with TcpProxy.before(database.worker_dsn, reads_along=True) as proxy:
        relay = chunk_relay(
            proxy.dsn(database.worker_dsn), durable={**SELDOM, "lease_seconds": 60.0}, poll_seconds=60.0
        )

        @relay.chunk_handler(KIND)
        async def handler(ctx: ChunkContext) -> None:
            is_first = ctx.attempt == 1
            try:
                if is_first and when == "begin":
                    proxy.ends_session("BEGIN")
                async with ctx.transaction() as conn:
                    if is_first and when != "begin":
                        proxy.ends_session("imported")
                    await conn.execute("insert into public.imported values (1)")
                    if is_first and when == "own statement":
                        await conn.execute("select 1")
                    if is_first and when == "completion":
                        await ctx.complete()
                    if is_first and when == "error":
                        raise KeyError("the handler's own")
                    if is_first and when == "cut":
                        assert ctx.open_transaction is not None
                        ctx.open_transaction.cut()
                        await ctx.save_checkpoint(1)
            except BaseException as error:
                raised.append(error)
                raise

        async with running(relay):
            job_id = await work.submit()
            job = await work.end(job_id)
        assert job.status is JobStatus.COMPLETED, raised
        assert (await work.chunk(job_id)).attempts == 2
    assert await admin.fetchval("select count(*) from public.imported") == 1
    (error,) = raised
    if when in ("begin", "own statement"):  # the statement is the handler's, and so is the error
        assert isinstance(error, asyncpg.InternalClientError)
    elif when == "error":
        assert isinstance(error, KeyError)
    else:
        assert type(error) is DatabaseUnavailableError


async def test_a_handler_whose_commit_never_left_may_do_it_again_in_the_same_attempt(
    database: TestDatabase, admin: Connection, gateway: Any
) -> None:
    """Nothing of it can have been committed. Where nobody knew that, the attempt would write nothing more."""
    work = Work(gateway)
    await admin.execute("create table public.imported (n int); grant all on public.imported to public")
    async with TcpProxy.before(database.worker_dsn, reads_along=True) as proxy:
        relay = chunk_relay(
            proxy.dsn(database.worker_dsn), durable={**SELDOM, "lease_seconds": 60.0}, poll_seconds=60.0
        )

        @relay.chunk_handler(KIND)
        async def handler(ctx: ChunkContext) -> None:
            ended = proxy.ends_session("relay.durable_row_errors_add")  # by which it asks for the fence
            with pytest.raises(DatabaseUnavailableError) as caught:
                async with ctx.transaction() as conn:
                    await conn.execute("insert into public.imported values (1)")
            assert ended.is_set()
            assert not isinstance(caught.value, ConnectionLostError)
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.imported values (2)")

        async with running(relay):
            job_id = await work.submit()
            assert (await work.end(job_id)).status is JobStatus.COMPLETED
        assert (await work.chunk(job_id)).attempts == 1
    assert [row["n"] for row in await admin.fetch("select n from public.imported")] == [2]


async def test_a_relay_whose_sessions_are_over_writes_what_its_handlers_have_done_and_renews_its_leases(
    database: TestDatabase, gateway: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    jobs, work = Jobs(gateway), Work(gateway)
    async with TcpProxy.before(database.worker_dsn) as proxy, connected(database.admin_dsn) as observer:
        relay = chunk_relay(proxy.dsn(database.worker_dsn))

        @relay.handler("Do")
        async def do(job: DispatchJob) -> None:
            await eventually(lambda: end_unseen(observer, proxy))

        @relay.chunk_handler(KIND)
        async def chunk(ctx: ChunkContext) -> None:
            renewed = relay.metrics.chunk_leases_renewed
            await eventually(lambda: end_unseen(observer, proxy))
            await eventually(lambda: relay.metrics.chunk_leases_renewed > renewed)
            await eventually(lambda: end_unseen(observer, proxy))
            await ctx.save_checkpoint(1)

        async with running(relay):
            job_id = await jobs.enqueue("Do")
            await jobs.ring()
            result = await jobs.end(job_id)
            assert (result.status, result.attempt) == (DispatchStatus.SUCCEEDED, 1)
            durable = await work.submit()
            assert (await work.end(durable)).status is JobStatus.COMPLETED
            assert (await work.chunk(durable)).attempts == 1
    no_traceback(caplog)


async def test_a_drainer_whose_sessions_are_over_settles_what_it_has_delivered_and_drains_on(
    database: TestDatabase, admin: Connection, gateway: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    async with TcpProxy.before(database.gateway_dsn) as proxy, connected(database.admin_dsn) as observer:
        drainer = OutboxDrainer(
            proxy.dsn(database.gateway_dsn), settings=OutboxSettings(drain_interval_sec=0.2), tenants=[TENANT]
        )

        @drainer.sink("order")
        async def sink(event: OutboxEvent) -> None:
            seen.append(event.payload)
            if event.payload == "inside":
                await eventually(lambda: end_unseen(observer, proxy))

        async def is_empty() -> bool:
            return not await admin.fetchval(f"select exists (select from {OUTBOX})")

        async with drainer:
            await write(gateway, "inside", kind="order")
            await eventually(is_empty)
            await eventually(lambda: end_unseen(observer, proxy))
            await write(gateway, "after", kind="order")
            await eventually(is_empty)
    assert seen == ["inside", "after"]
    no_traceback(caplog)


async def test_a_try_whose_proof_loses_its_connection_tells_why(database: TestDatabase) -> None:
    """The driver's pool takes such a connection back by itself, and it is nobody's any more that could be cut."""
    dsn = database.gateway_dsn
    async with (
        TcpProxy.before(dsn, reads_along=True) as proxy,
        Database(proxy.dsn(dsn), min_size=0, max_size=1, connect_timeout=5.0) as pool,
    ):
        pace_of(proxy.dsn(dsn)).suspect()
        cut = proxy.cut_answer("select 1")
        with pytest.raises(DatabaseUnavailableError, match="closed in the middle"):
            await pool.execute("select 2")
        assert cut.is_set()
        assert await pool.execute("select 3") == [(3,)]


@pytest.mark.parametrize(
    ("login", "command"),
    [
        ("gateway", "jobs list acme"),
        ("admin", f"db grant {WORKER_LOGIN} --as worker --tenant acme --relay erp"),
    ],
)
async def test_a_command_whose_session_is_over_ends_with_its_code_and_no_traceback(
    database: TestDatabase, login: str, command: str
) -> None:
    """After each of the answers that it is given, until it has all that it needs."""
    dsn = database.admin_dsn if login == "admin" else database.gateway_dsn
    async with TcpProxy.before(dsn) as proxy:
        for answer in range(1, 50):
            proxy.ends_session(answer)
            ended = await run_cli(*command.split(), "--dsn", proxy.dsn(dsn))
            if ended.code != 5:
                break
            assert "S2R-" in ended.err
    assert ended.code in (0, 3)
    assert answer > 2
