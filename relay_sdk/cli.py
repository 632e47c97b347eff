"""`relay-dispatch relay run`: run the relays that modules hold, until told to stop."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from dispatch_core.cli.common import DsnOption, Output, OutputOption, emit_table
from dispatch_core.codec import check_name
from dispatch_core.settings import CoreSettings
from relay_sdk.load import load_relays
from relay_sdk.relay import Relay
from relay_sdk.runner import main

__all__ = ["relay"]

relay = typer.Typer(help="Run relays.", no_args_is_help=True)

_COUNTS = ("jobs_succeeded", "jobs_failed", "jobs_expired", "jobs_retried", "jobs_released", "jobs_lost")
_CHUNK_COUNTS = ("chunks_done", "chunks_failed", "chunks_retried", "chunks_released", "chunks_lost")


class LogLevel(str, Enum):  # noqa: UP042  (as in common)
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@relay.callback()
def _group() -> None:
    pass  # so that typer keeps `run` a command although it is the only one


@relay.command()
def run(
    targets: Annotated[
        list[str], typer.Argument(metavar="MODULE:RELAY", help="Where the relays are, as in myapp.relays:erp.")
    ],
    drain: Annotated[
        bool, typer.Option("--drain", help="Work off what there is, what is soon to be tried again too, and end.")
    ] = False,
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", help="Serve this tenant, instead of those in the code; repeatable.")
    ] = None,
    app_dir: Annotated[
        Path,
        typer.Option("--app-dir", metavar="DIR", help="Look for modules here first.", file_okay=False, exists=True),
    ] = Path(),
    log_level: Annotated[LogLevel, typer.Option("--log-level", help="What is logged on stderr.")] = LogLevel.INFO,
    dsn: DsnOption = None,
    stop_with_stdin: Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run one or several relays in this process, until SIGTERM or SIGINT.

    On the first signal no more jobs are claimed, and handlers get the grace
    period (RELAY_GRACE_SECONDS, 30) to finish; on the second they get none.
    What was not finished is free for another relay at once. At the end what
    was done is printed; with --output json as one document a line, the first
    of which says that the relays are ready.

    Exit code 0 after a signal or a drain, 1 where a relay failed, 2 where a
    relay cannot be loaded, 4 schema mismatch, 5 database unreachable.

    Examples:
      relay-dispatch relay run myapp.relays:erp
      relay-dispatch relay run myapp.relays:erp myapp.relays:archive
      relay-dispatch relay run myapp.relays:erp --tenant acme --drain
    """
    logging.basicConfig(
        level=log_level.value.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    # This process is ours, and a job in hand is a handful of objects that live for a moment: at Python's thresholds the
    # collector takes a fifth of the time. Before the application is loaded, which may have its own.
    gc.set_threshold(20_000, 20, 50)
    relays = load_relays(targets, app_dir)
    for loaded in relays:
        if tenant:
            loaded.tenants = tuple(dict.fromkeys(check_name("tenant", name) for name in tenant))
        if dsn is not None:
            # A listening DSN of the environment belongs to the DSN of the environment.
            others = loaded.core.model_dump(exclude={"dsn", "listen_dsn"})
            loaded.core = CoreSettings.load(**others, dsn=dsn)
        if loaded.pool is None:
            loaded.core.require_dsn()
    report = _Report(relays, output)
    if stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, name="relay-dispatch stdin", daemon=True).start()
    main(relays, drain=drain)
    report.end()


def _stop_with_stdin() -> None:
    """Stop, in order, when whoever holds the other end of stdin has gone."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


class _Report:
    """Says when the relays are ready, and in the end what each instance of them has done."""

    def __init__(self, relays: Sequence[Relay], output: Output) -> None:
        self._relays = relays
        self._output = output
        self._instances: dict[str, Relay] = {}
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="relay-dispatch ready", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        # A first claim was answered, so it listens already. There is no event for it, and the event loop is not ours;
        # but a number can be read from any thread.
        def are_ready() -> bool:
            return all(
                (relay.metrics.claims or not relay.has_handlers)
                and (relay.metrics.chunk_claims or not relay.chunk_kinds)
                for relay in self._relays
            )

        while not are_ready():
            if self._over.wait(0.02) and not are_ready():
                return
        self._instances = {str(relay.instance_id): relay for relay in self._relays}
        if self._output is Output.JSON:
            self._say({"event": "ready", "pid": os.getpid(), "instances": list(self._instances)})

    def end(self) -> None:
        """Print the counts, after what is said of the start: a short drain may be over before that."""
        self._over.set()
        self._watcher.join()
        if self._output is Output.JSON:
            counts = {
                instance: {"relay": relay.relay_id, **relay.metrics.as_dict()}
                for instance, relay in self._instances.items()
            }
            self._say({"event": "end", "pid": os.getpid(), "instances": counts})
        else:
            names = _COUNTS
            if any(relay.chunk_kinds for relay in self._relays):
                names = (*(_COUNTS if any(relay.has_handlers for relay in self._relays) else ()), *_CHUNK_COUNTS)
            rows = [[relay.relay_id, *(getattr(relay.metrics, name) for name in names)] for relay in self._relays]
            emit_table(["relay", *(name.removeprefix("jobs_").replace("_", " ") for name in names)], rows)

    def _say(self, document: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()
