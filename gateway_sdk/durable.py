"""Durable jobs as a gateway sees them: submit, look, decide, follow, wait.

    jobs = client.tenant("acme").durable
    job_id = await jobs.submit("import", chunks=({"rows": part} for part in parts), params={"table": "orders"})
    async for progress in jobs.watch(job_id):
        print(progress.status, progress.fraction)

Relays work on the chunks (`relay_sdk`). Nothing is asked of the durable room before the first call here.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import anyio

from dispatch_core import codec
from dispatch_core import durable_input as check
from dispatch_core.database import Connection, Database
from dispatch_core.durable_models import (
    ChunkSpec,
    ChunkStatus,
    Controlled,
    DurableChunk,
    DurableJob,
    EventPage,
    JobEvent,
    JobProgress,
    JobStatus,
    Resolved,
    RowError,
)
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import InvalidDeadlineError, InvalidInputError
from dispatch_core.ids import new_id, new_instance_id
from dispatch_core.listener import Listener
from dispatch_core.settings import DurableJobsSettings
from gateway_sdk.channels import ResultChannels
from gateway_sdk.durable_calls import Calls
from gateway_sdk.durable_read import JobEvents, JobWatch, is_within
from gateway_sdk.durable_submit import Chunks, NewJob, submit, submit_in
from gateway_sdk.durable_watch import JobWatches
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.tasks import StartSoon
from gateway_sdk.under_way import Closed

__all__ = [
    "ChunkSpec",
    "ChunkStatus",
    "Chunks",
    "Controlled",
    "DurableChunk",
    "DurableJob",
    "DurableJobs",
    "DurableRoom",
    "EventPage",
    "JobEvent",
    "JobEvents",
    "JobProgress",
    "JobStatus",
    "JobWatch",
    "Resolved",
    "RowError",
]

_CHANNEL: Final = "sdk"
"""The way by which a decision came, where the caller names none."""

_LOOK_SECONDS: Final = 1.0
"""How long a wait with a timeout of 0 waits for the database."""

_PAGE: Final = 1000

_CHUNK_PAGE: Final = 100
"""A payload may have a megabyte, and a page is one statement, in memory as a whole."""

_Jobs: TypeAlias = list[DurableJob]  # `list` is a verb below


class DurableRoom:
    """What all tenants of an open client share in the durable room."""

    def __init__(
        self,
        database: Database,
        listener: Listener | None,
        settings: GatewaySettings,
        durable: DurableJobsSettings | None,
        start_soon: StartSoon,
    ) -> None:
        self.calls = Calls(database, settings, durable)
        channels = ResultChannels(database, listener, settings, start_soon, of="durable jobs", name_of=_watch_channel)
        self.watches = JobWatches(self.calls, channels, listener, start_soon)
        self._reaper = new_instance_id("gateway")

    def for_tenant(self, tenant: str) -> DurableJobs:
        """Return the verbs for one tenant, whose name was checked: cheap, kept nowhere."""
        return DurableJobs(self, tenant)

    async def sweep(self) -> None:
        """End jobs that nobody has ended and remove old ones, when that is due; nothing before the room is used.

        Leases are taken back by relays. Raises: DatabaseError.
        """
        if self.calls.is_used:
            await self.calls.repeat(self._sweep, self.calls.settings.core.command_timeout_seconds, tries=1)

    async def _sweep(self, repository: DurableRepository) -> None:
        await repository.run_sweeps(self._reaper, lease=False, finish=True, remove=True)

    def close(self, reason: Closed) -> None:
        """Take no more calls; end waits, submissions and whatever else may last for ever."""
        self.watches.close(reason)
        self.calls.close(reason)

    async def drain(self) -> None:
        """Wait until calls under way have their answers; those that have none when this is cancelled are cut off."""
        await self.calls.drain()

    def fail(self, reason: Closed) -> None:
        """End everything at once."""
        self.close(reason)
        self.calls.cut()


class DurableJobs:
    """What one tenant can do with durable jobs; made by `TenantClient.durable`, good as long as the client is open.

    Every verb raises, beside what it says: InvalidInputError and its kind; SchemaMismatchError where the room `durable`
    is not in the database; TenancyError; ClientClosedError; DatabaseUnavailableError and DatabaseBusyError, both
    retryable and with the job's id.
    """

    __slots__ = ("_calls", "_room", "_tenant")

    def __init__(self, room: DurableRoom, tenant: str) -> None:
        self._room = room
        self._calls = room.calls
        self._tenant = tenant

    @property
    def tenant_id(self) -> str:
        return self._tenant

    # --- giving work ----------------------------------------------------------------------------------------------

    async def submit(
        self,
        kind: str,
        chunks: Chunks = (),
        *,
        params: Any = None,
        idempotent: bool = True,
        max_attempts: int = 3,
        priority: int = 0,
        created_by: str | None = None,
        job_id: UUID | str | None = None,
        conn: Connection | None = None,
    ) -> UUID:
        """Store a job and its chunks, wake the relays, and return the job's id.

        `chunks`: an iterable or async iterable; each item is a chunk's payload, or a `ChunkSpec`. It is read as it is
        stored, a batch at a time (DURABLE_INSERT_BATCH, DURABLE_INSERT_BATCH_BYTES), and chunks are numbered from 1.
        `params` and payloads are any JSON values. `idempotent`: a chunk may run again when its relay was lost; where
        not, a person decides. `max_attempts` is for each chunk. Of higher `priority` is sooner. `created_by` is data.
        A job without chunks is completed at once.

        Job and chunks are seen together, or not at all: until the last chunk is stored nobody sees any of it. What the
        iterator raises, a chunk that is refused, and a cancellation abandon the job.

        Transaction: its own, several where there are many chunks; or joins that of `conn`, which is asyncpg's: then it
        is its commit that shows the job and wakes the relays.
        Idempotent: by `job_id`. Of a job that is submitted already nothing is changed, and `chunks` is not read to its
        end; a submission that an outage has cut off goes on. An id whose submission was abandoned is used up.

        Raises: IdempotencyConflictError where a job of another kind has the id; JobClosedError where a submission under
        the same id was abandoned, or had more chunks; TransactionRequiredError where `conn` is in no transaction.
        """
        job = NewJob(
            self._tenant,
            new_id() if job_id is None else _job_id(job_id),
            job_id is None,
            kind,
            params,
            idempotent,
            max_attempts,
            priority,
            created_by,
        )
        job.check(self._calls.durable)
        if conn is not None:
            await submit_in(conn, job, chunks, self._calls.durable)
        else:
            await submit(self._calls, job, chunks)
        return job.job_id

    # --- deciding -------------------------------------------------------------------------------------------------

    async def pause(
        self, job_id: UUID | str, *, actor: str | None = None, note: str | None = None, channel: str = _CHANNEL
    ) -> Controlled:
        """Let nothing of the job be claimed; relays give back what they hold, with its checkpoint.

        `actor`, `note`, and `channel`, the way by which it came, stand in the timeline. The answer says what was really
        done; so after ConnectionLostError, when that is unknown, it is not done again. To call again is harmless, and
        goes on where a call that had to do with very many chunks was cut off.
        """
        return await self._control(job_id, "pause", actor, note, channel)

    async def resume(
        self, job_id: UUID | str, *, actor: str | None = None, note: str | None = None, channel: str = _CHANNEL
    ) -> Controlled:
        """Let a paused job go on. See `pause`."""
        return await self._control(job_id, "resume", actor, note, channel)

    async def cancel(
        self, job_id: UUID | str, *, actor: str | None = None, note: str | None = None, channel: str = _CHANNEL
    ) -> Controlled:
        """End a job, and its chunks that have not ended: who holds one has lost it. See `pause`.

        What a handler's open transaction has said before is committed with it: `running` counts such chunks.
        """
        return await self._control(job_id, "cancel", actor, note, channel)

    async def retry_failed(
        self, job_id: UUID | str, *, actor: str | None = None, note: str | None = None, channel: str = _CHANNEL
    ) -> Controlled:
        """Let the failed chunks run again as if they never had; a job that has ended with them goes on. See `pause`."""
        return await self._control(job_id, "retry_failed", actor, note, channel)

    async def _control(
        self, job_id: UUID | str, action: str, actor: str | None, note: str | None, channel: str
    ) -> Controlled:
        wanted = _job_id(job_id)
        after = 0

        async def run(repository: DurableRepository) -> tuple[Controlled, int | None]:
            return await repository.control_some(
                self._tenant, wanted, action, actor=actor, channel=channel, note=note, after=after
            )

        done, upto = await self._calls.decide(run, wanted)
        while upto is not None:
            # The rest of very many chunks, some at a time. It is decided: so this may be sent again.
            after = upto
            more, upto = await self._calls.write(run, wanted)
            done = done.and_then(more)
        return done

    async def resolve(
        self,
        job_id: UUID | str,
        seq: int,
        decision: Literal["retry", "done", "failed"],
        *,
        actor: str | None = None,
        note: str | None = None,
        channel: str = _CHANNEL,
    ) -> Resolved:
        """Decide about a chunk that waits for a person; with the last one its job goes on, or ends. See `pause`."""
        wanted = _job_id(job_id)

        async def run(repository: DurableRepository) -> Resolved:
            return await repository.resolve(
                self._tenant, wanted, seq, decision, actor=actor, channel=channel, note=note
            )

        return await self._calls.decide(run, wanted)

    # --- looking --------------------------------------------------------------------------------------------------

    async def status(self, job_id: UUID | str, *, fresh: bool = True) -> DurableJob | None:
        """Return a job, with its `progress`; None for an id that is unknown, another tenant's, or not submitted yet.

        `fresh`: its counters are counted now, from all its chunks; else they are those of `counted_at`.
        """
        wanted = _job_id(job_id)

        async def run(repository: DurableRepository) -> _Jobs:
            return await repository.jobs(self._tenant, [wanted], fresh=fresh)

        found = await self._calls.read(run, wanted)
        return found[0] if found else None

    async def chunk(self, job_id: UUID | str, seq: int) -> DurableChunk | None:
        """Return one chunk; None where there is none."""
        wanted = _job_id(job_id)

        async def run(repository: DurableRepository) -> Sequence[DurableChunk]:
            return await repository.chunks(self._tenant, wanted, seqs=[seq])

        found = await self._calls.read(run, wanted)
        return found[0] if found else None

    async def chunk_page(
        self, job_id: UUID | str, *, after: int = 0, limit: int = _CHUNK_PAGE, status: ChunkStatus | str | None = None
    ) -> Sequence[DurableChunk]:
        """Return chunks in their order, behind the number `after`, in one status where given."""
        wanted = _job_id(job_id)

        async def run(repository: DurableRepository) -> Sequence[DurableChunk]:
            return await repository.chunks(self._tenant, wanted, after=after, limit=limit, status=status)

        return await self._calls.read(run, wanted)

    async def chunks(
        self, job_id: UUID | str, *, status: ChunkStatus | str | None = None
    ) -> AsyncIterator[DurableChunk]:
        """Yield chunks in their order, in one status where given, as each page finds them."""
        after = 0
        while page := await self.chunk_page(job_id, after=after, status=status):
            for chunk in page:
                yield chunk
            if len(page) < _CHUNK_PAGE:
                return
            after = page[-1].seq

    async def row_error_page(
        self, job_id: UUID | str, *, after: RowError | None = None, limit: int = _PAGE, seq: int | None = None
    ) -> Sequence[RowError]:
        """Return bad rows by chunk, row and code, of one chunk by `seq`. `after`: the last one of the page before."""
        wanted = _job_id(job_id)

        async def run(repository: DurableRepository) -> Sequence[RowError]:
            return await repository.row_errors(self._tenant, wanted, after=after, limit=limit, seq=seq)

        return await self._calls.read(run, wanted)

    async def row_errors(self, job_id: UUID | str, *, seq: int | None = None) -> AsyncIterator[RowError]:
        """Yield bad rows by chunk, row and code, of one chunk by `seq`, as each page finds them."""
        after: RowError | None = None
        while page := await self.row_error_page(job_id, after=after, seq=seq):
            for error in page:
                yield error
            if len(page) < _PAGE:
                return
            after = page[-1]

    async def event_page(self, job_id: UUID | str, after: str | None = None, *, limit: int = 100) -> EventPage:
        """Return what has happened behind the cursor `after` (None: from the beginning), and the cursor to go on from.

        No event is ever skipped, whenever its transaction commits, and who has seen a status finds the event of it.
        """
        wanted = _job_id(job_id)
        page = await self._event_page(wanted, after, limit)
        if is_within(after) and len(page.events) < limit:
            # That was the rest of an earlier page. Nobody is to take its end for the end of all.
            more = await self._event_page(wanted, page.next, limit - len(page.events))
            page = EventPage(page.events + more.events, more.next)
        return page

    def events(self, job_id: UUID | str, after: str | None = None, *, follow: bool = False) -> JobEvents:
        """Return an async iterator of what has happened behind the cursor `after`.

        `follow`: it goes on with what happens, and ends behind the job's end. Its `cursor` is where to go on later.
        """
        wanted = _job_id(job_id)
        join = partial(self._room.watches.add, self._tenant, wanted) if follow else None
        return JobEvents(partial(self._event_page, wanted), after, _PAGE, join)

    async def _event_page(self, job_id: UUID, after: str | None, limit: int) -> EventPage:
        async def run(repository: DurableRepository) -> EventPage:
            return await repository.events(self._tenant, job_id, after=after, limit=limit)

        return await self._calls.read(run, job_id)

    async def list(
        self,
        *,
        status: JobStatus | str | Sequence[JobStatus | str] | None = None,
        kind: str | None = None,
        created_by: str | None = None,
        after: UUID | str | None = None,
        limit: int = 100,
    ) -> _Jobs:
        """Return jobs, the newest first, behind the job `after`; their counters are those of `counted_at`.

        It reads on until it has `limit` that are as asked for: in one of these statuses, of that kind, created by that.
        """
        wanted_status = None if status is None else check.some_of("status", status, JobStatus)
        given = {"status": wanted_status, "kind": kind, "created_by": created_by}
        wanted = {column: value for column, value in given.items() if value is not None}
        behind = None if after is None else f'["{_job_id(after)}"]'

        async def run(repository: DurableRepository) -> _Jobs:
            page = await repository.query(self._tenant, "job", wanted, after=behind, limit=limit)
            return await repository.jobs(self._tenant, [row["job_id"] for row in page.items])

        return await self._calls.read(run)

    # --- waiting --------------------------------------------------------------------------------------------------

    async def wait(self, job_id: UUID | str, timeout: float | timedelta | None = None) -> DurableJob:
        """Return the job as soon as it has ended, whichever way, within `timeout` seconds (None: whenever that is).

        A job that needs review has not ended. One that is not submitted yet is unknown. An outage of the database is
        waited out. With a timeout of 0 the database is asked once.

        Raises: WaitTimeoutError (the job goes on); UnknownJobError; DatabaseUnavailableError where the database did not
        say in time where the job stands; all with the job's id.
        """
        wanted, seconds = _job_id(job_id), _timeout(timeout)
        watcher = self._room.watches.add(self._tenant, wanted, is_patient=True)
        try:
            with anyio.move_on_after(_LOOK_SECONDS if seconds == 0 else seconds):
                while not (job := await watcher.next()).status.is_terminal:
                    if seconds == 0:
                        raise watcher.timed_out()
                return job
            # It may have come in the moment in which the time was over.
            job = watcher.take()
            if job.status.is_terminal:
                return job
            raise watcher.timed_out()
        finally:
            watcher.close()

    def watch(self, job_id: UUID | str) -> JobWatch:
        """Return an async iterator of the job's progress: where it stands, each change of that, last its end.

        Pushed where that can be, and polled beneath. Who is slow is given the newest, and not what came in between.
        """
        wanted = _job_id(job_id)
        return JobWatch(partial(self._room.watches.add, self._tenant, wanted, counts=True))


async def _watch_channel(conn: Connection, tenant: str) -> str:
    # Common to all rooms, and there before this one is asked for anything.
    return await DurableRepository(conn).channel("durable_watch", tenant)


def _job_id(value: object) -> UUID:
    if isinstance(value, UUID):
        return value
    if isinstance(value, str):
        try:
            return UUID(value)
        except ValueError:
            pass
    raise InvalidInputError(f"a job id must be a UUID, not {codec.sanitize(repr(value), 100)}")


def _timeout(value: float | timedelta | None) -> float | None:
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    # Not a comparison with 0 first: it is false for NaN.
    if seconds.__class__ not in (int, float) or not seconds >= 0:
        raise InvalidDeadlineError(f"timeout must be seconds, not negative; not {value!r}")
    return None if seconds == math.inf else float(seconds)
