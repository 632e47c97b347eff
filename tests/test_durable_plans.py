"""Plans of the durable room that cannot go bad: the same access paths under every state of statistics (C14)."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatch_core.dev.logins import GATEWAY_LOGIN, WORKER_LOGIN
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK, EVENT, JOB, KIND, ROW_ERROR
from tests.support.plans import Connection, Explained, Recorder, explained
from tests.support.protocol import TENANT, connected

pytestmark = pytest.mark.case("C14")

BATCH = 20
_BIG = UUID(int=(7 << 76) | (2 << 62) | 1)


async def _fill(admin: Connection, chunks: int = 20_000) -> None:
    """A large job, half of it done; 2,000 that ended; 300 paused; 50 of which all chunks are under way."""
    await admin.execute(
        f"""
        insert into {JOB}
          (tenant_id, job_id, kind, params, idempotent, max_attempts, rank, job_seq, status, counted_at, chunks_total,
           created_at, updated_at, ended_at)
          select 'acme', case when i = 0 then '{_BIG}'::uuid else gen_random_uuid() end, '{KIND}', '{{}}', true, 99, 0,
                 case when i = 0 then 10000000 else i end,
                 case when i between 1 and 2000 then 'completed' when i between 2001 and 2300 then 'paused'
                      else 'running' end,
                 now(), 1, now(), now(), case when i between 1 and 2000 then now() - i * interval '1 s' end
          from generate_series(0, 2350) i;
        insert into {CHUNK}
          (tenant_id, job_id, seq, payload, status, attempts, lease_token, lease_expires_at, claimed_by, created_at,
           updated_at, ended_at)
          select 'acme', '{_BIG}', i, '1', case when i <= {chunks} / 2 then 'done' else 'pending' end, 1, null::uuid,
                 null::timestamptz, null, now(), now(), case when i <= {chunks} / 2 then now() end
          from generate_series(1, {chunks}) i;
        insert into {CHUNK}
          (tenant_id, job_id, seq, payload, status, attempts, lease_token, lease_expires_at, claimed_by, created_at,
           updated_at, ended_at)
          select 'acme', j.job_id, 1, '1',
                 case j.status when 'completed' then 'done' when 'paused' then 'pending' else 'running' end, 1,
                 case j.status when 'running' then gen_random_uuid() end,
                 case j.status when 'running' then now() + interval '1 hour' end, 'other', now(), now(),
                 case j.status when 'completed' then now() end
          from {JOB} j where j.job_id <> '{_BIG}';
        insert into {EVENT} (tenant_id, job_id, xid, n, at, type)
          select 'acme', '{_BIG}', pg_current_xact_id(), i, now(), 'note' from generate_series(1, 5000) i;
        insert into {ROW_ERROR} (tenant_id, job_id, seq, row_no, code, message, lease_version, created_at)
          select 'acme', '{_BIG}', 1 + i % 50, i, 'c', 'm', 1, now() from generate_series(1, 5000) i;
        """
    )


async def _never_analyzed(admin: Connection) -> None:
    await _fill(admin)


async def _analyzed_when_full(admin: Connection) -> None:
    await _fill(admin)
    await admin.execute(f"analyze {JOB}, {CHUNK}, {EVENT}, {ROW_ERROR}")


async def _vacuumed_when_drained(admin: Connection) -> None:
    """What every queue meets: a vacuum comes when it is empty, and leaves "no rows in many pages"."""
    await _fill(admin, 5_000)
    for table in (JOB, CHUNK, EVENT, ROW_ERROR):
        await admin.execute(f"delete from {table}")
        await admin.execute(f"vacuum (truncate off, analyze) {table}")
    await _fill(admin)


# Index -> the columns that its condition must name: fewer would be a walk through all rows of the tenant.
_CONDITIONS = {
    "durable_job_pkey": ("tenant_id", "job_id"),
    "durable_job_open": ("tenant_id",),
    "durable_job_ended": ("tenant_id",),
    "durable_job_aside": ("tenant_id", "status"),
    "durable_chunk_pkey": ("tenant_id", "job_id"),
    "durable_chunk_open": ("tenant_id", "job_id"),
    "durable_chunk_running": ("tenant_id",),
    "durable_chunk_due": ("tenant_id",),
    "durable_chunk_waiting": ("tenant_id", "job_id"),
    "durable_event_pkey": ("tenant_id", "job_id"),
    "durable_row_error_pkey": ("tenant_id", "job_id"),
}


def _check(statement: Explained, most_rows: float) -> set[str | None]:
    used: set[str | None] = set()
    for node in statement.nodes():
        if node.relation not in ("durable_job", "durable_chunk", "durable_event", "durable_row_error"):
            continue
        if "Scan" not in node.kind or node.raw.get("Actual Loops") == 0:
            continue
        where = f"{node.kind} {node.index} {node.condition}\nof: {statement.text}"
        assert node.kind in ("Index Scan", "Index Only Scan", "Tid Scan"), where
        if node.index is not None:
            for column in _CONDITIONS[node.index]:
                assert re.search(rf"\b{column}\b", node.condition), f"no {column} in {where}"
        assert node.rows_read <= most_rows, f"{node.rows_read} rows read by {where}"
        used.add(node.index)
    return used


_CLAIM: set[str | None] = {
    "durable_chunk_due", "durable_job_open", "durable_chunk_open", "durable_job_pkey", "durable_event_pkey",
    "durable_chunk_pkey",
}  # fmt: skip
_LAST = {"durable_chunk_open"}


def _runner(plans: Recorder) -> Callable[..., Awaitable[Any]]:
    async def run(call: Awaitable[Any], expected: set[str | None], most: int = 3 * BATCH + 60) -> Any:
        plans.take()
        answer = await call
        used: set[str | None] = set()
        for statement in plans.take():
            used |= _check(statement, most)
        assert used == expected, used ^ expected
        return answer

    return run


@pytest.mark.parametrize(
    "state", [_never_analyzed, _analyzed_when_full, _vacuumed_when_drained], ids=lambda state: state.__name__[1:]
)
async def test_every_statement_reads_the_rows_it_is_about_by_the_index_it_is_meant_to(
    database: TestDatabase, admin: Connection, state: Callable[[Connection], Awaitable[None]]
) -> None:
    """Seven times each on one connection, as prepared statements: by then every plan is the generic one."""
    for table in (JOB, CHUNK, EVENT, ROW_ERROR):
        await admin.execute(f"alter table {table} set (autovacuum_enabled = off)")
    await state(admin)
    async with explained(database, WORKER_LOGIN) as (conn, plans):
        run = _runner(plans)

        by_key: set[str | None] = {"durable_chunk_pkey", "durable_job_pkey"}
        for _ in range(7):
            leases = await run(durable.claim(conn, BATCH, kinds=["none", KIND, "other"]), _CLAIM)
            assert [lease.job_id for lease in leases] == [_BIG] * BATCH
            behind = await run(durable.claim(conn, 5, after={_BIG: 19_000}), _CLAIM)
            assert min(lease.seq for lease in behind) > 19_000
            assert len(await run(durable.claim_next(conn, _BIG, 5), _CLAIM - {"durable_job_open"})) == 5
            assert await run(durable.heartbeat(conn, *leases), {*by_key, None}) == ["applied"] * BATCH
            assert await run(durable.heartbeat(conn, *[lease.stale for lease in leases]), by_key) == ["stale"] * BATCH
            await run(durable.checkpoint(conn, leases[0], 1), by_key, 5)
            assert await run(durable.complete(conn, leases[0]), by_key | _LAST, 5) == ("applied", False)
            assert await run(durable.complete(conn, leases[0]), {"durable_chunk_pkey", *_LAST}, 5) == (
                "repeated",
                False,
            )
            told = await run(durable.complete_many(conn, *leases[1:5], leases[0]), {*by_key, *_LAST, None})
            assert told == ["applied"] * 4 + ["repeated"]
            assert (
                await run(durable.fail(conn, leases[5], delay=600), {*by_key, *_LAST, "durable_event_pkey", None}, 5)
                == "retry"
            )
            assert await run(durable.release(conn, *leases[6:8]), {*by_key, None}) == ["applied"] * 2
            await run(durable.tell_errors(conn, leases[8], [{"row": n, "code": "c"} for n in range(BATCH)]), by_key, 5)
            version = leases[6].version + 1
            assert await run(
                durable.claim_chunk(conn, _BIG, leases[6].seq, version), {*by_key, "durable_event_pkey"}, 5
            )
            await admin.execute(
                f"update {CHUNK} set lease_expires_at = now() - interval '1 s' where lease_token = $1"
                " and status = 'running'",
                leases[8].token,
            )
            # All that runs is looked at, and nothing else.
            reaped = await run(
                durable.reap(conn, 5), {"durable_chunk_running", "durable_job_pkey", "durable_event_pkey", None}, 600
            )
            assert len(reaped) == 5
            await durable.reap(conn)
            await run(durable.finish(conn, _BIG), {"durable_chunk_running", "durable_job_pkey"}, 5)
            await run(
                conn.fetch("select * from relay.durable_finish_lost($1, 5)", TENANT),
                {"durable_job_open", "durable_job_aside", "durable_chunk_open", "durable_chunk_running"},
                400,
            )
            await run(
                conn.fetch("select * from relay.durable_candidates($1, $2, 20)", TENANT, [KIND]),
                {"durable_chunk_due", "durable_job_open", "durable_chunk_open"},
                100,
            )
    async with explained(database, GATEWAY_LOGIN) as (conn, plans):
        run = _runner(plans)
        for _ in range(7):
            await run(durable.job(conn, _BIG, fresh=False), {"durable_job_pkey"}, 5)
            await run(conn.fetch("select * from relay.durable_chunks($1, $2, $3)", TENANT, _BIG, [3, 4]), by_key, 5)
            await run(
                conn.fetch("select * from relay.durable_chunks($1, $2, null, 9000, 20)", TENANT, _BIG),
                by_key,
                BATCH + 5,
            )
            rows, cursor = await run(
                durable.events(conn, _BIG, None, BATCH), {"durable_event_pkey", "durable_job_pkey"}, BATCH + 5
            )
            assert len(rows) == BATCH
            await run(durable.events(conn, _BIG, cursor, BATCH), {"durable_event_pkey", "durable_job_pkey"}, BATCH + 5)
            await run(
                conn.fetch("select * from relay.durable_row_errors($1, $2, 20, 30)", TENANT, _BIG),
                {"durable_row_error_pkey", "durable_job_pkey"},
                BATCH + 5,
            )
            job_id = await durable.submit(conn, 5)
            plans.take()
            await durable.control(conn, job_id, "pause")
            await durable.control(conn, job_id, "resume")
            await durable.control(conn, job_id, "cancel")
            await durable.resolve(conn, job_id, 1, "done")
            await conn.fetchval("select relay.durable_retire($1, '1 hour', '1 day', 5)", TENANT)
            await conn.fetchval("select relay.durable_remove($1, 5)", TENANT)
            for statement in plans.take():
                _check(statement, 50)


async def test_a_claim_steps_over_paused_and_ended_jobs_without_reading_their_chunks(
    database: TestDatabase, admin: Connection
) -> None:
    await _fill(admin)
    async with explained(database, WORKER_LOGIN) as (conn, plans):
        await durable.claim(conn, 1)
        plans.take()
        assert len(await durable.claim(conn, 1)) == 1
        looks = [plan for plan in plans.take() if "cross join lateral" in plan.text and "job_seq" in plan.text]
        assert looks
        for plan in looks:
            (jobs,) = [node for node in plan.of_table("durable_job") if node.index == "durable_job_open"]
            assert "ROW" in jobs.condition, f"no order to go on from in {jobs.condition}"
            assert jobs.rows_read <= 51
            # 50 jobs of which all is under way: a probe each.
            assert round(sum(node.rows_read for node in plan.of_table("durable_chunk"))) <= 2


async def test_beside_an_old_snapshot_a_claim_behind_the_last_one_and_a_completion_read_no_dead_entries(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 3000)

    async def blocks(conn: Connection, call: str, *arguments: Any) -> int:
        await conn.execute("set plan_cache_mode = force_generic_plan")
        [(plan,)] = await conn.fetch(f"explain (analyze, buffers, format json) select * from {call}", *arguments)
        return int(json.loads(plan)[0]["Plan"]["Shared Hit Blocks"])

    claim = "relay.durable_claim($1, $2, null, 10, 'me', $3, '60 s', 0, $4)"

    async def claimed(after: str | None) -> int:
        return await blocks(worker, claim, [TENANT], [KIND], uuid4(), after)

    async def completed(after: dict[UUID, int] | None) -> int:
        [lease] = await durable.claim(worker, 1, after=after)
        arguments = (TENANT, job_id, lease.seq, lease.token, lease.version)
        return await blocks(worker, "relay.durable_complete($1, $2, $3, $4, $5, 'null')", *arguments)

    async with connected(database.admin_dsn) as old:
        await old.execute("begin isolation level repeatable read")
        await old.fetch("select count(*) from pg_class")
        for _ in range(3):
            await claimed(None)  # plans are made, and what is read for them
            await completed(None)
        # The indexes have their levels by then, whose number is no dead entries' doing.
        await durable.complete_many(worker, *await durable.claim(worker, 400))
        first = await claimed(json.dumps({str(job_id): 400}))
        first_completed = await completed({job_id: 400})
        for _ in range(24):
            leases = await durable.claim(worker, 100)
            assert await durable.complete_many(worker, *leases) == ["applied"] * 100
        last = int(
            await gateway.fetchval(
                "select max(seq) from relay.durable_chunks($1, $2, null, 0, 10000, 'done')", TENANT, job_id
            )
        )
        assert await claimed(json.dumps({str(job_id): last})) <= 1.2 * first
        assert await completed({job_id: last}) <= 1.2 * first_completed
        assert await claimed(None) > 1.4 * first
