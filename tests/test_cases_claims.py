"""Claims of the outbox and of durable jobs under faults that claims of dispatch jobs are tested for elsewhere.

Whatever the planner does, a claim takes no more than its limit (C12); whoever starves its event loop has lost what it
had (C17); nothing that is put back can collide (C25); no counter ends at 32 bits (C38).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from typing import Any

import asyncpg
import pytest

from dispatch_core.durable_models import ChunkStatus
from dispatch_core.outbox import DrainReport, OutboxEvent
from relay_sdk import ChunkContext
from tests.support import durable
from tests.support.chunks import KIND as CHUNKS
from tests.support.chunks import SELDOM, Work, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK
from tests.support.eventually import eventually
from tests.support.high_counters import HIGH
from tests.support.outbox import make_due, make_stale, outbox, take, tell, tidy, write
from tests.support.protocol import OUTBOX, TENANT, Connection, connected
from tests.support.relays import running

PLANNER = ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_nestloop", "enable_indexscan")


async def _take_the_belt_off(admin: Connection, prefix: str) -> None:
    """Let the functions of a room go by the session's planner settings."""
    names = await admin.fetch(
        "select oid::regprocedure::text as name from pg_proc where pronamespace = 'relay'::regnamespace"
        " and proname like $1 || '%' and prolang = (select oid from pg_language where lanname = 'plpgsql')",
        prefix,
    )
    assert len(names) > 5
    for (name,) in names:
        await admin.execute(f"alter function {name} reset all")
        await admin.execute(f"alter function {name} set search_path = pg_catalog, pg_temp")


async def _plan_anew(connection: Connection, off: str | None) -> None:
    await connection.execute("reset all; discard plans")
    if off:
        await connection.execute(f"set {off} = off")


# --- C12: the limit ---------------------------------------------------------------------------------------------------


@pytest.mark.case("C12")
@pytest.mark.parametrize("belt", ["as shipped", "without the settings of its functions"])
async def test_a_claim_of_events_never_takes_more_rows_than_its_limit(
    database: TestDatabase, admin: Connection, gateway: Connection, belt: str
) -> None:
    """Under each planner setting and state of statistics, with the first rows locked; rows changed = rows returned."""
    if belt != "as shipped":
        await _take_the_belt_off(admin, "outbox_")
    await admin.execute(f"analyze {OUTBOX}")  # statistics of an empty table, for what follows
    ids = await write(gateway, *range(1000))
    taken = 0
    async with connected(database.admin_dsn) as locker, locker.transaction():
        await locker.execute(f"select from {OUTBOX} where event_id = any ($1) for update", ids[:5])
        for analyzed in (False, True):
            if analyzed:
                await admin.execute(f"analyze {OUTBOX}")
            for off, limit in itertools.product((None, *PLANNER), (1, 10)):
                await _plan_anew(gateway, off)
                for _ in range(2):
                    events = await take(gateway, limit)
                    assert [event.event_id for event in events] == ids[5 + taken : 5 + taken + limit]
                    taken += limit
                claimed = await admin.fetchval(f"select count(*) from {OUTBOX} where state = 'claimed'")
                assert claimed == taken


@pytest.mark.case("C12")
@pytest.mark.parametrize("belt", ["as shipped", "without the settings of its functions"])
@pytest.mark.parametrize("verb", ["claim", "claim_next"])
async def test_a_claim_of_chunks_never_takes_more_rows_than_its_limit(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection, belt: str, verb: str
) -> None:
    """The same, over all jobs and of one."""
    if belt != "as shipped":
        await _take_the_belt_off(admin, "durable_")
    await admin.execute(f"analyze {CHUNK}")
    job_id = await durable.submit(gateway, 1000)
    taken = 0
    async with connected(database.admin_dsn) as locker, locker.transaction():
        await locker.execute(f"select from {CHUNK} where seq <= 5 for update")
        for analyzed in (False, True):
            if analyzed:
                await admin.execute(f"analyze {CHUNK}")
            for off, limit in itertools.product((None, *PLANNER), (1, 10)):
                await _plan_anew(worker, off)
                for _ in range(2):
                    leases = await (
                        durable.claim(worker, limit) if verb == "claim" else durable.claim_next(worker, job_id, limit)
                    )
                    assert [lease.seq for lease in leases] == [6 + taken + n for n in range(limit)]
                    taken += limit
                claimed = await admin.fetchval(f"select count(*) from {CHUNK} where status = 'running'")
                assert claimed == taken


# --- C17: the event loop stands still ---------------------------------------------------------------------------------


