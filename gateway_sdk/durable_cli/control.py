"""`relay-dispatch durable pause | resume | cancel | retry`: decide about jobs, and hear what that really did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
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
from dispatch_core.durable_models import Controlled, DurableJob, JobStatus
from gateway_sdk.cli_words import amount, ask, json_text, must_be_answerable
from gateway_sdk.durable_cli.common import (
    CHANNEL,
    ActorOption,
    JobsArgument,
    JsonOption,
    NoteOption,
    TenantsOption,
    format_of,
    room_at,
    who,
)
from gateway_sdk.durable_cli.text import chunks_text

__all__ = ["cancel", "pause", "resume", "retry"]

NOWHERE: Final = Controlled("unknown", None, None, 0, 0)

Decided = list[tuple[UUID, str | None, Controlled]]


def pause(
    job_ids: JobsArgument,
    reason: NoteOption = None,
    actor: ActorOption = None,
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let nothing more of these jobs begin. What is under way is given back, with its checkpoint.

    Relays are told at once; each handler goes on to where it looks at
    ctx.stopping. A chunk that is given back has its attempt back too. Of a job
    whose chunks must not be run twice, those under way go on to their end.

    Exit code 0 where all are paused now, 1 where one was not to be paused, 3
    where there is no such job.

    Example:
      relay-dispatch durable pause 01998d4e-… --note 'the disk is full'
    """
    decided = run_async(_control, resolve_dsn(dsn), tenant, job_ids, "pause", who(actor), reason)
    _report(decided, "pause", format_of(output, json))


