"""How `relay-dispatch durable` shows jobs, chunks, events and bad rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from rich.highlighter import JSONHighlighter
from rich.table import Column, Table
from rich.text import Text

from dispatch_core.cli.common import emit_table, result_console
from dispatch_core.durable_models import (
    ChunkStatus,
    DurableChunk,
    DurableJob,
    JobEvent,
    JobProgress,
    JobStatus,
    RowError,
)
from gateway_sdk.cli_words import age, amount, moment, pretty_json, printable

__all__ = [
    "STYLES",
    "chunk_document",
    "chunks_text",
    "error_line",
    "event_line",
    "is_over",
    "job_document",
    "print_chunk",
    "print_chunks",
    "print_job",
    "print_jobs",
    "progress_document",
    "progress_text",
    "rows_text",
    "took",
]

STYLES: Final[Mapping[str, str]] = {
    "running": "bold cyan",
    "paused": "bold yellow",
    "retry": "yellow",
    "needs_review": "bold magenta",
    "completed": "bold green",
    "done": "green",
    "completed_with_errors": "bold yellow",
    "failed": "bold red",
    "cancelled": "dim",
}
SHOWN_CHARS: Final = 60
"""Of a payload, an error or a detail, in a list."""
WHOLE_CHARS: Final = 4000
"""Of a payload or another value by itself."""
ORDER: Final = (
    *(ChunkStatus.NEEDS_REVIEW, ChunkStatus.FAILED, ChunkStatus.CANCELLED, ChunkStatus.DONE, ChunkStatus.RUNNING),
    *(ChunkStatus.RETRY, ChunkStatus.PENDING),
)


# --- how far a job is -------------------------------------------------------------------------------------------------


def rows_text(progress: JobProgress) -> str:
    """Say how many rows are over; '' where nothing is known of rows."""
    over = progress.rows_done + progress.rows_failed
    if not over and not progress.rows_total:
        return ""
    text = f"{over:,} of {progress.rows_total:,} rows" if progress.rows_total else amount(over, "row")
    return f"{text}, {progress.rows_failed:,} of them bad" if progress.rows_failed else text


def chunks_text(progress: JobProgress) -> str:
    """Say how many chunks stand how; those that want to be looked at come first."""
    parts = [f"{progress.chunks[status]:,} {status.value}" for status in ORDER if progress.chunks.get(status)]
    return ", ".join(parts) or "no chunks"


def progress_text(progress: JobProgress) -> str:
    """Say all of it in one line."""
    fraction = progress.fraction
    parts = [progress.status.value, *([] if fraction is None else [f"{fraction:6.1%}"])]
    return f"{'  '.join(parts)}  {'; '.join(filter(None, (rows_text(progress), 'chunks: ' + chunks_text(progress))))}"


def progress_document(progress: JobProgress) -> dict[str, Any]:
    """Return it as plain values."""
    return asdict(progress) | {"fraction": progress.fraction}


def is_over(job: DurableJob) -> bool:
    """Tell whether nothing more comes of a job by itself: it has ended, or waits for a person."""
    return job.status.is_terminal or job.status is JobStatus.NEEDS_REVIEW


# --- jobs -------------------------------------------------------------------------------------------------------------


def job_document(job: DurableJob) -> dict[str, Any]:
    """Return a job as plain values, without its params."""
    document = {"tenant": job.tenant_id, **asdict(job), "fraction": job.progress.fraction, "chunk_counts": job.chunks}
    return {name: value for name, value in document.items() if name not in ("tenant_id", "params", "chunks")}


def print_jobs(jobs: Sequence[DurableJob]) -> None:
    """Print a list of jobs; a column in which there would be nothing is left out."""
    rows = [_job_cells(job) for job in jobs]
    left_out = {"tenant"} if len({job.tenant_id for job in jobs}) == 1 else set()
    left_out |= {name for name in ("bad rows", "took", "last error") if not any(cells[name] for cells in rows)}
    rows = [{name: cell for name, cell in cells.items() if name not in left_out} for cells in rows]
    right = ("done", "bad rows", "took")
    columns = [
        Column(name, no_wrap=True, justify="right" if name in right else "left", min_width=36 * (name == "job"))
        for name in rows[0]
    ]
    emit_table(columns, [list(cells.values()) for cells in rows])


def _job_cells(job: DurableJob) -> dict[str, Any]:
    progress = job.progress
    fraction = progress.fraction
    return {
        "job": str(job.job_id),
        "tenant": Text(printable(job.tenant_id or "")),
        "kind": Text(printable(job.kind)),
        "status": Text(job.status.value, STYLES.get(job.status, "")),
        "done": "" if fraction is None else f"{fraction:.1%}",
        "bad rows": f"{job.rows_failed:,}" if job.rows_failed else "",
        "chunks": Text(chunks_text(progress)),
        "created": moment(job.created_at),
        "took": took(job),
        "last error": Text(cut(job.last_error or "")),
    }


def took(job: DurableJob) -> str:
    """Show how long a job ran, or has been running."""
    if job.started_at is None:
        return ""
    ran = (job.ended_at or max(job.counted_at, job.started_at)) - job.started_at
    return f"{ran.total_seconds():.1f} s" if ran.total_seconds() < 60 else age(ran)


def print_job(job: DurableJob) -> None:
    """Print all there is of a job, but its chunks."""
    progress = job.progress
    grid = _Grid()
    for name in ("job_id", "tenant_id", "kind"):
        grid.line(name.removesuffix("_id"), getattr(job, name))
    grid.line("status", Text(job.status.value, STYLES.get(job.status, "")))
    if progress.fraction is not None:
        grid.line("done", f"{progress.fraction:.1%}")
    grid.line("rows", rows_text(progress) or None)
    grid.line("chunks", f"{job.chunks_total:,}: {chunks_text(progress)}" if job.chunks_total else "none")
    grid.line("last error", job.last_error)
    grid.line(
        "a lost chunk", "is run again" if job.idempotent else "waits for a person: it must not be run twice unasked"
    )
    grid.line("attempts", f"at most {job.max_attempts:,} of a chunk")
    grid.line("priority", job.priority or None)
    grid.line("by", job.created_by)
    for name in ("created", "started", "ended"):
        at: datetime | None = getattr(job, f"{name}_at")
        grid.line(name, at and moment(at, "milliseconds"))
    grid.line("took", took(job) or None)
    grid.print()
    _print_json("params", job.params)


class _Grid:
    """Names and values, one a line."""

    def __init__(self) -> None:
        self._table = Table.grid(padding=(0, 2, 0, 0))
        self._table.add_column(style="dim", no_wrap=True)
        self._table.add_column(overflow="fold")

    def line(self, name: str, value: object) -> None:
        if value is not None:
            self._table.add_row(name, value if isinstance(value, Text) else Text(printable(str(value))))

    def print(self) -> None:
        result_console().print(self._table)


def _print_json(name: str, value: Any) -> None:
    if value in (None, {}):
        return
    console = result_console()
    console.print(Text(f"{name} ", "dim"), end="")
    text = printable(pretty_json(compact(value)), keep="\n")
    rest = len(text) - WHOLE_CHARS
    console.print(JSONHighlighter()(Text(text[:WHOLE_CHARS])), soft_wrap=True, end="" if rest > 0 else "\n")
    if rest > 0:
        console.print(Text(f"… and {rest:,} characters more: --json has all of it", "dim"))


# --- chunks -----------------------------------------------------------------------------------------------------------


def chunk_document(chunk: DurableChunk) -> dict[str, Any]:
    """Return a chunk as plain values. Its token stays here: it is the holder's alone."""
    return {name: value for name, value in asdict(chunk).items() if name not in ("tenant_id", "job_id")}


