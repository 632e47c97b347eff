"""`relay-dispatch outbox drain`: deliver what is due, once or until told to stop."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import anyio
import typer
from anyio.abc import TaskStatus
from rich.table import Column

from dispatch_core.cli.common import (
    FAILED,
    Output,
    OutputOption,
    emit_json,
    emit_table,
    foreseen_in,
    note,
    resolve_dsn,
    run_async,
)
from dispatch_core.cli.load import load_attribute
from dispatch_core.codec import check_name
from dispatch_core.database import close_connection, connect
from dispatch_core.errors import ConfigurationError, SchemaMismatchError, TenancyDeniedError
from dispatch_core.migrate import check_schema
from dispatch_core.outbox import DrainReport
from dispatch_core.settings import CoreSettings, OutboxSettings
from dispatch_core.task_groups import TaskGroup
from gateway_sdk.cli_words import amount, parse_age, printable, progress
from gateway_sdk.client import GatewayClient
from gateway_sdk.outbox import OutboxDrainer
from gateway_sdk.outbox_cli.common import DsnOption, JsonOption, TenantsOption, format_of, outbox_dsn, verbs_at
from gateway_sdk.outbox_sinks import DispatchSink, OutboxRoute
from gateway_sdk.settings import GatewaySettings

__all__ = ["drain"]

WATCH_SECONDS: Final = 5.0
"""Between two looks of --watch, where OUTBOX_DRAIN_INTERVAL_SEC says nothing; wake-ups come between."""
TICK_SECONDS: Final = 0.2

_COUNTS: Final = ("claimed", "delivered", "failed", "parked", "released", "stale", "expired", "reclaimed")


def parse_route(value: str) -> tuple[str, OutboxRoute]:
    """Return the kind and the route of `kind=relay/operation[;ttl=AGE][;max_attempts=N]`."""
    target, *options = value.split(";")
    kind, equals, place = target.partition("=")
    relay, slash, operation = place.partition("/")
    if not (kind and equals and relay and slash and operation):
        raise typer.BadParameter(f"--route must be kind=relay/operation, not {value!r}")
    more: dict[str, Any] = {}
    for option in options:
        name, _, text = option.partition("=")
        if name == "ttl":
            more["ttl"] = parse_age(text)
        elif name == "max_attempts" and text.isdecimal():
            more["max_attempts"] = int(text)
        else:
            raise typer.BadParameter(f"--route takes ttl=1h and max_attempts=3, not {option!r}")
    return kind, OutboxRoute(relay, operation, **more)


def drain(
    route: Annotated[
        list[str] | None,
        typer.Option(
            "--route",
            metavar="KIND=RELAY/OPERATION",
            help="Make dispatch jobs of events of this kind; repeatable, instead of OUTBOX_ROUTES. "
            "More after semicolons: ;ttl=1h;max_attempts=3",
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            "--app", metavar="MODULE:DRAINER", help="An OutboxDrainer of yours, with its own sinks and database."
        ),
    ] = None,
    app_dir: Annotated[
        Path,
        typer.Option("--app-dir", metavar="DIR", help="Look for modules here first.", file_okay=False, exists=True),
    ] = Path(),
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until SIGTERM or SIGINT.")] = False,
    tenant: TenantsOption = None,
    dsn: DsnOption = None,
    dispatch_dsn: Annotated[
        str | None,
        typer.Option(
            "--dispatch-dsn",
            metavar="DSN",
            help="The database that the jobs go to; RELAY_DISPATCH_DSN, else that of the outbox.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell why each delivery failed, on stderr.")] = False,
    json: JsonOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Deliver events until nothing is due, or with --watch until told to stop.

    Where they go: by --route, else by OUTBOX_ROUTES, they become dispatch jobs;
    by --app they go to the sinks of a drainer of yours. Events of other kinds are
    left alone. What fails is tried again after a pause, here or by any drainer.
    Any number of drainers may run at once. It needs a login that is granted as
    gateway (operators do not drain).

      claimed    the sum of the five that follow
      delivered  gone from the outbox
      failed     to be tried again; an event that fails twice counts twice
      parked     given up: outbox list --state parked
      released   not tried, and open again
      stale      not written: another drainer, or a person, was quicker
      expired    parked unclaimed: first tried too long ago
      reclaimed  taken back from drainers that did not answer

    Exit code 0 where all that was tried was delivered (or nothing was due), 1
    where some failed, were parked or stale.

    Examples:
      relay-dispatch outbox drain --route 'order.placed=erp/PostOrder;ttl=1h'
      relay-dispatch outbox drain --app myapp.events:drainer --watch
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, stream=sys.stderr, format="%(levelname)s: %(message)s"
    )
    # They tell the whole URL of each request, and that of a webhook is a secret often.
    for library in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(library).setLevel(logging.WARNING)
    if app is not None and (route or tenant or dsn or dispatch_dsn):
        raise typer.BadParameter("with --app the drainer itself says its database, tenants and sinks")
    if app is not None:
        drainer = load_attribute(app, app_dir, OutboxDrainer, word="drainer", example="myapp.events:drainer")
        # What it does with OUTBOX_ROUTES goes the gateway's way.
        what = _What(drainer, None, {}, None, None)
    else:
        what = _made(route, tenant, outbox_dsn(dsn), dispatch_dsn)
    if watch and not what.drainer.is_on:
        what.drainer.settings = what.drainer.settings.model_copy(update={"drain_interval_sec": WATCH_SECONDS})
    try:
        ended = run_async(_drain, what, watch)
    except Exception as error:
        if isinstance(denied := foreseen_in(error), TenancyDeniedError):
            raise TenancyDeniedError(
                f"{denied}; to drain, it needs a grant as gateway; operators do not drain"
            ) from error
        raise
    _report(ended, format_of(output, json), verbose=verbose)
    if ended.signal is not None and not watch:
        raise typer.Exit(128 + ended.signal)
    if not _all_is_well(ended.report):
        raise typer.Exit(FAILED)


@dataclass(frozen=True)
class _What:
    """What is to be drained, and whereto; without a DSN it is a drainer of somebody's own."""

    drainer: OutboxDrainer
    dsn: str | None
    routes: dict[str, OutboxRoute]
    tenants: list[str] | None
    dispatch_dsn: str | None
    is_one: bool = False
    """Whether nobody has said where the jobs go, so that it is the database of the events."""


