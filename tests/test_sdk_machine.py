"""Hypothesis plays a gateway's client and two relays: real ones, whose handlers do what the game says, when it says so.

The model knows no order of what the relays do by themselves. So after every step the game waits until what is stored
is what the model says, every relay with a free slot has found what there is, and waits have ended that are to end; a
handler that begins is asked for its claim at once. Stale handlers stay in the game, and say what they have to say late.
Somebody who has a worker's login speaks in between, in others' names; connections are cut; relays stop and start.

`--long` plays more and longer games, other ones each time (or those of `--seed`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, multiple, rule

from dispatch_core.dispatch import RelayDispatchRepository
from dispatch_core.errors import UnknownJobError, WaitTimeoutError
from dispatch_core.models import Completion, DispatchJob, DispatchRequest, DispatchResult
from gateway_sdk import GatewayClient
from relay_sdk import Reject, Relay, RelaySettings, Reply, Retry, Snooze, run_relays
from tests.support.databases import TestDatabase
from tests.support.eventually import eventually
from tests.support.games import GameStage, StagedGame, play
from tests.support.gateway import settings_for
from tests.support.protocol import QUEUE, REQUEST, RESULT
from tests.support.sdk_model import ENDED, How, Job, Model, Play

pytestmark = [
    *(pytest.mark.invariant(one) for one in ("I1", "I2", "I3", "I4", "I6", "I8", "I9")),
    *(pytest.mark.case(case) for case in ("C03", "C12", "C15", "C18")),
]

TENANTS = ("a", "b")
RELAYS = ("one", "two")
SLOTS = 2
LONG = 1e5
TTL = 3e5
PATIENCE = 90.0
"""Seconds for all to become as it is to be. Where one look at the queue has taken a second, because the machine is
busy, the next look at all of it comes twenty seconds later (ClaimCursor): so this is far more than it takes."""
HOWS: tuple[How, ...] = (
    "reply", "reply", "reply", "reject", "raise", "nonsense", "cancelled", "retry", "retry later", "snooze",
    "snooze later",
)  # fmt: skip
NEW: Any = {
    "tenant": st.sampled_from(TENANTS),
    "max_attempts": st.integers(1, 3),
    "stubborn": st.sampled_from((False, False, True)),
}
TURNS = st.integers(0, 7)
COMMON = (
    "withdraw: 1", "withdraw: 0", "handler's end: current reply", "handler's end: stale reply",
    "handler's end: current retry", "handler's end: current raise", "taken back: pending", "taken back: failed",
    "said again: repeated", "said again: stale", "relay stopped: failed", "relay stopped: pending",
    "relay stopped: succeeded", "wait: ended", "wait: open", "late: claimed", "late: pending",
)  # fmt: skip


class Fault(Exception):  # noqa: N818  it is what is found, and no error of the game
    """What cannot become right by waiting."""


class Stage(GameStage):
    """One database, a client and two relays."""

    def __init__(self, runner: asyncio.Runner, database: TestDatabase) -> None:
        super().__init__(runner, database)
        self.game: Game | None = None
        self.answers: dict[Play, asyncio.Future[Callable[[], Any]]] = {}
        self.relays = {name: self._relay(name) for name in RELAYS}
        self.runs: dict[str, asyncio.Task[None]] = {}
        self.doomed: set[str] = set()
        """Relays that are being stopped without grace."""

    async def open(self) -> None:
        options = {"statement_timeout": "5s", "application_name": "game"}
        self.admin = await self.connect(self._database.admin_dsn, **options)
        self.worker = RelayDispatchRepository(await self.connect(self._database.worker_dsn, **options))
        self.gateway = await self.connect(self._database.gateway_dsn, **options)
        self._closing = asyncio.Event()
        is_open = asyncio.Event()

        async def host() -> None:
            async with GatewayClient(settings=settings_for(self._database.gateway_dsn)) as self.client:
                is_open.set()
                await self._closing.wait()

        self.host = asyncio.create_task(host())
        await is_open.wait()
        await self.start_relays()

    async def close(self) -> None:
        for relay in self.relays.values():
            relay.stop(grace_seconds=0)
        self._closing.set()
        await asyncio.gather(self.host, *self.runs.values(), return_exceptions=True)
        await super().close()

    def _relay(self, name: str) -> Relay:
        relay = Relay(
            "erp",
            tenants=TENANTS,
            dsn=self._database.worker_dsn,
            settings=RelaySettings(
                concurrency=SLOTS,
                lease_seconds=600,
                heartbeat_seconds=0.2,  # so that a stale handler goes on for a while, and not for ever
                poll_seconds=0.3,  # for the time without a listener
                sweep_seconds=3600,
                retry_base_seconds=0,
            ),
        )

        @relay.handler("Do")
        async def do(job: DispatchJob) -> Any:
            play = self.begins(job, name)
            try:
                answer = await self.answers[play]
            finally:
                play.over = True
            return answer()

        @relay.handler("Insist")
        async def insist(job: DispatchJob) -> Any:
            play = self.begins(job, name)
            try:
                answer = await self.answers[play]
            except asyncio.CancelledError:
                return Reply(b"insisted")
            finally:
                play.over = True
            return answer()

        return relay

    def begins(self, job: DispatchJob, name: str) -> Play:
        play = Play(job.body.decode(), name, self.relays[name].instance_id or "?", job.attempt, job.fence)
        self.answers[play] = asyncio.get_running_loop().create_future()
        if self.game is not None:
            self.game.model.begins(play.token, job.tenant_id, play, job.max_attempts)
            self.game.known(play.token, job.job_id)
            if name in self.doomed:
                self.game.cut_short(play)
        return play

    async def start_relays(self) -> None:
        for name, relay in self.relays.items():
            if name not in self.runs:
                self.runs[name] = asyncio.create_task(run_relays([relay]))
        await eventually(lambda: all(relay.health().status in ("ok", "degraded") for relay in self.relays.values()))

    async def stop_relay(self, name: str, how: str) -> None:
        run = self.runs.pop(name)
        if how == "cancelled":
            run.cancel()
        else:
            self.relays[name].stop(grace_seconds=0 if how == "stopped" else None)
        await asyncio.wait([run], timeout=PATIENCE)
        if not run.done() or (not run.cancelled() and run.exception() is not None):
            raise Fault(f"relay {name} did not stop in order: {run}")

    def plays(self, name: str | None = None) -> list[Play]:
        """Return the handlers that run."""
        return [play for play in self.answers if not play.over and name in (None, play.relay)]


class Game(StagedGame[Stage]):
    """Some jobs' life. Rules do things to them, or let a handler end."""

    jobs: Bundle[str] = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.waits: list[tuple[str, asyncio.Task[DispatchResult]]] = []
        self.keyed: list[tuple[str, DispatchRequest]] = []
        self.number = 0
        self.was_cut = False
        """Whether a claim's reply may have been lost: such a claim may bring more than there are slots."""
        self.stage.game = self
        self.stage.answers.clear()

    @initialize(target=jobs, count=st.integers(1, 4), **NEW)
    def first_jobs(self, count: int, **options: Any) -> Any:
        return self.enqueued(count, **options)

    # --- the gateway ----------------------------------------------------------------------------------

    @rule(target=jobs, count=st.integers(1, 3), **NEW)
    def enqueue(self, count: int, **options: Any) -> Any:
        return self.enqueued(count, **options)

    def enqueued(self, count: int, tenant: str, max_attempts: int, stubborn: bool, delay: float | None = None) -> Any:
        jobs = [self.new_job(tenant, max_attempts, stubborn) for _ in range(count)]
        requests = [self.request(job, delay=delay) for job in jobs]
        client = self.stage.client.tenant(tenant)

        async def store() -> None:
            if count == 1:
                ids = [await client.enqueue(**_fields(requests[0]))]
            else:
                ids = await client.enqueue_many(requests)
            for job, job_id in zip(jobs, ids, strict=True):
                self.known(job.token, job_id)
            await self.settled()

        self.stage.run(store())
        return multiple(*(job.token for job in jobs))

    def new_job(self, tenant: str, max_attempts: int, stubborn: bool) -> Job:
        self.number += 1
        job = Job(f"{self.stage.games}:{self.number}", tenant, max_attempts, stubborn)
        self.model.jobs[job.token] = job
        return job

    @staticmethod
    def request(job: Job, **options: Any) -> DispatchRequest:
        job.delayed = options.get("delay") is not None
        operation = "Insist" if job.stubborn else "Do"
        return DispatchRequest("erp", operation, body=job.token, ttl=TTL, max_attempts=job.max_attempts, **options)

    def known(self, token: str, job_id: UUID) -> None:
        job = self.model.jobs.get(token)
        if job is not None:
            assert job.job_id in (None, job_id), "one request is one job"
            job.job_id = job_id

    @rule(target=jobs, **NEW)
    def enqueue_for_later(self, **options: Any) -> Any:
        return self.enqueued(1, delay=LONG, **options)

    @rule(target=jobs, key=st.sampled_from(("k1", "k2")), tenant=st.sampled_from(TENANTS))
    def enqueue_keyed_and_again(self, key: str, tenant: str) -> Any:
        """Two calls at once of one request, or one of a key that is in use."""
        key = f"{self.stage.games}:{key}"
        known = [(token, request) for token, request in self.keyed if self.model.jobs[token].tenant == tenant]
        known = [(token, request) for token, request in known if request.idempotency_key == key]
        if not known:
            job = self.new_job(tenant, 1, False)
            self.keyed.append((job.token, self.request(job, idempotency_key=key)))
            known = self.keyed[-1:]
        ((token, request),) = known

        async def store() -> None:
            client = self.stage.client.tenant(tenant)
            for job_id in await asyncio.gather(*(client.enqueue(**_fields(request)) for _ in range(2))):
                self.known(token, job_id)
            await self.settled()

        self.stage.run(store())
        return token

    @rule(**NEW)
    def roll_an_enqueue_back(self, **options: Any) -> None:
        job = self.new_job(**options)
        request = self.request(job)

        async def roll_back() -> None:
            transaction = self.stage.gateway.transaction()
            await transaction.start()
            await self.stage.client.tenant(job.tenant).enqueue(**_fields(request), conn=self.stage.gateway)
            await transaction.rollback()
            await self.settled()

        # A handler that begins with it is a fault.
        del self.model.jobs[job.token]
        self.stage.run(roll_back())

    @rule(target=jobs, **NEW)
    def call(self, **options: Any) -> Any:
        """Enqueue and wait, in one call, which goes on."""
        job = self.new_job(**options)
        fields = _fields(self.request(job))

        async def call() -> None:
            self.waits.append((job.token, asyncio.create_task(self.stage.client.tenant(job.tenant).call(**fields))))
            found = f"select job_id from {REQUEST} where request_body = $1"
            job_id = await eventually(lambda: self.stage.admin.fetchval(found, job.token.encode()), interval=0.002)
            self.known(job.token, job_id)
            await self.settled()

        self.stage.run(call())
        return job.token

    @rule(token=jobs)
    def wait(self, token: str) -> None:
        job = self.model.jobs[token]
        assert job.job_id is not None
        job_id = job.job_id

        async def begin() -> None:
            self.waits.append((token, asyncio.create_task(self.stage.client.tenant(job.tenant).wait(job_id))))
            await self.settled()

        self.stage.run(begin())

    @rule(token=jobs)
    def ask(self, token: str) -> None:
        """A wait that does not wait; and what another tenant is told, which is nothing."""
        job = self.model.jobs[token]
        assert job.job_id is not None
        job_id = job.job_id

        async def ask() -> None:
            mine = self.stage.client.tenant(job.tenant)
            try:
                result = await mine.wait(job_id, 0)
            except WaitTimeoutError:
                assert job.shown not in ENDED
                self.saw("wait", "open")
            else:
                self.is_result(job, result)
                self.saw("wait", "ended")
            other = self.stage.client.tenant(TENANTS[job.tenant == TENANTS[0]])
            assert await other.poll_status(job_id) is None
            assert await other.poll_many([job_id]) == {}
            assert await other.mark_expired(job_id) == 0
            with pytest.raises(UnknownJobError):
                await other.wait(job_id, 0)
            await self.settled()

        self.stage.run(ask())

    @rule(token=jobs, twice=st.booleans())
    def withdraw(self, token: str, twice: bool) -> None:
        job = self.model.jobs[token]
        assert job.job_id is not None
        job_id, play = job.job_id, job.current

        async def withdraw() -> None:
            client = self.stage.client.tenant(job.tenant)
            said = await asyncio.gather(*(client.mark_expired(job_id) for _ in range(1 + twice)))
            # Of a job that is shown as expired and that somebody waits for, the waiter may have been first.
            first = self.model.withdrawn(job)
            assert sum(said) == first or (job.late and sum(said) == 0)
            self.saw("withdraw", sum(said))
            await self.settled()
            if play is not None:
                await eventually(lambda: play.over, timeout=PATIENCE, message="the handler of a withdrawn job goes on:")

        self.stage.run(withdraw())

    # --- handlers -------------------------------------------------------------------------------------

    @rule(token=jobs, turn=TURNS, how=st.sampled_from(HOWS))
    def end_a_handler(self, token: str, turn: int, how: How) -> None:
        """That of the job, or of any; be its claim its own still or not."""
        self.end_some(token, turn, [how])

    @rule(token=jobs, turn=TURNS, hows=st.lists(st.sampled_from(HOWS), min_size=2, max_size=4))
    def end_handlers(self, token: str, turn: int, hows: list[How]) -> None:
        """Several at once, which are settled together; some of those that begin for them among them."""
        self.end_some(token, turn, hows)

    @rule(turn=TURNS, how=st.sampled_from(HOWS))
    def end_the_oldest_handler(self, turn: int, how: How) -> None:
        self.end_some("", 0, [how])

    def end_some(self, token: str, turn: int, hows: list[How]) -> None:
        async def end() -> None:
            for how in hows:
                play = self.pick(token, turn)
                if play is not None:
                    self.answered(play, how)
                await asyncio.sleep(0)
            await self.settled()

        self.stage.run(end())

    def pick(self, token: str, turn: int) -> Play | None:
        plays = self.stage.plays()
        own = [play for play in plays if play.token == token]
        plays = own[turn % 2 :] or own or plays
        return plays[turn % len(plays)] if plays else None

    def answered(self, play: Play, how: How) -> None:
        future = self.stage.answers[play]
        if play.over or future.done():
            return
        job = self.model.jobs[play.token]
        self.saw("handler's end", f"{'current' if job.current is play else 'stale'} {how}")
        body = f"{play.token} by {play.fence}".encode()
        self.model.ends(job, play, how, body)
        play.over = True
        future.set_result(lambda: _answer(how, body))

    # --- others in their names ------------------------------------------------------------------------

    @rule(token=jobs, turn=TURNS, wrong=st.sampled_from(("tenant", "relay", "fence", "holder")), verb=st.integers(0, 3))
    def say_something_wrong(self, token: str, turn: int, wrong: str, verb: int) -> None:
        """With one thing wrong in it, of a claim that is good."""
        play = self.pick(token, turn)
        if play is None:
            return
        job = self.model.jobs[play.token]
        assert job.job_id is not None
        job_id = job.job_id
        tenant = TENANTS[job.tenant == TENANTS[0]] if wrong == "tenant" else job.tenant
        relay = "crm" if wrong == "relay" else "erp"
        # Where a sweep has ended the job, its result has the fence that is one higher, and the name of the last holder.
        wrong_fence = play.fence + (-1 if job.status in ENDED else 1)
        fence = wrong_fence if wrong == "fence" else play.fence
        holder = "another" if wrong == "holder" else play.instance
        worker = self.stage.worker

        async def say() -> None:
            said: Any
            if verb == 0:
                said = await worker.complete_many(relay, [Completion(job_id, fence, tenant)], claimed_by=holder)
            elif verb == 1:
                said = await worker.heartbeat(relay, [(tenant, job_id, fence)], claimed_by=holder, lease_seconds=1)
            else:
                claims = [(tenant, job_id, fence, verb == 2)]
                said = await worker.release(relay, claims, claimed_by=holder)
            assert [getattr(one, "outcome", one) for one in said] == ["stale"]
            await self.settled()

        self.stage.run(say())

    @rule(token=jobs, turn=TURNS)
    def say_a_completion_again(self, token: str, turn: int) -> None:
        """One whose reply was lost, or of a claim that is long over."""
        job = self.model.jobs[token]
        old = [play for play in job.plays if play is not job.current]
        if not old or job.job_id is None:
            return
        play, job_id = old[turn % len(old)], job.job_id

        async def say() -> None:
            await self.settled()
            completion = Completion(job_id, play.fence, job.tenant, response_body=b"again")
            (said,) = await self.stage.worker.complete_many("erp", [completion], claimed_by=play.instance)
            assert said.outcome == ("repeated" if play.settles else "stale")
            self.saw("said again", str(said.outcome))
            await self.settled()

        self.stage.run(say())

    # --- time, and what goes wrong ----------------------------------------------------------------------

    @rule(token=jobs)
    def lose_a_lease(self, token: str) -> None:
        """Its holder goes on with it, and may find out when it is done."""
        job = self.model.jobs[token]
        if job.current is None:
            return

        async def take_back() -> None:
            where = " where tenant_id = $1 and job_id = $2"
            over = f"update {QUEUE} set lease_expires_at = clock_timestamp() - interval '1 ms'{where}"

            async def taken() -> bool:
                # A heartbeat may come between the two.
                await self.stage.admin.execute(over, job.tenant, job.job_id)
                lost = await self.stage.worker.reclaim("erp", lease_seconds=1e-6, limit=9, tenants=[job.tenant])
                if lost:
                    assert [one.job_id for one in lost] == [job.job_id]
                    self.model.taken_back(job, "S2R-LEASE-LOST")
                    self.saw("taken back", lost[0].status)
                    assert lost[0].status == job.status
                    if job.status == "pending":
                        await self.ring(job.tenant)
                return bool(lost)

            await eventually(taken, timeout=PATIENCE, interval=0)
            await self.settled()

        self.stage.run(take_back())

    @rule(token=jobs, turn=TURNS, what=st.sampled_from(("deadline", "delay", "delay")))
    def let_time_pass(self, token: str, turn: int, what: str) -> None:
        """The deadline of the job passes; or its delay is over, or that of any."""
        job = self.model.jobs[token]
        if what == "delay":
            delayed = [one for one in self.model.jobs.values() if one.delayed and one.status == "pending"]
            if not delayed:
                return
            job = delayed[turn % len(delayed)]
        if job.status in ENDED:
            return

        async def let_pass() -> None:
            moved = f"update {QUEUE} set available_at = clock_timestamp()"
            if what == "delay":
                job.delayed = False
            else:
                moved = f"update {QUEUE} set expires_at = clock_timestamp() - interval '1 ms'"
                job.late = True
                self.saw("late", job.status)
            await self.stage.admin.execute(f"{moved} where tenant_id = $1 and job_id = $2", job.tenant, job.job_id)
            await self.ring(job.tenant)
            await self.settled()

        self.stage.run(let_pass())

    async def ring(self, tenant: str) -> None:
        await self.stage.gateway.execute(
            "select relay.ring(array['wake'], array[$1], array['erp'], array[null::text])", tenant
        )

    @rule(name=st.sampled_from(RELAYS), how=st.sampled_from(("stopped", "cancelled", "gently")))
    def stop_a_relay(self, name: str, how: str) -> None:
        """Without grace, or with it; or what it runs in is cancelled."""
        if name not in self.stage.runs:
            return

        async def stop() -> None:
            if how == "gently":
                stopping = asyncio.create_task(self.stage.stop_relay(name, how))
                # It claims no more; those that it has may take their time.
                await eventually(lambda: self.stage.relays[name].health().status in ("stopping", "stopped"))
                for play in self.stage.plays(name):
                    self.answered(play, "reply")
                await stopping
            else:
                # Before it: the other one may have begun with what is given back, before this one has stopped.
                self.stage.doomed.add(name)
                for play in self.stage.plays(name):
                    self.cut_short(play)
                await self.stage.stop_relay(name, how)
                self.stage.doomed.discard(name)
            assert self.stage.plays(name) == []
            await self.settled()

        self.stage.run(stop())

    def cut_short(self, play: Play) -> None:
        """Note that its relay stops at once."""
        job = self.model.jobs.get(play.token)
        if job is not None and job.current is play:
            if job.stubborn:
                self.model.ends(job, play, "reply", b"insisted")
            else:
                self.model.taken_back(job, "S2R-RELAY-STOPPED")
            self.saw("relay stopped", job.status)

    @rule()
    def start_the_relays(self) -> None:
        async def start() -> None:
            await self.stage.start_relays()
            await self.settled()

        self.stage.run(start())

    @rule(whose=st.sampled_from(("relay_worker_login", "relay_gateway_login")), turn=st.integers(0, 3))
    def cut_connections(self, whose: str, turn: int) -> None:
        """In one game of four or so: it takes a while until all is well again."""
        if turn:
            return

        async def cut() -> None:
            self.was_cut = True
            await self.stage.admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and usename = $1 and application_name <> 'game'",
                whose,
            )
            await self.settled()

        self.stage.run(cut())

    # --- what holds after every step ------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait until all is as the model says, and see that nothing has happened that may not."""
        await eventually(self.is_settled, timeout=PATIENCE, interval=0.003)

    async def is_settled(self) -> bool:
        stage, model = self.stage, self.model
        if model.faults or stage.host.done() or any(run.done() for run in stage.runs.values()):
            raise Fault(f"{model.faults}, client: {stage.host}, relays: {stage.runs}")
        ids = {job.job_id: job for job in model.jobs.values() if job.job_id is not None}
        rows = await stage.admin.fetch(_STORED, list(ids))
        assert len(rows) == len(ids)
        for row in rows:
            job = ids[row["job_id"]]
            assert (row["tenant_id"], row["attempt"]) == (job.tenant, job.attempt), job
            if not job.late:
                holder = None if job.current is None else job.current.instance
                assert (row["status"], row["body"], row["code"]) == (
                    job.status, job.body, "S2R-EXPIRED" if job.status == "expired" else job.code,
                ), job  # fmt: skip
                assert job.status in ENDED or row["claimed_by"] == holder, job
        if not self.was_cut and any(len(stage.plays(name)) > SLOTS for name in RELAYS):
            raise Fault("a relay has taken more than it has slots for")
        # Each relay that has a slot has found what there is.
        if any(job.may_start for job in model.jobs.values()):
            assert all(len(stage.plays(name)) >= SLOTS for name in stage.runs)
        for token, task in self.waits:
            if model.jobs[token].status in ENDED:
                assert task.done()
                self.is_result(model.jobs[token], task.result())
            else:
                assert not task.done() or model.jobs[token].late
        return True

    @staticmethod
    def is_result(job: Job, result: DispatchResult) -> None:
        assert (result.job_id, result.status) == (job.job_id, job.shown)
        if not job.late:
            assert (result.attempt, result.response_body) == (job.attempt, job.body)

    def teardown(self) -> None:
        self.stage.run(self.finish())

    async def finish(self) -> None:
        """Withdraw what is left, and let all handlers end, so that the next game begins with idle relays."""
        stage = self.stage
        stage.game = None
        try:
            for tenant in TENANTS:
                ids = [
                    one.job_id for one in self.model.jobs.values() if one.tenant == tenant and one.job_id is not None
                ]
                await stage.client.tenant(tenant).poll_many(ids)
                await asyncio.gather(*(stage.client.tenant(tenant).mark_expired(one) for one in ids))
            await stage.start_relays()
            await eventually(self.is_over, timeout=PATIENCE, message="what was withdrawn goes on:")
            # Whoever waits for something that has ended is told so.
            await asyncio.wait_for(asyncio.gather(*(task for _, task in self.waits)), PATIENCE)
            for job in self.model.jobs.values():
                counted = len(job.plays) - job.given_back
                assert counted <= job.max_attempts, "at most max_attempts handlers that count"
        except BaseException:
            for _, task in self.waits:
                task.cancel()
            for future in stage.answers.values():
                if not future.done():
                    future.set_result(lambda: Reply())
            raise

    def is_over(self) -> bool:
        return not self.stage.plays() and all(relay.health().in_hand == 0 for relay in self.stage.relays.values())


