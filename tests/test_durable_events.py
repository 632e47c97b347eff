"""The timeline: whoever reads on misses nothing, whatever commits late, is rolled back, or stays open (C46)."""

from __future__ import annotations

import asyncio
import random
from uuid import UUID, uuid4

import anyio
import asyncpg
import pytest

from tests.support import durable
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.durable import EVENT, JOB
from tests.support.protocol import TENANT, Connection, connected, logins

pytestmark = pytest.mark.case("C46")


async def _tell(conn: Connection, job_id: UUID, text: str) -> bool:
    told: bool = await conn.fetchval(
        "select relay.durable_record_event($1, $2, null, 'note', $3, null, null, null)", TENANT, job_id, text
    )
    return told


async def _read(conn: Connection, job_id: UUID, after: str | None, limit: int = 1000) -> tuple[list[str], str]:
    rows, cursor = await durable.events(conn, job_id, after, limit)
    return [row["actor"] for row in rows if row["type"] == "note"], cursor


@pytest.mark.invariant("J7")
async def test_an_event_that_commits_late_is_read_once_though_later_ones_were_read_before(
    database: TestDatabase, gateway: Connection
) -> None:
    job_id = await durable.submit(gateway)
    async with connected(database.gateway_dsn) as late, connected(database.gateway_dsn) as gone:
        slow, lost = late.transaction(), gone.transaction()
        await slow.start()
        await _tell(late, job_id, "late 1")
        await lost.start()
        await _tell(gone, job_id, "never")
        await _tell(gateway, job_id, "early")
        read, cursor = await _read(gateway, job_id, None)
        assert read == ["early"], "and not held back behind an open transaction"
        assert await _read(gateway, job_id, cursor) == ([], cursor)
        await _tell(late, job_id, "late 2")
        await lost.rollback()
        await _tell(gateway, job_id, "second")
        await slow.commit()
        read, cursor = await _read(gateway, job_id, cursor)
        assert sorted(read) == ["late 1", "late 2", "second"], "both of one transaction, and no gap is waited for"
        assert read.index("late 1") < read.index("late 2")
        assert (await _read(gateway, job_id, cursor))[0] == []


async def test_somebodys_long_transaction_hides_nothing(database: TestDatabase, gateway: Connection) -> None:
    async with connected(database.admin_dsn) as old, old.transaction():
        await old.execute("create table public.t (n bigint)")
        job_id = await durable.submit(gateway)
        await durable.control(gateway, job_id, "cancel")
        assert await durable.told(gateway, job_id) == ["submitted", "cancelled"]
        cursor = (await durable.events(gateway, job_id))[1]
        assert (await durable.events(gateway, job_id, cursor))[0] == []


@pytest.mark.parametrize("limit", [1, 3])
async def test_pages_end_where_they_began_and_what_came_meanwhile_comes_after(
    database: TestDatabase, gateway: Connection, limit: int
) -> None:
    job_id = await durable.submit(gateway)
    async with connected(database.gateway_dsn) as late:
        slow = late.transaction()
        await slow.start()
        await _tell(late, job_id, "late")
        for n in range(5):
            await _tell(gateway, job_id, f"a{n}")
        seen, cursor = await _read(gateway, job_id, None, limit)
        await slow.commit()  # below the place where the page ended
        await _tell(gateway, job_id, "b")
        for _ in range(12):
            read, cursor = await _read(gateway, job_id, cursor, limit)
            seen += read
    assert seen[:5] == [f"a{n}" for n in range(5)]
    assert sorted(seen[5:]) == ["b", "late"]


@pytest.mark.invariant("J7")
async def test_whoever_sees_the_new_status_sees_its_event(database: TestDatabase, gateway: Connection) -> None:
    job_id = await durable.submit(gateway)
    done = anyio.Event()

    async def turn() -> None:
        for _ in range(25):
            await durable.control(gateway, job_id, "pause")
            await durable.control(gateway, job_id, "resume")
        done.set()

    async with anyio.create_task_group() as group, connected(database.gateway_dsn) as reader:
        group.start_soon(turn)
        types: list[str] = []
        cursor: str | None = None
        while not done.is_set():
            status = await durable.status(reader, job_id)
            rows, cursor = await durable.events(reader, job_id, cursor)
            types += [row["type"] for row in rows]
            if status == "paused":
                assert types.count("paused") >= 1
            assert abs(types.count("paused") - types.count("resumed")) <= 1


@pytest.mark.case("C22")
async def test_events_of_one_transaction_are_in_its_order_and_of_no_equal_number(
    database: TestDatabase,
) -> None:
    """C22: not by the transaction's clock, which stands still. (By a login that is both: no other may.)"""
    async with logins(database) as made:
        name = await made.create()
        await made.bind(name, "gateway", TENANT)
        await made.bind(name, "worker", TENANT)
        both = await made.connect(name)
        job_id = await durable.submit(both, 3)
        leases = await durable.claim(both, 3)
        async with both.transaction():
            for n in range(20):
                await _tell(both, job_id, str(n))
            for lease in leases:
                await durable.fail(both, lease, retryable=False)
        rows, _ = await durable.events(both, job_id)
    mine = [row for row in rows if row["type"] in ("note", "chunk_failed")]
    assert [row["actor"] for row in mine[:20]] == [str(n) for n in range(20)]
    assert [row["seq"] for row in mine[20:]] == [1, 2, 3]
    assert len({row["n"] for row in mine}) == 23
    assert [row["at"] for row in mine] == sorted(row["at"] for row in mine)


