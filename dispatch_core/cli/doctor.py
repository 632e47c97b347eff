"""`relay-dispatch doctor`: is everything as a gateway or a relay needs it, for this login, from this machine?"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dispatch_core.cli.checks import Finding, examine
from dispatch_core.cli.common import (
    FAILED,
    UNREACHABLE,
    DsnOption,
    Output,
    OutputOption,
    emit_json,
    resolve_dsn,
    resolve_listen_dsn,
    result_console,
    run_async,
)
from dispatch_core.errors import DatabaseError, DatabaseUnavailableError
from dispatch_core.settings import CoreSettings, OutboxSettings

__all__ = ["doctor"]

_MARKS = {"pass": ("✓", "pass", "green"), "warn": ("!", "warn", "yellow"), "fail": ("✗", "FAIL", "bold red")}

_REFUSED = {
    "28P01": "give the login's password, percent-encoded, in the DSN; or alter role LOGIN password '…'",
    "28000": "look at pg_hba.conf, and whether the role exists: create role LOGIN login",
    "3D000": "name a database that exists in the DSN; its schema is made by relay-dispatch db migrate",
}
"""What mends it where the server answers, and lets nobody in: wrong password, not authorized, no such database."""


def doctor(
    dsn: DsnOption = None,
    listen_dsn: Annotated[
        str | None,
        typer.Option(
            "--listen-dsn", metavar="DSN", help="PostgreSQL past the pooler; RELAY_DISPATCH_LISTEN_DSN where not given."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for a connection.")] = 5.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check the database, the way to it, and what this login may do; change nothing.

    Give it the DSN that a gateway or a relay has, and run it where that runs:
    what it finds is true of that login on that machine. Where OUTBOX_DSN is set
    too, the outbox is looked at there; where it alone is, it is the DSN.

    Exit code 0 where nothing failed (a warning is no failure), 1 where
    something did, 5 where nothing answers.

    Examples:
      RELAY_DISPATCH_DSN=postgresql://… relay-dispatch doctor
      relay-dispatch doctor --dsn … --listen-dsn …     (behind a pooler)
      relay-dispatch doctor -o json | jq '.findings[] | select(.mend)'
    """
    code = 0
    try:
        events = OutboxSettings.load()
        events_dsn = events.dsn.get_secret_value() if events.dsn else None
        if dsn is None and events_dsn is not None and not CoreSettings.load().dsn:
            dsn = events_dsn
            if listen_dsn is None and events.listen_dsn:
                listen_dsn = events.listen_dsn.get_secret_value()
        dsn = resolve_dsn(dsn, settings="RELAY_DISPATCH_DSN, or OUTBOX_DSN")
        findings = run_async(examine, dsn, resolve_listen_dsn(listen_dsn), outbox_dsn=events_dsn, timeout=timeout)
    except DatabaseUnavailableError as error:
        findings = [Finding("reach", "fail", str(error), "check host, port, the server and what lies between")]
        code = UNREACHABLE
    except DatabaseError as error:
        if error.sqlstate not in _REFUSED:
            raise
        findings = [Finding("reach", "fail", f"the server refuses this login: {error}", _REFUSED[error.sqlstate])]
    if any(finding.verdict == "fail" for finding in findings):
        code = code or FAILED
    if output is Output.JSON:
        emit_json({"ok": code == 0, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings, result_console())
    raise typer.Exit(code)


def _print(findings: list[Finding], console: Console) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        mark, word, style = _MARKS[finding.verdict]
        found: RenderableType = escape(finding.found)
        if finding.mend:
            found = Text.assemble(finding.found, "\n", ("→ " + finding.mend, "cyan"))
        table.add_row(Text(f"{mark} {word}", style), finding.check, found)
    console.print(table)
    counts = Counter(finding.verdict for finding in findings)
    console.print(f"\n{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed", style="bold")
