"""A cancellation ends whatever opens or closes, at whichever moment it comes: also in the one in which a wait is over.

The larger ones, and uvloop, are in tests/faults/test_cancel.py.
"""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

import anyio
import pytest

from dispatch_core.database import Database, close_connection, connect
from dispatch_core.listener import Listener
from gateway_sdk import GatewayClient
from tests.support.cancelling import Moment
from tests.support.cut_everywhere import cut_everywhere
from tests.support.databases import TestDatabase
from tests.support.gateway import settings_for

pytestmark = pytest.mark.parametrize("moment", ["during", "at its end"])


async def test_a_connection_that_is_cut_while_it_opens_or_closes_leaves_nothing(
    database: TestDatabase, moment: Moment
) -> None:
    async def scenario() -> None:
        await close_connection(await connect(database.gateway_dsn))

    assert await cut_everywhere(scenario, database, moment) > 3


async def test_a_connection_to_one_of_several_hosts_that_is_cut_leaves_nothing(
    database: TestDatabase, moment: Moment
) -> None:
    parts = urlsplit(database.gateway_dsn)
    login, _, host = parts.netloc.rpartition("@")
    dsn = urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:1,{host}"))

    async def scenario() -> None:
        await close_connection(await connect(dsn))

    assert await cut_everywhere(scenario, database, moment) > 3


async def test_a_pool_that_is_cut_while_it_opens_works_or_closes_leaves_nothing(
    database: TestDatabase, moment: Moment
) -> None:
    async def scenario() -> None:
        async with Database(database.gateway_dsn, min_size=2) as pool, pool.connection() as conn, conn.transaction():
            await conn.fetch("select 1")

    assert await cut_everywhere(scenario, database, moment) > 10


async def test_a_listener_that_is_cut_while_it_opens_leaves_nothing(database: TestDatabase, moment: Moment) -> None:
    async def scenario() -> None:
        listener = Listener(database.gateway_dsn)
        async with anyio.create_task_group() as group:
            await group.start(listener.run)
            await listener.subscribe("some", lambda _: None)
            group.cancel_scope.cancel()

    assert await cut_everywhere(scenario, database, moment, every=2) > 10


async def test_a_client_that_is_cut_while_it_opens_or_closes_leaves_nothing(
    database: TestDatabase, moment: Moment
) -> None:
    async def scenario() -> None:
        async with GatewayClient(settings=settings_for(database.gateway_dsn)):
            pass

    assert await cut_everywhere(scenario, database, moment, every=3) > 20
