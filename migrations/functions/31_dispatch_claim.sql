-- role: relay_api
-- room: dispatch
--
-- Claim. Rows go ready -> claimed here and nowhere else, and the attempt is counted in the same statement, so that a job
-- that kills its worker is counted too.

-- Guarantees: moves at most p_limit due rows from delayed to ready; returns the time
--   until the earliest of those still delayed is due, null when there is none. The seq is kept, so a promoted job is among the oldest.
-- Locks: FOR UPDATE SKIP LOCKED on the rows it moves. It never waits.
create or replace function relay.promote_due(p_tenant text, p_relay text, p_limit bigint) returns interval
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, p_relay, '{worker}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_next   timestamptz;
  v_rows   tid[];
begin
  select q.available_at into v_next from relay.s2r_relay_dispatch_queue q
  where q.tenant_id = v_tenant and q.relay_id = p_relay and q.state = 'delayed'
  order by q.available_at limit 1;
  if v_next <= v_now then
    select array_agg(d.row_id) into v_rows
    from (select q.ctid as row_id from relay.s2r_relay_dispatch_queue q
          where q.tenant_id = v_tenant and q.relay_id = p_relay and q.state = 'delayed' and q.available_at <= v_now
          order by q.available_at limit p_limit for update skip locked) d;
    perform relay.ready_jobs(v_tenant, v_rows);

    select q.available_at into v_next from relay.s2r_relay_dispatch_queue q
    where q.tenant_id = v_tenant and q.relay_id = p_relay and q.state = 'delayed'
    order by q.available_at limit 1;
  end if;
  perform relay.unbind_tenant(v_before);
  return case when v_next is not null then greatest(v_next - v_now, interval '0') end;
end $$;

-- Guarantees: returns once fewer than four others are about to claim many of these jobs, or after 0.8 s in any case; so it orders
--   nothing and protects nothing. Returns the time that it waited (0.8 s at most, whatever the clock does), null where it did not. The turn ends with the transaction. It is for the pace alone: a claim steps over each row
--   that another has locked, so of 64 claims of 500 at once each steps over 30,000 rows to get at its own.
-- Locks: one of four advisory locks of the pair. Those have no rights in PostgreSQL, so their numbers are digests over the secret
--   of this installation, as the names of channels are: nobody can tell or hold the turns of a pair he knows the names of.
--   Who waits may hold other rows, and
--   who has a turn waits for nobody in a claim: only transactions that claim several times can wait for each other, for 0.8 s.
--   A deadlock that is found while one waits here ends that wait, and no more.
-- Internal, as those of 25_dispatch_rows.sql are.
create or replace function relay.claim_turn(p_tenant text, p_relay text) returns interval
language plpgsql
set lock_timeout = '400ms'
as $$
declare
  v_name  text := relay.channel_name('claim', p_tenant, p_relay);
  v_began timestamptz;
begin
  for v_round in 0..4 loop
    for v_slot in 0..3 loop
      if pg_try_advisory_xact_lock(hashtextextended(v_name, v_slot)) then
        return case when v_began is not null then
          least(greatest(clock_timestamp() - v_began, interval '0'), interval '0.8 s') end;
      end if;
    end loop;
    v_began := coalesce(v_began, clock_timestamp());
    begin
      -- In line behind those who wait already: whoever tries again and again may never get one. After the first round in the other
      -- lines, because the first of one may be a transaction that was left open; not sooner, because who changes lines loses his place.
      perform pg_advisory_xact_lock(hashtextextended(v_name, (pg_backend_pid() + v_round) % 4));
      exit;
    exception when lock_not_available or deadlock_detected then
      perform set_config('lock_timeout', '100ms', true);
    end;
  end loop;
  return least(greatest(clock_timestamp() - v_began, interval '0'), interval '0.8 s');
end $$;

