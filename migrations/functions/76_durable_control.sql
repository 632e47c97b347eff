-- role: relay_api
-- room: durable
--
-- What people and programs decide about jobs. Every change is a compare-and-set under the job's row lock, tells what it
-- really did, and commits together with its event; where it lost, nothing is written.
--
--   relay.durable_control             pause, resume, cancel, retry_failed
--   relay.durable_resolve             a chunk that waits for a person
--   relay.durable_set_job_status      a status, by compare-and-set, with an event or without
--   relay.durable_update_job          what is no status, no lease and no identity
--   relay.durable_set_chunk_statuses  chunks, from some statuses to one

-- Guarantees: whether a job may go from one status to another. completed and cancelled never change; what ended otherwise goes on
--   by a retry alone.
create or replace function relay.durable_may(p_from text, p_to text) returns boolean
language plpgsql immutable
as $$
begin
  return case p_from
    when 'queued' then p_to in ('running', 'paused', 'needs_review', 'completed', 'completed_with_errors', 'failed', 'cancelled')
    when 'running' then p_to in ('queued', 'paused', 'needs_review', 'completed', 'completed_with_errors', 'failed', 'cancelled')
    when 'paused' then p_to in ('queued', 'running', 'needs_review', 'completed', 'completed_with_errors', 'failed', 'cancelled')
    when 'needs_review' then p_to in ('queued', 'running', 'completed', 'completed_with_errors', 'failed', 'cancelled')
    when 'failed' then p_to in ('queued', 'running')
    when 'completed_with_errors' then p_to in ('queued', 'running')
    else false end;
end $$;

-- Guarantees: the chunks of the job behind p_after that are p_from (of p_seqs, where given), at most p_limit of them, are p_to; moved: how
--   many; last: the number of the last one where there may be more behind it. It waits for chunks that are
--   locked, in the order of their seq, for a second in all; where that is over it takes those that are not locked.
-- Locks: the chunks, FOR UPDATE. The caller has the job's row.
create or replace function relay.durable_sweep_chunks(
  p_tenant text, p_job_id uuid, p_from text[], p_to text, p_attempts text, p_seqs bigint[], p_error text,
  p_after bigint default 0, p_limit bigint default null, out moved bigint, out last bigint)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set lock_timeout = '1s'
as $$
declare
  v_rows  tid[];
  v_row   tid;
  v_seq   bigint := p_after;
  v_until timestamptz := clock_timestamp() + current_setting('lock_timeout')::interval;
begin
  begin
    -- Mostly nobody has any of them.
    select array_agg(l.row_id), max(l.seq) into v_rows, last
    from (select c.ctid as row_id, c.seq from relay.durable_chunk c
          where c.tenant_id = p_tenant and c.job_id = p_job_id and c.seq > p_after and c.status = any (p_from)
            and (p_seqs is null or c.seq = any (p_seqs))
          order by c.seq limit p_limit for update nowait) l;
  exception when lock_not_available then
    begin
      -- One by one, since lock_timeout is for each lock and not for all.
      while p_limit is null or coalesce(cardinality(v_rows), 0) < p_limit loop
        perform set_config(
          'lock_timeout', greatest(extract(epoch from v_until - clock_timestamp()) * 1000, 1)::bigint::text, true);
        select c.ctid, c.seq into v_row, v_seq from relay.durable_chunk c
        where c.tenant_id = p_tenant and c.job_id = p_job_id and c.seq > v_seq and c.status = any (p_from)
          and (p_seqs is null or c.seq = any (p_seqs))
        order by c.seq limit 1 for update;
        exit when v_row is null;
        v_rows := v_rows || v_row;
        last := v_seq;
      end loop;
    exception when lock_not_available then
      -- A transaction of a handler, perhaps, that is open for minutes. What it has yet to say it will be refused.
      select array_agg(l.row_id), max(l.seq) into v_rows, last
      from (select c.ctid as row_id, c.seq from relay.durable_chunk c
            where c.tenant_id = p_tenant and c.job_id = p_job_id and c.seq > p_after and c.status = any (p_from)
              and (p_seqs is null or c.seq = any (p_seqs))
            order by c.seq limit p_limit for update skip locked) l;
    end;
  end;
  moved := coalesce(cardinality(v_rows), 0);
  if p_limit is null or moved < p_limit then
    last := null;
  end if;
  if moved > 0 then
    moved := relay.durable_move(p_tenant, clock_timestamp(), v_rows, p_to, p_attempts, null, p_error);
  end if;
