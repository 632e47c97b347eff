"""What the verbs of durable jobs stand on: one statement on a connection, of ours or of the caller's."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from dispatch_core import codec
from dispatch_core.database import Connection, Database, mapped_errors
from dispatch_core.durable_caller import CallersConnection
from dispatch_core.errors import TenancyUnboundError
from dispatch_core.settings import DurableJobsSettings

__all__ = ["Calls", "tenant_or_none"]

_Fetch: TypeAlias = Callable[..., Awaitable[list[Any]]]


class Calls:
    """The verbs on a connection, or on connections of a `Database`, one for each call.

    A connection must be as the driver made it. One of somebody else's, with codecs of his, is given as a
    `CallersConnection`, and those of a pool that a `Database` has borrowed are taken for such.
    """

    __slots__ = ("_fetch", "_settings")

    def __init__(
        self, connection: Connection | CallersConnection | Database, settings: DurableJobsSettings | None = None
    ) -> None:
        """Take a connection. `settings`: the sizes that are allowed, leases, sweeps."""
        if isinstance(connection, CallersConnection):
            self._fetch: _Fetch = connection.fetch
        elif not isinstance(connection, Database):
            self._fetch = _fetcher(connection)
        elif connection.is_borrowed:
            self._fetch = _borrower(connection)
        else:
            self._fetch = connection.execute
        self._settings = settings or _defaults()

    async def _value(self, sql: str, *args: object) -> Any:
        ((row),) = await self._fetch(sql, *args)
        return row["value"]


@functools.cache
def _defaults() -> DurableJobsSettings:
    # Once a process: a repository is made for every transaction of a handler.
    return DurableJobsSettings()


def _borrower(database: Database) -> _Fetch:
    async def fetch(sql: str, *args: object) -> list[Any]:
        async with database.connection() as conn:
            return await CallersConnection(conn, joins=False, timeout=database.command_timeout).fetch(sql, *args)

    return fetch


def _fetcher(conn: Connection) -> _Fetch:
    async def fetch(sql: str, *args: object) -> list[Any]:
        with mapped_errors():
            rows: list[Any] = await conn.fetch(sql, *args)
            return rows

    return fetch


def tenant_or_none(tenant: str | None) -> str | None:
    if tenant is None:
        return None
    if tenant == "":
        raise TenancyUnboundError("'' is no tenant")
    return codec.check_name("tenant", tenant)
