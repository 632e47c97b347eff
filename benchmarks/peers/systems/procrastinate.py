"""Procrastinate (https://procrastinate.readthedocs.io): psycopg, one fetch and one completion a job.

Best, after its docs: howto/production/concurrency (sub-workers for asynchronous jobs; of 4, 10 and 30, the example's
figure, 10 were fastest here), discussions ("Mind the size of your PostgreSQL pool": as many connections as sub-workers
and one, where jobs are short), howto/production/delete_finished_jobs, howto/basics/batch_defer. Default: one job at a
time and psycopg's pool of 4.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.peers.model import Contender, System
from benchmarks.peers.systems._packages import packages, python_command

__all__ = ["SYSTEM", "producer", "worker"]


def _app(dsn: str, settings: Mapping[str, Any]) -> Any:
    from procrastinate import App, PsycopgConnector

    pool = settings.get("pool")
    sizes = {"min_size": pool, "max_size": pool} if pool else {}
    return App(connector=PsycopgConnector(conninfo=dsn, **sizes))


async def _install(dsn: str, _: Contender) -> None:
    async with _app(dsn, {}).open_async() as app:
        await app.schema_manager.apply_schema_async()


def _task(app: Any, handled: Callable[[int], None]) -> Any:
    @app.task(name="count")
    async def count(number: int) -> None:
        handled(number)

    return count


class _Producer:
    def __init__(self, task: Any) -> None:
        self._task = task

    async def send(self, number: int) -> None:
        await self._task.defer_async(number=number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        await self._task.batch_defer_async(*({"number": number} for number in numbers))


@asynccontextmanager
async def producer(dsn: str, settings: Mapping[str, Any]) -> AsyncIterator[_Producer]:
    """Open an `App` to defer from."""
    app = _app(dsn, settings)
    task = _task(app, lambda _: None)
    async with app.open_async():
        yield _Producer(task)


@asynccontextmanager
async def worker(dsn: str, settings: Mapping[str, Any], handled: Callable[[int], None]) -> AsyncIterator[None]:
    """Run a worker, which is stopped by a cancellation, as its documentation has it."""
    app = _app(dsn, settings)
    _task(app, handled)
    options = {key: value for key, value in settings.items() if key in ("concurrency", "delete_jobs")}
    async with app.open_async(), asyncio.TaskGroup() as group:
        running = group.create_task(app.run_worker_async(install_signal_handlers=False, **options))
        yield
        running.cancel()


SYSTEM = System(
    name="procrastinate",
    language="python",
    contenders=(
        Contender(
            "procrastinate",
            "best",
            "concurrency=10, pool of 11, finished jobs deleted",
            3_000,
            {"concurrency": 10, "pool": 11, "delete_jobs": "always"},
            {"pool": 16, "batch": 1000},
        ),
        Contender("procrastinate", "default", "one job at a time, finished jobs kept", 2_000, {}, {"batch": 1000}),
    ),
    left="select exists (select from procrastinate_jobs where status in ('todo', 'doing'))",
    done=lambda _: None,
    prepare=packages("procrastinate", "procrastinate", "psycopg", "psycopg-pool"),
    command=python_command,
    install=_install,
)
