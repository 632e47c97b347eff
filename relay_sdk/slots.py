"""The relay's slots: one for each job that it has in hand.

A slot is taken when a job is claimed and is free again when the database has *acknowledged* what became of it, and not
before its thread, if it has one, has really ended. A claim asks for as many jobs as there are free slots.

    WAITING -> RUNNING -> ENDED        claimed, handler started, handler over and its end on the way to the database
    WAITING -> ENDED                   never started: unknown operation, past the deadline, the relay stops
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import anyio

from dispatch_core.models import Completion, DispatchJob, MalformedJob, PutBack
from relay_sdk.registry import Handler

__all__ = ["ENDED", "RUNNING", "WAITING", "Cause", "Held", "Slot", "Slots"]

WAITING: Final = 0
RUNNING: Final = 1
ENDED: Final = 2


class Cause(enum.Enum):
    """Why a handler was cancelled by the relay."""

    SHUTDOWN = "the relay stops"
    DEADLINE = "the job's deadline passed"
    TIMEOUT = "the handler's timeout passed"
    LOST = "the claim is not this relay's any more"


class Slot:
    """One job in hand. All times are of the monotonic clock."""

    __slots__ = (
        "cause",
        "deadline",
        "end",
        "entered",
        "handler",
        "job",
        "limit",
        "rang",
        "renewed_at",
        "reply_bytes",
        "started_at",
        "state",
        "task",
        "thread_runs",
        "timer",
    )

    def __init__(self, job: DispatchJob | MalformedJob, renewed_at: float, deadline: float) -> None:
        self.job = job
        self.renewed_at = renewed_at
        """When the lease was asked for last: never later than the database granted it."""
        self.deadline = deadline
        """When the job's deadline has passed on the database's clock for certain."""
        self.limit = deadline
        """When the handler is to be cancelled: the deadline or its timeout, whichever is first."""
        self.state = WAITING
        self.entered = False
        """Whether its task has begun: one that has not is not cancelled, but finds its cause."""
        self.cause: Cause | None = None
        self.handler: Handler | None = None
        self.started_at = 0.0
        self.task: asyncio.Task[None] | None = None
        self.thread_runs = False
        self.timer: asyncio.TimerHandle | None = None
        self.end: Completion | PutBack | None = None
        """What is to be written of it, once it has ended."""
        self.reply_bytes = 0
        """How large the headers and the body in `end` are."""
        self.rang = False
        """Whether the statement that wrote its end has rung for it."""


Of = TypeVar("Of")


class Held(Generic[Of]):
    """All slots of one sort of a relay: of jobs, or of chunks."""

    __slots__ = ("_changed", "_held", "_on_free", "capacity")

    def __init__(self, capacity: int, on_free: Callable[[], None]) -> None:
        self.capacity = capacity
        self._on_free = on_free
        # A dict for its order: the jobs claimed first come first.
        self._held: dict[Of, None] = {}
        self._changed: anyio.Event | None = None

    @property
    def free(self) -> int:
        """How many jobs may be claimed; negative where a claim whose reply was lost brought more."""
        return self.capacity - len(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Of]:
        return iter(self._held)

    def __contains__(self, slot: Of) -> bool:
        return slot in self._held

    def take(self, slot: Of) -> None:
        self._held[slot] = None

    def take_all(self, slots: Sequence[Of]) -> None:
        self._held.update(dict.fromkeys(slots))

    def give_all(self, slots: Iterable[Of]) -> None:
        """Free slots, and tell of it once. Idempotent: yes."""
        held = self._held
        before = len(held)
        for slot in slots:
            held.pop(slot, None)
        if len(held) < before:
            self._on_free()
            if self._changed is not None:
                self._changed.set()

    def give(self, slot: Of) -> None:
        """Free a slot. Idempotent: yes."""
        if slot in self._held:
            del self._held[slot]
            self._on_free()
            if self._changed is not None:
                self._changed.set()

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait until `predicate` holds; it is asked again whenever a slot is freed or `touch` is called."""
        while not predicate():
            if self._changed is None or self._changed.is_set():
                self._changed = anyio.Event()
            await self._changed.wait()

    def touch(self) -> None:
        """Let those who wait in `until` look again."""
        if self._changed is not None:
            self._changed.set()


Slots: TypeAlias = Held[Slot]
"""Those of jobs."""
