"""An asynchronous standby becomes the primary and does not know of the last claims and settlings: they are made again.

In each room whoever holds a claim that was lost so changes nothing, by any verb, whether the claim that was made in its
place has the same fence, a lower or a higher one; and what was only settled on the old primary is done again.
(test_failover.py has the same for relays with jobs.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import anyio
import anyio.to_thread
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.durable_models import ChunkStatus, JobLease, JobStatus, RowError
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import LeaseLostError
from dispatch_core.ids import new_id
from dispatch_core.models import DispatchJob, WriteOutcome
from dispatch_core.outbox import Outbox
from dispatch_core.outbox_models import ClaimedEvent
from dispatch_core.outbox_repository import OutboxRepository
from relay_sdk import ChunkContext, Relay
from tests.support import durable, outbox, protocol
from tests.support.chunks import KIND, Work, chunk_relay
from tests.support.eventually import eventually
from tests.support.protocol import ME, RELAY, TENANT, TENANT_TABLES, Connection, connected
from tests.support.proxy import TcpProxy
from tests.support.relays import running
from tests.support.replication import Pair, replicated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.invariant("I3"), pytest.mark.case("C18")]

COUNT = 3
OTHER = "erp:instance-2"


@asynccontextmanager
async def new_pair(pair: Pair) -> AsyncIterator[tuple[str, TcpProxy]]:
    """Let the standby follow asynchronously, by a proxy: once that is a black hole, the standby learns nothing more."""
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    async with TcpProxy("127.0.0.1", pair.first.port) as stream:
        await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=False, through=stream.port))
        yield name, stream


async def cut(pair: Pair, name: str, stream: TcpProxy) -> None:
    """Let the standby have everything so far, and nothing of what comes."""
    async with connected(pair.admin_dsn(name)) as admin:
        await replicated(admin)
        stream.mode = "black_hole"


async def fail_over(pair: Pair) -> None:
    await anyio.to_thread.run_sync(pair.kill_primary)
    await anyio.to_thread.run_sync(pair.promote)


async def everything(admin: Connection) -> list[str]:
    """Read all that is stored for tenants, to the last column and row version."""
    found: list[str] = []
    for table in TENANT_TABLES:
        rows = await admin.fetch(f"select '{table} ' || t.ctid || ' ' || t.xmin || t::text from {table} t order by 1")
        found.extend(row[0] for row in rows)
    return found


# --- every verb -----------------------------------------------------------------------------------------------------


class Room:
    """Three claims of one holder, and three that were made again by another after the failover: `lost` and `held`.

    The first of both have the same fence, the second lost one is behind, and the third is ahead.
    """

    def __init__(self) -> None:
        self.lost: list[Any] = []
        self.held: list[Any] = []

    async def prepare(self, gateway: Connection) -> None:
        """Store three things to claim."""
        raise NotImplementedError

    async def claim(self, gateway: Connection, worker: Connection, by: str) -> list[Any]:
        """Claim what is free, in order."""
        raise NotImplementedError

    async def release(self, gateway: Connection, worker: Connection, item: Any, by: str) -> None:
        """Give one back, so that its next fence is two higher."""
        raise NotImplementedError

    def fence(self, item: Any) -> int:
        fence: int = item.fence
        return fence

    def verbs(self, gateway: Connection, worker: Connection) -> dict[str, Callable[[Any], Awaitable[Any]]]:
        """Return what a holder may say of one claim; each gives False where it is told that it is none."""
        raise NotImplementedError

    async def complete(self, gateway: Connection, worker: Connection, item: Any) -> bool:
        """Say as the holder of a claim that was made again that it is done."""
        raise NotImplementedError

    async def lose(self, gateway: Connection, worker: Connection) -> None:
        self.lost = await self.claim(gateway, worker, ME)
        assert len(self.lost) == COUNT
        await self.release(gateway, worker, self.lost[2], ME)
        (self.lost[2],) = await self.claim(gateway, worker, ME)

    async def make_again(self, gateway: Connection, worker: Connection, by: str) -> None:
        self.held = await self.claim(gateway, worker, by)
        assert len(self.held) == COUNT, "the standby knew of claims"
        await self.release(gateway, worker, self.held[1], by)
        (self.held[1],) = await self.claim(gateway, worker, by)
        ahead = [self.fence(lost) - self.fence(held) for lost, held in zip(self.lost, self.held, strict=True)]
        assert ahead[0] == 0
        assert ahead[1] < 0 < ahead[2]


class Jobs(Room):
    def __init__(self) -> None:
        super().__init__()
        self.claim_id = new_id()

    async def prepare(self, gateway: Connection) -> None:
        await protocol.enqueue(gateway, COUNT, max_attempts=9)

    async def claim(self, gateway: Connection, worker: Connection, by: str) -> list[DispatchJob]:
        return await protocol.claim(worker, COUNT, by=by, claim_id=self.claim_id if by == ME else new_id())

    async def release(self, gateway: Connection, worker: Connection, item: DispatchJob, by: str) -> None:
        assert protocol.said(await protocol.release(worker, item, started=False, by=by))[0] == "applied"

    def verbs(self, gateway: Connection, worker: Connection) -> dict[str, Callable[[DispatchJob], Awaitable[Any]]]:
        repository = RelayDispatchRepository(worker, TENANT)

        async def told(call: Awaitable[Any]) -> bool:
            return protocol.said(await call)[0] != "stale"

        async def heartbeat(job: DispatchJob) -> bool:
            return await protocol.heartbeat(worker, [job]) != ["stale"]

        async def claim_again(job: DispatchJob) -> bool:
            again = await repository.claim_again(RELAY, claimed_by=ME, claim_id=self.claim_id)
            return bool(again.jobs or again.malformed)

        return {
            "heartbeat": heartbeat,
            "complete": lambda job: told(protocol.settle(worker, job, response_body=b"lost")),
            "fail": lambda job: told(protocol.settle(worker, job, status="failed", error_code="LOST")),
            "retry": lambda job: told(protocol.retry(worker, job)),
            "snooze": lambda job: told(protocol.retry(worker, job, give_back=True)),
            "release": lambda job: told(protocol.release(worker, job, started=False)),
            "release of a started one": lambda job: told(protocol.release(worker, job, started=True)),
            "fetch_body": lambda job: repository.fetch_body(job, claimed_by=ME),
            "claim_again": claim_again,
        }

    async def complete(self, gateway: Connection, worker: Connection, item: DispatchJob) -> bool:
        return protocol.said(await protocol.settle(worker, item, by=OTHER)) == ("applied", "succeeded")


class Chunks(Room):
    """Made again by the same holder's name, too: their token is new for every claim."""

    async def prepare(self, gateway: Connection) -> None:
        self.job_id = await durable.submit(gateway, COUNT)

    async def claim(self, gateway: Connection, worker: Connection, by: str) -> list[JobLease]:
        claimed = await DurableRepository(worker).claim_next(
            TENANT, self.job_id, holder=ME, token=new_id(), limit=COUNT, lease_seconds=600
        )
        return [chunk.lease for chunk in claimed.chunks]

    async def release(self, gateway: Connection, worker: Connection, item: JobLease, by: str) -> None:
        ((outcome, _),) = await DurableRepository(worker).release([item])
        assert outcome is WriteOutcome.APPLIED

    def fence(self, item: JobLease) -> int:
        return item.version

    def verbs(self, gateway: Connection, worker: Connection) -> dict[str, Callable[[JobLease], Awaitable[Any]]]:
        repository = DurableRepository(worker)

        async def told(call: Awaitable[Any]) -> bool:
            try:
                answer = await call
            except LeaseLostError:
                return False
            first = answer[0]
            outcome = first if isinstance(first, WriteOutcome) else first[0] if isinstance(first, tuple) else None
            return (outcome or getattr(first, "outcome", first)) not in (WriteOutcome.STALE, None)

        async def claim_again(lease: JobLease) -> bool:
            again = await repository.claim_again([TENANT], lease.token, holder=ME, local_deadline=0.0)
            return bool(again.chunks)

        async def claim_as_read(lease: JobLease) -> bool:
            # The claim of a chunk as it was read, sent once more.
            again = await repository.claim_chunk(
                TENANT, lease.job_id, lease.seq, lease.version - 1, holder=ME, token=lease.token, lease_seconds=60
            )
            return bool(again.chunks)

        return {
            "heartbeat": lambda lease: told(repository.heartbeat([lease], lease_seconds=600, rows_done=[7])),
            "checkpoint": lambda lease: told(repository.checkpoint(lease, {"at": 7}, rows_done=7)),
            "checkpoint that renews": lambda lease: told(repository.checkpoint(lease, 7, renew_seconds=600)),
            "complete": lambda lease: told(repository.complete(lease)),
            "complete_many": lambda lease: told(repository.complete_many([lease], [None])),
            "fail": lambda lease: told(repository.fail(lease, "lost", retryable=True)),
            "fail for good": lambda lease: told(repository.fail(lease, "lost", retryable=False)),
            "release": lambda lease: told(repository.release([lease])),
            "release to retry": lambda lease: told(repository.release([lease], "retry")),
            "row errors": lambda lease: told(repository.row_errors_add(lease, [RowError(1, "lost")])),
            "claim_again": claim_again,
            "claim as read": claim_as_read,
        }

    async def complete(self, gateway: Connection, worker: Connection, item: JobLease) -> bool:
        return (await DurableRepository(worker).complete(item)).outcome is WriteOutcome.APPLIED