def print_chunks(chunks: Sequence[DurableChunk]) -> None:
    """Print a list of chunks."""
    columns: list[str | Column] = [
        Column("chunk", justify="right", no_wrap=True), Column("status", no_wrap=True),
        Column("attempts", justify="right", no_wrap=True), Column("rows", justify="right", no_wrap=True),
        Column("held by", overflow="fold"), "checkpoint", "last error",
    ]  # fmt: skip
    emit_table(columns, [_chunk_cells(chunk) for chunk in chunks])


def _chunk_cells(chunk: DurableChunk) -> list[object]:
    over = chunk.rows_done + chunk.rows_failed
    return [
        f"{chunk.seq:,}",
        Text(chunk.status.value, STYLES.get(chunk.status, "")),
        f"{chunk.attempts:,}",
        f"{over:,}/{chunk.rows_total:,}" if over or chunk.rows_total else "",
        Text(printable(chunk.claimed_by or "")),
        Text("" if chunk.checkpoint is None else cut(compact(chunk.checkpoint))),
        Text(cut(chunk.last_error or "")),
    ]


def print_chunk(chunk: DurableChunk) -> None:
    """Print all there is of one chunk: where it waits for a person, this is the evidence."""
    grid = _Grid()
    grid.line("chunk", f"{chunk.seq:,}")
    grid.line("status", Text(chunk.status.value, STYLES.get(chunk.status, "")))
    grid.line("attempts", f"{chunk.attempts:,}")
    grid.line("rows", f"{chunk.rows_done:,} done, {chunk.rows_failed:,} bad, of {chunk.rows_total:,}")
    grid.line("held by" if chunk.status is ChunkStatus.RUNNING else "last held by", chunk.claimed_by)
    for name in ("claimed", "lease_expires", "available", "ended"):
        at: datetime | None = getattr(chunk, f"{name}_at")
        words = {"lease_expires": "its lease ends", "available": "not again before"}
        grid.line(words.get(name, name), at and moment(at, "milliseconds"))
    grid.line("last error", chunk.last_error)
    grid.print()
    for name in ("payload", "checkpoint", "outcome"):
        _print_json(name, getattr(chunk, name))


