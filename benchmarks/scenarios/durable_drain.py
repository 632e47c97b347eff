"""Chunks of one durable job, claimed and completed by two processes whose handlers do nothing.

Ours: a `Relay` with a chunk handler in each process. The bare loops claim and complete by hand on a twin of the table
of chunks, on 1, 2 or 4 connections in each process; the best of them counts. `functions-2` is such a loop by our own
SQL functions. Batches of 500.

Processes are forked and connected before the clock starts; the rate is of the database's clock, from the first claim
of either to the last completion of either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import asyncpg

from benchmarks.bare.durable import KIND, TABLES, drain_by_functions, drain_by_hand, fill_chunks
from benchmarks.fleet import Member, fleet
from benchmarks.loops import as_relay_run
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check
from benchmarks.sandbox import TENANT, Sandbox
from relay_sdk import ChunkContext, Relay, RelaySettings

__all__ = ["BATCH", "CONCURRENCY", "RATE", "SCENARIO", "check_chunks", "drain_by_relay", "run_fleet", "side_of"]

BATCH: Final = 500
# Handlers that do nothing want as many slots as two claims and two completions in flight can fill.
CONCURRENCY: Final = 2000
RATE: Final = Figure("rate", "chunks/s", higher_is_better=True, target=0.7)

_PROCESSES: Final = 2
_DONE: Final = "bench_done"

_OURS = Contender("ours", "ours", f"two processes with a Relay each, {CONCURRENCY} places, batches of {BATCH}")
_BARE = tuple(
    Contender(
        f"bare-{count}",
        "baseline",
        f"two processes, each with claim and complete by hand in a loop on {count} connection(s)",
        in_quick=count == 2,
    )
    for count in (1, 2, 4)
)
_FUNCTIONS = Contender("functions-2", "reference", "the same by our SQL functions on 2 connections each")

# Each once: a chunk that was run again would have counted attempt and version up.
_COUNTS: Final = """
select count(*) filter (where status = 'done' and attempts = 1 and lease_version = 1) as once,
       extract(epoch from max(ended_at) - min(claimed_at))::float8 as span
from {table}
"""


async def drain_by_relay(dsn: str) -> list[int]:
    """Drain by a `Relay` whose chunk handler does nothing; return the numbers that were handled."""
    settings = RelaySettings(chunk_concurrency=CONCURRENCY, chunk_claim_batch=BATCH, chunk_complete_batch=BATCH)
    relay = Relay("import", tenants=[TENANT], dsn=dsn, settings=settings)
    handled: list[int] = []

    @relay.chunk_handler(KIND)
    async def handle(ctx: ChunkContext) -> None:
        handled.append(ctx.seq)

    await relay.run(drain=True)
    return handled


async def member(member: Member, *, dsn: str, done_dsn: str, contender: str, job_id: str) -> list[int]:
    """Drain from `go` on, and say so when it is done; return the numbers that were handled."""
    ours = contender == "ours"
    opened: list[Any] = [] if ours else [await asyncpg.connect(dsn) for _ in range(int(contender[-1]))]
    member.ready()
    await member.go.wait()
    with as_relay_run():
        if ours:
            handled = await drain_by_relay(dsn)
        else:
            drain = drain_by_hand if contender.startswith("bare") else drain_by_functions
            handled = await drain(opened, UUID(job_id), BATCH, f"process-{member.number}")
    for connection in opened:
        await connection.close(timeout=10)
    connection = await asyncpg.connect(done_dsn)
    await connection.execute(f"notify {_DONE}")
    await connection.close(timeout=10)
    await member.stop.wait()
    return handled


def side_of(contender: Contender) -> str:
    """Return whose table a contender works on."""
    return "bare" if contender.name.startswith("bare") else "ours"


async def run_fleet(sandbox: Sandbox, contender: Contender, job_id: UUID, processes: int) -> list[list[int]]:
    """Have so many processes drain the job; return the numbers that each has handled."""
    dsn = sandbox.bare_dsn if side_of(contender) == "bare" else sandbox.worker_dsn
    left = processes
    done = asyncio.Event()

    def told(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    # Members say when they are done: asking the database again and again would take from what is measured.
    async with (
        sandbox.connections(sandbox.bare_dsn, 1) as [listening],
        fleet(
            member, processes, dsn=dsn, done_dsn=sandbox.bare_dsn, contender=contender.name, job_id=str(job_id)
        ) as running,
    ):
        await listening.add_listener(_DONE, told)
        await running.go()
        await asyncio.wait_for(done.wait(), 300)
        await listening.remove_listener(_DONE, told)
    return running.results


async def check_chunks(
    sandbox: Sandbox, contender: Contender, chunks: int, handled: Sequence[int]
) -> tuple[dict[str, int], float]:
    """Return what was counted, and the seconds from the first claim to the last completion.

    Raises: CheckFailedError.
    """
    side = side_of(contender)
    [row] = await sandbox.fetch(_COUNTS.format(table=TABLES[side]))
    counts = {"handled": len(handled), "distinct": len(set(handled)), "once": row["once"]}
    if side == "ours":
        [job] = await sandbox.fetch("select status, chunks_done from relay.durable_job")
        counts["counted"] = job["chunks_done"] if job["status"] == "completed" else 0
    return check(chunks, **counts), row["span"]


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    job_id = await fill_chunks(sandbox, side_of(contender), case.jobs)
    each = await run_fleet(sandbox, contender, job_id, _PROCESSES)
    checks, span = await check_chunks(sandbox, contender, case.jobs, [seq for seqs in each for seq in seqs])
    return Sample({"rate": case.jobs / span}, checks, {"smaller_share": min(map(len, each))})


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({}, 10_000 if quick else 50_000)]


SCENARIO = Scenario(
    name="durable-drain",
    title="chunks of a durable job claimed and completed by two processes",
    figures=(RATE,),
    contenders=(_OURS, *_BARE, _FUNCTIONS),
    cases=_cases,
    run=_run,
)
