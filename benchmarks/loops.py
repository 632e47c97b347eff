"""The event loop: uvloop where it is installed, on both sides alike."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["as_relay_run", "loop_factory", "loop_name", "run"]

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the loop; None = asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def loop_name() -> str:
    """Return the name of the loop in use."""
    return "asyncio" if loop_factory() is None else "uvloop"


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in a new loop."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


@contextmanager
def as_relay_run() -> Iterator[None]:
    """Have the collector's thresholds of `relay-dispatch relay run` in the block: for whoever does a relay's work, ours
    and the hand-written side alike."""
    before = gc.get_threshold()
    gc.set_threshold(20_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
