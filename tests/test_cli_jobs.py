"""`relay-dispatch jobs`: what it prints where, and the code it ends with."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import anyio
import asyncpg
import pytest

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import DatabaseUnavailableError
from gateway_sdk import cli
from tests.support.cli import COMMAND, Ended, environment, interruptible, run_cli, spawn_cli
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.gateway import open_client
from tests.support.proxy import TcpProxy

Connection: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture(autouse=True)
def _dsn(monkeypatch: pytest.MonkeyPatch, database: TestDatabase) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_DSN", database.gateway_dsn)
    monkeypatch.delenv("RELAY_DISPATCH_LISTEN_DSN", raising=False)


async def jobs(*arguments: str) -> Ended:
    return await run_cli("jobs", *arguments)


async def enqueue(*arguments: str) -> UUID:
    ended = await jobs("enqueue", "acme", "erp", "GetInvoice", *arguments)
    assert (ended.code, ended.err) == (0, "")
    return UUID(ended.out.strip())


@asynccontextmanager
async def worker_that(worker: Connection, **answer: Any) -> AsyncIterator[None]:
    """Complete every job of relay erp, tenant acme, with this answer."""
    repository = RelayDispatchRepository(worker, "acme")

    async def work() -> None:
        while True:
            for job in (await repository.claim("erp", claimed_by="test", limit=10)).jobs:
                await repository.complete(job.job_id, "erp", job.fence, "test", **answer)
            await anyio.sleep(0.01)

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        yield
        group.cancel_scope.cancel()


async def test_enqueue_prints_the_id_alone_and_stores_what_it_was_given(worker: Connection) -> None:
    options = ["--json", '{"number": 7}', "-H", "x-a=1", "-H", "x-b=2", "-H", "x-b=3", "--max-attempts", "3"]
    job_id = await enqueue(*options, "--ttl", "60")
    (job,) = (await RelayDispatchRepository(worker, "acme").claim("erp", claimed_by="test")).jobs
    assert (job.job_id, job.operation, job.json(), job.max_attempts) == (job_id, "GetInvoice", {"number": 7}, 3)
    assert job.headers == {"x-a": "1", "x-b": ["2", "3"]}
    assert 55 < job.remaining() <= 60


async def test_enqueue_reads_a_body_from_stdin_byte_for_byte(database: TestDatabase, worker: Connection) -> None:
    body = bytes(range(256)) * 10
    ended = await spawn_cli(
        *("jobs", "enqueue", "acme", "erp", "Store", "--body", "-", "-o", "json"),
        env={"RELAY_DISPATCH_DSN": database.gateway_dsn},
        stdin=body,
    )
    assert (ended.code, ended.err) == (0, "")
    (job,) = (await RelayDispatchRepository(worker, "acme").claim("erp", claimed_by="test")).jobs
    assert (str(job.job_id), job.body) == (ended.document["job_id"], body)


async def test_the_same_key_is_the_same_job_and_another_request_under_it_fails() -> None:
    assert await enqueue("--key", "k", "--body", "x") == await enqueue("--key", "k", "--body", "x")
    other = await jobs("enqueue", "acme", "erp", "GetInvoice", "--key", "k", "--body", "y")
    assert (other.code, other.out) == (1, "")


async def test_a_backlog_that_is_full_is_a_failure_that_says_when_to_come_again() -> None:
    await enqueue("--max-pending", "1")
    refused = await jobs("enqueue", "acme", "erp", "GetInvoice", "--max-pending", "1")
    assert (refused.code, refused.out) == (1, "")
    assert "S2R-BACKLOG-FULL" in refused.err
    assert "1 jobs wait for relay erp" in " ".join(refused.err.split())
    await enqueue("--max-pending", "0")


async def test_enqueue_and_wait_prints_the_answer_and_ends_as_the_job_did(worker: Connection) -> None:
    answer = {"response_status": 200, "response_headers": {"x-a": "1"}, "response_body": b'{"total":4200}'}
    async with worker_that(worker, **answer):
        ended = await jobs("enqueue", "acme", "erp", "GetInvoice", "--wait", "-o", "json")
    assert ended.code == 0
    assert ended.document["status"] == "succeeded"
    assert ended.document["response_body"] == '{"total":4200}'
    assert ended.err.startswith(f"job {ended.document['job_id']}")
    async with worker_that(worker, status="failed", error_code="NO-SUCH-INVOICE", error_message="none of that number"):
        ended = await jobs("enqueue", "acme", "erp", "GetInvoice", "--wait")
    assert ended.code == 1
    assert "NO-SUCH-INVOICE none of that number" in ended.out


async def test_a_wait_that_ends_before_the_job_is_a_failure() -> None:
    job_id = await enqueue()
    ended = await jobs("wait", "acme", str(job_id), "--timeout", "0.05")
    assert (ended.code, ended.out) == (1, "")
    assert str(job_id) in ended.err


async def test_wait_prints_several_results_as_one_document(worker: Connection) -> None:
    ids = [str(await enqueue()), str(await enqueue())]
    async with worker_that(worker):
        ended = await jobs("wait", "acme", *ids, "-o", "json")
    assert (ended.code, ended.err) == (0, "")
    assert sorted(result["job_id"] for result in ended.document) == sorted(ids)


async def test_show_tells_where_a_job_stands_and_what_relay_has_it(worker: Connection) -> None:
    job_id = await enqueue()
    pending = await jobs("show", "acme", str(job_id), "-o", "json")
    assert (pending.code, pending.document["status"], pending.document["relay_id"]) == (0, "pending", "erp")
    assert pending.document["operation"] == "GetInvoice"
    await RelayDispatchRepository(worker, "acme").claim("erp", claimed_by="relay-7")
    claimed = await jobs("show", "acme", str(job_id))
    assert "claimed" in claimed.out
    assert "relay-7" in claimed.out


async def test_show_writes_a_body_byte_for_byte_and_only_if_there_is_one(
    database: TestDatabase, worker: Connection
) -> None:
    job_id = str(await enqueue())
    nothing = await jobs("show", "acme", job_id, "--body")
    assert (nothing.code, nothing.out) == (3, "")
    async with worker_that(worker, response_body=b"\x00\xff\n"):
        await jobs("wait", "acme", job_id)
    done = await anyio.run_process([*COMMAND, "jobs", "show", "acme", job_id, "--body", "--dsn", database.gateway_dsn])
    assert done.stdout == b"\x00\xff\n"
    shown = await jobs("show", "acme", job_id, "-o", "json")
    assert (shown.document["response_body"], shown.document["response_body_base64"]) == (None, "AP8K")
    assert "3 bytes" in (await jobs("show", "acme", job_id)).out


async def test_list_shows_the_newest_first_and_only_what_was_asked_for() -> None:
    first, second = await enqueue(), await enqueue()
    await jobs("expire", "acme", str(first))
    every = await jobs("list", "acme", "-o", "json")
    assert [row["job_id"] for row in every.document] == [str(second), str(first)]
    pending = await jobs("list", "acme", "--status", "pending", "--relay", "erp", "-o", "json")
    assert [row["job_id"] for row in pending.document] == [str(second)]
    page = await jobs("list", "acme", "--limit", "1", "-o", "json")
    assert f"--before {second}" in page.err
    rest = await jobs("list", "acme", "--before", str(second))
    assert (rest.code, str(first) in rest.out, str(second) in rest.out) == (0, True, False)


async def test_expire_withdraws_once_and_then_matches_nothing() -> None:
    job_id = str(await enqueue())
    assert (await jobs("expire", "acme", job_id)).code == 0
    again = await jobs("expire", "acme", job_id, "-o", "json")
    assert (again.code, again.document) == (3, [{"job_id": job_id, "expired": 0}])


async def test_what_is_not_there_is_exit_code_three() -> None:
    job_id = str(uuid4())
    for arguments in (
        ("show", "acme", job_id),
        ("wait", "acme", job_id),
        ("expire", "acme", job_id),
        ("list", "acme", "--status", "failed"),
    ):
        ended = await jobs(*arguments)
        assert (ended.code, ended.out) == (3, ""), arguments
        assert ended.err
    assert (await jobs("list", "acme", "-o", "json")).document == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("enqueue", "", "erp", "X"),
        ("enqueue", "acme", "", "X"),
        ("enqueue", "acme", "erp", "x" * 201),
        ("enqueue", "acme", "erp", "X", "--body", "a", "--json", "1"),
        ("enqueue", "acme", "erp", "X", "--json", "{"),
        ("enqueue", "acme", "erp", "X", "--json", "NaN"),
        ("enqueue", "acme", "erp", "X", "-H", "novalue"),
        ("enqueue", "acme", "erp", "X", "--ttl", "0"),
        ("enqueue", "acme", "erp", "X", "--ttl", "inf"),
        ("enqueue", "acme", "erp", "X", "--max-attempts", "0"),
        ("enqueue", "acme", "erp", "X", "--max-pending", "-1"),
        ("show", "acme", "not-an-id"),
        ("list", "acme", "--status", "lost"),
        ("list", "acme", "--limit", "0"),
    ],
)
async def test_bad_input_is_a_usage_error_and_stores_nothing(arguments: tuple[str, ...], admin: Connection) -> None:
    ended = await jobs(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err
    assert await admin.fetchval("select count(*) from relay.s2r_relay_dispatch_queue") == 0


async def test_a_login_without_the_right_is_told_so(database: TestDatabase) -> None:
    ended = await jobs("enqueue", "acme", "erp", "X", "--dsn", database.worker_dsn)
    assert (ended.code, ended.out) == (1, "")
    assert "db grant" in ended.err


async def test_a_missing_schema_is_exit_code_four(bare_database: TestDatabase) -> None:
    for arguments in (("list", "acme"), ("enqueue", "acme", "erp", "X")):
        ended = await jobs(*arguments, "--dsn", bare_database.admin_dsn)
        assert (ended.code, ended.out) == (4, "")
        assert "db migrate" in ended.err


async def test_a_database_that_does_not_answer_is_exit_code_five_without_password_or_traceback() -> None:
    env = {"RELAY_DISPATCH_DSN": "postgresql://somebody:s3cret@127.0.0.1:1/nowhere"}
    for arguments in (("list", "acme"), ("wait", "acme", str(uuid4()))):
        ended = await spawn_cli("jobs", *arguments, env=env)
        assert (ended.code, ended.out) == (5, "")
        assert "Traceback" not in ended.err
        assert "s3cret" not in ended.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_a_wait_with_128_and_its_number_and_the_job_goes_on(
    database: TestDatabase, number: signal.Signals
) -> None:
    """Also in the background of a shell, where SIGINT is ignored unless somebody sees to it."""
    job_id = await enqueue()
    with interruptible():
        process = await anyio.open_process(
            [*COMMAND, "jobs", "wait", "acme", str(job_id)], env=environment(RELAY_DISPATCH_DSN=database.gateway_dsn)
        )
    async with process:
        connection = await asyncpg.connect(database.admin_dsn)
        try:
            waits = "select count(*) from pg_stat_activity where application_name like '%listener%' and datname = $1"
            # So long may a process take to start where many do.
            await eventually(lambda: connection.fetchval(waits, database.name), 60)
            process.send_signal(number)
            assert process.stderr is not None
            with anyio.fail_after(10):
                assert await process.wait() == 128 + number
                said = b"".join([part async for part in process.stderr]).decode()
        finally:
            await connection.close()
            if process.returncode is None:
                process.kill()
    assert "Traceback" not in said
    assert (await jobs("show", "acme", str(job_id), "-o", "json")).document["status"] == "pending"


async def test_wait_waits_an_outage_out_also_where_it_does_not_know_the_deadline_yet(
    database: TestDatabase, worker: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    """Later it did so always: a client waits for as long as a job can go on."""
    dsn = database.gateway_dsn
    job_id = await enqueue("--ttl", "600")
    results: list[Any] = []
    async with TcpProxy.before(dsn) as proxy, open_client(proxy.dsn(dsn)) as client:

        async def wait() -> None:
            results.extend(await cli._results(client.tenant("acme"), [job_id], None))

        proxy.refuse()
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await eventually(lambda: "waiting on" in capsys.readouterr().err)
            await proxy.listen()
            async with worker_that(worker):
                await eventually(lambda: results)
    assert [(result.job_id, str(result.status)) for result in results] == [(job_id, "succeeded")]


async def test_wait_ends_by_its_timeout_in_an_outage_too(database: TestDatabase) -> None:
    dsn = database.gateway_dsn
    job_id = await enqueue("--ttl", "600")
    async with TcpProxy.before(dsn) as proxy, open_client(proxy.dsn(dsn)) as client:
        proxy.refuse()
        with pytest.raises(DatabaseUnavailableError):
            await cli._results(client.tenant("acme"), [job_id], 0.5)
