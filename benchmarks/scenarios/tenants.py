"""1,000 tenants with 100 jobs each in one relay process; a small tenant beside a large one; nothing to do for any.

rate     jobs a second of the drain of all of them, by `Relay` with all the tenants. `one` is held against it: as many
         jobs of a single tenant, the same relay otherwise, in the same run. `bare` goes from tenant to tenant by hand,
         claim and complete on two connections, knowing beforehand who has jobs.
rounds   another relay works on the 100,000 jobs of one tenant (with the small ones on its list) when one job each of
         some small tenants comes in, every 20 ms, from another process. A round is a claim and its answer; claims that
         are under way beside each other are one round. Counted is the longest chain of claims, each sent after the one
         before was answered, between the return of its enqueue and the start of its handler: the most of any. With one
         claim at a time that is every claim that was sent in between. `claims` is that: all that were sent, beside each
         other and for other lone jobs too. `claims to its own` ends with the one that brought it.
idle     claims for each poll of the queue, of a relay with all the tenants and no job, counted on the wire (tap.py) in
         short poll intervals; 1 = one statement for all tenants. Sweeps, probes and others are beside it by name.

What it does not say: all tenants are on one relay process and its list, which is sent with each claim that asks for all
of them. The jobs of one tenant are stored together, so a claim finds several of it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from benchmarks.bare import statements
from benchmarks.fleet import Member, fleet
from benchmarks.model import Case, CheckFailedError, Contender, Figure, Sample, Scenario, check, percentile
from benchmarks.sandbox import BODY, HEADERS, OPERATION, RELAY, TENANT, TTL, Connection, Sandbox
from benchmarks.scenarios.drain import CONCURRENCY
from benchmarks.scenarios.fan_in import load
from benchmarks.tap import tapped
from dispatch_core.codec import decode_json
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.ids import new_id
from dispatch_core.models import ClaimedJobs
from dispatch_core.settings import CoreSettings
from gateway_sdk import GatewayClient
from relay_sdk import DispatchJob, Relay, RelaySettings, Reply

__all__ = ["SCENARIO"]

_BATCH: Final = 500
_LONE_EVERY_SECONDS: Final = 0.02
_POLL_SECONDS: Final = 0.2
_POLLS: Final = 8

_OURS = Contender("ours", "ours", f"Relay with all tenants, concurrency={CONCURRENCY}")
_ONE = Contender("one", "baseline", "the same for as many jobs of one tenant")
_BARE = Contender("bare", "reference", "claim and complete tenant by tenant, batches of 500 at most, on 2 connections")


def _names(count: int) -> list[str]:
    return [f"tenant-{number:04}" for number in range(count)]


def _relay(tenants: Sequence[str], handled: list[UUID], **settings: Any) -> Relay:
    relay = Relay(RELAY, tenants=tenants, concurrency=CONCURRENCY, **settings)
    reply = Reply()

    @relay.handler(OPERATION)
    async def handle(job: DispatchJob) -> Reply:
        handled.append(job.job_id)
        return reply

    return relay


@asynccontextmanager
async def _running(relay: Relay) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        group.create_task(relay.run())
        async with asyncio.timeout(60):
            while not (relay.metrics.claims and relay.health().listener == "listening"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield
        relay.stop()


async def _drain(sandbox: Sandbox, tenants: Sequence[str], jobs: int) -> tuple[float, dict[str, int]]:
    handled: list[UUID] = []
    await _relay(tenants, handled, dsn=sandbox.worker_dsn).run(drain=True)
    found = await sandbox.counts("ours")
    checks = check(
        jobs,
        handled=len(handled),
        distinct=len(set(handled)),
        succeeded=found["succeeded"],
        results=found["results"],
    )
    return jobs / await sandbox.completion_span("ours"), checks


async def small_tenants(member: Member, *, dsn: str, tenants: list[str]) -> list[list[float]]:
    """Be a gateway of small tenants: one job each, at intervals; return when each call began and had returned."""
    headers = decode_json(HEADERS.encode())
    times = []
    async with GatewayClient(dsn) as client:
        await client.tenant(tenants[0]).poll_status(new_id())
        member.ready()
        await member.go.wait()
        for tenant in tenants:
            called_at = time.monotonic()
            await client.tenant(tenant).enqueue(RELAY, OPERATION, headers, BODY, ttl=TTL)
            times.append([called_at, time.monotonic()])
            await asyncio.sleep(_LONE_EVERY_SECONDS)
    return times


@dataclass
class _Claim:
    sent_at: float
    answered_at: float = math.inf
    brought: frozenset[str] = frozenset()


@contextmanager
def _recorded() -> Iterator[list[_Claim]]:
    """Record the claims of this process: when they were sent and answered, and whose jobs they brought."""
    claim, claims = RelayDispatchRepository.claim, list[_Claim]()

    async def recorded(self: Any, *args: Any, **options: Any) -> ClaimedJobs:
        claims.append(entry := _Claim(time.monotonic()))
        claimed = await claim(self, *args, **options)
        entry.answered_at, entry.brought = time.monotonic(), frozenset(claimed.counts)
        return claimed

    RelayDispatchRepository.claim = recorded  # type: ignore[method-assign]
    try:
        yield claims
    finally:
        RelayDispatchRepository.claim = claim  # type: ignore[method-assign]


def _rounds(claims: Sequence[_Claim], after: float, before: float) -> int:
    """Return how many claims, each sent after the one before was answered, were sent between the two moments."""
    rounds, end = 0, after
    between = [claim for claim in claims if after < claim.sent_at < before]
    for claim in sorted(between, key=lambda each: each.answered_at):
        if claim.sent_at >= end:
            rounds, end = rounds + 1, claim.answered_at
    return rounds


async def _lone(sandbox: Sandbox, tenants: list[str], jobs: int) -> dict[str, float]:
    """Return how soon jobs of small tenants start beside the backlog of a large one, in claims and in ms."""
    reply = Reply()
    started: dict[str, float] = {}
    others = lone_starts = 0
    all_started = asyncio.Event()
    async with (
        fleet(small_tenants, 1, dsn=sandbox.gateway_dsn, tenants=tenants) as gateway,
    ):
        relay = Relay(RELAY, tenants=[TENANT, *tenants], dsn=sandbox.worker_dsn, concurrency=CONCURRENCY)

        @relay.handler(OPERATION)
        async def handle(job: DispatchJob) -> Reply:
            nonlocal others, lone_starts
            if job.tenant_id == TENANT:
                others += 1
            else:
                lone_starts += 1
                started[job.tenant_id] = time.monotonic()
                if lone_starts == len(tenants):
                    all_started.set()
            return reply

        with _recorded() as claims:
            async with _running(relay):
                await gateway.go()
                async with asyncio.timeout(60):
                    await all_started.wait()
            left = jobs - others
    if left <= 0:
        raise CheckFailedError("the backlog was gone before the last lone job: there was nothing to stand beside")
    check(len(tenants), lone_starts=lone_starts, lone_tenants=len(started))
    rounds, sent, own, waits = [], [], [], []
    for tenant, (called_at, returned_at) in zip(tenants, gateway.results[0], strict=True):
        start = started[tenant]
        rounds.append(_rounds(claims, returned_at, start))
        sent.append(sum(returned_at < claim.sent_at < start for claim in claims))
        brought_by = next(claim.sent_at for claim in claims if tenant in claim.brought)
        own.append(sum(returned_at < claim.sent_at <= brought_by for claim in claims))
        waits.append((start - called_at) * 1000)
    return {
        "rounds": max(rounds),
        "claims": max(sent),
        "claims to its own": max(own),
        "lone p50": percentile(waits, 0.5),
        "lone max": max(waits),
    }


async def _idle(sandbox: Sandbox, tenants: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Return claims for each poll, and how often any other statement came."""
    async with tapped(sandbox.worker_dsn) as tap:
        core = CoreSettings.load(dsn=tap.dsn(sandbox.worker_dsn), probe_seconds=_POLL_SECONDS)
        settings = RelaySettings.load(poll_seconds=_POLL_SECONDS, sweep_seconds=_POLL_SECONDS)
        relay = _relay(tenants, [], core=core, settings=settings)
        async with _running(relay):
            await asyncio.sleep(2 * _POLL_SECONDS)
            polls, before = relay.metrics.polls, tap.by_name()
            while relay.metrics.polls < polls + _POLLS:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS / 20)
            # The last poll's claim may still be under way.
            await asyncio.sleep(_POLL_SECONDS / 4)
            polls, after = relay.metrics.polls - polls, tap.by_name()
    counts = after - before
    return counts["claim"] / polls, {f"idle_{name}": count / polls for name, count in sorted(counts.items())}


