"""Oban for Python (https://oban.pro/docs/py): psycopg, claims in batches, one completion a job in a shared transaction.

Best, after its docs: defining_queues (the queue's `limit` is its concurrency and with it the size of a claim: 500 was
as fast here as 2000, 50 and 200 slower; `debounce_interval` is the pause between claims: 0 was faster than the 5 ms of
the default and the 50 of the docs), production ("Sizing the Connection Pool": 2 to 20), enqueueing_jobs
(`enqueue_many`; its own benchmark gives it 10,000 at a time). Bulk inserts and bulk completions are in Oban Pro, which
is not free and not here. Default: a limit of 10, as in its README, and a pool of 1 to 10.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.peers.model import Contender, System
from benchmarks.peers.systems._packages import packages, python_command

__all__ = ["SYSTEM", "producer", "worker"]


@asynccontextmanager
async def _pool(dsn: str, settings: Mapping[str, Any]) -> AsyncIterator[Any]:
    from oban import Oban

    sizes = settings.get("pool")
    pool = await Oban.create_pool(dsn, **({"min_size": sizes[0], "max_size": sizes[1]} if sizes else {}))
    try:
        yield pool
    finally:
        await pool.close()


async def _install(dsn: str, _: Contender) -> None:
    from oban.schema import install

    async with _pool(dsn, {}) as pool:
        await install(pool)


def _counter(handled: Callable[[int], None]) -> Any:
    from oban import worker as oban_worker

    @oban_worker(queue="default")
    class Counter:
        async def process(self, job: Any) -> None:
            handled(job.args["number"])

    return Counter


class _Producer:
    def __init__(self, oban: Any, counter: Any) -> None:
        self._oban = oban
        self._counter = counter

    async def send(self, number: int) -> None:
        await self._oban.enqueue(self._counter.new({"number": number}))

    async def send_many(self, numbers: Sequence[int]) -> None:
        await self._oban.enqueue_many([self._counter.new({"number": number}) for number in numbers])


@asynccontextmanager
async def producer(dsn: str, settings: Mapping[str, Any]) -> AsyncIterator[_Producer]:
    """Open an `Oban` without queues, which only enqueues."""
    from oban import Oban

    async with _pool(dsn, settings) as pool, Oban(pool=pool) as oban:
        yield _Producer(oban, _counter(lambda _: None))


@asynccontextmanager
async def worker(dsn: str, settings: Mapping[str, Any], handled: Callable[[int], None]) -> AsyncIterator[None]:
    """Run an `Oban` with one queue."""
    from oban import Oban

    _counter(handled)
    async with _pool(dsn, settings) as pool, Oban(pool=pool, queues={"default": dict(settings["queue"])}):
        yield


SYSTEM = System(
    name="oban",
    language="python",
    contenders=(
        Contender(
            "oban",
            "best",
            "limit=500, debounce_interval=0, pool of 2 to 20, batches of 10,000",
            12_000,
            {"queue": {"limit": 500, "debounce_interval": 0.0}, "pool": [2, 20]},
            {"pool": [2, 20], "batch": 10_000},
        ),
        Contender("oban", "default", "limit 10, pool of 1 to 10", 5_000, {"queue": {"limit": 10}}, {"batch": 1000}),
    ),
    left="select exists (select from oban_jobs where state in ('available', 'executing', 'scheduled', 'retryable'))",
    done=lambda _: "select count(*) from oban_jobs where state = 'completed'",
    prepare=packages("oban", "oban", "psycopg", "psycopg-pool", least=(3, 12)),
    command=python_command,
    install=_install,
)
