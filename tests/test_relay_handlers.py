"""What a handler may return and raise, and what becomes of its job. Each outcome once, on a real relay."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from typing import Any

import pytest

from dispatch_core.batcher import Batcher
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import ConnectionLostError, SchemaMismatchError, TenancyDeniedError
from dispatch_core.models import DispatchStatus
from relay_sdk import DispatchJob, Reject, Reply, Retry, Snooze
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS
from tests.support.relays import Jobs, new_relay, running

SUCCEEDED, FAILED, EXPIRED = DispatchStatus.SUCCEEDED, DispatchStatus.FAILED, DispatchStatus.EXPIRED


async def _run_one(database: TestDatabase, gateway: Any, handler: Any, **options: Any) -> Any:
    """Enqueue one job, run a relay with that handler until it has ended; return its result."""
    relay = new_relay(database)
    relay.handler("Do")(handler)
    jobs = Jobs(gateway)
    job_id = await jobs.enqueue("Do", **options)
    async with running(relay):
        return await jobs.end(job_id)


async def test_a_reply_is_the_jobs_result(database: TestDatabase, gateway: Any) -> None:
    async def handler(job: DispatchJob) -> Reply:
        assert job.tenant_id == "acme"
        assert job.attempt == 1
        assert job.headers == {"a": "b", "c": ["d", "e"]}
        assert job.remaining() > 0
        return Reply(b"got " + job.body, status=201, headers={"x": ["y", "z"]})

    result = await _run_one(database, gateway, handler, headers={"a": "b", "c": ["d", "e"]}, body=b"it")
    assert (result.status, result.response_status, result.response_body) == (SUCCEEDED, 201, b"got it")
    assert result.response_headers == {"x": ["y", "z"]}
    assert result.error_code is None


async def test_a_batch_of_ends_counts_the_bytes_of_headers_and_messages_too(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Batcher.put
    sizes: list[int] = []

    def spy(self: Any, item: Any, size: int) -> None:
        sizes.append(size)
        put(self, item, size)

    monkeypatch.setattr(Batcher, "put", spy)

    async def handler(job: DispatchJob) -> Reply:
        if job.body:
            raise Reject("NO", "m" * 1500)
        return Reply(b"b" * 700, headers={"h": "\N{EURO SIGN}" * 3000})

    await _run_one(database, gateway, handler)
    assert 9700 < sizes.pop() < 10_500
    await _run_one(database, gateway, handler, body=b"bad")
    assert 1500 < sizes.pop() < 2000


async def test_a_json_reply_is_encoded(database: TestDatabase, gateway: Any) -> None:
    async def handler(job: DispatchJob) -> Reply:
        return Reply.json({"sum": sum(job.json()["items"])})

    result = await _run_one(database, gateway, handler, json={"items": [1, 2, 3]})
    assert (result.status, result.json()) == (SUCCEEDED, {"sum": 6})


async def test_none_is_an_empty_reply(database: TestDatabase, gateway: Any) -> None:
    async def handler(job: DispatchJob) -> None:
        pass

    result = await _run_one(database, gateway, handler)
    assert (result.status, result.response_status, result.response_body) == (SUCCEEDED, None, None)


@pytest.mark.parametrize("how", ["returned", "raised"])
@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (Reply(b"fine"), SUCCEEDED, None),
        (Reject("NO-SUCH-CUSTOMER", "customer 7 is unknown", status=404), FAILED, "NO-SUCH-CUSTOMER"),
        (Retry(message="the backend is down"), FAILED, "S2R-RETRY-EXHAUSTED"),
        (Snooze(600, message="later"), FAILED, "S2R-RETRY-EXHAUSTED"),
    ],
    ids=["Reply", "Reject", "Retry", "Snooze"],
)
async def test_an_outcome_counts_the_same_whether_returned_or_raised(
    database: TestDatabase, gateway: Any, outcome: Any, status: DispatchStatus, code: str | None, how: str
) -> None:
    async def handler(job: DispatchJob) -> Any:
        if how == "raised":
            raise outcome
        return outcome

    result = await _run_one(database, gateway, handler)
    assert (result.status, result.error_code) == (status, code)
    if isinstance(outcome, Reject):
        assert (result.response_status, result.error_message) == (404, "customer 7 is unknown")


async def test_a_retry_uses_up_an_attempt_and_a_snooze_does_not(database: TestDatabase, gateway: Any) -> None:
    attempts: dict[str, list[int]] = {"Retry": [], "Snooze": []}
    relay = new_relay(database)

    @relay.fallback
    async def handler(job: DispatchJob) -> Any:
        seen = attempts[job.operation]
        seen.append(job.attempt)
        if len(seen) == 3:
            return Reply()
        return Retry(after=0.01) if job.operation == "Retry" else Snooze(after=0.01)

    jobs = Jobs(gateway)
    ids = [await jobs.enqueue("Retry", max_attempts=3), await jobs.enqueue("Snooze", max_attempts=1)]
    async with running(relay):
        results = await jobs.ends(ids)
    assert [result.status for result in results] == [SUCCEEDED, SUCCEEDED]
    assert attempts == {"Retry": [1, 2, 3], "Snooze": [1, 1, 1]}


async def test_an_unhandled_exception_is_tried_again_while_attempts_remain(
    database: TestDatabase, gateway: Any
) -> None:
    attempts: list[int] = []

    async def handler(job: DispatchJob) -> Reply:
        attempts.append(job.attempt)
        raise ValueError(f"attempt {job.attempt}")

    result = await _run_one(database, gateway, handler, max_attempts=3)
    assert attempts == [1, 2, 3]
    assert (result.status, result.error_code, result.attempt) == (FAILED, "S2R-HANDLER-ERROR", 3)
    assert result.error_message == "ValueError: attempt 3"


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.case("C29")
@pytest.mark.case("C34")
@pytest.mark.parametrize(
    ("error", "part"),
    [
        (_UnprintableError(), "_UnprintableError: <_UnprintableError: its text is not available"),
        (ExceptionGroup("two things", [ValueError("a"), OSError("b")]), "ValueError: a; OSError: b"),
        (GeneratorExit("gone"), "GeneratorExit: gone"),
        (ValueError("nul \0, surrogate \ud800"), "ValueError: nul �, surrogate �"),
        (ValueError("x" * 100_000), "ValueError: xxxx"),
        (StopAsyncIteration("odd"), "StopAsyncIteration"),
        (BaseException("at the root"), "BaseException: at the root"),
        (TimeoutError(), "TimeoutError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_whatever_a_handler_raises_is_stored_in_bounds(
    database: TestDatabase, gateway: Any, error: BaseException, part: str
) -> None:
    """C29, C34: exceptions that are no Exception, whose text is not storable, not bounded, or not to be had."""

    async def handler(job: DispatchJob) -> Reply:
        raise error

    result = await _run_one(database, gateway, handler)
    assert (result.status, result.error_code) == (FAILED, "S2R-HANDLER-ERROR")
    assert part in result.error_message
    assert len(result.error_message.encode()) <= 2000


@pytest.mark.case("C29")
async def test_a_handler_that_raises_cancelled_error_itself_fails(database: TestDatabase, gateway: Any) -> None:
    """C29: it is no cancellation of the relay's, so it counts as an error, and is tried again while attempts remain."""
    attempts: list[int] = []

    async def handler(job: DispatchJob) -> Reply:
        attempts.append(job.attempt)
        raise asyncio.CancelledError

    result = await _run_one(database, gateway, handler, max_attempts=2)
    assert attempts == [1, 2]
    assert (result.status, result.error_code) == (FAILED, "S2R-HANDLER-CANCELLED")