async def _ours(sandbox: Sandbox, case: Case) -> Sample:
    tenants = _names(case.parameters["tenants"])
    await load(sandbox, tenants, case.jobs // len(tenants))
    rate, checks = await _drain(sandbox, tenants, case.jobs)
    lone = await _lone(sandbox, tenants[: case.parameters["lone"]], case.preload)
    idle, counts = await _idle(sandbox, tenants)
    return Sample({"rate": rate, **lone, "idle": idle}, checks, counts)


async def _one(sandbox: Sandbox, case: Case) -> Sample:
    rate, checks = await _drain(sandbox, [TENANT], case.preload)
    return Sample({"rate": rate}, checks)


async def _bare(sandbox: Sandbox, case: Case) -> Sample:
    tenants = _names(case.parameters["tenants"])
    each = case.jobs // len(tenants)
    every: list[UUID] = []
    async with sandbox.connections(sandbox.bare_dsn, 2) as connections:
        for tenant in tenants:
            ids = [new_id() for _ in range(each)]
            await connections[0].fetch(
                statements.INSERT_MANY, tenant, ids, RELAY, OPERATION, [HEADERS] * each, [BODY] * each, TTL
            )
        left = iter(tenants)

        async def loop(connection: Connection) -> None:
            for tenant in left:
                while jobs := await connection.fetch(statements.CLAIM, tenant, RELAY, "bare", new_id(), TTL, _BATCH):
                    ids, fences = [job["job_id"] for job in jobs], [job["fence"] for job in jobs]
                    every.extend(ids)
                    await connection.fetch(statements.COMPLETE, tenant, ids, fences, "bare", [b""] * len(ids), RELAY)
                    if len(jobs) < _BATCH:
                        break

        await asyncio.gather(*(loop(connection) for connection in connections))
    found = await sandbox.counts("bare")
    checks = check(case.jobs, claimed=len(every), distinct=len(set(every)), succeeded=found["succeeded"])
    return Sample({"rate": case.jobs / await sandbox.completion_span("bare")}, checks)


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    return await {"ours": _ours, "one": _one, "bare": _bare}[contender.name](sandbox, case)


def _cases(quick: bool) -> Sequence[Case]:
    tenants, lone, jobs = (100, 3, 10_000) if quick else (1_000, 20, 100_000)
    return [Case({"tenants": tenants, "lone": lone}, jobs, jobs)]


SCENARIO: Final = Scenario(
    name="tenants",
    title="1,000 tenants in one relay process",
    figures=(
        Figure("rate", "jobs/s", higher_is_better=True, target=0.6),
        Figure("rounds", "rounds", higher_is_better=False, target=2, judged="value"),
        Figure("claims", "claims", higher_is_better=False),
        Figure("claims to its own", "claims", higher_is_better=False),
        Figure("lone p50", "ms", higher_is_better=False),
        Figure("lone max", "ms", higher_is_better=False),
        Figure("idle", "claims/poll", higher_is_better=False, target=1, judged="value"),
    ),
    contenders=(_OURS, _ONE, _BARE),
    cases=_cases,
    run=_run,
)
