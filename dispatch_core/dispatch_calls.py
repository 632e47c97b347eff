"""What every verb of the dispatch room stands on: one connection, and the tenant that it speaks for."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from dispatch_core import codec
from dispatch_core.database import Connection, mapped_errors
from dispatch_core.errors import InvalidDeadlineError, TenancyUnboundError
from dispatch_core.requests import MAX_TTL_SECONDS, duration

__all__ = ["Calls", "keep", "lease"]

_MAX_KEEP_SECONDS: Final = 10_000 * 86400.0

_BOUND: Final = "select relay.bound_tenant()"


class Calls:
    """Calls of SQL functions on a connection, for a tenant, or for the one that is bound there (None)."""

    __slots__ = ("_conn", "_tenant")

    def __init__(self, conn: Connection, tenant: str | None = None) -> None:
        if tenant == "":
            raise TenancyUnboundError("'' is no tenant")
        self._conn = conn
        self._tenant = None if tenant is None else codec.check_name("tenant", tenant)

    @property
    def tenant(self) -> str | None:
        return self._tenant

    async def _require_tenant(self) -> None:
        """Raise where no tenant is bound, also for a call that has nothing to do."""
        if self._tenant is None:
            with mapped_errors():
                await self._conn.fetchval(_BOUND)


def lease(seconds: float) -> timedelta:
    """Check the length of a lease. Raises: InvalidDeadlineError."""
    checked = duration("lease_seconds", seconds, MAX_TTL_SECONDS)
    if not checked:
        raise InvalidDeadlineError("lease_seconds must be positive")
    return checked


def keep(seconds: float) -> timedelta:
    """Check how long jobs that have ended are kept. Raises: InvalidDeadlineError."""
    return duration("keep_seconds", seconds, _MAX_KEEP_SECONDS)
