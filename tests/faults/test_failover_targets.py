"""Which server a DSN asks for, and what whoever meets a standby is told."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit, urlunsplit

import anyio
import anyio.to_thread
import pytest

from dispatch_core.database import Database, connect
from dispatch_core.durable import DurableJobStore
from dispatch_core.durable_models import ChunkSpec, JobStatus
from dispatch_core.errors import ConfigurationError, DatabaseUnavailableError
from relay_sdk import ChunkContext, DispatchJob, Reply
from tests.support.chunks import KIND, chunk_relay
from tests.support.cli import run_cli
from tests.support.gateway import open_client
from tests.support.load import answers_by_notify
from tests.support.patience import held_up
from tests.support.relays import running
from tests.support.replication import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.case("C02")]


def at(dsn: str, port: int, target: str | None = None) -> str:
    """Return a DSN for one server alone."""
    parts = urlsplit(dsn)
    login = parts.netloc.rpartition("@")[0]
    query = "" if target is None else f"target_session_attrs={target}"
    return urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{port}", query=query))


async def test_each_target_finds_the_primary_or_is_refused_by_its_name(pair: Pair) -> None:
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=False))
    # The standby first, so that whoever takes what comes gets it.
    pair.ports = (pair.standby.port, pair.first.port)
    # "any" takes the standby, until that has refused to write: then it is asked for one that does not.
    async with Database(pair.gateway_dsn(name, target="any")) as pool:
        assert (await pool.execute("select pg_is_in_recovery()"))[0][0]
        with pytest.raises(DatabaseUnavailableError) as caught:
            await pool.execute("create temp table t (n int)")
        assert caught.value.sqlstate == "25006"
        assert not (await pool.execute("select pg_is_in_recovery()"))[0][0]
    for target in ("read-write", "primary", None):
        async with Database(pair.gateway_dsn(name, target=target)) as pool:
            assert not (await pool.execute("select pg_is_in_recovery()"))[0][0]
    for target in ("standby", "read-only", "prefer-standby", "anything"):
        for refused in (pair.gateway_dsn(name, target=target), at(pair.gateway_dsn(name), pair.first.port, target)):
            with pytest.raises(ConfigurationError, match="target_session_attrs in the DSN must be one of read-write"):
                await connect(refused)
            with pytest.raises(ConfigurationError, match="a standby takes no work"):
                await Database(refused).__aenter__()


async def test_whoever_has_only_a_standby_is_told_so_and_works_once_it_is_promoted(pair: Pair) -> None:
    """An address that moves, or one server's alone: pool, listener, store, relay, commands."""
    name = await anyio.to_thread.run_sync(pair.create_migrated)
    await anyio.to_thread.run_sync(lambda: pair.replicate(synchronous=False))
    gateway, worker, operator = [
        at(dsn, pair.standby.port) for dsn in (pair.gateway_dsn(name), pair.worker_dsn(name), pair.operator_dsn(name))
    ]
    relay = chunk_relay(worker, poll_seconds=0.5)

    @relay.handler("Work")
    async def work(job: DispatchJob) -> Reply:
        return Reply(job.body)

    @relay.chunk_handler(KIND)
    async def load(ctx: ChunkContext) -> None:
        await ctx.save_checkpoint(1)

    async with (
        running(relay),
        open_client(gateway, write_timeout_seconds=2.0, poll_interval_seconds=60.0) as client,
        Database(gateway) as database,
    ):
        acme = client.tenant("acme")
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: acme.enqueue("erp", "Work"),
            lambda: acme.durable.submit(KIND, [ChunkSpec(1)]),
            lambda: DurableJobStore(database, "acme").insert_job(KIND),
        ]
        for call in calls:
            with pytest.raises(DatabaseUnavailableError) as caught:
                await call()
            why = f"{caught.value}: {caught.value.__cause__}"
            assert "takes no writes" in why or "read-only transaction" in why
        assert client.health().state == "degraded"
        assert relay.health().status == "degraded"
        said = await run_cli("doctor", "--dsn", operator)
        print(said.out, said.err)
        assert said.code != 0
        assert "during recovery" in said.out
        await anyio.to_thread.run_sync(pair.primary.stop, "fast")
        promoted, held_up_before = await anyio.to_thread.run_sync(pair.promote), held_up()
        await answers_by_notify(client, relay, within=60)
        assert time.monotonic() - promoted - (held_up() - held_up_before) < 15
        job_id = await acme.durable.submit(KIND, [ChunkSpec(1)])
        assert (await acme.durable.wait(job_id, timeout=30)).status is JobStatus.COMPLETED
        assert await database.execute("select 1")
