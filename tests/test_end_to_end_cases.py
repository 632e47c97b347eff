"""Limits that show only in production, through both SDKs: notifications per burst (C07), sizes (C08), names (C09)."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from uuid import UUID

import anyio
import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import InvalidBodyError, InvalidNameError
from dispatch_core.models import DispatchStatus
from gateway_sdk import DispatchRequest
from relay_sdk import DispatchJob, Relay, Reply
from tests.conftest import Connection
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually, never
from tests.support.gateway import open_client
from tests.support.relays import new_relay, running

SUCCEEDED = DispatchStatus.SUCCEEDED
HOUR = 3600.0
MIB = 1024 * 1024


class Ear:
    """A raw listener beside the SDKs: what is notified, by channel."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.heard: dict[str, list[str]] = {}

    async def listen(self, channel: str) -> None:
        self.heard[channel] = []
        await self.connection.add_listener(channel, self._hear)

    def _hear(self, _connection: object, _pid: int, channel: str, payload: object) -> None:
        self.heard[channel].append(str(payload))

    async def settle(self) -> None:
        """Wait until what was notified before now has been heard: a notification of our own comes after it."""
        mark = f"s2r_mark_{len(self.heard)}"
        await self.listen(mark)
        await self.connection.execute(f"notify {mark}")
        await eventually(lambda: len(self.heard[mark]) == 1)


@asynccontextmanager
async def ear(dsn: str) -> AsyncIterator[Ear]:
    connection = await asyncpg.connect(dsn)
    try:
        yield Ear(connection)
    finally:
        connection.terminate()


def echo(relay: Relay) -> Relay:
    @relay.fallback
    async def handler(job: DispatchJob) -> Reply:
        return Reply(job.body, headers={"x-tenant": job.tenant_id, "x-relay": job.relay_id, "x-op": job.operation})

    return relay


def requests(count: int, *relays: str) -> Iterable[DispatchRequest]:
    return (DispatchRequest(relays[n % len(relays)], "Echo", body=str(n)) for n in range(count))


# --- C07: one ring, however many jobs ---------------------------------------------------------------------------------


@pytest.mark.case("C07")
async def test_a_bulk_of_5000_jobs_rings_each_relay_once(database: TestDatabase, worker: Connection) -> None:
    repository = RelayDispatchRepository(worker, "acme")
    async with ear(database.worker_dsn) as ear_, open_client(database.gateway_dsn) as client:
        first, second = [await repository.channel("wake", relay) for relay in ("erp", "archive")]
        await ear_.listen(first)
        await ear_.listen(second)
        assert len(await client.tenant("acme").enqueue_many(requests(5000, "erp", "archive"))) == 5000
        await eventually(lambda: ear_.heard[first] and ear_.heard[second])
        await never(lambda: len(ear_.heard[first]) > 1 or len(ear_.heard[second]) > 1, 0.2)
        assert ear_.heard[first] == ear_.heard[second] == [""]

        await client.tenant("acme").enqueue_many(requests(10, "erp"), notify=False)
        await never(lambda: len(ear_.heard[first]) > 1, 0.2)


