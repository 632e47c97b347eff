"""Put the command line together, run it, and turn what goes wrong into a line and an exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from dispatch_core.cli.common import Output, OutputOption, emit_json, exit_code, foreseen_in, report_error
from dispatch_core.cli.signals import sigterm_exits
from dispatch_core.errors import ConfigurationError

__all__ = ["COMMANDS", "run"]

ENTRY_POINTS = "relay_dispatch.commands"

COMMANDS = {"db": "dispatch_core.cli.db:db", "doctor": "dispatch_core.cli.doctor:doctor"}
"""The groups of the core itself, imported like those of the SDKs: when they are asked for."""


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    try:
        with sigterm_exits():
            _application(arguments)(args=arguments, prog_name="relay-dispatch")
    except SystemExit as end:  # how typer ends, also after help and usage errors
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        foreseen = foreseen_in(error)
        if foreseen is None:
            raise
        report_error(foreseen)
        return exit_code(foreseen)
    return 0


def _application(arguments: list[str]) -> typer.Typer:
    app = typer.Typer(
        name="relay-dispatch",
        help="Hand work from a gateway to relays, on PostgreSQL alone.\n\n"
        "Ctrl-C and SIGTERM end a command in order, with exit code 130 and 143.",
        no_args_is_help=True,
        add_completion=False,
        # A pretty traceback shows local variables, and a DSN may be one of them.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root() -> None:
        pass  # so that typer keeps `version` a command even while it is the only one

    app.command("version")(_version)
    offered = _offered()
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    names = [wanted] if wanted in offered else [] if wanted == "version" else sorted(offered)
    for name in names:
        command = _load(name, offered[name], required=name == wanted)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        elif command is not None:
            app.command(name)(command)
    return app


def _offered() -> dict[str, str | EntryPoint]:
    offered: dict[str, str | EntryPoint] = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    return offered | COMMANDS


def _load(name: str, where: str | EntryPoint, *, required: bool) -> typer.Typer | Callable[..., Any] | None:
    try:
        if isinstance(where, EntryPoint):
            return where.load()  # type: ignore[no-any-return]
        module, _, attribute = where.partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        problem = f"the command `{name}` cannot be loaded: {error}"
        if required:
            raise ConfigurationError(problem) from error
        print(f"warning: {problem}", file=sys.stderr)
        return None


def _version(output: OutputOption = Output.TABLE) -> None:
    """Print the version, and the protocol that it needs in the database."""
    from dispatch_core.migrate.compare import package_version
    from dispatch_core.migrate.files import load

    protocol = load().protocol
    if output is Output.JSON:
        emit_json({"version": package_version(), "protocol": protocol})
    else:
        print(f"relay-dispatch {package_version()} (protocol {protocol})")
