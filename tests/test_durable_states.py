"""The tables of docs/architecture-durable.md walked whole: every status by every verb, with right and wrong leases."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from tests.support import durable
from tests.support.durable import CHUNK, JOB, Lease
from tests.support.protocol import TENANT, Connection

pytestmark = [pytest.mark.invariant("I3"), pytest.mark.case("C18")]

CHUNK_STATES = ("pending", "running", "retry", "done", "failed", "needs_review", "cancelled")
JOB_STATES = (
    "queued", "running", "paused", "needs_review", "completed", "completed_with_errors", "failed", "cancelled",
)  # fmt: skip

Verb = Callable[[Any, Lease], Awaitable[Any]]


class Stage:
    """The three logins of one test."""

    def __init__(self, admin: Connection, gateway: Connection, worker: Connection) -> None:
        self.admin, self.gateway, self.worker = admin, gateway, worker

    async def chunk_in(self, state: str, *, expired: bool = False) -> Lease:
        """Make a job of two chunks, of which the first has come to a status by the verbs; return its last lease."""
        idempotent = state != "needs_review"
        job_id = await durable.submit(self.gateway, 2, idempotent=idempotent)
        (lease,) = await durable.claim_next(self.worker, job_id)
        if state == "pending":
            await durable.release(self.worker, lease)
        elif state == "retry":
            await durable.fail(self.worker, lease)
        elif state == "done":
            await durable.complete(self.worker, lease)
        elif state == "failed":
            await durable.fail(self.worker, lease, retryable=False)
        elif state == "cancelled":
            await self.gateway.fetchval(
                "select relay.durable_set_chunk_statuses($1, $2, '{running}', 'cancelled')", TENANT, job_id
            )
        elif state == "needs_review":
            await durable.run_out(self.admin)
            await durable.reap(self.worker)
        elif expired:
            await durable.run_out(self.admin)
        assert (await durable.states(self.gateway, job_id))[0] == state
        return lease


@pytest.fixture
def stage(admin: Connection, gateway: Connection, worker: Connection) -> Stage:
    return Stage(admin, gateway, worker)


async def _raising(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except asyncpg.PostgresError as error:
        return error.sqlstate


async def _checkpoint(stage: Stage, lease: Lease) -> Any:
    return await _raising(durable.checkpoint(stage.worker, lease, {"at": 1})) or "applied"


async def _row_errors(stage: Stage, lease: Lease) -> Any:
    return await _raising(durable.tell_errors(stage.worker, lease, [{"row": 1, "code": "c", "message": "m"}]))


async def _complete(stage: Stage, lease: Lease) -> Any:
    answer = await _raising(durable.complete(stage.worker, lease))
    return answer if isinstance(answer, str) else answer[0]


async def _complete_many(stage: Stage, lease: Lease) -> Any:
    return (await durable.complete_many(stage.worker, lease))[0]


async def _heartbeat(stage: Stage, lease: Lease) -> Any:
    return (await durable.heartbeat(stage.worker, lease))[0]


async def _fail(stage: Stage, lease: Lease) -> Any:
    return await durable.fail(stage.worker, lease)


async def _fail_for_good(stage: Stage, lease: Lease) -> Any:
    return await durable.fail(stage.worker, lease, retryable=False)


async def _release(stage: Stage, lease: Lease) -> Any:
    return (await durable.release(stage.worker, lease))[0]


async def _release_to_retry(stage: Stage, lease: Lease) -> Any:
    return (await durable.release(stage.worker, lease, to="retry"))[0]


LOST = "S2041"
# Verb -> what it says to the holder of a running chunk, and what the chunk is then; what it says to anybody else.
HOLDERS: dict[Verb, tuple[Any, str, Any]] = {
    _heartbeat: ("applied", "running", "stale"),
    _checkpoint: ("applied", "running", LOST),
    _row_errors: (1, "running", LOST),
    _complete: ("applied", "done", LOST),
    _complete_many: ("applied", "done", "stale"),
    _fail: ("retry", "retry", None),
    _fail_for_good: ("failed", "failed", None),
    _release: ("applied", "pending", "stale"),
    _release_to_retry: ("applied", "retry", "stale"),
}


@pytest.mark.invariant("J3")
@pytest.mark.parametrize("verb", HOLDERS, ids=lambda verb: verb.__name__[1:])
async def test_a_holders_verb_moves_its_running_chunk_and_nobody_elses_verb_moves_anything(
    stage: Stage, verb: Verb
) -> None:
    said, then, refused = HOLDERS[verb]
    for state in CHUNK_STATES:
        lease = await stage.chunk_in(state)
        before = await _row(stage.admin, lease)
        for wrong in (
            lease.stale,
            Lease(lease.job_id, lease.seq, lease.token, lease.version + 1),
            Lease(lease.job_id, 2, lease.token, lease.version),
            Lease(UUID(int=7), lease.seq, lease.token, lease.version),
        ):
            assert await verb(stage, wrong) == refused, (state, wrong)
        assert await _row(stage.admin, lease) == before, state
        if state == "running":
            assert await verb(stage, lease) == said
            assert (await durable.states(stage.gateway, lease.job_id))[0] == then
            continue
        # The lease that it once had is as good as none; a completion that was applied is known again.
        repeated = "repeated" if state == "done" and verb in (_complete, _complete_many) else refused
        assert await verb(stage, lease) == repeated, state
        assert await _row(stage.admin, lease) == before, state


@pytest.mark.invariant("J3")
@pytest.mark.case("C17")
@pytest.mark.parametrize("verb", HOLDERS, ids=lambda verb: verb.__name__[1:])
async def test_past_its_lease_a_holder_has_lost_by_every_verb_though_nobody_has_taken_the_chunk_back(
    stage: Stage, verb: Verb
) -> None:
    lease = await stage.chunk_in("running", expired=True)
    before = await _row(stage.admin, lease)
    assert await verb(stage, lease) == HOLDERS[verb][2]
    assert await _row(stage.admin, lease) == before


async def test_a_chunk_is_claimed_from_pending_and_retry_alone_and_by_compare_and_set(stage: Stage) -> None:
    for state in CHUNK_STATES:
        lease = await stage.chunk_in(state)
        version = (await _row(stage.admin, lease))["lease_version"]
        for wrong in (version - 1, version + 1):
            assert await durable.claim_chunk(stage.worker, lease.job_id, 1, wrong) is None, state
        claimed = await durable.claim_chunk(stage.worker, lease.job_id, 1, version)
        assert (claimed is not None) == (state in ("pending", "retry")), state
        if claimed is not None:
            assert claimed.version == version + 1
            assert await durable.claim_chunk(stage.worker, lease.job_id, 1, version) is None, "the loser"
            assert await durable.complete(stage.worker, claimed) == ("applied", False)


async def test_a_chunk_is_reaped_from_running_alone_and_once(stage: Stage) -> None:
    for state in CHUNK_STATES:
        lease = await stage.chunk_in(state, expired=True)
        if state != "running":
            await stage.admin.execute(
                f"update {CHUNK} set lease_expires_at = now() - interval '1 s' where status = 'running'"
            )
        before = await _row(stage.admin, lease)
        reaped = await durable.reap(stage.worker)
        assert [(r["job_id"], r["status"], r["holder"]) for r in reaped] == (
            [(lease.job_id, "retry", durable.HOLDER)] if state == "running" else []
        )
        if state != "running":
            assert await _row(stage.admin, lease) == before
        assert await durable.reap(stage.worker) == []


@pytest.mark.invariant("J4")
async def test_only_resolve_moves_a_chunk_that_waits_for_a_person(stage: Stage) -> None:
    for state in CHUNK_STATES:
        for decision in ("retry", "done", "failed"):
            lease = await stage.chunk_in(state)
            before = await _row(stage.admin, lease)
            answer = await durable.resolve(stage.gateway, lease.job_id, 1, decision)
            if state == "needs_review":
                assert (answer["outcome"], answer["chunk_status"]) == ("applied", decision)
                assert (await durable.states(stage.gateway, lease.job_id))[0] == decision
            else:
                assert (answer["outcome"], answer["chunk_status"]) == ("too_late", state)
                assert await _row(stage.admin, lease) == before
    assert (await durable.resolve(stage.gateway, UUID(int=7), 1, "done"))["outcome"] == "unknown"


async def test_statuses_of_chunks_move_from_those_expected_alone_and_whoever_ran_has_lost(stage: Stage) -> None:
    for state in CHUNK_STATES:
        for to in CHUNK_STATES:
            lease = await stage.chunk_in(state)
            move = "select relay.durable_set_chunk_statuses($1, $2, $3::text[], $4, '{}', '{1}')"
            if to == "running":
                with pytest.raises(asyncpg.PostgresError) as raised:
                    await stage.gateway.fetchval(move, TENANT, lease.job_id, [state], to)
                assert raised.value.sqlstate == "S2020"
                continue
            others = [other for other in CHUNK_STATES if other != state]
            assert await stage.gateway.fetchval(move, TENANT, lease.job_id, others, to) == 0
            before = await _row(stage.admin, lease)
            assert await stage.gateway.fetchval(move, TENANT, lease.job_id, [state], to) == 1
            after = await _row(stage.admin, lease)
            assert (after["status"], after["lease_token"]) == (to, None)
            assert after["lease_version"] == before["lease_version"] + 1
            assert await durable.heartbeat(stage.worker, lease) == ["stale"]


# --- jobs ---------------------------------------------------------------------------------------

# Action -> from which status to which.
CONTROLS: dict[str, dict[str, tuple[str, str]]] = {
    "pause": {
        "queued": ("applied", "paused"), "running": ("applied", "paused"), "paused": ("already", "paused"),
        "needs_review": ("refused", "needs_review"),
    },
    "resume": {
        "queued": ("already", "queued"), "running": ("already", "running"), "paused": ("applied", "queued"),
        "needs_review": ("refused", "needs_review"),
    },
    "cancel": {
        "queued": ("applied", "cancelled"), "running": ("applied", "cancelled"), "paused": ("applied", "cancelled"),
        "needs_review": ("refused", "needs_review"), "cancelled": ("already", "cancelled"),
    },
    # None of its chunks has failed here.
    "retry_failed": {
        "queued": ("already", "queued"), "running": ("already", "running"), "paused": ("already", "paused"),
        "needs_review": ("already", "needs_review"), "completed": ("already", "completed"),
        "completed_with_errors": ("already", "completed_with_errors"), "failed": ("already", "failed"),
        "cancelled": ("refused", "cancelled"),
    },
}  # fmt: skip


async def _put(admin: Connection, job_id: UUID, state: str) -> None:
    ended = state in ("completed", "completed_with_errors", "failed", "cancelled")
    await admin.execute(
        f"update {JOB} set status = $2, ended_at = case when $3 then now() end where job_id = $1", job_id, state, ended
    )


@pytest.mark.case("C24")
@pytest.mark.parametrize("action", CONTROLS)
async def test_a_control_action_does_what_the_table_says_and_says_what_it_did(stage: Stage, action: str) -> None:
    for state in JOB_STATES:
        job_id = await durable.submit(stage.gateway, 2)
        await _put(stage.admin, job_id, state)
        told = await durable.told(stage.gateway, job_id)
        outcome, then = CONTROLS[action].get(state, ("too_late", state))
        answer = await durable.control(stage.gateway, job_id, action)
        assert (answer["outcome"], answer["was"], answer["status"]) == (outcome, state, then)
        assert await durable.status(stage.gateway, job_id) == then
        news = (await durable.told(stage.gateway, job_id))[len(told) :]
        assert len(news) == (1 if outcome == "applied" else 0), (state, news)
    assert (await durable.control(stage.gateway, UUID(int=7), action))["outcome"] == "unknown"


_ON = {"queued", "running", "paused"}
_ENDS = {"completed", "completed_with_errors", "failed", "cancelled"}
MAY = {
    **{state: (_ON | _ENDS | {"needs_review"}) - {state} for state in _ON},
    "needs_review": _ENDS | {"queued", "running"},
    "failed": {"queued", "running"},
    "completed_with_errors": {"queued", "running"},
    "completed": set(),
    "cancelled": set(),
}


async def test_a_jobs_status_is_set_by_compare_and_set_and_the_loser_writes_nothing(stage: Stage) -> None:
    set_status = 'select relay.durable_set_job_status($1, $2, $3::text[], $4, $5, \'{"type": "note", "actor": "me"}\')'
    for state in JOB_STATES:
        job_id = await durable.submit(stage.gateway, 1)
        for to in JOB_STATES:
            await _put(stage.admin, job_id, state)
            notes = (await durable.told(stage.gateway, job_id)).count("note")
            others = [other for other in JOB_STATES if other != state]
            arguments = [TENANT, job_id, others, to, '{"priority": 7}']
            assert await stage.gateway.fetchval(set_status, *arguments) is False
            assert await durable.status(stage.gateway, job_id) == state
            arguments[2] = [state, "queued"]
            won = await stage.gateway.fetchval(set_status, *arguments)
            assert won == (to in MAY[state]), (state, to)
            found = await durable.job(stage.gateway, job_id)
            assert found is not None
            assert found["status"] == (to if won else state)
            assert (found["ended_at"] is not None) == (found["status"] in _ENDS)
            assert (await durable.told(stage.gateway, job_id)).count("note") == notes + won
    for extra in ('{"status": "done"}', '{"job_id": "x"}', '{"lease_token": "x"}', '{"tenant_id": "b"}', "[]"):
        for sql, arguments in (
            ("select relay.durable_set_job_status($1, $2, '{queued}', 'running', $3)", [TENANT, job_id, extra]),
            ("select relay.durable_update_job($1, $2, $3)", [TENANT, job_id, extra]),
        ):
            assert await _raising(stage.gateway.fetchval(sql, *arguments)) == "S2020"
    extra = '{"priority": 3, "last_error": "e", "max_attempts": 9, "params": {"a": 1}}'
    assert await stage.gateway.fetchval("select relay.durable_update_job($1, $2, $3)", TENANT, job_id, extra) is True
    found = await durable.job(stage.gateway, job_id)
    assert found is not None
    assert [found[n] for n in ("priority", "last_error", "max_attempts", "params")] == [3, "e", 9, '{"a": 1}']
    unknown = await stage.gateway.fetchval("select relay.durable_update_job($1, $2, $3)", TENANT, UUID(int=7), extra)
    assert unknown is False


async def _row(admin: Connection, lease: Lease) -> asyncpg.Record:
    row = await admin.fetchrow(f"select * from {CHUNK} where job_id = $1 and seq = $2", lease.job_id, lease.seq)
    assert row is not None
    return row
