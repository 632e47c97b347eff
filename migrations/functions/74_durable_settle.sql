-- role: relay_api
-- room: durable
--
-- What the holder of a chunk may say of it. Every verb matches job id, seq, lease_token and lease_version of a lease that runs:
-- past lease_expires_at, by the database's clock read under the row's lock, the holder has lost, whether or not anybody has
-- taken the chunk back; and where the job was cancelled he has lost, too. One rule for all verbs, so a late wake-up
-- renews nothing (C17), and a fixed name of a worker is no fence (C18).
--
--   relay.durable_heartbeat    many leases go on
--   relay.durable_checkpoint   how far it is                       raise S2041 where the lease is lost, so that the
--   relay.durable_complete     running -> done                     caller's transaction cannot commit what it has done
--                                                                  under it
--   relay.durable_complete_many  the same for many chunks
--   and in 75_durable_back.sql: durable_row_errors_add, durable_fail, durable_release
--
-- They lock their chunks, in the order of job id and seq, and never the job. What they ask of the job they read.

-- Guarantees: locks the chunk, and returns where its row is, while p_token and p_version are its running lease, and its job was not
--   cancelled; null else. at: the clock under the lock. most: its job's max_attempts.
-- Locks: the chunk's row, FOR UPDATE; waits for it.
create or replace function relay.durable_hold(
  p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, out row_id tid, out at timestamptz,
  out attempts bigint, out holder text, out most bigint)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_until  timestamptz;
  v_status text;
begin
  -- lease_expires_at says that it runs; a predicate on the status could take another index than the primary key.
  select c.ctid, c.lease_expires_at, c.attempts, c.claimed_by into row_id, v_until, attempts, holder
  from relay.durable_chunk c
  where c.tenant_id = p_tenant and c.job_id = p_job_id and c.seq = p_seq and c.lease_token = p_token
    and c.lease_version = p_version and c.lease_expires_at is not null
  for update;
  at := clock_timestamp();
  if row_id is not null then
    select j.status, j.max_attempts into v_status, most from relay.durable_job j
    where j.tenant_id = p_tenant and j.job_id = p_job_id;
    if v_until <= at or coalesce(v_status in ('cancelled', 'removing'), true) then
      row_id := null;
    end if;
  end if;
end $$;

-- Guarantees: whether the job is perhaps at its end: none of its chunks is free, and none waits. From the far end: before the chunk that was
--   just completed lie the dead index entries of all others.
create or replace function relay.durable_is_last(p_tenant text, p_job_id uuid) returns boolean
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  return not coalesce(
    (select true from relay.durable_chunk c
     where c.tenant_id = p_tenant and c.job_id = p_job_id and c.status in ('pending', 'retry') and c.available_at is null
     order by c.seq desc limit 1),
    (select true from relay.durable_chunk c
     where c.tenant_id = p_tenant and c.job_id = p_job_id and c.available_at is not null order by c.seq desc limit 1),
    false);
end $$;

-- Guarantees: each of these leases goes on for p_lease from the clock at the write, if it still runs. p_rows_done, where given, is how far
--   each chunk is, null for no change. A row for each outcome and status of a job that there is, with the places that it is
--   said of, null = all:
--   applied  it goes on; job_status tells the holder whether he is to stop (paused)
--   stale    it is lost: stop, and write nothing more
--   busy     somebody has the row locked this moment, perhaps a transaction of the holder's own: ask again
-- Errors: S2001, S2002, S2003; S2020 array lengths, a lease that is not positive or above a day.
-- Locks: FOR NO KEY UPDATE SKIP LOCKED on the chunks. It never waits. The update is HOT.
create or replace function relay.durable_heartbeat(
  p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_lease interval,
  p_rows_done bigint[] default null)
