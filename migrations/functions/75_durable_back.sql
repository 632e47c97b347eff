-- role: relay_api
-- room: durable
--
-- How a chunk leaves its holder but by completion; and what he tells of bad rows.
--
--   relay.durable_fail            running -> retry | failed                          by the holder
--   relay.durable_release         running -> pending | retry | cancelled             by the holder, the attempt given back
--   relay.durable_reap            running -> retry | failed | needs_review | cancelled   by anybody, when the lease is over
--   relay.durable_row_errors_add

-- Guarantees: the chunk has failed: it is a retry, from p_delay on, where p_retryable and its job has attempts left, else failed.
--   p_message is its last_error. Told in this transaction: chunk_retried or chunk_failed. status null: the lease is lost,
--   nothing was changed. last: as durable_complete.
-- Errors: S2001, S2002, S2003; S2021 a delay that is negative or not finite; S2022 a message that is too long.
-- Locks: the chunk's row, FOR UPDATE; waits for it. Not the job's.
create or replace function relay.durable_fail(
  p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_message text, p_retryable boolean,
  p_delay interval default null, out status text, out last boolean)
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
  v_at     timestamptz;
begin
  if p_delay < interval '0' or p_delay > interval '10000 days' then
    raise exception 'a delay must be finite and not negative' using errcode = 'S2021';
  end if;
  if octet_length(p_message) > 8192 then
    perform relay.check_size('a message', octet_length(p_message), '8192');
  end if;
  last := false;
  v_row := relay.durable_hold(v_tenant, p_job_id, p_seq, p_token, p_version);
  if v_row.row_id is not null then
    status := case when p_retryable and v_row.attempts < v_row.most then 'retry' else 'failed' end;
    v_at := case when status = 'retry' and p_delay > interval '0' then v_row.at + p_delay end;
    perform relay.durable_move(v_tenant, v_row.at, array[v_row.row_id], status, 'keep', v_at, coalesce(p_message, 'failed'));
    perform relay.durable_tell(
      v_tenant, p_job_id, case when status = 'retry' then 'chunk_retried' else 'chunk_failed' end, array[p_seq], null, null,
      array[v_row.holder],
      array[jsonb_strip_nulls(jsonb_build_object(
        'attempt', v_row.attempts, 'error', left(p_message, 1000), 'retryable', p_retryable,
        'delay_ms', case when v_at is not null then round(extract(epoch from p_delay) * 1000) end))]);
    last := relay.durable_is_last(v_tenant, p_job_id);
  end if;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: each of these chunks is free for others at once, and its attempt is not counted: it is p_to (pending, retry), or
--   cancelled where its job was cancelled. Its checkpoint stays. Per place 'applied' or 'stale' (the lease is lost; one that
--   has run out too: a chunk that may not be run twice then waits for a person).
-- Errors: S2001, S2002, S2003; S2020 array lengths, another p_to.
-- Locks: the chunks, FOR UPDATE, in the order of tenant, job id, seq; waits for them.
create or replace function relay.durable_release(
  p_tenants text[], p_job_ids uuid[], p_seqs bigint[], p_tokens uuid[], p_versions bigint[], p_to text default 'pending',
  p_notify boolean default false)
returns table (n bigint, outcome text, status text)
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
  v_states text[];
  v_now    timestamptz;
  v_to     text;
