"""Let concurrent calls share a statement, without making any of them wait for the others.

While one batch is on its way, the next one gathers; when a worker is idle, an item leaves at the next turn of the event
loop. There is no timer, so a lone call pays nothing, and the busier it gets the larger the batches are.

What becomes of a batch that fails:

* a fault of one row (SQLSTATE class 22, 23 or S2): it is halved until the bad row stands alone, and hurts only itself;
* no connection, or busy: the same items again after a pause, if the flush is idempotent, up to `retries` times;
* anything else that is foreseen: every item gets the error;
* a fault that nobody foresees: every item gets it, and then `run` raises it, so that its owner hears of it.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import anyio
from anyio.abc import TaskStatus

from dispatch_core.backoff import Backoff
from dispatch_core.errors import (
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseUnavailableError,
    IdempotencyConflictError,
    InvalidInputError,
    RelayDispatchError,
    TenancyError,
    UnknownJobError,
)

__all__ = ["Batcher", "is_row_fault"]

In = TypeVar("In")
Out = TypeVar("Out")

_Sink: TypeAlias = asyncio.Future[Out] | Callable[[In, Out | Exception], None]
"""Whoever is to have the answer for one item."""

_ROW_FAULTS: Final = (InvalidInputError, TenancyError, IdempotencyConflictError, UnknownJobError)


def is_row_fault(error: RelayDispatchError) -> bool:
    """Tell whether one row of a batch can be to blame for `error`, so that the others may pass without it."""
    if isinstance(error, DatabaseError):
        return (error.sqlstate or "")[:2] in ("22", "23")
    return isinstance(error, _ROW_FAULTS)


class Batcher(Generic[In, Out]):
    """Gather items and hand them to `flush`, which answers each with a result or an error of its own, in their order.

    Run `run` in the owner's task group. `submit` gives a future per item; `put_nowait` a call-back and no object per
    item, for the path where tens of thousands pass in a second.
    """

    __slots__ = (
        "_answered",
        "_backoff_base",
        "_backoff_cap",
        "_bytes",
        "_closed",
        "_concurrency",
        "_drained",
        "_flush",
        "_has_futures",
        "_idempotent",
        "_items",
        "_max_bytes",
        "_max_items",
        "_retries",
        "_sinks",
        "_sizes",
        "_sleepers",
        "_splits",
        "_waking",
        "flushes",
        "in_flight",
    )

    def __init__(
        self,
        flush: Callable[[list[In]], Awaitable[Sequence[Out | Exception]]],
        *,
        max_items: int = 500,
        max_bytes: int = 4 * 1024 * 1024,
        concurrency: int = 1,
        idempotent: bool = False,
        retries: int | None = 0,
        backoff_base: float = 0.05,
        backoff_cap: float = 2.0,
        splits: Callable[[RelayDispatchError], bool] = is_row_fault,
        answered: Callable[[list[In], Sequence[Out | Exception]], None] | None = None,
    ) -> None:
        """Take the bounds of one batch; an item above `max_bytes` goes alone.

        `concurrency`: batches under way at once. `retries`: how often a batch is sent again where the database is
        unavailable (only if `idempotent`) or busy (then it had no effect); None is without end. Backoff in seconds.
        `splits`: which errors halve the batch; narrow it where an error can only be everybody's. `answered`: called
        with each batch and its answers, in place of a call-back for each item; items then come by `put`.
        """
        self._flush = flush
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._concurrency = concurrency
        self._idempotent = idempotent
        self._retries = retries
        self._backoff_base = backoff_base
        self._backoff_cap = backoff_cap
        self._splits = splits
        self._answered = answered
        # Three lists side by side and no record per item: a whole batch is then taken by swapping the lists.
        self._items: list[In] = []
        self._sizes: list[int] = []
        self._sinks: list[_Sink[Out, In]] = []
        self._bytes = 0
        self._has_futures = False
        self._sleepers: list[asyncio.Future[None]] = []
        self._waking = False
        self._closed = False
        self._drained: anyio.Event | None = None
        self.in_flight = 0
        """How many items were handed to `flush` and have no answer yet."""
        self.flushes = 0
        """How many times `flush` was called."""

    @property
    def pending(self) -> int:
        """How many items wait for a batch."""
        return len(self._items)

    # --- giving ---

    def submit(self, item: In, size: int = 0) -> asyncio.Future[Out]:
        """Add `item` of `size` bytes and return its result's future.

        Cancelling the future (as cancelling a task that awaits it does) touches no other item. The item is dropped if
        it has not left yet; if it has, it takes effect, and only its result is dropped.

        Raises, when awaited: what the flush answered for this item, or the error of its batch.
        """
        future: asyncio.Future[Out] = asyncio.get_running_loop().create_future()
        self._has_futures = True
        self.put_nowait(item, size, future)
        return future

    def put_nowait(self, item: In, size: int, callback: _Sink[Out, In]) -> None:
        """Add `item` of `size` bytes; `callback(item, result or error)` is called once, from the event loop.

        Raises: DatabaseUnavailableError after `close`.
        """
        if self._closed:
            raise DatabaseUnavailableError("closed: nothing was sent")
        self._sinks.append(callback)
        self.put(item, size)

    def put(self, item: In, size: int) -> None:
        """Add `item` of `size` bytes; `answered` is called with it and the others of its batch.

        Raises: DatabaseUnavailableError after `close`.
        """
        if self._closed:
            raise DatabaseUnavailableError("closed: nothing was sent")
        self._items.append(item)
        self._sizes.append(size)
        self._bytes += size
        # One worker is woken for all that comes in this turn of the loop. When it takes its batch it wakes the next.
        if not self._waking and self._sleepers:
            self._waking = True
            self._wake(self._sleepers.pop())

    def close(self) -> None:
        """Accept no more items; `run` returns when the last of them is answered. Idempotent: yes."""
        self._closed = True
        self._wake_all()

    async def drain(self) -> None:
        """Wait until there is no item without an answer, those that come meanwhile included."""
        while self._items or self.in_flight:
            if self._drained is None:
                self._drained = anyio.Event()
            await self._drained.wait()

    # --- sending ---

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Send batches until `close`; when cancelled, answer what is left with DatabaseUnavailableError.

        Raises: a fault of `flush` or of a call-back that is not a `RelayDispatchError`.
        """
        try:
            async with anyio.create_task_group() as workers:
                for _ in range(self._concurrency):
                    workers.start_soon(self._work)
                task_status.started()
        except BaseExceptionGroup as group:
            # One fault is the rule, and the owner's task group wraps it again.
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        finally:
            self._closed = True
            if self._items:
                items, sinks = self._items, self._sinks
                self._items, self._sizes, self._sinks, self._bytes = [], [], [], 0
                self._answer_all(items, sinks, DatabaseUnavailableError("closed before it was sent"))
            self._report_drained()

    async def _work(self) -> None:
        while True:
            if not self._items:
                if self._closed:
                    return
                await self._sleep()
                continue
            # Not kept here: an idle worker would hold what it has sent last.
            await self._send_batch(*self._take())

    async def _send_batch(self, items: list[In], sinks: list[_Sink[Out, In]]) -> None:
        if not items:
            self._report_drained()
            return
        self.in_flight += len(items)
        try:
            try:
                results = await self._send(items)
            except Exception as error:
                self._answer_all(items, sinks, error)
                raise
            except BaseException:
                unknown = ConnectionLostError("stopped while it was under way; whether it took effect is unknown")
                self._answer_all(items, sinks, unknown)
                raise
            self._answer(items, sinks, results)
        finally:
            self.in_flight -= len(items)
            self._report_drained()

    async def _sleep(self) -> None:
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append(sleeper)
        try:
            await sleeper
        finally:
            # Woken, so the next item may wake the next worker; or cancelled, and then all workers are.
            self._waking = False
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    @staticmethod
    def _wake(sleeper: asyncio.Future[None]) -> None:
        # One that was cancelled in this turn of the loop stays listed until its worker has its turn.
        if not sleeper.done():
            sleeper.set_result(None)

    def _wake_all(self) -> None:
        while self._sleepers:
            self._wake(self._sleepers.pop())

    def _take(self) -> tuple[list[In], list[_Sink[Out, In]]]:
        if self._has_futures:
            self._drop_cancelled()
        items, sinks, sizes = self._items, self._sinks, self._sizes
        if len(items) <= self._max_items and self._bytes <= self._max_bytes:
            self._items, self._sizes, self._sinks, self._bytes = [], [], [], 0
            self._has_futures = False
            return items, sinks
        count, total = 0, 0
        for size in sizes[: self._max_items]:
            if count and total + size > self._max_bytes:
                break
            count += 1
            total += size
        batch = items[:count], sinks[:count]
        del items[:count], sinks[:count], sizes[:count]
        self._bytes -= total
        if self._items and self._sleepers and not self._waking:
            self._waking = True
            self._wake(self._sleepers.pop())
        return batch

    def _drop_cancelled(self) -> None:
        sinks = self._sinks
        if not any(sink.cancelled() for sink in sinks if isinstance(sink, asyncio.Future)):
            return
        kept = [n for n, sink in enumerate(sinks) if not (isinstance(sink, asyncio.Future) and sink.cancelled())]
        self._items = [self._items[n] for n in kept]
        self._sizes = [self._sizes[n] for n in kept]
        self._sinks = [sinks[n] for n in kept]
        self._bytes = sum(self._sizes)

    async def _send(self, items: list[In]) -> Sequence[Out | Exception]:
        backoff = Backoff(self._backoff_base, self._backoff_cap)
        while True:
            try:
                self.flushes += 1
                results = await self._flush(items)
            except RelayDispatchError as error:
                if self._splits(error):
                    if len(items) == 1:
                        return [error]
                    middle = len(items) // 2
                    return [*await self._send(items[:middle]), *await self._send(items[middle:])]
                if not self._may_repeat(error, backoff.attempt):
                    return [error] * len(items)
            else:
                if len(results) != len(items):
                    raise RuntimeError(f"the flush of {len(items)} items gave {len(results)} results")
                return results
            await anyio.sleep(backoff.next())

    def _may_repeat(self, error: RelayDispatchError, repeated: int) -> bool:
        if self._retries is not None and repeated >= self._retries:
            return False
        return isinstance(error, DatabaseBusyError) or (
            self._idempotent and isinstance(error, DatabaseUnavailableError)
        )

    # --- answering ---

    def _answer_all(
        self,
        items: list[In],
        sinks: list[_Sink[Out, In]],
        error: Exception,
    ) -> None:
        self._answer(items, sinks, [error] * len(items))

    def _answer(
        self,
        items: list[In],
        sinks: list[_Sink[Out, In]],
        results: Sequence[Out | Exception],
    ) -> None:
        if self._answered is not None:
            self._answered(items, results)
            return
        fault: Exception | None = None
        for item, sink, result in zip(items, sinks, results, strict=True):
            if isinstance(sink, asyncio.Future):
                if sink.done():
                    continue
                if isinstance(result, Exception):
                    sink.set_exception(_own_copy(result))
                    # Marks it as seen. A caller that is cancelled just now will not look, and is not to be told off.
                    sink.exception()
                else:
                    sink.set_result(result)
            else:
                try:
                    sink(item, result)
                except Exception as error:  # noqa: BLE001  raised below, once the others have their answers
                    fault = fault or error
        if fault is not None:
            raise fault

    def _report_drained(self) -> None:
        if self._drained is not None and not self._items and not self.in_flight:
            self._drained.set()
            self._drained = None


def _own_copy(error: Exception) -> Exception:
    """Give every waiter an error of its own: one that is raised in many tasks collects all their tracebacks."""
    if not isinstance(error, RelayDispatchError):
        return error
    own = copy.copy(error)
    own.__cause__ = error.__cause__
    return own
