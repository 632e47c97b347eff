"""Ten times what a relay can do comes in: memory and connections stay as they are, deadlines hold, nothing is lost.

The relay's rate is known: so many handlers at once, each of one second. With a bound on what waits (`max_pending`) the
rest is refused at once and the relay goes on doing what it can. Without one all of it is stored, and nearly all of it
expires: claims go by age (I5), so a relay is always at work on jobs whose time is nearly up.

`--long` plays the first one for five minutes; `make test-faults ARGS='-k overload --long -s'` shows the numbers.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from dispatch_core.dev.logins import GATEWAY_LOGIN, WORKER_LOGIN
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.fleet import Journal, relay_process
from tests.support.overload import Call, Plan, Users, users
from tests.support.protocol import QUEUE, REQUEST, RESULT

pytestmark = [pytest.mark.invariant("I1"), pytest.mark.invariant("I2"), pytest.mark.invariant("I6")]

SLOTS = 50
RATE = 50.0
"""What the relay can do in a second: each job takes one."""
TIMES = 10
POOL = 4
RELAY_POOL = 10
"""Of a relay process, where nothing else is said."""

# A call ends at its deadline, or by the grace in which the database is asked how the job ended.
BEYOND_DEADLINE_SECONDS = 1.0 + 3.0
WELL_SECONDS = 3.0
RESIDENT_MIB = 24.0

SESSIONS = """
    select usename, count(*) from pg_stat_activity
    where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid() group by 1"""


@dataclass
class Seen:
    """What was sampled while it went on: times are of the monotonic clock."""

    resident: list[tuple[float, float]] = field(default_factory=list)
    sessions: Counter[str] = field(default_factory=Counter)
    backlog: list[tuple[float, int]] = field(default_factory=list)

    def resident_between(self, begin: float, end: float) -> list[float]:
        return [mib for at, mib in self.resident if begin <= at < end and mib]


@dataclass
class Played:
    """An overload that has come to its end."""

    plan: Plan
    began_at: float
    calls: list[Call]
    seen: Seen
    rows: dict[Any, asyncpg.Record]
    journal: Journal
    wall_ahead: float
    """The wall clock less the monotonic one."""

    def of(self, *, calm: bool) -> list[Call]:
        return [call for call in self.calls if call.is_calm == calm]

    @property
    def over_at(self) -> float:
        """When the last call of the overload was made."""
        return max(call.made_at for call in self.of(calm=False))

    def goodput(self) -> float:
        """Calls that ended well, each second of the overload but the first two, in which the relay's slots fill."""
        begin, end = self.began_at + 2, self.over_at
        return sum(call.how == "succeeded" and begin <= call.ended_at < end for call in self.calls) / (end - begin)


@asynccontextmanager
async def sampling(database: TestDatabase, played: Users, seen: Seen) -> AsyncIterator[None]:
    async def sample() -> None:
        admin = await asyncpg.connect(database.admin_dsn)
        try:
            while True:
                for row in await admin.fetch(SESSIONS):
                    seen.sessions[row[0]] = max(seen.sessions[row[0]], row[1])
                waiting = await admin.fetchval(f"select count(*) from {QUEUE} where state <> 'claimed'")
                seen.backlog.append((time.monotonic(), waiting))
                seen.resident.append((time.monotonic(), played.resident_mib()))
                await anyio.sleep(0.25)
        finally:
            admin.terminate()

    async with anyio.create_task_group() as group:
        group.start_soon(sample)
        yield
        group.cancel_scope.cancel()


async def overload(
    database: TestDatabase, tmp_path: Path, *, seconds: float, timeout: float, max_pending: int
) -> Played:
    plan = Plan("acme", "erp", "1.0", timeout, TIMES * RATE, seconds, RATE / 2, 10.0)
    journal = Journal(tmp_path / "journal")
    seen = Seen()
    async with (
        relay_process(database.worker_dsn, journal, "erp", "acme", concurrency=SLOTS),
        users(
            database.gateway_dsn,
            tmp_path / "calls",
            plan,
            GATEWAY_MAX_PENDING=max_pending,
            RELAY_DISPATCH_POOL_MAX_SIZE=POOL,
        ) as played,
    ):
        async with sampling(database, played, seen):
            await played.end(plan.seconds + plan.calm_seconds + timeout + 30)
        calls = sorted(played.calls(), key=lambda call: call.made_at)
        admin = await asyncpg.connect(database.admin_dsn)
        try:

            async def all_ended() -> bool:
                return not await admin.fetchval(f"select exists (select from {QUEUE})")

            await eventually(all_ended, timeout + 20, 0.1, message="the end of every job")
            rows = await admin.fetch(
                f"""select q.job_id, r.status, q.expires_at
                    from {REQUEST} q left join {RESULT} r using (tenant_id, job_id)"""
            )
        finally:
            admin.terminate()
    by_id = {row["job_id"]: row for row in rows}
    return Played(plan, calls[0].made_at, calls, seen, by_id, journal, time.time() - time.monotonic())


