"""What every command shares: options, output, errors.

A command prints its result on stdout, as a table or as one JSON document, and everything else on stderr.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from enum import Enum
from functools import partial
from typing import Annotated, Any, TypeVar
from uuid import UUID

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dispatch_core.cli.signals import run_until_sigterm
from dispatch_core.errors import (
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidInputError,
    MigrationRightsError,
    RelayDispatchError,
    SchemaMismatchError,
    TenancyUnboundError,
    UnknownJobError,
)

__all__ = [
    "FAILED",
    "NOTHING_MATCHED",
    "OK",
    "SCHEMA_MISMATCH",
    "UNREACHABLE",
    "USAGE",
    "DsnOption",
    "Output",
    "OutputOption",
    "emit_json",
    "emit_table",
    "exit_code",
    "foreseen_in",
    "note",
    "report_error",
    "resolve_dsn",
    "resolve_listen_dsn",
    "result_console",
    "run_async",
]

OK, FAILED, USAGE, NOTHING_MATCHED, SCHEMA_MISMATCH, UNREACHABLE = range(6)

T = TypeVar("T")


class Output(str, Enum):  # noqa: UP042  (typer shows the values of a str enum; StrEnum would do, from 3.11 on, the same)
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


DsnOption = Annotated[
    str | None,
    typer.Option("--dsn", metavar="DSN", help="PostgreSQL, as a URL; RELAY_DISPATCH_DSN where not given."),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print the result on stdout.")]


def resolve_dsn(dsn: str | None, *, settings: str = "RELAY_DISPATCH_DSN") -> str:
    """Return the DSN of the option, else of the environment; `settings` are those that a person may set.

    Raises: ConfigurationError where there is none.
    """
    from dispatch_core.settings import CoreSettings

    found = CoreSettings.load(dsn=dsn).dsn
    if found is None or not found.get_secret_value():
        raise ConfigurationError(f"no DSN: give --dsn or set {settings}")
    return found.get_secret_value()


def resolve_listen_dsn(dsn: str | None) -> str | None:
    """Return the DSN for LISTEN of the option, else of the environment; None where it is that of the statements."""
    from dispatch_core.settings import CoreSettings

    found = CoreSettings.load(listen_dsn=dsn).listen_dsn
    return (found.get_secret_value() or None) if found is not None else None


def run_async(function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """Run a coroutine function to its end, or until SIGTERM: then SystemExit is raised."""
    return run_until_sigterm(partial(function, *args, **kwargs))


def note(text: str) -> None:
    """Tell the person something that is not the result."""
    print(text, file=sys.stderr, flush=True)


def emit_json(document: object) -> None:
    """Print a result as one JSON document; dataclasses, ids and times are known."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False, default=_jsonable)
    sys.stdout.write("\n")


def result_console() -> Console:
    """Return a console for results on stdout."""
    # Without a terminal the width is unknown, and 80 columns would cut ids that somebody wants to copy.
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200, highlight=False)


def emit_table(columns: Sequence[str | Column], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Print a result as a table; None is an empty cell, and a `Text` has its own style."""
    console = result_console()
    table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*("" if cell is None else cell if isinstance(cell, Text) else _cell(cell) for cell in row))
    console.print(table)


def _cell(value: object) -> str:
    from rich.markup import escape

    if isinstance(value, datetime):
        return value.astimezone().isoformat(sep=" ", timespec="seconds")
    return escape(str(value))


def _jsonable(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form here")


def foreseen_in(error: BaseException) -> RelayDispatchError | None:
    """Return the foreseeable error that this is, or that a task group has wrapped."""
    if isinstance(error, RelayDispatchError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := foreseen_in(inner)) is not None), None)
    return None


def exit_code(error: RelayDispatchError) -> int:
    """Return the exit code that an error stands for."""
    if isinstance(error, DatabaseUnavailableError):
        return UNREACHABLE
    if isinstance(error, SchemaMismatchError):
        return SCHEMA_MISMATCH
    if isinstance(error, UnknownJobError):
        return NOTHING_MATCHED
    if isinstance(error, (InvalidInputError, ConfigurationError, TenancyUnboundError)):
        return USAGE
    return FAILED


def report_error(error: RelayDispatchError) -> None:
    """Print an error for a person, and the statements that would mend it."""
    text = str(error)
    if isinstance(error, MigrationRightsError):
        for statement in error.statements:
            text = text.replace(statement, "")
        text = " ".join(text.split())
    # The code is what documentation and other programs know the error by.
    note(f"error: {error.code}: {text.strip()}")
    if isinstance(error, MigrationRightsError):
        for statement in error.statements:
            note(f"  {statement}")
