-- role: relay_api
-- room: dispatch
--
-- What is done to queue rows that the caller has found and locked: internal, no login may call any of it. The verbs that do
-- run as relay_api already and have pinned their search_path, so there is no SECURITY DEFINER here.
--
--   relay.ready_jobs   delayed -> ready
--   relay.renew_jobs   a lease goes on
--   relay.return_jobs  claimed -> ready | delayed, or the end
--   relay.end_jobs     the end: the queue row goes, the result comes. The only place that does either.
--   relay.drop_jobs    retention: result, request and key go
--
-- Rows are named by ctid, and these functions may use no index and read no table through: a Tid Scan is what is left.
-- Written by key, a join of some ids with the queue can be planned from either side, and where the planner believes that
-- the queue holds nothing (a vacuum of the drained table says so, until the next one) it reads every row of the tenant
-- and looks each up among the ids. Seen among 50,000 jobs: a heartbeat for 500 in 300 ms, a completion of one in 7 ms.
-- So a verb first finds and locks its rows, with one probe of the primary key each (LATERAL … LIMIT 1 can only be planned
-- that way), or in the order of an index (with sorts forbidden, only that index will do), and then comes here. Nested
-- loops are forbidden too: what is left to join are arrays, whose length the planner does not know.
--
-- Two statements, and not one with a CTE: the first one's lock may come after a wait, on a newer version of the row than
-- its own snapshot shows; only a later statement sees that version. (As one statement, 12,000 of 12,000 valid completions
-- that had waited for a heartbeat found no row.) Between the two the row is locked, so its ctid cannot change.
-- (A claim writes its rows itself, in the same way: see 31_dispatch_claim.sql.)

-- Guarantees: the jobs can be claimed.
create or replace function relay.ready_jobs(p_tenant text, p_rows tid[]) returns void
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  update relay.s2r_relay_dispatch_queue q set state = 'ready', available_at = null
  where q.ctid = any (p_rows) and q.tenant_id = p_tenant;
end $$;

-- Guarantees: the leases end at p_until, and nothing else of the rows is changed.
create or replace function relay.renew_jobs(p_tenant text, p_rows tid[], p_until timestamptz) returns void
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  update relay.s2r_relay_dispatch_queue q set lease_expires_at = p_until
  where q.ctid = any (p_rows) and q.tenant_id = p_tenant;
end $$;

-- Guarantees: each row ends, and its result is stored, by the clock p_at, which the caller has read while holding the locks.
--   Row p_rows[i], none of them twice, takes its values from place p_ns[i] of the other arrays (where there are any), and
--   p_status is the status of all where p_statuses is null. No status, or a deadline that p_at has reached, makes it
--   'expired', without a response, with p_late as its message (null: the usual words).
--   p_by_holder: the claim's own completion, so the result keeps its fence and a repeated completion is known again. Else
--   the fence is one higher, and whoever held the claim is stale.
create or replace function relay.end_jobs(
  p_tenant text, p_at timestamptz, p_by_holder boolean, p_late text, p_ns bigint[], p_rows tid[],
  p_status text default null, p_statuses text[] default null, p_response_statuses bigint[] default null, p_response_headers text[] default null,
  p_response_bodies bytea[] default null, p_error_codes text[] default null, p_error_messages text[] default null)
returns table (
  n bigint, job_id uuid, relay_id text, status text, claimed_by text, attempt bigint, max_attempts bigint, fence bigint,
  seq bigint, created_at timestamptz, expires_at timestamptz)
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  return query
  with ended as (
    delete from relay.s2r_relay_dispatch_queue q where q.ctid = any (p_rows) and q.tenant_id = p_tenant
    returning q.ctid as row_id, q.job_id, q.relay_id, q.claimed_by, q.claimed_at, q.attempt, q.max_attempts, q.seq,
              q.created_at, q.expires_at, case when p_by_holder then q.fence else q.fence + 1 end as fence
  ), judged as (
    -- By place, and not joined: the arrays may hold many rows of other tenants.
    select e.*, h.n, coalesce(p_statuses[h.n], p_status) is null or p_at >= e.expires_at as late,
           coalesce(p_statuses[h.n], p_status) as status
    from ended e
    join unnest(p_ns, p_rows) as h (n, row_id) on h.row_id = e.row_id
  ), stored as (
    insert into relay.s2r_relay_dispatch_result
      (tenant_id, job_id, relay_id, status, attempt, fence, claimed_by, response_status, response_headers, response_body,
       error_code, error_message, created_at, claimed_at, completed_at, expires_at)
    select p_tenant, j.job_id, j.relay_id, case when j.late then 'expired' else j.status end, j.attempt, j.fence, j.claimed_by,
           case when not j.late then p_response_statuses[j.n] end, case when not j.late then p_response_headers[j.n]::jsonb end,
           case when not j.late then p_response_bodies[j.n] end,
           case when j.late then 'S2R-EXPIRED' else p_error_codes[j.n] end,
           case when not j.late then p_error_messages[j.n]
                when p_late is not null then p_late
                when p_at < j.expires_at then 'withdrawn before its deadline'
                else 'the deadline passed before a result' end,
           j.created_at, j.claimed_at, p_at, j.expires_at
    from judged j
    returning 1
  )
  select e.n, e.job_id, e.relay_id, case when e.late then 'expired' else e.status end, e.claimed_by, e.attempt,
         e.max_attempts, e.fence, e.seq, e.created_at, e.expires_at
  from judged e;
