"""The timeline of a durable job by the gateway's client: pages, reading on, following."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import anyio
import pytest

from dispatch_core.errors import InvalidInputError, UnknownJobError
from gateway_sdk import DurableJobs
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.protocol import TENANT, Connection, connected

NEVER = 3600.0


async def say(conn: Connection, job_id: UUID, word: str) -> None:
    done = await conn.fetchval(
        "select relay.durable_record_event($1, $2, null, $3, null, null, null, null)", TENANT, job_id, word
    )
    assert done is True


async def words(jobs: DurableJobs, job_id: UUID, after: str | None = None, limit: int = 100) -> tuple[list[str], str]:
    page = await jobs.event_page(job_id, after, limit=limit)
    return [str(event.type) for event in page.events], page.next


@pytest.mark.case("C46")
async def test_an_event_that_commits_late_is_read_with_the_next_page_and_none_is_read_twice(
    database: TestDatabase, gateway: Connection
) -> None:
    """C46: the transaction that began first commits last; a rolled-back one leaves no gap that anybody waits for."""
    async with (
        open_client(database.gateway_dsn) as client,
        connected(database.gateway_dsn) as first,
        connected(database.gateway_dsn) as lost,
    ):
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        found, cursor = await words(jobs, job_id)
        assert found == ["submitted"]
        late, never = first.transaction(), lost.transaction()
        await late.start()
        await say(first, job_id, "late")
        await never.start()
        await say(lost, job_id, "never")
        await say(gateway, job_id, "early")
        found, cursor = await words(jobs, job_id, cursor)
        assert found == ["early"]
        assert await words(jobs, job_id, cursor) == ([], cursor)
        await never.rollback()
        await late.commit()
        found, cursor = await words(jobs, job_id, cursor)
        assert found == ["late"]
        assert (await words(jobs, job_id, cursor))[0] == []
        assert (await words(jobs, job_id))[0] == ["submitted", "late", "early"]


@pytest.mark.case("C46")
async def test_the_cursor_behind_each_single_event_is_where_to_go_on(
    database: TestDatabase, gateway: Connection
) -> None:
    """C46: also in the middle of a page, of a transaction, and with one that is open all the while."""
    async with open_client(database.gateway_dsn) as client, connected(database.gateway_dsn) as slow:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        open_one = slow.transaction()
        await open_one.start()
        await say(slow, job_id, "late")
        async with gateway.transaction():
            for n in range(3):
                await say(gateway, job_id, f"a{n}")
        await say(gateway, job_id, "b")
        everything = ["submitted", "a0", "a1", "a2", "b"]
        cursors: list[str | None] = [None]
        events = jobs.events(job_id)
        async for event in events:
            assert str(event.type) == everything[len(cursors) - 1]
            cursors.append(events.cursor)
        await open_one.commit()
        for n, cursor in enumerate(cursors):
            rest = [str(event.type) async for event in jobs.events(job_id, cursor)]
            assert sorted(rest) == sorted([*everything[n:], "late"]), n
            # And the same by pages of one.
            paged: list[str] = []
            found, position = await words(jobs, job_id, cursor, limit=1)
            while found:
                paged += found
                found, position = await words(jobs, job_id, position, limit=1)
            assert sorted(paged) == sorted(rest)


async def test_what_is_no_cursor_is_refused(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        for wrong in ("nonsense", "1;2", "1:1:;x;1;1"):
            with pytest.raises(InvalidInputError):
                await jobs.event_page(job_id, wrong)
            with pytest.raises(InvalidInputError):
                await anext(jobs.events(job_id, wrong))


async def test_who_follows_is_given_what_happens_and_ends_behind_the_end_of_the_job(
    database: TestDatabase, worker: Connection
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1, 2])
        heard: list[str] = []
        followed = jobs.events(job_id, follow=True)

        async def follow() -> None:
            async for event in followed:
                heard.append(str(event.type))  # noqa: PERF401  (it is looked at meanwhile)

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await eventually(lambda: heard == ["submitted"])
            assert client.runtime.durable.watches.waiting == 1
            await jobs.pause(job_id)
            await eventually(lambda: heard[-1:] == ["paused"])
            await jobs.resume(job_id)
            await eventually(lambda: heard[-1:] == ["resumed"])
            leases = await durable.claim(worker, 2)
            for lease in leases:
                await durable.complete(worker, lease)
            await durable.finish(worker, job_id)
        assert heard[:3] == ["submitted", "paused", "resumed"]
        assert sorted(heard[3:]) == ["chunk_claimed", "completed", "started"]
        assert client.runtime.durable.watches.waiting == 0
        # Nothing is behind its cursor, and who follows a job that has ended comes to the end at once.
        assert [event async for event in jobs.events(job_id, followed.cursor)] == []
        assert [str(event.type) async for event in jobs.events(job_id, follow=True)] == heard


async def test_who_follows_a_job_that_nobody_knows_is_told_so(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        other = await client.tenant("globex").durable.submit("import", [1])
        with pytest.raises(UnknownJobError):
            await anext(jobs.events(other, follow=True))


async def test_who_sees_a_new_status_sees_its_event(database: TestDatabase, worker: Connection) -> None:
    """Statuses are read as fast as can be while others change them; each time the timeline must be as far."""
    tells = {"queued": "submitted", "paused": "paused", "running": "started", "completed": "completed"}
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        seen: set[str] = set()

        async def look() -> None:
            while "completed" not in seen:
                job = await jobs.status(job_id, fresh=False)
                assert job is not None
                told = [str(event.type) async for event in jobs.events(job_id)]
                assert tells[job.status] in told
                seen.add(job.status)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(look)
            for _ in range(10):
                await jobs.pause(job_id)
                await jobs.resume(job_id)
            (lease,) = await durable.claim(worker)
            await eventually(lambda: "running" in seen)
            await durable.complete(worker, lease)
            await durable.finish(worker, job_id)
        assert seen >= {"running", "completed"}


async def test_many_events_of_one_transaction_are_read_in_pages_none_of_them_twice(
    database: TestDatabase, gateway: Connection
) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        await gateway.execute(
            """
            select relay.durable_record_event($1, $2, null, 'n' || n, null, null, null, null)
            from generate_series(1, 3500) n
            """,
            TENANT,
            job_id,
        )
        found: list[Any] = [str(event.type) async for event in jobs.events(job_id)]
        assert found == ["submitted", *(f"n{n}" for n in range(1, 3501))]
