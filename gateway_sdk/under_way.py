"""Calls that a client's end waits for, and then cuts off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias
from uuid import UUID

import anyio

from dispatch_core.errors import ClientClosedError, DatabaseError

__all__ = ["Closed", "UnderWay"]

Closed: TypeAlias = Callable[[UUID | None], ClientClosedError]
"""Makes the error of a call that the end of the client has cut off."""

_CUT_SECONDS: Final = 2.0
"""For calls that were cut off to be over: their connections are put away, shielded."""


class UnderWay:
    """What is called, and may still be under way when the client ends."""

    def __init__(self) -> None:
        self._closed: Closed | None = None
        self._standing: set[anyio.CancelScope] = set()
        self._short: set[anyio.CancelScope] = set()
        self._idle = anyio.Event()

    def check_open(self, job_id: UUID | None = None) -> None:
        """Raise ClientClosedError where the client is closed, or has failed."""
        if self._closed is not None:
            raise self._closed(job_id)

    @contextmanager
    def under_way(self, job_id: UUID | None = None, *, stands: bool = False) -> Iterator[None]:
        """Stand around a call: when the client ends, it ends with ClientClosedError.

        At once where it `stands`, because it may last for ever; else it has the time in which the client closes.
        """
        self.check_open(job_id)
        scopes = self._standing if stands else self._short
        with anyio.CancelScope() as scope:
            scopes.add(scope)
            try:
                yield
            except DatabaseError as error:
                if self._closed is None:
                    raise
                raise self._closed(job_id) from error
            finally:
                scopes.discard(scope)
                if not (self._short or self._standing):
                    self._idle.set()
        if scope.cancelled_caught and self._closed is not None:
            raise self._closed(job_id)

    def close(self, reason: Closed) -> None:
        """Take no more calls, and end those that stand."""
        if self._closed is None:
            self._closed = reason
        for scope in list(self._standing):
            scope.cancel()

    def cut(self) -> None:
        """End all calls now."""
        for scope in [*self._standing, *self._short]:
            scope.cancel()

    async def drain(self) -> None:
        """Wait until no call is under way; when that is cancelled, cut off those that are, and wait for that."""
        try:
            await self._wait_idle()
        finally:
            self.cut()
            with anyio.move_on_after(_CUT_SECONDS, shield=True):
                await self._wait_idle()

    async def _wait_idle(self) -> None:
        while self._short or self._standing:
            self._idle = anyio.Event()
            await self._idle.wait()
