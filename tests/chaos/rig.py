"""What a run is made of: a server to break, one for the journal, a way to each process, and the processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import asyncpg

from dispatch_core.dev.logins import GATEWAY_LOGIN
from dispatch_core.dev.postgres import DevServer, start_local_server
from dispatch_core.migrate import grant, migrate
from tests.chaos import journal
from tests.chaos.roster import GATEWAYS, GRACE_SECONDS, NOT_REACHED, RELAYS, SERVES, SETTINGS
from tests.support.cli import environment
from tests.support.proxy import TcpProxy

ROOT = Path(__file__).resolve().parents[2]
DATABASE = "chaos"
IDLE_SECONDS = 4.0
START_SECONDS = 30.0
"""Within which a process may end because it finds no database."""

_IDLE = """
    select usename, left(query, 100) as query, extract(epoch from clock_timestamp() - state_change) as age
    from pg_stat_activity
    where state like 'idle in transaction%' and clock_timestamp() - state_change > make_interval(secs => $1)
"""

SCHEMA = """
create schema chaos;
grant usage on schema chaos to public;
create table chaos.orders (tenant text, id uuid);
create table chaos.loaded (tenant text, job_id uuid, row_no bigint);
grant select, insert on chaos.orders, chaos.loaded to public;
-- Every end that was ever committed, and whatever else was done to one.
create table chaos.ends (verb text, tenant text, job_id uuid, status text, at timestamptz);
create function chaos.note_end() returns trigger language plpgsql security definer as $$
begin
  insert into chaos.ends values
    (tg_op, coalesce(new.tenant_id, old.tenant_id), coalesce(new.job_id, old.job_id), new.status, clock_timestamp());
  return null;
end $$;
create trigger note_end after insert or update or delete on relay.s2r_relay_dispatch_result
  for each row execute function chaos.note_end();
"""


@dataclass
class Stop:
    """A SIGTERM, and what came of it; `at` by the monotonic clock, `wall` by the wall clock of the server's machine."""

    process: str
    pid: int
    at: float
    wall: float
    seconds: float | None = None
    code: int | None = None
    disturbed: bool = False
    """Something else was wrong meanwhile: with the server, or with its way to it."""
    left: list[str] = field(default_factory=list)
    """What the database still held for it once it was gone."""


AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What connections of the rig's own raise while the server is down."""


