"""What a gateway knows of how many jobs wait, where enqueues have a bound (`max_pending`).

The database counts, up to the bound, in the statement that stores. That costs 0.4 µs a job that waits: nothing beside
the statement while few wait, and too much for each when many do. So a count is used for more than one statement:

* below the bound, a sixteenth of the room that there was is given away without another count, for a second at most;
  what this process sends meanwhile is counted here. The bound is passed by no more than what others do with the same
  room: a sixteenth of it for each process, and what is under way at the moment of a count.
* at the bound, jobs are refused without asking again for a hundredth of the time in which the relay gets through the
  bound, and 0.1 s at most; so under an overload what is refused costs the database nothing.
* both last at least twenty times as long as the count took, so counting is a twentieth of a connection's time, also
  where an open transaction keeps dead rows for it to step over.

Jobs under an idempotency key always go to the database: the key may be in use, and then its job is the answer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Self

from dispatch_core.dispatch_bounded import Bound, Bounded
from dispatch_core.errors import BacklogFullError
from gateway_sdk.health import GatewayCounters

__all__ = ["Backlogs", "Sending"]

_SHARE: Final = 16
_TRUSTED_SECONDS: Final = 1.0
_REFUSED_SECONDS: Final = 0.1
_TIMES: Final = 20
_FORGOTTEN_SECONDS: Final = 60.0


class Backlog:
    """What is known of the jobs that wait for one relay."""

    __slots__ = (
        "asked_at",
        "full",
        "pending",
        "refused_until",
        "retry_after",
        "sent",
        "sent_then",
        "trusted_until",
        "under_way",
    )

    def __init__(self) -> None:
        self.asked_at = 0.0
        self.sent = 0
        """How many jobs this process has ever sent."""
        self.under_way = 0
        """How many of them have no answer yet."""
        self.pending = 0
        """How many there may have been after the last count, all that was under way included."""
        self.sent_then = 0
        self.trusted_until = 0.0
        self.full = 0
        """How many there were when a job was refused."""
        self.retry_after = 0.0
        self.refused_until = 0.0

    def has_room(self, bound: Bound, now: float) -> bool:
        """Tell whether what was sent since the last count may go without another one."""
        return now < self.trusted_until and self.sent - self.sent_then <= (bound - self.pending) // _SHARE

    def refused(self, error: BacklogFullError | None, now: float, lasts: float) -> None:
        """Note that a job was refused, or that none was."""
        self.refused_until = 0.0
        if error is not None:
            self.full, self.retry_after = error.pending, error.retry_after_seconds
            # Whatever counting takes, no longer than for a fifth of the bound: the relay is to have work meanwhile.
            lasts = max(lasts, min(_REFUSED_SECONDS, error.retry_after_seconds / 10))
            self.refused_until = now + min(lasts, error.retry_after_seconds * 2)

    def is_forgotten(self, now: float) -> bool:
        return not self.under_way and now > self.asked_at + _FORGOTTEN_SECONDS


class Backlogs:
    """The backlogs for which this client has enqueued with a bound."""

    __slots__ = ("_counters", "_known")

    def __init__(self, counters: GatewayCounters) -> None:
        self._counters = counters
        self._known: dict[tuple[str, str], Backlog] = {}

    @property
    def is_used(self) -> bool:
        """Some enqueue had a bound lately. Else there is nothing to do here for anybody."""
        return bool(self._known)

    def check(self, tenant: str, relay_id: str, bound: Bound, jobs: int = 1) -> None:
        """Refuse jobs for a relay that was full a moment ago; from now on its backlog is kept.

        Raises: BacklogFullError.
        """
        now = time.monotonic()
        backlog = self._known.get((tenant, relay_id))
        if backlog is None:
            backlog = self._known[tenant, relay_id] = Backlog()
        backlog.asked_at = now
        if now < backlog.refused_until and backlog.full + jobs > bound:
            self._counters.refused += jobs
            raise BacklogFullError(
                tenant_id=tenant,
                relay_id=relay_id,
                pending=backlog.full,
                max_pending=bound,
                retry_after_seconds=backlog.retry_after,
            )

    def sending(self, tenant: str, relay_ids: Sequence[str], bounds: Sequence[Bound]) -> Sending:
        """Return what stands around a statement that is to store jobs, each for its relay and with its bound."""
        jobs = Counter(relay_ids)
        known = {relay_id: self._known[tenant, relay_id] for relay_id in jobs if (tenant, relay_id) in self._known}
        return Sending(self._counters, known, jobs, relay_ids, bounds)

    def drop_idle(self) -> None:
        """Forget the backlogs that nobody has asked for lately."""
        now = time.monotonic()
        for key, backlog in list(self._known.items()):
            if backlog.is_forgotten(now):
                del self._known[key]


class Sending:
    """One statement for several senders: whether it must count, with which bounds, and what it has told."""

    __slots__ = ("_bounds", "_counters", "_jobs", "_known", "_relay_ids", "_sent", "_under_way", "must_count")

    def __init__(
        self,
        counters: GatewayCounters,
        known: Mapping[str, Backlog],
        jobs: Counter[str],
        relay_ids: Sequence[str],
        bounds: Sequence[Bound],
    ) -> None:
        self._counters = counters
        self._known = known
        self._jobs = jobs
        self._relay_ids = relay_ids
        self._bounds = bounds
        self._under_way: Counter[str] = Counter()
        """Of other statements, at the beginning: a count may see these or not."""
        self._sent: dict[str, int] = {}
        self.must_count = False

    def __enter__(self) -> Self:
        now = time.monotonic()
        for relay_id, backlog in self._known.items():
            self._under_way[relay_id] = backlog.under_way
            backlog.under_way += self._jobs[relay_id]
            backlog.sent += self._jobs[relay_id]
            self._sent[relay_id] = backlog.sent
        lowest: dict[str, Bound] = {}
        for relay_id, bound in zip(self._relay_ids, self._bounds, strict=True):
            if bound:
                lowest[relay_id] = min(bound, lowest.get(relay_id, bound))
        self.must_count = any(
            relay_id not in self._known or not self._known[relay_id].has_room(bound, now)
            for relay_id, bound in lowest.items()
        )
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, BacklogFullError):
            self._counters.refused += error.jobs
        for relay_id, backlog in self._known.items():
            backlog.under_way -= self._jobs[relay_id]

    def bounds(self) -> list[Bound]:
        """Return the bounds, less what is under way besides."""
        return [
            # Not 0, which would be none.
            (bound - self._under_way[relay_id] or -1) if bound else 0
            for relay_id, bound in zip(self._relay_ids, self._bounds, strict=True)
        ]

    def told(self, bounded: Bounded) -> list[bool | BacklogFullError]:
        """Keep what was counted, and return the answers, with the bounds as the senders know them."""
        now = time.monotonic()
        answers = list(bounded.answers)
        stored = self._jobs.copy()
        refused: dict[str, BacklogFullError] = {}
        for place, answer in enumerate(answers):
            if isinstance(answer, BacklogFullError):
                relay_id = self._relay_ids[place]
                answers[place] = error = BacklogFullError(
                    tenant_id=answer.tenant_id,
                    relay_id=relay_id,
                    pending=answer.pending + self._under_way[relay_id],
                    max_pending=self._bounds[place],
                    retry_after_seconds=answer.retry_after_seconds,
                )
                self._counters.refused += 1
                stored[relay_id] -= 1
                if relay_id not in refused or error.pending > refused[relay_id].pending:
                    refused[relay_id] = error
        highest: dict[str, Bound] = {}
        for relay_id, bound in zip(self._relay_ids, self.bounds(), strict=True):
            highest[relay_id] = max(bound, highest.get(relay_id, bound))
        for relay_id, counted in bounded.counted.items():
            backlog = self._known.get(relay_id)
            if backlog is not None:
                lasts = bounded.seconds * _TIMES
                since = backlog.sent - self._sent[relay_id]
                backlog.pending = counted + stored[relay_id] + self._under_way[relay_id] + since
                backlog.sent_then = backlog.sent
                # Where counting has ended at the bound there may be any number.
                is_whole = counted < highest[relay_id]
                backlog.trusted_until = now + max(lasts, _TRUSTED_SECONDS) if is_whole else 0.0
                backlog.refused(refused.get(relay_id), now, lasts)
        return answers
