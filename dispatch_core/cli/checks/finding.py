"""What a check returns, and what all checks use: a connection, reads that change nothing, words for numbers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from dispatch_core.database import Connection, close_connection, connect, mapped_errors

__all__ = ["Finding", "Verdict", "age", "all_rows", "connection", "hidden", "ms", "one_row"]

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `mend` says what to do, where something is to be done."""

    check: str
    verdict: Verdict
    found: str
    mend: str | None = None
    values: Mapping[str, object] = field(default_factory=dict)


@asynccontextmanager
async def connection(dsn: str, timeout: float, *, statement_cache_size: int = 0) -> AsyncIterator[Connection]:
    """Lend a connection of the check's own; without a statement cache, so that it can also look behind a pooler that
    keeps no prepared statements."""
    conn = await connect(
        dsn,
        connect_timeout=timeout,
        command_timeout=15.0,
        statement_cache_size=statement_cache_size,
        application_name="relay-dispatch doctor",
    )
    try:
        yield conn
    finally:
        await close_connection(conn)


async def all_rows(conn: Connection, sql: str, *arguments: object) -> list[Any]:
    """Read in a transaction of its own: read-only, and met by one backend from the first message to the last, also
    behind a pooler."""
    with mapped_errors():
        async with conn.transaction(readonly=True):
            return list(await conn.fetch(sql, *arguments))


async def one_row(conn: Connection, sql: str, *arguments: object) -> Any:
    """Read the first row."""
    return (await all_rows(conn, sql, *arguments))[0]


def hidden(count: int) -> str:
    """Say how many sessions could not be looked at; nothing where there were none."""
    if not count:
        return ""
    return f" (as far as this login can see: {count} session{'s are' if count > 1 else ' is'} hidden from it)"


def ms(seconds: float) -> str:
    """Show a short time."""
    value = seconds * 1000
    return f"{value:.2f} ms" if value < 10 else f"{value:,.0f} ms"


def age(seconds: float) -> str:
    """Show a long one."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
