"""Open a connection to PostgreSQL: when it is this process's turn to try, and to the first host that takes writes.

    connect         one that belongs to no pool
    open_for_pool   one that the driver's pool asks for, which says by itself when

Both ask the hosts of the DSN beside each other (D128) and try in turn with everybody who uses that DSN (D156, see
`pacing`). A connection that ends an outage must have answered a statement first.
"""

from __future__ import annotations

import time
from typing import Any, Final

import anyio
import asyncpg

from dispatch_core.connection import Connection, OwnNames, cut, takes_no_writes, watch_socket
from dispatch_core.driver_errors import READ_ONLY, mapped_errors, translate
from dispatch_core.dsn_faults import cause, dsn_faults
from dispatch_core.errors import DatabaseError, DatabaseUnavailableError, RelayDispatchError
from dispatch_core.hosts import Host, accepted, hosts_of, ordered, target_of
from dispatch_core.pacing import Pace, pace_of
from dispatch_core.task_groups import TaskGroup

__all__ = ["again", "connect", "open_for_pool", "prove", "refuses_login"]

_NEXT_HOST_SECONDS: Final = 1.0
"""Of a DSN with several hosts: how long one may be silent before the next is asked beside it."""

_LOGIN_REFUSED: Final = ("28", "3D")
"""Classes of SQLSTATE: invalid authorization, and no such database. Asking again does not mend it."""


async def connect(
    dsn: str,
    *,
    connect_timeout: float = 10.0,
    command_timeout: float | None = 30.0,
    statement_cache_size: int = 100,
    application_name: str = "relay-dispatch",
    connection_class: type[Connection] = OwnNames,
) -> Connection:
    """Open one connection that belongs to no pool; close it with `close_connection`.

    Timeouts are seconds. A DSN may name several hosts: then it is the first that takes writes, unless
    target_session_attrs says otherwise.

    Raises: ConfigurationError for a DSN that is none, DatabaseUnavailableError, DatabaseError (login refused).
    """
    with mapped_errors(connecting=True), dsn_faults(dsn), anyio.fail_after(connect_timeout + 0.5):
        conn = await _open_in_turn(
            dsn,
            timeout=connect_timeout,
            command_timeout=command_timeout,
            statement_cache_size=statement_cache_size,
            server_settings={"application_name": application_name},
            connection_class=connection_class,
        )
    await watch_socket(conn)
    return conn


async def open_for_pool(dsn: str, *, loop: object, **options: Any) -> Connection:
    """Connect for a pool of the driver's, which names the event loop too."""
    del loop  # the one that runs
    with dsn_faults(dsn):
        return await _open(dsn, **options)


# --- its turn ---------------------------------------------------------------------------------------------------------


async def _open_in_turn(dsn: str, *, timeout: float, **options: Any) -> Connection:
    pace = pace_of(dsn)

    async def attempt(proves: bool) -> Connection:
        # Here and not only around all of it: those who wait for this try are told the same.
        with dsn_faults(dsn):
            conn = await _open(dsn, timeout=timeout, **options)
        if proves:
            await prove(conn, pace, timeout)
        return conn

    return await pace.run(attempt, until=time.monotonic() + timeout, again=again, refuses=refuses_login)


async def prove(conn: Connection, pace: Pace, timeout: float) -> None:
    """Have a new connection answer a statement; it is cut where it does not.

    Raises: what the driver does; DatabaseUnavailableError where it takes no writes and `pace` asks for that.
    """
    try:
        # A pooler takes connections also while there is no server behind it.
        with anyio.fail_after(timeout):
            await conn.execute("select 1")
        if pace.must_write and takes_no_writes(conn):
            raise DatabaseUnavailableError("the server takes no writes", sqlstate=READ_ONLY)
    except BaseException:
        cut(conn)
        raise


def again(error: Exception) -> Exception:
    """Return an error of its own for each who waited for one try."""
    ours = error if isinstance(error, RelayDispatchError) else translate(error, connecting=True)
    if ours is None:
        return DatabaseUnavailableError(f"PostgreSQL could not be reached: {error}")
    return type(ours)(str(ours), sqlstate=ours.sqlstate) if isinstance(ours, DatabaseError) else type(ours)(str(ours))


def refuses_login(error: Exception) -> bool:
    """Tell whether it is the login that was refused, or the database that is not there."""
    return (getattr(error, "sqlstate", None) or "")[:2] in _LOGIN_REFUSED


# --- its server -------------------------------------------------------------------------------------------------------


async def _open(dsn: str, *, timeout: float, **options: Any) -> Connection:
    """Connect as the driver does; but of several hosts none, however silent, keeps us from the others (D128)."""
    target, hosts = target_of(dsn), hosts_of(dsn)
    if not hosts:
        return await asyncpg.connect(dsn, timeout=timeout, **options)
    # The driver's own default takes a standby too, which refuses whatever we say.
    options["target_session_attrs"] = "read-write" if pace_of(dsn).must_write else target or "read-write"
    return await _open_one_of(hosts, dsn, timeout, options)


async def _open_one_of(hosts: tuple[Host, ...], dsn: str, timeout: float, options: dict[str, Any]) -> Connection:
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


def _why(hosts: tuple[Host, ...], failed: dict[Host, Exception]) -> str:
    said = []
    for host in hosts:
        error = failed.get(host)
        if error is None or isinstance(error, TimeoutError):
            why = "did not answer in time"
        elif isinstance(error, asyncpg.exceptions.TargetServerAttributeNotMatched):
            why = "is not of the kind that is asked for (read only?)"
        else:
            why = cause(error)
        said.append(f"{host[0]}:{host[1]} ({why})")
    return "; ".join(said)
