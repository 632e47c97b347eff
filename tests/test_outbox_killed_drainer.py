"""SIGKILL at every step of the SDK's drainer, in turn: every event becomes one job, whatever was under way."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import anyio
import pytest

from dispatch_core.dev.wire import Side, Wire
from dispatch_core.outbox import DrainReport, OutboxEvent, OutboxPark, OutboxSettings
from gateway_sdk import DispatchSink, GatewayClient, OutboxDrainer
from tests.support.activity import terminate
from tests.support.databases import TestDatabase
from tests.support.drainer_process import ROUTES, drainer_process
from tests.support.eventually import eventually
from tests.support.gateway import settings_for
from tests.support.outbox import KIND, make_stale, write
from tests.support.protocol import OUTBOX, TENANT, Connection, connected

STEPS: dict[str, tuple[str, Side, int, dict[str, int], int]] = {
    # where it is held -> the statement, its side, the how many-th of them; the events then, by state, and the jobs
    "before the claim": ("relay.outbox_claim", "call", 1, {"ready": 4}, 0),
    "claim committed": ("relay.outbox_claim", "answer", 1, {"claimed": 4}, 0),
    "sink begun": ("relay.enqueue", "call", 1, {"claimed": 4}, 0),
    "sink ended": ("relay.enqueue", "answer", 1, {"claimed": 4}, 4),
    "settling sent": ("relay.outbox_settle", "call", 1, {"claimed": 4}, 4),
    "settling committed": ("relay.outbox_settle", "answer", 1, {}, 4),
    "between batches": ("relay.outbox_claim", "call", 2, {"ready": 2}, 2),
}
"""Each is a tenant too."""


async def _events(admin: Connection, tenant: str) -> dict[str, int]:
    return dict(Counter(r[0] for r in await admin.fetch(f"select state from {OUTBOX} where tenant_id = $1", tenant)))


async def _jobs(admin: Connection, tenant: str) -> list[UUID]:
    query = "select job_id from relay.s2r_relay_dispatch_request where tenant_id = $1"
    return [row["job_id"] for row in await admin.fetch(query, tenant)]


class _Attempts:
    """The dispatch sink, and how many deliveries of each event had failed before."""

    def __init__(self, sink: DispatchSink) -> None:
        self._sink = sink
        self.of: dict[UUID, int] = {}

    async def __call__(self, event: OutboxEvent) -> None:
        self.of[event.event_id] = event.attempts
        await self._sink(event)


async def _drain_all(database: TestDatabase) -> tuple[DrainReport, dict[UUID, int]]:
    """Drain the events of all tenants, as another drainer would; return how often each had failed before too."""
    async with GatewayClient(settings=settings_for(database.gateway_dsn)) as client:
        drainer = OutboxDrainer(database.gateway_dsn, settings=OutboxSettings())
        sink = _Attempts(DispatchSink(client, ROUTES))
        drainer.add_sink(KIND, sink)
        return await drainer.drain_all(), sink.of


@pytest.mark.case("C21")
@pytest.mark.invariant("I8")
@pytest.mark.invariant("O2")
async def test_whatever_step_a_drainer_is_killed_at_every_event_becomes_one_job_and_none_is_left(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """A process and a tenant for each step, all at once."""
    ids = {step: await write(gateway, *range(4), tenant=step) for step in STEPS}
    # Rolled back: of no step may it be delivered.
    transaction = gateway.transaction()
    await transaction.start()
    for step in STEPS:
        await gateway.fetchval("select relay.outbox_enqueue($1, '9', p_tenant => $2)", KIND, step)
    await transaction.rollback()

    async def play(step: str) -> None:
        statement, side, number, events, jobs = STEPS[step]
        batch = 2 if step == "between batches" else 100
        async with Wire.to(database.gateway_dsn) as wire:
            gate = wire.hold(statement, side, number)
            async with drainer_process(wire.dsn(database.gateway_dsn), step, batch_size=batch) as drainer:
                await drainer.comes_to(gate)

                async def as_expected() -> bool:
                    async with lock:
                        assert await _events(admin, step) == events, step
                        assert len(await _jobs(admin, step)) == jobs, step
                    return True

                await eventually(
                    as_expected
                )  # at once, but for a first batch that is under way beside the second claim
                await drainer.kill()

    lock = anyio.Lock()
    async with anyio.create_task_group() as group:
        for step in STEPS:
            group.start_soon(play, step)
    for step, (_, _, _, events, jobs) in STEPS.items():
        assert (await _events(admin, step), len(await _jobs(admin, step))) == (events, jobs), step

    await make_stale(admin)
    report, attempts = await _drain_all(database)
    left = sum(sum(events.values()) for _, _, _, events, _ in STEPS.values())
    claimed = sum(events.get("claimed", 0) for _, _, _, events, _ in STEPS.values())
    assert report == DrainReport(claimed=left, delivered=left, reclaimed=claimed)
    assert await admin.fetchval(f"select count(*) from {OUTBOX}") == 0
    for step, (_, _, _, events, _) in STEPS.items():
        jobs_of_step = await _jobs(admin, step)
        assert Counter(jobs_of_step) == Counter(DispatchSink.job_id(event_id, KIND) for event_id in ids[step]), step
        # What nobody has settled counts as one failure, and nothing else does.
        failures = {attempts[event_id] for event_id in ids[step] if event_id in attempts}
        assert failures == {int("claimed" in events)} or not events, step


@pytest.mark.case("C21")
async def test_killed_in_the_middle_of_its_settling_what_it_has_sent_is_done_or_not_done_whole(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """The server has it in hand, where it waits for a row, when its sender dies; once it goes on, once it ends too."""
    for goes_on in (True, False):
        await write(gateway, *range(3))
        async with (
            Wire.to(database.gateway_dsn) as wire,
            connected(database.admin_dsn) as holder,
            drainer_process(wire.dsn(database.gateway_dsn), TENANT) as drainer,
        ):
            gate = wire.hold("relay.outbox_settle", "call")
            await drainer.comes_to(gate)
            await holder.execute("begin")
            await holder.execute(f"select from {OUTBOX} order by event_id desc limit 1 for update")
            gate.release()

            async def waiting() -> int | None:
                query = "select pid from pg_stat_activity where wait_event_type = 'Lock' and query ~ 'outbox_settle'"
                pid: int | None = await admin.fetchval(f"{query} and datname = current_database()")
                return pid

            pid = await eventually(waiting)
            assert pid is not None
            await drainer.kill()
            if not goes_on:
                await terminate(admin, pid)
            await holder.execute("commit")

        expected = {} if goes_on else {"claimed": 3}

        async def settled(expected: dict[str, int] = expected) -> bool:
            return await _events(admin, TENANT) == expected

        await eventually(settled)
    assert len(await _jobs(admin, TENANT)) == 6
    await make_stale(admin)
    report, _ = await _drain_all(database)
    assert (report.delivered, report.reclaimed) == (3, 3)
    assert len(await _jobs(admin, TENANT)) == 6


@pytest.mark.case("C15")
@pytest.mark.invariant("I3")
async def test_a_drainer_that_was_cut_off_until_its_claim_was_stale_changes_nothing_when_it_is_back(
    database: TestDatabase, admin: Connection, gateway: Connection
) -> None:
    """Its settling is on the way while another one takes the events over, and parks one of them."""
    await write(gateway, *range(3))
    async with (
        Wire.to(database.gateway_dsn) as wire,
        # It looks for events hardly ever: else it would take its own stale ones over, on another connection.
        drainer_process(wire.dsn(database.gateway_dsn), TENANT, drain_interval_sec=3600) as drainer,
    ):
        gate = wire.hold("relay.outbox_settle", "call")
        await drainer.comes_to(gate)
        await make_stale(admin)
        other = OutboxDrainer(database.gateway_dsn, settings=OutboxSettings())

        @other.sink(KIND)
        async def sink(event: OutboxEvent) -> None:
            if event.payload == 1:
                raise OutboxPark("no")

        report = await other.drain_all()
        assert (report.delivered, report.parked, report.reclaimed) == (2, 1, 3)
        before = await admin.fetch(f"select * from {OUTBOX}")
        assert len(before) == 1
        # Back again, it says that it has delivered all three.
        gate.release()
        with anyio.fail_after(10):
            await gate.answered.wait()
        assert await admin.fetch(f"select * from {OUTBOX}") == before
        await drainer.kill()
    assert await _events(admin, TENANT) == {"parked": 1}
