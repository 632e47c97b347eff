"""The one connection of a migration run: opened, made safe, and holding the lock that lets one run at a time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import asyncpg

from dispatch_core import database
from dispatch_core.database import Connection
from dispatch_core.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    MigrationError,
    MigrationRightsError,
    RelayDispatchError,
)
from dispatch_core.migrate import sql

__all__ = ["connect", "is_transient", "migration_lock", "translated"]


def is_transient(error: BaseException) -> bool:
    """Tell whether a statement that failed so may succeed if its transaction is simply made again."""
    if not isinstance(error, asyncpg.PostgresError):
        return False
    # DDL that changes one catalog row in two sessions does not queue; the second gets this internal error instead.
    concurrently = error.sqlstate == "XX000" and "concurrently" in str(error)
    return error.sqlstate in ("55P03", "40P01", "40001") or concurrently


@contextmanager
def translated(what: str, text: str | None = None) -> Iterator[None]:
    """Turn the driver's errors into ours; `what` says what was being done, `text` is the SQL file it was done with."""
    try:
        yield
    except RelayDispatchError:
        raise
    except asyncpg.PostgresError as error:
        raise _translate(error, what, text) from error
    except database.DRIVER_ERRORS as error:
        raise database.translate(error) or MigrationError(f"{what}: {error}") from error


def _translate(error: asyncpg.PostgresError, what: str, text: str | None) -> RelayDispatchError:
    state = error.sqlstate or ""
    if is_transient(error):
        return DatabaseBusyError(f"{what}: {error} ({state})", sqlstate=state)
    if state == "42501":
        return MigrationRightsError(f"{what}: {error}")
    common = database.translate(error)
    if isinstance(common, DatabaseUnavailableError):
        return common
    # Not what `database` makes of a missing table or function: here that is a fault of the file.
    position = getattr(error, "position", None)
    line = f", line {text.count(chr(10), 0, int(position) - 1) + 1}" if text and position else ""
    hint = f"; hint: {error.hint}" if getattr(error, "hint", None) else ""
    return MigrationError(f"{what}{line}: {error} ({state}){hint}")


@asynccontextmanager
async def connect(dsn: str, application_name: str = "relay-dispatch migrate") -> AsyncIterator[Connection]:
    """Open a connection whose session settings cannot harm a migration; close it at the end.

    Raises: DatabaseUnavailableError, DatabaseError, ConfigurationError; none of them shows the password.
    """
    # A named prepared statement does not survive a pooler, and nothing here runs twice. A step may take its time.
    conn = await database.connect(dsn, command_timeout=None, statement_cache_size=0, application_name=application_name)
    try:
        with translated("preparing the session"):
            await conn.execute(sql.NO_TIMEOUTS)
            await conn.execute(sql.SESSION)
            try:
                await conn.execute(sql.LIVENESS)
            except asyncpg.PostgresError:
                pass  # a comfort that this platform lacks: the lock of a killed runner is then freed a little later
        yield conn
    finally:
        await database.close_connection(conn)


@asynccontextmanager
async def migration_lock(conn: Connection, give_up_after: float, waiting: Callable[[str], None]) -> AsyncIterator[None]:
    """Hold the lock of this database's migrations.

    It is polled, never waited for: a session that waits for an advisory lock holds a snapshot, which CREATE INDEX
    CONCURRENTLY in the session that has the lock would wait for in turn.

    Raises: DatabaseBusyError when another run still holds it after `give_up_after` seconds.
    """
    with translated("taking the migration lock"):
        deadline = anyio.current_time() + give_up_after
        told = False
        while not await conn.fetchval("select pg_try_advisory_lock($1)", sql.LOCK_KEY):
            holder = await conn.fetchrow(sql.LOCK_HOLDER, sql.LOCK_KEY)
            who = "another session" if holder is None else f"{holder['application_name']} (pid {holder['pid']})"
            if not told:
                waiting(who)
                told = True
            if anyio.current_time() > deadline:
                raise DatabaseBusyError(f"{who} has been migrating this database for over {give_up_after:g} s")
            await anyio.sleep(random.uniform(0.05, 0.25))
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            try:
                await conn.execute("select pg_advisory_unlock_all()")
            except database.DRIVER_ERRORS:
                pass  # the session is gone, and its lock with it
