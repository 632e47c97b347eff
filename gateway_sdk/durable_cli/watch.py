"""`relay-dispatch durable watch`: see how far a job is, until it has ended: by push, and by polls beneath."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Final
from uuid import UUID

import anyio
import typer

from dispatch_core.cli.common import (
    FAILED,
    DsnOption,
    Output,
    OutputOption,
    foreseen_in,
    note,
    resolve_dsn,
    resolve_listen_dsn,
)
from dispatch_core.durable_models import ChunkStatus, DurableJob, JobStatus
from dispatch_core.errors import DatabaseUnavailableError, TenancyError
from dispatch_core.listener import Listener
from dispatch_core.task_groups import TaskGroup
from gateway_sdk.cli_words import amount
from gateway_sdk.durable_cli.common import JobArgument, LinesOption, Room, TenantsOption, format_of, room_at, run_lines
from gateway_sdk.durable_cli.screen import Screen, screen_for
from gateway_sdk.durable_cli.text import is_over
from gateway_sdk.durable_read import is_within

__all__ = ["watch"]

LEAST_SECONDS: Final = 0.2
"""Between two looks, however often somebody rings: each counts the chunks."""
SHARE: Final = 9.0
"""Times as long as a look takes: so that with a million chunks it is no more than a tenth of the time."""
STATEMENT_SECONDS: Final = 60.0
AGAIN_SECONDS: Final = 1.0
PAGE: Final = 1000

NOTABLE: Final = frozenset({
    "chunk_retried", "chunk_failed", "chunk_reaped", "chunk_needs_review", "paused", "resumed", "cancelled", "retried",
    "resolved",
})  # fmt: skip
"""Events that are shown beside the bar: not every claim, and not what the last line says anyway."""


def watch(
    job_id: JobArgument,
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, metavar="SECONDS", help="Look so often, beside being told.")
    ] = 2.0,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, metavar="SECONDS", help="Watch at most so long; 0 looks once.")
    ] = None,
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    listen_dsn: Annotated[
        str | None,
        typer.Option(
            "--listen-dsn", metavar="DSN", help="PostgreSQL past the pooler; RELAY_DISPATCH_LISTEN_DSN where not given."
        ),
    ] = None,
    json: LinesOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Watch a job until it has ended, or waits for a person.

    At a terminal it is a bar, with what is worth telling above it: chunks that
    failed, were tried again or taken back from a relay that is gone, and what
    people did. Elsewhere it is a line whenever something has changed; with
    --json a document a line. A job that is paused is watched on, and so is one
    whose database restarts meanwhile. Of a relay that has died nothing is told
    before the leases of its chunks have run out: until then they are running.

    Exit code 0 where it has completed without errors; 1 where it ended with
    errors, failed, was cancelled, waits for a person, or has not ended before
    the timeout; 3 where there is no such job; 130 after Ctrl-C, 143 after
    SIGTERM.

    Examples:
      relay-dispatch durable watch 01998d4e-…
      relay-dispatch durable watch 01998d4e-… --json --timeout 600 | jq .fraction
    """
    address = resolve_dsn(dsn)
    ended = run_lines(
        _watch,
        address,
        resolve_listen_dsn(listen_dsn) or address,
        tenant,
        job_id,
        interval,
        timeout,
        screen_for(format_of(output, json)),
    )
    if ended is None:
        note(f"not ended within {timeout:g} seconds; it goes on")
    elif ended.status is JobStatus.NEEDS_REVIEW:
        count = ended.chunks.get(ChunkStatus.NEEDS_REVIEW, 0)
        note(f"{amount(count, 'chunk')} to be decided about by a person: relay-dispatch durable show {job_id}")
    if ended is None or ended.status is not JobStatus.COMPLETED:
        raise typer.Exit(FAILED)


async def _watch(
    dsn: str,
    listen_dsn: str,
    tenants: Sequence[str] | None,
    job_id: UUID,
    interval: float,
    timeout: float | None,
    screen: Screen,
) -> DurableJob | None:
    """Watch; return the job as it was when there was nothing more to wait for, None past the timeout."""
    with anyio.CancelScope() as scope, screen:
        look = _Look(job_id, interval, timeout, screen, scope)
        while True:
            try:
                async with room_at(dsn, tenants, command_timeout=STATEMENT_SECONDS) as room:
                    return await look.on(room, listen_dsn)
            except Exception as error:
                foreseen = foreseen_in(error)
                # A restart or a failover is no end of the job; but what was never there is not waited for.
                if not look.has_begun or not isinstance(foreseen, DatabaseUnavailableError):
                    raise
                note(f"the database does not answer, to be tried again: {foreseen}")
                await anyio.sleep(AGAIN_SECONDS)
    return None


class _Look:
    """What is known of the job so far; it outlives a connection."""

    def __init__(
        self, job_id: UUID, interval: float, timeout: float | None, screen: Screen, scope: anyio.CancelScope
    ) -> None:
        self.has_begun = False
        self._job_id = job_id
        self._interval = interval
        self._timeout = timeout
        self._screen = screen
        self._scope = scope
        self._cursor: str | None = None

    async def on(self, room: Room, listen_dsn: str) -> DurableJob:
        """Look on by this connection until nothing more comes of the job."""
        tenant = await room.require(self._job_id)
        self.has_begun = True
        channel = await _channel(room, tenant)
        bell = _Bell(self._job_id)
        async with TaskGroup() as group:
            listener = Listener(listen_dsn, name="watch", application_name="relay-dispatch durable", max_channels=1)
            listener.on_catch_up(bell.wake)
            await group.start(listener.run)
            if channel is not None:
                await listener.subscribe(channel, bell.rung)
            job = await self._until_over(room, tenant, bell)
            group.cancel_scope.cancel()
        return job

    async def _until_over(self, room: Room, tenant: str, bell: _Bell) -> DurableJob:
        if self._cursor is None:
            await self._read_events(room, tenant, show=False)
        while True:
            began = time.monotonic()
            job = await room.job(tenant, self._job_id)
            # Behind the job: the event of what it shows has committed with it.
            await self._read_events(room, tenant, show=True)
            self._screen.show(job)
            if is_over(job):
                return job
            if self._timeout is not None:  # it begins with the first look, so that one is always shown
                self._scope.deadline, self._timeout = anyio.current_time() + self._timeout, None
            pause = max(LEAST_SECONDS, SHARE * (time.monotonic() - began))
            await anyio.sleep(pause)
            await bell.wait(max(self._interval - pause, 0))

    async def _read_events(self, room: Room, tenant: str, *, show: bool) -> None:
        while True:
            page = await room.verbs.events(tenant, self._job_id, after=self._cursor, limit=PAGE)
            for event in page.events:
                if show and event.type in NOTABLE:
                    self._screen.tell(event)
            is_rest, self._cursor = is_within(self._cursor), page.next
            if len(page.events) < PAGE and not (is_rest and page.events):
                return


class _Bell:
    """Rings when the job may have moved."""

    def __init__(self, job_id: UUID) -> None:
        self._hex = job_id.hex
        self._event = anyio.Event()

    def rung(self, payload: str) -> None:
        if not payload or self._hex in payload:
            self.wake()

    def wake(self) -> None:
        self._event.set()

    async def wait(self, seconds: float) -> None:
        """Wait until it rings, and at most so long."""
        with anyio.move_on_after(seconds):
            await self._event.wait()
        self._event = anyio.Event()


async def _channel(room: Room, tenant: str) -> str | None:
    try:
        return await room.verbs.channel("durable_watch", tenant)
    except TenancyError:  # a worker's login is told of work, and not of progress
        return None
