-- role: relay_api
-- room: durable
--
-- The timeline, and reading on in it.
--
--   relay.durable_record_event  an event from the side
--   relay.durable_events        what has happened, and what has happened since
--
-- Where a reader stands is the *snapshot* of his last read. What comes next is what is visible now and was not then, whatever
-- its number: an event whose transaction began before others and committed after them is in no snapshot until it has
-- committed, and so it comes, once. Nothing is skipped, nothing is held back because somebody, somewhere, has a transaction
-- open, and who is shown a job's new status is shown its event. A rolled-back transaction leaves a number that nobody
-- ever looks for.
--   A cursor is text: 'B', or 'B;U;X;N' within a page. B: what was visible in this snapshot has been read. U: of what is
-- visible in this one, and not in B, all has been read up to the event (X, N). A read of U's rest goes by U and not by what
-- is visible now; else an event that came meanwhile below (X, N) would be passed over.
--   Numbers of transactions are a server's own. A database that was restored from a dump on another server has events with
-- numbers that are not its own: such as are above those of now were there before anybody has read, and are shown to who
-- reads from the beginning. A cursor from before the restore means nothing afterwards: begin anew.

-- Guarantees: the event is in the timeline of the job (of chunk p_seq, where given) when the transaction commits; returns true. False: no
--   such job. It takes no lock that anybody else could have, so it waits for nobody, the job's row locked or not.
-- Errors: S2001, S2002, S2003; S2020 a type that is empty or above 100 bytes; S2022 anything else that is too large.
-- Locks: inserts only.
create or replace function relay.durable_record_event(
  p_tenant text, p_job_id uuid, p_seq bigint, p_type text, p_actor text, p_channel text, p_holder text, p_detail jsonb)
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
begin
  if coalesce(p_type = '' or octet_length(p_type) > 100, true) then
    raise exception 'the type of an event has 1 to 100 bytes' using errcode = 'S2020';
  end if;
  perform relay.durable_check_event(p_actor, p_channel, p_holder, p_detail);
  select j.status into v_status from relay.durable_job j where j.tenant_id = v_tenant and j.job_id = p_job_id;
  if v_status not in ('submitting', 'removing') then
    perform relay.durable_tell(
      v_tenant, p_job_id, p_type, array[p_seq], p_actor, p_channel, array[p_holder], array[p_detail]);
  end if;
  perform relay.unbind_tenant(v_before);
  return coalesce(v_status not in ('submitting', 'removing'), false);
end $$;

-- Guarantees: nothing, but an error where one of these is too large to be read with a page of others.
-- Errors: S2022.
create or replace function relay.durable_check_event(p_actor text, p_channel text, p_holder text, p_detail jsonb) returns void
language plpgsql
as $$
begin
  perform relay.check_size('who did it', greatest(octet_length(p_actor), octet_length(p_channel), octet_length(p_holder)), '8192');
  if pg_column_size(p_detail) > 64 then
    perform relay.check_json('the detail of an event', p_detail, '131072');
  end if;
end $$;

-- Guarantees: the snapshot of the statement that asks, and in it the asking transaction as one that has not ended. (By itself
--   pg_current_snapshot leaves it out, and a cursor of it would call read what that transaction has yet to write.)
-- STABLE: a volatile function would have a snapshot of its own.
create or replace function relay.durable_snapshot() returns pg_snapshot
language plpgsql stable
as $$
declare
  v_now pg_snapshot := pg_current_snapshot();
  v_own xid8 := pg_current_xact_id_if_assigned();
begin
  if v_own is null or v_own >= pg_snapshot_xmax(v_now) then
    return v_now;
  end if;
  return (least(v_own, pg_snapshot_xmin(v_now)) || ':' || pg_snapshot_xmax(v_now) || ':'
          || (select string_agg(r.xid::text, ',' order by r.xid)
              from (select v_own as xid union select pg_snapshot_xip(v_now)) r))::pg_snapshot;
