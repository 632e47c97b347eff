"""The outbox, each layer of tenancy alone: the predicate without row security, row security without the predicate."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from dispatch_core.outbox_models import Verdict
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.outbox import KIND, make_stale, take, take_all, tell, tidy
from tests.support.protocol import ME, OUTBOX, Connection
from tests.test_tenancy_layers import _as_shipped, _predicate_alone, _row_security_alone

pytestmark = [pytest.mark.invariant("I4"), pytest.mark.case("C40"), pytest.mark.case("C41")]

_IDS = [UUID(int=(7 << 76) | (2 << 62) | n) for n in range(1, 9)]


async def _twins(gateway: Connection) -> None:
    """The same ids, kinds and keys for tenants a and b, and those of b claimed under the fences that a's will get."""
    for tenant in ("a", "b"):
        for number, event_id in enumerate(_IDS):
            await gateway.fetchval(
                "select relay.outbox_enqueue($1, to_jsonb($2::text), p_key => $3, p_tenant => $2, p_event_id => $4)",
                KIND,
                tenant,
                "k" if number >= 6 else None,
                event_id,
            )
    assert len(await take(gateway, 3, tenant="b")) == 3


async def _rows_of_b(admin: Connection) -> list[str]:
    return [r[0] for r in await admin.fetch(f"select t::text from {OUTBOX} t where tenant_id = 'b' order by 1")]


@pytest.mark.parametrize("layer", [_as_shipped, _predicate_alone, _row_security_alone], ids=lambda f: f.__name__[1:])
async def test_nothing_that_is_done_for_one_tenant_reads_or_changes_another_ones_twin(
    admin: Connection, gateway: Connection, layer: Any
) -> None:
    await _twins(gateway)
    await layer(admin)
    verbs = OutboxRepository(gateway)
    before = await _rows_of_b(admin)

    work = await tidy(gateway, tenants=["a"])
    assert (work.due, work.reclaimed) == ([("a", KIND)], 0)
    events = await take(gateway, tenant="a")
    assert [event.payload_text for event in events] == ['"a"'] * 7
    assert {event.event_id for event in events} == set(_IDS[:7])
    assert await tell(gateway, events[:2]) == [("applied", "gone")] * 2
    assert await tell(gateway, events[:2]) == [("stale", "gone")] * 2
    assert await tell(gateway, events[2:3], "failed", error="no", delay=0) == [("applied", "ready")]
    assert await tell(gateway, events[3:4], "park", error="no") == [("applied", "parked")]
    # The leader of a's key ends: a's follower has its turn, and b's has not.
    _, opened = await verbs.settle([(events[6], Verdict("delivered"))], claimed_by=ME, max_attempts=25)
    assert opened == {("a", KIND)}
    assert await verbs.unclaim(["a"], ME) == 2
    await take_all(gateway, [("a", KIND)])
    await admin.execute(
        f"update {OUTBOX} set claimed_at = claimed_at - interval '1 hour' where tenant_id = 'a' and state = 'claimed'"
    )
    assert (await tidy(gateway, tenants=["a"])).reclaimed == 4
    assert await verbs.retry("a", _IDS) == {_IDS[3]}
    assert await verbs.park("a", [_IDS[4]], "no") == {_IDS[4]}
    assert await verbs.purge("a", timedelta(0)) == 1
    assert len(await verbs.list_events("a")) == 4
    assert await verbs.list_events("a", state="parked") == []
    row = await verbs.show("a", _IDS[2])
    assert row is not None
    assert row["payload"] == '"a"'
    (status,) = await verbs.status("a")
    assert [status[name] for name in ("due", "later", "waiting", "claimed", "parked")] == [4, 0, 0, 0, 0]
    assert await _rows_of_b(admin) == before

    await make_stale(admin)
    assert (await tidy(gateway)).reclaimed == 3
