"""What the commands for people say and ask: ages, amounts, questions, progress, and text that a terminal only shows."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from typing import Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dispatch_core.cli.common import FAILED, note

__all__ = [
    "age",
    "amount",
    "ask",
    "harmless",
    "json_text",
    "moment",
    "must_be_answerable",
    "parse_age",
    "pretty_json",
    "printable",
    "progress",
    "span",
]

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)\Z")


def parse_age(value: str) -> timedelta:
    """Return an age: a number of seconds, minutes, hours, days or weeks, with the letter of that."""
    found = _AGE.match(value.strip().lower())
    if found is None:
        raise typer.BadParameter(f"{value!r} is no age: 90s, 15m, 12h, 7d or 2w")
    if not found[2]:  # whoever means days must not remove what was parked half a minute ago
        raise typer.BadParameter(f"{found[1]} has no unit; {found[1]}d?")
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > 10_000 * 86400:
        raise typer.BadParameter(f"{value!r} is too long")
    return timedelta(seconds=seconds)


def span(value: timedelta) -> str:
    """Show an age as a person gives one, exactly: in the largest unit of which it is a whole number."""
    seconds = value.total_seconds()
    for count, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds and seconds % count == 0:
            return amount(int(seconds // count), unit)
    return f"{seconds:,g} second" + "s" * (seconds != 1)


def age(value: timedelta | None) -> str:
    """Show how long something took, in one unit."""
    if value is None:
        return ""
    seconds = max(value.total_seconds(), 0.0)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:,.0f} days"


def amount(count: int, what: str = "event", plural: str | None = None, *, most: int | None = None) -> str:
    """Show a count with its noun; one that reached `most` was counted no further."""
    more = "more than " if most is not None and count >= most else ""
    return f"{more}{count:,} {what if count == 1 and not more else plural or what + 's'}"


def ask(question: str, *, yes: bool) -> None:
    """Go on where a person says so.

    Raises: typer.BadParameter where nobody can be asked; typer.Exit where the answer is no.
    """
    if yes:
        return
    must_be_answerable(yes=yes)
    # Not typer.confirm, which writes to stdout all the same, where the result goes.
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        note("nothing was changed")
        raise typer.Exit(FAILED)


def must_be_answerable(*, yes: bool) -> None:
    """Refuse, before anything is done, what is to be asked for where nobody can be asked."""
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("without a terminal nobody can be asked: give --yes")


@contextmanager
def progress(text: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show how far something is, where a person looks on; lend what is to be told how many are done.

    `total` None: nobody knows how many there will be.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total)
        # There may be more of them by now than were counted.
        yield lambda done: bar.update(task, completed=done, total=total and max(total, done))


def json_text(document: object, *, indent: int | None = 2) -> str:
    """Return a document as JSON text that a terminal does not obey; dataclasses, ids and times are known."""
    return harmless(json.dumps(document, indent=indent, ensure_ascii=False, default=_plain))


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value.isoformat() if isinstance(value, datetime) else str(value)


def harmless(text: str) -> str:
    """Escape, within the strings of JSON text, what a terminal would obey; it reads as the same value."""
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[][{},:]|[^][{},:"\s]+')


def pretty_json(text: str) -> str:
    """Indent JSON text without reading its numbers, some of which no Python number can hold."""
    parts: list[str] = []
    depth = 0
    tokens = _TOKEN.findall(text)
    for place, token in enumerate(tokens):
        before = tokens[place - 1] if place else ""
        if token in "]}":
            depth -= 1
            if before not in ("[", "{"):
                parts.append("\n" + "  " * depth)
        elif before in ("[", "{", ","):
            parts.append("\n" + "  " * depth)
        elif before == ":":
            parts.append(" ")
        parts.append(token)
        if token in "[{":
            depth += 1
    return "".join(parts)


def moment(value: datetime, precision: str = "seconds") -> str:
    """Show a time as it is here."""
    return value.astimezone().replace(tzinfo=None).isoformat(sep=" ", timespec=precision)


def printable(text: str, *, keep: str = "") -> str:
    """Return text that a terminal shows and does not obey: what others have stored may be anything."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep or unicodedata.category(char) == "Zs" else _escaped(char)
        for char in text
    )


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
