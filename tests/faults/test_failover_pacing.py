"""No hot loop of reconnects: how often gateway, relay and drainer try to connect while nobody takes them.

Counted for each kind of outage, and per login: each of the three has its own here, and would be a process of its own.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import asyncpg
import pytest

from dispatch_core.errors import DatabaseError
from dispatch_core.outbox import Outbox, OutboxEvent, OutboxSettings
from dispatch_core.pacing import REFUSED_CAP_SECONDS
from gateway_sdk import OutboxDrainer, TenantClient
from relay_sdk import DispatchJob, Reply
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.load import answers_by_notify
from tests.support.patience import held_up
from tests.support.proxy import TcpProxy
from tests.support.refusing import refusing_server
from tests.support.relays import new_relay, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.case("C02")]

Kind = Literal["refused", "reset", "black hole", "no such name", "57P03", "53300", "28P01"]
KINDS: tuple[Kind, ...] = ("refused", "reset", "black hole", "no such name", "57P03", "53300", "28P01")

UNSTEADY_SECONDS = 3.0
STEADY_SECONDS = 6.0
MOST_PER_SECOND = 4.0
"""Of each process, in a steady outage: one place makes two in the mean. (It was 5.3 with a backoff for each caller.)"""
MOST_LINES = 16
"""In all logs: each part of each of the three may say once that it has no database."""
RESUMED_SECONDS = 15.0
"""But for what the machine does not let us run; GUARD_SECONDS is against a hang."""
GUARD_SECONDS = 30.0
CALLERS = 64
POLL_SECONDS = 60.0


class Tries:
    """Counts how often this process tries to connect, by login."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: dict[str, list[float]] = defaultdict(list)
        connect = asyncpg.connect

        async def counting(dsn: str, **options: Any) -> Any:
            # The drainer has the gateway's login, and an application name of its own.
            self.at[self.who(dsn)].append(time.monotonic())
            return await connect(dsn, **options)

        monkeypatch.setattr(asyncpg, "connect", counting)

    @staticmethod
    def who(dsn: str) -> str:
        return dsn.rpartition("application_name=")[2]

    def between(self, who: str, start: float, end: float) -> int:
        return sum(start <= at < end for at in self.at[who])


@asynccontextmanager
async def away(kind: Kind, way: TcpProxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Take the server away for the length of a block."""
    upstream = way.upstream_port
    with monkeypatch.context() as patched:
        match kind:
            case "refused":
                way.refuse()
                yield
                await way.listen()
            case "reset" | "black hole":
                way.mode = "reset" if kind == "reset" else "black_hole"
                yield
                way.reset_all()
                way.mode = "pass"
            case "no such name":

                def no_such_name(*_: object, **__: object) -> Any:
                    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

                patched.setattr(socket, "getaddrinfo", no_such_name)
                way.refuse()
                yield
                await way.listen()
            case _:
                said = {"57P03": "the database system is starting up", "53300": "sorry, too many clients already"}
                async with refusing_server(kind, said.get(kind, "password authentication failed")) as port:
                    way.upstream_port = port
                    way.reset_all()
                    yield
                way.upstream_port = upstream


async def call_for_ever(acme: TenantClient, answers: list[str]) -> None:
    """One of many who want something of the gateway, and ask again as soon as they are told that it cannot be."""
    while True:
        try:
            await acme.enqueue("nobody", "Work", ttl=1)
            answers.append("stored")
        except DatabaseError as error:
            answers.append(error.code)
        await anyio.sleep(0.05)


@pytest.mark.parametrize("kind", KINDS)
async def test_in_an_outage_each_process_tries_seldom_and_goes_on_by_itself_when_it_is_over(
    database: TestDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Kind
) -> None:
    tries = Tries(monkeypatch)
    delivered: list[OutboxEvent] = []

    async def sink(event: OutboxEvent) -> None:
        delivered.append(event)

    within = RESUMED_SECONDS + (REFUSED_CAP_SECONDS if kind == "28P01" else 0)
    async with TcpProxy.before(database.gateway_dsn) as way:

        def dsn(of: str, who: str) -> str:
            return f"{way.dsn(of).replace('127.0.0.1', 'localhost')}?application_name={who}"

        relay = new_relay(dsn(database.worker_dsn, "relay"), poll_seconds=1.0, lease_seconds=10.0)

        @relay.handler("Work")
        async def work(job: DispatchJob) -> Reply:
            return Reply(job.body)

        drainer = OutboxDrainer(
            dsn(database.gateway_dsn, "drainer"),
            settings=OutboxSettings(drain_interval_sec=0.5),
            tenants=["acme"],
            default_sink=sink,
        )
        async with (
            running(relay),
            open_client(dsn(database.gateway_dsn, "gateway"), poll_interval_seconds=POLL_SECONDS) as client,
            drainer,
            anyio.create_task_group() as group,
        ):
            answers: list[str] = []
            acme = client.tenant("acme")
            for _ in range(CALLERS):
                group.start_soon(call_for_ever, acme, answers)
            await eventually(lambda: len(answers) > CALLERS)
            async with away(kind, way, monkeypatch):
                began = time.monotonic()
                await anyio.sleep(UNSTEADY_SECONDS)
                steady = time.monotonic()
                answers.clear()
                await anyio.sleep(STEADY_SECONDS)
                ended, held_up_before = time.monotonic(), held_up()
                told = set(answers)
                assert client.health().state == "degraded"
                assert relay.health().status == "degraded"
            for who in ("gateway", "relay", "drainer"):
                first, then = tries.between(who, began, steady), tries.between(who, steady, ended)
                print(f"{kind}: {who} tried {first} times in {UNSTEADY_SECONDS} s, then {then} in {STEADY_SECONDS} s")
                assert then <= MOST_PER_SECOND * (ended - steady), who
                assert first <= MOST_PER_SECOND * (steady - began) + 20, who
            # A refused login is nobody's to wait for; of the others each is told that it may try again.
            assert told <= ({"S2R-DATABASE-ERROR"} if kind == "28P01" else {"S2R-DATABASE-UNAVAILABLE"}), told
            guard = within + GUARD_SECONDS
            await eventually(lambda: "stored" in answers, guard, message=f"{kind}: the gateway is back:")
            print(f"{kind}: stored again {time.monotonic() - ended:.1f} s after it was over")
            group.cancel_scope.cancel()
            await answers_by_notify(client, relay, within=guard)
            business = await asyncpg.connect(database.gateway_dsn)
            async with business.transaction():
                await Outbox.enqueue(business, "told", {}, tenant="acme")
            await eventually(lambda: delivered, guard, message="the drainer is back:")
            resumed, lost = time.monotonic() - ended, held_up() - held_up_before
            await business.close()
            print(f"{kind}: all three work again {resumed:.1f} s after it was over, held up for {lost:.1f} s of them")
            assert resumed - lost < within
    # Each says it once, and not at each try.
    said = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    print(f"{kind}: " + "; ".join(said))
    assert len(said) <= MOST_LINES
