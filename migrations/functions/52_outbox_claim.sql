-- role: relay_api
-- room: outbox
--
-- What a drainer asks before it delivers: where there is something to do, and then for events.
--
--   relay.outbox_due      which tenants and kinds have something; and tidies what nobody came to tidy
--   relay.outbox_claim    ready -> claimed
--   relay.outbox_unclaim  a claim whose reply was lost

-- Guarantees: over the tenants of p_tenants (null = all that this login may drain), beginning behind p_start, one row each of
--   outcome
--   due        events of that tenant and kind can be claimed now (of p_kinds alone, where given)
--   later      there are none now, and the next one can be claimed in `wait`
--   reclaimed  `amount` claims of the tenant that were older than p_stale are ready again: each counts as a failure, with a
--              last_error of its own, and makes the event suspect, to be claimed alone
--   parked     `amount` of those had used p_max_attempts
--   promoted   `amount` events whose turn was lost (see 50_outbox_rows.sql) can be claimed now
--   look       the search for such goes on behind that key: give it back as p_look_keys[i] for p_look_tenants[i]; '' = it is
--              over, and begins anew
--   start      p_limit groups were reached: go on behind that tenant (p_start). All kinds of one tenant are told together.
--   p_look is how many keys to look at for lost turns, an equal share for each tenant; 0 for not at all.
--   Rings where an event of a kind that is not of p_kinds can be claimed now by what was done here.
-- Errors: S2001, S2002, S2003; S2020 bad arguments.
-- Locks: FOR UPDATE SKIP LOCKED. It never waits. Where it rings the commit takes the database-wide notification lock until
--   its WAL is flushed.
create or replace function relay.outbox_due(
  p_tenants text[], p_kinds text[], p_limit bigint, p_start text, p_stale interval, p_max_attempts bigint, p_look bigint,
  p_look_tenants text[], p_look_keys text[])
returns table (outcome text, tenant_id text, kind text, key text, wait interval, amount bigint)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_names  text[];
  v_name   text;
  v_last   text;
  v_before text;
  v_tenant text;
  v_now    timestamptz;
  v_until  timestamptz;
  v_left   bigint := p_limit;
  v_look   bigint;
  v_from   text;
  v_keys   text[];
  v_rows   tid[];
  v_count  bigint;
  v_parked bigint;
  v_got    bigint;
  v_opened text[];
