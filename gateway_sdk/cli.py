"""`relay-dispatch jobs`: enqueue, look at, wait for and withdraw jobs by hand. `demo` lives in `gateway_sdk.demo`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Annotated, Any, Final
from uuid import UUID

import anyio
import typer
from rich.table import Column
from rich.text import Text

from dispatch_core.cli.common import (
    FAILED,
    NOTHING_MATCHED,
    DsnOption,
    Output,
    OutputOption,
    emit_json,
    emit_table,
    note,
    resolve_dsn,
    run_async,
)
from dispatch_core.codec import UNSET
from dispatch_core.database import close_connection, connect
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import DatabaseUnavailableError
from dispatch_core.migrate import check_schema
from dispatch_core.models import DispatchResult, DispatchStatus
from dispatch_core.settings import OutboxSettings
from gateway_sdk.cli_demo import demo
from gateway_sdk.cli_text import STYLES, job_document, parse_headers, parse_json, print_job, read_argument, waiting
from gateway_sdk.client import GatewayClient
from gateway_sdk.outbox import OutboxDrainer
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.tenant import TenantClient

__all__ = ["demo", "jobs"]

_AGAIN_SECONDS: Final = 1.0

jobs = typer.Typer(help="Enqueue, look at, wait for and withdraw jobs.", no_args_is_help=True)

TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="Whose job it is.")]
JobArgument = Annotated[UUID, typer.Argument(metavar="JOB_ID")]
JobsArgument = Annotated[list[UUID], typer.Argument(metavar="JOB_ID")]
TimeoutOption = Annotated[
    float | None,
    typer.Option("--timeout", min=0, metavar="SECONDS", help="Wait at most so long; else to the deadline."),
]


class Status(str, Enum):  # noqa: UP042  (as in common)
    """Where a job stands."""

    PENDING = "pending"
    CLAIMED = "claimed"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"


@jobs.command()
def enqueue(
    tenant: TenantArgument,
    relay: Annotated[str, typer.Argument(metavar="RELAY", help="The relay that is to do it.")],
    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="Names the handler.")],
    body: Annotated[
        str | None, typer.Option("--body", metavar="TEXT|-", help="The body as it is; - reads stdin.")
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="JSON|-", help="The body as JSON, checked first; - reads stdin.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="K=V", help="May be repeated, also with one name.")
    ] = None,
    ttl: Annotated[
        float | None, typer.Option("--ttl", metavar="SECONDS", help="From now to the deadline; default 300.")
    ] = None,
    delay: Annotated[
        float | None, typer.Option("--delay", metavar="SECONDS", help="No relay gets it before that.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Idempotency key: the same request again is the same job.")
    ] = None,
    max_attempts: Annotated[int, typer.Option("--max-attempts", help="How often a handler may start.")] = 1,
    max_pending: Annotated[
        int | None,
        typer.Option("--max-pending", metavar="N", help="Refuse it where N jobs wait for the relay; 0: never."),
    ] = None,
    wait_: Annotated[bool, typer.Option("--wait", "-w", help="Wait for the result and print it.")] = False,
    timeout: TimeoutOption = None,
    dsn: DsnOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Enqueue a job and print its id.

    With --wait the exit code is 0 for a job that succeeded, and 1 for one
    that failed, expired, or has no result before the timeout.

    Examples:
      relay-dispatch jobs enqueue acme erp GetInvoice --json '{"number": 7}' -w
      relay-dispatch jobs enqueue acme archive Hash --body - < letter.pdf
      relay-dispatch jobs enqueue acme erp Ping -H x-trace=1 --ttl 10
    """
    if body is not None and json is not None:
        raise typer.BadParameter("give --body or --json, not both")
    request = {
        "headers": parse_headers(header or []),
        "body": None if body is None else read_argument(body),
        "json": UNSET if json is None else parse_json(read_argument(json)),
        "ttl": ttl,
        "delay": delay,
        "max_attempts": max_attempts,
        "idempotency_key": key,
        "max_pending": max_pending,
    }
    result = run_async(_enqueue, resolve_dsn(dsn), tenant, (relay, operation), request, wait_, timeout, output)
    if result is not None:
        _show_results([result], output)


