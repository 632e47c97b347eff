-- role: relay_api
-- room: dispatch
--
-- Enqueue with a bound on what waits: a job is refused where its relay has so many pending jobs already. Refused is an
-- answer and no error, so a transaction of the caller's goes on; and nothing at all is stored of what is refused.
--
--   relay.enqueue_bounded        as relay.enqueue
--   relay.enqueue_keyed_bounded  as relay.enqueue_keyed
--
-- Both count at each call, up to the bound and no further, along the indexes of what waits: 0.4 µs a job. Nothing is kept of
-- it, because a counter that enqueues and claims both write is a row that they all wait for. Who enqueues often counts
-- seldom instead: `counted` tells what there was, and with so much room the next calls can be relay.enqueue
-- (gateway_sdk/backlogs.py).
--
-- Not serializable: what others are enqueuing at the same moment is not counted.

-- Guarantees: how many jobs of the relay are pending, delayed ones included, but at most p_limit. One past its deadline counts
--   until a claim or a sweep has ended it.
-- Locks: none. Internal.
-- With the settings below, and an order, each of the two can be planned in one way only, whatever the statistics say.
create or replace function relay.pending_upto(p_tenant text, p_relay text, p_limit bigint) returns bigint
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_sort = off set enable_incremental_sort = off set enable_hashjoin = off set enable_mergejoin = off
set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_ready   bigint;
  v_delayed bigint := 0;
begin
  select count(*) into v_ready
  from (select 1 from relay.s2r_relay_dispatch_queue q
        where q.tenant_id = p_tenant and q.relay_id = p_relay and q.state = 'ready'
        order by q.seq, q.job_id limit greatest(p_limit, 0)) r;
  if v_ready < p_limit then
    select count(*) into v_delayed
    from (select 1 from relay.s2r_relay_dispatch_queue q
          where q.tenant_id = p_tenant and q.relay_id = p_relay and q.state = 'delayed'
          order by q.available_at limit p_limit - v_ready) d;
  end if;
  return v_ready + v_delayed;
end $$;

-- Guarantees: the time that the relay takes for one job: 10 s by the number of those that it has completed in the last 10 s, or
--   the like for the tenant's last 500 ends where they lie closer together. No completion counts as one. What has expired
--   counts for nothing: nobody did it.
-- Locks: none. Internal.
create or replace function relay.pace(p_tenant text, p_relay text) returns interval
language plpgsql
set enable_bitmapscan = off set enable_seqscan = off
set enable_sort = off set enable_incremental_sort = off set enable_hashjoin = off set enable_mergejoin = off
set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_now   timestamptz := clock_timestamp();
  v_since timestamptz := v_now - interval '10 s';
  v_ended bigint;
  v_done  bigint;
  v_first timestamptz;
begin
  select count(*), count(*) filter (where r.relay_id = p_relay and r.status <> 'expired'), min(r.completed_at)
  into v_ended, v_done, v_first
  from (select d.relay_id, d.status, d.completed_at from relay.s2r_relay_dispatch_result d
        where d.tenant_id = p_tenant and d.completed_at > '-infinity' and d.completed_at > v_since
        order by d.completed_at desc limit 500) r;
  return (v_now - case when v_ended = 500 then v_first else v_since end) / greatest(v_done, 1);
end $$;

-- Guarantees: when to come again: the time for a tenth of the bound, for one job at least, at that pace; from 0.1 s to 60 s.
-- Internal.
create or replace function relay.retry_after(p_pace interval, p_max_pending bigint) returns interval
language sql immutable
as $$
  select least(interval '60 s', greatest(interval '0.1 s', p_pace * least(greatest(ceil(p_max_pending / 10.0), 1), 1000000)::double precision))
$$;

