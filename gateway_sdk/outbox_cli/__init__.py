"""`relay-dispatch outbox`: look at events, decide about those that were given up, and deliver what is due."""

from __future__ import annotations

import typer

from gateway_sdk.outbox_cli.decide import park, purge, retry
from gateway_sdk.outbox_cli.drain import drain
from gateway_sdk.outbox_cli.look import list_, show, status

__all__ = ["outbox"]

outbox = typer.Typer(
    help="Look at outbox events, retry, park and purge them, and deliver what is due.", no_args_is_help=True
)
outbox.command()(status)
outbox.command("list")(list_)
outbox.command()(show)
outbox.command()(drain)
outbox.command()(retry)
outbox.command()(park)
outbox.command()(purge)
