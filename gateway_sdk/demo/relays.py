"""The demo's relays: processes of their own, started by the command line as anybody's are.

A process prints JSON on stdout, a document a line: that it is ready, and at its end what it has counted. Its stderr is
kept, and shown where it ends too early.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import anyio.abc
from anyio.streams.text import TextReceiveStream

from dispatch_core.errors import ConfigurationError, RelayDispatchError
from gateway_sdk.demo.show import Show

__all__ = ["RELAYS", "RelayFleet", "RelayReport"]

RELAYS: Final = ("relay_sdk.demo_handlers:erp", "relay_sdk.demo_handlers:archive")
"""By name: a gateway never imports the relays' side."""

READY_SECONDS: Final = 30.0
STOP_SECONDS: Final = 10.0


@dataclass(slots=True)
class RelayReport:
    """What one relay process said of itself when it ended: numbers by relay instance."""

    name: str
    instances: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """Return one number, of all instances in the process together."""
        return sum(int(counts.get(name, 0)) for counts in self.instances.values())


class _RelayProcess:
    def __init__(self, name: str, process: anyio.abc.Process) -> None:
        self.name = name
        self.process = process
        self.ready = anyio.Event()
        self.report: RelayReport | None = None
        self.stopping = False
        self.log: deque[str] = deque(maxlen=20)

    async def watch(self) -> None:
        """Read what it says until it ends; raise where it was not asked to end."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._read_log)
            async for line in _lines(self.process.stdout):
                self._hear(line)
        await self.process.wait()
        if not self.stopping:
            log = "".join(f"\n  {line}" for line in self.log)
            raise RelayDispatchError(f"{self.name} ended too early, with exit code {self.process.returncode}:{log}")

    def _hear(self, line: str) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            self.log.append(line)
            return
        if said.get("event") == "ready":
            self.ready.set()
        elif said.get("event") == "end":
            self.report = RelayReport(self.name, said["instances"])

    async def _read_log(self) -> None:
        async for line in _lines(self.process.stderr):
            self.log.append(line)


class RelayFleet:
    """Some relay processes of the same kind. `kill` is for the very end: nothing of the fleet outlives the demo."""

    def __init__(self, worker_dsn: str, tenants: Sequence[str], count: int) -> None:
        self._tenants = list(tenants)
        self._count = count
        # Nothing of our own environment but where Python finds its modules: settings for a real relay are not for this.
        # The DSN goes this way and not as an argument, which everybody on the machine could read.
        self._environment = {
            "PATH": os.defpath,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONUTF8": "1",
            "RELAY_DISPATCH_DSN": worker_dsn,
            # Whoever ends a demo early does not want to wait for its slow handlers.
            "RELAY_GRACE_SECONDS": "2",
        }
        self._members: list[_RelayProcess] = []

    @asynccontextmanager
    async def running(self, show: Show) -> AsyncIterator[None]:
        """Start the processes and wait until all listen; in the end, however it comes, stop them and hear them out.

        Raises: RelayDispatchError where one ends by itself; ConfigurationError where one does not get ready.
        """
        async with anyio.create_task_group() as group:
            try:
                what = f"{self._count} relay process{'es' if self._count > 1 else ''}"
                with show.step("relays", f"starting {what}", f"{what} started, and listening"):
                    for number in range(1, self._count + 1):
                        member = _RelayProcess(f"relay process {number}", await self._start())
                        self._members.append(member)
                        group.start_soon(member.watch)
                    await self._all_ready()
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop()

    async def _start(self) -> anyio.abc.Process:
        command = [sys.executable, "-m", "dispatch_core.cli", "relay", "run", *RELAYS, "--output", "json"]
        command += ["--stop-with-stdin", *(word for tenant in self._tenants for word in ("--tenant", tenant))]
        # A session of its own, so that Ctrl-C in the terminal reaches the demo alone, which stops it in order; and a
        # stdin that ends with the demo, so that it stops even where the demo was killed.
        return await anyio.open_process(
            command,
            stdin=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )

    async def _all_ready(self) -> None:
        with anyio.move_on_after(READY_SECONDS) as scope:
            for member in self._members:
                await member.ready.wait()
        if scope.cancelled_caught:
            late = next(member for member in self._members if not member.ready.is_set())
            log = "".join(f"\n  {line}" for line in late.log)
            raise ConfigurationError(f"{late.name} was not ready after {READY_SECONDS:g} s:{log}")

    async def _stop(self) -> None:
        for member in self._members:
            member.stopping = True
            if member.process.returncode is None:
                member.process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(STOP_SECONDS):
            for member in self._members:
                await member.process.wait()
        self.kill()
        for member in self._members:
            await member.process.aclose()

    def kill(self) -> None:
        """End at once whatever still runs. Idempotent: yes."""
        for member in self._members:
            if member.process.returncode is None:
                try:
                    member.process.kill()
                except ProcessLookupError:
                    pass  # it has just ended by itself

    @property
    def reports(self) -> list[RelayReport]:
        """What the processes said at their end; one that said nothing has an empty report."""
        return [member.report or RelayReport(member.name) for member in self._members]


async def _lines(stream: anyio.abc.ByteReceiveStream | None) -> AsyncIterator[str]:
    assert stream is not None
    rest = ""
    async for text in TextReceiveStream(stream, errors="replace"):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line
    if rest:
        yield rest
