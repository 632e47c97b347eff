"""For tests of a stop without a database: ways to take it away, and what may be left then, which is nothing."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Literal

import anyio.to_thread
import asyncpg
import pytest

from dispatch_core.dev.postgres import DevServer
from tests.support.databases import TestDatabase
from tests.support.proxy import TcpProxy

GRACE_SECONDS: Final = 1.0
BEYOND_SECONDS: Final = 3.0
FAR: Final[dict[str, Any]] = {"lease_seconds": 60.0, "sweep_seconds": 0.2, "poll_seconds": 0.2}

How = Literal["black_hole", "reset", "stopped", "killed"]


async def take_away(how: How, way: TcpProxy, server: DevServer) -> None:
    if how == "stopped":
        await anyio.to_thread.run_sync(server.stop, "fast")
    elif how == "killed":
        await anyio.to_thread.run_sync(server.stop, "immediate")
    else:
        way.mode = how


@contextmanager
def nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Hold that the block ends with the tasks with which it began, without a warning or a word of the event loop."""
    before = asyncio.all_tasks()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
        # The proxy's are not ours: a black hole keeps both of its sides, whoever has gone.
        left = {task for task in asyncio.all_tasks() - before if "support.proxy" not in repr(task)}
        assert not left, f"tasks are left: {left}"
        gc.collect()
    assert [str(warning.message) for warning in warned] == []
    told = [record.getMessage() for record in caplog.records if record.name == "asyncio" and record.levelno > 20]
    assert told == []


@asynccontextmanager
async def gateway_at(database: TestDatabase) -> AsyncIterator[Any]:
    """Connect past the proxy; the server may be gone when the block ends."""
    connection = await asyncpg.connect(database.gateway_dsn)
    try:
        yield connection
    finally:
        connection.terminate()
