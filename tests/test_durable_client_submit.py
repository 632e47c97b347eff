"""Submitting durable jobs by the gateway's client: job and chunks together, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from dispatch_core.durable_models import JobStatus
from dispatch_core.settings import DurableJobsSettings
from tests.support.databases import TestDatabase
from tests.support.gateway import open_client
from tests.support.protocol import TENANT

SMALL = DurableJobsSettings(insert_batch=3)


async def slowly(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


@pytest.mark.parametrize("form", [list, iter, lambda items: slowly(*items)])
async def test_chunks_may_come_from_a_list_an_iterator_or_an_async_iterator(database: TestDatabase, form: Any) -> None:
    payloads = [{"n": n} for n in range(7)]
    async with open_client(database.gateway_dsn, durable=SMALL) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", form(payloads), params={"table": "t"}, created_by="alice", priority=2)
        job = await jobs.status(job_id)
        assert job is not None
        assert job.status is JobStatus.QUEUED
        assert (job.chunks_total, job.params, job.created_by, job.priority) == (7, {"table": "t"}, "alice", 2)
        assert [(c.seq, c.payload) async for c in jobs.chunks(job_id)] == [(n + 1, p) for n, p in enumerate(payloads)]
        assert [event.type async for event in jobs.events(job_id)] == ["submitted"]
        assert [j.job_id for j in await jobs.list(status="queued", kind="import")] == [job_id]
