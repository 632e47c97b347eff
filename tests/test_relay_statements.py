"""What a relay's work costs, counted in statements, array elements and objects: what is guarded here is not time."""

from __future__ import annotations

import asyncio
import gc
import math
from itertools import pairwise
from typing import Any

import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.ring_inside import RingInside
from dispatch_core.settings import CoreSettings
from relay_sdk import DispatchJob, Relay, RelaySettings, Reply
from relay_sdk.sweeper import Sweeper
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.protocol import claimed_job, end_lease
from tests.support.relays import Jobs, new_relay, running

NEVER: dict[str, Any] = {"poll_seconds": 600.0, "sweep_seconds": 600.0}


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """All statements of this process that name a function of ours, (its name, arguments), as they are sent."""
    seen: list[tuple[str, tuple[Any, ...]]] = []
    fetch = asyncpg.Connection.fetch

    async def spy(self: Any, query: str, *args: Any, **options: Any) -> Any:
        seen.extend((name, args) for name in ("claim", "complete", "ring", "run_sweeps") if f"relay.{name}(" in query)
        return await fetch(self, query, *args, **options)

    monkeypatch.setattr(asyncpg.Connection, "fetch", spy)
    return seen


async def test_a_drained_backlog_takes_a_claim_and_a_completion_per_batch_and_no_ring_per_job(
    database: TestDatabase, gateway: Any, statements: list[tuple[str, tuple[Any, ...]]]
) -> None:
    jobs = 1500
    await Jobs(gateway).enqueue_many(jobs)
    statements.clear()
    relay = new_relay(database, concurrency=2000, **NEVER)

    @relay.fallback
    async def handler(job: DispatchJob) -> Reply:
        return Reply(b"done")

    await relay.run(drain=True)
    assert relay.metrics.jobs_succeeded == jobs
    claims = [args for name, args in statements if name == "claim"]
    completions = [args for name, args in statements if name == "complete"]
    rings = [args for name, args in statements if name == "ring"]
    # Three full ones and the two that find nothing more, one beside the other; then one from zero.
    assert len(claims) <= 6
    assert len(completions) <= 8
    assert len(rings) <= len(completions)
    # 200 ids a row, and a row begun for each statement.
    assert sum(len(args[0]) for args in rings) <= jobs / 200 + len(rings)
    # No array has an element a job, where all replies are alike: tenant, count and body once. The driver looks at each
    # element of an array longer than at any text.
    elements = sum(len(each) for args in completions for each in args if isinstance(each, list))
    assert elements <= 3 * len(completions)


