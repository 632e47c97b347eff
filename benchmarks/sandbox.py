"""A fresh database for every sample, cloned from a template that may hold a backlog already.

The template is cloned through the write-ahead log and not by copying files: so the clone's pages are in memory and not
owed a full-page image each, and a sample measures its own work and not that of a checkpoint.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import asyncpg

from benchmarks.bare import statements
from dispatch_core import DispatchRequest
from dispatch_core.codec import decode_json
from dispatch_core.dev.logins import GATEWAY_LOGIN, OPERATOR_LOGIN, WORKER_LOGIN
from dispatch_core.dev.postgres import DevServer
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.migrate import grant, migrate

__all__ = ["BODY", "HEADERS", "OPERATION", "RELAY", "TENANT", "TTL", "Connection", "Sandbox", "Sandboxes"]

Connection: TypeAlias = "asyncpg.Connection[Any]"

TENANT: Final = "acme"
RELAY: Final = "erp"
OPERATION: Final = "GetInvoice"
HEADERS: Final = '{"content-type":"application/json"}'
BODY: Final = b'{"invoice":"2026-000123","lines":[{"sku":"A-1","quantity":3},{"sku":"B-2","quantity":1}]}'
# Long enough that no job of any sample ends by its deadline.
TTL: Final = timedelta(days=1)

T = TypeVar("T")
Say = Callable[[str], None]


def _no_other() -> AbstractAsyncContextManager[Sandbox]:
    raise NotImplementedError


_numbers = itertools.count(1)


@dataclass(frozen=True)
class Sandbox:
    """One database of one sample, and who may enter it.

    Ours enter as the plain logins; the bare side as the superuser, who owns its tables and pays for no policy.
    """

    server: DevServer
    name: str
    say: Say = lambda _: None
    """Tells the progress bar what is being prepared; never while something is measured."""
    another: Callable[[], AbstractAsyncContextManager[Sandbox]] = field(kw_only=True, default=_no_other)
    """Makes one more, empty; for samples that compare two databases."""
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _kept: dict[str, Any] = field(default_factory=dict)

    async def keep(self, key: str, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """Return what was made under `key`, made now if it was not; it is left when the sandbox goes.

        For scenarios whose samples share a sandbox: processes, connections, a backlog that takes minutes to fill.
        """
        if key not in self._kept:
            self._kept[key] = await self._stack.enter_async_context(make())
        kept: T = self._kept[key]
        return kept

    @property
    def admin_dsn(self) -> str:
        return self.server.admin_dsn_of(self.name)

    @property
    def bare_dsn(self) -> str:
        return self.admin_dsn

    @property
    def gateway_dsn(self) -> str:
        return self.server.gateway_dsn(self.name)

    @property
    def worker_dsn(self) -> str:
        return self.server.worker_dsn(self.name)

    @asynccontextmanager
    async def connections(self, dsn: str, count: int) -> AsyncIterator[list[Connection]]:
        """Open `count` connections, one by one, and close them."""
        opened: list[Connection] = []
        try:
            for _ in range(count):
                opened.append(await asyncpg.connect(dsn))  # noqa: PERF401 - what is open is closed, whatever happens
            yield opened
        finally:
            for connection in opened:
                await connection.close(timeout=10)

    async def fetch(self, sql: str, *arguments: object) -> list[Any]:
        """Read something as the superuser, from outside of what is measured."""
        connection = await asyncpg.connect(self.admin_dsn)
        try:
            return list(await connection.fetch(sql, *arguments))
        finally:
            await connection.close()

    async def counts(self, side: str) -> dict[str, int]:
        """Return how many requests, live jobs and results there are; `side` is ours or bare."""
        tables = {
            "ours": "relay.s2r_relay_dispatch_request relay.s2r_relay_dispatch_queue relay.s2r_relay_dispatch_result",
            "bare": "bare.request bare.queue bare.result",
        }[side].split()
        [row] = await self.fetch(
            f"select (select count(*) from {tables[0]}), (select count(*) from {tables[1]}),"
            f" (select count(distinct job_id) from {tables[2]} where status = 'succeeded'),"
            f" (select count(*) from {tables[2]})"
        )
        return {"requests": row[0], "queued": row[1], "succeeded": row[2], "results": row[3]}

    async def completion_span(self, side: str) -> float:
        """Return the seconds from the first claim to the last completion, by the database's clock."""
        table = "relay.s2r_relay_dispatch_result" if side == "ours" else "bare.result"
        [row] = await self.fetch(f"select extract(epoch from max(completed_at) - min(claimed_at)) from {table}")
        return float(row[0])


