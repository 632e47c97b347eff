"""The one connection of a migration run: opened, made safe, and holding the lock that lets one run at a time."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import asyncpg

from dispatch_core.errors import (
    ConfigurationError,
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    MigrationError,
    MigrationRightsError,
    RelayDispatchError,
)
from dispatch_core.migrate import sql

__all__ = ["Connection", "connect", "is_transient", "migration_lock", "translated"]

Connection = Any  # asyncpg.Connection is generic over its record class, which tells a reader nothing here

CONNECT_TIMEOUT_SECONDS = 10.0
_LOST = ("08", "57P")
_TRANSIENT = frozenset({"55P03", "40P01", "40001"})


def is_transient(error: BaseException) -> bool:
    """Tell whether a statement that failed so may succeed if its transaction is simply made again."""
    if not isinstance(error, asyncpg.PostgresError):
        return False
    # Catalog rows have no row lock queue for DDL: two sessions that change one get this internal error instead.
    concurrently = error.sqlstate == "XX000" and "concurrently" in str(error)
    return error.sqlstate in _TRANSIENT or concurrently


@contextmanager
def translated(what: str, text: str | None = None) -> Iterator[None]:
    """Turn the driver's errors into ours; `what` says what was being done, `text` is the SQL file it was done with."""
    try:
        yield
    except RelayDispatchError:
        raise
    except asyncpg.PostgresError as error:
        raise _translate(error, what, text) from error
    except (asyncpg.InterfaceError, OSError, TimeoutError) as error:
        raise ConnectionLostError(f"{what}: the connection broke ({type(error).__name__})") from error


def _translate(error: asyncpg.PostgresError, what: str, text: str | None) -> RelayDispatchError:
    state = error.sqlstate or ""
    if state.startswith(_LOST) or state == "53300":
        return ConnectionLostError(f"{what}: the server ended the session ({error}, {state})", sqlstate=state)
    if state == "42501":
        return MigrationRightsError(f"{what}: {error}")
    if is_transient(error):
        return DatabaseBusyError(f"{what}: {error} ({state})", sqlstate=state)
    position = getattr(error, "position", None)
    line = ""
    if text is not None and position is not None and str(position).isdigit():
        line = f", line {text.count(chr(10), 0, int(position) - 1) + 1}"
    return MigrationError(f"{what}{line}: {error} ({state})")


@asynccontextmanager
async def connect(dsn: str, application_name: str = "relay-dispatch migrate") -> AsyncIterator[Connection]:
    """Open a connection whose session settings cannot harm a migration; close it at the end.

    Raises: DatabaseUnavailableError, DatabaseError, ConfigurationError; none of them shows the password.
    """
    conn = await _open(dsn, application_name)
    try:
        with translated("preparing the session"):
            await conn.execute(sql.SESSION)
            try:
                await conn.execute(sql.LIVENESS)
            except asyncpg.PostgresError:
                pass  # a comfort that this platform lacks: a killed runner's lock is then freed a little later
        yield conn
    finally:
        with anyio.CancelScope(shield=True):
            try:
                await conn.close(timeout=5)
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                conn.terminate()


async def _open(dsn: str, application_name: str) -> Connection:
    try:
        return await asyncpg.connect(
            dsn,
            timeout=CONNECT_TIMEOUT_SECONDS,
            # Named prepared statements do not survive a pooler, and nothing here runs twice.
            statement_cache_size=0,
            server_settings={"application_name": application_name},
        )
    except asyncpg.PostgresError as error:
        state = error.sqlstate or ""
        if state.startswith((*_LOST, "53")):
            raise DatabaseUnavailableError(f"PostgreSQL refused the connection: {error}", sqlstate=state) from None
        raise DatabaseError(f"PostgreSQL refused the login: {error}", sqlstate=state) from None
    except (OSError, TimeoutError, asyncpg.InternalClientError) as error:
        raise DatabaseUnavailableError(f"PostgreSQL cannot be reached: {_reason(error)}") from None
    except (asyncpg.InterfaceError, ValueError) as error:
        # Such an error may quote the DSN, and with it the password.
        raise ConfigurationError(f"the DSN is not usable ({type(error).__name__})") from None


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT_SECONDS:g} s"
    return re.sub(r"\s+", " ", str(error)) or type(error).__name__


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
            except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                pass  # the session is gone, and its lock with it