@pytest.mark.case("C29")
async def test_a_failing_child_of_a_task_group_fails_its_job_only(database: TestDatabase, gateway: Any) -> None:
    """C29: the group cancels the handler's own task, which is not taken for a cancellation from outside."""

    async def child() -> None:
        raise ValueError("the child")

    async def handler(job: DispatchJob) -> Reply:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            await asyncio.sleep(30)
        return Reply()

    result = await _run_one(database, gateway, handler)
    assert (result.status, result.error_code) == (FAILED, "S2R-HANDLER-ERROR")
    assert "ValueError: the child" in result.error_message


def _nested(error: Exception, depth: int) -> Exception:
    for _ in range(depth):
        error = ExceptionGroup("nested", [error])
    return error


class _HostileGroup(ExceptionGroup[Exception]):
    """Every method and attribute that one may look at a group with fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def subgroup(self, *args: Any) -> Any:
        raise SystemExit("no subgroup")

    split = derive = subgroup

    @property
    def exceptions(self) -> Any:
        raise RecursionError("no exceptions")


class _HostileMeta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class _NamelessError(Exception, metaclass=_HostileMeta):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class _HollowReject(Reject):
    def __init__(self) -> None:
        pass  # an outcome without what an outcome has


@pytest.mark.case("C29")
@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: _nested(ValueError("deep"), 3000),
        lambda: _HostileGroup("hostile", [ValueError("in it"), ValueError("too")]),
        _NamelessError,
        _HollowReject,
    ],
    ids=["deep", "hostile", "nameless", "hollow"],
)
async def test_an_error_that_resists_being_looked_at_fails_its_own_job_only(
    database: TestDatabase, gateway: Any, make: Any, kind: str
) -> None:
    """C29: neither its depth nor what its class overrides is the relay's business."""
    relay = new_relay(database)

    def fails(job: DispatchJob) -> None:
        raise make()

    async def fails_too(job: DispatchJob) -> None:
        raise make()

    async def works(job: DispatchJob) -> None: ...

    relay.handler("Do")(fails if kind == "def" else fails_too)
    relay.handler("Works")(works)
    jobs = Jobs(gateway)
    async with running(relay):
        result = await jobs.end(await jobs.enqueue("Do"))
        after = await jobs.end(await jobs.enqueue("Works"))
    assert (result.status, result.error_code) == (FAILED, "S2R-HANDLER-ERROR")
    assert after.status is SUCCEEDED


