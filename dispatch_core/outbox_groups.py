"""Remember where there is something to claim: which tenants and kinds, in whose turn, and from where on.

A search for groups costs a few index probes a tenant, and a claim from the beginning wades through what an old
transaction keeps alive. So while there is a backlog, groups are kept from claim to claim, each with a cursor
(`cursor.ClaimCursor`, on available_at), and searched for again once a second; less often where a search was dear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from dispatch_core.cursor import ClaimCursor, pause_after
from dispatch_core.outbox_models import ClaimedEvents, DueWork, Group

__all__ = ["Groups", "LaneOf", "Pick", "Round"]

LaneOf: TypeAlias = Callable[[str], object | None]
"""Tells the lane of a kind: something to be compared by identity, or None where it is to be left."""

_SEARCH_SECONDS: Final = 1.0
_PAUSE: Final = 49.0
"""Times the duration of a search until there may be another while there is a backlog: then they take a fiftieth."""

_TRAIL_SECONDS: Final = 0.05
"""Of claiming. Drains are fast: what an old transaction keeps dead of half a second is more than a claim takes.
Events that commit late lie below the cursor the sooner; a claim from the beginning, once a second, finds them."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class Pick:
    """The groups of one claim, and the cursor of each."""

    __slots__ = ("groups", "positions")

    def __init__(self, groups: list[Group], positions: list[int]) -> None:
        self.groups = groups
        self.positions = positions

    @property
    def after(self) -> list[datetime | None]:
        """The cursors, as the claim takes them."""
        return [None if position == 0 else _EPOCH + position * _MICROSECOND for position in self.positions]


class Round:
    """Tells when a search, which goes on part by part, has come to all tenants.

    It goes in the order of code points, as the database does; behind the last tenant comes the first.
    """

    def __init__(self, behind: str | None) -> None:
        """Begin behind a tenant; None: with the first."""
        self._begin = behind or ""
        self._behind = behind
        self._has_begun_anew = False

    def is_over(self, end: str | None) -> bool:
        """Tell it of a part that has ended with that tenant; None: with all."""
        if end is None:
            return True
        begins_anew = self._behind is not None and end <= self._behind
        self._behind = end
        if self._has_begun_anew:
            return begins_anew or end >= self._begin
        self._has_begun_anew = begins_anew
        return begins_anew and end >= self._begin


class Groups:
    """The groups that have something to claim, as far as is known. Times are of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._cursors: dict[Group, ClaimCursor] = {}
        """In the order in which they come into a claim, where not all do."""
        self._led: dict[Group, int] = {}
        """The claim that each group was the first of, or was found after: counted."""
        self._picks = 0
        self._search_at = 0.0
        self._look_at = 0.0
        self._owes_look = False
        """The last search has not looked for lost turns, or not everywhere."""
        self._later_at: float | None = None
        self.start: str | None = None
        self.look_behind: dict[str, str] = {}

    def must_search(self, now: float) -> bool:
        """Tell whether to search for groups before the next claim."""
        return not self._cursors or now >= self._search_at

    def must_look(self, now: float) -> bool:
        """Tell whether a search is to look for lost turns too."""
        return now >= self._look_at

    def found(self, work: DueWork, looked: bool, seconds: float, now: float, *, goes_on: bool = False) -> None:
        """Note what a search found, which took so many seconds; `goes_on`: it began where another ended just now."""
        for group in work.due:
            self._known(group)
        self.start = work.start
        times = [self._later_at] if goes_on and self._later_at is not None else []
        if work.later is not None:
            times.append(now + work.later.total_seconds())
        self._later_at = min(times, default=None)
        self._search_at = now + max(_SEARCH_SECONDS, pause_after(seconds, _PAUSE))
        if looked:
            # Not in place of all: a search that ended early has not come to every tenant.
            self.look_behind = {tenant: key for tenant, key in (self.look_behind | work.look).items() if key}
            self._look_at = now + _SEARCH_SECONDS
        self._owes_look = not looked or bool(self.look_behind)

    def later_in(self, now: float) -> float | None:
        """Return the seconds until the first event is due that was not at the last search; None: there was none.

        Or until a search may look for lost turns, where the last one has left that undone.
        """
        times = [self._later_at] if self._later_at is not None else []
        if self._owes_look:
            times.append(self._look_at)
        return max(min(times) - now, 0.0) if times else None

    def pick(self, limit: int, now: float, lane_of: LaneOf | None = None) -> Pick:
        """Return the groups whose turn it is, for a claim of `limit` events: so few that each gets several.

        With `lane_of` they are of one lane, and none of a kind whose lane is None. The first of a claim gets what the
        others leave, may take a suspect event, and is all there is room for where `limit` is 1: so each leads in turn.
        """
        most = max(16, limit // 16)
        groups = list(self._cursors)[:most] if lane_of is None else self._of_one_lane(lane_of, most)
        for group in groups:
            self._cursors[group] = self._cursors.pop(group)
        groups.sort(key=self._led.__getitem__)
        if groups:
            self._picks += 1
            self._led[groups[0]] = self._picks
        return Pick(groups, [self._cursors[group].position(now) for group in groups])

    def _of_one_lane(self, lane_of: LaneOf, most: int) -> list[Group]:
        groups: list[Group] = []
        lane: object = None
        for group in self._cursors:
            its = lane_of(group[1])
            if its is not None and (lane is None or its is lane):
                lane = its
                groups.append(group)
                if len(groups) == most:
                    break
        return groups

    def claimed(self, pick: Pick, claimed: ClaimedEvents, seconds: float, now: float) -> None:
        """Note what a claim returned; a group in which nothing is left is forgotten."""
        for group, position in zip(pick.groups, pick.positions, strict=True):
            cursor = self._cursors.get(group)
            if cursor is None:
                continue
            last = claimed.last.get(group)
            full = group in claimed.more
            cursor.answered(
                position,
                None if last is None else (last - _EPOCH) // _MICROSECOND,
                full,
                seconds / len(pick.groups),
                now,
            )
            if not full and not cursor.owed:
                del self._cursors[group], self._led[group]

    def unclaimed(self, pick: Pick) -> None:
        """Note that a claim failed."""
        for group, position in zip(pick.groups, pick.positions, strict=True):
            cursor = self._cursors.get(group)
            if cursor is not None:
                cursor.unanswered(position)

    def left_out(self, tenants: Collection[str]) -> None:
        """Forget the groups of tenants that are denied, and search again before the next claim."""
        for group in [group for group in self._cursors if group[0] in tenants]:
            del self._cursors[group], self._led[group]
        self.forget()

    def opened(self, groups: Iterable[Group]) -> None:
        """Note that something can be claimed in these groups, below the cursor where there is one."""
        for group in groups:
            self._known(group).owed = True

    def _known(self, group: Group) -> ClaimCursor:
        """Return the cursor of a group; one that is new comes behind all others."""
        cursor = self._cursors.get(group)
        if cursor is None:
            cursor = self._cursors[group] = ClaimCursor(_TRAIL_SECONDS)
            self._led[group] = self._picks
        return cursor

    def forget(self) -> None:
        """Search again before the next claim."""
        self._search_at = 0.0

    @property
    def known(self) -> Sequence[Group]:
        """The groups that have something to claim, as far as is known."""
        return list(self._cursors)
