"""A process of claimers: connections that claim as fast as they can, for as long as they are told (scenario claim).

It lives as long as the scenario, and so do its connections: what a sample measures is claims, not logins. Orders:

    {"prepare": kind, "claimers": n}                       open what is missing, one claim each of a relay without jobs
    {"claim": kind, "claimers": n, "batch": b, "start": t, "seconds": s}
                                                           -> {"ids": […], "times": […], "ended": t}

Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final
from uuid import UUID

import asyncpg

from benchmarks.bare import statements
from benchmarks.child import Orders
from benchmarks.sandbox import RELAY, TENANT, TTL, Connection
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.ids import new_id

__all__ = ["KINDS", "claimers"]

Claim = Callable[[Connection, str, str, int], Awaitable[list[UUID]]]

# PostgreSQL settles on a plan at the sixth execution of a statement.
_WARM: Final = 6


async def _ours(connection: Connection, relay: str, claimed_by: str, batch: int) -> list[UUID]:
    claimed = await RelayDispatchRepository(connection, TENANT).claim(relay, claimed_by=claimed_by, limit=batch)
    return [job.job_id for job in claimed.jobs]


def _bare(statement: str) -> Claim:
    async def claim(connection: Connection, relay: str, claimed_by: str, batch: int) -> list[UUID]:
        rows = await connection.fetch(statement, TENANT, relay, claimed_by, new_id(), TTL, batch)
        return [row[0] for row in rows]

    return claim


KINDS: Final[dict[str, tuple[str, Claim]]] = {
    "ours": ("worker", _ours),
    "bare": ("owner", _bare(statements.CLAIM)),
    "bare-on-ours": ("owner", _bare(statements.CLAIM_ON_OURS)),
}
"""By name: who logs in, and what is claimed with."""


async def claimers(ready: Callable[[], None], _stop: asyncio.Event, orders: Orders, *, dsns: dict[str, str]) -> None:
    """Serve orders until there are no more."""
    opened: dict[str, list[Connection]] = {"worker": [], "owner": []}
    warm: dict[str, int] = dict.fromkeys(KINDS, 0)
    ready()
    async for order in orders:
        kind = order.get("prepare") or order["claim"]
        login, claim = KINDS[kind]
        mine = opened[login]
        if "prepare" in order:
            while len(mine) < order["claimers"]:
                mine.append(await asyncpg.connect(dsns[login]))
            for number, connection in enumerate(mine[: order["claimers"]]):
                # The table may have been filled anew since the last sample: plans are made again.
                for _ in range(_WARM if number >= warm[kind] else 1):
                    await claim(connection, "nobody", "warm", 1)
            warm[kind] = max(warm[kind], order["claimers"])
            orders.answer("ready")
        else:
            orders.answer(await _claim(claim, mine[: order["claimers"]], order))
    for connections in opened.values():
        for connection in connections:
            await connection.close(timeout=10)


async def _claim(claim: Claim, connections: list[Connection], order: dict[str, Any]) -> dict[str, Any]:
    ids: list[UUID] = []
    times: list[float] = []
    start, end, batch = order["start"], order["start"] + order["seconds"], order["batch"]

    async def claimer(connection: Connection) -> None:
        claimed_by = str(new_id())
        while (began := time.monotonic()) < end:
            found = await claim(connection, RELAY, claimed_by, batch)
            times.append(time.monotonic() - began)
            ids.extend(found)
            if not found:
                return

    await asyncio.sleep(start - time.monotonic())
    await asyncio.gather(*(claimer(connection) for connection in connections))
    return {"ids": [job_id.hex for job_id in ids], "times": times, "ended": time.monotonic()}