begin
  if (p_limit >= 1 and p_stale > interval '0' and p_max_attempts >= 1 and p_look >= 0
      and coalesce(cardinality(p_look_tenants), 0) = coalesce(cardinality(p_look_keys), 0)) is not true then
    raise exception 'outbox_due needs a positive limit, stale time and max_attempts, and a key for each tenant looked at'
      using errcode = 'S2020';
  end if;
  if p_tenants is null then
    select array_agg(t.tenant_id) into v_names from relay.outbox_tenants('{gateway}') t;
  else
    v_names := p_tenants;
  end if;
  select array_agg(u.name order by coalesce(u.name collate "C" <= p_start, false), u.name collate "C") into v_names
  from unnest(v_names) as u (name);

  v_look := case when p_look > 0 then greatest(1, p_look / greatest(1, cardinality(v_names))) else 0 end;
  foreach v_name in array coalesce(v_names, '{}') loop
    if v_left <= 0 then
      outcome := 'start'; tenant_id := v_last; kind := null; key := null; wait := null; amount := null;
      return next;
      exit;
    end if;
    v_before := relay.bind_tenant(v_name, null, '{gateway}');
    v_tenant := coalesce(v_name, v_before);
    v_now := clock_timestamp();
    v_until := v_now - p_stale;

    select count(*), array_agg(l.row_id) into v_count, v_rows
    from (select o.ctid as row_id from relay.outbox o
          where o.tenant_id = v_tenant and o.state = 'claimed' and o.claimed_at < v_until
          order by o.claimed_at limit 1000 for update skip locked) l;
    if v_count > 0 then
      -- Also of those that are ready again: one before them may have been made to wait for them.
      select count(*) filter (where b.state = 'parked'), array_agg(b.key) filter (where b.key is not null)
      into v_parked, v_keys
      from relay.outbox_back(
        v_tenant, v_now, array(select generate_series(1, v_count)), v_rows, array_fill('failed'::text, array[v_count::int]),
        array_fill('S2R-OUTBOX-STALE: whoever had claimed it did not answer in time'::text, array[v_count::int]), null,
        p_max_attempts, true) b;
      return query select 'reclaimed', v_tenant, null, null, null::interval, v_count - v_parked where v_count > v_parked;
      return query select 'parked', v_tenant, null, null, null::interval, v_parked where v_parked > 0;
      if v_keys is not null then
        select array_agg(p.kind) into v_opened from relay.outbox_promote(v_tenant, v_keys) p;
        if not v_opened <@ p_kinds then
          perform relay.outbox_ring(v_tenant);
        end if;
      end if;
    end if;

    if v_look > 0 then
      v_from := coalesce(
        (select u.key from unnest(p_look_tenants, p_look_keys) as u (tenant, key) where u.tenant = v_tenant limit 1), '');
      -- Key by key, with one probe of the index each, however many events wait for each.
      with recursive names as (
        (select o.key from relay.outbox o
         where o.tenant_id = v_tenant and o.state = 'waiting' and o.key > v_from order by o.key limit 1)
        union all
        select (select o.key from relay.outbox o
                where o.tenant_id = v_tenant and o.state = 'waiting' and o.key > k.key order by o.key limit 1)
        from names k where k.key is not null)
      select array_agg(u.key) into v_keys from (select k.key from names k where k.key is not null limit v_look) u;
      v_got := coalesce(cardinality(v_keys), 0);
      if v_got > 0 then
        select array_agg(p.kind) into v_opened from relay.outbox_promote(v_tenant, v_keys) p;
        return query
        select 'promoted', v_tenant, u.kind, null, null::interval, count(*) from unnest(v_opened) as u (kind) group by u.kind;
        if not v_opened <@ p_kinds then
          perform relay.outbox_ring(v_tenant);
        end if;
      end if;
      if v_got = v_look or v_from <> '' then
        outcome := 'look'; tenant_id := v_tenant; kind := null; wait := null; amount := null;
        key := case when v_got = v_look then v_keys[v_got] else '' end;
        return next;
      end if;
    end if;

    if p_kinds is null then
      -- One probe a kind: the first of it in the index is also the one that is due first.
      return query
      with recursive names as (
        (select o.kind, o.available_at from relay.outbox o
         where o.tenant_id = v_tenant and o.state = 'ready' order by o.kind, o.available_at limit 1)
        union all
        select f.kind, f.available_at
        from names k
        cross join lateral (
          select o.kind, o.available_at from relay.outbox o
          where o.tenant_id = v_tenant and o.state = 'ready' and o.kind > k.kind
          order by o.kind, o.available_at limit 1) f)
      select case when k.available_at <= v_now then 'due' else 'later' end, v_tenant, k.kind, null,
             case when k.available_at > v_now then k.available_at - v_now end, null::bigint
      from names k;
    else
      return query
      select case when f.available_at <= v_now then 'due' else 'later' end, v_tenant, k.kind, null,
             case when f.available_at > v_now then f.available_at - v_now end, null::bigint
      from unnest(p_kinds) as k (kind)
      cross join lateral (
        select o.available_at from relay.outbox o
        where o.tenant_id = v_tenant and o.kind = k.kind and o.state = 'ready'
        order by o.available_at limit 1) f;
    end if;
    get diagnostics v_got = row_count;
    v_left := v_left - v_got;
    v_last := v_tenant;
    v_before := relay.set_tenant(v_before);
  end loop;
end $$;

-- Guarantees: of the events that the caller has locked, ready ones of one tenant in the order of a claim, says which to take now:
--   those first claimed before p_oldest are parked here; one that is suspect is taken alone, as the first of a claim, or not
--   at all; one of a key is taken only where it is the first of its key and none of the key is claimed, and waits from here
--   on where it is not so (unless the one that it would wait for is locked: then it is left for the next claim); and no more
--   than p_bytes, but one at least while p_first.
--   take = the rows, in order; whole = nothing was left out but what waits or is parked; alone = the claim is over.
-- Locks: FOR KEY SHARE SKIP LOCKED on the events that others wait for, and on those that another claim could take beside the
--   first of their key. It never waits.
create or replace function relay.outbox_choose(
  p_tenant text, p_at timestamptz, p_rows tid[], p_oldest timestamptz, p_bytes bigint, p_first boolean)
