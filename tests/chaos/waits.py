"""How long processes could have run and had no CPU: what a machine's other work takes from a run.

Linux counts it for each process (the second number of /proc/PID/schedstat). What took some seconds less that is a time
in which the processes could have run, and so says the same on a machine that is busy. Elsewhere nothing is counted.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["OURS", "Meter", "Waits"]

OURS: Final = ""
"""Stands for the rig's own process: all bytes of all processes go through it."""

_BACKEND: Final = re.compile(rb"^postgres: (?:[^:]+: )?(\w+) ")


class Waits:
    """Whose processes have waited how long since the beginning, at moments of the monotonic clock."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._totals: dict[str, list[float]] = {}

    def note(self, at: float, totals: Mapping[str, float]) -> None:
        """Take seconds by owner, as counted at that moment."""
        for owner in totals:
            self._totals.setdefault(owner, [0.0] * len(self._at))
        self._at.append(at)
        for owner, some in self._totals.items():
            some.append(totals.get(owner, some[-1] if some else 0.0))

    def between(self, owner: str, since: float, until: float) -> float:
        """Return the seconds that an owner's processes and the rig waited; up to a sample too many at each end."""
        if not self._at:
            return 0.0
        at = self._at
        first = max(0, bisect_right(at, since) - 1)
        last = min(len(at) - 1, bisect_left(at, until))
        some = [totals for name, totals in self._totals.items() if name in (owner, OURS)]
        # Together no longer than it lasted, since what one does while another waits is not waited for.
        return sum(
            min(at[n + 1] - at[n], sum(totals[n + 1] - totals[n] for totals in some)) for n in range(first, last)
        )


class Meter:
    """Adds up, by owner, what processes have waited; those that have ended stay counted.

    Of an owner's sessions that count which waited longest since the last look: he waits for one of them at a time.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self.totals: dict[str, float] = {}

    def read(self, pids: Mapping[str, int], postmaster: int | None) -> None:
        """Look at processes by owner, at ourselves, and at the server's, which are their logins' ('a_b' is 'a-b')."""
        owners = {pid: name for name, pid in pids.items()} | {os.getpid(): OURS}
        processes = {*owners}
        if postmaster is not None:
            for pid in _children(postmaster):
                found = _BACKEND.match(_bytes(f"/proc/{pid}/cmdline"))
                if found is not None:
                    owners[pid] = found[1].decode().replace("_", "-", 1)
        seen: dict[int, int] = {}
        longest: dict[str, float] = {}
        for pid, owner in owners.items():
            numbers = _bytes(f"/proc/{pid}/schedstat").split()
            if len(numbers) < 2:
                continue
            waited = seen[pid] = int(numbers[1])
            before = self._seen.get(pid, 0)
            # Less than before: another process by now.
            seconds = (waited - before if waited >= before else waited) / 1e9
            if pid in processes:
                self.totals[owner] = self.totals.get(owner, 0.0) + seconds
            else:
                longest[owner] = max(longest.get(owner, 0.0), seconds)
        for owner, seconds in longest.items():
            self.totals[owner] = self.totals.get(owner, 0.0) + seconds
        self._seen = seen


def _children(pid: int) -> list[int]:
    return [int(one) for one in _bytes(f"/proc/{pid}/task/{pid}/children").split()]


def _bytes(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""