begin
  if (cardinality(p_tenants), cardinality(p_job_ids), cardinality(p_tokens), cardinality(p_versions))
       is distinct from (v_count, v_count, v_count, v_count) then
    raise exception 'the arrays of durable_release must have one length' using errcode = 'S2020';
  elsif coalesce(p_to not in ('pending', 'retry'), true) then
    raise exception 'a chunk is released to pending or retry' using errcode = 'S2020';
  end if;
  for v_name, v_places in
    select u.tenant, array_agg(u.n) from unnest(p_tenants) with ordinality as u (tenant, n)
    group by u.tenant order by u.tenant collate "C"
  loop
    v_before := relay.bind_tenant(v_name, null, '{worker}');
    v_tenant := coalesce(v_name, v_before);
    select array_agg(i.n), array_agg(l.row_id), array_agg(l.until) into v_ns, v_rows, v_ends
    from (select distinct on (u.job_id, u.seq, u.version, u.token) u.* from (
            select p.n, p_job_ids[p.n] as job_id, p_seqs[p.n] as seq, p_tokens[p.n] as token, p_versions[p.n] as version
            from unnest(v_places) as p (n)) u
          order by u.job_id, u.seq, u.version, u.token, u.n) i
    cross join lateral (
      select c.ctid as row_id, c.lease_expires_at as until from relay.durable_chunk c
      where c.tenant_id = v_tenant and c.job_id = i.job_id and c.seq = i.seq and c.lease_token = i.token
        and c.lease_version = i.version and c.lease_expires_at is not null
      limit 1 for update) l;
    v_now := clock_timestamp();
    -- What was cancelled is never free again. A chunk that runs in a cancelled job was locked while that was cancelled.
    select array_agg(u.n), array_agg(u.row_id), array_agg(case when j.status = 'cancelled' then 'cancelled' else p_to end)
    into v_ns, v_rows, v_states
    from unnest(v_ns, v_rows, v_ends) as u (n, row_id, until)
    cross join lateral (
      select b.status from relay.durable_job b
      where b.tenant_id = v_tenant and b.job_id = p_job_ids[u.n] limit 1) j
    where u.until > v_now and j.status <> 'removing';
    foreach v_to in array array[p_to, 'cancelled'] loop
      if v_to = any (v_states) then
        perform relay.durable_move(
          v_tenant, v_now, (select array_agg(u.row_id) from unnest(v_rows, v_states) as u (row_id, status)
                            where u.status = v_to), v_to, 'back', null, null);
      end if;
    end loop;
    if 'cancelled' = any (v_states) then
      -- Such a job has ended, so nobody else comes to count it.
      perform relay.durable_recount(v_tenant, b.job_id)
      from (select distinct p_job_ids[u.n] as job_id
            from unnest(v_ns, v_states) as u (n, status) where u.status = 'cancelled') b;
    end if;
    return query select u.n, 'applied', u.status from unnest(v_ns, v_states) as u (n, status);
    return query
    select u.n, 'stale', null::text from (select unnest(v_places) except select unnest(v_ns)) as u (n);
    if p_notify and v_ns is not null then
      perform relay.notify(relay.channel_name('durable', v_tenant, null), '');
    end if;
    v_before := relay.set_tenant(v_before);
  end loop;
end $$;

-- Guarantees: these rows of the chunk's input are told as bad when the transaction commits: p_errors is an array of {"row": number,
--   "code": …, "message": …, "data": …}. Said again, by this or a later attempt, of the same row and code, it replaces what
--   was said. Returns how many there are of this call.
-- Errors: S2041 the lease is lost, so that the transaction cannot commit; S2020 not such an array; S2022 a code, message or data that
--   is too large; S2001, S2002, S2003.
-- Locks: the chunk's row, FOR UPDATE, to the end of the transaction; waits for it.
create or replace function relay.durable_row_errors_add(
  p_tenant text, p_job_id uuid, p_seq bigint, p_token uuid, p_version bigint, p_errors jsonb)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{worker}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_row    record;
  v_now    timestamptz;
  v_count  bigint;
begin
  if jsonb_typeof(p_errors) is distinct from 'array'
     or jsonb_path_exists(p_errors, '$[*] ? (@.type() != "object" || !exists (@.row ? (@.type() == "number")))') then
    raise exception 'row errors are a JSON array of objects with a row number' using errcode = 'S2020';
  end if;
  -- Of a page that somebody reads each has its data.
  perform relay.check_size('the code of a row error', max(octet_length(u.value ->> 'code')), '200'),
          relay.check_size('the message of a row error', max(octet_length(u.value ->> 'message')), '8192'),
          relay.check_size('the data of a row error', max(octet_length((u.value -> 'data')::text)), '131072')
  from jsonb_array_elements(p_errors) as u (value);
  v_row := relay.durable_hold(v_tenant, p_job_id, p_seq, p_token, p_version);
  if v_row.row_id is null then
    raise exception 'the lease of this chunk is lost' using errcode = 'S2041';
  end if;
  v_now := v_row.at;
  with stored as (
    insert into relay.durable_row_error (tenant_id, job_id, seq, row_no, code, message, data, lease_version, created_at)
    select v_tenant, p_job_id, p_seq, e.row_no, e.code, e.message, e.data, p_version, v_now
    from (select distinct on (1, 2) (u.value ->> 'row')::bigint as row_no, coalesce(u.value ->> 'code', '') as code,
                 coalesce(u.value ->> 'message', '') as message, u.value -> 'data' as data
          from jsonb_array_elements(p_errors) with ordinality as u (value, i) order by 1, 2, u.i desc) e
    on conflict (tenant_id, job_id, seq, row_no, code)
      do update set message = excluded.message, data = excluded.data, lease_version = excluded.lease_version,
                    created_at = excluded.created_at
    returning 1)
  select count(*) into v_count from stored;
  perform relay.unbind_tenant(v_before);
  return v_count;
end $$;

