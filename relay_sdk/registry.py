"""Know which handler is for which operation; refuse at registration what could only fail later."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

from dispatch_core.codec import check_name
from dispatch_core.errors import HandlerRegistrationError, InvalidNameError
from dispatch_core.models import DispatchJob
from relay_sdk.fair_queue import FairQueue
from relay_sdk.outcomes import Outcome

__all__ = [
    "Gate",
    "Handler",
    "HandlerFunction",
    "Registry",
    "check_concurrency",
    "check_function",
    "check_timeout",
    "name_of",
]

HandlerFunction: TypeAlias = Callable[[DispatchJob], Awaitable[Outcome | None] | Outcome | None]
"""``async def`` or ``def``, of one argument."""

Function = TypeVar("Function", bound=Callable[..., Any])

_FALLBACK: Final = "the fallback"


class Gate:
    """How many jobs may run at once behind one limit, and the slots of those that wait before it."""

    __slots__ = ("limit", "next_start", "running", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.waiting: FairQueue[Any] = FairQueue()
        self.next_start = 0.0
        """When, by the monotonic clock, the last job that was sent away from here is to come back."""


class Handler:
    """One registered handler."""

    __slots__ = ("function", "gate", "is_async", "name", "seconds", "timeout")

    def __init__(
        self, name: str, function: Callable[[DispatchJob], Any], is_async: bool, timeout: float, gate: Gate | None
    ) -> None:
        self.name = name
        self.function = function
        self.is_async = is_async
        self.timeout = timeout
        """Seconds; infinite where there is none."""
        self.gate = gate
        self.seconds = 0.1
        """About how long it takes: a moving average, used where jobs wait at the gate."""


class Registry:
    """The handlers of one relay."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._fallback: Handler | None = None
        self._thread_gate = Gate(1)

    def limit_threads(self, limit: int) -> None:
        """Say how many `def` handlers without a limit of their own may run at once."""
        self._thread_gate.limit = limit

    def find(self, operation: str) -> Handler | None:
        """Return the operation's handler, else the fallback, else None."""
        return self._handlers.get(operation) or self._fallback

    @property
    def operations(self) -> list[str]:
        """The operations that have a handler of their own."""
        return sorted(self._handlers)

    @property
    def is_empty(self) -> bool:
        return not self._handlers and self._fallback is None

    @property
    def gates(self) -> list[Gate]:
        """All gates, each once."""
        handlers = [*self._handlers.values(), *([self._fallback] if self._fallback else [])]
        return list({id(h.gate): h.gate for h in handlers if h.gate is not None}.values())

    def add(
        self, operation: str, function: Function, *, timeout: float | None = None, concurrency: int | None = None
    ) -> Function:
        """Register `function` for `operation` and return it as it is.

        Raises: HandlerRegistrationError for a wrong signature, a bad name or limit, a second handler.
        """
        try:
            operation = check_name("operation", operation)
        except InvalidNameError as error:
            raise HandlerRegistrationError(str(error)) from None
        if operation in self._handlers:
            raise HandlerRegistrationError(
                f"operation {operation!r} has a handler already: {name_of(self._handlers[operation].function)}"
            )
        self._handlers[operation] = self._make(f"operation {operation!r}", function, timeout, concurrency)
        return function

    def add_fallback(
        self, function: Function, *, timeout: float | None = None, concurrency: int | None = None
    ) -> Function:
        """Register `function` for all operations that have no handler.

        Raises: HandlerRegistrationError, as `add`.
        """
        if self._fallback is not None:
            raise HandlerRegistrationError(f"there is a fallback already: {name_of(self._fallback.function)}")
        self._fallback = self._make(_FALLBACK, function, timeout, concurrency)
        return function

    def _make(self, what: str, function: Callable[..., Any], timeout: float | None, concurrency: int | None) -> Handler:
        is_async = check_function(what, function, "the job")
        seconds = check_timeout(what, timeout)
        limit = check_concurrency(what, concurrency)
        if limit is None:
            return Handler(what, function, is_async, seconds, None if is_async else self._thread_gate)
        return Handler(what, function, is_async, seconds, Gate(limit))


def check_timeout(what: str, timeout: object) -> float:
    """Return it in seconds, infinite where there is none."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise HandlerRegistrationError(f"timeout of {what} must be positive seconds, not {timeout!r}")
    return float(timeout)


def check_concurrency(what: str, concurrency: object) -> int | None:
    """Return it as it is."""
    if concurrency is None:
        return None
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
        raise HandlerRegistrationError(f"concurrency of {what} must be a whole number from 1 up, not {concurrency!r}")
    return concurrency


def check_function(what: str, function: object, argument: str) -> bool:
    """Return whether it is asynchronous; raise where it cannot be a handler, which takes one `argument`."""
    if not callable(function) or isinstance(function, type):
        raise HandlerRegistrationError(f"the handler of {what} must be a function, not {function!r}")
    plain: Any = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    if not (inspect.isfunction(plain) or inspect.ismethod(plain) or inspect.isbuiltin(plain)):
        plain = type(plain).__call__
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise HandlerRegistrationError(f"the handler of {what} must return, not yield: {name_of(function)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        pass  # some built-ins tell nothing of themselves
    else:
        try:
            signature.bind(object())
        except TypeError:
            raise HandlerRegistrationError(
                f"the handler of {what} must take one argument, {argument}: {name_of(function)}{signature}"
            ) from None
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(plain)


def name_of(function: object) -> str:
    """Return where a function comes from, for a person."""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