def audit(played: Played) -> None:
    """What holds with a bound and without."""
    calls = played.calls
    hows = Counter(call.how for call in calls)
    # A call's timeout is its job's deadline too, and may be the first to end.
    assert set(hows) <= {"succeeded", "expired", "S2R-WAIT-TIMEOUT", "S2R-BACKLOG-FULL"}, hows

    # Nothing lost, nothing twice, nothing that nobody knows of: what is stored is what was accepted.
    told = [call.job_id for call in calls if call.job_id is not None]
    assert len(told) == len(set(told))
    assert played.rows.keys() == set(told), "stored and refused, or accepted and lost"
    for call in calls:
        if call.job_id is not None and call.how != "S2R-WAIT-TIMEOUT":
            assert played.rows[call.job_id]["status"] == call.how
    assert {row["status"] for row in played.rows.values()} <= {"succeeded", "expired"}
    starts = Counter(entry.job_id for entry in played.journal.entries("began"))
    assert max(starts.values()) == 1, "started twice with one attempt"
    done = {entry.job_id for entry in played.journal.entries("ended")}
    assert {call.job_id for call in calls if call.how == "succeeded"} <= done

    # Deadlines: a call ends by its own, and no handler starts past its job's.
    latest = max(calls, key=lambda call: call.took)
    assert latest.took <= played.plan.timeout + BEYOND_DEADLINE_SECONDS
    for entry in played.journal.entries("began"):
        late = entry.at + played.wall_ahead - played.rows[entry.job_id]["expires_at"].timestamp()
        assert late <= 0.02, f"started {late:.3f} s past its deadline"

    # Connections: the pool and one to listen, of each process.
    assert played.seen.sessions[GATEWAY_LOGIN] <= POOL + 1
    assert played.seen.sessions[WORKER_LOGIN] <= RELAY_POOL + 1
    early, late_part = resident(played)
    assert late_part <= early + RESIDENT_MIB


def resident(played: Played) -> tuple[float, float]:
    """Return the gateway's memory in MiB, medians: in the second fifth of the overload, and in its last."""
    begin, fifth = played.began_at, (played.over_at - played.began_at) / 5
    early = played.seen.resident_between(begin + fifth, begin + 2 * fifth)
    late = played.seen.resident_between(begin + 4 * fifth, begin + 5 * fifth)
    return statistics.median(early), statistics.median(late)


def recovered_after(played: Played) -> float:
    """Return how long after the overload's end the last call was made that was not answered as in good times."""
    bad = [call.made_at for call in played.of(calm=True) if call.how != "succeeded" or call.took > WELL_SECONDS]
    return max(bad, default=played.over_at) - played.over_at


def show(name: str, played: Played) -> None:
    plan, calls = played.plan, played.of(calm=False)
    took = sorted(call.took for call in calls if call.how == "succeeded")
    refused = sorted(call.took for call in calls if call.how == "S2R-BACKLOG-FULL")
    again = sorted(call.retry_after for call in calls if call.how == "S2R-BACKLOG-FULL")
    early, late = resident(played)
    for line in (
        f"{name}: {plan.seconds:.0f} s of {plan.rate:.0f} calls/s, {dict(Counter(call.how for call in calls))}",
        f"goodput {played.goodput():.1f}/s of {RATE:.0f}; took {_at(took, 0.5):.2f} s, 99 % {_at(took, 0.99):.2f} s",
        f"refused in {_at(refused, 0.5) * 1000:.2f} ms, 99 % {_at(refused, 0.99) * 1000:.1f} ms",
        f"retry after {_at(again, 0.5):.2f} s, {_at(again, 0.0):.2f} to {_at(again, 1.0):.2f} s",
        f"slowest call {max(call.took for call in played.calls):.2f} s, its timeout {plan.timeout:.0f} s",
        f"waiting {max(waiting for _, waiting in played.seen.backlog)}; sessions {dict(played.seen.sessions)}",
        f"memory {early:.1f} MiB early, {late:.1f} late, {max(mib for _, mib in played.seen.resident):.1f} at most",
        f"well again {recovered_after(played):.1f} s after its end",
    ):
        print(" ", line)


def _at(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


@pytest.mark.timeout(600)
async def test_with_a_bound_the_relay_goes_on_doing_what_it_can_and_the_rest_is_told_at_once(
    durable_database: TestDatabase, tmp_path: Path, is_long: bool
) -> None:
    bound = 100
    played = await overload(
        durable_database, tmp_path, seconds=300.0 if is_long else 20.0, timeout=10.0, max_pending=bound
    )
    show("with a bound", played)
    audit(played)
    assert played.goodput() >= 0.7 * RATE
    calls = played.of(calm=False)
    refused = [call for call in calls if call.how == "S2R-BACKLOG-FULL"]
    assert len(refused) >= 0.7 * len(calls)
    assert all(0.1 <= call.retry_after <= 60 for call in refused)
    # Nobody waits longer than for what may be before him, and so nothing expires.
    assert {call.how for call in played.calls} == {"succeeded", "S2R-BACKLOG-FULL"}
    # One gateway: the bound itself, and what was under way at the moment of a count.
    assert max(waiting for _at, waiting in played.seen.backlog) <= bound + 50
    assert recovered_after(played) <= bound / RATE + 4.0


async def test_without_a_bound_what_expires_starts_no_handler_and_once_it_is_over_everything_is_well_again(
    durable_database: TestDatabase, tmp_path: Path
) -> None:
    played = await overload(durable_database, tmp_path, seconds=15.0, timeout=4.0, max_pending=0)
    show("without a bound", played)
    audit(played)
    assert recovered_after(played) <= played.plan.timeout + 4.0
