"""A gateway process of the run: `python -m tests.chaos.gateway NAME JOURNAL-DSN CLOCK-FILE RATE SEED`.

It is its own users: they enqueue at a steady rate, alone, in batches, under keys and in transactions of their own, wait
for results, withdraw some; write orders with an outbox event each; and submit imports. What they were told is noted.
"""

from __future__ import annotations

import sys

from tests.chaos import clock
from tests.support.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    clock.install(sys.argv[3])

import json
import logging
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import anyio
import anyio.abc
import asyncpg
from anyio.abc import TaskStatus

from dispatch_core import Outbox
from dispatch_core.database import mapped_errors
from dispatch_core.errors import (
    ClientClosedError,
    DatabaseError,
    DatabaseUnavailableError,
    JobClosedError,
    RelayDispatchError,
    UnknownJobError,
)
from dispatch_core.ids import new_id
from gateway_sdk import ChunkSpec, DispatchRequest, GatewayClient, TenantClient
from tests.chaos.journal import Journal, open_journal
from tests.chaos.logs import configure
from tests.chaos.rig import ALL_WORK, USERS
from tests.chaos.roster import NOT_REACHED, TENANTS

logger = logging.getLogger("chaos")

CHUNKS: Final = 8
ROWS: Final = 50
"""Of a chunk of an import."""
IMPORT_EVERY_SECONDS: Final = 8.0
STARTING: Final = 0.1
"""Of the rate, until every process is at work: where load takes the whole machine, none would come so far."""
BURST_EVERY_SECONDS: Final = 12.0
BURST_SECONDS: Final = 4.0
"""Of this gateway's rate, at once: so that relays have a backlog to work off."""
LONG_SECONDS: Final = 12.0
"""Of few handlers: several leases, and thrice what a transaction may be found open."""


