"""Kill the programs of 07_outbox_order_service.py at one step after the other, and count what came of the orders.

Each program reaches PostgreSQL over a wire that can hold still at a chosen statement (dispatch_core/dev/wire.py):
before the server gets it, or when the server is done with it and nobody has heard of that yet. There the process is
killed, and another one started in its place, as a supervisor would. The programs know nothing of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Self

import anyio
import anyio.abc
import asyncpg

from dispatch_core.dev.logins import GATEWAY_LOGIN, WORKER_LOGIN, run_blocking
from dispatch_core.dev.postgres import DevServer, start_server
from dispatch_core.dev.wire import Gate, Side, Wire
from dispatch_core.migrate import grant, migrate

ROLES = ("shop", "drainer", "relay")
SETTINGS = {
    "OUTBOX_DRAIN_INTERVAL_SEC": "0.2",
    "OUTBOX_STALE_CLAIM_SECONDS": "1.5",
    "OUTBOX_SINK_TIMEOUT_SECONDS": "0.45",
    "GATEWAY_WRITE_TIMEOUT_SECONDS": "0.45",  # not above that of the sink that writes
    "RELAY_LEASE_SECONDS": "1.5",
    "RELAY_POLL_SECONDS": "0.2",
    "RELAY_SWEEP_SECONDS": "0.2",
}
PROLOGUE = """\
The shop stores an order and its event in one transaction, in a database of its own. The drainer makes a dispatch job
of each event, in another database. The relay ships. Each is killed by SIGKILL at every step of its work in turn, and
started again. What a dead one had in hand is taken over after 1.5 s (by default, a drainer's after 300, a relay's 30).
"""


@dataclass(frozen=True)
class Step:
    """Whom to kill, and when: at a statement (call), or when it is done and its answer is under way (answer)."""

    role: str
    statement: str
    side: Side
    at: str
    halfway: bool = False
    """At the statement of an order in the middle, not at the first."""


STEPS = (
    Step("shop", "COMMIT", "call", "before its commit has reached the database", halfway=True),
    Step("shop", "COMMIT", "answer", "after a commit that it never heard of", halfway=True),
    Step("drainer", "relay.outbox_claim", "call", "before it has claimed events"),
    Step("drainer", "relay.outbox_claim", "answer", "after a claim that it never heard of"),
    Step("drainer", "relay.enqueue", "call", "in its sink, before jobs are made"),
    Step("drainer", "relay.enqueue", "answer", "in its sink, after jobs that it never heard of"),
    Step("drainer", "relay.outbox_settle", "call", "after its sink, before it has settled"),
    Step("drainer", "relay.outbox_settle", "answer", "after a settling that it never heard of"),
    Step("relay", "relay.claim", "answer", "after a claim that it never heard of"),
    Step("relay", "insert into journal", "call", "in a handler, before the order is shipped", halfway=True),
    Step("relay", "insert into journal", "answer", "in a handler, after the order is shipped", halfway=True),
    Step("relay", "relay.complete", "call", "after its handlers, before their jobs are completed"),
    Step("relay", "relay.complete", "answer", "after a completion that it never heard of"),
)


# --- the stage ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A server with two databases: the shop's own, and one for dispatch, with the warehouse's journal in it."""

    server: DevServer
    shop: str
    dispatch: str


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """Start a server that is thrown away afterwards, or use that of RELAY_DISPATCH_TEST_DSN; make the databases."""
    suffix = secrets.token_hex(4)
    with start_server(ephemeral=True) as server:
        where = Stage(server, f"outbox_shop_{suffix}", f"outbox_dispatch_{suffix}")
        try:
            run_blocking(_make(where))
            yield where
        finally:
            if not server.is_ours:
                run_blocking(_drop(where))


