"""Reach PostgreSQL, and turn what the driver raises into our errors: the one seam between asyncpg and the rest.

`mapped_errors` is the only thing that catches `asyncpg` exceptions. `Database` owns a pool (or borrows the caller's)
and sees to it that a connection which may be broken never goes back into it, and that nothing waits without a bound:
a black-holed socket raises no error by itself, and neither `close` nor the pool's `release` would ever return on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias, cast
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

import anyio
import asyncpg

from dispatch_core.driver import look_at_failed_upgrades
from dispatch_core.errors import (
    ConfigurationError,
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    IdempotencyConflictError,
    InvalidDeadlineError,
    InvalidInputError,
    JobClosedError,
    LeaseLostError,
    RelayDispatchError,
    SchemaMismatchError,
    TenancyDeniedError,
    TenancyMismatchError,
    TenancyUnboundError,
    TooLargeError,
    UnknownJobError,
)
from dispatch_core.hosts import Host, accepted, hosts_of, ordered, target_of
from dispatch_core.openings import Openings
from dispatch_core.pacing import SILENT_SECONDS, Pace, pace_of
from dispatch_core.task_groups import TaskGroup

__all__ = [
    "DRIVER_ERRORS",
    "Connection",
    "Database",
    "as_opened",
    "close_connection",
    "connect",
    "has_codecs",
    "mapped_errors",
    "translate",
]

Connection: TypeAlias = asyncpg.Connection
"""A connection of asyncpg, its own or a pool's."""

# How long putting a connection away may take before it is cut: these run shielded, so they hold up a cancellation.
_PUT_AWAY_SECONDS: Final = 2.0

# Of a DSN with several hosts: how long one may be silent before the next is asked beside it.
_NEXT_HOST_SECONDS: Final = 1.0

look_at_failed_upgrades()

# --- errors ---------------------------------------------------------------------------------------------------------

_OURS: Final[dict[str, type[RelayDispatchError]]] = {
    "S2001": TenancyUnboundError,
    "S2002": TenancyMismatchError,
    "S2003": TenancyDeniedError,
    "S2010": IdempotencyConflictError,
    "S2020": InvalidInputError,
    "S2021": InvalidDeadlineError,
    "S2022": TooLargeError,
    "S2030": UnknownJobError,
    "S2040": SchemaMismatchError,
    "S2041": LeaseLostError,
    "S2042": JobClosedError,
}

_MISSING_OBJECT: Final = frozenset({"42883", "3F000", "42P01"})
"""undefined_function, invalid_schema_name, undefined_table"""

_BUSY: Final = frozenset({"55P03", "57014"})
"""lock_not_available, query_canceled (by statement_timeout or by hand); with class 40 but for 40003"""

_SESSION_OVER: Final = frozenset({"25006", "25P03", "25P04", "40003", "57P01", "57P02", "57P03", "57P04", "57P05"})
"""read only (a demoted primary), idle or transaction timeout, statement_completion_unknown, shutdown, crash, starting
up, database dropped, idle session timeout; with class 08 and 53"""

_NEVER_STARTED: Final = frozenset({"08001", "08004", "53300", "57P03"})
"""could not connect, connection rejected, too many connections, cannot connect now: no statement was under way"""

_FULL: Final = "53300"
"""too_many_connections: the server lives, and so do the connections that we have"""

_LOGIN_REFUSED: Final = ("28", "3D")
"""Classes: invalid authorization, and no such database. Asking again does not mend it."""

_BY_STATEMENT: Final = "statement pooling mode"
"""What PgBouncer says of a transaction where it pools by statement, with the SQLSTATE of any lost connection."""

_READ_ONLY: Final = "25006"
"""read_only_sql_transaction: the server is a standby, or was demoted to one"""

_STALE_STATEMENT: Final = frozenset({"26000", "42P05"})
"""A prepared statement is unknown, or there already: another backend answers, as behind a transaction pooler."""


DRIVER_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    # What the driver says of a session that has been ended, until its socket is seen to close (seen in asyncpg 0.31):
    # "cannot switch to state 15; another operation (2) is in progress". It is neither of the two above.
    asyncpg.InternalClientError,
    OSError,  # a timeout too
    EOFError,
)
"""All that a statement may raise when the database, or the way to it, is at fault; the only list of them."""


class mapped_errors:  # noqa: N801  (reads as a function: `with mapped_errors():`)
    """Raise ours for what the driver raises inside; let everything else pass, cancellation above all.

    `job_id` goes into the error. `connecting` says that no statement was under way, so that a broken connection has had
    no effect. A class and not a generator: this stands around every statement.
    """

    __slots__ = ("_connecting", "_job_id")

    def __init__(self, *, job_id: UUID | None = None, connecting: bool = False) -> None:
        self._job_id = job_id
        self._connecting = connecting

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        if error is None:
            return False
        translated = translate(error, job_id=self._job_id, connecting=self._connecting)
        if translated is None:
            return False
        raise translated from error


