"""The verbs of the outbox room for drainers and for people: one method, one call of one SQL function in schema `relay`.

Every method is one statement, in a transaction of its own. What may be wrong with arguments is found before any SQL;
what PostgreSQL refuses comes as one of ours (`errors`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import accumulate, repeat
from typing import Any, Final, TypeAlias
from uuid import UUID

from dispatch_core import codec
from dispatch_core.database import Connection, Database, mapped_errors
from dispatch_core.errors import TenancyUnboundError
from dispatch_core.outbox_models import ClaimedEvent, ClaimedEvents, DueWork, Group, SettledEvent, Verdict

__all__ = ["OutboxRepository"]

_MAX_ERROR_BYTES: Final = 2000

_DUE: Final = (
    "select outcome, tenant_id, kind, key, wait, amount from relay.outbox_due($1, $2, $3, $4, $5, $6, $7, $8, $9)"
)
_CLAIM: Final = (
    "select outcome, tenant_id, kind, event_ids, payloads, created_at, keys, fences, attempts, last"
    " from relay.outbox_claim($1, $2, $3, $4, $5, $6, $7)"
)
_UNCLAIM: Final = "select relay.outbox_unclaim($1, $2)"
_SETTLE: Final = (
    "select outcome, state, ns, tenant_id, kind from relay.outbox_settle($1, $2, $3, $4, $5, $6, $7, $8, $9)"
)
_RETRY: Final = "select n, outcome from relay.outbox_retry($1, $2)"
_PARK: Final = "select n, outcome from relay.outbox_park($1, $2, $3)"
_RETRY_PARKED: Final = "select relay.outbox_retry_parked($1, $2, $3, $4, $5)"
_PURGE: Final = "select relay.outbox_purge($1, $2, $3, $4, $5)"
_LIST: Final = "select * from relay.outbox_list($1, $2, $3, $4, $5, $6, $7, $8)"
_COUNT: Final = "select relay.outbox_count($1, $2, $3, $4, $5, $6, $7)"
_SHOW: Final = "select * from relay.outbox_show($1, $2)"
_LOCATE: Final = (
    "select t.tenant_id, s.event_id, s.state from unnest($1::text[]) as t (tenant_id)"
    " cross join unnest($2::uuid[]) as e (event_id) cross join lateral relay.outbox_show(t.tenant_id, e.event_id) as s"
)
_STATUS: Final = "select * from relay.outbox_status($1, $2)"
_HEALTH: Final = (
    "select t.tenant_id, h.* from unnest($1::text[]) as t (tenant_id)"
    " cross join lateral relay.outbox_health(t.tenant_id, $2) as h"
)
_TENANTS: Final = "select tenant_id from relay.outbox_tenants() order by 1"
_CHANNEL: Final = "select relay.channel($1, $2)"

_Fetch: TypeAlias = Callable[..., Awaitable[list[Any]]]


class OutboxRepository:
    """The verbs on a connection, or on connections of a `Database`, one for each call."""

    __slots__ = ("_fetch",)

    def __init__(self, connection: Connection | Database) -> None:
        self._fetch: _Fetch = connection.execute if isinstance(connection, Database) else _fetcher(connection)

    # --- drainers -------------------------------------------------------------------------------------------------

    async def due(
        self,
        *,
        tenants: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
        limit: int = 1000,
        start: str | None = None,
        stale_seconds: float = 300.0,
        max_attempts: int = 25,
        look: int = 0,
        look_behind: Mapping[str, str] | None = None,
    ) -> DueWork:
        """Find the tenants and kinds with something to claim, and take back claims that are too old.

        None: all tenants of this login, all kinds. `look`: at how many keys to look for lost turns, for each tenant
        behind the key that `look_behind` has for it.
        """
        behind = look_behind or {}
        rows = await self._fetch(
            _DUE,
            None if tenants is None else list(tenants),
            None if kinds is None else list(kinds),
            limit,
            start,
            timedelta(seconds=stale_seconds),
            max_attempts,
            look,
            list(behind),
            list(behind.values()),
        )
        due: list[Group] = []
        waits: list[timedelta] = []
        amounts = {"reclaimed": 0, "parked": 0, "promoted": 0}
        looks: dict[str, str] = {}
        next_start: str | None = None
        for outcome, tenant, kind, key, wait, amount in rows:
            if outcome == "due":
                due.append((tenant, kind))
            elif outcome == "later":
                waits.append(wait)
            elif outcome == "look":
                looks[tenant] = key
            elif outcome == "start":
                next_start = tenant
            else:
                amounts[outcome] += amount
        return DueWork(due, min(waits, default=None), look=looks, start=next_start, **amounts)

    async def claim(
        self,
        groups: Sequence[Group],
        *,
        claimed_by: str,
        limit: int,
        after: Sequence[datetime | None] | None = None,
        max_bytes: int = 8 * 1024 * 1024,
        horizon_seconds: float = 3 * 86400.0,
    ) -> ClaimedEvents:
        """Claim events of these groups, in turns. `claimed_by` is new for every claim."""
        rows = await self._fetch(
            _CLAIM,
            [tenant for tenant, _ in groups],
            [kind for _, kind in groups],
            None if after is None else list(after),
            limit,
            claimed_by,
            max_bytes,
            timedelta(seconds=horizon_seconds),
        )
        claimed = ClaimedEvents([], [], set(), {})
        for outcome, tenant, kind, ids, texts, created_at, keys, fences, attempts, last in rows:
            if outcome == "claimed":
                claimed.last[tenant, kind] = max(last, claimed.last.get((tenant, kind), last))
                columns = (texts, created_at, attempts, fences, keys or (None,))
                claimed.events.extend(
                    ClaimedEvent(event_id, tenant, kind, key, text, created, attempt, fence)
                    for event_id, text, created, attempt, fence, key in zip(
                        ids, *(_one_each(column, len(ids)) for column in columns), strict=False
                    )
                )
            elif outcome == "parked":
                claimed.expired.extend((tenant, event_id) for event_id in ids)
            else:
                claimed.more.add((tenant, kind))
        return claimed

    async def unclaim(self, tenants: Sequence[str], claimed_by: str) -> int:
        """Release what a claim took whose reply was lost; return how many events that were."""
        ((count,),) = await self._fetch(_UNCLAIM, list(tenants), claimed_by)
        return int(count)

    async def settle(
        self, verdicts: Sequence[tuple[ClaimedEvent, Verdict]], *, claimed_by: str, max_attempts: int
    ) -> tuple[list[SettledEvent], set[Group]]:
        """Write what became of claimed events, in one transaction; return what was done with each, and the groups in
        which another event of a key that has ended can be claimed now.

        Idempotent: yes; an event that was settled before is stale.
        """
        # Grouped by tenant; `places` leads back.
        counts = Counter([event.tenant_id for event, _ in verdicts])
        places = list(range(len(verdicts)))
        if len(counts) > 1:
            places.sort(key=lambda place: verdicts[place][0].tenant_id)
            counts = Counter([verdicts[place][0].tenant_id for place in places])
            ordered = [verdicts[place] for place in places]
        else:
            ordered = list(verdicts)
        outcomes = [v.outcome for _, v in ordered]
        if outcomes.count("delivered") == len(outcomes):
            errors, delays = None, None
        else:
            errors = [v.error and codec.sanitize(v.error, _MAX_ERROR_BYTES) for _, v in ordered]
            delays = [v.delay for _, v in ordered]
        rows = await self._fetch(
            _SETTLE,
            claimed_by,
            list(counts),
            list(counts.values()),
            [event.event_id for event, _ in ordered],
            _all_or_one([event.fence for event, _ in ordered]),
            _all_or_one(outcomes),
            errors if errors and any(errors) else None,
            delays if delays and any(delay is not None for delay in delays) else None,
            max_attempts,
        )
        if len(counts) > 1:
            ends = dict(zip(counts, accumulate(counts.values()), strict=True))
            whole = {tenant: range(ends[tenant] - count + 1, ends[tenant] + 1) for tenant, count in counts.items()}
        settled: list[SettledEvent] = [SettledEvent("stale", "gone")] * len(verdicts)
        promoted: set[Group] = set()
        for outcome, state, ns, tenant, kind in rows:
            if outcome == "promoted":
                promoted.add((tenant, kind))
                continue
            came = SettledEvent(outcome, state)
            if ns is None and len(counts) == 1:
                settled = [came] * len(verdicts)
                continue
            for n in whole[tenant] if ns is None else ns:
                settled[places[n - 1]] = came
        return settled, promoted

    async def channel(self, tenant: str | None) -> str:
        """Return the channel of the events of a tenant, or of all; None needs a login that is bound to all."""
        ((name,),) = await self._fetch(_CHANNEL, "outbox_all" if tenant is None else "outbox", tenant)
        return str(name)

    # --- people ---------------------------------------------------------------------------------------------------

    async def tenants(self) -> list[str]:
        """Return the tenants of this login; for one that is bound to all, those that have an event."""
        return [tenant for (tenant,) in await self._fetch(_TENANTS)]

    async def retry(self, tenant: str, event_ids: Sequence[UUID]) -> set[UUID]:
        """Have parked events begin anew, and those that wait for their time tried now; return which that were."""
        return self._applied(event_ids, await self._fetch(_RETRY, _tenant(tenant), list(event_ids)))

    async def park(self, tenant: str, event_ids: Sequence[UUID], reason: str) -> set[UUID]:
        """Give events up; return those that were not parked before."""
        text = codec.sanitize(reason, _MAX_ERROR_BYTES)
        return self._applied(event_ids, await self._fetch(_PARK, _tenant(tenant), list(event_ids), text))

    async def retry_parked(
        self, tenant: str, older_than: timedelta, *, kind: str | None = None, key: str | None = None, limit: int = 1000
    ) -> int:
        """Have events that were parked so long ago begin anew, the oldest first; return how many."""
        ((count,),) = await self._fetch(_RETRY_PARKED, _tenant(tenant), older_than, limit, kind, key)
        return int(count)

    async def purge(
        self, tenant: str, older_than: timedelta, *, kind: str | None = None, key: str | None = None, limit: int = 1000
    ) -> int:
        """Remove events that were parked so long ago, the oldest first; return how many."""
        ((count,),) = await self._fetch(_PURGE, _tenant(tenant), older_than, limit, kind, key)
        return int(count)

    async def list_events(
        self,
        tenant: str,
        *,
        state: str | None = None,
        kind: str | None = None,
        key: str | None = None,
        older_than: timedelta | None = None,
        limit: int = 50,
        before: UUID | None = None,
        payload_chars: int = 0,
    ) -> list[dict[str, Any]]:
        """Return events, the newest first; of payloads above 64 KiB nothing, of others the first so many characters.

        `older_than` counts from the moment an event was parked, else from when it was written.
        """
        rows = await self._fetch(_LIST, _tenant(tenant), state, kind, limit, before, key, older_than, payload_chars)
        return [dict(row) for row in rows]

    async def count(
        self,
        tenant: str,
        *,
        state: str | None = None,
        kind: str | None = None,
        key: str | None = None,
        older_than: timedelta | None = None,
        before: UUID | None = None,
        limit: int = 100_000,
    ) -> int:
        """Count the events that `list_events` would return, no further than `limit`."""
        ((count,),) = await self._fetch(_COUNT, _tenant(tenant), state, kind, key, older_than, before, limit)
        return int(count)

    async def show(self, tenant: str, event_id: UUID) -> dict[str, Any] | None:
        """Return all there is of one event, its payload as JSON text."""
        rows = await self._fetch(_SHOW, _tenant(tenant), event_id)
        return dict(rows[0]) if rows else None

    async def locate(self, tenants: Sequence[str], event_ids: Sequence[UUID]) -> list[tuple[str, UUID, str]]:
        """Return which of the tenants has which of the events, and in what state it is."""
        rows = await self._fetch(_LOCATE, [_tenant(tenant) for tenant in tenants], list(event_ids))
        return [(tenant, event_id, state) for tenant, event_id, state in rows]

    async def status(self, tenant: str, *, stale_seconds: float = 300.0) -> list[dict[str, Any]]:
        """Count the events of a tenant by kind: due, later, waiting, claimed (and of those the stale), parked; with the
        greatest ages, and the most attempts of one that is not parked."""
        return [dict(row) for row in await self._fetch(_STATUS, _tenant(tenant), timedelta(seconds=stale_seconds))]

    async def health(self, tenants: Sequence[str], *, stale_seconds: float = 300.0) -> list[dict[str, Any]]:
        """Tell what is amiss with the events of each tenant; however many there are, it costs next to nothing."""
        names = [_tenant(tenant) for tenant in tenants]
        return [dict(row) for row in await self._fetch(_HEALTH, names, timedelta(seconds=stale_seconds))]

    @staticmethod
    def _applied(event_ids: Sequence[UUID], rows: Sequence[Any]) -> set[UUID]:
        return {event_ids[n - 1] for n, outcome, *_ in rows if outcome == "applied"}


def _one_each(column: Sequence[Any], count: int) -> Iterable[Any]:
    """Return a value for each event of a column that has them all, or one that all have."""
    return column if len(column) == count else repeat(column[0], count)


def _all_or_one(column: list[Any]) -> list[Any]:
    """Return one value where all are the same."""
    return column[:1] if column and column.count(column[0]) == len(column) else column


def _fetcher(conn: Connection) -> _Fetch:
    async def fetch(sql: str, *args: object) -> list[Any]:
        with mapped_errors():
            rows: list[Any] = await conn.fetch(sql, *args)
            return rows

    return fetch


def _tenant(tenant: str) -> str:
    if tenant == "":
        raise TenancyUnboundError("'' is no tenant")
    return codec.check_name("tenant", tenant)
