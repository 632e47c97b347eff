-- role: relay_api
-- room: durable
--
-- What is done to rows that the caller has found and locked, and what several verbs share. Internal: no login may call any
-- of it. The verbs that do run as relay_api already and have pinned their search_path.
--
--   relay.durable_move      chunks get another status, and are in nobody's hands
--   relay.durable_renew     leases go on
--   relay.durable_done      running -> done
--   relay.durable_recount   counters of a job that has ended
--   relay.durable_tell      events
--   relay.durable_count     counters, from the chunks
--   relay.durable_conclude  the end of a job that has nothing left to run
--   relay.durable_ring      wake-ups
--
-- Rows are named by ctid, and those who write them so may use no index: a Tid Scan is what is left, whatever the planner
-- believes of the table (25_dispatch_rows.sql tells why find-and-lock, clock, write are three statements).
--
-- Order of locks, in every verb of this room: the job's row; then chunks, by job id and seq; then events, which are only
-- inserted. A claim takes the job FOR KEY SHARE SKIP LOCKED, a change of its status FOR UPDATE, counters FOR NO KEY UPDATE, which
-- a claim does not conflict with. What a holder says of its chunk locks that chunk and never the job, so that no
-- transaction of a handler holds up a pause, or is held up by one.

-- Guarantees: each row has that status; it is in nobody's hands, its lease_version one higher. p_attempts: 'keep' them, 'back'
--   takes off the one that the claim has counted, 'reset' begins anew. p_available_at: when a retry may start; null = now.
--   p_error null leaves last_error. rows_done is what the checkpoint has, but for what is done.
create or replace function relay.durable_move(
  p_tenant text, p_at timestamptz, p_rows tid[], p_status text, p_attempts text, p_available_at timestamptz, p_error text)
returns bigint
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_count bigint;
begin
  update relay.durable_chunk c
  set status = p_status, lease_version = c.lease_version + 1, lease_token = null, lease_expires_at = null,
      claimed_by = case when p_status in ('pending', 'retry') then null else c.claimed_by end,
      claimed_at = case when p_status in ('pending', 'retry') then null else c.claimed_at end,
      attempts = case p_attempts when 'back' then greatest(c.attempts - 1, 0) when 'reset' then 0 else c.attempts end,
      available_at = case when p_status = 'retry' then p_available_at end, last_error = coalesce(p_error, c.last_error),
      rows_done = case when p_status = 'done' then c.rows_done else c.rows_saved end,
      updated_at = p_at, ended_at = case when p_status in ('done', 'failed', 'cancelled') then p_at end
  where c.ctid = any (p_rows) and c.tenant_id = p_tenant;
  get diagnostics v_count = row_count;
  return v_count;
end $$;

-- Guarantees: the leases end at p_until; rows_done[n] is the progress of row n where it is not null, and nothing else changes.
create or replace function relay.durable_renew(
  p_tenant text, p_rows tid[], p_rows_done bigint[], p_until timestamptz)
returns void
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  if p_rows_done is null then
    update relay.durable_chunk c set lease_expires_at = p_until where c.ctid = any (p_rows) and c.tenant_id = p_tenant;
  else
    update relay.durable_chunk c
    set lease_expires_at = p_until, rows_done = coalesce(h.rows_done, c.rows_done)
    from unnest(p_rows, p_rows_done) as h (row_id, rows_done)
    where c.ctid = any (p_rows) and c.ctid = h.row_id and c.tenant_id = p_tenant;
  end if;
end $$;

-- Guarantees: those of the rows that p_ids, p_seqs, p_tokens and p_versions name, side by side, whose lease ends after p_at and whose job is
--   among p_jobs, are done, with the outcome and counts of their places. Token and lease_version stay: so a completion whose reply
--   was lost is known again. Returns the place of each, and what p_lasts says of its job.
create or replace function relay.durable_done(
  p_tenant text, p_at timestamptz, p_rows tid[], p_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[],
  p_outcomes text[], p_rows_done bigint[], p_rows_failed bigint[], p_jobs uuid[], p_lasts boolean[])
returns table (n bigint, last boolean)
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  return query
  update relay.durable_chunk c
  set status = 'done', outcome = h.outcome::jsonb, rows_done = coalesce(h.rows_done, c.rows_done),
      rows_failed = coalesce(h.rows_failed, c.rows_failed), lease_expires_at = null, updated_at = p_at, ended_at = p_at
  from unnest(p_ids, p_seqs, p_tokens, p_versions, p_outcomes, p_rows_done, p_rows_failed) with ordinality
    as h (job_id, seq, token, version, outcome, rows_done, rows_failed, n)
  where c.ctid = any (p_rows) and c.tenant_id = p_tenant and c.job_id = h.job_id and c.seq = h.seq and c.lease_token = h.token
    and c.lease_version = h.version and c.lease_expires_at > p_at and c.job_id = any (p_jobs)
  returning h.n, p_lasts[array_position(p_jobs, c.job_id)];