class Events(Room):
    async def prepare(self, gateway: Connection) -> None:
        await outbox.write(gateway, *range(COUNT))

    async def claim(self, gateway: Connection, worker: Connection, by: str) -> list[ClaimedEvent]:
        return await outbox.take(gateway, COUNT, by=by)

    async def release(self, gateway: Connection, worker: Connection, item: ClaimedEvent, by: str) -> None:
        assert await outbox.tell(gateway, [item], "release", by=by) == [("applied", "ready")]

    def verbs(self, gateway: Connection, worker: Connection) -> dict[str, Callable[[ClaimedEvent], Awaitable[Any]]]:
        async def told(event: ClaimedEvent, outcome: str, **options: Any) -> bool:
            return await outbox.tell(gateway, [event], outcome, **options) != [("stale", "claimed")]

        return {
            "delivered": lambda event: told(event, "delivered"),
            "failed": lambda event: told(event, "failed", error="lost"),
            "failed for good": lambda event: told(event, "failed", error="lost", max_attempts=1),
            "park": lambda event: told(event, "park", error="lost"),
            "release": lambda event: told(event, "release"),
            "unclaim": lambda event: OutboxRepository(gateway).unclaim([TENANT], ME),
        }

    async def complete(self, gateway: Connection, worker: Connection, item: ClaimedEvent) -> bool:
        return await outbox.tell(gateway, [item], by=OTHER) == [("applied", "gone")]


