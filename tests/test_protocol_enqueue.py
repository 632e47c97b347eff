"""Enqueue: all or nothing, once, and with times that are times."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository, prepare
from dispatch_core.errors import InvalidDeadlineError, InvalidInputError
from dispatch_core.models import DispatchRequest
from tests.support.protocol import (
    QUEUE,
    RELAY,
    TENANT,
    Connection,
    claim,
    enqueue,
    heartbeat,
    settle,
    stored,
)


async def test_a_deadline_in_the_past_is_refused_and_nothing_of_the_batch_is_stored(
    admin: Connection, gateway: Connection
) -> None:
    now = await RelayDispatchRepository(gateway, TENANT).now()
    with pytest.raises(InvalidDeadlineError):
        await RelayDispatchRepository(gateway, TENANT).enqueue_many(
            [DispatchRequest(RELAY, "Get"), DispatchRequest(RELAY, "Get", expires_at=now)]
        )
    assert set((await stored(admin)).values()) == {0}


@pytest.mark.parametrize(
    ("ttl", "expires_at", "delay"),
    [
        ("0 s", None, None),
        ("-1 s", None, None),
        ("20000 days", None, None),
        (None, None, None),
        (None, "infinity", None),
        ("1 s", None, "-1 s"),
        ("1 s", None, "20000 days"),
    ],
)
async def test_times_that_are_no_times_are_refused_by_the_function_too(
    admin: Connection, gateway: Connection, ttl: str | None, expires_at: str | None, delay: str | None
) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await gateway.fetch(
            "select * from relay.enqueue($1, $2, $3, '{Get}', '{{}}'::text[], array[''::bytea], '{1}',"
            " array[$4::text::interval], array[$5::text::timestamptz], array[$6::text::interval])".replace(
                "'{{}}'::text[]", "array['{}']"
            ),
            TENANT, [uuid4()], [RELAY], ttl, expires_at, delay,
        )  # fmt: skip
    assert refused.value.sqlstate == "S2021"
    assert set((await stored(admin)).values()) == {0}


# A large batch is stored as if all of it were new, and looked through only when it is not.
@pytest.mark.parametrize("count", [3, 40])
async def test_an_enqueue_made_again_with_the_same_ids_stores_nothing_twice(
    admin: Connection, gateway: Connection, worker: Connection, count: int
) -> None:
    repository = RelayDispatchRepository(gateway, TENANT)
    rows = [prepare(DispatchRequest(RELAY, "Get")) for _ in range(count)]
    assert await repository.enqueue_rows(rows[:-1]) == [True] * (count - 1)
    assert await repository.enqueue_rows(rows) == [False] * (count - 1) + [True]
    assert (await stored(admin))[QUEUE] == count
    for job in await claim(worker, count):
        await settle(worker, job)
    assert await repository.enqueue_rows(rows) == [False] * count
    assert (await stored(admin))[QUEUE] == 0, "a job that has ended is not queued again by a late second try"


@pytest.mark.parametrize("count", [1, 40])
async def test_a_job_id_that_is_twice_in_one_call_is_refused(
    admin: Connection, gateway: Connection, count: int
) -> None:
    one, *others = (prepare(DispatchRequest(relay, "Get")) for relay in (RELAY, *["crm"] * count))
    with pytest.raises(InvalidInputError, match="twice"):
        await RelayDispatchRepository(gateway, TENANT).enqueue_rows([one, *others, one])
    assert set((await stored(admin)).values()) == {0}


@pytest.mark.case("C22")
async def test_a_ttl_of_a_day_is_24_hours_where_the_session_changes_its_clocks_within_it(
    admin: Connection, gateway: Connection, worker: Connection
) -> None:
    """Intervals know days, and a day in a time zone with summer time may have 23 hours."""
    # A zone in which it is about noon, and which goes forward at the next midnight, whenever the test runs. (Between
    # midnight and one o'clock the same time of the next day would be skipped, and that is no hour less.)
    west = await admin.fetchval("select extract(hour from now() at time zone 'UTC')::int - 12")
    day = await admin.fetchval(
        "select extract(doy from (now() at time zone 'UTC') - make_interval(hours => $1) + interval '1 day')::int - 1",
        west,
    )
    for connection in (gateway, worker):
        await connection.execute(f"set timezone = 'AAA{west}BBB{west - 1},{day}/0:0:1,{(day + 90) % 365}/0'")
    assert await gateway.fetchval("select now() + interval '1 day' < now() + interval '24 hours'")
    (job_id,) = await enqueue(gateway, ttl=timedelta(days=1), max_attempts=3)
    lifetime = await admin.fetchval(f"select expires_at - created_at from {QUEUE} where job_id = $1", job_id)
    assert lifetime == timedelta(hours=24)
    (delayed,) = await enqueue(gateway, ttl=timedelta(days=3), delay=timedelta(days=1))
    wait = await admin.fetchval(f"select available_at - created_at from {QUEUE} where job_id = $1", delayed)
    assert wait == timedelta(hours=24)
    (job,) = await claim(worker, lease=86400)
    lease = f"select lease_expires_at - claimed_at from {QUEUE} where job_id = $1"
    assert await admin.fetchval(lease, job_id) == timedelta(hours=24)
    await admin.execute(f"update {QUEUE} set lease_expires_at = now() where job_id = $1", job_id)
    await heartbeat(worker, [job], lease=86400)
    left = await admin.fetchval(f"select lease_expires_at - clock_timestamp() from {QUEUE} where job_id = $1", job_id)
    assert timedelta(hours=23, minutes=59) < left <= timedelta(hours=24)
