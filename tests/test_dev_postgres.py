"""The development server: what it promises to demo, tests and benchmarks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from dispatch_core.dev import account, cluster, postgres
from dispatch_core.dev.container import docker_problem
from dispatch_core.dev.logins import dsn_as
from dispatch_core.dev.postgres import DSN_VARIABLE, DevServer, start_container_server, start_local_server, start_server
from dispatch_core.errors import ConfigurationError
from tests.support.eventually import eventually

ROOT = Path(__file__).parent.parent
PLAIN_LOGINS = ("relay_gateway_login", "relay_worker_login", "relay_operator_login")


@pytest.fixture(scope="module")
def local(binaries: Path | None) -> Iterator[DevServer]:
    with start_local_server(binaries=binaries, settings={"work_mem": "5MB"}, ephemeral=True) as server:
        yield server


@pytest.fixture
async def root_connection(local: DevServer) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(local.admin_dsn)
    yield connection
    connection.terminate()


async def test_it_is_durable_unless_told_otherwise_and_takes_settings(root_connection: asyncpg.Connection[Any]) -> None:
    names = ("fsync", "synchronous_commit", "full_page_writes", "max_connections", "work_mem", "server_encoding")
    found = [await root_connection.fetchval("select current_setting($1)", name) for name in names]
    assert found == ["on", "on", "on", "200", "5MB", "UTF8"]


async def test_it_speaks_unicode_case_by_case_and_sorts_by_code_point(root_connection: asyncpg.Connection[Any]) -> None:
    assert await root_connection.fetchval("select upper('straße é') || lower('ÀÉ')") == "STRASSE Éàé".replace("SS", "ß")
    assert await root_connection.fetchval("select 'Z' < 'a'")


async def test_it_listens_on_the_loopback_interface_alone(root_connection: asyncpg.Connection[Any]) -> None:
    assert await root_connection.fetchval("show listen_addresses") == "127.0.0.1"


async def test_plain_logins_are_plain(local: DevServer) -> None:
    for login in PLAIN_LOGINS:
        connection = await asyncpg.connect(local.dsn(login, "postgres"))
        try:
            rights = await connection.fetchrow(
                """
                select rolcanlogin,
                       rolsuper or rolcreaterole or rolcreatedb or rolbypassrls or rolreplication as special,
                       exists (select from pg_auth_members where member = r.oid) as member,
                       exists (select from pg_class where relowner = r.oid) as owner
                from pg_roles r where rolname = session_user
                """
            )
            assert dict(rights or {}) == {"rolcanlogin": True, "special": False, "member": False, "owner": False}
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute("create table public.mine ()")
        finally:
            await connection.close()


async def test_the_migrator_creates_roles_and_schemas_and_is_no_superuser(local: DevServer) -> None:
    local.create_database("migrated")
    local.create_database("migrated")
    connection = await asyncpg.connect(local.migrator_dsn("migrated"))
    try:
        await connection.execute("create role made_by_migrator; create schema made_by_migrator")
        assert not await connection.fetchval("select rolsuper from pg_roles where rolname = session_user")
    finally:
        await connection.close()


async def test_a_wrong_password_is_refused(local: DevServer) -> None:
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(local.dsn("postgres", "postgres", "wrong"))


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_keeps_port_and_data(local: DevServer, mode: Any) -> None:
    connection = await asyncpg.connect(local.admin_dsn)
    await connection.execute(f"create table kept_{mode} as select 42 as answer")
    before = local.pid
    connection.terminate()

    local.restart(mode)

    assert local.pid not in {None, before}
    connection = await asyncpg.connect(local.admin_dsn)
    assert await connection.fetchval(f"select answer from kept_{mode}") == 42
    await connection.close()


async def test_stop_and_start_may_be_said_twice(local: DevServer) -> None:
    local.stop()
    local.stop()
    assert local.pid is None
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncpg.connect(local.admin_dsn)
    local.start()
    local.start()
    await (await asyncpg.connect(local.admin_dsn)).close()


async def test_it_starts_after_its_postmaster_was_killed(local: DevServer) -> None:
    assert local.pid is not None
    os.kill(local.pid, signal.SIGKILL)
    await eventually(lambda: local.pid is None)
    local.start()
    await (await asyncpg.connect(local.admin_dsn)).close()


async def test_it_starts_although_a_stranger_has_the_process_id_of_a_killed_postmaster(local: DevServer) -> None:
    assert local.cluster is not None
    pid_file = local.cluster.data / "postmaster.pid"
    lines = pid_file.read_text().split("\n", 1)
    assert local.pid is not None
    os.kill(local.pid, signal.SIGKILL)
    await eventually(lambda: local.pid is None)
    pid_file.write_text(f"{os.getpid()}\n{lines[1]}")
    local.cluster.account.own(pid_file)
    local.start()
    await (await asyncpg.connect(local.admin_dsn)).close()


def test_several_processes_that_start_one_data_directory_share_one_server(
    tmp_path: Path, binaries: Path | None
) -> None:
    program = """
