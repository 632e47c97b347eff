"""For whom the next claim is, by what was rung and what the answers said: without a database, a clock or a loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dispatch_core.models import ClaimedJobs
from relay_sdk.turns import Turn, Turns, what_is_left

MANY = 25


def answer(**counts: int) -> ClaimedJobs:
    """So many jobs of each tenant."""
    return ClaimedJobs(looked_at=sum(counts.values()), counts=counts, cursors=dict.fromkeys(counts, 5_000_000))


def taken(turn: Turn | None) -> tuple[list[str], int]:
    assert turn is not None
    return turn.tenants, turn.limit


def with_backlog(*tenants: str, others: tuple[str, ...] = ()) -> tuple[Turns, Turn]:
    """Make turns of these, all of which had a full answer, and a claim for them that is under way."""
    turns = Turns([*tenants, *others])
    for tenant in tenants:
        turns.ring(tenant, "notify")
    first = turns.take(100 * len(tenants), 0.0)
    assert first is not None
    turns.answered(first, answer(**dict.fromkeys(tenants, 100)), 0.0, 0.1)
    second = turns.take(100, 0.1)
    assert taken(second) == ([*tenants], 100)
    assert second is not None
    return turns, second


# --- who was rung beside a backlog -----------------------------------------------------------------------------------


def test_who_is_rung_beside_a_backlog_has_the_very_next_claim_to_himself() -> None:
    turns, _ = with_backlog("big", others=("a", "b"))
    turns.ring("b", "notify")
    turns.ring("a", "notify")
    assert taken(turns.take_beside(100, MANY, 0.2)) == (["b", "a"], 32)  # a share for each: the answer is small
    assert taken(turns.take_beside(100, MANY, 0.2)) == (["big"], 100)


def test_who_is_rung_while_such_a_claim_is_under_way_is_first_in_the_next_one() -> None:
    turns, _ = with_backlog("big", others=("a", "b"))
    turns.ring("a", "notify")
    assert taken(turns.take_beside(100, MANY, 0.2)) == (["a"], 16)
    turns.ring("b", "notify")
    turns.ring("a", "notify")  # counts for a claim that is sent after this one's answer
    assert taken(turns.take_beside(60, MANY, 0.2)) == (["b", "big"], 60)
    assert turns.take_beside(60, MANY, 0.2) is None


def test_one_free_slot_is_for_who_was_rung_and_not_for_the_backlog() -> None:
    turns, claim = with_backlog("big", others=("a", "b"))
    for tenant in ("a", "b"):
        turns.ring(tenant, "notify")
    assert taken(turns.take_beside(1, MANY, 0.2)) == (["a", "b"], 1)
    turns.answered(claim, answer(big=100), 0.1, 0.3)
    assert turns.take_beside(1, MANY, 0.3) is None


def test_who_was_rung_and_not_reached_stays_before_the_backlog_and_before_later_rings() -> None:
    turns, claim = with_backlog("big", others=("a", "b", "c"))
    turns.answered(claim, answer(big=100), 0.1, 0.2)
    turns.ring("a", "notify")
    turns.ring("b", "notify")
    express = turns.take(1, 0.2)
    assert express is not None
    turns.ring("c", "notify")
    turns.answered(express, answer(a=1), 0.2, 0.3)
    assert taken(turns.take(2, 0.3)) == (["b", "c"], 2)


def test_polled_tenants_that_a_claim_did_not_reach_take_turns_like_a_backlog() -> None:
    tenants = [f"t{n}" for n in range(40)]
    turns = Turns(tenants)
    turns.ring_all("poll")
    claim = turns.take(10, 0.0)
    assert claim is not None
    turns.answered(claim, answer(**dict.fromkeys(tenants[:10], 1)), 0.0, 0.1)
    turns.ring("t39", "notify")
    assert taken(turns.take(10, 0.1)) == (["t39"], 10)
    assert taken(turns.take_beside(10, 2, 0.1)) == (tenants[:10], 10)  # beside others only those with a backlog


def test_who_has_more_than_his_share_has_a_backlog_like_the_others() -> None:
    turns, _ = with_backlog("big", others=("a",))
    turns.ring("a", "notify")
    express = turns.take_beside(100, MANY, 0.2)
    assert express is not None
    turns.answered(express, answer(a=16), 0.2, 0.3)
    turns.ring("a", "notify")
    assert taken(turns.take_beside(100, MANY, 0.3)) == (["big", "a"], 100)


def test_without_a_backlog_one_claim_is_for_all_and_none_is_beside_it() -> None:
    turns = Turns(["a", "b", "c"])
    turns.ring("b", "notify")
    turns.ring_all("poll")
    claim = turns.take(100, 0.0)
    assert claim is not None
    assert (taken(claim), claim.reason) == ((["b", "a", "c"], 100), "notify")
    turns.ring("a", "notify")
    assert turns.take_beside(100, MANY, 0.0) is None
    turns.answered(claim, answer(b=3), 0.0, 0.1)
    assert taken(turns.take(100, 0.1)) == (["a"], 100)


def test_a_burst_of_rings_is_one_claim_and_one_more_for_what_came_during_it() -> None:
    turns = Turns(["a"])
    for _ in range(10):
        turns.ring("a", "notify")
    claim = turns.take(100, 0.0)
    assert claim is not None
    for _ in range(10):
        turns.ring("a", "notify")
    turns.answered(claim, answer(a=10), 0.0, 0.1)
    last = turns.take(100, 0.1)
    assert last is not None
    turns.answered(last, answer(), 0.1, 0.2)
    assert turns.is_quiet


# --- what answers say ------------------------------------------------------------------------------------------------


def test_a_short_answer_takes_no_backlog_away_where_a_claim_was_sent_since_that_had_been_rung_for() -> None:
    turns, older = with_backlog("big")
    turns.ring("big", "notify")
    newer = turns.take_beside(100, MANY, 0.2)
    assert newer is not None
    turns.answered(newer, answer(big=100), 0.2, 0.3)
    turns.answered(older, answer(), 0.1, 0.4)
    assert turns.has_backlog
    newest = turns.take(100, 0.5)
    assert newest is not None
    turns.answered(newest, answer(big=3), 0.5, 0.6)
    assert not turns.has_backlog


@pytest.mark.parametrize("short_is", ["sent first", "sent last"])
@pytest.mark.parametrize("short_comes", ["first", "last"])
def test_else_a_short_answer_ends_a_backlog_in_whatever_order_claims_are_sent_and_answered(
    short_is: str, short_comes: str
) -> None:
    """The other claim has what it has not seen. A full answer to that one is followed by a claim from zero alone."""
    turns, first = with_backlog("big")
    second = turns.take_beside(100, MANY, 0.2)
    assert second is not None
    short, full = (first, second) if short_is == "sent first" else (second, first)
    sent_at = {id(first): 0.1, id(second): 0.2}
    for turn in (short, full) if short_comes == "first" else (full, short):
        turns.answered(turn, answer(**({} if turn is short else {"big": 100})), sent_at[id(turn)], 0.3)
    assert not turns.has_backlog
    turns.ring_what_is_due(10.0)
    last = turns.take(100, 10.0)
    assert last is not None
    assert last.positions == [0]
    assert turns.take_beside(100, MANY, 10.0) is None
    turns.answered(last, answer(), 10.0, 10.1)
    turns.ring_what_is_due(100.0)
    assert turns.is_quiet


class Orders:
    """All orders of what can happen, one run after another: what is chosen last is chosen otherwise first."""

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []
        self._taken: list[tuple[int, int]] = []

    def choose(self, among: int) -> int:
        """Return which of so many things happens next."""
        depth = len(self._taken)
        which = self._path[depth][0] if depth < len(self._path) else 0
        self._taken.append((which, among))
        return which

    def has_another(self) -> bool:
        """Begin the next run; False where there is none."""
        path, self._taken = self._taken, []
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if path:
            which, among = path.pop()
            path.append((which + 1, among))
        self._path = path
        return bool(path)


@dataclass
class Drain:
    """A backlog drained by claims of which two may be under way; what happens next is said by `choose`."""

    choose: Callable[[int], int]
    seconds: float
    left: int = 300
    claims: int = 0
    now: float = 10.0
    turns: Turns = field(default_factory=lambda: Turns(["a"]))
    sent: list[tuple[Turn, float]] = field(default_factory=list)
    done: list[tuple[Turn, float, int]] = field(default_factory=list)

    def run(self) -> int:
        """Return how many claims it took."""
        self.turns.ring("a", "poll")
        self.send()
        while self.sent or self.done or self.turns.next_due < math.inf:
            self.now += self.seconds
            if not (self.sent or self.done):
                self.now = max(self.now, self.turns.next_due)
            elif (number := self.choose(len(self.sent) + len(self.done))) < len(self.sent):
                self.look(number)
            else:
                self.answer(number - len(self.sent))
            self.send()
        assert self.turns.is_quiet
        assert self.left == 0
        return self.claims

    def send(self) -> None:
        self.turns.ring_what_is_due(self.now)
        while True:
            beside = self.sent or self.done
            turn = self.turns.take_beside(100, MANY, self.now) if beside else self.turns.take(100, self.now)
            if turn is None:
                return
            self.claims += 1
            self.sent.append((turn, self.now))

    def look(self, number: int) -> None:
        """Have the server execute one of those that were sent."""
        turn, sent_at = self.sent.pop(number)
        found = min(self.left, turn.limit)
        self.left -= found
        self.done.append((turn, sent_at, found))

    def answer(self, number: int) -> None:
        turn, sent_at, found = self.done.pop(number)
        self.turns.answered(turn, answer(a=found) if found else answer(), sent_at, self.now)


@pytest.mark.parametrize("seconds", [0.0001, 0.1])
def test_a_backlog_of_three_claims_takes_six_at_most_in_whatever_order_these_are_executed_and_answered(
    seconds: float,
) -> None:
    """Every order there is. Two that find nothing, one beside the other, and one from zero come after the three."""
    orders = Orders()
    counts = [Drain(orders.choose, seconds).run()]
    while orders.has_another():
        counts.append(Drain(orders.choose, seconds).run())
    assert len(counts) > 50
    assert max(counts) <= 6


def test_a_claim_from_zero_that_waits_until_it_is_allowed_is_not_made_where_another_was_from_zero_meanwhile() -> None:
    turns, claim = with_backlog("big")
    turns.answered(claim, answer(), 0.1, 0.2)
    assert turns.is_quiet
    assert 1.0 < turns.next_due < math.inf
    turns.ring("big", "notify")
    rung = turns.take(100, turns.next_due)
    assert rung is not None
    assert rung.positions == [0]
    turns.ring_what_is_due(turns.next_due)
    turns.answered(rung, answer(), turns.next_due, turns.next_due + 0.1)
    assert turns.is_quiet
    assert turns.next_due == math.inf


def test_what_a_round_trip_takes_does_not_put_off_a_claim_from_zero() -> None:
    turns = Turns(["a"])
    for now in (10.0, 10.002, 10.004):
        turns.ring("a", "notify")
        claim = turns.take(100, now)
        assert claim is not None
        assert claim.positions == [0]
        turns.answered(claim, answer(a=1), now, now + 0.0019)
        assert turns.is_quiet
    assert turns.next_due == math.inf


def test_a_ring_during_the_last_claim_of_a_backlog_is_not_swallowed_by_its_short_answer() -> None:
    turns, claim = with_backlog("big")
    turns.ring("big", "notify")
    turns.answered(claim, answer(big=3), 0.1, 0.2)
    following = turns.take(100, 0.2)
    assert following is not None
    assert (following.tenants, following.reason) == (["big"], "notify")
    turns.answered(following, answer(), 0.2, 0.3)
    assert turns.is_quiet


def test_a_catch_up_rings_everybody_also_who_has_a_backlog() -> None:
    turns, claim = with_backlog("big", others=("a",))
    turns.ring_all("poll")
    turns.answered(claim, answer(), 0.1, 0.2)
    assert taken(turns.take(100, 0.2)) == (["a", "big"], 100)


def test_tenants_that_a_claim_did_not_come_to_still_owe_a_claim_from_zero() -> None:
    turns = Turns(["a", "b"])
    turns.ring_all("notify")
    claim = turns.take(1, 0.0)
    assert claim is not None
    turns.answered(claim, answer(a=1), 0.0, 0.1)
    assert turns.cursors["b"].owed


def test_after_a_failure_all_are_asked_for_again_and_nobody_has_a_backlog() -> None:
    turns, claim = with_backlog("big", others=("a",))
    turns.ring("a", "notify")
    turns.failed(claim)
    assert not turns.has_backlog
    assert taken(turns.take(100, 0.3)) == (["a", "big"], 100)


# --- where there are fewer slots than tenants ------------------------------------------------------------------------


def test_the_tenants_behind_the_last_that_got_something_were_not_reached() -> None:
    tenants = ["a", "b", "c", "d"]
    assert what_is_left(answer(a=1, c=1), tenants, 2) == (["a", "c"], ["d"])


def test_nobody_is_asked_twice_where_one_tenant_got_what_all_others_had_left() -> None:
    """The claim had been to everybody then: with 10 slots and 1,000 tenants, 999 idle ones were asked for again."""
    tenants = [f"t{n}" for n in range(1000)]
    assert what_is_left(answer(t3=10), tenants, 10) == (["t3"], [])
    turns = Turns(tenants)
    turns.ring_all("poll")
    claim = turns.take(10, 0.0)
    assert claim is not None
    turns.answered(claim, answer(t3=10), 0.0, 0.1)
    assert taken(turns.take(10, 0.1)) == (["t3"], 10)


# --- who is denied ---------------------------------------------------------------------------------------------------


def claims_until_quiet(turns: Turns, denied: set[str], log: list[list[str]]) -> None:
    while (turn := turns.take(100, 1.0)) is not None:
        log.append(turn.tenants)
        if denied.isdisjoint(turn.tenants):
            turns.answered(turn, answer(), 1.0, 1.1)
        else:
            turns.denied(turn)


def test_a_denied_tenant_costs_a_claim_a_poll_and_the_others_one_together() -> None:
    turns = Turns(["a", "b", "c", "d"])
    denied: set[str] = {"b"}
    log: list[list[str]] = []
    turns.ring_all("poll")
    claims_until_quiet(turns, denied, log)
    assert log == [["a", "b", "c", "d"], ["a"], ["b"], ["c"], ["d"]]
    for _ in range(2):
        log.clear()
        turns.allow_all()
        turns.ring_all("poll")
        turns.ring("b", "notify")
        claims_until_quiet(turns, denied, log)
        assert sorted(log) == [["a", "c", "d"], ["b"]]
        turns.ring("b", "notify")  # not before the next poll
        turns.ring("c", "notify")
        log.clear()
        claims_until_quiet(turns, denied, log)
        assert log == [["c"]]
    denied.clear()
    for expected in ([["a", "c", "d"], ["b"]], [["a", "b", "c", "d"]]):
        log.clear()
        turns.allow_all()
        turns.ring_all("poll")
        claims_until_quiet(turns, denied, log)
        assert sorted(log) == expected


def test_who_is_asked_alone_does_not_wait_behind_an_endless_backlog() -> None:
    turns, claim = with_backlog("big", others=("a", "b"))
    turns.ring_all("poll")
    both = turns.take_beside(100, MANY, 0.2)
    assert taken(both) == (["a", "b"], 32)
    assert both is not None
    turns.denied(both)
    assert turns.take_beside(100, MANY, 0.3) is None
    turns.answered(claim, answer(big=100), 0.1, 0.4)
    assert taken(turns.take(100, 0.4)) == (["a"], 100)


def test_the_wait_for_a_turn_is_not_taken_for_a_slow_look_and_puts_off_no_claim_from_zero() -> None:
    turns = Turns(["a"])
    turns.ring("a", "notify")
    claim = turns.take(100, 10.0)
    assert claim is not None
    turns.answered(claim, ClaimedJobs(waited_seconds=0.8), 10.0, 10.9)
    assert turns.cursors["a"].zero_allowed_at == pytest.approx(10.9 + (0.1 - 0.002) * 19)
