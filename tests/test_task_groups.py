"""A cancellation of the caller's is never taken for one of a task group's (D145)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from dispatch_core.task_groups import TaskGroup
from tests.support.cancelling import Moment, play


async def _with_a_scope_of_its_own() -> None:
    """One that is cancelled, and ends while the group around it is cancelled too."""
    with anyio.CancelScope() as own:
        try:
            own.cancel()
            await anyio.sleep(60)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()


async def _that_closes_by_itself(*, task_status: anyio.abc.TaskStatus[None]) -> None:
    async with TaskGroup() as inner:
        inner.start_soon(_with_a_scope_of_its_own)
        task_status.started()
        try:
            await anyio.sleep(60)
        finally:
            inner.cancel_scope.cancel()


async def _closing() -> None:
    async with TaskGroup() as group:
        await group.start(_that_closes_by_itself)
        group.start_soon(_with_a_scope_of_its_own)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


async def _in_a_scope_of_the_callers() -> None:
    with anyio.CancelScope() as theirs:
        async with TaskGroup() as group:
            await group.start(_that_closes_by_itself)
            theirs.cancel()


@pytest.mark.parametrize("moment", ["during", "at its end", "after it"])
@pytest.mark.parametrize("scenario", [_closing, _in_a_scope_of_the_callers])
async def test_a_cancellation_that_comes_while_a_group_is_cancelled_ends_the_caller(
    scenario: Callable[[], Awaitable[None]], moment: Moment
) -> None:
    # What is there already is not looked through for each run.
    gc.collect()
    gc.freeze()
    try:
        for at in range(100):
            played = await anyio.to_thread.run_sync(play, scenario, at, moment)
            assert played.is_clean, played
            if not played.reached:
                break
    finally:
        gc.unfreeze()
    assert at > 5


async def test_a_group_counts_nothing_of_its_childrens_as_asked_of_the_caller() -> None:
    async def cancelled() -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await anyio.sleep(60)
        except asyncio.CancelledError:
            await _closing()
        return task.cancelling()

    assert await asyncio.ensure_future(cancelled()) == 1


async def test_an_error_of_a_child_is_raised_as_a_group_and_a_result_of_start_returned() -> None:
    async def fails() -> None:
        raise ValueError

    async def begins(value: int, *, task_status: anyio.abc.TaskStatus[int]) -> None:
        task_status.started(value + 1)
        await anyio.sleep(60)

    async def scenario() -> None:
        async with TaskGroup() as group:
            assert await group.start(begins, 1) == 2
            group.start_soon(fails)

    with pytest.raises(BaseExceptionGroup) as caught:
        await scenario()
    assert [type(error) for error in caught.value.exceptions] == [ValueError]


async def test_what_ends_before_it_has_begun_ends_the_start_of_a_cancelled_group() -> None:
    async def never(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        await anyio.sleep(60)

    async with TaskGroup() as group:
        group.cancel_scope.cancel()
        await group.start(never)
        raise AssertionError
    assert group.cancel_scope.cancelled_caught
