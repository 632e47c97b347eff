"""The scenarios, in the order in which they run. A new one is a new file and a line here."""

from __future__ import annotations

from typing import Final

from benchmarks.model import Scenario
from benchmarks.scenarios import (
    backlog,
    big_bodies,
    bulk,
    call,
    claim,
    drain,
    drain_two,
    durable_drain,
    durable_heartbeat,
    durable_old_snapshot,
    durable_reap,
    enqueue,
    fan_in,
    flush,
    idle,
    listeners,
    memory,
    old_snapshot,
    outbox_dispatch,
    outbox_drain,
    outbox_enqueue,
    outbox_old_snapshot,
    tenants,
    wake,
)

__all__ = ["SCENARIOS"]

SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        drain.SCENARIO,
        drain_two.SCENARIO,
        enqueue.SCENARIO,
        bulk.SCENARIO,
        wake.SCENARIO,
        call.SCENARIO,
        fan_in.SCENARIO,
        flush.SCENARIO,
        big_bodies.SCENARIO,
        old_snapshot.SCENARIO,
        tenants.SCENARIO,
        idle.SCENARIO,
        listeners.SCENARIO,
        memory.SCENARIO,
        claim.SCENARIO,
        backlog.SCENARIO,
        outbox_enqueue.SCENARIO,
        outbox_drain.SCENARIO,
        outbox_dispatch.SCENARIO,
        outbox_old_snapshot.SCENARIO,
        durable_drain.SCENARIO,
        durable_heartbeat.SCENARIO,
        durable_reap.SCENARIO,
        durable_old_snapshot.SCENARIO,
    )
}
