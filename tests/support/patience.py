"""How long somebody has waited of his own will, whatever else the machine had to do.

On a busy machine a process that wants to run is not let for seconds, and one that is stopped as a whole (SIGSTOP, a
machine that stands still) does not even want to: neither says anything of what it does. So the time is the clock's
without that in which its main thread ran, or stood in the queue for a processor, or was stopped.

Linux counts the first two for every thread. The last is found out by a thread of our own, which sleeps a hundredth of a
second at a time: when it comes late, and neither its own queue nor the main thread explains that, the process stood.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["Watch", "held_up", "standstills", "still", "watching", "within"]

_LOOK_SECONDS: Final = 0.01
_LATE_SECONDS: Final = 0.04
"""By how much a look may be late without any reason."""


def still(pid: int | None = None) -> float:
    """Return a clock in seconds that stands while the process's main thread runs or wants to; only differences count.

    Of our own process it stands also while that is stopped, from the first call on. Where the system does not tell (it
    is not Linux), it never stands. Raises: ProcessLookupError.
    """
    now, is_own = time.monotonic(), pid in (None, os.getpid())
    pid = pid or os.getpid()
    try:
        busy = _busy(f"/proc/{pid}/task/{pid}/schedstat")
    except OSError:
        if Path("/proc/self/schedstat").exists():
            raise ProcessLookupError(pid) from None
        return now
    return now - busy - (_own.lost() if is_own else 0.0)


def held_up() -> float:
    """Return the seconds in which our main thread stood in the queue or our process stood; only differences count.

    Less these, a time is what it had been on a machine with nothing else to do; to run is not left out, as in `still`.
    """
    try:
        _, queued, *_ = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(queued) / 1e9 + _own.lost()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Hold that the block waits no longer than this."""
    began, clock = still(), time.monotonic()
    yield
    took = still() - began
    assert took < seconds, f"it waited {took:.2f} s ({time.monotonic() - clock:.2f} s by the clock)"


def standstills() -> list[tuple[float, float]]:
    """Return when our own process stood since it was first asked for, and how long: (monotonic clock, seconds)."""
    _own.lost()
    return list(_own.found)


@contextmanager
def watching(pid: int) -> Iterator[Watch]:
    """Watch another process, a child of ours that nobody waits for within the block, until it ends."""
    watch = Watch(pid)
    thread = threading.Thread(target=watch._run, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch._over.set()
        thread.join()


class Watch:
    """What a process did while it was watched."""

    def __init__(self, pid: int) -> None:
        self.waited = 0.0
        """Seconds that it has waited of its own will."""
        self._pid = pid
        self._over = threading.Event()

    def _run(self) -> None:
        late = _Late()
        last, busy = time.monotonic(), 0.0
        try:
            busy = _busy(f"/proc/{self._pid}/schedstat")
            while not self._over.wait(_LOOK_SECONDS):
                stood = late.look()
                now, then = time.monotonic(), _busy(f"/proc/{self._pid}/schedstat")
                state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(") ")[2][0]
                if state == "Z":
                    return
                # Where we stood ourselves, nobody knows what it did.
                if state not in "Tt":
                    self.waited += max(0.0, now - last - (then - busy) - stood)
                last, busy = now, then
        except OSError:
            pass  # it has ended; or the system does not tell, and nothing is held


class _Late:
    """Tells by how much the thread that asks has come later than it wanted to, without a reason."""

    def __init__(self) -> None:
        self._files = [f"/proc/self/task/{thread}/schedstat" for thread in (os.getpid(), threading.get_native_id())]
        self._at, self._busy = time.monotonic(), self._all_busy()

    def look(self) -> float:
        now, busy = time.monotonic(), self._all_busy()
        late = now - self._at - _LOOK_SECONDS - (busy - self._busy)
        self._at, self._busy = now, busy
        return late if late > _LATE_SECONDS else 0.0

    def _all_busy(self) -> float:
        # The main thread's too, for which we wait where it has the interpreter to itself.
        return sum(map(_busy, self._files))


class _Own:
    """Our own standstills, looked for by a thread from the first question on."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self._pid = 0
        self._looked_at = 0.0

    def lost(self) -> float:
        """Return the seconds of all so far; one that is just over is waited for, for the length of a look."""
        if not Path("/proc/self/schedstat").exists():
            return 0.0
        asked = time.monotonic()
        if self._pid != os.getpid():
            self._pid = os.getpid()
            threading.Thread(target=self._run, daemon=True, name="standstills").start()
        while self._looked_at < asked > time.monotonic() - 1.0:
            time.sleep(_LOOK_SECONDS / 5)
        return sum(seconds for _, seconds in self.found)

    def _run(self) -> None:
        late = _Late()
        while True:
            time.sleep(_LOOK_SECONDS)
            stood = late.look()
            now = time.monotonic()
            if stood:
                self.found.append((now, stood))
            self._looked_at = now


_own: Final = _Own()


def _busy(schedstat: str) -> float:
    """Return the seconds in which a thread ran or stood in the queue."""
    ran, queued, *_ = Path(schedstat).read_text().split()
    return (int(ran) + int(queued)) / 1e9