end $$;

-- Guarantees: does p_action, and tells what that was:
--   pause         queued, running -> paused. Nothing is claimed any more; who holds a chunk learns of it and gives it back
--   resume        paused -> running (queued, where it never ran)
--   cancel        queued, running, paused -> cancelled, and its chunks that have not ended too; who holds one has lost it. A
--                 chunk that its holder has locked for longer than a second stays running: what it says next is refused, and
--                 the reaper makes it cancelled
--   retry_failed  failed chunks are to be run again as if they never had been; a job that has ended with them is running
--   outcome: applied; already (it is so, or there is nothing to retry); too_late (it has ended); refused (retry_failed of a job
--   that was cancelled; cancel or pause of one that waits for a person: resolve comes first); unknown.
--   was, status: the job's, before and now. chunks: how many were changed. running: how many are under way still.
--   Status and event commit together. Relays and watchers are woken.
--   A call changes 10,000 chunks at most: two million at once would have the job locked for a minute, and whoever has less time
--   for a statement could never cancel it. upto: p_after of the call that goes on behind them (`was` and `outcome` are then of that
--   call; a cancellation is told once), null = that was all. Nothing runs of a cancelled job whether or not somebody goes on; to
--   cancel it again goes on, too.
-- Errors: S2001, S2002, S2003; S2020 another action; S2022 an actor, channel or note of more than 8 KiB.
-- Locks: the job's row, FOR UPDATE; waits for it, and so for claims that are under way. Then chunks, up to a second.
create or replace function relay.durable_control(
  p_tenant text, p_job_id uuid, p_action text, p_actor text default null, p_channel text default null, p_note text default null,
  p_after bigint default 0)
