-- role: relay_sweep
-- room: dispatch
--
-- The one function that looks across tenants. Its owner's policy is `using (true)`, for SELECT, on two tables; what it
-- returns is tenant ids, and only those that the login of the session is bound to.

-- Guarantees: the tenants that have something for the sweep p_name ('expire', 'lease', 'promote', 'purge') and for which this
--   login may do that sweep (for relay p_relay, where given); promote wants a relay, and p_keep is for purge. Reads ids and
--   times only; changes and locks nothing. A tenant may be listed whose work is another relay's.
create or replace function relay.tenants_due(p_name text, p_relay text, p_keep interval) returns table (tenant_id text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_indexscan = on set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_now   timestamptz := clock_timestamp();
  v_kinds text[] := case p_name when 'promote' then '{worker}' when 'purge' then '{gateway,operator}'
                                else '{gateway,worker,operator}' end;
  v_names text[];
  v_all   boolean;
begin
  select bool_or(b.tenant_id is null), array_agg(distinct b.tenant_id) into v_all, v_names
  from relay.role_binding b
  where b.role_oid = to_regrole(quote_ident(session_user)) and b.kind = any (v_kinds)
    and (b.relay_id is null or b.relay_id = p_relay);
  if v_all and p_name = 'purge' then
    -- The distinct tenants by one index probe each, where count(distinct …) would read every row.
    with recursive names as (
      (select d.tenant_id from relay.s2r_relay_dispatch_result d order by d.tenant_id limit 1)
      union all
      select (select d.tenant_id from relay.s2r_relay_dispatch_result d where d.tenant_id > k.tenant_id
              order by d.tenant_id limit 1)
      from names k where k.tenant_id is not null)
    select array_agg(k.tenant_id) into v_names from names k where k.tenant_id is not null;
  elsif v_all then
    with recursive names as (
      (select q.tenant_id from relay.s2r_relay_dispatch_queue q order by q.tenant_id limit 1)
      union all
      select (select q.tenant_id from relay.s2r_relay_dispatch_queue q where q.tenant_id > k.tenant_id
              order by q.tenant_id limit 1)
      from names k where k.tenant_id is not null)
    select array_agg(k.tenant_id) into v_names from names k where k.tenant_id is not null;
  end if;

  -- Each order is there for the one index that gives it.
  if p_name = 'expire' then
    return query select u.tenant_id from unnest(v_names) as u (tenant_id)
    where (select q.expires_at from relay.s2r_relay_dispatch_queue q
           where q.tenant_id = u.tenant_id and q.claimed_by is null order by q.expires_at limit 1) <= v_now
       or (select true
           from (select q.expires_at from relay.s2r_relay_dispatch_queue q
                 where q.tenant_id = u.tenant_id and q.state = 'claimed' order by q.relay_id, q.claimed_at offset 0) c
           where c.expires_at <= v_now limit 1);
  elsif p_name = 'lease' then
    return query select u.tenant_id from unnest(v_names) as u (tenant_id)
    where (select true
           from (select q.lease_expires_at from relay.s2r_relay_dispatch_queue q
                 where q.tenant_id = u.tenant_id and q.state = 'claimed' order by q.relay_id, q.claimed_at offset 0) c
           where c.lease_expires_at < v_now limit 1);
  elsif p_name = 'promote' then
    return query select u.tenant_id from unnest(v_names) as u (tenant_id)
    where (select q.available_at from relay.s2r_relay_dispatch_queue q
           where q.tenant_id = u.tenant_id and q.relay_id = p_relay and q.state = 'delayed'
           order by q.available_at limit 1) <= v_now;
  elsif p_name = 'purge' then
    return query select u.tenant_id from unnest(v_names) as u (tenant_id)
    where (select d.completed_at from relay.s2r_relay_dispatch_result d
           where d.tenant_id = u.tenant_id and d.completed_at > '-infinity' order by d.completed_at limit 1)
          < v_now - p_keep;
  end if;
end $$;
revoke all on function relay.tenants_due(text, text, interval) from public;
-- And relay.claim asks on behalf of its caller.
grant execute on function relay.tenants_due(text, text, interval) to relay_gateway, relay_worker, relay_operator, relay_api;
