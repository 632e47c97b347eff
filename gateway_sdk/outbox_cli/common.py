"""What the commands of `relay-dispatch outbox` share: options, and the way to the database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, TypeAlias
from uuid import UUID

import typer

from dispatch_core.cli.common import Output, resolve_dsn
from dispatch_core.codec import check_name
from dispatch_core.database import close_connection, connect
from dispatch_core.errors import ConfigurationError
from dispatch_core.migrate import check_schema
from dispatch_core.outbox_repository import OutboxRepository
from dispatch_core.settings import OutboxSettings

__all__ = [
    "COUNTED",
    "DsnOption",
    "JsonOption",
    "KeyOption",
    "KindOption",
    "Located",
    "Row",
    "TenantsOption",
    "count_events",
    "format_of",
    "locate",
    "outbox_dsn",
    "tenants_of",
    "verbs_at",
]

Row: TypeAlias = dict[str, Any]

COUNTED: Final = 1_000_000
"""Events are counted no further than that."""

DsnOption = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        help="The database that holds the outbox, as a URL; OUTBOX_DSN or RELAY_DISPATCH_DSN where not given.",
    ),
]
TenantsOption = Annotated[
    list[str] | None,
    typer.Option("--tenant", metavar="TENANT", help="Only this tenant's events; repeatable. Else all the login's."),
]
KindOption = Annotated[str | None, typer.Option("--kind", "-k", help="Only events of this kind.")]
KeyOption = Annotated[str | None, typer.Option("--key", help="Only events of this key.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as --output json.")]


def format_of(output: Output, json: bool) -> Output:
    """Return how to print the result: `--json` says the same as `--output json`."""
    return Output.JSON if json else output


def outbox_dsn(dsn: str | None) -> str:
    """Return the DSN of the option, else of the outbox, else of the gateway.

    Raises: ConfigurationError where there is none.
    """
    own = OutboxSettings.load().dsn if dsn is None else None
    return resolve_dsn(
        dsn if own is None else own.get_secret_value() or None, settings="OUTBOX_DSN or RELAY_DISPATCH_DSN"
    )


@asynccontextmanager
async def verbs_at(dsn: str) -> AsyncIterator[OutboxRepository]:
    """Lend the verbs on one connection."""
    # To count millions may take its time; a person can stop it.
    conn = await connect(dsn, command_timeout=None, application_name="relay-dispatch events")
    try:
        await check_schema(conn, rooms=["outbox"])
        yield OutboxRepository(conn)
    finally:
        await close_connection(conn)


async def tenants_of(verbs: OutboxRepository, tenants: Sequence[str] | None) -> list[str]:
    """Return the tenants that were named, else all that the login may see."""
    if tenants:
        return [check_name("tenant", name) for name in dict.fromkeys(tenants)]
    return await verbs.tenants()


async def count_events(verbs: OutboxRepository, tenants: Sequence[str], **choice: Any) -> int:
    """Count the events of these tenants, no further than COUNTED."""
    count = 0
    for tenant in tenants:
        if count < COUNTED:
            count += await verbs.count(tenant, **choice, limit=COUNTED - count)
    return count


Located: TypeAlias = dict[UUID, tuple[str, str]]
"""Tenant and state."""


async def locate(verbs: OutboxRepository, tenants: Sequence[str] | None, event_ids: Sequence[UUID]) -> Located:
    """Find out whose events these are.

    Raises: ConfigurationError where two tenants have one of that id.
    """
    located: Located = {}
    for tenant, event_id, state in await verbs.locate(await tenants_of(verbs, tenants), event_ids):
        if event_id in located:
            raise ConfigurationError(
                f"both {located[event_id][0]} and {tenant} have an event {event_id}: name one by --tenant"
            )
        located[event_id] = (tenant, state)
    return located
