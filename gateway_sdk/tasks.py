"""The background tasks of an open object, which go down with it and take it down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio.abc

from dispatch_core.task_groups import TaskGroup

__all__ = ["StartSoon", "Tasks"]

StartSoon: TypeAlias = Callable[[Callable[[], Awaitable[Any]]], None]
"""`Tasks.start_soon`, as those see it who only start tasks."""


class Tasks:
    """A task group that ends with its block, raises a single fault as itself, and does not wrap the block's own."""

    def __init__(self) -> None:
        self._group = TaskGroup()
        self.on_failure: Callable[[BaseException], None] = lambda _error: None

    def start_soon(self, run: Callable[[], Awaitable[Any]]) -> None:
        self._group.start_soon(self._guard, run)

    async def start(self, run: Callable[..., Awaitable[Any]]) -> None:
        await self._group.start(self._guard_start, run)

    async def _guard(self, run: Callable[[], Awaitable[Any]]) -> None:
        try:
            await run()
        except Exception as error:
            self.on_failure(error)
            raise

    async def _guard_start(
        self, run: Callable[..., Awaitable[Any]], *, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        await self._guard(partial(run, task_status=task_status))

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            if error is None or isinstance(error, Exception):
                self._group.cancel_scope.cancel()
                # Not told of the block's error, the group does not wrap it; it goes on by itself.
                await self._group.__aexit__(None, None, None)
                return None
            # A cancellation: the group's own, after a fault of a task, or somebody else's.
            return await self._group.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from group.exceptions[0].__cause__
            raise
