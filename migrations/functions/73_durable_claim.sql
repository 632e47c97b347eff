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
--   then what is left; null in the array is the tenant that the caller has bound. p_job_id, where given: of this job alone,
--   whatever its kind.
--   p_token is new for every call; each later write must name job id, seq, token and lease_version.
--   p_after names jobs of which only chunks above a number are looked at, {"job id": number}: those below the caller has just had. It is
--   for who claims a large job batch by batch while an old transaction keeps all dead index entries alive, which each claim from
--   the beginning wades through. Chunks that come back lie below it, so what it leaves out is claimed without it soon after.
--   A queued job is running from then on, and 'started' is told; 'chunk_claimed' is told once for the chunks of a job.
--   Rows of outcome 'claimed'; params come with the first chunk of a job. A row 'waiting' tells in `wait` how long until the
--   tenant's next retry is due.
-- Errors: S2001, S2002, S2003; S2020 bad arguments.
-- Locks: jobs, FOR KEY SHARE SKIP LOCKED (the first claim: FOR NO KEY UPDATE SKIP LOCKED); their
--   chunks, FOR UPDATE SKIP LOCKED. It never waits.
--
-- What a lone claim costs is the number of its statements and functions: so the look for due retries, the locks of a job and its
-- chunks, and their write and event are one statement each. The write names the columns of the primary key and nothing else,
-- which leaves one index for it.
create or replace function relay.durable_claim(
  p_tenants text[], p_kinds text[], p_limits bigint[], p_limit bigint, p_claimed_by text, p_token uuid, p_lease interval,
  p_start bigint default 0, p_after jsonb default null, p_job_id uuid default null)
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
  v_due     timestamptz;
  v_rank    bigint;
  v_seq     bigint;
  v_id      uuid;
  v_job     record;
  v_now     timestamptz;
