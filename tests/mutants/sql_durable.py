"""Mutants of the durable room's functions, for tests/test_durable_machine.py."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant

_rows = partial(Mutant, "migrations/functions/70_durable_rows.sql")
_claim = partial(Mutant, "migrations/functions/73_durable_claim.sql")
_settle = partial(Mutant, "migrations/functions/74_durable_settle.sql")
_back = partial(Mutant, "migrations/functions/75_durable_back.sql")

_ONE_TOKEN = (
    "a token is of one claim, and goes when the chunk changes hands; the version is for a failover that forgets it"
)

MUTANTS = [
    _rows("durable_move", "what changes hands keeps its version", "c.lease_version + 1", "c.lease_version"),
    _rows("durable_move", "no attempt is given back", "greatest(c.attempts - 1, 0)", "c.attempts"),
    _claim("durable_claim_chunk", "whatever version was read", "and v_chunk.lease_version = p_lease_version", ""),
    _claim("durable_claim_again", "of any token", "r.lease_token = p_token and ", ""),
    _settle("durable_hold", "without the token", " and c.lease_token = p_token\n", "\n"),
    _settle("durable_hold", "without the version", "c.lease_version = p_version and ", "", equivalent=_ONE_TOKEN),
    _settle("durable_hold", "past the lease", "v_until <= at or ", ""),
    _settle("durable_hold", "of a cancelled job", "v_status in ('cancelled', 'removing')", "v_status in ('removing')"),
    _settle("durable_heartbeat", "without the token", " and c.lease_token = i.token", ""),
    _settle(
        "durable_heartbeat",
        "without the version",
        "and c.lease_version = i.version and c.lease",
        "and c.lease",
        equivalent=_ONE_TOKEN,
    ),
    _settle("durable_heartbeat", "past the lease", "i.version and c.lease_expires_at > v_now", "i.version"),
    _back("durable_fail", "never a retry", "p_retryable and v_row.attempts < v_row.most", "false"),
    _back("durable_fail", "one attempt more", "v_row.attempts < v_row.most", "v_row.attempts <= v_row.most"),
    _back("durable_release", "without the token", " and c.lease_token = i.token", ""),
    _back(
        "durable_release",
        "without the version",
        "and c.lease_version = i.version and c.lease",
        "and c.lease",
        equivalent=_ONE_TOKEN,
    ),
    _back(
        "durable_reap",
        "before the lease is over",
        "c.status = 'running' and c.lease_expires_at <= v_now",
        "c.status = 'running'",
    ),
    _back("durable_reap", "what may not run twice is run again", "when not v_job.idempotent then 'needs_review'", ""),
    _back("durable_reap", "without an attempt left", "when l.attempts >= v_job.max_attempts then 'failed'", ""),
]
