"""The doorbell: rings after the commit, gathered, in no one's way."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from uuid import UUID

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from dispatch_core.database import Database
from dispatch_core.doorbell import Doorbell
from dispatch_core.errors import ConnectionLostError, DatabaseUnavailableError, TenancyDeniedError
from dispatch_core.ids import new_id
from dispatch_core.listener import Listener
from tests.support.databases import TestDatabase
from tests.support.eventually import HANGS, eventually
from tests.support.pooler import FakePooler

# Long enough that a test which waited for it would fail.
NEVER = 600.0

Admin: TypeAlias = "asyncpg.Connection[Any]"


class Recorder:
    """A transport that records what it carries, waits for leave if asked to, and fails as told."""

    def __init__(self, *, held: bool = False, error: Exception | None = None) -> None:
        self.statements: list[list[tuple[Any, ...]]] = []
        self.started = anyio.Event()
        self.leave = anyio.Event()
        self.error = error
        self.at_once = 0
        if not held:
            self.leave.set()

    async def execute(self, sql: str, *args: Any) -> None:
        assert self.at_once == 0, "two statements at a time"
        self.at_once += 1
        try:
            self.started.set()
            await self.leave.wait()
            if self.error is not None:
                raise self.error
            self.statements.append(list(zip(*args, strict=True)))
        finally:
            self.at_once -= 1

    @property
    def rings(self) -> list[tuple[Any, ...]]:
        return [ring for statement in self.statements for ring in statement]


@asynccontextmanager
async def running(doorbell: Doorbell) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        await group.start(doorbell.run)
        yield
        doorbell.close()


async def test_rings_are_gathered_while_one_statement_is_under_way_and_wake_ups_go_once() -> None:
    transport = Recorder(held=True)
    doorbell = Doorbell(transport)
    job = new_id()
    async with running(doorbell):
        doorbell.ring_relay("acme", "erp")
        await transport.started.wait()
        for _ in range(1000):
            doorbell.ring_relay("acme", "erp")
            doorbell.ring_relay("acme", "crm")
        doorbell.ring_results("acme", job)
        doorbell.ring_cancel("acme", "erp", job)
        assert doorbell.waiting == 4
        transport.leave.set()
    # The first one again: what was committed while it was under way may not have been seen by whom it woke.
    assert transport.statements == [
        [("wake", "acme", "erp", None)],
        [
            ("wake", "acme", "erp", None),
            ("wake", "acme", "crm", None),
            ("result", "acme", None, job.hex),
            ("cancel", "acme", "erp", job.hex),
        ],
    ]
    assert (doorbell.sent, doorbell.lost, doorbell.statements) == (5, 0, 2)


async def test_a_statement_carries_no_more_than_two_thousand() -> None:
    transport = Recorder()
    doorbell = Doorbell(transport)
    jobs = [new_id() for _ in range(4500)]
    for job in jobs:
        doorbell.ring_results("acme", job)
    async with running(doorbell):
        pass
    # One row, of up to 200 ids, and not one for each.
    assert [len(statement) for statement in transport.statements] == [10, 10, 3]
    assert [job for ring in transport.rings for job in ring[3].split(",")] == [job.hex for job in jobs]
    assert max(len(ring[3]) for ring in transport.rings) == 200 * 33 - 1
    assert (doorbell.sent, doorbell.statements) == (4500, 3)


async def test_where_one_transport_is_down_the_next_one_rings() -> None:
    down, up = Recorder(error=DatabaseUnavailableError()), Recorder()
    doorbell = Doorbell(down, up)
    async with running(doorbell):
        doorbell.ring_relay("acme", "erp")
    assert up.rings == [("wake", "acme", "erp", None)]
    assert (doorbell.sent, doorbell.lost) == (1, 0)


async def test_a_lost_ring_is_counted_and_later_ones_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dispatch_core.doorbell")
    transport = Recorder(error=ConnectionLostError())
    doorbell = Doorbell(transport)
    async with running(doorbell):
        doorbell.ring_relay("acme", "erp")
        await eventually(lambda: doorbell.lost == 1)
        transport.error = None
        doorbell.ring_relay("acme", "crm")
        await eventually(lambda: doorbell.sent == 1)
    assert transport.rings == [("wake", "acme", "crm", None)]
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


async def test_a_ring_that_is_refused_stops_no_other() -> None:
    class Refusing(Recorder):
        async def execute(self, sql: str, *args: Any) -> None:
            if "foreign" in args[1]:
                raise TenancyDeniedError
            await super().execute(sql, *args)

    transport = Refusing()
    doorbell = Doorbell(transport)
    for tenant in ("a", "b", "foreign", "c", "d"):
        doorbell.ring_relay(tenant, "erp")
    async with running(doorbell):
        pass
    assert [ring[1] for ring in transport.rings] == ["a", "b", "c", "d"]
    assert (doorbell.sent, doorbell.lost) == (4, 1)


@pytest.mark.parametrize("answered", range(4))
async def test_every_ring_of_a_refused_batch_is_counted_when_the_database_goes_away_in_the_middle(
    answered: int,
) -> None:
    class Going(Recorder):
        async def execute(self, sql: str, *args: Any) -> None:
            if len(args[1]) > 2:
                raise TenancyDeniedError
            if len(self.statements) >= answered:
                raise DatabaseUnavailableError("away")
            await super().execute(sql, *args)

    transport = Going()
    doorbell = Doorbell(transport)
    for tenant in ("a", "b", "c", "d", "e"):
        doorbell.ring_relay(tenant, "erp")
    doorbell.ring_many_results("a", [UUID(int=n) for n in range(300)])
    async with running(doorbell):
        pass
    assert doorbell.sent + doorbell.lost == 305
    assert doorbell.sent == sum(1 if ring[3] is None else (len(ring[3]) + 1) // 33 for ring in transport.rings)


async def test_while_the_database_is_away_what_waits_is_bounded() -> None:
    transport = Recorder(held=True)
    doorbell = Doorbell(transport)
    async with running(doorbell):
        for n in range(60_000):
            doorbell.ring_results("acme", UUID(int=n))
        assert doorbell.waiting == 50_000
        assert doorbell.lost == 10_000
        transport.leave.set()


@pytest.mark.case("C29")
async def test_when_it_is_cancelled_it_sends_what_waits_first() -> None:
    transport = Recorder(held=True)
    doorbell = Doorbell(transport)
    async with anyio.create_task_group() as group:
        await group.start(doorbell.run)
        doorbell.ring_relay("acme", "erp")
        await transport.started.wait()
        doorbell.ring_relay("acme", "crm")
        group.cancel_scope.cancel()
        transport.leave.set()
    assert sorted(ring[2] for ring in transport.rings) == ["crm", "erp"]
    doorbell.ring_relay("acme", "late")
    assert (doorbell.waiting, doorbell.lost) == (0, 1)


@pytest.mark.case("C29")
async def test_when_it_is_cancelled_it_does_not_wait_for_a_database_that_does_not_answer() -> None:
    transport = Recorder(held=True)
    doorbell = Doorbell(transport)
    with anyio.fail_after(HANGS):
        async with anyio.create_task_group() as group:
            await group.start(doorbell.run)
            doorbell.ring_relay("acme", "erp")
            group.cancel_scope.cancel()
    assert doorbell.waiting == 0


@pytest.mark.case("C29")
async def test_a_ring_that_is_under_way_at_the_end_is_waited_for_and_not_sent_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever is rung twice claims twice: 40 idle relays made 74 claims for one job of a client that was closed."""
    transport = Recorder(held=True)
    doorbell = Doorbell(transport)
    async with anyio.create_task_group() as group:
        await group.start(doorbell.run)
        doorbell.ring_relay("acme", "erp")
        await transport.started.wait()
        doorbell.ring_relay("acme", "crm")
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(doorbell.finish)
            await anyio.lowlevel.checkpoint()
            transport.leave.set()
        group.cancel_scope.cancel()
    assert [ring[2] for ring in transport.rings] == ["erp", "crm"]
    doorbell.ring_relay("acme", "late")
    assert (doorbell.waiting, doorbell.lost) == (0, 1)
    monkeypatch.setattr("dispatch_core.doorbell._FLUSH_SECONDS", NEVER)
    with anyio.fail_after(HANGS):
        await doorbell.finish()  # nobody runs


