"""Prove that the session behind a listening connection is ours alone, and hears what is rung.

**At the start (C05).** A NOTIFY to a channel of our own carries the process id of the backend that sent it. On a direct
connection that is the id which the server gave at log-in. Where it differs, a pooler stands between; then a second
connection rings once while this one is idle, which tells a session pooler (it arrives) from a transaction pooler (it
does not). Until that is proven nothing else is done in the session, which might be somebody else's next.

**Afterwards (C01).** A connection that was dropped without a FIN looks idle, so the session is asked from time to time
whether it still listens. It is a question and no NOTIFY, because before PostgreSQL 19 every ring wakes every listener
of the database. It is also asked whether its server takes writes: where one was made read only, everybody rings
elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from dispatch_core.database import close_connection, mapped_errors, takes_no_writes
from dispatch_core.errors import ConnectionLostError
from dispatch_core.listening import Echo, ListeningConnection, quoted

__all__ = ["PoolerFound", "end_predecessors", "probe", "prove", "read_only"]

_PROBE_SQL: Final = """
select pg_catalog.pg_backend_pid() as pid,
       $1::text is null
       or exists (select from pg_catalog.pg_listening_channels() as c (name) where c.name = $1) as listening,
       pg_catalog.current_setting('transaction_read_only')::boolean as read_only
"""

_END_PREDECESSORS_SQL: Final = """
select pg_catalog.pg_terminate_backend(a.pid)
from pg_catalog.pg_stat_activity as a
where a.application_name = $1 and a.pid <> pg_catalog.pg_backend_pid()
  and a.usename = session_user and a.datname = pg_catalog.current_database()
"""


class PoolerFound(Exception):  # noqa: N818  (not an error: an answer)
    """The session behind the connection is not ours alone."""


async def prove(
    conn: ListeningConnection,
    echo: Echo,
    heard: Callable[..., None],
    connect: Callable[[], Awaitable[ListeningConnection]],
) -> int:
    """Return the process id of the session's backend, once it is known to be ours and to hear.

    `heard` is called with what is notified, and passes on what comes on the channel of `echo`, which stays listened to.
    `connect` opens a second connection. Only statements without arguments are sent, which are one message each: a
    pooler may give each to another backend.

    Raises: PoolerFound; ConnectionLostError; as `mapped_errors`.
    """
    with mapped_errors():
        await conn.listen([echo.channel], heard)
        told = conn.get_server_pid()
        sender = await echo.ring(conn)
    if takes_no_writes(conn):
        raise read_only()
    if sender is not None:
        if sender == told:
            return sender
        # A pooler, which does not pass the real process id on. It sends us what comes while we talk to the backend, but
        # does it send what comes while we do not?
        other = await connect()
        try:
            with mapped_errors():
                if await echo.ring(other) is not None:
                    return sender
        finally:
            await close_connection(other)
    with mapped_errors():
        # Or is it the line that is dead? Then this raises. The backend is somebody else's next: leave it as it was.
        await conn.execute(f"unlisten {quoted(echo.channel)}")
    raise PoolerFound


async def probe(conn: ListeningConnection, pid: int | None, channel: str | None) -> None:
    """Ask whether the backend is still `pid`, listens to `channel` (None: to nothing), and takes writes.

    Raises: PoolerFound; ConnectionLostError; as `mapped_errors`.
    """
    with mapped_errors():
        row = await conn.fetchrow(_PROBE_SQL, channel)
    if row is None or row["pid"] != pid or not row["listening"]:
        raise PoolerFound  # another session answers now
    if row["read_only"]:
        raise read_only()


async def end_predecessors(conn: ListeningConnection, application_name: str) -> None:
    """End other sessions of this name on the server, which a cut line has left there. Raises: as `mapped_errors`."""
    with mapped_errors():
        await conn.fetch(_END_PREDECESSORS_SQL, application_name)


def read_only() -> ConnectionLostError:
    """Return the error for a session on a server that takes no writes: who listens there hears nobody."""
    return ConnectionLostError("the server takes no writes, so whoever rings does it elsewhere")
