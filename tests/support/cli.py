"""Run the command line, within this process where that is enough and as a process of its own where it is not."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from dispatch_core.cli import app

COMMAND = [sys.executable, "-m", "dispatch_core.cli"]


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Stdout as the one JSON document that it must be."""
        return json.loads(self.out)


async def run_cli(*arguments: str) -> Ended:
    """Run a command in a thread of this process, since it has an event loop of its own; it must show no traceback."""
    out, err = _Capture(), _Capture()

    def call() -> int:
        # For the whole process, so only where nothing else writes meanwhile.
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return app.run(list(arguments))

    code = await anyio.to_thread.run_sync(partial(call))
    ended = Ended(code, out.text, err.text)
    assert "Traceback" not in ended.err
    return ended


class _Capture(io.TextIOWrapper):
    """A text stream with a `buffer`, as stdout has."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    @property
    def text(self) -> str:
        raw: Any = self.buffer
        return str(raw.getvalue().decode())


def environment(**changes: str) -> dict[str, str]:
    """Return our environment without what is set in it for Relay Dispatch, and with `changes`."""
    prefixes = ("RELAY_", "GATEWAY_", "OUTBOX_", "DURABLE_")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)} | {"COLUMNS": "200"} | changes


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have processes that are started in the block heed SIGINT, as those do that a person starts.

    A shell without job control has what it starts in the background ignore it, and that is inherited: by us, where our
    tests were started so, and by all that we start. Python then installs no handler.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if is_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


async def spawn_cli(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: bytes | None = None, timeout: float = 60
) -> Ended:
    """Run a command as a process of its own, to its end."""
    with anyio.fail_after(timeout):
        done = await anyio.run_process(
            [*COMMAND, *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            env=environment(**(env or {})),
            check=False,
        )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())
