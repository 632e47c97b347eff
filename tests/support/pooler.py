"""A fake transaction pooler: a few server sessions, shared by all clients, one transaction at a time.

    async with FakePooler.before(dsn, mode="swap") as pooler:
        connection = await asyncpg.connect(pooler.dsn(dsn))

Modes:

    swap      every transaction goes to another session than the one before
    sticky    the first session that is free, as a real pooler with little to do: nearly always the same one
    session   a client keeps the session it got until it goes

As with the real ones, a client is told a process id that no server process has, what a session says while no client is
on it is thrown away, session state stays behind for the next client, and cancel requests come to nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import anyio
import asyncpg

PoolerMode = Literal["swap", "sticky", "session"]

_SSL, _GSS, _CANCEL = 80877103, 80877104, 80877102
_NO_PID = 7
_PARAMETERS = (
    "server_version",
    "server_encoding",
    "client_encoding",
    "integer_datetimes",
    "standard_conforming_strings",
)


class _Session:
    """One server session: logged in by asyncpg, whose socket then is spoken to directly."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self.connection = connection
        self.pid: int = connection.get_server_pid()
        self.parameters = {name: str(getattr(connection.get_settings(), name)) for name in _PARAMETERS}
        self.answered = anyio.Event()
        self.state = b"I"
        self.taken = False
        self.client: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        transport: Any = self.connection._transport  # type: ignore[attr-defined]
        duplicate = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        duplicate.setblocking(False)
        transport.abort()  # not terminate(), which would say good-bye to the server; the duplicate stays open
        self.reader, self.writer = await asyncio.open_connection(sock=duplicate)

    async def pump(self) -> None:
        """Send what the server says to the client that is on the session; tell when a transaction is over."""
        while True:
            header = await self.reader.readexactly(5)
            body = await self.reader.readexactly(struct.unpack("!I", header[1:])[0] - 4)
            if self.client is not None and not self.client.is_closing():
                self.client.write(header + body)
            if header[:1] == b"Z":
                self.state = body
                self.answered.set()

    async def ask(self, message: bytes) -> None:
        """Send what ends in a ReadyForQuery, and wait for that."""
        self.answered = answered = anyio.Event()
        self.writer.write(message)
        await answered.wait()


class FakePooler:
    """Listens on a loopback port of its own. Use it with `async with` in the test itself."""

    def __init__(self, dsn: str, *, mode: PoolerMode = "swap", sessions: int = 3) -> None:
        self._dsn = dsn
        self._count = sessions
        self.mode = mode
        self.sessions: list[_Session] = []
        self.transactions = 0
        self._next = 0
        self._freed = asyncio.Condition()

    @classmethod
    def before(cls, dsn: str, *, mode: PoolerMode = "swap", sessions: int = 3) -> Self:
        """Make a pooler that logs in with this DSN, whoever its clients say they are."""
        return cls(dsn, mode=mode, sessions=sessions)

    def dsn(self, dsn: str) -> str:
        """Return the DSN that goes through this pooler."""
        parts = urlsplit(dsn)
        login = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{self.port}"))

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        for _ in range(self._count):
            session = _Session(await asyncpg.connect(self._dsn))
            await session.open()
            self.sessions.append(session)
            self._group.start_soon(session.pump)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)
        for session in self.sessions:
            session.writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._group.start_soon(self._serve, reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session: _Session | None = None
        try:
            if not await self._greet(reader, writer):
                return
            while True:
                kind, message = await self._message(reader)
                if kind == b"X":
                    return
                if session is None:
                    session = await self._take()
                    session.client = writer
                if kind not in b"QS":  # a simple query, or the end of a group
                    session.writer.write(message)
                    continue
                await session.ask(message)
                if session.state == b"I" and self.mode != "session":
                    await self._give_back(session)
                    session = None
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.transport.abort()
            if session is not None:
                with anyio.CancelScope(shield=True):
                    await self._give_back(session)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        while True:
            (size, code) = struct.unpack("!II", await reader.readexactly(8))
            await reader.readexactly(size - 8)
            if code in (_SSL, _GSS):
                writer.write(b"N")
            elif code == _CANCEL:
                return False
            else:
                break
        writer.write(_framed(b"R", struct.pack("!I", 0)))
        for name, value in self.sessions[0].parameters.items():
            writer.write(_framed(b"S", name.encode() + b"\0" + value.encode() + b"\0"))
        writer.write(_framed(b"K", struct.pack("!II", _NO_PID, 1)) + _framed(b"Z", b"I"))
        return True

    async def _message(self, reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        header = await reader.readexactly(5)
        return header[:1], header + await reader.readexactly(struct.unpack("!I", header[1:])[0] - 4)

    async def _take(self) -> _Session:
        async with self._freed:
            while True:
                first = self._next if self.mode == "swap" else 0
                for session in self.sessions[first:] + self.sessions[:first]:
                    if not session.taken:
                        session.taken = True
                        self._next = (self.sessions.index(session) + 1) % len(self.sessions)
                        self.transactions += 1
                        return session
                await self._freed.wait()

    async def _give_back(self, session: _Session) -> None:
        session.client = None
        if session.state != b"I":
            await session.ask(_framed(b"Q", b"rollback\0"))
        session.taken = False
        async with self._freed:
            self._freed.notify_all()


def _framed(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body
