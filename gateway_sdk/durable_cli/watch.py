"""`relay-dispatch durable watch`: see how far a job is, until it has ended: by push, and by polls beneath."""

from __future__ import annotations

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
    note,
    resolve_dsn,
    resolve_listen_dsn,
    run_async,
)
from dispatch_core.durable_models import ChunkStatus, DurableJob, JobStatus
from dispatch_core.errors import TenancyError
from dispatch_core.listener import Listener
from gateway_sdk.cli_words import amount
from gateway_sdk.durable_cli.common import JobArgument, LinesOption, Room, TenantsOption, format_of, room_at
from gateway_sdk.durable_cli.screen import Screen, screen_for
from gateway_sdk.durable_cli.text import is_over

__all__ = ["watch"]

LEAST_SECONDS: Final = 0.2
"""Between two looks, however often somebody rings: each counts the chunks."""
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
        float | None, typer.Option("--timeout", min=0, metavar="SECONDS", help="Watch at most so long.")
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
    --json a document a line. A job that is paused is watched on.

    Exit code 0 where it has completed without errors; 1 where it ended with
    errors, failed, was cancelled, waits for a person, or has not ended before
    the timeout; 3 where there is no such job.

    Examples:
      relay-dispatch durable watch 01998d4e-…
      relay-dispatch durable watch 01998d4e-… --json --timeout 600 | jq .fraction
    """
    address = resolve_dsn(dsn)
    ended = run_async(
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
    async with room_at(dsn, tenants) as room:
        tenant = await room.require(job_id)
        with anyio.move_on_after(timeout), screen:
            async with anyio.create_task_group() as group:
                bell = _Bell(job_id)
                channel = await _channel(room, tenant)
                listener = Listener(listen_dsn, name="watch", application_name="relay-dispatch durable", max_channels=1)
                listener.on_catch_up(bell.wake)
                await group.start(listener.run)
                if channel is not None:
                    await listener.subscribe(channel, bell.rung)
                ended = await _until_over(room, tenant, job_id, interval, bell, screen)
                group.cancel_scope.cancel()
                return ended
    return None


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


async def _until_over(
    room: Room, tenant: str, job_id: UUID, interval: float, bell: _Bell, screen: Screen
) -> DurableJob:
    cursor = await _end_of_timeline(room, tenant, job_id)
    while True:
        job = await room.job(tenant, job_id)
        # Behind the job: the event of what it shows has committed with it.
        cursor = await _tell_events(room, tenant, job_id, cursor, screen)
        screen.show(job)
        if is_over(job):
            return job
        await anyio.sleep(LEAST_SECONDS)
        await bell.wait(interval - LEAST_SECONDS)


async def _end_of_timeline(room: Room, tenant: str, job_id: UUID) -> str | None:
    cursor: str | None = None
    while True:
        page = await room.verbs.events(tenant, job_id, after=cursor, limit=PAGE)
        cursor = page.next
        if len(page.events) < PAGE:
            return cursor


async def _tell_events(room: Room, tenant: str, job_id: UUID, cursor: str | None, screen: Screen) -> str:
    while True:
        page = await room.verbs.events(tenant, job_id, after=cursor, limit=PAGE)
        for event in page.events:
            if event.type in NOTABLE:
                screen.tell(event)
        cursor = page.next
        if len(page.events) < PAGE:
            return cursor
