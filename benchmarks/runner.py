"""Rounds: every contender does every case in turn, in an order that changes, in a database of its own."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.model import Case, CaseResult, Contender, Measured, Sample, Scenario, Verdict
from benchmarks.sandbox import Sandbox, Sandboxes

__all__ = ["ScenarioResult", "contenders_of", "count_samples", "run_scenario"]


@dataclass(frozen=True)
class ScenarioResult:
    """All cases of one scenario, and the seconds it took with everything that had to be prepared."""

    scenario: Scenario
    cases: Sequence[CaseResult]
    seconds: float

    def verdicts(self) -> list[Verdict]:
        """Return every figure that has a target, case by case, then what the cases say together."""
        return [verdict for case in self.cases for verdict in case.verdicts()] + list(self.scenario.across(self.cases))


def contenders_of(scenario: Scenario, case: Case, *, quick: bool) -> list[Contender]:
    """Return who takes part; a quick run leaves out those that are only shown, and all but one of like baselines."""
    return [
        entry
        for entry in scenario.contenders
        if scenario.takes_part(case, entry) and (not quick or (entry.in_quick and entry.role != "reference"))
    ]


def count_samples(scenarios: Sequence[Scenario], *, quick: bool, rounds: int) -> int:
    """Return how many samples `run_scenario` will take over all of `scenarios`."""
    return sum(
        scenario.rounds(rounds) * len(contenders_of(scenario, case, quick=quick))
        for scenario in scenarios
        for case in scenario.cases(quick)
    )


async def run_scenario(
    scenario: Scenario,
    sandboxes: Sandboxes,
    *,
    quick: bool,
    rounds: int,
    on_sample: Callable[[str], None] = lambda _: None,
) -> ScenarioResult:
    """Take all samples of one scenario.

    Raises: CheckFailedError, at the first sample in which a job was lost or ran twice.
    """
    started = time.monotonic()
    results = []
    cases = scenario.cases(quick)
    async with _Shared(sandboxes, cases).entered(scenario.shared) as shared:
        for case in cases:
            contenders = contenders_of(scenario, case, quick=quick)
            samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
            loads = []
            for number in range(scenario.rounds(rounds)):
                loads.append(os.getloadavg()[0])
                # Whoever comes first in one round comes last in the next: a machine that slows down hits all alike.
                for contender in contenders if number % 2 == 0 else reversed(contenders):
                    on_sample(f"{scenario.name} {case.name}: {contender.name}")
                    async with shared(case) as sandbox:
                        samples[contender.name].append(await scenario.run(sandbox, case, contender))
            measured = [Measured(contender, samples[contender.name]) for contender in contenders]
            results.append(CaseResult(scenario, case, measured, loads))
    return ScenarioResult(scenario, results, time.monotonic() - started)


class _Shared:
    """Where samples get their sandbox: one each, or the same for all of them, with the largest backlog of any case."""

    def __init__(self, sandboxes: Sandboxes, cases: Sequence[Case]) -> None:
        self._sandboxes = sandboxes
        self._preload = max(case.preload for case in cases)
        self._sandbox: Sandbox | None = None

    @asynccontextmanager
    async def entered(self, shared: bool) -> AsyncIterator[_Shared]:
        if not shared:
            yield self
            return
        async with self._sandboxes.sandbox(self._preload) as self._sandbox:
            yield self

    @asynccontextmanager
    async def __call__(self, case: Case) -> AsyncIterator[Sandbox]:
        if self._sandbox is not None:
            yield self._sandbox
            return
        async with self._sandboxes.sandbox(case.preload, case.body_bytes) as sandbox:
            yield sandbox
