"""Relays of durable jobs as processes that can be killed by the hundred: one interpreter imports all, and forks them.

    python -m tests.support.durable_process         each line of stdin is an order, and is answered with a pid

An interpreter that starts takes longer than a relay lives here; a fork takes milliseconds. What handlers do is written
to the database alone, in the transactions that the chunks' fences guard: `public.target`, without any key, so that a
row that is there twice is seen.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from dispatch_core.durable_models import ChunkOutcome
from dispatch_core.settings import DurableJobsSettings
from relay_sdk import ChunkContext, Relay, RelaySettings
from tests.support.cli import environment
from tests.support.protocol import TENANT

ROOT = Path(__file__).resolve().parents[2]

TARGET = "create table public.target (job_id uuid, row_no bigint); grant insert, select on public.target to public"
BAD_EVERY = 7
"""Every seventh row of the input is a bad one."""

DURABLE: dict[str, Any] = {
    # Short, since a killed relay's chunks wait for so long; and long enough for a machine that is busy.
    "lease_seconds": 1.0,
    "sweep_seconds": 0.15,
    "finish_sweep_seconds": 0.3,
    "retry_base_seconds": 0.01,
    "retry_cap_seconds": 0.05,
}
RELAY: dict[str, Any] = {"poll_seconds": 0.3, "grace_seconds": 2.0, "chunk_concurrency": 4}

STEPS = ("begun", "rows written", "checkpoint told", "committed", "completion told", "returning")


def make(dsn: str, order: dict[str, Any]) -> Relay:
    """Make a relay with the handlers; one of them kills its process where `order` says so."""
    relay = Relay(
        "killed",
        tenants=[TENANT],
        dsn=dsn,
        settings=RelaySettings(**{**RELAY, **order.get("relay", {})}),
        durable=DurableJobsSettings(**{**DURABLE, **order.get("durable", {})}),
    )
    left = order.get("crossings")

    def here(step: str) -> None:
        """Die at this step, if it is the one, and has been crossed often enough."""
        nonlocal left
        if left is not None and step == order["step"]:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    async def copy(ctx: ChunkContext) -> ChunkOutcome | None:
        """Copy the rows of the payload, some in a transaction, each of which saves how far it is or is the last."""
        first, count = ctx.payload["first"], ctx.payload["count"]
        at = int(ctx.checkpoint or 0)
        here("begun")
        while at < count:
            some = range(first + at, first + min(at + ctx.payload["batch"], count))
            good = [row for row in some if row % BAD_EVERY]
            async with ctx.transaction() as conn:
                await conn.execute(
                    "insert into public.target select $1, u from unnest($2::bigint[]) u", ctx.job_id, good
                )
                here("rows written")
                for row in some:
                    if row % BAD_EVERY == 0:
                        ctx.row_error(row, "bad", "the seventh")
                ctx.advance(len(good))
                at += len(some)
                if at == count and ctx.payload["inside"]:
                    await ctx.complete({"copied": count})
                    here("completion told")
                else:
                    await ctx.save_checkpoint(at)
                    here("checkpoint told")
            here("committed")
        here("returning")
        return None

    async def die(ctx: ChunkContext) -> None:
        """Kill the process in the middle of a transaction where the payload says so; else be done."""
        async with ctx.transaction() as conn:
            await conn.execute("insert into public.target values ($1, $2)", ctx.job_id, ctx.seq)
            if ctx.payload == "pill":
                os.kill(os.getpid(), signal.SIGKILL)
            await ctx.complete()

    async def pair(ctx: ChunkContext) -> None:
        """Wait at a gate of the tester's, where the other one waits too; go on at the same instant."""
        async with ctx.transaction() as conn:
            await conn.execute("select pg_advisory_xact_lock_shared($1)", ctx.payload["gate"])
            if ctx.payload["inside"]:
                await ctx.complete()

    for handler in (copy, die, pair):
        if handler.__name__ in order.get("kinds", ("copy", "die", "pair")):
            relay.chunk_handler(handler.__name__)(handler)
    return relay


def _serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever is killed is gone, and leaves no zombie
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                sys.stdin.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                anyio.run(make(order["dsn"], order).run)
            finally:
                os._exit(0)
        print(pid, flush=True)


class Nursery:
    """The other side: `fork` relays, and kill them."""

    def __init__(self, process: anyio.abc.Process, dsn: str) -> None:
        self._process = process
        self._dsn = dsn
        self._answers = self._lines()
        self.alive: list[int] = []

    async def fork(self, **order: Any) -> int:
        """Start a relay; return its pid at once."""
        assert self._process.stdin is not None
        await self._process.stdin.send((json.dumps({**order, "dsn": self._dsn}) + "\n").encode())
        pid = int(await anext(self._answers))
        self.alive.append(pid)
        return pid

    def kill(self, pid: int) -> bool:
        """End it as the kernel does when memory runs out; return whether it was alive."""
        self.alive.remove(pid)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def has_died(self, pid: int) -> bool:
        """Say whether it has ended by itself."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    def kill_all(self) -> None:
        for pid in list(self.alive):
            self.kill(pid)

    async def _lines(self) -> AsyncIterator[str]:
        assert self._process.stdout is not None
        rest = ""
        async for piece in self._process.stdout:
            *lines, rest = (rest + piece.decode()).split("\n")
            for line in lines:
                yield line


@asynccontextmanager
async def nursery(dsn: str) -> AsyncIterator[Nursery]:
    """Have relays be forked for the length of a block; all of them are killed at its end."""
    process = await anyio.open_process(
        [sys.executable, "-m", "tests.support.durable_process"], env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL
    )
    made = Nursery(process, dsn)
    try:
        yield made
    finally:
        made.kill_all()
        process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


def draw(chance: random.Random) -> dict[str, Any]:
    """Draw how a relay is to end: at a step that it comes to, or, with nothing said, by the clock."""
    if chance.random() < 0.5:
        return {"step": chance.choice(STEPS), "crossings": chance.randint(1, 6)}
    return {}


if __name__ == "__main__":
    _serve()