@pytest.mark.case("C29")
async def test_at_the_end_a_database_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Recorder(held=True)
    doorbell = Doorbell(transport)
    with anyio.fail_after(HANGS):
        async with anyio.create_task_group() as group:
            await group.start(doorbell.run)
            doorbell.ring_relay("acme", "erp")
            await transport.started.wait()
            monkeypatch.setattr("dispatch_core.doorbell._FLUSH_SECONDS", 0.05)
            await doorbell.finish()
            monkeypatch.setattr("dispatch_core.doorbell._FLUSH_SECONDS", NEVER)  # a second time
            group.cancel_scope.cancel()
    assert (doorbell.waiting, doorbell.lost) == (0, 1)


async def test_a_transports_fault_reaches_the_owner() -> None:
    doorbell = Doorbell(Recorder(error=KeyError("bug")))
    doorbell.ring_relay("acme", "erp")
    with pytest.raises(KeyError):
        await doorbell.run()


# --- against PostgreSQL ---


@asynccontextmanager
async def bell_and_ear(database: TestDatabase) -> AsyncIterator[tuple[Doorbell, Listener, Listener]]:
    """A worker's doorbell on the worker's listener, and a gateway's listener."""
    ear, own = Listener(database.gateway_dsn), Listener(database.worker_dsn)
    doorbell = Doorbell(own)
    async with anyio.create_task_group() as group:
        await group.start(ear.run)
        await group.start(own.run)
        await group.start(doorbell.run)
        yield doorbell, own, ear
        group.cancel_scope.cancel()


