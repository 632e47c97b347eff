"""What the pieces of one open client share."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import anyio

from dispatch_core.database import Database
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import ClientClosedError, RelayDispatchError
from dispatch_core.listener import Listener
from gateway_sdk.health import GatewayCounters
from gateway_sdk.lanes import Lanes
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.waiter import ResultWaiter

__all__ = ["Runtime"]


@dataclass(slots=True)
class Runtime:
    """The pieces, and whether they still run."""

    settings: GatewaySettings
    database: Database
    listener: Listener | None
    doorbell: Doorbell
    lanes: Lanes
    waiter: ResultWaiter
    counters: GatewayCounters
    keyed: anyio.Semaphore
    """Bounds the enqueues that may wait for somebody's transaction."""

    is_closed: bool = False
    cause: BaseException | None = None
    """What took the client down, if something did."""

    def check_open(self, job_id: UUID | None = None) -> None:
        """Raise ClientClosedError where the client is closed."""
        if self.is_closed:
            raise self.closed_error(job_id)

    def closed_error(self, job_id: UUID | None = None) -> ClientClosedError:
        """Make the error of a call that the end of the client has cut off."""
        about = f"while job {job_id} was waited for; the job goes on" if job_id else "nothing was sent"
        if self.cause is None:
            return ClientClosedError(f"the client is closed: {about}", job_id=job_id)
        error = ClientClosedError(f"the client failed ({self.cause!r}): {about}", job_id=job_id)
        error.__cause__ = self.cause
        return error

    def blame(self, error: RelayDispatchError, job_id: UUID | None = None) -> RelayDispatchError:
        """Return the error to raise: the client's own end, where that is what lies behind `error`."""
        if self.cause is None:
            return error
        closed = ClientClosedError(f"the client failed ({self.cause!r}): {error}", job_id=job_id)
        closed.__cause__ = self.cause
        return closed
