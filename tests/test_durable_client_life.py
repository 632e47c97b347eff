"""Durable jobs over a client's life: before the room is there, its sweeps, and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import anyio
import anyio.abc
import asyncpg
import pytest

from dispatch_core.dev.logins import GATEWAY_LOGIN
from dispatch_core.durable_models import JobStatus
from dispatch_core.errors import ClientClosedError, SchemaMismatchError
from dispatch_core.migrate import grant, migrate
from dispatch_core.settings import DurableJobsSettings
from gateway_sdk import GatewayClient
from gateway_sdk.durable_watch import JobWatches
from gateway_sdk.sweeper import Sweeper
from tests.support import durable
from tests.support.activity import wait_until_blocked, wait_until_statement_runs
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.protocol import TENANT, Connection, connected

NEVER = 3600.0


# --- before the room is there ---------------------------------------------------------------------------------------


async def test_a_gateway_works_without_the_room_until_it_is_used_and_then_is_told_what_is_missing(
    bare_database: TestDatabase,
) -> None:
    await migrate(bare_database.admin_dsn, only=["dispatch"])
    await grant(bare_database.admin_dsn, GATEWAY_LOGIN, role="gateway", tenant=None, relay=None)
    async with open_client(bare_database.gateway_dsn, sweep_interval_seconds=0.01) as client:
        acme = client.tenant(TENANT)
        job_id = await acme.enqueue("erp", "Op")
        assert await acme.poll_status(job_id) is not None
        jobs = acme.durable
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: jobs.submit("import", [1]),
            lambda: jobs.submit("import", range(2000)),
            lambda: jobs.status(job_id),
            lambda: jobs.pause(job_id),
            lambda: jobs.wait(job_id, timeout=5),
            lambda: anext(jobs.watch(job_id)),
            lambda: anext(jobs.events(job_id, follow=True)),
        ]
        for call in calls:
            with pytest.raises(
                SchemaMismatchError, match=r"the room durable .* is not in this database.* --only durable"
            ):
                await call()
        async with connected(bare_database.gateway_dsn) as conn, conn.transaction():
            with pytest.raises(SchemaMismatchError, match="--only durable"):
                await jobs.submit("import", [1], conn=conn)
        # It is found as soon as it is there.
        await migrate(bare_database.admin_dsn, only=["durable"])
        durable_id = await jobs.submit("import", [1])
        assert (await jobs.cancel(durable_id)).outcome == "applied"
        assert (await jobs.wait(durable_id)).status is JobStatus.CANCELLED


async def test_nothing_of_the_room_is_asked_before_its_first_use(database: TestDatabase, admin: Connection) -> None:
    name = database.name
    await admin.execute(f"alter database {name} set track_functions = 'all'")
    asked = "select coalesce(sum(calls), 0)::int from pg_stat_user_functions where funcname like 'durable%'"
    async with open_client(database.gateway_dsn, sweep_interval_seconds=0.01) as client:
        acme = client.tenant(TENANT)
        await acme.enqueue("erp", "Op")
        _ = acme.durable
        await anyio.sleep(0.1)  # some sweeps
    assert await admin.fetchval(asked) == 0
    async with open_client(database.gateway_dsn, sweep_interval_seconds=0.01) as client:
        await client.tenant(TENANT).durable.list()

        async def swept() -> bool:
            return await admin.fetchval(
                "select exists (select from relay.durable_turn where name in ('finish', 'remove'))"
            )

        await eventually(swept)
        assert await admin.fetchval("select count(*) from relay.durable_turn where name = 'lease'") == 0


# --- sweeps ---------------------------------------------------------------------------------------------------------


async def test_the_sweeper_ends_what_nobody_has_ended_and_removes_what_is_old(
    database: TestDatabase, worker: Connection, admin: Connection
) -> None:
    settings = DurableJobsSettings(
        finish_sweep_seconds=0.01, remove_sweep_seconds=0.01, retention_seconds=3600, abandoned_seconds=3600
    )
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER, durable=settings) as client:
        jobs = client.tenant(TENANT).durable
        old, lost = await jobs.submit("import", [1]), await jobs.submit("import", [2])
        await jobs.cancel(old)
        await admin.execute(
            "update relay.durable_job set ended_at = ended_at - interval '2 hours' where job_id = $1", old
        )
        # The relay of the other one died between its last completion and the end of the job.
        (lease,) = await durable.claim(worker)
        await durable.complete(worker, lease)
        runtime = client.runtime
        sweeper = Sweeper(runtime.database, runtime.doorbell, client.settings, also=[runtime.durable.sweep])
        ended: list[Any] = []

        async def wait() -> None:
            ended.append(await jobs.wait(lost, timeout=60))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await eventually(lambda: runtime.durable.watches._channels.is_listening(TENANT))
            for sweep in sweeper._sweeps:
                await sweep()
        assert ended[0].status is JobStatus.COMPLETED

        async def removed() -> bool:
            await runtime.durable.sweep()
            return not await admin.fetchval("select exists (select from relay.durable_job where job_id = $1)", old)

        await eventually(removed)
        assert await jobs.status(lost) is not None


async def test_a_durable_sweep_that_fails_holds_up_no_other(
    database: TestDatabase, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_client(database.gateway_dsn, sweep_interval_seconds=0.01) as client:
        acme = client.tenant(TENANT)
        await acme.durable.list()
        await admin.execute("drop function relay.durable_run_sweeps")
        job_id = await acme.enqueue("erp", "Op", ttl=0.05)

        async def expired() -> bool:
            result = await acme.poll_status(job_id)
            return result is not None and result.completed_at is not None

        await eventually(expired)
        await eventually(lambda: any("the sweep failed" in record.message for record in caplog.records))
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1


# --- the end --------------------------------------------------------------------------------------------------------


class Calls:
    """Calls that are under way when the client ends, and how they end."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Any] = {}

    async def run(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.outcomes[name] = await call()
        except Exception as error:  # noqa: BLE001
            self.outcomes[name] = error


async def never_ending(there: anyio.Event) -> AsyncIterator[int]:
    yield 1
    there.set()
    await anyio.sleep_forever()


async def begin(client: GatewayClient, group: anyio.abc.TaskGroup, calls: Calls) -> UUID:
    jobs = client.tenant(TENANT).durable
    job_id = await jobs.submit("import", [1])
    there = anyio.Event()
    watch, events = jobs.watch(job_id), jobs.events(job_id, follow=True)
    await anext(watch)
    await anext(events)
    group.start_soon(calls.run, "wait", lambda: jobs.wait(job_id))
    group.start_soon(calls.run, "watch", lambda: anext(watch))
    group.start_soon(calls.run, "events", lambda: anext(events))
    group.start_soon(calls.run, "submit", lambda: jobs.submit("import", never_ending(there)))
    await there.wait()
    await eventually(lambda: len(client.runtime.durable.watches._rooms[TENANT].jobs[job_id.hex].watchers) == 3)
    return job_id


async def test_at_its_end_the_client_ends_what_stands_and_leaves_no_task(database: TestDatabase) -> None:
    before = len(asyncio.all_tasks())
    calls = Calls()
    async with anyio.create_task_group() as group:
        async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
            job_id = await begin(client, group, calls)
            jobs = client.tenant(TENANT).durable
        await eventually(lambda: len(calls.outcomes) == 4)
        for name in ("wait", "watch", "events", "submit"):
            error = calls.outcomes[name]
            assert isinstance(error, ClientClosedError), (name, error)
            assert error.job_id is not None
        late: list[Callable[[], Awaitable[Any]]] = [
            lambda: jobs.status(job_id),
            lambda: jobs.pause(job_id),
            lambda: jobs.wait(job_id),
            lambda: jobs.submit("import", [1]),
            lambda: anext(jobs.watch(job_id)),
            lambda: anext(jobs.events(job_id)),
        ]
        for call in late:
            with pytest.raises(ClientClosedError):
                await call()
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("is_in_time", [True, False])
async def test_a_decision_that_is_under_way_has_the_time_in_which_the_client_closes(
    database: TestDatabase, admin: Connection, is_in_time: bool
) -> None:
    calls = Calls()
    async with connected(database.admin_dsn) as holder, anyio.create_task_group() as group:
        transaction = holder.transaction()
        async with open_client(database.gateway_dsn, close_timeout_seconds=10 if is_in_time else 0.05) as client:
            jobs = client.tenant(TENANT).durable
            job_id = await jobs.submit("import", [1])
            await transaction.start()
            await holder.execute("select from relay.durable_job where job_id = $1 for update", job_id)
            group.start_soon(calls.run, "pause", lambda: jobs.pause(job_id))
            await wait_until_blocked(admin, await wait_until_statement_runs(admin, "durable_control"))
            if is_in_time:

                async def release() -> None:
                    await eventually(lambda: client.runtime.is_closed)
                    await transaction.rollback()

                group.start_soon(release)
        await eventually(lambda: "pause" in calls.outcomes)
        outcome = calls.outcomes["pause"]
        if is_in_time:
            assert outcome.outcome == "applied"
        else:
            await transaction.rollback()
            assert isinstance(outcome, ClientClosedError)
            assert await admin.fetchval("select status from relay.durable_job where job_id = $1", job_id) == "queued"


async def test_a_client_that_fails_ends_every_call_with_its_cause(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenError(Exception):
        pass

    calls = Calls()

    async def use(group: anyio.abc.TaskGroup) -> None:
        async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
            await begin(client, group, calls)

            async def broken(*_args: object) -> None:
                raise BrokenError

            monkeypatch.setattr(JobWatches, "_read_due", broken)
            client.runtime.durable.watches._all_due()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        with pytest.raises(BrokenError), anyio.fail_after(10):
            await use(group)
    for name in ("wait", "watch", "events", "submit"):
        error = calls.outcomes[name]
        assert isinstance(error, ClientClosedError), (name, error)
        assert isinstance(error.__cause__, BrokenError)


async def test_a_caller_who_is_cancelled_leaves_nothing_waiting(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(jobs.wait, job_id)
            await eventually(lambda: client.runtime.durable.watches.waiting == 1)
            group.cancel_scope.cancel()
        assert client.runtime.durable.watches.waiting == 0


async def test_a_pool_of_the_callers_is_used_and_stays_open(database: TestDatabase) -> None:
    pool = await asyncpg.create_pool(database.gateway_dsn, min_size=1, max_size=2)
    async with pool:
        async with open_client(None, pool=pool) as client:
            jobs = client.tenant(TENANT).durable
            job_id = await jobs.submit("import", range(3))
            assert (await jobs.cancel(job_id)).outcome == "applied"
            assert (await jobs.wait(job_id)).status is JobStatus.CANCELLED
        assert await pool.fetchval("select 1") == 1
