"""A process of a system under test, seen from the run: orders go in and lines come out, whatever it is written in.

It is told what to do by one JSON document on its standard input, not on its command line, because DSNs carry passwords.
Its lines begin with MARK, all others are its own business:

    ready              connected, or for a worker: loaded
    go          (in)   begin
    started            a worker has been started
    all                a worker's handler has been called as often as was expected
    stop        (in)   a worker ends, when it has given back what it holds
    result JSON        the last line
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.model import SampleFailedError

__all__ = ["MARK", "Process", "process"]

MARK: Final = "@peers "
_ROOT: Final = Path(__file__).resolve().parents[2]
# Longer than any sample should last; a process that says nothing for so long stands still.
_PATIENCE: Final = 120.0


class Process:
    """A process that was given its order."""

    def __init__(self, running: asyncio.subprocess.Process, name: str, errors: Path) -> None:
        self._running = running
        self._name = name
        self._errors = errors

    async def expect(self, *words: str, patience: float = _PATIENCE) -> str:
        """Hear each of `words` once, in whatever order, and nothing else; return what stands behind the last of them.

        Raises: SampleFailedError, when another line comes, or none.
        """
        assert self._running.stdout is not None
        awaited = " and ".join(map(repr, words))
        missing = set(words)
        try:
            async with asyncio.timeout(patience):
                while line := (await self._running.stdout.readline()).decode():
                    if line.startswith(MARK):
                        found, _, rest = line[len(MARK) :].strip().partition(" ")
                        if found not in missing:
                            raise SampleFailedError(f"{self._name} said {found!r} in place of {awaited}")
                        missing.discard(found)
                        if not missing:
                            return rest
        except TimeoutError:
            raise SampleFailedError(f"{self._name} did not say {awaited} in {patience:.0f} s{self._last()}") from None
        raise SampleFailedError(f"{self._name} ended before it said {awaited}{self._last()}")

    async def tell(self, word: str) -> None:
        """Send one line."""
        assert self._running.stdin is not None
        self._running.stdin.write(word.encode() + b"\n")
        await self._running.stdin.drain()

    async def result(self) -> Any:
        """Return the value of the last line."""
        return json.loads(await self.expect("result"))

    def _last(self) -> str:
        text = self._errors.read_text(errors="replace").strip()
        return f": {text[-500:]}" if text else ""


@asynccontextmanager
async def process(command: Sequence[str], order: Mapping[str, Any]) -> AsyncIterator[Process]:
    """Start a process and give it its order; it is gone when the block ends."""
    with tempfile.TemporaryDirectory() as directory:
        errors = Path(directory, "errors")
        with errors.open("wb") as stream:  # noqa: ASYNC230 - nothing else goes on in this loop
            running = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stream,
                cwd=_ROOT,
                # Of graphile-worker: no line on standard output for each job. Others do not know it.
                env={**os.environ, "NO_LOG_SUCCESS": "1"},
                limit=64 * 1024 * 1024,
            )
        handle = Process(running, f"{order['system']}'s {order['role']}", errors)
        try:
            await handle.tell(json.dumps(order))
            yield handle
        finally:
            assert running.stdin is not None
            running.stdin.close()
            try:
                await asyncio.wait_for(running.wait(), 10)
            except TimeoutError:
                running.kill()
                await running.wait()
