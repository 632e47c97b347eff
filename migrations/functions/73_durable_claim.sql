-- role: relay_api
-- room: durable
--
-- Claims. A chunk goes pending | retry -> running here and nowhere else, and the attempt is counted in the same statement,
-- so that a chunk that kills its worker is counted too.
--
--   relay.durable_claim        the next chunks of all jobs of some kinds, of several tenants
--   relay.durable_claim_next   the next chunks of one job
--   relay.durable_claim_chunk  one chunk, by compare-and-set
--   relay.durable_claim_again  a claim whose reply was lost
--   relay.durable_candidates   what could be claimed, for whoever claims by compare-and-set
--
-- A claim goes by jobs, and within one by chunks. Jobs that may run stand in the index durable_job_open in their order:
-- priority, age. So one that is paused, or has ended, stands in nobody's way, and its chunks need no change; one of which
-- all chunks are under way or wait costs a probe. Chunks that can be claimed stand in durable_chunk_open.
--   A job is locked FOR KEY SHARE before its chunks, and looked at again under that lock: nothing is claimed of a job that
-- was paused or ended before. SKIP LOCKED throughout, so that no claim waits for anybody.

-- Guarantees: retries of the tenant whose time has come can be claimed, at most p_limit. Returns how long until the next one's;
--   null where there is none.
-- Locks: FOR UPDATE SKIP LOCKED. It never waits.
create or replace function relay.durable_promote(p_tenant text, p_limit bigint) returns interval
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_now  timestamptz := clock_timestamp();
  v_next timestamptz;
  v_rows tid[];
begin
  for v_turn in 1..2 loop
    select c.available_at into v_next from relay.durable_chunk c
    where c.tenant_id = p_tenant and c.available_at is not null order by c.available_at limit 1;
    exit when v_turn = 2 or v_next is null or v_next > v_now;
    select array_agg(l.row_id) into v_rows
    from (select c.ctid as row_id from relay.durable_chunk c
          where c.tenant_id = p_tenant and c.available_at is not null and c.available_at <= v_now
          order by c.available_at limit p_limit for update skip locked) l;
    exit when v_rows is null;
    perform relay.durable_move(p_tenant, v_now, v_rows, 'retry', 'keep', null, null);
  end loop;
  return case when v_next is not null then greatest(v_next - v_now, interval '0') end;
end $$;

-- Guarantees: the rows, which the caller has found and locked and whose job he has locked, are running for p_claimed_by under
--   p_token until p_until; attempts and lease_version one higher.
create or replace function relay.durable_run(
  p_tenant text, p_at timestamptz, p_rows tid[], p_claimed_by text, p_token uuid, p_until timestamptz)
returns table (
  seq bigint, payload text, checkpoint text, attempts bigint, lease_version bigint, rows_total bigint, rows_done bigint,
  rows_failed bigint)
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  return query
  with taken as (
    update relay.durable_chunk c
    set status = 'running', attempts = c.attempts + 1, lease_version = c.lease_version + 1, lease_token = p_token,
        lease_expires_at = p_until, claimed_by = p_claimed_by, claimed_at = p_at, available_at = null, updated_at = p_at
    where c.ctid = any (p_rows) and c.tenant_id = p_tenant
    returning c.seq, c.payload::text as payload, c.checkpoint::text as checkpoint, c.attempts, c.lease_version, c.rows_total,
              c.rows_done, c.rows_failed)
  select t.* from taken t order by t.seq;
end $$;

-- Guarantees: of a job that is queued or running, and that nobody has locked to change its status, claims at most p_limit chunks, the
--   lowest seq above p_after that nobody has locked first. A queued job is running from then on, and 'started' is told; 'chunk_claimed' is told
--   once for all of them. A row each; params in the first. job_open = the job can be claimed from.
-- Locks: the job's row, FOR KEY SHARE SKIP LOCKED (the first claim: FOR NO KEY UPDATE SKIP LOCKED); the chunks, FOR UPDATE SKIP
--   LOCKED. It never waits.
create or replace function relay.durable_take(
  p_tenant text, p_job_id uuid, p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval, p_after bigint default 0)
