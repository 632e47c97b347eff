"""Ring for what has been committed: wake relays, push results, tell of withdrawals.

A commit that carries NOTIFY holds a lock of the whole database until its WAL is flushed, which makes every ringing
transaction wait for every other (D14). So nothing rings in the transaction that it tells of. Rings are gathered
here and sent after it, at most one statement at a time for the whole process, a relay's wake-up once however often it
was asked for, by a transaction that does not wait for its flush.

A ring that is lost costs a poll interval and nothing else. So none is kept for long, none is repeated, and whoever
rings neither waits nor fails.

Job ids are joined to payloads here, one row for up to 200 of a tenant: a row for each would cost more, on both sides,
than everything else about a result's ring.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, Literal, Protocol, TypeAlias
from uuid import UUID

import anyio
from anyio.abc import TaskStatus

from dispatch_core.backoff import Backoff
from dispatch_core.errors import DatabaseUnavailableError, RelayDispatchError

__all__ = ["Doorbell", "Transport"]

logger = logging.getLogger(__name__)

_Kind: TypeAlias = Literal["wake", "result", "cancel", "durable", "durable_watch"]
_Ring: TypeAlias = tuple[_Kind, str, str | None, str | None]

_MAX_RINGS: Final = 2000
"""Wake-ups and job ids in one statement."""

_MAX_IDS: Final = 200
"""Job ids in one payload: 33 bytes each stay below the 8000 bytes that a NOTIFY may carry (`relay.ring`)."""

_ID_BYTES: Final = 33

_MAX_WAITING: Final = 50_000
"""While the database is away; what comes above it is dropped."""

_FLUSH_SECONDS: Final = 1.0

# The setting is for this transaction alone and holds at its commit: nothing is left in a session, which behind a pooler
# might be another's next. With it the notification lock is held for microseconds instead of for a flush of the disk.
_RING_SQL: Final = """
select pg_catalog.set_config('synchronous_commit', 'off', true),
       relay.ring($1::text[], $2::text[], $3::text[], $4::text[])
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

    __slots__ = (
        "_closed",
        "_ended",
        "_flush_by",
        "_ids",
        "_ids_waiting",
        "_rung",
        "_transports",
        "_under_way",
        "_wakes",
        "_wakeup",
        "lost",
        "sent",
        "statements",
    )

    def __init__(self, *transports: Transport) -> None:
        self._transports: Sequence[Transport] = transports
        # A dict holds each once. A job is rung for once anyway, and hashing its id is dear.
        self._wakes: dict[tuple[str, str | None], None] = {}
        self._ids: dict[tuple[_Kind, str, str | None], list[UUID]] = {}
        self._ids_waiting = 0
        self._under_way = False
        self._wakeup = anyio.Event()
        self._rung = False
        self._closed = False
        self._flush_by: float | None = None
        self._ended = anyio.Event()
        self._ended.set()
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
        self._add("result", tenant, None, (job_id,))

    def ring_many_results(self, tenant: str, job_ids: Sequence[UUID]) -> None:
        """Tell the tenant's gateways that these jobs have ended."""
        self._add("result", tenant, None, job_ids)

    def ring_cancel(self, tenant: str, relay: str, job_id: UUID) -> None:
        """Tell the relay's processes that the job was withdrawn."""
        self._add("cancel", tenant, relay, (job_id,))

    def ring_chunks(self, tenant: str) -> None:
        """Wake the relays of the tenant that have handlers for chunks: there may be one to claim."""
        if self._closed:
            self.lost += 1
            return
        self._wakes[tenant, None] = None
        if not self._rung:
            self._rung = True
            self._wakeup.set()

    def ring_watchers(self, tenant: str, job_ids: Sequence[UUID]) -> None:
        """Tell those who watch durable jobs of the tenant that these have moved."""
        self._add("durable_watch", tenant, None, job_ids)

    def _add(self, kind: _Kind, tenant: str, relay: str | None, job_ids: Sequence[UUID]) -> None:
        room = 0 if self._closed else _MAX_WAITING - self._ids_waiting
        if len(job_ids) > room:
            self.lost += len(job_ids) - room
            job_ids = job_ids[:room]
        if not job_ids:
            return
        self._ids_waiting += len(job_ids)
        self._ids.setdefault((kind, tenant, relay), []).extend(job_ids)
        if not self._rung:
            self._rung = True
            self._wakeup.set()

    @property
    def waiting(self) -> int:
        """How many rings are not sent yet."""
        return len(self._wakes) + self._ids_waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and no statement is under way."""
        return not (self._under_way or self._wakes or self._ids)

    def close(self) -> None:
        """Take no more rings; `run` sends what waits and returns. Idempotent: yes."""
        self._closed = True
        self._wakeup.set()

    async def finish(self) -> None:
        """Close, and wait until what waits is sent, for a second at most: before `run` is cancelled, while there still
        are connections. A ring that is cut off in the middle is heard all the same, and twice where it is sent again.
        """
        self.close()
        self._flush_by = anyio.current_time() + _FLUSH_SECONDS
        with anyio.move_on_after(_FLUSH_SECONDS):
            await self._ended.wait()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Send rings until `close`; when cancelled, send what waits within a second.

        Never raises for what the database or the network does.
        """
        task_status.started()
        self._ended = anyio.Event()
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
            by = anyio.current_time() + _FLUSH_SECONDS if self._flush_by is None else self._flush_by
            with anyio.CancelScope(shield=True, deadline=by):
                while self.waiting and await self._send_next():
                    pass
            self._ended.set()
            self.lost += self.waiting
            self._wakes.clear()
            self._ids.clear()
            self._ids_waiting = 0

    async def _send_next(self) -> bool:
        wakes, ids = self._take()
        rings: list[_Ring] = [("durable" if relay is None else "wake", tenant, relay, None) for tenant, relay in wakes]
        for (kind, tenant, relay), jobs in ids.items():
            rings += [(kind, tenant, relay, payload) for payload in _payloads(jobs)]
        self._under_way = True
        try:
            return await self._send(rings)
        except BaseException:
            # Cancelled in the middle: the last flush may send them again, which is harmless.
            self._wakes = dict.fromkeys(wakes) | self._wakes
            for key, jobs in ids.items():
                self._ids[key] = jobs + self._ids.get(key, [])
                self._ids_waiting += len(jobs)
            raise
        finally:
            self._under_way = False

    def _take(self) -> tuple[list[tuple[str, str | None]], dict[tuple[_Kind, str, str | None], list[UUID]]]:
        wakes = list(islice(self._wakes, _MAX_RINGS))
        for wake in wakes:
            del self._wakes[wake]
        room = _MAX_RINGS - len(wakes)
        if self._ids_waiting <= room:
            ids, self._ids, self._ids_waiting = self._ids, {}, 0
            return wakes, ids
        ids = {}
        for key in list(self._ids):
            if room <= 0:
                break
            waiting = self._ids[key]
            ids[key] = waiting[:room]
            if len(waiting) > room:
                del waiting[:room]
            else:
                del self._ids[key]
            self._ids_waiting -= len(ids[key])
            room -= len(ids[key])
        return wakes, ids

    async def _send(self, rings: list[_Ring]) -> bool:
        """Return False where no transport reached the database."""
        kinds, tenants, relays, payloads = (list(column) for column in zip(*rings, strict=True))
        for transport in self._transports:
            try:
                await transport.execute(_RING_SQL, kinds, tenants, relays, payloads)
            except DatabaseUnavailableError as error:
                logger.debug("%d rings were not sent on %s: %s", len(rings), type(transport).__name__, error)
                continue
            except RelayDispatchError as error:
                # One ring that is refused refuses them all, say after a grant was taken back. Halving finds it.
                if len(rings) > 1:
                    middle = len(rings) // 2
                    if await self._send(rings[:middle]):
                        return await self._send(rings[middle:])
                    self.lost += _count(rings[middle:])
                    return False
                self.lost += _count(rings)
                logger.debug("a ring of kind %s was refused: %s", kinds[0], error)
                return True
            self.sent += _count(rings)
            self.statements += 1
            return True
        self.lost += _count(rings)
        return False


def _payloads(job_ids: Sequence[UUID]) -> Iterable[str]:
    for start in range(0, len(job_ids), _MAX_IDS):
        # A comma every 16 bytes: many times faster than the ids' own texts, joined.
        yield b"".join([job_id.bytes for job_id in job_ids[start : start + _MAX_IDS]]).hex(",", 16)


def _count(rings: Sequence[_Ring]) -> int:
    return sum(1 if payload is None else (len(payload) + 1) // _ID_BYTES for _, _, _, payload in rings)
