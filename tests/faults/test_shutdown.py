"""The database is gone, and whoever uses it is told to stop: it does, in time, and leaves nothing behind.

Gone in each of the ways that a client can meet: packets vanish, connections are cut and refused, the server stops in
good order, the server dies. And at each of two moments: before anybody has noticed, and long after.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

import anyio
import pytest

from dispatch_core.dev.postgres import DevServer
from dispatch_core.errors import RelayDispatchError
from dispatch_core.outbox import Outbox, OutboxSettings
from gateway_sdk import GatewayClient, OutboxDrainer
from relay_sdk import DispatchJob, Reply, run_relays
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import settings_for
from tests.support.patience import still, within
from tests.support.proxy import TcpProxy
from tests.support.relay_process import relay_process
from tests.support.relays import Jobs, new_relay
from tests.support.shutdown import BEYOND_SECONDS, FAR, GRACE_SECONDS, How, gateway_at, nothing_left, take_away

pytestmark = [
    pytest.mark.invariant("I9"),
    pytest.mark.case("C30"),
    pytest.mark.parametrize("how", ["black_hole", "reset", "stopped", "killed"]),
]


@pytest.mark.parametrize("noticed", [False, True], ids=["at-once", "noticed"])
async def test_a_relay_stops_within_its_grace_and_leaves_nothing(
    durable_server: DevServer,
    durable_database: TestDatabase,
    caplog: pytest.LogCaptureFixture,
    how: How,
    noticed: bool,
) -> None:
    """With handlers that run, ends that cannot be written, claims, sweeps and heartbeats under way."""
    caplog.set_level(logging.DEBUG, "asyncio")
    async with TcpProxy.before(durable_database.worker_dsn) as way, gateway_at(durable_database) as gateway:
        jobs = Jobs(gateway)
        relay = new_relay(way.dsn(durable_database.worker_dsn), grace_seconds=GRACE_SECONDS, **FAR)
        go_on = asyncio.Event()
        began = 0

        @relay.handler("Long")
        async def long(job: DispatchJob) -> Reply:
            nonlocal began
            began += 1
            await anyio.sleep(600)
            return Reply()

        @relay.handler("Ends")
        async def ends(job: DispatchJob) -> Reply:
            nonlocal began
            began += 1
            await go_on.wait()
            return Reply(b"cannot be written")

        with nothing_left(caplog):
            run = asyncio.create_task(run_relays([relay]))
            await eventually(lambda: relay.health().status == "ok", 30)
            await jobs.enqueue_many(5, "Long", max_attempts=2, ttl=3600)
            await jobs.enqueue_many(5, "Ends", ttl=3600)
            await eventually(lambda: began == 10, 30)
            await take_away(how, way, durable_server)
            go_on.set()
            if noticed:
                await eventually(lambda: relay.health().database == "unavailable", 30, message="noticed:")
            with within(GRACE_SECONDS + BEYOND_SECONDS):
                relay.stop()
                await run
        assert relay.health().status == "stopped"
        assert "jobs to their leases" in caplog.text


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
async def test_a_relay_process_leaves_at_sigterm_without_a_word_too_many(
    durable_server: DevServer,
    durable_database: TestDatabase,
    monkeypatch: pytest.MonkeyPatch,
    how: How,
    uvloop: bool,
) -> None:
    """Exit code 0, in Python's development mode, which warns of all that is left open, pending or never awaited."""
    monkeypatch.setenv("PYTHONDEVMODE", "1")
    async with (
        TcpProxy.before(durable_database.worker_dsn) as way,
        gateway_at(durable_database) as gateway,
        relay_process(way.dsn(durable_database.worker_dsn), uvloop=uvloop, grace_seconds=GRACE_SECONDS, **FAR) as relay,
    ):
        jobs = Jobs(gateway)
        await jobs.enqueue_many(3, "Sleep", body=b"600", max_attempts=2, ttl=3600)
        await jobs.enqueue("Sleep", body=b"0.3")
        await eventually(lambda: len(relay.started()) == 4, 30)
        await take_away(how, way, durable_server)
        await eventually(lambda: any(line.startswith("ended") for line in relay.lines), 30)
        began = still(relay.process.pid)
        relay.signal(signal.SIGTERM)
        assert await relay.exit() == 0
        assert relay.ended_at - began < GRACE_SECONDS + BEYOND_SECONDS
    for word in ("Warning", "never retrieved", "never awaited", "was destroyed", "Traceback"):
        assert word not in relay.log, relay.log
    assert "jobs to their leases" in relay.log


