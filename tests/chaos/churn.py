"""Connects, cancels and errors without end: whether anything stays behind of what comes and goes.

    make churn MINUTES=30 SEED=7        (python -m tests.chaos.churn)

One process has a gateway's client and a relay that live through all of it (`steady`), a second client whose sessions
are ended again and again (`disturbed`), and acts that come and go beside them: clients that are opened, used and
closed, also in the middle of calls and on a dead network; calls that are cancelled; waits that time out; handlers that
raise; relays that are started, stopped and cancelled; durable jobs that are submitted, watched and cancelled; drainers.

Every round has each act once. After a round, now and then, when all is quiet, what the process holds is measured. The
last measures are compared with those around the third minute, within `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import asyncpg
from pydantic import SecretStr

from dispatch_core import Outbox
from dispatch_core.dev.postgres import start_local_server
from dispatch_core.errors import RelayDispatchError
from dispatch_core.ids import new_id
from dispatch_core.settings import CoreSettings, DurableJobsSettings, OutboxSettings
from gateway_sdk import GatewayClient, GatewaySettings, OutboxDrainer
from relay_sdk import ChunkContext, DispatchJob, Reject, Relay, RelaySettings, Reply, Retry, run_relays
from tests.chaos.footprint import Footprint, Server, measure
from tests.support.databases import TestDatabase, make_template, new_database
from tests.support.eventually import eventually
from tests.support.proxy import TcpProxy

DATABASE: Final = "churn"
RELAY: Final = "erp"
TENANTS: Final = 50
"""That come one after the other, so that what is kept for each has to go."""
POOL: Final = 3

FIRST_MINUTES: Final = (2.0, 4.0)
LAST_MEASURES: Final = 4
TOLERANCE: Final = {
    "heap MB": (0.05, 0.5), "resident MB": (0.05, 2.0), "objects": (0.01, 500), "containers MB": (0.02, 0.25),
    "tasks": (0.0, 0), "descriptors": (0.0, 0), "sessions": (0.0, 0), "prepared": (0.0, 10), "session MB": (0.05, 0.5),
}  # fmt: skip
"""By how much the end may be above the beginning: a part of it, and so much beside. (A session prepares a statement
when somebody first needs it, and keeps what it has planned.)"""
KIND_GROWS: Final = 200
"""Of objects of one type, what is shown."""

logger = logging.getLogger("churn")


@dataclass(frozen=True)
class Place:
    """Where it is played."""

    admin_dsn: str
    gateway_dsn: str
    worker_dsn: str

    @classmethod
    def of(cls, database: TestDatabase) -> Place:
        return cls(database.admin_dsn, database.gateway_dsn, database.worker_dsn)


def core(dsn: str, name: str, *, least: int = 1, most: int = POOL) -> CoreSettings:
    """Return settings whose application is shown under `name`."""
    return CoreSettings(
        dsn=SecretStr(dsn), pool_min_size=least, pool_max_size=most, application_name=f"churn {name}",
        connect_timeout_seconds=5, command_timeout_seconds=5, probe_seconds=1, probe_timeout_seconds=1,
        reconnect_cap_seconds=0.5,
    )  # fmt: skip


DURABLE: Final = DurableJobsSettings(
    lease_seconds=3, sweep_seconds=1, finish_sweep_seconds=1, remove_sweep_seconds=10, retention_seconds=60,
    retry_base_seconds=0.05, retry_cap_seconds=0.1,
)  # fmt: skip


class Churn:
    """All of it, on one database; open it for a block."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        """Errors that the SDKs foresee, by their code: there are to be some."""
        self._tenant = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Churn]:
        """Open what lasts."""
        async with AsyncExitStack() as stack:
            self.admin: asyncpg.Connection[Any] = await asyncpg.connect(self.place.admin_dsn)
            stack.callback(self.admin.terminate)
            self.steady = await stack.enter_async_context(self._client("steady", least=2, most=2))
            self.proxy = await stack.enter_async_context(TcpProxy.before(self.place.gateway_dsn))
            dsn = self.proxy.dsn(self.place.gateway_dsn)
            self.disturbed = await stack.enter_async_context(self._client("disturbed", dsn))
            relay = self._relay("steady", [f"t{n}" for n in range(TENANTS)])
            group = await stack.enter_async_context(anyio.create_task_group())
            group.start_soon(run_relays, [relay])
            stack.callback(relay.stop)
            await eventually(lambda: relay.health().status == "ok", timeout=30)
            self.relay = relay
            yield self

    def _client(self, name: str, dsn: str | None = None, *, least: int = 1, most: int = POOL) -> GatewayClient:
        settings = GatewaySettings(
            core=core(dsn or self.place.gateway_dsn, name, least=least, most=most), write_timeout_seconds=3,
            poll_interval_seconds=1, poll_timeout_seconds=2, tenant_idle_seconds=1, sweep_interval_seconds=0.5,
            lease_seconds=3, result_keep_seconds=60, close_timeout_seconds=0.5,
        )  # fmt: skip
        # No drainer by the environment.
        return GatewayClient(settings=settings, durable=DURABLE)

    def _relay(self, name: str, tenants: list[str]) -> Relay:
        settings = RelaySettings(
            concurrency=20, lease_seconds=3, poll_seconds=1, sweep_seconds=0.5, grace_seconds=0.5,
            retry_base_seconds=0.05, retry_cap_seconds=0.1,
        )  # fmt: skip
        relay = Relay(
            RELAY, tenants=tenants, core=core(self.place.worker_dsn, name, least=2, most=2), settings=settings,
            durable=DURABLE,
        )  # fmt: skip

        @relay.handler("Ok")
        async def ok(job: DispatchJob) -> Reply:
            return Reply(job.body)

        @relay.handler("Thread")
        def thread(job: DispatchJob) -> Reply:
            return Reply(job.body)

        @relay.handler("Boom")
        async def boom(job: DispatchJob) -> Reply:
            raise ValueError("as asked")

        @relay.handler("No")
        async def no(job: DispatchJob) -> Reply:
            raise Reject("E-NO") if job.last_attempt else Retry(0.01)

        @relay.handler("Slow", timeout=2)
        async def slow(job: DispatchJob) -> Reply:
            await anyio.sleep(0.5)
            return Reply(job.body)

        @relay.chunk_handler("import")
        async def load(ctx: ChunkContext) -> None:
            ctx.row_error(1, "BAD", "as asked")
            await ctx.save_checkpoint({"at": 1})
            if ctx.payload == "boom":
                raise ValueError("as asked")
            async with ctx.transaction() as conn:
                await conn.execute("select 1")
            await anyio.sleep(0.05)

        return relay

    def tenant(self) -> str:
        """Return the next one."""
        self._tenant = (self._tenant + 1) % TENANTS
        return f"t{self._tenant}"

    # --- rounds ----------------------------------------------------------------------------------------

    async def round(self, pause: float = 0.0, *, at_once: int = 3, without: str = "") -> None:
        """Do each act once, but for one, in an order of this round's own, some at once; `pause` seconds after each."""
        acts: list[Callable[[], Awaitable[None]]] = [
            self.calls, self.cancelled_calls, self.waits_that_time_out, self.client_comes_and_goes,
            self.client_closes_amid_calls, self.client_on_a_dead_network, self.client_that_cannot_begin,
            self.sessions_end, self.network_breaks, self.relay_comes_and_goes, self.relay_is_cancelled,
            self.durable_jobs, self.outbox,
        ]  # fmt: skip
        acts = [act for act in acts if act.__name__ != without]
        self.chance.shuffle(acts)
        places = anyio.Semaphore(at_once)

        async def do(act: Callable[[], Awaitable[None]]) -> None:
            async with places:
                await act()
                self.done[act.__name__] += 1
                await anyio.sleep(pause)

        async with anyio.create_task_group() as group:
            for act in acts:
                group.start_soon(do, act)

    async def met_or_not(self, call: Awaitable[object]) -> None:
        """Await what may fail in a way that is foreseen."""
        try:
            await call
        except RelayDispatchError as error:
            self.met[error.code] += 1

    async def rest(self) -> None:
        """Return when nothing is under way any more."""
        self.proxy.mode = "pass"
        both = (self.steady, self.disturbed)
        await eventually(lambda: all(one.health().state == "listening" for one in both), timeout=30)
        await eventually(lambda: all(one.health().waiting == one.health().tenants == 0 for one in both), timeout=30)
        of_both = [one.runtime.lanes for one in both]
        lanes = [lanes for one in of_both for lanes in (one.enqueue, one.poll, one.expire)]
        await eventually(lambda: not any(map(len, lanes)), timeout=30)
        await eventually(lambda: not any(one.runtime.durable.watches._rooms for one in both), timeout=30)
        health = self.relay.health
        await eventually(lambda: health().in_hand == health().chunks_in_hand == 0, timeout=60)
        await eventually(lambda: all(one.runtime.doorbell.is_idle for one in both), timeout=30)
        # A pool has one connection or all of its own, as it comes. Now all.
        async with AsyncExitStack() as stack:
            for _ in range(POOL):
                await stack.enter_async_context(self.disturbed.runtime.database.connection())
        # What was told to end has its turn.
        for _ in range(20):
            await anyio.lowlevel.checkpoint()

    # --- acts ------------------------------------------------------------------------------------------

    async def calls(self) -> None:
        """Of every ending, by both clients."""
        for client in (self.steady, self.disturbed):
            acme = client.tenant(self.tenant())
            async with anyio.create_task_group() as group:
                for operation in ("Ok", "Thread", "Boom", "No", "Nobody's"):
                    call = acme.call(RELAY, operation, json={"n": 1}, timeout=5, max_attempts=2)
                    group.start_soon(self.met_or_not, call)

    async def cancelled_calls(self) -> None:
        async def cancelled(client: GatewayClient) -> None:
            with anyio.move_on_after(self.chance.choice((0.0, 0.001, 0.01, 0.05))):
                await self.met_or_not(client.tenant(self.tenant()).call(RELAY, "Slow", body="x", timeout=1))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(cancelled, self.steady)
                group.start_soon(cancelled, self.disturbed)

    async def waits_that_time_out(self) -> None:
        acme = self.steady.tenant(self.tenant())
        job_id = await acme.enqueue("nobody", "Ok", ttl=1.0)
        await self.met_or_not(acme.wait(job_id, timeout=0.05))
        await self.met_or_not(acme.wait(new_id()))
        await self.met_or_not(acme.wait(job_id, timeout=0))
        await acme.poll_many([job_id, new_id()])
        await acme.mark_expired(job_id)
        await acme.wait(job_id)
        for _ in range(2):
            await acme.enqueue(RELAY, "Ok", idempotency_key=str(job_id), ttl=1.0)

    async def client_comes_and_goes(self) -> None:
        async with self._client("passing") as client:
            await self.met_or_not(client.tenant(self.tenant()).call(RELAY, "Ok", body="x", timeout=5))

    async def client_closes_amid_calls(self) -> None:
        async with anyio.create_task_group() as group, self._client("passing") as client:
            for operation in ("Slow", "Slow", "Nobody's", "Ok"):
                acme = client.tenant(self.tenant())
                group.start_soon(self.met_or_not, acme.call(RELAY, operation, timeout=5))
                group.start_soon(self.met_or_not, acme.enqueue(RELAY, operation, ttl=5))
            await anyio.sleep(self.chance.choice((0.0, 0.005, 0.02, 0.1)))

    async def client_on_a_dead_network(self) -> None:
        async with (
            TcpProxy.before(self.place.gateway_dsn) as proxy,
            anyio.create_task_group() as group,
            self._client("passing", proxy.dsn(self.place.gateway_dsn)) as client,
        ):
            acme = client.tenant(self.tenant())
            await self.met_or_not(acme.enqueue(RELAY, "Ok", ttl=5))
            proxy.mode = "black_hole"
            group.start_soon(self.met_or_not, acme.call(RELAY, "Ok", timeout=0.2))
            await anyio.sleep(0.2)

    async def client_that_cannot_begin(self) -> None:
        async with TcpProxy.before(self.place.gateway_dsn) as proxy:
            proxy.mode = "reset"
            with suppress(RelayDispatchError):
                async with self._client("passing", proxy.dsn(self.place.gateway_dsn)):
                    raise AssertionError("it has no way to the database")

    async def sessions_end(self) -> None:
        """The listener's of the one client, and all that its pool has."""
        await self.admin.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name like 'churn disturbed%'"
        )
        await self.met_or_not(self.disturbed.tenant(self.tenant()).call(RELAY, "Ok", timeout=5))

    async def network_breaks(self) -> None:
        acme = self.disturbed.tenant(self.tenant())
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(self.met_or_not, acme.call(RELAY, "Slow", timeout=5))
            await anyio.sleep(self.chance.choice((0.0, 0.01, 0.1)))
            self.proxy.reset_all()

    async def relay_comes_and_goes(self) -> None:
        """It is told to stop while it works, or has only just begun."""
        tenant = self.tenant()
        relay = self._relay("passing", [tenant])
        for operation in ("Slow", "Slow", "Ok", "Boom"):
            await self.steady.tenant(tenant).enqueue(RELAY, operation, ttl=5, max_attempts=2)
        async with anyio.create_task_group() as group:
            group.start_soon(run_relays, [relay])
            # Before that there is nothing to stop.
            await eventually(lambda: relay.instance_id is not None, interval=0)
            await anyio.sleep(self.chance.choice((0.0, 0.02, 0.1, 0.3)))
            relay.stop(grace_seconds=self.chance.choice((0.0, 0.1, None)))

    async def relay_is_cancelled(self) -> None:
        tenant = self.tenant()
        await self.steady.tenant(tenant).enqueue(RELAY, "Slow", ttl=5, max_attempts=2)
        with anyio.move_on_after(self.chance.choice((0.01, 0.05, 0.3))):
            await run_relays([self._relay("passing", [tenant]), self._relay("passing", [tenant])])

    async def durable_jobs(self) -> None:
        durable = self.steady.tenant(self.tenant()).durable
        ends = await durable.submit("import", ["ok"] * 5 + ["boom"], max_attempts=2)
        gone = await durable.submit("import", ["ok"] * 50, max_attempts=2)
        with anyio.move_on_after(0.1):
            async for _ in durable.watch(gone):
                pass
        await self.met_or_not(durable.cancel(gone, actor="churn"))
        with anyio.move_on_after(self.chance.choice((0.0, 0.002, 0.01))):
            await self.met_or_not(durable.submit("import", ["ok"] * 3000))
        await self.met_or_not(durable.wait(ends, timeout=10))

    async def outbox(self) -> None:
        """Events are written, one is rolled back; a drainer comes, whose sink fails sometimes, and goes."""
        tenant = self.tenant()
        conn: asyncpg.Connection[Any] = await asyncpg.connect(self.place.gateway_dsn)
        try:
            for end in ("commit", "rollback"):
                await conn.execute("begin")
                for n in range(3):
                    await Outbox.enqueue(conn, "order", {"n": n}, tenant=tenant)
                await conn.execute(end)
        finally:
            await conn.close()
        settings = OutboxSettings(drain_interval_sec=0.2, backoff_cap_seconds=0.1, backoff_base_seconds=0.05)
        drainer = OutboxDrainer(self.place.gateway_dsn, settings=settings, tenants=[tenant])
        seen, enough = 0, anyio.Event()

        @drainer.sink("order")
        async def sink(event: object) -> None:
            nonlocal seen
            seen += 1
            if seen >= 5:
                enough.set()
            if seen % 2:
                raise ValueError("as asked")

        async with drainer:
            with anyio.move_on_after(3):
                await enough.wait()

    # --- measures --------------------------------------------------------------------------------------

    async def measure(self, seconds: float) -> Footprint:
        """Measure, at rest."""
        await self.rest()
        return await measure(seconds, self.admin, await self._server())

    async def _server(self) -> Server:
        """Ask the steady client's own sessions about themselves."""
        database, listener = self.steady.runtime.database, self.steady.runtime.listener
        assert listener is not None
        query = (
            "select (select count(*) from pg_prepared_statements) as prepared,"
            " (select sum(total_bytes) from pg_backend_memory_contexts)::bigint as bytes"
        )
        async with database.connection() as one, database.connection() as other:
            rows = [(await conn.fetch(query))[0] for conn in (one, other)]
        rows.append((await listener.execute(query))[0])
        return Server(sum(row["prepared"] for row in rows), sum(row["bytes"] for row in rows))


