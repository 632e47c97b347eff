"""Wake-ups of relays: the first at once, the last never lost, and few between."""

from __future__ import annotations

import asyncio

from dispatch_core.doorbell import Doorbell
from gateway_sdk.wakes import Wakes
from tests.support.eventually import eventually

SLOW = 0.008


class Rung(Doorbell):
    """A doorbell that only notes."""

    __slots__ = ("relays",)

    def __init__(self) -> None:
        super().__init__()
        self.relays: list[str] = []

    def ring_relay(self, tenant: str, relay: str) -> None:
        self.relays.append(relay)


async def test_the_first_wake_up_is_at_once_and_those_within_the_gap_are_one_at_its_end() -> None:
    doorbell = Rung()
    wakes = Wakes(doorbell)
    for _ in range(5):
        wakes.ring("acme", "erp", SLOW)
    wakes.ring("acme", "crm", SLOW)
    assert doorbell.relays == ["erp", "crm"]
    await eventually(lambda: doorbell.relays == ["erp", "crm", "erp"])
    await eventually(lambda: not wakes._gaps)
    assert doorbell.relays == ["erp", "crm", "erp"]
    wakes.ring("acme", "erp", SLOW)
    assert doorbell.relays[-1:] == ["erp"]
    wakes.close()


async def test_where_statements_are_quick_or_somebody_waits_every_wake_up_is_at_once() -> None:
    doorbell = Rung()
    wakes = Wakes(doorbell)
    for _ in range(3):
        wakes.ring("acme", "erp", 0.0005)
    assert doorbell.relays == ["erp"] * 3
    for _ in range(3):
        wakes.ring("acme", "erp", SLOW, at_once=True)
    assert doorbell.relays == ["erp"] * 6
    wakes.close()


async def test_closing_rings_what_waits() -> None:
    doorbell = Rung()
    wakes = Wakes(doorbell)
    wakes.ring("acme", "erp", SLOW)
    wakes.ring("acme", "erp", SLOW)
    wakes.close()
    assert doorbell.relays == ["erp"] * 2
    wakes.ring("acme", "erp", SLOW)
    wakes.ring("acme", "erp", SLOW)
    assert doorbell.relays == ["erp"] * 4
    await asyncio.sleep(0)
    assert not wakes._gaps
