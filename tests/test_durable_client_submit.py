"""Submitting durable jobs by the gateway's client: job and chunks together, or not at all."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest

from dispatch_core.database import Database
from dispatch_core.durable_models import ChunkSpec, JobStatus
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import (
    ClientClosedError,
    ConnectionLostError,
    DatabaseUnavailableError,
    IdempotencyConflictError,
    InvalidInputError,
    InvalidNameError,
    InvalidPayloadError,
    JobClosedError,
    TenancyDeniedError,
    TransactionRequiredError,
)
from dispatch_core.settings import DurableJobsSettings
from gateway_sdk import durable_calls, durable_submit
from gateway_sdk.bounded import bounded
from tests.support import durable
from tests.support.activity import wait_until_blocked, wait_until_statement_runs
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.protocol import TENANT, Connection, connected, logins
from tests.support.proxy import TcpProxy

SMALL = DurableJobsSettings(insert_batch=3)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a submission be taken back in any time, however busy the machine is."""
    monkeypatch.setattr(durable_submit, "_ABANDON_SECONDS", 20.0)


class BrokenError(Exception):
    pass


async def slowly(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


class Seen:
    """What others see of durable jobs: a reader, a relay, a person."""

    def __init__(self, gateway: Connection, worker: Connection) -> None:
        self._gateway = gateway
        self._worker = worker

    async def nothing(self, job_id: UUID | None = None) -> bool:
        found: list[Any] = []
        for table in ("job", "chunk", "event"):
            found += await self._gateway.fetch("select item from relay.durable_query($1, $2)", TENANT, table)
        found += await durable.claim(self._worker, 10)
        if job_id is not None:
            found += await self._gateway.fetch("select * from relay.durable_jobs($1, $2)", TENANT, [job_id])
            assert (await durable.control(self._gateway, job_id, "cancel"))["outcome"] == "unknown"
        return found == []


@pytest.fixture
def seen(gateway: Connection, worker: Connection) -> Seen:
    return Seen(gateway, worker)


async def hidden(admin: Connection) -> list[str]:
    rows = await admin.fetch("select status from relay.durable_job where status in ('submitting', 'removing')")
    return [row["status"] for row in rows]


async def numbers(admin: Connection, job_id: UUID) -> list[int]:
    rows = await admin.fetch("select seq from relay.durable_chunk where job_id = $1 order by seq", job_id)
    return [row["seq"] for row in rows]


# --- what is submitted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [list, iter, lambda items: slowly(*items)])
async def test_chunks_may_come_from_a_list_an_iterator_or_an_async_iterator(database: TestDatabase, form: Any) -> None:
    payloads = [{"n": n} for n in range(7)]
    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", form(payloads), params={"table": "t"}, created_by="alice", priority=2)
        job = await jobs.status(job_id)
        assert job is not None
        assert job.status is JobStatus.QUEUED
        assert (job.chunks_total, job.params, job.created_by, job.priority) == (7, {"table": "t"}, "alice", 2)
        assert [(c.seq, c.payload) async for c in jobs.chunks(job_id)] == [(n + 1, p) for n, p in enumerate(payloads)]
        assert [event.type async for event in jobs.events(job_id)] == ["submitted"]


@pytest.mark.parametrize("chunks", [0, 2, 3, 7])
async def test_a_job_has_as_many_chunks_as_were_given_whatever_a_batch_is(
    database: TestDatabase, admin: Connection, chunks: int
) -> None:
    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [ChunkSpec(n, rows=10) for n in range(chunks)], idempotent=False)
        job = await jobs.status(job_id, fresh=False)
        assert job is not None
        assert (job.chunks_total, job.rows_total, job.idempotent) == (chunks, chunks * 10, False)
        assert await numbers(admin, job_id) == list(range(1, chunks + 1))
        assert job.status is (JobStatus.QUEUED if chunks else JobStatus.COMPLETED)
        if not chunks:
            assert (await jobs.wait(job_id, timeout=0)).job_id == job_id


async def test_numbers_and_text_come_back_as_they_were_given(database: TestDatabase) -> None:
    payloads: list[Any] = [None, 2**70, 0.1, 'ü\\"', [], {"a": {"b": [1, "2", None]}}]
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", payloads, params=[1, 2])
        assert [chunk.payload for chunk in await jobs.chunk_page(job_id)] == payloads
        assert (await jobs.list())[0].params == [1, 2]


