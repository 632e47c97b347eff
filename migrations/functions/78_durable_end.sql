-- role: relay_api
-- room: durable
--
-- Ends that no handler brings about, and what tidies behind people and processes that went away.
--
--   relay.durable_finish            ends jobs of which nothing can run any more
--   relay.durable_refresh_counters  counters, from the chunks
--   relay.durable_finish_lost       the same for jobs whose last relay died before it could
--   relay.durable_retire            ended long ago, or never submitted whole -> removing
--   relay.durable_remove            removing -> gone
--   relay.durable_sweep_turn        whose turn it is to do so
--   relay.durable_run_sweeps        whatever of it is due
--
-- Whoever ends a chunk ends the job after that chunk's commit. Of two last chunks that end at the same moment neither sees
-- the other's; but the later of the two commits is before the call that follows it, which so sees both.

-- Guarantees: each of these jobs of which no chunk runs, waits or can be claimed has ended when this returns, once, whoever did
--   it, with its event and its exact counters in one transaction. A row for each that there is: its status now, and whether
--   this call has ended it. A job that has ended already has its counters put right.
-- Errors: S2001, S2002, S2003.
-- Locks: of jobs that seem to be at their end, the row, FOR UPDATE, in the order of job id; waits for them. So never call it
--   in a transaction that holds a chunk.
create or replace function relay.durable_finish(p_tenant text, p_job_ids uuid[])
returns table (job_id uuid, status text, ended boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant);
  v_tenant text := coalesce(p_tenant, v_before);
  v_id     uuid;
  v_was    text;
  v_job    record;
begin
  for v_id in select distinct u.job_id from unnest(p_job_ids) as u (job_id) order by u.job_id loop
    -- Mostly it is not at its end: then nothing is locked.
    if relay.durable_has_open(v_tenant, v_id) then
      select j.status into v_was from relay.durable_job j where j.tenant_id = v_tenant and j.job_id = v_id;
      continue when v_was is null or v_was in ('submitting', 'removing');
      job_id := v_id; status := v_was; ended := false;
      return next;
      continue;
    end if;
    select j.status into v_was from relay.durable_job j where j.tenant_id = v_tenant and j.job_id = v_id for update;
    continue when v_was is null or v_was in ('submitting', 'removing');
    v_job := relay.durable_conclude(v_tenant, v_id, null, null);
    job_id := v_id; status := v_job.status; ended := v_job.status <> v_was;
    return next;
  end loop;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: the job's counters are those of its chunks, whatever they were before. A row with them, or none: no such job. Ends