class Users:
    """All users of this gateway."""

    def __init__(self, client: GatewayClient, journal: Journal, chance: random.Random) -> None:
        self.client = client
        self.journal = journal
        self.chance = chance
        self.dsn = client.settings.core.require_dsn()

    # --- jobs -----------------------------------------------------------------------------------------

    def job(self, tenant: str) -> dict[str, Any]:
        """Draw a job: the arguments of `enqueue`."""
        chance = self.chance
        end = chance.choice(("reply",) * 16 + ("retry", "retry", "reject"))
        seconds = chance.choice((0.0,) * 8 + (0.01, 0.01, 0.05, 0.3, 0.3, 1.5))
        if chance.random() < 0.01:
            seconds = LONG_SECONDS
        return {
            "relay_id": chance.choice(("erp", "crm")),
            "operation": chance.choice(("Work",) * 24 + ("Nap",)),
            "body": json.dumps({"tenant": tenant, "seconds": seconds, "end": end}),
            "max_attempts": chance.choice((1, 1, 2, 3)),
            "ttl": chance.choice((2.0, 20.0, 30.0, 30.0, 40.0)),
            "delay": chance.choice((None,) * 12 + (0.5,)),
        }

    async def one(self) -> None:
        tenant = self.chance.choice(TENANTS)
        acme = self.client.tenant(tenant)
        await self.chance.choices(
            (self.single, self.keyed, self.many, self.withdrawn, self.in_a_transaction), (80, 4, 3, 5, 4)
        )[0](acme)

    async def single(self, acme: TenantClient) -> None:
        job = self.job(acme.tenant_id)
        job_id = await self.accepted(acme, job, acme.enqueue(**job))
        if job_id is not None:
            await self.told(acme, job_id)

    async def keyed(self, acme: TenantClient) -> None:
        """Two at the same moment, under one key."""
        job = {**self.job(acme.tenant_id), "idempotency_key": str(new_id())}
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(self.accepted, acme, job, acme.enqueue(**job))

    async def many(self, acme: TenantClient) -> None:
        await self.several(acme, [self.job(acme.tenant_id) for _ in range(5)])

    async def several(self, acme: TenantClient, jobs: list[dict[str, Any]]) -> None:
        try:
            job_ids = await acme.enqueue_many([DispatchRequest(**job) for job in jobs])
        except (DatabaseError, ClientClosedError) as error:
            await self.journal.note("refused", acme.tenant_id, code=error.code)
            return
        async with anyio.create_task_group() as group:
            for job_id, job in zip(job_ids, jobs, strict=True):
                group.start_soon(self.note_accepted, acme, job_id, job)

    async def withdrawn(self, acme: TenantClient) -> None:
        job = self.job(acme.tenant_id)
        job_id = await self.accepted(acme, job, acme.enqueue(**job))
        if job_id is not None:
            await anyio.sleep(self.chance.choice((0.0, 0.01, 0.1)))
            try:
                said = await acme.mark_expired(job_id)
            except (DatabaseError, ClientClosedError):
                await self.journal.note("withdrawal unknown", acme.tenant_id, job_id)
            else:
                await self.journal.note("withdrawal", acme.tenant_id, job_id, said=said)
            await self.told(acme, job_id)

    async def accepted(self, acme: TenantClient, job: dict[str, Any], call: Awaitable[UUID]) -> UUID | None:
        try:
            job_id = await call
        except (DatabaseError, ClientClosedError) as error:
            # Whether it is stored is unknown; with a key or without, the error names what it would be.
            await self.journal.note("refused", acme.tenant_id, error.job_id, code=error.code)
            return None
        await self.note_accepted(acme, job_id, job)
        return job_id

    async def note_accepted(self, acme: TenantClient, job_id: UUID, job: dict[str, Any]) -> None:
        await self.journal.note(
            "accepted", acme.tenant_id, job_id, relay=job["relay_id"], max_attempts=job["max_attempts"],
            ttl=job["ttl"], key=job.get("idempotency_key"),
        )  # fmt: skip

    async def told(self, acme: TenantClient, job_id: UUID) -> None:
        """Wait for the result, through all outages, and note what it is."""
        since = time.monotonic()
        until = since + 90
        while time.monotonic() < until:
            try:
                result = await acme.wait(job_id)
            except ClientClosedError:
                return
            except UnknownJobError:
                await self.journal.note("unknown", acme.tenant_id, job_id)
                return
            except RelayDispatchError as error:
                if not error.retryable:
                    await self.journal.note("fault", acme.tenant_id, job_id, error=repr(error))
                    return
                await anyio.sleep(0.5)
                since = time.monotonic()
                continue
            body = None if result.response_body is None else result.response_body.decode()
            await self.journal.note(
                "told", acme.tenant_id, job_id, status=result.status, code=result.error_code, attempt=result.attempt,
                body=body, since=since,
            )  # fmt: skip
            return
        await self.journal.note("never told", acme.tenant_id, job_id)

    # --- a business transaction -------------------------------------------------------------------------

    async def in_a_transaction(self, acme: TenantClient) -> None:
        """An order, its event and a job, all of it or nothing."""
        job, order = self.job(acme.tenant_id), new_id()
        rolls_back = self.chance.random() < 0.4
        job_id = None
        said = "unknown"
        try:
            with mapped_errors():
                conn = await asyncpg.connect(
                    self.dsn, timeout=3, command_timeout=5, server_settings={"application_name": USERS}
                )
                try:
                    await conn.execute("begin")
                    await conn.execute("insert into chaos.orders values ($1, $2)", acme.tenant_id, order)
                    await Outbox.enqueue(
                        conn, "order", {"tenant": acme.tenant_id, "order": str(order)}, tenant=acme.tenant_id
                    )
                    job_id = await acme.enqueue(**job, conn=conn)
                    await conn.execute("rollback" if rolls_back else "commit")
                    said = "rolled back" if rolls_back else "committed"
                finally:
                    conn.terminate()
        except (DatabaseError, ClientClosedError):
            if rolls_back:
                said = "rolled back"  # nobody has said commit
        await self.journal.note("order", acme.tenant_id, None, order=str(order), said=said)
        if job_id is None:
            return
        if said == "committed":
            await self.note_accepted(acme, job_id, job)
            await self.told(acme, job_id)
        else:
            await self.journal.note("rolled back" if said == "rolled back" else "refused", acme.tenant_id, job_id)

    # --- a backlog ----------------------------------------------------------------------------------------

    async def bursts(self, size: int) -> None:
        while True:
            await anyio.sleep(BURST_EVERY_SECONDS * self.chance.uniform(0.5, 1.5))
            tenant, relay_id = self.chance.choice(TENANTS), self.chance.choice(("erp", "crm"))
            body = json.dumps({"tenant": tenant, "seconds": 0.5, "end": "reply"})
            job = {"relay_id": relay_id, "operation": "Work", "body": body, "max_attempts": 2, "ttl": 40.0}
            await self.several(self.client.tenant(tenant), [job] * size)

    # --- imports ----------------------------------------------------------------------------------------

    async def imports(self) -> None:
        async with anyio.create_task_group() as group:
            while True:
                await anyio.sleep(IMPORT_EVERY_SECONDS * self.chance.uniform(0.5, 1.5))
                group.start_soon(self.one_import, self.client.tenant(self.chance.choice(TENANTS)))

    async def one_import(self, acme: TenantClient) -> None:
        job_id = new_id()
        chunks = [ChunkSpec({"first": 1 + n * ROWS, "count": ROWS}, rows=ROWS) for n in range(CHUNKS)]
        while True:
            try:
                await acme.durable.submit("import", chunks, job_id=job_id, max_attempts=10_000)
            except (ClientClosedError, JobClosedError):
                return
            except DatabaseError as error:
                if not error.retryable:
                    await self.journal.note("fault", acme.tenant_id, job_id, error=repr(error))
                    return
                await anyio.sleep(0.5)
            else:
                await self.journal.note("submitted", acme.tenant_id, job_id, rows=CHUNKS * ROWS)
                return