@pytest.mark.parametrize("depth", [1, 2, 2000])
async def test_an_outcome_that_a_child_of_a_task_group_raises_counts(
    database: TestDatabase, gateway: Any, depth: int
) -> None:
    async def child() -> None:
        raise _nested(Reject("NO", "said the child"), depth - 1)

    async def handler(job: DispatchJob) -> Reply:
        async with asyncio.TaskGroup() as group:
            group.create_task(child())
            await asyncio.sleep(30)
        return Reply()

    result = await _run_one(database, gateway, handler, max_attempts=3)
    assert (result.status, result.error_code, result.attempt) == (FAILED, "NO", 1)


async def test_outcomes_of_two_children_are_no_answer(database: TestDatabase, gateway: Any) -> None:
    async def handler(job: DispatchJob) -> Reply:
        raise ExceptionGroup("two", [Reject("NO"), Reply(b"yes")])

    result = await _run_one(database, gateway, handler)
    assert (result.status, result.error_code) == (FAILED, "S2R-HANDLER-ERROR")


@pytest.mark.parametrize("code", ["S2R-EXPIRED", "S2R-RESULT-INVALID", "S2R-RELAY-STOPPED"])
async def test_a_handler_may_choose_any_error_code(database: TestDatabase, gateway: Any, code: str) -> None:
    """The relay's own ends are not told by their code, so a handler's is stored at once and as it is."""

    async def handler(job: DispatchJob) -> Reject:
        return Reject(code, "mine")

    result = await _run_one(database, gateway, handler, ttl=60)
    assert (result.status, result.error_code, result.error_message) == (FAILED, code, "mine")


@pytest.mark.case("C34")
@pytest.mark.parametrize(
    "reply",
    [
        Reply(b"x" * 2000),
        Reply.json({"n": float("nan")}),
        Reply.json({1, 2}),
        Reply("\ud800"),
        Reply(7),  # type: ignore[arg-type]
        Reply(headers={"a\0": "b"}),
        Reply(headers={"a": "\ud800"}),
        Reply(headers={"a": 1}),  # type: ignore[dict-item]
        Reply(status=2**63),
        Reply(status="200"),  # type: ignore[arg-type]
        "a str",
        {"a": "dict"},
        b"bytes",
        Reject("NO", status=2**70),
    ],
    ids=lambda reply: repr(reply)[:40].replace("\0", "0"),
)
async def test_a_result_that_cannot_be_stored_fails_its_job_once(
    database: TestDatabase, gateway: Any, reply: Any
) -> None:
    """C34: finished work is not run again for it, whatever attempts are left."""
    runs: list[int] = []
    relay = new_relay(database, max_result_bytes=1000)

    @relay.handler("Do")
    async def handler(job: DispatchJob) -> Any:
        runs.append(job.attempt)
        return reply

    jobs = Jobs(gateway)
    job_id = await jobs.enqueue(max_attempts=5)
    async with running(relay):
        result = await jobs.end(job_id)
    assert (result.status, result.error_code) == (FAILED, "S2R-RESULT-INVALID")
    assert result.error_message
    assert runs == [1]


