"""Claim: the oldest first, never more than asked, fairly over tenants, and found again when its reply was lost."""

from __future__ import annotations

import itertools
import random
from uuid import UUID, uuid4

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import InvalidInputError, TenancyDeniedError
from dispatch_core.models import ClaimedJobs
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
    logins,
    make_due,
    pass_deadline,
    release,
    retry,
    row,
    said,
    settle,
    snapshot,
    status_of,
)


async def _claim(worker: Connection, limit: int, tenants: list[str], **options: object) -> ClaimedJobs:
    return await RelayDispatchRepository(worker).claim(
        RELAY,
        claimed_by=ME,
        limit=limit,
        tenants=tenants,
        **options,  # type: ignore[arg-type]
    )


# --- order --------------------------------------------------------------------------------------


@pytest.mark.invariant("I5")
async def test_jobs_are_claimed_in_the_order_in_which_they_were_enqueued(
    gateway: Connection, worker: Connection
) -> None:
    ids = [*await enqueue(gateway, 5), *await enqueue(gateway, 1), *await enqueue(gateway, 4)]
    claimed = [await claim(worker, 3), await claim(worker, 3), await claim(worker, 3), await claim(worker, 3)]
    assert [job.job_id for jobs in claimed for job in jobs] == ids
    seqs = [job.seq for jobs in claimed for job in jobs]
    assert seqs == sorted(seqs)