end $$;

-- Guarantees: an event for each seq (null = of the job itself), in that order, behind what this transaction has told of the
--   job already; seen when it commits, and not before. p_holders, p_details: a value each, or null.
-- Locks: inserts only. It waits for nobody.
create or replace function relay.durable_tell(
  p_tenant text, p_job_id uuid, p_type text, p_seqs bigint[], p_actor text, p_channel text, p_holders text[],
  p_details jsonb[])
returns void
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := clock_timestamp();
  v_xid xid8 := pg_current_xact_id();
  v_n   bigint := (extract(epoch from v_now) * 1000000)::bigint;
begin
  v_n := greatest(v_n, (select e.n + 1 from relay.durable_event e
                        where e.tenant_id = p_tenant and e.job_id = p_job_id and e.xid = v_xid
                        order by e.n desc limit 1));
  if cardinality(p_seqs) = 1 then
    insert into relay.durable_event (tenant_id, job_id, xid, n, at, seq, type, actor, channel, holder, detail)
    values (p_tenant, p_job_id, v_xid, v_n, v_now, p_seqs[1], p_type, p_actor, p_channel, p_holders[1], p_details[1]);
  else
    with told as (
      insert into relay.durable_event (tenant_id, job_id, xid, n, at, seq, type, actor, channel, holder, detail)
      select p_tenant, p_job_id, v_xid, v_n + u.i - 1, v_now, u.seq, p_type, p_actor, p_channel, p_holders[u.i], p_details[u.i]
      from unnest(p_seqs) with ordinality as u (seq, i)
      returning 1)
    select count(*) into v_n from told;
  end if;
end $$;

-- Guarantees: the counters of the job are those of its chunks, as this statement sees them; rows between 0 and 2^62, whatever holders
--   have told: what they tell must not keep a job from ending, or from being cancelled. Returns the job as it is then. The caller knows that there is one.
-- Locks: the job's row, FOR NO KEY UPDATE; waits for it.
create or replace function relay.durable_count(p_tenant text, p_job_id uuid) returns record
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_now  timestamptz := clock_timestamp();
  v_most numeric := 4611686018427387904;
  v_row  record;
  v_job  record;
begin
  -- Locked before the chunks are counted: so the last writer has counted last, and no count is lost to an older one.
  perform 1 from relay.durable_job j where j.tenant_id = p_tenant and j.job_id = p_job_id for no key update;
  select count(*) as total, count(*) filter (where c.status = 'pending') as pending,
         count(*) filter (where c.status = 'running') as running, count(*) filter (where c.status = 'retry') as retry,
         count(*) filter (where c.status = 'done') as done, count(*) filter (where c.status = 'failed') as failed,
         count(*) filter (where c.status = 'needs_review') as needs_review,
         count(*) filter (where c.status = 'cancelled') as cancelled, greatest(least(coalesce(sum(c.rows_total), 0), v_most), 0) as rows_total,
         greatest(least(coalesce(sum(c.rows_done), 0), v_most), 0) as rows_done,
         greatest(least(coalesce(sum(c.rows_failed), 0), v_most), 0) as rows_failed
  into v_row
  from (select k.status, k.rows_total, k.rows_done, k.rows_failed from relay.durable_chunk k
        where k.tenant_id = p_tenant and k.job_id = p_job_id order by k.seq offset 0) c;
  update relay.durable_job j
  set chunks_total = v_row.total, chunks_pending = v_row.pending, chunks_running = v_row.running, chunks_retry = v_row.retry,
      chunks_done = v_row.done, chunks_failed = v_row.failed, chunks_needs_review = v_row.needs_review,
      chunks_cancelled = v_row.cancelled, rows_total = v_row.rows_total, rows_done = v_row.rows_done,
      rows_failed = v_row.rows_failed, counted_at = v_now
  where j.tenant_id = p_tenant and j.job_id = p_job_id
  returning j.* into v_job;
  return v_job;
end $$;

-- Guarantees: the job has that status, with the times that go with it: started_at at its first start, ended_at while it has
--   ended. Returns it.
-- Locks: the caller has the job's row FOR UPDATE.
create or replace function relay.durable_turn_to(p_tenant text, p_job_id uuid, p_status text) returns record
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := clock_timestamp();
  v_job record;
begin
  update relay.durable_job j
  set status = p_status, updated_at = v_now,
      started_at = case when p_status = 'running' then coalesce(j.started_at, v_now) else j.started_at end,
      ended_at = case when p_status in ('completed', 'completed_with_errors', 'failed', 'cancelled', 'removing')
                      then v_now end
  where j.tenant_id = p_tenant and j.job_id = p_job_id
  returning j.* into v_job;
  return v_job;
end $$;

