"""A server that takes no session: it answers every log-in with one error, as one that starts up, or is full, does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_ENCRYPTION_REQUESTS = (80877103, 80877104)


@asynccontextmanager
async def refusing_server(sqlstate: str, message: str) -> AsyncIterator[int]:
    """Listen on a loopback port, which is yielded, and refuse every session with this error."""
    fields = {"S": "FATAL", "V": "FATAL", "C": sqlstate, "M": message}
    body = b"".join(f"{key}{value}\0".encode() for key, value in fields.items()) + b"\0"
    refusal = b"E" + (len(body) + 4).to_bytes(4, "big") + body

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                said = await reader.readexactly(size - 4)
                if int.from_bytes(said[:4], "big") not in _ENCRYPTION_REQUESTS:
                    break
                writer.write(b"N")
            writer.write(refusal)
            await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
