"""The table and the JSON document."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.peers.model import Result, Row
from benchmarks.peers.rows import Scenario
from benchmarks.peers.runner import Outcome
from benchmarks.peers.systems import SYSTEMS

__all__ = ["as_json", "print_tables", "verdict"]

# In drain, ours should be this many times as fast as each peer that is written in Python.
_PYTHON_DRAIN: Final = 3.0


def print_tables(scenarios: Sequence[Scenario], outcome: Outcome, console: Console) -> None:
    """Print one table a row of the comparison, then who took part, and who did not and why."""
    for scenario in scenarios:
        results = outcome.results[scenario.name]
        for row in scenario.rows:
            console.print(_table(row, results))
            found = verdict(row, results)
            console.print(f"  {found['text']}\n", highlight=False)
    for system, versions in outcome.versions.items():
        console.print(f"  {system}: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    for system, reason in outcome.absent.items():
        console.print(f"  [bold]{system}: absent:[/] {escape(reason)}")


def _table(row: Row, results: Sequence[Result]) -> Table:
    table = Table(title=f"{row.name}: {row.title}", title_justify="left", title_style="bold")
    for name, justify in (("", "left"), (row.unit, "right"), ("±", "right"), ("ours is", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    ours = _ours(row, results)
    winner = _best(row, results)
    for result in results:
        median = result.median(row.name)
        note = result.contender.what
        if "jobs" in (extra := result.samples[0].extra if result.samples else {}):
            note += f"; {extra['jobs']:,.0f} jobs"
        if median is None:
            table.add_row(result.contender.name, "–", "", "", f"[red]{escape(result.failure or 'no sample')}[/]")
            continue
        values = result.values(row.name)
        spread = (max(values) - min(values)) / median / 2
        figure = f"{median:,.0f}" if median >= 100 else f"{median:.2f}"
        times = "" if ours is None or result.contender.system == "ours" else f"{_times(row, ours, median):.2f} ×"
        table.add_row(
            result.contender.name,
            f"[bold green]{figure}[/]" if result is winner else figure,
            f"{spread:.0%}",
            times,
            note,
        )
    return table


def _times(row: Row, ours: float, theirs: float) -> float:
    """Return how many times as fast ours is."""
    return ours / theirs if row.better == "higher" else theirs / ours


def _best(row: Row, results: Sequence[Result]) -> Result | None:
    measured = [result for result in results if result.median(row.name) is not None]
    choose = max if row.better == "higher" else min
    return choose(measured, key=lambda result: result.median(row.name) or 0.0) if measured else None


def _ours(row: Row, results: Sequence[Result]) -> float | None:
    best = _best(row, [result for result in results if result.contender.system == "ours"])
    return None if best is None else best.median(row.name)


def verdict(row: Row, results: Sequence[Result]) -> dict[str, Any]:
    """Return who wins the row, by how much, and whether the targets are met; `text` says so."""
    winner = _best(row, results)
    ours = _ours(row, results)
    peer = _best(row, [result for result in results if result.contender.system != "ours"])
    if winner is None:
        return {"winner": None, "text": "nobody was measured"}
    found: dict[str, Any] = {"winner": winner.contender.name}
    if ours is None or peer is None:
        return {**found, "text": f"best: {winner.contender.name}; there is nobody to compare it with"}
    ratio = _times(row, ours, peer.median(row.name) or 1.0)
    found |= {"best_peer": peer.contender.name, "ours_over_best_peer": ratio, "ahead_of_all": ratio > 1}
    text = f"[bold]{winner.contender.name} wins[/]: ours is {ratio:.2f} × the best peer, {peer.contender.name}"
    if row.name == "drain":
        python = [entry for entry in results if entry.contender.system in _python_peers()]
        best = _best(row, python)
        if best is not None:
            least = _times(row, ours, best.median(row.name) or 1.0)
            found |= {"ours_over_best_python_peer": least, "target_3x_python": least >= _PYTHON_DRAIN}
            text += f"; {least:.2f} × the best Python peer, {best.contender.name} (target {_PYTHON_DRAIN:.0f})"
    return {**found, "text": text}


def _python_peers() -> set[str]:
    return {system.name for system in SYSTEMS.values() if system.language == "python" and system.name != "ours"}


def as_json(scenarios: Sequence[Scenario], outcome: Outcome, environment: dict[str, Any], **run: Any) -> dict[str, Any]:
    """Return everything as one document."""
    rows = []
    for scenario in scenarios:
        results = outcome.results[scenario.name]
        for row in scenario.rows:
            found = verdict(row, results)
            found.pop("text")
            contenders = [_contender(row, result) for result in results]
            rows.append(
                {
                    "row": row.name,
                    "title": row.title,
                    "unit": row.unit,
                    "better": row.better,
                    "server_settings": dict(scenario.settings),
                    "load_averages": outcome.loads[scenario.name],
                    **found,
                    "contenders": contenders,
                }
            )
    return {
        **run,
        "environment": environment,
        "versions": {name: dict(versions) for name, versions in outcome.versions.items()},
        "absent": outcome.absent,
        "rows": rows,
    }


def _contender(row: Row, result: Result) -> dict[str, Any]:
    values = result.values(row.name)
    return {
        "name": result.contender.name,
        "system": result.contender.system,
        "profile": result.contender.profile,
        "settings": {
            "text": result.contender.what,
            "worker": dict(result.contender.worker),
            "producer": dict(result.contender.producer),
            "template": dict(result.contender.template),
        },
        "median": result.median(row.name),
        "mean": statistics.fmean(values) if values else None,
        "rounds": values,
        "jobs": [sample.extra["jobs"] for sample in result.samples if "jobs" in sample.extra],
        "checks": [dict(sample.checks) for sample in result.samples],
        "failure": result.failure,
    }