returns table (places bigint[], outcome text, job_status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_count  bigint := coalesce(cardinality(p_seqs), 0);
  v_name   text;
  v_before text;
  v_tenant text;
  v_places bigint[];
  v_jobs   uuid[];
  v_states text[];
  v_held   bigint[];
  v_rows   tid[];
  v_done   bigint[];
  v_now    timestamptz;
begin
  if (cardinality(p_tenants), cardinality(p_job_ids), cardinality(p_tokens), cardinality(p_versions))
       is distinct from (v_count, v_count, v_count, v_count)
     or coalesce(cardinality(p_rows_done), v_count) <> v_count
     or (p_lease > interval '0' and p_lease <= interval '1 day') is not true then
    raise exception 'durable_heartbeat needs arrays of one length and a positive lease of at most a day' using errcode = 'S2020';
  end if;
  for v_name, v_places in
    select u.tenant, array_agg(u.n) from unnest(p_tenants) with ordinality as u (tenant, n)
    group by u.tenant order by u.tenant collate "C"
  loop
    v_before := relay.bind_tenant(v_name, null, '{worker}');
    v_tenant := coalesce(v_name, v_before);
    select array_agg(j.job_id), array_agg(j.status) into v_jobs, v_states
    from (select distinct p_job_ids[u.n] as job_id from unnest(v_places) as u (n)) i
    cross join lateral (
      select b.job_id, b.status from relay.durable_job b where b.tenant_id = v_tenant and b.job_id = i.job_id limit 1) j
    where j.status not in ('submitting', 'cancelled', 'removing');
    -- It never waits, so the clock of before the locks is that of the locks.
    v_now := clock_timestamp();
    select array_agg(i.n), array_agg(l.row_id), array_agg(i.rows_done) into v_held, v_rows, v_done
    from (select u.n, p_job_ids[u.n] as job_id, p_seqs[u.n] as seq, p_tokens[u.n] as token, p_versions[u.n] as version,
                 p_rows_done[u.n] as rows_done
          from unnest(v_places) as u (n) where p_job_ids[u.n] = any (v_jobs) order by p_job_ids[u.n], p_seqs[u.n]) i
    cross join lateral (
      select c.ctid as row_id from relay.durable_chunk c
      where c.tenant_id = v_tenant and c.job_id = i.job_id and c.seq = i.seq and c.lease_token = i.token
        and c.lease_version = i.version and c.lease_expires_at > v_now
      limit 1 for no key update skip locked) l;
    if v_rows is not null then
      perform relay.durable_renew(
        v_tenant, v_rows, case when p_rows_done is not null then v_done end, clock_timestamp() + p_lease);
    end if;
    return query
    select case when cardinality(o.places) < v_count then o.places end, o.outcome, o.status
    from (
      select array_agg(u.n) as places, 'applied' as outcome, v_states[array_position(v_jobs, p_job_ids[u.n])] as status
      from unnest(v_held) as u (n) group by 3) o;
    if cardinality(v_held) is distinct from cardinality(v_places) then
      return query
      select case when cardinality(o.places) < v_count then o.places end, o.outcome, o.status
      from (
        select array_agg(u.n) as places, case when l.here and j.status not in ('cancelled', 'removing') then 'busy' else 'stale' end
               as outcome, j.status
        from (select unnest(v_places) except select unnest(v_held)) as u (n)
        left join lateral (
          select b.status from relay.durable_job b
          where b.tenant_id = v_tenant and b.job_id = p_job_ids[u.n] and b.status <> 'submitting' limit 1) j on true
        left join lateral (
          select true as here from relay.durable_chunk c
          where c.tenant_id = v_tenant and c.job_id = p_job_ids[u.n] and c.seq = p_seqs[u.n]
            and c.lease_token = p_tokens[u.n] and c.lease_version = p_versions[u.n] and c.lease_expires_at > v_now
          limit 1) l on true
        group by 2, 3) o;
    end if;
    v_before := relay.set_tenant(v_before);
  end loop;
end $$;

-- Guarantees: the chunk's checkpoint and counts (null = unchanged) are these when the transaction commits, and its lease goes on for
--   p_lease where that is given; until then nobody else can take the chunk back. Whoever has it after a release or a lost lease
--   begins there.
-- Errors: S2041 the lease is lost; S2001, S2002, S2003; S2020 a lease that is not positive or above a day; S2022 a
--   checkpoint that is too large.
-- Locks: the chunk's row, FOR UPDATE, to the end of the transaction; waits for it. The update is HOT.
create or replace function relay.durable_checkpoint(
  p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_checkpoint jsonb,
  p_rows_done bigint default null, p_rows_failed bigint default null, p_lease interval default null)
returns void
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{worker}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_row    record;
  v_until  timestamptz;
begin
  if p_lease <= interval '0' or p_lease > interval '1 day' then
    raise exception 'a lease must be positive, and at most a day' using errcode = 'S2020';
  end if;
  if pg_column_size(p_checkpoint) > 64 and octet_length(p_checkpoint::text) > 65536 then
    perform relay.check_json('a checkpoint', p_checkpoint, 'checkpoint');
  end if;
  v_row := relay.durable_hold(v_tenant, p_job_id, p_seq, p_token, p_version);
  if v_row.row_id is null then
    raise exception 'the lease of this chunk is lost' using errcode = 'S2041';
  end if;
  v_until := v_row.at + p_lease;
  -- By key: all three columns of it, so no plan takes anything else.
  update relay.durable_chunk c
  set checkpoint = p_checkpoint, rows_done = coalesce(p_rows_done, c.rows_done),
      rows_saved = coalesce(p_rows_done, c.rows_done), rows_failed = coalesce(p_rows_failed, c.rows_failed), updated_at = v_row.at,
      lease_expires_at = coalesce(v_until, c.lease_expires_at)
  where c.tenant_id = v_tenant and c.job_id = p_job_id and c.seq = p_seq;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: the chunk of the bound tenant is done when the transaction commits, with that outcome and those counts (null = as last
--   told). outcome 'applied'; 'repeated': this very completion was applied before; 'stale': the lease is lost, nothing was changed.
--   last: as durable_is_last, false where stale.
-- Locks: the chunk's row, FOR UPDATE, to the end of the transaction; waits for it. Not the job's.
create or replace function relay.durable_complete_one(
  p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_outcome jsonb, p_rows_done bigint,
  p_rows_failed bigint, out outcome text, out last boolean)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_until timestamptz;
  v_now   timestamptz;
  v_job   record;
begin
  if pg_column_size(p_outcome) > 64 and octet_length(p_outcome::text) > 65536 then
    perform relay.check_json('an outcome', p_outcome, 'checkpoint');
  end if;
  -- As durable_hold; here, and with what is_last asks, since a lone completion costs what its statements and functions do.
  select c.lease_expires_at into v_until from relay.durable_chunk c
  where c.tenant_id = p_tenant and c.job_id = p_job_id and c.seq = p_seq and c.lease_token = p_token
    and c.lease_version = p_version and c.lease_expires_at is not null
  for update;
  v_now := clock_timestamp();
  if v_until > v_now then
    -- Behind the lock and so in a later snapshot. Own chunk runs, so it counts neither as free nor as waiting.
    select j.status,
           not coalesce(
             (select true from relay.durable_chunk c
              where c.tenant_id = p_tenant and c.job_id = p_job_id and c.status in ('pending', 'retry')
                and c.available_at is null order by c.seq desc limit 1),
             (select true from relay.durable_chunk c
              where c.tenant_id = p_tenant and c.job_id = p_job_id and c.available_at is not null order by c.seq desc limit 1),
             false) as last
    into v_job from relay.durable_job j where j.tenant_id = p_tenant and j.job_id = p_job_id;
    if v_job.status not in ('cancelled', 'removing') then
      update relay.durable_chunk c
      set status = 'done', outcome = p_outcome, rows_done = coalesce(p_rows_done, c.rows_done),
          rows_failed = coalesce(p_rows_failed, c.rows_failed), lease_expires_at = null, updated_at = v_now, ended_at = v_now
      where c.tenant_id = p_tenant and c.job_id = p_job_id and c.seq = p_seq;
      outcome := 'applied'; last := v_job.last;
      return;
    end if;
  end if;
  if (select c.status = 'done' and c.lease_token = p_token and c.lease_version = p_version from relay.durable_chunk c
      where c.tenant_id = p_tenant and c.job_id = p_job_id and c.seq = p_seq) then
    outcome := 'repeated'; last := relay.durable_is_last(p_tenant, p_job_id);
    perform relay.confirm_commit();
  else
    outcome := 'stale'; last := false;
  end if;
end $$;

-- Guarantees: the chunk is done when the transaction commits, with that outcome and those counts (null = as last told): what the same
--   transaction has written is there exactly once with it. Returns 'applied', or 'repeated': this very completion was applied
--   before and its reply was lost. last = nothing else of the job waits; it may be at its end, and durable_finish is to be
--   called, after the commit.
-- Errors: S2041 the lease is lost, so that the transaction cannot commit; S2001, S2002, S2003; S2022 an outcome that is too large.
-- Locks: the chunk's row, FOR UPDATE, to the end of the transaction; waits for it. Not the job's.
create or replace function relay.durable_complete(
  p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_outcome jsonb,
  p_rows_done bigint default null, p_rows_failed bigint default null, out outcome text, out last boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{worker}');
  v_tenant text := coalesce(p_tenant, v_before);
begin
  select o.outcome, o.last into outcome, last
  from relay.durable_complete_one(v_tenant, p_job_id, p_seq, p_token, p_version, p_outcome, p_rows_done, p_rows_failed) o;
  if outcome = 'stale' then
    raise exception 'the lease of this chunk is lost' using errcode = 'S2041';
  end if;
  v_before := relay.set_tenant(v_before);
end $$;

-- Guarantees: as durable_complete_one, for chunks of one tenant, which is bound, in one transaction: the places of those that were
--   applied, and `last` of each; and for the rest their places, outcomes and `last`, null where there are none.
-- Locks: the chunks, FOR UPDATE, in the order of job id, seq; waits for them.
create or replace function relay.durable_complete_all(
  p_tenant text, p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[],
  p_rows_done bigint[], p_rows_failed bigint[],
  out ns bigint[], out lasts boolean[], out rest bigint[], out rest_outcomes text[], out rest_lasts boolean[])
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_tokens uuid[] := p_tokens[1:1];
  v_seqs   bigint[] := p_seqs;
  v_rows   tid[];
  v_jobs   uuid[];
  v_lasts  boolean[];
  v_now    timestamptz;
begin
  if pg_column_size(p_outcomes) > 100 then
    perform relay.check_size(
      'an outcome', (select max(octet_length(u.outcome::jsonb::text)) from unnest(p_outcomes) as u (outcome)
                     where octet_length(u.outcome) > 64), 'checkpoint');
  end if;
  if not p_tokens[1] = all (p_tokens) then
    v_tokens := array(select distinct u.token from unnest(p_tokens) as u (token));
  end if;
  -- Nothing is locked that does not have one of the tokens. Which of them, and whether still, is looked at when it is written.
  if p_job_ids[1] = all (p_job_ids) then
    -- As a rule they are of one job. One scan for all is twice as fast as a look for each.
    select array_agg(l.row_id) into v_rows
    from (select c.ctid as row_id from relay.durable_chunk c
          where c.tenant_id = p_tenant and c.job_id = p_job_ids[1] and c.seq = any (p_seqs)
            -- Before PostgreSQL 17, see durable_claim.
            and c.seq >= (select min(u.seq) from unnest(p_seqs) as u (seq)) and c.seq <= (select max(u.seq) from unnest(p_seqs) as u (seq))
            and c.lease_token = any (v_tokens) and c.lease_expires_at is not null
          order by c.seq for update) l;
    v_jobs := p_job_ids[1:1];
  else
    select array_agg(l.row_id), array_agg(distinct i.job_id) into v_rows, v_jobs
    from (select distinct u.job_id, u.seq from unnest(p_job_ids, p_seqs) as u (job_id, seq) order by u.job_id, u.seq) i
    cross join lateral (
      select c.ctid as row_id from relay.durable_chunk c
      where c.tenant_id = p_tenant and c.job_id = i.job_id and c.seq = i.seq
        and c.lease_token = any (v_tokens) and c.lease_expires_at is not null
      limit 1 for update) l;
  end if;
  if cardinality(v_rows) < cardinality(p_seqs) then
    -- Perhaps one is there twice: then the first counts.
    v_seqs := array(select case when row_number() over (partition by u.job_id, u.seq, u.token, u.version order by u.n) = 1
                                then u.seq end
                    from unnest(p_job_ids, p_seqs, p_tokens, p_versions) with ordinality as u (job_id, seq, token, version, n)
                    order by u.n);
  end if;
  if v_rows is not null then
    -- The clock after the locks; then the jobs, in a new snapshot. What is being completed runs, so it is neither free nor waits.
    v_now := clock_timestamp();
    select array_agg(j.job_id), array_agg(j.last) into v_jobs, v_lasts
    from unnest(v_jobs) as u (job_id)
    cross join lateral (
      select b.job_id, b.status,
             not coalesce(
               (select true from relay.durable_chunk c
                where c.tenant_id = p_tenant and c.job_id = b.job_id and c.status in ('pending', 'retry')
                  and c.available_at is null order by c.seq desc limit 1),
               (select true from relay.durable_chunk c
                where c.tenant_id = p_tenant and c.job_id = b.job_id and c.available_at is not null order by c.seq desc limit 1),
               false) as last
      from relay.durable_job b where b.tenant_id = p_tenant and b.job_id = u.job_id limit 1) j
    where j.status not in ('cancelled', 'removing');
    select array_agg(d.n), array_agg(d.last) into ns, lasts
    from relay.durable_done(
      p_tenant, v_now, v_rows, p_job_ids, v_seqs, p_tokens, p_versions, p_outcomes, p_rows_done, p_rows_failed, v_jobs, v_lasts) d;
  end if;
  if coalesce(cardinality(ns), 0) < cardinality(p_seqs) then
    select array_agg(u.n), array_agg(case when l.mine then 'repeated' else 'stale' end),
           array_agg(coalesce(l.mine and relay.durable_is_last(p_tenant, p_job_ids[u.n]), false))
    into rest, rest_outcomes, rest_lasts
    from (select generate_series(1, cardinality(p_seqs))::bigint except select unnest(ns)) as u (n)
    left join lateral (
      select c.status = 'done' and c.lease_token = p_tokens[u.n] and c.lease_version = p_versions[u.n] as mine
      from relay.durable_chunk c
      where c.tenant_id = p_tenant and c.job_id = p_job_ids[u.n] and c.seq = p_seqs[u.n] limit 1) l on true;
    if 'repeated' = any (rest_outcomes) then
      perform relay.confirm_commit();
    end if;
  end if;
end $$;

-- Guarantees: as durable_complete, for many chunks, in one transaction: 'applied', 'repeated', or 'stale': the lease is lost, nothing
--   was changed. A row for each outcome and `last` that there is, with the places that it is said of, null = all. p_outcomes:
--   JSON texts.
-- Errors: S2001, S2002, S2003; S2020 array lengths; S2022 an outcome that is too large.
-- Locks: the chunks, FOR UPDATE, in the order of tenant, job id, seq; waits for them.
create or replace function relay.durable_complete_many(
  p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[],
  p_rows_done bigint[] default null, p_rows_failed bigint[] default null)
returns table (places bigint[], outcome text, last boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_count  bigint := coalesce(cardinality(p_seqs), 0);
  v_before text;
  v_tenant text;
  v_part   record;
  v_done   record;
begin
  if (cardinality(p_tenants), cardinality(p_job_ids), cardinality(p_tokens), cardinality(p_versions), cardinality(p_outcomes))
       is distinct from (v_count, v_count, v_count, v_count, v_count)
     or coalesce(cardinality(p_rows_done), v_count) <> v_count or coalesce(cardinality(p_rows_failed), v_count) <> v_count then
    raise exception 'the arrays of durable_complete_many must have one length' using errcode = 'S2020';
  elsif v_count = 0 then
    return;
  elsif v_count = 1 or p_tenants[1] = all (p_tenants) then
    -- As a rule they are of one tenant, and then no array is taken apart.
    v_before := relay.bind_tenant(p_tenants[1], null, '{worker}');
    v_tenant := coalesce(p_tenants[1], v_before);
    if v_count = 1 then
      select o.outcome, o.last into outcome, last
      from relay.durable_complete_one(
        v_tenant, p_job_ids[1], p_seqs[1], p_tokens[1], p_versions[1], p_outcomes[1]::jsonb, p_rows_done[1], p_rows_failed[1]) o;
      return next;
    else
      select o.* into v_done
      from relay.durable_complete_all(
        v_tenant, p_job_ids, p_seqs, p_tokens, p_versions, p_outcomes, p_rows_done, p_rows_failed) o;
      if v_done.rest is null and v_done.lasts[1] = all (v_done.lasts) then
        outcome := 'applied'; last := v_done.lasts[1];
        return next;
      else
        return query
        select case when count(*) < v_count then array_agg(u.n) end, u.outcome, u.last
        from (select a.n, 'applied' as outcome, a.last from unnest(v_done.ns, v_done.lasts) as a (n, last)
              union all
              select a.n, a.outcome, a.last from unnest(v_done.rest, v_done.rest_outcomes, v_done.rest_lasts) as a (n, outcome, last)) u
        group by u.outcome, u.last;
      end if;
    end if;
    v_before := relay.set_tenant(v_before);
  else
    for v_part in
      select u.tenant, array_agg(u.n) as ns, array_agg(u.job_id) as ids, array_agg(u.seq) as seqs, array_agg(u.token) as tokens,
             array_agg(u.version) as versions, array_agg(u.outcome) as outcomes, array_agg(u.rows_done) as done,
             array_agg(u.rows_failed) as failed
      from unnest(p_tenants, p_job_ids, p_seqs, p_tokens, p_versions, p_outcomes, p_rows_done, p_rows_failed) with ordinality
        as u (tenant, job_id, seq, token, version, outcome, rows_done, rows_failed, n)
      group by u.tenant order by u.tenant collate "C"
    loop
      v_before := relay.bind_tenant(v_part.tenant, null, '{worker}');
      v_tenant := coalesce(v_part.tenant, v_before);
      select o.* into v_done
      from relay.durable_complete_all(
        v_tenant, v_part.ids, v_part.seqs, v_part.tokens, v_part.versions, v_part.outcomes, v_part.done, v_part.failed) o;
      return query
      select array_agg(v_part.ns[u.n]), u.outcome, u.last
      from (select a.n, 'applied' as outcome, a.last from unnest(v_done.ns, v_done.lasts) as a (n, last)
            union all
            select a.n, a.outcome, a.last from unnest(v_done.rest, v_done.rest_outcomes, v_done.rest_lasts) as a (n, outcome, last)) u
      group by u.outcome, u.last;
      v_before := relay.set_tenant(v_before);
    end loop;
  end if;
end $$;
