"""The sink that makes a dispatch job of each event, in the same database as the outbox or in another.

Effectively once: the job's id is made of the event's and its kind, so an event that is delivered again finds its job
there. That job is known for as long as its result is kept; no event is delivered longer than `retry_horizon_seconds`
after its first claim, which must be less.

Why an id and no idempotency key: an enqueue with a key may have to wait for another transaction, so each is a statement
of its own; by id a whole batch is one statement, and remembered just as long.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol
from uuid import UUID

from dispatch_core import codec
from dispatch_core.batcher import is_row_fault
from dispatch_core.codec import Headers
from dispatch_core.errors import ConfigurationError, RelayDispatchError, TenancyError
from dispatch_core.ids import id_of
from dispatch_core.models import DispatchRequest
from dispatch_core.outbox import OutboxEvent, OutboxPark, OutboxSettings
from dispatch_core.requests import EnqueueRow, prepare
from gateway_sdk.lane_enqueue import EnqueueItem
from gateway_sdk.outbox import OutboxDrainer
from gateway_sdk.runtime import Runtime
from gateway_sdk.settings import GatewaySettings

__all__ = ["DispatchSink", "OutboxRoute", "outbox_of"]

_JOB_ID_DOMAIN: Final = b"relay-dispatch outbox event\0"

logger = logging.getLogger("relay_dispatch.outbox")


@dataclass(frozen=True, slots=True)
class OutboxRoute:
    """Where events of a kind go: the event's payload becomes the job's JSON body, its tenant the job's.

    `ttl` is seconds or a timedelta, from the delivery on; None: the gateway's default.
    """

    relay: str
    operation: str
    ttl: float | timedelta | None = None
    max_attempts: int = 1
    headers: Headers | None = None


class _Client(Protocol):
    """What is needed of a GatewayClient."""

    @property
    def settings(self) -> GatewaySettings: ...

    @property
    def runtime(self) -> Runtime: ...


class DispatchSink:
    """Enqueues a job for each event, by the route of its kind, through a GatewayClient that is open by then."""

    def __init__(self, client: _Client, routes: Mapping[str, OutboxRoute]) -> None:
        """Take the routes by kind; an event of another kind is parked, with that reason.

        Raises: InvalidNameError, InvalidDeadlineError and their kind for a route that no job could take.
        """
        self._client = client
        # A row of each route, checked once; all that an event adds to it is a body and an id.
        self._rows = {codec.check_name("kind", kind): _row(client.settings, route) for kind, route in routes.items()}

    def check_settings(self, settings: OutboxSettings) -> None:
        """Refuse settings by which an event could outlive the memory of its job, or a write the time of a sink.

        Raises: ConfigurationError.
        """
        writes = self._client.settings.write_timeout_seconds
        if writes > settings.sink_timeout_seconds:
            raise ConfigurationError(
                f"jobs are written for up to {writes:g} s (GATEWAY_WRITE_TIMEOUT_SECONDS), which must not be above the"
                f" timeout of a sink, {settings.sink_timeout_seconds:g} s (OUTBOX_SINK_TIMEOUT_SECONDS)"
            )
        kept = self._client.settings.result_keep_seconds
        tried = settings.retry_horizon_seconds + settings.stale_claim_seconds
        if kept <= tried:
            raise ConfigurationError(
                f"an event is tried for up to {tried:g} s (OUTBOX_RETRY_HORIZON_SECONDS and"
                f" OUTBOX_STALE_CLAIM_SECONDS), but its job is known for {kept:g} s only"
                f" (GATEWAY_RESULT_KEEP_SECONDS): it could become a second job"
            )

    @staticmethod
    def job_id(event_id: UUID, kind: str) -> UUID:
        """Return the id of the job that an event becomes, known before it is one: so its result can be waited for.

        Of the kind too: whoever gives events the id of an order has one of it for each thing that becomes of the order.
        """
        given = event_id.bytes
        digest = hashlib.sha256(_JOB_ID_DOMAIN + given + kind.encode()).digest()
        # The time in it is kept, and with it the order of a UUIDv7; the rest is not the event's, for it might be taken.
        own = bytes((given[6] & 0xF0 | digest[0] & 0x0F, digest[1], 0x80 | digest[2] & 0x3F))
        return id_of(given[:6] + own + digest[3:10])

    async def __call__(self, event: OutboxEvent) -> None:
        """Enqueue the job of one event. Raises: OutboxPark for what can never succeed, else the error."""
        (answer,) = await self.deliver_many([event])
        if answer is not None:
            raise answer

    async def deliver_many(self, events: Sequence[OutboxEvent]) -> Sequence[Exception | None]:
        """Enqueue the jobs of events, those of a tenant in one statement."""
        runtime = self._client.runtime
        max_bytes = runtime.settings.core.max_body_bytes
        give_up_at = time.monotonic() + runtime.settings.write_timeout_seconds
        told: list[Exception | None] = [None] * len(events)
        rows: dict[int, EnqueueRow] = {}
        for place, event in enumerate(events):
            try:
                rows[place] = self._made(event, max_bytes)
            except OutboxPark as error:
                told[place] = error
        if rows and not await self._stored_at_once(events[0].tenant_id, events, list(rows.values())):
            for place, answer in (await self._by_lanes(events, rows, give_up_at)).items():
                told[place] = None if answer is None else _told(answer)
        return told

    async def _stored_at_once(self, tenant: str, events: Sequence[OutboxEvent], rows: list[EnqueueRow]) -> bool:
        """Store what nearly every batch is, jobs of one tenant that fit into one statement; False where it did not go.

        Without a future, an item and an answer for each. Whatever is wrong then, the lanes find out: stored twice, a
        job is there once.
        """
        runtime = self._client.runtime
        settings = runtime.settings
        if (
            len(rows) > settings.enqueue_batch_items
            or sum([row.size for row in rows]) > settings.enqueue_batch_bytes
            or any(event.tenant_id != tenant for event in events)
        ):
            return False
        try:
            with runtime.under_way():
                await runtime.lanes.enqueueing.store_together(tenant, rows, settings.write_timeout_seconds)
        except RelayDispatchError:
            return False
        return True

    async def _by_lanes(
        self, events: Sequence[OutboxEvent], rows: Mapping[int, EnqueueRow], give_up_at: float
    ) -> dict[int, Exception | None]:
        """Store jobs as those of single calls are: tenants side by side, tried again, bisected where one is bad."""
        runtime = self._client.runtime
        answers = _Answers(len(rows))
        for place, row in rows.items():
            item = _Item(row, give_up_at, place)
            item.sink = answers
            try:
                runtime.lanes.enqueue[events[place].tenant_id].put_nowait(item, row.size, answers)
            except RelayDispatchError as error:
                answers.put(place, error)
        return await answers.all()

    def _made(self, event: OutboxEvent, max_bytes: int) -> EnqueueRow:
        route = self._rows.get(event.kind)
        if route is None:
            raise OutboxPark(f"no route for events of kind {event.kind}")
        # As the database gave it: what is not looked into need not be decoded and encoded again.
        body = event.payload_text.encode()
        if len(body) > max_bytes:
            raise OutboxPark(
                f"S2R-BODY-INVALID: the payload has {len(body)} bytes, and a job's body at most {max_bytes}"
                " (RELAY_DISPATCH_MAX_BODY_BYTES)"
            )
        return EnqueueRow(
            self.job_id(event.event_id, event.kind),
            route.relay_id,
            route.operation,
            route.headers,
            body,
            route.max_attempts,
            route.ttl,
            None,
            None,
            None,
        )


class _Item(EnqueueItem):
    """A row on its way, and which event's it is."""

    __slots__ = ("place",)

    def __init__(self, row: EnqueueRow, give_up_at: float, place: int) -> None:
        super().__init__(row, True, give_up_at)
        self.place = place


