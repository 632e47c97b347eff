-- role: relay_api
-- room: outbox
--
-- For people: to look at events, and to decide about those that the drainers have given up.
--
--   relay.outbox_retry, relay.outbox_park           events by their ids
--   relay.outbox_retry_parked, relay.outbox_purge   parked events by what they have in common, some at a time, the oldest first
--   relay.outbox_list, relay.outbox_count           the same choice of events, shown and counted
--   relay.outbox_show, relay.outbox_status          one event whole; how many there are of each kind
--   relay.outbox_health                             what is amiss, at no cost

-- Guarantees: each event among the inputs that is parked is ready again at once, as if it had never been tried (attempts 0; its
--   last_error stays); one that is ready but backing off or delayed can be claimed at once. Outcome 'applied', `was` = its
--   state before; every other id is 'stale'. Rings.
-- Errors: S2001, S2002, S2003.
-- Locks: the events, FOR UPDATE, in event id order; waits for them.
create or replace function relay.outbox_retry(p_tenant text, p_event_ids uuid[])
returns table (n bigint, outcome text, was text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_ns     bigint[];
  v_rows   tid[];
  v_states text[];
begin
  select array_agg(i.n), array_agg(l.row_id), array_agg(l.state) into v_ns, v_rows, v_states
  from (select min(u.n) as n, u.event_id from unnest(p_event_ids) with ordinality as u (event_id, n)
        group by u.event_id order by u.event_id) i
  cross join lateral (
    select o.ctid as row_id, o.state, o.available_at from relay.outbox o
    where o.tenant_id = v_tenant and o.event_id = i.event_id limit 1 for update) l
  where l.state = 'parked' or l.state = 'ready' and l.available_at > clock_timestamp();
  if v_rows is not null then
    perform relay.outbox_restart(v_tenant, clock_timestamp(), v_rows);
    perform relay.outbox_ring(v_tenant);
    return query select u.n, 'applied', u.state from unnest(v_ns, v_states) as u (n, state);
  end if;
  return query
  select u.n, 'stale', null
  from (select i from generate_series(1, cardinality(p_event_ids)::bigint) i except select unnest(v_ns)) as u (n);
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: at most p_limit events of the tenant that were parked more than p_older ago (of p_kind and p_key, where given), the
--   oldest first, are ready again as if they had never been tried (see outbox_retry). Rings. Returns how many.
-- Errors: S2001, S2002, S2003; S2020 p_older is negative, or none.
-- Locks: FOR UPDATE SKIP LOCKED. It waits for nobody: what is locked is being decided about by somebody else.
create or replace function relay.outbox_retry_parked(
  p_tenant text, p_older interval, p_limit bigint, p_kind text default null, p_key text default null)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_until  timestamptz := clock_timestamp() - p_older;
  v_rows   tid[];
  v_count  bigint;
begin
  if coalesce(p_older < interval '0', true) then
    raise exception 'outbox_retry_parked needs how long the events have been parked' using errcode = 'S2020';
  end if;
  select count(*), array_agg(l.row_id) into v_count, v_rows
  from (select o.ctid as row_id from relay.outbox o
        where o.tenant_id = v_tenant and o.state = 'parked' and o.parked_at < v_until
          and (p_kind is null or o.kind = p_kind) and (p_key is null or o.key = p_key)
        order by o.parked_at limit p_limit for update skip locked) l;
  if v_count > 0 then
    perform relay.outbox_restart(v_tenant, clock_timestamp(), v_rows);
    perform relay.outbox_ring(v_tenant);
  end if;
  perform relay.unbind_tenant(v_before);
  return v_count;
end $$;

-- Guarantees: the rows, which the caller has locked, are ready by the clock p_at; those that were parked begin anew.
create or replace function relay.outbox_restart(p_tenant text, p_at timestamptz, p_rows tid[]) returns void
language plpgsql
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_nestloop = off set enable_hashjoin = on set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  update relay.outbox o
  set state = 'ready', available_at = p_at, parked_at = null, fence = o.fence + 1, suspect = false,
      attempts = case when o.state = 'parked' then 0 else o.attempts end,
      first_claimed_at = case when o.state = 'parked' then null else o.first_claimed_at end
  where o.ctid = any (p_rows) and o.tenant_id = p_tenant;
end $$;

-- Guarantees: each event among the inputs that is not parked is parked now, with p_reason as its last_error: outcome 'applied',
--   `was` = its state before. One that was claimed may be delivered all the same, if it is on its way; what its drainer says
--   of it then is stale. Every other id is 'stale'.
-- Errors: S2001, S2002, S2003; S2020 no reason; S2022 one of more than 8 KiB.
-- Locks: the events, FOR UPDATE, in event id order; waits for them.
create or replace function relay.outbox_park(p_tenant text, p_event_ids uuid[], p_reason text)
returns table (n bigint, outcome text, was text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_ns     bigint[];
  v_rows   tid[];
  v_states text[];
  v_keys   text[];
begin
  if coalesce(p_reason, '') = '' then
    raise exception 'outbox_park needs a reason' using errcode = 'S2020';
  end if;
  perform relay.check_size('a reason', octet_length(p_reason), '8192');
  select array_agg(i.n), array_agg(l.row_id), array_agg(l.state), array_agg(l.key) filter (where l.key is not null)
  into v_ns, v_rows, v_states, v_keys
  from (select min(u.n) as n, u.event_id from unnest(p_event_ids) with ordinality as u (event_id, n)
        group by u.event_id order by u.event_id) i
  cross join lateral (
    select o.ctid as row_id, o.state, o.key from relay.outbox o
    where o.tenant_id = v_tenant and o.event_id = i.event_id limit 1 for update) l
  where l.state <> 'parked';
  if v_rows is not null then
    perform 1 from relay.outbox_back(
      v_tenant, clock_timestamp(), array(select generate_series(1, cardinality(v_rows)::bigint)), v_rows,
      array_fill('late'::text, array[cardinality(v_rows)]), array_fill(p_reason, array[cardinality(v_rows)]), null, 1,
      false);
    if v_keys is not null then
      perform 1 from relay.outbox_promote(v_tenant, v_keys);
    end if;
    return query select u.n, 'applied', u.state from unnest(v_ns, v_states) as u (n, state);
  end if;
  return query
  select u.n, 'stale', null
  from (select i from generate_series(1, cardinality(p_event_ids)::bigint) i except select unnest(v_ns)) as u (n);
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: removes at most p_limit events of the tenant that were parked more than p_older ago (of p_kind and p_key, where
--   given), the oldest first. It touches no event that may still be delivered. Returns how many.
-- Errors: S2001, S2002, S2003; S2020 p_older is negative, or none.
-- Locks: FOR UPDATE SKIP LOCKED. It waits for nobody.
create or replace function relay.outbox_purge(
  p_tenant text, p_older interval, p_limit bigint, p_kind text default null, p_key text default null)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_until  timestamptz := clock_timestamp() - p_older;
  v_rows   tid[];
  v_count  bigint := 0;
begin
  if coalesce(p_older < interval '0', true) then
    raise exception 'outbox_purge needs how long parked events are kept' using errcode = 'S2020';
  end if;
  select array_agg(l.row_id) into v_rows
  from (select o.ctid as row_id from relay.outbox o
        where o.tenant_id = v_tenant and o.state = 'parked' and o.parked_at < v_until
          and (p_kind is null or o.kind = p_kind) and (p_key is null or o.key = p_key)
        order by o.parked_at limit p_limit for update skip locked) l;
  if v_rows is not null then
    v_count := relay.outbox_drop(v_tenant, v_rows);
  end if;
  perform relay.unbind_tenant(v_before);
  return v_count;
end $$;

-- Guarantees: the ids of at most p_limit events of the tenant, the newest first (by event id, which is a UUIDv7), older than
--   p_before where given; in one state, of one kind, of one key where given; and, where p_until is, no younger than that: parked
--   before it, if they are parked, else written before it.
create or replace function relay.outbox_matching(
  p_tenant text, p_state text, p_kind text, p_key text, p_until timestamptz, p_before uuid, p_limit bigint)
returns table (event_id uuid)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  -- In a variable: COALESCE counts as leaky, so under row security the comparison would be no index condition.
  v_older uuid := coalesce(p_before, 'ffffffff-ffff-ffff-ffff-ffffffffffff');
  v_until timestamptz := coalesce(p_until, 'infinity');
begin
  if p_state not in ('ready', 'waiting', 'claimed', 'parked') then
    raise exception 'state must be ready, waiting, claimed or parked' using errcode = 'S2020';
  end if;
  if p_state = 'parked' then
    -- Few among many: by the index that holds these alone, and sorted then.
    return query
    select p.event_id from (
      select o.event_id, o.kind, o.key from relay.outbox o
      where o.tenant_id = p_tenant and o.state = 'parked' and o.parked_at < v_until order by o.parked_at offset 0) p
    where p.event_id < v_older and (p_kind is null or p.kind = p_kind) and (p_key is null or p.key = p_key)
    order by p.event_id desc limit p_limit;
  elsif p_key is not null then
    -- Those of a key too: the live ones by the index of keys, the parked ones as above.
    return query
    select p.event_id from (
      (select o.event_id, o.kind, o.state, o.created_at as since from relay.outbox o
       where o.tenant_id = p_tenant and o.key = p_key and o.parked_at is null order by o.seq, o.event_id offset 0)
      union all
      (select o.event_id, o.kind, o.state, o.parked_at from relay.outbox o
       where o.tenant_id = p_tenant and o.state = 'parked' and o.key = p_key order by o.parked_at offset 0)) p
    where p.event_id < v_older and p.since < v_until
      and (p_state is null or p.state = p_state) and (p_kind is null or p.kind = p_kind)
    order by p.event_id desc limit p_limit;
  else
    return query
    select o.event_id from relay.outbox o
    where o.tenant_id = p_tenant and o.event_id < v_older and (p_state is null or o.state = p_state)
      and (p_kind is null or o.kind = p_kind) and (p_until is null or coalesce(o.parked_at, o.created_at) < v_until)
    order by o.event_id desc limit p_limit;
  end if;
end $$;

-- Guarantees: at most p_limit events of the tenant, the newest first, older than p_before where given; in one state, of one kind,
--   of one key, and at least p_older old where given: since they were parked, if they are parked, else since they were written.
--   `payload` is the first p_payload characters of it as JSON text; null where it is above 64 KiB, or p_payload is 0.
--   `payload_bytes` is about its size. Changes nothing, locks nothing.
-- Errors: S2001, S2002, S2003; S2020 an unknown state.
create or replace function relay.outbox_list(
  p_tenant text, p_state text default null, p_kind text default null, p_limit bigint default 50, p_before uuid default null,
  p_key text default null, p_older interval default null, p_payload bigint default 0)
returns table (
  event_id uuid, kind text, key text, state text, attempts bigint, last_error text, claimed_by text, created_at timestamptz,
  available_at timestamptz, claimed_at timestamptz, parked_at timestamptz, payload text, payload_bytes bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_chars  int := least(greatest(p_payload, 0), 65536);
begin
  return query
  select l.*
  from relay.outbox_matching(
    v_tenant, p_state, p_kind, p_key, clock_timestamp() - p_older, p_before, least(greatest(p_limit, 1), 10000)) m
  cross join lateral (
    select o.event_id, o.kind, o.key, o.state, o.attempts, o.last_error, o.claimed_by, o.created_at, o.available_at,
           o.claimed_at, o.parked_at,
           case when v_chars > 0 and o.payload_bytes <= 65536 then left(o.payload::text, v_chars) end,
           o.payload_bytes
    from relay.outbox o where o.tenant_id = v_tenant and o.event_id = m.event_id limit 1) l
  order by m.event_id desc;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: how many events outbox_list would show without a limit; it counts no further than p_limit. Changes nothing, locks
--   nothing.
-- Errors: as outbox_list.
create or replace function relay.outbox_count(
  p_tenant text, p_state text default null, p_kind text default null, p_key text default null, p_older interval default null,
  p_before uuid default null, p_limit bigint default 100000)
returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_count  bigint;
begin
  select count(*) into v_count
  from relay.outbox_matching(v_tenant, p_state, p_kind, p_key, clock_timestamp() - p_older, p_before, p_limit);
  perform relay.unbind_tenant(v_before);
  return v_count;
end $$;

-- Guarantees: all there is of one event; no row where the tenant has none of that id. Changes nothing, locks nothing.
-- Errors: S2001, S2002, S2003.
create or replace function relay.outbox_show(p_tenant text, p_event_id uuid)
returns table (
  event_id uuid, kind text, key text, state text, payload text, attempts bigint, last_error text, suspect boolean,
  fence bigint, claimed_by text, created_at timestamptz, available_at timestamptz, first_claimed_at timestamptz,
  claimed_at timestamptz, parked_at timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
begin
  return query
  select o.event_id, o.kind, o.key, o.state, o.payload::text, o.attempts, o.last_error, o.suspect, o.fence, o.claimed_by,
         o.created_at, o.available_at, o.first_claimed_at, o.claimed_at, o.parked_at
  from relay.outbox o where o.tenant_id = v_tenant and o.event_id = p_event_id limit 1;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: how many events of the tenant there are, per kind: due now, later (delayed or backing off), waiting for another of
--   their key, claimed (of which `stale` for longer than p_stale), parked. `oldest` is how long the one that is due for longest
--   has been so, `age` how old the oldest is that is not parked, `attempts` the most that one of those has had; `claimed_for` and
--   `parked_for`: the longest. It counts every row.
-- Errors: S2001, S2002, S2003.
create or replace function relay.outbox_status(p_tenant text, p_stale interval default interval '300 seconds')
returns table (
  kind text, due bigint, later bigint, waiting bigint, claimed bigint, parked bigint, oldest interval, age interval,
  attempts bigint, stale bigint, claimed_for interval, parked_for interval)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_stale  timestamptz := v_now - p_stale;
begin
  return query
  select o.kind, count(*) filter (where o.state = 'ready' and o.available_at <= v_now),
         count(*) filter (where o.state = 'ready' and o.available_at > v_now), count(*) filter (where o.state = 'waiting'),
         count(*) filter (where o.state = 'claimed'), count(*) filter (where o.state = 'parked'),
         v_now - min(o.available_at) filter (where o.state = 'ready' and o.available_at <= v_now),
         v_now - min(o.created_at) filter (where o.state <> 'parked'), max(o.attempts) filter (where o.state <> 'parked'),
         count(*) filter (where o.state = 'claimed' and o.claimed_at < v_stale), v_now - min(o.claimed_at),
         v_now - min(o.parked_at)
  from relay.outbox o where o.tenant_id = v_tenant group by o.kind order by o.kind;
  perform relay.unbind_tenant(v_before);
end $$;

-- Guarantees: what is amiss with the events of the tenant, found by index probes, however many there are: how many are parked, of
--   which kinds, and the longest time that one has been so (the oldest 10000 are looked at); whether any is claimed, how many for
--   longer than p_stale (no further than 10000), and the longest time; the kinds that have something due, and the longest time
--   that it has been so. Changes nothing, locks nothing.
-- Errors: S2001, S2002, S2003.
create or replace function relay.outbox_health(p_tenant text, p_stale interval default interval '300 seconds')
returns table (
  parked bigint, parked_kinds text[], parked_for interval, claimed bigint, stale bigint, claimed_for interval, due_kinds text[],
  due_for interval)
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
  v_stale  timestamptz := v_now - p_stale;
begin
  select count(*), array_agg(distinct p.kind), v_now - min(p.parked_at) into parked, parked_kinds, parked_for
  from (select o.kind, o.parked_at from relay.outbox o
        where o.tenant_id = v_tenant and o.state = 'parked' order by o.parked_at limit 10000) p;
  select count(*), v_now - min(c.claimed_at) into claimed, claimed_for
  from (select o.claimed_at from relay.outbox o
        where o.tenant_id = v_tenant and o.state = 'claimed' order by o.claimed_at limit 1) c;
  select count(*) into stale
  from (select from relay.outbox o
        where o.tenant_id = v_tenant and o.state = 'claimed' and o.claimed_at < v_stale order by o.claimed_at limit 10000) c;
  with recursive names as (
    (select o.kind from relay.outbox o where o.tenant_id = v_tenant and o.state = 'ready' order by o.kind limit 1)
    union all
    select (select o.kind from relay.outbox o
            where o.tenant_id = v_tenant and o.state = 'ready' and o.kind > k.kind order by o.kind limit 1)
    from names k where k.kind is not null)
  select array_agg(k.kind order by f.available_at), v_now - min(f.available_at) into due_kinds, due_for
  from names k
  cross join lateral (
    select o.available_at from relay.outbox o
    where o.tenant_id = v_tenant and o.kind = k.kind and o.state = 'ready' order by o.available_at limit 1) f
  where f.available_at <= v_now;
  perform relay.unbind_tenant(v_before);
  return next;
end $$;