@pytest.mark.invariant("J3")
async def test_no_verb_of_the_holder_of_a_lost_claim_changes_anything_in_any_room(pair: Pair) -> None:
    """I3: by the fence where that differs; where it does not, by the instance, the token, or the name of the claim."""
    rooms: list[Room] = [Jobs(), Chunks(), Events()]
    async with new_pair(pair) as (name, stream):
        async with connected(pair.gateway_dsn(name)) as gateway, connected(pair.worker_dsn(name)) as worker:
            for room in rooms:
                await room.prepare(gateway)
            await cut(pair, name, stream)
            for room in rooms:
                await room.lose(gateway, worker)
        await fail_over(pair)
        async with (
            connected(pair.gateway_dsn(name)) as gateway,
            connected(pair.worker_dsn(name)) as worker,
            connected(pair.admin_dsn(name, of_standby=True)) as admin,
        ):
            for room in rooms:
                await room.make_again(gateway, worker, OTHER)
            before = await everything(admin)
            for room in rooms:
                for verb, say in room.verbs(gateway, worker).items():
                    for lost, how in zip(room.lost, ("the same fence", "one behind", "one ahead"), strict=True):
                        what = f"{type(room).__name__}, {verb}, {how}"
                        assert not await say(lost), what
                        assert await everything(admin) == before, what
            for room in rooms:
                for held in room.held:
                    assert await room.complete(gateway, worker, held), f"{type(room).__name__}: the good claim"