@dataclass
class Sandboxes:
    """Makes sandboxes, from one migrated template and one more for each size of backlog."""

    server: DevServer
    say: Say = lambda _: None
    _templates: dict[tuple[int, int | None], str] = field(default_factory=dict)

    @asynccontextmanager
    async def sandbox(self, preload: int = 0, body_bytes: int | None = None) -> AsyncIterator[Sandbox]:
        """Clone a database that holds `preload` pending jobs, ours and bare; drop it afterwards."""
        template = await self._template(preload, body_bytes)
        name = _name("sample")
        await self._create(name, template)
        sandbox = Sandbox(self.server, name, self.say, another=self.sandbox)
        try:
            async with sandbox._stack:
                yield sandbox
        finally:
            await self._drop(name)

    async def close(self) -> None:
        """Drop the templates, where the server outlives us."""
        if not self.server.is_ours:
            for name in self._templates.values():
                await self._drop(name)
        self._templates.clear()

    async def _template(self, preload: int, body_bytes: int | None = None) -> str:
        key = (preload, body_bytes)
        if key not in self._templates:
            name = _name("template")
            self.say(f"a template with {preload:,} jobs")
            if preload:
                await self._create(name, await self._template(0))
                await _fill(Sandbox(self.server, name), preload, body_bytes)
            else:
                await self._create(name, "template1")
                await _install(self.server, name)
            self._templates[key] = name
        return self._templates[key]

    async def _create(self, name: str, template: str) -> None:
        # The checkpoint first: pages that are written after it are not owed a full image in the log once more.
        await self._execute("checkpoint")
        await self._execute(f"create database {name} template {template} strategy wal_log")

    async def _drop(self, name: str) -> None:
        await self._execute(f"drop database if exists {name} with (force)")

    async def _execute(self, sql: str) -> None:
        connection = await asyncpg.connect(self.server.admin_dsn)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()


def _name(kind: str) -> str:
    return f"s2r_bench_{kind}_{os.getpid()}_{next(_numbers)}"


async def _install(server: DevServer, name: str) -> None:
    dsn = server.admin_dsn_of(name)
    await migrate(dsn)
    await grant(dsn, GATEWAY_LOGIN, role="gateway", tenant=None, relay=None)
    await grant(dsn, WORKER_LOGIN, role="worker", tenant=None, relay=None)
    await grant(dsn, OPERATOR_LOGIN, role="operator", tenant=None, relay=None)
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(Path(__file__).with_name("bare").joinpath("schema.sql").read_text())
    finally:
        await connection.close()


async def _fill(sandbox: Sandbox, jobs: int, body_bytes: int | None) -> None:
    async with (
        sandbox.connections(sandbox.gateway_dsn, 1) as [gateway],
        sandbox.connections(sandbox.admin_dsn, 1) as [admin],
    ):
        for connection in (gateway, admin):
            await connection.execute("set synchronous_commit = off")
        headers = decode_json(HEADERS.encode())
        left = jobs
        while left:
            count = min(left, 2000 if body_bytes is None else 100)
            bodies = [BODY if body_bytes is None else os.urandom(body_bytes) for _ in range(count)]
            requests = [DispatchRequest(RELAY, OPERATION, headers=headers, body=body, ttl=TTL) for body in bodies]
            ids = await RelayDispatchRepository(gateway, TENANT).enqueue_many(requests)
            if body_bytes is None:
                await admin.execute(
                    statements.INSERT_MANY, TENANT, ids, RELAY, OPERATION, [HEADERS] * count, bodies, TTL
                )
            left -= count
        # Both sides start with clean pages; the queue is never analyzed, as in use.
        await admin.execute("vacuum")
