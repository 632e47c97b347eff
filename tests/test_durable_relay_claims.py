"""How a relay claims chunks, tidies up behind others and tells watchers: what is sent, and what is not."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from dispatch_core.dev.logins import GATEWAY_LOGIN, WORKER_LOGIN
from dispatch_core.durable_models import ChunkStatus, JobStatus
from dispatch_core.durable_repository import DurableRepository
from dispatch_core.errors import SchemaMismatchError, TenancyDeniedError
from dispatch_core.migrate import grant, migrate, revoke
from relay_sdk import ChunkContext, DispatchJob, Reply
from relay_sdk.chunk_progress import ChunkProgress
from relay_sdk.chunk_wants import Wants
from tests.support.chunks import KIND, SELDOM, Work, chunk_relay
from tests.support.databases import TestDatabase
from tests.support.durable import claim as claim_by_hand
from tests.support.durable import run_out
from tests.support.eventually import eventually
from tests.support.relays import TENANT, Jobs, running

NEVER: dict[str, Any] = {"poll_seconds": 600.0, "sweep_seconds": 600.0}


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All statements of this process, as they are sent."""
    seen: list[str] = []
    fetch, execute = asyncpg.Connection.fetch, asyncpg.Connection.execute

    async def spy_fetch(self: Any, query: str, *args: Any, **options: Any) -> Any:
        seen.append(query)
        return await fetch(self, query, *args, **options)

    async def spy_execute(self: Any, query: str, *args: Any, **options: Any) -> Any:
        seen.append(query)
        return await execute(self, query, *args, **options)

    monkeypatch.setattr(asyncpg.Connection, "fetch", spy_fetch)
    monkeypatch.setattr(asyncpg.Connection, "execute", spy_execute)
    return seen


async def _nothing(ctx: ChunkContext) -> None:
    pass


# --- what is sent ---


async def test_an_idle_relay_sends_one_claim_a_poll_and_no_heartbeat(
    database: TestDatabase, statements: list[str]
) -> None:
    relay = chunk_relay(database, durable=SELDOM, **NEVER)
    relay.chunk_handler(KIND)(_nothing)
    async with running(relay):
        await eventually(lambda: relay.metrics.chunk_claims_empty == 1)
        statements.clear()
        await asyncio.sleep(0.5)
        assert [s for s in statements if "relay." in s] == []
        assert relay.metrics.chunk_polls == 1
    assert not [s for s in statements if "relay.claim(" in s or "relay.run_sweeps(" in s]


async def test_a_relay_with_chunk_handlers_alone_sends_nothing_to_the_dispatch_room_and_needs_it_not(
    database: TestDatabase, gateway: Any, statements: list[str]
) -> None:
    work, jobs = Work(gateway), Jobs(gateway)
    dispatched = await jobs.enqueue("Do")
    job_id = await work.submit(2)
    relay = chunk_relay(database)
    relay.chunk_handler(KIND)(_nothing)
    statements.clear()
    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
        await eventually(lambda: relay.metrics.chunk_sweeps >= 1)
    of_dispatch = ("relay.claim(", "relay.claim_again(", "relay.run_sweeps(", "relay.heartbeat(", "relay.complete(")
    assert not [s for s in statements if any(name in s for name in of_dispatch)]
    assert (await jobs.get(dispatched)).status == "pending"
    assert relay.metrics.claims == 0


async def test_a_relay_with_job_handlers_alone_sends_nothing_to_the_durable_room(
    database: TestDatabase, gateway: Any, statements: list[str]
) -> None:
    jobs = Jobs(gateway)
    relay = chunk_relay(database)

    @relay.handler("Do")
    async def handler(job: DispatchJob) -> Reply:
        return Reply(b"done")

    dispatched = await jobs.enqueue("Do")
    statements.clear()
    async with running(relay):
        await jobs.end(dispatched)
        await eventually(lambda: relay.metrics.sweeps >= 1)
    assert not [s for s in statements if "durable" in s]


async def test_chunks_are_worked_on_where_the_durable_room_alone_is_installed(
    bare_database: TestDatabase,
) -> None:
    await migrate(bare_database.admin_dsn, only=["durable"])
    await grant(bare_database.admin_dsn, WORKER_LOGIN, role="worker", tenant=None)
    await grant(bare_database.admin_dsn, GATEWAY_LOGIN, role="gateway", tenant=None)
    relay = chunk_relay(bare_database)
    relay.chunk_handler(KIND)(_nothing)
    gateway = await asyncpg.connect(bare_database.gateway_dsn)
    work = Work(gateway)
    job_id = await work.submit(2)
    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED

    @relay.handler("Do")
    async def handler(job: DispatchJob) -> Reply:
        return Reply(b"done")

    with pytest.raises(SchemaMismatchError):
        await relay.run()
    await gateway.close()


