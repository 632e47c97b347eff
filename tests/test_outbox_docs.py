"""docs/outbox.md says what is true: its examples run as they stand, and what it says of commands and settings is so."""

from __future__ import annotations

import random
import re
import sys
import textwrap
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import httpx2
import pytest

from dispatch_core import Outbox
from dispatch_core.backoff import full_jitter
from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.settings import OutboxSettings
from gateway_sdk import DispatchSink, GatewayClient, WebhookSink
from tests.support.cli import run_cli
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.protocol import OUTBOX, Connection, connected

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "outbox.md").read_text()
WAYS = ("after_commit", "same_database", "outbox")


def example(name: str, language: str = "python") -> str:
    """Return the block behind the marker of that name."""
    marker = f"<!-- example: tests/test_outbox_docs.py runs this block: {name} -->"
    found = re.search(re.escape(marker) + rf"\s*```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, name
    return found[1]


def imported() -> dict[str, Any]:
    """Return the names that the page imports before its first example."""
    names: dict[str, Any] = {}
    exec(example("imports"), names)
    return names


async def run(name: str, **names: Any) -> None:
    """Run a block as the body of an async function that has these names."""
    names = imported() | names
    exec(f"async def block():\n{textwrap.indent(example(name), '    ')}", names)
    await names["block"]()


@pytest.fixture
async def shop(database: TestDatabase, admin: Connection) -> AsyncIterator[Connection]:
    """The connection of an application that has a table of orders."""
    await admin.execute("create table public.orders (number int primary key); grant all on orders to public")
    async with connected(database.gateway_dsn) as conn:
        yield conn


async def _jobs(worker: Connection) -> list[Any]:
    claimed = await RelayDispatchRepository(worker, "acme").claim("warehouse", claimed_by="test", limit=10)
    return [job.json() for job in claimed.jobs]


async def _events(admin: Connection) -> list[tuple[Any, ...]]:
    rows = await admin.fetch(f"select tenant_id, kind, key, payload::text from {OUTBOX} order by event_id")
    return [tuple(row) for row in rows]


@pytest.mark.parametrize("way", WAYS)
def test_each_of_the_three_ways_is_shown_in_three_lines(way: str) -> None:
    assert len([line for line in example(way).splitlines() if line.strip()]) == 3


@pytest.mark.parametrize("way", WAYS)
async def test_each_of_the_three_ways_stores_the_order_and_sends_its_message_once(
    way: str, database: TestDatabase, shop: Connection, admin: Connection, worker: Connection
) -> None:
    async with GatewayClient(database.gateway_dsn) as client:
        await run(way, conn=shop, client=client)
    assert await admin.fetch("select number from orders") == [(7,)]
    if way == "outbox":
        assert await _events(admin) == [("acme", "order.placed", None, '{"order": 7}')]
        assert await _jobs(worker) == []
    else:
        assert await _events(admin) == []
        assert await _jobs(worker) == [{"order": 7}]


@pytest.mark.parametrize("way", ["same_database", "outbox"])
async def test_of_a_transaction_that_rolls_back_there_is_neither_order_nor_message(
    way: str, database: TestDatabase, shop: Connection, admin: Connection, worker: Connection
) -> None:
    async with GatewayClient(database.gateway_dsn) as client:
        transaction = shop.transaction()
        await transaction.start()
        await run(way, conn=shop, client=client)
        await transaction.rollback()
    assert await admin.fetch("select number from orders") == []
    assert (await _events(admin), await _jobs(worker)) == ([], [])


async def test_the_drainer_of_the_page_makes_a_job_of_one_kind_and_calls_the_function_of_the_other(
    database: TestDatabase,
    shop: Connection,
    admin: Connection,
    worker: Connection,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OUTBOX_DRAIN_INTERVAL_SEC", "5")
    names = imported() | {"shop_dsn": database.gateway_dsn, "dispatch_dsn": database.gateway_dsn}
    exec(example("drainer"), names)
    async with names["client"]:
        await run("outbox", conn=shop)
        async with shop.transaction():
            cancelled = await Outbox.enqueue(shop, "order.cancelled", {"order": 6}, tenant="acme")

        async def all_gone() -> bool:
            return await _events(admin) == []

        await eventually(all_gone)
    assert await _jobs(worker) == [{"order": 7}]
    assert capsys.readouterr().out == f"order 6 of acme is cancelled: {cancelled}\n"


async def test_a_webhook_is_sent_without_a_client_and_verified_by_the_lines_of_the_page(
    database: TestDatabase, shop: Connection, admin: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOX_DRAIN_INTERVAL_SEC", "5")
    line = example("secret", "").replace("python ", f"{sys.executable} ", 1)
    secret = (await anyio.run_process(line)).stdout.decode().strip()
    assert re.fullmatch(r"whsec_[A-Za-z0-9+/]{43}=", secret)
    received: list[tuple[bytes, dict[str, str]]] = []

    def receive(request: httpx2.Request) -> httpx2.Response:
        received.append((request.content, dict(request.headers)))
        return httpx2.Response(200, content=nothing())

    async def nothing() -> AsyncIterator[bytes]:
        yield b""

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(receive)) as http:
        sink = partial(WebhookSink, client=http)
        await run("outbox", conn=shop)
        async with anyio.create_task_group() as group:
            names = {"shop_dsn": database.gateway_dsn, "url": "https://shop.example/hook", "secret": secret}
            group.start_soon(partial(run, "alone", **names, WebhookSink=sink))

            async def all_gone() -> bool:
                return await _events(admin) == []

            await eventually(all_gone)
            group.cancel_scope.cancel()
    ((body, headers),) = received
    verified: dict[str, Any] = {"secret": secret, "body": body, "headers": headers}
    exec(example("receiver"), verified)
    message = verified["message"]
    assert (message["type"], message["data"]) == ("order.placed", {"order": 7})


async def test_many_events_are_written_in_one_transaction(shop: Connection, admin: Connection) -> None:
    await run("many", conn=shop)
    assert [(row[2], row[3]) for row in await _events(admin)] == [
        ("customer-1", '{"order": 1}'), ("customer-0", '{"order": 2}'), ("customer-1", '{"order": 3}')
    ]  # fmt: skip


async def test_the_sql_call_of_the_page_writes_an_event_in_the_transaction(shop: Connection, admin: Connection) -> None:
    await shop.execute(example("psql", "sql"))
    assert await admin.fetch("select number from orders") == [(7,)]
    assert await _events(admin) == [("acme", "order.placed", "order-7", '{"order": 7}')]


async def test_what_the_page_says_of_the_commands_is_what_they_offer() -> None:
    for line in re.findall(r"^relay-dispatch (outbox \w+|db \w+)(.*)", PAGE, re.MULTILINE):
        shown = await run_cli(*line[0].split(), "--help")
        assert shown.code == 0, line
        for option in re.findall(r"--[a-z-]+", line[1].partition(" #")[0]):
            assert option in shown.out, (line[0], option)


async def test_wherever_a_retry_is_recommended_it_is_said_when_that_makes_a_second_job() -> None:
    """Not within so many days of the parking: it is the end of the first job that counts, and the gateway's setting."""
    bound = "later than GATEWAY_RESULT_KEEP_SECONDS after its first job ended"
    shown = await run_cli("outbox", "retry", "--help")
    for text, times in ((PAGE.replace("`", ""), 2), (re.sub(r"[^\w -]", " ", shown.out), 1)):
        assert " ".join(text.split()).count(bound) == times
    rows = re.findall(r"^\|.*(?:outbox retry|before you retry).*$", PAGE, re.MULTILINE)
    assert len(rows) == 5
    assert all(row.endswith(" ¹ |") for row in rows)


def test_what_the_page_says_of_the_settings_is_their_default() -> None:
    settings = OutboxSettings()
    assert (settings.drain_interval_sec, settings.batch_size, settings.concurrency) == (0, 100, 10)
    assert (settings.sink_timeout_seconds, settings.stale_claim_seconds, settings.max_attempts) == (30, 300, 25)
    assert settings.retry_horizon_seconds == 3 * 86400
    for name in re.findall(r"`(OUTBOX_[A-Z_]+)`", PAGE):
        assert name.removeprefix("OUTBOX_").lower() in OutboxSettings.model_fields, name


class _Longest(random.Random):
    def uniform(self, _: float, high: float) -> float:
        return high


def test_an_event_that_always_fails_is_parked_after_the_hours_that_the_page_says() -> None:
    settings = OutboxSettings()
    pauses = [
        full_jitter(n, settings.backoff_base_seconds, settings.backoff_cap_seconds, _Longest())
        for n in range(1, settings.max_attempts)
    ]
    assert 1.5 * 3600 < sum(pauses) / 2 < 2.5 * 3600
    assert sum(pauses) < 4 * 3600
    assert pauses[-1] == 15 * 60


def test_a_job_is_known_by_the_event_it_was_made_of() -> None:
    event_id = UUID("01998d4e-0000-7000-8000-000000000000")
    assert DispatchSink.job_id(event_id, "k") == DispatchSink.job_id(event_id, kind="k") != event_id


def test_every_link_of_the_page_leads_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", PAGE):
        if "://" in target:
            continue
        page = (ROOT / "docs" / target).resolve()
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, anchor
    for path in re.findall(r"examples/\w+\.py", PAGE):
        assert (ROOT / path).exists(), path
