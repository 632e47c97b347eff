"""The command line of the comparison: which systems, which rows, how long, where the figures go."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.cli import SETTINGS
from benchmarks.environment import describe
from benchmarks.loops import run
from benchmarks.peers.model import System
from benchmarks.peers.report import as_json, print_tables
from benchmarks.peers.rows import FULL, QUICK, SCENARIOS, Scenario
from benchmarks.peers.runner import Outcome, prepare, run_scenarios
from benchmarks.peers.systems import SYSTEMS
from dispatch_core.dev.postgres import DevServer, start_server
from dispatch_core.errors import ConfigurationError

__all__ = ["main"]

_RESULTS: Final = Path(__file__).resolve().parents[1] / "results"
_SCENARIOS: Final = {scenario.name: scenario for scenario in SCENARIOS}
# A row may be asked for by its own name too.
_BY_ROW: Final = {row.name: scenario for scenario in SCENARIOS for row in scenario.rows} | _SCENARIOS
# Sixteen processes with a pool each.
_SETTINGS: Final = {**SETTINGS, "max_connections": "500"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and report; 0 = done, 1 = ours did not run or failed a sample, or there is no server, 2 = wrong usage."""
    options = _parser().parse_args(arguments)
    names = list(dict.fromkeys(["ours", *options.peer])) if options.peer else list(SYSTEMS)
    if unknown := sorted(set(names) - set(SYSTEMS)):
        print(f"unknown: {', '.join(unknown)}; there are: {', '.join(SYSTEMS)}", file=sys.stderr)
        return 2
    asked = {_BY_ROW[name].name for name in options.row} if options.row else set(_SCENARIOS)
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in asked]
    console = Console(stderr=options.json == "-")
    outcome = Outcome()
    progress = Console(stderr=True)

    def on_step(text: str) -> None:
        progress.print(f"[dim]{datetime.now():%H:%M:%S}  {text}[/]", highlight=False)  # noqa: DTZ005 - for eyes

    systems = prepare([SYSTEMS[name] for name in names], outcome, on_step)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        with start_server(settings=_SETTINGS, ephemeral=True) as server:
            environment = run(_compare(scenarios, systems, server, outcome, options, on_step))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_tables(scenarios, outcome, console)
    document = as_json(
        scenarios, outcome, environment, started_at=started_at, quick=options.quick, rounds=options.rounds
    )
    text = json.dumps(document, indent=2)
    if options.json == "-":
        print(text)
    else:
        path = _path(options.json, started_at, quick=options.quick)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        console.print(f"written: {os.path.relpath(path)}")
    failed = [
        result.failure
        for results in outcome.results.values()
        for result in results
        if result.contender.system == "ours" and result.failure is not None
    ]
    return 1 if failed or "ours" in outcome.absent else 0


async def _compare(
    scenarios: Sequence[Scenario],
    systems: Sequence[System],
    server: DevServer,
    outcome: Outcome,
    options: argparse.Namespace,
    on_step: Any,
) -> dict[str, Any]:
    environment = await describe(server)
    await run_scenarios(
        scenarios,
        systems,
        server,
        outcome,
        sizes=QUICK if options.quick else FULL,
        rounds=options.rounds,
        on_step=on_step,
    )
    return environment


def _path(chosen: str | None, started_at: str, *, quick: bool) -> Path:
    if chosen is not None:
        return Path(chosen)
    stamp = started_at.replace(":", "").replace("+0000", "Z")
    return _RESULTS / f"peers-{stamp}{'-quick' if quick else ''}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("peer", nargs="*", help=f"which, beside ours: {', '.join(SYSTEMS)}; all, when none is named")
    parser.add_argument("--quick", action="store_true", help="small samples, to see that all of it runs")
    parser.add_argument("--rounds", type=_rounds, default=3, help="samples of each contender in each row (3)")
    parser.add_argument("--row", action="append", choices=sorted(_BY_ROW), help="one row; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="where the document goes; - = standard output")
    return parser


def _rounds(text: str) -> int:
    if (rounds := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least one round")
    return rounds