returns table (
  outcome text, tenant_id text, job_id uuid, seq bigint, kind text, params text, idempotent boolean, max_attempts bigint,
  payload text, checkpoint text, attempts bigint, lease_version bigint, rows_total bigint, rows_done bigint,
  rows_failed bigint, lease_expires_at timestamptz, wait interval)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_job   record;
  v_now   timestamptz;
  v_until timestamptz;
  v_rows  tid[];
  v_seqs  bigint[];
begin
  -- By key, and the status looked at afterwards: a statement by key names no state, or it could take another index.
  select j.kind, j.status, j.params::text as params, j.idempotent, j.max_attempts into v_job from relay.durable_job j
  where j.tenant_id = p_tenant and j.job_id = p_job_id for key share skip locked;
  if v_job.status is null or v_job.status not in ('queued', 'running') then
    return;
  end if;
  select array_agg(l.row_id), array_agg(l.seq) into v_rows, v_seqs
  from (select c.ctid as row_id, c.seq from relay.durable_chunk c
        where c.tenant_id = p_tenant and c.job_id = p_job_id and c.seq > p_after and c.status in ('pending', 'retry')
          and c.available_at is null
        order by c.seq limit p_limit for update skip locked) l;
  if v_rows is null then
    return;
  end if;
  if v_job.status = 'queued' then
    perform relay.durable_start(p_tenant, p_job_id, p_claimed_by);
  end if;
  -- The clock at the write, whatever this transaction has waited for before.
  v_now := clock_timestamp();
  v_until := v_now + p_lease;
  outcome := 'claimed'; tenant_id := p_tenant; job_id := p_job_id; kind := v_job.kind; params := v_job.params;
  idempotent := v_job.idempotent; max_attempts := v_job.max_attempts; lease_expires_at := v_until;
  for seq, payload, checkpoint, attempts, lease_version, rows_total, rows_done, rows_failed in
    select r.* from relay.durable_run(p_tenant, v_now, v_rows, p_claimed_by, p_token, v_until) r
  loop
    return next;
    params := null;
  end loop;
  -- One event for the chunks of a claim: its cost is that of a chunk.
  perform relay.durable_tell(
    p_tenant, p_job_id, 'chunk_claimed', v_seqs[1:1], null, null, array[p_claimed_by],
    case when cardinality(v_seqs) > 1 then array[jsonb_build_object('seqs', v_seqs)] end);
end $$;

-- Guarantees: the queued job is running, and 'started' is told, by this caller or by another whose transaction is under way.
-- Locks: the job's row, FOR NO KEY UPDATE SKIP LOCKED. It never waits.
create or replace function relay.durable_start(p_tenant text, p_job_id uuid, p_holder text) returns void
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_status text;
begin
  select j.status into v_status from relay.durable_job j
  where j.tenant_id = p_tenant and j.job_id = p_job_id for no key update skip locked;
  if v_status = 'queued' then
    perform relay.durable_turn_to(p_tenant, p_job_id, 'running');
    perform relay.durable_tell(p_tenant, p_job_id, 'started', array[null::bigint], null, null, array[p_holder], null);
  end if;
end $$;

-- Guarantees: claims for p_claimed_by at most p_limit chunks over all tenants and jobs of the kinds p_kinds that are queued or
--   running, at most p_limits[i] of kind i (null: no limit of its own): of a tenant the highest priority first, then the job that
--   was there first, then the lowest seq; what others have locked this moment is stepped over. A claim is of jobs as they stand: nothing is
--   claimed of one that was paused or ended before. Tenants take turns, beginning behind p_start, first an equal share each,
--   then what is left; null in the array is the tenant that the caller has bound.
--   p_token is new for every call; each later write must name job id, seq, token and lease_version.
--   p_after names jobs of which only chunks above a number are looked at, {"job id": number}: those below the caller has just had. It is
--   for who claims a large job batch by batch while an old transaction keeps all dead index entries alive, which each claim from
--   the beginning wades through. Chunks that come back lie below it, so what it leaves out is claimed without it soon after.
--   Rows of outcome 'claimed'; params come with the first chunk of a job. A row 'waiting' tells in `wait` how long until the
--   tenant's next retry is due.
-- Errors: S2001, S2002, S2003; S2020 bad arguments.
-- Locks: as durable_take. It never waits.
create or replace function relay.durable_claim(
  p_tenants text[], p_kinds text[], p_limits bigint[], p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval,
  p_start bigint default 0, p_after jsonb default null)
