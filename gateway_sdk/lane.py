"""What lanes of any kind have in common: a batcher for each busy tenant, and how a statement that fails is judged.

A tenant's lane is made when it is first used and dropped when it has been idle, so that a gateway of ten thousand
tenants keeps the few that are busy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from dispatch_core.backoff import Backoff
from dispatch_core.batcher import Batcher, is_row_fault
from dispatch_core.errors import ClientClosedError, RelayDispatchError, TenancyError
from gateway_sdk.tasks import StartSoon

__all__ = ["BUSY_TRIES", "TenantLanes", "is_fault_of_one_row", "new_backoff"]

In = TypeVar("In")
Out = TypeVar("Out")

BUSY_TRIES: Final = 5
"""How often a statement is sent, or after its first time sent again, that the database refuses as busy: it had no
effect then."""


class TenantLanes(Generic[In, Out]):
    """One lane per busy tenant, of one kind."""

    __slots__ = ("_closed", "_lanes", "_make", "_seen", "_start_soon")

    def __init__(self, start_soon: StartSoon, make: Callable[[str], Batcher[In, Out]]) -> None:
        self._start_soon = start_soon
        self._make = make
        self._lanes: dict[str, Batcher[In, Out]] = {}
        # How many batches each lane had sent when it was last looked at.
        self._seen: dict[str, int] = {}
        self._closed = False

    def __getitem__(self, tenant: str) -> Batcher[In, Out]:
        if self._closed:
            raise ClientClosedError
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = self._make(tenant)
            self._start_soon(lane.run)
        return lane

    def __len__(self) -> int:
        return len(self._lanes)

    def drop_idle(self) -> None:
        """Drop the lanes that have sent nothing since the call before this one."""
        for tenant, lane in list(self._lanes.items()):
            if lane.pending or lane.in_flight or self._seen.get(tenant) != lane.flushes:
                self._seen[tenant] = lane.flushes
                continue
            lane.close()
            del self._lanes[tenant], self._seen[tenant]

    def stop(self) -> None:
        """Take no more."""
        self._closed = True

    async def drain(self) -> None:
        """Wait until what was given has its answers."""
        for lane in list(self._lanes.values()):
            await lane.drain()


def is_fault_of_one_row(error: RelayDispatchError) -> bool:
    """As `is_row_fault`, but a lane has one tenant, so what is wrong with the tenant is wrong for all."""
    return is_row_fault(error) and not isinstance(error, TenancyError)


def new_backoff() -> Backoff:
    """Make the pauses between the tries of one statement."""
    return Backoff(base=0.05, cap=1.0)
