-- role: relay_owner
-- room: durable
--
-- The room of durable jobs. A job is many chunks, each of which is leased, worked and told of by itself.
--
--   relay.durable_job        what is to be done, and how far it is
--   relay.durable_chunk      one part of it: who has it, how it ended
--   relay.durable_row_error  one row of the input that could not be used
--   relay.durable_event      what happened, one line each
--   relay.durable_turn       when each sweep is next due, per login
--
-- Rules as for every table with a tenant_id: it is the first column of every key and every index; no trigger, no identity
-- column, no sequence; row security enabled and forced, by one policy that raises when no tenant is bound. No foreign
-- keys either: a chunk that changes must not look at its job's row, and a lock there would hold up a pause.

create table relay.durable_job (
  tenant_id    text collate "C" not null check (tenant_id <> '' and octet_length(tenant_id) <= 200),
  job_id       uuid not null,
  kind         text collate "C" not null check (kind <> '' and octet_length(kind) <= 200),
  params       jsonb not null,
  -- May a chunk be run again whose worker was lost? If not, a person decides.
  idempotent   boolean not null,
  max_attempts bigint not null check (max_attempts >= 1),
  -- Higher is sooner. rank is its opposite, so that one index runs in the order of claims.
  priority     bigint not null default 0,
  rank         bigint not null,
  -- Microseconds of the database clock when the job became visible. It orders; it is not unique.
  job_seq      bigint not null,
  -- submitting and removing are hidden from everything but the verbs that end those states.
  -- text, not an enum: the equality of an enum is not leakproof, so under row security it could not be an index condition.
  status       text collate "C" not null check (status in (
                 'submitting', 'queued', 'running', 'paused', 'needs_review', 'completed', 'completed_with_errors', 'failed',
                 'cancelled', 'removing')),
  -- Counted from the chunks at counted_at; those of a job that has ended are exact.
  rows_total   bigint not null default 0,
  rows_done    bigint not null default 0,
  rows_failed  bigint not null default 0,
  chunks_total bigint not null default 0,
  chunks_pending bigint not null default 0,
  chunks_running bigint not null default 0,
  chunks_retry bigint not null default 0,
  chunks_done  bigint not null default 0,
  chunks_failed bigint not null default 0,
  chunks_needs_review bigint not null default 0,
  chunks_cancelled bigint not null default 0,
  counted_at   timestamptz not null,
  last_error   text,
  -- Data, and nobody's right.
  created_by   text,
  created_at   timestamptz not null,
  started_at   timestamptz,
  ended_at     timestamptz,
  updated_at   timestamptz not null,
  primary key (tenant_id, job_id),
  check (rank = -priority),
  check ((status in ('completed', 'completed_with_errors', 'failed', 'cancelled', 'removing')) = (ended_at is not null))
) with (
  -- Counters change often, and nothing that is indexed with them.
  fillfactor = 60,
  autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_cost_delay = 0,
  autovacuum_analyze_threshold = 2147483647, autovacuum_analyze_scale_factor = 0
);

-- The primary key is the only index that a statement by job id can take: none of these predicates follows from one.

-- Jobs that may have something to claim, in the order in which they are claimed.
create index durable_job_open on relay.durable_job (tenant_id, kind, rank, job_seq, job_id)
  where status in ('queued', 'running');
-- Those that stand aside, each status by itself: so none waits behind many of another.
create index durable_job_aside on relay.durable_job (tenant_id, status, updated_at)
  where status in ('submitting', 'paused', 'removing');
create index durable_job_ended on relay.durable_job (tenant_id, ended_at)
  where status in ('completed', 'completed_with_errors', 'failed', 'cancelled');

create table relay.durable_chunk (
  tenant_id        text collate "C" not null,
  job_id           uuid not null,
  seq              bigint not null,
  payload          jsonb not null,
  status           text collate "C" not null,
  -- Counted in the claim. A release gives it back.
  attempts         bigint not null default 0,
  -- One higher at every change of hands or status but the holder's own completion.
  lease_version    bigint not null default 0,
  -- New for every claim. A completion leaves it, so that one whose reply was lost is known again.
  lease_token      uuid,
  lease_expires_at timestamptz,
  -- Who holds it; who held it last where it has ended or waits for a person.
  claimed_by       text collate "C",
  claimed_at       timestamptz,
  -- Set only while a retry waits for its time.
  available_at     timestamptz,
  checkpoint       jsonb,
  outcome          jsonb,
  rows_total       bigint not null default 0,
  rows_done        bigint not null default 0,
  -- rows_done as the checkpoint has it: what heartbeats told since is progress, and is done again with those rows.
  rows_saved       bigint not null default 0,
  rows_failed      bigint not null default 0,
  last_error       text,
  created_at       timestamptz not null,
  updated_at       timestamptz not null,
  ended_at         timestamptz,
  primary key (tenant_id, job_id, seq),
  -- What each status has, and has not. One constraint, since each is parsed anew by every statement that writes the table: six
  -- were a tenth of a lone claim.
  constraint durable_chunk_states check (seq >= 1 and case
    when lease_expires_at is not null then
      status = 'running' and lease_token is not null and claimed_by is not null and available_at is null and ended_at is null
    when ended_at is not null then
      available_at is null and (status = 'done' or status in ('failed', 'cancelled') and lease_token is null)
    when available_at is not null then status = 'retry' and lease_token is null
    else status in ('pending', 'retry', 'needs_review') and lease_token is null end)
) with (
  -- Room for a second version of every row of a page, when all are renewed at once: then heartbeats and checkpoints are HOT.
  fillfactor = 50,
  vacuum_truncate = off,
  autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_cost_delay = 0,
  -- As in the dispatch room: no plan may depend on the statistics of a queue.
  autovacuum_analyze_threshold = 2147483647, autovacuum_analyze_scale_factor = 0
);
-- A checkpoint lives for moments: to compress it would cost its writer more than it saves.
alter table relay.durable_chunk alter column checkpoint set storage external;

