"""A TCP proxy in front of PostgreSQL that breaks the network on request.

    async with TcpProxy.before(dsn) as proxy:
        connection = await asyncpg.connect(proxy.dsn(dsn))
        proxy.mode = "black_hole"                 # every connection, open or new
        proxy.connections[0].mode = "reset"       # one of them; None: as the proxy's mode says

Modes:

    pass         forward
    delay        forward, each piece `delay_seconds` late
    throttle     forward `bytes_per_second` each way and connection
    black_hole   keep both sockets open and forward nothing, not even their end; what arrives waits, and goes on its way
                 when the mode is `pass` again, as after a network's stall
    reset        cut open connections with RST, on both sides, and new ones as soon as they come

And `cut_after`: each connection of now is cut once it has forwarded so many more bytes to its client. To cut one
between a certain statement and its answer, put a `dispatch_core.dev.wire.Wire` behind.

Use it with `async with` in the test itself: it lives in a task group, and a fixture begins and ends in two tasks.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Literal, Self
from urllib.parse import urlsplit, urlunsplit

import anyio
import anyio.abc

Mode = Literal["pass", "delay", "throttle", "black_hole", "reset"]


class ProxyConnection:
    """One client's connection through the proxy."""

    def __init__(self, proxy: TcpProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = (reader, writer)
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._mode: Mode | None = None
        self.bytes_up = 0
        self.bytes_down = 0
        self._cut_at: int | None = None
        self.closed = anyio.Event()

    @property
    def mode(self) -> Mode:
        """What happens to this connection: its own mode, else the proxy's."""
        return self._mode or self._proxy.mode

    @mode.setter
    def mode(self, mode: Mode | None) -> None:
        self._mode = mode
        self._proxy._wake()
        self._cut_if_reset()

    @property
    def server_side_port(self) -> int | None:
        """What pg_stat_activity shows as client_port: finds this connection's backend."""
        return None if self._server is None else self._server[1].get_extra_info("sockname")[1]

    def cut_after(self, size: int) -> None:
        """Cut it once `size` more bytes have come from the server, in the middle of whatever that is."""
        self._cut_at = self.bytes_down + size

    def _cut_if_reset(self) -> None:
        if self.mode == "reset":
            self._close(reset=True)

    def _close(self, *, reset: bool) -> None:
        for _, writer in filter(None, (self._client, self._server)):
            if reset:
                raw = writer.get_extra_info("socket")
                if raw is not None and raw.fileno() >= 0:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _run(self) -> None:
        try:
            await self._until_open()
            if self._client[1].is_closing():
                return
            try:
                self._server = await asyncio.open_connection(self._proxy.upstream_host, self._proxy.upstream_port)
            except OSError:
                return  # no server: the client sees its connection closed
            async with anyio.create_task_group() as group:
                group.start_soon(self._pump, self._client[0], self._server[1], "up", group)
                group.start_soon(self._pump, self._server[0], self._client[1], "down", group)
        finally:
            self._close(reset=False)
            self._proxy.connections.remove(self)
            self.closed.set()

    async def _until_open(self) -> None:
        while self.mode == "black_hole":
            await self._proxy._changed.wait()
        if self.mode == "reset":
            self._close(reset=True)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, way: str, group: anyio.abc.TaskGroup
    ) -> None:
        try:
            while True:
                data = await source.read(65536)
                if self.mode == "delay":
                    await anyio.sleep(self._proxy.delay_seconds)
                elif self.mode == "throttle":
                    await anyio.sleep(len(data) / self._proxy.bytes_per_second)
                await self._until_open()
                if not data:
                    break
                if way == "up":
                    self.bytes_up += len(data)
                else:
                    if self._cut_at is not None and self.bytes_down + len(data) >= self._cut_at:
                        target.write(data[: self._cut_at - self.bytes_down])
                        await target.drain()
                        self._close(reset=False)
                        break
                    self.bytes_down += len(data)
                target.write(data)
                await target.drain()
        except OSError:
            pass  # either side is gone: so is the other
        # Neither side of this protocol goes on after one direction has ended. What was written still goes out.
        if not target.transport.is_closing():
            target.close()
        group.cancel_scope.cancel()


class TcpProxy:
    """Listens on a loopback port of its own and forwards to one server."""

    def __init__(self, upstream_host: str, upstream_port: int, *, delay_seconds: float = 0.05) -> None:
        self.upstream_host = upstream_host
        self.upstream_port = upstream_port
        self.delay_seconds = delay_seconds
        self.bytes_per_second = 10_000.0
        self.connections: list[ProxyConnection] = []
        self.accepted = 0
        self.port = 0
        self._mode: Mode = "pass"
        self._changed = anyio.Event()

    @classmethod
    def before(cls, dsn: str, *, delay_seconds: float = 0.05) -> Self:
        """Make a proxy for the server of a DSN."""
        parts = urlsplit(dsn)
        return cls(parts.hostname or "127.0.0.1", parts.port or 5432, delay_seconds=delay_seconds)

    def dsn(self, dsn: str) -> str:
        """Return the DSN that goes through this proxy."""
        parts = urlsplit(dsn)
        login = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{self.port}"))

    @property
    def mode(self) -> Mode:
        """What happens to every connection that has no mode of its own."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode = mode
        self._wake()
        for connection in list(self.connections):
            connection._cut_if_reset()

    def reset_all(self) -> None:
        """Cut the connections there are now; new ones are served as before."""
        for connection in list(self.connections):
            connection._close(reset=True)

    def cut_after(self, size: int) -> None:
        """Cut each connection there is now once `size` more bytes have come to it."""
        for connection in self.connections:
            connection.cut_after(size)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        connection = ProxyConnection(self, reader, writer)
        self.connections.append(connection)
        if self.mode == "reset":
            connection._close(reset=True)
        self._group.start_soon(connection._run)
