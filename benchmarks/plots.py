"""Curves as SVG files: a figure over a parameter of the cases, or the course of each sample.

matplotlib belongs to the extra `bench`; without it a run has no plots, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.model import CaseResult, Contender, Figure, Plot, Point
from benchmarks.runner import ScenarioResult

__all__ = ["draw", "draw_all"]

# Ours stands out; the others have a colour and a dash each, so that they can be told apart in print too.
_OURS: Final = ("#0b6e4f", "-", "o")
_OTHERS: Final = (
    ("#c8553d", "--", "s"),
    ("#5b7db1", ":", "^"),
    ("#8d6a9f", "-.", "D"),
    ("#7a7a7a", "--", "v"),
)


def draw_all(results: Sequence[ScenarioResult], beside: Path) -> list[Path]:
    """Draw each scenario that has a curve, into files named after `beside` and the scenario; return the files.

    Raises: ImportError, where there is no matplotlib.
    """
    written = []
    for result in results:
        if result.scenario.plot is not None:
            path = beside.with_name(f"{beside.stem}-{result.scenario.name}.svg")
            draw(result, path)
            written.append(path)
    return written


def draw(result: ScenarioResult, path: Path) -> None:
    """Draw one scenario; the file's ending says which format."""
    from matplotlib.figure import Figure as Canvas

    plot = result.scenario.plot
    assert plot is not None
    panels = list(_panels(result, plot))
    columns = min(len(panels), _columns(result, plot))
    rows = -(-len(panels) // columns)
    canvas = Canvas(figsize=(max(5.0 * columns, 6.5), 3.4 * rows + 0.8), layout="constrained")
    axes = canvas.subplots(rows, columns, squeeze=False)
    for axis, (title, cases, figure) in zip(axes.flat, panels, strict=False):
        _panel(axis, plot, cases, figure)
        axis.set_title(title, fontsize=10)
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    handles = {
        label: handle for axis in canvas.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    canvas.suptitle(f"{result.scenario.name}: {result.scenario.title}", fontsize=12 if columns > 1 else 9)
    canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    canvas.savefig(path)


def _columns(result: ScenarioResult, plot: Plot) -> int:
    # Values of the first parameter side by side, those of the next ones below each other.
    if plot.panels:
        return len({case.case.parameters.get(plot.panels[0]) for case in result.cases})
    return len(_figures(result, plot)) if plot.figure else len(result.cases)


def _figures(result: ScenarioResult, plot: Plot) -> list[Figure]:
    names = [plot.figure] if isinstance(plot.figure, str) else plot.figure or ()
    return [result.scenario.figure(name) for name in names]


def _panels(result: ScenarioResult, plot: Plot) -> Iterator[tuple[str, list[CaseResult], Figure | None]]:
    if not plot.figure:
        for case in result.cases:
            yield "" if case.case.name == "-" else case.case.name, [case], None
        return
    groups: dict[tuple[int, ...], list[CaseResult]] = {}
    for case in result.cases:
        groups.setdefault(tuple(case.case.parameters[name] for name in reversed(plot.panels)), []).append(case)
    for key in sorted(groups):
        named = zip(reversed(plot.panels), key, strict=True)
        for figure in _figures(result, plot):
            yield ", ".join(f"{name} {value}" for name, value in named), groups[key], figure


def _panel(axis: Any, plot: Plot, cases: Sequence[CaseResult], figure: Figure | None) -> None:
    others = iter(_OTHERS * 2)
    for contender in dict.fromkeys(entry.contender for case in cases for entry in case.measured):
        color, dash, marker = _OURS if contender.role == "ours" else next(others)
        for number, points in enumerate(_lines(plot, cases, contender, figure)):
            axis.plot(
                [x for x, _ in points],
                [y for _, y in points],
                dash,
                color=color,
                marker=marker if len(points) < 40 else None,
                markersize=4,
                linewidth=1.4,
                # One line a round where the samples have curves of their own.
                alpha=1.0 if figure else 0.75,
                label=contender.name if number == 0 else None,
            )
    if figure:
        axis.set_ylabel(f"{figure.name}, {figure.unit}")
        values = sorted({case.case.parameters[plot.x] for case in cases})
        if len(values) > 1 and values[0] > 0 and values[-1] / values[0] >= 8:
            axis.set_xscale("log", base=2)
        axis.set_xticks(values, [str(value) for value in values])
        axis.minorticks_off()
    else:
        axis.set_ylabel(plot.y)
        axis.xaxis.set_major_formatter(_thousands)
    axis.set_xlabel(plot.x)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.04)
    axis.yaxis.set_major_formatter(_thousands)
    axis.grid(alpha=0.25)


def _thousands(value: float, _: object) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _lines(
    plot: Plot, cases: Sequence[CaseResult], contender: Contender, figure: Figure | None
) -> Iterator[Sequence[Point]]:
    entries = [(case, entry) for case in cases for entry in case.measured if entry.contender is contender]
    if figure is None:
        for _, entry in entries:
            yield from (sample.curve for sample in entry.samples if sample.curve)
        return
    points = [(case.case.parameters[plot.x], entry.median(figure)) for case, entry in entries]
    yield sorted((float(x), y) for x, y in points if y is not None)
