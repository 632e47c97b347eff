"""What a stolen worker login is worth in the durable room: chunks that it claims itself, and no decision."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from tests.support import durable
from tests.support.attacks import answer, try_sql
from tests.support.databases import TestDatabase
from tests.support.protocol import Connection, logins
from tests.support.tenants import World, audit, build
from tests.support.verbs import GATEWAY_VERBS, MAY_CALL, verbs

pytestmark = pytest.mark.invariant("I4")

BIGGEST = 2**63 - 1


@pytest.fixture
async def world(admin: Connection, gateway: Connection, worker: Connection) -> World:
    return await build(admin, gateway, worker)


async def test_it_can_decide_nothing_read_nothing_and_tell_no_event_of_a_durable_job(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    """Of its own tenant. What gateways and operators may call and it may not is refused before it looks at anything."""
    denied = [name for name in GATEWAY_VERBS if name.startswith("durable_") and name not in MAY_CALL["worker"]]
    assert len(denied) == 19
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        before = await audit(admin)
        for job_id in world.durable["a"].values():
            for name in denied:
                assert (await answer(thief, verbs("a", "one", job_id)[name], keep=True))[0] == "42501", name
        for call in ("durable_all_tenants()", "durable_turns()"):
            assert await try_sql(thief, f"select * from relay.{call}") == "42501", call
        assert await audit(admin) == before


async def test_it_cannot_end_renew_or_change_a_chunk_that_another_holds(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    """A lease is named by a token of 122 random bits that nobody but its holder is ever told."""
    job_id = world.durable["a"]["running"]
    await admin.execute(
        f"update {durable.CHUNK} set lease_expires_at = now() + interval '1 hour' where status = 'running'"
    )
    row = await admin.fetchrow(
        f"select lease_token, lease_version from {durable.CHUNK} where tenant_id = 'a' and job_id = $1 and seq = 1",
        job_id,
    )
    assert row is not None
    known = await admin.fetch(f"select lease_token from {durable.CHUNK} where lease_token <> $1", row["lease_token"])
    guesses = [uuid4(), UUID(int=0), UUID(int=2**128 - 1), job_id, *(other[0] for other in known)]
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        before = await audit(admin)
        for token in guesses:
            for version in (row["lease_version"], row["lease_version"] + 1, 0):
                lease = durable.Lease(job_id, 1, token, version)
                own: dict[str, Any] = {"tenant": "a"}
                assert await durable.heartbeat(thief, lease, **own) == ["stale"]
                assert await durable.complete_many(thief, lease, **own) == ["stale"]
                assert await durable.release(thief, lease, **own) == ["stale"]
                assert await durable.fail(thief, lease, **own) is None
                for call in (
                    durable.checkpoint(thief, lease, 1, **own),
                    durable.complete(thief, lease, **own),
                    durable.tell_errors(thief, lease, [{"row": 1, "code": "c"}], **own),
                ):
                    with pytest.raises(asyncpg.PostgresError) as caught:
                        await call
                    assert caught.value.sqlstate == "S2041"
            if token != row["lease_token"]:
                held = await thief.fetch("select * from relay.durable_claim_again('{a}', $1)", token)
                assert [r for r in held if (r["job_id"], r["seq"]) == (job_id, 1)] == []
        assert await audit(admin) == before
        # Nor is it given one that is held, by any way to claim.
        assert await durable.claim_chunk(thief, job_id, 1, row["lease_version"], tenant="a", by="thief") is None
        leases = await durable.claim_next(thief, job_id, 10, tenant="a", by="thief")
        assert [lease.seq for lease in leases] == [4], "the one that nobody had"
        kept = await admin.fetchrow(
            f"select lease_token, lease_version, claimed_by from {durable.CHUNK}"
            " where tenant_id = 'a' and job_id = $1 and seq = 1",
            job_id,
        )
        assert kept is not None
        assert (kept["lease_token"], kept["lease_version"]) == (row["lease_token"], row["lease_version"])
        assert kept["claimed_by"] == "holder-mark-a-durable"


async def test_what_it_can_do_is_claim_a_chunk_of_any_kind_and_see_and_say_what_a_holder_may(
    database: TestDatabase, admin: Connection, world: World
) -> None:
    """A chunk names no relay. What it claims it sees, may hold for a day at a time, and may ruin."""
    ids = world.durable["a"]
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        before = await audit(admin, but=("a", None, made.names[-1]))
        first, second = await durable.claim_next(thief, ids["queued"], 2, tenant="a", by="thief")
        assert json.loads(first.row["payload"]) == json.loads(first.row["params"]) == "mark-a-durable"
        assert await durable.claim_next(thief, ids["paused"], 2, tenant="a", by="thief") == []
        assert await durable.claim_next(thief, ids["ended"], 2, tenant="a", by="thief") == []
        with pytest.raises(asyncpg.PostgresError) as caught:
            await durable.heartbeat(thief, first, tenant="a", lease=86401)
        assert caught.value.sqlstate == "S2020"
        assert await durable.heartbeat(thief, first, tenant="a", lease=86400) == ["applied"]
        assert await durable.complete(thief, first, "forged", tenant="a") == ("applied", True), "nothing waits"
        assert await durable.fail(thief, second, "forged", tenant="a", retryable=False) == "failed"
        # It may end a job, as far as that follows from what is stored; and take back what others have lost.
        assert await durable.finish(thief, ids["queued"], tenant="a") == [("completed_with_errors", True)]
        for status in ("running", "paused"):
            assert await durable.finish(thief, ids[status], tenant="a") == [(status, False)]
        assert [(r["job_id"], r["seq"]) for r in await durable.reap(thief, tenant="a")] == [
            (ids["running"], 1),
            (ids["running"], 3),
        ]
        assert await audit(admin, but=("a", None, made.names[-1])) == before


@pytest.mark.parametrize("rows", [BIGGEST, -BIGGEST])
async def test_no_count_that_a_holder_tells_keeps_a_job_from_being_read_cancelled_or_ended(
    database: TestDatabase, gateway: Connection, rows: int
) -> None:
    """Three such counts have a sum that is no bigint."""
    cancelled, ended = await durable.submit(gateway, 4, tenant="a"), await durable.submit(gateway, 3, tenant="a")
    async with logins(database) as made:
        thief = await made.open("worker", "a", "one")
        for job_id in (cancelled, ended):
            for lease in await durable.claim_next(thief, job_id, 3, tenant="a", by="thief"):
                assert await durable.heartbeat(thief, lease, tenant="a", rows_done=[rows]) == ["applied"]
                await durable.checkpoint(thief, lease, 1, tenant="a", rows_done=rows)
                await durable.complete(thief, lease, tenant="a", rows_done=rows, rows_failed=rows)
            read = await durable.job(gateway, job_id, tenant="a", fresh=True)
            assert read is not None
            assert 0 <= read["rows_done"] <= 2**62
        assert (await durable.control(gateway, cancelled, "cancel", tenant="a"))["outcome"] == "applied"
        ((status, has_ended),) = await durable.finish(gateway, ended, tenant="a")
        assert has_ended
        assert status == ("completed_with_errors" if rows > 0 else "completed")
        assert await durable.status(gateway, cancelled, tenant="a") == "cancelled"