-- Guarantees: of the tenant's chunks whose lease has run out at most p_limit are taken back, each as it stands under its lock:
--   cancelled     its job was cancelled, or has ended otherwise
--   needs_review  its job may not run a chunk twice: a person decides (relay.durable_resolve)
--   failed        its attempts are used up
--   retry         else, at once
--   A row each, with who held it and the attempt. Told in this transaction: chunk_reaped, and chunk_needs_review (with the
--   last checkpoint, up to 8 kB) or chunk_failed. A chunk that its holder renews, completes or gives up at this moment is not touched, and
--   neither is one of a job that somebody has locked. Call relay.durable_finish for the jobs afterwards, in another transaction.
-- Errors: S2001, S2002, S2003; S2022 p_reaper has more than 200 bytes.
-- Locks: the jobs, FOR KEY SHARE SKIP LOCKED, then their chunks, FOR UPDATE SKIP LOCKED. It never waits.
create or replace function relay.durable_reap(p_tenant text, p_reaper text, p_limit bigint)
returns table (tenant_id text, job_id uuid, seq bigint, status text, attempts bigint, lease_version bigint, holder text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant);
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_left   bigint := p_limit;
  v_job    record;
  v_id     uuid;
  v_jobs   uuid[];
  v_rows   tid[];
  v_seqs   bigint[];
  v_tos    text[];
  v_tries  bigint[];
  v_fences bigint[];
  v_names  text[];
  v_marks  jsonb[];
  v_to     text;
  v_of     bigint[];
begin
  perform relay.check_size('the name of the reaper', octet_length(p_reaper), '200');
  -- The order is there for the index that gives it, which reads no chunk that is not running.
  select array_agg(distinct r.job_id order by r.job_id) into v_jobs
  from (select c.job_id, c.lease_expires_at from relay.durable_chunk c
        where c.tenant_id = v_tenant and c.status = 'running' order by c.job_id, c.seq offset 0) r
  where r.lease_expires_at <= v_now;
  foreach v_id in array coalesce(v_jobs, '{}') loop
    exit when v_left <= 0;
    select j.status, j.idempotent, j.max_attempts into v_job from relay.durable_job j
    where j.tenant_id = v_tenant and j.job_id = v_id for key share skip locked;
    continue when v_job.status is null;
    v_now := clock_timestamp();
    select array_agg(l.row_id), array_agg(l.seq), array_agg(l.attempts), array_agg(l.lease_version), array_agg(l.claimed_by),
           array_agg(case when l.small then l.checkpoint end),
           array_agg(case when v_job.status not in ('queued', 'running', 'paused', 'needs_review') then 'cancelled'
                          when not v_job.idempotent then 'needs_review'
                          when l.attempts >= v_job.max_attempts then 'failed'
                          else 'retry' end)
    into v_rows, v_seqs, v_tries, v_fences, v_names, v_marks, v_tos
    from (select c.ctid as row_id, c.seq, c.attempts, c.lease_version, c.claimed_by, c.checkpoint,
                 pg_column_size(c.checkpoint) <= 8192 as small
          from relay.durable_chunk c
          where c.tenant_id = v_tenant and c.job_id = v_id and c.status = 'running' and c.lease_expires_at <= v_now
          order by c.seq limit v_left for update skip locked) l;
    continue when v_rows is null;
    v_left := v_left - cardinality(v_rows);
    foreach v_to in array array['cancelled', 'needs_review', 'failed', 'retry'] loop
      v_of := array(select u.i from unnest(v_tos) with ordinality as u (status, i) where u.status = v_to order by u.i);
      continue when v_of = '{}';
      perform relay.durable_move(
        v_tenant, v_now, array(select v_rows[u.i] from unnest(v_of) as u (i)), v_to, 'keep', null,
        'S2R-LEASE-LOST: whoever had claimed the chunk stopped renewing its lease');
      perform relay.durable_tell(
        v_tenant, v_id, 'chunk_reaped', array(select v_seqs[u.i] from unnest(v_of) as u (i)), p_reaper, 'reaper',
        array(select v_names[u.i] from unnest(v_of) as u (i)),
        array(select jsonb_build_object('to', v_to, 'attempt', v_tries[u.i], 'lease_version', v_fences[u.i])
              from unnest(v_of) as u (i)));
      if v_to in ('needs_review', 'failed') then
        perform relay.durable_tell(
          v_tenant, v_id, 'chunk_' || v_to, array(select v_seqs[u.i] from unnest(v_of) as u (i)), p_reaper, 'reaper',
          array(select v_names[u.i] from unnest(v_of) as u (i)),
          array(select jsonb_build_object('attempt', v_tries[u.i], 'checkpoint', v_marks[u.i], 'error', 'S2R-LEASE-LOST')
                from unnest(v_of) as u (i)));
      end if;
    end loop;
    if v_job.status in ('completed', 'completed_with_errors', 'failed', 'cancelled') then
      -- It has ended, so nobody else comes to count it.
      perform relay.durable_recount(v_tenant, v_id);
    end if;
    return query
    select v_tenant, v_id, u.seq, u.status, u.attempts, u.version, u.holder
    from unnest(v_seqs, v_tos, v_tries, v_fences, v_names) as u (seq, status, attempts, version, holder);
  end loop;
  perform relay.unbind_tenant(v_before);
end $$;
