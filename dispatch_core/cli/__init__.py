"""The console command `relay-dispatch`.

The core has the groups `db` and `version`; the SDKs bring theirs through the entry-point group
``relay_dispatch.commands``, so that core imports no SDK. Only the group that is asked for is imported: starting a relay
does not load the gateway.

Exit codes: 0 ok, 1 failed, 2 usage, 3 nothing matched, 4 schema mismatch, 5 database unreachable, 130
ended by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]

_MISSING_EXTRA = "The command line needs the extra `cli`: pip install 'relay-dispatch[cli]'"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    try:
        import rich  # noqa: F401  (only to see that it is there)
        import typer  # noqa: F401
    except ImportError:
        print(_MISSING_EXTRA, file=sys.stderr)
        sys.exit(1)
    from dispatch_core.cli.app import run

    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))
