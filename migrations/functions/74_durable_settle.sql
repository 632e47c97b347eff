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
--   relay.durable_complete_many  the same for many chunks, an answer each
--   and in 75_durable_back.sql: durable_row_errors_add, durable_fail, durable_release
--
-- They lock their chunks, in the order of job id and seq, and never the job. What they ask of the job they read.

-- Guarantees: locks the chunk, and returns where its row is, while p_token and p_version are its running lease, and its job was not
--   cancelled; null else. p_at: the clock under the lock.
-- Locks: the chunk's row, FOR UPDATE; waits for it.
create or replace function relay.durable_hold(
  p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, out row_id tid, out at timestamptz,
  out attempts bigint, out holder text)
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
    select j.status into v_status from relay.durable_job j where j.tenant_id = p_tenant and j.job_id = p_job_id;
    if v_until <= at or coalesce(v_status in ('cancelled', 'removing'), true) then
      row_id := null;
    end if;
  end if;
end $$;

-- Guarantees: each of these leases goes on for p_lease from the clock at the write, if it still runs. p_rows_done, where given, is how far
--   each chunk is, null for no change. Per place, outcome
--   applied  it goes on; job_status tells the holder whether he is to stop (paused)
--   stale    it is lost: stop, and write nothing more
--   busy     somebody has the row locked this moment, perhaps a transaction of the holder's own: ask again
-- Errors: S2001, S2002, S2003; S2020 array lengths, a lease that is not positive.
-- Locks: FOR NO KEY UPDATE SKIP LOCKED on the chunks. It never waits. The update is HOT.
create or replace function relay.durable_heartbeat(
  p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_lease interval,
  p_rows_done bigint[] default null)
returns table (n bigint, outcome text, job_status text)
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
  v_held   bigint[];
  v_states text[];
  v_rows   tid[];
  v_now    timestamptz;
begin
  if (cardinality(p_tenants), cardinality(p_job_ids), cardinality(p_tokens), cardinality(p_versions))
       is distinct from (v_count, v_count, v_count, v_count)
     or coalesce(cardinality(p_rows_done), v_count) <> v_count or coalesce(p_lease, interval '0') <= interval '0' then
    raise exception 'durable_heartbeat needs arrays of one length and a positive lease' using errcode = 'S2020';
  end if;
  for v_name, v_places in
    select u.tenant, array_agg(u.n) from unnest(p_tenants) with ordinality as u (tenant, n)
    group by u.tenant order by u.tenant collate "C"
  loop
    v_before := relay.bind_tenant(v_name, null, '{worker}');
    v_tenant := coalesce(v_name, v_before);
    v_now := clock_timestamp();
    select array_agg(i.n), array_agg(l.row_id), array_agg(j.status) into v_held, v_rows, v_states
    from (select u.n, p_job_ids[u.n] as job_id, p_seqs[u.n] as seq, p_tokens[u.n] as token, p_versions[u.n] as version
          from unnest(v_places) as u (n) order by p_job_ids[u.n], p_seqs[u.n]) i
    cross join lateral (
      select b.status from relay.durable_job b where b.tenant_id = v_tenant and b.job_id = i.job_id limit 1) j
    cross join lateral (
      -- It never waits, so the clock of before the locks is that of the locks.
      select c.ctid as row_id from relay.durable_chunk c
      where c.tenant_id = v_tenant and c.job_id = i.job_id and c.seq = i.seq and c.lease_token = i.token
        and c.lease_version = i.version and c.lease_expires_at > v_now
      limit 1 for no key update skip locked) l
    where j.status not in ('cancelled', 'removing');
    if v_rows is not null then
      perform relay.durable_renew(
        v_tenant, v_rows,
        case when p_rows_done is not null then (select array_agg(p_rows_done[u.n] order by u.i)
                                                from unnest(v_held) with ordinality as u (n, i)) end,
        clock_timestamp() + p_lease);
      return query select h.n, 'applied', h.status from unnest(v_held, v_states) as h (n, status);
    end if;
    if cardinality(v_held) is distinct from cardinality(v_places) then
      return query
      select u.n, case when l.here and j.status not in ('cancelled', 'removing') then 'busy' else 'stale' end, j.status
      from (select unnest(v_places) except select unnest(v_held)) as u (n)
      left join lateral (
        select b.status from relay.durable_job b
        where b.tenant_id = v_tenant and b.job_id = p_job_ids[u.n] and b.status <> 'submitting' limit 1) j on true
      left join lateral (
        select true as here from relay.durable_chunk c
        where c.tenant_id = v_tenant and c.job_id = p_job_ids[u.n] and c.seq = p_seqs[u.n]
          and c.lease_token = p_tokens[u.n] and c.lease_version = p_versions[u.n] and c.lease_expires_at > v_now
        limit 1) l on true;
    end if;
    v_before := relay.set_tenant(v_before);
  end loop;
