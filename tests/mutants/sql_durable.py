"""Mutants of the durable room's functions, for tests/test_durable_machine.py where no test is named."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant

_rows = partial(Mutant, "migrations/functions/70_durable_rows.sql")
_claim = partial(Mutant, "migrations/functions/73_durable_claim.sql")
_settle = partial(Mutant, "migrations/functions/74_durable_settle.sql")
_back = partial(Mutant, "migrations/functions/75_durable_back.sql")

_LEASES = "test_durable_store_leases.py::"
_WRONG = f"{_LEASES}test_a_wrong_lease_is_told_so_and_writes_nothing"
_EDGES = "test_durable_edges.py::"
_RACES = "test_durable_races.py::"
_CLAIM = "test_durable_claim.py::"

MUTANTS = [
    _rows("durable_move", "what changes hands keeps its version", "c.lease_version + 1", "c.lease_version"),
    _rows("durable_move", "no attempt is given back", "greatest(c.attempts - 1, 0)", "c.attempts"),
    _rows(
        "durable_has_open",
        "what runs is nothing to wait for",
        "c.status = 'running' order by c.seq desc limit 1",
        "c.status = 'running' order by c.seq desc limit 0",
    ),
    # --- claim
    _claim(
        "durable_claim",
        "of a job that is paused or has ended",
        "continue when v_job.status is null or v_job.status not in ('queued', 'running');",
        "continue when v_job.status is null;",
        test=f"{_LEASES}test_nothing_is_claimed_of_a_job_that_does_not_run",
    ),
    _claim(
        "durable_claim", "the highest number first", "order by c.seq limit o.most", "order by c.seq desc limit o.most"
    ),
    _claim(
        "durable_claim", "the attempt is not counted", "attempts = c.attempts + 1", "attempts = greatest(c.attempts, 1)"
    ),
    _claim(
        "durable_claim",
        "kind by kind, whatever their priority",
        "order by 3, 4, 5 limit 1) o",
        "order by 1 limit 1) o",
        test=f"{_CLAIM}test_chunks_come_by_priority_then_age_then_number_over_all_jobs_of_the_kinds",
    ),
    _claim(
        "durable_claim",
        "the limit is every tenant's",
        "v_left := v_left - v_got;",
        "",
        test=f"{_CLAIM}test_each_kind_and_each_tenant_has_its_share",
    ),
    _claim(
        "durable_claim",
        "locked chunks are waited for",
        "limit o.most for update skip locked",
        "limit o.most for update",
        test=f"{_LEASES}test_a_locked_chunk_is_stepped_over",
    ),
    _claim(
        "durable_claim",
        "a job whose status is being changed is not locked",
        "limit 1 for key share skip locked) j",
        "limit 1) j",
        test=f"{_EDGES}test_nothing_is_claimed_of_a_job_whose_pause_is_under_way_and_nobody_waits_for_it",
    ),
    _claim(
        "durable_claim",
        "a job whose status is being changed is waited for",
        "limit 1 for key share skip locked) j",
        "limit 1 for key share) j",
        test=f"{_EDGES}test_nothing_is_claimed_of_a_job_whose_pause_is_under_way_and_nobody_waits_for_it",
    ),
    _claim(
        "durable_promote",
        "a retry before its time",
        " and c.available_at <= v_now\n",
        "\n",
        test=f"{_EDGES}test_of_two_retries_the_one_that_is_due_is_claimed_and_the_other_waits",
    ),
    _claim("durable_claim_chunk", "whatever state it is in", "v_chunk.status in ('pending', 'retry') and ", ""),
    _claim("durable_claim_chunk", "whatever version was read", "and v_chunk.lease_version = p_lease_version", ""),
    _claim("durable_claim_again", "of any token", "r.lease_token = p_token and ", ""),
    # In a game a token is of one claim, and the version grows with each: either of the two would do.
    _settle("durable_hold", "without the token", " and c.lease_token = p_token\n", "\n", test=_WRONG),
    _settle("durable_hold", "without the version", "c.lease_version = p_version and ", "", test=_WRONG),
    _settle("durable_hold", "past the lease", "v_until <= at or ", ""),
    _settle(
        "durable_hold",
        "of a cancelled job",
        "v_status in ('cancelled', 'removing')",
        "v_status in ('removing')",
        test=f"{_LEASES}test_a_lease_of_a_cancelled_job_is_lost",
    ),
    _settle(
        "durable_complete_one",
        "without a lock",
        "c.lease_expires_at is not null\n  for update;",
        "c.lease_expires_at is not null;",
        test=f"{_RACES}test_a_completion_that_waited_for_the_reaper_is_told_that_it_has_lost",
    ),
    Mutant(
        "migrations/functions/78_durable_end.sql",
        "durable_finish",
        "without a lock",
        "j.job_id = v_id for update;",
        "j.job_id = v_id;",
        test=f"{_RACES}test_two_last_chunks_that_end_at_the_same_moment_end_the_job_once_and_at_once",
    ),
    _settle("durable_heartbeat", "without the token", " and c.lease_token = i.token", ""),
    _settle(
        "durable_heartbeat",
        "without the version",
        "and c.lease_version = i.version and c.lease",
        "and c.lease",
        test=_WRONG,
    ),
    _settle("durable_heartbeat", "past the lease", "i.version and c.lease_expires_at > v_now", "i.version"),
    _back("durable_fail", "never a retry", "p_retryable and v_row.attempts < v_row.most", "false"),
    _back(
        "durable_fail",
        "one attempt more",
        "v_row.attempts < v_row.most",
        "v_row.attempts <= v_row.most",
        test=f"{_LEASES}test_a_failure_is_a_retry_only_if_it_may_be_and_attempts_remain",
    ),
    _back("durable_release", "without the token", " and c.lease_token = i.token", "", test=_WRONG),
    _back(
        "durable_release",
        "without the version",
        "and c.lease_version = i.version and c.lease",
        "and c.lease",
        test=_WRONG,
    ),
    _back(
        "durable_reap",
        "before the lease is over",
        "c.status = 'running' and c.lease_expires_at <= v_now",
        "c.status = 'running'",
    ),
    _back("durable_reap", "what may not run twice is run again", "when not v_job.idempotent then 'needs_review'", ""),
    _back(
        "durable_reap",
        "without an attempt left",
        "when l.attempts >= v_job.max_attempts then 'failed'",
        "",
        test=f"{_CLAIM}test_a_chunk_that_kills_its_worker_is_counted_and_ends_and_the_others_go_on",
    ),
    _back(
        "durable_reap",
        "a chunk that its holder has locked is waited for",
        "limit v_left for update skip locked",
        "limit v_left for update",
        test="test_durable_races.py::test_the_reaper_steps_over_a_chunk_that_its_holder_is_just_telling_of",
    ),
    _back(
        "durable_reap",
        "the limit is every job's",
        "limit v_left for update",
        "limit p_limit for update",
        test=f"{_EDGES}test_a_reaper_takes_no_more_than_its_limit_over_all_jobs",
    ),
]
