"""Whose jobs a login sees, and which of them wait for somebody who does not come: for people, and for `doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from dispatch_core.database import Connection, mapped_errors

__all__ = ["DurableHealth"]

_TENANTS: Final = "select tenant_id from relay.durable_all_tenants() order by 1"
_LOCATE: Final = (
    "select t.tenant_id from unnest($1::text[]) as t (tenant_id)"
    " cross join lateral relay.durable_jobs(t.tenant_id, array[$2::uuid]) as j"
)
_HEALTH: Final = (
    "select t.tenant_id, h.* from unnest($1::text[]) as t (tenant_id)"
    " cross join lateral relay.durable_health(t.tenant_id) as h"
)
_TURNS: Final = "select name, next_due_at from relay.durable_turns()"


class DurableHealth:
    """Reads over several tenants, on one connection; each is one statement, and changes and locks nothing."""

    __slots__ = ("_conn",)

    def __init__(self, connection: Connection) -> None:
        self._conn = connection

    async def tenants(self) -> list[str]:
        """Return the tenants that the login is bound to; of one that is bound to all, those that have a job."""
        return [row["tenant_id"] for row in await self._fetch(_TENANTS)]

    async def locate(self, tenants: Sequence[str], job_id: UUID) -> list[str]:
        """Return those of the tenants that have a job of this id."""
        return [row["tenant_id"] for row in await self._fetch(_LOCATE, list(tenants), job_id)]

    async def health(self, tenants: Sequence[str]) -> list[Any]:
        """Return what is amiss, a row for each tenant: it reads every job, and of their chunks the open ones."""
        return await self._fetch(_HEALTH, list(tenants))

    async def turns(self) -> dict[str, datetime]:
        """Return when each sweep that was ever made is next due."""
        return {row["name"]: row["next_due_at"] for row in await self._fetch(_TURNS)}

    async def _fetch(self, sql: str, *args: object) -> list[Any]:
        with mapped_errors():
            rows: list[Any] = await self._conn.fetch(sql, *args)
            return rows
