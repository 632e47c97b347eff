"""Set the history in a database against the migrations of this installation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import asyncpg

from dispatch_core.errors import MigrationDriftError, MigrationError, SchemaMismatchError
from dispatch_core.migrate.files import Migrations, Step

__all__ = ["Applied", "Comparison", "compare", "installed_rooms", "package_version", "read_rows"]


@dataclass(frozen=True, slots=True)
class Applied:
    """A row of relay.schema_history."""

    step: str
    kind: str
    sha256: str
    protocol: int | None
    compatible_from: int | None
    applied_at: datetime
    applied_by: str
    applied_with: str
    duration_ms: int


def read_rows(rows: Sequence[asyncpg.Record]) -> dict[str, Applied]:
    """Return the history by step, from the rows that `sql.HISTORY` gives."""
    return {row["step"]: Applied(**dict(row)) for row in rows}


@lru_cache(maxsize=1)
def package_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return version("relay-dispatch")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between a database and the migrations that are wanted in it."""

    pending: tuple[Step, ...]
    """To be applied, in this order: table steps that are missing, functions that are missing or differ."""
    drifted: tuple[Step, ...]
    """Table steps whose text is no longer the one that was applied."""
    unknown: tuple[str, ...]
    """Applied steps that this installation does not have."""
    late: tuple[Step, ...]
    """Table steps that are missing although one of the same room with a higher number was applied."""
    protocol: int | None
    """What the database has; None where no functions were applied yet."""
    compatible_from: int | None
    applied_with: str | None
    wanted_protocol: int
    missing_functions: bool
    """Whether the functions of a wanted room were never applied."""
    rooms: tuple[str, ...]
    """The rooms that are installed, wanted or not."""
    absent_rooms: tuple[str, ...]
    """Wanted rooms of which nothing was ever applied, where something else was."""

    @property
    def pending_tables(self) -> tuple[Step, ...]:
        """The pending steps that are tables."""
        return tuple(step for step in self.pending if step.kind == "table")

    @property
    def newer(self) -> bool:
        """Whether a newer version of Relay Dispatch has migrated this database."""
        return bool(self.unknown) or (self.protocol is not None and self.protocol > self.wanted_protocol)

    @property
    def database_text(self) -> str:
        """What the database has, for a message."""
        if self.protocol is None:
            return "the schema in the database is incomplete"
        return f"the schema in the database has protocol {self.protocol} (by relay-dispatch {self.applied_with})"

    @property
    def sdk_text(self) -> str:
        """What this installation has, for a message."""
        return f"this is relay-dispatch {package_version()} with protocol {self.wanted_protocol}"

    def refuse(self) -> None:
        """Raise where these migrations cannot be applied to that database.

        Raises: SchemaMismatchError, MigrationDriftError, MigrationError.
        """
        if self.newer:
            also = f", and steps unknown here: {', '.join(self.unknown)}" if self.unknown else ""
            raise SchemaMismatchError(
                f"{self.database_text}{also}; {self.sdk_text}: the database is newer, migrate it with that version"
            )
        if self.drifted:
            raise MigrationDriftError(
                "changed after they were applied: "
                + ", ".join(step.files[0].name for step in self.drifted)
                + "; restore their text, and make the change in a new file"
            )
        if self.late:
            raise MigrationError(
                "numbered below a step that was applied before: "
                + ", ".join(step.files[0].name for step in self.late)
                + "; migrations only go forward, give them a higher number"
            )


def installed_rooms(everything: Migrations, history: Mapping[str, Applied]) -> tuple[str, ...]:
    """Return the rooms of which something was applied."""
    return tuple(sorted({step.room for step in everything.steps if step.room is not None and step.name in history}))


def compare(wanted: Migrations, everything: Migrations, history: Mapping[str, Applied]) -> Comparison:
    """Compare; `wanted` is the part of `everything` that this database needs."""
    pending_tables = [step for step in wanted.tables if step.name not in history]
    functions_differ = any(
        step.name not in history or history[step.name].sha256 != step.sha256 for step in wanted.functions
    )
    # The functions of one room call those of another, and grants are set at the end: all of them or none.
    pending = (*pending_tables, *(wanted.functions if functions_differ else ()))
    known = {step.name for step in everything.steps}
    protocols = [row for row in history.values() if row.protocol is not None]
    rooms = installed_rooms(everything, history)
    latest = max(protocols, key=lambda row: (row.protocol or 0, row.applied_at), default=None)
    return Comparison(
        pending=pending,
        drifted=tuple(s for s in wanted.tables if s.name in history and history[s.name].sha256 != s.sha256),
        unknown=tuple(sorted(name for name in history if name not in known)),
        late=tuple(
            step
            for step in pending_tables
            if any(
                other.room == step.room and other.name > step.name and other.name in history for other in wanted.tables
            )
        ),
        protocol=latest.protocol if latest is not None else None,
        compatible_from=max((row.compatible_from or 0 for row in protocols), default=None),
        applied_with=latest.applied_with if latest is not None else None,
        wanted_protocol=wanted.protocol,
        missing_functions=any(step.name not in history for step in wanted.functions),
        rooms=rooms,
        absent_rooms=tuple(room for room in wanted.rooms if room not in rooms) if history else (),
    )
