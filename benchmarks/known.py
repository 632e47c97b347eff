"""Do the baselines reach what is known of a machine of that size? A slow baseline makes a good ratio worthless.

The figures are of 2 cores, PostgreSQL 18, durable, everything on one machine. They are compared on 2 cores only, and
scaled in no way; on other machines they are shown. What no scenario has as a baseline is measured here, before the
scenarios: plain INSERTs into one table with one index, which is what the disk, the server and the driver can do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import asyncpg

from benchmarks.model import Json
from benchmarks.runner import ScenarioResult
from benchmarks.sandbox import BODY, HEADERS, Sandbox
from dispatch_core.ids import new_id

__all__ = ["CORES", "compare", "plain_inserts", "sentences"]

CORES: Final = 2
"""The number of cores that the known figures are of."""

_TABLE: Final = "create table plain (id uuid primary key, headers text not null, body bytea not null)"
_INSERT: Final = "insert into plain values ($1, $2, $3)"
_INSERT_MANY: Final = "insert into plain select * from unnest($1::uuid[], $2::text[], $3::bytea[])"
_TASKS: Final = 16
_ARRAY: Final = 1000

_PLAIN: Final = {
    "plain inserts by 1 task": 4_400.0,
    f"plain inserts by {_TASKS} tasks": 11_800.0,
    "plain inserts in arrays": 110_000.0,
}
# Scenario, case, contender, figure, jobs a second.
_IN_SCENARIOS: Final = (
    ("drain", "-", "loop-1", "rate", 29_000.0),
    ("drain", "-", "loop-2", "rate", 38_000.0),
    ("enqueue", "tasks=256", "ours", "rate", 22_000.0),
)


async def plain_inserts(sandbox: Sandbox, *, seconds: float) -> dict[str, float]:
    """Return rows a second of plain INSERTs, by name; takes three times `seconds`."""
    async with sandbox.connections(sandbox.bare_dsn, _TASKS) as connections:
        await connections[0].execute(_TABLE)
        for connection in connections:
            await connection.execute(_INSERT, new_id(), HEADERS, BODY)
        rates = [
            await _by_tasks(connections[:1], seconds),
            await _by_tasks(connections, seconds),
            await _in_arrays(connections[0], seconds),
        ]
    return dict(zip(_PLAIN, rates, strict=True))


async def _by_tasks(connections: Sequence[asyncpg.Connection[Any]], seconds: float) -> float:
    rows = 0
    started = time.perf_counter()
    end = started + seconds

    async def insert(connection: asyncpg.Connection[Any]) -> None:
        nonlocal rows
        while time.perf_counter() < end:
            await connection.execute(_INSERT, new_id(), HEADERS, BODY)
            rows += 1

    await asyncio.gather(*(insert(connection) for connection in connections))
    return rows / (time.perf_counter() - started)


async def _in_arrays(connection: asyncpg.Connection[Any], seconds: float) -> float:
    rows = 0
    started = time.perf_counter()
    while time.perf_counter() < started + seconds:
        ids = [new_id() for _ in range(_ARRAY)]
        await connection.execute(_INSERT_MANY, ids, [HEADERS] * _ARRAY, [BODY] * _ARRAY)
        rows += _ARRAY
    return rows / (time.perf_counter() - started)


def compare(plain: Mapping[str, float], results: Sequence[ScenarioResult], *, cores: int) -> list[Json]:
    """Return each known figure that this run has one to put beside; `reaches` is null on other numbers of cores."""
    pairs = [(what, plain[what], known) for what, known in _PLAIN.items()]
    for scenario, case, contender, figure, known in _IN_SCENARIOS:
        measured = [
            entry.of(contender, figure)
            for result in results
            for entry in result.cases
            if (result.scenario.name, entry.case.name) == (scenario, case)
        ]
        pairs += [(f"{scenario}, {contender}", rate, known) for rate in measured if rate is not None]
    return [
        {
            "what": what,
            "measured": rate,
            "known_on_2_cores": known,
            "reaches": rate >= known if cores == CORES else None,
        }
        for what, rate, known in pairs
    ]


def sentences(compared: Sequence[Json], *, cores: int) -> list[str]:
    """Return a line for each figure."""
    if cores != CORES:
        return [
            f"{entry['what']}: {entry['measured']:,.0f}/s on {cores} cores;"
            f" known of {CORES}: {entry['known_on_2_cores']:,.0f}/s"
            for entry in compared
        ]
    return [
        f"{entry['what']}: {entry['measured']:,.0f}/s {'reaches' if entry['reaches'] else 'falls short of'}"
        f" the {entry['known_on_2_cores']:,.0f}/s known of such a machine"
        for entry in compared
    ]
