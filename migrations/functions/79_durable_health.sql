-- role: relay_api
-- room: durable
--
-- What is amiss, for doctor and for whoever watches over a system. Nothing here changes or locks anything.
--
--   relay.durable_health  the jobs of a tenant that wait for somebody who does not come
--   relay.durable_turns   whether anybody sweeps

-- Guarantees: one row about the tenant's jobs as they are now:
--   review  jobs that wait for a person or have such a chunk, as far as their counters know; since when the first of them does
--   lost    chunks whose lease has run out, and that nobody has taken back; for how long the first
--   idle    jobs that have a chunk to claim, and none under way; for how long nothing has happened to the one that waits longest
--   paused  jobs that somebody has paused
--   At most 10,000 chunks are counted as lost, and 100 jobs as idle.
-- Errors: S2001, S2002, S2003.
create or replace function relay.durable_health(p_tenant text)
returns table (
  review bigint, review_chunks bigint, review_kinds text[], review_for interval, lost bigint, lost_for interval, idle bigint,
  idle_kinds text[], idle_for interval, paused bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
begin
  -- Every job of the tenant is read, and none of their chunks: few of them wait for a person, and an index for those would
  -- be written by every job.
  select count(*) filter (where r.needs), coalesce(sum(r.chunks_needs_review) filter (where r.needs), 0)::bigint,
         array_agg(distinct r.kind) filter (where r.needs), v_now - min(r.updated_at) filter (where r.needs),
         count(*) filter (where r.status = 'paused')
  into review, review_chunks, review_kinds, review_for, paused
  from (select j.kind, j.status, j.updated_at, j.chunks_needs_review,
               j.status = 'needs_review'
               or j.status in ('queued', 'running', 'paused') and j.chunks_needs_review > 0 as needs
        from relay.durable_job j where j.tenant_id = v_tenant order by j.job_id offset 0) r;
  select count(*), v_now - min(l.lease_expires_at) into lost, lost_for
  from (select r.lease_expires_at
        from (select c.lease_expires_at from relay.durable_chunk c
              where c.tenant_id = v_tenant and c.status = 'running' order by c.job_id, c.seq offset 0) r
        where r.lease_expires_at <= v_now limit 10000) l;
  -- When anything last happened to a job of which nothing runs: its last event, and the chunks up to the first that can be
  -- claimed, since claims take the lowest. All of its chunks may be too many to read.
  select count(*), array_agg(distinct i.kind), v_now - min(greatest(i.updated_at, h.told_at, h.moved_at))
  into idle, idle_kinds, idle_for
  from (select o.job_id, o.kind, o.updated_at, f.seq
        from (select j.job_id, j.kind, j.updated_at from relay.durable_job j
              where j.tenant_id = v_tenant and j.status in ('queued', 'running')
              order by j.kind, j.rank, j.job_seq, j.job_id offset 0) o
        cross join lateral (
          select least(
            (select c.seq from relay.durable_chunk c
             where c.tenant_id = v_tenant and c.job_id = o.job_id and c.status in ('pending', 'retry') and c.available_at is null
             order by c.seq limit 1),
            (select c.seq from relay.durable_chunk c
             where c.tenant_id = v_tenant and c.job_id = o.job_id and c.available_at is not null and c.available_at <= v_now
             order by c.seq limit 1)) as seq) f
        where f.seq is not null
          and not coalesce((select true from relay.durable_chunk c
                            where c.tenant_id = v_tenant and c.job_id = o.job_id and c.status = 'running'
                            order by c.seq limit 1), false)
        limit 100) i
  cross join lateral (
    select (select e.at from relay.durable_event e
            where e.tenant_id = v_tenant and e.job_id = i.job_id order by e.xid desc, e.n desc limit 1) as told_at,
           (select max(n.updated_at)
            from (select k.updated_at from relay.durable_chunk k
                  where k.tenant_id = v_tenant and k.job_id = i.job_id and k.seq <= i.seq
                  order by k.seq desc limit 100) n) as moved_at) h;
  perform relay.unbind_tenant(v_before);
  return next;
end $$;

-- Guarantees: for each sweep (lease, finish, remove) that anybody has ever taken a turn of, when the next is due, of all logins' turns
--   the last. No row: that one was never swept.
-- Errors: S2003 this login may do nothing here.
create or replace function relay.durable_turns() returns table (name text, next_due_at timestamptz)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if not exists (select 1 from relay.my_bindings()) then
    raise exception 'login % has no binding', session_user using errcode = 'S2003';
  end if;
  return query select s.name, max(s.next_due_at) from relay.durable_turn s group by s.name;
end $$;
