-- The bare twins of both rooms. Of dispatch: the same three tables, columns, defaults and indexes, made from ours so that they
-- cannot drift apart; no row security, no function. Everything runs here as the owner of the tables.

create schema bare;

create table bare.request (like relay.s2r_relay_dispatch_request including all);
create table bare.queue (like relay.s2r_relay_dispatch_queue including all);
create table bare.result (like relay.s2r_relay_dispatch_result including all);

-- LIKE copies no storage parameters: take the queue's.
do $$
begin
  execute (
    select format('alter table bare.queue set (%s)', string_agg(option, ', '))
    from pg_class, unnest(reloptions) as option where oid = 'relay.s2r_relay_dispatch_queue'::regclass);
end $$;

-- The outbox room's twin, for whoever claims and deletes by hand; and the least that an application would make itself.
create table bare.outbox (like relay.outbox including all);
do $$
begin
  execute (
    select format('alter table bare.outbox set (%s)', string_agg(option, ', '))
    from pg_class, unnest(reloptions) as option where oid = 'relay.outbox'::regclass);
end $$;
create table bare.lean_outbox (
  id bigint generated always as identity primary key, tenant_id text not null, kind text not null, payload jsonb not null,
  created_at timestamptz not null default now(), claimed_at timestamptz
) with (vacuum_truncate = off, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0);
create index on bare.lean_outbox (id) where claimed_at is null;

-- What a business transaction writes besides.
create table bare.orders (order_id uuid primary key, tenant_id text not null, lines jsonb not null, created_at timestamptz not null);

-- The twin of the room of durable jobs: the chunks alone. By hand there would be neither job nor timeline in the way.
create table bare.durable_chunk (like relay.durable_chunk including all);
do $$
begin
  execute (
    select format('alter table bare.durable_chunk set (%s)', string_agg(option, ', '))
    from pg_class, unnest(reloptions) as option where oid = 'relay.durable_chunk'::regclass);
end $$;
create table bare.durable_event (like relay.durable_event including all);