begin
  if (v_tenants > 0 and (p_job_id is not null or v_kinds > 0 and coalesce(cardinality(p_limits), v_kinds) = v_kinds)
      and p_limit >= 1 and octet_length(p_claimed_by) between 1 and 200 and p_token is not null and p_lease > interval '0'
      and p_lease <= interval '1 day' and p_start >= 0) is not true
  then
    raise exception 'a claim needs tenants, kinds, a positive limit, a lease of at most a day, claimed_by (up to 200 bytes), %',
      'a token, and a start' using errcode = 'S2020';
  end if;
  if v_limits is null then
    v_limits := array_fill(p_limit, array[coalesce(v_kinds, 1)::int]);
  end if;
  loop
    v_i := (p_start + v_turn) % v_tenants + 1;
    v_quota := case when v_turn < v_tenants then least(greatest(1, p_limit / v_tenants), v_left)
                    when v_full[v_i] then v_left else 0 end;
    if v_quota > 0 then
      v_before := relay.bind_tenant(p_tenants[v_i], null, '{worker}');
      v_tenant := coalesce(p_tenants[v_i], v_before);
      v_now := clock_timestamp();
      if v_turn < v_tenants then
        -- One probe, because as a rule no retry is due, and a call costs several times as much.
        select c.available_at into v_due from relay.durable_chunk c
        where c.tenant_id = v_tenant and c.available_at is not null order by c.available_at limit 1;
        if v_due is not null then
          wait := v_due - v_now;
          if v_due <= v_now then
            wait := relay.durable_promote(v_tenant, greatest(p_limit, 100));
          end if;
          if wait is not null and p_job_id is null then
            outcome := 'waiting'; tenant_id := v_tenant;
            return next;
          end if;
        end if;
      end if;
      v_rank := -9223372036854775808; v_seq := 0; v_id := '00000000-0000-0000-0000-000000000000';
      -- One job after the other, and as a rule the first has enough.
      while v_quota > 0 loop
        -- The next job, found, locked and looked at again, and then its chunks, in one statement: none of it waits. Its status is
        -- looked at under the lock, outside: a statement by key names no state, or it could take another index.
        -- A job whose chunks are all under way costs a probe, from the far end, where those are that nobody has claimed yet.
        select o.i, o.rank, o.job_seq, o.job_id, j.*, l.seqs into v_job
        from (
          select k.i, least(v_quota, k.most) as most, n.rank, n.job_seq, n.job_id, n.after
          from unnest(p_kinds, v_limits) with ordinality as k (kind, most, i)
          cross join lateral (
            select b.rank, b.job_seq, b.job_id, w.after
            from (select a.rank, a.job_seq, a.job_id from relay.durable_job a
                  where a.tenant_id = v_tenant and a.kind = k.kind and a.status in ('queued', 'running')
                    and (a.rank, a.job_seq, a.job_id) > (v_rank, v_seq, v_id)
                  order by a.rank, a.job_seq, a.job_id offset 0) b
            -- By itself: a cast of text is not leakproof, and under row security could not be an index condition.
            cross join lateral (select coalesce((p_after ->> b.job_id::text)::bigint, 0) as after offset 0) w
            where (select true from relay.durable_chunk c
                   where c.tenant_id = v_tenant and c.job_id = b.job_id and c.status in ('pending', 'retry')
                     and c.available_at is null and c.seq > w.after
                   order by c.seq desc limit 1)
            order by b.rank, b.job_seq, b.job_id limit 1) n
          where k.most > 0 and p_job_id is null
          union all
          select 1, v_quota, 0, 0, p_job_id, 0 where p_job_id is not null
          order by 3, 4, 5 limit 1) o
        left join lateral (
          select a.kind, a.status, a.params::text as params, a.idempotent, a.max_attempts
          from relay.durable_job a
          where a.tenant_id = v_tenant and a.job_id = o.job_id limit 1 for key share skip locked) j on true
        left join lateral (
          select array_agg(t.seq) as seqs
          from (select c.seq from relay.durable_chunk c
                where c.tenant_id = v_tenant and c.job_id = o.job_id and c.status in ('pending', 'retry')
                  and c.available_at is null and c.seq > o.after
                order by c.seq limit o.most for update skip locked) t) l on true;
        exit when v_job.job_id is null or v_id = p_job_id;
        v_rank := v_job.rank; v_seq := v_job.job_seq; v_id := v_job.job_id; v_k := v_job.i;
        continue when v_job.status is null or v_job.status not in ('queued', 'running');
        continue when v_job.seqs is null;
        if v_job.status = 'queued' then
          perform relay.durable_start(v_tenant, v_id, p_claimed_by);
        end if;
        -- The clock at the write, whatever this transaction has waited for before.
        v_now := clock_timestamp();
        return query
        with told as (
          -- One for the chunks of a claim: its cost is that of a chunk.
          insert into relay.durable_event (tenant_id, job_id, xid, n, at, seq, type, holder, detail)
          select v_tenant, v_id, pg_current_xact_id(),
                 greatest((extract(epoch from v_now) * 1000000)::bigint,
                          (select e.n + 1 from relay.durable_event e
                           where e.tenant_id = v_tenant and e.job_id = v_id and e.xid = pg_current_xact_id()
                           order by e.n desc limit 1)),
                 v_now, v_job.seqs[1], 'chunk_claimed', p_claimed_by,
                 case when cardinality(v_job.seqs) > 1 then jsonb_build_object('seqs', v_job.seqs) end
          returning 1
        ), taken as (
          update relay.durable_chunk c
          set status = 'running', attempts = c.attempts + 1, lease_version = c.lease_version + 1, lease_token = p_token,
              lease_expires_at = v_now + p_lease, claimed_by = p_claimed_by, claimed_at = v_now, updated_at = v_now
          -- Before PostgreSQL 17 the planner may take the numbers for a filter, and so read every chunk of the job: between them then.
          where c.tenant_id = v_tenant and c.job_id = v_id and c.seq = any (v_job.seqs)
            and c.seq >= v_job.seqs[1] and c.seq <= v_job.seqs[cardinality(v_job.seqs)]
          returning c.seq, c.payload, c.checkpoint, c.attempts, c.lease_version, c.rows_total, c.rows_done, c.rows_failed
        )
        select 'claimed', v_tenant, v_id, t.seq, v_job.kind, case when t.seq = v_job.seqs[1] then v_job.params end,
               v_job.idempotent, v_job.max_attempts, t.payload::text, t.checkpoint::text, t.attempts, t.lease_version,
               t.rows_total, t.rows_done, t.rows_failed, v_now + p_lease, null::interval
        from taken t order by t.seq;
        get diagnostics v_got = row_count;
        v_limits[v_k] := v_limits[v_k] - v_got;
        v_quota := v_quota - v_got;
        v_left := v_left - v_got;
        exit when p_job_id is not null;
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
-- Locks: as durable_claim. It never waits.
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
begin
  if p_job_id is null then
    raise exception 'durable_claim_next needs a job id' using errcode = 'S2020';
  end if;
  return query
  select c.* from relay.durable_claim(array[p_tenant], null, null, p_limit, p_claimed_by, p_token, p_lease, 0, null, p_job_id) c;
