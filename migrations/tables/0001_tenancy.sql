-- role: relay_owner
--
-- Who may act for which tenant, and the function that every row security policy rests on.
--
--   relay.installation    one row: the secret that channel names are made from
--   relay.role_binding    one row per (login, kind, tenant, relay) that may be served
--   relay.bound_tenant()  the tenant of this transaction, or an error; never null, never ''
--   relay.row_tenant()    the same, as row security asks for it

create table relay.installation (
  only_row   boolean primary key default true check (only_row),
  -- gen_random_uuid() draws from the server's strong random source; two of them are 244 random bits.
  secret     bytea not null default
             pg_catalog.uuid_send(pg_catalog.gen_random_uuid()) || pg_catalog.uuid_send(pg_catalog.gen_random_uuid()),
  -- How large what any login writes may be (functions/15_limits.sql). Whoever owns the tables changes them, by UPDATE.
  max_value_bytes      bigint not null default 8388608 check (max_value_bytes between 65536 and 536870912),
  max_checkpoint_bytes bigint not null default 1048576 check (max_checkpoint_bytes between 65536 and 536870912),
  created_at timestamptz not null default pg_catalog.clock_timestamp()
);
insert into relay.installation default values;

create table relay.role_binding (
  -- Kept as the oid, so a login that is renamed keeps its binding and one that is dropped and made anew does not; dumped as
  -- the name, so a restore on another server binds the login of that name and not whichever one has that number there.
  role_oid  regrole not null,
  kind      text not null check (kind in ('gateway', 'worker', 'operator')),
  -- null is "every tenant" and "every relay": an explicit row, made by a person. '' is no tenant at all.
  tenant_id text collate "C" check (tenant_id <> '' and octet_length(tenant_id) <= 200),
  relay_id  text collate "C" check (relay_id <> '' and octet_length(relay_id) <= 200),
  created_at timestamptz not null default pg_catalog.clock_timestamp(),
  unique nulls not distinct (role_oid, kind, tenant_id, relay_id),
  -- A gateway names a relay in every job; only a worker is one.
  check (relay_id is null or kind = 'worker')
);

revoke all on relay.installation, relay.role_binding from public;
grant select on relay.installation to relay_api;
grant select, insert, delete on relay.role_binding to relay_api;
grant select on relay.role_binding to relay_sweep;

-- Guarantees: returns the tenant that is bound in this transaction, after checking that the login of this session
--   (session_user: neither SET ROLE nor a SECURITY DEFINER function changes it) is bound to that tenant. Raises S2001
--   when none is bound; a custom setting once set locally reads as '' afterwards, which is no tenant either. Raises
--   S2003 when the login has no binding. It raises, and does not return null, so that a lost binding is an error and
--   never an empty answer.
-- Locks: none above ACCESS SHARE on relay.role_binding.
-- Owned by the owner of the tables, because the policies of the tables are made of it.
create function relay.bound_tenant() returns text
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_tenant text := nullif(current_setting('app.tenant_id', true), '');
begin
  if v_tenant is null then
    raise exception 'no tenant is bound in this transaction' using errcode = 'S2001';
  end if;
  if not exists (
    select 1 from relay.role_binding b
    where b.role_oid = to_regrole(quote_ident(session_user))
      and (b.tenant_id = v_tenant or b.tenant_id is null)
  ) then
    raise exception 'login % has no binding for tenant %', session_user, v_tenant using errcode = 'S2003';
  end if;
  return v_tenant;
end $$;

-- Policies call it as whoever reads the table; it tells the caller nothing that the caller has not set itself.
revoke all on function relay.bound_tenant() from public;
grant execute on function relay.bound_tenant() to public;

-- Guarantees: as bound_tenant; but it does not look for the binding once more where the statement is a verb's, which has
--   done so in relay.bind_tenant. Only verbs run as relay_api: nobody can log in as that role, and no login is a member
--   of it but the one that migrates.
-- Row security asks once a table and statement; with bound_tenant there, a verb for one job took 10 to 16 % more of the
--   server's time. A plain SQL expression, so the planner puts it into the statement; its names are resolved here and
--   now, whatever the search_path.
create function relay.row_tenant() returns text
language sql stable
return case
  when current_user = 'relay_api' and pg_catalog.current_setting('app.tenant_id', true) <> ''
  then pg_catalog.current_setting('app.tenant_id', true)
  else relay.bound_tenant()
end;

revoke all on function relay.row_tenant() from public;
grant execute on function relay.row_tenant() to public;