# --- events and bad rows ----------------------------------------------------------------------------------------------


def event_line(event: JobEvent) -> str:
    """Say an event in one line."""
    detail = dict(event.detail) if isinstance(event.detail, dict) else {}
    seqs = detail.pop("seqs", None)
    about = "" if event.seq is None else f"chunk {event.seq:,}"
    if isinstance(seqs, list) and len(seqs) > 1:
        about = f"chunks {', '.join(map(str, seqs[:4]))}" + (f" … ({len(seqs):,})" if len(seqs) > 4 else "")
    actor = f"by {event.actor}" if event.actor else ""
    way = f"({event.channel})" if event.channel and event.channel != "reaper" else ""
    holder = f"held by {event.holder}" if event.holder else ""
    whom = " ".join(filter(None, (actor, way)))
    rest = ", ".join(f"{name}: {_value(value)}" for name, value in detail.items())
    if event.detail is not None and not isinstance(event.detail, dict):
        rest = compact(event.detail)
    parts = [moment(event.at, "milliseconds"), f"{event.type!s:<18}", about, holder, whom, rest]
    return printable("  ".join(filter(None, parts)))


def error_line(error: RowError) -> str:
    """Say what is wrong with a row in one line."""
    parts = [f"chunk {error.seq or 0:>6,}  row {error.row:>10,}  {error.code}", error.message]
    if error.data is not None:
        parts.append(cut(compact(error.data)))
    return printable("  ".join(filter(None, parts)))


def _value(value: Any) -> str:
    return value if isinstance(value, str) else compact(value)


def compact(value: Any) -> str:
    """Return a value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False)


def cut(text: str, limit: int = SHOWN_CHARS) -> str:
    """Return the beginning of a text, as something that a terminal only shows."""
    text = printable(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
