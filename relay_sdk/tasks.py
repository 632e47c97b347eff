"""Make tasks that belong to the executor and to no task group: one for each job or chunk.

A start in an anyio task group costs 13 to 18 µs, this one 2, and with an eager start (Python 3.12) 1. Such a task can
also be left behind, when a relay stops and a handler refuses to end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

__all__ = ["TaskMaker", "task_makers"]

TaskMaker: TypeAlias = Callable[..., asyncio.Task[None]]


def task_makers(loop: asyncio.AbstractEventLoop, name: str) -> tuple[TaskMaker, TaskMaker]:
    """Return what makes a task of (coroutine, context=…): one that begins at once where that is possible, and one that
    does not.
    """
    # One name for all: to make up one for each costs more than the rest of the task.
    later: TaskMaker = partial(asyncio.Task, loop=loop, name=name)
    if loop.get_task_factory() is not None:
        later = loop.create_task
    if sys.version_info >= (3, 12):
        return partial(asyncio.Task, loop=loop, name=name, eager_start=True), later
    return later, later
