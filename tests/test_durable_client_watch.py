"""Waiting for durable jobs and watching them: pushed, polled, coalesced, one read for all, no invented end."""

from __future__ import annotations

import gc
from typing import Any
from uuid import UUID, uuid4

import anyio
import asyncpg
import pytest

from dispatch_core.durable_models import ChunkSpec, JobProgress, JobStatus
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import (
    ConnectionLostError,
    DatabaseUnavailableError,
    InvalidDeadlineError,
    UnknownJobError,
    WaitTimeoutError,
)
from gateway_sdk import DurableJobs, GatewayClient, durable_watch
from gateway_sdk import durable as durable_module
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.protocol import TENANT, Connection
from tests.support.proxy import Mode, TcpProxy

NEVER = 3600.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a wait of no time have all the time for its one answer, however busy the machine is."""
    monkeypatch.setattr(durable_module, "_LOOK_SECONDS", 20.0)


async def work(worker: Connection, tenant: str = TENANT) -> None:
    """Run every chunk there is, and end the jobs."""
    while leases := await durable.claim(worker, 100, tenants=[tenant]):
        await durable.complete_many(worker, *leases, tenant=tenant)
        await durable.finish(worker, *{lease.job_id for lease in leases}, tenant=tenant)


async def ring(worker: Connection, *job_ids: UUID, tenant: str = TENANT) -> None:
    """Tell that jobs are further, as a relay's doorbell does."""
    payload = ",".join(job_id.hex for job_id in job_ids)
    await worker.execute("select relay.ring('{durable_watch}', array[$1], '{null}', array[$2])", tenant, payload)


async def listening(client: GatewayClient) -> None:
    """Wait until the client has confirmed that it listens for the tenant's durable jobs."""
    channels = client.runtime.durable.watches._channels
    await eventually(lambda: channels.is_listening(TENANT))


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[UUID], bool]]:
    """Note every read of jobs: which, and whether their chunks were counted."""
    reads: list[tuple[list[UUID], bool]] = []
    jobs = DurableRepository.jobs

    async def noting(self: Any, tenant: str, job_ids: list[UUID], *, fresh: bool = False) -> Any:
        reads.append((list(job_ids), fresh))
        return await jobs(self, tenant, job_ids, fresh=fresh)

    monkeypatch.setattr(DurableRepository, "jobs", noting)
    return reads


class Watching:
    """One who watches a job in the background."""

    def __init__(self, jobs: DurableJobs, job_id: UUID) -> None:
        self.watch = jobs.watch(job_id)
        self.seen: list[JobProgress] = []

    async def run(self) -> None:
        async for progress in self.watch:
            self.seen.append(progress)

    @property
    def done(self) -> int:
        return self.seen[-1].chunks["done"] if self.seen else -1  # type: ignore[index]


# --- wait -----------------------------------------------------------------------------------------------------------


async def test_a_wait_ends_by_the_push_of_the_jobs_end(database: TestDatabase, worker: Connection) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [ChunkSpec(n, rows=5) for n in range(3)])
        ended: list[Any] = []

        async def wait() -> None:
            ended.append(await jobs.wait(job_id, timeout=60))

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await listening(client)
                await work(worker)
        assert ended[0].status is JobStatus.COMPLETED
        assert ended[0].chunks["done"] == 3
        assert client.runtime.durable.watches.waiting == 0


@pytest.mark.parametrize("end", ["completed_with_errors", "failed", "cancelled"])
async def test_a_wait_ends_whichever_way_the_job_ends(database: TestDatabase, worker: Connection, end: str) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1, 2], max_attempts=1)
        first, second = await durable.claim(worker, 2)
        ended: list[Any] = []

        async def wait() -> None:
            ended.append(await jobs.wait(job_id, timeout=60))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await listening(client)
            if end == "cancelled":
                await jobs.cancel(job_id)
            else:
                await durable.fail(worker, first)
                await (durable.fail if end == "failed" else durable.complete)(worker, second)
                await durable.finish(worker, job_id)
        assert ended[0].status == end
        # And once it has ended, at once.
        assert (await jobs.wait(job_id, timeout=0)).status == end


