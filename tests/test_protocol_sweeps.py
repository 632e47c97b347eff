"""Sweeps and retention: they tidy, within bounds, take turns, and never wait for anybody's work."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import anyio
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import EndedJob
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.protocol import (
    KEY,
    QUEUE,
    RELAY,
    REQUEST,
    RESULT,
    TENANT,
    Connection,
    claim,
    claimed_job,
    connected,
    end_lease,
    enqueue,
    logins,
    make_due,
    pass_deadline,
    settle,
    snapshot,
    status_of,
    stored,
)

ALWAYS = (0.0, 0.0, 0.0, 0.0)


async def _sweep(connection: Connection, relay: str | None = None, **options: Any) -> list[EndedJob]:
    options.setdefault("every_seconds", ALWAYS)
    options.setdefault("lease_seconds", 0.001)
    return await RelayDispatchRepository(connection).run_sweeps(relay, **options)


async def _ended_jobs(gateway: Connection, worker: Connection, count: int, **request: Any) -> list[UUID]:
    ids = await enqueue(gateway, count, **request)
    for job in await claim(worker, count, tenant=request.get("tenant", TENANT)):
        await settle(worker, job, response_body=b"r")
    return ids


async def _age_results(admin: Connection, *job_ids: UUID, by: str = "1 day") -> None:
    await admin.execute(
        f"update {RESULT} set completed_at = completed_at - $2::text::interval where job_id = any ($1)",
        list(job_ids),
        by,
    )


# --- what they do -------------------------------------------------------------------------------


async def test_one_call_does_whatever_sweep_is_due_over_all_tenants_of_the_login(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    (waiting,) = await enqueue(gateway, tenant="a")
    (delayed,) = await enqueue(gateway, tenant="a", delay=100)
    running = await claimed_job(gateway, worker, tenant="b", relay="crm")
    lost = await claimed_job(gateway, worker, tenant="c", relay="pim", max_attempts=2)
    (kept,) = await enqueue(gateway, tenant="c")
    (old,) = await _ended_jobs(gateway, worker, 1, tenant="d")
    await pass_deadline(admin, waiting, delayed, running.job_id)
    await end_lease(admin, lost.job_id)
    await _age_results(admin, old)
    ended = await _sweep(gateway, keep_seconds=3600)
    assert {(item.tenant_id, item.relay_id, item.job_id, item.status.value) for item in ended} == {
        ("a", RELAY, waiting, "expired"),
        ("a", RELAY, delayed, "expired"),
        ("b", "crm", running.job_id, "expired"),
        ("c", "pim", lost.job_id, "pending"),
    }
    assert await status_of(gateway, old, tenant="d") is None
    assert await status_of(gateway, kept, tenant="c") == "pending"
    assert await _sweep(gateway, keep_seconds=3600) == []


async def test_the_promote_sweep_makes_due_jobs_ready_and_the_seq_keeps_their_place(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    due = await enqueue(gateway, 3, delay=100)
    (not_yet,) = await enqueue(gateway, delay=100)
    await make_due(admin, *due)
    await _sweep(worker, RELAY)
    states = dict(await admin.fetch(f"select job_id, state from {QUEUE}"))
    assert states == {**dict.fromkeys(due, "ready"), not_yet: "delayed"}


async def test_a_sweep_stays_within_its_limit_and_the_next_one_goes_on(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    ids = await enqueue(gateway, 10)
    await claim(worker, 5)
    await pass_deadline(admin, *ids)
    counts = []
    for _ in range(4):
        rows = await gateway.fetch("select * from relay.expire_late($1, null, 4)", TENANT)
        counts.append(len(rows))
    assert counts == [4, 4, 2, 0]
    assert (await stored(admin))[RESULT] == 10


@pytest.mark.parametrize("sweep", ["expire", "lease", "purge"])
async def test_a_sweep_that_leaves_work_behind_is_due_again_at_once_and_so_keeps_up_with_any_load(
    admin: Connection, gateway: Connection, worker: Connection, sweep: str
) -> None:
    """A bounded batch once a minute would purge 8 results a second, and a table that gets more would grow for ever."""
    ids: list[UUID] = []
    for tenant in ("a", "b", "c"):
        if sweep == "purge":
            ids += await _ended_jobs(gateway, worker, 10, tenant=tenant)
        else:
            ids += await enqueue(gateway, 10, tenant=tenant)
            if sweep == "lease":
                await claim(worker, 10, tenant=tenant)
    await _age_results(admin, *ids)
    await (end_lease(admin, *ids) if sweep == "lease" else pass_deadline(admin, *ids))
    table = RESULT if sweep == "purge" else QUEUE
    hour = (3600.0, 3600.0, 3600.0, 3600.0)
    left = []
    for _ in range(3):
        await _sweep(gateway, limit=1, keep_seconds=3600, every_seconds=hour)
        left.append(await admin.fetchval(f"select count(*) from {table}"))
    assert left == [10, 0, 0], "twenty batches of one, then the rest"
    due = await admin.fetchval("select next_due_at - now() from relay.sweep where name = $1", sweep)
    assert due > timedelta(minutes=50), "and then the next one is an interval away"


async def test_a_sweep_of_one_relay_leaves_the_others_alone(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    (mine,) = await enqueue(gateway)
    (other,) = await enqueue(gateway, relay="crm")
    await pass_deadline(admin, mine, other)
    assert [item.job_id for item in await _sweep(worker, RELAY)] == [mine]
    assert await admin.fetchval(f"select job_id from {QUEUE}") == other


async def test_what_a_reader_is_told_depends_on_no_sweep(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    ids = [*await enqueue(gateway, 2), (await claimed_job(gateway, worker, relay="crm")).job_id]
    await pass_deadline(admin, *ids)
    before = [await status_of(gateway, job_id) for job_id in ids]
    await _sweep(gateway)
    assert [await status_of(gateway, job_id) for job_id in ids] == before == ["expired"] * 3


async def test_sweeps_skip_rows_that_somebody_is_just_deciding(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    late = await enqueue(gateway, 3)
    done = await _ended_jobs(gateway, worker, 3, tenant="other")
    await pass_deadline(admin, *late)
    await _age_results(admin, *done)
    async with connected(database.admin_dsn) as locker, locker.transaction():
        await locker.execute(f"select from {QUEUE} where job_id = $1 for update", late[0])
        await locker.execute(f"select from {RESULT} where job_id = $1 for update", done[0])
        ended = await _sweep(gateway, keep_seconds=3600)
        assert {item.job_id for item in ended} == set(late[1:])
        assert await admin.fetchval(f"select array_agg(job_id) from {RESULT} where tenant_id = 'other'") == [done[0]]


# --- turns --------------------------------------------------------------------------------------


async def test_a_sweep_is_done_by_one_caller_an_interval_and_by_each_login_for_itself(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    async with connected(database.gateway_dsn) as second:
        turn = "select relay.sweep_turn('expire', interval '1 hour')"
        assert [await gateway.fetchval(turn), await second.fetchval(turn), await worker.fetchval(turn)] == [
            True,
            False,
            True,
        ]
        other = "select relay.sweep_turn('expire', interval '0 s')"
        assert not await second.fetchval(other), "due by the interval of who had the last turn"


async def test_whoever_has_the_turn_in_an_open_transaction_is_not_waited_for(
    database: TestDatabase, gateway: Connection
) -> None:
    turn = "select relay.sweep_turn('expire', interval '0 s')"
    assert await gateway.fetchval(turn)
    async with connected(database.gateway_dsn) as second:
        async with second.transaction():
            assert await second.fetchval(turn)
            assert not await gateway.fetchval(turn)
        assert await gateway.fetchval(turn)


async def test_a_claim_that_asks_is_told_of_a_sweep_that_has_something_to_do_and_takes_the_turn_of_any_other(
    gateway: Connection, worker: Connection, admin: Connection
) -> None:
    repository = RelayDispatchRepository(worker, TENANT)

    async def is_due(every: float | None = 3600.0) -> bool:
        return (await repository.claim(RELAY, claimed_by="me", sweep_seconds=every)).sweep_is_due

    async def make_turn_due(name: str) -> None:
        await admin.execute("update relay.sweep set next_due_at = now() where name = $1", f"{name}:{RELAY}")

    async def is_taken(name: str) -> bool:
        sql = "select next_due_at > now() + interval '50 min' from relay.sweep where name = $1"
        return bool(await admin.fetchval(sql, f"{name}:{RELAY}"))

    assert await is_due(), "nobody has ever swept"
    assert not await is_due(None)
    await _sweep(worker, RELAY, lease_seconds=600.0, every_seconds=(3600.0,) * 4)
    await make_turn_due("expire")
    assert not await is_due(), "a young session has no turn for leases, and no row"
    await _sweep(worker, RELAY, every_seconds=(3600.0,) * 4)
    assert not await is_due()
    await make_turn_due("promote")
    assert not await is_due()
    for name in ("expire", "lease"):
        await make_turn_due(name)
        assert not await is_due(None)
        assert not await is_taken(name)
        assert not await is_due()
        assert await is_taken(name)
    job = await claimed_job(gateway, worker)
    await make_turn_due("lease")
    assert not await is_due()
    await end_lease(admin, job.job_id)
    assert not await is_due(), "the turn is another's"
    await make_turn_due("lease")
    assert await is_due()
    assert not await is_taken("lease")
    await _sweep(worker, RELAY, lease_seconds=0.001, every_seconds=(3600.0,) * 4)
    await make_turn_due("expire")
    assert not await is_due()
    await make_turn_due("expire")
    await enqueue(gateway)
    assert await is_due(), "with a job taken it looks for nothing"
    assert not await is_taken("expire")


async def test_a_sweep_whose_interval_is_null_is_not_done(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job = await claimed_job(gateway, worker)
    (late,) = await enqueue(gateway)
    await end_lease(admin, job.job_id)
    await pass_deadline(admin, late)
    rows = await gateway.fetch(
        "select job_id from relay.run_sweeps(null, 100, '1 ms', '0 s', array[null, null, null, null]::interval[])"
    )
    assert rows == []
    rows = await gateway.fetch(
        "select job_id from relay.run_sweeps(null, 100, '1 ms', '0 s', array[null, '1 s']::interval[])"
    )
    assert [r[0] for r in rows] == [job.job_id]


@pytest.mark.invariant("I4")
async def test_a_login_bound_to_some_relays_sweeps_those_and_is_no_victim_of_the_rest(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Due work of a tenant and relay that it is not bound to is left out; it was an error that ended every sweep."""
    mine = await claimed_job(gateway, worker, tenant="a", max_attempts=2)
    (foreign_relay,) = await enqueue(gateway, tenant="b", relay=RELAY)
    (own_relay,) = await enqueue(gateway, tenant="b", relay="crm")
    (foreign,) = await enqueue(gateway, tenant="c", relay=RELAY)
    await end_lease(admin, mine.job_id)
    await pass_deadline(admin, foreign_relay, own_relay, foreign)
    async with logins(database) as made:
        name = await made.create()
        await made.bind(name, "worker", "a", RELAY)
        await made.bind(name, "worker", "b", "crm")
        await made.bind(name, "gateway", "d")
        both = await made.connect(name)
        assert [item.job_id for item in await _sweep(both, RELAY, keep_seconds=0)] == [mine.job_id]
        assert [item.job_id for item in await _sweep(both, "crm", keep_seconds=0)] == [own_relay]
        assert await _sweep(both, None, keep_seconds=0) == []
    assert {r[0] for r in await admin.fetch(f"select job_id from {QUEUE}")} == {
        mine.job_id,
        foreign_relay,
        foreign,
    }


