"""`relay-dispatch durable resolve`: decide about chunks that wait for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Final
from uuid import UUID

import typer

from dispatch_core.cli.common import (
    FAILED,
    NOTHING_MATCHED,
    DsnOption,
    Output,
    OutputOption,
    note,
    resolve_dsn,
    run_async,
)
from dispatch_core.durable_models import ChunkStatus, Resolved
from gateway_sdk.cli_words import amount, ask, json_text, must_be_answerable
from gateway_sdk.durable_cli.common import (
    CHANNEL,
    ActorOption,
    JobArgument,
    JsonOption,
    NoteOption,
    TenantsOption,
    format_of,
    room_at,
    who,
)

__all__ = ["resolve"]

PAGE: Final = 100


class Decision(str, Enum):  # noqa: UP042  (as in common)
    """What is to become of a chunk."""

    RETRY = "retry"
    DONE = "done"
    FAILED = "failed"


MEANS: Final = {
    Decision.RETRY: "run again, with all attempts",
    Decision.DONE: "taken as done",
    Decision.FAILED: "taken as failed",
}


def resolve(
    job_id: JobArgument,
    decision: Annotated[Decision, typer.Argument(metavar="retry|done|failed")],
    seqs: Annotated[list[int] | None, typer.Argument(metavar="SEQ…", help="The chunks.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All chunks of the job that wait; asks first.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    reason: NoteOption = None,
    actor: ActorOption = None,
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Decide about chunks that wait for a person.

    Such a one stands at needs_review: it was under way when its worker was
    lost, and must not be run twice unasked. Look first at how far it had come
    (its checkpoint, who held it, what that has left behind): durable show JOB_ID
    --chunk SEQ. Then

      retry    it is run again, from its checkpoint, with all its attempts
      done     it had done all that it should
      failed   it had not, and shall not be run again (--note becomes its error)

    With the last of them decided, the job goes on or ends.

    Exit code 0 where each was decided as said, 1 where one did not wait for
    anybody or was refused (retry in a cancelled job), or the answer was no, 3
    where there is no such job or chunk.

    Examples:
      relay-dispatch durable show 01998d4e-… --chunk 17
      relay-dispatch durable resolve 01998d4e-… done 17 --note 'all are sent'
      relay-dispatch durable resolve 01998d4e-… retry --all
    """
    if bool(seqs) == all_:
        raise typer.BadParameter("give the numbers of chunks, or else --all")
    if any(seq < 1 for seq in seqs or ()):
        raise typer.BadParameter("chunks are numbered from 1")
    address = resolve_dsn(dsn)
    if all_:
        must_be_answerable(yes=yes)
        seqs = run_async(_waiting, address, tenant, job_id)
        if not seqs:
            note(f"no chunk of {job_id} waits for a person")
            raise typer.Exit(NOTHING_MATCHED)
        ask(f"{amount(len(seqs), 'chunk')}: {MEANS[decision]}?", yes=yes)
    assert seqs is not None
    decided = run_async(_resolve, address, tenant, job_id, list(dict.fromkeys(seqs)), decision, who(actor), reason)
    _report(job_id, decided, decision, format_of(output, json))


async def _waiting(dsn: str, tenants: Sequence[str] | None, job_id: UUID) -> list[int]:
    seqs: list[int] = []
    async with room_at(dsn, tenants) as room:
        tenant = await room.require(job_id)
        while True:
            page = await room.verbs.chunks(
                tenant, job_id, status=ChunkStatus.NEEDS_REVIEW, limit=PAGE, after=seqs[-1] if seqs else 0
            )
            seqs += [chunk.seq for chunk in page]
            if len(page) < PAGE:
                return seqs


async def _resolve(
    dsn: str,
    tenants: Sequence[str] | None,
    job_id: UUID,
    seqs: Sequence[int],
    decision: Decision,
    actor: str | None,
    reason: str | None,
) -> dict[int, Resolved]:
    async with room_at(dsn, tenants) as room:
        tenant = await room.require(job_id)
        return {
            seq: await room.verbs.resolve(
                tenant, job_id, seq, decision.value, actor=actor, channel=CHANNEL, note=reason
            )
            for seq in seqs
        }


def _report(job_id: UUID, decided: dict[int, Resolved], decision: Decision, output: Output) -> None:
    last = next(reversed(decided.values()))
    if output is Output.JSON:
        typer.echo(json_text([{"job_id": job_id, "seq": seq, **asdict(done)} for seq, done in decided.items()]))
    else:
        for seq, done in decided.items():
            note(f"chunk {seq:,}: {_says(done, decision)}")
        if last.status is not None:
            note(f"job {job_id} is {last.status}")
    outcomes = {done.outcome for done in decided.values()}
    if outcomes & {"refused", "too_late"}:
        raise typer.Exit(FAILED)
    if "unknown" in outcomes:
        raise typer.Exit(NOTHING_MATCHED)


def _says(done: Resolved, decision: Decision) -> str:
    match done.outcome:
        case "applied":
            return f"to be {MEANS[decision]}" if decision is Decision.RETRY else MEANS[decision]
        case "too_late":
            return f"left as it is, {done.chunk_status}: it does not wait for a person"
        case "refused":
            return f"refused: nothing of a job that is {done.status} is run again"
        case _:
            return "the job has no such chunk"
