-- role: relay_api
-- room: dispatch
--
-- Enqueue. Job ids are made by the client before the first try (UUIDv7), so that a call whose reply was lost is simply
-- made again and finds its own rows.

-- Guarantees: on commit every job of the arrays is stored once, request and queue row together; a job id that is there
--   already is left alone, also when that job has ended since. Returns those ids; '{}' = all are new. These are as safe
--   at the commit as if this call had stored them (relay.confirm_commit).
--   Each array beside the job ids holds a value per job, or one value, which is for all of them; or it is null, which leaves
--   headers '{}', an empty body, one attempt, no ttl, no deadline, no delay.
--   Deadline: the job's expires_at, else the database clock + its ttl. A delay above 0 = not claimable before that. Rings
--   nothing unless p_notify.
-- Errors: S2001, S2002, S2003; S2020 array lengths, or a job id is there twice; S2021 a deadline in the past, a ttl or
--   delay that is not positive or not finite; S2022 a body or headers that are too large. Any error leaves nothing stored.
-- Locks: inserts only; waits for a concurrent insert of the same job id. With p_notify the commit takes the database-wide
--   notification lock until its WAL is flushed.
create or replace function relay.enqueue(
  p_tenant text, p_job_ids uuid[], p_relay_ids text[], p_operations text[], p_headers text[], p_bodies bytea[],
  p_max_attempts bigint[], p_ttls interval[], p_expires_at timestamptz[], p_delays interval[], p_notify boolean default false)
returns uuid[]
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
  v_new    jsonb;
  v_queued bigint;
  v_known  uuid[] := '{}';
  v_name   text;
  -- What stands for all jobs, null where each has its own.
  v_relay    text := case when cardinality(p_relay_ids) = 1 then p_relay_ids[1] end;
  v_operation text := case when cardinality(p_operations) = 1 then p_operations[1] end;
  v_headers  jsonb := case when p_headers is null then '{}' when cardinality(p_headers) = 1 then p_headers[1]::jsonb end;
  v_body     bytea := case when p_bodies is null then '' when cardinality(p_bodies) = 1 then p_bodies[1] end;
  v_attempts bigint := case when p_max_attempts is null then 1 when cardinality(p_max_attempts) = 1 then p_max_attempts[1] end;
  v_ttl      interval := case when cardinality(p_ttls) = 1 then p_ttls[1] end;
  v_expires  timestamptz := case when cardinality(p_expires_at) = 1 then p_expires_at[1] end;
  v_delay    interval := case when cardinality(p_delays) = 1 then p_delays[1] end;
