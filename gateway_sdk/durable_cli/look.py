"""`relay-dispatch durable list | show`: look at jobs and chunks; nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final
from uuid import UUID

import typer

from dispatch_core.cli.common import NOTHING_MATCHED, DsnOption, Output, OutputOption, note, resolve_dsn, run_async
from dispatch_core.durable_models import ChunkStatus, DurableChunk, DurableJob, JobStatus
from gateway_sdk.cli_text import waiting
from gateway_sdk.cli_words import json_text
from gateway_sdk.durable_cli.common import JobArgument, JsonOption, Room, TenantsOption, format_of, room_at
from gateway_sdk.durable_cli.text import (
    chunk_document,
    job_document,
    print_chunk,
    print_chunks,
    print_job,
    print_jobs,
)

__all__ = ["list_", "show"]

OF_INTEREST: Final = (ChunkStatus.NEEDS_REVIEW, ChunkStatus.FAILED, ChunkStatus.RUNNING, ChunkStatus.RETRY)
"""The chunks that `show` prints by itself: those that wait for a person come first."""


def list_(
    tenant: TenantsOption = None,
    status: Annotated[
        list[JobStatus] | None, typer.Option("--status", "-s", help="Only those that stand so; repeatable.")
    ] = None,
    kind: Annotated[str | None, typer.Option("--kind", "-k", help="Only jobs of this kind.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=5000, help="At most so many.")] = 50,
    before: Annotated[
        UUID | None, typer.Option("--before", metavar="JOB_ID", help="Only older ones: the last of the page before.")
    ] = None,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """List jobs, the newest first, and how far each is.

    Those that have not ended are counted now, which reads their chunks. A job
    that stands at needs_review waits for a person: durable show tells for what.

    Exit code 3 where there are none.

    Examples:
      relay-dispatch durable list
      relay-dispatch durable list --status needs_review --status failed
      relay-dispatch durable list --kind import --json | jq -r '.[].job_id'
    """
    found, more = run_async(_list, resolve_dsn(dsn), tenant, status or [], kind, limit, before)
    if format_of(output, json) is Output.JSON:
        typer.echo(json_text([job_document(job) for job in found]))
    elif found:
        print_jobs(found)
    if not found:
        note("no such job")
        raise typer.Exit(NOTHING_MATCHED)
    if more:
        note(f"there are more: --before {found[-1].job_id}")


async def _list(
    dsn: str,
    tenants: Sequence[str] | None,
    statuses: Sequence[JobStatus],
    kind: str | None,
    limit: int,
    before: UUID | None,
) -> tuple[list[DurableJob], bool]:
    wanted: dict[str, object] = {}
    if statuses:
        wanted["status"] = [status.value for status in statuses]
    if kind is not None:
        wanted["kind"] = kind
    async with room_at(dsn, tenants) as room:
        with waiting("counting"):
            ids: list[tuple[UUID, str]] = []
            for tenant in await room.tenants():
                after = None if before is None else f'["{before}"]'
                page = await room.verbs.query(tenant, "job", wanted, after=after, limit=limit + 1)
                # Ids are of their time: so the newest of all tenants are those with the highest ones.
                ids = sorted([*ids, *((UUID(str(item["job_id"])), tenant) for item in page.items)], reverse=True)
                ids = ids[: limit + 1]
            found = [job for job_id, tenant in ids[:limit] for job in await _read(room, tenant, job_id)]
    return found, len(ids) > limit


async def _read(room: Room, tenant: str, job_id: UUID) -> list[DurableJob]:
    return await room.verbs.jobs(tenant, [job_id], fresh=True)


def show(
    job_id: JobArgument,
    chunk: Annotated[
        list[int] | None,
        typer.Option("--chunk", "-c", metavar="SEQ", min=1, help="All there is of this chunk; repeatable."),
    ] = None,
    status: Annotated[
        ChunkStatus | None, typer.Option("--status", "-s", help="List the chunks that stand so, in their order.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="At most so many chunks.")] = 20,
    after: Annotated[int, typer.Option("--after", metavar="SEQ", min=0, help="Only chunks behind this one.")] = 0,
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a job: where it stands, how far it is, and the chunks that want to be looked at.

    Those are, of each kind at most --limit: chunks that wait for a person, that
    have failed, that are under way, and that wait for another try. --status
    lists others. --chunk shows one by itself: payload, checkpoint, outcome, who
    held it last, and why it failed; of a long value the beginning, and with
    --json all of it.

    Exit code 3 where there is no such job, or no such chunk.

    Examples:
      relay-dispatch durable show 01998d4e-…
      relay-dispatch durable show 01998d4e-… --status done --after 400
      relay-dispatch durable show 01998d4e-… --chunk 17 --json | jq '.chunks[0]'
    """
    job, chunks, more = run_async(_show, resolve_dsn(dsn), tenant, job_id, chunk, status, limit, after)
    if format_of(output, json) is Output.JSON:
        typer.echo(json_text(job_document(job) | {"params": job.params, "chunks": [chunk_document(c) for c in chunks]}))
    elif chunk:
        for one in chunks:
            print_chunk(one)
    else:
        print_job(job)
        if chunks:
            print_chunks(chunks)
    if more:
        note(f"there are more of {', '.join(more)}: --status …, --limit, --after")
    if chunk and len(chunks) < len(set(chunk)):
        missing = sorted(set(chunk) - {one.seq for one in chunks})
        note(f"the job has no chunk {', '.join(map(str, missing))}")
        raise typer.Exit(NOTHING_MATCHED)


async def _show(
    dsn: str,
    tenants: Sequence[str] | None,
    job_id: UUID,
    seqs: Sequence[int] | None,
    status: ChunkStatus | None,
    limit: int,
    after: int,
) -> tuple[DurableJob, list[DurableChunk], list[str]]:
    async with room_at(dsn, tenants) as room:
        tenant = await room.require(job_id)
        job = await room.job(tenant, job_id)
        if seqs:
            return job, await room.verbs.chunks(tenant, job_id, seqs=sorted(set(seqs))), []
        chunks: list[DurableChunk] = []
        more: list[str] = []
        for one in OF_INTEREST if status is None else (status,):
            page = await room.verbs.chunks(tenant, job_id, after=after, limit=limit + 1, status=one)
            chunks += page[:limit]
            if len(page) > limit:
                more.append(one.value)
        return job, chunks, more
