"""Sessions that are ended unseen: their clients read why, and do not see the socket close (D166, D168)."""

from __future__ import annotations

from collections.abc import Collection

import anyio
import anyio.lowlevel
import pytest

from tests.support.activity import Connection, backends, terminate
from tests.support.eventually import eventually
from tests.support.proxy import TcpProxy

__all__ = ["end_unseen", "no_traceback", "read_it"]


async def end_unseen(observer: Connection, proxy: TcpProxy, *, but: str = "nobody's") -> int:
    """End the sessions behind a proxy, but those of an application with that in its name; return how many."""
    names = {row["client_port"]: (row["application_name"], row["pid"]) for row in await backends(observer)}
    ends = []
    for line in list(proxy.connections):
        name, pid = names.get(line.server_side_port, ("", None))
        if pid is not None and but not in name:
            line.holds_end = True
            ends.append((line, line.bytes_down))
            await terminate(observer, pid)
    await eventually(lambda: all(line.bytes_down > before or line.closed.is_set() for line, before in ends))
    await read_it()
    return len(ends)


async def read_it() -> None:
    """Let clients of this event loop read what has come."""
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


def no_traceback(caplog: pytest.LogCaptureFixture, *, but: Collection[str] = ()) -> None:
    """Fail where something was logged with a traceback, or by the event loop; `but` by these loggers."""
    told = [record for record in caplog.records if record.exc_info or record.name == "asyncio"]
    assert not [(record.name, record.getMessage()) for record in told if record.name not in but]
