"""For tests of the outbox: events by hand, at the floor of SQL and verbs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from dispatch_core.database import Database
from dispatch_core.outbox import Outbox, OutboxEvent, OutboxMessage, OutboxSettings
from dispatch_core.outbox_models import ClaimedEvent, ClaimedEvents, SettledEvent, Verdict
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.databases import TestDatabase
from tests.support.protocol import ME, OUTBOX, TENANT, Connection

KIND = "order-placed"


async def write(
    gateway: Connection, *payloads: Any, kind: str = KIND, tenant: str = TENANT, key: str | None = None, **options: Any
) -> list[UUID]:
    """Write an event for each payload, and commit."""
    messages = [OutboxMessage(kind, payload, key, options.get("delay")) for payload in payloads or ("payload",)]
    async with gateway.transaction():
        return await Outbox.enqueue_many(gateway, messages, tenant=tenant, notify=False)


async def take(
    gateway: Connection,
    limit: int = 100,
    *,
    kind: str = KIND,
    tenant: str = TENANT,
    by: str = ME,
    **options: Any,
) -> list[ClaimedEvent]:
    """Claim events of one group."""
    return (await take_all(gateway, [(tenant, kind)], limit, by=by, **options)).events


async def take_all(
    gateway: Connection, groups: Sequence[tuple[str, str]], limit: int = 100, *, by: str = ME, **options: Any
) -> ClaimedEvents:
    """Claim events of several groups."""
    return await OutboxRepository(gateway).claim(groups, claimed_by=by, limit=limit, **options)


async def tell(
    gateway: Connection,
    events: Sequence[ClaimedEvent],
    outcome: Any = "delivered",
    *,
    error: str | None = None,
    delay: float | None = None,
    by: str = ME,
    max_attempts: int = 25,
) -> list[tuple[str, str]]:
    """Settle events alike; return outcome and state of each."""
    wait = None if delay is None else timedelta(seconds=delay)
    settled, _ = await OutboxRepository(gateway).settle(
        [(event, Verdict(outcome, error, wait)) for event in events], claimed_by=by, max_attempts=max_attempts
    )
    return [_said(item) for item in settled]


def _said(item: SettledEvent) -> tuple[str, str]:
    return item.outcome, item.state


async def tidy(gateway: Connection, *, stale: float = 300.0, **options: Any) -> Any:
    """Search for work, which takes stale claims back and finds lost turns."""
    return await OutboxRepository(gateway).due(stale_seconds=stale, look=100, **options)


async def make_stale(admin: Connection, seconds: float = 301) -> None:
    """Let all claims be so old."""
    await admin.execute(
        f"update {OUTBOX} set claimed_at = claimed_at - $1::interval where state = 'claimed'",
        timedelta(seconds=seconds),
    )


async def make_due(admin: Connection) -> None:
    """Let every pause be over."""
    await admin.execute(f"update {OUTBOX} set available_at = created_at where state = 'ready'")


async def states(admin: Connection, tenant: str = TENANT) -> dict[Any, str]:
    """Return the state of each event, by its payload (a JSON text or number)."""
    rows = await admin.fetch(f"select payload #>> '{{}}' as payload, state from {OUTBOX} where tenant_id = $1", tenant)
    return {row["payload"]: row["state"] for row in rows}


class Recorder:
    """A sink that keeps what it is given, and does with each what `answers` says of its payload."""

    def __init__(self, answers: dict[Any, Any] | None = None) -> None:
        self.events: list[OutboxEvent] = []
        self.answers = answers or {}

    async def __call__(self, event: OutboxEvent) -> None:
        self.events.append(event)
        answer = self.answers.get(event.payload) if isinstance(event.payload, str) else None
        if isinstance(answer, BaseException):
            raise answer
        if answer is not None:
            await answer(event)

    @property
    def payloads(self) -> list[Any]:
        return [event.payload for event in self.events]


def outbox(database: TestDatabase | Database, sink: Any, **settings: Any) -> Outbox:
    """Make a drainer for every kind."""
    dsn = database if isinstance(database, Database) else database.gateway_dsn
    tenants = settings.pop("tenants", None)
    return Outbox(dsn, default_sink=sink, tenants=tenants, settings=OutboxSettings(**settings))
