"""Hypothesis plays the dispatch room: gateways, holders and sweeps in any order, against a model in plain Python.

After every step each row of the game's two tenants is what the model says, and so is what polls and lists show. Every
claim that was ever granted stays in the game, so most of what holders say is said late, twice, or in another's name.
Deadlines, delays and leases run out because the owner moves a row's time; nothing sleeps. Now and then somebody has a
row locked over several steps.

`--long` plays more and longer games, other ones each time (or those of `--seed`); a failure prints its shortest game.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Literal, TypeVar
from uuid import NAMESPACE_OID, UUID, uuid5

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, invariant, multiple, precondition, rule

from dispatch_core.dispatch import EnqueueRow, RelayDispatchRepository, prepare
from dispatch_core.errors import BacklogFullError, IdempotencyConflictError, TenancyUnboundError
from dispatch_core.models import Completion, DispatchRequest, DispatchResult, PutBack
from tests.support.databases import TestDatabase
from tests.support.dispatch_model import Grant, Job, Model, Name
from tests.support.games import GameStage, StagedGame, play
from tests.support.protocol import KEY, QUEUE, REQUEST, RESULT

pytestmark = [
    *(pytest.mark.invariant(one) for one in ("I1", "I2", "I3", "I4", "I5", "I8")),
    *(pytest.mark.case(case) for case in ("C12", "C15", "C18", "C25", "C40", "C43")),
]

T = TypeVar("T")
Wrong = Literal["", "tenant", "relay", "fence", "holder"]

RELAYS = ("erp", "crm")
HOLDERS = st.sampled_from(("one", "two"))
TENANTS = st.integers(0, 1)
LONG, TOO_LONG = 8e4, 4e5
"""Seconds in which nothing runs out by itself, and a delay past every deadline."""
TTL = 3e5
BODIES = st.sampled_from((b"", b"1", b"22"))
TURNS = st.integers(0, 3)
WRONG: st.SearchStrategy[Wrong] = st.sampled_from(("", "", "", "", "", "tenant", "relay", "fence", "holder"))
NEW: Any = {
    "relay": st.sampled_from((*RELAYS[:1], *RELAYS)),
    "body": BODIES,
    "max_attempts": st.integers(1, 3),
    "delayed": st.sampled_from((False, False, True)),
}
COMMON = (
    "enqueue again: new", "enqueue again: known", "enqueue keyed: conflict", "enqueue keyed: duplicate",
    "enqueue keyed: new", "claim: some", "claim: none", "claim: expired", "claim: malformed", "claim: delayed",
    "heartbeat: applied", "heartbeat: busy", "heartbeat: stale", "complete: applied succeeded",
    "complete: applied failed", "complete: repeated succeeded", "complete: repeated failed", "complete: stale None",
    "complete: stale expired", "complete: stale failed", "retry: applied pending", "retry: applied failed",
    "retry: applied expired", "retry: stale None", "release: applied pending", "release: applied failed",
    "withdraw: 0 False", "withdraw: 1 False", "withdraw: 1 True", "reclaim: pending", "reclaim: failed",
    "reclaim: expired", "sweep: some", "purge: 1", "fetch body: True", "fetch body: False",
)  # fmt: skip
"""What comes up in games that are long enough; a run prints how often each thing did."""


class Stage(GameStage):
    """One database and its connections; each game has tenants of its own."""

    async def open(self) -> None:
        self.admin = await self.connect(self._database.admin_dsn)
        self.locker = await self.connect(self._database.admin_dsn)
        self.gateway = await self.connect(self._database.gateway_dsn)
        self.worker = await self.connect(self._database.worker_dsn)


class Game(StagedGame[Stage]):
    """Two tenants' life. Rules are verbs; `self.model` knows what each has to answer."""

    names: Bundle[Name] = Bundle("names")
    grants: Bundle[Grant] = Bundle("grants")
    keyed: Bundle[tuple[str, int, EnqueueRow]] = Bundle("keyed")

    def __init__(self) -> None:
        super().__init__()
        self.tenants = [f"{letter}{self.stage.games}" for letter in "ab"]
        self.model = Model()
        self.rows: dict[Name, EnqueueRow] = {}
        self.seqs: dict[Name, int] = {}
        self.granted: list[Grant] = []
        self.claims = 0
        self.numbers: Counter[str] = Counter()
        self.locking: Any = None

    @initialize(target=names, count=st.integers(2, 4), **NEW)
    def first_jobs(self, count: int, **options: Any) -> Any:
        return self.enqueued(0, count, **options)

    @initialize(target=names, tenant=TENANTS, count=st.integers(1, 3), **NEW)
    def more_jobs(self, tenant: int, count: int, **options: Any) -> Any:
        return self.enqueued(tenant, count, **options)

    @initialize(target=names, tenant=TENANTS, **NEW)
    def first_keyed_job(self, tenant: int, **options: Any) -> Any:
        return self.enqueued_keyed(tenant, "k1", **options)

    @initialize(target=names, tenant=TENANTS, **NEW)
    def first_late_job(self, tenant: int, **options: Any) -> Any:
        (name,) = self.enqueued(tenant, 1, **options).values
        self.let_be_late(name)
        return name

    # --- gateways -------------------------------------------------------------------------------------

    @rule(target=names, tenant=TENANTS, count=st.integers(1, 3), **NEW)
    def enqueue(self, tenant: int, count: int, **options: Any) -> Any:
        return self.enqueued(tenant, count, **options)

    def enqueued(self, tenant: int, count: int, *given: Any, **options: Any) -> Any:
        rows = [self.new_row(self.tenants[tenant], *given, **options) for _ in range(count)]
        assert self.store(self.tenants[tenant], rows) == [True] * count
        return multiple(*((self.tenants[tenant], number) for number, _ in rows))

    def new_row(self, tenant: str, relay: str, body: bytes, max_attempts: int, delayed: bool) -> tuple[int, EnqueueRow]:
        self.numbers[tenant] += 1
        row = prepare(
            DispatchRequest(
                relay, "Get", body=body, ttl=TTL, delay=LONG if delayed else None, max_attempts=max_attempts
            )
        )
        row.job_id = job_id(self.numbers[tenant])
        self.rows[tenant, self.numbers[tenant]] = row
        return self.numbers[tenant], row

    def store(self, tenant: str, rows: list[tuple[int, EnqueueRow]]) -> list[bool]:
        fresh = self.run(self.gateway(tenant).enqueue_rows([row for _, row in rows]))
        self.seqs |= self.stored_seqs(tenant)
        expected = self.model.enqueue(tenant, ((n, self.modelled(tenant, n, row)) for n, row in rows))
        assert fresh == expected
        return fresh

    def stored_seqs(self, tenant: str) -> dict[Name, int]:
        query = f"select job_id, seq from {QUEUE} where tenant_id = $1"
        return {(tenant, number_of(row[0])): row[1] for row in self.run(self.stage.admin.fetch(query, tenant))}

    def modelled(self, tenant: str, number: int, row: EnqueueRow) -> Job:
        state: Literal["ready", "delayed"] = "ready" if row.delay is None else "delayed"
        return Job(
            row.relay_id, row.body, row.max_attempts, self.seqs.get((tenant, number), 0), state, row.idempotency_key
        )

    @rule(target=names, name=names)
    def enqueue_again(self, name: Name) -> Any:
        """As after a lost reply: nothing changes. Where the job is purged by now, it is a new one."""
        row = self.rows[name]
        if row.idempotency_key is not None:
            return self.stored_by_key(*name, row)
        (fresh,) = self.store(name[0], [(name[1], row)])
        self.saw("enqueue again", "new" if fresh else "known")
        return multiple()

    @rule(
        target=names,
        tenant=TENANTS,
        bounds=st.lists(st.tuples(st.sampled_from(RELAYS), st.integers(0, 8)), min_size=1, max_size=5),
        whole=st.booleans(),
        delayed=st.booleans(),
    )
    def enqueue_bounded(self, tenant: int, bounds: list[tuple[str, int]], whole: bool, delayed: bool) -> Any:
        name = self.tenants[tenant]
        rows = [self.new_row(name, relay, b"bounded", 1, delayed) for relay, _ in bounds]
        told = self.run(
            self.gateway(name).enqueue_bounded_rows(
                [row for _, row in rows], [bound for _, bound in bounds], whole=whole
            )
        )
        self.seqs |= self.stored_seqs(name)
        expected = self.model.enqueue_bounded(
            name, [(n, self.modelled(name, n, row), bounds[i][1]) for i, (n, row) in enumerate(rows)], whole
        )
        assert [isinstance(answer, BacklogFullError) for answer in told.answers] == expected
        self.saw("enqueue bounded", "all" if not any(expected) else "none" if all(expected) or whole else "some")
        return multiple(*((name, number) for number, _ in rows if (name, number) in self.model.jobs))

    @rule(target=names, tenant=TENANTS, key=st.sampled_from(("k1", "k2")), **NEW)
    def enqueue_keyed(self, tenant: int, key: str, **options: Any) -> Any:
        return self.enqueued_keyed(tenant, key, **options)

    def enqueued_keyed(self, tenant: int, key: str, **options: Any) -> Any:
        number, row = self.new_row(self.tenants[tenant], **options)
        row.idempotency_key = key
        return self.stored_by_key(self.tenants[tenant], number, row)

    @rule(turn=st.integers(0, 3), differs=st.sampled_from(("", "", "relay", "body", "max_attempts")))
    def use_a_key_again(self, turn: int, differs: str) -> None:
        """For the same request, made anew, or for one that differs in one thing."""
        if not self.model.keys:  # they were purged
            return
        (tenant, key), (_, digest) = list(self.model.keys.items())[turn % len(self.model.keys)]
        relay, body, max_attempts = digest
        number, row = self.new_row(
            tenant,
            RELAYS[relay == RELAYS[0]] if differs == "relay" else relay,
            body + b"!" if differs == "body" else body,
            max_attempts + 1 if differs == "max_attempts" else max_attempts,
            delayed=False,
        )
        row.idempotency_key = key
        self.stored_by_key(tenant, number, row)
        # It was no job, and nobody is to send it again as one.
        self.numbers[tenant] -= 1

    def stored_by_key(self, tenant: str, number: int, row: EnqueueRow) -> Any:
        async def said() -> tuple[UUID, bool] | None:
            try:
                return await self.gateway(tenant).enqueue_keyed_row(row)
            except IdempotencyConflictError:
                return None

        answer = self.run(said())
        self.seqs |= self.stored_seqs(tenant)
        expected = self.model.enqueue_keyed(tenant, number, self.modelled(tenant, number, row))
        assert (None if answer is None else (number_of(answer[0]), answer[1])) == expected
        self.saw("enqueue keyed", "conflict" if expected is None else "duplicate" if expected[1] else "new")
        return multiple() if expected is None or expected[1] else (tenant, number)

    @rule(tenant=TENANTS, count=st.integers(1, 2), **NEW)
    def roll_an_enqueue_back(self, tenant: int, count: int, **options: Any) -> None:
        """In the caller's transaction, in which he has bound the tenant. I8."""
        name = self.tenants[tenant]
        rows = [self.new_row(name, **options)[1] for _ in range(count)]

        async def roll_back() -> None:
            transaction = self.stage.gateway.transaction()
            await transaction.start()
            await self.stage.gateway.execute("select set_config('app.tenant_id', $1, true)", name)
            assert await RelayDispatchRepository(self.stage.gateway).enqueue_rows(rows) == [True] * count
            await transaction.rollback()

        self.run(roll_back())

    @rule(name=names, other=st.sampled_from((False, False, False, True)))
    def withdraw(self, name: Name, other: bool) -> None:
        name = (self.tenants[name[0] == self.tenants[0]], name[1]) if other else name
        if self.model.locked != name:
            ended = self.run(self.gateway(name[0]).mark_expired_many([job_id(name[1])]))
            expected = self.model.withdraw(name)
            assert [(one.tenant_id, number_of(one.job_id), claimed) for one, claimed in ended] == [
                (*name, expected[1])
            ][: expected[0]]
            self.saw("withdraw", "{} {}".format(*expected))

    @precondition(lambda self: any(job.result is not None for job in self.model.jobs.values()))
    @rule(tenant=TENANTS, limit=st.integers(1, 3))
    def purge(self, tenant: int, limit: int) -> None:
        count = self.run(self.gateway(self.tenants[tenant]).purge(600, limit=limit))
        assert count == self.model.purge(self.tenants[tenant], limit)
        self.saw("purge", count)

    @rule(limit=st.integers(1, 3))
    def purge_all_that_has_ended(self, limit: int) -> None:
        """The youngest ended first, as far as the clock says; a key's job is among them."""
        for (owner, _), (number, _) in list(self.model.keys.items()):
            self.withdraw((owner, number), other=False)
        for name, job in reversed(list(self.model.jobs.items())):
            if job.result is not None:
                self.let_have_ended_long_ago(name)
        for tenant in (0, 1):
            self.purge(tenant, limit)
            self.purge(tenant, 30)

    # --- claim ----------------------------------------------------------------------------------------

    @rule(
        target=grants,
        relay=st.sampled_from(RELAYS),
        order=st.sampled_from(((0,), (1,), (0, 1), (1, 0))),
        limit=st.integers(1, 5),
        by=HOLDERS,
        start=st.integers(0, 3),
        cursor=st.integers(1, 6),
        small=st.booleans(),
    )
    def claim_behind_a_cursor(
        self, relay: str, order: tuple[int, ...], limit: int, by: str, start: int, cursor: int, small: bool
    ) -> Any:
        return self.claimed(relay, order, limit, by, start, cursor, small)

    @rule(
        target=grants, relay=st.sampled_from(RELAYS), order=st.sampled_from(((0, 1), (1, 0), (0,))),
        limit=st.integers(1, 5), by=HOLDERS, start=st.integers(0, 3),
    )  # fmt: skip
    def claim(self, relay: str, order: tuple[int, ...], limit: int, by: str, start: int) -> Any:
        return self.claimed(relay, order, limit, by, start)

    @rule(
        target=grants, relay=st.sampled_from(RELAYS), order=st.sampled_from(((0, 1), (1, 0))),
        limit=st.integers(2, 5), by=HOLDERS, start=st.integers(0, 1), small=st.booleans(),
        due=st.booleans(),
    )  # fmt: skip
    def claim_less_than_two_tenants_have(
        self, relay: str, order: tuple[int, ...], limit: int, by: str, start: int, small: bool, due: bool
    ) -> Any:
        """What is missing to that is enqueued before: ready, or delayed and due, the last one first."""
        for tenant in order:
            missing = limit + 1 - self.model.ready(self.tenants[tenant], relay)
            if missing > 0:
                names = self.enqueued(tenant, missing, relay, b"22", 1, delayed=due).values
                for name in reversed(names) if due else ():
                    self.let_be_due(name)
        return self.claimed(relay, order, limit, by, start, small=small)

    @rule(target=grants, relay=st.sampled_from(RELAYS), by=HOLDERS)
    def claim_all_there_is(self, relay: str, by: str) -> Any:
        return self.claimed(relay, (0, 1), 30, by)

    def claimed(
        self, relay: str, order: tuple[int, ...], limit: int, by: str, start: int = 0, cursor: int | None = None,
        small: bool = False,
    ) -> Any:  # fmt: skip
        tenants = [self.tenants[place] for place in order]
        after = [0 if cursor is None else self.seqs.get((tenant, cursor), 0) for tenant in tenants]
        self.claims += 1
        claimed = self.run(
            self.worker.claim(
                relay,
                claimed_by=by,
                limit=limit,
                claim_id=claim_id(self.claims),
                lease_seconds=LONG,
                tenants=tenants,
                after=None if cursor is None else after,
                start=start,
                body_limit_bytes=1 if small else 65536,
            )
        )
        expected = self.model.claim(relay, tenants, limit, by, self.claims, after, start)
        assert [grant_of(job, by, self.claims) for job in claimed.jobs] == expected.jobs, "the lowest first"
        for job in claimed.jobs:
            model = self.model.jobs[job.tenant_id, number_of(job.job_id)]
            assert (job.attempt, job.max_attempts, job.seq) == (model.attempt, model.max_attempts, model.seq)
            assert (job.body, job.body_pending) == (
                (b"", True) if small and len(model.body) > 1 else (model.body, False)
            )
        assert [grant_of(job, by, self.claims, relay) for job in claimed.malformed] == expected.malformed
        assert Counter((one.tenant_id, number_of(one.job_id)) for one in claimed.expired) == Counter(expected.expired)
        assert claimed.next_due.keys() == expected.delayed
        assert claimed.looked_at == len(expected.jobs) + len(expected.malformed) + len(expected.expired) <= limit
        for what in ("expired", "malformed", "delayed"):
            if getattr(expected, what):
                self.saw("claim", what)
        self.saw("claim", "some" if expected.jobs else "none")
        grants = expected.jobs + expected.malformed
        self.granted += grants
        return multiple(*grants)

    @rule(grant=grants, turn=TURNS, wrong=WRONG)
    def claim_again(self, grant: Grant, turn: int, wrong: Wrong) -> None:
        grant = self.pick(grant, turn, wrong)
        again = self.run(
            self.worker.claim_again(
                grant.relay, claimed_by=grant.holder, claim_id=claim_id(grant.claim), tenants=self.tenants
            )
        )
        names = [(job.tenant_id, number_of(job.job_id)) for job in again.jobs]
        names += [(job.tenant_id, number_of(job.job_id)) for job in again.malformed]
        expected = self.model.claimed_again(grant.relay, self.tenants, grant.holder, grant.claim)
        assert sorted(names) == sorted(expected)

    @rule(grant=grants, turn=TURNS, wrong=WRONG)
    def fetch_body(self, grant: Grant, turn: int, wrong: Wrong) -> None:
        grant = self.pick(grant, turn, wrong)
        query = "select body from relay.fetch_body($1, $2, $3, $4, $5)"
        rows = self.run(
            self.stage.worker.fetch(query, grant.relay, grant.tenant, job_id(grant.job), grant.fence, grant.holder)
        )
        held = self.model.held(grant)
        assert [row[0] for row in rows] == ([] if held is None else [held.body])
        self.saw("fetch body", bool(rows))

    # --- holders --------------------------------------------------------------------------------------

    @rule(grant=grants, more=st.lists(grants, max_size=2), turn=TURNS, wrong=WRONG)
    def heartbeat(self, grant: Grant, more: list[Grant], turn: int, wrong: Wrong) -> None:
        some = self.batch(grant, more, turn, wrong)
        claims = [(one.tenant, job_id(one.job), one.fence) for one in some]
        said = self.run(self.worker.heartbeat(some[0].relay, claims, claimed_by=some[0].holder, lease_seconds=LONG))
        assert said == [self.model.heartbeat(one) for one in some]
        for outcome in said:
            self.saw("heartbeat", outcome)

    @rule(
        grant=grants,
        more=st.lists(grants, max_size=3),
        turn=TURNS,
        wrong=WRONG,
        status=st.sampled_from(("succeeded", "succeeded", "failed")),
        body=st.none() | BODIES,
        number=st.none() | st.integers(200, 202),
    )
    def complete(
        self, grant: Grant, more: list[Grant], turn: int, wrong: Wrong, status: str, body: bytes | None,
        number: int | None,
    ) -> None:  # fmt: skip
        some = self.batch(grant, more, turn, wrong)
        if self.would_wait(some):
            return
        code = "E-OWN" if status == "failed" else None

        def body_of(one: Grant) -> bytes | None:
            return None if body is None else body + str(one.job).encode()

        settled = self.run(
            self.worker.complete_many(
                some[0].relay,
                [
                    Completion(
                        job_id(one.job),
                        one.fence,
                        one.tenant,
                        status,
                        number,
                        response_body=body_of(one),
                        error_code=code,
                    )
                    for one in some
                ],
                claimed_by=some[0].holder,
            )
        )
        # All first ones are settled before what is there twice, or is not to be settled, is looked at.
        first = [one for n, one in enumerate(some) if one not in some[:n] and self.model.held(one) is not None]
        expected = {one: self.model.complete(one, status, number, body_of(one), code) for one in first}
        for n, one in enumerate(some):
            is_first = one in expected and one not in some[:n]
            wanted = expected[one] if is_first else self.model.complete(one, status, number, body_of(one), code)
            assert (settled[n].outcome, settled[n].status) == wanted
            self.saw("complete", "{} {}".format(*wanted))

    @rule(
        grant=grants,
        more=st.lists(grants, max_size=2),
        turn=TURNS,
        wrong=WRONG,
        delay=st.sampled_from(("no", "no", "later", "too late")),
        give_back=st.booleans(),
    )
    def retry(
        self, grant: Grant, more: list[Grant], turn: int, wrong: Wrong, delay: Literal["no", "later", "too late"],
        give_back: bool,
    ) -> None:  # fmt: skip
        some = self.batch(grant, more, turn, wrong)
        if not self.would_wait(some):
            seconds = {"no": 0.0, "later": LONG, "too late": TOO_LONG}[delay]
            items = [PutBack(job_id(one.job), one.fence, one.tenant, seconds, give_back, "E-BACK") for one in some]
            settled = self.run(self.worker.retry(some[0].relay, items, claimed_by=some[0].holder))
            expected = [self.model.put_back(one, delay, give_back, "E-BACK") for one in some]
            assert [(one.outcome, one.status) for one in settled] == expected
            for outcome in expected:
                self.saw("retry", "{} {}".format(*outcome))

    @rule(grant=grants, more=st.lists(grants, max_size=2), turn=TURNS, wrong=WRONG, started=st.booleans())
    def release(self, grant: Grant, more: list[Grant], turn: int, wrong: Wrong, started: bool) -> None:
        some = self.batch(grant, more, turn, wrong)
        if not self.would_wait(some):
            claims = [(one.tenant, job_id(one.job), one.fence, started) for one in some]
            settled = self.run(self.worker.release(some[0].relay, claims, claimed_by=some[0].holder))
            expected = [self.model.put_back(one, "no", not started, "S2R-RELAY-STOPPED") for one in some]
            assert [(one.outcome, one.status) for one in settled] == expected
            for outcome in expected:
                self.saw("release", "{} {}".format(*outcome))

    @rule(grant=grants, turn=TURNS, late=st.sampled_from((False, False, False, True)))
    def say_everything_wrong(self, grant: Grant, turn: int, late: bool) -> None:
        """Every verb about a claim, with one thing wrong in it; or what is left to say of one past its deadline."""
        wrongs: tuple[Wrong, ...] = ("tenant", "relay", "fence", "holder")
        if late:
            grant = self.pick(grant, turn, "")
            if self.model.held(grant) is not None and self.model.locked != grant.name:
                self.let_be_late(grant.name)
                self.claim_again(grant, 0, "")
                self.complete_once(grant)
                self.complete_once(grant)
        for wrong in wrongs:
            self.heartbeat(grant, [], turn, wrong)
            self.complete(grant, [], turn, wrong, "succeeded", b"wrong", None)
            self.retry(grant, [], turn, wrong, "no", True)
            self.release(grant, [], turn, wrong, False)
            self.fetch_body(grant, turn, wrong)
            self.claim_again(grant, turn, wrong)

    def complete_once(self, grant: Grant) -> None:
        self.complete(grant, [], 0, "", "succeeded", b"once", 200)

    @rule(grant=grants, turn=TURNS)
    def complete_and_say_it_again(self, grant: Grant, turn: int) -> None:
        """By the holder: repeated; by another one, of another fence: stale; by another relay, which is told nothing."""
        grant = self.pick(grant, turn, "")
        self.complete_once(grant)
        self.complete_once(grant)
        self.complete_once(replace(grant, holder="two" if grant.holder == "one" else "one"))
        self.complete_once(replace(grant, fence=grant.fence + 1))
        self.complete_once(replace(grant, relay=RELAYS[grant.relay == RELAYS[0]]))

    @precondition(lambda self: self.model.locked is None)
    @rule(limit=st.integers(1, 3), order=st.sampled_from(((0, 1), (1, 0))), turn=TURNS, young=st.booleans())
    def lose_all_leases(self, limit: int, order: tuple[int, ...], turn: int, young: bool) -> None:
        """One of the rows is locked: its heartbeat is told so, and it is not taken back; nor is any, by the young."""
        held = [grant for grant in self.granted if self.model.held(grant) is not None]
        for grant in held:
            self.let_a_lease_run_out(grant, 0)
        if held:
            locked = held[turn % len(held)]
            self.lock(locked.name)
            if not young:
                self.heartbeat(locked, [], 0, "")
            self.reclaim(None, order, limit, young)
            self.unlock_the_row()

    @rule(verb=st.sampled_from(("claim", "heartbeat", "complete_many", "retry", "release", "poll_many", "purge")))
    def say_something_without_a_tenant(self, verb: str) -> None:
        """It raises, also where there is nothing to do. I4."""
        nothing: Any = {
            "claim": ("erp",), "heartbeat": ("erp", []), "complete_many": ("erp", []), "retry": ("erp", []),
            "release": ("erp", []), "poll_many": ([],), "purge": (600,),
        }[verb]  # fmt: skip
        is_worker = nothing[0] == "erp"
        repository = RelayDispatchRepository(self.stage.worker if is_worker else self.stage.gateway)
        options = {"claimed_by": "one"} if is_worker else {}
        with pytest.raises(TenancyUnboundError):
            self.run(getattr(repository, verb)(*nothing, **options))

    # --- time, locks, sweeps --------------------------------------------------------------------------

    @rule(grant=grants, turn=TURNS)
    def let_a_lease_run_out(self, grant: Grant, turn: int) -> None:
        grant = self.pick(grant, turn, "")
        job = self.model.live(grant.name)
        if job is not None and job.state == "claimed" and self.model.locked != grant.name:
            self.move(f"update {QUEUE} set lease_expires_at = clock_timestamp() - interval '1 ms'", grant.name)
            job.lease_over = True

    @rule(name=names, turn=TURNS, what=st.sampled_from(("deadline", "delay", "end", "end", "headers")))
    def let_time_pass(self, name: Name, turn: int, what: str) -> None:
        """A job's deadline passes, its delay is over, its end is long ago; or somebody spoils its headers."""
        some = [one for one, job in self.model.jobs.items() if self.may(what, job) and one != self.model.locked]
        if not some:
            return
        name = name if name in some else some[turn % len(some)]
        job = self.model.jobs[name]
        if what == "deadline":
            self.let_be_late(name)
        elif what == "delay":
            self.let_be_due(name)
        elif job.result is not None:
            self.let_have_ended_long_ago(name)
        else:
            self.move(f"update {REQUEST} set request_headers = '[1]'", name)
            job.malformed = True

    def let_be_due(self, name: Name) -> None:
        self.move(f"update {QUEUE} set available_at = clock_timestamp() - interval '1 hour'", name)
        self.model.jobs[name].due = self.model.moment()

    def let_have_ended_long_ago(self, name: Name) -> None:
        result = self.model.jobs[name].result
        assert result is not None
        self.move(f"update {RESULT} set completed_at = clock_timestamp() - interval '1 hour'", name)
        result.aged = self.model.moment()

    def let_be_late(self, name: Name) -> None:
        for table in (QUEUE, REQUEST):
            self.move(f"update {table} set expires_at = clock_timestamp() - interval '1 ms'", name)
        self.model.jobs[name].late = True

    @staticmethod
    def may(what: str, job: Job) -> bool:
        if what == "end":
            return job.result is not None
        return job.result is None and (what != "delay" or job.state == "delayed")

    @precondition(lambda self: self.model.locked is None)
    @rule(name=names, turn=TURNS)
    def lock_a_row(self, name: Name, turn: int) -> None:
        """That of a job that has not ended; mostly of one that can be claimed, where there is any."""
        ready = [one for one, job in self.model.jobs.items() if job.state == "ready" and job.result is None]
        name = ready[turn % len(ready)] if ready and turn else name
        if self.model.live(name) is not None:
            self.lock(name)

    def lock(self, name: Name) -> None:
        async def lock() -> None:
            self.locking = self.stage.locker.transaction()
            await self.locking.start()
            await self.stage.locker.execute(
                f"select from {QUEUE} where tenant_id = $1 and job_id = $2 for update", name[0], job_id(name[1])
            )

        self.run(lock())
        self.model.locked = name

    @precondition(lambda self: self.model.locked is not None)
    @rule()
    def unlock_the_row(self) -> None:
        self.run(self.locking.rollback())
        self.locking = self.model.locked = None

    @precondition(lambda self: any(job.lease_over for job in self.model.jobs.values()))
    @rule(
        relay=st.none() | st.sampled_from(RELAYS), order=st.sampled_from(((0,), (1,), (0, 1))), limit=st.integers(1, 4),
        young=st.sampled_from((False, False, True)),
    )  # fmt: skip
    def reclaim(self, relay: str | None, order: tuple[int, ...], limit: int, young: bool) -> None:
        """A session that is younger than a lease takes nothing."""
        tenants = [self.tenants[place] for place in order]
        lease = LONG if young else 1e-6
        taken = self.run(self.worker.reclaim(relay, lease_seconds=lease, limit=limit, tenants=tenants))
        lost = [] if young else self.model.lost(relay, tenants)
        names = [(one.tenant_id, number_of(one.job_id)) for one in taken]
        # Of those of one claim, any.
        assert len(names) == len(set(names)) == min(limit, len(lost))
        assert set(names) <= set(lost)
        for one, name in zip(taken, names, strict=True):
            assert one.status == self.model.reclaim(name)
            self.saw("reclaim", one.status)

    @precondition(lambda self: any(job.late or job.lease_over or job.due for job in self.model.jobs.values()))
    @rule(relay=st.sampled_from(RELAYS))
    def sweep(self, relay: str) -> None:
        """What run_sweeps does for a relay, over all tenants: expire, take back, promote."""
        often = (1e-6,) * 4
        swept = self.run(self.worker.run_sweeps(relay, lease_seconds=1e-6, limit=500, every_seconds=often))
        said = Counter((one.tenant_id, number_of(one.job_id), str(one.status)) for one in swept)
        expected = Counter((*name, "expired") for name in self.model.expire_late(relay, self.tenants))
        for name in self.model.lost(relay, self.tenants):
            expected[(*name, self.model.reclaim(name))] += 1
        for tenant in self.tenants:
            self.model.promote(tenant, relay, 500)
        assert {what: n for what, n in said.items() if what[0] in self.tenants} == expected
        self.saw("sweep", "some" if expected else "none")

    @rule(grant=grants, turn=TURNS, relay=st.sampled_from(RELAYS))
    def sweep_what_is_late_and_due(self, grant: Grant, turn: int, relay: str) -> None:
        grant = self.pick(grant, turn, "")
        if self.model.held(grant) is not None and self.model.locked != grant.name:
            self.let_be_late(grant.name)
        for name, job in self.model.jobs.items():
            if job.state == "delayed" and job.result is None and name != self.model.locked:
                self.let_be_due(name)
        self.sweep(grant.relay if turn else relay)

    # --- what holds after every step ------------------------------------------------------------------

    @invariant()
    def every_row_is_as_the_model_says(self) -> None:
        jobs = self.model.jobs
        live = self.run(self.stage.admin.fetch(_LIVE, self.tenants))
        assert {(row[0], number_of(row[1])): tuple(row)[2:] for row in live} == {
            name: (
                job.relay, job.state, job.attempt, job.max_attempts, job.fence, job.seq, job.holder,
                None if job.claim is None else claim_id(job.claim), job.lease_over,
                "due" if job.due is not None else "later" if job.state == "delayed" else None, job.late,
            )
            for name, job in jobs.items()
            if job.result is None
        }  # fmt: skip
        ended = self.run(self.stage.admin.fetch(_ENDED, self.tenants))
        assert {(row[0], number_of(row[1])): tuple(row)[2:] for row in ended} == {
            name: (job.relay, r.status, r.attempt, r.fence, r.holder, r.response_status, r.body, r.code)
            for name, job in jobs.items()
            if (r := job.result) is not None
        }
        rows = self.run(self.stage.admin.fetch(_REST, self.tenants))
        assert {(row[0], row[1], number_of(row[2])) for row in rows} == {
            *((tenant, None, number) for tenant, number in jobs),
            *((tenant, key, number) for (tenant, key), (number, _) in self.model.keys.items()),
        }

    @invariant()
    def everybody_is_shown_what_the_model_says(self) -> None:
        for tenant in self.tenants:
            mine = {number: job for (owner, number), job in self.model.jobs.items() if owner == tenant}
            rows = self.run(self.gateway(tenant).list_jobs(limit=1000))
            assert {number_of(row["job_id"]): row["status"] for row in rows} == {
                n: job.shown for n, job in mine.items()
            }
            # All numbers, also those of the other tenant alone. A late row that is locked would be waited for.
            locked = self.model.locked
            asked = [n for n in range(1, max(self.numbers.values()) + 1) if (tenant, n) != locked]
            answers = self.run(self.gateway(tenant).poll_many(map(job_id, asked)))
            assert {number_of(one): shown(answer) for one, answer in answers.items()} == {
                n: (job.shown, job.attempt, None if job.result is None else job.result.body)
                for n, job in mine.items()
                if n in asked
            }

    def teardown(self) -> None:
        if self.locking is not None:
            self.run(self.locking.rollback())

    # --- tools ----------------------------------------------------------------------------------------

    def gateway(self, tenant: str) -> RelayDispatchRepository:
        return RelayDispatchRepository(self.stage.gateway, tenant)

    @property
    def worker(self) -> RelayDispatchRepository:
        return RelayDispatchRepository(self.stage.worker)

    def pick(self, grant: Grant, turn: int, wrong: Wrong) -> Grant:
        """Return this grant, or mostly one that is a current claim, where there is any; with something wrong in it."""
        good = [one for one in self.granted if self.model.held(one) is not None]
        grant = good[turn % len(good)] if good and turn else grant
        other: dict[str, Any] = {
            "tenant": self.tenants[grant.tenant == self.tenants[0]],
            "relay": RELAYS[grant.relay == RELAYS[0]],
            "holder": "two" if grant.holder == "one" else "one",
            "fence": grant.fence + 1,
        }
        return replace(grant, **{wrong: other[wrong]}) if wrong else grant

    def batch(self, grant: Grant, more: list[Grant], turn: int, wrong: Wrong) -> list[Grant]:
        """Return what one holder of one relay says of several claims, be they others' or not."""
        first = self.pick(grant, turn, wrong)
        return [first, *(replace(one, relay=first.relay, holder=first.holder) for one in more)]

    def would_wait(self, some: list[Grant]) -> bool:
        return any(one.name == self.model.locked and self.model.held(one) is not None for one in some)

    def move(self, update: str, name: Name) -> None:
        where = " where tenant_id = $1 and job_id = $2"
        self.run(self.stage.admin.execute(update + where, name[0], job_id(name[1])))


