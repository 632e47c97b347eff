"""The way of a job to its completion, and each way in which `complete` returns 0."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import InvalidInputError
from dispatch_core.models import Completion
from tests.support.eventually import eventually
from tests.support.protocol import (
    ME,
    QUEUE,
    RELAY,
    REQUEST,
    RESULT,
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
    row,
    said,
    settle,
    snapshot,
    status_of,
)


async def test_a_job_goes_from_pending_over_claimed_to_succeeded(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    (job_id,) = await enqueue(gateway, body=b"ask")
    pending = await repository.poll_status(job_id)
    assert pending is not None
    assert (pending.status, pending.attempt, pending.claimed_at, pending.completed_at) == ("pending", 0, None, None)
    (job,) = await claim(worker)
    claimed = await repository.poll_status(job_id)
    assert claimed is not None
    assert (claimed.status, claimed.attempt, claimed.completed_at) == ("claimed", 1, None)
    assert not claimed.is_terminal
    assert said(await settle(worker, job, response_status=201, response_body=b"told")) == ("applied", "succeeded")
    ended = await repository.poll_status(job_id)
    assert ended is not None
    assert ended.is_terminal
    assert (ended.status, ended.response_status, ended.response_body, ended.attempt) == ("succeeded", 201, b"told", 1)
    assert ended.claimed_at == claimed.claimed_at
    assert ended.completed_at is not None
    assert await row(admin, QUEUE, job_id) is None


async def test_a_job_can_be_completed_as_failed_with_its_error_and_its_response(
    gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    told = await settle(worker, job, status="failed", response_status=500, error_code="E42", error_message="no stock")
    assert said(told) == ("applied", "failed")
    result = await RelayDispatchRepository(gateway, TENANT).poll_status(job.job_id)
    assert result is not None
    assert (result.status, result.response_status, result.error_code, result.error_message) == (
        "failed",
        500,
        "E42",
        "no stock",
    )


@pytest.mark.invariant("I1")
async def test_at_every_moment_a_job_is_in_the_queue_or_among_the_results_and_never_in_both(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    async def places() -> list[tuple[bool, bool]]:
        return [
            (q, d)
            for q, d in await admin.fetch(
                f"""select exists (select from {QUEUE} q where q.job_id = r.job_id),
                           exists (select from {RESULT} d where d.job_id = r.job_id) from {REQUEST} r"""
            )
        ]

    job = await claimed_job(gateway, worker, max_attempts=3)
    assert await places() == [(True, False)]
    await retry(worker, job, delay=60)
    assert await places() == [(True, False)]
    await make_due(admin, job.job_id)
    (job,) = await claim(worker)
    await end_lease(admin, job.job_id)
    assert await RelayDispatchRepository(worker, TENANT).reclaim(RELAY, lease_seconds=0.001)
    assert await places() == [(True, False)]
    (job,) = await claim(worker)
    await settle(worker, job)
    assert await places() == [(False, True)]


async def _complete(worker: Connection, *args: object, tenant: str = TENANT, **kwargs: object) -> int:
    return await RelayDispatchRepository(worker, tenant).complete(*args, **kwargs)  # type: ignore[arg-type]


async def test_complete_returns_1_and_then_0_and_the_second_one_reads_repeated(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    assert await _complete(worker, job.job_id, RELAY, job.fence, ME, response_body=b"first") == 1
    before = await snapshot(admin)
    assert await _complete(worker, job.job_id, RELAY, job.fence, ME, response_body=b"second") == 0
    assert said(await settle(worker, job)) == ("repeated", "succeeded")
    assert said(await settle(worker, job, status="failed")) == ("repeated", "succeeded")
    assert await snapshot(admin) == before


async def test_complete_of_an_unknown_job_returns_0(worker: Connection) -> None:
    assert await _complete(worker, uuid4(), RELAY, 1, ME) == 0


async def test_complete_of_another_tenants_job_returns_0_and_changes_nothing(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    before = await snapshot(admin)
    assert await _complete(worker, job.job_id, RELAY, job.fence, ME, tenant="other") == 0
    assert said(await settle(worker, job, tenant="other")) == ("stale", None)
    assert await snapshot(admin) == before


async def test_complete_of_another_relays_job_returns_0_and_does_not_tell_how_it_ended(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    before = await snapshot(admin)
    assert await _complete(worker, job.job_id, "crm", job.fence, ME) == 0
    assert said(await settle(worker, job, relay="crm")) == ("stale", None)
    assert await snapshot(admin) == before
    await settle(worker, job)
    assert said(await settle(worker, job, relay="crm")) == ("stale", None)


async def test_complete_of_a_job_that_nobody_claimed_returns_0(gateway: Connection, worker: Connection) -> None:
    (job_id,) = await enqueue(gateway)
    for fence in (0, 1):
        assert await _complete(worker, job_id, RELAY, fence, ME) == 0
    assert await status_of(gateway, job_id) == "pending"


@pytest.mark.invariant("I3")
async def test_a_completion_with_a_stale_fence_changes_nothing(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker, max_attempts=2)
    await retry(worker, job)
    (again,) = await claim(worker)
    assert again.fence > job.fence
    before = await snapshot(admin)
    assert await _complete(worker, job.job_id, RELAY, job.fence, ME) == 0
    assert said(await settle(worker, job)) == ("stale", None)
    for wrong in (0, -1, again.fence + 1):
        assert said(await settle(worker, again, fence=wrong)) == ("stale", None)
    assert await snapshot(admin) == before
    assert said(await settle(worker, again)) == ("applied", "succeeded")


@pytest.mark.invariant("I3")
@pytest.mark.case("C18")
async def test_the_right_fence_in_another_instances_hand_is_stale(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    before = await snapshot(admin)
    assert said(await settle(worker, job, by="erp:instance-2")) == ("stale", None)
    assert await heartbeat(worker, [job], by="erp:instance-2") == ["stale"]
    assert said(await retry(worker, job, by="erp:instance-2")) == ("stale", None)
    assert said(await release(worker, job, started=False, by="erp:instance-2")) == ("stale", None)
    assert await snapshot(admin) == before
    await settle(worker, job)
    assert said(await settle(worker, job, by="erp:instance-2")) == ("stale", "succeeded")


async def test_a_completion_past_the_deadline_ends_the_job_expired_and_without_its_response(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    await pass_deadline(admin, job.job_id)
    assert await _complete(worker, job.job_id, RELAY, job.fence, ME, response_status=200, response_body=b"late") == 0
    result = await RelayDispatchRepository(gateway, TENANT).poll_status(job.job_id)
    assert result is not None
    assert (result.status, result.error_code, result.response_status, result.response_body) == (
        "expired",
        "S2R-EXPIRED",
        None,
        None,
    )
    assert said(await settle(worker, job)) == ("stale", "expired"), "an expired end is never a repeated completion"


async def test_a_completion_behind_a_withdrawal_is_stale_and_told_so(gateway: Connection, worker: Connection) -> None:
    job = await claimed_job(gateway, worker)
    assert await RelayDispatchRepository(gateway, TENANT).mark_expired(job.job_id) == 1
    assert said(await settle(worker, job)) == ("stale", "expired")


@pytest.mark.invariant("I3")
@pytest.mark.parametrize("ended_by", ["lease", "retry", "release"])
async def test_a_completion_after_the_claim_was_ended_for_it_is_stale_and_not_repeated(
    admin: Connection, gateway: Connection, worker: Connection, ended_by: str
) -> None:
    """A result that was never stored must not read as if an earlier call had stored it."""
    job = await claimed_job(gateway, worker)
    if ended_by == "lease":
        await end_lease(admin, job.job_id)
        await RelayDispatchRepository(worker, TENANT).reclaim(RELAY, lease_seconds=0.001)
    elif ended_by == "retry":
        assert said(await retry(worker, job)) == ("applied", "failed")
    else:
        assert said(await release(worker, job, started=True)) == ("applied", "failed")
    before = await snapshot(admin)
    assert said(await settle(worker, job)) == ("stale", "failed")
    assert said(await settle(worker, job, status="failed")) == ("stale", "failed")
    assert await snapshot(admin) == before


async def test_a_batch_of_completions_answers_each_row_in_its_place(gateway: Connection, worker: Connection) -> None:
    await enqueue(gateway, 3)
    await enqueue(gateway, 2, tenant="other")
    mine = await claim(worker, 3)
    others = await claim(worker, 2, tenant="other")
    await settle(worker, mine[1])
    batch = [
        Completion(others[1].job_id, others[1].fence, "other", response_body=b"4"),
        Completion(mine[2].job_id, mine[2].fence, TENANT, response_body=b"2"),
        Completion(uuid4(), 1, TENANT),
        Completion(mine[1].job_id, mine[1].fence, TENANT),
        Completion(mine[0].job_id, mine[0].fence, TENANT, response_body=b"0", status="failed"),
        Completion(others[0].job_id, others[0].fence + 1, "other"),
        Completion(mine[2].job_id, mine[2].fence, TENANT, response_body=b"twice"),
    ]
    settled = await RelayDispatchRepository(worker).complete_many(RELAY, batch, claimed_by=ME)
    assert [said(item) for item in settled] == [
        ("applied", "succeeded"),
        ("applied", "succeeded"),
        ("stale", None),
        ("repeated", "succeeded"),
        ("applied", "failed"),
        ("stale", None),
        ("repeated", "succeeded"),
    ]
    for tenant, job, body in ((TENANT, mine[0], b"0"), (TENANT, mine[2], b"2"), ("other", others[1], b"4")):
        result = await RelayDispatchRepository(gateway, tenant).poll_status(job.job_id)
        assert result is not None
        assert result.response_body == body
    assert await status_of(gateway, others[0].job_id, tenant="other") == "claimed"


@pytest.mark.parametrize("status", ["pending", "claimed", "expired", "", "SUCCEEDED"])
async def test_complete_takes_no_status_but_succeeded_and_failed(
    gateway: Connection, worker: Connection, status: str
) -> None:
    job = await claimed_job(gateway, worker)
    with pytest.raises(InvalidInputError):
        await settle(worker, job, status=status)
    with pytest.raises(asyncpg.PostgresError) as refused:  # and a caller without our checks
        await _raw_complete(worker, [job.job_id], [job.fence], [status])
    assert refused.value.sqlstate == "S2020"
    with pytest.raises(asyncpg.PostgresError) as null:
        await _raw_complete(worker, [job.job_id], [job.fence], [None])
    assert null.value.sqlstate == "S2020"
    assert await status_of(gateway, job.job_id) == "claimed"


async def _raw_complete(worker: Connection, ids: list[object], fences: list[int], statuses: list[object]) -> None:
    nulls = [None] * len(ids)
    await worker.fetch(
        "select * from relay.complete($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
        RELAY, ME, [TENANT], [len(ids)], ids, fences, statuses, nulls, nulls, nulls, nulls, nulls,
    )  # fmt: skip


async def test_arrays_of_different_lengths_are_refused_by_every_verb_that_takes_some(worker: Connection) -> None:
    one, two = [uuid4()], [uuid4(), uuid4()]
    calls: list[tuple[str, tuple[object, ...]]] = [
        ("relay.heartbeat($1, $2, $3, $4, $5, $6)", (RELAY, ME, [TENANT], two, [1, 1], timedelta(seconds=9))),
        (
            "relay.retry($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            (RELAY, ME, [TENANT], one, [1], [timedelta(0)] * 2, [False], [""], [""]),
        ),
        ("relay.release($1, $2, $3, $4, $5, $6)", (RELAY, ME, [TENANT], one, [1], [True, True])),
        ("relay.claim($1, $2, 1, $3, $4, $5, $6)", (RELAY, [TENANT], ME, one[0], timedelta(seconds=9), [1, 2])),
    ]
    for call, arguments in calls:
        with pytest.raises(asyncpg.PostgresError) as refused:
            await worker.fetch(f"select * from {call}", *arguments)
        assert refused.value.sqlstate == "S2020", call
    with pytest.raises(asyncpg.PostgresError) as refused:
        await _raw_complete(worker, two, [1], ["failed"] * 2)  # type: ignore[arg-type]
    assert refused.value.sqlstate == "S2020"


@pytest.mark.parametrize(
    ("tenants", "counts", "jobs", "refused_with"),
    [
        ([TENANT], [1], 2, "S2020"),
        ([TENANT], [2, 1], 2, "S2020"),
        ([TENANT, "other"], [2], 2, "S2020"),
        ([TENANT, "other"], [3, -1], 2, "S2020"),
        ([TENANT, "other"], [2, 0], 2, "S2020"),
        ([TENANT, "other"], [2, None], 2, "S2020"),
        ([TENANT, "other", TENANT], [1, 1, 1], 3, "S2020"),
        (["other", ""], [1, 1], 2, "S2001"),
        (["other", None], [1, 1], 2, "S2001"),
        ([], [], 0, None),
    ],
)
async def test_the_counts_of_a_batch_of_completions_divide_it_among_tenants_of_which_none_is_there_twice(
    worker: Connection, tenants: list[object], counts: list[object], jobs: int, refused_with: str | None
) -> None:
    call = worker.fetch(
        "select * from relay.complete($1, $2, $3, $4, $5, $6, null, null, null, null, null, null)",
        RELAY, ME, tenants, counts, [uuid4() for _ in range(jobs)], [1] * jobs,
    )  # fmt: skip
    if refused_with is None:
        assert await call == []
        return
    with pytest.raises(asyncpg.PostgresError) as refused:
        await call
    assert refused.value.sqlstate == refused_with


async def test_arrays_that_are_null_complete_every_job_as_succeeded_and_without_a_response(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await enqueue(gateway, 2)
    await enqueue(gateway, 2, tenant="other")
    jobs = [*await claim(worker, 2, tenant="other"), *await claim(worker, 2)]
    records = await worker.fetch(
        "select * from relay.complete($1, $2, $3, '{2,2}', $4, $5, null, null, null, null, null, null)",
        RELAY, ME, ["other", TENANT], [job.job_id for job in jobs], [job.fence for job in jobs],
    )  # fmt: skip
    assert sorted(map(tuple, records)) == [(n, "applied", "succeeded") for n in (1, 2, 3, 4)]
    assert await admin.fetch(
        f"""select distinct status, num_nulls(response_status, response_headers, response_body, error_code,
                                              error_message) from {RESULT}"""
    ) == [("succeeded", 5)]


async def test_completions_that_are_to_ring_name_the_jobs_that_they_ended_to_their_tenants_channel(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """By the commit of the completion itself; and not what was stale, nor more ids than a payload holds."""
    heard: dict[str, list[str]] = {}

    def hear(_: object, __: int, channel: str, payload: object) -> None:
        heard.setdefault(channel, []).append(str(payload))

    channels = {}
    for tenant in (TENANT, "other"):
        channels[tenant] = await gateway.fetchval("select relay.channel('result', $1)", tenant)
        await gateway.add_listener(channels[tenant], hear)
    await enqueue(gateway, 3)
    await enqueue(gateway, 201, tenant="other")
    mine, others = await claim(worker, 3), await claim(worker, 201, tenant="other")
    await settle(worker, mine[0])
    await pass_deadline(admin, mine[1].job_id)
    jobs = [*mine, *others]
    async with worker.transaction():
        await worker.fetch(
            "select * from relay.complete($1, $2, $3, '{3,201}', $4, $5, null, null, null, null, null, null, true)",
            RELAY, ME, [TENANT, "other"], [job.job_id for job in jobs], [job.fence for job in jobs],
        )  # fmt: skip
        await gateway.execute("select 1")
        assert heard == {}
    await eventually(lambda: len(heard.get(channels["other"], [])) == 2)
    assert sorted(heard[channels[TENANT]][0].split(",")) == sorted(job.job_id.hex for job in mine[1:])
    told = [payload.split(",") for payload in heard[channels["other"]]]
    assert sorted(len(ids) for ids in told) == [1, 200]
    assert sorted(job_id for ids in told for job_id in ids) == sorted(job.job_id.hex for job in others)