async def test_a_backlog_takes_few_statements(database: TestDatabase, gateway: Any, statements: list[str]) -> None:
    work = Work(gateway)
    job_id = await work.submit(600)
    relay = chunk_relay(
        database, chunk_concurrency=400, chunk_claim_batch=200, chunk_complete_batch=200, durable=SELDOM, **NEVER
    )
    relay.chunk_handler(KIND)(_nothing)
    statements.clear()
    await relay.run(drain=True)
    assert (await work.job(job_id)).status is JobStatus.COMPLETED
    claims = [s for s in statements if "durable_claim(" in s]
    completions = [s for s in statements if "durable_complete_many(" in s]
    assert len(claims) <= 6
    assert len(completions) <= 8
    assert len([s for s in statements if "durable_finish(" in s]) <= 2
    assert not [s for s in statements if "durable_heartbeat(" in s]


async def test_of_a_batch_of_like_completions_only_the_numbers_go_to_the_server_and_one_row_comes_back(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver looks at every element of an array, and at every row."""
    job_id = await Work(gateway).submit(200)
    fetch, elements, rows = asyncpg.Connection.fetch, 0, 0

    async def spy(self: Any, query: str, *args: Any, **options: Any) -> Any:
        nonlocal elements, rows
        answer = await fetch(self, query, *args, **options)
        if "durable_complete_many(" in query:
            elements += sum(len(arg) for arg in args if isinstance(arg, list))
            rows += len(answer)
        return answer

    monkeypatch.setattr(asyncpg.Connection, "fetch", spy)
    relay = chunk_relay(
        database, chunk_concurrency=200, chunk_claim_batch=200, chunk_complete_batch=200, durable=SELDOM, **NEVER
    )
    relay.chunk_handler(KIND)(_nothing)
    await relay.run(drain=True)
    assert (await Work(gateway).job(job_id)).chunks[ChunkStatus.DONE] == 200
    assert 1 <= rows <= 5
    assert elements <= 200 + 7 * rows


async def test_a_completion_by_itself_is_one_statement(
    database: TestDatabase, gateway: Any, statements: list[str]
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    relay = chunk_relay(database, durable=SELDOM, poll_seconds=600.0)
    sent: list[str] = []

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        before = len(statements)
        await ctx.complete("mine")
        sent.extend(statements[before:])

    async with running(relay):
        await work.end(job_id)
    # Beside it the test looks, and watchers are rung for.
    assert [query.split()[0] for query in sent if "relay.durable_jobs" not in query and "relay.ring" not in query] == [
        "select"
    ], sent


async def test_while_claims_come_full_the_next_one_looks_behind_them_and_one_from_the_beginning_comes_last(
    database: TestDatabase, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await Work(gateway).submit(300)
    claim, asked = DurableRepository.claim, []

    async def spy(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(dict(options["after"]))
        return await claim(self, *args, **options)

    monkeypatch.setattr(DurableRepository, "claim", spy)
    relay = chunk_relay(database, chunk_concurrency=400, chunk_claim_batch=100, durable=SELDOM, **NEVER)
    relay.chunk_handler(KIND)(_nothing)
    await relay.run(drain=True)
    assert asked[:2] == [{}, {job_id: 100}]
    # On a slow machine there may be one from the beginning between them, once a second.
    assert all(after in ({}, {job_id: 200}, {job_id: 300}) for after in asked[2:])
    assert asked[-1] == {}


# --- wake-ups ---


async def test_a_submission_wakes_an_idle_relay(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    relay = chunk_relay(database, durable=SELDOM, **NEVER)
    relay.chunk_handler(KIND)(_nothing)
    async with running(relay):
        await eventually(lambda: relay.metrics.chunk_claims_empty == 1)
        job_id = await work.submit(1)
        assert (await work.end(job_id, timeout=5)).status is JobStatus.COMPLETED
    assert relay.metrics.chunk_polls == 1


async def test_without_wake_ups_the_poll_finds_chunks(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    async with asyncpg.create_pool(database.worker_dsn, min_size=0, max_size=5) as pool:
        relay = chunk_relay(database, pool=pool, poll_seconds=0.2)
        relay.chunk_handler(KIND)(_nothing)
        async with running(relay):
            await eventually(lambda: relay.metrics.chunk_claims_empty == 1)
            job_id = await work.submit(3)
            assert (await work.end(job_id)).status is JobStatus.COMPLETED
            assert relay.health().listener == "polling_only"


@pytest.mark.case("C08")
async def test_garbage_on_the_channel_is_a_ring_like_any_other(database: TestDatabase, gateway: Any) -> None:
    relay = chunk_relay(database, durable=SELDOM, **NEVER)
    relay.chunk_handler(KIND)(_nothing)
    worker = await asyncpg.connect(database.worker_dsn)
    async with running(relay):
        await eventually(lambda: relay.metrics.chunk_claims_empty == 1)
        await worker.execute("select pg_notify(relay.channel('durable', 'acme'), 'no ids')")
        await eventually(lambda: relay.metrics.chunk_claims_empty == 2)
    await worker.close()


async def test_a_tenant_that_is_denied_holds_up_no_other(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    relay = chunk_relay(database, tenants=["acme", "globex", "zeta"], poll_seconds=0.2)
    relay.chunk_handler(KIND)(_nothing)
    async with running(relay):
        await eventually(lambda: relay.metrics.chunk_claims_empty >= 1)
        await grant(database.admin_dsn, WORKER_LOGIN, role="worker", tenant="acme")
        await revoke(database.admin_dsn, WORKER_LOGIN, role="worker", tenant=None)
        errors = relay.metrics.chunk_claim_errors
        await eventually(lambda: relay.metrics.chunk_claim_errors > errors)
        job_id = await work.submit(2)
        assert (await work.end(job_id)).status is JobStatus.COMPLETED


async def test_a_login_that_is_no_worker_of_the_tenants_is_told_at_the_start(database: TestDatabase) -> None:
    relay = chunk_relay(database.gateway_dsn)
    relay.chunk_handler(KIND)(_nothing)
    with pytest.raises(TenancyDeniedError):
        await relay.run()


# --- without SKIP LOCKED ---


async def test_without_skip_locked_claims_chunks_are_claimed_one_by_one_by_compare_and_set(
    database: TestDatabase, gateway: Any, statements: list[str]
) -> None:
    work = Work(gateway)
    job_id = await work.submit(12)
    relays = [
        chunk_relay(database, chunk_concurrency=3, durable={"skip_locked_claims": False, **SELDOM}) for _ in range(2)
    ]
    seen: list[int] = []

    async def handler(ctx: ChunkContext) -> None:
        seen.append(ctx.seq)
        await asyncio.sleep(0.02)

    for relay in relays:
        relay.chunk_handler(KIND)(handler)
    statements.clear()
    async with running(*relays):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert sorted(seen) == list(range(1, 13))
    assert not [s for s in statements if "durable_claim(" in s]
    assert len([s for s in statements if "durable_claim_chunk(" in s]) >= 12


# --- sweeps ---


async def test_a_relay_takes_back_the_chunks_of_one_that_died(
    database: TestDatabase, gateway: Any, worker: Any, admin: Any
) -> None:
    work = Work(gateway)
    twice, once = await work.submit(2), await work.submit(1, idempotent=False)
    assert len(await claim_by_hand(worker, 3, by="dead", lease=0.2)) == 3
    relay = chunk_relay(database, durable={"lease_seconds": 1.5})
    relay.chunk_handler(KIND)(_nothing)
    async with running(relay):
        assert (await work.end(twice)).status is JobStatus.COMPLETED
        assert (await work.end(once)).status is JobStatus.NEEDS_REVIEW
    assert (await work.chunk(twice)).attempts == 2
    assert relay.metrics.chunks_reaped == 3


async def test_a_relay_ends_the_job_that_its_dead_holder_could_not(
    database: TestDatabase, gateway: Any, worker: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1)
    ((lease),) = await claim_by_hand(worker, 1, by="dead")
    await worker.fetch("select * from relay.durable_complete($1, $2, $3, $4, $5, 'null')", TENANT, *lease.fence)
    assert (await work.job(job_id)).status is JobStatus.RUNNING
    relay = chunk_relay(database)
    relay.chunk_handler(KIND)(_nothing)
    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED
    assert relay.metrics.chunks_claimed == 0


@pytest.mark.case("C21")
async def test_a_chunk_that_kills_its_workers_ends_failed_and_the_others_go_on(
    database: TestDatabase, gateway: Any, worker: Any, admin: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(3, max_attempts=2)
    for _ in range(2):
        leases = await claim_by_hand(worker, 1, by="dies")
        assert [lease.seq for lease in leases] == [1]
        await run_out(admin)
        await worker.fetch("select * from relay.durable_reap($1, 'reaper', 100)", TENANT)
    relay = chunk_relay(database)
    relay.chunk_handler(KIND)(_nothing)
    async with running(relay):
        assert (await work.end(job_id)).status is JobStatus.COMPLETED_WITH_ERRORS
    assert (await work.chunk(job_id, 1)).status is ChunkStatus.FAILED
    assert relay.metrics.chunks_claimed == 2


# --- watchers ---


async def test_watchers_are_told_of_progress_twice_a_second_at_most(database: TestDatabase, gateway: Any) -> None:
    work = Work(gateway)
    relay = chunk_relay(database, durable=SELDOM, chunk_concurrency=1, **NEVER)
    heard: list[str] = []
    took: list[float] = []
    channel = await work.repository.channel("durable_watch", TENANT)
    listening = await asyncpg.connect(database.gateway_dsn)
    await listening.add_listener(channel, lambda *args: heard.append(str(args[3])))

    @relay.chunk_handler(KIND)
    async def handler(ctx: ChunkContext) -> None:
        began = time.monotonic()
        for row in range(40):
            ctx.advance()
            await ctx.save_checkpoint(row)
            await asyncio.sleep(0.025)
        took.append(time.monotonic() - began)

    async with running(relay):
        job_id = await work.submit(1)
        await eventually(lambda: relay.metrics.checkpoints >= 20)
        assert heard, "told while it is under way"
        await work.end(job_id)
    await listening.close()
    assert {UUID(hex=text) for payload in heard for text in payload.split(",")} == {job_id}
    # Sealed, ended, the last ring of the relay; and in between, a second long as a rule, twice a second.
    assert len(heard) <= 3 + 2 * took[0] + 3


async def test_a_job_that_moves_again_while_a_pause_lasts_is_told_of_after_it() -> None:
    rung: list[Any] = []

    class Bell:
        def ring_watchers(self, tenant: str, job_ids: list[UUID]) -> None:
            rung.append((tenant, job_ids))

    progress = ChunkProgress(Bell())  # type: ignore[arg-type]
    job_id = UUID(int=1)
    task = asyncio.create_task(progress.run())
    progress.moved("acme", job_id)
    await eventually(lambda: len(rung) == 1)
    for _ in range(5):
        progress.moved("acme", job_id)
    assert len(rung) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rung == [("acme", [job_id])] * 2


# --- whom a claim is for ---


def test_what_a_claim_did_not_exhaust_is_wanted_again() -> None:
    wants = Wants(["acme", "globex"], ["a", "b"])
    assert wants.take({"a": 5, "b": 5}, 5) is None
    wants.ring("acme")
    ask = wants.take({"a": 2, "b": 0}, 5)
    assert ask is not None
    assert (ask.tenants, ask.kinds, ask.limits) == (["acme"], ["a"], [2])
    wants.answered(ask, {"a": 1}, 1)
    assert wants.take({"a": 2, "b": 0}, 5) is None, "of a there is no more"
    ask = wants.take({"a": 2, "b": 1}, 5)
    assert ask is not None
    assert ask.kinds == ["b"]
    wants.answered(ask, {"b": 1}, 1)
    assert not wants.is_quiet, "b came full"


def test_tenants_are_asked_for_one_by_one_after_a_denial() -> None:
    wants = Wants(["a", "b", "c"], ["k"])
    wants.ring_all()
    ask = wants.take({"k": 9}, 9)
    assert ask is not None
    assert wants.denied(ask) is None
    asked = []
    while (ask := wants.take({"k": 9}, 9)) is not None:
        asked.append(ask.tenants)
        if ask.tenants == ["b"]:
            assert wants.denied(ask) == "b"
        else:
            wants.answered(ask, {}, 0)
    assert asked == [["a"], ["b"], ["c"]]
    wants.ring_all()
    ask = wants.take({"k": 9}, 9)
    assert ask is not None
    assert ask.tenants == ["a", "c"]
