"""PostgreSQL goes away under load and comes back: nothing accepted is lost, nothing done is repeated or called lost."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import anyio.to_thread
import pytest

from dispatch_core.dev.postgres import DevServer
from dispatch_core.errors import DatabaseUnavailableError
from dispatch_core.models import DispatchStatus
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.fleet import Journal, relay_process, serve
from tests.support.gateway import open_client
from tests.support.load import JOBS_PER_SECOND, Load, answers_by_notify, audit
from tests.support.patience import held_up
from tests.support.proxy import TcpProxy
from tests.support.relays import new_relay, running

LEASE_SECONDS = 5.0
WRITE_TIMEOUT_SECONDS = 2.0
RELAY_SETTINGS: dict[str, Any] = {"lease_seconds": LEASE_SECONDS, "poll_seconds": 5.0, "sweep_seconds": 1.0}

# After its own limit a call is at its end, and not when the outage is: that is far from here. What lies between is what
# a busy machine takes.
LATE_SECONDS = 10.0
# So long has our process to stand in two seconds of load before a call of those may be late by the machine's fault.
BUSY_SECONDS = 0.5


async def refused(call: Callable[[], Awaitable[object]], job_id: UUID | None, within: float) -> None:
    """Hold that a call fails in time with an error that says so: retryable, ours, with the job's id."""
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailableError) as caught:
        await call()
    assert time.monotonic() - began < within
    assert caught.value.retryable
    assert caught.value.code in ("S2R-DATABASE-UNAVAILABLE", "S2R-CONNECTION-LOST")
    if job_id is None:
        assert caught.value.job_id is not None
    else:
        assert caught.value.job_id == job_id


@pytest.mark.slow
@pytest.mark.invariant("I1")
@pytest.mark.invariant("I6")
@pytest.mark.case("C02")
async def test_an_outage_of_30_seconds_under_load_loses_nothing_and_repeats_nothing(
    durable_server: DevServer, durable_database: TestDatabase, tmp_path: Path
) -> None:
    """I1, I2, I6: stopped for six leases under 200 jobs/s; every accepted enqueue ends once; calls fail clearly."""
    journal = Journal(tmp_path / "journal")
    here = serve(new_relay(durable_database, **RELAY_SETTINGS), journal)
    async with (
        relay_process(durable_database.worker_dsn, journal, "erp", "acme", **RELAY_SETTINGS),
        running(here),
        open_client(
            durable_database.gateway_dsn, write_timeout_seconds=WRITE_TIMEOUT_SECONDS, poll_timeout_seconds=2.0
        ) as client,
        anyio.create_task_group() as tasks,
    ):
        acme = client.tenant("acme")
        load = Load(acme)
        tasks.start_soon(load.run)
        await eventually(lambda: len(journal.entries("ended")) > 2 * JOBS_PER_SECOND)
        # Some end during the outage, and some after it.
        during = await load.send_long(6.0, 10)
        after = await load.send_long(33.0, 10)
        await eventually(lambda: {entry.job_id for entry in journal.entries("began")} >= {*during, *after})

        down_at = time.monotonic()
        await anyio.to_thread.run_sync(durable_server.stop)
        began = len(load.refused)
        waited_for = after[0]
        async with anyio.create_task_group() as calls:
            calls.start_soon(refused, lambda: acme.enqueue("erp", "Work"), None, WRITE_TIMEOUT_SECONDS + LATE_SECONDS)
            calls.start_soon(
                refused,
                lambda: acme.enqueue("erp", "Work", idempotency_key="k"),
                None,
                WRITE_TIMEOUT_SECONDS + LATE_SECONDS,
            )
            calls.start_soon(refused, lambda: acme.call("erp", "Work", timeout=1.0), None, 1.0 + LATE_SECONDS)
            calls.start_soon(refused, lambda: acme.poll_status(waited_for), waited_for, 2.0 + LATE_SECONDS)
            calls.start_soon(refused, lambda: acme.wait(waited_for, timeout=3.0), waited_for, 3.0 + LATE_SECONDS)
            calls.start_soon(
                refused, lambda: acme.mark_expired(waited_for), waited_for, WRITE_TIMEOUT_SECONDS + LATE_SECONDS
            )
        assert client.health().state == "degraded"
        assert here.health().status == "degraded"

        await anyio.sleep(max(0.0, down_at + 30 - time.monotonic()))
        assert {entry.job_id for entry in journal.entries("ended")} >= set(during)
        assert len(load.refused) - began > 5 * JOBS_PER_SECOND, "there was no load"
        await anyio.to_thread.run_sync(durable_server.start)
        accepted = len(load.accepted)
        await eventually(lambda: len(load.accepted) > accepted + 2 * JOBS_PER_SECOND)
        load.stop()
        assert load.slowest < WRITE_TIMEOUT_SECONDS + LATE_SECONDS
        for job_id in (*during, *after):
            assert (await acme.wait(job_id, timeout=20)).status is DispatchStatus.SUCCEEDED
        await audit(durable_database.admin_dsn, load, journal)
        await answers_by_notify(client, here)
    journal.close()


