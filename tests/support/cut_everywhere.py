"""Sweeps of `tests.support.cancelling`: a scenario is cut at each of its waits, and nothing may be left of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any

import anyio.to_thread
import asyncpg

from tests.support.cancelling import Moment, play
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually

__all__ = ["cut_everywhere"]

_SESSIONS = """
select application_name, query from pg_stat_activity where datname = $1 and pid <> pg_backend_pid()
"""


async def cut_everywhere(
    scenario: Callable[[], Awaitable[None]],
    database: TestDatabase,
    moment: Moment,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    every: int = 1,
) -> int:
    """Cut `scenario` at each of its waits, or at one in `every`; return how many there were.

    Each time it ends as cancelled, within ten seconds, and without any task, word of the event loop or session at the
    server that is left.
    """
    observer: Any = await asyncpg.connect(database.admin_dsn)
    # What is there already is not looked through for each run.
    gc.collect()
    gc.freeze()
    try:
        for at in count(0, every):
            run = partial(play, scenario, at, moment, loop_factory=loop_factory)
            played = await anyio.to_thread.run_sync(run)
            assert played.is_clean, played
            # A session whose client has cut it ends when its backend sees that.
            await eventually(lambda: _none(observer, database.name), message=f"sessions are left of {played}:")
            if not played.reached:
                return at
    finally:
        gc.unfreeze()
        await observer.close()
    raise AssertionError


async def _none(observer: Any, name: str) -> bool:
    rows = await observer.fetch(_SESSIONS, name)
    assert not rows, rows
    return True
