"""How long a claim takes beside a large backlog: 1,000,000 pending and 2,000,000 finished jobs, then also 300,000 that
have expired and are still in front of the queue, then also 300,000 delayed ones.

`ours` against `small`, which is the same claim in a database that has 10,000 pending jobs and nothing else, in turns;
`bare` and `bare-small` are the same with the bare statement. One claimer, claims of 10, always from the beginning of
the queue; the first ones are not counted. The large database is built once, by INSERTs into the tables as their owner,
each step on top of the last, ours and bare alike; all rounds of a step run on it. A claim that meets expired jobs ends
them, which is counted as its latency. The bare statement knows of no deadline and takes them as they are.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import asyncpg

from benchmarks.bare import statements
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check, percentile
from benchmarks.sandbox import BODY, HEADERS, OPERATION, RELAY, TENANT, TTL, Connection, Sandbox
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.ids import new_id

__all__ = ["SCENARIO"]

_BATCH: Final = 10
_WARM: Final = 20

_SMALL_JOBS: Final = 10_000

_OURS = Contender("ours", "ours", "RelayDispatchRepository.claim beside the large backlog")
_SMALL = Contender("small", "baseline", f"the same beside {_SMALL_JOBS:,} pending jobs and nothing else")
_BARE = Contender("bare", "reference", "one SKIP LOCKED statement on the bare twin, the same rows in it")
_BARE_SMALL = Contender("bare-small", "reference", f"the same beside {_SMALL_JOBS:,} pending jobs and nothing else")


_TABLES: Final = {
    "ours": {"request": "relay.s2r_relay_dispatch_request", "queue": "relay.s2r_relay_dispatch_queue"}
    | {"result": "relay.s2r_relay_dispatch_result"},
    "bare": {"request": "bare.request", "queue": "bare.queue", "result": "bare.result"},
}

# Ids whose order is that of time, as clients make them. $1 how many, $2 seconds from now
_IDS: Final = """
with made as materialized (
  select n, now() + make_interval(secs => $2) + make_interval(secs => n / 1e4) as at,
         (lpad(to_hex((extract(epoch from now()) * 1000 + $2 * 1000 + n / 10)::bigint), 12, '0') || '7'
          || substr(md5(random()::text), 1, 3) || 'a' || substr(md5(random()::text), 1, 15))::uuid as job_id
  from generate_series(1, $1::bigint) n),
asked as (
  insert into {request} (tenant_id, job_id, relay_id, operation, request_headers, request_body, max_attempts,
                         created_at, expires_at)
  select $3, job_id, $4, $5, $6::text::jsonb, $7, 1, at, at + interval '2 days' from made)
"""
_QUEUED: Final = """
insert into {queue} (tenant_id, job_id, relay_id, seq, state, max_attempts, available_at, created_at, expires_at)
select $3, job_id, $4, (extract(epoch from at) * 1000000)::bigint + n, $8::text, 1,
       case when $8 = 'delayed' then now() + interval '1 day' end, at,
       case when $9 then now() else at + interval '2 days' end
from made
"""
_FINISHED: Final = """
insert into {result} (tenant_id, job_id, relay_id, status, attempt, fence, claimed_by, response_status,
                      response_headers, response_body, created_at, claimed_at, completed_at, expires_at)
select $3, job_id, $4, 'succeeded', 1, 1, 'somebody', 200, '{{}}', $7, at, at, at + interval '1 s',
       at + interval '2 days'
