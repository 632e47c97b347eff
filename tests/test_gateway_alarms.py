"""Alarms: each at its time, none that was cancelled, one timer of the loop for all."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway_sdk.alarms import _LENGTHS, Alarms, Timeout
from tests.support.eventually import eventually


class Noted(Timeout):
    """One that says when it is over."""

    def __init__(self, said: list[str], name: str) -> None:
        super().__init__()
        self.said = said
        self.name = name

    def timed_out(self) -> None:
        assert not self.is_set
        self.said.append(self.name)


async def test_they_ring_in_the_order_of_their_times_and_not_when_cancelled() -> None:
    alarms = Alarms()
    rung: list[str] = []
    alarms.call_later(0.02, rung.append, "last")
    never = alarms.call_later(0.001, rung.append, "never")
    alarms.call_later(0.005, rung.append, "first")
    never.cancel()
    never.cancel()
    await eventually(lambda: len(rung) == 2)
    assert rung == ["first", "last"]
    assert len(alarms) == 0


async def test_one_may_cancel_another_that_is_due_with_it() -> None:
    alarms = Alarms()
    rung: list[str] = []
    later = alarms.call_later(0.0, lambda _: rung.append("cancelled"), None)
    alarms.call_later(-1.0, lambda _: later.cancel(), None)
    alarms.call_later(0.002, rung.append, "end")
    await eventually(lambda: "end" in rung)
    assert rung == ["end"]


async def test_ten_thousand_that_are_cancelled_take_one_timer_and_leave_next_to_nothing() -> None:
    loop: Any = asyncio.get_running_loop()
    alarms = Alarms()
    timers: list[None] = []

    class Counting:
        call_soon = loop.call_soon

        @staticmethod
        def call_later(*arguments: Any) -> Any:
            timers.append(None)
            return loop.call_later(*arguments)

    alarms._loop = Counting()  # type: ignore[assignment]
    for _ in range(10_000):
        alarms.call_later(60.0, print, None).cancel()
    assert len(timers) == 1
    assert len(alarms) < 600


async def test_timeouts_of_any_length_come_in_the_order_of_their_times_and_not_when_cancelled() -> None:
    alarms = Alarms()
    said: list[str] = []
    never = Noted(said, "never")
    alarms.time_out(0.001, never)
    # In the order of their times, however long it takes to ask for them all.
    alarms.call_later(0.001, said.append, "first")
    for number in range(2 * _LENGTHS):
        alarms.time_out(0.002 + number / 10_000, Noted(said, str(number)))
    alarms.time_out(0.002 + 2 * _LENGTHS / 10_000, Noted(said, "last"))
    never.cancel()
    never.cancel()
    assert not never.is_set
    await eventually(lambda: "last" in said)
    assert said == ["first", *map(str, range(2 * _LENGTHS)), "last"]
    assert len(alarms) == 0


async def test_a_timeout_that_is_due_with_another_may_be_cancelled_by_it() -> None:
    alarms = Alarms()
    said: list[str] = []
    other = Noted(said, "cancelled")
    alarms.call_later(-1.0, lambda _: other.cancel(), None)
    alarms.time_out(0.0, other)
    alarms.time_out(0.002, Noted(said, "end"))
    await eventually(lambda: "end" in said)
    assert said == ["end"]


async def test_nothing_is_left_of_timeouts_that_are_cancelled() -> None:
    alarms = Alarms()
    for _ in range(1000):
        timeout = Noted([], "")
        alarms.time_out(60.0, timeout)
        timeout.cancel()
    assert len(alarms) == 0
