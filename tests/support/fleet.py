"""Relays as processes of their own, which can be killed, and a journal of what their handlers really did.

The journal is a file to which each handler appends a line when it begins and one when it ends, past the SDK: what an
audit compares with what the database says. Appended lines survive a SIGKILL.

    python -m tests.support.fleet JOURNAL RELAY TENANT...       DSN and settings by environment
"""

from __future__ import annotations

from tests.support.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before all that takes time to import, in which it may be gone

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import anyio.abc

from relay_sdk import DispatchJob, Relay, Reply
from tests.support.cli import environment
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]
UNREACHABLE = 5
"""The exit code of a relay that finds no database at its start."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a journal: `event` is "began" or "ended"; `at` is of the machine's monotonic clock."""

    event: str
    job_id: UUID
    attempt: int
    pid: int
    at: float


class Journal:
    """What handlers did, told by themselves; any number of processes append to one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, event: str, job: DispatchJob) -> None:
        line = f"{event} {job.job_id} {job.attempt} {os.getpid()} {time.monotonic():.6f}\n"
        os.write(self._file, line.encode())

    def entries(self, event: str | None = None) -> list[Entry]:
        found = []
        for line in self.path.read_text().splitlines():
            name, job_id, attempt, pid, at = line.split()
            if event in (None, name):
                found.append(Entry(name, UUID(job_id), int(attempt), int(pid), float(at)))
        return found

    def close(self) -> None:
        os.close(self._file)


def serve(relay: Relay, journal: Journal) -> Relay:
    """Give a relay the handler Work, which takes as many seconds as its body says, and journals."""

    @relay.handler("Work")
    async def work(job: DispatchJob) -> Reply:
        journal.note("began", job)
        await anyio.sleep(float(job.body or 0))
        journal.note("ended", job)
        return Reply(job.body)

    return relay


class CutAtStartError(AssertionError):
    """The relay has ended before it worked, since the database was away; the message is what it logged."""


class RelayProcess:
    """A relay that is a process, by `Relay.main`."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        self.log = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for piece in self.process.stdout:
            self.log += piece.decode(errors="replace")

    def kill(self) -> None:
        """End it as the kernel does when memory runs out."""
        self.process.send_signal(signal.SIGKILL)


@asynccontextmanager
async def relay_process(
    dsn: str, journal: Journal, relay_id: str, *tenants: str, **settings: Any
) -> AsyncIterator[RelayProcess]:
    """Run a relay process that works once the block begins; SIGTERM ends it with the block, if it still lives.

    Raises: CutAtStartError, in a group: whoever starts relays is to start that one again.
    """
    names = {f"RELAY_{name.upper()}": str(value) for name, value in settings.items()}
    process = await anyio.open_process(
        [sys.executable, "-m", "tests.support.fleet", str(journal.path), relay_id, *tenants],
        env=environment(RELAY_DISPATCH_DSN=dsn, PYTHONUNBUFFERED="1", **names),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    relay = RelayProcess(process)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(relay._read)
            await eventually(lambda: " works as " in relay.log or process.returncode is not None, 30)
            if process.returncode == UNREACHABLE:
                raise CutAtStartError(relay.log)
            assert process.returncode is None, relay.log
            yield relay
            if process.returncode is None:
                process.terminate()
    finally:
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(20):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


if __name__ == "__main__":
    path, relay_id, *tenants = sys.argv[1:]
    serve(Relay(relay_id, tenants=tenants), Journal(Path(path))).main()