async def _make(where: Stage) -> None:
    server = where.server
    for name in (where.shop, where.dispatch):
        server.create_database(name)
    shop, dispatch = server.admin_dsn_of(where.shop), server.admin_dsn_of(where.dispatch)
    await migrate(shop, only=["outbox"])  # as `relay-dispatch db migrate --only outbox` does
    await migrate(dispatch, only=["dispatch"])
    await grant(shop, GATEWAY_LOGIN, role="gateway", tenant="acme")
    await grant(dispatch, GATEWAY_LOGIN, role="gateway", tenant="acme")
    await grant(dispatch, WORKER_LOGIN, role="worker", tenant="acme", relay="warehouse")
    async with connected(shop) as conn:
        await conn.execute("create table orders (number int primary key)")
        await conn.execute(f"grant select, insert on orders to {GATEWAY_LOGIN}")
    async with connected(dispatch) as conn:
        await conn.execute("create table journal (number int, job_id uuid, attempt int)")
        await conn.execute(f"grant insert on journal to {WORKER_LOGIN}")


async def _drop(where: Stage) -> None:
    async with connected(where.server.admin_dsn) as conn:
        for name in (where.shop, where.dispatch):
            await conn.execute(f"drop database if exists {name} with (force)")


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """Open a connection for the block."""
    conn = await asyncpg.connect(dsn)
    try:
        yield conn
    finally:
        await conn.close()


# --- the processes ------------------------------------------------------------------------------


class Programs:
    """The programs as processes: one of each role at a time, each on a wire of its own."""

    def __init__(self, program: str, where: Stage, wires: Mapping[str, Wire], log: IO[str]) -> None:
        self.wires = wires
        self._program = program
        self._where = where
        self._log = log
        self._processes: dict[str, anyio.abc.Process] = {}

    @classmethod
    @asynccontextmanager
    async def on(cls, where: Stage, program: str) -> AsyncIterator[Self]:
        """Lay the wires. What runs at the end of the block is killed."""
        with tempfile.TemporaryFile("w+") as log:
            async with AsyncExitStack() as stack:
                wires = {role: await stack.enter_async_context(Wire.to(where.server.admin_dsn)) for role in ROLES}
                programs = cls(program, where, wires, log)
                try:
                    yield programs
                finally:
                    with anyio.CancelScope(shield=True):
                        for role in list(programs._processes):
                            await programs.kill(role)

    async def start(self, role: str) -> None:
        """Start a program. What is set in the environment for a real gateway or relay is not used."""
        server, wire = self._where.server, self.wires[role]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RELAY_", "GATEWAY_", "OUTBOX_"))}
        dsns = {
            "OUTBOX_DSN": wire.dsn(server.gateway_dsn(self._where.shop)),
            "RELAY_DISPATCH_DSN": wire.dsn(server.gateway_dsn(self._where.dispatch)),
            "RELAY_WORKER_DSN": wire.dsn(server.worker_dsn(self._where.dispatch)),
        }
        self._processes[role] = await anyio.open_process(
            [sys.executable, self._program, role], env=inherited | SETTINGS | dsns, stderr=self._log
        )

    async def order(self, first: int, last: int) -> None:
        """Tell the shop to place these orders."""
        stdin = self._processes["shop"].stdin
        assert stdin is not None
        await stdin.send("".join(f"{number}\n" for number in range(first, last + 1)).encode())

    async def all_placed(self, last: int) -> None:
        """Wait until the shop is done with that order; it says so of each."""
        stdout = self._processes["shop"].stdout
        assert stdout is not None
        said = b""
        with anyio.fail_after(30):
            while last != int((said.split() or [b"0"])[-1]) or not said.endswith(b"\n"):
                try:
                    said += await stdout.receive()
                except anyio.EndOfStream:
                    self._complain("shop")

    async def kill(self, role: str) -> None:
        """Kill a program by SIGKILL, as `kill -9` does, and the kernel where memory runs out."""
        process = self._processes.pop(role)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if await process.wait() != -signal.SIGKILL:
            self._complain(role)

    async def kill_at(self, gate: Gate, role: str) -> None:
        """Wait until a program has come to where its wire holds, and kill it there."""
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:

                async def until(process_ended: bool) -> None:
                    await (self._processes[role].wait() if process_ended else gate.reached.wait())
                    group.cancel_scope.cancel()

                group.start_soon(until, False)
                group.start_soon(until, True)
        await self.kill(role)

    def _complain(self, role: str) -> NoReturn:
        self._log.seek(0)
        raise RuntimeError(f"the {role} has ended by itself:\n{self._log.read()[-4000:]}")