-- Guarantees: as relay.enqueue for each job that is not refused. In the order of the arrays, a job is refused where the jobs
--   of its relay that are pending, and those before it in this call, are p_max_pending[i] or more (one value is for all; a
--   null is no bound). One that is stored already is never refused. p_whole: one refused job refuses all of them.
--   Rows: 'counted', one a relay with a bound: what was pending before this call, up to the highest bound of the relay there is,
--   and how long counting took;
--   'known', a job that was there already; 'full', a refused job: how many were pending before it, as far as was counted, and
--   when to come again.
-- Errors: as relay.enqueue, of what is not refused; S2020 the length of p_max_pending.
-- Locks: as relay.enqueue; where all are refused, none.
create or replace function relay.enqueue_bounded(
  p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[],
  p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamptz[], p_delays interval[], p_max_pending bigint[],
  p_whole boolean default true, p_notify boolean default false)
returns table (outcome text, job_id uuid, relay_id text, pending bigint, retry_after interval, took interval)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before  text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant  text := coalesce(p_tenant, v_before);
  v_count   bigint := coalesce(cardinality(p_job_ids), 0);
  v_relay   text := case when cardinality(p_relay_ids) = 1 then p_relay_ids[1] end;
  v_bound   bigint := case when cardinality(p_max_pending) = 1 then p_max_pending[1] end;
  v_of      record;
  v_n       bigint;
  v_limit   bigint;
  v_ahead   bigint;
  v_there   boolean;
  v_pace    interval;
  v_began   timestamptz;
  v_passes  boolean[] := '{}';
  v_refused bigint := 0;
  v_known   uuid[] := '{}';
