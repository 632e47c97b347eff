-- role: relay_api
--
-- Tenancy: binding a tenant for one call, and the bindings of logins.
--
--   relay.bind_tenant(tenant, relay, kinds)  opens every verb
--   relay.unbind_tenant(before)              ends every verb (as relay.set_tenant(before) does, in an expression)
--   relay.grant_binding(login, kind, …)      for operators of the database
--   relay.revoke_binding(login, kind, …)
--   relay.now()                              the clock that every deadline and lease is measured by
--   relay.session_age()                      how long this session has been connected
--   relay.confirm_commit()                   for an answer that rests on what an earlier call has written
--
-- Functions are owned by relay_api, which owns no table, is not a superuser and has no BYPASSRLS: row security binds them.

-- Guarantees: the tenant is bound for the rest of the transaction, by SET LOCAL, until unbind_tenant puts back what was
--   there. p_tenant null = the tenant that the caller has bound. Returns what was bound before ('' = nothing).
--   p_kinds null = a binding of any kind will do.
-- Errors: S2001 no tenant given and none bound, or ''; S2002 the caller has bound another one; S2003 the login of this
--   session has no binding that covers the tenant (and, where p_relay is given, that relay).
-- Locks: none above ACCESS SHARE.
-- Internal, as set_tenant and unbind_tenant are: no login may call them, and the verbs that do have pinned their search_path and run as
--   relay_api already. So they carry no SECURITY DEFINER, and no SET but the one that undoes what the verbs set for theirs.
create or replace function relay.bind_tenant(p_tenant text, p_relay text default null, p_kinds text[] default null)
returns text
language plpgsql
set enable_indexscan = on
as $$
declare
  v_before text := coalesce(current_setting('app.tenant_id', true), '');
  v_tenant text := coalesce(p_tenant, v_before);
begin
  -- Few expressions and one query, since each costs a lone call a microsecond or more.
  if v_tenant = '' or v_before not in ('', v_tenant) then
    if v_tenant = '' then
      raise exception 'no tenant was given, and none is bound on this connection' using errcode = 'S2001';
    end if;
    raise exception 'another tenant is bound on this connection' using errcode = 'S2002';
  end if;
  perform relay.set_tenant(v_tenant) from relay.role_binding b
  where b.role_oid = to_regrole(quote_ident(session_user))
    and (b.tenant_id = v_tenant or b.tenant_id is null)
    and (p_relay is null or b.relay_id = p_relay or b.relay_id is null)
    and (p_kinds is null or b.kind = any (p_kinds))
  limit 1;
  if not found then
    raise exception 'login % has no binding% for tenant %', session_user,
      coalesce(' as ' || array_to_string(p_kinds, ' or '), ''), v_tenant || coalesce(' and relay ' || p_relay, '')
      using errcode = 'S2003';
  end if;
  return v_before;
end $$;

-- Guarantees: p_tenant is bound for the rest of the transaction ('' = none), and returned. It asks nobody: for bind_tenant,
--   and for putting back what bind_tenant found.
create or replace function relay.set_tenant(p_tenant text) returns text
language plpgsql
as $$
begin
  if current_setting('citus.propagate_set_commands', true) is null then
    return set_config('app.tenant_id', p_tenant, true);
  end if;
  -- On Citus SET LOCAL from a nested function, not set_config in the verb: only this reaches the shards, and only with
  -- the first line. Elsewhere it would be a statement to parse in every call, for the same effect.
  perform set_config('citus.propagate_set_commands', 'local', true);
  execute format('set local app.tenant_id = %L', p_tenant);
  return p_tenant;
end $$;

-- Guarantees: the setting is as it was before bind_tenant. (SET LOCAL would last to the end of the caller's transaction.)
create or replace function relay.unbind_tenant(p_before text) returns void
language plpgsql
as $$
begin
  p_before := relay.set_tenant(p_before);
end $$;

-- Guarantees: the commit of this transaction waits for all that the commit of one that has written waits for: its log on disk, and on the
--   synchronous standbys. For verbs that say "it is there already": a statement that was cancelled while it waited for a standby is
--   committed here and seen here, but perhaps on no standby; and a transaction that has written nothing waits for none.
-- Locks: none.
create or replace function relay.confirm_commit() returns void
language plpgsql
as $$
begin
  -- A transaction id alone would not do: what is waited for is what was logged before the commit.
  perform pg_logical_emit_message(true, 'relay-dispatch', '');
end $$;

-- Guarantees: true when the login of this session is bound for *all* relays of the tenant, in one of the kinds.
create or replace function relay.login_is(p_kinds text[], p_tenant text) returns boolean
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select exists (
    select 1 from relay.role_binding b
    where b.role_oid = to_regrole(quote_ident(session_user)) and b.kind = any (p_kinds)
      and (b.tenant_id = p_tenant or b.tenant_id is null) and b.relay_id is null)
$$;

-- Guarantees: the login may act for the tenant (null = every tenant) and relay (null = every relay), as that kind.
--   Made again, it changes nothing. Only the owner roles and superusers may call it. Bindings of logins that are gone go too: a
--   dump has their numbers where others have names, and on another server the number is somebody else's.
-- Errors: 42704 no such login; 23514 an empty tenant or relay.
create or replace function relay.grant_binding(p_login text, p_kind text, p_tenant text, p_relay text) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from relay.role_binding b where not exists (select from pg_catalog.pg_roles r where r.oid = b.role_oid);
  insert into relay.role_binding (role_oid, kind, tenant_id, relay_id)
  values (quote_ident(p_login)::regrole, p_kind, p_tenant, p_relay)
  on conflict do nothing;
end $$;

-- Guarantees: that very binding is gone; returns 1 if it was there, else 0.
create or replace function relay.revoke_binding(p_login text, p_kind text, p_tenant text, p_relay text) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_count bigint;
begin
  delete from relay.role_binding b
  where b.role_oid = quote_ident(p_login)::regrole and b.kind = p_kind
    and b.tenant_id is not distinct from p_tenant and b.relay_id is not distinct from p_relay;
  get diagnostics v_count = row_count;
  return v_count;
end $$;

-- Guarantees: the bindings of the calling login; no other login's.
create or replace function relay.my_bindings() returns table (kind text, tenant_id text, relay_id text)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
  select b.kind, b.tenant_id, b.relay_id from relay.role_binding b
  where b.role_oid = to_regrole(quote_ident(session_user)) order by 1, 2, 3
$$;

-- Guarantees: the database's clock at this moment, also inside a transaction (now() stands still there).
create or replace function relay.now() returns timestamptz
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$ select clock_timestamp() $$;

-- Guarantees: the age of this session, as the server counts it; null where it cannot be told.
-- SECURITY INVOKER, because a session may see its own start and nobody else's.
create or replace function relay.session_age() returns interval
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select clock_timestamp() - a.backend_start from pg_stat_get_activity(pg_backend_pid()) a
$$;
