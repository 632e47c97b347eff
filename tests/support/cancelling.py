"""Cancel a task at each place where it waits, or where a task waits that it has made.

    for at in count():
        played = play(scenario, at)
        assert played.is_clean, played
        if not played.reached:
            break

`play` runs a coroutine function in an event loop of its own. When anything in that loop begins to wait for the
`at`-th time, counted from 0, the task of `scenario` is cancelled: while that wait goes on, or in the moment in which it
is over, or a turn of the loop after that. Then it has to end as cancelled, soon, without a task that is left behind
and without a word of the event loop's.
"""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

__all__ = ["Moment", "Played", "play"]

Moment = Literal["during", "at its end", "after it"]


@dataclass
class Played:
    """What came of one run."""

    reached: bool = False
    """Whether there was such a wait; else the scenario ended by itself."""
    where: str = ""
    """Who waited: functions and lines, from the outermost."""
    outcome: str = ""
    """`cancelled`, `returned`, `hangs` and where, or what was raised."""
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)
    """What event loop and warnings had to say, and the tasks that were left."""

    @property
    def is_clean(self) -> bool:
        """Whether it ended as it should have."""
        return self.outcome == ("cancelled" if self.reached else "returned") and not self.complaints


def play(
    scenario: Callable[[], Awaitable[None]],
    at: int,
    moment: Moment = "during",
    *,
    bound: float = 10.0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Played:
    """Run `scenario`, cancel it once, and tell what came of it. Call it where no event loop runs: in a thread, say.

    `bound`: seconds after which it hangs.
    """
    run = _Run(at, moment, bound)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(run.whole(scenario))
            gc.collect()
        gc.collect()
    run.played.complaints += [str(warning.message) for warning in warned]
    return run.played


class _Run:
    def __init__(self, at: int, moment: Moment, bound: float) -> None:
        self._left = at
        self._moment = moment
        self._bound = bound
        self._cancel: Callable[[], bool] = lambda: False
        self.played = Played()

    async def whole(self, scenario: Callable[[], Awaitable[None]]) -> None:
        loop, played = asyncio.get_running_loop(), self.played
        loop.set_exception_handler(lambda _, context: played.complaints.append(_said(context)))
        before = asyncio.all_tasks()
        loop.set_task_factory(self._make_task)
        began = loop.time()
        main: asyncio.Task[None] = loop.create_task(_awaited(scenario))
        self._cancel = main.cancel
        await asyncio.wait([main], timeout=self._bound)
        played.seconds = loop.time() - began
        loop.set_task_factory(None)
        if not main.done():
            played.outcome = f"hangs: {_where(main.get_coro())}"
            for task in asyncio.all_tasks() - before:
                task.cancel()
            await asyncio.wait([main], timeout=5)
        elif main.cancelled():
            played.outcome = "cancelled"
        else:
            error = main.exception()
            played.outcome = "returned" if error is None else repr(error)
        left = asyncio.all_tasks() - before - {main}
        if left:
            # What is about to end, does.
            await asyncio.wait(left, timeout=0.1)
        played.complaints += [f"left: {_where(task.get_coro())}" for task in left if not task.done()]

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(_drive(_Steps(coro, self._waits)), loop=loop, **options)
        # One that is cancelled before it has begun is never awaited, and is not to be said so of.
        task.add_done_callback(lambda _: coro.close())
        return task

    def _waits(self, what: Any, coro: Any) -> None:
        self._left -= 1
        if self._left != -1:
            return
        self.played.where = _where(coro)
        call_soon = asyncio.get_running_loop().call_soon
        if self._moment == "during" or not asyncio.isfuture(what):
            # When the task has taken note of what it waits for.
            call_soon(self._cut)
        elif self._moment == "at its end":
            what.add_done_callback(self._cut)
        else:
            what.add_done_callback(lambda _: call_soon(self._cut))

    def _cut(self, _: object = None) -> None:
        # Not where the task has ended with this wait.
        self.played.reached = self._cancel()


class _Steps:
    """Drives a coroutine, and tells of each wait."""

    def __init__(self, coro: Coroutine[Any, Any, Any], waits: Callable[[Any, Any], None]) -> None:
        self._coro = coro
        self._waits = waits

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = partial(self._coro.send, None)
        while True:
            try:
                what = step()
            except StopIteration as end:
                return end.value
            self._waits(what, self._coro)
            try:
                yield what
            except BaseException as error:  # noqa: BLE001  handed on
                step = partial(self._coro.throw, error)
            else:
                step = partial(self._coro.send, None)


async def _drive(steps: _Steps) -> Any:
    return await steps


async def _awaited(scenario: Callable[[], Awaitable[None]]) -> None:
    await scenario()


def _where(coro: Any) -> str:
    names: list[str] = []
    while coro is not None and len(names) < 40:
        code = getattr(coro, "cr_code", None) or getattr(coro, "gi_code", None)
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None)
        if code is not None:
            names.append(f"{code.co_qualname}:{frame and frame.f_lineno}")
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None)
    return " > ".join(names)


def _said(context: dict[str, Any]) -> str:
    return f"{context['message']}: {context.get('exception')!r}"