def resume(
    job_ids: JobsArgument,
    reason: NoteOption = None,
    actor: ActorOption = None,
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let jobs that are paused go on where they were.

    Exit code 0 where all go on now, 1 where one has ended or waits for a
    person, 3 where there is no such job.

    Example:
      relay-dispatch durable resume 01998d4e-…
    """
    decided = run_async(_control, resolve_dsn(dsn), tenant, job_ids, "resume", who(actor), reason)
    _report(decided, "resume", format_of(output, json))


def cancel(
    job_ids: JobsArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    reason: NoteOption = None,
    actor: ActorOption = None,
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """End jobs for good: what has not ended of them never will, and what is done stays done.

    It asks first; without a terminal it needs --yes. Chunks under way lose their
    lease: checkpoints and completions are refused from then on. What a handler's
    open transaction had said before is committed with it. A job that waits for a
    person is not cancelled: durable resolve comes first. Of a very large job it
    is done by the 10,000 chunks: where that is interrupted, nothing of the job
    runs any more all the same, and the same command again does the rest.

    Exit code 0 where all are cancelled now, 1 where the answer was no or one
    was not to be cancelled, 3 where there is no such job.

    Examples:
      relay-dispatch durable cancel 01998d4e-…
      relay-dispatch durable cancel 01998d4e-… --yes --note 'wrong file'
    """
    must_be_answerable(yes=yes)
    address = resolve_dsn(dsn)
    if not yes:
        found = run_async(_look, address, tenant, job_ids)
        if not found:
            _report([(job_id, None, NOWHERE) for job_id in dict.fromkeys(job_ids)], "cancel", format_of(output, json))
        for job in found:
            note(f"{job.job_id}: {job.kind}, {job.status}, {chunks_text(job.progress)}")
        ask(f"Cancel {amount(len(found), 'job')} for good?", yes=yes)
    decided = run_async(_control, address, tenant, job_ids, "cancel", who(actor), reason)
    _report(decided, "cancel", format_of(output, json))


def retry(
    job_ids: JobsArgument,
    reason: NoteOption = None,
    actor: ActorOption = None,
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have the failed chunks of jobs run again, with all their attempts; a job that has ended with them goes on.

    A chunk begins at its last checkpoint. One that waits for a person is none
    of them: durable resolve.

    Exit code 0 where all that had failed is to be run again (or nothing had), 1
    where a job was cancelled, 3 where there is no such job.

    Example:
      relay-dispatch durable retry 01998d4e-… --note 'the table exists now'
    """
    decided = run_async(_control, resolve_dsn(dsn), tenant, job_ids, "retry_failed", who(actor), reason)
    _report(decided, "retry_failed", format_of(output, json))


async def _look(dsn: str, tenants: Sequence[str] | None, job_ids: Sequence[UUID]) -> list[DurableJob]:
    async with room_at(dsn, tenants) as room:
        places = [(job_id, await room.tenant_of(job_id)) for job_id in dict.fromkeys(job_ids)]
        return [await room.job(tenant, job_id) for job_id, tenant in places if tenant is not None]


async def _control(
    dsn: str,
    tenants: Sequence[str] | None,
    job_ids: Sequence[UUID],
    action: str,
    actor: str | None,
    reason: str | None,
) -> Decided:
    decided: Decided = []
    async with room_at(dsn, tenants) as room:
        # Whose they are is found out before anything is done: an id that two tenants have decides about none.
        places = [(job_id, await room.tenant_of(job_id)) for job_id in dict.fromkeys(job_ids)]
        for job_id, tenant in places:
            done = (
                NOWHERE
                if tenant is None
                else await room.verbs.control(tenant, job_id, action, actor=actor, channel=CHANNEL, note=reason)
            )
            decided.append((job_id, tenant, done))
    return decided


def _report(decided: Decided, action: str, output: Output) -> None:
    if output is Output.JSON:
        documents = [{"job_id": job_id, "tenant": tenant, **asdict(done)} for job_id, tenant, done in decided]
        typer.echo(json_text(documents))
    else:
        for job_id, _, done in decided:
            note(f"{job_id}: {SAYS[action](done)}")
    outcomes = {done.outcome for _, _, done in decided}
    if outcomes & {"refused", "too_late"}:
        raise typer.Exit(FAILED)
    if "unknown" in outcomes:
        raise typer.Exit(NOTHING_MATCHED)


# --- what an action has really done -----------------------------------------------------------------------------------


def _otherwise(done: Controlled) -> str:
    match done.outcome:
        case "unknown":
            return "not there, or of a tenant that this login may not see"
        case "too_late":
            return f"too late, it is {done.status}"
        case "refused" if done.was is JobStatus.NEEDS_REVIEW:
            return "refused: it waits for a person, and durable resolve comes first (durable show tells for what)"
        case "refused":
            return f"refused, it is {done.status}"
        case _:
            return f"left as it is, {done.status}"


def _paused(done: Controlled) -> str:
    if done.outcome not in ("applied", "already"):
        return _otherwise(done)
    if done.status is not JobStatus.PAUSED:  # its last chunk had ended, and nobody had told
        return f"it was at its end, and is {done.status}"
    way = f"; {amount(done.running, 'chunk')} under way, to be given back or done" if done.running else ""
    return f"{'paused' if done.outcome == 'applied' else 'was paused already'}{way}"


def _resumed(done: Controlled) -> str:
    if done.outcome == "already":
        return f"was not paused, it is {done.status}"
    return f"goes on, it is {done.status}" if done.outcome == "applied" else _otherwise(done)


def _cancelled(done: Controlled) -> str:
    if done.outcome == "already":
        return "was cancelled already"
    if done.outcome != "applied":
        return _otherwise(done)
    # Its holder has it locked. What he has said in that transaction commits with it; what he has yet to say is refused.
    way = (
        f"; {amount(done.running, 'chunk')} in a handler's transaction: from now on it can say nothing more"
        if done.running
        else ""
    )
    return f"cancelled, and {amount(done.chunks, 'chunk')} with it{way}"


def _retried(done: Controlled) -> str:
    if done.outcome == "already":
        return f"nothing of it had failed, it is {done.status}"
    if done.outcome == "applied":
        return f"{amount(done.chunks, 'failed chunk')} to be run again, it is {done.status}"
    return _otherwise(done)


SAYS: Final[dict[str, Callable[[Controlled], str]]] = {
    "pause": _paused,
    "resume": _resumed,
    "cancel": _cancelled,
    "retry_failed": _retried,
}
