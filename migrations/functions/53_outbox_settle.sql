-- role: relay_api
-- room: outbox
--
-- What a drainer says of the events that it has claimed.

-- Guarantees: each event that is currently claimed so (event id + fence + claimed_by) gets its outcome, once, in one transaction:
--   delivered  it is gone
--   failed     p_errors[i] is its last_error, attempts + 1; ready again after p_delays[i], or parked at p_max_attempts
--   park       the same, and parked whatever the attempts
--   release    ready again, nothing counted; after p_delays[i], where there is one
--   p_outcomes and p_fences hold a value per event, or one that is for all of them.
--   Each is named in one row of the answer, by its place in ns: outcome 'applied', state = where it stands now (gone, ready,
--   parked); or outcome 'stale', nothing was changed, state = where it stands (gone: also where it never was, or is
--   foreign). ns null = all of tenant_id. A valid one is never refused because it had to wait.
--   A row of outcome 'promoted' names a tenant and kind of which another event of a key that ended can be claimed now. Rings
--   where that is of a kind of which no event is settled here: another drainer may be the one that has a sink for it.
--   Events come grouped: the first p_counts[1] of them are of tenant p_tenants[1], and so on; places count through.
-- Errors: S2001, S2002, S2003; S2020 array lengths, counts, a tenant twice, an unknown outcome; S2021 a delay that is negative or
--   not finite; S2022 an error of more than 8 KiB.
-- Locks: the events, FOR UPDATE, in the order of tenant, event id; waits for them. Where it rings the commit takes the
--   database-wide notification lock until its WAL is flushed.
create or replace function relay.outbox_settle(
  p_claimed_by text, p_tenants text[], p_counts bigint[], p_event_ids uuid[], p_fences bigint[], p_outcomes text[],
  p_errors text[], p_delays interval[], p_max_attempts bigint)
