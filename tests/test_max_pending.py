"""The bound on what waits for a relay, at the floor of SQL: what is refused, and what is left of it (D146)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatch_core.dispatch import RelayDispatchRepository, prepare
from dispatch_core.errors import BacklogFullError, IdempotencyConflictError, InvalidInputError, TenancyDeniedError
from dispatch_core.models import Completion, DispatchRequest, PutBack
from tests.support.databases import TestDatabase
from tests.support.protocol import (
    KEY,
    ME,
    QUEUE,
    RELAY,
    REQUEST,
    RESULT,
    TENANT,
    Connection,
    claim,
    connected,
    enqueue,
    logins,
)

# What an enqueue writes.
EVERYTHING = f"select (select count(*) from {REQUEST}), (select count(*) from {QUEUE}), (select count(*) from {KEY})"


def repository(conn: Connection, tenant: str = TENANT) -> RelayDispatchRepository:
    return RelayDispatchRepository(conn, tenant)


def requests(count: int, relay: str = RELAY, **request: Any) -> list[DispatchRequest]:
    return [DispatchRequest(relay, "Get", **request) for _ in range(count)]


async def stored(admin: Connection) -> tuple[int, ...]:
    (counts,) = await admin.fetch(EVERYTHING)
    return tuple(counts)


async def test_a_job_beyond_the_bound_is_refused_with_all_that_there_is_to_say(gateway: Connection) -> None:
    await enqueue(gateway, 5)
    with pytest.raises(BacklogFullError) as refused:
        await repository(gateway).enqueue(RELAY, "Get", max_pending=5)
    error = refused.value
    assert (error.code, error.retryable) == ("S2R-BACKLOG-FULL", True)
    assert (error.tenant_id, error.relay_id, error.pending, error.max_pending, error.jobs) == (TENANT, RELAY, 5, 5, 1)
    assert 0.1 <= error.retry_after_seconds <= 60
    assert RELAY in str(error)
    await repository(gateway).enqueue(RELAY, "Get", max_pending=6)
    await repository(gateway).enqueue("another", "Get", max_pending=1)


async def test_a_refusal_stores_nothing_and_leaves_no_trace(gateway: Connection, admin: Connection) -> None:
    await enqueue(gateway, 3)
    before = await stored(admin)
    rung: list[str] = []
    channel = await gateway.fetchval("select relay.channel('wake', $1, $2)", TENANT, RELAY)
    await admin.add_listener(channel, lambda *notice: rung.append(notice[3]))
    for call in (
        repository(gateway).enqueue(RELAY, "Get", max_pending=3, notify=True),
        repository(gateway).enqueue(RELAY, "Get", max_pending=2, idempotency_key="k", notify=True),
        repository(gateway).enqueue_many(requests(4), max_pending=3, notify=True),
        repository(gateway).enqueue_many([*requests(1, "another"), *requests(1)], max_pending=3, notify=True),
    ):
        async with gateway.transaction():
            with pytest.raises(BacklogFullError):
                await call
            # Not a row that was taken back, either: the transaction has written nothing, and its commit no flush.
            assert await gateway.fetchval("select pg_current_xact_id_if_assigned()") is None
    assert await stored(admin) == before
    await gateway.execute("select pg_notify($1, 'mine')", channel)
    await admin.fetchval("select 1")
    assert rung == ["mine"]


async def test_a_callers_transaction_goes_on_after_a_refusal_and_counts_what_it_has_stored_itself(
    gateway: Connection, admin: Connection
) -> None:
    async with gateway.transaction():
        first = await repository(gateway).enqueue(RELAY, "Get", max_pending=1)
        with pytest.raises(BacklogFullError):
            await repository(gateway).enqueue(RELAY, "Get", max_pending=1)
        second = await repository(gateway).enqueue("another", "Get", max_pending=1)
    assert {row["job_id"] for row in await admin.fetch(f"select job_id from {QUEUE}")} == {first, second}


async def test_what_is_pending_counts_and_nothing_else(gateway: Connection, worker: Connection) -> None:
    """Ready, delayed, put back; not claimed, not ended, not another relay's or tenant's."""

    async def is_full(bound: int) -> bool:
        told = await repository(gateway).enqueue_bounded_rows([prepare(requests(1)[0])], [bound - 1000])
        assert isinstance(told.answers[0], BacklogFullError)  # a bound below 0 never lets one pass
        rows = [prepare(request) for request in requests(2)]
        told = await repository(gateway).enqueue_bounded_rows(rows, [bound, -1])  # all or none: stores none
        return isinstance(told.answers[0], BacklogFullError)

    await enqueue(gateway, 9, relay="another")
    assert not await is_full(1)
    await enqueue(gateway, 2)
    await enqueue(gateway, 3, delay=300)
    assert (await is_full(5), await is_full(6)) == (True, False)
    (job, other) = await claim(worker, 2)
    assert (await is_full(3), await is_full(4)) == (True, False)
    await repository(worker).retry(RELAY, [PutBack(job.job_id, job.fence)], claimed_by=ME)
    # Its one attempt is used, so it has ended.
    assert (await is_full(3), await is_full(4)) == (True, False)
    await repository(worker).retry(RELAY, [PutBack(other.job_id, other.fence, give_back=True)], claimed_by=ME)
    assert (await is_full(4), await is_full(5)) == (True, False)
    await repository(gateway).mark_expired(other.job_id)
    assert (await is_full(3), await is_full(4)) == (True, False)


async def test_many_jobs_are_stored_all_or_none(gateway: Connection, admin: Connection) -> None:
    assert len(await repository(gateway).enqueue_many(requests(4), max_pending=10)) == 4
    with pytest.raises(BacklogFullError) as refused:
        await repository(gateway).enqueue_many([*requests(7), *requests(2, "another")], max_pending=10)
    assert (refused.value.pending, refused.value.jobs, refused.value.relay_id) == (4, 7, RELAY)
    assert await admin.fetchval(f"select count(*) from {QUEUE}") == 4
    assert len(await repository(gateway).enqueue_many([*requests(6), *requests(10, "another")], max_pending=10)) == 16


async def test_in_one_statement_each_job_has_its_own_bound_and_is_refused_for_itself(
    gateway: Connection, admin: Connection
) -> None:
    """I1: also where every column has values of its own, each job that passes keeps them."""
    await enqueue(gateway, 3)
    given = [
        (RELAY, 3),
        (RELAY, 5),
        ("two", 1),
        (RELAY, 0),
        ("two", 1),
        (RELAY, 5),
        (RELAY, 6),
        (RELAY, 6),
        ("three", 0),
    ]
    rows = [
        prepare(
            DispatchRequest(
                relay,
                f"Op{n}",
                headers={"n": str(n)},
                body=f"body {n}",
                ttl=100 + n,
                delay=n or None,
                max_attempts=n + 1,
            )
        )
        for n, (relay, _bound) in enumerate(given)
    ]
    told = await repository(gateway).enqueue_bounded_rows(rows, [bound for _relay, bound in given], whole=False)
    # Three are pending: 3 < 5 passes, the one without a bound passes and counts, 5 of 5 is full, 5 < 6 passes.
    passed = [answer is True for answer in told.answers]
    assert passed == [False, True, True, True, False, False, True, False, True]
    assert [answer.pending for answer in told.answers if isinstance(answer, BacklogFullError)] == [3, 1, 5, 6]
    assert told.counted == {RELAY: 3, "two": 0}
    kept = await admin.fetch(
        f"""select r.job_id, r.relay_id, r.operation, r.request_headers, convert_from(r.request_body, 'utf8') as body,
                   r.max_attempts, q.expires_at - q.created_at as ttl, q.available_at - q.created_at as delay
            from {REQUEST} r join {QUEUE} q using (tenant_id, job_id) where r.operation <> 'Get' order by q.seq"""
    )
    assert [tuple(row)[:6] for row in kept] == [
        (row.job_id, row.relay_id, f"Op{n}", f'{{"n": "{n}"}}', f"body {n}", n + 1)
        for n, row in enumerate(rows)
        if passed[n]
    ]
    assert [row["ttl"].total_seconds() for row in kept] == [100 + n for n in range(9) if passed[n]]
    assert [row["delay"].total_seconds() for row in kept] == [n for n in range(9) if passed[n]]


async def test_a_job_that_is_stored_already_is_never_refused(gateway: Connection, worker: Connection) -> None:
    """A call whose reply was lost is made again, and by then others may have filled the backlog."""
    row = prepare(requests(1)[0])
    assert (await repository(gateway).enqueue_bounded_rows([row], [1])).answers == [True]
    assert (await repository(gateway).enqueue_bounded_rows([row], [1])).answers == [False]
    rows = [row, *(prepare(request) for request in requests(2))]
    told = await repository(gateway).enqueue_bounded_rows(rows, [1] * 3, whole=False)
    assert told.answers[0] is False
    assert all(isinstance(answer, BacklogFullError) for answer in told.answers[1:])
    (job,) = await claim(worker)
    await repository(worker).complete_many(RELAY, [Completion(job.job_id, job.fence)], claimed_by=ME)
    await enqueue(gateway, 1)
    assert (await repository(gateway).enqueue_bounded_rows([row], [1])).answers == [False], "its result is there"


async def test_a_key_in_use_is_answered_with_its_job_however_many_wait(gateway: Connection, admin: Connection) -> None:
    row = prepare(DispatchRequest(RELAY, "Get", idempotency_key="k"))
    assert await repository(gateway).enqueue_keyed_row(row, max_pending=1) == (row.job_id, False)
    again = prepare(DispatchRequest(RELAY, "Get", idempotency_key="k"))
    assert await repository(gateway).enqueue_keyed_row(again, max_pending=1) == (row.job_id, True)
    with pytest.raises(IdempotencyConflictError):
        await repository(gateway).enqueue(RELAY, "Put", idempotency_key="k", max_pending=1)
    with pytest.raises(BacklogFullError):
        await repository(gateway).enqueue(RELAY, "Get", idempotency_key="l", max_pending=1)
    assert await admin.fetchval(f"select array_agg(idempotency_key) from {KEY}") == ["k"]


async def test_a_backlog_says_nothing_to_another_tenant_and_does_nothing_to_it(database: TestDatabase) -> None:
    """I4: A's relay of the same name is full, and B is neither refused nor told a number, nor has it a way to A's."""
    async with logins(database) as made:
        a, b = await made.open("gateway", "a"), await made.open("gateway", "b")
        await enqueue(a, 20, tenant="a")
        told = await repository(b, "b").enqueue_bounded_rows([prepare(requests(1)[0])], [1])
        assert (told.answers, told.counted) == ([True], {RELAY: 0})
        with pytest.raises(BacklogFullError) as refused:
            await repository(b, "b").enqueue(RELAY, "Get", max_pending=1)
        assert refused.value.pending == 1
        # Nothing of b's was ever completed, and what a's relay does is not b's pace.
        assert refused.value.retry_after_seconds == 10
        for bound in (1, 10**9):
            with pytest.raises(TenancyDeniedError):
                await repository(b, "a").enqueue(RELAY, "Get", max_pending=bound)
            with pytest.raises(TenancyDeniedError):
                await repository(b, "a").enqueue(RELAY, "Get", max_pending=bound, idempotency_key="k")


@pytest.mark.parametrize(
    ("ended", "bound", "seconds"),
    [
        ([], 10, 10.0),  # no completion counts as one in 10 s
        ([], 1000, 60.0),  # the most
        ([("succeeded", RELAY, 50)], 100, 2.0),  # 5/s, and a tenth of 100
        ([("failed", RELAY, 50)], 100, 2.0),  # the relay was at work on those too
        ([("succeeded", RELAY, 50)], 1, 0.2),  # one job at least
        ([("expired", RELAY, 400)], 10, 10.0),  # nobody did these
        ([("succeeded", "another", 400), ("succeeded", RELAY, 50)], 100, 2.0),  # nor this relay those
        ([("succeeded", RELAY, 400)], 10, 0.1),  # the least
    ],
)
async def test_when_to_come_again_is_the_time_for_a_tenth_of_the_bound_at_the_relays_pace(
    gateway: Connection, admin: Connection, ended: list[tuple[str, str, int]], bound: int, seconds: float
) -> None:
    for status, relay, count in ended:
        await admin.execute(
            f"""insert into {RESULT}
                  (tenant_id, job_id, relay_id, status, attempt, fence, created_at, completed_at, expires_at)
                select $1, gen_random_uuid(), $2, $3, 1, 1, now(), clock_timestamp(), now()
                from generate_series(1, $4::int)""",
            *(TENANT, relay, status, count),
        )
    await enqueue(gateway, bound)
    with pytest.raises(BacklogFullError) as refused:
        await repository(gateway).enqueue(RELAY, "Get", max_pending=bound)
    assert refused.value.retry_after_seconds == pytest.approx(seconds, rel=0.01)


async def test_the_pace_of_a_busy_tenant_is_that_of_its_last_500_ends(gateway: Connection, admin: Connection) -> None:
    began = time.monotonic()
    await admin.execute(
        f"""insert into {RESULT}
              (tenant_id, job_id, relay_id, status, attempt, fence, created_at, completed_at, expires_at)
            select $1, gen_random_uuid(), case when n % 2 = 0 then $2 else 'another' end, 'succeeded', 1, 1, now(),
                   clock_timestamp() - n * interval '4 ms', now()
            from generate_series(1, 5000) n""",
        *(TENANT, RELAY),
    )
    await enqueue(gateway, 1000)
    with pytest.raises(BacklogFullError) as refused:
        await repository(gateway).enqueue(RELAY, "Get", max_pending=1000)
    # 250 of them are this relay's, in 2 s and what has passed since; and a tenth of the bound is 100.
    passed = time.monotonic() - began
    assert 2 / 250 * 100 - 0.01 <= refused.value.retry_after_seconds <= (2 + passed) / 250 * 100


@pytest.mark.parametrize("bound", [-1, 2**62, 1.5, "10", True, None])
async def test_a_bound_is_a_whole_number(gateway: Connection, admin: Connection, bound: Any) -> None:
    before = await stored(admin)
    for call in (
        repository(gateway).enqueue(RELAY, "Get", max_pending=bound),
        repository(gateway).enqueue(RELAY, "Get", max_pending=bound, idempotency_key="k"),
        repository(gateway).enqueue_many(requests(2), max_pending=bound),
    ):
        with pytest.raises(InvalidInputError):
            await call
    assert await stored(admin) == before


async def test_whoever_calls_the_function_himself_is_told_the_same(gateway: Connection) -> None:
    call = (
        "select outcome, relay_id, pending, retry_after > '0 s' as later from relay.enqueue_bounded($1, $2::uuid[],"
        " $3::text[], '{Get}', null, null, null, '{1 min}', null, null, $4::bigint[], $5)"
    )

    async def ask(
        relays: list[str], bounds: Sequence[int | None], *, whole: bool = True, ids: Sequence[UUID] = ()
    ) -> list[Any]:
        rows = await gateway.fetch(call, TENANT, ids or [uuid4() for _ in range(3)], relays, bounds, whole)
        return [tuple(row) for row in rows]

    assert await ask([RELAY], [None]) == []
    full = ("full", RELAY, 4, True)
    assert await ask([RELAY], [4]) == [("counted", RELAY, 3, None), full, full]
    assert await ask([RELAY], [4], whole=False) == [("counted", RELAY, 3, None), full, full]
    ids = [uuid4() for _ in range(3)]
    assert await ask([RELAY], [7], ids=ids) == [("counted", RELAY, 4, None)]
    assert await ask([RELAY], [None], ids=ids) == [("known", None, None, None)] * 3
    for relays, bounds in (([RELAY, RELAY], [1]), ([RELAY], [1, 2]), ([], [1]), ([RELAY], [])):
        with pytest.raises(Exception, match="enqueue_bounded needs"):
            await ask(relays, bounds)
    assert await gateway.fetch(call, TENANT, [], [], [], True) == []


async def test_concurrent_transactions_pass_the_bound_by_no_more_than_they_are(
    database: TestDatabase, gateway: Connection, admin: Connection
) -> None:
    """What is not committed is not counted; what is committed is, at the next call."""
    await enqueue(gateway, 8)
    async with connected(database.gateway_dsn) as one, connected(database.gateway_dsn) as two:
        begun = [conn.transaction() for conn in (one, two)]
        for transaction in begun:
            await transaction.start()
        for conn in (one, two):
            assert len(await repository(conn).enqueue_many(requests(2), max_pending=10)) == 2
        await repository(gateway).enqueue(RELAY, "Get", max_pending=9)
        for transaction in begun:
            await transaction.commit()
    assert await admin.fetchval(f"select count(*) from {QUEUE}") == 13
    with pytest.raises(BacklogFullError):
        await repository(gateway).enqueue(RELAY, "Get", max_pending=13)
