"""Submit a durable job: its chunks come from anywhere, and job and chunks are seen together or not at all.

    the first batch is all there is      insert the job, its chunks, seal: one transaction
    there are more                       insert the job, hidden -> a batch after the other -> seal
    in the caller's transaction          the same steps; it is the commit that shows them

Each step can be sent again: the job's id and the chunks' numbers are made here, or are the caller's. So a fault that
may pass is ridden out, each step within `write_timeout_seconds`. Between the steps, while the caller's iterator runs,
no connection and no transaction is held.

What ends a submission that is hidden still: an error of the iterator, a chunk that is refused, a cancellation, the
client's end. Then it is abandoned, shielded and within a bound; where that fails too, nobody ever sees it and a sweep
removes it. An outage that lasts too long abandons nothing, so that the same submission can go on under the same id.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from uuid import UUID

import anyio
import anyio.lowlevel

from dispatch_core import durable_input as check
from dispatch_core.durable_caller import CallersConnection
from dispatch_core.durable_models import ChunkSpec
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import (
    ClientClosedError,
    InvalidInputError,
    JobClosedError,
    RelayDispatchError,
    UnknownJobError,
)
from dispatch_core.settings import DurableJobsSettings
from gateway_sdk.durable_calls import Calls

__all__ = ["Chunks", "NewJob", "submit", "submit_in"]

logger = logging.getLogger("relay_dispatch.durable")

Chunks: TypeAlias = "Iterable[ChunkSpec | Any] | AsyncIterable[ChunkSpec | Any]"
"""Where chunks come from: each is a `ChunkSpec`, or its payload."""

_ABANDON_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 2.0

_BATCH_SECONDS: Final = 10.0
"""A batch that has gathered for so long is stored as it is: so that a slow submission is not taken for a dead one."""

_SLICE: Final = 100
"""Chunks between two turns of the event loop."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job that is to be, without its chunks; all of it was checked."""

    tenant: str
    job_id: UUID
    is_own_id: bool
    """The id was made here, so nobody else can have it."""
    kind: str
    params: Any
    idempotent: bool
    max_attempts: int
    priority: int
    created_by: str | None

    def check(self, settings: DurableJobsSettings) -> None:
        """Raise for what PostgreSQL would refuse. Raises: InvalidInputError and its kind."""
        check.name("kind", self.kind)
        check.json_text("params", {} if self.params is None else self.params, settings.max_payload_bytes)
        check.flag("idempotent", self.idempotent)
        check.number("max_attempts", self.max_attempts, 1)
        check.number("priority", self.priority)
        check.text_or_none("created_by", self.created_by)


class _Batches:
    """Chunks as they are stored, some at a time: bounded by number, by bytes, and by the time that they have taken."""

    __slots__ = ("_limit", "_limit_bytes", "_max_payload", "_open", "_source", "count", "has_failed", "is_over")

    def __init__(self, chunks: Chunks, settings: DurableJobsSettings) -> None:
        if isinstance(chunks, AsyncIterable):
            self._source: AsyncIterator[Any] | Iterator[Any] = aiter(chunks)
        elif isinstance(chunks, Iterable) and not isinstance(chunks, str | bytes | bytearray | Mapping):
            self._source = iter(chunks)
        else:
            raise InvalidInputError(f"chunks must be iterable, one item a chunk, not {type(chunks).__name__}")
        self._limit = settings.insert_batch
        self._limit_bytes = settings.insert_batch_bytes
        self._max_payload = settings.max_payload_bytes
        self._open: bytes | None = None
        self.count = 0
        """How many chunks there were so far."""
        self.is_over = False
        """There are no more."""
        self.has_failed = False
        """The source has raised, or given what is refused, or was cancelled."""

    async def next(self) -> list[bytes]:
        """Return one batch more; empty where there were no more. Raises: what the source raises, InvalidInputError."""
        batch: list[bytes] = []
        size = 0
        began = time.monotonic()
        while len(batch) < self._limit:
            text = self._open
            if text is None:
                try:
                    text = await self._take()
                except BaseException:
                    self.has_failed = True
                    raise
                if text is None:
                    self.is_over = True
                    break
            if batch and size + len(text) > self._limit_bytes:
                self._open = text
                break
            self._open = None
            batch.append(text)
            size += len(text)
            if time.monotonic() - began > _BATCH_SECONDS:
                break
        return batch

    async def _take(self) -> bytes | None:
        if isinstance(self._source, AsyncIterator):
            try:
                chunk = await anext(self._source)
            except StopAsyncIteration:
                return None
        else:
            if self.count % _SLICE == 0:
                await anyio.lowlevel.checkpoint()
            try:
                chunk = next(self._source)
            except StopIteration:
                return None
        (text,) = check.chunks_json([chunk], self._max_payload, self.count)
        self.count += 1
        return text

    async def close(self) -> None:
        """Let a generator that was left early end now, and not when it is collected."""
        if self.is_over:
            return
        if isinstance(self._source, AsyncGenerator):
            with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                await self._source.aclose()
        elif isinstance(self._source, Generator):
            self._source.close()


async def submit(calls: Calls, job: NewJob, chunks: Chunks) -> None:
    """Store the job and its chunks; see `DurableJobs.submit`."""
    batches = _Batches(chunks, calls.durable)
    try:
        with calls.under_way(job.job_id, stands=True):
            try:
                await _submit(calls, job, batches)
            finally:
                await batches.close()
    except ClientClosedError as error:
        # For the wait of a job it is said that the job goes on.
        text = f"the client was closed while durable job {job.job_id} was submitted; if that was not over, it never was"
        raise ClientClosedError(text, job_id=job.job_id) from error.__cause__


