"""Know which handler is for chunks of which kind of durable job; refuse at registration what could only fail later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dispatch_core.codec import check_name
from dispatch_core.errors import HandlerRegistrationError, InvalidNameError
from relay_sdk.registry import check_concurrency, check_function, check_timeout, name_of

if TYPE_CHECKING:
    from relay_sdk.chunk_context import ChunkContext

__all__ = ["ChunkHandler", "ChunkHandlerFunction", "ChunkRegistry"]

ChunkHandlerFunction: TypeAlias = "Callable[[ChunkContext], Awaitable[Any]]"
"""``async def``, of one argument."""

Function = TypeVar("Function", bound=Callable[..., Any])


class ChunkHandler:
    """One registered handler."""

    __slots__ = ("concurrency", "function", "in_hand", "kind", "timeout")

    def __init__(
        self, kind: str, function: Callable[[ChunkContext], Awaitable[Any]], timeout: float, concurrency: int | None
    ) -> None:
        self.kind = kind
        self.function = function
        self.timeout = timeout
        """Seconds; infinite where there is none."""
        self.concurrency = concurrency
        self.in_hand = 0
        """How many chunks of this kind have a slot."""

    def room(self, free: int) -> int:
        """Return how many more chunks of this kind may be claimed, where `free` slots are."""
        return free if self.concurrency is None else min(free, self.concurrency - self.in_hand)


class ChunkRegistry:
    """The chunk handlers of one relay."""

    def __init__(self) -> None:
        self._handlers: dict[str, ChunkHandler] = {}

    def add(
        self, kind: str, function: Function, *, timeout: float | None = None, concurrency: int | None = None
    ) -> Function:
        """Register `function` for chunks of `kind` and return it as it is.

        Raises: HandlerRegistrationError for a wrong signature, a bad name or limit, a second handler.
        """
        try:
            kind = check_name("kind", kind)
        except InvalidNameError as error:
            raise HandlerRegistrationError(str(error)) from None
        what = f"chunks of kind {kind!r}"
        if kind in self._handlers:
            raise HandlerRegistrationError(f"{what} have a handler already: {name_of(self._handlers[kind].function)}")
        if not check_function(what, function, "the chunk's context"):
            raise HandlerRegistrationError(
                f"the handler of {what} must be `async def`: {name_of(function)}. "
                "What blocks goes into a thread: `await anyio.to_thread.run_sync(…)`"
            )
        self._handlers[kind] = ChunkHandler(
            kind, function, check_timeout(what, timeout), check_concurrency(what, concurrency)
        )
        return function

    def find(self, kind: str) -> ChunkHandler | None:
        """Return the handler for a kind."""
        return self._handlers.get(kind)

    @property
    def handlers(self) -> list[ChunkHandler]:
        """All of them, in the order of their registration."""
        return list(self._handlers.values())

    @property
    def kinds(self) -> list[str]:
        """The kinds that have a handler."""
        return sorted(self._handlers)

    @property
    def is_empty(self) -> bool:
        return not self._handlers