@pytest.mark.slow
@pytest.mark.invariant("I1")
@pytest.mark.case("C01")
async def test_connections_that_are_cut_and_stall_under_load_lose_nothing_and_repeat_nothing(
    database: TestDatabase, tmp_path: Path
) -> None:
    """I1, I2: the gateway and the relays each have a network of their own that breaks now and then, at any moment."""
    journal = Journal(tmp_path / "journal")
    chance = random.Random(7)
    async with (
        TcpProxy.before(database.worker_dsn) as relays_way,
        TcpProxy.before(database.gateway_dsn) as gateways_way,
        relay_process(relays_way.dsn(database.worker_dsn), journal, "erp", "acme", **RELAY_SETTINGS),
    ):
        here = serve(new_relay(relays_way.dsn(database.worker_dsn), **RELAY_SETTINGS), journal)
        dsn = gateways_way.dsn(database.gateway_dsn)
        async with (
            running(here),
            open_client(dsn, write_timeout_seconds=60) as client,
            anyio.create_task_group() as tasks,
        ):
            load = Load(client.tenant("acme"))
            tasks.start_soon(load.run)
            until = time.monotonic() + 12
            while time.monotonic() < until:
                await anyio.sleep(chance.uniform(0.05, 0.5))
                way = chance.choice([relays_way, gateways_way])
                match chance.choice(["all", "one", "one", "stall"]):
                    case "all":
                        way.reset_all()
                    case "one":
                        for connection in way.connections[:1]:
                            connection.mode = "reset"
                    case "stall":
                        for connection in chance.sample(way.connections, len(way.connections) // 2):
                            connection.mode = "black_hole"
            relays_way.reset_all()
            gateways_way.reset_all()
            load.stop()
            # A job is stored before its sender is told, who may have to ask again.
            with anyio.fail_after(70):
                await load.ended.wait()
            assert load.refused == []
            await audit(database.admin_dsn, load, journal)
            await answers_by_notify(client, here)
    journal.close()


@pytest.mark.slow
async def test_a_gateway_on_a_slow_link_is_well_again_as_soon_as_an_outage_is_over(database: TestDatabase) -> None:
    """What gathers behind an outage is not tried again with less time than a statement takes there."""
    async with TcpProxy.before(database.gateway_dsn, delay_seconds=0.05) as way:
        way.mode = "delay"
        dsn = way.dsn(database.gateway_dsn)
        async with (
            open_client(dsn, write_timeout_seconds=WRITE_TIMEOUT_SECONDS) as client,
            anyio.create_task_group() as tasks,
        ):
            load = Load(client.tenant("acme"))
            tasks.start_soon(load.run)
            await eventually(lambda: len(load.accepted) > JOBS_PER_SECOND)
            way.mode = "black_hole"
            await eventually(lambda: len(load.refused) > 2 * JOBS_PER_SECOND)
            way.mode = "delay"
            accepted, connects, is_well = len(load.accepted), way.accepted, False
            await eventually(lambda: len(load.accepted) > accepted + 2 * JOBS_PER_SECOND)
            while not is_well:
                accepted, refused, stood = len(load.accepted), len(load.refused), held_up()
                await eventually(lambda: len(load.accepted) > accepted + 2 * JOBS_PER_SECOND)  # noqa: B023
                is_well = len(load.refused) == refused
                # Where a machine has no time for us, it may have had none for a batch and the server either.
                assert is_well or held_up() - stood > BUSY_SECONDS
            assert way.accepted - connects <= 10
            assert load.slowest < WRITE_TIMEOUT_SECONDS + LATE_SECONDS
            load.stop()


@pytest.mark.slow
@pytest.mark.invariant("I1")
async def test_a_crash_under_load_loses_nothing_that_was_accepted_and_repeats_nothing(
    durable_server: DevServer, durable_database: TestDatabase, tmp_path: Path
) -> None:
    """I1, I2: the server dies without a checkpoint, twice, and is started again at once."""
    journal = Journal(tmp_path / "journal")
    # No lease may run out while the server is away, however long this machine takes to start it again.
    settings = {**RELAY_SETTINGS, "lease_seconds": 120.0}
    here = serve(new_relay(durable_database, **settings), journal)
    async with (
        relay_process(durable_database.worker_dsn, journal, "erp", "acme", **settings),
        running(here),
        open_client(durable_database.gateway_dsn, write_timeout_seconds=60) as client,
        anyio.create_task_group() as tasks,
    ):
        load = Load(client.tenant("acme"))
        tasks.start_soon(load.run)
        for _ in range(2):
            ended = len(journal.entries("ended"))
            await eventually(lambda: len(journal.entries("ended")) > ended + 2 * JOBS_PER_SECOND)  # noqa: B023
            await anyio.to_thread.run_sync(durable_server.restart, "immediate")
        ended = len(journal.entries("ended"))
        await eventually(lambda: len(journal.entries("ended")) > ended + 2 * JOBS_PER_SECOND)
        load.stop()
        # An enqueue has a minute, and a restart takes less on any machine.
        assert load.refused == []
        await audit(durable_database.admin_dsn, load, journal)
        await answers_by_notify(client, here)
    journal.close()
