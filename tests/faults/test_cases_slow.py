"""Cases that take long: a stop of more than a minute, thousands of duplicates, an old snapshot for minutes, signals.

`--long` plays those that go on for a time as long as they are told of: ten minutes of 50 jobs/s beside an old snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import anyio.to_thread
import asyncpg
import pytest
from pydantic import SecretStr

from dispatch_core.dev.logins import WORKER_LOGIN
from dispatch_core.dev.postgres import DevServer
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import Completion, DispatchStatus
from dispatch_core.outbox import Outbox, OutboxEvent, OutboxSettings
from dispatch_core.settings import CoreSettings
from gateway_sdk import GatewayClient, OutboxDrainer
from relay_sdk import ChunkContext, DispatchJob, Relay, RelaySettings, Reply
from tests.support.activity import backends
from tests.support.chunks import KIND as CHUNKS
from tests.support.chunks import Work, chunk_relay
from tests.support.cli import environment
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client, settings_for
from tests.support.load import answers_by_notify
from tests.support.patience import still
from tests.support.pgbouncer import pgbouncer, program
from tests.support.plans import explained
from tests.support.protocol import KEY, ME, QUEUE, RELAY, REQUEST, TENANT, Connection, claim, connected, enqueue
from tests.support.proxy import TcpProxy
from tests.support.relay_process import relay_process
from tests.support.relays import QUICK, Jobs, running

pytestmark = pytest.mark.slow

HOUR = 3600.0
ROOT = Path(__file__).resolve().parents[2]


# --- C01: twenty jobs, a second apart ---------------------------------------------------------------------------------


@pytest.mark.case("C01")
@pytest.mark.timeout(180)
async def test_of_twenty_jobs_a_second_apart_each_is_claimed_within_the_poll_though_the_listener_is_dead(
    database: TestDatabase, gateway: Any
) -> None:
    poll = 2.0
    async with TcpProxy.before(database.worker_dsn) as proxy:
        core = CoreSettings.load(
            dsn=database.worker_dsn,
            listen_dsn=proxy.dsn(database.worker_dsn),
            probe_seconds=1.0,
            probe_timeout_seconds=1.0,
        )
        relay = Relay("erp", tenants=["acme"], core=core, settings=RelaySettings(**{**QUICK, "poll_seconds": poll}))

        @relay.fallback
        async def handler(job: DispatchJob) -> None: ...

        jobs = Jobs(gateway)
        async with running(relay):
            proxy.mode = "black_hole"
            ids = []
            for _ in range(20):
                ids.append(await jobs.enqueue(ttl=300))
                await anyio.sleep(1.0)
            results = await jobs.ends(ids, timeout=30)
            waits = [(r.claimed_at - r.created_at).total_seconds() for r in results]  # type: ignore[operator]
            # By the server's clock. Evenly from nothing to the interval; the slowest are the machine's.
            print("waited:", " ".join(f"{wait:.1f}" for wait in sorted(waits)))
            assert statistics.median(waits) <= poll
            assert relay.health().listener == "degraded"
            proxy.mode = "pass"
            await eventually(lambda: relay.health().status == "ok", timeout=30)
            woken = relay.metrics.wakeups_by_notify

            async def is_woken() -> bool:
                # A poll may come between the job and its ring.
                job_id = await jobs.enqueue()
                await jobs.ring()
                await jobs.end(job_id)
                return relay.metrics.wakeups_by_notify > woken

            await eventually(is_woken, timeout=30)


# --- C02: away for 70 seconds -----------------------------------------------------------------------------------------


@pytest.mark.case("C02")
@pytest.mark.timeout(300)
async def test_after_kills_twice_in_a_row_and_a_stop_of_70_seconds_everybody_is_woken_as_before(
    durable_server: DevServer, durable_database: TestDatabase
) -> None:
    """Relay with job and chunk handlers, gateway, and its drainer: none polls within the test; one listener each."""
    relay = chunk_relay(durable_database, poll_seconds=HOUR)

    @relay.fallback
    async def handler(job: DispatchJob) -> Reply:
        return Reply(job.body)

    @relay.chunk_handler(CHUNKS)
    async def chunk(ctx: ChunkContext) -> None: ...

    drainer = OutboxDrainer(settings=OutboxSettings(drain_interval_sec=HOUR), tenants=["acme"])
    delivered: list[Any] = []

    @drainer.sink("told")
    async def sink(event: OutboxEvent) -> None:
        delivered.append(event.payload)

    settings = settings_for(durable_database.gateway_dsn, poll_interval_seconds=HOUR)
    async with running(relay), GatewayClient(settings=settings, outbox=drainer) as client:
        acme = client.tenant("acme")
        names = 0

        async def all_are_woken() -> None:
            nonlocal names
            await eventually(lambda: client.health().state == "listening", 60)
            await eventually(lambda: relay.health().status == "ok", 60)
            await answers_by_notify(client, relay)
            job = await acme.durable.wait(await acme.durable.submit(CHUNKS, [1, 2]), timeout=20)
            assert job.status == "completed"
            conn = await asyncpg.connect(durable_database.gateway_dsn)
            try:
                async with conn.transaction():
                    await Outbox.enqueue(conn, "told", names, tenant="acme")
                await eventually(lambda: names in delivered, 20)
                names += 1
            finally:
                await conn.close()
            async with connected(durable_database.admin_dsn) as admin:
                listeners = [row["application_name"] for row in await backends(admin) if " listener " in row[2]]
            assert len(listeners) == len(set(listeners)) <= 3, listeners

        await all_are_woken()
        for kills in (1, 2):
            for _ in range(kills):
                async with connected(durable_database.admin_dsn) as admin:
                    await admin.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity"
                        " where datname = current_database() and usename like 'relay%login'"
                    )
                await anyio.sleep(0.3)  # some are back, and some not yet
            await all_are_woken()
        await anyio.to_thread.run_sync(durable_server.stop)
        await anyio.sleep(70)
        assert (client.health().state, relay.health().status) == ("degraded", "degraded")
        await anyio.to_thread.run_sync(durable_server.start)
        await all_are_woken()


# --- C05: the other rooms through PgBouncer ---------------------------------------------------------------------------


@pytest.mark.case("C05")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("direct", [True, False], ids=["a direct address", "none"])
async def test_through_pgbouncer_events_are_drained_and_chunks_worked_off_for_each_tenant(
    database: TestDatabase, gateway: Any, admin: Connection, direct: bool
) -> None:
    """In transaction mode, with fewer sessions than connections; woken where there is a way, else by polls."""
    program()
    await admin.execute("create table public.target (tenant text, n bigint); grant insert on public.target to public")
    poll = HOUR if direct else 0.3
    async with pgbouncer(database.server, database.gateway_dsn, database.worker_dsn, pool_size=4) as bouncer:
        gateway_dsn, worker_dsn = bouncer.dsn(database.gateway_dsn), bouncer.dsn(database.worker_dsn)
        core = CoreSettings(
            dsn=SecretStr(worker_dsn),
            listen_dsn=SecretStr(database.worker_dsn) if direct else None,
            statement_cache_size=0,
            probe_timeout_seconds=1.0,
        )
        relay = Relay("erp", tenants=["acme", "zeta"], core=core, settings=RelaySettings(poll_seconds=poll))

        @relay.chunk_handler(CHUNKS)
        async def handler(ctx: ChunkContext) -> str:
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.target values ($1, $2)", ctx.tenant_id, ctx.seq)
                await ctx.save_checkpoint(ctx.seq)
            return ctx.tenant_id

        drainer = OutboxDrainer(settings=OutboxSettings(drain_interval_sec=poll), tenants=["acme", "zeta"])
        drained: list[tuple[str, Any]] = []

        @drainer.sink("told")
        async def sink(event: OutboxEvent) -> None:
            drained.append((event.tenant_id, event.payload))

        settings = settings_for(
            gateway_dsn,
            listen_dsn=SecretStr(database.gateway_dsn) if direct else None,
            statement_cache_size=0,
            probe_timeout_seconds=1.0,
            poll_interval_seconds=poll,
        )
        async with running(relay), GatewayClient(settings=settings, outbox=drainer) as client:
            wanted = ("listening", "listening") if direct else ("polling_only", "polling_only")
            await eventually(lambda: (client.health().state, relay.health().listener) == wanted, 30)
            ids = {}
            for tenant in ("acme", "zeta"):
                ids[tenant] = await client.tenant(tenant).durable.submit(CHUNKS, range(12))
                through = await asyncpg.connect(gateway_dsn, statement_cache_size=0)
                async with through.transaction():
                    for number in range(12):
                        await Outbox.enqueue(through, "told", number, tenant=tenant)
                assert await through.fetchval("select coalesce(current_setting('app.tenant_id', true), '')") == ""
                await through.close()
            for tenant, job_id in ids.items():
                job = await client.tenant(tenant).durable.wait(job_id, timeout=60)
                assert job.status == "completed"
                assert (await Work(gateway, tenant).chunk(job_id, 5)).outcome == tenant
            await eventually(lambda: len(drained) == 24, 60)
    assert sorted(drained) == [(tenant, number) for tenant in ("acme", "zeta") for number in range(12)]
    rows = await admin.fetch("select tenant, count(*), count(distinct n) from public.target group by 1 order by 1")
    assert [tuple(row) for row in rows] == [("acme", 12, 12), ("zeta", 12, 12)]


# --- C07: many who enqueue at once ------------------------------------------------------------------------------------


@pytest.mark.case("C07")
@pytest.mark.timeout(180)
async def test_of_64_who_enqueue_at_once_none_waits_for_the_lock_that_notifications_commit_under(
    durable_server: DevServer, durable_database: TestDatabase
) -> None:
    """With a slow flush. Eight clients of eight tasks, which ring; and, to see that it is looked at rightly, 64
    sessions that notify in their transactions, as a trigger would: these wait for it nearly always.
    """
    async with connected(durable_database.admin_dsn) as admin:
        await admin.execute("alter system set commit_delay = 4000")
        await admin.execute("alter system set commit_siblings = 0")
        await admin.fetch("select pg_reload_conf()")
    try:
        silent = await _enqueue_by_64(durable_database, notify=False)
        async with _waits_for_notify(durable_database) as ours:
            rung = await _enqueue_by_64(durable_database, notify=True)
        async with _waits_for_notify(durable_database) as naive:
            async with connected(durable_database.admin_dsn) as admin:
                await admin.execute("create table public.naive (n bigint); grant all on public.naive to public")
            done = 0

            async def session() -> None:
                nonlocal done
                async with connected(durable_database.gateway_dsn) as conn:
                    until = time.monotonic() + 8
                    while time.monotonic() < until:
                        await conn.execute("begin; insert into public.naive values (1); notify s2r_naive; commit")
                        done += 1

            async with anyio.create_task_group() as group:
                for _ in range(64):
                    group.start_soon(session)
    finally:
        async with connected(durable_database.admin_dsn) as admin:
            for name in ("commit_delay", "commit_siblings"):
                await admin.execute(f"alter system reset {name}")
            await admin.fetch("select pg_reload_conf()")
    print(f"enqueues/s: {rung / 8:.0f} with wake-ups, {ours}; {silent / 8:.0f} without")
    print(f"sessions that notify in their transactions: {done / 8:.0f}/s, {naive}")
    assert naive["waiting"] > naive["looks"], "it is not seen where it is certain"
    assert ours["enqueues waiting"] == 0
    # The stated factor: at worst a fourth of what it is without wake-ups. (Where commits notify it is a fortieth.)
    assert rung * 4 > silent


async def _enqueue_by_64(database: TestDatabase, *, notify: bool) -> int:
    """Enqueue for eight seconds, by eight clients of eight tasks; return how many jobs that were."""
    counts: list[int] = []

    async def client_of_eight() -> None:
        async with open_client(database.gateway_dsn) as client:
            acme, until, done = client.tenant("acme"), time.monotonic() + 8, 0

            async def one() -> None:
                nonlocal done
                while time.monotonic() < until:
                    await acme.enqueue("erp", "Op", notify=notify)
                    done += 1

            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(one)
            counts.append(done)

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(client_of_eight)
    return sum(counts)


@asynccontextmanager
async def _waits_for_notify(database: TestDatabase) -> AsyncIterator[dict[str, int]]:
    """Count how often a session is seen that waits for the database-wide lock of commits that notify."""
    seen = {"looks": 0, "waiting": 0, "enqueues waiting": 0}
    # A session goes on while it is looked at: an enqueue that has begun since is not what waited.
    query = """select count(*),
                 count(*) filter (where a.query like '%relay.enqueue%' and a.query_start <= l.waitstart)
               from pg_locks l join pg_stat_activity a using (pid)
               where l.locktype = 'object' and l.classid = 'pg_database'::regclass and l.objid = 0 and not l.granted"""
    async with connected(database.admin_dsn) as observer, anyio.create_task_group() as group:

        async def look() -> None:
            while True:
                row = await observer.fetchrow(query)
                assert row is not None
                seen["looks"] += 1
                seen["waiting"] += row[0]
                seen["enqueues waiting"] += row[1]
                await anyio.sleep(0.02)

        group.start_soon(look)
        yield seen
        group.cancel_scope.cancel()


# --- C14: an old snapshot ---------------------------------------------------------------------------------------------


@pytest.mark.case("C14")
@pytest.mark.invariant("I10")
@pytest.mark.timeout(900)
async def test_beside_an_old_snapshot_claims_of_50_jobs_a_second_read_as_little_at_the_end_as_at_the_beginning(
    database: TestDatabase, is_long: bool
) -> None:
    """Buffers and time of claims are printed; dead rows pile up meanwhile. Ten minutes with --long, else half one."""
    seconds = 600 if is_long else 30
    async with (
        connected(database.admin_dsn) as old,
        connected(database.gateway_dsn) as gateway,
        explained(database, WORKER_LOGIN) as (worker, plans),
        old.transaction(isolation="repeatable_read"),
    ):
        await old.fetchval(f"select count(*) from {QUEUE}")
        began, sent, cursor = time.monotonic(), 0, 0
        read: list[int] = []
        took: list[float] = []
        while (now := time.monotonic() - began) < seconds:
            # Always so many at once: what a larger claim reads says nothing of a smaller one.
            if int(now * 50) - sent < 5:
                await anyio.sleep(0.02)
                continue
            await enqueue(gateway, 5)
            sent += 5
            plans.take()
            at = time.perf_counter()
            jobs = await claim(worker, 100, after=[cursor])
            took.append(time.perf_counter() - at)
            read.append(sum(p.blocks for p in plans.take() if "for update skip locked" in p.text))
            assert len(jobs) == 5
            cursor = jobs[-1].seq
            done = [Completion(job.job_id, job.fence) for job in jobs]
            await RelayDispatchRepository(worker, TENANT).complete_many(RELAY, done, claimed_by=ME)
        dead = await gateway.fetchval("select 1") and sent
    tenth = len(read) // 10
    for part in range(10):
        some = slice(part * tenth, (part + 1) * tenth)
        print(
            f"{part * 10:3d} %: {statistics.median(read[some]):.0f} buffers (at most {max(read[some])}),"
            f" {statistics.median(took[some]) * 1000:.1f} ms a claim"
        )
    assert dead > seconds * 30, "the machine did not come to the rate"
    first, last = statistics.median(read[:tenth]), statistics.median(read[-tenth:])
    assert last <= first * 1.5 + 20, (first, last)


# --- C30: signals -----------------------------------------------------------------------------------------------------

FAR: dict[str, Any] = {"lease_seconds": 60.0, "sweep_seconds": 600.0}


@pytest.mark.case("C30")
@pytest.mark.invariant("I9")
@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("max_attempts", [1, 2])
async def test_sigterm_while_a_claims_reply_is_on_its_way_gives_its_jobs_back(
    database: TestDatabase, gateway: Any, uvloop: bool, max_attempts: int
) -> None:
    """The server has claimed them, the relay does not know yet. None is left to its lease, and no attempt is used."""
    jobs = Jobs(gateway)
    # The reply takes as long as it must so that the signal is heard before it comes, whatever else the machine does.
    for delay in (1.0, 3.0, 9.0):
        async with (
            TcpProxy.before(database.worker_dsn, delay_seconds=delay) as proxy,
            relay_process(
                proxy.dsn(database.worker_dsn), uvloop=uvloop, grace_seconds=60.0, poll_seconds=0.2, **FAR
            ) as relay,
        ):
            proxy.mode = "delay"
            ids = await jobs.enqueue_many(5, "Sleep", body=b"30", max_attempts=max_attempts, ttl=600)

            async def claimed() -> list[Any]:
                found = [await jobs.get(job_id) for job_id in ids]  # noqa: B023
                assert {job.status for job in found} == {DispatchStatus.CLAIMED}
                return [job.claimed_at for job in found]

            claimed_at = await eventually(claimed, timeout=60, interval=0.005)
            relay.signal(signal.SIGTERM)
            await eventually(lambda: "stops; handlers" in relay.log)
            # Both clocks are this machine's.
            in_time = time.time() - claimed_at[0].timestamp() < delay
            assert await relay.exit() == 0
        if in_time:
            break
    assert relay.started() == []
    results = [await jobs.get(job_id) for job_id in ids]
    assert {(result.status, result.attempt) for result in results} == {(DispatchStatus.PENDING, 0)}


@pytest.mark.case("C30")
@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("grace", [0.3, 60.0])
async def test_two_sigterms_a_tenth_of_a_second_apart_try_one_release_and_end(
    database: TestDatabase, gateway: Any, uvloop: bool, grace: float
) -> None:
    jobs = Jobs(gateway)
    async with relay_process(database.worker_dsn, uvloop=uvloop, grace_seconds=grace, **FAR) as relay:
        again = await jobs.enqueue_many(3, "Sleep", body=b"30", max_attempts=2, ttl=600)
        once = await jobs.enqueue_many(2, "Sleep", body=b"30", ttl=600)
        await jobs.ring()
        await eventually(lambda: len(relay.started()) == 5)
        began = still(relay.process.pid)
        relay.signal(signal.SIGTERM)
        await anyio.sleep(0.1)  # as the case has it
        with contextlib.suppress(ProcessLookupError):
            relay.signal(signal.SIGTERM)
        code = await relay.exit()
        if code == -signal.SIGTERM:
            # On a busy machine the second one may find a relay that is done, and a process without a handler for it.
            assert "has stopped its" in relay.log
        else:
            assert code == 0
            assert relay.ended_at - began < 5
    assert {(await jobs.get(job_id)).status for job_id in again} == {DispatchStatus.PENDING}
    assert {(await jobs.get(job_id)).error_code for job_id in once} == {"S2R-RELAY-STOPPED"}


@pytest.mark.case("C30")
@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
async def test_sigterm_while_it_starts_up_ends_it_on_either_loop(database: TestDatabase, uvloop: bool) -> None:
    """While it connects, and while it is in the middle of its first statements."""
    async with TcpProxy.before(database.worker_dsn, delay_seconds=0.5) as proxy:
        for mode in ("black_hole", "delay"):
            proxy.mode = mode
            accepted = proxy.accepted
            async with relay_process(proxy.dsn(database.worker_dsn), ready=False, uvloop=uvloop) as relay:
                await eventually(lambda: proxy.accepted > accepted, timeout=30)  # noqa: B023
                began = still(relay.process.pid)
                relay.signal(signal.SIGTERM)
                assert await relay.exit() == 0
                assert relay.ended_at - began < 10
            assert "Traceback" not in relay.log


EMBEDDED = """
import asyncio, os, signal, sys

