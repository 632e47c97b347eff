"""What `relay-dispatch outbox` reads from its arguments, and how it shows events."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.highlighter import JSONHighlighter
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from dispatch_core.cli.common import FAILED, emit_table, note, result_console

__all__ = [
    "SHOWN_CHARS",
    "age",
    "amount",
    "ask",
    "emit_event_json",
    "emit_events_json",
    "event_document",
    "must_be_answerable",
    "parse_age",
    "print_event",
    "print_events",
    "print_status",
    "printable",
    "progress",
    "span",
    "status_document",
]

STYLES: Final = {"ready": "bold cyan", "waiting": "dim", "claimed": "bold yellow", "parked": "bold red"}
SHOWN_CHARS: Final = 80
"""Of a payload and of an error, in a list."""
NARROW: Final = 40
"""Room for payload and error below which other columns are left out."""

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


# --- status ---------------------------------------------------------------------------------------------------------


def status_document(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `status` as plain values."""
    counts = {"ready": row["due"], **{name: row[name] for name in ("later", "waiting", "claimed", "stale", "parked")}}
    ages = {"due_for": "oldest", "age": "age", "claimed_for": "claimed_for", "parked_for": "parked_for"}
    return {
        "tenant": row["tenant"],
        "kind": row["kind"],
        **counts,
        "max_attempts": row["attempts"],
        **{f"{name}_seconds": row[source] and row[source].total_seconds() for name, source in ages.items()},
    }


def print_status(rows: Sequence[Mapping[str, Any]], limit: int) -> None:
    """Print what there is of each tenant and kind, that which needs a person first."""
    ordered = sorted(rows, key=lambda row: (not row["parked"], not row["stale"], row["tenant"], row["kind"]))
    numbers = ("ready", "later", "waiting", "claimed", "parked", "attempts", "due for", "oldest")
    columns: list[str | Column] = ["tenant", "kind"]
    columns += [Column(name, justify="right", no_wrap=True) for name in numbers]
    emit_table(columns, [_status_cells(row) for row in ordered[:limit]])
    if len(ordered) > limit:
        note(f"… and {len(ordered) - limit:,} more rows: --limit")


def _status_cells(row: Mapping[str, Any]) -> list[object]:
    claimed = f"{row['claimed']:,}" + (f" ({row['stale']:,} stale)" if row["stale"] else "")
    return [
        Text(printable(row["tenant"])),
        Text(printable(row["kind"])),
        *(f"{row[name]:,}" for name in ("due", "later", "waiting")),
        Text(claimed, "bold yellow" if row["stale"] else ""),
        Text(f"{row['parked']:,}", "bold red" if row["parked"] else ""),
        row["attempts"],
        age(row["oldest"]),
        age(row["age"]),
    ]


# --- list and show --------------------------------------------------------------------------------------------------


def event_document(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event of a list as plain values; `payload` is the beginning of its JSON text."""
    return {name: _short(value) if name == "payload" and value else value for name, value in row.items()}


def print_events(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a list of events: no column in which there would be nothing, and fewer where the terminal is narrow."""
    columns: dict[str, list[Any]] = {
        "event": [str(row["event_id"]) for row in rows],
        **{name: [printable(row[name] or "") for row in rows] for name in ("tenant", "kind", "key")},
        "state": [row["state"] for row in rows],
        "attempts": [str(row["attempts"]) for row in rows],
        "written": [_moment(row["created_at"]) for row in rows],
        "due / since": [_moment(row["parked_at"] or row["claimed_at"] or row["available_at"]) for row in rows],
    }
    if len({row["tenant"] for row in rows}) == 1:
        del columns["tenant"]
    if not any(columns["key"]):
        del columns["key"]
    errors = [_cut(row["last_error"]) for row in rows]
    payloads = [_cut(row["payload"]) or f"({row['payload_bytes']:,} bytes)" for row in rows]
    wanted = _width(payloads) + _width(errors)
    # An id that is cut cannot be copied; so it is the beginning of the others that a narrow terminal shows.
    for name in ("written", "due / since", "attempts", "key"):
        if _room(columns) < min(wanted, NARROW):
            columns.pop(name, None)
    room = _room(columns)
    texts: dict[str, list[str]] = {"payload": payloads, "last error": errors}
    if not any(errors):
        del texts["last error"]
    elif room < NARROW // 2:
        del texts["payload"]
    share = max(room if len(texts) == 1 else min(_width(payloads), max(room // 2, room - _width(errors))), 10)
    for name, limit in zip(texts, (share, max(room - share, 10)), strict=False):
        texts[name] = [_short(text, limit) for text in texts[name]]
    columns["state"] = [Text(state, STYLES.get(state, "")) for state in columns["state"]]
    names = [*columns, *texts]
    emit_table(
        [
            Column(
                name, no_wrap=True, justify="right" if name == "attempts" else "left", min_width=36 * (name == "event")
            )
            for name in names
        ],
        list(zip(*columns.values(), *(map(Text, cells) for cells in texts.values()), strict=True)),
    )


def _width(cells: Sequence[str]) -> int:
    return max(map(cell_len, cells), default=0)


def _room(columns: Mapping[str, Sequence[str]]) -> int:
    """Return how wide what comes behind these columns may be."""
    return result_console().width - sum(max(_width(cells), len(name)) + 3 for name, cells in columns.items()) - 3


def _cut(text: str | None) -> str:
    return _short(printable(text or ""))


def _short(text: str, limit: int = SHOWN_CHARS) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def print_event(row: Mapping[str, Any]) -> None:
    """Print all there is of one event, its payload whole."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")

    def line(name: str, value: object) -> None:
        if value is not None:
            grid.add_row(name, value if isinstance(value, Text) else Text(printable(str(value))))

    for name in ("event_id", "tenant", "kind", "key"):
        line(name.removesuffix("_id"), row[name])
    line("state", Text(row["state"], STYLES.get(row["state"], "")))
    line("attempts", row["attempts"])
    line("suspect", "its last claim was never answered for: it is claimed alone" if row["suspect"] else None)
    line("last error", row["last_error"])
    for name in ("created", "available", "first_claimed", "claimed", "parked"):
        moment = row[f"{name}_at"]
        line({"created": "written"}.get(name, name).replace("_", " "), moment and _moment(moment, "milliseconds"))
    line("claimed by", row["claimed_by"])
    line("fence", row["fence"])
    console = result_console()
    console.print(grid)
    console.print(JSONHighlighter()(Text(printable(pretty_json(row["payload"]), keep="\n"))), soft_wrap=True)


def emit_events_json(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print events of a list as one JSON document."""
    sys.stdout.write(_harmless(json.dumps([event_document(r) for r in rows], indent=2, **_DUMPED)) + "\n")


def emit_event_json(row: Mapping[str, Any]) -> None:
    """Print one event as a JSON document, its payload with every digit that the database has."""
    document = {name: value for name, value in row.items() if name != "payload"}
    text = f'{json.dumps(document, indent=2, **_DUMPED)[:-2]},\n  "payload": {row["payload"]}\n}}\n'
    sys.stdout.write(_harmless(text))


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


_DUMPED: Final[dict[str, Any]] = {"ensure_ascii": False, "default": _plain}


def _harmless(text: str) -> str:
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


def _moment(value: datetime, precision: str = "seconds") -> str:
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
