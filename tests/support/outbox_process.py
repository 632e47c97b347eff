"""A drainer in a process of its own that kills itself at one step.

    python -m tests.support.outbox_process DSN TENANT STEP

Its sink writes each delivery into public.deliveries, and commits.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import anyio
import asyncpg

from dispatch_core.outbox import Outbox, OutboxEvent, OutboxSettings

STEPS = ("before claim", "after claim", "in sink", "before settle", "after settle")


async def main(dsn: str, tenant: str, step: str) -> None:
    """Drain one batch, and die where it was said."""
    conn = await asyncpg.connect(dsn)

    def here(name: str) -> None:
        if name == step:
            os.kill(os.getpid(), signal.SIGKILL)

    async def sink(event: OutboxEvent) -> None:
        here("in sink")
        await conn.execute("insert into public.deliveries values ($1, $2)", event.tenant_id, event.payload)

    settings = OutboxSettings(concurrency=1)  # one connection, one delivery at a time
    async with Outbox(dsn, default_sink=sink, tenants=[tenant], settings=settings) as drainer:
        for verb in ("claim", "settle"):
            setattr(drainer, "_verbs", _Watched(drainer.verbs, verb, here))  # noqa: B010
        await drainer.drain()


class _Watched:
    def __init__(self, verbs: Any, verb: str, here: Any) -> None:
        self._verbs = verbs
        call = getattr(verbs, verb)

        async def watched(*args: Any, **options: Any) -> Any:
            here(f"before {verb}")
            answer = await call(*args, **options)
            here(f"after {verb}")
            return answer

        setattr(self, verb, watched)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._verbs, name)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], sys.argv[3])
