"""What is due next, and who is told."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel

from gateway_sdk.due import Due
from tests.support.eventually import HANGS


def test_a_thing_is_taken_once_at_its_earliest_time() -> None:
    due = Due[str]()
    now = time.monotonic()
    for thing, at in (("later", now + 60), ("b", now - 1), ("a", now - 2), ("b", now - 3), ("a", now + 60)):
        due.plan(thing, at)
    assert due.take() == ["b", "a"]
    assert due.take() == []
    due.plan("later", now - 1)
    assert due.take() == ["later"]
    due.plan("later", now - 1)
    assert due.take() == ["later"]


async def test_one_that_is_planned_meanwhile_is_not_overslept() -> None:
    due = Due[str]()
    due.plan("late", time.monotonic() + 600)
    started = time.monotonic()
    async with anyio.create_task_group() as group:
        with anyio.fail_after(HANGS):
            group.start_soon(due.wait, started + 600)
            await anyio.lowlevel.checkpoint()
            due.plan("soon", started + 0.1)
            due.plan("never mind", started + 700)
    assert time.monotonic() - started >= 0.09
    assert due.take() == ["soon"]


async def test_it_waits_no_longer_than_asked() -> None:
    started = time.monotonic()
    with anyio.fail_after(HANGS):
        await Due[str]().wait(started + 0.05)
    assert time.monotonic() - started >= 0.04
