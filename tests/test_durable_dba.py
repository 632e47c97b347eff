"""What a hostile look at the durable room found: each of these was wrong once."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK, JOB, Lease
from tests.support.protocol import TENANT, Connection, connected
from tests.test_durable_states import HOLDERS, Stage, Verb, _put, _row

_SWEEP = "relay.durable_sweep_chunks(text, uuid, text[], text, text, bigint[], text, bigint, bigint)"


async def _state_of(connection: Connection, sql: str, *arguments: Any) -> str | None:
    try:
        await connection.fetch(sql, *arguments)
    except asyncpg.PostgresError as error:
        return error.sqlstate
    return None


async def test_nobody_is_shown_a_lease_token(gateway: Connection, worker: Connection, operator: Connection) -> None:
    """Whoever knew it could write as the holder."""
    job_id = await durable.submit(gateway, 1)
    (lease,) = await durable.claim(worker)
    for reader in (gateway, operator):
        rows = [
            *await durable.chunks(reader, job_id),
            *await reader.fetch("select item from relay.durable_query($1, 'chunk')", TENANT),
            *(await durable.events(reader, job_id))[0],
        ]
        assert rows
        assert not [row for row in rows if str(lease.token) in str(dict(row))]


async def test_a_handlers_transaction_holds_up_no_pause_by_way_of_who_waits_for_its_chunk(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await admin.execute(f"alter function {_SWEEP} set lock_timeout = '10ms'")
    job_id = await durable.submit(gateway, 3)
    lease, other = await durable.claim(worker, 2)
    async with connected(database.worker_dsn) as second, worker.transaction():
        await durable.checkpoint(worker, lease, {"at": 1})
        assert await durable.claim_chunk(second, job_id, 1, 0) is None
        moved = await gateway.fetchval(
            "select relay.durable_set_chunk_statuses($1, $2, '{running,pending}', 'retry')", TENANT, job_id
        )
        assert moved == 2, "all but the one that its holder has locked"
        assert (await durable.control(gateway, job_id, "pause"))["outcome"] == "applied"
    assert await durable.states(gateway, job_id) == ["running", "retry", "retry"]
    assert await durable.heartbeat(worker, lease, other) == ["applied", "stale"]


async def test_a_paused_job_whose_last_runner_died_before_he_could_end_it_ends(
    gateway: Connection, worker: Connection, admin: Connection
) -> None:
    job_id, waits = [await durable.submit(gateway, n) for n in (1, 2)]
    (lease,) = await durable.claim(worker)
    for one in (job_id, waits):
        await durable.control(gateway, one, "pause")
    await durable.complete(worker, lease)
    due = await worker.fetch("select * from relay.durable_tenants_due('finish', null, null)")
    assert [row["tenant_id"] for row in due] == [TENANT]
    rows = await worker.fetch("select * from relay.durable_finish_lost($1, 10)", TENANT)
    assert [(row["job_id"], row["status"]) for row in rows] == [(job_id, "completed")]
    assert await durable.status(gateway, waits) == "paused"
    assert await durable.counters_are_exact(admin, job_id)


async def test_jobs_are_removed_however_many_are_being_submitted(gateway: Connection, admin: Connection) -> None:
    make = "select relay.durable_insert_job($1, gen_random_uuid(), 'import', '{}', true, 3, 0, 'me', true)"
    await gateway.fetch(f"{make} from generate_series(1, 150)", TENANT)
    gone = uuid4()
    await gateway.fetchval(
        "select relay.durable_insert_job($1, $2, 'import', '{}', true, 3, 0, 'me', true)", TENANT, gone
    )
    await gateway.fetchval("select relay.durable_abandon($1, $2)", TENANT, gone)
    assert await gateway.fetchval("select relay.durable_remove($1, 10)", TENANT) == 1
    assert await admin.fetchval(f"select count(*) from {JOB} where job_id = $1", gone) == 0
    assert await admin.fetchval(f"select count(*) from {JOB}") == 150


async def test_a_job_that_was_completed_stays_so_whatever_is_decided_about_its_chunks(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 1)
    (lease,) = await durable.claim(worker)
    await durable.complete(worker, lease)
    assert await durable.finish(worker, job_id) == [("completed", True)]
    await gateway.fetchval("select relay.durable_set_chunk_statuses($1, $2, '{done}', 'needs_review')", TENANT, job_id)
    answer = await durable.resolve(gateway, job_id, 1, "retry")
    assert (answer["outcome"], answer["status"]) == ("refused", "completed")


async def test_a_job_that_was_cancelled_over_a_locked_chunk_is_counted_when_that_is_taken_back(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Whoever reaps may die before he calls finish, and a job that has ended is swept by nobody."""
    await admin.execute(f"alter function {_SWEEP} set lock_timeout = '10ms'")
    job_id = await durable.submit(gateway, 2)
    lease, given = await durable.claim(worker, 2)
    async with worker.transaction():
        await durable.checkpoint(worker, lease, 1)
        await durable.checkpoint(worker, given, 1)
        assert (await durable.control(gateway, job_id, "cancel"))["running"] == 2
    assert await durable.release(worker, given) == ["applied"]
    assert await durable.counters_are_exact(admin, job_id)
    await durable.run_out(admin)
    assert [row["status"] for row in await durable.reap(gateway)] == ["cancelled"]
    assert await durable.counters_are_exact(admin, job_id)


