"""Read the migrations directory: what this version of Relay Dispatch wants the schema to be.

``tables/NNNN_name.sql``
    Forward only. One file is one step: applied once, never changed afterwards.
``functions/NN_name.sql``
    The whole directory is one step, named ``functions``: when any text changed, all files are applied again, in name
    order and in one transaction.
``PROTOCOL``
    The number of the protocol that these files make, and the oldest number whose SDKs go on working on it.

A file opens with comments; among them may be directives: ``-- role: relay_owner`` (the role that the file runs as and
that owns what it creates), ``-- room: outbox`` (the part of the schema it belongs to; none = every installation needs
it) and ``-- no-transaction`` (one statement, which PostgreSQL refuses inside a transaction).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from dispatch_core.errors import MigrationError
from dispatch_core.migrate.sqltext import split_statements, words

__all__ = ["OWNER_ROLES", "Index", "Migrations", "SqlFile", "Step", "default_directory", "load"]

OWNER_ROLES = ("relay_owner", "relay_api", "relay_sweep")
"""Roles that own things in schema relay, and that a file may run as."""

_DIRECTIVE = re.compile(r"--\s*(role|room|no-transaction)\b\s*(?::\s*(\S*)\s*)?$")
_TABLE_FILE = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_FUNCTION_FILE = re.compile(r"\d{2}_[a-z0-9_]+\.sql")
_ROOM = re.compile(r"[a-z][a-z_]*")
_PROTOCOL_LINE = re.compile(r"(protocol|compatible-from):\s*(\d+)")
_RELEASED_LINE = re.compile(r"released:\s*(\S+)\s+([0-9a-f]{64})")
_CREATE_INDEX = re.compile(
    r'create (?:unique )?index concurrently (?:if not exists )?("(?:[^"]|"")+"|(?!if |on )\S+) '
    r'on (?:only )?"?relay"? \. ("(?:[^"]|"")+"|\S+)'
)
_REPEATABLE = re.compile(
    r'drop index concurrently if exists "?relay"? \. '
    r'|reindex (?:\( .*)?(?:index|table) concurrently "?relay"? \. '
    r"|vacuum|analyze"
)
# What a file may not say, because it would end the transaction that holds both its work and its history row.
_ENDS_TRANSACTION = frozenset(
    {"begin", "start", "commit", "end", "rollback", "abort", "prepare", "savepoint", "release"}
)


@dataclass(frozen=True, slots=True)
class Index:
    """An index in schema relay."""

    name: str
    table: str


@dataclass(frozen=True, slots=True)
class SqlFile:
    """One file of the migrations directory."""

    name: str
    sql: str
    sha256: str
    role: str | None
    room: str | None
    transactional: bool
    builds: Index | None = None
    """The index that a ``-- no-transaction`` file builds."""


@dataclass(frozen=True, slots=True)
class Step:
    """What is applied, and recorded, as one: a table file, or the functions of a room."""

    name: str
    kind: Literal["table", "functions"]
    sha256: str
    files: tuple[SqlFile, ...]
    room: str | None

    @property
    def transactional(self) -> bool:
        """Whether the step runs in a transaction, together with its history row."""
        return all(file.transactional for file in self.files)


@dataclass(frozen=True, slots=True)
class Migrations:
    """Everything that a migrations directory holds."""

    tables: tuple[Step, ...]
    functions: tuple[Step, ...]
    protocol: int
    compatible_from: int
    released: tuple[tuple[str, str], ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, in the order in which they are applied."""
        return self.tables + self.functions

    @property
    def rooms(self) -> tuple[str, ...]:
        """The rooms that can be installed alone."""
        return tuple(sorted({step.room for step in self.steps if step.room is not None}))

    def select(self, only: Sequence[str] | None) -> Migrations:
        """Return the steps that the rooms `only` need; None is all.

        Raises: MigrationError where a room does not exist.
        """
        if only is None:
            return self
        unknown = sorted(set(only) - set(self.rooms))
        if unknown:
            raise MigrationError(f"no such room: {', '.join(unknown)}; there are: {', '.join(self.rooms) or 'none'}")
        wanted: Collection[str | None] = {None, *only}
        return Migrations(
            tuple(step for step in self.tables if step.room in wanted),
            tuple(step for step in self.functions if step.room in wanted),
            self.protocol,
            self.compatible_from,
            self.released,
        )


