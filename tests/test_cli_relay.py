"""`relay-dispatch relay run`: what it loads, what it refuses, and how it ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.streams.text import TextReceiveStream

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.models import DispatchStatus
from tests.support.cli import COMMAND, Ended, environment, run_cli, spawn_cli
from tests.support.databases import TestDatabase

RELAYS = """
from relay_sdk.outcomes import Reply
from relay_sdk.relay import Relay

erp = Relay("erp", tenants=["acme"])
archive = Relay("archive", tenants=["acme"])

def make():
    return erp

number = 7

@erp.handler("Echo")
@archive.handler("Echo")
async def echo(job):
    return Reply(job.body)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A directory of modules whose names no other test has used, since Python keeps what it has imported."""
    (tmp_path / "relays_for_test.py").write_text(RELAYS)
    (tmp_path / "imports_nothing.py").write_text("import nothing_of_that_name")
    (tmp_path / "is_broken.py").write_text("x = (")
    (tmp_path / "raises.py").write_text("\n1 / 0")
    (tmp_path / "names_no_tenant.py").write_text('from relay_sdk.relay import Relay\nx = Relay("erp", tenants=[])')
    return tmp_path


async def relay_run(app: Path, *arguments: str) -> Ended:
    return await run_cli("relay", "run", "--app-dir", str(app), "--dsn", "postgresql://127.0.0.1:1/none", *arguments)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("relays_for_test", "which relay? relays_for_test holds relays_for_test:erp, relays_for_test:archive"),
        ("relays_for_test:erb", "did you mean relays_for_test:erp?"),
        ("relays_for_test:make", "is a function and not a Relay; relays_for_test holds"),
        ("relays_for_test:number", "is an int and not a Relay"),
        ("relays_for_test.py:erp", "give a module and not a file, as in relays_for_test:erp"),
        ("no_such_module:erp", "there is no module 'no_such_module' in"),
        (":erp", "give module:relay"),
        ("imports_nothing:x", "imports_nothing.py:1: No module named 'nothing_of_that_name'"),
        ("is_broken:x", "is_broken.py:1: '(' was never closed"),
        ("raises:x", "raises.py:2: ZeroDivisionError"),
        ("names_no_tenant:x", "names_no_tenant.py:2: a relay needs at least one tenant"),
    ],
)
async def test_a_relay_that_cannot_be_loaded_is_a_usage_error_that_says_why(app: Path, target: str, says: str) -> None:
    ended = await relay_run(app, target)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err


async def test_a_relay_named_twice_and_one_without_a_dsn_are_usage_errors(
    app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = await relay_run(app, "relays_for_test:erp", "relays_for_test:erp")
    assert (twice.code, "named twice" in twice.err) == (2, True)
    ended = await spawn_cli("relay", "run", "--app-dir", str(app), "relays_for_test:erp")
    assert (ended.code, ended.out) == (2, "")
    assert "RELAY_DISPATCH_DSN" in ended.err


async def test_a_database_that_does_not_answer_is_exit_code_five_and_a_missing_schema_four(
    app: Path, bare_database: TestDatabase
) -> None:
    arguments = ["relay", "run", "--app-dir", str(app), "relays_for_test:erp", "--dsn"]
    away = await spawn_cli(*arguments, "postgresql://somebody:s3cret@127.0.0.1:1/nowhere")
    assert (away.code, away.out) == (5, "")
    bare = await spawn_cli(*arguments, bare_database.admin_dsn)
    assert (bare.code, bare.out) == (4, "")
    for ended in (away, bare):
        assert "Traceback" not in ended.err
        assert "s3cret" not in ended.err


async def test_drain_works_off_the_backlog_of_two_relays_for_the_tenants_named_and_ends(
    app: Path, database: TestDatabase, gateway: Any
) -> None:
    repository = RelayDispatchRepository(gateway, "globex")
    ids = [await repository.enqueue(relay, "Echo", body=b"x") for relay in ("erp", "archive", "erp")]
    other = await RelayDispatchRepository(gateway, "acme").enqueue("erp", "Echo")
    ended = await spawn_cli(
        *("relay", "run", "relays_for_test:erp", "relays_for_test:archive", "--drain", "--tenant", "globex"),
        *("--app-dir", str(app), "-o", "json"),
        env={"RELAY_DISPATCH_DSN": database.worker_dsn},
    )
    assert ended.code == 0, ended.err
    ready, end = (json.loads(line) for line in ended.out.splitlines())
    assert (ready["event"], end["event"]) == ("ready", "end")
    assert sorted(ready["instances"]) == sorted(end["instances"])
    assert {c["relay"]: c["jobs_succeeded"] for c in end["instances"].values()} == {"erp": 2, "archive": 1}
    results = await repository.poll_many(ids)
    assert {getattr(results[job_id], "status") for job_id in ids} == {DispatchStatus.SUCCEEDED}  # noqa: B009
    # The tenant in the code is not served where others are named.
    status = await RelayDispatchRepository(gateway, "acme").poll_status(other)
    assert status is not None
    assert status.status is DispatchStatus.PENDING


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("by", ["SIGTERM", "SIGINT", "stdin"])
async def test_a_running_relay_ends_in_order_when_it_is_told_to(app: Path, database: TestDatabase, by: str) -> None:
    """I9."""
    command = [*COMMAND, "relay", "run", "relays_for_test:erp", "--app-dir", str(app), "-o", "json"]
    env = environment(RELAY_DISPATCH_DSN=database.worker_dsn)
    async with await anyio.open_process([*command, "--stop-with-stdin"], env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdin is not None
        said = ""
        with anyio.fail_after(30):
            async for text in TextReceiveStream(process.stdout):
                first = not said
                said += text
                if first:
                    assert json.loads(said)["event"] == "ready"
                    if by == "stdin":
                        await process.stdin.aclose()
                    else:
                        process.send_signal(signal.Signals[by])
            assert await process.wait() == 0
            log = b"".join([part async for part in process.stderr]).decode()
    assert json.loads(said.splitlines()[-1])["event"] == "end"
    assert "Traceback" not in log
