"""Look for what no longer is as the migrations made it: owners, row security, rights, invalid indexes.

Each check is one query of the catalogs, which every login may read, and returns one line for each problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dispatch_core.migrate import sql
from dispatch_core.migrate.compare import compare, installed_rooms
from dispatch_core.migrate.connection import connect, translated
from dispatch_core.migrate.files import load
from dispatch_core.migrate.roles import read_state
from dispatch_core.migrate.runner import read_history

__all__ = ["CHECKS", "verify"]

_SCHEMA = """
select 'schema relay belongs to ' || n.nspowner::regrole || ', not to relay_owner'
from pg_namespace n where n.nspname = 'relay' and n.nspowner::regrole::text <> 'relay_owner'
"""

_SCHEMA_RIGHTS = """
select (case a.grantee when 0 then 'PUBLIC' else a.grantee::regrole::text end) || ' may create in schema relay'
from pg_namespace n, aclexplode(n.nspacl) a
where n.nspname = 'relay' and a.privilege_type = 'CREATE' and a.grantee <> n.nspowner
order by 1
"""

_ROLES = """
select 'role ' || r.rolname || ' ' || concat_ws(' and ',
  case when r.rolsuper then 'is a superuser' end,
  case when r.rolbypassrls then 'has BYPASSRLS' end,
  case when r.rolcanlogin then 'can log in' end,
  case when r.rolcreaterole then 'may create roles' end)
from pg_roles r
where r.rolname in ('relay_owner', 'relay_api', 'relay_sweep', 'relay_gateway', 'relay_worker', 'relay_operator')
  and (r.rolsuper or r.rolbypassrls or r.rolcanlogin or r.rolcreaterole)
order by 1
"""

_MEMBERS = """
select 'role ' || m.member::regrole || ' is a member of ' || m.roleid::regrole
from pg_auth_members m
where m.roleid::regrole::text in ('relay_owner', 'relay_api', 'relay_sweep')
  and m.member::regrole::text in
    ('relay_owner', 'relay_api', 'relay_sweep', 'relay_gateway', 'relay_worker', 'relay_operator')
order by 1
"""

_RELATION_OWNERS = """
select format('%s belongs to %s, not to relay_owner', c.oid::regclass, c.relowner::regrole)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'relay' and c.relkind in ('r', 'p', 'v', 'm', 'S', 'f') and c.relowner::regrole::text <> 'relay_owner'
order by 1
"""

_ROW_SECURITY = """
select format('%s: row security is %s', c.oid::regclass, concat_ws(', ',
  case when not c.relrowsecurity then 'not enabled' end,
  case when not c.relforcerowsecurity then 'not forced' end,
  case when not exists (select from pg_policy p where p.polrelid = c.oid) then 'without a policy' end))
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'relay' and c.relkind in ('r', 'p')
  -- A tenant table is one whose rows all belong to a tenant.
  and exists (
    select from pg_attribute a
    where a.attrelid = c.oid and a.attname = 'tenant_id' and a.attnotnull and not a.attisdropped)
  and not (c.relrowsecurity and c.relforcerowsecurity
    and exists (select from pg_policy p where p.polrelid = c.oid))
order by 1
"""

_TABLE_RIGHTS = """
select format('%s has %s on %s', case a.grantee when 0 then 'PUBLIC' else a.grantee::regrole::text end,
              string_agg(a.privilege_type, ', ' order by a.privilege_type), c.oid::regclass)
from pg_class c join pg_namespace n on n.oid = c.relnamespace, aclexplode(c.relacl) a
where n.nspname = 'relay'
  and (a.grantee = 0
       -- Before these no row security stands: who writes the one has every right, who reads the other every channel.
       or c.relname in ('role_binding', 'installation')
          and a.grantee::regrole::text not in (c.relowner::regrole::text, 'relay_api', 'relay_sweep'))
group by a.grantee, c.oid
order by 1
"""

_FUNCTION_OWNERS = """
select format('%s belongs to %s, which is no owner of ours', p.oid::regprocedure, p.proowner::regrole)
from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname = 'relay' and p.proowner::regrole::text not in ('relay_owner', 'relay_api', 'relay_sweep')
order by 1
"""

_FUNCTION_PATHS = """
select format('%s is SECURITY DEFINER without its own search_path', p.oid::regprocedure)
from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname = 'relay' and p.prosecdef
  and not exists (
    select from unnest(p.proconfig) setting
    where setting in ('search_path=pg_catalog, pg_temp', 'search_path=pg_catalog,pg_temp'))
order by 1
"""

_INDEXES = """
select format('index %s is not valid', i.indexrelid::regclass)
from pg_index i join pg_class c on c.oid = i.indexrelid join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'relay' and not (i.indisvalid and i.indisready and i.indislive)
order by 1
"""

_CONSTRAINTS = """
select format('constraint %I of %s is not validated', k.conname, k.conrelid::regclass)
from pg_constraint k join pg_namespace n on n.oid = k.connamespace
where n.nspname = 'relay' and not k.convalidated
order by 1
"""

_BINDINGS = """
select format('a binding as %s is of role %s, which is gone: the next db grant takes it away, and '
              'a dump would give it to whoever has that number on another server', b.kind, b.role_oid::oid)
from relay.role_binding b
where not exists (select from pg_roles r where r.oid = b.role_oid)
order by 1
"""
# Not among the others: it is asked as relay_api, which not everybody who may verify may become.
_HAS_BINDINGS = """
select exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
               where n.nspname = 'relay' and c.relname = 'role_binding')
"""

CHECKS = (
    _SCHEMA,
    _SCHEMA_RIGHTS,
    _ROLES,
    _MEMBERS,
    _RELATION_OWNERS,
    _ROW_SECURITY,
    _TABLE_RIGHTS,
    _FUNCTION_OWNERS,
    _FUNCTION_PATHS,
    _INDEXES,
    _CONSTRAINTS,
)


async def verify(dsn: str, *, only: Sequence[str] | None = None, directory: Path | None = None) -> list[str]:
    """Return a line for each way in which the schema is not what the migrations made; empty where it is.

    `only` names the rooms that must be there; None: whichever are installed, or all where none is.

    Raises: DatabaseUnavailableError, DatabaseError, MigrationRightsError.
    """
    everything = load(directory)
    problems: list[str] = []
    async with connect(dsn, "relay-dispatch verify") as conn:
        state = await read_state(conn)
        problems.extend(f"role {role.name} is missing" for role in state.roles.values() if not role.present)
        if not state.has_history:
            return [*problems, "schema relay is not in this database"]
        history = await read_history(conn, state)
        rooms = only if only is not None else installed_rooms(everything, history) or None
        comparison = compare(everything.select(rooms), everything, history)
        problems.extend(f"step {step.name} is not the text that was applied" for step in comparison.drifted)
        problems.extend(f"step {step.name} was not applied" for step in comparison.pending_tables)
        problems.extend(f"step {name} is unknown to this version" for name in comparison.unknown)
        if not comparison.newer:
            problems.extend(
                f"step {step.name} is not the text of this version"
                for step in comparison.pending
                if step.kind != "table"
            )
        with translated("verifying the schema"):
            for check in CHECKS:
                problems.extend(row[0] for row in await conn.fetch(check))
            if state.roles["relay_api"].may_set and await conn.fetchval(_HAS_BINDINGS):
                async with conn.transaction():
                    await conn.execute("set local role relay_api")
                    problems.extend(row[0] for row in await conn.fetch(_BINDINGS))
            public = await conn.fetch(sql.PUBLIC_FUNCTIONS)
            problems.extend(f"PUBLIC may execute {row[0]}" for row in public)
    return problems