def default_directory() -> Path:
    """Return the migrations of this installation: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for directory in (package / "migrations", package.parent / "migrations"):
        if (directory / "tables").is_dir():
            return directory
    raise MigrationError(f"the migrations are missing from this installation (looked in {package / 'migrations'})")


def load(directory: Path | None = None) -> Migrations:
    """Read a migrations directory; that of this installation is read once a process.

    Raises: MigrationError where a file breaks the rules.
    """
    return _load_default() if directory is None else _read(directory)


@lru_cache(maxsize=1)
def _load_default() -> Migrations:
    return _read(default_directory())


def _read(directory: Path) -> Migrations:
    protocol, compatible_from, released = _read_protocol(directory / "PROTOCOL")
    tables = tuple(
        Step(file.name.removesuffix(".sql"), "table", file.sha256, (file,), file.room)
        for file in _read_files(directory / "tables", _TABLE_FILE)
    )
    numbers = [step.name[:4] for step in tables]
    for number in numbers:
        if numbers.count(number) > 1:
            raise MigrationError(f"two table files have the number {number}")
    files = _read_files(directory / "functions", _FUNCTION_FILE)
    for file in files:
        if not file.transactional:
            raise MigrationError(f"{file.name}: a functions file cannot be -- no-transaction")
    functions = tuple(
        _functions_step(room, tuple(file for file in files if file.room == room), protocol, compatible_from)
        for room in sorted({file.room for file in files}, key=lambda room: room or "")
    )
    return Migrations(tables, functions, protocol, compatible_from, released)


def _functions_step(room: str | None, files: tuple[SqlFile, ...], protocol: int, compatible_from: int) -> Step:
    # The protocol is part of the digest: raising it re-applies the functions, and so records it.
    digest = hashlib.sha256(f"protocol {protocol} from {compatible_from}\n".encode())
    for file in files:
        digest.update(f"{file.name} {file.sha256}\n".encode())
    return Step("functions" if room is None else f"functions:{room}", "functions", digest.hexdigest(), files, room)


def _read_files(directory: Path, pattern: re.Pattern[str]) -> tuple[SqlFile, ...]:
    if not directory.is_dir():
        return ()
    paths = sorted(directory.glob("*.sql"), key=lambda path: path.name)
    for path in paths:
        if pattern.fullmatch(path.name) is None:
            raise MigrationError(f"{path.name}: the name must match {pattern.pattern}")
    return tuple(_read_file(path) for path in paths)


def _read_file(path: Path) -> SqlFile:
    # A checkout on Windows may have changed the line ends; that is no change of the migration.
    raw = path.read_bytes().replace(b"\r\n", b"\n")
    try:
        sql = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MigrationError(f"{path.name}: not UTF-8 ({error.reason})") from None
    directives = _directives(path.name, sql)
    role, room = directives.get("role"), directives.get("room")
    if role is not None and role not in OWNER_ROLES:
        raise MigrationError(f"{path.name}: -- role: must be one of {', '.join(OWNER_ROLES)}")
    if room is not None and _ROOM.fullmatch(room) is None:
        raise MigrationError(f"{path.name}: -- room: must be a lower case word")
    transactional = "no-transaction" not in directives
    index = _check_statements(path.name, sql, transactional)
    return SqlFile(path.name, sql, hashlib.sha256(raw).hexdigest(), role, room, transactional, index)


def _directives(name: str, sql: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in sql.split("\n"):
        text = line.strip()
        if text and not text.startswith("--"):
            break
        match = _DIRECTIVE.fullmatch(text)
        if match is not None:
            key, value = match.group(1), match.group(2)
            if key in found or (value is None) != (key == "no-transaction") or value == "":
                raise MigrationError(f"{name}: the directive -- {key} is given twice, or wrongly")
            found[key] = value or ""
    return found


def _check_statements(name: str, sql: str, transactional: bool) -> Index | None:
    """Check what a file says; return the index that it builds outside a transaction."""
    try:
        statements = split_statements(sql)
    except ValueError as error:
        raise MigrationError(f"{name}, {error}") from None
    for statement in statements:
        first = words(statement, 1)
        if first and first[0] in _ENDS_TRANSACTION:
            raise MigrationError(f"{name}: {first[0].upper()} would break the transaction of the step")
    if transactional:
        return None
    if len(statements) != 1:
        # Several statements in one message share an implicit transaction, and half of them may have happened.
        raise MigrationError(f"{name}: a -- no-transaction file holds exactly one statement, not {len(statements)}")
    return _check_repeatable(name, " ".join(words(statements[0], 24)))


def _check_repeatable(name: str, statement: str) -> Index | None:
    # Between such a statement and its history row a runner can be killed, and then the statement runs again.
    if match := _CREATE_INDEX.match(statement):
        return Index(_unquoted(match.group(1)), _unquoted(match.group(2)))
    if _REPEATABLE.match(statement) is None:
        raise MigrationError(
            f"{name}: outside a transaction only CREATE INDEX CONCURRENTLY name ON relay.table, DROP INDEX "
            "CONCURRENTLY IF EXISTS relay.name, REINDEX … CONCURRENTLY, VACUUM and ANALYZE can be repeated after a kill"
        )
    return None


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _read_protocol(path: Path) -> tuple[int, int, tuple[tuple[str, str], ...]]:
    values = {"protocol": 1, "compatible-from": 1}
    released: list[tuple[str, str]] = []
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            text = line.partition("#")[0].strip()
            if match := _PROTOCOL_LINE.fullmatch(text):
                values[match.group(1)] = int(match.group(2))
            elif match := _RELEASED_LINE.fullmatch(text):
                released.append((match.group(1), match.group(2)))
            elif text:
                raise MigrationError(f"PROTOCOL: cannot read the line {text!r}")
    if not 1 <= values["compatible-from"] <= values["protocol"]:
        raise MigrationError("PROTOCOL: compatible-from must lie between 1 and protocol")
    return values["protocol"], values["compatible-from"], tuple(released)
