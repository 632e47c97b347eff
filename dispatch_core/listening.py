"""What the listener's connection can do beyond asyncpg's: many channels by one statement, and hearing itself."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import anyio
import asyncpg

__all__ = ["MAX_NAME_BYTES", "Echo", "ListeningConnection", "quoted"]

MAX_NAME_BYTES: Final = 63
"""LISTEN cuts a longer name with no more than a notice, and its notifications then come under another name (C09)."""


def quoted(channel: str) -> str:
    """Return a channel's name as an SQL identifier."""
    return '"' + channel.replace('"', '""') + '"'


class ListeningConnection(asyncpg.Connection):
    """A connection that listens to many channels by one statement; asyncpg itself takes a round trip for each."""

    _sends_nothing = False

    async def listen(self, channels: Iterable[str], callback: Callable[..., None]) -> None:
        """Start to listen; the call-back stands before the statement leaves, so that nothing falls between."""
        await self._for_each(channels, lambda channel: self.add_listener(channel, callback))
        await self.execute("; ".join(f"listen {quoted(channel)}" for channel in channels))

    async def unlisten(self, channels: Iterable[str], callback: Callable[..., None]) -> None:
        """Stop to listen."""
        await self._for_each(channels, lambda channel: self.remove_listener(channel, callback))
        await self.execute("; ".join(f"unlisten {quoted(channel)}" for channel in channels))

    async def _for_each(self, channels: Iterable[str], change: Callable[[str], Awaitable[None]]) -> None:
        # asyncpg keeps its dictionary of call-backs only by these two methods, which send their statement by `fetch`.
        # If a later version sends it otherwise, the only harm is that LISTEN is sent twice.
        self._sends_nothing = True
        try:
            for channel in channels:
                await change(channel)
        finally:
            self._sends_nothing = False

    async def fetch(self, query: str, *args: Any, **options: Any) -> Any:
        """Fetch as ever, but for the statements that `_for_each` leaves out."""
        if self._sends_nothing:
            return []
        return await super().fetch(query, *args, **options)


class Echo:
    """A channel of one's own: tells whether what is rung on it arrives, and who rang."""

    def __init__(self, timeout: float) -> None:
        """Wait `timeout` seconds for each ring."""
        self.channel: Final = f"s2r_self_{secrets.token_hex(12)}"
        self._timeout = timeout
        self._nonce: str | None = None
        self._sender: int | None = None
        self._heard = anyio.Event()

    def arrived(self, sender: int, payload: str) -> None:
        """Take in what came on the channel; anything but the ring under way is nobody's."""
        if payload == self._nonce:
            self._sender = sender
            self._heard.set()

    async def ring(self, conn: asyncpg.Connection) -> int | None:
        """Ring from `conn`; return the process id of the backend that rang, or None where nothing arrives in time."""
        self._nonce, self._sender, self._heard = secrets.token_hex(8), None, anyio.Event()
        await conn.execute(f"notify {quoted(self.channel)}, '{self._nonce}'")
        with anyio.move_on_after(self._timeout):
            await self._heard.wait()
        self._nonce = None
        return self._sender