end $$;

-- Guarantees: claims the chunk if it is as it was read: at that lease_version, pending or a retry whose time has come, of a job that is
--   queued or running. One row, outcome 'claimed', or none: somebody else was first. In the caller's transaction the lease
--   begins when it is granted, by the clock, and nobody sees it before the commit.
-- Errors: S2001, S2002, S2003; S2020 bad arguments.
-- Locks: the job's row, FOR KEY SHARE SKIP LOCKED: where it is locked by a change of status, there is no claim. The chunk's,
--   FOR UPDATE SKIP LOCKED: whoever has it locked was first. It never waits, since a pause of the job would wait with it.
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
  if (octet_length(p_claimed_by) between 1 and 200 and p_token is not null and p_lease > interval '0'
      and p_lease <= interval '1 day') is not true then
    raise exception 'durable_claim_chunk needs claimed_by, a token and a positive lease' using errcode = 'S2020';
  end if;
  select j.kind, j.status, j.params::text as params, j.idempotent, j.max_attempts into v_job from relay.durable_job j
  where j.tenant_id = v_tenant and j.job_id = p_job_id for key share skip locked;
  if v_job.status in ('queued', 'running') then
    select c.status, c.lease_version, c.available_at into v_chunk from relay.durable_chunk c
    where c.tenant_id = v_tenant and c.job_id = p_job_id and c.seq = p_seq for update skip locked;
    v_now := clock_timestamp();
    if v_chunk.status in ('pending', 'retry') and v_chunk.lease_version = p_lease_version
       and coalesce(v_chunk.available_at <= v_now, true) then
      if v_job.status = 'queued' then
        perform relay.durable_start(v_tenant, p_job_id, p_claimed_by);
      end if;
      return query
      update relay.durable_chunk c
      set status = 'running', attempts = c.attempts + 1, lease_version = c.lease_version + 1, lease_token = p_token,
          lease_expires_at = v_now + p_lease, claimed_by = p_claimed_by, claimed_at = v_now, available_at = null, updated_at = v_now
      where c.tenant_id = v_tenant and c.job_id = p_job_id and c.seq = p_seq
      returning 'claimed', v_tenant, p_job_id, c.seq, v_job.kind, v_job.params, v_job.idempotent, v_job.max_attempts,
        c.payload::text, c.checkpoint::text, c.attempts, c.lease_version, c.rows_total, c.rows_done, c.rows_failed,
        v_now + p_lease, null::interval;
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
    select 'claimed', v_tenant, r.job_id, r.seq, j.kind, j.params, j.idempotent, j.max_attempts, r.payload::text,
           r.checkpoint::text, r.attempts, r.lease_version, r.rows_total, r.rows_done, r.rows_failed, r.lease_expires_at, null::interval
    -- The order is there for the index that gives it, which reads no chunk that is not running. Payloads become text outside, or
    -- those of all that runs would be fetched.
    from (select c.job_id, c.seq, c.payload, c.checkpoint, c.attempts, c.lease_version, c.rows_total, c.rows_done, c.rows_failed, c.lease_expires_at, c.lease_token
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
