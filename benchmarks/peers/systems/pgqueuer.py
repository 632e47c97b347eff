"""PgQueuer (https://github.com/janbjorge/pgqueuer): asyncpg, NOTIFY by a trigger, rows move to a log when they end.

Best, after its docs/guides/performance-tuning.md and docs/reference/drivers.md: `batch_size` raised for short jobs (it
is the size of the completion buffer too; 100 was faster here than 250 to 2000, and one manager than the five in a
process of its own tools/benchmark.py), one direct connection for the queue manager and a pool for producers
(`min_size=5, max_size=20`), and `pgq autovac`, which is `Queries.optimize_autovacuum`. Its tables are logged
(`durable`), in both: the other levels lose jobs in a crash. Default: `batch_size=10` and one connection, as in its
README.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg

from benchmarks.peers.model import Contender, System
from benchmarks.peers.systems._packages import packages, python_command

__all__ = ["SYSTEM", "producer", "worker"]

_ENTRYPOINT = "count"


async def _install(dsn: str, contender: Contender) -> None:
    from pgqueuer.queries import Queries

    connection = await asyncpg.connect(dsn)
    try:
        queries = Queries.from_asyncpg_connection(connection)
        await queries.install()
        if contender.template.get("autovac"):
            await queries.optimize_autovacuum()
    finally:
        await connection.close()


class _Producer:
    def __init__(self, queries: Any) -> None:
        self._queries = queries

    async def send(self, number: int) -> None:
        await self._queries.enqueue(_ENTRYPOINT, str(number).encode())

    async def send_many(self, numbers: Sequence[int]) -> None:
        await self._queries.enqueue(
            [_ENTRYPOINT] * len(numbers), [str(number).encode() for number in numbers], [0] * len(numbers)
        )


@asynccontextmanager
async def producer(dsn: str, settings: Mapping[str, Any]) -> AsyncIterator[_Producer]:
    """Open `Queries`, on a pool or on one connection."""
    from pgqueuer.queries import Queries

    async with AsyncExitStack() as stack:
        if settings.get("pool"):
            minimum, maximum = settings["pool"]
            pool = await stack.enter_async_context(asyncpg.create_pool(dsn, min_size=minimum, max_size=maximum))
            yield _Producer(Queries.from_asyncpg_pool(pool))
        else:
            connection = await asyncpg.connect(dsn)
            stack.push_async_callback(connection.close)
            yield _Producer(Queries.from_asyncpg_connection(connection))


@asynccontextmanager
async def worker(dsn: str, settings: Mapping[str, Any], handled: Callable[[int], None]) -> AsyncIterator[None]:
    """Run a `PgQueuer` on a connection of its own."""
    from pgqueuer import PgQueuer
    from pgqueuer.models import Job

    connection = await asyncpg.connect(dsn)
    try:
        queuer = PgQueuer.from_asyncpg_connection(connection)

        @queuer.entrypoint(_ENTRYPOINT)
        async def count(job: Job) -> None:
            handled(int(job.payload or b""))

        async with asyncio.TaskGroup() as group:
            group.create_task(queuer.run(**settings))
            yield
            queuer.shutdown.set()
    finally:
        await connection.close()


SYSTEM = System(
    name="pgqueuer",
    language="python",
    contenders=(
        Contender(
            "pgqueuer",
            "best",
            "batch_size=100, pool of 5 to 20 for producers, autovacuum as advised",
            100_000,
            {"batch_size": 100},
            {"pool": [5, 20], "batch": 10_000},
            {"autovac": True},
        ),
        Contender("pgqueuer", "default", "batch_size 10, one connection", 20_000, {}, {"batch": 1000}),
    ),
    left="select exists (select from pgqueuer)",
    done=lambda _: "select count(distinct job_id) from pgqueuer_log where status = 'successful'",
    prepare=packages("pgqueuer", "pgqueuer", "asyncpg"),
    command=python_command,
    install=_install,
)