--   nothing.
-- Errors: S2001, S2002, S2003.
-- Locks: the job's row, FOR NO KEY UPDATE, which no claim waits for; waits for it.
create or replace function relay.durable_refresh_counters(p_tenant text, p_job_id uuid)
returns table (
  status text, rows_total bigint, rows_done bigint, rows_failed bigint, chunks_total bigint, chunks_pending bigint,
  chunks_running bigint, chunks_retry bigint, chunks_done bigint, chunks_failed bigint, chunks_needs_review bigint,
  chunks_cancelled bigint, counted_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_job    record;
begin
  if (select j.status not in ('submitting', 'removing') from relay.durable_job j
      where j.tenant_id = v_tenant and j.job_id = p_job_id) then
    v_job := relay.durable_count(v_tenant, p_job_id);
    return query
    select v_job.status, v_job.rows_total, v_job.rows_done, v_job.rows_failed, v_job.chunks_total, v_job.chunks_pending,
           v_job.chunks_running, v_job.chunks_retry, v_job.chunks_done, v_job.chunks_failed, v_job.chunks_needs_review,
           v_job.chunks_cancelled, v_job.counted_at;
  end if;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: at most p_limit jobs of the tenant of which nothing can run any more, though nobody has ended them, have ended; a row each.
--   Those that are paused too: who ran their last chunk may have died before he could end them.
-- Errors: S2001, S2002, S2003.
-- Locks: the jobs, FOR UPDATE SKIP LOCKED. It never waits.
create or replace function relay.durable_finish_lost(p_tenant text, p_limit bigint)
returns table (tenant_id text, job_id uuid, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant);
  v_tenant text := coalesce(p_tenant, v_before);
  v_ids    uuid[];
  v_id     uuid;
  v_was    text;
  v_job    record;
begin
  -- The probes of durable_has_open, here, since a call of it for each of ten thousand jobs would take most of the time.
  select array_agg(f.job_id order by f.job_id) into v_ids
  from (select o.job_id
        from ((select j.job_id, j.chunks_total from relay.durable_job j
               where j.tenant_id = v_tenant and j.status in ('queued', 'running')
               order by j.kind, j.rank, j.job_seq, j.job_id offset 0)
              union all
              (select j.job_id, j.chunks_total from relay.durable_job j
               where j.tenant_id = v_tenant and j.status = 'paused' order by j.updated_at offset 0)) o
        where o.chunks_total > 0 and coalesce(
          (select true from relay.durable_chunk c
           where c.tenant_id = v_tenant and c.job_id = o.job_id and c.status in ('pending', 'retry') and c.available_at is null
           order by c.seq desc limit 1),
          (select true from relay.durable_chunk c
           where c.tenant_id = v_tenant and c.job_id = o.job_id and c.status = 'running' order by c.seq desc limit 1),
          (select true from relay.durable_chunk c
           where c.tenant_id = v_tenant and c.job_id = o.job_id and c.available_at is not null order by c.seq desc limit 1))
          is null
        limit p_limit) f;
  foreach v_id in array coalesce(v_ids, '{}') loop
    select j.status into v_was from relay.durable_job j
    where j.tenant_id = v_tenant and j.job_id = v_id for update skip locked;
    continue when v_was is null;
    v_job := relay.durable_conclude(v_tenant, v_id, null, null);
    if v_job.status <> v_was then
      tenant_id := v_tenant; job_id := v_id; status := v_job.status;
      return next;
    end if;
  end loop;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: at most p_limit jobs each of those that ended more than p_keep ago (null: none), and of those whose submitter has added
--   nothing for p_abandoned, are seen by nobody from now on, and are removed by and by. Returns how many.
-- Errors: S2001, S2002, S2003; S2020 a time that is negative.
-- Locks: the jobs, FOR UPDATE SKIP LOCKED. It never waits.
create or replace function relay.durable_retire(p_tenant text, p_keep interval, p_abandoned interval, p_limit bigint)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_ended  timestamptz := v_now - p_keep;
  v_idle   timestamptz := v_now - p_abandoned;
  v_ids    uuid[];
  v_more   uuid[];
  v_id     uuid;
begin
  if p_keep < interval '0' or p_abandoned < interval '0' then
    raise exception 'how long jobs are kept cannot be negative' using errcode = 'S2020';
  end if;
  select array_agg(l.job_id) into v_ids
  from (select j.job_id from relay.durable_job j
        where j.tenant_id = v_tenant and j.status in ('completed', 'completed_with_errors', 'failed', 'cancelled')
          and j.ended_at < v_ended
        order by j.ended_at limit p_limit for update skip locked) l;
  select array_agg(l.job_id) into v_more
  from (select j.job_id from relay.durable_job j
        where j.tenant_id = v_tenant and j.status = 'submitting' and j.updated_at < v_idle
        order by j.updated_at limit p_limit for update skip locked) l;
  v_ids := v_ids || v_more;
  foreach v_id in array coalesce(v_ids, '{}') loop
    perform relay.durable_turn_to(v_tenant, v_id, 'removing');
  end loop;
  perform relay.unbind_tenant(v_before);
  return coalesce(cardinality(v_ids), 0);
end $$;

-- Guarantees: the rows are gone. Returns how many.
create or replace function relay.durable_drop(p_tenant text, p_chunks tid[], p_errors tid[], p_events tid[], p_jobs tid[])
returns bigint
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_count bigint;
begin
  with chunks as (
    delete from relay.durable_chunk c where c.ctid = any (p_chunks) and c.tenant_id = p_tenant returning 1
  ), errors as (
    delete from relay.durable_row_error r where r.ctid = any (p_errors) and r.tenant_id = p_tenant returning 1
  ), events as (
    delete from relay.durable_event e where e.ctid = any (p_events) and e.tenant_id = p_tenant returning 1
  ), jobs as (
    delete from relay.durable_job j where j.ctid = any (p_jobs) and j.tenant_id = p_tenant returning 1
  )
  select (select count(*) from chunks) + (select count(*) from errors) + (select count(*) from events)
         + (select count(*) from jobs) into v_count;
  return v_count;
end $$;

-- Guarantees: of the tenant's jobs that are being removed, at most about p_limit rows of each table are gone: chunks, row errors and
--   events first, and a job when it has none any more. Returns how many rows; 0 = there is nothing left, or others are at it.
-- Errors: S2001, S2002, S2003.
-- Locks: the jobs, FOR UPDATE SKIP LOCKED. It never waits.
create or replace function relay.durable_remove(p_tenant text, p_limit bigint) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_job    record;
  v_chunks tid[];
  v_errors tid[];
  v_events tid[];
  v_all    bigint := 0;
begin
  for v_job in
    select j.job_id, j.ctid as row_id from relay.durable_job j
    where j.tenant_id = v_tenant and j.status = 'removing'
    order by j.updated_at limit 100 for update skip locked
  loop
    exit when v_all >= p_limit;
    v_chunks := array(select c.ctid from relay.durable_chunk c
                      where c.tenant_id = v_tenant and c.job_id = v_job.job_id order by c.seq limit p_limit);
    v_errors := array(select r.ctid from relay.durable_row_error r
                      where r.tenant_id = v_tenant and r.job_id = v_job.job_id
                      order by r.seq, r.row_no, r.code limit p_limit);
    v_events := array(select e.ctid from relay.durable_event e
                      where e.tenant_id = v_tenant and e.job_id = v_job.job_id order by e.xid, e.n limit p_limit);
    v_all := v_all + relay.durable_drop(
      v_tenant, v_chunks, v_errors, v_events,
      case when greatest(cardinality(v_chunks), cardinality(v_errors), cardinality(v_events)) < p_limit
           then array[v_job.row_id] end);
  end loop;
  perform relay.unbind_tenant(v_before);
  return v_all;
end $$;

-- Guarantees: true for one caller per interval and login: the sweep (lease, finish, remove) is then due again in p_every (± a tenth).
--   Another process that has the row locked this moment has the turn.
-- Errors: S2020 another name.
-- Locks: the row, FOR UPDATE SKIP LOCKED. The first turns ever of a login, made at one moment, wait for one another.
create or replace function relay.durable_sweep_turn(p_name text, p_every interval) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
declare
  v_login oid := to_regrole(quote_ident(session_user));
  v_now   timestamptz := clock_timestamp();
  v_next  timestamptz := v_now + p_every * (0.9 + 0.2 * random());
begin
  if coalesce(p_name not in ('lease', 'finish', 'remove'), true)
     or not exists (select 1 from relay.my_bindings()) then
    raise exception 'no such sweep, or not for login %', session_user using errcode = 'S2020';
  end if;
  perform 1 from relay.durable_turn s where s.name = p_name and s.role_oid = v_login and s.next_due_at <= v_now
    for update skip locked;
  if found then
    update relay.durable_turn s set next_due_at = v_next where s.name = p_name and s.role_oid = v_login;
    return true;
  end if;
  if exists (select 1 from relay.durable_turn s where s.name = p_name and s.role_oid = v_login) then
    return false;
  end if;
  insert into relay.durable_turn (name, role_oid, next_due_at) values (p_name, v_login, v_next) on conflict do nothing;
  return found;
end $$;

-- Guarantees: does whatever of the sweeps is due for this login, over all tenants that it is bound to, p_limit at a time and 20 times
--   as many in all; a row for what came of it, for the caller to ring and to finish:
--     lease   chunks whose lease has run out, taken back; none before this session is p_lease old: a restart or failover
--             cuts every session, and the holders get one lease to come back
--     finish  jobs that nobody has ended
--     remove  jobs older than p_keep or abandoned, and their rows (seq null, status = how many); only for gateways and operators
--   p_every gives the intervals in that order; null = not this one.
-- Locks: SKIP LOCKED throughout. It waits for no other work.
-- SECURITY INVOKER for session_age; every step is a function that checks the binding itself.
create or replace function relay.durable_run_sweeps(
  p_reaper text, p_limit bigint, p_lease interval, p_keep interval, p_abandoned interval, p_every interval[])
returns table (sweep text, tenant_id text, job_id uuid, seq bigint, status text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  v_sweeps text[] := array['lease', 'finish', 'remove'];
  v_tenant text;
  v_left   bigint;
  v_got    bigint;
  v_full   boolean;
begin
  for v_i in 1..3 loop
    continue when p_every[v_i] is null
      or v_sweeps[v_i] = 'lease' and coalesce(relay.session_age() < p_lease, true)
      or not relay.durable_sweep_turn(v_sweeps[v_i], p_every[v_i]);
    sweep := v_sweeps[v_i];
    v_left := 20 * p_limit;
    loop
      v_full := false;
      for v_tenant in
        select t.tenant_id from relay.durable_tenants_due(v_sweeps[v_i], p_keep, p_abandoned) t order by random()
      loop
        exit when v_left <= 0;
        if v_sweeps[v_i] = 'lease' then
          return query select sweep, r.tenant_id, r.job_id, r.seq, r.status
          from relay.durable_reap(v_tenant, p_reaper, least(p_limit, v_left)) r;
          get diagnostics v_got = row_count;
        elsif v_sweeps[v_i] = 'finish' then
          return query select sweep, r.tenant_id, r.job_id, null::bigint, r.status
          from relay.durable_finish_lost(v_tenant, least(p_limit, v_left)) r;
          get diagnostics v_got = row_count;
        else
          v_got := relay.durable_retire(v_tenant, p_keep, p_abandoned, least(p_limit, v_left));
          v_got := v_got + relay.durable_remove(v_tenant, least(p_limit, v_left));
          if v_got > 0 then
            tenant_id := v_tenant; job_id := null; seq := null; status := v_got::text;
            return next;
          end if;
        end if;
        v_left := v_left - v_got;
        v_full := v_full or v_got >= p_limit;
      end loop;
      exit when not v_full or v_left <= 0;
    end loop;
  end loop;
end $$;
