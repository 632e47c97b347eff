"""Let a login act for tenants, and take that back.

Two things together let a login in: membership in the group role, which lets it call the functions of its kind, and a
row in relay.role_binding, which says for whom. Either alone opens nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from dispatch_core.codec import check_name
from dispatch_core.database import Connection
from dispatch_core.errors import InvalidInputError, MigrationRightsError, SchemaMismatchError
from dispatch_core.migrate.connection import connect, translated
from dispatch_core.migrate.roles import ROLES, State, read_state, repeat

__all__ = ["KINDS", "grant", "revoke"]

KINDS = {"gateway": "relay_gateway", "worker": "relay_worker", "operator": "relay_operator"}

_LOGIN = "select r.rolcanlogin, pg_has_role(r.oid, $2, 'usage') as member from pg_roles r where r.rolname = $1"


async def grant(dsn: str, login: str, *, role: str, tenant: str | None, relay: str | None = None) -> None:
    """Let `login` act as `role` (gateway, worker or operator) for a tenant and a relay.

    None is every tenant, or every relay. It holds from the login's next transaction on.

    Transaction: opens its own connection and one transaction; membership and binding come together or not at all.
    Idempotent: yes.

    Raises: InvalidInputError, MigrationRightsError, SchemaMismatchError, DatabaseUnavailableError.
    """
    group = _check(login, role, tenant, relay)
    async with connect(dsn, "relay-dispatch grant") as conn:
        state = await _ready(conn)

        async def once() -> None:
            async with conn.transaction():
                await _grant_membership(conn, state, login, group)
                await conn.execute("set local role relay_api")
                await conn.fetchval("select relay.grant_binding($1, $2, $3, $4)", login, role, tenant, relay)

        async with _explained(conn, state, login, group):
            await repeat(once)


async def revoke(dsn: str, login: str, *, role: str, tenant: str | None, relay: str | None = None) -> int:
    """Take back exactly what `grant` gave with the same arguments; return how many bindings that were: 1 or 0.

    The membership in the group role stays: it belongs to the whole server, and the login may be bound in another
    database. Without a binding it opens nothing.

    Transaction: opens its own connection and one transaction.
    Idempotent: yes.

    Raises: InvalidInputError, MigrationRightsError, SchemaMismatchError, DatabaseUnavailableError.
    """
    group = _check(login, role, tenant, relay)
    removed = 0
    async with connect(dsn, "relay-dispatch revoke") as conn:
        state = await _ready(conn)

        async def once() -> None:
            nonlocal removed
            async with conn.transaction():
                await conn.execute("set local role relay_api")
                removed = int(
                    await conn.fetchval("select relay.revoke_binding($1, $2, $3, $4)", login, role, tenant, relay)
                )

        async with _explained(conn, state, login, group):
            await repeat(once)
    return removed


def _check(login: str, role: str, tenant: str | None, relay: str | None) -> str:
    if role not in KINDS:
        raise InvalidInputError(f"a login acts as {', '.join(KINDS)}, not {role!r}")
    check_name("login", login)
    if login in ROLES:
        raise InvalidInputError(f"{login} is a group role of Relay Dispatch; name a login")
    if tenant is not None:
        check_name("tenant", tenant)
    if relay is not None:
        check_name("relay", relay)
    return KINDS[role]


async def _ready(conn: Connection) -> State:
    state = await read_state(conn)
    if not state.has_history:
        raise SchemaMismatchError("schema relay is not in this database; run: relay-dispatch db migrate")
    if not state.roles["relay_api"].may_set:
        raise MigrationRightsError(
            f"login {state.login} may not act as relay_api; only a login that migrates may grant:"
            " let --dsn be that of one"
        )
    return state


async def _grant_membership(conn: Connection, state: State, login: str, group: str) -> None:
    row = await conn.fetchrow(_LOGIN, login, group)
    if row is None or not row["rolcanlogin"]:
        raise InvalidInputError(f"there is no login {login} on this server; create it first (CREATE ROLE … LOGIN)")
    if row["member"]:
        return
    # A login that was made NOINHERIT would be a member and still be allowed nothing; since 16 the grant itself can say.
    template = "grant %I to %I with inherit true" if state.server_version >= 160000 else "grant %I to %I"
    await conn.execute(await conn.fetchval("select format($1, $2::text, $3::text)", template, group, login))
    if not await conn.fetchval("select pg_has_role($1, $2, 'usage')", login, group):
        raise InvalidInputError(
            f"login {login} is NOINHERIT, so that a group role gives it nothing: ALTER ROLE … INHERIT"
        )


@asynccontextmanager
async def _explained(conn: Connection, state: State, login: str, group: str) -> AsyncIterator[None]:
    try:
        with translated(f"the bindings of login {login}"):
            try:
                yield
            except asyncpg.UndefinedObjectError:
                raise InvalidInputError(f"there is no login {login} on this server") from None
            except (asyncpg.UndefinedFunctionError, asyncpg.UndefinedTableError):
                raise SchemaMismatchError("schema relay is incomplete; run: relay-dispatch db migrate") from None
    except MigrationRightsError as error:
        statement = await conn.fetchval("select format('grant %I to %I;', $1::text, $2::text)", group, login)
        raise MigrationRightsError(
            f"login {state.login} may not grant {group}; a DBA must run first:\n{statement}", statements=(statement,)
        ) from error
