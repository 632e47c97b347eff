"""Bare worker loops: claim a batch, complete it, again, on some connections of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final
from uuid import UUID

from benchmarks.bare import statements
from benchmarks.sandbox import RELAY, TENANT, TTL, Connection
from dispatch_core.ids import new_id

__all__ = ["drain_by_functions", "drain_by_statements", "echo_by_functions"]

_CLAIM: Final = "select * from relay.claim($1, $2, $3, $4, $5, $6)"
_COMPLETE: Final = "select n, outcome from relay.complete($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)"

Round = Callable[[Connection, str, int], Awaitable[list[UUID]]]


async def _by_functions(connection: Connection, claimed_by: str, batch: int, *, echo: bool = False) -> list[UUID]:
    jobs = await connection.fetch(_CLAIM, RELAY, [TENANT], batch, claimed_by, new_id(), TTL)
    if not jobs:
        return []
    count = len(jobs)
    ids = [job["job_id"] for job in jobs]
    answers = await connection.fetch(
        _COMPLETE,
        RELAY,
        claimed_by,
        [TENANT],
        [count],
        ids,
        [job["fence"] for job in jobs],
        ["succeeded"] * count,
        [200] * count,
        ["{}"] * count,
        [job["body"] for job in jobs] if echo else [b""] * count,
        [None] * count,
        [None] * count,
    )
    if any(answer["outcome"] != "applied" for answer in answers):
        raise AssertionError("a completion was refused")
    return ids


async def _by_statements(connection: Connection, claimed_by: str, batch: int) -> list[UUID]:
    jobs = await connection.fetch(statements.CLAIM, TENANT, RELAY, claimed_by, new_id(), TTL, batch)
    if not jobs:
        return []
    ids = [job["job_id"] for job in jobs]
    done = await connection.fetch(
        statements.COMPLETE, TENANT, ids, [job["fence"] for job in jobs], claimed_by, [b""] * len(jobs), RELAY
    )
    if len(done) != len(jobs):
        raise AssertionError("a completion was refused")
    return ids


async def drain_by_functions(connections: list[Connection], batch: int, claimed_by: str = "loop") -> list[UUID]:
    """Drain the queue by calls of our SQL functions; return the job ids as they were claimed."""
    return await _drain(_by_functions, connections, batch, claimed_by)


async def echo_by_functions(connections: list[Connection], batch: int) -> list[UUID]:
    """Do the same, and store each body as the result. `batch` of them have to come with the claim."""
    return await _drain(partial(_by_functions, echo=True), connections, batch, "loop")


async def drain_by_statements(connections: list[Connection], batch: int) -> list[UUID]:
    """Drain the bare queue by the bare statements; return the job ids as they were claimed."""
    return await _drain(_by_statements, connections, batch, "loop")


async def _drain(one_round: Round, connections: list[Connection], batch: int, claimed_by: str) -> list[UUID]:
    async def loop(number: int, connection: Connection) -> list[UUID]:
        every: list[UUID] = []
        while ids := await one_round(connection, f"{claimed_by}-{number}", batch):
            every += ids
        return every

    found: list[Any] = await asyncio.gather(*(loop(number, each) for number, each in enumerate(connections)))
    return [job_id for ids in found for job_id in ids]
