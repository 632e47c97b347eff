"""Backoff: exponential, full jitter, capped."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dispatch_core.backoff import Backoff, full_jitter


class Highest(random.Random):
    """Always the upper end."""

    def uniform(self, a: float, b: float) -> float:
        return b


class Lowest(random.Random):
    """Always the lower end."""

    def uniform(self, a: float, b: float) -> float:
        return a


def test_the_ceiling_doubles_from_the_base_up_to_the_cap() -> None:
    assert [full_jitter(n, 1.0, 10.0, Highest()) for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]


def test_the_floor_is_zero() -> None:
    assert [full_jitter(n, 1.0, 10.0, Lowest()) for n in (1, 5, 50)] == [0, 0, 0]


@given(st.integers(-5, 10**9), st.floats(0, 1e6), st.floats(0, 1e6))
def test_every_delay_is_between_zero_and_the_cap(attempt: int, base: float, cap: float) -> None:
    assert 0 <= full_jitter(attempt, base, cap) <= cap


def test_a_series_starts_over_after_a_success() -> None:
    backoff = Backoff(0.1, 60, Highest())
    assert [backoff.next() for _ in range(3)] == [0.1, 0.2, 0.4]
    assert backoff.attempt == 3
    backoff.reset()
    assert backoff.next() == 0.1


def test_a_seeded_generator_repeats_its_delays() -> None:
    one, two = (Backoff(1, 60, random.Random(5)) for _ in range(2))
    assert [one.next() for _ in range(5)] == [two.next() for _ in range(5)]
