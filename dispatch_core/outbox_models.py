"""The values of the outbox: what is written, what a sink is given, what a drain reports.

Those that there are one of for each event are not frozen, which would double what it costs to make one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable
from uuid import UUID

__all__ = [
    "Batch",
    "BatchSink",
    "ClaimedEvent",
    "ClaimedEvents",
    "DrainReport",
    "DueWork",
    "Group",
    "OutboxEvent",
    "OutboxMessage",
    "OutboxPark",
    "OutboxRetry",
    "SettledEvent",
    "Sink",
    "Verdict",
]

Group: TypeAlias = tuple[str, str]
"""A tenant and a kind: what takes turns."""


@dataclass(frozen=True, slots=True)
class OutboxMessage:
    """An event to be written: `payload` is any JSON value, `delay` seconds or a timedelta.

    Events of one `key` are delivered one after the other; None: in any order.
    """

    kind: str
    payload: Any
    key: str | None = None
    delay: float | timedelta | None = None


@dataclass(slots=True)
class OutboxEvent:
    """An event as its sink is given it. It may come more than once: `event_id` is the same each time."""

    event_id: UUID
    tenant_id: str
    kind: str
    key: str | None
    payload: Any
    created_at: datetime
    attempts: int
    """How many deliveries of it have failed before this one."""


Sink: TypeAlias = Callable[[OutboxEvent], Awaitable[object]]
"""Delivers one event: returns when that is done; raises where it was not."""


@runtime_checkable
class BatchSink(Protocol):
    """A sink that takes the events of a batch together: one call in place of one for each."""

    async def __call__(self, event: OutboxEvent, /) -> object: ...

    async def deliver_many(self, events: Sequence[OutboxEvent], /) -> Sequence[Exception | None]:
        """Deliver events; for each, None where that is done, or what `__call__` would raise."""
        ...


class OutboxRetry(Exception):  # noqa: N818  (as OutboxPark)
    """Raised by a sink: this delivery has failed, and the next one is not to be made before `delay` seconds."""

    def __init__(self, reason: str, delay: float) -> None:
        super().__init__(reason)
        self.delay = delay


class OutboxPark(Exception):  # noqa: N818  (a sink's answer, not a fault)
    """Raised by a sink: give this event up now, whatever its attempts; a person will decide."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What one drain did. `claimed` is the sum of the five below it."""

    claimed: int = 0
    delivered: int = 0
    failed: int = 0
    """They are tried again, after a pause."""
    parked: int = 0
    """Given up, until a person decides."""
    released: int = 0
    """Not tried, or cut off: open again at once, with nothing counted."""
    stale: int = 0
    """Another drainer has them by now; what became of them here was not written."""
    expired: int = 0
    """Parked without being claimed: they were first tried too long ago."""
    reclaimed: int = 0
    """Taken back from drainers that did not answer in time; those parked by that not counted."""


# --- what crosses the seam to SQL ----------------------------------------------------------------


@dataclass(slots=True)
class ClaimedEvent:
    """An event in this drainer's hands; the payload is still JSON text."""

    event_id: UUID
    tenant_id: str
    kind: str
    key: str | None
    payload: str
    fence: int
    attempts: int
    created_at: datetime
    available_at: datetime


@dataclass(frozen=True, slots=True)
class ClaimedEvents:
    """What a claim returned."""

    events: list[ClaimedEvent]
    expired: list[tuple[str, UUID]]
    """Parked instead: tenant and event id."""
    more: set[Group]
    """Where there may be more to claim."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one claim that are to be delivered, and then settled by the name that claimed them."""

    claimed_by: str
    events: list[ClaimedEvent]
    since: float
    """By `anyio.current_time`, before the claim was sent."""
    expired: int = 0
    reclaimed: int = 0


@dataclass(frozen=True, slots=True)
class DueWork:
    """What `relay.outbox_due` has found and done."""

    due: list[Group]
    later: timedelta | None
    """Until the first event of the groups that have nothing due now."""
    reclaimed: int
    parked: int
    promoted: int
    look: dict[str, str]
    """Tenant -> the key behind which the search for lost turns goes on; '' where it begins anew."""
    start: str | None
    """The tenant behind which the next search for groups begins; None: all were looked at."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said of one claimed event."""

    outcome: Literal["delivered", "failed", "park", "release"]
    error: str | None = None
    delay: timedelta | None = None


@dataclass(frozen=True, slots=True)
class SettledEvent:
    """What came of a verdict: applied or stale, and where the event stands: gone, ready, parked, waiting, claimed."""

    outcome: Literal["applied", "stale"]
    state: str
