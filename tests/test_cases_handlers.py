"""Whatever ends a handler, told apart (C29): of dispatch jobs, of chunks, and sinks of the outbox."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.durable_models import ChunkStatus, JobStatus
from dispatch_core.models import DispatchStatus
from dispatch_core.outbox import DrainReport, OutboxEvent
from relay_sdk import ChunkContext, DispatchJob, Reply
from tests.support.chunks import KIND as CHUNKS
from tests.support.chunks import SELDOM, Work, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.outbox import Recorder, outbox, write
from tests.support.protocol import OUTBOX, Connection
from tests.support.relays import Jobs, new_relay, running

pytestmark = pytest.mark.case("C29")

FAILED, EXPIRED, PENDING = DispatchStatus.FAILED, DispatchStatus.EXPIRED, DispatchStatus.PENDING


class UnprintableError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class HostileGroup(ExceptionGroup[Exception]):
    """Every method and attribute that one may look at a group with fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def subgroup(self, *args: Any) -> Any:
        raise SystemExit("no subgroup")

    split = derive = subgroup

    @property
    def exceptions(self) -> Any:
        raise RecursionError("no exceptions")


def deep(depth: int = 3000) -> Exception:
    error: Exception = ValueError("deep")
    for _ in range(depth):
        error = ExceptionGroup("nested", [error])
    return error


ENDS: dict[str, Any] = {
    "unprintable": UnprintableError,
    "generator-exit": lambda: GeneratorExit("gone"),
    "base": lambda: BaseException("at the root"),
    "stop-async-iteration": lambda: StopAsyncIteration("odd"),
    "timeout": TimeoutError,
    "cancelled": asyncio.CancelledError,
    "cancelled-in-a-group": lambda: BaseExceptionGroup("of cancellations", [asyncio.CancelledError()]),
    "group": lambda: ExceptionGroup("two things", [ValueError("a"), OSError("b")]),
    "base-group": lambda: BaseExceptionGroup("mixed", [ValueError("a"), GeneratorExit()]),
    "hostile-group": lambda: HostileGroup("hostile", [ValueError("in it"), ValueError("too")]),
    "deep-group": deep,
    "recursion": RecursionError,
    "memory": MemoryError,
}


async def _fail_in_a_child() -> None:
    async def child() -> None:
        raise ValueError("the child")

    async with asyncio.TaskGroup() as group:
        group.create_task(child())
        await asyncio.sleep(30)


# --- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in-a-transaction"])
async def test_whatever_a_chunk_handler_raises_is_a_failed_attempt_of_that_chunk_alone(
    database: TestDatabase, gateway: Any, inside: bool
) -> None:
    """Two of each, and what was done in a transaction that an exception has left is rolled back."""
    work = Work(gateway)
    names = [*ENDS, "child", "good"]
    job_id = await work.submit(names, max_attempts=2)
    relay = chunk_relay(database, durable={"lease_seconds": 60.0})

    async def end(ctx: ChunkContext) -> None:
        if ctx.payload == "good":
            return
        await ctx.save_checkpoint(ctx.attempt)
        if ctx.payload == "child":
            await _fail_in_a_child()
        error: BaseException = ENDS[ctx.payload]()
        raise error

    @relay.chunk_handler(CHUNKS)
    async def handler(ctx: ChunkContext) -> None:
        if inside:
            async with ctx.transaction():
                await end(ctx)
        else:
            await end(ctx)

    async with running(relay):
        assert (await work.end(job_id, timeout=60)).status is JobStatus.COMPLETED_WITH_ERRORS
    for seq, name in enumerate(names, 1):
        chunk = await work.chunk(job_id, seq)
        if name == "good":
            assert (chunk.status, chunk.attempts) == (ChunkStatus.DONE, 1)
            continue
        assert (chunk.status, chunk.attempts) == (ChunkStatus.FAILED, 2), name
        assert chunk.checkpoint == (None if inside else 2), name
        assert chunk.last_error, name
        assert len(chunk.last_error.encode()) <= 2100, name