end $$;

-- Guarantees: the chunk's checkpoint and counts (null = unchanged) are these when the transaction commits, and its lease goes on for
--   p_lease where that is given; until then nobody else can take the chunk back. Whoever has it after a release or a lost lease
--   begins there.
-- Errors: S2041 the lease is lost; S2001, S2002, S2003.
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

-- Guarantees: the chunk is done when the transaction commits, with that outcome and those counts (null = as last told): what the same
--   transaction has written is there exactly once with it. Returns 'applied', or 'repeated': this very completion was applied
--   before and its reply was lost. last = nothing else of the job waits; it may be at its end, and durable_finish is to be
--   called, after the commit.
-- Errors: S2041 the lease is lost, so that the transaction cannot commit; S2001, S2002, S2003.
-- Locks: the chunk's row, FOR UPDATE, to the end of the transaction; waits for it. Not the job's.
create or replace function relay.durable_complete(
  p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_outcome jsonb,
  p_rows_done bigint default null, p_rows_failed bigint default null, out outcome text, out last boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{worker}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_row    record;
begin
  v_row := relay.durable_hold(v_tenant, p_job_id, p_seq, p_token, p_version);
  if v_row.row_id is not null then
    update relay.durable_chunk c
    set status = 'done', outcome = p_outcome, rows_done = coalesce(p_rows_done, c.rows_done),
        rows_failed = coalesce(p_rows_failed, c.rows_failed), lease_expires_at = null, updated_at = v_row.at,
        ended_at = v_row.at
    where c.tenant_id = v_tenant and c.job_id = p_job_id and c.seq = p_seq;
    outcome := 'applied';
  elsif (select c.status = 'done' and c.lease_token = p_token and c.lease_version = p_version from relay.durable_chunk c
         where c.tenant_id = v_tenant and c.job_id = p_job_id and c.seq = p_seq) then
    outcome := 'repeated';
    perform relay.confirm_commit();
  else
    raise exception 'the lease of this chunk is lost' using errcode = 'S2041';
  end if;
  last := not relay.durable_has_open(v_tenant, p_job_id, false, p_seq);
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: as durable_complete, for many chunks, in one transaction and with an answer each: 'applied', 'repeated', or 'stale':
--   the lease is lost, nothing was changed. p_outcomes: JSON texts.
-- Errors: S2001, S2002, S2003; S2020 array lengths.
-- Locks: the chunks, FOR UPDATE, in the order of tenant, job id, seq; waits for them.
create or replace function relay.durable_complete_many(
  p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_outcomes text[],
  p_rows_done bigint[] default null, p_rows_failed bigint[] default null)
returns table (n bigint, outcome text, last boolean)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_count  bigint := coalesce(cardinality(p_seqs), 0);
  v_name   text;
  v_before text;
  v_tenant text;
  v_places bigint[];
  v_ns     bigint[];
  v_rows   tid[];
  v_ends   timestamptz[];
  v_jobs   uuid[];
  v_last   jsonb;
  v_now    timestamptz;
begin
  if (cardinality(p_tenants), cardinality(p_job_ids), cardinality(p_tokens), cardinality(p_versions), cardinality(p_outcomes))
       is distinct from (v_count, v_count, v_count, v_count, v_count)
     or coalesce(cardinality(p_rows_done), v_count) <> v_count or coalesce(cardinality(p_rows_failed), v_count) <> v_count then
    raise exception 'the arrays of durable_complete_many must have one length' using errcode = 'S2020';
  end if;
  for v_name, v_places in
    select u.tenant, array_agg(u.n) from unnest(p_tenants) with ordinality as u (tenant, n)
    group by u.tenant order by u.tenant collate "C"
  loop
    v_before := relay.bind_tenant(v_name, null, '{worker}');
    v_tenant := coalesce(v_name, v_before);
    select array_agg(i.n), array_agg(l.row_id), array_agg(l.until) into v_ns, v_rows, v_ends
    from (select distinct on (u.job_id, u.seq, u.version) u.* from (
            select p.n, p_job_ids[p.n] as job_id, p_seqs[p.n] as seq, p_tokens[p.n] as token, p_versions[p.n] as version
            from unnest(v_places) as p (n)) u
          order by u.job_id, u.seq, u.version, u.n) i
    cross join lateral (
      select c.ctid as row_id, c.lease_expires_at as until from relay.durable_chunk c
      where c.tenant_id = v_tenant and c.job_id = i.job_id and c.seq = i.seq and c.lease_token = i.token
        and c.lease_version = i.version and c.lease_expires_at is not null
      limit 1 for update) l;
    -- The clock after the locks; then the jobs, in a new snapshot.
    v_now := clock_timestamp();
    select array_agg(j.job_id) into v_jobs
    from (select distinct p_job_ids[p.n] as job_id from unnest(v_places) as p (n)) u
    cross join lateral (
      select b.job_id, b.status from relay.durable_job b where b.tenant_id = v_tenant and b.job_id = u.job_id limit 1) j
    where j.status not in ('cancelled', 'removing');
    select array_agg(u.n), array_agg(u.row_id) into v_ns, v_rows
    from unnest(v_ns, v_rows, v_ends) as u (n, row_id, until)
    where u.until > v_now and p_job_ids[u.n] = any (v_jobs);
    if v_ns is not null then
      perform relay.durable_done(
        v_tenant, v_now, v_ns, v_rows, (select array_agg(o.value::jsonb order by o.i)
                                        from unnest(p_outcomes) with ordinality as o (value, i)), p_rows_done, p_rows_failed);
    end if;
    select coalesce(jsonb_object_agg(u.job_id, not relay.durable_has_open(v_tenant, u.job_id, false, u.seq)), '{}') into v_last
    from (select p_job_ids[p.n] as job_id, max(p_seqs[p.n]) as seq from unnest(v_places) as p (n) group by 1) u
    where u.job_id is not null;
    return query
    select u.n, 'applied', (v_last ->> p_job_ids[u.n]::text)::boolean from unnest(v_ns) as u (n);
    if cardinality(v_ns) is distinct from cardinality(v_places) then
      return query
      select u.n, case when l.mine then 'repeated' else 'stale' end,
             case when l.mine then (v_last ->> p_job_ids[u.n]::text)::boolean else false end
      from (select unnest(v_places) except select unnest(v_ns)) as u (n)
      left join lateral (
        select c.status = 'done' and c.lease_token = p_tokens[u.n] and c.lease_version = p_versions[u.n] as mine
        from relay.durable_chunk c
        where c.tenant_id = v_tenant and c.job_id = p_job_ids[u.n] and c.seq = p_seqs[u.n] limit 1) l on true;
      perform relay.confirm_commit();
    end if;
    v_before := relay.set_tenant(v_before);
  end loop;
end $$;
