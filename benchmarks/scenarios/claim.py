"""Claims of one relay by concurrent claimers, each on a connection of its own, until the backlog is taken.

Ours: `RelayDispatchRepository.claim`, so with the objects that a relay gets, always from cursor zero. The bare side
takes the rows by one statement and reads the request beside them; `bare-ids` leaves the request unread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from benchmarks.bare import statements
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check, percentile
from benchmarks.sandbox import RELAY, TENANT, TTL, Connection, Sandbox
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.ids import new_id

__all__ = ["SCENARIO"]

_OURS = Contender("ours", "ours", "RelayDispatchRepository.claim: one function call, DispatchJob objects")
_BARE = Contender("bare", "baseline", "one SKIP LOCKED statement on the bare twin of the table, request read beside it")
_BARE_IDS = Contender("bare-ids", "reference", "the same, returning job id and fence only")

Claim = Callable[[Connection, str, int], Awaitable[list[UUID]]]


async def _ours(connection: Connection, claimed_by: str, batch: int) -> list[UUID]:
    repository = RelayDispatchRepository(connection, TENANT)
    claimed = await repository.claim(RELAY, claimed_by=claimed_by, limit=batch)
    return [job.job_id for job in claimed.jobs]


def _bare(statement: str) -> Claim:
    async def claim(connection: Connection, claimed_by: str, batch: int) -> list[UUID]:
        rows = await connection.fetch(statement, TENANT, RELAY, claimed_by, new_id(), TTL, batch)
        return [row[0] for row in rows]

    return claim


_CLAIMS: dict[str, Claim] = {
    "ours": _ours,
    "bare": _bare(statements.CLAIM),
    "bare-ids": _bare(statements.CLAIM_IDS),
}


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    claimers, batch = case.parameters["claimers"], case.parameters["batch"]
    claim = _CLAIMS[contender.name]
    dsn = sandbox.worker_dsn if contender is _OURS else sandbox.bare_dsn
    taken: list[list[UUID]] = [[] for _ in range(claimers)]
    times: list[float] = []
    left = case.jobs

    async def claimer(number: int, connection: Connection) -> None:
        nonlocal left
        mine = taken[number]
        while left > 0:
            left -= batch
            started = time.perf_counter()
            ids = await claim(connection, f"claimer-{number}", batch)
            times.append(time.perf_counter() - started)
            if not ids:
                return
            mine += ids

    async with sandbox.connections(dsn, claimers) as connections:
        # Once each, outside the clock: the statement is prepared and the function compiled.
        await asyncio.gather(*(_warm(connection, contender) for connection in connections))
        started = time.perf_counter()
        await asyncio.gather(*(claimer(number, connection) for number, connection in enumerate(connections)))
        elapsed = time.perf_counter() - started

    every = [job_id for ids in taken for job_id in ids]
    table = "relay.s2r_relay_dispatch_queue" if contender is _OURS else "bare.queue"
    [row] = await sandbox.fetch(f"select count(*) from {table} where state = 'claimed' and attempt = 1 and fence = 1")
    checks = check(case.jobs, claimed=len(every), distinct=len(set(every)), stored=row[0])
    figures = {
        "rate": len(every) / elapsed,
        "p50": percentile(times, 0.5) * 1000,
        "p99": percentile(times, 0.99) * 1000,
    }
    return Sample(figures, checks)


async def _warm(connection: Connection, contender: Contender) -> None:
    # Of a relay that has no jobs: six times, because PostgreSQL settles on a plan at the sixth.
    for _ in range(6):
        if contender is _OURS:
            await RelayDispatchRepository(connection, TENANT).claim("nobody", claimed_by="warm", limit=1)
        else:
            statement = statements.CLAIM if contender is _BARE else statements.CLAIM_IDS
            await connection.fetch(statement, TENANT, "nobody", "warm", new_id(), TTL, 1)


def _cases(quick: bool) -> Sequence[Case]:
    def case(claimers: int, batch: int, jobs: int, preload: int) -> Case:
        return Case({"claimers": claimers, "batch": batch}, jobs, preload)

    if quick:
        return [case(1, 1, 500, 10_000), case(4, 100, 10_000, 10_000)]
    # Fewer jobs where each costs a round trip: a sample need not last longer for it to be steady.
    sizes = {1: 6_000, 10: 40_000, 100: 100_000, 500: 100_000}
    return [case(claimers, batch, jobs, 100_000) for claimers in (1, 4, 16) for batch, jobs in sizes.items()]


SCENARIO = Scenario(
    name="claim",
    title="claims of one relay by concurrent claimers",
    figures=(
        Figure("rate", "claims/s", higher_is_better=True, target=0.90),
        Figure("p50", "ms", higher_is_better=False),
        Figure("p99", "ms", higher_is_better=False),
    ),
    contenders=(_OURS, _BARE, _BARE_IDS),
    cases=_cases,
    run=_run,
)
