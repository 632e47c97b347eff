-- role: relay_api
-- room: dispatch
--
-- What the holder of a claim may say of it. Every verb matches job id + fence + claimed_by + relay and answers per input row
--   applied    it was the current claim, and this call changed it
--   repeated   (complete) this very completion was applied by an earlier call whose reply was lost
--   stale      it is not the current claim (or unknown, foreign, past its deadline): nothing was changed for the holder
--   busy       (heartbeat) somebody has the row locked this moment; ask again
-- and, in status, where the job stands then, as far as the caller may know. Arrays go side by side; p_tenants may name
-- several tenants (null = the bound one). Rows are locked in the order of tenant, job id.
--
-- Each verb first finds its rows by key and locks them, in one statement, and then reads the clock, and then writes (see
-- 25_dispatch_rows.sql). A row whose lock had to be waited for is looked at anew, in the version that it has then.

-- Guarantees: ends each job that is currently claimed so, once: 'succeeded' or 'failed' as given, or 'expired' when the
--   clock, read once the row locks are held, is past the deadline (outcome stale). Result stored and queue row gone in one
--   transaction. A valid completion is never refused because it had to wait for its row.
--   Rows come grouped: the first p_counts[1] of them are of tenant p_tenants[1], and so on; n counts through. An array of
--   values that is null as a whole stands for nulls, p_statuses for 'succeeded'. The work for a tenant depends on its own
--   rows and not on the others'.
--   p_notify: this transaction rings each tenant's result channel with the jobs that this call has ended (see relay.ring).
-- Errors: S2001, S2002, S2003; S2020 array lengths, counts, a tenant twice, a status that is not succeeded or failed; S2022 a
--   value that is too large.
-- Locks: the queue rows, FOR UPDATE, in the order of tenant, job id; waits for them.
create or replace function relay.complete(
  p_relay text, p_claimed_by text, p_tenants text[], p_counts bigint[], p_job_ids uuid[], p_fences bigint[],
  p_statuses text[], p_response_statuses bigint[], p_response_headers text[], p_response_bodies bytea[],
  p_error_codes text[], p_error_messages text[], p_notify boolean default false)
