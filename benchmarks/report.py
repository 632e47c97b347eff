"""What a run leaves behind: tables for people, and one JSON document for everything else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.model import CaseResult, Contender, Figure, Json, Measured, Verdict, spread
from benchmarks.runner import ScenarioResult

__all__ = ["FORMAT", "as_json", "number", "print_summary", "print_tables"]

FORMAT = 2
"""The version of the JSON document; one more whenever a reader of the last one would misread it."""


_LONG: Final = 12


def as_json(results: Sequence[ScenarioResult], environment: Json, *, started_at: str, quick: bool, rounds: int) -> Json:
    """Return the whole run as one document."""
    return {
        "format": FORMAT,
        "started_at": started_at,
        "quick": quick,
        "rounds": rounds,
        "environment": environment,
        "seconds": {result.scenario.name: round(result.seconds, 1) for result in results},
        "targets": [_verdict(verdict) for result in results for verdict in result.verdicts()],
        "results": [_case(case) for result in results for case in result.cases],
    }


def _verdict(verdict: Verdict) -> Json:
    return {
        "scenario": verdict.scenario,
        "case": verdict.case,
        "figure": verdict.figure,
        "measured": verdict.measured,
        "unit": verdict.unit,
        "against": verdict.against,
        "higher_is_better": verdict.higher_is_better,
        "target": verdict.target,
        "met": verdict.met,
        **({"beside": verdict.beside} if verdict.beside else {}),
    }


def _case(result: CaseResult) -> Json:
    return {
        "scenario": result.scenario.name,
        "case": dict(result.case.parameters),
        "jobs": result.case.jobs,
        "preload": result.case.preload,
        "figures": [_figure(result, figure) for figure in result.scenario.figures],
        "load_average": list(result.loads),
        "contenders": [_contender(result, entry) for entry in result.measured],
    }


def _figure(result: CaseResult, figure: Figure) -> Json:
    baseline = result.baseline(figure)
    return {
        "name": figure.name,
        "unit": figure.unit,
        "higher_is_better": figure.higher_is_better,
        "judged": figure.judged,
        "target": figure.target_at(result.case),
        "met": next((verdict.met for verdict in result.verdicts() if verdict.figure == figure.name), None),
        "ratio": result.ratio(figure),
        "baseline": baseline.contender.name if baseline else None,
    }


def _contender(result: CaseResult, entry: Measured) -> Json:
    return {
        "name": entry.contender.name,
        "role": entry.contender.role,
        "what": entry.contender.what,
        "figures": {
            figure.name: {
                "median": entry.median(figure),
                "spread": spread(values),
                "rounds": values,
                "ours_of_this": result.ratio(figure, entry),
            }
            for figure in result.scenario.figures
            if (values := entry.values(figure))
        },
        "extra": entry.extra,
        # Only samples that passed are here at all; these are the counts that were compared.
        "checks": [dict(sample.checks) for sample in entry.samples],
        **({"curves": [list(sample.curve) for sample in entry.samples]} if any(s.curve for s in entry.samples) else {}),
    }


def print_tables(results: Sequence[ScenarioResult], console: Console) -> None:
    """Print one table a scenario: a row for each figure of each case, every contender's median and ours of it."""
    for result in results:
        contenders = list(dict.fromkeys(entry.contender for case in result.cases for entry in case.measured))
        table = Table(title=f"{result.scenario.name}: {result.scenario.title}", title_justify="left")
        table.add_column("case", no_wrap=True)
        table.add_column("figure")
        for contender in contenders:
            table.add_column(contender.name, justify="right")
        table.add_column("ours / best baseline", justify="right")
        table.add_column("target", justify="right")
        # A long curve has its targets here and everything in the document.
        figures = result.scenario.figures
        if len(result.cases) > _LONG:
            figures = [figure for figure in figures if figure.target is not None] or figures
        for case in result.cases:
            verdicts = {verdict.figure: verdict for verdict in case.verdicts()}
            for row, figure in enumerate(figures):
                ratio, verdict = case.ratio(figure), verdicts.get(figure.name)
                table.add_row(
                    case.case.name if row == 0 else "",
                    f"{figure.name}, {figure.unit} {'↑' if figure.higher_is_better else '↓'}",
                    *(_cell(case, figure, contender) for contender in contenders),
                    "" if ratio is None else f"{ratio:.2f}",
                    "" if verdict is None else f"{_wanted(verdict)} {_met(verdict)}",
                )
        console.print(table)
        if len(figures) < len(result.scenario.figures):
            console.print("  [dim]the other figures of each case are in the document[/]")
        for contender in contenders:
            console.print(f"  [dim]{contender.name}: {contender.what}[/]")
        console.print()


def _cell(case: CaseResult, figure: Figure, contender: Contender) -> str:
    entry = next((entry for entry in case.measured if entry.contender is contender), None)
    if entry is None or not (values := entry.values(figure)):
        return "–"
    text = f"{number(statistics.median(values))} ±{spread(values) / 2:.0%}"
    # A reference is judged by nothing, but nobody should have to divide by hand.
    if entry.contender.role == "reference" and (ratio := case.ratio(figure, entry)) is not None:
        text += f" [dim](ours {ratio:.2f} of it)[/]"
    baseline = case.baseline(figure)
    is_best = entry is baseline and sum(other.contender.role == "baseline" for other in case.measured) > 1
    return f"[bold]{text}[/]" if is_best else text


def print_summary(results: Sequence[ScenarioResult], console: Console) -> None:
    """Print one row a target: cases with the same target share it, and the one that is furthest from it is shown."""
    table = Table(title="targets", title_justify="left")
    for column in ("scenario", "figure", "measured", "target", "met"):
        table.add_column(column, justify="left" if column in ("scenario", "figure") else "right")
    for result in results:
        groups: dict[tuple[str, float, str], list[Verdict]] = {}
        for verdict in result.verdicts():
            groups.setdefault((verdict.figure, verdict.target, verdict.unit), []).append(verdict)
        for group in groups.values():
            worst = (min if group[0].higher_is_better else max)(group, key=lambda verdict: verdict.measured)
            met = sum(verdict.met for verdict in group)
            figure = worst.figure + (f" of {worst.against}" if worst.against else "")
            where = f" at {worst.case}" if worst.case not in ("-", "") else ""
            table.add_row(
                result.scenario.name,
                f"{figure}{f', worst of {len(group)}:' if len(group) > 1 else ''}{where}",
                _amount(worst.measured, worst.unit) + (f" ({worst.beside})" if worst.beside else ""),
                _wanted(worst),
                _met(worst) if len(group) == 1 else f"{_met(worst)} ({met} of {len(group)})",
            )
    if table.row_count:
        console.print(table)
    seconds = ", ".join(f"{result.scenario.name} {result.seconds:.0f}" for result in results)
    console.print(f"seconds taken: {seconds}; together {sum(result.seconds for result in results):.0f}")


def _wanted(verdict: Verdict) -> str:
    return f"{'≥' if verdict.higher_is_better else '≤'} {_amount(verdict.target, verdict.unit)}"


def _met(verdict: Verdict) -> str:
    return "[green]met[/]" if verdict.met else "[red]missed[/]"


def _amount(value: float, unit: str) -> str:
    return f"{number(value)} {unit}".rstrip()


def number(value: float) -> str:
    """Return a figure as people read it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