@pytest.mark.invariant("I5")
async def test_a_claim_takes_the_lowest_unlocked_seqs_above_its_cursor_ascending_whatever_else_there_is(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Random queues: equal seqs, locked rows, other relays and tenants, delayed rows, any cursor and limit."""
    rng = random.Random(5)
    async with connected(database.admin_dsn) as locker:
        for _ in range(25):
            await admin.execute("truncate relay.s2r_relay_dispatch_queue, relay.s2r_relay_dispatch_request")
            ids = await enqueue(gateway, 30)
            await enqueue(gateway, 3, relay="crm")
            await enqueue(gateway, 3, tenant="other")
            await enqueue(gateway, 3, delay=100)
            seqs = {job_id: rng.randrange(1, 20) for job_id in ids}
            await admin.executemany(f"update {QUEUE} set seq = $2 where job_id = $1", list(seqs.items()))
            locked = set(rng.sample(ids, rng.randrange(8)))
            cursor, limit = rng.randrange(20), rng.randrange(1, 40)
            async with locker.transaction():
                await locker.execute(f"select from {QUEUE} where job_id = any ($1) for update", list(locked))
                jobs = await claim(worker, limit, after=[cursor])
            expected = sorted((seq, job_id) for job_id, seq in seqs.items() if seq > cursor and job_id not in locked)
            assert [(job.seq, job.job_id) for job in jobs] == expected[:limit]


@pytest.mark.invariant("I5")
async def test_a_cursor_is_a_hint_and_what_lies_below_it_is_found_by_a_claim_from_zero(
    gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    (later,) = await enqueue(gateway)
    await release(worker, job, started=False)
    assert [found.job_id for found in await claim(worker, 9, after=[job.seq])] == [later]
    assert [found.job_id for found in await claim(worker, 9)] == [job.job_id]


# --- the limit (C12) ----------------------------------------------------------------------------

_PLANNER = ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_nestloop", "enable_indexscan")
_CLAIM_SIGNATURE = "relay.claim(text, text[], bigint, text, uuid, interval, bigint[], bigint, bigint, bigint, interval)"


@pytest.mark.case("C12")
@pytest.mark.parametrize("belt", ["as shipped", "without the settings of its functions"])
async def test_a_claim_never_takes_more_rows_than_its_limit(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, belt: str
) -> None:
    """Under each planner setting and state of statistics, with the first rows locked; rows changed = rows returned."""
    if belt != "as shipped":
        await admin.execute(f"alter function {_CLAIM_SIGNATURE} reset all")
        await admin.execute(f"alter function {_CLAIM_SIGNATURE} set search_path = pg_catalog, pg_temp")
    await admin.execute(f"analyze {QUEUE}")  # statistics of an empty table, for what follows
    ids = await enqueue(gateway, 1000)
    claimed_sql = f"select count(*) from {QUEUE} where state = 'claimed'"
    taken = 0
    async with connected(database.admin_dsn) as locker, locker.transaction():
        await locker.execute(f"select from {QUEUE} where job_id = any ($1) for update", ids[:5])
        for analyzed in (False, True):
            if analyzed:
                await admin.execute(f"analyze {QUEUE}")
            for off, limit in itertools.product((None, *_PLANNER), (1, 10)):
                async with connected(database.worker_dsn) as fresh:
                    if off:
                        await fresh.execute(f"set {off} = off")
                    for _ in range(3):
                        jobs = await claim(fresh, limit)
                        assert [job.job_id for job in jobs] == ids[5 + taken : 5 + taken + limit]
                        taken += limit
                        assert await admin.fetchval(claimed_sql) == taken


async def test_two_claims_side_by_side_share_the_queue_and_no_row(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    """The first claim is not even committed when the second one is made."""
    ids = await enqueue(gateway, 6)
    async with connected(database.worker_dsn) as second:
        async with worker.transaction():
            first = await claim(worker, 4)
            other = await claim(second, 4, by="erp:instance-2")
        assert [job.job_id for job in first] == ids[:4]
        assert [job.job_id for job in other] == ids[4:]


@pytest.mark.parametrize(
    "bad",
    [
        {"limit": 0},
        {"limit": -1},
        {"tenants": []},
        {"by": ""},
        {"start": -1},
        {"after": [1, 2]},
        {"lease": 0},
    ],
)
async def test_a_claim_with_arguments_that_make_no_sense_is_refused(
    gateway: Connection, worker: Connection, bad: dict[str, object]
) -> None:
    (job_id,) = await enqueue(gateway)
    with pytest.raises(InvalidInputError):
        await claim(worker, **bad)  # type: ignore[arg-type]
    assert await status_of(gateway, job_id) == "pending"


# --- several tenants ----------------------------------------------------------------------------


async def test_a_claim_over_several_tenants_gives_each_an_equal_share_and_then_what_is_left(
    gateway: Connection, worker: Connection
) -> None:
    for tenant, count in (("a", 50), ("b", 1), ("c", 50)):
        await enqueue(gateway, count, tenant=tenant)
    claimed = await _claim(worker, 30, ["a", "b", "c"])
    assert claimed.counts == {"a": 19, "b": 1, "c": 10}
    claimed = await _claim(worker, 30, ["a", "b", "c"], start=2)
    assert claimed.counts == {"c": 20, "a": 10}
    assert len({job.job_id for job in claimed.jobs}) == 30


async def test_with_fewer_slots_than_tenants_the_start_rotates_who_is_served(
    gateway: Connection, worker: Connection
) -> None:
    tenants = [f"t{i}" for i in range(5)]
    for tenant in tenants:
        await enqueue(gateway, 5, tenant=tenant)
    served = [sorted((await _claim(worker, 2, tenants, start=start)).counts) for start in (0, 2, 4, 6)]
    assert served == [["t0", "t1"], ["t2", "t3"], ["t0", "t4"], ["t1", "t2"]]


async def test_each_tenant_of_a_claim_has_its_own_cursor(gateway: Connection, worker: Connection) -> None:
    first = await claimed_job(gateway, worker, tenant="a")
    await release(worker, first, started=False)
    await enqueue(gateway, tenant="b")
    claimed = await _claim(worker, 10, ["a", "b"], after=[first.seq, 0])
    assert [job.tenant_id for job in claimed.jobs] == ["b"]
    claimed = await _claim(worker, 10, ["a", "b"], after=[first.seq - 1, 0])
    assert [job.job_id for job in claimed.jobs] == [first.job_id]


@pytest.mark.invariant("I4")
async def test_a_claim_that_names_one_tenant_too_many_claims_nothing_at_all(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await enqueue(gateway, 3)
    await enqueue(gateway, 3, tenant="other")
    before = await snapshot(admin)
    async with logins(database) as made:
        worker = await made.open("worker", TENANT, RELAY)
        with pytest.raises(TenancyDeniedError):
            await _claim(worker, 10, [TENANT, "other"])
        assert await snapshot(admin) == before
        assert len((await _claim(worker, 10, [TENANT])).jobs) == 3


# --- delayed jobs -------------------------------------------------------------------------------


async def test_a_claim_tells_when_the_next_delayed_job_of_each_tenant_is_due(
    gateway: Connection, worker: Connection
) -> None:
    await enqueue(gateway, delay=100, tenant="a")
    await enqueue(gateway, delay=50, tenant="a")
    await enqueue(gateway, tenant="b")
    claimed = await _claim(worker, 10, ["a", "b"])
    assert set(claimed.next_due) == {"a"}
    assert 20 < claimed.next_due["a"] <= 50
    assert claimed.looked_at == 1


async def test_due_jobs_are_promoted_by_the_claim_itself_and_keep_their_place(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    old = await enqueue(gateway, 3, delay=100)
    young = await enqueue(gateway, 2)
    await make_due(admin, *old)
    assert [job.job_id for job in await claim(worker, 10)] == [*old, *young]


async def test_promotion_is_bounded_by_the_limit_and_skips_rows_that_are_locked(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    ids = await enqueue(gateway, 5, delay=100)
    await make_due(admin, *ids)
    ready = f"select count(*) from {QUEUE} where state = 'ready'"
    async with connected(database.admin_dsn) as locker, locker.transaction():
        await locker.execute(f"select from {QUEUE} where job_id = $1 for update", ids[0])
        left = await worker.fetchval("select relay.promote_due($1, $2, 2)", TENANT, RELAY)
        assert await admin.fetchval(ready) == 2
        assert left.total_seconds() == 0, "more are due already"
        await worker.fetchval("select relay.promote_due($1, $2, 10)", TENANT, RELAY)
        assert await admin.fetchval(ready) == 4
    await worker.fetchval("select relay.promote_due($1, $2, 10)", TENANT, RELAY)
    assert await admin.fetchval(ready) == 5


# --- attempts (C21) and fences ------------------------------------------------------------------


@pytest.mark.case("C21")
@pytest.mark.invariant("I2")
async def test_the_attempt_is_counted_by_the_claim_so_that_a_worker_that_dies_has_used_it(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    (job_id,) = await enqueue(gateway, max_attempts=3)
    for attempt in (1, 2, 3):
        async with connected(database.worker_dsn) as dies:
            (job,) = await claim(dies, lease=0.001)
            assert job.attempt == attempt
        stored_row = await row(admin, QUEUE, job_id)
        assert stored_row is not None
        assert stored_row["attempt"] == attempt
        (ended,) = await RelayDispatchRepository(worker, TENANT).reclaim(RELAY, lease_seconds=0.001)
        assert ended.status == ("pending" if attempt < 3 else "failed")
    result = await RelayDispatchRepository(gateway, TENANT).poll_status(job_id)
    assert result is not None
    assert (result.status, result.error_code, result.attempt) == ("failed", "S2R-LEASE-LOST", 3)
    assert await claim(worker) == []


async def test_a_claim_that_is_rolled_back_has_used_no_attempt(gateway: Connection, worker: Connection) -> None:
    await enqueue(gateway)
    transaction = worker.transaction()
    await transaction.start()
    (rolled_back,) = await claim(worker)
    await transaction.rollback()
    (job,) = await claim(worker)
    assert (job.attempt, job.fence) == (1, rolled_back.fence), "a fence alone repeats: the instance counts too"
    assert said(await settle(worker, job)) == ("applied", "succeeded")


async def test_the_fence_grows_with_every_claim_and_every_way_back(gateway: Connection, worker: Connection) -> None:
    job = await claimed_job(gateway, worker, max_attempts=9)
    fences = [job.fence]
    for number in range(4):
        await (retry(worker, job) if number % 2 else release(worker, job, started=True))
        (job,) = await claim(worker)
        fences.append(job.fence)
    assert all(later >= earlier + 2 for earlier, later in itertools.pairwise(fences))


@pytest.mark.case("C38")
async def test_seq_fence_and_attempts_past_32_bits_go_through_every_verb(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    huge = 2**62
    for end in ("complete", "retry", "reclaim", "expire"):
        (job_id,) = await enqueue(gateway)
        await admin.execute(
            f"update {QUEUE} set fence = $2::int8, seq = $2, attempt = $2, max_attempts = $2 + 5 where job_id = $1",
            job_id,
            huge,
        )
        (job,) = await claim(worker, after=[huge - 1])
        assert (job.fence, job.seq, job.attempt, job.max_attempts) == (huge + 1, huge, huge + 1, huge + 5)
        repository = RelayDispatchRepository(worker, TENANT)
        assert await repository.heartbeat(RELAY, [(None, job_id, job.fence)], claimed_by=ME) == ["applied"]
        if end == "complete":
            assert said(await settle(worker, job, response_status=2**62)) == ("applied", "succeeded")
        elif end == "retry":
            assert said(await retry(worker, job)) == ("applied", "pending")
            assert said(await settle(worker, (await claim(worker))[0])) == ("applied", "succeeded")
        elif end == "reclaim":
            assert await repository.heartbeat(RELAY, [(None, job_id, job.fence)], claimed_by=ME, lease_seconds=1e-6)
            assert [ended.status for ended in await repository.reclaim(RELAY, lease_seconds=0.001)] == ["pending"]
        await RelayDispatchRepository(gateway, TENANT).mark_expired(job_id)
        result = await RelayDispatchRepository(gateway, TENANT).poll_status(job_id)
        assert result is not None
        assert result.is_terminal
        assert result.attempt > 2**61


# --- a lost reply, and bodies -------------------------------------------------------------------


async def test_a_claim_whose_reply_was_lost_is_found_again_by_its_id_while_it_is_ones_own(
    gateway: Connection, worker: Connection
) -> None:
    repository = RelayDispatchRepository(worker, TENANT)
    await enqueue(gateway, 4, body=b"b", headers={"h": "1"}, max_attempts=2)
    first, second = uuid4(), uuid4()
    claimed = await repository.claim(RELAY, claimed_by=ME, limit=3, claim_id=first)
    await repository.claim(RELAY, claimed_by=ME, limit=1, claim_id=second)

    async def again(claim_id: UUID, by: str = ME) -> list[tuple[UUID, int, bytes, object, int]]:
        found = await repository.claim_again(RELAY, claimed_by=by, claim_id=claim_id)
        return [(job.job_id, job.fence, job.body, job.request_headers, job.attempt) for job in found.jobs]

    expected = [(job.job_id, job.fence, b"b", {"h": "1"}, 1) for job in claimed.jobs]
    assert await again(first) == expected
    assert await again(first) == expected, "asking changes nothing"
    await settle(worker, claimed.jobs[0])
    await retry(worker, claimed.jobs[1])
    assert await again(first) == expected[2:]
    assert await again(first, by="erp:instance-2") == []
    assert await again(uuid4()) == []
    (taken,) = await claim(worker)
    assert taken.job_id == claimed.jobs[1].job_id
    assert await again(first) == expected[2:], "another claim's job is not this claim's any more"


async def test_a_job_past_its_deadline_is_not_found_again_either(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """It is never handed to a handler, whichever way the claim's reply comes."""
    late, good = await enqueue(gateway, 2)
    claim_id = uuid4()
    await claim(worker, 2, claim_id=claim_id)
    await pass_deadline(admin, late)
    found = await RelayDispatchRepository(worker, TENANT).claim_again(RELAY, claimed_by=ME, claim_id=claim_id)
    assert [job.job_id for job in found.jobs] == [good]


async def test_bodies_over_the_limit_come_when_they_are_fetched_and_only_to_the_holder(
    gateway: Connection, worker: Connection
) -> None:
    repository = RelayDispatchRepository(worker, TENANT)
    small, large = b"s" * 100, random.Random(1).randbytes(300_000)
    await enqueue(gateway, body=small)
    await enqueue(gateway, body=large, max_attempts=2)
    await enqueue(gateway)
    first, second, empty = await claim(worker, 3)
    assert (first.body, first.body_pending, second.body_pending, empty.body_pending) == (small, False, True, False)
    assert not await repository.fetch_body(second, claimed_by="erp:instance-2")
    assert await repository.fetch_body(second, claimed_by=ME)
    assert second.body == large
    await retry(worker, second)
    assert not await repository.fetch_body(second, claimed_by=ME)


async def test_the_bodies_of_one_claim_are_bounded_together(gateway: Connection, worker: Connection) -> None:
    await enqueue(gateway, 10, body=b"x" * 1000)
    rows = await worker.fetch(
        "select length(body) from relay.claim($1, $2, 10, $3, $4, '30 s', null, 0, 2000, 3500)",
        RELAY,
        [TENANT],
        ME,
        uuid4(),
    )
    assert [r[0] for r in rows] == [1000] * 3 + [None] * 7


async def test_a_queue_row_leaves_the_hot_table_when_its_job_ends(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """C14: finished jobs never slow a claim, because a claim cannot even see them."""
    await enqueue(gateway, 20)
    jobs = await claim(worker, 20)
    for job in jobs[:10]:
        await settle(worker, job)
    await RelayDispatchRepository(gateway, TENANT).mark_expired_many([job.job_id for job in jobs[10:]])
    assert await admin.fetchval(f"select count(*) from {QUEUE}") == 0


async def test_a_claim_in_a_read_only_transaction_is_an_error_and_no_empty_answer(
    gateway: Connection, worker: Connection
) -> None:
    await enqueue(gateway)
    with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
        async with worker.transaction(readonly=True):
            await worker.fetch("select * from relay.claim($1, $2, 1, $3, $4, '9 s')", RELAY, [TENANT], ME, uuid4())
