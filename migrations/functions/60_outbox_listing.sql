-- role: relay_sweep
-- room: outbox
--
-- The one function of the room that looks across tenants. Its owner's policy is `using (true)`, for SELECT; what it returns
-- is tenant ids, and only those that the login of the session is bound to.

-- Guarantees: the tenants that this login is bound to in one of the kinds p_as; for a login that is bound to every tenant, those
--   that have an event. Reads ids only; changes and locks nothing.
create or replace function relay.outbox_tenants(p_as text[] default '{gateway,operator}') returns table (tenant_id text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_names text[];
  v_all   boolean;
begin
  select bool_or(b.tenant_id is null), array_agg(distinct b.tenant_id) into v_all, v_names
  from relay.role_binding b
  where b.role_oid = to_regrole(quote_ident(session_user)) and b.kind = any (p_as);
  if v_all then
    -- The distinct tenants by one index probe each, where count(distinct …) would read every row.
    return query
    with recursive names as (
      (select o.tenant_id from relay.outbox o order by o.tenant_id limit 1)
      union all
      select (select o.tenant_id from relay.outbox o where o.tenant_id > k.tenant_id order by o.tenant_id limit 1)
      from names k where k.tenant_id is not null)
    select k.tenant_id from names k where k.tenant_id is not null;
  else
    return query select u.tenant_id from unnest(v_names) as u (tenant_id);
  end if;
end $$;
revoke all on function relay.outbox_tenants(text[]) from public;
grant execute on function relay.outbox_tenants(text[]) to relay_gateway, relay_operator;
-- outbox_due asks it; what it tells, it tells by the login of the session.
grant execute on function relay.outbox_tenants(text[]) to relay_api;
