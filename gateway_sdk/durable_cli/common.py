"""What the commands of `relay-dispatch durable` share: options, and the way to the database."""

from __future__ import annotations

import getpass
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar
from uuid import UUID

import typer

from dispatch_core.cli.common import Output, run_async
from dispatch_core.codec import check_name
from dispatch_core.database import close_connection, connect
from dispatch_core.durable_health import DurableHealth
from dispatch_core.durable_models import DurableJob
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import ConfigurationError, UnknownJobError
from dispatch_core.migrate import check_schema

__all__ = [
    "CHANNEL",
    "ActorOption",
    "JobArgument",
    "JobsArgument",
    "JsonOption",
    "LinesOption",
    "NoteOption",
    "Room",
    "TenantsOption",
    "format_of",
    "room_at",
    "run_lines",
    "who",
]

_CUT_SECONDS: Final = 0.5

T = TypeVar("T")

CHANNEL: Final = "cli"
"""By which way a decision came, as the timeline tells it."""

JobArgument = Annotated[UUID, typer.Argument(metavar="JOB_ID")]
JobsArgument = Annotated[list[UUID], typer.Argument(metavar="JOB_ID…")]
TenantsOption = Annotated[
    list[str] | None,
    typer.Option("--tenant", metavar="TENANT", help="Only this tenant's jobs; repeatable. Else all the login's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as --output json.")]
LinesOption = Annotated[bool, typer.Option("--json", help="The same as --output json: one document a line.")]
ActorOption = Annotated[
    str | None,
    typer.Option("--actor", metavar="NAME", help="Who decides, for the timeline; else your name on this machine."),
]
NoteOption = Annotated[str | None, typer.Option("--note", metavar="TEXT", help="Why, for the timeline.")]


def format_of(output: Output, json: bool) -> Output:
    """Return how to print the result: `--json` says the same as `--output json`."""
    return Output.JSON if json else output


def run_lines(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run what prints a line after the other; where nobody reads them any more (`| head`), end as other programs do."""
    try:
        return run_async(function, *args)
    except Exception as error:
        if not _is_broken_pipe(error):
            raise
        # Else the interpreter tries to write the rest at its end, and complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None


def _is_broken_pipe(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_is_broken_pipe, error.exceptions))
    return isinstance(error, BrokenPipeError)


def who(actor: str | None) -> str | None:
    """Return who decides: as was said, else the account that runs this; None where it has no name."""
    if actor is not None:
        return check_name("--actor", actor)
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return None


@dataclass(frozen=True)
class Room:
    """The verbs, and whose jobs are looked at."""

    verbs: DurableRepository
    health: DurableHealth
    named: Sequence[str] | None

    async def tenants(self) -> list[str]:
        """Return the tenants that were named, else all that the login may see."""
        if self.named:
            return [check_name("tenant", name) for name in dict.fromkeys(self.named)]
        return await self.health.tenants()

    async def tenant_of(self, job_id: UUID) -> str | None:
        """Find out whose job it is; None: nobody's whom the login may see.

        Raises: ConfigurationError where two tenants have one of that id.
        """
        found = await self.health.locate(await self.tenants(), job_id)
        if len(found) > 1:
            raise ConfigurationError(f"both {found[0]} and {found[1]} have a job {job_id}: name one by --tenant")
        return found[0] if found else None

    async def require(self, job_id: UUID) -> str:
        """Find out whose job it is. Raises: UnknownJobError."""
        tenant = await self.tenant_of(job_id)
        if tenant is None:
            raise UnknownJobError(f"there is no job {job_id}, or it is of a tenant that this login may not see")
        return tenant

    async def job(self, tenant: str, job_id: UUID) -> DurableJob:
        """Read a job with its counters of this moment. Raises: UnknownJobError where it is gone meanwhile."""
        found = await self.verbs.jobs(tenant, [job_id], fresh=True)
        if not found:
            raise UnknownJobError(f"job {job_id} is gone: it was removed, its retention being over")
        return found[0]


@asynccontextmanager
async def room_at(
    dsn: str, tenants: Sequence[str] | None, *, command_timeout: float | None = None
) -> AsyncIterator[Room]:
    """Lend the verbs on one connection; `command_timeout` seconds for each."""
    # Without one: to read millions may take its time, and a person can stop it.
    conn = await connect(dsn, command_timeout=command_timeout, application_name="relay-dispatch durable")
    try:
        await check_schema(conn, rooms=["durable"])
        yield Room(DurableRepository(conn), DurableHealth(conn), tenants)
    except BaseException:
        # Behind a black hole the listener of `watch` has had its two seconds before this one.
        await close_connection(conn, _CUT_SECONDS)
        raise
    await close_connection(conn)