# --- the program -----------------------------------------------------------------------------------------------------


async def run(seed: int, minutes: float, pause: float, every: float) -> tuple[list[Footprint], Churn]:
    """Play for so long, and return what was measured."""
    measures: list[Footprint] = []
    with await anyio.to_thread.run_sync(lambda: start_local_server(ephemeral=True)) as server:
        template = await make_template(server)
        async with new_database(server, template) as database:
            conn = await asyncpg.connect(database.admin_dsn)
            await conn.execute("grant pg_read_all_stats to relay_gateway_login")
            await conn.close()
            began = time.monotonic()
            async with Churn(Place.of(database), seed).opened() as churn:
                print(
                    f"{'minute':>7}  {'  '.join(f'{name:>13}' for name in TOLERANCE)}  {'CPU':>6}  rounds", flush=True
                )
                rounds, due = 0, 0.0
                while time.monotonic() - began < minutes * 60:
                    await churn.round(pause)
                    rounds += 1
                    now = time.monotonic() - began
                    if now >= due:
                        measures.append(await churn.measure(now))
                        row = "  ".join(f"{value:>13,.2f}" for value in measures[-1].row().values())
                        print(f"{now / 60:7.2f}  {row}  {time.process_time():6.1f}  {rounds}", flush=True)
                        due = now + every
                measures.append(await churn.measure(time.monotonic() - began))
    return measures, churn


