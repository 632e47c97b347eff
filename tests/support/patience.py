"""How long somebody has waited of his own will, whatever else the machine had to do.

On a busy machine a process that wants to run is not let for seconds: that says nothing of what it does. So the time is
the clock's without that in which its main thread ran, or stood in the queue for a processor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["still", "within"]


def still(pid: int | None = None) -> float:
    """Return a clock in seconds that stands while the process's main thread runs or wants to; only differences count.

    Where the system does not tell (it is not Linux), it never stands. Raises: ProcessLookupError.
    """
    pid = pid or os.getpid()
    try:
        ran, queued, *_ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    except OSError:
        if Path("/proc/self/schedstat").exists():
            raise ProcessLookupError(pid) from None
        return time.monotonic()
    return time.monotonic() - (int(ran) + int(queued)) / 1e9


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Hold that the block waits no longer than this."""
    began, clock = still(), time.monotonic()
    yield
    took = still() - began
    assert took < seconds, f"it waited {took:.2f} s ({time.monotonic() - clock:.2f} s by the clock)"
