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

`holds_ends` keeps the client's side open when the server closes its own, as where the last packet of a session is lost:
the client has read why its session was ended, and not that it was, until it says something. `ends_session` does so to
the session that gives a certain answer, right behind it and by itself: nothing of that is left to chance.

And two cuts: `cut_after` so many bytes, on each connection of now; and `cut_answer` to the next statement with a
certain text, which the server has then done and its client never hears of (`reads_along` has to be on; see also
`dispatch_core.dev.wire`, which holds still instead).

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
        self._spoken = _Statements() if proxy.reads_along else None
        self._answer_cut: anyio.Event | None = None
        self._last_bytes = b""
        self._ends_behind_answer: anyio.Event | None = None
        self.holds_end = False
        """As the proxy's `holds_ends`, for this connection."""
        self._is_ended = False
        self._has_asked = False
        """Whether the client has sent something that has no answer yet; and then it is told of an end at once."""
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
                if way == "up" and self._is_ended:
                    break  # nobody is there, which is what a client hears that sends something
                if way == "up":
                    self._has_asked = True
                    self.bytes_up += len(data)
                    if self._spoken is not None:
                        for statement in self._spoken.of(data):
                            self._answer_cut = self._answer_cut or self._proxy._cut_of(statement)
                            self._ends_behind_answer = self._ends_behind_answer or self._proxy._end_of(statement)
                elif self._answer_cut is not None:
                    self._last_bytes = (self._last_bytes + data)[-6:]
                    if self._last_bytes[:5] == _READY:
                        self._answer_cut.set()
                        self._close(reset=False)
                        break
                    continue
                else:
                    if self._cut_at is not None and self.bytes_down + len(data) >= self._cut_at:
                        target.write(data[: self._cut_at - self.bytes_down])
                        await target.drain()
                        self._close(reset=False)
                        break
                    self.bytes_down += len(data)
                ended = None
                if way == "down" and data[-6:-1] == _READY:
                    self._has_asked = False
                    ended = self._ends_behind_answer or self._proxy._end_now()
                target.write(data if ended is None else data + _ENDED)
                await target.drain()
                if ended is not None:
                    self.holds_end = True
                    assert self._server is not None
                    self._server[1].transport.abort()  # the server rolls back, as at any session's end
                    ended.set()
                    break
        except OSError:
            pass  # either side is gone: so is the other
        if way == "down" and (self.holds_end or self._proxy.holds_ends) and not self._has_asked:
            self._is_ended = True
            await anyio.sleep_forever()  # ended with the proxy, or by the client
        # Neither side of this protocol goes on after one direction has ended. What was written still goes out.
        if not target.transport.is_closing():
            target.close()
        group.cancel_scope.cancel()


class TcpProxy:
    """Listens on a loopback port of its own and forwards to one server."""

    def __init__(
        self, upstream_host: str, upstream_port: int, *, delay_seconds: float = 0.05, reads_along: bool = False
    ) -> None:
        self.upstream_host = upstream_host
        self.upstream_port = upstream_port
        self.delay_seconds = delay_seconds
        self.bytes_per_second = 10_000.0
        self.reads_along = reads_along
        self.holds_ends = False
        self._answer_to_cut: tuple[str, anyio.Event] | None = None
        self._answers_left = 0
        self._last_answer_to = ""
        self._ends: anyio.Event | None = None
        self.connections: list[ProxyConnection] = []
        self.accepted = 0
        self.port = 0
        self._mode: Mode = "pass"
        self._changed = anyio.Event()

    @classmethod
    def before(cls, dsn: str, *, delay_seconds: float = 0.05, reads_along: bool = False) -> Self:
        """Make a proxy for the server of a DSN."""
        parts = urlsplit(dsn)
        host, port = parts.hostname or "127.0.0.1", parts.port or 5432
        return cls(host, port, delay_seconds=delay_seconds, reads_along=reads_along)

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

    def cut_answer(self, text: str) -> anyio.Event:
        """Cut the next connection on which a statement with this text is executed, when the server is done with it.

        Returns an event for that moment. A later call takes the place of one that still waits.
        """
        assert self.reads_along, "nobody reads what is said"
        self._answer_to_cut = (text, anyio.Event())
        return self._answer_to_cut[1]

    def ends_session(self, answer: int | str) -> anyio.Event:
        """End the session that gives the answer of this number, counted over all from now on (that to a login is one);
        or that to the next statement with this text (`reads_along` has to be on).

        Its client reads the answer, why its session was ended, and nothing more; the server has rolled back. Returns an
        event for that moment. A later call takes the place of one that still waits. Not for encrypted connections.
        """
        assert self.reads_along or isinstance(answer, int), "nobody reads what is said"
        self._answers_left = answer if isinstance(answer, int) else 0
        self._last_answer_to = answer if isinstance(answer, str) else ""
        self._ends = anyio.Event()
        return self._ends

    def _end_now(self) -> anyio.Event | None:
        self._answers_left -= 1
        return self._ends if self._answers_left == 0 else None

    def _end_of(self, statement: str) -> anyio.Event | None:
        if not self._last_answer_to or self._last_answer_to not in statement:
            return None
        self._last_answer_to = ""
        return self._ends

    def _cut_of(self, statement: str) -> anyio.Event | None:
        if self._answer_to_cut is None or self._answer_to_cut[0] not in statement:
            return None
        cut, self._answer_to_cut = self._answer_to_cut[1], None
        return cut

    def refuse(self) -> None:
        """Cut what there is, and listen no more: whoever connects is refused by the kernel."""
        self._server.close()
        self.reset_all()

    async def listen(self) -> None:
        """Take connections again on the same port, after `refuse`."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

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


_READY = b"Z\0\0\0\5"
"""How a server's answer ends; behind it comes the state of the transaction, a byte."""
_FATAL = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
_ENDED = b"E" + (4 + len(_FATAL)).to_bytes(4, "big") + _FATAL
"""What a server says last where a session is ended by its operator."""
_ENCRYPTION_REQUESTS = ((80877103).to_bytes(4, "big"), (80877104).to_bytes(4, "big"))


class _Statements:
    """What a client has executed, read out of what it says; it must not be encrypted."""

    def __init__(self) -> None:
        self._said = bytearray()
        self._begun = False
        self._prepared: dict[bytes, str] = {}

    def of(self, data: bytes) -> list[str]:
        """Return the texts of the statements whose execution ends in this piece."""
        self._said += data
        found = []
        while len(self._said) >= 5:
            # The first message has no letter.
            head = 1 if self._begun else 0
            end = head + int.from_bytes(self._said[head : head + 4], "big")
            if len(self._said) < end:
                break
            kind, body = bytes(self._said[:head]), bytes(self._said[head + 4 : end])
            del self._said[:end]
            if not self._begun:
                self._begun = body[:4] not in _ENCRYPTION_REQUESTS
            elif kind == b"P":
                name, text, *_ = body.split(b"\0", 2)
                self._prepared[name] = text.decode(errors="replace")
            elif kind == b"B":
                found.append(self._prepared.get(body.split(b"\0", 2)[1], ""))
            elif kind == b"Q":
                found.append(body.rstrip(b"\0").decode(errors="replace"))
        return found