-- Guarantees: claims for p_claimed_by (the id of a relay *instance*, new at every start) the ready jobs of the relay with the
--   lowest seq that nobody has locked, at most p_limit over all tenants, ascending by seq within a tenant. Each row comes
--   with its fence: every later write must name job id, fence and claimed_by.
--   Tenants take turns, beginning behind p_start, first an equal share each, then what is left; null in the array is the
--   tenant that the caller has bound. p_after[i] is a cursor: rows of tenant i with seq <= it are not looked at.
--   Of the rows looked at, those past their deadline are ended in the same call and come back first, outcome 'expired'; so
--   a call that returns fewer than p_limit rows has seen all there was above its cursors. A row with outcome 'delayed'
--   and no job id tells in `remaining` how long until the tenant's next delayed job is due.
--   A first row with outcome 'waited' tells in `remaining` how long the call waited for its turn, where it did: neither its search
--   nor anybody's time left has begun before that.
--   The body is null where it is longer than p_body_limit, or the bodies of the tenant before it fill p_batch_limit: then
--   relay.fetch_body.
--   p_sweep, how often the relay's sweeps are to be: a last row with outcome 'sweep', and nothing else in it, tells that one
--   of this login and relay is due and may have something to do, and so that relay.run_sweeps is to be called. Where this call
--   has taken and ended nothing, and no tenant has anything for a sweep, it takes the turn itself. So sweeps cost idle relays no
--   statement of their own.
-- Errors: S2001, S2002, S2003; S2020 bad arguments.
-- Locks: FOR UPDATE SKIP LOCKED on queue rows: it never waits for a row. Where the first tenant's share is 64 jobs or more, it takes
--   a turn first (claim_turn), for which it waits up to 0.8 s. With p_sweep the rows of two sweeps, SKIP LOCKED (sweep_turn).
--
-- With the settings below each part of it can be planned in one way only. An index scan is forbidden, and so is everything
-- else that reads a table but the Tid Scan of the write (see 25_dispatch_rows.sql); where the rest has an order, one index
-- gives it, for the price of one forbidden thing, and all other ways take two: another scan, and a sort.
-- What a lone call costs is the number of its statements, functions and expressions, each of which is set up anew in
-- every transaction; so there are few. Locking and writing in one statement, which a verb that never waits might do, was
-- no faster alone, slower by a tenth for batches of 500, and twice as slow where there is nothing to claim.
create or replace function relay.claim(
  p_relay text, p_tenants text[], p_limit bigint, p_claimed_by text, p_claim_id uuid, p_lease interval,
  p_after bigint[] default null, p_start bigint default 0, p_body_limit bigint default 65536,
  p_batch_limit bigint default 4194304, p_sweep interval default null)
returns table (
  outcome text, tenant_id text, job_id uuid, operation text, headers text, body bytea, body_bytes bigint, attempt bigint,
  max_attempts bigint, fence bigint, seq bigint, created_at timestamptz, expires_at timestamptz, remaining interval)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_indexscan = off set enable_bitmapscan = off set enable_seqscan = off
set enable_sort = off set enable_incremental_sort = off set enable_hashjoin = off set enable_mergejoin = off
set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_tenants bigint := cardinality(p_tenants);
  v_left    bigint := p_limit;
  v_quota   bigint;
  v_got     bigint;
  v_full    boolean[];
  v_turn    bigint := 0;
  v_i       bigint;
  v_before  text;
  v_tenant  text;
  v_after   bigint;
  v_due     timestamptz;
  v_wait    interval;
  v_now     timestamptz;
  v_rows    tid[];
  v_late    tid[];
  v_tidy    boolean;
