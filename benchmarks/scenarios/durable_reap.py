"""Chunks whose lease has run out are taken back, in batches of 500, until none is left.

Ours: `DurableRepository.reap` in a loop. The bare side takes the same rows of a twin of the table back by UPDATE … FOR
UPDATE SKIP LOCKED, and tells nobody; ours writes a line of the job's timeline for each, as `bare-told` does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final
from uuid import UUID

from benchmarks.bare.durable import REAP, REAP_AND_TELL, TABLES, fill_running
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check
from benchmarks.sandbox import TENANT, Connection, Sandbox
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.ids import new_id

__all__ = ["SCENARIO"]

_BATCH: Final = 500

_OURS = Contender("ours", "ours", f"DurableRepository.reap, {_BATCH} at a time, an event for each chunk")
_TOLD = Contender("bare-told", "baseline", f"UPDATE by hand and INSERT of an event for each, {_BATCH} at a time")
_BARE = Contender("bare", "reference", f"UPDATE by hand, {_BATCH} at a time; nothing is told")


async def _reap_ours(connection: Connection) -> list[tuple[UUID, int]]:
    repository = DurableRepository(connection)
    every: list[tuple[UUID, int]] = []
    while True:
        reaped = await repository.reap(TENANT, "bench", limit=_BATCH)
        every += [(chunk.job_id, chunk.seq) for chunk in reaped]
        if len(reaped) < _BATCH:
            return every


async def _reap_bare(connection: Connection, sql: str) -> list[tuple[UUID, int]]:
    every: list[tuple[UUID, int]] = []
    while True:
        rows = await connection.fetch(sql, TENANT, _BATCH)
        every += [(row["job_id"], row["seq"]) for row in rows]
        if len(rows) < _BATCH:
            return every


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    ours = contender is _OURS
    side = "ours" if ours else "bare"
    await fill_running(sandbox, side, case.jobs, token=new_id(), lease=timedelta(seconds=-1))
    async with sandbox.connections(sandbox.worker_dsn if ours else sandbox.bare_dsn, 1) as [connection]:
        # Outside the clock: the statement is prepared, and its plan made. Nothing of that tenant has run out.
        sql = "select * from relay.durable_reap('none', 'bench', 1)" if ours else "select 1"
        await connection.fetch(sql)
        started = time.perf_counter()
        if ours:
            reaped = await _reap_ours(connection)
        else:
            reaped = await _reap_bare(connection, REAP if contender is _BARE else REAP_AND_TELL)
        seconds = time.perf_counter() - started
    [row] = await sandbox.fetch(
        f"select count(*) from {TABLES[side]} where status = 'retry' and lease_version = 2 and lease_token is null"
    )
    counts = {"reaped": len(reaped), "distinct": len(set(reaped)), "stored": row[0]}
    if contender is not _BARE:
        events = TABLES[side].replace("chunk", "event")
        [row] = await sandbox.fetch(f"select count(distinct seq) from {events} where type = 'chunk_reaped'")
        counts["told"] = row[0]
    return Sample({"rate": case.jobs / seconds}, check(case.jobs, **counts))


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({}, 2_000 if quick else 10_000)]


SCENARIO = Scenario(
    name="durable-reap",
    title="chunks whose lease has run out are taken back",
    figures=(Figure("rate", "chunks/s", higher_is_better=True, target=0.5),),
    contenders=(_OURS, _TOLD, _BARE),
    cases=_cases,
    run=_run,
)