returns table (
  outcome text, tenant_id text, job_id uuid, seq bigint, kind text, params text, idempotent boolean, max_attempts bigint,
  payload text, checkpoint text, attempts bigint, lease_version bigint, rows_total bigint, rows_done bigint,
  rows_failed bigint, lease_expires_at timestamptz, wait interval)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_tenants bigint := cardinality(p_tenants);
  v_kinds   bigint := cardinality(p_kinds);
  v_limits  bigint[] := p_limits;
  v_left    bigint := p_limit;
  v_turn    bigint := 0;
  v_quota   bigint;
  v_got     bigint;
  v_full    boolean[];
  v_i       bigint;
  v_k       bigint;
  v_before  text;
  v_tenant  text;
  v_look    bigint;
  v_seen    bigint;
  v_rank    bigint;
  v_seq     bigint;
  v_job     uuid;
  v_found   record;
begin
  if (v_tenants > 0 and v_kinds > 0 and p_limit >= 1 and p_claimed_by <> '' and p_token is not null and p_lease > interval '0'
      and coalesce(cardinality(p_limits), v_kinds) = v_kinds and p_start >= 0) is not true then
    raise exception 'durable_claim needs tenants, kinds, a positive limit and lease, claimed_by, a token, and a start'
      using errcode = 'S2020';
  end if;
  if v_limits is null then
    v_limits := array_fill(p_limit, array[v_kinds::int]);
  end if;
  loop
    v_i := (p_start + v_turn) % v_tenants + 1;
    v_quota := case when v_turn < v_tenants then least(greatest(1, p_limit / v_tenants), v_left)
                    when v_full[v_i] then v_left else 0 end;
    if v_quota > 0 then
      v_before := relay.bind_tenant(p_tenants[v_i], null, '{worker}');
      v_tenant := coalesce(p_tenants[v_i], v_before);
      if v_turn < v_tenants then
        wait := relay.durable_promote(v_tenant, p_limit);
        if wait is not null then
          outcome := 'waiting'; tenant_id := v_tenant;
          return next;
        end if;
      end if;
      v_rank := -9223372036854775808; v_seq := 0; v_job := '00000000-0000-0000-0000-000000000000';
      -- A job has one chunk at least, but perhaps one that somebody has locked: so some more jobs than chunks are looked at.
      <<jobs>>
      loop
        v_look := v_quota + 4;
        v_seen := 0;
        for v_found in
          select o.* from (
            select k.i, j.rank, j.job_seq, j.job_id
            from unnest(p_kinds, v_limits) with ordinality as k (kind, most, i)
            cross join lateral (
              select b.rank, b.job_seq, b.job_id
              from (select a.rank, a.job_seq, a.job_id from relay.durable_job a
                    where a.tenant_id = v_tenant and a.kind = k.kind and a.status in ('queued', 'running')
                      and (a.rank, a.job_seq, a.job_id) > (v_rank, v_seq, v_job)
                    order by a.rank, a.job_seq, a.job_id offset 0) b
              -- By itself: a cast of text is not leakproof, and under row security could not be an index condition.
              cross join lateral (select coalesce((p_after ->> b.job_id::text)::bigint, 0) as seq offset 0) w
              cross join lateral (
                select 1 from relay.durable_chunk c
                where c.tenant_id = v_tenant and c.job_id = b.job_id and c.seq > w.seq and c.status in ('pending', 'retry')
                  and c.available_at is null
                order by c.seq limit 1) h
              order by b.rank, b.job_seq, b.job_id limit v_look) j
            where k.most > 0) o
          order by o.rank, o.job_seq, o.job_id limit v_look
        loop
          v_seen := v_seen + 1;
          v_rank := v_found.rank; v_seq := v_found.job_seq; v_job := v_found.job_id;
          v_k := v_found.i;
          continue when v_limits[v_k] <= 0;
          return query
          select t.* from relay.durable_take(
            v_tenant, v_job, least(v_quota, v_limits[v_k]), p_claimed_by, p_token, p_lease,
            coalesce((p_after ->> v_job::text)::bigint, 0)) t;
          get diagnostics v_got = row_count;
          v_limits[v_k] := v_limits[v_k] - v_got;
          v_quota := v_quota - v_got;
          v_left := v_left - v_got;
          exit jobs when v_quota <= 0;
        end loop;
        exit when v_seen < v_look;
      end loop;
      v_full[v_i] := v_quota <= 0;
      v_before := relay.set_tenant(v_before);
    end if;
    v_turn := v_turn + 1;
    exit when v_left <= 0 or v_turn = 2 * v_tenants;
  end loop;
