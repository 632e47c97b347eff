"""The outbox room: events written in the caller's own transaction, and drained into sinks afterwards, at least once.

    Outbox.enqueue(conn, kind, payload)     in an open transaction, on whatever connection it brings
    async with Outbox(dsn, sinks=…) as o:   a drainer
        await o.drain()                     claim, deliver, settle: one batch

A drain claims in one short transaction, calls the sinks with no connection, lock or transaction held, and settles in
another. A drainer that dies leaves claims that are taken back after `stale_claim_seconds`; one that comes back later
than that finds its fence stale and changes nothing. Any number of drainers may run at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

import anyio

from dispatch_core.database import Database
from dispatch_core.errors import ConfigurationError, ConnectionLostError, RelayDispatchError, TenancyError
from dispatch_core.ids import new_instance_id
from dispatch_core.migrate import check_schema
from dispatch_core.outbox_delivery import Delivery, check_sink
from dispatch_core.outbox_groups import Groups, LaneOf, Round
from dispatch_core.outbox_models import (
    Batch,
    BatchSink,
    ClaimedEvents,
    DrainReport,
    DueWork,
    OutboxEvent,
    OutboxMessage,
    OutboxPark,
    OutboxRetry,
    SettledEvent,
    Sink,
)
from dispatch_core.outbox_repository import OutboxRepository
from dispatch_core.outbox_settling import Settling, report
from dispatch_core.outbox_write import MAX_PAYLOAD_BYTES, WritingConnection, write_event, write_events
from dispatch_core.settings import OutboxSettings
from dispatch_core.tenancy import warn_if_bypassing

__all__ = [
    "BatchSink",
    "DrainReport",
    "Outbox",
    "OutboxEvent",
    "OutboxMessage",
    "OutboxPark",
    "OutboxRetry",
    "OutboxSettings",
    "Sink",
]

_LOOK_AT_KEYS: Final = 200
"""For lost turns, in one search for work."""

_ASK_DENIED_SECONDS: Final = 5.0
"""Between two looks whether a tenant that was denied is so still."""

_SINGLE_CLAIMS: Final = 100
"""Behind one whose reply was lost, at least."""

logger = logging.getLogger("relay_dispatch.outbox")


class Outbox:
    """Writes events, and drains them into sinks.

    Writing needs no instance: `Outbox.enqueue` and `Outbox.enqueue_many` work on the class. To drain, make one with
    sinks and enter it. It is an async context manager; a `Database` that is given stays its owner's.
    """

    def __init__(
        self,
        database: Database | str,
        *,
        sinks: Mapping[str, Sink] | None = None,
        default_sink: Sink | None = None,
        tenants: Sequence[str] | None = None,
        settings: OutboxSettings | None = None,
    ) -> None:
        """Drain events of `tenants` (None: all that the login may drain) into the sink of their kind.

        Without `default_sink` events of other kinds than those of `sinks` are left for other drainers.

        Raises: ConfigurationError where a sink is not async or refuses the settings.
        """
        self.settings = settings or OutboxSettings()
        for sink in [*(sinks or {}).values(), *([] if default_sink is None else [default_sink])]:
            check_sink(sink, self.settings)
        self._database = (
            database
            if isinstance(database, Database)
            else Database(database, min_size=1, max_size=4, application_name="relay-dispatch outbox")
        )
        self._owns_database = not isinstance(database, Database)
        self.sinks: dict[str, Sink] = dict(sinks or {})
        self.default_sink = default_sink
        self._tenants = None if tenants is None else list(tenants)
        self._verbs = OutboxRepository(self._database)
        self._groups = Groups()
        self._instance = new_instance_id("outbox")
        self._claims = 0
        self._denied: set[str] = set()
        """Of the tenants that were given, those that the login may not drain, and when to ask for them again."""
        self._ask_denied_at = 0.0
        self._unanswered: dict[str, tuple[list[str], float]] = {}
        """Claims whose reply was lost -> their tenants, and until when they are to be asked for."""
        self._singly = 0
        """So many claims are to be of one event: a reply was lost, and may be one that can never arrive."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open what is ours, and check the schema.

        Raises: SchemaMismatchError, TenancyDeniedError, DatabaseError.
        """
        async with AsyncExitStack() as stack:
            if self._owns_database:
                await stack.enter_async_context(self._database)
            async with self._database.connection() as conn:
                await check_schema(conn, rooms=["outbox"])
                await warn_if_bypassing(conn, logger)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._unanswered:
            # Else their events wait until the claims are stale, and count as failures then.
            with anyio.move_on_after(self.settings.stop_timeout_seconds, shield=True):
                with contextlib.suppress(RelayDispatchError):
                    await self._release_unanswered()
        await self._stack.__aexit__(kind, error, traceback)

    # --- writing --------------------------------------------------------------------------------------------------

    @staticmethod
    async def enqueue(
        conn: WritingConnection,
        kind: str,
        payload: Any,
        *,
        tenant: str | None = None,
        key: str | None = None,
        delay: float | timedelta | None = None,
        notify: bool = True,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> UUID:
        """Write an event in the open transaction of `conn`, and return its id.

        `payload` is any JSON value. `tenant` None: the one that is bound on the connection (`app.tenant_id`). Events of
        one `key` are delivered one after the other. `delay`: seconds, or a timedelta. `notify` wakes the drainers at
        the commit, which then takes a lock of the whole database until it is flushed.

        Transaction: the caller's; the event is there when it commits, and never was when it rolls back.
        Idempotent: no; a second call is a second event.

        Raises: TransactionRequiredError outside a transaction, InvalidPayloadError, InvalidNameError,
        InvalidDeadlineError: before anything is sent. TenancyUnboundError and the like, DatabaseError: the transaction
        has failed then.
        """
        message = OutboxMessage(kind, payload, key, delay)
        return await write_event(conn, message, tenant=tenant, notify=notify, max_payload_bytes=max_payload_bytes)

    @staticmethod
    async def enqueue_many(
        conn: WritingConnection,
        events: Sequence[OutboxMessage],
        *,
        tenant: str | None = None,
        notify: bool = True,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> list[UUID]:
        """Write events as `enqueue` does, all or none, in one statement for each 4 MiB; return their ids.

        Their order is the order within a key. Raises: as `enqueue`.
        """
        return await write_events(conn, events, tenant=tenant, notify=notify, max_payload_bytes=max_payload_bytes)

    # --- draining -------------------------------------------------------------------------------------------------

    @property
    def verbs(self) -> OutboxRepository:
        """The room's verbs on this drainer's database."""
        return self._verbs

    def next_due_in(self) -> float | None:
        """Return the seconds until the next event is due, as of the last drain that found nothing; None: unknown."""
        return self._groups.later_in(anyio.current_time())

    async def drain(self, batch: int = 100) -> DrainReport:
        """Claim at most `batch` events, give each to its sink, and write what became of it.

        Where `claimed` is above 0 there may be more: call it again. Cancelled, it settles what was delivered and
        releases the rest, within `stop_timeout_seconds`; sinks that run are cancelled.

        Transaction: one for the claim, one for the settling; none while a sink runs.
        Idempotent: an event may reach its sink again after a crash, an outage or a cancellation.

        Raises: DatabaseError and the like where nothing could be claimed; where the settling fails for another reason
        than an outage. ConfigurationError without a sink.
        """
        return await self.deliver(await self.claim(batch))

    async def claim(self, batch: int = 100, *, lane_of: LaneOf | None = None) -> Batch:
        """Make the first half of a drain: claim at most `batch` events. `deliver` must follow, or they go stale.

        `lane_of(kind)` says in which lane a kind is: a claim is for kinds of one lane; None: not in this claim. Raises:
        as `drain`.
        """
        if batch < 1:
            raise ConfigurationError("a drain needs a positive batch")
        if not self.sinks and self.default_sink is None:
            raise ConfigurationError("an Outbox without a sink has nobody to deliver to")
        await self._release_unanswered()
        reclaimed = await self._search()
        since = anyio.current_time()
        claimed_by, claimed = await self._claim(batch, lane_of)
        if not claimed.events and self._groups.known:
            # Above the cursors there was nothing; below them there may be.
            claimed_by, below = await self._claim(batch, lane_of)
            below.expired.extend(claimed.expired)
            claimed = below
        for tenant, event_id in claimed.expired:
            logger.warning("event %s of tenant %s is parked: first tried too long ago", event_id, tenant)
        return Batch(claimed_by, claimed.events, since, len(claimed.expired), reclaimed)

    async def deliver(self, batch: Batch) -> DrainReport:
        """Make the second half of a drain: give each event to its sink, and settle them. Raises: as `drain`."""
        if not batch.events:
            return DrainReport(reclaimed=batch.reclaimed, expired=batch.expired)
        settings = self.settings
        stale_at = batch.since + settings.stale_claim_seconds
        delivery = Delivery(
            batch.events,
            self._sink_of,
            concurrency=settings.concurrency,
            timeout=settings.sink_timeout_seconds,
            begin_until=batch.since + settings.stale_claim_seconds * 2 / 3,
            backoff_base=settings.backoff_base_seconds,
            backoff_cap=settings.backoff_cap_seconds,
        )
        try:
            await delivery.run()
            settled = await self._settle(batch.claimed_by, delivery, stale_at)
        except RelayDispatchError as error:
            if delivery.fatal is not None:
                raise delivery.fatal from error
            raise
        except BaseException:
            # Cancelled: what was delivered is written, the rest is free for others at once.
            with (
                anyio.move_on_after(settings.stop_timeout_seconds, shield=True),
                contextlib.suppress(RelayDispatchError),
            ):
                await self._settle(batch.claimed_by, delivery, stale_at)
            raise
        if delivery.fatal is not None:
            raise delivery.fatal
        return report(delivery.verdicts, settled, batch.expired, batch.reclaimed)

    @property
    def knows_more(self) -> bool:
        """Whether more events than were claimed are known of: there is reason to claim again at once."""
        return bool(self._groups.known)

    def search_again(self) -> None:
        """Have the next claim look for work anew, also where some is known: after a wake-up."""
        self._groups.forget()

    def _sink_of(self, kind: str) -> Sink:
        sink = self.sinks.get(kind, self.default_sink)
        if sink is None:
            raise LookupError(f"no sink for events of kind {kind}")
        return sink

    async def _search(self) -> int:
        """Find out where there is work, if that is not known; return how many claims were taken back.

        Where a part finds nothing due it goes on until it has come round: what is due later fills a part too.
        """
        groups, now = self._groups, anyio.current_time()
        if not groups.must_search(now):
            return 0
        looks = groups.must_look(now)
        goes_on, search = False, Round(groups.start)
        reclaimed = 0
        while True:
            work = await self._search_part(looks)
            after = anyio.current_time()
            groups.found(work, looks, after - now, after, goes_on=goes_on)
            reclaimed += work.reclaimed
            if work.reclaimed or work.parked:
                logger.warning(
                    "%d claims were not answered for in time and are open again; %d of their events are parked",
                    work.reclaimed + work.parked,
                    work.parked,
                )
            if work.due or search.is_over(work.start):
                return reclaimed
            goes_on = True

    async def _search_part(self, looks: bool) -> DueWork:
        asked = await self._asked_for()
        try:
            return await self._due(asked, looks)
        except TenancyError:
            denied = [] if asked is None else await self._leave_out_denied(asked, self._instance)
            if len(denied) in (0, len(asked or ())):
                raise
            self._denied.update(denied)
            self._ask_denied_at = anyio.current_time() + _ASK_DENIED_SECONDS
            logger.warning("the outbox leaves out tenants that this login may not drain: %s", ", ".join(denied))
            return await self._due(await self._asked_for(), looks)

    async def _due(self, tenants: Sequence[str] | None, looks: bool) -> DueWork:
        return await self._verbs.due(
            tenants=tenants,
            kinds=None if self.default_sink is not None else list(self.sinks),
            start=self._groups.start,
            stale_seconds=self.settings.stale_claim_seconds,
            max_attempts=self.settings.max_attempts,
            look=_LOOK_AT_KEYS if looks else 0,
            look_behind=self._groups.look_behind,
        )

    async def _claim(self, batch: int, lane_of: LaneOf | None) -> tuple[str, ClaimedEvents]:
        # New for each claim: a token, by which what a lost reply has told nobody can be given back.
        self._claims += 1
        claimed_by = f"{self._instance}/{self._claims}"
        before = anyio.current_time()
        limit = 1 if self._singly else batch
        pick = self._groups.pick(limit, before, lane_of)
        if not pick.groups:
            return claimed_by, ClaimedEvents([], [], set(), {})
        try:
            claimed = await self._verbs.claim(
                pick.groups,
                claimed_by=claimed_by,
                limit=limit,
                after=pick.after,
                max_bytes=self.settings.max_batch_bytes,
                horizon_seconds=self.settings.retry_horizon_seconds,
            )
        except BaseException as error:
            self._groups.unclaimed(pick)
            if isinstance(error, TenancyError):
                tenants = list(dict.fromkeys(tenant for tenant, _ in pick.groups))
                if denied := await self._leave_out_denied(tenants, claimed_by):
                    # Not an error: the next search finds out whether there is any tenant left.
                    logger.warning("the outbox may not claim for tenants any more: %s", ", ".join(denied))
                    return await self._claim(batch, lane_of)
            is_lost = isinstance(error, ConnectionLostError)
            if is_lost and self._singly:
                # Given back it would be claimed and lost for ever. Stale, it has failed, and is suspect.
                logger.warning(
                    "the reply to a claim of one event was lost as well: if it was made, it is left to go stale"
                )
            elif is_lost or not isinstance(error, RelayDispatchError):
                # It may have been made, or be made yet: cancellation and a lost reply tell nothing of that.
                tenants = list(dict.fromkeys(tenant for tenant, _ in pick.groups))
                self._unanswered[claimed_by] = (tenants, before + self.settings.stale_claim_seconds)
            if is_lost and not self._singly:
                self._singly = max(batch, _SINGLE_CLAIMS)
            raise
        self._singly = max(self._singly - 1, 0)
        after = anyio.current_time()
        self._groups.claimed(pick, claimed, after - before, after)
        return claimed_by, claimed

    async def _release_unanswered(self) -> None:
        """Give back what claims have taken whose reply was lost."""
        for claimed_by, (tenants, until) in list(self._unanswered.items()):
            # Asked for until something came of it: it may still be under way on the server, and commit later.
            count = 0
            try:
                count = await self._verbs.unclaim(tenants, claimed_by)
            except TenancyError:
                # What a denied one has stays until it is stale.
                count, denied = await self._release_apart(tenants, claimed_by)
                self._unanswered[claimed_by] = ([each for each in tenants if each not in denied], until)
            finally:
                # Also where it fails each time: it is stale by then, and no claim would be made any more.
                if count or anyio.current_time() >= until:
                    self._unanswered.pop(claimed_by, None)
                    self._groups.forget()

    async def _settle(self, claimed_by: str, delivery: Delivery, until: float) -> list[SettledEvent]:
        settling = Settling(self._verbs, claimed_by=claimed_by, max_attempts=self.settings.max_attempts, until=until)
        try:
            return await settling.settle(delivery.verdicts)
        finally:
            # Of other kinds whoever has a sink for them is told, by the server.
            mine = [group for group in settling.promoted if self.default_sink is not None or group[1] in self.sinks]
            self._groups.opened(mine)

    # --- tenants that are denied ----------------------------------------------------------------------------------

    async def _leave_out_denied(self, tenants: Sequence[str], claimed_by: str) -> list[str]:
        """Find out which of some tenants are denied, after a call for all of them was, and claim for these no more."""
        _, denied = await self._release_apart(tenants, claimed_by)
        self._groups.left_out(denied)
        return denied

    async def _asked_for(self) -> list[str] | None:
        """Return the tenants to search for; of those that were denied, the ones that no longer are."""
        if self._denied and anyio.current_time() >= self._ask_denied_at:
            _, still = await self._release_apart(sorted(self._denied), self._instance)
            for tenant in self._denied.difference(still):
                logger.info("tenant %s is drained by the outbox again", tenant)
            self._denied = set(still)
            self._ask_denied_at = anyio.current_time() + _ASK_DENIED_SECONDS
        return self._tenants and [tenant for tenant in self._tenants if tenant not in self._denied]

    async def _release_apart(self, tenants: Sequence[str], claimed_by: str) -> tuple[int, list[str]]:
        """Release what a claim has taken, tenant by tenant; return how much that was, and the tenants that are denied.

        For who has claimed nothing it tells that alone.
        """
        count = 0
        denied: list[str] = []
        for tenant in tenants:
            try:
                count += await self._verbs.unclaim([tenant], claimed_by)
            except TenancyError:
                denied.append(tenant)
        return count, denied