# --- what is to be seen -------------------------------------------------------------------------

_ORDERS = "select number from orders where number between $1 and $2"
_EVENTS = "select count(*) from relay.outbox where (payload -> 'order')::int between $1 and $2"
_JOBS = """
select number, result.status is distinct from 'succeeded' as open
from relay.s2r_relay_dispatch_request request
cross join lateral (select (convert_from(request_body, 'utf8')::json ->> 'order')::int as number) body
left join relay.s2r_relay_dispatch_result result using (job_id)
where number between $1 and $2
"""
_RUNS = "select number from journal where number between $1 and $2"


@dataclass(frozen=True)
class Found:
    """What both databases hold of some orders."""

    orders: frozenset[int]
    events: int
    jobs: list[int]
    """The order of each job."""
    open_jobs: int
    runs: list[int]
    """The order of each run of the handler that shipped."""

    @property
    def at_rest(self) -> bool:
        """Whether all is done that there is to do."""
        return not self.events and not self.open_jobs and self.orders <= set(self.runs)

    def __str__(self) -> str:
        return f"orders {len(self.orders)}, events {self.events}, jobs {len(self.jobs)}, shipped {len(set(self.runs))}"


class Onlooker:
    """Reads both databases as the superuser, past row security."""

    def __init__(self, shop: asyncpg.Connection[Any], dispatch: asyncpg.Connection[Any]) -> None:
        self._shop, self._dispatch = shop, dispatch

    async def look(self, first: int, last: int) -> Found:
        """Look at the orders `first` to `last`."""
        orders = await self._shop.fetch(_ORDERS, first, last)
        events: int = await self._shop.fetchval(_EVENTS, first, last)
        jobs = await self._dispatch.fetch(_JOBS, first, last)
        runs = await self._dispatch.fetch(_RUNS, first, last)
        return Found(
            frozenset(row["number"] for row in orders),
            events,
            [row["number"] for row in jobs],
            sum(row["open"] for row in jobs),
            [row["number"] for row in runs],
        )

    async def until_delivered(self, first: int, last: int) -> None:
        """Wait until no event of these orders is left."""
        with anyio.fail_after(40):
            while True:
                if not (await self.look(first, last)).events:
                    return
                await anyio.sleep(0.02)

    async def until_at_rest(self, first: int, last: int) -> Found:
        """Wait until these orders are shipped, and nothing is left to be done for them."""
        with anyio.fail_after(40):
            while True:
                found = await self.look(first, last)
                if found.at_rest:
                    return found
                await anyio.sleep(0.02)


# --- the story ----------------------------------------------------------------------------------