@pytest.mark.case("C17")
async def test_a_chunk_handler_that_computes_for_many_leases_has_its_late_writes_refused(
    database: TestDatabase, gateway: Any
) -> None:
    """Another relay has taken the chunk back by then: it is not disturbed, and the late wake-up renews nothing."""
    work = Work(gateway)
    job_id = await work.submit(1)
    busy = chunk_relay(database, durable={"lease_seconds": 2.0, **SELDOM})
    second: list[durable.Lease] = []
    over = threading.Event()

    def take_over() -> None:
        async def another() -> None:
            async with connected(database.worker_dsn) as worker:
                await eventually(lambda: durable.reap(worker), timeout=30, interval=0.05)
                second.extend(await durable.claim_next(worker, job_id, by="another", lease=60))

        try:
            asyncio.run(another())
        finally:
            over.set()

    said: list[str] = []

    @busy.chunk_handler(CHUNKS)
    async def compute(ctx: ChunkContext) -> str:
        threading.Thread(target=take_over).start()
        until = time.monotonic() + 40
        while not over.is_set() and time.monotonic() < until:
            sum(range(1000))
        said.append("returned")
        return "too late"

    async with running(busy):
        await eventually(lambda: busy.metrics.chunks_lost == 1, timeout=60)
        chunk = await work.chunk(job_id)
        assert (chunk.status, chunk.claimed_by, chunk.attempts) == (ChunkStatus.RUNNING, "another", 2)
        assert busy.metrics.chunks_done == 0
        async with connected(database.worker_dsn) as worker:
            assert await durable.complete(worker, second[0], "second") == ("applied", True)
    assert said == ["returned"]
    assert (await work.chunk(job_id)).outcome == "second"


@pytest.mark.case("C17")
@pytest.mark.parametrize("how", ["blocks", "computes"])
async def test_a_sink_that_starves_the_event_loop_settles_nothing_that_another_has_taken_back(
    database: TestDatabase, admin: Connection, gateway: Connection, how: str
) -> None:
    """Its timeout cannot end it, so its claim grows old; what it says then is stale, and counts for nobody."""
    await write(gateway, "one")
    over = threading.Event()
    seen: list[Any] = []

    def take_over() -> None:
        async def another() -> None:
            async with connected(database.admin_dsn) as aside, connected(database.gateway_dsn) as conn:
                await make_stale(aside)
                assert (await tidy(conn)).reclaimed == 1
                await make_due(aside)
                seen.extend(await take(conn, by="another"))

        try:
            asyncio.run(another())
        finally:
            over.set()

    async def sink(_: OutboxEvent) -> None:
        threading.Thread(target=take_over).start()
        if how == "blocks":
            over.wait(40)
        else:
            until = time.monotonic() + 40
            while not over.is_set() and time.monotonic() < until:
                sum(range(1000))

    async with outbox(database, sink) as drainer:
        assert await drainer.drain() == DrainReport(claimed=1, stale=1)
    (event,) = seen
    row = await admin.fetchrow(f"select state, claimed_by, fence, attempts from {OUTBOX}")
    assert row is not None
    assert tuple(row) == ("claimed", "another", event.fence, 1)
    assert await tell(gateway, [event], by="another") == [("applied", "gone")]


# --- C25: putting something back --------------------------------------------------------------------------------------


@pytest.mark.case("C25")
async def test_no_unique_index_covers_some_states_only_so_that_no_way_back_can_collide(admin: Connection) -> None:
    """Of no room. A key is unique for as long as its row is there, whatever that row's state is."""
    rows = await admin.fetch(
        """select i.indexrelid::regclass::text as name, i.indpred is not null as is_partial,
                  array(select a.attname::text from pg_attribute a
                        where a.attrelid = i.indrelid and a.attnum = any (i.indkey)) as columns
           from pg_index i join pg_class c on c.oid = i.indrelid
           where c.relnamespace = 'relay'::regnamespace and i.indisunique"""
    )
    assert len(rows) > 10
    assert [row["name"] for row in rows if row["is_partial"]] == []
    # Nor is a state or who holds it part of what is unique, so that no transition changes a key.
    changing = {"state", "status", "claimed_by", "fence", "attempt", "attempts", "lease_token", "available_at"}
    assert [row["name"] for row in rows if changing & set(row["columns"])] == []
    exclusions = "select conname from pg_constraint where contype = 'x' and connamespace = 'relay'::regnamespace"
    assert await admin.fetch(exclusions) == []


