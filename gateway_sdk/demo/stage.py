"""What the demo is played on: a PostgreSQL server, and a database there that is the demo's own.

Gateway, relays and operator are plain logins; only the migration and the grants are made by the superuser. What is in
the environment for a real gateway or relay is not used: a demo must not end up in somebody's production.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dispatch_core.database import close_connection, connect, mapped_errors
from dispatch_core.dev.logins import GATEWAY_LOGIN, OPERATOR_LOGIN, WORKER_LOGIN, ensure_logins, run_blocking
from dispatch_core.dev.postgres import DevServer, start_server
from dispatch_core.migrate import grant, migrate
from gateway_sdk.demo.show import Show

__all__ = ["Stage", "stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A migrated database, and a DSN for each part."""

    server: DevServer
    database: str

    @property
    def gateway_dsn(self) -> str:
        return self.server.gateway_dsn(self.database)

    @property
    def worker_dsn(self) -> str:
        return self.server.worker_dsn(self.database)

    @property
    def operator_dsn(self) -> str:
        return self.server.operator_dsn(self.database)


@contextmanager
def stage(dsn: str | None, *, keep: bool, show: Show) -> Iterator[Stage]:
    """Start a server, or use that of a superuser's `dsn`, and make a database there; blocks.

    Both are gone afterwards, unless they are to be kept: then it is the server of `make db`, and it goes on running.

    Raises: ConfigurationError, DatabaseUnavailableError.
    """
    with show.step("server", "starting PostgreSQL", "PostgreSQL is up"):
        if dsn is None:
            server = start_server(keep=keep, ephemeral=not keep)
        else:
            server = DevServer(dsn, "dsn")
            run_blocking(_logins(dsn))
    name = f"relay_dispatch_demo_{secrets.token_hex(4)}"
    with server:
        try:
            with show.step("schema", "making a database", "a database is made and migrated, its logins are plain ones"):
                server.create_database(name)
                run_blocking(_migrate(server.admin_dsn_of(name)))
            yield Stage(server, name)
        finally:
            if not keep and not server.is_ours:
                run_blocking(_drop(server.admin_dsn, name))


async def _logins(dsn: str) -> None:
    with mapped_errors(connecting=True):
        await ensure_logins(dsn)


async def _migrate(admin_dsn: str) -> None:
    await migrate(admin_dsn)
    for login, role in ((GATEWAY_LOGIN, "gateway"), (WORKER_LOGIN, "worker"), (OPERATOR_LOGIN, "operator")):
        await grant(admin_dsn, login, role=role, tenant=None, relay=None)


async def _drop(admin_dsn: str, name: str) -> None:
    conn = await connect(admin_dsn)
    try:
        with mapped_errors():
            await conn.execute(
                await conn.fetchval("select format('drop database if exists %I with (force)', $1::text)", name)
            )
    finally:
        await close_connection(conn)
