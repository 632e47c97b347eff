"""See what backends do, through pg_stat_activity: the way to wait for a race to be set up."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg

from tests.support.eventually import HANGS, eventually

Connection: TypeAlias = "asyncpg.Connection[Any]"


def pid_of(connection: Connection) -> int:
    """Return the server process id of an open connection."""
    return int(connection.get_server_pid())


async def wait_until_blocked(
    observer: Connection, pid: int, *, by: int | None = None, timeout: float = HANGS
) -> list[int]:
    """Wait until backend `pid` waits for a lock (of backend `by`), and return who blocks it."""

    async def blockers() -> list[int]:
        found: list[int] = await observer.fetchval("select pg_blocking_pids($1)", pid)
        return found if by is None or by in found else []

    return await eventually(blockers, timeout, message=f"backend {pid} waiting for a lock")


async def wait_until_statement_runs(observer: Connection, fragment: str, *, timeout: float = HANGS) -> int:
    """Wait until another backend is busy with a statement that contains `fragment`, and return its pid."""
    query = """
        select pid from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid() and state = 'active'
          and position($1 in query) > 0
        order by query_start limit 1
    """

    async def busy() -> int | None:
        return await observer.fetchval(query, fragment)

    pid: int | None = await eventually(busy, timeout, message=f"a backend running {fragment!r}")
    assert pid is not None
    return pid


async def backends(observer: Connection, application_name: str | None = None) -> list[asyncpg.Record]:
    """Return the other client backends of the observer's database, the oldest first."""
    return await observer.fetch(
        """
        select pid, usename, application_name, state, wait_event_type, wait_event, query, xact_start, client_port
        from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
          and ($1::text is null or application_name = $1)
        order by backend_start
        """,
        application_name,
    )


async def listening_backends(observer: Connection) -> list[int]:
    """Return the pids of idle backends whose last statement was a LISTEN."""
    return [row["pid"] for row in await backends(observer) if row["query"].lstrip().upper().startswith("LISTEN")]


async def terminate(observer: Connection, pid: int, timeout: float = HANGS) -> None:
    """Kill a backend as an operator would, and wait until it is gone."""
    await observer.fetchval("select pg_terminate_backend($1)", pid)

    async def gone() -> bool:
        return not await observer.fetchval("select exists (select from pg_stat_activity where pid = $1)", pid)

    await eventually(gone, timeout, message=f"the end of backend {pid}")


async def open_transactions(observer: Connection) -> list[asyncpg.Record]:
    """Return the other backends of this database that have a transaction open."""
    return [row for row in await backends(observer) if row["xact_start"] is not None]
