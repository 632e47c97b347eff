"""One PostgreSQL data directory: made, started, stopped and started again by its own binaries.

A *home* directory holds what belongs to one server:

    home/state.json   port, superuser's password, whether it is to be kept       ours, 0600
    home/lock         held while somebody initialises, starts or stops it        ours
    home/owner        held as long as the process lives that will stop it        ours
    home/pg/          data directory, log and Unix socket                        the server account's, 0700

Both locks are the kernel's (flock): they end with their process, however it ends. So a server whose owner was killed is
recognised by its free owner lock, and the next process adopts it or, for a throw-away server, removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dispatch_core.dev.account import Account
from dispatch_core.errors import ConfigurationError

__all__ = ["Cluster", "free_port", "major_version", "remove_if_abandoned"]

START_TIMEOUT_SECONDS = 60
# Below the range from which systems take ports for outgoing connections: a stopped server's port stays free for it.
PORTS = range(20_000, 30_000)
# A Unix socket's path is limited to some 107 bytes, of which PostgreSQL needs up to 18 for its name.
MAX_SOCKET_DIRECTORY = 85


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on at this moment."""
    for port in random.sample(PORTS, 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ConfigurationError("No free TCP port was found on 127.0.0.1.")


class Cluster:
    """A local server. Not thread-safe; several processes may hold the same home."""

    def __init__(self, home: Path, binaries: Path, account: Account, settings: Mapping[str, str]) -> None:
        self.home = home
        self.binaries = binaries
        self.account = account
        self.settings = dict(settings)
        self._files = home / "pg"
        self.data = self._files / "data"
        self.log = self._files / "server.log"
        self.major = major_version(binaries, account)
        self._owner: IO[str] | None = None
        home.mkdir(mode=0o755, parents=True, exist_ok=True)

    # --- what is remembered ---------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """Return what state.json holds; nothing when the server was never made."""
        try:
            found: dict[str, Any] = json.loads((self.home / "state.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def _remember(self, **changes: object) -> None:
        text = json.dumps(self.state | changes, indent=2)
        handle, name = tempfile.mkstemp(dir=self.home, prefix=".state-")  # mode 0600: it holds a password
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(name).rename(self.home / "state.json")

    @property
    def port(self) -> int:
        """Return the TCP port, which stays the same from start to start."""
        return int(self.state["port"])

    @property
    def password(self) -> str:
        """Return the superuser's password."""
        return str(self.state["password"])

    # --- who is responsible ---------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.home / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @property
    def owned(self) -> bool:
        """Whether it is for this process to stop the server."""
        return self._owner is not None

    def own(self) -> bool:
        """Become the process that will stop this server; false when another one is."""
        if self._owner is None:
            self._owner = _lock_at_once(self.home / "owner")
        return self._owner is not None

    def disown(self) -> None:
        """Leave the server to whoever comes."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    # --- life -----------------------------------------------------------------------------------

    def ensure_started(self, *, keep: bool) -> None:
        """Make and start the server unless it runs, and own it unless it is to be kept or somebody else owns it.

        Idempotent: by the data directory, also between processes. A server that runs keeps the settings it runs with.
        """
        with self._locked():
            if not self.data.is_dir():
                self._initialise()
            self._check_version()
            running = self.pid() is not None
            if not running:
                self._start(another_port=True)
            kept = keep or (running and bool(self.state.get("keep")))
            self._remember(keep=kept)
            if kept:
                self.disown()
            else:
                self.own()

    def ensure_follows(self, primary: Cluster, *, port: int | None = None) -> None:
        """Make this a streaming standby of another server, whatever it was, and start it; `port`: of a way to that one.

        It has the other's passwords, and a port of its own, the same one each time; this process owns it. Its
        application_name there is the last part of its home.
        """
        with self._locked():
            if self.pid() is not None:
                self._pg_ctl("stop", "-m", "immediate")
            shutil.rmtree(self.data, ignore_errors=True)
            self._files.mkdir(mode=0o700, exist_ok=True)
            self.account.own(self._files)
            source = (
                f"host=127.0.0.1 port={port or primary.port} user=postgres password={primary.password} "
                f"application_name={self.home.name}"
            )
            # Begins at once, not at the primary's next checkpoint; -R leaves a standby.signal and the source behind.
            copies = ["--checkpoint=fast", "--no-sync", "--wal-method=stream", "--write-recovery-conf"]
            self._run("pg_basebackup", f"--pgdata={self.data}", f"--dbname={source}", *copies)
            self._remember(password=primary.password, port=self.state.get("port") or free_port(), keep=False)
            self._start(another_port=False)
            self.own()

    def promote(self) -> None:
        """End a standby's recovery, and wait until it takes writes."""
        self._pg_ctl("promote")

    def start(self) -> None:
        """Start a stopped server on the port it had."""
        with self._locked():
            if self.pid() is None:
                self._start(another_port=False)

    def stop(self, mode: str = "fast") -> None:
        """Stop the server and wait for its end; `immediate` is a crash, to be recovered from at the next start."""
        with self._locked():
            if self.pid() is not None:
                self._pg_ctl("stop", "-m", mode)

    def remove(self) -> None:
        """Stop the server and delete its data."""
        with self._locked():
            _crash_and_delete(self.home)
        self.disown()

    def pid(self) -> int | None:
        """Return the postmaster's process id; None when no server runs on this data directory."""
        return _postmaster(self.data)

    def _initialise(self) -> None:
        self._files.mkdir(mode=0o700, exist_ok=True)
        self.account.own(self._files)
        password = secrets.token_urlsafe(24)
        staging = self._files / "data.new"  # renamed when complete: an interrupted initdb leaves nothing half made
        shutil.rmtree(staging, ignore_errors=True)
        password_file = self._files / "password"
        password_file.unlink(missing_ok=True)
        password_file.touch(mode=0o600)
        password_file.write_text(password + "\n")
        self.account.own(password_file)
        if self.major >= 17:
            # C.UTF-8 out of PostgreSQL itself: the same on every system, and some C libraries have no such locale.
            locale = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"]
        else:
            locale = ["--locale=C.UTF-8"]
        arguments = [
            f"--pgdata={staging}",
            "--username=postgres",
            f"--pwfile={password_file}",
            "--encoding=UTF8",
            *locale,
        ]
        try:
            self._run("initdb", *arguments, "--auth-local=scram-sha-256", "--auth-host=scram-sha-256", "--no-sync")
        finally:
            password_file.unlink(missing_ok=True)
        staging.rename(self.data)
        self._remember(password=password, port=free_port(), keep=False)

    def _check_version(self) -> None:
        made_by = (self.data / "PG_VERSION").read_text().strip()
        if made_by != str(self.major):
            raise ConfigurationError(
                f"{self.data} was made by PostgreSQL {made_by}, but {self.binaries} is {self.major}: "
                f"remove {self.home}, or name another data directory."
            )

    def _start(self, *, another_port: bool) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            self._remove_stale_lock_files()
            before = self.log.stat().st_size if self.log.exists() else 0
            try:
                self._pg_ctl("start", "-l", str(self.log), "-o", self._options())
            except ConfigurationError as error:
                with self.log.open(errors="replace") as file:
                    file.seek(before)
                    said = file.read()
                if time.monotonic() > deadline:
                    raise ConfigurationError(f"{error}\n{said[-2000:]}") from None
                if "Address already in use" in said and another_port:
                    self._remember(port=free_port())
                elif "shared memory block" not in said and "Address already in use" not in said:
                    raise ConfigurationError(f"{error}\n{said[-2000:]}") from None
                # Else a killed postmaster's processes are still ending, or a client's socket has our port for a moment.
                time.sleep(0.1)
            else:
                return

    def _options(self) -> str:
        socket_directory = self._files if len(os.fsencode(self._files)) <= MAX_SOCKET_DIRECTORY else None
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(socket_directory or ""),
            "max_connections": "200",
            "log_line_prefix": "%m [%p] %q%u@%d %a ",
        }
        if self.major >= 16:
            # Passwords here are random or public; thousands of rounds would only slow every connect of every test.
            settings["scram_iterations"] = "1"
        return " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in (settings | self.settings).items())

    def _remove_stale_lock_files(self) -> None:
        # PostgreSQL itself sees that their process is gone, unless its number belongs to another one by now, or nobody
        # has waited for its end. Processes that outlive their postmaster are found by the shared memory, not by these.
        if self.pid() is None:
            for file in (self.data / "postmaster.pid", *self._files.glob(".s.PGSQL.*.lock")):
                file.unlink(missing_ok=True)

    # --- programs -------------------------------------------------------------------------------

    def _pg_ctl(self, verb: str, *arguments: str) -> None:
        self._run("pg_ctl", verb, "-D", str(self.data), "-w", "-s", "-t", str(START_TIMEOUT_SECONDS), *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        _run(self.binaries / program, *arguments, account=self.account)


def major_version(binaries: Path, account: Account) -> int:
    """Ask the binaries for their major version."""
    said = _run(binaries / "postgres", "--version", account=account)
    found = re.search(r"(\d+)", said)
    if found is None:
        raise ConfigurationError(f"{binaries / 'postgres'} does not say its version: {said!r}.")
    return int(found[1])


def remove_if_abandoned(home: Path) -> None:
    """Delete a throw-away server whose owner has died; leave one that has an owner, or is being made."""
    try:
        if not (home / "owner").exists() and time.time() - home.stat().st_mtime < 60:
            return
        owner = _lock_at_once(home / "owner")
    except FileNotFoundError:
        return  # somebody else has just removed it
    if owner is not None:
        with owner:
            _crash_and_delete(home)


def _crash_and_delete(home: Path) -> None:
    data = home / "pg" / "data"
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    if (pid := _postmaster(data)) is not None:
        os.kill(pid, signal.SIGQUIT)
    while _postmaster(data) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(home, ignore_errors=True)


def _postmaster(data: Path) -> int | None:
    try:
        pid = int((data / "postmaster.pid").read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return None
    # The number may have gone to a stranger meanwhile, or be that of a dead postmaster that nobody has waited for.
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        if Path("/proc/self").exists():
            return None
        command = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], check=False, capture_output=True).stdout
    return pid if os.fsencode(data) in command else None


def _lock_at_once(path: Path) -> IO[str] | None:
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _run(program: Path, *arguments: str, account: Account) -> str:
    # A file, not a pipe: the server inherits it, and a pipe would then never end.
    with tempfile.TemporaryFile("w+") as output:
        try:
            ended = subprocess.run(
                [str(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                cwd="/",
                # Nothing of ours: neither PG* variables, which these programs obey, nor anybody's secrets.
                env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"},
                **account.popen_arguments(),
            )
        except OSError as error:
            raise ConfigurationError(f"{program} cannot be run: {error}.") from None
        output.seek(0)
        said = output.read().strip()
    if ended.returncode != 0:
        raise ConfigurationError(f"{program.name} {arguments[0]} failed ({ended.returncode}): {said[-2000:]}")
    return said
