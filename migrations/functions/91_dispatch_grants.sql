-- role: relay_api
-- room: dispatch
--
-- Who may call the verbs of the dispatch room. (40_sweep_listing.sql gives the rights on its own function.)

grant execute on function
  relay.reclaim(text, text[], bigint, interval), relay.reclaim_lost(text, text, bigint),
  relay.expire_late(text, text, bigint), relay.sweep_turn(text, interval), relay.sweep_again(text),
  relay.run_sweeps(text, bigint, interval, interval, interval[])
to relay_gateway, relay_worker, relay_operator;

grant execute on function
  relay.enqueue(text, uuid[], text[], text[], text[], bytea[], bigint[], interval[], timestamptz[], interval[], boolean),
  relay.enqueue_keyed(text, uuid, text, text, text, bytea, bigint, interval, timestamptz, interval, text, interval, boolean),
  relay.enqueue_bounded(
    text, uuid[], text[], text[], text[], bytea[], bigint[], interval[], timestamptz[], interval[], bigint[], boolean, boolean),
  relay.enqueue_keyed_bounded(
    text, uuid, text, text, text, bytea, bigint, interval, timestamptz, interval, text, bigint, interval, boolean)
to relay_gateway;

grant execute on function
  relay.poll(text, uuid[], bigint), relay.list_jobs(text, text, text, bigint, uuid), relay.backlog(text),
  relay.mark_expired(text, uuid[]), relay.purge(text, interval, bigint)
to relay_gateway, relay_operator;

grant execute on function
  relay.claim(text, text[], bigint, text, uuid, interval, bigint[], bigint, bigint, bigint, interval),
  relay.claim_again(text, text[], text, uuid, bigint, bigint),
  relay.fetch_body(text, text, uuid, bigint, text),
  relay.heartbeat(text, text, text[], uuid[], bigint[], interval),
  relay.complete(
    text, text, text[], bigint[], uuid[], bigint[], text[], bigint[], text[], bytea[], text[], text[], boolean),
  relay.retry(text, text, text[], uuid[], bigint[], interval[], boolean[], text[], text[]),
  relay.release(text, text, text[], uuid[], bigint[], boolean[]),
  relay.promote_due(text, text, bigint)
to relay_worker;