async def play_step(step: Step, programs: Programs, onlooker: Onlooker, first: int, last: int) -> tuple[Found, Found]:
    """Place orders, kill somebody on their way, and start it again; return what was there then and in the end."""
    if step.role != "shop":
        # Its work is to be there when it starts: then the first claim that it makes finds something.
        await programs.kill(step.role)
        await programs.order(first, last)
        await programs.all_placed(last)
    if step.role == "relay":
        await onlooker.until_delivered(first, last)
    number = max(1, (last - first + 1) * 2 // 5) if step.halfway else 1
    gate = programs.wires[step.role].hold(step.statement, step.side, number)
    if step.role == "shop":
        await programs.order(first, last)
    else:
        await programs.start(step.role)
    await programs.kill_at(gate, step.role)
    then = await onlooker.look(first, last)
    await programs.start(step.role)
    if step.role == "shop":
        # Its customers, who were not told that they have ordered, try again.
        await programs.order(first, last)
        await programs.all_placed(last)
    return then, await onlooker.until_at_rest(first, last)


async def play(program: str, where: Stage, orders: int) -> bool:
    """Play all steps, with a share of the orders each; return whether nothing was lost or doubled."""
    async with AsyncExitStack() as stack:
        dsns = [where.server.admin_dsn_of(name) for name in (where.shop, where.dispatch)]
        onlooker = Onlooker(*[await stack.enter_async_context(connected(dsn)) for dsn in dsns])
        programs = await stack.enter_async_context(Programs.on(where, program))
        for role in ROLES:
            await programs.start(role)
        for number, step in enumerate(STEPS):
            bar = "#" * (number + 1) + "." * (len(STEPS) - number - 1)
            print(f"[{bar}] {number + 1:2}/{len(STEPS)}  {step.role} killed: {step.at}", flush=True)
            first, last = number * orders // len(STEPS) + 1, (number + 1) * orders // len(STEPS)
            started = time.perf_counter()
            then, end = await play_step(step, programs, onlooker, first, last)
            print(f"{'at that moment':>{len(bar) + 8}}  {then}")
            print(f"{'started again':>{len(bar) + 8}}  {end}   {time.perf_counter() - started:.1f} s", flush=True)
        return report(await onlooker.look(1, orders), orders)


def report(found: Found, placed: int) -> bool:
    """Print what it all came to; return whether it is as promised."""
    shipped, dispatched = set(found.runs), set(found.jobs)
    lost = (found.orders - shipped) | (found.orders - dispatched)
    never = (shipped | dispatched) - found.orders
    doubled = len(found.jobs) - len(dispatched)
    again = len(found.runs) - len(shipped)
    rows = (
        (placed, "orders placed", f"{len(STEPS)} processes were killed on their way"),
        (placed - len(found.orders), "rolled back: card refused", f"{len(never)} of these have a job or were shipped"),
        (len(found.orders), "committed", f"{found.events} of their events are left in the outbox"),
        (len(found.jobs), "dispatch jobs", f"{found.open_jobs} are not done, {doubled} orders have a second one"),
        (len(shipped), "shipped", f"{again} handlers ran again, since their relay died before it could tell"),
    )
    print()
    for count, what, beside in rows:
        print(f"{count:6}  {what:27} {beside}")
    print(f"\ndone: {len(found.orders)} orders committed, {len(found.jobs)} jobs, {len(lost)} lost, {doubled} doubled")
    return not (lost or never or doubled or found.events or found.open_jobs)


def main(program: str) -> int:
    """Read the arguments, play, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog=Path(program).name,
        description="Place orders and have them shipped, while each program is killed at every step of its work.",
        epilog="It starts a PostgreSQL server that is thrown away afterwards, or uses that of RELAY_DISPATCH_TEST_DSN "
        "(a superuser's), and takes about half a minute. Exit code 0 where no order was lost or doubled, else 1. The "
        "roles `shop`, `drainer` and `relay` are what it starts; with OUTBOX_DSN, RELAY_DISPATCH_DSN and "
        "RELAY_WORKER_DSN they run by themselves too.",
    )
    parser.add_argument("--orders", type=int, default=20 * len(STEPS), metavar="N", help="in all (%(default)s)")
    orders: int = parser.parse_args().orders
    if orders < 2 * len(STEPS):
        parser.error(f"it takes at least {2 * len(STEPS)} orders, two for each step")
    # SIGTERM as Ctrl-C, so that what was started ends too: the event loop has its own way with that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    started = time.perf_counter()
    print(PROLOGUE, flush=True)
    try:
        with stage() as where:
            good = anyio.run(play, program, where, orders)
    except KeyboardInterrupt:
        print("stopped")
        return 130
    print(f"{time.perf_counter() - started:.0f} s in all")
    return 0 if good else 1
