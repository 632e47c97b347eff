-- role: relay_api
-- room: outbox
--
-- What is done to events that the caller has found and locked, and the order among events of one key. Internal: no login
-- may call any of it. The verbs that do run as relay_api already and have pinned their search_path.
--
--   relay.outbox_drop     delivered, or purged: gone
--   relay.outbox_back     claimed -> ready | parked, and what else ends a claim
--   relay.outbox_hold     ready -> waiting
--   relay.outbox_open     waiting -> ready
--   relay.outbox_promote  the next of a key whose turn has come
--   relay.outbox_ring     the wake-up
--   relay.outbox_new_id   a UUIDv7
--
-- Rows are named by ctid, and the first four may use no index: a Tid Scan is what is left. So no plan can go bad, whatever
-- the planner believes of the table. The row is locked, so its ctid cannot change between the statements.
--
-- Order within a key. Live are the events of a key that are not parked; the first of them by (seq, event_id) is the one
-- whose turn it is. An event is stored as waiting where its writer sees a live one of its key, else as ready. A claim takes
-- an event of a key only where it is the first, and turns the others into waiting. Whatever ends a claim, or an event by
-- parking, makes the first of the key ready where that was waiting.
--   The first may come when another is claimed already: its transaction committed later, or a person has retried it. It is
-- turned into waiting then. That other may also be under way to be claimed: so whoever takes the first has each other ready
-- one locked, or leaves it.
--   A claim that turns an event into waiting has the one before it locked (FOR KEY SHARE): whoever ends that one waits, and
-- then sees the waiting one. A writer locks nothing of others, so its transaction may commit a waiting event just after
-- the one before it has ended: that lost turn is found by relay.outbox_due, which looks through the keys that wait.

-- Guarantees: the events are gone. Returns how many.
create or replace function relay.outbox_drop(p_tenant text, p_rows tid[]) returns bigint
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_count bigint;
begin
  delete from relay.outbox o where o.ctid = any (p_rows) and o.tenant_id = p_tenant;
  get diagnostics v_count = row_count;
  return v_count;
end $$;

-- Guarantees: each row is claimed by nobody, its fence one higher; row p_rows[i] takes its values from place p_ns[i]:
--   release  ready again, nothing counted; available as before, or after its delay where there is one
--   failed   attempts + 1, last_error; ready again after its delay, or parked where p_max_attempts is reached
--   park     attempts + 1, last_error; parked
--   late     last_error; parked
--   By the clock p_at. p_suspect: whether what failed is to be claimed alone.
create or replace function relay.outbox_back(
  p_tenant text, p_at timestamptz, p_ns bigint[], p_rows tid[], p_outcomes text[], p_errors text[], p_delays interval[],
  p_max_attempts bigint, p_suspect boolean)
returns table (n bigint, event_id uuid, kind text, key text, state text)
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
-- A delay of a day is 24 hours, also where the session's time zone changes its clocks.
set timezone = 'UTC'
as $$
begin
  return query
  with input as materialized (
    select h.n, h.row_id, p_outcomes[h.n] as outcome, p_errors[h.n] as error,
           -- A microsecond apart, for the cursors of claims: what is at a cursor is not looked at.
           case when p_outcomes[h.n] <> 'release'
                then p_at + coalesce(p_delays[h.n], interval '0') + (h.i - cardinality(p_ns)) * interval '1 us'
                when p_delays[h.n] > interval '0' then p_at + p_delays[h.n] end as available_at
    from unnest(p_ns, p_rows) with ordinality as h (n, row_id, i)
  )
  update relay.outbox o
  set state = case when i.outcome in ('park', 'late') or i.outcome = 'failed' and o.attempts + 1 >= p_max_attempts
                   then 'parked' else 'ready' end,
      parked_at = case when i.outcome in ('park', 'late') or i.outcome = 'failed' and o.attempts + 1 >= p_max_attempts
                       then p_at end,
      attempts = o.attempts + case when i.outcome in ('failed', 'park') then 1 else 0 end,
      last_error = case when i.outcome = 'release' then o.last_error else i.error end,
      available_at = coalesce(i.available_at, o.available_at),
      suspect = case when i.outcome = 'release' then o.suspect else p_suspect end, fence = o.fence + 1, claimed_by = null, claimed_at = null
  from input i
  where o.ctid = any (p_rows) and o.ctid = i.row_id and o.tenant_id = p_tenant
  returning i.n, o.event_id, o.kind, o.key, o.state;
end $$;

-- Guarantees: the events wait for their turn.
create or replace function relay.outbox_hold(p_tenant text, p_rows tid[]) returns void
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  update relay.outbox o set state = 'waiting' where o.ctid = any (p_rows) and o.tenant_id = p_tenant;
end $$;

-- Guarantees: the events can be claimed, from available_at on.
create or replace function relay.outbox_open(p_tenant text, p_rows tid[]) returns table (kind text)
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  return query
  update relay.outbox o set state = 'ready' where o.ctid = any (p_rows) and o.tenant_id = p_tenant returning o.kind;
end $$;

-- Guarantees: of each of the keys, the first live event is ready if it was waiting and nobody has it locked. Returns the kinds
--   of those that are ready now.
-- Locks: FOR UPDATE SKIP LOCKED. It never waits.
create or replace function relay.outbox_promote(p_tenant text, p_keys text[]) returns table (kind text)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_ids  uuid[];
  v_rows tid[];
begin
  -- Found without a lock, then locked by id: to lock while looking for the first would skip it and take the second.
  select array_agg(f.event_id order by f.event_id) into v_ids
  from (select distinct u.key from unnest(p_keys) as u (key)) k
  cross join lateral (
    select o.event_id, o.state from relay.outbox o
    where o.tenant_id = p_tenant and o.key = k.key and o.parked_at is null order by o.seq, o.event_id limit 1) f
  where f.state = 'waiting';
  if v_ids is not null then
    select array_agg(l.row_id) into v_rows
    from unnest(v_ids) as i (event_id)
    cross join lateral (
      select o.ctid as row_id, o.state from relay.outbox o
      where o.tenant_id = p_tenant and o.event_id = i.event_id limit 1 for update skip locked) l
    where l.state = 'waiting';
    return query select p.kind from relay.outbox_open(p_tenant, v_rows) p;
  end if;
end $$;

-- Guarantees: at this transaction's commit, and not before, whoever listens for the tenant's events is woken, and whoever
--   listens for those of all tenants. Rung again in one transaction, it is heard once; not at all where the queue of
--   notifications is half full.
-- Locks: the commit takes the database-wide notification lock until its WAL is flushed.
create or replace function relay.outbox_ring(p_tenant text) returns void
language plpgsql
set trace_notify = off
as $$
begin
  -- One statement: each costs as much as a notification.
  perform pg_catalog.pg_notify(relay.channel_name('outbox', p_tenant, null), ''),
          pg_catalog.pg_notify(relay.channel_name('outbox', '', null), '')
  where pg_catalog.pg_notification_queue_usage() < 0.5;
end $$;

-- Guarantees: a new UUIDv7 of that time, to the millisecond.
create or replace function relay.outbox_new_id(p_at timestamptz) returns uuid
language plpgsql volatile
as $$
begin
  -- 48 bits of milliseconds, the version, and 74 bits of chance with the variant where a random UUID has them too.
  return (lpad(to_hex(floor(extract(epoch from p_at) * 1000)::bigint), 12, '0') || '7'
          || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid;
end $$;
