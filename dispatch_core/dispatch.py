"""The dispatch room at its lowest floor: one method, one call of one SQL function in schema `relay`.

Every method runs as a single statement on the connection it was given. Outside a transaction that statement is a
transaction of its own, so what a method reports is committed when it returns; inside one it joins it and commits or
rolls back with it. Tenants are bound inside the function and put back by it: nothing stays on the connection.

What may be wrong with arguments is found before any SQL; what PostgreSQL refuses comes as one of ours (`errors`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

from dispatch_core import codec
from dispatch_core import dispatch_rows as read
from dispatch_core.database import mapped_errors
from dispatch_core.dispatch_asking import AskingVerbs
from dispatch_core.dispatch_calls import keep, lease
from dispatch_core.dispatch_working import CLAIMED_BODIES_BYTES, WorkingVerbs
from dispatch_core.models import EndedJob
from dispatch_core.requests import MAX_TTL_SECONDS, EnqueueRow, duration, prepare

__all__ = ["CLAIMED_BODIES_BYTES", "EnqueueRow", "RelayDispatchRepository", "prepare"]

_SWEEP: Final = "select sweep, tenant_id, relay_id, job_id, status from relay.run_sweeps($1, $2, $3, $4, $5)"
_CHANNEL: Final = "select relay.channel($1, $2, $3)"
_NOW: Final = "select relay.now()"
# As a table it is called once, before the column is computed, and raises where no tenant is bound.
_NOW_BOUND: Final = "select relay.now() from relay.bound_tenant()"


class RelayDispatchRepository(AskingVerbs, WorkingVerbs):
    """The dispatch verbs on one connection: of those who want work done, of those who do it, and of both.

    `tenant` None: the tenant that the caller has bound on the connection as `app.tenant_id`; with none there, every
    method raises `TenancyUnboundError`. The connection is the caller's; it must not be used by two tasks at once.
    """

    __slots__ = ()

    async def run_sweeps(
        self,
        relay_id: str | None = None,
        *,
        lease_seconds: float = 30.0,
        keep_seconds: float | None = None,
        limit: int = 500,
        every_seconds: tuple[float, float, float, float] = (5.0, 5.0, 2.0, 60.0),
    ) -> list[EndedJob]:
        """Do whatever sweeps are due for this login, over all its tenants; return the jobs that ended or went back.

        `every_seconds`: the intervals of expire, lease, promote and purge. `keep_seconds` None: nothing is purged.
        """
        with mapped_errors():
            records = await self._conn.fetch(
                _SWEEP,
                relay_id,
                limit,
                lease(lease_seconds),
                None if keep_seconds is None else keep(keep_seconds),
                [duration("every_seconds", seconds, MAX_TTL_SECONDS) for seconds in every_seconds],
            )
        return [
            EndedJob(record[1], record[2], record[3], read.STATUSES[record[4]])
            for record in records
            if record[3] is not None
        ]

    async def channel(self, kind: Literal["wake", "result"], relay_id: str | None = None) -> str:
        """Return the channel to LISTEN on. Raises: TenancyDeniedError for a login that may not."""
        if relay_id is not None:
            codec.check_name("relay_id", relay_id)
        with mapped_errors():
            name = await self._conn.fetchval(_CHANNEL, kind, self._tenant, relay_id)
        return str(name)

    async def now(self) -> datetime:
        """Return the database's clock at this moment, aware. Raises: TenancyUnboundError, as every method does."""
        with mapped_errors():
            value = await self._conn.fetchval(_NOW_BOUND if self._tenant is None else _NOW)
        assert isinstance(value, datetime)
        return value
