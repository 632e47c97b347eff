"""A gateway's process whose users call at a fixed rate, whatever becomes of their calls.

    python -m tests.support.overload FILE JSON-OF-PLAN            DSN and settings by environment

A line a call goes to the file when it ends: whether the overload was over when it was made; when it was made and ended,
of the machine's monotonic clock; how; the job's id, where there is one; when to come again, where that was said.
Nothing of a call is kept in the process.
"""

from __future__ import annotations

from tests.support.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before all that takes time to import, in which it may be gone

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio

from dispatch_core.errors import BacklogFullError, RelayDispatchError
from gateway_sdk import GatewayClient, TenantClient
from tests.support.cli import environment
from tests.support.eventually import eventually

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Plan:
    """So many calls a second for so long, then so many for so long; each with this body, timeout and bound."""

    tenant: str
    relay: str
    body: str
    timeout: float
    rate: float
    seconds: float
    calm_rate: float
    calm_seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """What a user of the gateway saw; times are of the machine's monotonic clock."""

    is_calm: bool
    """Made when the overload was over."""
    made_at: float
    ended_at: float
    how: str
    job_id: UUID | None
    retry_after: float

    @property
    def took(self) -> float:
        return self.ended_at - self.made_at


async def play(plan: Plan, file: int) -> None:
    async with GatewayClient() as client, anyio.create_task_group() as users:
        acme = client.tenant(plan.tenant)
        print("calls", flush=True)
        for is_calm, rate, seconds in (
            (False, plan.rate, plan.seconds),
            (True, plan.calm_rate, plan.calm_seconds),
        ):
            at = time.monotonic()
            until = at + seconds
            # The users do not wait for the gateway: who is late makes up for it.
            while at < until:
                users.start_soon(_call, acme, plan, file, is_calm)
                at += 1 / rate
                await anyio.sleep(max(0.0, at - time.monotonic()))


async def _call(acme: TenantClient, plan: Plan, file: int, is_calm: bool) -> None:
    made_at = time.monotonic()
    how, job_id, retry_after = "", None, 0.0
    try:
        result = await acme.call(plan.relay, "Work", body=plan.body, timeout=plan.timeout)
        how, job_id = str(result.status), result.job_id
    except BacklogFullError as error:
        how, retry_after = error.code, error.retry_after_seconds
    except RelayDispatchError as error:
        how, job_id = error.code, getattr(error, "job_id", None)
    line = f"{is_calm:d} {made_at:.6f} {time.monotonic():.6f} {how} {job_id or '-'} {retry_after:.3f}\n"
    os.write(file, line.encode())


class Users:
    """The other side: the process, and what its users have seen so far."""

    def __init__(self, process: anyio.abc.Process, path: Path) -> None:
        self.process = process
        self.path = path
        self.log = ""

    def resident_mib(self) -> float:
        """Return the process's memory, 0 when it has gone."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return 0.0
        return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0.0)

    def calls(self) -> Iterator[Call]:
        for line in self.path.read_text().splitlines():
            is_calm, made_at, ended_at, how, job_id, retry_after = line.split()
            yield Call(
                is_calm == "1",
                float(made_at),
                float(ended_at),
                how,
                None if job_id == "-" else UUID(job_id),
                float(retry_after),
            )

    async def end(self, seconds: float) -> None:
        """Wait for the end of the plan, and of every call."""
        with anyio.fail_after(seconds):
            code = await self.process.wait()
        assert code == 0, self.log

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for piece in self.process.stdout:
            self.log += piece.decode(errors="replace")


@asynccontextmanager
async def users(dsn: str, path: Path, plan: Plan, **settings: Any) -> AsyncIterator[Users]:
    """Let a plan be played by a process of its own; what is left of it at the end of the block is killed."""
    process = await anyio.open_process(
        [sys.executable, "-m", "tests.support.overload", str(path), json.dumps(asdict(plan))],
        env=environment(
            RELAY_DISPATCH_DSN=dsn, PYTHONUNBUFFERED="1", **{name: str(value) for name, value in settings.items()}
        ),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    played = Users(process, path)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(played._read)
            await eventually(lambda: "calls" in played.log or process.returncode is not None, 30)
            assert process.returncode is None, played.log
            yield played
            if process.returncode is None:
                process.kill()
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.wait()


if __name__ == "__main__":
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    anyio.run(play, Plan(**json.loads(sys.argv[2])), file)
