"""Databases for tests: one is migrated, each test gets a clone of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import asyncpg

from dispatch_core.dev.logins import GATEWAY_LOGIN, MIGRATOR_LOGIN, OPERATOR_LOGIN, WORKER_LOGIN
from dispatch_core.dev.postgres import DevServer
from tests.support.eventually import eventually
from tests.support.high_counters import raise_counters


@dataclass(frozen=True)
class TestDatabase:
    """One database of one test, and who may enter it."""

    __test__: ClassVar[bool] = False

    name: str
    server: DevServer

    @property
    def admin_dsn(self) -> str:
        """The superuser's: for looking on, never for what is tested."""
        return self.server.admin_dsn_of(self.name)

    @property
    def gateway_dsn(self) -> str:
        """The plain gateway login's; granted all tenants."""
        return self.server.gateway_dsn(self.name)

    @property
    def worker_dsn(self) -> str:
        """The plain worker login's; granted all tenants and relays."""
        return self.server.worker_dsn(self.name)

    @property
    def operator_dsn(self) -> str:
        """The plain operator login's; granted all tenants."""
        return self.server.operator_dsn(self.name)

    @property
    def migrator_dsn(self) -> str:
        """The login's that may create roles, and schemas in this database, and is no superuser."""
        return self.server.migrator_dsn(self.name)

    def dsn(self, user: str, password: str | None = "relay") -> str:
        """Return any other login's."""
        return self.server.dsn(user, self.name, password)


async def make_template(server: DevServer, *, has_high_counters: bool = False) -> str:
    """Create a migrated database, all granted to the plain logins, closed to connections; return its name."""
    from dispatch_core.migrate import grant, migrate

    name = f"s2r_template_{os.getpid()}_{secrets.token_hex(3)}"
    dsn = server.admin_dsn_of(name)
    await _execute(server, "create database %I", name)
    await _execute(server, "grant create on database %I to %I", name, MIGRATOR_LOGIN)
    await migrate(dsn)
    await grant(dsn, GATEWAY_LOGIN, role="gateway", tenant=None, relay=None)
    await grant(dsn, WORKER_LOGIN, role="worker", tenant=None, relay=None)
    await grant(dsn, OPERATOR_LOGIN, role="operator", tenant=None, relay=None)
    if has_high_counters:
        await raise_counters(dsn)
    # A clone needs a template without connections; autovacuum keeps out of one that allows none.
    await _execute(server, "alter database %I allow_connections false", name)
    return name


@asynccontextmanager
async def new_database(server: DevServer, template: str = "template1") -> AsyncIterator[TestDatabase]:
    """Clone `template` for one test; drop the clone afterwards, whoever is still in it."""
    name = f"s2r_test_{os.getpid()}_{secrets.token_hex(4)}"
    connection = await asyncpg.connect(server.admin_dsn)
    try:
        # Copying files needs a checkpoint, which costs nothing only where nothing is synced.
        durable = await connection.fetchval("select current_setting('fsync')::boolean")
        create = f"create database %I template %I strategy {'wal_log' if durable else 'file_copy'}"
        await _execute_on(connection, create, name, template)
        await _execute_on(connection, "grant create on database %I to %I", name, MIGRATOR_LOGIN)
        yield TestDatabase(name, server)
    finally:
        # The session was kept meanwhile, since another one takes a fifth of all the time that a clone does; unless the
        # test has stopped the server.
        try:
            await _drop(connection, name)
        except (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError):
            await drop_database(server, name)
        finally:
            connection.terminate()


async def drop_database(server: DevServer, name: str) -> None:
    """Drop a database, whoever is in it."""
    connection = await asyncpg.connect(server.admin_dsn)
    try:
        await _drop(connection, name)
    finally:
        connection.terminate()


async def _drop(connection: asyncpg.Connection[Any], name: str) -> None:
    # FORCE alone naps for 100 ms whenever a backend is there; so end them first and see them gone.
    end = "select count(pg_terminate_backend(pid)) = 0 from pg_stat_activity where datname = $1"
    await eventually(lambda: connection.fetchval(end, name), interval=0.002)
    await _execute_on(connection, "drop database if exists %I with (force)", name)


async def _execute(server: DevServer, template: str, *names: str) -> None:
    connection = await asyncpg.connect(server.admin_dsn)
    try:
        await _execute_on(connection, template, *names)
    finally:
        await connection.close()


async def _execute_on(connection: asyncpg.Connection[Any], template: str, *names: str) -> None:
    await connection.execute(await connection.fetchval("select format($1, variadic $2::text[])", template, list(names)))
