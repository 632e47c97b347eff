"""Where `durable watch` shows how far a job is: a bar at a terminal, lines elsewhere, or documents."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import asdict
from datetime import datetime, timedelta
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dispatch_core.cli.common import Output
from dispatch_core.durable_models import DurableJob, JobEvent, JobProgress, JobStatus
from gateway_sdk.cli_words import age, json_text, printable
from gateway_sdk.durable_cli.text import STYLES, chunks_text, event_line, is_over, progress_text, rows_text, took

__all__ = ["Screen", "screen_for"]

WINDOW_SECONDS: Final = 20.0
"""Of which the pace is told."""


def screen_for(output: Output) -> Screen:
    """Return the screen for stdout as it is."""
    if output is Output.JSON:
        return _Documents()
    return _Bar() if sys.stdout.isatty() else _Lines()


class Screen(ABC):
    """Shows one job; a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    @abstractmethod
    def show(self, job: DurableJob) -> None:
        """Show how far it is."""

    @abstractmethod
    def tell(self, event: JobEvent) -> None:
        """Show something that has happened to it."""


class _Documents(Screen):
    def __init__(self) -> None:
        self._last: JobProgress | None = None

    def show(self, job: DurableJob) -> None:
        progress = job.progress
        if progress != self._last:
            self._last = progress
            document = {"at": job.counted_at, **asdict(progress), "fraction": progress.fraction}
            _say(json_text(document, indent=None))

    def tell(self, event: JobEvent) -> None:
        """Tell nothing: every line is progress."""


class _Lines(Screen):
    def __init__(self) -> None:
        self._last: JobProgress | None = None

    def show(self, job: DurableJob) -> None:
        progress = job.progress
        if progress != self._last:
            self._last = progress
            _say(f"{_clock(job.counted_at)}  {progress_text(progress)}")
        if is_over(job):
            _say(last_line(job))

    def tell(self, event: JobEvent) -> None:
        _say(_after_date(event_line(event)))


class _Bar(Screen):
    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._pace = _Pace()
        self._end = Text()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._end:
            self._console.print(self._end)

    def show(self, job: DurableJob) -> None:
        progress = job.progress
        fraction = progress.fraction
        self._pace.note(job)
        line = Table.grid(padding=(0, 2, 0, 0))
        style = STYLES.get(job.status, "")
        line.add_row(
            Text(printable(job.kind), "bold"),
            Text(job.status.value, style),
            ProgressBar(total=1.0, completed=fraction or 0.0, width=max(10, min(40, self._console.width - 70))),
            Text("" if fraction is None else f"{fraction:6.1%}", "bold"),
            Text(took(job), "dim"),
            Text("" if is_over(job) or job.status is JobStatus.PAUSED else self._pace.text(), "dim"),
        )
        below = "; ".join(filter(None, (rows_text(progress), f"chunks: {chunks_text(progress)}")))
        self._live.update(Group(line, Text(f"  {below}", "dim")), refresh=True)
        if is_over(job):
            self._end = Text(last_line(job), style)

    def tell(self, event: JobEvent) -> None:
        self._console.print(Text(_after_date(event_line(event)), "yellow"))


class _Pace:
    """How fast a job has gone these last seconds, and how long it needs at that."""

    def __init__(self) -> None:
        self._seen: deque[tuple[datetime, int]] = deque()
        self._left = 0
        self._unit = "chunks"

    def note(self, job: DurableJob) -> None:
        ended = sum(count for status, count in job.chunks.items() if status.is_terminal)
        over = job.rows_done + job.rows_failed if job.rows_total else ended
        self._unit = "rows" if job.rows_total else "chunks"
        self._left = max((job.rows_total or job.chunks_total) - over, 0)
        self._seen.append((job.counted_at, over))
        while job.counted_at - self._seen[0][0] > timedelta(seconds=WINDOW_SECONDS):
            self._seen.popleft()

    def text(self) -> str:
        (since, before), (now, over) = self._seen[0], self._seen[-1]
        seconds = (now - since).total_seconds()
        if seconds < 1 or over <= before:
            return ""
        pace = (over - before) / seconds
        return f"{pace:,.0f} {self._unit}/s, {age(timedelta(seconds=self._left / pace))} left"


def last_line(job: DurableJob) -> str:
    """Say how a job ended."""
    ran = f" in {took(job)}" if took(job) else ""
    why = f"; {printable(job.last_error)}" if job.last_error else ""
    rows = rows_text(job.progress)
    return f"{job.job_id} {job.status.value}{ran}: {rows + '; ' if rows else ''}{chunks_text(job.progress)}{why}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _clock(at: datetime) -> str:
    return f"{at.astimezone():%H:%M:%S}"


def _after_date(line: str) -> str:
    return line.split(" ", 1)[1]
