"""Rounds: every contender does every case in turn, in an order that changes, in a database of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.model import Case, Contender, Measured, Sample, Scenario
from benchmarks.sandbox import Sandboxes

__all__ = ["CaseResult", "count_samples", "run_scenario"]


@dataclass(frozen=True)
class CaseResult:
    """What all contenders reached at one case; `loads` is the machine's load average before each round."""

    scenario: Scenario
    case: Case
    measured: Sequence[Measured]
    loads: Sequence[float]


def contenders_of(scenario: Scenario, *, quick: bool) -> list[Contender]:
    """Return who takes part; a quick run leaves out those that are only shown, and all but one of like baselines."""
    if not quick:
        return list(scenario.contenders)
    return [entry for entry in scenario.contenders if entry.in_quick and entry.role != "reference"]


def count_samples(scenarios: Sequence[Scenario], *, quick: bool, rounds: int) -> int:
    """Return how many samples `run_scenario` will take over all of `scenarios`."""
    return sum(rounds * len(contenders_of(entry, quick=quick)) * len(entry.cases(quick)) for entry in scenarios)


async def run_scenario(
    scenario: Scenario,
    sandboxes: Sandboxes,
    *,
    quick: bool,
    rounds: int,
    on_sample: Callable[[str], None] = lambda _: None,
) -> list[CaseResult]:
    """Take all samples of one scenario.

    Raises: CheckFailedError, at the first sample in which a job was lost or ran twice.
    """
    results = []
    contenders = contenders_of(scenario, quick=quick)
    for case in scenario.cases(quick):
        samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
        loads = []
        for number in range(rounds):
            loads.append(os.getloadavg()[0])
            # Whoever comes first in one round comes last in the next: a machine that slows down hits all alike.
            for contender in contenders if number % 2 == 0 else reversed(contenders):
                on_sample(f"{scenario.name} {case.name}: {contender.name}")
                async with sandboxes.sandbox(case.preload) as sandbox:
                    samples[contender.name].append(await scenario.run(sandbox, case, contender))
        measured = [Measured(contender, samples[contender.name]) for contender in contenders]
        results.append(CaseResult(scenario, case, measured, loads))
    return results
