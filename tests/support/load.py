"""A gateway's users, and the audit of what became of their jobs.

The audit stands on what the test itself has seen: which enqueues were answered, and the journal that the handlers keep
past the SDK (`tests.support.fleet`).
"""

from __future__ import annotations

import time
from collections import Counter
from uuid import UUID

import anyio
import asyncpg

from dispatch_core.errors import DatabaseUnavailableError
from dispatch_core.models import DispatchStatus
from gateway_sdk import GatewayClient, TenantClient
from relay_sdk import Relay
from tests.support.eventually import eventually
from tests.support.fleet import Journal

JOBS_PER_SECOND = 200


class Load:
    """A gateway's users: so many enqueues a second, of jobs with one attempt, each tried once by its sender."""

    def __init__(self, acme: TenantClient) -> None:
        self.acme = acme
        self.accepted: set[UUID] = set()
        self.refused: list[DatabaseUnavailableError] = []
        self.slowest = 0.0
        self._stopped = anyio.Event()
        self.ended = anyio.Event()

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        async with anyio.create_task_group() as senders:
            at = time.monotonic()
            number = 0
            while not self._stopped.is_set():
                senders.start_soon(self._send, ("0", "0.01", "0.05", "0.3")[number % 4])
                number += 1
                at += 1 / JOBS_PER_SECOND
                await anyio.sleep(max(0.0, at - time.monotonic()))
        self.ended.set()

    async def send_long(self, seconds: float, count: int) -> list[UUID]:
        job_ids = [await self.acme.enqueue("erp", "Work", body=str(seconds)) for _ in range(count)]
        self.accepted.update(job_ids)
        return job_ids

    async def _send(self, seconds: str) -> None:
        began = time.monotonic()
        try:
            self.accepted.add(await self.acme.enqueue("erp", "Work", body=seconds))
        except DatabaseUnavailableError as error:
            self.refused.append(error)
        self.slowest = max(self.slowest, time.monotonic() - began)


async def audit(admin_dsn: str, load: Load, journal: Journal) -> None:
    """I1, I2: every accepted job ended once, started once, and what its handler has ended counts."""
    admin = await asyncpg.connect(admin_dsn)
    try:

        async def all_ended() -> bool:
            return not await admin.fetchval("select exists (select from relay.s2r_relay_dispatch_queue)")

        await eventually(all_ended, 60, 0.1, message="the end of every job")
        rows = await admin.fetch(
            "select q.job_id, r.status, r.attempt, r.error_code from relay.s2r_relay_dispatch_request q"
            " left join relay.s2r_relay_dispatch_result r on r.tenant_id = q.tenant_id and r.job_id = q.job_id"
        )
    finally:
        await admin.close()
    stored = {row["job_id"]: row for row in rows}
    assert len(stored) == len(rows)
    assert load.accepted <= stored.keys(), "accepted and lost"
    assert all(row["status"] is not None for row in rows), "stored and never ended"
    # An enqueue that was refused may have been stored all the same; its error names the id.
    assert stored.keys() - load.accepted <= {error.job_id for error in load.refused}

    starts = Counter(entry.job_id for entry in journal.entries("began"))
    assert max(starts.values()) == 1, "started twice with one attempt"
    done = {entry.job_id for entry in journal.entries("ended")}
    lost = {job_id for job_id, row in stored.items() if row["error_code"] == "S2R-LEASE-LOST"}
    assert not lost & done, "the handler had ended, and the job was called lost"
    # Every relay lived through it and came back within a lease, so nothing was lost at all.
    assert Counter(row["status"] for row in rows) == {"succeeded": len(rows)}
    assert done == stored.keys()


async def answers_by_notify(client: GatewayClient, *relays: Relay, within: float = 40.0) -> list[UUID]:
    """Hold that wake-ups and results do not come by polling (any more), `within` so many seconds.

    Returns the jobs that ended for it.
    """
    jobs: list[UUID] = []
    until = time.monotonic() + within
    await eventually(
        lambda: client.health().state == "listening" and all(r.health().listener == "listening" for r in relays),
        within,
        message="everybody listening",
    )
    acme = client.tenant("acme")

    async def a_round_goes_by_notify() -> bool:
        pushed, polled = client.health().wakes_by_push, [relay.metrics.wakeups_by_poll for relay in relays]
        began = time.monotonic()
        for _ in range(20):
            result = await acme.call("erp", "Work", body="0", timeout=10)
            assert result.status is DispatchStatus.SUCCEEDED
            jobs.append(result.job_id)
        return (
            client.health().wakes_by_push - pushed == 20
            and [relay.metrics.wakeups_by_poll for relay in relays] == polled
            and time.monotonic() - began < 5
        )

    # A process whose pooled connections were cut may lose its first ring.
    await eventually(a_round_goes_by_notify, until - time.monotonic(), message="wake-ups and results by notify")
    return jobs
