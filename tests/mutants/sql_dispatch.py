"""Mutants of the dispatch room's functions, for tests/test_dispatch_machine.py where no test is named."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant

_enqueue = partial(Mutant, "migrations/functions/30_dispatch_enqueue.sql")
_claim = partial(Mutant, "migrations/functions/31_dispatch_claim.sql")
_settle = partial(Mutant, "migrations/functions/32_dispatch_settle.sql")
_read = partial(Mutant, "migrations/functions/33_dispatch_read.sql")
_end = partial(Mutant, "migrations/functions/34_dispatch_end.sql")
_rows = partial(Mutant, "migrations/functions/25_dispatch_rows.sql")
_bounded = partial(Mutant, "migrations/functions/35_dispatch_bounded.sql")

_HELD = "q.fence = i.fence and q.claimed_by = p_claimed_by\n        and q.relay_id = p_relay"
_WAITED = "test_protocol_limits.py::test_a_verb_that_had_to_wait_for_its_row_does_what_it_was_asked_to"
_POLL = (
    "test_protocol_limits.py"
    "::test_a_poll_waits_for_who_decides_a_late_job_and_leaves_the_callers_lock_timeout_as_it_was"
)
_SKIP = "test_protocol_limits.py::test_a_row_that_somebody_is_just_deciding_is_stepped_over"


def _holder_verbs() -> list[Mutant]:
    found = []
    for verb in ("complete", "heartbeat", "retry"):
        verb_of = partial(_settle, verb)
        found += [
            verb_of("without the fence", _HELD, _HELD.replace("q.fence = i.fence and ", "")),
            verb_of("without the holder", _HELD, _HELD.replace(" and q.claimed_by = p_claimed_by", "")),
            verb_of("by any relay", _HELD, _HELD.replace("and q.relay_id = p_relay", "")),
        ]
    return found


MUTANTS = [
    # --- enqueue
    _enqueue(
        "enqueue",
        "a job known by its id is queued again",
        "    if found then\n      v_stored",
        "    if true then\n      v_stored",
    ),
    _enqueue(
        "enqueue",
        "a delay is ignored, alone",
        "v_seq, case when v_delay > interval '0' then 'delayed' else 'ready' end",
        "v_seq, 'ready'",
        "case when v_delay > interval '0' then v_now + v_delay end",
        "null",
    ),
    _enqueue("enqueue", "jobs of one call share their place", "v_seq + u.n - 1", "v_seq"),
    _enqueue("request_digest", "a key's digest leaves the body out", "encode(sha256(p_body), 'hex')", "''"),
    _enqueue(
        "request_digest",
        "a key's digest leaves the relay out",
        "jsonb_build_array(p_relay,",
        "jsonb_build_array(",
        test="test_protocol_keys.py::test_the_same_request_under_one_key_is_one_job_and_another_request_is_refused",
    ),
    _enqueue("enqueue_keyed", "a key stands for any request", "if v_found.request_digest <> v_digest", "if false"),
    _enqueue(
        "enqueue_keyed",
        "a key that is in use stores the job all the same",
        "return query select v_found.job_id, true;",
        "perform relay.enqueue(v_tenant, array[p_job_id], array[p_relay_id], array[p_operation], array[p_headers],"
        " array[p_body], array[p_max_attempts], array[p_ttl], array[p_expires_at], array[p_delay]);"
        " return query select v_found.job_id, true;",
    ),
    _enqueue(
        "enqueue_keyed",
        "a key is looked for among all tenants",
        "k.tenant_id = v_tenant and k.idempotency_key = p_key",
        "k.idempotency_key = p_key",
        equivalent="row security shows no other tenant's keys (tests/test_tenancy_layers.py plays without it)",
    ),
    # --- claim
    _claim("claim", "the deadline is ignored", "q.expires_at <= v_now as late", "false as late"),
    _claim("claim", "the cursor is ignored", " and q.seq > v_after", ""),
    _claim(
        "claim",
        "the attempt is not counted",
        "attempt = q.attempt + 1,",
        "attempt = greatest(q.attempt, 1),",
        test="test_protocol_claim.py::test_the_attempt_is_counted_by_the_claim_so_that_a_worker_that_dies_has_used_it",
    ),
    _claim("claim", "the fence stays", "fence = q.fence + 1,", "fence = greatest(q.fence, 1),"),
    _claim(
        "claim",
        "claims of others are claimed",
        "q.state = 'ready' and q.seq > v_after",
        "q.state in ('ready', 'claimed') and q.seq > v_after",
    ),
    _claim(
        "claim", "another relay's jobs are claimed", "q.relay_id = p_relay and q.state = 'ready'", "q.state = 'ready'"
    ),
    _claim(
        "claim", "a claim waits for locked rows", "limit v_quota for update skip locked", "limit v_quota for update"
    ),
    _claim("claim", "in the order of ids", "order by q.seq, q.job_id limit v_quota", "order by q.job_id limit v_quota"),
    _claim("claim", "the first tenant takes all", "least(greatest(1, p_limit / v_tenants), v_left)", "v_left"),
    _claim(
        "claim", "no second turn for whom the share was not enough", "when v_full[v_i] then v_left else 0", "else 0"
    ),
    _claim("claim", "the limit is every tenant's", "v_left := v_left - v_got;", ""),
    _claim("claim", "the start is ignored", "v_i := (p_start + v_turn)", "v_i := (0 + v_turn)"),
    _claim("claim", "the holder is not noted", "claimed_by = p_claimed_by,", "claimed_by = 'somebody',"),
    _claim("claim", "the lease is over at once", "lease_expires_at = v_now + p_lease", "lease_expires_at = v_now"),
    _claim(
        "claim",
        "the tenant stays bound",
        "      v_before := relay.set_tenant(v_before);\n    end if;\n    v_turn",
        "    end if;\n    v_turn",
    ),
    _claim(
        "claim",
        "bodies are sent whatever their length",
        "when r.bytes <= p_body_limit\n",
        "when true\n",
        # Of those behind one that is short enough.
        test="test_protocol_claim.py::test_bodies_over_the_limit_come_when_they_are_fetched_and_only_to_the_holder",
    ),
    _claim(
        "promote_due",
        "what is not due is promoted too",
        "q.state = 'delayed' and q.available_at <= v_now\n",
        "q.state = 'delayed'\n",
    ),
    _claim(
        "promote_due",
        "the last due one is promoted first",
        "order by q.available_at limit p_limit",
        "order by q.available_at desc limit p_limit",
    ),
    _claim(
        "promote_due",
        "without a limit",
        "order by q.available_at limit p_limit",
        "order by q.available_at",
        test="test_protocol_claim.py::test_promotion_is_bounded_by_the_limit_and_skips_rows_that_are_locked",
    ),
    _claim(
        "promote_due",
        "locked rows are waited for",
        "for update skip locked",
        "for update",
        test=_SKIP,
    ),
    _claim("claim_again", "to any holder", " and q.claimed_by = p_claimed_by", ""),
    _claim(
        "claim_again",
        "of any claim",
        "q.claim_id = p_claim_id and ",
        "",
        test="test_protocol_claim.py::test_a_claim_whose_reply_was_lost_is_found_again_by_its_id_while_it_is_ones_own",
    ),
    _claim("claim_again", "past the deadline too", " and q.expires_at > v_now", ""),
    _claim("fetch_body", "a body without the fence", " and q.fence = p_fence", ""),
    _claim("fetch_body", "a body for any holder", " and q.claimed_by = p_claimed_by", ""),
    # --- what holders say
    *_holder_verbs(),
    _settle("complete", "a stale completion is repeated, whatever its fence", "d.fence = u.fence and ", ""),
    _settle(
        "complete",
        "a stale completion is repeated, whoever says it",
        " and d.claimed_by = p_claimed_by and d",
        " and d",
    ),
    _settle("complete", "an expired job's completion is repeated", " and d.status <> 'expired' as mine", " as mine"),
    _settle("complete", "any relay is told how a job ended", " and d.relay_id = p_relay limit 1", " limit 1"),
    _settle(
        "complete",
        "one that comes twice in a call is taken twice",
        "distinct on (u.job_id, u.fence) u.n",
        "u.n",
        test="test_protocol_complete.py::test_a_batch_of_completions_answers_each_row_in_its_place",
    ),
    _settle(
        "complete",
        "without a lock",
        "limit 1 for update) l",
        "limit 1) l",
        test=_WAITED,
    ),
    _settle("retry", "without a lock", "limit 1 for update) l", "limit 1) l", test=_WAITED),
    _settle(
        "complete",
        "by the clock before the wait",
        "v_tenant, clock_timestamp(), true,",
        "v_tenant, statement_timestamp(), true,",
        test="test_protocol_lease.py::test_the_deadline_is_compared_with_the_clock_after_the_wait_for_the_row",
    ),
    _settle(
        "heartbeat",
        "by the clock of the transaction",
        "clock_timestamp() + p_lease",
        "now() + p_lease",
        test="test_protocol_lease.py"
        "::test_leases_and_deadlines_count_from_the_write_and_not_from_the_start_of_the_transaction",
    ),
    _settle("heartbeat", "a heartbeat waits for locked rows", "for no key update skip locked", "for no key update"),
    _settle("heartbeat", "a locked row is called stale", "when l.here then 'busy'", "when l.here then 'stale'"),
    _settle("heartbeat", "stale is called busy", "else 'stale' end", "else 'busy' end"),
    _settle("release", "what began is given back, what did not is not", "not s.started", "s.started"),
    _settle("reclaim_lost", "the lease is not looked at", "\n          and q.lease_expires_at < v_now", ""),
    _settle(
        "reclaim_lost",
        "the attempt is given back",
        "array_fill(false, array[v_count])",
        "array_fill(true, array[v_count])",
    ),
    _settle("reclaim_lost", "locked rows are waited for", "for update skip locked", "for update"),
    _settle("reclaim", "by a session of any age", "relay.session_age() >= p_lease", "true"),
    _settle(
        "reclaim",
        "the limit is every tenant's",
        "v_left := v_left - v_got;",
        "",
        test="test_protocol_limits.py::test_a_reclaim_over_several_tenants_takes_no_more_than_its_limit_in_all",
    ),
    # --- rows
    _rows("return_jobs", "what goes back keeps its fence", "fence = q.fence + 1,", "fence = q.fence,"),
    _rows("return_jobs", "no attempt is given back", "case when i.give_back then 1 else 0 end", "0"),
    _rows(
        "return_jobs",
        "without an attempt left it is pending again",
        "(i.give_back or q.attempt < q.max_attempts)",
        "true",
    ),
    _rows(
        "return_jobs", "one attempt more than there are", "q.attempt < q.max_attempts", "q.attempt <= q.max_attempts"
    ),
    _rows(
        "return_jobs",
        "pending again past the deadline",
        "\n      and coalesce(i.available_at, p_at) < q.expires_at",
        "",
        test="test_protocol_put_back.py::test_a_retry_or_release_past_the_deadline_ends_the_job_expired",
    ),
    _rows(
        "return_jobs",
        "the delay is not looked at for the deadline",
        "coalesce(i.available_at, p_at) < q.expires_at",
        "p_at < q.expires_at",
        test="test_protocol_put_back.py"
        "::test_a_retry_that_would_start_past_the_deadline_ends_the_job_failed_now_with_the_handlers_error",
    ),
    _rows("end_jobs", "past the deadline it succeeds", " or p_at >= e.expires_at as late", " as late"),
    _rows(
        "end_jobs",
        "what others end keeps its fence",
        "case when p_by_holder then q.fence else q.fence + 1 end",
        "q.fence",
    ),
    _rows(
        "end_jobs",
        "a completion's fence is raised",
        "case when p_by_holder then q.fence else q.fence + 1 end",
        "q.fence + 1",
    ),
    _rows("end_jobs", "each has the first one's body", "p_response_bodies[j.n]", "p_response_bodies[1]"),
    _rows("end_jobs", "the error's code is lost", "else p_error_codes[j.n] end", "end"),
    _rows(
        "renew_jobs",
        "a heartbeat renews nothing",
        "set lease_expires_at = p_until",
        "set lease_expires_at = q.lease_expires_at",
        test="test_protocol_put_back.py"
        "::test_a_heartbeat_renews_the_current_claims_and_tells_the_others_that_they_are_stale",
    ),
    _rows("drop_jobs", "a key outlives its job", "k.ctid = any (p_keys)", "false"),
    _rows("drop_jobs", "a request outlives its job", "r.ctid = any (p_requests)", "false"),
    # --- bounds
    _bounded(
        "pending_upto",
        "delayed jobs do not count",
        "if v_ready < p_limit then",
        "if false then",
        test="test_max_pending.py::test_what_is_pending_counts_and_nothing_else",
    ),
    _bounded(
        "pending_upto",
        "all relays' jobs count",
        "q.relay_id = p_relay and q.state = 'ready'",
        "q.state = 'ready'",
        test="test_max_pending.py::test_what_is_pending_counts_and_nothing_else",
    ),
    _bounded(
        "enqueue_bounded",
        "what is stored already is refused",
        "if v_there is not true then\n          outcome",
        "if true then\n          outcome",
        test="test_max_pending.py::test_a_job_that_is_stored_already_is_never_refused",
    ),
    # --- ends and reads
    _end(
        "mark_expired",
        "an unknown job is withdrawn",
        "case when e.n is null then 'stale'",
        "case when false then 'stale'",
    ),
    _end(
        "mark_expired",
        "only what is claimed is withdrawn",
        "q.job_id = i.job_id limit 1 for update",
        "q.job_id = i.job_id and q.state = 'claimed' limit 1 for update",
    ),
    _end(
        "expire_late", "before the deadline", "q.claimed_by is null and q.expires_at <= v_now", "q.claimed_by is null"
    ),
    _end("expire_late", "not what is claimed", "q.state = 'claimed' and q.expires_at <= v_now", "false"),
    _end(
        "expire_late",
        "all relays' jobs",
        "is null and q.expires_at <= v_now\n          and (p_relay is null or q.relay_id = p_relay)",
        "is null and q.expires_at <= v_now",
    ),
    _end("purge", "what has only just ended goes", " and d.completed_at < v_until", ""),
    _end(
        "purge",
        "the youngest first",
        "order by d.completed_at limit",
        "order by d.completed_at desc limit",
        test="test_protocol_sweeps.py::test_a_purge_works_in_bounded_batches_the_oldest_first",
    ),
    _end(
        "purge",
        "without a limit",
        "order by d.completed_at limit p_limit",
        "order by d.completed_at",
        test="test_protocol_sweeps.py::test_a_purge_works_in_bounded_batches_the_oldest_first",
    ),
    _end("purge", "locked results are waited for", "for update skip locked", "for update", test=_SKIP),
    _end(
        "expire_late",
        "locked rows are waited for",
        "order by q.expires_at limit p_limit for update skip locked",
        "order by q.expires_at limit p_limit for update",
        test=_SKIP,
    ),
    _end(
        "expire_late",
        "claimed rows that are locked are waited for",
        "cardinality(v_rows), 0) for update skip locked",
        "cardinality(v_rows), 0) for update",
        test=_SKIP,
    ),
    _end(
        "expire_late",
        "the limit is of those that wait and of those claimed",
        "p_limit - coalesce(cardinality(v_rows), 0)",
        "p_limit",
        test="test_protocol_sweeps.py::test_a_sweep_stays_within_its_limit_and_the_next_one_goes_on",
    ),
    _end(
        "mark_expired",
        "without a lock",
        "q.job_id = i.job_id limit 1 for update",
        "q.job_id = i.job_id limit 1",
        test=_WAITED,
    ),
    _end(
        "sweep_turn",
        "before it is due",
        " and s.next_due_at <= v_now",
        "",
        test="test_protocol_sweeps.py::test_a_sweep_is_done_by_one_caller_an_interval_and_by_each_login_for_itself",
    ),
    _end(
        "sweep_turn",
        "whoever has it is waited for",
        "for update skip locked",
        "for update",
        test="test_protocol_sweeps.py::test_whoever_has_the_turn_in_an_open_transaction_is_not_waited_for",
    ),
    _end(
        "run_sweeps",
        "what is left behind waits for the next turn",
        "perform relay.sweep_again(v_turn);",
        "null;",
        test="test_protocol_sweeps.py"
        "::test_a_sweep_that_leaves_work_behind_is_due_again_at_once_and_so_keeps_up_with_any_load",
    ),
    _end(
        "run_sweeps",
        "leases are lost to a session of any age",
        "or v_sweep = 'lease' and coalesce(relay.session_age() < p_lease, true)",
        "",
        test="test_protocol_lease.py::test_a_session_younger_than_a_lease_reclaims_nothing",
    ),
    _end(
        "run_sweeps",
        "lost leases are left",
        "v_sweep = 'lease' and coalesce",
        "v_sweep = 'lease' or v_sweep = 'lease' and coalesce",
    ),
    _end("run_sweeps", "due ones are left", "perform relay.promote_due(v_tenant, p_relay, p_limit);", ""),
    _read(
        "poll",
        "a job past its deadline is still shown as it was",
        "                when q.late then 'expired'\n",
        "",
    ),
    _read(
        "poll",
        "a completion in flight is not waited for",
        "limit 1 for key share) l;",
        "limit 1) l;",
        test=_POLL,
    ),
    _read(
        "poll",
        "who never decides is waited for",
        "limit 1 for key share skip locked) l",
        "limit 1 for key share) l",
        test=_POLL,
    ),
    _read(
        "poll",
        "the lock timeout stays",
        "perform set_config('lock_timeout', v_lock, true);",
        "null;",
        test=_POLL,
    ),
    _read(
        "list_jobs",
        "the same page again and again",
        "    and r.job_id < v_older\n",
        "",
        test="test_protocol_values.py::test_a_list_of_jobs_is_paged_by_the_newest_and_narrowed_by_relay_and_status",
    ),
    _read("list_jobs", "a list shows it as it was", "case when q.expires_at <= v_now then 'expired' when", "case when"),
    _read("poll", "a job that has ended is shown without its body", "case when j.fits then j.body end", "null::bytea"),
]
