"""The claim cursor under a backlog: what is owed is not put off to the claim from zero of each second."""

from __future__ import annotations

import pytest

from dispatch_core.cursor import ClaimCursor

SECOND = 1_000_000


@pytest.mark.invariant("I5")
def test_what_is_owed_under_a_backlog_is_the_very_next_claim() -> None:
    cursor = ClaimCursor()
    cursor.answered(0, 100 * SECOND, True, 0.01, 10.0)
    assert cursor.position(10.5) == 98 * SECOND
    cursor.unanswered(0)
    assert cursor.position(10.5) == 0
    assert cursor.position(10.6) == 98 * SECOND
