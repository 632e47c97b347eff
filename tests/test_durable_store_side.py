"""The store of durable jobs: events from the side are best effort, bounded, and harm nobody."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import anyio
import pytest

from dispatch_core import DurableJobsSettings, DurableJobStore
from dispatch_core.database import Database
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS
from tests.support.protocol import TENANT, Connection, connected
from tests.support.stores import Stores, nothing_written, open_stores


@pytest.fixture
async def stores(database: TestDatabase) -> AsyncIterator[Stores]:
    # Time enough to open a connection, too; one test waits for it to be over.
    async with open_stores(database, event_lock_timeout_seconds=1.0) as stores:
        yield stores


async def test_an_event_is_told_with_all_that_is_known_of_it(stores: Stores) -> None:
    lease = await stores.lease(3)
    page = await stores.gateway.events(lease.job_id)
    chunk = await stores.gateway.get_chunk(lease.job_id, 3)
    assert await stores.gateway.record_event(
        lease.job_id, 2, "looked_at", "ann", "web", "relay:9", {"note": "ü", "big": 2**70}
    )
    assert await stores.gateway.record_event(lease.job_id, lease, "chunk_failed")
    assert await stores.gateway.record_event(lease.job_id, chunk, "note", detail=None)
    assert await stores.gateway.record_event(lease.job_id, None, "note", actor="bob")
    events = (await stores.gateway.events(lease.job_id, page.next)).events
    assert [(event.seq, event.type, event.actor) for event in events] == [
        (2, "looked_at", "ann"), (1, "chunk_failed", None), (3, "note", None), (None, "note", "bob"),
    ]  # fmt: skip
    assert (events[0].channel, events[0].holder, events[0].detail) == ("web", "relay:9", {"note": "ü", "big": 2**70})


async def test_an_event_is_told_while_the_callers_own_transaction_has_the_job_and_its_chunks_locked(
    stores: Stores, gateway: Connection, worker: Connection, database: TestDatabase
) -> None:
    lease = await stores.lease(2)
    async with worker.transaction(), connected(database.admin_dsn) as other, other.transaction():
        await stores.worker.checkpoint(lease, 1, conn=worker)
        await other.execute("select 1 from relay.durable_job for update")
        with anyio.fail_after(HANGS):
            assert await stores.gateway.record_event(lease.job_id, lease, "halfway")
            assert await stores.gateway.record_event(lease.job_id, None, "looked_at")
    # It does not go with that transaction.
    assert [event.type for event in (await stores.gateway.events(lease.job_id)).events][-2:] == ["halfway", "looked_at"]


async def test_an_event_stays_when_the_callers_transaction_rolls_back(stores: Stores, worker: Connection) -> None:
    lease = await stores.lease(2)
    transaction = worker.transaction()
    await transaction.start()
    await stores.worker.checkpoint(lease, 1, conn=worker)
    assert await stores.gateway.record_event(lease.job_id, lease, "tried")
    await transaction.rollback()
    assert (await stores.gateway.events(lease.job_id)).events[-1].type == "tried"


async def test_what_waits_for_a_locked_table_is_logged_and_given_up(
    stores: Stores, database: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await stores.lease(1)
    async with connected(database.admin_dsn) as other, other.transaction():
        await other.execute("lock table relay.durable_event in access exclusive mode")
        with anyio.fail_after(HANGS):
            assert not await stores.gateway.record_event(lease.job_id, lease, "late")
    assert "DatabaseBusyError" in caplog.text
    assert await stores.gateway.record_event(lease.job_id, lease, "late")
    # The lock timeout was that statement's own, on whatever connection of the pool.
    for _ in range(4):
        (row,) = await stores.gateways.execute("select current_setting('lock_timeout') as value")
        assert row["value"] == "0"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"event": ""}, "InvalidNameError"),
        ({"event": "x" * 101}, "InvalidNameError"),
        ({"event": None}, "InvalidNameError"),
        ({"actor": "a\0"}, "InvalidNameError"),
        ({"holder": 5}, "InvalidNameError"),
        ({"channel": "\ud800"}, "InvalidNameError"),
        ({"detail": float("inf")}, "InvalidPayloadError"),
        ({"detail": object()}, "InvalidPayloadError"),
        ({"chunk": "one"}, "InvalidInputError"),
        ({"job_id": "no id"}, "InvalidInputError"),
        ({"job_id": uuid4()}, "there is no such job"),
    ],
)
async def test_what_cannot_be_recorded_is_logged_and_never_raised(
    stores: Stores, admin: Connection, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], error: str
) -> None:
    given: dict[str, Any] = {"job_id": await stores.job(1), "chunk": None, "event": "note", **arguments}
    async with nothing_written(admin):
        assert await stores.gateway.record_event(**given) is False
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert error in record.getMessage()


async def test_without_a_free_connection_or_a_database_it_is_logged_in_time(
    database: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    settings = DurableJobsSettings(event_lock_timeout_seconds=0.1)
    logger = logging.getLogger("of.the.store")
    async with Database(database.gateway_dsn, max_size=1) as one:
        store = DurableJobStore(one, TENANT, settings=settings, logger=logger)
        job_id = await store.insert_job(durable.KIND)
        async with one.connection():
            with anyio.fail_after(HANGS):
                assert not await store.record_event(job_id, None, "note")
    with anyio.fail_after(HANGS):
        assert not await store.record_event(job_id, None, "note")
    assert [record.name for record in caplog.records] == ["of.the.store"] * 2


async def test_on_a_connection_in_a_transaction_a_failure_does_no_harm(
    database: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    settings = DurableJobsSettings(event_lock_timeout_seconds=0.1)
    async with connected(database.gateway_dsn) as conn, connected(database.admin_dsn) as other:
        store = DurableJobStore(conn, TENANT, settings=settings)
        job_id = await store.insert_job(durable.KIND)
        async with conn.transaction():
            await conn.execute("set local lock_timeout = '7s'")
            async with other.transaction():
                await other.execute("lock table relay.durable_event in share mode")
                assert not await store.record_event(job_id, None, "lost")
            assert await conn.fetchval("show lock_timeout") == "7s"
            assert await store.record_event(job_id, None, "kept")
            assert await conn.fetchval("show lock_timeout") == "7s"
        assert await store.record_event(job_id, None, "after")
        assert await conn.fetchval("show lock_timeout") == "0"
        assert [event.type for event in (await store.events(job_id)).events] == ["submitted", "kept", "after"]
    assert "DatabaseBusyError" in caplog.text


@pytest.mark.case("C46")
async def test_a_reader_of_the_timeline_never_skips_what_commits_late(stores: Stores, database: TestDatabase) -> None:
    job_id = await stores.job(1)
    page = await stores.gateway.events(job_id)
    async with connected(database.gateway_dsn) as conn, conn.transaction():
        early = DurableJobStore(conn, TENANT)
        await early.record_event(job_id, None, "began early")
        await stores.gateway.record_event(job_id, None, "was quick")
        seen = await stores.gateway.events(job_id, page.next)
        assert [event.type for event in seen.events] == ["was quick"]
    late = await stores.gateway.events(job_id, seen.next)
    assert [event.type for event in late.events] == ["began early"]
    assert (await stores.gateway.events(job_id, late.next)).events == []
    # In pages of one, from the beginning, each once.
    found: list[str] = []
    after = None
    while (one := await stores.gateway.events(job_id, after, limit=1)).events:
        found.extend(event.type for event in one.events)
        after = one.next
    assert sorted(found) == ["began early", "submitted", "was quick"]