async def test_of_a_chunk_that_is_there_twice_the_first_that_is_the_holders_counts(
    gateway: Connection, worker: Connection
) -> None:
    await durable.submit(gateway, 3)
    one, two = await durable.claim(worker, 2)
    assert await durable.complete_many(worker, one.stale, one, two, one) == ["stale", "applied", "applied", "repeated"]
    (three,) = await durable.claim(worker)
    assert await durable.release(worker, three.stale, three, three) == ["stale", "applied", "stale"]


async def test_what_is_no_argument_is_said_to_be_none(gateway: Connection, worker: Connection) -> None:
    job_id = await durable.submit(gateway, 1)
    (lease,) = await durable.claim(worker)
    fence = [TENANT, *lease.fence]
    status = "select relay.durable_set_job_status($1, $2, '{running}', 'paused', $3::text::jsonb, $4::text::jsonb)"
    calls: list[tuple[Any, ...]] = [
        ("select relay.durable_checkpoint($1, $2, $3, $4, $5, '1', null, null, '-1 s')", *fence),
        ("select relay.durable_checkpoint($1, $2, $3, $4, $5, '1', null, null, '0 s')", *fence),
        ("select relay.durable_claim_next($1, null, 1, 'me', $2, '1 s')", TENANT, uuid4()),
        (status, TENANT, job_id, "{}", '{"actor": "me"}'),
        (status, TENANT, job_id, "{}", '{"type": ""}'),
        (status, TENANT, job_id, "{}", '{"type": "t", "seq": "x"}'),
        (status, TENANT, job_id, '{"priority": "high"}', None),
        (status, TENANT, job_id, '{"max_attempts": 0}', None),
    ]
    for sql, *arguments in calls:
        by = gateway if sql == status else worker
        assert await _state_of(by, sql, *arguments) == "S2020", (sql, arguments)
    for wrong in ('{"op": ">"}', '{"op": "=", "value": null}', '{"op": "in", "value": 3}', '{"op": "=", "value": [1]}'):
        found = f'[{{"column": "kind", {wrong[1:]}]'
        assert (
            await _state_of(gateway, "select * from relay.durable_query($1, 'job', $2::text::jsonb)", TENANT, found)
            == "S2020"
        )
    for rows in ('"many"', "-1", "1.5"):
        chunks = f'[{{"payload": 1, "rows": {rows}}}]'
        insert = "select relay.durable_insert_chunks($1, $2, $3::text::jsonb)"
        assert await _state_of(gateway, insert, TENANT, job_id, chunks) == "S2020", rows
    for kind in ("", "x" * 101):
        tell = "select relay.durable_record_event($1, $2, null, $3, null, null, null, null)"
        assert await _state_of(gateway, tell, TENANT, job_id, kind) == "S2020"


@pytest.mark.invariant("I3")
@pytest.mark.parametrize("verb", HOLDERS, ids=lambda verb: verb.__name__[1:])
async def test_what_a_holder_may_say_by_the_status_of_the_job(
    admin: Connection, gateway: Connection, worker: Connection, verb: Verb
) -> None:
    """The rest of the table. In a job that was cancelled it may be given back alone, and is cancelled then."""
    stage = Stage(admin, gateway, worker)
    said, then, refused = HOLDERS[verb]
    for state in ("queued", "running", "paused", "needs_review", "cancelled"):
        lease: Lease = await stage.chunk_in("running")
        await _put(admin, lease.job_id, state)
        before = await _row(admin, lease)
        answer = await verb(stage, lease)
        after = (await durable.states(gateway, lease.job_id))[0]
        if state != "cancelled":
            assert (answer, after) == (said, then), state
        elif verb.__name__.startswith("_release"):
            assert (answer, after) == (said, "cancelled")
        else:
            assert answer == refused
            assert await _row(admin, lease) == before


async def test_nothing_is_claimed_but_of_jobs_that_are_queued_or_running(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    for state in ("paused", "needs_review", "completed", "completed_with_errors", "failed", "cancelled"):
        job_id = await durable.submit(gateway, 1)
        await _put(admin, job_id, state)
        assert await durable.claim(worker) == [], state
        assert await durable.claim_next(worker, job_id) == [], state
        assert await durable.claim_chunk(worker, job_id, 1, 0) is None, state
        assert await durable.states(gateway, job_id) == ["pending"], state
    assert await durable.claim_next(worker, UUID(int=7)) == []
    assert await admin.fetchval(f"select count(*) from {CHUNK} where attempts > 0") == 0
