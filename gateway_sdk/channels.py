"""Which tenants' results, or durable jobs, are pushed to this process: what somebody waits for, up to a limit."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial

from dispatch_core.database import Connection, Database
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import RelayDispatchError, TenancyError
from dispatch_core.listener import Listener
from gateway_sdk.bounded import bounded
from gateway_sdk.settings import GatewaySettings
from gateway_sdk.tasks import StartSoon

__all__ = ["ResultChannels"]

logger = logging.getLogger(__name__)


class _Channel:
    __slots__ = ("is_denied", "name", "on_listening", "on_results")

    def __init__(self, on_results: Callable[[str], None], on_listening: Callable[[], None]) -> None:
        self.on_results = on_results
        self.on_listening = on_listening
        self.name: str | None = None
        self.is_denied = False


async def _result_channel(conn: Connection, tenant: str) -> str:
    return await RelayDispatchRepository(conn, tenant).channel("result")


class ResultChannels:
    """The channels of one kind that are listened to, one per tenant, on the one connection of the process."""

    def __init__(
        self,
        database: Database,
        listener: Listener | None,
        settings: GatewaySettings,
        start_soon: StartSoon,
        *,
        of: str = "results",
        name_of: Callable[[Connection, str], Awaitable[str]] = _result_channel,
    ) -> None:
        """`name_of` asks the database what a tenant's channel is called; `of`: what comes on it, for people."""
        self._of = of
        self._name_of = name_of
        self._database = database
        self._listener = listener
        self._limit = settings.max_channels
        # What a channel is called can wait, as a poll can: it must not hold a dead connection for longer.
        self._timeout = settings.poll_timeout_seconds
        self._start_soon = start_soon
        self._channels: dict[str, _Channel] = {}
        self._warned = False

    def __len__(self) -> int:
        return sum(not channel.is_denied for channel in self._channels.values())

    def is_listening(self, tenant: str) -> bool:
        """Tell whether the tenant's results are pushed right now."""
        channel = self._channels.get(tenant)
        return (
            self._listener is not None
            and channel is not None
            and channel.name is not None
            and self._listener.is_listening_to(channel.name)
        )

    def unheard(self, tenants: int) -> int:
        """Return of how many among so many tenants the results are not pushed right now, about."""
        is_up = self._listener is not None and self._listener.state == "listening"
        return max(0, tenants - len(self._channels)) if is_up else tenants

    def join(self, tenant: str, on_results: Callable[[str], None], on_listening: Callable[[], None]) -> None:
        """Begin to listen, if that can be: `on_results(payload)` for each push.

        `on_listening()` is called when LISTEN is confirmed: what ended before did not ring here (C03). Asked again, it
        changes nothing, or tries again what has failed.
        """
        if self._listener is None or tenant in self._channels:
            return
        if len(self._channels) >= self._limit:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s of more than %d tenants are waited for: those of the others are polled", self._of, self._limit
                )
            return
        channel = self._channels[tenant] = _Channel(on_results, on_listening)
        self._start_soon(partial(self._open, tenant, channel))

    def leave(self, tenant: str) -> None:
        """Listen no more. Idempotent: yes."""
        channel = self._channels.pop(tenant, None)
        if channel is not None and channel.name is not None and self._listener is not None:
            self._listener.unsubscribe(channel.name, channel.on_results)

    async def _open(self, tenant: str, channel: _Channel) -> None:
        assert self._listener is not None

        async def read(conn: Connection) -> str:
            return await self._name_of(conn, tenant)

        try:
            name = await bounded(self._database, self._timeout, read)
        except TenancyError as error:
            # It stays, so that it is not asked for again and again.
            channel.is_denied = True
            logger.warning("the %s of tenant %r are not pushed, only polled: %s", self._of, tenant, error)
            return
        except RelayDispatchError:
            if self._channels.get(tenant) is channel:
                del self._channels[tenant]
            return
        if self._channels.get(tenant) is not channel:
            return  # left meanwhile
        channel.name = name
        if await self._listener.subscribe(name, channel.on_results):
            channel.on_listening()
