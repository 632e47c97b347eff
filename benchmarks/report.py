"""What a run leaves behind: a table for people, and one JSON document for everything else."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.model import Json, Measured, spread
from benchmarks.runner import CaseResult

__all__ = ["FORMAT", "as_json", "print_tables"]

FORMAT = 1
"""The version of the JSON document; one more whenever a reader of the last one would misread it."""


def as_json(results: Sequence[CaseResult], environment: Json, *, started_at: str, quick: bool, rounds: int) -> Json:
    """Return the whole run as one document."""
    return {
        "format": FORMAT,
        "started_at": started_at,
        "quick": quick,
        "rounds": rounds,
        "environment": environment,
        "results": [_case(result) for result in results],
    }


def _case(result: CaseResult) -> Json:
    scenario = result.scenario
    return {
        "scenario": scenario.name,
        "case": dict(result.case.parameters),
        "jobs": result.case.jobs,
        "preload": result.case.preload,
        "unit": scenario.unit,
        "higher_is_better": scenario.higher_is_better,
        "ratio": scenario.ratio(result.measured),
        "target": scenario.target(result.case),
        "baseline": scenario.baseline(result.measured).contender.name,
        "load_average": list(result.loads),
        "contenders": [_contender(entry) for entry in result.measured],
    }


def _contender(entry: Measured) -> Json:
    values = [sample.value for sample in entry.samples]
    return {
        "name": entry.contender.name,
        "role": entry.contender.role,
        "what": entry.contender.what,
        "median": entry.median,
        "spread": spread(values),
        "rounds": values,
        "extra": entry.extra,
        # Only samples that passed are here at all; these are the counts that were compared.
        "checks": [dict(sample.checks) for sample in entry.samples],
    }


def print_tables(results: Sequence[CaseResult], console: Console) -> None:
    """Print one table a scenario: each case with the medians, our ratio to the best baseline, and the target."""
    names = list(dict.fromkeys(result.scenario.name for result in results))
    for name in names:
        group = [result for result in results if result.scenario.name == name]
        scenario = group[0].scenario
        direction = "more is better" if scenario.higher_is_better else "less is better"
        table = Table(title=f"{name}: {scenario.title} ({scenario.unit}; {direction})", title_justify="left")
        table.add_column("case")
        for contender in (entry.contender for entry in group[0].measured):
            table.add_column(contender.name, justify="right")
        table.add_column("ours / best baseline", justify="right")
        table.add_column("target", justify="right")
        for result in group:
            best = scenario.baseline(result.measured)
            cells = []
            for entry in result.measured:
                text = f"{_number(entry.median)} ±{spread([s.value for s in entry.samples]) / 2:.0%}"
                cells.append(f"[bold]{text}[/]" if entry is best and len(group[0].measured) > 2 else text)
            target = scenario.target(result.case)
            wanted = "" if target is None else f"{'≥' if scenario.higher_is_better else '≤'} {target:.2f}"
            table.add_row(result.case.name, *cells, f"{scenario.ratio(result.measured):.2f}", wanted)
        console.print(table)
        for entry in group[0].measured:
            console.print(f"  [dim]{entry.contender.name}: {entry.contender.what}[/]")
        console.print()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
