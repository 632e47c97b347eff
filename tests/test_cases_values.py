"""Text that PostgreSQL cannot store, in every field (C34): it comes back as it was, or is refused before any SQL.

And where it is what a handler has to say at its end, it fails its own work once, with a reason that can be stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from dispatch_core import (
    ChunkOutcome,
    DurableJobStore,
    InvalidInputError,
    JobLease,
    OutboxMessage,
    RowError,
)
from dispatch_core.database import Database
from dispatch_core.durable_models import ChunkStatus, JobStatus
from dispatch_core.outbox import Outbox
from dispatch_core.outbox_repository import OutboxRepository
from gateway_sdk import DispatchSink, GatewayClient, OutboxRoute
from relay_sdk import ChunkContext, Reject
from tests.support.chunks import KIND as CHUNKS
from tests.support.chunks import Work, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.gateway import open_client, settings_for
from tests.support.outbox import KIND, take, tell, write
from tests.support.protocol import OUTBOX, TENANT, Connection
from tests.support.relays import running
from tests.support.stores import open_stores

pytestmark = pytest.mark.case("C34")

LITERAL = "\\u0000 \\ud800"
"""The six characters of an escape, twice: text like any other."""

JOB = uuid4()
LEASE = JobLease(TENANT, JOB, 1, uuid4(), 1, "me", datetime.now(UTC), time.monotonic())

FIELDS: dict[str, Callable[[DurableJobStore, str], Any]] = {
    "kind": lambda s, bad: s.insert_job(bad),
    "params": lambda s, bad: s.insert_job("k", {"a": [bad]}),
    "a key in params": lambda s, bad: s.insert_job("k", {bad: 1}),
    "created_by": lambda s, bad: s.insert_job("k", created_by=bad),
    "payload": lambda s, bad: s.insert_chunks(JOB, [1, {"a": bad}]),
    "checkpoint": lambda s, bad: s.checkpoint(LEASE, {"at": bad}),
    "outcome": lambda s, bad: s.complete_chunk(LEASE, ChunkOutcome([bad])),
    "code of a row error": lambda s, bad: s.record_row_errors(LEASE, [RowError(1, bad)]),
    "data of a row error": lambda s, bad: s.record_row_errors(LEASE, [RowError(1, "c", "m", {"a": bad})]),
    "type of an event": lambda s, bad: s.record_event(JOB, None, bad),
    "detail of an event": lambda s, bad: s.record_event(JOB, None, "note", detail={"a": bad}),
    "params, changed": lambda s, bad: s.update_job(JOB, {"params": bad}),
    "kinds of a claim": lambda s, bad: s.claim_chunks([bad]),
    "holder": lambda s, bad: s.claim_next_chunk(JOB, holder=bad),
    "tenant": lambda s, bad: DurableJobStore(s._database, bad).get_job(JOB),
}


@pytest.mark.parametrize("bad", ["a\0b", "\ud800", "\udfff and more"], ids=["nul", "high", "low"])
@pytest.mark.parametrize("field", FIELDS)
async def test_what_cannot_be_stored_of_a_durable_job_is_refused_before_any_sql(field: str, bad: str) -> None:
    # A store that can send nothing: what it lets through is a DatabaseUnavailableError.
    store = DurableJobStore(Database("postgresql://nobody@localhost:1/nowhere"), TENANT)
    if field in SIDE:
        # What is told from the side is logged where it cannot be stored, and never raised.
        assert await FIELDS[field](store, bad) in (False, None)
        return
    with pytest.raises(InvalidInputError):
        await FIELDS[field](store, bad)


SIDE = ("type of an event", "detail of an event")


async def test_the_literal_characters_of_an_escape_come_back_from_every_field_of_a_durable_job(
    database: TestDatabase,
) -> None:
    async with open_stores(database) as stores:
        job_id = await stores.gateway.insert_job(LITERAL, {LITERAL: [LITERAL]}, created_by=LITERAL)
        await stores.gateway.insert_chunks(job_id, [LITERAL, {LITERAL: LITERAL}], from_seq=1)
        await stores.gateway.record_event(job_id, None, LITERAL, detail={LITERAL: LITERAL})
        first = await stores.claim(job_id, holder=LITERAL)
        assert (first.kind, first.params, first.payload) == (LITERAL, {LITERAL: [LITERAL]}, LITERAL)
        await stores.worker.checkpoint(first.lease, {LITERAL: LITERAL})
        bad = RowError(1, LITERAL, LITERAL, {LITERAL: LITERAL})
        await stores.worker.record_row_errors(first.lease, [bad])
        await stores.worker.complete_chunk(first.lease, ChunkOutcome({LITERAL: LITERAL}))
        second = await stores.claim(job_id)
        assert second.payload == {LITERAL: LITERAL}
        await stores.worker.fail_chunk(second.lease, LITERAL, retryable=False)
        job = await stores.gateway.get_job(job_id)
        assert job is not None
        assert (job.kind, job.created_by) == (LITERAL, LITERAL)
        chunk = await stores.gateway.get_chunk(job_id, 1)
        assert chunk is not None
        assert (chunk.checkpoint, chunk.outcome) == ({LITERAL: LITERAL}, {LITERAL: LITERAL})
        (found,) = await stores.gateway.row_errors(job_id)
        assert (found.code, found.message, found.data) == (LITERAL, LITERAL, {LITERAL: LITERAL})
        failed = await stores.gateway.get_chunk(job_id, 2)
        assert failed is not None
        assert failed.last_error == LITERAL
        page = await stores.gateway.events(job_id)
        assert [event.detail for event in page.events if event.type == LITERAL] == [{LITERAL: LITERAL}]


@pytest.mark.parametrize("bad", ["nul \0", "lone \ud800"], ids=["nul", "surrogate"])
async def test_an_error_of_a_chunk_that_cannot_be_stored_is_stored_as_far_as_it_can(
    database: TestDatabase, gateway: Any, bad: str
) -> None:
    """By its handler's exception, by the code of a rejection, and by the message of a row error."""
    work = Work(gateway)
    raised, rejected, told = [await work.submit(1, kind=kind) for kind in ("raises", "rejects", "tells")]
    relay = chunk_relay(database)

    @relay.chunk_handler("raises")
    async def raises(ctx: ChunkContext) -> None:
        raise ValueError(bad)

    @relay.chunk_handler("rejects")
    async def rejects(ctx: ChunkContext) -> None:
        raise Reject(bad, bad)

    @relay.chunk_handler("tells")
    async def tells(ctx: ChunkContext) -> None:
        ctx.row_error(1, "bad-row", bad)

    async with running(relay):
        assert (await work.end(raised)).status is JobStatus.FAILED
        assert (await work.end(rejected)).status is JobStatus.FAILED
        assert (await work.end(told)).status is JobStatus.COMPLETED_WITH_ERRORS
    clean = bad.replace("\0", "\ufffd").replace("\ud800", "\ufffd")
    assert clean in ((await work.chunk(raised)).last_error or "")
    assert clean in ((await work.chunk(rejected)).last_error or "")
    assert [error.message for error in await work.row_errors(told)] == [clean]


