"""Edges of claims: beside a pause that is under way, among retries of which one is due; and how many are taken back."""

from __future__ import annotations

from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK
from tests.support.protocol import Connection


async def test_nothing_is_claimed_of_a_job_whose_pause_is_under_way_and_nobody_waits_for_it(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 2)
    assert len(await durable.claim_next(worker, job_id)) == 1
    # Who waits is not to wait for ever.
    await worker.execute("set statement_timeout = '20s'")
    async with gateway.transaction():
        assert (await durable.control(gateway, job_id, "pause"))["outcome"] == "applied"
        assert await durable.claim_next(worker, job_id) == []
        assert await durable.claim(worker, 2) == []
    assert await durable.claim_next(worker, job_id) == []
    await durable.control(gateway, job_id, "resume")
    assert len(await durable.claim_next(worker, job_id)) == 1


async def test_of_two_retries_the_one_that_is_due_is_claimed_and_the_other_waits(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 2)
    for lease in await durable.claim(worker, 2):
        assert await durable.fail(worker, lease, delay=3600) == "retry"
    await admin.execute(f"update {CHUNK} set available_at = now() - interval '1 s' where seq = 2")
    assert [lease.seq for lease in await durable.claim(worker, 2)] == [2]
    assert await durable.states(gateway, job_id) == ["retry", "running"]


async def test_a_reaper_takes_no_more_than_its_limit_over_all_jobs(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    for _ in range(2):
        await durable.submit(gateway, 2)
    assert len(await durable.claim(worker, 4)) == 4
    await durable.run_out(admin)
    assert [len(await durable.reap(gateway, 3)) for _ in range(3)] == [3, 1, 0]
