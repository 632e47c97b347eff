"""Heartbeats of 1,000 live chunks, all in one round trip, one after another.

Ours: `DurableRepository.heartbeat`. The bare side renews the same rows of a twin of the table by one UPDATE with arrays
of keys, tokens and versions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from benchmarks.bare.durable import HEARTBEAT, LEASE, TABLES, fill_running
from benchmarks.model import Case, CheckFailedError, Contender, Figure, Sample, Scenario, check, percentile
from benchmarks.sandbox import TENANT, Sandbox
from dispatch_core.durable_models import JobLease
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.ids import new_id
from dispatch_core.models import WriteOutcome

__all__ = ["SCENARIO"]

_CHUNKS: Final = 1000
_WARM: Final = 5

_OURS = Contender("ours", "ours", "DurableRepository.heartbeat of all of them")
_BARE = Contender("bare", "baseline", "one UPDATE of the twin's rows by arrays of keys, tokens and versions")


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    ours = contender is _OURS
    side = "ours" if ours else "bare"
    chunks, token = case.parameters["chunks"], new_id()
    job_id = await fill_running(sandbox, side, chunks, token=token, lease=timedelta(minutes=10))
    seqs = list(range(1, chunks + 1))
    times: list[float] = []
    async with sandbox.connections(sandbox.worker_dsn if ours else sandbox.bare_dsn, 1) as [connection]:
        repository = DurableRepository(connection)
        until = datetime.now(UTC) + timedelta(minutes=10)
        leases = [JobLease(TENANT, job_id, seq, token, 1, "gone", until, 0.0) for seq in seqs]
        for _ in range(case.jobs + _WARM):
            started = time.perf_counter()
            if ours:
                answers = await repository.heartbeat(leases, lease_seconds=LEASE.total_seconds())
                renewed = sum(answer.outcome is WriteOutcome.APPLIED for answer in answers)
            else:
                rows = await connection.fetch(
                    HEARTBEAT, TENANT, [job_id] * chunks, seqs, [token] * chunks, [1] * chunks, LEASE
                )
                renewed = len(rows)
            times.append((time.perf_counter() - started) * 1000)
            if renewed != chunks:
                raise CheckFailedError(f"{renewed} of {chunks} leases were renewed")
    [row] = await sandbox.fetch(
        f"select count(*) from {TABLES[side]} where status = 'running' and lease_version = 1"
        f" and lease_expires_at > now() + interval '30 min'"
    )
    checks = check(chunks, renewed=row[0])
    times = times[_WARM:]
    return Sample({"p50": percentile(times, 0.5), "p99": percentile(times, 0.99)}, checks)


def _cases(quick: bool) -> Sequence[Case]:
    return [Case({"chunks": 100 if quick else _CHUNKS}, 20 if quick else 200)]


SCENARIO = Scenario(
    name="durable-heartbeat",
    title="leases of 1,000 live chunks renewed in one round trip",
    figures=(
        Figure("p50", "ms", higher_is_better=False, target=2.0),
        Figure("p99", "ms", higher_is_better=False),
    ),
    contenders=(_OURS, _BARE),
    cases=_cases,
    run=_run,
)
