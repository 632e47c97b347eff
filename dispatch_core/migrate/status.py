"""Tell where a database stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from dispatch_core.migrate.check import mismatch
from dispatch_core.migrate.compare import compare, installed_rooms, package_version
from dispatch_core.migrate.connection import connect
from dispatch_core.migrate.files import load
from dispatch_core.migrate.roles import read_state
from dispatch_core.migrate.runner import read_history

__all__ = ["SchemaStatus", "StepStatus", "status"]


@dataclass(frozen=True, slots=True)
class StepStatus:
    """One step, as this version and the database know it."""

    step: str
    kind: str
    state: Literal["applied", "pending", "absent", "changed", "drifted", "unknown"]
    """absent: of a room that is not installed. changed: functions that differ and will be applied again. drifted: a
    table step that must not differ. unknown: a newer version applied it."""
    applied_at: datetime | None = None
    applied_by: str | None = None
    applied_with: str | None = None
    duration_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SchemaStatus:
    """The schema of one database beside that of this version."""

    database: str
    server_version: str
    state: Literal["missing", "current", "pending", "older", "newer", "drifted", "incompatible"]
    """pending: usable, and `migrate` has something to do. older, drifted, incompatible, missing: the SDKs refuse it."""
    usable: bool
    message: str
    protocol: int | None
    compatible_from: int | None
    sdk_version: str
    sdk_protocol: int
    missing_roles: tuple[str, ...]
    rooms: tuple[str, ...]
    """The rooms that are installed."""
    absent_rooms: tuple[str, ...]
    """Those that are not; nothing is said against that, unless they were asked for."""
    steps: tuple[StepStatus, ...]


async def status(dsn: str, *, only: Sequence[str] | None = None, directory: Path | None = None) -> SchemaStatus:
    """Compare the schema with this version; changes nothing.

    `only` names the rooms that must be there; None: whichever are installed, or all where none is.

    Raises: DatabaseUnavailableError, DatabaseError, MigrationRightsError.
    """
    everything = load(directory)
    async with connect(dsn, "relay-dispatch status") as conn:
        server = await read_state(conn)
        history = await read_history(conn, server)
    rooms = installed_rooms(everything, history)
    wanted = everything.select(only if only is not None else rooms or None)
    comparison = compare(wanted, everything, history)
    problem = mismatch(comparison)
    state: Literal["missing", "current", "pending", "older", "newer", "drifted", "incompatible"]
    if not server.has_history:
        state, problem = "missing", "schema relay is not in this database; run: relay-dispatch db migrate"
    elif (comparison.compatible_from or 0) > comparison.wanted_protocol:
        state = "incompatible"
    elif comparison.drifted:
        state = "drifted"
    elif problem is not None:
        state = "older"
    elif comparison.newer:
        state = "newer"
    else:
        state = "pending" if comparison.pending else "current"
    absent_rooms = tuple(room for room in everything.rooms if room not in rooms)
    drifted = {step.name for step in comparison.drifted}
    steps: list[StepStatus] = []
    for step in (everything if only is None else wanted).steps:
        row = history.get(step.name)
        if row is None:
            absent = step.room in comparison.absent_rooms or step not in wanted.steps
            steps.append(StepStatus(step.name, step.kind, "absent" if absent else "pending"))
            continue
        differs = row.sha256 != step.sha256
        word: Literal["applied", "changed", "drifted"] = "applied"
        if differs:
            word = "drifted" if step.name in drifted else "changed"
        steps.append(
            StepStatus(step.name, step.kind, word, row.applied_at, row.applied_by, row.applied_with, row.duration_ms)
        )
    for name in comparison.unknown:
        row = history[name]
        steps.append(
            StepStatus(name, row.kind, "unknown", row.applied_at, row.applied_by, row.applied_with, row.duration_ms)
        )
    return SchemaStatus(
        database=server.database,
        server_version=server.server_version_text,
        state=state,
        usable=problem is None,
        message=problem or _usable(state, comparison.database_text, comparison.sdk_text) + _rooms(rooms, absent_rooms),
        protocol=comparison.protocol,
        compatible_from=comparison.compatible_from,
        sdk_version=package_version(),
        sdk_protocol=everything.protocol,
        missing_roles=tuple(role.name for role in server.roles.values() if not role.present),
        rooms=rooms,
        absent_rooms=absent_rooms,
        steps=tuple(steps),
    )


def _usable(state: str, database: str, sdk: str) -> str:
    if state == "newer":
        return f"{database}, newer than this version and compatible with it; {sdk}"
    if state == "pending":
        return f"{database}; {sdk}; db migrate has something to do"
    return f"{database}, as this version wants it"


def _rooms(rooms: Sequence[str], absent: Sequence[str]) -> str:
    if not rooms or not absent:
        return ""
    return f"; rooms: {', '.join(rooms)} (not installed: {', '.join(absent)})"
