-- role: relay_api
-- room: dispatch
--
-- Ends that no handler brings about: withdrawal, the deadline, retention; and the sweeps that tidy behind them.

-- Guarantees: each job among the inputs that is pending or claimed ends 'expired' now, whatever the clock says: outcome
--   'applied', once; every other id is 'stale'. A handler that runs learns of it from its next heartbeat, or sooner by a
--   'cancel' ring to relay_id.
-- Errors: S2001, S2002, S2003.
-- Locks: the queue rows, FOR UPDATE, in job id order; waits for them.
create or replace function relay.mark_expired(p_tenant text, p_job_ids uuid[])
returns table (n bigint, outcome text, relay_id text, was_claimed boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_ns     bigint[];
  v_rows   tid[];
begin
  select array_agg(i.n), array_agg(l.row_id) into v_ns, v_rows
  from (select min(u.n) as n, u.job_id from unnest(p_job_ids) with ordinality as u (job_id, n)
        group by u.job_id order by u.job_id) i
  cross join lateral (
    select q.ctid as row_id from relay.s2r_relay_dispatch_queue q
    where q.tenant_id = v_tenant and q.job_id = i.job_id limit 1 for update) l;
  return query
  select u.n, case when e.n is null then 'stale' else 'applied' end, e.relay_id, coalesce(e.claimed_by is not null, false)
  from unnest(p_job_ids) with ordinality as u (job_id, n)
  left join relay.end_jobs(v_tenant, clock_timestamp(), false, null, v_ns, v_rows) e on e.n = u.n;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: ends, as 'expired', at most p_limit jobs of the tenant (of one relay, where given) that are past their deadline.
-- Locks: FOR UPDATE SKIP LOCKED. It never waits: whoever holds such a row is deciding it.
create or replace function relay.expire_late(p_tenant text, p_relay text, p_limit bigint)
returns table (tenant_id text, relay_id text, job_id uuid, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, p_relay);
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_rows   tid[];
begin
  if p_relay is null and not relay.login_is(array['gateway', 'worker', 'operator'], v_tenant) then
    raise exception 'login % is bound to single relays and must name one', session_user using errcode = 'S2003';
  end if;
  -- The orders are there for the indexes that give them: the one of those that wait, and the one of those claimed.
  select array_agg(l.row_id) into v_rows
  from (select q.ctid as row_id from relay.s2r_relay_dispatch_queue q
        where q.tenant_id = v_tenant and q.claimed_by is null and q.expires_at <= v_now
          and (p_relay is null or q.relay_id = p_relay)
        order by q.expires_at limit p_limit for update skip locked) l;
  select v_rows || array_agg(l.row_id) into v_rows
  from (select q.ctid as row_id from relay.s2r_relay_dispatch_queue q
        where q.tenant_id = v_tenant and q.state = 'claimed' and q.expires_at <= v_now
          and (p_relay is null or q.relay_id = p_relay)
        order by q.relay_id, q.claimed_at
        limit p_limit - coalesce(cardinality(v_rows), 0) for update skip locked) l;
  if v_rows is not null then
    return query
    select v_tenant, e.relay_id, e.job_id, e.status
    from relay.end_jobs(v_tenant, v_now, false, null, null, v_rows) e;
  end if;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: removes at most p_limit jobs of the tenant that ended more than p_keep ago, the oldest first: result, request and
--   idempotency key in one statement, so that a key never outlives its result nor dies before it. Returns how many.
-- Errors: S2001, S2002, S2003; S2020 p_keep is negative.
-- Locks: FOR UPDATE SKIP LOCKED on result rows. It waits for nobody.
create or replace function relay.purge(p_tenant text, p_keep interval, p_limit bigint) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before   text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant   text := coalesce(p_tenant, v_before);
  v_until    timestamptz := clock_timestamp() - p_keep;
  v_count    bigint := 0;
  v_jobs     uuid[];
  v_results  tid[];
  v_requests tid[];
  v_keys     tid[];
begin
  if coalesce(p_keep < interval '0', true) then
    raise exception 'purge needs how long results are kept' using errcode = 'S2020';
  end if;
  select array_agg(l.row_id), array_agg(l.job_id) into v_results, v_jobs
  from (select d.ctid as row_id, d.job_id from relay.s2r_relay_dispatch_result d
        where d.tenant_id = v_tenant and d.completed_at > '-infinity' and d.completed_at < v_until
        order by d.completed_at limit p_limit for update skip locked) l;
  if v_jobs is not null then
    select array_agg(l.row_id) into v_requests
    from unnest(v_jobs) as o (job_id)
    cross join lateral (
      select r.ctid as row_id from relay.s2r_relay_dispatch_request r
      where r.tenant_id = v_tenant and r.job_id = o.job_id limit 1) l;
    select array_agg(l.row_id) into v_keys
    from unnest(v_jobs) as o (job_id)
    cross join lateral (
      select k.ctid as row_id from relay.s2r_relay_dispatch_key k
      where k.tenant_id = v_tenant and k.job_id = o.job_id and k.created_at > '-infinity'
      order by k.created_at offset 0) l;
    v_count := relay.drop_jobs(v_tenant, v_results, v_requests, v_keys);
  end if;
  perform relay.unbind_tenant(v_before);
  return v_count;
end $$;

-- Guarantees: true for one caller per interval and login: the sweep is then due again in p_every (± a tenth, so that sweeps of
--   many logins drift apart). Another process that has the row locked this moment has the turn.
-- Locks: the row, FOR UPDATE SKIP LOCKED. The first turns ever of a login, made at one moment, wait for one another.
create or replace function relay.sweep_turn(p_name text, p_every interval) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
declare
  v_login oid := to_regrole(quote_ident(session_user));
  v_now   timestamptz := clock_timestamp();
  v_next  timestamptz := v_now + p_every * (0.9 + 0.2 * random());
begin
  -- A row a name: so only names that there are, and of relays that the login may serve.
  if split_part(p_name, ':', 1) not in ('expire', 'lease', 'promote', 'purge')
     or not exists (select 1 from relay.role_binding b
                    where b.role_oid = v_login
                      and (b.relay_id is null or p_name = split_part(p_name, ':', 1) || ':' || b.relay_id)) then
    raise exception 'no such sweep, or not for login %', session_user using errcode = 'S2020';
  end if;
  perform 1 from relay.sweep s where s.name = p_name and s.role_oid = v_login and s.next_due_at <= v_now
    for update skip locked;
  if found then
    update relay.sweep s set next_due_at = v_next where s.name = p_name and s.role_oid = v_login;
    return true;
  end if;
  if exists (select 1 from relay.sweep s where s.name = p_name and s.role_oid = v_login) then
    return false;
  end if;
  insert into relay.sweep (name, role_oid, next_due_at) values (p_name, v_login, v_next) on conflict do nothing;
  return found;
end $$;

-- Guarantees: the sweep is due again now, for whoever of this login comes next.
-- Locks: the row, which the caller's turn has locked already.
create or replace function relay.sweep_again(p_name text) returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_login oid := to_regrole(quote_ident(session_user));
  v_now   timestamptz := clock_timestamp();
begin
  update relay.sweep s set next_due_at = v_now where s.name = p_name and s.role_oid = v_login;
end $$;

-- Guarantees: does whatever of the four sweeps is due for this login, over all tenants that the login is bound to (of relay
--   p_relay, where given), p_limit jobs of a tenant at a time and 20 times as many in all; a sweep that leaves work behind is
--   due again at once, so that it keeps up with any load. Tells what came of it: one row per job that ended or went back,
--   for the caller to ring; and one row (sweep 'purge', job_id null) per batch of something purged.
--     expire   jobs past their deadline                     lease   claims whose lease ran out (session p_lease old)
--     promote  delayed jobs that are due                    purge   results older than p_keep; skipped where p_keep is null
--   p_every gives the intervals in that order of: expire, lease, promote, purge; null = not this one. Sweeps only tidy:
--   nothing that a reader or a relay is told depends on whether one has run. A tenant or relay that the login is not bound
--   to for a sweep is left out, and is no error.
-- Locks: SKIP LOCKED throughout, but for sweep_turn. It waits for no other work.
-- SECURITY INVOKER for session_age; every step is a function that checks the binding itself.
create or replace function relay.run_sweeps(
  p_relay text, p_limit bigint, p_lease interval, p_keep interval, p_every interval[])
returns table (sweep text, tenant_id text, relay_id text, job_id uuid, status text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  v_sweeps text[] := array['expire', 'lease', 'promote', 'purge'];
  v_sweep  text;
  v_turn   text;
  v_tenant text;
  v_left   bigint;
  v_got    bigint;
  v_full   boolean;
begin
  for v_i in 1..4 loop
    v_sweep := v_sweeps[v_i];
    -- A turn is per login and relay: relays that share a login do not take it from one another.
    v_turn := v_sweep || coalesce(':' || p_relay, '');
    continue when p_every[v_i] is null
      or v_sweep = 'lease' and coalesce(relay.session_age() < p_lease, true)
      or v_sweep = 'promote' and p_relay is null
      or v_sweep = 'purge' and (p_keep is null or p_relay is not null)
      or not relay.sweep_turn(v_turn, p_every[v_i]);
    v_left := 20 * p_limit;
    loop
      v_full := false;
      -- In any order, so that one tenant's endless work does not keep the others from their turn.
      for v_tenant in
        select t.tenant_id from relay.tenants_due(v_sweep, p_relay, p_keep) t order by random()
      loop
        exit when v_left <= 0;
        if v_sweep = 'expire' then
          return query select v_sweep, r.* from relay.expire_late(v_tenant, p_relay, least(p_limit, v_left)) r;
          get diagnostics v_got = row_count;
        elsif v_sweep = 'lease' then
          return query select v_sweep, r.* from relay.reclaim_lost(v_tenant, p_relay, least(p_limit, v_left)) r;
          get diagnostics v_got = row_count;
        elsif v_sweep = 'promote' then
          -- A claim promotes too, before it looks; so once is enough.
          perform relay.promote_due(v_tenant, p_relay, p_limit);
          v_got := 0;
        else
          v_got := relay.purge(v_tenant, p_keep, least(p_limit, v_left));
          if v_got > 0 then
            sweep := 'purge'; tenant_id := v_tenant; relay_id := null; job_id := null; status := v_got::text;
            return next;
          end if;
        end if;
        v_left := v_left - v_got;
        v_full := v_full or v_got >= p_limit;
      end loop;
      exit when not v_full or v_left <= 0;
    end loop;
    if v_left <= 0 then
      perform relay.sweep_again(v_turn);
    end if;
  end loop;
end $$;
