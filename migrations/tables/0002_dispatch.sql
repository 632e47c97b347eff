-- role: relay_owner
-- room: dispatch
--
-- The dispatch room. A job is one request row, one queue row while it is not terminal, and one result row afterwards.
--
--   relay.s2r_relay_dispatch_request  what was asked: written once
--   relay.s2r_relay_dispatch_queue    where it stands: small, hot, deleted when the job ends
--   relay.s2r_relay_dispatch_result   how it ended: written once
--   relay.s2r_relay_dispatch_key      idempotency keys in use
--   relay.sweep                       when each sweep is next due, per login
--   relay.s2r_relay_dispatch          view: the job, whole
--
-- Rules that hold for every table with a tenant_id: it is the first column of every key and every index; no trigger, no
-- identity column, no sequence; row security enabled and forced, by one policy that raises when no tenant is bound.

create table relay.s2r_relay_dispatch_request (
  tenant_id       text collate "C" not null check (tenant_id <> '' and octet_length(tenant_id) <= 200),
  job_id          uuid not null,
  relay_id        text collate "C" not null check (relay_id <> '' and octet_length(relay_id) <= 200),
  operation       text collate "C" not null check (operation <> '' and octet_length(operation) <= 200),
  request_headers jsonb not null,
  request_body    bytea not null,
  max_attempts    bigint not null check (max_attempts >= 1),
  created_at      timestamptz not null,
  expires_at      timestamptz not null,
  primary key (tenant_id, job_id)
);

create table relay.s2r_relay_dispatch_queue (
  tenant_id        text collate "C" not null,
  job_id           uuid not null,
  relay_id         text collate "C" not null,
  -- Microseconds of the database clock at enqueue, plus the place in the batch. It orders claims; it is not unique.
  seq              bigint not null,
  -- text, not an enum: the equality of an enum is not leakproof, so under row security it could not be an index condition.
  state            text collate "C" not null check (state in ('ready', 'delayed', 'claimed')),
  attempt          bigint not null default 0,
  max_attempts     bigint not null,
  -- One higher at every claim, release, retry and reclaim; every later write must name it.
  fence            bigint not null default 0,
  claimed_by       text collate "C",
  claim_id         uuid,
  claimed_at       timestamptz,
  lease_expires_at timestamptz,
  available_at     timestamptz,
  created_at       timestamptz not null,
  expires_at       timestamptz not null,
  primary key (tenant_id, job_id),
  check ((state = 'claimed') = (claimed_by is not null)),
  check ((claimed_by is null) = (lease_expires_at is null)),
  check ((state = 'delayed') = (available_at is not null))
) with (
  -- Room for a heartbeat of many rows of one page in one transaction: of 2,000 claims renewed 200 at a time, 98 % are HOT;
  -- at 80, 80 %, and at 100, 56 %. Claims and completions cost the same at each.
  fillfactor = 60,
  -- Truncation takes ACCESS EXCLUSIVE, and the table would grow again a moment later.
  vacuum_truncate = off,
  autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_insert_threshold = -1,
  autovacuum_vacuum_cost_delay = 0,
  -- Statistics of a queue are always of another moment, and a vacuum of the drained table alone already says "no rows".
  -- So no plan may depend on them (see functions/25_dispatch_rows.sql), and gathering them is work for nothing.
  autovacuum_analyze_threshold = 2147483647, autovacuum_analyze_scale_factor = 0
);

-- The primary key is the only index that a statement by key can take: none of these predicates follows from one.

-- Claimable rows only, in the order in which they are claimed.
create index s2r_relay_dispatch_queue_ready on relay.s2r_relay_dispatch_queue (tenant_id, relay_id, seq, job_id)
  where state = 'ready';
-- Delayed and backing-off rows wait apart, so that a claim never wades through them.
create index s2r_relay_dispatch_queue_delayed on relay.s2r_relay_dispatch_queue (tenant_id, relay_id, available_at)
  where state = 'delayed';
-- Without the lease time: so a heartbeat changes no indexed column and is a HOT update.
create index s2r_relay_dispatch_queue_claimed on relay.s2r_relay_dispatch_queue (tenant_id, relay_id, claimed_at)
  where state = 'claimed';
-- For the expire sweep. A claim takes its row out of this index and puts nothing back. Not `where state <> 'claimed'`:
-- that follows from `state = 'ready'`, and then claims took this index and sorted the whole backlog.
create index s2r_relay_dispatch_queue_expiry on relay.s2r_relay_dispatch_queue (tenant_id, expires_at)
  where claimed_by is null;

create table relay.s2r_relay_dispatch_result (
  tenant_id        text collate "C" not null,
  job_id           uuid not null,
  relay_id         text collate "C" not null,
  status           text collate "C" not null check (status in ('succeeded', 'failed', 'expired')),
  attempt          bigint not null,
  -- Kept, so that a completion whose reply was lost reads `repeated` and not `stale`.
  fence            bigint not null,
  claimed_by       text collate "C",
  response_status  bigint,
  response_headers jsonb,
  response_body    bytea,
  error_code       text,
  error_message    text,
  created_at       timestamptz not null,
  claimed_at       timestamptz,
  completed_at     timestamptz not null,
  expires_at       timestamptz not null,
  primary key (tenant_id, job_id)
);
-- The predicate is always true. It keeps the index from statements by key, which do not say it and have the primary key.
create index s2r_relay_dispatch_result_retention on relay.s2r_relay_dispatch_result (tenant_id, completed_at)
  where completed_at > '-infinity';

