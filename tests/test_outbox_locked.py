"""Events that somebody has locked: some verbs step over them and do the rest, others wait, and look again then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import anyio
import pytest

from dispatch_core.outbox_repository import OutboxRepository
from tests.support.activity import pid_of, wait_until_blocked
from tests.support.databases import TestDatabase
from tests.support.outbox import make_stale, states, take, tell, tidy, write
from tests.support.protocol import ME, OUTBOX, TENANT, Connection, connected

Step = Callable[[Connection, Connection], Awaitable[Any]]


async def _written(admin: Connection, gateway: Connection) -> None:
    await write(gateway, "locked", "free")


async def _claimed(admin: Connection, gateway: Connection) -> None:
    await write(gateway, "locked", "free")
    await take(gateway)


async def _stale(admin: Connection, gateway: Connection) -> None:
    await _claimed(admin, gateway)
    await make_stale(admin)


async def _parked(admin: Connection, gateway: Connection) -> None:
    await write(gateway, "locked", "free")
    await tell(gateway, await take(gateway), "park", error="no")


async def _lost_turns(admin: Connection, gateway: Connection) -> None:
    for payload in ("locked", "free"):
        await write(gateway, "first", payload, key=payload)
    await admin.execute(f"delete from {OUTBOX} where payload = '\"first\"'")


async def _unclaim(admin: Connection, gateway: Connection) -> None:
    assert await OutboxRepository(gateway).unclaim([TENANT], ME) == 1


async def _purge(admin: Connection, gateway: Connection) -> None:
    assert await OutboxRepository(gateway).purge(TENANT, timedelta(0)) == 1


async def _retry_parked(admin: Connection, gateway: Connection) -> None:
    assert await OutboxRepository(gateway).retry_parked(TENANT, timedelta(0)) == 1


CASES: dict[str, tuple[Step, Step, dict[str, str]]] = {
    "claim": (_written, lambda _, gateway: take(gateway), {"locked": "ready", "free": "claimed"}),
    "unclaim": (_claimed, _unclaim, {"locked": "claimed", "free": "ready"}),
    "take stale claims back": (_stale, lambda _, gateway: tidy(gateway), {"locked": "claimed", "free": "ready"}),
    "find lost turns": (_lost_turns, lambda _, gateway: tidy(gateway), {"locked": "waiting", "free": "ready"}),
    "purge": (_parked, _purge, {"locked": "parked"}),
    "retry what is parked": (_parked, _retry_parked, {"locked": "parked", "free": "ready"}),
}


@pytest.mark.parametrize("verb", CASES)
async def test_what_is_locked_is_stepped_over_and_the_rest_is_done(
    database: TestDatabase, admin: Connection, gateway: Connection, verb: str
) -> None:
    before, step, after = CASES[verb]
    await before(admin, gateway)
    # Who waits is not to wait for ever.
    await gateway.execute("set statement_timeout = '20s'")
    async with connected(database.admin_dsn) as locker, locker.transaction():
        await locker.execute(f"select from {OUTBOX} where payload = '\"locked\"' for update")
        await step(admin, gateway)
        assert await states(admin) == after


async def test_who_parks_an_event_waits_for_what_is_being_said_of_it_and_parks_it_then(
    database: TestDatabase, admin: Connection, gateway: Connection, operator: Connection
) -> None:
    (event_id,) = await write(gateway, "1")
    events = await take(gateway)
    said: list[set[UUID]] = []

    async def park() -> None:
        said.append(await OutboxRepository(operator).park(TENANT, [event_id], "no"))

    async with anyio.create_task_group() as group, gateway.transaction():
        assert await tell(gateway, events, "release") == [("applied", "ready")]
        group.start_soon(park)
        await wait_until_blocked(admin, pid_of(operator), by=pid_of(gateway))
    assert said == [{event_id}]
    assert await states(admin) == {"1": "parked"}


async def test_what_a_drainer_says_of_an_event_that_a_person_is_just_parking_is_stale(
    database: TestDatabase, admin: Connection, gateway: Connection, operator: Connection
) -> None:
    (event_id,) = await write(gateway, "1")
    events = await take(gateway)
    said: list[tuple[str, str]] = []

    async def deliver() -> None:
        said.extend(await tell(gateway, events))

    async with anyio.create_task_group() as group, operator.transaction():
        assert await OutboxRepository(operator).park(TENANT, [event_id], "no") == {event_id}
        group.start_soon(deliver)
        await wait_until_blocked(admin, pid_of(gateway), by=pid_of(operator))
    assert said == [("stale", "parked")]
    assert await states(admin) == {"1": "parked"}


async def test_of_two_who_retry_a_parked_event_the_one_that_waited_is_told_that_there_was_nothing_to_do(
    database: TestDatabase, admin: Connection, gateway: Connection, operator: Connection
) -> None:
    (event_id,) = await write(gateway, "1")
    await tell(gateway, await take(gateway), "park", error="no")
    said: list[set[UUID]] = []

    async def retry() -> None:
        said.append(await OutboxRepository(operator).retry(TENANT, [event_id]))

    async with anyio.create_task_group() as group, gateway.transaction():
        assert await OutboxRepository(gateway).retry(TENANT, [event_id]) == {event_id}
        group.start_soon(retry)
        await wait_until_blocked(admin, pid_of(operator), by=pid_of(gateway))
    assert said == [set()]
    assert await states(admin) == {"1": "ready"}