begin
  if (cardinality(p_relay_ids) in (1, v_count) and cardinality(p_max_pending) in (1, v_count)) is not true and v_count > 0 then
    raise exception 'enqueue_bounded needs a relay and a bound per job, or one for all' using errcode = 'S2020';
  end if;
  for v_of in
    select u.relay_id, count(*) as jobs, max(u.bound) as highest, min(u.bound) as lowest, array_agg(u.n order by u.n) as places
    from (select coalesce(v_relay, a.relay_id) as relay_id, coalesce(v_bound, a.bound) as bound, a.n
          from unnest(p_job_ids, p_relay_ids, p_max_pending) with ordinality as a (job_id, relay_id, bound, n)) u
    group by u.relay_id
  loop
    continue when v_of.highest is null;
    v_pace := null;
    v_began := clock_timestamp();
    v_ahead := relay.pending_upto(v_tenant, v_of.relay_id, v_of.highest);
    outcome := 'counted'; job_id := null; relay_id := v_of.relay_id; pending := v_ahead; retry_after := null;
    took := greatest(clock_timestamp() - v_began, interval '0');
    return next;
    took := null;
    continue when v_ahead + v_of.jobs <= v_of.lowest;
    if v_passes = '{}' then
      v_passes := array_fill(true, array[v_count::int]);
    end if;
    foreach v_n in array v_of.places loop
      v_limit := coalesce(v_bound, p_max_pending[v_n]);
      v_there := false;
      if v_ahead >= v_limit then
        -- From a call whose reply was lost: it has its place.
        select true into v_there from relay.s2r_relay_dispatch_request r
        where r.tenant_id = v_tenant and r.job_id = p_job_ids[v_n] limit 1;
        if v_there is not true then
          outcome := 'full'; job_id := p_job_ids[v_n]; pending := v_ahead;
          v_pace := coalesce(v_pace, relay.pace(v_tenant, v_of.relay_id));
          retry_after := relay.retry_after(v_pace, v_limit);
          return next;
          v_passes[v_n] := false;
          v_refused := v_refused + 1;
        end if;
      end if;
      if v_passes[v_n] and v_there is not true then
        v_ahead := v_ahead + 1;
      end if;
    end loop;
  end loop;
  if v_refused = 0 then
    v_known := relay.enqueue(v_tenant, p_job_ids, p_relay_ids, p_operations, p_headers, p_bodies, p_max_attempts, p_ttls,
                             p_expires_at, p_delays, p_notify);
  elsif v_refused < v_count and not p_whole then
    -- An array of one value is for all that are left, too.
    v_known := relay.enqueue(
      v_tenant,
      (select array_agg(a.v order by a.n) from unnest(p_job_ids, v_passes) with ordinality as a (v, passes, n) where a.passes),
      case when cardinality(p_relay_ids) = 1 then p_relay_ids else
        (select array_agg(a.v order by a.n) from unnest(p_relay_ids, v_passes) with ordinality as a (v, passes, n) where a.passes) end,
      case when cardinality(p_operations) = 1 then p_operations else
        (select array_agg(a.v order by a.n) from unnest(p_operations, v_passes) with ordinality as a (v, passes, n) where a.passes) end,
      case when cardinality(p_headers) = 1 or p_headers is null then p_headers else
        (select array_agg(a.v order by a.n) from unnest(p_headers, v_passes) with ordinality as a (v, passes, n) where a.passes) end,
      case when cardinality(p_bodies) = 1 or p_bodies is null then p_bodies else
        (select array_agg(a.v order by a.n) from unnest(p_bodies, v_passes) with ordinality as a (v, passes, n) where a.passes) end,
      case when cardinality(p_max_attempts) = 1 or p_max_attempts is null then p_max_attempts else
        (select array_agg(a.v order by a.n) from unnest(p_max_attempts, v_passes) with ordinality as a (v, passes, n) where a.passes) end,
      case when cardinality(p_ttls) = 1 or p_ttls is null then p_ttls else
        (select array_agg(a.v order by a.n) from unnest(p_ttls, v_passes) with ordinality as a (v, passes, n) where a.passes) end,
      case when cardinality(p_expires_at) = 1 or p_expires_at is null then p_expires_at else
        (select array_agg(a.v order by a.n) from unnest(p_expires_at, v_passes) with ordinality as a (v, passes, n) where a.passes) end,
      case when cardinality(p_delays) = 1 or p_delays is null then p_delays else
        (select array_agg(a.v order by a.n) from unnest(p_delays, v_passes) with ordinality as a (v, passes, n) where a.passes) end,
      p_notify);
  end if;
  return query select 'known', k.id, null::text, null::bigint, null::interval, null::interval from unnest(v_known) as k (id);
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: as relay.enqueue_keyed; but a new job is refused, and then there is neither job nor key, where p_max_pending jobs of its
--   relay are pending or more. Refused: job_id null, how many were pending, as far as was counted, and when to come again. A key that
--   is in use is answered with its job, however many are pending.
-- Errors, locks: as relay.enqueue_keyed; where it is refused, no locks.
create or replace function relay.enqueue_keyed_bounded(
  p_tenant text, p_job_id uuid, p_relay_id text, p_operation text, p_headers text, p_body bytea, p_max_attempts bigint,
  p_ttl interval, p_expires_at timestamptz, p_delay interval, p_key text, p_max_pending bigint,
  p_lock_timeout interval default '5 s', p_notify boolean default false)
returns table (job_id uuid, duplicate boolean, pending bigint, retry_after interval)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant text := coalesce(p_tenant, v_before);
begin
  pending := relay.pending_upto(v_tenant, p_relay_id, p_max_pending);
  -- The key after the count: a job whose key is not here now did not count either.
  if pending >= p_max_pending and not exists (
       select 1 from relay.s2r_relay_dispatch_key k where k.tenant_id = v_tenant and k.idempotency_key = p_key) then
    retry_after := relay.retry_after(relay.pace(v_tenant, p_relay_id), p_max_pending);
    return next;
  else
    return query
    select e.job_id, e.duplicate, null::bigint, null::interval
    from relay.enqueue_keyed(v_tenant, p_job_id, p_relay_id, p_operation, p_headers, p_body, p_max_attempts, p_ttl,
                             p_expires_at, p_delay, p_key, p_lock_timeout, p_notify) e;
  end if;
  perform relay.unbind_tenant(v_before);
end $$;
