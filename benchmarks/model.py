"""What a scenario is, and what comes of it.

A scenario has *cases* (points of its curve) and *contenders* (who does the work). A *sample* is one contender doing one
case once, in a database of its own; the runner takes several, interleaved, and compares medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.sandbox import Sandbox

__all__ = ["Case", "CheckFailedError", "Contender", "Measured", "Sample", "Scenario", "percentile", "spread"]

Role = Literal["ours", "baseline", "reference"]


class CheckFailedError(Exception):
    """A job was lost, or ran twice: the figure of that sample is worth nothing."""


@dataclass(frozen=True)
class Contender:
    """Who does the work. The ratio is ours against the best `baseline`; a `reference` is only shown beside them.

    `in_quick`: whether a quick run has it too; references never are in one.
    """

    name: str
    role: Role
    what: str
    in_quick: bool = True


@dataclass(frozen=True)
class Case:
    """One point of a scenario, and the size of the work at it.

    `preload`: jobs that lie in the queue, ours and the bare one alike, before the clock starts.
    """

    parameters: Mapping[str, int]
    jobs: int
    preload: int = 0

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.parameters.items()) or "-"


@dataclass(frozen=True)
class Sample:
    """What one contender reached in one round: the scenario's figure, what else was seen, and the checks it passed."""

    value: float
    checks: Mapping[str, int]
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """All samples of one contender at one case."""

    contender: Contender
    samples: Sequence[Sample]

    @property
    def median(self) -> float:
        return statistics.median(sample.value for sample in self.samples)

    @property
    def extra(self) -> dict[str, float]:
        """The median of each figure beside the main one."""
        names = {name for sample in self.samples for name in sample.extra}
        return {
            name: statistics.median(sample.extra[name] for sample in self.samples if name in sample.extra)
            for name in sorted(names)
        }


@dataclass(frozen=True)
class Scenario:
    """One kind of work.

    `run` does one sample in a sandbox and checks it before it returns. `higher_is_better` says which way the figure
    goes; `target` is what the ratio ours / baseline should reach (or stay below).
    """

    name: str
    title: str
    unit: str
    higher_is_better: bool
    contenders: Sequence[Contender]
    cases: Callable[[bool], Sequence[Case]]
    run: Callable[[Sandbox, Case, Contender], Awaitable[Sample]]
    target: Callable[[Case], float | None] = lambda _: None

    def baseline(self, measured: Sequence[Measured]) -> Measured:
        """Return the best baseline: a good ratio against a slow one says nothing."""
        choices = [entry for entry in measured if entry.contender.role == "baseline"]
        return (max if self.higher_is_better else min)(choices, key=lambda entry: entry.median)

    def ratio(self, measured: Sequence[Measured]) -> float:
        """Return our median over the baseline's, whichever way the figure goes."""
        ours = next(entry for entry in measured if entry.contender.role == "ours")
        return ours.median / self.baseline(measured).median


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float]) -> float:
    """Return how far the rounds lie apart: (highest - lowest) / median."""
    return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else 0.0


def check(expected: int, **counts: int) -> dict[str, int]:
    """Return `counts` when each is `expected`.

    Raises: CheckFailedError, naming those that are not.
    """
    wrong = {name: count for name, count in counts.items() if count != expected}
    if wrong:
        raise CheckFailedError(f"expected {expected}, found {wrong}")
    return counts


Json = dict[str, Any]