@pytest.mark.case("C25")
async def test_chunks_that_are_put_back_in_every_way_collide_with_nothing(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """A job of one id is there once; its chunks fail, are released, lost and given to a person beside their twins."""
    job_id = await durable.submit(gateway, 4, max_attempts=9)
    twin = await durable.submit(gateway, 4, max_attempts=9)
    for _ in range(2):
        leases = await durable.claim_next(worker, job_id, 4)
        twins = await durable.claim_next(worker, twin, 4)
        assert await durable.fail(worker, leases[0], delay=0) == "retry"
        assert await durable.release(worker, leases[1]) == ["applied"]
        await durable.run_out(admin)
        assert len(await durable.reap(worker)) == 2 + len(twins)
    assert sorted(await durable.states(gateway, job_id)) == ["pending", "retry", "retry", "retry"]


# --- C38: 32 bits -----------------------------------------------------------------------------------------------------


@pytest.mark.case("C38")
@pytest.mark.parametrize("start", [HIGH, 2**62])
async def test_fences_and_attempts_of_events_go_through_every_verb_past_32_bits(
    admin: Connection, gateway: Connection, start: int
) -> None:
    for end in ("delivered", "failed", "release", "park", "stale"):
        (event_id,) = await write(gateway, end)
        await admin.execute(f"update {OUTBOX} set fence = $1::int8, attempts = $1, seq = $1", start + 7)
        (event,) = await take(gateway)
        assert (event.event_id, event.fence, event.attempts) == (event_id, start + 8, start + 7)
        if end == "stale":
            await make_stale(admin)
            assert (await tidy(gateway, max_attempts=2**63 - 1)).reclaimed == 1
            assert (await tell(gateway, [event]))[0][0] == "stale"
        else:
            state = {"delivered": "gone", "park": "parked"}.get(end, "ready")
            told = await tell(gateway, [event], end, error="no", delay=0, max_attempts=2**63 - 1)
            assert told == [("applied", state)]
            assert (await tell(gateway, [event]))[0][0] == "stale"
        if end == "park":
            assert await gateway.fetchval("select count(*) from relay.outbox_retry($1, $2)", TENANT, [event_id]) == 1
        left = await admin.fetchval(f"select max(fence) from {OUTBOX}")
        assert left is None or left >= start + 9
        await admin.execute(f"delete from {OUTBOX}")


@pytest.mark.case("C38")
@pytest.mark.parametrize("start", [HIGH, 2**62])
async def test_numbers_of_chunks_and_their_leases_go_through_every_verb_past_32_bits(
    admin: Connection, gateway: Connection, worker: Connection, start: int
) -> None:
    job_id = await durable.submit(gateway, 0, max_attempts=start + 100, rows=start)
    given = json.dumps([{"payload": 1, "rows": start // 8}, {"payload": 2}, {"payload": 3}, {"payload": 4}])
    await gateway.fetchval("select relay.durable_insert_chunks($1, $2, $3, $4)", TENANT, job_id, given, start + 6)
    await admin.execute(f"update {CHUNK} set lease_version = $1::int8, attempts = $1", start + 7)
    leases = await durable.claim_next(worker, job_id, 4)
    assert [lease.seq for lease in leases] == [start + 6 + n for n in range(4)]
    assert {(lease.version, lease.row["attempts"]) for lease in leases} == {(start + 8, start + 8)}
    done, failed, released, lost = leases
    assert await durable.heartbeat(worker, *leases, rows_done=[start // 8, 0, 0, 0]) == ["applied"] * 4
    await durable.checkpoint(worker, done, start, rows_done=start // 8)
    assert await durable.tell_errors(worker, done, [{"row": start + 9, "code": "c"}]) == 1
    assert (await durable.complete(worker, done, rows_done=start // 8))[0] == "applied"
    assert await durable.fail(worker, failed, delay=0) == "retry"
    assert await durable.release(worker, released) == ["applied"]
    await durable.run_out(admin)
    assert [(row["seq"], row["status"]) for row in await durable.reap(worker)] == [(lost.seq, "retry")]
    rest = await durable.claim(worker, 4, after={job_id: start + 6})
    assert {lease.seq for lease in rest} == {start + 7, start + 8, start + 9}
    assert await durable.complete_many(worker, *rest) == ["applied"] * 3
    with pytest.raises(asyncpg.PostgresError, match="the lease of this chunk is lost"):
        await durable.complete(worker, lost)
    assert await durable.finish(gateway, job_id) == [("completed", True)]
    job = await durable.job(gateway, job_id)
    assert job is not None
    assert (job["chunks_done"], job["rows_done"]) == (4, start // 8)
    versions = await admin.fetch(f"select seq, lease_version from {CHUNK} order by seq")
    assert all(row["lease_version"] >= start + 8 for row in versions)


@pytest.mark.case("C38")
async def test_no_function_counts_in_less_than_64_bits_but_places_of_an_array(admin: Connection) -> None:
    """Arguments, results and variables; and each cast to int is the size of an array or a sign."""
    narrow = await admin.fetch(
        """select p.proname, t.typname from pg_proc p,
             lateral unnest(p.proargtypes::oid[] || coalesce(p.proallargtypes, '{}') || p.prorettype) as a(oid)
             join pg_type t on t.oid = a.oid
           where p.pronamespace = 'relay'::regnamespace
             and t.typname in ('int2', 'int4', '_int2', '_int4', 'float4', '_float4', 'xid', '_xid')"""
    )
    assert [tuple(row) for row in narrow] == []
    bodies = await admin.fetch(
        "select proname, prosrc from pg_proc where pronamespace = 'relay'::regnamespace and prosrc <> ''"
    )
    casts = {
        found
        for _, body in bodies
        for found in re.findall(r"[^;\n]*::\s*(?:int2|int4|int|integer|smallint)\b(?!8)", body)
        if not re.search(r"array\[v_count::int$|array\[coalesce\(v_kinds, 1\)::int$|\bsign\([^;]*\)::int$", found)
    }
    assert casts == set()
    variables = {
        (name, found)
        for name, body in bodies
        for found in re.findall(r"^\s+(v_\w+)\s+(?:int2|int4|int|integer|smallint)\b", body, re.MULTILINE)
    }
    # How many were written, which is how long an array is; characters of a payload to show; a comparison.
    assert {name for _, name in variables} <= {"v_count", "v_chars", "v_sign"}
