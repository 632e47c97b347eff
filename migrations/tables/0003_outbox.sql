-- role: relay_owner
-- room: outbox
--
-- The outbox room. An event is one row, written in the transaction of whoever has something to tell, and gone once it was
-- delivered.
--
--   relay.outbox   events that are not yet delivered, and those that a person must look at (parked)
--
-- Rules as for every table with a tenant_id: it is the first column of every key and every index; no trigger, no identity
-- column, no sequence; row security enabled and forced, by one policy that raises when no tenant is bound.

create table relay.outbox (
  tenant_id        text collate "C" not null check (tenant_id <> '' and octet_length(tenant_id) <= 200),
  event_id         uuid not null,
  kind             text collate "C" not null check (kind <> '' and octet_length(kind) <= 200),
  -- Events of one key are delivered one after the other, in the order of seq. null: in any order.
  key              text collate "C" check (key <> '' and octet_length(key) <= 200),
  payload          jsonb not null,
  -- As JSON text, in which claims bring it: a few bytes of jsonb may be a number of 100,000 digits.
  payload_bytes    bigint not null,
  -- Microseconds of the database clock at enqueue plus the place in the batch, and above every live event of the key that
  -- the writer could see. It orders; it is not unique.
  seq              bigint not null,
  -- ready    to be claimed from available_at on          claimed  on its way to its sink
  -- waiting  behind a live event of its key              parked   given up, until a person decides
  -- text, not an enum: the equality of an enum is not leakproof, so under row security it could not be an index condition.
  state            text collate "C" not null check (state in ('ready', 'waiting', 'claimed', 'parked')),
  created_at       timestamptz not null,
  available_at     timestamptz not null,
  first_claimed_at timestamptz,
  claimed_at       timestamptz,
  claimed_by       text collate "C",
  -- One higher at every claim, release, failure, re-claim and decision of a person; every later write must name it.
  fence            bigint not null default 0,
  -- Deliveries that failed; a claim that nobody answered for counts as one.
  attempts         bigint not null default 0,
  last_error       text,
  -- Its last claim was never answered for: perhaps it killed its drainer. It is claimed alone, so that those that were
  -- claimed with it do not fail with it again.
  suspect          boolean not null default false,
  parked_at        timestamptz,
  primary key (tenant_id, event_id),
  check ((state = 'claimed') = (claimed_by is not null)),
  check ((claimed_by is null) = (claimed_at is null)),
  check ((state = 'parked') = (parked_at is not null)),
  check (state <> 'waiting' or key is not null)
) with (
  -- As the queue of the dispatch room, and for its reasons; but no page needs room for a second version of its rows, as
  -- every change here is of a column that is indexed.
  vacuum_truncate = off,
  autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_insert_threshold = -1,
  autovacuum_vacuum_cost_delay = 0,
  autovacuum_analyze_threshold = 2147483647, autovacuum_analyze_scale_factor = 0
);
-- An event lives for moments: to compress it would cost its writer more than it saves.
alter table relay.outbox alter column payload set storage external;

-- The primary key is the only index that a statement by event id can take: none of these predicates follows from one. Nor
-- does that of the index by key follow from a state.

create index outbox_ready on relay.outbox (tenant_id, kind, available_at, seq, event_id) where state = 'ready';
create index outbox_claimed on relay.outbox (tenant_id, claimed_at) where state = 'claimed';
-- The first of it is the one event of a key whose turn it is.
create index outbox_key on relay.outbox (tenant_id, key, seq, event_id) where key is not null and parked_at is null;
-- Few of a key: of them one alone may be claimed.
create index outbox_turn on relay.outbox (tenant_id, key, seq, event_id)
  where state in ('ready', 'claimed') and key is not null;
create index outbox_waiting on relay.outbox (tenant_id, key) where state = 'waiting';
create index outbox_parked on relay.outbox (tenant_id, parked_at) where state = 'parked';

revoke all on relay.outbox from public;
grant select, insert, update, delete on relay.outbox to relay_api;
grant select on relay.outbox to relay_sweep;

alter table relay.outbox enable row level security;
alter table relay.outbox force row level security;

-- The sub-select makes the check run once a statement and not once a row.
create policy by_tenant on relay.outbox
  using (tenant_id = (select relay.row_tenant())) with check (tenant_id = (select relay.row_tenant()));
-- relay_sweep owns one function of this room, which returns tenant ids and nothing else.
create policy due_work on relay.outbox for select to relay_sweep using (true);
