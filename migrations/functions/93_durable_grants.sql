-- role: relay_api
-- room: durable
--
-- Who may call the verbs of the durable room: gateways submit and decide, operators look and decide, both may read, tell
-- events and move by hand. A worker works on what it has claimed, and tidies: what it may call decides nothing about a job
-- or a chunk that it does not hold, and shows it nothing but what a claim gives. (80_durable_listing.sql gives the rights on
-- its own functions.)

-- Given by an older version perhaps, and not any more.
do $$
declare
  v_function regprocedure;
begin
  for v_function in
    select p.oid from pg_catalog.pg_proc p
    where p.pronamespace = 'relay'::regnamespace and p.proowner = 'relay_api'::regrole and p.proname like 'durable\_%'
  loop
    execute format('revoke all on function %s from relay_gateway, relay_worker, relay_operator', v_function);
  end loop;
end $$;

-- What these do follows from what is stored, and not from who asks.
grant execute on function
  relay.durable_finish(text, uuid[]), relay.durable_reap(text, text, bigint), relay.durable_finish_lost(text, bigint),
  relay.durable_sweep_turn(text, interval),
  relay.durable_run_sweeps(text, bigint, interval, interval, interval, interval[])
to relay_gateway, relay_worker, relay_operator;

grant execute on function
  relay.durable_insert_job(text, uuid, text, jsonb, boolean, bigint, bigint, text, boolean),
  relay.durable_insert_chunks(text, uuid, jsonb, bigint, boolean), relay.durable_seal(text, uuid, bigint, boolean),
  relay.durable_abandon(text, uuid)
to relay_gateway;

grant execute on function
  relay.durable_jobs(text, uuid[], boolean), relay.durable_chunks(text, uuid, bigint[], bigint, bigint, text),
  relay.durable_row_errors(text, uuid, bigint, bigint, bigint, text, bigint), relay.durable_events(text, uuid, text, bigint),
  relay.durable_query(text, text, jsonb, uuid, jsonb, bigint), relay.durable_health(text), relay.durable_turns(),
  relay.durable_record_event(text, uuid, bigint, text, text, text, text, jsonb),
  relay.durable_set_job_status(text, uuid, text[], text, jsonb, jsonb), relay.durable_update_job(text, uuid, jsonb),
  relay.durable_set_chunk_statuses(text, uuid, text[], text, jsonb, bigint[]), relay.durable_refresh_counters(text, uuid),
  relay.durable_control(text, uuid, text, text, text, text, bigint),
  relay.durable_resolve(text, uuid, bigint, text, text, text, text),
  relay.durable_retire(text, interval, interval, bigint), relay.durable_remove(text, bigint)
to relay_gateway, relay_operator;

grant execute on function
  relay.durable_claim(text[], text[], bigint[], bigint, text, uuid, interval, bigint, jsonb, uuid),
  relay.durable_claim_next(text, uuid, bigint, text, uuid, interval),
  relay.durable_claim_chunk(text, uuid, bigint, bigint, text, uuid, interval),
  relay.durable_claim_again(text[], uuid), relay.durable_candidates(text, text[], bigint, uuid),
  relay.durable_heartbeat(text[], uuid[], bigint[], uuid[], bigint[], interval, bigint[]),
  relay.durable_checkpoint(text, uuid, bigint, uuid, bigint, jsonb, bigint, bigint, interval),
  relay.durable_complete(text, uuid, bigint, uuid, bigint, jsonb, bigint, bigint),
  relay.durable_complete_many(text[], uuid[], bigint[], uuid[], bigint[], text[], bigint[], bigint[]),
  relay.durable_fail(text, uuid, bigint, uuid, bigint, text, boolean, interval),
  relay.durable_release(text[], uuid[], bigint[], uuid[], bigint[], text, boolean),
  relay.durable_row_errors_add(text, uuid, bigint, uuid, bigint, jsonb)
to relay_worker;
