"""All verbs of the durable room by many sessions at once: in any order there is no deadlock, and nothing is lost."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import anyio
import asyncpg
import pytest

from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK, JOB, Lease
from tests.support.protocol import TENANT, Connection, connected

pytestmark = [pytest.mark.kind("lock order"), pytest.mark.invariant("I3"), pytest.mark.case("C15")]

CHUNKS = 12
EXPECTED = {"S2041": "a lease that is lost", "S2042": "a job that takes no chunks any more"}


class _Storm:
    """What all sessions share."""

    def __init__(self, seed: int, until: float) -> None:
        self.seed = seed
        self.until = until
        self.jobs: list[UUID] = []
        self.leases: list[Lease] = []
        self.calls: Counter[str] = Counter()
        self.errors: list[str] = []

    async def call(self, name: str, verb: Awaitable[Any]) -> Any:
        self.calls[name] += 1
        try:
            return await verb
        except asyncpg.PostgresError as error:
            if error.sqlstate not in EXPECTED:
                self.errors.append(f"{name}: {error!r}")
            return None

    async def play(self, number: int, dsn: str, verbs: Callable[[random.Random, Connection], dict[str, Any]]) -> None:
        """Do one verb after the other, drawn at random."""
        chance = random.Random(f"{self.seed} {number}")
        async with connected(dsn) as conn:
            ways = verbs(chance, conn)
            while time.monotonic() < self.until:
                name = chance.choice(list(ways))
                await self.call(name, ways[name]())

    # --- who does what ---

    def holder(self, chance: random.Random, conn: Connection) -> dict[str, Any]:
        def some(most: int = 4) -> list[Lease]:
            """Draw leases, of this session and of others, the good ones mostly, in no order."""
            recent = self.leases[-40:]
            return chance.sample(recent, min(len(recent), chance.randint(1, most)))

        async def claim() -> None:
            # Most run out at once, so that the reaper has something to do.
            lease = chance.choice([0.001, 0.05, 5.0])
            self.leases += await durable.claim(conn, chance.randint(1, 6), lease=lease, by=f"r:{chance.random()}")

        async def claim_next() -> None:
            self.leases += await durable.claim_next(
                conn, chance.choice(self.jobs), 2, lease=chance.choice([0.001, 5.0])
            )

        async def claim_chunk() -> None:
            found = await conn.fetch("select * from relay.durable_candidates($1, $2, 10)", TENANT, [durable.KIND])
            if found:
                one = chance.choice(found)
                lease = await durable.claim_chunk(conn, one["job_id"], one["seq"], one["lease_version"], lease=5)
                self.leases += [lease] if lease else []

        async def in_a_transaction() -> None:
            for lease in some(1):
                async with conn.transaction():
                    await durable.checkpoint(conn, lease, {"at": 1}, rows_done=1, renew=5)
                    await durable.tell_errors(conn, lease, [{"row": 1, "code": "c", "message": "m"}])
                    await durable.heartbeat(conn, *some())
                    if chance.random() < 0.5:
                        await durable.complete(conn, lease, rows_done=1)

        async def complete() -> None:
            for lease in some(2):
                await durable.complete(conn, lease, rows_done=1)

        async def fail() -> None:
            for lease in some(2):
                await durable.fail(conn, lease, retryable=chance.random() < 0.7, delay=chance.choice([None, 0.01]))

        async def finish() -> None:
            await durable.finish(conn, *chance.sample(self.jobs, 3))

        async def one_by_one() -> None:
            await conn.fetch("select * from relay.durable_candidates($1, $2, 10)", TENANT, [durable.KIND])

        return {
            "claim": claim,
            "claim_next": claim_next,
            "claim_chunk": claim_chunk,
            "heartbeat": lambda: durable.heartbeat(conn, *some(), lease=chance.choice([0.001, 5])),
            "in a transaction": in_a_transaction,
            "complete": complete,
            "complete_many": lambda: durable.complete_many(conn, *some()),
            "fail": fail,
            "release": lambda: durable.release(conn, *some()),
            "finish": finish,
            "candidates": one_by_one,
        }

    def person(self, chance: random.Random, conn: Connection) -> dict[str, Any]:
        def control() -> Awaitable[Any]:
            actions = ["pause", "resume", "resume", "resume", "retry_failed", "cancel"]
            return durable.control(conn, chance.choice(self.jobs), chance.choice(actions))

        def resolve() -> Awaitable[Any]:
            decision = chance.choice(["retry", "done", "failed"])
            return durable.resolve(conn, chance.choice(self.jobs), chance.randint(1, CHUNKS), decision)

        def set_chunks() -> Awaitable[Any]:
            seqs = [chance.randint(1, CHUNKS) for _ in range(3)]
            return conn.fetchval(
                "select relay.durable_set_chunk_statuses($1, $2, '{running,failed}', 'retry', '{}', $3)",
                TENANT, chance.choice(self.jobs), seqs,
            )  # fmt: skip

        def set_job() -> Awaitable[Any]:
            return conn.fetchval(
                "select relay.durable_set_job_status($1, $2, $3::text[], $4, $5, '{\"type\": \"note\"}')",
                TENANT, chance.choice(self.jobs), ["queued", "running", "paused"], chance.choice(["running", "paused"]),
                json.dumps({"priority": chance.randint(0, 3)}),
            )  # fmt: skip

        async def submit() -> None:
            if chance.random() < 0.3:
                self.jobs.append(await _job(conn, chance))

        def add() -> Awaitable[Any]:
            start = chance.randint(1, CHUNKS + 1)
            return conn.fetchval(
                "select relay.durable_insert_chunks($1, $2, $3, $4)",
                TENANT, chance.choice(self.jobs), '[{"payload": 1, "rows": 1}]', start,
            )  # fmt: skip

        return {
            "control": control,
            "resolve": resolve,
            "set_chunk_statuses": set_chunks,
            "set_job_status": set_job,
            "update_job": lambda: conn.fetchval(
                "select relay.durable_update_job($1, $2, '{\"max_attempts\": 1000}')", TENANT, chance.choice(self.jobs)
            ),
            "submit": submit,
            "insert_chunks": add,
            "refresh_counters": lambda: conn.fetch(
                "select * from relay.durable_refresh_counters($1, $2)", TENANT, chance.choice(self.jobs)
            ),
            "reap": lambda: durable.reap(conn, 5),
            "finish_lost": lambda: conn.fetch("select * from relay.durable_finish_lost($1, 5)", TENANT),
            "record_event": lambda: conn.fetchval(
                "select relay.durable_record_event($1, $2, null, 'note', null, null, null, null)",
                TENANT, chance.choice(self.jobs),
            ),
            "events": lambda: durable.events(conn, chance.choice(self.jobs), limit=5),
            "jobs": lambda: durable.job(conn, chance.choice(self.jobs)),
            "retire": lambda: conn.fetchval("select relay.durable_retire($1, '1 day', '1 day', 5)", TENANT),
        }  # fmt: skip


async def _job(gateway: Connection, chance: random.Random) -> UUID:
    return await durable.submit(
        gateway, CHUNKS, rows=1, max_attempts=1000, idempotent=chance.random() < 0.6, priority=chance.randint(0, 2),
        job_id=uuid4(),
    )  # fmt: skip


@pytest.mark.timeout(300)
async def test_all_verbs_by_many_sessions_at_once_never_deadlock_and_every_job_can_be_brought_to_its_end(
    database: TestDatabase, admin: Connection, gateway: Connection, is_long: bool, seed: int
) -> None:
    """Two seconds, 60 with --long; a session whose wait is a deadlock is told so after 50 ms."""
    await admin.execute(f"alter database \"{database.name}\" set deadlock_timeout = '50ms'")
    storm = _Storm(seed, time.monotonic() + (60 if is_long else 2))
    chance = random.Random(seed)
    storm.jobs = [await _job(gateway, chance) for _ in range(6)]
    async with anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(storm.play, number, database.worker_dsn, storm.holder)
        for number in range(5, 8):
            group.start_soon(storm.play, number, database.gateway_dsn, storm.person)
    print(f"{storm.calls.total()} calls, {len(storm.jobs)} jobs: {dict(storm.calls)}")
    assert storm.errors == []
    await admin.execute("select pg_stat_clear_snapshot()")
    query = "select deadlocks from pg_stat_database where datname = current_database()"
    assert await admin.fetchval(query) == 0

    async with connected(database.worker_dsn) as conn:
        while True:
            await durable.run_out(admin)
            await admin.execute(f"update {CHUNK} set available_at = now() where available_at is not null")
            await durable.reap(conn, 10_000)
            for job_id in storm.jobs:
                await durable.control(gateway, job_id, "resume")
            for row in await admin.fetch(f"select job_id, seq from {CHUNK} where status = 'needs_review'"):
                await durable.resolve(gateway, row["job_id"], row["seq"], "retry")
            leases = await durable.claim(conn, 10_000)
            if not leases:
                break
            await durable.complete_many(conn, *leases)
        await durable.finish(conn, *storm.jobs)
    ends = Counter(row["status"] for row in await admin.fetch(f"select status from {JOB}"))
    assert set(ends) <= {"completed", "completed_with_errors", "failed", "cancelled"}
    # What was set by hand stays so, and what waited for a person when its job was cancelled.
    query = f"""
        select j.status as job, c.status as chunk from {CHUNK} c join {JOB} j using (tenant_id, job_id)
        where c.status in ('running', 'pending') or c.status = 'needs_review' and j.status <> 'cancelled'
    """
    assert await admin.fetch(query) == []
    # A chunk that was set to retry by hand in a job that had ended: nobody counts that but who asks for it.
    late = {row["job_id"] for row in await admin.fetch(f"select job_id from {CHUNK} where status = 'retry'")}
    for job_id in storm.jobs:
        if job_id in late:
            await gateway.fetch("select * from relay.durable_refresh_counters($1, $2)", TENANT, job_id)
        else:
            await durable.finish(gateway, job_id)
        assert await durable.counters_are_exact(admin, job_id)
