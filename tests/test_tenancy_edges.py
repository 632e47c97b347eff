"""Edges of bindings: how long one lasts, and what a login of one tenant or relay is not to have of all of them."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import TenancyUnboundError
from tests.support.databases import TestDatabase
from tests.support.protocol import RELAY, Connection, enqueue, logins

pytestmark = pytest.mark.invariant("I4")


async def _refused(connection: Connection, sqlstate: str, query: str, *arguments: Any) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await connection.fetchval(query, *arguments)
    assert refused.value.sqlstate == sqlstate


@pytest.mark.case("C40")
async def test_what_a_caller_binds_for_a_transaction_is_not_bound_after_its_commit_though_verbs_ran_in_it(
    gateway: Connection,
) -> None:
    async with gateway.transaction():
        await gateway.execute("select set_config('app.tenant_id', 'a', true)")
        await enqueue(gateway, tenant=None)
    assert await gateway.fetchval("select coalesce(current_setting('app.tenant_id', true), '')") == ""
    with pytest.raises(TenancyUnboundError):
        await RelayDispatchRepository(gateway).list_jobs()


async def test_the_channel_of_all_tenants_events_is_told_to_who_has_all_tenants_alone(
    database: TestDatabase, gateway: Connection
) -> None:
    channel = "select relay.channel('outbox_all', null)"
    assert str(await gateway.fetchval(channel)).startswith("s2r_")
    async with logins(database) as made:
        await _refused(await made.open("gateway", "a"), "S2003", channel)


async def test_a_login_of_one_relay_takes_the_turns_of_that_one_alone(database: TestDatabase) -> None:
    turn = "select relay.sweep_turn($1, interval '1 s')"
    async with logins(database) as made:
        worker = await made.open("worker", "a", RELAY)
        assert await worker.fetchval(turn, f"expire:{RELAY}")
        for name in ("expire:crm", "expire", f"expire:{RELAY}2"):
            await _refused(worker, "S2020", turn, name)
