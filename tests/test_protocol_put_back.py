"""Retry, snooze, release and heartbeat: what a holder may say of its claim short of its end."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import PutBack
from tests.support.protocol import (
    ME,
    QUEUE,
    RELAY,
    TENANT,
    Connection,
    claim,
    claimed_job,
    end_lease,
    enqueue,
    heartbeat,
    make_due,
    pass_deadline,
    release,
    retry,
    said,
    settle,
    snapshot,
    status_of,
)


async def test_a_retry_with_attempts_left_makes_the_job_pending_again_and_uses_the_attempt(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker, max_attempts=2)
    assert said(await retry(worker, job, error_message="busy")) == ("applied", "pending")
    assert await status_of(gateway, job.job_id) == "pending"
    (again,) = await claim(worker)
    assert (again.attempt, again.last_attempt) == (2, True)
    assert again.fence > job.fence + 1, "putting back raises the fence too"
    assert said(await retry(worker, again, error_code="E", error_message="still busy")) == ("applied", "failed")
    result = await RelayDispatchRepository(gateway, TENANT).poll_status(job.job_id)
    assert result is not None
    assert (result.status, result.error_code, result.error_message, result.attempt) == ("failed", "E", "still busy", 2)


async def test_a_snooze_gives_the_attempt_back_even_when_it_was_the_last(
    gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    for _ in range(5):
        assert said(await retry(worker, job, give_back=True)) == ("applied", "pending")
        (job,) = await claim(worker)
        assert job.attempt == 1


async def test_a_delayed_retry_reads_pending_and_is_claimed_when_it_is_due_and_not_before(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker, max_attempts=2)
    assert said(await retry(worker, job, delay=60)) == ("applied", "pending")
    assert await status_of(gateway, job.job_id) == "pending"
    assert await claim(worker) == []
    await make_due(admin, job.job_id)
    assert [again.job_id for again in await claim(worker)] == [job.job_id]


@pytest.mark.parametrize("give_back", [False, True])
async def test_a_retry_that_would_start_past_the_deadline_ends_the_job_failed_now_with_the_handlers_error(
    gateway: Connection, worker: Connection, give_back: bool
) -> None:
    job = await claimed_job(gateway, worker, max_attempts=5, ttl=30)
    told = await retry(worker, job, delay=31, give_back=give_back, error_code="E", error_message="later")
    assert said(told) == ("applied", "failed")
    result = await RelayDispatchRepository(gateway, TENANT).poll_status(job.job_id)
    assert result is not None
    assert (result.status, result.error_code, result.error_message) == ("failed", "E", "later")


async def test_a_retry_or_release_past_the_deadline_ends_the_job_expired(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    first = await claimed_job(gateway, worker, max_attempts=5)
    second = await claimed_job(gateway, worker, max_attempts=5)
    third = await claimed_job(gateway, worker, max_attempts=1)
    await pass_deadline(admin, first.job_id, second.job_id, third.job_id)
    assert said(await retry(worker, first)) == ("applied", "expired")
    assert said(await release(worker, second, started=False)) == ("applied", "expired")
    assert said(await release(worker, third, started=True)) == ("applied", "expired")
    for job in (first, second, third):
        assert await status_of(gateway, job.job_id) == "expired"


async def test_a_released_job_whose_handler_had_not_started_has_its_attempt_back_and_is_free_at_once(
    gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    assert said(await release(worker, job, started=False)) == ("applied", "pending")
    (again,) = await claim(worker, by="erp:instance-2")
    assert (again.job_id, again.attempt) == (job.job_id, 1)
    assert said(await settle(worker, job)) == ("stale", None)


async def test_a_released_job_whose_handler_was_interrupted_has_used_its_attempt(
    gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker, max_attempts=2)
    assert said(await release(worker, job, started=True)) == ("applied", "pending")
    (again,) = await claim(worker)
    assert again.attempt == 2
    assert said(await release(worker, again, started=True)) == ("applied", "failed")
    result = await RelayDispatchRepository(gateway, TENANT).poll_status(job.job_id)
    assert result is not None
    assert result.error_code == "S2R-RELAY-STOPPED"


async def test_putting_back_twice_is_stale_the_second_time(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker, max_attempts=3)
    await retry(worker, job)
    before = await snapshot(admin)
    assert said(await retry(worker, job)) == ("stale", None)
    assert said(await release(worker, job, started=False)) == ("stale", None)
    assert await heartbeat(worker, [job]) == ["stale"]
    assert await snapshot(admin) == before


async def test_a_batch_of_retries_over_several_tenants_answers_each_row_in_its_place(
    gateway: Connection, worker: Connection
) -> None:
    a1 = await claimed_job(gateway, worker)
    a2 = await claimed_job(gateway, worker, max_attempts=2)
    b = await claimed_job(gateway, worker, tenant="other", max_attempts=2)
    settled = await RelayDispatchRepository(worker).retry(
        RELAY,
        [
            PutBack(b.job_id, b.fence, "other", delay=5),
            PutBack(uuid4(), 1, TENANT),
            PutBack(a1.job_id, a1.fence, TENANT, error_code="A1"),
            PutBack(a2.job_id, a2.fence, TENANT),
            PutBack(b.job_id, b.fence, TENANT),
        ],
        claimed_by=ME,
    )
    assert [said(item) for item in settled] == [
        ("applied", "pending"),
        ("stale", None),
        ("applied", "failed"),
        ("applied", "pending"),
        ("stale", None),
    ]


@pytest.mark.parametrize("delay", ["-1 s", "infinity", None])
async def test_a_delay_that_is_no_time_is_refused_by_retry(worker: Connection, delay: str | None) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await worker.fetch(
            "select * from relay.retry($1, $2, $3, $4, '{1}', array[$5::text::interval], '{f}', '{e}', '{m}')",
            RELAY, ME, [TENANT], [uuid4()], delay,
        )  # fmt: skip
    # Before PostgreSQL 17 an interval cannot be infinite.
    assert refused.value.sqlstate in ("S2021", "22007")


async def test_a_heartbeat_renews_the_current_claims_and_tells_the_others_that_they_are_stale(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await enqueue(gateway, 4, max_attempts=2)
    kept, retried, done, other = await claim(worker, 4)
    await retry(worker, retried)
    await settle(worker, done)
    await end_lease(admin, kept.job_id)
    assert await heartbeat(worker, [done, kept, retried, other], lease=500) == ["stale", "applied", "stale", "applied"]
    for job in (kept, other):
        left = await admin.fetchval(
            f"select lease_expires_at - clock_timestamp() from {QUEUE} where job_id = $1", job.job_id
        )
        assert timedelta(seconds=490) < left <= timedelta(seconds=500)


async def test_a_heartbeat_over_several_tenants_answers_each_row_in_its_place(
    gateway: Connection, worker: Connection
) -> None:
    a = await claimed_job(gateway, worker)
    b = await claimed_job(gateway, worker, tenant="other")
    outcomes = await RelayDispatchRepository(worker).heartbeat(
        RELAY,
        [("other", b.job_id, b.fence), (TENANT, b.job_id, b.fence), (TENANT, a.job_id, a.fence), ("other", uuid4(), 1)],
        claimed_by=ME,
    )
    assert [outcome.value for outcome in outcomes] == ["applied", "stale", "applied", "stale"]


@pytest.mark.parametrize("lease", ["0 s", "-5 s", None])
async def test_a_lease_that_is_not_positive_is_refused_so_that_no_claim_is_for_ever(
    admin: Connection, gateway: Connection, worker: Connection, lease: str | None
) -> None:
    job = await claimed_job(gateway, worker)
    before = await snapshot(admin)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await worker.fetch(
            "select * from relay.heartbeat($1, $2, $3, $4, $5, $6::text::interval)",
            RELAY, ME, [TENANT], [job.job_id], [job.fence], lease,
        )  # fmt: skip
    assert refused.value.sqlstate == "S2020"
    with pytest.raises(asyncpg.PostgresError) as refused:
        await worker.fetch(
            "select * from relay.claim($1, $2, 1, $3, $4, $5::text::interval)", RELAY, [TENANT], ME, uuid4(), lease
        )
    assert refused.value.sqlstate == "S2020"
    assert await snapshot(admin) == before
