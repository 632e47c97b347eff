"""Ask whether this version may use the schema that it finds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import asyncpg

from dispatch_core.database import DRIVER_ERRORS, Connection
from dispatch_core.errors import SchemaMismatchError, TenancyDeniedError
from dispatch_core.migrate import sql
from dispatch_core.migrate.compare import Comparison, compare, read_rows
from dispatch_core.migrate.connection import translated
from dispatch_core.migrate.files import load

__all__ = ["check_schema", "mismatch"]

_MEND = "run: relay-dispatch db migrate"
_log = logging.getLogger("relay_dispatch.migrate")


async def check_schema(conn: Connection, *, rooms: Sequence[str] | None = None, directory: Path | None = None) -> None:
    """Raise unless this version may work on the rooms of the schema that it needs; `rooms` None means all there are.

    One SELECT. A newer schema is accepted as long as it does not say otherwise: that is how SDKs go on working while
    the schema is migrated before them. An older one is refused: functions that this version calls may be missing.

    Transaction: none needed; a caller's is aborted where the schema is missing.

    Raises: SchemaMismatchError, TenancyDeniedError where the login is a member of no group role.
    """
    everything = load(directory)
    try:
        rows: list[asyncpg.Record] = await conn.fetch(sql.HISTORY)
    except asyncpg.InsufficientPrivilegeError:
        raise TenancyDeniedError(
            "this login may not use schema relay: run relay-dispatch db grant LOGIN --as gateway|worker|operator …"
        ) from None
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        raise SchemaMismatchError(f"schema relay is not in this database; {_mend(rooms or ())}") from None
    except DRIVER_ERRORS as error:
        with translated("checking the schema"):
            raise error
    comparison = compare(everything.select(rooms), everything, read_rows(rows))
    problem = mismatch(comparison)
    if problem is not None:
        raise SchemaMismatchError(problem)
    if comparison.pending and not comparison.newer:
        # The same protocol in other words (a comment, a mend): it keeps its promises, so nobody is kept from starting.
        mend = _mend(comparison.rooms)
        _log.warning("the functions in schema relay differ from those of this version; %s", mend)


def _mend(rooms: Sequence[str]) -> str:
    """Say what installs or upgrades these rooms, and not the dispatch room where events alone are kept."""
    # A room that may stand alone, and is all that is asked for.
    return _MEND + (f" --only {rooms[0]}" if len(rooms) == 1 and rooms[0] in ("outbox", "durable") else "")


def mismatch(comparison: Comparison) -> str | None:
    """Say why this version must not use such a schema; None where it may."""
    database, sdk = comparison.database_text, comparison.sdk_text
    if (comparison.compatible_from or 0) > comparison.wanted_protocol:
        return f"{database} and needs SDKs of protocol {comparison.compatible_from} or newer; {sdk}: upgrade it"
    if comparison.absent_rooms:
        absent = ", ".join(comparison.absent_rooms)
        only = " ".join(f"--only {room}" for room in comparison.absent_rooms)
        there = f" (there is: {', '.join(comparison.rooms)})" if comparison.rooms else ""
        return f"the room {absent} of schema relay is not in this database{there}; {_MEND} {only}"
    if comparison.drifted:
        names = ", ".join(step.name for step in comparison.drifted)
        return f"{database}, whose step {names} is not the one of this version; {sdk}: run relay-dispatch db verify"
    if comparison.pending_tables:
        names = ", ".join(step.name for step in comparison.pending_tables)
        return f"{database} and lacks {names}; {sdk}: the database is older, {_mend(comparison.rooms)}"
    if comparison.newer:
        return None
    if comparison.missing_functions or (comparison.protocol or 0) < comparison.wanted_protocol:
        return f"{database}; {sdk}: the database is older, {_mend(comparison.rooms)}"
    return None
