"""The systems, in the order of the table. A new one is a new file and a line here.

A module here imports its system inside of functions only: one that is not installed is reported, and stops nobody.
"""

from __future__ import annotations

from typing import Final

from benchmarks.peers.model import System
from benchmarks.peers.systems import graphile, oban, ours, pgqueuer, procrastinate

__all__ = ["SYSTEMS"]

SYSTEMS: Final[dict[str, System]] = {
    system.name: system for system in (ours.SYSTEM, pgqueuer.SYSTEM, procrastinate.SYSTEM, oban.SYSTEM, graphile.SYSTEM)
}
