"""The examples do what they say: each is run as a person runs it, and its last line is looked at."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import httpx
import pytest

from dispatch_core import DispatchRequest
from dispatch_core.dev.cluster import free_port
from gateway_sdk import GatewayClient
from tests.support.cli import environment
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually

EXAMPLES = Path(__file__).parents[1] / "examples"
NUMBERED = sorted(EXAMPLES.glob("[0-9][0-9]_*.py"))
ALONE = ("07_outbox_order_service", "10_durable_import")
"""They start what they need."""
WITH_DSN = [path for path in NUMBERED if path.stem not in ALONE]
LINES = dict.fromkeys(ALONE, 90)  # several programs in one
NEEDED = {"08_outbox_sqlalchemy": "sqlalchemy", "09_outbox_psycopg": "psycopg"}
"""What the packages of the project do not bring along."""


def environment_for(database: TestDatabase) -> dict[str, str]:
    return environment(
        RELAY_DISPATCH_DSN=database.gateway_dsn, RELAY_WORKER_DSN=database.worker_dsn, PYTHONUNBUFFERED="1"
    )


def skip_without_its_package(name: str) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason=f"{name}.py needs {NEEDED[name]}, which is not installed")


async def run_example(
    database: TestDatabase, name: str, *arguments: str, seconds: float = 60, **variables: str
) -> list[str]:
    """Run an example to its end; return the lines that it printed."""
    with anyio.fail_after(seconds):
        done = await anyio.run_process(
            [sys.executable, str(EXAMPLES / name), *arguments],
            env=environment_for(database) | variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = done.stdout.decode()
    assert done.returncode == 0, text
    assert "Traceback" not in text
    return text.splitlines()


class Running:
    """An example that runs until it is told to stop, and what it has printed so far."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        self.text = ""

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for piece in self.process.stdout:
            self.text += piece.decode()

    @property
    def last_line(self) -> str:
        return self.text.splitlines()[-1] if self.text else ""


@asynccontextmanager
async def running(database: TestDatabase, name: str, *arguments: str) -> AsyncIterator[Running]:
    """Start an example that goes on; at the end of the block it must stop by SIGTERM, within seconds."""
    process = await anyio.open_process(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment_for(database),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    example = Running(process)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(example.read)
            yield example
            process.send_signal(signal.SIGTERM)
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(20):
            await process.wait()
        if process.returncode is None:
            process.kill()
    assert process.returncode in (0, -signal.SIGTERM), example.text


# --- the form ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NUMBERED, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < LINES.get(path.stem, 60)
    assert text.startswith('"""')
    header = text.split('"""')[1]
    assert f"examples/{path.name}" in header
    assert "RELAY_DISPATCH_DSN" in header or "02_relay.py" in header or "on a server of its own" in header


@pytest.mark.parametrize("path", WITH_DSN, ids=lambda path: path.stem)
def test_an_example_without_its_dsns_says_which_and_where_they_come_from(path: Path) -> None:
    skip_without_its_package(path.stem)
    done = subprocess.run(
        [sys.executable, str(path)], env=environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert done.returncode == 1
    told = done.stderr.decode()
    assert re.fullmatch(r"set RELAY_(DISPATCH|WORKER)_DSN[^\n]*[:,] (`make db` prints what|as in 02)\n", told)


def test_the_examples_are_numbered_from_one() -> None:
    assert [path.name[:2] for path in NUMBERED] == [f"{n:02}" for n in range(1, len(NUMBERED) + 1)]


# --- what they do -----------------------------------------------------------------------------------------------------


async def test_example_01_waits_for_a_result_and_is_told_a_refusal(database: TestDatabase) -> None:
    lines = await run_example(database, "01_enqueue_and_wait.py")
    assert lines[-1] == "done: invoice 7 succeeded, total 4200; invoice 5000 INVOICE-UNKNOWN"


async def test_example_02_serves_until_sigterm(database: TestDatabase) -> None:
    async with running(database, "02_relay.py") as relay, GatewayClient(database.gateway_dsn) as client:
        acme = client.tenant("acme")
        invoice = await acme.call("erp-emea", "GetInvoice", json={"number": 7}, timeout=20)
        assert invoice.json() == {"invoice": 7, "total": 4200, "attempt": 1}
        booked = await acme.call("erp-emea", "BookStock", timeout=20, max_attempts=2)
        assert (booked.status, booked.response_status, booked.attempt) == ("succeeded", 204, 2)
        hashed = await acme.call("erp-emea", "HashDocument", body="any text", timeout=20)
        assert hashed.response_body == hashlib.sha256(b"any text").hexdigest().encode()
        other = await acme.call("erp-emea", "Unheard", timeout=20)
        assert (other.status, other.error_code, other.response_status) == ("failed", "NOT-SERVED", 501)
    assert relay.last_line == "done: 3 jobs succeeded, 1 failed"


async def test_example_03_stores_order_and_job_together_or_neither(database: TestDatabase) -> None:
    """I8: nobody sees what is not committed, nor what was rolled back."""
    lines = await run_example(database, "03_business_transaction.py")
    assert sum("not visible yet" in line for line in lines) == 2
    assert lines[-1] == "done: orders [1]; the job of order 1 is pending, that of order 2 is None"


async def test_example_04_serves_tenants_in_turns_and_apart(database: TestDatabase) -> None:
    lines = await run_example(database, "04_tenants_and_relays.py")
    assert lines[-1] == "done: 110 of 110 succeeded; acme's job, asked for by globex: None"
    found = re.search(r"globex had its last turn as number (\d+) of 110; b'stored for globex'", lines[-2])
    assert found is not None
    assert int(found[1]) < 60


@pytest.mark.invariant("I9")
async def test_example_05_leaves_no_job_lying_after_sigterm(database: TestDatabase) -> None:
    lines = await run_example(database, "05_graceful_stop.py")
    assert "SIGTERM: exit code 0" in lines
    assert "  long: failed, attempts used: 1 S2R-RELAY-STOPPED" in lines
    assert "  not started: pending, attempts used: 0 " in lines
    assert lines[-1] == ("done: succeeded > succeeded, failed > failed, pending > succeeded, pending > succeeded")


async def test_example_06_answers_posts_at_once_gets_anywhere_and_503_where_much_waits(database: TestDatabase) -> None:
    ports = [free_port(), free_port()]
    first, second = (f"http://127.0.0.1:{port}" for port in ports)
    async with (
        running(database, "06_http_gateway.py", str(ports[0])) as one,
        running(database, "06_http_gateway.py", str(ports[1])) as two,
        httpx.AsyncClient(headers={"x-tenant": "acme"}, timeout=10) as http,
    ):
        await eventually(lambda: _answers(http, first), 20, message="the first gateway's answer")
        await eventually(lambda: _answers(http, second), 20, message="the second gateway's answer")

        posted = await http.post(f"{first}/relays/erp-emea/GetInvoice", content=b'{"number": 7}')
        assert posted.status_code == 202
        assert posted.headers["location"] == f"/jobs/{posted.json()['job_id']}"
        job = second + posted.headers["location"]
        before = await http.get(job)
        assert (before.status_code, before.json()["status"]) == (202, "pending")
        assert (await http.get(job, headers={"x-tenant": "globex"})).status_code == 404
        nobody = await http.get(job, headers={"x-tenant": ""})
        assert (nobody.status_code, nobody.json()["error"]) == (400, "S2R-TENANCY-UNBOUND")

        async with running(database, "02_relay.py"):

            async def ended() -> bool:
                return (await http.get(job)).status_code == 200

            await eventually(ended, 20, message="the result, by the other gateway")
        assert (await http.get(job)).json() == {"invoice": 7, "total": 4200, "attempt": 1}

        async with GatewayClient(database.gateway_dsn) as client:
            await client.tenant("acme").enqueue_many(DispatchRequest("erp-emea", "GetInvoice") for _ in range(1000))
        refused = await http.post(f"{second}/relays/erp-emea/GetInvoice", content=b'{"number": 7}')
        assert (refused.status_code, refused.json()["error"]) == (503, "S2R-BACKLOG-FULL")
        assert int(refused.headers["retry-after"]) > 0
    assert one.last_line.startswith("done: 1 enqueued")
    assert two.last_line.startswith("done: 0 enqueued")


@pytest.mark.slow
@pytest.mark.case("C21")
@pytest.mark.timeout(300)
async def test_example_07_loses_and_doubles_no_order_whoever_is_killed_and_when(database: TestDatabase) -> None:
    lines = await run_example(
        database, "07_outbox_order_service.py", "--orders", "39", seconds=280,
        RELAY_DISPATCH_TEST_DSN=database.server.admin_dsn,
    )  # fmt: skip
    killed = [re.sub(r"^\[#+\.*\] +\d+/13  ", "", line) for line in lines if " killed: " in line]
    assert len(killed) == 13
    assert {line.split()[0] for line in killed} == {"shop", "drainer", "relay"}
    assert sum("started again  orders 2, events 0, jobs 2, shipped 2 " in line for line in lines) == 7
    assert "     7  rolled back: card refused   0 of these have a job or were shipped" in lines
    assert lines[-2] == "done: 32 orders committed, 32 jobs, 0 lost, 0 doubled"


def test_example_07_says_what_it_takes() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(EXAMPLES / "07_outbox_order_service.py"), *arguments]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)

    told = run("--help")
    assert (told.returncode, "--orders N" in told.stdout) == (0, True)
    assert run("--orders", "3").returncode == 2


