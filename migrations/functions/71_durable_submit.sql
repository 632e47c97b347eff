-- role: relay_api
-- room: durable
--
-- How a job comes to be.
--
--   relay.durable_insert_job     the job
--   relay.durable_insert_chunks  its chunks, some at a time
--   relay.durable_seal           submitting -> queued: from here on everybody sees it
--   relay.durable_abandon        submitting -> removing
--
-- In one transaction, the caller's, a job is 'queued' at once, and its commit shows job and chunks together. A submitter who
-- makes chunks as he goes cannot hold a transaction for that long: he makes the job 'submitting', which no reader, claim
-- or person sees, adds chunks in a transaction each, and seals it. If he dies before, nobody ever sees it, and a sweep
-- takes it away (78_durable_end.sql). All three verbs can be sent again after a lost reply: the ids are the caller's.

-- Guarantees: on commit the job is stored, 'queued', or 'submitting' where p_submitting; returns true. False: it is there
--   already, from an earlier call (the id is the caller's). p_max_attempts counts claims of a chunk.
-- Errors: S2001, S2002, S2003; S2010 the id is that of a job of another kind; 23514 a kind that is empty or above 200 bytes,
--   max_attempts below 1; S2022 params or p_created_by that are too large.
-- Locks: inserts only; waits for another transaction that stores the same id.
create or replace function relay.durable_insert_job(
  p_tenant text, p_job_id uuid, p_kind text, p_params jsonb, p_idempotent boolean, p_max_attempts bigint,
  p_priority bigint, p_created_by text, p_submitting boolean default false)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set row_security = on
set enable_seqscan = off set enable_bitmapscan = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_stored boolean;
  v_kind   text;
begin
  if p_job_id is null or p_kind is null or p_priority is null then
    raise exception 'a durable job needs an id, a kind and a priority' using errcode = 'S2020';
  end if;
  if pg_column_size(p_params) > 64 then
    perform relay.check_json('params', p_params, 'value');
  end if;
  if octet_length(p_created_by) > 8192 then
    perform relay.check_size('the name of who submits', octet_length(p_created_by), '8192');
  end if;
  insert into relay.durable_job
    (tenant_id, job_id, kind, params, idempotent, max_attempts, priority, rank, job_seq, status, counted_at, created_by,
     created_at, updated_at)
  values (v_tenant, p_job_id, p_kind, coalesce(p_params, '{}'), p_idempotent, p_max_attempts, p_priority, -p_priority,
          (extract(epoch from v_now) * 1000000)::bigint, case when p_submitting then 'submitting' else 'queued' end, v_now,
          p_created_by, v_now, v_now)
  on conflict do nothing;
  v_stored := found;
  if not v_stored then
    select j.kind into v_kind from relay.durable_job j where j.tenant_id = v_tenant and j.job_id = p_job_id;
    if v_kind is distinct from p_kind then
      raise exception 'this job id is in use by another job' using errcode = 'S2010';
    end if;
    perform relay.confirm_commit();
  elsif not coalesce(p_submitting, false) then
    perform relay.durable_tell(v_tenant, p_job_id, 'submitted', array[null::bigint], p_created_by, 'submit', null, null);
  end if;
  perform relay.unbind_tenant(v_before);
  return v_stored;
end $$;

-- Guarantees: on commit the chunks are there, pending; returns how many of them are new. p_chunks is an array of {"payload": …, "rows":
--   how many rows of the input it stands for (optional)}; they get the numbers from p_from on, in their order (null: behind
--   the last one). Those that are there already stay as they are: so a call can be made again, if it says p_from.
--   The job takes them while it is submitting, queued, running or paused.
--   (One jsonb, so that numbers keep every digit and no driver's array codec is asked.)
-- Errors: S2001, S2002, S2003; S2020 not such an array; S2022 a payload that is too large; S2030 no such job; S2042 the job takes
--   no chunks any more.
-- Locks: the job's row, FOR NO KEY UPDATE: submitters of one job wait for one another, and an end of the job for them.
create or replace function relay.durable_insert_chunks(
  p_tenant text, p_job_id uuid, p_chunks jsonb, p_from bigint default null, p_notify boolean default true)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set row_security = on
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz;
  v_status text;
  v_from   bigint := p_from;
  v_last   bigint;
  v_count  bigint;
  v_rows   bigint;
begin
  if jsonb_typeof(p_chunks) is distinct from 'array' or p_from < 1 then
    raise exception 'the chunks must be a JSON array, and their numbers begin at 1 or later' using errcode = 'S2020';
  end if;
  if jsonb_path_exists(
       p_chunks, '$[*] ? (@.type() != "object" || !exists (@.payload) || exists (@.rows ? (@.type() != "number" || @ < 0
                          || @ != @.floor()) ? (@.type() != "null")))') then
    raise exception 'each chunk needs a payload (a JSON null is one), and rows, if any, are a whole number' using errcode = 'S2020';
  end if;
  -- A claim brings the payloads of several tenants as text, and one that PostgreSQL cannot make would fail it for all.
  perform relay.check_size('a payload', (select max(octet_length((e.value -> 'payload')::text))
                                         from jsonb_array_elements(p_chunks) as e (value)), 'value');
  select j.status into v_status from relay.durable_job j
  where j.tenant_id = v_tenant and j.job_id = p_job_id for no key update;
  if v_status is null or v_status = 'removing' then
    raise exception 'no such durable job' using errcode = 'S2030';
  elsif v_status not in ('submitting', 'queued', 'running', 'paused') then
    raise exception 'the job is % and takes no chunks', v_status using errcode = 'S2042';
  end if;
  v_now := clock_timestamp();
  -- Under the job's lock: nobody else adds chunks to it.
  v_last := coalesce((select c.seq from relay.durable_chunk c
                      where c.tenant_id = v_tenant and c.job_id = p_job_id order by c.seq desc limit 1), 0);
  v_from := coalesce(v_from, v_last + 1);
  with stored as (
    insert into relay.durable_chunk (tenant_id, job_id, seq, payload, status, rows_total, created_at, updated_at)
    select v_tenant, p_job_id, v_from + e.n - 1, e.value -> 'payload', 'pending', coalesce((e.value ->> 'rows')::bigint, 0),
           v_now, v_now
    from jsonb_array_elements(p_chunks) with ordinality as e (value, n)
    -- Not by a conflict of keys: that would wait for a handler's transaction that has such a chunk, with the job locked.
    where v_from + e.n - 1 > v_last
       or not exists (select from relay.durable_chunk c
                      where c.tenant_id = v_tenant and c.job_id = p_job_id and c.seq = v_from + e.n - 1)
    returning rows_total)
  select count(*), coalesce(sum(s.rows_total), 0) into v_count, v_rows from stored s;
  if v_count > 0 then
    update relay.durable_job j
    set updated_at = v_now, chunks_total = j.chunks_total + v_count, chunks_pending = j.chunks_pending + v_count,
        rows_total = j.rows_total + v_rows
    where j.tenant_id = v_tenant and j.job_id = p_job_id;
    if p_notify and v_status <> 'submitting' then
      perform relay.durable_ring(v_tenant, array[p_job_id], v_status <> 'paused');
    end if;
  end if;
  perform relay.unbind_tenant(v_before);
  return v_count;
