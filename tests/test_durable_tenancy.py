"""Durable jobs, each layer of tenancy alone: the predicate without row security, row security without it."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatch_core.dev.logins import GATEWAY_LOGIN, WORKER_LOGIN
from dispatch_core.migrate import grant, migrate
from tests.support import durable
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK, JOB, KIND
from tests.support.high_counters import nth
from tests.support.protocol import DURABLE_TABLES, Connection, connected, logins
from tests.test_tenancy_layers import _as_shipped, _predicate_alone, _row_security_alone

pytestmark = [pytest.mark.invariant("I4"), pytest.mark.case("C40"), pytest.mark.case("C41")]

_ID, _REVIEWED, _GONE = (UUID(int=(7 << 76) | (2 << 62) | n) for n in range(1, 4))


async def _twins(admin: Connection, gateway: Connection, worker: Connection) -> None:
    """The same jobs, chunks, tokens and versions for tenants a and b."""
    for tenant in ("a", "b"):
        await durable.submit(gateway, 6, tenant=tenant, job_id=_ID)
        await durable.submit(gateway, 1, tenant=tenant, job_id=_REVIEWED, kind="review", idempotent=False)
        await durable.submit(gateway, 2, tenant=tenant, job_id=_GONE, kind="gone")
        await durable.claim(worker, 4, tenants=[tenant], token=_ID)
        await durable.claim(worker, 1, tenants=[tenant], kinds=["review"], token=_ID)
        await durable.control(gateway, _GONE, "cancel", tenant=tenant)
    await admin.execute(
        f"""update {CHUNK} set lease_expires_at = now() - interval '1 s'
            where job_id = $1 or seq = 4 and status = 'running'""",
        _REVIEWED,
    )
    await admin.execute(f"update {JOB} set ended_at = now() - interval '31 days' where job_id = $1", _GONE)


async def _rows_of_b(admin: Connection) -> list[str]:
    return [
        row[0]
        for table in DURABLE_TABLES
        for row in await admin.fetch(f"select t::text from {table} t where tenant_id = 'b' order by 1")
    ]


@pytest.mark.parametrize("layer", [_as_shipped, _predicate_alone, _row_security_alone], ids=lambda f: f.__name__[1:])
async def test_nothing_that_is_done_for_one_tenant_reads_or_changes_another_ones_twin(
    admin: Connection, gateway: Connection, worker: Connection, layer: Any
) -> None:
    await _twins(admin, gateway, worker)
    await layer(admin)
    before = await _rows_of_b(admin)
    a: dict[str, Any] = {"tenant": "a"}

    one, two, three = (durable.Lease(_ID, seq, _ID, nth(1)) for seq in (1, 2, 3))
    assert await durable.heartbeat(worker, one, two, **a) == ["applied"] * 2
    await durable.checkpoint(worker, one, 1, **a)
    assert await durable.tell_errors(worker, one, [{"row": 1, "code": "c"}], **a) == 1
    assert await durable.complete(worker, one, **a) == ("applied", False)
    assert await durable.complete_many(worker, two, **a) == ["applied"]
    assert await durable.fail(worker, three, retryable=False, **a) == "failed"
    assert [r["job_id"] for r in await durable.reap(worker, **a)] == [_ID, _REVIEWED]
    assert [r["seq"] for r in await worker.fetch("select * from relay.durable_candidates('a', $1, 9)", [KIND])] == [
        4,
        5,
        6,
    ]
    leases = await durable.claim(worker, 2, tenants=["a"])
    assert [lease.row["tenant_id"] for lease in leases] == ["a"] * 2
    leases += await durable.claim_next(worker, _ID, 5, **a)
    assert await durable.release(worker, *leases, **a) == ["applied"] * 3
    assert (await durable.control(gateway, _ID, "pause", **a))["outcome"] == "applied"
    assert (await durable.control(gateway, _ID, "retry_failed", **a))["chunks"] == 1
    assert await durable.finish(gateway, _REVIEWED, **a) == [("needs_review", True)]
    assert (await durable.resolve(gateway, _REVIEWED, 1, "done", **a))["status"] == "completed"
    assert await gateway.fetchval("select relay.durable_update_job('a', $1, '{\"priority\": 9}')", _ID) is True
    assert (
        await gateway.fetchval("select relay.durable_set_chunk_statuses('a', $1, '{pending}', 'cancelled')", _ID) == 3
    )
    assert (
        await gateway.fetchval("select relay.durable_record_event('a', $1, null, 'n', 'x', '', '', null)", _ID) is True
    )
    assert (await gateway.fetch("select * from relay.durable_refresh_counters('a', $1)", _ID))[0]["chunks_done"] == 2
    assert await durable.states(gateway, _ID, **a) == ["done", "done", "retry", *["cancelled"] * 3]
    assert len(await gateway.fetch("select * from relay.durable_row_errors('a', $1, 9)", _ID)) == 1
    for table, count in (("job", 3), ("chunk", 9), ("row_error", 1)):
        assert len(await gateway.fetch("select * from relay.durable_query('a', $1)", table)) == count, table
    assert "n" in await durable.told(gateway, _ID, **a)
    assert await gateway.fetchval("select relay.durable_retire('a', '30 days', '1 day', 10)") == 1
    while await gateway.fetchval("select relay.durable_remove('a', 100)"):
        pass
    assert await durable.job(gateway, _GONE, **a) is None
    assert await _rows_of_b(admin) == before

    assert await durable.told(gateway, _ID, tenant="b") == ["submitted", "started", "chunk_claimed"]
    assert await durable.states(gateway, _GONE, tenant="b") == ["cancelled"] * 2
    assert [r["job_id"] for r in await durable.reap(worker, tenant="b")] == [_ID, _REVIEWED]


async def test_listings_tell_a_login_of_its_own_tenants_alone(database: TestDatabase, gateway: Connection) -> None:
    for tenant in ("a", "b", "c"):
        await durable.submit(gateway, tenant=tenant)
    async with logins(database) as made:
        bindings: list[tuple[str | None, list[str]]] = [("a", ["a"]), (None, ["a", "b", "c"])]
        for bound, expected in bindings:
            worker = await made.open("worker", bound)
            for sql in ("relay.durable_tenants()", "relay.durable_tenants('{import}')"):
                rows = await worker.fetch(f"select * from {sql}")
                assert sorted(row[0] for row in rows) == expected
            assert await worker.fetch("select * from relay.durable_tenants('{none}')") == []
            rows = await worker.fetch("select * from relay.durable_tenants_due('finish', null, null)")
            assert sorted(row[0] for row in rows) == expected
            assert await worker.fetch("select * from relay.durable_tenants_due('remove', '0 s', '0 s')") == []


async def test_sweeps_take_turns_and_reap_for_sessions_that_are_a_lease_old(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    job_id = await durable.submit(gateway, 2, max_attempts=1)
    (_, last) = await durable.claim(worker, 2)
    await durable.complete(worker, last)
    await durable.run_out(admin)
    sweep = "select * from relay.durable_run_sweeps('me', 100, $1::interval, '30 days', '1 day', '{1 us,1 us,null}')"
    assert await worker.fetch(sweep, durable.seconds(3600)) == [], "a restart may have cut everybody off"
    rows = await worker.fetch(sweep, durable.seconds(0))
    assert [(r["sweep"], r["job_id"], r["seq"], r["status"]) for r in rows] == [
        ("lease", job_id, 1, "failed"),
        ("finish", job_id, None, "completed_with_errors"),
    ]
    slow = sweep.replace("1 us,1 us", "1 hour,1 hour")
    assert await worker.fetch(slow, durable.seconds(0)) == []
    await durable.claim_next(worker, await durable.submit(gateway, 1))
    await durable.run_out(admin)
    assert await worker.fetch(slow, durable.seconds(0)) == [], "not this login's turn"
    assert len(await gateway.fetch(slow, durable.seconds(0))) == 1, "another's is its own"


async def test_verbs_that_raise_where_there_is_nothing_leave_the_callers_binding_as_it_was(
    gateway: Connection, worker: Connection
) -> None:
    bound = "select coalesce(current_setting('app.tenant_id', true), '')"
    job_id = uuid4()
    async with gateway.transaction():
        await gateway.fetchval(
            "select relay.durable_insert_job('a', $1, $2, '{}', true, 3, 0, 'me', true)", job_id, KIND
        )
        await gateway.fetchval("select relay.durable_insert_chunks('a', $1, '[{\"payload\": 1}]')", job_id)
        assert await gateway.fetchval(bound) == ""
        await gateway.fetchval("select relay.durable_seal('a', $1)", job_id)
        assert await gateway.fetchval(bound) == ""
    async with worker.transaction():
        (lease,) = await durable.claim(worker, tenants=["a"])
        await durable.checkpoint(worker, lease, 1, tenant="a")
        assert await worker.fetchval(bound) == ""
        await durable.tell_errors(worker, lease, [{"row": 1}], tenant="a")
        assert await worker.fetchval(bound) == ""
        await durable.complete(worker, lease, tenant="a")
        assert await worker.fetchval(bound) == ""


async def test_the_room_is_installed_alone_and_needs_nothing_of_the_others(bare_database: TestDatabase) -> None:
    await migrate(bare_database.admin_dsn, only=["durable"])
    await grant(bare_database.admin_dsn, GATEWAY_LOGIN, role="gateway", tenant=None, relay=None)
    await grant(bare_database.admin_dsn, WORKER_LOGIN, role="worker", tenant=None, relay=None)
    async with (
        connected(bare_database.gateway_dsn) as gateway,
        connected(bare_database.worker_dsn) as worker,
        connected(bare_database.admin_dsn) as admin,
    ):
        job_id = await durable.submit(gateway, 2)
        one, two = await durable.claim(worker, 2)
        await durable.complete(worker, one)
        await durable.run_out(admin)
        sweep = "select * from relay.durable_run_sweeps('me', 100, '0 s', '0 s', '0 s', '{1 us,1 us,1 us}')"
        assert [row["status"] for row in await worker.fetch(sweep.replace("1 us}", "null}"))] == ["retry"]
        assert await durable.complete_many(worker, two) == ["stale"]
        (two,) = await durable.claim(worker)
        await durable.complete(worker, two)
        assert await durable.finish(worker, job_id) == [("completed", True)]
        assert [row["sweep"] for row in await gateway.fetch(sweep)] != []
        assert await durable.job(gateway, job_id) is None
        names = await admin.fetch(
            "select relname from pg_class where relnamespace = 'relay'::regnamespace and relkind = 'r'"
        )
        assert not [row[0] for row in names if row[0].startswith(("s2r_", "outbox")) or row[0] == "sweep"]
