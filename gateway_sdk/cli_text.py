"""What `relay-dispatch jobs` reads from its arguments, and how it shows a job."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.json import JSON
from rich.table import Table
from rich.text import Text

from dispatch_core.cli.common import result_console
from dispatch_core.errors import InvalidInputError
from dispatch_core.models import DispatchResult

__all__ = ["STYLES", "job_document", "parse_headers", "parse_json", "print_job", "read_argument", "waiting"]

STYLES = {"succeeded": "bold green", "failed": "bold red", "expired": "bold yellow"}
MAX_SHOWN_BYTES = 4000


def read_argument(value: str) -> bytes:
    """Return the bytes of an argument; `-` is all of stdin."""
    if value == "-":
        return sys.stdin.buffer.read()
    # What the shell gave that is no UTF-8 goes on as the bytes that it was.
    return value.encode(errors="surrogateescape")


def parse_json(text: bytes) -> Any:
    """Return the JSON value of --json."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"--json is no JSON: {error}") from None


def parse_headers(values: Sequence[str]) -> dict[str, str | list[str]]:
    """Return the map of `K=V` arguments; a name that comes again makes a list."""
    headers: dict[str, str | list[str]] = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--header must be K=V, not {value!r}")
        before = headers.get(name)
        if before is None:
            headers[name] = text
        else:
            headers[name] = [*([before] if isinstance(before, str) else before), text]
    return headers


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show that something is waited for, where a person looks on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def job_document(result: DispatchResult, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job as plain values; a body that is no UTF-8 comes as `response_body_base64`."""
    document = {"job_id": result.job_id, **about} | asdict(result)
    body = result.response_body
    document.pop("remaining")
    document["response_body"] = None
    document["response_body_base64"] = None
    if body is not None:
        try:
            document["response_body"] = body.decode()
        except UnicodeDecodeError:
            document["response_body_base64"] = base64.b64encode(body).decode()
    return document


def print_job(result: DispatchResult, about: Mapping[str, Any]) -> None:
    """Print a job for a person; of a large or binary body only its size."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")

    def line(name: str, value: object) -> None:
        if value is not None:
            grid.add_row(name, value if isinstance(value, (Text, JSON)) else Text(str(value)))

    line("job", result.job_id)
    line("status", Text(result.status, STYLES.get(result.status, "bold cyan")))
    for name in ("relay_id", "operation", "claimed_by"):
        line(name.removesuffix("_id").replace("_", " "), about.get(name))
    line("attempt", f"{result.attempt} of {about['max_attempts']}" if "max_attempts" in about else result.attempt)
    for name, moment in (("created", result.created_at), ("claimed", result.claimed_at)):
        line(name, moment and moment.astimezone().isoformat(sep=" ", timespec="milliseconds"))
    if result.completed_at is not None:
        took = (result.completed_at - result.created_at).total_seconds()
        line(
            "ended",
            f"{result.completed_at.astimezone().isoformat(sep=' ', timespec='milliseconds')}, after {took:.3f} s",
        )
    line("deadline", result.expires_at.astimezone().isoformat(sep=" ", timespec="milliseconds"))
    if result.error_code is not None:
        line("error", Text.assemble((result.error_code, "red"), f" {result.error_message or ''}"))
    line("answer", result.response_status)
    for header, values in (result.response_headers or {}).items():
        for value in [values] if isinstance(values, str) else values:
            line("", f"{header}: {value}")
    if result.response_body is not None:
        line("body", _shown(result))
    result_console().print(grid)


def _shown(result: DispatchResult) -> Text | JSON:
    body = result.response_body or b""
    if len(body) <= MAX_SHOWN_BYTES:
        try:
            text = body.decode()
        except UnicodeDecodeError:
            text = "\0"
        if text.isprintable() or text.replace("\n", "").replace("\t", "").isprintable():
            try:
                value = result.json()
            except InvalidInputError:
                return Text(text)
            return JSON.from_data(value) if isinstance(value, (dict, list)) else Text(text)
    return Text(f"{len(body):,} bytes (jobs show … --body > FILE)", "italic")
