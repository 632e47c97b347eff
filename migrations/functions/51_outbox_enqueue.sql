-- role: relay_api
-- room: outbox
--
-- Enqueue. It runs in a transaction that belongs to somebody else, on a connection that does: it changes no setting, takes
-- no lock on a row of others, and waits for nobody, unless the caller gives an event id that another open transaction of the
-- tenant has given too: then it waits until that one ends. The event is there when that transaction commits, and never was when
-- it rolls back; the same holds for its wake-up.

-- Guarantees: the seq of the last live event of the key that can be seen; null where there is none.
-- Apart, for the settings that keep its plan from going bad: each costs a call that needs none of them.
create or replace function relay.outbox_last(p_tenant text, p_key text) returns bigint
language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
as $$
begin
  return (select o.seq from relay.outbox o
          where o.tenant_id = p_tenant and o.key = p_key and o.parked_at is null
          order by o.seq desc, o.event_id desc limit 1);
end $$;

-- Guarantees: on commit the event is stored, once, and returned is its id: p_event_id, or a new UUIDv7. A p_event_id must be
--   new for ever within tenant and kind, over all databases whose events go to one dispatch database: of a second event the
--   dispatch sink says that it is delivered, as the first one's job. Only while the first is stored is it 23505. It can be claimed
--   after p_delay. Of two events of one tenant and key, one that was written after the other's transaction had committed
--   (or later in the same one) is delivered only after the other was delivered or parked; nothing else is promised of order.
--   p_tenant null = the tenant that the caller has bound (app.tenant_id). Rings unless p_notify is false, or the event is
--   delayed.
--   This is the one call for whoever has no SDK: select relay.outbox_enqueue('order-placed', '{"order": 7}', p_tenant => 'acme')
-- Errors: S2001, S2002, S2003; S2020 no kind or payload, or a payload of more than 128 MiB as JSON
--   text; S2021 a delay that is negative or not finite; 23514 a kind or key that is
--   empty or above 200 bytes; 23505 the tenant has an event of that id. Any of them ends the caller's transaction.
-- Locks: inserts only. With p_notify the commit takes the database-wide notification lock until its WAL is flushed.
create or replace function relay.outbox_enqueue(
  p_kind text, p_payload jsonb, p_key text default null, p_delay interval default null, p_tenant text default null,
  p_event_id uuid default null, p_notify boolean default true)
returns uuid
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set row_security = on
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_id     uuid := coalesce(p_event_id, relay.outbox_new_id(v_now));
  v_last   bigint;
  v_bytes  bigint := octet_length(p_payload::text);
begin
  if p_kind is null or p_payload is null then
    raise exception 'an event needs a kind and a payload (a JSON null is one)' using errcode = 'S2020';
  end if;
  -- A claim brings payloads as text, many in one value, and no value has more than 1 GB: an event above that would make each
  -- claim fail, and with it the events of others. A short jsonb may be a long text (1e131000).
  if v_bytes > 134217728 then
    raise exception 'the payload has % bytes; at most 134217728 are allowed', v_bytes using errcode = 'S2020';
  end if;
  if p_delay < interval '0' or p_delay > interval '10000 days' then
    raise exception 'a delay must be finite and not negative' using errcode = 'S2021';
  end if;
  if p_key is not null then
    v_last := relay.outbox_last(v_tenant, p_key);
  end if;
  insert into relay.outbox (tenant_id, event_id, kind, key, payload, payload_bytes, seq, state, created_at,
                            available_at)
  values (v_tenant, v_id, p_kind, p_key, p_payload, v_bytes,
          -- Above the last of its key, also where a batch has run ahead of the clock or the clock was set back.
          greatest((extract(epoch from v_now) * 1000000)::bigint, v_last + 1),
          case when v_last is null then 'ready' else 'waiting' end, v_now,
          -- In seconds: so a day is 24 hours, also where the session's time zone changes its clocks.
          case when p_delay is null then v_now else v_now + make_interval(secs => extract(epoch from p_delay)::float8) end);
  if p_notify and coalesce(p_delay, interval '0') = interval '0' then
    perform relay.outbox_ring(v_tenant);
  end if;
  -- As an expression: a statement for it would cost more than what it does.
  v_before := relay.set_tenant(v_before);
  return v_id;
end $$;