class Member:
    """One process of the roster: the one that runs, and its successors."""

    def __init__(self, name: str, dsn: str, proxy: TcpProxy, rig: Rig) -> None:
        self.name = name
        self.dsn = dsn
        self.proxy = proxy
        self.process: anyio.abc.Process | None = None
        self.busy = anyio.Lock()
        self.starts = 0
        self.began = 0.0
        self.disturbed_until = 0.0
        self._rig = rig
        self.clock = rig.files / f"{name}.clock"
        self.log = rig.files / f"{name}.log"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        kind = "gateway" if self.name in GATEWAYS else "relay"
        arguments = [self.name, self._rig.journal_dsn, str(self.clock)]
        if kind == "gateway":
            # Users of their own at each start, and the same ones when the seed is played again.
            seed = f"{self._rig.seed}{GATEWAYS.index(self.name)}{self.starts:03}"
            arguments += [str(self._rig.rate / len(GATEWAYS)), seed]
        self.starts += 1
        self.began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = await anyio.open_process(
                [sys.executable, "-m", f"tests.chaos.{kind}", *arguments],
                cwd=ROOT,
                env=environment(**SETTINGS, RELAY_DISPATCH_DSN=self.dsn, PYTHONFAULTHANDLER="1"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> None:
        try:
            if self.process is not None and self.process.returncode is None:
                self.process.send_signal(number)
        except ProcessLookupError:
            pass

    async def terminate(self) -> Stop:
        """End it by SIGTERM, and wait for its end; one that does not end within a minute is killed."""
        assert self.process is not None
        stop = Stop(self.name, self.pid, time.monotonic(), time.time())
        self.signal(signal.SIGTERM)
        with anyio.move_on_after(GRACE_SECONDS + 30):
            stop.code = await self.process.wait()
            stop.seconds = time.monotonic() - stop.at
        if stop.code is None:
            self.signal(signal.SIGABRT)  # faulthandler: where it was goes to its log
            await self.process.wait()
        # One that has only just begun has nothing yet to stop.
        calm = max(self._rig.disturbed_until, self.disturbed_until, self.began) + 5
        stop.disturbed = calm > stop.at
        self._rig.stops.append(stop)
        return stop


class Rig:
    """All of it, while the run lasts."""

    def __init__(self, server: DevServer, journal_dsn: str, files: Path, seed: int, rate: float) -> None:
        self.server = server
        self.journal_dsn = journal_dsn
        self.files = files
        self.seed = seed
        self.rate = rate
        self.members: dict[str, Member] = {}
        self.stops: list[Stop] = []
        self.ended: list[str] = []
        """Processes that have ended by themselves."""
        self.transactions: list[str] = []
        """That were open and idle for long though nothing was wrong with their process."""
        self.disturbed_until = 0.0
        self.server_busy = anyio.Lock()
        self.stopping = False

    @property
    def admin_dsn(self) -> str:
        return self.server.admin_dsn_of(DATABASE)

    async def admin(self) -> asyncpg.Connection[Any]:
        """Connect as the superuser, by no proxy."""
        return await asyncpg.connect(self.admin_dsn, timeout=10)

    async def watch_transactions(self) -> None:
        """Look for transactions that somebody holds while he does something else."""
        while True:
            await anyio.sleep(1)
            try:
                conn = await self.admin()
                try:
                    rows = await conn.fetch(_IDLE, IDLE_SECONDS)
                finally:
                    conn.terminate()
            except AWAY:
                continue
            for row in rows:
                member = self.members.get(row["usename"].replace("_", "-", 1))
                calm = max(self.disturbed_until, 0.0 if member is None else member.disturbed_until)
                if member is not None and calm + 2 * IDLE_SECONDS < time.monotonic():
                    self.transactions.append(f"{member.name}: {row['age']:.1f} s idle after {row['query']}")

    async def watch(self) -> None:
        """Start again what has ended by itself, and remember that it did."""
        while True:
            for member in self.members.values():
                process = member.process
                gone = process is not None and process.returncode is not None
                if process is not None and gone and not self.stopping and not member.busy.locked():
                    if process.returncode != NOT_REACHED or time.monotonic() - member.began > START_SECONDS:
                        self.ended.append(f"{member.name} (pid {process.pid}) ended with {process.returncode}")
                    await member.start()
            await anyio.sleep(0.2)


@asynccontextmanager
async def rig(files: Path, seed: int, rate: float) -> AsyncIterator[Rig]:
    """Make servers and ways, and start all processes; all are gone when the block ends."""
    fast = {"fsync": "off", "synchronous_commit": "off"}
    async with AsyncExitStack() as stack:
        server = stack.enter_context(await anyio.to_thread.run_sync(lambda: start_local_server(ephemeral=True)))
        other = stack.enter_context(
            await anyio.to_thread.run_sync(lambda: start_local_server(ephemeral=True, in_memory=True, settings=fast))
        )
        await anyio.to_thread.run_sync(server.create_database, DATABASE)
        made = Rig(server, other.admin_dsn, files, seed, rate)
        await migrate(made.admin_dsn)
        conn = await made.admin()
        await conn.execute(SCHEMA)
        await grant(made.admin_dsn, GATEWAY_LOGIN, role="gateway", tenant=None)
        for name in RELAYS:
            login = name.replace("-", "_")
            await conn.execute(f"create role {login} login password 'relay'")
            for tenant in sorted({tenant for tenants in SERVES[name].values() for tenant in tenants}):
                await grant(made.admin_dsn, login, role="worker", tenant=tenant)
        await conn.close()
        conn = await asyncpg.connect(other.admin_dsn)
        await conn.execute(journal.CREATE)
        await conn.close()
        for name in (*RELAYS, *GATEWAYS):
            login = GATEWAY_LOGIN if name in GATEWAYS else name.replace("-", "_")
            dsn = server.dsn(login, DATABASE)
            proxy = await stack.enter_async_context(TcpProxy.before(dsn, reads_along=True))
            made.members[name] = Member(name, proxy.dsn(dsn), proxy, made)
        try:
            for member in made.members.values():
                await member.start()
            yield made
        finally:
            made.stopping = True
            for member in made.members.values():
                member.signal(signal.SIGKILL)
                if member.process is not None:
                    with anyio.CancelScope(shield=True):
                        await member.process.wait()
