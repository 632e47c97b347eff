"""The real PgBouncer before a server, in transaction mode; a test that needs it is skipped where it is not installed.

async with pgbouncer(database.server, pool_size=2) as bouncer:
    connection = await asyncpg.connect(bouncer.dsn(database.gateway_dsn), statement_cache_size=0)
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import anyio
import anyio.abc
import asyncpg
import pytest

from dispatch_core.dev.account import server_account
from dispatch_core.dev.cluster import free_port
from dispatch_core.dev.postgres import DevServer
from tests.support.eventually import eventually


def program() -> str:
    """Return where PgBouncer is; skip the test, with the reason, where it is not."""
    path = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    if path is None:
        pytest.skip("no PgBouncer: install the system's package `pgbouncer`")
    return path


def version() -> tuple[int, int]:
    """Return its version; skips as `program` does."""
    said = subprocess.run([program(), "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


class PgBouncer:
    """One that runs."""

    def __init__(self, home: Path, port: int, dsn: str) -> None:
        self.port = port
        self._home = home
        self._log = home / "log"
        self._dsn = dsn
        self._process: anyio.abc.Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = await anyio.open_process(
            [program(), "-q", str(self._home / "pgbouncer.ini")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            **server_account().popen_arguments(),
        )
        await eventually(lambda: _answers(self.dsn(self._dsn)), 10, 0.02, message="PgBouncer answers:")

    async def kill(self) -> None:
        """End it as a crash does; its clients' sockets are closed."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Tell it something: SIGHUP reload, SIGUSR1 pause, SIGUSR2 resume."""
        assert self._process is not None
        self._process.send_signal(number)

    async def restart(self) -> None:
        """Kill it, and start it again on its port."""
        await self.kill()
        await self.start()

    def dsn(self, dsn: str) -> str:
        """Return the DSN that goes through it."""
        parts = urlsplit(dsn)
        login = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{self.port}"))

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")


@asynccontextmanager
async def pgbouncer(
    server: DevServer, dsn: str, *dsns: str, pool_size: int = 2, forced_dsn: str | None = None, **settings: Any
) -> AsyncIterator[PgBouncer]:
    """Run one before `server` for the logins of the DSNs: so many server sessions for each login and database.

    `forced_dsn`: the login of this one is what PostgreSQL sees of all of them, which it need not know.
    """
    program()
    account, port = server_account(), free_port()
    home = Path(tempfile.mkdtemp(prefix="relay-dispatch-pgbouncer-"))
    try:
        target = urlsplit(server.admin_dsn)
        users = home / "users.txt"
        logins = [
            (unquote(urlsplit(each).username or ""), unquote(urlsplit(each).password or "")) for each in (dsn, *dsns)
        ]
        users.write_text("".join(f'"{user}" "{password}"\n' for user, password in logins))
        values: dict[str, Any] = {
            "listen_addr": "127.0.0.1",
            "listen_port": port,
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": users,
            "logfile": home / "log",
            "pool_mode": "transaction",
            "default_pool_size": pool_size,
            "max_client_conn": 200,
            "server_login_retry": 1,
            **settings,
        }
        forced = (
            ""
            if forced_dsn is None
            else f" user={urlsplit(forced_dsn).username} password={urlsplit(forced_dsn).password}"
        )
        lines = ["[databases]", f"* = host={target.hostname} port={target.port}{forced}", "[pgbouncer]"]
        (home / "pgbouncer.ini").write_text("\n".join([*lines, *(f"{k} = {v}" for k, v in values.items()), ""]))
        for each in (home, users, home / "pgbouncer.ini"):
            account.own(each)
        bouncer = PgBouncer(home, port, dsn)
        try:
            await bouncer.start()
            yield bouncer
        finally:
            await bouncer.kill()
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _answers(dsn: str) -> bool:
    try:
        connection = await asyncpg.connect(dsn, statement_cache_size=0)
    except OSError:
        return False
    await connection.close()
    return True