async def _submit(calls: Calls, job: NewJob, batches: _Batches) -> None:
    first = await batches.next()
    if not batches.is_over:
        await _Submission(calls, job).run(first, batches)
        return

    async def store(repository: DurableRepository) -> None:
        await _store_whole(repository, job, first)

    await calls.repeat(store, calls.settings.write_timeout_seconds, job.job_id, in_transaction=True)


async def _store_whole(repository: DurableRepository, job: NewJob, texts: list[bytes]) -> None:
    if not await _insert_job(repository, job) and await repository.jobs(job.tenant, [job.job_id]):
        return  # by an earlier call; or by this one, whose reply was lost
    if texts:
        await _insert_chunks(repository, job, texts, 1)
    await _seal(repository, job, len(texts))


async def _insert_job(repository: DurableRepository, job: NewJob) -> bool:
    return await repository.insert_job(
        job.tenant,
        job.job_id,
        job.kind,
        job.params,
        idempotent=job.idempotent,
        max_attempts=job.max_attempts,
        priority=job.priority,
        created_by=job.created_by,
        submitting=True,
    )


async def _insert_chunks(repository: DurableRepository, job: NewJob, texts: list[bytes], from_seq: int) -> None:
    try:
        # Nobody can claim them yet, so nobody is woken.
        await repository.insert_chunk_texts(job.tenant, job.job_id, texts, from_seq=from_seq, notify=False)
    except UnknownJobError as error:
        raise _used_up(job) from error


async def _seal(repository: DurableRepository, job: NewJob, chunks: int) -> None:
    try:
        await repository.seal(job.tenant, job.job_id, chunks=chunks)
    except UnknownJobError as error:
        raise _used_up(job) from error


def _used_up(job: NewJob) -> JobClosedError:
    return JobClosedError(
        f"a submission of durable job {job.job_id} was abandoned, so its id is used up: submit it under another one",
        job_id=job.job_id,
    )


class _Submission:
    """One that goes step by step, hidden until the last."""

    __slots__ = ("_calls", "_is_ours", "_job", "_seconds")

    def __init__(self, calls: Calls, job: NewJob) -> None:
        self._calls = calls
        self._job = job
        self._seconds = calls.settings.write_timeout_seconds
        # Else it may be another one's, who is at it still.
        self._is_ours = job.is_own_id

    async def run(self, first: list[bytes], batches: _Batches) -> None:
        """Take the steps."""
        try:
            if not await self._begin():
                return
            batch, stored = first, 0
            while batch:
                if not await self._add(batch, stored + 1):
                    return
                stored += len(batch)
                batch = [] if batches.is_over else await batches.next()
            await self._seal(stored)
        except RelayDispatchError as error:
            # Where the database was away for too long the same submission can go on; what its source raises ends it.
            if batches.has_failed or not error.retryable:
                await self._abandon()
            raise
        except BaseException:
            await self._abandon()
            raise

    async def _begin(self) -> bool:
        """Store the job; False where it is there already, and sealed."""
        job = self._job

        async def run(repository: DurableRepository) -> tuple[bool, bool]:
            is_new = await _insert_job(repository, job)
            return is_new, is_new or not await repository.jobs(job.tenant, [job.job_id])

        is_new, is_hidden = await self._calls.repeat(run, self._seconds, job.job_id)
        self._is_ours = self._is_ours or is_new
        return is_hidden

    async def _add(self, batch: list[bytes], from_seq: int) -> bool:
        """Store a batch; False where another call under the same id was first, and its job has ended by now."""
        job = self._job

        async def run(repository: DurableRepository) -> bool:
            try:
                await _insert_chunks(repository, job, batch, from_seq)
            except JobClosedError:
                if self._is_ours or not await repository.jobs(job.tenant, [job.job_id]):
                    raise
                return False
            return True

        return await self._calls.repeat(run, self._seconds, job.job_id)

    async def _seal(self, chunks: int) -> None:
        job = self._job

        async def run(repository: DurableRepository) -> None:
            await _seal(repository, job, chunks)

        await self._calls.repeat(run, self._seconds, job.job_id)

    async def _abandon(self) -> None:
        job = self._job
        if not self._is_ours:
            return

        async def run(repository: DurableRepository) -> None:
            await repository.abandon(job.tenant, job.job_id)

        try:
            with anyio.move_on_after(_ABANDON_SECONDS, shield=True):
                await self._calls.repeat(run, _ABANDON_SECONDS, job.job_id)
                return
            why: object = "PostgreSQL did not answer in time"
        except RelayDispatchError as error:
            why = error
        logger.warning(
            "the submission of durable job %s could not be taken back, and will be swept: %s", job.job_id, why
        )


async def submit_in(conn: Any, job: NewJob, chunks: Chunks, settings: DurableJobsSettings) -> None:
    """Store the job and its chunks in the caller's transaction; see `DurableJobs.submit`."""
    repository = DurableRepository(CallersConnection(conn), settings)
    batches = _Batches(chunks, settings)
    is_ours = False
    try:
        batch = await batches.next()
        is_ours = await _insert_job(repository, job)
        if not is_ours and await repository.jobs(job.tenant, [job.job_id]):
            return
        stored = 0
        while batch:
            await _insert_chunks(repository, job, batch, stored + 1)
            stored += len(batch)
            batch = [] if batches.is_over else await batches.next()
        await _seal(repository, job, stored)
    except Exception:
        if is_ours:
            # A caller who goes on, and commits, has submitted nothing: it was never sealed. This is for the sweep.
            with contextlib.suppress(RelayDispatchError):
                await repository.abandon(job.tenant, job.job_id)
        raise
    finally:
        await batches.close()
