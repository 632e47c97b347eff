"""Two gateways and two relays as processes, under load in all rooms, while the primary goes and the standby takes over.

The processes, their journal and the audit are those of `make chaos`: jobs of every kind, orders with an outbox event,
and imports, which are durable jobs whose rows are stored with their checkpoints. Neither relays nor gateways poll.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import pytest

from tests.chaos import journal
from tests.chaos.audit import audit
from tests.chaos.evidence import Evidence, gather
from tests.chaos.logs import told
from tests.chaos.rig import SCHEMA, Member, Rig
from tests.chaos.roster import GATEWAYS, SETTINGS
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.proxy import TcpProxy
from tests.support.replication import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.case("C02")]

RELAYS = ("relay-0", "relay-2")
"""Of the roster: one for each relay, both with all tenants."""
RATE = 20.0
OUTAGE_SECONDS = 5.0
GUARD_SECONDS = 60.0
"""Against a hang. That work goes on within 15 seconds is held by test_failover.py, where fewer share the machine."""
TRIES_PER_SECOND = 7.0
SETTLE_SECONDS = 60.0

QUIET = {
    **SETTINGS,
    "RELAY_POLL_SECONDS": "600",
    "GATEWAY_POLL_INTERVAL_SECONDS": "600",
    "OUTBOX_DRAIN_INTERVAL_SEC": "5",
    # Whoever is away for the length of a failover comes back within its lease.
    "RELAY_LEASE_SECONDS": "20",
    "GATEWAY_LEASE_SECONDS": "20",
    "DURABLE_LEASE_SECONDS": "10",
}


class Fleet(Rig):
    """The rig, before two servers, one of which is the primary."""

    def __init__(self, pair: Pair, database: str, journal_dsn: str, files: Path) -> None:
        super().__init__(pair.primary, journal_dsn, files, seed=6, rate=RATE)
        # How processes stop is looked at elsewhere.
        self.disturb(3600)
        self.pair = pair
        self.database = database
        self.second_leads = False
        self.ways: dict[str, tuple[TcpProxy, ...]] = {}

    @property
    def admin_dsn(self) -> str:
        return self.pair.admin_dsn(self.database, of_standby=self.second_leads)

    @property
    def leader(self) -> int:
        return (self.pair.standby if self.second_leads else self.pair.first).port

    def tries(self) -> dict[str, int]:
        """How often each process has connected so far, to either server."""
        return {name: sum(way.accepted for way in ways) for name, ways in self.ways.items()}

    async def noted(self, query: str, *args: object) -> list[Any]:
        conn = await asyncpg.connect(self.journal_dsn)
        try:
            return list(await conn.fetch(query, *args))
        finally:
            conn.terminate()

    async def work_goes_on(self, since: float) -> float:
        """Wait until every process works again on what was sent after a moment; return how long that took.

        Each gateway was told of the end of such a job, and each relay has begun one: by notify, since nothing polls so
        soon.
        """
        sent = "journal a join journal b using (job_id) where a.event = 'accepted' and a.at > $1"
        told = f"select distinct b.process from {sent} and b.event = 'told' and b.process = a.process"
        began = f"select distinct b.process from {sent} and b.event = 'began'"

        at: dict[str, float] = {}

        async def works() -> bool:
            for row in [*await self.noted(told, since), *await self.noted(began, since)]:
                at.setdefault(row[0], time.monotonic() - since)
            assert len(at) == 4, f"these work, and since when: {at}"
            return True

        await eventually(works, since + GUARD_SECONDS - time.monotonic(), 0.1, message="every process works:")
        print(", ".join(f"{name} works after {seconds:.1f} s" for name, seconds in sorted(at.items())))
        return time.monotonic() - since

    async def nobody_is_at(self, admin_dsn: str) -> None:
        """Wait until no session of ours is left on a server that takes no writes."""
        conn = await asyncpg.connect(admin_dsn)
        query = "select count(*) = 0 from pg_stat_activity where application_name like 'relay-dispatch%'"
        try:
            assert await conn.fetchval("select pg_is_in_recovery()")
            await eventually(lambda: conn.fetchval(query), 15, 0.1, message="nobody is at the old server:")
        finally:
            conn.terminate()

    async def come_to_an_end(self) -> Evidence:
        """Send nothing more, wait until all that was sent has ended, and stop every process."""
        self.stopping = True
        for name in GATEWAYS:
            await self.members[name].terminate()
        self.rate = 0.0
        for name in GATEWAYS:
            await self.members[name].start()
        self.stopping = False
        conn = await self.admin()
        left = (
            "select (select count(*) from relay.s2r_relay_dispatch_queue) + (select count(*) from relay.outbox)"
            " + (select count(*) from relay.durable_job where status in ('queued', 'running')) = 0"
        )
        await eventually(lambda: conn.fetchval(left), SETTLE_SECONDS, 0.2, message="everything has ended:")
        conn.terminate()
        self.stopping = True
        for name in (*GATEWAYS, *RELAYS):
            await self.members[name].terminate()
        return await gather(self)


@asynccontextmanager
async def fleet(pair: Pair, journal_dsn: str, files: Path) -> AsyncIterator[Fleet]:
    """Start all of it, with synchronous replication, and wait until everybody works."""
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    for dsn, sql in ((pair.admin_dsn(name), SCHEMA), (journal_dsn, journal.CREATE)):
        conn = await asyncpg.connect(dsn)
        await conn.execute(sql)
        await conn.close()
    await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=True))
    made = Fleet(pair, name, journal_dsn, files)
    async with AsyncExitStack() as stack:
        for member in (*GATEWAYS, *RELAYS):
            ways = [
                await stack.enter_async_context(TcpProxy("127.0.0.1", cluster.port))
                for cluster in (pair.first, pair.standby)
            ]
            pair.ports = tuple(way.port for way in ways)
            dsn = pair.gateway_dsn(name) if member in GATEWAYS else pair.worker_dsn(name)
            made.ways[member] = tuple(ways)
            # Without encryption, each try is one connection.
            made.members[member] = Member(member, f"{dsn}&sslmode=disable", ways[0], made)
        pair.ports = ()
        group = await stack.enter_async_context(anyio.create_task_group())
        made.all_work()
        try:
            began = time.monotonic()
            for each in made.members.values():
                await each.start()
            group.start_soon(made.watch)
            group.start_soon(made.watch_cpu)
            await eventually(lambda: both(made, began), 40, 0.2, message="everybody works:")
            yield made
        except BaseException:
            print(told(files))
            raise
        finally:
            made.stopping = True
            for each in made.members.values():
                each.signal(signal.SIGKILL)
                if each.process is not None:
                    with anyio.CancelScope(shield=True):
                        await each.process.wait()
            group.cancel_scope.cancel()


async def both(made: Fleet, since: float) -> bool:
    rows = await made.noted("select distinct process from journal where event in ('told', 'began') and at > $1", since)
    return len(rows) == 4


def holds(evidence: Evidence, *, at_least: int = 50) -> None:
    """Hold that the audit finds nothing, and that there was something to find it in."""
    n = {event: len(notes) for event, notes in evidence.notes.items()}
    print(
        f"{n.get('accepted', 0)} jobs accepted, {n.get('refused', 0)} refused, {n.get('told', 0)} told;"
        f" {len(evidence.orders)} orders; {n.get('submitted', 0)} imports"
    )
    findings = audit(evidence)
    history = [line for found in findings[:5] if found.name is not None for line in evidence.history(found.name)]
    assert not findings, "\n".join([*map(str, findings[:20]), *history])
    assert n.get("accepted", 0) > at_least
    assert evidence.orders
    assert n.get("submitted", 0)


def pace(made: Fleet, before: dict[str, int], seconds: float) -> None:
    for name, tries in made.tries().items():
        print(f"{name}: {tries - before[name]} connections tried in {seconds:.1f} s")


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@pytest.mark.invariant("I8")
@pytest.mark.invariant("J1")
async def test_a_killed_primary_takes_nothing_that_was_acknowledged_in_any_room(
    pair: Pair, database: TestDatabase, tmp_path: Path
) -> None:
    """I1, I2, I8: jobs, results, orders with their events, submissions, rows and checkpoints of imports."""
    async with fleet(pair, database.admin_dsn, tmp_path) as made:
        await anyio.sleep(4)
        await anyio.to_thread.run_sync(pair.kill_primary)
        killed = time.monotonic()
        await anyio.sleep(1.5)
        # What was open has ended; from here on the outage is steady.
        before, steady = made.tries(), time.monotonic()
        await anyio.sleep(OUTAGE_SECONDS)
        seconds = time.monotonic() - steady
        for name, tries in made.tries().items():
            print(f"{name}: {tries - before[name]} tries to connect in {seconds:.1f} s of outage")
            # A gateway's users write orders by connections of their own, which nobody spaces.
            assert name in GATEWAYS or tries - before[name] <= TRIES_PER_SECOND * seconds
        promoted = await anyio.to_thread.run_sync(pair.promote)
        made.second_leads = True
        resumed = await made.work_goes_on(promoted)
        print(f"killed: away for {promoted - killed:.1f} s; all four work by notify {resumed:.1f} s after promotion")
        await anyio.sleep(6)
        holds(await made.come_to_an_end())


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
async def test_a_switchover_there_and_back_is_a_pause(pair: Pair, database: TestDatabase, tmp_path: Path) -> None:
    """In good order: the old primary comes back as a standby of the new one, follows, and is the primary again."""
    async with fleet(pair, database.admin_dsn, tmp_path) as made:
        await anyio.sleep(3)
        await anyio.to_thread.run_sync(pair.primary.stop, "fast")
        there = await anyio.to_thread.run_sync(pair.promote)
        made.second_leads = True
        print(f"there: all four work by notify after {await made.work_goes_on(there):.1f} s")
        await anyio.to_thread.run_sync(lambda: pair.demote_old(synchronous=True))
        await made.nobody_is_at(pair.admin_dsn("postgres"))
        back = await anyio.to_thread.run_sync(pair.switch_back)
        made.second_leads = False
        print(f"back: all four work by notify after {await made.work_goes_on(back):.1f} s")
        await anyio.sleep(6)
        holds(await made.come_to_an_end())


@pytest.fixture(autouse=True)
def _nothing_polls_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.rig.SETTINGS", QUIET)