import sys, pathlib
from dispatch_core.dev.postgres import start_local_server
server = start_local_server(pathlib.Path(sys.argv[1]), binaries=pathlib.Path(sys.argv[2]) if sys.argv[2:] else None)
print(server.admin_dsn, server.pid, server.cluster.owned, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "data"), *([str(binaries)] if binaries else [])]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_clean_environment())
        for _ in range(3)
    ]
    home = account.home_for(account.server_account(), tmp_path / "data")
    try:
        lines = [process.stdout.readline().split() for process in started if process.stdout]
        assert len({(dsn, pid) for dsn, pid, _ in lines}) == 1
        assert sorted(owned for _, _, owned in lines) == ["False", "False", "True"]
    finally:
        for process in started:
            process.communicate()
        assert cluster._postmaster(home / "pg" / "data") is None, "the owner did not stop it at its end"
        cluster.remove_if_abandoned(home)
    assert not home.exists()


def test_a_kept_server_outlives_its_process_and_is_found_again(tmp_path: Path, binaries: Path | None) -> None:
    arguments = ["--data-dir", str(tmp_path / "data"), *(["--binaries", str(binaries)] if binaries else [])]
    program = (
        "import sys, pathlib; from dispatch_core.dev.postgres import start_local_server; "
        "start_local_server(pathlib.Path(sys.argv[1]), keep=True, "
        "binaries=pathlib.Path(sys.argv[2]) if sys.argv[2:] else None)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "data"), *([str(binaries)] if binaries else [])]
    subprocess.run(command, check=True, env=_clean_environment())
    server = start_local_server(tmp_path / "data", binaries=binaries)
    assert server.cluster is not None
    home = server.cluster.home
    try:
        assert server.pid is not None
        server.close()
        assert server.pid is not None, "a server that somebody asked to keep was stopped by a passer-by"
        stop = [sys.executable, "-m", "dispatch_core.dev.postgres", "--stop", *arguments]
        assert (
            "stopped"
            in subprocess.run(stop, check=True, capture_output=True, text=True, env=_clean_environment()).stdout
        )
        assert server.pid is None
    finally:
        server.cluster.remove()
    assert not home.exists()


async def test_a_throw_away_server_of_a_killed_process_is_removed_by_the_next_one(binaries: Path | None) -> None:
    program = """
import os, sys, pathlib
from dispatch_core.dev.postgres import start_local_server
server = start_local_server(ephemeral=True, binaries=pathlib.Path(sys.argv[1]) if sys.argv[1:] else None)
print(server.cluster.home, server.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", program, *([str(binaries)] if binaries else [])]
    killed = subprocess.run(command, check=False, capture_output=True, text=True, env=_clean_environment())
    home, pid = killed.stdout.split()
    assert killed.returncode == -signal.SIGKILL

    with start_local_server(ephemeral=True, binaries=binaries) as server:
        assert server.cluster is not None
        own = server.cluster.home
        # Another run of the tests may be a moment earlier at removing it.
        await eventually(lambda: not Path(home).exists() and not _runs(int(pid)))
    assert not own.exists()


def test_data_of_another_major_version_is_refused_by_name(local: DevServer) -> None:
    assert local.cluster is not None
    version = local.cluster.data / "PG_VERSION"
    original = version.read_text()
    version.write_text("9\n")
    try:
        with pytest.raises(ConfigurationError, match=r"made by PostgreSQL 9, but .* is \d\d: remove"):
            local.cluster.ensure_started(keep=False)
    finally:
        version.write_text(original)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as another account")
def test_roots_server_runs_as_another_account_and_opens_no_directory_of_root(local: DevServer) -> None:
    assert local.cluster is not None
    assert local.pid is not None
    assert Path(f"/proc/{local.pid}").stat().st_uid == local.cluster.account.uid != 0
    assert local.cluster.home.parent == account.SHARED_BASE
    assert stat.S_IMODE((local.cluster.home / "pg").stat().st_mode) == 0o700
    assert stat.S_IMODE((local.cluster.home / "state.json").stat().st_mode) == 0o600
    assert account.SHARED_BASE.stat().st_uid == 0
    assert not account.SHARED_BASE.stat().st_mode & 0o022


def test_where_root_can_have_no_other_account_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(account, "_find_account", lambda name: None)
    monkeypatch.setattr(account, "_make_account", lambda: None)
    with pytest.raises(ConfigurationError, match=r"useradd --system relay-postgres.*RELAY_DISPATCH_TEST_DSN"):
        account.server_account()


def test_a_shared_directory_that_somebody_else_made_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    planted.chmod(0o777)
    monkeypatch.setattr(account, "SHARED_BASE", planted)
    with pytest.raises(ConfigurationError, match="only you may write"):
        account._shared_base()


def test_a_server_given_by_dsn_is_joined_and_is_not_ours_to_stop(
    local: DevServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DSN_VARIABLE, local.admin_dsn)
    joined = start_server()
    assert (joined.origin, joined.is_ours, joined.admin_dsn) == ("dsn", False, local.admin_dsn)
    with pytest.raises(ConfigurationError, match="not ours"):
        joined.stop()
    joined.close()
    assert local.pid is not None


def test_a_dsn_without_superuser_rights_is_refused(local: DevServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DSN_VARIABLE, local.gateway_dsn("postgres"))
    with pytest.raises(ConfigurationError, match="superuser"):
        start_server()


def test_with_no_server_at_all_the_error_names_every_way_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DSN_VARIABLE, raising=False)
    monkeypatch.setattr(postgres, "_wheel", lambda: None)
    monkeypatch.setattr("dispatch_core.dev.container.docker_problem", lambda: "Docker does not answer")
    with pytest.raises(ConfigurationError) as caught:
        start_server()
    for way in ("relay-dispatch[postgres]", DSN_VARIABLE, "PG_BIN=", "testcontainers", "Docker does not answer"):
        assert way in str(caught.value)


def test_binaries_are_meant_from_the_directory_that_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=re.escape(f"no PostgreSQL server binaries in {tmp_path / 'bin'}.")):
        start_local_server(binaries=Path("bin"))


def test_the_suite_says_once_that_there_are_no_binaries_where_it_is_told_to_take_them_from(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", f"--postgres-binaries={tmp_path}", "tests/test_ids.py"]
    run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert run.stderr.strip() == f"ERROR: There are no PostgreSQL server binaries in {tmp_path}."


@pytest.mark.parametrize(
    ("target", "option"),
    [("test", "--postgres-binaries="), ("test-faults", "--postgres-binaries="), ("db", "--binaries ")],
)
def test_make_takes_another_postgresql_by_its_directory(target: str, option: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    named = {**os.environ, "MAKEFLAGS": "", "PG_BIN": "/usr/lib/postgresql/15/bin"}
    for env, expected in ((named, True), ({**named, "PG_BIN": ""}, False)):
        said = subprocess.check_output(["make", "--dry-run", target], cwd=ROOT, env=env, text=True, timeout=60)
        assert (f'{option}"/usr/lib/postgresql/15/bin"' in said, option in said) == (expected, expected)


async def test_a_container_serves_as_well() -> None:
    if (problem := docker_problem()) is not None:
        pytest.skip(problem)
    with start_container_server() as server:
        connection = await asyncpg.connect(server.gateway_dsn("postgres"))
        assert await connection.fetchval("show fsync") == "on"
        await connection.close()
        server.restart()
        await (await asyncpg.connect(server.admin_dsn)).close()


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("postgresql://postgres:x@127.0.0.1:5432/postgres", "postgresql://a%40b:p%2Fw@127.0.0.1:5432/my%20db"),
        ("postgresql:///postgres?host=/tmp&user=root", "postgresql://a%40b:p%2Fw@/my%20db?host=%2Ftmp"),
        ("postgres://h1:1,h2:2/x?sslmode=require", "postgres://a%40b:p%2Fw@h1:1,h2:2/my%20db?sslmode=require"),
    ],
)
def test_a_dsn_is_rewritten_for_another_login(dsn: str, expected: str) -> None:
    assert dsn_as(dsn, "a@b", "p/w", "my db") == expected


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return not Path("/proc/self").exists() or bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # a zombie's is empty
    except (ProcessLookupError, FileNotFoundError):
        return False


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != DSN_VARIABLE} | {
        "PYTHONPATH": str(Path(__file__).parents[1])
    }