async def _enqueue(
    dsn: str,
    tenant: str,
    what: tuple[str, str],
    request: dict[str, Any],
    wait_: bool,
    timeout: float | None,
    output: Output,
) -> DispatchResult | None:
    async with _client(dsn) as client:
        job_id = await client.tenant(tenant).enqueue(*what, **request)
        if not wait_:
            if output is Output.JSON:
                emit_json({"job_id": job_id})
            else:
                typer.echo(job_id)
            return None
        note(f"job {job_id}")
        with waiting("waiting for the result"):
            (result,) = await _results(client.tenant(tenant), [job_id], timeout)
            return result


@jobs.command()
def show(
    tenant: TenantArgument,
    job_id: JobArgument,
    body: Annotated[
        bool, typer.Option("--body", help="Write nothing but the response body, byte for byte, to stdout.")
    ] = False,
    dsn: DsnOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one job: where it stands, and how it ended.

    Exit code 3 where there is none.

    Examples:
      relay-dispatch jobs show acme 01998d4e-…
      relay-dispatch jobs show acme 01998d4e-… --body > answer.pdf
    """
    found = run_async(_show, resolve_dsn(dsn), tenant, job_id)
    if found is None:
        note(f"{tenant} has no job {job_id}")
        raise typer.Exit(NOTHING_MATCHED)
    result, about = found
    if body:
        if result.response_body is None:
            note(f"the job is {result.status} and has no response body")
            raise typer.Exit(NOTHING_MATCHED)
        sys.stdout.buffer.write(result.response_body)
    elif output is Output.JSON:
        emit_json(job_document(result, about))
    else:
        print_job(result, about)


async def _show(dsn: str, tenant: str, job_id: UUID) -> tuple[DispatchResult, dict[str, Any]] | None:
    async with _repository(dsn, tenant) as repository:
        result = await repository.poll_status(job_id)
        if result is None:
            return None
        # The newest job before the id that follows this one is this one: relay, operation and relay instance.
        rows = await repository.list_jobs(limit=1, before=UUID(int=job_id.int + 1)) if job_id.int < 2**128 - 1 else []
        about = next((row for row in rows if row["job_id"] == job_id), {})
        return result, {
            name: about[name] for name in ("relay_id", "operation", "max_attempts", "claimed_by") if name in about
        }


@jobs.command("list")
def list_(
    tenant: TenantArgument,
    status: Annotated[Status | None, typer.Option("--status", "-s", help="Only those that stand so.")] = None,
    relay: Annotated[str | None, typer.Option("--relay", "-r", help="Only those of this relay.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many.")] = 50,
    before: Annotated[
        UUID | None, typer.Option("--before", metavar="JOB_ID", help="Only older ones: the last of the page before.")
    ] = None,
    dsn: DsnOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List jobs, the newest first.

    Exit code 3 where there are none.

    Examples:
      relay-dispatch jobs list acme --status failed --relay erp
      relay-dispatch jobs list acme -n 10000 -o json | jq -r '.[].job_id'
    """
    rows = run_async(_list, resolve_dsn(dsn), tenant, relay, status, limit, before)
    if output is Output.JSON:
        emit_json(rows)
    elif rows:
        # An id that is cut cannot be copied; the others may be, where the terminal is narrow.
        columns: list[str | Column] = [Column("job", min_width=36), "relay", "operation", "status", "attempt", "error"]
        columns += [Column("created", min_width=19), Column("took", justify="right", no_wrap=True)]
        emit_table(columns, [_cells(row) for row in rows])
    if not rows:
        note("no such job" if output is Output.TABLE else "nothing matched")
        raise typer.Exit(NOTHING_MATCHED)
    if len(rows) == limit:
        note(f"there may be more: --before {rows[-1]['job_id']}")


async def _list(
    dsn: str, tenant: str, relay: str | None, status: Status | None, limit: int, before: UUID | None
) -> list[dict[str, Any]]:
    async with _repository(dsn, tenant) as repository:
        wanted = None if status is None else DispatchStatus(status.value)
        return await repository.list_jobs(relay_id=relay, status=wanted, limit=limit, before=before)


def _cells(row: dict[str, Any]) -> list[object]:
    ended, created = row["completed_at"], row["created_at"]
    took = None if ended is None else f"{(ended - created).total_seconds():,.3f} s"
    attempt = f"{row['attempt']}/{row['max_attempts']}"
    return [
        row["job_id"],
        row["relay_id"],
        row["operation"],
        Text(row["status"], STYLES.get(row["status"], "")),
        attempt,
        row["error_code"],
        f"{created.astimezone():%Y-%m-%d %H:%M:%S}",
        took,
    ]


@jobs.command()
def wait(
    tenant: TenantArgument,
    job_ids: JobsArgument,
    timeout: TimeoutOption = None,
    dsn: DsnOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Wait for jobs to end, and print their results.

    They come in the order in which the jobs end. Exit code 0 where all
    succeeded, 1 where one did not or has no result before the timeout, 3 where
    there is no such job; 130 after Ctrl-C, 143 after SIGTERM. An outage is
    waited out, until the timeout: 5 only where it begins with one.

    Example:
      relay-dispatch jobs wait acme 01998d4e-… --timeout 60 -o json
    """
    _show_results(run_async(_wait, resolve_dsn(dsn), tenant, job_ids, timeout), output)


async def _wait(dsn: str, tenant: str, job_ids: Sequence[UUID], timeout: float | None) -> list[DispatchResult]:
    async with _client(dsn) as client:
        with waiting(f"waiting for {'the result' if len(job_ids) == 1 else f'{len(job_ids)} results'}"):
            return await _results(client.tenant(tenant), job_ids, timeout)


async def _results(tenant: TenantClient, job_ids: Sequence[UUID], timeout: float | None) -> list[DispatchResult]:
    """Wait for results, over any outage: it may be so early that not even a job's deadline is known."""
    left = dict.fromkeys(job_ids)
    until = math.inf if timeout is None else time.monotonic() + timeout
    results: list[DispatchResult] = []
    is_told = False
    while left:
        try:
            async for result in tenant.as_completed(list(left), max(0.0, until - time.monotonic())):
                results.append(result)
                del left[result.job_id]
        except DatabaseUnavailableError as error:
            if time.monotonic() + _AGAIN_SECONDS >= until:
                raise
            if not is_told:
                note(f"waiting on: {error}")
                is_told = True
            await anyio.sleep(_AGAIN_SECONDS)
    return results


def _show_results(results: Sequence[DispatchResult], output: Output) -> None:
    if output is Output.JSON:
        documents = [job_document(result, {}) for result in results]
        emit_json(documents[0] if len(documents) == 1 else documents)
    else:
        for result in results:
            print_job(result, {})
    if any(result.status is not DispatchStatus.SUCCEEDED for result in results):
        raise typer.Exit(FAILED)


@jobs.command()
def expire(
    tenant: TenantArgument, job_ids: JobsArgument, dsn: DsnOption = None, output: OutputOption = Output.TABLE
) -> None:
    """Withdraw jobs: those that are pending or claimed end as expired.

    A handler that is at work on one is told at once. Exit code 3 where no job
    was ended: all had ended before, or there are none such.
    """
    counts = run_async(_expire, resolve_dsn(dsn), tenant, job_ids)
    if output is Output.JSON:
        emit_json([{"job_id": job_id, "expired": count} for job_id, count in counts.items()])
    else:
        for job_id, count in counts.items():
            note(f"{job_id}: {'withdrawn' if count else 'had ended before, or is unknown'}")
    if not any(counts.values()):
        raise typer.Exit(NOTHING_MATCHED)


async def _expire(dsn: str, tenant: str, job_ids: Sequence[UUID]) -> dict[UUID, int]:
    async with _client(dsn) as client:
        return {job_id: await client.tenant(tenant).mark_expired(job_id) for job_id in dict.fromkeys(job_ids)}


def _client(dsn: str) -> GatewayClient:
    # A command for one job is not there to tidy up after all others, nor to drain their events.
    off = OutboxDrainer(settings=OutboxSettings(drain_interval_sec=0))
    return GatewayClient(dsn, settings=GatewaySettings.load(sweep_interval_seconds=0), outbox=off)


@asynccontextmanager
async def _repository(dsn: str, tenant: str) -> AsyncIterator[RelayDispatchRepository]:
    """Lend the verbs on one connection: enough for a read, and quicker than a whole client."""
    conn = await connect(dsn, application_name="relay-dispatch jobs")
    try:
        await check_schema(conn, rooms=["dispatch"])
        yield RelayDispatchRepository(conn, tenant)
    finally:
        await close_connection(conn)
