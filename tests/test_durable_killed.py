"""SIGKILL of relays at random, again and again: rows that handlers write under the fence are there exactly once.

So they are where a relay was stopped until its leases were over and then goes on, and where its sessions are cut.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from functools import partial
from uuid import UUID

import anyio
import pytest

from dispatch_core.dev.logins import WORKER_LOGIN
from dispatch_core.durable import ChunkSpec, ChunkStatus, DurableRepository
from dispatch_core.ids import new_id
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.durable import EVENT
from tests.support.durable_process import BAD_EVERY, DURABLE, TARGET, Nursery, draw, nursery
from tests.support.eventually import eventually
from tests.support.protocol import TENANT, Connection

ROWS = 40
"""Of a chunk."""
CHUNKS = 60
"""Of a job."""


async def _submit(people: DurableRepository, chance: random.Random, *, idempotent: bool) -> UUID:
    job_id = new_id()
    specs = [
        ChunkSpec(
            {
                "first": 1 + n * ROWS,
                "count": ROWS,
                "batch": chance.choice([3, 10, 40]),
                "inside": chance.random() < 0.5,
            },
            rows=ROWS,
        )
        for n in range(CHUNKS)
    ]
    await people.insert_job(TENANT, job_id, "copy", idempotent=idempotent, max_attempts=1000, submitting=True)
    await people.insert_chunks(TENANT, job_id, specs, from_seq=1)
    await people.seal(TENANT, job_id, chunks=CHUNKS)
    return job_id


class _Play:
    """Jobs, two relays that are killed, and one whom nobody kills and who only sweeps."""

    def __init__(self, relays: Nursery, admin: Connection, people: DurableRepository, seed: int) -> None:
        self.relays = relays
        self.admin = admin
        self.people = people
        self.chance = random.Random(seed)
        self.jobs: list[UUID] = []
        self.deaths: Counter[str] = Counter()
        self.trouble: Counter[str] = Counter()
        self.orders: dict[int, str] = {}

    async def kill(self, rounds: int) -> None:
        """Start and kill relays until so many have died."""
        chance = self.chance
        await self.relays.fork(relay={"chunk_concurrency": 1})  # the sweeper: it lives
        while self.deaths.total() < rounds:
            if len(self.jobs) < 2 or await self._has_ended(self.jobs[-2]):
                self.jobs.append(await _submit(self.people, chance, idempotent=len(self.jobs) % 2 == 0))
            while len(self.relays.alive) < 3:
                order = draw(chance) | {"durable": {"skip_locked_claims": chance.random() < 0.7}}
                self.orders[await self.relays.fork(**order)] = order.get("step", "by the clock")
            victim = self.relays.alive[chance.randint(1, 2)]
            how = self.orders[victim]
            if chance.random() < 0.2:
                await self._cut_a_session()
            if self.deaths.total() % 20 == 10:
                await self._stall(victim)
            if how == "by the clock":
                await anyio.sleep(chance.uniform(0.0, 0.25))
            else:
                # Until it has come to the step, or there is no work that leads there.
                with anyio.move_on_after(1):
                    await eventually(partial(self.relays.has_died, victim), interval=0.005)
            self.deaths[how if not self.relays.kill(victim) else "by the clock"] += 1

    async def _cut_a_session(self) -> None:
        """End a session of a relay's, whatever is under way on it: a commit, perhaps, whose reply is lost then."""
        self.trouble["session cut"] += 1
        await self.admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
            " and usename = $1 order by random() limit 1",
            WORKER_LOGIN,
        )

    async def _stall(self, pid: int) -> None:
        """Stop a process for longer than its leases are; what it says afterwards is refused."""
        self.trouble["stalled"] += 1
        if not self.relays.has_died(pid):
            os.kill(pid, signal.SIGSTOP)
            await anyio.sleep(1.3 * DURABLE["lease_seconds"])
            os.kill(pid, signal.SIGCONT)

    async def _has_ended(self, job_id: UUID) -> bool:
        (job,) = await self.people.jobs(TENANT, [job_id])
        return job.status.is_terminal or job.status == "needs_review"

    async def end(self) -> None:
        """Have two relays do the rest in peace; a person sends back what does not run again by itself."""
        for _ in range(2):
            await self.relays.fork()

        async def all_done() -> bool:
            for job_id in self.jobs:
                for chunk in await self.people.chunks(TENANT, job_id, status="needs_review"):
                    await self.people.resolve(TENANT, job_id, chunk.seq, "retry", actor="bob")
            # An attempt whose session was cut has failed, for good where its chunk may not run twice by itself.
            for job in await self.people.jobs(TENANT, self.jobs):
                if job.status.is_terminal and job.chunks[ChunkStatus.FAILED]:
                    await self.people.control(TENANT, job.job_id, "retry_failed", actor="bob")
            return all(job.status.is_terminal for job in await self.people.jobs(TENANT, self.jobs))

        await eventually(all_done, 60, 0.1)


@pytest.mark.invariant("I3")
@pytest.mark.invariant("J2")
@pytest.mark.case("C15")
@pytest.mark.case("C18")
@pytest.mark.timeout(900)
async def test_rows_of_handlers_are_there_exactly_once_however_often_their_relays_are_killed(
    database: TestDatabase, admin: Connection, gateway: Connection, is_long: bool, seed: int
) -> None:
    """25 deaths, 200 with --long; some at a step of the handler, some by the clock, wherever the relay is then."""
    rounds = 200 if is_long else 25
    await admin.execute(TARGET)
    began = time.monotonic()
    async with nursery(database.worker_dsn) as relays:
        play = _Play(relays, admin, DurableRepository(gateway), seed)
        await play.kill(rounds)
        await play.end()
    seconds = time.monotonic() - began

    jobs, people = play.jobs, play.people
    rows = range(1, 1 + CHUNKS * ROWS)
    good = [row for row in rows if row % BAD_EVERY]
    bad = [row for row in rows if row % BAD_EVERY == 0]
    for job_id in jobs:
        there = [
            r[0] for r in await admin.fetch("select row_no from public.target where job_id = $1 order by 1", job_id)
        ]
        assert there == good, "no row twice, none missing"
        errors = await people.row_errors(TENANT, job_id, limit=10_000)
        assert sorted(error.row for error in errors) == bad
        (job,) = await people.jobs(TENANT, [job_id])
        assert job.status == "completed_with_errors"
        assert (job.rows_total, job.rows_done, job.rows_failed) == (len(rows), len(good), len(bad))
        assert (job.chunks_total, job.chunks[ChunkStatus.DONE]) == (CHUNKS, CHUNKS)
        chunks = await people.chunks(TENANT, job_id)
        assert [chunk.status for chunk in chunks] == ["done"] * CHUNKS
        assert sum(chunk.rows_done for chunk in chunks) == len(good)
        assert await durable.counters_are_exact(admin, job_id)
        told_of = Counter(await durable.told(gateway, job_id))
        assert told_of["completed"] + told_of["failed"] == 1 + told_of["retried"]
    told = Counter(r[0] for r in await admin.fetch(f"select type from {EVENT}"))
    print(
        f"{rounds} deaths {dict(play.deaths)}, {dict(play.trouble)}, {len(jobs)} jobs, {len(jobs) * len(rows)} rows, "
        f"{told['chunk_reaped']} chunks reaped, {told['resolved']} resolved, {told['retried']} retried, {seconds:.1f} s"
    )
    assert told["chunk_reaped"] > 0
