"""Ask where jobs stand, for all waits and looks of one tenant at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Final, Protocol
from uuid import UUID

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.batcher import Batcher
from dispatch_core.database import Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import DatabaseBusyError, DatabaseUnavailableError
from dispatch_core.ring_inside import RingInside
from gateway_sdk.health import GatewayCounters
from gateway_sdk.lane import is_fault_of_one_row, new_backoff
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.waits import Polled, for_job

__all__ = ["Asker", "Look", "Polling"]

_POLL_REPEATS: Final = 2


class Asker(Protocol):
    """Who asks where a job stands: a job that is waited for, or a look."""

    job_id: UUID

    @property
    def is_over(self) -> bool: ...

    def polled(self, answer: Polled | Exception) -> None: ...


class Look:
    """One question where a job stands, of one caller."""

    __slots__ = ("answer", "job_id")

    def __init__(self, job_id: UUID) -> None:
        self.job_id = job_id
        self.answer: asyncio.Future[Polled] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        """Nobody waits for the answer any more."""
        return self.answer.done()

    def polled(self, answer: Polled | Exception) -> None:
        """Give the answer, if somebody still waits for it."""
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(for_job(answer, self.job_id))
            self.answer.exception()  # seen, whether or not anybody still awaits it
        else:
            self.answer.set_result(answer)


class Polling:
    """What the batches of polls do, of all tenants."""

    def __init__(
        self, database: Database, settings: GatewaySettings, counters: GatewayCounters, ring_inside: RingInside
    ) -> None:
        self._database = database
        self._settings = settings
        self._counters = counters
        self._ring_inside = ring_inside
        # Polls never take all connections: what they ask for can wait, and an enqueue cannot.
        # (Fast: without a turn of the event loop where one is free.)
        self._turns = anyio.Semaphore(max(1, database.max_size // 2), fast_acquire=True)

    def lane(self, tenant: str) -> Batcher[Asker, Polled]:
        async def flush(askers: list[Asker]) -> Sequence[Polled | Exception]:
            # A result may be large: it comes once, however many look at it, and not for those who have gone.
            job_ids = list(dict.fromkeys([asker.job_id for asker in askers if not asker.is_over]))
            if len(job_ids) == len(askers):
                return await self._send(tenant, job_ids)
            answers = await self._send(tenant, job_ids) if job_ids else []
            by_id = dict(zip(job_ids, answers, strict=True))
            return [by_id.get(asker.job_id) for asker in askers]

        return Batcher(
            flush,
            max_items=self._settings.poll_batch_items,
            concurrency=2,
            splits=is_fault_of_one_row,
            answered=_answer_askers,
        )

    async def _send(self, tenant: str, job_ids: list[UUID]) -> Sequence[Polled | Exception]:
        backoff: Backoff | None = None
        until = time.monotonic() + self._settings.poll_timeout_seconds
        while True:
            try:
                async with self._turns, self._database.connection(until - time.monotonic()) as conn:
                    sent_at = time.monotonic()
                    found, left = await RelayDispatchRepository(conn, tenant).poll_places(
                        job_ids, timeout=max(0.001, until - sent_at)
                    )
                break
            except (DatabaseUnavailableError, DatabaseBusyError):
                # After a restart every pooled connection is dead, and the second try finds a new one.
                backoff = backoff or new_backoff()
                pause = backoff.next()
                if backoff.attempt > _POLL_REPEATS or time.monotonic() + pause >= until:
                    raise
            await anyio.sleep(pause)
        if len(job_ids) == 1:
            self._ring_inside.round_trip(time.monotonic() - sent_at)
        self._counters.polled += len(job_ids) - len(left)
        self._counters.poll_statements += 1
        answers: list[Polled | Exception] = [
            # The clock was read after the call was sent, so this is never after the true deadline.
            result
            if isinstance(result, Exception) or (result is not None and result.status.is_terminal)
            else (result, math.inf if result is None else sent_at + result.remaining)
            for result in found
        ]
        # Not asked for here: each page is answered when it is there, and has a statement and a timeout of its own.
        for place in left:
            answers[place] = None
        return answers


def _answer_askers(askers: Sequence[Asker], answers: Sequence[Polled | Exception]) -> None:
    fault: Exception | None = None
    for asker, answer in zip(askers, answers, strict=True):
        try:
            asker.polled(answer)
        except Exception as error:  # noqa: BLE001  raised below, once the others have their answers
            fault = fault or error
    if fault is not None:
        raise fault
