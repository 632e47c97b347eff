"""Bare request and reply for many at once: arrays in, one NOTIFY a batch, results read many at a time.

The caller gathers what comes while a statement is under way; the worker claims and completes batches on some
connections, and tells of each batch after its commit, 200 job ids in a payload (8,000 bytes are the limit).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import asyncpg

from benchmarks.bare import statements
from benchmarks.loops import as_relay_run
from benchmarks.sandbox import HEADERS, OPERATION, RELAY, TENANT, TTL, Connection, Sandbox
from dispatch_core.ids import new_id

__all__ = ["bare_batch_worker", "bare_caller", "drain_and_tell"]

_BATCH: Final = 500
_IDS_IN_A_PAYLOAD: Final = 200

# The same notification many times in one transaction is one.
_INSERT: Final = f"{statements.INSERT_MANY} returning pg_notify('{statements.JOB_CHANNEL}', '')"
_TELL: Final = f"select pg_notify('{statements.RESULT_CHANNEL}', p) from unnest($1::text[]) p"
_RESULTS: Final = "select job_id, response_body from bare.result where tenant_id = $1 and job_id = any ($2)"

Call = Callable[[bytes], Awaitable[bytes]]


@asynccontextmanager
async def bare_caller(sandbox: Sandbox) -> AsyncIterator[Call]:
    """Yield `call(body) -> body of the reply`, for any number of tasks; three connections."""
    async with sandbox.connections(sandbox.bare_dsn, 3) as [listening, writing, reading]:
        calls: list[tuple[UUID, bytes]] = []
        ended: list[UUID] = []
        waiting: dict[UUID, asyncio.Future[bytes]] = {}
        called, told = asyncio.Event(), asyncio.Event()

        async def call(body: bytes) -> bytes:
            job_id = new_id()
            future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            waiting[job_id] = future
            calls.append((job_id, body))
            called.set()
            return await future

        async def write() -> None:
            while await called.wait():
                batch, calls[:_BATCH] = calls[:_BATCH], []
                if not calls:
                    called.clear()
                ids, bodies = [each for each, _ in batch], [body for _, body in batch]
                await writing.fetch(_INSERT, TENANT, ids, RELAY, OPERATION, [HEADERS] * len(ids), bodies, TTL)

        def on_results(*arguments: Any) -> None:
            ended.extend(UUID(text) for text in arguments[3].split(","))
            told.set()

        async def read() -> None:
            while await told.wait():
                batch, ended[:_BATCH] = ended[:_BATCH], []
                if not ended:
                    told.clear()
                for job_id, body in await reading.fetch(_RESULTS, TENANT, batch):
                    waiting.pop(job_id).set_result(body)

        await listening.add_listener(statements.RESULT_CHANNEL, on_results)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(write()), group.create_task(read())]
            yield call
            for task in tasks:
                task.cancel()
        await listening.remove_listener(statements.RESULT_CHANNEL, on_results)


async def bare_batch_worker(ready: Callable[[], None], stop: asyncio.Event, *, dsn: str) -> list[int]:
    """Serve by LISTEN and batches on two connections, echoing bodies; return the numbers in them, as claimed."""
    listening: Any = await asyncpg.connect(dsn)
    connections: list[Connection] = [await asyncpg.connect(dsn) for _ in range(2)]
    rung = [asyncio.Event() for _ in connections]
    numbers: list[int] = []

    def on_ring(*_: Any) -> None:
        for event in rung:
            event.set()

    async def serve(number: int, connection: Connection) -> None:
        while True:
            rung[number].clear()
            while jobs := await _claim_and_complete(connection, f"worker-{number}"):
                numbers.extend(int(job["request_body"]) for job in jobs)
            await rung[number].wait()

    await listening.add_listener(statements.JOB_CHANNEL, on_ring)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(serve(number, each)) for number, each in enumerate(connections)]
        with as_relay_run():
            ready()
            await stop.wait()
        for task in tasks:
            task.cancel()
    for connection in (listening, *connections):
        await connection.close(timeout=10)
    return numbers


async def drain_and_tell(connections: list[Connection]) -> list[UUID]:
    """Drain the bare queue in batches, telling of each batch; return the job ids as they were claimed."""

    async def loop(number: int, connection: Connection) -> list[UUID]:
        every: list[UUID] = []
        while jobs := await _claim_and_complete(connection, f"loop-{number}"):
            every += [job["job_id"] for job in jobs]
        return every

    with as_relay_run():
        found = await asyncio.gather(*(loop(number, each) for number, each in enumerate(connections)))
    return [job_id for ids in found for job_id in ids]


async def _claim_and_complete(connection: Connection, claimed_by: str) -> list[Any]:
    jobs: list[Any] = await connection.fetch(statements.CLAIM, TENANT, RELAY, claimed_by, new_id(), TTL, _BATCH)
    if not jobs:
        return jobs
    ids = [job["job_id"] for job in jobs]
    fences, bodies = [job["fence"] for job in jobs], [job["request_body"] for job in jobs]
    done = await connection.fetch(statements.COMPLETE, TENANT, ids, fences, claimed_by, bodies, RELAY)
    if len(done) != len(jobs):
        raise AssertionError("a completion was refused")
    texts = [str(job_id) for job_id in ids]
    await connection.fetch(
        _TELL,
        [",".join(texts[first : first + _IDS_IN_A_PAYLOAD]) for first in range(0, len(texts), _IDS_IN_A_PAYLOAD)],
    )
    return jobs
