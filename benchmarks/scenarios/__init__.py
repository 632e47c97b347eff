"""The scenarios, in the order in which they run. A new one is a new file and a line here."""

from __future__ import annotations

from typing import Final

from benchmarks.model import Scenario
from benchmarks.scenarios import bulk, call, claim, drain, enqueue, wake

__all__ = ["SCENARIOS"]

SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        claim.SCENARIO,
        drain.SCENARIO,
        enqueue.SCENARIO,
        bulk.SCENARIO,
        wake.SCENARIO,
        call.SCENARIO,
    )
}
