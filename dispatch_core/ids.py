"""Make the ids that clients choose: jobs, claims and relay instances."""

from __future__ import annotations

import os
import secrets
import socket
from uuid import UUID

from asyncpg.pgproto import pgproto
from uuid_utils.compat import uuid7

__all__ = ["id_of", "new_id", "new_instance_id"]


def new_id() -> UUID:
    """Return a new UUIDv7, above all those that this process has made before.

    A client makes the id *before* the first try, so that a retry after a lost reply finds its own row.
    """
    return uuid7()


def id_of(raw: bytes) -> UUID:
    """Return the id of these 16 bytes, made as the driver makes those that it reads: in a tenth of the time."""
    made: UUID = pgproto.UUID(raw)
    return made


def new_instance_id(prefix: str) -> str:
    """Return an id for one start of one process: ``prefix:host:pid:random``, printable ASCII, below 200 bytes.

    The random part makes it a token: a process that starts again with the same host name and pid is another instance.
    Host and pid are there for people.
    """
    return f"{_printable(prefix, 64)}:{_printable(socket.gethostname(), 63)}:{os.getpid()}:{secrets.token_hex(8)}"


def _printable(text: str, length: int) -> str:
    return "".join(char if "!" <= char <= "~" else "_" for char in text[:length])
