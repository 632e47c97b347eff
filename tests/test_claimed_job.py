"""A claimed job as a handler sees it: most of it is read out of the claim's row when somebody looks."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import Completion, DispatchJob, WriteOutcome
from tests.support.protocol import ME, RELAY, REQUEST, claim, claimed_job, enqueue, row

HEADERS: dict[str, str | list[str]] = {"a": "b", "many": ["x", "y"]}


def values(job: DispatchJob) -> dict[str, Any]:
    return {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}


async def test_a_claimed_job_has_what_was_stored(gateway: Any, worker: Any, admin: Any) -> None:
    deadline = (datetime.now(UTC) + timedelta(days=1)).replace(microsecond=123457)
    job = await claimed_job(
        gateway, worker, headers=HEADERS, body=b"\0body", max_attempts=3, ttl=None, expires_at=deadline
    )
    stored = await row(admin, REQUEST, job.job_id)
    assert stored is not None
    assert (job.created_at, job.expires_at) == (stored["created_at"], deadline)
    assert job.created_at.tzinfo is UTC
    assert job.deadline == deadline
    assert job.request_headers == job.headers == HEADERS
    assert job.body == b"\0body"
    assert (job.attempt, job.max_attempts, job.last_attempt) == (1, 3, False)
    assert 0 < job.remaining() <= (deadline - datetime.now(UTC)).total_seconds() + 5
    assert job.seq > 0


async def test_a_claimed_job_can_be_copied_and_sent_to_another_process(gateway: Any, worker: Any) -> None:
    job = await claimed_job(gateway, worker, headers=HEADERS)
    for twin in (copy.copy(job), copy.deepcopy(job), pickle.loads(pickle.dumps(job))):
        assert values(twin) == values(job)
        assert repr(twin) == repr(job)
    # And one that a test of a handler makes by hand is like it.
    assert values(DispatchJob(**values(job))) == values(job)


async def test_a_job_has_no_attributes_that_it_does_not_have(gateway: Any, worker: Any) -> None:
    job = await claimed_job(gateway, worker)
    with pytest.raises(AttributeError, match="'DispatchJob' object has no attribute 'payload'"):
        _ = job.payload  # type: ignore[attr-defined]


async def test_jobs_with_the_same_headers_have_a_map_each(gateway: Any, worker: Any) -> None:
    await enqueue(gateway, 3, headers=HEADERS)
    first, second, third = await claim(worker, 3)
    first.headers["a"] = "changed"
    assert isinstance(first.headers["many"], list)
    first.headers["many"].append("z")
    assert first.headers == {"a": "changed", "many": ["x", "y", "z"]}
    assert second.headers == third.headers == HEADERS


async def test_a_claimed_job_is_three_objects_for_the_collector_and_takes_no_dear_column(
    gateway: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 200
    await enqueue(gateway, count, headers=HEADERS)
    repository = RelayDispatchRepository(worker, "acme")
    await repository.claim(RELAY, claimed_by=ME, limit=1)  # what a first statement leaves behind
    seen: list[Any] = []
    read = repository.claim.__globals__["read"]
    claimed = read.claimed

    def spy(records: Any, *others: Any) -> Any:
        seen.extend(type(value) for record in records for value in record)
        return claimed(records, *others)

    monkeypatch.setattr(read, "claimed", spy)
    gc.collect()
    before = len(gc.get_objects())
    jobs = (await repository.claim(RELAY, claimed_by=ME, limit=count)).jobs
    # The job, its row, and the id.
    assert len(gc.get_objects()) - before < 3 * len(jobs) + 100
    assert not {datetime, timedelta} & set(seen)


async def test_a_batch_of_completions_is_answered_by_a_row_for_each_outcome(gateway: Any, worker: Any) -> None:
    await enqueue(gateway, 6)
    jobs = await claim(worker, 6)
    repository = RelayDispatchRepository(worker, "acme")
    completions = [Completion(job.job_id, job.fence, response_body=b"same") for job in jobs]
    assert await repository.complete(jobs[1].job_id, RELAY, jobs[1].fence, ME) == 1
    completions[4].fence += 1
    settled = await repository.complete_many(RELAY, completions, claimed_by=ME)
    applied, repeated, stale = WriteOutcome.APPLIED, WriteOutcome.REPEATED, WriteOutcome.STALE
    assert [each.outcome for each in settled] == [applied, repeated, applied, applied, stale, applied]
    # All alike: one row, and each completion has its answer.
    settled = await repository.complete_many(RELAY, completions[:4], claimed_by=ME)
    assert [each.outcome for each in settled] == [repeated] * 4


@pytest.mark.parametrize("bodies", [[b"same"] * 3, [b""] * 3, [None] * 3, [b"a", None, b"c"], [b"one"]])
@pytest.mark.parametrize("headers", [[{"a": "b"}] * 3, [None] * 3, [{"a": "b"}, None, {}]])
@pytest.mark.parametrize("statuses", [[200] * 3, [None] * 3, [200, None, 404]])
async def test_a_value_that_all_results_share_is_stored_for_each(
    gateway: Any, worker: Any, bodies: Any, headers: Any, statuses: Any
) -> None:
    ids = await enqueue(gateway, len(bodies))
    jobs = {job.job_id: job for job in await claim(worker, len(bodies))}
    completions = [
        Completion(job_id, jobs[job_id].fence, "acme", "succeeded", status, header, body)
        for job_id, status, header, body in zip(ids, statuses, headers, bodies, strict=False)
    ]
    await RelayDispatchRepository(worker).complete_many(RELAY, completions, claimed_by=ME)
    results = await RelayDispatchRepository(gateway, "acme").poll_many(ids)
    for job_id, status, header, body in zip(ids, statuses, headers, bodies, strict=False):
        result = results[job_id]
        assert not isinstance(result, Exception)
        assert (result.response_status, result.response_headers, result.response_body) == (status, header, body)
