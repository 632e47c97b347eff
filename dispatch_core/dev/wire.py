"""A wire to PostgreSQL that holds still at a chosen statement, so that a process can be killed at exactly that step.

    async with Wire.to(dsn) as wire:
        gate = wire.hold("relay.outbox_settle", "answer")
        ...                                # start a process that connects to wire.dsn(dsn)
        await gate.reached.wait()
        process.kill()                     # what is held back never arrives

The process knows nothing of it: there is no hook, only a TCP proxy that reads along. Held is either the statement
("call": the server never gets it) or what the server says to it ("answer": it is done, and committed if it was a
transaction of its own, and its caller never learns of that). What follows on that connection is held with it; other
connections go on. Encryption is declined, so that there is something to read.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import anyio
import anyio.abc

__all__ = ["Gate", "Wire"]

_ENCRYPTION_REQUESTS: Final = ((80877103).to_bytes(4, "big"), (80877104).to_bytes(4, "big"))

Side = Literal["call", "answer"]


@dataclass
class Gate:
    """Where the wire holds: the `number`th statement from now on whose text contains `text`."""

    text: str
    side: Side
    number: int = 1
    reached: anyio.Event = field(default_factory=anyio.Event)
    """The statement is held; or the server is done with it, and its answer is."""
    released: anyio.Event = field(default_factory=anyio.Event)
    answered: anyio.Event = field(default_factory=anyio.Event)
    """The server is done with what was let go."""

    def release(self) -> None:
        """Let go what is held, as if the network had stalled for a while. (A `call` only.)"""
        self.released.set()


class Wire:
    """Forwards one local port to a server."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._gate: Gate | None = None
        self._port = 0

    @classmethod
    def to(cls, dsn: str) -> Self:
        """Make a wire to the server of a DSN."""
        parts = urlsplit(dsn)
        return cls(parts.hostname or "127.0.0.1", parts.port or 5432)

    def dsn(self, dsn: str) -> str:
        """Return the DSN that goes over this wire."""
        parts = urlsplit(dsn)
        login = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{self._port}"))

    def hold(self, text: str, side: Side, number: int = 1) -> Gate:
        """Hold the `number`th statement from now on that contains `text`, or its answer, and nothing else."""
        self._gate = Gate(text, side, number)
        return self._gate

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(kind, error, trace)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._group.start_soon(self._serve, reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            # Whoever of the two ends ends it for the other.
            with contextlib.suppress(OSError, EOFError):
                server_reader, server_writer = await asyncio.open_connection(*self._server)
                writers.append(server_writer)
                connection = _Connection(self, reader, writer, server_reader, server_writer)
                async with anyio.create_task_group() as group:
                    group.start_soon(connection.calls, group)
                    group.start_soon(connection.answers, group)
        finally:
            for each in writers:
                each.transport.abort()

    def passing(self, text: str) -> Gate | None:
        """Count a statement; return the gate where it is the one to be held."""
        gate = self._gate
        if gate is None or gate.text not in text:
            return None
        gate.number -= 1
        if gate.number:
            return None
        self._gate = None
        return gate


class _Connection:
    def __init__(
        self,
        wire: Wire,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        self._wire = wire
        self._client, self._to_client = _Client(client), to_client
        self._server, self._to_server = server, to_server
        self._statements: dict[bytes, str] = {}
        self._held: Gate | None = None
        self._let_go: Gate | None = None

    async def calls(self, group: anyio.abc.TaskGroup) -> None:
        """Forward what the client says, until it has nothing more to say."""
        with contextlib.suppress(OSError, EOFError):
            await self._start()
            while True:
                kind, message = await self._client.message()
                text = self._statement(kind, message)
                gate = None if text is None else self._wire.passing(text)
                if gate is not None and gate.side == "call":
                    gate.reached.set()
                    if not await self._client.stays_until(gate.released):
                        break
                    self._let_go, gate = gate, None
                self._held = gate or self._held
                self._to_server.write(kind + message)
                await self._to_server.drain()
        group.cancel_scope.cancel()

    async def answers(self, group: anyio.abc.TaskGroup) -> None:
        """Forward what the server says, but for what is held."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = await self._server.readexactly(5)
                message = head + await self._server.readexactly(int.from_bytes(head[1:], "big") - 4)
                done = head[:1] == b"Z"  # ready for the next
                if self._held is not None:
                    if done:
                        self._held.reached.set()
                    continue
                if done and self._let_go is not None:
                    self._let_go.answered.set()
                self._to_client.write(message)
                await self._to_client.drain()
        group.cancel_scope.cancel()

    async def _start(self) -> None:
        """Forward the first message, the only kind that has no letter."""
        while True:
            size = await self._client.take(4)
            message = await self._client.take(int.from_bytes(size, "big") - 4)
            if message[:4] not in _ENCRYPTION_REQUESTS:
                self._to_server.write(size + message)
                return
            self._to_client.write(b"N")

    def _statement(self, kind: bytes, message: bytes) -> str | None:
        """Return the text of the statement that this message has executed, if it does."""
        body = message[4:]
        match kind:
            case b"Q":
                return body.rstrip(b"\0").decode(errors="replace")
            case b"P":
                name, text, *_ = body.split(b"\0", 2)
                self._statements[name] = text.decode(errors="replace")
            case b"B":
                _, name, *_ = body.split(b"\0", 2)
                return self._statements.get(name)
        return None


class _Client:
    """What a client says, message by message; it can be listened to while nothing is taken from it."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._said = bytearray()

    async def _hear(self) -> bool:
        piece = await self._reader.read(65536)
        self._said += piece
        return bool(piece)

    async def take(self, size: int) -> bytes:
        while len(self._said) < size:
            if not await self._hear():
                raise EOFError
        taken = bytes(self._said[:size])
        del self._said[:size]
        return taken

    async def message(self) -> tuple[bytes, bytes]:
        """Return a message's letter, and the rest of it with its length."""
        head = await self.take(5)
        return head[:1], head[1:] + await self.take(int.from_bytes(head[1:], "big") - 4)

    async def stays_until(self, event: anyio.Event) -> bool:
        """Wait for the event or for the client's end, and tell whether it was the event."""
        async with anyio.create_task_group() as group:

            async def stop() -> None:
                await event.wait()
                group.cancel_scope.cancel()

            group.start_soon(stop)
            while await self._hear():
                pass
            group.cancel_scope.cancel()
        return event.is_set()