def translate(
    error: BaseException, *, job_id: UUID | None = None, connecting: bool = False
) -> RelayDispatchError | None:
    """Return our error for one of the driver's or of the network's; None for any other, and for one of ours."""
    if isinstance(error, RelayDispatchError):
        return None
    if isinstance(error, asyncpg.PostgresError):
        return _translate_sqlstate(error, job_id, connecting)
    broken = DatabaseUnavailableError if connecting else ConnectionLostError
    if isinstance(error, TimeoutError):
        # asyncpg has already tried to cancel the statement; whether it was is unknown.
        return broken(
            "PostgreSQL could not be reached in time" if connecting else "PostgreSQL did not answer in time",
            job_id=job_id,
        )
    if isinstance(error, (OSError, EOFError)):
        return broken(
            f"PostgreSQL could not be reached: {error}" if connecting else f"the connection broke: {error}",
            job_id=job_id,
        )
    if isinstance(error, asyncpg.exceptions.ClientConfigurationError):
        return ConfigurationError(str(error))
    if isinstance(error, asyncpg.exceptions.TargetServerAttributeNotMatched):
        return DatabaseUnavailableError(str(error), job_id=job_id)
    if isinstance(error, asyncpg.exceptions.OutdatedSchemaCacheError):
        return DatabaseBusyError("the schema changed under this connection; try again", job_id=job_id)
    if isinstance(error, asyncpg.InterfaceError):
        # The driver has no class of its own for "this connection is closed"; it raises it before it sends anything.
        if "closed" in str(error) or "closing" in str(error) or "released back" in str(error):
            return DatabaseUnavailableError(f"the connection is closed: {error}", job_id=job_id)
        return DatabaseError(str(error), job_id=job_id)
    if isinstance(error, asyncpg.InternalClientError):
        # Raised before anything is sent, but for the one of an answer that it cannot read.
        sent = "unknown error" in str(error) or "cannot process" in str(error)
        kind = ConnectionLostError if sent and not connecting else DatabaseUnavailableError
        return kind(f"the connection is unusable: {error}", job_id=job_id)
    return None


def _translate_sqlstate(error: asyncpg.PostgresError, job_id: UUID | None, connecting: bool) -> RelayDispatchError:
    state: str = error.sqlstate or ""
    # Only the message: DETAIL quotes values of rows, which may be another tenant's.
    # Those that the driver makes itself have no such fields and their text as their argument.
    message = getattr(error, "message", None)
    if message is None:
        message = str(error.args[0] if error.args else type(error).__name__)
        if isinstance(error, asyncpg.DataError):
            return InvalidInputError(message)  # an argument could not be encoded; nothing was sent
    ours = _OURS.get(state)
    if ours is UnknownJobError:
        return UnknownJobError(message, job_id=job_id)
    if ours is not None:
        return ours(message)
    kind = state[:2]
    if _BY_STATEMENT in message:
        return DatabaseError(f"{message}: PgBouncer's pool_mode must be transaction or session", sqlstate=state)
    if state in _SESSION_OVER or kind in ("08", "53"):
        if connecting or state in _NEVER_STARTED or kind == "53":
            return DatabaseUnavailableError(f"PostgreSQL is not available: {message}", sqlstate=state, job_id=job_id)
        return ConnectionLostError(f"PostgreSQL ended the session: {message}", sqlstate=state, job_id=job_id)
    if state in _BUSY or kind == "40":
        return DatabaseBusyError(message, sqlstate=state, job_id=job_id)
    if state == "0A000" and isinstance(error, asyncpg.exceptions.InvalidCachedStatementError):
        return DatabaseBusyError("the schema changed under this connection; try again", sqlstate=state, job_id=job_id)
    if state in _MISSING_OBJECT and ("relay." in message or '"relay"' in message):
        room = next((room for room in ("outbox", "durable") if f"relay.{room}_" in message), None)
        only = f" --only {room}" if room else ""
        mend = f"run `relay-dispatch db migrate{only}`"
        return SchemaMismatchError(f"the schema `relay` is missing or not the one of this version ({message}): {mend}")
    if state == "42501":
        return TenancyDeniedError(f"{message}: this login needs a grant, see `relay-dispatch db grant`")
    if state in _STALE_STATEMENT:
        message += " (behind a transaction pooler set RELAY_DISPATCH_STATEMENT_CACHE_SIZE=0)"
    return DatabaseError(message, sqlstate=state or None, job_id=job_id)


# --- one connection -------------------------------------------------------------------------------------------------


