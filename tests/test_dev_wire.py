"""The wire that holds still at a chosen statement: what kills processes at a step must itself be exact."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from dispatch_core.dev.wire import Wire
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.protocol import Connection, connected

_INSERT = "insert into public.told values ($1)"
_COUNT = "select count(*) from public.told"


@pytest.fixture(autouse=True)
async def _told(admin: Connection) -> None:
    await admin.execute("create table public.told (n int); grant all on public.told to public")


async def _sent(group: anyio.abc.TaskGroup, conn: Connection, *call: Any) -> list[asyncpg.PostgresError]:
    """Send a statement that will get no answer; its end is put in the list."""
    ended: list[asyncpg.PostgresError] = []

    async def send() -> None:
        try:
            await conn.execute(*call)
        except asyncpg.PostgresError as error:
            ended.append(error)

    group.start_soon(send)
    return ended


@pytest.mark.parametrize("side", ["call", "answer"])
@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "simple"])
async def test_the_statement_or_its_answer_is_held_until_the_client_is_gone(
    database: TestDatabase, admin: Connection, side: Any, prepared: bool
) -> None:
    call = (_INSERT, 2) if prepared else ("insert into public.told values (2)",)
    async with Wire.to(database.gateway_dsn) as wire, connected(wire.dsn(database.gateway_dsn)) as other:
        conn = await asyncpg.connect(wire.dsn(database.gateway_dsn))
        async with anyio.create_task_group() as group:
            await conn.execute(_INSERT, 1)
            gate = wire.hold("insert into public.told", side)
            ended = await _sent(group, conn, *call)
            await gate.reached.wait()
            await other.execute(_INSERT, 3)  # nobody else is held
            assert await admin.fetchval("select array_agg(n order by n) from public.told") == (
                [1, 3] if side == "call" else [1, 2, 3]
            )
            assert not ended
            conn.terminate()
        assert [error.sqlstate for error in ended] == ["08003"]

        async def gone() -> bool:
            query = "select count(*) from pg_stat_activity where datname = current_database() and usename <> 'postgres'"
            return await admin.fetchval(query) == 1

        await eventually(gone)
        assert await admin.fetchval(_COUNT) == (2 if side == "call" else 3)


async def test_statements_are_counted_over_all_connections_and_a_held_commit_is_none(
    database: TestDatabase, admin: Connection
) -> None:
    async with Wire.to(database.gateway_dsn) as wire:
        async with anyio.create_task_group() as group:
            dsn = wire.dsn(database.gateway_dsn)
            one, two = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
            gate = wire.hold("COMMIT", "call", 2)
            async with one.transaction():
                await one.execute(_INSERT, 1)
            transaction = two.transaction()
            await transaction.start()
            await two.execute(_INSERT, 2)
            await _sent(group, two, "COMMIT")
            await gate.reached.wait()
            one.terminate()
            two.terminate()
        assert await admin.fetchval(_COUNT) == 1


async def test_a_held_statement_can_be_let_go(database: TestDatabase, admin: Connection) -> None:
    async with Wire.to(database.gateway_dsn) as wire:
        async with connected(wire.dsn(database.gateway_dsn)) as conn, anyio.create_task_group() as group:
            gate = wire.hold("insert into public.told", "call")
            ended = await _sent(group, conn, _INSERT, 1)
            await gate.reached.wait()
            assert await admin.fetchval(_COUNT) == 0
            assert not gate.answered.is_set()
            gate.release()
            await gate.answered.wait()
        assert not ended
        assert await admin.fetchval(_COUNT) == 1
