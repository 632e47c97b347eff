"""What a scenario is, and what comes of it.

A scenario has *cases* (points of its curve), *contenders* (who does the work) and *figures* (what is read off). A
*sample* is one contender doing one case once; the runner takes several, interleaved, and compares medians. A *verdict*
is one figure held against its target.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.sandbox import Sandbox

__all__ = [
    "Case",
    "CaseResult",
    "CheckFailedError",
    "Contender",
    "Figure",
    "Json",
    "Measured",
    "Plot",
    "Point",
    "Sample",
    "Scenario",
    "Verdict",
    "check",
    "percentile",
    "spread",
]

Json = dict[str, Any]
Point = tuple[float, float]
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

    `preload`: jobs that lie in the queue, ours and the bare one alike, before the clock starts. With `body_bytes` their
    bodies are so many random bytes, and only ours are there.
    """

    parameters: Mapping[str, int]
    jobs: int
    preload: int = 0
    body_bytes: int | None = None

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.parameters.items()) or "-"


@dataclass(frozen=True)
class Figure:
    """One figure that every sample has, or some contenders' only; `target` may depend on the case, None = only shown.

    `judged` says what is held against the target: the "ratio" of our median to that of the best baseline, or our median
    itself as a "value": for what is a ratio within one run already (last part / first part), or an amount (megabytes).
    """

    name: str
    unit: str
    higher_is_better: bool
    target: float | Callable[[Case], float | None] | None = None
    judged: Literal["ratio", "value"] = "ratio"

    def target_at(self, case: Case) -> float | None:
        return self.target(case) if callable(self.target) else self.target


@dataclass(frozen=True)
class Plot:
    """A curve to draw: of `figure` over the cases' parameter `x`, one panel for each value of the `panels` parameters.

    Several figures have a panel each. Without any: the samples' own curves, `x` and `y` being what the axes say.
    """

    x: str
    figure: str | Sequence[str] | None = None
    y: str = ""
    panels: Sequence[str] = ()


@dataclass(frozen=True)
class Sample:
    """What one contender reached in one round: its figures by name, what else was seen, and the checks it passed.

    `curve`: points of one sample's own course, for a scenario whose plot is made of them.
    """

    figures: Mapping[str, float]
    checks: Mapping[str, int]
    extra: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[Point] = ()


@dataclass(frozen=True)
class Measured:
    """All samples of one contender at one case."""

    contender: Contender
    samples: Sequence[Sample]

    def values(self, figure: Figure) -> list[float]:
        """Return the figure of each round; empty where this contender has none."""
        return [sample.figures[figure.name] for sample in self.samples if figure.name in sample.figures]

    def median(self, figure: Figure) -> float | None:
        values = self.values(figure)
        return statistics.median(values) if values else None

    @property
    def extra(self) -> dict[str, float]:
        """The median of each figure beside the main ones."""
        names = {name for sample in self.samples for name in sample.extra}
        return {
            name: statistics.median(sample.extra[name] for sample in self.samples if name in sample.extra)
            for name in sorted(names)
        }


@dataclass(frozen=True)
class Verdict:
    """One figure held against its target. `unit` is × for a ratio; `against` says to what, where it is one.

    `beside`: what else the summary should say in that row, as the same figure of the bare side.
    """

    scenario: str
    case: str
    figure: str
    measured: float
    unit: str
    against: str
    higher_is_better: bool
    target: float
    beside: str = ""

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.higher_is_better else self.measured <= self.target


@dataclass(frozen=True)
class Scenario:
    """One kind of work.

    `run` does one sample in a sandbox and checks it before it returns; the first of `figures` is the main one.
    `across` judges what several cases say together (how a curve goes), `across_targets` tells it for the list.
    `shared`: all samples have one sandbox, which `run` puts in order before each; else each sample has one of its own.
    `takes_part`: who does which case, if not all. `most_rounds` is for figures that are no times: more
    rounds would only take longer.
    """

    name: str
    title: str
    figures: Sequence[Figure]
    contenders: Sequence[Contender]
    cases: Callable[[bool], Sequence[Case]]
    run: Callable[[Sandbox, Case, Contender], Awaitable[Sample]]
    across: Callable[[Sequence[CaseResult]], Sequence[Verdict]] = lambda _: ()
    across_targets: str = ""
    plot: Plot | None = None
    shared: bool = False
    takes_part: Callable[[Case, Contender], bool] = lambda _case, _contender: True
    most_rounds: int | None = None

    def rounds(self, wanted: int) -> int:
        """Return how many rounds are taken where so many are asked for."""
        return wanted if self.most_rounds is None else min(wanted, self.most_rounds)

    def figure(self, name: str) -> Figure:
        return next(figure for figure in self.figures if figure.name == name)


@dataclass(frozen=True)
class CaseResult:
    """What all contenders reached at one case; `loads` is the machine's load average before each round."""

    scenario: Scenario
    case: Case
    measured: Sequence[Measured]
    loads: Sequence[float]

    @property
    def ours(self) -> Measured:
        return next(entry for entry in self.measured if entry.contender.role == "ours")

    def of(self, contender: str, figure: str) -> float | None:
        """Return one contender's median; None where it did not take part or has no such figure."""
        entry = next((entry for entry in self.measured if entry.contender.name == contender), None)
        return None if entry is None else entry.median(self.scenario.figure(figure))

    def baseline(self, figure: Figure) -> Measured | None:
        """Return the best baseline: a good ratio against a slow one says nothing."""
        choices = [entry for entry in self.measured if entry.contender.role == "baseline" and entry.values(figure)]
        if not choices:
            return None
        return (max if figure.higher_is_better else min)(choices, key=lambda entry: entry.median(figure) or 0.0)

    def ratio(self, figure: Figure, other: Measured | None = None) -> float | None:
        """Return our median over that of `other` (the best baseline), whichever way the figure goes."""
        other = other or self.baseline(figure)
        ours, theirs = self.ours.median(figure), other.median(figure) if other else None
        return ours / theirs if ours is not None and theirs else None

    def verdicts(self) -> list[Verdict]:
        """Return one verdict for each figure that has a target here."""
        found = []
        for figure in self.scenario.figures:
            target, baseline = figure.target_at(self.case), self.baseline(figure)
            by_ratio = figure.judged == "ratio"
            measured = self.ratio(figure) if by_ratio else self.ours.median(figure)
            if target is None or measured is None:
                continue
            against = baseline.contender.name if by_ratio and baseline else ""
            unit = "×" if by_ratio else figure.unit
            found.append(
                Verdict(
                    self.scenario.name,
                    self.case.name,
                    figure.name,
                    measured,
                    unit,
                    against,
                    figure.higher_is_better,
                    target,
                )
            )
        return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float]) -> float:
    """Return how far the rounds lie apart: (highest - lowest) / median."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if len(values) > 1 and middle else 0.0


def check(expected: int, **counts: int) -> dict[str, int]:
    """Return `counts` when each is `expected`.

    Raises: CheckFailedError, naming those that are not.
    """
    wrong = {name: count for name, count in counts.items() if count != expected}
    if wrong:
        raise CheckFailedError(f"expected {expected}, found {wrong}")
    return counts
