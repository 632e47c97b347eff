"""The demo, shortened: a gateway, two relay processes, a database; and what it reads and says."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import anyio.abc
import asyncpg
import pytest

from dispatch_core.dev.postgres import DevServer
from dispatch_core.models import DispatchStatus
from gateway_sdk.cli_demo import _own_requests
from gateway_sdk.demo.audit import StoredJob, audit
from gateway_sdk.demo.lines import BadLine, DemoLine, read_lines
from gateway_sdk.demo.relays import RelayReport
from gateway_sdk.demo.report import percentile, rows_of
from gateway_sdk.demo.traffic import Ending
from tests.support.cli import COMMAND, Ended, environment, spawn_cli
from tests.support.eventually import eventually

REQUESTS = Path(__file__).parents[1] / "examples" / "requests.jsonl"


def some_lines() -> list[str]:
    """Return about thirty of the demo's own lines, of every operation, and its two bad ones."""
    chosen: list[str] = []
    seen: Counter[str] = Counter()
    for line in REQUESTS.read_text().splitlines():
        try:
            operation = json.loads(line)["operation"]
        except ValueError:
            operation = "bad"
        if '"x-priority":1' in line:
            operation = "bad"
        if seen[operation] < {"RunReport": 2, "QuoteNow": 2}.get(operation, 7):
            seen[operation] += 1
            chosen.append(line)
    return chosen


@pytest.fixture
async def own_server(server: DevServer) -> AsyncIterator[DevServer]:
    """The server, by a superuser of the test's own: what he owns is this test's, also where others use the server."""
    name = f"s2r_demo_{secrets.token_hex(4)}"
    connection = await asyncpg.connect(server.admin_dsn)
    try:
        await connection.execute(f"create role {name} superuser login password 'relay'")
        try:
            yield DevServer(server.dsn(name, "postgres"), "dsn")
        finally:
            for left in await demo_databases(connection, name):
                await connection.execute(f'drop database "{left}" with (force)')
            await connection.execute(f"drop role {name}")
    finally:
        await connection.close()


async def demo(server: DevServer, *arguments: str, stdin: str | None = None) -> Ended:
    return await spawn_cli(
        *("demo", "--dsn", server.admin_dsn, "--rate", "0", *arguments), stdin=None if stdin is None else stdin.encode()
    )


async def demo_databases(connection: Any, owner: str | None = None) -> set[str]:
    """Return those that the login has made, or `owner`."""
    rows = await connection.fetch(
        "select datname from pg_database where datdba = coalesce($1, session_user::text)::regrole", owner
    )
    return {row["datname"] for row in rows}


async def nothing_is_left(server: DevServer) -> bool:
    connection = await asyncpg.connect(server.admin_dsn)
    try:
        return await demo_databases(connection) == set()
    finally:
        await connection.close()


# --- the whole of it --------------------------------------------------------------------------------------------------


async def test_the_demo_ends_every_request_once_and_says_so_as_one_document(
    own_server: DevServer, tmp_path: Path
) -> None:
    lines = some_lines()
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(["# a comment", "", *lines]))
    done = await demo(own_server, "--input", str(path), "--json")
    assert done.code == 0, done.err
    report = done.document
    sent = len(lines) - 2
    assert report["ok"] is True
    assert [check for check in report["checks"] if not check["ok"]] == []
    assert (report["requests"]["sent"], report["requests"]["accepted"]) == (sent, sent)
    bad = [number for number, line in enumerate(lines, start=3) if not line.endswith("}") or '"x-priority":1' in line]
    assert [skipped["line"] for skipped in report["requests"]["skipped"]] == bad
    assert all(f"line {number} is skipped" in done.err for number in bad)
    ended = report["requests"]["ended"]
    assert len({request["job_id"] for request in ended}) == sent
    fax = next(request for request in ended if json.loads(lines[request["line"] - 3])["operation"] == "SendFax")
    assert (fax["status"], fax["error_code"], fax["attempts"]) == ("failed", "S2R-UNKNOWN-OPERATION", 1)
    rows = report["rows"]
    assert sum(row["sent"] for row in rows) == sent
    ends = Counter[str]()
    for row in rows:
        assert row["succeeded"] + row["failed"] + row["expired"] == row["sent"]
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        for status in ("succeeded", "failed", "expired"):
            ends[f"{row['operation']} {status}"] += row[status]
    assert ends["QuoteNow expired"] == 2
    assert ends["SendFax failed"] == 7
    assert ends["HashDocument succeeded"] == ends["TotalOrder succeeded"] == 7
    assert sum(row["retried"] for row in rows if row["operation"] == "ReserveStock") > 0
    # Both processes were there, and what they say adds up to what is stored.
    assert len(report["relays"]) == 2
    counts = [counts for relay in report["relays"] for counts in relay["instances"].values()]
    assert sum(c["jobs_succeeded"] for c in counts) == sum(row["succeeded"] for row in rows)
    assert report["wake_ups"]["relays_by_notify"] > 0
    assert report["wake_ups"]["results_by_notify"] > 0
    assert await nothing_is_left(own_server)