def compare(measures: list[Footprint]) -> tuple[list[str], bool]:
    """Return a line for each number, at the beginning and at the end, and whether all stayed within what they may."""
    early = [one for one in measures if FIRST_MINUTES[0] * 60 <= one.seconds <= FIRST_MINUTES[1] * 60]
    late = measures[-LAST_MEASURES:]
    if not early or late[0].seconds <= FIRST_MINUTES[1] * 60:
        return ["too short to compare anything: it takes ten minutes at least"], True
    lines, holds = [], True
    for name, (part, beside) in TOLERANCE.items():
        before = statistics.median(one.row()[name] for one in early)
        after = statistics.median(one.row()[name] for one in late)
        fits = after <= before * (1 + part) + beside
        holds = holds and fits
        lines.append(
            f"{'holds' if fits else 'WRONG'}  {name:<14} {before:>12,.2f} -> {after:>12,.2f}"
            f"   (may grow by {part:.0%} and {beside:g})"
        )
    grown = late[-1].kinds - early[-1].kinds
    for kind, count in grown.most_common(20):
        if count > KIND_GROWS:
            lines.append(f"       {count:+,} of {kind}")
    return lines, holds


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.churn", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="of what comes when; a new one where none is given, and printed")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds after each act; three go at once (1)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two measures (30)")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}: the same again with make churn MINUTES={options.minutes:g} SEED={seed}", flush=True)
    # What fails here is meant to; its tracebacks would fill the screen.
    logging.disable(logging.CRITICAL)
    measures, churn = anyio.run(run, seed, options.minutes, options.pause, options.every)
    lines, holds = compare(measures)
    print("\n".join(["", *lines, ""]))
    print(f"done: {', '.join(f'{name} {n}' for name, n in sorted(churn.done.items()))}")
    print(f"errors met: {', '.join(f'{n} {code}' for code, n in churn.met.most_common())}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
