"""Decide whether a statement that is alone rings inside its own transaction, which saves the doorbell's round trip.

A commit that carries NOTIFY holds a lock of the whole database until its WAL is flushed, so as a rule nothing rings in
the transaction that it tells of (D14, `doorbell`). Where a flush takes a fraction of a millisecond, that lock costs a
lone statement nothing, and the doorbell's round trip is a large part of what an idle system takes to answer. Where a
flush is slow, or many ring at once, a ring inside makes every other commit with a ring wait.

How dear it is shows in the time of the lone statements themselves, those that rang and those that did not: what they
take beyond a bare round trip is execution, the wait for the lock, and the flush.

    unknown       nothing was measured yet                              not inside: the first one is only timed
    cheap         most of the last three: below 2.5 ms beyond it        inside
    dear          most of them: above it                                not inside, until they are cheap again
    backing off   of the last eight that rang inside three were dear    not inside for 0.25 s, then 0.5, 1, … 64 s

One that took long says little, and two say little more: a checkpoint, a processor that slept, a disk with something
else to do. An idle server's flushes took 5 to 15 ms once or twice in a hundred; where two such in three began a pause
and each further one the next, a relay that was called every 3 ms rang apart for most of its calls, each half a
millisecond longer. (A lone statement took 1.3 ms in the median where each came 50 ms after the one before, and half as
much where they came at once; so the limit is well above that.) Where flushes are slow, or many ring, nearly all are
dear: it takes three rings to find that out, and two once a minute to find that it is still so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["RingInside"]

_DEAR_SECONDS: Final = 0.0025
"""Beyond the round trip. A flush of a disk that is fast takes 0.2 to 0.5 ms, and the verb itself as much; twice that on
an idle machine."""

_LOOKED_AT: Final = 3
"""How many of the last statements say what one takes: the one in the middle (of two, the longer). Not the shortest: a
slow flush lets those pass soon that come shortly before its end."""

_RINGS_LOOKED_AT: Final = 8
_TOLERATED: Final = 2
"""So many dear ones among the last eight rings are nothing; behind a pause, one."""

_FIRST_PAUSE: Final = 0.25
_LAST_PAUSE: Final = 64.0

_FORGIVEN_AFTER: Final = 16
"""Cheap rings since a pause after which the next one is the first one again."""

_FORGET: Final = 1.02
"""By how much the shortest round trip grows at each new one, so that a server that moved away is believed in time."""


class RingInside:
    """Ask `allows` before a lone statement, and tell `took` after it. All times are seconds.

    A statement is alone where nothing else of this process that rings is under way or waits.
    """

    __slots__ = ("_cheap_rings", "_clock", "_last", "_not_before", "_pause", "_rings", "_round_trip")

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: deque[float] = deque(maxlen=_LOOKED_AT)
        # Of the last ones that rang inside, whether each was dear.
        self._rings: deque[bool] = deque(maxlen=_RINGS_LOOKED_AT)
        self._cheap_rings = 0
        self._round_trip: float | None = None
        self._not_before = clock()
        self._pause = _FIRST_PAUSE

    def allows(self) -> bool:
        """Tell whether a statement that is alone now may ring in its own transaction."""
        if not self._last or self._clock() < self._not_before:
            return False
        return sorted(self._last)[len(self._last) // 2] < _DEAR_SECONDS

    def took(self, seconds: float, rang: bool) -> None:
        """Note how long a lone statement took, from being sent to its answer, and whether it rang inside."""
        beyond = seconds - (self._round_trip or 0.0)
        self._last.append(beyond)
        if not rang:
            return
        is_dear = beyond >= _DEAR_SECONDS
        self._rings.append(is_dear)
        if not is_dear:
            self._cheap_rings += 1
            if self._cheap_rings >= _FORGIVEN_AFTER:
                self._pause = _FIRST_PAUSE
            return
        if self._rings.count(True) <= (_TOLERATED if self._pause == _FIRST_PAUSE else _TOLERATED - 1):
            return
        self._rings.clear()
        self._cheap_rings = 0
        self._not_before = self._clock() + self._pause
        self._pause = min(self._pause * 2, _LAST_PAUSE)

    def round_trip(self, seconds: float) -> None:
        """Note how long a statement took that waits for no flush: one that only read. The shortest ones count.

        Without any, the whole of a statement's time counts, and over a slow network nothing rings inside.
        """
        known = self._round_trip
        self._round_trip = seconds if known is None else min(known * _FORGET, seconds)
