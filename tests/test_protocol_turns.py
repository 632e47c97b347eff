"""Turns of large claims: four of a relay at once, the others wait, and nobody for long."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from uuid import uuid4

import anyio
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import ClaimedJobs
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.protocol import (
    ME,
    QUEUE,
    RELAY,
    TENANT,
    Connection,
    claim,
    claimed_job,
    connected,
    enqueue,
)

LARGE = 64
HELD = "select count(*) from pg_locks where locktype = 'advisory' and granted"


@asynccontextmanager
async def four_turns_taken(database: TestDatabase) -> AsyncIterator[list[Connection]]:
    """Four transactions, open, that have made a large claim each and found nothing."""
    async with AsyncExitStack() as stack:
        others = []
        for _ in range(4):
            other = await stack.enter_async_context(connected(database.worker_dsn))
            await other.execute("begin")
            assert await claim(other, LARGE) == []
            others.append(other)
        yield others


async def test_a_fifth_large_claim_waits_for_the_end_of_one_of_four(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """And it tells how long it has waited: by so much it began to look, and to count the time left, later."""
    repository = RelayDispatchRepository(worker, TENANT)
    found: list[ClaimedJobs] = []

    async def fifth() -> None:
        found.append(await repository.claim(RELAY, claimed_by=ME, limit=LARGE))

    async with four_turns_taken(database) as others:
        assert await admin.fetchval(HELD) == 4
        await enqueue(gateway, LARGE)
        async with anyio.create_task_group() as group:
            began = time.monotonic()
            group.start_soon(fifth)
            (blocker,) = await wait_until_blocked(admin, pid_of(worker))
            [first] = [other for other in others if pid_of(other) == blocker]
            await first.execute("rollback")
        took = time.monotonic() - began
    (claimed,) = found
    assert len(claimed.jobs) == LARGE
    assert 0 < claimed.waited_seconds <= took
    rows = await admin.fetch(
        f"select job_id, extract(epoch from expires_at - claimed_at)::float8 from {QUEUE} where state = 'claimed'"
    )
    left_at_the_claim = dict(rows)
    claimed_at = [job.local_deadline - left_at_the_claim[job.job_id] for job in claimed.jobs]
    assert began + claimed.waited_seconds <= min(claimed_at) + 0.000_1
    assert max(claimed_at) <= began + took + 0.000_1
    rows = await worker.fetch(
        f"select outcome from relay.claim($1, $2, {LARGE}, $3, $4, '1 min')", RELAY, [TENANT], ME, uuid4()
    )
    assert rows == [], "one that has not waited says nothing"


async def test_one_transaction_that_is_left_open_keeps_nobody_from_the_three_turns_that_are_free(
    database: TestDatabase, admin: Connection, worker: Connection
) -> None:
    """However the one that waits was placed: behind the open one, or in a line that is free meanwhile."""
    async with four_turns_taken(database) as others, worker.transaction():
        async with anyio.create_task_group() as group:
            group.start_soon(claim, worker, LARGE)
            (blocker,) = await wait_until_blocked(admin, pid_of(worker))
            free = [pid_of(other) for other in others if pid_of(other) != blocker]
            await admin.execute("select pg_terminate_backend(p) from unnest($1::int[]) p", free)
        assert await admin.fetchval(f"{HELD} and pid = $1", pid_of(worker)) == 1, "it has a turn"


@pytest.mark.invariant("I4")
@pytest.mark.case("C41")
async def test_the_numbers_of_the_turns_cannot_be_told_from_the_names_and_differ_between_pairs_and_installations(
    database: TestDatabase, admin: Connection
) -> None:
    """Everybody sees and may take any advisory lock: a number that can be guessed would tell of a foreign tenant."""
    numbers = "select array_agg((classid::bigint << 32) | objid::bigint) from pg_locks where locktype = 'advisory'"
    guesses = [
        f"{prefix}{TENANT}:{RELAY}"
        for prefix in ("", "claim:", f"{len(TENANT)}:", f"claim:{len(TENANT)}:", f"relay.claim:{len(TENANT)}:")
    ]

    async def taken(secret: bytes, relay: str = RELAY) -> set[int]:
        await admin.execute("update relay.installation set secret = $1", secret)
        async with connected(database.worker_dsn) as worker, worker.transaction():
            await claim(worker, LARGE, relay=relay)
            return set(await admin.fetchval(numbers))

    found = [await taken(bytes(32)), await taken(b"1" * 32), await taken(bytes(32), "crm")]
    assert len(set.union(*found)) == sum(map(len, found)) == 3
    assert await taken(bytes(32)) == found[0]
    guessed = await admin.fetchval(
        "select array_agg(hashtextextended(g, s)) from unnest($1::text[]) g, generate_series(0, 3) s", guesses
    )
    assert set.union(*found).isdisjoint(guessed)


async def test_a_turn_that_does_not_come_is_not_waited_for_and_no_error(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    async with four_turns_taken(database):
        await enqueue(gateway, LARGE)
        assert len(await claim(worker, LARGE)) == LARGE
        assert await worker.fetchval("show lock_timeout") == "0"


async def test_small_claims_other_relays_and_the_later_tenants_of_a_claim_take_no_turn(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    async with four_turns_taken(database):
        await worker.execute("set statement_timeout = '700ms'")
        await enqueue(gateway, LARGE)
        assert len(await claim(worker, LARGE - 1)) == LARGE - 1
        assert await claim(worker, LARGE, relay="another") == []
        assert len(await claim(worker, 2 * LARGE, tenants=["others", TENANT])) == 1
        assert await admin.fetchval(HELD) == 4


async def test_two_transactions_that_claim_crosswise_end_without_a_deadlock(
    database: TestDatabase, admin: Connection, worker: Connection
) -> None:
    async with connected(database.worker_dsn) as other, AsyncExitStack() as stack:
        # One turn is left of each of two tenants.
        for tenant in (TENANT, "others"):
            for _ in range(3):
                holder = await stack.enter_async_context(connected(database.worker_dsn))
                await holder.execute("begin")
                await claim(holder, LARGE, tenant=tenant)

        async def crosswise(connection: Connection, tenants: list[str]) -> None:
            async with connection.transaction():
                for tenant in tenants:
                    assert await claim(connection, LARGE, tenant=tenant) == []

        async with anyio.create_task_group() as group:
            group.start_soon(crosswise, worker, [TENANT, "others"])
            group.start_soon(crosswise, other, ["others", TENANT])
        assert await admin.fetchval("select deadlocks from pg_stat_database where datname = current_database()") == 0


async def test_a_deadlock_that_is_found_while_a_claim_waits_for_its_turn_is_no_error_of_the_claim(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """All who have a turn wait for a row of the transaction that waits for one."""
    job = await claimed_job(gateway, worker)

    async def complete(connection: Connection) -> int:
        return await RelayDispatchRepository(connection, TENANT).complete(job.job_id, RELAY, job.fence, ME)

    try:
        await admin.execute(f"alter database {database.name} set deadlock_timeout = '60s'")
        async with four_turns_taken(database) as others:
            await admin.execute(f"alter database {database.name} set deadlock_timeout = '10ms'")
            async with (
                connected(database.worker_dsn) as victim,
                anyio.create_task_group() as group,
                victim.transaction(),
            ):
                assert await complete(victim) == 1
                for other in others:
                    group.start_soon(complete, other)
                    await wait_until_blocked(admin, pid_of(other))
                assert await claim(victim, LARGE) == []
    finally:
        await admin.execute(f"alter database {database.name} reset deadlock_timeout")