from made where $8::text is not null and $9::boolean is not null
"""

# By the case's parameter: seconds from now at which they were made, the state in the queue (none: they have a result),
# and whether their deadline is past. What has expired or is delayed was there first.
_KINDS: Final = {
    "pending": (-3_600, "ready", False),
    "finished": (-7_200, "", False),
    "expired": (-10_800, "ready", True),
    "delayed": (-14_400, "delayed", False),
}


class _Backlog:
    """What lies in the database by now, by side and kind."""

    def __init__(self) -> None:
        self._have = {side: dict.fromkeys(_KINDS, 0) for side in _TABLES}

    async def grow(self, sandbox: Sandbox, wanted: dict[str, int]) -> None:
        """Add what is missing; what claims have taken only when little more than half is left."""
        missing = [
            (side, kind, count)
            for kind, count in wanted.items()
            for side in _TABLES
            if self._have[side][kind] < 0.6 * count
        ]
        if not missing:
            return
        connection = await asyncpg.connect(sandbox.admin_dsn)
        try:
            await connection.execute("set synchronous_commit = off; set jit = off; set work_mem = '256MB'")
            for side, kind, count in missing:
                await _add(sandbox, connection, side, kind, self._have[side][kind], count)
                self._have[side][kind] = count
            sandbox.say("vacuum and checkpoint")
            await connection.execute("vacuum")
            await connection.execute("checkpoint")
        finally:
            await connection.close()

    def taken(self, side: str, kind: str, jobs: int) -> None:
        self._have[side][kind] -= jobs


async def _add(sandbox: Sandbox, connection: Connection, side: str, kind: str, have: int, wanted: int) -> None:
    at, state, is_late = _KINDS[kind]
    statement = (_IDS + (_QUEUED if state else _FINISHED)).format(**_TABLES[side])
    while have < wanted:
        count = min(200_000, wanted - have)
        sandbox.say(f"{kind} jobs, {side}: {have:,} of {wanted:,}")
        await connection.execute(
            statement, count, at + have / 1e4, TENANT, RELAY, OPERATION, HEADERS, BODY, state, is_late, timeout=300
        )
        have += count


@asynccontextmanager
async def _backlog() -> AsyncIterator[_Backlog]:
    yield _Backlog()


async def _ours(connection: Connection) -> tuple[list[UUID], int]:
    found = await RelayDispatchRepository(connection, TENANT).claim(RELAY, claimed_by="claimer", limit=_BATCH)
    return [job.job_id for job in found.jobs], len(found.expired)


async def _bare(connection: Connection) -> tuple[list[UUID], int]:
    rows = await connection.fetch(statements.CLAIM, TENANT, RELAY, "claimer", new_id(), TTL, _BATCH)
    return [row[0] for row in rows], 0


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    wanted = dict(case.parameters)
    if contender in (_SMALL, _BARE_SMALL):
        sandbox = await sandbox.keep("small", sandbox.another)
        wanted = {"pending": _SMALL_JOBS}
    backlog = await sandbox.keep("backlog", _backlog)
    await backlog.grow(sandbox, wanted)
    ours = contender in (_OURS, _SMALL)
    claim = _ours if ours else _bare
    before = await _counts(sandbox, ours)
    times: list[float] = []
    ids: list[UUID] = []
    ended = 0
    async with sandbox.connections(sandbox.worker_dsn if ours else sandbox.bare_dsn, 1) as [connection]:
        for _ in range(case.jobs + _WARM):
            started = time.perf_counter()
            taken, late = await claim(connection)
            times.append((time.perf_counter() - started) * 1000)
            ids += taken
            ended += late
    after = await _counts(sandbox, ours)
    checks = check(
        len(times) * _BATCH,
        looked_at=len(ids) + ended,
        distinct=len(set(ids)) + ended,
        stored=after["claimed"] - before["claimed"] + after["expired"] - before["expired"],
        gone_from_ready=before["ready"] - after["ready"],
    )
    side = "ours" if ours else "bare"
    backlog.taken(side, "pending", len(ids))
    backlog.taken(side, "expired", ended)
    times = times[_WARM:]
    figures = {"p95": percentile(times, 0.95), "p50": percentile(times, 0.5)}
    return Sample(figures, checks, {"p99_ms": percentile(times, 0.99), "ended": ended})


async def _counts(sandbox: Sandbox, ours: bool) -> dict[str, Any]:
    tables = _TABLES["ours" if ours else "bare"]
    [row] = await sandbox.fetch(
        f"select count(*) filter (where state = 'claimed' and attempt = 1 and fence = 1) as claimed,"
        f" count(*) filter (where state = 'ready') as ready,"
        f" (select count(*) from {tables['result']} where status = 'expired') as expired from {tables['queue']}"
    )
    return dict(row)


def _cases(quick: bool) -> Sequence[Case]:
    size, claims = (50, 50) if quick else (1, 400)
    large = {"pending": 1_000_000 // size, "finished": 2_000_000 // size}
    more = 300_000 // size
    return [
        Case(large, claims),
        Case({**large, "expired": more}, claims),
        Case({**large, "expired": more, "delayed": more}, claims),
    ]


SCENARIO = Scenario(
    name="backlog",
    title="latency of a claim of 10 beside a large backlog",
    figures=(Figure("p95", "ms", higher_is_better=False, target=1.3), Figure("p50", "ms", higher_is_better=False)),
    contenders=(_OURS, _SMALL, _BARE, _BARE_SMALL),
    cases=_cases,
    run=_run,
    shared=True,
)
