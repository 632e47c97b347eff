"""`relay-dispatch demo`: a gateway and relays at work, on a PostgreSQL of their own, and a check of what came of it.

    lines     what is asked, read from JSON lines
    stage     the server and the database
    relays    the relay processes
    traffic   the gateway: enqueue and wait
    audit     did every request end exactly once?
    report    tables, or one document
    show      what is seen meanwhile

`play` is all of it but the first two and the last.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

import anyio

from gateway_sdk.client import GatewayClient
from gateway_sdk.demo.audit import audit, read_stored
from gateway_sdk.demo.lines import BadLine, DemoLine
from gateway_sdk.demo.relays import RelayFleet
from gateway_sdk.demo.report import DemoReport
from gateway_sdk.demo.show import Show
from gateway_sdk.demo.stage import Stage
from gateway_sdk.demo.traffic import send_all

__all__ = ["Terminated", "play"]


class Terminated(Exception):  # noqa: N818  (an order, not an error)
    """The demo was told to end by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


async def play(
    stage: Stage,
    lines: Sequence[DemoLine],
    skipped: Sequence[BadLine],
    *,
    rate: float,
    processes: int,
    show: Show,
) -> DemoReport:
    """Send the lines through relays and return what came of them; nothing of it runs any more afterwards.

    Raises: Terminated; RelayDispatchError where the relays or the gateway cannot work.
    """
    told: list[int] = []
    report: DemoReport | None = None
    # Around the task group, so that a second signal does not interrupt what the first one made it do.
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with anyio.create_task_group() as group:

            async def obey() -> None:
                async for number in signals:
                    told.append(number)
                    group.cancel_scope.cancel()

            group.start_soon(obey)
            report = await _play(stage, lines, skipped, rate, processes, show)
            group.cancel_scope.cancel()
    if report is None:
        raise Terminated(told[0])
    return report


async def _play(
    stage: Stage, lines: Sequence[DemoLine], skipped: Sequence[BadLine], rate: float, processes: int, show: Show
) -> DemoReport:
    tenants = sorted({line.tenant for line in lines})
    fleet = RelayFleet(stage.worker_dsn, tenants, processes)
    started = time.perf_counter()
    try:
        async with fleet.running(show), GatewayClient(stage.gateway_dsn, listen_dsn=stage.gateway_dsn) as client:
            with show.traffic(len(lines)):
                sending = time.perf_counter()
                endings = await send_all(client, lines, rate=rate, on_sent=show.sent, on_end=show.ended)
                show.seconds["requests"] = time.perf_counter() - sending
            health = client.health()
    finally:
        fleet.kill()
    stored = await read_stored(stage.operator_dsn, tenants)
    show.seconds["in all"] = time.perf_counter() - started
    return DemoReport(
        endings=endings,
        skipped=list(skipped),
        relays=fleet.reports,
        checks=audit(endings, stored, fleet.reports),
        seconds=show.seconds,
        results_by_push=health.wakes_by_push,
        results_by_poll=health.wakes_by_poll,
    )