async def guarded(journal: Journal, call: Callable[[], Awaitable[None]]) -> None:
    """Note what a user of the SDK need not foresee, in place of ending the process by it."""
    try:
        await call()
    except Exception as error:
        await journal.note("fault", "", None, error=repr(error))
        logger.exception("not foreseen")


async def main(name: str, journal_dsn: str, all_work: Path, rate: float, seed: int) -> None:
    async with open_journal(journal_dsn, name) as journal, GatewayClient() as client:
        users = Users(client, journal, random.Random(seed))
        logger.info("gateway %s works", name)
        async with anyio.create_task_group() as group:
            await group.start(stop_on_sigterm, group.cancel_scope)
            await journal.note("works", "")
            if not rate:
                await anyio.sleep_forever()  # it sweeps and drains
            group.start_soon(guarded, journal, users.imports)
            group.start_soon(guarded, journal, partial(users.bursts, round(rate * BURST_SECONDS)))
            at = time.monotonic()
            until_all_work = 1 / STARTING
            while True:
                group.start_soon(guarded, journal, users.one)
                if until_all_work > 1 and all_work.exists():
                    until_all_work = 1.0
                # After a stop it goes on at its rate, and does not make good for what it has missed.
                at = max(at + until_all_work / rate, time.monotonic() - 0.5)
                await anyio.sleep(max(0.0, at - time.monotonic()))


async def stop_on_sigterm(scope: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()
            return


if __name__ == "__main__":
    configure()
    try:
        all_work = Path(sys.argv[3]).with_name(ALL_WORK)
        anyio.run(partial(main, sys.argv[1], sys.argv[2], all_work, float(sys.argv[4]), int(sys.argv[5])))
    except* DatabaseUnavailableError as group:
        # At the start, which is the supervisor's to repeat.
        logger.warning("not started: %s", group.exceptions)
        os._exit(NOT_REACHED)
