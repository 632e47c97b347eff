-- role: relay_sweep
--
-- The one function that looks across tenants. Its owner's policy is `using (true)`, for SELECT, on two tables; what it
-- returns is tenant ids, and only those that the login of the session is bound to.

-- Guarantees: the tenants that have something for the sweep p_name ('expire', 'lease', 'promote', 'purge') and that this login
--   is bound to. p_keep is for 'purge'. Reads ids and times only; changes and locks nothing.
create or replace function relay.tenants_due(p_name text, p_keep interval) returns table (tenant_id text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off
as $$
declare
  v_now   timestamptz := clock_timestamp();
  v_login oid := to_regrole(quote_ident(session_user));
  v_all   boolean := exists (select 1 from relay.role_binding b where b.role_oid = v_login and b.tenant_id is null);
  v_names text[];
begin
  if not v_all then
    select array_agg(distinct b.tenant_id) into v_names from relay.role_binding b where b.role_oid = v_login;
  elsif p_name = 'purge' then
    -- The distinct tenants by one index probe each, where count(distinct …) would read every row.
    with recursive names as (
      (select d.tenant_id from relay.s2r_relay_dispatch_result d order by d.tenant_id limit 1)
      union all
      select (select d.tenant_id from relay.s2r_relay_dispatch_result d where d.tenant_id > k.tenant_id
              order by d.tenant_id limit 1)
      from names k where k.tenant_id is not null)
    select array_agg(k.tenant_id) into v_names from names k where k.tenant_id is not null;
  else
    with recursive names as (
      (select q.tenant_id from relay.s2r_relay_dispatch_queue q order by q.tenant_id limit 1)
      union all
      select (select q.tenant_id from relay.s2r_relay_dispatch_queue q where q.tenant_id > k.tenant_id
              order by q.tenant_id limit 1)
      from names k where k.tenant_id is not null)
    select array_agg(k.tenant_id) into v_names from names k where k.tenant_id is not null;
  end if;

  return query
  select u.tenant_id from unnest(v_names) as u (tenant_id)
  where case p_name
    when 'expire' then
      exists (select 1 from relay.s2r_relay_dispatch_queue q
              where q.tenant_id = u.tenant_id and q.state <> 'claimed' and q.expires_at <= v_now)
      or exists (select 1 from relay.s2r_relay_dispatch_queue q
                 where q.tenant_id = u.tenant_id and q.state = 'claimed' and q.expires_at <= v_now)
    when 'lease' then
      exists (select 1 from relay.s2r_relay_dispatch_queue q
              where q.tenant_id = u.tenant_id and q.state = 'claimed' and q.lease_expires_at < v_now)
    when 'promote' then
      exists (select 1 from relay.s2r_relay_dispatch_queue q
              where q.tenant_id = u.tenant_id and q.state = 'delayed' and q.available_at <= v_now)
    when 'purge' then
      exists (select 1 from relay.s2r_relay_dispatch_result d
              where d.tenant_id = u.tenant_id and d.completed_at < v_now - p_keep)
    end;
end $$;
revoke all on function relay.tenants_due(text, interval) from public;
grant execute on function relay.tenants_due(text, interval) to relay_gateway, relay_worker, relay_operator;
