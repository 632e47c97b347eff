-- role: relay_api
-- room: durable
--
-- To look. Nothing here changes or locks anything; a job that is being submitted or removed is as one that is not there. And
-- nobody is shown a lease_token: it is the fence, and its holder's alone.
--
--   relay.durable_jobs        jobs by id, with their counters of this moment where asked for
--   relay.durable_chunks      chunks of a job, in their order
--   relay.durable_row_errors  bad rows of a job, a page at a time
--   relay.durable_query       jobs, chunks, row errors or events, by what their columns hold
-- (relay.durable_events is in 72_durable_events.sql.)

-- Guarantees: a row for each of these jobs that there is. p_fresh: where it has not ended, its counters are those of its chunks now and
--   not those of counted_at; that reads all its chunks. Where it has ended they are exact: a job that was cancelled while a
--   handler's transaction had a chunk locked is counted anew, since what that transaction has said before may commit after.
-- Errors: S2001, S2002, S2003.
create or replace function relay.durable_jobs(p_tenant text, p_job_ids uuid[], p_fresh boolean default false)
returns table (
  job_id uuid, kind text, params text, idempotent boolean, max_attempts bigint, priority bigint, status text,
  rows_total bigint, rows_done bigint, rows_failed bigint, chunks_total bigint, chunks_pending bigint,
  chunks_running bigint, chunks_retry bigint, chunks_done bigint, chunks_failed bigint, chunks_needs_review bigint,
  chunks_cancelled bigint, counted_at timestamptz, last_error text, created_by text, created_at timestamptz,
  started_at timestamptz, ended_at timestamptz, updated_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_most   numeric := 4611686018427387904;
begin
  return query
  select j.job_id, j.kind, j.params::text, j.idempotent, j.max_attempts, j.priority, j.status,
         coalesce(f.rows_total, j.rows_total), coalesce(f.rows_done, j.rows_done), coalesce(f.rows_failed, j.rows_failed),
         coalesce(f.total, j.chunks_total), coalesce(f.pending, j.chunks_pending), coalesce(f.running, j.chunks_running),
         coalesce(f.retry, j.chunks_retry), coalesce(f.done, j.chunks_done), coalesce(f.failed, j.chunks_failed),
         coalesce(f.needs_review, j.chunks_needs_review), coalesce(f.cancelled, j.chunks_cancelled),
         case when f.total is null then j.counted_at else v_now end, j.last_error, j.created_by, j.created_at, j.started_at,
         j.ended_at, j.updated_at
  from unnest(p_job_ids) with ordinality as u (job_id, i)
  cross join lateral (
    select b.* from relay.durable_job b where b.tenant_id = v_tenant and b.job_id = u.job_id limit 1) j
  left join lateral (
    select count(*) as total, count(*) filter (where c.status = 'pending') as pending,
           count(*) filter (where c.status = 'running') as running, count(*) filter (where c.status = 'retry') as retry,
           count(*) filter (where c.status = 'done') as done, count(*) filter (where c.status = 'failed') as failed,
           count(*) filter (where c.status = 'needs_review') as needs_review,
           count(*) filter (where c.status = 'cancelled') as cancelled, -- Within 0 and 2^62, as relay.durable_count has them.
           greatest(least(coalesce(sum(c.rows_total), 0), v_most), 0)::bigint as rows_total,
           greatest(least(coalesce(sum(c.rows_done), 0), v_most), 0)::bigint as rows_done,
           greatest(least(coalesce(sum(c.rows_failed), 0), v_most), 0)::bigint as rows_failed
    from (select k.status, k.rows_total, k.rows_done, k.rows_failed from relay.durable_chunk k
          where k.tenant_id = v_tenant and k.job_id = u.job_id order by k.seq offset 0) c
    where case when j.ended_at is null then p_fresh else j.chunks_pending + j.chunks_retry + j.chunks_running > 0 end
    having case when j.ended_at is null then p_fresh else j.chunks_pending + j.chunks_retry + j.chunks_running > 0 end) f on true
  where j.status not in ('submitting', 'removing')
  order by u.i;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: chunks of the job, in the order of seq: those of p_seqs, or else at most p_limit behind p_after, in one status where given.
-- Errors: S2001, S2002, S2003.
create or replace function relay.durable_chunks(
  p_tenant text, p_job_id uuid, p_seqs bigint[] default null, p_after bigint default 0, p_limit bigint default 1000,
  p_status text default null)
returns table (
  job_id uuid, seq bigint, payload text, status text, attempts bigint, lease_version bigint,
  lease_expires_at timestamptz, claimed_by text, claimed_at timestamptz, available_at timestamptz, checkpoint text,
  outcome text, rows_total bigint, rows_done bigint, rows_failed bigint, last_error text, created_at timestamptz,
  updated_at timestamptz, ended_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_status text;
begin
  select j.status into v_status from relay.durable_job j where j.tenant_id = v_tenant and j.job_id = p_job_id;
  if v_status not in ('submitting', 'removing') then
    if p_seqs is not null then
      return query
      select c.job_id, c.seq, c.payload::text, c.status, c.attempts, c.lease_version, c.lease_expires_at,
             c.claimed_by, c.claimed_at, c.available_at, c.checkpoint::text, c.outcome::text, c.rows_total, c.rows_done,
             c.rows_failed, c.last_error, c.created_at, c.updated_at, c.ended_at
      from (select distinct p.seq from unnest(p_seqs) as p (seq) order by p.seq) u
      cross join lateral (
        select k.* from relay.durable_chunk k
        where k.tenant_id = v_tenant and k.job_id = p_job_id and k.seq = u.seq limit 1) c
      order by u.seq;
    else
      return query
      select c.job_id, c.seq, c.payload::text, c.status, c.attempts, c.lease_version, c.lease_expires_at,
             c.claimed_by, c.claimed_at, c.available_at, c.checkpoint::text, c.outcome::text, c.rows_total, c.rows_done,
             c.rows_failed, c.last_error, c.created_at, c.updated_at, c.ended_at
      from relay.durable_chunk c
      where c.tenant_id = v_tenant and c.job_id = p_job_id and c.seq > p_after and (p_status is null or c.status = p_status)
      order by c.seq limit p_limit;
    end if;
  end if;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: at most p_limit bad rows of the job (of chunk p_seq, where given), in the order of chunk, row and code, behind
--   (p_after_seq, p_after_row, p_after_code).
-- Errors: S2001, S2002, S2003.
create or replace function relay.durable_row_errors(
  p_tenant text, p_job_id uuid, p_limit bigint, p_after_seq bigint default 0, p_after_row bigint default -9223372036854775808,
  p_after_code text default '', p_seq bigint default null)
returns table (
  seq bigint, row_no bigint, code text, message text, data text, lease_version bigint, created_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_status text;
  v_first  bigint := coalesce(p_seq, 0);
  v_last   bigint := coalesce(p_seq, 9223372036854775807);
begin
  select j.status into v_status from relay.durable_job j where j.tenant_id = v_tenant and j.job_id = p_job_id;
  if v_status not in ('submitting', 'removing') then
    return query
    select e.seq, e.row_no, e.code, e.message, e.data::text, e.lease_version, e.created_at
    from relay.durable_row_error e
    where e.tenant_id = v_tenant and e.job_id = p_job_id and e.seq between v_first and v_last
      and (e.seq, e.row_no, e.code) > (p_after_seq, p_after_row, p_after_code collate "C")
    order by e.seq, e.row_no, e.code limit p_limit;
  end if;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: whether p_value, a column of a row as JSON, stands to p_wanted as p_op says: =, <>, <, <=, >, >=, in, is_null, not_null; numbers
--   are compared as numbers, times as times, all else as text by its bytes. A null is only is_null.
-- Errors: S2020 another operator; 22P02 and the like where p_wanted is not of the column's kind.
create or replace function relay.durable_matches(p_value jsonb, p_kind text, p_op text, p_wanted jsonb) returns boolean
language plpgsql stable
as $$
declare
  v_text text := p_value #>> '{}';
  v_want text := p_wanted #>> '{}';
  v_sign int;
begin
  if p_op = 'is_null' then
    return v_text is null;
  elsif p_op = 'not_null' then
    return v_text is not null;
  elsif v_text is null then
    return false;
  elsif p_op = 'in' then
    return exists (select 1 from jsonb_array_elements(p_wanted) as w (item)
                   where relay.durable_matches(p_value, p_kind, '=', w.item));
  end if;
  v_sign := case p_kind
    when 'number' then sign(v_text::numeric - v_want::numeric)::int
    when 'time' then sign(extract(epoch from v_text::timestamptz - v_want::timestamptz))::int
    when 'uuid' then case when v_text::uuid = v_want::uuid then 0 when v_text::uuid < v_want::uuid then -1 else 1 end
    else case when v_text = v_want then 0 when v_text collate "C" < v_want collate "C" then -1 else 1 end end;
  if p_op not in ('=', '<>', '<', '<=', '>', '>=') then
    raise exception 'an operator is =, <>, <, <=, >, >=, in, is_null or not_null' using errcode = 'S2020';
  end if;
  return case p_op when '=' then v_sign = 0 when '<>' then v_sign <> 0 when '<' then v_sign < 0 when '<=' then v_sign <= 0
                   when '>' then v_sign > 0 else v_sign >= 0 end;
end $$;

-- Guarantees: whether the row, as JSON, meets every condition of p_filter.
create or replace function relay.durable_meets(p_row jsonb, p_filter jsonb, p_kinds jsonb) returns boolean
language plpgsql stable
as $$
begin
  return not exists (
    select 1 from jsonb_array_elements(p_filter) as f (c)
    where relay.durable_matches(p_row -> (f.c ->> 'column'), p_kinds ->> (f.c ->> 'column'), f.c ->> 'op', f.c -> 'value')
          is not true);
end $$;

-- Guarantees: at most p_limit rows of p_table (job, chunk, row_error, event) as JSON objects, in the order of their keys, jobs the newest
--   first, that meet every condition of p_filter, an array of {"column", "op", "value"}; of job p_job_id where given. after =
--   what to pass as p_after for what comes next. It reads rows in that order until it has p_limit that meet the filter.
--   This is for people; a reader of the timeline who must miss nothing goes by relay.durable_events.
-- Errors: S2001, S2002, S2003; S2020 another table, column or operator.
create or replace function relay.durable_query(
  p_tenant text, p_table text, p_filter jsonb default '[]', p_job_id uuid default null, p_after jsonb default null,
  p_limit bigint default 100)
returns table (item text, after text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_low    uuid := coalesce(p_job_id, '00000000-0000-0000-0000-000000000000');
  v_high   uuid := coalesce(p_job_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff');
  v_job    uuid := (p_after ->> 0)::uuid;
  v_seq    bigint := (p_after ->> 1)::bigint;
  v_kinds  jsonb;
begin
  v_kinds := case p_table
    when 'job' then '{"job_id": "uuid", "kind": "text", "status": "text", "idempotent": "text", "max_attempts": "number",
      "priority": "number", "created_by": "text", "last_error": "text", "rows_total": "number", "rows_done": "number",
      "rows_failed": "number", "chunks_total": "number", "chunks_pending": "number", "chunks_running": "number",
      "chunks_retry": "number", "chunks_done": "number", "chunks_failed": "number", "chunks_needs_review": "number",
      "chunks_cancelled": "number", "counted_at": "time", "created_at": "time", "started_at": "time", "ended_at": "time",
      "updated_at": "time"}'
    when 'chunk' then '{"job_id": "uuid", "seq": "number", "status": "text", "attempts": "number", "lease_version": "number",
      "claimed_by": "text", "claimed_at": "time", "lease_expires_at": "time", "available_at": "time", "rows_total": "number",
      "rows_done": "number", "rows_failed": "number", "last_error": "text", "created_at": "time", "updated_at": "time",
      "ended_at": "time"}'
    when 'row_error' then '{"job_id": "uuid", "seq": "number", "row_no": "number", "code": "text", "message": "text",
      "lease_version": "number", "created_at": "time"}'
    when 'event' then '{"job_id": "uuid", "seq": "number", "type": "text", "actor": "text", "channel": "text",
      "holder": "text", "at": "time"}'
    end::jsonb;
  if v_kinds is null or jsonb_typeof(p_filter) is distinct from 'array' then
    raise exception 'a query is of job, chunk, row_error or event, and its filter an array' using errcode = 'S2020';
  end if;
  if exists (select 1 from jsonb_array_elements(p_filter) as f (c)
             where jsonb_typeof(f.c) <> 'object' or not coalesce(v_kinds ? (f.c ->> 'column'), false)
                or coalesce(f.c ->> 'op' not in ('=', '<>', '<', '<=', '>', '>=', 'in', 'is_null', 'not_null'), true)
                or case when f.c ->> 'op' = 'in' then jsonb_typeof(f.c -> 'value') is distinct from 'array'
                        when f.c ->> 'op' not in ('is_null', 'not_null')
                          then coalesce(jsonb_typeof(f.c -> 'value') in ('null', 'array', 'object'), true) end) then
    raise exception 'the filter names a column or an operator that there is not, or no value for it' using errcode = 'S2020';
  end if;
  if p_table = 'job' then
    v_high := coalesce(v_job, v_high);
    return query
    select (to_jsonb(r) - '{tenant_id,rank,job_seq}'::text[])::text, jsonb_build_array(r.job_id)::text
    from (select j.* from relay.durable_job j
          where j.tenant_id = v_tenant and j.job_id >= v_low and j.job_id <= v_high and j.job_id is distinct from v_job
            and j.status not in ('submitting', 'removing') and relay.durable_meets(to_jsonb(j), p_filter, v_kinds)
          order by j.job_id desc limit p_limit) r;
  elsif p_table = 'chunk' then
    return query
    select (to_jsonb(r) - '{tenant_id,lease_token,rows_saved}'::text[])::text, jsonb_build_array(r.job_id, r.seq)::text
    from (select c.* from relay.durable_chunk c
          where c.tenant_id = v_tenant and c.job_id >= v_low and c.job_id <= v_high
            and (c.job_id, c.seq) > (coalesce(v_job, v_low), coalesce(v_seq, 0))
            and relay.durable_meets(to_jsonb(c) - '{payload,checkpoint,outcome}'::text[], p_filter, v_kinds)
            and exists (select 1 from relay.durable_job j
                        where j.tenant_id = v_tenant and j.job_id = c.job_id
                          and j.status not in ('submitting', 'removing'))
          order by c.job_id, c.seq limit p_limit) r;
  elsif p_table = 'row_error' then
    return query
    select (to_jsonb(r) - 'tenant_id')::text, jsonb_build_array(r.job_id, r.seq, r.row_no, r.code)::text
    from (select e.* from relay.durable_row_error e
          where e.tenant_id = v_tenant and e.job_id >= v_low and e.job_id <= v_high
            and (e.job_id, e.seq, e.row_no, e.code)
                > (coalesce(v_job, v_low), coalesce(v_seq, 0), coalesce((p_after ->> 2)::bigint, -9223372036854775808),
                   coalesce(p_after ->> 3, '') collate "C")
            and relay.durable_meets(to_jsonb(e) - 'data', p_filter, v_kinds)
            and exists (select 1 from relay.durable_job j
                        where j.tenant_id = v_tenant and j.job_id = e.job_id
                          and j.status not in ('submitting', 'removing'))
          order by e.job_id, e.seq, e.row_no, e.code limit p_limit) r;
  else
    return query
    select (to_jsonb(r) - 'tenant_id')::text, jsonb_build_array(r.job_id, r.xid::text, r.n)::text
    from (select e.* from relay.durable_event e
          where e.tenant_id = v_tenant and e.job_id >= v_low and e.job_id <= v_high
            and (e.job_id, e.xid, e.n)
                > (coalesce(v_job, v_low), coalesce((p_after ->> 1)::xid8, '0'), coalesce((p_after ->> 2)::bigint, 0))
            and relay.durable_meets(to_jsonb(e) - 'detail', p_filter, v_kinds)
            and exists (select 1 from relay.durable_job j
                        where j.tenant_id = v_tenant and j.job_id = e.job_id
                          and j.status not in ('submitting', 'removing'))
          order by e.job_id, e.xid, e.n limit p_limit) r;
  end if;
  perform relay.unbind_tenant(v_before);
end $$;
