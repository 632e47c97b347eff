"""The records of waiting: a wait, the job it is for, and the tenant's room that holds the job."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias
from uuid import UUID

from dispatch_core.errors import RelayDispatchError
from dispatch_core.models import DispatchResult
from gateway_sdk.alarms import Alarm

__all__ = ["Job", "Outcome", "Room", "Wait", "for_job"]

Outcome: TypeAlias = DispatchResult | Exception
"""How a wait ends. An error is a value here, because it may never be asked for."""


class _Keeper(Protocol):
    """What a wait needs of the waiter that keeps it."""

    def on_stored(self, job: Job) -> None: ...

    def on_left(self, wait: Wait) -> None: ...


class Wait:
    """One caller's wait for one job. Close it, whatever has come of it."""

    __slots__ = ("_deliver", "_keeper", "is_look", "job", "timer")

    def __init__(self, keeper: _Keeper, job: Job, deliver: Callable[[Outcome], None]) -> None:
        self._keeper = keeper
        self._deliver: Callable[[Outcome], None] | None = deliver
        self.job = job
        self.timer: Alarm | None = None
        self.is_look = False
        """It ends with the next answer, whatever that is."""

    def stored(self) -> None:
        """Say that the job which was to be enqueued is committed."""
        self._keeper.on_stored(self.job)

    def end(self, outcome: Outcome) -> None:
        """Deliver `outcome`, unless another one was first."""
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver(outcome)

    def close(self) -> None:
        """Stop to wait. Idempotent: yes."""
        self._deliver = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self._keeper.on_left(self)


class Job:
    """What is known of one job that somebody waits for."""

    __slots__ = (
        "again",
        "asked_at",
        "at_deadline",
        "deadline",
        "due",
        "error",
        "expired",
        "job_id",
        "key",
        "marked",
        "polling",
        "pushed",
        "room",
        "since",
        "storing",
        "timer",
        "waits",
    )

    def __init__(self, room: Room, job_id: UUID, key: str, storing: bool) -> None:
        self.room = room
        self.job_id = job_id
        self.key = key
        self.waits: list[Wait] = []
        self.since = time.monotonic()
        self.due = 0.0
        """When to poll it if nothing else happens."""
        self.storing = storing
        """It is not committed yet, as far as the caller who waits here knows."""
        self.polling = False
        self.asked_at = 0.0
        """Since when a poll is on its way, if one is."""
        self.again = False
        """What that poll reads may be too old already."""
        self.pushed = False
        self.error: RelayDispatchError | None = None
        """Why the last poll had no answer."""
        self.timer: Alarm | None = None
        """For the deadline, as far as it is known, or for the end of the grace behind it."""
        self.deadline: float | None = None
        """Kept in place of a timer while the only wait ends no later: timers are a good part of what a wait costs."""
        self.at_deadline = False
        self.expired: DispatchResult | None = None
        """What a poll has called expired, and nobody has stored yet."""
        self.marked = False
        """We have tried to store that."""

    def is_silent(self, seconds: float) -> bool:
        """Tell whether a poll has had no answer for so long."""
        return self.polling and time.monotonic() - self.asked_at >= seconds


def for_job(error: Exception, job_id: UUID) -> Exception:
    """Return a copy of `error` for one job: what failed for a whole batch is raised in many tasks."""
    own = copy.copy(error)
    own.__cause__ = error.__cause__
    if hasattr(own, "job_id"):
        own.job_id = job_id
    return own


class Room:
    """The jobs of one tenant, by the hexadecimal form of their ids, which is what a push carries."""

    __slots__ = ("empty_since", "jobs", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.jobs: dict[str, Job] = {}
        self.empty_since: float | None = None
