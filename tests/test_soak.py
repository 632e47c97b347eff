"""Every kind of trouble at once: relays killed, paused, stopped, started; sessions ended; jobs withdrawn and late."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import asyncpg
import pytest

from dispatch_core.errors import DatabaseUnavailableError
from dispatch_core.models import DispatchResult, DispatchStatus
from gateway_sdk import TenantClient
from tests.conftest import Connection
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.fleet import CutAtStartError, Journal, RelayProcess, relay_process
from tests.support.gateway import open_client

SECONDS = float(os.environ.get("SOAK_SECONDS", "12"))
SETTINGS: dict[str, Any] = {
    "lease_seconds": 2.0,
    "poll_seconds": 0.5,
    "sweep_seconds": 0.5,
    "grace_seconds": 0.5,
    "concurrency": 30,
    "retry_cap_seconds": 0.2,
}


@dataclass
class Sent:
    """What is known of a job on the gateway's side."""

    max_attempts: int
    withdrawn: int | None = None
    may_be_withdrawn: bool = False
    told: DispatchResult | None = None


class Users:
    """Enqueue at random, wait for each result, and withdraw some."""

    def __init__(self, acme: TenantClient, seed: int) -> None:
        self.acme = acme
        self.chance = random.Random(seed)
        self.jobs: dict[UUID, Sent] = {}
        self.until = time.monotonic() + SECONDS
        self.at_most = self.until + 40

    @property
    def go_on(self) -> bool:
        """Whether it lasts: longer where, on a slow machine, no job has failed because of its relay yet."""
        now = time.monotonic()
        failed = (sent.told is not None and sent.told.status is DispatchStatus.FAILED for sent in self.jobs.values())
        return now < self.until or (now < self.at_most and not any(failed))

    async def run(self) -> None:
        async with anyio.create_task_group() as users:
            while self.go_on:
                users.start_soon(self._one)
                await anyio.sleep(0.01)

    async def _one(self) -> None:
        chance = self.chance
        job = Sent(chance.choice([1, 1, 2, 3]))
        job_id = await self.acme.enqueue(
            "erp",
            "Work",
            body=chance.choice(["0", "0", "0.05", "0.3", "3"]),
            max_attempts=job.max_attempts,
            ttl=chance.choice([1.0, 60.0, 60.0]),
            delay=chance.choice([None, None, None, 0.2]),
        )
        self.jobs[job_id] = job
        if chance.random() < 0.05:
            await anyio.sleep(chance.uniform(0, 0.5))
            try:
                job.withdrawn = await self.acme.mark_expired(job_id)
            except DatabaseUnavailableError:
                job.may_be_withdrawn = True  # before the session ended
        while job.told is None:
            try:
                job.told = await self.acme.wait(job_id)
            except DatabaseUnavailableError:
                pass  # a session was ended just at the job's deadline: it is asked for again, as it says


class Trouble:
    """Keep a relay process running, and do to it what happens to processes."""

    def __init__(self, database: TestDatabase, journal: Journal, seed: int) -> None:
        self.database = database
        self.journal = journal
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()

    async def run(self, users: Users) -> None:
        while users.go_on:
            try:
                async with relay_process(self.database.worker_dsn, self.journal, "erp", "acme", **SETTINGS) as relay:
                    await anyio.sleep(self.chance.uniform(0.5, 3))
                    await self._strike(relay)
            except* CutAtStartError:
                self.done["cut at its start"] += 1

    async def _strike(self, relay: RelayProcess) -> None:
        kind = self.chance.choice(["kill", "term", "pause"])
        self.done[kind] += 1
        if kind == "kill":
            relay.kill()
        elif kind == "pause":
            relay.process.send_signal(signal.SIGSTOP)
            await anyio.sleep(self.chance.uniform(1, 6))
            relay.process.send_signal(signal.SIGCONT)
            await anyio.sleep(1)


async def cut(admin: Connection, chance: random.Random, users: Users) -> None:
    """End a session of somebody now and then."""
    while users.go_on:
        await anyio.sleep(chance.uniform(0.2, 1))
        await admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid() and backend_type = 'client backend' order by random() limit 1"
        )


@pytest.mark.slow
@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@pytest.mark.invariant("I3")
async def test_every_job_ends_once_and_as_it_was_told_whatever_happens_at_once(
    database: TestDatabase, admin: Connection, tmp_path: Path
) -> None:
    """I1, I2, I3: and no handler starts more often than its sender allowed."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    journal = Journal(tmp_path / "journal")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(open_client(database.gateway_dsn, sweep_interval_seconds=1.0))
        # One of the relays lives through it all, so that everything comes to an end.
        await stack.enter_async_context(relay_process(database.worker_dsn, journal, "erp", "acme", **SETTINGS))
        users = Users(client.tenant("acme"), seed)
        troubles = [Trouble(database, journal, seed + n) for n in range(2)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(users.run)
            tasks.start_soon(cut, admin, random.Random(seed), users)
            for trouble in troubles:
                tasks.start_soon(trouble.run, users)
    print("done:", sum((trouble.done for trouble in troubles), Counter()))
    await audit(admin, users, journal)
    journal.close()


async def audit(admin: asyncpg.Connection[Any], users: Users, journal: Journal) -> None:
    async def all_ended() -> bool:
        return not await admin.fetchval("select exists (select from relay.s2r_relay_dispatch_queue)")

    await eventually(all_ended)
    rows = await admin.fetch("select * from relay.s2r_relay_dispatch_result")
    stored = {row["job_id"]: row for row in rows}
    assert stored.keys() == users.jobs.keys()
    starts = Counter(entry.job_id for entry in journal.entries("began"))
    ended = {(entry.job_id, entry.attempt) for entry in journal.entries("ended")}
    for job_id, job in users.jobs.items():
        row = stored[job_id]
        what = f"{job_id}: {dict(row)}"
        assert job.told is not None
        assert (job.told.status, job.told.error_code) == (row["status"], row["error_code"]), what
        assert job.told.attempt == row["attempt"], what
        assert starts[job_id] <= job.max_attempts, what
        assert row["attempt"] <= job.max_attempts, what
        if job.withdrawn == 1:
            assert row["status"] == "expired", what
        match DispatchStatus(row["status"]):
            case DispatchStatus.SUCCEEDED:
                assert (job_id, row["attempt"]) in ended, what
                assert row["completed_at"] < row["expires_at"], what
            case DispatchStatus.FAILED:
                assert row["error_code"] in ("S2R-LEASE-LOST", "S2R-RELAY-STOPPED"), what
                assert row["attempt"] == job.max_attempts, what
            case DispatchStatus.EXPIRED:
                withdrawn = job.withdrawn == 1 or job.may_be_withdrawn
                assert withdrawn or row["completed_at"] >= row["expires_at"], what
            case other:
                pytest.fail(f"{other} is no end")
    print(Counter((row["status"], row["error_code"], row["attempt"]) for row in rows))
    assert {row["status"] for row in rows} == {"succeeded", "failed", "expired"}