end $$;

-- Guarantees: at most p_limit events of the job that are visible now and were not where p_after stands (null: at the beginning), in
--   the order of the transactions that wrote them, and of one transaction in its order; `at` is the clock's. Behind them one
--   row with nothing but next_cursor, where to go on from. It is there with no event too, and for a job that nobody knows.
--   An event is never skipped, whenever its transaction commits (C46); it is shown once that has committed, to its own
--   transaction too. Changes nothing, locks nothing.
-- Errors: S2001, S2002, S2003; S2020 not a cursor.
create or replace function relay.durable_events(p_tenant text, p_job_id uuid, p_after text, p_limit bigint)
returns table (
  xid text, n bigint, at timestamptz, seq bigint, type text, actor text, channel text, holder text, detail text,
  next_cursor text)
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway,operator}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_own    xid8 := pg_current_xact_id_if_assigned();
  v_parts  text[] := string_to_array(p_after, ';');
  v_base   pg_snapshot;
  v_upper  pg_snapshot;
  v_xid    xid8 := '0';
  v_n      bigint := 0;
  v_now    text;
  v_event  record;
  v_count  bigint := 0;
begin
  if coalesce(p_limit, 0) < 1 or cardinality(v_parts) not in (1, 4) then
    raise exception 'not a cursor of events, or no limit' using errcode = 'S2020';
  end if;
  begin
    v_base := nullif(v_parts[1], '')::pg_snapshot;
    v_upper := v_parts[2]::pg_snapshot;
    -- Before PostgreSQL 16 any text is an xid8, of the value 0.
    v_xid := coalesce(v_parts[3]::bigint::text::xid8, v_xid);
    v_n := coalesce(v_parts[4]::bigint, v_n);
  exception when data_exception then
    raise exception 'not a cursor of events' using errcode = 'S2020';
  end;
  if v_base is not null and pg_snapshot_xmin(v_base) > v_xid then
    -- All below was visible.
    v_xid := pg_snapshot_xmin(v_base);
    v_n := 0;
  end if;
  for v_event in
    -- The snapshot is this statement's own: what it shows and what it says of itself are of one moment.
    select e.*, s.now
    from (select relay.durable_snapshot() as now,
                 (select j.status not in ('submitting', 'removing') from relay.durable_job j
                  where j.tenant_id = v_tenant and j.job_id = p_job_id limit 1) as seen offset 0) s
    left join lateral (
      select t.xid, t.n, t.at, t.seq, t.type, t.actor, t.channel, t.holder, t.detail::text as detail
      from relay.durable_event t
      where s.seen and t.tenant_id = v_tenant and t.job_id = p_job_id and (t.xid, t.n) > (v_xid, v_n)
        and (v_base is null or not pg_visible_in_snapshot(t.xid, v_base))
        and (pg_visible_in_snapshot(t.xid, coalesce(v_upper, s.now))
             -- Of another server's numbers, see above.
             or v_base is null and t.xid >= pg_snapshot_xmax(s.now) and t.xid is distinct from v_own)
      order by t.xid, t.n limit p_limit) e on true
  loop
    v_now := v_event.now::text;
    if v_event.n is not null then
      v_count := v_count + 1;
      xid := v_event.xid; n := v_event.n; at := v_event.at; seq := v_event.seq; type := v_event.type; actor := v_event.actor;
      channel := v_event.channel; holder := v_event.holder; detail := v_event.detail;
      return next;
    end if;
  end loop;
  next_cursor := coalesce(v_upper::text, v_now);
  if v_count = p_limit then
    next_cursor := coalesce(v_base::text, '') || ';' || next_cursor || ';' || xid || ';' || n;
  end if;
  xid := null; n := null; at := null; seq := null; type := null; actor := null; channel := null; holder := null; detail := null;
  return next;
  perform relay.unbind_tenant(v_before);
end $$;
