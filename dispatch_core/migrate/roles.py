"""The group roles: made where they are missing, and the rights that a migration needs, or the words to ask for them.

Roles belong to the whole server, while advisory locks belong to one database, so two databases that are migrated at the
same moment create them at the same moment. That shows as 42710 (it exists), 23505 (its name has just been taken) or
XX000 (its row has just been changed), and all three only mean: look again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
import asyncpg

from dispatch_core.backoff import full_jitter
from dispatch_core.database import Connection
from dispatch_core.errors import MigrationError, MigrationRightsError
from dispatch_core.migrate import sql
from dispatch_core.migrate.connection import is_transient, translated
from dispatch_core.migrate.files import OWNER_ROLES

__all__ = [
    "CREATE_ROLE",
    "GROUP_ROLES",
    "ROLES",
    "Role",
    "State",
    "ensure_rights",
    "grant_statement",
    "read_state",
    "repeat",
]

GROUP_ROLES = ("relay_gateway", "relay_worker", "relay_operator")
"""Roles that logins are members of."""

ROLES = OWNER_ROLES + GROUP_ROLES

# NOBYPASSRLS and its like are said here and never by ALTER ROLE, which only a superuser may say them with.
CREATE_ROLE = "create role %I nologin nosuperuser nocreatedb nocreaterole noreplication nobypassrls"
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Role:
    """What a role is, and what the migrating login may do with it."""

    name: str
    present: bool
    superuser: bool
    bypassrls: bool
    login: bool
    may_set: bool
    admin: bool


@dataclass(frozen=True, slots=True)
class State:
    """The server as the migrating login finds it."""

    database: str
    login: str
    server_version: int
    server_version_text: str
    superuser: bool
    may_create_roles: bool
    may_create_schema: bool
    encoding: str
    in_recovery: bool
    schema_owner: str | None
    has_history: bool
    relations: int
    roles: dict[str, Role]

    @property
    def ready(self) -> bool:
        """Whether nothing is left to do before the steps, whoever does it."""
        return (
            self.has_history
            and self.schema_owner == "relay_owner"
            and all(role.present for role in self.roles.values())
            and not any(role.superuser or role.bypassrls for role in self.roles.values())
        )


async def read_state(conn: Connection) -> State:
    """Read what there is; every login may."""
    with translated("looking at the server"):
        (row,) = await conn.fetch(sql.STATE)
        # Before PostgreSQL 16 membership alone allows SET ROLE; since then a membership can be without it.
        kind = "set" if row["server_version"] >= 160000 else "member"
        roles = await conn.fetch(sql.ROLES_STATE, list(ROLES), kind)
    return State(roles={role["name"]: Role(**dict(role)) for role in roles}, **dict(row))


async def ensure_rights(conn: Connection, state: State) -> State:
    """Create what the login may create, and give it what it may give itself; return the new state.

    Transaction: none may be open; each statement commits by itself, and a second run finds it done.

    Raises: MigrationRightsError with all that is left for a DBA to run; MigrationError where the server cannot be used.
    """
    if state.has_history is False and state.schema_owner is not None and state.relations:
        raise MigrationError(
            f"schema relay of database {state.database} holds {state.relations} relations but no relay.schema_history: "
            "it is not ours, and is left alone"
        )
    for name, role in state.roles.items():
        if not role.present and (state.superuser or state.may_create_roles):
            await _run(conn, CREATE_ROLE, name)
    state = await read_state(conn)
    for name in OWNER_ROLES:
        role = state.roles[name]
        if role.present and not role.may_set and _may_grant(state, role):
            await _run(conn, grant_statement(state), name, state.login)
    state = await read_state(conn)
    missing = await _missing(conn, state)
    if missing:
        raise MigrationRightsError(
            f"login {state.login} lacks rights on database {state.database}; a DBA must run first:\n"
            + "\n".join(missing),
            statements=missing,
        )
    return state


def grant_statement(state: State) -> str:
    """Return the template of the GRANT that lets a login act as an owner role."""
    # Since 16 the creator of a role may administer it, and not yet become it. INHERIT stays off: the login owns
    # nothing by itself, it only can become the owner.
    return "grant %I to %I with inherit false, set true" if state.server_version >= 160000 else "grant %I to %I"


def _may_grant(state: State, role: Role) -> bool:
    if state.superuser or role.admin:
        return True
    return state.server_version < 160000 and state.may_create_roles and not role.superuser


async def _missing(conn: Connection, state: State) -> tuple[str, ...]:
    wanted: list[tuple[str, tuple[str, ...]]] = []
    for role in state.roles.values():
        if not role.present:
            wanted.append((CREATE_ROLE, (role.name,)))
        elif role.superuser or role.bypassrls:
            wanted.append(("alter role %I nosuperuser nobypassrls", (role.name,)))
    wanted += [(grant_statement(state), (name, state.login)) for name in OWNER_ROLES if not state.roles[name].may_set]
    if state.schema_owner is None:
        if not state.may_create_schema:
            wanted.append(("create schema relay authorization relay_owner", ()))
    elif state.schema_owner != "relay_owner":
        wanted.append(("alter schema relay owner to relay_owner", ()))
    return tuple([await _render(conn, template, names) + ";" for template, names in wanted])


async def _render(conn: Connection, template: str, names: Sequence[str]) -> str:
    with translated("quoting names"):
        return str(await conn.fetchval("select format($1, variadic $2::text[])", template, list(names)))


async def _run(conn: Connection, template: str, *names: str) -> None:
    statement = await _render(conn, template, names)

    async def once() -> None:
        try:
            await conn.execute(statement)
        except (asyncpg.DuplicateObjectError, asyncpg.UniqueViolationError):
            pass  # another database's migration was faster; the caller looks again
        except asyncpg.InsufficientPrivilegeError:
            pass  # the caller looks again, and says what is missing

    with translated(statement):
        await repeat(once)


async def repeat(once: Callable[[], Awaitable[None]]) -> None:
    """Make a short statement on roles again while it only collides with another session's."""
    for attempt in range(1, _TRIES + 1):
        try:
            await once()
        except asyncpg.PostgresError as error:
            if attempt == _TRIES or not is_transient(error):
                raise
            await anyio.sleep(full_jitter(attempt, 0.02, 0.5))
        else:
            return
