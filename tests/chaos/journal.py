"""What processes have seen and done, told past the SDK: a table on a server that no fault is done to.

A note is committed when `note` returns, so what comes after it in the program came after it. `at` is of the monotonic
clock, which all processes of a machine have in common, and which nobody moves.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias
from uuid import UUID

import anyio
import asyncpg

__all__ = ["CREATE", "Journal", "open_journal"]

CREATE: Final = """
create table journal (
  n bigint generated always as identity, at double precision, process text, pid bigint, event text, tenant text,
  job_id uuid, said jsonb
)
"""

_COLUMNS: Final = ("at", "process", "pid", "event", "tenant", "job_id", "said")

_Row: TypeAlias = tuple[float, str, int, str, str, UUID | None, str]


class Journal:
    """Writes what comes while the last rows are on their way together."""

    def __init__(self, conn: asyncpg.Connection[Any], process: str) -> None:
        self._conn = conn
        self._process = process
        self._rows: list[_Row] = []
        self._written = anyio.Event()
        self._asked = anyio.Event()

    async def note(self, event: str, tenant: str, job_id: UUID | None = None, **said: Any) -> None:
        """Return when it is written, also where the caller is cancelled meanwhile."""
        at = time.monotonic()
        self._rows.append((at, self._process, os.getpid(), event, tenant, job_id, json.dumps(said)))
        written = self._written
        self._asked.set()
        with anyio.CancelScope(shield=True):
            await written.wait()

    async def run(self) -> None:
        while True:
            await self._asked.wait()
            rows, written = self._rows, self._written
            self._rows, self._written, self._asked = [], anyio.Event(), anyio.Event()
            await self._conn.copy_records_to_table("journal", records=rows, columns=_COLUMNS)
            written.set()


@asynccontextmanager
async def open_journal(dsn: str, process: str) -> AsyncIterator[Journal]:
    """Open a journal for a block; what is noted in it is written, whatever ends the block."""
    conn = await asyncpg.connect(dsn)
    journal = Journal(conn, process)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(journal.run)
            yield journal
            tasks.cancel_scope.cancel()
    finally:
        conn.terminate()