@pytest.mark.case("C07")
async def test_any_number_of_enqueues_in_one_transaction_ring_a_relay_once(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    async with ear(database.worker_dsn) as ear_, open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        channel = await RelayDispatchRepository(worker, "acme").channel("wake", "erp")
        await ear_.listen(channel)
        async with gateway.transaction():
            for _ in range(3):
                await acme.enqueue_many(requests(200, "erp"), conn=gateway)
            for _ in range(5):
                await acme.enqueue("erp", "Echo", conn=gateway)
            await acme.enqueue("erp", "Echo", conn=gateway, notify=False)
        await ear_.settle()
        assert ear_.heard[channel] == [""]


@pytest.mark.case("C07")
async def test_a_burst_wakes_a_relay_once_and_its_results_are_pushed_together(
    database: TestDatabase, gateway: Connection
) -> None:
    relay = echo(new_relay(database, poll_seconds=HOUR, sweep_seconds=HOUR, lease_seconds=60.0, concurrency=1000))
    async with (
        ear(database.gateway_dsn) as ear_,
        running(relay),
        open_client(database.gateway_dsn, poll_interval_seconds=HOUR) as client,
    ):
        acme = client.tenant("acme")
        channel = await RelayDispatchRepository(gateway, "acme").channel("result")
        await ear_.listen(channel)
        await eventually(lambda: relay.metrics.claims > 0)
        job_ids = await acme.enqueue_many(requests(5000, "erp"))
        results = [result async for result in acme.as_completed(job_ids, timeout=60)]
        assert Counter(result.status for result in results) == {SUCCEEDED: 5000}
        assert relay.metrics.notifications == 1
        assert relay.metrics.wakeups_by_notify == 1
        await ear_.settle()
        pushed = [UUID(hex=part) for payload in ear_.heard[channel] for part in payload.split(",")]
        assert Counter(pushed) == Counter(job_ids)
        # 25 is the least that 5,000 ids fit in.
        assert len(ear_.heard[channel]) <= 250
        assert max(map(len, ear_.heard[channel])) < 8000


# --- C08: sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.case("C08")
async def test_large_bodies_and_results_go_through_and_ring_with_small_payloads(
    database: TestDatabase, gateway: Connection
) -> None:
    relay = echo(new_relay(database))
    body = bytes(range(256)) * 4096
    assert len(body) == MIB
    operation = "Прийняти замовлення " * 5 + "é"  # 182 bytes
    async with ear(database.admin_dsn) as ear_, running(relay), open_client(database.gateway_dsn) as client:
        for name in (
            await RelayDispatchRepository(gateway, "acme").channel("result"),
            await RelayDispatchRepository(gateway, "acme").channel("wake", "erp"),
        ):
            await ear_.listen(name)
        result = await client.tenant("acme").call("erp", operation, body=body, timeout=20)
        assert result.status is SUCCEEDED
        assert hashlib.sha256(result.response_body or b"").digest() == hashlib.sha256(body).digest()
        assert result.response_headers is not None
        assert result.response_headers["x-op"] == operation
        await ear_.settle()
        payloads = [payload for heard in ear_.heard.values() for payload in heard]
        assert len(payloads) >= 3
        assert all(len(payload) <= 32 for payload in payloads)


@pytest.mark.case("C08")
@pytest.mark.parametrize(
    ("operation", "is_good"),
    [
        ("x" * 200, True),
        ("x" * 201, False),
        ("語" * 66 + "é", True),  # 200 bytes
        ("語" * 67, False),  # 201 bytes
        ("語" * 2000, False),
    ],
    ids=["200 bytes of ASCII", "201 bytes of ASCII", "200 bytes in 67 characters", "201 in 67", "6000 in 2000"],
)
async def test_an_operation_may_have_200_bytes_however_many_characters(
    database: TestDatabase, admin: Connection, operation: str, is_good: bool
) -> None:
    relay = echo(new_relay(database))
    async with open_client(database.gateway_dsn) as client:
        if not is_good:
            with pytest.raises(InvalidNameError):
                await client.tenant("acme").enqueue("erp", operation)
            assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_request") == 0
            return
        async with running(relay):
            result = await client.tenant("acme").call("erp", operation, timeout=20)
        assert result.response_headers is not None
        assert result.response_headers["x-op"] == operation


@pytest.mark.case("C08")
async def test_a_body_and_a_result_at_their_limit_pass_and_above_it_fail_once(database: TestDatabase) -> None:
    relay = new_relay(database, max_result_bytes=1000)

    @relay.handler("Grow")
    async def grow(job: DispatchJob) -> Reply:
        return Reply(b"x" * int(job.body))

    async with running(relay), open_client(database.gateway_dsn, max_body_bytes=1000) as client:
        acme = client.tenant("acme")
        assert (await acme.call("erp", "Grow", body=b"1000".ljust(1000), timeout=20)).status is SUCCEEDED
        with pytest.raises(InvalidBodyError):
            await acme.enqueue("erp", "Grow", body=b"1000".ljust(1001))
        over = await acme.call("erp", "Grow", body="1001", max_attempts=3, timeout=20)
        assert (over.status, over.error_code, over.attempt) == (DispatchStatus.FAILED, "S2R-RESULT-INVALID", 1)


@pytest.mark.case("C08")
async def test_3000_jobs_of_one_transaction_all_succeed(database: TestDatabase, gateway: Connection) -> None:
    relay = echo(new_relay(database, poll_seconds=HOUR, sweep_seconds=HOUR, lease_seconds=60.0))
    async with running(relay), open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        async with gateway.transaction():
            job_ids = await acme.enqueue_many(requests(2000, "erp"), conn=gateway)
            job_ids += [await acme.enqueue("erp", "Echo", body=str(n), conn=gateway) for n in range(2000, 3000)]
        results = {result.job_id: result async for result in acme.as_completed(job_ids, timeout=60)}
    assert [int(results[job_id].response_body or -1) for job_id in job_ids] == list(range(3000))


@pytest.mark.case("C08")
async def test_a_forged_payload_costs_a_claim_and_changes_nothing(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    relay = echo(new_relay(database, poll_seconds=HOUR, sweep_seconds=HOUR, lease_seconds=60.0))
    may_end = anyio.Event()

    @relay.handler("Hold")
    async def hold(job: DispatchJob) -> Reply:
        await may_end.wait()
        return Reply(b"real")

    async with running(relay), open_client(database.gateway_dsn, poll_interval_seconds=HOUR) as client:
        acme = client.tenant("acme")
        await acme.call("erp", "Echo", timeout=10)
        wake = await RelayDispatchRepository(gateway, "acme").channel("wake", "erp")
        result = await RelayDispatchRepository(gateway, "acme").channel("result")
        job_id = await acme.enqueue("erp", "Hold")
        await eventually(lambda: relay.health().running == 1)
        # The last but two say that a job in hand was withdrawn, which it was not.
        claims, forged = relay.metrics.claims, 0
        for payload in ("garbage", "x" * 7999, '"; drop --', "é,,,", "," * 100, job_id.hex, str(job_id), "0" * 32, ""):
            heard, forged = relay.metrics.notifications, forged + 1
            for channel in (wake, result):
                await admin.execute("select pg_notify($1, $2)", channel, payload)
            await eventually(lambda: relay.metrics.notifications > heard)  # noqa: B023
        # At most one above the cursor, and one from zero after it.
        await never(lambda: relay.metrics.claims > claims + 2 * forged, 0.3)
        may_end.set()
        assert (await acme.wait(job_id, timeout=10)).response_body == b"real"
        assert relay.health().status == "ok"
        assert client.health().state == "listening"
        assert (relay.metrics.jobs_claimed, relay.metrics.handlers_cancelled, relay.metrics.jobs_lost) == (2, 0, 0)


# --- C09: names -------------------------------------------------------------------------------------------------------

RELAY_IDS = [
    "a" * 64,
    "語" * 22,
    "Erp-EMEA",
    "erp-emea",
    'it\'s "quoted" ; -- /* */',
    "dots.and.spaces and 100 % of %s $1 \\ ",
    "p" * 63 + "-one",
    "p" * 63 + "-two",
    "é" * 100,
]


@pytest.mark.case("C09")
async def test_relays_of_any_name_are_woken_by_their_own_jobs_and_by_no_others(database: TestDatabase) -> None:
    tenants = ["acme", "Acme", "globex %s 'x'"]
    relays = [
        echo(
            new_relay(
                database, tenants=[tenant], relay_id=relay_id, poll_seconds=HOUR, sweep_seconds=HOUR, lease_seconds=60.0
            )
        )
        for tenant in tenants
        for relay_id in RELAY_IDS
    ]
    async with running(*relays), open_client(database.gateway_dsn, poll_interval_seconds=HOUR) as client:
        for relay in relays:
            await eventually(lambda: relay.metrics.claims > 0)  # noqa: B023
        for relay in relays:
            result = await client.tenant(relay.tenants[0]).call(relay.relay_id, "Echo", body="x", timeout=10)
            assert result.status is SUCCEEDED
            assert result.response_headers == {
                "x-tenant": relay.tenants[0],
                "x-relay": relay.relay_id,
                "x-op": "Echo",
            }
        for relay in relays:
            # The caller may have its result before the relay has the answer to what it stored.
            await eventually(lambda: relay.metrics.jobs_succeeded > 0)  # noqa: B023
            assert relay.metrics.jobs_succeeded == 1, relay.relay_id
            assert relay.metrics.notifications == 1, relay.relay_id


@pytest.mark.case("C09")
async def test_channel_names_are_short_lower_case_ascii_and_all_different(
    gateway: Connection, worker: Connection, operator: Connection
) -> None:
    names = set()
    for tenant in ("acme", "Acme", "acm", "ebc", "語" * 66):
        for relay_id in (*RELAY_IDS, "e", "bc", "c"):
            both = [
                await RelayDispatchRepository(connection, tenant).channel("wake", relay_id)
                for connection in (worker, operator)
            ]
            assert both[0] == both[1]
            names.add(both[0])
        names.add(await RelayDispatchRepository(gateway, tenant).channel("result"))
    assert len(names) == 5 * (len(RELAY_IDS) + 4)
    assert all(re.fullmatch(r"s2r_[0-9a-f]{1,59}", name) for name in names)
