"""The primary goes, the standby becomes the primary: nothing acknowledged is lost, and work goes on by itself.

All of it with one DSN, which names both servers and wants the one that takes writes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import anyio
import anyio.to_thread
import asyncpg
import pytest

from dispatch_core.models import DispatchStatus
from relay_sdk import DispatchJob, Relay, Reply
from tests.support.eventually import eventually
from tests.support.fleet import Journal, relay_process, serve
from tests.support.gateway import open_client
from tests.support.load import JOBS_PER_SECOND, Load, answers_by_notify, audit
from tests.support.patience import held_up
from tests.support.proxy import TcpProxy
from tests.support.relays import Jobs, new_relay, running
from tests.support.replication import Pair, replicated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RESUMED_SECONDS = 15.0
"""But for what the machine does not let us run; GUARD_SECONDS is against a hang."""
GUARD_SECONDS = 60.0
OUTAGE_SECONDS = 3.0
POLL_SECONDS = 60.0
"""So long that what goes on within 15 seconds goes on by notify."""

RELAY_SETTINGS: dict[str, Any] = {"lease_seconds": 6.0, "poll_seconds": POLL_SECONDS, "sweep_seconds": 1.0}

How = Literal["stopped", "killed", "silent"]


class Attempts:
    """Counts how often this process tries to connect, by port."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: list[tuple[float, int]] = []
        connect = asyncpg.connect

        async def counting(*args: Any, **options: Any) -> Any:
            self.at.append((time.monotonic(), int(options.get("port") or 0)))
            return await connect(*args, **options)

        monkeypatch.setattr(asyncpg, "connect", counting)

    def between(self, start: float, end: float) -> int:
        return sum(start <= at < end for at, _ in self.at)


@asynccontextmanager
async def ways(pair: Pair, how: How) -> AsyncIterator[list[TcpProxy]]:
    """Put a proxy before each of the two servers where the first is to fall silent."""
    if how != "silent":
        yield []
        return
    async with (
        TcpProxy("127.0.0.1", pair.first.port) as first,
        TcpProxy("127.0.0.1", await anyio.to_thread.run_sync(second_port, pair)) as second,
    ):
        pair.ports = (first.port, second.port)
        yield [first, second]


def second_port(pair: Pair) -> int:
    return pair.standby.port


async def fail_over(pair: Pair, how: How, proxies: list[TcpProxy]) -> float:
    """Take the primary away, and promote the standby after a while; return the moment of it."""
    if how == "silent":
        # Its machine is off: no socket is closed, nothing is refused, nothing answers ever again.
        proxies[0].mode = "black_hole"
        await anyio.to_thread.run_sync(pair.kill_primary)
    elif how == "killed":
        await anyio.to_thread.run_sync(pair.kill_primary)
    else:
        await anyio.to_thread.run_sync(pair.primary.stop, "fast")
    await anyio.sleep(OUTAGE_SECONDS)
    return await anyio.to_thread.run_sync(pair.promote)


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@pytest.mark.case("C02")
@pytest.mark.parametrize("how", ["stopped", "killed", "silent"])
async def test_a_failover_under_load_loses_nothing_and_work_resumes_by_notify(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    """I1, I2: synchronous replication; every acknowledged enqueue ends once, every handler started once counts."""
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=True))
    journal = Journal(tmp_path / "journal")
    attempts = Attempts(monkeypatch)
    async with ways(pair, how) as proxies:
        worker_dsn, gateway_dsn = pair.worker_dsn(name), pair.gateway_dsn(name)
        here = serve(new_relay(worker_dsn, **RELAY_SETTINGS), journal)
        async with (
            relay_process(worker_dsn, journal, "erp", "acme", **RELAY_SETTINGS),
            running(here),
            open_client(gateway_dsn, poll_interval_seconds=POLL_SECONDS) as client,
            anyio.create_task_group() as tasks,
        ):
            load = Load(client.tenant("acme"))
            tasks.start_soon(load.run)
            await eventually(lambda: len(journal.entries("ended")) > 2 * JOBS_PER_SECOND, 30)
            began = time.monotonic()
            promoted = await fail_over(pair, how, proxies)
            held_up_before = held_up()
            accepted = len(load.accepted)
            await eventually(lambda: len(load.accepted) > accepted + JOBS_PER_SECOND, GUARD_SECONDS)
            ended = len(journal.entries("ended"))
            await eventually(lambda: len(journal.entries("ended")) > ended + JOBS_PER_SECOND, GUARD_SECONDS)
            print(f"{how}: accepted and done again {time.monotonic() - promoted:.1f} s after the promotion")
            load.stop()
            load.accepted |= set(await answers_by_notify(client, here, within=GUARD_SECONDS))
            resumed, lost = time.monotonic() - promoted, held_up() - held_up_before
            print(f"{how}: by notify {resumed:.1f} s after the promotion, held up for {lost:.1f} s of them")
            assert resumed - lost < RESUMED_SECONDS
            # Two hosts, two pools and two listeners in this process, 200 enqueues a second; each backs off by itself.
            before, since = attempts.between(began, promoted), attempts.between(promoted, time.monotonic())
            print(f"{how}: {before} tries to connect before the promotion, {since} since; {len(load.refused)} refused")
            assert before < 60 + 60 * (promoted - began)
            assert since < 60 + 60 * (time.monotonic() - promoted)
            await audit(pair.admin_dsn(name, of_standby=True), load, journal)
    journal.close()