end $$;

-- Guarantees: each claim ends without a completion: back to pending when an attempt is left (or p_give_backs gives the one just
--   used back) and it would start before its deadline; else the end, 'expired' past the deadline and 'failed' with the
--   given error before it. The fence is one higher either way. Places as in end_jobs.
create or replace function relay.return_jobs(
  p_tenant text, p_at timestamptz, p_ns bigint[], p_rows tid[], p_give_backs boolean[], p_delays interval[],
  p_error_codes text[], p_error_messages text[])
returns table (n bigint, job_id uuid, relay_id text, status text)
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
-- A delay of a day is 24 hours, also where the session's time zone changes its clocks.
set timezone = 'UTC'
as $$
declare
  v_back   bigint[];
  v_jobs   uuid[];
  v_relays text[];
  v_ns     bigint[];
  v_rows   tid[];
begin
  with input as materialized (
    select h.n, h.row_id, p_give_backs[h.n] as give_back,
           case when p_delays[h.n] > interval '0' then p_at + p_delays[h.n] end as available_at
    from unnest(p_ns, p_rows) as h (n, row_id)
  ), back as (
    update relay.s2r_relay_dispatch_queue q
    set state = case when i.available_at is null then 'ready' else 'delayed' end, available_at = i.available_at,
        attempt = q.attempt - case when i.give_back then 1 else 0 end, fence = q.fence + 1,
        claimed_by = null, claim_id = null, claimed_at = null, lease_expires_at = null
    from input i
    where q.ctid = any (p_rows) and q.ctid = i.row_id and q.tenant_id = p_tenant
      and (i.give_back or q.attempt < q.max_attempts)
      and coalesce(i.available_at, p_at) < q.expires_at
    returning i.n, q.job_id, q.relay_id)
  select coalesce(array_agg(b.n), '{}'), array_agg(b.job_id), array_agg(b.relay_id) into v_back, v_jobs, v_relays from back b;

  return query select b.n, b.job_id, b.relay_id, 'pending' from unnest(v_back, v_jobs, v_relays) as b (n, job_id, relay_id);
  if cardinality(v_back) < cardinality(p_ns) then
    select array_agg(h.n), array_agg(h.row_id) into v_ns, v_rows
    from unnest(p_ns, p_rows) as h (n, row_id)
    where not exists (select from unnest(v_back) as b (n) where b.n = h.n);
    return query
    select e.n, e.job_id, e.relay_id, e.status
    from relay.end_jobs(
      p_tenant, p_at, false, 'the deadline passed before the job could be run again', v_ns, v_rows,
      'failed', null, null, null, null, p_error_codes, p_error_messages) e;
  end if;
end $$;

-- Guarantees: the jobs are gone, whole, in one statement. Returns how many.
create or replace function relay.drop_jobs(p_tenant text, p_results tid[], p_requests tid[], p_keys tid[]) returns bigint
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_count bigint;
begin
  with keys as (
    delete from relay.s2r_relay_dispatch_key k where k.ctid = any (p_keys) and k.tenant_id = p_tenant
  ), requests as (
    delete from relay.s2r_relay_dispatch_request r where r.ctid = any (p_requests) and r.tenant_id = p_tenant
  ), results as (
    delete from relay.s2r_relay_dispatch_result d where d.ctid = any (p_results) and d.tenant_id = p_tenant
    returning 1
  )
  select count(*) into v_count from results;
  return v_count;
end $$;
