"""A relay as a process of its own, to be signalled and killed.

    python -m tests.support.relay_process DSN JSON-OF-SETTINGS 0|1-FOR-UVLOOP

Its handlers write a line when they start, so that a test can wait for it; the relay's log is on stderr.
"""

from __future__ import annotations

from tests.support.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before all that takes time to import, in which it may be gone

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from relay_sdk import DispatchJob, Relay, RelaySettings, Reply
from tests.support.patience import standstills, still
from tests.support.relays import QUICK, RELAY, TENANT


def _say(*words: object) -> None:
    # One write a line: print() writes each word by itself, and handlers in threads speak at once.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def make(dsn: str, settings: dict[str, Any]) -> Relay:
    relay = Relay(RELAY, tenants=[TENANT], dsn=dsn, settings=RelaySettings(**{**QUICK, **settings}))

    @relay.handler("Sleep")
    async def sleep(job: DispatchJob) -> Reply:
        _say("started", job.job_id, job.attempt)
        await asyncio.sleep(float(job.body))
        _say("ended", job.job_id)
        return Reply(b"slept")

    @relay.handler("One", concurrency=1)
    async def one(job: DispatchJob) -> Reply:
        return await sleep(job)

    @relay.handler("Thread")
    def thread(job: DispatchJob) -> Reply:
        _say("started", job.job_id, job.attempt)
        time.sleep(float(job.body))
        return Reply(b"slept")

    @relay.handler("Stubborn")
    async def stubborn(job: DispatchJob) -> Reply:
        _say("started", job.job_id, job.attempt)
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

    @relay.handler("Die")
    async def die(job: DispatchJob) -> Reply:
        _say("started", job.job_id, job.attempt)
        os._exit(9)

    @relay.handler("Exit")
    async def leave(job: DispatchJob) -> Reply:
        _say("started", job.job_id, job.attempt)
        raise SystemExit(3)

    @relay.handler("Quick")
    async def quick(job: DispatchJob) -> Reply:
        return Reply(b"quick")

    return relay


class RelayProcess:
    """The other side: start it, wait for its lines, send it signals."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.log = ""
        self._signalled_at: float | None = None

    async def read(self) -> None:
        async def lines() -> None:
            assert self.process.stdout is not None
            async for line in self.process.stdout:
                self.lines.append(line.decode().strip())

        async def log() -> None:
            assert self.process.stderr is not None
            async for line in self.process.stderr:
                self.log += line.decode()

        await asyncio.gather(lines(), log())

    def started(self) -> list[str]:
        """The ids of the jobs whose handlers have started, in order."""
        return [line.split()[1] for line in self.lines if line.startswith("started")]

    @property
    def ended_at(self) -> float:
        """When its relay had ended, by `tests.support.patience.still`, to be compared with ours before the signal."""
        _, ended, stood = next(line for line in self.lines if line.startswith("over")).split(maxsplit=2)
        signalled_at = self._signalled_at or 0.0
        return float(ended) + sum(seconds for at, seconds in json.loads(stood) if at < signalled_at)

    def signal(self, number: signal.Signals) -> None:
        self._signalled_at = self._signalled_at or time.monotonic()
        self.process.send_signal(number)

    async def exit(self, timeout: float = 60.0) -> int:
        """Wait for its end, and return its exit code; the timeout is a guard against one that hangs."""
        return await asyncio.wait_for(self.process.wait(), timeout)


@asynccontextmanager
async def relay_process(
    dsn: str, *, ready: bool = True, uvloop: bool = True, **settings: Any
) -> AsyncIterator[RelayProcess]:
    """Start a relay's process; it is killed at the end of the block, if it is there then."""
    from tests.support.eventually import eventually

    command = [sys.executable, "-m", "tests.support.relay_process", dsn, json.dumps(settings), str(int(uvloop))]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    relay = RelayProcess(process)
    reading = asyncio.create_task(relay.read())
    try:
        if ready:
            await eventually(
                lambda: re.search(r"relay \S+ works as", relay.log) or process.returncode is not None, timeout=60
            )
            assert process.returncode is None, relay.log
        yield relay
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


if __name__ == "__main__":
    if sys.argv[3] == "0":
        sys.modules["uvloop"] = None  # type: ignore[assignment]
    still()  # from now on it is known when the process stood
    try:
        make(sys.argv[1], json.loads(sys.argv[2])).main()
    finally:
        _say("over", still(), json.dumps(standstills()))