# --- relays with chunks ---------------------------------------------------------------------------------------------


class Loads:
    """Handlers of chunks that wait until they are told to go on, and then store a row with their checkpoint."""

    def __init__(self, relay: Relay, who: str) -> None:
        self.began: list[tuple[int, int, UUID]] = []
        self.ended: list[int] = []
        self.go_on = anyio.Event()

        @relay.chunk_handler(KIND)
        async def load(ctx: ChunkContext) -> None:
            self.began.append((ctx.seq, ctx.lease.version, ctx.lease.token))
            await self.go_on.wait()
            async with ctx.transaction() as conn:
                await conn.execute("insert into public.loaded values ($1, $2)", ctx.seq, who)
                await ctx.save_checkpoint(1)
            self.ended.append(ctx.seq)

    @property
    def versions(self) -> list[tuple[int, int]]:
        return sorted((seq, version) for seq, version, _ in self.began)


CHUNKS: dict[str, Any] = {"durable": {"lease_seconds": 60.0}, "poll_seconds": 0.5}


@dataclass
class Import:
    """A relay that holds all chunks of a job, by claims of which the new primary knows nothing."""

    database: str
    relay: Relay
    loads: Loads
    job_id: UUID
    work: Work
    admin: Connection

    async def is_loaded_once(self, who: str) -> None:
        """Hold that the job has ended well, with one row of each chunk."""
        assert (await self.work.end(self.job_id)).status is JobStatus.COMPLETED
        rows = await self.admin.fetch("select seq, who from public.loaded order by seq")
        assert [tuple(row) for row in rows] == [(seq, who) for seq in range(1, COUNT + 1)]


@asynccontextmanager
async def new_import(pair: Pair, way_to_second: TcpProxy | None = None) -> AsyncIterator[Import]:
    """Make one, and fail over. Its relay reaches the second server by a proxy, if given, which is told of its port."""
    async with AsyncExitStack() as stack:
        name, stream = await stack.enter_async_context(new_pair(pair))
        async with connected(pair.admin_dsn(name)) as admin, connected(pair.gateway_dsn(name)) as gateway:
            await admin.execute("create table public.loaded (seq bigint, who text)")
            await admin.execute("grant select, insert on public.loaded to public")
            job_id = await Work(gateway).submit(COUNT)
        await cut(pair, name, stream)
        if way_to_second is not None:
            pair.ports = (pair.first.port, way_to_second.port)
        relay = chunk_relay(pair.worker_dsn(name), **CHUNKS)
        pair.ports = ()
        loads = Loads(relay, "holder")
        await stack.enter_async_context(running(relay))
        await eventually(lambda: len(loads.began) == COUNT)
        await fail_over(pair)
        gateway = await stack.enter_async_context(connected(pair.gateway_dsn(name)))
        admin = await stack.enter_async_context(connected(pair.admin_dsn(name, of_standby=True)))
        yield Import(name, relay, loads, job_id, Work(gateway), admin)