@pytest.mark.parametrize("noticed", [False, True], ids=["at-once", "noticed"])
async def test_a_gateway_closes_in_time_and_every_call_ends_with_an_error_of_ours(
    durable_server: DevServer,
    durable_database: TestDatabase,
    caplog: pytest.LogCaptureFixture,
    how: How,
    noticed: bool,
) -> None:
    """With enqueues, keyed ones, waits, calls, polls, withdrawals, sweeps and an outbox drainer under way."""
    caplog.set_level(logging.DEBUG, "asyncio")
    async with TcpProxy.before(durable_database.gateway_dsn) as way, gateway_at(durable_database) as observer:
        with nothing_left(caplog):
            drainer = OutboxDrainer(
                settings=OutboxSettings(drain_interval_sec=0.2, stop_timeout_seconds=GRACE_SECONDS), tenants=["acme"]
            )
            sinking = anyio.Event()

            @drainer.sink("told")
            async def sink(event: object) -> None:
                sinking.set()
                await anyio.sleep(0.2)

            settings = settings_for(
                way.dsn(durable_database.gateway_dsn),
                close_timeout_seconds=GRACE_SECONDS,
                sweep_interval_seconds=0.2,
                poll_interval_seconds=0.2,
            )
            client = GatewayClient(settings=settings, outbox=drainer)
            opened, leave = anyio.Event(), anyio.Event()

            async def live() -> None:
                async with client:
                    opened.set()
                    await leave.wait()

            living = asyncio.create_task(live())
            await opened.wait()
            acme = client.tenant("acme")
            job_id = await acme.enqueue("nobody", "Work", ttl=3600)
            async with observer.transaction():
                for number in range(50):
                    await Outbox.enqueue(observer, "told", number, tenant="acme")
            outcomes: list[BaseException | None] = []

            async def end(call: Callable[[], Awaitable[object]]) -> None:
                try:
                    await call()
                except RelayDispatchError as error:
                    outcomes.append(error)
                else:
                    outcomes.append(None)

            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: acme.wait(job_id),
                lambda: acme.call("nobody", "Work", timeout=600),
                lambda: acme.call("nobody", "Work", timeout=600, idempotency_key="k"),
            ]
            during: list[Callable[[], Awaitable[object]]] = [
                lambda: acme.enqueue("nobody", "Work"),
                lambda: acme.enqueue("nobody", "Work", idempotency_key="other"),
                lambda: acme.poll_status(job_id),
                lambda: acme.mark_expired(job_id),
                lambda: acme.wait(job_id),
            ]
            async with anyio.create_task_group() as group:
                for call in calls * 5:
                    group.start_soon(end, call)
                await eventually(lambda: client.health().waiting >= 2, 30)
                await sinking.wait()
                await take_away(how, way, durable_server)
                for call in during * 5:
                    group.start_soon(end, call)
                if noticed:
                    await eventually(lambda: client.health().state == "degraded", 30, message="noticed:")
                # One time for all of it: the drainer that lives with the client has no grace of its own after that.
                with within(GRACE_SECONDS + BEYOND_SECONDS):
                    leave.set()
                    await living
                # Whoever called is told by then, and does not go on trying.
                with within(1.0):
                    await eventually(lambda: len(outcomes) == 5 * (len(calls) + len(during)))
            assert len(outcomes) == 5 * (len(calls) + len(during))
            # Cut off by the close, or told before of the database; nobody was told anything invented.
            assert all(outcome is not None for outcome in outcomes)


async def test_a_start_that_cannot_be_ends_in_time_and_leaves_nothing(
    durable_server: DevServer, durable_database: TestDatabase, caplog: pytest.LogCaptureFixture, how: How
) -> None:
    """A gateway that is cancelled while it connects, and a relay that is stopped while it does."""
    caplog.set_level(logging.DEBUG, "asyncio")
    async with TcpProxy.before(durable_database.worker_dsn) as way:
        await take_away(how, way, durable_server)
        with nothing_left(caplog):
            client = GatewayClient(settings=settings_for(way.dsn(durable_database.gateway_dsn)))
            with within(0.3 + BEYOND_SECONDS), anyio.move_on_after(0.3), pytest.raises(RelayDispatchError):
                await client.__aenter__()
            relay = new_relay(way.dsn(durable_database.worker_dsn), **FAR)

            @relay.fallback
            async def nothing(job: DispatchJob) -> None: ...

            starting = asyncio.create_task(run_relays([relay]))
            await eventually(lambda: way.accepted >= 2 or starting.done(), 30)
            with within(BEYOND_SECONDS):
                relay.stop()
                try:
                    await starting
                except RelayDispatchError:
                    pass  # it was told before the stop
