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
select w.why
from pg_catalog.pg_roles as login
cross join lateral (
  select case
           when login.rolsuper then 'it is a superuser'
           when login.rolbypassrls then 'it has BYPASSRLS'
           when login.rolreplication then 'it has REPLICATION, and may read the log of all changes'
           when login.rolcreaterole and pg_catalog.current_setting('server_version_num')::int < 160000
             then 'it has CREATEROLE, and may make itself a member of any role'
           else coalesce(
             (select 'it is a member of ' || g.name || ', ' || g.why
              from (values (1, 'relay_owner', 'which owns the tables'),
                           (2, 'relay_api', 'as which the functions run'),
                           (3, 'relay_sweep', 'which sees every tenant'),
                           (4, 'pg_write_all_data', 'and may give itself any binding'),
                           (5, 'pg_execute_server_program', 'and may do there what the server may'),
                           (6, 'pg_write_server_files', 'and may do there what the server may'),
                           (7, 'pg_read_server_files', 'and may read the files of the tables'))
                   as g (n, name, why)
              join pg_catalog.pg_roles as r on r.rolname = g.name
              where pg_catalog.pg_has_role(login.oid, r.oid, 'member')
              order by g.n limit 1),
             (select 'it may write relay.role_binding, and so give itself any binding'
              from pg_catalog.pg_class as c
              join pg_catalog.pg_namespace as s on s.oid = c.relnamespace
              where s.nspname = 'relay' and c.relname = 'role_binding'
                and pg_catalog.has_table_privilege(login.oid, c.oid, 'insert, update')))
         end as why) as w
where login.rolname in (current_user, session_user) and w.why is not null
limit 1
"""
# Of both: a superuser who has turned into a plain role can turn back.


class _Connection(Protocol):
    """What is needed of an asyncpg connection."""

    async def fetchval(self, query: str, /) -> object: ...


async def bypasses_row_security(conn: _Connection) -> str | None:
    """Return why row security does not bind the login of `conn` (part of a sentence), or None where it does.

    Also where it binds the login today, and the login may undo that by itself.

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