end $$;

-- Guarantees: as durable_claim, of one job.
-- Errors: S2001, S2002, S2003; S2020 bad arguments.
-- Locks: as durable_take. It never waits.
create or replace function relay.durable_claim_next(
  p_tenant text, p_job_id uuid, p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval)
returns table (
  outcome text, tenant_id text, job_id uuid, seq bigint, kind text, params text, idempotent boolean, max_attempts bigint,
  payload text, checkpoint text, attempts bigint, lease_version bigint, rows_total bigint, rows_done bigint,
  rows_failed bigint, lease_expires_at timestamptz, wait interval)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{worker}');
  v_tenant text := coalesce(p_tenant, v_before);
begin
  if (p_limit >= 1 and p_claimed_by <> '' and p_token is not null and p_lease > interval '0') is not true then
    raise exception 'durable_claim_next needs a positive limit and lease, claimed_by and a token' using errcode = 'S2020';
  end if;
  perform relay.durable_promote(v_tenant, greatest(p_limit, 100));
  return query select t.* from relay.durable_take(v_tenant, p_job_id, p_limit, p_claimed_by, p_token, p_lease) t;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: claims the chunk if it is as it was read: at that lease_version, pending or a retry whose time has come, of a job that is
--   queued or running. One row, outcome 'claimed', or none: somebody else was first. In the caller's transaction the lease
--   begins when it is granted, by the clock, and nobody sees it before the commit.
-- Errors: S2001, S2002, S2003; S2020 bad arguments.
-- Locks: the job's row, FOR KEY SHARE SKIP LOCKED: where it is locked by a change of status, there is no claim. The chunk's,
--   FOR UPDATE; waits for it.
create or replace function relay.durable_claim_chunk(
  p_tenant text, p_job_id uuid, p_seq bigint, p_lease_version bigint, p_claimed_by text, p_token uuid, p_lease interval)
returns table (
  outcome text, tenant_id text, job_id uuid, seq bigint, kind text, params text, idempotent boolean, max_attempts bigint,
  payload text, checkpoint text, attempts bigint, lease_version bigint, rows_total bigint, rows_done bigint,
  rows_failed bigint, lease_expires_at timestamptz, wait interval)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{worker}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_job    record;
  v_chunk  record;
  v_now    timestamptz;
begin
  if (p_claimed_by <> '' and p_token is not null and p_lease > interval '0') is not true then
    raise exception 'durable_claim_chunk needs claimed_by, a token and a positive lease' using errcode = 'S2020';
  end if;
  select j.kind, j.status, j.params::text as params, j.idempotent, j.max_attempts into v_job from relay.durable_job j
  where j.tenant_id = v_tenant and j.job_id = p_job_id for key share skip locked;
  if v_job.status in ('queued', 'running') then
    select c.ctid as row_id, c.status, c.lease_version, c.available_at into v_chunk from relay.durable_chunk c
    where c.tenant_id = v_tenant and c.job_id = p_job_id and c.seq = p_seq for update;
    -- The clock after the lock.
    v_now := clock_timestamp();
    if v_chunk.status in ('pending', 'retry') and v_chunk.lease_version = p_lease_version
       and coalesce(v_chunk.available_at <= v_now, true) then
      if v_job.status = 'queued' then
        perform relay.durable_start(v_tenant, p_job_id, p_claimed_by);
      end if;
      return query
      select 'claimed', v_tenant, p_job_id, r.seq, v_job.kind, v_job.params, v_job.idempotent, v_job.max_attempts, r.payload,
             r.checkpoint, r.attempts, r.lease_version, r.rows_total, r.rows_done, r.rows_failed, v_now + p_lease, null::interval
      from relay.durable_run(v_tenant, v_now, array[v_chunk.row_id], p_claimed_by, p_token, v_now + p_lease) r;
      perform relay.durable_tell(
        v_tenant, p_job_id, 'chunk_claimed', array[p_seq], null, null, array[p_claimed_by], null);
    end if;
  end if;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: the chunks that the claim p_token has taken and that are still its own and within their lease, as that claim returned them.
