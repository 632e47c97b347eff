"""`relay-dispatch doctor` finds durable jobs that wait for somebody who does not come, and leaves the others alone."""

from __future__ import annotations

import pytest

from dispatch_core.cli.checks import durable as check
from dispatch_core.cli.checks import examine
from dispatch_core.cli.checks.finding import Finding
from dispatch_core.durable_health import DurableHealth
from dispatch_core.migrate import migrate
from tests.support import durable as sql
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK, EVENT, JOB
from tests.support.protocol import Connection, logins


async def found(dsn: str) -> list[Finding]:
    return [finding for finding in await examine(dsn) if finding.check == "durable jobs"]


async def reviewed(gateway: Connection, worker: Connection, admin: Connection, chunks: int) -> None:
    job_id = await sql.submit(gateway, chunks, idempotent=False, kind="mail")
    await sql.claim(worker, chunks, kinds=["mail"])
    await sql.run_out(admin)
    await sql.reap(worker)
    await sql.finish(worker, job_id)


async def take_turns(worker: Connection) -> None:
    for name in ("lease", "finish"):
        assert await worker.fetchval("select relay.durable_sweep_turn($1, '5 s')", name)


async def test_doctor_is_content_with_jobs_that_run_and_with_paused_ones(
    database: TestDatabase, gateway: Connection, worker: Connection
) -> None:
    running, paused = await sql.submit(gateway, 2), await sql.submit(gateway)
    await sql.claim(worker)
    await sql.control(gateway, paused, "pause")
    assert await sql.status(gateway, running) == "running"
    for dsn in (database.gateway_dsn, database.operator_dsn):
        (finding,) = await found(dsn)
        assert (finding.verdict, finding.found) == (
            "pass",
            "none waits for a person, no lease is left lying; paused: 1",
        )
        assert (finding.values["idle_jobs"], finding.values["lost_chunks"]) == (0, 0)


async def test_doctor_finds_chunks_that_wait_for_a_person(
    database: TestDatabase, gateway: Connection, worker: Connection, admin: Connection
) -> None:
    await reviewed(gateway, worker, admin, 3)
    await admin.execute(f"update {JOB} set updated_at = updated_at - interval '3 hours'")
    (finding,) = await found(database.operator_dsn)
    assert (finding.verdict, finding.found) == (
        "warn", "1 job waits for a person (mail), the first for 3.0 h: 3 of their chunks"
    )  # fmt: skip
    assert "durable list --status needs_review" in str(finding.mend)


async def test_doctor_finds_lost_leases_that_nobody_takes_back_and_that_nobody_sweeps(
    database: TestDatabase, gateway: Connection, worker: Connection, admin: Connection
) -> None:
    await sql.submit(gateway, 2)
    await sql.claim(worker, 2)
    await sql.run_out(admin, 10)
    assert [finding.verdict for finding in await found(database.gateway_dsn)] == ["pass"]
    await sql.run_out(admin, 300)
    _, never = await found(database.gateway_dsn)
    assert never.found.startswith("nobody looks for leases that have run out and jobs that nobody has ended: ")
    await take_turns(worker)
    (lost,) = await found(database.gateway_dsn)
    assert lost.found == "2 chunks have lost their lease, the first 5 min ago, and nobody has taken them back"
    await admin.execute("update relay.durable_turn set next_due_at = now() - interval '5 min' where name = 'lease'")
    _, swept = await found(database.gateway_dsn)
    assert swept.found == "nobody looks for leases that have run out: the turns of these sweeps are not taken"
    assert "start a relay with a chunk handler" in str(swept.mend)


async def test_doctor_finds_jobs_that_nobody_works_on(
    database: TestDatabase, gateway: Connection, worker: Connection, admin: Connection
) -> None:
    job_id = await sql.submit(gateway, 2, kind="import")
    await take_turns(worker)
    assert [finding.verdict for finding in await found(database.gateway_dsn)] == ["pass"]
    for table in (JOB, CHUNK):
        await admin.execute(f"update {table} set updated_at = updated_at - interval '10 min'")
    await admin.execute(f"update {EVENT} set at = at - interval '10 min'")
    (idle,) = await found(database.gateway_dsn)
    assert idle.found == "1 job has chunks to claim, and none under way, one for 10 min (import)"
    (lease,) = await sql.claim(worker)
    await sql.fail(worker, lease, delay=3600)
    await sql.claim(worker)
    # One is under way; and then a retry that waits for its time is nothing to claim.
    assert [finding.verdict for finding in await found(database.gateway_dsn)] == ["pass"]
    await admin.execute(f"delete from {CHUNK} where job_id = $1 and seq = 2", job_id)
    await admin.execute(f"update {CHUNK} set updated_at = updated_at - interval '10 min'")
    assert [finding.verdict for finding in await found(database.gateway_dsn)] == ["pass"]


async def test_doctor_looks_at_the_tenants_of_the_login_alone(
    database: TestDatabase, gateway: Connection, worker: Connection, admin: Connection
) -> None:
    await reviewed(gateway, worker, admin, 1)
    async with logins(database) as made:
        name = await made.create()
        await made.bind(name, "operator", "globex")
        (finding,) = await found(database.dsn(name))
        assert (finding.verdict, finding.values["tenants"]) == ("pass", 1)
        conn = await made.connect(name)
        assert await DurableHealth(conn).tenants() == ["globex"]


async def test_doctor_does_not_miss_the_room_where_it_is_not_installed(bare_database: TestDatabase) -> None:
    await migrate(bare_database.admin_dsn, only=["dispatch"])
    assert await found(bare_database.admin_dsn) == []


@pytest.mark.parametrize("many", [1, 3])
async def test_doctor_says_of_how_many_tenants_it_speaks(
    database: TestDatabase, gateway: Connection, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    monkeypatch.setattr(check, "MANY_TENANTS", many)
    for tenant in ("acme", "globex", "initech"):
        await sql.submit(gateway, tenant=tenant)
    (finding,) = await found(database.operator_dsn)
    assert ("of the first 1 of 3 tenants" in finding.found) is (many == 1)
