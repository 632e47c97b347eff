-- role: relay_api
--
-- What the holder of a claim may say of it. Every verb matches job id + fence + claimed_by + relay and answers per input row
--   applied    it was the current claim, and this call changed it
--   repeated   (complete) this very completion was applied by an earlier call whose reply was lost
--   stale      it is not the current claim (or unknown, foreign, past its deadline): nothing was changed for the holder
--   busy       (heartbeat) somebody has the row locked this moment; ask again
-- and, in status, where the job stands then, as far as the caller may know. Arrays go side by side; p_tenants may name
-- several tenants (null = the bound one). Rows are locked in the order of tenant, job id.
--
-- None of the statements by key says state = '…': the planner would take the partial index on that state and read every
-- claimed row for each id. claimed_by and fence say the same.

-- Guarantees: ends each job that is currently claimed so, once: 'succeeded' or 'failed' as given, or 'expired' when the
--   clock, read once the row lock is held, is past the deadline (outcome stale). Result stored and queue row gone in one
--   transaction. A row whose lock had to be waited for is checked anew, so a valid completion is never refused for that.
-- Errors: S2001, S2002, S2003; S2020 array lengths, a status that is not succeeded or failed.
-- Locks: the queue rows, FOR UPDATE, in job id order; waits for them.
create or replace function relay.complete(
  p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_statuses text[],
  p_response_statuses bigint[], p_response_headers text[], p_response_bodies bytea[], p_error_codes text[],
  p_error_messages text[])
