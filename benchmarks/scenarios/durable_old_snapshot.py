"""Chunks of one durable job, claimed and completed while another session holds a snapshot from before.

No dead index entry can go away, and claims meet them all. The rate of the last 20,000 chunks against that of the first
20,000, both within one drain by the database's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.bare.durable import TABLES, fill_chunks
from benchmarks.model import Case, Contender, Figure, Plot, Point, Sample, Scenario
from benchmarks.sandbox import Sandbox
from benchmarks.scenarios.durable_drain import BATCH, CONCURRENCY, check_chunks, run_fleet, side_of
from benchmarks.scenarios.old_snapshot import old_snapshot

__all__ = ["SCENARIO"]

# Points of the curve; the figure compares the first and the last two.
_STEP: Final = 10_000

_OURS = Contender("ours", "ours", f"one process with a Relay, {CONCURRENCY} places for chunks, batches of {BATCH}")
_BARE = Contender("bare-2", "baseline", "claim and complete by hand in a loop on 2 connections")
_FUNCTIONS = Contender("functions-2", "reference", "the same by our SQL functions")

_COURSE: Final = """
with course as (
  select ended_at, row_number() over (order by ended_at) as n, min(claimed_at) over () as began from {table})
select n, extract(epoch from ended_at - began)::float8 as seconds from course where n % $1 = 0 order by n
"""


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    step = min(_STEP, case.jobs // 10)
    side = side_of(contender)
    job_id = await fill_chunks(sandbox, side, case.jobs)
    async with old_snapshot(sandbox):
        [handled] = await run_fleet(sandbox, contender, job_id, 1)
    checks, _ = await check_chunks(sandbox, contender, case.jobs, handled)
    rows = await sandbox.fetch(_COURSE.format(table=TABLES[side]), step)
    times = [0.0, *(row["seconds"] for row in rows)]
    curve: list[Point] = [
        (number * step, step / max(times[number] - times[number - 1], 1e-6)) for number in range(1, len(times))
    ]
    first, last = max(times[2], 1e-6), max(times[-1] - times[-3], 1e-6)
    figures = {"last / first": first / last, "rate": case.jobs / times[-1]}
    return Sample(figures, checks, {"first_rate": 2 * step / first, "last_rate": 2 * step / last}, curve)


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({}, 20_000 if quick else 220_000)]


SCENARIO = Scenario(
    name="durable-old-snapshot",
    title="chunks done beside a snapshot from before; the last 20,000 against the first",
    figures=(
        Figure("last / first", "×", higher_is_better=True, target=0.90, judged="value"),
        Figure("rate", "chunks/s", higher_is_better=True),
    ),
    contenders=(_OURS, _BARE, _FUNCTIONS),
    cases=_cases,
    run=_run,
    plot=Plot(x="chunks done", y="chunks/s"),
    most_rounds=2,
)