async def test_a_wait_goes_on_through_a_review_and_through_a_retry(
    database: TestDatabase, worker: Connection, admin: Connection
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1], idempotent=False)
        await durable.claim(worker)
        await durable.run_out(admin)
        await durable.reap(worker)
        await durable.finish(worker, job_id)
        ended: list[Any] = []

        async def wait() -> None:
            ended.append(await jobs.wait(job_id, timeout=60))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await listening(client)
            with pytest.raises(WaitTimeoutError):
                await jobs.wait(job_id, timeout=0)
            await jobs.resolve(job_id, 1, "failed")
        assert ended[0].status is JobStatus.FAILED
        # Behind a retry the old end is no end: what was read before is told to nobody.
        await jobs.retry_failed(job_id)
        with pytest.raises(WaitTimeoutError):
            await jobs.wait(job_id, timeout=0)


async def test_a_wait_that_times_out_says_so_and_the_job_goes_on(database: TestDatabase, worker: Connection) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        for timeout in (0, 1.0):
            with pytest.raises(WaitTimeoutError) as caught:
                await jobs.wait(job_id, timeout=timeout)
            assert caught.value.job_id == job_id
            assert caught.value.retryable
        await work(worker)
        assert (await jobs.wait(job_id)).status is JobStatus.COMPLETED
        wrongs: list[Any] = [-1, float("nan"), "1"]
        for wrong in wrongs:
            with pytest.raises(InvalidDeadlineError):
                await jobs.wait(job_id, timeout=wrong)


async def test_a_job_that_nobody_knows_is_waited_for_by_nobody(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        theirs = await client.tenant("globex").durable.submit("import", [1])
        for job_id in (uuid4(), theirs):
            with pytest.raises(UnknownJobError) as caught:
                await jobs.wait(job_id)
            assert caught.value.job_id == job_id
            with pytest.raises(UnknownJobError):
                await anext(jobs.watch(job_id))
        assert client.runtime.durable.watches.waiting == 0


async def test_a_wait_without_a_database_ends_with_a_retryable_error_and_no_invented_status(
    database: TestDatabase, worker: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_module, "_LOOK_SECONDS", 0.7)
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(
            proxy.dsn(database.gateway_dsn), poll_timeout_seconds=0.5, connect_timeout_seconds=0.5, probe_seconds=0.5
        ) as client,
    ):
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        modes: list[Mode] = ["black_hole", "reset"]
        for mode in modes:
            proxy.mode = mode
            if mode == "reset":
                # It has ended meanwhile: but nobody here has been told.
                await work(worker)
            for timeout in (0, 0.7):
                with pytest.raises(DatabaseUnavailableError) as caught:
                    await jobs.wait(job_id, timeout=timeout)
                assert caught.value.job_id == job_id
        ended: list[Any] = []

        async def wait() -> None:
            ended.append(await jobs.wait(job_id, timeout=30))

        async with anyio.create_task_group() as group:
            # It waits the outage out.
            group.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            proxy.mode = "pass"
        assert ended[0].status is JobStatus.COMPLETED


# --- watch ----------------------------------------------------------------------------------------------------------


async def test_who_watches_is_shown_where_the_job_stands_each_step_and_last_its_end(
    database: TestDatabase, worker: Connection
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [ChunkSpec(n, rows=10) for n in range(3)])
        watching = Watching(jobs, job_id)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(watching.run)
                await listening(client)
                await eventually(lambda: len(watching.seen) == 1)
                for n in range(1, 3):
                    (lease,) = await durable.claim(worker)
                    await durable.complete(worker, lease, rows_done=9, rows_failed=1)
                    await ring(worker, job_id)
                    await eventually(lambda n=n: watching.done == n)  # type: ignore[misc]
                await jobs.pause(job_id)
                await eventually(lambda: watching.seen[-1].status is JobStatus.PAUSED)
                await jobs.resume(job_id)
                await work(worker)
        assert (watching.seen[0].status, watching.seen[0].fraction) == (JobStatus.QUEUED, 0)
        assert (watching.seen[-1].status, watching.seen[-1].fraction) == (JobStatus.COMPLETED_WITH_ERRORS, 20 / 30)
        fractions = [progress.fraction for progress in watching.seen]
        assert fractions == sorted(fractions, key=lambda f: f or 0)
        assert client.runtime.durable.watches.waiting == 0
        assert [progress async for progress in jobs.watch(job_id)] == [watching.seen[-1]]


