"""What a gateway counts, and how it says whether it is well."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GatewayCounters", "GatewayHealth"]


class GatewayCounters:
    """Numbers since the client was opened; written by the pieces of the client, read by `GatewayClient.health`."""

    __slots__ = (
        "enqueue_statements",
        "enqueued",
        "poll_statements",
        "polled",
        "refused",
        "wakes_by_poll",
        "wakes_by_push",
    )

    def __init__(self) -> None:
        self.enqueued = 0
        self.enqueue_statements = 0
        self.refused = 0
        self.polled = 0
        self.poll_statements = 0
        self.wakes_by_push = 0
        self.wakes_by_poll = 0


@dataclass(frozen=True, slots=True)
class GatewayHealth:
    """One look at a client.

    `state` is "listening" where results are pushed, "degraded" while that is broken, "polling_only" where it cannot be.
    `refused` jobs met a backlog that was full. `wakes_by_push` and `wakes_by_poll` count the waits that ended after a
    notification and without one. `rings_lost` cost the others a poll interval each.
    """

    state: str
    problem: str | None
    channels: int
    waiting: int
    tenants: int
    enqueued: int
    enqueue_statements: int
    refused: int
    polled: int
    poll_statements: int
    wakes_by_push: int
    wakes_by_poll: int
    notifications: int
    rings_sent: int
    rings_lost: int

    @property
    def is_well(self) -> bool:
        return self.state == "listening"