-- Guarantees: as outbox_enqueue, for an array of {"kind": …, "payload": …, "key": …, "delay_ms": …, "id": …}, of which the first two must be
--   there; all of them or none. Their place in the array is their order within a key. Returns the ids, in that order.
--   (One jsonb, so that numbers keep every digit and no driver's array codec is asked.)
-- Errors: as outbox_enqueue; 22P02 and the like where a value is not of its type.
-- Locks: as outbox_enqueue.
create or replace function relay.outbox_enqueue_many(p_tenant text, p_events jsonb, p_notify boolean default true)
returns uuid[]
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set row_security = on
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set enable_incremental_sort = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set plan_cache_mode = force_generic_plan
set timezone = 'UTC'
as $$
declare
  v_before text := relay.bind_tenant(p_tenant, null, '{gateway}');
  v_tenant text := coalesce(p_tenant, v_before);
  v_now    timestamptz := clock_timestamp();
  v_seq    bigint := (extract(epoch from v_now) * 1000000)::bigint;
  v_last   bigint;
  -- Key -> the place of the first event of it that need not wait; 0 where that is none of these.
  v_first  jsonb;
  v_wrong  boolean;
  v_bytes  bigint;
  v_late   boolean;
  v_rung   boolean;
  v_keyed  boolean;
  v_ids    uuid[];
  v_stored uuid[];
begin
  if jsonb_typeof(p_events) is distinct from 'array' then
    raise exception 'the events must be a JSON array' using errcode = 'S2020';
  end if;
  select bool_or(e.value ->> 'kind' is null or e.value -> 'payload' is null),
         max(octet_length((e.value -> 'payload')::text)),
         bool_or(not (e.value ->> 'delay_ms')::numeric between 0 and 864000000000),
         bool_or(coalesce((e.value ->> 'delay_ms')::numeric, 0) = 0),
         bool_or(e.value ->> 'key' is not null),
         array_agg(coalesce((e.value ->> 'id')::uuid, relay.outbox_new_id(v_now)) order by e.n)
  into v_wrong, v_bytes, v_late, v_rung, v_keyed, v_ids
  from jsonb_array_elements(p_events) with ordinality as e (value, n);
  if v_wrong then
    raise exception 'each event needs a kind and a payload (a JSON null is one)' using errcode = 'S2020';
  end if;
  if v_bytes > 134217728 then
    raise exception 'a payload has % bytes; at most 134217728 are allowed', v_bytes using errcode = 'S2020';
  end if;
  if v_late then
    raise exception 'a delay must be finite and not negative' using errcode = 'S2021';
  end if;
  if v_keyed then
    select max(l.seq), jsonb_object_agg(k.key, case when l.seq is null then k.n else 0 end) into v_last, v_first
    from (select e.value ->> 'key' as key, min(e.n) as n
          from jsonb_array_elements(p_events) with ordinality as e (value, n)
          where e.value ->> 'key' is not null group by 1) k
    left join lateral (
      select o.seq from relay.outbox o
      where o.tenant_id = v_tenant and o.key = k.key and o.parked_at is null
      order by o.seq desc, o.event_id desc limit 1) l on true;
    v_seq := greatest(v_seq, v_last + 1);
  end if;

  with stored as (
    insert into relay.outbox (tenant_id, event_id, kind, key, payload, payload_bytes, seq, state, created_at, available_at)
    select v_tenant, v_ids[e.n], e.value ->> 'kind', e.value ->> 'key', e.value -> 'payload',
           octet_length((e.value -> 'payload')::text), v_seq + e.n - 1,
           case when (v_first ->> (e.value ->> 'key'))::bigint <> e.n then 'waiting' else 'ready' end,
           -- A microsecond apart, for the cursors of claims: what is at a cursor is not looked at.
           v_now, v_now + coalesce((e.value ->> 'delay_ms')::double precision, 0) * interval '1 ms'
                  + (e.n - 1) * interval '1 us'
    from jsonb_array_elements(p_events) with ordinality as e (value, n)
    returning event_id)
  select array_agg(s.event_id) into v_stored from stored s;
  if p_notify and v_rung then
    perform relay.outbox_ring(v_tenant);
  end if;
  perform relay.unbind_tenant(v_before);
  return coalesce(v_ids, '{}');
end $$;
