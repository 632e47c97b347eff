"""Apply the migrations: one run at a time, one transaction a step, nothing at all where nothing is to do.

A run reads the history without any lock first. Only where something is missing does it take the migration lock, read
again, create roles and schema, and then apply one step after the other. A table step and its history row commit
together. All functions are one step: readers see the old ones or the new ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio

from dispatch_core.backoff import full_jitter
from dispatch_core.database import DRIVER_ERRORS, Connection
from dispatch_core.errors import DatabaseBusyError, MigrationError, MigrationRightsError
from dispatch_core.migrate import sql
from dispatch_core.migrate.compare import Applied, compare, package_version, read_rows
from dispatch_core.migrate.connection import connect, migration_lock, translated
from dispatch_core.migrate.files import Index, Migrations, SqlFile, Step, load
from dispatch_core.migrate.roles import State, ensure_rights, read_state

__all__ = ["MigrationReport", "StepEvent", "migrate", "plan", "read_history"]

MINIMUM_SERVER = 150000

# Constants, so that no role name is ever put into a statement.
SET_LOCAL_ROLE = {
    None: "set local role none",
    "relay_owner": "set local role relay_owner",
    "relay_api": "set local role relay_api",
    "relay_sweep": "set local role relay_sweep",
}
_DROP_INDEX = "select format('drop index concurrently relay.%I', $1::text)"
_SET_ROLE = {role: statement.replace(" local", "") for role, statement in SET_LOCAL_ROLE.items()}


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Progress, for a person who watches."""

    phase: Literal["waiting", "start", "retry", "done"]
    step: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """What a run did."""

    applied: list[str] = field(default_factory=list)
    """The steps that this run applied, in order; empty where nothing was to do."""
    bootstrapped: bool = False
    """Whether this run made the schema and its history."""


@dataclass(frozen=True, slots=True)
class _Limits:
    lock_timeout: float
    give_up_after: float


OnStep = Callable[[StepEvent], None]


async def migrate(
    dsn: str,
    *,
    only: Sequence[str] | None = None,
    on_step: OnStep | None = None,
    directory: Path | None = None,
    lock_timeout_seconds: float = 1.0,
    give_up_after_seconds: float = 300.0,
) -> MigrationReport:
    """Bring the schema to what this version needs.

    `only` names the rooms to install (None: all). A table lock that is not had within `lock_timeout_seconds` is let go,
    so that traffic is not queued behind it, and asked for again after a jittered pause, for `give_up_after_seconds` a
    step; so long, too, it waits for another run to end.

    Transaction: opens its own connection, and a transaction for each step.
    Idempotent: yes, by relay.schema_history; any number of runs at once apply each step once.

    Raises: MigrationRightsError (what a DBA must run is in its `statements`), MigrationDriftError, MigrationError,
    SchemaMismatchError where the schema is newer than this version, DatabaseBusyError, DatabaseUnavailableError.
    """
    everything = load(directory)
    wanted = everything.select(only)
    notify = on_step or _ignore
    async with connect(dsn) as conn:
        state = await read_state(conn)
        comparison = compare(wanted, everything, await read_history(conn, state))
        comparison.refuse()
        if state.ready and not comparison.pending:
            return MigrationReport()
        _check_server(state)
        limits = _Limits(lock_timeout_seconds, give_up_after_seconds)
        async with migration_lock(conn, give_up_after_seconds, lambda who: notify(StepEvent("waiting", "lock", who))):
            return await _run(conn, wanted, everything, limits, notify)


def _ignore(event: StepEvent) -> None:
    pass


async def plan(dsn: str, *, only: Sequence[str] | None = None, directory: Path | None = None) -> list[Step]:
    """Return the steps that `migrate` would apply; changes nothing.

    Raises: as `migrate`.
    """
    everything = load(directory)
    async with connect(dsn) as conn:
        state = await read_state(conn)
        comparison = compare(everything.select(only), everything, await read_history(conn, state))
        comparison.refuse()
        return list(comparison.pending)


