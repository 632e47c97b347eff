-- The bare twin of the dispatch room: the same three tables, columns, defaults and indexes, made from ours so that they
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
