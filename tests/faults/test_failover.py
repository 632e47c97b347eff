"""The primary goes, the standby becomes the primary: nothing acknowledged is lost, and work goes on by itself.

All of it with one DSN, which names both servers and wants the one that takes writes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import asyncpg
import pytest

from tests.support.eventually import eventually
from tests.support.fleet import Journal, relay_process, serve
from tests.support.gateway import open_client
from tests.support.load import JOBS_PER_SECOND, Load, answers_by_notify, audit
from tests.support.proxy import TcpProxy
from tests.support.relays import new_relay, running
from tests.support.replication import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RESUMED_SECONDS = 15.0
OUTAGE_SECONDS = 3.0
POLL_SECONDS = 60.0
"""So long that what goes on within 15 seconds goes on by notify."""

RELAY_SETTINGS: dict[str, Any] = {"lease_seconds": 6.0, "poll_seconds": POLL_SECONDS, "sweep_seconds": 1.0}

How = Literal["stopped", "killed", "silent"]


class Attempts:
    """Counts how often this process tries to connect, by port."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: list[tuple[float, int]] = []
        connect = asyncpg.connect

        async def counting(*args: Any, **options: Any) -> Any:
            self.at.append((time.monotonic(), int(options.get("port") or 0)))
            return await connect(*args, **options)

        monkeypatch.setattr(asyncpg, "connect", counting)

    def between(self, start: float, end: float) -> int:
        return sum(start <= at < end for at, _ in self.at)


@asynccontextmanager
async def ways(pair: Pair, how: How) -> AsyncIterator[list[TcpProxy]]:
    """Put a proxy before each of the two servers where the first is to fall silent."""
    if how != "silent":
        yield []
        return
    async with (
        TcpProxy("127.0.0.1", pair.first.port) as first,
        TcpProxy("127.0.0.1", await anyio.to_thread.run_sync(second_port, pair)) as second,
    ):
        pair.ports = (first.port, second.port)
        yield [first, second]


def second_port(pair: Pair) -> int:
    return pair.standby.port


async def fail_over(pair: Pair, how: How, proxies: list[TcpProxy]) -> float:
    """Take the primary away, and promote the standby after a while; return the moment of it."""
    if how == "silent":
        # Its machine is off: no socket is closed, nothing is refused, nothing answers ever again.
        proxies[0].mode = "black_hole"
        await anyio.to_thread.run_sync(pair.kill_primary)
    elif how == "killed":
        await anyio.to_thread.run_sync(pair.kill_primary)
    else:
        await anyio.to_thread.run_sync(pair.primary.stop, "fast")
    await anyio.sleep(OUTAGE_SECONDS)
    return await anyio.to_thread.run_sync(pair.promote)


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@pytest.mark.case("C02")
@pytest.mark.parametrize("how", ["stopped", "killed", "silent"])
async def test_a_failover_under_load_loses_nothing_and_work_resumes_by_notify(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: How
) -> None:
    """I1, I2: synchronous replication; every acknowledged enqueue ends once, every handler started once counts."""
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=True))
    journal = Journal(tmp_path / "journal")
    attempts = Attempts(monkeypatch)
    async with ways(pair, how) as proxies:
        worker_dsn, gateway_dsn = pair.worker_dsn(name), pair.gateway_dsn(name)
        here = serve(new_relay(worker_dsn, **RELAY_SETTINGS), journal)
        async with (
            relay_process(worker_dsn, journal, "erp", "acme", **RELAY_SETTINGS),
            running(here),
            open_client(gateway_dsn, poll_interval_seconds=POLL_SECONDS) as client,
            anyio.create_task_group() as tasks,
        ):
            load = Load(client.tenant("acme"))
            tasks.start_soon(load.run)
            await eventually(lambda: len(journal.entries("ended")) > 2 * JOBS_PER_SECOND, 30)
            began = time.monotonic()
            promoted = await fail_over(pair, how, proxies)
            accepted = len(load.accepted)
            resumed = promoted + RESUMED_SECONDS
            await eventually(lambda: len(load.accepted) > accepted + JOBS_PER_SECOND, resumed - time.monotonic())
            ended = len(journal.entries("ended"))
            await eventually(
                lambda: len(journal.entries("ended")) > ended + JOBS_PER_SECOND, resumed - time.monotonic()
            )
            print(f"{how}: accepted and done again {time.monotonic() - promoted:.1f} s after the promotion")
            load.stop()
            load.accepted |= set(await answers_by_notify(client, here, within=resumed - time.monotonic()))
            print(f"{how}: by notify {time.monotonic() - promoted:.1f} s after the promotion")
            before, since = attempts.between(began, promoted), attempts.between(promoted, time.monotonic())
            print(
                f"{how}: {before} attempts to connect before the promotion, {since} since; refused {len(load.refused)}"
            )
            await audit(pair.admin_dsn(name, of_standby=True), load, journal)
    journal.close()
