"""Large inputs of the durable room, in one call each, and updates that touch no index."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest

from tests.support import durable
from tests.support.durable import CHUNK, JOB, ROW_ERROR
from tests.support.protocol import TENANT, Connection


async def test_ten_thousand_chunks_in_one_call_and_their_cancellation_in_another(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 10_000, rows=200)
    assert await durable.counters_are_exact(admin, job_id)
    leases = await durable.claim(worker, 1000)
    assert [lease.seq for lease in leases] == list(range(1, 1001))
    assert await durable.heartbeat(worker, *leases) == ["applied"] * 1000
    assert await durable.complete_many(worker, *leases[:500]) == ["applied"] * 500
    answer = await durable.control(gateway, job_id, "cancel")
    assert (answer["outcome"], answer["chunks"], answer["running"]) == ("applied", 9500, 0)
    assert await durable.heartbeat(worker, *leases[500:]) == ["stale"] * 500
    assert await durable.counters_are_exact(admin, job_id)


async def test_ten_thousand_leases_that_ran_out_are_taken_back_in_bounded_batches(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 10_000)
    assert len(await durable.claim(worker, 10_000)) == 10_000
    await durable.run_out(admin)
    taken = []
    while rows := await durable.reap(worker, 2500):
        taken.append(len(rows))
    assert taken == [2500] * 4
    assert set(await durable.states(gateway, job_id)) == {"retry"}


@pytest.mark.case("C38")
async def test_forty_thousand_row_errors_in_one_call_and_again(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 1)
    (lease,) = await durable.claim(worker)
    big = 2**40  # row numbers are bigint
    errors = [{"row": big + n, "code": "bad", "message": "not a number", "data": {"n": n}} for n in range(40_000)]
    for _ in range(2):
        assert await durable.tell_errors(worker, lease, errors) == 40_000
    assert await admin.fetchval(f"select count(*) from {ROW_ERROR}") == 40_000
    page = await gateway.fetch("select * from relay.durable_row_errors($1, $2, 3, 1, $3)", TENANT, job_id, big + 39_990)
    assert [row["row_no"] for row in page] == [big + n for n in (39_990, 39_991, 39_992)]


async def test_heartbeats_and_checkpoints_are_hot(admin: Connection, gateway: Connection, worker: Connection) -> None:
    """No index holds what they write, and the pages have room for them."""
    await admin.execute(f"alter table {CHUNK} set (autovacuum_enabled = off)")
    await durable.submit(gateway, 500)
    leases = await durable.claim(worker, 500)
    await admin.execute(f"vacuum {CHUNK}")
    await worker.fetchval("select pg_stat_force_next_flush()")
    await worker.fetchval("select 1")
    before = await _updates(admin)
    for start in range(0, 500, 100):
        assert await durable.heartbeat(worker, *leases[start : start + 100]) == ["applied"] * 100
    for lease in leases[:200]:
        await durable.checkpoint(worker, lease, {"at": 1, "note": "x" * 100}, rows_done=5, renew=30)
    await worker.fetchval("select pg_stat_force_next_flush()")
    await worker.fetchval("select 1")
    after = await _updates(admin)
    updates, hot = after[0] - before[0], after[1] - before[1]
    assert updates == 700
    assert hot > 0.95 * updates, (hot, updates)


async def _updates(admin: Connection) -> tuple[int, int]:
    await admin.fetchval("select pg_stat_clear_snapshot()")
    row = await admin.fetchrow(
        "select pg_stat_get_tuples_updated($1::regclass), pg_stat_get_tuples_hot_updated($1::regclass)", CHUNK
    )
    assert row is not None
    return row[0], row[1]


async def test_counters_of_a_job_change_nothing_that_is_indexed(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 10)
    size = await admin.fetchval("select pg_relation_size('relay.durable_job_open')")
    for _ in range(200):
        await gateway.fetch("select * from relay.durable_refresh_counters($1, $2)", TENANT, job_id)
    assert await admin.fetchval("select pg_relation_size('relay.durable_job_open')") == size
    assert await admin.fetchval(f"select pg_relation_size('{JOB}')") <= 5 * 8192


async def test_what_json_can_hold_comes_back_as_it_was(gateway: Connection, worker: Connection) -> None:
    job_id = uuid4()
    payload = '{"n": 123456789012345678901234567890.000000001, "s": "ünï\\ud83d\\ude00", "deep": [[[{}]]]}'
    async with gateway.transaction():
        await gateway.fetchval(
            "select relay.durable_insert_job($1, $2, 'k', $3, true, 1, 0, null)", TENANT, job_id, payload
        )
        await gateway.fetchval(
            "select relay.durable_insert_chunks($1, $2, $3)", TENANT, job_id, f'[{{"payload": {payload}}}]'
        )
    (lease,) = await durable.claim(worker, kinds=["k"])
    assert json.loads(lease.row["payload"]) == json.loads(payload)
    assert "123456789012345678901234567890.000000001" in lease.row["payload"]
    assert lease.row["payload"] == lease.row["params"]
