"""What the pieces of one open client share."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import anyio

from dispatch_core.database import Database
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import ClientClosedError
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
        """Raise ClientClosedError where the client is closed, or has failed."""
        if self.is_closed:
            raise self.closed_error(job_id) from self.cause

    def check_alive(self, job_id: UUID | None = None) -> None:
        """Raise ClientClosedError where the client has failed, which is then what lies behind the error at hand."""
        if self.cause is not None:
            raise self.closed_error(job_id) from self.cause

    def closed_error(self, job_id: UUID | None = None) -> ClientClosedError:
        """Make the error of a call that the end of the client has cut off."""
        why = "the client was closed" if self.cause is None else f"the client failed ({self.cause!r})"
        about = f" while job {job_id} was under way; what is stored of it goes on" if job_id else ""
        error = ClientClosedError(why + about, job_id=job_id)
        error.__cause__ = self.cause
        return error