@pytest.mark.invariant("J1")
async def test_ten_thousand_chunks_come_in_batches_and_nobody_sees_a_part_of_them(
    database: TestDatabase, seen: Seen, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[tuple[int, int]] = []
    insert = DurableRepository.insert_chunk_texts

    async def insert_chunk_texts(self: Any, tenant: str, job_id: UUID, texts: list[bytes], **given: Any) -> int:
        batches.append((len(texts), sum(map(len, texts))))
        return await insert(self, tenant, job_id, texts, **given)

    monkeypatch.setattr(DurableRepository, "insert_chunk_texts", insert_chunk_texts)
    job_id = uuid4()

    async def rows() -> AsyncIterator[dict[str, Any]]:
        for n in range(10_000):
            if n % 2500 == 2499:
                assert await seen.nothing(job_id)
                # Nothing is held while the caller's own code runs.
                assert not await admin.fetch(
                    "select from pg_stat_activity where usename like '%gateway%' and xact_start is not null"
                )
            yield {"n": n, "text": "x" * (200 if n < 5000 else 1)}

    settings = DurableJobsSettings(insert_batch=1000, insert_batch_bytes=100_000)
    async with open_client(database.gateway_dsn, durable=settings) as client:
        jobs = client.tenant(TENANT).durable
        await jobs.submit("import", rows(), job_id=job_id)
        job = await jobs.status(job_id)
        assert job is not None
        assert (job.chunks_total, job.status) == (10_000, JobStatus.QUEUED)
        assert len([None async for _ in jobs.chunks(job_id)]) == 10_000
    assert sum(count for count, _ in batches) == 10_000
    assert all(count <= 1000 and size <= 100_000 for count, size in batches)
    assert max(count for count, _ in batches) == 1000
    assert await numbers(admin, job_id) == list(range(1, 10_001))


async def test_a_chunk_that_is_larger_than_a_batch_is_a_batch_of_its_own(database: TestDatabase) -> None:
    settings = DurableJobsSettings(insert_batch_bytes=1024)
    async with open_client(database.gateway_dsn, durable=settings) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", ["a", "b" * 5000, "c" * 5000, "d"])
        assert [len(chunk.payload) for chunk in await jobs.chunk_page(job_id)] == [1, 5000, 5000, 1]


# --- or not at all --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "is_async"), [(0, True), (1, False), (3, True), (3, False), (8, True)])
async def test_an_iterator_that_raises_leaves_nothing_to_see(
    database: TestDatabase, seen: Seen, admin: Connection, at: int, is_async: bool
) -> None:
    job_id = uuid4()

    def broken() -> Iterator[int]:
        yield from range(at)
        raise BrokenError

    async def broken_async() -> AsyncIterator[int]:
        for n in broken():
            yield n

    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        jobs = client.tenant(TENANT).durable
        with pytest.raises(BrokenError):
            await jobs.submit("import", broken_async() if is_async else broken(), job_id=job_id)
        assert await jobs.status(job_id) is None
        assert await seen.nothing(job_id)
        assert await hidden(admin) == ([] if at < 3 else ["removing"])


async def test_a_retryable_error_that_is_the_iterators_own_abandons_the_job_as_any_other(
    database: TestDatabase, seen: Seen, admin: Connection
) -> None:
    """Chunks may be made of what another database tells, which may be away."""

    def broken() -> Iterator[int]:
        yield from range(8)
        raise DatabaseUnavailableError("the other database")

    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        with pytest.raises(DatabaseUnavailableError, match="the other"):
            await client.tenant(TENANT).durable.submit("import", broken())
    assert await seen.nothing()
    assert await hidden(admin) == ["removing"]


@pytest.mark.parametrize(("bad", "error"), [(float("nan"), InvalidPayloadError), ("x" * 3000, InvalidPayloadError)])
async def test_a_chunk_that_is_refused_is_named_and_leaves_nothing_to_see(
    database: TestDatabase, seen: Seen, bad: Any, error: type[Exception]
) -> None:
    settings = DurableJobsSettings(insert_batch=3, max_payload_bytes=1000)
    async with open_client(database.gateway_dsn, durable=settings) as client:
        with pytest.raises(error, match=r"chunks\[5\]"):
            await client.tenant(TENANT).durable.submit("import", [0, 1, 2, 3, 4, bad])
        assert await seen.nothing()


@pytest.mark.parametrize(("at", "by"), [(0, "scope"), (3, "scope"), (7, "scope"), (7, "task")])
async def test_a_submission_that_is_cancelled_in_its_iterator_leaves_nothing_to_see(
    database: TestDatabase, seen: Seen, admin: Connection, at: int, by: str
) -> None:
    job_id = uuid4()
    there = anyio.Event()
    left = anyio.Event()

    async def chunks() -> AsyncIterator[int]:
        try:
            for n in count():
                if n == at:
                    there.set()
                    await anyio.sleep_forever()
                yield n
        finally:
            left.set()

    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        jobs = client.tenant(TENANT).durable
        if by == "scope":
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: jobs.submit("import", chunks(), job_id=job_id))
                await there.wait()
                group.cancel_scope.cancel()
        else:
            task = asyncio.create_task(jobs.submit("import", chunks(), job_id=job_id))
            await there.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert left.is_set()
        assert await seen.nothing(job_id)
        assert await hidden(admin) == ([] if at < 3 else ["removing"])