async def read_history(conn: Connection, state: State) -> dict[str, Applied]:
    """Read relay.schema_history, as relay_owner where the login may become it; empty where there is none."""
    if not state.has_history:
        return {}
    as_owner = state.roles["relay_owner"].may_set and not state.superuser
    try:
        with translated("reading relay.schema_history"):
            async with conn.transaction(readonly=True):
                await conn.execute(SET_LOCAL_ROLE["relay_owner" if as_owner else None])
                return read_rows(await conn.fetch(sql.HISTORY))
    except MigrationRightsError as error:
        raise MigrationRightsError(
            f"login {state.login} may not read relay.schema_history: it must be a member of relay_owner to migrate, "
            "or of relay_operator to look"
        ) from error


def _check_server(state: State) -> None:
    if state.server_version < MINIMUM_SERVER:
        raise MigrationError(f"PostgreSQL 15 or newer is needed; this is {state.server_version_text}")
    if state.encoding != "UTF8":
        raise MigrationError(f"database {state.database} has the encoding {state.encoding}; UTF8 is needed")
    if state.in_recovery:
        raise MigrationError("this server is a standby; migrate its primary")


async def _run(
    conn: Connection, wanted: Migrations, everything: Migrations, limits: _Limits, notify: OnStep
) -> MigrationReport:
    state = await ensure_rights(conn, await read_state(conn))
    bootstrapped = not state.has_history
    if bootstrapped:
        await _repeat("bootstrap", limits, notify, lambda: _bootstrap(conn, state, limits))
        state = await read_state(conn)
    # Read again: while this run waited for the lock, another one may have done all of it.
    comparison = compare(wanted, everything, await read_history(conn, state))
    comparison.refuse()
    applied: list[str] = []
    for step in comparison.pending:
        if step.kind == "table":
            notify(StepEvent("start", step.name))
            started = time.monotonic()
            await _apply_table(conn, step, limits, notify)
            applied.append(step.name)
            notify(StepEvent("done", step.name, f"{(time.monotonic() - started) * 1000:.0f} ms"))
    functions = [step for step in comparison.pending if step.kind == "functions"]
    if functions:
        names = ", ".join(step.name for step in functions)
        notify(StepEvent("start", names))
        started = time.monotonic()
        await _repeat(names, limits, notify, lambda: _apply_functions(conn, functions, wanted, limits))
        applied.extend(step.name for step in functions)
        notify(StepEvent("done", names, f"{(time.monotonic() - started) * 1000:.0f} ms"))
    return MigrationReport(applied, bootstrapped)


async def _repeat(name: str, limits: _Limits, notify: OnStep, once: Callable[[], Awaitable[None]]) -> None:
    """Run a step's transaction again while it only loses against traffic: a lock timeout, a deadlock."""
    deadline = anyio.current_time() + limits.give_up_after
    attempt = 0
    while True:
        attempt += 1
        try:
            with translated(f"step {name}"):
                await once()
            return
        except DatabaseBusyError as error:
            if anyio.current_time() > deadline:
                raise
            notify(StepEvent("retry", name, str(error)))
        await anyio.sleep(0.05 + full_jitter(attempt, 0.1, 5.0))


async def _begin_step(conn: Connection, limits: _Limits) -> None:
    if not await conn.fetchval(sql.HOLDS_LOCK, sql.LOCK_KEY):
        # Behind a transaction pooler each transaction may run in another session than the one that has the lock.
        raise MigrationError("the migration lock was lost: give the DSN of PostgreSQL itself, not of a pooler")
    await conn.execute("select set_config('lock_timeout', $1, true)", f"{limits.lock_timeout * 1000:.0f}ms")


async def _bootstrap(conn: Connection, state: State, limits: _Limits) -> None:
    async with conn.transaction():
        await _begin_step(conn, limits)
        if state.schema_owner is None:
            await conn.execute(sql.CREATE_SCHEMA)
        await conn.execute(SET_LOCAL_ROLE["relay_owner"])
        await conn.execute(sql.BOOTSTRAP)


async def _apply_table(conn: Connection, step: Step, limits: _Limits, notify: OnStep) -> None:
    file = step.files[0]
    if file.transactional:
        await _repeat(step.name, limits, notify, lambda: _apply_in_transaction(conn, step, limits))
    else:
        await _repeat(step.name, limits, notify, lambda: _apply_outside(conn, step, file, limits))