@pytest.mark.invariant("J2")
async def test_what_the_handlers_of_lost_chunk_claims_store_is_rolled_back(pair: Pair) -> None:
    """Their chunks are another relay's by then, under the same lease versions."""
    # The first relay reaches the new primary only when the second one has claimed there.
    async with TcpProxy("127.0.0.1", 1) as later:
        later.mode = "reset"
        async with new_import(pair, later) as made:
            assert (await made.work.chunk(made.job_id)).status is ChunkStatus.PENDING
            other = chunk_relay(pair.worker_dsn(made.database), **CHUNKS)
            loads = Loads(other, "other")
            async with running(other):
                await eventually(lambda: len(loads.began) == COUNT)
                assert loads.versions == made.loads.versions
                made.loads.go_on.set()
                later.upstream_port, later.mode = pair.standby.port, "pass"
                await eventually(
                    lambda: made.relay.metrics.chunks_lost == COUNT, 30, message="the first relay is told:"
                )
                assert made.loads.ended == []
                assert made.relay.metrics.chunks_done == 0
                assert await made.admin.fetchval("select count(*) from public.loaded") == 0
                loads.go_on.set()
                await made.is_loaded_once("other")


@pytest.mark.invariant("J2")
async def test_a_relay_that_is_given_its_own_lost_chunks_again_stores_what_they_are_once(pair: Pair) -> None:
    """Its first handlers are told that their leases are lost, though the relay, chunk and version are the same."""
    async with new_import(pair) as made:
        loads, metrics = made.loads, made.relay.metrics
        await eventually(lambda: len(loads.began) == 2 * COUNT, 30, message="the chunks are claimed again:")
        assert Counter(loads.versions) == dict.fromkeys(loads.versions, 2)
        loads.go_on.set()
        await made.is_loaded_once("holder")
        await eventually(lambda: metrics.chunks_lost == metrics.chunks_done == COUNT)
        assert sorted(loads.ended) == list(range(1, COUNT + 1))


# --- drainers -------------------------------------------------------------------------------------------------------


@pytest.mark.invariant("O1")
async def test_an_event_whose_settling_was_lost_is_delivered_again_and_a_lost_claim_settles_nothing(pair: Pair) -> None:
    """At least once: `known`, of which the claim was not lost; `settled`, and `claimed`, of which nothing is known."""
    async with new_pair(pair) as (name, stream):
        old, new = outbox.Recorder(), outbox.Recorder()
        async with Outbox(pair.gateway_dsn(name), default_sink=old) as first:
            async with connected(pair.gateway_dsn(name)) as gateway:
                await outbox.write(gateway, "known")
                known = await first.claim()
                await outbox.write(gateway, "settled")
                await outbox.write(gateway, "claimed")
            await cut(pair, name, stream)
            assert (await first.deliver(known)).delivered == 1
            first.search_again()
            assert (await first.drain(1)).delivered == 1
            lost = await first.claim()
            assert [event.payload for event in lost.events] == ["claimed"]
            await fail_over(pair)
            async with (
                Outbox(pair.gateway_dsn(name), default_sink=new) as second,
                connected(pair.admin_dsn(name, of_standby=True)) as admin,
            ):
                held = await second.claim()
                assert [event.payload for event in held.events] == ["settled", "claimed"]
                assert held.events[1].fence == lost.events[0].fence
                before = await everything(admin)
                assert (await first.deliver(lost)).stale == 1
                assert await everything(admin) == before
                assert (await second.deliver(held)).delivered == 2
                # Of the first one nobody speaks any more: its claim grows old, as that of a drainer that has died.
                assert await outbox.states(admin) == {"known": "claimed"}
                await outbox.make_stale(admin)
                second.search_again()
                await second.drain()
                await outbox.make_due(admin)
                second.search_again()
                await second.drain()
                assert await outbox.states(admin) == {}
        assert old.payloads == ["known", "settled", "claimed"]
        assert new.payloads == ["settled", "claimed", "known"]
        assert new.events[-1].attempts == 1
