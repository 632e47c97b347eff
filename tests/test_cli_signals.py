"""What SIGTERM does to a command (exit code 143), and where it is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from dispatch_core.cli.common import run_async
from dispatch_core.cli.signals import TERMINATED, sigterm_exits


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


def tell() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_cancels_what_runs_once_and_then_exits() -> None:
    closed: list[str] = []

    async def command() -> None:
        try:
            tell()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                tell()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                closed.append("closed")

    with sigterm_exits(), pytest.raises(SystemExit) as caught:
        run_async(command)
    assert (caught.value.code, closed) == (TERMINATED, ["closed"]) == (143, ["closed"])


def test_sigterm_outside_of_the_event_loop_exits_too_also_after_it() -> None:
    async def command() -> int:
        return 7

    with sigterm_exits():
        assert run_async(command) == 7
        with pytest.raises(SystemExit) as caught:
            tell()
    assert caught.value.code == TERMINATED


def test_a_handler_of_somebody_elses_is_left_alone() -> None:
    heard: list[int] = []

    async def command() -> int:
        tell()
        await anyio.lowlevel.checkpoint()
        return 7

    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with sigterm_exits():
            assert run_async(command) == 7
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert heard == [signal.SIGTERM]


async def test_in_another_thread_signals_are_nobodys() -> None:
    async def command() -> int:
        return 7

    def call() -> int:
        with sigterm_exits():
            return run_async(command)

    assert await anyio.to_thread.run_sync(call) == 7


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs PID namespaces, of Linux")
def test_the_first_process_of_a_container_ends_at_sigterm() -> None:
    """The kernel keeps from it what it has no handler for."""
    code = (
        "import anyio, os\n"
        "from dispatch_core.cli.common import run_async\n"
        "from dispatch_core.cli.signals import sigterm_exits\n"
        "async def command():\n"
        "    print(os.getpid(), flush=True)\n"
        "    await anyio.sleep(600)\n"
        "with sigterm_exits():\n"
        "    run_async(command)\n"
    )
    # `kill` from within: the process outside has another number.
    shell = 'unshare --user --map-root-user --pid --fork --kill-child "$0" -c "$1"'
    process = subprocess.Popen(
        ["sh", "-c", shell, sys.executable, code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                pytest.skip("this machine lets nobody make a PID namespace")
            assert line.strip() == "1"
            (child,) = _children(process.pid)
            os.kill(child, signal.SIGTERM)
            assert process.wait(60) == TERMINATED
        finally:
            process.kill()


def _children(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [grand for child in found for grand in (_children(child) or [child])]
