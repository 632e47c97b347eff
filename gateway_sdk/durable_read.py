"""What a caller iterates: how far a job is, and its timeline, event by event, until the job has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

from dispatch_core.durable_models import DurableJob, EventPage, JobEvent, JobProgress
from dispatch_core.errors import DatabaseError
from gateway_sdk.durable_watch import Watcher

__all__ = ["JobEvents", "JobWatch", "is_within"]


class Follower:
    """What an iterator is that waits for news of one job: it registers when it is first asked, and ends once.

    Left early, it ends by `aclose`, or when nobody holds it any more.
    """

    __slots__ = ("_is_over", "_join", "_loop", "_watcher")

    def __init__(self, join: Callable[[], Watcher] | None) -> None:
        self._join = join
        self._watcher: Watcher | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_over = False

    async def _news(self) -> DurableJob:
        """Return what is new. Raises: as `Watcher.next`."""
        if self._watcher is None:
            assert self._join is not None
            self._loop = asyncio.get_running_loop()
            self._watcher = self._join()
        return await self._watcher.next()

    def _end(self) -> None:
        self._is_over = True
        if self._watcher is not None:
            self._watcher.close()

    async def aclose(self) -> None:
        """End it. Idempotent: yes."""
        self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def __del__(self) -> None:
        if self._watcher is not None and self._loop is not None and not self._is_over:
            # Not at once: the collector may run anywhere, and in any thread.
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._watcher.close)


class JobWatch(Follower):
    """An async iterator of how far a job is: first where it stands, then whenever that has changed, last its end.

    Who is slow is given the newest and not what came in between. An outage of the database is waited out, but for the
    very first. One task may iterate it.
    """

    __slots__ = ("_last",)

    def __init__(self, join: Callable[[], Watcher]) -> None:
        super().__init__(join)
        self._last: JobProgress | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JobProgress:
        """Return the next progress.

        Raises: UnknownJobError, ClientClosedError; DatabaseUnavailableError before the first.
        """
        if self._is_over:
            raise StopAsyncIteration
        while True:
            try:
                progress = (await self._news()).progress
            except Exception:
                self._end()
                raise
            if progress.status.is_terminal:
                self._end()
            elif progress == self._last:
                continue
            self._last = progress
            return progress


class JobEvents(Follower):
    """An async iterator of events in their order; none is ever skipped, whenever its transaction commits.

    Following, it waits for more, and ends when the job has, behind the event of its end; an outage of the database is
    waited out, but for the very first. `cursor` is where to go on, in another process too: behind the last event that
    was handed out. One task may iterate it.
    """

    __slots__ = ("_after", "_events", "_has_ended", "_is_due", "_limit", "_next", "_read", "cursor")

    def __init__(
        self,
        read: Callable[[str | None, int], Awaitable[EventPage]],
        after: str | None,
        limit: int,
        join: Callable[[], Watcher] | None,
    ) -> None:
        """`read` returns the page behind a cursor; `join` registers who follows."""
        super().__init__(join)
        self.cursor: str | None = after
        self._read = read
        self._limit = limit
        self._after = after
        self._next = after
        """Behind the page that is handed out, which began at `_after`."""
        self._events: deque[JobEvent] = deque()
        self._has_ended = False
        self._is_due = join is None
        """There may be something behind that page by now."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JobEvent:
        """Return the next event.

        Raises: UnknownJobError where it follows; ClientClosedError; DatabaseUnavailableError, where it follows only
        before the first.
        """
        while not self._events:
            if self._is_over:
                raise StopAsyncIteration
            try:
                await self._read_on()
            except Exception:
                self._end()
                raise
        event = self._events.popleft()
        assert self._next is not None
        self.cursor = _behind(event, self._after, self._next) if self._events else self._next
        return event

    async def _read_on(self) -> None:
        """Read one page, or wait until there may be one, or end."""
        if self._is_due:
            try:
                page = await self._read(self._next, self._limit)
            except DatabaseError as error:
                if self._join is None or not error.retryable:
                    raise
                # News come when the database is there again.
                self._has_ended = (await self._news()).status.is_terminal
                return
            self._after, self._next = self._next, page.next
            self._events.extend(page.events)
            if not page.events:
                self.cursor = page.next
            self._is_due = len(page.events) >= self._limit or is_within(self._after)
        elif self._join is None or self._has_ended:
            self._end()
        else:
            # Before the page is read: so what tells of the end is in it.
            self._has_ended = (await self._news()).status.is_terminal
            self._is_due = True


def is_within(cursor: str | None) -> bool:
    """Tell whether a cursor stands within a page: behind it is the rest of that page, and not what came later."""
    return cursor is not None and ";" in cursor


def _behind(event: JobEvent, after: str | None, upper: str) -> str:
    """Return the cursor behind one event of a page that began at `after` and ends at `upper`.

    It is made as `relay.durable_events` makes that of a full page: the snapshot up to which all has been read, the one
    that the page is of, and the event's place.
    """
    base = "" if after is None else after.partition(";")[0]
    whole = upper.split(";")[1] if ";" in upper else upper
    return f"{base};{whole};{event.xid};{event.n}"