returns table (n bigint, outcome text, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_count    bigint := coalesce(cardinality(p_job_ids), 0);
  v_tenants  text[] := p_tenants;
  v_firsts   bigint[] := '{1}';
  v_ends     bigint[] := p_counts;
  v_distinct bigint;
  v_first    bigint;
  v_end      bigint := coalesce(p_counts[1], 0);
  v_before   text;
  v_tenant   text;
  v_ns       bigint[];
  v_rows     tid[];
begin
  if (cardinality(p_fences) = v_count and cardinality(p_counts) = cardinality(p_tenants) and 0 < all (p_counts)
      and coalesce(cardinality(p_statuses), v_count) = v_count and coalesce(cardinality(p_response_statuses), v_count) = v_count
      and coalesce(cardinality(p_response_headers), v_count) = v_count
      and coalesce(cardinality(p_response_bodies), v_count) = v_count
      and coalesce(cardinality(p_error_codes), v_count) = v_count
      and coalesce(cardinality(p_error_messages), v_count) = v_count) is not true then
    raise exception 'the arrays of complete must have one length, and p_counts divide it among the tenants'
      using errcode = 'S2020';
  end if;
  if not p_statuses <@ '{succeeded,failed}' then
    raise exception 'complete takes the status succeeded or failed' using errcode = 'S2020';
  end if;
  if (case when v_count = 1
       then octet_length(p_response_bodies[1]) > 65536 or octet_length(p_error_messages[1]) > 8192 or octet_length(p_error_codes[1]) > 200
            or octet_length(p_response_headers[1]) > 64 and octet_length(p_response_headers[1]::jsonb::text) > 65536
       else pg_column_size(p_response_bodies) > 8192 or pg_column_size(p_response_headers) > 100
            or pg_column_size(p_error_messages) > 8192 or pg_column_size(p_error_codes) > 200 end) then
    perform relay.check_parts(p_response_headers, p_response_bodies, p_error_codes, p_error_messages);
  end if;
  -- In the order of their names, for the locks.
  if cardinality(p_tenants) > 1 then
    select array_agg(u.tenant order by u.tenant collate "C"), array_agg(u.last - u.count + 1 order by u.tenant collate "C"),
           array_agg(u.last order by u.tenant collate "C"), max(u.last), count(distinct coalesce(u.tenant, ''))
    into v_tenants, v_firsts, v_ends, v_end, v_distinct
    from (select c.tenant, c.count, sum(c.count) over (order by c.i)::bigint as last
          from unnest(p_tenants, p_counts) with ordinality as c (tenant, count, i)) u;
  end if;
  if v_end <> v_count or v_distinct < cardinality(p_tenants) then
    raise exception 'p_counts must add up to the number of jobs, and no tenant be there twice' using errcode = 'S2020';
  end if;

  -- Below, each tenant's values are taken by their places in the arrays of all: nothing is done for other rows.
  for v_i in 1..cardinality(p_tenants) loop
    v_first := v_firsts[v_i];
    v_end := v_ends[v_i];
    v_before := relay.bind_tenant(v_tenants[v_i], p_relay, '{worker}');
    v_tenant := coalesce(v_tenants[v_i], v_before);

    select array_agg(i.n), array_agg(l.row_id) into v_ns, v_rows
    from (select distinct on (u.job_id, u.fence) u.n, u.job_id, u.fence
          from (select i as n, p_job_ids[i] as job_id, p_fences[i] as fence from generate_series(v_first, v_end) i) u
          order by u.job_id, u.fence, u.n) i
    cross join lateral (
      select q.ctid as row_id from relay.s2r_relay_dispatch_queue q
      where q.tenant_id = v_tenant and q.job_id = i.job_id and q.fence = i.fence and q.claimed_by = p_claimed_by
        and q.relay_id = p_relay
      limit 1 for update) l;

    if v_ns is not null then
      return query
      select e.n, case when e.status = 'expired' then 'stale' else 'applied' end, e.status
      from relay.end_jobs(
        v_tenant, clock_timestamp(), true, 'the deadline passed before the completion', v_ns, v_rows, 'succeeded',
        p_statuses, p_response_statuses, p_response_headers, p_response_bodies, p_error_codes, p_error_messages) e;
      if p_notify then
        -- 33 bytes an id: 200 of them stay below the 8000 bytes that a payload may have.
        perform relay.notify(relay.channel_name('result', v_tenant, null), string_agg(replace(d.job_id::text, '-', ''), ','))
        from (select p_job_ids[u.n] as job_id, (u.i - 1) / 200 as part
              from unnest(v_ns) with ordinality as u (n, i)) d
        group by d.part;
      end if;
    end if;

    if cardinality(v_ns) is distinct from v_end - v_first + 1 then
      -- A new statement, and so a new snapshot: it sees a completion that committed while the lock was waited for.
      return query
      select u.n, case when r.mine then 'repeated' else 'stale' end, r.status
      from (select i as n, p_job_ids[i] as job_id, p_fences[i] as fence
            from (select i from generate_series(v_first, v_end) i except select unnest(v_ns)) m (i)) u
      left join lateral (
        -- Only the claim's own completion leaves fence and claimed_by as they were: see end_jobs.
        select d.status, d.fence = u.fence and d.claimed_by = p_claimed_by and d.status <> 'expired' as mine
        from relay.s2r_relay_dispatch_result d
        where d.tenant_id = v_tenant and d.job_id = u.job_id and d.relay_id = p_relay limit 1) r on true;
      -- What is 'repeated' must be as safe as what is 'applied'.
      perform relay.confirm_commit();
    end if;
    v_before := relay.set_tenant(v_before);
  end loop;
end $$;

-- Guarantees: each current claim among the inputs leases on for p_lease from the clock at the write; also one whose lease
--   has run out but has not been taken back. A claim that was taken back is stale and stays so.
-- Errors: S2001, S2002, S2003; S2020 array lengths, a lease that is not positive or above a day.
-- Locks: FOR NO KEY UPDATE SKIP LOCKED on the queue rows. It never waits, so it never holds up a completion for long.
create or replace function relay.heartbeat(
  p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_lease interval)
returns table (n bigint, outcome text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_count  bigint := coalesce(cardinality(p_job_ids), 0);
  v_name   text;
  v_before text;
  v_tenant text;
  v_places bigint[];
  v_held   bigint[];
  v_rows   tid[];
begin
  if (cardinality(p_tenants), cardinality(p_fences)) is distinct from (v_count, v_count)
     or (p_lease > interval '0' and p_lease <= interval '1 day') is not true then
    raise exception 'heartbeat needs arrays of one length and a positive lease of at most a day' using errcode = 'S2020';
  end if;
  -- The places of each tenant's rows, so that nothing is done for it with other rows.
  for v_name, v_places in
    select u.tenant, array_agg(u.n) from unnest(p_tenants) with ordinality as u (tenant, n)
    group by u.tenant order by u.tenant collate "C"
  loop
    v_before := relay.bind_tenant(v_name, p_relay, '{worker}');
    v_tenant := coalesce(v_name, v_before);

    select array_agg(i.n), array_agg(l.row_id) into v_held, v_rows
    from (select u.n, p_job_ids[u.n] as job_id, p_fences[u.n] as fence
          from unnest(v_places) as u (n) order by p_job_ids[u.n]) i
    cross join lateral (
      select q.ctid as row_id from relay.s2r_relay_dispatch_queue q
      where q.tenant_id = v_tenant and q.job_id = i.job_id and q.fence = i.fence and q.claimed_by = p_claimed_by
        and q.relay_id = p_relay
      limit 1 for no key update skip locked) l;
    -- The clock after the locks.
    perform relay.renew_jobs(v_tenant, v_rows, clock_timestamp() + p_lease);

    return query select h.n, 'applied' from unnest(v_held) as h (n);
    if cardinality(v_held) is distinct from cardinality(v_places) then
      return query
      select u.n, case when l.here then 'busy' else 'stale' end
      from (select unnest(v_places) except select unnest(v_held)) as u (n)
      left join lateral (
        select true as here from relay.s2r_relay_dispatch_queue q
        where q.tenant_id = v_tenant and q.job_id = p_job_ids[u.n] and q.fence = p_fences[u.n]
          and q.claimed_by = p_claimed_by and q.relay_id = p_relay limit 1) l on true;
    end if;
    v_before := relay.set_tenant(v_before);
  end loop;
end $$;

-- Guarantees: puts each current claim among the inputs back, to be claimed again after p_delays[i]. p_give_backs[i] true: the
--   attempt does not count (Snooze); false: it does (Retry), and with none left, or a delay past the deadline, the job
--   ends 'failed' at once with the error given. Answers in status: pending, failed or expired.
-- Errors: S2001, S2002, S2003; S2020 array lengths; S2021 a delay that is negative or not finite; S2022 an error that is too long.
-- Locks: the queue rows, FOR UPDATE, in job id order; waits for them.
create or replace function relay.retry(
  p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_delays interval[],
  p_give_backs boolean[], p_error_codes text[], p_error_messages text[])
returns table (n bigint, outcome text, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_count  bigint := coalesce(cardinality(p_job_ids), 0);
  v_name   text;
  v_before text;
  v_tenant text;
  v_places bigint[];
  v_ns     bigint[];
  v_rows   tid[];
begin
  if (cardinality(p_tenants), cardinality(p_fences), cardinality(p_delays), cardinality(p_give_backs),
      cardinality(p_error_codes), cardinality(p_error_messages))
     is distinct from (v_count, v_count, v_count, v_count, v_count, v_count) then
    raise exception 'the arrays of retry must have one length' using errcode = 'S2020';
  end if;
  if exists (select 1 from unnest(p_delays) as u (delay)
             where coalesce(u.delay < interval '0' or u.delay > interval '10000 days', true)) then
    raise exception 'a delay must be finite and not negative' using errcode = 'S2021';
  end if;
  if pg_column_size(p_error_messages) > 8192 or pg_column_size(p_error_codes) > 200 then
    perform relay.check_parts(null, null, p_error_codes, p_error_messages);
  end if;
  for v_name, v_places in
    select u.tenant, array_agg(u.n) from unnest(p_tenants) with ordinality as u (tenant, n)
    group by u.tenant order by u.tenant collate "C"
  loop
    v_before := relay.bind_tenant(v_name, p_relay, '{worker}');
    v_tenant := coalesce(v_name, v_before);

    select array_agg(i.n), array_agg(l.row_id) into v_ns, v_rows
    from (select distinct on (u.job_id, u.fence) u.n, u.job_id, u.fence
          from (select i as n, p_job_ids[i] as job_id, p_fences[i] as fence from unnest(v_places) i) u
          order by u.job_id, u.fence, u.n) i
    cross join lateral (
      select q.ctid as row_id from relay.s2r_relay_dispatch_queue q
      where q.tenant_id = v_tenant and q.job_id = i.job_id and q.fence = i.fence and q.claimed_by = p_claimed_by
        and q.relay_id = p_relay
      limit 1 for update) l;

    if v_ns is not null then
      return query
      select b.n, 'applied', b.status
      from relay.return_jobs(v_tenant, clock_timestamp(), v_ns, v_rows, p_give_backs, p_delays, p_error_codes,
                             p_error_messages) b;
    end if;
    return query
    select u.n, 'stale', null::text from (select unnest(v_places) except select unnest(v_ns)) as u (n);
    v_before := relay.set_tenant(v_before);
  end loop;
end $$;

-- Guarantees: for a relay that stops. p_started[i] false: the handler never began, the attempt is given back and the job is
--   pending at once. True: the attempt is used; with attempts left the job is pending at once, with none it ends 'failed',
--   S2R-RELAY-STOPPED, at once.
-- Errors, locks: as retry.
create or replace function relay.release(
  p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_started boolean[])
returns table (n bigint, outcome text, status text)
language sql security definer
set search_path = pg_catalog, pg_temp
as $$
  select r.n, r.outcome, r.status
  from relay.retry(
    p_relay, p_claimed_by, p_tenants, p_job_ids, p_fences,
    array_fill(interval '0', array[cardinality(p_job_ids)]),
    (select coalesce(array_agg(not s.started order by s.n), '{}') from unnest(p_started) with ordinality as s (started, n)),
    array_fill('S2R-RELAY-STOPPED'::text, array[cardinality(p_job_ids)]),
    array_fill('the relay stopped while the handler ran, and no attempt is left'::text, array[cardinality(p_job_ids)])) r
$$;

-- Guarantees: takes back at most p_limit claims of the tenant (p_relay null = of all its relays) whose lease has run out: with
--   attempts left they are pending at once, else they end 'failed', S2R-LEASE-LOST, or 'expired' past their deadline.
--   A claim that is being renewed, completed or released at this moment is not touched.
-- Errors: S2001, S2002, S2003.
-- Locks: FOR UPDATE SKIP LOCKED. It never waits. Call relay.reclaim, which first looks at the age of the session.
create or replace function relay.reclaim_lost(p_tenant text, p_relay text, p_limit bigint)
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
  v_count  int;
  v_ns     bigint[];
  v_rows   tid[];
begin
  if p_relay is null and not relay.login_is(array['gateway', 'worker', 'operator'], v_tenant) then
    raise exception 'login % is bound to single relays and must name one', session_user using errcode = 'S2003';
  end if;
  -- The order is there for the index that gives it, which reads no row that is not claimed.
  select count(*), array_agg(l.row_id) into v_count, v_rows
  from (select q.ctid as row_id from relay.s2r_relay_dispatch_queue q
        where q.tenant_id = v_tenant and (p_relay is null or q.relay_id = p_relay) and q.state = 'claimed'
          and q.lease_expires_at < v_now
        order by q.relay_id, q.claimed_at limit p_limit for update skip locked) l;
  if v_count > 0 then
    select array_agg(i) into v_ns from generate_series(1, v_count) i;
    return query
    select v_tenant, b.relay_id, b.job_id, b.status
    from relay.return_jobs(
      v_tenant, v_now, v_ns, v_rows, array_fill(false, array[v_count]), array_fill(interval '0', array[v_count]),
      array_fill('S2R-LEASE-LOST'::text, array[v_count]),
      array_fill('the relay stopped renewing its lease, and no attempt is left'::text, array[v_count])) b;
  end if;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: as reclaim_lost, for each tenant in turn (null = the bound one), at most p_limit in all; but none before
--   this session is p_lease old. A restart or failover cuts every session, and the holders get one lease to come back.
-- SECURITY INVOKER, see session_age.
create or replace function relay.reclaim(p_relay text, p_tenants text[], p_limit bigint, p_lease interval)
returns table (tenant_id text, relay_id text, job_id uuid, status text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  v_name text;
  v_left bigint := case when relay.session_age() >= p_lease then p_limit else 0 end;
  v_got  bigint;
begin
  foreach v_name in array p_tenants loop
    -- With nothing left to take, too: who is not bound to a tenant is told so and not that there is nothing.
    return query select r.tenant_id, r.relay_id, r.job_id, r.status from relay.reclaim_lost(v_name, p_relay, v_left) r;
    get diagnostics v_got = row_count;
    v_left := v_left - v_got;
  end loop;
end $$;
