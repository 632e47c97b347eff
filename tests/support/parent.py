"""For processes that a test starts: none of them outlives it, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG: Final = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that has started it is gone, as where that was killed.

    Only on Linux; elsewhere a test that is killed leaves its processes behind.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or parent == 1:
        os._exit(1)  # it was gone before it was asked for
