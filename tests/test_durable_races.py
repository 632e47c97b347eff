"""Races of the durable room: reaper, completer, claimer and people at once; all ends once (C15, C24)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import anyio
import asyncpg
import pytest

from tests.support import durable
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK, JOB, Lease
from tests.support.protocol import TENANT, Connection, connected

pytestmark = [pytest.mark.invariant("I3"), pytest.mark.case("C15")]


@pytest.mark.invariant("J5")
async def test_two_last_chunks_that_end_at_the_same_moment_end_the_job_once_and_at_once(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    """500 rounds; in each both complete in transactions that overlap, or race freely."""
    rounds = 500
    ids = [uuid4() for _ in range(rounds)]
    make = "select relay.durable_insert_job($2, u, $3, '{}', true, 3, 0, 'me') from unnest($1::uuid[]) u"
    await gateway.fetch(make, ids, TENANT, durable.KIND)
    fill = "select relay.durable_insert_chunks($2, u, $3, 1, false) from unnest($1::uuid[]) u"
    await gateway.fetch(fill, ids, TENANT, '[{"payload": 1}, {"payload": 2}]')
    async with connected(database.worker_dsn) as one, connected(database.worker_dsn) as two:
        of_job: dict[UUID, list[Lease]] = {}
        for lease in await durable.claim(one, 2 * rounds, lease=600):
            of_job.setdefault(lease.job_id, []).append(lease)
        assert len(of_job) == rounds
        for n, (job_id, leases) in enumerate(of_job.items()):

            async def end(conn: Connection, lease: Lease, job_id: UUID = job_id) -> bool:
                _, last = await durable.complete(conn, lease)
                assert last
                return (await durable.finish(conn, job_id))[0][1]

            if n % 5 == 0:  # neither sees the other's
                async with one.transaction(), two.transaction():
                    await durable.complete(one, leases[0])
                    await durable.complete(two, leases[1])
                ended = await asyncio.gather(*(durable.finish(conn, job_id) for conn in (one, two)))
                assert [item[0][0] for item in ended] == ["completed"] * 2
                assert sum(item[0][1] for item in ended) == 1
            else:
                assert sum(await asyncio.gather(end(one, leases[0]), end(two, leases[1]))) == 1
    wrong = await admin.fetch(
        f"""select j.job_id from {JOB} j where j.status <> 'completed' or j.chunks_done <> 2
              or (select count(*) from relay.durable_event e where e.job_id = j.job_id and e.type = 'completed') <> 1"""
    )
    assert wrong == []


Race = Callable[[Connection, Lease], Awaitable[Any]]


async def _complete(worker: Connection, lease: Lease) -> Any:
    return (await durable.complete(worker, lease))[0]


async def _release_and_claim(worker: Connection, lease: Lease) -> Any:
    await durable.release(worker, lease)
    return len(await durable.claim_next(worker, lease.job_id))


async def _fail(worker: Connection, lease: Lease) -> Any:
    return await durable.fail(worker, lease, retryable=False)


async def _heartbeat(worker: Connection, lease: Lease) -> Any:
    return await durable.heartbeat(worker, lease)


@pytest.mark.parametrize("race", [_complete, _release_and_claim, _fail, _heartbeat], ids=lambda f: f.__name__[1:])
async def test_the_reaper_steps_over_a_chunk_that_its_holder_is_just_telling_of(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, race: Race
) -> None:
    """The lease runs out while the holder's transaction is open: it was in time, so it stands."""
    job_id = await durable.submit(gateway, 1)
    (lease,) = await durable.claim(worker, lease=0.15)
    async with worker.transaction():
        await race(worker, lease)
        await worker.execute("select pg_sleep(0.2)")
        assert await durable.reap(gateway) == []
    assert await durable.reap(gateway) == []
    assert await durable.states(gateway, job_id) in (["done"], ["running"], ["failed"])


async def test_a_completion_that_waited_for_the_reaper_is_told_that_it_has_lost(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 1)
    (lease,) = await durable.claim(worker)
    await durable.run_out(admin)
    async with connected(database.gateway_dsn) as reaper:
        transaction = reaper.transaction()
        await transaction.start()
        assert [r["status"] for r in await durable.reap(reaper)] == ["retry"]
        waiting = asyncio.ensure_future(durable.complete(worker, lease))
        await wait_until_blocked(admin, pid_of(worker), by=pid_of(reaper))
        async with connected(database.worker_dsn) as beside:
            assert await durable.heartbeat(beside, lease) == ["stale"]
        await transaction.commit()
        with pytest.raises(asyncpg.PostgresError) as raised:
            await waiting
        assert raised.value.sqlstate == "S2041"
    assert await durable.states(gateway, job_id) == ["retry"]


