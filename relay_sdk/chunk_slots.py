"""The chunks in hand: one slot for each, taken by a claim and free when the database has told what became of it.

    WAITING -> RUNNING -> ENDED        claimed, handler started, handler over and its end on the way to the database
    WAITING -> ENDED                   never started: the relay stops, or the lease was lost before

All times are of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from dispatch_core.durable_models import ChunkOutcome, ClaimedChunk, RowError
from relay_sdk.chunk_registry import ChunkHandler
from relay_sdk.slots import RUNNING, WAITING, Held

if TYPE_CHECKING:
    from relay_sdk.chunk_context import ChunkContext

__all__ = ["ChunkEnd", "ChunkSlot", "ChunkSlots", "Done", "Failed", "Released", "Settled", "StopReason"]


class StopReason(StrEnum):
    """Why the handler of a chunk is to stop. After the last two nothing that it does counts any more."""

    DRAIN = "drain"
    """The relay stops: what is done by the end of the grace period counts, the rest is for another relay."""
    PAUSED = "paused"
    """The job was paused: the chunk is for whoever comes when it is resumed."""
    CANCELLED = "cancelled"
    """The job was cancelled."""
    LEASE_LOST = "lease_lost"
    """The lease ran out, or the chunk was taken back."""

    @property
    def is_final(self) -> bool:
        """Whether every write for the chunk is refused from now on."""
        return self in _FINAL


_FINAL: Final = frozenset({StopReason.CANCELLED, StopReason.LEASE_LOST})


@dataclass(slots=True)
class Done:
    """The chunk is done. `row_errors` are stored with it, in one transaction."""

    outcome: ChunkOutcome
    row_errors: list[RowError]


@dataclass(slots=True)
class Failed:
    """The attempt failed. `delay` (seconds) is until the next one, if there is to be one."""

    message: str
    retryable: bool
    delay: float
    row_errors: list[RowError]


@dataclass(slots=True)
class Released:
    """The chunk is for another, with its checkpoint, and this attempt was none."""


@dataclass(slots=True)
class Settled:
    """The handler has completed the chunk itself. `last`: nothing else of the job waits."""

    last: bool


ChunkEnd: TypeAlias = Done | Failed | Released | Settled | None
"""What is to be written of a chunk whose handler is over; None: nothing, because it is not ours any more."""


class ChunkSlot:
    """One chunk in hand."""

    __slots__ = (
        "advanced",
        "cancel_at",
        "chunk",
        "completing",
        "context",
        "end",
        "entered",
        "handler",
        "lease",
        "lost_at",
        "renewed_at",
        "rows_done",
        "rows_failed",
        "rows_told",
        "said",
        "settled_last",
        "started_at",
        "state",
        "stop",
        "task",
        "timed_out",
        "timeout_at",
        "unsure",
        "was_cancelled",
    )

    def __init__(self, chunk: ClaimedChunk, handler: ChunkHandler, renewed_at: float, lease_seconds: float) -> None:
        self.chunk = chunk
        self.lease: Final = chunk.lease
        self.handler: Final = handler
        self.renewed_at = renewed_at
        """When what renewed the lease last was sent: never later than the database granted it."""
        self.lost_at = renewed_at + lease_seconds
        """When the lease is lost for certain."""
        self.timeout_at = math.inf
        self.cancel_at = math.inf
        """When a handler that was told to stop is cancelled."""
        self.state = WAITING
        self.entered = False
        """Whether its task has begun: one that has not is not cancelled, but finds why it is to stop."""
        self.started_at = 0.0
        self.task: asyncio.Task[None] | None = None
        self.context: ChunkContext | None = None
        self.stop: StopReason | None = None
        self.timed_out = False
        self.was_cancelled = False
        """Whether this relay has cancelled the handler."""
        self.completing = False
        """Whether the handler has completed the chunk in a transaction whose commit was not seen yet."""
        self.said: Done | None = None
        """What a completion by itself says that is under way: however the handler ends now, the chunk ends so."""
        self.settled_last: bool | None = None
        """Of a chunk that the handler has completed in a transaction that is committed: whether it was the last."""
        self.unsure = False
        """Whether nobody knows what became of a transaction of the handler's: this attempt writes nothing more."""
        # As the last checkpoint has them.
        self.rows_done = chunk.rows_done
        self.rows_failed = chunk.rows_failed
        self.rows_told = chunk.rows_done
        """The last number of rows that the database was told."""
        self.advanced = self.rows_done > 0
        self.end: ChunkEnd = None

    @property
    def is_running(self) -> bool:
        """Whether its handler runs."""
        return self.state is RUNNING

    @property
    def may_be_lost(self) -> bool:
        """Whether the chunk is under its lease still: not completed, perhaps, by the handler itself."""
        return self.state is RUNNING and not self.completing and self.said is None and self.settled_last is None

    def renewed(self, sent_at: float, lease_seconds: float) -> None:
        """Note that a statement that was sent then has renewed the lease."""
        if sent_at > self.renewed_at:
            self.renewed_at = sent_at
            self.lost_at = sent_at + lease_seconds


ChunkSlots: TypeAlias = Held[ChunkSlot]
