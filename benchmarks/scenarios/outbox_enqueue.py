"""An order stored in a transaction of its own: what an event in that transaction adds.

    transaction   begin; insert the order; commit
    ours          begin; insert the order; Outbox.enqueue; commit
    bare          begin; insert the order; insert an event by hand on a twin of our table (and NOTIFY); commit
    lean          the same on the least table that would do

By 1 and 16 tasks with a connection each; with the wake-up, of which the commit pays a lock of the whole database, and
without it. One session listens where wake-ups go. What a transaction costs without an event is the baseline: the ratio
says what an outbox costs at all, and that of `bare` what of it anybody pays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias

from benchmarks.bare.outbox import CHANNEL, INSERT_EVENT, INSERT_LEAN, INSERT_ORDER, KIND, NOTIFY
from benchmarks.model import Case, Contender, Figure, Plot, Sample, Scenario, check, percentile
from benchmarks.sandbox import BODY, TENANT, Connection, Sandbox
from benchmarks.scenarios.outbox_drain import PAYLOAD
from dispatch_core.ids import new_id
from dispatch_core.outbox import Outbox
from dispatch_core.outbox_repository import OutboxRepository

__all__ = ["SCENARIO"]

_LINES: Final = BODY.decode()

_OURS = Contender("ours", "ours", "an order and Outbox.enqueue in one transaction")
_PLAIN = Contender("transaction", "baseline", "the order alone in its transaction")
_BARE = Contender("bare", "reference", "the order and an event by hand, on a twin of our table")
_LEAN = Contender("lean", "reference", "the order and an event by hand, on the least table that would do")

_TABLES: Final = {"ours": "relay.outbox", "transaction": None, "bare": "bare.outbox", "lean": "bare.lean_outbox"}

_Write: TypeAlias = Callable[[Connection], Awaitable[object]]


def _writer(contender: Contender, notify: bool) -> _Write:
    if contender is _OURS:

        async def ours(conn: Connection) -> object:
            return await Outbox.enqueue(conn, KIND, PAYLOAD, tenant=TENANT, notify=notify)

        return ours
    if contender is _PLAIN:

        async def nothing(_: Connection) -> object:
            return None

        return nothing

    async def by_hand(conn: Connection) -> object:
        if contender is _BARE:
            await conn.execute(INSERT_EVENT, TENANT, new_id(), KIND, _LINES)
        else:
            await conn.execute(INSERT_LEAN, TENANT, KIND, _LINES)
        return await conn.execute(NOTIFY) if notify else None

    return by_hand


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    tasks, notify = case.parameters["tasks"], bool(case.parameters["notify"])
    write = _writer(contender, notify)
    # Ours enters as the plain login, which has been given the application's own table; the others as the owner.
    dsn = sandbox.gateway_dsn if contender is _OURS else sandbox.bare_dsn
    await sandbox.fetch("grant usage on schema bare to public")
    await sandbox.fetch("grant insert on bare.orders to public")
    times: list[float] = []
    left = case.jobs

    async with sandbox.connections(dsn, tasks) as connections, sandbox.connections(dsn, 1) as [listening]:
        channel = await OutboxRepository(listening).channel(TENANT) if contender is _OURS else CHANNEL
        heard: list[Any] = []
        await listening.add_listener(channel, lambda *_: heard.append(None))

        async def order(conn: Connection) -> None:
            async with conn.transaction():
                await conn.execute(INSERT_ORDER, new_id(), TENANT, _LINES)
                await write(conn)

        async def writer(conn: Connection) -> None:
            nonlocal left
            while left > 0:
                left -= 1
                began = time.perf_counter()
                await order(conn)
                times.append(time.perf_counter() - began)

        # Outside the clock: statements are prepared.
        for conn in connections:
            for _ in range(6):
                await order(conn)
        started = time.perf_counter()
        await asyncio.gather(*map(writer, connections))
        elapsed = time.perf_counter() - started

    expected = case.jobs + 6 * tasks
    [(orders,)] = await sandbox.fetch("select count(*) from bare.orders")
    counts = {"orders": int(orders)}
    if table := _TABLES[contender.name]:
        [(events,)] = await sandbox.fetch(f"select count(*) from {table}")
        counts["events"] = int(events)
        if notify and not heard:
            raise AssertionError("nobody was woken")
    figures = {
        "rate": case.jobs / elapsed,
        "p50": percentile(times, 0.5) * 1000,
        "p99": percentile(times, 0.99) * 1000,
    }
    return Sample(figures, check(expected, **counts))


def _cases(quick: bool) -> Sequence[Case]:
    if quick:
        return [Case({"tasks": 1, "notify": 1}, 200), Case({"tasks": 16, "notify": 0}, 2_000)]
    return [
        Case({"tasks": tasks, "notify": notify}, jobs) for tasks, jobs in ((1, 600), (16, 3_000)) for notify in (0, 1)
    ]


SCENARIO = Scenario(
    name="outbox-enqueue",
    title="an order stored with an event beside it, against the order alone",
    figures=(
        Figure("rate", "orders/s", higher_is_better=True),
        Figure("p50", "ms", higher_is_better=False),
        Figure("p99", "ms", higher_is_better=False),
    ),
    contenders=(_OURS, _PLAIN, _BARE, _LEAN),
    cases=_cases,
    run=_run,
    plot=Plot(x="tasks", figure="rate", panels=("notify",)),
)
