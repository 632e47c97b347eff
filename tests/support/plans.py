"""The plans that statements inside the functions really had, by auto_explain."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import asyncpg

from tests.support.databases import TestDatabase

Connection: TypeAlias = "asyncpg.Connection[Any]"

_NOTICE = re.compile(r"duration: [\d.]+ ms\s+plan:\s*(\{.*\})\s*$", re.DOTALL)


@dataclass(frozen=True)
class Node:
    """One node of a plan."""

    kind: str
    relation: str | None
    index: str | None
    condition: str
    rows: float
    depth: int
    raw: dict[str, Any]

    @property
    def rows_read(self) -> float:
        """How many rows it looked at, over all its loops."""
        loops = self.raw.get("Actual Loops", 1)
        removed = self.raw.get("Rows Removed by Filter", 0) + self.raw.get("Rows Removed by Index Recheck", 0)
        return (self.raw.get("Actual Rows", 0) + removed) * loops


@dataclass(frozen=True)
class Explained:
    """One statement that ran, and its plan."""

    text: str
    plan: dict[str, Any]

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes that were executed, the root first."""
        yield from _walk(self.plan, 0)

    def of_table(self, name: str) -> list[Node]:
        """Return the nodes that read a table."""
        return [node for node in self.nodes() if node.relation == name and "Scan" in node.kind]

    @property
    def blocks(self) -> int:
        """How many shared buffers it touched."""
        return int(self.plan.get("Shared Hit Blocks", 0)) + int(self.plan.get("Shared Read Blocks", 0))


def _walk(plan: dict[str, Any], depth: int) -> Iterator[Node]:
    yield Node(
        plan["Node Type"],
        plan.get("Relation Name"),
        plan.get("Index Name"),
        plan.get("Index Cond", "") or plan.get("TID Cond", ""),
        plan.get("Actual Rows", 0),
        depth,
        plan,
    )
    for child in plan.get("Plans", []):
        yield from _walk(child, depth + 1)


class Recorder:
    """Keeps every plan of one connection since the last `take`."""

    def __init__(self) -> None:
        self._plans: list[Explained] = []

    def hear(self, _: object, message: asyncpg.PostgresLogMessage) -> None:
        found = _NOTICE.search(str(message))
        if found is not None:
            document = json.loads(found.group(1))
            self._plans.append(Explained(document["Query Text"], document["Plan"]))

    def take(self) -> list[Explained]:
        """Return the plans so far, and forget them."""
        plans, self._plans = self._plans, []
        return plans


@asynccontextmanager
async def explained(database: TestDatabase, login: str) -> AsyncIterator[tuple[Connection, Recorder]]:
    """Open a connection that acts as `login` and whose every statement, nested ones too, is explained."""
    recorder = Recorder()
    # Only a superuser may load the module; from then on it is the plain login that plans and runs.
    connection: Connection = await asyncpg.connect(database.admin_dsn)
    try:
        connection.add_log_listener(recorder.hear)
        await connection.execute(
            f"""
            load 'auto_explain';
            set auto_explain.log_min_duration = 0;
            set auto_explain.log_nested_statements = on;
            set auto_explain.log_analyze = on;
            set auto_explain.log_buffers = on;
            set auto_explain.log_timing = off;
            set auto_explain.log_format = json;
            set client_min_messages = log;
            set session authorization {login};
            """
        )
        recorder.take()
        yield connection, recorder
    finally:
        connection.terminate()
