"""When a lone statement may ring in its own transaction; the clock is the test's."""

from __future__ import annotations

from dispatch_core.ring_inside import RingInside

CHEAP = 0.0006
DEAR = 0.005


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def known_cheap(clock: Clock) -> RingInside:
    ring = RingInside(clock=clock)
    ring.took(CHEAP, False)
    assert ring.allows()
    return ring


def test_nothing_rings_inside_before_a_lone_statement_was_timed() -> None:
    ring = RingInside(clock=Clock())
    assert not ring.allows()
    ring.took(CHEAP, False)
    assert ring.allows()


def test_where_flushes_are_slow_not_even_the_first_one_rings_inside() -> None:
    ring = RingInside(clock=Clock())
    for _ in range(100):
        assert not ring.allows()
        ring.took(DEAR, False)


def test_a_server_that_became_fast_is_believed_after_a_few_statements() -> None:
    ring = RingInside(clock=Clock())
    ring.took(DEAR, False)
    for _ in range(4):
        ring.took(CHEAP, False)
    assert ring.allows()


def test_two_dear_rings_of_eight_are_nothing_but_three_are_a_pause() -> None:
    clock = Clock()
    ring = known_cheap(clock)
    for _ in range(20):
        for seconds in (CHEAP, CHEAP, CHEAP, DEAR):
            ring.took(seconds, True)
            assert ring.allows()
    for seconds in (CHEAP, CHEAP, DEAR):
        ring.took(seconds, True)
    for _ in range(2):
        ring.took(CHEAP, False)
    assert not ring.allows()
    clock.now += 0.25
    assert ring.allows()


def test_where_one_flush_of_fifty_is_slow_every_lone_statement_rings_inside() -> None:
    ring = known_cheap(Clock())
    for number in range(1, 1001):
        assert ring.allows()
        ring.took(DEAR if number % 50 == 0 else CHEAP, True)


def test_two_dear_rings_behind_a_pause_double_it_up_to_about_a_minute() -> None:
    clock = Clock()
    ring = known_cheap(clock)
    ring.took(DEAR, True)
    pauses = []
    for _ in range(10):
        for _ in range(2):
            ring.took(DEAR, True)
        for _ in range(8):
            ring.took(CHEAP, False)
        since = clock.now
        while not ring.allows():
            clock.now += 0.25
        pauses.append(clock.now - since)
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 64]


def test_a_pause_ends_only_where_statements_are_cheap_by_then() -> None:
    clock = Clock()
    ring = known_cheap(clock)
    for _ in range(3):
        ring.took(DEAR, True)
    clock.now += 1.0
    ring.took(DEAR, False)
    assert not ring.allows()
    for _ in range(2):
        ring.took(CHEAP, False)
    assert ring.allows()


def test_pauses_are_forgotten_after_cheap_rings() -> None:
    clock = Clock()
    ring = known_cheap(clock)
    for _ in range(7):
        ring.took(DEAR, True)
    clock.now += 100.0
    for _ in range(20):
        ring.took(CHEAP, True)
    for _ in range(3):
        ring.took(DEAR, True)
    for _ in range(4):
        ring.took(CHEAP, False)
    assert not ring.allows()
    clock.now += 0.25
    assert ring.allows()


def test_the_round_trip_of_a_slow_network_does_not_count() -> None:
    ring = RingInside(clock=Clock())
    ring.round_trip(0.020)
    ring.took(0.020 + CHEAP, False)
    assert ring.allows()
    for _ in range(3):
        ring.took(0.020 + DEAR, False)
    assert not ring.allows()


def test_a_server_that_moved_away_is_believed_in_time() -> None:
    ring = RingInside(clock=Clock())
    ring.round_trip(0.001)
    ring.took(0.020 + CHEAP, False)
    assert not ring.allows()
    for _ in range(200):
        ring.round_trip(0.020)
    for _ in range(8):
        ring.took(0.020 + CHEAP, False)
    assert ring.allows()