_LIVE = f"""
    select tenant_id, job_id, relay_id, state, attempt, max_attempts, fence, seq, claimed_by, claim_id,
           coalesce(lease_expires_at <= now(), false),
           case when available_at <= now() then 'due' when available_at > now() then 'later' end, expires_at <= now()
    from {QUEUE} where tenant_id = any ($1)
"""
_ENDED = f"""
    select tenant_id, job_id, relay_id, status, attempt, fence, claimed_by, response_status, response_body, error_code
    from {RESULT} where tenant_id = any ($1)
"""
_REST = f"""
    select tenant_id, null, job_id from {REQUEST} where tenant_id = any ($1)
    union all
    select tenant_id, idempotency_key, job_id from {KEY} where tenant_id = any ($1)
"""


def _ids() -> tuple[dict[int, UUID], dict[UUID, int]]:
    # The same in every game and for every tenant, who are to know nothing of each other; and in no order.
    ids = {number: uuid5(NAMESPACE_OID, str(number)) for number in range(1, 1000)}
    return ids, {one: number for number, one in ids.items()}


_ID, _NUMBER = _ids()


def job_id(number: int) -> UUID:
    return _ID[number]


def number_of(one: UUID) -> int:
    return _NUMBER[one]


def claim_id(number: int) -> UUID:
    return UUID(int=number)


def grant_of(job: Any, holder: str, claim: int, relay: str | None = None) -> Grant:
    return Grant(job.tenant_id, relay or job.relay_id, number_of(job.job_id), job.fence, holder, claim)


def shown(answer: object) -> tuple[str, int, bytes | None]:
    assert isinstance(answer, DispatchResult)
    return str(answer.status), answer.attempt, answer.response_body


@pytest.mark.timeout(1200)
def test_gateways_holders_and_sweeps_in_any_order_do_what_the_model_says(
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
