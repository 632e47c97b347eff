"""Hypothesis plays the durable room: holders, people and a reaper in any order, against a model in plain Python.

After every step each row of the tenant is what the model says, counters and timeline included. Every lease that was
ever granted stays in the game, so most of what holders say is said late or twice. A lease runs out because the owner
moves its row's time; nothing sleeps. Now and then a handler's transaction stays open over several steps.

`--long` plays more and longer games, other ones each time (or those of `--seed`); a failure prints its shortest game.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from uuid import NAMESPACE_OID, UUID, uuid4, uuid5

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, invariant, multiple, precondition, rule

from dispatch_core.durable import ChunkOutcome, ChunkSpec, DurableJobStore, DurableRepository, JobLease, RowError
from dispatch_core.errors import JobClosedError, LeaseLostError
from tests.support.databases import TestDatabase
from tests.support.durable import CHUNK, EVENT, JOB, ROW_ERROR
from tests.support.durable_model import CHUNK_STATES, ENDS, JOB_STATES, LOST, Fence, Model
from tests.support.games import GameStage, StagedGame, play
from tests.support.protocol import logins

pytestmark = [
    pytest.mark.invariant("I3"),
    pytest.mark.invariant("I4"),
    *(pytest.mark.case(case) for case in ("C15", "C18", "C24", "C46")),
]

T = TypeVar("T")

HOLDERS = st.sampled_from(("relay:1", "relay:2"))
LONG = 8e4
"""Seconds in which nothing runs out by itself."""
TURNS = st.integers(0, 3)
ROWS = st.none() | st.integers(0, 9)
JOBS: Any = {
    "idempotent": st.sampled_from((True, True, False)),
    "max_attempts": st.integers(1, 3),
    "priority": st.integers(0, 1),
    "sealed": st.booleans(),
}
SEQS = st.integers(1, 4)
COMMON = (
    "cancel: applied", "pause: applied", "claim of one chunk: False", "claim of one chunk: True", "fail: None",
    "complete: ('applied', True)", "complete: S2041", "fail: retry", "heartbeat: busy", "heartbeat: stale",
    "lost job ended: True", "reap: failed", "reap: retry", "reap: needs_review", "release: ('stale', None)",
)  # fmt: skip
"""What comes up in any games that are long enough; a run prints how often each thing did."""
COUNTERS = (*(f"chunks_{name}" for name in ("total", *CHUNK_STATES)), "rows_total", "rows_done", "rows_failed")


class Stage(GameStage):
    """One database and its connections; each game has a tenant of its own."""

    async def open(self) -> None:
        self.admin = await self.connect(self._database.admin_dsn)
        self.decider = await self.connect(self._database.gateway_dsn)
        self.people = DurableRepository(self.decider)
        self.workers = [DurableRepository(await self.connect(self._database.worker_dsn)) for _ in range(2)]
        # A handler's transaction tells an event of its own, which a worker's login alone may not.
        made = await self._stack.enter_async_context(logins(self._database))
        name = await made.create()
        await made.bind(name, "gateway", None)
        await made.bind(name, "worker", None)
        self.handler = await self.connect(self._database.dsn(name))
        self.store_connection = await self.connect(self._database.worker_dsn)
        await self.admin.execute("create table public.written (tenant text, value text)")
        await self.admin.execute("grant insert on public.written to public")
        # A cancellation that finds a chunk locked need not be waited for a second here.
        await self.admin.execute(
            "alter function relay.durable_sweep_chunks(text, uuid, text[], text, text, bigint[], text, bigint, bigint)"
            " set lock_timeout = '10ms'"
        )


class Game(StagedGame[Stage]):
    """One tenant's life. Rules are verbs; `self.model` knows what each has to answer."""

    jobs: Bundle[UUID] = Bundle("jobs")
    leases: Bundle[JobLease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.tenant = f"t{self.stage.games}"
        self.model = Model()
        self.cursors: dict[UUID, str | None] = {}
        self.read: dict[UUID, list[tuple[str, int | None]]] = {}
        self.open: Any = None
        self.by_hand = False
        self.last = False
        self.held_lease: JobLease | None = None
        self.granted: list[JobLease] = []

    @initialize(target=jobs, by_hand=st.sampled_from((False, False, True)), chunks=st.integers(1, 3), **JOBS)
    def first_job(self, by_hand: bool, chunks: int, sealed: bool, **options: Any) -> UUID:
        """Statuses are set by hand in one game of three: there, some of what else holds after each step does not."""
        self.by_hand = by_hand
        return self.submitted(chunks, sealed, **options)

    @initialize(target=jobs, chunks=st.integers(1, 2), **JOBS)
    def second_job(self, chunks: int, sealed: bool, **options: Any) -> UUID:
        return self.submitted(chunks, sealed, **options)

    # --- submit -------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.jobs) < 4)
    @rule(target=jobs, chunks=st.integers(0, 3), **JOBS)
    def submit(self, chunks: int, sealed: bool, **options: Any) -> UUID:
        return self.submitted(chunks, sealed, **options)

    def submitted(self, chunks: int, sealed: bool, **options: Any) -> UUID:
        # The same in every game, whose tenants are to know nothing of each other; and in no order.
        job_id = uuid5(NAMESPACE_OID, str(len(self.model.jobs)))
        people = self.stage.people
        specs = [ChunkSpec(n, rows=2) for n in range(chunks)]

        async def bit_by_bit() -> str:
            assert await people.insert_job(self.tenant, job_id, "import", **options, submitting=True)
            stored = [await people.insert_chunks(self.tenant, job_id, specs, from_seq=1) for _ in range(2)]
            assert stored == [chunks, 0]
            assert await people.jobs(self.tenant, [job_id]) == []
            said = [await people.seal(self.tenant, job_id, chunks=chunks) for _ in range(2)]
            assert said[0] is said[1]
            return said[0]

        async def at_once() -> str:
            stored = [await people.insert_job(self.tenant, job_id, "import", **options) for _ in range(2)]
            assert stored == [True, False]
            assert await people.insert_chunks(self.tenant, job_id, specs, from_seq=1) == chunks
            return "queued"

        said = self.run(bit_by_bit() if sealed else at_once())
        assert said == self.model.submit(job_id, chunks, 2, sealed=sealed, **options)
        self.cursors[job_id] = None
        self.read[job_id] = []
        return job_id

    @rule(job_id=jobs, start=SEQS)
    def add_a_chunk(self, job_id: UUID, start: int) -> None:
        call = self.stage.people.insert_chunks(self.tenant, job_id, [ChunkSpec(0, rows=2)], from_seq=start)
        said = self.answer(call)
        assert said == self.model.add(job_id, start, 1, 2)

    # --- claim --------------------------------------------------------------------------------------

    @rule(target=leases, limit=st.integers(1, 3), by=HOLDERS, worker=st.integers(0, 1))
    def claim(self, limit: int, by: str, worker: int) -> Any:
        token = uuid4()
        call = self.stage.workers[worker].claim([self.tenant], ["import"], limit=limit, holder=by, **_new(token))
        return self.claimed(self.run(call).chunks, self.model.claim(limit, token), "all jobs")

    @rule(target=leases, job_id=jobs, limit=st.integers(1, 2), by=HOLDERS, worker=st.integers(0, 1))
    def claim_next(self, job_id: UUID, limit: int, by: str, worker: int) -> Any:
        token = uuid4()
        call = self.stage.workers[worker].claim_next(self.tenant, job_id, limit=limit, holder=by, **_new(token))
        return self.claimed(self.run(call).chunks, self.model.claim(limit, token, job_id), "one job")

    @rule(target=leases, job_id=jobs, seq=SEQS, by=HOLDERS, late=st.sampled_from((0, 0, 0, 1)))
    def claim_chunk(self, job_id: UUID, seq: int, by: str, late: int) -> Any:
        chunk = self.model.chunk(job_id, seq)
        if chunk is None or self.model.locked(job_id, seq):
            return multiple()
        token = uuid4()
        version = chunk.version - late
        call = self.stage.workers[0].claim_chunk(self.tenant, job_id, seq, version, holder=by, **_new(token))
        return self.claimed(self.run(call).chunks, self.model.claim_chunk(job_id, seq, version, token), "one chunk")

    def claimed(self, taken: Sequence[Any], expected: list[tuple[UUID, int, int]], how: str) -> Any:
        self.saw(f"claim of {how}", bool(taken))
        leases = [chunk.lease for chunk in taken]
        assert [(one.lease.job_id, one.lease.seq, one.attempt) for one in taken] == expected
        for one in leases:
            chunk = self.model.chunk(one.job_id, one.seq)
            assert chunk is not None
            assert (chunk.token, chunk.version) == (one.token, one.version)
        if taken:
            worker = self.stage.workers[1]
            call = worker.claim_again([self.tenant], leases[0].token, holder="relay:1", local_deadline=0)
            again = {fence(chunk.lease) for chunk in self.run(call).chunks}
            assert again == set(map(fence, leases)), "if the reply was lost"
        self.granted += leases
        return multiple(*leases)

    # --- holders ------------------------------------------------------------------------------------

    @rule(lease=leases, turn=TURNS, rows_done=ROWS, wrong=st.booleans())
    def heartbeat(self, lease: JobLease, turn: int, rows_done: int | None, wrong: bool) -> None:
        lease = self.pick(lease, turn)
        some = [replace(lease, token=uuid4()), lease] if wrong else [lease]
        given = None if rows_done is None else [rows_done] * len(some)
        beats = self.run(self.stage.workers[0].heartbeat(some, lease_seconds=LONG, rows_done=given))
        expected = [self.model.heartbeat(fence(item), rows_done) for item in some]
        assert [beat.outcome for beat in beats] == expected
        self.saw("heartbeat", expected[-1])
        if expected[-1] == "applied":
            assert beats[-1].job_status == self.model.jobs[lease.job_id].status, "so its holder learns of a pause"

    @rule(lease=leases, turn=TURNS, value=st.integers(0, 9), rows_done=ROWS, renew=st.sampled_from((None, LONG)))
    def checkpoint(self, lease: JobLease, turn: int, value: int, rows_done: int | None, renew: float | None) -> None:
        lease = self.pick(lease, turn)
        if not self.locked(lease):
            worker = self.stage.workers[1]
            said = self.answer(worker.checkpoint(lease, value, rows_done=rows_done, renew_seconds=renew))
            assert said == self.model.checkpoint(fence(lease), value, rows_done)
            self.saw("checkpoint", said)

    @rule(lease=leases, turn=TURNS, value=st.integers(0, 9), rows_done=ROWS, rows_failed=ROWS)
    def complete(self, lease: JobLease, turn: int, value: int, rows_done: int | None, rows_failed: int | None) -> None:
        lease = self.pick(lease, turn)
        if not self.locked(lease):
            outcome = ChunkOutcome(value, rows_done, rows_failed)
            said = self.answer(self.stage.workers[0].complete(lease, outcome))
            expected = self.model.complete(fence(lease), value, rows_done, rows_failed)
            assert (said if said == LOST else (said.outcome, said.last)) == expected
            self.saw("complete", expected)

    @rule(some=st.lists(leases, min_size=1, max_size=4), turn=TURNS)
    def complete_many(self, some: list[JobLease], turn: int) -> None:
        some = [self.pick(some[0], turn), *some]
        if not any(map(self.locked, some)):
            settled = self.run(self.stage.workers[1].complete_many(some, [ChunkOutcome(8)] * len(some)))
            expected = [self.model.complete(fence(lease), 8, None, None) for lease in some]
            assert [one.outcome for one in settled] == ["stale" if one == LOST else one[0] for one in expected]

    @rule(lease=leases, turn=TURNS, row=st.integers(1, 3))
    def tell_of_a_bad_row(self, lease: JobLease, turn: int, row: int) -> None:
        lease = self.pick(lease, turn)
        if not self.locked(lease):
            said = self.answer(self.stage.workers[0].row_errors_add(lease, [RowError(row, "c", "m")]))
            assert said == (1 if self.model.has_lease(fence(lease)) else LOST)
            if said == 1:
                self.model.bad_rows.add((lease.job_id, lease.seq, row))

    @rule(lease=leases, turn=TURNS, retryable=st.sampled_from((True, True, False)), later=st.booleans())
    def fail(self, lease: JobLease, turn: int, retryable: bool, later: bool) -> None:
        lease = self.pick(lease, turn)
        if not self.locked(lease):
            delay = LONG if later else None
            call = self.stage.workers[0].fail(lease, "boom", retryable=retryable, delay_seconds=delay)
            status, _ = self.run(call)
            assert status == self.model.fail(fence(lease), retryable=retryable, later=later)
            self.saw("fail", status)

    @rule(lease=leases, turn=TURNS, to=st.sampled_from(("pending", "retry")), twice=st.booleans())
    def release(self, lease: JobLease, turn: int, to: str, twice: bool) -> None:
        lease = self.pick(lease, turn)
        if not self.locked(lease):
            for _ in range(1 + twice):
                (said,) = self.run(self.stage.workers[1].release([lease], to))
                assert said == self.model.release(fence(lease), to)
                self.saw("release", said)

    @precondition(lambda self: self.model.held is None)
    @rule(lease=leases, turn=TURNS, value=st.integers(0, 9), done=st.booleans(), rows=ROWS)
    def begin_a_handlers_transaction(
        self, lease: JobLease, turn: int, value: int, done: bool, rows: int | None
    ) -> None:
        """It writes a row of its own, an event, and a checkpoint or the completion, and stays open."""
        lease = self.pick(lease, turn)
        if not self.model.has_lease(fence(lease)):
            return
        conn = self.stage.handler
        store = self.store()

        async def begin() -> Any:
            self.open = conn.transaction()
            await self.open.start()
            await conn.execute("insert into public.written values ($1, $2)", self.tenant, str(value))
            note = "select relay.durable_record_event($1, $2, $3, 'note', null, null, null, null)"
            assert await conn.fetchval(note, self.tenant, lease.job_id, lease.seq)
            if done:
                return await store.complete_chunk(lease, ChunkOutcome(value, rows), conn=conn)
            return await store.checkpoint(lease, value, rows_done=rows, conn=conn)

        settled = self.run(begin())
        self.held_lease = lease
        if done:
            self.settled(settled, lease)
        after = {"status": "done", "outcome": value} if done else {"checkpoint": value}
        self.model.hold(fence(lease), {**after, "rows_done": rows}, [str(value)])

    @precondition(lambda self: self.model.held is not None)
    @rule(action=st.sampled_from(("cancel", "pause", "resume")))
    def decide_about_the_handlers_job(self, action: str) -> None:
        assert self.held_lease is not None
        self.control(self.held_lease.job_id, action)

    @precondition(lambda self: self.model.held is not None)
    @rule(how=st.sampled_from(("commit", "rollback", "complete")))
    def end_the_handlers_transaction(self, how: str) -> None:
        held, lease = self.model.held, self.held_lease
        assert held is not None
        assert lease is not None
        cancelled = self.model.jobs[lease.job_id].status == "cancelled"
        if how == "complete" and "status" not in held.after:
            said = self.answer(self.store().complete_chunk(lease, ChunkOutcome(7), conn=self.stage.handler))
            if cancelled:
                assert said == LOST, "it cannot commit"
                how = "rollback"
            else:
                self.settled(said, lease)
                held.after.update(status="done", outcome=7)
        commits = how != "rollback"
        self.run(self.open.commit() if commits else self.open.rollback())
        self.open = None
        if commits:
            self.model.jobs[lease.job_id].told.append(("note", lease.seq))
        self.model.let_go(commit=commits)
        done = commits and held.after.get("status") == "done"
        self.saw("handler's transaction", (how, "cancelled meanwhile" if cancelled else "done" if done else "open"))
        # Whoever was told that it may be the last calls this after his commit.
        if done and self.last:
            self.finish(lease.job_id)

    def settled(self, said: Any, lease: JobLease) -> None:
        self.last = said.last
        assert (said.outcome, said.last) == ("applied", not self.model.jobs[lease.job_id].has_open(running=False))

    def store(self) -> DurableJobStore:
        """One that has no connection for itself but the first worker's, as a handler's context has."""
        return DurableJobStore(self.stage.store_connection, self.tenant)

    # --- time, reaper, ends ---------------------------------------------------------------------------

    @rule(lease=leases, turn=TURNS)
    def let_a_lease_run_out(self, lease: JobLease, turn: int) -> None:
        lease = self.pick(lease, turn)
        chunk = self.model.chunk(lease.job_id, lease.seq)
        assert chunk is not None
        if chunk.status == "running" and not self.locked(lease):
            self.move(f"update {CHUNK} set lease_expires_at = now() - interval '1 s'", lease.job_id, lease.seq)
            chunk.expired = True

    @rule(job_id=jobs)
    def let_retries_be_due(self, job_id: UUID) -> None:
        for seq, chunk in self.model.jobs[job_id].chunks.items():
            if chunk.due == "later":
                self.move(f"update {CHUNK} set available_at = now() - interval '1 s'", job_id, seq)
                chunk.due = "now"

    @rule(limit=st.integers(1, 3))
    def reap(self, limit: int) -> None:
        reaped = self.run(self.stage.people.reap(self.tenant, "reaper", limit=limit))
        assert [(one.job_id, one.seq, one.status) for one in reaped] == self.model.reap(limit)
        for one in reaped:
            self.saw("reap", one.status)

    @rule(job_id=jobs)
    def finish(self, job_id: UUID) -> None:
        ((_, *said),) = self.run(self.stage.workers[0].finish(self.tenant, [job_id]))
        assert tuple(said) == self.model.finish(job_id)
        self.saw("finish", tuple(said))

    @precondition(lambda self: any(not job.has_open() for job in self.model.jobs.values()))
    @rule()
    def finish_what_nobody_has_ended(self) -> None:
        query = "select job_id from relay.durable_finish_lost($1, 9)"
        rows = self.run(self.stage.store_connection.fetch(query, self.tenant))
        expected = self.model.finish_lost()
        assert {row["job_id"] for row in rows} == expected
        self.saw("lost job ended", bool(expected))

    @rule(job_id=jobs, tampered=st.booleans())
    def refresh_counters(self, job_id: UUID, tampered: bool) -> None:
        if tampered:
            self.move(f"update {JOB} set chunks_done = 77, rows_done = -5, chunks_running = 3", job_id)
        chunks = self.run(DurableJobStore(self.stage.decider, self.tenant).refresh_counters(job_id))
        assert [chunk.seq for chunk in chunks] == sorted(self.model.jobs[job_id].chunks)
        self.model.jobs[job_id].recount()

    # --- people -------------------------------------------------------------------------------------

    @rule(job_id=jobs, action=st.sampled_from(("pause", "resume", "resume", "cancel", "retry_failed")))
    def control(self, job_id: UUID, action: str) -> None:
        said = self.run(self.stage.people.control(self.tenant, job_id, action, actor="bob"))
        expected = self.model.control(job_id, action)
        assert (said.outcome, said.was, said.status, said.chunks, said.running) == expected
        self.saw(action, said.outcome)

    @rule(job_id=jobs, seq=SEQS, turn=TURNS, decision=st.sampled_from(("retry", "done", "failed")))
    def resolve(self, job_id: UUID, seq: int, turn: int, decision: str) -> None:
        waiting = [s for s, c in self.model.jobs[job_id].chunks.items() if c.status == "needs_review"]
        seq = waiting[0] if waiting and turn else seq
        if not self.model.locked(job_id, seq):
            said = self.run(self.stage.people.resolve(self.tenant, job_id, seq, decision, actor="bob"))
            expected = self.model.resolve(job_id, seq, decision)
            if expected[0] == "unknown":
                assert said.outcome == "unknown"
            else:
                assert (said.outcome, said.chunk_status, said.status) == expected
            self.saw(f"resolve {decision}", said.outcome)

    @precondition(lambda self: self.by_hand)
    @rule(
        job_id=jobs,
        seqs=st.lists(SEQS, max_size=2),
        given=st.lists(st.sampled_from(CHUNK_STATES), min_size=1, max_size=3),
        to=st.sampled_from([state for state in CHUNK_STATES if state != "running"]),
    )
    def set_chunk_statuses(self, job_id: UUID, seqs: list[int], given: list[str], to: str) -> None:
        if not any(self.model.locked(job_id, seq) for seq in seqs):
            count = self.run(self.stage.people.set_chunk_statuses(self.tenant, job_id, given, to, seqs=seqs))
            assert count == self.model.set_chunk_statuses(job_id, seqs, given, to)

    @precondition(lambda self: self.by_hand)
    @rule(
        job_id=jobs,
        given=st.lists(st.sampled_from(JOB_STATES), min_size=1, max_size=4),
        to=st.sampled_from(JOB_STATES),
    )
    def set_job_status(self, job_id: UUID, given: list[str], to: str) -> None:
        note = {"type": "note"}
        won = self.run(self.stage.people.set_job_status(self.tenant, job_id, given, to, event=note))
        assert won == self.model.set_job_status(job_id, given, to)

    # --- what holds after every step ------------------------------------------------------------------

    @invariant()
    def every_chunk_is_as_the_model_says(self) -> None:
        rows = self.run(self.stage.admin.fetch(_CHUNKS, self.tenant))
        stored = {(row["job_id"], row["seq"]): tuple(row)[2:] for row in rows}
        expected = {
            (job_id, seq): (
                c.status, c.attempts, c.version, c.token, c.expired, c.due, _json(c.checkpoint), _json(c.outcome),
                c.rows_total, c.rows_done, c.rows_failed,
            )
            for job_id, job in self.model.jobs.items()
            for seq, c in job.chunks.items()
        }  # fmt: skip
        assert stored == expected

    @invariant()
    def every_job_and_its_counters_are_as_the_model_says(self) -> None:
        rows = self.run(self.stage.admin.fetch(f"select * from {JOB} where tenant_id = $1", self.tenant))
        assert len(rows) == len(self.model.jobs)
        for row in rows:
            job = self.model.jobs[row["job_id"]]
            assert (row["status"], row["started_at"] is not None) == (job.status, job.started)
            assert (row["ended_at"] is not None) == (job.status in ENDS)
            assert _counters(row) == job.counted

    @invariant()
    def what_is_shown_of_a_job_is_the_sum_of_its_chunks_where_it_has_ended_or_was_asked_for(self) -> None:
        for fresh in (False, True):
            for shown in self.run(self.stage.people.jobs(self.tenant, list(self.model.jobs), fresh=fresh)):
                job = self.model.jobs[shown.job_id]
                if fresh > (job.status in ENDS) or (job.status in ENDS and not job.tampered):
                    counted = {str(status): n for status, n in shown.chunks.items()}
                    rows = {name: getattr(shown, name) for name in ("rows_total", "rows_done", "rows_failed")}
                    assert {**counted, **rows, "total": shown.chunks_total} == job.count()

    @invariant()
    def each_event_is_told_once(self) -> None:
        query = f"select job_id, type, seq from {EVENT} where tenant_id = $1 order by xid, n"
        rows = self.run(self.stage.admin.fetch(query, self.tenant))
        for job_id, job in self.model.jobs.items():
            told = [(row["type"], row["seq"]) for row in rows if row["job_id"] == job_id]
            assert Counter(told) == Counter(job.told)
            # A note may stand before what was told while its transaction was open.
            assert [one for one in told if one[0] != "note"] == [one for one in job.told if one[0] != "note"]

    @invariant()
    def what_handlers_have_written_is_there_with_what_was_accepted_and_not_without(self) -> None:
        rows = self.run(self.stage.admin.fetch("select value from public.written where tenant = $1", self.tenant))
        assert Counter(row["value"] for row in rows) == Counter(self.model.written)
        query = f"select job_id, seq, row_no from {ROW_ERROR} where tenant_id = $1"
        assert set(map(tuple, self.run(self.stage.admin.fetch(query, self.tenant)))) == self.model.bad_rows

    @rule(job_id=jobs, limit=st.integers(1, 3))
    def read_on(self, job_id: UUID, limit: int) -> None:
        page = self.run(self.stage.people.events(self.tenant, job_id, after=self.cursors[job_id], limit=limit))
        self.cursors[job_id] = page.next
        self.read[job_id] += [(event.type, event.seq) for event in page.events]

    def teardown(self) -> None:
        if self.open is not None:
            self.run(self.open.rollback())
        for job_id, job in self.model.jobs.items():
            more = True
            while more:
                before = len(self.read[job_id])
                # A page may be empty because it is the rest of what an earlier one had begun; so once more.
                within = ";" in (self.cursors[job_id] or "")
                self.read_on(job_id, 3)
                more = within or len(self.read[job_id]) > before
            assert Counter(self.read[job_id]) == Counter(job.told), "who reads on has seen each event once"

    # --- tools --------------------------------------------------------------------------------------

    def pick(self, lease: JobLease, turn: int) -> JobLease:
        """Return this lease, or mostly one that a chunk runs under, where there is any."""
        good = [one for one in self.granted if self.model.runs_under(fence(one))]
        return good[turn % len(good)] if good and turn else lease

    def saw(self, verb: str, outcome: object) -> None:
        super().saw(verb, _plain(outcome))

    def locked(self, lease: JobLease) -> bool:
        """Say whether whoever waits for its row would wait for the handler's open transaction."""
        return self.model.locked(lease.job_id, lease.seq)

    def answer(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return what a verb says, and of what it may raise the SQLSTATE."""

        async def said() -> Any:
            try:
                return await call
            except LeaseLostError:
                return LOST
            except JobClosedError:
                return "S2042"

        return self.run(said())

    def move(self, update: str, job_id: UUID, seq: int | None = None) -> None:
        where = " where tenant_id = $1 and job_id = $2"
        if seq is None:
            self.run(self.stage.admin.execute(update + where, self.tenant, job_id))
        else:
            self.run(self.stage.admin.execute(update + where + " and seq = $3", self.tenant, job_id, seq))


_CHUNKS = f"""
    select job_id, seq, status, attempts, lease_version, lease_token, coalesce(lease_expires_at <= now(), false),
           case when available_at <= now() then 'now' when available_at > now() then 'later' end, checkpoint::text,
           outcome::text, rows_total, rows_done, rows_failed
    from {CHUNK} where tenant_id = $1
"""


def fence(lease: JobLease) -> Fence:
    """Return what of a lease is looked at."""
    return lease.job_id, lease.seq, lease.token, lease.version


def _new(token: UUID) -> Any:
    return {"token": token, "lease_seconds": LONG}


def _plain(outcome: object) -> object:
    """Return it without the names of enums."""
    if isinstance(outcome, tuple):
        return tuple(map(_plain, outcome))
    return str(outcome) if isinstance(outcome, str) else outcome


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _counters(row: Any) -> dict[str, int]:
    return {name.removeprefix("chunks_"): row[name] for name in COUNTERS}


@pytest.mark.timeout(1200)
def test_holders_people_and_a_reaper_in_any_order_do_what_the_model_says(
    database: TestDatabase, is_long: bool, seed: int
) -> None:
    play(
        Game,
        lambda runner: Stage(runner, database),
        seed,
        games=600 if is_long else 30,
        steps=80 if is_long else 45,
        common=COMMON if is_long else (),
    )
