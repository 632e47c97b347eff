"""Through the real PgBouncer in transaction mode, where a few server sessions are everybody's.

Gateways and relays work through it with a direct address for LISTEN; without one they find out, say so once and poll;
and what one client leaves in a session is nothing to the next.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import anyio
import anyio.lowlevel
import asyncpg
import pytest
from pydantic import SecretStr

from dispatch_core.database import Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import (
    DatabaseError,
    InvalidDeadlineError,
    RelayDispatchError,
    TenancyUnboundError,
    WaitTimeoutError,
)
from dispatch_core.models import DispatchRequest, DispatchStatus
from dispatch_core.outbox import Outbox
from dispatch_core.settings import CoreSettings
from gateway_sdk import GatewayClient
from relay_sdk import DispatchJob, Relay, RelaySettings, Reply, Retry
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.load import answers_by_notify
from tests.support.pgbouncer import PgBouncer, pgbouncer, program, version
from tests.support.relays import QUICK, running

pytestmark = [pytest.mark.case("C05")]

SUCCEEDED = DispatchStatus.SUCCEEDED
LONG = 600.0
TENANTS = ["acme", "zeta"]


@pytest.fixture(autouse=True)
def _there_is_one() -> None:
    program()


def relay_through(dsn: str, listen_dsn: str | None = None, *, statement_cache_size: int = 0, **settings: Any) -> Relay:
    core = CoreSettings(
        dsn=SecretStr(dsn),
        listen_dsn=None if listen_dsn is None else SecretStr(listen_dsn),
        statement_cache_size=statement_cache_size,
        probe_timeout_seconds=1.0,
    )
    relay = Relay("erp", tenants=TENANTS, core=core, settings=RelaySettings(**{**QUICK, **settings}))

    @relay.handler("Work")
    async def work(job: DispatchJob) -> Any:
        if job.attempt == 1 and job.max_attempts > 1:
            return Retry(after=0.01)
        return Reply(b"%s %s" % (job.tenant_id.encode(), job.body))

    return relay


async def work_for_all(client: GatewayClient, count: int = 40) -> None:
    """Send jobs of every kind for each tenant, all at once; each ends with its own tenant's answer."""

    async def call(tenant: str, number: int) -> None:
        body = f"{tenant} {number}".encode()
        key = f"k{number}" if number % 5 == 0 else None
        result = await client.tenant(tenant).call(
            "erp", "Work", body=body, timeout=30, idempotency_key=key, max_attempts=1 + number % 2
        )
        assert (result.status, result.response_body) == (SUCCEEDED, tenant.encode() + b" " + body)

    async with anyio.create_task_group() as group:
        for number in range(count):
            for tenant in TENANTS:
                group.start_soon(call, tenant, number)
    for tenant in TENANTS:
        acme = client.tenant(tenant)
        many = await acme.enqueue_many([DispatchRequest("erp", "Work", body=b"x" * 100_000) for _ in range(20)])
        for job_id in many:
            assert (await acme.wait(job_id, timeout=30)).response_body == tenant.encode() + b" " + b"x" * 100_000
        # The job outlives the wait: else its end, `expired`, may be there first.
        with pytest.raises(WaitTimeoutError):
            await acme.call("nobody", "Work", timeout=0.1, ttl=30)


