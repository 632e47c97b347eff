-- role: relay_api
--
-- Wake-ups. NOTIFY is a hint, the tables are the truth.
--
--   wake channel    one per (tenant, relay): '' = there is work; job ids = jobs that were withdrawn
--   result channel  one per tenant: job ids that have ended
--   outbox channel  one per tenant, and one for who drains all tenants: '' = there is an event
--   durable channel one per tenant, for relays: '' = there may be a chunk; job ids = the status of these durable jobs changed
--   durable watch   one per tenant, for gateways: ids of durable jobs that are further than they were, or have another status
--
-- LISTEN and NOTIFY know no rights. So a name is a digest over a secret of this installation, and is told only to a
-- login that is bound; ringing goes through relay.ring, which tells no name to anybody. Advisory locks know no rights either:
-- relay.claim_turn makes its numbers of such a name, kind 'claim', that is told to nobody.
--
-- With trace_notify, which anybody may set, the server tells a session each channel that it notifies: so a function that does is
-- one that switches it off. A login rings channels for which it may not listen, and one that is all tenants'.
--
-- The queue of notifications is the server's. Whoever may connect can fill it, by listening in a transaction that he leaves open
-- while he notifies, and then each commit that notifies fails: a job could not be enqueued, an event not be written. So from
-- half full on nothing of ours rings: what there is to do is found by polling. What is rung between the look and the commit is far
-- less than the other half.

-- Guarantees: a pure function of secret, kind, tenant and relay: lower case, ASCII, 44 bytes (PostgreSQL cuts a name at 63).
--   The lengths keep ('a', 'bc') and ('ab', 'c') apart.
-- Internal. PL/pgSQL because it keeps its plan: a function in SQL was planned anew at each call, a third of a whole ring.
create or replace function relay.channel_name(p_kind text, p_tenant text, p_relay text) returns text
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_secret bytea;
begin
  select i.secret into v_secret from relay.installation i;
  return 's2r_' || left(encode(sha256(
           v_secret || convert_to(p_kind || ':' || octet_length(p_tenant) || ':' || p_tenant || ':' || coalesce(p_relay, ''),
                                  'UTF8')), 'hex'), 40);
end $$;

-- Guarantees: the channel's name, for a login that may listen there: 'wake' needs a binding for tenant and relay, 'durable' one
--   as worker for the tenant, 'result', 'outbox' and 'durable_watch' one as gateway or operator for the tenant, 'outbox_all', which
--   names no tenant, one as gateway or operator for all.
-- Errors: S2001, S2002, S2003, S2020 (an unknown kind).
create or replace function relay.channel(p_kind text, p_tenant text, p_relay text default null) returns text
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_before text;
  v_tenant text;
begin
  if p_kind = 'outbox_all' and p_tenant is null and p_relay is null then
    if not exists (select 1 from relay.my_bindings() b where b.kind in ('gateway', 'operator') and b.tenant_id is null) then
      raise exception 'login % may not listen for the events of all tenants', session_user using errcode = 'S2003';
    end if;
    return relay.channel_name('outbox', '', null);
  end if;
  v_before := relay.bind_tenant(p_tenant, p_relay);
  v_tenant := coalesce(p_tenant, v_before);
  perform relay.unbind_tenant(v_before);
  if p_kind = 'wake' and p_relay <> '' then
    return relay.channel_name('wake', v_tenant, p_relay);
  elsif p_kind in ('result', 'outbox', 'durable_watch') and p_relay is null then
    if not relay.login_is(array['gateway', 'operator'], v_tenant) then
      raise exception 'login % may not listen for the % of this tenant', session_user,
        case p_kind when 'result' then 'results' when 'outbox' then 'events' else 'durable jobs' end using errcode = 'S2003';
    end if;
    return relay.channel_name(p_kind, v_tenant, null);
  elsif p_kind = 'durable' and p_relay is null then
    -- Chunks are a tenant's, whichever relay a worker is bound to besides.
    perform relay.unbind_tenant(relay.bind_tenant(v_tenant, null, '{worker}'));
    return relay.channel_name(p_kind, v_tenant, null);
  end if;
  raise exception 'channel kind must be wake (with a relay), % (without), or outbox_all (without a tenant too)',
    'result, outbox, durable or durable_watch' using errcode = 'S2020';
end $$;

-- Guarantees: a NOTIFY at this transaction's commit, and the caller's session is not told the channel's name. None where the queue is
--   half full.
-- Locks: the commit takes the database-wide notification lock until its WAL is flushed.
-- Internal. For verbs that seldom ring: with the SET clause on themselves each call of theirs would pay for it.
create or replace function relay.notify(p_channel text, p_payload text) returns void
language plpgsql
set trace_notify = off
as $$
begin
  perform pg_notify(p_channel, p_payload) where pg_notification_queue_usage() < 0.5;
end $$;

-- Guarantees: one NOTIFY a row, at this transaction's commit; none where the queue of notifications is half full. The arrays go side by
--   side:
--   kind 'wake' (tenant, relay, no payload), 'cancel' (tenant, relay, ids), 'result' and 'durable_watch' (tenant, ids),
--   'durable' (tenant, ids or no payload). A payload is job ids in 32
--   lower-case hex digits each, joined by commas: at most 200 of them, 33 bytes each, stay below the 8000 bytes that a NOTIFY
--   may carry, and nothing else can be sent by way of this function. Ringing for nothing is harmless.
-- Errors: S2001, S2002; S2003 when the login is not bound to one of the tenants or relays; S2020 an unknown kind, a wake or
--   cancel without a relay, a payload that is not ids. Then nothing is rung.
-- Locks: the commit takes the database-wide notification lock until its WAL is flushed. Call it with
--   synchronous_commit = off, after the commit that it tells of.
create or replace function relay.ring(p_kinds text[], p_tenants text[], p_relays text[], p_payloads text[]) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set trace_notify = off
as $$
declare
  v_ring record;
  v_before text;
  v_count bigint := 0;
  v_room  boolean := pg_notification_queue_usage() < 0.5;
begin
  for v_ring in
    select r.kind, r.tenant, case when r.kind in ('wake', 'cancel') then coalesce(r.relay, '') end as relay,
           coalesce(r.payload, '') as payload
    from unnest(p_kinds, p_tenants, p_relays, p_payloads) as r (kind, tenant, relay, payload)
  loop
    if v_ring.relay = '' or (case when v_ring.kind = 'wake' then v_ring.payload <> ''
                                  when v_ring.kind = 'durable' and v_ring.payload = '' then false
                                  when v_ring.kind in ('cancel', 'result', 'durable', 'durable_watch') then
                                    octet_length(v_ring.payload) > 6600
                                    or v_ring.payload !~ '^[0-9a-f]{32}(,[0-9a-f]{32})*\Z'
                                  else true end)
    then
      raise exception 'a ring is a wake or cancel, with a relay, or a %, and its payload 1 to 200 job ids, a wake''s none',
        'result, durable or durable_watch' using errcode = 'S2020';
    end if;
    v_before := relay.bind_tenant(v_ring.tenant, v_ring.relay);
    perform pg_notify(
      relay.channel_name(case when v_ring.kind = 'cancel' then 'wake' else v_ring.kind end,
                         coalesce(v_ring.tenant, v_before), v_ring.relay), v_ring.payload)
    where v_room;
    perform relay.unbind_tenant(v_before);
    v_count := v_count + 1;
  end loop;
  return v_count;
end $$;
