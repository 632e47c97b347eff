"""A slow disk: does a wake-up serialize enqueues that would otherwise share a flush?

`commit_delay = 4000` with `commit_siblings = 0` makes each group of commits wait 4 ms, as a disk of that speed would,
and all that commit meanwhile go with it. A transaction that carries NOTIFY holds a lock of the whole database over its
commit, and so over the wait: then they go one by one. Set for the sample's own database, which goes with the sample.

16 gateway processes with 4 tasks each, and 4, one awaited enqueue after the other for some seconds; a session listens
on the relay's channel, and so does each gateway on its own. `ours` wakes the relay with each, `off` says
`notify=False`. The bare side makes the same by INSERT, and by INSERT + NOTIFY in one transaction, on 4 connections in
each process: how far the collapse goes, and that there is one to avoid here.

Jobs a second are those acknowledged within the time. Every job that was acknowledged is stored, once. None is run: a
relay at work would take from the server what is to be measured, and more of it where it is woken.

What it does not say: a real slow disk also holds up the flushes of others (the background writer, checkpoints). With
two cores, 16 processes in Python reach the limit of the processors and not that of the flush (`p50` is far above two
flushes): then the ratio is that of the processor's time for a job with and without its ring. That is why there are 4.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

from benchmarks.bare import statements
from benchmarks.fleet import Member, fleet
from benchmarks.model import Case, CheckFailedError, Contender, Figure, Sample, Scenario, check, percentile
from benchmarks.sandbox import BODY, HEADERS, OPERATION, RELAY, TENANT, TTL, Sandbox
from dispatch_core import RelayDispatchRepository
from dispatch_core.codec import decode_json
from dispatch_core.ids import new_id
from gateway_sdk import GatewayClient

__all__ = ["SCENARIO"]

_DELAY: Final = {"commit_delay": 4000, "commit_siblings": 0}

_OURS = Contender("ours", "ours", "GatewayClient.enqueue, wake-ups on")
_OFF = Contender("off", "baseline", "GatewayClient.enqueue(notify=False)")
_BARE = Contender("bare", "reference", "one INSERT a call, a connection for each task, no NOTIFY")
_BARE_NOTIFY = Contender("bare-notify", "reference", "the same with NOTIFY in the transaction")

Enqueue = Callable[[], Awaitable[object]]


@asynccontextmanager
async def _client(dsn: str, notify: bool) -> AsyncIterator[list[Enqueue]]:
    headers = decode_json(HEADERS.encode())
    async with GatewayClient(dsn) as client:
        tenant = client.tenant(TENANT)
        yield [lambda: tenant.enqueue(RELAY, OPERATION, headers, BODY, ttl=TTL, notify=notify)]


@asynccontextmanager
async def _inserts(dsn: str, notify: bool, tasks: int) -> AsyncIterator[list[Enqueue]]:
    sql = statements.INSERT_NOTIFY if notify else statements.INSERT
    connections: list[Any] = [await asyncpg.connect(dsn) for _ in range(tasks)]

    def on(connection: Any) -> Enqueue:
        return lambda: connection.fetch(sql, TENANT, new_id(), RELAY, OPERATION, HEADERS, BODY, TTL)

    yield [on(connection) for connection in connections]
    for connection in connections:
        await connection.close(timeout=30)


async def enqueuing(
    member: Member, *, ours: bool, dsn: str, notify: bool, tasks: int, seconds: float
) -> dict[str, Any]:
    """Be one gateway process; return how many were acknowledged in time and in all, and their times in ms."""
    in_time = stored = 0
    times: list[float] = []
    async with _client(dsn, notify) if ours else _inserts(dsn, notify, tasks) as ways:

        async def caller(number: int) -> None:
            nonlocal in_time, stored
            enqueue = ways[number % len(ways)]
            while (now := time.monotonic()) < until:
                await enqueue()
                stored += 1
                times.append((time.monotonic() - now) * 1000)
                in_time += time.monotonic() <= until

        for enqueue in ways:
            for _ in range(2):
                await enqueue()
                stored += 1
        member.ready()
        await member.go.wait()
        until = time.monotonic() + seconds
        await asyncio.gather(*(caller(number) for number in range(tasks)))
    return {"in_time": in_time, "stored": stored, "times": times}


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    ours, notify = contender in (_OURS, _OFF), contender in (_OURS, _BARE_NOTIFY)
    processes, tasks, seconds = (case.parameters[name] for name in ("processes", "tasks", "seconds"))
    for name, value in _DELAY.items():
        await sandbox.fetch(f"alter database {sandbox.name} set {name} = {value}")
    rings = 0

    def on_ring(*_: Any) -> None:
        nonlocal rings
        rings += 1

    async with sandbox.connections(sandbox.worker_dsn, 1) as [listening]:
        for name, value in _DELAY.items():
            if await listening.fetchval(f"show {name}") not in (str(value), f"{value}us"):
                raise CheckFailedError(f"{name} is not {value} in the sample's sessions")
        wake = await RelayDispatchRepository(listening, TENANT).channel("wake", RELAY)
        channel = wake if ours else statements.JOB_CHANNEL
        await listening.add_listener(channel, on_ring)
        async with fleet(
            enqueuing,
            processes,
            ours=ours,
            dsn=sandbox.gateway_dsn if ours else sandbox.bare_dsn,
            notify=notify,
            tasks=tasks,
            seconds=seconds,
        ) as members:
            await asyncio.sleep(0.2)
            await members.go()
            await asyncio.sleep(seconds + 0.1)
        await listening.fetchval("select 1")
        await listening.remove_listener(channel, on_ring)
    if notify != bool(rings):
        raise CheckFailedError(f"{rings} wake-ups were heard of {contender.name}")
    stored = sum(result["stored"] for result in members.results)
    found = await sandbox.counts("ours" if ours else "bare")
    checks = check(stored, requests=found["requests"], queued=found["queued"])
    times = [each for result in members.results for each in result["times"]]
    rate = sum(result["in_time"] for result in members.results) / seconds
    return Sample(
        {"rate": rate, "p50": percentile(times, 0.5), "p99": percentile(times, 0.99)}, checks, {"rings_heard": rings}
    )


def _cases(quick: bool) -> Sequence[Case]:
    # As many jobs as are acknowledged in the time.
    if quick:
        return [Case({"processes": 4, "tasks": 4, "seconds": 1}, 0)]
    return [Case({"processes": processes, "tasks": 4, "seconds": 4}, 0) for processes in (4, 16)]


SCENARIO: Final = Scenario(
    name="flush",
    title="single awaited enqueue calls with a flush of 4 ms",
    figures=(
        Figure("rate", "jobs/s", higher_is_better=True, target=0.85),
        Figure("p50", "ms", higher_is_better=False),
        Figure("p99", "ms", higher_is_better=False),
    ),
    contenders=(_OURS, _OFF, _BARE, _BARE_NOTIFY),
    cases=_cases,
    run=_run,
)
