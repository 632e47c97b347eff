"""The bare statements. Each does what one call of ours does for the same caller, and returns what that caller needs."""

from __future__ import annotations

from typing import Final

__all__ = [
    "CLAIM",
    "CLAIM_AND_COMPLETE_CHANNELS",
    "CLAIM_ON_OURS",
    "COMPLETE",
    "COMPLETE_NOTIFY",
    "INSERT",
    "INSERT_MANY",
    "INSERT_NOTIFY",
    "JOB_CHANNEL",
    "RESULT",
    "RESULT_CHANNEL",
]

JOB_CHANNEL: Final = "bare_jobs"
RESULT_CHANNEL: Final = "bare_results"
CLAIM_AND_COMPLETE_CHANNELS: Final = (JOB_CHANNEL, RESULT_CHANNEL)

# Locks the n lowest rows and takes them in one statement; what a worker needs is read beside.
# $1 tenant, $2 relay, $3 claimed_by, $4 claim id, $5 lease, $6 how many
_TAKE: Final = """
  update bare.queue q
  set state = 'claimed', attempt = attempt + 1, fence = fence + 1, claimed_by = $3, claim_id = $4, claimed_at = now(),
      lease_expires_at = now() + $5
  where ctid = any (array(
    select ctid from bare.queue where tenant_id = $1 and relay_id = $2 and state = 'ready'
    order by seq, job_id limit $6 for update skip locked))
"""
# LATERAL … LIMIT 1: the join that stays an index probe whatever the statistics say.
CLAIM: Final = f"""
with taken as ({_TAKE} returning job_id, attempt, max_attempts, fence, seq, created_at, expires_at)
select t.job_id, r.operation, r.request_headers::text, r.request_body, t.attempt, t.max_attempts, t.fence, t.seq,
       t.created_at, t.expires_at
from taken t
cross join lateral (
  select * from bare.request r where r.tenant_id = $1 and r.job_id = t.job_id limit 1) r
"""
# The same rows by the same statement from our tables, for those whom no policy holds.
CLAIM_ON_OURS: Final = CLAIM.replace("bare.queue", "relay.s2r_relay_dispatch_queue").replace(
    "bare.request", "relay.s2r_relay_dispatch_request"
)

# $1 tenant, $2 job ids, $3 fences, $4 claimed_by, $5 bodies, $6 relay
_END: Final = """
  ended as (
    delete from bare.queue q using unnest($2::uuid[], $3::bigint[], $5::bytea[]) as u (job_id, fence, body)
    where q.tenant_id = $1 and q.job_id = u.job_id and q.fence = u.fence and q.claimed_by = $4
    returning q.job_id, q.attempt, q.fence, q.claimed_at, q.created_at, q.expires_at, u.body),
  stored as (
    insert into bare.result (tenant_id, job_id, relay_id, status, attempt, fence, claimed_by, response_status,
                             response_headers, response_body, created_at, claimed_at, completed_at, expires_at)
    select $1, job_id, $6, 'succeeded', attempt, fence, $4, 200, '{}', body, created_at, claimed_at, clock_timestamp(),
           expires_at
    from ended
    returning job_id)
"""
COMPLETE: Final = f"with {_END} select job_id from stored"
COMPLETE_NOTIFY: Final = f"""
with {_END} select pg_notify('{RESULT_CHANNEL}', job_id::text) from stored
"""

# $1 tenant, $2 job id, $3 relay, $4 operation, $5 headers, $6 body, $7 ttl
_STORE: Final = """
  stored as (
    insert into bare.request (tenant_id, job_id, relay_id, operation, request_headers, request_body, max_attempts,
                              created_at, expires_at)
    values ($1, $2, $3, $4, $5::text::jsonb, $6, 1, now(), now() + $7)),
  queued as (
    insert into bare.queue (tenant_id, job_id, relay_id, seq, state, max_attempts, created_at, expires_at)
    values ($1, $2, $3, (extract(epoch from clock_timestamp()) * 1000000)::bigint, 'ready', 1, now(), now() + $7)
    returning job_id)
"""
INSERT: Final = f"with {_STORE} select job_id from queued"
INSERT_NOTIFY: Final = f"with {_STORE} select pg_notify('{JOB_CHANNEL}', '') from queued"

# The same in arrays: $2 job ids, $5 headers, $6 bodies
INSERT_MANY: Final = """
with input as materialized (
  select u.job_id, u.headers, u.body, u.n
  from unnest($2::uuid[], $5::text[], $6::bytea[]) with ordinality as u (job_id, headers, body, n)),
stored as (
  insert into bare.request (tenant_id, job_id, relay_id, operation, request_headers, request_body, max_attempts,
                            created_at, expires_at)
  select $1, job_id, $3, $4, headers::jsonb, body, 1, now(), now() + $7 from input)
insert into bare.queue (tenant_id, job_id, relay_id, seq, state, max_attempts, created_at, expires_at)
select $1, job_id, $3, (extract(epoch from now()) * 1000000)::bigint + n, 'ready', 1, now(), now() + $7 from input
"""

# $1 tenant, $2 job id
RESULT: Final = "select status, response_body from bare.result where tenant_id = $1 and job_id = $2"
