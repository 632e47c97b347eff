"""Claims: the order, the limits, one owner each, nothing of a job that may not run, and what becomes of lost leases."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import anyio
import asyncpg
import pytest

from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK, JOB, KIND
from tests.support.high_counters import nth
from tests.support.protocol import TENANT, Connection, connected


@pytest.mark.invariant("I5")
async def test_chunks_come_by_priority_then_age_then_number_over_all_jobs_of_the_kinds(
    gateway: Connection, worker: Connection
) -> None:
    late, urgent, other, early = uuid4(), uuid4(), uuid4(), uuid4()
    await durable.submit(gateway, 2, job_id=early)
    await durable.submit(gateway, 2, job_id=late, kind="export")
    await durable.submit(gateway, 1, job_id=urgent, priority=5, kind="export")
    await durable.submit(gateway, 1, job_id=other, kind="nobody's")
    leases = await durable.claim(worker, 3, kinds=[KIND, "export"])
    assert [(lease.job_id, lease.seq) for lease in leases] == [(urgent, 1), (early, 1), (early, 2)]
    assert [lease.row["params"] for lease in leases] == ["{}", "{}", None], "once for each job"
    assert await durable.claim(worker, 3) == []
    leases = await durable.claim(worker, 9, kinds=[KIND, "export"])
    assert [(lease.job_id, lease.seq) for lease in leases] == [(late, 1), (late, 2)]
    assert await durable.status(gateway, early) == "running"
    assert await durable.status(gateway, other) == "queued"


async def test_of_jobs_that_are_named_with_a_number_only_chunks_above_it_are_claimed(
    gateway: Connection, worker: Connection
) -> None:
    large, other = await durable.submit(gateway, 6), await durable.submit(gateway, 2)
    leases = await durable.claim(worker, 3, after={large: 4})
    assert [(lease.job_id, lease.seq) for lease in leases] == [(large, 5), (large, 6), (other, 1)]
    assert [lease.seq for lease in await durable.claim(worker, 9, after={large: 6})] == [2]
    assert [lease.seq for lease in await durable.claim(worker, 9, after={other: 2})] == [1, 2, 3, 4]


async def test_each_kind_and_each_tenant_has_its_share(gateway: Connection, worker: Connection) -> None:
    for tenant in ("a", "b", "c"):
        await durable.submit(gateway, 10, tenant=tenant)
        await durable.submit(gateway, 10, tenant=tenant, kind="export")
    leases = await durable.claim(worker, 12, tenants=["a", "b", "c"], kinds=[KIND, "export"], start=1)
    assert Counter(lease.row["tenant_id"] for lease in leases) == {"a": 4, "b": 4, "c": 4}
    assert leases[0].row["tenant_id"] == "b"
    leases = await durable.claim(worker, 10, tenants=["a"], kinds=[KIND, "export"], limits=[1, 3])
    assert Counter(lease.row["kind"] for lease in leases) == {KIND: 1, "export": 3}
    leases = await durable.claim(worker, 10, tenants=["a"], kinds=[KIND, "export"], limits=[0, 1])
    assert [lease.row["kind"] for lease in leases] == ["export"]


async def test_no_claim_gets_more_than_its_limit_or_what_another_has_under_its_hands(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    """C12; and a claim whose transaction is open holds up nobody."""
    job_id = await durable.submit(gateway, 10)
    async with connected(database.worker_dsn) as other:
        transaction = other.transaction()
        await transaction.start()
        held = await durable.claim(other, 3)
        assert [lease.seq for lease in held] == [1, 2, 3]
        assert [lease.seq for lease in await durable.claim(worker, 2)] == [4, 5]
        assert [lease.seq for lease in await durable.claim_next(worker, job_id, 2)] == [6, 7]
        await transaction.rollback()
    assert [lease.seq for lease in await durable.claim(worker, 9)] == [1, 2, 3, 8, 9, 10]
    # Whoever was about to start the job has not; so the next one did.
    told = await durable.told(gateway, job_id)
    assert told == ["submitted", *["chunk_claimed"] * 2, "started", "chunk_claimed"]


async def test_a_job_is_started_once_however_many_claim_at_once(database: TestDatabase, gateway: Connection) -> None:
    for _ in range(10):
        job_id = await durable.submit(gateway, 4)
        seqs: list[int] = []

        async def one(job_id: UUID = job_id, seqs: list[int] = seqs) -> None:
            async with connected(database.worker_dsn) as conn:
                seqs += [lease.seq for lease in await durable.claim_next(conn, job_id)]

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(one)
        assert len(seqs) == len(set(seqs))
        told = await durable.told(gateway, job_id)
        assert told.count("started") == 1
        assert await durable.status(gateway, job_id) == "running"


@pytest.mark.case("C18")
async def test_a_claim_whose_reply_was_lost_is_found_by_its_token_within_its_lease(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await durable.submit(gateway, 3)
    token = uuid4()
    first = await durable.claim(worker, 2, token=token)
    again = "select * from relay.durable_claim_again($1, $2)"
    rows = await worker.fetch(again, [TENANT], token)
    names = ("tenant_id", "job_id", "seq", "payload", "lease_version", "attempts", "lease_expires_at")
    assert [[row[name] for name in names] for row in rows] == [[lease.row[name] for name in names] for lease in first]
    await durable.complete(worker, first[0])
    assert [row["seq"] for row in await worker.fetch(again, [TENANT], token)] == [2]
    assert await worker.fetch(again, [TENANT], uuid4()) == []
    await durable.run_out(admin)
    assert await worker.fetch(again, [TENANT], token) == []


@pytest.mark.case("C22")
async def test_a_lease_begins_when_it_is_granted_and_not_when_the_transaction_did(
    gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 2)
    now, whole = "select clock_timestamp()", timedelta(seconds=30)
    async with worker.transaction():
        await worker.execute("select pg_sleep(0.1)")
        asked = await worker.fetchval(now)
        lease = await durable.claim_chunk(worker, job_id, 1, nth(0), lease=30)
        assert lease is not None
        assert lease.row["lease_expires_at"] >= asked + whole
        await worker.execute("select pg_sleep(0.1)")
        asked = await worker.fetchval(now)
        assert await durable.heartbeat(worker, lease, lease=30) == ["applied"]
        again = "select lease_expires_at from relay.durable_claim_again($1, $2)"
        assert await worker.fetchval(again, [TENANT], lease.token) >= asked + whole


@pytest.mark.case("C21")
async def test_a_chunk_that_kills_its_worker_is_counted_and_ends_and_the_others_go_on(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 2, max_attempts=3)
    for attempt in (1, 2, 3):
        leases = await durable.claim_next(worker, job_id, 2)
        assert leases[0].row["attempts"] == attempt
        if attempt == 1:
            await durable.complete(worker, leases[1])
        await durable.run_out(admin)
        (reaped,) = await durable.reap(worker)
        assert (reaped["status"], reaped["attempts"]) == ("failed" if attempt == 3 else "retry", attempt)
    assert await durable.finish(worker, job_id) == [("completed_with_errors", True)]
    (_, dead) = sorted(await durable.chunks(gateway, job_id), key=lambda c: c["status"] == "failed")
    assert dead["last_error"].startswith("S2R-LEASE-LOST")
    assert (await durable.told(gateway, job_id))[-3:] == ["chunk_reaped", "chunk_failed", "completed"]


async def test_a_released_chunk_has_its_attempt_back_and_its_checkpoint_still(
    gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 1, max_attempts=1)
    for _ in range(5):
        (lease,) = await durable.claim_next(worker, job_id)
        assert lease.row["attempts"] == 1
        await durable.checkpoint(worker, lease, {"at": 5}, rows_done=5)
        assert await durable.release(worker, lease) == ["applied"]
        assert await durable.release(worker, lease) == ["stale"]
    (row,) = await durable.chunks(gateway, job_id)
    assert (row["attempts"], row["checkpoint"], row["rows_done"], row["claimed_by"]) == (0, '{"at": 5}', 5, None)


@pytest.mark.invariant("J4")
async def test_a_chunk_that_may_not_run_twice_waits_for_a_person_with_the_evidence(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Before max_attempts: that it has some left is no reason to run it again."""
    job_id = await durable.submit(gateway, 2, idempotent=False, max_attempts=9)
    (lease, other) = await durable.claim_next(worker, job_id, 2)
    await durable.checkpoint(worker, lease, {"at": 7})
    await durable.complete(worker, other)
    await durable.run_out(admin)
    (reaped,) = await durable.reap(worker)
    assert reaped["status"] == "needs_review"
    assert await durable.claim(worker) == []
    assert await durable.finish(worker, job_id) == [("needs_review", True)]
    (event,) = [e for e in (await durable.events(gateway, job_id))[0] if e["type"] == "chunk_needs_review"]
    assert (event["seq"], event["holder"], event["actor"]) == (1, durable.HOLDER, "reaper")
    assert '"checkpoint": {"at": 7}' in event["detail"]
    assert '"attempt": 1' in event["detail"]
    answer = await durable.resolve(gateway, job_id, 1, "retry")
    assert (answer["outcome"], answer["status"]) == ("applied", "running")
    (again,) = await durable.claim(worker)
    assert (again.row["checkpoint"], again.row["attempts"]) == ('{"at": 7}', 1)
    await durable.complete(worker, again)
    assert await durable.finish(worker, job_id) == [("completed", True)]
    resolved = (await durable.events(gateway, job_id))[0][-3]
    assert (resolved["type"], resolved["actor"]) == ("resolved", "bob")


