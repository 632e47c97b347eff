"""The drain by two processes at once: two relays beside the same bare loop in two processes, a database's only work.

The loops have one or two connections in each process. Processes are forked and connected before the clock starts; the
rate is of the database's clock, from the first claim of either to the last completion of either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import asyncpg

from benchmarks.bare.loops import drain_by_functions
from benchmarks.fleet import Member, fleet
from benchmarks.loops import as_relay_run
from benchmarks.model import Case, Contender, Sample, Scenario, check
from benchmarks.sandbox import Sandbox
from benchmarks.scenarios.drain import BATCH, CONCURRENCY, RATE, drain_by_relay

__all__ = ["SCENARIO"]

_PROCESSES = 2
_DONE = "bench_done"

_OURS = Contender("ours", "ours", f"two processes with a Relay each, concurrency={CONCURRENCY}, else its defaults")
_LOOPS = tuple(
    Contender(
        f"loop-{count}",
        "baseline",
        f"two processes, each with claim and complete functions called in a loop on {count} connection(s)",
        in_quick=count == 1,
    )
    for count in (1, 2)
)


async def relay_member(member: Member, *, dsn: str, done_dsn: str) -> list[str]:
    """Drain by a relay from `go` on, and say so when it is done; return the ids that were handled."""
    member.ready()
    await member.go.wait()
    with as_relay_run():
        handled = await drain_by_relay(dsn)
    await _say_done(done_dsn)
    await member.stop.wait()
    return [job_id.hex for job_id in handled]


async def loop_member(member: Member, *, dsn: str, done_dsn: str, connections: int) -> list[str]:
    """Drain by a bare loop from `go` on, and say so when it is done; return the ids that were claimed."""
    opened = [await asyncpg.connect(dsn) for _ in range(connections)]
    member.ready()
    await member.go.wait()
    with as_relay_run():
        claimed = await drain_by_functions(opened, BATCH, f"process-{member.number}")
    for connection in opened:
        await connection.close(timeout=10)
    await _say_done(done_dsn)
    await member.stop.wait()
    return [job_id.hex for job_id in claimed]


async def _say_done(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"notify {_DONE}")
    await connection.close(timeout=10)


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    dsns = {"dsn": sandbox.worker_dsn, "done_dsn": sandbox.bare_dsn}
    if contender is _OURS:
        members = fleet(relay_member, _PROCESSES, **dsns)
    else:
        members = fleet(loop_member, _PROCESSES, connections=int(contender.name[-1]), **dsns)
    left = _PROCESSES
    done = asyncio.Event()

    def told(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    # Members say when they are done: asking the database again and again would take from what is measured.
    async with sandbox.connections(sandbox.bare_dsn, 1) as [listening], members as running:
        await listening.add_listener(_DONE, told)
        await running.go()
        await asyncio.wait_for(done.wait(), 300)
        await listening.remove_listener(_DONE, told)
    handled = [job_id for ids in running.results for job_id in ids]
    found = await sandbox.counts("ours")
    check(0, queued=found["queued"])
    checks = check(
        case.jobs,
        handled=len(handled),
        distinct=len(set(handled)),
        succeeded=found["succeeded"],
        results=found["results"],
    )
    shares = sorted(len(ids) for ids in running.results)
    return Sample({"rate": case.jobs / await sandbox.completion_span("ours")}, checks, {"smaller_share": shares[0]})


def _cases(quick: bool) -> Sequence[Case]:
    jobs = 10_000 if quick else 100_000
    return [Case({}, jobs, jobs)]


SCENARIO = Scenario(
    name="drain-2",
    title="a backlog drained by two processes",
    figures=(replace(RATE, target=0.90),),
    contenders=(_OURS, *_LOOPS),
    cases=_cases,
    run=_run,
)
