"""Which faults come when, and to whom: a pure function of the seed and the length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.chaos.roster import GATEWAYS, RELAYS

__all__ = ["KINDS", "Fault", "draw"]

FIRST_SECONDS: Final = 4.0
LAST_SECONDS: Final = 6.0
"""Before the end, in which no fault begins any more."""
CALM_SECONDS: Final = 5.0
"""Before a SIGTERM whose every effect is looked at, and after it: nothing else is wrong."""

STATEMENTS: Final = ("relay.claim(", "relay.complete(", "relay.heartbeat(", "relay.retry(", "relay.durable_")
SENT_BY_GATEWAYS: Final = (
    "relay.enqueue(",
    "relay.enqueue_keyed(",
    "relay.poll(",
    "relay.mark_expired(",
    "relay.outbox_",
)

KINDS: Final = (
    # of a process
    "SIGTERM", "SIGTERM in calm", "SIGKILL", "SIGKILL", "SIGSTOP", "clock",
    # of the way to it
    "delay", "throttle", "black hole", "reset", "cut after bytes", "cut before the answer", "cut before the answer",
    # of the server
    "sessions ended", "server killed", "server restarted", "snapshot held", "rows locked", "slow disk",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `at` seconds from the start, for `seconds`; `what` is the rest of it."""

    at: float
    kind: str
    target: str
    seconds: float
    what: str = ""

    def __str__(self) -> str:
        words = f"{self.at:6.1f} s  {self.kind:<21} {self.target:<9}"
        return f"{words} {self.seconds:4.1f} s  {self.what}".rstrip()


def draw(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of a run: every kind comes up before one comes again."""
    return list(_faults(random.Random(seed), seconds))


def _faults(chance: random.Random, seconds: float) -> Iterator[Fault]:
    at = FIRST_SECONDS
    over = 0.0
    deck: list[str] = []
    while at < seconds - LAST_SECONDS:
        if not deck:
            deck = chance.sample(KINDS, len(KINDS))
        kind = deck.pop()
        if kind == "SIGTERM in calm":
            at = max(at, over + CALM_SECONDS)
        fault = _fault(chance, round(at, 1), kind)
        over = max(over, fault.at + fault.seconds)
        yield fault
        at += CALM_SECONDS if kind == "SIGTERM in calm" else chance.uniform(1.0, 3.5)


def _fault(chance: random.Random, at: float, kind: str) -> Fault:
    target = chance.choice((*RELAYS, *RELAYS, *GATEWAYS))
    seconds = round(chance.uniform(1.0, 5.0), 1)
    match kind:
        case "SIGTERM" | "SIGTERM in calm" | "SIGKILL":
            return Fault(at, kind, target, round(chance.uniform(0.0, 2.0), 1))
        case "SIGSTOP":
            return Fault(at, kind, target, round(chance.uniform(4.0, 8.0), 1))  # beyond a lease
        case "clock":
            return Fault(at, kind, target, 0.0, f"{chance.choice((-86400, -3600, -5, 5, 3600, 86400)):+d}")
        case "delay":
            return Fault(at, kind, target, seconds, f"{chance.choice((0.02, 0.1, 0.5))}")
        case "throttle":
            return Fault(at, kind, target, seconds, f"{chance.choice((2_000, 20_000, 100_000))}")
        case "black hole":
            return Fault(at, kind, target, round(chance.uniform(1.0, 9.0), 1))
        case "reset":
            return Fault(at, kind, target, chance.choice((0.0, 0.0, 1.0)))
        case "cut after bytes":
            return Fault(at, kind, target, 0.0, f"{chance.choice((1, 7, 100, 3_000))}")
        case "cut before the answer":
            return Fault(at, kind, target, 0.0, chance.choice(SENT_BY_GATEWAYS if target in GATEWAYS else STATEMENTS))
        case "sessions ended":
            return Fault(at, kind, "server", 0.0, chance.choice(("1", "3", "1000")))
        case "server killed" | "server restarted":
            return Fault(at, kind, "server", round(chance.uniform(0.0, 3.0), 1))
    return Fault(at, kind, "server", seconds)
