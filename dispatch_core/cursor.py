"""Decide where a claim begins to look: at zero, or above what it has seen.

An old transaction anywhere keeps dead queue rows alive, and every claim from zero wades through them. So while there
is a backlog, a claim passes a cursor that trails the last claim: by two seconds of `seq`, or by half a second of
claiming where that is less (a bulk load puts 100,000 jobs into a tenth of a second of `seq`). The cursor is a hint:
rows that commit late, are released or become due lie below it. Therefore

* a claim above the cursor that comes back short is followed by one from zero;
* while claims come back full, there is one from zero at least once a second;
* the second claim of a backlog is from zero as well, where the first took next to no time: so a burst that has exactly
  filled all slots is over after one more claim, and not after one above the cursor and one from zero;
* none of these where claims from zero are so slow that they would take more than a twentieth of the time; but for one
  in ten seconds, so that a process that stood still, and took the time for the database's, does not leave what has come
  back for minutes. (What one takes is the caller's to say: a relay leaves out the way there and back.)

Two claims may be under way at once, and be answered in another order.

While nothing is known to be slow, an idle relay's claims are from zero at once: one statement instead of two.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ClaimCursor", "pause_after"]

_TRAIL: Final = 2_000_000
"""In units of seq, which are microseconds."""

_TRAIL_SECONDS: Final = 0.5
"""Of claiming."""

_EVERY_SECONDS: Final = 1.0

_CHEAP_SECONDS: Final = 0.005

_PAUSE: Final = 19.0
"""Times the duration of a claim from zero until there may be another: then they take a twentieth of the time."""

_LONGEST_PAUSE_SECONDS: Final = 10.0


def pause_after(seconds: float, times: float) -> float:
    """Return how many seconds to leave out a look that took `seconds`: so many times that, but ten seconds at most."""
    return min(seconds * times, _LONGEST_PAUSE_SECONDS)


class ClaimCursor:
    """The cursor of one tenant. Times are of the monotonic clock."""

    __slots__ = (
        "_again", "_backlog", "_mark", "_marked_at", "_seq", "_trail_seconds", "_zero_at", "owed", "zero_allowed_at",
    )  # fmt: skip

    def __init__(self, trail_seconds: float = _TRAIL_SECONDS) -> None:
        """Trail by so many seconds of claiming at most."""
        self._trail_seconds = trail_seconds
        self._seq = 0
        # The highest seq claimed at that time: the cursor gets there when it is old enough.
        self._mark = 0
        self._marked_at = 0.0
        self._backlog = False
        self._again = False
        self._zero_at = 0.0
        self.owed = False
        """Something may lie below the cursor: the next claim that is allowed to begin at zero does."""
        self.zero_allowed_at = 0.0

    def position(self, now: float) -> int:
        """Return the cursor for a claim that is made now; 0 is from zero."""
        if now < self.zero_allowed_at and not self._again:
            return self._seq
        if self._again or self.owed or not self._backlog or now >= self._zero_at + _EVERY_SECONDS:
            # As it is sent, and not when it is answered: what is owed meanwhile it may not have seen any more.
            self._again = self.owed = False
            self._zero_at = now
            return 0
        return self._seq

    def unanswered(self, position: int) -> None:
        """Note that the claim from there has failed."""
        if position == 0:
            self.owed = True

    def answered(self, position: int, highest_seq: int | None, full: bool, seconds: float, now: float) -> None:
        """Note what a claim found: `full` where there may be more, `seconds` is what it took for this tenant."""
        self._again = full and position == 0 and not self._backlog and seconds <= _CHEAP_SECONDS
        self._backlog = full
        if position == 0:
            self._zero_at = now
            self.zero_allowed_at = now + pause_after(seconds, _PAUSE)
            # Not the larger of both: a full claim from zero that ends below the cursor has found more rows down there.
            if highest_seq is not None:
                if highest_seq < self._seq:
                    self._mark = 0
                self._seq = max(highest_seq - _TRAIL, 0)
                self._follow(highest_seq, now)
            return
        # One that was sent before a claim from zero moved the cursor back does not move it on again.
        if highest_seq is not None and position <= self._seq:
            self._seq = max(self._seq, highest_seq - _TRAIL)
            self._follow(highest_seq, now)
        if not full:
            self.owed = True

    def _follow(self, highest_seq: int, now: float) -> None:
        if now >= self._marked_at + self._trail_seconds:
            self._seq = max(self._seq, self._mark)
            self._mark, self._marked_at = highest_seq, now
