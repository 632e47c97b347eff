"""Ring for what has been committed: wake relays, push results, tell of withdrawals.

A commit that carries NOTIFY holds a lock of the whole database until its WAL is flushed, which makes every ringing
transaction wait for every other (D14). So nothing rings in the transaction that it tells of. Rings are gathered
here and sent after it, at most one statement at a time for the whole process, a relay's wake-up once however often it
was asked for, by a transaction that does not wait for its flush.

A ring that is lost costs a poll interval and nothing else. So none is kept for long, none is repeated, and whoever
rings neither waits nor fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from typing import Final, Literal, Protocol, TypeAlias
from uuid import UUID

import anyio
from anyio.abc import TaskStatus

from dispatch_core.backoff import Backoff
from dispatch_core.errors import DatabaseUnavailableError, RelayDispatchError

__all__ = ["Doorbell", "Transport"]

logger = logging.getLogger(__name__)

_Ring: TypeAlias = tuple[Literal["wake", "result", "cancel"], str, str | None, UUID | None]

_MAX_RINGS: Final = 2000
"""In one statement."""

_MAX_WAITING: Final = 50_000
"""While the database is away; what comes above it is dropped."""

_FLUSH_SECONDS: Final = 1.0

# The setting is for this transaction alone and holds at its commit: nothing is left in a session, which behind a pooler
# might be another's next. With it the notification lock is held for microseconds instead of for a flush of the disk.
_RING_SQL: Final = """
select pg_catalog.set_config('synchronous_commit', 'off', true),
       relay.ring($1::text[], $2::text[], $3::text[], $4::uuid[])
"""


class Transport(Protocol):
    """What carries a statement: a `Listener`, a `Database`."""

    async def execute(self, sql: str, *args: object) -> object:
        """Run one statement in a transaction of its own."""
        ...


class Doorbell:
    """Gather rings and send them. Run `run` in the owner's task group; the ring methods never raise and never wait.

    Transports are tried in order: the listening connection first, then the pool, so that rings go on being heard by
    others while we hear none ourselves.
    """

    __slots__ = ("_closed", "_jobs", "_rung", "_transports", "_wakes", "_wakeup", "lost", "sent", "statements")

    def __init__(self, *transports: Transport) -> None:
        self._transports: Sequence[Transport] = transports
        # A dict holds each once. Those with a job's id are rung for once anyway, and hashing an id is dear.
        self._wakes: dict[tuple[str, str], None] = {}
        self._jobs: list[_Ring] = []
        self._wakeup = anyio.Event()
        self._rung = False
        self._closed = False
        self.sent = 0
        """How many rings were sent."""
        self.lost = 0
        """How many were dropped."""
        self.statements = 0
        """How many statements carried those that were sent."""

    def ring_relay(self, tenant: str, relay: str) -> None:
        """Wake the relay's processes: there is work for it."""
        if self._closed:
            self.lost += 1
            return
        self._wakes[tenant, relay] = None
        if not self._rung:
            self._rung = True
            self._wakeup.set()

    def ring_results(self, tenant: str, job_id: UUID) -> None:
        """Tell the tenant's gateways that the job has ended."""
        self._add(("result", tenant, None, job_id))

    def ring_cancel(self, tenant: str, relay: str, job_id: UUID) -> None:
        """Tell the relay's processes that the job was withdrawn."""
        self._add(("cancel", tenant, relay, job_id))

    def _add(self, ring: _Ring) -> None:
        if self._closed or len(self._jobs) >= _MAX_WAITING:
            self.lost += 1
            return
        self._jobs.append(ring)
        if not self._rung:
            self._rung = True
            self._wakeup.set()

    @property
    def waiting(self) -> int:
        """How many rings are not sent yet."""
        return len(self._wakes) + len(self._jobs)

    def close(self) -> None:
        """Take no more rings; `run` sends what waits and returns. Idempotent: yes."""
        self._closed = True
        self._wakeup.set()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Send rings until `close`; when cancelled, send what waits within a second.

        Never raises for what the database or the network does.
        """
        task_status.started()
        backoff = Backoff(0.05, 2.0)
        try:
            while self.waiting or not self._closed:
                await self._wakeup.wait()
                # Before the rings are taken: one that comes during the statement sets them again.
                self._wakeup, self._rung = anyio.Event(), False
                while self.waiting:
                    if await self._send_next():
                        backoff.reset()
                    elif self._closed:
                        return
                    else:
                        # Others gather meanwhile. Without the pause a server that refuses would be asked at every ring.
                        await anyio.sleep(backoff.next())
        finally:
            self._closed = True
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _FLUSH_SECONDS):
                while self.waiting and await self._send_next():
                    pass
            self.lost += self.waiting
            self._wakes.clear()
            self._jobs.clear()

    async def _send_next(self) -> bool:
        rings = self._take()
        try:
            return await self._send(rings)
        except BaseException:
            # Cancelled in the middle: the last flush may send them again, which is harmless.
            self._jobs[:0] = rings
            raise

    def _take(self) -> list[_Ring]:
        wakes = list(islice(self._wakes, _MAX_RINGS))
        for wake in wakes:
            del self._wakes[wake]
        rings: list[_Ring] = [("wake", tenant, relay, None) for tenant, relay in wakes]
        room = _MAX_RINGS - len(rings)
        rings += self._jobs[:room]
        del self._jobs[:room]
        return rings

    async def _send(self, rings: list[_Ring]) -> bool:
        """Return False where no transport reached the database."""
        kinds, tenants, relays, job_ids = (list(column) for column in zip(*rings, strict=True))
        for transport in self._transports:
            try:
                await transport.execute(_RING_SQL, kinds, tenants, relays, job_ids)
            except DatabaseUnavailableError as error:
                logger.debug("%d rings were not sent on %s: %s", len(rings), type(transport).__name__, error)
                continue
            except RelayDispatchError as error:
                # One ring that is refused refuses them all, say after a grant was taken back. Halving finds it.
                if len(rings) > 1:
                    middle = len(rings) // 2
                    return await self._send(rings[:middle]) and await self._send(rings[middle:])
                self.lost += 1
                logger.debug("a ring of kind %s was refused: %s", kinds[0], error)
                return True
            self.sent += len(rings)
            self.statements += 1
            return True
        self.lost += len(rings)
        return False
