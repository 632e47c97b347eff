-- role: relay_api
--
-- Enqueue. Job ids are made by the client before the first try (UUIDv7), so that a call whose reply was lost is simply
-- made again and finds its own rows.

-- Guarantees: on commit every job of the arrays is stored once, request and queue row together; a job id that is there
--   already is left alone and reported inserted = false, also when that job has ended since. One row per input, in order.
--   Deadline: p_expires_at[i], else the database clock + p_ttls[i]. p_delays[i] > 0 = not claimable before that. Rings
--   nothing unless p_notify.
-- Errors: S2001, S2002, S2003; S2020 array lengths differ, or a job id is there twice; S2021 a deadline in the past, a ttl or
--   delay that is not positive or not finite. Any error leaves nothing stored.
-- Locks: inserts only; waits for a concurrent insert of the same job id.
create or replace function relay.enqueue(
  p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[],
  p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamptz[], p_delays interval[], p_notify boolean default false)
returns table (n bigint, inserted boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
-- A ttl of a day is 24 hours, also where the session's time zone changes its clocks.
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_seq    bigint := (extract(epoch from v_now) * 1000000)::bigint;
  v_count  bigint := cardinality(p_job_ids);
  v_wrong  boolean;
  v_late   boolean;
  v_stored uuid[];
  v_queued bigint;
  v_relay  text;
begin
  if (cardinality(p_relay_ids), cardinality(p_operations), cardinality(p_headers), cardinality(p_bodies),
      cardinality(p_max_attempts), cardinality(p_ttls), cardinality(p_expires_at), cardinality(p_delays))
     is distinct from (v_count, v_count, v_count, v_count, v_count, v_count, v_count, v_count) then
    raise exception 'the arrays of enqueue must have one length' using errcode = 'S2020';
  end if;
  select bool_or(coalesce(u.ttl <= interval '0' or u.ttl > interval '10000 days', u.expires_at is null)
                 or not isfinite(u.expires_at) or u.delay < interval '0' or u.delay > interval '10000 days'
                 or u.expires_at is null and u.delay >= u.ttl),
         bool_or(u.expires_at <= v_now + coalesce(u.delay, interval '0'))
  into v_wrong, v_late
  from unnest(p_ttls, p_delays, p_expires_at) as u (ttl, delay, expires_at);
  if v_wrong then
    raise exception 'a ttl must be positive, a delay not negative and less than it, and a deadline finite'
      using errcode = 'S2021';
  end if;

  -- The two inserts each read the arrays, and not one the other: so both can be sent whole to one shard.
  with stored as (
    insert into relay.s2r_relay_dispatch_request
      (tenant_id, job_id, relay_id, operation, request_headers, request_body, max_attempts, created_at, expires_at)
    select v_tenant, u.job_id, u.relay_id, u.operation, u.headers::jsonb, u.body, u.max_attempts, v_now,
           coalesce(u.expires_at, v_now + u.ttl)
    from unnest(p_job_ids, p_relay_ids, p_operations, p_headers, p_bodies, p_max_attempts, p_ttls, p_expires_at)
         as u (job_id, relay_id, operation, headers, body, max_attempts, ttl, expires_at)
    order by u.job_id
    on conflict (tenant_id, job_id) do nothing
    returning job_id)
  select array_agg(s.job_id) into v_stored from stored s;

  if cardinality(v_stored) < v_count and (select count(distinct u.job_id) from unnest(p_job_ids) as u (job_id)) < v_count then
    raise exception 'a job id is there twice' using errcode = 'S2020';
  end if;
  with queued as (
    insert into relay.s2r_relay_dispatch_queue
      (tenant_id, job_id, relay_id, seq, state, max_attempts, available_at, created_at, expires_at)
    select v_tenant, u.job_id, u.relay_id, v_seq + u.n - 1,
           case when u.delay > interval '0' then 'delayed' else 'ready' end, u.max_attempts,
           case when u.delay > interval '0' then v_now + u.delay end, v_now, coalesce(u.expires_at, v_now + u.ttl)
    from unnest(p_job_ids, p_relay_ids, p_max_attempts, p_ttls, p_expires_at, p_delays) with ordinality
         as u (job_id, relay_id, max_attempts, ttl, expires_at, delay, n)
    where cardinality(v_stored) = v_count or u.job_id = any (v_stored)
    returning 1)
  select count(*) into v_queued from queued;
  if v_queued <> coalesce(cardinality(v_stored), 0) then
    raise exception '% requests were stored, but % queue rows', coalesce(cardinality(v_stored), 0), v_queued;
  end if;

  -- Only for jobs that this call has stored: one that is called again after its deadline finds its rows.
  if v_late and exists (select 1 from unnest(p_job_ids, p_expires_at, p_delays) as u (job_id, expires_at, delay)
                        where u.expires_at <= v_now + coalesce(u.delay, interval '0') and u.job_id = any (v_stored)) then
    raise exception 'expires_at has passed before the job could be claimed, by the clock of the database'
      using errcode = 'S2021';
  end if;
  if p_notify then
    for v_relay in
      select distinct u.relay_id from unnest(p_job_ids, p_relay_ids) as u (job_id, relay_id) where u.job_id = any (v_stored)
    loop
      perform pg_notify(relay.channel_name('wake', v_tenant, v_relay), '');
    end loop;
  end if;
  perform relay.unbind_tenant(v_before);
  return query
  select u.n, coalesce(cardinality(v_stored) = v_count or u.job_id = any (v_stored), false)
  from unnest(p_job_ids) with ordinality as u (job_id, n);
end $$;

-- Guarantees: the digest that says whether two requests are the same: relay, operation, headers, body and max_attempts.
--   A pure function of them; jsonb has put the headers in one order. The time limits are no part of it.
create or replace function relay.request_digest(
  p_relay text, p_operation text, p_headers jsonb, p_body bytea, p_max_attempts bigint) returns bytea
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select sha256(convert_to(
    jsonb_build_array(p_relay, p_operation, p_headers, encode(sha256(p_body), 'hex'), p_max_attempts)::text, 'UTF8'))
$$;

-- Guarantees: one job per (tenant, key), whoever comes first; the others get the id of that job and duplicate = true. The key
--   lives exactly as long as the job's result.
-- Errors: as enqueue, and S2010 when the key stands for another request (request_digest differs).
-- Locks: waits for a transaction that is just inserting the same key, for each such one at most p_lock_timeout (a
--   millisecond at least), then 55P03.
create or replace function relay.enqueue_keyed(
  p_tenant text, p_job_id uuid, p_relay_id text, p_operation text, p_headers text, p_body bytea, p_max_attempts bigint,
  p_ttl interval, p_expires_at timestamptz, p_delay interval, p_key text, p_lock_timeout interval default '5 s',
  p_notify boolean default false)
returns table (job_id uuid, duplicate boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
-- Named here so that the value set below ends with the function and the caller keeps his own.
set lock_timeout = '5s'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_digest bytea := relay.request_digest(p_relay_id, p_operation, p_headers::jsonb, p_body, p_max_attempts);
  v_found  record;
begin
  -- 0 would be no timeout at all.
  perform set_config(
    'lock_timeout', greatest(1, coalesce(extract(epoch from p_lock_timeout) * 1000, 5000)::bigint)::text, true);
  loop
    insert into relay.s2r_relay_dispatch_key (tenant_id, idempotency_key, request_digest, job_id, created_at)
    values (v_tenant, p_key, v_digest, p_job_id, clock_timestamp())
    on conflict (tenant_id, idempotency_key) do nothing;
    if found then
      perform relay.enqueue(v_tenant, array[p_job_id], array[p_relay_id], array[p_operation], array[p_headers], array[p_body],
                            array[p_max_attempts], array[p_ttl], array[p_expires_at], array[p_delay], p_notify);
      perform relay.unbind_tenant(v_before);
      return query select p_job_id, false;
      return;
    end if;
    select k.job_id, k.request_digest into v_found from relay.s2r_relay_dispatch_key k
    where k.tenant_id = v_tenant and k.idempotency_key = p_key;
    if found then
      if v_found.request_digest <> v_digest then
        raise exception 'the idempotency key stands for another request' using errcode = 'S2010';
      end if;
      perform relay.unbind_tenant(v_before);
      return query select v_found.job_id, true;
      return;
    end if;
    -- Purged between the two statements: the key is free again. (Under REPEATABLE READ the insert has raised 40001.)
  end loop;
end $$;
