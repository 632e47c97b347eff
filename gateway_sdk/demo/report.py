"""The demo's result: as tables for a person, as one document for a program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dispatch_core.models import DispatchStatus
from gateway_sdk.demo.audit import Check
from gateway_sdk.demo.lines import BadLine
from gateway_sdk.demo.relays import RelayReport
from gateway_sdk.demo.traffic import Ending

__all__ = ["DemoReport", "Row", "percentile", "print_report", "rows_of"]

SHOWN_FAILURES = 20


@dataclass(frozen=True, slots=True)
class Row:
    """The requests of one tenant for one operation. Times are milliseconds from enqueue to result."""

    tenant: str
    operation: str
    sent: int
    succeeded: int
    failed: int
    expired: int
    retried: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All that the demo has to say."""

    endings: list[Ending]
    skipped: list[BadLine]
    relays: list[RelayReport]
    checks: list[Check]
    seconds: dict[str, float]
    results_by_push: int
    results_by_poll: int
    own_requests: bool = False
    """They are the person's own, who wants to see each; of the demo's own the sums say all."""
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", rows_of(self.endings))

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def document(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "ok": self.ok,
            "requests": {
                "lines": len(self.endings) + len(self.skipped),
                "sent": len(self.endings),
                "accepted": sum(ending.refused is None for ending in self.endings),
                "skipped": [asdict(line) for line in self.skipped],
                **({"ended": [_request(ending) for ending in self.endings]} if self.own_requests else {}),
            },
            "rows": [asdict(row) for row in self.rows],
            "wake_ups": {
                "relays_by_notify": self._count("wakeups_by_notify"),
                "relays_by_poll": self._count("wakeups_by_poll"),
                "relays_by_timer": self._count("wakeups_by_timer"),
                "results_by_notify": self.results_by_push,
                "results_by_poll": self.results_by_poll,
            },
            "relays": [asdict(relay) for relay in self.relays],
            "checks": [asdict(check) for check in self.checks],
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }

    def _count(self, name: str) -> int:
        return sum(relay.count(name) for relay in self.relays)


def _request(ending: Ending) -> dict[str, Any]:
    return {
        "line": ending.line.line,
        "job_id": None if ending.job_id is None else str(ending.job_id),
        "status": ending.status,
        "attempts": ending.attempt,
        "milliseconds": round(ending.seconds * 1000, 2),
        "error_code": ending.error_code,
        "error_message": ending.error_message,
        "response_status": ending.response_status,
        "response_bytes": ending.response_bytes,
        "response": ending.response,
        "refused": ending.refused,
        "lost": ending.lost,
        "difference": ending.difference,
    }


def rows_of(endings: Iterable[Ending]) -> list[Row]:
    """Sum up by tenant and operation, in this order."""
    groups: dict[tuple[str, str], list[Ending]] = {}
    for ending in endings:
        groups.setdefault((ending.line.tenant, ending.line.operation), []).append(ending)
    return [_row(tenant, operation, group) for (tenant, operation), group in sorted(groups.items())]


def _row(tenant: str, operation: str, endings: Sequence[Ending]) -> Row:
    times = sorted(ending.seconds * 1000 for ending in endings if ending.status is not None)

    def count(status: DispatchStatus) -> int:
        return sum(ending.status is status for ending in endings)

    return Row(
        tenant,
        operation,
        len(endings),
        count(DispatchStatus.SUCCEEDED),
        count(DispatchStatus.FAILED),
        count(DispatchStatus.EXPIRED),
        sum(max(0, ending.attempt - 1) for ending in endings),
        percentile(times, 50),
        percentile(times, 95),
        percentile(times, 99),
    )


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Return the value that `percent` of the ordered values do not exceed (nearest rank: one that was measured)."""
    if not ordered:
        return None
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 2)


def print_report(report: DemoReport, console: Console) -> None:
    """Print the tables, the wake-ups and the checks."""
    console.print(_table(report))
    document = report.document()
    wakes = document["wake_ups"]
    console.print()
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_row(
        "Wake-ups",
        f"relays {wakes['relays_by_notify']:,} by notify, {wakes['relays_by_poll']:,} by poll,"
        f" {wakes['relays_by_timer']:,} for a job whose delay was over"
        f"; results {wakes['results_by_notify']:,} by notify, {wakes['results_by_poll']:,} by poll",
    )
    facts.add_row("Time", ", ".join(f"{name} {value:.1f} s" for name, value in report.seconds.items()))
    console.print(facts)
    console.print()
    if report.skipped:
        # Each was told with its reason before anything was sent.
        numbers = ", ".join(str(bad.line) for bad in report.skipped[:10])
        more = ", …" if len(report.skipped) > 10 else ""
        console.print(Text.assemble(("- ", "yellow"), f"{len(report.skipped)} bad lines were skipped: {numbers}{more}"))
    if report.own_requests:
        not_well = [ending for ending in report.endings if ending.status is not DispatchStatus.SUCCEEDED]
        for ending in not_well[:SHOWN_FAILURES]:
            text = ending.refused or ending.lost or f"{ending.status}, {ending.error_code}: {ending.error_message}"
            console.print(Text.assemble(("- ", "yellow"), f"line {ending.line.line}: {text}"))
        if len(not_well) > SHOWN_FAILURES:
            console.print(Text.assemble(("- ", "yellow"), f"and {len(not_well) - SHOWN_FAILURES} more: see --json"))
    for check in report.checks:
        mark = ("✓ ", "green") if check.ok else ("✗ ", "bold red")
        console.print(Text.assemble(mark, check.text))
    verdict = "Every accepted request ended exactly once." if report.ok else "Not all is as it must be."
    console.print()
    console.print(Text(verdict, "bold green" if report.ok else "bold red"))


def _table(report: DemoReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False, show_footer=True)
    total = _row("", "", report.endings)
    table.add_column("tenant", "all")
    table.add_column("operation")
    for name, sum_ in (
        ("sent", total.sent),
        ("succeeded", total.succeeded),
        ("failed", total.failed),
        ("expired", total.expired),
        ("retries", total.retried),
    ):
        table.add_column(name, f"{sum_:,}" if sum_ else "·", justify="right")
    for name, value in (("p50", total.p50_ms), ("p95", total.p95_ms), ("p99", total.p99_ms)):
        table.add_column(name, _time(value), justify="right", no_wrap=True)
    table.columns[0].footer_style = "bold"
    before = ""
    for row in report.rows:
        if before and row.tenant != before:
            table.add_section()
        counts = (row.sent, row.succeeded, row.failed, row.expired, row.retried)
        styles = ("", "green", "red", "yellow", "cyan")
        table.add_row(
            Text(row.tenant if row.tenant != before else "", "bold"),
            Text(row.operation),
            *(Text(f"{n:,}" if n else "·", style if n else "dim") for n, style in zip(counts, styles, strict=True)),
            *(Text(_time(value)) for value in (row.p50_ms, row.p95_ms, row.p99_ms)),
        )
        before = row.tenant
    return table


def _time(ms: float | None) -> str:
    if ms is None:
        return "·"
    if ms < 10:
        return f"{ms:.1f} ms"
    return f"{ms:,.0f} ms" if ms < 1000 else f"{ms / 1000:.2f} s"