class _OwnNames(asyncpg.Connection):
    """A connection whose prepared statements nobody else's can be taken for (D131), and that knows of codecs.

    The driver numbers them, each process from one. Behind a transaction pooler, with the cache on by mistake, another
    process's statement of that number would be executed in place of ours; with these names it is unknown, an error.
    """

    _token: str | None = None

    has_codecs = False
    """Whether somebody has set codecs: our statements are for a connection that has the driver's own."""

    async def set_type_codec(self, *args: Any, **options: Any) -> None:
        self.has_codecs = True
        await super().set_type_codec(*args, **options)

    async def set_builtin_type_codec(self, *args: Any, **options: Any) -> None:
        self.has_codecs = True
        await super().set_builtin_type_codec(*args, **options)

    def _get_unique_id(self, prefix: str) -> str:
        if self._token is None:
            self._token = secrets.token_hex(4)
        name: str = super()._get_unique_id(f"{prefix}_{self._token}")  # type: ignore[misc]
        return name


async def connect(
    dsn: str,
    *,
    connect_timeout: float = 10.0,
    command_timeout: float | None = 30.0,
    statement_cache_size: int = 100,
    application_name: str = "relay-dispatch",
    connection_class: type[Connection] = _OwnNames,
) -> Connection:
    """Open one connection that belongs to no pool; close it with `close_connection`.

    Timeouts are seconds. A DSN may name several hosts: then it is the first that takes writes, unless
    target_session_attrs says otherwise.

    Raises: ConfigurationError for a DSN that is none, DatabaseUnavailableError, DatabaseError (login refused).
    """
    with mapped_errors(connecting=True):
        try:
            with anyio.fail_after(connect_timeout + 0.5):
                conn = await _open_paced(
                    dsn,
                    timeout=connect_timeout,
                    command_timeout=command_timeout,
                    statement_cache_size=statement_cache_size,
                    server_settings={"application_name": application_name},
                    connection_class=connection_class,
                )
        except ConfigurationError:
            raise
        except (ValueError, OverflowError) as error:
            raise _unusable_dsn(dsn, error) from None
        except (OSError, EOFError) as error:
            raise _unreached(dsn, error) from error
    await _watch_socket(conn)
    return conn


async def _open_paced(dsn: str, *, timeout: float, **options: Any) -> Connection:
    """Connect when it is this process's turn to try (D156); see `pacing`."""
    pace = pace_of(dsn)

    async def attempt(proves: bool) -> Connection:
        try:
            conn = await _open(dsn, timeout=timeout, **options)
        except (OSError, EOFError) as error:
            raise _unreached(dsn, error) from error
        if proves:
            await _prove(conn, pace, timeout)
        return conn

    return await pace.run(attempt, until=time.monotonic() + timeout, again=_again, refuses=_refuses_login)


async def _prove(conn: Connection, pace: Pace, timeout: float) -> None:
    """Have a new connection answer a statement; it is cut where it does not."""
    try:
        # A pooler takes connections also while there is no server behind it.
        with anyio.fail_after(timeout):
            await conn.execute("select 1")
        if pace.must_write and takes_no_writes(conn):
            raise DatabaseUnavailableError("the server takes no writes", sqlstate=_READ_ONLY)
    except BaseException:
        conn.terminate()
        raise


def _again(error: Exception) -> Exception:
    """Return an error of its own for each who waited for one try."""
    ours = error if isinstance(error, RelayDispatchError) else translate(error, connecting=True)
    if isinstance(ours, DatabaseError):
        return type(ours)(str(ours), sqlstate=ours.sqlstate)
    return DatabaseUnavailableError(f"PostgreSQL could not be reached: {error}") if ours is None else ours


def _refuses_login(error: Exception) -> bool:
    return (getattr(error, "sqlstate", None) or "")[:2] in _LOGIN_REFUSED


def takes_no_writes(conn: Connection) -> bool:
    """Tell whether the server says of itself that it is a standby, or was made read only; it says so unasked."""
    said = conn.get_settings()
    return any(getattr(said, name, "off") == "on" for name in ("in_hot_standby", "default_transaction_read_only"))


