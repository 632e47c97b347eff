"""What a process holds at a moment: memory, objects, tasks, descriptors; on the server, sessions and their memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import asyncpg

__all__ = ["Counts", "Footprint", "Server", "count", "measure"]

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_CONTAINERS: Final = (dict, list, set, tuple, bytearray)

_SESSIONS: Final = """
select pid, application_name from pg_catalog.pg_stat_activity
where datname = pg_catalog.current_database() and backend_type = 'client backend' and pid <> pg_catalog.pg_backend_pid()
"""


@dataclass(frozen=True, slots=True)
class Counts:
    """What can be counted without any doubt: equal before and after, where everything is closed."""

    tasks: int
    descriptors: int
    sessions: int


@dataclass(frozen=True, slots=True)
class Server:
    """One look at the server's side of the sessions that last."""

    prepared: int
    """Statements, in all of them."""
    contexts: int
    """Bytes of their memory contexts."""


@dataclass(slots=True)
class Footprint:
    """One measure, when nothing is under way."""

    seconds: float
    heap: int
    """Bytes that C code has allocated."""
    resident: int
    objects: int
    containers: int
    """Bytes of dicts, lists, sets and tuples: what grows although no object is added that the collector knows."""
    tasks: int
    descriptors: int
    sessions: int
    server: Server
    kinds: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, float]:
        """Return what is compared, by name."""
        return {
            "heap MB": self.heap / 2**20,
            "resident MB": self.resident / 2**20,
            "objects": self.objects,
            "containers MB": self.containers / 2**20,
            "tasks": self.tasks,
            "descriptors": self.descriptors,
            "sessions": self.sessions,
            "prepared": self.server.prepared,
            "session MB": self.server.contexts / 2**20,
        }


class _Mallinfo(ctypes.Structure):
    """What glibc tells of its heap, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]  # fmt: skip


def _heap() -> int:
    """Return the bytes that C code holds, having given back what it holds no more; 0 where that cannot be known."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallinfo2.restype = _Mallinfo
        # Or what an allocator keeps for later looks like what is held: in half an hour that grew by 12 MB.
        libc.malloc_trim(0)
        info = libc.mallinfo2()
    except (OSError, AttributeError):
        return 0
    return int(info.uordblks + info.hblkhd)


def _descriptors() -> int:
    # The listing has one of its own.
    return len(list(Path("/proc/self/fd").iterdir())) - 1


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


async def sessions(admin: asyncpg.Connection[Any]) -> Counter[str]:
    """Return the other sessions of this database, by application."""
    return Counter(row["application_name"] for row in await admin.fetch(_SESSIONS))


async def count(admin: asyncpg.Connection[Any]) -> Counts:
    """Count what is open now, objects that wait for the collector aside."""
    gc.collect()
    return Counts(len(asyncio.all_tasks()), _descriptors(), (await sessions(admin)).total())


async def measure(seconds: float, admin: asyncpg.Connection[Any], server: Server) -> Footprint:
    """Measure this process, and the server's side of it as it was found."""
    open_now = await count(admin)
    kinds: Counter[str] = Counter()
    size = objects = 0
    for thing in gc.get_objects():
        objects += 1
        kind = type(thing)
        kinds[f"{kind.__module__}.{kind.__qualname__}"] += 1
        if kind in _CONTAINERS:
            size += sys.getsizeof(thing)
    heap = _heap()
    return Footprint(
        seconds,
        heap,
        _resident(),
        objects,
        size,
        open_now.tasks,
        open_now.descriptors,
        open_now.sessions,
        server,
        kinds,
    )
