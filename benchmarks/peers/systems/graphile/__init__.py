"""Graphile Worker (https://worker.graphile.org), in JavaScript: process.mjs feeds and works it.

Best, after its docs (performance, config): the settings of its own performance test, `concurrentJobs: 24`,
`maxPoolSize: 25`, `localQueue`, `completeJobBatchDelay: 0`, `failJobBatchDelay: 0`, but a local queue of 5000, which
was faster here than the test's 500, and 24 jobs than 10, and no delay than the 250 ms of the docs; `addJobs`.
Default: what `run()` and `makeWorkerUtils()` do when told nothing: one job at a time and a pool of 10. The line on
standard output for each job (`NO_LOG_SUCCESS`) is off in both.

It is installed by npm into a directory beside the virtual environment. The newest release needs node 22.18; an older
node gets the last one that supports it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from benchmarks.peers.model import AbsentError, Contender, System

__all__ = ["SYSTEM"]

_SCRIPT: Final = Path(__file__).with_name("process.mjs")
# The least version of node, and the release that is installed with it, the newest first.
_RELEASES: Final = (((22, 18), "0.18.0"), ((20, 0), "0.17.3"))


@cache
def _directory() -> Path:
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix, "peers-node")
    return Path(tempfile.mkdtemp(prefix="relay-dispatch-peers-"))


def _node() -> str:
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        raise AbsentError("there is no node, or no npm")
    return node


def _output(*command: str, seconds: int, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True, cwd=cwd)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise AbsentError(f"{Path(command[0]).name} {command[1]} failed: {said[-300:]}") from error
    return done.stdout.strip()


def _prepare() -> Mapping[str, str]:
    node = _output(_node(), "--version", seconds=30).removeprefix("v")
    here = tuple(int(part) for part in node.split(".")[:2])
    release = next((release for least, release in _RELEASES if here >= least), None)
    if release is None:
        raise AbsentError(f"needs node 20, this is {node}")
    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True)
    if _installed("graphile-worker") != release:
        directory.joinpath("package.json").write_text('{"private": true}\n')
        npm = shutil.which("npm") or "npm"
        _output(npm, "install", "--no-audit", "--no-fund", f"graphile-worker@{release}", seconds=300, cwd=directory)
    # Node looks for packages from where the script lies.
    shutil.copy(_SCRIPT, directory)
    return {"graphile-worker": release, "pg": _installed("pg") or "?", "node": node}


def _installed(package: str) -> str | None:
    try:
        return str(json.loads(_directory().joinpath("node_modules", package, "package.json").read_text())["version"])
    except (OSError, ValueError, KeyError):
        return None


def _command() -> Sequence[str]:
    return (_node(), str(_directory() / _SCRIPT.name))


async def _install(dsn: str, _: Contender) -> None:
    running = await asyncio.create_subprocess_exec(
        *_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    order = {"system": "graphile-worker", "role": "install", "dsn": dsn}
    said, _errors = await running.communicate(json.dumps(order).encode() + b"\n")
    if running.returncode:
        raise AbsentError(f"its migrations failed: {said.decode(errors='replace')[-300:]}")


_BEST: Final = {
    "concurrentJobs": 24,
    "maxPoolSize": 25,
    "localQueue": {"size": 5000},
    "completeJobBatchDelay": 0,
    "failJobBatchDelay": 0,
}

SYSTEM = System(
    name="graphile-worker",
    language="javascript",
    contenders=(
        Contender(
            "graphile-worker",
            "best",
            "concurrentJobs 24, pool of 25, localQueue 5000, completeJobBatchDelay 0",
            100_000,
            _BEST,
            {"maxPoolSize": 25, "batch": 10_000},
        ),
        Contender("graphile-worker", "default", "one job at a time, pool of 10", 3_000, {}, {"batch": 1000}),
    ),
    left="select exists (select from graphile_worker.jobs)",
    done=lambda _: None,
    prepare=_prepare,
    command=_command,
    install=_install,
)
