"""What the pieces of one open client share."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Literal
from uuid import UUID

from dispatch_core.database import Database
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import ClientClosedError, DatabaseError
from dispatch_core.listener import Listener
from dispatch_core.requests import Preparer
from gateway_sdk.channels import ResultChannels
from gateway_sdk.direct import DirectStatements
from gateway_sdk.durable import DurableRoom
from gateway_sdk.health import GatewayCounters
from gateway_sdk.lanes import Lanes
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.waiter import ResultWaiter

__all__ = ["Runtime"]


@dataclass(slots=True)
class Runtime:
    """The pieces, and whether they still run."""

    settings: GatewaySettings
    preparer: Preparer
    database: Database
    listener: Listener | None
    doorbell: Doorbell
    lanes: Lanes
    direct: DirectStatements
    channels: ResultChannels
    waiter: ResultWaiter
    counters: GatewayCounters
    durable: DurableRoom

    is_closed: bool = False
    cause: BaseException | None = None
    """What took the client down, if something did."""

    def check_open(self, job_id: UUID | None = None) -> None:
        """Raise ClientClosedError where the client is closed, or has failed."""
        if self.is_closed:
            raise self.closed_error(job_id) from self.cause

    def under_way(self, job_id: UUID | None = None) -> _UnderWay:
        """Stand around a call: errors of the database get the job's id, and those behind which the client's own end
        lies become that."""
        self.check_open(job_id)
        return _UnderWay(self, job_id)

    def closed_error(self, job_id: UUID | None = None) -> ClientClosedError:
        """Make the error of a call that the end of the client has cut off."""
        why = "the client was closed" if self.cause is None else f"the client failed ({self.cause!r})"
        about = f" while job {job_id} was under way; what is stored of it goes on" if job_id else ""
        error = ClientClosedError(why + about, job_id=job_id)
        error.__cause__ = self.cause
        return error


class _UnderWay:
    # A class and not a generator: this stands around every call.
    __slots__ = ("_job_id", "_runtime")

    def __init__(self, runtime: Runtime, job_id: UUID | None) -> None:
        self._runtime = runtime
        self._job_id = job_id

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, DatabaseError):
            if self._job_id is not None:
                error.job_id = self._job_id
            if self._runtime.cause is not None:
                raise self._runtime.closed_error(self._job_id) from self._runtime.cause
        return False
