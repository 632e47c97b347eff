"""A job becomes visible whole or not at all; what a submitter that died leaves is never seen, and goes."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.support import durable
from tests.support.durable import CHUNK, EVENT, JOB, KIND, ROW_ERROR
from tests.support.protocol import TENANT, Connection, connected


async def _insert_job(gateway: Connection, job_id: UUID, *, kind: str = KIND, submitting: bool = True) -> bool:
    stored: bool = await gateway.fetchval(
        "select relay.durable_insert_job($1, $2, $3, '{}', true, 3, 0, 'alice', $4)", TENANT, job_id, kind, submitting
    )
    return stored


async def _insert_chunks(gateway: Connection, job_id: UUID, payloads: list[Any], first: int | None) -> int:
    chunks = json.dumps([{"payload": payload, "rows": 10} for payload in payloads])
    count: int = await gateway.fetchval(
        "select relay.durable_insert_chunks($1, $2, $3, $4)", TENANT, job_id, chunks, first
    )
    return count


async def _seal(gateway: Connection, job_id: UUID, chunks: int | None = None) -> str:
    status: str = await gateway.fetchval("select relay.durable_seal($1, $2, $3)", TENANT, job_id, chunks)
    return status


async def _seen(gateway: Connection, worker: Connection, job_id: UUID) -> list[Any]:
    """Ask everything that could show the job."""
    return [
        await durable.job(gateway, job_id),
        *await durable.chunks(gateway, job_id),
        *(await durable.events(gateway, job_id))[0],
        *await gateway.fetch("select * from relay.durable_row_errors($1, $2, 10)", TENANT, job_id),
        *[
            row
            for table in ("job", "chunk", "row_error", "event")
            for row in await gateway.fetch("select * from relay.durable_query($1, $2, '[]', $3)", TENANT, table, job_id)
        ],
        *await durable.claim(worker),
        *await durable.claim_next(worker, job_id),
        await durable.claim_chunk(worker, job_id, 1, 0),
        *await worker.fetch("select * from relay.durable_candidates($1, $2, 10)", TENANT, [KIND]),
        *await worker.fetch("select * from relay.durable_tenants()"),
        *await durable.finish(worker, job_id),
        *await worker.fetch("select * from relay.durable_finish_lost($1, 10)", TENANT),
        *await gateway.fetch("select * from relay.durable_refresh_counters($1, $2)", TENANT, job_id),
        *[
            outcome
            for action in ("pause", "resume", "cancel", "retry_failed")
            if (outcome := (await durable.control(gateway, job_id, action))["outcome"]) != "unknown"
        ],
        await gateway.fetchval("select relay.durable_update_job($1, $2, '{}')", TENANT, job_id) or None,
        await gateway.fetchval(
            "select relay.durable_set_chunk_statuses($1, $2, '{pending}', 'cancelled')", TENANT, job_id
        )
        or None,
        await gateway.fetchval(
            "select relay.durable_record_event($1, $2, null, 'note', 'a', 'c', 'h', null)", TENANT, job_id
        )
        or None,
    ]


@pytest.mark.invariant("J1")
async def test_a_job_in_the_making_is_hidden_from_everything_until_it_is_sealed(
    gateway: Connection, worker: Connection, admin: Connection
) -> None:
    job_id = uuid4()
    assert await _insert_job(gateway, job_id) is True
    assert await _insert_chunks(gateway, job_id, ["a", "b"], 1) == 2
    assert not any(await _seen(gateway, worker, job_id))
    assert await _insert_chunks(gateway, job_id, ["c"], None) == 1
    assert not any(await _seen(gateway, worker, job_id))

    assert await _seal(gateway, job_id, 3) == "queued"
    found = await durable.job(gateway, job_id, fresh=False)
    assert found is not None
    assert (found["status"], found["chunks_total"], found["chunks_pending"], found["rows_total"]) == (
        "queued",
        3,
        3,
        30,
    )
    assert await durable.counters_are_exact(admin, job_id)
    assert [(c["seq"], c["payload"]) for c in await durable.chunks(gateway, job_id)] == [
        (1, '"a"'),
        (2, '"b"'),
        (3, '"c"'),
    ]
    assert await durable.told(gateway, job_id) == ["submitted"]
    assert [lease.seq for lease in await durable.claim(worker, 9)] == [1, 2, 3]


async def test_each_step_can_be_sent_again_after_a_lost_reply(gateway: Connection, worker: Connection) -> None:
    job_id = uuid4()
    for stored in (True, False):
        assert await _insert_job(gateway, job_id) is stored
    for count in (2, 0):
        assert await _insert_chunks(gateway, job_id, ["a", "b"], 1) == count
    for _ in range(2):
        assert await _seal(gateway, job_id, 2) == "queued"
    await durable.claim(worker)
    assert await _seal(gateway, job_id, 2) == "running", "told what it is now"
    assert await _insert_job(gateway, job_id) is False
    assert await durable.told(gateway, job_id) == ["submitted", "started", "chunk_claimed"]
    with pytest.raises(asyncpg.PostgresError) as raised:
        await _insert_job(gateway, job_id, kind="another")
    assert raised.value.sqlstate == "S2010"


async def test_a_seal_that_misses_a_batch_is_refused(gateway: Connection) -> None:
    job_id = uuid4()
    await _insert_job(gateway, job_id)
    await _insert_chunks(gateway, job_id, ["a"], 1)
    with pytest.raises(asyncpg.PostgresError) as raised:
        await _seal(gateway, job_id, 2)
    assert raised.value.sqlstate == "S2042"
    assert await durable.job(gateway, job_id) is None


async def test_a_job_without_chunks_is_completed_when_it_is_sealed(gateway: Connection) -> None:
    job_id = uuid4()
    await _insert_job(gateway, job_id)
    assert await _seal(gateway, job_id) == "completed"
    assert await durable.told(gateway, job_id) == ["submitted", "completed"]


@pytest.mark.invariant("J1")
@pytest.mark.invariant("I8")
async def test_in_the_callers_transaction_job_and_chunks_commit_together_or_never_were(
    gateway: Connection, worker: Connection, operator: Connection, admin: Connection
) -> None:
    job_id = uuid4()
    transaction = gateway.transaction()
    await transaction.start()
    await _insert_job(gateway, job_id, submitting=False)
    await _insert_chunks(gateway, job_id, ["a"], None)
    assert await durable.status(gateway, job_id) == "queued", "its own transaction sees it"
    assert await durable.job(operator, job_id) is None
    assert await durable.claim(worker) == []
    await transaction.rollback()
    assert await durable.job(gateway, job_id) is None
    for table in (JOB, CHUNK, EVENT):
        assert await admin.fetchval(f"select count(*) from {table}") == 0

    async with gateway.transaction():
        await _insert_job(gateway, job_id, submitting=False)
        await _insert_chunks(gateway, job_id, ["a"], None)
        async with gateway.transaction():
            await _insert_chunks(gateway, job_id, ["b"], None)
    assert await durable.states(operator, job_id) == ["pending"] * 2
    assert await durable.counters_are_exact(admin, job_id)


async def test_a_job_takes_chunks_until_it_has_ended(gateway: Connection, worker: Connection) -> None:
    job_id = await durable.submit(gateway, 1)
    assert await _insert_chunks(gateway, job_id, ["more"], None) == 1
    await durable.control(gateway, job_id, "cancel")
    for given, state in ((job_id, "S2042"), (UUID(int=7), "S2030")):
        with pytest.raises(asyncpg.PostgresError) as raised:
            await _insert_chunks(gateway, given, ["late"], None)
        assert raised.value.sqlstate == state
    for wrong in ("{}", "[1]", '[{"rows": 1}]', "null"):
        with pytest.raises(asyncpg.PostgresError) as raised:
            await gateway.fetchval("select relay.durable_insert_chunks($1, $2, $3)", TENANT, job_id, wrong)
        assert raised.value.sqlstate == "S2020", wrong


async def test_what_a_submitter_leaves_behind_goes_by_and_by_and_he_is_told_when_he_comes_back(
    gateway: Connection, worker: Connection, admin: Connection
) -> None:
    dead, alive, given_up = uuid4(), uuid4(), uuid4()
    for job_id in (dead, alive, given_up):
        await _insert_job(gateway, job_id)
        await _insert_chunks(gateway, job_id, list(range(25)), 1)
    await admin.execute(f"update {JOB} set updated_at = now() - interval '2 days' where job_id = $1", dead)
    assert await gateway.fetchval("select relay.durable_abandon($1, $2)", TENANT, given_up) is True
    assert await gateway.fetchval("select relay.durable_abandon($1, $2)", TENANT, given_up) is False

    assert await gateway.fetchval("select relay.durable_retire($1, null, '1 day', 100)", TENANT) == 1
    removed = []
    while (count := await gateway.fetchval("select relay.durable_remove($1, 10)", TENANT)) > 0:
        removed.append(count)
    assert sum(removed) == 2 * 26
    assert len(removed) > 4, "in bounded batches"
    assert [r[0] for r in await admin.fetch(f"select job_id from {JOB}")] == [alive]
    assert await admin.fetchval(f"select count(*) from {CHUNK}") == 25
    for job_id in (dead, given_up):
        for step in (_seal(gateway, job_id), _insert_chunks(gateway, job_id, ["x"], None)):
            with pytest.raises(asyncpg.PostgresError) as raised:
                await step
            assert raised.value.sqlstate == "S2030"
    assert await _seal(gateway, alive, 25) == "queued"


async def test_a_job_that_ended_long_ago_goes_whole_and_nobody_sees_a_part_of_it(
    gateway: Connection, worker: Connection, admin: Connection
) -> None:
    old, young = [await durable.submit(gateway, 20) for _ in range(2)]
    for job_id in (old, young):
        leases = await durable.claim_next(worker, job_id, 20)
        await durable.tell_errors(worker, leases[0], [{"row": n, "code": "c"} for n in range(30)])
        await durable.complete_many(worker, *leases)
        assert await durable.finish(worker, job_id) == [("completed", True)]
    await admin.execute(f"update {JOB} set ended_at = now() - interval '31 days' where job_id = $1", old)
    sweep = "select * from relay.durable_run_sweeps('me', 10, '0 s', '30 days', '1 day', '{null,null,1 us}')"
    assert await gateway.fetchval("select relay.durable_retire($1, '30 days', '1 day', 10)", TENANT) == 1
    assert not any(await _seen(gateway, worker, old))
    while rows := await gateway.fetch(sweep):
        assert {(row["sweep"], row["tenant_id"]) for row in rows} == {("remove", TENANT)}
    for table in (JOB, CHUNK, ROW_ERROR, EVENT):
        assert {r[0] for r in await admin.fetch(f"select distinct job_id from {table}")} == {young}, table


async def test_sealing_rings_relays_and_watchers_and_a_rollback_rings_nobody(
    database: Any, gateway: Connection, worker: Connection
) -> None:
    heard: list[tuple[str, str]] = []
    async with connected(database.worker_dsn) as relay, connected(database.gateway_dsn) as watcher:
        for conn, kind in ((relay, "durable"), (watcher, "durable_watch")):
            name = await conn.fetchval("select relay.channel($1, $2)", kind, TENANT)
            await conn.add_listener(name, lambda *args, kind=kind: heard.append((kind, args[-1])))
        job_id = uuid4()
        await _insert_job(gateway, job_id)
        await _insert_chunks(gateway, job_id, ["a"], 1)
        for _ in range(2):
            await relay.fetchval("select 1")
        assert heard == []
        transaction = gateway.transaction()
        await transaction.start()
        await _seal(gateway, job_id)
        await transaction.rollback()
        await _seal(gateway, job_id)
        for conn in (relay, watcher):
            await conn.fetchval("select 1")
        assert sorted(heard) == [("durable", ""), ("durable", job_id.hex), ("durable_watch", job_id.hex)]
        for conn in (gateway, worker):
            with pytest.raises(asyncpg.PostgresError) as raised:
                await conn.fetchval(
                    "select relay.channel($1, $2)", "durable" if conn is gateway else "durable_watch", TENANT
                )
            assert raised.value.sqlstate == "S2003"
