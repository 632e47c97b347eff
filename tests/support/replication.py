"""A primary and its streaming standby, out of the system's binaries, to be failed over.

    with Pair.start(binaries) as pair:
        name = pair.create_migrated()
        pair.replicate(synchronous=True)
        pair.kill_primary()                 # or pair.primary.stop("immediate")
        pair.promote()
        pair.demote_old()                   # the old primary comes back, read only
        pair.switch_back()                  # and is the primary again, in good order

A DSN of `pair.dsn(...)` names both servers. They keep their ports whatever becomes of them. Data lies in memory: what
is killed here are processes, and never the machine.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from dispatch_core.dev.account import server_account
from dispatch_core.dev.cluster import Cluster
from dispatch_core.dev.logins import GATEWAY_LOGIN, OPERATOR_LOGIN, WORKER_LOGIN, dsn_as, run_blocking
from dispatch_core.dev.postgres import DevServer, start_local_server
from tests.support.databases import make_template
from tests.support.eventually import eventually

_NEEDED = ("initdb", "pg_ctl", "postgres", "pg_basebackup")

SETTINGS = {
    "wal_level": "replica",
    "hot_standby": "on",
    "max_wal_senders": "4",
    "wal_keep_size": "256MB",
    # How soon a standby whose connection is silent is given up, and how soon it connects anew.
    "wal_sender_timeout": "60s",
    "wal_receiver_timeout": "60s",
    "wal_retrieve_retry_interval": "200ms",
    "max_wal_size": "256MB",
    # In files of the data directory, which go with it: the system's would stay for ever after a kill.
    "dynamic_shared_memory_type": "mmap",
}


def system_binaries() -> Path | None:
    """Return the bin directory of the newest PostgreSQL server of this system that has what a standby needs."""
    found = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdecimal()]
    found.sort(key=lambda path: int(path.parent.name))
    on_path = shutil.which("initdb")
    if on_path is not None:
        found.insert(0, Path(on_path).resolve().parent)
    complete = [path for path in found if all((path / name).is_file() for name in _NEEDED)]
    return complete[-1] if complete else None


def required_binaries(named: Path | None) -> Path:
    """Return the binaries to run a pair with; skip the test, with the reason, where there are none."""
    binaries = named or system_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server binaries (initdb, pg_basebackup): install the system's package `postgresql`")
    return binaries


class Pair:
    """Two servers, of which one follows the other."""

    def __init__(self, primary: DevServer, standby: Cluster) -> None:
        self.primary = primary
        self.standby = standby
        assert primary.cluster is not None
        self.first: Cluster = primary.cluster
        self.ports: tuple[int, ...] = ()
        """What a DSN names, where that is not the servers' own ports but, say, those of proxies."""

    @classmethod
    @contextmanager
    def start(cls, binaries: Path) -> Iterator[Pair]:
        """Start the primary, and make room for the standby; both are gone after the block."""
        with start_local_server(binaries=binaries, settings=SETTINGS, ephemeral=True, in_memory=True) as primary:
            assert primary.cluster is not None
            home = primary.cluster.home.with_name(primary.cluster.home.name + "-b")
            standby = Cluster(home, binaries, server_account(), SETTINGS)
            standby.own()
            try:
                yield cls(primary, standby)
            finally:
                standby.remove()

    def create_migrated(self) -> str:
        """Make a migrated database, all granted to the plain logins; return its name."""
        name = run_blocking(make_template(self.primary))
        run_blocking(self._run(self.admin_dsn("postgres"), f'alter database "{name}" allow_connections true'))
        return name

    def replicate(self, *, synchronous: bool, through: int | None = None) -> None:
        """Have the standby follow the primary, by the port of a proxy if given, and wait until it does."""
        self.standby.ensure_follows(self.first, port=through)
        if synchronous:
            self.require_standby()
        else:
            run_blocking(self._until_following("async", self.admin_dsn("postgres")))

    @staticmethod
    async def _until_following(how: str, dsn: str) -> None:
        connection = await asyncpg.connect(dsn)
        try:

            async def follows() -> bool:
                states = await connection.fetch("select state, sync_state from pg_stat_replication")
                return [tuple(row) for row in states] == [("streaming", how)]

            await eventually(follows, 30, 0.05, message="the standby streams:")
        finally:
            await connection.close()

    @staticmethod
    async def _run(dsn: str, sql: str) -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()

    # --- DSNs ---

    def admin_dsn(self, database: str, *, of_standby: bool = False) -> str:
        """Return the superuser's DSN of one of the two servers."""
        cluster = self.standby if of_standby else self.first
        return dsn_as(f"postgresql://127.0.0.1:{cluster.port}", "postgres", self.first.password, database)

    def dsn(self, login: str, database: str, *, target: str | None = "read-write") -> str:
        """Return a plain login's DSN that names both servers, the first primary first."""
        parts = urlsplit(dsn_as("postgresql://127.0.0.1:1", login, "relay", database))
        credentials = parts.netloc.rpartition("@")[0]
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports or (self.first.port, self.standby.port))
        query = "" if target is None else f"target_session_attrs={target}"
        return urlunsplit(parts._replace(netloc=f"{credentials}@{hosts}", query=query))

    def gateway_dsn(self, database: str, **options: Any) -> str:
        return self.dsn(GATEWAY_LOGIN, database, **options)

    def worker_dsn(self, database: str, **options: Any) -> str:
        return self.dsn(WORKER_LOGIN, database, **options)

    def operator_dsn(self, database: str, **options: Any) -> str:
        return self.dsn(OPERATOR_LOGIN, database, **options)

    # --- faults ---

    def kill_primary(self) -> None:
        """Kill every process of the first primary, at once; its clients see their sockets end."""
        postmaster = self.first.pid()
        assert postmaster is not None
        *_, segment = (self.first.data / "postmaster.pid").read_text().splitlines()[6].split()
        # Stopped first, or it would notice its children's death and log and start others.
        os.kill(postmaster, signal.SIGSTOP)
        for pid in _children(postmaster):
            os.kill(pid, signal.SIGKILL)
        os.kill(postmaster, signal.SIGKILL)
        until = time.monotonic() + 10
        while self.first.pid() is not None:
            assert time.monotonic() < until
            time.sleep(0.01)
        # By this one (PostgreSQL manual, 18.4.1) it knows that no other server has its data. Nobody frees it: its data
        # is never started again.
        subprocess.run(["ipcrm", "-m", segment], check=False, capture_output=True)

    def promote(self) -> float:
        """Make the standby a primary; return the moment of it, on the monotonic clock."""
        self.standby.promote()
        return time.monotonic()

    def demote_old(self, *, synchronous: bool = False) -> None:
        """Bring the first primary back as a standby of the second: reachable, and read only."""
        self.first.ensure_follows(self.standby)
        if synchronous:
            self.require_standby(of_standby=True)

    def require_standby(self, *, of_standby: bool = False) -> None:
        """Have one of the two wait for the other with each commit, and wait until it does."""
        dsn = self.admin_dsn("postgres", of_standby=of_standby)
        run_blocking(self._run(dsn, "alter system set synchronous_standby_names = '*'"))
        run_blocking(self._run(dsn, "select pg_reload_conf()"))
        run_blocking(self._until_following("sync", dsn))

    def switch_back(self) -> float:
        """Stop the second server in good order and make the first the primary again; return the moment of it.

        Both must be in step: the first follows the second.
        """
        self.standby.stop("fast")
        self.first.promote()
        return time.monotonic()


async def replicated(admin: asyncpg.Connection[Any]) -> None:
    """Wait until the standby has replayed all that there is."""
    await eventually(
        lambda: admin.fetchval("select bool_and(replay_lsn >= pg_current_wal_lsn()) from pg_stat_replication"),
        message="the standby has everything:",
    )


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                match = re.search(r"\) \S (\d+) ", (entry / "stat").read_text())
            except OSError:
                continue
            if match is not None and int(match[1]) == parent:
                found.append(int(entry.name))
    return found
