"""Decisions and looks of a gateway: what each says, and what it says to the one who lost."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import anyio
import asyncpg
import pytest

from dispatch_core.database import Database
from dispatch_core.durable_models import ChunkStatus, Controlled, JobStatus
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import (
    ConnectionLostError,
    DatabaseBusyError,
    IdempotencyConflictError,
    InvalidInputError,
    TenancyDeniedError,
)
from gateway_sdk import ChunkSpec, durable_calls
from gateway_sdk.bounded import bounded
from gateway_sdk.durable import DurableJobs
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.protocol import TENANT, Connection, logins
from tests.support.proxy import TcpProxy

DECISIONS = ("pause", "resume", "cancel", "retry_failed")


async def told(jobs: DurableJobs, job_id: UUID) -> list[tuple[str, Any, Any, Any]]:
    return [
        (str(event.type), event.actor, event.channel, (event.detail or {}).get("note"))
        async for event in jobs.events(job_id)
    ]


async def put(jobs: DurableJobs, worker: Connection, status: str) -> UUID:
    """Submit a job of two chunks and bring it into a status."""
    job_id = await jobs.submit("import", [1, 2], max_attempts=1, idempotent=status != "needs_review")
    if status == "queued":
        return job_id
    if status == "paused":
        await jobs.pause(job_id)
        return job_id
    if status == "cancelled":
        await jobs.cancel(job_id)
        return job_id
    leases = await durable.claim(worker, 2, lease=0.001 if status == "needs_review" else 30)
    if status == "running":
        return job_id
    for n, lease in enumerate(leases):
        if status == "completed" or (status == "completed_with_errors" and n):
            await durable.complete(worker, lease)
        elif status == "needs_review":
            await worker.fetchval("select pg_sleep(0.01)")
            await durable.reap(worker)
        else:
            await durable.fail(worker, lease, retryable=False)
    await durable.finish(worker, job_id)
    now = await jobs.status(job_id)
    assert now is not None
    assert now.status == status
    return job_id


ANSWERS = {
    "queued": ("applied", "already", "applied", "already"),
    "running": ("applied", "already", "applied", "already"),
    "paused": ("already", "applied", "applied", "already"),
    "needs_review": ("refused", "refused", "refused", "already"),
    "completed": ("too_late", "too_late", "too_late", "already"),
    "completed_with_errors": ("too_late", "too_late", "too_late", "applied"),
    "failed": ("too_late", "too_late", "too_late", "applied"),
    "cancelled": ("too_late", "too_late", "already", "refused"),
}
AFTER = {"pause": "paused", "resume": "queued", "cancel": "cancelled", "retry_failed": "running"}


@pytest.mark.parametrize("status", ANSWERS)
async def test_each_decision_says_what_it_really_did_from_each_status(
    database: TestDatabase, worker: Connection, status: str
) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        for decision, expected in zip(DECISIONS, ANSWERS[status], strict=True):
            job_id = await put(jobs, worker, status)
            before = await told(jobs, job_id)
            done: Controlled = await getattr(jobs, decision)(job_id, actor="bob", note="because", channel="test")
            assert (done.outcome, done.was) == (expected, status), decision
            now = await jobs.status(job_id)
            assert now is not None
            assert now.status is done.status
            if expected == "applied":
                assert done.status == AFTER[decision]
                # With its event, in one transaction.
                (event,) = (await told(jobs, job_id))[len(before) :]
                assert event[1:] == ("bob", "test", "because")
            else:
                # Who lost has written nothing, no event either.
                assert done.status == status
                assert await told(jobs, job_id) == before
            again: Controlled = await getattr(jobs, decision)(job_id)
            assert again.outcome == ("already" if expected == "applied" else expected)


@pytest.mark.parametrize("decision", DECISIONS)
async def test_of_many_who_decide_the_same_at_once_one_has_done_it(
    database: TestDatabase, worker: Connection, decision: str
) -> None:
    start = {"pause": "queued", "resume": "paused", "cancel": "running", "retry_failed": "failed"}[decision]
    answers: list[Controlled] = []
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await put(jobs, worker, start)
        before = len(await told(jobs, job_id))

        async def decide() -> None:
            answers.append(await getattr(jobs, decision)(job_id))

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(decide)
        assert sorted(answer.outcome for answer in answers) == ["already"] * 7 + ["applied"]
        assert len(await told(jobs, job_id)) == before + 1


async def is_blocked(admin: Connection, fragment: str, answers: list[Controlled]) -> bool:
    found = "select exists (select from pg_stat_activity where position($1 in query) > 0 and wait_event_type = 'Lock')"
    return bool(answers) or await admin.fetchval(found, fragment)


@pytest.mark.case("C24")
async def test_a_cancellation_at_every_point_says_what_it_did_and_nothing_runs_or_revives_afterwards(
    database: TestDatabase, gateway: Connection, worker: Connection, admin: Connection
) -> None:
    """C24: pending, claimed, mid-handler in a transaction, between completion and commit, ended; then the reaper."""
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable

        pending = await jobs.submit("import", [1, 2])
        done = await jobs.cancel(pending)
        assert (done.outcome, done.was, done.chunks, done.running) == ("applied", "queued", 2, 0)
        assert await durable.claim(worker) == []

        claimed = await jobs.submit("import", [1, 2])
        (lease,) = await durable.claim(worker)
        done = await jobs.cancel(claimed)
        assert (done.outcome, done.was, done.chunks, done.running) == ("applied", "running", 2, 0)
        assert await durable.heartbeat(worker, lease) == ["stale"]
        with pytest.raises(asyncpg.PostgresError) as lost:
            await durable.complete(worker, lease)
        assert lost.value.sqlstate == "S2041"

        # Its holder's transaction has said nothing yet, and keeps the chunk locked.
        handling = await jobs.submit("import", [1])
        (lease,) = await durable.claim(worker)
        transaction = worker.transaction()
        await transaction.start()
        await durable.checkpoint(worker, lease, {"at": 1})
        done = await jobs.cancel(handling)
        assert (done.outcome, done.status, done.chunks, done.running) == ("applied", "cancelled", 0, 1)
        with pytest.raises(asyncpg.PostgresError) as lost:
            await durable.complete(worker, lease)
        assert lost.value.sqlstate == "S2041"
        await transaction.rollback()
        await durable.run_out(admin)
        assert [row["status"] for row in await durable.reap(worker)] == ["cancelled"]

        # It has completed, and commits while the cancellation waits for it.
        completing = await jobs.submit("import", [1])
        (lease,) = await durable.claim(worker)
        transaction = worker.transaction()
        await transaction.start()
        assert await durable.complete(worker, lease) == ("applied", True)
        answers: list[Controlled] = []

        async def cancel() -> None:
            answers.append(await jobs.cancel(completing))

        async with anyio.create_task_group() as group:
            group.start_soon(cancel)
            # For a second at most; then it leaves the chunk to its holder, with the same answer.
            await eventually(lambda: is_blocked(admin, "durable_control", answers))
            await transaction.commit()
        assert (answers[0].outcome, answers[0].status, answers[0].chunks) == ("applied", "cancelled", 0)
        done_chunk = await jobs.chunk(completing, 1)
        assert done_chunk is not None
        assert done_chunk.status == "done"

        ended = await put(jobs, worker, "completed")
        over = await jobs.status(ended)
        assert over is not None
        assert over.is_terminal
        assert (await jobs.cancel(ended)).outcome == "too_late"

        await durable.run_out(admin)
        assert await durable.reap(worker) == []
        await durable.finish(worker, pending, claimed, handling, completing, ended)
        for job_id in (pending, claimed, handling, completing):
            assert await durable.status(gateway, job_id) == "cancelled"
            assert await durable.counters_are_exact(admin, job_id)
        assert await durable.status(gateway, ended) == "completed"
        assert await durable.claim(worker, 10) == []


@pytest.mark.parametrize(("decision", "job_then"), [("retry", "running"), ("done", "completed"), ("failed", "failed")])
async def test_a_chunk_that_waits_for_a_person_is_decided_about_once(
    database: TestDatabase, worker: Connection, admin: Connection, decision: Any, job_then: str
) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1], idempotent=False)
        await durable.claim(worker)
        assert (await jobs.resolve(job_id, 1, decision)).outcome == "too_late"
        await durable.run_out(admin)
        assert [row["status"] for row in await durable.reap(worker)] == ["needs_review"]
        await durable.finish(worker, job_id)
        assert (await jobs.cancel(job_id)).outcome == "refused"
        done = await jobs.resolve(job_id, 1, decision, actor="bob", note="looked", channel="test")
        assert (done.outcome, done.chunk_status, done.status) == ("applied", decision, job_then)
        lost = await jobs.resolve(job_id, 1, "retry" if decision != "retry" else "done")
        assert (lost.outcome, lost.chunk_status, lost.status) == ("too_late", decision, job_then)
        assert (await jobs.resolve(job_id, 2, decision)).outcome == "unknown"
        assert ("resolved", "bob", "test", "looked") in await told(jobs, job_id)
        chunk = await jobs.chunk(job_id, 1)
        assert chunk is not None
        assert chunk.status is ChunkStatus(decision)


async def test_of_a_job_that_nobody_knows_every_verb_says_so(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        theirs = await client.tenant("globex").durable.submit("import", [1])
        for job_id in (uuid4(), theirs):
            for decision in DECISIONS:
                done = await getattr(jobs, decision)(job_id)
                assert (done.outcome, done.was, done.status, done.chunks, done.running) == ("unknown", None, None, 0, 0)
            assert (await jobs.resolve(job_id, 1, "done")).outcome == "unknown"
            assert await jobs.status(job_id) is None
            assert await jobs.chunk(job_id, 1) is None
            assert (await jobs.event_page(job_id)).events == []
            assert [error async for error in jobs.row_errors(job_id)] == []
            assert [chunk async for chunk in jobs.chunks(job_id)] == []


@pytest.mark.invariant("I4")
async def test_a_login_of_one_tenant_reads_and_changes_nothing_of_another(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        theirs = await client.tenant("globex").durable.submit("import", [1])
    async with logins(database) as made:
        name = await made.create()
        await made.bind(name, "gateway", TENANT)
        async with open_client(database.dsn(name)) as client:
            jobs = client.tenant("globex").durable
            for call in (
                jobs.status(theirs), jobs.pause(theirs), jobs.cancel(theirs), jobs.resolve(theirs, 1, "done"),
                jobs.event_page(theirs), jobs.chunk_page(theirs), jobs.row_error_page(theirs), jobs.list(),
                jobs.wait(theirs), anext(jobs.watch(theirs)), anext(jobs.events(theirs, follow=True)),
            ):  # fmt: skip
                with pytest.raises(TenancyDeniedError):
                    await call
            mine = client.tenant(TENANT).durable
            assert await mine.status(theirs) is None
            # Its id is free here, and another job.
            assert await mine.submit("export", [1], job_id=theirs) == theirs
            assert [job.kind for job in await mine.list()] == ["export"]
            with pytest.raises(IdempotencyConflictError):
                await mine.submit("import", [1], job_id=theirs)


async def test_what_is_wrong_with_a_call_is_said_before_the_database_is_asked(database: TestDatabase) -> None:
    job_id = uuid4()
    wrong: list[Callable[[DurableJobs], Awaitable[Any]]] = [
        lambda jobs: jobs.pause("no id"),
        lambda jobs: jobs.cancel(job_id, note="x" * 2001),
        lambda jobs: jobs.resume(job_id, actor=5),  # type: ignore[arg-type]
        lambda jobs: jobs.resolve(job_id, 1, "redo"),  # type: ignore[arg-type]
        lambda jobs: jobs.resolve(job_id, "1", "done"),  # type: ignore[arg-type]
        lambda jobs: jobs.chunk(job_id, 1.5),  # type: ignore[arg-type]
        lambda jobs: jobs.chunk_page(job_id, status="complete"),
        lambda jobs: jobs.row_error_page(job_id, limit=0),
        lambda jobs: jobs.event_page(job_id, limit=-1),
        lambda jobs: jobs.list(status="complete"),
    ]
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(proxy.dsn(database.gateway_dsn)) as client,
    ):
        proxy.mode = "black_hole"
        for call in wrong:
            with anyio.fail_after(5), pytest.raises(InvalidInputError):
                await call(client.tenant(TENANT).durable)
        proxy.mode = "reset"


# --- a reply that is lost -------------------------------------------------------------------------------------------


def faults(monkeypatch: pytest.MonkeyPatch, *errors: Exception, is_done: bool) -> list[int]:
    """Let calls of the room fail with these errors in turn, done or not done; return a list as long as the calls."""
    calls: list[int] = []

    async def failing(database: Database, seconds: float, run: Callable[[Any], Awaitable[Any]]) -> Any:
        calls.append(1)
        error = errors[len(calls) - 1] if len(calls) <= len(errors) else None
        if error is not None and not is_done:
            raise error
        answer = await bounded(database, seconds, run)
        if error is not None:
            raise error
        return answer

    monkeypatch.setattr(durable_calls, "bounded", failing)
    return calls


@pytest.mark.case("C24")
async def test_a_decision_whose_reply_was_lost_is_not_made_twice_and_says_that_it_is_unknown(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        calls = faults(monkeypatch, ConnectionLostError("the reply was lost"), is_done=True)
        with pytest.raises(ConnectionLostError) as caught:
            await jobs.pause(job_id)
        assert caught.value.retryable
        assert caught.value.job_id == job_id
        assert len(calls) == 1
        assert (await jobs.pause(job_id)).outcome == "already"


async def test_a_decision_that_was_not_made_for_sure_is_made_again(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        busy = DatabaseBusyError("deadlock detected", sqlstate="40P01")
        calls = faults(monkeypatch, busy, busy, is_done=False)
        assert (await jobs.pause(job_id)).outcome == "applied"
        assert len(calls) == 3
        # A read may be made again whatever has happened.
        calls.clear()
        calls = faults(monkeypatch, ConnectionLostError("the reply was lost"), is_done=True)
        assert (await jobs.status(job_id)) is not None
        assert len(calls) == 2


# --- looking --------------------------------------------------------------------------------------------------------


async def test_a_status_tells_how_far_the_job_is_now_or_as_it_was_last_counted(
    database: TestDatabase, worker: Connection
) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [ChunkSpec(n, rows=100) for n in range(4)])
        first, second = await durable.claim(worker, 2)
        await durable.complete(worker, first, {"ok": 1}, rows_done=90, rows_failed=10)
        await durable.checkpoint(worker, second, {"at": 50}, rows_done=50)
        job = await jobs.status(job_id)
        assert job is not None
        progress = job.progress
        assert (progress.status, progress.chunks_total, progress.rows_total) == (JobStatus.RUNNING, 4, 400)
        assert (progress.rows_done, progress.rows_failed, progress.fraction) == (140, 10, 150 / 400)
        # As a dispatch job's result says it.
        assert (job.is_terminal, progress.is_terminal) == (False, False)
        assert {s: n for s, n in progress.chunks.items() if n} == {"done": 1, "running": 1, "pending": 2}
        counted = await jobs.status(str(job_id), fresh=False)
        assert counted is not None
        assert counted.rows_done == 0
        assert counted.counted_at < job.counted_at


async def test_jobs_come_a_page_at_a_time_the_newest_first(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        made = [
            await jobs.submit("import" if n % 2 else "export", [n], created_by="alice" if n < 3 else None)
            for n in range(6)
        ]
        made.reverse()
        first = await jobs.list(limit=4)
        assert [job.job_id for job in first] == made[:4]
        assert [job.job_id for job in await jobs.list(limit=4, after=first[-1].job_id)] == made[4:]
        assert [job.job_id for job in await jobs.list(kind="import", created_by="alice")] == [made[4]]
        await jobs.cancel(made[0])
        assert [job.job_id for job in await jobs.list(status="cancelled")] == made[:1]
        assert len(await jobs.list(status=["cancelled", JobStatus.QUEUED])) == 6
        with pytest.raises(InvalidInputError):
            await jobs.list(limit=0)
        for wrong in ("complete", ["queued", "done"], []):
            # Nothing would be found, and nobody would know why.
            with pytest.raises(InvalidInputError, match="status"):
                await jobs.list(status=wrong)
        assert await client.tenant("globex").durable.list() == []


async def test_chunks_of_a_megabyte_are_read_some_at_a_time(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    chunks = DurableRepository.chunks

    async def noting(self: Any, *args: Any, limit: int, **given: Any) -> Any:
        limits.append(limit)
        return await chunks(self, *args, limit=limit, **given)

    monkeypatch.setattr(DurableRepository, "chunks", noting)
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", range(250))
        assert len([chunk async for chunk in jobs.chunks(job_id)]) == 250
        await jobs.chunk_page(job_id)
    # At most 100 MiB at once, in one statement.
    assert set(limits) == {100}


async def test_row_errors_and_chunks_come_a_page_at_a_time_or_one_after_the_other(
    database: TestDatabase, worker: Connection
) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", range(1100))
        first, second = await durable.claim(worker, 2)
        for lease, count in ((first, 2300), (second, 5)):
            errors = [
                {"row": n, "code": "bad", "message": f"row {n}", "data": {"n": n}} for n in reversed(range(count))
            ]
            await durable.tell_errors(worker, lease, errors)
        found = [(error.seq, error.row) async for error in jobs.row_errors(job_id)]
        assert found == [(1, n) for n in range(2300)] + [(2, n) for n in range(5)]
        assert [error.data async for error in jobs.row_errors(job_id, seq=2)] == [{"n": n} for n in range(5)]
        page = await jobs.row_error_page(job_id, limit=3)
        page = await jobs.row_error_page(job_id, limit=2, after=page[-1])
        assert [(error.row, error.message) for error in page] == [(3, "row 3"), (4, "row 4")]

        assert [chunk.seq async for chunk in jobs.chunks(job_id)] == list(range(1, 1101))
        assert [chunk.seq async for chunk in jobs.chunks(job_id, status="running")] == [1, 2]
        assert [chunk.seq for chunk in await jobs.chunk_page(job_id, after=1098)] == [1099, 1100]


# The verbs as they were promised, with their parameters.
VERBS = {
    "submit": "kind chunks params idempotent max_attempts priority created_by job_id conn",
    "status": "job_id fresh",
    "pause": "job_id actor note channel",
    "resume": "job_id actor note channel",
    "cancel": "job_id actor note channel",
    "retry_failed": "job_id actor note channel",
    "resolve": "job_id seq decision actor note channel",
    "event_page": "job_id after limit",
    "events": "job_id after follow",
    "row_error_page": "job_id after limit seq",
    "row_errors": "job_id seq",
    "chunk": "job_id seq",
    "chunk_page": "job_id after limit status",
    "chunks": "job_id status",
    "list": "status kind created_by after limit",
    "wait": "job_id timeout",
    "watch": "job_id",
}


def test_these_are_the_verbs_of_durable_jobs_with_their_parameters() -> None:
    found = {name: verb for name, verb in vars(DurableJobs).items() if name[0] != "_" and inspect.isfunction(verb)}
    assert {name: " ".join(list(inspect.signature(verb).parameters)[1:]) for name, verb in found.items()} == VERBS
