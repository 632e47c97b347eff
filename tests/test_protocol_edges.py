"""Calls at the edges: nothing to do, no tenant, '' for a tenant, names and times that cannot be, large results."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from dispatch_core import (
    Completion,
    DispatchRequest,
    DispatchResult,
    InvalidDeadlineError,
    InvalidInputError,
    InvalidNameError,
    InvalidResultError,
    PutBack,
    RelayDispatchRepository,
    TenancyUnboundError,
)
from dispatch_core.ids import new_id

Connection: TypeAlias = "asyncpg.Connection[Any]"


@pytest.mark.case("C39")
async def test_a_call_with_nothing_to_do_raises_unbound_as_any_other(gateway: Connection, worker: Connection) -> None:
    ours, theirs = RelayDispatchRepository(gateway), RelayDispatchRepository(worker)
    for call in (
        ours.enqueue_many([]),
        ours.poll_many([]),
        ours.now(),
        theirs.heartbeat("erp", [], claimed_by="i"),
        theirs.complete_many("erp", [], claimed_by="i"),
        theirs.retry("erp", [], claimed_by="i"),
        theirs.release("erp", [], claimed_by="i"),
        # Of a session that is younger than its lease, which reclaims nothing yet.
        theirs.reclaim("erp", lease_seconds=3600),
    ):
        with pytest.raises(TenancyUnboundError):
            await call


@pytest.mark.case("C39")
async def test_an_empty_tenant_beside_a_claim_is_no_tenant_and_not_the_repositorys(
    gateway: Connection, worker: Connection
) -> None:
    job_id = await RelayDispatchRepository(gateway, "acme").enqueue("erp", "Get")
    acme = RelayDispatchRepository(worker, "acme")
    fence = (await acme.claim("erp", claimed_by="i")).jobs[0].fence
    for call in (
        acme.heartbeat("erp", [("", job_id, fence)], claimed_by="i"),
        acme.complete_many("erp", [Completion(job_id, fence, "")], claimed_by="i"),
        acme.retry("erp", [PutBack(job_id, fence, "")], claimed_by="i"),
        acme.release("erp", [("", job_id, fence, True)], claimed_by="i"),
    ):
        with pytest.raises(TenancyUnboundError):
            await call
    assert await acme.complete(job_id, "erp", fence, "i") == 1


async def test_names_and_leases_that_cannot_be_are_refused_before_any_sql(worker: Connection) -> None:
    acme = RelayDispatchRepository(worker, "acme")
    await worker.close()
    for name in ("", "r\0", "\ud800", "r" * 201):
        with pytest.raises(InvalidNameError):
            await acme.claim(name, claimed_by="i")
        with pytest.raises(InvalidNameError):
            await acme.complete(new_id(), name, 1, "i")
        with pytest.raises(InvalidNameError):
            await acme.heartbeat("erp", [(None, new_id(), 1)], claimed_by=name)
    for seconds in (0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidDeadlineError):
            await acme.claim("erp", claimed_by="i", lease_seconds=seconds)
    with pytest.raises(InvalidDeadlineError):
        await acme.purge(math.nan)
    with pytest.raises(InvalidResultError):
        await acme.complete(new_id(), "erp", 1, "i", response_body=bytes(8 * 1024 * 1024 + 1))


async def test_a_delay_that_reaches_the_deadline_is_refused(gateway: Connection, admin: Connection) -> None:
    acme = RelayDispatchRepository(gateway, "acme")
    for request in (
        DispatchRequest("erp", "Get", ttl=1, delay=1),
        DispatchRequest("erp", "Get", delay=300),
        DispatchRequest("erp", "Get", expires_at=datetime.now(UTC) + timedelta(seconds=30), delay=60),
    ):
        with pytest.raises(InvalidDeadlineError):
            await acme.enqueue_many([request])
    with pytest.raises(InvalidInputError):
        await acme.enqueue_many([{"relay_id": "erp"}])  # type: ignore[list-item]
    assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_request") == 0


async def test_large_results_come_in_pages_of_bounded_size_from_the_first_poll_on(
    gateway: Connection, worker: Connection
) -> None:
    acme, relay = RelayDispatchRepository(gateway, "acme"), RelayDispatchRepository(worker, "acme")
    ids = await acme.enqueue_many([DispatchRequest("erp", "Get") for _ in range(12)])
    jobs = (await relay.claim("erp", claimed_by="i", limit=11)).jobs
    body = bytes(100_000)
    await relay.complete_many("erp", [Completion(j.job_id, j.fence, response_body=body) for j in jobs], claimed_by="i")

    left, pages, seen = ids, 0, 0
    while left:
        answers, left = await acme.poll_page(left, batch_limit_bytes=250_000)
        sizes = [len(a.response_body or b"") for a in answers.values() if isinstance(a, DispatchResult)]
        # The limit, and the one result that reaches beyond it.
        assert 0 < sum(sizes) < 350_001 or not left
        pages, seen = pages + 1, seen + len(answers)
    # The job that has not ended weighs nothing and came with the first page.
    assert (pages, seen) == (4, 12)
    answers = await acme.poll_many(ids)
    assert sum(isinstance(a, DispatchResult) and a.response_body == body for a in answers.values()) == 11


async def test_a_login_makes_turns_for_known_sweeps_only(worker: Connection, admin: Connection) -> None:
    for name in ("anything", "expire-", ":erp", ""):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await worker.fetchval("select relay.sweep_turn($1, interval '1 s')", name)
        assert refused.value.sqlstate == "S2020"
    assert await worker.fetchval("select relay.sweep_turn('expire:erp', interval '1 s')")
    assert await admin.fetchval("select count(*) from relay.sweep") == 1