# --- what an asynchronous standby does not know ---------------------------------------------------------------------


class Handlers:
    """Handlers that wait until they are told to go on, and what became of them."""

    def __init__(self, relay: Relay, answer: bytes) -> None:
        self.began: list[UUID] = []
        self.ended: list[UUID] = []
        self.cancelled: list[UUID] = []
        self.go_on = anyio.Event()

        @relay.handler("Work")
        async def work(job: DispatchJob) -> Reply:
            self.began.append(job.job_id)
            try:
                await self.go_on.wait()
            except BaseException:
                self.cancelled.append(job.job_id)
                raise
            self.ended.append(job.job_id)
            return Reply(answer)


@asynccontextmanager
async def lost_claims(pair: Pair) -> AsyncIterator[tuple[str, list[UUID]]]:
    """Make a pair whose standby has jobs, and does not learn of anything that happens to them from now on."""
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    async with TcpProxy("127.0.0.1", pair.first.port) as stream:
        await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=False, through=stream.port))
        gateway, admin = [await asyncpg.connect(dsn) for dsn in (pair.gateway_dsn(name), pair.admin_dsn(name))]
        ids = await Jobs(gateway).enqueue_many(10, "Work", ttl=120)
        await replicated(admin)
        stream.mode = "black_hole"
        for connection in (gateway, admin):
            connection.terminate()
        yield name, ids


@pytest.mark.invariant("I2")
@pytest.mark.invariant("I3")
@pytest.mark.case("C18")
async def test_the_holder_of_a_lost_claim_changes_nothing_though_its_fence_is_the_current_one(pair: Pair) -> None:
    """I3: the claims of one relay are forgotten by the failover and made again, by another, with the same fences; what
    the first one says is refused by its instance id."""
    async with lost_claims(pair) as (name, ids), TcpProxy("127.0.0.1", pair.first.port) as way:
        # The first relay reaches the new primary only when the second one has claimed there.
        later = TcpProxy("127.0.0.1", pair.standby.port)
        later.mode = "reset"
        async with later:
            pair.ports = (way.port, later.port)
            holder = new_relay(pair.worker_dsn(name), **{**RELAY_SETTINGS, "poll_seconds": 1.0})
            pair.ports = ()
            other = new_relay(pair.worker_dsn(name), **RELAY_SETTINGS)
            held, done = Handlers(holder, b"of the lost claim"), Handlers(other, b"of the new claim")
            async with running(holder):
                await eventually(lambda: sorted(held.began) == sorted(ids))
                fences = {slot.job.job_id: slot.job.fence for slot in slots_of(holder)}
                await anyio.to_thread.run_sync(pair.kill_primary)
                await anyio.to_thread.run_sync(pair.promote)
                gateway = await asyncpg.connect(pair.gateway_dsn(name))
                jobs = Jobs(gateway)
                assert {(await jobs.get(job_id)).status for job_id in ids} == {DispatchStatus.PENDING}, (
                    "nothing was lost"
                )
                async with running(other):
                    await eventually(lambda: sorted(done.began) == sorted(ids))
                    assert {slot.job.job_id: slot.job.fence for slot in slots_of(other)} == fences
                    # Half of the first relay's handlers end, and the others are told of by its heartbeat.
                    held.go_on.set()
                    later.mode = "pass"
                    await eventually(lambda: holder.health().in_hand == 0, 20, message="the first relay is told:")
                    assert holder.metrics.jobs_lost == len(ids)
                    assert holder.metrics.jobs_succeeded == 0
                    assert {(await jobs.get(job_id)).status for job_id in ids} == {DispatchStatus.CLAIMED}
                    done.go_on.set()
                    results = await jobs.ends(ids)
                assert {(r.status, r.response_body, r.attempt) for r in results} == {
                    (DispatchStatus.SUCCEEDED, b"of the new claim", 1)
                }
                gateway.terminate()