@pytest.mark.parametrize("how", ["interrupt", "interrupt-in-a-group", "exit"])
async def test_an_interrupt_or_exit_of_a_chunk_handler_ends_the_relay_after_its_chunks_are_given_back(
    database: TestDatabase, gateway: Any, how: str
) -> None:
    work = Work(gateway)
    job_id = await work.submit(["bad", "other"])
    relay = chunk_relay(database, durable=SELDOM)
    both = asyncio.Barrier(2)

    @relay.chunk_handler(CHUNKS)
    async def handler(ctx: ChunkContext) -> None:
        await both.wait()
        if ctx.payload == "other":
            await asyncio.sleep(30)
        if how == "exit":
            raise SystemExit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        raise BaseExceptionGroup("children", [ValueError("a"), KeyboardInterrupt()])

    raised: list[BaseException] = []

    async def run() -> None:
        try:
            await relay.run()
        except BaseException as error:  # noqa: BLE001  asyncio itself would leave the event loop with it
            raised.append(error)

    await asyncio.create_task(run())
    kinds = {"exit": SystemExit, "interrupt": KeyboardInterrupt, "interrupt-in-a-group": BaseExceptionGroup}
    assert [type(error) for error in raised] == [kinds[how]]
    for seq in (1, 2):
        chunk = await work.chunk(job_id, seq)
        assert (chunk.status, chunk.attempts) == (ChunkStatus.PENDING, 0)


async def test_the_causes_that_cancel_a_chunk_handler_are_told_apart(database: TestDatabase, gateway: Any) -> None:
    """Its job cancelled, its timeout, itself, and the relay's end: cancelled, failed, failed, and given back."""
    work = Work(gateway)
    relay = chunk_relay(database, durable=SELDOM)
    started: set[str] = set()
    ended: dict[str, str] = {}

    def handler_of(name: str) -> Any:
        async def handler(ctx: ChunkContext) -> None:
            started.add(name)
            try:
                if name == "itself":
                    raise asyncio.CancelledError
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended[name] = "cancelled"
                raise

        return handler

    relay.chunk_handler("withdrawn")(handler_of("withdrawn"))
    relay.chunk_handler("timeout", timeout=0.3)(handler_of("timeout"))
    relay.chunk_handler("itself")(handler_of("itself"))
    relay.chunk_handler("stopped")(handler_of("stopped"))
    ids = {name: await work.submit(1, kind=name, max_attempts=1) for name in ("withdrawn", "timeout", "itself")}
    ids["stopped"] = await work.submit(1, kind="stopped", max_attempts=1)
    async with running(relay, grace_seconds=0.0):
        await eventually(lambda: started == set(ids), timeout=30)
        await work.control(ids["withdrawn"], "cancel")
        await eventually(lambda: set(ended) == {"withdrawn", "timeout", "itself"}, timeout=30)
        for name in ("timeout", "itself"):
            assert (await work.end(ids[name])).status is JobStatus.FAILED
    assert set(ended) == set(ids)
    found = {name: await work.chunk(job_id) for name, job_id in ids.items()}
    assert {name: (chunk.status, chunk.attempts) for name, chunk in found.items()} == {
        "withdrawn": (ChunkStatus.CANCELLED, 1),
        "timeout": (ChunkStatus.FAILED, 1),
        "itself": (ChunkStatus.FAILED, 1),
        "stopped": (ChunkStatus.PENDING, 0),
    }
    assert (found["timeout"].last_error or "").startswith("S2R-HANDLER-TIMEOUT")
    assert (found["itself"].last_error or "").startswith("S2R-HANDLER-CANCELLED")


# --- dispatch jobs ----------------------------------------------------------------------------------------------------


