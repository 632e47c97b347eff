"""A drain while another session holds a snapshot from before: no dead queue row can go away, claims meet them all.

The rate of the last 20,000 jobs against that of the first 20,000, both within one drain by the database's clock. The
bare loops claim from the beginning of the index each time; what becomes of them is shown beside ours.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import asyncpg

from benchmarks.model import Case, Contender, Figure, Plot, Point, Sample, Scenario
from benchmarks.sandbox import Sandbox
from benchmarks.scenarios.drain import CONCURRENCY, run_drain, side_of

__all__ = ["SCENARIO", "old_snapshot"]

# Points of the curve; the figure compares the first and the last tenth or so.
_STEP: Final = 10_000

_OURS = Contender("ours", "ours", f"Relay with concurrency={CONCURRENCY}, else its defaults")
_LOOP = Contender("loop-2", "baseline", "claim and complete functions called in a loop on 2 connections")
_SQL = Contender("sql-2", "reference", "hand-written claim and complete statements in a loop on 2 connections")

_COURSE: Final = """
with course as (
  select completed_at, row_number() over (order by completed_at) as n, min(claimed_at) over () as began from {table})
select n, extract(epoch from completed_at - began) as seconds from course where n % $1 = 0 order by n
"""


@asynccontextmanager
async def old_snapshot(sandbox: Sandbox) -> AsyncIterator[None]:
    """Hold a snapshot of the sandbox's database for the length of the block."""
    connection = await asyncpg.connect(sandbox.admin_dsn)
    try:
        await connection.execute("begin isolation level repeatable read")
        await connection.fetch("select count(*) from pg_class")
        yield
        await connection.execute("commit")
    finally:
        await connection.close()


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    step = min(_STEP, case.jobs // 10)
    async with old_snapshot(sandbox):
        checks = await run_drain(sandbox, case, contender)
    side = side_of(contender)
    table = "bare.result" if side == "bare" else "relay.s2r_relay_dispatch_result"
    rows = await sandbox.fetch(_COURSE.format(table=table), step)
    times = [0.0, *(float(row["seconds"]) for row in rows)]
    curve: list[Point] = [
        (number * step, step / max(times[number] - times[number - 1], 1e-6)) for number in range(1, len(times))
    ]
    first, last = times[2], times[-1] - times[-3]
    figures = {"last / first": first / last, "rate": case.jobs / times[-1]}
    return Sample(figures, checks, {"first_rate": 2 * step / first, "last_rate": 2 * step / last}, curve)


def _cases(quick: bool) -> Sequence[Case]:
    jobs = 20_000 if quick else 220_000
    return [Case({}, jobs, jobs)]


SCENARIO = Scenario(
    name="old-snapshot",
    title="a drain beside a snapshot from before; the last 20,000 jobs against the first",
    figures=(
        Figure("last / first", "×", higher_is_better=True, target=0.90, judged="value"),
        Figure("rate", "jobs/s", higher_is_better=True),
    ),
    contenders=(_OURS, _LOOP, _SQL),
    cases=_cases,
    run=_run,
    plot=Plot(x="jobs done", y="jobs/s"),
)