async def _open(dsn: str, *, timeout: float, **options: Any) -> Connection:
    """Connect as the driver does; but of several hosts none, however silent, keeps us from the others (D128)."""
    target, hosts = target_of(dsn), hosts_of(dsn)
    if not hosts:
        return await asyncpg.connect(dsn, timeout=timeout, **options)
    # The driver's own default takes a standby too, which refuses whatever we say.
    options["target_session_attrs"] = "read-write" if pace_of(dsn).must_write else target or "read-write"
    found: Connection | None = None
    fault: Exception | None = None
    failed: dict[Host, Exception] = {}

    async def ask(host: Host, ended: anyio.Event) -> None:
        nonlocal found, fault
        try:
            conn = await asyncpg.connect(dsn, host=host[0], port=host[1], timeout=timeout, **options)
        except Exception as error:  # noqa: BLE001  judged here, and raised below
            failed[host] = error
            if not isinstance(translate(error, connecting=True), DatabaseUnavailableError):
                fault = fault or error  # a wrong password, say: another host would hardly like it better
                group.cancel_scope.cancel()
            ended.set()
            return
        if found is not None or fault is not None:
            conn.terminate()
            return
        found = conn
        accepted(hosts, host)
        group.cancel_scope.cancel()

    asked: dict[Host, anyio.Event] = {}
    try:
        with anyio.move_on_after(timeout):
            async with TaskGroup() as group:
                while not asked or any(not ended.is_set() for ended in asked.values()):
                    # While one is silent, those that said no are asked again: one of them may be promoted meanwhile.
                    for host in ordered(hosts):
                        if host not in asked or asked[host].is_set():
                            asked[host] = ended = anyio.Event()
                            group.start_soon(ask, host, ended)
                            with anyio.move_on_after(_NEXT_HOST_SECONDS):
                                await ended.wait()
                    if any(not ended.is_set() for ended in asked.values()):
                        await anyio.sleep(_NEXT_HOST_SECONDS)
    except BaseException:
        if found is not None:
            found.terminate()
        raise
    if found is not None:
        return found
    if fault is not None:
        raise fault
    raise DatabaseUnavailableError(f"no server that takes writes could be reached: {_why(hosts, failed)}")


async def _open_for_pool(dsn: str, *, loop: object, **options: Any) -> Connection:
    """Connect for a pool of the driver's, which names the event loop too."""
    del loop  # the one that runs
    try:
        return await _open(dsn, **options)
    except (OSError, EOFError) as error:
        raise _unreached(dsn, error) from error


def _why(hosts: tuple[Host, ...], failed: dict[Host, Exception]) -> str:
    said = []
    for host in hosts:
        error = failed.get(host)
        if error is None or isinstance(error, TimeoutError):
            why = "did not answer in time"
        elif isinstance(error, asyncpg.exceptions.TargetServerAttributeNotMatched):
            why = "is not of the kind that is asked for (read only?)"
        else:
            why = _cause(error)
        said.append(f"{host[0]}:{host[1]} ({why})")
    return "; ".join(said)


_ENCODE: Final = "@ : / ? # in user, password and database must be percent-encoded (%40 %3A %2F %3F %23)"
_SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")


def _unusable_dsn(dsn: str, error: Exception) -> ConfigurationError:
    # The text of the error may quote a part of the DSN, such as the half of a password behind an unescaped slash.
    if isinstance(error, asyncpg.exceptions.ClientConfigurationError) and "scheme" in str(error):
        return ConfigurationError("the DSN must begin with postgresql:// or postgres://")
    hosts = _hosts(dsn)
    whole = ConfigurationError(
        f"the DSN cannot be used: a host, a port or a parameter in it is not valid, or {_ENCODE}"
    )
    if hosts is None:
        return whole if "[" in dsn else ConfigurationError(f"the DSN cannot be used: {_ENCODE}")
    parameters = dict(parse_qsl(urlsplit(dsn).query, keep_blank_values=True))
    if parameters.get("sslmode", "prefer") not in _SSL_MODES:
        return ConfigurationError(f"sslmode in the DSN must be one of {', '.join(_SSL_MODES)}")
    ports = [host.rpartition("]")[2].partition(":")[2] for host in hosts.split(",")]
    ports += parameters.get("port", "").split(",")
    if not all(port == "" or (port.isdecimal() and int(port) < 2**16) for port in ports):
        return ConfigurationError("the port in the DSN must be a number below 65536")
    return whole


def _unreached(dsn: str, error: OSError | EOFError) -> DatabaseUnavailableError:
    hosts = _hosts(dsn)
    late = isinstance(error, TimeoutError) and error.errno is None
    how = " in time" if late else f": {_cause(error)}"
    if hosts is None:
        # What stands for the host may be a piece of the password: it is not named.
        return DatabaseUnavailableError(
            f"PostgreSQL could not be reached{how}; the host in the DSN looks wrong: {_ENCODE}"
        )
    return DatabaseUnavailableError(f"PostgreSQL could not be reached{f' at {hosts}' if hosts else ''}{how}")


def _cause(error: Exception) -> str:
    number = getattr(error, "errno", None) or 0
    # The event loop's own text repeats the address; those below zero are of the name lookup.
    return os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)


def _hosts(dsn: str) -> str | None:
    """Return the hosts and ports of a DSN as they are written there; None where a password may have got among them."""
    try:
        parts = urlsplit(dsn)
    except ValueError:
        return None
    credentials, _, hosts = parts.netloc.rpartition("@")
    # asyncpg ends the password at the first @, and everybody ends the address at the first of / ? #.
    if "@" in credentials or "@" in parts.path + parts.query + parts.fragment:
        return None
    parameters = dict(parse_qsl(parts.query))
    hosts = hosts or parameters.get("host", "")
    if hosts and ":" not in hosts.rpartition("]")[2]:
        hosts += f":{parameters['port']}" if "port" in parameters else " (default port)"
    return hosts