end $$;

-- Guarantees: the job that was submitting is queued, and everybody sees it and its chunks from this commit on; it has its place
--   among the jobs of its priority by this moment. With no chunk it is completed at once. Told is 'submitted'; relays and
--   watchers are woken unless p_notify is false. Returns its status; where an earlier call has sealed it, the status it has
--   now.
-- Errors: S2001, S2002, S2003; S2030 no such job (it was abandoned, too); S2042 it has not p_chunks chunks, where that is given.
-- Locks: the job's row, FOR UPDATE; waits for it.
create or replace function relay.durable_seal(
  p_tenant text, p_job_id uuid, p_chunks bigint default null, p_notify boolean default true)
returns text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set row_security = on
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_job    record;
  v_seq    bigint;
begin
  select j.* into v_job from relay.durable_job j where j.tenant_id = v_tenant and j.job_id = p_job_id for update;
  if v_job.status is null or v_job.status = 'removing' then
    raise exception 'no such durable job' using errcode = 'S2030';
  end if;
  if v_job.status = 'submitting' then
    v_job := relay.durable_count(v_tenant, p_job_id);
    if v_job.chunks_total <> p_chunks then
      raise exception 'the job has % chunks, not %', v_job.chunks_total, p_chunks using errcode = 'S2042';
    end if;
    v_seq := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
    update relay.durable_job j set job_seq = v_seq where j.tenant_id = v_tenant and j.job_id = p_job_id;
    v_job := relay.durable_turn_to(v_tenant, p_job_id, 'queued');
    perform relay.durable_tell(
      v_tenant, p_job_id, 'submitted', array[null::bigint], v_job.created_by, 'submit', null,
      array[jsonb_build_object('chunks', v_job.chunks_total, 'rows', v_job.rows_total)]);
    if v_job.chunks_total = 0 then
      v_job := relay.durable_conclude(v_tenant, p_job_id, null, null, true);
    elsif p_notify then
      perform relay.durable_ring(v_tenant, array[p_job_id], true);
    end if;
  end if;
  perform relay.unbind_tenant(v_before);
  return v_job.status;
end $$;

-- Guarantees: a job that is being submitted never will be; a sweep takes its rows away. Returns whether there was one. A job
--   that is sealed already is left alone.
-- Errors: S2001, S2002, S2003.
-- Locks: the job's row, FOR UPDATE; waits for it.
create or replace function relay.durable_abandon(p_tenant text, p_job_id uuid) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_status text;
begin
  select j.status into v_status from relay.durable_job j
  where j.tenant_id = v_tenant and j.job_id = p_job_id for update;
  if v_status = 'submitting' then
    perform relay.durable_turn_to(v_tenant, p_job_id, 'removing');
  end if;
  perform relay.unbind_tenant(v_before);
  return coalesce(v_status = 'submitting', false);
end $$;