async def test_the_demo_reads_stdin_prints_tables_and_fails_where_a_line_is_not_as_expected(
    own_server: DevServer,
) -> None:
    lines = [
        {"tenant": "me", "relay": "erp", "operation": "Echo", "body": "hello", "expect": {"status": "succeeded"}},
        {"tenant": "me", "relay": "erp", "operation": "Echo", "json": {"n": 1}, "expect": {"json": {"n": 2}}},
        {"tenant": "me", "relay": "erp", "operation": "Sing"},
    ]
    done = await demo(own_server, "-i", "-", stdin="\n".join(map(json.dumps, lines)))
    assert done.code == 1, done.err
    assert "✓ 3 of 3 jobs ended, each with one stored result, none is left" in done.out
    assert "✗ 1 of 2 ended as their line expects (line 2: another answer)" in done.out
    assert "Echo" in done.out
    assert "- line 3: failed, S2R-UNKNOWN-OPERATION: " in done.out


async def test_an_input_without_a_good_line_is_a_usage_error_and_starts_nothing(
    own_server: DevServer, tmp_path: Path
) -> None:
    done = await demo(own_server, "-i", "-", stdin="nothing\n{}")
    assert (done.code, done.out) == (2, "")
    assert "line 1 is skipped: not JSON" in done.err
    assert "PostgreSQL is up" not in done.err
    missing = await demo(own_server, "-i", str(tmp_path / "none"))
    assert (missing.code, "cannot be read" in missing.err) == (2, True)


@asynccontextmanager
async def a_demo_under_way(server: DevServer) -> AsyncIterator[tuple[anyio.abc.Process, str]]:
    """A demo whose one request is being waited for, and will be for a minute; with the name of its tenant."""
    tenant = uuid4().hex
    slow = {"tenant": tenant, "relay": "archive", "operation": "RunReport", "json": {"seconds": 60}, "ttl": 60}
    connection = await asyncpg.connect(server.admin_dsn)
    command = [*COMMAND, "demo", "--dsn", server.admin_dsn, "--input", "-"]
    try:
        async with await anyio.open_process(command, env=environment()) as process:
            assert process.stdin is not None
            await process.stdin.send(json.dumps(slow).encode())
            await process.stdin.aclose()
            mine = "select datname from pg_database where datdba = session_user::regrole"
            polls = f"datname in ({mine}) and query like '%from relay.poll(%'"
            waits = f"select count(*) from pg_stat_activity where {polls} and pid <> pg_backend_pid()"
            await eventually(lambda: connection.fetchval(waits), 90)
            assert len(relays_of(tenant)) == 2
            yield process, tenant
    finally:
        await connection.close()


async def ended(process: anyio.abc.Process) -> tuple[int, str]:
    assert process.stderr is not None
    with anyio.fail_after(60):
        said = b"".join([part async for part in process.stderr]).decode()
        return await process.wait(), said


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
async def test_a_signal_ends_the_demo_in_order(own_server: DevServer, name: str, code: int) -> None:
    async with a_demo_under_way(own_server) as (process, tenant):
        process.send_signal(signal.Signals[name])
        process.send_signal(signal.Signals[name])  # an impatient second one changes nothing
        found, said = await ended(process)
        assert found == code, said
        assert "stopped: 1 of 1 sent, 0 ended" in said
        assert "Traceback" not in said
        assert relays_of(tenant) == []
        assert await nothing_is_left(own_server)


async def test_relays_do_not_outlive_a_demo_that_is_killed(own_server: DevServer) -> None:
    async with a_demo_under_way(own_server) as (process, tenant):
        process.kill()
        await process.wait()
        await eventually(lambda: not relays_of(tenant), 30)


async def test_a_relay_that_dies_ends_the_demo_with_its_reason(own_server: DevServer) -> None:
    async with a_demo_under_way(own_server) as (process, tenant):
        os.kill(relays_of(tenant)[0], signal.SIGKILL)
        code, said = await ended(process)
        assert code == 1
        assert "ended too early, with exit code -9" in said
        assert "Traceback" not in said
        assert relays_of(tenant) == []
        assert await nothing_is_left(own_server)


