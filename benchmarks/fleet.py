"""Many processes of the same benchmark: one interpreter imports everything, and forks as many members as are asked for.

Sixteen interpreters that start one by one would take longer than the sample; forks take milliseconds and share their
memory. Nothing has an event loop or a thread before the fork. A member runs one coroutine, as a child does (child.py),
and besides waits for `go`, which all of them are told at once.

    the sample  --order, go, end of input-->  fleet  --go, stop-->  members
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from benchmarks.loops import run

__all__ = ["Fleet", "Member", "MemberTask", "fleet"]

_ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Member:
    """What a member knows of its fleet: call `ready()`, wait for `go`, return when `stop` is set."""

    number: int
    ready: Callable[[], None]
    go: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)


MemberTask = Callable[..., Awaitable[Any]]
"""`async def task(member, **arguments) -> value that JSON can hold`"""


class Fleet:
    """Running members; `results` is what each returned, by number, once the block has ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.results: list[Any] = []

    async def go(self) -> None:
        """Set `go` in all members."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        await self._process.stdin.drain()


@asynccontextmanager
async def fleet(task: MemberTask, count: int, **arguments: Any) -> AsyncIterator[Fleet]:
    """Run `task` in `count` processes; enter when all say they are ready, end them with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.fleet",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
        limit=64 * 1024 * 1024,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    handle = Fleet(process)
    try:
        order = {"task": f"{task.__module__}:{task.__qualname__}", "count": count, "arguments": arguments}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await asyncio.wait_for(process.stdin.drain(), 30)
        if await asyncio.wait_for(process.stdout.readline(), 120) != b"ready\n":
            raise RuntimeError(f"the processes for {order['task']} did not start")
        yield handle
        process.stdin.close()
        handle.results = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))
        await asyncio.wait_for(process.wait(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _main() -> None:
    order = json.loads(sys.stdin.readline())
    module, _, name = order["task"].partition(":")
    task: MemberTask = getattr(importlib.import_module(module), name)
    context = multiprocessing.get_context("fork")
    pipes: list[Pipe] = []
    processes = []
    for number in range(order["count"]):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        process = context.Process(target=_member, args=(theirs, list(pipes), task, number, order["arguments"]))
        process.start()
        theirs.close()
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    print("ready", flush=True)
    if sys.stdin.readline():
        for pipe in pipes:
            pipe.send("go")
        sys.stdin.read()
    for pipe in pipes:
        pipe.send("stop")
    print(json.dumps([pipe.recv() for pipe in pipes]), flush=True)
    for process in processes:
        process.join()


def _member(pipe: Pipe, others: list[Pipe], task: MemberTask, number: int, arguments: dict[str, Any]) -> None:
    # The parent's ends: while a member holds one, nobody sees that the parent is gone.
    for other in others:
        other.close()
    run(_work(pipe, task, number, arguments))


async def _work(pipe: Pipe, task: MemberTask, number: int, arguments: dict[str, Any]) -> None:
    member = Member(number, lambda: pipe.send("ready"))

    async def watch() -> None:
        while not member.stop.is_set():
            try:
                word = await asyncio.to_thread(pipe.recv)
            except EOFError:
                os._exit(1)
            (member.go if word == "go" else member.stop).set()

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        value = await task(member, **arguments)
    pipe.send(value)


if __name__ == "__main__":
    _main()
