"""PostgreSQL goes away under load and comes back: nothing accepted is lost, nothing done is done again or called lost.

The audit stands on what the test itself has seen: which enqueues were answered, and the journal that the handlers keep
past the SDK (`tests.support.fleet`).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import anyio.to_thread
import asyncpg
import pytest

from dispatch_core.dev.postgres import DevServer
from dispatch_core.errors import DatabaseUnavailableError
from dispatch_core.models import DispatchStatus
from gateway_sdk import GatewayClient, TenantClient
from relay_sdk import Relay
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.fleet import Journal, relay_process, serve
from tests.support.gateway import open_client
from tests.support.proxy import TcpProxy
from tests.support.relays import new_relay, running

JOBS_PER_SECOND = 200
LEASE_SECONDS = 5.0
WRITE_TIMEOUT_SECONDS = 2.0
RELAY_SETTINGS: dict[str, Any] = {"lease_seconds": LEASE_SECONDS, "poll_seconds": 5.0, "sweep_seconds": 1.0}

# A stop takes a second or two, and an enqueue may wait for a statement that is never answered.
LATE_SECONDS = 2.0


class Load:
    """A gateway's users: so many enqueues a second, of jobs with one attempt, each tried once by its sender."""

    def __init__(self, acme: TenantClient) -> None:
        self.acme = acme
        self.accepted: set[UUID] = set()
        self.refused: list[DatabaseUnavailableError] = []
        self.slowest = 0.0
        self._stopped = anyio.Event()
        self.ended = anyio.Event()

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        async with anyio.create_task_group() as senders:
            at = time.monotonic()
            number = 0
            while not self._stopped.is_set():
                senders.start_soon(self._send, ("0", "0.01", "0.05", "0.3")[number % 4])
                number += 1
                at += 1 / JOBS_PER_SECOND
                await anyio.sleep(max(0.0, at - time.monotonic()))
        self.ended.set()

    async def send_long(self, seconds: float, count: int) -> list[UUID]:
        job_ids = [await self.acme.enqueue("erp", "Work", body=str(seconds)) for _ in range(count)]
        self.accepted.update(job_ids)
        return job_ids

    async def _send(self, seconds: str) -> None:
        began = time.monotonic()
        try:
            self.accepted.add(await self.acme.enqueue("erp", "Work", body=seconds))
        except DatabaseUnavailableError as error:
            self.refused.append(error)
        self.slowest = max(self.slowest, time.monotonic() - began)


async def audit(database: TestDatabase, load: Load, journal: Journal) -> None:
    """I1, I2: every accepted job ended once, started once, and what its handler has ended counts."""
    admin = await asyncpg.connect(database.admin_dsn)
    try:

        async def all_ended() -> bool:
            return not await admin.fetchval("select exists (select from relay.s2r_relay_dispatch_queue)")

        await eventually(all_ended, 20, 0.1, message="the end of every job")
        rows = await admin.fetch(
            "select q.job_id, r.status, r.attempt, r.error_code from relay.s2r_relay_dispatch_request q"
            " left join relay.s2r_relay_dispatch_result r on r.tenant_id = q.tenant_id and r.job_id = q.job_id"
        )
    finally:
        await admin.close()
    stored = {row["job_id"]: row for row in rows}
    assert len(stored) == len(rows)
    assert load.accepted <= stored.keys(), "accepted and lost"
    assert all(row["status"] is not None for row in rows), "stored and never ended"
    # An enqueue that was refused may have been stored all the same; its error names the id.
    assert stored.keys() - load.accepted <= {error.job_id for error in load.refused}

    starts = Counter(entry.job_id for entry in journal.entries("began"))
    assert max(starts.values()) == 1, "started twice with one attempt"
    done = {entry.job_id for entry in journal.entries("ended")}
    lost = {job_id for job_id, row in stored.items() if row["error_code"] == "S2R-LEASE-LOST"}
    assert not lost & done, "the handler had ended, and the job was called lost"
    # Every relay lived through it and came back within a lease, so nothing was lost at all.
    assert Counter(row["status"] for row in rows) == {"succeeded": len(rows)}
    assert done == stored.keys()


async def answers_by_notify(client: GatewayClient, *relays: Relay) -> None:
    """Hold that wake-ups and results do not come by polling (any more)."""
    await eventually(
        lambda: client.health().state == "listening" and all(r.health().listener == "listening" for r in relays),
        15,
        message="everybody listening",
    )
    acme = client.tenant("acme")

    async def a_round_goes_by_notify() -> bool:
        pushed, polled = client.health().wakes_by_push, [relay.metrics.wakeups_by_poll for relay in relays]
        began = time.monotonic()
        for _ in range(20):
            assert (await acme.call("erp", "Work", body="0", timeout=10)).status is DispatchStatus.SUCCEEDED
        return (
            client.health().wakes_by_push - pushed == 20
            and [relay.metrics.wakeups_by_poll for relay in relays] == polled
            and time.monotonic() - began < 5
        )

    # A process whose pooled connections were cut may lose its first ring.
    await eventually(a_round_goes_by_notify, 40, message="wake-ups and results by notify")


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
        await eventually(lambda: len(journal.entries("ended")) > 2 * JOBS_PER_SECOND, 20)
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
        assert len(load.refused) - began > 20 * JOBS_PER_SECOND
        await anyio.to_thread.run_sync(durable_server.start)
        accepted = len(load.accepted)
        await eventually(lambda: len(load.accepted) > accepted + 2 * JOBS_PER_SECOND, 20)
        load.stop()
        assert load.slowest < WRITE_TIMEOUT_SECONDS + LATE_SECONDS
        for job_id in (*during, *after):
            assert (await acme.wait(job_id, timeout=20)).status is DispatchStatus.SUCCEEDED
        await audit(durable_database, load, journal)
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
        async with running(here), open_client(dsn) as client, anyio.create_task_group() as tasks:
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
            with anyio.fail_after(20):
                await load.ended.wait()
            assert load.refused == []
            await audit(database, load, journal)
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
            accepted, connects = len(load.accepted), way.accepted
            await eventually(lambda: len(load.accepted) > accepted + 2 * JOBS_PER_SECOND, 8)
            refused = len(load.refused)
            await eventually(lambda: len(load.accepted) > accepted + 4 * JOBS_PER_SECOND, 8)
            assert len(load.refused) == refused
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
    here = serve(new_relay(durable_database, **RELAY_SETTINGS), journal)
    async with (
        relay_process(durable_database.worker_dsn, journal, "erp", "acme", **RELAY_SETTINGS),
        running(here),
        open_client(durable_database.gateway_dsn) as client,
        anyio.create_task_group() as tasks,
    ):
        load = Load(client.tenant("acme"))
        tasks.start_soon(load.run)
        for _ in range(2):
            ended = len(journal.entries("ended"))
            await eventually(lambda: len(journal.entries("ended")) > ended + 2 * JOBS_PER_SECOND, 20)  # noqa: B023
            await anyio.to_thread.run_sync(durable_server.restart, "immediate")
        ended = len(journal.entries("ended"))
        await eventually(lambda: len(journal.entries("ended")) > ended + 2 * JOBS_PER_SECOND, 20)
        load.stop()
        # Ten seconds are given to an enqueue, and a restart takes less.
        assert load.refused == []
        await audit(durable_database, load, journal)
        await answers_by_notify(client, here)
    journal.close()
