"""Deadlines and withdrawal: `mark_expired`, late claims, late completions, polls."""

from __future__ import annotations

from uuid import uuid4

import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from tests.support.protocol import (
    ME,
    RELAY,
    TENANT,
    Connection,
    claim,
    claimed_job,
    enqueue,
    heartbeat,
    pass_deadline,
    release,
    retry,
    said,
    settle,
    snapshot,
    status_of,
)


async def test_mark_expired_ends_a_pending_job_once(gateway: Connection, worker: Connection) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    (job_id,) = await enqueue(gateway)
    assert [await repository.mark_expired(job_id) for _ in range(3)] == [1, 0, 0]
    result = await repository.poll_status(job_id)
    assert result is not None
    assert (result.status, result.error_code) == ("expired", "S2R-EXPIRED")
    assert await claim(worker) == []


@pytest.mark.case("C24")
async def test_mark_expired_ends_a_claimed_job_and_its_holder_is_stale_from_then_on(
    gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker, max_attempts=9)
    ((ended, was_claimed),) = await RelayDispatchRepository(gateway, TENANT).mark_expired_many([job.job_id])
    assert (ended.relay_id, ended.job_id, was_claimed) == (RELAY, job.job_id, True)
    assert await heartbeat(worker, [job]) == ["stale"]
    assert said(await settle(worker, job)) == ("stale", "expired")
    assert said(await retry(worker, job)) == ("stale", None)
    assert await claim(worker) == []


async def test_mark_expired_ends_a_delayed_job_too(gateway: Connection) -> None:
    (job_id,) = await enqueue(gateway, delay=60)
    assert await RelayDispatchRepository(gateway, TENANT).mark_expired(job_id) == 1
    assert await status_of(gateway, job_id) == "expired"


async def test_mark_expired_does_not_look_at_the_clock(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """A job that polls already show as expired is ended by it once more, and only once."""
    repository = RelayDispatchRepository(gateway, TENANT)
    job = await claimed_job(gateway, worker)
    await pass_deadline(admin, job.job_id)
    assert await status_of(gateway, job.job_id) == "expired"
    assert [await repository.mark_expired(job.job_id) for _ in range(2)] == [1, 0]
    assert await status_of(gateway, job.job_id) == "expired"


@pytest.mark.case("C24")
@pytest.mark.parametrize("status", ["succeeded", "failed"])
async def test_a_terminal_status_never_changes(
    admin: Connection, gateway: Connection, worker: Connection, status: str
) -> None:
    job = await claimed_job(gateway, worker)
    await settle(worker, job, status=status)
    before = await snapshot(admin)
    assert await RelayDispatchRepository(gateway, TENANT).mark_expired(job.job_id) == 0
    other = "failed" if status == "succeeded" else "succeeded"
    assert said(await settle(worker, job, status=other))[0] == "repeated"
    assert said(await retry(worker, job))[0] == "stale"
    assert said(await release(worker, job, started=True))[0] == "stale"
    await RelayDispatchRepository(gateway).run_sweeps(keep_seconds=3600, lease_seconds=0.001)
    assert await snapshot(admin) == before


async def test_mark_expired_answers_each_id_of_a_batch_once(gateway: Connection, worker: Connection) -> None:
    first, second, third = await enqueue(gateway, 3)
    (claimed,) = await claim(worker)
    unknown = uuid4()
    await RelayDispatchRepository(gateway, TENANT).mark_expired(second)
    rows = await gateway.fetch(
        "select n, outcome, was_claimed from relay.mark_expired($1, $2) order by n",
        TENANT,
        [third, unknown, first, third, second],
    )
    assert claimed.job_id == first
    assert [tuple(r) for r in rows] == [
        (1, "applied", False),
        (2, "stale", False),
        (3, "applied", True),
        (4, "stale", False),
        (5, "stale", False),
    ]


async def test_a_live_job_past_its_deadline_reads_expired_and_a_poll_writes_nothing(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    (pending,) = await enqueue(gateway)
    job = await claimed_job(gateway, worker, relay="crm")
    (delayed,) = await enqueue(gateway, delay=60)
    await pass_deadline(admin, pending, job.job_id, delayed)
    before = await snapshot(admin)
    polled = await RelayDispatchRepository(gateway, TENANT).poll_many([pending, job.job_id, delayed])
    for result in polled.values():
        assert not isinstance(result, Exception)
        assert (result.status, result.error_code, result.completed_at) == ("expired", "S2R-EXPIRED", None)
        assert result.remaining < 0
    assert await snapshot(admin) == before


@pytest.mark.invariant("I2")
async def test_a_claim_never_hands_out_a_job_past_its_deadline_but_ends_it(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    late = await enqueue(gateway, 3)
    (good,) = await enqueue(gateway)
    await pass_deadline(admin, *late)
    claimed = await RelayDispatchRepository(worker, TENANT).claim(RELAY, claimed_by=ME, limit=10)
    assert [job.job_id for job in claimed.jobs] == [good]
    assert {ended.job_id for ended in claimed.expired} == set(late)
    assert claimed.looked_at == 4
    for job_id in late:
        result = await RelayDispatchRepository(gateway, TENANT).poll_status(job_id)
        assert result is not None
        assert (result.status, result.attempt, result.claimed_at) == ("expired", 0, None)
        assert result.completed_at is not None


async def test_expired_rows_count_against_the_limit_so_that_a_claim_stays_short(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await pass_deadline(admin, *await enqueue(gateway, 5))
    await enqueue(gateway, 5)
    repository = RelayDispatchRepository(worker, TENANT)
    claimed = await repository.claim(RELAY, claimed_by=ME, limit=3)
    assert (len(claimed.jobs), len(claimed.expired), claimed.looked_at) == (0, 3, 3)
    claimed = await repository.claim(RELAY, claimed_by=ME, limit=3)
    assert (len(claimed.jobs), len(claimed.expired), claimed.looked_at) == (1, 2, 3)