@pytest.mark.parametrize("step", ["insert_chunks", "seal"])
async def test_a_submission_that_is_cancelled_in_a_statement_leaves_nothing_to_see(
    database: TestDatabase, seen: Seen, admin: Connection, step: str
) -> None:
    job_id = uuid4()
    async with connected(database.admin_dsn) as holder, open_client(database.gateway_dsn, durable=SMALL) as client:
        transaction = holder.transaction()

        async def chunks() -> AsyncIterator[int]:
            for n in range(6):
                if n == 4 and step == "insert_chunks":
                    await lock()
                yield n
            # Both batches are stored by now.
            await lock()

        async def lock() -> None:
            await transaction.start()
            await holder.execute("select from relay.durable_job where job_id = $1 for update", job_id)

        scope = anyio.CancelScope()

        async def submit() -> None:
            with scope:
                await client.tenant(TENANT).durable.submit("import", chunks(), job_id=job_id)

        async with anyio.create_task_group() as group:
            group.start_soon(submit)
            pid = await wait_until_statement_runs(admin, f"durable_{step}")
            await wait_until_blocked(admin, pid)
            scope.cancel()
            # It is shielded: the submission is taken back before the cancellation goes on.
            pid = await wait_until_statement_runs(admin, "durable_abandon")
            await wait_until_blocked(admin, pid)
            await transaction.rollback()
        assert await seen.nothing(job_id)
        assert await hidden(admin) == ["removing"]


