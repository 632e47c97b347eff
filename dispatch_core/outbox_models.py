"""The values of the outbox: what is written, what a sink is given, what a drain reports.

An event is one object from the claim to the settling; its payload is decoded where a sink looks at it.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable
from uuid import UUID

from dispatch_core.codec import UNSET, decode_payload, encode_payload

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
    "delay_seconds",
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


class OutboxEvent:
    """An event as its sink is given it. It may come more than once: `event_id` is the same each time.

    `attempts`: how many deliveries of it have failed before this one.
    """

    __slots__ = ("_payload", "_text", "attempts", "created_at", "event_id", "key", "kind", "tenant_id")

    def __init__(
        self,
        event_id: UUID,
        tenant_id: str,
        kind: str,
        key: str | None,
        payload: Any,
        created_at: datetime,
        attempts: int = 0,
    ) -> None:
        self.event_id = event_id
        self.tenant_id = tenant_id
        self.kind = kind
        self.key = key
        self.created_at = created_at
        self.attempts = attempts
        self._payload = payload
        self._text: str | None = None

    @property
    def payload(self) -> Any:
        """The payload, any JSON value; decoded when it is first asked for."""
        if self._payload is UNSET:
            assert self._text is not None
            self._payload = decode_payload(self._text)
        return self._payload

    @property
    def payload_text(self) -> str:
        """The payload as JSON text, for who hands it on and does not look into it."""
        if self._text is None:
            self._text = encode_payload(self._payload, sys.maxsize).decode()
        return self._text

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(event_id={self.event_id!r}, tenant_id={self.tenant_id!r}, kind={self.kind!r},"
            f" key={self.key!r}, attempts={self.attempts})"
        )


Sink: TypeAlias = Callable[[OutboxEvent], Awaitable[object]]
"""Delivers one event: returns when that is done; raises where it was not."""


@runtime_checkable
class BatchSink(Protocol):
    """A sink that takes the events of a batch together, of any tenants and kinds: one call in place of one for each."""

    async def __call__(self, event: OutboxEvent, /) -> object: ...

    async def deliver_many(self, events: Sequence[OutboxEvent], /) -> Sequence[Exception | None]:
        """Deliver events; for each, None where that is done, or what `__call__` would raise."""
        ...


def delay_seconds(delay: object) -> float:
    """Return a delay, seconds or a timedelta, as seconds. Raises: TypeError, ValueError."""
    if isinstance(delay, timedelta):
        return delay.total_seconds()
    if not isinstance(delay, int | float):
        raise TypeError(f"a delay is seconds or a timedelta, not {type(delay).__name__}")
    if delay != delay:
        raise ValueError("a delay of NaN seconds")
    return delay


class OutboxRetry(Exception):  # noqa: N818  (as OutboxPark)
    """Raised by a sink: this delivery has failed, and the next one is not to be made before `delay`.

    `delay` is seconds or a timedelta: negative is at once, and no more than a day is waited.
    """

    def __init__(self, reason: str, delay: float | timedelta) -> None:
        """Take a reason, and the delay. Raises: TypeError, ValueError where that is no length of time."""
        super().__init__(reason)
        self.delay = delay_seconds(delay)


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


class ClaimedEvent(OutboxEvent):
    """An event in this drainer's hands, as its sink gets it: one object for both."""

    __slots__ = ("fence",)

    def __init__(
        self,
        event_id: UUID,
        tenant_id: str,
        kind: str,
        key: str | None,
        text: str,
        created_at: datetime,
        attempts: int,
        fence: int,
    ) -> None:
        """Take the payload as JSON text."""
        # Not by the constructor above: a claim makes hundreds of these at once.
        self.event_id = event_id
        self.tenant_id = tenant_id
        self.kind = kind
        self.key = key
        self.created_at = created_at
        self.attempts = attempts
        self._payload = UNSET
        self._text = text
        self.fence = fence


@dataclass(frozen=True, slots=True)
class ClaimedEvents:
    """What a claim returned."""

    events: list[ClaimedEvent]
    expired: list[tuple[str, UUID]]
    """Parked instead: tenant and event id."""
    more: set[Group]
    """Where there may be more to claim."""
    last: dict[Group, datetime]
    """The available_at of the last event of each group."""


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
