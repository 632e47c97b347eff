"""What takes part, and what comes of it."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = [
    "AbsentError",
    "CheckFailedError",
    "Contender",
    "Driver",
    "Producer",
    "Profile",
    "Result",
    "Row",
    "Sample",
    "SampleFailedError",
    "System",
    "percentile",
]

Profile = Literal["best", "default"]


class AbsentError(Exception):
    """A peer cannot take part here; its message is the reason that the table gives."""


class SampleFailedError(Exception):
    """A peer's process ended or stood still in the middle of a sample."""


class CheckFailedError(SampleFailedError):
    """A job was lost, or ran twice: the figure of that sample is worth nothing."""


class Producer(Protocol):
    """Enqueues jobs, each of which carries its number."""

    async def send(self, number: int) -> None:
        """Enqueue one job; return when it is committed."""

    async def send_many(self, numbers: Sequence[int]) -> None:
        """Enqueue a batch by the system's own batch insert; return when it is committed."""


class Driver(Protocol):
    """What the module of a system written in Python offers to child.py."""

    def producer(self, dsn: str, settings: Mapping[str, Any]) -> AbstractAsyncContextManager[Producer]:
        """Open a producer."""

    def worker(
        self, dsn: str, settings: Mapping[str, Any], handled: Callable[[int], None]
    ) -> AbstractAsyncContextManager[None]:
        """Start a worker, whose handler does nothing but call `handled` with the job's number; stop it at the end."""


@dataclass(frozen=True)
class Contender:
    """A system with one set of settings.

    `drain_jobs`: how many jobs are in its backlog in a full run; fewer where 100,000 would take longer than some
    20 seconds.
    """

    system: str
    profile: Profile
    what: str
    drain_jobs: int
    worker: Mapping[str, Any] = field(default_factory=dict)
    producer: Mapping[str, Any] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.system if self.profile == "best" else f"{self.system} (default)"


@dataclass(frozen=True)
class System:
    """One queue: how it is installed, asked and started.

    `left` says by SQL whether any job is not finished; `done` counts the jobs that ended well. `command` starts one of
    its processes; `prepare` returns the versions in use, by name.
    """

    name: str
    language: Literal["python", "javascript"]
    contenders: Sequence[Contender]
    left: str
    done: Callable[[Contender], str | None]
    prepare: Callable[[], Mapping[str, str]]
    command: Callable[[], Sequence[str]]
    install: Callable[[str, Contender], Awaitable[None]]


@dataclass(frozen=True)
class Row:
    """One line of the table. `better`: which way its figure goes."""

    name: str
    title: str
    unit: str
    better: Literal["higher", "lower"]


@dataclass(frozen=True)
class Sample:
    """What one contender reached in one round, by row, what else was seen, and the counts that were checked."""

    values: Mapping[str, float]
    checks: Mapping[str, int]
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Result:
    """All that one contender did in one scenario: its samples, and the failure that ended them, if one did."""

    contender: Contender
    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None

    def values(self, row: str) -> list[float]:
        """Return the row's figure of each round."""
        return [sample.values[row] for sample in self.samples if row in sample.values]

    def median(self, row: str) -> float | None:
        """Return the median of the rounds; None where there is none, or where a sample failed."""
        values = self.values(row)
        return None if self.failure is not None or not values else statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