async def test_the_three_kinds_arrive_on_their_channels(database: TestDatabase, worker: Admin, gateway: Admin) -> None:
    wake = await worker.fetchval("select relay.channel('wake', 'acme', 'erp')")
    result = await gateway.fetchval("select relay.channel('result', 'acme')")
    heard: list[tuple[str, str]] = []
    job, other = new_id(), new_id()
    async with bell_and_ear(database) as (doorbell, own, ear):
        await own.subscribe(wake, lambda payload: heard.append(("wake", payload)))
        await ear.subscribe(result, lambda payload: heard.append(("result", payload)))
        doorbell.ring_relay("acme", "erp")
        doorbell.ring_relay("acme", "crm")
        doorbell.ring_results("acme", job)
        doorbell.ring_results("acme", other)
        doorbell.ring_results("else", job)
        doorbell.ring_cancel("acme", "erp", job)
        await eventually(lambda: len(heard) == 3)
        assert doorbell.statements == 1
    assert sorted(heard) == [("result", f"{job.hex},{other.hex}"), ("wake", ""), ("wake", job.hex)]


@pytest.mark.case("C08")
async def test_thousands_of_results_arrive_in_payloads_below_the_limit(database: TestDatabase, gateway: Admin) -> None:
    result = await gateway.fetchval("select relay.channel('result', 'acme')")
    heard: list[str] = []
    jobs = [new_id() for _ in range(3000)]
    async with bell_and_ear(database) as (doorbell, _, ear):
        await ear.subscribe(result, heard.append)
        for job in jobs:
            doorbell.ring_results("acme", job)
        await eventually(lambda: sum(payload.count(",") + 1 for payload in heard) == 3000)
    assert {job for payload in heard for job in payload.split(",")} == {job.hex for job in jobs}
    assert max(len(payload) for payload in heard) < 8000


