"""Tenants' logins through the real PgBouncer: kept apart by PostgreSQL, or mapped onto one login, which they then are.

A binding is a PostgreSQL login's, `session_user`, and that is what PgBouncer connects as. A pool is one login's, so
where tenants have logins of their own no session is ever used for two of them. Where the pooler forces one login on
all, no tenant is left behind for the next client, and which of that login's tenants a client names is its own affair.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import anyio
import anyio.lowlevel
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import TenancyDeniedError, TenancyMismatchError, TenancyUnboundError
from tests.support.databases import TestDatabase
from tests.support.pgbouncer import pgbouncer, program
from tests.support.protocol import Connection, connected, logins

pytestmark = [pytest.mark.invariant("I4"), pytest.mark.case("C40")]

TENANTS = ("acme", "zeta")


@pytest.fixture(autouse=True)
def _there_is_one() -> None:
    program()


def dsn_of(dsn: str, login: str) -> str:
    """Return the DSN with another login, which PgBouncer alone need know."""
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{login}:secret@{parts.netloc.rpartition('@')[2]}"))


async def test_each_tenants_login_is_denied_the_others_and_shares_no_session_with_it(
    database: TestDatabase, admin: Connection
) -> None:
    """Though they are pooled by one PgBouncer, and know each other's ids."""
    async with logins(database) as made:
        names = {}
        for tenant in TENANTS:
            names[tenant] = await made.create()
            await made.bind(names[tenant], "gateway", tenant)
        dsns = {tenant: database.dsn(name) for tenant, name in names.items()}
        async with pgbouncer(database.server, *dsns.values(), pool_size=1) as bouncer:
            stored: dict[str, Any] = {}
            pids: dict[str, set[int]] = {tenant: set() for tenant in TENANTS}

            async def client(tenant: str, other: str) -> None:
                async with connected(bouncer.dsn(dsns[tenant]), statement_cache_size=0) as connection:
                    mine = RelayDispatchRepository(connection, tenant)
                    stored[tenant] = await mine.enqueue("erp", "Work")
                    for _ in range(10):
                        await anyio.lowlevel.checkpoint()
                        pids[tenant].add(await connection.fetchval("select pg_backend_pid()"))
                        theirs = RelayDispatchRepository(connection, other)
                        with pytest.raises(TenancyDeniedError):
                            await theirs.enqueue("erp", "Work")
                        if other in stored:
                            with pytest.raises(TenancyDeniedError):
                                await theirs.poll_status(stored[other])
                            assert await mine.poll_status(stored[other]) is None
                            assert await mine.mark_expired(stored[other]) == 0
                        assert await mine.poll_status(stored[tenant]) is not None
                        with pytest.raises(TenancyUnboundError):
                            await RelayDispatchRepository(connection).enqueue("erp", "Work")

            async with anyio.create_task_group() as group:
                for tenant, other in (TENANTS, TENANTS[::-1]):
                    for _ in range(3):
                        group.start_soon(client, tenant, other)
            assert pids["acme"].isdisjoint(pids["zeta"])
    rows = await admin.fetch("select tenant_id, count(*) from relay.s2r_relay_dispatch_request group by 1")
    assert {row[0]: row[1] for row in rows} == dict.fromkeys(TENANTS, 3)


async def test_logins_that_the_pooler_maps_onto_one_are_that_one_and_leave_no_tenant_to_each_other(
    database: TestDatabase, admin: Connection
) -> None:
    """One session for all of them; whoever names a tenant that the one login has not is denied, like that login."""
    async with logins(database) as made:
        forced = await made.create()
        for tenant in TENANTS:
            await made.bind(forced, "gateway", tenant)
        dsns = {tenant: dsn_of(database.gateway_dsn, f"pooled_{tenant}") for tenant in TENANTS}
        async with pgbouncer(database.server, *dsns.values(), pool_size=1, forced_dsn=database.dsn(forced)) as bouncer:
            stored: dict[str, Any] = {}
            seen: set[tuple[int, str]] = set()

            async def client(tenant: str, other: str) -> None:
                async with connected(bouncer.dsn(dsns[tenant]), statement_cache_size=0) as connection:
                    mine = RelayDispatchRepository(connection, tenant)
                    stored[tenant] = await mine.enqueue("erp", "Work")
                    for turn in range(20):
                        await anyio.lowlevel.checkpoint()
                        row = await connection.fetchrow("select pg_backend_pid(), session_user::text")
                        assert row is not None
                        seen.add(tuple(row))
                        if turn % 3 == 0:
                            transaction = connection.transaction()
                            await transaction.start()
                            await mine.enqueue("erp", "Work")
                            await transaction.rollback()
                        if other in stored:
                            assert await mine.poll_status(stored[other]) is None
                            assert await mine.mark_expired(stored[other]) == 0
                        assert await mine.poll_status(stored[tenant]) is not None
                        with pytest.raises(TenancyUnboundError):
                            await RelayDispatchRepository(connection).enqueue("erp", "Work")
                        with pytest.raises(TenancyDeniedError):
                            await RelayDispatchRepository(connection, "initech").enqueue("erp", "Work")

            async with anyio.create_task_group() as group:
                for tenant, other in (TENANTS, TENANTS[::-1]):
                    for _ in range(3):
                        group.start_soon(client, tenant, other)
            assert len(seen) == 1
            assert {login for _, login in seen} == {forced}
            # To PostgreSQL they are one, so nothing keeps one client from the other tenant if it names it.
            async with connected(bouncer.dsn(dsns["zeta"]), statement_cache_size=0) as connection:
                assert await RelayDispatchRepository(connection, "acme").poll_status(stored["acme"]) is not None
    rows = await admin.fetch("select tenant_id, count(*) from relay.s2r_relay_dispatch_request group by 1")
    assert {row[0]: row[1] for row in rows} == dict.fromkeys(TENANTS, 3)


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_tenant_that_is_set_for_a_session_stays_for_the_next_client_unless_the_pooler_resets_it(
    database: TestDatabase, admin: Connection, *, is_reset: bool
) -> None:
    """`set app.tenant_id`, without LOCAL: a call that names another tenant is refused, and one that names none is for
    the one that was left."""
    async with pgbouncer(
        database.server, database.gateway_dsn, pool_size=1, server_reset_query_always=int(is_reset)
    ) as bouncer:
        dsn = bouncer.dsn(database.gateway_dsn)
        async with (
            connected(dsn, statement_cache_size=0) as one,
            connected(dsn, statement_cache_size=0) as other,
        ):
            await one.execute("set app.tenant_id = 'acme'")
            if is_reset:
                await RelayDispatchRepository(other, "zeta").enqueue("erp", "Work")
                with pytest.raises(TenancyUnboundError):
                    await RelayDispatchRepository(other).enqueue("erp", "Work")
            else:
                with pytest.raises(TenancyMismatchError):
                    await RelayDispatchRepository(other, "zeta").enqueue("erp", "Work")
                await RelayDispatchRepository(other).enqueue("erp", "Work")
    rows = await admin.fetch("select tenant_id from relay.s2r_relay_dispatch_request")
    assert [row[0] for row in rows] == ["zeta" if is_reset else "acme"]