async def test_a_reader_inside_a_transaction_that_writes_reads_its_events_when_it_has_committed(
    gateway: Connection,
) -> None:
    job_id = await durable.submit(gateway)
    async with gateway.transaction():
        await _tell(gateway, job_id, "first")
        await gateway.fetchval("select pg_current_xact_id()")
        read, cursor = await _read(gateway, job_id, None)
        assert read == []
        await _tell(gateway, job_id, "second")
    assert (await _read(gateway, job_id, cursor))[0] == ["first", "second"]


async def test_an_event_from_the_side_waits_for_nobody(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    job_id = await durable.submit(gateway)
    async with connected(database.admin_dsn) as holder, holder.transaction():
        await holder.execute(f"select 1 from {JOB} where job_id = $1 for update", job_id)
        await gateway.execute("set lock_timeout = '1ms'")
        assert await _tell(gateway, job_id, "beside") is True
    assert await _tell(gateway, uuid4(), "nowhere") is False
    assert await durable.told(gateway, job_id) == ["submitted", "note"]
    assert await admin.fetchval(f"select count(*) from {EVENT}") == 2


async def test_what_is_no_cursor_is_refused(gateway: Connection) -> None:
    job_id = await durable.submit(gateway)
    for wrong in ("x", "1;2", "1:1:;1:1:;1", "1:1:;1:1:;x;1", ";;;;"):
        with pytest.raises(asyncpg.PostgresError) as raised:
            await durable.events(gateway, job_id, wrong)
        assert raised.value.sqlstate == "S2020", wrong


async def test_events_that_were_restored_from_another_server_are_read_from_the_beginning_and_once(
    admin: Connection, gateway: Connection
) -> None:
    job_id = await durable.submit(gateway)
    await _tell(gateway, job_id, "old")
    await admin.execute(f"update {EVENT} set xid = (xid::text::bigint + 1000000000)::text::xid8")
    read, cursor = await _read(gateway, job_id, None)
    assert read == ["old"]
    await _tell(gateway, job_id, "new")
    read, cursor = await _read(gateway, job_id, cursor)
    assert read == ["new"]
    assert (await _read(gateway, job_id, cursor))[0] == []


async def test_six_writers_and_a_reader_who_reads_on_all_the_while(database: TestDatabase, gateway: Connection) -> None:
    """Some transactions are slow, some are rolled back: each committed event is read exactly once."""
    job_id = await durable.submit(gateway)
    committed: list[str] = []
    chance = random.Random(46)
    writing = 6

    async def write(name: int) -> None:
        nonlocal writing
        async with connected(database.gateway_dsn) as conn:
            for n in range(30):
                mine = [f"{name}.{n}.{m}" for m in range(chance.randint(1, 3))]
                transaction = conn.transaction()
                await transaction.start()
                for text in mine:
                    await _tell(conn, job_id, text)
                    await asyncio.sleep(0)
                if chance.random() < 0.3:
                    await transaction.rollback()
                else:
                    await transaction.commit()
                    committed.extend(mine)
        writing -= 1

    seen: list[str] = []
    cursor: str | None = None
    async with anyio.create_task_group() as group:
        for name in range(6):
            group.start_soon(write, name)
        while writing:
            read, cursor = await _read(gateway, job_id, cursor, chance.choice([1, 2, 5, 100]))
            seen += read
    for _ in range(400):
        read, cursor = await _read(gateway, job_id, cursor, 5)
        seen += read
        if not read and ";" not in cursor:
            break
    assert sorted(seen) == sorted(committed)


async def test_claims_and_completions_tell_without_the_jobs_lock(
    database: TestDatabase, gateway: Connection, worker: Connection, admin: Connection
) -> None:
    """A status that is being changed holds up no chunk that runs, and is not held up by its events."""
    job_id = await durable.submit(gateway, 2)
    leases = await durable.claim(worker, 2)
    async with connected(database.gateway_dsn) as holder:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute('select relay.durable_update_job($1, $2, \'{"last_error": "x"}\')', TENANT, job_id)
        await worker.execute("set lock_timeout = '1ms'")
        assert await durable.heartbeat(worker, *leases) == ["applied"] * 2
        await durable.checkpoint(worker, leases[0], 1)
        assert await durable.complete(worker, leases[0]) == ("applied", True)
        assert await durable.fail(worker, leases[1]) == "retry"
        await transaction.commit()
    async with connected(database.worker_dsn) as busy:
        async with busy.transaction():
            (lease,) = await durable.claim(busy)
            pausing = asyncio.ensure_future(durable.control(gateway, job_id, "pause"))
            await wait_until_blocked(admin, pid_of(gateway), by=pid_of(busy))
        assert (await pausing)["outcome"] == "applied"
    assert await durable.complete(worker, lease) == ("applied", True)
