"""Wake relays for what was enqueued, without as many rings as statements where those come close upon each other."""

from __future__ import annotations

import asyncio
from typing import Final

from dispatch_core.doorbell import Doorbell

__all__ = ["Wakes"]

_STATEMENTS_BETWEEN: Final = 3
_SHORTEST_SECONDS: Final = 0.002
"""Below that a gap saves nothing: the doorbell gathers as much while its last statement is under way."""

_LONGEST_SECONDS: Final = 0.025


class Wakes:
    """Ring a relay at once if it was not rung lately; else when the gap is over, once for all that came meanwhile.

    A ring costs half of what a statement of enqueues costs, so that where many processes enqueue without a pause one
    ring for each statement takes a third of the processor. The gap is a few times what the statement took: a wake-up
    comes later by no more than the enqueue itself has taken anyway, and with quick statements there is no gap at all.
    """

    __slots__ = ("_closed", "_doorbell", "_gaps")

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        # Relays that were rung lately, each with the timer for the end of its gap, and whether a ring waits for that.
        self._gaps: dict[tuple[str, str], tuple[asyncio.TimerHandle, bool]] = {}
        self._closed = False

    def ring(self, tenant: str, relay: str, took: float, *, at_once: bool = False) -> None:
        """Wake the relay for jobs whose statement took `took` seconds; `at_once`, because somebody waits for them."""
        key = tenant, relay
        known = self._gaps.get(key)
        if known is not None and not at_once:
            self._gaps[key] = known[0], True
            return
        self._doorbell.ring_relay(tenant, relay)
        if known is not None:
            known[0].cancel()
        self._begin(key, min(took * _STATEMENTS_BETWEEN, _LONGEST_SECONDS))

    def close(self) -> None:
        """Ring what waits, and from now on at once."""
        self._closed = True
        gaps, self._gaps = self._gaps, {}
        for (tenant, relay), (timer, waits) in gaps.items():
            timer.cancel()
            if waits:
                self._doorbell.ring_relay(tenant, relay)

    def _begin(self, key: tuple[str, str], seconds: float) -> None:
        if self._closed or seconds < _SHORTEST_SECONDS:
            self._gaps.pop(key, None)
            return
        timer = asyncio.get_running_loop().call_later(seconds, self._over, key, seconds)
        self._gaps[key] = timer, False

    def _over(self, key: tuple[str, str], seconds: float) -> None:
        _, waits = self._gaps.pop(key)
        if waits:
            self._doorbell.ring_relay(*key)
            self._begin(key, seconds)