returns table (take tid[], size bigint, parked uuid[], whole boolean, alone boolean)
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_ids     uuid[];
  v_all     text[];
  v_sizes   bigint[];
  v_suspect boolean[];
  v_lates   boolean[];
  v_late    bigint[];
  v_keys    text[];
  -- By place: the one before it; and those of its key that are claimed, or may be.
  v_befores uuid[] := array_fill(null::uuid, array[cardinality(p_rows)]);
  v_beside  jsonb := '{}';
  v_others  uuid[] := '{}';
  v_held    jsonb := '{}';
  v_states  text[];
  v_hold    tid[];
  v_before  record;
begin
  take := '{}'; size := 0; whole := true; alone := false;
  select array_agg(r.event_id), array_agg(r.key), array_agg(r.size), array_agg(r.suspect), array_agg(r.late),
         array_agg(u.n) filter (where r.late)
  into v_ids, v_all, v_sizes, v_suspect, v_lates, v_late
  from unnest(p_rows) with ordinality as u (row_id, n)
  cross join lateral (
    select o.event_id, o.key, o.payload_bytes as size, o.suspect,
           coalesce(o.first_claimed_at < p_oldest, false) as late
    from relay.outbox o where o.ctid = u.row_id and o.tenant_id = p_tenant limit 1) r;
  if v_late is not null then
    select array_agg(b.event_id), array_agg(b.key) filter (where b.key is not null) into parked, v_keys
    from relay.outbox_back(
      p_tenant, p_at, v_late, (select array_agg(p_rows[i] order by i) from unnest(v_late) i),
      array_fill('late'::text, array[cardinality(p_rows)]),
      array_fill('S2R-OUTBOX-LATE: first tried too long ago to be tried again'::text, array[cardinality(p_rows)]), null, 1,
      false) b;
    if v_keys is not null then
      perform 1 from relay.outbox_promote(p_tenant, v_keys);
    end if;
  end if;

  for v_before in
    select c.n, f.event_id, f.event_id = c.event_id as is_first, b.ids
    from unnest(v_ids, v_all, v_lates) with ordinality as c (event_id, key, late, n)
    cross join lateral (
      select o.event_id, o.state from relay.outbox o
      where o.tenant_id = p_tenant and o.key = c.key and o.parked_at is null order by o.seq, o.event_id limit 1) f
    -- A writer whose transaction was long commits an event before one that is on its way already; so does a person's retry.
    cross join lateral (
      select array_agg(t.event_id) as ids
      from (select o.event_id from relay.outbox o
            where o.tenant_id = p_tenant and o.key = c.key and o.state in ('ready', 'claimed')
              and (f.event_id = c.event_id or f.state = 'waiting')
            order by o.seq, o.event_id) t
      where t.event_id <> c.event_id) b
    where not c.late and (f.event_id <> c.event_id or b.ids is not null)
  loop
    if not v_before.is_first then
      v_befores[v_before.n] := v_before.event_id;
      v_others := v_others || v_before.event_id;
    end if;
    if v_before.ids is not null then
      v_beside := v_beside || jsonb_build_object(v_before.n, v_before.ids);
      v_others := v_others || v_before.ids;
    end if;
  end loop;
  if v_others <> '{}' then
    -- Whoever ends one of these must wait from now on, and will then see who waits for it; whoever would claim one skips it.
    select coalesce(jsonb_object_agg(i.event_id, l.state), '{}') into v_held
    from (select distinct u.event_id from unnest(v_others) as u (event_id)) i
    cross join lateral (
      select o.state from relay.outbox o
      where o.tenant_id = p_tenant and o.event_id = i.event_id limit 1 for key share skip locked) l;
  end if;

  for v_n in 1..cardinality(p_rows) loop
    continue when v_lates[v_n];
    v_states := null;
    if v_beside ? v_n::text then
      select array_agg(coalesce(v_held ->> b.id, 'locked')) into v_states
      from jsonb_array_elements_text(v_beside -> v_n::text) as b (id);
    end if;
    if v_held ->> v_befores[v_n]::text in ('ready', 'claimed') or 'claimed' = any (v_states) then
      v_hold := v_hold || p_rows[v_n];
    elsif v_befores[v_n] is not null or 'locked' = any (v_states) then
      whole := false;
    elsif v_suspect[v_n] then
      if p_first and take = '{}' then
        take := array[p_rows[v_n]]; size := v_sizes[v_n]; alone := true; whole := false;
        exit;
      end if;
      whole := false;
    elsif size + v_sizes[v_n] > p_bytes and not (p_first and take = '{}') then
      whole := false;
      exit;
    else
      take := take || p_rows[v_n];
      size := size + v_sizes[v_n];
    end if;
  end loop;
  if v_hold is not null then
    perform relay.outbox_hold(p_tenant, v_hold);
  end if;
  return next;
