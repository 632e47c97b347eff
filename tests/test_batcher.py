"""The batcher: one statement for many calls, and each call its own answer."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from dispatch_core.batcher import Batcher, is_row_fault
from dispatch_core.database import Database
from dispatch_core.errors import (
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    InvalidHeadersError,
    RelayDispatchError,
    SchemaMismatchError,
    TenancyDeniedError,
)
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually


class Flushes:
    """A flush that records its batches, waits for leave if asked to, and does what `outcome` says."""

    def __init__(self, outcome: Callable[[list[Any]], Sequence[Any]] | None = None, *, held: bool = False) -> None:
        self.batches: list[list[Any]] = []
        self.started = anyio.Event()
        self.leave = anyio.Event()
        self.most_at_once = 0
        self._at_once = 0
        self._outcome = outcome
        if not held:
            self.leave.set()

    async def __call__(self, items: list[Any]) -> Sequence[Any]:
        self.batches.append(list(items))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        self.started.set()
        try:
            await anyio.lowlevel.checkpoint()
            await self.leave.wait()
        finally:
            self._at_once -= 1
        return [item * 10 for item in items] if self._outcome is None else self._outcome(items)


@asynccontextmanager
async def running(batcher: Batcher[Any, Any]) -> AsyncIterator[Batcher[Any, Any]]:
    async with anyio.create_task_group() as group:
        await group.start(batcher.run)
        yield batcher
        batcher.close()


async def gather(*calls: Awaitable[Any]) -> list[Any]:
    """Return the results or errors of all calls, in order."""
    results: list[Any] = [None] * len(calls)

    async def one(place: int, call: Awaitable[Any]) -> None:
        try:
            results[place] = await call
        except Exception as error:  # noqa: BLE001  compared by the caller
            results[place] = error

    async with anyio.create_task_group() as group:
        for place, call in enumerate(calls):
            group.start_soon(one, place, call)
    return results


async def test_an_idle_batcher_keeps_nothing_of_what_it_has_sent() -> None:
    class Item:
        pass

    async def flush(items: list[Item]) -> Sequence[bool]:
        return [True] * len(items)

    async with running(Batcher(flush)) as batcher:
        items = [Item() for _ in range(3)]
        kept = [weakref.ref(item) for item in items]
        await gather(*(batcher.submit(item) for item in items))
        items.clear()
        await eventually(lambda: all(ref() is None for ref in kept))


async def test_calls_of_one_turn_of_the_loop_share_a_batch_and_get_their_own_results() -> None:
    flush = Flushes()
    async with running(Batcher(flush)) as batcher:
        assert await gather(*[batcher.submit(n) for n in range(100)]) == [n * 10 for n in range(100)]
    assert flush.batches == [list(range(100))]


async def test_a_lone_call_leaves_at_once() -> None:
    flush = Flushes()
    async with running(Batcher(flush)) as batcher:
        for n in range(3):
            assert await batcher.submit(n) == n * 10
    assert flush.batches == [[0], [1], [2]]


async def test_while_one_batch_is_under_way_the_next_one_gathers() -> None:
    flush = Flushes(held=True)
    async with running(Batcher(flush)) as batcher:
        first = batcher.submit(0)
        await flush.started.wait()
        rest = [batcher.submit(n) for n in range(1, 50)]
        await anyio.wait_all_tasks_blocked()
        assert flush.batches == [[0]]
        assert (batcher.in_flight, batcher.pending) == (1, 49)
        flush.leave.set()
        await gather(first, *rest)
    assert flush.batches == [[0], list(range(1, 50))]


async def test_no_more_batches_are_under_way_than_allowed() -> None:
    flush = Flushes(held=True)
    async with running(Batcher(flush, concurrency=2, max_items=3)) as batcher:
        calls = [batcher.submit(n) for n in range(20)]
        await eventually(lambda: flush.most_at_once == 2)
        await anyio.wait_all_tasks_blocked()
        assert flush.batches == [[0, 1, 2], [3, 4, 5]]
        flush.leave.set()
        await gather(*calls)
    assert flush.most_at_once == 2
    assert [n for batch in flush.batches for n in batch] == list(range(20))


async def test_a_batch_is_bounded_by_items_and_by_bytes() -> None:
    flush = Flushes()
    async with running(Batcher(flush, max_items=4, max_bytes=100)) as batcher:
        sizes = [10, 10, 10, 10, 10, 90, 20, 500, 1]
        await gather(*[batcher.submit(n, size) for n, size in enumerate(sizes)])
    # An item above the limit goes alone, and order is kept.
    assert flush.batches == [[0, 1, 2, 3], [4, 5], [6], [7], [8]]


async def test_call_backs_get_item_and_result_and_mix_with_futures() -> None:
    flush = Flushes()
    seen: list[tuple[int, Any]] = []
    async with running(Batcher(flush)) as batcher:
        for n in range(3):
            batcher.put_nowait(n, 1, lambda item, result: seen.append((item, result)))
        assert await batcher.submit(9) == 90
        assert seen == [(0, 0), (1, 10), (2, 20)]


async def test_draining_waits_for_what_waits_and_what_is_under_way() -> None:
    flush = Flushes(held=True)
    seen: list[Any] = []
    async with running(Batcher(flush, max_items=2)) as batcher:
        await batcher.drain()
        for n in range(5):
            batcher.put_nowait(n, 1, lambda item, result: seen.append(result))
        async with anyio.create_task_group() as group:
            drained = anyio.Event()

            async def drain() -> None:
                await batcher.drain()
                drained.set()

            group.start_soon(drain)
            await anyio.wait_all_tasks_blocked()
            assert not drained.is_set()
            flush.leave.set()
            await drained.wait()
        assert seen == [0, 10, 20, 30, 40]


async def test_closing_sends_what_waits_and_refuses_what_comes() -> None:
    flush = Flushes()
    async with anyio.create_task_group() as group:
        batcher: Batcher[int, int] = Batcher(flush)
        await group.start(batcher.run)
        call = batcher.submit(1)
        batcher.close()
        batcher.close()
        with pytest.raises(DatabaseUnavailableError):
            batcher.put_nowait(2, 1, lambda item, result: None)
        assert await call == 10
    assert flush.batches == [[1]]


async def test_items_given_before_it_runs_are_sent_when_it_does() -> None:
    batcher: Batcher[int, int] = Batcher(Flushes())
    call = batcher.submit(1)
    async with running(batcher):
        assert await call == 10


# --- cancellation ---


@pytest.mark.case("C29")
async def test_cancelling_one_call_that_waits_drops_it_and_no_other() -> None:
    flush = Flushes(held=True)
    async with running(Batcher(flush)) as batcher, anyio.create_task_group() as group:
        first = batcher.submit(0)
        await flush.started.wait()
        second = batcher.submit(1)
        with anyio.move_on_after(0) as scope:
            await batcher.submit(2, 5)
        assert scope.cancelled_caught
        third = batcher.submit(3)
        group.start_soon(gather, first)
        flush.leave.set()
        assert await gather(second, third) == [10, 30]
    assert flush.batches == [[0], [1, 3]]


async def test_cancelling_all_calls_that_wait_sends_nothing() -> None:
    flush = Flushes(held=True)
    async with running(Batcher(flush)) as batcher:
        first = batcher.submit(0)
        await flush.started.wait()
        with anyio.move_on_after(0):
            await batcher.submit(1)
        flush.leave.set()
        await first
        with anyio.fail_after(5):
            await batcher.drain()
    assert flush.batches == [[0]]


@pytest.mark.case("C29")
async def test_cancelling_a_call_that_is_under_way_leaves_the_others_their_results() -> None:
    flush = Flushes(held=True)
    async with running(Batcher(flush)) as batcher:
        async with anyio.create_task_group() as group:
            cancelled = anyio.CancelScope()

            async def one() -> None:
                with cancelled:
                    await batcher.submit(0)

            group.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            assert flush.batches == [[0]]
            cancelled.cancel()
        other = batcher.submit(1)
        flush.leave.set()
        assert await other == 10


@pytest.mark.case("C29")
async def test_when_it_is_cancelled_no_call_is_left_waiting() -> None:
    flush = Flushes(held=True)
    batcher: Batcher[int, int] = Batcher(flush, max_items=1)
    seen: list[Any] = []
    async with anyio.create_task_group() as group:
        await group.start(batcher.run)
        under_way, waiting = batcher.submit(0), batcher.submit(1)
        batcher.put_nowait(2, 1, lambda item, result: seen.append((item, result)))
        await flush.started.wait()
        group.cancel_scope.cancel()
    results = await gather(under_way, waiting)
    assert [type(result) for result in results] == [ConnectionLostError, DatabaseUnavailableError]
    assert "unknown" in str(results[0])
    assert "before it was sent" in str(results[1])
    assert [(item, type(result)) for item, result in seen] == [(2, DatabaseUnavailableError)]
    with pytest.raises(DatabaseUnavailableError):
        await batcher.submit(3)


# --- failures ---


def refusing(bad: set[int], error: Callable[[], Exception]) -> Callable[[list[int]], list[int]]:
    def outcome(items: list[int]) -> list[int]:
        if bad & set(items):
            raise error()
        return [item * 10 for item in items]

    return outcome


@pytest.mark.parametrize(
    "error",
    [
        lambda: DatabaseError("check", sqlstate="23514"),
        lambda: DatabaseError("encoding", sqlstate="22021"),
        InvalidHeadersError,
        TenancyDeniedError,
    ],
)
async def test_a_bad_row_hurts_only_itself(error: Callable[[], Exception]) -> None:
    flush = Flushes(refusing({3, 7}, error))
    async with running(Batcher(flush)) as batcher:
        results = await gather(*[batcher.submit(n) for n in range(16)])
    assert [n for n, result in enumerate(results) if isinstance(result, Exception)] == [3, 7]
    assert results[:3] == [0, 10, 20]
    assert len(flush.batches) < 20


@pytest.mark.parametrize("error", [lambda: DatabaseError("bug", sqlstate="XX000"), SchemaMismatchError])
async def test_an_error_of_the_whole_batch_is_everybodys_and_is_not_asked_for_again(
    error: Callable[[], Exception],
) -> None:
    flush = Flushes(refusing({3}, error))
    async with running(Batcher(flush, idempotent=True, retries=5)) as batcher:
        results = await gather(*[batcher.submit(n) for n in range(8)])
        assert await batcher.submit(1) == 10  # it lives on
    assert [type(result) for result in results] == [type(error())] * 8
    assert len(flush.batches) == 2


async def test_a_narrower_rule_of_what_to_halve_is_obeyed() -> None:
    flush = Flushes(refusing({0}, TenancyDeniedError))
    async with running(Batcher(flush, splits=lambda error: False)) as batcher:
        await gather(*[batcher.submit(n) for n in range(8)])
    assert len(flush.batches) == 1


async def test_every_call_gets_an_error_object_of_its_own() -> None:
    cause = OSError("broken")

    def outcome(items: list[int]) -> list[int]:
        raise ConnectionLostError("gone", sqlstate="08006") from cause

    async with running(Batcher(Flushes(outcome))) as batcher:
        first, second = await gather(batcher.submit(1), batcher.submit(2))
    assert first is not second
    assert (str(first), first.sqlstate, first.__cause__) == ("gone", "08006", cause)


async def test_an_error_that_nobody_waits_for_any_more_is_no_complaint_of_the_event_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batcher: Batcher[int, int] = Batcher(Flushes(refusing({1}, ConnectionLostError)))
    async with running(batcher):
        batcher.submit(1)
        await batcher.drain()
    gc.collect()
    assert caplog.records == []


@pytest.mark.parametrize("seed", range(8))
async def test_every_item_is_answered_exactly_once_whatever_happens_around_it(seed: int) -> None:
    """Cancellations, bad rows, lost connections, odd sizes, several workers, call-backs among futures."""
    rng = random.Random(seed)
    applied: dict[int, int] = {}
    answers: dict[int, int] = {}
    cancelled: set[int] = set()

    async def flush(items: list[int]) -> list[int | Exception]:
        await anyio.sleep(rng.choice([0, 0, 0.001]))
        if rng.random() < 0.1:
            raise ConnectionLostError
        if any(item % 50 == 7 for item in items):
            raise DatabaseError(sqlstate="23514")
        for item in items:
            applied[item] = applied.get(item, 0) + 1
        return [InvalidHeadersError() if item % 50 == 8 else item for item in items]

    def check(item: int, result: int | Exception) -> None:
        answers[item] = answers.get(item, 0) + 1
        if item % 50 == 7:
            assert isinstance(result, DatabaseError)
        elif item % 50 == 8:
            assert isinstance(result, InvalidHeadersError)
        else:
            assert result == item

    batcher: Batcher[int, int] = Batcher(
        flush, max_items=rng.choice([3, 40]), max_bytes=100, concurrency=rng.choice([1, 2, 5]),
        idempotent=True, retries=None, backoff_base=0.0001, backoff_cap=0.001,
    )  # fmt: skip

    async def call(item: int) -> None:
        await anyio.sleep(rng.random() * 0.02)
        if item % 3 == 0:
            batcher.put_nowait(item, rng.randint(0, 120), check)
            return
        with anyio.move_on_after(rng.choice([0, 0.003, 0.01, 60])) as scope:
            try:
                check(item, await batcher.submit(item, rng.randint(0, 120)))
            except RelayDispatchError as error:
                check(item, error)
        if scope.cancelled_caught:
            cancelled.add(item)

    async with running(batcher):
        async with anyio.create_task_group() as group:
            for item in range(600):
                group.start_soon(call, item)
        await batcher.drain()
    assert (batcher.pending, batcher.in_flight) == (0, 0)
    assert set(answers) | cancelled == set(range(600))
    assert not set(answers) & cancelled
    assert set(answers.values()) == {1}
    assert {item for item in answers if item % 50 != 7} <= set(applied)
    assert set(applied.values()) == {1}


async def test_errors_of_single_rows_reach_their_callers() -> None:
    def outcome(items: list[int]) -> list[int | Exception]:
        return [InvalidHeadersError(str(item)) if item % 2 else item for item in items]

    seen: list[Any] = []
    async with running(Batcher(Flushes(outcome))) as batcher:
        batcher.put_nowait(5, 1, lambda item, result: seen.append(result))
        results = await gather(*[batcher.submit(n) for n in range(4)])
    assert [str(result) for result in results] == ["0", "1", "2", "3"]
    assert [isinstance(result, InvalidHeadersError) for result in [*results, *seen]] == [False, True, False, True, True]


class Failing:
    """Fail the first n times."""

    def __init__(self, times: int, error: type[RelayDispatchError]) -> None:
        self.left = times
        self.error = error

    def __call__(self, items: list[int]) -> list[int]:
        if self.left > 0:
            self.left -= 1
            raise self.error
        return items


@pytest.mark.parametrize("error", [DatabaseUnavailableError, ConnectionLostError, DatabaseBusyError])
async def test_an_idempotent_batch_is_sent_again_whole_until_it_passes(error: type[RelayDispatchError]) -> None:
    flush = Flushes(Failing(3, error))
    async with running(Batcher(flush, idempotent=True, retries=3, backoff_base=0.001)) as batcher:
        assert await gather(batcher.submit(1), batcher.submit(2)) == [1, 2]
    assert flush.batches == [[1, 2]] * 4


async def test_after_its_retries_the_error_is_the_callers() -> None:
    flush = Flushes(Failing(100, ConnectionLostError))
    async with running(Batcher(flush, idempotent=True, retries=2, backoff_base=0.001)) as batcher:
        (result,) = await gather(batcher.submit(1))
    assert isinstance(result, ConnectionLostError)
    assert len(flush.batches) == 3


async def test_without_idempotence_only_a_batch_that_had_no_effect_is_sent_again() -> None:
    lost, busy = Flushes(Failing(1, ConnectionLostError)), Flushes(Failing(1, DatabaseBusyError))
    async with running(Batcher(lost, retries=5)) as batcher:
        (result,) = await gather(batcher.submit(1))
        assert isinstance(result, ConnectionLostError)
    async with running(Batcher(busy, retries=5, backoff_base=0.001)) as batcher:
        assert await batcher.submit(1) == 1
    assert (len(lost.batches), len(busy.batches)) == (1, 2)


async def test_retries_without_end_last_until_it_is_cancelled() -> None:
    flush = Flushes(Failing(10**9, ConnectionLostError))
    batcher: Batcher[int, int] = Batcher(flush, idempotent=True, retries=None, backoff_base=0.0001, backoff_cap=0.001)
    async with anyio.create_task_group() as group:
        await group.start(batcher.run)
        call = batcher.submit(1)
        await eventually(lambda: len(flush.batches) > 20)
        group.cancel_scope.cancel()
    (result,) = await gather(call)
    assert isinstance(result, DatabaseUnavailableError)


async def test_a_fault_that_nobody_foresees_reaches_the_callers_and_the_owner() -> None:
    def outcome(items: list[int]) -> list[int]:
        raise KeyError("bug")

    batcher: Batcher[int, int] = Batcher(Flushes(outcome))
    call = batcher.submit(1)
    with pytest.raises(KeyError):
        await batcher.run()
    assert isinstance((await gather(call))[0], KeyError)


async def test_a_flush_that_answers_too_few_is_a_fault_and_nobody_waits_for_ever() -> None:
    batcher: Batcher[int, int] = Batcher(Flushes(lambda items: items[1:]))
    calls = [batcher.submit(1), batcher.submit(2)]
    with pytest.raises(RuntimeError, match="2 items gave 1 results"):
        await batcher.run()
    assert [type(result) for result in await gather(*calls)] == [RuntimeError] * 2


async def test_a_call_back_that_raises_keeps_no_answer_from_the_others_and_reaches_the_owner() -> None:
    batcher: Batcher[int, int] = Batcher(Flushes())
    seen: list[Any] = []

    def broken(item: int, result: object) -> None:
        raise ZeroDivisionError

    batcher.put_nowait(1, 1, broken)
    batcher.put_nowait(2, 1, lambda item, result: seen.append(result))
    with pytest.raises(ZeroDivisionError):
        await batcher.run()
    assert seen == [20]


def test_only_rows_can_be_to_blame_for_data_and_constraint_errors() -> None:
    assert is_row_fault(DatabaseError(sqlstate="22021"))
    assert is_row_fault(DatabaseError(sqlstate="23505"))
    assert is_row_fault(InvalidHeadersError())
    assert not is_row_fault(DatabaseError(sqlstate="42501"))
    assert not is_row_fault(DatabaseError())
    assert not is_row_fault(ConnectionLostError(sqlstate="08006"))
    assert not is_row_fault(SchemaMismatchError())


async def test_rows_that_postgresql_refuses_are_found_among_good_ones(bare_database: TestDatabase) -> None:
    async with Database(bare_database.admin_dsn) as database:
        await database.execute("create table t (n int primary key check (n <> 13))")

        async def insert(items: list[int]) -> list[int | Exception]:
            rows = await database.execute("insert into t select unnest($1::int[]) returning n", items)
            return [row["n"] for row in rows]

        async with running(Batcher(insert, concurrency=2, max_items=40)) as batcher:
            results = await gather(*[batcher.submit(n) for n in [*range(100), 50]])
        stored = [row["n"] for row in await database.execute("select n from t order by n")]
    assert stored == [n for n in range(100) if n != 13]
    failed = [n for n, result in zip([*range(100), 50], results, strict=True) if isinstance(result, Exception)]
    # One of the twins is refused, whichever came second.
    assert failed == [13, 50]
    assert {result.sqlstate for result in results if isinstance(result, DatabaseError)} == {"23514", "23505"}


async def test_an_item_that_comes_in_the_moment_of_the_cancellation_makes_no_noise() -> None:
    async def flush(items: list[int]) -> list[int]:
        return items

    batcher: Batcher[int, int] = Batcher(flush)
    async with anyio.create_task_group() as group:
        await group.start(batcher.run)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
        # Its workers' futures are cancelled by now, and they themselves have not run yet.
        batcher.put_nowait(1, 1, lambda item, result: None)
