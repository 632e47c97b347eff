"""As test_shutdown.py, for what is idle, for chunks, for a drainer by itself, for durable jobs, and for commands."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID

import anyio
import pytest

from dispatch_core.dev.postgres import DevServer
from dispatch_core.errors import RelayDispatchError
from dispatch_core.models import DispatchStatus
from dispatch_core.outbox import Outbox, OutboxSettings
from gateway_sdk import GatewayClient, OutboxDrainer
from relay_sdk import ChunkContext, DispatchJob, run_relays
from tests.support.chunks import KIND, Work, chunk_relay
from tests.support.cli import COMMAND, environment, interruptible
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import settings_for
from tests.support.patience import still, watching, within
from tests.support.proxy import TcpProxy
from tests.support.relays import TENANT, Jobs, new_relay
from tests.support.shutdown import BEYOND_SECONDS, FAR, GRACE_SECONDS, How, gateway_at, nothing_left, take_away

pytestmark = [
    pytest.mark.invariant("I9"),
    pytest.mark.case("C30"),
    pytest.mark.parametrize("how", ["black_hole", "stopped"]),
]


async def test_what_is_idle_closes_in_time_before_anybody_has_noticed(
    durable_server: DevServer, durable_database: TestDatabase, caplog: pytest.LogCaptureFixture, how: How
) -> None:
    """Relay, client and drainer, with nothing to wait for but their good-byes: one after the other is too long."""
    grace = GRACE_SECONDS / 2
    caplog.set_level(logging.DEBUG, "asyncio")
    async with TcpProxy.before(durable_database.worker_dsn) as way:
        with nothing_left(caplog):
            relay = new_relay(way.dsn(durable_database.worker_dsn), grace_seconds=GRACE_SECONDS, lease_seconds=60.0)

            @relay.fallback
            async def nothing(job: DispatchJob) -> None: ...

            dsn = way.dsn(durable_database.gateway_dsn)
            drainer = OutboxDrainer(dsn, settings=_drains(grace), tenants=[TENANT])

            @drainer.sink("told")
            async def sink(event: object) -> None: ...

            client = GatewayClient(settings=settings_for(dsn, close_timeout_seconds=grace))
            leave = anyio.Event()

            async def live(what: Any, opened: anyio.Event) -> float:
                async with what:
                    opened.set()
                    await leave.wait()
                    began = still()
                return still() - began

            running = asyncio.create_task(run_relays([relay]))
            living = []
            for what in (drainer, client):
                opened = anyio.Event()
                living.append(asyncio.create_task(live(what, opened)))
                await opened.wait()
            await eventually(lambda: relay.health().status == "ok" and client.health().state == "listening")
            # With its first claim still on the way it would not be idle, and would have its grace.
            await eventually(lambda: relay.metrics.claims_empty)
            await take_away(how, way, durable_server)
            with within(BEYOND_SECONDS):
                relay.stop()
                await running
            leave.set()
            for task in living:
                assert await task < grace + BEYOND_SECONDS


async def test_a_relay_whose_claim_is_on_its_way_stops_in_time(
    durable_server: DevServer, durable_database: TestDatabase, caplog: pytest.LogCaptureFixture, how: How
) -> None:
    caplog.set_level(logging.DEBUG, "asyncio")
    async with TcpProxy.before(durable_database.worker_dsn) as way, gateway_at(durable_database) as gateway:
        with nothing_left(caplog):
            relay = new_relay(way.dsn(durable_database.worker_dsn), grace_seconds=GRACE_SECONDS, **FAR)

            @relay.fallback
            async def nothing(job: DispatchJob) -> None: ...

            running = asyncio.create_task(run_relays([relay]))
            await eventually(lambda: relay.health().status == "ok" and relay.metrics.claims)
            job_id = await Jobs(gateway).enqueue(max_attempts=2, ttl=3600)
            await Jobs(gateway).end(job_id)
            await take_away(how, way, durable_server)
            # By its poll it begins another claim, which has no answer; or, with the server gone, an error.
            await anyio.sleep(0.5)
            with within(GRACE_SECONDS + BEYOND_SECONDS):
                relay.stop()
                await running


@pytest.mark.parametrize("noticed", [False, True], ids=["at-once", "noticed"])
async def test_a_relay_with_chunk_handlers_stops_within_its_grace_and_leaves_nothing(
    durable_server: DevServer,
    durable_database: TestDatabase,
    caplog: pytest.LogCaptureFixture,
    how: How,
    noticed: bool,
) -> None:
    """With handlers that run on, one that waits for its checkpoint, one in a transaction, ends that are not written."""
    caplog.set_level(logging.DEBUG, "asyncio")
    async with TcpProxy.before(durable_database.worker_dsn) as way, gateway_at(durable_database) as gateway:
        relay = chunk_relay(
            way.dsn(durable_database.worker_dsn),
            durable={"lease_seconds": 60.0},
            grace_seconds=GRACE_SECONDS,
            poll_seconds=0.2,
        )
        go_on = asyncio.Event()
        began = 0

        @relay.chunk_handler(KIND)
        async def handle(ctx: ChunkContext) -> None:
            nonlocal began
            began += 1
            match ctx.seq % 4:
                case 0:
                    await anyio.sleep(600)
                case 1:
                    await go_on.wait()
                    await ctx.save_checkpoint("far")
                case 2:
                    async with ctx.transaction() as conn:
                        await conn.execute("select 1")
                        await go_on.wait()
                        await conn.execute("select 2")
                case 3:
                    await go_on.wait()

        with nothing_left(caplog):
            run = asyncio.create_task(run_relays([relay]))
            await eventually(lambda: relay.health().status == "ok")
            await Work(gateway).submit(8)
            await eventually(lambda: began == 8)
            await take_away(how, way, durable_server)
            go_on.set()
            if noticed:
                await eventually(lambda: relay.health().database == "unavailable", 60, message="noticed:")
            with within(GRACE_SECONDS + BEYOND_SECONDS):
                relay.stop()
                await run
        assert relay.health().status == "stopped"


async def test_a_drainer_by_itself_closes_in_time(
    durable_server: DevServer, durable_database: TestDatabase, caplog: pytest.LogCaptureFixture, how: How
) -> None:
    """With a sink that runs, one that has ended and is not settled, and a sink that is slow to close."""
    caplog.set_level(logging.DEBUG, "asyncio")
    async with TcpProxy.before(durable_database.gateway_dsn) as way, gateway_at(durable_database) as gateway:
        with nothing_left(caplog):
            drainer = OutboxDrainer(way.dsn(durable_database.gateway_dsn), settings=_drains(), tenants=[TENANT])
            sinking, go_on = anyio.Event(), anyio.Event()

            class Sink:
                async def __call__(self, event: Any) -> None:
                    sinking.set()
                    await go_on.wait()
                    if event.payload % 2:
                        await anyio.sleep(600)

                async def aclose(self) -> None:
                    await anyio.sleep(600)

            drainer.add_sink("told", Sink())
            leave, opened = anyio.Event(), anyio.Event()

            async def live() -> float:
                async with drainer:
                    opened.set()
                    await leave.wait()
                    began = still()
                return still() - began

            living = asyncio.create_task(live())
            await opened.wait()
            async with gateway.transaction():
                for number in range(50):
                    await Outbox.enqueue(gateway, "told", number, tenant=TENANT)
            await sinking.wait()
            await take_away(how, way, durable_server)
            go_on.set()
            leave.set()
            assert await living < GRACE_SECONDS + BEYOND_SECONDS


async def test_a_client_with_durable_jobs_under_way_closes_in_time(
    durable_server: DevServer, durable_database: TestDatabase, caplog: pytest.LogCaptureFixture, how: How
) -> None:
    """Every submission, watch, wait, look and decision ends, with an error of ours."""
    caplog.set_level(logging.DEBUG, "asyncio")
    async with TcpProxy.before(durable_database.gateway_dsn) as way:
        with nothing_left(caplog):
            client = GatewayClient(
                settings=settings_for(
                    way.dsn(durable_database.gateway_dsn),
                    close_timeout_seconds=GRACE_SECONDS,
                    sweep_interval_seconds=0.2,
                    poll_interval_seconds=0.2,
                )
            )
            opened, leave = anyio.Event(), anyio.Event()

            async def live() -> float:
                async with client:
                    opened.set()
                    await leave.wait()
                    began = still()
                return still() - began

            living = asyncio.create_task(live())
            await opened.wait()
            durable = client.tenant(TENANT).durable
            job_id = await durable.submit(KIND, [1])
            outcomes: list[BaseException | None] = []
            under_way = 0

            async def end(call: Callable[[], Awaitable[object]]) -> None:
                nonlocal under_way
                under_way += 1
                try:
                    await call()
                except RelayDispatchError as error:
                    outcomes.append(error)
                else:
                    outcomes.append(None)

            async def chunks() -> AsyncGenerator[int]:
                number = 0
                while True:
                    yield number
                    number += 1
                    await anyio.sleep(0.01)

            async def watch() -> None:
                async for _ in durable.watch(job_id):
                    pass

            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: durable.wait(job_id),
                watch,
                lambda: durable.submit(KIND, chunks()),
            ]
            during: list[Callable[[], Awaitable[object]]] = [
                lambda: durable.status(job_id),
                lambda: durable.pause(job_id),
                lambda: durable.submit(KIND, [1, 2]),
            ]
            async with anyio.create_task_group() as group:
                for call in calls * 3:
                    group.start_soon(end, call)
                await eventually(lambda: under_way == len(calls) * 3)
                await anyio.sleep(0.2)
                await take_away(how, way, durable_server)
                for call in during * 3:
                    group.start_soon(end, call)
                await eventually(lambda: under_way == len(calls + during) * 3)
                leave.set()
                assert await living < GRACE_SECONDS + BEYOND_SECONDS
                # Whoever called is told by then, and does not go on trying.
                with within(1.0):
                    await eventually(lambda: len(outcomes) == under_way)
            assert all(outcome is not None for outcome in outcomes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["wait", "watch", "drain", "run"])
async def test_a_command_ends_in_time_at_a_signal(
    durable_server: DevServer,
    durable_database: TestDatabase,
    how: How,
    command: str,
    number: signal.Signals,
    tmp_path: Any,
) -> None:
    """In Python's development mode, without a traceback or a word of what is left."""
    (tmp_path / "some_relays.py").write_text(
        "from relay_sdk import Relay\n"
        "erp = Relay('erp', tenants=['acme'])\n"
        "@erp.handler('Long')\n"
        "async def long(job):\n"
        "    import anyio\n"
        "    await anyio.sleep(600)\n"
    )
    async with (
        AsyncExitStack() as stack,
        TcpProxy.before(durable_database.gateway_dsn) as way,
        gateway_at(durable_database) as gateway,
    ):
        job_id = await Jobs(gateway).enqueue("Long", ttl=3600, max_attempts=2)
        durable_id = await Work(gateway).submit(1)
        dsn = way.dsn(durable_database.worker_dsn if command == "run" else durable_database.gateway_dsn)
        arguments = {
            "wait": ["jobs", "wait", "acme", str(job_id)],
            "watch": ["durable", "watch", str(durable_id)],
            "drain": ["outbox", "drain", "--watch", "--tenant", "acme"],
            "run": ["relay", "run", "some_relays:erp"],
        }[command]
        env = environment(
            RELAY_DISPATCH_DSN=dsn,
            RELAY_GRACE_SECONDS=str(GRACE_SECONDS),
            GATEWAY_CLOSE_TIMEOUT_SECONDS=str(GRACE_SECONDS),
            OUTBOX_STOP_TIMEOUT_SECONDS=str(GRACE_SECONDS),
            OUTBOX_ROUTES=json.dumps({"told": {"relay": "erp", "operation": "Tell"}}),
            PYTHONDEVMODE="1",
        )
        with interruptible():
            process = await anyio.open_process([*COMMAND, *arguments], env=env, cwd=os.fspath(tmp_path))
        stack.push_async_callback(process.aclose)
        stack.callback(lambda: process.returncode is None and process.kill())
        said = b""

        async def read(stream: Any) -> None:
            nonlocal said
            async for part in stream:
                said += part

        async with anyio.create_task_group() as group:
            group.start_soon(read, process.stdout)
            group.start_soon(read, process.stderr)
            listens = "select count(*) from pg_stat_activity where application_name like '%listener%' and datname = $1"
            await eventually(lambda: gateway.fetchval(listens, durable_database.name), 60)
            if command == "wait":
                # It listens before it has started; and then it ends by itself when there is no server.
                polls = "select count(*) from pg_stat_activity where query like '%relay.poll%' and datname = $1"
                polls += " and pid <> pg_backend_pid()"
                await eventually(lambda: gateway.fetchval(polls, durable_database.name), 60)
            if command == "run":
                await eventually(lambda: _is_claimed(gateway, job_id), 60)
            await take_away(how, way, durable_server)
            with watching(process.pid) as watch:
                # With the server stopped it may end with that error, before the signal has come.
                if how != "stopped" or process.returncode is None:
                    process.send_signal(number)
                with anyio.fail_after(60):
                    await process.wait()
            assert watch.waited < GRACE_SECONDS + BEYOND_SECONDS
    text = said.decode()
    for word in ("Warning", "never retrieved", "never awaited", "was destroyed", "Traceback"):
        assert word not in text, text
    if command in ("wait", "watch") and how == "black_hole":
        assert process.returncode == 128 + number, text


async def _is_claimed(gateway: Any, job_id: UUID) -> bool:
    return await Jobs(gateway).status(job_id) is DispatchStatus.CLAIMED


def _drains(grace: float = GRACE_SECONDS) -> OutboxSettings:
    return OutboxSettings(drain_interval_sec=0.2, stop_timeout_seconds=grace)
