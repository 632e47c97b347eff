"""A drainer as a process of its own, to be killed: the SDK's own, into the dispatch room of the same database.

python -m tests.support.drainer_process DSN TENANT JSON-OF-SETTINGS
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from dispatch_core.dev.wire import Gate
from dispatch_core.outbox import OutboxSettings
from gateway_sdk import DispatchSink, GatewayClient, OutboxDrainer, OutboxRoute
from tests.support.cli import environment
from tests.support.gateway import settings_for
from tests.support.outbox import KIND

ROOT = Path(__file__).resolve().parents[2]
ROUTES = {KIND: OutboxRoute("erp", "Post", ttl=3600)}


async def main(dsn: str, tenant: str, settings: dict[str, Any]) -> None:
    """Drain until killed."""
    drainer = OutboxDrainer(dsn, settings=OutboxSettings(**{"drain_interval_sec": 0.2, **settings}), tenants=[tenant])
    client = GatewayClient(settings=settings_for(dsn), outbox=drainer)
    drainer.add_sink(KIND, DispatchSink(client, ROUTES))
    async with client:
        await anyio.sleep_forever()


class DrainerProcess:
    """The other side."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process

    async def comes_to(self, gate: Gate, timeout: float = 30) -> None:
        """Wait until it is held there; fail where it ends instead."""
        with anyio.fail_after(timeout):
            async with anyio.create_task_group() as group:

                async def ends() -> None:
                    code = await self._process.wait()
                    raise AssertionError(f"the drainer has ended by itself, with {code}")

                group.start_soon(ends)
                await gate.reached.wait()
                group.cancel_scope.cancel()

    async def kill(self) -> None:
        """Send SIGKILL, and wait until it is gone."""
        self._process.kill()
        assert await self._process.wait() == -signal.SIGKILL


@asynccontextmanager
async def drainer_process(dsn: str, tenant: str, **settings: Any) -> AsyncIterator[DrainerProcess]:
    """Start one; it is killed at the end of the block, if it is there then."""
    process = await anyio.open_process(
        [sys.executable, "-m", "tests.support.drainer_process", dsn, tenant, json.dumps(settings)],
        cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=None,
    )  # fmt: skip
    async with process:
        try:
            yield DrainerProcess(process)
        finally:
            if process.returncode is None:
                process.kill()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