from relay_sdk import Relay, RelaySettings

relay = Relay("erp", tenants=["acme"], dsn=sys.argv[1],
              settings=RelaySettings(lease_seconds=60, sweep_seconds=600, grace_seconds=0.3, poll_seconds=0.3))

@relay.fallback
async def handler(job):
    os.write(1, b"started\\n")
    await asyncio.sleep(30)

async def main():
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(relay.run())
        await told.wait()
        os.write(1, b"the application was told\\n")
        if sys.argv[2] == "stop":
            relay.stop()
        else:
            running.cancel()
    os.write(1, b"the application ends after its relay\\n")

if sys.argv[3] == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
"""


@pytest.mark.case("C30")
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_in_an_application_that_owns_the_signals_the_relay_leaves_them_alone_and_ends_when_it_is_told(
    database: TestDatabase, gateway: Any, tmp_path: Path, loop: str, how: str
) -> None:
    (tmp_path / "embedded.py").write_text(EMBEDDED)
    jobs = Jobs(gateway)
    again = await jobs.enqueue_many(2, max_attempts=2, ttl=600)
    once = await jobs.enqueue(ttl=600)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(tmp_path / "embedded.py"), database.worker_dsn, how, loop),
        env={**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        with anyio.fail_after(40):
            for _ in range(3):
                assert await process.stdout.readline() == b"started\n"
            process.send_signal(signal.SIGTERM)
            rest = await process.stdout.read()
            said = (await process.stderr.read()).decode()
            assert await process.wait() == 0, said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert rest.decode().splitlines() == ["the application was told", "the application ends after its relay"]
    assert "Traceback" not in said
    assert {(await jobs.get(job_id)).status for job_id in again} == {DispatchStatus.PENDING}
    assert (await jobs.get(once)).error_code == "S2R-RELAY-STOPPED"


# --- C38: duplicates by the thousand ----------------------------------------------------------------------------------


@pytest.mark.case("C38")
@pytest.mark.timeout(600)
async def test_ten_thousand_duplicates_leave_one_row_and_use_up_no_number(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Of a keyed job, and of an id said again; of an event's id, and of a durable job. There is nothing that counts."""
    ids: set[UUID] = set()

    async def a_thousand_of_them() -> None:
        async with connected(database.gateway_dsn) as conn:
            repository = RelayDispatchRepository(conn, TENANT)
            for _ in range(1000):
                ids.add(await repository.enqueue(RELAY, "Get", idempotency_key="k"))

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(a_thousand_of_them)
    assert len(ids) == 1
    for table, count in ((REQUEST, 1), (QUEUE, 1), (KEY, 1)):
        assert await admin.fetchval(f"select count(*) from {table}") == count
    (job,) = await claim(worker)
    assert (job.fence, job.attempt) in ((1, 1), (2_147_483_641, 1))
    work = Work(gateway)
    job_id = UUID(int=(7 << 76) | (2 << 62) | 1)
    for _ in range(1000):
        await work.repository.insert_job(TENANT, job_id, CHUNKS, None, submitting=True)
    assert await admin.fetchval("select count(*) from relay.durable_job") == 1
    assert await admin.fetchval("select count(*) from pg_sequences where schemaname = 'relay'") == 0
