"""Count statements on the wire: a door before the server that lets everything through and reads what goes in.

Independent of what a client says of itself, of extensions of the server and of its log. It reads the messages of the
frontend (Query, Parse, Bind, Execute) and counts each statement that is executed, under the `application_name` of its
session and a short name: that of our function, or its first words. For idle links: it is Python, and takes its time.
"""

from __future__ import annotations

import asyncio
import re
import struct
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeAlias
from urllib.parse import urlsplit, urlunsplit

__all__ = ["Counts", "Tap", "tapped"]

_ENCRYPTION_REQUESTS: Final = (80877103, 80877104)
_CANCEL: Final = 80877102

_NAMES: Final = (
    (re.compile(r"\brelay\.(\w+)\s*\("), None),
    (re.compile(r"pg_listening_channels"), "probe"),
    (re.compile(r"\bupdate bare\.queue\b"), "claim"),
    (re.compile(r"\bdelete from bare\.queue\b"), "complete"),
)

Counts: TypeAlias = "Counter[tuple[str, str]]"
"""How often, by session's name and statement's name."""


class Tap:
    """The open door; `counts` only grows, and so do `times`: when each statement passed, by the monotonic clock."""

    def __init__(self, host: str, port: int) -> None:
        self._server = host, port
        self.port = 0
        self.counts: Counts = Counter()
        self.times: defaultdict[str, list[float]] = defaultdict(list)

    def dsn(self, dsn: str) -> str:
        """Return the DSN that leads through here."""
        parts = urlsplit(dsn)
        return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{self.port}"))

    def by_name(self) -> Counter[str]:
        """Return how often each statement came, of all sessions."""
        found: Counter[str] = Counter()
        for (_, name), count in self.counts.items():
            found[name] += count
        return found

    async def silence(self, seconds: float) -> None:
        """Wait until no statement has come for so long."""
        seen = -1
        while seen != (seen := self.counts.total()):  # noqa: ASYNC110
            await asyncio.sleep(seconds)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on until either side ends it."""
        try:
            name, startup = await _startup(reader, writer)
            from_server, to_server = await asyncio.open_connection(*self._server)
        except (OSError, EOFError):
            writer.close()
            return
        to_server.write(startup)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(from_server, writer))
                group.create_task(self._read(name, reader, to_server))
        except* (OSError, EOFError):
            pass
        finally:
            writer.close()
            to_server.close()

    async def _read(self, name: str, reader: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        statements: dict[bytes, str] = {}
        portals: dict[bytes, str] = {}
        while True:
            head = await reader.readexactly(5)
            body = await reader.readexactly(int.from_bytes(head[1:]) - 4)
            match head[:1]:
                case b"Q":
                    self._count(name, _name(body[:-1]))
                case b"P":
                    statement, text, _ = body.split(b"\0", 2)
                    statements[statement] = _name(text)
                case b"B":
                    portal, statement, _ = body.split(b"\0", 2)
                    portals[portal] = statements.get(statement, "?")
                case b"E":
                    self._count(name, portals.get(body.partition(b"\0")[0], "?"))
            to_server.write(head + body)
            await to_server.drain()

    def _count(self, session: str, statement: str) -> None:
        self.counts[session, statement] += 1
        self.times[statement].append(time.monotonic())


@asynccontextmanager
async def tapped(dsn: str) -> AsyncIterator[Tap]:
    """Open a door before the server of `dsn`, on a port of its own; with the block, its connections end."""
    parts = urlsplit(dsn)
    tap = Tap(parts.hostname or "127.0.0.1", parts.port or 5432)
    server = await asyncio.start_server(tap.serve, "127.0.0.1", 0)
    tap.port = server.sockets[0].getsockname()[1]
    try:
        yield tap
    finally:
        server.close()


async def _startup(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, bytes]:
    """Read the first message; no encryption, which could not be read."""
    while True:
        head = await reader.readexactly(8)
        length, code = struct.unpack("!ii", head)
        if code not in _ENCRYPTION_REQUESTS:
            break
        writer.write(b"N")
    body = await reader.readexactly(length - 8)
    if code == _CANCEL:
        return "", head + body
    words = body.split(b"\0")
    parameters = dict(zip(words[::2], words[1::2], strict=False))
    return parameters.get(b"application_name", b"").decode(), head + body


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    raise EOFError


def _name(sql: bytes) -> str:
    text = sql.decode(errors="replace")
    for pattern, name in _NAMES:
        if found := pattern.search(text):
            return name or found[1]
    return " ".join(text.split()[:2]).lower()[:40]