async def close_connection(conn: Connection, seconds: float = _PUT_AWAY_SECONDS) -> None:
    """Close `conn` within `seconds`, by force if need be; shielded from cancellation; never raises.

    Idempotent: yes.
    """
    try:
        with anyio.CancelScope(shield=True), contextlib.suppress(Exception):
            if not conn.is_closed():
                await conn.close(timeout=seconds)
    finally:
        conn.terminate()


async def _watch_socket(conn: Connection) -> None:
    """Have the kernel probe an idle connection (C01: asyncpg sets no keepalive): it keeps NAT entries alive and closes
    what is half-open within about half a minute. Only a second belt, so a driver without this attribute is no error."""
    transport: Any = getattr(conn, "_transport", None)
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# --- the pool -------------------------------------------------------------------------------------------------------

# After so long a connection goes through the driver's pool once, which replaces those that have served many statements.
_KEPT_SECONDS: Final = 60.0

# Of a caller's time, how much may be spent on the wait for a connection.
_WAITED_SHARE: Final = 0.75

# As the driver's pool does with those above its smallest size.
_IDLE_SECONDS: Final = 300.0


class _Kept:
    """A connection of the driver's pool that is lent, or kept for the next one who asks."""

    __slots__ = ("conn", "generation", "pool", "since", "used_at")

    def __init__(self, pool: Any, conn: Connection, generation: int) -> None:
        self.pool = pool
        self.conn = conn
        self.generation = generation
        self.since = self.used_at = time.monotonic()


def _is_open(conn: Connection) -> bool:
    try:
        return not conn.is_closed()
    except asyncpg.InterfaceError:
        return False  # closed, and taken back by the driver's pool


class Lent:
    """A pooled connection for the length of an `async with`; see `Database.connection`."""

    # A class and not a generator: this stands around every statement.
    __slots__ = ("_database", "_kept", "_since", "_within")

    def __init__(self, database: Database, within: float | None) -> None:
        self._database = database
        self._within = within
        self._kept: _Kept | None = None
        self._since = 0.0

    async def __aenter__(self) -> Connection:
        if self._within is not None and self._within <= 0:
            # Not lent for a statement that has no time left: when that fails, the whole pool is taken for broken.
            raise DatabaseUnavailableError("no time was left to ask for a connection; nothing was sent")
        kept = self._database._take()
        if kept is None:
            kept = await self._database._get(self._within)
        self._kept = kept
        self._since = time.monotonic()
        return kept.conn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        kept, database = self._kept, self._database
        assert kept is not None
        if error is None:
            if not database._keep(kept):
                await database._put_away(kept)
            return False
        ours = translate(error)
        lost = ours or error
        if isinstance(lost, DatabaseUnavailableError):
            # Who had but little time left, as after a long wait for a connection, says nothing of the others: cut for
            # him, they would all be opened anew, while those who wait for them come to be in haste too.
            is_silent = lost.sqlstate is None and _is_open(kept.conn)
            if is_silent and time.monotonic() - self._since < min(SILENT_SECONDS, database.command_timeout) * 0.9:
                with contextlib.suppress(asyncpg.InterfaceError):
                    kept.conn.terminate()
            else:
                await database._retire(kept, lost)
        await database._put_away(kept)
        if ours is not None:
            raise ours from error
        return False


async def _no_reset(conn: Connection) -> None:
    """Stand in for the pool's reset query, which costs a round trip on every release.

    Safe because our statements leave nothing in a session: the tenant is bound for the transaction only, and we take no
    advisory lock, cursor or LISTEN on a pooled connection. asyncpg still rolls an open transaction back. Whoever lends
    one to user code calls `as_opened` afterwards.
    """


_AS_OPENED: Final = (
    "select pg_catalog.pg_advisory_unlock_all(); close all; unlisten *; discard temp; reset role; reset all"
)


async def as_opened(conn: Connection) -> bool:
    """Take back what user code has set in the session of a pooled connection; False where it has to be closed.

    Raises: as any statement.
    """
    if has_codecs(conn):
        return False
    with mapped_errors():
        await conn.execute(_AS_OPENED)
    return True


def has_codecs(conn: Connection) -> bool:
    """Whether it encodes and decodes values in some other way than the driver does by itself."""
    return bool(getattr(conn, "has_codecs", True))


