"""Plans that cannot go bad (ARCHITECTURE D7): the same access paths under every state of statistics, call after call.

Among 100,000 jobs that wait and 100,000 that have ended, a statement reads the rows it is about and no more. What the
planner believes of the tables is wrong most of the time, so each way in which it can be wrong is a state here.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import pytest

from dispatch_core.dev.logins import GATEWAY_LOGIN, WORKER_LOGIN
from dispatch_core.dispatch import EnqueueRow, RelayDispatchRepository, prepare
from dispatch_core.errors import BacklogFullError
from dispatch_core.models import Completion, DispatchJob, DispatchRequest, PutBack
from tests.support.databases import TestDatabase
from tests.support.plans import Connection, Explained, Node, Recorder, explained
from tests.support.protocol import (
    KEY,
    ME,
    QUEUE,
    RELAY,
    REQUEST,
    RESULT,
    TENANT,
    TENANT_TABLES,
    claim,
    connected,
    enqueue,
    heartbeat,
)

WAITING = 100_000
ENDED = 100_000

# --- states of statistics -----------------------------------------------------------------------


async def _fill(admin: Connection, waiting: int = WAITING, ended: int = ENDED) -> None:
    """Store jobs as the verbs would, but faster; and among those that wait some thousands that are delayed."""
    await admin.execute(
        f"""
        insert into {REQUEST}
          select 'acme', ('01900000-0000-7000-8000-' || lpad(to_hex(i), 12, '0'))::uuid, 'erp', 'Get', '{{}}', 'body',
                 3, now(), now() + interval '1 day'
          from generate_series(1, {waiting + ended}) i;
        insert into {RESULT}
          select tenant_id, job_id, relay_id, 'succeeded', 1, 1, 'gone', 200, '{{}}', 'body', null, null, created_at,
                 now(), now() - interval '1 hour' * random(), expires_at
          from {REQUEST} order by job_id limit {ended};
        insert into {KEY} select tenant_id, job_id::text, '', job_id, now() from {RESULT} limit {ended // 2};
        insert into {QUEUE} (tenant_id, job_id, relay_id, seq, state, max_attempts, created_at, expires_at)
          select tenant_id, job_id, relay_id, row_number() over (order by job_id), 'ready', max_attempts, created_at,
                 expires_at
          from {REQUEST} order by job_id offset {ended};
        insert into {QUEUE}
          (tenant_id, job_id, relay_id, seq, state, max_attempts, created_at, expires_at, available_at)
          select 'acme', gen_random_uuid(), 'erp', i, 'delayed', 3, now(), now() + interval '1 day',
                 now() + interval '1 hour'
          from generate_series(1, {waiting // 10}) i;
        """
    )


async def _never_analyzed(admin: Connection) -> None:
    await _fill(admin)


async def _analyzed_when_empty(admin: Connection) -> None:
    for table in TENANT_TABLES:
        await admin.execute(f"analyze {table}")
    await _fill(admin)


async def _analyzed_when_full(admin: Connection) -> None:
    await _fill(admin)
    for table in TENANT_TABLES:
        await admin.execute(f"analyze {table}")


async def _drain(admin: Connection, *, analyze: bool) -> None:
    """What every queue meets: autovacuum comes when it is empty, and leaves "no rows in many pages"."""
    await _fill(admin, 20_000, 20_000)
    for table in TENANT_TABLES:
        await admin.execute(f"delete from {table}")
    if analyze:
        await admin.execute(
            f"""insert into {QUEUE} (tenant_id, job_id, relay_id, seq, state, max_attempts, created_at, expires_at)
                select 't' || i, gen_random_uuid(), 'erp', i, 'ready', 1, now(), now() + interval '1 day'
                from generate_series(1, 50) i"""
        )
    for table in TENANT_TABLES:
        await admin.execute(f"vacuum (truncate off, analyze {analyze}) {table}")
    query = "select reltuples, relpages from pg_class where oid = $1::text::regclass"
    ((tuples, pages),) = await admin.fetch(query, QUEUE)
    assert tuples == (50 if analyze else 0)
    assert pages > 300


async def _vacuumed_when_drained(admin: Connection) -> None:
    await _drain(admin, analyze=False)
    await _fill(admin)


async def _analyzed_when_nearly_drained(admin: Connection) -> None:
    await _drain(admin, analyze=True)
    await _fill(admin)


async def _vacuumed_when_drained_and_small(admin: Connection) -> None:
    await _drain(admin, analyze=False)
    await _fill(admin, 5_000, 5_000)


STATES = [
    _never_analyzed,
    _analyzed_when_empty,
    _analyzed_when_full,
    _vacuumed_when_drained,
    _analyzed_when_nearly_drained,
]

# --- what a plan may be -------------------------------------------------------------------------

_PREFIX = "s2r_relay_dispatch_"
# Index -> the columns that its condition must name: fewer would be a walk through all rows of the tenant.
_CONDITIONS = {
    "request_pkey": ("tenant_id", "job_id"),
    "queue_pkey": ("tenant_id", "job_id"),
    "result_pkey": ("tenant_id", "job_id"),
    "key_pkey": ("tenant_id", "idempotency_key"),
    "queue_ready": ("tenant_id", "relay_id", "seq"),
    "queue_delayed": ("tenant_id", "relay_id"),
    "queue_claimed": ("tenant_id",),
    "queue_expiry": ("tenant_id", "expires_at"),
    "result_retention": ("tenant_id", "completed_at"),
    "key_job": ("tenant_id", "job_id"),
}


# What counts a relay's jobs begins at the first one, and a limit is its end.
_COUNTING = "limit greatest(p_limit, 0)"


def _check(statement: Explained, most_rows: float) -> None:
    """Fail where a statement reaches a tenant table in another way than by index or ctid, or reads too much."""
    for node in statement.nodes():
        if node.relation is None or not node.relation.startswith(_PREFIX) or "Scan" not in node.kind:
            continue
        where = f"{node.kind} on {node.relation} {node.index} {node.condition}\nof: {statement.text}"
        assert node.kind in ("Index Scan", "Index Only Scan", "Tid Scan"), where
        if node.index is not None:
            for column in _CONDITIONS[node.index.removeprefix(_PREFIX)]:
                if column == "seq" and _COUNTING in statement.text:
                    continue
                assert re.search(rf"\b{column}\b", node.condition), f"no {column} in {where}"
        assert node.rows_read <= most_rows, f"{node.rows_read} rows read by {where}"


def _kinds(plans: list[Explained], table: str) -> Ways:
    return {
        (node.kind, node.index.removeprefix(_PREFIX) if node.index else None)
        for statement in plans
        for node in statement.of_table(table.removeprefix("relay."))
    }


Ways: TypeAlias = "set[tuple[str, str | None]]"

_PROBES: Ways = {("Index Scan", "queue_pkey")}
_BY_KEY: Ways = {*_PROBES, ("Tid Scan", None)}
_REQUESTS: Ways = {("Index Scan", "request_pkey")}
_RESULTS: Ways = {("Index Scan", "result_pkey")}


class _Hot:
    """The hot verbs, each called over and over on one connection, its plans looked at every time."""

    def __init__(
        self, gateway: tuple[Connection, Recorder], worker: tuple[Connection, Recorder], admin: Connection, batch: int
    ) -> None:
        self.gateway, self.gateway_plans = gateway
        self.worker, self.worker_plans = worker
        self.admin = admin
        self.batch = batch
        self.gate = RelayDispatchRepository(self.gateway, TENANT)
        self.work = RelayDispatchRepository(self.worker, TENANT)

    async def run(self, call: Callable[[], Awaitable[Any]], expected: dict[str, Ways], rows: int = 2) -> Any:
        """Make a call; its plans may reach each table only as `expected`, and read at most `rows` a job."""
        self.gateway_plans.take(), self.worker_plans.take()
        answer = await call()
        plans = [*self.gateway_plans.take(), *self.worker_plans.take()]
        assert any(_PREFIX in statement.text for statement in plans)
        for statement in plans:
            _check(statement, rows * self.batch + 5)
        for table in TENANT_TABLES:
            used = _kinds(plans, table)
            assert used <= expected.get(table, set()), (table, used, expected)
            # Each way that is expected of the call is one that it has really gone.
            assert used == expected.get(table, set()), (table, used, expected)
        return answer

    async def round(self) -> None:
        """Take jobs through the verbs of a relay, and through those of a gateway that concern them."""
        batch, gate, work = self.batch, self.gate, self.work
        taking: Ways = {("Index Scan", "queue_ready"), ("Tid Scan", None), ("Index Only Scan", "queue_delayed")}
        claimed = await self.run(
            lambda: work.claim(RELAY, claimed_by=ME, limit=batch), {QUEUE: taking, REQUEST: _REQUESTS}
        )
        jobs = claimed.jobs
        assert len(jobs) == batch
        ids = _ids(jobs)
        claims = [(None, job.job_id, job.fence) for job in jobs]
        stale = [(None, uuid4(), 1) for _ in ids]
        told = await self.run(lambda: work.heartbeat(RELAY, claims, claimed_by=ME), {QUEUE: _BY_KEY})
        assert set(told) == {"applied"}
        told = await self.run(lambda: work.heartbeat(RELAY, [*claims, *stale], claimed_by=ME), {QUEUE: _BY_KEY}, rows=4)
        assert told.count("stale") == batch
        await self.run(lambda: work.fetch_body(jobs[0], claimed_by=ME), {QUEUE: _PROBES, REQUEST: _REQUESTS})
        await self.run(lambda: gate.poll_many(ids), {QUEUE: _PROBES, RESULT: _RESULTS})

        third = -(-batch // 3)
        done = [Completion(job.job_id, job.fence) for job in jobs[:third]]
        settled = await self.run(lambda: work.complete_many(RELAY, done, claimed_by=ME), {QUEUE: _BY_KEY})
        assert {item.outcome.value for item in settled} == {"applied"}
        settled = await self.run(
            lambda: work.complete_many(RELAY, done, claimed_by=ME), {QUEUE: _PROBES, RESULT: _RESULTS}
        )
        assert {item.outcome.value for item in settled} == {"repeated"}
        if batch > 1:
            await self.put_back(jobs[third : 2 * third])
            await self.sweep(jobs[2 * third :])
            assert len(await self.run(lambda: gate.mark_expired_many(ids), {QUEUE: _BY_KEY})) > 0

    async def put_back(self, jobs: list[DispatchJob]) -> None:
        # Every second one past its deadline, so that it ends.
        back = [PutBack(job.job_id, job.fence, delay=600_000 * (number % 2)) for number, job in enumerate(jobs)]
        settled = await self.run(lambda: self.work.retry(RELAY, back, claimed_by=ME), {QUEUE: _BY_KEY}, rows=3)
        assert {item.status for item in settled} == {"pending", "failed"}

    async def sweep(self, jobs: list[DispatchJob]) -> None:
        by_claim: Ways = {("Index Scan", "queue_claimed"), ("Tid Scan", None)}
        await self.admin.execute(f"update {QUEUE} set lease_expires_at = now() where job_id = any ($1)", _ids(jobs[:2]))
        reclaim = "select * from relay.reclaim_lost($1, $2, 1)"
        assert len(await self.run(lambda: self.worker.fetch(reclaim, TENANT, RELAY), {QUEUE: by_claim}, rows=10)) == 1
        late = _ids(jobs[2:6])
        await self.admin.execute(f"update {QUEUE} set expires_at = now() where job_id = any ($1)", late)
        await self.run(lambda: self.gate.poll_many(late), {QUEUE: _PROBES, RESULT: _RESULTS})
        expire = "select * from relay.expire_late($1, null, 100)"
        ways: Ways = {*by_claim, ("Index Scan", "queue_expiry")}
        assert len(await self.run(lambda: self.gateway.fetch(expire, TENANT), {QUEUE: ways}, rows=10)) == len(late)

    async def bounded(self, there: list[EnqueueRow]) -> None:
        """Enqueue with a bound, which is met, or not; what is refused is looked for, and so is when to come again."""
        counting: Ways = {("Index Only Scan", "queue_ready")}
        answers = await self.run(
            lambda: self.gate.enqueue_bounded_rows(
                [*there, *(prepare(DispatchRequest(RELAY, "Get")) for _ in there)], [60] * 2 * self.batch, whole=False
            ),
            {
                QUEUE: counting,
                REQUEST: {("Index Only Scan", "request_pkey")},
                RESULT: {("Index Scan", "result_retention")},
            },
            rows=600,
        )
        assert [isinstance(answer, BacklogFullError) for answer in answers[0]] == [False] * self.batch + [
            True
        ] * self.batch
        # A relay with few jobs: none of the other's is read.
        idle = f"idle-{uuid4()}"
        rows = [prepare(DispatchRequest(idle, "Get")) for _ in there]
        answers = await self.run(
            lambda: self.gate.enqueue_bounded_rows(rows, [1_000_000] * self.batch),
            {QUEUE: {*counting, ("Index Only Scan", "queue_delayed")}},
        )
        assert answers[0] == [True] * self.batch

    async def gateway_round(self) -> None:
        batch, gate = self.batch, self.gate
        rows = [prepare(DispatchRequest(RELAY, "Get")) for _ in range(batch)]
        await self.run(lambda: gate.enqueue_rows(rows), {})
        await self.bounded(rows)
        keyed = prepare(DispatchRequest(RELAY, "Get", idempotency_key=str(uuid4())))
        await self.run(lambda: gate.enqueue_keyed_row(keyed), {})
        await self.run(lambda: gate.enqueue_keyed_row(keyed), {KEY: {("Index Scan", "key_pkey")}})
        await self.run(
            lambda: gate.purge(0, limit=batch),
            {
                RESULT: {("Index Scan", "result_retention"), ("Tid Scan", None)},
                REQUEST: {("Index Scan", "request_pkey"), ("Tid Scan", None)},
                KEY: {("Index Scan", "key_job"), ("Tid Scan", None)},
            },
        )
        await self.run(
            lambda: gate.list_jobs(limit=batch),
            {
                REQUEST: {("Index Scan", "request_pkey")},
                QUEUE: {("Index Scan", "queue_pkey")},
                RESULT: {("Index Scan", "result_pkey")},
            },
        )


@pytest.mark.case("C14")
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__[1:])
async def test_every_hot_statement_reads_the_rows_it_is_about_by_the_index_it_is_meant_to(
    database: TestDatabase, admin: Connection, state: Callable[[Connection], Awaitable[None]]
) -> None:
    """Ten times each on one connection, as prepared statements: by then every plan is the generic one."""
    for table in TENANT_TABLES:
        await admin.execute(f"alter table {table} set (autovacuum_enabled = off)")
    await state(admin)
    async with explained(database, GATEWAY_LOGIN) as gateway, explained(database, WORKER_LOGIN) as worker:
        for batch in (30, 1):
            hot = _Hot(gateway, worker, admin, batch)
            for _ in range(10):
                await hot.round()
                await hot.gateway_round()


async def test_the_listing_of_due_tenants_reads_a_few_rows_a_tenant(database: TestDatabase, admin: Connection) -> None:
    for table in TENANT_TABLES:
        await admin.execute(f"alter table {table} set (autovacuum_enabled = off)")
    await _vacuumed_when_drained_and_small(admin)
    async with explained(database, GATEWAY_LOGIN) as (gateway, plans):
        for sweep in ("expire", "lease", "promote", "purge"):
            for _ in range(7):
                await gateway.fetch("select * from relay.tenants_due($1, $2, '1 day')", sweep, RELAY)
                for statement in plans.take():
                    for node in statement.nodes():
                        if node.relation is not None and node.relation.startswith(_PREFIX):
                            assert node.kind in ("Index Scan", "Index Only Scan"), (sweep, node)
                            assert node.rows_read <= 5, (sweep, node)


@pytest.mark.case("C14")
async def test_a_tenant_with_five_jobs_is_served_in_the_same_plan_beside_one_with_many(
    database: TestDatabase, admin: Connection
) -> None:
    await _fill(admin, 20_000, 20_000)
    for table in TENANT_TABLES:
        await admin.execute(f"analyze {table}")
    async with connected(database.gateway_dsn) as gateway:
        await enqueue(gateway, 25, tenant="small")
    async with explained(database, WORKER_LOGIN) as (worker, plans):
        for number in range(20):
            for tenant in (TENANT, "small"):
                assert len(await claim(worker, 1, tenant=tenant)) == 1, number
                for statement in plans.take():
                    _check(statement, 5)


@pytest.mark.case("C14")
@pytest.mark.invariant("I10")
async def test_with_an_old_snapshot_open_a_claim_with_a_cursor_reads_no_more_than_before(
    database: TestDatabase, admin: Connection
) -> None:
    """Dead rows stay while anybody's old transaction is open: the cursor steps over them, a claim from zero wades.

    So would a search for sweeps in the same call.
    """

    async def blocks(
        worker: Connection, plans: Recorder, after: list[int] | None, sweep_seconds: float | None = None
    ) -> tuple[int, int]:
        plans.take()
        jobs = await claim(worker, 10, after=after, sweep_seconds=sweep_seconds)
        touched = sum(
            statement.blocks
            for statement in plans.take()
            if "for update skip locked" in statement.text or "unnest(v_names)" in statement.text
        )
        done = [Completion(job.job_id, job.fence) for job in jobs]
        await RelayDispatchRepository(worker, TENANT).complete_many(RELAY, done, claimed_by=ME)
        return touched, jobs[-1].seq

    await admin.execute(f"alter table {QUEUE} set (autovacuum_enabled = off)")
    async with (
        connected(database.admin_dsn) as old,
        connected(database.gateway_dsn) as gateway,
        connected(database.worker_dsn) as busy,
        explained(database, WORKER_LOGIN) as (worker, plans),
    ):
        await enqueue(gateway, 100)
        fresh, cursor = await blocks(worker, plans, None)
        async with old.transaction(isolation="repeatable_read"):
            await old.fetchval(f"select count(*) from {QUEUE}")
            for _ in range(12):
                await enqueue(gateway, 1000)
                jobs = await claim(busy, 1000)
                done = [Completion(job.job_id, job.fence) for job in jobs]
                await RelayDispatchRepository(busy, TENANT).complete_many(RELAY, done, claimed_by=ME)
                cursor = jobs[-1].seq
            await enqueue(gateway, 200)
            with_cursor, _ = await blocks(worker, plans, [cursor])
            and_asked_for_sweeps, _ = await blocks(worker, plans, [cursor], 5.0)
            from_zero, _ = await blocks(worker, plans, None)
    assert with_cursor < fresh + 60, (fresh, with_cursor, from_zero)
    assert and_asked_for_sweeps < fresh + 60, (fresh, and_asked_for_sweeps)
    assert from_zero - fresh > 5 * (with_cursor - fresh), (fresh, with_cursor, from_zero)


async def test_rows_are_locked_in_the_order_of_their_job_ids(database: TestDatabase, admin: Connection) -> None:
    """In every plan that waits for locks the rows come, one by one, from a sort by job id."""
    await _vacuumed_when_drained_and_small(admin)
    async with (
        explained(database, GATEWAY_LOGIN) as (gateway, asked),
        explained(database, WORKER_LOGIN) as (worker, told),
    ):
        jobs = await claim(worker, 6)
        told.take()
        work, gate = RelayDispatchRepository(worker, TENANT), RelayDispatchRepository(gateway, TENANT)
        await work.complete_many(RELAY, [Completion(job.job_id, job.fence) for job in jobs[:2]], claimed_by=ME)
        await work.retry(RELAY, [PutBack(job.job_id, job.fence) for job in jobs[2:4]], claimed_by=ME)
        await heartbeat(worker, jobs[4:])
        await admin.execute(f"update {QUEUE} set expires_at = now() where job_id = any ($1)", _ids(jobs[4:]))
        await gate.poll_many(_ids(jobs))
        await gate.mark_expired_many(_ids(jobs))
        locking = [plan for plan in [*told.take(), *asked.take()] if any(n.kind == "LockRows" for n in plan.nodes())]
        assert len(locking) == 5
        wanted = ("Nested Loop", "Sort", "LockRows", "Index Scan")
        for statement in locking:
            order = [node for node in statement.nodes() if node.kind in wanted]
            assert tuple(node.kind for node in order) == wanted, statement.text
            # An id by its place in the array of ids reads as ($5)[i].
            assert re.search(r"job_id|\(\$\d+\)\[", order[1].raw["Sort Key"][0]), statement.text


@pytest.mark.case("C14")
async def test_a_claim_and_a_completion_touch_few_pages_a_job_beside_thousands(
    database: TestDatabase, admin: Connection
) -> None:
    """Whether alone or a hundred at once, and with dead rows in front: what a call costs is what it is about."""
    await admin.execute(f"alter table {QUEUE} set (autovacuum_enabled = off)")
    await _fill(admin, 10_000, 2_000)
    async with explained(database, WORKER_LOGIN) as (worker, plans):
        work = RelayDispatchRepository(worker, TENANT)

        async def pages(batch: int) -> tuple[float, float]:
            plans.take()
            jobs = await claim(worker, batch)
            claiming = max(statement.blocks for statement in plans.take())
            await work.complete_many(RELAY, [Completion(job.job_id, job.fence) for job in jobs], claimed_by=ME)
            return claiming / batch, max(statement.blocks for statement in plans.take()) / batch

        await pages(100)
        found = {batch: await pages(batch) for batch in (1, 10, 100)}
    assert found[1] < (60, 60), found
    assert found[10] < (20, 30), found
    assert found[100] < (15, 20), found


def _ids(jobs: list[DispatchJob]) -> list[UUID]:
    return [job.job_id for job in jobs]


# --- heartbeats are HOT -------------------------------------------------------------------------


async def test_heartbeats_are_heap_only_updates(database: TestDatabase, admin: Connection) -> None:
    """Thousands of them, and none writes to an index: the lease time is in none, and the pages have room."""
    if not database.server.is_ours:
        pytest.skip("old versions stay as long as another database's transaction is under way at every snapshot")
    # An old version goes when its page is pruned, unless a transaction holds it back, in this database or another: here
    # that could only be an autovacuum's.
    assert await admin.fetchval("show autovacuum_naptime") == "24d"
    async with connected(database.gateway_dsn) as gateway, connected(database.worker_dsn) as worker:
        await enqueue(gateway, 4000)
        jobs: list[DispatchJob] = []
        while len(jobs) < 2000:
            jobs += await claim(worker, 200)

        async def updates() -> tuple[int, int]:
            await worker.execute("select pg_stat_force_next_flush()")
            await worker.execute("select 1")
            await admin.execute("select pg_stat_clear_snapshot()")
            query = "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = $1::text::regclass"
            ((all_of_them, hot),) = await admin.fetch(query, QUEUE)
            return all_of_them, hot

        async def hot_share(batch: int, rounds: int) -> float:
            before = await updates()
            for _ in range(rounds):
                for start in range(0, len(jobs), batch):
                    assert set(await heartbeat(worker, jobs[start : start + batch])) == {"applied"}
            after = await updates()
            assert after[0] - before[0] == rounds * len(jobs)
            return (after[1] - before[1]) / (rounds * len(jobs))

        # Rows of one page that are renewed in one transaction must all find room in it beside their old versions.
        assert await hot_share(batch=10, rounds=2) > 0.999
        assert await hot_share(batch=200, rounds=4) > 0.95


def test_the_rules_for_plans_catch_what_they_are_for() -> None:
    """A rule that nothing breaks proves nothing."""

    def plan(**node: Any) -> Explained:
        return Explained("select", {"Actual Rows": 1, "Actual Loops": 1, **node})

    table = _PREFIX + "queue"
    fine = {"Relation Name": table, "Node Type": "Index Scan", "Index Name": table + "_pkey"}
    _check(plan(**fine, **{"Index Cond": "((tenant_id = $1) AND (job_id = u.job_id))"}), 5)
    bad: list[dict[str, Any]] = [
        {**fine, "Index Cond": "(tenant_id = $1)"},
        {"Relation Name": table, "Node Type": "Seq Scan"},
        {**fine, "Index Cond": "((tenant_id = $1) AND (job_id = $2))", "Rows Removed by Filter": 5},
        {**fine, "Index Cond": "((tenant_id = $1) AND (job_id = $2))", "Actual Loops": 6},
    ]
    for node in bad:
        with pytest.raises(AssertionError):
            _check(plan(**node), 5)
    assert Node("Tid Scan", table, None, "", 0, 0, {}).rows_read == 0