begin
  if (v_tenants > 0 and p_limit >= 1 and octet_length(p_claimed_by) between 1 and 200 and p_claim_id is not null
      and p_lease > interval '0' and p_lease <= interval '1 day' and coalesce(cardinality(p_after), v_tenants) = v_tenants
      and p_start >= 0) is not true then
    raise exception 'claim needs tenants, a positive limit, a lease of at most a day, claimed_by (up to 200 bytes), claim_id, %',
      'one cursor a tenant, and a start'
      using errcode = 'S2020';
  end if;

  loop
    v_i := (p_start + v_turn) % v_tenants + 1;
    -- Two turns each: an equal share; then all that is left, for whom the share was not enough.
    v_quota := case when v_turn < v_tenants then least(greatest(1, p_limit / v_tenants), v_left)
                    when v_full[v_i] then v_left else 0 end;
    if v_quota > 0 then
      v_before := relay.bind_tenant(p_tenants[v_i], p_relay, '{worker}');
      v_tenant := coalesce(p_tenants[v_i], v_before);
      v_after := coalesce(p_after[v_i], 0);
      -- For the first tenant only, since nobody is to wait for a turn while he has one. A small claim has little to step over,
      -- and would wait for the flushes of others.
      if v_turn = 0 and v_quota >= 64 then
        v_wait := relay.claim_turn(v_tenant, p_relay);
        if v_wait is not null then
          outcome := 'waited'; tenant_id := v_tenant; remaining := v_wait;
          return next;
        end if;
      end if;
      v_now := clock_timestamp();
      -- One probe, because as a rule no delayed job is due, and a call costs several times as much.
      select q.available_at into v_due from relay.s2r_relay_dispatch_queue q
      where q.tenant_id = v_tenant and q.relay_id = p_relay and q.state = 'delayed'
      order by q.available_at limit 1;
      if v_due is not null and v_turn < v_tenants then
        v_wait := v_due - v_now;
        if v_due <= v_now then
          v_wait := relay.promote_due(v_tenant, p_relay, p_limit);
          v_now := clock_timestamp();
        end if;
        if v_wait is not null then
          outcome := 'delayed'; tenant_id := v_tenant; remaining := v_wait;
          return next;
        end if;
      end if;

      -- A sub-select with LIMIT and FOR UPDATE is run as it stands, once: no plan takes more rows than the limit.
      select count(*), array_agg(l.row_id) filter (where not l.late), array_agg(l.row_id) filter (where l.late)
      into v_got, v_rows, v_late
      from (select q.ctid as row_id, q.expires_at <= v_now as late
            from relay.s2r_relay_dispatch_queue q
            where q.tenant_id = v_tenant and q.relay_id = p_relay and q.state = 'ready' and q.seq > v_after
            order by q.seq, q.job_id limit v_quota for update skip locked) l;
      if v_got > 0 then
        if v_late is not null then
          return query
          select 'expired', v_tenant, e.job_id, null, null, null::bytea, null::bigint, e.attempt, e.max_attempts, e.fence,
                 e.seq, e.created_at, e.expires_at, interval '0'
          from relay.end_jobs(
            v_tenant, v_now, false, 'the deadline passed before a relay had claimed the job', null, v_late) e;
        end if;
        -- The attempt is counted and the fence raised in the statement that makes the claim.
        return query
        with taken as (
          update relay.s2r_relay_dispatch_queue q
          set state = 'claimed', attempt = q.attempt + 1, fence = q.fence + 1, claimed_by = p_claimed_by,
              claim_id = p_claim_id, claimed_at = v_now, lease_expires_at = v_now + p_lease
          where q.ctid = any (v_rows) and q.tenant_id = v_tenant
          returning q.job_id, q.attempt, q.max_attempts, q.fence, q.seq, q.created_at, q.expires_at)
        select 'claimed', v_tenant, t.job_id, r.operation, r.headers,
               case when r.bytes <= p_body_limit
                     and sum(r.bytes) filter (where r.bytes <= p_body_limit)
                           over (order by t.seq, t.job_id rows unbounded preceding) <= p_batch_limit
                    then r.body end,
               r.bytes, t.attempt, t.max_attempts, t.fence, t.seq, t.created_at, t.expires_at, t.expires_at - v_now
        from taken t
        -- LATERAL … LIMIT 1: as a plain join this became a hash join over the whole request table once that was analyzed.
        -- The two comparisons are an equality that leaves an order to ask for, and so the primary key to be taken.
        cross join lateral (
          select s.operation, s.request_headers::text as headers, s.request_body as body,
                 octet_length(s.request_body)::bigint as bytes
          from relay.s2r_relay_dispatch_request s
          where s.tenant_id = v_tenant and s.job_id >= t.job_id and s.job_id <= t.job_id order by s.job_id limit 1) r
        order by t.seq, t.job_id;
        v_left := v_left - v_got;
        v_full[v_i] := v_got = v_quota;
      end if;
      v_before := relay.set_tenant(v_before);
    end if;
    v_turn := v_turn + 1;
    exit when v_left = 0 or v_turn = 2 * v_tenants;
  end loop;
  if p_sweep is not null then
    -- Of the turns those that others depend on. Promotion is none: this claim has just done it. Where there is no row yet,
    -- nobody has ever swept; none is made here, since who makes the same one at the same moment waits.
    perform 1 from relay.sweep s
    where s.role_oid = to_regrole(quote_ident(session_user)) and s.name in ('expire:' || p_relay, 'lease:' || p_relay)
    having coalesce(bool_or(s.next_due_at <= clock_timestamp()), true);
    if found then
      -- Not with rows locked: under an old snapshot the search wades through all dead rows.
      v_tidy := v_left = p_limit;
      if v_tidy then
        v_tidy := not exists (select 1 from relay.tenants_due('expire', p_relay, null))
                  and not exists (select 1 from relay.tenants_due('lease', p_relay, null));
      end if;
      if v_tidy then
        -- The turns that there are: a session that is younger than a lease has none for leases.
        perform relay.sweep_turn(s.name, p_sweep) from relay.sweep s
        where s.role_oid = to_regrole(quote_ident(session_user)) and s.name in ('expire:' || p_relay, 'lease:' || p_relay);
        v_tidy := found;
      end if;
      if not v_tidy then
        outcome := 'sweep'; tenant_id := null; remaining := null;
        return next;
      end if;
    end if;
  end if;
