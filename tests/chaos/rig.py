"""What a run is made of: a server to break, one for the journal, a way to each process, and the processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import asyncpg

from dispatch_core.dev.postgres import DevServer, start_local_server
from dispatch_core.migrate import grant, migrate
from tests.chaos import journal
from tests.chaos.roster import GATEWAYS, GRACE_SECONDS, NOT_REACHED, RELAYS, SERVES, SETTINGS
from tests.chaos.waits import OURS, Meter, Waits
from tests.support.cli import environment
from tests.support.patience import standstills
from tests.support.proxy import TcpProxy

ROOT = Path(__file__).resolve().parents[2]
DATABASE = "chaos"
IDLE_SECONDS = 4.0
"""Less than the longest handlers last, and more than a process takes from one statement to the next."""
SAMPLE_SECONDS = 0.25
ALL_WORK = "all-work"
"""A file: gateways send at their whole rate once it is there."""
USERS = "users"
"""Name of the sessions in which users of a gateway have transactions of their own."""
START_SECONDS = 30.0
"""Within which a process may end because it finds no database."""

_IDLE = """
    select usename, left(query, 100) as query, extract(epoch from clock_timestamp() - state_change) as age
    from pg_stat_activity
    where state like 'idle in transaction%' and clock_timestamp() - state_change > make_interval(secs => $1)
      and application_name <> $2
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
-- Every change of a job's state, but for renewed leases.
create table chaos.moves (
  tenant text, job_id uuid, relay text, seq bigint, was_fence bigint, state text, fence bigint, claimed_by text,
  claim_id uuid, claimed_at timestamptz, expires_at timestamptz, began timestamptz, at timestamptz);
create function chaos.note_move() returns trigger language plpgsql security definer as $$
begin
  if tg_op = 'DELETE' then
    insert into chaos.moves values (old.tenant_id, old.job_id, old.relay_id, old.seq, old.fence, null, null, null,
      null, null, old.expires_at, transaction_timestamp(), clock_timestamp());
  else
    insert into chaos.moves values (new.tenant_id, new.job_id, new.relay_id, new.seq,
      case when tg_op = 'UPDATE' then old.fence end, new.state, new.fence, new.claimed_by, new.claim_id, new.claimed_at,
      new.expires_at, transaction_timestamp(), clock_timestamp());
  end if;
  return null;
end $$;
create trigger note_move after insert or delete on relay.s2r_relay_dispatch_queue
  for each row execute function chaos.note_move();
create trigger note_change after update on relay.s2r_relay_dispatch_queue
  for each row when (old.state <> new.state or old.fence <> new.fence) execute function chaos.note_move();
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


@dataclass(frozen=True)
class Held:
    """A transaction that was open and idle so long though nothing was wrong with its process; `at` is monotonic."""

    process: str
    at: float
    seconds: float
    query: str


class Disturbed:
    """When something was wrong with somebody, and how long it may show afterwards."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self._open: dict[object, float] = {}

    @property
    def disturbed_until(self) -> float:
        """When all will be well again: by the monotonic clock, 0 where nothing was ever wrong."""
        return float("inf") if self._open else max((until for _, until in self.times), default=0.0)

    def disturb(self, seconds: float) -> None:
        """Note that something is wrong from now on, for so long."""
        self.times.append((time.monotonic(), time.monotonic() + seconds))

    @contextmanager
    def disturbed(self, after: float) -> Iterator[None]:
        """Note that something is wrong as long as the block lasts, and for so many seconds more."""
        token = object()
        self._open[token] = time.monotonic()
        try:
            yield
        finally:
            self.times.append((self._open.pop(token), time.monotonic() + after))


AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What connections of the rig's own raise while the server is down."""


class Member(Disturbed):
    """One process of the roster: the one that runs, and its successors."""

    def __init__(self, name: str, dsn: str, proxy: TcpProxy, rig: Rig) -> None:
        super().__init__()
        self.name = name
        self.dsn = dsn
        self.proxy = proxy
        self.process: anyio.abc.Process | None = None
        self.busy = anyio.Lock()
        self.starts = 0
        self.began = 0.0
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
        """End it by SIGTERM, and wait for its end; one that does not end within a minute after its grace is killed."""
        assert self.process is not None
        stop = Stop(self.name, self.pid, time.monotonic(), time.time())
        self.signal(signal.SIGTERM)
        with anyio.move_on_after(GRACE_SECONDS + 60):
            stop.code = await self.process.wait()
            stop.seconds = time.monotonic() - stop.at
        if stop.code is None:
            self.signal(signal.SIGABRT)  # faulthandler: where it was goes to its log
            await self.process.wait()
        calm = max(self._rig.disturbed_until, self.disturbed_until, self.began) + 5
        stop.disturbed = calm > stop.at
        self._rig.stops.append(stop)
        return stop


