"""The gateway's part of the demo: each request is enqueued at its time, and its result waited for."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import anyio

from dispatch_core.errors import RelayDispatchError
from dispatch_core.models import DispatchStatus
from gateway_sdk.client import GatewayClient
from gateway_sdk.demo.lines import DemoLine

__all__ = ["Ending", "send_all"]

MAX_WAITING: Final = 5000
"""Requests under way at once, so that a very long input does not lie in memory as tasks."""

SHOWN_BYTES: Final = 200
"""Of an answer, in the report."""


@dataclass(slots=True)
class Ending:
    """What became of one line. `seconds` is from the call of enqueue to the result in hand.

    `refused` says why there was no job; `lost` why there was one and no result of it.
    """

    line: DemoLine
    job_id: UUID | None = None
    status: DispatchStatus | None = None
    error_code: str | None = None
    attempt: int = 0
    seconds: float = 0.0
    refused: str | None = None
    lost: str | None = None
    difference: str | None = None
    error_message: str | None = None
    response_status: int | None = None
    response_bytes: int = 0
    response: str | None = None
    """The beginning of the answer, where it is text."""


async def send_all(
    client: GatewayClient,
    lines: Sequence[DemoLine],
    *,
    rate: float,
    on_sent: Callable[[], None],
    on_end: Callable[[Ending], None],
) -> list[Ending]:
    """Send the lines, `rate` a second (0: as fast as they are accepted), and return when each has ended."""
    endings = [Ending(line) for line in lines]
    slots = anyio.Semaphore(MAX_WAITING)
    started = anyio.current_time()

    async def send(ending: Ending) -> None:
        try:
            await _send(client, ending, on_sent)
        finally:
            slots.release()
        on_end(ending)

    async with anyio.create_task_group() as group:
        for number, ending in enumerate(endings):
            if rate:
                # By the clock, not by naps one after the other: a pause that came out long is made up for.
                await anyio.sleep_until(started + number / rate)
            await slots.acquire()
            group.start_soon(send, ending)
    return endings


async def _send(client: GatewayClient, ending: Ending, on_sent: Callable[[], None]) -> None:
    line = ending.line
    tenant, request = client.tenant(line.tenant), line.request()
    started = time.perf_counter()
    try:
        ending.job_id = await tenant.enqueue(
            request.relay_id,
            request.operation,
            headers=request.headers,
            body=request.body,
            json=request.json,
            ttl=request.ttl,
            delay=request.delay,
            max_attempts=request.max_attempts,
            idempotency_key=request.idempotency_key,
        )
    except RelayDispatchError as error:
        ending.refused = f"{error.code}: {error}"
        return
    finally:
        on_sent()
    try:
        result = await tenant.wait(ending.job_id)
    except RelayDispatchError as error:
        ending.lost = f"{error.code}: {error}"
        return
    ending.seconds = time.perf_counter() - started
    ending.status, ending.error_code, ending.attempt = result.status, result.error_code, result.attempt
    ending.error_message, ending.response_status = result.error_message, result.response_status
    body = result.response_body or b""
    ending.response_bytes, ending.response = len(body), _beginning(body)
    ending.difference = line.expect.difference(result) if line.expect is not None else None


def _beginning(body: bytes) -> str | None:
    try:
        # A character that the cut went through is left out; anything else that is no UTF-8 means no text.
        text = codecs.getincrementaldecoder("utf-8")().decode(body[:SHOWN_BYTES], final=len(body) <= SHOWN_BYTES)
    except UnicodeDecodeError:
        return None
    return text or None
