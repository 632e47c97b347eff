"""What the demo shows while it runs, on stderr: a live bar for a person, now and then a line for a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from dispatch_core.models import DispatchStatus
from gateway_sdk.demo.traffic import Ending

__all__ = ["Show"]

LINE_SECONDS = 5.0


class Show:
    """Steps, then the traffic."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self.seconds: dict[str, float] = {}
        self._counts = dict.fromkeys(DispatchStatus, 0)
        self._total = self._sent = self._ended = self._lost = 0

    @contextmanager
    def step(self, name: str, doing: str, done: str) -> Iterator[None]:
        """Show a step while it lasts, then how long it took; keep that under `name`."""
        started = time.perf_counter()
        if self._console.is_terminal:
            with self._console.status(doing):
                yield
        else:
            yield
        self.seconds[name] = time.perf_counter() - started
        self._console.print(Text.assemble(("✓ ", "green"), done, (f"  {self.seconds[name]:.1f} s", "dim")))

    def note(self, text: str, mark: str = "-", style: str = "yellow") -> None:
        """Show a line."""
        self._console.print(Text.assemble((f"{mark} ", style), text), soft_wrap=True)

    @contextmanager
    def traffic(self, total: int) -> Iterator[None]:
        """Show requests as they are sent and as they end."""
        self._total = total
        self._progress: Progress | None = None
        self._next_line = time.monotonic() + LINE_SECONDS
        if not self._console.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True, expand=True) as progress:
            self._progress = progress
            self._sending = progress.add_task("sent ", total=total, detail="")
            self._ending = progress.add_task("ended", total=total, detail="")
            yield

    def sent(self) -> None:
        """Count one more request that the gateway has been given."""
        self._sent += 1
        if self._progress is not None:
            self._progress.update(self._sending, completed=self._sent)

    def ended(self, ending: Ending) -> None:
        """Count one more that has ended."""
        self._ended += 1
        if ending.status is None:
            self._lost += 1
        else:
            self._counts[ending.status] += 1
        if self._progress is not None:
            self._progress.update(self._ending, completed=self._ended, detail=self._detail(markup=True))
        elif not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            self._console.print(f"  {self.standing()} ({self._detail(markup=False)})")

    def standing(self) -> str:
        """Return how far the traffic is."""
        return f"{self._sent} of {self._total} sent, {self._ended} ended"

    def stopped(self) -> None:
        """Say that it was ended before its time, and that all is stopped."""
        where = f": {self.standing()}" if self._total else ""
        self.note(f"stopped{where}", "✗", "red")

    def _detail(self, *, markup: bool) -> str:
        parts = [
            (self._counts[DispatchStatus.SUCCEEDED], "succeeded", "green"),
            (self._counts[DispatchStatus.FAILED], "failed", "red"),
            (self._counts[DispatchStatus.EXPIRED], "expired", "yellow"),
            (self._lost, "lost", "bold red"),
        ]
        shown = [(count, word, style) for count, word, style in parts if count or word != "lost"]
        if markup:
            return "  ".join(f"[{style}]{count} {word}[/]" for count, word, style in shown)
        return ", ".join(f"{count} {word}" for count, word, _ in shown)