async def test_a_cancellation_is_not_held_up_for_long_by_a_database_that_does_not_answer(
    database: TestDatabase, seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(durable_submit, "_ABANDON_SECONDS", 0.2)
    there = anyio.Event()

    async def chunks() -> AsyncIterator[int]:
        for n in range(5):
            yield n
        there.set()
        await anyio.sleep_forever()

    async with TcpProxy.before(database.gateway_dsn) as proxy:
        dsn = proxy.dsn(database.gateway_dsn)
        async with open_client(dsn, durable=SMALL, close_timeout_seconds=0.1) as client:
            async with anyio.create_task_group() as group:
                group.start_soon(client.tenant(TENANT).durable.submit, "import", chunks())
                await there.wait()
                proxy.mode = "black_hole"
                began = anyio.current_time()
                group.cancel_scope.cancel()
            assert anyio.current_time() < began + 10
            assert "could not be taken back, and will be swept" in caplog.text
            proxy.mode = "reset"
    assert await seen.nothing()


async def test_the_end_of_the_client_ends_a_submission_and_leaves_nothing_to_see(
    database: TestDatabase, seen: Seen, admin: Connection
) -> None:
    there = anyio.Event()
    outcome: list[BaseException] = []

    async def chunks() -> AsyncIterator[int]:
        for n in range(5):
            yield n
        there.set()
        await anyio.sleep_forever()

    async def submit() -> None:
        try:
            await client.tenant(TENANT).durable.submit("import", chunks())
        except ClientClosedError as error:
            outcome.append(error)

    async with anyio.create_task_group() as group, open_client(database.gateway_dsn, durable=SMALL) as client:
        group.start_soon(submit)
        await there.wait()
    assert isinstance(outcome[0], ClientClosedError)
    assert await seen.nothing()
    assert await hidden(admin) == ["removing"]


async def test_a_process_that_is_killed_leaves_nothing_to_see_and_its_rows_are_removed(
    database: TestDatabase, seen: Seen, admin: Connection, gateway: Connection
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.submitting_process", database.gateway_dsn, TENANT,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    with anyio.fail_after(30):
        assert await process.stdout.readline() == b"submitting\n"
        process.send_signal(signal.SIGKILL)
        await process.wait()
    assert await seen.nothing()
    assert await hidden(admin) == ["submitting"]
    await gateway.fetchval("select relay.durable_retire($1, '1 day', '0', 10)", TENANT)
    await gateway.fetchval("select relay.durable_remove($1, 100)", TENANT)
    assert await admin.fetchval("select count(*) from relay.durable_chunk") == 0


async def test_a_generator_that_is_left_early_has_ended_when_submit_returns(database: TestDatabase) -> None:
    ended: list[str] = []

    def chunks() -> Iterator[Any]:
        try:
            yield from (0, 1, float("nan"), 3)
        finally:
            ended.append("sync")

    async def chunks_async() -> AsyncIterator[Any]:
        try:
            for chunk in chunks():
                yield chunk
        finally:
            await anyio.lowlevel.checkpoint()
            ended.append("async")

    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        for source in (chunks(), chunks_async()):
            with pytest.raises(InvalidPayloadError):
                await client.tenant(TENANT).durable.submit("import", source)
    assert ended[:1] == ["sync"]
    assert "async" in ended


# --- again ----------------------------------------------------------------------------------------------------------


def lose_reply(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Lose the reply of one of a client's durable calls, which is done; return how many there were."""
    done = 0

    async def losing(database: Database, seconds: float, run: Callable[[Any], Awaitable[Any]]) -> Any:
        nonlocal done
        answer = await bounded(database, seconds, run)
        done += 1
        if done == number:
            raise ConnectionLostError("the reply was lost")
        return answer

    monkeypatch.setattr(durable_calls, "bounded", losing)
    return lambda: done


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
async def test_a_step_whose_reply_was_lost_is_made_again_and_changes_nothing(
    database: TestDatabase, admin: Connection, gateway: Connection, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """1 the job, 2 to 4 its batches, 5 the seal."""
    calls = lose_reply(monkeypatch, number)
    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        job_id = await client.tenant(TENANT).durable.submit("import", range(7))
    assert calls() == 6
    assert await numbers(admin, job_id) == list(range(1, 8))
    assert await durable.counters_are_exact(admin, job_id)
    assert await durable.told(gateway, job_id) == ["submitted"]


async def test_a_small_job_whose_commit_had_no_reply_is_stored_once_even_if_it_has_ended_meanwhile(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        (lease,) = await durable.claim(worker)
        await durable.complete(worker, lease)
        await durable.finish(worker, lease.job_id)

    tries = 0

    async def losing(database: Database, seconds: float, run: Callable[[Any], Awaitable[Any]]) -> Any:
        nonlocal tries
        answer = await bounded(database, seconds, run)
        tries += 1
        if tries == 1:
            await work()
            raise ConnectionLostError("the reply was lost")
        return answer

    monkeypatch.setattr(durable_calls, "bounded", losing)
    async with open_client(database.gateway_dsn) as client:
        job_id = await client.tenant(TENANT).durable.submit("import", ["only"])
    assert tries == 2
    assert await durable.status(gateway, job_id) == "completed"
    assert await numbers(admin, job_id) == [1]


async def test_connections_that_are_killed_on_the_way_are_ridden_out(database: TestDatabase, admin: Connection) -> None:
    async def chunks() -> AsyncIterator[int]:
        for n in range(30):
            if n % 10 == 5:
                await admin.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where usename like '%gateway%'"
                )
            yield n

    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        job_id = await client.tenant(TENANT).durable.submit("import", chunks())
    assert await numbers(admin, job_id) == list(range(1, 31))


async def test_an_outage_that_lasts_too_long_is_a_retryable_error_and_the_same_submission_goes_on_under_its_id(
    database: TestDatabase, seen: Seen, admin: Connection, gateway: Connection
) -> None:
    async with TcpProxy.before(database.gateway_dsn) as proxy:

        async def chunks() -> AsyncIterator[int]:
            for n in range(7):
                if n == 4 and proxy.accepted and not outages:
                    outages.append(n)
                    proxy.mode = "reset"
                yield n

        outages: list[int] = []
        dsn = proxy.dsn(database.gateway_dsn)
        async with open_client(dsn, durable=SMALL, write_timeout_seconds=2, connect_timeout_seconds=2) as client:
            jobs = client.tenant(TENANT).durable
            with pytest.raises(DatabaseUnavailableError) as caught:
                await jobs.submit("import", chunks())
            job_id = caught.value.job_id
            assert job_id is not None
            assert await seen.nothing()
            assert await hidden(admin) == ["submitting"]
            proxy.mode = "pass"
            assert await jobs.submit("import", chunks(), job_id=job_id) == job_id
    assert await numbers(admin, job_id) == list(range(1, 8))
    assert await durable.told(gateway, job_id) == ["submitted"]


async def test_a_job_id_that_is_given_again_changes_nothing_and_its_chunks_are_not_read_to_their_end(
    database: TestDatabase, admin: Connection
) -> None:
    read: list[int] = []

    def chunks() -> Iterator[int]:
        for n in range(100):
            read.append(n)
            yield n

    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", range(2), priority=1, job_id=str(uuid4()))
        assert await jobs.submit("import", chunks(), priority=7, job_id=job_id) == job_id
        assert await jobs.submit("import", [1], job_id=job_id) == job_id
        assert len(read) == 3
        await jobs.cancel(job_id)
        assert await jobs.submit("import", chunks(), job_id=job_id) == job_id
        with pytest.raises(IdempotencyConflictError):
            await jobs.submit("export", range(2), job_id=job_id)
    assert await numbers(admin, job_id) == [1, 2]


@pytest.mark.parametrize("chunks", [2, 40])
async def test_submissions_of_the_same_job_at_once_are_one_job(
    database: TestDatabase, admin: Connection, gateway: Connection, chunks: int
) -> None:
    job_id = uuid4()

    async def submit() -> None:
        assert await jobs.submit("import", range(chunks), job_id=job_id) == job_id

    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        jobs = client.tenant(TENANT).durable
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(submit)
    assert await numbers(admin, job_id) == list(range(1, chunks + 1))
    assert await durable.told(gateway, job_id) == ["submitted"]


async def test_fewer_chunks_than_an_earlier_submission_under_the_same_id_had_are_refused(
    database: TestDatabase, gateway: Connection, seen: Seen
) -> None:
    job_id = uuid4()
    await gateway.fetchval(
        "select relay.durable_insert_job($1, $2, 'import', '{}', true, 3, 0, null, true)", TENANT, job_id
    )
    given = json.dumps([{"payload": n} for n in range(5)])
    await gateway.fetchval("select relay.durable_insert_chunks($1, $2, $3, 1)", TENANT, job_id, given)
    async with open_client(database.gateway_dsn) as client:
        with pytest.raises(JobClosedError, match="has 5 chunks, not 4"):
            await client.tenant(TENANT).durable.submit("import", range(4), job_id=job_id)
        # It may be somebody else's, who is at it still.
        assert await seen.nothing()
        assert await client.tenant(TENANT).durable.submit("import", range(5), job_id=job_id) == job_id


@pytest.mark.parametrize("chunks", [0, 2, 7])
async def test_the_id_of_a_submission_that_was_abandoned_is_used_up(
    database: TestDatabase, seen: Seen, chunks: int
) -> None:
    async with open_client(database.gateway_dsn, durable=SMALL) as client, connected(database.gateway_dsn) as conn:
        jobs = client.tenant(TENANT).durable
        job_id = uuid4()
        with pytest.raises(InvalidPayloadError):
            await jobs.submit("import", [*range(5), float("nan")], job_id=job_id)
        with pytest.raises(JobClosedError, match="its id is used up"):
            await jobs.submit("import", range(chunks), job_id=job_id)
        async with conn.transaction():
            with pytest.raises(JobClosedError, match="its id is used up"):
                await jobs.submit("import", range(chunks), job_id=job_id, conn=conn)
        assert await seen.nothing(job_id)


# --- in the caller's transaction ------------------------------------------------------------------------------------


async def test_in_the_callers_transaction_the_job_is_seen_with_its_commit_and_relays_are_woken_by_it(
    database: TestDatabase, gateway: Connection, worker: Connection, seen: Seen, admin: Connection
) -> None:
    heard: list[str] = []
    channel = await worker.fetchval("select relay.channel('durable', $1)", TENANT)
    await worker.add_listener(channel, lambda _c, _p, _ch, payload: heard.append(str(payload)))
    async with open_client(database.gateway_dsn, durable=SMALL) as client, connected(database.gateway_dsn) as conn:
        # A caller's own codecs and settings are no matter.
        await conn.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        await conn.execute("set search_path = nowhere")
        jobs = client.tenant(TENANT).durable
        async with conn.transaction():
            job_id = await jobs.submit("import", slowly(*range(8)), params={"a": "'"}, conn=conn)
            assert await seen.nothing(job_id)
            assert await jobs.status(job_id) is None
        await eventually(lambda: "" in heard)
        job = await jobs.status(job_id)
        assert job is not None
        assert (job.status, job.chunks_total, job.params) == (JobStatus.QUEUED, 8, {"a": "'"})
        assert await numbers(admin, job_id) == list(range(1, 9))
        # Again, in another one: nothing changes.
        async with conn.transaction():
            assert await jobs.submit("import", range(3), job_id=job_id, conn=conn) == job_id
        assert await numbers(admin, job_id) == list(range(1, 9))


async def test_a_rollback_of_the_caller_leaves_nothing(database: TestDatabase, seen: Seen, admin: Connection) -> None:
    async with open_client(database.gateway_dsn) as client, connected(database.gateway_dsn) as conn:
        transaction = conn.transaction()
        await transaction.start()
        job_id = await client.tenant(TENANT).durable.submit("import", range(2), conn=conn)
        await transaction.rollback()
        assert await seen.nothing(job_id)
        assert await admin.fetchval("select count(*) from relay.durable_job") == 0


async def test_a_caller_who_commits_after_an_iterator_has_raised_has_submitted_nothing(
    database: TestDatabase, seen: Seen, admin: Connection
) -> None:
    async def broken() -> AsyncIterator[int]:
        for n in range(5):
            yield n
        raise BrokenError

    async with (
        open_client(database.gateway_dsn, durable=SMALL) as client,
        connected(database.gateway_dsn) as conn,
        conn.transaction(),
    ):
        with pytest.raises(BrokenError):
            await client.tenant(TENANT).durable.submit("import", broken(), conn=conn)
    assert await seen.nothing()
    assert await hidden(admin) == ["removing"]


async def test_without_a_transaction_of_the_caller_nothing_is_sent(database: TestDatabase, admin: Connection) -> None:
    async with open_client(database.gateway_dsn) as client, connected(database.gateway_dsn) as conn:
        with pytest.raises(TransactionRequiredError):
            await client.tenant(TENANT).durable.submit("import", range(2), conn=conn)
    assert await admin.fetchval("select count(*) from relay.durable_job") == 0


# --- what is refused ------------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"kind": ""}, InvalidNameError),
    ({"kind": 7}, InvalidInputError),
    ({"chunks": "text"}, InvalidInputError),
    ({"chunks": {"a": 1}}, InvalidInputError),
    ({"chunks": 5}, InvalidInputError),
    ({"max_attempts": 0}, InvalidInputError),
    ({"priority": 2**63}, InvalidInputError),
    ({"idempotent": "yes"}, InvalidInputError),
    ({"created_by": "a\0b"}, InvalidInputError),
    ({"params": float("inf")}, InvalidPayloadError),
    ({"job_id": "no id"}, InvalidInputError),
]


async def test_what_is_wrong_is_refused_before_the_database_is_asked(database: TestDatabase) -> None:
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn)) as client,
    ):
        proxy.mode = "black_hole"
        for given, error in REFUSED:
            with anyio.fail_after(5), pytest.raises(error):
                await client.tenant(TENANT).durable.submit(**{"kind": "import", "chunks": [1], **given})
        proxy.mode = "reset"


async def test_a_login_that_is_not_bound_to_the_tenant_submits_nothing(
    database: TestDatabase, admin: Connection
) -> None:
    async with logins(database) as made:
        name = await made.create()
        await made.bind(name, "gateway", TENANT)
        async with open_client(database.dsn(name), durable=SMALL) as client:
            for chunks in (range(2), range(20)):
                with pytest.raises(TenancyDeniedError):
                    await client.tenant("globex").durable.submit("import", chunks)
            await client.tenant(TENANT).durable.submit("import", range(2))
    assert await admin.fetchval("select array_agg(distinct tenant_id) from relay.durable_job") == [TENANT]
