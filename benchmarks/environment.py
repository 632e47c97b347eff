"""What the figures were measured on: versions, cores, settings, and how long a durable commit takes here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time

import asyncpg

from benchmarks.loops import loop_name
from benchmarks.model import Json, percentile
from dispatch_core.dev.postgres import DevServer

__all__ = ["describe"]

_SETTINGS = (
    "server_version",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_sync_method",
    "wal_level",
    "wal_compression",
    "commit_delay",
    "commit_siblings",
    "shared_buffers",
    "max_wal_size",
    "checkpoint_timeout",
    "autovacuum",
    "autovacuum_naptime",
    "max_connections",
    "jit",
    "io_method",
)
_PACKAGES = ("relay-dispatch", "asyncpg", "anyio", "orjson", "uvloop")
_COMMITS = 200


async def describe(server: DevServer) -> Json:
    """Return the environment as plain values; takes about a second, on an otherwise idle server."""
    connection = await asyncpg.connect(server.admin_dsn)
    try:
        rows = await connection.fetch(
            "select name, current_setting(name) as value from pg_settings where name = any ($1) order by name",
            _SETTINGS,
        )
        commits = await _durable_commits(connection)
        empty = await _round_trips(connection)
    finally:
        await connection.close()
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "event_loop": loop_name(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "server": {"origin": server.origin, "settings": {row["name"]: row["value"] for row in rows}},
        "durable_commit_ms": {"p50": statistics.median(commits), "p99": percentile(commits, 0.99)},
        "round_trip_ms": {"p50": statistics.median(empty)},
    }


async def _durable_commits(connection: asyncpg.Connection) -> list[float]:
    # The smallest transaction that has something to make durable.
    times = []
    for _ in range(_COMMITS):
        started = time.perf_counter()
        await connection.execute("select pg_logical_emit_message(true, 'tick', 'x')")
        times.append((time.perf_counter() - started) * 1000)
    return times


async def _round_trips(connection: asyncpg.Connection) -> list[float]:
    statement = await connection.prepare("select 1")
    times = []
    for _ in range(_COMMITS):
        started = time.perf_counter()
        await statement.fetchval()
        times.append((time.perf_counter() - started) * 1000)
    return times


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