class Rig(Disturbed):
    """All of it, while the run lasts."""

    def __init__(self, server: DevServer, journal_dsn: str, files: Path, seed: int, rate: float) -> None:
        super().__init__()
        self.server = server
        self.journal_dsn = journal_dsn
        self.files = files
        self.seed = seed
        self.rate = rate
        self.members: dict[str, Member] = {}
        self.stops: list[Stop] = []
        self.ended: list[str] = []
        """Processes that have ended by themselves."""
        self.held: list[Held] = []
        self.locked: list[tuple[float, float]] = []
        """When we had rows of the queue locked, by the wall clock."""
        self.waits = Waits()
        (files / ALL_WORK).unlink(missing_ok=True)
        self.server_busy = anyio.Lock()
        self.stopping = False

    @property
    def admin_dsn(self) -> str:
        return self.server.admin_dsn_of(DATABASE)

    def all_work(self) -> None:
        """Tell the gateways that every process is at work."""
        (self.files / ALL_WORK).touch()

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
                    rows = await conn.fetch(_IDLE, IDLE_SECONDS, USERS)
                    now = time.monotonic()
                finally:
                    conn.terminate()
            except AWAY:
                continue
            for row in rows:
                member = self.members.get(row["usename"].replace("_", "-", 1))
                if member is None:
                    continue
                # (A process that was killed leaves its sessions to the server, which soon finds out.)
                began = now - float(row["age"])
                if max(self.disturbed_until, member.disturbed_until) < began and member.began < began:
                    self.held.append(Held(member.name, now, float(row["age"]), row["query"]))

    async def watch_cpu(self) -> None:
        """Count what processes wait for a CPU."""
        meter = Meter()
        while True:
            pids = {
                member.name: member.process.pid
                for member in self.members.values()
                if member.process is not None and member.process.returncode is None
            }
            meter.read(pids, self.server.pid)
            # Where the whole machine stands, nobody stands in a queue; all bytes go through us.
            ours = meter.totals.get(OURS, 0.0) + sum(seconds for _, seconds in standstills())
            self.waits.note(time.monotonic(), meter.totals | {OURS: ours})
            await anyio.sleep(SAMPLE_SECONDS)

    def could_run(self, name: str, since: float) -> float:
        """Return the seconds from a moment until now in which a process could have run."""
        now = time.monotonic()
        return now - since - self.waits.between(name, since, now)

    def all_disturbed(self) -> dict[str, list[tuple[float, float]]]:
        return {OURS: self.times, **{member.name: member.times for member in self.members.values()}}

    async def watch(self) -> None:
        """Start again what has ended by itself, and remember that it did."""
        while True:
            for member in self.members.values():
                process = member.process
                gone = process is not None and process.returncode is not None
                if process is not None and gone and not self.stopping and not member.busy.locked():
                    if process.returncode != NOT_REACHED or self.could_run(member.name, member.began) > START_SECONDS:
                        self.ended.append(f"{member.name} (pid {process.pid}) ended with {process.returncode}")
                    await member.start()
            await anyio.sleep(0.2)


@asynccontextmanager
async def rig(files: Path, seed: int, rate: float) -> AsyncIterator[Rig]:
    """Make servers and ways, and start all processes; all are gone when the block ends."""
    fast = {"fsync": "off", "synchronous_commit": "off"}
    keeps = {"track_commit_timestamp": "on"}
    async with AsyncExitStack() as stack:
        server = stack.enter_context(
            await anyio.to_thread.run_sync(lambda: start_local_server(ephemeral=True, settings=keeps))
        )
        other = stack.enter_context(
            await anyio.to_thread.run_sync(lambda: start_local_server(ephemeral=True, in_memory=True, settings=fast))
        )
        await anyio.to_thread.run_sync(server.create_database, DATABASE)
        made = Rig(server, other.admin_dsn, files, seed, rate)
        await migrate(made.admin_dsn)
        conn = await made.admin()
        await conn.execute(SCHEMA)
        for name in (*GATEWAYS, *RELAYS):
            login = name.replace("-", "_")
            await conn.execute(f"create role {login} login password 'relay'")
            if name in GATEWAYS:
                await grant(made.admin_dsn, login, role="gateway", tenant=None)
                continue
            for tenant in sorted({tenant for tenants in SERVES[name].values() for tenant in tenants}):
                await grant(made.admin_dsn, login, role="worker", tenant=tenant)
        await conn.close()
        conn = await asyncpg.connect(other.admin_dsn)
        await conn.execute(journal.CREATE)
        await conn.close()
        for name in (*RELAYS, *GATEWAYS):
            dsn = server.dsn(name.replace("-", "_"), DATABASE)
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
            if server.cluster is not None and server.cluster.log.exists():
                # It goes with the server.
                (files / "server.log").write_bytes(server.cluster.log.read_bytes())
