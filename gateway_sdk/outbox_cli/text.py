"""How `relay-dispatch outbox` shows events."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.cells import cell_len
from rich.highlighter import JSONHighlighter
from rich.table import Column, Table
from rich.text import Text

from dispatch_core.cli.common import emit_table, note, result_console
from gateway_sdk.cli_words import age, harmless, json_text, moment, pretty_json, printable

__all__ = [
    "SHOWN_CHARS",
    "emit_event_json",
    "emit_events_json",
    "event_document",
    "print_event",
    "print_events",
    "print_status",
    "status_document",
]

STYLES: Final = {"ready": "bold cyan", "waiting": "dim", "claimed": "bold yellow", "parked": "bold red"}
SHOWN_CHARS: Final = 80
"""Of a payload and of an error, in a list."""
NARROW: Final = 40
"""Room for payload and error below which other columns are left out."""

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
        "written": [moment(row["created_at"]) for row in rows],
        "due / since": [moment(row["parked_at"] or row["claimed_at"] or row["available_at"]) for row in rows],
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
        at = row[f"{name}_at"]
        line({"created": "written"}.get(name, name).replace("_", " "), at and moment(at, "milliseconds"))
    line("claimed by", row["claimed_by"])
    line("fence", row["fence"])
    console = result_console()
    console.print(grid)
    console.print(JSONHighlighter()(Text(printable(pretty_json(row["payload"]), keep="\n"))), soft_wrap=True)


def emit_events_json(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print events of a list as one JSON document."""
    sys.stdout.write(json_text([event_document(r) for r in rows]) + "\n")


def emit_event_json(row: Mapping[str, Any]) -> None:
    """Print one event as a JSON document, its payload with every digit that the database has."""
    document = {name: value for name, value in row.items() if name != "payload"}
    sys.stdout.write(harmless(f'{json_text(document)[:-2]},\n  "payload": {row["payload"]}\n}}\n'))
