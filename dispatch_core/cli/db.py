"""`relay-dispatch db`: the schema, and who may use it."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from dispatch_core.cli.common import (
    FAILED,
    NOTHING_MATCHED,
    SCHEMA_MISMATCH,
    DsnOption,
    Output,
    OutputOption,
    emit_json,
    emit_table,
    note,
    resolve_dsn,
    run_async,
)
from dispatch_core.migrate import StepEvent, as_sql
from dispatch_core.migrate import grant as grant_login
from dispatch_core.migrate import migrate as apply_steps
from dispatch_core.migrate import plan as plan_steps
from dispatch_core.migrate import revoke as revoke_login
from dispatch_core.migrate import status as read_status
from dispatch_core.migrate import verify as find_problems
from dispatch_core.migrate.files import load

__all__ = ["db"]

db = typer.Typer(help="The schema in PostgreSQL, and the logins that may use it.", no_args_is_help=True)


def _rooms(names: list[str] | None) -> list[str] | None:
    unknown = sorted(set(names or ()) - set(load().rooms))
    if unknown:
        raise typer.BadParameter(f"no such room: {', '.join(unknown)}; there are: {', '.join(load().rooms)}")
    return names


OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="ROOM",
        callback=_rooms,
        help="Install only this room (dispatch, outbox, durable); may be repeated.",
    ),
]
OnlyLookOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="ROOM",
        callback=_rooms,
        help="This room must be there; may be repeated. Else: those that are.",
    ),
]


class Kind(str, Enum):  # noqa: UP042
    """What a login may act as."""

    GATEWAY = "gateway"
    WORKER = "worker"
    OPERATOR = "operator"


LoginArgument = Annotated[str, typer.Argument(metavar="LOGIN", help="A login role of PostgreSQL.")]
KindOption = Annotated[Kind, typer.Option("--as", help="What the login may act as.")]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="The tenant it may act for.")]
AllTenantsOption = Annotated[bool, typer.Option("--all-tenants", help="It may act for every tenant.")]
RelayOption = Annotated[str | None, typer.Option("--relay", help="The relay it may serve, if a worker.")]
AllRelaysOption = Annotated[bool, typer.Option("--all-relays", help="It may serve every relay, if a worker.")]


@db.command()
def migrate(
    dsn: DsnOption = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only tell what would be applied.")] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Print it all as a script for psql; needs no database.")] = False,
    only: OnlyOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Bring the schema to what this version needs; nothing happens where it is that already.

    A room is a part of the schema that can be installed alone: dispatch, outbox,
    durable. Without --only all are. A business database that only writes events
    needs --only outbox, and has nothing else of ours then.
    """
    if plan and sql:
        raise typer.BadParameter("--plan and --sql exclude each other")
    if sql:
        print(as_sql(only=only or None), end="")
        return
    if plan:
        steps = run_async(plan_steps, resolve_dsn(dsn), only=only or None)
        if output is Output.JSON:
            emit_json([{"step": s.name, "kind": s.kind, "transactional": s.transactional} for s in steps])
        elif steps:
            emit_table(
                ["step", "kind", "transaction"], [(s.name, s.kind, "yes" if s.transactional else "no") for s in steps]
            )
        else:
            note("nothing to apply")
        return
    report = run_async(apply_steps, resolve_dsn(dsn), only=only or None, on_step=_tell)
    if output is Output.JSON:
        emit_json(report)
    elif report.applied:
        emit_table(["applied"], [(name,) for name in report.applied])
    else:
        note("nothing to apply")


def _tell(event: StepEvent) -> None:
    match event.phase:
        case "waiting":
            note(f"waiting for {event.detail}, which is migrating this database")
        case "start":
            note(f"{event.step} …")
        case "retry":
            note(f"{event.step}: trying again ({event.detail})")
        case "done":
            note(f"{event.step}: done in {event.detail}")