end $$;

-- Guarantees: claims for p_claimed_by (an id that is new for every claim) at most p_limit ready events that are due and that
--   nobody has locked, over the groups (p_tenants[i], p_kinds[i]); every later write must name event id, fence and claimed_by.
--   Groups take turns, first an equal share each of p_limit and p_max_bytes, then what is left; within a group in the order
--   of available_at, seq. Whoever calls must begin with another group each time: the first may fill the claim.
--   At most one event of a key is claimed at a time (50_outbox_rows.sql). A suspect event is claimed alone.
--   p_after[i] is a cursor: events of group i with available_at <= it are not looked at. null = from the beginning.
--   The payloads fill about p_max_bytes at most, but for the first.
--   Of outcome
--   claimed  these events of tenant and kind, in the order of the claim: a value each in event_ids and payloads (JSON text);
--            in fences, attempts and created_at one value each, or one that all have; in keys one each, or null where none has
--            one. last = the available_at of the last one. A group that has two turns may have two such rows.
--   parked   event_ids, first claimed more than p_horizon ago, are parked instead
--   more     there may be more to claim in that group: its last look was full, or there was none
-- Errors: S2001, S2002, S2003; S2020 bad arguments.
-- Locks: FOR UPDATE SKIP LOCKED on events. It never waits.
--
-- As in relay.claim, each part can be planned in one way only: the write by a Tid Scan, the look by the one index that has
-- its order, for all other ways take a sort besides.
create or replace function relay.outbox_claim(
  p_tenants text[], p_kinds text[], p_after timestamptz[], p_limit bigint, p_claimed_by text,
  p_max_bytes bigint default 8388608, p_horizon interval default '3 days')
returns table (
  outcome text, tenant_id text, kind text, event_ids uuid[], payloads text[], created_at timestamptz[], keys text[],
  fences bigint[], attempts bigint[], last timestamptz)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_sort = off set enable_incremental_sort = off set enable_hashjoin = off set enable_mergejoin = off
set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_groups  bigint := cardinality(p_tenants);
  v_left    bigint := p_limit;
  v_bytes   bigint := p_max_bytes;
  v_first   boolean := true;
  v_more    boolean[];
  v_turn    bigint := 0;
  v_i       bigint;
  v_quota   bigint;
  v_room    bigint;
  v_before  text;
  v_tenant  text;
  v_kind    text;
  v_after   timestamptz;
  v_now     timestamptz;
  v_oldest  timestamptz;
  v_got     bigint;
  v_rows    tid[];
  v_size    bigint;
  v_special boolean;
  v_choice  record;
  v_alone   boolean := false;