def relays_of(tenant: Any) -> list[int]:
    """Return the relay processes that serve a tenant, whose name is in their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if tenant in arguments and "run" in arguments:
            found.append(int(path.parent.name))
    return found


# --- its requests -----------------------------------------------------------------------------------------------------


def test_the_requests_are_what_their_generator_writes() -> None:
    made = subprocess.run(
        [sys.executable, str(REQUESTS.with_name("make_requests.py"))], capture_output=True, check=True, text=True
    )
    assert made.stdout == REQUESTS.read_text()
    assert _own_requests() == REQUESTS
    assert REQUESTS.stat().st_size < 200_000


def test_the_requests_are_500_good_ones_of_3_tenants_and_6_operations_and_two_bad_ones() -> None:
    read = list(read_lines(REQUESTS.read_bytes().splitlines()))
    good = [line for line in read if isinstance(line, DemoLine)]
    assert (len(good), len(read)) == (500, 502)
    assert len({line.tenant for line in good}) == 3
    assert {line.operation for line in good} == {
        "TotalOrder", "HashDocument", "RunReport", "ReserveStock", "QuoteNow", "SendFax",
    }  # fmt: skip
    document = next(line for line in good if line.operation == "HashDocument").request().body
    assert isinstance(document, bytes)
    assert len(document) == 200_000


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff", "not UTF-8 (byte 1)"),
        (b"[" * 100_000, "not JSON"),
        (b'{"tenant":"a","relay":"b"}', "operation missing"),
        (b'{"tenant":"","relay":"b","operation":"c"}', "tenant must not be empty"),
        (b'{"tenant":"a","relay":"b","operation":"\\ud800"}', "lone surrogate"),
        (b'{"tenant":"a","relay":"b","operation":"c","body":"x","json":1}', "one of json, body and document"),
        (b'{"tenant":"a","relay":"b","operation":"c","body":7}', "body must be text"),
        (b'{"tenant":"a","relay":"b","operation":"c","json":NaN}', "nan"),
        (b'{"tenant":"a","relay":"b","operation":"c","document":{"kb":-1,"seed":1}}', "document"),
        (b'{"tenant":"a","relay":"b","operation":"c","headers":{"x":1}}', "header 'x'"),
        (b'{"tenant":"a","relay":"b","operation":"c","ttl":0}', "ttl must be positive"),
        (b'{"tenant":"a","relay":"b","operation":"c","max_attempts":0}', "max_attempts"),
        (b'{"tenant":"a","relay":"b","operation":"c","expect":{"status":"done"}}', "no such status"),
        (b'{"tenant":"a","relay":"b","operation":"c","colour":"red"}', "unknown field 'colour'"),
    ],
)
def test_a_bad_line_is_told_by_number_and_reason(line: bytes, reason: str) -> None:
    (bad,) = read_lines([b"# comment", b"", line])
    assert isinstance(bad, BadLine)
    assert bad.line == 3
    assert reason in bad.reason


# --- its check --------------------------------------------------------------------------------------------------------


def ending(line: DemoLine, status: DispatchStatus = DispatchStatus.SUCCEEDED) -> Ending:
    return Ending(line, job_id=uuid4(), status=status, attempt=1, seconds=0.01)


def a_run() -> tuple[list[Ending], dict[Any, StoredJob], list[RelayReport]]:
    (line,) = read_lines([b'{"tenant":"a","relay":"erp","operation":"Echo"}'])
    assert isinstance(line, DemoLine)
    endings = [ending(line), ending(line)]
    stored = {e.job_id: StoredJob("succeeded", 1, 1, "relay-1", True) for e in endings}
    return endings, stored, [RelayReport("one", {"relay-1": {"jobs_succeeded": 2, "handlers_started": 2}})]


def failing(*run: Any) -> list[str]:
    return [check.name for check in audit(*run) if not check.ok]


@pytest.mark.invariant("I1")
def test_the_check_sees_what_is_lost_left_doubled_or_told_otherwise() -> None:
    """I1, as far as the demo can see it."""
    endings, stored, relays = a_run()
    assert failing(endings, stored, relays) == []
    first = endings[0].job_id
    assert failing(endings, {k: v for k, v in stored.items() if k != first}, relays)[:2] == [
        "ended exactly once",
        "relay",
    ]
    left = stored | {first: StoredJob("pending", 0, 1, None, False)}
    assert failing(endings, left, relays)[:3] == ["ended exactly once", "answers", "relay"]
    foreign = stored | {uuid4(): StoredJob("expired", 0, 1, None, True)}
    assert failing(endings, foreign, relays) == ["ended exactly once"]
    twice = [RelayReport("one", {"relay-1": {"jobs_succeeded": 3, "handlers_started": 2}})]
    assert failing(endings, stored, twice) == ["relay"]
    again = stored | {first: StoredJob("succeeded", 2, 1, "relay-1", True)}
    assert failing(endings, again, relays) == ["attempts"]
    endings[0].status, endings[0].lost = None, "S2R-DATABASE-UNAVAILABLE: away"
    assert failing(endings, stored, relays) == ["answers"]


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (50, 95, 99)] == [50.0, 95.0, 99.0]
    endings, *_ = a_run()
    (row,) = rows_of(endings)
    assert (row.sent, row.succeeded, row.retried, row.p99_ms) == (2, 2, 0, 10.0)