returns table (outcome text, state text, ns bigint[], tenant_id text, kind text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_count    bigint := coalesce(cardinality(p_event_ids), 0);
  v_tenants  text[] := p_tenants;
  v_firsts   bigint[] := '{1}';
  v_ends     bigint[] := p_counts;
  v_distinct bigint;
  v_first    bigint;
  v_end      bigint := coalesce(p_counts[1], 0);
  v_before   text;
  v_tenant   text;
  v_ns       bigint[];
  v_done     bigint[];
  v_done_rows tid[];
  v_back     bigint[];
  v_back_rows tid[];
  v_states   text[];
  v_keys     text[];
  v_more     text[];
  v_kinds    text[];
  v_opened   text[];
  -- What stands for all events, null where each has its own.
  v_fence    bigint := case when cardinality(p_fences) = 1 then p_fences[1] end;
  v_outcome  text := case when cardinality(p_outcomes) = 1 then p_outcomes[1] end;
  v_got      bigint;
begin
  if (cardinality(p_fences) in (1, v_count) and cardinality(p_outcomes) in (1, v_count) and p_claimed_by <> ''
      and cardinality(p_counts) = cardinality(p_tenants) and 0 < all (p_counts)
      and coalesce(cardinality(p_errors), v_count) = v_count and coalesce(cardinality(p_delays), v_count) = v_count
      and p_max_attempts >= 1) is not true then
    raise exception 'the arrays of outbox_settle must have one length, and p_counts divide it among the tenants'
      using errcode = 'S2020';
  end if;
  if not p_outcomes <@ '{delivered,failed,park,release}' or array_position(p_outcomes, null) is not null then
    raise exception 'an outcome is delivered, failed, park or release' using errcode = 'S2020';
  end if;
  if pg_column_size(p_errors) > 8192 then
    perform relay.check_parts(null, null, null, p_errors);
  end if;
  if p_delays is not null then
    if exists (select 1 from unnest(p_delays) as u (delay)
               where u.delay < interval '0' or u.delay > interval '10000 days') then
      raise exception 'a delay must be finite and not negative' using errcode = 'S2021';
    end if;
  end if;
  -- In the order of their names, for the locks.
  if cardinality(p_tenants) > 1 then
    select array_agg(u.tenant order by u.tenant collate "C"), array_agg(u.last - u.count + 1 order by u.tenant collate "C"),
           array_agg(u.last order by u.tenant collate "C"), max(u.last), count(distinct coalesce(u.tenant, ''))
    into v_tenants, v_firsts, v_ends, v_end, v_distinct
    from (select c.tenant, c.count, sum(c.count) over (order by c.i)::bigint as last
          from unnest(p_tenants, p_counts) with ordinality as c (tenant, count, i)) u;
  end if;
  if v_end <> v_count or v_distinct < cardinality(p_tenants) then
    raise exception 'p_counts must add up to the number of events, and no tenant be there twice' using errcode = 'S2020';
  end if;

  for v_i in 1..coalesce(cardinality(p_tenants), 0) loop
    v_first := v_firsts[v_i];
    v_end := v_ends[v_i];
    v_before := relay.bind_tenant(v_tenants[v_i], null, '{gateway}');
    v_tenant := coalesce(v_tenants[v_i], v_before);

    -- Found and locked first, and written after that, by ctid: see 50_outbox_rows.sql and 25_dispatch_rows.sql.
    if v_outcome = 'delivered' then
      -- As below, for what is said of nearly every batch.
      select count(*), array_agg(l.row_id), array_agg(l.key) filter (where l.key is not null),
             array_agg(l.kind) filter (where l.key is not null)
      into v_got, v_done_rows, v_keys, v_kinds
      from (select distinct on (u.event_id, u.fence) u.event_id, u.fence
            from (select p_event_ids[i] as event_id, coalesce(v_fence, p_fences[i]) as fence
                  from generate_series(v_first, v_end) i) u
            order by u.event_id, u.fence) i
      cross join lateral (
        select o.ctid as row_id, o.key, o.kind from relay.outbox o
        where o.tenant_id = v_tenant and o.event_id = i.event_id and o.fence = i.fence and o.claimed_by = p_claimed_by
        limit 1 for update) l;
      if v_got = v_end - v_first + 1 then
        perform relay.outbox_drop(v_tenant, v_done_rows);
        return query select 'applied', 'gone', null::bigint[], v_tenants[v_i], null;
        if v_keys is not null then
          select array_agg(distinct p.kind) into v_opened from relay.outbox_promote(v_tenant, v_keys) p;
          return query
          select 'promoted', 'ready', null::bigint[], v_tenant, u.kind from unnest(v_opened) as u (kind);
          if not v_opened <@ v_kinds then
            perform relay.outbox_ring(v_tenant);
          end if;
        end if;
        v_before := relay.set_tenant(v_before);
        continue;
      end if;
    end if;
    select array_agg(i.n),
           array_agg(i.n) filter (where i.outcome = 'delivered'),
           array_agg(l.row_id) filter (where i.outcome = 'delivered'),
           array_agg(l.key) filter (where i.outcome = 'delivered' and l.key is not null),
           array_agg(i.n) filter (where i.outcome <> 'delivered'),
           array_agg(l.row_id) filter (where i.outcome <> 'delivered'),
           array_agg(l.kind) filter (where l.key is not null)
    into v_ns, v_done, v_done_rows, v_keys, v_back, v_back_rows, v_kinds
    from (select distinct on (u.event_id, u.fence) u.n, u.event_id, u.fence, coalesce(v_outcome, p_outcomes[u.n]) as outcome
          from (select i as n, p_event_ids[i] as event_id, coalesce(v_fence, p_fences[i]) as fence
                from generate_series(v_first, v_end) i) u
          order by u.event_id, u.fence, u.n) i
    cross join lateral (
      select o.ctid as row_id, o.key, o.kind from relay.outbox o
      where o.tenant_id = v_tenant and o.event_id = i.event_id and o.fence = i.fence and o.claimed_by = p_claimed_by
      limit 1 for update) l;

    if v_done is not null then
      perform relay.outbox_drop(v_tenant, v_done_rows);
      return query select 'applied', 'gone', v_done, null, null;
    end if;
    if v_back is not null then
      -- The clock after the locks. The keys also of those that are ready again: one before them may have been made to wait
      -- for them.
      select array_agg(b.n), array_agg(b.state), array_agg(b.key) filter (where b.key is not null)
      into v_back, v_states, v_more
      from relay.outbox_back(
        v_tenant, clock_timestamp(), v_back, v_back_rows,
        case when v_outcome is null then p_outcomes else array_fill(v_outcome, array[v_count::int]) end, p_errors, p_delays,
        p_max_attempts, false) b;
      v_keys := v_keys || v_more;
      return query
      select 'applied', u.state, array_agg(u.n), null, null from unnest(v_back, v_states) as u (n, state) group by u.state;
    end if;
    if v_keys is not null then
      select array_agg(distinct p.kind) into v_opened from relay.outbox_promote(v_tenant, v_keys) p;
      return query
      select 'promoted', 'ready', null::bigint[], v_tenant, u.kind from unnest(v_opened) as u (kind);
      if not v_opened <@ v_kinds then
        perform relay.outbox_ring(v_tenant);
      end if;
    end if;

    if cardinality(v_ns) is distinct from v_end - v_first + 1 then
      return query
      select 'stale', coalesce(s.state, 'gone'), array_agg(u.n), null, null
      from (select i from generate_series(v_first, v_end) i except select unnest(v_ns)) as u (n)
      left join lateral (
        select o.state from relay.outbox o
        where o.tenant_id = v_tenant and o.event_id = p_event_ids[u.n] limit 1) s on true
      group by 2;
    end if;
    v_before := relay.set_tenant(v_before);
  end loop;
end $$;
