"""Counters that begin where 32 bits end: what a server and a schema would come to after years (C38).

There is no sequence in the schema and no column of it is narrower than bigint, so what counts is: the fences of jobs
and events and the lease versions of chunks, by their columns' defaults; attempts begin with each row, and are tested by
themselves. Of PostgreSQL's own numbers the schema keeps two: object ids, of roles, and transaction ids, in the
timeline.
"""

from __future__ import annotations

from typing import Any

import asyncpg

from dispatch_core.dev.postgres import DevServer

HIGH = 2_147_483_640
"""So near to the end of 32 bits, with a sign, that any test crosses it."""

_begin = 0


def begin_high() -> None:
    """Have `nth` count from HIGH: for the whole of a run with --high-counters."""
    global _begin
    _begin = HIGH


def nth(number: int) -> int:
    """Return what a fence or lease version is that has been changed so often."""
    return _begin + number


COUNTERS = (
    ("relay.s2r_relay_dispatch_queue", "fence"),
    ("relay.outbox", "fence"),
    ("relay.durable_chunk", "lease_version"),
)


def raise_ids(server: DevServer) -> None:
    """Let the server's next object id cross 32 bits with a sign, and its transaction ids be beyond 32 bits without.

    It is stopped and started. A server that is not local is left as it is.
    """
    if server.cluster is None:
        return
    server.stop()
    server.cluster._run("pg_resetwal", "--epoch=1", f"--next-oid={HIGH}", str(server.cluster.data))
    server.start()


async def raise_counters(admin_dsn: str) -> None:
    """Let every counter of a migrated database begin at HIGH."""
    connection: asyncpg.Connection[Any] = await asyncpg.connect(admin_dsn)
    try:
        for table, column in COUNTERS:
            await connection.execute(f"alter table {table} alter column {column} set default {HIGH}")
    finally:
        await connection.close()
