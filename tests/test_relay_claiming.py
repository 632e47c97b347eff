"""When a relay claims, for whom and how much: wake-ups, slots, limits, several tenants, several relays."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import timedelta
from typing import Any

import anyio
import asyncpg
import pytest

from dispatch_core.cursor import ClaimCursor
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import DatabaseError, DatabaseUnavailableError, SchemaMismatchError, TenancyDeniedError
from dispatch_core.migrate import grant
from dispatch_core.models import DispatchStatus
from dispatch_core.settings import CoreSettings
from relay_sdk import DispatchJob, Relay, Reply, Retry, run_relays
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually
from tests.support.proxy import TcpProxy
from tests.support.relays import Jobs, new_relay, running

SUCCEEDED, PENDING = DispatchStatus.SUCCEEDED, DispatchStatus.PENDING
NEVER: dict[str, Any] = {"poll_seconds": 600.0, "sweep_seconds": 600.0}


async def test_a_ring_wakes_a_relay_that_would_not_poll_for_long(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a slow claim from zero the next one is above the cursor, and the one owed may find a job before its ring.
    monkeypatch.setattr(sys.modules[ClaimCursor.__module__], "_PAUSE", 0.0)
    relay = new_relay(database, **NEVER)
    relay.fallback(_nothing)
    jobs = Jobs(gateway)
    async with running(relay):
        assert relay.health().listener == "listening"
        await eventually(lambda: relay.metrics.claims_empty)  # the first poll, which would find the job without a ring
        for n in range(1, 4):
            job_id = await jobs.enqueue()
            await jobs.ring()
            await jobs.end(job_id)
            assert (relay.metrics.wakeups_by_notify, relay.metrics.polls) == (n, 1)
        assert relay.metrics.wakeups_by_poll == 0


async def test_without_a_ring_a_poll_finds_the_work(database: TestDatabase, gateway: Any) -> None:
    relay = new_relay(database, poll_seconds=0.2)
    relay.fallback(_nothing)
    jobs = Jobs(gateway)
    async with running(relay):
        await eventually(lambda: relay.metrics.claims_empty)
        await jobs.end(await jobs.enqueue())
        assert (relay.metrics.wakeups_by_notify, relay.metrics.wakeups_by_poll) == (0, 1)


async def test_a_burst_of_rings_is_one_claim_and_maybe_one_more(database: TestDatabase, gateway: Any) -> None:
    relay = new_relay(database, **NEVER)
    relay.fallback(_nothing)
    async with running(relay):
        await eventually(lambda: relay.metrics.claims_empty)
        before = relay.metrics.claims
        async with gateway.transaction():
            # Distinct payloads, so that PostgreSQL does not fold them into one.
            for n in range(500):
                await gateway.execute("select pg_notify(relay.channel('wake', 'acme', 'erp'), $1)", f"no id {n}")
        await eventually(lambda: relay.metrics.notifications == 500)
        await eventually(lambda: relay._session is not None and relay._session._claimer.has_nothing_to_do)
        assert relay.metrics.claims - before <= 3


@pytest.mark.case("C08")
async def test_garbage_on_the_wake_channel_is_a_ring_like_any_other(database: TestDatabase, gateway: Any) -> None:
    """C08: payloads are a hint; what cannot be read costs one claim."""
    relay = new_relay(database, **NEVER)
    relay.fallback(_nothing)
    jobs = Jobs(gateway)
    async with running(relay):
        for payload in ("zz", "{}", "00000000-0000-0000-0000-000000000000", "x" * 7000):
            job_id = await jobs.enqueue()
            await gateway.execute("select pg_notify(relay.channel('wake', 'acme', 'erp'), $1)", payload)
            await jobs.ring()
            await jobs.end(job_id)


async def test_no_claim_is_made_while_no_slot_is_free(database: TestDatabase, gateway: Any) -> None:
    go_on = asyncio.Event()
    relay = new_relay(database, concurrency=2, **{**NEVER, "poll_seconds": 0.05})

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        await go_on.wait()

    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(5)
    async with running(relay):
        await eventually(lambda: relay.health().free == 0)
        claims = relay.metrics.claims
        for _ in range(5):
            await jobs.ring()
        polls = relay.metrics.polls
        await eventually(lambda: relay.metrics.polls > polls + 2)
        assert relay.metrics.claims == claims
        assert relay.metrics.jobs_claimed == 2
        go_on.set()
        await jobs.ends(ids)


async def test_a_full_claim_is_followed_by_another_at_once(database: TestDatabase, gateway: Any) -> None:
    relay = new_relay(database, concurrency=10, claim_batch=5, **NEVER)
    relay.fallback(_nothing)
    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(100)
    async with running(relay):
        await jobs.ends(ids)
    assert relay.metrics.polls == 1


async def test_two_claims_are_under_way_only_for_a_backlog_and_never_for_the_same_slots(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = RelayDispatchRepository.claim
    relay = new_relay(database, concurrency=40, claim_batch=10, **NEVER)
    relay.fallback(_nothing)
    under_way: list[int] = []
    seen: list[tuple[int, bool, int]] = []
    # What is known of the backlog: of two answers that of the claim which was sent last.
    known = (0, False)

    async def spy(self: Any, *args: Any, limit: int, **options: Any) -> Any:
        nonlocal known
        under_way.append(limit)
        assert relay._session is not None
        assert relay._session._slots is not None
        seen.append((len(under_way), known[1], sum(under_way) + len(relay._session._slots)))
        number = len(seen)
        try:
            claimed = await claim(self, *args, limit=limit, **options)
        finally:
            under_way.remove(limit)
        known = max(known, (number, claimed.looked_at == limit))
        return claimed

    jobs = Jobs(gateway)
    async with running(relay):
        # So that all connections are there: while one is opened, what a claim was decided on may change.
        ids = await jobs.enqueue_many(300)
        await jobs.ring()
        await jobs.ends(ids)
        claims = relay.metrics.claims_empty
        await jobs.ring()
        await eventually(lambda: relay.metrics.claims_empty > claims)
        monkeypatch.setattr(RelayDispatchRepository, "claim", spy)
        ids = await jobs.enqueue_many(5)
        await jobs.ring()
        await jobs.ends(ids)
        assert {count for count, _, _ in seen} == {1}
        ids = await jobs.enqueue_many(300)
        await jobs.ring()
        await jobs.ends(ids)
    assert max(count for count, _, _ in seen) == 2
    assert all(has_backlog for count, has_backlog, _ in seen if count == 2)
    assert max(slots for _, _, slots in seen) <= 40


async def test_a_tenant_rung_beside_a_backlog_is_alone_in_the_very_next_claim(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a backlog in hand there is always a claim under way: a lone job waits neither for it nor in its answer."""
    claim = RelayDispatchRepository.claim
    relay = new_relay(database, tenants=["big", "lone"], concurrency=80, claim_batch=20, **NEVER)
    relay.fallback(_nothing)
    asked: list[list[Any]] = []
    rung_at: list[int] = []

    async def spy(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(list(options["tenants"]))
        if len(asked) in (6, 12, 18):
            assert relay._session is not None
            relay._session._claimer.ring("lone")
            rung_at.append(len(asked))
        return await claim(self, *args, **options)

    jobs = Jobs(gateway, "big")
    ids = await jobs.enqueue_many(800)
    monkeypatch.setattr(RelayDispatchRepository, "claim", spy)
    async with running(relay):
        await jobs.ends(ids)
    assert len(rung_at) == 3
    assert [asked[sent] for sent in rung_at] == [["lone"]] * 3


async def test_where_all_slots_are_taken_the_first_that_is_freed_is_for_who_was_rung_beside_the_backlog(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = RelayDispatchRepository.claim
    relay = new_relay(database, tenants=["big", "lone"], concurrency=4, **NEVER)
    started: list[str] = []
    asked: list[tuple[list[Any], int]] = []
    slot = asyncio.Semaphore(0)

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        started.append(job.tenant_id)
        await slot.acquire()

    async def spy(self: Any, *args: Any, **options: Any) -> Any:
        asked.append((list(options["tenants"]), options["limit"]))
        return await claim(self, *args, **options)

    big, lone = Jobs(gateway, "big"), Jobs(gateway, "lone")
    ids = await big.enqueue_many(20)
    monkeypatch.setattr(RelayDispatchRepository, "claim", spy)
    async with running(relay):
        await eventually(lambda: len(started) == 4)
        for _ in range(3):
            asked.clear()
            await lone.enqueue()
            rung = relay.metrics.notifications
            await lone.ring()
            await eventually(lambda rung=rung: relay.metrics.notifications > rung)  # type: ignore[misc]
            for _ in range(3):
                slot.release()
                count = len(started)
                await eventually(lambda count=count: len(started) == count + 1)  # type: ignore[misc]
            assert started[-3:] == ["lone", "big", "big"]
            assert asked[0] == (["lone"], 1)
        for _ in range(20):
            slot.release()
        await big.ends(ids)
    assert started.count("lone") == 3


async def test_a_burst_that_fills_all_slots_is_followed_by_one_claim_where_claims_from_zero_are_cheap(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[ClaimCursor.__module__], "_CHEAP_SECONDS", 60.0)
    relay = new_relay(database, concurrency=10, **NEVER)
    relay.fallback(_nothing)
    jobs = Jobs(gateway)
    async with running(relay):
        await eventually(lambda: relay.metrics.claims_empty)
        before = relay.metrics.claims
        ids = await jobs.enqueue_many(10)
        await jobs.ring()
        await jobs.ends(ids)
        await eventually(lambda: relay._session is not None and relay._session._claimer.has_nothing_to_do)
        assert relay.metrics.claims - before == 2


async def test_a_delayed_job_runs_when_it_is_due_without_poll_or_another_ring(
    database: TestDatabase, gateway: Any, admin: Any
) -> None:
    relay = new_relay(database, **NEVER)
    started: dict[bytes, float] = {}

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        started[job.body] = time.monotonic()

    jobs = Jobs(gateway)
    ids = [await jobs.enqueue(body=b"later", delay=250), await jobs.enqueue(body=b"soon", delay=250)]
    put_off = "update relay.s2r_relay_dispatch_queue set available_at = clock_timestamp() + $2 where job_id = $1"
    await admin.execute("set app.tenant_id = 'acme'")
    async with running(relay):
        # The first claim was of jobs that are due in minutes. Rung for, the second is of these.
        await eventually(lambda: relay.metrics.claims_empty)
        asked = time.monotonic()
        await admin.execute(put_off, ids[0], timedelta(seconds=1.5))
        await admin.execute(put_off, ids[1], timedelta(seconds=1.0))
        await jobs.ring()
        await jobs.ends(ids)
    assert started[b"soon"] - asked >= 1.0
    assert started[b"later"] - asked >= 1.5
    assert started[b"soon"] < started[b"later"]
    assert relay.metrics.wakeups_by_timer in (1, 2)  # one for both, where the machine was late for the first
    assert relay.metrics.polls == 1


async def test_an_operation_at_its_limit_does_not_hold_up_the_others(database: TestDatabase, gateway: Any) -> None:
    """Far more jobs of it than there are slots lie before the one that is quick."""
    now: list[int] = []
    most: list[int] = []
    go_on = asyncio.Event()
    relay = new_relay(database, concurrency=10)

    @relay.handler("Slow", concurrency=2)
    async def slow(job: DispatchJob) -> None:
        now.append(1)
        most.append(len(now))
        await go_on.wait()
        now.pop()

    relay.handler("Quick")(_nothing)
    jobs = Jobs(gateway)
    slow_ids = await jobs.enqueue_many(60, "Slow")
    quick = await jobs.enqueue("Quick")
    async with running(relay):
        assert (await jobs.end(quick)).status is SUCCEEDED
        assert (await jobs.get(slow_ids[0])).status is DispatchStatus.CLAIMED
        go_on.set()
        results = await jobs.ends(slow_ids, timeout=40)
    assert {(result.status, result.attempt) for result in results} == {(SUCCEEDED, 1)}
    assert max(most) == 2


async def test_a_lone_job_does_not_wait_behind_the_backlog_that_fills_its_operations_line(
    database: TestDatabase, gateway: Any
) -> None:
    """Tenants take turns in the line, and who has most of its places gives one up."""
    go_on = asyncio.Semaphore(0)
    started: list[str] = []
    relay = new_relay(database, tenants=["big", "lone"], concurrency=20, **NEVER)

    @relay.handler("Slow", concurrency=4)
    async def slow(job: DispatchJob) -> None:
        started.append(job.tenant_id)
        await go_on.acquire()

    big, lone = Jobs(gateway, "big"), Jobs(gateway, "lone")
    # Four run, four wait, and the others were sent away for a while.
    await big.enqueue_many(16, "Slow")
    async with running(relay, grace_seconds=0):
        await eventually(lambda: len(started) == 4 and relay.health().in_hand == 8)
        await lone.enqueue("Slow")
        await lone.ring()
        await eventually(lambda: relay.metrics.jobs_claimed == 17)
        go_on.release()
        go_on.release()
        await eventually(lambda: len(started) == 6)
    assert sorted(started[4:]) == ["big", "lone"]


async def test_a_job_is_not_sent_away_for_places_in_the_line_whose_jobs_have_been_withdrawn(
    database: TestDatabase, gateway: Any
) -> None:
    go_on = asyncio.Event()
    started: list[str] = []
    relay = new_relay(database, tenants=["a", "b"], concurrency=10, **NEVER)

    @relay.handler("Slow", concurrency=2)
    async def slow(job: DispatchJob) -> None:
        started.append(job.tenant_id)
        await go_on.wait()

    a, b = Jobs(gateway, "a"), Jobs(gateway, "b")
    waiting = (await a.enqueue_many(4, "Slow"))[2:]
    async with running(relay):
        await eventually(lambda: len(started) == 2 and relay.health().in_hand == 4)
        for job_id in waiting:
            assert await a.repository.mark_expired(job_id) == 1
            await gateway.execute("select relay.ring('{cancel}', '{a}', '{erp}', array[$1])", job_id.hex)
        await eventually(lambda: relay.health().in_hand == 2)
        # Of a tenant that had all places, and of one that had none.
        for jobs in (a, b):
            await jobs.enqueue("Slow")
            await jobs.ring()
        await eventually(lambda: relay.metrics.jobs_claimed == 6)
        go_on.set()
        await eventually(lambda: len(started) == 4)
    assert sorted(started) == ["a", "a", "a", "b"]
    # One that was sent away would have been claimed twice.
    assert relay.metrics.jobs_claimed == 6


async def test_a_job_that_waits_for_its_turn_keeps_its_lease(database: TestDatabase, gateway: Any, admin: Any) -> None:
    relay = new_relay(database, lease_seconds=30.0, heartbeat_seconds=0.1)
    go_on = asyncio.Event()

    @relay.handler("Slow", concurrency=1)
    async def slow(job: DispatchJob) -> None:
        await go_on.wait()

    async def both_are_renewed() -> bool:
        return bool(
            await admin.fetchval(
                "select count(*) = 2 from relay.s2r_relay_dispatch_queue"
                " where state = 'claimed'"
                " and lease_expires_at > claimed_at + interval '30.2 s'"
            )
        )

    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(2, "Slow")
    await admin.execute("set app.tenant_id = 'acme'")
    async with running(relay):
        await eventually(both_are_renewed)
        go_on.set()
        results = await jobs.ends(ids)
    assert {(result.status, result.attempt) for result in results} == {(SUCCEEDED, 1)}
    assert relay.metrics.leases_renewed > 0


# --- several tenants -------------------------------------------------------------------------------------------------


async def test_tenants_take_turns(database: TestDatabase, gateway: Any) -> None:
    """A tenant with a long backlog does not keep the others waiting: each claim gives everybody a share."""
    order: list[str] = []
    relay = new_relay(database, tenants=["big", "small", "tiny"], concurrency=6)

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        order.append(job.tenant_id)

    big, small, tiny = (Jobs(gateway, tenant) for tenant in ("big", "small", "tiny"))
    ids = await big.enqueue_many(200)
    small_ids, tiny_ids = await small.enqueue_many(5), await tiny.enqueue_many(1)
    async with running(relay):
        await small.ends(small_ids)
        await tiny.ends(tiny_ids)
        await big.ends(ids)
    assert max(n for n, tenant in enumerate(order) if tenant != "big") < 30


async def test_more_tenants_than_slots_are_all_served(database: TestDatabase, gateway: Any) -> None:
    tenants = [f"t{n:02}" for n in range(30)]
    served: list[str] = []
    relay = new_relay(database, tenants=tenants, concurrency=4, **NEVER)

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        served.append(job.tenant_id)

    everybody = {tenant: Jobs(gateway, tenant) for tenant in tenants}
    ids = {tenant: await jobs.enqueue_many(3) for tenant, jobs in everybody.items()}
    async with running(relay):
        for tenant, jobs in everybody.items():
            await jobs.ends(ids[tenant])
    assert sorted(set(served)) == tenants
    # Nobody was served twice before everybody was served once, but for those that shared a claim.
    assert len(set(served[:40])) >= 25


async def test_a_ring_claims_for_its_tenant_alone(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[Any]] = []
    claim = RelayDispatchRepository.claim

    async def spy(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(list(options["tenants"]))
        return await claim(self, *args, **options)

    monkeypatch.setattr(RelayDispatchRepository, "claim", spy)
    relay = new_relay(database, tenants=["a", "b", "c"], **NEVER)
    relay.fallback(_nothing)
    jobs = Jobs(gateway, "b")
    async with running(relay):
        await eventually(lambda: relay.metrics.claims_empty)
        job_id = await jobs.enqueue()
        await jobs.ring()
        await jobs.end(job_id)
    assert asked[0] == ["a", "b", "c"]
    assert {tuple(tenants) for tenants in asked[1:]} == {("b",)}


async def test_a_login_that_is_not_bound_to_a_tenant_is_told_at_the_start(database: TestDatabase, admin: Any) -> None:
    await admin.execute("create role relay_worker_of_acme login password 'relay'")
    try:
        await grant(database.admin_dsn, "relay_worker_of_acme", role="worker", tenant="acme", relay="erp")
        dsn = database.dsn("relay_worker_of_acme")
        for tenants, relay_id in ((["acme", "other"], "erp"), (["acme"], "crm")):
            relay = new_relay(dsn, tenants=tenants, relay_id=relay_id)
            relay.fallback(_nothing)
            with pytest.raises(TenancyDeniedError):
                await relay.run()
    finally:
        await admin.execute("drop owned by relay_worker_of_acme; drop role relay_worker_of_acme")


async def test_a_tenant_taken_from_the_login_does_not_stop_the_others(
    database: TestDatabase, gateway: Any, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged when it is taken and when it is given back, not at every poll between."""
    caplog.set_level("INFO", "relay_sdk")
    await admin.execute("create role relay_worker_of_two login password 'relay'")
    try:
        for tenant in ("a", "b"):
            await grant(database.admin_dsn, "relay_worker_of_two", role="worker", tenant=tenant, relay="erp")
        relay = new_relay(database.dsn("relay_worker_of_two"), tenants=["a", "b"], poll_seconds=0.1)
        relay.fallback(_nothing)
        a, b = Jobs(gateway, "a"), Jobs(gateway, "b")
        async with running(relay):
            await a.end(await a.enqueue())
            await admin.execute("select relay.revoke_binding('relay_worker_of_two', 'worker', 'a', 'erp')")
            lost = await a.enqueue()
            assert (await b.end(await b.enqueue())).status is SUCCEEDED
            assert (await a.get(lost)).status is PENDING
            polls = relay.metrics.polls
            await eventually(lambda: relay.metrics.polls >= polls + 5)
            await grant(database.admin_dsn, "relay_worker_of_two", role="worker", tenant="a", relay="erp")
            assert (await a.end(lost)).status is SUCCEEDED
        assert caplog.text.count("may not claim for tenant a") == 1
        assert caplog.text.count("may claim for tenant a again") == 1
        assert "relay erp claims again" not in caplog.text
    finally:
        await admin.execute("drop owned by relay_worker_of_two; drop role relay_worker_of_two")


async def test_finished_work_outlives_a_time_without_rights(
    database: TestDatabase, gateway: Any, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The ends are kept, and written once the login may; the other tenant's leases and ends are not held up."""
    await admin.execute("create role relay_worker_with_gap login password 'relay'")
    try:
        for tenant in ("a", "b"):
            await grant(database.admin_dsn, "relay_worker_with_gap", role="worker", tenant=tenant, relay="erp")
        relay = new_relay(
            database.dsn("relay_worker_with_gap"), tenants=["a", "b"], lease_seconds=1.0, sweep_seconds=600.0
        )
        runs: list[str] = []
        go_on = {"a": asyncio.Event(), "b": asyncio.Event()}

        @relay.fallback
        async def handler(job: DispatchJob) -> Any:
            runs.append(job.tenant_id)
            await go_on[job.tenant_id].wait()
            return Retry(after=0) if job.body == b"again" and job.attempt == 1 else Reply(b"done")

        a, b = Jobs(gateway, "a"), Jobs(gateway, "b")
        ids = await a.enqueue_many(5)
        again = await a.enqueue(body=b"again", max_attempts=2)
        other = await b.enqueue()
        async with running(relay):
            await eventually(lambda: len(runs) == 7)
            await admin.execute("select relay.revoke_binding('relay_worker_with_gap', 'worker', 'a', 'erp')")
            go_on["a"].set()
            await eventually(lambda: "are refused, and are tried again" in caplog.text)
            renewed = relay.metrics.leases_renewed
            await eventually(lambda: relay.metrics.leases_renewed >= renewed + 4)
            go_on["b"].set()
            assert (await b.end(other)).attempt == 1
            assert {await a.status(job_id) for job_id in ids} == {DispatchStatus.CLAIMED}
            await grant(database.admin_dsn, "relay_worker_with_gap", role="worker", tenant="a", relay="erp")
            results = await a.ends([*ids, again])
        assert {result.status for result in results} == {SUCCEEDED}
        assert [result.attempt for result in results] == [1] * 5 + [2]
        assert len(runs) == 8
        assert caplog.text.count("are refused, and are tried again") == 1
        assert caplog.text.count("may not claim for tenant a") <= 1
    finally:
        await admin.execute("drop owned by relay_worker_with_gap; drop role relay_worker_with_gap")


@pytest.mark.parametrize("error", [SchemaMismatchError(), DatabaseError("permission denied", sqlstate="42501")])
async def test_ends_are_kept_while_the_schema_is_another_or_a_grant_is_missing(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    complete_many = RelayDispatchRepository.complete_many
    calls: list[int] = []

    async def refuses(self: Any, relay_id: str, completions: Any, **options: Any) -> Any:
        calls.append(len(completions))
        if len(calls) <= 3:
            raise error
        return await complete_many(self, relay_id, completions, **options)

    monkeypatch.setattr(RelayDispatchRepository, "complete_many", refuses)
    relay = new_relay(database)
    relay.fallback(_nothing)
    jobs = Jobs(gateway)
    async with running(relay):
        result = await jobs.end(await jobs.enqueue())
    assert (result.status, result.attempt, len(calls)) == (SUCCEEDED, 1, 4)


async def test_a_database_without_the_schema_is_named_at_the_start(bare_database: TestDatabase) -> None:
    relay = new_relay(bare_database)
    relay.fallback(_nothing)
    with pytest.raises(SchemaMismatchError):
        await relay.run()


# --- several relays in one process -----------------------------------------------------------------------------------


async def test_relays_of_one_process_share_their_connections(database: TestDatabase, gateway: Any, admin: Any) -> None:
    relays = [new_relay(database, relay_id=name) for name in ("erp", "crm", "pim")]
    for relay in relays:

        @relay.fallback
        async def handler(job: DispatchJob, name: str = relay.relay_id) -> Reply:
            assert job.relay_id == name
            return Reply(name)

    async with running(*relays):
        for relay in relays:
            jobs = Jobs(gateway, relay_id=relay.relay_id)
            job_id = await jobs.enqueue()
            await jobs.ring()
            assert (await jobs.end(job_id)).response_body == relay.relay_id.encode()
        listeners = await admin.fetchval(
            "select count(*) from pg_stat_activity where application_name like '%listener%'"
            " and datname = current_database()"
        )
        assert listeners == 1


async def test_relays_of_one_id_share_the_work_and_each_job_runs_once(database: TestDatabase, gateway: Any) -> None:
    runs: list[Any] = []
    relays = [new_relay(database, concurrency=20) for _ in range(3)]
    for relay in relays:

        @relay.fallback
        async def handler(job: DispatchJob) -> None:
            runs.append(job.job_id)
            await asyncio.sleep(0.002)

    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(600)
    await run_relays(relays, drain=True)
    assert sorted(runs) == sorted(ids)
    assert {(await jobs.get(job_id)).status for job_id in ids} == {SUCCEEDED}
    assert all(relay.metrics.jobs_claimed for relay in relays)


async def test_a_pool_of_the_caller_is_used_and_left_open(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RELAY_DISPATCH_DSN", raising=False)
    async with asyncpg.create_pool(database.worker_dsn, min_size=1, max_size=4) as pool:
        relay = Relay("erp", tenants=["acme"], pool=pool)
        relay.fallback(_nothing)
        jobs = Jobs(gateway)
        ids = await jobs.enqueue_many(20)
        async with running(relay):
            assert relay.health().listener == "polling_only"
            await jobs.ends(ids)
        assert await pool.fetchval("select 1") == 1


async def test_a_start_on_a_callers_pool_does_not_wait_for_ever_for_a_statement(
    database: TestDatabase,
) -> None:
    """A pool of the caller's has no limit of its own, as a rule."""
    async with (
        TcpProxy.before(database.worker_dsn) as proxy,
        asyncpg.create_pool(proxy.dsn(database.worker_dsn), min_size=1, max_size=1) as pool,
    ):
        core = CoreSettings.load(dsn=proxy.dsn(database.worker_dsn), command_timeout_seconds=0.3)
        relay = Relay("erp", tenants=["acme"], pool=pool, core=core)
        relay.fallback(_nothing)
        proxy.mode = "black_hole"
        with anyio.fail_after(15), pytest.raises(DatabaseUnavailableError):
            await relay.run()
        pool.terminate()


# --- draining --------------------------------------------------------------------------------------------------------


async def test_a_drain_ends_when_the_backlog_is_empty_and_retries_are_a_part_of_it(
    database: TestDatabase, gateway: Any
) -> None:
    relay = new_relay(database, concurrency=7)
    failed: set[Any] = set()

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        if job.job_id.int % 3 == 0 and job.job_id not in failed:
            failed.add(job.job_id)
            raise OSError("the first time")

    jobs = Jobs(gateway)
    ids = await jobs.enqueue_many(60, max_attempts=2)
    far = await jobs.enqueue(delay=250)
    with anyio.fail_after(20):
        await relay.run(drain=True)
    assert {(await jobs.get(job_id)).status for job_id in ids} == {SUCCEEDED}
    assert (await jobs.get(far)).status is PENDING
    with anyio.fail_after(HANGS):
        await relay.run(drain=True)  # nothing to do


# --- the cursor ------------------------------------------------------------------------------------------------------


async def test_a_released_job_under_a_constant_backlog_is_claimed_again_by_one_of_the_next_claims_from_zero(
    database: TestDatabase, gateway: Any, worker: Any, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies below the cursor, and no claim above that comes back short, but no claim from zero."""
    # One that was slow because the machine is busy puts off the next by no more than that second.
    monkeypatch.setattr(sys.modules[ClaimCursor.__module__], "_PAUSE", 0.0)
    relay = new_relay(database, concurrency=5, poll_seconds=600.0)
    started: set[Any] = set()

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        started.add(job.job_id)
        await asyncio.sleep(0.01)

    jobs = Jobs(gateway)
    held_id = await jobs.enqueue()
    held = (await Jobs(worker).repository.claim("erp", claimed_by="another")).jobs[0]
    assert held.job_id == held_id
    # As if it were ten seconds older, and so far below any cursor.
    await admin.execute("set app.tenant_id = 'acme'")
    await admin.execute("update relay.s2r_relay_dispatch_queue set seq = seq - 10000000 where job_id = $1", held_id)
    ids = await jobs.enqueue_many(3000)  # six seconds of work at least
    began = time.monotonic()
    async with running(relay, grace_seconds=0):
        await eventually(lambda: relay.metrics.claims - relay.metrics.claims_from_zero > 20)
        from_zero = relay.metrics.claims_from_zero
        await Jobs(worker).repository.release("erp", [("acme", held_id, held.fence, False)], claimed_by="another")
        await eventually(lambda: held_id in started)
        # One may have been under way at the release, and another one since the look.
        assert relay.metrics.claims_from_zero - from_zero <= 3, relay.metrics
        assert len(started) < len(ids), "there was no backlog any more"
        seconds = time.monotonic() - began
        # The first two, and one each second.
        assert relay.metrics.claims_from_zero <= 2 + seconds + 1, relay.metrics


async def _nothing(job: DispatchJob) -> None: ...


async def test_a_relay_with_a_gateways_login_is_told_at_its_start(database: TestDatabase) -> None:
    """The likeliest mistake with two DSNs: it must not look like a relay that is merely idle."""
    relay = Relay("erp", tenants=["acme"], dsn=database.gateway_dsn)

    @relay.handler("Get")
    async def get(_job: DispatchJob) -> None: ...

    with anyio.fail_after(10), pytest.raises(TenancyDeniedError):
        await relay.run()