async def test_the_causes_that_cancel_a_handler_are_told_apart(database: TestDatabase, gateway: Any) -> None:
    """Its deadline, a withdrawal, its timeout, itself, and the relay's end, with attempts left and without."""
    relay = new_relay(database, heartbeat_seconds=0.2, lease_seconds=60.0, sweep_seconds=600.0)
    started: set[str] = set()
    ended: set[str] = set()

    async def handler(job: DispatchJob) -> Reply:
        name = job.body.decode()
        started.add(name)
        try:
            if name == "itself":
                raise asyncio.CancelledError
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.add(name)
            raise
        return Reply()

    relay.handler("Do")(handler)
    relay.handler("Timed", timeout=0.3)(handler)
    jobs = Jobs(gateway)
    ids = {name: await jobs.enqueue("Do", body=name.encode()) for name in ("withdrawn", "itself", "stopped")}
    ids["again"] = await jobs.enqueue("Do", body=b"again", max_attempts=2)
    ids["timeout"] = await jobs.enqueue("Timed", body=b"timeout")
    async with running(relay, grace_seconds=0.0):
        await eventually(lambda: started == set(ids), timeout=30)
        # Long enough to begin in.
        ids["deadline"] = await jobs.enqueue("Do", body=b"deadline", ttl=4)
        await jobs.ring()
        await eventually(lambda: "deadline" in started, timeout=30)
        assert await RelayDispatchRepository(gateway, "acme").mark_expired(ids["withdrawn"]) == 1
        for name in ("withdrawn", "deadline", "timeout", "itself"):
            await jobs.end(ids[name], timeout=30)
        await eventually(lambda: {"withdrawn", "deadline", "timeout", "itself"} <= ended, timeout=30)
    assert ended == set(ids)
    found = {name: await jobs.get(job_id) for name, job_id in ids.items()}
    assert {name: (result.status, result.error_code) for name, result in found.items()} == {
        "withdrawn": (EXPIRED, found["withdrawn"].error_code),
        "deadline": (EXPIRED, found["deadline"].error_code),
        "timeout": (FAILED, "S2R-HANDLER-TIMEOUT"),
        "itself": (FAILED, "S2R-HANDLER-CANCELLED"),
        "stopped": (FAILED, "S2R-RELAY-STOPPED"),
        "again": (PENDING, None),
    }


# --- sinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
async def test_whatever_a_sink_raises_is_a_failed_delivery_of_what_it_was_given_alone(
    database: TestDatabase, admin: Connection, gateway: Connection, many: bool
) -> None:
    """By a sink of single events and by one that takes them together; the drainer goes on to the other kind."""
    names = [*ENDS, "child"]

    async def fails(how: str) -> None:
        if how == "child":
            await _fail_in_a_child()
        error: BaseException = ENDS[how]()
        raise error

    class Together(Recorder):
        async def deliver_many(self, events: list[OutboxEvent]) -> Any:
            await fails(str(events[0].payload))

    async def single(event: OutboxEvent) -> None:
        await fails(str(event.payload))

    good = Recorder()
    # A kind of its own for each, as those that are taken together fail together.
    for name in names:
        await write(gateway, name, kind=f"kind-{name}")
    await write(gateway, "good", kind="good")
    async with outbox(database, Together() if many else single) as drainer:
        drainer.sinks["good"] = good
        report = DrainReport()
        while (last := await drainer.drain()).claimed:
            report = DrainReport(
                claimed=report.claimed + last.claimed,
                delivered=report.delivered + last.delivered,
                failed=report.failed + last.failed,
            )
            await admin.execute(f"update {OUTBOX} set available_at = now() + interval '1 hour' where attempts > 0")
    assert report == DrainReport(claimed=len(names) + 1, delivered=1, failed=len(names))
    assert good.payloads == ["good"]
    rows = await admin.fetch(f"select payload #>> '{{}}' as name, state, attempts, last_error from {OUTBOX}")
    assert {row["name"] for row in rows} == set(names)
    for row in rows:
        assert (row["state"], row["attempts"]) == ("ready", 1), row["name"]
        assert row["last_error"], row["name"]
        assert len(row["last_error"].encode()) <= 2100, row["name"]
