"""Claims of one relay by concurrent claimers, each on a connection of its own, spread over 1, 2 or 4 processes.

Ours: `RelayDispatchRepository.claim`, so with the objects that a relay gets, always from cursor zero. The bare side
takes the rows by one SKIP LOCKED statement on the twin of the table and reads the requests beside them; `bare-on-ours`
is the same statement on our own table, as the superuser, from one process.

A sample is over after some tenths of a second or when the backlog is taken, and its rate counts until the last claim
has ended. All samples share one database, ours and bare on tables of their own; before a sample the queue that
it works on is filled anew, out of a copy, when less than four fifths of it are pending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

from benchmarks.child import Child, child
from benchmarks.claimers import claimers
from benchmarks.model import Case, CaseResult, Contender, Figure, Plot, Sample, Scenario, Verdict, check, percentile
from benchmarks.sandbox import Sandbox

__all__ = ["SCENARIO"]

_SECONDS: Final = 0.5
# At 64 claimers, of the rate at the best number of claimers.
_NO_COLLAPSE: Final = 0.5

_OURS = Contender("ours", "ours", "RelayDispatchRepository.claim: one function call, DispatchJob objects")
_BARE = Contender("bare", "baseline", "one SKIP LOCKED statement on the bare twin of the table, request read beside it")
_ON_OURS = Contender("bare-on-ours", "reference", "the same statement on our own table, as the superuser")

_RATE: Final = Figure("rate", "jobs/s", higher_is_better=True, target=0.90)

_TABLES: Final = {
    "ours": "relay.s2r_relay_dispatch_queue",
    "bare": "bare.queue",
    "bare-on-ours": "relay.s2r_relay_dispatch_queue",
}


class _Backlog:
    """The queues, and how many jobs are pending in each."""

    def __init__(self, sandbox: Sandbox, jobs: int) -> None:
        self._sandbox = sandbox
        self._jobs = jobs
        self._pending: dict[str, int] = {}

    async def fill(self, table: str) -> None:
        if self._pending.get(table, 0) >= 0.8 * self._jobs:
            return
        connection = await asyncpg.connect(self._sandbox.admin_dsn)
        try:
            copy = table.replace("relay.", "bare.copy_of_").replace("bare.queue", "bare.copy_of_queue")
            if table not in self._pending:
                await connection.execute(f"create table {copy} as select * from {table}")
            await connection.execute(f"truncate {table}; insert into {table} select * from {copy} order by seq, job_id")
            await connection.execute(f"vacuum {table}")
        finally:
            await connection.close()
        self._pending[table] = self._jobs

    def pending(self, table: str) -> int:
        return self._pending[table]

    def taken(self, table: str, jobs: int) -> None:
        self._pending[table] -= jobs


@asynccontextmanager
async def _backlog(sandbox: Sandbox, jobs: int) -> AsyncIterator[_Backlog]:
    yield _Backlog(sandbox, jobs)


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    parameters, table = case.parameters, _TABLES[contender.name]
    dsns = {"worker": sandbox.worker_dsn, "owner": sandbox.bare_dsn}
    processes: list[Child] = [
        await sandbox.keep(f"process {number}", lambda: child(claimers, dsns=dsns))
        for number in range(parameters["processes"])
    ]
    backlog = await sandbox.keep("backlog", lambda: _backlog(sandbox, case.preload))
    await backlog.fill(table)

    async def ask(**order: Any) -> list[Any]:
        share = parameters["claimers"] // len(processes)
        return await asyncio.gather(*(process.ask({**order, "claimers": share}) for process in processes))

    await ask(prepare=contender.name)
    before = await _claimed(sandbox, table)
    start = time.monotonic() + 0.03
    answers = await ask(claim=contender.name, batch=parameters["batch"], start=start, seconds=_SECONDS)

    ids = [job_id for answer in answers for job_id in answer["ids"]]
    times = [seconds for answer in answers for seconds in answer["times"]]
    checks = check(
        len(ids),
        claimed=len(ids),
        distinct=len(set(ids)),
        stored=await _claimed(sandbox, table) - before,
        gone=backlog.pending(table) - await _ready(sandbox, table),
    )
    backlog.taken(table, len(ids))
    figures = {
        "rate": len(ids) / (max(answer["ended"] for answer in answers) - start),
        "p50": percentile(times, 0.5) * 1000,
        "p99": percentile(times, 0.99) * 1000,
    }
    return Sample(figures, checks, {"claims": len(times)})


async def _claimed(sandbox: Sandbox, table: str) -> int:
    # Each once: a second claim of the same job would have counted its attempt and its fence up.
    [row] = await sandbox.fetch(f"select count(*) from {table} where state = 'claimed' and attempt = 1 and fence = 1")
    return int(row[0])


async def _ready(sandbox: Sandbox, table: str) -> int:
    [row] = await sandbox.fetch(f"select count(*) from {table} where state = 'ready' and attempt = 0")
    return int(row[0])


def _across(results: Sequence[CaseResult]) -> list[Verdict]:
    """Judge each curve as a whole: what is left at the most claimers of the best rate at any number of them."""
    found = []
    curves: dict[tuple[int, int], list[CaseResult]] = {}
    for result in results:
        curves.setdefault((result.case.parameters["processes"], result.case.parameters["batch"]), []).append(result)
    for (processes, batch), curve in curves.items():
        if len(curve) > 2:
            left = {name: _left(curve, name) for name in ("ours", "bare")}
            found.append(
                Verdict(
                    scenario="claim",
                    case=f"processes={processes} batch={batch}",
                    figure=f"rate at {curve[-1].case.parameters['claimers']} claimers / best",
                    measured=left["ours"],
                    unit="",
                    against="",
                    higher_is_better=True,
                    target=_NO_COLLAPSE,
                    beside=f"bare {left['bare']:.2f}",
                )
            )
    return found


def _left(curve: Sequence[CaseResult], contender: str) -> float:
    rates = [result.of(contender, "rate") or 0.0 for result in curve]
    return rates[-1] / max(rates)


def _cases(quick: bool) -> Sequence[Case]:
    preload = 20_000 if quick else 100_000
    points = (
        [(1, 1, 1), (1, 4, 100), (2, 16, 100)]
        if quick
        else [
            (processes, claimers, batch)
            for processes in (1, 2, 4)
            for batch in (1, 10, 100, 500)
            for claimers in (1, 2, 4, 8, 16, 32, 64)
            if claimers >= processes
        ]
    )
    return [
        Case({"processes": processes, "claimers": claimers, "batch": batch}, preload, preload)
        for processes, claimers, batch in points
    ]


SCENARIO = Scenario(
    name="claim",
    title="claims of one relay by concurrent claimers",
    figures=(
        _RATE,
        Figure("p50", "ms", higher_is_better=False),
        Figure("p99", "ms", higher_is_better=False),
    ),
    contenders=(_OURS, _BARE, _ON_OURS),
    cases=_cases,
    run=_run,
    # The same rows either way: once is enough.
    takes_part=lambda case, contender: contender is not _ON_OURS or case.parameters["processes"] == 1,
    across=_across,
    across_targets="rate at 64 claimers ≥ 0.5 of the best",
    plot=Plot(x="claimers", figure="rate", panels=("batch", "processes")),
    shared=True,
)