async def test_a_slow_watcher_sees_the_newest_and_not_what_came_in_between(
    database: TestDatabase, worker: Connection
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", range(20))
        slow, quick = jobs.watch(job_id), Watching(jobs, job_id)
        assert (await anext(slow)).chunks["pending"] == 20  # type: ignore[index]
        async with anyio.create_task_group() as group:
            group.start_soon(quick.run)
            await listening(client)
            for n in range(1, 6):
                (lease,) = await durable.claim(worker)
                await durable.complete(worker, lease)
                await ring(worker, job_id)
                await eventually(lambda n=n: quick.done == n)  # type: ignore[misc]
            # What the quick one was shown, each, the slow one skips; what it is shown is the newest.
            assert (await anext(slow)).chunks["done"] == 5  # type: ignore[index]
            await work(worker)
        assert len(quick.seen) > 5
        assert (await anext(slow)).status is JobStatus.COMPLETED
        with pytest.raises(StopAsyncIteration):
            await anext(slow)


async def test_two_who_watch_and_all_who_wait_share_the_reads_of_their_tenant(
    database: TestDatabase, worker: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        jobs = client.tenant(TENANT).durable
        job_ids = [await jobs.submit("import", [n]) for n in range(20)]
        watching = [Watching(jobs, job_ids[0]), Watching(jobs, job_ids[0]), Watching(jobs, job_ids[1])]
        monkeypatch.setattr(durable_watch, "_COUNT_SECONDS", 0.0)
        monkeypatch.setattr(durable_watch, "_COUNT_SHARE", 0.0)
        reads = reads_of(monkeypatch)
        ended: list[Any] = []

        async def wait(job_id: UUID) -> None:
            ended.append(await jobs.wait(job_id, timeout=60))

        async with anyio.create_task_group() as group:
            for each in watching:
                group.start_soon(each.run)
            for job_id in job_ids * 5:
                group.start_soon(wait, job_id)
            await listening(client)
            await eventually(lambda: all(each.seen for each in watching))
            reads.clear()
            client.runtime.durable.watches._all_due()
            await eventually(lambda: {fresh for _, fresh in reads} == {True, False})
            rows = [ids for ids, fresh in reads if not fresh]
            counts = [ids for ids, fresh in reads if fresh]
            assert sorted(job_ids) in map(sorted, rows)
            assert sorted(job_ids[:2]) in map(sorted, counts)
            reads.clear()
            await work(worker)
        assert len(ended) == 100
        assert len(reads) < 20
        assert {progress.status for each in watching for progress in each.seen[-1:]} == {JobStatus.COMPLETED}


@pytest.mark.parametrize("is_pushed", [True, False])
async def test_a_tick_is_one_read_of_all_who_wait(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, is_pushed: bool
) -> None:
    """Where nothing is pushed, jobs of about the same age share their reads: no waiter has a poll of its own."""
    settings: dict[str, Any] = {"poll_interval_seconds": 0.1}
    if not is_pushed:
        settings["max_channels"] = 0
    async with open_client(database.gateway_dsn, **settings) as client:
        jobs = client.tenant(TENANT).durable
        job_ids = [await jobs.submit("import", [n]) for n in range(30)]
        async with anyio.create_task_group() as group:
            for job_id in job_ids * 3:
                group.start_soon(jobs.wait, job_id)
            if is_pushed:
                await listening(client)
            await eventually(lambda: client.runtime.durable.watches.waiting == 30)
            reads = reads_of(monkeypatch)
            await eventually(lambda: len(reads) == 6)
            group.cancel_scope.cancel()
    assert not any(is_counted for _, is_counted in reads)
    if is_pushed:
        # The first may be of those who came while the one before was under way.
        assert all(sorted(ids) == sorted(job_ids) for ids, _ in reads[1:])
    else:
        assert sum(len(ids) for ids, _ in reads) / len(reads) >= 30 / 4


async def test_chunks_are_counted_every_now_and_then_and_the_end_is_seen_at_once(
    database: TestDatabase, worker: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", range(60))
        monkeypatch.setattr(durable_watch, "_COUNT_SECONDS", NEVER)
        watching = Watching(jobs, job_id)
        reads = reads_of(monkeypatch)
        async with anyio.create_task_group() as group:
            group.start_soon(watching.run)
            await listening(client)
            await eventually(lambda: watching.seen)
            for _ in range(20):
                leases = await durable.claim(worker, 3)
                await durable.complete_many(worker, *leases)
                await ring(worker, job_id)
            await durable.finish(worker, job_id)
        assert sum(fresh for _, fresh in reads) <= 2
        assert watching.seen[-1].status is JobStatus.COMPLETED
        assert watching.done == 60


async def test_a_job_of_which_the_chunks_cannot_be_counted_in_time_is_watched_by_its_row(
    database: TestDatabase, worker: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of very many, that may take longer than a statement of a gateway may: then it is no outage."""
    jobs_of = DurableRepository.jobs

    async def slow(self: Any, tenant: str, job_ids: list[UUID], *, fresh: bool = False) -> Any:
        if fresh:
            raise ConnectionLostError("PostgreSQL did not answer in time")
        return await jobs_of(self, tenant, job_ids)

    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", range(3))
        monkeypatch.setattr(DurableRepository, "jobs", slow)
        watching = Watching(jobs, job_id)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(watching.run)
                await listening(client)
                await eventually(lambda: watching.seen)
                assert watching.seen[0].chunks["pending"] == 3  # type: ignore[index]
                await jobs.pause(job_id)
                await eventually(lambda: watching.seen[-1].status is JobStatus.PAUSED)
                await jobs.resume(job_id)
                await work(worker)
        assert watching.seen[-1].status is JobStatus.COMPLETED
        assert watching.done == 3


@pytest.mark.parametrize("leave", ["break", "aclose", "scope"])
async def test_who_has_left_is_waited_for_by_nobody(database: TestDatabase, leave: str) -> None:
    async with open_client(database.gateway_dsn) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        watches = client.runtime.durable.watches
        for make in (lambda: jobs.watch(job_id), lambda: jobs.events(job_id, follow=True)):
            if leave == "break":
                async for _ in make():
                    break
            elif leave == "aclose":
                async with make() as iterator:
                    await anext(iterator)
                    assert watches.waiting == 1
            else:
                iterator = make()
                await anext(iterator)
                # A timeout around one step leaves the iterator whole.
                with anyio.move_on_after(0.01):
                    await anext(iterator)
                assert watches.waiting == 1
                await iterator.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(iterator)
                del iterator
            gc.collect()
            await eventually(lambda: watches.waiting == 0)
        with anyio.move_on_after(0.01):
            await jobs.wait(job_id)
        assert watches.waiting == 0


# --- without a push -------------------------------------------------------------------------------------------------


async def test_without_a_listening_connection_waits_and_watches_are_polled(
    database: TestDatabase, worker: Connection
) -> None:
    pool = await asyncpg.create_pool(database.gateway_dsn, min_size=1, max_size=3)
    async with pool, open_client(None, pool=pool) as client:
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        watching = Watching(jobs, job_id)
        ended: list[Any] = []

        async def wait() -> None:
            ended.append(await jobs.wait(job_id, timeout=60))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(watching.run)
            await eventually(lambda: watching.seen)
            await work(worker)
        assert ended[0].status is JobStatus.COMPLETED
        assert watching.seen[-1].status is JobStatus.COMPLETED
        assert client.health().state == "polling_only"


async def test_a_push_that_is_cut_off_is_made_up_for(
    database: TestDatabase, worker: Connection, admin: Connection
) -> None:
    """The end comes while nobody listens: the catch-up of the new connection, or a poll beneath, finds it."""
    async with TcpProxy.before(database.gateway_dsn) as proxy:
        settings: dict[str, Any] = {"listen_dsn": proxy.dsn(database.gateway_dsn), "poll_interval_seconds": NEVER}
        async with open_client(database.gateway_dsn, **settings) as client:
            jobs = client.tenant(TENANT).durable
            job_id = await jobs.submit("import", [1])
            watching = Watching(jobs, job_id)
            ended: list[Any] = []

            async def wait() -> None:
                ended.append(await jobs.wait(job_id, timeout=60))

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                group.start_soon(watching.run)
                await listening(client)
                proxy.mode = "reset"
                await eventually(lambda: client.health().state == "degraded")
                await work(worker)
                with anyio.fail_after(20):
                    await eventually(lambda: ended)
                proxy.mode = "pass"
            assert ended[0].status is JobStatus.COMPLETED
            assert watching.seen[-1].status is JobStatus.COMPLETED
            # And listening again, pushes come again.
            job_id = await jobs.submit("import", [1])
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await listening(client)
                await work(worker)


async def test_an_outage_is_waited_out_by_who_watches_and_who_follows_but_for_the_very_first(
    database: TestDatabase, worker: Connection
) -> None:
    async with (
        TcpProxy.before(database.gateway_dsn) as proxy,
        open_client(
            proxy.dsn(database.gateway_dsn), poll_timeout_seconds=0.8, connect_timeout_seconds=0.8, probe_seconds=0.5
        ) as client,
    ):
        jobs = client.tenant(TENANT).durable
        job_id = await jobs.submit("import", [1])
        watching = Watching(jobs, job_id)
        heard: list[str] = []

        async def follow() -> None:
            async for event in jobs.events(job_id, follow=True):
                heard.append(str(event.type))  # noqa: PERF401  (it is looked at meanwhile)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(watching.run)
                group.start_soon(follow)
                await listening(client)
                await eventually(lambda: watching.seen and heard)
                proxy.mode = "reset"
                await work(worker)
                for first in (jobs.watch(job_id), jobs.events(job_id, follow=True), jobs.events(job_id)):
                    with pytest.raises(DatabaseUnavailableError) as caught:
                        await anext(first)
                    assert caught.value.job_id == job_id
                proxy.mode = "pass"
        assert watching.seen[-1].status is JobStatus.COMPLETED
        assert heard == ["submitted", "started", "chunk_claimed", "completed"]


# --- tenants --------------------------------------------------------------------------------------------------------


@pytest.mark.invariant("I4")
async def test_nobody_is_woken_by_the_jobs_of_another_tenant(
    database: TestDatabase, worker: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4: not even a push that names the job of this tenant on the other's channel wakes anybody here."""
    async with open_client(database.gateway_dsn, poll_interval_seconds=NEVER) as client:
        jobs, others = client.tenant(TENANT).durable, client.tenant("globex").durable
        mine, theirs = await jobs.submit("import", [1]), await others.submit("import", [1])
        watching = Watching(jobs, mine)
        async with anyio.create_task_group() as group:
            group.start_soon(watching.run)
            await listening(client)
            await eventually(lambda: watching.seen)
            await eventually(lambda: client.runtime.durable.watches._rooms[TENANT].bell.statistics().tasks_waiting)
            reads = reads_of(monkeypatch)
            listener = client.runtime.listener
            assert listener is not None
            heard = listener.notifications
            await ring(worker, mine, theirs, tenant="globex")
            await work(worker, tenant="globex")
            # Something of our own behind it: what came before has been heard by then, if it ever is.
            await ring(worker, mine)
            await eventually(lambda: listener.notifications > heard)
            assert listener.notifications == heard + 1
            await eventually(lambda: reads)
            assert all(ids == [mine] for ids, _ in reads)
            await jobs.cancel(mine)
        assert watching.seen[-1].status is JobStatus.CANCELLED


async def test_channels_of_tenants_are_left_when_nobody_waits_any_more(
    database: TestDatabase, worker: Connection
) -> None:
    async with open_client(database.gateway_dsn, tenant_idle_seconds=0.05) as client:
        watches = client.runtime.durable.watches
        for tenant in (TENANT, "globex", "initech"):
            jobs = client.tenant(tenant).durable
            job_id = await jobs.submit("import", [1])
            await work(worker, tenant)
            await jobs.wait(job_id)
        await eventually(lambda: not watches._rooms and len(watches._channels) == 0)
        listener = client.runtime.listener
        assert listener is not None
        await eventually(lambda: not listener._callbacks)
