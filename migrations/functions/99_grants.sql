-- role: relay_api
--
-- Rights. PostgreSQL grants EXECUTE on a new function to PUBLIC; here it is taken back from all, then given by name.
-- A function that is not named below can be called by relay_api alone.

do $$
declare
  v_function regprocedure;
begin
  for v_function in
    select p.oid from pg_catalog.pg_proc p
    where p.pronamespace = 'relay'::regnamespace and p.proowner = 'relay_api'::regrole
  loop
    execute format('revoke all on function %s from public', v_function);
  end loop;
end $$;

grant execute on function
  relay.now(), relay.session_age(), relay.my_bindings(), relay.channel(text, text, text),
  relay.ring(text[], text[], text[], text[]), relay.reclaim(text, text[], bigint, interval),
  relay.reclaim_lost(text, text, bigint), relay.expire_late(text, text, bigint), relay.sweep_turn(text, interval),
  relay.sweep_again(text),
  relay.run_sweeps(text, bigint, interval, interval, interval[])
to relay_gateway, relay_worker, relay_operator;

grant execute on function
  relay.enqueue(text, uuid[], text[], text[], text[], bytea[], bigint[], interval[], timestamptz[], interval[], boolean),
  relay.enqueue_keyed(text, uuid, text, text, text, bytea, bigint, interval, timestamptz, interval, text, interval, boolean)
to relay_gateway;

grant execute on function
  relay.poll(text, uuid[], bigint), relay.list_jobs(text, text, text, bigint, uuid), relay.backlog(text),
  relay.mark_expired(text, uuid[]), relay.purge(text, interval, bigint)
to relay_gateway, relay_operator;

grant execute on function
  relay.claim(text, text[], bigint, text, uuid, interval, bigint[], bigint, bigint, bigint),
  relay.claim_again(text, text[], text, uuid, bigint, bigint),
  relay.fetch_body(text, text, uuid, bigint, text),
  relay.heartbeat(text, text, text[], uuid[], bigint[], interval),
  relay.complete(
    text, text, text[], bigint[], uuid[], bigint[], text[], bigint[], text[], bytea[], text[], text[], boolean),
  relay.retry(text, text, text[], uuid[], bigint[], interval[], boolean[], text[], text[]),
  relay.release(text, text, text[], uuid[], bigint[], boolean[]),
  relay.promote_due(text, text, bigint)
to relay_worker;
