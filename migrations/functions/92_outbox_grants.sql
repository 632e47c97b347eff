-- role: relay_api
-- room: outbox
--
-- Who may call the verbs of the outbox room: gateways write and drain, operators look and decide, workers nothing.
-- (60_outbox_listing.sql gives the rights on its own function.)

grant execute on function
  relay.outbox_enqueue(text, jsonb, text, interval, text, uuid, boolean), relay.outbox_enqueue_many(text, jsonb, boolean),
  relay.outbox_due(text[], text[], bigint, text, interval, bigint, bigint, text[], text[]),
  relay.outbox_claim(text[], text[], timestamptz[], bigint, text, bigint, interval),
  relay.outbox_unclaim(text[], text),
  relay.outbox_settle(text, text[], bigint[], uuid[], bigint[], text[], text[], interval[], bigint)
to relay_gateway;

grant execute on function
  relay.outbox_retry(text, uuid[]), relay.outbox_park(text, uuid[], text),
  relay.outbox_retry_parked(text, interval, bigint, text, text), relay.outbox_purge(text, interval, bigint, text, text),
  relay.outbox_list(text, text, text, bigint, uuid, text, interval, bigint),
  relay.outbox_count(text, text, text, text, interval, uuid, bigint),
  relay.outbox_show(text, uuid), relay.outbox_status(text, interval), relay.outbox_health(text, interval)
to relay_gateway, relay_operator;
