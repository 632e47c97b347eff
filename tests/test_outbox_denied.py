"""A tenant whose grant is taken away stops its own events alone, wherever the drainer is when it happens (I4, O4)."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch_core.errors import ConnectionLostError, TenancyError
from dispatch_core.outbox import DrainReport, Outbox, OutboxEvent
from dispatch_core.settings import OutboxSettings
from gateway_sdk import OutboxDrainer
from tests.support.activity import listening_backends
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.outbox import Recorder, outbox, write
from tests.support.protocol import OUTBOX, Connection
from tests.test_outbox_drain import _Verbs

pytestmark = [pytest.mark.invariant("O4"), pytest.mark.case("C40")]


async def allow(admin: Connection, *tenants: str) -> None:
    """Let the gateway serve these tenants, and no other."""
    await admin.execute("delete from relay.role_binding where kind = 'gateway'")
    await admin.execute(
        "insert into relay.role_binding (role_oid, kind, tenant_id)"
        " select 'relay_gateway_login'::regrole, 'gateway', unnest($1::text[])",
        list(tenants),
    )


async def left(admin: Connection) -> dict[str, int]:
    """Return how many events each tenant has."""
    return dict(await admin.fetch(f"select tenant_id, count(*) from {OUTBOX} group by 1 order by 1"))


@pytest.mark.parametrize("tenants", [None, ["a", "b"]], ids=["all", "named"])
async def test_a_tenant_that_is_revoked_with_a_backlog_stops_no_other(
    database: TestDatabase, admin: Connection, gateway: Connection, tenants: Any, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    await allow(admin, "a", "b")
    for tenant in ("a", "b"):
        await write(gateway, *range(60), tenant=tenant)
    sink = Recorder()
    async with outbox(database, sink, tenants=tenants) as drainer:
        assert (await drainer.drain(20)).delivered == 20
        await allow(admin, "a")
        while (await drainer.drain(20)).delivered:
            pass
        assert list(await left(admin)) == ["b"]
        drainer.search_again()
        assert await drainer.drain(20) == DrainReport()
        assert caplog.text.count("any more: b") == 1
        assert caplog.text.count("may not drain: b") == (0 if tenants is None else 1)
        # Granted again, it is drained again by the same process.
        await allow(admin, "a", "b")
        monkeypatch.setattr("dispatch_core.outbox._ASK_DENIED_SECONDS", 0.0)
        drainer._ask_denied_at = 0.0
        drainer.search_again()
        while (await drainer.drain(20)).delivered:
            pass
    assert await left(admin) == {}
    assert len(sink.events) == 120


async def test_one_of_the_named_tenants_that_was_never_granted_is_left_out_and_said_once(
    database: TestDatabase, admin: Connection, gateway: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    await allow(admin, "a", "b")
    for tenant in ("a", "b"):
        await write(gateway, 1, tenant=tenant)
    await allow(admin, "b")
    async with outbox(database, Recorder(), tenants=["a", "b", "c"]) as drainer:
        assert await drainer.drain() == DrainReport(claimed=1, delivered=1)
        drainer.search_again()
        assert await drainer.drain() == DrainReport()
    assert caplog.text.count("may not drain: a, c") == 1
    async with outbox(database, Recorder(), tenants=["a", "c"]) as drainer:
        for _ in range(2):
            with pytest.raises(TenancyError):
                await drainer.drain()


async def test_of_a_batch_of_several_tenants_those_that_are_allowed_are_settled(
    database: TestDatabase, admin: Connection, gateway: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """Else what was delivered would be delivered again."""
    for tenant in ("a", "b", "c"):
        await write(gateway, "one", "two", tenant=tenant)

    async def revoke(event: OutboxEvent) -> None:
        if event.tenant_id == "b":
            await allow(admin, "a", "c")
        if event.tenant_id == "c":
            raise ValueError("no")

    async with outbox(database, revoke, concurrency=1) as drainer:
        assert await drainer.drain() == DrainReport(claimed=6, delivered=2, failed=2, stale=2)
    assert await left(admin) == {"b": 2, "c": 2}
    assert "what became of 2 events of tenant b could not be written" in caplog.text
    states = await admin.fetch(f"select tenant_id, state, attempts from {OUTBOX} order by event_id")
    assert {tuple(row) for row in states} == {("b", "claimed", 0), ("c", "ready", 1)}


async def test_a_claim_whose_reply_was_lost_is_given_back_for_those_that_are_allowed(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    for tenant in ("a", "b"):
        await write(gateway, 1, tenant=tenant)
    sink = Recorder()
    async with outbox(database, sink) as drainer:
        verbs = drainer.verbs
        claim = verbs.claim

        async def lose_the_reply(*args: Any, **options: Any) -> Any:
            await claim(*args, **options)
            raise ConnectionLostError("lost")

        drainer._verbs = _Verbs(verbs, claim=lose_the_reply)  # type: ignore[assignment]
        with pytest.raises(ConnectionLostError):
            await drainer.drain()
        drainer._verbs = verbs
        await allow(admin, "a")
        assert await drainer.drain() == DrainReport(claimed=1, delivered=1)
    assert [event.tenant_id for event in sink.events] == ["a"]


async def test_a_running_drainer_goes_on_and_is_woken_for_the_others(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    await allow(admin, "a", "b")
    sink = Recorder()
    drainer = OutboxDrainer(
        database.gateway_dsn,
        settings=OutboxSettings(drain_interval_sec=3600),
        tenants=["b", "a", "c"],
        default_sink=sink,
    )
    async with drainer:
        await eventually(lambda: listening_backends(admin))
        for number in range(2):
            async with gateway.transaction():
                await Outbox.enqueue(gateway, "k", number, tenant="a")
            await eventually(lambda: len(sink.events) > number)  # noqa: B023
            await allow(admin, "a")