class Database:
    """PostgreSQL as an SDK sees it: pooled connections for statements, dedicated ones for what must last.

    An async context manager. With `wrap` it borrows the caller's pool and leaves it open.
    """

    def __init__(
        self,
        dsn: str,
        *,
        min_size: int = 1,
        max_size: int = 10,
        statement_cache_size: int = 100,
        connect_timeout: float = 10.0,
        command_timeout: float = 30.0,
        application_name: str = "relay-dispatch",
    ) -> None:
        """Timeouts are seconds. Nothing is opened before ``async with``."""
        if min_size > max_size:
            raise ConfigurationError(f"the pool's min_size ({min_size}) is above its max_size ({max_size})")
        self._dsn: str | None = dsn
        self._min_size = min_size
        self._max_size = max_size
        self._statement_cache_size = statement_cache_size
        self._connect_timeout = connect_timeout
        self._command_timeout = command_timeout
        self._application_name = application_name
        self._pool: Any = None
        self._closing_pool: Any = None
        """The pool that is being closed, or was."""
        self._owns_pool = True
        # Between its uses a connection stays here and not in the driver's pool, where acquire and release cost as much
        # as a statement: a task, a shield, three timers. A caller's pool is left as it is: others draw on it too.
        self._idle: list[_Kept] = []
        self._waiters: deque[asyncio.Future[_Kept | None]] = deque()
        self._places = 0
        """How many connections are lent, kept, or being opened."""
        self._opening = 0
        """How many of them are being opened."""
        self._openings = Openings[Connection | None]()
        self._generation = 0
        """How often connections have been retired; those of before are not used again."""
        self.opened = 0
        """How many connections were opened: each may lead to another server than those before, after a failover. Of a
        pool of the caller's, where that is not seen, how many were lent."""
        # Another one in `async with`: that which all have who use this DSN.
        self._pace = Pace()
        self._silent_until = 0.0
        """The database has let us wait for the whole of the time that putting a connection away may take."""

    @classmethod
    def wrap(cls, pool: Any, *, connect_timeout: float = 10.0, command_timeout: float = 30.0) -> Database:
        """Use a pool of asyncpg that the caller opened and will close; its own settings and reset hold.

        `connect_timeout`: seconds to wait for a connection of it. `command_timeout`: for `execute` alone; the pool may
        have none, so whoever uses `connection` sets a bound of its own.
        """
        database = cls("", connect_timeout=connect_timeout, command_timeout=command_timeout)
        database._dsn = None
        database._pool = pool
        database._owns_pool = False
        # How its connections are opened is its owner's. That nobody is free there says nothing of the server.
        database._pace = Pace(silence_counts=False)
        return database

    async def __aenter__(self) -> Self:
        """Open the pool with its first connections.

        Raises: as `connect`.
        """
        if not self._owns_pool:
            return self
        if self._pool is not None:
            raise ConfigurationError("this Database is open already")
        self._pace = pace_of(self._dsn or "")
        with mapped_errors(connecting=True):
            try:
                pool = asyncpg.create_pool(
                    self._dsn,
                    # The first are opened below. With a floor the driver would have a task of its own, which tries for
                    # ever to reach it beside all who wait for a connection, and logs a traceback each time.
                    min_size=0,
                    max_size=self._max_size,
                    statement_cache_size=self._statement_cache_size,
                    timeout=self._connect_timeout,
                    command_timeout=self._command_timeout,
                    server_settings={"application_name": self._application_name},
                    connect=cast("Any", _open_for_pool),
                    connection_class=_OwnNames,
                    init=self._on_opened,
                    reset=_no_reset,
                )
                first: list[_Kept] = []

                async def open_one() -> None:
                    first.append(_Kept(pool, await self._acquire(pool, self._connect_timeout), self._generation))

                try:
                    with anyio.fail_after(self._connect_timeout + 0.5):
                        await pool
                        if self._min_size:
                            await open_one()  # by itself: what is wrong is wrong for all, and raised as it is
                        async with TaskGroup() as group:
                            for _ in range(self._min_size - 1):
                                group.start_soon(open_one)
                except BaseExceptionGroup as faults:
                    pool.terminate()
                    raise faults.exceptions[0] from None
                except BaseException:
                    pool.terminate()
                    raise
            except ConfigurationError:
                raise
            except (ValueError, OverflowError) as error:
                raise _unusable_dsn(self._dsn or "", error) from None
            except (OSError, EOFError) as error:
                raise _unreached(self._dsn or "", error) from error
        self._pool, self._idle, self._places = pool, first, len(first)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pool if it is ours, by force where a connection does not come back in time."""
        if not self._owns_pool or self._pool is None:
            return
        pool, self._pool = self._pool, None
        self._closing_pool = pool
        self._openings.cancel()
        if time.monotonic() < self._silent_until:
            pool.terminate()  # it has just been waited for in vain: a good-bye would be too
            return
        try:
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _PUT_AWAY_SECONDS), mapped_errors():
                await self._openings.ended()
                while self._idle:
                    self._places -= 1
                    await pool.release(self._idle.pop().conn)
                await pool.close()
        except RelayDispatchError:
            pass  # what cannot be closed in good order is cut below; there is nobody to tell
        finally:
            pool.terminate()

    def terminate(self) -> None:
        """Cut all connections of our own pool at once, for an owner that must leave although the network is dead;
        also while it is being closed.

        Statements under way fail with ConnectionLostError, later ones with DatabaseUnavailableError. Idempotent: yes.
        """
        self._openings.cancel()
        for pool in (self._pool, self._closing_pool):
            if self._owns_pool and pool is not None:
                pool.terminate()

    @property
    def is_borrowed(self) -> bool:
        """Whether the pool is the caller's, and so its codecs, search path and settings."""
        return not self._owns_pool

    @property
    def is_away(self) -> bool:
        """Whether there is no connection, and the last try to open one has failed."""
        return self._pace.failures > 0 and self._places <= self._opening

    @property
    def command_timeout(self) -> float:
        """Seconds for one statement."""
        return self._command_timeout

    @property
    def max_size(self) -> int:
        """How many connections the pool may have."""
        return self._max_size if self._owns_pool else int(self._pool.get_max_size())

    def connection(self, within: float | None = None) -> Lent:
        """Lend a pooled connection for the length of an `async with`, with the errors of the block mapped. Not for user
        code: an `OSError` is taken for the network's.

        A connection that may be broken does not go back: it is cut, and the pool's other old ones with it, because what
        broke one (a failover, a dead route) has most likely broken them too; unless all that is known is that it did
        not answer within less than a second.

        `within`: seconds in which the caller must have got and used it; three quarters of them are waited at most, if
        that is less than the connect timeout.

        Raises: DatabaseUnavailableError where none is free or can be opened in time.
        """
        return Lent(self, within)

    async def execute(self, sql: str, *args: object) -> list[Any]:
        """Run one statement on a pooled connection, within the command timeout also on a pool that has none.

        Transaction: its own. Raises: as `connection`; ConnectionLostError where there was no answer in time.
        """
        async with self.connection() as conn:
            # The driver's own timer, which it sets anyway, and not one more around it.
            rows: list[Any] = await conn.fetch(sql, *args, timeout=self._command_timeout)
            return rows

    async def _on_opened(self, conn: Connection) -> None:
        self.opened += 1
        await _watch_socket(conn)

    # What is below is for `Lent`.

    def _take(self) -> _Kept | None:
        """Return a connection that is kept and usable, without waiting for anything."""
        while self._idle:
            kept = self._idle.pop()
            if _is_open(kept.conn):
                return kept
            self._cut(kept)  # mostly the driver has taken it back by itself
        return None

    async def _get(self, within: float | None) -> _Kept:
        """Open a connection or wait for one."""
        pool = self._pool
        if pool is None:
            raise DatabaseUnavailableError("this Database is not open")
        # The rest is for the statement: cut off at once, it would take the connection with it that others wait for.
        seconds = self._connect_timeout if within is None else min(within * _WAITED_SHARE, self._connect_timeout)
        until = time.monotonic() + seconds
        # Not acquire's own timeout, which takes a task for each call.
        with mapped_errors(connecting=True), anyio.move_on_after(seconds):
            while True:
                if self._owns_pool and (self._places >= self._max_size or self._is_full()):
                    # Not for long where there may be room for one more by then.
                    patience = math.inf if self._places >= self._max_size else self._pace.pause_seconds()
                    with anyio.move_on_after(patience) as no_place:
                        kept = await self._wait_for_place()
                        if kept is not None:
                            return kept
                    if no_place.cancelled_caught:
                        self._places += 1
                else:
                    self._places += 1
                self._opening += 1
                # From before: what retires connections meanwhile means this one too.
                generation = self._generation
                left: list[asyncio.Task[Connection | None]] = []
                try:
                    conn = await self._acquire(pool, until - time.monotonic(), left)
                    self._opening -= 1
                    self.opened += not self._owns_pool
                    return _Kept(pool, conn, generation)
                except BaseException:
                    if left:  # the place is the connection's that is still being opened
                        left[0].add_done_callback(partial(self._came_late, pool, generation))
                        raise
                    self._opening -= 1
                    self._give_up_place()
                    if not self._owns_pool or not self._is_full():
                        raise
                kept = self._take()
                if kept is not None:
                    return kept
        raise DatabaseUnavailableError(f"no connection was free, or could be opened, in time{self._why_not()}")

    def _is_full(self) -> bool:
        """Whether the server takes no more from us, and we have some that will come back."""
        return self._places > self._opening and getattr(self._pace.last_error, "sqlstate", None) == _FULL

    async def _acquire(
        self, pool: Any, within: float, left: list[asyncio.Task[Connection | None]] | None = None
    ) -> Connection:
        """Take a connection of the driver's pool, which mostly opens one: when it is our turn to try (D156).

        With `left` it is opened also where the caller is cancelled: then the task that opens it is added there.
        """

        async def attempt(proves: bool) -> Connection:
            conn = cast("Connection", await pool.acquire())
            if proves and self._owns_pool:
                await _prove(conn, self._pace, self._connect_timeout)
            return conn

        async def carry(trying: Coroutine[Any, Any, Connection | None]) -> Connection | None:
            return await (trying if left is None else self._openings.carry(trying, left.append))

        return await self._pace.run(
            attempt,
            until=time.monotonic() + within,
            again=_again,
            refuses=_refuses_login,
            # In a pool of the caller's it is his connection, and his wait.
            carry=carry if self._owns_pool else None,
        )

    def _came_late(self, pool: Any, generation: int, task: asyncio.Task[Connection | None]) -> None:
        """Keep a connection whose caller has not waited until it was open, for the next one who asks."""
        self._opening -= 1
        conn = None if task.cancelled() or task.exception() is not None else task.result()
        if conn is None:
            self._give_up_place()
            return
        kept = _Kept(pool, conn, generation)
        if not self._keep(kept):
            self._cut(kept)

    def _why_not(self) -> str:
        why = self._pace.last_error
        return f"; nothing was sent (the last try: {_again(why)})" if why is not None else "; nothing was sent"

    async def _wait_for_place(self) -> _Kept | None:
        """Wait for a connection that somebody gives back, or (None) for leave to open one."""
        waiter: asyncio.Future[_Kept | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif waiter.done() and not waiter.cancelled():
                # Cancelled in the moment in which it was served: the next one is.
                kept = waiter.result()
                if kept is None:
                    self._give_up_place()
                elif not self._keep(kept):
                    self._cut(kept)
            raise

    def _keep(self, kept: _Kept) -> bool:
        """Keep a connection that is whole for the next one who asks; False where the driver's pool should see it."""
        conn, now = kept.conn, time.monotonic()
        if (
            not self._owns_pool
            or self._pool is None
            or kept.generation != self._generation
            or now - kept.since > _KEPT_SECONDS
            or not _is_open(conn)
            or conn.is_in_transaction()
        ):
            return False
        kept.used_at = now
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(kept)
                return True
        self._idle.append(kept)
        # The one that was used longest ago, as the driver's pool would do it.
        if now - self._idle[0].used_at > _IDLE_SECONDS and self._places > self._min_size:
            self._cut(self._idle.pop(0))
        return True

    async def _put_away(self, kept: _Kept) -> None:
        """Give a connection back to the driver's pool, which closes it or makes it whole."""
        pool, began = kept.pool, time.monotonic()
        try:
            # Shielded, or a cancelled block would leave its statement running. The timeout bounds the wait for
            # asyncpg's cancel request; after it, asyncpg cuts the connection.
            # A rollback that fails is no error of the block's: the driver has cut the connection then.
            with (
                anyio.CancelScope(shield=True),
                contextlib.suppress(*DRIVER_ERRORS),
            ):
                try:
                    if not kept.conn.is_closed() and kept.conn.is_in_transaction():
                        # A cancellation has cut its rollback short. The driver makes up for that, but logs an error.
                        with anyio.fail_after(_PUT_AWAY_SECONDS):
                            await kept.conn.execute("ROLLBACK")
                except DRIVER_ERRORS:
                    kept.conn.terminate()
                # In any case: what is not released the driver's pool counts as lent for ever.
                await pool.release(kept.conn, timeout=_PUT_AWAY_SECONDS)
        finally:
            if time.monotonic() - began >= _PUT_AWAY_SECONDS:
                self._silent_until = time.monotonic() + _PUT_AWAY_SECONDS
            self._give_up_place()

    async def _retire(self, broken: _Kept, lost: DatabaseUnavailableError) -> None:
        """Cut a connection that may be broken, and see to it that none of its age is used again."""
        self._pace.suspect(must_write=lost.sqlstate == _READ_ONLY)
        with contextlib.suppress(asyncpg.InterfaceError):
            # asyncpg takes a connection back by itself when it sees it close.
            broken.conn.terminate()
        if broken.generation != self._generation:
            return  # retired already; those that were opened since have nothing to do with it
        self._generation += 1
        while self._idle:
            self._cut(self._idle.pop())
        if self._pool is not None:
            await self._pool.expire_connections()

    def _cut(self, kept: _Kept) -> None:
        with contextlib.suppress(asyncpg.InterfaceError):
            kept.conn.terminate()
        self._give_up_place()

    def _give_up_place(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._places -= 1

    async def connect_dedicated(self, name: str | None = None, *, dsn: str | None = None) -> Connection:
        """Open a connection outside the pool, for the caller to close with `close_connection`.

        `name` is added to the application name; `dsn` replaces the pool's.

        Raises: as `connect`; ConfigurationError for a wrapped pool without `dsn`.
        """
        target = dsn or self._dsn
        if not target:
            raise ConfigurationError("a dedicated connection needs a DSN: none can be read from a pool that was given")
        return await connect(
            target,
            connect_timeout=self._connect_timeout,
            command_timeout=self._command_timeout,
            statement_cache_size=self._statement_cache_size,
            application_name=f"{self._application_name} {name}" if name else self._application_name,
        )