@pytest.mark.case("C34")
async def test_bytes_come_back_as_they_were(database: TestDatabase, gateway: Any) -> None:
    """C34: bodies and results are bytes; NUL and lone surrogates in them are nobody's business."""
    body = bytes(range(256)) + b"\\u0000" + "\ud800".encode("utf-8", "surrogatepass")

    async def handler(job: DispatchJob) -> Reply:
        return Reply(job.body, headers={"six": "\\u0000"})

    result = await _run_one(database, gateway, handler, body=body, headers={"six": "\\u0000"})
    assert result.response_body == body
    assert result.response_headers == {"six": "\\u0000"}


async def test_an_unknown_operation_fails_at_once(database: TestDatabase, gateway: Any) -> None:
    async def handler(job: DispatchJob) -> None: ...

    relay = new_relay(database)
    relay.handler("Other")(handler)
    jobs = Jobs(gateway)
    job_id = await jobs.enqueue("Do", max_attempts=5)
    async with running(relay):
        result = await jobs.end(job_id)
    assert (result.status, result.error_code, result.attempt) == (FAILED, "S2R-UNKNOWN-OPERATION", 1)


async def test_malformed_stored_headers_hurt_their_own_job_alone(
    database: TestDatabase, gateway: Any, admin: Any
) -> None:
    runs: list[str] = []
    relay = new_relay(database)

    @relay.handler("Do")
    async def handler(job: DispatchJob) -> None:
        runs.append(job.body.decode())

    jobs = Jobs(gateway)
    ids = [await jobs.enqueue(body=name) for name in ("good", "bad", "fine")]
    await admin.execute("set app.tenant_id = 'acme'")
    await admin.execute("update relay.s2r_relay_dispatch_request set request_headers = '[1]' where job_id = $1", ids[1])
    async with running(relay):
        results = await jobs.ends(ids)
    assert [result.status for result in results] == [SUCCEEDED, FAILED, SUCCEEDED]
    assert results[1].error_code == "S2R-HEADERS-INVALID"
    assert sorted(runs) == ["fine", "good"]


async def test_a_handler_over_its_timeout_is_cancelled_and_counts_as_an_error(
    database: TestDatabase, gateway: Any
) -> None:
    cleaned_up: list[int] = []
    relay = new_relay(database)

    @relay.handler("Do", timeout=0.2)
    async def handler(job: DispatchJob) -> Reply:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)  # a handler's own clean-up may wait for things
            cleaned_up.append(job.attempt)
        return Reply()

    jobs = Jobs(gateway)
    job_id = await jobs.enqueue(max_attempts=2)
    async with running(relay):
        result = await jobs.end(job_id)
    assert (result.status, result.error_code, result.attempt) == (FAILED, "S2R-HANDLER-TIMEOUT", 2)
    assert cleaned_up == [1, 2]
    assert relay.metrics.handler_timeouts == 2


async def test_a_large_body_is_fetched_before_its_handler_starts(database: TestDatabase, gateway: Any) -> None:
    sizes: list[int] = []
    relay = new_relay(database, claim_body_limit_bytes=1000)

    @relay.handler("Do")
    async def handler(job: DispatchJob) -> Reply:
        sizes.append(len(job.body))
        return Reply(job.body)

    jobs = Jobs(gateway)
    ids = [await jobs.enqueue(body=b"x" * size) for size in (0, 1000, 1001, 3_000_000)]
    async with running(relay):
        results = await jobs.ends(ids)
    assert [len(result.response_body or b"") for result in results] == [0, 1000, 1001, 3_000_000]
    assert sorted(sizes) == [0, 1000, 1001, 3_000_000]