@pytest.mark.invariant("I2")
async def test_a_relay_that_is_given_its_own_lost_claims_again_starts_no_second_handler(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """I2: same fence, same instance: to the database it is one claim, and so it is here."""
    async with lost_claims(pair) as (name, ids):
        relay = new_relay(pair.worker_dsn(name), **{**RELAY_SETTINGS, "poll_seconds": 0.5})
        handlers = Handlers(relay, b"once")
        async with running(relay):
            await eventually(lambda: sorted(handlers.began) == sorted(ids))
            await anyio.to_thread.run_sync(pair.kill_primary)
            await anyio.to_thread.run_sync(pair.promote)
            gateway = await asyncpg.connect(pair.gateway_dsn(name))
            jobs = Jobs(gateway)
            await eventually(lambda: "have in hand" in caplog.text or "has in hand" in caplog.text, 20)
            handlers.go_on.set()
            results = await jobs.ends(ids)
            gateway.terminate()
        assert {(r.status, r.response_body, r.attempt) for r in results} == {(DispatchStatus.SUCCEEDED, b"once", 1)}
        assert sorted(handlers.began) == sorted(handlers.ended) == sorted(ids)
        assert relay.metrics.completions_repeated == 0


@pytest.mark.invariant("I1")
async def test_an_asynchronous_failover_under_load_leaves_no_job_without_its_one_end(
    pair: Pair, tmp_path: Path
) -> None:
    """I1 of what the new primary knows: each job that it has ends once; what it never had was lost with the old one."""
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    journal = Journal(tmp_path / "journal")
    async with TcpProxy("127.0.0.1", pair.first.port) as stream, anyio.create_task_group() as tasks:
        await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=False, through=stream.port))
        relay = serve(new_relay(pair.worker_dsn(name), **RELAY_SETTINGS), journal)
        async with (
            relay_process(pair.worker_dsn(name), journal, "erp", "acme", **RELAY_SETTINGS),
            running(relay),
            open_client(pair.gateway_dsn(name), poll_interval_seconds=POLL_SECONDS) as client,
        ):
            load = Load(client.tenant("acme"))
            tasks.start_soon(load.run)
            await eventually(lambda: len(journal.entries("ended")) > 2 * JOBS_PER_SECOND, 30)
            stream.mode = "black_hole"
            accepted = len(load.accepted)
            await eventually(lambda: len(load.accepted) > accepted + JOBS_PER_SECOND // 2)
            promoted = await fail_over(pair, "killed", [])
            held_up_before = held_up()
            ended = len(journal.entries("ended"))
            await eventually(lambda: len(journal.entries("ended")) > ended + JOBS_PER_SECOND, GUARD_SECONDS)
            assert time.monotonic() - promoted - (held_up() - held_up_before) < RESUMED_SECONDS
            load.stop()
            with anyio.fail_after(20):
                await load.ended.wait()
            admin = await asyncpg.connect(pair.admin_dsn(name, of_standby=True))
            await eventually(
                lambda: admin.fetchval("select not exists (select from relay.s2r_relay_dispatch_queue)"), 30, 0.1
            )
            rows = await admin.fetch(
                "select q.job_id, r.status, r.attempt, r.error_code from relay.s2r_relay_dispatch_request q"
                " left join relay.s2r_relay_dispatch_result r on r.tenant_id = q.tenant_id and r.job_id = q.job_id"
            )
            admin.terminate()
            # Of some it knew the claim and not the end that the old one had acknowledged: nobody has them any more.
            ends = Counter((row["status"], row["error_code"], row["attempt"]) for row in rows)
            assert ends.keys() <= {("succeeded", None, 1), ("failed", "S2R-LEASE-LOST", 1)}
            lost = load.accepted - {row["job_id"] for row in rows}
            assert lost, "the fault was none"
            print(f"asynchronous: {len(load.accepted)} accepted, {len(lost)} of them lost with the old primary; {ends}")
    journal.close()


# --- a demoted primary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", ["made read only", "as a standby"])
async def test_connections_to_a_demoted_server_are_thrown_out(pair: Pair, back: str) -> None:
    """The old primary lives, reachable and read only: nobody goes on speaking to it, nor listens there for ever.

    Made read only, it does not cut a single session (25006); stopped in good order it does (57P01), and comes back.
    """
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=True))
    relay = new_relay(pair.worker_dsn(name), **RELAY_SETTINGS)
    handlers = Handlers(relay, b"done")
    handlers.go_on.set()
    async with (
        running(relay),
        open_client(
            pair.gateway_dsn(name), pool_min_size=5, poll_interval_seconds=POLL_SECONDS, probe_seconds=1.0
        ) as client,
    ):
        acme = client.tenant("acme")

        async def calls(count: int) -> None:
            async with anyio.create_task_group() as group:
                for _ in range(count):
                    group.start_soon(partial(acme.call, "erp", "Work", timeout=30))

        await calls(50)
        admin = await asyncpg.connect(pair.admin_dsn(name))
        if back == "made read only":
            await admin.execute("alter system set default_transaction_read_only = on")
            await admin.fetchval("select pg_reload_conf()")
            await replicated(admin)
        else:
            await anyio.to_thread.run_sync(pair.primary.stop, "fast")
        await anyio.to_thread.run_sync(pair.promote)
        if back == "as a standby":
            await anyio.to_thread.run_sync(pair.demote_old)
        await calls(50)
        await answers_by_notify(client, relay, within=30)
        old = await asyncpg.connect(pair.admin_dsn(name))
        assert await old.fetchval("select current_setting('transaction_read_only')") == "on"

        async def nobody_is_left() -> bool:
            return not await old.fetchval(
                "select count(*) from pg_stat_activity where usename like 'relay%' and pid <> pg_backend_pid()"
            )

        await eventually(nobody_is_left, 20, message="nobody of ours is on the old server:")
        for connection in (admin, old):
            connection.terminate()


def slots_of(relay: Relay) -> list[Any]:
    assert relay._session is not None
    assert relay._session._slots is not None
    return list(relay._session._slots)