-- Guarantees: whether any chunk of the job may still run, or runs. From the far end, where those are that nobody has claimed yet: an
--   old open transaction keeps the index entries of all others alive, and only of a job that is at its end are they read.
create or replace function relay.durable_has_open(p_tenant text, p_job_id uuid) returns boolean
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  return coalesce(
    (select true from relay.durable_chunk c
     where c.tenant_id = p_tenant and c.job_id = p_job_id and c.status = 'running' order by c.seq desc limit 1),
    (select true from relay.durable_chunk c
     where c.tenant_id = p_tenant and c.job_id = p_job_id and c.status in ('pending', 'retry') and c.available_at is null
     order by c.seq desc limit 1),
    (select true from relay.durable_chunk c
     where c.tenant_id = p_tenant and c.job_id = p_job_id and c.available_at is not null order by c.seq desc limit 1),
    false);
end $$;

-- Guarantees: the counters of the job, which has ended, are those of its chunks; where somebody has its row locked this moment they are not.
-- Locks: the job's row, FOR NO KEY UPDATE SKIP LOCKED. It never waits, so chunks may be locked.
create or replace function relay.durable_recount(p_tenant text, p_job_id uuid) returns void
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_job record;
begin
  perform 1 from relay.durable_job j where j.tenant_id = p_tenant and j.job_id = p_job_id for no key update skip locked;
  if found then
    v_job := relay.durable_count(p_tenant, p_job_id);
  end if;
end $$;

-- Guarantees: where the job has not ended, and nothing of it can run any more, it ends: needs_review where a chunk waits for a
--   person; else failed where none is done and some failed, cancelled where none is done and some were cancelled,
--   completed_with_errors where chunks or rows failed, completed else; with its event, its exact counters, and a wake-up to
--   those who watch, in this transaction. A job that has ended already has its counters put
--   right. One without chunks ends only where p_empty: else it may be about to get them. One that goes on is counted only where
--   p_count: of two million chunks that takes seconds. Returns the job as it is then.
-- Locks: the caller has the job's row FOR UPDATE.
create or replace function relay.durable_conclude(
  p_tenant text, p_job_id uuid, p_actor text, p_channel text, p_empty boolean default false, p_count boolean default true)
returns record
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_job    record;
  v_status text;
begin
  if not p_count then
    select j.* into v_job from relay.durable_job j where j.tenant_id = p_tenant and j.job_id = p_job_id;
    if v_job.status in ('queued', 'running', 'paused') and relay.durable_has_open(p_tenant, p_job_id) then
      return v_job;
    end if;
  end if;
  v_job := relay.durable_count(p_tenant, p_job_id);
  if v_job.status not in ('queued', 'running', 'paused', 'needs_review')
     or v_job.chunks_pending + v_job.chunks_retry + v_job.chunks_running > 0
     or v_job.chunks_total = 0 and not p_empty then
    return v_job;
  end if;
  v_status := case when v_job.chunks_needs_review > 0 then 'needs_review'
                   when v_job.chunks_failed > 0 and v_job.chunks_done = 0 then 'failed'
                   when v_job.chunks_cancelled > 0 and v_job.chunks_done = 0 then 'cancelled'
                   when v_job.chunks_failed + v_job.chunks_cancelled + v_job.rows_failed > 0 then 'completed_with_errors'
                   else 'completed' end;
  if v_status <> v_job.status then
    v_job := relay.durable_turn_to(p_tenant, p_job_id, v_status);
    perform relay.durable_tell(
      p_tenant, p_job_id, case when v_status = 'completed_with_errors' then 'completed' else v_status end, array[null::bigint],
      p_actor, p_channel, null,
      array[jsonb_build_object(
        'status', v_status, 'rows_done', v_job.rows_done, 'rows_failed', v_job.rows_failed, 'chunks_done', v_job.chunks_done,
        'chunks_failed', v_job.chunks_failed)]);
    perform relay.durable_ring(p_tenant, array[p_job_id], false);
  end if;
  return v_job;
end $$;

-- Guarantees: at this transaction's commit, and not before, those are woken who watch these jobs; and where p_work, relays that
--   look for chunks of the tenant. Rung again in one transaction, it is heard once; not at all where the queue of notifications
--   is half full.
-- Locks: the commit takes the database-wide notification lock until its WAL is flushed.
create or replace function relay.durable_ring(p_tenant text, p_jobs uuid[], p_work boolean) returns void
language plpgsql
set trace_notify = off
as $$
begin
  -- 33 bytes an id: 200 of them stay below the 8000 bytes that a payload may have.
  perform pg_notify(k.name, d.ids)
  from (select string_agg(replace(u.job_id::text, '-', ''), ',') as ids
        from unnest(p_jobs) with ordinality as u (job_id, i) group by (u.i - 1) / 200) d
  cross join (values (relay.channel_name('durable_watch', p_tenant, null)), (relay.channel_name('durable', p_tenant, null)))
    as k (name)
  where pg_notification_queue_usage() < 0.5;
  if p_work then
    perform relay.notify(relay.channel_name('durable', p_tenant, null), '');
  end if;
end $$;