begin
  if (v_groups > 0 and cardinality(p_kinds) = v_groups and coalesce(cardinality(p_after), v_groups) = v_groups
      and p_limit >= 1 and octet_length(p_claimed_by) between 1 and 200 and p_max_bytes >= 0 and p_horizon > interval '0') is not true then
    raise exception 'outbox_claim needs groups, a cursor for each, claimed_by (up to 200 bytes), and a positive limit and horizon'
      using errcode = 'S2020';
  end if;

  loop
    v_i := v_turn % v_groups + 1;
    v_quota := case when v_turn < v_groups then least(greatest(1, p_limit / v_groups), v_left)
                    when v_more[v_i] then v_left else 0 end;
    if v_quota > 0 then
      v_before := relay.bind_tenant(p_tenants[v_i], null, '{gateway}');
      v_tenant := coalesce(p_tenants[v_i], v_before);
      v_kind := p_kinds[v_i];
      v_after := coalesce(p_after[v_i], '-infinity');
      v_now := clock_timestamp();
      v_oldest := v_now - p_horizon;
      select count(*), array_agg(l.row_id), sum(l.size), bool_or(l.special) into v_got, v_rows, v_size, v_special
      from (select o.ctid as row_id, o.payload_bytes as size,
                   o.key is not null or o.suspect or coalesce(o.first_claimed_at < v_oldest, false) as special
            from relay.outbox o
            where o.tenant_id = v_tenant and o.kind = v_kind and o.state = 'ready' and o.available_at > v_after
              and o.available_at <= v_now
            order by o.available_at, o.seq, o.event_id limit v_quota for update skip locked) l;
      v_more[v_i] := v_got = v_quota;
      v_room := case when v_turn < v_groups then least(p_max_bytes / v_groups, v_bytes) else v_bytes end;
      if v_special or v_size > v_room then
        select c.* into v_choice
        from relay.outbox_choose(v_tenant, v_now, v_rows, v_oldest, v_room, v_first) c;
        v_rows := v_choice.take;
        v_size := v_choice.size;
        v_alone := v_choice.alone;
        v_got := cardinality(v_rows);
        v_more[v_i] := v_more[v_i] or not v_choice.whole;
        if v_choice.parked is not null then
          return query
          select 'parked', v_tenant, v_kind, v_choice.parked, null::text[], null::timestamptz[], null::text[],
                 null::bigint[], null::bigint[], null::timestamptz;
        end if;
      end if;
      if v_got > 0 then
        return query
        with taken as (
          update relay.outbox o
          set state = 'claimed', fence = o.fence + 1, claimed_by = p_claimed_by, claimed_at = v_now,
              first_claimed_at = coalesce(o.first_claimed_at, v_now)
          where o.ctid = any (v_rows) and o.tenant_id = v_tenant
          returning o.event_id, o.key, o.payload, o.fence, o.attempts, o.created_at, o.available_at, o.seq)
        -- In arrays, one row a turn: a row for each event cost more than all that is in it.
        select 'claimed', v_tenant, v_kind, array_agg(t.event_id), array_agg(t.payload::text),
               case when min(t.created_at) = max(t.created_at) then array[min(t.created_at)]
                    else array_agg(t.created_at) end,
               case when bool_or(t.key is not null) then array_agg(t.key) end,
               case when min(t.fence) = max(t.fence) then array[min(t.fence)] else array_agg(t.fence) end,
               case when min(t.attempts) = max(t.attempts) then array[min(t.attempts)] else array_agg(t.attempts) end,
               max(t.available_at)
        from (select k.* from taken k order by k.available_at, k.seq, k.event_id) t;
        v_left := v_left - v_got;
        v_bytes := greatest(v_bytes - v_size, 0);
        v_first := false;
      end if;
      v_before := relay.set_tenant(v_before);
    end if;
    v_turn := v_turn + 1;
    exit when v_left = 0 or v_turn = 2 * v_groups or v_alone;
  end loop;
  for v_i in 1..v_groups loop
    if v_more[v_i] is not false then
      outcome := 'more'; tenant_id := p_tenants[v_i]; kind := p_kinds[v_i];
      return next;
    end if;
  end loop;
end $$;

-- Guarantees: events of these tenants that p_claimed_by has claimed are ready again, nothing counted; returns how many. For a claim
--   whose reply was lost: its events are in nobody's hands.
-- Errors: S2001, S2002, S2003.
-- Locks: FOR UPDATE SKIP LOCKED. It never waits.
create or replace function relay.outbox_unclaim(p_tenants text[], p_claimed_by text) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_name   text;
  v_before text;
  v_tenant text;
  v_count  bigint;
  v_all    bigint := 0;
  v_rows   tid[];
  v_keys   text[];
begin
  foreach v_name in array p_tenants loop
    v_before := relay.bind_tenant(v_name, null, '{gateway}');
    v_tenant := coalesce(v_name, v_before);
    -- The order is there for the index that gives it, which reads no event that is not claimed.
    select count(*), array_agg(l.row_id) into v_count, v_rows
    from (select o.ctid as row_id from relay.outbox o
          where o.tenant_id = v_tenant and o.state = 'claimed' and o.claimed_by = p_claimed_by
          order by o.claimed_at offset 0 for update skip locked) l;
    if v_count > 0 then
      select array_agg(b.key) filter (where b.key is not null) into v_keys
      from relay.outbox_back(
        v_tenant, clock_timestamp(), array(select generate_series(1, v_count)), v_rows,
        array_fill('release'::text, array[v_count::int]), null, null, 1, false) b;
      if v_keys is not null then
        perform 1 from relay.outbox_promote(v_tenant, v_keys);
      end if;
      v_all := v_all + v_count;
    end if;
    v_before := relay.set_tenant(v_before);
  end loop;
  return v_all;
end $$;
