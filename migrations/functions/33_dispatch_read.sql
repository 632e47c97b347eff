-- role: relay_api
-- room: dispatch
--
-- Reading jobs: by id, for those who wait, and as a list, for people.

-- Guarantees: one row per input id that is a job of the tenant; an unknown id and a foreign one alike give no row.
--   A live job past its deadline reads 'expired', and once it has read so it ends in no other way: such a row is first locked, so
--   that a completion in flight decides before the answer is given. Changes no data. Where somebody keeps the row locked for longer
--   than a quarter of a second (a worker may leave a transaction open) it is not decided: it reads 'claimed' or 'pending', with no
--   time left, and the other rows have their answer.
--   `remaining` is the time to the deadline; response_* and error_* are null before the end.
--   `fits` false: the results before this one, in the order of the ids, fill p_batch_limit bytes already, so its body and
--   headers are left out; ask for it again. The first result always fits.
-- Errors: S2001, S2002, S2003.
-- Locks: FOR KEY SHARE, in job id order, on queue rows past their deadline only; waits for a completion in flight, up to 0.25 s.
create or replace function relay.poll(p_tenant text, p_job_ids uuid[], p_batch_limit bigint default 4194304)
returns table (
  n bigint, job_id uuid, status text, attempt bigint, response_status bigint, response_headers text, response_body bytea,
  error_code text, error_message text, created_at timestamptz, claimed_at timestamptz, completed_at timestamptz,
  expires_at timestamptz, remaining interval, fits boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_late   uuid[];
  v_open   uuid[] := '{}';
  v_lock   text;
begin
  -- Mostly one is asked for, because it has ended. A result never changes: where it is there, nothing else need be read.
  if cardinality(p_job_ids) = 1 then
    return query
    select 1::bigint, s.job_id, s.status, s.attempt, s.response_status, s.response_headers::text, s.response_body, s.error_code,
           s.error_message, s.created_at, s.claimed_at, s.completed_at, s.expires_at, s.expires_at - v_now, true
    from relay.s2r_relay_dispatch_result s where s.tenant_id = v_tenant and s.job_id = p_job_ids[1] limit 1;
    if found then
      perform relay.unbind_tenant(v_before);
      return;
    end if;
  end if;
  select array_agg(u.job_id) into v_late
  from unnest(p_job_ids) as u (job_id)
  cross join lateral (
    select 1 from relay.s2r_relay_dispatch_queue q
    where q.tenant_id = v_tenant and q.job_id = u.job_id and q.expires_at <= v_now limit 1) l;
  if v_late is not null then
    begin
      v_lock := current_setting('lock_timeout');
      perform set_config('lock_timeout', '250ms', true);
      perform count(*)
      from (select u.job_id from unnest(v_late) as u (job_id) order by u.job_id) u
      cross join lateral (
        select 1 from relay.s2r_relay_dispatch_queue q
        where q.tenant_id = v_tenant and q.job_id = u.job_id limit 1 for key share) l;
      perform set_config('lock_timeout', v_lock, true);
    exception when lock_not_available then
      -- Those that nobody keeps are locked all the same; what happens to the others between here and the answer, it shows.
      select array_agg(u.job_id) filter (where l.locked is null) into v_late
      from (select u.job_id from unnest(v_late) as u (job_id) order by u.job_id) u
      left join lateral (
        select true as locked from relay.s2r_relay_dispatch_queue q
        where q.tenant_id = v_tenant and q.job_id = u.job_id limit 1 for key share skip locked) l on true;
      v_open := coalesce(v_late, '{}');
    end;
  end if;

  -- One snapshot, taken after the locks: a job is in the queue or among the results, and never in neither.
  return query
  select j.n, j.job_id, j.status, j.attempt, j.response_status, case when j.fits then j.headers end,
         case when j.fits then j.body end, j.code, j.message, j.created_at, j.claimed_at, j.completed_at, j.expires_at,
         j.expires_at - v_now, j.fits
  from (
    select u.n, u.job_id,
           case when d.status is not null then d.status
                when q.late then 'expired'
                when q.state = 'claimed' then 'claimed'
                else 'pending' end as status,
           coalesce(d.attempt, q.attempt) as attempt, d.response_status, d.headers, d.body,
           case when d.status is null and q.late then 'S2R-EXPIRED' else d.error_code end as code,
           case when d.status is null and q.late then 'the deadline passed before a result'
                else d.error_message end as message,
           coalesce(d.created_at, q.created_at) as created_at, coalesce(d.claimed_at, q.claimed_at) as claimed_at,
           d.completed_at, coalesce(d.expires_at, q.expires_at) as expires_at,
           coalesce(d.bytes = 0 or sum(d.bytes) over (order by u.n rows between unbounded preceding and 1 preceding)
                    < p_batch_limit, true) as fits
    from unnest(p_job_ids) with ordinality as u (job_id, n)
    left join lateral (
      -- octet_length of a body reads its header and not the body itself.
      select r.*, coalesce(octet_length(r.body), 0) + coalesce(octet_length(r.headers), 0) as bytes
      from (
        select s.status, s.attempt, s.response_status, s.response_headers::text as headers, s.response_body as body,
               s.error_code, s.error_message, s.created_at, s.claimed_at, s.completed_at, s.expires_at
        from relay.s2r_relay_dispatch_result s where s.tenant_id = v_tenant and s.job_id = u.job_id limit 1) r) d on true
    left join lateral (
      select s.state, s.attempt, s.created_at, s.claimed_at, s.expires_at,
             s.expires_at <= v_now and not s.job_id = any (v_open) as late
      from relay.s2r_relay_dispatch_queue s
      where d.status is null and s.tenant_id = v_tenant and s.job_id = u.job_id limit 1) q on true
    where d.status is not null or q.state is not null) j;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: at most p_limit jobs of the tenant, the newest first (job ids are UUIDv7), older than p_before where given, of one
--   relay and in one status where given. No bodies. Changes nothing, locks nothing: so a job whose completion is just being
--   committed past its deadline reads 'expired' here for a moment. relay.poll waits for such a completion.
-- Errors: S2001, S2002, S2003; S2020 an unknown status.
create or replace function relay.list_jobs(
  p_tenant text, p_relay text default null, p_status text default null, p_limit bigint default 50, p_before uuid default null)
returns table (
  job_id uuid, relay_id text, operation text, status text, attempt bigint, max_attempts bigint, claimed_by text,
  error_code text, created_at timestamptz, completed_at timestamptz, expires_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  -- In a variable: COALESCE counts as leaky, so under row security the comparison would be no index condition, and each
  -- page would read all the pages before it.
  v_older  uuid := coalesce(p_before, 'ffffffff-ffff-ffff-ffff-ffffffffffff');
begin
  if p_status is not null and p_status not in ('pending', 'claimed', 'succeeded', 'failed', 'expired') then
    raise exception 'status must be pending, claimed, succeeded, failed or expired' using errcode = 'S2020';
  end if;
  return query
  select r.job_id, r.relay_id, r.operation, s.status, s.attempt, r.max_attempts, s.claimed_by, s.error_code, r.created_at,
         s.completed_at, r.expires_at
  from relay.s2r_relay_dispatch_request r
  cross join lateral (
    select d.status, d.attempt, d.claimed_by, d.error_code, d.completed_at
    from relay.s2r_relay_dispatch_result d where d.tenant_id = v_tenant and d.job_id = r.job_id
    union all
    select case when q.expires_at <= v_now then 'expired' when q.state = 'claimed' then 'claimed' else 'pending' end,
           q.attempt, q.claimed_by, null, null
    from relay.s2r_relay_dispatch_queue q where q.tenant_id = v_tenant and q.job_id = r.job_id
    limit 1) s
  where r.tenant_id = v_tenant
    and r.job_id < v_older
    and (p_relay is null or r.relay_id = p_relay)
    and (p_status is null or s.status = p_status)
  order by r.job_id desc
  limit least(greatest(p_limit, 1), 10000);
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: how many jobs of the tenant stand in the queue, per relay, and how old the oldest claimable one is.
create or replace function relay.backlog(p_tenant text)
returns table (relay_id text, ready bigint, delayed bigint, claimed bigint, oldest interval)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
begin
  return query
  select q.relay_id, count(*) filter (where q.state = 'ready'), count(*) filter (where q.state = 'delayed'),
         count(*) filter (where q.state = 'claimed'), clock_timestamp() - min(q.created_at) filter (where q.state = 'ready')
  from relay.s2r_relay_dispatch_queue q where q.tenant_id = v_tenant
  group by q.relay_id order by q.relay_id;
  perform relay.unbind_tenant(v_before);
end $$;
