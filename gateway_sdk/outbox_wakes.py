"""Hear that events were written: NOTIFY from the transactions that wrote them, as far as it can be heard.

A hint only. Beneath it a drainer polls always, so whatever goes wrong here costs an interval at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import anyio

from dispatch_core.backoff import Backoff
from dispatch_core.errors import DatabaseError, TenancyError
from dispatch_core.listener import MAX_CHANNELS, Listener
from dispatch_core.outbox_repository import OutboxRepository

__all__ = ["OutboxWakes"]

_BACKOFF_BASE: Final = 0.5
_BACKOFF_CAP: Final = 30.0

logger = logging.getLogger("relay_dispatch.outbox")


class OutboxWakes:
    """Calls `wake()` for each notification, and whenever some may have been missed. Run `run` in the owner's tasks."""

    def __init__(
        self,
        listener: Listener,
        verbs: OutboxRepository,
        tenants: Sequence[str] | None,
        wake: Callable[[], None],
    ) -> None:
        """Listen for `tenants`; None: for all that the login may drain. The listener is run by its owner."""
        self._listener = listener
        self._verbs = verbs
        self._tenants = tenants
        self._wake = wake
        self._channels: list[str] = []

    async def run(self) -> None:
        """Listen until cancelled; never raises for what the database does."""
        try:
            for name in await self._names():
                self._channels.append(name)
                await self._listener.subscribe(name, self._rung)
            # What was committed before LISTEN stood did not ring here. (Where it does not yet, a catch-up follows.)
            self._wake()
            await anyio.sleep_forever()
        finally:
            for name in self._channels:
                self._listener.unsubscribe(name, self._rung)

    def _rung(self, _payload: str) -> None:
        self._wake()

    async def _names(self) -> list[str]:
        backoff = Backoff(_BACKOFF_BASE, _BACKOFF_CAP)
        while True:
            try:
                return await self._ask()
            except TenancyError as error:
                logger.warning("no wake-ups for the outbox, only polls: %s", error)
                return []
            except DatabaseError as error:
                logger.debug("the channels of the outbox could not be asked for: %s", error)
            await anyio.sleep(backoff.next())

    async def _ask(self) -> list[str]:
        tenants = self._tenants
        if tenants is None:
            try:
                return [await self._verbs.channel(None)]
            except TenancyError:
                # A login of some tenants. Those that it is granted later are polled until the drainer starts anew.
                tenants = await self._verbs.tenants()
        if len(tenants) > MAX_CHANNELS:
            logger.warning("of %d tenants %d are listened to: the others are polled", len(tenants), MAX_CHANNELS)
        names: list[str] = []
        denied: TenancyError | None = None
        for tenant in tenants[:MAX_CHANNELS]:
            try:
                names.append(await self._verbs.channel(tenant))
            except TenancyError as error:
                # The others are drained without it, so they are woken without it.
                logger.warning("no wake-ups for the outbox of tenant %s, only polls: %s", tenant, error)
                denied = error
        if denied is not None and not names:
            raise denied
        return names