returns table (outcome text, was text, status text, chunks bigint, running bigint, upto bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_job    record;
  v_to     text;
  v_ended  boolean;
  v_most   bigint := 10000;
begin
  if coalesce(p_action not in ('pause', 'resume', 'cancel', 'retry_failed'), true) then
    raise exception 'the action is pause, resume, cancel or retry_failed' using errcode = 'S2020';
  end if;
  perform relay.durable_check_event(p_actor, p_channel, p_note, null);
  select j.* into v_job from relay.durable_job j where j.tenant_id = v_tenant and j.job_id = p_job_id for update;
  was := v_job.status; chunks := 0; running := 0;
  if was is null or was in ('submitting', 'removing') then
    outcome := 'unknown'; was := null;
    return next;
    perform relay.unbind_tenant(v_before);
    return;
  end if;
  v_ended := was in ('completed', 'completed_with_errors', 'failed', 'cancelled');
  outcome := 'applied';
  if p_action = 'pause' then
    if was in ('queued', 'running') then
      v_to := 'paused';
    else
      outcome := case when was = 'paused' then 'already' when v_ended then 'too_late' else 'refused' end;
    end if;
  elsif p_action = 'resume' then
    if was = 'paused' then
      v_to := case when v_job.started_at is null then 'queued' else 'running' end;
    else
      outcome := case when v_ended then 'too_late' when was = 'needs_review' then 'refused' else 'already' end;
    end if;
  elsif p_action = 'cancel' then
    if was in ('queued', 'running', 'paused') then
      v_to := 'cancelled';
      -- First the job: what a holder's transaction says after this commit is refused, also of a chunk that is left out here.
      v_job := relay.durable_turn_to(v_tenant, p_job_id, v_to);
    else
      outcome := case when was = 'cancelled' then 'already' when v_ended then 'too_late' else 'refused' end;
    end if;
    if v_job.status = 'cancelled' then
      -- Of one that was cancelled before, what nobody has come to: whoever had a chunk locked then may have it still.
      select s.moved, s.last into chunks, upto
      from relay.durable_sweep_chunks(
        v_tenant, p_job_id, case when was = 'cancelled' and p_after = 0 then '{pending,retry}'::text[] else '{pending,retry,running}' end,
        'cancelled', 'keep', null, null, p_after, v_most) s;
    end if;
  elsif was in ('completed', 'cancelled') then
    outcome := case was when 'completed' then 'already' else 'refused' end;
  else
    select s.moved, s.last into chunks, upto
    from relay.durable_sweep_chunks(v_tenant, p_job_id, '{failed}', 'retry', 'reset', null, null, p_after, v_most) s;
    v_to := case when chunks > 0 and was in ('completed_with_errors', 'failed', 'needs_review') then 'running' else was end;
    if chunks = 0 then
      outcome := 'already';
    end if;
  end if;
  if outcome = 'applied' then
    if v_to <> v_job.status then
      v_job := relay.durable_turn_to(v_tenant, p_job_id, v_to);
    end if;
    perform relay.durable_tell(
      v_tenant, p_job_id, case p_action when 'pause' then 'paused' when 'resume' then 'resumed' when 'cancel' then 'cancelled'
                          else 'retried' end,
      array[null::bigint], p_actor, p_channel, null,
      array[jsonb_strip_nulls(jsonb_build_object(
        'was', was, 'note', p_note, 'chunks', nullif(chunks, 0), 'more', case when upto is not null then true end))]);
  end if;
  if upto is null and (outcome = 'applied' or chunks > 0 or p_after > 0) then
    -- What was paused until its last chunk had ended ends now. And its counters are those of this moment.
    v_job := relay.durable_conclude(v_tenant, p_job_id, p_actor, p_channel);
  end if;
  if outcome = 'applied' then
    perform relay.durable_ring(v_tenant, array[p_job_id], v_job.status in ('queued', 'running'));
  end if;
  status := v_job.status;
  select count(*) into running
  from (select 1 from relay.durable_chunk c
        where c.tenant_id = v_tenant and c.job_id = p_job_id and c.status = 'running' order by c.seq offset 0) r;
  return next;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: the chunk that waits for a person is, as p_decision says, to be run again as if it never had been ('retry'), 'done' or
--   'failed'; told with p_actor and p_note, in one transaction. A job that waited for it goes on, or ends.
--   outcome: applied; too_late (the chunk does not wait for anybody: already resolved, or never did); refused ('retry' in a
--   job that is cancelled or completed); unknown. chunk_status, status: the chunk's and the job's now.
-- Errors: S2001, S2002, S2003; S2020 another decision; S2022 an actor, channel or note of more than 8 KiB.
-- Locks: the job's row, FOR UPDATE; then the chunk's; waits for both.
create or replace function relay.durable_resolve(
  p_tenant text, p_job_id uuid, p_seq bigint, p_decision text, p_actor text, p_channel text default null,
  p_note text default null, out outcome text, out chunk_status text, out status text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_job    record;
  v_row    record;
begin
  if coalesce(p_decision not in ('retry', 'done', 'failed'), true) then
    raise exception 'a decision is retry, done or failed' using errcode = 'S2020';
  end if;
  perform relay.durable_check_event(p_actor, p_channel, p_note, null);
  select j.* into v_job from relay.durable_job j where j.tenant_id = v_tenant and j.job_id = p_job_id for update;
  if v_job.status not in ('submitting', 'removing') then
    select c.ctid as row_id, c.status, c.attempts, c.claimed_by, c.lease_version into v_row from relay.durable_chunk c
    where c.tenant_id = v_tenant and c.job_id = p_job_id and c.seq = p_seq for update;
    chunk_status := v_row.status;
    status := v_job.status;
  end if;
  if chunk_status is null then
    outcome := 'unknown';
  elsif chunk_status <> 'needs_review' then
    outcome := 'too_late';
  elsif v_job.status in ('cancelled', 'completed') and p_decision = 'retry' then
    outcome := 'refused';
  else
    outcome := 'applied';
    chunk_status := p_decision;
    perform relay.durable_move(
      v_tenant, clock_timestamp(), array[v_row.row_id], p_decision, case p_decision when 'retry' then 'reset' else 'keep' end,
      null, case p_decision when 'failed' then coalesce(p_note, 'failed by a person') end);
    perform relay.durable_tell(
      v_tenant, p_job_id, 'resolved', array[p_seq], p_actor, p_channel, array[v_row.claimed_by],
      array[jsonb_strip_nulls(jsonb_build_object(
        'decision', p_decision, 'note', p_note, 'attempt', v_row.attempts, 'lease_version', v_row.lease_version))]);
    if p_decision = 'retry' and v_job.status not in ('queued', 'running', 'paused') then
      perform relay.durable_turn_to(v_tenant, p_job_id, 'running');
    end if;
    v_job := relay.durable_conclude(v_tenant, p_job_id, p_actor, p_channel, false, false);
    status := v_job.status;
    perform relay.durable_ring(v_tenant, array[p_job_id], p_decision = 'retry');
  end if;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: if the job's status is among p_from, it is p_to, with the columns of p_extra (priority, max_attempts, last_error,
--   params), and p_event, where given, is told: {"type", "seq", "actor", "channel", "holder", "detail"}; in one transaction.
--   Returns whether this caller won; where not, nothing is written, the event neither. completed and cancelled never
--   change. It moves no chunk: relay.durable_control does what a person means. Where p_to is an end, the counters are those
--   of its moment.
-- Errors: S2001, S2002, S2003; S2020 a status that is none, a column that is not of those or a value that is not its, an
--   event without a type.
-- Locks: the job's row, FOR UPDATE; waits for it.
create or replace function relay.durable_set_job_status(
  p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb default '{}', p_event jsonb default null)
returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_status text;
  v_won    boolean;
  v_job    record;
begin
  if not coalesce(p_from || p_to <@ '{queued,running,paused,needs_review,completed,completed_with_errors,failed,cancelled}', false)
  then
    raise exception 'not a status of a durable job' using errcode = 'S2020';
  end if;
  if p_event is not null
     and (coalesce(octet_length(p_event ->> 'type') not between 1 and 100, true)
          or coalesce(p_event ->> 'seq', '1') !~ '^[1-9][0-9]{0,17}\Z') then
    raise exception 'an event is an object with a type of 1 to 100 bytes, and a number of a chunk, if any' using errcode = 'S2020';
  end if;
  perform relay.durable_check_event(p_event ->> 'actor', p_event ->> 'channel', p_event ->> 'holder', p_event -> 'detail');
  perform relay.durable_check_extra(p_extra);
  select j.status into v_status from relay.durable_job j
  where j.tenant_id = v_tenant and j.job_id = p_job_id for update;
  v_won := coalesce(v_status = any (p_from) and relay.durable_may(v_status, p_to), false);
  if v_won then
    perform relay.durable_turn_to(v_tenant, p_job_id, p_to);
    perform relay.durable_write_extra(v_tenant, p_job_id, p_extra);
    if p_to in ('completed', 'completed_with_errors', 'failed', 'cancelled') then
      v_job := relay.durable_count(v_tenant, p_job_id);
    end if;
    if p_event is not null then
      perform relay.durable_tell(
        v_tenant, p_job_id, p_event ->> 'type', array[(p_event ->> 'seq')::bigint], p_event ->> 'actor',
        p_event ->> 'channel', array[p_event ->> 'holder'], array[p_event -> 'detail']);
    end if;
    perform relay.durable_ring(v_tenant, array[p_job_id], p_to in ('queued', 'running'));
  end if;
  perform relay.unbind_tenant(v_before);
  return v_won;
end $$;

-- Guarantees: nothing, but that p_extra is an object whose columns may be written from outside, and have such values.
-- Errors: S2020 it is not; S2022 a value is too large.
create or replace function relay.durable_check_extra(p_extra jsonb) returns void
language plpgsql
as $$
begin
  if jsonb_typeof(p_extra) is distinct from 'object'
     or p_extra - '{priority,max_attempts,last_error,params}'::text[] <> '{}' then
    raise exception 'of a durable job only priority, max_attempts, last_error and params can be written'
      using errcode = 'S2020';
  elsif coalesce(p_extra ->> 'priority', '0') !~ '^-?[0-9]{1,18}\Z' or coalesce(p_extra ->> 'max_attempts', '1') !~ '^[1-9][0-9]{0,17}\Z' then
    raise exception 'priority is a whole number, and max_attempts one of at least 1' using errcode = 'S2020';
  end if;
  perform relay.check_size('last_error', octet_length(p_extra ->> 'last_error'), '8192'),
          relay.check_json('params', p_extra -> 'params', 'value');
end $$;

-- Guarantees: the job has these columns; those that p_extra has not are as they were.
-- Locks: the job's row; waits for it.
create or replace function relay.durable_write_extra(p_tenant text, p_job_id uuid, p_extra jsonb) returns bigint
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_now   timestamptz := clock_timestamp();
  v_count bigint;
begin
  update relay.durable_job j
  set priority = coalesce((p_extra ->> 'priority')::bigint, j.priority),
      rank = -coalesce((p_extra ->> 'priority')::bigint, j.priority),
      max_attempts = coalesce((p_extra ->> 'max_attempts')::bigint, j.max_attempts),
      last_error = case when p_extra ? 'last_error' then p_extra ->> 'last_error' else j.last_error end,
      params = coalesce(p_extra -> 'params', j.params), updated_at = v_now
  where j.tenant_id = p_tenant and j.job_id = p_job_id;
  get diagnostics v_count = row_count;
  return v_count;
end $$;

-- Guarantees: the job has these columns (see durable_set_job_status), whatever its status. Returns whether there is such a job.
-- Errors: S2001, S2002, S2003; S2020 a column that is not of those; S2022 a value that is too large.
-- Locks: the job's row; waits for it.
create or replace function relay.durable_update_job(p_tenant text, p_job_id uuid, p_extra jsonb) returns boolean
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_status text;
begin
  perform relay.durable_check_extra(p_extra);
  select j.status into v_status from relay.durable_job j
  where j.tenant_id = v_tenant and j.job_id = p_job_id for no key update;
  if v_status not in ('submitting', 'removing') then
    perform relay.durable_write_extra(v_tenant, p_job_id, p_extra);
  end if;
  perform relay.unbind_tenant(v_before);
  return coalesce(v_status not in ('submitting', 'removing'), false);
end $$;

-- Guarantees: the job's chunks whose status is among p_from (and seq among p_seqs, where given) are p_to, each with its lease_version
--   one higher and in nobody's hands: who held it has lost it. p_extra: last_error, and "attempts": "reset". Returns how
--   many. It tells no event and ends no job. After a second of waiting, those that are locked stay as they are:
--   a transaction of a handler may be open for minutes, and a pause of the job would wait for it too.
-- Errors: S2001, S2002, S2003; S2020 a status that is none, running as p_to, another column.
-- Locks: the job's row, FOR KEY SHARE; then the chunks, FOR UPDATE, in the order of seq; waits for them, up to a second.
create or replace function relay.durable_set_chunk_statuses(
  p_tenant text, p_job_id uuid, p_from text[], p_to text, p_extra jsonb default '{}', p_seqs bigint[] default null)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_count  bigint := 0;
  v_status text;
begin
  if not coalesce(p_from <@ '{pending,running,retry,done,failed,needs_review,cancelled}'
                  and p_to in ('pending', 'retry', 'done', 'failed', 'needs_review', 'cancelled'), false) then
    raise exception 'not a status of a chunk, or one that only a claim gives' using errcode = 'S2020';
  end if;
  if jsonb_typeof(p_extra) is distinct from 'object' or p_extra - '{last_error,attempts}'::text[] <> '{}'
     or p_extra ->> 'attempts' <> 'reset' then
    raise exception 'of a chunk only last_error can be written, and attempts be reset' using errcode = 'S2020';
  end if;
  perform relay.check_size('last_error', octet_length(p_extra ->> 'last_error'), '8192');
  select j.status into v_status from relay.durable_job j
  where j.tenant_id = v_tenant and j.job_id = p_job_id for key share;
  if v_status not in ('submitting', 'removing') then
    select s.moved into v_count
    from relay.durable_sweep_chunks(
      v_tenant, p_job_id, p_from, p_to, coalesce(p_extra ->> 'attempts', 'keep'), p_seqs, p_extra ->> 'last_error') s;
  end if;
  if v_count > 0 then
    perform relay.durable_ring(v_tenant, array[p_job_id], p_to in ('pending', 'retry'));
  end if;
  perform relay.unbind_tenant(v_before);
  return v_count;
end $$;
