"""Wait for a fact instead of for time to pass."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

import anyio

T = TypeVar("T")

# After so many seconds it is a hang. No bound: whoever wants one says so; a busy machine takes its time.
HANGS = 30.0


@overload
async def eventually(
    predicate: Callable[[], Awaitable[T]], timeout: float = HANGS, interval: float = 0.01, *, message: str = ""
) -> T: ...


@overload
async def eventually(
    predicate: Callable[[], T], timeout: float = HANGS, interval: float = 0.01, *, message: str = ""
) -> T: ...


async def eventually(
    predicate: Callable[[], object], timeout: float = HANGS, interval: float = 0.01, *, message: str = ""
) -> object:
    """Call `predicate` (plain or async) until what it returns is true, and return that; fail after `timeout` seconds.

    An AssertionError of the predicate counts as "not yet", so it can be a block of asserts that ends with
    `return True`; the last one is shown when time is up.
    """
    deadline = time.monotonic() + timeout
    while True:
        last: object
        try:
            outcome = predicate()
            value = await outcome if inspect.isawaitable(outcome) else outcome
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"{message or 'it'} did not come true within {timeout} s; last: {last!r}")
        await anyio.sleep(interval)


async def never(predicate: Callable[[], object | Awaitable[object]], during: float, interval: float = 0.02) -> None:
    """Fail as soon as `predicate` is true; pass after `during` seconds in which it was not."""
    deadline = time.monotonic() + during
    while time.monotonic() < deadline:
        outcome = predicate()
        value = await outcome if inspect.isawaitable(outcome) else outcome
        assert not value, f"it came true: {value!r}"
        await anyio.sleep(interval)
