"""`relay-dispatch durable`: look at durable jobs, watch them, and decide about them."""

from __future__ import annotations

import typer

from gateway_sdk.durable_cli.control import cancel, pause, resume, retry
from gateway_sdk.durable_cli.look import list_, show
from gateway_sdk.durable_cli.resolve import resolve
from gateway_sdk.durable_cli.timeline import errors, events
from gateway_sdk.durable_cli.watch import watch

__all__ = ["durable"]

durable = typer.Typer(
    help="Look at durable jobs, watch them, pause, resume, cancel and retry them, and decide about their chunks.",
    no_args_is_help=True,
)
durable.command("list")(list_)
durable.command()(show)
durable.command()(watch)
durable.command()(events)
durable.command()(errors)
durable.command()(pause)
durable.command()(resume)
durable.command()(cancel)
durable.command()(retry)
durable.command()(resolve)