@pytest.mark.parametrize("error", [SchemaMismatchError(), TenancyDeniedError(), ConnectionLostError()])
async def test_a_large_body_that_cannot_be_fetched_is_asked_for_again_and_is_no_error_of_the_handlers(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fetch_body = RelayDispatchRepository.fetch_body
    calls: list[Any] = []

    async def fails_once(self: Any, job: Any, **options: Any) -> bool:
        calls.append(job.job_id)
        if len(calls) == 1:
            raise error
        return await fetch_body(self, job, **options)

    monkeypatch.setattr(RelayDispatchRepository, "fetch_body", fails_once)
    relay = new_relay(database, claim_body_limit_bytes=10)

    @relay.handler("Do")
    async def handler(job: DispatchJob) -> Reply:
        return Reply(job.body)

    jobs = Jobs(gateway)
    async with running(relay):
        result = await jobs.end(await jobs.enqueue(body=b"x" * 11))
    assert (result.status, result.response_body, result.attempt) == (SUCCEEDED, b"x" * 11, 1)
    assert (relay.metrics.handler_errors, len(calls)) == (0, 2)


# --- def handlers ---------------------------------------------------------------------------------------------------


async def test_a_def_handler_runs_in_a_thread_of_its_own(database: TestDatabase, gateway: Any) -> None:
    threads: list[threading.Thread] = []

    def handler(job: DispatchJob) -> Reply:
        threads.append(threading.current_thread())
        time.sleep(0.05)
        if job.body == b"bad":
            raise ValueError("in the thread")
        return Reply(b"from a thread")

    relay = new_relay(database)
    relay.handler("Do")(handler)
    jobs = Jobs(gateway)
    ids = [await jobs.enqueue(body=body) for body in (b"good", b"bad", b"good")]
    async with running(relay):
        results = await jobs.ends(ids)
    assert [result.status for result in results] == [SUCCEEDED, FAILED, SUCCEEDED]
    assert results[1].error_message == "ValueError: in the thread"
    assert len(set(threads)) == 3
    assert threading.main_thread() not in threads


async def test_a_thread_keeps_its_slot_until_it_really_ends(database: TestDatabase, gateway: Any) -> None:
    """Cancelled by its timeout, the job is over for its gateway; the thread runs on, and no other takes its place."""
    running_now: list[int] = []
    most: list[int] = []
    release = threading.Event()
    relay = new_relay(database, concurrency=2)

    # Time enough for a thread to begin, and for the later ones to end.
    @relay.handler("Do", timeout=0.6)
    def handler(job: DispatchJob) -> Reply:
        running_now.append(1)
        most.append(len(running_now))
        release.wait(HANGS)
        running_now.pop()
        return Reply()

    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(4)
    async with running(relay):
        first, second = await jobs.ends(ids[:2])
        assert {first.error_code, second.error_code} == {"S2R-HANDLER-TIMEOUT"}
        assert relay.health().free == 0
        assert [await jobs.status(job_id) for job_id in ids[2:]] == [DispatchStatus.PENDING] * 2
        release.set()
        rest = await jobs.ends(ids[2:])
    assert [result.status for result in rest] == [SUCCEEDED] * 2
    assert max(most) == 2


async def test_def_handlers_without_a_limit_share_the_relays_threads(database: TestDatabase, gateway: Any) -> None:
    now: set[int] = set()
    most: list[int] = []
    relay = new_relay(database, threads=3)

    def handler(job: DispatchJob) -> None:
        now.add(id(job))
        most.append(len(now))
        time.sleep(0.02)
        now.remove(id(job))

    relay.handler("A")(handler)
    relay.handler("B")(handler)
    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(6, "A") + await jobs.enqueue_many(6, "B")
    async with running(relay):
        results = await jobs.ends(ids)
    assert {result.status for result in results} == {SUCCEEDED}
    assert max(most) == 3


async def test_a_def_handler_that_returns_an_awaitable_is_told_so(database: TestDatabase, gateway: Any) -> None:
    async def inner() -> None: ...

    def handler(job: DispatchJob) -> Any:
        return inner()

    result = await _run_one(database, gateway, handler)
    assert (result.status, result.error_code) == (FAILED, "S2R-RESULT-INVALID")
    assert "async def" in result.error_message


# --- nothing of a job stays for the next one ------------------------------------------------------------------------


async def test_context_variables_of_one_job_are_not_there_for_the_next(database: TestDatabase, gateway: Any) -> None:
    """Whose tenant a log line or a session is for is kept in these: they must not leak from job to job."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    seen: list[str | None] = []
    tasks: set[Any] = set()
    relay = new_relay(database, concurrency=4)

    # One that had to wait is started by the end of the one before it.
    @relay.handler("One", concurrency=1)
    @relay.handler("Do")
    async def handler(job: DispatchJob) -> None:
        await asyncio.sleep(0.01)
        seen.append(variable.get(None))
        tasks.add(asyncio.current_task())
        variable.set(str(job.job_id))

    @relay.handler("Thread")
    def in_thread(job: DispatchJob) -> None:
        seen.append(variable.get(None))
        variable.set(str(job.job_id))

    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(3) + await jobs.enqueue_many(3, "Thread") + await jobs.enqueue_many(3, "One")
    async with running(relay):
        await jobs.ends(ids)
    assert seen == [None] * 9
    assert len(tasks) == 6
