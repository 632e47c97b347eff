"""Count what a relay does: plain numbers that only grow, to be read by whoever exports them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["Health", "RelayMetrics", "joint_health"]


@dataclass(slots=True)
class RelayMetrics:
    """What a relay has done since it was made. Nothing is reset when it runs again."""

    claims: int = 0
    """Claim statements that were answered."""
    claims_from_zero: int = 0
    claims_empty: int = 0
    claim_errors: int = 0
    claims_recovered: int = 0
    """Claims whose reply was lost and whose jobs were then asked for."""
    jobs_claimed: int = 0
    jobs_malformed: int = 0
    notifications: int = 0
    """Rings heard, before a burst becomes one wake-up."""
    wakeups_by_notify: int = 0
    """Idle relay, a ring, a claim that found work."""
    wakeups_by_poll: int = 0
    wakeups_by_timer: int = 0
    """As above, for a job whose delay was over."""
    polls: int = 0
    handlers_started: int = 0
    handler_errors: int = 0
    handler_timeouts: int = 0
    handlers_cancelled: int = 0
    jobs_succeeded: int = 0
    jobs_failed: int = 0
    jobs_expired: int = 0
    jobs_retried: int = 0
    """Put back by Retry, Snooze or after an error, to run again."""
    jobs_released: int = 0
    """Given back because the relay stopped, or because their operation had no room."""
    jobs_lost: int = 0
    """Found to be another's, ended or withdrawn while this relay had them in hand."""
    completions_repeated: int = 0
    heartbeats: int = 0
    """Heartbeat statements."""
    leases_renewed: int = 0
    sweeps: int = 0
    swept: int = 0
    """Jobs that a sweep of this relay ended or put back."""
    chunk_claims: int = 0
    """Claim statements for chunks that were answered; the others beneath are of chunks too."""
    chunk_claims_empty: int = 0
    chunk_claim_errors: int = 0
    chunk_claims_recovered: int = 0
    chunk_polls: int = 0
    chunk_notifications: int = 0
    chunks_claimed: int = 0
    chunks_done: int = 0
    chunks_failed: int = 0
    """Attempts that failed for good."""
    chunks_retried: int = 0
    chunks_released: int = 0
    """Given back with their checkpoint, because the relay stopped or the job was paused."""
    chunks_lost: int = 0
    """Those whose lease was lost, and those of jobs that were cancelled, while this relay had them in hand."""
    chunk_completions_repeated: int = 0
    chunk_heartbeats: int = 0
    """Heartbeat statements."""
    chunk_leases_renewed: int = 0
    checkpoints: int = 0
    row_errors: int = 0
    durable_jobs_ended: int = 0
    """Jobs that this relay ended, behind their last chunk."""
    chunk_sweeps: int = 0
    chunks_reaped: int = 0
    """Chunks that a sweep of this relay took back."""

    def as_dict(self) -> dict[str, int]:
        """Return all counters by name."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Health:
    """How a relay is at this moment."""

    status: Literal["stopped", "starting", "ok", "degraded", "stopping"]
    """`degraded`: it works, but without wake-ups, or the database does not answer."""
    instance_id: str | None
    listener: str
    """The listener's state; `polling_only` without one."""
    database: Literal["ok", "unavailable", "unknown"]
    in_hand: int
    running: int
    free: int
    """Jobs that it could claim besides; `in_hand` and `running` are of jobs too, of chunks are those below."""
    last_error: str | None
    chunks_in_hand: int = 0
    chunks_running: int = 0
    chunks_free: int = 0
    """Chunks that it could claim besides."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return dataclasses.asdict(self)


_STATES: Final = ("ok", "degraded", "starting", "stopping", "stopped")
"""From the best to the one that says most."""


def joint_health(parts: Sequence[Health]) -> Health:
    """Return how a relay is whose parts are so: its jobs and its chunks."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return Health(
        max((part.status for part in parts), key=_STATES.index),
        first.instance_id,
        first.listener,
        next((part.database for part in parts if part.database != "ok"), "ok"),
        sum(part.in_hand for part in parts),
        sum(part.running for part in parts),
        sum(part.free for part in parts),
        next((part.last_error for part in parts if part.last_error is not None), None),
        sum(part.chunks_in_hand for part in parts),
        sum(part.chunks_running for part in parts),
        sum(part.chunks_free for part in parts),
    )
