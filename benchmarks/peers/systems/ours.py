"""Relay Dispatch: `GatewayClient` and `Relay`, as plain logins with row security in force.

Best: `concurrency=2000`, which is what handlers that do nothing want, and 10,000 jobs in a call of `enqueue_many`; all
else, in both, is the default.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.peers.model import Contender, System
from benchmarks.peers.systems._packages import packages, python_command

__all__ = ["SYSTEM", "producer", "worker"]

_TENANT, _RELAY, _OPERATION = "acme", "erp", "Count"


async def _install(dsn: str, _: Contender) -> None:
    from dispatch_core.dev.logins import GATEWAY_LOGIN, WORKER_LOGIN
    from dispatch_core.migrate import grant, migrate

    await migrate(dsn)
    await grant(dsn, GATEWAY_LOGIN, role="gateway", tenant=None, relay=None)
    await grant(dsn, WORKER_LOGIN, role="worker", tenant=None, relay=None)


class _Producer:
    def __init__(self, tenant: Any) -> None:
        self._tenant = tenant

    async def send(self, number: int) -> None:
        await self._tenant.enqueue(_RELAY, _OPERATION, body=str(number))

    async def send_many(self, numbers: Sequence[int]) -> None:
        from dispatch_core import DispatchRequest

        await self._tenant.enqueue_many(
            [DispatchRequest(_RELAY, _OPERATION, body=str(number).encode()) for number in numbers]
        )


@asynccontextmanager
async def producer(dsn: str, _: Mapping[str, Any]) -> AsyncIterator[_Producer]:
    """Open a gateway's client."""
    from gateway_sdk import GatewayClient

    async with GatewayClient(dsn) as client:
        yield _Producer(client.tenant(_TENANT))


@asynccontextmanager
async def worker(dsn: str, settings: Mapping[str, Any], handled: Callable[[int], None]) -> AsyncIterator[None]:
    """Run a relay."""
    from relay_sdk import DispatchJob, Relay, Reply

    relay = Relay(_RELAY, tenants=[_TENANT], dsn=dsn, **settings)
    reply = Reply()

    @relay.handler(_OPERATION)
    async def count(job: DispatchJob) -> Reply:
        handled(int(job.body))
        return reply

    async with asyncio.TaskGroup() as group:
        group.create_task(relay.run())
        yield
        relay.stop()


SYSTEM = System(
    name="ours",
    language="python",
    contenders=(
        Contender(
            "ours",
            "best",
            "Relay(concurrency=2000), batches of 10,000",
            100_000,
            {"concurrency": 2000},
            {"batch": 10_000},
        ),
        Contender("ours", "default", "all defaults (concurrency 100)", 100_000, {}, {"batch": 1000}),
    ),
    left="select exists (select from relay.s2r_relay_dispatch_queue)",
    done=lambda _: "select count(*) from relay.s2r_relay_dispatch_result where status = 'succeeded'",
    prepare=packages("relay_sdk", "relay-dispatch", "asyncpg", "uvloop"),
    command=python_command,
    install=_install,
)
