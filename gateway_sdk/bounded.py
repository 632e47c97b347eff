"""Use a pooled connection for some seconds and no longer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from dispatch_core.database import Connection, Database
from dispatch_core.errors import ConnectionLostError

__all__ = ["bounded"]

Answer = TypeVar("Answer")


async def bounded(database: Database, seconds: float, run: Callable[[Connection], Awaitable[Answer]]) -> Answer:
    """Run `run(conn)` on a pooled connection, within `seconds` for both getting and using it.

    Raises: DatabaseUnavailableError where none was free in time; ConnectionLostError where there was no answer in time,
    and then the connection is not used again.
    """
    until = anyio.current_time() + seconds
    async with database.connection(seconds) as conn:
        with anyio.move_on_at(until):
            return await run(conn)
        raise ConnectionLostError("PostgreSQL did not answer in time")
