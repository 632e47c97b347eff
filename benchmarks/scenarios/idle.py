"""What 40 idle relay processes ask of the server, and how many of their claims a ring costs.

40 processes serve one relay. All their statements pass a counter on the wire (tap.py), which knows each process by its
`application_name`; time does not matter here.

Polls: 120 poll intervals, as many as 10 minutes have at the default of 5 seconds. They are run fifty times as fast, and
sweeps and probes with them, so that their share stays that of the defaults. `claims` is claims for each poll that a
relay counted; `statements` is what is sent for each of these claims, itself included and the listener's probes not;
`with probes` has these too, which come as often as polls. The document has each kind of statement by name.

Bursts: other 40 processes whose polls, sweeps and probes are an hour apart, so that every claim has a ring as its
cause. One job; then 100 by one `enqueue_many`; then 100 by as many `enqueue` calls at once. Counted until no statement
has come for a while: claims for each process. The relays have more slots than there are jobs: a process whose claim
comes back full has to ask again, and has a reason to.

`bare` is the least that could be done: LISTEN, a claim when it is rung or a poll is due, a completion.

What it does not say: anything of delayed jobs, for which an idle relay has a timer; nor of many tenants (that is in
`tenants`).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import asyncpg

from benchmarks.bare import statements
from benchmarks.fleet import Member, fleet
from benchmarks.model import Case, Contender, Figure, Sample, Scenario, check
from benchmarks.sandbox import BODY, HEADERS, OPERATION, RELAY, TENANT, TTL, Sandbox
from benchmarks.tap import tapped
from dispatch_core import DispatchRequest
from dispatch_core.codec import decode_json
from dispatch_core.ids import new_id
from dispatch_core.settings import CoreSettings
from gateway_sdk import GatewayClient
from relay_sdk import DispatchJob, Relay, RelaySettings, Reply

__all__ = ["SCENARIO"]

_BURST: Final = 100
_SLOTS: Final = 2 * _BURST
_NEVER_SECONDS: Final = 3600.0
_SILENCE_SECONDS: Final = 0.3

_OURS = Contender("ours", "ours", "Relay with its defaults, poll, sweep and probe fifty times as often")
_BARE = Contender("bare", "baseline", "LISTEN on one connection, claim and complete on another", in_quick=False)

Burst = Callable[[], Awaitable[object]]


async def idle_relay(member: Member, *, dsn: str, seconds: float) -> list[int]:
    """Be a relay that polls, sweeps and probes every so many seconds; return [polls, claims, jobs]."""
    core = CoreSettings.load(dsn=dsn, probe_seconds=seconds, application_name=f"relay-{member.number}")
    settings = RelaySettings.load(poll_seconds=seconds, sweep_seconds=seconds)
    relay = Relay(RELAY, tenants=[TENANT], core=core, settings=settings, concurrency=_SLOTS)
    handled = 0

    @relay.handler(OPERATION)
    async def handle(_job: DispatchJob) -> Reply:
        nonlocal handled
        handled += 1
        return Reply()

    async with asyncio.TaskGroup() as group:
        group.create_task(relay.run())
        async with asyncio.timeout(60):
            while not (relay.metrics.claims_empty and relay.health().listener == "listening"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        member.ready()
        await member.stop.wait()
        relay.stop()
    return [relay.metrics.polls, relay.metrics.claims, handled]


async def idle_bare(member: Member, *, dsn: str, seconds: float) -> list[int]:
    """Be the least that listens, polls and works; return [polls, claims, jobs]."""
    named = {"application_name": f"relay-{member.number}"}
    listening: Any = await asyncpg.connect(dsn, server_settings=named)
    working: Any = await asyncpg.connect(dsn, server_settings=named)
    rung = asyncio.Event()
    polls = claims = handled = 0
    await listening.add_listener(statements.JOB_CHANNEL, lambda *_: rung.set())

    async def serve() -> None:
        nonlocal polls, claims, handled
        poll_at, loop = 0.0, asyncio.get_running_loop()
        is_due = True
        while True:
            if is_due:
                poll_at = loop.time() + seconds * random.uniform(0.75, 1.25)
                polls += 1
                is_due = False
            rung.clear()
            claims += 1
            jobs = await working.fetch(
                statements.CLAIM, TENANT, RELAY, named["application_name"], new_id(), TTL, _SLOTS
            )
            if claims == 1:
                member.ready()
            if jobs:
                ids, fences = [job["job_id"] for job in jobs], [job["fence"] for job in jobs]
                handled += len(ids)
                await working.fetch(
                    statements.COMPLETE, TENANT, ids, fences, named["application_name"], [b""] * len(ids), RELAY
                )
            if len(jobs) < _SLOTS:
                try:
                    async with asyncio.timeout_at(poll_at):
                        await rung.wait()
                except TimeoutError:
                    is_due = True

    task = asyncio.get_running_loop().create_task(serve())
    await member.stop.wait()
    task.cancel()
    await asyncio.wait([task])
    for connection in (listening, working):
        connection.terminate()
    return [polls, claims, handled]


async def _polls(sandbox: Sandbox, case: Case, ours: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of relays that have nothing to do, and each kind of statement for each poll interval."""
    processes = case.parameters["processes"]
    seconds, intervals = case.parameters["poll_ms"] / 1000, case.parameters["polls"]
    dsn = sandbox.worker_dsn if ours else sandbox.bare_dsn
    async with tapped(dsn) as tap:
        async with fleet(idle_relay if ours else idle_bare, processes, dsn=tap.dsn(dsn), seconds=seconds) as members:
            # What the start brings is over.
            await asyncio.sleep(2 * seconds)
            before = tap.by_name()
            await asyncio.sleep(seconds * intervals)
            counts = tap.by_name() - before
        every = tap.by_name()
    polls, claims, _ = (sum(column) for column in zip(*members.results, strict=True))
    # What they say of themselves and what was on the wire: every claim was counted.
    check(claims, on_the_wire=every["claim"])
    each = {name: count / counts["claim"] for name, count in counts.most_common()}
    figures = {"claims": claims / polls, "statements": sum(each.values()) - each.get("probe", 0.0)}
    figures["with probes"] = sum(each.values())
    return figures, {f"for each claim: {name}": share for name, share in each.items()}


