"""What the end of a chunk's handler means, and what a handler is given (D114)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dispatch_core.durable_models import ChunkStatus, JobStatus
from dispatch_core.errors import HandlerRegistrationError, InvalidInputError
from relay_sdk import ChunkContext, ChunkOutcome, DispatchJob, Reject, Relay, Reply, Retry, Snooze
from tests.support.chunks import KIND, Work, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.relays import TENANT, Jobs, running

# --- registration ---


async def _handler(ctx: ChunkContext) -> None:
    pass


def _plain(ctx: ChunkContext) -> None:
    pass


async def _two(ctx: ChunkContext, more: int) -> None:
    pass


async def _generator(ctx: ChunkContext) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (_plain, {}, "must be `async def`"),
        (_two, {}, "must take one argument, the chunk's context"),
        (_generator, {}, "must return, not yield"),
        (_handler, {"timeout": 0}, "must be positive seconds"),
        (_handler, {"concurrency": 0}, "must be a whole number from 1 up"),
        (_handler, {"concurrency": True}, "must be a whole number from 1 up"),
        ("no function", {}, "must be a function"),
    ],
)
def test_what_cannot_be_a_handler_is_refused_at_registration(
    function: Any, options: dict[str, Any], message: str
) -> None:
    relay = Relay("erp", tenants=[TENANT])
    with pytest.raises(HandlerRegistrationError, match=message):
        relay.chunk_handler(KIND, **options)(function)
    assert relay.chunk_kinds == []


def test_a_kind_has_one_handler_and_a_name() -> None:
    relay = Relay("erp", tenants=[TENANT])
    assert relay.chunk_handler(KIND)(_handler) is _handler
    with pytest.raises(HandlerRegistrationError, match="have a handler already"):
        relay.chunk_handler(KIND)(_handler)
    with pytest.raises(HandlerRegistrationError):
        relay.chunk_handler("")(_handler)
    with pytest.raises(HandlerRegistrationError, match=r"@relay.chunk_handler\(\"kind\"\)"):
        relay.chunk_handler(_handler)  # type: ignore[arg-type]
    assert relay.chunk_kinds == [KIND]


# --- what a handler is given ---


async def test_a_handler_is_given_the_chunk_and_its_job(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit([{"from": 1}], params={"file": "a.csv"}, max_attempts=2)
    seen: list[Any] = []
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        seen.append((ctx.tenant_id, ctx.job_id, ctx.seq, ctx.kind, ctx.params, ctx.payload, ctx.checkpoint))
        seen.append((ctx.attempt, ctx.max_attempts, ctx.idempotent, ctx.lease.holder, bool(ctx.stopping)))
        assert 0 < ctx.lease_remaining <= 3

    async with running(relay):
        instance = relay.instance_id
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert seen == [
        (TENANT, job_id, 1, KIND, {"file": "a.csv"}, {"from": 1}, None),
        (1, 2, True, instance, False),
    ]


# --- what the end of one means ---


@pytest.mark.parametrize(
    ("returned", "outcome", "rows"),
    [
        (None, None, (4, 1)),
        ({"n": 1}, {"n": 1}, (4, 1)),
        (ChunkOutcome("x", rows_done=7), "x", (7, 1)),
        (ChunkOutcome(rows_failed=3), None, (4, 3)),
    ],
)
async def test_what_a_handler_returns_is_the_outcome_of_its_chunk(
    database: TestDatabase, gateway: Any, returned: Any, outcome: Any, rows: tuple[int, int]
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> Any:
        ctx.advance(4)
        ctx.row_error(5, "empty")
        return returned

    async with running(relay):
        await work.end(job_id)
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.outcome) == (ChunkStatus.DONE, outcome)
    assert (chunk.rows_done, chunk.rows_failed) == rows
    assert [(error.row, error.code) for error in await work.row_errors(job_id)] == [(5, "empty")]


async def test_a_handler_that_counts_nothing_has_done_all_rows(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    from dispatch_core.durable_models import ChunkSpec

    job_id = await work.submit([ChunkSpec(1, rows=10)])
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        ctx.row_error(3, "a")
        ctx.row_error(3, "b")
        ctx.row_error(4, "a")

    async with running(relay):
        job = await work.end(job_id)
    assert (job.rows_total, job.rows_done, job.rows_failed) == (10, 8, 2)
    assert job.status is JobStatus.COMPLETED_WITH_ERRORS


@pytest.mark.parametrize(
    ("how", "attempts", "message"),
    [
        (Reject("bad-file", "no header"), 1, "bad-file: no header"),
        (Retry(0, message="not yet"), 3, "S2R-RETRY: not yet"),
        (ValueError("boom"), 3, "S2R-HANDLER-ERROR: ValueError: boom"),
        (asyncio.CancelledError(), 3, "S2R-HANDLER-CANCELLED: the handler raised CancelledError"),
        (Snooze(1), 1, "S2R-RESULT-INVALID: the handler of a chunk returns"),
        (Reply(b"x"), 1, "S2R-RESULT-INVALID: the handler of a chunk returns"),
        (ExceptionGroup("many", [ValueError("a"), KeyError("b")]), 3, "S2R-HANDLER-ERROR: ExceptionGroup"),
        (ExceptionGroup("one", [Reject("deep")]), 1, "deep"),
    ],
)
async def test_what_a_handler_raises_is_how_its_attempt_failed(
    database: TestDatabase, gateway: Any, how: BaseException, attempts: int, message: str
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        raise how

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.FAILED
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.attempts) == (ChunkStatus.FAILED, attempts)
    assert chunk.last_error is not None
    assert chunk.last_error.startswith(message)
    assert relay.metrics.chunks_retried == attempts - 1
    assert relay.metrics.chunks_failed == 1


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), "\ud800", "x" * 300_000])
@pytest.mark.case("C34")
async def test_a_result_that_cannot_be_stored_fails_the_chunk_once(
    database: TestDatabase, gateway: Any, value: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> Any:
        return value

    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.FAILED
    chunk = await work.chunk(job_id)
    assert chunk.attempts == 1
    assert (chunk.last_error or "").startswith("S2R-RESULT-INVALID: ")


async def test_a_retry_comes_back_after_its_delay_with_its_checkpoint(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, poll_seconds=600)
    seen: list[Any] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        seen.append((ctx.attempt, ctx.checkpoint, ctx.rows_done))
        if ctx.attempt == 1:
            ctx.advance(3)
            ctx.row_error(4, "kept")
            await ctx.save_checkpoint({"row": 4})
            ctx.advance(5)
            ctx.row_error(9, "comes again")
            raise Retry(0.1)
        ctx.advance(2)
        return "done"

    async with running(relay):
        job = await work.end(job_id)
    assert seen == [(1, None, 0), (2, {"row": 4}, 3)]
    assert (job.rows_done, job.rows_failed) == (5, 1)
    assert [error.row for error in await work.row_errors(job_id)] == [4]


async def test_a_timeout_is_a_failed_attempt(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit(1, max_attempts=1)
    relay = chunk_relay(database)
    cleaned: list[int] = []

    @relay.chunk_handler(KIND, timeout=0.05)
    async def handler(ctx: ChunkContext) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(ctx.seq)

    async with running(relay):
        await work.end(job_id)
    assert (await work.chunk(job_id)).last_error == "S2R-HANDLER-TIMEOUT: the handler took more than 0.05 s"
    assert cleaned == [1]
    assert relay.metrics.handler_timeouts == 1


async def test_an_error_is_not_tried_again_where_the_job_may_not_run_twice(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit([{"raise": "error"}, {"raise": "retry"}], idempotent=False)
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        if ctx.payload["raise"] == "error":
            raise ValueError("half of it is done")
        if ctx.attempt == 1:
            raise Retry(0)
        return "the handler knew that it may"

    async with running(relay):
        await work.end(job_id)
    failed, done = await work.chunk(job_id, 1), await work.chunk(job_id, 2)
    assert (failed.status, failed.attempts) == (ChunkStatus.FAILED, 1)
    assert (done.status, done.attempts) == (ChunkStatus.DONE, 2)


async def test_system_exit_of_a_handler_stops_the_relay_and_releases_its_chunk(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await relay.run()
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.attempts) == (ChunkStatus.PENDING, 0)


# --- limits, both sorts of handlers ---


async def test_a_kind_runs_as_many_at_once_as_it_may_and_holds_up_no_other(
    database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    slow = await work.submit(6, kind="slow")
    relay = chunk_relay(database, chunk_concurrency=4, poll_seconds=600)
    running_now, most, go = 0, 0, asyncio.Event()

    @relay.chunk_handler("slow", concurrency=2)
    async def handle_slow(ctx: ChunkContext) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await go.wait()
        running_now -= 1

    @relay.chunk_handler("quick")
    async def handle_quick(ctx: ChunkContext) -> None:
        pass

    async with running(relay):
        await eventually(lambda: running_now == 2)
        quick = await work.submit(10, kind="quick")
        assert (await work.end(quick)).status is JobStatus.COMPLETED
        go.set()
        assert (await work.end(slow)).status is JobStatus.COMPLETED
    assert most == 2


async def test_one_relay_works_on_jobs_and_on_chunks_under_one_id(database: TestDatabase, gateway: Any) -> None:
    work, jobs = Work(gateway), Jobs(gateway)
    job_id = await work.submit(3)
    dispatched = await jobs.enqueue("Do")
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handle_chunk(ctx: ChunkContext) -> None:
        pass

    @relay.handler("Do")
    async def handle_job(job: DispatchJob) -> Reply:
        return Reply(b"done")

    async with running(relay):
        result = await jobs.end(dispatched)
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
        assert {(await work.chunk(job_id, seq)).claimed_by for seq in (1, 2, 3)} == {relay.instance_id}
        health = relay.health()
        assert (health.status, health.chunks_in_hand) == ("ok", 0)
    assert result.response_body == b"done"
    assert (relay.metrics.jobs_succeeded, relay.metrics.chunks_done) == (1, 3)
    assert relay.health().status == "stopped"


async def test_a_drain_ends_when_all_chunks_are_done_and_their_job_is(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit(20)
    relay = chunk_relay(database, chunk_concurrency=3)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        if ctx.attempt == 1 and ctx.seq == 7:
            raise Retry(0.2)

    await relay.run(drain=True)
    assert (await work.job(job_id)).status is JobStatus.COMPLETED
    assert relay.metrics.chunks_done == 20


async def test_chunks_of_several_tenants_are_claimed_in_one_statement(database: TestDatabase, gateway: Any) -> None:
    one, other = Work(gateway, "acme"), Work(gateway, "globex")
    first, second = await one.submit(2), await other.submit(2)
    relay = chunk_relay(database, tenants=["acme", "globex"], poll_seconds=600)
    seen: list[tuple[str, int]] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        seen.append((ctx.tenant_id, ctx.seq))

    async with running(relay):
        await one.end(first)
        await other.end(second)
    assert sorted(seen) == [("acme", 1), ("acme", 2), ("globex", 1), ("globex", 2)]
    assert relay.metrics.chunk_claims - relay.metrics.chunk_claims_empty == 1


# --- rows ---


async def test_too_many_row_errors_are_refused_before_memory_is_full(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, chunk_row_errors=5)
    refused: list[str] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        for row in range(5):
            ctx.row_error(row, "bad")
        try:
            ctx.row_error(5, "bad")
        except InvalidInputError as error:
            refused.append(str(error))
        await ctx.save_checkpoint(5)
        ctx.row_error(5, "bad")

    async with running(relay):
        job = await work.end(job_id)
    assert len(refused) == 1
    assert "save a checkpoint more often" in refused[0]
    assert (job.rows_failed, len(await work.row_errors(job_id))) == (6, 6)


async def test_forty_thousand_row_errors_come_with_the_completion(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable={"lease_seconds": 30, "row_error_batch": 5000})

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        for row in range(40_000):
            ctx.row_error(row, "bad", "the name is missing")

    async with running(relay):
        job = await work.end(job_id)
    assert (job.rows_failed, len(await work.row_errors(job_id))) == (40_000, 40_000)


@pytest.mark.parametrize(
    "arguments", [("1", "bad"), (1, "x" * 300), (1, "\x00"), (1, "bad", "message", {1, 2}), (2**63, "bad")]
)
async def test_a_row_error_that_cannot_be_stored_is_refused_where_it_is_said(
    database: TestDatabase, gateway: Any, arguments: tuple[Any, ...]
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database)

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> str:
        with pytest.raises(InvalidInputError):
            ctx.row_error(*arguments)
        return "refused"

    async with running(relay):
        await work.end(job_id)
    assert (await work.chunk(job_id)).outcome == "refused"


async def test_a_chunk_that_cannot_be_read_fails_and_takes_no_relay_down(
    database: TestDatabase, gateway: Any, admin: Any
) -> None:
    work = Work(gateway)
    relay = chunk_relay(database)
    deep = "[" * 3000 + "]" * 3000
    jobs = [await work.submit(2, kind="other") for _ in range(2)]
    await admin.execute(
        "update relay.durable_chunk set payload = $1::text::jsonb where job_id = $2 and seq = 1", deep, jobs[0]
    )
    await admin.execute(
        "update relay.durable_job set params = $1::text::jsonb where job_id = $2", "1" + "0" * 9000, jobs[1]
    )
    ran: list[tuple[Any, int]] = []

    async def have_ended() -> list[str]:
        rows = await admin.fetch("select status from relay.durable_job order by job_id")
        found = [row["status"] for row in rows]
        return [] if {"queued", "running"} & set(found) else found

    @relay.chunk_handler("other")
    async def handler(ctx: ChunkContext) -> None:
        ran.append((ctx.job_id, ctx.seq))

    async with running(relay):
        assert await eventually(have_ended) == ["completed_with_errors", "failed"]
    assert ran == [(jobs[0], 2)]
    errors = await admin.fetch("select last_error from relay.durable_chunk where status = 'failed'")
    assert len(errors) == 3
    assert all(row["last_error"].startswith("S2R-PAYLOAD-INVALID: ") for row in errors)
