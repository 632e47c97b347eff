"""Synchronous replication in the room of durable jobs: what a repeated call says is there, is on the standby.

As in test_synchronous.py: each call is given up while the standby is silent, and so committed without it; the same call
made again must wait for the standby, though there is nothing left for it to write.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import pytest

from dispatch_core.durable_models import JobStatus
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.ids import new_id
from dispatch_core.models import WriteOutcome
from tests.support.activity import pid_of
from tests.support.eventually import eventually
from tests.support.proxy import TcpProxy
from tests.support.replication import Pair

pytestmark = [pytest.mark.slow, pytest.mark.invariant("J1")]

HOLDER, TENANT, KIND = "relay:1", "acme", "import"
WAITING = "select count(*) from pg_stat_activity where pid = any ($1::int[]) and wait_event = 'SyncRep'"
"""How many of these backends have committed, and wait for their standby."""


@dataclass
class Case:
    """A call, by whose login, what shows that it was done, and what its repetition is told."""

    login: str
    call: Callable[[DurableRepository], Awaitable[Any]]
    done: str
    told: Callable[[Any], bool]
    again: Callable[[DurableRepository], Awaitable[Any]] | None = None


async def cases(gateway: DurableRepository, worker: DurableRepository) -> dict[str, Case]:
    """Do what comes before, while the standby is there."""
    stored, unsealed, cancelled, running = [new_id() for _ in range(4)]
    new, token, first = new_id(), new_id(), new_id()
    for job_id in (stored, unsealed, cancelled, running):
        await gateway.insert_job(TENANT, job_id, KIND, submitting=True)
        if job_id != stored:
            await gateway.insert_chunks(TENANT, job_id, [1, 2, 3, 4], from_seq=1)
    for job_id in (cancelled, running):
        await gateway.seal(TENANT, job_id)
    claimed = await worker.claim_next(TENANT, running, holder=HOLDER, token=first, limit=3, lease_seconds=600)
    one, two, three = [chunk.lease for chunk in claimed.chunks]
    row = "select exists (select from relay.durable_chunk where job_id = '{}' and seq = {} and {})"
    job = "select exists (select from relay.durable_job where job_id = '{}' and {})"
    return {
        "submit": Case(
            "gateway",
            lambda repository: repository.insert_job(TENANT, new, KIND, submitting=True),
            job.format(new, "true"),
            lambda answer: answer is False,
        ),
        "chunks": Case(
            "gateway",
            lambda repository: repository.insert_chunks(TENANT, stored, ["a"], from_seq=1),
            row.format(stored, 1, "true"),
            lambda answer: bool(answer == 0),
        ),
        "seal": Case(
            "gateway",
            lambda repository: repository.seal(TENANT, unsealed, chunks=4),
            job.format(unsealed, "status = 'queued'"),
            lambda answer: answer is JobStatus.QUEUED,
        ),
        "cancel": Case(
            "gateway",
            lambda repository: repository.control(TENANT, cancelled, "cancel", actor="alice"),
            job.format(cancelled, "status = 'cancelled'"),
            lambda answer: "already" in repr(answer),
        ),
        "claim": Case(
            "worker",
            lambda repository: repository.claim_next(TENANT, running, holder=HOLDER, token=token, lease_seconds=600),
            row.format(running, 4, f"lease_token = '{token}'"),
            lambda answer: [chunk.lease.seq for chunk in answer.chunks] == [4],
            lambda repository: repository.claim_again([TENANT], token, holder=HOLDER, local_deadline=0.0),
        ),
        "checkpoint": Case(
            "worker",
            lambda repository: repository.checkpoint(one, {"at": 7}, rows_done=7),
            row.format(running, one.seq, "rows_done = 7"),
            lambda answer: answer is None,
        ),
        "complete": Case(
            "worker",
            lambda repository: repository.complete(two),
            row.format(running, two.seq, "status = 'done'"),
            lambda answer: answer.outcome is WriteOutcome.REPEATED,
        ),
        "complete many": Case(
            "worker",
            lambda repository: repository.complete_many([three], [None]),
            row.format(running, three.seq, "status = 'done'"),
            lambda answer: [settled.outcome for settled in answer] == [WriteOutcome.REPEATED],
        ),
    }


async def told_by(call: Callable[[DurableRepository], Awaitable[Any]], connection: Any, told: list[Any]) -> None:
    told.append(await call(DurableRepository(connection)))


async def test_what_a_repeated_durable_call_says_is_there_already_is_on_the_standby(pair: Pair) -> None:
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    async with TcpProxy("127.0.0.1", pair.first.port) as stream:
        await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=True, through=stream.port))
        admin = await asyncpg.connect(pair.admin_dsn(name))

        async def connect(login: str) -> Any:
            return await asyncpg.connect(pair.gateway_dsn(name) if login == "gateway" else pair.worker_dsn(name))

        before = [await connect(login) for login in ("gateway", "worker")]
        all_cases = await cases(*map(DurableRepository, before))
        stream.mode = "black_hole"
        for case in all_cases.values():
            connection = await connect(case.login)
            told: list[Any] = []
            async with anyio.create_task_group() as group:
                group.start_soon(told_by, case.call, connection, told)
                await eventually(partial(admin.fetchval, WAITING, [pid_of(connection)]))
                group.cancel_scope.cancel()
            assert not told, "it did not wait for the standby at all"
            await eventually(partial(admin.fetchval, case.done), message="cancelled, and committed here:")
            connection.terminate()
        answers: dict[str, Any] = {}
        pids: list[int] = []

        async def again(what: str, case: Case, connection: Any) -> None:
            answers[what] = await (case.again or case.call)(DurableRepository(connection))

        async with anyio.create_task_group() as group:
            for what, case in all_cases.items():
                connection = await connect(case.login)
                before.append(connection)
                pids.append(pid_of(connection))
                group.start_soon(again, what, case, connection)

            async def all_wait_for_the_standby() -> bool:
                assert not answers, "it was told, and no standby has it"
                return bool(await admin.fetchval(WAITING, pids) == len(pids))

            await eventually(all_wait_for_the_standby)
            stream.mode = "pass"
        for what, case in all_cases.items():
            assert case.told(answers[what]), (what, answers[what])
        for connection in (*before, admin):
            connection.terminate()
    await anyio.to_thread.run_sync(pair.kill_primary)
    await anyio.to_thread.run_sync(pair.promote)
    admin = await asyncpg.connect(pair.admin_dsn(name, of_standby=True))
    for what, case in all_cases.items():
        assert await admin.fetchval(case.done), what
    admin.terminate()