@pytest.mark.parametrize(("decision", "status"), [("done", "completed"), ("failed", "failed")])
async def test_a_decision_about_the_last_chunk_ends_the_job(
    admin: Connection, gateway: Connection, worker: Connection, decision: str, status: str
) -> None:
    job_id = await durable.submit(gateway, 1, idempotent=False)
    await durable.claim(worker)
    await durable.run_out(admin)
    await durable.reap(worker)
    assert await durable.finish(worker, job_id) == [("needs_review", True)]
    answer = await durable.resolve(gateway, job_id, 1, decision)
    assert (answer["outcome"], answer["chunk_status"], answer["status"]) == ("applied", decision, status)
    assert await durable.counters_are_exact(admin, job_id)


async def test_a_retry_waits_for_its_time_and_the_claim_tells_how_long(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 1)
    (lease,) = await durable.claim(worker)
    assert await durable.fail(worker, lease, delay=60) == "retry"
    rows = await worker.fetch(
        "select * from relay.durable_claim($1, $2, null, 5, 'me', $3, '30 s')", [TENANT], [KIND], uuid4()
    )
    assert [row["outcome"] for row in rows] == ["waiting"]
    assert 50 < rows[0]["wait"].total_seconds() <= 60
    assert await durable.claim_chunk(worker, job_id, 1, lease.version + 1) is None
    assert await durable.finish(worker, job_id) == [("running", False)]
    await admin.execute(f"update {CHUNK} set available_at = now()")
    (again,) = await durable.claim(worker)
    assert again.row["attempts"] == 2
    for delay in (-1, 10**10):
        with pytest.raises(asyncpg.PostgresError) as raised:
            await durable.fail(worker, again, delay=delay)
        assert raised.value.sqlstate == "S2021"


