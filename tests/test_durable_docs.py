"""docs/durable.md says what is true: its examples run as they stand, and what it says of commands and settings too."""

from __future__ import annotations

import re
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest

from dispatch_core.settings import CoreSettings, DurableJobsSettings
from gateway_sdk import ChunkStatus, DurableJobs, GatewayClient
from relay_sdk import ChunkContext, Relay, RelaySettings
from tests.support.cli import run_cli
from tests.support.databases import TestDatabase
from tests.support.durable import run_out
from tests.support.eventually import eventually
from tests.support.protocol import Connection, connected

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "durable.md").read_text()
ORDERS = [{"number": n, "total": -1 if n % 10 == 0 else n} for n in range(1, 1201)]


def example(name: str) -> str:
    """Return the block behind the marker of that name."""
    marker = f"<!-- example: tests/test_durable_docs.py runs this block: {name} -->"
    found = re.search(re.escape(marker) + r"\s*```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, name
    return found[1]


async def run(name: str, **names: Any) -> dict[str, Any]:
    """Run a block as the body of an async function that has these names; return those that it made."""
    scope: dict[str, Any] = {}
    exec(example("imports"), scope)
    scope |= names
    exec(f"async def block():\n{textwrap.indent(example(name), '    ')}\n    return locals()", scope)
    made: dict[str, Any] = await scope["block"]()
    return made


@asynccontextmanager
async def running(relay: Relay) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(relay.run)
        yield
        relay.stop(grace_seconds=1)


async def _done(jobs: DurableJobs, job_id: UUID, chunks: int) -> bool:
    job = await jobs.status(job_id)
    return job is not None and job.chunks[ChunkStatus.DONE] == chunks


async def _runs(jobs: DurableJobs, job_id: UUID) -> bool:
    job = await jobs.status(job_id)
    return job is not None and job.status == "running"


def relay_of(database: TestDatabase) -> Relay:
    return Relay("importer", tenants=["acme"], dsn=database.worker_dsn)


@pytest.mark.invariant("J2")
async def test_the_import_of_the_page_stores_every_order_and_tells_of_every_bad_one(
    database: TestDatabase, admin: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    async with GatewayClient(database.gateway_dsn) as client:
        await admin.execute(
            "create table public.orders (number int primary key, total int); grant all on orders to public"
        )
        made = await run("handler", worker_dsn=database.worker_dsn)
        async with running(made["relay"]):
            with anyio.fail_after(20):
                await run("submit", client=client, orders=ORDERS)
        assert capsys.readouterr().out.splitlines()[-1] == "completed_with_errors 1080 of 1200 rows, 120 bad"
        assert await admin.fetchval("select count(*) from orders") == 1080
        assert await admin.fetchval("select count(*) from relay.durable_row_error where code = 'NEGATIVE'") == 120


async def test_rows_and_completion_of_the_page_are_one_transaction(database: TestDatabase, admin: Connection) -> None:
    async with GatewayClient(database.gateway_dsn) as client:
        await admin.execute("create table public.totals (part int, total int); grant all on totals to public")
        relay = relay_of(database)
        await run("complete", relay=relay)
        jobs = client.tenant("acme").durable
        async with running(relay):
            job = await jobs.wait(await jobs.submit("totals", [[1, 2], [3, 4, 5]]), timeout=20)
        assert job.status == "completed"
        assert await admin.fetch("select part, total from totals order by 1") == [(1, 3), (2, 12)]


async def test_the_store_of_the_page_works_off_a_job_without_a_relay(database: TestDatabase, admin: Connection) -> None:
    await admin.execute("create table public.totals (part int, total int); grant all on totals to public")
    async with GatewayClient(database.gateway_dsn) as client, connected(database.worker_dsn) as conn:
        jobs = client.tenant("acme").durable
        job_id = await jobs.submit("totals", [[1, 2], [3, 4, 5]])
        await run("store", conn=conn, job_id=job_id)
        job = await jobs.status(job_id)
        assert job is not None
        assert job.status == "completed"
    assert await admin.fetch("select part, total from totals order by 1") == [(1, 3), (2, 12)]


@pytest.mark.invariant("J4")
async def test_letters_of_the_page_that_may_have_been_sent_wait_for_a_person(
    database: TestDatabase, admin: Connection
) -> None:
    async with GatewayClient(database.gateway_dsn) as client:
        sent: list[str] = []
        held = anyio.Event()

        async def send(letter: str) -> None:
            sent.append(letter)
            if letter == "to Bob":
                held.set()
                await anyio.sleep_forever()

        jobs = client.tenant("acme").durable
        doomed = relay_of(database)
        await run("letters", relay=doomed, send=send)
        async with anyio.create_task_group() as group:
            group.start_soon(doomed.run)
            job_id = (await run("submit_letters", jobs=jobs))["job_id"]
            with anyio.fail_after(20):
                await held.wait()
                await eventually(lambda: _done(jobs, job_id, 1), message="the letter to Cid")
            group.cancel_scope.cancel()  # at once: nobody can know whether the letter to Bob is sent
        await run_out(admin)
        async with connected(database.worker_dsn) as worker:
            await worker.fetch("select * from relay.durable_reap('acme', 'test', 10)")
            await worker.fetch("select * from relay.durable_finish('acme', array[$1::uuid])", job_id)
        status = await jobs.status(job_id)
        assert status is not None
        assert status.status == "needs_review"
        shown = await run_cli("durable", "show", str(job_id), "--chunk", "1", "--dsn", database.operator_dsn)
        assert re.search("status +needs_review", shown.out)
        assert "checkpoint 1" in shown.out
        done = await jobs.resolve(job_id, 1, "done", actor="bob", note="the letter to Bob is in the log")
        assert (done.outcome, done.status, sent.count("to Bob")) == ("applied", "completed", 1)


async def test_lines_of_the_page_are_streamed_or_submitted_in_the_callers_transaction_and_decided_about(
    database: TestDatabase, admin: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    async with GatewayClient(database.gateway_dsn) as client:
        await admin.execute("create table public.uploads (name text); grant all on uploads to public")
        jobs = client.tenant("acme").durable

        async def upload() -> AsyncIterator[list[str]]:
            for n in range(3):
                yield [f"{n};1", f"{n};2"]

        streamed = (await run("stream", jobs=jobs, upload=upload()))["job_id"]
        async with connected(database.gateway_dsn) as conn:
            joined = (await run("same_transaction", jobs=jobs, conn=conn))["job_id"]
        assert await admin.fetch("select name from uploads") == [("orders.csv",)]
        job = await jobs.status(streamed)
        assert job is not None
        assert (job.chunks_total, job.rows_total, job.priority, job.created_by) == (3, 6, 5, "alice")

        relay = relay_of(database)
        begun = anyio.Event()

        @relay.chunk_handler("lines")
        async def lines(ctx: ChunkContext) -> None:
            begun.set()
            ctx.row_error(7, "BAD")
            if ctx.job_id == joined and not ctx.checkpoint:
                await ctx.save_checkpoint(True)
                with anyio.move_on_after(0.5):  # it is resumed at once, perhaps before it has heard of the pause
                    await ctx.stopping.wait()
                ctx.stopping.check()

        async with running(relay):
            await begun.wait()
            with anyio.fail_after(20):
                await eventually(lambda: _runs(jobs, joined), message="the job runs")
            made = await run("decide", jobs=jobs, job_id=joined)
        assert capsys.readouterr().out == "applied running -> paused\n"
        assert (made["job"].status, made["failed"], made["bad"]) == ("completed_with_errors", [], [(7, "BAD")])
        types = [event.type for event in made["page"].events]
        assert types[-1] == "completed"
        assert [kind for kind in types if kind in ("paused", "resumed")] == ["paused", "resumed"]
        assert (await jobs.event_page(joined, made["page"].next)).events == []


async def test_what_the_page_says_of_the_commands_is_what_they_offer() -> None:
    said = re.findall(r"^relay-dispatch (durable \w+|db \w+)(.*)", PAGE, re.MULTILINE)
    assert {line[0].split()[1] for line in said if line[0].startswith("durable")} == {
        "list", "show", "watch", "events", "errors", "pause", "resume", "cancel", "retry", "resolve"
    }  # fmt: skip
    for line in said:
        shown = await run_cli(*line[0].split(), "--help")
        assert shown.code == 0, line
        for option in re.findall(r"--[a-z-]+", line[1].partition(" #")[0]):
            assert option in shown.out, (line[0], option)


def test_what_the_page_says_of_the_settings_is_their_default() -> None:
    durable, relay = DurableJobsSettings(), RelaySettings()
    assert (durable.lease_seconds, durable.retry_base_seconds, durable.retry_cap_seconds) == (60, 1, 300)
    assert (durable.retention_seconds, durable.insert_batch) == (30 * 86400, 1000)
    assert (durable.max_payload_bytes, durable.max_checkpoint_bytes) == (1024**2, 256 * 1024)
    assert (relay.chunk_concurrency, relay.chunk_stop_seconds, relay.chunk_row_errors) == (16, 5, 100_000)
    assert relay.grace_seconds == 30
    fields = {"DURABLE": set(DurableJobsSettings.model_fields), "RELAY_DISPATCH": set(CoreSettings.model_fields)}
    fields["RELAY"] = set(RelaySettings.model_fields)
    for name in re.findall(r"`((?:DURABLE|RELAY)_[A-Z_]+)`", PAGE):
        prefix = next(prefix for prefix in fields if name.startswith(f"{prefix}_"))
        assert name.removeprefix(f"{prefix}_").lower() in fields[prefix], name


def test_what_the_page_says_a_context_has_it_has() -> None:
    section = PAGE[PAGE.index("| in the context | |") : PAGE.index("| the handler | the chunk |")]
    names = {name for cell in re.findall(r"^\| (.*?) \|", section, re.MULTILINE) for name in re.findall(r"\w+", cell)}
    for name in names - {
        "await",
        "async",
        "with",
        "as",
        "conn",
        "value",
        "None",
        "in",
        "the",
        "context",
        "rows",
        "data",
    }:
        if not name.isdigit() and name not in ("row", "code", "message"):
            assert name in dir(ChunkContext), name


def test_every_link_of_the_page_leads_somewhere() -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", PAGE):
        page = (ROOT / "docs" / target).resolve()
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, anchor
    for path in re.findall(r"examples/\w+\.py", PAGE):
        assert (ROOT / path).exists(), path
