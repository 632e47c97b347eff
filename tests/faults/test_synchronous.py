"""Synchronous replication: what a call says is there is on the standby, also where an earlier call has stored it.

A statement that waits for its standby and is given up is cancelled; PostgreSQL then commits it without the standby. Who
asks again finds it, and must not be told so before the standby has it: a failover would take it away again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from uuid import UUID

import anyio
import anyio.to_thread
import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.ids import new_id
from dispatch_core.models import Completion, DispatchRequest, WriteOutcome
from dispatch_core.requests import Preparer
from tests.support.activity import pid_of
from tests.support.eventually import eventually
from tests.support.proxy import TcpProxy
from tests.support.replication import Pair

pytestmark = [pytest.mark.slow, pytest.mark.invariant("I1")]

Call = Callable[[RelayDispatchRepository], Awaitable[Any]]
INSTANCE = "relay:1"
WAITING = "select exists (select from pg_stat_activity where pid = any ($1::int[]) and wait_event = 'SyncRep')"
"""Whether one of these backends has committed, and waits for its standby."""


def rows(count: int) -> list[Any]:
    return Preparer().rows([DispatchRequest("erp", "Work")] * count)


async def store(repository: RelayDispatchRepository) -> UUID:
    return await repository.enqueue("erp", "Work")


class Case:
    """A call that may be made again, and what shows on the server that it was done."""

    done = "select exists (select from relay.s2r_relay_dispatch_request)"

    async def prepare(self, gateway: RelayDispatchRepository, worker: RelayDispatchRepository) -> None:
        """Do what comes before, while the standby is there."""

    async def call(self, gateway: RelayDispatchRepository, worker: RelayDispatchRepository) -> Any:
        raise NotImplementedError

    async def again(self, gateway: RelayDispatchRepository, worker: RelayDispatchRepository) -> Any:
        return await self.call(gateway, worker)

    def check(self, answer: Any) -> None:
        """Look at what the second call was told."""


class Enqueue(Case):
    def __init__(self, count: int) -> None:
        self.rows = rows(count)

    async def call(self, gateway: RelayDispatchRepository, worker: RelayDispatchRepository) -> Any:
        return await gateway.enqueue_rows(self.rows)


class Keyed(Case):
    async def call(self, gateway: RelayDispatchRepository, worker: RelayDispatchRepository) -> Any:
        return await gateway.enqueue("erp", "Work", idempotency_key="k")


class Complete(Case):
    done = "select exists (select from relay.s2r_relay_dispatch_result)"

    async def prepare(self, gateway: RelayDispatchRepository, worker: RelayDispatchRepository) -> None:
        await store(gateway)
        (self.job,) = (await worker.claim("erp", claimed_by=INSTANCE, limit=1, lease_seconds=60)).jobs

    async def call(self, gateway: RelayDispatchRepository, worker: RelayDispatchRepository) -> Any:
        completion = Completion(self.job.job_id, self.job.fence)
        return await worker.complete_many("erp", [completion], claimed_by=INSTANCE)

    def check(self, answer: Any) -> None:
        assert [settled.outcome for settled in answer] == [WriteOutcome.REPEATED]


class Claim(Case):
    done = "select exists (select from relay.s2r_relay_dispatch_queue where claimed_by is not null)"

    async def prepare(self, gateway: RelayDispatchRepository, worker: RelayDispatchRepository) -> None:
        self.claim_id = new_id()
        await store(gateway)

    async def call(self, gateway: RelayDispatchRepository, worker: RelayDispatchRepository) -> Any:
        return await worker.claim("erp", claimed_by=INSTANCE, limit=1, lease_seconds=60, claim_id=self.claim_id)

    async def again(self, gateway: RelayDispatchRepository, worker: RelayDispatchRepository) -> Any:
        return await worker.claim_again("erp", claimed_by=INSTANCE, claim_id=self.claim_id)

    def check(self, answer: Any) -> None:
        assert len(answer.jobs) == 1


@pytest.mark.parametrize(
    "case", [Enqueue(1), Enqueue(3), Enqueue(40), Keyed(), Complete(), Claim()], ids=lambda case: type(case).__name__
)
async def test_what_is_said_to_be_there_already_is_on_the_standby(pair: Pair, case: Case) -> None:
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    async with TcpProxy("127.0.0.1", pair.first.port) as stream:
        await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=True, through=stream.port))
        admin = await asyncpg.connect(pair.admin_dsn(name))

        async def connected() -> tuple[Any, ...]:
            connections = [await asyncpg.connect(dsn) for dsn in (pair.gateway_dsn(name), pair.worker_dsn(name))]
            return (*connections, *(RelayDispatchRepository(connection, "acme") for connection in connections))

        *connections, gateway, worker = await connected()
        await case.prepare(gateway, worker)
        stream.mode = "black_hole"
        told: list[Any] = []

        async def call() -> None:
            told.append(await case.call(gateway, worker))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await eventually(partial(admin.fetchval, WAITING, [pid_of(connection) for connection in connections]))
            group.cancel_scope.cancel()
        assert not told, "it did not wait for the standby at all"
        await eventually(lambda: admin.fetchval(case.done), message="cancelled, and committed here:")
        for connection in connections:
            connection.terminate()

        *connections, gateway, worker = await connected()
        pids = [pid_of(connection) for connection in connections]
        answers: list[Any] = []

        async def again() -> None:
            answers.append(await case.again(gateway, worker))

        async with anyio.create_task_group() as group:
            group.start_soon(again)

            async def waits_for_the_standby() -> bool:
                assert not answers, "it was told, and no standby has it"
                return bool(await admin.fetchval(WAITING, pids))

            await eventually(waits_for_the_standby)
            stream.mode = "pass"
        case.check(answers[0])
        for connection in (*connections, admin):
            connection.terminate()
        await anyio.to_thread.run_sync(pair.kill_primary)
        await anyio.to_thread.run_sync(pair.promote)
        admin = await asyncpg.connect(pair.admin_dsn(name, of_standby=True))
        assert await admin.fetchval(case.done)
        admin.terminate()
