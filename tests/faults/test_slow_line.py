"""A database that is slow, as on a long line or a machine with too much to do, is worked with again after an outage.

To open a connection takes as long there as many a caller has left when his turn comes: were it given up with him, and
every statement that is cut off cost the pool, nobody would ever be served.
"""

from __future__ import annotations

from collections import deque

import anyio
import pytest

from dispatch_core.errors import DatabaseError
from dispatch_core.ids import new_id
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.proxy import TcpProxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OUTAGE_SECONDS = 6.0
DELAY_SECONDS = 0.15
"""Of each piece each way: a connection takes about a second, a statement that is new to it more than half of one."""


async def test_after_an_outage_on_a_slow_line_every_call_is_stored_again(database: TestDatabase) -> None:
    went_well: deque[bool] = deque(maxlen=40)
    async with TcpProxy.before(database.gateway_dsn) as way:
        dsn = f"{way.dsn(database.gateway_dsn)}?sslmode=disable"
        async with open_client(
            dsn, pool_max_size=6, connect_timeout_seconds=3.0, write_timeout_seconds=5.0, command_timeout_seconds=5.0
        ) as client:
            acme = client.tenant("acme")

            async def enqueue(key: str | None) -> None:
                try:
                    await acme.enqueue("erp", "Op", idempotency_key=key)
                except DatabaseError:
                    went_well.append(False)
                else:
                    went_well.append(True)

            async with anyio.create_task_group() as group:

                async def ask() -> None:
                    while True:
                        for key in (None, str(new_id())):
                            group.start_soon(enqueue, key)
                            await anyio.sleep(0.1)

                group.start_soon(ask)
                await eventually(lambda: len(went_well) == 10)
                way.delay_seconds = DELAY_SECONDS
                way.mode = "reset"
                await anyio.sleep(OUTAGE_SECONDS)
                way.mode = "delay"
                await eventually(lambda: len(went_well) == 40 and all(went_well), 60, 0.1, message="all are stored:")
                group.cancel_scope.cancel()
                way.mode = "pass"
