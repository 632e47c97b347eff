"""`relay-dispatch durable events | errors`: what happened to a job, and which rows could not be used; page by page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final
from uuid import UUID

import anyio
import typer

from dispatch_core.cli.common import NOTHING_MATCHED, DsnOption, Output, OutputOption, note, resolve_dsn
from dispatch_core.durable_models import RowError
from gateway_sdk.cli_words import amount, json_text
from gateway_sdk.durable_cli.common import JobArgument, LinesOption, Room, TenantsOption, format_of, room_at, run_lines
from gateway_sdk.durable_cli.text import error_line, event_line, is_over
from gateway_sdk.durable_read import is_within

__all__ = ["errors", "events"]

PAGE: Final = 1000
FOLLOW_SECONDS: Final = 1.0
"""Between two looks of --follow. Claims and retries ring nobody, so it goes by the clock."""

LimitOption = Annotated[
    int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="No more than so many; else all there are.")
]


def events(
    job_id: JobArgument,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="CURSOR", help="Only what came later: the cursor that the last call told."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended, or waits for a person, or Ctrl-C.")
    ] = False,
    limit: LimitOption = None,
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    json: LinesOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the timeline of a job: what happened, when, to which chunk, and by whom.

    All of it, in the order of the transactions that wrote it; with --json one
    document a line. At the end it tells a cursor on stderr; --after with that
    goes on from there, and passes over nothing, however late it was committed.

    Exit code 0, also where there is nothing new; 3 where there is no such job.

    Examples:
      relay-dispatch durable events 01998d4e-… --follow
      relay-dispatch durable events 01998d4e-… --json | grep chunk_reaped
    """
    run_lines(_events, resolve_dsn(dsn), tenant, job_id, after, follow, limit, format_of(output, json))


async def _events(
    dsn: str,
    tenants: Sequence[str] | None,
    job_id: UUID,
    after: str | None,
    follow: bool,
    limit: int | None,
    output: Output,
) -> None:
    left = limit
    async with room_at(dsn, tenants) as room:
        tenant = await room.require(job_id)
        try:
            while left is None or left > 0:
                # Read before the events are: the event of an end is seen with the end.
                at_its_end = not follow or await _has_nothing_to_come(room, tenant, job_id)
                size = PAGE if left is None else min(PAGE, left)
                page = await room.verbs.events(tenant, job_id, after=after, limit=size)
                for event in page.events:
                    _line(json_text(asdict(event), indent=None) if output is Output.JSON else event_line(event))
                sys.stdout.flush()
                # A cursor within a page asks for the rest of that page; what came later is behind it.
                is_rest, after = is_within(after), page.next
                left = None if left is None else left - len(page.events)
                if len(page.events) < size and not (is_rest and page.events):
                    if at_its_end:
                        break
                    await anyio.sleep(FOLLOW_SECONDS)
        finally:
            if after is not None:
                note(f"to go on from here: --after '{after}'")


async def _has_nothing_to_come(room: Room, tenant: str, job_id: UUID) -> bool:
    found = await room.verbs.jobs(tenant, [job_id])
    return not found or is_over(found[0])


def errors(
    job_id: JobArgument,
    chunk: Annotated[
        int | None, typer.Option("--chunk", "-c", metavar="SEQ", min=1, help="Only rows of this chunk.")
    ] = None,
    limit: LimitOption = None,
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    json: LinesOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the rows that could not be used: chunk, row, code, message, and what the handler kept of them.

    All of them, in the order of chunk and row; with --json one document a line.

    Exit code 0, also where no row was bad; 3 where there is no such job.

    Examples:
      relay-dispatch durable errors 01998d4e-… -n 20
      relay-dispatch durable errors 01998d4e-… --json > bad.jsonl
    """
    count = run_lines(_errors, resolve_dsn(dsn), tenant, job_id, chunk, limit, format_of(output, json))
    if not count:
        note("no row was bad")


async def _errors(
    dsn: str, tenants: Sequence[str] | None, job_id: UUID, chunk: int | None, limit: int | None, output: Output
) -> int:
    count = 0
    last: RowError | None = None
    async with room_at(dsn, tenants) as room:
        tenant = await room.require(job_id)
        if chunk is not None and not await room.verbs.chunks(tenant, job_id, seqs=[chunk]):
            note(f"the job has no chunk {chunk}")
            raise typer.Exit(NOTHING_MATCHED)
        while limit is None or count < limit:
            size = PAGE if limit is None else min(PAGE, limit - count)
            page = await room.verbs.row_errors(tenant, job_id, limit=size, after=last, seq=chunk)
            for error in page:
                _line(json_text(_document(error), indent=None) if output is Output.JSON else error_line(error))
            count += len(page)
            if len(page) < size:
                break
            last = page[-1]
        if (
            limit is not None
            and count == limit
            and await room.verbs.row_errors(tenant, job_id, limit=1, after=last, seq=chunk)
        ):
            note(f"there are more than {amount(count, 'bad row')}: --limit")
    return count


def _document(error: RowError) -> dict[str, Any]:
    return {"chunk": error.seq, **{name: value for name, value in asdict(error).items() if name != "seq"}}


def _line(text: str) -> None:
    sys.stdout.write(text + "\n")
