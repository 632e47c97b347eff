"""The SQL of the migration runner itself. Every name is qualified; nothing is ever formatted into these texts."""

from __future__ import annotations

__all__ = [
    "BOOTSTRAP",
    "CLOSE_CREATE",
    "CREATE_SCHEMA",
    "HISTORY",
    "HOLDS_LOCK",
    "INDEX_STATE",
    "LIVENESS",
    "LOCK_HOLDER",
    "LOCK_KEY",
    "NO_TIMEOUTS",
    "OPEN_CREATE",
    "PUBLIC_FUNCTIONS",
    "RECORD",
    "ROLES_STATE",
    "SESSION",
    "STATE",
    "STEP_SETTINGS",
]

# ASCII "s2r_migr". Advisory locks are per database, so migrations of two databases do not wait for each other.
LOCK_KEY = 0x7332725F6D696772

SESSION = """
set role none;
set search_path = pg_catalog, pg_temp;
set check_function_bodies = on;
set default_transaction_read_only = off;
set default_transaction_isolation = 'read committed';
set default_transaction_deferrable = off;
set standard_conforming_strings = on;
set escape_string_warning = on;
set row_security = on;
set synchronous_commit = on;
set default_table_access_method = 'heap';
set default_tablespace = '';
set transform_null_equals = off;
set xmloption = 'content';
set client_min_messages = warning
"""
"""What a login or a database may have set for itself (ALTER ROLE … SET, ALTER DATABASE … SET) and would harm a step."""

NO_TIMEOUTS = """
select set_config(name, '0', false) from pg_settings
where name in ('statement_timeout', 'lock_timeout', 'transaction_timeout', 'idle_session_timeout',
  'idle_in_transaction_session_timeout')
"""
"""Some of them are younger than PostgreSQL 15."""

LIVENESS = """
set client_connection_check_interval = '2s';
set tcp_keepalives_idle = 15;
set tcp_keepalives_interval = 5;
set tcp_keepalives_count = 3
"""
"""So that the server ends the statement, and frees the lock, of a runner that was killed. Not every platform has it."""

STEP_SETTINGS = """
set local search_path = pg_catalog, pg_temp;
set local check_function_bodies = on;
set local row_security = on
"""

BOOTSTRAP = """
grant usage on schema relay to relay_api, relay_sweep, relay_gateway, relay_worker, relay_operator;
create table relay.schema_history (
  step            text collate "C" primary key,
  kind            text not null check (kind in ('table', 'functions')),
  sha256          text not null,
  -- Of the functions only: what the SQL in the database promises, and the oldest SDK that may use it.
  protocol        bigint,
  compatible_from bigint,
  applied_at      timestamptz not null default pg_catalog.clock_timestamp(),
  applied_by      text not null default session_user,
  applied_with    text not null,
  duration_ms     bigint not null
);
comment on table relay.schema_history is 'what relay-dispatch db migrate has applied; written by it alone';
revoke all on relay.schema_history from public;
grant select on relay.schema_history to relay_api, relay_sweep, relay_gateway, relay_worker, relay_operator
"""
"""Run as relay_owner, in one transaction with the creation of the schema."""

CREATE_SCHEMA = "create schema relay authorization relay_owner"

STATE = """
select
  current_database()::text as database,
  session_user::text as login,
  pg_encoding_to_char(d.encoding)::text as encoding,
  pg_is_in_recovery() as in_recovery,
  current_setting('server_version_num')::int as server_version,
  current_setting('server_version') as server_version_text,
  me.rolsuper as superuser,
  me.rolcreaterole as may_create_roles,
  has_database_privilege(session_user, current_database(), 'create') as may_create_schema,
  n.nspowner::regrole::text as schema_owner,
  exists (select from pg_class c where c.relnamespace = n.oid and c.relname = 'schema_history') as has_history,
  (select count(*) from pg_class c where c.relnamespace = n.oid and c.relkind in ('r', 'p', 'v', 'm', 'S', 'f'))
    as relations
from pg_roles me
join pg_database d on d.datname = current_database()
left join pg_namespace n on n.nspname = 'relay'
where me.rolname = session_user
"""

ROLES_STATE = """
select
  wanted.name,
  r.oid is not null as present,
  coalesce(r.rolsuper, false) as superuser,
  coalesce(r.rolbypassrls, false) as bypassrls,
  coalesce(r.rolcanlogin, false) as login,
  r.oid is not null and pg_has_role(session_user, r.oid, $2) as may_set,
  exists (
    select from pg_auth_members m
    where m.roleid = r.oid and m.admin_option and pg_has_role(session_user, m.member, 'usage')
  ) as admin
from unnest($1::text[]) with ordinality as wanted(name, place)
left join pg_roles r on r.rolname = wanted.name
order by wanted.place
"""
"""$2: 'set' from PostgreSQL 16 on, 'member' before: what SET ROLE asks for."""

HISTORY = """
select step, kind, sha256, protocol, compatible_from, applied_at, applied_by, applied_with, duration_ms
from relay.schema_history
order by kind desc, step
"""

RECORD = """
insert into relay.schema_history (step, kind, sha256, protocol, compatible_from, applied_with, duration_ms)
values ($1, $2, $3, $4, $5, $6, $7)
on conflict (step) do update set
  sha256 = excluded.sha256, protocol = excluded.protocol, compatible_from = excluded.compatible_from,
  applied_at = pg_catalog.clock_timestamp(), applied_by = session_user,
  applied_with = excluded.applied_with, duration_ms = excluded.duration_ms
where relay.schema_history.kind = 'functions'
"""

HOLDS_LOCK = """
select exists (
  select from pg_locks
  where locktype = 'advisory' and pid = pg_backend_pid() and granted and objsubid = 1
    and database = (select oid from pg_database where datname = current_database())
    and (classid::bigint << 32) + objid::bigint = $1
)
"""

LOCK_HOLDER = """
select l.pid, a.usename, a.application_name, a.backend_start
from pg_locks l left join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.granted and l.objsubid = 1
  and l.database = (select oid from pg_database where datname = current_database())
  and (l.classid::bigint << 32) + l.objid::bigint = $1
limit 1
"""

OPEN_CREATE = "grant create on schema relay to relay_api, relay_sweep"
CLOSE_CREATE = "revoke create on schema relay from relay_api, relay_sweep"

PUBLIC_FUNCTIONS = """
select p.oid::regprocedure::text
from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname = 'relay'
  and exists (
    select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
    where a.grantee = 0 and a.privilege_type = 'EXECUTE')
  -- What a policy calls, itself or by an SQL expression, is called by whoever reads the table, whoever that is.
  and not exists (
    with recursive called as (
      select d.refobjid as oid from pg_depend d
      where d.classid = 'pg_policy'::regclass and d.refclassid = 'pg_proc'::regclass
      union
      select d.refobjid from called c join pg_depend d on d.objid = c.oid
      where d.classid = 'pg_proc'::regclass and d.refclassid = 'pg_proc'::regclass)
    select from called c where c.oid = p.oid)
order by 1
"""

INDEX_STATE = """
select i.indisvalid and i.indisready and i.indislive as valid, t.relname::text as on_table
from pg_index i
join pg_class t on t.oid = i.indrelid
join pg_class c on c.oid = i.indexrelid
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = 'relay' and c.relname = $1
"""