async def test_a_worker_that_asks_for_a_purge_gets_its_other_sweeps_and_no_purge(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    (done,) = await _ended_jobs(gateway, worker, 1)
    (late,) = await enqueue(gateway)
    await pass_deadline(admin, late)
    assert [item.job_id for item in await _sweep(worker, None, keep_seconds=0)] == [late]
    assert await status_of(gateway, done) == "succeeded"


@pytest.mark.invariant("I4")
async def test_the_listing_of_due_tenants_names_only_those_that_the_login_is_bound_to(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    for tenant in ("a", "b", "c"):
        (old,) = await _ended_jobs(gateway, worker, 1, tenant=tenant)
        (late,) = await enqueue(gateway, tenant=tenant)
        (due,) = await enqueue(gateway, tenant=tenant, delay=100)
        lost = await claimed_job(gateway, worker, tenant=tenant, relay="crm")
        await pass_deadline(admin, late)
        await make_due(admin, due)
        await end_lease(admin, lost.job_id)
        await _age_results(admin, old)
    listing = "select tenant_id from relay.tenants_due($1, $2, '0 s') order by 1"

    async def due_for(connection: Connection, relay: str | None) -> dict[str, list[str]]:
        return {
            sweep: [r[0] for r in await connection.fetch(listing, sweep, relay)]
            for sweep in ("expire", "lease", "promote", "purge")
        }

    async with logins(database) as made:
        one = await made.open("gateway", "b")
        relay = await made.open("worker", "c", RELAY)
        nobody = await made.create()
        await made.bind(nobody, "worker", "a", RELAY)
        await admin.fetchval("select relay.revoke_binding($1, 'worker', 'a', $2)", nobody, RELAY)
        unbound = await made.connect(nobody)
        assert await due_for(one, None) == {"expire": ["b"], "lease": ["b"], "promote": [], "purge": ["b"]}
        assert await due_for(relay, RELAY) == {"expire": ["c"], "lease": ["c"], "promote": ["c"], "purge": []}
        assert await due_for(relay, None) == {"expire": [], "lease": [], "promote": [], "purge": []}
        assert await due_for(unbound, RELAY) == {"expire": [], "lease": [], "promote": [], "purge": []}
        everybody = ["a", "b", "c"]
        assert await due_for(gateway, None) == {
            "expire": everybody,
            "lease": everybody,
            "promote": [],
            "purge": everybody,
        }
        assert (await due_for(worker, RELAY))["promote"] == everybody


# --- retention ----------------------------------------------------------------------------------


async def test_a_purge_takes_result_request_and_key_together_and_only_of_jobs_that_ended_long_ago(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    keyed = [await repository.enqueue(RELAY, "Get", idempotency_key=key) for key in ("old", "young", "live")]
    for job in await claim(worker, 2):
        await settle(worker, job)
    (other,) = await _ended_jobs(gateway, worker, 1, tenant="other")
    await _age_results(admin, keyed[0], other)
    assert await repository.purge(3600) == 1
    assert await repository.purge(3600) == 0
    assert await stored(admin) == {REQUEST: 3, QUEUE: 1, RESULT: 2, KEY: 2}
    assert await repository.poll_status(keyed[0]) is None
    assert [await repository.enqueue(RELAY, "Get", idempotency_key=key) for key in ("young", "live")] == keyed[1:]
    assert await repository.enqueue(RELAY, "Get", idempotency_key="old") != keyed[0], "the key is free again"


async def test_a_key_lives_exactly_as_long_as_its_result(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """However long a job lives and however old its key is: the clock of retention starts at the end."""
    repository = RelayDispatchRepository(gateway, TENANT)
    job_id = await repository.enqueue(RELAY, "Get", idempotency_key="k", ttl=86400)
    await admin.execute(f"update {KEY} set created_at = created_at - interval '30 days'")
    await admin.execute(f"update {REQUEST} set created_at = created_at - interval '30 days'")
    assert await repository.purge(0) == 0
    assert await repository.enqueue(RELAY, "Get", idempotency_key="k") == job_id
    (job,) = await claim(worker)
    await settle(worker, job)
    assert await repository.purge(3600) == 0
    assert await repository.enqueue(RELAY, "Get", idempotency_key="k") == job_id
    await _age_results(admin, job_id)
    assert await repository.purge(3600) == 1
    assert set((await stored(admin)).values()) == {0}


async def test_a_purge_works_in_bounded_batches_the_oldest_first(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    ids = await _ended_jobs(gateway, worker, 10)
    for number, job_id in enumerate(ids):
        await _age_results(admin, job_id, by=f"{100 - number} days")
    repository = RelayDispatchRepository(gateway, TENANT)
    assert await repository.purge(3600, limit=4) == 4
    assert {r[0] for r in await admin.fetch(f"select job_id from {RESULT}")} == set(ids[4:])
    assert [await repository.purge(3600, limit=4) for _ in range(3)] == [4, 2, 0]
    assert set((await stored(admin)).values()) == {0}


@pytest.mark.parametrize("keep", [timedelta(seconds=-1), None])
async def test_a_purge_must_say_how_long_results_are_kept(
    admin: Connection, gateway: Connection, worker: Connection, keep: timedelta | None
) -> None:
    await _ended_jobs(gateway, worker, 1)
    before = await snapshot(admin)
    with pytest.raises(Exception, match="how long") as refused:
        await gateway.fetchval("select relay.purge($1, $2, 10)", TENANT, keep)
    assert getattr(refused.value, "sqlstate", None) == "S2020"
    assert await snapshot(admin) == before


async def test_an_enqueue_with_a_key_that_is_just_being_purged_waits_and_makes_a_new_job(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    old = await repository.enqueue(RELAY, "Get", idempotency_key="k")
    (job,) = await claim(worker)
    await settle(worker, job)
    await _age_results(admin, old)
    made: list[UUID] = []

    async def enqueue_again() -> None:
        made.append(await repository.enqueue(RELAY, "Get", idempotency_key="k"))

    async with connected(database.operator_dsn) as purger, anyio.create_task_group() as group, purger.transaction():
        assert await RelayDispatchRepository(purger, TENANT).purge(3600) == 1
        group.start_soon(enqueue_again)
        await wait_until_blocked(admin, pid_of(gateway), by=pid_of(purger))
    assert made != [old]
    assert await stored(admin) == {REQUEST: 1, QUEUE: 1, RESULT: 0, KEY: 1}
