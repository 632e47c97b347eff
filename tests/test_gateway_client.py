"""The client as a whole: how it opens, closes, fails, tidies, and shows what it does."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import asyncpg
import pytest

import gateway_sdk
from dispatch_core.errors import (
    ClientClosedError,
    ConfigurationError,
    DatabaseUnavailableError,
    SchemaMismatchError,
    WaitTimeoutError,
)
from gateway_sdk import DispatchResult, DispatchStatus, GatewayClient, GatewaySettings
from gateway_sdk.sweeper import Sweeper
from gateway_sdk.waiter import ResultWaiter
from tests.support.activity import backends, wait_until_blocked, wait_until_statement_runs
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually, never
from tests.support.gateway import Connection, PlayedRelay, open_client, settings_for

NEVER = 600.0


# --- opening ------------------------------------------------------------------------------------------------------


async def test_a_dsn_is_enough(database: TestDatabase) -> None:
    async with GatewayClient(database.gateway_dsn) as client:
        job_id = await client.tenant("acme").enqueue("erp", "Op")
        assert (await client.tenant("acme").poll_status(job_id)) is not None
        assert client.health().state == "listening"


def test_without_a_dsn_it_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAY_DISPATCH_DSN", raising=False)
    with pytest.raises(ConfigurationError, match="RELAY_DISPATCH_DSN"):
        GatewayClient()


def test_the_environment_is_read_and_arguments_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_DSN", "postgresql://environment/db")
    monkeypatch.setenv("RELAY_DISPATCH_POOL_MAX_SIZE", "3")
    monkeypatch.setenv("GATEWAY_POLL_INTERVAL_SECONDS", "7")
    settings = GatewayClient().settings
    assert (settings.core.require_dsn(), settings.core.pool_max_size) == ("postgresql://environment/db", 3)
    assert settings.poll_interval_seconds == 7
    given = GatewayClient("postgresql://argument/db", listen_dsn="postgresql://direct/db").settings
    assert given.core.require_dsn() == "postgresql://argument/db"
    assert given.core.require_listen_dsn() == "postgresql://direct/db"
    assert given.core.pool_max_size == 3
    assert "argument" not in repr(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GATEWAY_POLL_INTERVAL_SECONDS", "0"),
        ("GATEWAY_MAX_TTL_SECONDS", "inf"),
        ("GATEWAY_ENQUEUE_BATCH_ITEMS", "many"),
        ("RELAY_DISPATCH_POOL_MAX_SIZE", "-1"),
    ],
)
def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_DSN", "postgresql://environment/db")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=name):
        GatewayClient()


def test_a_default_ttl_that_would_not_be_accepted_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_DSN", "postgresql://environment/db")
    monkeypatch.setenv("GATEWAY_MAX_TTL_SECONDS", "60")
    with pytest.raises(ConfigurationError, match=r"GATEWAY_DEFAULT_TTL_SECONDS, 300.*GATEWAY_MAX_TTL_SECONDS, 60"):
        GatewayClient()
    assert GatewaySettings.load(default_ttl_seconds=60).default_ttl_seconds == 60


async def test_dsn_and_pool_together_are_refused(database: TestDatabase) -> None:
    async with asyncpg.create_pool(database.gateway_dsn, min_size=0) as pool:
        with pytest.raises(ConfigurationError):
            GatewayClient(database.gateway_dsn, pool=pool)


async def test_a_schema_that_is_missing_is_named(bare_database: TestDatabase) -> None:
    with pytest.raises(SchemaMismatchError):
        async with open_client(bare_database.gateway_dsn):
            pass


async def test_an_unreachable_server_is_a_retryable_error(unused_tcp_port: int) -> None:
    with pytest.raises(DatabaseUnavailableError) as caught, anyio.fail_after(HANGS):
        async with open_client(f"postgresql://user:secret@127.0.0.1:{unused_tcp_port}/db", connect_timeout_seconds=1):
            pass
    assert caught.value.retryable
    assert "secret" not in str(caught.value)


async def test_a_login_that_bypasses_row_security_is_warned_of(
    database: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_client(database.gateway_dsn):
        pass
    assert "row security" not in caplog.text
    # The superuser: it may open the client, and can do nothing there without a binding.
    async with open_client(database.admin_dsn):
        pass
    assert "row security does not bind this login, because it is a superuser" in caplog.text


# --- closing ------------------------------------------------------------------------------------------------------


async def test_before_and_after_its_block_a_client_is_closed(database: TestDatabase) -> None:
    client = GatewayClient(settings=settings_for(database.gateway_dsn))
    with pytest.raises(ClientClosedError):
        client.tenant("acme")
    async with client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op")
        with pytest.raises(ConfigurationError):
            await client.__aenter__()
    calls: list[Any] = [
        lambda: acme.enqueue("erp", "Op"),
        lambda: acme.enqueue("erp", "Op", idempotency_key="k"),
        lambda: acme.enqueue_many([gateway_sdk.DispatchRequest("erp", "Op")]),
        lambda: acme.call("erp", "Op", timeout=5),
        lambda: acme.wait(job_id),
        lambda: acme.poll_status(job_id),
        lambda: acme.poll_many([job_id]),
        lambda: acme.mark_expired(job_id),
        lambda: anext(acme.as_completed([job_id])),
    ]
    for call in calls:
        with pytest.raises(ClientClosedError), anyio.fail_after(HANGS):
            await call()
    async with client:  # and it can be opened again
        assert await client.tenant("acme").poll_status(job_id) is not None


async def test_closing_ends_waits_with_a_clear_error_and_leaves_no_connection(
    database: TestDatabase, admin: Connection
) -> None:
    errors: list[BaseException] = []
    async with anyio.create_task_group() as group:
        async with open_client(database.gateway_dsn) as client:
            acme = client.tenant("acme")
            job_id = await acme.enqueue("erp", "Op")

            async def pending(call: Any) -> None:
                try:
                    await call()
                except ClientClosedError as error:
                    errors.append(error)

            group.start_soon(pending, lambda: acme.wait(job_id))
            group.start_soon(pending, lambda: acme.call("erp", "Op", timeout=60))
            group.start_soon(pending, lambda: anext(acme.as_completed([job_id])))
            await eventually(lambda: client.health().waiting == 2)
            closed_at = time.monotonic()
        assert time.monotonic() - closed_at < 3
    assert len(errors) == 3
    assert all(error.job_id is not None and not error.retryable for error in errors)  # type: ignore[attr-defined]
    await eventually(lambda: no_backends(admin))


@pytest.mark.parametrize("is_in_time", [True, False])
async def test_closing_gives_a_keyed_enqueue_that_waits_its_time_and_then_ends_it_with_a_clear_error(
    database: TestDatabase, gateway: Connection, admin: Connection, is_in_time: bool
) -> None:
    """It would wait for the key, and try again after faults, for as long as a write may take."""
    outcomes: list[Any] = []
    transaction = gateway.transaction()
    async with anyio.create_task_group() as group:
        async with open_client(
            database.gateway_dsn,
            write_timeout_seconds=600,
            lock_timeout_seconds=600,
            close_timeout_seconds=HANGS if is_in_time else 0.05,
        ) as client:
            acme = client.tenant("acme")
            await transaction.start()
            held = await acme.enqueue("erp", "Op", idempotency_key="k", conn=gateway)

            async def keyed() -> None:
                try:
                    outcomes.append(await acme.enqueue("erp", "Op", idempotency_key="k"))
                except ClientClosedError as error:
                    outcomes.append(error)

            async def release() -> None:
                await eventually(lambda: client.runtime.is_closed)
                await transaction.commit()

            group.start_soon(keyed)
            await wait_until_blocked(admin, await wait_until_statement_runs(admin, "enqueue_keyed"))
            if is_in_time:
                group.start_soon(release)
        with anyio.fail_after(HANGS):
            await eventually(lambda: outcomes)
    if is_in_time:
        assert outcomes == [held]
    else:
        await transaction.rollback()
        (error,) = outcomes
        assert isinstance(error, ClientClosedError)
        assert error.job_id is not None


async def no_backends(admin: Connection) -> bool:
    return not [row for row in await backends(admin) if "relay-dispatch" in row["application_name"]]


async def test_closing_sends_what_was_given_and_rings_for_it(
    database: TestDatabase, worker: Connection, admin: Connection
) -> None:
    relay = PlayedRelay(worker, "acme", "erp")
    heard: list[str] = []
    await worker.add_listener(
        await relay.repository.channel("wake", "erp"), lambda _c, _p, _ch, payload: heard.append(str(payload))
    )
    stored: list[object] = []
    async with anyio.create_task_group() as group, open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")

        async def enqueue() -> None:
            stored.append(await acme.enqueue("erp", "Op"))

        for _ in range(1200):
            group.start_soon(enqueue)
        await anyio.lowlevel.checkpoint()
    assert len(stored) == await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue") > 0
    await eventually(lambda: heard)


async def test_an_error_of_the_block_comes_out_as_it_is(database: TestDatabase) -> None:
    class MineError(Exception):
        pass

    with pytest.raises(MineError):
        async with open_client(database.gateway_dsn):
            raise MineError


async def test_a_cancelled_block_is_cancelled_and_cleaned_up(database: TestDatabase, admin: Connection) -> None:
    with anyio.move_on_after(0.3) as scope:
        async with open_client(database.gateway_dsn):
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    await eventually(lambda: no_backends(admin))

    async def main() -> None:
        async with open_client(database.gateway_dsn):
            await anyio.sleep_forever()

    task = asyncio.get_running_loop().create_task(main())
    await eventually(lambda: no_backends_is(admin, False))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: no_backends(admin))


async def no_backends_is(admin: Connection, value: bool) -> bool:
    return await no_backends(admin) is value


# --- failing ------------------------------------------------------------------------------------------------------


async def test_a_background_task_that_dies_takes_the_client_down_with_its_cause(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenError(Exception):
        pass

    errors: list[ClientClosedError] = []
    ready = anyio.Event()

    async def pending(call: Any) -> None:
        with pytest.raises(ClientClosedError) as caught:
            await call()
        errors.append(caught.value)

    async def use(group: anyio.abc.TaskGroup) -> None:
        async with open_client(database.gateway_dsn) as client:
            acme = client.tenant("acme")
            job_id = await acme.enqueue("erp", "Op")
            group.start_soon(pending, lambda: acme.wait(job_id))
            group.start_soon(pending, lambda: acme.call("erp", "Op", timeout=60))
            await eventually(lambda: client.health().waiting == 2)

            def broken(*_args: object) -> None:
                raise BrokenError

            monkeypatch.setattr(ResultWaiter, "_tick", broken)
            ready.set()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        with pytest.raises(BrokenError), anyio.fail_after(10):
            await use(group)
    assert ready.is_set()
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error.__cause__, BrokenError)
        assert error.job_id is not None
        assert "BrokenError" in str(error)


async def test_several_tasks_and_event_loops_of_work_use_one_client(database: TestDatabase, worker: Connection) -> None:
    relay = PlayedRelay(worker, "acme", "erp")
    async with open_client(database.gateway_dsn) as client, anyio.create_task_group() as group:
        done = 0

        async def use(n: int) -> None:
            nonlocal done
            acme = client.tenant("acme")
            result = await acme.call("erp", "Op", json={"n": n}, timeout=30)
            assert result.json() == {"n": n}
            assert (await acme.poll_status(result.job_id)) is not None
            done += 1

        for n in range(100):
            group.start_soon(use, n)
        while done < 100:
            await relay.work()


# --- sweeping -----------------------------------------------------------------------------------------------------


async def test_sweeps_end_what_is_late_and_ring_for_it(database: TestDatabase, admin: Connection) -> None:
    async with (
        open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client,
        open_client(database.gateway_dsn, sweep_interval_seconds=0.2),
    ):
        acme = client.tenant("acme")
        nobody_waits = await acme.enqueue("erp", "Op", ttl=0.1)
        result = await eventually(lambda: stored_end(acme, nobody_waits))
        assert result is not None
        assert result.status is DispatchStatus.EXPIRED
        assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue") == 0


async def stored_end(acme: gateway_sdk.TenantClient, job_id: Any) -> DispatchResult | None:
    result = await acme.poll_status(job_id)
    return result if result is not None and result.completed_at is not None else None


async def test_sweeps_take_back_lost_claims_and_wake_the_relay(database: TestDatabase, worker: Connection) -> None:
    relay = PlayedRelay(worker, "acme", "erp")
    heard: list[str] = []
    await worker.add_listener(
        await relay.repository.channel("wake", "erp"), lambda _c, _p, _ch, payload: heard.append(str(payload))
    )
    async with open_client(database.gateway_dsn, sweep_interval_seconds=0.1, lease_seconds=0.3) as client:
        acme = client.tenant("acme")
        twice = await acme.enqueue("erp", "Op", max_attempts=2, notify=False)
        once = await acme.enqueue("erp", "Op", notify=False)
        assert len(await relay.claim(lease_seconds=0.1)) == 2
        result = await acme.wait(once, timeout=10)
        assert (result.status, result.error_code) == (DispatchStatus.FAILED, "S2R-LEASE-LOST")
        await eventually(lambda: "" in heard)
        (again,) = await relay.claim()
        assert (again.job_id, again.attempt) == (twice, 2)


async def test_sweeps_purge_results_after_their_time(database: TestDatabase, admin: Connection) -> None:
    async with open_client(database.gateway_dsn, result_keep_seconds=0.05, sweep_interval_seconds=0) as client:
        acme = client.tenant("acme")
        job_id = await acme.enqueue("erp", "Op", idempotency_key="k")
        await acme.mark_expired(job_id)
        runtime = client._runtime
        assert runtime is not None
        sweeper = Sweeper(runtime.database, runtime.doorbell, client.settings)

        async def purged() -> bool:
            await admin.execute("delete from relay.sweep")
            await sweeper.sweep()
            return await acme.poll_status(job_id) is None

        await eventually(purged)
        assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_key") == 0
        assert await acme.enqueue("erp", "Other", idempotency_key="k") != job_id


async def test_without_sweeps_no_sweep_is_made(database: TestDatabase, admin: Connection) -> None:
    async with open_client(database.gateway_dsn, sweep_interval_seconds=0) as client:
        job_id = await client.tenant("acme").enqueue("erp", "Op", ttl=0.05)
        await never(lambda: stored_end(client.tenant("acme"), job_id), 0.3)
    assert await admin.fetchval("select count(*) from relay.sweep") == 0


# --- showing ------------------------------------------------------------------------------------------------------


async def test_health_counts_what_happens(database: TestDatabase, worker: Connection) -> None:
    relay = PlayedRelay(worker, "acme", "erp")
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        ids = [await acme.enqueue("erp", "Op") for _ in range(5)]
        health = client.health()
        assert (health.enqueued, health.enqueue_statements, health.waiting, health.tenants) == (5, 5, 0, 0)
        with pytest.raises(WaitTimeoutError):
            await acme.wait(ids[0], timeout=0.2)
        await relay.work()
        for job_id in ids:
            await acme.wait(job_id)
        await eventually(lambda: client.health().rings_sent >= 1)
        health = client.health()
        assert (health.channels, health.tenants, health.rings_lost) == (1, 1, 0)
        assert health.wakes_by_poll + health.wakes_by_push == 5
        assert (health.state, health.problem, health.is_well) == ("listening", None, True)


def test_the_public_surface() -> None:
    assert gateway_sdk.__all__ == [
        "ChunkSpec",
        "ChunkStatus",
        "DispatchRequest",
        "DispatchResult",
        "DispatchSink",
        "DispatchStatus",
        "DurableJob",
        "DurableJobs",
        "DurableJobsSettings",
        "GatewayClient",
        "GatewayHealth",
        "GatewaySettings",
        "JobProgress",
        "JobStatus",
        "OutboxDrainer",
        "OutboxRoute",
        "TenantClient",
        "WebhookSink",
    ]
    assert all(hasattr(gateway_sdk, name) for name in gateway_sdk.__all__)
    settings = GatewaySettings.model_fields
    assert all(field.description for field in settings.values())


async def test_expires_at_by_the_databases_clock_bounds_a_wait(database: TestDatabase, admin: Connection) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        acme = client.tenant("acme")
        runtime = client._runtime
        assert runtime is not None
        for is_warm in (False, True):
            if is_warm:
                # Where results are pushed, nothing but its deadline can end it.
                await eventually(lambda: runtime.channels.is_listening("acme"))
            started = time.monotonic()
            now: datetime = await admin.fetchval("select clock_timestamp()")
            assert now.tzinfo is UTC
            result = await acme.call("erp", "Op", expires_at=now + timedelta(seconds=0.6), timeout=HANGS)
            assert result.status is DispatchStatus.EXPIRED
            assert time.monotonic() - started >= 0.55
