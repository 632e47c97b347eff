"""Where a claim begins to look: the rules of the cursor, without a database."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dispatch_core.cursor import ClaimCursor
from dispatch_core.models import ClaimedJobs
from relay_sdk.claimer import _how_many_fit
from relay_sdk.turns import what_is_left

SECOND = 1_000_000  # of seq
SLOW = 0.0052  # for a claim from zero to be followed by another at once


def test_a_claim_begins_at_zero_until_a_claim_came_back_full() -> None:
    cursor = ClaimCursor()
    assert cursor.position(0.0) == 0
    cursor.answered(0, 100 * SECOND, False, 0.001, 0.0)
    assert cursor.position(0.5) == 0


def test_while_claims_come_back_full_the_cursor_trails_them_and_zero_comes_once_a_second() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, SLOW, 10.0)
    assert cursor.position(10.1) == 98 * SECOND
    cursor.answered(98 * SECOND, 103 * SECOND, True, SLOW, 10.2)
    assert cursor.position(10.9) == 101 * SECOND
    assert cursor.position(11.0) == 0


def test_after_a_bulk_load_the_cursor_trails_half_a_second_of_claiming() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, SLOW, 10.0)
    cursor.answered(98 * SECOND, 100 * SECOND + 500, True, SLOW, 10.3)
    assert cursor.position(10.4) == 98 * SECOND + 500
    cursor.answered(98 * SECOND, 100 * SECOND + 900, True, SLOW, 10.5)
    assert cursor.position(10.6) == 100 * SECOND
    cursor.answered(100 * SECOND, 100 * SECOND + 990, True, SLOW, 11.0)
    assert cursor.position(10.9) == 100 * SECOND + 900


def test_a_full_claim_from_zero_moves_the_cursor_back_to_the_rows_it_found_there() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, SLOW, 10.0)
    cursor.answered(0, 50 * SECOND, True, SLOW, 11.0)
    assert cursor.position(11.1) == 48 * SECOND


def test_a_short_claim_above_the_cursor_owes_one_from_zero() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, SLOW, 10.0)
    cursor.answered(98 * SECOND, None, False, 0.001, 10.1)
    assert cursor.owed
    assert cursor.position(10.1) == 0
    cursor.answered(0, None, False, 0.001, 10.2)
    assert not cursor.owed


def test_claims_from_zero_never_take_more_than_a_twentieth_of_the_time() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, 0.5, 10.0)
    cursor.answered(98 * SECOND, None, False, 0.001, 10.1)
    assert cursor.owed
    assert cursor.position(19.4) == 98 * SECOND
    assert cursor.position(19.5) == 0
    assert cursor.zero_allowed_at == 19.5


def test_a_claim_from_zero_that_took_long_is_made_again_in_ten_seconds_all_the_same() -> None:
    """A process that stood still has measured itself: for minutes it would not find what others have given back."""
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, 9.0, 20.0)
    assert cursor.position(29.9) == 98 * SECOND
    assert cursor.position(30.0) == 0


def test_the_second_claim_of_a_backlog_is_from_zero_too_where_the_first_was_cheap() -> None:
    cursor = ClaimCursor()
    cursor.answered(cursor.position(10.0), 100 * SECOND, True, 0.001, 10.0)
    assert cursor.position(10.0) == 0
    cursor.answered(0, 101 * SECOND, True, 0.001, 10.1)
    assert cursor.position(10.2) == 99 * SECOND


def test_what_is_owed_while_a_claim_from_zero_is_under_way_stays_owed_and_so_does_that_of_one_that_failed() -> None:
    cursor = ClaimCursor()
    cursor.owed = True
    assert cursor.position(10.0) == 0
    cursor.owed = True
    cursor.answered(0, None, False, 0.001, 10.1)
    assert cursor.owed
    assert cursor.position(11.0) == 0
    assert not cursor.owed
    cursor.unanswered(0)
    assert cursor.owed


def test_a_claim_answered_late_does_not_move_the_cursor_on_over_what_one_from_zero_has_found() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, SLOW, 10.0)
    above = cursor.position(10.9)
    assert cursor.position(11.0) == 0
    cursor.answered(0, 50 * SECOND, True, SLOW, 11.1)
    cursor.answered(above, 103 * SECOND, True, SLOW, 11.2)
    assert cursor.position(11.3) == 48 * SECOND


def test_a_claim_asks_for_no_more_jobs_than_bring_their_bodies_along() -> None:
    def jobs(*bodies: bytes | None) -> Any:
        return [SimpleNamespace(body=body or b"", body_pending=body is None) for body in bodies]

    assert _how_many_fit(jobs(bytes(65536), bytes(65536), None)) == 64
    assert _how_many_fit(jobs(bytes(65536), b"")) == 128
    assert _how_many_fit(jobs(b"", None)) > 10_000
    assert _how_many_fit(jobs(b"x")) > 10_000


def _claimed(counts: dict[str, int]) -> ClaimedJobs:
    return ClaimedJobs(looked_at=sum(counts.values()), counts=counts)


def test_a_short_claim_leaves_nothing() -> None:
    assert what_is_left(_claimed({"a": 3}), ["a", "b"], 4) == ([], [])


def test_after_a_full_claim_those_with_their_whole_share_may_have_more_least_served_first() -> None:
    assert what_is_left(_claimed({"a": 1, "b": 5, "c": 3}), ["a", "b", "c"], 9) == (["c", "b"], [])


def test_tenants_the_claim_did_not_come_to_are_next() -> None:
    assert what_is_left(_claimed({"b": 1, "c": 1}), ["a", "b", "c", "d", "e"], 2) == (["b", "c"], ["d", "e"])