begin
  if v_count is null or cardinality(p_relay_ids) is null or cardinality(p_operations) is null
     or cardinality(p_relay_ids) not in (1, v_count) or cardinality(p_operations) not in (1, v_count)
     or cardinality(p_headers) not in (1, v_count) or cardinality(p_bodies) not in (1, v_count)
     or cardinality(p_max_attempts) not in (1, v_count) or cardinality(p_ttls) not in (1, v_count)
     or cardinality(p_expires_at) not in (1, v_count) or cardinality(p_delays) not in (1, v_count) then
    raise exception 'an array of enqueue must hold a value per job, or one for all; only relays and operations cannot be null'
      using errcode = 'S2020';
  end if;
  -- What stands for all, and what comes alone, by itself: check_parts costs what a lone job does.
  if octet_length(v_body) > 65536 or octet_length(v_headers::text) > 65536
     or v_count > 1 and (v_body is null and pg_column_size(p_bodies) > 8192 or v_headers is null and pg_column_size(p_headers) > 100) then
    perform relay.check_parts(p_headers, p_bodies, null, null);
  end if;
  if v_count = 0 then
    perform relay.unbind_tenant(v_before);
    return v_known;
  end if;
  if v_count = 1 then
    -- As below, as plain expressions: a statement would cost more than all of them.
    v_wrong := coalesce(v_ttl <= interval '0' or v_ttl > interval '10000 days', v_expires is null)
               or coalesce(not isfinite(v_expires), false)
               or coalesce(v_delay < interval '0' or v_delay > interval '10000 days', false)
               or coalesce(v_expires is null and v_delay >= v_ttl, false);
    v_late := v_expires <= v_now + coalesce(v_delay, interval '0');
  else
    -- As many rows as the longest of the three has values; none where neither ttl nor deadline is given.
    select bool_or(coalesce(u.ttl <= interval '0' or u.ttl > interval '10000 days', u.expires_at is null)
                   or coalesce(not isfinite(u.expires_at), false)
                   or coalesce(u.delay < interval '0' or u.delay > interval '10000 days', false)
                   or coalesce(u.expires_at is null and u.delay >= u.ttl, false)),
           bool_or(u.expires_at <= v_now + coalesce(u.delay, interval '0'))
    into v_wrong, v_late
    from (select coalesce(v_ttl, a.ttl) as ttl, coalesce(v_delay, a.delay) as delay,
                 coalesce(v_expires, a.expires_at) as expires_at
          from unnest(p_ttls, p_delays, p_expires_at) as a (ttl, delay, expires_at)) u;
  end if;
  if coalesce(v_wrong, v_count > 0) then
    raise exception 'a ttl must be positive, a delay not negative and less than it, and a deadline finite'
      using errcode = 'S2021';
  end if;

  if v_count = 1 then
    -- What the rest does, for a job that comes alone: there is nothing to unnest, to sort or to count.
    insert into relay.s2r_relay_dispatch_request
      (tenant_id, job_id, relay_id, operation, request_headers, request_body, max_attempts, created_at, expires_at)
    values (v_tenant, p_job_ids[1], v_relay, v_operation, v_headers, v_body, v_attempts, v_now,
            coalesce(v_expires, v_now + v_ttl))
    on conflict (tenant_id, job_id) do nothing;
    if found then
      v_stored := p_job_ids;
      insert into relay.s2r_relay_dispatch_queue
        (tenant_id, job_id, relay_id, seq, state, max_attempts, available_at, created_at, expires_at)
      values (v_tenant, p_job_ids[1], v_relay, v_seq, case when v_delay > interval '0' then 'delayed' else 'ready' end,
              v_attempts, case when v_delay > interval '0' then v_now + v_delay end, v_now,
              coalesce(v_expires, v_now + v_ttl));
      if p_notify then
        perform relay.notify(relay.channel_name('wake', v_tenant, v_relay), '');
      end if;
    else
      v_known := p_job_ids;
    end if;
  else
    -- The two inserts each read the arrays, and not one the other: so both can be sent whole to one shard. As a rule none of the
    -- ids is there, and ON CONFLICT, which looks each up before it stores it, costs a sixth of the whole call; a
    -- subtransaction costs as much as it saves for some twenty.
    if v_count >= 32 then
      begin
        with stored as (
          insert into relay.s2r_relay_dispatch_request
            (tenant_id, job_id, relay_id, operation, request_headers, request_body, max_attempts, created_at, expires_at)
          select v_tenant, u.job_id, coalesce(v_relay, u.relay_id), coalesce(v_operation, u.operation),
                 coalesce(v_headers, u.headers::jsonb), coalesce(v_body, u.body), coalesce(v_attempts, u.max_attempts), v_now,
                 coalesce(v_expires, u.expires_at, v_now + coalesce(v_ttl, u.ttl))
          from unnest(p_job_ids, p_relay_ids, p_operations, p_headers, p_bodies, p_max_attempts, p_ttls, p_expires_at)
               as u (job_id, relay_id, operation, headers, body, max_attempts, ttl, expires_at)
          order by u.job_id
          returning 1)
        select count(*) into v_queued from stored;
        v_stored := p_job_ids;
      exception when unique_violation then
        v_stored := null;
      end;
    end if;
    if v_stored is null then
      with stored as (
        insert into relay.s2r_relay_dispatch_request
          (tenant_id, job_id, relay_id, operation, request_headers, request_body, max_attempts, created_at, expires_at)
        select v_tenant, u.job_id, coalesce(v_relay, u.relay_id), coalesce(v_operation, u.operation),
               coalesce(v_headers, u.headers::jsonb), coalesce(v_body, u.body), coalesce(v_attempts, u.max_attempts), v_now,
               coalesce(v_expires, u.expires_at, v_now + coalesce(v_ttl, u.ttl))
        from unnest(p_job_ids, p_relay_ids, p_operations, p_headers, p_bodies, p_max_attempts, p_ttls, p_expires_at)
             as u (job_id, relay_id, operation, headers, body, max_attempts, ttl, expires_at)
        order by u.job_id
        on conflict (tenant_id, job_id) do nothing
        returning job_id)
      select array_agg(s.job_id) into v_stored from stored s;
    end if;

    if coalesce(cardinality(v_stored), 0) < v_count then
      if (select count(distinct u.job_id) from unnest(p_job_ids) as u (job_id)) < v_count then
        raise exception 'a job id is there twice' using errcode = 'S2020';
      end if;
      -- A map, for an array would be searched from its beginning for each job.
      select coalesce(jsonb_object_agg(s.job_id, null), '{}') into v_new from unnest(v_stored) as s (job_id);
      select array_agg(u.job_id) into v_known from unnest(p_job_ids) as u (job_id) where not v_new ? u.job_id::text;
    end if;
    with queued as (
      insert into relay.s2r_relay_dispatch_queue
        (tenant_id, job_id, relay_id, seq, state, max_attempts, available_at, created_at, expires_at)
      select v_tenant, u.job_id, coalesce(v_relay, u.relay_id), v_seq + u.n - 1,
             case when coalesce(v_delay, u.delay) > interval '0' then 'delayed' else 'ready' end,
             coalesce(v_attempts, u.max_attempts),
             case when coalesce(v_delay, u.delay) > interval '0' then v_now + coalesce(v_delay, u.delay) end, v_now,
             coalesce(v_expires, u.expires_at, v_now + coalesce(v_ttl, u.ttl))
      from unnest(p_job_ids, p_relay_ids, p_max_attempts, p_ttls, p_expires_at, p_delays) with ordinality
           as u (job_id, relay_id, max_attempts, ttl, expires_at, delay, n)
      where v_new is null or v_new ? u.job_id::text
      returning 1)
    select count(*) into v_queued from queued;
    if v_queued <> coalesce(cardinality(v_stored), 0) then
      raise exception '% requests were stored, but % queue rows', coalesce(cardinality(v_stored), 0), v_queued;
    end if;
    if p_notify then
      for v_name in
        select distinct coalesce(v_relay, u.relay_id) from unnest(p_job_ids, p_relay_ids) as u (job_id, relay_id)
        where v_new is null or v_new ? u.job_id::text
      loop
        perform relay.notify(relay.channel_name('wake', v_tenant, v_name), '');
      end loop;
    end if;
  end if;

  -- Only for jobs that this call has stored: one that is called again after its deadline finds its rows.
  if v_late and exists (
       select 1 from unnest(p_job_ids, p_expires_at, p_delays) as u (job_id, expires_at, delay)
       where coalesce(v_expires, u.expires_at) <= v_now + coalesce(v_delay, u.delay, interval '0')
         and (cardinality(v_stored) = v_count or v_new ? u.job_id::text)) then
    raise exception 'expires_at has passed before the job could be claimed, by the clock of the database'
      using errcode = 'S2021';
  end if;
  if v_known <> '{}' then
    perform relay.confirm_commit();
  end if;
  perform relay.unbind_tenant(v_before);
  return v_known;
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
      perform relay.confirm_commit();
      perform relay.unbind_tenant(v_before);
      return query select v_found.job_id, true;
      return;
    end if;
    -- Purged between the two statements: the key is free again. (Under REPEATABLE READ the insert has raised 40001.)
  end loop;
end $$;
