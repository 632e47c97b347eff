"""Space this process's tries to connect while nobody takes a connection: one place for all that ask the same DSN.

Whoever wants a connection asks here first. While all is well that costs nothing and everybody connects at once, beside
each other. A failed try, or a connection that was lost, *holds* the others back:

    open  -> held     a try failed, or was silent for a second; or a connection that stood was lost
    held  -> held     one try at a time, the first at once, then after growing pauses with full jitter
    held  -> open     a try succeeded and its connection has answered a statement: everybody goes on at once

So the tries of a process are as many as this one place makes, whether one caller waits or a thousand. Who comes in a
pause waits for the next try and is told how *that* ended: nobody who has time hears of a failure that is older than the
question. Who has no time is told of it at once. So is everybody of a refused login: waiting does not mend it, and each
try of it may count against the login.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import anyio

from dispatch_core.backoff import full_jitter
from dispatch_core.hosts import hosts_of

__all__ = ["CAP_SECONDS", "REFUSED_CAP_SECONDS", "SILENT_SECONDS", "Pace", "pace_of"]

Opened = TypeVar("Opened")
Carry: TypeAlias = Callable[[Coroutine[Any, Any, Opened | None]], Awaitable[Opened | None]]

BASE_SECONDS: Final = 0.1
CAP_SECONDS: Final = 1.0
"""The longest pause between two tries of one host, so the most that a call is later than the server is back."""

REFUSED_CAP_SECONDS: Final = 15.0
"""The same after a refused login."""

SILENT_SECONDS: Final = 1.0
"""Who gives a try or a statement up after so long tells something of the server; before, only of his own haste."""


class Pace:
    """The tries to connect of all in this process that use one DSN."""

    def __init__(self, base: float = BASE_SECONDS, cap: float = CAP_SECONDS, *, silence_counts: bool = True) -> None:
        """Take seconds. `silence_counts`: a try that is given up without an answer is a failed one."""
        self._base = base
        self._cap = cap
        self._silence_counts = silence_counts
        self.failures = 0
        """How many tries have failed since the last success; of several beside each other one counts."""
        self.tries = 0
        """How many there were in all."""
        self.last_error: Exception | None = None
        """Why the last one failed; None after a success."""
        self.must_write = False
        """Whether the last server was left because it takes no writes: then the next one is asked for that."""
        self._is_suspect = False
        self._is_refused = False
        self._not_before = 0.0
        self._trying = False
        # When the last failure was noted, and when the try began that it was of.
        self._failed_at = self._failed_since = -math.inf
        self._silent: object = None
        """The try whose silence was the last failure."""
        self._changed = anyio.Event()
        self._opened = anyio.Event()

    @property
    def is_held(self) -> bool:
        """Whether tries are made one at a time."""
        return self.failures > 0 or self._is_suspect

    def suspect(self, *, must_write: bool = False) -> None:
        """Have the next connection prove itself before others follow: one that stood was lost."""
        self._is_suspect = True
        self.must_write = self.must_write or must_write

    def pause_seconds(self) -> float:
        """Return how long nobody will try: what is left of the pause, at least a moment where somebody tries now."""
        left = self._not_before - time.monotonic()
        return max(left, self._base if self._trying else 0.0)

    async def until_open(self) -> None:
        """Wait until a try succeeds that ends a hold; for ever where nothing is held and all goes well."""
        await self._opened.wait()

    async def run(
        self,
        attempt: Callable[[bool], Awaitable[Opened]],
        *,
        until: float,
        again: Callable[[Exception], Exception],
        refuses: Callable[[Exception], bool],
        carry: Carry[Opened] | None = None,
    ) -> Opened:
        """Call `attempt(proves)` when it is its turn; `proves`: its connection must answer a statement to count.

        `until`: the caller's deadline, a monotonic time; who would spend half of what he has left on waiting for the
        next try is told at once how the last one ended. `again(error)` makes the error for one more caller of those
        who waited for the same try; `refuses(error)` tells that it is the login which was refused. `carry` awaits a
        try, perhaps in another task.

        Raises: what `attempt` does, or did when somebody else's turn came first.
        """
        came = time.monotonic()
        while True:
            if self.is_held:
                now = time.monotonic()
                waits = now < self._not_before
                in_vain = waits and (self._is_refused or self._not_before - now > (until - now) / 2)
                if self.last_error is not None and (in_vain or self._failed_since >= came):
                    raise again(self.last_error)
                if self._trying or waits:
                    with anyio.move_on_after(math.inf if self._trying else self._not_before - now):
                        await self._changed.wait()
                    continue
            trying = self._try(attempt, again, refuses)
            opened = await (trying if carry is None else carry(trying))
            if opened is not None:
                return opened

    async def _try(
        self,
        attempt: Callable[[bool], Awaitable[Opened]],
        again: Callable[[Exception], Exception],
        refuses: Callable[[Exception], bool],
    ) -> Opened | None:
        """Make one try; None where it is not its turn any more."""
        began = time.monotonic()
        proves = self.is_held
        if proves and (self._trying or began < self._not_before):
            return None  # another task has begun one since this one was made
        self.tries += 1
        self._trying = self._trying or proves
        this = object()
        silence = None
        if self._silence_counts:
            silence = asyncio.get_running_loop().call_later(SILENT_SECONDS, self._note_silence, this, began)
        try:
            opened = await attempt(proves)
        except Exception as error:
            was_silent = self._silent is this
            if began >= self._failed_at or was_silent:  # else it is one of several beside each other
                self.last_error = again(error)  # without the frames that the first one holds on to
                self._failed_since = began
                self._is_refused = refuses(error)
                self._fail(is_counted=was_silent)
            raise
        except BaseException:
            # Given up by its caller. Those who wait are told nothing by it, and one of them is next.
            if self._silent is this:
                self._fail(is_counted=True)
            elif self._silence_counts and proves and began >= self._failed_at:
                # Callers in haste shall neither make a loop of tries nor have the pauses grow.
                self._not_before = max(self._not_before, began + SILENT_SECONDS / 2)
            raise
        finally:
            if silence is not None:
                silence.cancel()
            if proves:
                self._trying = False
                self._tell()
        # Without a proof it began before anybody was held back; by its own silence at the most.
        if proves or (self._silent is this and not self._is_suspect):
            self._succeed()
        return opened

    def _note_silence(self, this: object, began: float) -> None:
        # It goes on; only the others are to know, and those who look at `failures`.
        if began >= self._failed_at:
            self.failures += 1
            self._failed_at = time.monotonic()
            self._silent = this
            if self._is_refused:
                # It has got further than the one before it, which the login's refusal has ended, or not so far.
                self._is_refused = False
                self.last_error = TimeoutError("a try to connect has no answer yet")
            self._tell()

    def _fail(self, *, is_counted: bool) -> None:
        self.failures += not is_counted
        self._silent = None
        cap = REFUSED_CAP_SECONDS if self._is_refused else self._cap
        # The first is followed by another at once: mostly it is one connection that was lost and no server.
        pause = full_jitter(self.failures - 1, self._base, cap) if self.failures > 1 else 0.0
        self._failed_at = time.monotonic()
        self._not_before = self._failed_at + pause
        self._tell()

    def _succeed(self) -> None:
        self.failures, self.last_error, self._silent = 0, None, None
        self._is_suspect = self._is_refused = self.must_write = False
        self._tell()
        opened, self._opened = self._opened, anyio.Event()
        opened.set()

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


_paces: Final[WeakValueDictionary[tuple[object, str], Pace]] = WeakValueDictionary()


def pace_of(dsn: str) -> Pace:
    """Return the one that all share who use this DSN in this event loop, as long as somebody keeps it."""
    key = (asyncio.get_running_loop(), dsn)
    pace = _paces.get(key)
    if pace is None:
        # Each try asks every host, so there are fewer of them the more hosts there are.
        _paces[key] = pace = Pace(cap=CAP_SECONDS * max(1.0, len(hosts_of(dsn)) * 0.75))
    return pace
