"""Another process of the same benchmark: it runs one coroutine until its standard input ends, and hands back a value.

The coroutine is named `module:function` and gets its arguments as JSON, both on standard input and not on the command
line, because DSNs carry passwords. It calls `ready()` once it can be measured, and returns when `stop` is set. One that
has a parameter `orders` is asked things meanwhile, each a line of JSON there and back.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.loops import run

__all__ = ["Child", "Orders", "Task", "child"]

_ROOT = Path(__file__).resolve().parents[1]

Task = Callable[..., Awaitable[Any]]
"""`async def task(ready, stop, **arguments) -> value that JSON can hold`"""


class Orders:
    """What the parent asks, one thing at a time: iterate, and `answer` each."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()

    def put(self, line: str | None) -> None:
        self._queue.put_nowait(line)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (line := await self._queue.get()) is not None:
            yield json.loads(line)

    def answer(self, value: Any) -> None:
        print(json.dumps(value), flush=True)


class Child:
    """A running child; `result` is what its task returned, once the block has ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.result: Any = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, order: Any, *, timeout_seconds: float = 120) -> Any:
        """Send `order` to a task that takes orders; return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_seconds)
        if not line:
            raise RuntimeError("the child process ended before it had answered")
        return json.loads(line)


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
    handle = Child(process)
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

    orders = Orders()

    async def watch() -> None:
        while line := await asyncio.to_thread(sys.stdin.readline):
            orders.put(line)
        orders.put(None)
        stop.set()

    arguments = order["arguments"]
    if "orders" in inspect.signature(task).parameters:
        arguments["orders"] = orders
    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        value = await task(ready, stop, **arguments)
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    run(_main())
