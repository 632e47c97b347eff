"""SIGTERM ends a command as Ctrl-C does: in order, and with 128 and its number as the exit code.

Without a handler it would end a process at once, whatever it has open, and the first process of a container not at all.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, TypeVar

import anyio

__all__ = ["TERMINATED", "run_until_sigterm", "sigterm_exits"]

T = TypeVar("T")

TERMINATED: Final = 128 + signal.SIGTERM
"""The exit code."""


def _exit(_number: int, _frame: object) -> NoReturn:
    sys.exit(TERMINATED)


def _is_ours() -> bool:
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _exit


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Have SIGTERM raise SystemExit, unless somebody else has a use for it, or this is not the main thread."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_until_sigterm(run: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function in an event loop of its own, and cancel it at SIGTERM.

    Raises: SystemExit, when it was cancelled so. Where SIGTERM is not for `sigterm_exits`, it is left alone.
    """
    told = False

    async def main() -> T:
        nonlocal told
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def end() -> None:
            # Once: a second one would cut short what the first has begun to close, and that has its bounds.
            nonlocal told
            if not told and task is not None:
                told = True
                task.cancel()

        # Not while the loop runs: an exception out of nowhere would leave tasks behind.
        loop.add_signal_handler(signal.SIGTERM, end)
        try:
            return await run()
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, _exit)

    if not _is_ours() or sys.platform == "win32":  # where the event loop takes no signals
        return anyio.run(run)
    try:
        return anyio.run(main)
    except asyncio.CancelledError:
        if told:
            sys.exit(TERMINATED)
        raise
