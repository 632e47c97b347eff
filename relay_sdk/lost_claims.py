"""Claims whose reply was lost: ask for each by its id until one lease has passed and there is an answer.

Such a claim may have taken jobs, or may still be about to: on the server it may be under way. By the end of its lease
what it has taken is taken back, by whoever sweeps. While the database is away nobody does, and after an outage of any
length the holders have one lease to come back; so a lost claim is given up by an answer only.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar
from uuid import UUID

from dispatch_core.backoff import Backoff
from dispatch_core.database import Connection

__all__ = ["LostClaim", "LostClaims"]


class LostClaim:
    """A claim whose reply was lost. Times are of the monotonic clock."""

    __slots__ = ("ask_at", "backoff", "claim_id", "is_denied", "sent_at", "tenants", "was_answered")

    def __init__(self, claim_id: UUID, tenants: Sequence[str], sent_at: float) -> None:
        self.claim_id = claim_id
        self.tenants = list(tenants)
        self.sent_at = sent_at
        self.ask_at = 0.0
        self.is_denied = False
        """Whether its one tenant is denied to this login now: then it holds up no other claim."""
        self.was_answered = False
        """Whether an answer has said that it has brought nothing so far: as a rule it never came to the server."""
        self.backoff = Backoff(1.0, 4.0)

    def by_tenant(self) -> list[LostClaim]:
        """Return it as one for each of its tenants: where one is denied, the others are asked for by themselves."""
        return [LostClaim(self.claim_id, [tenant], self.sent_at) for tenant in self.tenants]


Claimed = TypeVar("Claimed")


class LostClaims(Generic[Claimed]):
    """Those of one relay instance."""

    def __init__(self, ask: Callable[[Connection, LostClaim], Awaitable[Claimed]]) -> None:
        """Take the statement that asks for a claim again."""
        self._ask = ask
        self._lost: list[LostClaim] = []

    def __len__(self) -> int:
        return len(self._lost)

    def __iter__(self) -> Iterator[LostClaim]:
        return iter(list(self._lost))

    @property
    def hold_up_others(self) -> bool:
        """Whether one may bring jobs soon, for which there have to be slots."""
        return any(not lost.is_denied for lost in self._lost)

    @property
    def are_open(self) -> bool:
        """Whether one has had no answer at all, and so may bring something at once."""
        return any(not lost.is_denied and not lost.was_answered for lost in self._lost)

    def add(self, claim_id: UUID, tenants: Sequence[str], sent_at: float) -> None:
        """Note that the reply to a claim was lost."""
        self._lost.append(LostClaim(claim_id, tenants, sent_at))

    def next_to_ask(self, now: float) -> LostClaim | None:
        """Return one that is to be asked for now."""
        return next((lost for lost in self._lost if lost.ask_at <= now), None)

    @property
    def ask_at(self) -> float:
        """When the next one is to be asked for; infinite where there is none."""
        return min((lost.ask_at for lost in self._lost), default=math.inf)

    async def ask(self, lost: LostClaim, conn: Connection) -> Claimed:
        """Return what it has taken that is still this instance's.

        Raises: DatabaseError, TenancyError where one of its tenants is denied.
        """
        return await self._ask(conn, lost)

    def found(self, lost: LostClaim) -> None:
        """Forget it: what it has taken is there."""
        self._lost.remove(lost)

    def denied(self, lost: LostClaim, now: float, lease_seconds: float) -> None:
        """Note that it was refused because of a tenant: ask for each by itself from now on, and for that one later."""
        if len(lost.tenants) > 1:
            self._lost.remove(lost)
            self._lost.extend(lost.by_tenant())
        else:
            lost.is_denied = True
            self.not_found(lost, now, lease_seconds)

    def not_found(self, lost: LostClaim, now: float, lease_seconds: float) -> None:
        """Note an answer that brought nothing: it is asked for until its lease is over."""
        lost.was_answered = True
        if now - lost.sent_at > lease_seconds:
            self._lost.remove(lost)
        else:
            self.not_answered(lost, now)

    def not_answered(self, lost: LostClaim, now: float) -> None:
        """Note that there was no answer."""
        lost.ask_at = now + lost.backoff.next()