@dataclass(frozen=True)
class _Ended:
    report: DrainReport
    signal: int | None
    left: list[str]
    """Kinds with something due that nothing here delivers."""


def _made(routes: Sequence[str] | None, tenants: Sequence[str] | None, dsn: str, dispatch_dsn: str | None) -> _What:
    settings = OutboxSettings.load()
    parsed = dict(map(parse_route, routes)) if routes else {}
    if routes is not None and len(parsed) < len(routes):
        raise typer.BadParameter("a kind has two routes")
    if not parsed:
        parsed = _routes_of(settings)
    if not parsed:
        raise ConfigurationError("nobody to deliver to: give --route, OUTBOX_ROUTES, or --app with a drainer of yours")
    names = [check_name("tenant", name) for name in dict.fromkeys(tenants)] if tenants else None
    drainer = OutboxDrainer(dsn, settings=settings, tenants=names)
    is_one = dispatch_dsn is None and not CoreSettings.load().dsn
    return _What(drainer, dsn, parsed, names, resolve_dsn(dsn if is_one else dispatch_dsn), is_one)


def _routes_of(settings: OutboxSettings) -> dict[str, OutboxRoute]:
    return {
        kind: OutboxRoute(route.relay, route.operation, route.ttl_seconds, route.max_attempts, route.headers or None)
        for kind, route in settings.routes.items()
    }


@asynccontextmanager
async def _with_sinks(what: _What) -> AsyncIterator[OutboxDrainer]:
    """Lend the drainer, with a client behind its routes."""
    drainer = what.drainer
    # As in a gateway: there OUTBOX_ROUTES are for the kinds that have no sink.
    routes = what.routes or ({} if drainer.default_sink is not None else _routes_of(drainer.settings))
    if not routes:
        yield drainer
        return
    # The client is for the sink alone: it tidies nothing, and drains nothing beside us.
    off = OutboxSettings.load().model_copy(update={"drain_interval_sec": 0.0, "routes": {}})
    quiet = OutboxDrainer(settings=off)
    settings = GatewaySettings.load(sweep_interval_seconds=0)
    if what.is_one and what.dsn is not None:
        await _look_for_dispatch(what.dsn)
    async with GatewayClient(what.dispatch_dsn, settings=settings, outbox=quiet) as client:
        sink = DispatchSink(client, routes)
        if what.dsn is None:
            drainer.set_default_sink(sink)
        else:
            for kind in routes:
                drainer.add_sink(kind, sink)
        yield drainer


