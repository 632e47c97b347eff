"""Open connections each in a task of its own, which goes on where its caller has no more time.

Who asks a pool for a connection may have waited for long already, and then has less time left than it takes to open
one. If what he began ended with him, and the next one is no better off, nothing would ever be opened: on a line of
0.3 s a pool stayed empty for as long as it was asked. So the connection is finished for whoever waits by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from dispatch_core.errors import DatabaseUnavailableError

__all__ = ["Openings"]

Opened = TypeVar("Opened")


class Openings(Generic[Opened]):
    """Those of one pool. Whoever closes it cancels them, and waits for their end."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        # No task group: they outlive their callers, and a pool has no task that could be host to one.
        self._tasks: set[asyncio.Task[Opened]] = set()

    async def carry(self, opening: Coroutine[Any, Any, Opened], left: Callable[[asyncio.Task[Opened]], None]) -> Opened:
        """Await `opening`; where the caller is cancelled it goes on, and `left(task)` takes what comes of it.

        Raises: what `opening` does; DatabaseUnavailableError where it was cancelled by `cancel`.
        """
        task = asyncio.get_running_loop().create_task(opening)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait([task])
        except BaseException:
            left(task)
            raise
        if task.cancelled():
            raise DatabaseUnavailableError("this Database is not open")
        return task.result()

    def cancel(self) -> None:
        """End all of them. Idempotent: yes."""
        for task in self._tasks:
            task.cancel()

    async def ended(self) -> None:
        """Wait until all have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)
