"""Plans of the outbox that cannot go bad: the same access paths under every state of statistics (C14)."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from dispatch_core.dev.logins import GATEWAY_LOGIN
from dispatch_core.outbox import Outbox, OutboxMessage
from dispatch_core.outbox_models import Verdict
from dispatch_core.outbox_repository import OutboxRepository
from tests.support.databases import TestDatabase
from tests.support.outbox import KIND, make_stale, take, take_all, tell, write
from tests.support.plans import Connection, Explained, explained
from tests.support.protocol import ME, OUTBOX, TENANT, connected

pytestmark = pytest.mark.case("C14")

BATCH = 20


async def _fill(admin: Connection, ready: int = 20_000) -> None:
    """Store events as the verbs would, but faster: most are ready, some wait, pause or are parked."""
    await admin.execute(
        f"""
        insert into {OUTBOX} (tenant_id, event_id, kind, payload, payload_bytes, seq, state, created_at, available_at)
          select 'acme', gen_random_uuid(), '{KIND}', '1', 1, i, 'ready', now(),
                 now() - interval '1 hour' + i * interval '1 ms'
          from generate_series(1, {ready}) i;
        insert into {OUTBOX} (tenant_id, event_id, kind, payload, payload_bytes, seq, state, created_at, available_at)
          select 'acme', gen_random_uuid(), 'paused', '1', 1, i, 'ready', now(), now() + interval '1 hour'
          from generate_series(1, {ready // 10}) i;
        insert into {OUTBOX}
            (tenant_id, event_id, kind, key, payload, payload_bytes, seq, state, created_at, available_at)
          select 'acme', gen_random_uuid(), 'keyed', 'k' || i % 20, '1', 1, i,
                 case when i > {ready // 10} - 20 then 'ready' else 'waiting' end, now(), now() - interval '1 hour'
          from generate_series({ready // 10}, 1, -1) i;
        -- The first of each key is ready.
        update {OUTBOX} set seq = -seq where state = 'ready' and key is not null;
        insert into {OUTBOX}
            (tenant_id, event_id, kind, payload, payload_bytes, seq, state, created_at, available_at, parked_at)
          select 'acme', gen_random_uuid(), '{KIND}', '1', 1, i, 'parked', now(), now(), now() - i * interval '1 s'
          from generate_series(1, {ready // 10}) i;
        """
    )


async def _never_analyzed(admin: Connection) -> None:
    await _fill(admin)


async def _analyzed_when_full(admin: Connection) -> None:
    await _fill(admin)
    await admin.execute(f"analyze {OUTBOX}")


async def _vacuumed_when_drained(admin: Connection) -> None:
    """What every queue meets: a vacuum comes when it is empty, and leaves "no rows in many pages"."""
    await _fill(admin, 10_000)
    await admin.execute(f"delete from {OUTBOX}")
    await admin.execute(f"vacuum (truncate off, analyze) {OUTBOX}")
    await _fill(admin)


# What a plan may reach the table by: None is a Tid Scan.
_BY_KEY = {"outbox_pkey", None}
# Index -> the columns that its condition must name: fewer would be a walk through all rows of the tenant.
_CONDITIONS = {
    "outbox_pkey": ("tenant_id", "event_id"),
    "outbox_ready": ("tenant_id",),
    "outbox_claimed": ("tenant_id",),
    "outbox_waiting": ("tenant_id",),
    "outbox_parked": ("tenant_id",),
    "outbox_key": ("tenant_id", "key"),
    "outbox_turn": ("tenant_id", "key"),
}


def _check(statement: Explained, most_rows: float) -> set[str | None]:
    used: set[str | None] = set()
    for node in statement.nodes():
        if node.relation != "outbox" or "Scan" not in node.kind:
            continue
        where = f"{node.kind} {node.index} {node.condition}\nof: {statement.text}"
        assert node.kind in ("Index Scan", "Index Only Scan", "Tid Scan"), where
        if node.index is not None and "from names" not in statement.text:
            for column in _CONDITIONS[node.index]:
                assert re.search(rf"\b{column}\b", node.condition), f"no {column} in {where}"
        assert node.rows_read <= most_rows, f"{node.rows_read} rows read by {where}"
        used.add(node.index)
    return used


@pytest.mark.parametrize(
    "state", [_never_analyzed, _analyzed_when_full, _vacuumed_when_drained], ids=lambda state: state.__name__[1:]
)
async def test_every_statement_reads_the_rows_it_is_about_by_the_index_it_is_meant_to(
    database: TestDatabase, admin: Connection, state: Callable[[Connection], Awaitable[None]]
) -> None:
    """Seven times each on one connection, as prepared statements: by then every plan is the generic one."""
    await admin.execute(f"alter table {OUTBOX} set (autovacuum_enabled = off)")
    await state(admin)
    async with explained(database, GATEWAY_LOGIN) as (conn, plans):
        verbs = OutboxRepository(conn)

        async def run(call: Awaitable[Any], expected: set[str | None], most: int = 2 * BATCH + 5) -> Any:
            plans.take()
            answer = await call
            used: set[str | None] = set()
            for statement in plans.take():
                used |= _check(statement, most)
            assert used == expected, used ^ expected
            return answer

        async def written(*messages: OutboxMessage) -> None:
            async with conn.transaction():
                for message in messages[:1]:
                    await Outbox.enqueue(conn, message.kind, 1, tenant=TENANT, key=message.key, notify=False)
                await Outbox.enqueue_many(conn, messages, tenant=TENANT, notify=False)

        for _ in range(7):
            await run(written(*[OutboxMessage("new", 1)] * BATCH), set())
            await run(written(*[OutboxMessage("new", 1, "k1"), OutboxMessage("new", 1, "n")] * BATCH), {"outbox_key"})
            work = await run(
                verbs.due(look=BATCH, max_attempts=3),
                {"outbox_pkey", "outbox_claimed", "outbox_waiting", "outbox_key", "outbox_ready"},
            )
            assert {kind for _, kind in work.due} == {KIND, "keyed", "new"}

            claimed = await run(
                verbs.claim([(TENANT, KIND)], claimed_by=ME, limit=BATCH, after=[None]), {"outbox_ready", None}
            )
            assert len(claimed.events) == BATCH
            verdicts = [
                Verdict("delivered"),
                Verdict("failed", "e", timedelta(hours=1)),
                Verdict("release"),
                Verdict("park"),
            ]
            told = [(event, verdicts[place % 4]) for place, event in enumerate(claimed.events)]
            settled, _ = await run(verbs.settle(told, claimed_by=ME, max_attempts=25), _BY_KEY, 3 * BATCH)
            assert {item.outcome for item in settled} == {"applied"}
            settled, _ = await run(verbs.settle(told, claimed_by=ME, max_attempts=25), {"outbox_pkey"}, 3 * BATCH)
            assert {item.outcome for item in settled} == {"stale"}

            keyed = await run(
                verbs.claim([(TENANT, "keyed")], claimed_by=ME, limit=BATCH),
                {"outbox_ready", "outbox_key", "outbox_turn", None},
            )
            assert len(keyed.events) == BATCH
            told = [(event, Verdict("delivered")) for event in keyed.events]
            _, opened = await run(
                verbs.settle(told, claimed_by=ME, max_attempts=25), {"outbox_key", *_BY_KEY}, 3 * BATCH
            )
            assert opened == {(TENANT, "keyed")}

            lost = await verbs.claim([(TENANT, KIND)], claimed_by="dead", limit=4)
            assert await run(verbs.unclaim([TENANT], "dead"), {"outbox_claimed", None}) == len(lost.events)
            await verbs.claim([(TENANT, KIND)], claimed_by="dead", limit=4)
            await make_stale(admin)
            work = await run(verbs.due(), {"outbox_pkey", "outbox_claimed", "outbox_ready", None})
            assert work.reclaimed == 4
            ids = [event.event_id for event in claimed.events]
            await run(verbs.park(TENANT, ids, "why"), _BY_KEY)
            await run(verbs.retry(TENANT, ids), _BY_KEY, 3 * BATCH)
            await run(verbs.show(TENANT, ids[0]), {"outbox_pkey"})
            await run(verbs.list_events(TENANT, limit=BATCH, payload_chars=10), {"outbox_pkey"})
            assert await run(verbs.count(TENANT, limit=BATCH), {"outbox_pkey"}) == BATCH
            await run(
                verbs.list_events(TENANT, key="n", limit=BATCH), {"outbox_pkey", "outbox_key", "outbox_parked"}, 5000
            )
            await run(verbs.health([TENANT]), {"outbox_parked", "outbox_claimed", "outbox_ready"}, 10_000)
            older = timedelta(minutes=10)
            assert await run(verbs.retry_parked(TENANT, older, limit=BATCH), {"outbox_parked", None}) == BATCH
            await run(verbs.purge(TENANT, timedelta(0), limit=BATCH), {"outbox_parked", None})


@pytest.mark.invariant("I10")
async def test_with_an_old_snapshot_open_a_claim_with_a_cursor_reads_no_more_than_before(
    database: TestDatabase, admin: Connection
) -> None:
    """Dead rows stay while anybody's old transaction is open: the cursor steps over them, a claim from zero wades."""
    await admin.execute(f"alter table {OUTBOX} set (autovacuum_enabled = off)")
    async with (
        connected(database.admin_dsn) as old,
        connected(database.gateway_dsn) as busy,
        explained(database, GATEWAY_LOGIN) as (conn, plans),
    ):

        async def blocks(after: Any) -> int:
            plans.take()
            events = await take(conn, 10, after=None if after is None else [after])
            assert len(events) == 10
            touched = sum(plan.blocks for plan in plans.take() if "for update skip locked" in plan.text)
            await tell(conn, events)
            return touched

        await write(busy, *range(100))
        fresh = await blocks(None)
        async with old.transaction(isolation="repeatable_read"):
            await old.fetchval(f"select count(*) from {OUTBOX}")
            for _ in range(8):
                await write(busy, *range(1000))
                claimed = await take_all(busy, [(TENANT, KIND)], 1000)
                await tell(busy, claimed.events)
                cursor = claimed.last[TENANT, KIND]
            await write(busy, *range(200))
            with_cursor, from_zero = await blocks(cursor), await blocks(None)
    assert with_cursor < fresh + 60, (fresh, with_cursor, from_zero)
    assert from_zero - fresh > 5 * (with_cursor - fresh), (fresh, with_cursor, from_zero)