async def test_without_skip_locked_claims_the_same_chunks_are_claimed_one_by_one(
    gateway: Connection, worker: Connection
) -> None:
    await durable.submit(gateway, 2)
    await durable.submit(gateway, 1, priority=1, kind="export")
    rows = await worker.fetch("select * from relay.durable_candidates($1, $2, 10)", TENANT, [KIND, "export"])
    assert [row["seq"] for row in rows] == [1, 1, 2]
    for row in rows:
        assert await durable.claim_chunk(worker, *row) is not None
        assert await durable.claim_chunk(worker, *row) is None
    assert await worker.fetch("select * from relay.durable_candidates($1, $2, 10)", TENANT, [KIND, "export"]) == []


@pytest.mark.invariant("J2")
async def test_exactly_once_a_lost_lease_rolls_back_what_its_holder_wrote_in_the_same_transaction(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    await admin.execute("create table public.t (n bigint); grant insert, select on public.t to public")
    job_id = await durable.submit(gateway, 1)
    (lost,) = await durable.claim(worker)
    await durable.run_out(admin)
    await durable.reap(worker)
    (lease,) = await durable.claim(worker)
    # It cannot commit, even by somebody who does not look.
    transaction = worker.transaction()
    await transaction.start()
    await worker.execute("insert into public.t values (1)")
    with pytest.raises(asyncpg.PostgresError):
        await durable.complete(worker, lost)
    with pytest.raises(asyncpg.InFailedSQLTransactionError):
        await worker.execute("insert into public.t values (1)")
    await transaction.rollback()
    async with worker.transaction():
        await worker.execute("insert into public.t values (2)")
        assert await durable.complete(worker, lease, rows_done=1) == ("applied", True)
    assert await durable.complete(worker, lease) == ("repeated", True), "its reply was lost"
    assert [r[0] for r in await admin.fetch("select n from public.t")] == [2]
    assert await durable.finish(worker, job_id) == [("completed", True)]


@pytest.mark.invariant("J5")
async def test_counters_are_those_of_the_chunks_and_a_tampered_row_is_put_right(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 6, rows=100)
    leases = await durable.claim(worker, 5)
    await durable.complete(worker, leases[0], rows_done=99, rows_failed=1)
    await durable.fail(worker, leases[1], retryable=False)
    await durable.fail(worker, leases[2])
    await durable.heartbeat(worker, leases[3], rows_done=[40])
    fresh = await durable.job(gateway, job_id)
    await admin.execute(f"update {JOB} set chunks_done = 77, rows_done = -1, chunks_running = 3")
    (row,) = await gateway.fetch("select * from relay.durable_refresh_counters($1, $2)", TENANT, job_id)
    assert fresh is not None
    names = [name for name in dict(row) if name.startswith(("rows_", "chunks_"))]
    assert [row[name] for name in names] == [fresh[name] for name in names]
    assert (row["rows_done"], row["rows_failed"], row["chunks_done"], row["chunks_retry"]) == (139, 1, 1, 1)
    assert await durable.counters_are_exact(admin, job_id)


async def test_row_errors_said_again_replace_what_was_said(gateway: Connection, worker: Connection) -> None:
    job_id = await durable.submit(gateway, 2)
    lease, other = await durable.claim(worker, 2)
    errors: list[dict[str, Any]] = [{"row": n, "code": "bad", "message": "first", "data": {"n": n}} for n in (1, 2, 3)]
    assert await durable.tell_errors(worker, lease, errors) == 3
    assert await durable.tell_errors(worker, other, errors[:1]) == 1
    errors[0]["message"] = "again"
    assert await durable.tell_errors(worker, lease, [errors[0], {**errors[0], "code": "worse"}, errors[0]]) == 2
    page = "select * from relay.durable_row_errors($1, $2, 2, $3, $4, $5)"
    rows, after = [], (0, -1, "")
    while batch := await gateway.fetch(page, TENANT, job_id, *after):
        rows += batch
        after = (batch[-1]["seq"], batch[-1]["row_no"], batch[-1]["code"])
    assert [(r["seq"], r["row_no"], r["code"], r["message"]) for r in rows] == [
        (1, 1, "bad", "again"), (1, 1, "worse", "again"), (1, 2, "bad", "first"), (1, 3, "bad", "first"),
        (2, 1, "bad", "first"),
    ]  # fmt: skip
    assert rows[0]["data"] == '{"n": 1}'


async def test_a_query_takes_allowed_columns_and_operators_and_goes_on_where_it_stopped(
    gateway: Connection, worker: Connection
) -> None:
    ids = [await durable.submit(gateway, 3, priority=n) for n in range(4)]
    query = "select * from relay.durable_query($1, $2, $3, $4, $5, $6)"
    jobs = await gateway.fetch(query, TENANT, "job", '[{"column": "priority", "op": ">=", "value": 2}]', None, None, 10)
    assert len(jobs) == 2
    (lease,) = await durable.claim_next(worker, ids[0])
    await durable.complete(worker, lease)
    pending = '[{"column": "status", "op": "in", "value": ["pending", "retry"]}]'
    seen, after = [], None
    while batch := await gateway.fetch(query, TENANT, "chunk", pending, ids[0], after, 1):
        seen += batch
        after = batch[-1]["after"]
    assert len(seen) == 2
    young = (
        '[{"column": "created_at", "op": ">", "value": "2020-01-01T00:00:00Z"}, {"column": "actor", "op": "is_null"}]'
    )
    assert len(await gateway.fetch(query, TENANT, "event", young.replace("created_at", "at"), ids[0], None, 10)) == 2
    for table, column, op in (("job", "params", "="), ("job", "tenant_id", "="), ("chunk", "payload", "="),
                              ("chunk", "seq", "like"), ("secret", "seq", "="), ("event", "1; drop", "=")):  # fmt: skip
        with pytest.raises(asyncpg.PostgresError) as raised:
            await gateway.fetch(
                query, TENANT, table, f'[{{"column": "{column}", "op": "{op}", "value": 1}}]', None, None, 10
            )
        assert raised.value.sqlstate == "S2020"