class _Answers:
    """What became of each of some events, one at least."""

    def __init__(self, count: int) -> None:
        self._values: dict[int, Exception | None] = {}
        self._count = count
        self._complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, item: EnqueueItem, answer: bool | Exception) -> None:
        """Take the answer of a lane: for one item perhaps twice, and then the first one counts."""
        assert isinstance(item, _Item)
        # (False: the job was there, from a delivery before this one.)
        self.put(item.place, answer if isinstance(answer, Exception) else None)

    def put(self, place: int, error: Exception | None) -> None:
        self._values.setdefault(place, error)
        if len(self._values) == self._count and not self._complete.done():
            self._complete.set_result(None)

    async def all(self) -> dict[int, Exception | None]:
        await self._complete
        return self._values


def _told(error: Exception) -> Exception:
    """Return what to tell the drain: to give the event up where another try can only fail alike."""
    # Of those that blame the row, a tenancy error may be mended by a grant.
    if isinstance(error, RelayDispatchError) and is_row_fault(error) and not isinstance(error, TenancyError):
        return OutboxPark(f"{error.code}: {error}")
    return error


def _row(settings: GatewaySettings, route: OutboxRoute) -> EnqueueRow:
    request = DispatchRequest(
        route.relay, route.operation, headers=route.headers, ttl=route.ttl, max_attempts=route.max_attempts
    )
    return prepare(request, default_ttl_seconds=settings.default_ttl_seconds, max_ttl_seconds=settings.max_ttl_seconds)


def outbox_of(client: _Client, given: OutboxDrainer | None) -> OutboxDrainer | None:
    """Return the drainer of a client: the given one, or one made of the settings where they turn it on and have routes.

    OUTBOX_ROUTES become its default sink, where it has none.
    """
    drainer = given
    if drainer is None:
        settings = OutboxSettings()
        if not settings.drain_interval_sec:
            return None
        if not settings.routes:
            # No error: the drainer may be another one of this process.
            logger.info("OUTBOX_DRAIN_INTERVAL_SEC is above 0, but without OUTBOX_ROUTES this client drains nothing")
            return None
        drainer = OutboxDrainer(settings=settings)
    if drainer.is_on and drainer.default_sink is None and drainer.settings.routes:
        drainer.set_default_sink(
            DispatchSink(
                client,
                {
                    kind: OutboxRoute(
                        route.relay, route.operation, route.ttl_seconds, route.max_attempts, route.headers or None
                    )
                    for kind, route in drainer.settings.routes.items()
                },
            )
        )
    return drainer
