"""SIGKILL at every step of a drain: nothing is lost, and what was not settled is delivered again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from dispatch_core.outbox_models import ClaimedEvent
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.cli import environment
from tests.support.databases import TestDatabase
from tests.support.outbox import Recorder, make_stale, outbox, take_all, tell, tidy, write
from tests.support.outbox_process import STEPS
from tests.support.protocol import OUTBOX, Connection, connected

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.invariant("O1")
@pytest.mark.case("C21")
async def test_whatever_step_it_is_killed_at_every_event_is_delivered_at_least_once_and_none_is_left(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """A process and a tenant for each step, all at once."""
    await admin.execute(
        "create table public.deliveries (tenant text, payload text); grant all on public.deliveries to public"
    )
    for step in STEPS:
        await write(gateway, "one", "two", tenant=step)

    async def run(step: str) -> None:
        done = await anyio.run_process(
            [sys.executable, "-m", "tests.support.outbox_process", database.gateway_dsn, step, step],
            cwd=ROOT, env=environment(), check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()

    async with anyio.create_task_group() as group:
        for step in STEPS:
            group.start_soon(run, step)

    async def delivered() -> dict[str, Counter[str]]:
        rows = await admin.fetch("select tenant, payload from public.deliveries")
        return {step: Counter(row["payload"] for row in rows if row["tenant"] == step) for step in STEPS}

    before = await delivered()
    left = await admin.fetch(f"select tenant_id, state, attempts from {OUTBOX}")
    assert {row["tenant_id"] for row in left} == set(STEPS) - {"after settle"}
    assert {row["tenant_id"] for row in left if row["state"] == "claimed"} == set(STEPS) - {
        "after settle",
        "before claim",
    }

    await make_stale(admin)
    again = Recorder()
    async with outbox(database, again) as drainer:
        while (await drainer.drain()).claimed:
            pass
    after = Counter((event.tenant_id, event.payload) for event in again.events)
    assert await admin.fetchval(f"select count(*) from {OUTBOX}") == 0
    for step in STEPS:
        for payload in ("one", "two"):
            assert before[step][payload] + after[step, payload] >= 1, (step, payload)
            if step in ("before claim", "after claim", "after settle"):
                assert before[step][payload] + after[step, payload] == 1, (step, payload)
    assert {event.attempts for event in again.events if event.tenant_id != "before claim"} == {1}


async def _deadlocks(admin: Connection) -> int:
    await admin.execute("select pg_stat_clear_snapshot()")
    count: int = await admin.fetchval("select deadlocks from pg_stat_database where datname = current_database()")
    return count


@pytest.mark.kind("lock order")
async def test_every_mix_of_verbs_over_the_same_events_in_any_order_never_deadlocks(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """Drainers, people and writers at once; an error of any kind fails."""
    rng = random.Random(3)
    tenants = ["a", "b"]
    ids = {
        tenant: [i for key in (None, "k", "l") for i in await write(gateway, *range(12), tenant=tenant, key=key)]
        for tenant in tenants
    }
    before = await _deadlocks(admin)

    async def somebody(conn: Connection, number: int) -> None:
        verbs = OutboxRepository(conn)
        held: list[ClaimedEvent] = []
        for turn in range(40):
            tenant = rng.choice(tenants)
            some = rng.sample(ids[tenant], 10)
            by = f"{number}"
            match rng.randrange(7):
                case 0 | 1:
                    groups = [(tenant, "order-placed") for tenant in rng.sample(tenants, 2)]
                    held += (await take_all(conn, groups, 10, by=by)).events
                case 2 | 3:
                    rng.shuffle(held)
                    await tell(conn, held, rng.choice(("failed", "release", "park")), delay=0, by=by)
                    held.clear()
                case 4:
                    await verbs.park(tenant, some, "why")
                case 5:
                    await verbs.retry(tenant, some)
                case 6:
                    await tidy(conn, stale=0.001 if turn % 2 else 300)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        conns: list[Any] = []
        for number in range(5):
            context = connected(database.gateway_dsn)
            conns.append(context)
            group.start_soon(somebody, await context.__aenter__(), number)
    for context in conns:
        await context.__aexit__(None, None, None)
    assert await _deadlocks(admin) == before
    assert await admin.fetchval(f"select count(*) from {OUTBOX}") == 72
