"""The comparison with other queues: what it counts and what it says. None of them is needed for these."""

from __future__ import annotations

import pytest

from benchmarks.peers.model import AbsentError, CheckFailedError, Contender, Result, Row, Sample
from benchmarks.peers.report import verdict
from benchmarks.peers.rows import counted
from benchmarks.peers.systems import SYSTEMS
from benchmarks.peers.systems._packages import packages

SENT = [{"sent": [0, 3], "warm": [100, 1]}, {"sent": [10, 1], "warm": [200, 0]}]


def test_a_sample_counts_when_each_job_was_handled_once() -> None:
    assert counted(SENT, [10, 2, 1, 0, 100], done=5) == {"sent": 5, "handled": 5, "distinct": 5, "done": 5}


@pytest.mark.parametrize(
    ("numbers", "done"),
    [
        pytest.param([0, 1, 2, 10], None, id="one is lost"),
        pytest.param([0, 1, 2, 10, 100, 100], None, id="one ran twice"),
        pytest.param([0, 1, 2, 10, 10], None, id="one is lost and another ran twice"),
        pytest.param([0, 1, 2, 10, 11], None, id="one was never sent"),
        pytest.param([0, 1, 2, 10, 100], 4, id="one did not end well"),
    ],
)
def test_a_sample_counts_for_nothing_when_a_job_was_lost_or_ran_twice(numbers: list[int], done: int | None) -> None:
    with pytest.raises(CheckFailedError, match="exactly once"):
        counted(SENT, numbers, done)


def _result(system: str, *values: float, failure: str | None = None) -> Result:
    samples = [Sample({"drain": value}, {}) for value in values]
    return Result(Contender(system, "best", "", 1), samples, failure)


@pytest.mark.parametrize(
    ("better", "winner", "ratio"), [("higher", "oban", 0.5), ("lower", "ours", 2.0)], ids=["rates", "times"]
)
def test_a_row_says_who_wins_whichever_way_its_figure_goes(better: str, winner: str, ratio: float) -> None:
    row = Row("drain", "", "", better)  # type: ignore[arg-type]
    found = verdict(
        row, [_result("ours", 1.0, 9.0, 2.0), _result("oban", 4.0), _result("pgqueuer", 8.0, failure="ended")]
    )
    assert (found["winner"], found["best_peer"], found["ours_over_best_peer"]) == (winner, "oban", ratio)
    assert found["ahead_of_all"] is (winner == "ours")


def test_a_peer_that_is_not_installed_is_absent_with_the_reason() -> None:
    with pytest.raises(AbsentError, match="is not installed"):
        packages("no_such_queue", "no-such-queue")()
    with pytest.raises(AbsentError, match=r"needs Python 99\.0"):
        packages("relay_sdk", "relay-dispatch", least=(99, 0))()


def test_every_system_takes_part_at_its_best_and_at_its_defaults() -> None:
    for name, system in SYSTEMS.items():
        assert [entry.profile for entry in system.contenders] == ["best", "default"], name