end $$;

-- Guarantees: returns the rows that the claim p_claim_id of this instance has taken, that are still its own and not past their
--   deadline, as claim returned them (outcome 'claimed'). For a claim whose reply was lost: ask until the lease would have ended, because a
--   claim still under way on the server commits later. Changes nothing.
-- Errors: S2001, S2002, S2003.
create or replace function relay.claim_again(
  p_relay text, p_tenants text[], p_claimed_by text, p_claim_id uuid, p_body_limit bigint default 65536,
  p_batch_limit bigint default 4194304)
returns table (
  outcome text, tenant_id text, job_id uuid, operation text, headers text, body bytea, body_bytes bigint, attempt bigint,
  max_attempts bigint, fence bigint, seq bigint, created_at timestamptz, expires_at timestamptz, remaining interval)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text;
  v_tenant text;
  v_name   text;
  v_now    timestamptz := clock_timestamp();
begin
  foreach v_name in array p_tenants loop
    v_before := relay.bind_tenant(v_name, p_relay, '{worker}');
    v_tenant := coalesce(v_name, v_before);
    return query
    select 'claimed', v_tenant, q.job_id, r.operation, r.headers,
           case when r.bytes <= p_body_limit
                 and sum(r.bytes) filter (where r.bytes <= p_body_limit)
                       over (order by q.seq, q.job_id rows unbounded preceding) <= p_batch_limit then r.body end,
           r.bytes, q.attempt, q.max_attempts, q.fence, q.seq, q.created_at, q.expires_at, q.expires_at - v_now
    from (
      -- The order is there for the index that gives it, which reads no row that is not claimed.
      select c.job_id, c.attempt, c.max_attempts, c.fence, c.seq, c.created_at, c.expires_at, c.claim_id, c.claimed_by
      from relay.s2r_relay_dispatch_queue c
      where c.tenant_id = v_tenant and c.relay_id = p_relay and c.state = 'claimed' order by c.claimed_at offset 0) q
    cross join lateral (
      select s.operation, s.request_headers::text as headers, s.request_body as body,
             octet_length(s.request_body)::bigint as bytes
      from relay.s2r_relay_dispatch_request s
      where s.tenant_id = v_tenant and s.job_id = q.job_id limit 1) r
    where q.claim_id = p_claim_id and q.claimed_by = p_claimed_by and q.expires_at > v_now
    order by q.seq, q.job_id;
    if found then
      -- Handlers are started for it, and that a claim was made must then be as safe as if this call had made it.
      perform relay.confirm_commit();
    end if;
    perform relay.unbind_tenant(v_before);
  end loop;
end $$;

-- Guarantees: the body of a job that is claimed by the caller under that fence; no row, when it is not.
-- Errors: S2001, S2002, S2003.
create or replace function relay.fetch_body(
  p_relay text, p_tenant text, p_job_id uuid, p_fence bigint, p_claimed_by text) returns table (body bytea)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, p_relay, '{worker}');
  v_tenant text := coalesce(p_tenant, v_before);
begin
  return query
  select r.request_body
  from relay.s2r_relay_dispatch_queue q
  cross join lateral (
    select s.request_body from relay.s2r_relay_dispatch_request s
    where s.tenant_id = v_tenant and s.job_id = q.job_id limit 1) r
  where q.tenant_id = v_tenant and q.job_id = p_job_id and q.fence = p_fence and q.claimed_by = p_claimed_by
    and q.relay_id = p_relay;
  perform relay.unbind_tenant(v_before);
end $$;
