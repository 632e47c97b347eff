"""Decide for which tenants the next claim asks, and learn from its answer. No statement and no clock is in here.

A tenant is *rung* when there is a reason to look: a notification, a poll, a delayed job that is due. A tenant whose
last claim came back full *has a backlog*, and one that a claim had no room for may have: these take turns from claim to
claim, since each tenant costs a turn inside the claim and some of them fill it.

    nobody has a backlog     one claim for everybody who was rung
    somebody has             who was rung and has none comes first: a claim of their own, small and so quickly answered;
                             and where such a claim is under way already, first in line in the next claim of the others

So a lone job beside a backlog is in the next claim that is sent, however many tenants the backlog has.

A ring that comes while a claim for its tenant is under way counts for the claim after that, for which it is too early
to see what was rung for. Two claims for one tenant may be under way, and the server may come to them in another order
than they were sent in, and answer them in a third. So a short answer ends a backlog whatever full ones come before or
after it, unless a claim was sent since that had been rung for: what it has not seen is in the hands of the others, or
was not there yet and is rung for. A full answer that is taken for old news for this is followed by a claim from zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from dispatch_core.cursor import ClaimCursor
from dispatch_core.models import ClaimedJobs

__all__ = ["Reason", "Turn", "Turns"]

Reason: TypeAlias = Literal["notify", "timer", "poll", "more"]
"""`more`: an answer left something to ask for."""

_REASONS: Final[tuple[Reason, ...]] = ("more", "notify", "timer", "poll")
"""Which one a claim has that has several."""

_ROUND_TRIP: Final = 0.002
"""Seconds of a claim that are not its search: how many is a matter of the way to the server and of this process."""

_SHARE: Final = 16
"""Jobs for each tenant in a claim, where many have a backlog; and tenants that share even a small claim."""


@dataclass(slots=True, eq=False)
class Turn:
    """For whom one claim asks, in this order, and for how many jobs at most."""

    tenants: list[str]
    limit: int
    rung: dict[str, Reason] = field(default_factory=dict)
    """Those of them that were rung."""
    reason: Reason = "poll"
    is_express: bool = False
    """Whether it is for tenants alone that were rung beside a backlog."""
    positions: list[int] = field(default_factory=list)
    """Their cursors, as they are sent."""
    overtaken: set[str] = field(default_factory=set)
    """Tenants of whom an answer to another claim has said meanwhile that nothing is left."""


class Turns:
    """The tenants of a relay. Times are of the monotonic clock."""

    def __init__(self, tenants: Sequence[str]) -> None:
        self.cursors: Final = {tenant: ClaimCursor() for tenant in tenants}
        # Rung, and not known to have a backlog; in the order in which they were.
        self._rung: dict[str, Reason] = {}
        # Those with a backlog. Their rings are kept apart; the next claim for them is under way soon enough.
        self._full: dict[str, None] = {}
        self._rung_too: dict[str, Reason] = {}
        # When the last claim was sent for a tenant that had been rung.
        self._heard_at: dict[str, float] = {}
        # Who takes turns: these, also while a claim for them is under way, and those that a claim has not come to.
        self._more: dict[str, None] = {}
        self._under_way: list[Turn] = []
        # When a tenant is to be rung because a job is due; and for whom a claim from zero is owed and not allowed yet.
        self._due: dict[str, float] = {}
        self._owing: dict[str, None] = {}
        self.next_due = math.inf
        """When the next of them is to be rung that is not rung yet."""
        # Asked for alone, because a claim for several of them was denied, and so could be any of them; and those that
        # are denied, which are not asked for before the next poll.
        self._alone: set[str] = set()
        self._denied: set[str] = set()

    # --- rings ---

    def ring(self, tenant: str, reason: Reason) -> None:
        """Note a reason to claim for `tenant`. Idempotent: yes; a notification goes before what was there."""
        rung = self._rung_too if tenant in self._full else self._rung
        if reason == "notify" or tenant not in rung:
            rung[tenant] = reason

    def ring_all(self, reason: Reason) -> None:
        """Note a reason to claim for every tenant."""
        for tenant in self.cursors:
            self.ring(tenant, reason)

    def ring_at(self, tenant: str, when: float) -> bool:
        """Have a tenant rung at that time, if it is not to be earlier; return whether `next_due` is earlier now."""
        if when < self._due.get(tenant, math.inf):
            self._due[tenant] = when
            return self._look_at(when)
        return False

    def _look_at(self, when: float) -> bool:
        if when >= self.next_due:
            return False
        self.next_due = when
        return True

    def ring_what_is_due(self, now: float) -> None:
        """Ring those whose time has come. What has become due may lie below the cursor."""
        if now < self.next_due:
            return
        for tenant in [tenant for tenant, when in self._due.items() if when <= now]:
            del self._due[tenant]
            self.cursors[tenant].owed = True
            self.ring(tenant, "timer")
        for tenant in list(self._owing):
            cursor = self.cursors[tenant]
            if cursor.owed and now < cursor.zero_allowed_at:
                continue  # not yet, after all: there was another claim from zero
            del self._owing[tenant]
            if cursor.owed:
                self.ring(tenant, "timer")
        allowed = [self.cursors[tenant].zero_allowed_at for tenant in self._owing]
        self.next_due = min((*self._due.values(), *allowed), default=math.inf)

    @property
    def is_quiet(self) -> bool:
        """Whether there is no reason to claim for anybody."""
        return not (self._rung or self._more or self._rung_too)

    @property
    def has_backlog(self) -> bool:
        """Whether a claim may be made beside another: there is a tenant with a backlog."""
        return bool(self._full)

    # --- the next claim ---

    def take(self, room: int, now: float) -> Turn | None:
        """Return whom the next claim is for, `room` jobs at most, where a claim need not wait for one under way.

        Beside others there is one claim at a time for tenants that were rung, and two for those with a backlog
        (`take_beside`).
        """
        self._forget_denied()
        if alone := self._to_be_asked_alone():
            return self._taken([alone], room, now)
        if self._full:
            return self._express(room, now) or self._shared(room, now)
        rung = list(self._rung)
        tenants = rung + self._in_turn(room, rung)
        return self._taken(tenants, room, now) if tenants else None

    def take_beside(self, room: int, least: int, now: float) -> Turn | None:
        """Return whom a claim is for that is made while others are under way; None where there is to be none.

        `least`: how much room there must be for those with a backlog: beside others they are in no hurry.
        """
        self._forget_denied()
        if not self._full or self._to_be_asked_alone():
            return None
        express = any(turn.is_express for turn in self._under_way)
        if not express and (turn := self._express(room, now)):
            return turn
        others = len(self._under_way) - express
        if others > 1 or room < least or self._full.keys().isdisjoint(self._more):
            return None
        return self._shared(room, now)

    def _express(self, room: int, now: float) -> Turn | None:
        rung = self._rung_and_not_asked_for()
        # Who has more than a share of jobs has a backlog like the others.
        return self._taken(rung, min(room, _SHARE * len(rung)), now, is_express=True) if rung else None

    def _shared(self, room: int, now: float) -> Turn | None:
        rung = self._rung_and_not_asked_for()[:_SHARE]
        tenants = rung + self._in_turn(room, rung)
        return self._taken(tenants, room, now) if tenants else None

    def _rung_and_not_asked_for(self) -> list[str]:
        if not self._rung:
            return []
        if not self._under_way:
            return list(self._rung)
        asked = {tenant for turn in self._under_way for tenant in turn.tenants}
        return [tenant for tenant in self._rung if tenant not in asked]

    def _in_turn(self, room: int, before: Sequence[str]) -> list[str]:
        """Return those whose turn it is, fewer where others are `before` them."""
        count = max(room // _SHARE, _SHARE) - len(before)
        if count <= 0:
            return []
        # Beside another claim only those with a backlog: of the others that one may have what there is.
        turns = [tenant for tenant in self._more if tenant in self._full] if self._under_way else list(self._more)
        return [tenant for tenant in turns[: count + len(before)] if tenant not in before][:count]

    def _taken(self, tenants: list[str], limit: int, now: float, *, is_express: bool = False) -> Turn:
        turn = Turn(tenants, limit, is_express=is_express)
        reasons: set[Reason] = set()
        for tenant in tenants:
            reason = self._rung.pop(tenant, None)
            if reason is not None:
                turn.rung[tenant] = reason
            reasons.add(reason or "more")
            if self._rung_too.pop(tenant, None) or reason:
                self._heard_at[tenant] = now
            self._more.pop(tenant, None)
        if len(tenants) <= limit:
            # Behind the others, for the next claim, which need not wait for this one's answer. Not where the claim may
            # leave tenants out: those come first then.
            self._more.update((tenant, None) for tenant in tenants if tenant in self._full)
        turn.reason = next(each for each in _REASONS if each in reasons)
        turn.positions = [self.cursors[tenant].position(now) for tenant in tenants]
        self._under_way.append(turn)
        return turn

    # --- its end ---

    def answered(self, turn: Turn, claimed: ClaimedJobs, sent_at: float, now: float) -> None:
        """Learn from an answer who has a backlog, and who is to be asked for again."""
        self._under_way.remove(turn)
        self._alone.difference_update(turn.tenants)
        # Who waited for his turn knows nothing of how long it takes to look.
        seconds = max(now - sent_at - claimed.waited_seconds - _ROUND_TRIP, 0.0) / len(turn.tenants)
        more, unseen = what_is_left(claimed, turn.tenants, turn.limit)
        for tenant, position in zip(turn.tenants, turn.positions, strict=True):
            cursor = self.cursors[tenant]
            if tenant in unseen:
                cursor.unanswered(position)  # what it owes from zero it still does
                continue
            full = tenant in more
            cursor.answered(position, claimed.cursors.get(tenant), full, seconds, now)
            if not full and sent_at >= self._heard_at.get(tenant, 0.0):
                self._end_backlog(tenant)
            elif full and tenant not in turn.overtaken:
                self._note_backlog(tenant)
                continue
            elif full:
                more.remove(tenant)
                cursor.owed = True
            if cursor.owed:
                self._ring_from_zero(tenant, cursor, now)
        # Where there is something, in front of all who were rung since.
        first = {tenant: turn.rung[tenant] for tenant in unseen if turn.rung.get(tenant) in ("notify", "timer")}
        if first:
            self._rung = first | self._rung
        for tenant in (*unseen, *more):
            if tenant not in first:
                self._more.setdefault(tenant)

    def failed(self, turn: Turn) -> None:
        """Ask again for those of a claim without an answer, and forget who had a backlog."""
        self._ended(turn)
        self._forget_backlogs(list(self._full))
        for tenant in turn.tenants:
            self.ring(tenant, turn.rung.get(tenant, "poll"))

    def denied(self, turn: Turn) -> str | None:
        """Learn that a claim was denied; return the tenant that is, or None where several were asked for.

        One tenant that was taken from the login must not stop the others, so it is looked for by claims for one at a
        time. It is asked for again with the next poll, and alone until it is allowed.
        """
        self._alone.update(turn.tenants)
        if len(turn.tenants) == 1:
            self._ended(turn)
            self._forget_backlogs(list(self._full))
            self._denied.add(turn.tenants[0])
            return turn.tenants[0]
        self.failed(turn)
        return None

    def allow_all(self) -> None:
        """Ask for those too that were denied."""
        self._denied.clear()

    def _ended(self, turn: Turn) -> None:
        self._under_way.remove(turn)
        for tenant, position in zip(turn.tenants, turn.positions, strict=True):
            self.cursors[tenant].unanswered(position)

    def _end_backlog(self, tenant: str) -> None:
        for turn in self._under_way:
            turn.overtaken.add(tenant)
        if tenant in self._full:
            self._more.pop(tenant, None)
            self._forget_backlogs([tenant])

    def _note_backlog(self, tenant: str) -> None:
        self._full[tenant] = None
        if tenant in self._rung:
            self._rung_too[tenant] = self._rung.pop(tenant)

    def _forget_backlogs(self, tenants: Iterable[str]) -> None:
        for tenant in tenants:
            del self._full[tenant]
            if tenant in self._rung_too:
                self._rung[tenant] = self._rung_too.pop(tenant)

    def _forget_denied(self) -> None:
        for tenant in self._denied:
            self._rung.pop(tenant, None)
            self._rung_too.pop(tenant, None)
            self._more.pop(tenant, None)

    def _to_be_asked_alone(self) -> str | None:
        if not self._alone:
            return None
        return next((tenant for tenant in (*self._rung, *self._more) if tenant in self._alone), None)

    def _ring_from_zero(self, tenant: str, cursor: ClaimCursor, now: float) -> None:
        if now >= cursor.zero_allowed_at:
            self._more.setdefault(tenant)
            return
        self._owing[tenant] = None
        self._look_at(cursor.zero_allowed_at)
        if tenant not in self._full:
            self._more.pop(tenant, None)  # until then a claim would be above the cursor, which is no use


def what_is_left(claimed: ClaimedJobs, tenants: list[str], limit: int) -> tuple[list[str], list[str]]:
    """Return the tenants that may have more, those that got least first; and those the claim did not come to.

    It goes round once, with an equal share for each, and gives what is left over to those that used up theirs.
    """
    if claimed.looked_at < limit:
        return [], []
    counts = claimed.counts
    share = max(1, limit // len(tenants))
    unseen: list[str] = []
    # Somebody with more than a share was given what was left over when the claim had been to everybody.
    if limit < len(tenants) and max(counts.values()) <= share:
        last = max(n for n, tenant in enumerate(tenants) if tenant in counts)
        tenants, unseen = tenants[: last + 1], tenants[last + 1 :]
    more = [tenant for tenant in tenants if counts.get(tenant, 0) >= share]
    more.sort(key=lambda tenant: counts[tenant])
    return more, unseen
