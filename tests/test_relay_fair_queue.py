"""The line before an operation's limit: tenants take turns."""

from __future__ import annotations

from relay_sdk.fair_queue import FairQueue


def line(*items: str) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for item in items:
        queue.put(item[0], item)
    return queue


def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    queue = line("a1", "a2", "a3", "b1", "c1", "c2")
    assert [queue.take() for _ in range(len(queue))] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert len(queue) == 0


def test_who_was_served_stands_behind_those_who_came_meanwhile() -> None:
    queue = line("a1", "a2", "b1")
    assert queue.take() == "a1"
    queue.put("c", "c1")
    assert [queue.take() for _ in range(3)] == ["b1", "a2", "c1"]


def test_who_is_removed_holds_no_place_and_no_turn() -> None:
    queue = line("a1", "a2", "b1")
    queue.remove("a", "a1")
    queue.remove("b", "b1")
    queue.remove("b", "b1")
    queue.remove("a", "a3")
    assert len(queue) == 1
    assert queue.take_from_longer("c") is None
    queue.put("b", "b2")
    assert [queue.take() for _ in range(2)] == ["a2", "b2"]
    assert len(queue) == 0


def test_the_longest_line_gives_up_its_last_place_and_only_to_a_shorter_one() -> None:
    queue = line("a1", "a2", "a3", "b1")
    assert queue.take_from_longer("a") is None
    assert queue.take_from_longer("c") == "a3"
    queue.put("c", "c1")
    assert queue.take_from_longer("c") is None
    assert queue.take_from_longer("d") == "a2"
    assert queue.take_from_longer("d") is None
    assert line().take_from_longer("a") is None
    queue.clear()
    assert len(queue) == 0
