"""The plain logins that demo, tests and benchmarks run as, and databases for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import asyncpg

from dispatch_core.errors import ConfigurationError

__all__ = [
    "GATEWAY_LOGIN",
    "LOGIN_PASSWORD",
    "MIGRATOR_LOGIN",
    "OPERATOR_LOGIN",
    "WORKER_LOGIN",
    "create_database",
    "dsn_as",
    "ensure_logins",
    "run_blocking",
]

T = TypeVar("T")

GATEWAY_LOGIN: Final = "relay_gateway_login"
WORKER_LOGIN: Final = "relay_worker_login"
OPERATOR_LOGIN: Final = "relay_operator_login"
MIGRATOR_LOGIN: Final = "relay_migrator_login"
# No secret: the development server listens on the loopback interface, and these logins own nothing.
LOGIN_PASSWORD: Final = "relay"

_ATTRIBUTES: Final = {
    GATEWAY_LOGIN: "NOCREATEROLE",
    WORKER_LOGIN: "NOCREATEROLE",
    OPERATOR_LOGIN: "NOCREATEROLE",
    MIGRATOR_LOGIN: "CREATEROLE",
}
_ROLE_SQL: Final = """
select format('%s ROLE %I LOGIN NOSUPERUSER NOCREATEDB %s NOREPLICATION NOBYPASSRLS PASSWORD %L',
              $1::text, $2::text, $3::text, $4::text)
"""


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, whether or not an event loop runs in this thread."""
    if asyncio._get_running_loop() is None:
        return asyncio.run(work)
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="relay-dispatch-dev")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def dsn_as(dsn: str, user: str, password: str | None, database: str) -> str:
    """Return `dsn` with another user and database; host, port and options stay."""
    parts = urlsplit(dsn)
    host = parts.netloc.rpartition("@")[2]
    login = quote(user, safe="") if password is None else f"{quote(user, safe='')}:{quote(password, safe='')}"
    query = urlencode(
        [(k, v) for k, v in parse_qsl(parts.query) if k not in {"user", "password", "dbname", "database"}]
    )
    return urlunsplit((parts.scheme, f"{login}@{host}", "/" + quote(database, safe=""), query, ""))


async def ensure_logins(admin_dsn: str) -> None:
    """Make the plain logins, or make them plain again.

    Idempotent: by role name. Raises: ConfigurationError where `admin_dsn` is no superuser's.
    """
    async with _alone(admin_dsn) as connection:
        if not await connection.fetchval("select rolsuper from pg_roles where rolname = current_user"):
            raise ConfigurationError(
                "The development server's DSN must be a superuser's: it creates logins and databases."
            )
        for login, attribute in _ATTRIBUTES.items():
            known = await connection.fetchval("select true from pg_roles where rolname = $1", login)
            verb = "ALTER" if known else "CREATE"
            await connection.execute(await connection.fetchval(_ROLE_SQL, verb, login, attribute, LOGIN_PASSWORD))


async def create_database(admin_dsn: str, name: str) -> None:
    """Create an empty database in which the migrator may create a schema.

    Idempotent: by name.
    """
    async with _alone(admin_dsn) as connection:
        if not await connection.fetchval("select true from pg_database where datname = $1", name):
            await connection.execute(await connection.fetchval("select format('CREATE DATABASE %I', $1::text)", name))
        grant = "select format('GRANT CREATE ON DATABASE %I TO %I', $1::text, $2::text)"
        await connection.execute(await connection.fetchval(grant, name, MIGRATOR_LOGIN))


@asynccontextmanager
async def _alone(admin_dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    # Two processes that alter one role or database at the same moment fail with "tuple concurrently updated".
    connection = await asyncpg.connect(admin_dsn, timeout=30)
    try:
        await connection.execute("select pg_advisory_lock(hashtextextended('relay-dispatch-dev', 0))")
        yield connection
    finally:
        await connection.close()
