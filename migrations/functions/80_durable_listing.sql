-- role: relay_sweep
-- room: durable
--
-- The functions of the room that look across tenants. Their owner's policy is `using (true)`, for SELECT; what they return
-- is tenant ids, and only those that the login of the session is bound to.

-- Guarantees: of the tenants that this login is bound to as worker, those that have jobs of one of the kinds which may have something to
--   claim; p_kinds null = of any kind. Reads ids only; changes and locks nothing.
create or replace function relay.durable_tenants(p_kinds text[] default null) returns table (tenant_id text)
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
  where b.role_oid = to_regrole(quote_ident(session_user)) and b.kind = 'worker';
  if v_all then
    with recursive names as (
      (select j.tenant_id from relay.durable_job j where j.status in ('queued', 'running')
       order by j.tenant_id, j.kind, j.rank, j.job_seq, j.job_id limit 1)
      union all
      select (select j.tenant_id from relay.durable_job j
              where j.status in ('queued', 'running') and j.tenant_id > k.tenant_id
              order by j.tenant_id, j.kind, j.rank, j.job_seq, j.job_id limit 1)
      from names k where k.tenant_id is not null)
    select array_agg(k.tenant_id) into v_names from names k where k.tenant_id is not null;
  end if;
  return query
  select u.tenant_id from unnest(v_names) as u (tenant_id)
  where p_kinds is null
     or exists (select 1 from unnest(p_kinds) as w (kind)
                cross join lateral (
                  select 1 from relay.durable_job j
                  where j.tenant_id = u.tenant_id and j.kind = w.kind and j.status in ('queued', 'running')
                  order by j.rank, j.job_seq, j.job_id limit 1) h);
end $$;

-- Guarantees: the tenants that may have something for the sweep p_name ('lease', 'finish', 'remove') and for which this login may do
--   that sweep. Reads ids and times only; changes and locks nothing.
create or replace function relay.durable_tenants_due(p_name text, p_keep interval, p_abandoned interval)
returns table (tenant_id text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_now   timestamptz := clock_timestamp();
  v_ended timestamptz := v_now - p_keep;
  v_idle  timestamptz := v_now - p_abandoned;
  v_kinds text[] := case p_name when 'remove' then '{gateway,operator}' else '{gateway,worker,operator}' end;
  v_names text[];
  v_all   boolean;
begin
  select bool_or(b.tenant_id is null), array_agg(distinct b.tenant_id) into v_all, v_names
  from relay.role_binding b
  where b.role_oid = to_regrole(quote_ident(session_user)) and b.kind = any (v_kinds);
  if v_all then
    -- The distinct tenants by one index probe each, where count(distinct …) would read every row.
    with recursive names as (
      (select j.tenant_id from relay.durable_job j order by j.tenant_id, j.job_id limit 1)
      union all
      select (select j.tenant_id from relay.durable_job j where j.tenant_id > k.tenant_id
              order by j.tenant_id, j.job_id limit 1)
      from names k where k.tenant_id is not null)
    select array_agg(k.tenant_id) into v_names from names k where k.tenant_id is not null;
  end if;
  -- Each order is there for the one index that gives it.
  if p_name = 'lease' then
    return query select u.tenant_id from unnest(v_names) as u (tenant_id)
    where (select true
           from (select c.lease_expires_at from relay.durable_chunk c
                 where c.tenant_id = u.tenant_id and c.status = 'running' order by c.job_id, c.seq offset 0) r
           where r.lease_expires_at <= v_now limit 1);
  elsif p_name = 'finish' then
    return query select u.tenant_id from unnest(v_names) as u (tenant_id)
    where (select true from relay.durable_job j
           where j.tenant_id = u.tenant_id and j.status in ('queued', 'running')
           order by j.kind, j.rank, j.job_seq, j.job_id limit 1)
       or (select true from relay.durable_job j
           where j.tenant_id = u.tenant_id and j.status = 'paused' order by j.updated_at limit 1);
  elsif p_name = 'remove' then
    return query select u.tenant_id from unnest(v_names) as u (tenant_id)
    where (select j.ended_at from relay.durable_job j
           where j.tenant_id = u.tenant_id and j.status in ('completed', 'completed_with_errors', 'failed', 'cancelled')
           order by j.ended_at limit 1) < v_ended
       or (select j.updated_at from relay.durable_job j
           where j.tenant_id = u.tenant_id and j.status = 'submitting' order by j.updated_at limit 1) < v_idle
       or (select true from relay.durable_job j
           where j.tenant_id = u.tenant_id and j.status = 'removing' order by j.updated_at limit 1);
  end if;
end $$;
-- Guarantees: the tenants that this login is bound to, as whatever; for a login that is bound to every tenant, those that have a job.
--   Reads ids only; changes and locks nothing.
create or replace function relay.durable_all_tenants() returns table (tenant_id text)
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
  where b.role_oid = to_regrole(quote_ident(session_user));
  if v_all then
    return query
    with recursive names as (
      (select j.tenant_id from relay.durable_job j order by j.tenant_id, j.job_id limit 1)
      union all
      select (select j.tenant_id from relay.durable_job j where j.tenant_id > k.tenant_id
              order by j.tenant_id, j.job_id limit 1)
      from names k where k.tenant_id is not null)
    select k.tenant_id from names k where k.tenant_id is not null;
  else
    return query select u.tenant_id from unnest(v_names) as u (tenant_id);
  end if;
end $$;
revoke all on function relay.durable_all_tenants(), relay.durable_tenants(text[]), relay.durable_tenants_due(text, interval, interval)
  from public, relay_gateway, relay_worker, relay_operator;
grant execute on function relay.durable_tenants(text[]) to relay_worker;
grant execute on function relay.durable_all_tenants() to relay_gateway, relay_operator;
grant execute on function relay.durable_tenants_due(text, interval, interval) to relay_gateway, relay_worker, relay_operator;
