"""What a login can hold up by leaving a transaction open: its own work, and for whom that is stated in SECURITY.md."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import UUID

import anyio
import asyncpg
import pytest

from dispatch_core import RelayDispatchRepository
from dispatch_core.errors import RelayDispatchError
from dispatch_core.models import DispatchRequest
from tests.support import durable
from tests.support.attacks import answer, try_sql
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import PlayedRelay, open_client
from tests.support.protocol import Connection, enqueue, logins

pytestmark = pytest.mark.invariant("I4")

_CLAIM = "select job_id, outcome from relay.claim('one', '{a}', 100, 'thief', gen_random_uuid(), '1 day')"


async def _keep(
    thief: Connection, store: Callable[[float], Awaitable[list[UUID]]], *, lease: str = "1 day"
) -> tuple[list[UUID], float]:
    """Have the thief keep jobs locked that are late soon; return them, and for how many seconds they were stored.

    It has to claim them before they are late: where the machine does not let it, they are given longer.
    """
    for ttl in (0.3, 1.0, 3.0, 10.0):
        kept = await store(ttl)
        await thief.execute("begin")
        rows = await thief.fetch(_CLAIM.replace("1 day", lease))
        if {row["job_id"] for row in rows if row["outcome"] == "claimed"} == set(kept):
            return kept, ttl
        await thief.execute("rollback")
    raise AssertionError("they were late each time")


async def _pass(connection: Connection, seconds: float) -> None:
    """Let time pass that the database's clock has seen: what is locked cannot be given another deadline."""
    until = await connection.fetchval("select clock_timestamp() + make_interval(secs => $1)", seconds)
    await eventually(lambda: connection.fetchval("select clock_timestamp() > $1", until))


async def test_a_row_that_a_worker_keeps_locked_holds_up_the_answer_for_no_other_job(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    """Past its deadline its status cannot be decided; the others of the same poll have theirs, a moment later."""
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        kept, ttl = await _keep(thief, lambda ttl: enqueue(gateway, 3, tenant="a", relay="one", ttl=ttl))
        (free,) = await enqueue(gateway, 1, tenant="a", relay="two", ttl=ttl)
        await _pass(gateway, ttl)
        await gateway.execute("set statement_timeout = '20 s'; set lock_timeout = '15 s'")
        rows = await gateway.fetch("select * from relay.poll('a', $1)", [*kept, free])
        assert [row["status"] for row in rows] == ["pending"] * 3 + ["expired"]
        assert all(row["remaining"].total_seconds() <= 0 for row in rows)
        assert await gateway.fetchval("show lock_timeout") == "15s", "the caller's own is as it was"
        # In a transaction of the caller's too, which goes on.
        async with gateway.transaction():
            await gateway.fetch("select * from relay.poll('a', $1)", kept)
            assert await gateway.fetchval("show lock_timeout") == "15s"
        await thief.execute("rollback")
        rows = await gateway.fetch("select * from relay.poll('a', $1)", [*kept, free])
        assert [row["status"] for row in rows] == ["expired"] * 4


async def test_a_wait_for_a_job_that_a_worker_keeps_locked_ends_with_its_deadline_and_the_others_go_on(
    database: TestDatabase, worker: Connection
) -> None:
    """It ends with an error that names the job and says to ask again: nothing is invented (I6)."""
    async with logins(database) as made, open_client(database.gateway_dsn) as client:
        thief = await made.open("worker", "a", "one")
        tenant = client.tenant("a")
        kept, _ = await _keep(thief, lambda ttl: tenant.enqueue_many([DispatchRequest("one", "Get", ttl=ttl)] * 5))
        said: list[RelayDispatchError] = []

        async def wait(place: int) -> None:
            with pytest.raises(RelayDispatchError) as caught:
                await tenant.wait(kept[place], timeout=60)
            said.append(caught.value)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for place in range(len(kept)):
                    group.start_soon(wait, place)
                played = PlayedRelay(worker, "a", "two")
                for _ in range(10):
                    job_id = await tenant.enqueue("two", "Get", body=b"mine", ttl=60)
                    await played.work()
                    assert (await tenant.wait(job_id, timeout=20)).response_body == b"mine"
        assert {(error.code, error.retryable) for error in said} == {("S2R-DATABASE-UNAVAILABLE", True)}
        assert {getattr(error, "job_id", None) for error in said} == set(kept)
        # Once the session is ended they are what they are.
        await thief.execute("rollback")
        assert {(await tenant.wait(job_id, timeout=20)).status for job_id in kept} == {"expired"}


async def test_nothing_that_sweeps_claims_or_beats_waits_for_a_row_that_somebody_keeps(
    database: TestDatabase, admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 3, tenant="a")
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        kept, ttl = await _keep(thief, lambda ttl: enqueue(gateway, 5, tenant="a", relay="one", ttl=ttl), lease="1 us")
        assert len(await durable.claim_next(thief, job_id, 2, tenant="a", lease=0.001)) == 2
        await enqueue(gateway, 5, tenant="a", relay="one")
        await _pass(admin, ttl)
        for connection in (gateway, worker):
            await connection.execute("set statement_timeout = '20 s'; set lock_timeout = '15 s'")
        # Each of these takes milliseconds; whoever waited would do so until the lock timeout, which is an error.
        rows = [row for row in await worker.fetch(_CLAIM.replace("thief", "me")) if row["outcome"] == "claimed"]
        assert len(rows) == 5
        assert not {row["job_id"] for row in rows} & set(kept)
        for call in (
            "expire_late('a', 'one', 10)", "reclaim_lost('a', 'one', 10)", "promote_due('a', 'one', 10)",
            "run_sweeps('one', 10, '0 s', null, '{1 us,1 us,1 us,null}')", "durable_reap('a', 'me', 10)",
            "durable_run_sweeps('me', 10, '0 s', '0 s', '0 s', '{1 us,1 us,null}')",
        ):  # fmt: skip
            assert await try_sql(worker, f"select * from relay.{call}") is None, call
        for call in ("purge('a', '0 s', 10)", "list_jobs('a')", "backlog('a')", "durable_remove('a', 10)"):
            assert await try_sql(gateway, f"select * from relay.{call}") is None, call
        assert [lease.seq for lease in await durable.claim_next(worker, job_id, 3, tenant="a")] == [3]
        # What decides about the job itself waits for who claims: as long as the caller's timeouts let it.
        await gateway.execute("set lock_timeout = '100ms'")
        for action in ("pause", "cancel"):
            state, _ = await answer(gateway, (f"relay.durable_control('a', $1, '{action}')", [job_id]))
            assert state == "55P03"
        # And the operator's way out, which takes everything of the thief's with it.
        pid = await thief.fetchval("select pg_backend_pid()")
        await admin.execute("select pg_terminate_backend($1, 10000)", pid)
        assert (await durable.control(gateway, job_id, "cancel", tenant="a"))["outcome"] == "applied"
        assert await durable.states(gateway, job_id, tenant="a") == ["cancelled"] * 3


async def test_what_is_prepared_for_a_second_phase_is_refused_where_the_server_is_as_it_comes(
    database: TestDatabase, gateway: Connection
) -> None:
    """A prepared transaction keeps its locks through every restart, and belongs to no session that could be ended."""
    await enqueue(gateway, 1, tenant="a", relay="one")
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        await thief.execute("begin")
        await thief.fetch(_CLAIM)
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError):
            await thief.execute("prepare transaction 'x'")
        await thief.execute("rollback")
    assert [job["status"] for job in await RelayDispatchRepository(gateway, "a").list_jobs()] == ["pending"]
    assert await gateway.fetchval("show max_prepared_transactions") == "0"
