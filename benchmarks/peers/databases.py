"""A fresh database for each sample, cloned from a template in which the system was installed by its own means.

The clone is made through the write-ahead log, with a checkpoint before it: its pages are in memory, and a sample
measures its own work.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from benchmarks.peers.model import Contender, System
from dispatch_core.dev.postgres import DevServer

__all__ = ["Database", "Databases"]

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Database:
    """One database of one sample. Peers enter as its owner; ours as plain logins, with row security in force."""

    server: DevServer
    name: str
    system: str

    @property
    def admin_dsn(self) -> str:
        return self.server.admin_dsn_of(self.name)

    def dsn(self, role: str) -> str:
        """Return where a producer or a worker connects to."""
        if self.system != "ours":
            return self.admin_dsn
        return self.server.worker_dsn(self.name) if role == "worker" else self.server.gateway_dsn(self.name)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """Open a connection of the superuser, to look from outside of what is measured."""
        connection = await asyncpg.connect(self.admin_dsn)
        try:
            yield connection
        finally:
            await connection.close()


@dataclass
class Databases:
    """Makes databases, from one template for each contender."""

    server: DevServer
    _templates: dict[str, str] = field(default_factory=dict)

    async def prepare(self, system: System, contender: Contender) -> None:
        """Make the contender's template, if there is none yet."""
        if contender.name not in self._templates:
            name = _name("template")
            await self._execute(f"create database {name}")
            await system.install(self.server.admin_dsn_of(name), contender)
            self._templates[contender.name] = name

    @asynccontextmanager
    async def database(
        self, system: System, contender: Contender, settings: Mapping[str, str]
    ) -> AsyncIterator[Database]:
        """Clone the contender's template, with settings of its own; drop it afterwards."""
        await self.prepare(system, contender)
        name = _name("sample")
        await self._execute("checkpoint")
        await self._execute(f"create database {name} template {self._templates[contender.name]} strategy wal_log")
        try:
            for setting, value in settings.items():
                await self._execute(f"alter database {name} set {setting} = '{value}'")
            yield Database(self.server, name, system.name)
        finally:
            await self._execute(f"drop database if exists {name} with (force)")

    async def close(self) -> None:
        """Drop the templates, where the server outlives us."""
        if not self.server.is_ours:
            for name in self._templates.values():
                await self._execute(f"drop database if exists {name} with (force)")
        self._templates.clear()

    async def _execute(self, sql: str) -> None:
        connection = await asyncpg.connect(self.server.admin_dsn)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()


def _name(kind: str) -> str:
    return f"s2r_peers_{kind}_{os.getpid()}_{next(_numbers)}"
