"""What is timed in each scenario; each sample ends with the check that every job was handled exactly once.

The check is the same for all: the worker's handler keeps the number of each job that it was called for. When the queue
is empty and the worker has stopped, every number that was sent must be there, once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.peers.databases import Database
from benchmarks.peers.model import (
    CheckFailedError,
    Contender,
    Row,
    Sample,
    SampleFailedError,
    System,
    percentile,
)
from benchmarks.peers.processes import Process, process

__all__ = ["FULL", "QUICK", "ROWS", "SCENARIOS", "Run", "Scenario", "Sizes", "counted"]

# From the last handler's start to an empty queue, or from the last enqueue.
_PATIENCE: Final = 120.0
# An idle worker has listened and looked once by then.
_SETTLE: Final = 1.0
_WARM_WAKES: Final = 10


@dataclass(frozen=True)
class Sizes:
    """How long each sample is; `jobs` caps a backlog."""

    jobs: int = 100_000
    seconds: float = 2.0
    flush_seconds: float = 2.0
    wakes: int = 80
    processes: int = 16


FULL: Final = Sizes()
QUICK: Final = Sizes(jobs=2_000, seconds=0.3, flush_seconds=0.5, wakes=10, processes=4)


@dataclass(frozen=True)
class Run:
    """One sample of one contender."""

    system: System
    contender: Contender
    database: Database
    sizes: Sizes

    def producer(self, mode: str, *, tasks: int = 1, first: int = 0, warm: bool = True, **arguments: Any) -> Any:
        """Start a producer."""
        order = {"role": "producer", "mode": mode, "tasks": tasks, "first": first, "warm": warm, **arguments}
        return self._process(order, self.contender)

    def worker(self, *, expected: int = 0, times: bool = False, contender: Contender | None = None) -> Any:
        """Start a worker; `expected`: at which number of handled jobs it says so."""
        return self._process({"role": "worker", "expected": expected, "times": times}, contender or self.contender)

    def _process(self, order: Mapping[str, Any], contender: Contender) -> Any:
        dsn = self.database.dsn(order["role"])
        settings = contender.worker if order["role"] == "worker" else contender.producer
        return process(
            self.system.command(), {**order, "system": self.system.name, "dsn": dsn, "settings": dict(settings)}
        )

    @property
    def swift(self) -> Contender:
        """The settings with which the check after an enqueue is over soonest."""
        return next(entry for entry in self.system.contenders if entry.profile == "best")

    async def until_empty(self, every: float = 0.02) -> int:
        """Wait for an empty queue; return when it was seen, by the monotonic clock."""
        until = time.monotonic() + _PATIENCE
        async with self.database.connection() as connection:
            statement = await connection.prepare(self.system.left)
            while await statement.fetchval():
                if time.monotonic() > until:
                    raise SampleFailedError(f"the queue was not empty after {_PATIENCE:.0f} s")
                await asyncio.sleep(every)
        return time.monotonic_ns()

    async def checked(self, sent: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> dict[str, int]:
        """Return the counts when every job that was sent was handled once, and ended well.

        Raises: CheckFailedError.
        """
        done = None
        if (sql := self.system.done(self.contender)) is not None:
            async with self.database.connection() as connection:
                done = await connection.fetchval(sql)
        return counted(sent, numbers, done)


def counted(sent: Sequence[Mapping[str, Any]], numbers: Sequence[int], done: int | None) -> dict[str, int]:
    """Return the counts when `numbers` are those that the producers sent, each once.

    `sent`: their results, with ranges as first number and count. `done`: how many the system says have ended well,
    where it keeps them.

    Raises: CheckFailedError.
    """
    wanted: set[int] = set()
    for entry in sent:
        for first, count in (entry["sent"], entry["warm"]):
            wanted.update(range(first, first + count))
    counts = {"sent": len(wanted), "handled": len(numbers), "distinct": len(wanted.intersection(numbers))}
    if done is not None:
        counts["done"] = done
    if len(set(counts.values())) != 1:
        raise CheckFailedError(f"not every job ran exactly once: {counts}")
    return counts


async def _backlog(run: Run) -> Sample:
    # Bulk and drain are one sample: what drain empties is what bulk has stored.
    jobs = min(run.contender.drain_jobs, run.sizes.jobs)
    async with run.producer("bulk", count=jobs) as producer:
        await producer.expect("ready")
        # The few jobs of the producer's warm-up tell what starting and the last completion take by themselves.
        few, overhead = await _worked_off(run, 8)
        await producer.tell("go")
        stored = await producer.result()
    async with run.database.connection() as connection:
        await connection.execute("vacuum (analyze)")
        await connection.execute("checkpoint")
    many, seconds = await _worked_off(run, jobs)
    checks = await run.checked([stored], few["numbers"] + many["numbers"])
    bulk = (stored["ended"] - stored["started"]) / 1e9
    return Sample(
        {"bulk": jobs / bulk, "drain": jobs / (seconds - overhead)}, checks, {"jobs": jobs, "overhead_s": overhead}
    )


async def _worked_off(run: Run, jobs: int) -> tuple[dict[str, Any], float]:
    """Let a worker empty the queue, of `jobs`; return what it handled, and the seconds from its start."""
    async with run.worker(expected=jobs) as worker:
        await worker.expect("ready")
        started = time.monotonic_ns()
        await worker.tell("go")
        # A worker may be through with eight jobs before it is what its library calls started.
        await worker.expect("started", "all")
        ended = await run.until_empty(every=0.005)
        await worker.tell("stop")
        return await worker.result(), (ended - started) / 1e9


async def _emptied(run: Run, sent: Mapping[str, Any]) -> dict[str, int]:
    """Let a worker handle what was only stored, untimed, and check it."""
    async with run.worker(contender=run.swift) as worker:
        await _start(worker)
        await run.until_empty()
        await worker.tell("stop")
        return await run.checked([sent], (await worker.result())["numbers"])


async def _start(worker: Process) -> None:
    await worker.expect("ready")
    await worker.tell("go")
    await worker.expect("started")


def _enqueue(tasks: int) -> Callable[[Run], Awaitable[Sample]]:
    async def sample(run: Run) -> Sample:
        async with run.producer("single", tasks=tasks, seconds=run.sizes.seconds) as producer:
            await producer.expect("ready")
            await producer.tell("go")
            sent = await producer.result()
        rate = sent["sent"][1] / ((sent["ended"] - sent["started"]) / 1e9)
        return Sample({f"enqueue-{tasks}": rate}, await _emptied(run, sent))

    return sample


async def _wake(run: Run) -> Sample:
    count = run.sizes.wakes + _WARM_WAKES
    async with run.worker(times=True) as worker:
        await _start(worker)
        async with run.producer("paced", count=count, every=0.05, warm=False) as producer:
            await producer.expect("ready")
            await asyncio.sleep(_SETTLE)
            await producer.tell("go")
            sent = await producer.result()
        await run.until_empty()
        await worker.tell("stop")
        handled = await worker.result()
    checks = await run.checked([sent], handled["numbers"])
    starts = dict(zip(handled["numbers"], handled["times"], strict=True))
    times = [(starts[number] - sent["times"][number]) / 1e6 for number in range(_WARM_WAKES, count)]
    return Sample({"wake-p50": percentile(times, 0.5), "wake-p99": percentile(times, 0.99)}, checks)


async def _flush(run: Run) -> Sample:
    async with AsyncExitStack() as stack:
        worker: Process = await stack.enter_async_context(run.worker())
        await _start(worker)
        producers: list[Process] = [
            await stack.enter_async_context(
                run.producer("single", tasks=4, first=number * 10_000_000, seconds=run.sizes.flush_seconds)
            )
            for number in range(run.sizes.processes)
        ]
        for producer in producers:
            await producer.expect("ready")
        # What the producers warmed up with is handled before the clock starts.
        await run.until_empty()
        await asyncio.sleep(_SETTLE)
        for producer in producers:
            await producer.tell("go")
        sent = [await producer.result() for producer in producers]
        await run.until_empty()
        await worker.tell("stop")
        checks = await run.checked(sent, (await worker.result())["numbers"])
    seconds = (max(entry["ended"] for entry in sent) - min(entry["started"] for entry in sent)) / 1e9
    return Sample({"flush": sum(entry["sent"][1] for entry in sent) / seconds}, checks)


@dataclass(frozen=True)
class Scenario:
    """One kind of sample, and the rows that come of it. `settings`: the server's, for the sample's database."""

    name: str
    rows: tuple[Row, ...]
    sample: Callable[[Run], Awaitable[Sample]]
    settings: Mapping[str, str] = field(default_factory=dict)


SCENARIOS: Final = (
    Scenario(
        "backlog",
        (
            Row("drain", "a backlog worked off by one process, handlers that do nothing", "jobs/s", "higher"),
            Row("bulk", "the batch insert", "jobs/s", "higher"),
        ),
        _backlog,
    ),
    Scenario("enqueue-1", (Row("enqueue-1", "single awaited calls by 1 task", "jobs/s", "higher"),), _enqueue(1)),
    Scenario("enqueue-16", (Row("enqueue-16", "single awaited calls by 16 tasks", "jobs/s", "higher"),), _enqueue(16)),
    Scenario(
        "wake",
        (
            Row("wake-p50", "an idle worker: start of enqueue to start of handler, median", "ms", "lower"),
            Row("wake-p99", "the same, 99 of 100", "ms", "lower"),
        ),
        _wake,
    ),
    Scenario(
        "flush",
        (Row("flush", "slow commits (4 ms): 16 processes of 4 tasks, a worker listening", "jobs/s", "higher"),),
        _flush,
        {"commit_delay": "4000", "commit_siblings": "0"},
    ),
)
ROWS: Final = tuple(row for scenario in SCENARIOS for row in scenario.rows)
