"""The records of waiting: a wait, the job it is for, and the tenant's room that holds the job."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias
from uuid import UUID

from dispatch_core.errors import RelayDispatchError
from dispatch_core.models import DispatchResult
from gateway_sdk.alarms import Alarm, Timeout

__all__ = ["Deliver", "Job", "Keeper", "Outcome", "Polled", "Room", "Wait", "for_job"]

Outcome: TypeAlias = DispatchResult | Exception
"""How a wait ends. An error is a value here, because it may never be asked for."""

Deliver: TypeAlias = "asyncio.Future[Outcome] | Callable[[Outcome], None]"

Polled: TypeAlias = DispatchResult | tuple[DispatchResult | None, float] | None
"""The result of a job that has ended; or where it stands (None: unknown) and a monotonic time that is not after its
deadline; or None alone: it has ended, and its result found no room in this answer, so it is to be asked for again."""


class Keeper(Protocol):
    """What waits and jobs need of the waiter that keeps them."""

    def on_stored(self, job: Job) -> None: ...

    def on_left(self, wait: Wait) -> None: ...

    def on_timed_out(self, wait: Wait) -> None: ...

    def on_polled(self, job: Job, answer: Polled | Exception) -> None: ...


class Wait(Timeout):
    """One caller's wait for one job. Close it, whatever has come of it.

    Of waits there are thousands, and the collector looks at each object of theirs again and again: so a future is kept
    as it is, with no call-back around it, and the timeout and what a call needs besides are no objects of their own.
    """

    __slots__ = ("_deliver", "is_look", "job")

    def __init__(self, job: Job, deliver: Deliver) -> None:
        super().__init__()
        self._deliver: Deliver | None = deliver
        self.job = job
        self.is_look = False
        """It ends with the next answer, whatever that is."""

    def __call__(self, _item: object, answer: bool | Exception) -> None:
        """Take the answer to the enqueue of the job, as the call-back that a lane calls."""
        if isinstance(answer, Exception):
            self.end(for_job(answer, self.job.job_id))
        else:
            self.job.room.keeper.on_stored(self.job)

    def end(self, outcome: Outcome) -> None:
        """Deliver `outcome`, unless another one was first."""
        deliver, self._deliver = self._deliver, None
        if isinstance(deliver, asyncio.Future):
            if not deliver.done():
                deliver.set_result(outcome)
        elif deliver is not None:
            deliver(outcome)

    def timed_out(self) -> None:
        """Tell the waiter."""
        self.job.room.keeper.on_timed_out(self)

    def close(self) -> None:
        """Stop to wait. Idempotent: yes."""
        self._deliver = None
        if self._set_in is not None:
            self.cancel()
        self.job.room.keeper.on_left(self)


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

    is_over = False
    """Of a question where it stands: one is asked at a time, and what comes of it is kept here."""

    def polled(self, answer: Polled | Exception) -> None:
        """Take the answer to a poll."""
        self.room.keeper.on_polled(self, answer)

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

    __slots__ = ("empty_since", "jobs", "keeper", "tenant")

    def __init__(self, tenant: str, keeper: Keeper) -> None:
        self.tenant = tenant
        self.keeper = keeper
        self.jobs: dict[str, Job] = {}
        self.empty_since: float | None = None