returns table (n bigint, outcome text, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off
as $$
declare
  v_count    bigint := coalesce(cardinality(p_job_ids), 0);
  v_name     text;
  v_before   text;
  v_tenant   text;
  v_inputs   bigint;
  v_done     bigint[];
  v_statuses text[];
begin
  if (cardinality(p_tenants), cardinality(p_fences), cardinality(p_statuses), cardinality(p_response_statuses),
      cardinality(p_response_headers), cardinality(p_response_bodies), cardinality(p_error_codes),
      cardinality(p_error_messages))
     is distinct from (v_count, v_count, v_count, v_count, v_count, v_count, v_count, v_count) then
    raise exception 'the arrays of complete must have one length' using errcode = 'S2020';
  end if;
  if not p_statuses <@ array['succeeded', 'failed'] then
    raise exception 'complete takes the status succeeded or failed' using errcode = 'S2020';
  end if;

  for v_name, v_inputs in
    select u.tenant, count(*) from unnest(p_tenants) as u (tenant) group by u.tenant order by u.tenant
  loop
    v_before := relay.bind_tenant(v_name, p_relay, '{worker}');
    v_tenant := coalesce(v_name, v_before);

    with input as materialized (
      select u.n, u.job_id, u.fence, u.status, u.response_status, u.headers, u.body, u.code, u.message
      from unnest(p_tenants, p_job_ids, p_fences, p_statuses, p_response_statuses, p_response_headers, p_response_bodies,
                  p_error_codes, p_error_messages) with ordinality
           as u (tenant, job_id, fence, status, response_status, headers, body, code, message, n)
      where u.tenant is not distinct from v_name
      order by u.job_id
    ), ended as (
      delete from relay.s2r_relay_dispatch_queue q using input i
      where q.tenant_id = v_tenant and q.job_id = i.job_id and q.fence = i.fence and q.claimed_by = p_claimed_by
        and q.relay_id = p_relay
      -- RETURNING is computed once the row is locked and deleted: this clock decides.
      returning i.n, i.status, i.response_status, i.headers, i.body, i.code, i.message, q.job_id, q.attempt, q.fence,
                q.claimed_at, q.created_at, q.expires_at, clock_timestamp() as at
    ), stored as (
      insert into relay.s2r_relay_dispatch_result
        (tenant_id, job_id, relay_id, status, attempt, fence, claimed_by, response_status, response_headers, response_body,
         error_code, error_message, created_at, claimed_at, completed_at, expires_at)
      select v_tenant, e.job_id, p_relay, case when e.at >= e.expires_at then 'expired' else e.status end, e.attempt, e.fence,
             p_claimed_by,
             case when e.at < e.expires_at then e.response_status end,
             case when e.at < e.expires_at then e.headers::jsonb end,
             case when e.at < e.expires_at then e.body end,
             case when e.at < e.expires_at then e.code else 'S2R-EXPIRED' end,
             case when e.at < e.expires_at then e.message else 'the deadline passed before the completion' end,
             e.created_at, e.claimed_at, e.at, e.expires_at
      from ended e
      returning 1
    )
    select array_agg(e.n), array_agg(case when e.at >= e.expires_at then 'expired' else e.status end)
    into v_done, v_statuses from ended e;

    return query
    select d.n, case when d.status = 'expired' then 'stale' else 'applied' end, d.status
    from unnest(v_done, v_statuses) as d (n, status);

    if cardinality(v_done) is distinct from v_inputs then
      -- A new statement, and so a new snapshot: it sees a completion that committed while the one above waited.
      return query
      select u.n, case when r.mine then 'repeated' else 'stale' end, r.status
      from unnest(p_tenants, p_job_ids, p_fences) with ordinality as u (tenant, job_id, fence, n)
      left join lateral (
        select d.status, d.fence = u.fence and d.claimed_by = p_claimed_by and d.status <> 'expired' as mine
        from relay.s2r_relay_dispatch_result d
        where d.tenant_id = v_tenant and d.job_id = u.job_id and d.relay_id = p_relay limit 1) r on true
      where u.tenant is not distinct from v_name and not u.n = any (coalesce(v_done, '{}'));
    end if;
    perform relay.unbind_tenant(v_before);
  end loop;
end $$;

-- Guarantees: each current claim among the inputs leases on for p_lease from the clock at the write; also one whose lease
--   has run out but has not been taken back. A claim that was taken back is stale and stays so.
-- Errors: S2001, S2002, S2003; S2020 array lengths.
-- Locks: FOR NO KEY UPDATE SKIP LOCKED on the queue rows. It never waits, so it never holds up a completion for long.
create or replace function relay.heartbeat(
  p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_lease interval)
returns table (n bigint, outcome text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off
as $$
declare
  v_count  bigint := coalesce(cardinality(p_job_ids), 0);
  v_name   text;
  v_before text;
  v_tenant text;
  v_held   bigint[];
  v_until  timestamptz;
begin
  if (cardinality(p_tenants), cardinality(p_fences)) is distinct from (v_count, v_count) then
    raise exception 'the arrays of heartbeat must have one length' using errcode = 'S2020';
  end if;
  for v_name in select distinct u.tenant from unnest(p_tenants) as u (tenant) order by u.tenant loop
    v_before := relay.bind_tenant(v_name, p_relay, '{worker}');
    v_tenant := coalesce(v_name, v_before);

    with locked as (
      select i.n
      from (select u.n, u.job_id, u.fence
            from unnest(p_tenants, p_job_ids, p_fences) with ordinality as u (tenant, job_id, fence, n)
            where u.tenant is not distinct from v_name order by u.job_id) i
      join relay.s2r_relay_dispatch_queue q
        on q.tenant_id = v_tenant and q.job_id = i.job_id and q.fence = i.fence and q.claimed_by = p_claimed_by
       and q.relay_id = p_relay
      order by i.job_id
      for no key update of q skip locked)
    select coalesce(array_agg(l.n), '{}') into v_held from locked l;

    -- The clock after the locks; the sum before the UPDATE.
    v_until := clock_timestamp() + p_lease;
    update relay.s2r_relay_dispatch_queue q set lease_expires_at = v_until
    from unnest(p_job_ids, p_fences) with ordinality as u (job_id, fence, n)
    where u.n = any (v_held) and q.tenant_id = v_tenant and q.job_id = u.job_id and q.fence = u.fence
      and q.claimed_by = p_claimed_by and q.relay_id = p_relay;

    return query
    select u.n,
           case when u.n = any (v_held) then 'applied'
                when exists (select 1 from relay.s2r_relay_dispatch_queue q
                             where q.tenant_id = v_tenant and q.job_id = u.job_id and q.fence = u.fence
                               and q.claimed_by = p_claimed_by and q.relay_id = p_relay) then 'busy'
                else 'stale' end
    from unnest(p_tenants, p_job_ids, p_fences) with ordinality as u (tenant, job_id, fence, n)
    where u.tenant is not distinct from v_name;
    perform relay.unbind_tenant(v_before);
  end loop;
end $$;

-- Guarantees: for one bound tenant, ends each current claim among the inputs without a completion: it goes back to pending
--   when an attempt is left (or p_give_backs[i] gives the one just used back) and it would start before its deadline;
--   else it ends, 'expired' past the deadline and 'failed' with the given error before it. Every row that goes back has a
--   higher fence. p_claimed_bys[i] is the holder that the caller knows.
-- Locks: the queue rows, FOR UPDATE, in job id order; waits for them. Internal: no login may call it.
create or replace function relay.put_back(
  p_relay text, p_tenant text, p_job_ids uuid[], p_fences bigint[], p_claimed_bys text[], p_give_backs boolean[],
  p_delays interval[], p_error_codes text[], p_error_messages text[])
returns table (n bigint, outcome text, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off
as $$
declare
  v_now      timestamptz;
  v_back     bigint[];
  v_ended    bigint[];
  v_statuses text[];
begin
  -- The locks first, then the clock, then plain writes by key that wait for nobody.
  perform 1
  from (select u.job_id, u.fence, u.claimed_by
        from unnest(p_job_ids, p_fences, p_claimed_bys) as u (job_id, fence, claimed_by) order by u.job_id) i
  join relay.s2r_relay_dispatch_queue q
    on q.tenant_id = p_tenant and q.job_id = i.job_id and q.fence = i.fence and q.claimed_by = i.claimed_by
   and q.relay_id = p_relay
  order by i.job_id
  for update of q;
  v_now := clock_timestamp();

  with input as materialized (
    select u.n, u.job_id, u.fence, u.claimed_by, u.give_back,
           case when u.delay > interval '0' then v_now + u.delay end as available_at
    from unnest(p_job_ids, p_fences, p_claimed_bys, p_give_backs, p_delays) with ordinality
         as u (job_id, fence, claimed_by, give_back, delay, n)
    order by u.job_id
  ), back as (
    update relay.s2r_relay_dispatch_queue q
    set state = case when i.available_at is null then 'ready' else 'delayed' end, available_at = i.available_at,
        attempt = q.attempt - case when i.give_back then 1 else 0 end, fence = q.fence + 1,
        claimed_by = null, claim_id = null, claimed_at = null, lease_expires_at = null
    from input i
    where q.tenant_id = p_tenant and q.job_id = i.job_id and q.fence = i.fence and q.claimed_by = i.claimed_by
      and q.relay_id = p_relay
      and (i.give_back or q.attempt < q.max_attempts)
      and coalesce(i.available_at, v_now) < q.expires_at
    returning i.n)
  select coalesce(array_agg(b.n), '{}') into v_back from back b;

  -- Those that went back have another fence now and do not match any more.
  with input as materialized (
    select u.n, u.job_id, u.fence, u.claimed_by, u.code, u.message
    from unnest(p_job_ids, p_fences, p_claimed_bys, p_error_codes, p_error_messages) with ordinality
         as u (job_id, fence, claimed_by, code, message, n)
    where not u.n = any (v_back)
    order by u.job_id
  ), ended as (
    delete from relay.s2r_relay_dispatch_queue q using input i
    where q.tenant_id = p_tenant and q.job_id = i.job_id and q.fence = i.fence and q.claimed_by = i.claimed_by
      and q.relay_id = p_relay
    returning i.n, i.code, i.message, q.job_id, q.attempt, q.fence, q.claimed_by, q.claimed_at, q.created_at, q.expires_at
  ), stored as (
    insert into relay.s2r_relay_dispatch_result
      (tenant_id, job_id, relay_id, status, attempt, fence, claimed_by, error_code, error_message, created_at, claimed_at,
       completed_at, expires_at)
    select p_tenant, e.job_id, p_relay, case when v_now >= e.expires_at then 'expired' else 'failed' end, e.attempt, e.fence,
           e.claimed_by,
           case when v_now >= e.expires_at then 'S2R-EXPIRED' else e.code end,
           case when v_now >= e.expires_at then 'the deadline passed before the job could be run again' else e.message end,
           e.created_at, e.claimed_at, v_now, e.expires_at
    from ended e
    returning 1
  )
  select coalesce(array_agg(e.n), '{}'), coalesce(array_agg(case when v_now >= e.expires_at then 'expired' else 'failed' end), '{}')
  into v_ended, v_statuses from ended e;

  return query select u.n, 'applied', 'pending' from unnest(v_back) as u (n);
  return query select u.n, 'applied', u.status from unnest(v_ended, v_statuses) as u (n, status);
  return query
  select u.n, 'stale', null::text from unnest(p_job_ids) with ordinality as u (job_id, n)
  where not u.n = any (v_back) and not u.n = any (v_ended);
end $$;

-- Guarantees: puts each current claim among the inputs back, to be claimed again after p_delays[i]. p_give_backs[i] true: the
--   attempt does not count (Snooze); false: it does (Retry), and with none left, or a delay past the deadline, the job
--   ends 'failed' at once with the error given. Answers in status: pending, failed or expired.
-- Errors: S2001, S2002, S2003; S2020 array lengths; S2021 a delay that is negative or not finite.
-- Locks: the queue rows, FOR UPDATE, in job id order; waits for them.
create or replace function relay.retry(
  p_relay text, p_claimed_by text, p_tenants text[], p_job_ids uuid[], p_fences bigint[], p_delays interval[],
  p_give_backs boolean[], p_error_codes text[], p_error_messages text[])
returns table (n bigint, outcome text, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_count  bigint := coalesce(cardinality(p_job_ids), 0);
  v_name   text;
  v_before text;
  v_mine   bigint[];
  v_in     record;
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
  for v_name in select distinct u.tenant from unnest(p_tenants) as u (tenant) order by u.tenant loop
    v_before := relay.bind_tenant(v_name, p_relay, '{worker}');
    select array_agg(u.n order by u.n) as ns, array_agg(u.job_id order by u.n) as job_ids,
           array_agg(u.fence order by u.n) as fences, array_agg(p_claimed_by) as claimed_bys,
           array_agg(u.give_back order by u.n) as give_backs, array_agg(u.delay order by u.n) as delays,
           array_agg(u.code order by u.n) as codes, array_agg(u.message order by u.n) as messages
    into v_in
    from unnest(p_tenants, p_job_ids, p_fences, p_give_backs, p_delays, p_error_codes, p_error_messages) with ordinality
         as u (tenant, job_id, fence, give_back, delay, code, message, n)
    where u.tenant is not distinct from v_name;
    return query
    select v_in.ns[b.n], b.outcome, b.status
    from relay.put_back(p_relay, coalesce(v_name, v_before), v_in.job_ids, v_in.fences, v_in.claimed_bys, v_in.give_backs,
                        v_in.delays, v_in.codes, v_in.messages) b;
    perform relay.unbind_tenant(v_before);
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

-- Guarantees: the age of this session, as the server counts it; null where it cannot be told.
-- SECURITY INVOKER, because a session may see its own start and nobody else's.
create or replace function relay.session_age() returns interval
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select clock_timestamp() - a.backend_start from pg_stat_get_activity(pg_backend_pid()) a
$$;

-- Guarantees: takes back at most p_limit claims of the tenant (p_relay null = of all its relays) whose lease has run out: with
--   attempts left they are pending at once, else they end 'failed', S2R-LEASE-LOST, or 'expired' past their deadline.
--   A claim that was renewed, completed or released in between is not touched: each row is locked and looked at again.
-- Locks: FOR UPDATE SKIP LOCKED. It never waits. Call relay.reclaim, which first looks at the age of the session.
create or replace function relay.reclaim_lost(p_tenant text, p_relay text, p_limit bigint)
returns table (tenant_id text, relay_id text, job_id uuid, status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set jit = off
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, p_relay);
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_lost   record;
begin
  if p_relay is null and not relay.login_is(array['gateway', 'worker', 'operator'], v_tenant) then
    raise exception 'login % is bound to single relays and must name one', session_user using errcode = 'S2003';
  end if;
  for v_lost in
    with lost as materialized (
      select q.relay_id, q.job_id, q.fence, q.claimed_by
      from relay.s2r_relay_dispatch_queue q
      where q.tenant_id = v_tenant and (p_relay is null or q.relay_id = p_relay) and q.state = 'claimed'
        and q.lease_expires_at < v_now
      limit p_limit for update skip locked)
    select l.relay_id, array_agg(l.job_id) as job_ids, array_agg(l.fence) as fences,
           array_agg(l.claimed_by) as claimed_bys, count(*)::int as n
    from lost l group by l.relay_id order by l.relay_id
  loop
    return query
    select v_tenant, v_lost.relay_id, v_lost.job_ids[b.n], b.status
    from relay.put_back(
      v_lost.relay_id, v_tenant, v_lost.job_ids, v_lost.fences, v_lost.claimed_bys,
      array_fill(false, array[v_lost.n]), array_fill(interval '0', array[v_lost.n]),
      array_fill('S2R-LEASE-LOST'::text, array[v_lost.n]),
      array_fill('the relay stopped renewing its lease, and no attempt is left'::text, array[v_lost.n])) b
    where b.outcome = 'applied';
  end loop;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: as reclaim_lost, for each tenant in turn (null = the bound one), at most p_limit in all; but nothing at all before
--   this session is p_lease old. A restart or failover cuts every session, and the holders get one lease to come back.
-- SECURITY INVOKER, see session_age.
create or replace function relay.reclaim(p_relay text, p_tenants text[], p_limit bigint, p_lease interval)
returns table (tenant_id text, relay_id text, job_id uuid, status text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  v_name text;
  v_left bigint := p_limit;
  v_got  bigint;
begin
  if coalesce(relay.session_age() < p_lease, true) then
    return;
  end if;
  foreach v_name in array p_tenants loop
    exit when v_left <= 0;
    return query select r.tenant_id, r.relay_id, r.job_id, r.status from relay.reclaim_lost(v_name, p_relay, v_left) r;
    get diagnostics v_got = row_count;
    v_left := v_left - v_got;
  end loop;
end $$;