async def test_a_full_answer_that_a_short_one_has_overtaken_costs_no_claims(
    database: TestDatabase,
    gateway: Any,
    statements: list[tuple[str, tuple[Any, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drain made two claims more where the third full answer came after the first empty one."""
    jobs = 1500
    await Jobs(gateway).enqueue_many(jobs)
    statements.clear()
    claim, sent, third_took, nothing_left = RelayDispatchRepository.claim, 0, asyncio.Event(), asyncio.Event()

    async def held(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        number = sent
        if number == 4:
            await third_took.wait()
        claimed = await claim(self, *args, **options)
        if number == 3:
            third_took.set()
            await nothing_left.wait()
        elif not claimed.looked_at:
            nothing_left.set()
        return claimed

    monkeypatch.setattr(RelayDispatchRepository, "claim", held)
    relay = new_relay(database, concurrency=2000, **NEVER)

    @relay.fallback
    async def handler(job: DispatchJob) -> Reply:
        return Reply(b"done")

    async with running(relay):
        await eventually(lambda: relay.metrics.jobs_succeeded == jobs)
        assert relay._session is not None
        claimer = relay._session._claimer
        await eventually(lambda: claimer.has_nothing_to_do and claimer.next_due_seconds == math.inf)
    # The empty one was above the cursor, so one from zero comes after it.
    assert relay.metrics.claims == 5


async def test_replies_as_large_as_what_a_claim_brings_are_written_in_one_batch(
    database: TestDatabase, gateway: Any, statements: list[tuple[str, tuple[Any, ...]]]
) -> None:
    await Jobs(gateway).enqueue_many(64, body=b"x" * 65536)
    statements.clear()
    relay = new_relay(database, **NEVER)

    @relay.fallback
    async def handler(job: DispatchJob) -> Reply:
        return Reply(job.body)

    await relay.run(drain=True)
    assert [sum(args[3]) for name, args in statements if name == "complete"] == [64]


async def test_an_idle_relay_makes_one_statement_a_poll_and_sweeps_only_when_there_is_something_to_sweep(
    database: TestDatabase, gateway: Any, worker: Any, admin: Any, statements: list[tuple[str, tuple[Any, ...]]]
) -> None:
    await admin.execute("set app.tenant_id = 'acme'")
    job = await claimed_job(gateway, worker, by="another", tenant="acme", relay="erp", max_attempts=2)
    # Otherwise the first claim finds that nobody has ever swept.
    await RelayDispatchRepository(worker).run_sweeps("erp", lease_seconds=0.001, every_seconds=(0.001,) * 4)
    statements.clear()
    relay = new_relay(database, poll_seconds=0.1, sweep_seconds=0.15, lease_seconds=0.5)

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        return None

    async with running(relay):
        await eventually(lambda: relay.metrics.polls >= 8)
        assert {name for name, _ in statements} == {"claim"}
        assert relay.metrics.polls - 1 <= len(statements) <= relay.metrics.polls
        asked = [args[-1] for _, args in statements]
        assert any(asked[1:])
        assert not all(asked)
        await end_lease(admin, job.job_id)
        await eventually(lambda: relay.metrics.swept == 1)
        await Jobs(gateway).end(job.job_id)


@pytest.fixture
def claims_alone_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sweeps by the clock, after which no claim asks for a while."""

    async def run(sweeper: Sweeper) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Sweeper, "run", run)


@pytest.mark.usefixtures("claims_alone_ask")
async def test_only_the_claim_of_a_poll_asks_for_sweeps(
    database: TestDatabase, gateway: Any, statements: list[tuple[str, tuple[Any, ...]]]
) -> None:
    relay = new_relay(database, poll_seconds=600.0, sweep_seconds=0.001)

    @relay.fallback
    async def handler(job: DispatchJob) -> Reply:
        return Reply(b"done")

    async with running(relay):
        jobs = Jobs(gateway)
        for _ in range(3):
            await jobs.end(await jobs.enqueue(notify=True))
    asked = [args[-1] is not None for name, args in statements if name == "claim"]
    assert len(asked) >= 4
    assert asked == [True] + [False] * (len(asked) - 1)


@pytest.mark.usefixtures("claims_alone_ask")
async def test_after_a_claim_that_asked_for_sweeps_and_failed_comes_one_that_does_not_ask(
    database: TestDatabase, statements: list[tuple[str, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it asks for may be what it fails of: a search that takes longer than claims may."""
    fetch = asyncpg.Connection.fetch

    async def fail(self: Any, query: str, *args: Any, **options: Any) -> Any:
        if "relay.claim(" in query and args[-1] is not None:
            statements.append(("claim", args))
            raise asyncpg.QueryCanceledError("it took too long")
        return await fetch(self, query, *args, **options)

    monkeypatch.setattr(asyncpg.Connection, "fetch", fail)
    relay = new_relay(database, poll_seconds=0.02, sweep_seconds=0.001)

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        return None

    async with running(relay):
        await eventually(lambda: relay.metrics.claim_errors >= 3)
    asked = [args[-1] is not None for name, args in statements if name == "claim"]
    assert asked.count(True) >= 3
    assert (True, True) not in pairwise(asked)


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_lone_completion_rings_in_its_own_statement_where_that_is_cheap(
    database: TestDatabase,
    gateway: Any,
    statements: list[tuple[str, tuple[Any, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    allowed: bool,
) -> None:
    took: list[bool] = []
    monkeypatch.setattr(RingInside, "allows", lambda self: allowed)
    monkeypatch.setattr(RingInside, "took", lambda self, seconds, rang: took.append(rang))
    relay = new_relay(database, **NEVER)

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        return None

    jobs = Jobs(gateway)
    heard: list[str] = []
    await gateway.add_listener(
        await gateway.fetchval("select relay.channel('result', 'acme')"), lambda *args: heard.append(args[3])
    )
    async with running(relay):
        await eventually(lambda: relay.metrics.claims_empty)
        statements.clear()
        job_id = await jobs.enqueue()
        await gateway.execute("select pg_notify(relay.channel('wake', 'acme', 'erp'), '')")
        await eventually(lambda: heard == [job_id.hex])
        await eventually(lambda: relay.metrics.jobs_succeeded == 1)
    sent = list(statements)
    assert took == [allowed]
    assert [name for name, _ in sent] == ["claim", "complete"] + ([] if allowed else ["ring"])
    assert sent[1][1][-1] is allowed


async def test_a_relay_learns_the_bare_round_trip_from_the_proofs_of_its_listening_connection(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    monkeypatch.setattr(RingInside, "round_trip", lambda self, seconds: told.append(seconds))
    core = CoreSettings.load(dsn=database.worker_dsn, probe_seconds=0.1)
    relay = Relay("erp", tenants=["acme"], core=core, settings=RelaySettings(**NEVER))

    @relay.fallback
    async def handler(job: DispatchJob) -> None: ...

    async with running(relay):
        await eventually(lambda: len(told) >= 1)


async def test_completions_that_are_not_alone_do_not_ring_inside(
    database: TestDatabase,
    gateway: Any,
    statements: list[tuple[str, tuple[Any, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RingInside, "allows", lambda self: True)
    await Jobs(gateway).enqueue_many(20)
    statements.clear()
    relay = new_relay(database, **NEVER)

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        return None

    await relay.run(drain=True)
    batches = [args for name, args in statements if name == "complete" and sum(args[3]) > 1]
    assert batches
    assert not any(args[-1] for args in batches)


async def test_a_job_in_hand_has_few_objects(database: TestDatabase, gateway: Any) -> None:
    count = 200
    relay = new_relay(database, concurrency=count, **NEVER)
    go = asyncio.Event()
    started = 0

    @relay.fallback
    async def handler(job: DispatchJob) -> None:
        nonlocal started
        started += 1
        await go.wait()

    jobs = Jobs(gateway)
    async with running(relay):
        await eventually(lambda: relay.metrics.claims_empty)
        await jobs.enqueue_many(count)
        gc.collect()
        before = len(gc.get_objects())
        await jobs.ring()
        await eventually(lambda: started == count)
        gc.collect()
        # Slot, job, task, context, two coroutines; the headers; and what the handler waits by.
        assert len(gc.get_objects()) - before < 18 * count
        go.set()