async def test_gateway_and_relay_work_through_it_with_a_direct_address_to_listen(
    database: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    """More connections on this side than sessions on the other; nothing is found by polling."""
    async with pgbouncer(database.server, database.gateway_dsn, database.worker_dsn, pool_size=3) as bouncer:
        relay = relay_through(bouncer.dsn(database.worker_dsn), database.worker_dsn, poll_seconds=LONG)
        async with (
            running(relay),
            open_client(
                bouncer.dsn(database.gateway_dsn),
                listen_dsn=SecretStr(database.gateway_dsn),
                statement_cache_size=0,
                poll_interval_seconds=LONG,
                sweep_interval_seconds=0.2,
            ) as client,
        ):
            await work_for_all(client)
            await answers_by_notify(client, relay)
            assert client.health().state == "listening"
        assert relay.metrics.claim_errors == 0
        assert "pooler" not in caplog.text
        assert " ERROR " not in bouncer.log


async def test_without_a_direct_address_both_find_out_say_so_once_and_poll(
    database: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    """And no session is left listening, which PgBouncer would give to somebody else."""
    async with pgbouncer(database.server, database.gateway_dsn, database.worker_dsn, pool_size=3) as bouncer:
        relay = relay_through(bouncer.dsn(database.worker_dsn), poll_seconds=0.2)
        async with (
            running(relay),
            open_client(
                bouncer.dsn(database.gateway_dsn),
                statement_cache_size=0,
                poll_interval_seconds=0.2,
                probe_timeout_seconds=1.0,
            ) as client,
        ):
            await eventually(
                lambda: (client.health().state, relay.health().listener) == ("polling_only", "polling_only"),
                20,
                message="both find out:",
            )
            assert caplog.text.count("a transaction pooler stands before") == 2
            await work_for_all(client, 20)
            assert (client.health().state, relay.health().listener) == ("polling_only", "polling_only")
            listening = await in_every_session(
                bouncer, database, "select count(*) from pg_catalog.pg_listening_channels()"
            )
            assert set(listening) == {0}
    assert caplog.text.count("a transaction pooler stands before") == 2


async def in_every_session(bouncer: PgBouncer, database: TestDatabase, query: str, count: int = 3) -> list[Any]:
    """Ask a question in each server session of the gateway's, by transactions that are open at the same time."""
    answers: dict[int, Any] = {}
    connections = [
        await asyncpg.connect(bouncer.dsn(database.gateway_dsn), statement_cache_size=0) for _ in range(count)
    ]
    for connection in connections:
        await connection.execute("begin")
        answers[await connection.fetchval("select pg_backend_pid()")] = await connection.fetchval(query)
    for connection in connections:
        await connection.execute("rollback")
        await connection.close()
    assert len(answers) == count
    return list(answers.values())


@pytest.mark.invariant("I4")
@pytest.mark.case("C39")
@pytest.mark.case("C40")
async def test_tenants_never_leak_between_clients_of_one_session(database: TestDatabase, admin: Any) -> None:
    """I4: two sessions for twelve clients that succeed, fail, roll back and are cancelled in every verb; after each,
    nothing is bound, so a call without a tenant is refused."""
    chance = random.Random(11)
    async with pgbouncer(database.server, database.gateway_dsn, pool_size=2) as bouncer:
        dsn = bouncer.dsn(database.gateway_dsn)
        stored: dict[UUID, str] = {}

        async def client(tenant: str) -> None:
            other = next(name for name in TENANTS if name != tenant)
            connection = await asyncpg.connect(dsn, statement_cache_size=0)
            mine = RelayDispatchRepository(connection, tenant)
            for _ in range(25):
                await anyio.lowlevel.checkpoint()
                match chance.randrange(6):
                    case 0:
                        stored[await mine.enqueue("erp", "Work")] = tenant
                    case 1:
                        for job_id, owner in chance.sample(list(stored.items()), min(3, len(stored))):
                            found = await mine.poll_status(job_id)
                            assert (found is not None) == (owner == tenant)
                    case 2:  # another tenant's, inside a transaction of one's own, which is then rolled back
                        transaction = connection.transaction()
                        await transaction.start()
                        await mine.enqueue("erp", "Work")
                        await Outbox.enqueue(connection, "told", {}, tenant=tenant)
                        with pytest.raises(RelayDispatchError):
                            await RelayDispatchRepository(connection, "").enqueue("erp", "Work")
                        with pytest.raises(RelayDispatchError):
                            await RelayDispatchRepository(connection, other).enqueue("", "Work")
                        await transaction.rollback()
                    case 3:  # an error in the middle of a verb
                        with pytest.raises(InvalidDeadlineError):
                            await mine.enqueue("erp", "Work", expires_at=datetime.now(UTC) - timedelta(hours=1))
                    case 4:  # given up in the middle
                        with anyio.move_on_after(0.0005):
                            stored[await mine.enqueue("erp", "Work")] = tenant
                    case 5:
                        await mark(mine, stored, tenant, chance)
                if connection.is_closed():
                    connection = await asyncpg.connect(dsn, statement_cache_size=0)
                    mine = RelayDispatchRepository(connection, tenant)
                await unbound(connection)
            await connection.close()

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(client, TENANTS[number % 2])
        bound = await in_every_session(
            bouncer, database, "select coalesce(current_setting('app.tenant_id', true), '')", 2
        )
        assert set(bound) == {""}
    rows = await admin.fetch("select job_id, tenant_id from relay.s2r_relay_dispatch_request")
    owners = {row["job_id"]: row["tenant_id"] for row in rows}
    assert {job_id: owners.get(job_id) for job_id in stored} == stored


async def mark(mine: RelayDispatchRepository, stored: dict[UUID, str], tenant: str, chance: random.Random) -> None:
    for job_id, owner in chance.sample(list(stored.items()), min(2, len(stored))):
        changed = await mine.mark_expired(job_id)
        assert changed in ((0, 1) if owner == tenant else (0,))


async def unbound(connection: Any) -> None:
    """Hold that no tenant is bound, as far as whoever has the session next can see."""
    assert await connection.fetchval("select nullif(current_setting('app.tenant_id', true), '')") is None
    with pytest.raises(TenancyUnboundError):
        await RelayDispatchRepository(connection).enqueue("erp", "Work")


async def test_a_restart_of_it_is_a_network_fault_like_any_other(database: TestDatabase) -> None:
    """Clients are cut, statements under way are lost; what was asked for is done once all the same."""
    async with pgbouncer(database.server, database.gateway_dsn, database.worker_dsn, pool_size=3) as bouncer:
        relay = relay_through(bouncer.dsn(database.worker_dsn), database.worker_dsn)
        async with (
            running(relay),
            open_client(
                bouncer.dsn(database.gateway_dsn),
                listen_dsn=SecretStr(database.gateway_dsn),
                statement_cache_size=0,
                poll_interval_seconds=0.5,
            ) as client,
            anyio.create_task_group() as group,
        ):
            group.start_soon(work_for_all, client)
            for _ in range(3):
                await anyio.sleep(0.2)
                await bouncer.restart()


@pytest.mark.invariant("I4")
async def test_a_statement_of_another_process_is_never_executed_in_place_of_ours(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the statement cache on, which is a mistake here: it is refused, and the refusal names the setting."""
    async with pgbouncer(database.server, database.gateway_dsn, pool_size=2) as bouncer:
        dsn = bouncer.dsn(database.gateway_dsn)

        async def ask(pool: Database, who: str) -> str:
            ((answer,),) = await pool.execute(f"select '{who}' || $1::text", "!")
            return str(answer)

        async with Database(dsn, max_size=1) as one, Database(dsn, max_size=1) as other:
            holder = await asyncpg.connect(dsn, statement_cache_size=0)
            # As two processes, whose drivers both begin at 1. Each prepares on its own session: the other is held.
            monkeypatch.setattr("asyncpg.connection._uid", 0)
            assert await ask(one, "one") == "one!"
            await holder.execute("begin")
            monkeypatch.setattr("asyncpg.connection._uid", 0)
            assert await ask(other, "other") == "other!"
            refused = 0
            for _ in range(2):
                for pool, who in ((one, "one"), (other, "other")):
                    try:
                        assert await ask(pool, who) == f"{who}!"
                    except DatabaseError as error:
                        refused += "RELAY_DISPATCH_STATEMENT_CACHE_SIZE=0" in str(error)
                await holder.execute("rollback")
            assert refused >= 1
            await holder.close()


async def test_where_it_keeps_prepared_statements_they_can_be_kept_here_too(database: TestDatabase) -> None:
    """Since 1.21, where it is told to: max_prepared_statements."""
    if version() < (1, 21):
        pytest.skip("this PgBouncer is older than 1.21 and keeps no prepared statements")
    logins = (database.gateway_dsn, database.worker_dsn)
    async with pgbouncer(database.server, *logins, pool_size=3, max_prepared_statements=200) as bouncer:
        relay = relay_through(bouncer.dsn(database.worker_dsn), database.worker_dsn, statement_cache_size=100)
        async with (
            running(relay),
            open_client(bouncer.dsn(database.gateway_dsn), listen_dsn=SecretStr(database.gateway_dsn)) as client,
        ):
            await work_for_all(client)
        assert relay.metrics.claim_errors == 0
