"""The command line: which scenarios, how long, where the figures go."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import known, plots
from benchmarks.environment import describe
from benchmarks.loops import run
from benchmarks.model import Json, Scenario
from benchmarks.report import as_json, print_summary, print_tables
from benchmarks.runner import ScenarioResult, count_samples, run_scenario
from benchmarks.sandbox import Sandboxes
from benchmarks.scenarios import SCENARIOS
from dispatch_core.dev.postgres import DevServer, start_server
from dispatch_core.errors import ConfigurationError

__all__ = ["main", "measure"]

# Durable by default: fsync, synchronous_commit and full_page_writes are on unless somebody turns them off. What is set
# here only keeps checkpoints and eviction out of the way of samples that last seconds.
SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    "max_connections": "400",
}

_RESULTS = Path(__file__).with_name("results")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run scenarios and report; 0 = done, 1 = a check failed or there is no server, 2 = wrong usage.

    A missed target is a result, so it is 0 too.
    """
    options = _parser().parse_args(arguments)
    if options.list:
        for scenario in SCENARIOS.values():
            print(_described(scenario))
        return 0
    rounds = options.rounds or (2 if options.quick else 3)
    names = options.scenario or list(SCENARIOS)
    if unknown := sorted(set(names) - set(SCENARIOS)):
        print(f"unknown: {', '.join(unknown)}; there are: {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    # The table goes to standard error where the document goes to standard output.
    to_stderr = options.json == "-"
    console = Console(stderr=to_stderr, width=None if (sys.stderr if to_stderr else sys.stdout).isatty() else 150)
    try:
        with start_server(settings=SETTINGS, ephemeral=True) as server:
            document, results = run(
                measure([SCENARIOS[name] for name in names], server, console, quick=options.quick, rounds=rounds)
            )
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_tables(results, console)
    print_summary(results, console)
    for sentence in known.sentences(document["known"], cores=document["environment"]["cores"]):
        console.print(f"  {sentence}")
    text = json.dumps(document, indent=2)
    if options.json == "-":
        print(text)
    else:
        path = _path(options.json, document)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        console.print(f"written: {os.path.relpath(path)}")
        _draw(results, path, console)
    for name, text in document["failed"].items():
        print(f"error: {name} has no figures: {text}", file=sys.stderr)
    return 1 if document["failed"] else 0


async def measure(
    scenarios: Sequence[Scenario],
    server: DevServer,
    console: Console,
    *,
    quick: bool,
    rounds: int,
    inserts_seconds: float = 2.0,
) -> tuple[Json, list[ScenarioResult]]:
    """Run `scenarios` on `server`; return the document and what it was made of.

    A scenario of which a sample failed has no figures; the document says why, under `failed`.
    `inserts_seconds`: how long each kind of plain INSERTs is tried beforehand, for what is known of such machines.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    environment = await describe(server)
    results: list[ScenarioResult] = []
    failed: dict[str, str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn between samples only: a bar that moves by itself would take time from what is measured.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=count_samples(scenarios, quick=quick, rounds=rounds), completed=-1)

        def on_sample(text: str) -> None:
            progress.update(task, description=f"{text:60}", advance=1, refresh=True)

        def on_preparing(text: str) -> None:
            progress.update(task, description=f"{'preparing: ' + text:60}", refresh=True)

        sandboxes = Sandboxes(server, on_preparing)
        try:
            on_preparing("what plain INSERTs reach here")
            async with sandboxes.sandbox() as sandbox:
                plain = await known.plain_inserts(
                    sandbox, seconds=min(inserts_seconds, 0.3) if quick else inserts_seconds
                )
            for scenario in scenarios:
                try:
                    result = await run_scenario(scenario, sandboxes, quick=quick, rounds=rounds, on_sample=on_sample)
                # Whatever it was: this scenario has no figures, and those of the others took half an hour to get.
                except Exception as error:  # noqa: BLE001
                    failed[scenario.name] = "".join(traceback.format_exception(error))
                    console.print(f"[red]{scenario.name} failed: {error!r}[/]", highlight=False)
                    continue
                results.append(result)
                if not console.is_terminal:  # there is no bar, and the tables come at the end of half an hour
                    console.print(_told(result, len(results) + len(failed), len(scenarios)), highlight=False)
        finally:
            await sandboxes.close()
    document = as_json(results, environment, started_at=started_at, quick=quick, rounds=rounds)
    document["failed"] = failed
    document["known"] = known.compare(plain, results, cores=environment["cores"])
    return document, results


def _told(result: ScenarioResult, number: int, count: int) -> str:
    verdicts = result.verdicts()
    met = sum(verdict.met for verdict in verdicts)
    judged = f"{met} of {len(verdicts)} targets met" if verdicts else "no target"
    return f"{number} of {count}  {result.scenario.name}: {judged}, {result.seconds:.0f} s"


def _draw(results: Sequence[ScenarioResult], path: Path, console: Console) -> None:
    try:
        for drawn in plots.draw_all(results, path):
            console.print(f"written: {os.path.relpath(drawn)}")
    except ImportError:
        console.print("no plots: matplotlib is missing, which is part of the extra `bench`")


def _described(scenario: Scenario) -> str:
    """Return name, title and targets, cases with the same target once."""
    targets = {
        f"{figure.name} {'≥' if figure.higher_is_better else '≤'} {target:g}"
        f"{'×' if figure.judged == 'ratio' else ' ' + figure.unit}": None
        for figure in scenario.figures
        for case in scenario.cases(False)
        if (target := figure.target_at(case)) is not None
    }
    every = [*targets, *filter(None, [scenario.across_targets])]
    return f"{scenario.name:13} {scenario.title}; {', '.join(every) or 'no target, a curve'}"


def _path(chosen: str | None, document: Json) -> Path:
    if chosen is not None:
        return Path(chosen)
    stamp = document["started_at"].replace(":", "").replace("+0000", "Z")
    return _RESULTS / f"{stamp}{'-quick' if document['quick'] else ''}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Run the benchmarks, each scenario beside its hand-written baseline."
    )
    parser.add_argument("scenario", nargs="*", help="which to run; all, when none is named")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, fewer cases: a minute and a half for all of them"
    )
    parser.add_argument("--rounds", type=_rounds, help="samples of each contender at each case (3; quick: 2)")
    parser.add_argument("--json", metavar="FILE", help="where the document goes; - = standard output")
    parser.add_argument("--list", action="store_true", help="name the scenarios with their targets and end")
    return parser


def _rounds(text: str) -> int:
    if (rounds := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least one round")
    return rounds
