"""One connection of ours: how its statements are named, what user code may leave in its session, and how it ends."""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import Any, Final, Protocol, TypeAlias

import anyio
import asyncpg

from dispatch_core.driver import look_at_failed_upgrades
from dispatch_core.driver_errors import mapped_errors

__all__ = [
    "PUT_AWAY_SECONDS",
    "Connection",
    "OwnNames",
    "as_opened",
    "close_connection",
    "cut",
    "has_codecs",
    "in_transaction",
    "is_open",
    "no_reset",
    "takes_no_writes",
    "watch_socket",
]

Connection: TypeAlias = asyncpg.Connection
"""A connection of asyncpg, its own or a pool's."""

PUT_AWAY_SECONDS: Final = 2.0
"""How long putting a connection away may take before it is cut: that runs shielded, so it holds up a cancellation."""

_AS_OPENED: Final = (
    "select pg_catalog.pg_advisory_unlock_all(); close all; unlisten *; discard temp; reset role; reset all"
)

look_at_failed_upgrades()


class OwnNames(asyncpg.Connection):
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


# --- its session ------------------------------------------------------------------------------------------------------


async def no_reset(conn: Connection) -> None:
    """Stand in for the pool's reset query, which costs a round trip on every release.

    Safe because our statements leave nothing in a session: the tenant is bound for the transaction only, and we take no
    advisory lock, cursor or LISTEN on a pooled connection. asyncpg still rolls an open transaction back. Whoever lends
    one to user code calls `as_opened` afterwards.
    """


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


class _Telling(Protocol):
    def is_in_transaction(self) -> bool: ...


def in_transaction(conn: _Telling) -> bool:
    """Tell whether a connection, perhaps of the caller's, has a transaction open.

    Raises: DatabaseUnavailableError where it was terminated, or is its pool's again.
    """
    with mapped_errors():
        return conn.is_in_transaction()


def takes_no_writes(conn: Connection) -> bool:
    """Tell whether the server says of itself that it is a standby, or was made read only; it says so unasked.

    Raises: DatabaseUnavailableError where it was terminated.
    """
    with mapped_errors():
        said = conn.get_settings()
    return any(getattr(said, name, "off") == "on" for name in ("in_hot_standby", "default_transaction_read_only"))


# --- its socket -------------------------------------------------------------------------------------------------------


async def watch_socket(conn: Connection) -> None:
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


def is_open(conn: Connection) -> bool:
    """Tell whether it can be used, as far as is known here."""
    try:
        return not conn.is_closed()
    except asyncpg.InterfaceError:
        return False  # the driver's pool has taken it back, as it does when it sees one close


def cut(conn: Connection) -> None:
    """End it at once, without a good-bye. Idempotent: yes, also where the driver's pool has taken it back by itself."""
    with contextlib.suppress(asyncpg.InterfaceError):
        conn.terminate()


async def close_connection(conn: Connection, seconds: float = PUT_AWAY_SECONDS) -> None:
    """Close `conn` within `seconds`, by force if need be; shielded from cancellation; never raises.

    Idempotent: yes.
    """
    try:
        with anyio.CancelScope(shield=True), contextlib.suppress(Exception):
            if not conn.is_closed():
                await conn.close(timeout=seconds)
    finally:
        conn.terminate()