-- None of these holds what a heartbeat or a checkpoint writes, and none can be taken by key.
create index durable_chunk_open on relay.durable_chunk (tenant_id, job_id, seq)
  where status in ('pending', 'retry') and available_at is null;
create index durable_chunk_running on relay.durable_chunk (tenant_id, job_id, seq) where status = 'running';
-- Retries that wait for their time: when the next is due, and whether a job has any.
create index durable_chunk_due on relay.durable_chunk (tenant_id, available_at) where available_at is not null;
create index durable_chunk_waiting on relay.durable_chunk (tenant_id, job_id, seq) where available_at is not null;

create table relay.durable_row_error (
  tenant_id     text collate "C" not null,
  job_id        uuid not null,
  seq           bigint not null,
  row_no        bigint not null,
  code          text collate "C" not null check (octet_length(code) <= 200),
  message       text not null,
  data          jsonb,
  lease_version bigint not null,
  created_at    timestamptz not null,
  -- A chunk that is run again replaces what it said of a row, and never doubles it.
  primary key (tenant_id, job_id, seq, row_no, code)
);

create table relay.durable_event (
  tenant_id text collate "C" not null,
  job_id    uuid not null,
  -- The transaction that wrote it, and the place within it: microseconds of the clock, or the next free one. Together they
  -- are the event's identity, and what reading on goes by (72_durable_events.sql).
  xid       xid8 not null,
  n         bigint not null,
  at        timestamptz not null,
  -- null: of the job.
  seq       bigint,
  -- Not empty, and 100 bytes at most: the verbs that take one from outside see to that.
  type      text collate "C" not null,
  -- A person, or null; the way by which it came; who held the chunk. All of it is data.
  actor     text,
  channel   text,
  holder    text,
  detail    jsonb,
  primary key (tenant_id, job_id, xid, n)
);

create table relay.durable_turn (
  name        text not null,
  role_oid    oid not null,
  next_due_at timestamptz not null,
  primary key (name, role_oid)
);

revoke all on relay.durable_job, relay.durable_chunk, relay.durable_row_error, relay.durable_event, relay.durable_turn
  from public;
grant select, insert, update, delete on relay.durable_job, relay.durable_chunk, relay.durable_row_error to relay_api;
-- The timeline is append-only for the functions too.
grant select, insert, delete on relay.durable_event to relay_api;
grant select, insert, update on relay.durable_turn to relay_api;
grant select on relay.durable_job, relay.durable_chunk to relay_sweep;

alter table relay.durable_job enable row level security;
alter table relay.durable_job force row level security;
alter table relay.durable_chunk enable row level security;
alter table relay.durable_chunk force row level security;
alter table relay.durable_row_error enable row level security;
alter table relay.durable_row_error force row level security;
alter table relay.durable_event enable row level security;
alter table relay.durable_event force row level security;

-- The sub-select makes the check run once a statement and not once a row.
create policy by_tenant on relay.durable_job
  using (tenant_id = (select relay.row_tenant())) with check (tenant_id = (select relay.row_tenant()));
create policy by_tenant on relay.durable_chunk
  using (tenant_id = (select relay.row_tenant())) with check (tenant_id = (select relay.row_tenant()));
create policy by_tenant on relay.durable_row_error
  using (tenant_id = (select relay.row_tenant())) with check (tenant_id = (select relay.row_tenant()));
create policy by_tenant on relay.durable_event
  using (tenant_id = (select relay.row_tenant())) with check (tenant_id = (select relay.row_tenant()));
-- relay_sweep owns two functions of this room, which return tenant ids and nothing else.
create policy due_work on relay.durable_job for select to relay_sweep using (true);
create policy due_work on relay.durable_chunk for select to relay_sweep using (true);