--   For a claim whose reply was lost: ask until the lease would have ended, because a claim still under way on the server
--   commits later. So no chunk waits for a person because of a lost reply. Changes nothing.
-- Errors: S2001, S2002, S2003.
create or replace function relay.durable_claim_again(p_tenants text[], p_token uuid)
returns table (
  outcome text, tenant_id text, job_id uuid, seq bigint, kind text, params text, idempotent boolean, max_attempts bigint,
  payload text, checkpoint text, attempts bigint, lease_version bigint, rows_total bigint, rows_done bigint,
  rows_failed bigint, lease_expires_at timestamptz, wait interval)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_name   text;
  v_before text;
  v_tenant text;
  v_now    timestamptz := clock_timestamp();
begin
  foreach v_name in array p_tenants loop
    v_before := relay.bind_tenant(v_name, null, '{worker}');
    v_tenant := coalesce(v_name, v_before);
    return query
    select 'claimed', v_tenant, r.job_id, r.seq, j.kind, j.params, j.idempotent, j.max_attempts, r.payload, r.checkpoint,
           r.attempts, r.lease_version, r.rows_total, r.rows_done, r.rows_failed, r.lease_expires_at, null::interval
    -- The order is there for the index that gives it, which reads no chunk that is not running.
    from (select c.job_id, c.seq, c.payload::text as payload, c.checkpoint::text as checkpoint, c.attempts, c.lease_version,
                 c.rows_total, c.rows_done, c.rows_failed, c.lease_expires_at, c.lease_token
          from relay.durable_chunk c
          where c.tenant_id = v_tenant and c.status = 'running' order by c.job_id, c.seq offset 0) r
    cross join lateral (
      select k.kind, k.params::text as params, k.idempotent, k.max_attempts from relay.durable_job k
      where k.tenant_id = v_tenant and k.job_id = r.job_id limit 1) j
    where r.lease_token = p_token and r.lease_expires_at > v_now;
    if found then
      -- Handlers are started for it: see claim_again.
      perform relay.confirm_commit();
    end if;
    v_before := relay.set_tenant(v_before);
  end loop;
end $$;

-- Guarantees: at most p_limit chunks of a tenant that could be claimed now, in the order of a claim; for
--   whoever claims them one by one with durable_claim_chunk. Locks nothing, changes nothing but what is due.
-- Errors: S2001, S2002, S2003.
create or replace function relay.durable_candidates(
  p_tenant text, p_kinds text[], p_limit bigint, p_job_id uuid default null)
returns table (job_id uuid, seq bigint, lease_version bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{worker}');
  v_tenant text := coalesce(p_tenant, v_before);
begin
  perform relay.durable_promote(v_tenant, greatest(p_limit, 100));
  if p_job_id is not null then
    return query
    select c.job_id, c.seq, c.lease_version from relay.durable_chunk c
    where c.tenant_id = v_tenant and c.job_id = p_job_id and c.status in ('pending', 'retry') and c.available_at is null
    order by c.seq limit p_limit;
  else
    return query
    select o.job_id, o.seq, o.lease_version
    from unnest(p_kinds) as k (kind)
    cross join lateral (
      select b.rank, b.job_seq, b.job_id, h.seq, h.lease_version
      from (select a.rank, a.job_seq, a.job_id from relay.durable_job a
            where a.tenant_id = v_tenant and a.kind = k.kind and a.status in ('queued', 'running')
            order by a.rank, a.job_seq, a.job_id offset 0) b
      cross join lateral (
        select c.seq, c.lease_version from relay.durable_chunk c
        where c.tenant_id = v_tenant and c.job_id = b.job_id and c.status in ('pending', 'retry') and c.available_at is null
        order by c.seq limit p_limit) h
      order by b.rank, b.job_seq, b.job_id limit p_limit) o
    order by o.rank, o.job_seq, o.job_id, o.seq limit p_limit;
  end if;
  perform relay.unbind_tenant(v_before);
end $$;
