"""`max_pending` of a gateway: whose bound holds, who is refused, and how seldom the database is asked (D146)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any
from uuid import UUID

import pytest

from dispatch_core.dispatch_bounded import Bounded
from dispatch_core.errors import BacklogFullError, DatabaseUnavailableError, InvalidInputError
from dispatch_core.models import DispatchRequest, DispatchStatus
from gateway_sdk import backlogs
from gateway_sdk.backlogs import Backlogs
from gateway_sdk.health import GatewayCounters
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import PlayedRelay, open_client
from tests.support.protocol import QUEUE, REQUEST, Connection, connected

RELAY = "erp"


def requests(count: int, relay: str = RELAY) -> list[DispatchRequest]:
    return [DispatchRequest(relay, "Get") for _ in range(count)]


async def pending(admin: Connection, relay: str = RELAY) -> int:
    count: int = await admin.fetchval(f"select count(*) from {QUEUE} where relay_id = $1", relay)
    return count


def parted(answers: list[UUID | BaseException]) -> tuple[list[UUID], list[BacklogFullError]]:
    stored = [answer for answer in answers if isinstance(answer, UUID)]
    refused = [answer for answer in answers if isinstance(answer, BacklogFullError)]
    assert len(stored) + len(refused) == len(answers), answers
    return stored, refused


async def test_a_calls_own_bound_goes_before_the_tenants_and_that_before_the_setting(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn, max_pending=2) as client:
        acme, wide, free = (client.tenant("acme", max_pending=bound) for bound in (None, 4, 0))
        for _ in range(2):
            await acme.enqueue(RELAY, "Get")
        for _ in range(2):
            await wide.enqueue(RELAY, "Get")
        for refused, bound in (
            (acme.enqueue(RELAY, "Get"), 2),
            (acme.call(RELAY, "Get", timeout=60), 2),
            (acme.enqueue_many(requests(1)), 2),
            (acme.enqueue(RELAY, "Get", idempotency_key="k"), 2),
            (wide.enqueue(RELAY, "Get"), 4),
            (free.enqueue(RELAY, "Get", max_pending=1), 1),
        ):
            with pytest.raises(BacklogFullError) as caught:
                await refused
            assert caught.value.max_pending == bound
        await free.enqueue(RELAY, "Get")
        await acme.enqueue(RELAY, "Get", max_pending=0)
        await acme.enqueue(RELAY, "Get", max_pending=7)
        assert client.health().enqueued == 7
        assert client.health().refused == 6


@pytest.mark.parametrize("bound", [-1, 1.5, True, "9"])
async def test_a_bound_that_is_no_number_is_bad_input(database: TestDatabase, bound: Any) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        with pytest.raises(InvalidInputError):
            client.tenant("acme", max_pending=bound)
        for call in (
            acme.enqueue(RELAY, "Get", max_pending=bound),
            acme.enqueue_many(requests(1), max_pending=bound),
            acme.call(RELAY, "Get", max_pending=bound),
        ):
            with pytest.raises(InvalidInputError):
                await call


async def test_without_a_bound_every_statement_is_as_it_was(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_arguments: Any, **_more: Any) -> None:
        raise AssertionError("counted without being asked to")

    for counting in ("enqueue_bounded", "enqueue_keyed_bounded"):
        monkeypatch.setattr(f"dispatch_core.dispatch_asking.{counting}", never)
    async with open_client(database.gateway_dsn) as client, connected(database.gateway_dsn) as conn:
        acme = client.tenant("acme")
        await asyncio.gather(*(acme.enqueue(RELAY, "Get") for _ in range(30)))
        await acme.enqueue_many(requests(30))
        await acme.enqueue(RELAY, "Get", idempotency_key="k")
        await acme.enqueue(RELAY, "Get", conn=conn)
        await acme.enqueue_many(requests(30), conn=conn)
        assert not client.runtime.lanes.backlogs.is_used


async def test_callers_who_share_a_statement_are_each_refused_for_themselves(
    database: TestDatabase, admin: Connection
) -> None:
    async with open_client(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        calls = [
            *(acme.enqueue(RELAY, "Get", max_pending=5) for _ in range(20)),
            *(acme.enqueue("two", "Get", max_pending=30) for _ in range(20)),
            *(acme.enqueue("three", "Get") for _ in range(20)),
            *(acme.enqueue(RELAY, "Get", max_pending=8) for _ in range(20)),
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        stored, refused = parted(answers)
        assert client.health().enqueue_statements == 1
        assert [isinstance(answer, UUID) for answer in answers] == (
            [True] * 5 + [False] * 15 + [True] * 40 + [True] * 3 + [False] * 17
        )
        assert Counter(error.max_pending for error in refused) == {5: 15, 8: 17}
        assert {(error.pending, error.max_pending) for error in refused} == {(5, 5), (8, 8)}
        assert len({id(error) for error in refused}) == len(refused)
        rows = await admin.fetch(f"select job_id from {REQUEST}")
        assert {row["job_id"] for row in rows} == set(stored)
        assert (client.health().enqueued, client.health().refused) == (48, 32)


async def test_a_call_that_is_refused_ends_at_once_and_leaves_no_wait_behind(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn, max_pending=3) as client:
        acme = client.tenant("acme")
        waiting = [asyncio.create_task(acme.call(RELAY, "Get", timeout=60)) for _ in range(10)]
        done, left = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_EXCEPTION)
        del done
        refused = [task.exception() for task in waiting if task.done()]
        while len(refused) < 7:
            await asyncio.wait(left, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            refused = [task.exception() for task in waiting if task.done()]
        assert all(isinstance(error, BacklogFullError) for error in refused)
        assert client.health().waiting == 3
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_there_is_room_again_once_the_relay_has_taken_jobs(database: TestDatabase, worker: Connection) -> None:
    async with open_client(database.gateway_dsn, max_pending=3) as client:
        acme = client.tenant("acme")
        for _ in range(3):
            await acme.enqueue(RELAY, "Get")
        with pytest.raises(BacklogFullError) as refused:
            await acme.enqueue(RELAY, "Get")
        await PlayedRelay(worker, "acme", RELAY).work(2)

        async def stored() -> bool:
            try:
                await acme.enqueue(RELAY, "Get")
            except BacklogFullError:
                return False
            return True

        # What is remembered of a refusal is short-lived.
        for _ in range(2):
            await eventually(stored, refused.value.retry_after_seconds)
        with pytest.raises(BacklogFullError):
            await acme.enqueue(RELAY, "Get")


async def test_many_jobs_in_several_statements_are_refused_before_the_first_is_stored(
    database: TestDatabase, admin: Connection
) -> None:
    many = [*requests(1500), *requests(1200, "two")]
    async with open_client(database.gateway_dsn) as client, connected(database.gateway_dsn) as conn:
        acme = client.tenant("acme")
        await acme.enqueue_many(requests(600))
        size = f"select pg_relation_size('{REQUEST}')"
        before = await admin.fetchval(size)
        with pytest.raises(BacklogFullError) as refused:
            await acme.enqueue_many(many, max_pending=2000)
        assert (refused.value.pending, refused.value.jobs, refused.value.max_pending) == (600, 1500, 2000)
        assert await admin.fetchval(size) == before, "rows that were taken back have been there"
        assert len(await acme.enqueue_many(many, max_pending=2100)) == 2700

        # The second relay is met in the second statement, when the first one's jobs are stored: they are taken back.
        with pytest.raises(BacklogFullError) as refused:
            await acme.enqueue_many([*requests(1500, "three"), *requests(1200, "two")], max_pending=2000)
        assert refused.value.relay_id == "two"
        async with conn.transaction():
            first = await acme.enqueue("four", "Get", conn=conn)
            for bound in (2000, 2399):
                with pytest.raises(BacklogFullError):
                    await acme.enqueue_many(
                        [*requests(1500, "three"), *requests(1200, "two")], max_pending=bound, conn=conn
                    )
        assert await pending(admin, "three") == 0
        assert await admin.fetchval(f"select job_id from {QUEUE} where relay_id = 'four'") == first
        # All or none also where the caller has begun no transaction.
        with pytest.raises(BacklogFullError):
            await acme.enqueue_many([*requests(1500, "three"), *requests(1200, "two")], max_pending=2000, conn=conn)
        assert await pending(admin, "three") == 0


async def test_more_jobs_than_the_bound_in_one_call_are_bad_input_and_not_a_matter_of_waiting(
    database: TestDatabase, admin: Connection
) -> None:
    async with open_client(database.gateway_dsn, max_pending=10) as client:
        acme = client.tenant("acme")
        with pytest.raises(InvalidInputError, match="11 jobs for relay erp"):
            await acme.enqueue_many([*requests(10, "two"), *requests(11)])
        assert len(await acme.enqueue_many([*requests(10, "two"), *requests(10)])) == 20
        assert await pending(admin) == 10


async def test_a_repeated_key_is_answered_when_the_backlog_is_full_and_known_to_be(database: TestDatabase) -> None:
    async with open_client(database.gateway_dsn, max_pending=1) as client, connected(database.gateway_dsn) as conn:
        acme = client.tenant("acme")
        job_id = await acme.enqueue(RELAY, "Get", idempotency_key="k")
        for _ in range(3):
            with pytest.raises(BacklogFullError):
                await acme.enqueue(RELAY, "Get")
            assert await acme.enqueue(RELAY, "Get", idempotency_key="k") == job_id
        assert await acme.enqueue(RELAY, "Get", idempotency_key="k", conn=conn) == job_id
        with pytest.raises(BacklogFullError):
            await acme.enqueue(RELAY, "Get", idempotency_key="l", conn=conn)


async def test_in_the_callers_transaction_a_refusal_leaves_it_whole(database: TestDatabase, admin: Connection) -> None:
    async with open_client(database.gateway_dsn, max_pending=2) as client, connected(database.gateway_dsn) as conn:
        acme = client.tenant("acme")
        async with conn.transaction():
            stored = [await acme.enqueue(RELAY, "Get", conn=conn) for _ in range(2)]
            for call in (
                acme.enqueue(RELAY, "Get", conn=conn),
                acme.enqueue(RELAY, "Get", idempotency_key="k", conn=conn),
                acme.enqueue_many(requests(2), conn=conn),
            ):
                with pytest.raises(BacklogFullError):
                    await call
            stored.append(await acme.enqueue("two", "Get", conn=conn))
        assert {row["job_id"] for row in await admin.fetch(f"select job_id from {QUEUE}")} == set(stored)


async def test_gateways_that_fill_a_backlog_together_pass_the_bound_by_no_more_than_is_stated(
    database: TestDatabase, admin: Connection
) -> None:
    """A sixteenth of the room for each other process, and what is under way at the moment of a count."""
    bound, gateways, items = 320, 3, 10
    dsn = database.gateway_dsn

    async def fill(number: int) -> tuple[list[UUID], int]:
        async with open_client(dsn, max_pending=bound, enqueue_batch_items=items, pool_max_size=3) as client:
            acme = client.tenant("acme")
            stored: list[UUID] = []

            async def send() -> None:
                refused = 0
                while refused < 3:
                    try:
                        stored.append(await acme.enqueue(RELAY, "Get"))
                    except BacklogFullError as error:
                        refused += 1
                        await asyncio.sleep(min(error.retry_after_seconds, 0.12))

            await asyncio.gather(*(send() for _ in range(25 + number)))
            return stored, client.health().refused

    filled = await asyncio.gather(*(fill(number) for number in range(gateways)))
    stored = [job_id for part, _refused in filled for job_id in part]
    rows = await admin.fetch(f"select job_id from {QUEUE}")
    assert {row["job_id"] for row in rows} == set(stored), "what was answered is stored, what was refused is not"
    under_way = gateways * 2 * items
    assert bound <= len(rows) <= bound + (gateways - 1) * bound // 16 + under_way
    assert all(refused > 0 for _part, refused in filled)


# --- what is remembered ----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(backlogs, "time", clock)
    return clock


def send(
    kept: Backlogs, counted: int, bounds: list[int], *, seconds: float = 0.0
) -> list[bool | BacklogFullError] | None:
    """Play the statement of a lane; None where it did not count."""
    with kept.sending("acme", [RELAY] * len(bounds), bounds) as sending:
        if not sending.must_count:
            return None
        answers: list[bool | BacklogFullError] = []
        ahead = counted
        for bound in sending.bounds():
            if ahead >= bound:
                answers.append(
                    BacklogFullError(relay_id=RELAY, pending=ahead, max_pending=bound, retry_after_seconds=2)
                )
            else:
                answers.append(True)
                ahead += 1
        return sending.told(Bounded(answers, {RELAY: min(counted, max(sending.bounds()))}, seconds))


def test_a_count_is_used_for_a_sixteenth_of_the_room_and_for_a_second(clock: Clock) -> None:
    kept = Backlogs(GatewayCounters())
    assert not kept.is_used
    kept.check("acme", RELAY, 1000)
    assert send(kept, 0, [1000]) == [True]
    for _ in range(62):  # (1000 - 1) // 16
        assert send(kept, 0, [1000]) is None
    assert send(kept, 63, [1000] * 3) == [True] * 3
    assert send(kept, 66, [1000] * 20) is None
    assert send(kept, 86, [80]) is not None, "the bound of this one leaves no such room"
    clock.now += 1.01
    assert send(kept, 86, [1000]) == [True]
    assert send(kept, 87, [1000]) is None


def test_a_long_count_is_used_for_twenty_times_as_long(clock: Clock) -> None:
    kept = Backlogs(GatewayCounters())
    kept.check("acme", RELAY, 10**7)
    send(kept, 10**6, [10**7], seconds=0.4)
    clock.now += 7.9
    assert send(kept, 10**6, [10**7]) is None
    clock.now += 0.2
    assert send(kept, 10**6, [10**7]) == [True]

    # But a refusal no longer than for the time of a fifth of the bound, whatever counting has taken.
    clock.now += 1.1
    answers = send(kept, 10**7, [10**7], seconds=0.4)
    assert answers is not None
    assert isinstance(answers[0], BacklogFullError)
    clock.now += 3.9
    with pytest.raises(BacklogFullError):
        kept.check("acme", RELAY, 10**7)
    clock.now += 0.2
    kept.check("acme", RELAY, 10**7)


def test_a_refusal_is_repeated_without_asking_for_a_tenth_of_a_second_at_most(clock: Clock) -> None:
    counters = GatewayCounters()
    kept = Backlogs(counters)
    kept.check("acme", RELAY, 10)
    answers = send(kept, 10, [10, 10, 30])
    assert answers is not None
    assert [answer is True for answer in answers] == [False, False, True]
    for _ in range(50):
        with pytest.raises(BacklogFullError) as refused:
            kept.check("acme", RELAY, 10)
        assert (refused.value.tenant_id, refused.value.pending, refused.value.max_pending) == ("acme", 10, 10)
    kept.check("acme", RELAY, 11)
    kept.check("acme", "another", 10)
    kept.check("another", RELAY, 10)
    with pytest.raises(BacklogFullError):
        kept.check("acme", RELAY, 11, jobs=2)
    assert counters.refused == 2 + 50 + 2
    clock.now += 0.11
    kept.check("acme", RELAY, 10)
    assert send(kept, 9, [10]) == [True], "there is room, and so there was no more to refuse"
    kept.check("acme", RELAY, 10)


def test_what_is_under_way_takes_its_place_in_a_count_that_does_not_see_it(clock: Clock) -> None:
    kept = Backlogs(GatewayCounters())
    kept.check("acme", RELAY, 10)
    with kept.sending("acme", [RELAY] * 6, [10] * 6) as first:
        assert first.must_count
        answers = send(kept, 0, [10] * 6)
        assert answers is not None
        assert [answer is True for answer in answers] == [True] * 4 + [False] * 2
        last = answers[-1]
        assert isinstance(last, BacklogFullError)
        assert (last.pending, last.max_pending) == (10, 10), "in the caller's own numbers"
        # All of it, for another one, and not the value that would be no bound.
        with kept.sending("acme", [RELAY], [6]) as second:
            assert second.bounds() == [-1]
        assert first.told(Bounded([True] * 6, {RELAY: 0})) == [True] * 6
    assert send(kept, 10, [10]) != [True]


def test_a_statement_that_failed_is_under_way_no_more_and_a_backlog_that_nobody_asks_for_is_forgotten(
    clock: Clock,
) -> None:
    kept = Backlogs(GatewayCounters())
    kept.check("acme", RELAY, 10)
    with contextlib.suppress(DatabaseUnavailableError), kept.sending("acme", [RELAY] * 6, [10] * 6):
        clock.now += 100
        kept.drop_idle()
        assert kept.is_used
        raise DatabaseUnavailableError
    assert send(kept, 0, [10] * 10) == [True] * 10
    kept.drop_idle()
    assert not kept.is_used
    with kept.sending("acme", [RELAY], [10]) as sending:
        assert sending.must_count, "one that waited in a lane for so long is counted all the same"
        assert sending.told(Bounded([True], {RELAY: 0})) == [True]


async def test_a_bounded_job_comes_through_like_any_other(database: TestDatabase, worker: Connection) -> None:
    async with open_client(database.gateway_dsn, max_pending=10) as client:
        acme = client.tenant("acme")
        call = asyncio.create_task(acme.call(RELAY, "Get", body="x", timeout=30))
        relay = PlayedRelay(worker, "acme", RELAY)
        await eventually(relay.work)
        result = await call
        assert (result.status, result.response_body) == (DispatchStatus.SUCCEEDED, b"x")