create table relay.s2r_relay_dispatch_key (
  tenant_id       text collate "C" not null,
  idempotency_key text collate "C" not null check (idempotency_key <> '' and octet_length(idempotency_key) <= 200),
  request_digest  bytea not null,
  job_id          uuid not null,
  created_at      timestamptz not null,
  primary key (tenant_id, idempotency_key)
);
-- For the purge; its predicate as that of the index above. created_at gives it an order that the primary key has not.
create index s2r_relay_dispatch_key_job on relay.s2r_relay_dispatch_key (tenant_id, job_id, created_at)
  where created_at > '-infinity';

-- Sweeps only tidy. One row per sweep and login, so that a login bound to one relay never takes a turn from the others.
create table relay.sweep (
  name        text not null,
  role_oid    oid not null,
  next_due_at timestamptz not null,
  primary key (name, role_oid)
);

revoke all on relay.s2r_relay_dispatch_request, relay.s2r_relay_dispatch_queue, relay.s2r_relay_dispatch_result,
  relay.s2r_relay_dispatch_key, relay.sweep from public;
-- UPDATE on request, result and key is held back: they are append-only for the functions too.
grant select, insert, delete on relay.s2r_relay_dispatch_request, relay.s2r_relay_dispatch_key to relay_api;
grant select, insert, delete on relay.s2r_relay_dispatch_result to relay_api;
grant select, insert, update, delete on relay.s2r_relay_dispatch_queue to relay_api;
-- FOR UPDATE in the retention purge needs an UPDATE right on some column; this one is never written.
grant update (completed_at) on relay.s2r_relay_dispatch_result to relay_api;
grant select, insert, update on relay.sweep to relay_api;
grant select on relay.s2r_relay_dispatch_queue, relay.s2r_relay_dispatch_result to relay_sweep;

alter table relay.s2r_relay_dispatch_request enable row level security;
alter table relay.s2r_relay_dispatch_request force row level security;
alter table relay.s2r_relay_dispatch_queue enable row level security;
alter table relay.s2r_relay_dispatch_queue force row level security;
alter table relay.s2r_relay_dispatch_result enable row level security;
alter table relay.s2r_relay_dispatch_result force row level security;
alter table relay.s2r_relay_dispatch_key enable row level security;
alter table relay.s2r_relay_dispatch_key force row level security;

-- The sub-select makes the check run once a statement and not once a row.
create policy by_tenant on relay.s2r_relay_dispatch_request
  using (tenant_id = (select relay.row_tenant())) with check (tenant_id = (select relay.row_tenant()));
create policy by_tenant on relay.s2r_relay_dispatch_queue
  using (tenant_id = (select relay.row_tenant())) with check (tenant_id = (select relay.row_tenant()));
create policy by_tenant on relay.s2r_relay_dispatch_result
  using (tenant_id = (select relay.row_tenant())) with check (tenant_id = (select relay.row_tenant()));
create policy by_tenant on relay.s2r_relay_dispatch_key
  using (tenant_id = (select relay.row_tenant())) with check (tenant_id = (select relay.row_tenant()));
-- relay_sweep owns one function, which returns tenant ids and nothing else. Policies of one command are OR-ed, and the
-- planner folds `true or …` to true, so the raising call above is never made for this role.
create policy due_work on relay.s2r_relay_dispatch_queue for select to relay_sweep using (true);
create policy due_work on relay.s2r_relay_dispatch_result for select to relay_sweep using (true);

-- The job, whole. Its owner is bound by the forced policies, so the view shows the bound tenant and raises when none is.
-- It locks nothing: a job whose completion is just being committed past its deadline reads 'expired' here for a moment,
-- where relay.poll waits.
create view relay.s2r_relay_dispatch with (security_barrier) as
select r.tenant_id, r.job_id, r.relay_id, r.operation, r.request_headers, r.request_body, r.max_attempts,
       case
         when d.job_id is not null then d.status
         when q.expires_at <= clock_timestamp() then 'expired'
         when q.state = 'claimed' then 'claimed'
         when q.job_id is not null then 'pending'
       end as status,
       coalesce(d.attempt, q.attempt) as attempt,
       coalesce(d.fence, q.fence) as fence,
       coalesce(d.claimed_by, q.claimed_by) as claimed_by,
       q.lease_expires_at, q.available_at,
       d.response_status, d.response_headers, d.response_body, d.error_code, d.error_message,
       r.created_at, coalesce(d.claimed_at, q.claimed_at) as claimed_at, d.completed_at, r.expires_at
from relay.s2r_relay_dispatch_request r
left join relay.s2r_relay_dispatch_queue q on q.tenant_id = r.tenant_id and q.job_id = r.job_id
left join relay.s2r_relay_dispatch_result d on d.tenant_id = r.tenant_id and d.job_id = r.job_id
where r.tenant_id = (select relay.bound_tenant());

revoke all on relay.s2r_relay_dispatch from public;
grant select on relay.s2r_relay_dispatch to relay_operator;
