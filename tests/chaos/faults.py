"""How each fault of a schedule is done."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import asyncpg

from dispatch_core.dev.postgres import Mode
from tests.chaos.rig import AWAY, DATABASE, Member, Rig
from tests.chaos.schedule import Fault

END_SESSIONS = """
    select count(pg_terminate_backend(pid)) from (
      select pid from pg_stat_activity
      where datname = $1 and backend_type = 'client backend' and pid <> pg_backend_pid() order by pid limit $2) s
"""

# As a heartbeat does: whoever waits for such a row then finds another version of it.
LOCK = """
    update relay.s2r_relay_dispatch_queue q set lease_expires_at = q.lease_expires_at
    from (select ctid as place from relay.s2r_relay_dispatch_queue order by seq limit 20 for update skip locked) l
    where q.ctid = l.place
"""


class Faults:
    """Does the faults of a schedule when their time has come, many at once where it says so."""

    def __init__(self, rig: Rig, schedule: list[Fault], say: Callable[[str], None]) -> None:
        self._rig = rig
        self._schedule = schedule
        self._say = say
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        """Return when the last one is over."""
        began = time.monotonic()
        async with anyio.create_task_group() as group:
            for fault in self._schedule:
                await anyio.sleep(max(0.0, began + fault.at - time.monotonic()))
                self._say(f"{time.monotonic():.1f}  {fault}")
                group.start_soon(self._do, fault)

    async def _do(self, fault: Fault) -> None:
        if fault.target == "server":
            async with self._rig.server_busy:
                with self._rig.disturbed(after=4), anyio.CancelScope(shield=True):
                    await self._server(fault)
        else:
            member = self._rig.members[fault.target]
            if fault.kind.startswith("SIG") or fault.kind == "clock":
                async with member.busy:
                    await self._process(fault, member)
            else:
                with member.disturbed(after=6):
                    await self._network(fault, member)
        self.done[fault.kind] += 1

    async def _process(self, fault: Fault, member: Member) -> None:
        match fault.kind:
            case "SIGTERM" | "SIGTERM in calm":
                stop = await member.terminate()
                if not stop.disturbed and member.name.startswith("relay"):
                    try:
                        stop.left = await self._held_by(stop.pid)
                    except AWAY:
                        stop.disturbed = True  # by what has begun meanwhile
                await anyio.sleep(fault.seconds)
                await member.start()
            case "SIGKILL":
                with member.disturbed(after=3):
                    member.signal(signal.SIGKILL)
                    assert member.process is not None
                    await member.process.wait()
                    await anyio.sleep(fault.seconds)
                    await member.start()
            case "SIGSTOP":
                with member.disturbed(after=5):
                    member.signal(signal.SIGSTOP)
                    await anyio.sleep(fault.seconds)
                    member.signal(signal.SIGCONT)
            case "clock":
                member.clock.write_text(fault.what)
                member.signal(signal.SIGUSR1)

    async def _held_by(self, pid: int) -> list[str]:
        """Return the jobs that the database thinks a process has which is gone."""
        conn = await self._rig.admin()
        try:
            rows = await conn.fetch(
                "select tenant_id, job_id from relay.s2r_relay_dispatch_queue where claimed_by like '%:' || $1 || ':%'",
                str(pid),
            )
        finally:
            conn.terminate()
        return [f"{row[0]} {row[1]}" for row in rows]

    async def _network(self, fault: Fault, member: Member) -> None:
        proxy = member.proxy
        match fault.kind:
            case "delay":
                proxy.delay_seconds, proxy.mode = float(fault.what), "delay"
            case "throttle":
                proxy.bytes_per_second, proxy.mode = float(fault.what), "throttle"
            case "black hole":
                proxy.mode = "black_hole"
            case "reset":
                if not fault.seconds:
                    proxy.reset_all()
                    return
                proxy.mode = "reset"
            case "cut after bytes":
                proxy.cut_after(int(fault.what))
                return
            case "cut before the answer":
                cut = proxy.cut_answer(fault.what)
                with anyio.move_on_after(10):
                    await cut.wait()
                return
        await anyio.sleep(fault.seconds)
        proxy.mode = "pass"

    async def _server(self, fault: Fault) -> None:
        server = self._rig.server
        match fault.kind:
            case "server killed" | "server restarted":
                mode: Mode = "immediate" if fault.kind == "server killed" else "fast"
                await anyio.to_thread.run_sync(server.stop, mode)
                await anyio.sleep(fault.seconds)
                await anyio.to_thread.run_sync(server.start)
                return
        conn: asyncpg.Connection[Any] = await self._rig.admin()
        try:
            match fault.kind:
                case "sessions ended":
                    await conn.fetchval(END_SESSIONS, DATABASE, int(fault.what))
                case "snapshot held":
                    await conn.execute("begin isolation level repeatable read")
                    await conn.fetchval("select count(*) from relay.s2r_relay_dispatch_queue")
                    await anyio.sleep(fault.seconds)
                case "rows locked":
                    began = time.time()
                    try:
                        await conn.execute("begin")
                        await conn.execute(LOCK)
                        await anyio.sleep(fault.seconds)
                        await conn.execute("commit")
                    finally:
                        self._rig.locked.append((began, time.time()))
                case "slow disk":
                    for delay in ("20000", "0"):
                        # A commit's flush takes so many microseconds longer.
                        await conn.execute(f"alter system set commit_delay = {delay}")
                        await conn.execute("alter system set commit_siblings = 0")
                        await conn.fetchval("select pg_reload_conf()")
                        if delay != "0":
                            await anyio.sleep(fault.seconds)
        finally:
            conn.terminate()
