"""Rounds: in each, every contender has its turn, in an order that turns round; a failure ends that contender only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.databases import Databases
from benchmarks.peers.model import AbsentError, Contender, Result, SampleFailedError, System
from benchmarks.peers.rows import Run, Scenario, Sizes
from dispatch_core.dev.postgres import DevServer

__all__ = ["Outcome", "prepare", "run_scenarios"]


@dataclass
class Outcome:
    """Who took part, in which version, who did not and why, and what came of it, by scenario."""

    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    results: dict[str, list[Result]] = field(default_factory=dict)
    loads: dict[str, list[float]] = field(default_factory=dict)


def prepare(systems: Sequence[System], outcome: Outcome, on_step: Callable[[str], None]) -> list[System]:
    """Return the systems that are installed here, and note the others with the reason."""
    present = []
    for system in systems:
        on_step(f"{system.name}: looking for it")
        try:
            outcome.versions[system.name] = system.prepare()
        except AbsentError as error:
            outcome.absent[system.name] = str(error)
        else:
            present.append(system)
    return present


async def run_scenarios(
    scenarios: Sequence[Scenario],
    systems: Sequence[System],
    server: DevServer,
    outcome: Outcome,
    *,
    sizes: Sizes,
    rounds: int,
    on_step: Callable[[str], None],
) -> None:
    """Take all samples, into `outcome`."""
    databases = Databases(server)
    present = []
    try:
        for system in systems:
            on_step(f"{system.name}: installing its schema")
            try:
                for contender in system.contenders:
                    await databases.prepare(system, contender)
            # Whatever its installation does: it is one that does not run here.
            except Exception as error:  # noqa: BLE001
                outcome.absent[system.name] = f"its schema could not be installed: {error}"
                outcome.versions.pop(system.name, None)
            else:
                present.append(system)
        for scenario in scenarios:
            await _run_scenario(scenario, present, databases, outcome, sizes=sizes, rounds=rounds, on_step=on_step)
    finally:
        await databases.close()


async def _run_scenario(
    scenario: Scenario,
    systems: Sequence[System],
    databases: Databases,
    outcome: Outcome,
    *,
    sizes: Sizes,
    rounds: int,
    on_step: Callable[[str], None],
) -> None:
    turns: list[tuple[System, Contender]] = [(system, entry) for system in systems for entry in system.contenders]
    results = {contender.name: Result(contender) for _, contender in turns}
    outcome.results[scenario.name] = list(results.values())
    outcome.loads[scenario.name] = []
    for number in range(rounds):
        outcome.loads[scenario.name].append(os.getloadavg()[0])
        for system, contender in turns if number % 2 == 0 else reversed(turns):
            result = results[contender.name]
            if result.failure is not None:
                continue
            on_step(f"{scenario.name}, round {number + 1} of {rounds}: {contender.name}")
            try:
                async with databases.database(system, contender, scenario.settings) as database:
                    result.samples.append(await scenario.sample(Run(system, contender, database, sizes)))
            except SampleFailedError as error:
                result.failure = str(error)
