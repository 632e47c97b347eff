"""`relay-dispatch db` and the command line's own rules: stdout, stderr, exit codes, no password, no traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import asyncpg
import pytest

from dispatch_core import cli
from dispatch_core.cli import app as app_module
from dispatch_core.cli.common import exit_code, foreseen_in
from dispatch_core.errors import (
    ConnectionLostError,
    DatabaseBusyError,
    InvalidNameError,
    MigrationDriftError,
    RelayDispatchError,
    SchemaMismatchError,
)
from dispatch_core.migrate.files import load
from tests.support.databases import TestDatabase

Connection: TypeAlias = "asyncpg.Connection[Any]"


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Stdout as the one JSON document that it must be."""
        return json.loads(self.out)


Run: TypeAlias = "Callable[..., Any]"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in a thread, since it has an event loop of its own."""
    monkeypatch.delenv("RELAY_DISPATCH_DSN", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    async def run(*arguments: str) -> Ended:
        capsys.readouterr()
        code = await anyio.to_thread.run_sync(partial(app_module.run, list(arguments)))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Ended(code, captured.out, captured.err)

    return run


@pytest.fixture
async def login(admin: Connection, database: TestDatabase) -> AsyncIterator[str]:
    name = f"cli_{database.name}"
    await admin.execute(f"create role {name} login password 'relay'")
    yield name
    await admin.execute(f"drop owned by {name}; drop role {name}")


# --- migrate, status, verify ----------------------------------------------------------------------------------------


async def test_migrate_tells_its_steps_on_stderr_and_its_result_on_stdout(
    bare_database: TestDatabase, run: Run
) -> None:
    dsn = bare_database.admin_dsn
    planned = await run("db", "migrate", "--plan", "--dsn", dsn, "--output", "json")
    names = [step["step"] for step in planned.document]
    assert names == [step.name for step in load().steps]
    done = await run("db", "migrate", "--dsn", dsn, "--output", "json")
    assert done.code == 0
    assert done.document == {"applied": names, "bootstrapped": True}
    told = [line.split(": done in")[0].split(", ") for line in done.err.splitlines() if ": done in" in line]
    assert [name for step in told for name in step] == names
    again = await run("db", "migrate", "--dsn", dsn)
    assert (again.code, again.out, again.err) == (0, "", "nothing to apply\n")
    nothing = await run("db", "migrate", "--plan", "--dsn", dsn)
    assert (nothing.code, nothing.out, nothing.err) == (0, "", "nothing to apply\n")


async def test_the_script_needs_no_database(run: Run) -> None:
    ended = await run("db", "migrate", "--sql")
    assert ended.code == 0
    assert "create table relay.schema_history" in ended.out
    assert all(step.name in ended.out for step in load().steps)


async def test_the_dsn_of_the_environment_is_used_where_no_option_is_given(
    database: TestDatabase, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAY_DISPATCH_DSN", database.operator_dsn)
    ended = await run("db", "status", "-o", "json")
    assert ended.code == 0
    assert ended.document["state"] == "current"
    assert ended.document["database"] == database.name
    table = await run("db", "status")
    assert f"database {database.name}" in table.out
    assert "0001_tenancy" in table.out


async def test_status_of_an_empty_database_ends_with_4(bare_database: TestDatabase, run: Run) -> None:
    ended = await run("db", "status", "--dsn", bare_database.admin_dsn, "-o", "json")
    assert ended.code == 4
    assert ended.document["state"] == "missing"
    assert "run: relay-dispatch db migrate" in ended.err


async def test_an_older_version_before_a_newer_schema_ends_with_4(
    database: TestDatabase, admin: Connection, run: Run
) -> None:
    await admin.execute("""
        insert into relay.schema_history (step, kind, sha256, applied_with, duration_ms)
        values ('0099_future', 'table', 'x', '9.9.9', 0);
        update relay.schema_history set protocol = 99, applied_with = '9.9.9' where kind = 'functions'
    """)
    ended = await run("db", "migrate", "--dsn", database.admin_dsn)
    assert ended.code == 4
    assert "protocol 99 (by relay-dispatch 9.9.9)" in ended.err
    assert "0099_future" in ended.err


async def test_verify_ends_with_1_and_lists_what_is_wrong(database: TestDatabase, admin: Connection, run: Run) -> None:
    assert (await run("db", "verify", "--dsn", database.operator_dsn)).code == 0
    await admin.execute("alter table relay.s2r_relay_dispatch_queue no force row level security")
    ended = await run("db", "verify", "--dsn", database.operator_dsn, "-o", "json")
    assert ended.code == 1
    assert ended.document["problems"] == ["relay.s2r_relay_dispatch_queue: row security is not forced"]
    assert "row security is not forced" in (await run("db", "verify", "--dsn", database.operator_dsn)).out


async def test_a_login_without_rights_is_given_one_line_and_the_statements(
    bare_database: TestDatabase, run: Run
) -> None:
    ended = await run("db", "migrate", "--dsn", bare_database.gateway_dsn)
    assert ended.code == 1
    first, *statements = ended.err.splitlines()
    assert first.startswith("error: S2R-MIGRATION-RIGHTS: login relay_gateway_login lacks rights on database")
    assert statements
    assert all(line.startswith("  ") and line.endswith(";") for line in statements)
    assert ended.out == ""


# --- grant, revoke --------------------------------------------------------------------------------------------------


async def test_grant_and_revoke_do_what_they_say_and_3_means_that_there_was_nothing(
    database: TestDatabase, login: str, run: Run
) -> None:
    scope = ["--as", "worker", "--tenant", "acme", "--relay", "erp", "--dsn", database.admin_dsn]
    granted = await run("db", "grant", login, *scope, "-o", "json")
    assert (granted.code, granted.document) == (
        0,
        {"login": login, "as": "worker", "tenant": "acme", "relay": "erp"},
    )
    assert (await run("db", "revoke", login, *scope)).code == 0
    again = await run("db", "revoke", login, *scope)
    assert (again.code, again.out) == (3, "")
    assert "was not granted" in again.err


@pytest.mark.parametrize(
    "options",
    [
        ["--as", "gateway"],
        ["--as", "gateway", "--tenant", "a", "--all-tenants"],
        ["--as", "worker", "--tenant", "a"],
        ["--as", "worker", "--tenant", "a", "--relay", "r", "--all-relays"],
        ["--as", "gateway", "--tenant", "a", "--relay", "r"],
        ["--as", "operator", "--all-tenants", "--all-relays"],
        ["--as", "admin", "--tenant", "a"],
        ["--tenant", "a"],
    ],
)
async def test_a_scope_that_is_left_out_or_said_twice_is_a_usage_error(run: Run, options: list[str]) -> None:
    """No right that reaches everywhere comes from an option left out."""
    ended = await run("db", "grant", "somebody", *options, "--dsn", "postgresql://u:hunter2@127.0.0.1:9/x")
    assert ended.code == 2
    assert "hunter2" not in ended.err + ended.out


async def test_a_grant_by_a_login_that_may_not_says_whose_dsn_is_needed(
    database: TestDatabase, login: str, run: Run
) -> None:
    ended = await run("db", "grant", login, "--as", "gateway", "--all-tenants", "--dsn", database.gateway_dsn)
    assert ended.code == 1
    assert "only a login that migrates may grant: let --dsn be that of one" in ended.err


@pytest.mark.parametrize("room", load().rooms)
async def test_one_room_is_installed_looked_at_and_made_whole_alone(
    bare_database: TestDatabase, run: Run, room: str
) -> None:
    dsn = ["--dsn", bare_database.admin_dsn]
    other = [step.name for step in load().steps if step.room not in (None, room)]
    planned = await run("db", "migrate", "--plan", "--only", room, *dsn, "-o", "json")
    done = await run("db", "migrate", "--only", room, *dsn, "-o", "json")
    wanted = [step.name for step in load().select([room]).steps]
    assert done.document["applied"] == [step["step"] for step in planned.document] == wanted
    script = (await run("db", "migrate", "--sql", "--only", room)).out
    assert not any(f"'{name}'" in script for name in other)

    status = await run("db", "status", *dsn, "-o", "json")
    assert (status.code, status.document["state"], status.document["rooms"]) == (0, "current", [room])
    assert [s["step"] for s in status.document["steps"] if s["state"] == "absent"] == other
    assert (await run("db", "verify", *dsn)).err == "the schema is as the migrations made it\n"
    for missing in status.document["absent_rooms"]:
        asked = await run("db", "status", "--only", missing, *dsn)
        assert asked.code == 4
        assert f"the room {missing} of schema relay is not in this database" in asked.err
        assert (await run("db", "verify", "--only", missing, *dsn)).code == 1

    assert (await run("db", "migrate", *dsn)).code == 0
    assert (await run("db", "status", *dsn, "-o", "json")).document["rooms"] == list(load().rooms)
    assert (await run("db", "verify", *dsn)).code == 0
    for command in (("migrate",), ("migrate", "--sql"), ("status",), ("verify",)):
        refused = await run("db", *command, "--only", "Outbox", *dsn)
        assert (refused.code, "no such room: Outbox" in refused.err) == (2, True)


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["status"], ["verify"], ["migrate"], ["migrate", "--plan"]])
async def test_an_unreachable_database_ends_with_5_in_one_line_without_the_password(
    run: Run, command: list[str]
) -> None:
    ended = await run("db", *command, "--dsn", "postgresql://somebody:hunter2@127.0.0.1:9/x")
    assert (ended.code, ended.out) == (5, "")
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("error: S2R-")
    assert "hunter2" not in ended.err


@pytest.mark.parametrize("dsn", ["hunter2", "http://u:hunter2@h/d", "postgresql://u:hunter2@[::1/d", ""])
async def test_a_dsn_that_is_none_is_a_usage_error_that_does_not_quote_it(run: Run, dsn: str) -> None:
    ended = await run("db", "status", "--dsn", dsn)
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert "hunter2" not in ended.err


async def test_a_refused_login_ends_with_1_without_the_password(bare_database: TestDatabase, run: Run) -> None:
    ended = await run("db", "status", "--dsn", bare_database.dsn("relay_gateway_login", "hunter2"))
    assert ended.code == 1
    assert ended.err.count("\n") == 1
    assert "hunter2" not in ended.err


async def test_no_dsn_at_all_is_a_usage_error_that_names_both_ways(run: Run) -> None:
    ended = await run("db", "status")
    assert (ended.code, ended.err) == (
        2,
        "error: S2R-CONFIGURATION-INVALID: no DSN: give --dsn or set RELAY_DISPATCH_DSN\n",
    )


async def test_plan_and_sql_exclude_each_other(run: Run) -> None:
    assert (await run("db", "migrate", "--plan", "--sql")).code == 2


async def test_an_unknown_command_is_a_usage_error(run: Run) -> None:
    assert (await run("nonsense")).code == 2
    assert (await run("db", "nonsense")).code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionLostError("x"), 5),
        (SchemaMismatchError("x"), 4),
        (InvalidNameError("x"), 2),
        (DatabaseBusyError("x"), 1),
        (MigrationDriftError("x"), 1),
    ],
)
def test_every_foreseeable_error_has_its_exit_code_also_out_of_a_task_group(
    error: RelayDispatchError, code: int
) -> None:
    wrapped = ExceptionGroup("tasks", [ValueError("other"), ExceptionGroup("inner", [error])])
    assert foreseen_in(wrapped) is error
    assert exit_code(error) == code
    assert foreseen_in(ValueError("x")) is None


# --- the application ------------------------------------------------------------------------------------------------


async def test_version_names_the_protocol(run: Run) -> None:
    ended = await run("version", "--output", "json")
    assert ended.document["protocol"] == load().protocol
    assert (await run("version")).out.startswith("relay-dispatch ")


async def test_only_the_group_that_is_asked_for_is_imported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Point:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> Any:
            asked.append(self.name)
            return lambda: print(f"this is {self.name}")

    monkeypatch.setattr(app_module, "EntryPoint", Point)
    monkeypatch.setattr(app_module, "entry_points", lambda group: [Point("one"), Point("two")])
    assert (await run("one")).out == "this is one\n"
    assert asked == ["one"]
    await run("--help")
    assert asked == ["one", "one", "two"]


async def test_a_group_that_cannot_be_imported_is_named_and_hides_no_other(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EntryPoint("broken", "no_such_module:app", app_module.ENTRY_POINTS)
    monkeypatch.setattr(app_module, "entry_points", lambda group: [broken])
    ended = await run("broken")
    assert ended.code == 2
    assert "the command `broken` cannot be loaded" in ended.err
    helped = await run("--help")
    assert helped.code == 0
    assert "warning: the command `broken` cannot be loaded" in helped.err


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_names_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["version"])
    assert caught.value.code == 1
    assert "relay-dispatch[cli]" in capsys.readouterr().err


async def test_the_installed_command_runs_as_a_process() -> None:
    ended = await anyio.run_process(
        [sys.executable, "-m", "dispatch_core.cli", "db", "status", "--dsn", "postgresql://u:hunter2@127.0.0.1:9/x"],
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert ended.returncode == 5
    assert ended.stdout == b""
    assert ended.stderr.count(b"\n") == 1
