"""Withdraw jobs whose callers do not wait for them any more, and tell those who wait and the relays at work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.batcher import Batcher
from dispatch_core.database import Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import ConnectionLostError, DatabaseUnavailableError
from gateway_sdk.lane import BUSY_TRIES, is_fault_of_one_row, new_backoff

__all__ = ["Withdrawal", "Withdrawing"]

_REPEATS: Final = 2
"""Every kept connection may be dead, and not known to be; then the second try opens a new one."""


class Withdrawal(NamedTuple):
    """A job to be withdrawn, and the monotonic time after which nobody waits for that."""

    job_id: UUID
    give_up_at: float


class Withdrawing:
    """What the batches of withdrawals do, of all tenants."""

    def __init__(self, database: Database, doorbell: Doorbell) -> None:
        self._database = database
        self._doorbell = doorbell

    def lane(self, tenant: str) -> Batcher[Withdrawal, int]:
        async def flush(items: list[Withdrawal]) -> Sequence[int | Exception]:
            return await self._send(tenant, items)

        # Not repeated after a lost connection: the second answer, 0, might be wrong. Unless nothing was sent.
        return Batcher(flush, max_items=1000, retries=BUSY_TRIES, splits=is_fault_of_one_row)

    async def _send(self, tenant: str, items: list[Withdrawal]) -> Sequence[int | Exception]:
        job_ids = [item.job_id for item in items]
        # No longer than the most patient waits: what gathers behind it must have its turn in time.
        until = max(item.give_up_at for item in items)
        backoff: Backoff | None = None
        while True:
            try:
                async with self._database.connection(until - time.monotonic()) as conn:
                    ended = await RelayDispatchRepository(conn, tenant).mark_expired_many(
                        job_ids, timeout=max(0.001, until - time.monotonic())
                    )
                break
            except DatabaseUnavailableError as error:
                backoff = backoff or new_backoff()
                pause = backoff.next()
                is_told = isinstance(error, ConnectionLostError) or backoff.attempt > _REPEATS
                if is_told or time.monotonic() + pause >= until:
                    raise
            await anyio.sleep(pause)
        withdrawn = set()
        for job, was_claimed in ended:
            withdrawn.add(job.job_id)
            self._doorbell.ring_results(tenant, job.job_id)
            if was_claimed:
                self._doorbell.ring_cancel(tenant, job.relay_id, job.job_id)
        answers: list[int | Exception] = []
        for job_id in job_ids:
            answers.append(1 if job_id in withdrawn else 0)
            # Asked for twice in one batch, it was withdrawn once.
            withdrawn.discard(job_id)
        return answers
