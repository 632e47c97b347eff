"""What the run's processes and its server have logged, for whoever reads of a red run somewhere else.

All times of a run are of the monotonic clock, which the processes have in common and nobody moves: of the journal, of
faults, and here. The lines of the server have those of its wall clock.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Final

__all__ = ["configure", "told"]

_FORMAT: Final = "%(at).3f %(name)s %(levelname)s %(message)s"
_LINES: Final = 400
"""Of each file, the last ones."""


def configure() -> None:
    """Log to stderr, each line with its moment."""
    make = logging.getLogRecordFactory()

    def stamped(*args: Any, **rest: Any) -> logging.LogRecord:
        record = make(*args, **rest)
        record.at = time.monotonic()
        return record

    logging.setLogRecordFactory(stamped)
    logging.basicConfig(level=logging.INFO, format=_FORMAT)


def told(files: Path) -> str:
    """Return all logs of a run, but the beginnings of those that are very long."""
    lines = [f"the wall clock is {time.time() - time.monotonic():.3f} s ahead of the monotonic one"]
    for file in sorted(files.glob("*.log")):
        said = file.read_text(errors="replace").splitlines()
        lines += ["", f"--- {file.name}, {len(said)} lines" + (f", the last {_LINES}" if len(said) > _LINES else "")]
        lines += said[-_LINES:]
    return "\n".join(lines)
