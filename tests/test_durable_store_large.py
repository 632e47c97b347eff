"""The store of durable jobs: large inputs, in one call each (C38)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dispatch_core import ChunkStatus, RowError
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.protocol import Connection
from tests.support.stores import Stores, nothing_written, open_stores, refused

pytestmark = pytest.mark.case("C38")


@pytest.fixture
async def stores(database: TestDatabase) -> AsyncIterator[Stores]:
    async with open_stores(database) as stores:
        yield stores


async def test_ten_thousand_chunks_are_inserted_and_read_in_one_call_each(stores: Stores, admin: Connection) -> None:
    job_id = await stores.gateway.insert_job(durable.KIND)
    payloads = [{"file": "input.csv", "from": n * 200, "to": n * 200 + 200} for n in range(10_000)]
    assert await stores.gateway.insert_chunks(job_id, iter(payloads), from_seq=1) == 10_000
    chunks = await stores.gateway.get_chunks(job_id)
    assert [chunk.seq for chunk in chunks] == list(range(1, 10_001))
    assert [chunk.payload for chunk in chunks] == payloads
    assert await stores.gateway.set_chunk_statuses(job_id, "pending", "failed") == 10_000
    assert {chunk.status for chunk in await stores.gateway.refresh_counters(job_id)} == {ChunkStatus.FAILED}
    assert await durable.counters_are_exact(admin, job_id)


@pytest.mark.parametrize("joins", [False, True])
async def test_forty_thousand_row_errors_are_told_in_one_call(
    stores: Stores, worker: Connection, *, joins: bool
) -> None:
    lease = await stores.lease(1)
    errors = [RowError(n, "bad", f"row {n}: not a number", {"n": n}) for n in range(40_000)]
    if joins:
        async with worker.transaction():
            assert await stores.worker.record_row_errors(lease, errors, conn=worker) == 40_000
            await stores.worker.complete_chunk(lease, conn=worker)
    else:
        assert await stores.worker.record_row_errors(lease, errors) == 40_000
    found: list[RowError] = []
    while page := await stores.gateway.row_errors(lease.job_id, after=found[-1] if found else None, limit=9000):
        found.extend(page)
    assert [(error.row, error.data) for error in found] == [(error.row, error.data) for error in errors]


@pytest.mark.invariant("I3")
async def test_of_forty_thousand_row_errors_of_a_lost_lease_none_is_there(stores: Stores, admin: Connection) -> None:
    lease = await stores.lease(2)
    await durable.run_out(admin)
    errors = [RowError(n, "bad") for n in range(40_000)]
    async with nothing_written(admin):
        await refused(lambda: stores.worker.record_row_errors(lease, errors), lease)


async def test_a_payload_near_its_limit_goes_both_ways(stores: Stores, gateway: Connection) -> None:
    payload = {"text": "ü\\\n" * 170_000}
    async with gateway.transaction():
        job_id = await stores.gateway.insert_job(durable.KIND, payload, conn=gateway)
        await stores.gateway.insert_chunks(job_id, [payload], conn=gateway)
    claimed = await stores.claim(job_id)
    assert (claimed.payload, claimed.params) == (payload, payload)
