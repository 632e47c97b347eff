"""The drain to nowhere beside another session that holds a snapshot from before: no dead row can go away.

The rate of the last 20,000 events against that of the first 20,000, both within one drain. The bare loops claim from
the beginning of the index each time; what becomes of them is shown beside ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.model import Case, Contender, Figure, Plot, Sample, Scenario
from benchmarks.sandbox import Sandbox
from benchmarks.scenarios.old_snapshot import old_snapshot
from benchmarks.scenarios.outbox_drain import BATCH, DRAINS, run_drain

__all__ = ["SCENARIO"]

# Points of the curve; the figure compares the first and the last two.
_STEP: Final = 10_000

_OURS = Contender("ours", "ours", f"{DRAINS} drains at once of one Outbox, batches of {BATCH}, async def sink")
_BARE = Contender("bare-2", "baseline", f"claim and delete by hand in a loop on 2 connections, batches of {BATCH}")
_LEAN = Contender("lean-2", "reference", "the same by 2 connections on the least table that would do")


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    course, checks = await run_drain(sandbox, case, contender, beside=lambda: old_snapshot(sandbox))
    edge = case.jobs // 10
    first = course.seconds_at(edge)
    last = course.seconds - course.seconds_at(case.jobs - edge)
    return Sample(
        {"last / first": first / last, "rate": case.jobs / course.seconds},
        checks,
        {"first_rate": edge / first, "last_rate": edge / last},
        course.curve(min(_STEP, case.jobs // 10)),
    )


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({}, 20_000 if quick else 200_000)]


SCENARIO = Scenario(
    name="outbox-old-snapshot",
    title="events drained beside a snapshot from before; the last 20,000 against the first",
    figures=(
        Figure("last / first", "×", higher_is_better=True, target=0.90, judged="value"),
        Figure("rate", "events/s", higher_is_better=True),
    ),
    contenders=(_OURS, _BARE, _LEAN),
    cases=_cases,
    run=_run,
    plot=Plot(x="events done", y="events/s"),
    most_rounds=2,
)