_STORED = f"""
    select tenant_id, job_id, case state when 'claimed' then 'claimed' else 'pending' end as status, attempt,
           claimed_by, null::bytea as body, null as code
    from {QUEUE} where job_id = any ($1)
    union all
    select tenant_id, job_id, status, attempt, claimed_by, response_body, error_code
    from {RESULT} where job_id = any ($1)
"""


def _answer(how: How, body: bytes) -> Any:
    match how:
        case "reply":
            return Reply(body)
        case "reject":
            raise Reject("E-OWN", "no")
        case "raise":
            raise ValueError("boom")
        case "nonsense":
            return 42
        case "cancelled":
            raise asyncio.CancelledError
        case "retry":
            return Retry(after=0)
        case "retry later":
            raise Retry(after=LONG)
        case "snooze":
            raise Snooze(after=0)
        case "snooze later":
            return Snooze(after=LONG)


def _fields(request: DispatchRequest) -> Any:
    given = {name: getattr(request, name) for name in ("relay_id", "operation", "body", "ttl", "max_attempts")}
    for name in ("delay", "idempotency_key"):
        if getattr(request, name) is not None:
            given[name] = getattr(request, name)
    return given


@pytest.mark.timeout(1200)
def test_gateways_and_relays_do_what_the_model_allows_whatever_their_handlers_do(
    database: TestDatabase, is_long: bool, seed: int
) -> None:
    play(
        Game,
        lambda runner: Stage(runner, database),
        seed,
        games=150 if is_long else 8,
        steps=60 if is_long else 25,
        common=COMMON if is_long else (),
        # Each step of a game that has failed waits for long, so none is made shorter.
        phases=[Phase.generate],
    )