async def _apply_in_transaction(conn: Connection, step: Step, limits: _Limits) -> None:
    started = time.monotonic()
    async with conn.transaction():
        await _begin_step(conn, limits)
        await _execute(conn, step.files[0])
        await _record(conn, step, None, started)


async def _apply_functions(conn: Connection, steps: Sequence[Step], wanted: Migrations, limits: _Limits) -> None:
    started = time.monotonic()
    async with conn.transaction():
        await _begin_step(conn, limits)
        await conn.execute(SET_LOCAL_ROLE["relay_owner"])
        # Whoever receives a function must be allowed to create in the schema, and nobody shall be at any other time.
        await conn.execute(sql.OPEN_CREATE)
        for file in sorted((file for step in steps for file in step.files), key=lambda file: file.name):
            await _execute(conn, file)
        await conn.execute(SET_LOCAL_ROLE["relay_owner"])
        await conn.execute(sql.CLOSE_CREATE)
        public = [row[0] for row in await conn.fetch(sql.PUBLIC_FUNCTIONS)]
        if public:
            raise MigrationError(f"every login may execute {', '.join(public)}: the functions files must revoke that")
        for step in steps:
            await _record(conn, step, wanted, started)


async def _execute(conn: Connection, file: SqlFile) -> None:
    await conn.execute(sql.STEP_SETTINGS)
    await conn.execute(SET_LOCAL_ROLE[file.role])
    with translated(file.name, file.sql):
        await conn.execute(file.sql)


async def _apply_outside(conn: Connection, step: Step, file: SqlFile, limits: _Limits) -> None:
    started = time.monotonic()
    # What runs concurrently blocks nobody while it waits for older transactions, so it may wait for long.
    await _set_lock_timeout(conn, max(limits.give_up_after, limits.lock_timeout))
    try:
        await conn.execute(_SET_ROLE[file.role])
        if file.builds is None:
            with translated(file.name, file.sql):
                await conn.execute(file.sql)
        else:
            await _build_index(conn, file, file.builds, limits)
    finally:
        if not conn.is_closed():
            await conn.execute(_SET_ROLE[None])
            await conn.execute("set lock_timeout = 0")
    async with conn.transaction():
        await _begin_step(conn, limits)
        await _record(conn, step, None, started)


async def _build_index(conn: Connection, file: SqlFile, index: Index, limits: _Limits) -> None:
    found = await conn.fetchrow(sql.INDEX_STATE, index.name)
    if found is not None and found["on_table"] != index.table:
        raise MigrationError(f"{file.name}: relay.{index.name} is there already, on relay.{found['on_table']}")
    if found is not None and found["valid"]:
        return  # a run was killed after it built the index, and before it wrote that down
    if found is not None:
        await conn.execute(await conn.fetchval(_DROP_INDEX, index.name))
    try:
        with translated(file.name, file.sql):
            await conn.execute(file.sql)
        found = await conn.fetchrow(sql.INDEX_STATE, index.name)
        if found is None or not found["valid"]:
            raise MigrationError(f"{file.name}: the index {index.name} is not valid after it was built")
    except (DatabaseBusyError, MigrationError):
        # No query reads an invalid index, and every write still pays for it. The next run would drop it too.
        with contextlib.suppress(*DRIVER_ERRORS):
            await _set_lock_timeout(conn, limits.lock_timeout)
            if await conn.fetchrow(sql.INDEX_STATE, index.name) is not None:
                await conn.execute(await conn.fetchval(_DROP_INDEX, index.name))
        raise


async def _set_lock_timeout(conn: Connection, seconds: float) -> None:
    await conn.execute("select set_config('lock_timeout', $1, false)", f"{seconds * 1000:.0f}ms")


async def _record(conn: Connection, step: Step, functions_of: Migrations | None, started: float) -> None:
    await conn.execute(SET_LOCAL_ROLE["relay_owner"])
    tag = await conn.execute(
        sql.RECORD,
        step.name,
        step.kind,
        step.sha256,
        functions_of.protocol if functions_of else None,
        functions_of.compatible_from if functions_of else None,
        package_version(),
        round((time.monotonic() - started) * 1000),
    )
    if tag != "INSERT 0 1":
        raise MigrationError(f"step {step.name} was applied by somebody else meanwhile")