@pytest.mark.case("C24")
async def test_a_cancellation_waits_for_a_completion_that_was_first_and_refuses_one_that_comes_later(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 3)
    first, second, third = await durable.claim(worker, 3)
    async with connected(database.worker_dsn) as other:
        async with worker.transaction():
            await durable.complete(worker, first)
            cancelling = asyncio.ensure_future(durable.control(gateway, job_id, "cancel"))
            await wait_until_blocked(admin, pid_of(gateway), by=pid_of(worker))
            assert await durable.claim_next(other, job_id) == [], "its status is being changed"
        answer = await cancelling
    assert (answer["outcome"], answer["chunks"], answer["running"]) == ("applied", 2, 0)
    assert await durable.states(gateway, job_id) == ["done", "cancelled", "cancelled"]
    for lease in (second, third):
        with pytest.raises(asyncpg.PostgresError):
            await durable.complete(worker, lease)
        assert await durable.fail(worker, lease) is None
        assert await durable.heartbeat(worker, lease) == ["stale"]
        assert await durable.release(worker, lease) == ["stale"]
    assert await durable.claim(worker) == []
    assert await durable.counters_are_exact(admin, job_id)


@pytest.mark.case("C24")
async def test_a_handlers_long_transaction_does_not_hold_up_a_cancellation_and_cannot_commit_afterwards(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await admin.execute("create table public.t (n bigint); grant insert on public.t to public")
    job_id = await durable.submit(gateway, 2)
    lease, _ = await durable.claim(worker, 2)
    transaction = worker.transaction()
    await transaction.start()
    await worker.execute("insert into public.t values (1)")
    await durable.checkpoint(worker, lease, {"at": 1})
    answer = await durable.control(gateway, job_id, "cancel")
    assert (answer["outcome"], answer["chunks"], answer["running"]) == ("applied", 1, 1)
    with pytest.raises(asyncpg.PostgresError) as raised:
        await durable.complete(worker, lease)
    assert raised.value.sqlstate == "S2041"
    await transaction.rollback()
    assert await admin.fetchval("select count(*) from public.t") == 0
    # What was left running is cancelled by the reaper, and never a retry.
    await durable.run_out(admin)
    assert [r["status"] for r in await durable.reap(gateway)] == ["cancelled"]
    await durable.finish(gateway, job_id)
    assert await durable.status(gateway, job_id) == "cancelled"
    assert await durable.counters_are_exact(admin, job_id)


@pytest.mark.invariant("J6")
@pytest.mark.case("C24")
@pytest.mark.parametrize("moment", ["pending", "claimed", "completing", "done"])
@pytest.mark.parametrize("action", ["pause", "cancel"])
async def test_pause_and_cancel_at_each_moment_lose_no_chunk_and_let_none_run_afterwards(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, moment: str, action: str
) -> None:
    job_id = await durable.submit(gateway, 1)
    lease: Lease | None = None
    if moment != "pending":
        (lease,) = await durable.claim(worker)
    if moment == "completing":
        assert lease is not None
        async with worker.transaction():
            await durable.complete(worker, lease)
            deciding = asyncio.ensure_future(durable.control(gateway, job_id, action))
            if action == "cancel":
                await wait_until_blocked(admin, pid_of(gateway), by=pid_of(worker))
            else:
                assert (await deciding)["outcome"] == "applied", "a pause waits for no chunk"
        assert (await deciding)["outcome"] == "applied"
        assert await durable.states(gateway, job_id) == ["done"]
    else:
        if moment == "done":
            assert lease is not None
            await durable.complete(worker, lease)
        assert (await durable.control(gateway, job_id, action))["outcome"] == "applied"
    assert await durable.claim(worker) == []
    assert await durable.claim_next(worker, job_id) == []
    assert await durable.claim_chunk(worker, job_id, 1, 0) is None
    if action == "pause":
        if moment == "claimed":
            assert lease is not None
            assert await durable.heartbeat(worker, lease) == ["applied"]
            (said,) = await worker.fetch(
                "select job_status from relay.durable_heartbeat($1, $2, $3, $4, $5, '30 s')",
                [TENANT], [job_id], [1], [lease.token], [lease.version],
            )  # fmt: skip
            assert said["job_status"] == "paused", "so its holder knows"
            await durable.checkpoint(worker, lease, {"at": 3})
            assert await durable.release(worker, lease) == ["applied"]
        resumed = await durable.control(gateway, job_id, "resume")
        if moment in ("pending", "claimed"):
            assert resumed["outcome"] == "applied"
            (again,) = await durable.claim(worker)
            assert again.row["attempts"] == 1
            assert again.row["checkpoint"] == (None if moment == "pending" else '{"at": 3}')
            await durable.complete(worker, again)
        await durable.finish(worker, job_id)
        assert await durable.status(gateway, job_id) == "completed"
        assert await durable.states(gateway, job_id) == ["done"]
    else:
        # Everything was done already when it was decided about: it ends as cancelled all the same.
        assert await durable.status(gateway, job_id) == "cancelled"
        assert await durable.states(gateway, job_id) == ["done" if moment in ("completing", "done") else "cancelled"]
        assert (await durable.control(gateway, job_id, "resume"))["outcome"] == "too_late"
    assert await durable.counters_are_exact(admin, job_id)


@pytest.mark.invariant("I9")
async def test_what_a_stopping_relay_gives_back_is_free_for_another_at_once(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 5, max_attempts=1)
    leases = await durable.claim(worker, 5)
    assert await durable.release(worker, *leases) == ["applied"] * 5
    async with connected(database.worker_dsn) as other:
        again = await durable.claim(other, 5, by="relay:2")
        assert [lease.row["attempts"] for lease in again] == [1] * 5
        assert await durable.complete_many(worker, *leases) == ["stale"] * 5
        assert await durable.complete_many(other, *again) == ["applied"] * 5
        assert await durable.finish(other, job_id) == [("completed", True)]


@pytest.mark.invariant("J1")
async def test_reaper_completer_claimer_and_people_at_once_never_deadlock_and_each_ends_once(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """Leases of a millisecond, six hands, three jobs; then all is brought to its end, and told once."""
    jobs = [await durable.submit(gateway, 30, rows=1, max_attempts=1000, idempotent=n < 2) for n in range(3)]
    errors: list[asyncpg.PostgresError] = []
    turns = 60

    async def guarded(call: Awaitable[Any]) -> Any:
        try:
            return await call
        except asyncpg.PostgresError as error:
            if error.sqlstate != "S2041":
                errors.append(error)
            return None

    async def work(seed: int) -> None:
        chance = random.Random(seed)
        async with connected(database.worker_dsn) as conn:
            for _ in range(turns):
                leases = await guarded(durable.claim(conn, 6, lease=chance.choice([0.001, 5]), by=f"r:{seed}")) or []
                chance.shuffle(leases)
                await guarded(durable.heartbeat(conn, *leases, lease=chance.choice([0.001, 5])))
                half = len(leases) // 3
                await guarded(durable.complete_many(conn, *leases[:half]))
                for lease in leases[half : 2 * half]:
                    await guarded(durable.complete(conn, lease, rows_done=1))
                await guarded(durable.release(conn, *leases[2 * half :]))
                await guarded(durable.finish(conn, *jobs))

    async def tidy(seed: int) -> None:
        async with connected(database.gateway_dsn) as conn:
            for _ in range(turns):
                await guarded(durable.reap(conn, 5))
                await guarded(conn.fetch("select * from relay.durable_finish_lost($1, 10)", TENANT))

    async def decide(seed: int) -> None:
        chance = random.Random(seed)
        async with connected(database.gateway_dsn) as conn:
            for _ in range(turns):
                job_id = chance.choice(jobs)
                action = chance.choice(["pause", "resume", "resume", "retry_failed"])
                await guarded(durable.control(conn, job_id, action))
                await guarded(durable.resolve(conn, jobs[2], chance.randint(1, 30), "retry"))
                await guarded(conn.fetch("select * from relay.durable_refresh_counters($1, $2)", TENANT, job_id))
                await guarded(
                    conn.fetchval(
                        "select relay.durable_set_chunk_statuses($1, $2, '{running}', 'retry', '{}', $3)",
                        TENANT, job_id, [chance.randint(1, 30), chance.randint(1, 30)],
                    )
                )  # fmt: skip

    async with anyio.create_task_group() as group:
        for seed in range(3):
            group.start_soon(work, seed)
        group.start_soon(tidy, 7)
        group.start_soon(decide, 8)
        group.start_soon(decide, 9)
    assert errors == []

    async with connected(database.worker_dsn) as conn:
        for _ in range(300):
            await durable.run_out(admin)
            await durable.reap(conn)
            for job_id in jobs:
                await durable.control(gateway, job_id, "resume")
                for seq in range(1, 31):
                    if job_id == jobs[2]:
                        await durable.resolve(gateway, job_id, seq, "retry")
            leases = await durable.claim(conn, 100)
            if not leases:
                break
            await durable.complete_many(conn, *leases)
        await durable.finish(conn, *jobs)
    for job_id in jobs:
        assert await durable.status(gateway, job_id) == "completed"
        assert await durable.states(gateway, job_id) == ["done"] * 30
        assert await durable.counters_are_exact(admin, job_id)
        assert (await durable.told(gateway, job_id)).count("completed") == 1
    assert await admin.fetchval(f"select count(*) from {CHUNK} where status = 'running'") == 0
