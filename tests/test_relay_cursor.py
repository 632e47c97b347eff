"""Where a claim begins to look: the rules of the cursor, without a database."""

from __future__ import annotations

from dispatch_core.models import ClaimedJobs
from relay_sdk.claimer import _what_is_left
from relay_sdk.cursor import ClaimCursor

SECOND = 1_000_000  # of seq


def test_a_claim_begins_at_zero_until_a_claim_came_back_full() -> None:
    cursor = ClaimCursor()
    assert cursor.position(0.0) == 0
    cursor.answered(0, 100 * SECOND, False, 0.001, 0.0)
    assert cursor.position(0.5) == 0


def test_while_claims_come_back_full_the_cursor_trails_them_and_zero_comes_once_a_second() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, 0.001, 10.0)
    assert cursor.position(10.1) == 98 * SECOND
    cursor.answered(98 * SECOND, 103 * SECOND, True, 0.001, 10.2)
    assert cursor.position(10.9) == 101 * SECOND
    assert cursor.position(11.0) == 0


def test_after_a_bulk_load_the_cursor_trails_half_a_second_of_claiming() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, 0.001, 10.0)
    cursor.answered(98 * SECOND, 100 * SECOND + 500, True, 0.001, 10.3)
    assert cursor.position(10.4) == 98 * SECOND + 500
    cursor.answered(98 * SECOND, 100 * SECOND + 900, True, 0.001, 10.5)
    assert cursor.position(10.6) == 100 * SECOND
    cursor.answered(100 * SECOND, 100 * SECOND + 990, True, 0.001, 11.0)
    assert cursor.position(10.9) == 100 * SECOND + 900


def test_a_full_claim_from_zero_moves_the_cursor_back_to_the_rows_it_found_there() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, 0.001, 10.0)
    cursor.answered(0, 50 * SECOND, True, 0.001, 11.0)
    assert cursor.position(11.1) == 48 * SECOND


def test_a_short_claim_above_the_cursor_owes_one_from_zero() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, 0.001, 10.0)
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


def _claimed(counts: dict[str, int]) -> ClaimedJobs:
    return ClaimedJobs(looked_at=sum(counts.values()), counts=counts)


def test_a_short_claim_leaves_nothing() -> None:
    assert _what_is_left(_claimed({"a": 3}), ["a", "b"], 4) == ([], [])


def test_after_a_full_claim_those_with_their_whole_share_may_have_more_least_served_first() -> None:
    assert _what_is_left(_claimed({"a": 1, "b": 5, "c": 3}), ["a", "b", "c"], 9) == (["c", "b"], [])


def test_tenants_the_claim_did_not_come_to_are_next() -> None:
    assert _what_is_left(_claimed({"b": 1, "c": 1}), ["a", "b", "c", "d", "e"], 2) == (["b", "c"], ["d", "e"])
