"""`relay-dispatch demo`: the command; what it does is in `gateway_sdk.demo`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn

import typer

from dispatch_core.cli.common import FAILED, Output, OutputOption, emit_json, note, result_console, run_async
from dispatch_core.errors import ConfigurationError
from gateway_sdk.demo import Terminated, play
from gateway_sdk.demo.lines import BadLine, DemoLine, read_lines
from gateway_sdk.demo.report import print_report
from gateway_sdk.demo.show import Show
from gateway_sdk.demo.stage import stage

__all__ = ["demo"]


def demo(
    input_: Annotated[
        str | None, typer.Option("--input", "-i", metavar="FILE|-", help="Your own requests, one a line; - is stdin.")
    ] = None,
    rate: Annotated[
        float, typer.Option("--rate", min=0, help="Requests a second; 0 sends them as fast as they are accepted.")
    ] = 40.0,
    processes: Annotated[int, typer.Option("--processes", min=1, max=16, help="Relay processes.")] = 2,
    dsn: Annotated[
        str | None,
        typer.Option(
            "--dsn",
            metavar="DSN",
            envvar="RELAY_DISPATCH_TEST_DSN",
            show_envvar=True,
            help="A superuser's DSN of a server for development, instead of one of the demo's own.",
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave server and database as they are, to look at.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send requests from a gateway through relays, and check what came of each.

    It starts a PostgreSQL server that is thrown away afterwards, makes a
    database with plain logins, starts relays as processes, sends 500 requests
    of three tenants, and prints how long each took and how it ended; then it
    compares what the gateway, the database and the relays say. RELAY_DISPATCH_DSN
    is not used. With --dsn, a database and logins are made on that server; the
    logins' passwords are no secret, so let it be one for development.

    A line of --input is a JSON object:

      tenant, relay, operation  text, required. Served are
                                erp: TotalOrder, ReserveStock, QuoteNow, Echo
                                archive: HashDocument, RunReport
      json | body | document    a JSON value, a text, or {"kb": 200, "seed": 7},
                                which stands for 200,000 bytes made from the seed
      headers                   names to texts or lists of texts
      ttl, delay                seconds; ttl is 30 where not given
      max_attempts, key         as in `jobs enqueue`
      expect                    {"status": …, "error": …, "json": …}, compared

    Of these, --json has each request with its job, answer and error, and the
    table lists those that did not succeed.

    Empty lines and lines that begin with # are passed over. A line that is no
    good is reported with its number and the reason, and skipped.

    Exit code 0 where every accepted request ended exactly once and as its line
    expects, whatever was skipped; 1 where not; 2 where no line is good;
    130 after Ctrl-C, which stops relays and server in order.

    Examples:
      relay-dispatch demo
      relay-dispatch demo --json > report.json
      head -50 examples/requests.jsonl | relay-dispatch demo -i - --rate 0
    """
    if json:
        output = Output.JSON
    show = Show()
    lines, skipped = _read(input_)
    for bad in skipped:
        show.note(f"line {bad.line} is skipped: {bad.reason}")
    if not lines:
        raise ConfigurationError("the input has no line that can be sent")
    started = time.perf_counter()
    try:
        with _sigterm_ends_it(), stage(dsn, keep=keep, show=show) as where:
            report = run_async(play, where, lines, skipped, rate=rate, processes=processes, show=show)
            if keep:
                note(
                    f"kept: database {where.database}\n  gateway   {where.gateway_dsn}\n  worker    {where.worker_dsn}"
                )
                note(f"  operator  {where.operator_dsn}")
    except KeyboardInterrupt:
        show.stopped()
        raise
    except Terminated as order:
        show.stopped()
        raise typer.Exit(128 + order.number) from None
    report = replace(report, own_requests=input_ is not None)
    report.seconds["in all"] = time.perf_counter() - started
    if output is Output.JSON:
        emit_json(report.document())
    else:
        print_report(report, result_console())
    if not report.ok:
        raise typer.Exit(FAILED)


def _read(input_: str | None) -> tuple[list[DemoLine], list[BadLine]]:
    lines: list[DemoLine] = []
    skipped: list[BadLine] = []
    with _opened(input_) as file:
        for line in read_lines(file):
            if isinstance(line, BadLine):
                skipped.append(line)
            else:
                lines.append(line)
    return lines, skipped


@contextmanager
def _opened(input_: str | None) -> Iterator[BinaryIO]:
    if input_ == "-":
        yield sys.stdin.buffer
        return
    path = _own_requests() if input_ is None else Path(input_)
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    with file:
        yield file


def _own_requests() -> Path:
    """Return the requests that come with the demo: in the package, or beside it in a checkout."""
    packaged = Path(str(files("gateway_sdk"))) / "demo_requests.jsonl"
    return packaged if packaged.is_file() else packaged.parents[1] / "examples" / "requests.jsonl"


@contextmanager
def _sigterm_ends_it() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that what was started is stopped; the event loop has its own way."""

    def end(number: int, _frame: object) -> NoReturn:
        raise Terminated(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
