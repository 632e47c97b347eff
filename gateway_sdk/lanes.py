"""The statements that concurrent calls of one tenant share: enqueue, poll, withdraw.

A lane is one `Batcher` of one tenant and kind; what a batch does is its kind's, `lane_enqueue`, `lane_poll` or
`lane_expire`.
"""

from __future__ import annotations

from dispatch_core.database import Database
from dispatch_core.doorbell import Doorbell
from dispatch_core.ring_inside import RingInside
from gateway_sdk.backlogs import Backlogs
from gateway_sdk.health import GatewayCounters
from gateway_sdk.lane import TenantLanes
from gateway_sdk.lane_enqueue import Enqueueing, EnqueueItem
from gateway_sdk.lane_expire import Withdrawal, Withdrawing
from gateway_sdk.lane_poll import Asker, Polling
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.tasks import StartSoon
from gateway_sdk.waits import Polled

__all__ = ["Lanes"]


class Lanes:
    """The lanes of a client."""

    def __init__(
        self,
        database: Database,
        doorbell: Doorbell,
        settings: GatewaySettings,
        counters: GatewayCounters,
        start_soon: StartSoon,
    ) -> None:
        self._database = database
        self.ring_inside = RingInside()
        self.backlogs = Backlogs(counters)
        self.enqueueing = Enqueueing(database, doorbell, settings, counters, self.ring_inside, self.backlogs)
        polling = Polling(database, settings, counters, self.ring_inside)
        withdrawing = Withdrawing(database, doorbell)
        self.enqueue = TenantLanes[EnqueueItem, bool](start_soon, self.enqueueing.lane)
        self.poll = TenantLanes[Asker, Polled](start_soon, polling.lane)
        self.expire = TenantLanes[Withdrawal, int](start_soon, withdrawing.lane)

    @property
    def are_cut_off(self) -> bool:
        """Whether the database is known to be away: what they have to ask waits for the next try to connect."""
        return self._database.is_away

    def drop_idle(self) -> None:
        """Drop what nobody has used since the call before this one."""
        for lanes in (self.enqueue, self.poll, self.expire):
            lanes.drop_idle()
        self.backlogs.drop_idle()

    def stop(self) -> None:
        """Take no more."""
        self.enqueueing.close()
        for lanes in (self.enqueue, self.poll, self.expire):
            lanes.stop()

    async def drain(self) -> None:
        """Wait until what was given has its answers."""
        for lanes in (self.enqueue, self.poll, self.expire):
            await lanes.drain()
