"""Which tenants may have chunks of which kinds: what a claim is to be made for.

A ring, a poll or a retry that comes due makes all kinds of a tenant wanted. A claim takes what it asks for out, and
puts back what it did not exhaust: where it came full, or full for a kind. So a kind that has no room now is remembered
until a chunk of it has ended.

One tenant that is denied to this login would have a claim for many refused. So when one is refused, its tenants are
asked for one by one until each is known; a denied one goes on being asked for alone, when it rings and with each poll.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Ask", "Wants"]


@dataclass(slots=True)
class Ask:
    """One claim: for these tenants, so many chunks of each kind, and so many in all."""

    tenants: list[str]
    kinds: list[str]
    limits: list[int]
    limit: int

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(tenant, kind) for tenant in self.tenants for kind in self.kinds]


class Wants:
    """Those of one relay."""

    def __init__(self, tenants: Sequence[str], kinds: Sequence[str]) -> None:
        self._tenants = list(tenants)
        self._kinds = list(kinds)
        # A dict for its order: who has waited longest comes first.
        self._wanted: dict[str, set[str]] = {}
        self._timers: list[tuple[float, str]] = []
        self._apart: set[str] = set()

    def ring(self, tenant: str) -> None:
        """Note that the tenant may have chunks of any kind."""
        if tenant in self._tenants:
            self._wanted.setdefault(tenant, set()).update(self._kinds)

    def ring_all(self) -> None:
        """Note that every tenant may."""
        for tenant in self._tenants:
            self.ring(tenant)

    def ring_at(self, tenant: str, when: float) -> None:
        """Note that the tenant has a chunk that is due then, by the monotonic clock."""
        if tenant not in self._tenants:
            return
        if any(at <= when and name == tenant for at, name in self._timers):
            return
        heapq.heappush(self._timers, (when, tenant))

    def ring_what_is_due(self, now: float) -> None:
        """Ring for retries whose time has come."""
        while self._timers and self._timers[0][0] <= now:
            self.ring(heapq.heappop(self._timers)[1])

    @property
    def next_due(self) -> float:
        """When the next retry is due; infinite where none is known of."""
        return self._timers[0][0] if self._timers else math.inf

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is wanted."""
        return not self._wanted

    def take(self, room: Mapping[str, int], limit: int) -> Ask | None:
        """Return what to claim now, where `room` says how many of each kind there may be; None: nothing."""
        kinds = [kind for kind in self._kinds if room[kind] > 0]
        tenants = [tenant for tenant, wanted in self._wanted.items() if not wanted.isdisjoint(kinds)]
        if not tenants or limit < 1:
            return None
        if self._apart:
            tenants = [tenant for tenant in tenants if tenant not in self._apart] or tenants[:1]
        kinds = [kind for kind in kinds if any(kind in self._wanted[tenant] for tenant in tenants)]
        for tenant in tenants:
            self._wanted[tenant].difference_update(kinds)
            if not self._wanted[tenant]:
                del self._wanted[tenant]
        return Ask(tenants, kinds, [room[kind] for kind in kinds], limit)

    def denied(self, ask: Ask) -> str | None:
        """Note that a claim was refused because of a tenant; return which, where that is known."""
        self._apart.update(ask.tenants)
        if len(ask.tenants) > 1:
            self.put_back(ask)
            return None
        return ask.tenants[0]

    def put_back(self, ask: Ask) -> None:
        """Want again all that a claim asked for: it failed."""
        for tenant, kind in ask.pairs:
            self._wanted.setdefault(tenant, set()).add(kind)

    def answered(self, ask: Ask, counts: Mapping[str, int], total: int) -> None:
        """Want again what may have more: `counts` of each kind came, `total` in all."""
        self._apart.difference_update(ask.tenants)
        full = total >= ask.limit
        for kind, most in zip(ask.kinds, ask.limits, strict=True):
            if full or counts.get(kind, 0) >= most:
                for tenant in ask.tenants:
                    self._wanted.setdefault(tenant, set()).add(kind)