async def _bursts(
    sandbox: Sandbox, case: Case, ours: bool
) -> tuple[dict[str, float], dict[str, int], dict[str, float]]:
    """Return claims for each process and burst, the checks, and the most claims that any process made of each."""
    processes = case.parameters["processes"]
    dsn = sandbox.worker_dsn if ours else sandbox.bare_dsn
    figures: dict[str, float] = {}
    extra: dict[str, float] = {}
    async with (
        tapped(dsn) as tap,
        fleet(idle_relay if ours else idle_bare, processes, dsn=tap.dsn(dsn), seconds=_NEVER_SECONDS) as members,
    ):
        for name, burst in (await _ways(sandbox, ours)).items():
            await tap.silence(_SILENCE_SECONDS)
            before = tap.counts.copy()
            await burst()
            await tap.silence(_SILENCE_SECONDS)
            claims = Counter(
                {session: n for (session, statement), n in (tap.counts - before).items() if statement == "claim"}
            )
            figures[name] = claims.total() / processes
            extra[f"{name}, most"] = max(claims.values(), default=0)
    jobs = 1 + 2 * _BURST
    found = await sandbox.counts("ours" if ours else "bare")
    checks = check(
        jobs,
        handled=sum(result[2] for result in members.results),
        succeeded=found["succeeded"],
        results=found["results"],
    )
    return figures, checks, extra


async def _ways(sandbox: Sandbox, ours: bool) -> dict[str, Burst]:
    if ours:
        headers = decode_json(HEADERS.encode())
        request = DispatchRequest(RELAY, OPERATION, headers=headers, body=BODY, ttl=TTL)

        async def many() -> None:
            async with GatewayClient(sandbox.gateway_dsn) as client:
                await client.tenant(TENANT).enqueue_many([request] * _BURST)

        async def singles(count: int) -> None:
            async with GatewayClient(sandbox.gateway_dsn) as client:
                tenant = client.tenant(TENANT)
                await asyncio.gather(*(tenant.enqueue(RELAY, OPERATION, headers, BODY, ttl=TTL) for _ in range(count)))

    else:

        async def many() -> None:
            async with sandbox.connections(sandbox.bare_dsn, 1) as [connection]:
                ids = [new_id() for _ in range(_BURST)]
                await connection.fetch(
                    f"{statements.INSERT_MANY} returning pg_notify('{statements.JOB_CHANNEL}', '')",
                    TENANT,
                    ids,
                    RELAY,
                    OPERATION,
                    [HEADERS] * _BURST,
                    [BODY] * _BURST,
                    TTL,
                )

        async def singles(count: int) -> None:
            async with sandbox.connections(sandbox.bare_dsn, 1) as [connection]:
                for _ in range(count):
                    await connection.fetch(
                        statements.INSERT_NOTIFY, TENANT, new_id(), RELAY, OPERATION, HEADERS, BODY, TTL
                    )

    return {"1 job": lambda: singles(1), "100 jobs": many, "100 calls": lambda: singles(_BURST)}


async def _run(sandbox: Sandbox, case: Case, contender: Contender) -> Sample:
    ours = contender is _OURS
    polls, kinds = await _polls(sandbox, case, ours)
    bursts, checks, most = await _bursts(sandbox, case, ours)
    return Sample(polls | bursts, checks, kinds | most)


def _cases(quick: bool) -> Sequence[Case]:
    if quick:
        return [Case({"processes": 8, "polls": 8, "poll_ms": 100}, 1 + 2 * _BURST)]
    return [Case({"processes": 40, "polls": 120, "poll_ms": 100}, 1 + 2 * _BURST)]


def _figure(name: str, unit: str, target: float | None = None) -> Figure:
    return Figure(name, unit, higher_is_better=False, target=target, judged="value")


SCENARIO: Final = Scenario(
    name="idle",
    title="statements of 40 idle relay processes, and claims after a ring",
    figures=(
        _figure("claims", "/poll", 1.0),
        _figure("statements", "/poll", 1.0),
        _figure("with probes", "/poll"),
        _figure("1 job", "claims/process", 1.0),
        _figure("100 jobs", "claims/process", 1.0),
        _figure("100 calls", "claims/process"),
    ),
    contenders=(_OURS, _BARE),
    cases=_cases,
    run=_run,
    most_rounds=1,
)
