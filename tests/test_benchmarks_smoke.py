"""The benchmarks run, check what they did, and report it; how fast they were is nothing a test can say."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from benchmarks.cli import main, measure
from benchmarks.model import Case, CaseResult, Figure, Measured, Sample, Scenario, check
from benchmarks.report import print_summary, print_tables
from benchmarks.sandbox import Sandbox
from benchmarks.scenarios import (
    SCENARIOS,
    claim,
    drain,
    durable_drain,
    durable_heartbeat,
    durable_reap,
)
from dispatch_core.dev.postgres import DevServer

TINY_CLAIM = replace(claim.SCENARIO, cases=lambda _: [Case({"processes": 1, "claimers": 2, "batch": 5}, 40, 40)])
TINY_DRAIN = replace(
    drain.SCENARIO,
    cases=lambda _: [Case({}, jobs=30, preload=30)],
    contenders=[entry for entry in drain.SCENARIO.contenders if entry.name in ("ours", "loop-1", "sql-2")],
)


async def test_a_run_reports_each_case_with_its_contenders_and_what_was_checked(server: DevServer) -> None:
    out = StringIO()
    console = Console(file=out, width=160)
    document, results = await measure(
        [TINY_CLAIM, TINY_DRAIN], server, console, quick=False, rounds=2, inserts_seconds=0.02
    )
    print_tables(results, console)
    print_summary(results, console)
    document = json.loads(json.dumps(document))

    assert document["format"] == 2
    assert document["rounds"] == 2
    environment = document["environment"]
    assert environment["server"]["settings"]["synchronous_commit"] == "on"
    assert environment["durable_commit_ms"]["p50"] > 0
    assert environment["cores"] >= 1

    by_claim, by_drain = document["results"]
    assert (by_claim["scenario"], by_claim["case"]) == (
        "claim",
        {"processes": 1, "claimers": 2, "batch": 5},
    )
    assert [entry["name"] for entry in by_claim["contenders"]] == ["ours", "bare", "bare-on-ours"]
    rate = by_claim["figures"][0]
    assert (rate["name"], rate["baseline"], rate["target"], rate["higher_is_better"]) == ("rate", "bare", 0.9, True)
    ours, bare, _ = (entry["figures"]["rate"]["median"] for entry in by_claim["contenders"])
    assert rate["ratio"] == pytest.approx(ours / bare)
    assert rate["met"] == (rate["ratio"] >= 0.9)
    for entry in by_claim["contenders"]:
        assert len(entry["figures"]["rate"]["rounds"]) == 2
        # Claimed twice would be more than distinct; lost would be less than stored.
        assert entry["checks"] == [{"claimed": 40, "distinct": 40, "stored": 40, "gone": 40}] * 2
        assert entry["figures"]["p99"]["median"] >= entry["figures"]["p50"]["median"] > 0

    assert by_drain["figures"][0]["baseline"] == "loop-1"
    for entry in by_drain["contenders"]:
        assert entry["checks"] == [{"handled": 30, "distinct": 30, "succeeded": 30, "results": 30}] * 2

    assert {(target["scenario"], target["figure"]) for target in document["targets"]} >= {
        ("claim", "rate"),
        ("drain", "rate"),
    }
    assert set(document["seconds"]) == {"claim", "drain"}
    for text in (
        "claim",
        "drain",
        "processes=1 claimers=2 batch=5",
        "ours / best baseline",
        "targets",
        "seconds taken",
    ):
        assert text in out.getvalue()


async def test_scenarios_of_durable_jobs_do_each_chunk_once(server: DevServer) -> None:
    tiny = [
        replace(
            scenario,
            cases=lambda _: [Case({"chunks": 30}, 30)],
            contenders=[entry for entry in scenario.contenders if entry.name in ("ours", "bare")],
        )
        for scenario in (durable_drain.SCENARIO, durable_heartbeat.SCENARIO, durable_reap.SCENARIO)
    ]
    document, _ = await measure(tiny, server, Console(file=StringIO()), quick=False, rounds=1, inserts_seconds=0.02)
    assert document["failed"] == {}
    once = {
        (result["scenario"], entry["name"]): entry["checks"][0]
        for result in document["results"]
        for entry in result["contenders"]
    }
    assert once["durable-drain", "ours"] == {"handled": 30, "distinct": 30, "once": 30, "counted": 30}
    assert once["durable-heartbeat", "ours"] == once["durable-heartbeat", "bare"] == {"renewed": 30}
    assert once["durable-reap", "ours"] == {"reaped": 30, "distinct": 30, "stored": 30, "told": 30}
    assert once["durable-reap", "bare"] == {"reaped": 30, "distinct": 30, "stored": 30}


async def test_a_sample_that_lost_a_job_is_an_error_and_no_figure(server: DevServer) -> None:
    async def run(sandbox: Sandbox, case: Case, contender: object) -> Sample:
        counts = await sandbox.counts("ours")
        return Sample({"rate": 1.0}, check(case.jobs + 1, requests=counts["requests"]))

    broken = replace(TINY_CLAIM, run=run)
    document, results = await measure(
        [broken], server, Console(file=StringIO()), quick=False, rounds=1, inserts_seconds=0.02
    )
    assert results == []
    assert document["results"] == []
    assert "expected 41, found {'requests': 40}" in document["failed"]["claim"]


@pytest.mark.parametrize(("higher_is_better", "best"), [(True, "loop-2"), (False, "loop-1")])
def test_the_ratio_is_to_the_best_baseline(higher_is_better: bool, best: str) -> None:
    figure = Figure("it", "s", higher_is_better=higher_is_better, target=1.0)
    scenario = replace(drain.SCENARIO, figures=(figure,))
    values = {"ours": 50.0, "loop-1": 100.0, "loop-2": 200.0, "loop-4": 150.0, "sql-2": 999.0}
    measured = [Measured(contender, [Sample({"it": values[contender.name]}, {})]) for contender in scenario.contenders]
    result = CaseResult(scenario, Case({}, 1), measured, [])
    baseline = result.baseline(figure)
    assert baseline is not None
    assert baseline.contender.name == best
    assert result.ratio(figure) == 50 / {"loop-1": 100, "loop-2": 200}[best]
    [verdict] = result.verdicts()
    assert (verdict.against, verdict.unit, verdict.met) == (best, "×", not higher_is_better)


def test_a_figure_that_is_a_ratio_already_is_judged_as_it_is() -> None:
    figure = Figure("last / first", "", higher_is_better=True, target=0.9, judged="value")
    scenario = replace(drain.SCENARIO, figures=(figure,))
    ours = Measured(scenario.contenders[0], [Sample({"last / first": value}, {}) for value in (0.8, 0.95, 0.97)])
    [verdict] = CaseResult(scenario, Case({}, 1), [ours], []).verdicts()
    assert (verdict.measured, verdict.against, verdict.met) == (0.95, "", True)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_each_scenario_names_who_takes_part_and_is_small_when_quick(name: str) -> None:
    scenario: Scenario = SCENARIOS[name]
    assert scenario.contenders[0].role == "ours"
    assert any(contender.role == "baseline" for contender in scenario.contenders)
    assert all(contender.what for contender in scenario.contenders)
    assert list(scenario.cases(True)) != list(scenario.cases(False))
    assert (
        scenario.plot
        or scenario.across_targets
        or any(figure.target_at(case) is not None for figure in scenario.figures for case in scenario.cases(False))
    )


def test_the_command_lists_scenarios_and_refuses_unknown_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SCENARIOS)
    assert main(["nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
