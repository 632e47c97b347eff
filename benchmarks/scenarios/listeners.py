"""What other listening sessions of the database cost: 1, 20 and 100 of them, which hear nothing that is rung for here.

Before PostgreSQL 19 every NOTIFY signals every session of the database that listens to anything, and each wakes up to
find that it was not meant. So a database with many relays and gateways pays for each ring as often. The sessions listen
on channels of their own and lie in one process: the server does not see the difference, their clients get no message.

ring    rings a second, one awaited statement after the other, until a session that listens has heard the last one.
        `ours` is the doorbell's (`relay.ring`), `bare` is `pg_notify`, both with `synchronous_commit = off`
wake    as in the scenario `wake`, fewer jobs
drain   jobs a second of a backlog, each completion told to whoever waits: `Relay` as in the scenario `drain`; by hand a
        loop on two connections that claims, completes and notifies in batches (bare/reply.py)

No targets: it is the curve that counts. A relay, a gateway or a hand-written worker at work adds sessions of its own.
All share the cores with everything else here; where there are more cores, the wake-ups of others cost less.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import UUID

import asyncpg

from benchmarks.bare import statements
from benchmarks.bare.reply import drain_and_tell
from benchmarks.child import child
from benchmarks.model import Case, Contender, Figure, Plot, Sample, Scenario, check
from benchmarks.sandbox import RELAY, TENANT, Connection, Sandbox
from benchmarks.scenarios import drain, wake
from dispatch_core import RelayDispatchRepository
from dispatch_core.doorbell import Doorbell

__all__ = ["SCENARIO"]

_OURS = Contender("ours", "ours", "Doorbell, ring by ring; GatewayClient.enqueue and Relay")
_BARE = Contender(
    "bare", "baseline", "pg_notify; INSERT + NOTIFY; claim, complete and NOTIFY in a loop", in_quick=False
)

_NOTIFY: Final = f"""
select pg_catalog.set_config('synchronous_commit', 'off', true), pg_notify('{statements.JOB_CHANNEL}', '')
"""
_EMPTY_OURS: Final = (
    "truncate relay.s2r_relay_dispatch_request, relay.s2r_relay_dispatch_queue, relay.s2r_relay_dispatch_result"
)
_EMPTY_BARE: Final = "truncate bare.request, bare.queue, bare.result"


async def crowd(ready: Callable[[], None], stop: asyncio.Event, *, dsn: str, count: int) -> int:
    """Be `count` sessions that listen, each on a channel of its own; return how many notifications they got."""
    connections: list[Any] = []
    heard = 0

    def on_ring(*_: Any) -> None:
        nonlocal heard
        heard += 1

    for number in range(count):
        connections.append(await asyncpg.connect(dsn))
        await connections[-1].add_listener(f"crowd_{number}", on_ring)
    ready()
    await stop.wait()
    for connection in connections:
        connection.terminate()
    return heard


class _OneByOne:
    """Carries a doorbell's statements on one connection, and has it ring again whenever one was answered."""

    def __init__(self, connection: Connection, rings: int) -> None:
        self.doorbell = Doorbell(self)
        self._connection = connection
        self._left = rings

    def ring(self) -> None:
        if self._left:
            self._left -= 1
            self.doorbell.ring_relay(TENANT, RELAY)

    async def execute(self, sql: str, *args: object) -> object:
        rows = await self._connection.fetch(sql, *args)
        self.ring()
        return rows


async def _ours(connection: Connection, rings: int) -> None:
    transport = _OneByOne(connection, rings)
    async with asyncio.TaskGroup() as group:
        ringing = group.create_task(transport.doorbell.run())
        transport.ring()
        while transport.doorbell.sent + transport.doorbell.lost < rings:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        ringing.cancel()


async def _bare(connection: Connection, rings: int) -> None:
    for _ in range(rings):
        await connection.fetch(_NOTIFY)


async def _rings(sandbox: Sandbox, count: int, ours: bool) -> float:
    """Return how many rings a second were sent, and heard by a session that listens for them."""
    heard, done = 0, asyncio.Event()

    def on_ring(*_: Any) -> None:
        nonlocal heard
        heard += 1
        if heard == count:
            done.set()

    async with (
        sandbox.connections(sandbox.worker_dsn, 1) as [listening],
        sandbox.connections(sandbox.gateway_dsn if ours else sandbox.bare_dsn, 1) as [connection],
    ):
        channel = statements.JOB_CHANNEL
        if ours:
            channel = await RelayDispatchRepository(listening, TENANT).channel("wake", RELAY)
        ring = _ours if ours else _bare
        # Outside the clock, and unheard: the statement is prepared and the function compiled.
        await ring(connection, 6)
        await listening.add_listener(channel, on_ring)
        started = time.perf_counter()
        await ring(connection, count)
        async with asyncio.timeout(60):
            await done.wait()
        elapsed = time.perf_counter() - started
        await listening.remove_listener(channel, on_ring)
    check(count, heard=heard)
    return count / elapsed


async def _bare_drain(sandbox: Sandbox, jobs: int) -> Sample:
    async with sandbox.connections(sandbox.bare_dsn, 2) as connections:
        claimed: list[UUID] = await drain_and_tell(connections)
    found = await sandbox.counts("bare")
    checks = check(jobs, claimed=len(claimed), distinct=len(set(claimed)), succeeded=found["succeeded"])
    return Sample({"rate": jobs / await sandbox.completion_span("bare")}, checks)


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    ours, parameters = contender is _OURS, case.parameters
    async with child(crowd, dsn=sandbox.bare_dsn, count=parameters["listeners"]) as process:
        if ours:
            drained = await drain.SCENARIO.run(sandbox, case, _ours_of(drain.SCENARIO))
        else:
            drained = await _bare_drain(sandbox, case.jobs)
        # The scenarios count what there is in the whole database.
        await sandbox.fetch(_EMPTY_OURS if ours else _EMPTY_BARE)
        contenders = {entry.role: entry for entry in wake.SCENARIO.contenders}
        woken = await wake.SCENARIO.run(
            sandbox, Case({}, parameters["wakes"]), contenders["ours" if ours else "baseline"]
        )
        rings = await _rings(sandbox, parameters["rings"], ours)
    check(0, heard_by_the_crowd=process.result)
    figures = {"ring": rings, "wake p50": woken.figures["p50"], "drain": drained.figures["rate"]}
    checks = {f"drain_{name}": count for name, count in drained.checks.items()}
    checks |= {f"wake_{name}": count for name, count in woken.checks.items()}
    return Sample(figures, checks | {"rings_heard": parameters["rings"]}, {"wake_p99_ms": woken.figures["p99"]})


def _ours_of(scenario: Scenario) -> Contender:
    return next(entry for entry in scenario.contenders if entry.role == "ours")


def _cases(quick: bool) -> Sequence[Case]:
    jobs, wakes, rings = (2_000, 4, 100) if quick else (20_000, 60, 2_000)
    return [
        Case({"listeners": count, "wakes": wakes, "rings": rings}, jobs, jobs)
        for count in ((100,) if quick else (1, 20, 100))
    ]


SCENARIO: Final = Scenario(
    name="listeners",
    title="rings, wake-ups and a drain beside other listening sessions",
    figures=(
        Figure("ring", "rings/s", higher_is_better=True),
        Figure("wake p50", "ms", higher_is_better=False),
        Figure("drain", "jobs/s", higher_is_better=True),
    ),
    contenders=(_OURS, _BARE),
    cases=_cases,
    run=_run,
    plot=Plot("listeners", ("ring", "wake p50", "drain")),
)
