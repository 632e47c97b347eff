"""Another process of the same benchmark: it runs one coroutine until its standard input ends, and hands back a value.

The coroutine is named `module:function` and gets its arguments as JSON, both on standard input and not on the command
line, because DSNs carry passwords. It calls `ready()` once it can be measured, and returns when `stop` is set.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.loops import run

__all__ = ["Child", "Task", "child"]

_ROOT = Path(__file__).resolve().parents[1]

Task = Callable[..., Awaitable[Any]]
"""`async def task(ready, stop, **arguments) -> value that JSON can hold`"""


class Child:
    """A running child; `result` is what its task returned, once the block has ended."""

    def __init__(self) -> None:
        self.result: Any = None


@asynccontextmanager
async def child(task: Task, **arguments: Any) -> AsyncIterator[Child]:
    """Start `task` in a process of its own; enter when it says it is ready, end it with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
        limit=64 * 1024 * 1024,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    handle = Child()
    try:
        order = {"task": f"{task.__module__}:{task.__qualname__}", "arguments": arguments}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        await asyncio.wait_for(process.stdin.drain(), 30)
        if await asyncio.wait_for(process.stdout.readline(), 60) != b"ready\n":
            raise RuntimeError(f"the child process for {order['task']} did not start")
        yield handle
        process.stdin.close()
        handle.result = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        await asyncio.wait_for(process.wait(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _main() -> None:
    order = json.loads(await asyncio.to_thread(sys.stdin.readline))
    module, _, name = order["task"].partition(":")
    task: Task = getattr(importlib.import_module(module), name)
    stop = asyncio.Event()

    def ready() -> None:
        print("ready", flush=True)

    async def watch() -> None:
        await asyncio.to_thread(sys.stdin.read)
        stop.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        value = await task(ready, stop, **order["arguments"])
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    run(_main())
