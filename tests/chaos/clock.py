"""A process's wall clock that somebody can move while the process runs; its monotonic clock stays as it is.

`install` has to come before anything else is imported that asks for the time: `from datetime import datetime` would be
the true one. (What compiled code asks the system for, such as the time in a new id, is not moved.)
"""

from __future__ import annotations

import datetime as dt
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

_true_time, _true_time_ns = time.time, time.time_ns
_TrueDatetime: TypeAlias = dt.datetime

_shift = 0.0


def install(file: str) -> None:
    """Move the clock by as many seconds as the file says, now if there is one, and each time that SIGUSR1 comes."""

    def move(number: int, frame: FrameType | None) -> None:
        global _shift
        _shift = float(Path(file).read_text())

    signal.signal(signal.SIGUSR1, move)
    if Path(file).exists():
        move(0, None)
    moved: Any = time
    moved.time = lambda: _true_time() + _shift
    moved.time_ns = lambda: _true_time_ns() + int(_shift * 1e9)
    names: Any = dt
    names.datetime = _Datetime


class _Kind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _TrueDatetime)


class _Datetime(_TrueDatetime, metaclass=_Kind):
    __slots__ = ()  # or it would be larger than the true one, which compiled modules look at

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Any:
        return _TrueDatetime.now(tz) + dt.timedelta(seconds=_shift)

    @classmethod
    def utcnow(cls) -> Any:
        return _TrueDatetime.now(dt.UTC).replace(tzinfo=None) + dt.timedelta(seconds=_shift)