@pytest.mark.case("C07")
async def test_ringing_does_not_wait_for_the_disk(durable_database: TestDatabase) -> None:
    admin = await asyncpg.connect(durable_database.admin_dsn)
    # PostgreSQL flushes for a NOTIFY only where the transaction has written something before. So this one writes.
    await admin.execute(
        """
        create table written (n int);
        create or replace function relay.ring(p_kinds text[], p_tenants text[], p_relays text[], p_payloads text[])
        returns bigint language sql security definer as $$ insert into public.written values (1) returning n $$;
        alter function relay.ring owner to current_user
        """
    )
    # Every flush of the WAL takes a tenth of a second from here on.
    for setting in ("commit_delay = 100000", "commit_siblings = 0"):
        await admin.execute(f"alter database {durable_database.name} set {setting}")
    await admin.close()
    admin = await asyncpg.connect(durable_database.admin_dsn)
    start = time.monotonic()
    await admin.execute("insert into written values (0)")
    assert time.monotonic() - start > 0.1
    async with bell_and_ear(durable_database) as (doorbell, own, _):
        start = time.monotonic()
        for n in range(100):
            doorbell.ring_relay("acme", str(n))
            await eventually(lambda n=n: doorbell.sent == n + 1, interval=0.001)  # type: ignore[misc]
        assert time.monotonic() - start < 100 * 0.1 / 2, "waited for a flush each time"
        # Nothing is left in the session: it is for the one transaction.
        assert (await own.execute("show synchronous_commit"))[0][0] == "on"
    assert await admin.fetchval("select count(*) from written") == 101
    await admin.close()


@pytest.mark.case("C05")
async def test_behind_a_transaction_pooler_rings_go_by_the_pool_and_others_hear_them(
    database: TestDatabase, worker: Admin
) -> None:
    wake = await worker.fetchval("select relay.channel('wake', 'acme', 'erp')")
    heard: list[str] = []
    async with FakePooler.before(database.gateway_dsn) as pooler:
        dsn = pooler.dsn(database.gateway_dsn)
        deaf = Listener(dsn, probe_timeout_seconds=0.3)
        ear = Listener(database.worker_dsn)
        async with Database(dsn, statement_cache_size=0) as pool, anyio.create_task_group() as group:
            doorbell = Doorbell(deaf, pool)
            for service in (deaf, ear, doorbell):
                await group.start(service.run)
            await ear.subscribe(wake, heard.append)
            assert deaf.state == "polling_only"
            for _ in range(5):
                doorbell.ring_relay("acme", "erp")
                count = len(heard)
                await eventually(lambda count=count: len(heard) > count)  # type: ignore[misc]
            group.cancel_scope.cancel()


async def test_a_ring_for_a_tenant_that_is_not_ones_own_is_refused_and_the_others_are_heard(
    database: TestDatabase, admin: Admin, worker: Admin
) -> None:
    from dispatch_core.migrate import grant

    login = f"narrow_{database.name[-8:]}"
    await admin.execute(f"create role {login} login password 'relay'")
    try:
        await grant(database.admin_dsn, login, role="worker", tenant="acme", relay="erp")
        wake = await worker.fetchval("select relay.channel('wake', 'acme', 'erp')")
        foreign = await worker.fetchval("select relay.channel('wake', 'else', 'erp')")
        heard: list[str] = []
        ear = Listener(database.worker_dsn)
        async with Database(database.dsn(login)) as pool, anyio.create_task_group() as group:
            doorbell = Doorbell(pool)
            await group.start(ear.run)
            await ear.subscribe(wake, lambda payload: heard.append("own"))
            await ear.subscribe(foreign, lambda payload: heard.append("foreign"))
            for tenant in ("else", "acme", "third"):
                doorbell.ring_relay(tenant, "erp")
            doorbell.close()
            await doorbell.run()
            await eventually(lambda: heard == ["own"])
            group.cancel_scope.cancel()
        assert (doorbell.sent, doorbell.lost) == (1, 2)
    finally:
        await admin.execute(f"drop owned by {login}; drop role {login}")
