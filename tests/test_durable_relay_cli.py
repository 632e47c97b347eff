"""`relay-dispatch relay run` with chunk handlers, as a process of its own."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.streams.text import TextReceiveStream

from dispatch_core.durable_models import ChunkStatus, JobStatus
from tests.support.chunks import Work
from tests.support.cli import COMMAND, environment, spawn_cli
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually

RELAYS = """
import anyio
from relay_sdk import ChunkContext, Relay

imports = Relay("imports", tenants=["acme"])

@imports.chunk_handler("quick")
async def quick(ctx: ChunkContext) -> int:
    return ctx.payload

@imports.chunk_handler("endless")
async def endless(ctx: ChunkContext) -> None:
    await ctx.save_checkpoint("as far as this")
    await anyio.sleep_forever()
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "chunk_relays_for_test.py").write_text(RELAYS)
    return tmp_path


async def test_a_drain_works_off_the_chunks_and_prints_what_was_done(
    app: Path, database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(5, kind="quick")
    ended = await spawn_cli(
        *("relay", "run", "chunk_relays_for_test:imports", "--drain", "--app-dir", str(app)),
        env={"RELAY_DISPATCH_DSN": database.worker_dsn},
    )
    assert ended.code == 0, ended.err
    assert "chunks done" in ended.out
    assert "succeeded" not in ended.out
    assert (await work.job(job_id)).status is JobStatus.COMPLETED


@pytest.mark.case("C30")
async def test_sigterm_releases_the_chunks_of_a_relay_with_chunk_handlers_alone(
    app: Path, database: TestDatabase, gateway: Any
) -> None:
    work = Work(gateway)
    job_id = await work.submit(1, kind="endless")
    command = [*COMMAND, "relay", "run", "chunk_relays_for_test:imports", "--app-dir", str(app), "-o", "json"]
    env = environment(RELAY_DISPATCH_DSN=database.worker_dsn, RELAY_GRACE_SECONDS="0.2")
    async with await anyio.open_process(command, env=env) as process:
        assert process.stdout is not None
        said = ""
        with anyio.fail_after(30):
            async for text in TextReceiveStream(process.stdout):
                if not said:
                    assert json.loads(text)["event"] == "ready"

                    async def is_saved() -> bool:
                        return (await work.chunk(job_id)).checkpoint is not None

                    await eventually(is_saved)
                    process.send_signal(signal.SIGTERM)
                said += text
            assert await process.wait() == 0
    ((counts),) = json.loads(said.splitlines()[-1])["instances"].values()
    assert (counts["chunks_claimed"], counts["chunks_released"], counts["claims"]) == (1, 1, 0)
    chunk = await work.chunk(job_id)
    assert (chunk.status, chunk.attempts, chunk.checkpoint) == (ChunkStatus.PENDING, 0, "as far as this")
