"""What the systems written in Python have in common: how their packages are found, and how a process is started."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.peers.model import AbsentError

__all__ = ["packages", "python_command"]


def packages(module: str, *names: str, least: tuple[int, int] = (3, 11)) -> Callable[[], Mapping[str, str]]:
    """Return what imports `module` and returns the versions of the packages `names`."""

    def prepare() -> Mapping[str, str]:
        if sys.version_info < least:
            wanted, here = ".".join(map(str, least)), ".".join(map(str, sys.version_info[:3]))
            raise AbsentError(f"needs Python {wanted}, this is {here} (make bench-peers PEERS_PYTHON=…)")
        try:
            importlib.import_module(module)
            return {name: importlib.metadata.version(name) for name in names}
        except (ImportError, importlib.metadata.PackageNotFoundError) as error:
            raise AbsentError(f"is not installed (pip install 'relay-dispatch[bench-peers]'): {error}") from error

    return prepare


def python_command() -> Sequence[str]:
    """Return the command of a child process."""
    return (sys.executable, "-m", "benchmarks.peers.child")