@db.command()
def status(dsn: DsnOption = None, only: OnlyLookOption = None, output: OutputOption = Output.TABLE) -> None:
    """Tell where the schema stands; exit code 4 where this version cannot use it."""
    found = run_async(read_status, resolve_dsn(dsn), only=only or None)
    if output is Output.JSON:
        emit_json(found)
    else:
        emit_table(
            ["step", "kind", "state", "applied at", "by", "with", "ms"],
            [(s.step, s.kind, s.state, s.applied_at, s.applied_by, s.applied_with, s.duration_ms) for s in found.steps],
            title=f"database {found.database}, PostgreSQL {found.server_version}: {found.state}",
        )
    note(found.message)
    if found.missing_roles:
        note(f"missing roles: {', '.join(found.missing_roles)}")
    if not found.usable:
        raise typer.Exit(SCHEMA_MISMATCH)


@db.command()
def verify(dsn: DsnOption = None, only: OnlyLookOption = None, output: OutputOption = Output.TABLE) -> None:
    """Look for owners, rights, row security and indexes that are not as the migrations made them."""
    problems = run_async(find_problems, resolve_dsn(dsn), only=only or None)
    if output is Output.JSON:
        emit_json({"ok": not problems, "problems": problems})
    elif problems:
        emit_table(["problem"], [(problem,) for problem in problems])
    else:
        note("the schema is as the migrations made it")
    if problems:
        raise typer.Exit(FAILED)


@db.command()
def grant(
    login: LoginArgument,
    kind: KindOption,
    tenant: TenantOption = None,
    all_tenants: AllTenantsOption = False,
    relay: RelayOption = None,
    all_relays: AllRelaysOption = False,
    dsn: DsnOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let a login act for a tenant, and a worker serve a relay; it may do nothing before.

    The login is one that PostgreSQL has (create role … login). --dsn is that of a login that migrates, not of this one.
    """
    scope = _scope(kind, tenant, all_tenants, relay, all_relays)
    run_async(grant_login, resolve_dsn(dsn), login, role=kind.value, tenant=tenant, relay=relay)
    if output is Output.JSON:
        emit_json({"login": login, "as": kind.value, "tenant": tenant, "relay": relay})
    note(f"{login} may act as {kind.value} for {scope}")


@db.command()
def revoke(
    login: LoginArgument,
    kind: KindOption,
    tenant: TenantOption = None,
    all_tenants: AllTenantsOption = False,
    relay: RelayOption = None,
    all_relays: AllRelaysOption = False,
    dsn: DsnOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Take back exactly what `grant` gave with the same options; exit code 3 where there was no such grant."""
    scope = _scope(kind, tenant, all_tenants, relay, all_relays)
    removed = run_async(revoke_login, resolve_dsn(dsn), login, role=kind.value, tenant=tenant, relay=relay)
    if output is Output.JSON:
        emit_json({"login": login, "as": kind.value, "tenant": tenant, "relay": relay, "removed": removed})
    if not removed:
        note(f"{login} was not granted {kind.value} for {scope}")
        raise typer.Exit(NOTHING_MATCHED)
    note(f"{login} may no longer act as {kind.value} for {scope}")


def _scope(kind: Kind, tenant: str | None, all_tenants: bool, relay: str | None, all_relays: bool) -> str:
    """Check that the scope was said in words: no right that reaches everywhere comes from an option left out."""
    if (tenant is None) == (not all_tenants):
        raise typer.BadParameter("give either --tenant or --all-tenants")
    if kind is not Kind.WORKER and (relay is not None or all_relays):
        raise typer.BadParameter("--relay and --all-relays are for workers only")
    if relay is not None and all_relays:
        raise typer.BadParameter("give either --relay or --all-relays")
    if kind is Kind.WORKER and relay is None and not all_relays:
        raise typer.BadParameter("give either --relay or --all-relays: a worker serves relays")
    tenants = "every tenant" if tenant is None else f"tenant {tenant}"
    if kind is not Kind.WORKER:
        return tenants
    return f"{tenants} and {'every relay' if relay is None else f'relay {relay}'}"
