"""`relay-dispatch outbox status | list | show`: look at events; nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import Annotated
from uuid import UUID

import typer

from dispatch_core.cli.common import NOTHING_MATCHED, Output, OutputOption, emit_json, note, run_async
from dispatch_core.settings import OutboxSettings
from gateway_sdk.cli_text import waiting
from gateway_sdk.cli_words import amount, parse_age
from gateway_sdk.outbox_cli.common import (
    COUNTED,
    DsnOption,
    JsonOption,
    KeyOption,
    KindOption,
    Row,
    TenantsOption,
    count_events,
    format_of,
    locate,
    outbox_dsn,
    tenants_of,
    verbs_at,
)
from gateway_sdk.outbox_cli.text import (
    SHOWN_CHARS,
    emit_event_json,
    emit_events_json,
    print_event,
    print_events,
    print_status,
    status_document,
)

__all__ = ["list_", "show", "status"]


class State(str, Enum):  # noqa: UP042  (as in common)
    """Where an event stands."""

    READY = "ready"
    WAITING = "waiting"
    CLAIMED = "claimed"
    PARKED = "parked"


def status(
    tenant: TenantsOption = None,
    kind: KindOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many rows in the table.")] = 50,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Count events by tenant and kind; those that need a person come first.

      ready     due: a drainer takes them next
      later     delayed, or backing off after a failure
      waiting   behind another event of their key
      claimed   on their way; stale where their drainer has not answered
                for OUTBOX_STALE_CLAIM_SECONDS (300)
      parked    given up: nothing happens to them until a person retries
                or purges them
      attempts  the most failures of one that is not parked
      due for   how long the one that is due for longest has been so
      oldest    how old the oldest is that is not parked

    It counts every row: with millions of them it takes seconds.

    Exit code 0, also where the outbox is empty; 3 where --tenant or --kind
    matched nothing.

    Examples:
      relay-dispatch outbox status
      relay-dispatch outbox status --json | jq '.[] | select(.parked > 0)'
    """
    rows = run_async(_status, outbox_dsn(dsn), tenant, kind)
    if format_of(output, json) is Output.JSON:
        emit_json([status_document(row) for row in rows])
    elif rows:
        print_status(rows, limit)
    if rows:
        parked = sum(row["parked"] for row in rows)
        if parked:
            note(f"{amount(parked)} parked: see them with relay-dispatch outbox list --state parked")
        return
    note("no such event" if tenant or kind else "the outbox is empty")
    if tenant or kind:
        raise typer.Exit(NOTHING_MATCHED)


async def _status(dsn: str, tenants: Sequence[str] | None, kind: str | None) -> list[Row]:
    stale_seconds = OutboxSettings.load().stale_claim_seconds
    async with verbs_at(dsn) as verbs:
        with waiting("counting"):
            rows = [
                {"tenant": tenant, **row}
                for tenant in await tenants_of(verbs, tenants)
                for row in await verbs.status(tenant, stale_seconds=stale_seconds)
            ]
    return [row for row in rows if kind is None or row["kind"] == kind]


def list_(
    tenant: TenantsOption = None,
    state: Annotated[
        State | None,
        typer.Option(
            "--state",
            "-s",
            help="Only those that stand so; what status counts as later is ready here, with a due time ahead.",
        ),
    ] = None,
    kind: KindOption = None,
    key: KeyOption = None,
    older_than: Annotated[
        timedelta | None,
        typer.Option(
            "--older-than",
            metavar="AGE",
            parser=parse_age,
            help="Only those that were parked so long ago or, if they are not parked, written: 15m, 12h, 7d.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many.")] = 50,
    before: Annotated[
        UUID | None, typer.Option("--before", metavar="EVENT_ID", help="Only older ones: the last of the page before.")
    ] = None,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """List events, the newest first, each with the beginning of its payload and its last error.

    Exit code 3 where there are none.

    Examples:
      relay-dispatch outbox list --state parked
      relay-dispatch outbox list --tenant acme --key order-7
      relay-dispatch outbox list --state parked --json | jq -r '.[].event_id'
    """
    choice = {"state": state and state.value, "kind": kind, "key": key, "older_than": older_than}
    rows, more = run_async(_list, outbox_dsn(dsn), tenant, choice, limit, before)
    if format_of(output, json) is Output.JSON:
        emit_events_json(rows)
    elif rows:
        print_events(rows)
    if not rows:
        note("no such event")
        raise typer.Exit(NOTHING_MATCHED)
    if more:
        least = "more than " if more >= COUNTED else ""
        note(f"… and {least}{more:,} more: --before {rows[-1]['event_id']}")


async def _list(
    dsn: str, tenants: Sequence[str] | None, choice: Row, limit: int, before: UUID | None
) -> tuple[list[Row], int]:
    rows: list[Row] = []
    async with verbs_at(dsn) as verbs:
        names = await tenants_of(verbs, tenants)
        for tenant in names:
            found = await verbs.list_events(tenant, **choice, limit=limit, before=before, payload_chars=SHOWN_CHARS + 1)
            # Ids are of their time: so the newest of all tenants are those with the highest ones.
            rows = sorted([*rows, *({"tenant": tenant, **row} for row in found)], key=_by_id, reverse=True)[:limit]
        return rows, await count_events(verbs, names, before=rows[-1]["event_id"], **choice) if len(
            rows
        ) == limit else 0


def _by_id(row: Row) -> UUID:
    event_id: UUID = row["event_id"]
    return event_id


def show(
    event_id: Annotated[UUID, typer.Argument(metavar="EVENT_ID")],
    tenant: TenantsOption = None,
    payload: Annotated[
        bool, typer.Option("--payload", help="Write nothing but the payload, as JSON text, to stdout.")
    ] = False,
    dsn: DsnOption = None,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show all there is of one event: where it stands, why it failed, and its payload whole.

    Exit code 3 where there is none.

    Examples:
      relay-dispatch outbox show 01998d4e-…
      relay-dispatch outbox show 01998d4e-… --payload | jq .order
    """
    found = run_async(_show, outbox_dsn(dsn), tenant, event_id)
    if found is None:
        note(f"there is no event {event_id}: it was delivered or purged, or is of a tenant that this login may not see")
        raise typer.Exit(NOTHING_MATCHED)
    if payload:
        typer.echo(found["payload"])
    elif format_of(output, json) is Output.JSON:
        emit_event_json(found)
    else:
        print_event(found)


async def _show(dsn: str, tenants: Sequence[str] | None, event_id: UUID) -> Row | None:
    async with verbs_at(dsn) as verbs:
        for tenant, _ in (await locate(verbs, tenants, [event_id])).values():
            found = await verbs.show(tenant, event_id)
            return None if found is None else {"tenant": tenant, **found}
        return None