@pytest.mark.invariant("J2")
@pytest.mark.case("C21")
async def test_example_10_stores_every_good_row_once_and_tells_of_every_bad_one_though_a_relay_is_killed(
    database: TestDatabase,
) -> None:
    lines = await run_example(
        database, "10_durable_import.py", "--rows", "5000", "--chunks", "40",
        RELAY_DISPATCH_TEST_DSN=database.server.admin_dsn,
    )  # fmt: skip
    assert lines[-2] == "done: 4950 rows stored, 50 told of, 0 lost, 0 doubled, 0 invented"
    assert any(re.match("  kill -9 [0-9]+: a relay, after a COMMIT that it never heard of", line) for line in lines)
    watched = [line for line in lines if line.startswith("  watch | ")]
    assert re.search(r" completed_with_errors in [\d.]+ s: 5,000 of 5,000 rows, 50 of them bad; 40 done$", watched[-1])


def test_example_10_says_what_it_takes() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(EXAMPLES / "10_durable_import.py"), *arguments]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)

    told = run("--help")
    assert (told.returncode, "--rows N" in told.stdout) == (0, True)
    assert run("--rows", "30").returncode == 2


@pytest.mark.invariant("I8")
@pytest.mark.kind("somebody else's connection and codecs")
@pytest.mark.parametrize("name", NEEDED)
async def test_examples_08_and_09_store_an_order_and_its_event_or_neither(database: TestDatabase, name: str) -> None:
    skip_without_its_package(name)
    lines = await run_example(database, f"{name}.py")
    assert [re.sub("event .*", "event", line) for line in lines] == [
        "order 1 of acme: event",
        "order 2 of acme: event",
        "done: orders [1, 2], 2 events delivered",
    ]


async def _answers(http: httpx.AsyncClient, base: str) -> bool:
    try:
        return (await http.get(f"{base}/jobs/{os.urandom(16).hex()}")).status_code in (200, 404)
    except httpx.TransportError:
        return False
