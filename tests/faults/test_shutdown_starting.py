"""The database falls silent while a client starts, and the start is given up: it is over soon, and leaves nothing."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gateway_sdk import GatewayClient
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import settings_for
from tests.support.patience import within
from tests.support.protocol import Connection
from tests.support.proxy import TcpProxy
from tests.support.shutdown import BEYOND_SECONDS, nothing_left

pytestmark = [pytest.mark.invariant("I9"), pytest.mark.case("C30")]

ASKS = (
    "select count(*) from pg_stat_activity where application_name like '%listener%' and datname = current_database()"
    " and query <> ''"
)


async def test_a_client_whose_start_is_given_up_behind_a_black_hole_is_gone_in_three_seconds(
    database: TestDatabase, admin: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """Its listener waits for an answer and its pool is open: both have bounds of their own, which add up."""
    caplog.set_level(logging.DEBUG, "asyncio")
    async with TcpProxy.before(database.gateway_dsn, delay_seconds=0.3) as way:
        with nothing_left(caplog):
            client = GatewayClient(settings=settings_for(way.dsn(database.gateway_dsn)))

            async def start() -> None:
                async with client:
                    raise AssertionError("it has started")

            # Slow, so that it is met in the middle of it.
            way.mode = "delay"
            task = asyncio.create_task(start())
            await eventually(lambda: admin.fetchval(ASKS), 60)
            way.mode = "black_hole"
            assert not task.done()
            with within(BEYOND_SECONDS):
                task.cancel()
                await asyncio.wait([task])
            assert task.cancelled()