async def _look_for_dispatch(dsn: str) -> None:
    """Raise where jobs cannot go to the database of the events; who has two has forgotten to name the other."""
    conn = await connect(dsn, application_name="relay-dispatch events")
    try:
        await check_schema(conn, rooms=["outbox"])
        try:
            await check_schema(conn, rooms=["dispatch"])
        except SchemaMismatchError as error:
            raise SchemaMismatchError(
                f"jobs would go to the database of the events, and cannot ({error}); "
                "are they to go to another one? give --dispatch-dsn or RELAY_DISPATCH_DSN"
            ) from error
    finally:
        await close_connection(conn)


async def _drain(what: _What, watch: bool) -> _Ended:
    drainer = what.drainer
    caught: list[int] = []
    try:
        async with _with_sinks(what), TaskGroup() as group:
            if threading.current_thread() is threading.main_thread():  # else signals are somebody else's
                await group.start(_catch, caught, group.cancel_scope)
            group.start_soon(_show, drainer, None if watch else await _due(what))
            if watch:
                note("draining; SIGTERM or Ctrl-C ends it")
                await drainer.run()
            else:
                await drainer.drain_all()
            group.cancel_scope.cancel()
    except BaseException:
        if drainer.total.claimed:
            note(f"before that, {drainer.total.delivered:,} of {drainer.total.claimed:,} claimed events were delivered")
        raise
    return _Ended(drainer.total, caught[0] if caught else None, [] if caught else await _left(what))


async def _catch(caught: list[int], scope: anyio.CancelScope, *, task_status: TaskStatus[None]) -> None:
    """End the drain in order at a signal: what is at hand is settled as far as it got, and the rest is free at once."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            caught.append(number)
            scope.cancel()


async def _show(drainer: OutboxDrainer, total: int | None) -> None:
    with progress("draining", total) as tell:
        while True:
            tell(drainer.total.claimed - drainer.total.released)
            await anyio.sleep(TICK_SECONDS)


async def _due(what: _What) -> int | None:
    """Count what is due, for the bar; nothing where there is none, or where counting is somebody else's."""
    if what.dsn is None or not sys.stderr.isatty():
        return None
    async with verbs_at(what.dsn) as verbs:
        rows = [row for tenant in what.tenants or await verbs.tenants() for row in await verbs.status(tenant)]
    return sum(int(row["due"]) + int(row["waiting"]) for row in rows if row["kind"] in what.routes)


async def _left(what: _What) -> list[str]:
    """Return the kinds that have something due and no sink here."""
    if what.dsn is None:
        return []
    async with verbs_at(what.dsn) as verbs:
        rows = await verbs.health(what.tenants or await verbs.tenants())
    return sorted({kind for row in rows for kind in row["due_kinds"] or () if kind not in what.routes})


# --- how it ended -----------------------------------------------------------------------------------------------------


def _report(ended: _Ended, output: Output, *, verbose: bool) -> None:
    report = ended.report
    if output is Output.JSON:
        emit_json({**asdict(report), "left_kinds": ended.left})
    elif report == DrainReport():
        note("nothing was due")
    else:
        emit_table([Column(name, justify="right") for name in _COUNTS], [[f"{getattr(report, n):,}" for n in _COUNTS]])
    if report.failed:
        why = "" if verbose else " (-v tells why)"
        note(f"{amount(report.failed, 'delivery', 'deliveries')} failed, to be tried again after a pause{why}")
    if report.parked or report.expired:
        note(f"{amount(report.parked + report.expired)} parked: relay-dispatch outbox list --state parked")
    if report.stale:
        note(
            f"what became of {amount(report.stale)} was not written: somebody else was quicker, or the outage too long"
        )
    if ended.left:
        kinds = ", ".join(map(printable, ended.left[:5])) + (" …" if len(ended.left) > 5 else "")
        note(f"left alone, since they have no route: events of kind {kinds}")
    if ended.signal is not None:
        note("stopped; of the batches at hand nothing is counted here")


def _all_is_well(report: DrainReport) -> bool:
    return not (report.failed or report.parked or report.stale or report.expired)
