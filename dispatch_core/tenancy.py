"""Know which tenant a statement is for, and whether row security stands behind that.

Tenants are bound inside the SQL functions of schema `relay`, for one transaction (see SECURITY.md). What is here serves
reads that go past the functions (the view), and the warning at start.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

__all__ = ["DISPATCH_TENANT_SCOPE_SQL", "bypasses_row_security", "warn_if_bypassing"]

DISPATCH_TENANT_SCOPE_SQL: Final = "tenant_id = (select relay.bound_tenant())"
"""The predicate that every statement on a tenant relation carries; the policies below it say the same.

As a sub-select it is evaluated once a statement; called plainly, once a row.
"""

_BYPASS_SQL: Final = """
select case
         when login.rolsuper then 'it is a superuser'
         when login.rolbypassrls then 'it has BYPASSRLS'
         when exists (select from pg_catalog.pg_roles as owner
                      where owner.rolname = 'relay_owner'
                        and pg_catalog.pg_has_role(login.oid, owner.oid, 'member'))
           then 'it is a member of relay_owner, which owns the tables'
       end
from pg_catalog.pg_roles as login
where login.rolname = current_user
"""


class _Connection(Protocol):
    """What is needed of an asyncpg connection."""

    async def fetchval(self, query: str, /) -> object: ...


async def bypasses_row_security(conn: _Connection) -> str | None:
    """Return why row security does not bind the login of `conn` (part of a sentence), or None where it does.

    Transaction: joins the caller's, if there is one.
    """
    reason = await conn.fetchval(_BYPASS_SQL)
    return reason if isinstance(reason, str) else None


async def warn_if_bypassing(conn: _Connection, logger: logging.Logger) -> str | None:
    """Log one warning where row security does not bind the login of `conn`; return the reason."""
    reason = await bypasses_row_security(conn)
    if reason is not None:
        logger.warning(
            "row security does not bind this login, because %s: use a plain login, made with `relay-dispatch db grant`",
            reason,
        )
    return reason