@pytest.mark.parametrize("bad", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
async def test_a_checkpoint_that_cannot_be_stored_is_refused_where_it_is_saved_and_the_chunk_goes_on(
    database: TestDatabase, gateway: Any, bad: str
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)

    @relay.chunk_handler(CHUNKS)
    async def handler(ctx: ChunkContext) -> str:
        with pytest.raises(InvalidInputError):
            await ctx.save_checkpoint({"at": bad})
        async with ctx.transaction():
            with pytest.raises(InvalidInputError):
                await ctx.save_checkpoint(bad)
            await ctx.save_checkpoint("good")
        return "done"

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.attempts, chunk.checkpoint) == (ChunkStatus.DONE, 1, "good")


@pytest.mark.parametrize("bad", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
async def test_what_cannot_be_stored_of_an_event_is_refused_before_any_sql_in_every_field(
    database: TestDatabase, admin: Connection, gateway: Connection, bad: str
) -> None:
    calls: list[dict[str, Any]] = [
        {"kind": bad, "payload": 1}, {"kind": KIND, "payload": {"a": [bad]}}, {"kind": KIND, "payload": {bad: 1}},
        {"kind": KIND, "payload": 1, "key": bad}, {"kind": KIND, "payload": 1, "tenant": bad},
    ]  # fmt: skip
    async with gateway.transaction():
        for call in calls:
            with pytest.raises(InvalidInputError):
                await Outbox.enqueue(gateway, **{"tenant": TENANT, **call})
            message = OutboxMessage(call["kind"], call["payload"], call.get("key"))
            with pytest.raises(InvalidInputError):
                await Outbox.enqueue_many(gateway, [OutboxMessage(KIND, 1), message], tenant=call.get("tenant", TENANT))
        assert await gateway.fetchval("select 1") == 1, "the transaction is whole"
    assert await admin.fetchval(f"select count(*) from {OUTBOX}") == 0
    client = GatewayClient(settings=settings_for(database.gateway_dsn))
    for route in (OutboxRoute(bad, "Post"), OutboxRoute("erp", bad), OutboxRoute("erp", "Post", headers={"h": bad})):
        with pytest.raises(InvalidInputError):
            DispatchSink(client, {KIND: route})
    # Why it was given up is a person's text, and stored as far as it can be.
    (event_id,) = await write(gateway, "one")
    assert await OutboxRepository(gateway).park(TENANT, [event_id], f"because {bad}") == {event_id}
    stored = await admin.fetchval(f"select last_error from {OUTBOX}")
    assert "because " in stored


async def test_the_literal_characters_of_an_escape_come_back_from_every_field_of_an_event(
    admin: Connection, gateway: Connection
) -> None:
    await write(gateway, {LITERAL: [LITERAL]}, kind=LITERAL, key=LITERAL)
    (event,) = await take(gateway, kind=LITERAL, by=LITERAL)
    assert (event.kind, event.key, event.payload) == (LITERAL, LITERAL, {LITERAL: [LITERAL]})
    assert await tell(gateway, [event], "failed", error=LITERAL, by=LITERAL, delay=0) == [("applied", "ready")]
    assert await admin.fetchval(f"select last_error from {OUTBOX}") == LITERAL


@pytest.mark.parametrize("bad", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
async def test_the_client_refuses_what_cannot_be_stored_in_every_argument_and_stores_nothing(
    database: TestDatabase, admin: Connection, bad: str
) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        calls: list[Callable[[], Any]] = [
            lambda: acme.enqueue(bad, "Get"),
            lambda: acme.enqueue("erp", bad),
            lambda: acme.enqueue("erp", "Get", headers={bad: "v"}),
            lambda: acme.enqueue("erp", "Get", headers={"h": [bad]}),
            lambda: acme.enqueue("erp", "Get", idempotency_key=bad),
            lambda: acme.call("erp", "Get", headers={"h": bad}, timeout=1),
            lambda: acme.durable.submit(bad, [1]),
            lambda: acme.durable.submit("k", [1], params={"a": bad}),
            lambda: acme.durable.submit("k", [1, bad]),
            lambda: acme.durable.submit("k", [1], created_by=bad),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError):
                await call()
        with pytest.raises(InvalidInputError):
            client.tenant(bad)
        assert await acme.poll_status(await acme.enqueue("erp", "Get", body=b"\0\xed\xa0\x80")) is not None
    assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_request") == 1
    # A submission that fails on the way leaves a job that nobody sees, and a sweep takes.
    assert await admin.fetchval("select count(*) from relay.durable_job where status <> 'submitting'") == 0
