"""A producer or a worker of one of the systems that are written in Python; systems/graphile/process.mjs is its twin.

What it is told and what it answers is in processes.py. Times are of the monotonic clock, which all processes of a
machine share, in nanoseconds.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.loops import run
from benchmarks.peers.model import Driver, Producer
from benchmarks.peers.processes import MARK

__all__: list[str] = []

# Jobs that are sent before the clock starts: connections are opened and statements prepared by them.
_WARM_ROUNDS: Final = 8
_WARM_FIRST: Final = 5_000_000

_out = sys.stdout


def _say(text: str) -> None:
    print(MARK + text, file=_out, flush=True)


async def _hear(word: str) -> None:
    line = await asyncio.to_thread(sys.stdin.readline)
    # The end of the input is a stop, whenever it comes.
    if line.strip() != word and word != "stop":
        raise SystemExit(f"expected {word!r}, was told {line!r}")


async def _work(driver: Driver, order: Mapping[str, Any]) -> dict[str, Any]:
    numbers: list[int] = []
    times: list[int] = []
    expected = order["expected"]

    def handled(number: int) -> None:
        numbers.append(number)
        times.append(time.monotonic_ns())
        if len(numbers) == expected:
            _say("all")

    _say("ready")
    await _hear("go")
    async with driver.worker(order["dsn"], order["settings"], handled):
        _say("started")
        await _hear("stop")
    # A job that is started twice counts after the stop too.
    return {"numbers": numbers, "times": times if order["times"] else times[:1]}


async def _produce(driver: Driver, order: Mapping[str, Any]) -> dict[str, Any]:
    first, tasks = order["first"], order["tasks"]
    async with driver.producer(order["dsn"], order["settings"]) as producer:
        warm = 0
        for _ in range(_WARM_ROUNDS if order["warm"] else 0):
            await asyncio.gather(*(producer.send(first + _WARM_FIRST + number) for number in range(warm, warm + tasks)))
            warm += tasks
        # No collection of what the warm-up left, in the middle of the sample.
        gc.collect()
        _say("ready")
        await _hear("go")
        result = await {"single": _single, "paced": _paced, "bulk": _bulk}[order["mode"]](producer, order)
    return {**result, "warm": [first + _WARM_FIRST, warm]}


async def _single(producer: Producer, order: Mapping[str, Any]) -> dict[str, Any]:
    first = order["first"]
    sent = 0
    started = time.monotonic_ns()
    until = started + int(order["seconds"] * 1e9)

    async def caller() -> None:
        nonlocal sent
        while time.monotonic_ns() < until:
            number = first + sent
            sent += 1
            await producer.send(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(order["tasks"]):
            group.create_task(caller())
    return {"started": started, "ended": time.monotonic_ns(), "sent": [first, sent]}


async def _paced(producer: Producer, order: Mapping[str, Any]) -> dict[str, Any]:
    first, count, every = order["first"], order["count"], order["every"]
    times: list[int] = []
    started = time.monotonic_ns()
    for number in range(count):
        times.append(time.monotonic_ns())
        await producer.send(first + number)
        await asyncio.sleep(max(0.0, every - (time.monotonic_ns() - times[-1]) / 1e9))
    return {"started": started, "ended": time.monotonic_ns(), "sent": [first, count], "times": times}


async def _bulk(producer: Producer, order: Mapping[str, Any]) -> dict[str, Any]:
    first, count, batch = order["first"], order["count"], order["settings"]["batch"]
    started = time.monotonic_ns()
    for begin in range(first, first + count, batch):
        await producer.send_many(range(begin, min(begin + batch, first + count)))
    return {"started": started, "ended": time.monotonic_ns(), "sent": [first, count]}


async def _main() -> None:
    order = json.loads(await asyncio.to_thread(sys.stdin.readline))
    driver: Any = importlib.import_module(f"benchmarks.peers.systems.{order['system']}")
    result = await (_work if order["role"] == "worker" else _produce)(driver, order)
    _say("result " + json.dumps(result))


if __name__ == "__main__":
    # Whatever a library prints is not for the run.
    sys.stdout = sys.stderr
    run(_main())
